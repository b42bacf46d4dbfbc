// What the hardware does with a queue pair: notice, fetch, check, carry out, complete.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/clock.hpp"
#include "softhca/port.hpp"

namespace epcomm::softhca {
namespace {

using mlx5::Block;
using mlx5::Control;
using mlx5::Segment;

constexpr size_t kMostInFlight = 128;         // fetched and not carried out, per queue pair
constexpr int kBurst = 32;                    // carried out per queue pair and turn
constexpr int64_t kWireAheadNs = 200 * 1000;  // how far ahead the wire is given away
constexpr uint64_t kPiece = 4096;             // of a shuffled payload
constexpr uint32_t kPoison = 0xdeadbeef;

uint64_t units_bytes(const Block& block) {
  const Control control = mlx5::read_control(block.segment[0]);
  switch (control.opcode) {
    case mlx5::kWrite:
    case mlx5::kWriteImm:
    case mlx5::kRead:
      return control.units < 3 ? 0 : mlx5::read_byte_count(block.segment[2]) & ~mlx5::kInlineFlag;
    case mlx5::kFetchAdd:
    case mlx5::kCompareSwap:
      return 8;
    default:
      return 0;
  }
}

}  // namespace

void Port::violate(Qp* qp, uint8_t code) {
  if (qp->first_violation == kNone) qp->first_violation = code;
}

// Takes in the doorbell and its record. Whether anything was new.
bool Port::look(Qp* qp, int64_t now) {
  const uint64_t doorbell = __atomic_load_n(qp->doorbell, __ATOMIC_ACQUIRE);
  const uint64_t before = qp->posted;
  const bool rang = doorbell != qp->last_doorbell;
  bool see_record = false;
  if (rang) {
    const uint64_t last = qp->last_doorbell;
    qp->last_doorbell = doorbell;
    if (const Fault* lost = plan_.strikes(FaultKind::kLoseDoorbell, qp->number_on_port)) {
      qp->deaf_until_ns = now + std::max<int64_t>(lost->ns, 1);
      return false;
    }
    qp->deaf_until_ns = 0;
    if (mlx5::swap32(uint32_t(doorbell >> 32)) >> 8 != qp->qpn) {
      violate(qp, kWrongQueue);
    } else {
      notice(qp, uint16_t(mlx5::swap32(uint32_t(doorbell)) >> 8), false);
      if (last && plan_.strikes(FaultKind::kDuplicateDoorbell, qp->number_on_port)) {
        // The one before again may be older than 16 bits of it tell, if a record was ahead of it.
        const uint16_t index = uint16_t(mlx5::swap32(uint32_t(last)) >> 8);
        if (uint16_t(uint16_t(qp->posted) - index) <= qp->depth) notice(qp, index, false);
        notice(qp, uint16_t(mlx5::swap32(uint32_t(doorbell)) >> 8), false);
      }
    }
    see_record = true;
  } else if (qp->deaf_until_ns && now >= qp->deaf_until_ns) {
    qp->deaf_until_ns = 0;
    see_record = true;
  } else if (plan_.any(FaultKind::kEarlyFetch)) {
    see_record = plan_.strikes(FaultKind::kEarlyFetch, qp->number_on_port) != nullptr;
  }
  if (see_record) {
    const uint32_t record = mlx5::swap32(__atomic_load_n(&qp->record[1], __ATOMIC_ACQUIRE));
    notice(qp, uint16_t(record), true);
  }
  return rang || qp->posted != before;
}

// `index` is the number behind the last work request, or, in a doorbell, also the last one's own.
void Port::notice(Qp* qp, uint16_t index, bool is_record) {
  if (is_record) {
    const uint16_t back = uint16_t(qp->last_record - index);
    if (back != 0 && back <= qp->depth) violate(qp, kBackwards);
    qp->last_record = index;
  }
  const uint16_t ahead = uint16_t(index - uint16_t(qp->posted));
  if (ahead == 0) return;
  if (ahead <= qp->depth) {
    if (qp->posted + ahead > qp->covered + qp->depth) {
      violate(qp, kOverrun);
      return;
    }
    qp->posted += ahead;
  } else if (uint16_t(-ahead) > qp->depth) {
    violate(qp, kTooFar);
  }
}

// Copies work requests out of the ring. Whether there was one.
bool Port::fetch(Qp* qp, int64_t now) {
  bool any = false;
  if (qp->first_violation != kNone && !qp->refused) {  // before any work request was looked at
    Work work;
    work.number = qp->fetched;
    work.syndrome = mlx5::kLocalQp;
    work.vendor = qp->first_violation;
    work.due_ns = now;
    work.on_wire = true;
    qp->flight.push_back(std::move(work));
    qp->posted = std::max(qp->posted, ++qp->fetched);
    qp->refused = true;
    return true;
  }
  while (!qp->refused && qp->fetched < qp->posted && qp->flight.size() < kMostInFlight) {
    if (qp->fetch_at_ns == 0) {
      if (const Fault* late =
              plan_.strikes(FaultKind::kLateFetch, qp->number_on_port, int64_t(qp->fetched))) {
        qp->fetch_at_ns = now + 1 + plan_.up_to(late->ns);
      }
    }
    if (qp->fetch_at_ns > now) return any;
    qp->fetch_at_ns = 0;
    Block* const slot = &qp->sq[qp->fetched & (qp->depth - 1)];
    Work work;
    work.block = *slot;
    work.number = qp->fetched++;
    const Control control = mlx5::read_control(work.block.segment[0]);
    const Verdict verdict = check(*qp, work.block.segment, work.number);
    work.syndrome = verdict.syndrome;
    work.vendor = verdict.vendor;
    if (work.syndrome) {
      qp->refused = true;
      violate(qp, work.vendor);
    } else if (control.opcode == mlx5::kWrite && control.units == 3 &&
               plan_.strikes(FaultKind::kEarlyRead, qp->number_on_port)) {
      const Segment& data = work.block.segment[2];
      const uint32_t bytes = mlx5::read_byte_count(data);
      std::byte* from;
      const auto lock = regions_->reading();
      if (!(bytes & mlx5::kInlineFlag) && !local(data, bytes, false, &from).syndrome) {
        work.payload.assign(from, from + bytes);
        work.read_early = true;
      }
    }
    if (plan_.strikes(FaultKind::kPoison, qp->number_on_port)) {
      for (Segment& segment : slot->segment) {
        for (uint32_t& word : segment.word) word = kPoison;
      }
    }
    qp->flight.push_back(std::move(work));
    any = true;
  }
  return any;
}

// What a NIC refuses before it looks at memory.
Port::Verdict Port::check(const Qp& qp, const Segment* segment, uint64_t number) const {
  const Control control = mlx5::read_control(segment[0]);
  if (control.index != uint16_t(number)) return {mlx5::kLocalQp, kStaleSlot};
  if (control.qpn != qp.qpn) return {mlx5::kLocalQp, kWrongQueue};
  const uint8_t fence = control.flags >> 5, events = control.flags >> 2 & 3;
  bool shaped = control.opmod == 0 && control.reserved == 0 && fence <= 4 && events <= 2 &&
                (control.flags & 0x11) == 0;
  const bool has_imm = control.opcode == mlx5::kWriteImm || control.opcode == mlx5::kSendImm;
  shaped &= has_imm || control.imm == 0;
  switch (control.opcode) {
    case mlx5::kNop:
      shaped &= control.units == 1;
      break;
    case mlx5::kDump:
      shaped &= control.units == 2;
      break;
    case mlx5::kWrite:
    case mlx5::kWriteImm:
    case mlx5::kRead: {
      shaped &= segment[1].word[3] == 0;
      if (control.units == 2) break;  // no bytes at all
      const uint32_t count = mlx5::read_byte_count(segment[2]);
      if (count & mlx5::kInlineFlag) {
        const uint32_t bytes = count & ~mlx5::kInlineFlag;
        shaped &= control.opcode != mlx5::kRead && bytes <= mlx5::kMaxInline &&
                  control.units == 2 + (4 + bytes + 15) / 16;
      } else {
        shaped &= control.units == 3 && count != 0;  // 0 would mean 2 GiB
        if (count > mlx5::kMaxMessage) return {mlx5::kLocalLength, kTooLong};
      }
      break;
    }
    case mlx5::kFetchAdd:
    case mlx5::kCompareSwap:
      shaped &=
          control.units == 4 && segment[1].word[3] == 0 && mlx5::read_byte_count(segment[3]) == 8;
      if (mlx5::read_remote(segment[1]).address % 8) return {mlx5::kRemoteInvalid, kMisaligned};
      break;
    default:
      shaped = false;  // sends and what needs more than a block: this model has no receive queue
  }
  if (!shaped) return {mlx5::kLocalQp, kBadShape};
  return {};
}

// Gives the wire to work requests, in order. Whether any got it.
bool Port::send(Qp* qp, int64_t now) {
  bool any = false;
  const double gbps = rate(now);
  for (Work& work : qp->flight) {
    if (work.on_wire) continue;
    if (gbps > 0 && wire_free_ns_ - now > kWireAheadNs) break;
    int64_t due = now;
    if (gbps > 0 && !work.syndrome) {  // what is refused is not sent
      wire_free_ns_ =
          std::max(wire_free_ns_, now) + int64_t(double(units_bytes(work.block)) * 8 / gbps);
      due = wire_free_ns_;
    }
    due += options_.latency_ns;
    if (const Fault* delay =
            plan_.strikes(FaultKind::kDelay, qp->number_on_port, int64_t(work.number))) {
      due += plan_.up_to(delay->ns);
    }
    work.due_ns = qp->last_due_ns = std::max(due, qp->last_due_ns);
    work.on_wire = true;
    any = true;
    if (gbps > 0) break;  // the wire goes round
  }
  return any;
}

bool Port::carry_out(Qp* qp, int64_t now) {
  int burst = kBurst;
  if (plan_.any(FaultKind::kInterleave)) burst = 1 + int(plan_.chance().below(4));
  bool any = false;
  if (qp->silent_until_ns && now >= qp->silent_until_ns) {
    qp->silent_until_ns = 0;
    complete(qp, qp->unheard, {mlx5::kRetryExceeded, kPlanned}, now);
    return true;
  }
  for (; burst > 0 && !qp->flight.empty() && qp->state == QpState::kSending; --burst) {
    Work& work = qp->flight.front();
    if (!work.on_wire || work.due_ns > now) break;
    Verdict verdict{work.syndrome, work.vendor};
    const Fault* const deaf =
        qp->silent_until_ns || verdict.syndrome
            ? nullptr
            : plan_.strikes(FaultKind::kNoAck, qp->number_on_port, int64_t(work.number));
    if (deaf) {
      qp->silent_until_ns = now + std::max<int64_t>(deaf->ns, 1);
      qp->silent_left = deaf->count;
      qp->unheard = work;
    }
    if (qp->silent_until_ns) {
      if (qp->silent_left == 0 || verdict.syndrome) break;
      --qp->silent_left;
      execute(qp, &work);
      qp->flight.pop_front();
      any = true;
      continue;
    }
    if (!verdict.syndrome) {
      if (const Fault* planned =
              plan_.strikes(FaultKind::kError, qp->number_on_port, int64_t(work.number))) {
        verdict = {planned->syndrome, kPlanned};
      } else if (down_at(now)) {
        if (!qp->stalled_ns) qp->stalled_ns = now;
        if (!qp->retry_ns || now - qp->stalled_ns < qp->retry_ns) {
          work.due_ns = now + 100 * 1000;
          break;
        }
        verdict = {mlx5::kRetryExceeded, kPortIsDown};
      } else {
        qp->stalled_ns = 0;
        verdict = execute(qp, &work);
      }
    }
    complete(qp, work, verdict, now);
    any = true;
    if (verdict.syndrome) break;
    qp->flight.pop_front();
  }
  return any;
}

Port::Verdict Port::local(const Segment& data, uint64_t bytes, bool write, std::byte** at) {
  const mlx5::Local named = mlx5::read_local(data);
  const Region* const region = regions_->find(gid_, named.lkey);
  *at = region ? region->find(named.address, bytes) : nullptr;
  if (!*at) return {mlx5::kLocalProtection, kBadKey};
  if (write && !(region->access & kLocalWrite)) return {mlx5::kLocalProtection, kNoRights};
  return {};
}

Port::Verdict Port::remote(const Qp& qp, const Segment& segment, uint64_t bytes, unsigned right,
                           std::byte** at) {
  if (!regions_->answers(qp.remote_gid, qp.remote_qpn)) {
    return {mlx5::kRetryExceeded, kNoResponder};
  }
  const mlx5::Remote named = mlx5::read_remote(segment);
  const Region* const region = regions_->find(qp.remote_gid, named.rkey);
  *at = region ? region->find(named.address, bytes) : nullptr;
  if (!*at) return {mlx5::kRemoteAccess, kBadKey};
  if (!(region->access & right)) return {mlx5::kRemoteAccess, kNoRights};
  return {};
}

void Port::copy(std::byte* to, const std::byte* from, uint64_t bytes, bool shuffled) {
  if (!shuffled || bytes < 2) {
    std::memmove(to, from, bytes);
    return;
  }
  const uint64_t piece = std::max<uint64_t>(1, std::min(kPiece, bytes / 8 + 1));
  std::vector<uint64_t> begins;
  for (uint64_t begin = 0; begin < bytes; begin += piece) begins.push_back(begin);
  for (size_t i = begins.size(); i > 1; --i) {
    std::swap(begins[i - 1], begins[size_t(plan_.chance().below(int64_t(i)))]);
  }
  for (const uint64_t begin : begins) {
    std::memmove(to + begin, from + begin, std::min(piece, bytes - begin));
  }
}

Port::Verdict Port::execute(Qp* qp, Work* work) {
  const Control control = mlx5::read_control(work->block.segment[0]);
  if (options_.null_mover || control.opcode == mlx5::kNop) return {};
  const auto lock = regions_->reading();
  return move(qp, work, control);
}

// Under the regions' lock.
Port::Verdict Port::move(Qp* qp, Work* work, const Control& control) {
  const Segment* const segment = work->block.segment;
  const bool shuffled = plan_.strikes(FaultKind::kShuffle, qp->number_on_port) != nullptr;
  std::byte *here = nullptr, *there = nullptr;
  Verdict verdict;
  switch (control.opcode) {
    case mlx5::kDump:
      return local(segment[1], mlx5::read_byte_count(segment[1]), false, &here);
    case mlx5::kWriteImm:
      return {mlx5::kRnrRetryExceeded, kNoResponder};  // nobody has posted a receive
    case mlx5::kWrite:
    case mlx5::kRead: {
      const bool is_read = control.opcode == mlx5::kRead;
      const uint32_t count = control.units < 3 ? 0 : mlx5::read_byte_count(segment[2]);
      const uint64_t bytes = count & ~mlx5::kInlineFlag;
      if (count & mlx5::kInlineFlag) {
        here = reinterpret_cast<std::byte*>(&work->block.segment[2].word[1]);
      } else if (work->read_early) {
        here = work->payload.data();
      } else if (control.units >= 3) {
        verdict = local(segment[2], bytes, is_read, &here);
        if (verdict.syndrome) return verdict;
      }
      if (bytes == 0) {
        return regions_->answers(qp->remote_gid, qp->remote_qpn)
                   ? Verdict{}
                   : Verdict{mlx5::kRetryExceeded, kNoResponder};
      }
      verdict = remote(*qp, segment[1], bytes, is_read ? kRemoteRead : kRemoteWrite, &there);
      if (verdict.syndrome) return verdict;
      if (is_read) {
        copy(here, there, bytes, shuffled);
      } else if (bytes == 8 && reinterpret_cast<uintptr_t>(there) % 8 == 0) {
        // An ordered write may be a signal: one store, after all that came before.
        uint64_t value;
        std::memcpy(&value, here, 8);
        __atomic_store_n(reinterpret_cast<uint64_t*>(there), value, __ATOMIC_RELEASE);
      } else {
        copy(there, here, bytes, shuffled);
      }
      return {};
    }
    default: {  // atomics
      verdict = local(segment[3], 8, true, &here);
      if (verdict.syndrome) return verdict;
      verdict = remote(*qp, segment[1], 8, kRemoteAtomic, &there);
      if (verdict.syndrome) return verdict;
      uint64_t* const word = reinterpret_cast<uint64_t*>(there);
      uint64_t old;
      if (control.opcode == mlx5::kFetchAdd) {
        old = __atomic_fetch_add(word, mlx5::read_long(segment[2], 0), __ATOMIC_SEQ_CST);
      } else {
        old = mlx5::read_long(segment[2], 2);
        __atomic_compare_exchange_n(word, &old, mlx5::read_long(segment[2], 0), false,
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
      }
      std::memcpy(here, &old, 8);
      return {};
    }
  }
}

// Completions ------------------------------------------------------------------------------------

void Port::complete(Qp* qp, const Work& work, Verdict verdict, int64_t now) {
  qp->done = work.number + 1;
  const Control control = mlx5::read_control(work.block.segment[0]);
  if (verdict.syndrome) {
    add_cqe(qp, work.number, control.opcode, verdict, now);
    violate(qp, verdict.vendor);
    qp->state = QpState::kError;
    regions_->set_answers(gid_, qp->qpn, false);
    flush(qp, now);
  } else if (qp->all_signalled || (control.flags & 0x0c) == mlx5::kSignalled) {
    add_cqe(qp, work.number, control.opcode, {}, now);
  }
}

// A queue pair in ERROR gives back all that was posted.
void Port::flush(Qp* qp, int64_t now) {
  qp->flight.clear();
  const bool once = plan_.any(FaultKind::kFlushOnce);
  for (; qp->done < qp->posted; ++qp->done) {
    if (once && qp->done + 1 < qp->posted) continue;
    add_cqe(qp, qp->done, mlx5::kNop, {mlx5::kFlushed, 0}, now);
  }
  qp->fetched = qp->done;
}

void Port::add_cqe(Qp* qp, uint64_t number, uint8_t opcode, Verdict verdict, int64_t now) {
  if (plan_.strikes(FaultKind::kLoseCqe, qp->number_on_port, int64_t(number))) return;
  Cq::Pending pending{};
  pending.cqe.word[13] = mlx5::cqe_error({verdict.vendor, verdict.syndrome});
  const uint8_t kind = verdict.syndrome ? mlx5::kCqeRequestError : mlx5::kCqeRequest;
  const uint64_t tail = mlx5::cqe_tail({opcode, qp->qpn, uint16_t(number), 0, kind, 0});
  std::memcpy(&pending.cqe.word[14], &tail, 8);
  pending.qp = qp;
  pending.number = number;
  int64_t due = now;
  if (const Fault* late =
          plan_.strikes(FaultKind::kCqeDelay, qp->number_on_port, int64_t(number))) {
    due += plan_.up_to(late->ns);
  }
  if (const Fault* burst = plan_.strikes(FaultKind::kCoalesce, qp->number_on_port)) {
    if (burst->ns > 0) due = (due / burst->ns + 1) * burst->ns;
  }
  auto& queue = qp->cq->pending;
  pending.due_ns = queue.empty() ? due : std::max(due, queue.back().due_ns);
  queue.push_back(pending);
}

bool Port::write_cqes(Cq* cq, int64_t now) {
  bool any = false;
  while (!cq->overrun && !cq->pending.empty() && cq->pending.front().due_ns <= now) {
    const Cq::Pending& next = cq->pending.front();
    const uint32_t consumed = mlx5::swap32(__atomic_load_n(cq->record, __ATOMIC_ACQUIRE));
    if (((cq->produced - consumed) & 0xffffff) >= cq->depth) {
      // As on hardware: the queue is lost, and with it all that complete to it, without a word.
      cq->overrun = true;
      for (const auto& qp : qps_) {
        if (qp->cq != cq) continue;
        violate(qp.get(), kOverrun);
        qp->state = QpState::kError;
      }
      break;
    }
    mlx5::Cqe* const entry = &cq->ring[cq->produced & (cq->depth - 1)];
    const uint8_t owner = cq->produced / cq->depth & 1;
    ++cq->produced;
    std::memcpy(static_cast<void*>(entry), &next.cqe, 56);
    uint64_t tail;
    std::memcpy(&tail, &next.cqe.word[14], 8);
    tail |= uint64_t(owner) << 56;
    // The rest of it first: whoever sees the owner bit sees all.
    __atomic_store_n(reinterpret_cast<uint64_t*>(&entry->word[14]), tail, __ATOMIC_RELEASE);
    next.qp->covered = std::max(next.qp->covered, next.number + 1);
    cq->pending.pop_front();
    any = true;
  }
  return any;
}

}  // namespace epcomm::softhca
