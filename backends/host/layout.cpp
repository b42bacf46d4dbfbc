#include "host/layout.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <limits>

namespace epcomm::host {
namespace {

template <typename Id>
Id id_at(const std::byte* at) {
  Id id;
  std::memcpy(&id, at, sizeof id);  // strides may be odd
  return id;
}

template <typename Id>
bool outside(Id id, int32_t num_experts) {
  return id < -1 || id >= num_experts;
}

// One row of ids; true if any of them is bad, which is then -1.
template <typename Id>
bool narrow(const std::byte* row, int64_t stride_bytes, int64_t count, int32_t num_experts,
            int32_t* out) {
  int32_t any_bad = 0;
  if (stride_bytes == int64_t(sizeof(Id))) {
    for (int64_t i = 0; i < count; ++i) {
      const Id id = id_at<Id>(row + i * int64_t(sizeof(Id)));
      const bool bad = outside(id, num_experts);
      any_bad |= int32_t(bad);
      out[i] = bad ? -1 : int32_t(id);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const Id id = id_at<Id>(row + i * stride_bytes);
      const bool bad = outside(id, num_experts);
      any_bad |= int32_t(bad);
      out[i] = bad ? -1 : int32_t(id);
    }
  }
  return any_bad != 0;
}

template <typename Id>
bool read(const IndexView& view, int32_t num_experts, bool bad_as_none, int32_t* out,
          BadPick* bad) {
  const auto* data = static_cast<const std::byte*>(view.data);
  // Rows that touch are one long row.
  const bool joined = view.topk_stride_bytes == int64_t(sizeof(Id)) &&
                      view.token_stride_bytes == int64_t(sizeof(Id)) * view.num_topk;
  const int64_t rows = joined ? 1 : view.num_tokens;
  const int64_t columns = joined ? view.num_tokens * view.num_topk : view.num_topk;
  bool good = true;
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* at = data + row * view.token_stride_bytes;
    if (!narrow<Id>(at, view.topk_stride_bytes, columns, num_experts, out + row * columns))
      continue;
    if (good) {
      int64_t i = 0;
      while (!outside(id_at<Id>(at + i * view.topk_stride_bytes), num_experts)) ++i;
      bad->token = joined ? i / view.num_topk : row;
      bad->slot = int32_t(joined ? i % view.num_topk : i);
      bad->value = int64_t(id_at<Id>(at + i * view.topk_stride_bytes));
      good = false;
    }
    if (!bad_as_none) return false;
  }
  return good;
}

// Up to 8 ranks: the ranks of a token are the bits of a word, and each rank has room for every
// token in `room`, so that a token is appended without a branch: kept where its bit is set,
// overwritten by the next one elsewhere.
constexpr int32_t kFewRanks = 8;

void list_few_ranks(const int32_t* ids, int64_t num_tokens, int32_t num_topk, const Owners& owners,
                    SendLists* out) {
  const int32_t num_ranks = owners.num_ranks;
  // Entry 0 is "no pick".
  std::vector<uint32_t> bit(size_t(owners.num_experts) + 1, 0);
  for (int32_t e = 0; e < owners.num_experts; ++e) bit[size_t(e) + 1] = 1u << owners.expert_rank[e];
  std::vector<int64_t> picks(size_t(owners.num_experts) + 1, 0);
  std::vector<int32_t>& room = out->tokens;
  room.resize(size_t(num_tokens) * size_t(num_ranks));
  int32_t* end[kFewRanks];
  for (int32_t rank = 0; rank < num_ranks; ++rank) end[rank] = room.data() + rank * num_tokens;
  for (int64_t token = 0; token < num_tokens; ++token) {
    uint32_t ranks = 0;
    for (int32_t k = 0; k < num_topk; ++k) {
      const size_t entry = size_t(int64_t(*ids++) + 1);
      ranks |= bit[entry];
      ++picks[entry];
    }
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      *end[rank] = int32_t(token);
      end[rank] += (ranks >> rank) & 1u;
    }
  }
  int32_t* to = room.data();
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    out->rank_begin[size_t(rank)] = to - room.data();
    const int32_t* from = room.data() + rank * num_tokens;
    const size_t count = size_t(end[rank] - from);
    if (count != 0) std::memmove(to, from, count * sizeof(int32_t));
    to += count;
  }
  out->rank_begin[size_t(num_ranks)] = to - room.data();
  room.resize(size_t(to - room.data()));
  out->picks_per_expert.assign(picks.begin() + 1, picks.end());
}

void list_any_ranks(const int32_t* ids, int64_t num_tokens, int32_t num_topk, const Owners& owners,
                    SendLists* out) {
  std::vector<int64_t>& picks = out->picks_per_expert;
  picks.assign(size_t(owners.num_experts), 0);
  std::vector<int64_t>& begin = out->rank_begin;
  // The last token seen at each rank tells whether this pick is the token's first there.
  std::vector<int64_t> last(size_t(owners.num_ranks), -1);
  const int32_t* id = ids;
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int32_t k = 0; k < num_topk; ++k, ++id) {
      if (*id < 0) continue;
      ++picks[size_t(*id)];
      const size_t rank = size_t(owners.expert_rank[*id]);
      begin[rank + 1] += int64_t(last[rank] != token);
      last[rank] = token;
    }
  }
  for (int32_t rank = 0; rank < owners.num_ranks; ++rank)
    begin[size_t(rank) + 1] += begin[size_t(rank)];
  out->tokens.resize(size_t(begin[size_t(owners.num_ranks)]));
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  std::fill(last.begin(), last.end(), -1);
  id = ids;
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int32_t k = 0; k < num_topk; ++k, ++id) {
      if (*id < 0) continue;
      const size_t rank = size_t(owners.expert_rank[*id]);
      if (last[rank] == token) continue;
      last[rank] = token;
      out->tokens[size_t(next[rank]++)] = int32_t(token);
    }
  }
}

}  // namespace

bool read_ids(const IndexView& view, int32_t num_experts, bool bad_as_none, int32_t* ids_out,
              BadPick* bad) noexcept {
  if (view.num_tokens <= 0 || view.num_topk <= 0) return true;
  return view.is64 ? read<int64_t>(view, num_experts, bad_as_none, ids_out, bad)
                   : read<int32_t>(view, num_experts, bad_as_none, ids_out, bad);
}

Status make_send_lists(const int32_t* ids, int64_t num_tokens, int32_t num_topk,
                       const Owners& owners, SendLists* out) noexcept {
  if (num_tokens > std::numeric_limits<int32_t>::max()) {
    return error(Code::kInvalidArgument, -1, "%lld tokens in one call: at most 2147483647",
                 static_cast<long long>(num_tokens));
  }
  try {
    out->rank_begin.assign(size_t(owners.num_ranks) + 1, 0);
    if (owners.num_ranks <= kFewRanks) {
      list_few_ranks(ids, num_tokens, num_topk, owners, out);
    } else {
      list_any_ranks(ids, num_tokens, num_topk, owners, out);
    }
  } catch (const std::exception&) {  // bad_alloc or length_error
    return error(Code::kOutOfMemory, -1, "layout of %lld tokens, %d picks each, over %d ranks",
                 static_cast<long long>(num_tokens), num_topk, owners.num_ranks);
  }
  return {};
}

}  // namespace epcomm::host
