// One queue pair as the threads see it that post to it and poll it.
//
// A lane of data has one posting thread at a time: numbers are plain arithmetic, puts are built and
// told to the NIC with the signal behind them or when some have gathered, with one fence. A shared
// lane takes any thread: each reserves, builds, makes its range ready in order, and rings.
// Completions are taken by whoever looks; nobody waits for somebody who does.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>

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

  static void add(std::atomic<uint64_t>& counter, uint64_t count = 1) noexcept {
    counter.fetch_add(count, std::memory_order_relaxed);
  }
};

class Lane {
 public:
  static constexpr uint32_t kBatch = 16;  // puts that gather before the NIC is told

  struct Setup {
    const common::RdmaQueue* rdma = nullptr;
    common::QueueView view;
    uint64_t heap = 0;  // address of the own heap
    uint64_t sink = 0;  // what atomics return goes there
    uint32_t sink_lkey = 0;
    bool shared = false;
  };

  explicit Lane(const Setup& setup);

  const common::RdmaQueue& rdma() const noexcept { return *setup_.rdma; }
  bool shared() const noexcept { return setup_.shared; }

  // ---- posting. Each returns false, and has done nothing, where the queue has no room: wait for
  // room_word() to reach room_at() and come again. A failed lane swallows everything.

  bool put(uint64_t dst, uint64_t src, uint32_t bytes) noexcept;
  bool signal(uint64_t word, uint64_t add) noexcept;
  // An empty write: it completes after all before it, and only if the peer answers.
  bool ask() noexcept;
  // What has gathered is told to the NIC, and its last one completes visibly. False: no room.
  bool push() noexcept;

  const std::byte* room_word() const noexcept {
    return reinterpret_cast<const std::byte*>(&numbers_.done);
  }
  uint64_t room_at() const noexcept;
  // The value of room_word() once all that was posted is carried out.
  uint64_t all_done_at() const noexcept;

  // ---- any thread

  bool idle() const noexcept { return outstanding() == 0; }
  uint64_t outstanding() const noexcept;
  // Takes completions, unless another thread does.
  void poll() noexcept;
  bool failed() const noexcept { return mlx5::HostMemory::load(&numbers_.failed) != 0; }
  // True once, for the caller who then says what happened.
  bool take_failure(mlx5::Failure* why) noexcept;
  // Nobody can tell any more what becomes of it: for a thread that leaves a gap behind.
  void spoil() noexcept;
  int64_t last_post_ns() const noexcept { return last_post_ns_.load(std::memory_order_relaxed); }
  const Counters& counters() const noexcept { return counters_; }

 private:
  template <class Build>
  bool post_shared(Build&& build) noexcept;
  bool has_room(uint64_t number) noexcept;
  void publish() noexcept;
  mlx5::Block put_block(uint64_t number, uint8_t flags) const noexcept;
  mlx5::Block signal_block(uint64_t number, uint64_t word, uint64_t add) noexcept;
  bool atomics() const noexcept { return setup_.rdma->max_rd_atomic > 0; }

  const Setup setup_;
  const mlx5::Rings rings_;
  mlx5::Numbers numbers_{};
  Counters counters_;
  std::atomic<bool> told_{false};
  std::atomic<int64_t> last_post_ns_{0};
  // Of the one thread that posts.
  struct Put {
    uint64_t dst, src;
    uint32_t bytes;
  };
  uint64_t next_ = 0;         // number of the next work request
  uint64_t pushed_ = 0;       // numbers below are told to the NIC
  uint64_t signalled_ = 0;    // numbers below complete visibly
  bool last_is_put_ = false;  // the last one is not told yet and can grow
  Put last_{};
  std::unordered_map<uint64_t, uint64_t> sums_;  // of words, where signals are written
};

}  // namespace epcomm::ibgda
