// A verbs provider without a device: counts what is alive, remembers what queue pairs were told,
// and lets the n-th call fail. Devices, ports and limits are what a test writes into `devices`.
#pragma once

#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "common/rdma/verbs.hpp"

namespace epcomm::testing {

struct ScriptedPort {
  ibv_port_state state = IBV_PORT_ACTIVE;
  ibv_mtu mtu = IBV_MTU_4096;
  uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  uint16_t lid = 0;
  uint32_t max_message = 1u << 30;
  std::map<int, ibv_gid> gids;
};

struct ScriptedDevice {
  std::string name;
  int max_qp = 1000;
  int max_qp_wr = 8192;
  int max_sge = 16;
  int max_cqe = 1 << 20;
  int max_rd_atomic = 16;
  uint32_t max_inline = 200;
  uint32_t most_for_inline = 1u << 30;  // depth * inline bytes above which a QP is refused
  ibv_atomic_cap atomics = IBV_ATOMIC_HCA;
  bool relaxed = true;  // takes the flag
  std::vector<ScriptedPort> ports;
};

struct ScriptedQp {
  ibv_qp qp{};
  ibv_qp_init_attr init{};
  ibv_qp_attr attr{};  // all that was ever set
  int mask = 0;
  std::string device;
};
struct ScriptedCq {
  ibv_cq cq{};
  int depth = 0;
};
struct ScriptedMr {
  ibv_mr mr{};
  int access = 0;
};

class ScriptedVerbs final : public common::VerbsProvider {
 public:
  explicit ScriptedVerbs(std::vector<ScriptedDevice> all) : devices(std::move(all)) {}
  ~ScriptedVerbs() override { EXPECT(alive() == 0, "alive: %s", living().c_str()); }

  std::vector<ScriptedDevice> devices;
  std::vector<std::string> calls;  // names in order
  int fail_at = -1;                // number of the call that fails
  int fail_with = EIO;
  std::function<int(const std::string&)> refuse;  // errno by call name, 0: go on
  uint32_t next_qpn = 100;
  bool mapping = false;
  std::vector<common::RemoteMemory> attached;

  std::set<ScriptedQp*> qps;
  std::set<ScriptedCq*> cqs;
  std::set<ScriptedMr*> mrs;
  std::set<ibv_pd*> pds;
  std::set<ibv_context*> contexts;

  size_t alive() const {
    return qps.size() + cqs.size() + mrs.size() + pds.size() + contexts.size();
  }
  std::string living() const {
    return std::to_string(contexts.size()) + " contexts, " + std::to_string(pds.size()) + " pds, " +
           std::to_string(mrs.size()) + " mrs, " + std::to_string(cqs.size()) + " cqs, " +
           std::to_string(qps.size()) + " qps";
  }
  ScriptedQp* of(const ibv_qp* qp) const {
    for (ScriptedQp* known : qps) {
      if (&known->qp == qp) return known;
    }
    return nullptr;
  }
  ScriptedCq* of(const ibv_cq* cq) const {
    for (ScriptedCq* known : cqs) {
      if (&known->cq == cq) return known;
    }
    return nullptr;
  }

  const char* name() const noexcept override { return mapping ? "soft" : "verbs"; }
  bool needs_mapping() const noexcept override { return mapping; }
  Status attach_remote(ibv_context*, const common::RemoteMemory& memory) noexcept override {
    if (const int why = step("attach_remote")) {
      return error(Code::kSystem, -1, "attach_remote: %d", why);
    }
    attached.push_back(memory);
    return {};
  }
  Status device_names(std::vector<std::string>* out) noexcept override {
    for (const ScriptedDevice& device : devices) out->push_back(device.name);
    return {};
  }

  ibv_context* open_device(const std::string& wanted) noexcept override {
    if (step("ibv_open_device")) return nullptr;
    for (ScriptedDevice& device : devices) {
      if (device.name != wanted) continue;
      auto* const context = new ibv_context{};
      script_[context] = &device;
      contexts.insert(context);
      return context;
    }
    errno = ENODEV;
    return nullptr;
  }
  int close_device(ibv_context* context) noexcept override {
    EXPECT(contexts.erase(context) == 1, "a context is closed that is not open");
    for (const ibv_pd* pd : pds) EXPECT(pd->context != context, "its protection domain is alive");
    for (const ScriptedCq* cq : cqs) EXPECT(cq->cq.context != context, "its CQ is alive");
    delete context;
    return 0;
  }
  int query_device(ibv_context* context, ibv_device_attr* attr) noexcept override {
    if (const int why = step("ibv_query_device")) return why;
    const ScriptedDevice& device = *script_.at(context);
    attr->phys_port_cnt = uint8_t(device.ports.size());
    attr->max_qp = device.max_qp;
    attr->max_qp_wr = device.max_qp_wr;
    attr->max_sge = device.max_sge;
    attr->max_cqe = device.max_cqe;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = device.max_rd_atomic;
    attr->atomic_cap = device.atomics;
    attr->max_mr_size = ~uint64_t(0);
    return 0;
  }
  int query_port(ibv_context* context, uint8_t number, ibv_port_attr* attr) noexcept override {
    if (const int why = step("ibv_query_port")) return why;
    const ScriptedPort& port = script_.at(context)->ports.at(number - 1u);
    attr->state = port.state;
    attr->active_mtu = port.mtu;
    attr->link_layer = port.link_layer;
    attr->lid = port.lid;
    attr->max_msg_sz = port.max_message;
    attr->gid_tbl_len = 16;
    attr->pkey_tbl_len = 8;
    return 0;
  }
  int query_gid(ibv_context* context, uint8_t number, int index, ibv_gid* gid) noexcept override {
    if (const int why = step("ibv_query_gid")) return why;
    const ScriptedPort& port = script_.at(context)->ports.at(number - 1u);
    const auto found = port.gids.find(index);
    *gid = found == port.gids.end() ? ibv_gid{} : found->second;
    return index < 16 ? 0 : EINVAL;
  }
  ibv_pd* alloc_pd(ibv_context* context) noexcept override {
    if (step("ibv_alloc_pd")) return nullptr;
    auto* const pd = new ibv_pd{};
    pd->context = context;
    pds.insert(pd);
    return pd;
  }
  int dealloc_pd(ibv_pd* pd) noexcept override {
    EXPECT(pds.erase(pd) == 1, "a protection domain is freed that is not there");
    for (const ScriptedMr* mr : mrs) EXPECT(mr->mr.pd != pd, "its registration is alive");
    for (const ScriptedQp* qp : qps) EXPECT(qp->qp.pd != pd, "its queue pair is alive");
    delete pd;
    return 0;
  }
  ibv_mr* reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) noexcept override {
    if (step("ibv_reg_mr")) return nullptr;
    if ((access & int(IBV_ACCESS_RELAXED_ORDERING)) && !script_.at(pd->context)->relaxed) {
      errno = EINVAL;
      return nullptr;
    }
    auto* const mr = new ScriptedMr;
    mr->mr.context = pd->context;
    mr->mr.pd = pd;
    mr->mr.addr = address;
    mr->mr.length = bytes;
    mr->mr.lkey = next_key_++;
    mr->mr.rkey = next_key_++;
    mr->access = access;
    mrs.insert(mr);
    return &mr->mr;
  }
  int dereg_mr(ibv_mr* mr) noexcept override {
    for (ScriptedMr* known : mrs) {
      if (&known->mr != mr) continue;
      for (const ScriptedQp* qp : qps) {
        EXPECT(qp->qp.pd != mr->pd || qp->attr.qp_state == IBV_QPS_INIT,
               "memory goes while a queue pair could write to it");
      }
      mrs.erase(known);
      delete known;
      return 0;
    }
    EXPECT(false, "a registration is undone that is not there");
    return EINVAL;
  }
  ibv_cq* create_cq(ibv_context* context, int depth) noexcept override {
    if (step("ibv_create_cq")) return nullptr;
    if (depth > script_.at(context)->max_cqe) {
      errno = EINVAL;
      return nullptr;
    }
    auto* const cq = new ScriptedCq;
    cq->cq.context = context;
    cq->cq.cqe = cq->depth = depth;
    cqs.insert(cq);
    return &cq->cq;
  }
  int destroy_cq(ibv_cq* cq) noexcept override {
    ScriptedCq* const known = of(cq);
    EXPECT(known, "a CQ is destroyed that is not there");
    for (const ScriptedQp* qp : qps) EXPECT(qp->qp.send_cq != cq, "its queue pair is alive");
    cqs.erase(known);
    delete known;
    return 0;
  }
  ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* init) noexcept override {
    if (step("ibv_create_qp")) return nullptr;
    const ScriptedDevice& device = *script_.at(pd->context);
    errno = EINVAL;
    if (init->cap.max_inline_data > device.max_inline) return nullptr;
    if (uint64_t(init->cap.max_inline_data) * init->cap.max_send_wr > device.most_for_inline) {
      return nullptr;
    }
    if (init->cap.max_send_wr > uint32_t(device.max_qp_wr)) return nullptr;
    if (init->cap.max_send_sge > uint32_t(device.max_sge)) return nullptr;
    errno = ENOMEM;
    if (qps.size() >= size_t(device.max_qp)) return nullptr;
    auto* const made = new ScriptedQp;
    made->init = *init;
    made->device = device.name;
    made->qp.context = pd->context;
    made->qp.pd = pd;
    made->qp.send_cq = init->send_cq;
    made->qp.recv_cq = init->recv_cq;
    made->qp.qp_num = next_qpn++;
    qps.insert(made);
    return &made->qp;
  }
  int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) noexcept override {
    ScriptedQp& known = *of(qp);
    if (attr->qp_state != IBV_QPS_ERR) {  // closing never fails half-way
      if (const int why = step("ibv_modify_qp")) return why;
    }
    check_step(known.attr.qp_state, *attr, mask);
    const auto keep = [&](int bit, auto member) {
      if (mask & bit) known.attr.*member = attr->*member;
    };
    keep(IBV_QP_STATE, &ibv_qp_attr::qp_state);
    keep(IBV_QP_ACCESS_FLAGS, &ibv_qp_attr::qp_access_flags);
    keep(IBV_QP_PKEY_INDEX, &ibv_qp_attr::pkey_index);
    keep(IBV_QP_PORT, &ibv_qp_attr::port_num);
    keep(IBV_QP_AV, &ibv_qp_attr::ah_attr);
    keep(IBV_QP_PATH_MTU, &ibv_qp_attr::path_mtu);
    keep(IBV_QP_DEST_QPN, &ibv_qp_attr::dest_qp_num);
    keep(IBV_QP_RQ_PSN, &ibv_qp_attr::rq_psn);
    keep(IBV_QP_SQ_PSN, &ibv_qp_attr::sq_psn);
    keep(IBV_QP_TIMEOUT, &ibv_qp_attr::timeout);
    keep(IBV_QP_RETRY_CNT, &ibv_qp_attr::retry_cnt);
    keep(IBV_QP_RNR_RETRY, &ibv_qp_attr::rnr_retry);
    keep(IBV_QP_MAX_QP_RD_ATOMIC, &ibv_qp_attr::max_rd_atomic);
    keep(IBV_QP_MAX_DEST_RD_ATOMIC, &ibv_qp_attr::max_dest_rd_atomic);
    known.mask |= mask;
    return 0;
  }
  int query_qp(ibv_qp* qp, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) noexcept override {
    *attr = of(qp)->attr;
    *init = of(qp)->init;
    return 0;
  }
  int destroy_qp(ibv_qp* qp) noexcept override {
    ScriptedQp* const known = of(qp);
    EXPECT(known, "a queue pair is destroyed that is not there");
    qps.erase(known);
    delete known;
    return 0;
  }
  const char* wc_status_str(ibv_wc_status) noexcept override { return "scripted"; }

 private:
  // What the standard demands of each step.
  static void check_step(ibv_qp_state from, const ibv_qp_attr& attr, int mask) {
    switch (attr.qp_state) {
      case IBV_QPS_INIT:
        EXPECT(from == IBV_QPS_RESET, "INIT from %d", int(from));
        EXPECT(mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
               "INIT with mask %x", mask);
        break;
      case IBV_QPS_RTR:
        EXPECT(from == IBV_QPS_INIT, "RTR from %d", int(from));
        EXPECT(mask == (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                        IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
               "RTR with mask %x", mask);
        break;
      case IBV_QPS_RTS:
        EXPECT(from == IBV_QPS_RTR, "RTS from %d", int(from));
        EXPECT(mask == (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
               "RTS with mask %x", mask);
        break;
      default:
        EXPECT(attr.qp_state == IBV_QPS_ERR, "state %d", int(attr.qp_state));
    }
  }

  int step(const char* call) {
    const int number = int(calls.size());
    calls.emplace_back(call);
    int why = number == fail_at ? fail_with : 0;
    if (!why && refuse) why = refuse(call);
    errno = why;
    return why;
  }

  std::map<const ibv_context*, ScriptedDevice*> script_;
  uint32_t next_key_ = 0x1000;
};

}  // namespace epcomm::testing
