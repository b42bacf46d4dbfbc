// Rows of floats to e4m3 codes and scales as the kernels' warps make them, in place in shared
// memory and through registers, against formats.h one by one: every kind of row and width, guarded
// on both sides.
//
//   quantize_test [--seed S] [--repeats N]

#include "warp.hpp"
// Behind what g++ needs to read them.
#include "epcomm/device/engine.h"
#include "quantize_shared.cuh"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace epcomm::testing {
namespace {

// Memory like shared memory, between guards that nobody may write, nor read where the address
// sanitizer looks.
class Guarded {
 public:
  explicit Guarded(int64_t bytes) : bytes_(bytes), all_(size_t(bytes) + 2 * kGuard, char(kFill)) {
    begin_ = all_.data() + (kGuard - uintptr_t(all_.data()) % 64);
    guard(true);
  }
  ~Guarded() { guard(false); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  char* data() { return begin_; }
  bool whole() {
    guard(false);
    bool good = true;
    for (char* at = all_.data(); at < begin_; ++at) good = good && uint8_t(*at) == kFill;
    for (char* at = begin_ + bytes_; at < all_.data() + all_.size(); ++at)
      good = good && uint8_t(*at) == kFill;
    guard(true);
    return good;
  }

 private:
  static constexpr int kGuard = 256;
  static constexpr uint8_t kFill = 0xa5;
  void guard([[maybe_unused]] bool on) {
#if defined(__SANITIZE_ADDRESS__)
    const auto change = on ? __asan_poison_memory_region : __asan_unpoison_memory_region;
    change(all_.data(), size_t(begin_ - all_.data()));
    change(begin_ + bytes_, size_t(all_.data() + all_.size() - begin_ - bytes_));
#endif
  }

  int64_t bytes_;
  std::vector<char> all_;
  char* begin_;
};

enum Kind { kAnyBits = 0, kNormal, kZeros, kMixed, kNaN, kSubnormal, kKinds };

template <typename Format>
struct Special;
template <>
struct Special<Float32> {
  static constexpr const char* kName = "float32";
  static constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kMantissa = 0x7fffffu;
};
template <>
struct Special<Float16> {
  static constexpr const char* kName = "float16";
  static constexpr uint32_t kSign = 0x8000u, kInfinity = 0x7c00u, kMantissa = 0x3ffu;
};
template <>
struct Special<Bfloat16> {
  static constexpr const char* kName = "bfloat16";
  static constexpr uint32_t kSign = 0x8000u, kInfinity = 0x7f80u, kMantissa = 0x7fu;
};

// Roughly normal: the sum of some even numbers.
float some_float(Random& random) {
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += double(random.below(1 << 20)) / (1 << 19) - 1;
  return float(sum);
}

template <typename Format>
std::vector<typename Format::Code> make_row(int64_t width, int kind, Random& random) {
  using S = Special<Format>;
  std::vector<typename Format::Code> row(static_cast<size_t>(width));
  for (auto& code : row) {
    const uint32_t any = uint32_t(random.next());
    uint32_t bits = 0;
    if (kind == kAnyBits) bits = any;
    if (kind == kNormal) bits = Format::write(some_float(random));
    if (kind == kMixed) {
      bits = Format::write(std::ldexp(some_float(random), int(random.below(60)) - 40));
      if (random.one_in(300)) bits = (any & S::kSign) | S::kInfinity;
      if (random.one_in(300)) bits = (any & S::kSign) | S::kInfinity | 1;
    }
    if (kind == kNaN) bits = S::kSign | S::kInfinity | S::kMantissa;
    if (kind == kSubnormal) bits = any & (S::kSign | S::kMantissa);
    code = typename Format::Code(bits);
  }
  return row;
}

// Codes and scales of channels of a row, as formats.h has them.
template <typename Format>
void expect_codes(const std::vector<typename Format::Code>& row, int64_t begin, int64_t channels,
                  bool round_scale, const float* scales, const uint8_t* codes, const char* what) {
  for (int64_t group = 0; group * kScaleGroup < channels; ++group) {
    const int64_t first = group * kScaleGroup;
    const int64_t end = first + kScaleGroup < channels ? first + kScaleGroup : channels;
    uint32_t amax = 0;
    for (int64_t i = first; i < end; ++i) {
      const uint32_t magnitude = finite_magnitude(Format::read(row[size_t(begin + i)]));
      if (magnitude > amax) amax = magnitude;
    }
    const float scale = group_scale(amax, round_scale);
    uint32_t seen;
    std::memcpy(&seen, scales + group, 4);
    EXPECT(seen == float_bits(scale), "%s: scale of group %lld from %lld of %zu is %08x, not %08x",
           what, (long long)group, (long long)begin, row.size(), seen, float_bits(scale));
    const float inverse = inverse_scale(scale);
    for (int64_t i = first; i < end; ++i) {
      const uint8_t want = f32_to_e4m3(Format::read(row[size_t(begin + i)]) * inverse);
      EXPECT(codes[i] == want, "%s: code of channel %lld of %zu is %02x, not %02x", what,
             (long long)(begin + i), row.size(), codes[i], want);
    }
  }
}

// Piece by piece, as dispatch.cu's warps have rows in their share of shared memory.
template <typename Format>
void check_in_place(int64_t width, int kind, int32_t room, Warp& warp, Random& random) {
  constexpr int kItem = sizeof(typename Format::Code);
  if (width * kItem % 16) return;
  const auto row = make_row<Format>(width, kind, random);
  const device::InPlace plan = device::quantize_in_place_plan(width, kItem, room);
  for (int64_t begin = 0; begin < width; begin += plan.piece_channels) {
    const int64_t left = width - begin;
    const int channels = int(left < plan.piece_channels ? left : plan.piece_channels);
    Guarded buffer(plan.buffer_bytes);
    std::memset(buffer.data(), 0x5a, size_t(plan.buffer_bytes));
    std::memcpy(buffer.data(), row.data() + begin, size_t(channels) * kItem);
    const int codes_at = device::scale_room(channels);
    warp.run([&](int lane) { quantize_in_place<Format>(buffer.data(), channels, codes_at, lane); });
    EXPECT(buffer.whole(), "%s: %d of %lld channels, %d bytes: written outside",
           Special<Format>::kName, channels, (long long)width, plan.buffer_bytes);
    expect_codes<Format>(row, begin, channels, false, reinterpret_cast<float*>(buffer.data()),
                         reinterpret_cast<uint8_t*>(buffer.data()) + codes_at,
                         Special<Format>::kName);
  }
}

// Through registers: two groups of a warp at a time, of rows that lie in any way.
template <typename Format>
void check_registers(int64_t width, int kind, Warp& warp, Random& random) {
  using Code = typename Format::Code;
  constexpr int kPer = Format::kPerPiece;
  const auto row = make_row<Format>(width, kind, random);
  const int64_t groups = (width + kScaleGroup - 1) / kScaleGroup;
  const bool vector = width % 8 == 0 && random.one_in(2), round_scale = random.one_in(2);
  const bool aligned = vector || random.one_in(2);
  const int64_t stride =
      vector ? int64_t(sizeof(Code)) : int64_t(sizeof(Code)) * 2 + (aligned ? 0 : 1);
  Guarded from(width * stride);
  for (int64_t i = 0; i < width; ++i) {
    std::memcpy(from.data() + i * stride, &row[size_t(i)], sizeof(Code));
  }
  Guarded codes_memory(width), scales_memory(groups * 4);
  uint8_t* const to = reinterpret_cast<uint8_t*>(codes_memory.data());
  float* const scales = reinterpret_cast<float*>(scales_memory.data());
  warp.run([&](int thread) {
    const int lane = thread % kCastLanes;
    for (int64_t base = 0; base < groups; base += 32 / kCastLanes) {
      const int64_t group = base + thread / kCastLanes;
      const Raw<Format> raw =
          load_raw<Format>(reinterpret_cast<const uint8_t*>(from.data()), stride, width, vector,
                           aligned, group < groups ? group : 0, lane);
      uint32_t codes[kCastItems / 4];
      const float scale = quantize_group<Format>(raw, round_scale, codes);
      if (group >= groups) continue;
      if (lane == 0) scales[group] = scale;
      for (int i = 0; i < Pieces<Format>::kCount; ++i) {
        const int64_t item = Pieces<Format>::item(group, i, lane);
        uint32_t* const four = codes + i * (kPer / 4);
        if (vector && item < width) store_codes<Format>(to + item, four);
        for (int j = 0; !vector && j < kPer && item + j < width; ++j) {
          to[item + j] = uint8_t(four[j / 4] >> (j % 4 * 8));
        }
      }
    }
  });
  EXPECT(from.whole() && codes_memory.whole() && scales_memory.whole(), "written outside");
  expect_codes<Format>(row, 0, width, round_scale, scales, to, Special<Format>::kName);
}

int main(int argc, char** argv) {
  Options options(argc, argv);
  Random random(uint64_t(options.number("seed", 1)));
  const int64_t repeats = options.number("repeats", 2);
  options.finish();
  set_deadline(120);
  Warp warp(&random);
  // A lane's pieces, groups, rounds, two rounds, and pieces of rows, each with and without a rest.
  const int64_t widths[] = {4,    8,    16,   24,   120,  124,  128,  132,  136,  248,  256,  384,
                            512,  520,  1000, 1016, 1024, 1032, 1152, 2040, 2048, 2056, 3072, 3080,
                            4096, 4136, 5120, 6144, 7160, 7168, 7176, 7240, 8192, 16640};
  // Of a warp: all that there is, without the copy engine, and as little as makes many pieces.
  const int32_t rooms[] = {device::kSendBytesMax / device::kSendWarps, 6272, 3072};
  int64_t rows = 0;
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (const int64_t width : widths) {
      for (int kind = 0; kind < kKinds; ++kind) {
        const int32_t room = rooms[random.below(3)];
        check_in_place<Float32>(width, kind, room, warp, random);
        check_in_place<Float16>(width, kind, room, warp, random);
        check_in_place<Bfloat16>(width, kind, room, warp, random);
        const int64_t odd = width <= 1200 ? width - random.below(4) : width;
        check_registers<Float32>(odd, kind, warp, random);
        check_registers<Float16>(odd, kind, warp, random);
        check_registers<Bfloat16>(odd, kind, warp, random);
        ++rows;
      }
    }
  }
  std::printf("%lld rows of each type, in place and through registers: as in formats.h\n",
              (long long)rows);
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::main(argc, argv); }
