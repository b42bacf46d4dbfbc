// A NIC for one thread that posts and polls: it executes work requests when it is polled, late and
// in turns of its queue pairs, and ends the program when more is under way than its queues hold.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "check.hpp"
#include "common/rdma/rdma.hpp"

namespace epcomm::testing {

constexpr uint32_t kLkey = 11, kDataRkey = 22, kSignalRkey = 33, kSinkLkey = 44;

class ScriptedNic {
 public:
  struct Cq : ibv_cq {
    ScriptedNic* nic = nullptr;
    uint32_t held = 0;  // completions that nobody polled yet
    std::deque<ibv_wc> entries;
  };
  struct Request {
    ibv_send_wr wr;
    ibv_sge piece;
    std::vector<std::byte> inlined;
    int64_t due;  // poll at which it is executed
  };
  struct Qp : ibv_qp {
    Cq* cq = nullptr;
    uint32_t depth = 0;
    uint32_t max_atomics = 0;
    std::deque<Request> flight;  // posted, not executed
    uint64_t posted = 0;
    uint64_t freed = 0;             // slots given back: up to the last completion polled
    std::deque<uint64_t> unpolled;  // number of each completion's request
    uint32_t atomics = 0;           // under way, as the poster knows it
    std::deque<std::pair<uint64_t, bool>> kinds;
    bool broken = false;
    // Test's view.
    uint64_t executed = 0;
    uint32_t most = 0;  // under way at once
    uint32_t most_atomics = 0;
    uint32_t lists = 0;
    std::vector<uint32_t> sizes;  // bytes of the writes, 0 for atomics
  };

  explicit ScriptedNic(uint64_t seed, int max_delay = 0) : random_(seed), max_delay_(max_delay) {
    std::memset(&context_, 0, sizeof context_);
    context_.ops.post_send = &post_send;
    context_.ops.poll_cq = &poll_cq;
  }

  Cq* add_cq(int depth) {
    cqs_.push_back(std::make_unique<Cq>());
    Cq* const cq = cqs_.back().get();
    cq->context = &context_;
    cq->cqe = depth;
    cq->nic = this;
    return cq;
  }
  Qp* add_qp(Cq* cq, uint32_t depth, uint32_t max_atomics) {
    qps_.push_back(std::make_unique<Qp>());
    Qp* const qp = qps_.back().get();
    qp->context = &context_;
    qp->qp_num = 100 + uint32_t(qps_.size());
    qp->cq = cq;
    qp->depth = depth;
    qp->max_atomics = max_atomics;
    return qp;
  }

  // Status of a request instead of its execution; IBV_WC_SUCCESS executes it.
  std::function<ibv_wc_status(const Qp&, const ibv_send_wr&)> fault;
  // What ibv_post_send answers to a request; 0 takes it.
  std::function<int(const Qp&, const ibv_send_wr&)> refuse;
  std::atomic<bool> stalled{false};            // nothing is executed
  std::atomic<const Qp*> stalled_qp{nullptr};  // nothing of this one is

 private:
  static int post_send(ibv_qp* verbs, ibv_send_wr* wr, ibv_send_wr** bad) {
    Qp& qp = *static_cast<Qp*>(verbs);
    ScriptedNic& nic = *qp.cq->nic;
    ++qp.lists;
    for (; wr; wr = wr->next) {
      if (nic.refuse) {
        if (const int why = nic.refuse(qp, *wr)) {
          *bad = wr;
          return why;
        }
      }
      const uint32_t under_way = uint32_t(qp.posted - qp.freed);
      EXPECT(under_way < qp.depth, "queue pair %u: %u under way", qp.qp_num, under_way);
      qp.most = std::max(qp.most, under_way + 1);
      const bool atomic = wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
      if (atomic) {
        ++qp.atomics;
        EXPECT(qp.atomics <= qp.max_atomics, "queue pair %u: %u atomics", qp.qp_num, qp.atomics);
        qp.most_atomics = std::max(qp.most_atomics, qp.atomics);
      }
      qp.kinds.push_back({qp.posted, atomic});
      Request request{*wr, {}, {}, nic.polls_ + nic.random_.below(nic.max_delay_ + 1)};
      if (wr->num_sge > 0) request.piece = wr->sg_list[0];
      if (wr->send_flags & IBV_SEND_INLINE) {
        const std::byte* from = reinterpret_cast<const std::byte*>(request.piece.addr);
        request.inlined.assign(from, from + request.piece.length);
      }
      qp.flight.push_back(std::move(request));
      ++qp.posted;
      uint32_t all = 0;
      for (const auto& other : nic.qps_) {
        if (other->cq == qp.cq) all += uint32_t(other->posted - other->freed);
      }
      EXPECT(all <= uint32_t(qp.cq->cqe), "%u under way, %d completions fit", all, qp.cq->cqe);
    }
    return 0;
  }

  void execute(Qp& qp, Request& request) {
    const ibv_send_wr& wr = request.wr;
    ibv_wc completion{};
    completion.wr_id = wr.wr_id;
    completion.qp_num = qp.qp_num;
    completion.status = qp.broken ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
    if (!qp.broken && fault) completion.status = fault(qp, wr);
    if (completion.status != IBV_WC_SUCCESS) {
      completion.vendor_err = 0x81;
      qp.broken = true;
    } else if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      EXPECT(wr.wr.atomic.rkey == kSignalRkey && request.piece.lkey == kSinkLkey, "keys");
      EXPECT(wr.wr.atomic.remote_addr % 8 == 0 && request.piece.length == 8, "shape");
      auto* const word = reinterpret_cast<uint64_t*>(wr.wr.atomic.remote_addr);
      const uint64_t old = __atomic_fetch_add(word, wr.wr.atomic.compare_add, __ATOMIC_ACQ_REL);
      std::memcpy(reinterpret_cast<void*>(request.piece.addr), &old, 8);
      qp.sizes.push_back(0);
    } else if (wr.num_sge == 0) {
      EXPECT(wr.opcode == IBV_WR_RDMA_WRITE, "opcode %d", int(wr.opcode));
    } else if (!request.inlined.empty()) {
      EXPECT(wr.wr.rdma.rkey == kSignalRkey && request.inlined.size() == 8, "keys");
      uint64_t value;
      std::memcpy(&value, request.inlined.data(), 8);
      __atomic_store_n(reinterpret_cast<uint64_t*>(wr.wr.rdma.remote_addr), value,
                       __ATOMIC_RELEASE);
      qp.sizes.push_back(8);
    } else {
      EXPECT(wr.opcode == IBV_WR_RDMA_WRITE && wr.wr.rdma.rkey == kDataRkey, "keys");
      EXPECT(request.piece.lkey == kLkey, "lkey");
      std::memcpy(reinterpret_cast<void*>(wr.wr.rdma.remote_addr),
                  reinterpret_cast<const void*>(request.piece.addr), request.piece.length);
      qp.sizes.push_back(request.piece.length);
    }
    if (completion.status == IBV_WC_SUCCESS) ++qp.executed;
    if (completion.status != IBV_WC_SUCCESS || wr.send_flags & IBV_SEND_SIGNALED) {
      qp.cq->entries.push_back(completion);
      EXPECT(qp.cq->entries.size() <= size_t(qp.cq->cqe), "completions are lost");
    }
  }

  static int poll_cq(ibv_cq* verbs, int room, ibv_wc* out) {
    Cq& cq = *static_cast<Cq*>(verbs);
    ScriptedNic& nic = *cq.nic;
    ++nic.polls_;
    if (!nic.stalled.load(std::memory_order_relaxed)) {
      for (auto& qp : nic.qps_) {
        if (qp->cq != &cq || qp.get() == nic.stalled_qp.load(std::memory_order_relaxed)) continue;
        while (!qp->flight.empty() && qp->flight.front().due <= nic.polls_) {
          nic.execute(*qp, qp->flight.front());
          qp->flight.pop_front();
          if (nic.random_.one_in(2)) break;
        }
      }
    }
    int count = 0;
    for (; count < room && !cq.entries.empty(); ++count) {
      out[count] = cq.entries.front();
      cq.entries.pop_front();
      for (auto& qp : nic.qps_) {
        if (qp->qp_num != out[count].qp_num) continue;
        // wr_id ends in the request's number, modulo 2^32: all up to it are given back.
        while (qp->freed <= qp->posted && !qp->kinds.empty()) {
          const auto [number, atomic] = qp->kinds.front();
          if (int32_t(uint32_t(number) - uint32_t(out[count].wr_id)) > 0) break;
          if (atomic) --qp->atomics;
          qp->kinds.pop_front();
          qp->freed = number + 1;
        }
      }
    }
    return count;
  }

  ibv_context context_;
  Random random_;
  const int max_delay_;
  int64_t polls_ = 0;
  std::vector<std::unique_ptr<Cq>> cqs_;
  std::vector<std::unique_ptr<Qp>> qps_;
};

}  // namespace epcomm::testing
