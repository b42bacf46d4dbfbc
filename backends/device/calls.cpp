// Dispatch and combine: one entry kernel that agrees, then kernels that move, all queued on our
// stream; the host waits only for the agreement.
#include <algorithm>
#include <cstring>

#include "common/errors.hpp"
#include "device/engine.hpp"
#include "epcomm/agreement.hpp"
#include "epcomm/formats.h"

namespace epcomm::device {

using namespace common;

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool aligned16(const Rows& rows) {
  return rows.packed() &&
         ((rows.data | uint64_t(rows.row_stride) | uint64_t(rows.row_bytes())) & 15) == 0;
}

}  // namespace

// ---- dispatch

// Device memory of a new routing, in one piece; with the received side's for that many rows if they
// are not negative.
Status Engine::make_routing(Routing* routing, int64_t recv_rows) noexcept {
  const int64_t ranks = options_.shape.num_ranks, tokens = routing->num_tokens;
  const int64_t blocks = std::max<int64_t>(1, ceil_div(tokens, kLayoutTokens));
  const int64_t topk = options_.shape.num_topk;
  uint64_t at = 0;
  const auto take = [&at](int64_t bytes) {
    const uint64_t here = at;
    at += align_up(uint64_t(bytes), 256);
    return here;
  };
  const uint64_t place = take(tokens * ranks * 4), block_base = take(blocks * ranks * 4);
  const uint64_t ids = take(tokens * topk * 4);
  const uint64_t base_to = take(ranks * 8), recv_begin = take((ranks + 1) * 8);
  const uint64_t local_picks = take(int64_t(num_local_) * 4);
  const int64_t received = recv_rows >= 0 ? recv_rows * topk * 4 : 0;
  const uint64_t recv_ids = take(received);
  const uint64_t recv_weights = take(routing->has_weights ? received : 0);
  routing->core_ = core_;
  EPCOMM_RETURN_IF_ERROR(core_->allocate(at, &routing->sent_));
  const CuPointer base = routing->sent_;
  RoutingView& view = routing->view;
  view.place = reinterpret_cast<int32_t*>(base + place);
  view.block_base = reinterpret_cast<int32_t*>(base + block_base);
  view.ids = reinterpret_cast<int32_t*>(base + ids);
  view.base_to = reinterpret_cast<int64_t*>(base + base_to);
  view.recv_begin = reinterpret_cast<int64_t*>(base + recv_begin);
  view.local_picks = reinterpret_cast<int32_t*>(base + local_picks);
  if (recv_rows >= 0) {
    view.recv_ids = reinterpret_cast<int32_t*>(base + recv_ids);
    if (routing->has_weights) view.recv_weights = reinterpret_cast<float*>(base + recv_weights);
  }
  return {};
}

// The received side's, once it is known how many rows there are.
Status Engine::make_received(Routing* routing, int64_t recv_rows) noexcept {
  const uint64_t bytes = align_up(uint64_t(recv_rows * options_.shape.num_topk) * 4, 256);
  EPCOMM_RETURN_IF_ERROR(
      core_->allocate(bytes * (routing->has_weights ? 2 : 1), &routing->received_));
  routing->view.recv_ids = reinterpret_cast<int32_t*>(routing->received_);
  if (routing->has_weights)
    routing->view.recv_weights = reinterpret_cast<float*>(routing->received_ + bytes);
  return {};
}

Status Engine::dispatch_begin(DispatchArgs args, DispatchCall* call,
                              const CallContext& context) noexcept {
  const HeapShape& shape = options_.shape;
  const int ranks = shape.num_ranks;
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  return break_if_lost(guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(prepare(context, true));
    call->cached = args.routing != nullptr;
    call->slot = take_free_slot();
    call->wire_row_bytes = uint64_t(args.x.row_bytes());
    call->wire_scale_bytes = args.scales.data ? uint64_t(args.scales.row_bytes()) : 0;
    if (args.quantize) {
      call->wire_row_bytes = uint64_t(args.x.num_cols);
      call->wire_scale_bytes = uint64_t(ceil_div(args.x.num_cols, kScaleGroup)) * 4;
    }
    std::shared_ptr<Routing> routing = args.routing;

    EnterArgs enter_args = entry(Op::kDispatch, args.x.num_rows);
    EntryHeader& header = enter_args.header;
    Status refusal;
    if (!call->cached) {
      routing = std::make_shared<Routing>();
      routing->rank = options_.rank;
      routing->num_ranks = ranks;
      routing->num_local_experts = num_local_;
      routing->num_tokens = args.x.num_rows;
      routing->has_weights = args.weights.data != 0;
      refusal = make_routing(routing.get(), args.early ? shape.max_recv_tokens : -1);
    }
    if (refusal.ok() && args.want_lease == 2 && leases_held() >= shape.num_slots)
      refusal = no_lease_left(leases_held(), shape.num_slots);
    if (!refusal.ok() && refusal.code != Code::kOutOfMemory && refusal.code != Code::kUnsupported)
      return refusal;
    header.slot = call->slot;
    header.terms[kTermLayout] = int64_t(RowLayout::kRank);
    header.terms[kTermAlignment] = 1;
    header.terms[kTermDtype] = args.dtype;
    header.terms[kTermRowBytes] = int64_t(call->wire_row_bytes);
    header.terms[kTermScaleBytes] = int64_t(call->wire_scale_bytes);
    header.terms[kTermScaleDtype] = args.scale_dtype;
    header.terms[kTermQuantize] = args.quantize;
    header.terms[kTermWeights] = routing->has_weights;
    header.terms[kTermHandle] = call->cached ? int64_t(routing->generation) : 0;
    int64_t blocks = 1;
    if (!refusal.ok()) {
      header.status = int32_t(refusal.code);
      header.text_bytes = uint32_t(std::min<uint64_t>(refusal.text.size(), kEntryTextBytes));
      std::memcpy(text_, refusal.text.data(), header.text_bytes);
    } else if (!call->cached) {
      enter_args.counts = 1;
      enter_args.ids = reinterpret_cast<const char*>(args.ids);
      enter_args.ids_are_64 = args.ids_are_64;
      enter_args.ids_token_stride = args.ids_token_stride;
      enter_args.ids_topk_stride = args.ids_topk_stride;
      enter_args.num_tokens = args.x.num_rows;
      enter_args.num_blocks = ceil_div(args.x.num_rows, kLayoutTokens);
      enter_args.max_recv_tokens = shape.max_recv_tokens;
      blocks = std::clamp<int64_t>(enter_args.num_blocks, 1, sms(context));
    }
    enter_args.routing = routing->view;
    call->routing = routing;
    const bool leased = refusal.ok() && args.want_lease != 0 && leases_held() < shape.num_slots;
    EPCOMM_RETURN_IF_ERROR(enter(enter_args, blocks));
    if (refusal.ok()) EPCOMM_RETURN_IF_ERROR(send(call, args, enter_args.call, context));
    if (refusal.ok() && args.early) {
      if (!call->collected) EPCOMM_RETURN_IF_ERROR(collect(call, args.outputs, context));
      if (leased && context.join) {
        EPCOMM_RETURN_IF_ERROR(core_->before(context.stream));
        call->joined = true;
      }
    }
    if (!call->cached) {
      const Status agreed = await_report("dispatch", context);
      if (!agreed.ok()) {
        // What is queued still reads and writes memory that the caller is about to give back.
        if (!call->joined) (void)core_->before(context.stream);
        return agreed;
      }
      const int64_t* told = reinterpret_cast<const int64_t*>(pinned_ + kReportRowsOffset);
      routing->generation = report_->epoch;
      routing->recv_rows = report_->recv_rows;
      routing->rows_of.assign(told, told + ranks * ranks);
      routing->picks.assign(told + ranks * ranks, told + ranks * ranks + num_local_);
    }
    if (leased) {
      call->lease_slot = call->slot;
      slot_use_[size_t(call->slot)] = SlotUse::kLease;
      ++stats_.leases_granted;
    }
    args.routing = nullptr;
    call->args = std::move(args);
    return Status{};
  }));
}

Status Engine::dispatch_finish(DispatchCall* call, const DispatchOutputs& out,
                               const CallContext& context) noexcept {
  if (is_broken()) return broken_;
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  const Routing& routing = *call->routing;
  Status status = guarded([&]() -> Status {
    const bool copied = call->lease_slot < 0;
    // The outputs' memory is the caller's from this point of its stream on.
    if (copied || !call->collected) EPCOMM_RETURN_IF_ERROR(core_->after(context.stream));
    if (!call->collected) {
      if (!call->cached)
        EPCOMM_RETURN_IF_ERROR(make_received(call->routing.get(), routing.recv_rows));
      EPCOMM_RETURN_IF_ERROR(collect(call, out, context));
    }
    if (copied) EPCOMM_RETURN_IF_ERROR(copy_out(*call, out));
    return context.join && !call->joined ? core_->before(context.stream) : Status{};
  });
  // A cached call is agreed on by now or soon: its rows are on their way behind the agreement.
  if (status.ok() && call->cached) status = await_report("dispatch", context);
  if (!status.ok()) (void)core_->before(context.stream);  // as above
  if (status.ok()) {
    const int me = options_.rank;
    ++stats_.dispatches;
    for (int d = 0; d < options_.shape.num_ranks; ++d) {
      if (d == me) continue;
      stats_.rows_sent += routing.rows(me, d);
      stats_.bytes_sent +=
          routing.rows(me, d) * int64_t(call->wire_row_bytes + call->wire_scale_bytes);
    }
    stats_.rows_received += routing.recv_rows;
    if (call->lease_slot < 0) ++stats_.copies;
  }
  return break_if_lost(std::move(status));
}

// Behind the entry kernel, without the host in between: bases and slots are in device memory.
Status Engine::send(DispatchCall* dispatch, const DispatchArgs& args, uint64_t number,
                    const CallContext& context) noexcept {
  const DispatchCall& call = *dispatch;
  const Routing& routing = *call.routing;
  CollectArgs collected{};
  SendArgs send_args{};
  send_args.setup = setup_;
  send_args.call = number;
  send_args.x = strided(args.x);
  send_args.scales = strided(args.scales);
  if (!call.cached && routing.has_weights) {
    send_args.weights = reinterpret_cast<const char*>(args.weights.data);
    send_args.weights_token_stride = args.weights.row_stride;
    send_args.weights_topk_stride = args.weights.col_stride;
  }
  send_args.num_tokens = routing.num_tokens;
  send_args.row_bytes = call.wire_row_bytes;
  send_args.scale_bytes = call.wire_scale_bytes;
  send_args.scales_offset = scales_offset(call.wire_row_bytes);
  send_args.routing = routing.view;
  send_args.cached = call.cached;
  if (call.cached && args.early) {
    collected = collecting(call, args.outputs);
    send_args.collects = 1;
  }
  int shared = 0;
  common::CuFunction function = options_.kernels.send;
  if (args.quantize) {
    function = options_.kernels.send_quantized;
    send_args.row_type = args.row_type;
    send_args.vector = aligned16(args.x);
    send_args.bulk = send_buffer_max_ > 0;
    const int64_t room = (send_buffer_max_ > 0 ? send_buffer_max_ : kSendBytesPlain) / kSendWarps;
    if (send_args.bulk && send_args.vector) {
      const InPlace plan =
          quantize_in_place_plan(args.x.num_cols, send_args.x.itemsize, int32_t(room / 16 * 16));
      send_args.path = kSendBulk;
      send_args.piece_channels = plan.piece_channels;
      send_args.buffer_bytes = plan.buffer_bytes;
    } else {
      // Codes of whole steps of four groups, so that a piece's scales begin at 16 bytes too.
      const int64_t step = 4 * kScaleGroup, step_bytes = step + 4 * 4;
      const int64_t steps = std::min(room / step_bytes, ceil_div(args.x.num_cols, step));
      send_args.path = kSendElements;
      send_args.piece_channels = int32_t(steps * step);
      send_args.buffer_bytes = int32_t(steps * step_bytes);
    }
    shared = send_args.buffer_bytes * kSendWarps;
  } else if (!aligned16(args.x)) {
    send_args.path = kSendElements;
  } else if (send_buffer_max_ > 0) {
    send_args.path = kSendBulk;
    const int64_t most = send_buffer_max_ / kSendWarps / 16 * 16;
    const int64_t row = int64_t(call.wire_row_bytes), scales = int64_t(call.wire_scale_bytes);
    send_args.vector_scales = scales > 0 && scales <= 32 * 16 && aligned16(args.scales);
    send_args.stages = int32_t(row > 0 ? std::min<int64_t>(kSendStages, most / row) : 0);
    send_args.buffer_bytes = int32_t(std::min(most, row));
    shared = send_args.buffer_bytes * std::max(send_args.stages, 1) * kSendWarps;
  } else {
    send_args.path = kSendVector;
  }
  void* send_arguments[] = {options_.ctx.data(), &send_args, &collected};
  EPCOMM_RETURN_IF_ERROR(launch_behind(function, sms(context), kSendWarps * 32, shared,
                                       send_arguments, "launch of send"));
  dispatch->collected = send_args.collects != 0;
  return {};
}

CollectArgs Engine::collecting(const DispatchCall& call,
                               const DispatchOutputs& out) const noexcept {
  const Routing& routing = *call.routing;
  CollectArgs collected{};
  collected.setup = setup_;
  collected.routing = routing.view;
  collected.cached = call.cached;
  collected.has_weights = routing.has_weights;
  collected.aligned = ((out.ids | out.weights) & 15) == 0;
  collected.ids = reinterpret_cast<int32_t*>(out.ids);
  collected.weights = reinterpret_cast<float*>(out.weights);
  collected.tokens_per_expert = reinterpret_cast<int32_t*>(out.tokens_per_expert);
  collected.num_received = reinterpret_cast<int64_t*>(out.num_tokens);
  collected.overflow = reinterpret_cast<int64_t*>(out.overflow);
  return collected;
}

// The receiver's small arrays, behind its rows.
Status Engine::collect(DispatchCall* call, const DispatchOutputs& out,
                       const CallContext& context) noexcept {
  CollectArgs collected = collecting(*call, out);
  void* arguments[] = {options_.ctx.data(), &collected};
  call->collected = true;
  return launch(options_.kernels.collect, sms(context), kCollectThreads, 0, arguments,
                "launch of collect");
}

// Rows and scales to the caller's memory.
Status Engine::copy_out(const DispatchCall& call, const DispatchOutputs& out) noexcept {
  const Driver& driver = core_->driver();
  const uint64_t payload = slot_payload(call.slot), rows = uint64_t(call.routing->recv_rows);
  const auto copy = [&](uint64_t to, uint64_t from, uint64_t bytes) -> Status {
    if (!to || bytes == 0) return {};
    return driver.check(driver.cuMemcpyDtoDAsync(to, from, bytes, core_->stream()),
                        "cuMemcpyDtoDAsync");
  };
  EPCOMM_RETURN_IF_ERROR(copy(out.x, payload, rows * call.wire_row_bytes));
  return copy(out.scales, payload + scales_offset(call.wire_row_bytes),
              rows * call.wire_scale_bytes);
}

// ---- combine

bool Engine::in_own_heap(const Rows& rows) const noexcept {
  if (rows.num_rows == 0 || !rows.packed() || rows.row_stride != rows.row_bytes()) return false;
  const uint64_t begin = options_.heap + layout_.slots;
  const uint64_t end = options_.heap + layout_.total_bytes;
  return rows.data >= begin && rows.data + uint64_t(rows.num_rows * rows.row_bytes()) <= end;
}

// Rows [first, last) to their places among packed rows at `to`.
Status Engine::move_rows(const Rows& from, int64_t first, int64_t last, uint64_t to,
                         const CallContext& context) noexcept {
  if (last <= first) return {};
  const int64_t row_bytes = from.row_bytes();
  const uint64_t source = from.data + uint64_t(first * from.row_stride);
  to += uint64_t(first * row_bytes);
  if (from.packed() && from.row_stride == row_bytes) {
    const Driver& driver = core_->driver();
    return driver.check(
        driver.cuMemcpyDtoDAsync(to, source, uint64_t((last - first) * row_bytes), core_->stream()),
        "cuMemcpyDtoDAsync");
  }
  Rows part = from;
  part.data = source;
  part.num_rows = last - first;
  CopyArgs args{};
  args.from = strided(part);
  args.to = reinterpret_cast<char*>(to);
  args.to_stride = row_bytes;
  args.num_rows = part.num_rows;
  args.aligned = aligned16(part) && (to & 15) == 0;
  void* arguments[] = {&args};
  return launch(options_.kernels.copy, std::min<int64_t>(ceil_div(part.num_rows, 16), sms(context)),
                512, 0, arguments, "launch of copy");
}

Status Engine::combine(const CombineArgs& args, const CallContext& context) noexcept {
  const HeapShape& shape = options_.shape;
  const int me = options_.rank;
  const Routing& routing = *args.routing;
  const int64_t row_bytes = args.x.row_bytes();
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  bool zero_copy = false;
  const Status status = guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(prepare(context, true));
    const int slot = take_free_slot();
    zero_copy = in_own_heap(args.x);
    uint64_t rows_at = args.x.data;
    if (!zero_copy) {
      // Peers read from the heap; what this rank holds of its own tokens it reads where it is.
      rows_at = slot_payload(slot);
      const int64_t begin = routing.recv_begin(me), end = begin + routing.rows(me, me);
      EPCOMM_RETURN_IF_ERROR(move_rows(args.x, 0, begin, rows_at, context));
      EPCOMM_RETURN_IF_ERROR(move_rows(args.x, end, routing.recv_rows, rows_at, context));
    }
    if (args.carried.data) {
      CarryArgs carry{};
      carry.setup = setup_;
      carry.routing = routing.view;
      carry.recv_rows = routing.recv_rows;
      carry.carried = reinterpret_cast<const char*>(args.carried.data);
      carry.row_stride = args.carried.row_stride;
      carry.topk_stride = args.carried.col_stride;
      carry.to = reinterpret_cast<char*>(options_.heap + slot_offset(layout_, slot) +
                                         layout_.slot_weights);
      void* arguments[] = {&carry};
      const int64_t scalars = routing.recv_rows * options_.shape.num_topk;
      EPCOMM_RETURN_IF_ERROR(launch(options_.kernels.carry,
                                    std::clamp<int64_t>(ceil_div(scalars, 1024), 1, sms(context)),
                                    256, 0, arguments, "launch of carry"));
    }

    EnterArgs enter_args = entry(Op::kCombine, routing.num_tokens);
    EntryHeader& header = enter_args.header;
    header.slot = slot;
    header.zero_copy = rows_at - options_.heap;
    header.terms[kTermLayout] = int64_t(RowLayout::kRank);
    header.terms[kTermAlignment] = 1;
    header.terms[kTermDtype] = args.dtype;
    header.terms[kTermRowBytes] = row_bytes;
    header.terms[kTermCarried] = args.carried.data != 0;
    header.terms[kTermHandle] = int64_t(routing.generation);
    EPCOMM_RETURN_IF_ERROR(enter(enter_args, 1));

    ReduceArgs reduce{};
    reduce.setup = setup_;
    reduce.call = enter_args.call;
    reduce.routing = routing.view;
    reduce.own = strided(args.x);
    reduce.num_tokens = routing.num_tokens;
    reduce.num_cols = args.x.num_cols;
    reduce.row_bytes = uint64_t(row_bytes);
    reduce.bias = reinterpret_cast<const float*>(args.bias);
    reduce.bias_stride = args.bias_stride;
    reduce.out = reinterpret_cast<char*>(args.out);
    reduce.out_stride = args.out_stride;
    reduce.carried_out = reinterpret_cast<float*>(args.carried_out);
    reduce.row_type = args.row_type;
    reduce.aligned = aligned16(args.x) && ((args.out | uint64_t(args.out_stride)) & 15) == 0;
    void* arguments[] = {options_.ctx.data(), &reduce};
    const Kernels& kernels = options_.kernels;
    const common::CuFunction function = shape.num_ranks <= 2   ? kernels.reduce_two
                                        : shape.num_ranks <= 4 ? kernels.reduce_four
                                                               : kernels.reduce_many;
    EPCOMM_RETURN_IF_ERROR(
        launch_behind(function, sms(context), kReduceWarps * 32, 0, arguments, "launch of reduce"));
    if (context.join) EPCOMM_RETURN_IF_ERROR(core_->before(context.stream));
    // All ranks raise the same error in this call; the rows are on their way meanwhile.
    Status agreed = await_report("combine", context);
    if (!agreed.ok() && !context.join) (void)core_->before(context.stream);  // as in dispatch
    return agreed;
  });
  if (status.ok()) {
    ++stats_.combines;
    stats_.zero_copy_combines += zero_copy;
  }
  return break_if_lost(status);
}

}  // namespace epcomm::device
