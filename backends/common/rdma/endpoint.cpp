#include "common/rdma/endpoint.hpp"

#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "common/clock.hpp"
#include "common/cpu.hpp"
#include "common/errors.hpp"

namespace epcomm::common {
namespace {

constexpr int kInfoVersion = 1;
constexpr double kDrainSeconds = 5;  // close(): what this rank sent last

}  // namespace

RdmaEndpoint::~RdmaEndpoint() {
  if (guard_.inherited()) own_.forget();
}

// ---- the life

Status RdmaEndpoint::alloc_heap(uint64_t size_bytes) noexcept {
  return guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (heap_ || closed_) {
      return error(Code::kInvalidArgument, -1, "alloc_heap: the heap is made once per backend");
    }
    Segment segment;
    EPCOMM_RETURN_IF_ERROR(Segment::create(size_bytes, options_.folder, &segment));
    EPCOMM_RETURN_IF_ERROR(open_heap(&segment));
    own_ = std::move(segment);
    heap_ = &own_;
    return {};
  });
}

Status RdmaEndpoint::adopt_heap(Segment* segment) noexcept {
  return guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (heap_ || closed_ || !segment || !segment->heap()) {
      return error(Code::kInvalidArgument, -1, "adopt_heap: one heap, once per backend");
    }
    EPCOMM_RETURN_IF_ERROR(open_heap(segment));
    heap_ = segment;
    return {};
  });
}

Status RdmaEndpoint::open_heap(Segment* segment) {
  if (!options_.rdma.provider || options_.rdma.paths.empty()) {
    return error(Code::kInvalidArgument, -1, "%s: no path (NIC, port) was given", options_.name);
  }
  EPCOMM_RETURN_IF_ERROR(rdma_.open(options_.rdma));
  Status status = rdma_.register_heap(segment->heap(), segment->heap_bytes());
  if (!status.ok()) rdma_.close();
  return status;
}

Status RdmaEndpoint::export_info(std::string* out) noexcept {
  return guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (!heap_ || exported_ || closed_) {
      return error(Code::kInvalidArgument, -1, "export_info: once, between alloc_heap and connect");
    }
    EPCOMM_RETURN_IF_ERROR(exchange_.listen());
    Info info;
    exchange_.describe(&info);
    EPCOMM_RETURN_IF_ERROR(rdma_.describe(&info));
    info.set("provider", std::string(rdma_.provider()->name()));
    info.set("pid", uint64_t(getpid()));
    info.set("heap", heap_->heap_bytes());
    info.set("nonce", heap_->tail()->nonce);
    info.set("sealed", uint64_t(heap_->sealed()));
    exported_ = true;
    return info.encode(options_.name, kInfoVersion, out);
  });
}

Status RdmaEndpoint::connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                             double timeout_s, int (*interrupted)(void*),
                             void* interrupted_arg) noexcept {
  const Status status = guarded([&]() -> Status {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    return join(rank, infos, state_word, timeout_s, interrupted, interrupted_arg);
  });
  if (!status.ok() && !guard_.inherited()) take_down();
  return status;
}

Status RdmaEndpoint::join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
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
  if (state_word % 8 != 0 || state_bytes > heap_->heap_bytes() ||
      state_word > heap_->heap_bytes() - state_bytes) {
    return error(Code::kInvalidArgument, -1,
                 "state_word=%" PRIu64 ": expected a multiple of 8, %" PRIu64
                 " bytes before the heap's end at %" PRIu64,
                 state_word, state_bytes, heap_->heap_bytes());
  }
  rank_ = rank;
  timeout_s_ = timeout_s;
  far_.resize(infos.size());
  for (int peer = 0; peer < num_ranks_; ++peer) {
    far_[size_t(peer)] = peer != rank && infos[size_t(peer)] != kElsewhere;
  }
  std::vector<Info> read;
  std::vector<PeerAddress> addresses;
  EPCOMM_RETURN_IF_ERROR(read_infos(infos, &read, &addresses));
  std::vector<Process> processes;
  std::vector<std::byte*> mapped;
  EPCOMM_RETURN_IF_ERROR(
      meet(read, addresses, timeout_s, interrupted, interrupted_arg, &processes, &mapped));
  EPCOMM_RETURN_IF_ERROR(rdma_.connect(rank, read, far_, mapped, timeout_s));

  int local_ranks = 1;
  for (int peer = 0; peer < num_ranks_; ++peer) {  // those that another backend reaches are near
    local_ranks += processes[size_t(peer)].pid != 0 || (peer != rank && !far_[size_t(peer)]);
  }
  Waiter::Setup setup;
  setup.rank = rank;
  setup.num_ranks = num_ranks_;
  setup.state_words = heap_->heap() + state_word;
  setup.liveness = &liveness_;
  setup.policy = wait_policy(local_ranks * options_.threads_per_rank, options_.spin_us);
  if (options_.callers_look) {
    setup.look = [](void* arg) { static_cast<RdmaEndpoint*>(arg)->look(); };
    setup.look_arg = this;
  }
  waiter_.setup(setup);
  if (!options_.callers_look) setup.bell = &room_;
  room_waiter_.setup(setup);
  waiting_ = std::make_unique<std::atomic<int>[]>(infos.size());
  dropped_ = std::make_unique<std::atomic<bool>[]>(infos.size());
  for (int peer = 0; peer < num_ranks_; ++peer) {
    waiting_[size_t(peer)] = 0;
    dropped_[size_t(peer)] = false;
  }
  EPCOMM_RETURN_IF_ERROR(liveness_.start(
      std::move(processes), [](void* arg) { static_cast<Bell*>(arg)->ring_always(); }, &room_));
  EPCOMM_RETURN_IF_ERROR(start(local_ranks));
  connected_ = true;
  return {};
}

Status RdmaEndpoint::read_infos(const std::vector<std::string>& encoded, std::vector<Info>* infos,
                                std::vector<PeerAddress>* addresses) {
  infos->resize(encoded.size());
  addresses->resize(encoded.size());
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const size_t at = size_t(peer);
    if (peer != rank_ && !far_[at]) continue;
    uint64_t heap_bytes;
    std::string provider;
    EPCOMM_RETURN_IF_ERROR(
        Info::decode(encoded[at], peer, options_.name, kInfoVersion, &(*infos)[at]));
    EPCOMM_RETURN_IF_ERROR(FdExchange::parse((*infos)[at], peer, &(*addresses)[at]));
    EPCOMM_RETURN_IF_ERROR((*infos)[at].get(peer, "heap", &heap_bytes));
    EPCOMM_RETURN_IF_ERROR((*infos)[at].get(peer, "provider", &provider));
    if (heap_bytes != heap_->heap_bytes()) {
      return error(Code::kInvalidArgument, peer,
                   "heaps differ: rank %d has %" PRIu64 " bytes, rank %d has %" PRIu64
                   "; all ranks must use equal sizes",
                   rank_, heap_->heap_bytes(), peer, heap_bytes);
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
Status RdmaEndpoint::meet(const std::vector<Info>& infos, const std::vector<PeerAddress>& addresses,
                          double timeout_s, int (*interrupted)(void*), void* interrupted_arg,
                          std::vector<Process>* processes, std::vector<std::byte*>* mapped) {
  const bool map = rdma_.provider()->needs_mapping();
  std::vector<PeerAddress> wanted = addresses;
  const PeerAddress& own = addresses[size_t(rank_)];
  for (int peer = 0; peer < num_ranks_; ++peer) {
    PeerAddress& address = wanted[size_t(peer)];
    const bool here = address.host == own.host && address.user == own.user &&
                      address.network_namespace == own.network_namespace;
    address.wanted = far_[size_t(peer)] && (here || map);
  }
  FdExchange::Request request;
  request.rank = rank_;
  request.addresses = &wanted;
  if (map) request.fds = {heap_->fd()};
  request.timeout_s = timeout_s;
  request.use_pidfd = options_.use_pidfd;
  request.interrupted = interrupted;
  request.interrupted_arg = interrupted_arg;
  std::vector<FdExchange::Peer> met;
  EPCOMM_RETURN_IF_ERROR(exchange_.run(request, &met));

  *processes = std::vector<Process>(infos.size());
  peers_ = std::vector<Segment>(infos.size());
  if (map) mapped->resize(infos.size());
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const size_t at = size_t(peer);
    if (!wanted[at].wanted) continue;
    (*processes)[at] = std::move(met[at].process);
    if (!map) continue;
    Key nonce;
    uint64_t sealed;
    EPCOMM_RETURN_IF_ERROR(infos[at].get(peer, "nonce", &nonce));
    EPCOMM_RETURN_IF_ERROR(infos[at].get(peer, "sealed", &sealed));
    if (met[at].fds.empty()) return error(Code::kUnavailable, peer, "it gave no descriptor");
    EPCOMM_RETURN_IF_ERROR(Segment::attach(peer, std::move(met[at].fds[0]), heap_->heap_bytes(),
                                           nonce, sealed != 0, &peers_[at]));
    (*mapped)[at] = peers_[at].heap();
  }
  if (map) (*mapped)[size_t(rank_)] = heap_->heap();
  own_.close_fd();
  return {};
}

void RdmaEndpoint::take_down() noexcept {
  stop();
  rdma_.close();  // before the peers' heaps go: a provider without a wire writes them
  exchange_.close();
  liveness_.stop();
  peers_.clear();
  own_.close_fd();
}

Status RdmaEndpoint::close() noexcept {
  if (closed_) return {};
  closed_ = true;
  const bool was_connected = connected_;
  connected_ = false;
  if (guard_.inherited()) {
    // The parent's threads, events, mappings and queue pairs are not ours to end.
    forget();
    rdma_.forget();
    liveness_.forget();
    for (Segment& peer : peers_) peer.forget();
    return {};
  }
  abort(error(Code::kPeerLost, rank_, "this rank closed its communicator"));
  if (was_connected) {
    const int64_t deadline = now_ns() + seconds_to_ns(std::min(timeout_s_, kDrainSeconds));
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (far_[size_t(peer)]) drain(peer, deadline);
    }
  }
  take_down();
  return {};
}

// ---- use

Status RdmaEndpoint::check_use(int peer, int channel) const noexcept {
  EPCOMM_RETURN_IF_ERROR(guard_.check());
  if (!connected_) return error(Code::kInvalidArgument, -1, "the backend is not connected");
  if (peer < 0 || peer >= num_ranks_) {
    return error(Code::kInvalidArgument, -1, "peer=%d: expected 0 to %d", peer, num_ranks_ - 1);
  }
  if (channel < 0 || channel >= num_channels()) {
    return error(Code::kInvalidArgument, -1, "channel=%d: expected 0 to %d", channel,
                 num_channels() - 1);
  }
  if (peer != rank_ && !far_[size_t(peer)]) {
    return error(Code::kInvalidArgument, peer, "peer=%d: another backend reaches it", peer);
  }
  return {};
}

Status RdmaEndpoint::check_word(uint64_t word) const noexcept {
  const uint64_t size = heap_->heap_bytes();
  if (word % 8 == 0 && size >= 8 && word <= size - 8) return {};
  return error(Code::kInvalidArgument, -1,
               "word=%" PRIu64 ": expected a multiple of 8 inside the heap of %" PRIu64 " bytes",
               word, size);
}

Status RdmaEndpoint::check_range(uint64_t dst, uint64_t src, uint64_t bytes) const noexcept {
  const uint64_t size = heap_->heap_bytes();
  if (bytes <= size && dst <= size - bytes && src <= size - bytes) return {};
  return error(Code::kInvalidArgument, -1,
               "put of %" PRIu64 " bytes from offset %" PRIu64 " to %" PRIu64
               " leaves the heap of %" PRIu64 " bytes",
               bytes, src, dst, size);
}

std::byte* RdmaEndpoint::peer_ptr(int peer, uint64_t offset) noexcept {
  if (peer != rank_ || !check_use(peer, 0).ok() || offset > heap_->heap_bytes()) return nullptr;
  return heap_->heap() + offset;
}

void RdmaEndpoint::add_own(uint64_t word, uint64_t add) noexcept {
  order_streaming_stores();
  reinterpret_cast<std::atomic<uint64_t>*>(heap_->heap() + word)
      ->fetch_add(add, std::memory_order_seq_cst);
}

Status RdmaEndpoint::wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer, 0));
  EPCOMM_RETURN_IF_ERROR(check_word(word));
  std::atomic<int>& waiting = waiting_[size_t(peer)];
  waiting.fetch_add(1, std::memory_order_relaxed);
  Status status = waiter_.wait(peer, heap_->heap() + word, value, spec);
  waiting.fetch_sub(1, std::memory_order_relaxed);
  return status;
}

Status RdmaEndpoint::quiet_status(int peer, const Status& status, const WaitSpec& spec) noexcept {
  if (status.code == Code::kPeerLost && status.peer == peer &&
      peer_state(peer) == PeerState::kLeft) {
    return {};  // it takes nothing any more, and said so
  }
  // What was sent to a lost peer is done too, but not carried out.
  if (status.ok() && peer_state(peer) == PeerState::kDead) {
    return guarded([&] {
      char lost[512];
      waiter_.write_lost(peer, lost, sizeof lost);
      return error(Code::kPeerLost, peer, "%s (%s): %s", spec.operation, spec.phase, lost);
    });
  }
  // One that gave up may have taken all of it before.
  if (status.ok() && dropped_[size_t(peer)].load() && peer_state(peer) != PeerState::kLeft) {
    return waiter_.gave_up(peer, spec);
  }
  return status;
}

PeerState RdmaEndpoint::peer_state(int peer) noexcept {
  return check_use(peer, 0).ok() ? waiter_.peer_state(peer) : PeerState::kDead;
}

void RdmaEndpoint::abort(const Status& why) noexcept {
  waiter_.abort(why);
  room_waiter_.abort(why);
}

// ---- what whoever posts finds out

void RdmaEndpoint::note_lost(int peer, const std::string& why) noexcept {
  // The queue pairs of a peer that left or gave up end with it: that is no news. Of another one it
  // will be known that it is dead.
  if (waiter_.peer_state(peer) != PeerState::kAlive) {
    dropped_[size_t(peer)] = true;
    return;
  }
  guarded([&] {
    // An answer that does not come may be this end's fault.
    const std::string own = rdma_.ports_down();
    const std::string text = own.empty() ? why : why + "; at this end " + own;
    // Held over both, so that whoever has seen the loss finds the error.
    const std::lock_guard<std::mutex> lock(mutex_);
    liveness_.note_lost(peer, text);
    if (!first_error_.ok()) return Status{};
    first_error_ =
        error(Code::kPeerLost, peer, "rank %d is lost: %s", peer, liveness_.why_lost(peer).c_str());
    return Status{};
  });
  room_.ring_always();
}

void RdmaEndpoint::note_broken(const Status& why) noexcept {
  guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (first_error_.ok()) first_error_ = why;
    return Status{};
  });
  abort(why);
}

Status RdmaEndpoint::async_error() noexcept {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return first_error_;
  });
}

Status probe_devices(const char* backend, VerbsProvider* provider) noexcept {
  return guarded([&]() -> Status {
    std::vector<std::string> names;
    Status status = provider->device_names(&names);
    if (status.ok() && names.empty()) {
      status =
          error(Code::kUnavailable, -1,
                "no RDMA device; without a NIC, EPCOMM_IB_PROVIDER=soft runs this backend over "
                "a software model of one");
    }
    if (!status.ok()) {
      status.code = Code::kUnavailable;
      status.text = std::string(backend) + ": " + status.text;
    }
    return status;
  });
}

}  // namespace epcomm::common
