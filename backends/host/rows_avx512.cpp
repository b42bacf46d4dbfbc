// Row loops for AVX-512. Every function carries its own target instead of a flag for the
// file: an inline function of a shared header is then never emitted for this set, where the linker
// could pick that copy for everybody.

// The intrinsics' own headers trip this warning in GCC 12 (GCC PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "host/rows_table.hpp"

#ifdef EPCOMM_ROWS_X86

#include "epcomm/formats.h"

#define EPCOMM_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline))
#define EPCOMM_AVX512_ENTRY __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

namespace epcomm::host {
namespace {

// 32 columns in float32. Which column is in which lane is the format's choice: `a` the even and `b`
// the odd ones (bf16, where that costs one instruction each), or the first and the last 16.
struct Pair {
  __m512 a;
  __m512 b;
};
constexpr size_t kColumns = 32;
constexpr __mmask32 kAll = 0xffffffffu;

struct Bfloat16 {
  static constexpr RowType kType = RowType::kBfloat16;
  static constexpr size_t kSize = 2;

  EPCOMM_AVX512 static inline Pair load(const std::byte* at, __mmask32 mask) {
    const __m512i codes = _mm512_maskz_loadu_epi16(mask, at);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(codes, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(codes, _mm512_set1_epi32(int(0xffff0000u))))};
  }

  // The rounded code in the upper half of each lane. (vcvtneps2bf16 flushes subnormals.)
  EPCOMM_AVX512 static inline __m512i round(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
  }

  EPCOMM_AVX512 static inline __m512i pack(const Pair& pair) {
    const __m512i even = _mm512_srli_epi32(round(pair.a), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, even, round(pair.b));
  }

  EPCOMM_AVX512 static inline void store(std::byte* at, __mmask32 mask, const Pair& pair) {
    _mm512_mask_storeu_epi16(at, mask, pack(pair));
  }

  EPCOMM_AVX512 static inline void stream(std::byte* at, const Pair& pair) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at), pack(pair));
  }

  EPCOMM_AVX512 static inline Pair arrange(__m512 low, __m512 high) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)};
  }

  // The low byte of each lane to 32 adjacent bytes, in the order of the columns.
  EPCOMM_AVX512 static inline __m256i pack_bytes(__m512i a, __m512i b) {
    const __m512i low = _mm512_and_si512(a, _mm512_set1_epi32(0xff));
    return _mm512_cvtepi32_epi16(_mm512_or_si512(low, _mm512_slli_epi32(b, 8)));
  }

  EPCOMM_AVX512 static inline __mmask32 negative(const std::byte* at) {
    return _mm512_movepi16_mask(_mm512_loadu_si512(at));
  }
};

struct HalvesOf32 {
  EPCOMM_AVX512 static inline Pair arrange(__m512 low, __m512 high) { return {low, high}; }

  EPCOMM_AVX512 static inline __m256i pack_bytes(__m512i a, __m512i b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(a)),
                                   _mm512_cvtepi32_epi8(b), 1);
  }
};

struct Float16 : HalvesOf32 {
  static constexpr RowType kType = RowType::kFloat16;
  static constexpr size_t kSize = 2;

  EPCOMM_AVX512 static inline __mmask32 negative(const std::byte* at) {
    return _mm512_movepi16_mask(_mm512_loadu_si512(at));
  }

  EPCOMM_AVX512 static inline Pair load(const std::byte* at, __mmask32 mask) {
    const __m512i codes = _mm512_maskz_loadu_epi16(mask, at);
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(codes)),
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64(codes, 1))};
  }

  EPCOMM_AVX512 static inline __m512i pack(const Pair& pair) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(pair.a, kNearestEven)),
                              _mm512_cvtps_ph(pair.b, kNearestEven), 1);
  }

  EPCOMM_AVX512 static inline void store(std::byte* at, __mmask32 mask, const Pair& pair) {
    _mm512_mask_storeu_epi16(at, mask, pack(pair));
  }

  EPCOMM_AVX512 static inline void stream(std::byte* at, const Pair& pair) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at), pack(pair));
  }
};

struct Float32 : HalvesOf32 {
  static constexpr RowType kType = RowType::kFloat32;
  static constexpr size_t kSize = 4;

  EPCOMM_AVX512 static inline __mmask32 negative(const std::byte* at) {
    return _mm512_movepi32_mask(_mm512_loadu_si512(at)) |
           __mmask32(_mm512_movepi32_mask(_mm512_loadu_si512(at + 64))) << 16;
  }

  EPCOMM_AVX512 static inline Pair load(const std::byte* at, __mmask32 mask) {
    return {_mm512_maskz_loadu_ps(__mmask16(mask), at),
            _mm512_maskz_loadu_ps(__mmask16(mask >> 16), at + 64)};
  }

  EPCOMM_AVX512 static inline void store(std::byte* at, __mmask32 mask, const Pair& pair) {
    _mm512_mask_storeu_ps(at, __mmask16(mask), pair.a);
    _mm512_mask_storeu_ps(at + 64, __mmask16(mask >> 16), pair.b);
  }

  EPCOMM_AVX512 static inline void stream(std::byte* at, const Pair& pair) {
    _mm512_stream_ps(reinterpret_cast<float*>(at), pair.a);
    _mm512_stream_ps(reinterpret_cast<float*>(at + 64), pair.b);
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

// kPairs * 32 columns at `column`; with fewer than 32 wanted, kPairs is 1 and `mask` says which.
template <typename Format, int kPairs, bool kWeighted, bool kStream>
EPCOMM_AVX512 inline void reduce_block(const Sum& sum, size_t column, __mmask32 mask,
                                       bool prefetch = false) {
  Pair total[kPairs];
#pragma GCC unroll 8
  for (int p = 0; p < kPairs; ++p) total[p] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int row = 0; row < sum.num_rows; ++row) {
    const std::byte* at = sum.rows[row] + column * Format::kSize;
    __m512 weight = _mm512_setzero_ps();
    if constexpr (kWeighted) weight = _mm512_set1_ps(sum.weights[row]);
    if (prefetch) {
      constexpr size_t kBytes = kPairs * kColumns * Format::kSize;
#pragma GCC unroll 8
      for (size_t line = 0; line < kBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(at + kAhead + line), _MM_HINT_T0);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      Pair value = Format::load(at + p * int(kColumns * Format::kSize), mask);
      if constexpr (kWeighted) {
        value = {_mm512_mul_ps(weight, value.a), _mm512_mul_ps(weight, value.b)};
      }
      total[p] = {_mm512_add_ps(total[p].a, value.a), _mm512_add_ps(total[p].b, value.b)};
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPairs; ++p) {
    const size_t first = column + size_t(p) * kColumns;
    if (sum.bias != nullptr) {
      const Pair bias =
          Format::arrange(_mm512_maskz_loadu_ps(__mmask16(mask), sum.bias + first),
                          _mm512_maskz_loadu_ps(__mmask16(mask >> 16), sum.bias + first + 16));
      total[p] = {_mm512_add_ps(total[p].a, bias.a), _mm512_add_ps(total[p].b, bias.b)};
    }
    if constexpr (kStream) {
      Format::stream(sum.out + first * Format::kSize, total[p]);
    } else {
      Format::store(sum.out + first * Format::kSize, mask, total[p]);
    }
  }
}

constexpr __mmask32 first_columns(size_t count) { return (__mmask32(1) << count) - 1; }

template <typename Format, bool kWeighted, bool kStream>
EPCOMM_AVX512_ENTRY void reduce_row(const Sum& sum, size_t n) {
  constexpr int kPairs = 4;
  size_t column = 0;
  if constexpr (kStream) {
    // Streaming stores want aligned lines; an element that straddles a line never gets one.
    const uintptr_t address = reinterpret_cast<uintptr_t>(sum.out);
    if (address % Format::kSize != 0) return reduce_row<Format, kWeighted, false>(sum, n);
    size_t head = (64 - address % 64) % 64 / Format::kSize;
    if (head > n) head = n;
    if (head != 0) reduce_block<Format, 1, kWeighted, false>(sum, 0, first_columns(head));
    column = head;
  }
  for (; column + kPairs * kColumns <= n; column += kPairs * kColumns) {
    const bool prefetch = column + kPairs * kColumns + kAhead / Format::kSize <= n;
    reduce_block<Format, kPairs, kWeighted, kStream>(sum, column, kAll, prefetch);
  }
  for (; column + kColumns <= n; column += kColumns) {
    reduce_block<Format, 1, kWeighted, kStream>(sum, column, kAll);
  }
  if (column < n) reduce_block<Format, 1, kWeighted, false>(sum, column, first_columns(n - column));
}

template <bool kStream>
EPCOMM_AVX512_ENTRY void reduce(RowType type, void* out, const void* const* rows,
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

EPCOMM_AVX512 inline __m512i biased_codes(__m512 magnitude) {
  const __m512i bits = _mm512_castps_si512(magnitude);
  const __m512i power = _mm512_max_epu32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7f800000)),
                                         _mm512_set1_epi32((127 - 6) << 23));
  const __m512i large = _mm512_add_epi32(power, _mm512_set1_epi32(20 << 23));
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_castsi512_ps(large)));
  return _mm512_add_epi32(_mm512_sub_epi32(sum, large), _mm512_srli_epi32(power, 20));
}

EPCOMM_AVX512 inline __m512 absolute(__m512 value) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff)));
}

template <typename Format>
EPCOMM_AVX512_ENTRY void quantize_row(uint8_t* codes, float* scales, const std::byte* x, size_t n,
                                      bool round_scale) {
  constexpr int kPairs = kScaleGroup / int(kColumns);
  size_t first = 0;
  for (; first + kScaleGroup <= n; first += kScaleGroup) {
    const std::byte* at = x + first * Format::kSize;
    Pair values[kPairs];
    __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      const Pair value = Format::load(at + size_t(p) * kColumns * Format::kSize, kAll);
      values[p] = {absolute(value.a), absolute(value.b)};
      largest = _mm512_max_epu32(largest, _mm512_castps_si512(values[p].a));
      largest = _mm512_max_epu32(largest, _mm512_castps_si512(values[p].b));
    }
    const uint32_t amax = _mm512_reduce_max_epu32(largest);
    if (amax >= 0x7f800000u) {  // NaN or infinity: rare, and slow is good enough
      plain_quantize(Format::kType, codes, scales, x, first, first + kScaleGroup, round_scale);
      continue;
    }
    const float scale = group_scale(amax, round_scale);
    scales[first / kScaleGroup] = scale;
    const __m512 inverse = _mm512_set1_ps(inverse_scale(scale));
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      const __m256i biased = Format::pack_bytes(biased_codes(_mm512_mul_ps(values[p].a, inverse)),
                                                biased_codes(_mm512_mul_ps(values[p].b, inverse)));
      const __m256i packed = _mm256_sub_epi8(biased, _mm256_set1_epi8(char(kCodeBias & 0xff)));
      const __mmask32 negative = Format::negative(at + size_t(p) * kColumns * Format::kSize);
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(codes + first + size_t(p) * kColumns),
          _mm256_mask_add_epi8(packed, negative, packed, _mm256_set1_epi8(char(0x80))));
    }
  }
  if (first < n) plain_quantize(Format::kType, codes, scales, x, first, n, round_scale);
}

EPCOMM_AVX512_ENTRY void quantize(RowType type, uint8_t* codes, float* scales, const void* x,
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

EPCOMM_AVX512_ENTRY void stream_copy(void* dst, const void* src, size_t bytes) {
  if (bytes < 2 * kAhead) return plain_copy(dst, src, bytes);
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const size_t head = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  plain_copy(to, from, head);
  size_t at = head;
  for (; at + 256 <= bytes; at += 256) {
    if (at + 256 + kAhead <= bytes) {
#pragma GCC unroll 4
      for (size_t line = 0; line < 256; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead + line), _MM_HINT_T0);
      }
    }
    const __m512i a = _mm512_loadu_si512(from + at);
    const __m512i b = _mm512_loadu_si512(from + at + 64);
    const __m512i c = _mm512_loadu_si512(from + at + 128);
    const __m512i d = _mm512_loadu_si512(from + at + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 192), d);
  }
  plain_copy(to + at, from + at, bytes - at);
}

}  // namespace

const RowOps kAvx512Rows = {"avx512", plain_copy,  reduce<false>,
                            quantize, stream_copy, reduce<true>};

}  // namespace epcomm::host

#endif  // EPCOMM_ROWS_X86
