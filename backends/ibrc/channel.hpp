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

// A command that the proxy has taken and not yet reported as done.
struct Taken {
  Command command{};
  uint64_t end = 0;   // work requests of its queue pair up to its last one
  int32_t next = -1;  // behind it on the same queue pair, a place in the window
  bool done = false;
};

class Channel {
 public:
  // `size`: a power of two, slots of the ring and commands that may be under way.
  Channel(int number, int num_ranks, uint32_t size)
      : number_(number),
        size_(size),
        ring_(size),
        last_to_(static_cast<size_t>(num_ranks), 0),
        window_(size) {}

  int number() const noexcept { return number_; }
  uint32_t size() const noexcept { return size_; }

  // ---- the producer's end: one thread at a time

  bool has_room() const noexcept { return HostRing::has_room(issue_, taken(), size_); }
  // Value that taken_word() must reach before the next write().
  uint64_t room_at() const noexcept { return issue_ + 1 - size_; }
  // Only when has_room().
  void write(const Command& command) noexcept {
    HostRing::write(ring_.slots, size_, issue_, command);
    last_to_[static_cast<size_t>(command.peer)] = ++issue_;
    issued_.store(issue_, std::memory_order_seq_cst);  // before a look at whether the proxy sleeps
  }
  // Value of done_word() at which all that was written for `peer` has been carried out.
  uint64_t last_to(int peer) const noexcept { return last_to_[static_cast<size_t>(peer)]; }

  const std::byte* taken_word() const noexcept { return bytes(&ring_.words->taken); }
  const std::byte* done_word() const noexcept { return bytes(&ring_.words->done); }
  uint64_t done() const noexcept { return load(&ring_.words->done); }

  // ---- the proxy's end: its thread

  bool anything_new() const noexcept { return issued_.load(std::memory_order_seq_cst) != next_; }
  // Up to `limit` commands, each handed to visit(place in the window). Returns how many.
  template <class Visit>
  uint32_t take(uint32_t limit, Visit&& visit) noexcept {
    uint32_t count = 0;
    for (; count < limit && next_ - finished_ < size_; ++count) {
      Taken& slot = window_[next_ & (size_ - 1)];
      if (!HostRing::read(ring_.slots, size_, next_, &slot.command)) break;
      slot.done = false;
      slot.next = -1;
      const int32_t place = static_cast<int32_t>(next_ & (size_ - 1));
      ++next_;
      visit(place);
    }
    if (count > 0) store(&ring_.words->taken, next_);
    return count;
  }
  Taken& at(int32_t place) noexcept { return window_[static_cast<size_t>(place)]; }
  // True if `done` moved.
  bool finish(int32_t place) noexcept {
    at(place).done = true;
    const uint64_t before = finished_;
    while (finished_ != next_ && window_[finished_ & (size_ - 1)].done) ++finished_;
    if (finished_ == before) return false;
    store(&ring_.words->done, finished_);
    return true;
  }
  bool idle() const noexcept { return finished_ == next_; }

 private:
  static const std::byte* bytes(const uint64_t* word) noexcept {
    return reinterpret_cast<const std::byte*>(word);
  }
  static uint64_t load(const uint64_t* word) noexcept {
    return HostMemory::word(word)->load(std::memory_order_acquire);
  }
  // Sequentially consistent: a look at whether producers sleep follows.
  static void store(uint64_t* word, uint64_t value) noexcept {
    HostMemory::word(word)->store(value, std::memory_order_seq_cst);
  }
  uint64_t taken() const noexcept { return load(&ring_.words->taken); }

  const int number_;
  const uint32_t size_;
  RingMemory ring_;
  // The producer's.
  alignas(64) uint64_t issue_ = 0;
  std::vector<uint64_t> last_to_;  // by peer
  alignas(64) std::atomic<uint64_t> issued_{0};
  // The proxy's.
  alignas(64) uint64_t next_ = 0;  // command to take
  uint64_t finished_ = 0;          // commands below it are done
  std::vector<Taken> window_;
};

}  // namespace epcomm::ibrc
