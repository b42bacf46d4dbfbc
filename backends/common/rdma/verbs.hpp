// RDMA verbs: the control path behind an interface, so that libibverbs and the software HCA are
// providers of the same thing, and owners for what it makes. The data path needs no interface:
// ibv_post_send() and ibv_poll_cq() are inline calls through the context, whoever provided it.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "epcomm/status.hpp"

namespace epcomm::common {

// The rings of a queue pair, for those who write mlx5 work requests themselves.
struct QueueView {
  void* sq = nullptr;  // 64-byte blocks
  uint32_t sq_depth = 0;
  uint32_t* sq_dbrec = nullptr;           // send counter, big-endian
  volatile uint64_t* doorbell = nullptr;  // one aligned 8-byte store
  void* cq = nullptr;                     // 64-byte entries
  uint32_t cq_depth = 0;
  uint32_t* cq_dbrec = nullptr;  // consumer counter, big-endian
  uint32_t qpn = 0;
};

// Memory of a peer that a provider without a wire must be shown.
struct RemoteMemory {
  ibv_gid gid{};  // of the port whose NIC registered it
  uint32_t rkey = 0;
  uint64_t address = 0;  // in the peer's process
  uint64_t bytes = 0;
  std::byte* mapped = nullptr;  // the same bytes here; stays mapped while contexts are open
  bool readable = true;         // by IBV_WR_RDMA_READ
};

// Calls return what the verbs of the same name return: null or an errno value on failure.
class VerbsProvider {
 public:
  virtual ~VerbsProvider() = default;
  virtual const char* name() const noexcept = 0;  // "verbs" or "soft"

  // Names of devices in the provider's order.
  virtual Status device_names(std::vector<std::string>* out) noexcept = 0;
  virtual ibv_context* open_device(const std::string& name) noexcept = 0;  // null, errno
  virtual int close_device(ibv_context* context) noexcept = 0;
  virtual int query_device(ibv_context* context, ibv_device_attr* attr) noexcept = 0;
  virtual int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) noexcept = 0;
  virtual int query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) noexcept = 0;
  virtual ibv_pd* alloc_pd(ibv_context* context) noexcept = 0;
  virtual int dealloc_pd(ibv_pd* pd) noexcept = 0;
  virtual ibv_mr* reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) noexcept = 0;
  virtual int dereg_mr(ibv_mr* mr) noexcept = 0;
  virtual ibv_cq* create_cq(ibv_context* context, int depth) noexcept = 0;
  virtual int destroy_cq(ibv_cq* cq) noexcept = 0;
  virtual ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) noexcept = 0;
  virtual int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) noexcept = 0;
  virtual int query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask,
                       ibv_qp_init_attr* init) noexcept = 0;
  virtual int destroy_qp(ibv_qp* qp) noexcept = 0;
  virtual const char* wc_status_str(ibv_wc_status status) noexcept = 0;

  // True: there is no wire; peers' heaps must be mapped here and shown by attach_remote().
  virtual bool needs_mapping() const noexcept { return false; }
  virtual Status attach_remote(ibv_context*, const RemoteMemory&) noexcept {
    return error(Code::kUnsupported, -1, "attach_remote: not on provider %s", name());
  }
  // Nobody may call ibv_post_send() on a queue pair whose view was taken.
  virtual Status queue_view(ibv_qp*, QueueView*) noexcept {
    return error(Code::kUnsupported, -1, "queue_view: not on provider %s", name());
  }
  // What the provider knows about the failure of a queue pair beyond its completion; often nothing.
  virtual std::string explain(ibv_qp*) noexcept { return {}; }
};

// The rings of a queue pair that libmlx5 made, through that library, found at run time. Not run on
// hardware yet. kUnavailable with the reason if the device is no mlx5 or the library is not to be
// had; nothing may have been posted to the queue pair.
Status mlx5_queue_view(ibv_qp* qp, QueueView* view) noexcept;

// libibverbs, found at run time. kUnavailable with the reason if it is not to be had.
Status open_libibverbs(std::shared_ptr<VerbsProvider>* out) noexcept;

}  // namespace epcomm::common
