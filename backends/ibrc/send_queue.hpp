// One queue pair as its proxy sees it: commands that wait for it and commands under way, credits,
// and how commands become work requests. Used by one thread.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/rdma/rdma.hpp"
#include "ibrc/channel.hpp"

namespace epcomm::ibrc {

// Counted by a proxy, read by anybody.
struct ProxyStats {
  std::atomic<uint64_t> commands{0};     // taken from rings
  std::atomic<uint64_t> posts{0};        // calls of ibv_post_send, that is doorbells
  std::atomic<uint64_t> requests{0};     // work requests
  std::atomic<uint64_t> bytes{0};        // of puts
  std::atomic<uint64_t> merged{0};       // puts that went with the one before them
  std::atomic<uint64_t> completions{0};  // entries of completion queues
  std::atomic<uint64_t> probes{0};       // empty writes that ask whether a peer is there
  std::atomic<uint64_t> sleeps{0};       // of the thread
  std::atomic<uint64_t> stalls{0};       // passes in which a queue had commands and no credit

  // Only the proxy's own thread adds.
  static void add(std::atomic<uint64_t>& counter, uint64_t count) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  }
};

// A completion queue and what is under way towards it. A flush completes every work request, asked
// or not, so each counts.
struct CompletionQueue {
  ibv_cq* cq = nullptr;
  uint32_t capacity = 0;
  uint32_t outstanding = 0;
};

// A linked list of work requests in the making; one per proxy.
struct Batch {
  static constexpr uint32_t kMax = 64;

  uint32_t count = 0;
  uint32_t atomics = 0;
  uint32_t merged = 0;
  bool tail_is_put = false;  // the last one can grow
  ibv_send_wr requests[kMax];
  ibv_sge pieces[kMax];
  uint64_t values[kMax];  // of signals that are written
};

class SendQueue {
 public:
  struct Setup {
    const common::RdmaQueue* rdma = nullptr;
    Channel* channel = nullptr;
    CompletionQueue* completions = nullptr;
    Batch* batch = nullptr;
    ProxyStats* stats = nullptr;
    uint64_t heap = 0;  // address of the own heap
    uint64_t sink = 0;  // what atomics return goes there
    uint32_t sink_lkey = 0;
    uint32_t number = 0;  // upper half of wr_id
  };

  explicit SendQueue(const Setup& setup);

  const common::RdmaQueue& rdma() const noexcept { return *setup_.rdma; }
  Channel& channel() const noexcept { return *setup_.channel; }
  CompletionQueue* completions() const noexcept { return setup_.completions; }

  // A command taken from the channel. On a queue that was dropped it is finished at once.
  void push(int32_t place) noexcept;
  // True while commands wait to be posted.
  bool waiting() const noexcept { return next_ >= 0; }
  // One linked list, one ibv_post_send(): as many waiting commands as credits allow. *moved is set
  // if it posted or finished something. kPeerLost means that the queue pair takes nothing any more,
  // kOutOfMemory that there was no memory for what a signal needs. What a device has no room for
  // (ENOMEM) waits again, for a second at most without anything moving.
  Status post(bool* moved) noexcept;
  // An empty write, if nothing is under way and nothing was posted since `idle_since`.
  Status probe(int64_t idle_since, bool* moved) noexcept;

  // A good completion: everything up to that work request is done.
  void complete(uint64_t wr_id) noexcept;
  // A bad one, or (null) a post that failed with `why`. Returns what a person should read, once;
  // empty for those behind the first. Nothing is posted any more.
  std::string fail(const ibv_wc* completion, const char* why) noexcept;
  // Once the failure is known to all who wait, or they would take it for success: every command
  // that is left, and every later one, is finished unseen. Idempotent.
  void drop() noexcept;

  bool failed() const noexcept { return failed_; }
  uint32_t outstanding() const noexcept { return static_cast<uint32_t>(posted_ - completed_); }

 private:
  uint32_t free_credits() const noexcept;
  bool atomics() const noexcept { return setup_.rdma->max_rd_atomic > 0; }
  Status post_empty() noexcept;
  bool build() noexcept;
  uint64_t* sum_of(uint64_t word) noexcept;
  void take_back(int32_t begin) noexcept;
  bool fits(const Command& command) const noexcept;
  bool merges(const Command& command) const noexcept;
  void add_put(const Command& command) noexcept;
  void add_signal(const Command& command, uint64_t* sum) noexcept;
  ibv_send_wr& add_request() noexcept;
  Status send(int32_t begin) noexcept;
  void settle(uint64_t end) noexcept;
  void retire() noexcept;
  std::string describe(uint64_t request) noexcept;

  const Setup setup_;
  // Commands, linked through the channel's pool: [first_, next_) are under way, [next_, last_]
  // wait.
  int32_t first_ = -1, next_ = -1, last_ = -1;
  // Work requests, numbered from 0.
  uint64_t posted_ = 0;
  uint64_t completed_ = 0;
  uint64_t atomics_posted_ = 0;
  uint64_t atomics_completed_ = 0;
  std::vector<uint64_t> atomics_upto_;  // by work request modulo depth
  uint32_t unasked_ = 0;                // posted since the last that asks for a completion
  uint32_t unasked_atomics_ = 0;
  int64_t last_post_ns_ = 0;
  bool mute_ = false;       // the last one posted asks for none, and should have
  int64_t refused_ns_ = 0;  // since when the device has had no room; 0: it had
  bool failed_ = false;
  // Where there are no atomics: what the peer's words hold, since this is their only writer.
  std::unordered_map<uint64_t, uint64_t> shadow_;
};

// "put of 4096 bytes to offset 8192"
std::string command_text(const Command& command);

}  // namespace epcomm::ibrc
