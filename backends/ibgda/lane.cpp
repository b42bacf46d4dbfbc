#include "ibgda/lane.hpp"

#include <algorithm>

#include "common/clock.hpp"

namespace epcomm::ibgda {
namespace {

mlx5::Rings rings_of(const common::QueueView& view) {
  return {reinterpret_cast<uint64_t>(view.sq),
          reinterpret_cast<uint64_t>(view.sq_dbrec),
          reinterpret_cast<uint64_t>(const_cast<uint64_t*>(view.doorbell)),
          reinterpret_cast<uint64_t>(view.cq),
          reinterpret_cast<uint64_t>(view.cq_dbrec),
          view.qpn,
          view.sq_depth,
          view.cq_depth,
          0};
}

}  // namespace

Lane::Lane(const Setup& setup) : setup_(setup), rings_(rings_of(setup.view)) {}

mlx5::Block Lane::put_block(uint64_t number, uint8_t flags) const noexcept {
  const common::RdmaQueue& rdma = *setup_.rdma;
  return mlx5::write(uint16_t(number), rings_.qpn, flags,
                     {rdma.remote_heap + last_.dst, rdma.data_rkey},
                     {setup_.heap + last_.src, rdma.lkey}, last_.bytes);
}

mlx5::Block Lane::signal_block(uint64_t number, uint64_t word, uint64_t add) noexcept {
  const common::RdmaQueue& rdma = *setup_.rdma;
  const mlx5::Remote to{rdma.remote_heap + word, rdma.signal_rkey};
  if (atomics()) {
    return mlx5::fetch_add(uint16_t(number), rings_.qpn, mlx5::kSignalled, to,
                           {setup_.sink, setup_.sink_lkey}, add);
  }
  return mlx5::write_word(uint16_t(number), rings_.qpn, mlx5::kSignalled, to, sums_[word] += add);
}

bool Lane::has_room(uint64_t number) noexcept {
  if (MlxQueue::has_room(rings_, &numbers_, number)) return true;
  poll();
  if (MlxQueue::has_room(rings_, &numbers_, number)) return true;
  Counters::add(counters_.full);
  return false;
}

uint64_t Lane::room_at() const noexcept {
  const uint64_t next = 1 + (shared() ? mlx5::HostMemory::load(&numbers_.reserved) : next_);
  return next - std::min<uint64_t>(next, shared() ? rings_.sq_depth / 2 : rings_.sq_depth);
}

uint64_t Lane::all_done_at() const noexcept {
  return shared() ? mlx5::HostMemory::acquire(&numbers_.ready) : next_;
}

uint64_t Lane::outstanding() const noexcept {
  return mlx5::HostMemory::acquire(&numbers_.rung) - mlx5::HostMemory::acquire(&numbers_.done);
}

void Lane::publish() noexcept {
  if (pushed_ == next_) return;
  MlxQueue::publish(rings_, &numbers_, next_);
  Counters::add(counters_.doorbells);
  pushed_ = next_;
  last_is_put_ = false;
  last_post_ns_.store(common::now_ns(), std::memory_order_relaxed);
}

// One work request by any thread: room first, then a number; whoever got one builds and commits.
template <class Build>
bool Lane::post_shared(Build&& build) noexcept {
  // Room is looked for before the number is taken: who waits with a number holds up all others.
  // Several may pass at once, hence half of the queue.
  const uint64_t seen = mlx5::HostMemory::load(&numbers_.reserved);
  if (seen - mlx5::HostMemory::acquire(&numbers_.done) >= rings_.sq_depth / 2) {
    poll();
    if (seen - mlx5::HostMemory::acquire(&numbers_.done) >= rings_.sq_depth / 2) {
      Counters::add(counters_.full);
      return false;
    }
  }
  const uint64_t number = MlxQueue::reserve(&numbers_, 1);
  while (!MlxQueue::has_room(rings_, &numbers_, number)) {
    if (failed()) return true;
    poll();
    mlx5::HostMemory::pause();
  }
  // Sums of words must be in the order of the ring: without atomics the turn comes first.
  if (atomics()) MlxQueue::set(rings_, number, build(number));
  while (!MlxQueue::is_next(&numbers_, number)) {
    if (failed()) return true;
    mlx5::HostMemory::pause();
  }
  if (!atomics()) MlxQueue::set(rings_, number, build(number));
  MlxQueue::commit(&numbers_, number, 1);
  MlxQueue::ring_ready(rings_, &numbers_);
  Counters::add(counters_.doorbells);
  Counters::add(counters_.requests);
  last_post_ns_.store(common::now_ns(), std::memory_order_relaxed);
  return true;
}

bool Lane::put(uint64_t dst, uint64_t src, uint32_t bytes) noexcept {
  if (failed()) return true;
  const common::RdmaQueue& rdma = *setup_.rdma;
  if (shared()) {
    const bool posted = post_shared([&](uint64_t number) {
      return mlx5::write(uint16_t(number), rings_.qpn, mlx5::kSignalled,
                         {rdma.remote_heap + dst, rdma.data_rkey}, {setup_.heap + src, rdma.lkey},
                         bytes);
    });
    if (posted) Counters::add(counters_.bytes, bytes);
    return posted;
  }
  if (last_is_put_ && last_.dst + last_.bytes == dst && last_.src + last_.bytes == src &&
      uint64_t(last_.bytes) + bytes <= rdma.max_message) {
    last_.bytes += bytes;
    MlxQueue::set(rings_, next_ - 1,
                  put_block(next_ - 1, signalled_ == next_ ? mlx5::kSignalled : 0));
    Counters::add(counters_.merged);
    Counters::add(counters_.bytes, bytes);
    return true;
  }
  if (!has_room(next_)) {
    publish();  // what is there must complete, or there never is any
    return false;
  }
  last_ = {dst, src, bytes};
  last_is_put_ = true;
  // Room comes from completions: some in every quarter of the queue.
  const uint8_t flags =
      next_ + 1 - signalled_ >= std::max(1u, rings_.sq_depth / 4) ? mlx5::kSignalled : 0;
  if (flags) signalled_ = next_ + 1;
  MlxQueue::set(rings_, next_, put_block(next_, flags));
  ++next_;
  Counters::add(counters_.requests);
  Counters::add(counters_.bytes, bytes);
  if (next_ - pushed_ >= kBatch) publish();
  return true;
}

bool Lane::signal(uint64_t word, uint64_t add) noexcept {
  if (failed()) return true;
  if (shared()) {
    return post_shared([&](uint64_t number) { return signal_block(number, word, add); });
  }
  if (!has_room(next_)) {
    publish();
    return false;
  }
  MlxQueue::set(rings_, next_, signal_block(next_, word, add));
  signalled_ = ++next_;
  Counters::add(counters_.requests);
  publish();
  return true;
}

bool Lane::ask() noexcept {
  if (failed()) return true;
  const auto build = [&](uint64_t number) {
    return mlx5::write(uint16_t(number), rings_.qpn, mlx5::kSignalled,
                       {setup_.rdma->remote_heap, setup_.rdma->data_rkey}, {}, 0);
  };
  if (shared()) return post_shared(build);
  if (!has_room(next_)) {
    publish();
    return false;
  }
  MlxQueue::set(rings_, next_, build(next_));
  signalled_ = ++next_;
  Counters::add(counters_.requests);
  publish();
  return true;
}

bool Lane::push() noexcept {
  if (shared() || failed()) return true;
  if (signalled_ == next_) {
    publish();
    return true;
  }
  return ask();
}

void Lane::poll() noexcept {
  if (failed()) return;
  const int taken = MlxQueue::poll_shared(rings_, &numbers_, 64);
  if (taken > 0) Counters::add(counters_.completions, uint64_t(taken));
}

bool Lane::take_failure(mlx5::Failure* why) noexcept {
  const uint64_t failed = mlx5::HostMemory::acquire(&numbers_.failed);
  if (failed == 0 || told_.exchange(true)) return false;
  *why = mlx5::failure(failed);
  return true;
}

void Lane::spoil() noexcept {
  mlx5::HostMemory::store(&numbers_.failed, mlx5::failed_value({mlx5::kNoSense, 0, 0}));
}

}  // namespace epcomm::ibgda
