// Two ranks over the model: devices, a heap each, and connected queue pairs between them.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "epcomm/mlx5_host.hpp"
#include "softhca/port.hpp"
#include "softhca/provider.hpp"

namespace epcomm::testing {

constexpr int kAllAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                           IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// One port with a heap of zeros.
class SoftPort {
 public:
  SoftPort(common::VerbsProvider* provider, const std::string& name, uint64_t heap_words)
      : SoftPort(provider, name, std::make_shared<std::vector<uint64_t>>(heap_words)) {}
  // Several ports may register one heap.
  SoftPort(common::VerbsProvider* provider, const std::string& name,
           std::shared_ptr<std::vector<uint64_t>> heap)
      : provider_(provider), heap_(std::move(heap)) {
    context_ = provider->open_device(name);
    EXPECT(context_, "open_device(%s)", name.c_str());
    EXPECT(provider->query_gid(context_, 1, 0, &gid_) == 0, "query_gid");
    pd_ = provider->alloc_pd(context_);
    mr_ = provider->reg_mr(pd_, heap_->data(), heap_->size() * 8, kAllAccess);
    EXPECT(pd_ && mr_, "alloc_pd, reg_mr");
  }
  ~SoftPort() {
    for (ibv_qp* qp : qps_) EXPECT(provider_->destroy_qp(qp) == 0, "destroy_qp");
    for (ibv_cq* cq : cqs_) EXPECT(provider_->destroy_cq(cq) == 0, "destroy_cq");
    EXPECT(provider_->dereg_mr(mr_) == 0, "dereg_mr");
    EXPECT(provider_->dealloc_pd(pd_) == 0, "dealloc_pd");
    EXPECT(provider_->close_device(context_) == 0, "close_device");
  }

  ibv_cq* make_cq(int depth) {
    cqs_.push_back(provider_->create_cq(context_, depth));
    EXPECT(cqs_.back(), "create_cq");
    return cqs_.back();
  }
  ibv_qp* make_qp(uint32_t depth, ibv_cq* cq = nullptr) {
    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = init.recv_cq = cq ? cq : make_cq(int(depth));
    init.cap.max_send_wr = depth;
    init.cap.max_send_sge = 1;
    init.cap.max_inline_data = 28;
    qps_.push_back(provider_->create_qp(pd_, &init));
    EXPECT(qps_.back(), "create_qp");
    return qps_.back();
  }

  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }
  const ibv_gid& gid() const { return gid_; }
  uint64_t* words() { return heap_->data(); }
  const std::shared_ptr<std::vector<uint64_t>>& heap() const { return heap_; }
  uint64_t address(uint64_t word = 0) const { return uint64_t(heap_->data() + word); }
  uint32_t key() const { return mr_->rkey; }

 private:
  common::VerbsProvider* const provider_;
  const std::shared_ptr<std::vector<uint64_t>> heap_;
  ibv_context* context_ = nullptr;
  ibv_gid gid_{};
  ibv_pd* pd_ = nullptr;
  ibv_mr* mr_ = nullptr;
  std::vector<ibv_cq*> cqs_;
  std::vector<ibv_qp*> qps_;
};

inline void connect_one(common::VerbsProvider* provider, ibv_qp* qp, const ibv_gid& gid,
                        uint32_t qpn, uint8_t timeout = 14, uint8_t retries = 7) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  attr.qp_access_flags = kAllAccess;
  EXPECT(provider->modify_qp(
             qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
         "to INIT");
  attr = {};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_4096;
  attr.dest_qp_num = qpn;
  attr.max_dest_rd_atomic = 16;
  attr.min_rnr_timer = 12;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.grh.dgid = gid;
  attr.ah_attr.port_num = 1;
  EXPECT(provider->modify_qp(qp, &attr,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                 IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                 IBV_QP_MIN_RNR_TIMER) == 0,
         "to RTR");
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = timeout;
  attr.retry_cnt = retries;
  attr.rnr_retry = 7;
  attr.max_rd_atomic = 16;
  EXPECT(provider->modify_qp(qp, &attr,
                             IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                 IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0,
         "to RTS");
}

inline void connect_both(common::VerbsProvider* provider, SoftPort& a, ibv_qp* qa, SoftPort& b,
                         ibv_qp* qb, uint8_t timeout = 14, uint8_t retries = 7) {
  connect_one(provider, qa, b.gid(), qb->qp_num, timeout, retries);
  connect_one(provider, qb, a.gid(), qa->qp_num, timeout, retries);
}

inline std::shared_ptr<common::VerbsProvider> provider_of(const softhca::SoftHcaOptions& options) {
  std::shared_ptr<common::VerbsProvider> provider;
  EXPECT_OK(softhca::make_softhca(options, &provider));
  return provider;
}

inline mlx5::Rings rings_of(common::VerbsProvider* provider, ibv_qp* qp) {
  common::QueueView view;
  EXPECT_OK(provider->queue_view(qp, &view));
  return {uint64_t(view.sq), uint64_t(view.sq_dbrec), uint64_t(view.doorbell),
          uint64_t(view.cq), uint64_t(view.cq_dbrec), view.qpn,
          view.sq_depth,     view.cq_depth,           std::min(view.sq_depth, view.cq_depth)};
}

}  // namespace epcomm::testing
