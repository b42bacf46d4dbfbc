// Groups of channels to e4m3 codes with a scale: one text for epcomm.quantize and for rows that are
// quantised on their way. Bits are those of epcomm/formats.h.
#pragma once

#include "epcomm/cast.h"
#include "rows.cuh"

namespace epcomm {

// The channels of one group that one of kCastLanes lanes holds: pieces of 16 bytes of floats;
// pieces of neighbours lie side by side.
template <typename Format>
struct Pieces {
  static constexpr int kCount = kCastItems / Format::kPerPiece;
  __device__ static int64_t item(int64_t group, int piece, int lane) {
    return group * kScaleGroup + (piece * kCastLanes + lane) * Format::kPerPiece;
  }
};

// What a lane has of a group, as it lies in memory: whole pieces, or codes one by one.
template <typename Format>
struct Raw {
  Piece16 piece[Pieces<Format>::kCount];
};

// Channels from `width` on are zeros.
template <typename Format>
__device__ inline Raw<Format> load_raw(const uint8_t* row, int64_t item_stride, int64_t width,
                                       bool vector, bool aligned, int64_t group, int lane) {
  using Code = typename Format::Code;
  constexpr int kPer = Format::kPerPiece;
  Raw<Format> raw{};
#pragma unroll
  for (int i = 0; i < Pieces<Format>::kCount; ++i) {
    const int64_t first = Pieces<Format>::item(group, i, lane);
    if (vector) {
      if (first < width) raw.piece[i] = load16(row + first * int64_t(sizeof(Code)));
      continue;
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int64_t item = first + j;
      if (item < width) {
        const Code code = load_item<Code>(row + item * item_stride, aligned);
        raw.piece[i].word[j * int(sizeof(Code)) / 4] |= uint32_t(code)
                                                        << (j * int(sizeof(Code)) % 4 * 8);
      }
    }
  }
  return raw;
}

// All lanes of the warp; the group's scale, and this lane's codes, four to a word, piece by piece.
template <typename Format>
__device__ inline float quantize_group(const Raw<Format>& raw, bool round_scale, uint32_t* codes) {
  constexpr int kPer = Format::kPerPiece;
  float value[kCastItems];
  // A maximum of floats passes over NaN; infinities, which must not count, are rare.
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kCastItems; ++i) {
    value[i] = Format::at(raw.piece[i / kPer], i % kPer);
    most = fmaxf(most, fabsf(value[i]));
  }
#pragma unroll
  for (int far = kCastLanes / 2; far > 0; far /= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, far));
  }
  uint32_t amax = float_bits(most);
  if (__any_sync(~0u, amax >= 0x7f800000u)) {
    amax = 0;
#pragma unroll
    for (int i = 0; i < kCastItems; ++i) amax = max(amax, finite_magnitude(value[i]));
#pragma unroll
    for (int far = kCastLanes / 2; far > 0; far /= 2) {
      amax = max(amax, __shfl_xor_sync(~0u, amax, far));
    }
  }
  const float scale = group_scale(amax, round_scale);
  const float inverse = inverse_scale(scale);
#pragma unroll
  for (int j = 0; j < kCastItems / 4; ++j) {
    const float* const four = value + 4 * j;
    codes[j] = two_codes(__fmul_rn(four[0], inverse), __fmul_rn(four[1], inverse)) |
               two_codes(__fmul_rn(four[2], inverse), __fmul_rn(four[3], inverse)) << 16;
  }
  return scale;
}

// kPerPiece codes of a piece as one word.
template <typename Format>
__device__ inline void store_codes(uint8_t* to, const uint32_t* codes) {
  if constexpr (Format::kPerPiece == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = codes[0];
  }
}

}  // namespace epcomm
