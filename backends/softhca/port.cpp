#include "softhca/port.hpp"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "common/clock.hpp"
#include "common/native_thread.hpp"

namespace epcomm::softhca {
namespace {

constexpr size_t kPage = 4096;
constexpr int64_t kUs = 1000, kMs = 1000 * kUs;
constexpr int64_t kYieldNs = 100 * kUs;
constexpr int64_t kFirstNapNs = 10 * kUs, kLongestNapNs = 100 * kUs, kIdleNapNs = 300 * kUs;
constexpr int64_t kIdleNs = 200 * kMs;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

bool RingMemory::make(size_t bytes, RingMemory* out) noexcept {
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  void* data = nullptr;
  if (posix_memalign(&data, kPage, whole) != 0) return false;
  std::memset(data, 0, whole);
  out->data_.reset(static_cast<std::byte*>(data));
  return true;
}

const char* violation_text(uint8_t code) noexcept {
  switch (code) {
    case kStaleSlot:
      return "the slot holds a work request with another index (built late, or without a fence)";
    case kWrongQueue:
      return "the work request or the doorbell names another queue pair";
    case kBadShape:
      return "opcode, length, flags or reserved bits of the work request are wrong";
    case kTooFar:
      return "a doorbell or its record is farther ahead than the queue is deep";
    case kBackwards:
      return "a doorbell record went backwards";
    case kOverrun:
      return "slots or entries were used again before their completion";
    case kMisaligned:
      return "an atomic's address is no multiple of 8";
    case kTooLong:
      return "a message is longer than 1 GiB";
    case kBadKey:
      return "no such memory key, or bytes outside its region";
    case kNoRights:
      return "the memory key does not allow this access";
    case kNoResponder:
      return "the queue pair at the other end does not answer";
    case kPlanned:
      return "planned fault";
    case kPortIsDown:
      return "the port is down";
    case kNoMemory:
      return "the software HCA has no memory";
    default:
      return "";
  }
}

Port::Locked::Locked(Port* port) : port(port) {
  port->waiting_.fetch_add(1);
  port->mutex_.lock();
}

Port::Locked::~Locked() {
  port->mutex_.unlock();
  port->waiting_.fetch_sub(1);
}

Port::Port(const PortOptions& options, const Gid& gid, std::shared_ptr<Regions> regions)
    : options_(options),
      gid_(gid),
      regions_(std::move(regions)),
      plan_(options.faults, options.number, options.seed) {
  Chance chance(uint64_t(gid[0]) | uint64_t(gid[1]) << 8 | uint64_t(options.number) << 16);
  next_qpn_ = 0x100 + uint32_t(chance.below(0x8000));
  next_key_ = uint32_t(chance.next() & 0x3fffff00);
}

Port::~Port() { stop(); }

void Port::stop() noexcept {
  if (!running_) return;
  running_ = false;
  if (guard_.inherited()) return;  // the thread is the parent's
  stopping_.store(true);
  pthread_join(thread_, nullptr);
}

bool Port::start() {
  if (running_) return true;
  running_ = common::start_native_thread(&thread_, &Port::run, this) == 0;
  return running_;
}

uint32_t Port::new_key() noexcept {
  const Locked lock(this);
  return next_key_ += 0x100 + uint32_t(plan_.chance().below(0x100));
}

bool Port::is_down() noexcept {
  const Locked lock(this);
  return down_at(common::now_ns());
}

Cq* Port::create_cq(uint32_t depth) {
  auto cq = std::make_unique<Cq>();
  cq->depth = depth;
  const size_t bytes = size_t(depth) * sizeof(mlx5::Cqe);
  if (!RingMemory::make(bytes + 64, &cq->memory)) return nullptr;
  cq->ring = reinterpret_cast<mlx5::Cqe*>(cq->memory.data());
  std::memset(static_cast<void*>(cq->ring), 0xff, bytes);
  cq->record = reinterpret_cast<uint32_t*>(cq->memory.data() + bytes);
  const Locked lock(this);
  cqs_.push_back(std::move(cq));
  return cqs_.back().get();
}

bool Port::destroy_cq(Cq* cq) {
  const Locked lock(this);
  if (cq->users > 0) return false;
  cqs_.erase(std::find_if(cqs_.begin(), cqs_.end(), [&](auto& one) { return one.get() == cq; }));
  return true;
}

Qp* Port::create_qp(Cq* cq, uint32_t depth, bool all_signalled) {
  auto qp = std::make_unique<Qp>();
  const size_t bytes = size_t(depth) * mlx5::kBlockBytes;
  if (!RingMemory::make(bytes + 128, &qp->memory)) return nullptr;
  qp->depth = depth;
  qp->all_signalled = all_signalled;
  qp->cq = cq;
  qp->sq = reinterpret_cast<mlx5::Block*>(qp->memory.data());
  qp->record = reinterpret_cast<uint32_t*>(qp->memory.data() + bytes);
  qp->doorbell = reinterpret_cast<uint64_t*>(qp->memory.data() + bytes + 64);
  const Locked lock(this);
  qps_.reserve(qps_.size() + 1);
  order_.reserve(order_.size() + 1);
  if (broken_ || !start()) return nullptr;
  qp->qpn = next_qpn_++ & 0xffffff;
  qp->number_on_port = qps_made_++;
  ++cq->users;
  qps_.push_back(std::move(qp));
  order_.push_back(qps_.back().get());
  return qps_.back().get();
}

void Port::destroy_qp(Qp* qp) {
  const Locked lock(this);
  forget_pending(qp);
  regions_->set_answers(gid_, qp->qpn, false);
  --qp->cq->users;
  order_.erase(std::find(order_.begin(), order_.end(), qp));
  qps_.erase(std::find_if(qps_.begin(), qps_.end(), [&](auto& one) { return one.get() == qp; }));
}

void Port::forget_pending(Qp* qp) {
  auto& pending = qp->cq->pending;
  pending.erase(std::remove_if(pending.begin(), pending.end(),
                               [&](const Cq::Pending& one) { return one.qp == qp; }),
                pending.end());
}

void Port::reset(Qp* qp) {
  qp->flight.clear();
  forget_pending(qp);
  qp->last_doorbell = 0;
  qp->last_record = 0;
  qp->posted = qp->fetched = qp->done = qp->covered = 0;
  qp->fetch_at_ns = qp->deaf_until_ns = qp->last_due_ns = qp->stalled_ns = 0;
  qp->silent_until_ns = 0;
  qp->refused = false;
  qp->first_violation = kNone;
  qp->record[0] = qp->record[1] = 0;
  *qp->doorbell = 0;
  qp->state = QpState::kReset;
  regions_->set_answers(gid_, qp->qpn, false);
}

void Port::fail(Qp* qp) {
  qp->state = QpState::kError;
  regions_->set_answers(gid_, qp->qpn, false);
  look(qp, common::now_ns());
  flush(qp, common::now_ns());
}

void Port::set_state(Qp* qp, QpState state) {
  qp->state = state;
  if (state == QpState::kReceiving) regions_->set_answers(gid_, qp->qpn, true);
  if (state == QpState::kSending && !first_connection_ns_) first_connection_ns_ = common::now_ns();
}

uint8_t Port::violation(Qp* qp) {
  const Locked lock(this);
  return qp->first_violation;
}

// The thread -------------------------------------------------------------------------------------

void* Port::run(void* self) noexcept {
  pthread_setname_np(pthread_self(), "epcomm-softhca");
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // short naps stay short
  static_cast<Port*>(self)->loop();
  return nullptr;
}

void Port::loop() noexcept {
  int64_t idle_since = common::now_ns(), nap = kFirstNapNs;
  while (!stopping_.load(std::memory_order_relaxed)) {
    while (waiting_.load(std::memory_order_relaxed) > 0) sched_yield();
    int64_t now = common::now_ns(), due;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      bool busy = false;
      try {
        busy = pass(now);
      } catch (const std::bad_alloc&) {
        return break_down();
      }
      if (busy) {
        idle_since = now;
        nap = kFirstNapNs;
        continue;
      }
      due = next_due();
    }
    now = common::now_ns();
    const int64_t idle = now - idle_since;
    if (idle < options_.spin_ns) {
      for (int i = 0; i < 20; ++i) pause();
    } else if (idle < options_.spin_ns + kYieldNs) {
      sched_yield();
    } else {
      const int64_t length = std::min(nap, std::max<int64_t>(due - now, 0));
      if (length > 0) {
        const timespec time = common::to_timespec(length);
        nanosleep(&time, nullptr);
      }
      nap = std::min(nap * 2, idle > kIdleNs ? kIdleNapNs : kLongestNapNs);
    }
  }
}

// Nothing is done any more, without a word: completions need memory. explain() knows why.
void Port::break_down() noexcept {
  broken_ = true;
  for (const auto& qp : qps_) {
    violate(qp.get(), kNoMemory);
    qp->state = QpState::kError;
  }
}

// Whether anything was done.
bool Port::pass(int64_t now) {
  bool busy = false;
  if (plan_.any(FaultKind::kInterleave)) {
    for (size_t i = order_.size(); i > 1; --i) {
      std::swap(order_[i - 1], order_[size_t(plan_.chance().below(int64_t(i)))]);
    }
  }
  ++turn_;
  for (size_t i = 0; i < order_.size(); ++i) {
    Qp* const qp = order_[(i + turn_) % order_.size()];
    if (qp->state < QpState::kSending) continue;
    busy |= look(qp, now);
    if (qp->state == QpState::kError) {
      if (qp->done < qp->posted) {
        flush(qp, now);
        busy = true;
      }
      continue;
    }
    busy |= fetch(qp, now);
    busy |= send(qp, now);
    busy |= carry_out(qp, now);
  }
  for (const auto& cq : cqs_) busy |= write_cqes(cq.get(), now);
  return busy;
}

// When something is due that no doorbell announces.
int64_t Port::next_due() const {
  int64_t due = INT64_MAX;
  for (const Qp* qp : order_) {
    if (qp->silent_until_ns) due = std::min(due, qp->silent_until_ns);
    const bool stuck = qp->silent_until_ns && qp->silent_left == 0;
    if (!stuck && !qp->flight.empty()) due = std::min(due, qp->flight.front().due_ns);
    if (qp->fetch_at_ns) due = std::min(due, qp->fetch_at_ns);
    if (qp->deaf_until_ns) due = std::min(due, qp->deaf_until_ns);
  }
  for (const auto& cq : cqs_) {
    if (!cq->pending.empty() && !cq->overrun) due = std::min(due, cq->pending.front().due_ns);
  }
  return due;
}

bool Port::down_at(int64_t now) const noexcept {
  if (!first_connection_ns_) return false;
  const int64_t age = now - first_connection_ns_;
  for (const Fault& fault : plan_.of(FaultKind::kPortDown)) {
    if (age >= fault.at_ns && age - fault.at_ns < fault.ns) return true;
  }
  return false;
}

double Port::rate(int64_t) const noexcept {
  const auto& slow = plan_.of(FaultKind::kSlowPort);
  return slow.empty() ? options_.gbps : slow.front().gbps;
}

}  // namespace epcomm::softhca
