#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <memory>
#include <vector>

#include "common/clock.hpp"
#include "common/errors.hpp"
#include "common/rdma/endpoint.hpp"
#include "ibgda/factory.hpp"
#include "ibgda/lane.hpp"

namespace epcomm::ibgda {
namespace {

constexpr char kName[] = "ibgda";
constexpr int64_t kProbeNs = 1000 * 1000 * 1000;  // how long a silent peer is not asked

// Spare queue pairs have channels of their own behind the control channel, which take other ports
// than those they stand in for: the distance leaves a remainder of 1 for 2, 3, 4 or 6 ports.
int spare_distance(const Options& options) noexcept {
  return (options.rdma.num_channels + 1 + 10) / 12 * 12 + 1;
}

common::RdmaEndpointOptions endpoint_options(const Options& options) {
  common::RdmaEndpointOptions endpoint;
  endpoint.name = kName;
  endpoint.rdma = options.rdma;
  endpoint.num_channels = options.rdma.num_channels + 1;
  endpoint.rdma.control_channel = options.rdma.num_channels;
  if (options.failover) {
    endpoint.rdma.num_channels = options.rdma.num_channels + spare_distance(options);
    endpoint.rdma.remote_reads = true;  // to know what was carried out
  }
  endpoint.rdma.cq_per_qp = true;  // its entries are taken without a look at whose they are
  endpoint.folder = options.folder;
  endpoint.spin_us = options.spin_us;
  endpoint.use_pidfd = options.use_pidfd;
  endpoint.callers_look = true;
  return endpoint;
}

class Ibgda final : public IbgdaBackend {
 public:
  explicit Ibgda(const Options& options)
      : IbgdaBackend(endpoint_options(options)), options_(options) {}
  ~Ibgda() override { close(); }

  // Backend
  uint32_t caps() const noexcept override { return kCapHostPut | kCapInterNode | kCapHostMemory; }

  // IbgdaBackend
  Stats stats() const noexcept override;

  // HostTransport
  Status put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept override;
  Status signal(int peer, int channel, uint64_t word, uint64_t add) noexcept override;
  Status quiet(int peer, int channel, const WaitSpec& spec) noexcept override;

 private:
  // RdmaEndpoint
  Status start(int local_ranks) override;
  void stop() noexcept override {}
  void forget() noexcept override {}
  void drain(int peer, int64_t deadline_ns) noexcept override;
  void look() noexcept override;

  Status view(const common::RdmaQueue& queue, Lane::Pair* out);
  Lane& lane(int peer, int channel) const noexcept {
    return *lanes_[size_t(peer) * size_t(num_channels()) + size_t(channel)];
  }
  // Posts once there is room, under the deadline.
  template <class Post>
  Status post(Lane& lane, const char* operation, Post&& post) noexcept;
  void look_at(Lane& lane) noexcept;
  void ask_silent_peers() noexcept;
  void move_others(const common::RdmaQueue& gave_up) noexcept;
  void lose(Lane& lane, const mlx5::Failure& why) noexcept;

  const Options options_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // [peer][channel]; null to the own rank
  std::atomic<int64_t> next_probe_ns_{0};
  std::atomic<uint64_t> probes_{0};
};

Status Ibgda::start(int) {
  lanes_.resize(size_t(num_ranks()) * size_t(num_channels()));
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (!is_far(peer)) continue;
    for (int channel = 0; channel < num_channels(); ++channel) {
      Lane::Setup setup;
      EPCOMM_RETURN_IF_ERROR(view(rdma().queue(peer, channel), &setup.pair));
      const common::RdmaQueue* const spare =
          options_.failover ? &rdma().queue(peer, channel + spare_distance(options_)) : nullptr;
      // With one port there is nothing to fall back on.
      if (spare && spare->path != setup.pair.rdma->path) {
        if (spare->max_reads == 0) {
          return error(Code::kUnsupported, peer,
                       "EPCOMM_IB_FAILOVER=replay needs RDMA reads, to tell what was carried out: "
                       "the devices of ranks %d and %d do none (max_qp_init_rd_atom, "
                       "max_qp_rd_atom); set EPCOMM_IB_FAILOVER=error",
                       rank(), peer);
        }
        EPCOMM_RETURN_IF_ERROR(view(*spare, &setup.spare));
        setup.spare.read_into = rdma().read_into(*spare);
      }
      setup.settle_ns = common::seconds_to_ns(rdma().try_seconds());
      setup.turn_ns = common::seconds_to_ns(timeout_s());
      setup.aborted = &waiter().aborted_flag();
      setup.heap = reinterpret_cast<uint64_t>(heap());
      // Asked by any thread whether the peer is there.
      setup.shared = options_.shared || channel == num_channels() - 1;
      lanes_[size_t(peer) * size_t(num_channels()) + size_t(channel)] =
          std::make_unique<Lane>(setup);
    }
  }
  return {};
}

Status Ibgda::view(const common::RdmaQueue& queue, Lane::Pair* out) {
  out->rdma = &queue;
  EPCOMM_RETURN_IF_ERROR(rdma().provider()->queue_view(queue.qp, &out->view));
  rdma().sink(queue.path, &out->sink, &out->sink_lkey);
  const common::QueueView& view = out->view;
  if (view.sq_depth >= 8 && view.cq_depth >= 8 && view.sq_depth <= mlx5::kMaxDepth) return {};
  return error(
      Code::kUnsupported, queue.peer,
      "send queue of %u work requests with %u completions; expected 8 to %u, and 8 or more",
      view.sq_depth, view.cq_depth, mlx5::kMaxDepth);
}

// ---- progress: whoever waits looks

void Ibgda::look_at(Lane& lane) noexcept {
  lane.poll();
  mlx5::Failure why;
  if (lane.failed() && lane.take_failure(&why)) lose(lane, why);
}

void Ibgda::look() noexcept {
  for (const auto& lane : lanes_) {
    if (lane && !lane->idle()) look_at(*lane);
    if (lane && lane->take_move()) move_others(lane->first());
  }
  ask_silent_peers();
}

// The others to that peer between the same two ports would each find out for themselves, after as
// many tries again.
void Ibgda::move_others(const common::RdmaQueue& gave_up) noexcept {
  for (int channel = 0; channel < num_channels(); ++channel) {
    Lane& other = lane(gave_up.peer, channel);
    const common::RdmaQueue& queue = other.first();
    if (queue.path != gave_up.path || queue.remote_path != gave_up.remote_path) continue;
    other.move([&] { return break_queue(queue.peer, queue.channel).ok(); });
  }
}

// A far host that died says nothing: only an unanswered request tells.
void Ibgda::ask_silent_peers() noexcept {
  const int64_t now = common::now_ns();
  int64_t due = next_probe_ns_.load(std::memory_order_relaxed);
  if (now < due || !next_probe_ns_.compare_exchange_strong(due, now + kProbeNs / 4)) return;
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (!is_far(peer) || !waited_for(peer)) continue;
    Lane& control = lane(peer, num_channels() - 1);
    if (!control.idle() || now - control.last_post_ns() < kProbeNs) continue;
    probes_.fetch_add(1, std::memory_order_relaxed);
    control.ask();
  }
}

void Ibgda::lose(Lane& lane, const mlx5::Failure& why) noexcept {
  common::guarded([&] {
    const common::RdmaQueue& queue = lane.rdma();
    const std::string which = common::queue_text(queue);
    std::string cause = rdma().provider()->explain(queue.qp);
    if (!cause.empty()) cause = ": " + cause;
    if (why.syndrome == mlx5::kNoSense) {
      const Status text = error(Code::kPeerLost, queue.peer,
                                "%s to queue pair %u: a completion names no work request under "
                                "way%s",
                                which.c_str(), queue.remote_qpn, cause.c_str());
      note_lost(queue.peer, text.text);
      return text;
    }
    if (why.syndrome == Lane::kStalled || why.syndrome == Lane::kAborted) {
      const bool aborted = why.syndrome == Lane::kAborted;
      const Status text = error(Code::kPeerLost, queue.peer,
                                "%s: a thread took work request %u or one before it and did not "
                                "post it within %g s%s",
                                which.c_str(), why.index,
                                aborted ? double(Lane::kAbortedTurnNs) * 1e-9 : timeout_s(),
                                aborted ? " after abort()" : "");
      note_lost(queue.peer, text.text);
      return text;
    }
    if (why.syndrome == Lane::kNoMemory) {
      const Status text = error(Code::kPeerLost, queue.peer,
                                "%s: no memory for the sum of a signal", which.c_str());
      note_lost(queue.peer, text.text);
      return text;
    }
    const Status text =
        error(Code::kPeerLost, queue.peer,
              "%s to queue pair %u ended with %s (syndrome 0x%02x, vendor code 0x%02x) at work "
              "request %u%s",
              which.c_str(), queue.remote_qpn, mlx5::syndrome_text(why.syndrome), why.syndrome,
              why.vendor, why.index, cause.c_str());
    note_lost(queue.peer, text.text);
    return text;
  });
}

// ---- use

template <class Post>
Status Ibgda::post(Lane& lane, const char* operation, Post&& post) noexcept {
  while (!post()) {
    const WaitSpec spec{operation, "send queue", timeout_s()};
    look_at(lane);
    Status status = room_waiter().wait(lane.rdma().peer, lane.room_word(), lane.room_at(), spec);
    if (status.ok()) continue;
    // What a lost peer does not get is no error here: waits and quiet() say who is lost and why.
    const bool gone = lane.failed() || waiter().peer_state(lane.rdma().peer) == PeerState::kLeft;
    if (gone && status.code == Code::kPeerLost) return {};
    return status;
  }
  return {};
}

Status Ibgda::put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, channel));
  EPCOMM_RETURN_IF_ERROR(check_range(dst, src, bytes));
  if (peer == rank()) {
    std::memmove(heap() + dst, heap() + src, bytes);
    return {};
  }
  Lane& to = lane(peer, channel);
  while (bytes > 0) {
    const uint32_t part = uint32_t(std::min<uint64_t>(bytes, to.max_message()));
    EPCOMM_RETURN_IF_ERROR(post(to, "put", [&] { return to.put(dst, src, part); }));
    dst += part;
    src += part;
    bytes -= part;
  }
  return {};
}

Status Ibgda::signal(int peer, int channel, uint64_t word, uint64_t add) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, channel));
  EPCOMM_RETURN_IF_ERROR(check_word(word));
  if (peer == rank()) {
    add_own(word, add);
    return {};
  }
  Lane& to = lane(peer, channel);
  return post(to, "signal", [&] { return to.signal(word, add); });
}

Status Ibgda::quiet(int peer, int channel, const WaitSpec& spec) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, channel));
  if (peer == rank()) return {};
  Lane& to = lane(peer, channel);
  EPCOMM_RETURN_IF_ERROR(post(to, spec.operation, [&] { return to.push(); }));
  to.poll();
  const Status status = room_waiter().wait(peer, to.room_word(), to.all_done_at(), spec);
  return quiet_status(peer, status, spec);
}

void Ibgda::drain(int peer, int64_t deadline_ns) noexcept {
  for (int channel = 0; channel < num_channels(); ++channel) {
    Lane& to = lane(peer, channel);
    int64_t nap = 10 * 1000;
    const auto done = [&] {
      to.poll();
      return reinterpret_cast<const std::atomic<uint64_t>*>(to.room_word())->load() >=
             to.all_done_at();
    };
    bool pushed = to.push();
    while (!to.failed() && !(pushed && done())) {
      if (waiter().peer_state(peer) != PeerState::kAlive || common::now_ns() >= deadline_ns) break;
      const timespec pause = common::to_timespec(nap);
      nanosleep(&pause, nullptr);
      nap = std::min<int64_t>(nap * 2, 1000 * 1000);
      pushed = pushed || to.push();
    }
  }
}

Stats Ibgda::stats() const noexcept {
  Stats sum;
  sum.probes = probes_.load(std::memory_order_relaxed);
  for (const auto& lane : lanes_) {
    if (!lane) continue;
    const Counters& counters = lane->counters();
    const auto get = [](const std::atomic<uint64_t>& counter) {
      return counter.load(std::memory_order_relaxed);
    };
    sum.requests += get(counters.requests);
    sum.doorbells += get(counters.doorbells);
    sum.bytes += get(counters.bytes);
    sum.merged += get(counters.merged);
    sum.completions += get(counters.completions);
    sum.full += get(counters.full);
    sum.replayed += get(counters.replayed);
    sum.moved += get(counters.moved);
  }
  return sum;
}

}  // namespace

Status probe(const std::string& provider) noexcept {
  return common::guarded([&]() -> Status {
    if (provider == "soft") return {};  // needs nothing
    std::shared_ptr<common::VerbsProvider> opened;
    Status status = softhca::open_provider(provider, {}, &opened);
    if (!status.ok()) {
      status.code = Code::kUnavailable;
      status.text = std::string(kName) + ": " + status.text;
      return status;
    }
    return common::probe_devices(kName, opened.get());
  });
}

std::unique_ptr<IbgdaBackend> create(const Options& options) noexcept {
  try {
    return std::make_unique<Ibgda>(options);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace epcomm::ibgda
