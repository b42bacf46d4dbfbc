// One rank's end of a backend that drives NICs for host threads, without the part that posts: the
// life of heap, queue pairs and peers, whom waits blame, and the checks of arguments.
//
// A backend derives from it, starts what posts in start() and ends it in stop(). Its destructor
// calls close(): the hooks are its own.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/bell.hpp"
#include "common/fd_exchange.hpp"
#include "common/fork_guard.hpp"
#include "common/info.hpp"
#include "common/liveness.hpp"
#include "common/pair.hpp"
#include "common/rdma/rdma.hpp"
#include "common/segment.hpp"
#include "common/waiter.hpp"

namespace epcomm::common {

struct RdmaEndpointOptions {
  const char* name = "";      // the backend's word, a literal
  RdmaOptions rdma;           // provider, paths, ranks, channels, depth...
  int num_channels = 0;       // that callers know, the control one too; 0: all of rdma's
  std::string folder;         // EPCOMM_SHM_DIR; empty: memfd
  int64_t spin_us = -1;       // before a waiter yields; < 0: from cores and ranks
  bool use_pidfd = true;      // false: watch peers as on a kernel without pidfds
  int threads_per_rank = 1;   // that want a core: they decide how eagerly to wait
  bool callers_look = false;  // waiting threads call look(): nobody else makes progress
};

class RdmaEndpoint : public PairMember, public HostTransport {
 public:
  // Backend
  const char* name() const noexcept override { return options_.name; }
  Status alloc_heap(uint64_t size_bytes) noexcept override;
  Status adopt_heap(Segment* segment) noexcept override;
  Status export_info(std::string* out) noexcept override;
  Status connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                 double timeout_s, int (*interrupted)(void*),
                 void* interrupted_arg) noexcept override;
  HostTransport* host_transport() noexcept override { return connected_ ? this : nullptr; }
  Status async_error() noexcept override;
  // What was sent last reaches the peers that still listen, within 5 s; then everything ends. The
  // own heap stays mapped until the destructor: arrays over it may still be alive, and they hold
  // this object.
  Status close() noexcept override;

  // HostTransport
  std::byte* heap() noexcept override { return heap_->heap(); }
  uint64_t heap_bytes() const noexcept override { return heap_->heap_bytes(); }
  std::byte* peer_ptr(int peer, uint64_t offset) noexcept override;
  Status wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept override;
  PeerState peer_state(int peer) noexcept override;
  void abort(const Status& why) noexcept override;

  // For the face that shows it: Rdma's, "" before connect().
  std::string plan_json() const { return rank_ < 0 ? "" : rdma_.plan_json(); }
  // For tests: Rdma's.
  Status break_queue(int peer, int channel) noexcept {
    EPCOMM_RETURN_IF_ERROR(check_use(peer, channel));
    return rdma_.break_queue(peer, channel);
  }

 protected:
  explicit RdmaEndpoint(const RdmaEndpointOptions& options) : options_(options) {}
  RdmaEndpoint(const RdmaEndpoint&) = delete;
  RdmaEndpoint& operator=(const RdmaEndpoint&) = delete;
  ~RdmaEndpoint() override;  // after close()

  // Every wanted queue pair is connected: begin to post. May throw what the standard library does.
  virtual Status start(int local_ranks) = 0;
  // Nothing is posted any more once it returns; bounded, idempotent, also after a failed start().
  virtual void stop() noexcept = 0;
  // As stop() for objects inherited through fork: nothing is touched.
  virtual void forget() noexcept = 0;
  // Until what was sent to the peer has been carried out, it is gone, or the deadline.
  virtual void drain(int peer, int64_t deadline_ns) noexcept = 0;
  virtual void look() noexcept {}

  Status check_use(int peer, int channel) const noexcept;
  Status check_word(uint64_t word) const noexcept;
  Status check_range(uint64_t dst, uint64_t src, uint64_t bytes) const noexcept;
  void add_own(uint64_t word, uint64_t add) noexcept;

  // The queue pair to this peer takes nothing any more; `why` ends a sentence. Any thread.
  void note_lost(int peer, const std::string& why) noexcept;
  // Nothing can be trusted any more. Any thread.
  void note_broken(const Status& why) noexcept;
  // Somebody waits for a word of this peer.
  bool waited_for(int peer) const noexcept {
    return waiting_[size_t(peer)].load(std::memory_order_relaxed) > 0;
  }
  // What quiet() says once a wait for the peer's work requests ended with `status`.
  Status quiet_status(int peer, const Status& status, const WaitSpec& spec) noexcept;

  const Rdma& rdma() const noexcept { return rdma_; }
  int rank() const noexcept { return rank_; }
  int num_ranks() const noexcept { return num_ranks_; }
  int num_channels() const noexcept {  // control too
    return options_.num_channels > 0 ? options_.num_channels : options_.rdma.num_channels + 1;
  }
  bool is_far(int peer) const noexcept { return far_[size_t(peer)]; }  // queue pairs lead there
  double timeout_s() const noexcept { return timeout_s_; }
  // For words that local threads write: whoever does rings `room()`.
  Waiter& room_waiter() noexcept { return room_waiter_; }
  Bell& room() noexcept { return room_; }
  Waiter& waiter() noexcept { return waiter_; }

 private:
  Status open_heap(Segment* segment);
  Status join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
              double timeout_s, int (*interrupted)(void*), void* interrupted_arg);
  Status read_infos(const std::vector<std::string>& encoded, std::vector<Info>* infos,
                    std::vector<PeerAddress>* addresses);
  Status meet(const std::vector<Info>& infos, const std::vector<PeerAddress>& addresses,
              double timeout_s, int (*interrupted)(void*), void* interrupted_arg,
              std::vector<Process>* processes, std::vector<std::byte*>* mapped);
  void take_down() noexcept;

  const RdmaEndpointOptions options_;
  ForkGuard guard_;
  Segment own_;
  Segment* heap_ = nullptr;     // own_, or an adopted one
  std::vector<Segment> peers_;  // by rank; only for a provider without a wire
  Rdma rdma_;
  std::vector<bool> far_;                         // by rank
  std::unique_ptr<std::atomic<int>[]> waiting_;   // by peer: threads that wait for its words
  std::unique_ptr<std::atomic<bool>[]> dropped_;  // by peer: what it was sent is finished unseen
  FdExchange exchange_;
  Liveness liveness_;
  Waiter waiter_;       // for words that NICs write: nobody rings
  Waiter room_waiter_;  // for words of local threads
  Bell room_{};
  double timeout_s_ = 0;
  int rank_ = -1;
  int num_ranks_ = 0;
  bool exported_ = false;
  bool tried_ = false;
  bool connected_ = false;
  bool closed_ = false;
  std::mutex mutex_;  // of first_error_
  Status first_error_;
};

// probe() of such a backend: whether the provider can be had here and, if it is libibverbs, knows a
// device. Opens none. kUnavailable with the reason.
Status probe_devices(const char* backend, VerbsProvider* provider) noexcept;

}  // namespace epcomm::common
