// A channel's command ring in host memory, and its two ends: the producer's and the proxy's.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "epcomm/command.h"

namespace epcomm::ibrc {

// How host threads see a ring (CommandRing in command.h).
struct HostMemory {
  static void store_quarter(CommandQuarter* at, const CommandQuarter& quarter) noexcept {
    word(&at->low)->store(quarter.low, std::memory_order_relaxed);
    word(&at->high)->store(quarter.high, std::memory_order_release);
  }
  static CommandQuarter load_quarter(const CommandQuarter* at) noexcept {
    CommandQuarter quarter;
    quarter.high = word(&at->high)->load(std::memory_order_acquire);
    quarter.low = word(&at->low)->load(std::memory_order_relaxed);
    return quarter;
  }
  static std::atomic<uint64_t>* word(uint64_t* at) noexcept {
    static_assert(sizeof(std::atomic<uint64_t>) == 8);
    return reinterpret_cast<std::atomic<uint64_t>*>(at);
  }
  static const std::atomic<uint64_t>* word(const uint64_t* at) noexcept {
    return reinterpret_cast<const std::atomic<uint64_t>*>(at);
  }
};
using HostRing = CommandRing<HostMemory>;

// Pages of their own, zeroed: a GPU may be given them.
struct RingMemory {
  explicit RingMemory(uint32_t size)
      : bytes((sizeof(CommandSlot) * size + sizeof(CommandWords) + 4095) / 4096 * 4096) {
    void* const pages =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    words = static_cast<CommandWords*>(pages);
    slots = reinterpret_cast<CommandSlot*>(words + 1);
  }
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;
  ~RingMemory() { munmap(words, bytes); }

  const size_t bytes;
  CommandWords* words;
  CommandSlot* slots;
};

// A command that the proxy has taken and not yet finished. No initializers: pages of a channel's
// pool that never hold one are never touched.
struct Held {
  Command command;
  uint64_t number;  // in the ring
  uint64_t end;     // work requests of its queue pair up to its last one
  int32_t next;     // behind it on the same queue pair, a place in the pool; free: of the free ones
  int32_t older, newer;  // around it in the order of the ring
};

// A count that one thread writes and others wait for.
struct alignas(64) CountWord {
  uint64_t value = 0;
};

// Bounds, so that no peer stands in another's way: `size` commands in the ring, and of each peer
// `size` in the proxy's hands. Host producers wait for the peer that they write to before they
// exceed its share, so the proxy can always empty the ring. A producer that does not count by peer
// (a GPU) and exceeds it stops the ring until that peer moves.
class Channel {
 public:
  // `size`: a power of two.
  Channel(int number, int num_ranks, uint32_t size)
      : number_(number),
        size_(size),
        ring_(size),
        issued_to_(static_cast<size_t>(num_ranks), 0),
        held_(static_cast<size_t>(num_ranks), 0),
        completed_(static_cast<size_t>(num_ranks)),
        pool_(new Held[static_cast<size_t>(num_ranks) * size]) {}

  int number() const noexcept { return number_; }
  uint32_t size() const noexcept { return size_; }

  // ---- the producer's end: one thread at a time

  bool has_room(int peer) const noexcept {
    return HostRing::has_room(issue_, load(&ring_.words->taken), size_) &&
           issued_to(peer) - completed(peer) < size_;
  }
  // Values that taken_word() and the peer's completed_word() must reach before the next write() to
  // that peer.
  uint64_t room_at() const noexcept { return beyond(issue_); }
  uint64_t room_at(int peer) const noexcept { return beyond(issued_to(peer)); }
  // Only when has_room().
  void write(const Command& command) noexcept {
    HostRing::write(ring_.slots, size_, issue_, command);
    ++issue_;
    ++issued_to_[static_cast<size_t>(command.peer)];
    issued_.store(issue_, std::memory_order_seq_cst);  // before a look at whether the proxy sleeps
  }
  // Value of completed_word() at which all that was written for `peer` has been carried out.
  uint64_t issued_to(int peer) const noexcept { return issued_to_[static_cast<size_t>(peer)]; }

  const std::byte* taken_word() const noexcept { return bytes(&ring_.words->taken); }
  const std::byte* completed_word(int peer) const noexcept { return bytes(&word_of(peer)); }
  uint64_t completed(int peer) const noexcept { return load(&word_of(peer)); }
  // In the order of the ring over all peers, for producers that keep no counts: GPUs.
  uint64_t done() const noexcept { return load(&ring_.words->done); }

  // ---- the proxy's end: its thread

  bool anything_new() const noexcept { return issued_.load(std::memory_order_seq_cst) != next_; }
  // Up to `limit` commands in order, as long as admit(command) says true: it has called hold(), or
  // has refused it. Returns how many.
  template <class Admit>
  uint32_t take(uint32_t limit, Admit&& admit) noexcept {
    uint32_t count = 0;
    Command command;
    while (count < limit && HostRing::read(ring_.slots, size_, next_, &command) && admit(command)) {
      ++next_;
      ++count;
    }
    if (count == 0) return 0;
    // Sequentially consistent: a look at whether producers sleep follows.
    store(&ring_.words->taken, next_, std::memory_order_seq_cst);
    publish();
    return count;
  }
  bool may_hold(int peer) const noexcept { return held_[static_cast<size_t>(peer)] < size_; }
  // The command that take() shows now. Returns its place in the pool.
  int32_t hold(const Command& command) noexcept {
    int32_t place = free_;
    if (place >= 0) {
      free_ = at(place).next;
    } else {
      place = fresh_++;
    }
    at(place) = Held{command, next_, 0, -1, newest_, -1};
    if (newest_ >= 0) {
      at(newest_).newer = place;
    } else {
      oldest_ = place;
    }
    newest_ = place;
    ++held_[static_cast<size_t>(command.peer)];
    return place;
  }
  // The command that take() shows now counts as carried out.
  void refuse(const Command& command) noexcept {
    if (command.peer >= 0 && size_t(command.peer) < completed_.size()) count(command.peer);
  }
  Held& at(int32_t place) noexcept { return pool_[static_cast<size_t>(place)]; }
  // Commands of a peer are finished in their order. The place is free then.
  void finish(int32_t place) noexcept {
    Held& held = at(place);
    (held.older >= 0 ? at(held.older).newer : oldest_) = held.newer;
    (held.newer >= 0 ? at(held.newer).older : newest_) = held.older;
    const int peer = held.command.peer;
    held.next = free_;
    free_ = place;
    --held_[static_cast<size_t>(peer)];
    count(peer);
    publish();
  }
  bool idle() const noexcept { return oldest_ < 0; }

 private:
  static const std::byte* bytes(const uint64_t* word) noexcept {
    return reinterpret_cast<const std::byte*>(word);
  }
  static uint64_t load(const uint64_t* word) noexcept {
    return HostMemory::word(word)->load(std::memory_order_acquire);
  }
  static void store(uint64_t* word, uint64_t value, std::memory_order order) noexcept {
    HostMemory::word(word)->store(value, order);
  }
  const uint64_t& word_of(int peer) const noexcept {
    return completed_[static_cast<size_t>(peer)].value;
  }
  uint64_t beyond(uint64_t issued) const noexcept {
    return issued < size_ ? 0 : issued + 1 - size_;
  }
  void count(int peer) noexcept {
    uint64_t* const word = &completed_[static_cast<size_t>(peer)].value;
    store(word, *word + 1, std::memory_order_seq_cst);  // as `taken`
  }
  void publish() noexcept {
    const uint64_t done = oldest_ >= 0 ? at(oldest_).number : next_;
    if (done == done_) return;
    done_ = done;
    store(&ring_.words->done, done, std::memory_order_release);
  }

  const int number_;
  const uint32_t size_;
  RingMemory ring_;
  // The producer's.
  alignas(64) uint64_t issue_ = 0;
  std::vector<uint64_t> issued_to_;  // by peer
  alignas(64) std::atomic<uint64_t> issued_{0};
  // The proxy's.
  alignas(64) uint64_t next_ = 0;  // command to take
  uint64_t done_ = 0;              // commands below it are finished
  std::vector<uint32_t> held_;     // by peer
  std::vector<CountWord> completed_;
  std::unique_ptr<Held[]> pool_;
  int32_t free_ = -1;  // places given back
  int32_t fresh_ = 0;  // places from here on were never used
  int32_t oldest_ = -1, newest_ = -1;
};

}  // namespace epcomm::ibrc
