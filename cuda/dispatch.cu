// Dispatch: layout pass and counts (epcomm_enter), rows straight into their place at the receiver
// (epcomm_send), then the receiver's own outputs (epcomm_collect). With a routing that is known
// already, epcomm_send writes those too. epcomm_enter also opens every other call.
#include "bulk.cuh"
#include "exchange.cuh"
#include "quantize_shared.cuh"

namespace epcomm::device {

// A token's ids and weights as the receiver `peer` sees them; lane k does slot k.
__device__ inline void send_picks(const SendArgs& a, int64_t token, int peer, char* slot,
                                  int64_t row, int lane) {
  const Setup& s = a.setup;
  const int topk = s.num_topk;
  int32_t* ids = reinterpret_cast<int32_t*>(slot + s.layout.slot_idx) + row * topk;
  float* weights = reinterpret_cast<float*>(slot + s.layout.slot_weights) + row * topk;
  for (int k = lane; k < topk; k += 32) {
    const int32_t expert = a.routing.ids[token * topk + k];
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

// Where a row of the token goes, as lane's rank sees it. Turns begin with this rank, so that ranks
// that send at the same time reach their peers in different orders.
struct Target {
  int64_t row;
  char* slot;  // null: not to that rank
  int rank;

  __device__ Target(const SendArgs& a, const Link& link, int64_t token, int rank0, int lane)
      : row(-1), slot(nullptr), rank(-1) {
    const Setup& s = a.setup;
    const int ranks = s.num_ranks;
    if (rank0 + lane >= ranks) return;
    rank = rank_in_turn(s.rank, rank0 + lane, ranks);
    const int32_t place = a.routing.place[token * ranks + rank];
    if (place < 0) return;
    row = a.routing.base_to[rank] + a.routing.block_base[token / kLayoutTokens * ranks + rank] +
          place;
    slot = link.peer_ptr(rank, slot_offset(s.layout, s.state->peer_slot[rank]));
  }
  // Another lane's.
  __device__ Target(const Target& of, int lane) {
    row = __shfl_sync(kFullWarp, of.row, lane);
    slot = reinterpret_cast<char*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(of.slot), lane));
    rank = __shfl_sync(kFullWarp, of.rank, lane);
  }
};

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

// Packed bytes in shared memory to where they belong.
__device__ inline void copy_shared(char* to, const void* from, int64_t bytes, int lane) {
  Strided packed{};
  packed.data = static_cast<const char*>(from);
  packed.row_bytes = bytes;
  packed.itemsize = 1;
  packed.col_stride = 1;
  packed.packed = 1;
  copy_row(to, packed, 0, lane);
}

// What the receiver's arrays say of each pick, `Vector` by `Vector`, by block `block` of `blocks`.
// After a failure: ids -1.
template <typename Vector>
__device__ inline void collect_picks(const CollectArgs& a, const char* slot, int64_t picks, bool go,
                                     int64_t block, int64_t blocks) {
  constexpr int64_t kItems = sizeof(Vector) / 4;
  const Setup& s = a.setup;
  const auto* ids = reinterpret_cast<const Vector*>(
      a.cached ? reinterpret_cast<const char*>(a.routing.recv_ids) : slot + s.layout.slot_idx);
  const auto* weights = reinterpret_cast<const Vector*>(
      a.cached ? reinterpret_cast<const char*>(a.routing.recv_weights)
               : slot + s.layout.slot_weights);
  const auto put = [](void* to, int64_t i, const Vector& value) {
    if (to) static_cast<Vector*>(to)[i] = value;
  };
  const int64_t threads = blocks * blockDim.x;
  for (int64_t i = block * blockDim.x + threadIdx.x; i < picks / kItems; i += threads) {
    Vector id{}, weight{};
    if (go) {
      id = ids[i];
      if (a.has_weights) weight = weights[i];
    } else {
#pragma unroll
      for (int word = 0; word < int(kItems); ++word) reinterpret_cast<uint32_t*>(&id)[word] = ~0u;
    }
    put(a.ids, i, id);
    if (!a.cached) put(a.routing.recv_ids, i, id);
    if (!a.has_weights) continue;
    put(a.weights, i, weight);
    if (!a.cached) put(a.routing.recv_weights, i, weight);
  }
}

// The small arrays of the receiver. After a failure: counts 0.
__device__ inline void collect(const CollectArgs& a, const Link& link, bool go, int64_t block,
                               int64_t blocks) {
  const Setup& s = a.setup;
  const int64_t rows = a.routing.recv_begin[s.num_ranks];
  const int64_t picks = rows * s.num_topk;
  const char* slot = a.cached ? nullptr : link.heap() + slot_offset(s.layout, s.state->slot);
  if ((picks & 3) == 0 && a.aligned) {
    collect_picks<uint4>(a, slot, picks, go, block, blocks);
  } else {
    collect_picks<uint32_t>(a, slot, picks, go, block, blocks);
  }
  const int64_t tid = block * blockDim.x + threadIdx.x;
  if (a.tokens_per_expert) {
    for (int64_t e = tid; e < s.num_local_experts; e += blocks * blockDim.x)
      a.tokens_per_expert[e] = go ? a.routing.local_picks[e] : 0;
  }
  if (tid == 0 && a.num_received) *a.num_received = go ? rows : 0;
  if (tid == 0 && a.overflow) *a.overflow = 0;
}

// Channels [begin, end) of a row, quantised into shared memory; `begin` is a group's.
template <typename Format>
__device__ inline void quantize_piece(const SendArgs& a, const char* source, int64_t begin,
                                      int64_t end, uint8_t* codes, float* scales, int lane) {
  constexpr int kPer = Format::kPerPiece;
  const int part = lane % kCastLanes;
  const int64_t width = int64_t(a.row_bytes);
  const uint8_t* row = reinterpret_cast<const uint8_t*>(source);
  // Several groups at a time, and the next ones on their way meanwhile: with one, every step would
  // wait for memory.
#ifdef EPCOMM_BULK
  constexpr bool vector = false;                      // the copy engine has such rows
  constexpr int kAhead = 2 / Pieces<Format>::kCount;  // of eight loads each
#else
  const bool vector = a.vector != 0;
  constexpr int kAhead = 4 / Pieces<Format>::kCount;
#endif
  constexpr int64_t kStep = 2 * kScaleGroup;
  const int64_t own = lane / kCastLanes;
  Raw<Format> next[kAhead];
  const auto load = [&](int64_t at) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (at + n * kStep < end) {
        next[n] = load_raw<Format>(row, a.x.col_stride, width, vector, true,
                                   at / kScaleGroup + 2 * n + own, part);
      }
    }
  };
  load(begin);
  for (int64_t at = begin; at < end; at += kAhead * kStep) {
    Raw<Format> raw[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) raw[n] = next[n];
    load(at + kAhead * kStep);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (at + n * kStep >= end) break;
      uint32_t words[kCastItems / 4];
      const float scale = quantize_group<Format>(raw[n], false, words);
      const int64_t first = at - begin + n * kStep + own * kScaleGroup;
      if (begin + first >= end) continue;
#pragma unroll
      for (int i = 0; i < Pieces<Format>::kCount; ++i) {
        store_codes<Format>(codes + first + (i * kCastLanes + part) * kPer, words + i * (kPer / 4));
      }
      if (part == 0) scales[first / kScaleGroup] = scale;
    }
  }
}

// Codes and scales of channels [begin, end) of a token, in shared memory, to all ranks that it goes
// to; `first`, if any, is where it goes of the first 32 ranks.
__device__ inline void store_codes_of(const SendArgs& a, const Link& link, const Target* first,
                                      int64_t token, int64_t begin, int64_t end,
                                      const uint8_t* codes, const float* scales, int lane) {
  const int64_t width = int64_t(a.row_bytes);
  const int64_t scale_bytes = (end - begin + kScaleGroup - 1) / kScaleGroup * 4;
  [[maybe_unused]] const bool bulk_codes = a.bulk != 0 && (width & 15) == 0;
  // The copy engine is slow with few bytes.
  [[maybe_unused]] const bool bulk_scales =
      a.bulk != 0 && (a.scale_bytes & 15) == 0 && a.scale_bytes > 512;
#ifdef EPCOMM_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
  for (int rank0 = 0; rank0 < a.setup.num_ranks; rank0 += 32) {
    const Target target = rank0 == 0 && first ? *first : Target(a, link, token, rank0, lane);
#ifdef EPCOMM_BULK
    if (target.slot) {
      char* payload = target.slot + a.setup.layout.slot_payload;
      if (bulk_codes)
        bulk_store(payload + target.row * width + begin, codes, uint32_t(end - begin));
      if (bulk_scales) {
        bulk_store(payload + a.scales_offset + uint64_t(target.row) * a.scale_bytes +
                       begin / kScaleGroup * 4,
                   scales, uint32_t(scale_bytes));
      }
    }
    if (bulk_codes && bulk_scales) continue;
    const bool codes_too = !bulk_codes, scales_too = !bulk_scales;
#else
    constexpr bool codes_too = true, scales_too = true;
#endif
    for (unsigned left = __ballot_sync(kFullWarp, target.slot != nullptr); left; left &= left - 1) {
      const Target one(target, __ffs(int(left)) - 1);
      char* payload = one.slot + a.setup.layout.slot_payload;
      if (codes_too) copy_shared(payload + one.row * width + begin, codes, end - begin, lane);
      if (scales_too) {
        copy_shared(
            payload + a.scales_offset + uint64_t(one.row) * a.scale_bytes + begin / kScaleGroup * 4,
            scales, scale_bytes, lane);
      }
    }
  }
}

// A token's row as codes and scales to all ranks that it goes to, read through registers.
__device__ inline void send_codes(const SendArgs& a, const Link& link, int64_t token,
                                  const char* source, char* buffer, int lane) {
  const int64_t width = int64_t(a.row_bytes);
  const int64_t most = a.piece_channels;
  uint8_t* codes = reinterpret_cast<uint8_t*>(buffer);
  float* scales = reinterpret_cast<float*>(buffer + most);
  for (int64_t begin = 0; begin < width; begin += most) {
    const int64_t end = begin + most < width ? begin + most : width;
#ifdef EPCOMM_BULK
    bulk_wait_read();
#endif
    __syncwarp();
    if (a.row_type == 0) {
      quantize_piece<Float32>(a, source, begin, end, codes, scales, lane);
    } else if (a.row_type == 1) {
      quantize_piece<Float16>(a, source, begin, end, codes, scales, lane);
    } else {
      quantize_piece<Bfloat16>(a, source, begin, end, codes, scales, lane);
    }
    store_codes_of(a, link, nullptr, token, begin, end, codes, scales, lane);
  }
}

#ifdef EPCOMM_BULK
// The same, read by the copy engine, as much of the row at once as the buffer holds.
__device__ inline void send_codes_bulk(const SendArgs& a, const Link& link, int64_t token,
                                       const char* source, char* buffer, uint64_t* barrier,
                                       uint32_t& parity, int lane) {
  const int64_t width = int64_t(a.row_bytes);
  const int64_t most = a.piece_channels;
  const auto load = [&](int64_t begin) {
    // The copy engine has read the last codes, and comes behind what lanes did in the buffer.
    bulk_wait_read();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) {
      const int64_t left = width - begin;
      const uint32_t bytes = uint32_t(left < most ? left : most) * uint32_t(a.x.itemsize);
      barrier_expect(barrier, bytes);
      bulk_load(buffer, source + begin * a.x.itemsize, bytes, barrier);
    }
  };
  if (width > 0) load(0);
  const Target first(a, link, token, 0, lane);  // while the first piece is on its way
  for (int64_t begin = 0; begin < width; begin += most) {
    const int channels = int(width - begin < most ? width - begin : most);
    const int codes_at = scale_room(channels);
    if (begin > 0) load(begin);
    barrier_wait(barrier, parity);
    parity ^= 1;
    if (a.row_type == 0) {
      quantize_in_place<Float32>(buffer, channels, codes_at, lane);
    } else if (a.row_type == 1) {
      quantize_in_place<Float16>(buffer, channels, codes_at, lane);
    } else {
      quantize_in_place<Bfloat16>(buffer, channels, codes_at, lane);
    }
    store_codes_of(a, link, &first, token, begin, begin + channels,
                   reinterpret_cast<const uint8_t*>(buffer) + codes_at,
                   reinterpret_cast<const float*>(buffer), lane);
  }
}
#endif

}  // namespace epcomm::device

using namespace epcomm;
using namespace epcomm::device;

// One block, or several where the call makes a routing: the last of them opens the call.
extern "C" __global__ void __launch_bounds__(kEnterThreads, 1)
    epcomm_enter(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ EnterArgs a) {
  __shared__ EnterShared sh;
  __shared__ Histogram histogram;
  const Link link{ctx, a.setup.rank};
  if (a.counts) {
    const int experts = a.setup.num_experts;
    if (experts <= kSharedExperts) {
      for (int e = int(threadIdx.x); e < experts; e += kEnterThreads) histogram.count[e] = 0;
      __syncthreads();
    }
    for (int64_t block = blockIdx.x; block < a.num_blocks; block += gridDim.x)
      layout_block(a, block, histogram);
    if (experts <= kSharedExperts) {
      for (int e = int(threadIdx.x); e < experts; e += kEnterThreads) {
        if (histogram.count[e]) atomicAdd(a.setup.histogram + e, histogram.count[e]);
      }
    }
    if (!last_block(&a.setup.state->enter_ticket)) return;
    scan_blocks(a, a.num_blocks, sh.totals);
    __syncthreads();
  }
  enter_call(a, link, sh);
}

namespace {

// What travels beside a row to one rank, but for what the copy engine takes.
__device__ inline void send_beside(const SendArgs& a, int64_t token, const Target& one,
                                   bool scales_too, int lane) {
  const Setup& s = a.setup;
  if (scales_too) {
    copy_row(one.slot + s.layout.slot_payload + a.scales_offset + uint64_t(one.row) * a.scale_bytes,
             a.scales, token, lane);
  }
  if (a.cached) return;
  send_picks(a, token, one.rank, one.slot, one.row, lane);
  if (lane == 0)
    reinterpret_cast<int32_t*>(one.slot + s.layout.slot_token)[one.row] = int32_t(token);
}

#ifdef EPCOMM_BULK
// A warp's rows by the copy engine, each loaded once. The buffer has a.stages parts: rows are
// loaded while the ones before them leave. Scales go through registers: the engine is slow with few
// bytes.
class BulkRows {
 public:
  __device__ BulkRows(const SendArgs& a, const Link& link, char* buffer, uint64_t* barriers,
                      int lane)
      : a_(a), link_(link), buffer_(buffer), barriers_(barriers), lane_(lane) {
    if (lane == 0) {
      for (int stage = 0; stage < a.stages; ++stage) barrier_init(barriers + stage, 1);
      barrier_fence();
    }
    __syncwarp();
  }

  // The first rows may be on their way before anything else is known.
  __device__ void begin(int64_t first, int64_t stride) {
    for (int i = 0; i < ahead(); ++i) load(first + i * stride, i);
  }

  // What begin() loads must not arrive in a block that has ended.
  __device__ void drop(int64_t first, int64_t stride) {
    for (int i = 0; i < ahead() && first + i * stride < a_.num_tokens; ++i)
      barrier_wait(barriers_ + i, 0);
  }

  __device__ void send(int64_t first, int64_t stride) {
    int stage = 0;
    uint32_t parity = 0;
    for (int64_t token = first; token < a_.num_tokens; token += stride) {
      // The part that the row before this one is leaving.
      if (a_.stages > 1) load_next(token + ahead() * stride, stage > 0 ? stage - 1 : a_.stages - 1);
      bool waited = false;
      for (int rank0 = 0; rank0 < a_.setup.num_ranks; rank0 += 32) {
        const Target target(a_, link_, token, rank0, lane_);
        const bool has_scales = a_.vector_scales && uint32_t(lane_) * 16 < uint32_t(a_.scale_bytes);
        uint4 scales{};
        if (has_scales) {
          scales = *reinterpret_cast<const uint4*>(a_.scales.data + token * a_.scales.row_stride +
                                                   lane_ * 16);
        }
        if (!waited) barrier_wait(barriers_ + stage, parity);
        waited = true;
        if (target.slot) {
          bulk_store(
              target.slot + a_.setup.layout.slot_payload + target.row * int64_t(a_.row_bytes),
              part(stage), uint32_t(a_.row_bytes));
        }
        if (a_.cached && a_.scale_bytes == 0) continue;
        for (unsigned left = __ballot_sync(kFullWarp, target.slot != nullptr); left;
             left &= left - 1) {
          const Target one(target, __ffs(int(left)) - 1);
          if (has_scales) {
            *reinterpret_cast<uint4*>(one.slot + a_.setup.layout.slot_payload + a_.scales_offset +
                                      uint64_t(one.row) * a_.scale_bytes + lane_ * 16) = scales;
          }
          send_beside(a_, token, one, a_.scale_bytes != 0 && !a_.vector_scales, lane_);
        }
      }
      if (a_.stages == 1) load_next(token + stride, 0);
      if (++stage == a_.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

 private:
  __device__ int ahead() const { return a_.stages > 1 ? a_.stages - 1 : 1; }
  __device__ char* part(int stage) const { return buffer_ + int64_t(stage) * a_.buffer_bytes; }

  // The part's last row has left it.
  __device__ void load_next(int64_t token, int stage) {
    bulk_wait_read();
    __syncwarp();
    load(token, stage);
  }

  __device__ void load(int64_t token, int stage) {
    if (lane_ != 0 || token >= a_.num_tokens) return;
    barrier_expect(barriers_ + stage, uint32_t(a_.row_bytes));
    bulk_load(part(stage), a_.x.data + token * a_.x.row_stride, uint32_t(a_.row_bytes),
              barriers_ + stage);
  }

  const SendArgs& a_;
  const Link& link_;
  char* const buffer_;
  uint64_t* const barriers_;
  const int lane_;
};

// Rows that do not fit in a warp's buffer, piece by piece.
__device__ inline void send_pieces(const SendArgs& a, const Link& link, int64_t first,
                                   int64_t stride, char* buffer, uint64_t* barrier, int lane) {
  const int64_t row_bytes = int64_t(a.row_bytes);
  uint32_t parity = 0;
  if (lane == 0) {
    barrier_init(barrier, 1);
    barrier_fence();
  }
  __syncwarp();
  for (int64_t token = first; token < a.num_tokens; token += stride) {
    const char* source = a.x.data + token * a.x.row_stride;
    for (int rank0 = 0; rank0 < a.setup.num_ranks; rank0 += 32) {
      const Target target(a, link, token, rank0, lane);
      const unsigned goes = __ballot_sync(kFullWarp, target.slot != nullptr);
      if (!goes) continue;
      for (int64_t begin = 0; begin < row_bytes; begin += a.buffer_bytes) {
        const uint32_t piece =
            uint32_t(row_bytes - begin < a.buffer_bytes ? row_bytes - begin : a.buffer_bytes);
        bulk_wait_read();
        __syncwarp();
        if (lane == 0) {
          barrier_expect(barrier, piece);
          bulk_load(buffer, source + begin, piece, barrier);
        }
        barrier_wait(barrier, parity);
        parity ^= 1;
        if (target.slot) {
          bulk_store(target.slot + a.setup.layout.slot_payload + target.row * row_bytes + begin,
                     buffer, piece);
        }
      }
      for (unsigned left = goes; left; left &= left - 1)
        send_beside(a, token, Target(target, __ffs(int(left)) - 1), a.scale_bytes != 0, lane);
    }
  }
}
#endif

// Rows through registers, 16 bytes or an element at a time.
__device__ inline void send_plain(const SendArgs& a, const Link& link, int64_t token,
                                  const char* source, int lane) {
  const Setup& s = a.setup;
  const int64_t row_bytes = int64_t(a.row_bytes);
  for (int rank0 = 0; rank0 < s.num_ranks; rank0 += 32) {
    const Target target(a, link, token, rank0, lane);
    const unsigned goes = __ballot_sync(kFullWarp, target.slot != nullptr);
    if (a.path == kSendVector) {
      constexpr int kUnroll = 4;
      // Whole steps of the warp: lanes past the row's end still tell where rows go.
      for (int64_t step = 0; step < row_bytes; step += 32 * 16 * kUnroll) {
        const int64_t begin = step + lane * 16;
        uint4 part[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (begin + u * 512 < row_bytes)
            part[u] = *reinterpret_cast<const uint4*>(source + begin + u * 512);
        }
        for (unsigned left = goes; left; left &= left - 1) {
          const Target one(target, __ffs(int(left)) - 1);
          char* to = one.slot + s.layout.slot_payload + one.row * row_bytes + begin;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (begin + u * 512 < row_bytes) *reinterpret_cast<uint4*>(to + u * 512) = part[u];
          }
        }
      }
    }
    for (unsigned left = goes; left; left &= left - 1) {
      const Target one(target, __ffs(int(left)) - 1);
      if (a.path == kSendElements && row_bytes > 0)
        copy_row(one.slot + s.layout.slot_payload + one.row * row_bytes, a.x, token, lane);
      send_beside(a, token, one, a.scale_bytes != 0, lane);
    }
  }
}

// What travels beside rows that were quantised on their way.
__device__ inline void send_beside_codes(const SendArgs& a, const Link& link, int64_t token,
                                         int lane) {
  for (int rank0 = 0; rank0 < a.setup.num_ranks; rank0 += 32) {
    const Target target(a, link, token, rank0, lane);
    for (unsigned left = __ballot_sync(kFullWarp, target.slot != nullptr); left; left &= left - 1)
      send_beside(a, token, Target(target, __ffs(int(left)) - 1), false, lane);
  }
}

// num_sms blocks of kSendWarps warps, one warp per token.
template <bool kQuantize>
__device__ inline void send(const Wire::Ctx& ctx, const SendArgs& a, const CollectArgs& c) {
  extern __shared__ __align__(128) char dynamic[];
  const Setup& s = a.setup;
  const Link link{ctx, a.setup.rank};
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  const int64_t first = int64_t(blockIdx.x) + int64_t(warp) * gridDim.x;
  const int64_t stride = int64_t(gridDim.x) * kSendWarps;
  [[maybe_unused]] char* const buffer =
      dynamic + int64_t(warp) * a.buffer_bytes * (a.stages > 0 ? a.stages : 1);
#ifdef EPCOMM_BULK
  __shared__ uint64_t barriers[kSendWarps * kSendStages];
  [[maybe_unused]] uint64_t* const barrier = barriers + warp * kSendStages;
  const bool whole = !kQuantize && a.stages > 0;
  BulkRows rows(a, link, buffer, barrier, lane);
  if (whole) rows.begin(first, stride);
#endif
  if (!opened(s, a.call)) {  // no rank moves anything, or this one is broken
#ifdef EPCOMM_BULK
    if (whole) rows.drop(first, stride);
#endif
    wait_for_last();
    return;
  }
  if constexpr (kQuantize) {
    if (a.path != kSendBulk) {
      for (int64_t token = first; token < a.num_tokens; token += stride) {
        send_codes(a, link, token, a.x.data + token * a.x.row_stride, buffer, lane);
        if (!a.cached) send_beside_codes(a, link, token, lane);
      }
    }
#ifdef EPCOMM_BULK
    if (a.path == kSendBulk) {
      uint32_t parity = 0;
      if (lane == 0) {
        barrier_init(barrier, 1);
        barrier_fence();
      }
      __syncwarp();
      for (int64_t token = first; token < a.num_tokens; token += stride) {
        const char* source = a.x.data + token * a.x.row_stride;
        send_codes_bulk(a, link, token, source, buffer, barrier, parity, lane);
        if (!a.cached) send_beside_codes(a, link, token, lane);
      }
    }
#endif
  } else {
#ifdef EPCOMM_BULK
    if (whole) {
      rows.send(first, stride);
    } else if (a.path == kSendBulk) {
      send_pieces(a, link, first, stride, buffer, barrier, lane);
    }
#endif
    if (a.path != kSendBulk) {
      for (int64_t token = first; token < a.num_tokens; token += stride)
        send_plain(a, link, token, a.x.data + token * a.x.row_stride, lane);
    }
  }
  if (a.collects) collect(c, link, true, blockIdx.x, gridDim.x);  // while the last rows leave
#ifdef EPCOMM_BULK
  if (kQuantize || a.path == kSendBulk) bulk_wait_all();
#endif
  if (!last_block(&s.state->send_ticket)) return;
  wait_for_last();
  const bool met = meet(s, link, &s.state->data_phases, kPhaseData, Op::kDispatch,
                        data_word(s.layout, s.shape, s.rank, 0),
                        [&](int peer) { return data_word(s.layout, s.shape, peer, 0); });
  if (!met && a.collects) collect(c, link, false, 0, 1);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kSendWarps * 32, 1)
    epcomm_send(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ SendArgs a,
                const __grid_constant__ CollectArgs c) {
  send<false>(ctx, a, c);
}

// Rows of floats that become codes and scales on their way.
extern "C" __global__ void __launch_bounds__(kSendWarps * 32, 1)
    epcomm_send_quantized(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ SendArgs a,
                          const __grid_constant__ CollectArgs c) {
  send<true>(ctx, a, c);
}

// It may be queued before the host knows how many rows come; a call that was not agreed on has no
// such arrays.
extern "C" __global__ void __launch_bounds__(kCollectThreads, 1)
    epcomm_collect(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ CollectArgs a) {
  const Setup& s = a.setup;
  const Link link{ctx, a.setup.rank};
  if (s.state->agreed == 0) return;
  collect(a, link, s.state->go != 0, blockIdx.x, gridDim.x);
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
