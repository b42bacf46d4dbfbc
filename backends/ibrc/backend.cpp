#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <memory>
#include <mutex>

#include "common/clock.hpp"
#include "common/errors.hpp"
#include "common/fd_exchange.hpp"
#include "common/fork_guard.hpp"
#include "common/info.hpp"
#include "common/liveness.hpp"
#include "common/segment.hpp"
#include "common/waiter.hpp"
#include "ibrc/factory.hpp"
#include "ibrc/proxy.hpp"

namespace epcomm::ibrc {
namespace {

using common::Info;
using common::Segment;

constexpr char kName[] = "ibrc";
constexpr int kInfoVersion = 1;
constexpr double kDrainSeconds = 5;  // close(): what this rank sent last

class Ibrc final : public IbrcBackend, public HostTransport, private ProxyEvents {
 public:
  explicit Ibrc(const Options& options) : options_(options) {}
  ~Ibrc() override;

  // Backend
  const char* name() const noexcept override { return kName; }
  uint32_t caps() const noexcept override {
    return kCapHostPut | kCapInterNode | kCapHostMemory | kCapNeedsProgress;
  }
  Status alloc_heap(uint64_t size_bytes) noexcept override;
  Status export_info(std::string* out) noexcept override;
  Status connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                 double timeout_s, int (*interrupted)(void*),
                 void* interrupted_arg) noexcept override;
  HostTransport* host_transport() noexcept override { return connected_ ? this : nullptr; }
  Status async_error() noexcept override;
  Status close() noexcept override;

  // IbrcBackend
  std::string plan_json() const override { return rank_ < 0 ? "" : rdma_.plan_json(); }
  Stats stats() const noexcept override;

  // HostTransport
  std::byte* heap() noexcept override { return own_.heap(); }
  uint64_t heap_bytes() const noexcept override { return own_.heap_bytes(); }
  std::byte* peer_ptr(int peer, uint64_t offset) noexcept override;
  Status put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept override;
  Status signal(int peer, int channel, uint64_t word, uint64_t add) noexcept override;
  Status put_signal(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes,
                    uint64_t word, uint64_t add) noexcept override;
  Status quiet(int peer, int channel, const WaitSpec& spec) noexcept override;
  Status wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept override;
  PeerState peer_state(int peer) noexcept override;
  void abort(const Status& why) noexcept override;

 private:
  // ProxyEvents, in a proxy's thread
  void peer_lost(int peer, const std::string& why) noexcept override;
  void bad_command(const Status& why) noexcept override;
  bool waited_for(int peer) noexcept override {
    return waiting_[size_t(peer)].load(std::memory_order_relaxed) > 0;
  }

  Status join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
              double timeout_s, int (*interrupted)(void*), void* interrupted_arg);
  Status read_infos(const std::vector<std::string>& encoded, std::vector<Info>* infos,
                    std::vector<common::PeerAddress>* addresses);
  Status meet(const std::vector<Info>& infos, const std::vector<common::PeerAddress>& addresses,
              double timeout_s, int (*interrupted)(void*), void* interrupted_arg,
              std::vector<common::Process>* processes, std::vector<std::byte*>* mapped);
  Status start_proxies(int local_ranks);
  Status check_use(int peer, int channel) const noexcept;
  Status check_word(uint64_t word) const noexcept;
  Status check_range(uint64_t dst, uint64_t src, uint64_t bytes) const noexcept;
  Status send(Channel& channel, const Command& command) noexcept;
  Status move(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes, uint32_t last_op,
              uint64_t word, uint64_t add) noexcept;
  void add_own(uint64_t word, uint64_t add) noexcept;
  void drain() noexcept;
  void take_down() noexcept;
  int num_threads() const noexcept {
    const int paths = int(options_.rdma.paths.size());
    const int wanted = options_.num_threads > 0 ? options_.num_threads : paths;
    return std::clamp(wanted, 1, options_.rdma.num_channels + 1);
  }
  int thread_of(int channel) const noexcept {
    const int paths = int(options_.rdma.paths.size());
    const int threads = num_threads();
    return (threads <= paths ? plan_path(channel, paths) : channel) % threads;
  }

  const Options options_;
  common::ForkGuard guard_;
  Segment own_;
  std::vector<Segment> peers_;  // by rank; only for a provider without a wire
  common::Rdma rdma_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<std::unique_ptr<Proxy>> proxies_;
  std::unique_ptr<std::atomic<int>[]> waiting_;  // by peer: threads that wait for its words
  common::FdExchange exchange_;
  common::Liveness liveness_;
  common::Waiter waiter_;       // for words that NICs write: nobody rings
  common::Waiter room_waiter_;  // for words that proxies write
  common::Bell room_{};
  uint32_t max_message_ = kCommandMaxBytes;
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

Ibrc::~Ibrc() {
  close();
  if (guard_.inherited()) own_.forget();
}

Status Ibrc::alloc_heap(uint64_t size_bytes) noexcept {
  return common::guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (own_.heap() || closed_) {
      return error(Code::kInvalidArgument, -1, "alloc_heap: the heap is made once per backend");
    }
    if (!options_.rdma.provider || options_.rdma.paths.empty()) {
      return error(Code::kInvalidArgument, -1, "ibrc: no path (NIC, port) was given");
    }
    if (options_.queue_size < 2 || (options_.queue_size & (options_.queue_size - 1)) != 0) {
      return error(Code::kInvalidArgument, -1, "queue_size=%u: expected a power of two from 2",
                   options_.queue_size);
    }
    Segment segment;
    EPCOMM_RETURN_IF_ERROR(Segment::create(size_bytes, options_.folder, &segment));
    common::RdmaOptions rdma = options_.rdma;
    // More threads than NICs share the channels out, and a completion queue has one reader.
    rdma.cq_per_qp = num_threads() > int(rdma.paths.size());
    EPCOMM_RETURN_IF_ERROR(rdma_.open(rdma));
    if (Status status = rdma_.register_heap(segment.heap(), segment.heap_bytes()); !status.ok()) {
      rdma_.close();
      return status;
    }
    own_ = std::move(segment);
    return {};
  });
}

Status Ibrc::export_info(std::string* out) noexcept {
  return common::guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (!own_.heap() || exported_ || closed_) {
      return error(Code::kInvalidArgument, -1, "export_info: once, between alloc_heap and connect");
    }
    EPCOMM_RETURN_IF_ERROR(exchange_.listen());
    Info info;
    exchange_.describe(&info);
    EPCOMM_RETURN_IF_ERROR(rdma_.describe(&info));
    info.set("provider", std::string(rdma_.provider()->name()));
    info.set("pid", uint64_t(getpid()));
    info.set("heap", own_.heap_bytes());
    info.set("nonce", own_.tail()->nonce);
    info.set("sealed", uint64_t(own_.sealed()));
    exported_ = true;
    return info.encode(kName, kInfoVersion, out);
  });
}

Status Ibrc::connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                     double timeout_s, int (*interrupted)(void*), void* interrupted_arg) noexcept {
  const Status status = common::guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    return join(rank, infos, state_word, timeout_s, interrupted, interrupted_arg);
  });
  if (!status.ok() && !guard_.inherited()) take_down();
  return status;
}

Status Ibrc::join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                  double timeout_s, int (*interrupted)(void*), void* interrupted_arg) {
  num_ranks_ = int(infos.size());
  if (!exported_ || tried_ || closed_) {
    return error(Code::kInvalidArgument, -1, "connect: once, after export_info");
  }
  tried_ = true;
  if (rank < 0 || rank >= num_ranks_ || num_ranks_ != options_.rdma.num_ranks) {
    return error(Code::kInvalidArgument, -1,
                 "rank=%d of %d infos: expected 0 to %d of %d, as queue pairs were made for", rank,
                 num_ranks_, options_.rdma.num_ranks - 1, options_.rdma.num_ranks);
  }
  const uint64_t state_bytes = uint64_t(num_ranks_) * kSignalStride;
  if (state_word % 8 != 0 || state_bytes > own_.heap_bytes() ||
      state_word > own_.heap_bytes() - state_bytes) {
    return error(Code::kInvalidArgument, -1,
                 "state_word=%" PRIu64 ": expected a multiple of 8, %" PRIu64
                 " bytes before the heap's end at %" PRIu64,
                 state_word, state_bytes, own_.heap_bytes());
  }
  rank_ = rank;
  timeout_s_ = timeout_s;
  std::vector<Info> read;
  std::vector<common::PeerAddress> addresses;
  EPCOMM_RETURN_IF_ERROR(read_infos(infos, &read, &addresses));
  std::vector<common::Process> processes;
  std::vector<std::byte*> mapped;
  EPCOMM_RETURN_IF_ERROR(
      meet(read, addresses, timeout_s, interrupted, interrupted_arg, &processes, &mapped));

  std::vector<bool> wanted(infos.size(), true);
  wanted[size_t(rank)] = false;
  EPCOMM_RETURN_IF_ERROR(rdma_.connect(rank, read, wanted, mapped, timeout_s));

  int local_ranks = 1;
  for (const common::Process& process : processes) local_ranks += process.pid != 0;
  common::Waiter::Setup setup;
  setup.rank = rank;
  setup.num_ranks = num_ranks_;
  setup.state_words = own_.heap() + state_word;
  setup.liveness = &liveness_;
  setup.policy = common::wait_policy(local_ranks * (1 + num_threads()), options_.spin_us);
  waiter_.setup(setup);
  setup.bell = &room_;
  room_waiter_.setup(setup);
  waiting_ = std::make_unique<std::atomic<int>[]>(infos.size());
  for (int peer = 0; peer < num_ranks_; ++peer) waiting_[size_t(peer)] = 0;
  EPCOMM_RETURN_IF_ERROR(liveness_.start(
      std::move(processes), [](void* arg) { static_cast<common::Bell*>(arg)->ring_always(); },
      &room_));
  EPCOMM_RETURN_IF_ERROR(start_proxies(local_ranks));
  connected_ = true;
  return {};
}

Status Ibrc::read_infos(const std::vector<std::string>& encoded, std::vector<Info>* infos,
                        std::vector<common::PeerAddress>* addresses) {
  infos->resize(encoded.size());
  addresses->resize(encoded.size());
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const size_t at = size_t(peer);
    uint64_t heap_bytes;
    std::string provider;
    EPCOMM_RETURN_IF_ERROR(Info::decode(encoded[at], peer, kName, kInfoVersion, &(*infos)[at]));
    EPCOMM_RETURN_IF_ERROR(common::FdExchange::parse((*infos)[at], peer, &(*addresses)[at]));
    EPCOMM_RETURN_IF_ERROR((*infos)[at].get(peer, "heap", &heap_bytes));
    EPCOMM_RETURN_IF_ERROR((*infos)[at].get(peer, "provider", &provider));
    if (heap_bytes != own_.heap_bytes()) {
      return error(Code::kInvalidArgument, peer,
                   "heaps differ: rank %d has %" PRIu64 " bytes, rank %d has %" PRIu64
                   "; all ranks must use equal sizes",
                   rank_, own_.heap_bytes(), peer, heap_bytes);
    }
    if (provider != rdma_.provider()->name()) {
      return error(Code::kUnavailable, peer,
                   "providers differ: rank %d has %s, rank %d has %s (EPCOMM_IB_PROVIDER)", rank_,
                   rdma_.provider()->name(), peer, provider.c_str());
    }
  }
  return {};
}

// Meets the peers of this host, whose processes can then be watched. A provider without a wire
// needs all of them, and their heaps.
Status Ibrc::meet(const std::vector<Info>& infos, const std::vector<common::PeerAddress>& addresses,
                  double timeout_s, int (*interrupted)(void*), void* interrupted_arg,
                  std::vector<common::Process>* processes, std::vector<std::byte*>* mapped) {
  const bool map = rdma_.provider()->needs_mapping();
  std::vector<common::PeerAddress> wanted = addresses;
  const common::PeerAddress& own = addresses[size_t(rank_)];
  for (int peer = 0; peer < num_ranks_; ++peer) {
    common::PeerAddress& address = wanted[size_t(peer)];
    const bool here = address.host == own.host && address.user == own.user &&
                      address.network_namespace == own.network_namespace;
    address.wanted = peer != rank_ && (here || map);
  }
  common::FdExchange::Request request;
  request.rank = rank_;
  request.addresses = &wanted;
  if (map) request.fds = {own_.fd()};
  request.timeout_s = timeout_s;
  request.use_pidfd = options_.use_pidfd;
  request.interrupted = interrupted;
  request.interrupted_arg = interrupted_arg;
  std::vector<common::FdExchange::Peer> met;
  EPCOMM_RETURN_IF_ERROR(exchange_.run(request, &met));

  *processes = std::vector<common::Process>(infos.size());
  peers_ = std::vector<Segment>(infos.size());
  if (map) mapped->resize(infos.size());
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const size_t at = size_t(peer);
    if (!wanted[at].wanted) continue;
    (*processes)[at] = std::move(met[at].process);
    if (!map) continue;
    common::Key nonce;
    uint64_t sealed;
    EPCOMM_RETURN_IF_ERROR(infos[at].get(peer, "nonce", &nonce));
    EPCOMM_RETURN_IF_ERROR(infos[at].get(peer, "sealed", &sealed));
    if (met[at].fds.empty()) return error(Code::kUnavailable, peer, "it gave no descriptor");
    EPCOMM_RETURN_IF_ERROR(Segment::attach(peer, std::move(met[at].fds[0]), own_.heap_bytes(),
                                           nonce, sealed != 0, &peers_[at]));
    (*mapped)[at] = peers_[at].heap();
  }
  if (map) (*mapped)[size_t(rank_)] = own_.heap();
  own_.close_fd();
  return {};
}

Status Ibrc::start_proxies(int local_ranks) {
  const int channels = options_.rdma.num_channels + 1;
  const int threads = num_threads();
  for (int c = 0; c < channels; ++c) {
    channels_.push_back(std::make_unique<Channel>(c, num_ranks_, options_.queue_size));
  }
  std::vector<Proxy::Setup> setups(static_cast<size_t>(threads));
  for (int c = 0; c < channels; ++c) {
    Proxy::Setup& setup = setups[size_t(thread_of(c))];
    setup.channels.push_back(channels_[size_t(c)].get());
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_) continue;
      Proxy::Queue queue;
      queue.rdma = &rdma_.queue(peer, c);
      rdma_.sink(queue.rdma->path, &queue.sink, &queue.sink_lkey);
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
    setup.rank = rank_;
    setup.num_ranks = num_ranks_;
    setup.heap = own_.heap();
    setup.heap_bytes = own_.heap_bytes();
    setup.provider = rdma_.provider();
    setup.events = this;
    setup.room = &room_;
    setup.spin_ns = common::wait_policy(local_ranks * (1 + threads), options_.spin_us).spin_ns * 20;
    if (!options_.cpus.empty()) setup.cpu = options_.cpus[size_t(t) % options_.cpus.size()];
    proxies_.push_back(std::make_unique<Proxy>(setup));
    EPCOMM_RETURN_IF_ERROR(proxies_.back()->start(t));
  }
  return {};
}

// ---- the end

void Ibrc::take_down() noexcept {
  for (auto& proxy : proxies_) proxy->stop();
  rdma_.close();  // before the peers' heaps go: a provider without a wire writes them
  exchange_.close();
  liveness_.stop();
  peers_.clear();
  own_.close_fd();
}

// The own heap stays mapped until the destructor: arrays over it may still be alive, and they hold
// this object.
Status Ibrc::close() noexcept {
  if (closed_) return {};
  closed_ = true;
  const bool was_connected = connected_;
  connected_ = false;
  if (guard_.inherited()) {
    // The parent's threads, events, mappings and queue pairs are not ours to end.
    for (auto& proxy : proxies_) proxy->forget();
    rdma_.forget();
    liveness_.forget();
    for (Segment& peer : peers_) peer.forget();
    return {};
  }
  abort(error(Code::kPeerLost, rank_, "this rank closed its communicator"));
  if (was_connected) drain();
  take_down();
  return {};
}

// What was written last, that this rank leaves above all, reaches the peers that still listen.
void Ibrc::drain() noexcept {
  const int64_t deadline =
      common::now_ns() + common::seconds_to_ns(std::min(timeout_s_, kDrainSeconds));
  for (auto& channel : channels_) {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      int64_t nap = 10 * 1000;
      while (channel->done() < channel->last_to(peer)) {
        if (waiter_.peer_state(peer) != PeerState::kAlive || common::now_ns() >= deadline) break;
        const timespec pause = common::to_timespec(nap);
        nanosleep(&pause, nullptr);
        nap = std::min<int64_t>(nap * 2, 1000 * 1000);
      }
    }
  }
}

// ---- use

Status Ibrc::check_use(int peer, int channel) const noexcept {
  EPCOMM_RETURN_IF_ERROR(guard_.check());
  if (!connected_) return error(Code::kInvalidArgument, -1, "the backend is not connected");
  if (peer < 0 || peer >= num_ranks_) {
    return error(Code::kInvalidArgument, -1, "peer=%d: expected 0 to %d", peer, num_ranks_ - 1);
  }
  if (channel < 0 || size_t(channel) >= channels_.size()) {
    return error(Code::kInvalidArgument, -1, "channel=%d: expected 0 to %zu", channel,
                 channels_.size() - 1);
  }
  return {};
}

Status Ibrc::check_word(uint64_t word) const noexcept {
  if (word % 8 == 0 && own_.heap_bytes() >= 8 && word <= own_.heap_bytes() - 8) return {};
  return error(Code::kInvalidArgument, -1,
               "word=%" PRIu64 ": expected a multiple of 8 inside the heap of %" PRIu64 " bytes",
               word, own_.heap_bytes());
}

Status Ibrc::check_range(uint64_t dst, uint64_t src, uint64_t bytes) const noexcept {
  const uint64_t size = own_.heap_bytes();
  if (bytes <= size && dst <= size - bytes && src <= size - bytes) return {};
  return error(Code::kInvalidArgument, -1,
               "put of %" PRIu64 " bytes from offset %" PRIu64 " to %" PRIu64
               " leaves the heap of %" PRIu64 " bytes",
               bytes, src, dst, size);
}

std::byte* Ibrc::peer_ptr(int peer, uint64_t offset) noexcept {
  if (!check_use(peer, 0).ok() || peer != rank_ || offset > own_.heap_bytes()) return nullptr;
  return own_.heap() + offset;
}

// One command into the ring, once it has room. What a lost peer does not get is no error here:
// waits and quiet() say who is lost and why.
Status Ibrc::send(Channel& channel, const Command& command) noexcept {
  if (!channel.has_room()) {
    const WaitSpec spec{"put", "command queue", timeout_s_};
    EPCOMM_RETURN_IF_ERROR(
        room_waiter_.wait(command.peer, channel.taken_word(), channel.room_at(), spec));
  }
#if defined(__x86_64__)
  __builtin_ia32_sfence();  // rows may have been written by streaming stores, which nothing orders
#endif
  channel.write(command);
  proxies_[size_t(thread_of(channel.number()))]->wake();
  return {};
}

Status Ibrc::move(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes,
                  uint32_t last_op, uint64_t word, uint64_t add) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, channel));
  EPCOMM_RETURN_IF_ERROR(check_range(dst, src, bytes));
  if (last_op & kCommandSignal) EPCOMM_RETURN_IF_ERROR(check_word(word));
  if (peer == rank_) {
    std::memmove(own_.heap() + dst, own_.heap() + src, bytes);
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

void Ibrc::add_own(uint64_t word, uint64_t add) noexcept {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
  reinterpret_cast<std::atomic<uint64_t>*>(own_.heap() + word)
      ->fetch_add(add, std::memory_order_seq_cst);
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
  Status status = room_waiter_.wait(peer, ring.done_word(), ring.last_to(peer), spec);
  if (status.code == Code::kPeerLost && status.peer == peer &&
      peer_state(peer) == PeerState::kLeft) {
    return {};  // it takes nothing any more, and said so
  }
  // The commands of a lost peer are done too, but not carried out.
  if (status.ok() && peer_state(peer) == PeerState::kDead) {
    return common::guarded([&] {
      return error(Code::kPeerLost, peer, "%s (%s): rank %d is lost: %s", spec.operation,
                   spec.phase, peer, liveness_.why_lost(peer).c_str());
    });
  }
  return status;
}

Status Ibrc::wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, 0));
  EPCOMM_RETURN_IF_ERROR(check_word(word));
  std::atomic<int>& waiting = waiting_[size_t(peer)];
  waiting.fetch_add(1, std::memory_order_relaxed);
  Status status = waiter_.wait(peer, own_.heap() + word, value, spec);
  waiting.fetch_sub(1, std::memory_order_relaxed);
  return status;
}

PeerState Ibrc::peer_state(int peer) noexcept {
  return check_use(peer, 0).ok() ? waiter_.peer_state(peer) : PeerState::kDead;
}

void Ibrc::abort(const Status& why) noexcept {
  waiter_.abort(why);
  room_waiter_.abort(why);
}

// ---- what proxies find out

void Ibrc::peer_lost(int peer, const std::string& why) noexcept {
  // The queue pairs of a peer that left or gave up end with it: that is no news.
  if (waiter_.peer_state(peer) != PeerState::kAlive) return;
  liveness_.note_lost(peer, why);
  common::guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!first_error_.ok()) return Status{};
    first_error_ =
        error(Code::kPeerLost, peer, "rank %d is lost: %s", peer, liveness_.why_lost(peer).c_str());
    return Status{};
  });
  room_.ring_always();
}

void Ibrc::bad_command(const Status& why) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (first_error_.ok()) first_error_ = why;
  }
  abort(why);
}

Status Ibrc::async_error() noexcept {
  return common::guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return first_error_;
  });
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

Status open_provider(const std::string& name, const softhca::SoftHcaOptions& soft,
                     std::shared_ptr<common::VerbsProvider>* out) noexcept {
  if (name == "verbs") return common::open_libibverbs(out);
  if (name == "soft") return softhca::make_softhca(soft, out);
  return error(Code::kInvalidArgument, -1, "provider=%s: expected verbs or soft", name.c_str());
}

Status probe(const std::string& provider) noexcept {
  return common::guarded([&]() -> Status {
    if (provider == "soft") return {};  // needs nothing
    std::shared_ptr<common::VerbsProvider> opened;
    std::vector<std::string> names;
    Status status = open_provider(provider, {}, &opened);
    if (status.ok()) status = opened->device_names(&names);
    if (status.ok() && names.empty()) status = error(Code::kUnavailable, -1, "no RDMA device");
    if (!status.ok()) {
      status.code = Code::kUnavailable;
      status.text = "ibrc: " + status.text;
    }
    return status;
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
