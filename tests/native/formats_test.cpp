// Number formats against arithmetic in double: every code back, and float32 values around every
// rounding boundary. For the sanitizers: no conversion may rely on undefined shifts or casts.
//
//   formats_test [--seed S] [--values N]

#include "epcomm/formats.h"

#include <cmath>
#include <cstring>

#include "check.hpp"
#include "epcomm/device/engine.h"

namespace epcomm::testing {
namespace {

// A format of `exponent` and `mantissa` bits. Its finite values ascend with their codes.
struct Format {
  const char* name;
  int exponent, mantissa, bias;
  uint32_t largest;  // code of the largest finite value
};

constexpr Format kBf16{"bf16", 8, 7, 127, 0x7f7f};
constexpr Format kF16{"f16", 5, 10, 15, 0x7bff};
constexpr Format kE4m3{"e4m3", 4, 3, 7, 0x7e};

// The value of a positive finite code, exactly.
double value_of(const Format& format, uint32_t code) {
  const int exponent = int(code >> format.mantissa);
  const double mantissa =
      double(code & ((1u << format.mantissa) - 1)) / double(1u << format.mantissa);
  return exponent == 0 ? std::ldexp(mantissa, 1 - format.bias)
                       : std::ldexp(1 + mantissa, exponent - format.bias);
}

// Code nearest to a non-negative value, ties to the even code; `largest` + 1 where it would
// overflow.
uint32_t nearest(const Format& format, double value) {
  uint32_t low = 0, high = format.largest + 1;  // high stands for the next power of two's place
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value_of(format, middle) <= value ? low : high) = middle;
  }
  const double step = value_of(format, low + 1) - value_of(format, low);
  const double rest = value - value_of(format, low);
  if (rest * 2 > step || (rest * 2 == step && low % 2)) return low + 1;
  return low;
}

void check_value(float value) {
  const bool negative = std::signbit(value);
  const double magnitude = std::fabs(double(value));
  const uint32_t bits = float_bits(value);
  if (std::isnan(value)) {
    EXPECT(std::isnan(bf16_to_f32(f32_to_bf16(value))), "bf16 of NaN %08x", bits);
    EXPECT(std::isnan(f16_to_f32(f32_to_f16(value))), "f16 of NaN %08x", bits);
    EXPECT(f32_to_e4m3(value) == 0x7f, "e4m3 of NaN %08x is %02x", bits, f32_to_e4m3(value));
    return;
  }
  const bool infinite = std::isinf(value);
  const uint32_t bf16 = infinite ? 0x7f80 : nearest(kBf16, magnitude);
  EXPECT(f32_to_bf16(value) == (bf16 | (negative ? 0x8000u : 0u)), "bf16 of %08x is %04x, not %04x",
         bits, f32_to_bf16(value), bf16);
  const uint32_t f16 = infinite || magnitude >= 65536 ? 0x7c00 : nearest(kF16, magnitude);
  EXPECT(f32_to_f16(value) == (f16 | (negative ? 0x8000u : 0u)), "f16 of %08x is %04x, not %04x",
         bits, f32_to_f16(value), f16);
  const uint32_t e4m3 = magnitude >= 448 ? 0x7e : nearest(kE4m3, magnitude);
  EXPECT(f32_to_e4m3(value) == (e4m3 | (negative ? 0x80u : 0u)), "e4m3 of %08x is %02x, not %02x",
         bits, f32_to_e4m3(value), e4m3);
}

// A value, both signs, and its neighbours.
void check_around(double value) {
  const float middle = float(value);
  for (const float near :
       {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) {
    check_value(near);
    check_value(-near);
  }
}

void check_format(const Format& format) {
  for (uint32_t code = 0; code <= format.largest; ++code) {
    const double value = value_of(format, code);
    check_around(value);
    if (code < format.largest) check_around((value + value_of(format, code + 1)) / 2);
  }
}

// Every code back to float32: its exact value, and the same code again.
void check_codes() {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const double sign = code & 0x8000 ? -1 : 1;
    const uint32_t magnitude = code & 0x7fff;
    const float bf16 = bf16_to_f32(uint16_t(code)), f16 = f16_to_f32(uint16_t(code));
    if (magnitude <= kBf16.largest) {
      EXPECT(double(bf16) == sign * value_of(kBf16, magnitude), "bf16 %04x is %g", code,
             double(bf16));
      EXPECT(f32_to_bf16(bf16) == code, "bf16 %04x comes back as %04x", code, f32_to_bf16(bf16));
    } else {
      EXPECT(magnitude == 0x7f80 ? std::isinf(bf16) : std::isnan(bf16), "bf16 %04x", code);
    }
    if (magnitude <= kF16.largest) {
      EXPECT(double(f16) == sign * value_of(kF16, magnitude), "f16 %04x is %g", code, double(f16));
      EXPECT(f32_to_f16(f16) == code, "f16 %04x comes back as %04x", code, f32_to_f16(f16));
    } else {
      EXPECT(magnitude == 0x7c00 ? std::isinf(f16) : std::isnan(f16), "f16 %04x", code);
    }
    if (code > 0xff) continue;
    const float e4m3 = e4m3_to_f32(uint8_t(code));
    if ((code & 0x7f) <= kE4m3.largest) {
      EXPECT(double(e4m3) == (code & 0x80 ? -1 : 1) * value_of(kE4m3, code & 0x7f), "e4m3 %02x",
             code);
      EXPECT(f32_to_e4m3(e4m3) == code, "e4m3 %02x comes back as %02x", code, f32_to_e4m3(e4m3));
    } else {
      EXPECT(std::isnan(e4m3), "e4m3 %02x", code);
    }
  }
}

// Scales: as the contract writes them.
void check_scale(float amax) {
  const float floored = amax > 1e-4f ? amax : 1e-4f;
  const float scale = group_scale(float_bits(amax), false),
              rounded = group_scale(float_bits(amax), true);
  EXPECT(scale == floored / 448.0f, "scale of %g", double(amax));
  int exponent;
  const float fraction = std::frexp(scale, &exponent);
  const float want = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
  EXPECT(rounded == want && rounded >= scale, "rounded scale of %g is %g, not %g", double(amax),
         double(rounded), double(want));
}

// Rows that are quantised where they lie: everything has room, and no scale or code comes upon
// floats that are still to be read.
void check_in_place(int32_t room) {
  using device::scale_room;
  for (int64_t width = 4; width < 60000; width += 4) {
    for (const int32_t itemsize : {2, 4}) {
      if (width * itemsize % 16) continue;
      const device::InPlace plan = device::quantize_in_place_plan(width, itemsize, room);
      const int32_t most = plan.piece_channels;
      EXPECT(plan.buffer_bytes <= room && plan.buffer_bytes % 16 == 0, "%d bytes for %lld of %d",
             plan.buffer_bytes, (long long)width, itemsize);
      EXPECT(most > 0 && (most >= width || most % (4 * kScaleGroup) == 0), "%d of %lld", most,
             (long long)width);
      const int32_t codes = scale_room(most);
      EXPECT(codes % 16 == 0 && codes * kScaleGroup >= most * 4, "codes at %d of %d", codes, most);
      EXPECT(most * itemsize <= plan.buffer_bytes && codes + most <= plan.buffer_bytes,
             "%d channels of %d in %d bytes", most, itemsize, plan.buffer_bytes);
      // The least that a warp has read when it writes: eight groups at a time.
      for (int32_t read = 8 * kScaleGroup; read < most; read += 8 * kScaleGroup)
        EXPECT(codes + read <= read * itemsize, "%d channels of %d, %d read", most, itemsize, read);
    }
  }
}

int main(int argc, char** argv) {
  Options options(argc, argv);
  Random random(uint64_t(options.number("seed", 1)));
  const int64_t values = options.number("values", 200000);
  options.finish();
  set_deadline(120);
  check_codes();
  check_in_place(device::kSendBytesMax / device::kSendWarps);
  check_in_place(98 * 1024 / device::kSendWarps);
  for (const Format& format : {kBf16, kF16, kE4m3}) check_format(format);
  for (int64_t i = 0; i < values; ++i) {
    const uint32_t bits = uint32_t(random.next());
    check_value(bits_float(bits));
    const float amax = bits_float(finite_magnitude(bits_float(bits)));
    if (amax < 1e38f) check_scale(amax);
  }
  for (const float amax : {0.0f, 1e-45f, 1e-4f, 448.0f, 3.4e38f}) check_scale(amax);
  EXPECT(finite_magnitude(INFINITY) == 0 && finite_magnitude(-NAN) == 0,
         "NaN and infinity do not count");
  EXPECT(quantize_e4m3(NAN, 1.0f) == 0x7f && quantize_e4m3(-INFINITY, 1.0f) == 0xfe,
         "NaN and infinity as codes");
  std::printf("every code, every boundary and %lld other values: as in double\n",
              (long long)values);
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::main(argc, argv); }
