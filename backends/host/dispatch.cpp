// Dispatch: counts in the entry words, then rows straight into their place at the receiver.
#include <algorithm>
#include <cstring>

#include "epcomm/agreement.hpp"
#include "host/engine.hpp"
#include "host/writer.hpp"

namespace epcomm::host {

namespace {

Status outside(const char* name, int64_t a, int64_t b, int64_t value, int64_t count) {
  return error(Code::kInvalidArgument, -1,
               "dispatch: %s[%lld, %lld] is %lld; allowed: -1 or 0 to %lld", name, (long long)a,
               (long long)b, (long long)value, (long long)(count - 1));
}

}  // namespace

Status Engine::dispatch_begin(DispatchArgs args, DispatchCall* call,
                              const CallContext& context) noexcept {
  if (!broken().ok()) return broken_;
  const HeapShape& shape = options_.shape;
  const int ranks = shape.num_ranks, me = options_.rank;
  const int experts = int(options_.expert_rank.size());
  begin_epoch();

  Entry entry(Op::kDispatch);
  call->epoch = epoch_;
  call->cached = args.routing != nullptr;
  std::shared_ptr<Routing> routing = args.routing;
  try {
    if (!call->cached) {
      routing = std::make_shared<Routing>();
      routing->layout = args.layout;
      routing->alignment = args.alignment;
      routing->capacity = args.capacity;
      routing->rank = me;
      routing->num_ranks = ranks;
      routing->num_topk = shape.num_topk;
      routing->num_local_experts = num_local_[size_t(me)];
      routing->num_tokens = args.x.num_rows;
      routing->has_weights = args.weights.data != nullptr;
      routing->ids.resize(size_t(args.x.num_rows) * size_t(shape.num_topk));
      BadPick bad{};
      if (!read_ids(args.ids, experts, args.capacity >= 0, routing->ids.data(), &bad)) {
        const Status told = outside("topk_idx", bad.token, bad.slot, bad.value, experts);
        if (args.capacity >= 0) {
          call->bad_pick = told.text;
        } else {
          entry.status = told;
        }
      }
      if (entry.status.ok()) {
        entry.status = make_send_lists(routing->ids.data(), routing->num_tokens, shape.num_topk,
                                       owners_, &routing->send);
      }
      if (entry.status.ok()) {
        routing->index_tokens();
        if (routing->has_weights) {
          routing->weights.resize(routing->ids.size());
          for (int64_t t = 0; t < routing->num_tokens; ++t) {
            for (int k = 0; k < shape.num_topk; ++k) {
              const size_t at = size_t(t) * size_t(shape.num_topk) + size_t(k);
              float weight = 0;  // a weight without a pick is never read
              if (routing->ids[at] >= 0) {
                std::memcpy(&weight, args.weights.row(t) + k * args.weights.col_stride,
                            sizeof weight);
              }
              routing->weights[at] = weight;
            }
          }
        }
        entry.counts = routing.get();
      }
    }
  } catch (const std::bad_alloc&) {
    entry.status =
        error(Code::kOutOfMemory, -1, "dispatch: no memory for the routing of %lld tokens",
              (long long)args.x.num_rows);
  }
  if (entry.status.ok() && args.want_lease == 2 && leases_held() >= shape.num_slots) {
    entry.status = no_lease_left(leases_held(), shape.num_slots);
  }
  if (entry.status.ok() && args.want_lease == 2 && args.capacity > layout_.slot_rows) {
    entry.status =
        error(Code::kUnsupported, -1,
              "dispatch: copy=False, but capacity=%lld and a slot holds %lld rows; lower "
              "capacity, raise max_recv_tokens or let it copy",
              (long long)args.capacity, (long long)layout_.slot_rows);
  }
  call->wire_row_bytes = uint64_t(args.quantize ? args.x.num_cols : args.x.row_bytes());
  call->wire_scale_bytes = args.quantize      ? uint64_t((args.x.num_cols + 127) / 128) * 4
                           : args.scales.data ? uint64_t(args.scales.row_bytes())
                                              : 0;

  call->slot = take_free_slot(-1);
  entry.slot = call->slot;
  entry.num_tokens = args.x.num_rows;
  entry.terms[kTermLayout] = int64_t(args.layout);
  entry.terms[kTermAlignment] = args.alignment;
  entry.terms[kTermCapacity] = args.capacity;
  entry.terms[kTermDtype] = args.dtype;
  entry.terms[kTermRowBytes] = int64_t(call->wire_row_bytes);
  entry.terms[kTermScaleBytes] = int64_t(call->wire_scale_bytes);
  entry.terms[kTermScaleDtype] = args.scale_dtype;
  entry.terms[kTermQuantize] = args.quantize;
  entry.terms[kTermWeights] =
      args.routing ? args.routing->has_weights : args.weights.data != nullptr;
  entry.terms[kTermHandle] = args.routing ? int64_t(args.routing->generation) : 0;

  Status status = exchange("dispatch", entry, context);
  if (!status.ok()) return status;
  ++stats_.dispatches;
  call->peer_slot.resize(size_t(ranks));
  for (int peer = 0; peer < ranks; ++peer) call->peer_slot[size_t(peer)] = record(peer).slot;

  if (!call->cached) {
    routing->generation = epoch_;
    routing->rows_of.resize(size_t(ranks) * size_t(ranks));
    routing->picks_of.resize(size_t(ranks) * size_t(routing->num_local_experts));
    for (int source = 0; source < ranks; ++source) {
      for (int d = 0; d < ranks; ++d)
        routing->rows_of[size_t(source) * size_t(ranks) + size_t(d)] = record_rows(source, d);
      for (int e = 0; e < routing->num_local_experts; ++e) {
        routing->picks_of[size_t(source) * size_t(routing->num_local_experts) + size_t(e)] =
            record_picks(source, e);
      }
    }
    routing->limit.resize(size_t(ranks));
    for (int d = 0; d < ranks; ++d) {
      int64_t limit = routing->total(d);
      // Capacity drops the last rows, those that have no room here included. In expert layout the
      // last rows are other ones than the last to travel, so all must have room.
      if (args.capacity >= 0 && args.layout == RowLayout::kRank)
        limit = std::min({limit, args.capacity, shape.max_recv_tokens});
      routing->limit[size_t(d)] = limit;
      if (limit > shape.max_recv_tokens) {
        // Known to all from the counts, so all raise it and nothing moves.
        finish_slot(call->slot);
        return too_many_rows(d, limit, shape.max_recv_tokens);
      }
    }
    routing->recv_begin.resize(size_t(ranks) + 1);
    for (int source = 0; source <= ranks; ++source)
      routing->recv_begin[size_t(source)] = routing->base(source, me);
    routing->recv_rows = routing->limit[size_t(me)];
    routing->place_experts();
  }
  args.routing = nullptr;
  call->args = std::move(args);
  call->routing = std::move(routing);

  // A view of the heap, where one is wanted and can be had.
  call->lease_slot = -1;
  if (call->args.want_lease && leases_held() < shape.num_slots) {
    if (call->routing->layout == RowLayout::kRank) {
      if (call->routing->output_rows() <= layout_.slot_rows) call->lease_slot = call->slot;
    } else {
      const uint64_t rows = uint64_t(call->routing->output_rows());
      const uint64_t need =
          align_up(rows * call->wire_row_bytes, kSignalStride) + rows * call->wire_scale_bytes;
      if (need <= payload_bytes()) call->lease_slot = take_free_slot(call->slot);
    }
  }
  if (call->lease_slot >= 0) {
    slot_use_[size_t(call->lease_slot)] = SlotUse::kLease;
    ++stats_.leases_granted;
  }
  return {};
}

Status Engine::dispatch_send(DispatchCall& call, int channel) noexcept {
  const HeapShape& shape = options_.shape;
  const DispatchArgs& args = call.args;
  const Routing& routing = *call.routing;
  const int ranks = shape.num_ranks, me = options_.rank, topk = shape.num_topk;
  const uint64_t row_bytes = call.wire_row_bytes, scale_bytes = call.wire_scale_bytes;
  const uint64_t scales_at = layout_.slot_payload + scales_offset(row_bytes);
  const WaitSpec spec{"dispatch", "send", options_.timeout_s, nullptr, nullptr};
  Writer writer(transport_, layout_, shape, channel, spec);

  // The row as it travels, made once per token where the caller's memory does not have it.
  std::vector<std::byte> scratch;
  const std::byte* scratch_scales = nullptr;
  int64_t scratch_token = -1;
  const bool gather = !args.x.packed();
  const uint64_t source_bytes = uint64_t(args.x.row_bytes());
  if (args.quantize || gather)
    scratch.resize(align_up(source_bytes, 64) + align_up(row_bytes, 64) + scale_bytes);
  const auto wire_row = [&](int64_t token) -> const std::byte* {
    if (!args.quantize && !gather) return args.x.row(token);
    std::byte* codes = scratch.data() + align_up(source_bytes, 64);
    if (scratch_token != token) {
      scratch_token = token;
      const std::byte* source = args.x.row(token);
      if (gather) {
        copy_strided(scratch.data(), source, args.x.num_cols, args.x.col_stride, args.x.itemsize);
        source = scratch.data();
      }
      if (args.quantize) {
        float* scales = reinterpret_cast<float*>(codes + align_up(row_bytes, 64));
        options_.ops->quantize(args.row_type, reinterpret_cast<uint8_t*>(codes), scales, source,
                               size_t(args.x.num_cols), args.quantize == 2);
        scratch_scales = reinterpret_cast<const std::byte*>(scales);
      }
    }
    return args.quantize ? codes : scratch.data();
  };

  const bool stream = bulk(uint64_t(routing.send.tokens.size()) * row_bytes);
  const auto copy = stream ? options_.ops->stream_copy : options_.ops->copy;
  enum Stream { kRow, kScales, kIds, kWeights, kToken, kNumStreams };
  const bool used[kNumStreams] = {row_bytes > 0, scale_bytes > 0, !call.cached,
                                  !call.cached && routing.has_weights, !call.cached};
  const uint64_t at[kNumStreams] = {layout_.slot_payload, scales_at, layout_.slot_idx,
                                    layout_.slot_weights, layout_.slot_token};
  const uint64_t size[kNumStreams] = {row_bytes, scale_bytes, uint64_t(topk) * 4,
                                      uint64_t(topk) * 4, 4};
  const auto emit = [&](int stream, int64_t token, int peer, int64_t row) {
    const uint64_t slot = slot_offset(layout_, call.peer_slot[size_t(peer)]);
    std::byte* to = writer.at(peer, slot + at[stream] + uint64_t(row) * size[stream], size[stream]);
    if (!to) return;
    switch (stream) {
      case kRow:
        copy(to, wire_row(token), row_bytes);
        break;
      case kScales:
        if (args.quantize) {
          wire_row(token);
          std::memcpy(to, scratch_scales, scale_bytes);
        } else if (args.scales.packed()) {
          std::memcpy(to, args.scales.row(token), scale_bytes);
        } else {
          copy_strided(to, args.scales.row(token), args.scales.num_cols, args.scales.col_stride,
                       args.scales.itemsize);
        }
        break;
      case kIds: {
        int32_t* ids = reinterpret_cast<int32_t*>(to);
        const int32_t* from = routing.ids.data() + token * topk;
        for (int k = 0; k < topk; ++k) {
          const int32_t expert = from[k];
          ids[k] = expert >= 0 && options_.expert_rank[size_t(expert)] == peer
                       ? expert_local_[size_t(expert)]
                       : -1;
        }
        break;
      }
      case kWeights: {
        // A weight travels with its pick only; elsewhere it is 0.
        float* weights = reinterpret_cast<float*>(to);
        const int32_t* from = routing.ids.data() + token * topk;
        for (int k = 0; k < topk; ++k) {
          const int32_t expert = from[k];
          const bool here = expert >= 0 && options_.expert_rank[size_t(expert)] == peer;
          weights[k] = here ? routing.weights[size_t(token * topk + k)] : 0.0f;
        }
        break;
      }
      case kToken: {
        const int32_t number = int32_t(token);
        std::memcpy(to, &number, sizeof number);
        break;
      }
    }
  };

  // This channel's tokens, and in each rank's list their first place.
  const int64_t channels = shape.num_channels;
  const int64_t begin = routing.num_tokens * channel / channels,
                end = routing.num_tokens * (channel + 1) / channels;
  std::vector<int64_t> base(static_cast<size_t>(ranks));
  for (int d = 0; d < ranks; ++d) base[size_t(d)] = routing.base(me, d);

  if (load_store_) {  // token by token: its row is read once, and stays near for every copy
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t i = routing.token_begin[size_t(token)];
           i < routing.token_begin[size_t(token) + 1]; ++i) {
        const int peer = routing.token_rank[size_t(i)];
        const int64_t row = base[size_t(peer)] + routing.token_index[size_t(i)];
        if (row >= routing.limit[size_t(peer)]) continue;
        for (int stream = 0; stream < kNumStreams; ++stream) {
          if (used[stream]) emit(stream, token, peer, row);
        }
      }
    }
  } else {  // peer by peer: what is adjacent there becomes one put
    for (int i = 1; i <= ranks; ++i) {
      const int peer = (me + i) % ranks;
      const auto list = routing.send.tokens.begin();
      const auto list_begin = list + routing.send.rank_begin[size_t(peer)];
      const auto list_end = list + routing.send.rank_begin[size_t(peer) + 1];
      const int64_t first = std::lower_bound(list_begin, list_end, int32_t(begin)) - list_begin;
      int64_t last = std::lower_bound(list_begin, list_end, int32_t(end)) - list_begin;
      last = std::min(last, routing.limit[size_t(peer)] - base[size_t(peer)]);
      for (int stream = 0; stream < kNumStreams; ++stream) {
        if (!used[stream]) continue;
        for (int64_t place = first; place < last; ++place) {
          emit(stream, list_begin[place], peer, base[size_t(peer)] + place);
        }
      }
    }
  }
  if (stream) stream_fence();
  EPCOMM_RETURN_IF_ERROR(writer.flush());
  for (int i = 1; i < ranks; ++i) EPCOMM_RETURN_IF_ERROR(signal_data((me + i) % ranks, channel));
  return {};
}

Status Engine::dispatch_finish(DispatchCall* call, const DispatchOutputs& out,
                               const CallContext& context) noexcept {
  const int ranks = options_.shape.num_ranks, me = options_.rank;
  if (!broken().ok()) return broken_;
  expect_data();
  const auto run = [&]() -> Status {
    for (int i = 1; i < ranks; ++i)
      EPCOMM_RETURN_IF_ERROR(wait_credit("dispatch", (me + i) % ranks, context));
    EPCOMM_RETURN_IF_ERROR(
        for_channels(context, [&](int channel) { return dispatch_send(*call, channel); }));
    EPCOMM_RETURN_IF_ERROR(wait_data("dispatch", context));
    dispatch_collect(*call, out, context);
    return {};
  };
  Status status;
  try {
    status = run();
  } catch (const std::bad_alloc&) {
    status = error(Code::kInternal, -1, "dispatch: out of memory while rows were moving");
  }
  const Routing& routing = *call->routing;
  for (int d = 0; d < ranks; ++d) {
    const int64_t rows =
        std::clamp<int64_t>(routing.limit[size_t(d)] - routing.base(me, d), 0, routing.rows(me, d));
    if (d != me) {
      stats_.rows_sent += rows;
      stats_.bytes_sent += rows * int64_t(call->wire_row_bytes + call->wire_scale_bytes);
    }
  }
  stats_.rows_received += routing.recv_rows;
  if (call->slot != call->lease_slot) finish_slot(call->slot);
  if (call->lease_slot < 0) ++stats_.copies;
  return break_if_lost(status);
}

void Engine::dispatch_collect(DispatchCall& call, const DispatchOutputs& out,
                              const CallContext& context) noexcept {
  Routing& routing = *call.routing;
  const int topk = options_.shape.num_topk, local = routing.num_local_experts;
  const std::byte* slot = transport_->heap() + slot_offset(layout_, call.slot);
  const size_t metas = size_t(routing.recv_rows) * size_t(topk);
  if (!call.cached) {
    const int32_t* ids = reinterpret_cast<const int32_t*>(slot + layout_.slot_idx);
    routing.recv_ids.assign(ids, ids + metas);
    if (routing.has_weights) {
      const float* weights = reinterpret_cast<const float*>(slot + layout_.slot_weights);
      routing.recv_weights.assign(weights, weights + metas);
    }
    const int32_t* token = reinterpret_cast<const int32_t*>(slot + layout_.slot_token);
    routing.recv_token.assign(token, token + routing.recv_rows);
    if (routing.layout == RowLayout::kExpert) routing.place_picks();
  }

  if (out.tokens_per_expert) {
    std::fill(out.tokens_per_expert, out.tokens_per_expert + local, 0);
    if (routing.layout == RowLayout::kRank) {
      for (int32_t expert : routing.recv_ids) {
        if (expert >= 0) ++out.tokens_per_expert[expert];
      }
    } else {
      for (size_t i = 0; i < metas; ++i) {
        if (routing.pick_row[i] >= 0) ++out.tokens_per_expert[routing.recv_ids[i]];
      }
    }
  }
  if (routing.layout == RowLayout::kExpert) {
    expand(call, out, context);
    return;
  }
  const int64_t rows = routing.recv_rows, all = routing.output_rows();
  if (out.ids) {
    std::copy(routing.recv_ids.begin(), routing.recv_ids.end(), out.ids);
    std::fill(out.ids + metas, out.ids + all * topk, -1);
  }
  if (out.weights) {
    std::copy(routing.recv_weights.begin(), routing.recv_weights.end(), out.weights);
    std::fill(out.weights + metas, out.weights + all * topk, 0.0f);
  }
  const std::byte* payload = slot + layout_.slot_payload;
  const uint64_t row_bytes = call.wire_row_bytes, scale_bytes = call.wire_scale_bytes;
  if (out.x && rows > 0) {
    const bool stream = bulk(uint64_t(rows) * row_bytes);
    const auto copy = stream ? options_.ops->stream_copy : options_.ops->copy;
    for_ranges(rows, context, [&](int64_t begin, int64_t end) {
      copy(out.x + uint64_t(begin) * row_bytes, payload + uint64_t(begin) * row_bytes,
           size_t(end - begin) * row_bytes);
      if (stream) stream_fence();
    });
  }
  if (out.scales && rows > 0) {
    std::memcpy(out.scales, payload + scales_offset(row_bytes), uint64_t(rows) * scale_bytes);
  }
}

// Expert layout: each received row goes to the row of every pick; padding is zero.
void Engine::expand(DispatchCall& call, const DispatchOutputs& out,
                    const CallContext& context) noexcept {
  const Routing& routing = *call.routing;
  const int topk = options_.shape.num_topk, local = routing.num_local_experts;
  const uint64_t row_bytes = call.wire_row_bytes, scale_bytes = call.wire_scale_bytes;
  const int64_t rows = routing.output_rows();
  const std::byte* payload = slot_payload(call.slot);
  const std::byte* scales = payload + scales_offset(row_bytes);
  std::byte* to = out.x;
  std::byte* to_scales = out.scales;
  if (call.lease_slot >= 0) {
    to = slot_payload(call.lease_slot);
    to_scales = to + align_up(uint64_t(rows) * row_bytes, kSignalStride);
  }
  if (out.expert_offsets) {
    for (int e = 0; e <= local; ++e) {
      const int64_t begin = routing.expert_begin[size_t(e)];
      out.expert_offsets[e] =
          int32_t(routing.capacity >= 0 ? std::min(begin, routing.capacity) : begin);
    }
  }
  if (out.ids) std::fill(out.ids, out.ids + rows, -1);
  if (out.weights) std::fill(out.weights, out.weights + rows, 0.0f);
  const bool stream = bulk(uint64_t(rows) * row_bytes);
  const auto copy = stream ? options_.ops->stream_copy : options_.ops->copy;
  for_ranges(routing.recv_rows, context, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int k = 0; k < topk; ++k) {
        const size_t pick = size_t(r) * size_t(topk) + size_t(k);
        const int64_t row = routing.pick_row[pick];
        if (row < 0) continue;
        if (out.ids) out.ids[row] = routing.recv_ids[pick];
        if (out.weights) out.weights[row] = routing.has_weights ? routing.recv_weights[pick] : 0.0f;
        if (to && row_bytes)
          copy(to + uint64_t(row) * row_bytes, payload + uint64_t(r) * row_bytes, row_bytes);
        if (to_scales && scale_bytes) {
          std::memcpy(to_scales + uint64_t(row) * scale_bytes, scales + uint64_t(r) * scale_bytes,
                      scale_bytes);
        }
      }
    }
    if (stream) stream_fence();
  });
  if (!to) return;
  for (int e = 0; e < local; ++e) {
    int64_t picks = 0;
    for (int s = 0; s < routing.num_ranks; ++s)
      picks += routing.picks_of[size_t(s) * size_t(local) + size_t(e)];
    const int64_t begin = std::min(routing.expert_begin[size_t(e)] + picks, rows);
    const int64_t end = std::min(routing.expert_begin[size_t(e) + 1], rows);
    if (end <= begin) continue;
    std::memset(to + uint64_t(begin) * row_bytes, 0, uint64_t(end - begin) * row_bytes);
    if (to_scales)
      std::memset(to_scales + uint64_t(begin) * scale_bytes, 0,
                  uint64_t(end - begin) * scale_bytes);
  }
}

}  // namespace epcomm::host
