#include "ibgda/lane.hpp"

#include <algorithm>

#include "common/clock.hpp"

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
  MlxQueue::set(half().rings, next_ - offset_, block(op, next_ - offset_));
  if (spared_) under_way_[next_ % depth_] = op;
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
  return next - std::min<uint64_t>(next, shared_ ? depth_ / 2 : depth_);
}

uint64_t Lane::all_done_at() const noexcept {
  const auto lock = locked();
  return shared_ ? HostMemory::acquire(&halves_[0].numbers.ready) : next_;
}

bool Lane::idle() const noexcept {
  const auto lock = locked();
  const mlx5::Numbers& numbers = half().numbers;
  return HostMemory::acquire(&numbers.rung) == HostMemory::acquire(&numbers.done);
}

void Lane::publish() noexcept {
  if (pushed_ == next_) return;
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

// One work request by any thread: room first, then a number; whoever got one builds and commits.
template <class Make>
bool Lane::post_shared(Make&& make) noexcept {
  const mlx5::Rings& rings = halves_[0].rings;
  mlx5::Numbers* const numbers = &halves_[0].numbers;
  // Room is looked for before the number is taken: who waits with a number holds up all others.
  // Several may pass at once, hence half of the queue.
  const uint64_t seen = HostMemory::load(&numbers->reserved);
  if (seen - HostMemory::acquire(&numbers->done) >= depth_ / 2) {
    poll();
    if (seen - HostMemory::acquire(&numbers->done) >= depth_ / 2) {
      Counters::add(counters_.full);
      return false;
    }
  }
  const uint64_t number = MlxQueue::reserve(numbers, 1);
  while (!MlxQueue::has_room(rings, numbers, number)) {
    if (failed()) return true;
    poll();
    HostMemory::pause();
  }
  // Sums of words must be in the order of the ring: without atomics the turn comes first.
  if (adds()) MlxQueue::set(rings, number, block(make(), number));
  while (!MlxQueue::is_next(numbers, number)) {
    if (failed()) return true;
    HostMemory::pause();
  }
  if (!adds()) MlxQueue::set(rings, number, block(make(), number));
  MlxQueue::commit(numbers, number, 1);
  MlxQueue::ring_ready(rings, numbers);
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
  const auto make = [&] {
    return adds() ? Op{Op::kAdd, true, 8, word, add}
                  : Op{Op::kSum, true, 8, word, sums_[word] += add};
  };
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

void Lane::poll_spared() noexcept {
  Half& half = this->half();
  const int taken = MlxQueue::poll(half.rings, &half.numbers, 64);
  if (taken == 0) return;
  Counters::add(counters_.completions, uint64_t(taken));
  HostMemory::store(&done_, offset_ + HostMemory::load(&half.numbers.done));
  const uint64_t failed = HostMemory::load(&half.numbers.failed);
  if (failed == 0) return;
  // Only what a silent peer, or the way to it, explains is worth another try.
  if (active_.load() == 0 && mlx5::failure(failed).syndrome == mlx5::kRetryExceeded) {
    replay();
  } else {
    HostMemory::store(&failed_, failed);
  }
}

// All that is under way goes to the spare queue pair, in order.
void Lane::replay() noexcept {
  const uint64_t behind = next_;
  offset_ = done_;
  active_.store(1);
  for (next_ = offset_; next_ < behind; ++next_) {
    Op op = under_way_[next_ % depth_];
    op.signalled |= next_ + 1 == behind;
    set(op);
    if (op.signalled) signalled_ = next_ + 1;
  }
  Counters::add(counters_.replayed, behind - offset_);
  pushed_ = offset_;
  publish();
}

bool Lane::take_failure(mlx5::Failure* why) noexcept {
  const uint64_t failed = HostMemory::acquire(failed_word());
  if (failed == 0 || told_.exchange(true)) return false;
  *why = mlx5::failure(failed);
  return true;
}

}  // namespace epcomm::ibgda
