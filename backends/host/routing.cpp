#include "host/routing.hpp"

namespace epcomm::host {

void Routing::index_tokens() {
  token_begin.assign(size_t(num_tokens) + 1, 0);
  for (int32_t token : send.tokens) ++token_begin[size_t(token) + 1];
  for (int64_t t = 0; t < num_tokens; ++t) token_begin[size_t(t) + 1] += token_begin[size_t(t)];
  token_rank.resize(send.tokens.size());
  token_index.resize(send.tokens.size());
  std::vector<int64_t> next(token_begin.begin(), token_begin.end() - 1);
  for (int d = 0; d < num_ranks; ++d) {  // ascending, so each token's ranks come out ascending
    const int64_t first = send.rank_begin[size_t(d)];
    for (int64_t i = first; i < send.rank_begin[size_t(d) + 1]; ++i) {
      const int64_t at = next[size_t(send.tokens[size_t(i)])]++;
      token_rank[size_t(at)] = d;
      token_index[size_t(at)] = int32_t(i - first);
    }
  }
}

void Routing::place_experts() {
  expert_begin.assign(size_t(num_local_experts) + 1, 0);
  num_picks = 0;
  num_dropped = 0;
  for (int e = 0; e < num_local_experts; ++e) {
    int64_t picks = 0;
    for (int s = 0; s < num_ranks; ++s) picks += picks_of[size_t(s) * num_local_experts + e];
    num_picks += picks;
    const int64_t begin = expert_begin[size_t(e)];
    const int64_t padded = (picks + alignment - 1) / alignment * alignment;
    expert_begin[size_t(e) + 1] = begin + padded;
    if (layout == RowLayout::kExpert && capacity >= 0 && begin + picks > capacity) {
      num_dropped += begin >= capacity ? picks : begin + picks - capacity;
    }
  }
  if (layout == RowLayout::kRank) num_dropped = total(rank) - limit[size_t(rank)];
}

void Routing::place_picks() {
  std::vector<int64_t> next(expert_begin.begin(), expert_begin.end() - 1);
  pick_row.resize(recv_ids.size());
  for (size_t i = 0; i < recv_ids.size(); ++i) {
    const int32_t expert = recv_ids[i];
    int64_t row = -1;
    if (expert >= 0) {
      row = next[size_t(expert)]++;
      if (capacity >= 0 && row >= capacity) row = -1;
    }
    pick_row[i] = row;
  }
}

}  // namespace epcomm::host
