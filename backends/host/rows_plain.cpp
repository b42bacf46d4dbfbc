// Row loops in portable C++: the reference that the vector tables equal bit for bit.
#include <algorithm>
#include <cstring>

#include "epcomm/formats.h"
#include "host/rows_table.hpp"

namespace epcomm::host {
namespace {

// Elements may lie at any address, so they are read and written as bytes.
struct Float32 {
  static constexpr size_t kSize = 4;
  static float load(const std::byte* at) {
    float value;
    std::memcpy(&value, at, kSize);
    return value;
  }
  static void store(std::byte* at, float value) { std::memcpy(at, &value, kSize); }
};

struct Float16 {
  static constexpr size_t kSize = 2;
  static float load(const std::byte* at) {
    uint16_t code;
    std::memcpy(&code, at, kSize);
    return f16_to_f32(code);
  }
  static void store(std::byte* at, float value) {
    const uint16_t code = f32_to_f16(value);
    std::memcpy(at, &code, kSize);
  }
};

struct Bfloat16 {
  static constexpr size_t kSize = 2;
  static float load(const std::byte* at) {
    uint16_t code;
    std::memcpy(&code, at, kSize);
    return bf16_to_f32(code);
  }
  static void store(std::byte* at, float value) {
    const uint16_t code = f32_to_bf16(value);
    std::memcpy(at, &code, kSize);
  }
};

// A block of columns stays in the first-level cache while the rows pass over it.
constexpr size_t kBlock = 256;

template <typename Format>
void reduce_as(std::byte* out, const std::byte* const* rows, const float* weights, int num_rows,
               const float* bias, size_t begin, size_t end) {
  float sum[kBlock];
  for (size_t first = begin; first < end; first += kBlock) {
    const size_t count = std::min(kBlock, end - first);
    std::fill_n(sum, count, 0.0f);
    for (int row = 0; row < num_rows; ++row) {
      const std::byte* at = rows[row] + first * Format::kSize;
      if (weights == nullptr) {
        for (size_t i = 0; i < count; ++i) sum[i] += Format::load(at + i * Format::kSize);
      } else {
        const float weight = weights[row];
        for (size_t i = 0; i < count; ++i) sum[i] += weight * Format::load(at + i * Format::kSize);
      }
    }
    if (bias != nullptr) {
      for (size_t i = 0; i < count; ++i) sum[i] += bias[first + i];
    }
    for (size_t i = 0; i < count; ++i) Format::store(out + (first + i) * Format::kSize, sum[i]);
  }
}

template <typename Format>
void quantize_as(uint8_t* codes, float* scales, const std::byte* x, size_t begin, size_t n,
                 bool round_scale) {
  for (size_t first = begin; first < n; first += kScaleGroup) {
    const size_t last = std::min(n, first + kScaleGroup);
    uint32_t amax = 0;
    for (size_t i = first; i < last; ++i) {
      amax = std::max(amax, finite_magnitude(Format::load(x + i * Format::kSize)));
    }
    const float scale = group_scale(amax, round_scale);
    const float inverse = inverse_scale(scale);
    std::memcpy(scales + first / kScaleGroup, &scale, sizeof scale);
    for (size_t i = first; i < last; ++i) {
      codes[i] = quantize_e4m3(Format::load(x + i * Format::kSize), inverse);
    }
  }
}

void reduce(RowType type, void* out, const void* const* rows, const float* weights, int num_rows,
            const float* bias, size_t n) {
  const FloatState state;
  plain_reduce(type, out, rows, weights, num_rows, bias, 0, n);
}

void quantize(RowType type, uint8_t* codes, float* scales, const void* x, size_t n,
              bool round_scale) {
  const FloatState state;
  plain_quantize(type, codes, scales, x, 0, n, round_scale);
}

}  // namespace

void plain_copy(void* dst, const void* src, size_t bytes) {
  if (bytes != 0) std::memcpy(dst, src, bytes);
}

void plain_reduce(RowType type, void* out, const void* const* rows, const float* weights,
                  int num_rows, const float* bias, size_t begin, size_t end) {
  auto* to = static_cast<std::byte*>(out);
  auto* from = reinterpret_cast<const std::byte* const*>(rows);
  switch (type) {
    case RowType::kFloat32:
      return reduce_as<Float32>(to, from, weights, num_rows, bias, begin, end);
    case RowType::kFloat16:
      return reduce_as<Float16>(to, from, weights, num_rows, bias, begin, end);
    case RowType::kBfloat16:
      return reduce_as<Bfloat16>(to, from, weights, num_rows, bias, begin, end);
  }
}

void plain_quantize(RowType type, uint8_t* codes, float* scales, const void* x, size_t begin,
                    size_t n, bool round_scale) {
  auto* from = static_cast<const std::byte*>(x);
  switch (type) {
    case RowType::kFloat32:
      return quantize_as<Float32>(codes, scales, from, begin, n, round_scale);
    case RowType::kFloat16:
      return quantize_as<Float16>(codes, scales, from, begin, n, round_scale);
    case RowType::kBfloat16:
      return quantize_as<Bfloat16>(codes, scales, from, begin, n, round_scale);
  }
}

const RowOps kPlainRows = {"plain", plain_copy, reduce, quantize, plain_copy, reduce};

}  // namespace epcomm::host
