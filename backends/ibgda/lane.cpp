#include "ibgda/lane.hpp"

#include <algorithm>
#include <new>

namespace epcomm::ibgda {
namespace {

using mlx5::HostMemory;

mlx5::Rings rings_of(const common::QueueView& view) {
  return {reinterpret_cast<uint64_t>(view.sq),
          reinterpret_cast<uint64_t>(view.sq_dbrec),
          reinterpret_cast<uint64_t>(const_cast<uint64_t*>(view.doorbell)),
          reinterpret_cast<uint64_t>(view.cq),
          reinterpret_cast<uint64_t>(view.cq_dbrec),
          view.qpn,
          view.sq_depth,
          view.cq_depth,
          std::min(view.sq_depth, view.cq_depth)};
}

}  // namespace

Lane::Lane(const Setup& setup)
    : spared_(setup.spare.rdma != nullptr),
      shared_(setup.shared && !spared_),
      heap_(setup.heap),
      turn_ns_(setup.turn_ns),
      settle_ns_(setup.settle_ns),
      aborted_(setup.aborted),
      depth_(rings_of(setup.pair.view).room),
      max_message_(setup.pair.rdma->max_message) {
  halves_[0].pair = setup.pair;
  halves_[0].rings = rings_of(setup.pair.view);
  if (!spared_) return;
  halves_[1].pair = setup.spare;
  halves_[1].rings = rings_of(setup.spare.view);
  depth_ = std::min(depth_, halves_[1].rings.room);
  max_message_ = std::min(max_message_, setup.spare.rdma->max_message);
  under_way_.resize(depth_);
}

mlx5::Block Lane::block(const Op& op, uint64_t wire) const noexcept {
  const Half& half = this->half();
  const common::RdmaQueue& rdma = *half.pair.rdma;
  const uint32_t qpn = half.rings.qpn;
  const uint8_t flags = op.signalled ? mlx5::kSignalled : 0;
  const uint64_t to = rdma.remote_heap + op.at;
  switch (op.kind) {
    case Op::kPut:
      return mlx5::write(uint16_t(wire), qpn, flags, {to, rdma.data_rkey},
                         {heap_ + op.value, rdma.lkey}, op.bytes);
    case Op::kAdd:
      return mlx5::fetch_add(uint16_t(wire), qpn, flags, {to, rdma.signal_rkey},
                             {half.pair.sink, half.pair.sink_lkey}, op.value);
    case Op::kSum:
      return mlx5::write_word(uint16_t(wire), qpn, flags, {to, rdma.signal_rkey}, op.value);
    default:
      return mlx5::write(uint16_t(wire), qpn, flags, {rdma.remote_heap, rdma.data_rkey}, {}, 0);
  }
}

// Builds the work request number next_.
void Lane::set(const Op& op) noexcept {
  if (spared_) under_way_[next_ % depth_] = op;
  if (moving()) return;  // replay() builds it
  MlxQueue::set(half().rings, next_ - offset_, block(op, next_ - offset_));
}

bool Lane::has_room() noexcept {
  const auto room = [&] {
    return spared_ ? next_ - done_ < depth_
                   : MlxQueue::has_room(halves_[0].rings, &halves_[0].numbers, next_);
  };
  if (room()) return true;
  spared_ ? poll_spared() : poll();
  if (room()) return true;
  publish();  // what is there must complete, or there never is any
  Counters::add(counters_.full);
  return false;
}

uint64_t Lane::room_at() const noexcept {
  const auto lock = locked();
  const uint64_t next = 1 + (shared_ ? HostMemory::load(&halves_[0].numbers.reserved) : next_);
  return next - std::min<uint64_t>(next, depth_);
}

uint64_t Lane::all_done_at() const noexcept {
  const auto lock = locked();
  const mlx5::Numbers& numbers = halves_[0].numbers;
  // Of a failed lane something will never be done, whether it was posted or swallowed.
  if (failed()) return 1 + (shared_ ? HostMemory::load(&numbers.reserved) : next_);
  return shared_ ? HostMemory::acquire(&numbers.ready) : next_;
}

bool Lane::idle() const noexcept {
  if (failed()) return false;  // somebody has to say so
  const auto lock = locked();
  if (moving()) return false;
  const mlx5::Numbers& numbers = half().numbers;
  return HostMemory::acquire(&numbers.rung) == HostMemory::acquire(&numbers.done);
}

void Lane::publish() noexcept {
  if (pushed_ == next_ || moving()) return;
  MlxQueue::publish(half().rings, &half().numbers, next_ - offset_);
  Counters::add(counters_.doorbells);
  pushed_ = next_;
  last_can_grow_ = false;
  last_post_ns_.store(common::now_ns(), std::memory_order_relaxed);
}

// One work request, built and not told yet.
bool Lane::post_alone(const Op& op) noexcept {
  if (!has_room()) return false;
  if (failed()) return true;
  set(op);
  ++next_;
  if (op.signalled) signalled_ = next_;
  Counters::add(counters_.requests);
  return true;
}

void Lane::fail(const mlx5::Failure& why) noexcept {
  uint64_t* const word = spared_ ? &failed_ : &halves_[0].numbers.failed;
  uint64_t none = 0;  // the first reason stays
  __atomic_compare_exchange_n(word, &none, mlx5::failed_value(why), false, __ATOMIC_RELEASE,
                              __ATOMIC_RELAXED);
}

// What this word holds once `add` was added, by the one who may build now.
Lane::Op Lane::sum(uint64_t word, uint64_t add) noexcept {
  try {
    return {Op::kSum, true, 8, word, sums_[word] += add};
  } catch (const std::bad_alloc&) {
    fail({kNoMemory, 0, 0});
    return {};  // instead of it
  }
}

// One work request by any thread: a number that has room; whoever got one builds and commits. Who
// has a number holds up all others, so it waits for no completion, only for those who run too.
template <class Make>
bool Lane::post_shared(Make&& make) noexcept {
  const mlx5::Rings& rings = halves_[0].rings;
  mlx5::Numbers* const numbers = &halves_[0].numbers;
  uint64_t number;
  if (!MlxQueue::reserve_one(rings, numbers, &number)) {
    poll();
    if (!MlxQueue::reserve_one(rings, numbers, &number)) {
      Counters::add(counters_.full);
      return false;
    }
  }
  int64_t end = 0;
  uint8_t why = kStalled;
  const auto in_turn = [&](auto&& done) {  // of threads that may have stopped
    while (!done()) {
      const int64_t now = common::now_ns();
      if (end == 0) end = now + turn_ns_;
      if (why == kStalled && aborted_ && aborted_->load(std::memory_order_relaxed)) {
        why = kAborted;
        end = std::min(end, now + kAbortedTurnNs);
      }
      if (now > end) fail({why, 0, uint16_t(number)});
      if (failed()) return false;
      HostMemory::pause();
    }
    return true;
  };
  // Sums of words must be in the order of the ring: without atomics the turn comes first.
  if (adds()) MlxQueue::set(rings, number, block(make(), number));
  if (!in_turn([&] { return MlxQueue::is_next(numbers, number); })) return true;
  if (!adds()) MlxQueue::set(rings, number, block(make(), number));
  MlxQueue::commit(numbers, number, 1);
  if (!in_turn([&] { return MlxQueue::ring_ready(rings, numbers); })) return true;
  Counters::add(counters_.doorbells);
  Counters::add(counters_.requests);
  last_post_ns_.store(common::now_ns(), std::memory_order_relaxed);
  return true;
}

bool Lane::put(uint64_t dst, uint64_t src, uint32_t bytes) noexcept {
  if (failed()) return true;
  if (shared_) {
    const bool posted = post_shared([&] { return Op{Op::kPut, true, bytes, dst, src}; });
    if (posted) Counters::add(counters_.bytes, bytes);
    return posted;
  }
  const auto lock = locked();
  if (last_can_grow_ && last_.at + last_.bytes == dst && last_.value + last_.bytes == src &&
      uint64_t(last_.bytes) + bytes <= max_message_) {
    last_.bytes += bytes;
    --next_;
    set(last_);
    ++next_;
    Counters::add(counters_.merged);
  } else {
    // Room comes from completions: some in every quarter of the queue.
    const bool signalled = next_ + 1 - signalled_ >= std::max(1u, depth_ / 4);
    const Op op{Op::kPut, signalled, bytes, dst, src};
    if (!post_alone(op)) return false;
    last_ = op;
    last_can_grow_ = true;
    if (next_ - pushed_ >= kBatch) publish();
  }
  Counters::add(counters_.bytes, bytes);
  return true;
}

bool Lane::signal(uint64_t word, uint64_t add) noexcept {
  if (failed()) return true;
  const auto make = [&] { return adds() ? Op{Op::kAdd, true, 8, word, add} : sum(word, add); };
  if (shared_) return post_shared(make);
  const auto lock = locked();
  if (!has_room()) return false;
  post_alone(make());
  publish();
  return true;
}

bool Lane::ask() noexcept {
  if (failed()) return true;
  if (shared_) return post_shared([] { return Op{Op::kAsk, true, 0, 0, 0}; });
  const auto lock = locked();
  if (!post_alone(Op{Op::kAsk, true, 0, 0, 0})) return false;
  publish();
  return true;
}

bool Lane::push() noexcept {
  if (shared_ || failed()) return true;
  {
    const auto lock = locked();
    if (signalled_ == next_) {
      publish();
      return true;
    }
  }
  return ask();
}

void Lane::poll() noexcept {
  if (failed()) return;
  if (spared_) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) poll_spared();
    return;
  }
  const int taken = MlxQueue::poll_shared(halves_[0].rings, &halves_[0].numbers, 64);
  if (taken > 0) Counters::add(counters_.completions, uint64_t(taken));
}

int Lane::take(Half& half) noexcept {
  const int taken = MlxQueue::poll(half.rings, &half.numbers, 64);
  Counters::add(counters_.completions, uint64_t(taken));
  return taken;
}

void Lane::poll_spared() noexcept {
  const auto syndrome = [](const Half& half) {
    return mlx5::failure(HostMemory::load(&half.numbers.failed)).syndrome;
  };
  const auto failed = [](const Half& half) { return HostMemory::load(&half.numbers.failed) != 0; };
  const auto fail = [&](const Half& half) {
    this->fail(mlx5::failure(HostMemory::load(&half.numbers.failed)));
  };
  if (HostMemory::load(&failed_) != 0) return;
  Half& half = this->half();
  switch (phase_) {
    case kSettling:
      while (!failed(half) && take(half) > 0) {
      }
      HostMemory::store(&done_, HostMemory::load(&half.numbers.done));
      if (failed(half) && syndrome(half) != mlx5::kRetryExceeded &&
          syndrome(half) != mlx5::kFlushed) {
        return fail(half);
      }
      if (common::now_ns() >= settled_at_ns_) begin_reading();
      return;
    case kReading:
      if (take(half) == 0) return;
      if (failed(half)) return fail(half);
      if (HostMemory::load(&half.numbers.done) < reads_) return;
      try {
        found_[reading_] = HostMemory::take(reinterpret_cast<uint64_t*>(half.pair.read_into));
      } catch (const std::bad_alloc&) {
        return this->fail({kNoMemory, 0, 0});
      }
      return read_next();
    default:
      if (take(half) == 0) return;
      HostMemory::store(&done_, offset_ + HostMemory::load(&half.numbers.done));
      if (!failed(half)) return;
      // Only what a silent peer, or the way to it, explains is worth another try.
      if (phase_ == kSpare || syndrome(half) != mlx5::kRetryExceeded) return fail(half);
      gave_up_.store(true);
      settle(settle_ns_);
  }
}

// What the first queue pair sent last arrives, or never will: no write of it follows those of the
// spare.
void Lane::settle(int64_t ns) noexcept {
  phase_ = kSettling;
  settled_at_ns_ = common::now_ns() + ns;
}

void Lane::begin_reading() noexcept {
  Counters::add(counters_.moved);
  phase_ = kReading;
  active_.store(1);
  candidates_ = pushed_;
  read_next();
}

// From the last signal back to one that was carried out, or to the first; each word is read once.
void Lane::read_next() noexcept {
  for (; candidates_ > done_; --candidates_) {
    const Op& op = under_way_[(candidates_ - 1) % depth_];
    if (op.kind != Op::kSum) continue;
    const auto found = found_.find(op.at);
    if (found != found_.end()) {
      if (found->second >= op.value) break;
      continue;
    }
    Half& half = this->half();
    const common::RdmaQueue& rdma = *half.pair.rdma;
    MlxQueue::set(half.rings, reads_,
                  mlx5::read(uint16_t(reads_), half.rings.qpn, mlx5::kSignalled,
                             {rdma.remote_heap + op.at, rdma.signal_rkey},
                             {half.pair.read_into, half.pair.sink_lkey}, 8));
    reading_ = op.at;
    MlxQueue::publish(half.rings, &half.numbers, ++reads_);
    Counters::add(counters_.doorbells);
    return;
  }
  found_.clear();
  replay(candidates_);
}

// All from number `begin` on goes to the spare queue pair, in order, behind what it has read.
void Lane::replay(uint64_t begin) noexcept {
  const uint64_t behind = next_;
  phase_ = kSpare;
  offset_ = begin - reads_;
  HostMemory::store(&done_, begin);
  if (pushed_ > begin) Counters::add(counters_.replayed, pushed_ - begin);
  pushed_ = signalled_ = begin;
  for (next_ = begin; next_ < behind; ++next_) {
    Op op = under_way_[next_ % depth_];
    op.signalled |= next_ + 1 == behind;
    set(op);
    if (op.signalled) signalled_ = next_ + 1;
  }
  last_can_grow_ = false;
  publish();
}

bool Lane::take_failure(mlx5::Failure* why) noexcept {
  const uint64_t failed = HostMemory::acquire(failed_word());
  if (failed == 0 || told_.exchange(true)) return false;
  *why = mlx5::failure(failed);
  return true;
}

}  // namespace epcomm::ibgda
