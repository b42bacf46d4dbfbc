// The layout pass: which tokens go to which rank, from the experts that a gate chose.
#pragma once

#include <cstdint>
#include <vector>

#include "epcomm/status.hpp"

namespace epcomm::host {

// topk_idx as the caller holds it: int32 or int64 [num_tokens, num_topk], any byte strides.
struct IndexView {
  const void* data;
  bool is64;
  int64_t num_tokens;
  int32_t num_topk;
  int64_t token_stride_bytes;
  int64_t topk_stride_bytes;
};

// An id that is neither an expert nor "no pick", as it was read.
struct BadPick {
  int64_t token;
  int32_t slot;
  int64_t value;
};

// Copy the ids to ids_out, int32 [num_tokens, num_topk] row-major, -1 where there is no pick. False
// if an id lies outside -1..num_experts-1, with the first one by row, then slot, in *bad; ids are
// compared before they are narrowed, so 2^40 is never expert 0. With bad_as_none such ids become
// -1 and all ids are copied; else ids_out is then unspecified.
bool read_ids(const IndexView& view, int32_t num_experts, bool bad_as_none, int32_t* ids_out,
              BadPick* bad) noexcept;

// Who owns each expert, and the id it has there.
struct Owners {
  int32_t num_ranks;
  const int32_t* expert_rank;   // [num_experts]
  const int32_t* expert_local;  // [num_experts]
  int32_t num_experts;
};

// Tokens with at least one pick at rank r, ascending: tokens[rank_begin[r] .. rank_begin[r + 1]).
struct SendLists {
  std::vector<int64_t> rank_begin;        // [num_ranks + 1]
  std::vector<int32_t> tokens;            // [rank_begin[num_ranks]]
  std::vector<int64_t> picks_per_expert;  // [num_experts]; the same expert twice is two picks
};

// `ids` as read_ids leaves them: int32 [num_tokens, num_topk], each -1..num_experts-1. Reuses the
// memory of *out.
Status make_send_lists(const int32_t* ids, int64_t num_tokens, int32_t num_topk,
                       const Owners& owners, SendLists* out) noexcept;

}  // namespace epcomm::host
