// Expert layout to rank layout: each token's rows, summed in the order of its picks.
#include "epcomm/permute.h"
#include "memory.cuh"
#include "rows.cuh"

namespace epcomm {
namespace {

__device__ int64_t source_of_row(const InvertArgs& args, int64_t row) {
  const void* at = offset_by(args.source, row * args.source_stride);
  return args.source_is64 ? load_item<int64_t>(at, args.source_aligned)
                          : int64_t(load_item<int32_t>(at, args.source_aligned));
}

}  // namespace

// Each pick's row; of several rows that name it the first.
extern "C" __global__ void __launch_bounds__(256)
    epcomm_unpermute_invert(const __grid_constant__ InvertArgs args) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.num_rows) return;
  const int64_t pick = source_of_row(args, row);
  if (pick < 0 || pick >= args.num_picks) return;
  // Unsigned: no row, -1, is larger than every row.
  atomicMin(reinterpret_cast<uint32_t*>(args.row_of) + pick, uint32_t(row));
}

extern "C" __global__ void __launch_bounds__(256)
    epcomm_unpermute_check(const __grid_constant__ InvertArgs args) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.num_rows) return;
  const int64_t pick = source_of_row(args, row);
  if (pick == -1) return;
  if (pick < 0 || pick >= args.num_picks || args.row_of[pick] != int32_t(row)) {
    atomicMax(reinterpret_cast<unsigned long long*>(args.bad_row),
              ~static_cast<unsigned long long>(row));
  }
}

namespace {

// A step of the sum that is written down: product and sum rounded apart.
__device__ float add_pick(float sum, float value, float weight, bool weighted) {
  return __fadd_rn(sum, weighted ? __fmul_rn(weight, value) : value);
}

// Whole 16-byte pieces, up to kRows rows on their way at once.
template <typename Format>
__device__ void sum_vector(const SumArgs& args, int64_t token, int lane) {
  constexpr int kRows = 8;
  const bool weighted = args.weights.type != kNoFloats;
  const uint8_t* const from = static_cast<const uint8_t*>(args.y.data);
  const int64_t pieces = args.y.units;
  uint8_t* const to = static_cast<uint8_t*>(args.z) + token * pieces * 16;
  int32_t row = -1;
  float weight = 0.0f;
  uint32_t rows = 0;
  const int64_t rounds = (pieces + blockDim.x - 1) / blockDim.x;
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t piece = round * blockDim.x + threadIdx.x;
    const bool inside = piece < pieces;
    float sum[Format::kPerPiece];
#pragma unroll
    for (int i = 0; i < Format::kPerPiece; ++i) sum[i] = 0.0f;
    for (int32_t slots = 0; slots < args.num_topk; slots += 32) {
      if (round == 0 || args.num_topk > 32) {
        rows = rows_of_token(args.row_of, token, args.num_topk, slots, lane, &row);
        if (weighted) weight = row >= 0 ? load_float(args.weights, row, 0) : 0.0f;
      }
      for (uint32_t left = rows; left != 0;) {
        Piece16 value[kRows];
        uint32_t bits = left;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (bits != 0) {
            const int64_t there = __shfl_sync(~0u, row, __ffs(int(bits)) - 1);
            if (inside) value[i] = load16(from + there * args.y.row_stride + piece * 16);
            bits &= bits - 1;
          }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (left != 0) {
            const float factor = __shfl_sync(~0u, weight, __ffs(int(left)) - 1);
            if (inside) {
#pragma unroll
              for (int j = 0; j < Format::kPerPiece; ++j) {
                sum[j] = add_pick(sum[j], Format::at(value[i], j), factor, weighted);
              }
            }
            left &= left - 1;
          }
        }
      }
    }
    if (inside) {
      Piece16 out;
#pragma unroll
      for (int i = 0; i < Format::kPerPiece; ++i) Format::set(&out, i, sum[i]);
      store16(to + piece * 16, out);
    }
  }
}

// Items of any address.
template <typename Format>
__device__ void sum_items(const SumArgs& args, int64_t token) {
  using Code = typename Format::Code;
  const bool weighted = args.weights.type != kNoFloats;
  const bool aligned = args.y.unit >= int32_t(sizeof(Code));
  Code* const to = static_cast<Code*>(args.z) + token * args.width;
  for (int64_t item = threadIdx.x; item < args.width; item += blockDim.x) {
    float sum = 0.0f;
    for (int32_t slot = 0; slot < args.num_topk; ++slot) {
      const int64_t row = args.row_of[token * args.num_topk + slot];
      if (row < 0) continue;
      const void* at = offset_by(args.y.data, row * args.y.row_stride + item * args.y.item_stride);
      const float weight = weighted ? load_float(args.weights, row, 0) : 0.0f;
      sum = add_pick(sum, Format::read(load_item<Code>(at, aligned)), weight, weighted);
    }
    to[item] = Format::write(sum);
  }
}

}  // namespace

// blockDim.x threads for each of blockDim.y tokens.
#define EPCOMM_UNPERMUTE(name, Format)                                    \
  extern "C" __global__ void __launch_bounds__(kRowThreads, 3)            \
      epcomm_unpermute_##name(const __grid_constant__ SumArgs args) {     \
    const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; \
    if (token >= args.num_tokens) return;                                 \
    if (args.vector) {                                                    \
      sum_vector<Format>(args, token, int(threadIdx.x % 32));             \
    } else {                                                              \
      sum_items<Format>(args, token);                                     \
    }                                                                     \
  }
EPCOMM_UNPERMUTE(float32, Float32)
EPCOMM_UNPERMUTE(float16, Float16)
EPCOMM_UNPERMUTE(bfloat16, Bfloat16)

}  // namespace epcomm
