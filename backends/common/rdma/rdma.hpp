// The queue pairs between this rank and its peers: opened, registered, described, connected and
// taken down for any backend that drives NICs. Who posts work requests, and how, is not known here.
//
//   open() -> register_heap() -> describe() -> connect() -> queue() ... -> close()
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/info.hpp"
#include "common/rdma/verbs.hpp"
#include "epcomm/plan.h"
#include "epcomm/status.hpp"

namespace epcomm::common {

namespace rdma {
struct State;
}

// One (NIC, port) that this rank uses, as the caller chose it.
struct RdmaPath {
  std::string device;
  int port = 1;
  int gid_index = -1;  // -1: the link layer has none to name (InfiniBand)
};

struct RdmaOptions {
  std::shared_ptr<VerbsProvider> provider;
  std::vector<RdmaPath> paths;
  int num_ranks = 0;
  int rank = -1;             // own; no queue pair is made to it. -1: not known yet
  int num_channels = 0;      // of data; queue pairs are made for one more, the control channel
  int control_channel = -1;  // for plan_json(): those behind it are spares; -1: num_channels
  uint32_t depth = 256;  // work requests of a send queue, a power of two; lowered to the device's
  uint32_t max_inline = 28;
  uint32_t max_sge = 1;    // pieces of one write's source
  bool cq_per_qp = false;  // else one per path, as deep as all its send queues together
  bool relaxed_ordering = true;
  bool remote_reads = false;  // peers may read what the strict registration covers
  int mtu = 0;                // bytes; 0: what both ports have
  int traffic_class = 0;
  int service_level = 0;
  int pkey_index = 0;  // EPCOMM_IB_PKEY: in the ports' tables of partition keys
};

// One connected queue pair and all that a work request for it needs.
struct RdmaQueue {
  ibv_qp* qp = nullptr;
  ibv_cq* cq = nullptr;
  int peer = -1;
  int channel = -1;
  int path = -1;
  int remote_path = -1;
  std::string device;  // of the path, as its port: for errors
  int port = 0;
  uint32_t depth = 0;
  uint32_t max_inline = 0;  // at least what was asked, or 0 if the device refused
  uint32_t max_sge = 0;
  uint32_t max_message = 0;    // bytes of one work request
  uint32_t max_rd_atomic = 0;  // atomics outstanding at a time; 0: none, signals are ordered writes
  uint32_t max_reads = 0;      // reads outstanding at a time; 0: none, or not asked for
  uint32_t lkey = 0;           // of the own heap on this path's device
  uint64_t remote_heap = 0;    // address of the peer's heap
  uint32_t data_rkey = 0;      // relaxed ordering, if the device has it
  uint32_t signal_rkey = 0;    // strict ordering
  uint32_t remote_qpn = 0;
};

// "queue pair 7 of channel 0 (mlx5_0 port 1)"
inline std::string queue_text(const RdmaQueue& queue) {
  return "queue pair " + std::to_string(queue.qp->qp_num) + " of channel " +
         std::to_string(queue.channel) + " (" + queue.device + " port " +
         std::to_string(queue.port) + ")";
}

class Rdma {
 public:
  Rdma();
  Rdma(const Rdma&) = delete;
  Rdma& operator=(const Rdma&) = delete;
  ~Rdma();

  // Devices, protection domains, completion queues, queue pairs in INIT. Errors name call, errno,
  // device, port and remedy.
  Status open(const RdmaOptions& options) noexcept;
  // The whole heap, twice per device: relaxed for data, strict for signals. All or nothing. Also
  // registers pages of the fabric's own: for what atomics return and what is read.
  Status register_heap(std::byte* heap, uint64_t bytes) noexcept;
  Status describe(Info* info) const noexcept;
  // Brings every queue pair to RTS; on failure everything is closed. `mapped` by rank: peers' heaps
  // in this process, for a provider that needs_mapping(), else empty. `timeout_s` sets the timers
  // of the queue pairs. `wanted` by rank: false, and for the own rank, no connection is made.
  Status connect(int rank, const std::vector<Info>& infos, const std::vector<bool>& wanted,
                 const std::vector<std::byte*>& mapped, double timeout_s) noexcept;

  const RdmaQueue& queue(int peer, int channel) const noexcept;
  int num_paths() const noexcept;
  ibv_cq* cq(int path) const noexcept;
  // Where atomics of this path put the old value: address and lkey of 8 bytes.
  void sink(int path, uint64_t* address, uint32_t* lkey) const noexcept;
  // 8 bytes for what this queue pair reads, with `remote_reads`; the lkey is the sink's.
  uint64_t read_into(const RdmaQueue& queue) const noexcept;
  VerbsProvider* provider() const noexcept;
  // What was decided, for people: JSON with one row per queue pair (peer, channel, kind, device,
  // port, gid, remote, mtu, qpn, depth, inline) and per path the reasons.
  std::string plan_json() const;
  // Queue pair by path and number, -1 if it is none of ours: completions name it. Two devices may
  // give the same number.
  int queue_of(int path, uint32_t qpn) const noexcept;
  // Seconds after which a queue pair gives up on a peer that answers nothing (nominal; the standard
  // allows four times that).
  double retry_seconds() const noexcept;
  // Of one try (nominal): what was sent before that is not on its way any more.
  double try_seconds() const noexcept;

  // Own ports that are not active now, in words; "" if all are. Any thread.
  std::string ports_down() const noexcept;

  // As if this queue pair had failed: it sends and takes nothing any more. Any thread.
  Status break_queue(int peer, int channel) noexcept;

  // Queue pairs to ERROR first, so that nothing of a peer's is written any more; then everything in
  // reverse. Idempotent, bounded.
  void close() noexcept;
  // For objects inherited through fork: nothing is touched.
  void forget() noexcept;

 private:
  std::unique_ptr<rdma::State> state_;
};

}  // namespace epcomm::common
