// One (peer, channel) as the threads see it that post to it and look for its completions.
//
// A lane of data has one posting thread at a time: numbers are plain arithmetic, puts are built and
// told to the NIC with the signal behind them or when some have gathered, with one fence. A shared
// lane takes any thread: each reserves, builds, makes its range ready in order, and rings.
// Completions are taken by whoever looks; nobody waits for somebody who does.
//
// A lane with a spare queue pair, on another NIC port, takes a lock for each operation and keeps
// what is under way. Once the first queue pair gives up on a peer that does not answer, the lane
// moves to the spare. Much may have been carried out and not acknowledged: the peer has used those
// bytes since, and must not get them again. So the spare first reads the words of the signals under
// way. Signals are written sums there, in order, so the highest one found tells how far the peer
// got. What lies behind it nobody was told of, and is posted again.
//
// Meanwhile posting goes on, as far as there is room; it is kept with what is under way.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/clock.hpp"
#include "common/rdma/rdma.hpp"
#include "epcomm/mlx5_host.hpp"

namespace epcomm::ibgda {

using MlxQueue = mlx5::Queue<mlx5::HostMemory>;

struct Counters {
  std::atomic<uint64_t> requests{0};
  std::atomic<uint64_t> doorbells{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> merged{0};
  std::atomic<uint64_t> completions{0};
  std::atomic<uint64_t> full{0};
  std::atomic<uint64_t> replayed{0};
  std::atomic<uint64_t> moved{0};

  static void add(std::atomic<uint64_t>& counter, uint64_t count = 1) noexcept {
    counter.fetch_add(count, std::memory_order_relaxed);
  }
};

class Lane {
 public:
  static constexpr uint32_t kBatch = 16;  // puts that gather before the NIC is told

  // A queue pair and what work requests for it need.
  struct Pair {
    const common::RdmaQueue* rdma = nullptr;
    common::QueueView view;
    uint64_t sink = 0;  // what atomics return goes there
    uint32_t sink_lkey = 0;
    uint64_t read_into = 0;  // 8 bytes, under the same key; of a spare
  };
  struct Setup {
    Pair pair;
    Pair spare;         // without `rdma`: none
    uint64_t heap = 0;  // address of the own heap
    bool shared = false;
    int64_t settle_ns = 0;  // what the first queue pair sent may be on its way for so long
    int64_t turn_ns = 0;    // how long a thread waits for those that took a number before it
    // Once set, by abort(): no longer than kAbortedTurnNs, so that a rank that gives up can say so.
    const std::atomic<bool>* aborted = nullptr;
  };
  static constexpr int64_t kAbortedTurnNs = 500 * 1000 * 1000;
  // Syndromes of a lane where one of them never came, also until abort(), or that has no memory
  // for a signal's sum.
  static constexpr uint8_t kStalled = 0xfe;
  static constexpr uint8_t kNoMemory = 0xfd;
  static constexpr uint8_t kAborted = 0xfc;

  explicit Lane(const Setup& setup);

  // The queue pair in use.
  const common::RdmaQueue& rdma() const noexcept { return *half().pair.rdma; }

  // ---- posting. Each returns false, and has done nothing, where the queue has no room: wait for
  // room_word() to reach room_at() and come again. A failed lane swallows everything.

  bool put(uint64_t dst, uint64_t src, uint32_t bytes) noexcept;
  bool signal(uint64_t word, uint64_t add) noexcept;
  // An empty write: it completes after all before it, and only if the peer answers.
  bool ask() noexcept;
  // What has gathered is told to the NIC, and its last one completes visibly. False: no room.
  bool push() noexcept;

  const std::byte* room_word() const noexcept {
    return reinterpret_cast<const std::byte*>(spared_ ? &done_ : &halves_[0].numbers.done);
  }
  uint64_t room_at() const noexcept;
  // The value of room_word() once all that was posted is carried out.
  uint64_t all_done_at() const noexcept;
  uint32_t max_message() const noexcept { return max_message_; }

  // ---- any thread

  bool idle() const noexcept;
  // Takes completions, unless another thread does.
  void poll() noexcept;
  bool failed() const noexcept { return mlx5::HostMemory::load(failed_word()) != 0; }
  // To the spare before the first queue pair gives up by itself; `stop` prevents that one from
  // sending and says whether it did.
  template <class Stop>
  void move(Stop&& stop) noexcept;
  // True once after the first queue pair gave up: others that lead the same way will too.
  bool take_move() noexcept { return gave_up_.load() && gave_up_.exchange(false); }
  const common::RdmaQueue& first() const noexcept { return *halves_[0].pair.rdma; }
  // True once, for the caller who then says what happened.
  bool take_failure(mlx5::Failure* why) noexcept;
  int64_t last_post_ns() const noexcept { return last_post_ns_.load(std::memory_order_relaxed); }
  const Counters& counters() const noexcept { return counters_; }

 private:
  struct Half {
    Pair pair;
    mlx5::Rings rings{};
    mlx5::Numbers numbers{};
  };
  // What a work request does, to build it again.
  struct Op {
    enum Kind : uint8_t { kPut, kAdd, kSum, kAsk } kind = kAsk;
    bool signalled = false;
    uint32_t bytes = 0;
    uint64_t at = 0;     // offset at the peer
    uint64_t value = 0;  // kPut: offset of the source; else the number
  };

  Half& half() noexcept { return halves_[active_.load(std::memory_order_relaxed)]; }
  const Half& half() const noexcept { return halves_[active_.load(std::memory_order_relaxed)]; }
  const uint64_t* failed_word() const noexcept {
    return spared_ ? &failed_ : &halves_[0].numbers.failed;
  }
  std::unique_lock<std::mutex> locked() const noexcept {
    return spared_ ? std::unique_lock<std::mutex>(mutex_) : std::unique_lock<std::mutex>();
  }
  mlx5::Block block(const Op& op, uint64_t wire) const noexcept;
  void set(const Op& op) noexcept;
  void fail(const mlx5::Failure& why) noexcept;
  Op sum(uint64_t word, uint64_t add) noexcept;
  bool post_alone(const Op& op) noexcept;
  template <class Make>
  bool post_shared(Make&& make) noexcept;
  bool has_room() noexcept;
  void publish() noexcept;
  void poll_spared() noexcept;
  int take(Half& half) noexcept;
  void settle(int64_t ns) noexcept;
  void begin_reading() noexcept;
  void read_next() noexcept;
  void replay(uint64_t begin) noexcept;
  bool moving() const noexcept { return phase_ == kSettling || phase_ == kReading; }
  bool adds() const noexcept { return !spared_ && halves_[0].pair.rdma->max_rd_atomic > 0; }

  const bool spared_;
  const bool shared_;
  const uint64_t heap_;
  const int64_t turn_ns_, settle_ns_;
  const std::atomic<bool>* const aborted_;
  uint32_t depth_;
  uint32_t max_message_;
  Half halves_[2];
  std::atomic<int> active_{0};
  Counters counters_;
  std::atomic<bool> told_{false};
  std::atomic<int64_t> last_post_ns_{0};
  // Of the one thread that posts.
  uint64_t next_ = 0;           // number of the next work request
  uint64_t pushed_ = 0;         // numbers below are told to the NIC
  uint64_t signalled_ = 0;      // numbers below complete visibly
  bool last_can_grow_ = false;  // it is a put and not told yet
  Op last_;
  std::unordered_map<uint64_t, uint64_t> sums_;  // of words, where signals are written
  // With a spare, under the lock.
  mutable std::mutex mutex_;
  uint64_t offset_ = 0;  // number of the active queue pair's first work request
  alignas(8) uint64_t done_ = 0;
  alignas(8) uint64_t failed_ = 0;
  std::vector<Op> under_way_;  // by number modulo depth
  enum Phase { kFirst, kSettling, kReading, kSpare } phase_ = kFirst;
  std::atomic<bool> gave_up_{false};
  int64_t settled_at_ns_ = 0;
  uint64_t candidates_ = 0;  // signals from this number on were not carried out
  uint64_t reads_ = 0;
  uint64_t reading_ = 0;                          // the word that is being read
  std::unordered_map<uint64_t, uint64_t> found_;  // in words
};

template <class Stop>
void Lane::move(Stop&& stop) noexcept {
  if (!spared_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  poll_spared();
  if (phase_ != kFirst || mlx5::HostMemory::load(&failed_) != 0 || !stop()) return;
  settle(done_ == pushed_ ? 0 : settle_ns_);
  poll_spared();
}

}  // namespace epcomm::ibgda
