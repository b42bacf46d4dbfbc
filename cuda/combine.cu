// Combine: a token's owner pulls its rows from the heaps of the ranks that hold them and sums them
// by the written tree: ranks ascending, from +0.0, in float32, plus bias, rounded once.
#include "bulk.cuh"
#include "casts.cuh"
#include "epcomm/formats.h"
#include "exchange.cuh"

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
  __device__ static uint32_t pack2(const float* sum) {
    uint32_t code;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(code) : "f"(sum[1]), "f"(sum[0]));
    return code;
  }
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

// Rows of other GPUs are read once: they would only push each other out of the caches.
__device__ inline uint4 load_once(const char* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

// Where lane's rank (rank0 + lane) holds a row of the token, or null.
__device__ inline const char* row_of(const ReduceArgs& a, const Link& link, int64_t token,
                                     int rank) {
  const Setup& s = a.setup;
  if (rank >= s.num_ranks) return nullptr;
  const int32_t place = a.routing.place[token * s.num_ranks + rank];
  if (place < 0) return nullptr;
  const int64_t row = a.routing.base_to[rank] +
                      a.routing.block_base[token / kLayoutTokens * s.num_ranks + rank] + place;
  if (rank == s.rank) return a.own.data + row * a.own.row_stride;
  return link.peer_ptr(rank, s.state->peer_rows[rank]) + row * int64_t(a.row_bytes);
}

__device__ inline const char* from_lane(const char* at, int lane) {
  return reinterpret_cast<const char*>(
      __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(at), lane));
}

template <int kType>
__device__ inline void reduce_vectors(const ReduceArgs& a, const Link& link, int64_t token,
                                      int lane) {
  using R = Row<kType>;
  constexpr int kUnroll = 4;
  const Setup& s = a.setup;
  char* out = a.out + token * a.out_stride;
  const int64_t row_bytes = int64_t(a.row_bytes);
  const char* mine = row_of(a, link, token, lane);
  for (int64_t begin = 0; begin < row_bytes; begin += 512 * kUnroll) {
    const int64_t at = begin + lane * 16;
    float sum[kUnroll][R::kPer16];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < R::kPer16; ++i) sum[u][i] = 0.0f;
    }
    for (int rank0 = 0; rank0 < s.num_ranks; rank0 += 32) {
      if (s.num_ranks > 32) mine = row_of(a, link, token, rank0 + lane);
      unsigned left = __ballot_sync(kFullWarp, mine != nullptr);
      while (left) {  // two rows in flight
        const char* first = from_lane(mine, __ffs(int(left)) - 1);
        left &= left - 1;
        const bool two = left != 0;
        const char* second = two ? from_lane(mine, __ffs(int(left)) - 1) : first;
        left &= left - 1;
        uint4 x[kUnroll], y[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (at + u * 512 < row_bytes) x[u] = load_once(first + at + u * 512);
        }
        if (two) {
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (at + u * 512 < row_bytes) y[u] = load_once(second + at + u * 512);
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) R::add(sum[u], x[u]);
        if (two) {
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) R::add(sum[u], y[u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * 512 >= row_bytes) break;
      if (a.bias) {
        const float* bias = a.bias + token * a.bias_stride + (at + u * 512) / R::kItem;
#pragma unroll
        for (int i = 0; i < R::kPer16; ++i) sum[u][i] += __ldg(bias + i);
      }
      *reinterpret_cast<uint4*>(out + at + u * 512) = R::pack(sum[u]);
    }
  }
}

#ifdef EPCOMM_BULK

// Pieces of rows in the order in which a warp sums them: token, piece, rank ascending.
struct Pieces {
  int64_t token, begin;
  unsigned goes, left;  // ranks that hold a row of the token; those still to come for this piece
  const char* mine;     // lane's rank's row

  __device__ void open(const ReduceArgs& a, const Link& link, int64_t first, int lane) {
    token = first;
    begin = 0;
    mine = token < a.num_tokens ? row_of(a, link, token, lane) : nullptr;
    goes = left = __ballot_sync(kFullWarp, mine != nullptr);
  }
};

// The copy engine fetches: a ring of pieces per warp keeps much more in flight than registers can,
// also across tokens. Up to 32 ranks.
template <int kType>
__device__ inline void reduce_bulk(const ReduceArgs& a, const Link& link, char* ring,
                                   uint64_t* barriers, int64_t first, int64_t stride, int lane) {
  using R = Row<kType>;
  constexpr int kVectors = kReducePiece / 512;
  const int64_t row_bytes = int64_t(a.row_bytes);
  uint32_t issued = 0, used = 0;
  Pieces ahead;
  ahead.open(a, link, first, lane);
  const auto issue = [&] {
    while (ahead.token < a.num_tokens && issued - used < kReduceStages) {
      if (ahead.left == 0) {
        ahead.begin += kReducePiece;
        ahead.left = ahead.goes;
        if (ahead.goes == 0 || ahead.begin >= row_bytes)
          ahead.open(a, link, ahead.token + stride, lane);
        continue;
      }
      const char* row = from_lane(ahead.mine, __ffs(int(ahead.left)) - 1);
      ahead.left &= ahead.left - 1;
      if (lane == 0) {
        const int64_t rest = row_bytes - ahead.begin;
        const uint32_t bytes = uint32_t(rest < kReducePiece ? rest : kReducePiece);
        uint64_t* barrier = barriers + issued % kReduceStages;
        barrier_expect(barrier, bytes);
        bulk_load(ring + issued % kReduceStages * kReducePiece, row + ahead.begin, bytes, barrier);
      }
      ++issued;
    }
  };
  issue();
  for (int64_t token = first; token < a.num_tokens; token += stride) {
    const int32_t* places = a.routing.place + token * a.setup.num_ranks;
    const bool here = lane < a.setup.num_ranks && places[lane] >= 0;
    const int count = __popc(__ballot_sync(kFullWarp, here));
    char* out = a.out + token * a.out_stride;
    for (int64_t begin = 0; begin < row_bytes; begin += kReducePiece) {
      const int64_t at = begin + lane * 16;
      float sum[kVectors][R::kPer16];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
#pragma unroll
        for (int i = 0; i < R::kPer16; ++i) sum[u][i] = 0.0f;
      }
      for (int row = 0; row < count; ++row) {
        const uint32_t stage = used % kReduceStages;
        barrier_wait(barriers + stage, used / kReduceStages & 1);
        const char* piece = ring + stage * kReducePiece + lane * 16;
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          if (at + u * 512 < row_bytes)
            R::add(sum[u], *reinterpret_cast<const uint4*>(piece + u * 512));
        }
        __syncwarp();  // all lanes have read the stage
        ++used;
        issue();
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (at + u * 512 >= row_bytes) break;
        if (a.bias) {
          const float* bias = a.bias + token * a.bias_stride + (at + u * 512) / R::kItem;
#pragma unroll
          for (int i = 0; i < R::kPer16; ++i) sum[u][i] += __ldg(bias + i);
        }
        *reinterpret_cast<uint4*>(out + at + u * 512) = R::pack(sum[u]);
      }
    }
  }
}

#endif

template <int kType>
__device__ inline void reduce_elements(const ReduceArgs& a, const Link& link, int64_t token,
                                       int lane) {
  using R = Row<kType>;
  const Setup& s = a.setup;
  char* out = a.out + token * a.out_stride;
  const char* mine = row_of(a, link, token, lane);
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

template <int kType>
__device__ inline void reduce_tokens(const ReduceArgs& a, const Link& link) {
  const Setup& s = a.setup;
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  const int64_t warps = int64_t(gridDim.x) * kReduceWarps;
  bool vectors = a.aligned != 0;
  for (int rank = 0; rank < s.num_ranks; ++rank)
    vectors = vectors && (s.state->peer_rows[rank] & 15) == 0;
  const int64_t first = int64_t(blockIdx.x) + int64_t(warp) * gridDim.x;
  bool bulk = false;
#ifdef EPCOMM_BULK
  extern __shared__ __align__(128) char dynamic[];
  __shared__ uint64_t barriers[kReduceWarps][kReduceStages];
  bulk = vectors && a.bulk != 0;
  if (bulk) {
    if (lane == 0) {
      for (int stage = 0; stage < kReduceStages; ++stage) barrier_init(&barriers[warp][stage], 1);
      barrier_fence();
      asm volatile("fence.proxy.async;" ::: "memory");  // peers' rows, which the entry acquired
    }
    __syncwarp();
    reduce_bulk<kType>(a, link, dynamic + warp * kReduceStages * kReducePiece, barriers[warp],
                       first, warps, lane);
  }
#endif
  for (int64_t token = first; token < a.num_tokens; token += warps) {
    if (bulk) {
      if (!a.carried_out) break;
    } else if (vectors) {
      reduce_vectors<kType>(a, link, token, lane);
    } else {
      reduce_elements<kType>(a, link, token, lane);
    }
    if (!a.carried_out) continue;
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
}

}  // namespace epcomm::device

using namespace epcomm;
using namespace epcomm::device;

// Before the call opens: scalars of the received side to the own slot, where owners read them.
extern "C" __global__ void __launch_bounds__(256)
    epcomm_carry(const __grid_constant__ CarryArgs a) {
  const int topk = a.setup.num_topk;
  const int64_t threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.recv_rows * topk;
       i += threads) {
    const int64_t row = i / topk, k = i % topk;
    reinterpret_cast<float*>(a.to)[i] =
        a.routing.recv_ids[i] >= 0
            ? *reinterpret_cast<const float*>(a.carried + row * a.row_stride + k * a.topk_stride)
            : 0.0f;
  }
}

// num_sms blocks of kReduceWarps warps, one warp per token.
extern "C" __global__ void __launch_bounds__(kReduceWarps * 32, 1)
    epcomm_reduce(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ ReduceArgs a) {
  const Setup& s = a.setup;
  const Link link{ctx, a.setup.rank};
  if (s.state->go == 0) return;
  if (a.row_type == 0) {
    reduce_tokens<0>(a, link);
  } else if (a.row_type == 1) {
    reduce_tokens<1>(a, link);
  } else {
    reduce_tokens<2>(a, link);
  }
  // Rows may be written again when every reader is done.
  if (!last_block(&s.state->reduce_ticket)) return;
  meet(s, link, &s.state->done_phases, kPhaseDone, Op::kCombine, done_word(s.layout, s.rank),
       [&](int peer) { return done_word(s.layout, peer); });
}
