// The layout pass: how many tokens go to each rank, how many picks to each expert, and each
// token's place among the tokens of a rank.
//
// One launch. A block takes the next tile of tokens by a ticket, counts it, publishes the counts,
// and learns the counts before it from the tiles before it: all of these were taken by blocks that
// are running, so waiting for them ends. Places depend on the order of tokens only; every atomic
// here adds, ors or takes a maximum.
#include "epcomm/layout.h"
#include "memory.cuh"

namespace epcomm {
namespace {

constexpr int kWarps = kLayoutThreads / 32;
constexpr int kWindow = 4;    // words that a lane reads at once while looking back
constexpr int kTogether = 4;  // ranks whose words a warp has on their way at once

__device__ uint32_t warp_sum(uint32_t value) { return __reduce_add_sync(~0u, value); }

// The words of the tiles before `next`, nearest first: of a lane, one in 32. In front of the first
// tile nothing was counted.
struct Window {
  uint64_t word[kWindow];
};
__device__ Window look_back(const uint64_t* words, int32_t next, uint32_t tag, int lane) {
  Window window;
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
    const int32_t at = next - lane - 32 * i;
    window.word[i] = at >= 0 ? load_shared_word(words + at) : tile_word(tag, 0, true);
  }
  return window;
}

// How many tokens of tiles before this one go to a rank, whose words these are. Called by whole
// warps with the window before the tile.
__device__ uint32_t count_before(const uint64_t* words, int32_t tile, uint32_t tag, int lane,
                                 Window window) {
  uint32_t before = 0;
  int32_t next = tile - 1;
  for (;;) {
    for (;;) {
      bool ready = true;
#pragma unroll
      for (int i = 0; i < kWindow; ++i) ready &= tile_tag(window.word[i]) == tag;
      if (__all_sync(~0u, ready)) break;
      window = look_back(words, next, tag, lane);
    }
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      const uint32_t prefixes = __ballot_sync(~0u, tile_is_prefix(window.word[i]));
      const int nearest = prefixes != 0 ? __ffs(int(prefixes)) - 1 : 31;
      before += warp_sum(lane <= nearest ? tile_count(window.word[i]) : 0u);
      if (prefixes != 0) return before;
    }
    next -= 32 * kWindow;
    window = look_back(words, next, tag, lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kLayoutThreads)
    epcomm_layout(const __grid_constant__ LayoutArgs args) {
  extern __shared__ uint32_t shared[];
  __shared__ int32_t shared_tile;
  __shared__ uint32_t shared_tag;
  const IdView& ids = args.ids;
  const int32_t ranks = min(args.num_ranks - args.rank_begin, kLayoutRanks);
  const int32_t mask_words = (ranks + 31) / 32;
  const int32_t columns = min(ranks, 32);
  const bool first_pass = args.rank_begin == 0;
  const bool counts_here = ids.num_experts <= kLayoutExperts;
  uint32_t* const masks = shared;  // [tile_tokens][mask_words]: the ranks a token goes to
  uint32_t* const picks = masks + args.tile_tokens * mask_words;  // [num_experts], if counts_here
  uint32_t* const before = picks + (counts_here ? ids.num_experts : 0);  // [ranks]
  int32_t* const stage = reinterpret_cast<int32_t*>(before + ranks);     // [2][32][columns]
  uint32_t* const all_picks = reinterpret_cast<uint32_t*>(args.state + 1);
  uint64_t* const words =
      reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(args.state) + args.words_offset);
  const int thread = int(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;

  if (thread == 0) {
    shared_tile = args.num_tiles > 1 ? int32_t(atomicAdd(&args.state->ticket, 1u)) : 0;
    shared_tag = args.state->epoch + 1;  // changed by the last block only
  }
  for (int i = thread; i < args.tile_tokens * mask_words; i += kLayoutThreads) masks[i] = 0;
  if (counts_here) {
    for (int i = thread; i < ids.num_experts; i += kLayoutThreads) picks[i] = 0;
  }
  __syncthreads();
  const int32_t tile = shared_tile;
  const uint32_t tag = shared_tag;
  const int64_t first_token = int64_t(tile) * args.tile_tokens;
  const int64_t left = ids.num_tokens - first_token;
  const int32_t num_tokens = int32_t(left < args.tile_tokens ? left : args.tile_tokens);
  const int64_t tiles = args.num_tiles;

  const uint32_t num_topk = uint32_t(ids.num_topk);
  for (int64_t i = thread; i < int64_t(num_tokens) * num_topk; i += kLayoutThreads) {
    const uint32_t token = uint32_t(i) / num_topk;  // at most 2^31 - 1 picks in a call
    const int32_t slot = int32_t(uint32_t(i) - token * num_topk);
    const int32_t expert = read_id(ids, first_token + token, slot, &args.state->bad_inverse);
    if (expert < 0) continue;
    if (first_pass) atomicAdd(counts_here ? picks + expert : all_picks + expert, 1u);
    const int32_t rank =
        (args.expert_rank != nullptr ? args.expert_rank[expert]
                                     : contiguous_owner(expert, ids.num_experts, args.num_ranks)) -
        args.rank_begin;
    if (rank < 0 || rank >= ranks) continue;
    atomicOr(masks + token * uint32_t(mask_words) + uint32_t(rank) / 32, 1u << (rank % 32));
  }
  __syncthreads();

  const int32_t num_groups = (num_tokens + 31) / 32;
  for (int32_t rank = warp; rank < ranks; rank += kWarps) {
    uint32_t count = 0;
    for (int32_t group = 0; group < num_groups; ++group) {
      const uint32_t mask = masks[(group * 32 + lane) * mask_words + rank / 32];
      count += uint32_t(__popc(__ballot_sync(~0u, mask >> (rank % 32) & 1u)));
    }
    if (lane == 0) {
      store_shared_word(words + rank * tiles + tile, tile_word(tag, count, tile == 0));
      before[rank] = count;
    }
  }
  if (first_pass && counts_here) {
    for (int i = thread; i < ids.num_experts; i += kLayoutThreads) {
      if (picks[i] != 0) atomicAdd(all_picks + i, picks[i]);
    }
  }
  __syncwarp();
  for (int32_t first = warp; first < ranks; first += kWarps * kTogether) {
    Window window[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int32_t rank = first + kWarps * i;
      if (rank < ranks) window[i] = look_back(words + rank * tiles, tile - 1, tag, lane);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int32_t rank = first + kWarps * i;
      if (rank >= ranks) break;
      const uint32_t sum = count_before(words + rank * tiles, tile, tag, lane, window[i]);
      if (lane == 0) {
        const uint32_t end = sum + before[rank];
        if (tile != 0) store_shared_word(words + rank * tiles + tile, tile_word(tag, end, true));
        if (tile == args.num_tiles - 1) args.per_rank[args.rank_begin + rank] = int32_t(end);
        before[rank] = sum;
      }
      __syncwarp();
    }
  }

  // 32 tokens and up to 32 ranks at a time through shared memory, so that rows are written whole.
  if (args.position != nullptr || args.in_rank != nullptr) {
    int32_t* buffer = stage;
    for (int32_t group = 0; group < num_groups; ++group) {
      const int32_t tokens = min(32, num_tokens - group * 32);
      for (int32_t word = 0; word < mask_words; ++word) {
        const int32_t here = min(32, ranks - word * 32);
        const uint32_t mask = masks[(group * 32 + lane) * mask_words + word];
        for (int32_t bit = warp; bit < here; bit += kWarps) {
          const uint32_t there = __ballot_sync(~0u, mask >> bit & 1u);
          const uint32_t sum = before[word * 32 + bit];  // of this warp's ranks only
          const uint32_t place = sum + uint32_t(__popc(there & ((1u << lane) - 1)));
          buffer[lane * here + bit] = mask >> bit & 1u ? int32_t(place) : -1;
          __syncwarp();
          if (lane == 0) before[word * 32 + bit] = sum + uint32_t(__popc(there));
          __syncwarp();
        }
        __syncthreads();
        const int64_t row = first_token + group * 32;
        for (int32_t i = thread; i < tokens * here; i += kLayoutThreads) {
          const int32_t token = i / here;
          const int64_t cell =
              (row + token) * args.num_ranks + args.rank_begin + word * 32 + (i - token * here);
          const int32_t place = buffer[i];
          if (args.position != nullptr) args.position[cell] = place;
          if (args.in_rank != nullptr) args.in_rank[cell] = place >= 0;
        }
        buffer = buffer == stage ? stage + 32 * columns : stage;
      }
    }
  }

  if (!last_block(&args.state->done, uint32_t(args.num_tiles))) return;
  if (first_pass) {
    for (int i = thread; i < ids.num_experts; i += kLayoutThreads) {
      args.per_expert[i] = int32_t(__ldcg(all_picks + i));
      all_picks[i] = 0;
    }
  }
  if (thread == 0) {
    if (first_pass && args.error != nullptr) {
      *args.error = id_error(ids, __ldcg(&args.state->bad_inverse));
    }
    args.state->bad_inverse = 0;
    args.state->ticket = 0;
    args.state->epoch = tag;
  }
}

}  // namespace epcomm
