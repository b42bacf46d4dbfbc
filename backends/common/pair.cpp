#include "common/pair.hpp"

#include <unistd.h>

#include <atomic>

#include "common/clock.hpp"
#include "common/errors.hpp"
#include "common/fd_exchange.hpp"
#include "common/hex.hpp"
#include "common/info.hpp"

namespace epcomm::common {
namespace {

constexpr int kInfoVersion = 1;
constexpr int64_t kLossGrace = 250 * 1000 * 1000;  // ns; as a member's own waits have

std::string hex(const std::string& bytes) { return bytes_to_hex(bytes.data(), bytes.size()); }

Status from_hex_text(int peer, const std::string& text, std::string* out) {
  out->resize(text.size() / 2);
  if (bytes_from_hex(text, out->data(), out->size())) return {};
  return error(Code::kUnavailable, peer, "rank %d's information is damaged", peer);
}

class PairBackend final : public Backend, public HostTransport {
 public:
  PairBackend(const std::string& name, PairMember* near, PairMember* far,
              const std::string& node_id)
      : name_(name), node_id_(node_id), near_(near), far_(far) {}
  ~PairBackend() override { close(); }

  // Backend
  const char* name() const noexcept override { return name_.c_str(); }
  uint32_t caps() const noexcept override {
    // Not kCapPeerLoadStore: that is a promise about every peer.
    return kCapHostPut | kCapIntraNode | kCapInterNode | kCapHostMemory |
           (far_->caps() & kCapNeedsProgress);
  }
  Status alloc_heap(uint64_t size_bytes) noexcept override {
    EPCOMM_RETURN_IF_ERROR(near_->alloc_heap(size_bytes));
    return far_->adopt_heap(near_->segment());
  }
  Status export_info(std::string* out) noexcept override;
  Status connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                 double timeout_s, int (*interrupted)(void*),
                 void* interrupted_arg) noexcept override;
  HostTransport* host_transport() noexcept override { return connected_ ? this : nullptr; }
  Status async_error() noexcept override { return far_->async_error(); }
  Status close() noexcept override {
    connected_ = false;
    Status status = far_->close();  // NICs let go of the heap before it can go
    Status near_status = near_->close();
    return status.ok() ? near_status : status;
  }

  // HostTransport
  std::byte* heap() noexcept override { return near_->segment()->heap(); }
  uint64_t heap_bytes() const noexcept override { return near_->segment()->heap_bytes(); }
  std::byte* peer_ptr(int peer, uint64_t offset) noexcept override {
    return is_near(peer) ? near().peer_ptr(peer, offset) : nullptr;
  }
  Status put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept override {
    return of(peer).put(peer, channel, dst, src, bytes);
  }
  Status signal(int peer, int channel, uint64_t word, uint64_t add) noexcept override {
    return of(peer).signal(peer, channel, word, add);
  }
  Status put_signal(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes,
                    uint64_t word, uint64_t add) noexcept override {
    return of(peer).put_signal(peer, channel, dst, src, bytes, word, add);
  }
  Status quiet(int peer, int channel, const WaitSpec& spec) noexcept override {
    Watch watch(this, peer, spec);
    return blamed(watch.told(of(peer).quiet(peer, channel, watch.spec())));
  }
  Status wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept override {
    Watch watch(this, peer, spec);
    Status status = watch.told(of(peer).wait(peer, word, value, watch.spec()));
    // What had arrived before still counts.
    if (watch.struck() && seen(word) >= value) return {};
    return blamed(std::move(status));
  }
  PeerState peer_state(int peer) noexcept override { return of(peer).peer_state(peer); }
  void abort(const Status& why) noexcept override {
    near().abort(why);
    far().abort(why);
  }

 private:
  // While one member waits for its peer, the other's may die, which only that one sees: such a
  // wait ends here, not when the far end has found out by itself.
  class Watch {
   public:
    Watch(PairBackend* pair, int peer, const WaitSpec& asked) noexcept
        : pair_(pair), peer_(peer), asked_(asked), start_ns_(now_ns()) {}
    WaitSpec spec() noexcept {
      WaitSpec spec = asked_;
      spec.interrupted = [](void* arg) { return static_cast<Watch*>(arg)->look(); };
      spec.interrupted_arg = this;
      return spec;
    }
    bool struck() const noexcept { return struck_; }
    Status told(Status status) noexcept {
      struck_ &= status.code == Code::kInterrupted;
      if (!struck_) return status;
      return error(Code::kPeerLost, lost_, "%s (%s): rank %d is lost; waited %.3f s for rank %d",
                   asked_.operation, asked_.phase, lost_, double(now_ns() - start_ns_) * 1e-9,
                   peer_);
    }

   private:
    int look() noexcept {
      if (asked_.interrupted && asked_.interrupted(asked_.interrupted_arg) != 0) return 1;
      if (lost_ < 0) {
        lost_ = pair_->dead_beside(peer_);
        seen_ns_ = now_ns();
      }
      struck_ = lost_ >= 0 && now_ns() - seen_ns_ >= kLossGrace;
      return struck_;
    }

    PairBackend* const pair_;
    const int peer_;
    const WaitSpec& asked_;
    const int64_t start_ns_;
    int lost_ = -1;
    int64_t seen_ns_ = 0;
    bool struck_ = false;
  };

  // A dead peer of the member that does not reach `peer`, -1: none.
  int dead_beside(int peer) noexcept {
    for (int other = 0; other < int(near_peers_.size()); ++other) {
      if (other == rank_ || is_near(other) == is_near(peer)) continue;
      if (of(other).peer_state(other) == PeerState::kDead) return other;
    }
    return -1;
  }
  uint64_t seen(uint64_t word) noexcept {
    return reinterpret_cast<const std::atomic<uint64_t>*>(heap() + word)->load();
  }

  bool is_near(int peer) const noexcept {
    return peer < 0 || size_t(peer) >= near_peers_.size() || near_peers_[size_t(peer)];
  }
  // Of connected members; they refuse calls once closed, so these stay.
  HostTransport& near() noexcept { return *near_transport_; }
  HostTransport& far() noexcept { return *far_transport_; }
  HostTransport& of(int peer) noexcept { return is_near(peer) ? near() : far(); }

  // A member knows its own peers only. Where one ends a wait because a peer gave up, the peer that
  // died and made it give up may be the other member's.
  Status blamed(Status status) noexcept {
    if (status.code != Code::kPeerLost || status.peer < 0) return status;
    if (of(status.peer).peer_state(status.peer) != PeerState::kBroken) return status;
    for (size_t peer = 0; peer < near_peers_.size(); ++peer) {
      if (int(peer) == rank_ || of(int(peer)).peer_state(int(peer)) != PeerState::kDead) continue;
      status.text += "; rank " + std::to_string(peer) + " is lost: its process ended";
      status.peer = int32_t(peer);
      break;
    }
    return status;
  }

  const std::string name_;
  const std::string node_id_;
  PairMember* const near_;
  PairMember* const far_;
  std::vector<bool> near_peers_;  // by rank; the own rank is near
  std::string near_info_, far_info_;
  HostTransport* near_transport_ = nullptr;
  HostTransport* far_transport_ = nullptr;
  int rank_ = -1;
  bool connected_ = false;
};

// What must be equal for a descriptor to be handed over, in one text.
std::string node_of(const Info& info, int peer, Status* status) {
  PeerAddress address;
  *status = FdExchange::parse(info, peer, &address);
  std::string node_id;
  if (status->ok()) *status = info.get(peer, "node_id", &node_id);
  return address.host + "/" + std::to_string(address.network_namespace) + "/" +
         std::to_string(address.user) + "/" + node_id;
}

Status PairBackend::export_info(std::string* out) noexcept {
  return guarded([&] {
    EPCOMM_RETURN_IF_ERROR(near_->export_info(&near_info_));
    EPCOMM_RETURN_IF_ERROR(far_->export_info(&far_info_));
    Info info;
    FdExchange().describe(&info);
    info.set("node_id", "=" + hex(node_id_));  // values are not empty
    info.set("near", hex(near_info_));
    info.set("far", hex(far_info_));
    return info.encode(name_.c_str(), kInfoVersion, out);
  });
}

Status PairBackend::connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                            double timeout_s, int (*interrupted)(void*),
                            void* interrupted_arg) noexcept {
  return guarded([&] {
    if (rank < 0 || size_t(rank) >= infos.size()) {
      return error(Code::kInvalidArgument, -1, "rank=%d: expected 0 to %zu", rank,
                   infos.size() - 1);
    }
    std::vector<std::string> near_infos(infos.size()), far_infos(infos.size());
    std::vector<std::string> nodes(infos.size());
    near_peers_.assign(infos.size(), false);
    for (size_t peer = 0; peer < infos.size(); ++peer) {
      Info info;
      EPCOMM_RETURN_IF_ERROR(
          Info::decode(infos[peer], int(peer), name_.c_str(), kInfoVersion, &info));
      Status status;
      nodes[peer] = node_of(info, int(peer), &status);
      EPCOMM_RETURN_IF_ERROR(status);
      std::string text;
      EPCOMM_RETURN_IF_ERROR(info.get(int(peer), "near", &text));
      EPCOMM_RETURN_IF_ERROR(from_hex_text(int(peer), text, &near_infos[peer]));
      EPCOMM_RETURN_IF_ERROR(info.get(int(peer), "far", &text));
      EPCOMM_RETURN_IF_ERROR(from_hex_text(int(peer), text, &far_infos[peer]));
    }
    for (size_t peer = 0; peer < infos.size(); ++peer) {
      near_peers_[peer] = nodes[peer] == nodes[size_t(rank)];
      if (int(peer) != rank) (near_peers_[peer] ? far_infos : near_infos)[peer] = kElsewhere;
    }
    rank_ = rank;
    // Far first: the near one forgets the heap's descriptor once its peers have it.
    EPCOMM_RETURN_IF_ERROR(
        far_->connect(rank, far_infos, state_word, timeout_s, interrupted, interrupted_arg));
    EPCOMM_RETURN_IF_ERROR(
        near_->connect(rank, near_infos, state_word, timeout_s, interrupted, interrupted_arg));
    near_transport_ = near_->host_transport();
    far_transport_ = far_->host_transport();
    connected_ = true;
    return Status{};
  });
}

}  // namespace

std::unique_ptr<Backend> make_pair_backend(const std::string& name, PairMember* near,
                                           PairMember* far, const std::string& node_id) noexcept {
  if (!near || !far) return nullptr;
  try {
    return std::make_unique<PairBackend>(name, near, far, node_id);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace epcomm::common
