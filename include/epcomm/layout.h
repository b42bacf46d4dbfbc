// The layout pass of device memory: what a kernel is given, and the sizes of its launch. The same
// text for g++, which launches it, and NVRTC.
#pragma once

#include "epcomm/base.h"

namespace epcomm {

// topk_idx as the caller holds it: int32 or int64 [num_tokens, num_topk], any byte strides.
struct IdView {
  const void* data;
  int64_t token_stride;
  int64_t topk_stride;
  int64_t num_tokens;
  int32_t num_topk;
  int32_t num_experts;  // ids are -1 .. num_experts - 1
  int32_t is64;
  int32_t aligned;  // address and strides are multiples of the item's size
};

// The owner of an expert where no table says it: contiguous, the first num_experts % num_ranks
// ranks own one more.
EPCOMM_HD int32_t contiguous_owner(int32_t expert, int32_t num_experts, int32_t num_ranks) {
  const uint32_t share = uint32_t(num_experts) / uint32_t(num_ranks);
  const uint32_t more = uint32_t(num_experts) % uint32_t(num_ranks);
  const uint32_t in_larger = (share + 1) * more;
  if (uint32_t(expert) < in_larger) return int32_t(uint32_t(expert) / (share + 1));
  return int32_t(more + (uint32_t(expert) - in_larger) / share);
}

// The first bad id of a call: written by kernels, read by the host. Starts as zeros.
struct IdError {
  uint64_t inverse;  // ~(token * num_topk + slot) of the first bad pick; 0 is none
  int64_t value;
};

// Memory that the blocks of one launch share. Zeroed once; every launch leaves it ready for the
// next, which may be of another size as long as it fits.
struct LayoutState {
  uint32_t ticket;
  uint32_t done;
  uint32_t epoch;
  uint32_t unused;
  uint64_t bad_inverse;
  // Behind it: uint32 [num_experts] picks so far, then uint64 [ranks of a pass][tiles] words.
};

// Of a tile and a rank: how many of the tile's tokens go there, or with kTilePrefix of all tokens
// up to the tile's end. Valid if the upper half is the launch's tag.
constexpr uint64_t kTilePrefix = uint64_t(1) << 31;
EPCOMM_HD uint64_t tile_word(uint32_t tag, uint32_t count, bool prefix) {
  return uint64_t(tag) << 32 | (prefix ? kTilePrefix : 0) | count;
}
EPCOMM_HD uint32_t tile_tag(uint64_t word) { return uint32_t(word >> 32); }
EPCOMM_HD uint32_t tile_count(uint64_t word) { return uint32_t(word) & 0x7fffffffu; }
EPCOMM_HD bool tile_is_prefix(uint64_t word) { return (word & kTilePrefix) != 0; }

constexpr int32_t kLayoutThreads = 256;
constexpr int32_t kLayoutRanks = 1024;      // of one launch; more take several
constexpr int32_t kLayoutExperts = 4096;    // counted in shared memory; more in device memory
constexpr int32_t kLayoutTiles = 512;       // wanted at most: about what runs at once
constexpr int32_t kLayoutMaskWords = 4096;  // of shared memory: a bit for each token and rank

struct LayoutPlan {
  int32_t tile_tokens;
  int32_t num_tiles;
  int32_t num_passes;  // launches, of kLayoutRanks ranks each
  int32_t shared_bytes;
  uint64_t words_offset;  // in the state
  uint64_t state_bytes;
};

// num_ranks and num_experts at least 1, num_topk and num_tokens 0 or more.
EPCOMM_HD LayoutPlan layout_plan(int64_t num_tokens, int32_t num_experts, int32_t num_ranks) {
  LayoutPlan plan{};
  const int32_t ranks = num_ranks < kLayoutRanks ? num_ranks : kLayoutRanks;
  const int32_t words = (ranks + 31) / 32;
  // Small tiles fill the device, large ones keep the number of tiles that must be summed small.
  const int64_t most = kLayoutMaskWords / words;
  int64_t tokens = 32;
  while (tokens < most && (num_tokens + tokens - 1) / tokens > kLayoutTiles) tokens *= 2;
  plan.tile_tokens = int32_t(tokens);
  plan.num_tiles = int32_t((num_tokens + tokens - 1) / tokens);
  if (plan.num_tiles == 0) plan.num_tiles = 1;
  plan.num_passes = int32_t((int64_t(num_ranks) + kLayoutRanks - 1) / kLayoutRanks);
  const int32_t counted = num_experts <= kLayoutExperts ? num_experts : 0;
  const int32_t columns = ranks < 32 ? ranks : 32;
  plan.shared_bytes = 4 * (int32_t(tokens) * words + counted + ranks + 2 * 32 * columns);
  plan.words_offset = (sizeof(LayoutState) + 4 * uint64_t(num_experts) + 7) / 8 * 8;
  plan.state_bytes = plan.words_offset + 8 * uint64_t(plan.num_tiles) * uint64_t(ranks);
  return plan;
}

struct LayoutArgs {
  IdView ids;
  const int32_t* expert_rank;  // [num_experts], or null: contiguous
  int32_t num_ranks;
  int32_t rank_begin;  // of this pass
  int32_t tile_tokens;
  int32_t num_tiles;
  LayoutState* state;
  uint64_t words_offset;
  int32_t* per_rank;    // [num_ranks]
  int32_t* per_expert;  // [num_experts]
  int32_t* position;    // [num_tokens, num_ranks], or null
  uint8_t* in_rank;     // [num_tokens, num_ranks], or null
  IdError* error;
};

}  // namespace epcomm
