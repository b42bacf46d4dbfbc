// Dispatch: layout pass and counts (epcomm_enter), rows straight into their place at the receiver
// (epcomm_send), then the receiver's own outputs (epcomm_collect). epcomm_enter also opens every
// other call.
#include "bulk.cuh"
#include "exchange.cuh"

namespace epcomm::device {

// A token's ids and weights as the receiver `peer` sees them; lane k does slot k.
__device__ inline void send_picks(const SendArgs& a, int64_t token, int peer, char* slot,
                                  int64_t row, int lane) {
  const Setup& s = a.setup;
  const int topk = s.num_topk;
  int32_t* ids = reinterpret_cast<int32_t*>(slot + s.layout.slot_idx) + row * topk;
  float* weights = reinterpret_cast<float*>(slot + s.layout.slot_weights) + row * topk;
  for (int k = lane; k < topk; k += 32) {
    const int32_t expert = __ldg(a.routing.ids + token * topk + k);
    const bool here = expert >= 0 && __ldg(s.expert_rank + expert) == peer;
    ids[k] = here ? __ldg(s.expert_local + expert) : -1;
    if (a.weights) {
      weights[k] =
          here ? *reinterpret_cast<const float*>(a.weights + token * a.weights_token_stride +
                                                 int64_t(k) * a.weights_topk_stride)
               : 0.0f;
    }
  }
}

// Columns of `row` to packed bytes, element by element; `copies` destinations by lane's `to`.
__device__ inline void copy_elements(char* to, const char* from, int64_t bytes, int64_t col_stride,
                                     int itemsize, int lane) {
  switch (itemsize) {
    case 2:
      for (int64_t c = lane; c < bytes / 2; c += 32)
        reinterpret_cast<uint16_t*>(to)[c] =
            *reinterpret_cast<const uint16_t*>(from + c * col_stride);
      break;
    case 4:
      for (int64_t c = lane; c < bytes / 4; c += 32)
        reinterpret_cast<uint32_t*>(to)[c] =
            *reinterpret_cast<const uint32_t*>(from + c * col_stride);
      break;
    case 8:
      for (int64_t c = lane; c < bytes / 8; c += 32)
        reinterpret_cast<uint64_t*>(to)[c] =
            *reinterpret_cast<const uint64_t*>(from + c * col_stride);
      break;
    default:
      for (int64_t c = lane; c < bytes / itemsize; c += 32) {
        for (int b = 0; b < itemsize; ++b) to[c * itemsize + b] = from[c * col_stride + b];
      }
  }
}

// Packed rows whose address and width are no multiples of 16 go by the widest element that fits.
__device__ inline void copy_row(char* to, const Strided& from, int64_t row, int lane) {
  const char* at = from.data + row * from.row_stride;
  int itemsize = from.itemsize;
  int64_t col_stride = from.col_stride;
  if (from.packed) {
    const uint64_t bits =
        reinterpret_cast<uint64_t>(at) | reinterpret_cast<uint64_t>(to) | uint64_t(from.row_bytes);
    itemsize = (bits & 3) == 0 ? 4 : (bits & 1) == 0 ? 2 : 1;
    col_stride = itemsize;
  } else if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(at) |
              uint64_t(col_stride)) &
             uint64_t(itemsize - 1)) {
    for (int64_t b = lane; b < from.row_bytes; b += 32)  // memory at odd addresses
      to[b] = at[b / itemsize * col_stride + b % itemsize];
    return;
  }
  copy_elements(to, at, from.row_bytes, col_stride, itemsize, lane);
}

}  // namespace epcomm::device

using namespace epcomm;
using namespace epcomm::device;

// One block, or several where the call makes a routing: the last of them opens the call.
extern "C" __global__ void __launch_bounds__(kEnterThreads, 1)
    epcomm_enter(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ EnterArgs a) {
  __shared__ EnterShared sh;
  const Link link{ctx, a.setup.rank};
  if (a.counts) {
    for (int64_t block = blockIdx.x; block < a.num_blocks; block += gridDim.x)
      layout_block(a, block);
    if (!last_block(&a.setup.state->enter_ticket)) return;
    scan_blocks(a, a.num_blocks, sh.totals);
    __syncthreads();
  }
  enter_call(a, link, sh);
}

// num_sms blocks of kSendWarps warps, one warp per token.
extern "C" __global__ void __launch_bounds__(kSendWarps * 32, 1)
    epcomm_send(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ SendArgs a) {
  extern __shared__ __align__(128) char dynamic[];
  const Setup& s = a.setup;
  const Link link{ctx, a.setup.rank};
  if (s.state->go == 0) return;  // no rank moves anything, or this one is broken
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  const int ranks = s.num_ranks;
  const int64_t row_bytes = int64_t(a.row_bytes);
  const int64_t stride = int64_t(gridDim.x) * kSendWarps;
#ifdef EPCOMM_BULK
  __shared__ uint64_t barriers[kSendWarps];
  uint64_t* barrier = &barriers[warp];
  char* buffer = dynamic + int64_t(warp) * a.buffer_bytes;
  uint32_t parity = 0;
  if (a.path == kSendBulk) {
    if (lane == 0) {
      barrier_init(barrier, 1);
      barrier_fence();
    }
    __syncwarp();
  }
#endif
  for (int64_t token = int64_t(blockIdx.x) + int64_t(warp) * gridDim.x; token < a.num_tokens;
       token += stride) {
    const char* source = a.x.data + token * a.x.row_stride;
#ifdef EPCOMM_BULK
    if (a.path == kSendBulk) {
      // The first piece is on its way while the places are looked up.
      bulk_wait_read();
      __syncwarp();
      if (lane == 0) {
        const uint32_t piece = uint32_t(row_bytes < a.buffer_bytes ? row_bytes : a.buffer_bytes);
        barrier_expect(barrier, piece);
        bulk_load(buffer, source, piece, barrier);
      }
    }
#endif
    const int32_t* block_base = a.routing.block_base + token / kLayoutTokens * ranks;
    [[maybe_unused]] bool first = true;
    for (int rank0 = 0; rank0 < ranks; rank0 += 32) {
      const int rank = rank0 + lane;
      const int32_t place = rank < ranks ? a.routing.place[token * ranks + rank] : -1;
      int64_t row = -1;
      char* slot = nullptr;
      if (place >= 0) {
        row = a.routing.base_to[rank] + block_base[rank] + place;
        slot = link.peer_ptr(rank, slot_offset(s.layout, s.state->peer_slot[rank]));
      }
      const unsigned goes = __ballot_sync(kFullWarp, place >= 0);
#ifdef EPCOMM_BULK
      if (a.path == kSendBulk) {
        for (int64_t begin = 0; begin < row_bytes; begin += a.buffer_bytes) {
          const uint32_t piece =
              uint32_t(row_bytes - begin < a.buffer_bytes ? row_bytes - begin : a.buffer_bytes);
          // A row that fits in the buffer is loaded once, however many ranks there are.
          if (begin > 0 || (!first && row_bytes > a.buffer_bytes)) {
            bulk_wait_read();
            __syncwarp();
            if (lane == 0) {
              barrier_expect(barrier, piece);
              bulk_load(buffer, source + begin, piece, barrier);
            }
          }
          if (begin > 0 || first || row_bytes > a.buffer_bytes) {
            barrier_wait(barrier, parity);
            parity ^= 1;
          }
          if (place >= 0)
            bulk_store(slot + s.layout.slot_payload + row * row_bytes + begin, buffer, piece);
          __syncwarp();
        }
      }
#endif
      if (a.path == kSendVector) {
        constexpr int kUnroll = 4;
        for (int64_t begin = int64_t(lane) * 16; begin < row_bytes; begin += 32 * 16 * kUnroll) {
          uint4 part[kUnroll];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (begin + u * 512 < row_bytes)
              part[u] = *reinterpret_cast<const uint4*>(source + begin + u * 512);
          }
          for (unsigned left = goes; left; left &= left - 1) {
            const int from = __ffs(int(left)) - 1;
            // Lanes past the row's end have left the loop: the address comes from memory.
            const int to_rank = rank0 + from;
            const int64_t to_row = a.routing.base_to[to_rank] + block_base[to_rank] +
                                   a.routing.place[token * ranks + to_rank];
            char* to = link.peer_ptr(to_rank, slot_offset(s.layout, s.state->peer_slot[to_rank])) +
                       s.layout.slot_payload + to_row * row_bytes + begin;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
              if (begin + u * 512 < row_bytes) *reinterpret_cast<uint4*>(to + u * 512) = part[u];
            }
          }
        }
        __syncwarp();
      }
      for (unsigned left = goes; left; left &= left - 1) {
        const int from = __ffs(int(left)) - 1;
        const int64_t to_row = __shfl_sync(kFullWarp, row, from);
        char* to_slot = reinterpret_cast<char*>(
            __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(slot), from));
        char* payload = to_slot + s.layout.slot_payload;
        if (a.path == kSendElements && row_bytes > 0)
          copy_row(payload + to_row * row_bytes, a.x, token, lane);
        if (a.scale_bytes) {
          copy_row(payload + a.scales_offset + uint64_t(to_row) * a.scale_bytes, a.scales, token,
                   lane);
        }
        if (!a.cached) {
          send_picks(a, token, rank0 + from, to_slot, to_row, lane);
          if (lane == 0)
            reinterpret_cast<int32_t*>(to_slot + s.layout.slot_token)[to_row] = int32_t(token);
        }
      }
      first = false;
    }
  }
#ifdef EPCOMM_BULK
  if (a.path == kSendBulk) bulk_wait_all();
#endif
  if (!last_block(&s.state->send_ticket)) return;
  meet(s, link, &s.state->data_phases, kPhaseData, Op::kDispatch,
       data_word(s.layout, s.shape, s.rank, 0),
       [&](int peer) { return data_word(s.layout, s.shape, peer, 0); });
}

// What the receiver's arrays say. After a failure: ids -1, counts 0.
extern "C" __global__ void __launch_bounds__(kCollectThreads, 1)
    epcomm_collect(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ CollectArgs a) {
  const Setup& s = a.setup;
  const Link link{ctx, a.setup.rank};
  const bool go = s.state->go != 0;
  const int64_t tid = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t(gridDim.x) * blockDim.x;
  const int64_t metas = a.recv_rows * s.num_topk;
  const char* slot = link.heap() + slot_offset(s.layout, s.state->slot);
  const int32_t* ids =
      a.cached ? a.routing.recv_ids : reinterpret_cast<const int32_t*>(slot + s.layout.slot_idx);
  const float* weights = a.cached ? a.routing.recv_weights
                                  : reinterpret_cast<const float*>(slot + s.layout.slot_weights);
  for (int64_t i = tid; i < metas; i += threads) {
    const int32_t id = go ? ids[i] : -1;
    if (a.ids) a.ids[i] = id;
    if (!a.cached) a.routing.recv_ids[i] = id;
    if (a.has_weights) {
      const float weight = go ? weights[i] : 0.0f;
      if (a.weights) a.weights[i] = weight;
      if (!a.cached) a.routing.recv_weights[i] = weight;
    }
  }
  if (a.tokens_per_expert) {
    for (int64_t e = tid; e < s.num_local_experts; e += threads)
      a.tokens_per_expert[e] = go ? a.routing.local_picks[e] : 0;
  }
  if (a.scalars && tid < 2) a.scalars[tid] = tid == 0 && go ? a.recv_rows : 0;
}

// Rows to packed or strided rows in this GPU's memory, one warp per row.
extern "C" __global__ void __launch_bounds__(512, 1)
    epcomm_copy(const __grid_constant__ CopyArgs a) {
  const int lane = int(threadIdx.x & 31);
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; row < a.num_rows;
       row += warps) {
    char* to = a.to + row * a.to_stride;
    if (!a.aligned) {
      copy_row(to, a.from, row, lane);
      continue;
    }
    const char* from = a.from.data + row * a.from.row_stride;
    constexpr int kUnroll = 4;
    for (int64_t begin = int64_t(lane) * 16; begin < a.from.row_bytes; begin += 32 * 16 * kUnroll) {
      uint4 part[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (begin + u * 512 < a.from.row_bytes)
          part[u] = *reinterpret_cast<const uint4*>(from + begin + u * 512);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (begin + u * 512 < a.from.row_bytes)
          *reinterpret_cast<uint4*>(to + begin + u * 512) = part[u];
      }
    }
  }
}
