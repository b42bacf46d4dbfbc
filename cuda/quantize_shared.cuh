// Rows of floats in shared memory to e4m3 codes with scales, over the floats themselves. Four lanes
// have a group each, so that its largest magnitude takes two shuffles, and maxima of 16-bit floats
// are taken two at a time. Bits are those of epcomm/formats.h, as in quantize.cuh.
#pragma once

#include "quantize.cuh"

namespace epcomm {

// The larger magnitudes of two words of items, with any sign. NaN is passed over; of two the result
// is one, which counts as more than infinity.
template <typename Format>
struct Magnitudes;

template <>
struct Magnitudes<Float32> {
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    return float_bits(fmaxf(fabsf(bits_float(a)), fabsf(bits_float(b))));
  }
};
template <>
struct Magnitudes<Float16> {
  __device__ static uint32_t larger(uint32_t a, uint32_t b) { return larger_halves(a, b); }
};
template <>
struct Magnitudes<Bfloat16> {
  __device__ static uint32_t larger(uint32_t a, uint32_t b) { return larger_bfloats(a, b); }
};

// A round of a warp: eight groups, of which lane / kLanes is one.
template <typename Format>
struct Batch {
  static constexpr int kLanes = 4;  // of a group
  static constexpr int kPer = Format::kPerPiece;
  static constexpr int kPieces = kScaleGroup / (kLanes * kPer);  // of a lane, in a round
  static constexpr int kRound = 32 / kLanes * kScaleGroup;       // channels
  // That a warp does together: as many as two have maxima in one word.
  static constexpr int kRounds = kPer == 8 ? 2 : 1;
  // A lane's i-th piece of a round begins at this channel. Groups begin with different pieces:
  // their distance is a multiple of all banks.
  __device__ static int channel(int i, int lane) {
    const int group = lane / kLanes;
    return group * kScaleGroup + ((i ^ (group % kPieces)) * kLanes + lane % kLanes) * kPer;
  }
};

// kRounds rounds of channels from `at` on, of the floats at `row`, of which there are `end`;
// kWhole: all of these rounds. Codes and scales may overlay the floats of these and earlier rounds.
template <typename Format, int kRounds, bool kWhole>
__device__ inline void quantize_batch(const uint8_t* row, int at, int end, uint8_t* codes,
                                      float* scales, int lane) {
  using B = Batch<Format>;
  constexpr int kItem = sizeof(typename Format::Code);
  constexpr int kPer = B::kPer, kPieces = B::kPieces;
  const auto larger = Magnitudes<Format>::larger;
  const int part = lane % B::kLanes;
  const auto inside = [&](int round, int i) {
    return kWhole || at + round * B::kRound + B::channel(i, lane) < end;
  };
  const auto load = [&](int round, int i) {
    return load16(row + (at + round * B::kRound + B::channel(i, lane)) * kItem);
  };
  Piece16 piece[kRounds][kPieces];
  uint32_t most[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) piece[r][i] = inside(r, i) ? load(r, i) : Piece16{};
  }
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    most[r] = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t* const word = piece[r][i].word;
      const uint32_t four = larger(larger(word[0], word[1]), larger(word[2], word[3]));
      most[r] = i == 0 ? four : larger(most[r], four);
    }
  }
  // Both rounds side by side in one word, then each pair of lanes has one of each.
  uint32_t all = most[0];
  if constexpr (kRounds == 2) {
    all = larger(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
  }
#pragma unroll
  for (int far = B::kLanes / 2; far > 0; far /= 2) {
    all = larger(all, __shfl_xor_sync(~0u, all, far));
  }
  const int own = part % kRounds;
  if constexpr (kPer == 8 && kRounds == 1) all = larger(all, all >> 16);
  if constexpr (kRounds == 2) all = own ? all >> 16 : all;
  constexpr uint32_t kMagnitude = kPer == 8 ? 0x7fffu : 0x7fffffffu;
  uint32_t amax = float_bits(Format::read(typename Format::Code(all & kMagnitude)));
  if (__any_sync(~0u, amax >= 0x7f800000u)) {  // rare: infinities must not count
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      uint32_t finite = 0;
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) {
        if (!inside(r, i)) continue;
        const Piece16 again = load(r, i);
#pragma unroll
        for (int j = 0; j < kPer; ++j) finite = max(finite, finite_magnitude(Format::at(again, j)));
      }
#pragma unroll
      for (int far = B::kLanes / 2; far > 0; far /= 2) {
        finite = max(finite, __shfl_xor_sync(~0u, finite, far));
      }
      if (r == own) amax = finite;
    }
  }
  const float scale = group_scale(amax, false);
  const float inverse = inverse_scale(scale);
  __syncwarp();  // all lanes have read what codes may overlay from here on
  const int group = at / kScaleGroup + own * (B::kRound / kScaleGroup) + lane / B::kLanes;
  if (part < kRounds && (kWhole || group * kScaleGroup < end)) scales[group] = scale;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const float times = kRounds == 1 ? inverse : __shfl_sync(~0u, inverse, r, 2);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto code = [&](int j) { return __fmul_rn(Format::at(piece[r][i], j), times); };
      uint32_t words[kPer / 4];
#pragma unroll
      for (int j = 0; j < kPer; j += 4)
        words[j / 4] = two_codes(code(j), code(j + 1)) | two_codes(code(j + 2), code(j + 3)) << 16;
      if (inside(r, i))
        store_codes<Format>(codes + at + r * B::kRound + B::channel(i, lane), words);
    }
  }
}

// A row of `channels` floats at the begin of `buffer`, a multiple of a piece of 16 bytes, becomes
// scales, then from bytes scale_room(channels) on codes. By any batch at least its channels fewer
// bytes than it has read are written: scales and codes stay behind what is still to be read.
template <typename Format>
__device__ inline void quantize_in_place(char* buffer, int channels, int codes_at, int lane) {
  using B = Batch<Format>;
  const uint8_t* const row = reinterpret_cast<const uint8_t*>(buffer);
  uint8_t* const codes = reinterpret_cast<uint8_t*>(buffer) + codes_at;
  float* const scales = reinterpret_cast<float*>(buffer);
  constexpr int kStep = B::kRounds * B::kRound;
  int at = 0;
  for (; at + kStep <= channels; at += kStep)
    quantize_batch<Format, B::kRounds, true>(row, at, channels, codes, scales, lane);
  if (B::kRounds > 1 && at + B::kRound <= channels) {
    quantize_batch<Format, 1, true>(row, at, channels, codes, scales, lane);
    at += B::kRound;
  }
  if (at < channels) quantize_batch<Format, 1, false>(row, at, channels, codes, scales, lane);
}

}  // namespace epcomm
