// Wakes sleeping waiters of one rank. It lies in shared memory beside the words it guards.
//
// A waiter announces itself in `sleepers`, looks at its word once more and only then sleeps; a
// signaller changes the word first and looks at `sleepers` afterwards. Both sides are sequentially
// consistent, so one of them sees the other: no wake-up is lost, and a signal to a rank that does
// not sleep costs one load. A signaller that dies in between is why sleeps are short anyway.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "common/clock.hpp"

namespace epcomm::common {

struct Bell {
  alignas(64) std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> rings;

  void ring() noexcept {
    if (sleepers.load(std::memory_order_seq_cst) != 0) ring_always();
  }

  // For callers that changed something else than a word by a sequentially consistent store.
  void ring_always() noexcept {
    rings.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleeps until a ring after `ready` was last looked at, or `limit_ns`, or a signal handler.
  template <class Ready>
  void sleep_unless(Ready&& ready, int64_t limit_ns) noexcept {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = rings.load(std::memory_order_seq_cst);
    if (!ready()) {
      const timespec limit = to_timespec(limit_ns);
      syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

}  // namespace epcomm::common
