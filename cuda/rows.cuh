// Row formats: how items lie in 16-byte pieces, and what they are as floats.
#pragma once

#include "casts.cuh"
#include "epcomm/formats.h"
#include "epcomm/permute.h"
#include "memory.cuh"

namespace epcomm {

struct Piece16 {
  uint32_t word[4];
};

__device__ inline Piece16 load16(const void* at) {
  const uint4 value = *static_cast<const uint4*>(at);
  return {{value.x, value.y, value.z, value.w}};
}
__device__ inline void store16(void* at, const Piece16& value) {
  *static_cast<uint4*>(at) = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}

struct Float32 {
  using Code = uint32_t;
  static constexpr int kPerPiece = 4;
  __device__ static float read(Code code) { return bits_float(code); }
  __device__ static Code write(float value) { return float_bits(value); }
  __device__ static float at(const Piece16& piece, int i) { return bits_float(piece.word[i]); }
  __device__ static void set(Piece16* piece, int i, float value) {
    piece->word[i] = float_bits(value);
  }
};

template <float (*Read)(uint16_t), uint16_t (*Write)(float)>
struct TwoBytes {
  using Code = uint16_t;
  static constexpr int kPerPiece = 8;
  __device__ static float read(Code code) { return Read(code); }
  __device__ static Code write(float value) { return Write(value); }
  __device__ static float at(const Piece16& piece, int i) {
    return Read(uint16_t(piece.word[i / 2] >> (i % 2 * 16)));
  }
  __device__ static void set(Piece16* piece, int i, float value) {
    const uint32_t code = uint32_t(Write(value)) << (i % 2 * 16);
    piece->word[i / 2] = i % 2 == 0 ? code : piece->word[i / 2] | code;
  }
};

using Float16 = TwoBytes<half_to_float, float_to_half>;
using Bfloat16 = TwoBytes<bf16_to_f32, float_to_bfloat>;

// One of the floats of a view, in float32.
__device__ inline float load_float(const FloatView& view, int64_t row, int64_t item) {
  const void* at = offset_by(view.data, row * view.row_stride + item * view.item_stride);
  switch (view.type) {
    case kFloat32:
      return load_item<float>(at, view.aligned);
    case kFloat16:
      return half_to_float(load_item<uint16_t>(at, view.aligned));
    case kBfloat16:
      return bf16_to_f32(load_item<uint16_t>(at, view.aligned));
    default:
      return __double2float_rn(load_item<double>(at, view.aligned));
  }
}

// The rows of a token, in order of its picks, as the lanes of a warp hold them: lane i has the
// row of pick `first + i`; the result has a bit for each that there is.
__device__ inline uint32_t rows_of_token(const int32_t* row_of, int64_t token, int32_t num_topk,
                                         int32_t first, int lane, int32_t* row) {
  const int32_t slot = first + lane;
  *row = slot < num_topk ? row_of[token * num_topk + slot] : -1;
  return __ballot_sync(~0u, *row >= 0);
}

}  // namespace epcomm
