// The thread that turns commands into work requests and completions into counts.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "common/bell.hpp"
#include "common/rdma/rdma.hpp"
#include "epcomm/status.hpp"
#include "ibrc/send_queue.hpp"

namespace epcomm::ibrc {

// Who hears of what a proxy finds out. Any of the proxies' threads.
class ProxyEvents {
 public:
  virtual ~ProxyEvents() = default;
  // The queue pair to this peer takes nothing any more; `why` ends a sentence.
  virtual void peer_lost(int peer, const std::string& why) noexcept = 0;
  // A command that no producer of ours writes, or no memory: nothing can be trusted any more.
  virtual void broken(const Status& why) noexcept = 0;
  // Somebody waits for a word of this peer.
  virtual bool waited_for(int peer) noexcept = 0;
};

class Proxy {
 public:
  static constexpr uint32_t kTake = 32;  // commands of a channel per pass

  struct Queue {
    const common::RdmaQueue* rdma = nullptr;
    uint64_t sink = 0;
    uint32_t sink_lkey = 0;
    bool probed = false;  // idle, it asks once a second whether a peer that is waited for is there
  };
  struct Setup {
    int rank = 0;
    int num_ranks = 0;
    std::byte* heap = nullptr;
    uint64_t heap_bytes = 0;
    std::vector<Channel*> channels;
    std::vector<Queue> queues;  // of these channels, to all peers
    common::VerbsProvider* provider = nullptr;
    ProxyEvents* events = nullptr;
    common::Bell* room = nullptr;  // producers and quiet() sleep on it
    int cpu = -1;                  // to run on
    int64_t spin_ns = 0;           // before the thread yields
    int64_t probe_ns = 1000 * 1000 * 1000;
  };

  explicit Proxy(const Setup& setup);
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;
  ~Proxy() { stop(); }

  Status start(int number);
  // Ends the thread, whatever is under way; bounded. Idempotent.
  void stop() noexcept;
  // Leaves the thread to the process it runs in: for objects inherited through fork.
  void forget() noexcept { running_ = false; }

  // A producer has written a command.
  void wake() noexcept { bell_.ring(); }
  const ProxyStats& stats() const noexcept { return stats_; }

 private:
  static void* run(void* self) noexcept;
  void work() noexcept;
  bool pass() noexcept;
  bool take() noexcept;
  bool post(SendQueue& queue) noexcept;
  bool poll(CompletionQueue& cq) noexcept;
  bool probe() noexcept;
  Status check(size_t channel, const Command& command) const noexcept;
  void lose(SendQueue& queue, const ibv_wc* completion, const char* why) noexcept;
  bool under_way() const noexcept;
  bool anything_new() const noexcept;

  const Setup setup_;
  std::vector<CompletionQueue> completion_queues_;
  std::vector<std::unique_ptr<SendQueue>> queues_;
  std::vector<int> queue_of_;     // [channel of setup_.channels][peer], -1: none
  std::vector<int> waiting_;      // queues with commands to post
  std::vector<char> is_waiting_;  // by queue
  std::vector<int> probed_;       // queues that probe
  int64_t next_probe_ns_ = 0;
  Batch batch_;
  ProxyStats stats_;
  common::Bell bell_{};
  std::atomic<bool> stop_{false};
  pthread_t thread_{};
  bool running_ = false;
};

}  // namespace epcomm::ibrc
