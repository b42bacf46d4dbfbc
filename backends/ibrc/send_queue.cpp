#include "ibrc/send_queue.hpp"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>

#include "common/clock.hpp"
#include "common/errors.hpp"

namespace epcomm::ibrc {
namespace {

constexpr int64_t kRefusedNs = 1000 * 1000 * 1000;

bool has_put(const Command& command) noexcept {
  return (command.op & kCommandPut) != 0 && command.bytes > 0;
}
bool has_signal(const Command& command) noexcept { return (command.op & kCommandSignal) != 0; }
static_assert(kCommandPutSignal == (kCommandPut | kCommandSignal));

}  // namespace

std::string command_text(const Command& command) {
  char text[160];
  int at = 0;
  if (command.op & kCommandPut) {
    at = std::snprintf(text, sizeof text, "put of %" PRIu32 " bytes to offset %" PRIu64,
                       command.bytes, command.dst);
  }
  if (has_signal(command)) {
    std::snprintf(text + at, sizeof text - size_t(at), "%ssignal to word %" PRIu64,
                  at > 0 ? " and " : "", command.word);
  }
  return text;
}

SendQueue::SendQueue(const Setup& setup) : setup_(setup), atomics_upto_(setup.rdma->depth) {}

void SendQueue::push(int32_t place) noexcept {
  if (failed_) {
    channel().finish(place);
    return;
  }
  if (last_ >= 0) channel().at(last_).next = place;
  last_ = place;
  if (first_ < 0) first_ = place;
  if (next_ < 0) next_ = place;
}

uint32_t SendQueue::free_credits() const noexcept {
  const CompletionQueue& cq = *setup_.completions;
  return std::min(setup_.rdma->depth - outstanding(), cq.capacity - cq.outstanding);
}

bool SendQueue::merges(const Command& command) const noexcept {
  const Batch& batch = *setup_.batch;
  if (!batch.tail_is_put || !has_put(command)) return false;
  const ibv_sge& piece = batch.pieces[batch.count - 1];
  const ibv_send_wr& request = batch.requests[batch.count - 1];
  return piece.addr + piece.length == setup_.heap + command.src &&
         request.wr.rdma.remote_addr + piece.length == setup_.rdma->remote_heap + command.dst &&
         uint64_t(piece.length) + command.bytes <= setup_.rdma->max_message;
}

// A command goes whole or not yet.
bool SendQueue::fits(const Command& command) const noexcept {
  const Batch& batch = *setup_.batch;
  const uint32_t needed = (has_put(command) && !merges(command)) + has_signal(command);
  if (batch.count + needed > std::min(Batch::kMax, free_credits())) return false;
  if (!has_signal(command) || !atomics()) return true;
  const uint64_t under_way = atomics_posted_ + batch.atomics - atomics_completed_;
  return under_way < setup_.rdma->max_rd_atomic;
}

ibv_send_wr& SendQueue::add_request() noexcept {
  Batch& batch = *setup_.batch;
  const uint32_t at = batch.count++;
  ibv_send_wr& request = batch.requests[at];
  request = ibv_send_wr{};
  request.wr_id = uint64_t(setup_.number) << 32 | uint32_t(posted_ + at);
  request.sg_list = &batch.pieces[at];
  request.num_sge = 1;
  if (at > 0) batch.requests[at - 1].next = &request;
  ++unasked_;
  return request;
}

void SendQueue::add_put(const Command& command) noexcept {
  Batch& batch = *setup_.batch;
  if (merges(command)) {
    batch.pieces[batch.count - 1].length += command.bytes;
    ++batch.merged;
    return;
  }
  ibv_send_wr& request = add_request();
  *request.sg_list = {setup_.heap + command.src, command.bytes, setup_.rdma->lkey};
  request.opcode = IBV_WR_RDMA_WRITE;
  request.wr.rdma.remote_addr = setup_.rdma->remote_heap + command.dst;
  request.wr.rdma.rkey = setup_.rdma->data_rkey;
  batch.tail_is_put = true;
}

// Null: no memory.
uint64_t* SendQueue::sum_of(uint64_t word) noexcept {
  try {
    return &shadow_[word];
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void SendQueue::add_signal(const Command& command, uint64_t* sum) noexcept {
  Batch& batch = *setup_.batch;
  ibv_send_wr& request = add_request();
  const uint64_t remote = setup_.rdma->remote_heap + command.word;
  batch.tail_is_put = false;
  if (atomics()) {
    *request.sg_list = {setup_.sink, 8, setup_.sink_lkey};
    request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    request.wr.atomic.remote_addr = remote;
    request.wr.atomic.compare_add = command.add;
    request.wr.atomic.rkey = setup_.rdma->signal_rkey;
    ++batch.atomics;
    ++unasked_atomics_;
    return;
  }
  uint64_t& value = batch.values[batch.count - 1];
  value = *sum += command.add;
  *request.sg_list = {reinterpret_cast<uint64_t>(&value), 8, 0};
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_INLINE;  // copied by the post
  request.wr.rdma.remote_addr = remote;
  request.wr.rdma.rkey = setup_.rdma->signal_rkey;
}

// False: no memory for the next command's signal.
bool SendQueue::build() noexcept {
  Batch& batch = *setup_.batch;
  batch.count = batch.atomics = batch.merged = 0;
  batch.tail_is_put = false;
  const uint32_t ask_every = std::max(1u, setup_.rdma->depth / 2);
  const uint32_t ask_every_atomics = std::max(1u, setup_.rdma->max_rd_atomic / 2);
  while (next_ >= 0) {
    Held& taken = channel().at(next_);
    if (!fits(taken.command)) break;
    uint64_t* sum = nullptr;
    if (has_signal(taken.command) && !atomics()) {
      sum = sum_of(taken.command.word);
      if (!sum) return false;
    }
    const uint32_t before = batch.count, atomics_before = batch.atomics;
    if (has_put(taken.command)) add_put(taken.command);
    if (has_signal(taken.command)) add_signal(taken.command, sum);
    for (uint32_t i = before; i < batch.count; ++i) {
      atomics_upto_[(posted_ + i) % atomics_upto_.size()] =
          atomics_posted_ + (i + 1 == batch.count ? batch.atomics : atomics_before);
    }
    taken.end = posted_ + batch.count;
    if (batch.count > 0 && (unasked_ >= ask_every || unasked_atomics_ >= ask_every_atomics)) {
      batch.requests[batch.count - 1].send_flags |= IBV_SEND_SIGNALED;
      unasked_ = unasked_atomics_ = 0;
    }
    next_ = next_ == last_ ? -1 : taken.next;
  }
  return true;
}

Status SendQueue::post(bool* moved) noexcept {
  if (!waiting()) return {};
  if (mute_ && free_credits() > 0) {
    const uint64_t posted = posted_;
    EPCOMM_RETURN_IF_ERROR(post_empty());
    *moved |= posted_ != posted;
    return {};
  }
  const int32_t before = next_;
  const bool memory = build();
  if (next_ == before) {
    if (!memory) {
      return common::guarded([&] {
        return error(Code::kOutOfMemory, setup_.rdma->peer,
                     "no host memory for the sum of word %" PRIu64 " of rank %d",
                     channel().at(next_).command.word, setup_.rdma->peer);
      });
    }
    ProxyStats::add(setup_.stats->stalls, 1);
    return {};
  }
  if (setup_.batch->count > 0) EPCOMM_RETURN_IF_ERROR(send(before));
  if (next_ != before) {
    *moved = true;
    refused_ns_ = 0;
  }
  retire();  // commands that move nothing
  return {};
}

Status SendQueue::probe(int64_t idle_since, bool* moved) noexcept {
  if (failed_ || outstanding() > 0 || waiting() || last_post_ns_ > idle_since) return {};
  if (free_credits() == 0) return {};
  ProxyStats::add(setup_.stats->probes, 1);
  *moved = true;
  return post_empty();
}

// A write of nothing, which asks for a completion.
Status SendQueue::post_empty() noexcept {
  Batch& batch = *setup_.batch;
  batch.count = batch.atomics = batch.merged = 0;
  ibv_send_wr& request = add_request();
  request.num_sge = 0;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.wr.rdma.remote_addr = setup_.rdma->remote_heap;
  request.wr.rdma.rkey = setup_.rdma->data_rkey;
  atomics_upto_[posted_ % atomics_upto_.size()] = atomics_posted_;
  return send(-1);
}

// The batch, made from the commands from `begin` on.
Status SendQueue::send(int32_t begin) noexcept {
  Batch& batch = *setup_.batch;
  batch.requests[batch.count - 1].send_flags |= IBV_SEND_SIGNALED;
  unasked_ = unasked_atomics_ = 0;
  ibv_send_wr* bad = nullptr;
  const int why = ibv_post_send(setup_.rdma->qp, batch.requests, &bad);
  uint32_t sent = batch.count;
  if (why != 0) {
    sent = bad ? uint32_t(bad - batch.requests) : 0;
    if (sent > batch.count) sent = 0;
  }
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < sent; ++i) {
    const ibv_send_wr& request = batch.requests[i];
    const bool atomic = request.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    atomics_posted_ += atomic;
    if (!atomic && request.num_sge > 0 && !(request.send_flags & IBV_SEND_INLINE)) {
      bytes += request.sg_list->length;
    }
  }
  // A list that is cut short has lost its end, which asks: credits would never come back. What was
  // taken is less than the credits there were, so one is left.
  if (sent > 0) mute_ = !(batch.requests[sent - 1].send_flags & IBV_SEND_SIGNALED);
  posted_ += sent;
  setup_.completions->outstanding += sent;
  const int64_t now = common::now_ns();
  if (sent > 0) {
    last_post_ns_ = now;
    ProxyStats::add(setup_.stats->posts, 1);
    ProxyStats::add(setup_.stats->requests, sent);
    ProxyStats::add(setup_.stats->bytes, bytes);
  }
  if (why == 0) {
    ProxyStats::add(setup_.stats->merged, batch.merged);
    return {};
  }
  if (why == ENOMEM && (refused_ns_ == 0 || now - refused_ns_ < kRefusedNs)) {
    ProxyStats::add(setup_.stats->stalls, 1);
    take_back(begin);
    // A probe is made again when its time comes.
    if (refused_ns_ == 0 && waiting()) refused_ns_ = now;
    return {};
  }
  return common::guarded([&] {
    return error(Code::kPeerLost, setup_.rdma->peer,
                 "ibv_post_send took %u of %u work requests with %u of %u under way: %s (errno %d)",
                 sent, batch.count, outstanding() - sent, setup_.rdma->depth,
                 common::errno_text(why).c_str(), why);
  });
}

// Commands from `begin` on whose last work request was not posted wait again, whole: to write their
// bytes twice does no harm, since nothing has said yet that they are there.
void SendQueue::take_back(int32_t begin) noexcept {
  const int32_t end = next_;
  for (int32_t at = begin; at >= 0 && at != end; at = at == last_ ? -1 : channel().at(at).next) {
    const Held& held = channel().at(at);
    if (held.end <= posted_) continue;
    if (next_ == end) next_ = at;
    if (!has_signal(held.command) || atomics()) continue;
    shadow_.find(held.command.word)->second -= held.command.add;
  }
}

// Credits of all work requests below `end` come back.
void SendQueue::settle(uint64_t end) noexcept {
  if (end <= completed_ || end > posted_) return;
  setup_.completions->outstanding -= uint32_t(end - completed_);
  completed_ = end;
  atomics_completed_ = atomics_upto_[(end - 1) % atomics_upto_.size()];
}

// Commands under way whose work requests are all done are finished.
void SendQueue::retire() noexcept {
  while (first_ >= 0 && first_ != next_ && channel().at(first_).end <= completed_) {
    const int32_t place = first_;
    first_ = place == last_ ? -1 : channel().at(place).next;
    if (first_ < 0) last_ = -1;
    channel().finish(place);
    refused_ns_ = 0;
  }
}

void SendQueue::complete(uint64_t wr_id) noexcept {
  const uint64_t request = completed_ + uint32_t(uint32_t(wr_id) - uint32_t(completed_));
  settle(request + 1);
  if (!failed_) retire();
}

std::string SendQueue::describe(uint64_t request) noexcept {
  for (int32_t at = first_; at >= 0 && at != next_; at = channel().at(at).next) {
    if (channel().at(at).end > request) return "a " + command_text(channel().at(at).command);
  }
  return "an empty write that asks whether it is there";
}

std::string SendQueue::fail(const ibv_wc* completion, const char* why) noexcept {
  std::string text;
  Status made;
  if (completion) {
    const uint64_t request =
        completed_ + uint32_t(uint32_t(completion->wr_id) - uint32_t(completed_));
    if (!failed_) {
      // What lies before it was carried out: a bad completion comes in order.
      settle(request);
      retire();
    }
    made = common::guarded([&] {
      if (failed_) return Status{};
      const common::RdmaQueue& rdma = *setup_.rdma;
      char head[256];
      std::snprintf(head, sizeof head, " ended with %s (status %d, vendor code 0x%" PRIx32 ") in ",
                    why, int(completion->status), completion->vendor_err);
      text = common::queue_text(rdma) + " to queue pair " + std::to_string(rdma.remote_qpn) + head +
             describe(request);
      return Status{};
    });
    settle(request + 1);
  } else if (!failed_) {
    made = common::guarded([&] {
      text = common::queue_text(*setup_.rdma) + ": " + why;
      return Status{};
    });
  }
  if (failed_) return text;
  if (!made.ok()) text = std::move(made.text);  // the loss is told in whatever words
  failed_ = true;
  return text;
}

void SendQueue::drop() noexcept {
  for (int32_t at = first_; at >= 0;) {
    const int32_t behind = at == last_ ? -1 : channel().at(at).next;
    channel().finish(at);
    at = behind;
  }
  first_ = next_ = last_ = -1;
}

}  // namespace epcomm::ibrc
