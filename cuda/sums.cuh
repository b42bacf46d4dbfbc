// A warp sums a token's rows by the written tree: ranks ascending, from +0.0, in float32, plus
// bias, rounded once. No instructions here: tests run this text on a host.
#pragma once

#include "casts.cuh"
#include "epcomm/formats.h"
#include "exchange.cuh"
#include "loads.cuh"

namespace epcomm::device {

// Row types by number: 0 float32, 1 float16, 2 bfloat16.
template <int kType>
struct Row;
template <>
struct Row<0> {
  static constexpr int kItem = 4, kPer16 = 4;
  __device__ static void add(float* sum, const uint4& v) {
    sum[0] += __uint_as_float(v.x);
    sum[1] += __uint_as_float(v.y);
    sum[2] += __uint_as_float(v.z);
    sum[3] += __uint_as_float(v.w);
  }
  __device__ static uint4 pack(const float* sum) {
    return make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                      __float_as_uint(sum[3]));
  }
  __device__ static float load(const char* at) { return *reinterpret_cast<const float*>(at); }
  __device__ static void store(char* at, float value) { *reinterpret_cast<float*>(at) = value; }
};
template <>
struct Row<1> {
  static constexpr int kItem = 2, kPer16 = 8;
  __device__ static void add2(float* sum, uint32_t v) {
    sum[0] += half_to_float(uint16_t(v & 0xffffu));
    sum[1] += half_to_float(uint16_t(v >> 16));
  }
  __device__ static void add(float* sum, const uint4& v) {
    add2(sum, v.x);
    add2(sum + 2, v.y);
    add2(sum + 4, v.z);
    add2(sum + 6, v.w);
  }
  __device__ static uint32_t pack2(const float* sum) {
    return uint32_t(float_to_half(sum[0])) | uint32_t(float_to_half(sum[1])) << 16;
  }
  __device__ static uint4 pack(const float* sum) {
    return make_uint4(pack2(sum), pack2(sum + 2), pack2(sum + 4), pack2(sum + 6));
  }
  __device__ static float load(const char* at) {
    return half_to_float(*reinterpret_cast<const uint16_t*>(at));
  }
  __device__ static void store(char* at, float value) {
    *reinterpret_cast<uint16_t*>(at) = float_to_half(value);
  }
};
template <>
struct Row<2> {
  static constexpr int kItem = 2, kPer16 = 8;
  __device__ static void add2(float* sum, uint32_t v) {
    sum[0] += __uint_as_float(v << 16);
    sum[1] += __uint_as_float(v & 0xffff0000u);
  }
  __device__ static void add(float* sum, const uint4& v) {
    add2(sum, v.x);
    add2(sum + 2, v.y);
    add2(sum + 4, v.z);
    add2(sum + 6, v.w);
  }
  __device__ static uint32_t pack2(const float* sum) { return two_bfloats(sum[0], sum[1]); }
  __device__ static uint4 pack(const float* sum) {
    return make_uint4(pack2(sum), pack2(sum + 2), pack2(sum + 4), pack2(sum + 6));
  }
  __device__ static float load(const char* at) {
    return bf16_to_f32(*reinterpret_cast<const uint16_t*>(at));
  }
  __device__ static void store(char* at, float value) {
    *reinterpret_cast<uint16_t*>(at) = float_to_bfloat(value);
  }
};

// The sum of 16 bytes of a row, with the bias, where it belongs.
template <int kType>
__device__ inline void put_sum(const ReduceArgs& a, int64_t token, uint32_t at, float* sum) {
  using R = Row<kType>;
  if (a.bias) {
    const float* bias = a.bias + token * a.bias_stride + at / R::kItem;
#pragma unroll
    for (int i = 0; i < R::kPer16; ++i) sum[i] += __ldg(bias + i);
  }
  *reinterpret_cast<uint4*>(a.out + token * a.out_stride + at) = R::pack(sum);
}

// Rows of rank `rank0 + lane`, as a lane sees them.
struct Source {
  const char* rows;  // its first row of this rank's tokens; null: no such rank
  int64_t stride;
  int rank;

  __device__ void open(const ReduceArgs& a, const Link& link, int of) {
    const Setup& s = a.setup;
    rank = of;
    rows = nullptr;
    stride = 0;
    if (rank >= s.num_ranks) return;
    stride = rank == s.rank ? a.own.row_stride : int64_t(a.row_bytes);
    rows = rank == s.rank ? a.own.data : link.peer_ptr(rank, s.state->peer_rows[rank]);
    rows += a.routing.base_to[rank] * stride;
  }
  // What must be read to know where the token's row is.
  __device__ int2 look_up(const ReduceArgs& a, int64_t token) const {
    if (!rows || token >= a.num_tokens) return make_int2(-1, 0);
    const int ranks = a.setup.num_ranks;
    return make_int2(a.routing.place[token * ranks + rank],
                     a.routing.block_base[token / kLayoutTokens * ranks + rank]);
  }
  __device__ const char* row(int2 found) const {
    return found.x < 0 ? nullptr : rows + (int64_t(found.y) + found.x) * stride;
  }
};

__device__ inline const char* row_of(const ReduceArgs& a, const Link& link, int64_t token,
                                     int rank) {
  Source source;
  source.open(a, link, rank);
  return source.row(source.look_up(a, token));
}

__device__ inline const char* from_lane(const char* at, int lane) {
  return reinterpret_cast<const char*>(
      __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(at), lane));
}

// One warp, a token with at most two rows: both are on their way together, and nothing is kept from
// piece to piece. Registers hold more in flight than the copy engine has requests for.
template <int kType>
__device__ inline void sum_two(const ReduceArgs& a, int64_t token, const char* first,
                               const char* second, int lane) {
  using R = Row<kType>;
  constexpr int kPieces = 7;
  const uint32_t row_bytes = uint32_t(a.row_bytes);
  for (uint32_t at = uint32_t(lane) * 16; at < row_bytes; at += 512 * kPieces) {
    uint4 x[kPieces], y[kPieces];
    if (first) {
#pragma unroll
      for (int u = 0; u < kPieces; ++u) {
        if (at + u * 512 < row_bytes) x[u] = load_once(first + at + u * 512);
      }
    }
    if (second) {
#pragma unroll
      for (int u = 0; u < kPieces; ++u) {
        if (at + u * 512 < row_bytes) y[u] = load_once(second + at + u * 512);
      }
    }
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
      if (at + u * 512 >= row_bytes) break;
      float sum[R::kPer16];
#pragma unroll
      for (int i = 0; i < R::kPer16; ++i) sum[i] = 0.0f;
      if (first) R::add(sum, x[u]);
      if (second) R::add(sum, y[u]);
      put_sum<kType>(a, token, at + u * 512, sum);
    }
  }
}

template <int kPieces, int kAt = 0>
__device__ __forceinline__ void load_pieces(uint4* x, const char* row, uint32_t left) {
  // Written on either way: what is not would have to live on from token to token.
  x[kAt] = make_uint4(0, 0, 0, 0);
  if (uint32_t(kAt) * 512 < left) x[kAt] = load_once_at<kAt * 512>(row);
  if constexpr (kAt + 1 < kPieces) load_pieces<kPieces, kAt + 1>(x, row, left);
}

// One warp, a token with exactly so many rows, those of the lanes in `goes`. All of them are on
// their way together, and nothing is kept from piece to piece.
template <int kType, int kRows, int kPieces>
__device__ inline void sum_rows(const ReduceArgs& a, int64_t token, const char* mine, unsigned goes,
                                int lane) {
  using R = Row<kType>;
  const uint32_t row_bytes = uint32_t(a.row_bytes);
  const char* row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = from_lane(mine, __ffs(int(goes)) - 1);
    goes &= goes - 1;
  }
  for (uint32_t at = uint32_t(lane) * 16; at < row_bytes; at += 512 * kPieces) {
    uint4 x[kRows][kPieces];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_pieces<kPieces>(x[r], row[r] + at, row_bytes - at);
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
      if (at + u * 512 >= row_bytes) break;
      float sum[R::kPer16];
#pragma unroll
      for (int i = 0; i < R::kPer16; ++i) sum[i] = 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) R::add(sum, x[r][u]);
      put_sum<kType>(a, token, at + u * 512, sum);
    }
  }
}

// One warp, a token that goes nowhere.
template <int kType>
__device__ inline void sum_none(const ReduceArgs& a, int64_t token, int lane) {
  using R = Row<kType>;
  for (uint32_t at = uint32_t(lane) * 16; at < uint32_t(a.row_bytes); at += 512) {
    float sum[R::kPer16];
#pragma unroll
    for (int i = 0; i < R::kPer16; ++i) sum[i] = 0.0f;
    put_sum<kType>(a, token, at, sum);
  }
}

// One warp, at most four rows, each as far ahead as registers go.
template <int kType>
__device__ inline void sum_few(const ReduceArgs& a, int64_t token, const char* mine, int lane) {
  const unsigned goes = __ballot_sync(kFullWarp, mine != nullptr);
  switch (__popc(goes)) {
    case 0:
      return sum_none<kType>(a, token, lane);
    case 1:
      return sum_rows<kType, 1, 14>(a, token, mine, goes, lane);
    case 2:
      return sum_rows<kType, 2, 7>(a, token, mine, goes, lane);
    case 3:
      return sum_rows<kType, 3, 5>(a, token, mine, goes, lane);
    default:
      return sum_rows<kType, 4, 4>(a, token, mine, goes, lane);
  }
}

// One warp, any number of rows, three of them on their way together. `mine` is lane's row if there
// are at most 32 ranks.
template <int kType>
__device__ inline void sum_many(const ReduceArgs& a, const Link& link, int64_t token,
                                const char* mine, int lane) {
  using R = Row<kType>;
  constexpr int kRows = 3, kPieces = 4;
  const int num_ranks = a.setup.num_ranks;
  const uint32_t row_bytes = uint32_t(a.row_bytes);
  for (uint32_t begin = 0; begin < row_bytes; begin += 512 * kPieces) {
    const uint32_t at = begin + uint32_t(lane) * 16;
    float sum[kPieces][R::kPer16];
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
#pragma unroll
      for (int i = 0; i < R::kPer16; ++i) sum[u][i] = 0.0f;
    }
    for (int rank0 = 0; rank0 < num_ranks; rank0 += 32) {
      if (num_ranks > 32) mine = row_of(a, link, token, rank0 + lane);
      unsigned left = __ballot_sync(kFullWarp, mine != nullptr);
      while (left) {
        const int rows = __popc(left);
        uint4 x[kRows][kPieces];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= rows) break;
          const char* row = from_lane(mine, __ffs(int(left)) - 1) + at;
          left &= left - 1;
#pragma unroll
          for (int u = 0; u < kPieces; ++u) {
            if (at + u * 512 < row_bytes) x[r][u] = load_once(row + u * 512);
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= rows) break;
#pragma unroll
          for (int u = 0; u < kPieces; ++u) R::add(sum[u], x[r][u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
      if (at + u * 512 < row_bytes) put_sum<kType>(a, token, at + u * 512, sum[u]);
    }
  }
}

// One warp, rows of any alignment.
template <int kType>
__device__ inline void sum_elements(const ReduceArgs& a, const Link& link, int64_t token,
                                    const char* mine, int lane) {
  using R = Row<kType>;
  const Setup& s = a.setup;
  char* out = a.out + token * a.out_stride;
  for (int64_t begin = 0; begin < a.num_cols; begin += 32) {
    const int64_t column = begin + lane;
    float sum = 0.0f;
    for (int rank0 = 0; rank0 < s.num_ranks; rank0 += 32) {
      if (s.num_ranks > 32) mine = row_of(a, link, token, rank0 + lane);
      for (unsigned left = __ballot_sync(kFullWarp, mine != nullptr); left; left &= left - 1) {
        const char* row = from_lane(mine, __ffs(int(left)) - 1);
        if (column < a.num_cols) sum += R::load(row + column * R::kItem);
      }
    }
    if (column >= a.num_cols) continue;
    if (a.bias) sum += a.bias[token * a.bias_stride + column];
    R::store(out + column * R::kItem, sum);
  }
}

// The scalars that came with a token's picks.
__device__ inline void take_carried(const ReduceArgs& a, const Link& link, int64_t token,
                                    int lane) {
  const Setup& s = a.setup;
  for (int k = lane; k < s.num_topk; k += 32) {
    const int32_t expert = a.routing.ids[token * s.num_topk + k];
    float value = 0.0f;
    if (expert >= 0) {
      const int rank = s.expert_rank[expert];
      const int64_t row = a.routing.base_to[rank] +
                          a.routing.block_base[token / kLayoutTokens * s.num_ranks + rank] +
                          a.routing.place[token * s.num_ranks + rank];
      const char* weights = link.peer_ptr(rank, slot_offset(s.layout, s.state->peer_slot[rank])) +
                            s.layout.slot_weights;
      value = reinterpret_cast<const float*>(weights)[row * s.num_topk + k];
    }
    a.carried_out[token * s.num_topk + k] = value;
  }
}

// kMost: of how many ranks a token may have rows, 2, 4 or kAny.
constexpr int kAny = 0;

template <int kType, int kMost>
__device__ inline void reduce_tokens(const ReduceArgs& a, const Link& link) {
  const Setup& s = a.setup;
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  const int64_t warps = int64_t(gridDim.x) * kReduceWarps;
  bool vectors = a.aligned != 0;
  for (int rank = 0; rank < s.num_ranks; ++rank)
    vectors = vectors && (s.state->peer_rows[rank] & 15) == 0;
  const int64_t first = int64_t(blockIdx.x) + int64_t(warp) * gridDim.x;
  Source source;
  source.open(a, link, lane);
  int2 found = source.look_up(a, first);
  for (int64_t token = first; token < a.num_tokens; token += warps) {
    const char* mine = source.row(found);
    found = source.look_up(a, token + warps);  // here by the time it is wanted
    if (!vectors) {
      sum_elements<kType>(a, link, token, mine, lane);
    } else if constexpr (kMost == kAny) {
      sum_many<kType>(a, link, token, mine, lane);
    } else if constexpr (kMost == 4) {
      sum_few<kType>(a, token, mine, lane);
    } else {
      const unsigned goes = __ballot_sync(kFullWarp, mine != nullptr);
      const unsigned rest = goes & (goes - 1);
      const char* one = from_lane(mine, goes ? __ffs(int(goes)) - 1 : 0);
      const char* two = from_lane(mine, rest ? __ffs(int(rest)) - 1 : 0);
      sum_two<kType>(a, token, goes ? one : nullptr, rest ? two : nullptr, lane);
    }
    if (a.carried_out) take_carried(a, link, token, lane);
  }
}

}  // namespace epcomm::device
