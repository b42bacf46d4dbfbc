#include <pthread.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <memory>

#include "common/clock.hpp"
#include "common/cpu.hpp"
#include "common/errors.hpp"
#include "common/rdma/endpoint.hpp"
#include "ibrc/factory.hpp"
#include "ibrc/proxy.hpp"

namespace epcomm::ibrc {
namespace {

constexpr char kName[] = "ibrc";

int num_threads(const Options& options) noexcept {
  const int paths = int(options.rdma.paths.size());
  const int wanted = options.num_threads > 0 ? options.num_threads : paths;
  return std::clamp(wanted, 1, options.rdma.num_channels + 1);
}

common::RdmaEndpointOptions endpoint_options(const Options& options) {
  common::RdmaEndpointOptions endpoint;
  endpoint.name = kName;
  endpoint.rdma = options.rdma;
  // More threads than NICs share the channels out, and a completion queue has one reader.
  endpoint.rdma.cq_per_qp = num_threads(options) > int(options.rdma.paths.size());
  endpoint.folder = options.folder;
  endpoint.spin_us = options.spin_us;
  endpoint.use_pidfd = options.use_pidfd;
  endpoint.threads_per_rank = 1 + num_threads(options);
  return endpoint;
}

class Ibrc final : public IbrcBackend, private ProxyEvents {
 public:
  explicit Ibrc(const Options& options)
      : IbrcBackend(endpoint_options(options)), options_(options) {}
  ~Ibrc() override { close(); }

  // Backend
  uint32_t caps() const noexcept override {
    return kCapHostPut | kCapInterNode | kCapHostMemory | kCapNeedsProgress;
  }
  Status alloc_heap(uint64_t size_bytes) noexcept override {
    EPCOMM_RETURN_IF_ERROR(check_options());
    return IbrcBackend::alloc_heap(size_bytes);
  }
  Status adopt_heap(common::Segment* segment) noexcept override {
    EPCOMM_RETURN_IF_ERROR(check_options());
    return IbrcBackend::adopt_heap(segment);
  }

  Status connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                 double timeout_s, int (*interrupted)(void*),
                 void* interrupted_arg) noexcept override {
    caller_ = pthread_self();
    interrupted_ = interrupted;
    interrupted_arg_ = interrupted_arg;
    return IbrcBackend::connect(rank, infos, state_word, timeout_s, interrupted, interrupted_arg);
  }

  // IbrcBackend
  Stats stats() const noexcept override;

  // HostTransport
  Status put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept override;
  Status signal(int peer, int channel, uint64_t word, uint64_t add) noexcept override;
  Status put_signal(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes,
                    uint64_t word, uint64_t add) noexcept override;
  Status quiet(int peer, int channel, const WaitSpec& spec) noexcept override;

 private:
  // RdmaEndpoint
  Status start(int local_ranks) override;
  void stop() noexcept override {
    for (auto& proxy : proxies_) proxy->stop();
  }
  void forget() noexcept override {
    for (auto& proxy : proxies_) proxy->forget();
  }
  void drain(int peer, int64_t deadline_ns) noexcept override;

  // ProxyEvents, in a proxy's thread
  void peer_lost(int peer, const std::string& why) noexcept override { note_lost(peer, why); }
  void broken(const Status& why) noexcept override { note_broken(why); }
  bool waited_for(int peer) noexcept override { return IbrcBackend::waited_for(peer); }

  Status check_options() const noexcept;
  Status send(Channel& channel, const Command& command) noexcept;
  Status move(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes, uint32_t last_op,
              uint64_t word, uint64_t add) noexcept;
  int thread_of(int channel) const noexcept {
    const int paths = int(options_.rdma.paths.size());
    const int threads = num_threads(options_);
    return (threads <= paths ? plan_path(channel, paths) : channel) % threads;
  }

  const Options options_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<std::unique_ptr<Proxy>> proxies_;
  uint32_t max_message_ = kCommandMaxBytes;
  // Who called connect(), and how it hears of Ctrl-C: also in put(), which is not told.
  pthread_t caller_{};
  int (*interrupted_)(void*) = nullptr;
  void* interrupted_arg_ = nullptr;
};

Status Ibrc::check_options() const noexcept {
  const uint32_t size = options_.queue_size;
  const uint32_t most = uint32_t(INT32_MAX) / uint32_t(std::max(1, options_.rdma.num_ranks));
  if (size >= 2 && size <= most && (size & (size - 1)) == 0) return {};
  return error(Code::kInvalidArgument, -1, "queue_size=%u: expected a power of two from 2 to %u",
               size, most);
}

Status Ibrc::start(int local_ranks) {
  const int channels = num_channels();
  const int threads = num_threads(options_);
  for (int c = 0; c < channels; ++c) {
    channels_.push_back(std::make_unique<Channel>(c, num_ranks(), options_.queue_size));
  }
  std::vector<Proxy::Setup> setups(static_cast<size_t>(threads));
  for (int c = 0; c < channels; ++c) {
    Proxy::Setup& setup = setups[size_t(thread_of(c))];
    setup.channels.push_back(channels_[size_t(c)].get());
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (!is_far(peer)) continue;
      Proxy::Queue queue;
      queue.rdma = &rdma().queue(peer, c);
      rdma().sink(queue.rdma->path, &queue.sink, &queue.sink_lkey);
      queue.probed = c == channels - 1;
      if (queue.rdma->depth < 2) {
        return error(Code::kUnsupported, peer, "send queues of depth %u; expected 2 or more",
                     queue.rdma->depth);
      }
      if (queue.rdma->max_rd_atomic == 0 && queue.rdma->max_inline < 8) {
        return error(Code::kUnsupported, peer,
                     "the device has neither atomics nor 8 bytes of inline data, so no signals");
      }
      max_message_ = std::min(max_message_, queue.rdma->max_message);
      setup.queues.push_back(queue);
    }
  }
  for (int t = 0; t < threads; ++t) {
    Proxy::Setup& setup = setups[size_t(t)];
    setup.rank = rank();
    setup.num_ranks = num_ranks();
    setup.heap = heap();
    setup.heap_bytes = heap_bytes();
    setup.provider = rdma().provider();
    setup.events = this;
    setup.room = &room();
    setup.spin_ns = common::wait_policy(local_ranks * (1 + threads), options_.spin_us).spin_ns * 20;
    if (!options_.cpus.empty()) {
      const size_t turn = size_t(options_.local_rank) * size_t(threads) + size_t(t);
      setup.cpu = options_.cpus[turn % options_.cpus.size()];
    }
    proxies_.push_back(std::make_unique<Proxy>(setup));
    EPCOMM_RETURN_IF_ERROR(proxies_.back()->start(t));
  }
  return {};
}

void Ibrc::drain(int peer, int64_t deadline_ns) noexcept {
  for (auto& channel : channels_) {
    int64_t nap = 10 * 1000;
    while (channel->completed(peer) < channel->issued_to(peer)) {
      if (waiter().peer_state(peer) != PeerState::kAlive || common::now_ns() >= deadline_ns) break;
      const timespec pause = common::to_timespec(nap);
      nanosleep(&pause, nullptr);
      nap = std::min<int64_t>(nap * 2, 1000 * 1000);
    }
  }
}

// ---- use

// One command into the ring, once it and the peer's share have room. What a lost peer does not get
// is no error here: waits and quiet() say who is lost and why.
Status Ibrc::send(Channel& channel, const Command& command) noexcept {
  const int peer = command.peer;
  if (!channel.has_room(peer)) {
    WaitSpec spec{"put", "command queue", timeout_s()};
    if (pthread_equal(pthread_self(), caller_)) {
      spec.interrupted = interrupted_;
      spec.interrupted_arg = interrupted_arg_;
    }
    common::Waiter& waits = room_waiter();
    Status status = waits.wait(peer, channel.completed_word(peer), channel.room_at(peer), spec);
    if (status.ok()) status = waits.wait(peer, channel.taken_word(), channel.room_at(), spec);
    if (status.code == Code::kPeerLost && waiter().peer_state(peer) == PeerState::kLeft) {
      return {};  // it takes nothing any more, and said so
    }
    EPCOMM_RETURN_IF_ERROR(status);
  }
  common::order_streaming_stores();
  channel.write(command);
  proxies_[size_t(thread_of(channel.number()))]->wake();
  return {};
}

Status Ibrc::move(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes,
                  uint32_t last_op, uint64_t word, uint64_t add) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, channel));
  EPCOMM_RETURN_IF_ERROR(check_range(dst, src, bytes));
  if (last_op & kCommandSignal) EPCOMM_RETURN_IF_ERROR(check_word(word));
  if (peer == rank()) {
    std::memmove(heap() + dst, heap() + src, bytes);
    if (last_op & kCommandSignal) add_own(word, add);
    return {};
  }
  Channel& ring = *channels_[size_t(channel)];
  while (bytes > max_message_) {
    EPCOMM_RETURN_IF_ERROR(send(ring, {kCommandPut, 0, peer, max_message_, src, dst, 0, 0}));
    src += max_message_;
    dst += max_message_;
    bytes -= max_message_;
  }
  return send(ring, {last_op, 0, peer, uint32_t(bytes), src, dst, word, add});
}

Status Ibrc::put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept {
  return move(peer, channel, dst, src, bytes, kCommandPut, 0, 0);
}

Status Ibrc::signal(int peer, int channel, uint64_t word, uint64_t add) noexcept {
  return move(peer, channel, 0, 0, 0, kCommandSignal, word, add);
}

Status Ibrc::put_signal(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes,
                        uint64_t word, uint64_t add) noexcept {
  return move(peer, channel, dst, src, bytes, kCommandPutSignal, word, add);
}

Status Ibrc::quiet(int peer, int channel, const WaitSpec& spec) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, channel));
  Channel& ring = *channels_[size_t(channel)];
  const Status status =
      room_waiter().wait(peer, ring.completed_word(peer), ring.issued_to(peer), spec);
  return quiet_status(peer, status, spec);
}

Stats Ibrc::stats() const noexcept {
  Stats sum;
  for (const auto& proxy : proxies_) {
    const ProxyStats& stats = proxy->stats();
    const auto get = [](const std::atomic<uint64_t>& counter) {
      return counter.load(std::memory_order_relaxed);
    };
    sum.commands += get(stats.commands);
    sum.posts += get(stats.posts);
    sum.requests += get(stats.requests);
    sum.bytes += get(stats.bytes);
    sum.merged += get(stats.merged);
    sum.completions += get(stats.completions);
    sum.probes += get(stats.probes);
    sum.sleeps += get(stats.sleeps);
    sum.stalls += get(stats.stalls);
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

std::unique_ptr<IbrcBackend> create(const Options& options) noexcept {
  try {
    return std::make_unique<Ibrc>(options);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace epcomm::ibrc
