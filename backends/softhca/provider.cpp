// The model's ports as verbs. Posting and polling encode and decode the same bytes that any other
// holder of the rings would; the engine cannot tell who rang.
#include "softhca/provider.hpp"

#include <infiniband/verbs.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "common/errors.hpp"
#include "common/random.hpp"
#include "common/rdma/verbs.hpp"
#include "epcomm/mlx5_host.hpp"
#include "softhca/port.hpp"

namespace epcomm::softhca {
namespace {

using Rings = mlx5::Rings;
using MlxQueue = mlx5::Queue<mlx5::HostMemory>;

constexpr uint32_t kLargestDepth = 1u << 14;
constexpr uint32_t kLargestCq = 1u << 22;
constexpr int kAtomicsInFlight = 16;

uint32_t power_of_two(uint32_t least) {
  uint32_t depth = 1;
  while (depth < least) depth *= 2;
  return depth;
}

template <class Made>
Made* failed(int why) noexcept {
  errno = why;
  return nullptr;
}

Gid to_gid(const ibv_gid& gid) {
  Gid key;
  std::memcpy(key.data(), gid.raw, key.size());
  return key;
}

ibv_wc_status status_of(uint8_t syndrome) {
  switch (syndrome) {
    case mlx5::kLocalLength:
      return IBV_WC_LOC_LEN_ERR;
    case mlx5::kLocalQp:
      return IBV_WC_LOC_QP_OP_ERR;
    case mlx5::kLocalProtection:
      return IBV_WC_LOC_PROT_ERR;
    case mlx5::kFlushed:
      return IBV_WC_WR_FLUSH_ERR;
    case mlx5::kBadResponse:
      return IBV_WC_BAD_RESP_ERR;
    case mlx5::kLocalAccess:
      return IBV_WC_LOC_ACCESS_ERR;
    case mlx5::kRemoteInvalid:
      return IBV_WC_REM_INV_REQ_ERR;
    case mlx5::kRemoteAccess:
      return IBV_WC_REM_ACCESS_ERR;
    case mlx5::kRemoteOperation:
      return IBV_WC_REM_OP_ERR;
    case mlx5::kRetryExceeded:
      return IBV_WC_RETRY_EXC_ERR;
    case mlx5::kRnrRetryExceeded:
      return IBV_WC_RNR_RETRY_EXC_ERR;
    case mlx5::kRemoteAborted:
      return IBV_WC_REM_ABORT_ERR;
    default:
      return IBV_WC_GENERAL_ERR;
  }
}

ibv_wc_opcode opcode_of(uint8_t opcode) {
  switch (opcode) {
    case mlx5::kRead:
      return IBV_WC_RDMA_READ;
    case mlx5::kFetchAdd:
      return IBV_WC_FETCH_ADD;
    case mlx5::kCompareSwap:
      return IBV_WC_COMP_SWAP;
    default:
      return IBV_WC_RDMA_WRITE;
  }
}

uint8_t syndrome_of(ibv_wc_status status) {
  for (int syndrome = 1; syndrome < 64; ++syndrome) {
    if (status_of(uint8_t(syndrome)) == status) return uint8_t(syndrome);
  }
  return 0;
}

const char* status_text(ibv_wc_status status) {
  return status == IBV_WC_SUCCESS ? "success" : mlx5::syndrome_text(syndrome_of(status));
}

struct SoftQp {
  ibv_qp verbs{};
  Qp* model = nullptr;
  Rings rings{};
  ibv_qp_init_attr init{};
  ibv_qp_attr attr{};
  std::mutex mutex;  // of those who post
  uint64_t next = 0;
  std::atomic<uint64_t> done{0};
  std::vector<uint64_t> wr_ids;  // by slot
};

struct SoftCq {
  ibv_cq verbs{};
  Cq* model = nullptr;
  std::mutex mutex;  // of those who poll
  uint64_t polled = 0;
};

struct SoftContext {
  ibv_context verbs{};
  ibv_device device{};
  std::unique_ptr<Port> port;
  // Completions name queue pairs by number.
  std::shared_mutex mutex;
  std::unordered_map<uint32_t, SoftQp*> qps;
};

// The verbs' structures come first in ours.
SoftContext* context_of(ibv_context* context) { return reinterpret_cast<SoftContext*>(context); }
SoftQp* qp_of(ibv_qp* qp) { return reinterpret_cast<SoftQp*>(qp); }
SoftCq* cq_of(ibv_cq* cq) { return reinterpret_cast<SoftCq*>(cq); }

// Posting and polling ----------------------------------------------------------------------------

int encode(const SoftQp& qp, const ibv_send_wr& wr, mlx5::Block* out) {
  const uint16_t index = uint16_t(qp.next);
  const uint32_t qpn = qp.rings.qpn;
  uint8_t flags = 0;
  if (wr.send_flags & IBV_SEND_SIGNALED || qp.init.sq_sig_all) flags |= mlx5::kSignalled;
  if (wr.send_flags & IBV_SEND_FENCE) flags |= mlx5::kFence;
  if (wr.send_flags & IBV_SEND_SOLICITED) flags |= mlx5::kSolicited;
  if (wr.num_sge < 0 || wr.num_sge > 1) return EINVAL;
  mlx5::Local local{};
  uint32_t bytes = 0;
  if (wr.num_sge == 1) {
    local = {wr.sg_list[0].addr, wr.sg_list[0].lkey};
    bytes = wr.sg_list[0].length;
  }
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_RDMA_READ: {
      const mlx5::Remote remote{wr.wr.rdma.remote_addr, wr.wr.rdma.rkey};
      if (wr.opcode == IBV_WR_RDMA_READ) {
        *out = mlx5::read(index, qpn, flags, remote, local, bytes);
      } else if (wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        *out = mlx5::write_imm(index, qpn, flags, remote, local, bytes, wr.imm_data);
      } else if (wr.send_flags & IBV_SEND_INLINE) {
        if (bytes > qp.init.cap.max_inline_data) return EINVAL;
        *out = mlx5::write_inline(index, qpn, flags, remote,
                                  reinterpret_cast<const void*>(local.address), bytes);
      } else {
        *out = mlx5::write(index, qpn, flags, remote, local, bytes);
      }
      return 0;
    }
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
    case IBV_WR_ATOMIC_CMP_AND_SWP: {
      if (bytes != 8) return EINVAL;
      const mlx5::Remote remote{wr.wr.atomic.remote_addr, wr.wr.atomic.rkey};
      *out = wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD
                 ? mlx5::fetch_add(index, qpn, flags, remote, local, wr.wr.atomic.compare_add)
                 : mlx5::compare_swap(index, qpn, flags, remote, local, wr.wr.atomic.compare_add,
                                      wr.wr.atomic.swap);
      return 0;
    }
    default:
      return EOPNOTSUPP;
  }
}

int post_send(ibv_qp* verbs, ibv_send_wr* wr, ibv_send_wr** bad) {
  SoftQp* const qp = qp_of(verbs);
  const std::lock_guard<std::mutex> lock(qp->mutex);
  if (verbs->state != IBV_QPS_RTS && verbs->state != IBV_QPS_ERR) {
    *bad = wr;
    return EINVAL;
  }
  const uint64_t first = qp->next;
  int why = 0;
  for (; wr; wr = wr->next) {
    mlx5::Block block;
    if (qp->next - qp->done.load(std::memory_order_acquire) >= qp->rings.sq_depth) {
      why = ENOMEM;
    } else {
      why = encode(*qp, *wr, &block);
    }
    if (why) {
      *bad = wr;
      break;
    }
    MlxQueue::set(qp->rings, qp->next, block);
    qp->wr_ids[qp->next & (qp->rings.sq_depth - 1)] = wr->wr_id;
    ++qp->next;
  }
  if (qp->next != first) {
    mlx5::HostMemory::fence();
    mlx5::HostMemory::tell(qp->model->record + 1, mlx5::record_value(qp->next), qp->model->doorbell,
                           mlx5::doorbell_value(qp->next, qp->rings.qpn));
  }
  return why;
}

int poll_cq(ibv_cq* verbs, int most, ibv_wc* wc) {
  SoftCq* const cq = cq_of(verbs);
  SoftContext* const context = context_of(verbs->context);
  const std::lock_guard<std::mutex> lock(cq->mutex);
  const std::shared_lock<std::shared_mutex> names(context->mutex);
  const uint64_t before = cq->polled;
  int taken = 0;
  while (taken < most) {
    const mlx5::Cqe& entry = cq->model->ring[cq->polled & (cq->model->depth - 1)];
    const mlx5::CqeTail tail = mlx5::read_cqe_tail(
        mlx5::HostMemory::take(reinterpret_cast<const uint64_t*>(&entry.word[14])));
    if (!mlx5::cqe_valid(tail, cq->polled, cq->model->depth)) break;
    ++cq->polled;
    const auto found = context->qps.find(tail.qpn);
    if (found == context->qps.end()) continue;  // destroyed since
    SoftQp* const qp = found->second;
    ibv_wc& out = wc[taken++];
    std::memset(&out, 0, sizeof out);
    out.wr_id = qp->wr_ids[tail.index & (qp->rings.sq_depth - 1)];
    out.qp_num = tail.qpn;
    out.opcode = opcode_of(tail.send_opcode);
    if (tail.opcode != mlx5::kCqeRequest) {
      const mlx5::CqeError error = mlx5::read_cqe_error(entry.word[13]);
      out.status = status_of(error.syndrome);
      out.vendor_err = error.vendor;
    }
    const uint64_t done = qp->done.load(std::memory_order_relaxed);
    qp->done.store(mlx5::done_number(done, tail.index), std::memory_order_release);
  }
  if (cq->polled != before) {
    mlx5::HostMemory::set_record(cq->model->record, mlx5::consumer_value(cq->polled));
  }
  return taken;
}

int post_recv(ibv_qp*, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  *bad = wr;
  return EOPNOTSUPP;
}

int req_notify_cq(ibv_cq*, int) { return EOPNOTSUPP; }

// The control path -------------------------------------------------------------------------------

class SoftProvider final : public common::VerbsProvider {
 public:
  SoftProvider(const SoftHcaOptions& options, std::vector<Fault> faults, int64_t spin_ns)
      : options_(options),
        faults_(std::move(faults)),
        spin_ns_(spin_ns),
        regions_(std::make_shared<Regions>()) {}

  const char* name() const noexcept override { return "soft"; }
  bool needs_mapping() const noexcept override { return true; }

  Status device_names(std::vector<std::string>* out) noexcept override {
    return common::guarded([&] {
      out->clear();
      for (int i = 0; i < options_.num_ports; ++i) out->push_back("soft" + std::to_string(i));
      return Status{};
    });
  }

  ibv_context* open_device(const std::string& name) noexcept override;
  int close_device(ibv_context* context) noexcept override;
  int query_device(ibv_context* context, ibv_device_attr* attr) noexcept override;
  int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) noexcept override;
  int query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) noexcept override;
  ibv_pd* alloc_pd(ibv_context* context) noexcept override;
  int dealloc_pd(ibv_pd* pd) noexcept override;
  ibv_mr* reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) noexcept override;
  int dereg_mr(ibv_mr* mr) noexcept override;
  ibv_cq* create_cq(ibv_context* context, int depth) noexcept override;
  int destroy_cq(ibv_cq* cq) noexcept override;
  ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) noexcept override;
  int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) noexcept override;
  int query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) noexcept override;
  int destroy_qp(ibv_qp* qp) noexcept override;
  const char* wc_status_str(ibv_wc_status status) noexcept override { return status_text(status); }
  Status attach_remote(ibv_context* context, const common::RemoteMemory& memory) noexcept override;
  Status queue_view(ibv_qp* qp, common::QueueView* view) noexcept override;
  std::string explain(ibv_qp* qp) noexcept override;

 private:
  const SoftHcaOptions options_;
  const std::vector<Fault> faults_;
  const int64_t spin_ns_;
  const std::shared_ptr<Regions> regions_;
};

ibv_context* SoftProvider::open_device(const std::string& name) noexcept try {
  int number = -1;
  for (int i = 0; i < options_.num_ports; ++i) {
    if (name == "soft" + std::to_string(i)) number = i;
  }
  if (number < 0) return failed<ibv_context>(ENODEV);
  Gid gid;
  if (!common::random_key(&gid).ok()) return failed<ibv_context>(EIO);
  auto context = std::make_unique<SoftContext>();
  PortOptions port;
  port.number = number;
  port.gbps = options_.gbps;
  port.latency_ns = int64_t(options_.latency_us * 1e3);
  port.spin_ns = spin_ns_;
  port.null_mover = options_.null_mover;
  port.faults = faults_;
  port.seed = options_.seed;
  context->port = std::make_unique<Port>(port, gid, regions_);
  regions_->open(gid);
  context->device.node_type = IBV_NODE_CA;
  context->device.transport_type = IBV_TRANSPORT_IB;
  std::snprintf(context->device.name, sizeof context->device.name, "%s", name.c_str());
  std::snprintf(context->device.dev_name, sizeof context->device.dev_name, "%s", name.c_str());
  context->verbs.device = &context->device;
  context->verbs.cmd_fd = context->verbs.async_fd = -1;
  context->verbs.num_comp_vectors = 1;
  context->verbs.ops.post_send = post_send;
  context->verbs.ops.poll_cq = poll_cq;
  context->verbs.ops.post_recv = post_recv;
  context->verbs.ops.req_notify_cq = req_notify_cq;
  return &context.release()->verbs;
} catch (const std::bad_alloc&) {
  return failed<ibv_context>(ENOMEM);
}

int SoftProvider::close_device(ibv_context* verbs) noexcept {
  SoftContext* const context = context_of(verbs);
  if (!context->qps.empty()) return EBUSY;
  context->port->stop();
  regions_->close(context->port->gid());
  delete context;
  return 0;
}

int SoftProvider::query_device(ibv_context*, ibv_device_attr* attr) noexcept {
  *attr = {};
  std::snprintf(attr->fw_ver, sizeof attr->fw_ver, "soft");
  attr->max_mr_size = UINT64_MAX;
  attr->page_size_cap = 0xfffff000;
  attr->max_qp = 1 << 16;
  attr->max_qp_wr = int(kLargestDepth);
  attr->max_sge = 1;
  attr->max_cq = 1 << 16;
  attr->max_cqe = int(kLargestCq);
  attr->max_mr = 1 << 20;
  attr->max_pd = 1 << 16;
  attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = kAtomicsInFlight;
  attr->atomic_cap = IBV_ATOMIC_HCA;
  attr->phys_port_cnt = 1;
  return 0;
}

int SoftProvider::query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) noexcept {
  if (port != 1) return EINVAL;
  *attr = {};
  attr->state = context_of(context)->port->is_down() ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
  attr->gid_tbl_len = 1;
  attr->max_msg_sz = mlx5::kMaxMessage;
  attr->pkey_tbl_len = 1;
  attr->active_width = 2;   // 4 lanes
  attr->active_speed = 64;  // HDR: 50 Gbit/s each
  attr->phys_state = 5;     // link up
  attr->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int SoftProvider::query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) noexcept {
  if (port != 1 || index != 0) return EINVAL;
  std::memcpy(gid->raw, context_of(context)->port->gid().data(), sizeof gid->raw);
  return 0;
}

ibv_pd* SoftProvider::alloc_pd(ibv_context* context) noexcept {
  ibv_pd* const pd = new (std::nothrow) ibv_pd{};
  if (!pd) return failed<ibv_pd>(ENOMEM);
  pd->context = context;
  return pd;
}

int SoftProvider::dealloc_pd(ibv_pd* pd) noexcept {
  delete pd;
  return 0;
}

ibv_mr* SoftProvider::reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) noexcept try {
  const bool writes = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  if (!address || bytes == 0 || (writes && !(access & IBV_ACCESS_LOCAL_WRITE))) {
    return failed<ibv_mr>(EINVAL);
  }
  Port& port = *context_of(pd->context)->port;
  auto mr = std::make_unique<ibv_mr>();
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = address;
  mr->length = bytes;
  mr->lkey = mr->rkey = port.new_key();
  regions_->add(port.gid(), mr->rkey,
                {reinterpret_cast<uint64_t>(address), bytes, static_cast<std::byte*>(address),
                 unsigned(access) & 15u});
  return mr.release();
} catch (const std::bad_alloc&) {
  return failed<ibv_mr>(ENOMEM);
}

int SoftProvider::dereg_mr(ibv_mr* mr) noexcept {
  regions_->remove(context_of(mr->context)->port->gid(), mr->rkey);
  delete mr;
  return 0;
}

ibv_cq* SoftProvider::create_cq(ibv_context* context, int depth) noexcept try {
  if (depth < 1 || uint32_t(depth) > kLargestCq) return failed<ibv_cq>(EINVAL);
  auto cq = std::make_unique<SoftCq>();
  cq->model = context_of(context)->port->create_cq(power_of_two(uint32_t(depth)));
  if (!cq->model) return failed<ibv_cq>(ENOMEM);
  cq->verbs.context = context;
  cq->verbs.cqe = int(cq->model->depth);
  return &cq.release()->verbs;
} catch (const std::bad_alloc&) {
  return failed<ibv_cq>(ENOMEM);
}

int SoftProvider::destroy_cq(ibv_cq* verbs) noexcept {
  SoftCq* const cq = cq_of(verbs);
  if (!context_of(verbs->context)->port->destroy_cq(cq->model)) return EBUSY;
  delete cq;
  return 0;
}

ibv_qp* SoftProvider::create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) noexcept try {
  if (attr->qp_type != IBV_QPT_RC || attr->srq || !attr->send_cq ||
      attr->cap.max_send_wr > kLargestDepth || attr->cap.max_send_sge > 1 ||
      attr->cap.max_inline_data > mlx5::kMaxInline) {
    return failed<ibv_qp>(EINVAL);
  }
  SoftContext* const context = context_of(pd->context);
  auto qp = std::make_unique<SoftQp>();
  const uint32_t depth = power_of_two(std::max(attr->cap.max_send_wr, 1u));
  qp->wr_ids.resize(depth);
  SoftCq* const cq = cq_of(attr->send_cq);
  qp->model = context->port->create_qp(cq->model, depth, attr->sq_sig_all != 0);
  if (!qp->model) return failed<ibv_qp>(ENOMEM);
  attr->cap.max_send_wr = depth;
  attr->cap.max_send_sge = 1;
  attr->cap.max_inline_data = mlx5::kMaxInline;
  attr->cap.max_recv_wr = 0;
  qp->init = *attr;
  Qp& model = *qp->model;
  qp->rings = {reinterpret_cast<uint64_t>(model.sq),
               reinterpret_cast<uint64_t>(model.record + 1),
               reinterpret_cast<uint64_t>(model.doorbell),
               reinterpret_cast<uint64_t>(cq->model->ring),
               reinterpret_cast<uint64_t>(cq->model->record),
               model.qpn,
               depth,
               cq->model->depth,
               depth};
  qp->verbs.context = pd->context;
  qp->verbs.qp_context = attr->qp_context;
  qp->verbs.pd = pd;
  qp->verbs.send_cq = attr->send_cq;
  qp->verbs.recv_cq = attr->recv_cq;
  qp->verbs.qp_num = model.qpn;
  qp->verbs.qp_type = IBV_QPT_RC;
  qp->verbs.state = IBV_QPS_RESET;
  try {
    const std::unique_lock<std::shared_mutex> lock(context->mutex);
    context->qps[model.qpn] = qp.get();
  } catch (const std::bad_alloc&) {
    context->port->destroy_qp(qp->model);
    throw;
  }
  return &qp.release()->verbs;
} catch (const std::bad_alloc&) {
  return failed<ibv_qp>(ENOMEM);
}

int SoftProvider::modify_qp(ibv_qp* verbs, ibv_qp_attr* attr, int mask) noexcept try {
  SoftQp* const qp = qp_of(verbs);
  Port& port = *context_of(verbs->context)->port;
  const std::lock_guard<std::mutex> posting(qp->mutex);
  const ibv_qp_state from = verbs->state;
  const ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : from;
  const auto has = [&](int wanted) { return (mask & wanted) == wanted; };
  const bool allowed =
      to == IBV_QPS_ERR || to == IBV_QPS_RESET ||
      (from == IBV_QPS_RESET && to == IBV_QPS_INIT &&
       has(IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) && attr->port_num == 1) ||
      (from == IBV_QPS_INIT && to == IBV_QPS_RTR &&
       has(IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) &&
       attr->ah_attr.is_global) ||
      (from == IBV_QPS_RTR && to == IBV_QPS_RTS &&
       has(IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
           IBV_QP_MAX_QP_RD_ATOMIC)) ||
      (from == to && (from == IBV_QPS_INIT || from == IBV_QPS_RTS));
  if (!allowed) return EINVAL;
  const bool stays = from == to && to != IBV_QPS_ERR && to != IBV_QPS_RESET;
  if (!stays) {
    port.modify([&] {
      Qp* const model = qp->model;
      switch (to) {
        case IBV_QPS_RESET:
          port.reset(model);
          qp->next = 0;
          qp->done.store(0);
          break;
        case IBV_QPS_INIT:
          port.set_state(model, QpState::kInit);
          break;
        case IBV_QPS_RTR:
          model->remote_gid = to_gid(attr->ah_attr.grh.dgid);
          model->remote_qpn = attr->dest_qp_num;
          port.set_state(model, QpState::kReceiving);
          break;
        case IBV_QPS_RTS:
          // As the specification has it: 4.096 us times a power of two, for each try.
          model->retry_ns =
              attr->timeout == 0
                  ? 0
                  : int64_t(4096.0 * std::ldexp(1.0, attr->timeout) * (attr->retry_cnt + 1));
          port.set_state(model, QpState::kSending);
          break;
        default:
          port.fail(model);
      }
    });
  }
  verbs->state = to;
  qp->attr.qp_state = to;
  if (mask & IBV_QP_AV) qp->attr.ah_attr = attr->ah_attr;
  if (mask & IBV_QP_PATH_MTU) qp->attr.path_mtu = attr->path_mtu;
  if (mask & IBV_QP_DEST_QPN) qp->attr.dest_qp_num = attr->dest_qp_num;
  if (mask & IBV_QP_TIMEOUT) qp->attr.timeout = attr->timeout;
  if (mask & IBV_QP_RETRY_CNT) qp->attr.retry_cnt = attr->retry_cnt;
  if (mask & IBV_QP_RNR_RETRY) qp->attr.rnr_retry = attr->rnr_retry;
  if (mask & IBV_QP_MAX_QP_RD_ATOMIC) qp->attr.max_rd_atomic = attr->max_rd_atomic;
  if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) qp->attr.max_dest_rd_atomic = attr->max_dest_rd_atomic;
  return 0;
} catch (const std::bad_alloc&) {
  return ENOMEM;
}

int SoftProvider::query_qp(ibv_qp* verbs, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) noexcept {
  SoftQp* const qp = qp_of(verbs);
  const std::lock_guard<std::mutex> posting(qp->mutex);
  context_of(verbs->context)->port->modify([&] {
    if (qp->model->state == QpState::kError) verbs->state = IBV_QPS_ERR;
  });
  *attr = qp->attr;
  attr->qp_state = attr->cur_qp_state = verbs->state;
  attr->cap = qp->init.cap;
  if (init) *init = qp->init;
  return 0;
}

int SoftProvider::destroy_qp(ibv_qp* verbs) noexcept {
  SoftQp* const qp = qp_of(verbs);
  SoftContext* const context = context_of(verbs->context);
  {
    const std::unique_lock<std::shared_mutex> lock(context->mutex);
    context->qps.erase(verbs->qp_num);
  }
  context->port->destroy_qp(qp->model);
  delete qp;
  return 0;
}

Status SoftProvider::attach_remote(ibv_context*, const common::RemoteMemory& memory) noexcept {
  return common::guarded([&] {
    if (!memory.mapped || memory.bytes == 0) {
      return error(Code::kInvalidArgument, -1, "attach_remote: no memory is mapped");
    }
    regions_->add(to_gid(memory.gid), memory.rkey,
                  {memory.address, memory.bytes, memory.mapped,
                   kRemoteWrite | kRemoteAtomic | (memory.readable ? unsigned(kRemoteRead) : 0u)});
    return Status{};
  });
}

Status SoftProvider::queue_view(ibv_qp* verbs, common::QueueView* view) noexcept {
  SoftQp* const qp = qp_of(verbs);
  const Qp& model = *qp->model;
  const Cq& cq = *cq_of(verbs->send_cq)->model;
  if (cq.users != 1 || cq.depth < model.depth) {
    return error(Code::kInvalidArgument, -1,
                 "queue_view: queue pair %u needs a completion queue of its own, as deep as its "
                 "send queue (%u); this one has %u entries and %d queue pairs",
                 model.qpn, model.depth, cq.depth, cq.users);
  }
  view->sq = model.sq;
  view->sq_depth = model.depth;
  view->sq_dbrec = model.record + 1;
  view->doorbell = model.doorbell;
  view->cq = cq.ring;
  view->cq_depth = cq.depth;
  view->cq_dbrec = cq.record;
  view->qpn = model.qpn;
  return {};
}

std::string SoftProvider::explain(ibv_qp* verbs) noexcept try {
  return violation_text(context_of(verbs->context)->port->violation(qp_of(verbs)->model));
} catch (const std::bad_alloc&) {
  return {};
}

}  // namespace

Status make_softhca(const SoftHcaOptions& options,
                    std::shared_ptr<common::VerbsProvider>* out) noexcept {
  return common::guarded([&] {
    if (options.num_ports < 1 || options.num_ports > 16) {
      return error(Code::kInvalidArgument, -1, "soft HCA: %d ports: expected 1 to 16",
                   options.num_ports);
    }
    if (!(options.gbps >= 0 && options.gbps <= 1e5)) {
      return error(Code::kInvalidArgument, -1, "soft HCA: %g Gbit/s: expected 0 to 100000",
                   options.gbps);
    }
    if (!(options.latency_us >= 0 && options.latency_us <= 1e6)) {
      return error(Code::kInvalidArgument, -1, "soft HCA: %g us of latency: expected 0 to 1000000",
                   options.latency_us);
    }
    std::vector<Fault> faults;
    EPCOMM_RETURN_IF_ERROR(parse_faults(options.faults, &faults));
    for (const Fault& fault : faults) {
      if (fault.port >= options.num_ports) {
        return error(Code::kInvalidArgument, -1, "EPCOMM_SOFTHCA_FAULTS: port=%d: expected 0 to %d",
                     fault.port, options.num_ports - 1);
      }
    }
    if (options.seed) {
      for (const Fault& fault : harmless_disorder()) faults.push_back(fault);
    }
    cpu_set_t cores;
    const int num_cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    int64_t spin_ns = options.spin_us * 1000;
    if (options.spin_us < 0) spin_ns = num_cores >= 8 ? 200 * 1000 : 0;
    *out = std::make_shared<SoftProvider>(options, std::move(faults), spin_ns);
    return Status{};
  });
}

Status open_provider(const std::string& name, const SoftHcaOptions& soft,
                     std::shared_ptr<common::VerbsProvider>* out) noexcept {
  if (name == "verbs") return common::open_libibverbs(out);
  if (name == "soft") return make_softhca(soft, out);
  return error(Code::kInvalidArgument, -1, "provider=%s: expected verbs or soft", name.c_str());
}

}  // namespace epcomm::softhca
