// Where every row of a dispatch goes and comes from: what a handle owns.
#pragma once

#include <cstdint>
#include <vector>

#include "epcomm/entry.h"
#include "host/layout.hpp"

namespace epcomm::host {

struct Routing {
  uint64_t generation = 0;  // the epoch that made it; equal on all ranks
  RowLayout layout = RowLayout::kRank;
  int64_t alignment = 1;
  int64_t capacity = -1;  // -1: none
  int32_t rank = 0, num_ranks = 1, num_topk = 1, num_local_experts = 0;
  bool has_weights = false;

  // This rank's tokens.
  int64_t num_tokens = 0;
  std::vector<int32_t> ids;    // [num_tokens, num_topk] expert ids, -1: no pick
  std::vector<float> weights;  // the same shape, or empty
  SendLists send;              // per rank the tokens it receives, ascending
  // Per token the ranks that receive it, ascending, with the token's place in that rank's list.
  std::vector<int64_t> token_begin;  // [num_tokens + 1]
  std::vector<int32_t> token_rank, token_index;

  // Everybody's: rows from rank s to rank d are rows_of[s * num_ranks + d], before any limit.
  std::vector<int64_t> rows_of;
  std::vector<int64_t> limit;  // [num_ranks] rows that a rank takes; later ones are not delivered

  // What this rank receives, in received order.
  int64_t recv_rows = 0;            // delivered
  std::vector<int64_t> recv_begin;  // [num_ranks + 1] by source, before the limit
  std::vector<int32_t> recv_ids;    // [recv_rows, num_topk] local expert, -1 elsewhere
  std::vector<float> recv_weights;  // the same shape, or empty
  std::vector<int32_t> recv_token;  // [recv_rows] token at its source
  std::vector<int64_t> picks_of;    // [num_ranks, num_local_experts]

  // Expert layout.
  std::vector<int64_t> expert_begin;  // [num_local_experts + 1] padded starts, before capacity
  std::vector<int64_t> pick_row;      // [recv_rows, num_topk] row of the pick; -1: none or dropped
  int64_t num_picks = 0;              // of this rank's experts, before capacity
  int64_t num_dropped = 0;            // rows (rank layout) or picks (expert layout) not delivered

  int64_t rows(int source, int destination) const {
    return rows_of[size_t(source) * num_ranks + destination];
  }

  // First row of `source` in the received order of `destination`.
  int64_t base(int source, int destination) const {
    int64_t at = 0;
    for (int s = 0; s < source; ++s) at += rows(s, destination);
    return at;
  }
  // First row that `holder` returns, among all rows that come back to `owner` in a combine.
  int64_t return_base(int owner, int holder) const {
    int64_t at = 0;
    for (int d = 0; d < holder; ++d) at += rows(owner, d);
    return at;
  }
  // Rows that `destination` receives, before its limit.
  int64_t total(int destination) const { return base(num_ranks, destination); }

  // Rows of the caller's array on this rank: fixed by capacity, else as many as came.
  int64_t output_rows() const {
    if (capacity >= 0) return capacity;
    return layout == RowLayout::kRank ? recv_rows : expert_begin.back();
  }

  // token_begin, token_rank, token_index from `send`.
  void index_tokens();
  // expert_begin, num_picks and num_dropped from picks_of and rows_of.
  void place_experts();
  // pick_row from recv_ids. Needs place_experts().
  void place_picks();
};

}  // namespace epcomm::host
