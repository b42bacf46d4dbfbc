#include "host/engine.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <thread>

#include "epcomm/agreement.hpp"
#include "host/writer.hpp"

namespace epcomm::host {

Engine::Entry::Entry(Op op) {
  std::fill(std::begin(terms), std::end(terms), 0);
  terms[kTermOp] = int64_t(op);
  terms[kTermCapacity] = -1;
  terms[kTermScaleDtype] = -1;
}

Engine::Engine(HostTransport* transport, EngineOptions options)
    : transport_(transport),
      options_(std::move(options)),
      layout_(epcomm::heap_layout(options_.shape)),
      pool_(options_.num_threads) {
  const int ranks = options_.shape.num_ranks;
  num_local_.assign(size_t(ranks), 0);
  for (int32_t owner : options_.expert_rank) expert_local_.push_back(num_local_[size_t(owner)]++);
  owners_ = {ranks, options_.expert_rank.data(), expert_local_.data(),
             int32_t(options_.expert_rank.size())};
  for (int peer = 0; peer < ranks; ++peer)
    load_store_ = load_store_ && transport_->peer_ptr(peer, 0) != nullptr;
  const size_t slots = size_t(num_physical_slots(options_.shape));
  slot_epoch_.assign(slots, 0);
  credit_sent_.assign(slots, 0);
  slot_use_.assign(slots, SlotUse::kFree);
}

// ---- slots

int Engine::take_free_slot(int except) noexcept {
  for (size_t slot = 0; slot < slot_use_.size(); ++slot) {
    if (slot_use_[slot] == SlotUse::kFree && int(slot) != except) return int(slot);
  }
  return -1;
}

void Engine::finish_slot(int slot) noexcept {
  if (slot >= 0) slot_use_[size_t(slot)] = SlotUse::kFree;
}

int Engine::leases_held() noexcept {
  std::lock_guard<std::mutex> lock(release_mutex_);
  const auto leased = std::count(slot_use_.begin(), slot_use_.end(), SlotUse::kLease);
  return int(leased) - int(released_.size());
}

int Engine::lease_slot() noexcept {
  {
    std::lock_guard<std::mutex> lock(release_mutex_);
    for (int slot : released_) slot_use_[size_t(slot)] = SlotUse::kFree;
    released_.clear();
  }
  if (leases_held() >= options_.shape.num_slots) return -1;
  const int slot = take_free_slot(-1);
  slot_use_[size_t(slot)] = SlotUse::kLease;
  ++stats_.leases_granted;
  return slot;
}

void Engine::release_slot(int slot) noexcept {
  std::lock_guard<std::mutex> lock(release_mutex_);
  released_.push_back(slot);
}

std::byte* Engine::slot_payload(int slot) noexcept {
  return transport_->heap() + slot_offset(layout_, slot) + layout_.slot_payload;
}

uint64_t Engine::payload_bytes() const noexcept { return layout_.slot_idx - layout_.slot_payload; }

uint64_t Engine::scales_offset(uint64_t wire_row_bytes) const noexcept {
  return align_up(uint64_t(layout_.slot_rows) * wire_row_bytes, kSignalStride);
}

// ---- one epoch's agreement

void Engine::begin_epoch() noexcept {
  ++epoch_;
  ++stats_.calls;
  std::lock_guard<std::mutex> lock(release_mutex_);
  for (int slot : released_) slot_use_[size_t(slot)] = SlotUse::kFree;
  released_.clear();
}

const EntryHeader& Engine::record(int peer) noexcept {
  return *reinterpret_cast<const EntryHeader*>(transport_->heap() +
                                               entry_record(layout_, peer, epoch_));
}

int64_t Engine::record_rows(int peer, int destination) noexcept {
  const std::byte* at = transport_->heap() + entry_record(layout_, peer, epoch_) + kEntryRowsOffset;
  return reinterpret_cast<const int64_t*>(at)[destination];
}

int64_t Engine::record_picks(int peer, int expert) noexcept {
  const std::byte* at = transport_->heap() + entry_record(layout_, peer, epoch_) +
                        entry_picks_offset(options_.shape.num_ranks);
  return reinterpret_cast<const int64_t*>(at)[expert];
}

Status Engine::wait(int peer, uint64_t word, uint64_t value, const char* operation,
                    const char* phase, const CallContext& context) noexcept {
  WaitSpec spec{operation, phase, options_.timeout_s, context.interrupted, context.interrupted_arg};
  return transport_->wait(peer, word, value, spec);
}

Status Engine::break_if_lost(Status status) noexcept {
  switch (status.code) {
    case Code::kOk:
    case Code::kInvalidArgument:
    case Code::kUnsupported:
    case Code::kOutOfMemory:
      return status;
    default:
      break;
  }
  if (broken().ok()) {
    const bool blames = status.code == Code::kPeerLost || status.code == Code::kTimeout;
    leave(PeerState::kBroken, blames ? status.peer : -1);
    if (status.code == Code::kTimeout) name_whom_it_waits_for(&status);
    broken_ = status;
    if (status.code == Code::kInterrupted) {
      broken_ =
          error(Code::kPeerLost, options_.rank, "the communicator was interrupted inside a call");
    }
    is_broken_.store(true, std::memory_order_release);  // others may read broken_ from now on
  }
  return status;
}

// The silent rank may itself wait for another one: then it gives up about now and says for whom.
// Without this look two ranks whose deadlines pass together would blame each other, or the wrong
// one.
void Engine::name_whom_it_waits_for(Status* status) noexcept {
  constexpr std::chrono::milliseconds kPatience(100);
  const int silent = status->peer;
  if (silent < 0 || silent >= options_.shape.num_ranks || silent == options_.rank) return;
  const auto* word =
      reinterpret_cast<const uint64_t*>(transport_->heap() + state_word(layout_, silent));
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    const uint64_t said = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (state_of(said) != PeerState::kAlive) {
      const int other = lost_of(said);
      if (state_of(said) != PeerState::kBroken || other < 0 || other == options_.rank ||
          other == silent || other >= options_.shape.num_ranks) {
        return;
      }
      try {
        status->text += "; rank " + std::to_string(silent) + " gave up because of rank " +
                        std::to_string(other);
      } catch (const std::bad_alloc&) {  // the sentence is as true without
      }
      status->peer = other;
      return;
    }
    if (std::chrono::steady_clock::now() >= until) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Status Engine::announce(const char* operation, const Entry& entry,
                        const CallContext& context) noexcept {
  const int ranks = options_.shape.num_ranks, me = options_.rank;
  const int experts = options_.shape.max_local_experts;
  WaitSpec spec{operation, "entry", options_.timeout_s, context.interrupted,
                context.interrupted_arg};
  Writer writer(transport_, layout_, options_.shape, 0, spec);

  // Credits first: a slot that is named below has its last epoch shown to every peer.
  for (size_t slot = 0; slot < slot_use_.size(); ++slot) {
    if (slot_use_[slot] == SlotUse::kLease || credit_sent_[slot] == slot_epoch_[slot]) continue;
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == me) continue;
      const uint64_t word = credit_word(layout_, options_.shape, me, int(slot));
      EPCOMM_RETURN_IF_ERROR(transport_->signal(peer, control_channel(), word,
                                                slot_epoch_[slot] - credit_sent_[slot]));
    }
    credit_sent_[slot] = slot_epoch_[slot];
  }

  EntryHeader header{};
  header.epoch = epoch_;
  header.status = int32_t(entry.status.code);
  header.slot = entry.slot;
  header.slot_epoch = entry.slot >= 0 ? slot_epoch_[size_t(entry.slot)] : 0;
  header.num_tokens = entry.num_tokens;
  header.zero_copy = entry.zero_copy;
  header.text_bytes = uint32_t(std::min<uint64_t>(entry.status.text.size(), kEntryTextBytes));
  std::copy(std::begin(entry.terms), std::end(entry.terms), header.terms);

  const uint64_t bytes = entry_record_bytes(ranks, experts);
  for (int i = 1; i <= ranks; ++i) {
    const int peer = (me + i) % ranks;  // each rank begins elsewhere; its own comes last
    std::byte* at = writer.at(peer, entry_record(layout_, me, epoch_), bytes);
    if (!at) return writer.status();
    std::memcpy(at, &header, sizeof header);
    std::memcpy(at + kEntryHeaderBytes, entry.status.text.data(), header.text_bytes);
    int64_t* rows_to = reinterpret_cast<int64_t*>(at + kEntryRowsOffset);
    int64_t* picks_of = reinterpret_cast<int64_t*>(at + entry_picks_offset(ranks));
    if (entry.counts) {
      const SendLists& send = entry.counts->send;
      for (int d = 0; d < ranks; ++d)
        rows_to[d] = send.rank_begin[size_t(d) + 1] - send.rank_begin[size_t(d)];
      std::fill(picks_of, picks_of + experts, 0);
      for (size_t e = 0; e < options_.expert_rank.size(); ++e) {
        if (options_.expert_rank[e] == peer) picks_of[expert_local_[e]] = send.picks_per_expert[e];
      }
    } else {
      std::fill(rows_to, rows_to + ranks, 0);
      std::fill(picks_of, picks_of + experts, 0);
    }
    if (peer == me) continue;
    EPCOMM_RETURN_IF_ERROR(writer.flush());
    EPCOMM_RETURN_IF_ERROR(transport_->signal(peer, 0, entry_word(layout_, me), 1));
  }
  for (int i = 1; i < ranks; ++i) {
    const int peer = (me + i) % ranks;
    EPCOMM_RETURN_IF_ERROR(
        wait(peer, entry_word(layout_, peer), epoch_, operation, "entry", context));
  }
  return {};
}

Status Engine::exchange(const char* operation, const Entry& entry,
                        const CallContext& context) noexcept {
  Status status = break_if_lost(announce(operation, entry, context));
  if (!status.ok()) return status;
  // Every rank writes the same records, so every rank comes to the same conclusion here.
  const auto record_of = [this](int peer) -> const EntryHeader& { return record(peer); };
  const int ranks = options_.shape.num_ranks;
  status = break_if_lost(check_epochs(operation, epoch_, ranks, record_of));
  if (!status.ok()) return status;
  status = epcomm::agree(ranks, options_.dtype_names, record_of);  // a refusal breaks nothing
  if (status.ok()) {
    if (entry.slot >= 0) {
      slot_epoch_[size_t(entry.slot)] = epoch_;
      slot_use_[size_t(entry.slot)] = SlotUse::kCall;
    }
  } else {
    ++stats_.refused_calls;
  }
  return status;
}

Status Engine::refuse(Op op, const Status& why, const CallContext& context) noexcept {
  if (!broken().ok()) return broken_;
  begin_epoch();
  Entry entry(op);
  entry.status = why;
  if (entry.status.ok())
    entry.status = error(Code::kInternal, -1, "%s: refused without a reason", op_name(int64_t(op)));
  Status status = exchange(op_name(int64_t(op)), entry, context);
  return status.ok() ? why : status;
}

Status Engine::barrier(const CallContext& context) noexcept {
  if (!broken().ok()) return broken_;
  begin_epoch();
  return exchange("barrier", Entry(Op::kBarrier), context);
}

// ---- data signals and loops

Status Engine::signal_data(int peer, int channel) noexcept {
  return transport_->signal(peer, channel,
                            data_word(layout_, options_.shape, options_.rank, channel), 1);
}

Status Engine::wait_data(const char* operation, const CallContext& context) noexcept {
  const int ranks = options_.shape.num_ranks;
  for (int i = 1; i < ranks; ++i) {
    const int peer = (options_.rank + i) % ranks;
    for (int channel = 0; channel < options_.shape.num_channels; ++channel) {
      EPCOMM_RETURN_IF_ERROR(wait(peer, data_word(layout_, options_.shape, peer, channel),
                                  data_phases_, operation, "data", context));
    }
  }
  return {};
}

Status Engine::wait_credit(const char* operation, int peer, const CallContext& context) noexcept {
  const EntryHeader& header = record(peer);
  if (peer == options_.rank || header.slot < 0) return {};
  return wait(peer, credit_word(layout_, options_.shape, peer, header.slot), header.slot_epoch,
              operation, "credit", context);
}

Status Engine::quiet(const char* operation, const CallContext& context, double timeout_s) noexcept {
  WaitSpec spec{operation, "quiet", timeout_s, context.interrupted, context.interrupted_arg};
  for (int peer = 0; peer < options_.shape.num_ranks; ++peer) {
    if (transport_->peer_ptr(peer, 0)) continue;
    for (int channel = 0; channel <= control_channel(); ++channel) {
      EPCOMM_RETURN_IF_ERROR(transport_->quiet(peer, channel, spec));
    }
  }
  return {};
}

Status Engine::for_channels(const CallContext& context,
                            const std::function<Status(int)>& body) noexcept {
  const int channels = options_.shape.num_channels;
  std::vector<Status> results(static_cast<size_t>(channels));
  pool_.parallel_for(channels, context.max_threads,
                     [&](int64_t c) { results[size_t(c)] = body(int(c)); });
  for (Status& status : results) {
    if (!status.ok()) return status;
  }
  return {};
}

void Engine::for_ranges(int64_t count, const CallContext& context,
                        const std::function<void(int64_t, int64_t)>& body) noexcept {
  int threads = pool_.num_threads();
  if (context.max_threads > 0 && context.max_threads < threads) threads = context.max_threads;
  const int64_t parts = threads == 1 ? 1 : std::min<int64_t>(count, int64_t(threads) * 4);
  pool_.parallel_for(parts, context.max_threads,
                     [&](int64_t part) { body(count * part / parts, count * (part + 1) / parts); });
}

// ---- the end

void Engine::leave(PeerState state, int lost) noexcept {
  if (left_) return;
  left_ = true;
  // The word travels on one channel; what this rank sent on others must not come behind it, or a
  // peer still in its last call would take it for lost. Bounded: a destructor may be the caller.
  constexpr double kDrainSeconds = 10;
  if (state == PeerState::kLeft && broken().ok()) {
    (void)quiet("close", {}, std::min(options_.timeout_s, kDrainSeconds));
  }
  for (int peer = 0; peer < options_.shape.num_ranks; ++peer) {
    // One that left has no queue pair any more: what is sent there would hold up, for all of its
    // retries, what a proxy sends behind it to others.
    if (peer != options_.rank && transport_->peer_state(peer) != PeerState::kLeft)
      (void)transport_->signal(peer, control_channel(), state_word(layout_, options_.rank),
                               state_value(state, lost));
  }
  if (state != PeerState::kBroken) return;
  // Once a call has raised here, peers should find the reason rather than their own deadline.
  constexpr double kTellSeconds = 0.2;
  const auto start = std::chrono::steady_clock::now();
  for (int peer = 0; peer < options_.shape.num_ranks; ++peer) {
    if (transport_->peer_ptr(peer, 0)) continue;
    const double spent =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (spent >= kTellSeconds) break;
    const WaitSpec spec{"leave", "quiet", kTellSeconds - spent};
    (void)transport_->quiet(peer, control_channel(), spec);
  }
}

Status Engine::look_at_peers() const noexcept {
  for (int peer = 0; peer < options_.shape.num_ranks; ++peer) {
    if (peer == options_.rank) continue;
    const PeerState state = transport_->peer_state(peer);
    if (state == PeerState::kDead) {
      return error(Code::kPeerLost, peer, "rank %d is lost: its process ended", peer);
    }
    if (state == PeerState::kBroken) {
      return error(Code::kPeerLost, peer,
                   "rank %d gave up after an error of its own (see its output)", peer);
    }
  }
  return {};
}

void Engine::abort(const Status& why) noexcept { transport_->abort(why); }

}  // namespace epcomm::host
