#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <mutex>
#include <utility>

#include "common/clock.hpp"
#include "common/errors.hpp"
#include "common/fd_exchange.hpp"
#include "common/fork_guard.hpp"
#include "common/liveness.hpp"
#include "epcomm/base.h"
#include "epcomm/device/nvlink.h"
#include "nvlink/factory.hpp"
#include "nvlink/gpu.hpp"
#include "nvlink/host_words.hpp"
#include "nvlink/memory.hpp"
#include "nvlink/reach.hpp"

namespace epcomm::nvlink {
namespace {

class Nvlink final : public NvlinkBackend {
 public:
  explicit Nvlink(const Options& options) : options_(options) {}
  ~Nvlink() override;

  // Backend
  const char* name() const noexcept override { return kName; }
  uint32_t caps() const noexcept override {
    return kCapDevicePut | kCapPeerLoadStore | kCapIntraNode | kCapDeviceMemory;
  }
  Status alloc_heap(uint64_t size_bytes) noexcept override;
  Status export_info(std::string* out) noexcept override;
  Status connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                 double timeout_s, int (*interrupted)(void*),
                 void* interrupted_arg) noexcept override;
  Status device_ctx(void* out, size_t bytes) noexcept override;
  Status announce(PeerState state) noexcept override;
  PeerState peer_state(int peer) noexcept override;
  void abort(const Status& why) noexcept override;
  Status async_error() noexcept override;
  Status close() noexcept override;

  // NvlinkBackend
  int device() const noexcept override { return options_.device; }
  Share share() const noexcept override { return own_ ? own_.ticket().share : Share::kAuto; }
  uint64_t heap() const noexcept override { return own_.heap(); }
  uint64_t peer_heap(int peer) const noexcept override;
  std::vector<int> same_gpu() const override { return same_gpu_; }
  bool mps() const noexcept override { return mps_; }

 private:
  Status join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
              double timeout_s, int (*interrupted)(void*), void* interrupted_arg);
  Status meet(double timeout_s, int (*interrupted)(void*), void* interrupted_arg,
              std::vector<common::Process>* processes);
  Status fill_context(uint64_t state_word, double timeout_s);
  Status check_use() const noexcept;
  Status read_states(std::vector<PeerState>* out) const;
  void note_deaths() noexcept;
  int num_ranks() const noexcept { return int(facts_.size()); }

  const Options options_;
  common::ForkGuard guard_;
  Gpu gpu_;
  HostWords words_;
  Memory own_;
  std::vector<Memory> peers_;  // by rank; the own entry is empty
  std::vector<PeerFacts> facts_;
  std::vector<int> same_gpu_;
  bool mps_ = false;
  common::FdExchange exchange_;
  common::Liveness liveness_;
  device::NvlinkCtx ctx_{};
  int rank_ = -1;
  bool exported_ = false;
  bool tried_ = false;
  bool connected_ = false;
  bool closed_ = false;
  std::mutex mutex_;  // of abort_why_
  bool aborted_ = false;
  Status abort_why_;
};

Nvlink::~Nvlink() {
  close();
  if (!guard_.inherited()) return;
  own_.forget();
  words_.forget();
  gpu_.forget();
}

Status Nvlink::alloc_heap(uint64_t size_bytes) noexcept {
  return common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (own_ || closed_) {
      return error(Code::kInvalidArgument, -1, "alloc_heap: the heap is made once per backend");
    }
    EPCOMM_RETURN_IF_ERROR(gpu_.open(options_.device));
    if (!gpu_.context()) EPCOMM_RETURN_IF_ERROR(gpu_.retain());
    return Memory::create(gpu_, size_bytes, options_.share, &own_);
  });
}

Status Nvlink::export_info(std::string* out) noexcept {
  return common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    if (!own_ || exported_ || closed_) {
      return error(Code::kInvalidArgument, -1, "export_info: once, between alloc_heap and connect");
    }
    PeerFacts own;
    own.uuid = gpu_.uuid();
    own.mps = mps_ = gpu_.has(common::kCuMps);
    own.ticket = own_.ticket();
    EPCOMM_RETURN_IF_ERROR(blocked_peers(gpu_, &own.blocked));
    EPCOMM_RETURN_IF_ERROR(exchange_.listen());
    exported_ = true;
    return encode_facts(own, exchange_, out);
  });
}

Status Nvlink::connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
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

Status Nvlink::join(int rank, const std::vector<std::string>& infos, uint64_t state_word,
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
  if (num_ranks > Memory::kMaxRanks) {
    return error(Code::kUnsupported, -1, "%d ranks on one host; allowed: up to %d", num_ranks,
                 Memory::kMaxRanks);
  }
  const uint64_t heap_bytes = own_.ticket().heap_bytes;
  const uint64_t state_bytes = uint64_t(num_ranks) * kSignalStride;
  if (state_word % 8 != 0 || state_bytes > heap_bytes || state_word > heap_bytes - state_bytes) {
    return error(Code::kInvalidArgument, -1,
                 "state_word=%" PRIu64 ": expected a multiple of 8, %" PRIu64
                 " bytes before the heap's end at %" PRIu64,
                 state_word, state_bytes, heap_bytes);
  }
  rank_ = rank;
  facts_.resize(infos.size());
  for (int peer = 0; peer < num_ranks; ++peer) {
    EPCOMM_RETURN_IF_ERROR(decode_facts(infos[size_t(peer)], peer, &facts_[size_t(peer)]));
    if (peer == rank || facts_[size_t(peer)].uuid != gpu_.uuid()) continue;
    same_gpu_.push_back(peer);
    mps_ = mps_ && facts_[size_t(peer)].mps;  // one that is outside takes turns with all others
  }
  EPCOMM_RETURN_IF_ERROR(check_facts(facts_));

  std::vector<common::Process> processes;
  EPCOMM_RETURN_IF_ERROR(meet(timeout_s, interrupted, interrupted_arg, &processes));
  EPCOMM_RETURN_IF_ERROR(fill_context(state_word, timeout_s));
  EPCOMM_RETURN_IF_ERROR(liveness_.start(
      std::move(processes), [](void* self) { static_cast<Nvlink*>(self)->note_deaths(); }, this));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) words_.abort();
  connected_ = true;
  return {};
}

// Takes the peers' heaps; `processes` are theirs.
Status Nvlink::meet(double timeout_s, int (*interrupted)(void*), void* interrupted_arg,
                    std::vector<common::Process>* processes) {
  std::vector<common::PeerAddress> addresses(facts_.size());
  for (size_t at = 0; at < facts_.size(); ++at) {
    if (int(at) != rank_) addresses[at] = facts_[at].address;
  }
  common::FdExchange::Request request;
  request.rank = rank_;
  request.addresses = &addresses;
  if (own_.fd() >= 0) request.fds = {own_.fd()};
  request.timeout_s = timeout_s;
  request.use_pidfd = options_.use_pidfd;
  request.interrupted = interrupted;
  request.interrupted_arg = interrupted_arg;
  std::vector<common::FdExchange::Peer> met;
  EPCOMM_RETURN_IF_ERROR(exchange_.run(request, &met));

  peers_ = std::vector<Memory>(facts_.size());
  *processes = std::vector<common::Process>(facts_.size());
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_) continue;
    const size_t at = size_t(peer);
    const bool local = met[at].process.pid == getpid();
    if (local && own_.ticket().share == Share::kIpc && facts_[at].uuid != gpu_.uuid()) {
      return error(Code::kUnavailable, peer,
                   "ranks %d and %d are one process with two GPUs, which CUDA IPC does not join",
                   rank_, peer);
    }
    const common::UniqueFd none;
    const common::UniqueFd& fd = met[at].fds.empty() ? none : met[at].fds[0];
    EPCOMM_RETURN_IF_ERROR(Memory::attach(gpu_, peer, facts_[at].ticket, fd, local, &peers_[at]));
    (*processes)[at] = std::move(met[at].process);
  }
  own_.close_fd();
  return {};
}

Status Nvlink::fill_context(uint64_t state_word, double timeout_s) {
  bool atomics;
  EPCOMM_RETURN_IF_ERROR(all_atomics(gpu_, facts_, &atomics));
  std::vector<uint64_t> table;
  for (int peer = 0; peer < num_ranks(); ++peer) table.push_back(peer_heap(peer));
  EPCOMM_RETURN_IF_ERROR(gpu_.write(own_.table(), table.data(), table.size() * sizeof(uint64_t)));
  EPCOMM_RETURN_IF_ERROR(words_.create(gpu_, num_ranks()));
  ctx_.heap = own_.heap();
  ctx_.heap_bytes = own_.ticket().heap_bytes;
  ctx_.peers = own_.table();
  ctx_.host_words = words_.device_address();
  ctx_.state_word = state_word;
  ctx_.timeout_ns = uint64_t(common::seconds_to_ns(timeout_s));
  ctx_.rank = rank_;
  ctx_.num_ranks = num_ranks();
  ctx_.atomics = atomics ? 1 : 0;
  return {};
}

// The own heap stays until the destructor: arrays over it may still be alive, and they hold this
// object. The host words too: a wait that is told to end reads them.
Status Nvlink::close() noexcept {
  if (closed_) return {};
  closed_ = true;
  if (guard_.inherited()) {
    // The parent's thread and the driver's state are not ours to end.
    connected_ = false;
    liveness_.forget();
    for (Memory& peer : peers_) peer.forget();
    return {};
  }
  abort(error(Code::kPeerLost, rank_, "this rank closed its communicator"));
  connected_ = false;
  exchange_.close();
  liveness_.stop();
  peers_.clear();
  own_.close_fd();
  return {};
}

Status Nvlink::check_use() const noexcept {
  EPCOMM_RETURN_IF_ERROR(guard_.check());
  if (!connected_) return error(Code::kInvalidArgument, -1, "the backend is not connected");
  return {};
}

Status Nvlink::device_ctx(void* out, size_t bytes) noexcept {
  EPCOMM_RETURN_IF_ERROR(check_use());
  if (bytes != sizeof ctx_) {
    return error(Code::kInternal, -1, "device_ctx: %zu bytes asked, a NvlinkCtx has %zu", bytes,
                 sizeof ctx_);
  }
  std::memcpy(out, &ctx_, sizeof ctx_);
  return {};
}

uint64_t Nvlink::peer_heap(int peer) const noexcept {
  if (rank_ >= 0 && peer == rank_) return own_.heap();
  if (peer < 0 || size_t(peer) >= peers_.size()) return 0;
  return peers_[size_t(peer)].heap();
}

Status Nvlink::announce(PeerState state) noexcept {
  return common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(check_use());
    const uint64_t value = uint64_t(state);
    const uint64_t word = ctx_.state_word + uint64_t(rank_) * kSignalStride;
    Status first;  // a peer that cannot be told keeps the others from nothing
    for (int peer = 0; peer < num_ranks(); ++peer) {
      Status told = gpu_.write(peer_heap(peer) + word, &value, sizeof value);
      if (first.ok() && !told.ok()) first = std::move(told);
    }
    return first;
  });
}

Status Nvlink::read_states(std::vector<PeerState>* out) const {
  std::vector<unsigned char> words(facts_.size() * kSignalStride);
  EPCOMM_RETURN_IF_ERROR(gpu_.read(words.data(), own_.heap() + ctx_.state_word, words.size()));
  for (int peer = 0; peer < num_ranks(); ++peer) {
    uint64_t said;
    std::memcpy(&said, &words[size_t(peer) * kSignalStride], sizeof said);
    PeerState state = PeerState(std::min(said, uint64_t(PeerState::kDead)));
    // The end of a process that had left is no loss.
    if (liveness_.died_ns(peer) != 0 && state != PeerState::kLeft) state = PeerState::kDead;
    out->push_back(state);
  }
  return {};
}

PeerState Nvlink::peer_state(int peer) noexcept {
  PeerState state = PeerState::kDead;
  common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(check_use());
    std::vector<PeerState> states;
    EPCOMM_RETURN_IF_ERROR(read_states(&states));
    if (peer >= 0 && peer < num_ranks()) state = states[size_t(peer)];
    return Status{};
  });
  return state;
}

// In the watching thread.
void Nvlink::note_deaths() noexcept {
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (liveness_.died_ns(peer) != 0) words_.note_death(peer);
  }
}

void Nvlink::abort(const Status& why) noexcept {
  if (guard_.inherited()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return;  // the first reason stays
  aborted_ = true;
  abort_why_ = why;
  if (why.ok()) abort_why_ = error(Code::kPeerLost, -1, "aborted");
  words_.abort();
}

Status Nvlink::async_error() noexcept {
  return common::guarded([&] {
    EPCOMM_RETURN_IF_ERROR(guard_.check());
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (aborted_) return abort_why_;
    }
    if (!connected_ || !liveness_.any_dead()) return Status{};
    std::vector<PeerState> states;
    EPCOMM_RETURN_IF_ERROR(read_states(&states));
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (states[size_t(peer)] != PeerState::kDead) continue;
      return error(Code::kPeerLost, peer, "rank %d is lost: its process (pid %d) ended", peer,
                   int(liveness_.pid(peer)));
    }
    return Status{};
  });
}

}  // namespace

Status probe() noexcept {
  return common::guarded([] {
    Status status = any_gpu();
    if (!status.ok()) {
      status.code = Code::kUnavailable;
      status.text = "nvlink: " + status.text;
    }
    return status;
  });
}

std::unique_ptr<NvlinkBackend> create(const Options& options) noexcept {
  try {
    return std::make_unique<Nvlink>(options);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace epcomm::nvlink
