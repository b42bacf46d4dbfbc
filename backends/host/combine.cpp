// Combine: expert outputs back to their tokens' owner, summed by the written tree.
//
// A rank's rows of a token reach the owner in one of two ways: pushed into the owner's slot, or
// left where they are when they already lie in this rank's heap and the owner can load from it. The
// sum is the same either way: ranks ascending, from +0.0, in float32.
#include <algorithm>
#include <cstring>

#include "host/engine.hpp"
#include "host/writer.hpp"

namespace epcomm::host {

namespace {

// Rows [first, last) of `count` that are a channel's share.
struct Share {
  int64_t first, last;
  Share(int64_t count, int channel, int channels)
      : first(count * channel / channels), last(count * (channel + 1) / channels) {}
};

}  // namespace

bool Engine::in_own_heap(const Rows& rows) noexcept {
  if (rows.num_rows == 0 || rows.row_stride != rows.row_bytes()) return false;
  const std::byte* begin = transport_->heap() + layout_.slots;
  const std::byte* end = transport_->heap() + layout_.total_bytes;
  return rows.data >= begin && rows.data + rows.num_rows * rows.row_bytes() <= end;
}

Status Engine::signal_done(int peer) noexcept {
  return transport_->signal(peer, control_channel(), done_word(layout_, options_.rank), 1);
}

Status Engine::wait_done(const CallContext& context) noexcept {
  ++done_phases_;
  for (int i = 1; i < options_.shape.num_ranks; ++i) {
    const int peer = (options_.rank + i) % options_.shape.num_ranks;
    EPCOMM_RETURN_IF_ERROR(
        wait(peer, done_word(layout_, peer), done_phases_, "combine", "done", context));
  }
  return {};
}

Status Engine::combine(const CombineArgs& args, const CallContext& context) noexcept {
  if (!broken().ok()) return broken_;
  const int ranks = options_.shape.num_ranks, me = options_.rank;
  const Routing& routing = *args.routing;
  begin_epoch();

  const bool zero_copy = routing.layout == RowLayout::kRank && !args.exact_order &&
                         !options_.push_only && load_store_ && in_own_heap(args.x);
  Entry entry(Op::kCombine);
  entry.slot = take_free_slot(-1);
  entry.num_tokens = routing.num_tokens;
  entry.zero_copy = zero_copy ? uint64_t(args.x.data - transport_->heap()) : 0;
  entry.terms[kTermLayout] = int64_t(routing.layout);
  entry.terms[kTermAlignment] = routing.alignment;
  entry.terms[kTermCapacity] = routing.capacity;
  entry.terms[kTermDtype] = args.dtype;
  entry.terms[kTermRowBytes] = args.x.row_bytes();
  entry.terms[kTermWeights] = args.apply_weights;
  entry.terms[kTermCarried] = args.carried.data != nullptr;
  entry.terms[kTermExactOrder] = args.exact_order;
  entry.terms[kTermHandle] = int64_t(routing.generation);

  Status status = exchange("combine", entry, context);
  if (!status.ok()) return status;
  ++stats_.combines;
  stats_.zero_copy_combines += zero_copy;

  const auto run = [&]() -> Status {
    for (int i = 1; i < ranks; ++i)
      EPCOMM_RETURN_IF_ERROR(wait_credit("combine", (me + i) % ranks, context));
    if (args.exact_order) {
      EPCOMM_RETURN_IF_ERROR(combine_exact(args, context));
    } else {
      expect_data();
      EPCOMM_RETURN_IF_ERROR(
          for_channels(context, [&](int c) { return combine_push(args, c, zero_copy); }));
      EPCOMM_RETURN_IF_ERROR(wait_data("combine", context));
      EPCOMM_RETURN_IF_ERROR(combine_reduce(args, zero_copy, context));
    }
    if (args.carried_out) collect_carried(args, entry.slot);
    for (int i = 1; i < ranks; ++i) {
      const int peer = (me + i) % ranks;
      if (record(peer).zero_copy) EPCOMM_RETURN_IF_ERROR(signal_done(peer));
    }
    // The caller may write its rows again when this call returns: every reader must be done, and
    // every put that read them in place.
    if (zero_copy) return wait_done(context);
    return in_own_heap(args.x) ? quiet("combine", context, options_.timeout_s) : Status{};
  };
  try {
    status = run();
  } catch (const std::bad_alloc&) {
    status = error(Code::kInternal, -1, "combine: out of memory while rows were moving");
  }
  finish_slot(entry.slot);
  return break_if_lost(status);
}

Status Engine::combine_push(const CombineArgs& args, int channel, bool zero_copy) noexcept {
  const HeapShape& shape = options_.shape;
  const Routing& routing = *args.routing;
  const int ranks = shape.num_ranks, me = options_.rank, topk = shape.num_topk;
  const uint64_t row_bytes = uint64_t(args.x.row_bytes());
  const bool expert = routing.layout == RowLayout::kExpert;
  const bool in_heap = in_own_heap(args.x);
  const WaitSpec spec{"combine", "send", options_.timeout_s, nullptr, nullptr};
  Writer writer(transport_, layout_, shape, channel, spec);
  std::vector<const void*> rows(static_cast<size_t>(topk));
  std::vector<float> weights(static_cast<size_t>(topk));
  const bool stream = bulk(uint64_t(routing.recv_rows) * row_bytes);
  const auto copy = stream ? options_.ops->stream_copy : options_.ops->copy;
  const auto reduce = stream ? options_.ops->stream_reduce : options_.ops->reduce;

  for (int i = 1; i <= ranks; ++i) {
    const int owner = (me + i) % ranks;
    const int64_t begin = std::min(routing.recv_begin[size_t(owner)], routing.recv_rows);
    const int64_t end = std::min(routing.recv_begin[size_t(owner) + 1], routing.recv_rows);
    const Share share(end - begin, channel, shape.num_channels);
    const uint64_t to = slot_offset(layout_, record(owner).slot) + layout_.slot_payload +
                        uint64_t(routing.return_base(owner, me)) * row_bytes;
    if (expert) {
      for (int64_t place = share.first; place < share.last; ++place) {
        int count = 0;
        for (int k = 0; k < topk; ++k) {
          const size_t pick = size_t(begin + place) * size_t(topk) + size_t(k);
          if (routing.pick_row[pick] < 0) continue;
          rows[size_t(count)] = args.x.row(routing.pick_row[pick]);
          weights[size_t(count++)] = args.apply_weights ? routing.recv_weights[pick] : 1.0f;
        }
        std::byte* at = writer.at(owner, to + uint64_t(place) * row_bytes, row_bytes);
        if (!at) return writer.status();
        reduce(args.row_type, at, rows.data(), args.apply_weights ? weights.data() : nullptr, count,
               nullptr, size_t(args.x.num_cols));
      }
    } else if (owner != me && !zero_copy && share.last > share.first) {
      const uint64_t bytes = uint64_t(share.last - share.first) * row_bytes;
      if (in_heap && !writer.direct(owner)) {
        const uint64_t source = uint64_t(args.x.row(begin + share.first) - transport_->heap());
        writer.put(owner, to + uint64_t(share.first) * row_bytes, source, bytes);
      } else {
        for (int64_t place = share.first; place < share.last; ++place) {
          std::byte* at = writer.at(owner, to + uint64_t(place) * row_bytes, row_bytes);
          if (!at) return writer.status();
          copy(at, args.x.row(begin + place), row_bytes);
        }
      }
    }
  }
  if (stream) stream_fence();
  push_carried(args, writer, channel);
  EPCOMM_RETURN_IF_ERROR(writer.flush());
  for (int i = 1; i < ranks; ++i) EPCOMM_RETURN_IF_ERROR(signal_data((me + i) % ranks, channel));
  return {};
}

struct Engine::Sources {
  std::vector<const std::byte*> first;  // [rank] its row of this rank's first token there
  std::vector<int64_t> stride;
  std::vector<int64_t> delivered;  // [rank] how many of this rank's rows it got
};

Status Engine::combine_reduce(const CombineArgs& args, bool, const CallContext& context) noexcept {
  const Routing& routing = *args.routing;
  const int ranks = options_.shape.num_ranks, me = options_.rank;
  const int64_t row_bytes = args.x.row_bytes();
  Sources sources;
  for (int d = 0; d < ranks; ++d) {
    const int64_t base = routing.base(me, d);
    const EntryHeader& header = record(d);
    const std::byte* first;
    int64_t stride = row_bytes;
    if (routing.layout == RowLayout::kRank && d == me) {
      first = args.x.row(base);
      stride = args.x.row_stride;
    } else if (header.zero_copy) {
      first = transport_->peer_ptr(d, header.zero_copy) + base * row_bytes;
    } else {
      first = slot_payload(record(me).slot) + routing.return_base(me, d) * row_bytes;
    }
    sources.first.push_back(first);
    sources.stride.push_back(stride);
    sources.delivered.push_back(
        std::clamp<int64_t>(routing.limit[size_t(d)] - base, 0, routing.rows(me, d)));
  }
  const bool stream = bulk(uint64_t(routing.num_tokens) * uint64_t(row_bytes));
  const auto reduce = stream ? options_.ops->stream_reduce : options_.ops->reduce;
  for_ranges(routing.num_tokens, context, [&](int64_t begin, int64_t end) {
    std::vector<const void*> rows(static_cast<size_t>(ranks));
    for (int64_t token = begin; token < end; ++token) {
      int count = 0;
      for (int64_t i = routing.token_begin[size_t(token)];
           i < routing.token_begin[size_t(token) + 1]; ++i) {
        const size_t d = size_t(routing.token_rank[size_t(i)]);
        const int64_t place = routing.token_index[size_t(i)];
        if (place < sources.delivered[d])
          rows[size_t(count++)] = sources.first[d] + place * sources.stride[d];
      }
      reduce(args.row_type, args.out + token * args.out_stride, rows.data(), nullptr, count,
             args.bias_of(token), size_t(args.x.num_cols));
    }
    if (stream) stream_fence();
  });
  return {};
}

// ---- exact order: every pick travels and the owner sums them, k ascending
//
// The owner's slot holds a window of tokens, num_topk rows each; a word per row in the slot's index
// area says whether the pick was delivered. Windows take turns, a done signal between them.

Status Engine::combine_exact(const CombineArgs& args, const CallContext& context) noexcept {
  const int ranks = options_.shape.num_ranks, me = options_.rank;
  const int64_t window = layout_.slot_rows / options_.shape.num_topk;
  int64_t most = 0;
  for (int peer = 0; peer < ranks; ++peer) most = std::max(most, record(peer).num_tokens);
  const int64_t rounds = std::max<int64_t>(1, (most + window - 1) / window);
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t begin = round * window, end = begin + window;
    expect_data();
    EPCOMM_RETURN_IF_ERROR(
        for_channels(context, [&](int c) { return push_picks(args, c, begin, end); }));
    EPCOMM_RETURN_IF_ERROR(wait_data("combine", context));
    reduce_picks(args, record(me).slot, begin, std::min(end, args.routing->num_tokens), context);
    if (round + 1 == rounds) break;
    for (int i = 1; i < ranks; ++i) EPCOMM_RETURN_IF_ERROR(signal_done((me + i) % ranks));
    EPCOMM_RETURN_IF_ERROR(wait_done(context));
  }
  return {};
}

Status Engine::push_picks(const CombineArgs& args, int channel, int64_t begin_token,
                          int64_t end_token) noexcept {
  const HeapShape& shape = options_.shape;
  const Routing& routing = *args.routing;
  const int ranks = shape.num_ranks, me = options_.rank, topk = shape.num_topk;
  const uint64_t row_bytes = uint64_t(args.x.row_bytes());
  const WaitSpec spec{"combine", "send", options_.timeout_s, nullptr, nullptr};
  Writer writer(transport_, layout_, shape, channel, spec);
  for (int i = 1; i <= ranks; ++i) {
    const int owner = (me + i) % ranks;
    const auto tokens = routing.recv_token.begin();
    const auto begin = tokens + std::min(routing.recv_begin[size_t(owner)], routing.recv_rows);
    const auto end = tokens + std::min(routing.recv_begin[size_t(owner) + 1], routing.recv_rows);
    const int64_t first = std::lower_bound(begin, end, begin_token) - tokens;
    const int64_t last = std::lower_bound(begin, end, end_token) - tokens;
    const Share share(last - first, channel, shape.num_channels);
    const uint64_t slot = slot_offset(layout_, record(owner).slot);
    for (int64_t r = first + share.first; r < first + share.last; ++r) {
      for (int k = 0; k < topk; ++k) {
        const size_t pick = size_t(r) * size_t(topk) + size_t(k);
        if (routing.recv_ids[pick] < 0) continue;  // another rank's pick, or none
        const uint64_t place = uint64_t(tokens[r] - begin_token) * uint64_t(topk) + uint64_t(k);
        const int32_t delivered = routing.pick_row[pick] >= 0;
        std::byte* at = writer.at(owner, slot + layout_.slot_idx + place * 4, 4);
        if (!at) return writer.status();
        std::memcpy(at, &delivered, 4);
        if (!delivered) continue;
        at = writer.at(owner, slot + layout_.slot_payload + place * row_bytes, row_bytes);
        if (!at) return writer.status();
        options_.ops->copy(at, args.x.row(routing.pick_row[pick]), row_bytes);
      }
    }
  }
  if (begin_token == 0) push_carried(args, writer, channel);
  EPCOMM_RETURN_IF_ERROR(writer.flush());
  for (int i = 1; i < ranks; ++i) EPCOMM_RETURN_IF_ERROR(signal_data((me + i) % ranks, channel));
  return {};
}

void Engine::reduce_picks(const CombineArgs& args, int slot, int64_t begin, int64_t end,
                          const CallContext& context) noexcept {
  if (end <= begin) return;
  const Routing& routing = *args.routing;
  const int topk = options_.shape.num_topk;
  const std::byte* payload = slot_payload(slot);
  const int32_t* delivered = reinterpret_cast<const int32_t*>(
      transport_->heap() + slot_offset(layout_, slot) + layout_.slot_idx);
  for_ranges(end - begin, context, [&](int64_t from, int64_t to) {
    std::vector<const void*> rows(static_cast<size_t>(topk));
    std::vector<float> weights(static_cast<size_t>(topk));
    for (int64_t place = from; place < to; ++place) {
      const int64_t token = begin + place;
      int count = 0;
      for (int k = 0; k < topk; ++k) {
        const int64_t at = place * topk + k;
        const size_t pick = size_t(token * topk + k);
        if (routing.ids[pick] < 0 || !delivered[at]) continue;
        rows[size_t(count)] = payload + at * args.x.row_bytes();
        weights[size_t(count++)] = args.apply_weights ? routing.weights[pick] : 1.0f;
      }
      options_.ops->reduce(args.row_type, args.out + token * args.out_stride, rows.data(),
                           args.apply_weights ? weights.data() : nullptr, count,
                           args.bias_of(token), size_t(args.x.num_cols));
    }
  });
}

// ---- weights carried back: float32 [num_topk] beside each returning row

void Engine::push_carried(const CombineArgs& args, Writer& writer, int channel) noexcept {
  if (!args.carried.data) return;
  const HeapShape& shape = options_.shape;
  const Routing& routing = *args.routing;
  const int ranks = shape.num_ranks, me = options_.rank, topk = shape.num_topk;
  const uint64_t bytes = uint64_t(topk) * 4;
  for (int i = 1; i <= ranks; ++i) {
    const int owner = (me + i) % ranks;
    const int64_t begin = std::min(routing.recv_begin[size_t(owner)], routing.recv_rows);
    const int64_t end = std::min(routing.recv_begin[size_t(owner) + 1], routing.recv_rows);
    const Share share(end - begin, channel, shape.num_channels);
    const uint64_t to = slot_offset(layout_, record(owner).slot) + layout_.slot_weights +
                        uint64_t(routing.return_base(owner, me)) * bytes;
    for (int64_t place = share.first; place < share.last; ++place) {
      std::byte* at = writer.at(owner, to + uint64_t(place) * bytes, bytes);
      if (!at) return;
      for (int k = 0; k < topk; ++k) {
        const size_t pick = size_t(begin + place) * size_t(topk) + size_t(k);
        float value = 0;
        if (routing.recv_ids[pick] >= 0) {
          if (routing.layout == RowLayout::kRank) {
            std::memcpy(&value, args.carried.row(begin + place) + k * args.carried.col_stride, 4);
          } else if (routing.pick_row[pick] >= 0) {
            std::memcpy(&value, args.carried.row(routing.pick_row[pick]), 4);
          }
        }
        std::memcpy(at + k * 4, &value, 4);
      }
    }
  }
}

void Engine::collect_carried(const CombineArgs& args, int slot) noexcept {
  const Routing& routing = *args.routing;
  const int me = options_.rank, topk = options_.shape.num_topk;
  const float* returned = reinterpret_cast<const float*>(
      transport_->heap() + slot_offset(layout_, slot) + layout_.slot_weights);
  std::fill(args.carried_out, args.carried_out + routing.ids.size(), 0.0f);
  std::vector<int64_t> base, back;
  for (int d = 0; d < routing.num_ranks; ++d) {
    base.push_back(routing.base(me, d));
    back.push_back(routing.return_base(me, d));
  }
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    for (int64_t i = routing.token_begin[size_t(token)]; i < routing.token_begin[size_t(token) + 1];
         ++i) {
      const int d = routing.token_rank[size_t(i)];
      const int64_t place = routing.token_index[size_t(i)];
      if (base[size_t(d)] + place >= routing.limit[size_t(d)]) continue;
      for (int k = 0; k < topk; ++k) {
        const size_t pick = size_t(token * topk + k);
        if (routing.ids[pick] >= 0 && options_.expert_rank[size_t(routing.ids[pick])] == d) {
          args.carried_out[pick] = returned[(back[size_t(d)] + place) * topk + k];
        }
      }
    }
  }
}

}  // namespace epcomm::host
