#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "common/cpu.hpp"
#include "common/errors.hpp"
#include "common/fd_exchange.hpp"
#include "common/fork_guard.hpp"
#include "common/info.hpp"
#include "common/liveness.hpp"
#include "common/segment.hpp"
#include "common/waiter.hpp"
#include "shm/factory.hpp"

namespace epcomm::shm {
namespace {

using common::Segment;

constexpr char kName[] = "shm";
constexpr int kInfoVersion = 1;

class ShmBackend final : public common::PairMember, public HostTransport {
 public:
  explicit ShmBackend(const Options& options) : options_(options) {}
  ~ShmBackend() override;

  // Backend
  const char* name() const noexcept override { return kName; }
  uint32_t caps() const noexcept override {
    return kCapHostPut | kCapPeerLoadStore | kCapIntraNode | kCapHostMemory;
  }
  Status alloc_heap(uint64_t size_bytes) noexcept override;
  Status export_info(std::string* out) noexcept override;
  Status connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                 double timeout_s, int (*interrupted)(void*),
                 void* interrupted_arg) noexcept override;
  HostTransport* host_transport() noexcept override { return connected_ ? this : nullptr; }
  Status close() noexcept override;

  // PairMember
  Segment* segment() noexcept override { return own_.heap() ? &own_ : nullptr; }

  // HostTransport
  std::byte* heap() noexcept override { return own_.heap(); }
  uint64_t heap_bytes() const noexcept override { return own_.heap_bytes(); }
  std::byte* peer_ptr(int peer, uint64_t offset) noexcept override;
  Status put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept override;
  Status signal(int peer, int channel, uint64_t word, uint64_t add) noexcept override;
  Status quiet(int, int, const WaitSpec&) noexcept override { return {}; }
  Status wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept override;
  PeerState peer_state(int peer) noexcept override;
  void abort(const Status& why) noexcept override { waiter_.abort(why); }

 private:
  Status join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
              double timeout_s, int (*interrupted)(void*), void* interrupted_arg);
  Status check_use(int peer) const noexcept;
  Status check_word(uint64_t word) const noexcept;
  const Segment& segment(int peer) const noexcept {
    return peer == rank_ ? own_ : peers_[size_t(peer)];
  }

  const Options options_;
  common::ForkGuard guard_;
  Segment own_;
  std::vector<Segment> peers_;  // by rank; the own entry is empty
  common::FdExchange exchange_;
  common::Liveness liveness_;
  common::Waiter waiter_;
  int rank_ = -1;
  bool exported_ = false;
  bool tried_ = false;
  bool connected_ = false;
  bool closed_ = false;
};

ShmBackend::~ShmBackend() {
  close();
  if (guard_.inherited()) own_.forget();
}

Status ShmBackend::alloc_heap(uint64_t size_bytes) noexcept {
  return common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (own_.heap() || closed_) {
      return error(Code::kInvalidArgument, -1, "alloc_heap: the heap is made once per backend");
    }
    return Segment::create(size_bytes, options_.folder, &own_);
  });
}

Status ShmBackend::export_info(std::string* out) noexcept {
  return common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (!own_.heap() || exported_ || closed_) {
      return error(Code::kInvalidArgument, -1, "export_info: once, between alloc_heap and connect");
    }
    EPCOMM_RETURN_IF_ERROR(exchange_.listen());
    common::Info info;
    exchange_.describe(&info);
    info.set("pid", uint64_t(getpid()));
    info.set("heap", own_.heap_bytes());
    info.set("nonce", own_.tail()->nonce);
    info.set("sealed", uint64_t(own_.sealed()));
    exported_ = true;
    return info.encode(kName, kInfoVersion, out);
  });
}

Status ShmBackend::connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                           double timeout_s, int (*interrupted)(void*),
                           void* interrupted_arg) noexcept {
  const Status status = common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    return join(rank, infos, state_word, timeout_s, interrupted, interrupted_arg);
  });
  if (!status.ok() && !guard_.inherited()) {
    exchange_.close();
    liveness_.stop();
    peers_.clear();
  }
  return status;
}

Status ShmBackend::join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                        double timeout_s, int (*interrupted)(void*), void* interrupted_arg) {
  const int num_ranks = int(infos.size());
  if (!exported_ || tried_ || closed_) {
    return error(Code::kInvalidArgument, -1, "connect: once, after export_info");
  }
  tried_ = true;
  if (rank < 0 || rank >= num_ranks) {
    return error(Code::kInvalidArgument, -1, "rank=%d: expected 0 to %d (%d infos)", rank,
                 num_ranks - 1, num_ranks);
  }
  const uint64_t state_bytes = uint64_t(num_ranks) * kSignalStride;
  if (state_word % 8 != 0 || state_bytes > own_.heap_bytes() ||
      state_word > own_.heap_bytes() - state_bytes) {
    return error(Code::kInvalidArgument, -1,
                 "state_word=%" PRIu64 ": expected a multiple of 8, %" PRIu64
                 " bytes before the heap's end at %" PRIu64,
                 state_word, state_bytes, own_.heap_bytes());
  }

  std::vector<common::PeerAddress> addresses(infos.size());
  std::vector<common::Key> nonces(infos.size());
  std::vector<uint64_t> sealed(infos.size());
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (peer == rank || infos[size_t(peer)] == common::kElsewhere) continue;
    const size_t at = size_t(peer);
    common::Info info;
    uint64_t heap_bytes;
    EPCOMM_RETURN_IF_ERROR(common::Info::decode(infos[at], peer, kName, kInfoVersion, &info));
    EPCOMM_RETURN_IF_ERROR(common::FdExchange::parse(info, peer, &addresses[at]));
    EPCOMM_RETURN_IF_ERROR(info.get(peer, "heap", &heap_bytes));
    EPCOMM_RETURN_IF_ERROR(info.get(peer, "nonce", &nonces[at]));
    EPCOMM_RETURN_IF_ERROR(info.get(peer, "sealed", &sealed[at]));
    if (heap_bytes != own_.heap_bytes()) {
      return error(Code::kInvalidArgument, peer,
                   "heaps differ: rank %d has %" PRIu64 " bytes, rank %d has %" PRIu64
                   "; all ranks must use equal sizes",
                   rank, own_.heap_bytes(), peer, heap_bytes);
    }
  }

  common::FdExchange::Request request;
  request.rank = rank;
  request.addresses = &addresses;
  request.fds = {own_.fd()};
  request.timeout_s = timeout_s;
  request.use_pidfd = options_.use_pidfd;
  request.interrupted = interrupted;
  request.interrupted_arg = interrupted_arg;
  std::vector<common::FdExchange::Peer> met;
  EPCOMM_RETURN_IF_ERROR(exchange_.run(request, &met));

  peers_ = std::vector<Segment>(infos.size());
  std::vector<common::Process> processes(infos.size());
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (peer == rank || infos[size_t(peer)] == common::kElsewhere) continue;
    const size_t at = size_t(peer);
    EPCOMM_RETURN_IF_ERROR(Segment::attach(peer, std::move(met[at].fds[0]), own_.heap_bytes(),
                                           nonces[at], sealed[at] != 0, &peers_[at]));
    processes[at] = std::move(met[at].process);
  }
  own_.close_fd();

  common::Bell& bell = own_.tail()->bell;
  common::Waiter::Setup setup;
  setup.rank = rank;
  setup.num_ranks = num_ranks;
  setup.state_words = own_.heap() + state_word;
  setup.liveness = &liveness_;
  setup.bell = &bell;
  setup.policy = common::wait_policy(num_ranks, options_.spin_us);
  waiter_.setup(setup);
  EPCOMM_RETURN_IF_ERROR(liveness_.start(
      std::move(processes), [](void* arg) { static_cast<common::Bell*>(arg)->ring_always(); },
      &bell));
  rank_ = rank;
  connected_ = true;
  return {};
}

// The own heap stays mapped until the destructor: arrays over it may still be alive, and they hold
// this object.
Status ShmBackend::close() noexcept {
  if (closed_) return {};
  closed_ = true;
  connected_ = false;
  if (guard_.inherited()) {
    // The parent's thread, event and mappings are not ours to end.
    liveness_.forget();
    for (Segment& peer : peers_) peer.forget();
    return {};
  }
  waiter_.abort(error(Code::kPeerLost, rank_, "this rank closed its communicator"));
  exchange_.close();
  liveness_.stop();
  peers_.clear();
  own_.close_fd();
  return {};
}

Status ShmBackend::check_use(int peer) const noexcept {
  EPCOMM_RETURN_IF_ERROR(guard_.check());
  if (!connected_) return error(Code::kInvalidArgument, -1, "the backend is not connected");
  if (peer < 0 || size_t(peer) >= peers_.size()) {
    return error(Code::kInvalidArgument, -1, "peer=%d: expected 0 to %zu", peer, peers_.size() - 1);
  }
  if (!segment(peer).heap()) {
    return error(Code::kInvalidArgument, peer, "rank %d is not reached by shared memory", peer);
  }
  return {};
}

Status ShmBackend::check_word(uint64_t word) const noexcept {
  if (word % 8 == 0 && own_.heap_bytes() >= 8 && word <= own_.heap_bytes() - 8) return {};
  return error(Code::kInvalidArgument, -1,
               "word=%" PRIu64 ": expected a multiple of 8 inside the heap of %" PRIu64 " bytes",
               word, own_.heap_bytes());
}

std::byte* ShmBackend::peer_ptr(int peer, uint64_t offset) noexcept {
  if (!check_use(peer).ok() || offset > own_.heap_bytes()) return nullptr;
  return segment(peer).heap() + offset;
}

Status ShmBackend::put(int peer, int, uint64_t dst, uint64_t src, uint64_t bytes) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer));
  const uint64_t size = own_.heap_bytes();
  if (bytes > size || dst > size - bytes || src > size - bytes) {
    return error(Code::kInvalidArgument, -1,
                 "put of %" PRIu64 " bytes from offset %" PRIu64 " to %" PRIu64
                 " leaves the heap of %" PRIu64 " bytes",
                 bytes, src, dst, size);
  }
  std::memmove(segment(peer).heap() + dst, own_.heap() + src, bytes);
  return {};
}

Status ShmBackend::signal(int peer, int, uint64_t word, uint64_t add) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer));
  EPCOMM_RETURN_IF_ERROR(check_word(word));
  const Segment& target = segment(peer);
  common::order_streaming_stores();
  reinterpret_cast<std::atomic<uint64_t>*>(target.heap() + word)
      ->fetch_add(add, std::memory_order_seq_cst);
  target.tail()->bell.ring();
  return {};
}

Status ShmBackend::wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use(peer));
  EPCOMM_RETURN_IF_ERROR(check_word(word));
  return waiter_.wait(peer, own_.heap() + word, value, spec);
}

PeerState ShmBackend::peer_state(int peer) noexcept {
  return check_use(peer).ok() ? waiter_.peer_state(peer) : PeerState::kDead;
}

}  // namespace

Status probe() noexcept {
  const common::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) {
    return error(Code::kUnavailable, -1, "shm: no Unix sockets here: %s",
                 common::errno_text(errno).c_str());
  }
  const common::UniqueFd memory(memfd_create("epcomm", MFD_CLOEXEC));
  if (!memory && access("/dev/shm", W_OK | X_OK) != 0) {
    return error(Code::kUnavailable, -1,
                 "shm: memfd_create is not to be had and /dev/shm is not writable: %s",
                 common::errno_text(errno).c_str());
  }
  return {};
}

std::unique_ptr<common::PairMember> create(const Options& options) noexcept {
  try {
    return std::make_unique<ShmBackend>(options);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace epcomm::shm
