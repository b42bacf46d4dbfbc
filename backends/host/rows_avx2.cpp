// Row loops for AVX2 with F16C. Every function carries its own target instead of a flag for the
// file: an inline function of a shared header is then never emitted for this set, where the linker
// could pick that copy for everybody.

#include "host/rows_table.hpp"

#ifdef EPCOMM_ROWS_X86

#include "epcomm/formats.h"

#define EPCOMM_AVX2 __attribute__((target("avx2,f16c"), always_inline))
#define EPCOMM_AVX2_ENTRY __attribute__((target("avx2,f16c")))

namespace epcomm::host {
namespace {

// 16 columns in float32. Which column is in which lane is the format's choice: `a` the even and `b`
// the odd ones (bf16, where that costs one instruction each), or the first and the last 8.
struct Pair {
  __m256 a;
  __m256 b;
};
constexpr size_t kColumns = 16;

EPCOMM_AVX2 inline __m256i load_bytes(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

template <bool kStream>
EPCOMM_AVX2 inline void store_bytes(std::byte* at, __m256i value) {
  if constexpr (kStream) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(at), value);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value);
  }
}

struct Bfloat16 {
  static constexpr RowType kType = RowType::kBfloat16;
  static constexpr size_t kSize = 2;

  EPCOMM_AVX2 static inline Pair load(const std::byte* at) {
    const __m256i codes = load_bytes(at);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(codes, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(codes, _mm256_set1_epi32(int(0xffff0000u))))};
  }

  // The rounded code in the upper half of each lane.
  EPCOMM_AVX2 static inline __m256i round(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sum, quiet, nan);
  }

  template <bool kStream>
  EPCOMM_AVX2 static inline void store(std::byte* at, const Pair& pair) {
    const __m256i even = _mm256_srli_epi32(round(pair.a), 16);
    store_bytes<kStream>(at, _mm256_blend_epi16(even, round(pair.b), 0xaa));
  }

  EPCOMM_AVX2 static inline Pair arrange(__m256 low, __m256 high) {
    // Even and odd lanes of both, then the 64-bit quarters in order.
    const __m256 even = _mm256_shuffle_ps(low, high, 0x88);
    const __m256 odd = _mm256_shuffle_ps(low, high, 0xdd);
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8)),
            _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8))};
  }

  // Lanes below 2^16 to 16 adjacent words, in the order of the columns.
  EPCOMM_AVX2 static inline __m256i pack_words(__m256i a, __m256i b) {
    return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  }

  // 0x80 in the words of negative columns.
  EPCOMM_AVX2 static inline __m256i signs(const std::byte* at) {
    return _mm256_and_si256(_mm256_srli_epi16(load_bytes(at), 8), _mm256_set1_epi16(0x80));
  }
};

struct HalvesOf16 {
  EPCOMM_AVX2 static inline Pair arrange(__m256 low, __m256 high) { return {low, high}; }

  EPCOMM_AVX2 static inline __m256i pack_words(__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
  }
};

struct Float16 : HalvesOf16 {
  static constexpr RowType kType = RowType::kFloat16;
  static constexpr size_t kSize = 2;

  EPCOMM_AVX2 static inline __m256i signs(const std::byte* at) {
    return _mm256_and_si256(_mm256_srli_epi16(load_bytes(at), 8), _mm256_set1_epi16(0x80));
  }

  EPCOMM_AVX2 static inline Pair load(const std::byte* at) {
    const __m256i codes = load_bytes(at);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(codes)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(codes, 1))};
  }

  template <bool kStream>
  EPCOMM_AVX2 static inline void store(std::byte* at, const Pair& pair) {
    const __m128i low = _mm256_cvtps_ph(pair.a, _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(pair.b, _MM_FROUND_TO_NEAREST_INT);
    store_bytes<kStream>(at, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
  }
};

struct Float32 : HalvesOf16 {
  static constexpr RowType kType = RowType::kFloat32;
  static constexpr size_t kSize = 4;

  EPCOMM_AVX2 static inline __m256i signs(const std::byte* at) {
    const __m256i mask = _mm256_set1_epi32(0x80);
    return pack_words(_mm256_and_si256(_mm256_srli_epi32(load_bytes(at), 24), mask),
                      _mm256_and_si256(_mm256_srli_epi32(load_bytes(at + 32), 24), mask));
  }

  EPCOMM_AVX2 static inline Pair load(const std::byte* at) {
    return {_mm256_castsi256_ps(load_bytes(at)), _mm256_castsi256_ps(load_bytes(at + 32))};
  }

  template <bool kStream>
  EPCOMM_AVX2 static inline void store(std::byte* at, const Pair& pair) {
    store_bytes<kStream>(at, _mm256_castps_si256(pair.a));
    store_bytes<kStream>(at + 32, _mm256_castps_si256(pair.b));
  }
};

// The hardware's prefetchers start anew at each row and stop at each page: a hint this many bytes
// ahead, never past the row, was worth 15 to 30 % on rows of 14 KB out of memory.
constexpr size_t kAhead = 1024;

// What is summed into where; columns count from the start of the row.
struct Sum {
  std::byte* out;
  const std::byte* const* rows;
  const float* weights;
  int num_rows;
  const float* bias;
};

template <typename Format, int kPairs, bool kWeighted, bool kStream>
EPCOMM_AVX2 inline void reduce_block(const Sum& sum, size_t column, bool prefetch = false) {
  Pair total[kPairs];
#pragma GCC unroll 8
  for (int p = 0; p < kPairs; ++p) total[p] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int row = 0; row < sum.num_rows; ++row) {
    const std::byte* at = sum.rows[row] + column * Format::kSize;
    __m256 weight = _mm256_setzero_ps();
    if constexpr (kWeighted) weight = _mm256_set1_ps(sum.weights[row]);
    if (prefetch) {
      constexpr size_t kBytes = kPairs * kColumns * Format::kSize;
#pragma GCC unroll 4
      for (size_t line = 0; line < kBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(at + kAhead + line), _MM_HINT_T0);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      Pair value = Format::load(at + p * int(kColumns * Format::kSize));
      if constexpr (kWeighted) {
        value = {_mm256_mul_ps(weight, value.a), _mm256_mul_ps(weight, value.b)};
      }
      total[p] = {_mm256_add_ps(total[p].a, value.a), _mm256_add_ps(total[p].b, value.b)};
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPairs; ++p) {
    const size_t first = column + size_t(p) * kColumns;
    if (sum.bias != nullptr) {
      const Pair bias =
          Format::arrange(_mm256_loadu_ps(sum.bias + first), _mm256_loadu_ps(sum.bias + first + 8));
      total[p] = {_mm256_add_ps(total[p].a, bias.a), _mm256_add_ps(total[p].b, bias.b)};
    }
    Format::template store<kStream>(sum.out + first * Format::kSize, total[p]);
  }
}

template <typename Format, bool kWeighted, bool kStream>
EPCOMM_AVX2_ENTRY void reduce_row(const Sum& sum, size_t n) {
  constexpr int kPairs = 4;
  size_t column = 0;
  if constexpr (kStream) {
    // Streaming stores want aligned lines; an element that straddles a line never gets one.
    const uintptr_t address = reinterpret_cast<uintptr_t>(sum.out);
    if (address % Format::kSize != 0) return reduce_row<Format, kWeighted, false>(sum, n);
    column = (64 - address % 64) % 64 / Format::kSize;
    if (column > n) column = n;
    plain_reduce(Format::kType, sum.out, reinterpret_cast<const void* const*>(sum.rows),
                 sum.weights, sum.num_rows, sum.bias, 0, column);
  }
  for (; column + kPairs * kColumns <= n; column += kPairs * kColumns) {
    const bool prefetch = column + kPairs * kColumns + kAhead / Format::kSize <= n;
    reduce_block<Format, kPairs, kWeighted, kStream>(sum, column, prefetch);
  }
  for (; column + kColumns <= n; column += kColumns) {
    reduce_block<Format, 1, kWeighted, kStream>(sum, column);
  }
  if (column < n) {
    plain_reduce(Format::kType, sum.out, reinterpret_cast<const void* const*>(sum.rows),
                 sum.weights, sum.num_rows, sum.bias, column, n);
  }
}

template <bool kStream>
EPCOMM_AVX2_ENTRY void reduce(RowType type, void* out, const void* const* rows,
                              const float* weights, int num_rows, const float* bias, size_t n) {
  const FloatState state;
  const Sum sum = {static_cast<std::byte*>(out), reinterpret_cast<const std::byte* const*>(rows),
                   weights, num_rows, bias};
  const bool weighted = weights != nullptr;
  switch (type) {
    case RowType::kFloat32:
      return weighted ? reduce_row<Float32, true, kStream>(sum, n)
                      : reduce_row<Float32, false, kStream>(sum, n);
    case RowType::kFloat16:
      return weighted ? reduce_row<Float16, true, kStream>(sum, n)
                      : reduce_row<Float16, false, kStream>(sum, n);
    case RowType::kBfloat16:
      return weighted ? reduce_row<Bfloat16, true, kStream>(sum, n)
                      : reduce_row<Bfloat16, false, kStream>(sum, n);
  }
}

// The e4m3 codes of finite magnitudes below 464, plus kCodeBias: a power of two 2^20 times that of
// the magnitude's leading bit (of 2^-6 below that: e4m3's subnormals) has as its last mantissa bit
// the value of the code's last bit, so that adding it rounds to nearest even. What the addition
// leaves in the mantissa is the code's mantissa with its leading one.
constexpr int kCodeBias = (127 - 6) << 3;

EPCOMM_AVX2 inline __m256i biased_codes(__m256 magnitude) {
  const __m256i bits = _mm256_castps_si256(magnitude);
  const __m256i power = _mm256_max_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000)),
                                         _mm256_set1_epi32((127 - 6) << 23));
  const __m256i large = _mm256_add_epi32(power, _mm256_set1_epi32(20 << 23));
  const __m256i sum = _mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_castsi256_ps(large)));
  return _mm256_add_epi32(_mm256_sub_epi32(sum, large), _mm256_srli_epi32(power, 20));
}

EPCOMM_AVX2 inline __m256 absolute(__m256 value) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fffffff)));
}

// Codes of 16 columns, one in each word.
template <typename Format>
EPCOMM_AVX2 inline __m256i code_words(const std::byte* at, __m256 inverse) {
  const Pair value = Format::load(at);
  const __m256i biased =
      Format::pack_words(biased_codes(_mm256_mul_ps(absolute(value.a), inverse)),
                         biased_codes(_mm256_mul_ps(absolute(value.b), inverse)));
  return _mm256_or_si256(_mm256_sub_epi16(biased, _mm256_set1_epi16(kCodeBias)), Format::signs(at));
}

EPCOMM_AVX2 inline uint32_t largest_lane(__m256i lanes) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return uint32_t(_mm_cvtsi128_si32(half));
}

template <typename Format>
EPCOMM_AVX2_ENTRY void quantize_row(uint8_t* codes, float* scales, const std::byte* x, size_t n,
                                    bool round_scale) {
  constexpr int kPairs = kScaleGroup / int(kColumns);
  size_t first = 0;
  for (; first + kScaleGroup <= n; first += kScaleGroup) {
    const std::byte* at = x + first * Format::kSize;
    __m256i largest = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      const Pair value = Format::load(at + size_t(p) * kColumns * Format::kSize);
      largest = _mm256_max_epi32(largest, _mm256_castps_si256(absolute(value.a)));
      largest = _mm256_max_epi32(largest, _mm256_castps_si256(absolute(value.b)));
    }
    const uint32_t amax = largest_lane(largest);
    if (amax >= 0x7f800000u) {  // NaN or infinity: rare, and slow is good enough
      plain_quantize(Format::kType, codes, scales, x, first, first + kScaleGroup, round_scale);
      continue;
    }
    const float scale = group_scale(amax, round_scale);
    scales[first / kScaleGroup] = scale;
    const __m256 inverse = _mm256_set1_ps(inverse_scale(scale));
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; p += 2) {
      const std::byte* from = at + size_t(p) * kColumns * Format::kSize;
      const __m256i low = code_words<Format>(from, inverse);
      const __m256i high = code_words<Format>(from + kColumns * Format::kSize, inverse);
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + first + size_t(p) * kColumns), packed);
    }
  }
  if (first < n) plain_quantize(Format::kType, codes, scales, x, first, n, round_scale);
}

EPCOMM_AVX2_ENTRY void quantize(RowType type, uint8_t* codes, float* scales, const void* x,
                                size_t n, bool round_scale) {
  const FloatState state;
  const auto* from = static_cast<const std::byte*>(x);
  switch (type) {
    case RowType::kFloat32:
      return quantize_row<Float32>(codes, scales, from, n, round_scale);
    case RowType::kFloat16:
      return quantize_row<Float16>(codes, scales, from, n, round_scale);
    case RowType::kBfloat16:
      return quantize_row<Bfloat16>(codes, scales, from, n, round_scale);
  }
}

EPCOMM_AVX2_ENTRY void stream_copy(void* dst, const void* src, size_t bytes) {
  if (bytes < 2 * kAhead) return plain_copy(dst, src, bytes);
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const size_t head = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  plain_copy(to, from, head);
  size_t at = head;
  for (; at + 128 <= bytes; at += 128) {
    if (at + 128 + kAhead <= bytes) {
      _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead + 64), _MM_HINT_T0);
    }
    const __m256i a = load_bytes(from + at);
    const __m256i b = load_bytes(from + at + 32);
    const __m256i c = load_bytes(from + at + 64);
    const __m256i d = load_bytes(from + at + 96);
    store_bytes<true>(to + at, a);
    store_bytes<true>(to + at + 32, b);
    store_bytes<true>(to + at + 64, c);
    store_bytes<true>(to + at + 96, d);
  }
  plain_copy(to + at, from + at, bytes - at);
}

}  // namespace

const RowOps kAvx2Rows = {"avx2", plain_copy, reduce<false>, quantize, stream_copy, reduce<true>};

}  // namespace epcomm::host

#endif  // EPCOMM_ROWS_X86
