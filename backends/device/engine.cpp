#include "device/engine.hpp"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/clock.hpp"
#include "common/errors.hpp"
#include "epcomm/agreement.hpp"

namespace epcomm::device {

using namespace common;

namespace {

constexpr int64_t kSecond = 1000 * 1000 * 1000;
constexpr int64_t kInterruptEvery = 50 * 1000 * 1000;
constexpr int64_t kSpin = 2 * 1000 * 1000;  // an agreement among ranks that come together is quick
constexpr int64_t kNap = 50 * 1000;
// After a peer's process ended, kernels end by themselves; a kernel that has not begun cannot.
constexpr int64_t kLossGrace = 2 * kSecond;

uint64_t load_acquire(const uint64_t* at) {
  return reinterpret_cast<const std::atomic<uint64_t>*>(at)->load(std::memory_order_acquire);
}

void nap() {
  const timespec pause{0, kNap};
  nanosleep(&pause, nullptr);
}

const char* phase_name(int phase) {
  static const char* const names[] = {"entry", "credit", "data", "done"};
  return phase >= 0 && phase < 4 ? names[phase] : "unknown phase";
}

}  // namespace

Routing::~Routing() {
  if (!core_) return;
  core_->free(sent_);
  core_->free(received_);
}

Strided Engine::strided(const Rows& rows) noexcept {
  Strided made{};
  made.data = reinterpret_cast<const char*>(rows.data);
  made.row_stride = rows.row_stride;
  made.col_stride = rows.col_stride;
  made.row_bytes = rows.row_bytes();
  made.itemsize = rows.itemsize;
  made.packed = rows.packed() ? 1 : 0;
  return made;
}

// ---- life

Status Engine::open(EngineOptions options) noexcept {
  return guarded([&] {
    options_ = std::move(options);
    const HeapShape& shape = options_.shape;
    const int ranks = shape.num_ranks, experts = int(options_.expert_rank.size());
    if (ranks > kMaxRanks) {
      return error(Code::kUnsupported, -1, "%d ranks; allowed on GPU memory: at most %d", ranks,
                   kMaxRanks);
    }
    layout_ = heap_layout(shape);
    EPCOMM_RETURN_IF_ERROR(Core::create(options_.device, &core_));
    const Driver& driver = core_->driver();
    ContextScope scope(driver, core_->context());
    EPCOMM_RETURN_IF_ERROR(scope.status());

    // Own tables and the kernels' state.
    std::vector<int32_t> local, counts(size_t(ranks), 0);
    for (int32_t owner : options_.expert_rank) local.push_back(counts[size_t(owner)]++);
    num_local_ = counts[size_t(options_.rank)];
    const uint64_t state_bytes = align_up(sizeof(DeviceState), 256);
    const uint64_t table_bytes = align_up(uint64_t(experts) * 4, 256);
    const uint64_t bytes = state_bytes + 3 * table_bytes;
    EPCOMM_RETURN_IF_ERROR(core_->allocate(bytes, &memory_));
    std::vector<char> image(bytes, 0);
    DeviceState state{};
    state.bad_pick = ~uint64_t(0);
    state.slot = -1;
    std::memcpy(image.data(), &state, sizeof state);
    std::memcpy(&image[state_bytes], options_.expert_rank.data(), size_t(experts) * 4);
    std::memcpy(&image[state_bytes + table_bytes], local.data(), size_t(experts) * 4);
    EPCOMM_RETURN_IF_ERROR(
        driver.check(driver.cuMemcpyHtoDAsync(memory_, image.data(), bytes, core_->stream()),
                     "cuMemcpyHtoDAsync"));
    EPCOMM_RETURN_IF_ERROR(
        driver.check(driver.cuStreamSynchronize(core_->stream()), "cuStreamSynchronize"));

    // What the host reads.
    const uint64_t report_bytes = align_up(
        kReportRowsOffset + 8 * (uint64_t(ranks) * uint64_t(ranks) + uint64_t(num_local_)), 256);
    const uint64_t errors_bytes = align_up(sizeof(Errors), 256);
    const uint64_t text_bytes = align_up(kEntryTextBytes, 256);
    const uint64_t records_bytes = uint64_t(ranks) * 2 * layout_.entry_stride;
    void* pinned = nullptr;
    EPCOMM_RETURN_IF_ERROR(driver.check(
        driver.cuMemHostAlloc(&pinned, report_bytes + errors_bytes + text_bytes + records_bytes,
                              kCuHostPortable | kCuHostMapped),
        "cuMemHostAlloc"));
    pinned_ = static_cast<char*>(pinned);
    std::memset(pinned_, 0, report_bytes + errors_bytes + text_bytes + records_bytes);
    report_ = reinterpret_cast<Report*>(pinned_);
    errors_ = reinterpret_cast<Errors*>(pinned_ + report_bytes);
    text_ = pinned_ + report_bytes + errors_bytes;
    records_ = text_ + text_bytes;
    CuPointer pinned_at = 0;
    EPCOMM_RETURN_IF_ERROR(driver.check(driver.cuMemHostGetDevicePointer(&pinned_at, pinned_, 0),
                                        "cuMemHostGetDevicePointer"));

    setup_.shape = shape;
    setup_.layout = layout_;
    setup_.rank = options_.rank;
    setup_.num_ranks = ranks;
    setup_.num_topk = shape.num_topk;
    setup_.num_experts = experts;
    setup_.num_local_experts = num_local_;
    setup_.num_slots = num_physical_slots(shape);
    setup_.state = reinterpret_cast<DeviceState*>(memory_);
    setup_.report = reinterpret_cast<Report*>(pinned_at);
    setup_.errors = reinterpret_cast<Errors*>(pinned_at + report_bytes);
    setup_.text = reinterpret_cast<const char*>(pinned_at + report_bytes + errors_bytes);
    setup_.expert_rank = reinterpret_cast<const int32_t*>(memory_ + state_bytes);
    setup_.expert_local = reinterpret_cast<const int32_t*>(memory_ + state_bytes + table_bytes);
    setup_.histogram = reinterpret_cast<int32_t*>(memory_ + state_bytes + 2 * table_bytes);

    slot_use_.assign(size_t(setup_.num_slots), SlotUse::kFree);
    if (core_->compute() >= 90) {
      send_buffer_max_ = std::min(core_->shared_bytes() - 1024, kSendBytesMax);
      for (CuFunction function : {options_.kernels.send, options_.kernels.send_quantized}) {
        EPCOMM_RETURN_IF_ERROR(
            driver.check(driver.cuFuncSetAttribute(function, kCuMaxDynamicShared, send_buffer_max_),
                         "cuFuncSetAttribute"));
      }
    }
    return Status{};
  });
}

Engine::~Engine() {
  if (!core_ || core_->inherited()) return;
  if (!left_) {
    // Dropped without close(): kernels that still run are told to end, since they use the heap.
    backend_->abort(error(Code::kPeerLost, options_.rank, "the communicator was dropped"));
    (void)drain(1.0);
  }
  core_->free(memory_);
  const Driver& driver = core_->driver();
  ContextScope scope(driver, core_->context());
  if (scope.ok() && pinned_) driver.cuMemFreeHost(pinned_);
}

Status Engine::drain(double timeout_s) noexcept {
  const Driver& driver = core_->driver();
  ContextScope scope(driver, core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  const int64_t end = now_ns() + seconds_to_ns(timeout_s);
  while (true) {
    const CuResult result = driver.cuStreamQuery(core_->stream());
    if (result != kCuNotReady) return driver.check(result, "a kernel of this communicator");
    if (now_ns() >= end)
      return error(Code::kTimeout, -1, "kernels still run after %g s", timeout_s);
    nap();
  }
}

void Engine::leave(PeerState state) noexcept {
  if (!core_ || core_->inherited() || left_.exchange(true)) return;
  if (state == PeerState::kLeft && !drain(options_.timeout_s).ok()) {
    abort(error(Code::kPeerLost, options_.rank, "the communicator was closed"));
    (void)drain(5.0);
  }
  (void)backend_->announce(state);
}

// ---- slots

int Engine::take_free_slot() noexcept {
  for (size_t slot = 0; slot < slot_use_.size(); ++slot) {
    if (slot_use_[slot] == SlotUse::kFree) return int(slot);
  }
  return -1;
}

int Engine::leases_held() noexcept {
  std::lock_guard<std::mutex> lock(release_mutex_);
  const auto leased = std::count(slot_use_.begin(), slot_use_.end(), SlotUse::kLease);
  return int(leased) - int(released_.size());
}

int Engine::lease_slot(CuStream stream) noexcept {
  if (leases_held() >= options_.shape.num_slots) return -1;
  ContextScope scope(core_->driver(), core_->context());
  if (!scope.ok()) return -1;
  collect_released();
  const int slot = take_free_slot();
  // Behind the calls that used it and the readers of its last lease.
  if (slot < 0 || !core_->before(stream).ok()) return -1;
  slot_use_[size_t(slot)] = SlotUse::kLease;
  ++stats_.leases_granted;
  return slot;
}

void Engine::release_slot(int slot, const std::vector<uint64_t>& streams) noexcept {
  try {
    Released released{slot, {}};
    ContextScope scope(core_->driver(), core_->context());
    for (uint64_t stream : streams) {
      Mark mark;
      if (scope.ok() && Mark::record(core_, reinterpret_cast<CuStream>(stream), &mark).ok())
        released.marks.push_back(std::move(mark));
    }
    std::lock_guard<std::mutex> lock(release_mutex_);
    released_.push_back(std::move(released));
  } catch (const std::bad_alloc&) {
    // The slot stays leased: a lost buffer, never an overwritten one.
  }
}

void Engine::collect_released() noexcept {
  std::lock_guard<std::mutex> lock(release_mutex_);
  for (Released& released : released_) {
    for (Mark& mark : released.marks) (void)mark.make_wait(core_->stream());
    slot_use_[size_t(released.slot)] = SlotUse::kFree;
  }
  released_.clear();
}

// ---- one epoch's agreement

Status Engine::break_if_lost(Status status) noexcept {
  if (refusal_) {
    refusal_ = false;
    return status;
  }
  switch (status.code) {
    case Code::kOk:
    case Code::kInvalidArgument:
    case Code::kUnsupported:
    case Code::kOutOfMemory:
      return status;
    default:
      break;
  }
  break_for_good(status);
  return status;
}

// By a call, or by a thread that only looks: the first one's reason stays.
void Engine::break_for_good(const Status& why) noexcept {
  std::lock_guard<std::mutex> lock(break_mutex_);
  if (is_broken()) return;
  broken_ = why;
  if (why.code == Code::kInterrupted) {
    broken_ =
        error(Code::kPeerLost, options_.rank, "the communicator was interrupted inside a call");
  }
  // What still runs or is queued must not wait for a call that nobody follows up.
  abort(broken_);
  leave(PeerState::kBroken);
  is_broken_.store(true, std::memory_order_release);  // others may read broken_ from now on
}

Status Engine::broken() noexcept {
  if (!is_broken() && core_) {
    if (load_acquire(&errors_->set) != 0) {
      const FaultWord fault = errors_->first;
      break_for_good(fault_status(op_name(fault.op), fault));
    } else {
      const Status seen = backend_->async_error();
      if (!seen.ok()) break_for_good(seen);
    }
  }
  return is_broken() ? broken_ : Status{};
}

Status Engine::look_at_peers() noexcept {
  for (int peer = 0; peer < options_.shape.num_ranks; ++peer) {
    if (peer == options_.rank) continue;
    const PeerState state = backend_->peer_state(peer);
    if (state == PeerState::kDead)
      return error(Code::kPeerLost, peer, "rank %d is lost: its process ended", peer);
    if (state == PeerState::kBroken) {
      return error(Code::kPeerLost, peer,
                   "rank %d gave up after an error of its own (see its output)", peer);
    }
  }
  return {};
}

Status Engine::prepare(const CallContext& context, bool ordered) noexcept {
  if (is_broken() || load_acquire(&errors_->set) != 0) return broken();
  ++stats_.calls;
  collect_released();
  return ordered ? core_->after(context.stream) : Status{};
}

Status Engine::after(CuStream stream) noexcept {
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  return core_->after(stream);
}

int Engine::sms(const CallContext& context) const noexcept {
  const int wanted = context.max_sms > 0 ? context.max_sms : options_.num_sms;
  return std::clamp(wanted, 1, core_->num_sms());
}

EnterArgs Engine::entry(Op op, int64_t num_tokens) noexcept {
  EnterArgs args{};
  args.setup = setup_;
  args.call = ++entries_;
  args.header.slot = -1;
  args.header.num_tokens = num_tokens;
  args.header.terms[kTermOp] = int64_t(op);
  args.header.terms[kTermCapacity] = -1;
  args.header.terms[kTermScaleDtype] = -1;
  for (size_t slot = 0; slot < slot_use_.size(); ++slot) {
    if (slot_use_[slot] == SlotUse::kLease) args.leased[slot / 64] |= uint64_t(1) << slot % 64;
  }
  return args;
}

Status Engine::launch(CuFunction function, int64_t blocks, int threads, int shared_bytes,
                      void** arguments, const char* name) noexcept {
  const Driver& driver = core_->driver();
  const CuResult result = driver.cuLaunchKernel(function, unsigned(std::max<int64_t>(blocks, 1)), 1,
                                                1, unsigned(threads), 1, 1, unsigned(shared_bytes),
                                                core_->stream(), arguments, nullptr);
  return driver.check(result, name);
}

// A kernel that begins with opened(), right behind the entry kernel: where the GPU can, it is there
// when the ranks have agreed. The entry kernel itself is launched plainly, so that what a caller's
// stream did before the call lies behind both.
Status Engine::launch_behind(CuFunction function, int64_t blocks, int threads, int shared_bytes,
                             void** arguments, const char* name) noexcept {
  if (core_->compute() < 90)
    return launch(function, blocks, threads, shared_bytes, arguments, name);
  CuLaunchAttribute early{};
  early.id = kCuMayBeginEarly;
  early.value = 1;
  CuLaunchConfig config{};
  config.grid[0] = unsigned(std::max<int64_t>(blocks, 1));
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.block[0] = unsigned(threads);
  config.shared_bytes = unsigned(shared_bytes);
  config.stream = core_->stream();
  config.attributes = &early;
  config.num_attributes = 1;
  const Driver& driver = core_->driver();
  return driver.check(driver.cuLaunchKernelEx(&config, function, arguments, nullptr), name);
}

Status Engine::enter(const EnterArgs& args, int64_t blocks) noexcept {
  void* arguments[] = {options_.ctx.data(), const_cast<EnterArgs*>(&args)};
  return launch(options_.kernels.enter, blocks, kEnterThreads, 0, arguments, "launch of enter");
}

// Without the GIL, until the call's first kernel has said how it went. The kernel has its own
// deadline, whose clock starts when it starts to run; here it is only made sure that this ends.
Status Engine::await_report(const char* operation, const CallContext& context) noexcept {
  const Driver& driver = core_->driver();
  const int64_t start = now_ns();
  const int64_t end = start + 2 * seconds_to_ns(options_.timeout_s) + 10 * kSecond;
  int64_t next_look = start + kInterruptEvery, lost_since = 0;
  while (load_acquire(&report_->call) != entries_) {
    const int64_t now = now_ns();
    if (now - start > kSpin) {
      nap();
    } else {
      for (int i = 0; i < 50 && load_acquire(&report_->call) != entries_; ++i) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      if (now - start > kSpin / 20) sched_yield();
    }
    if (now < next_look) continue;
    next_look = now_ns() + kInterruptEvery;
    if (context.interrupted && context.interrupted(context.interrupted_arg) != 0)
      return error(Code::kInterrupted, -1, "%s: interrupted", operation);
    const CuResult result = driver.cuStreamQuery(core_->stream());
    if (result != kCuNotReady && load_acquire(&report_->call) != entries_) {
      EPCOMM_RETURN_IF_ERROR(driver.check(result, operation));
      return error(Code::kInternal, -1, "%s: its first kernel ended without a report", operation);
    }
    Status lost = backend_->async_error();
    if (!lost.ok()) {
      if (lost_since == 0) lost_since = now;
      if (now - lost_since > kLossGrace) return lost;
    }
    if (now > end) {
      return error(Code::kTimeout, -1,
                   "%s (entry): not begun after %.0f s: work that was queued before it still runs "
                   "on the GPU",
                   operation, double(now - start) / 1e9);
    }
  }
  const FaultWord fault = report_->fault;
  switch (fault.fault) {
    case kNoFault:
      return {};
    case kDisagree:
      ++stats_.refused_calls;
      return disagreement(operation, report_->epoch);
    case kTooManyRows: {
      ++stats_.refused_calls;
      const int ranks = options_.shape.num_ranks, d = fault.peer;
      const int64_t* rows = reinterpret_cast<const int64_t*>(pinned_ + kReportRowsOffset);
      int64_t total = 0;
      for (int source = 0; source < ranks; ++source) total += rows[source * ranks + d];
      return too_many_rows(d, total, options_.shape.max_recv_tokens);
    }
    case kWasBroken:
      // Errors was written before the report.
      return fault_status(operation, errors_->first);
    default:
      return fault_status(operation, fault);
  }
}

// The same sentences as the host's Waiter.
Status Engine::fault_status(const char* operation, const FaultWord& fault) noexcept {
  const double waited = double(fault.waited_ns) / 1e9;
  const char* phase = phase_name(fault.phase);
  char reason[128];
  switch (fault.code) {
    case kWaitTimeout:
      return error(Code::kTimeout, fault.peer,
                   "%s (%s): nothing more from rank %d: expected %llu, seen %llu after %.3f s; the "
                   "limit is %g s (timeout_s, EPCOMM_TIMEOUT_S)",
                   operation, phase, fault.peer, (unsigned long long)fault.expected,
                   (unsigned long long)fault.seen, waited, options_.timeout_s);
    case kWaitAborted: {
      Status why = backend_->async_error();
      return why.ok() ? error(Code::kPeerLost, -1, "%s (%s): aborted", operation, phase) : why;
    }
    case kWaitPeerDead: {
      Status why = backend_->async_error();  // knows the process
      if (why.code == Code::kPeerLost && why.peer == fault.culprit) {
        std::snprintf(reason, sizeof reason, "%s", why.text.c_str());
      } else {
        std::snprintf(reason, sizeof reason, "rank %d is lost: its process ended", fault.culprit);
      }
      break;
    }
    case kWaitPeerLeft:
      std::snprintf(reason, sizeof reason, "rank %d left: it closed its communicator",
                    fault.culprit);
      break;
    default:
      std::snprintf(reason, sizeof reason,
                    "rank %d gave up after an error of its own (see its output)", fault.culprit);
  }
  return error(Code::kPeerLost, fault.culprit,
               "%s (%s): %s; waited %.3f s for rank %d, expected %llu, seen %llu", operation, phase,
               reason, waited, fault.peer, (unsigned long long)fault.expected,
               (unsigned long long)fault.seen);
}

// The entry records of this epoch stay until this rank enters the next but one.
Status Engine::disagreement(const char* operation, uint64_t epoch) noexcept {
  const Driver& driver = core_->driver();
  const int ranks = options_.shape.num_ranks;
  const uint64_t bytes = uint64_t(ranks) * 2 * layout_.entry_stride;
  EPCOMM_RETURN_IF_ERROR(driver.check(
      driver.cuMemcpyDtoHAsync(records_, options_.heap + layout_.entry, bytes, core_->stream()),
      "cuMemcpyDtoHAsync"));
  EPCOMM_RETURN_IF_ERROR(drain(options_.timeout_s));
  const auto record = [&](int peer) -> const EntryHeader& {
    return *reinterpret_cast<const EntryHeader*>(records_ + (uint64_t(peer) * 2 + (epoch & 1)) *
                                                                layout_.entry_stride);
  };
  EPCOMM_RETURN_IF_ERROR(check_epochs(operation, epoch, ranks, record));
  Status status = guarded([&] { return agree(ranks, options_.dtype_names, record); });
  refusal_ = !status.ok();  // it breaks nothing, whatever its code
  if (!status.ok()) return status;
  return error(Code::kInternal, -1, "%s: the kernel saw a difference that the host does not",
               operation);
}

Status Engine::refuse(Op op, const Status& why, const CallContext& context) noexcept {
  const char* operation = op_name(int64_t(op));
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  const Status status = guarded([&] {
    EPCOMM_RETURN_IF_ERROR(prepare(context, false));
    EnterArgs args = entry(op, 0);
    Status reason = why;
    if (reason.ok()) reason = error(Code::kInternal, -1, "%s: refused without a reason", operation);
    args.header.status = int32_t(reason.code);
    args.header.text_bytes = uint32_t(std::min<uint64_t>(reason.text.size(), kEntryTextBytes));
    std::memcpy(text_, reason.text.data(), args.header.text_bytes);
    EPCOMM_RETURN_IF_ERROR(enter(args, 1));
    return await_report(operation, context);
  });
  const Status told = break_if_lost(status);
  return told.ok() ? why : told;
}

Status Engine::barrier(const CallContext& context) noexcept {
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  return break_if_lost(guarded([&] {
    EPCOMM_RETURN_IF_ERROR(prepare(context, false));
    EPCOMM_RETURN_IF_ERROR(enter(entry(Op::kBarrier, 0), 1));
    return await_report("barrier", context);
  }));
}

// ---- asynchronous calls

Status Engine::mark(Mark* out) noexcept {
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  return guarded([&] { return Mark::record(core_, core_->stream(), out); });
}

Status Engine::wait_mark(const Mark& mark, double timeout_s, const CallContext& context,
                         bool* passed) noexcept {
  const int64_t start = now_ns();
  const int64_t end = start + seconds_to_ns(timeout_s);
  int64_t next_look = start + kInterruptEvery;
  *passed = false;
  while (true) {
    const CuResult result = mark.query();
    if (result == kCuSuccess) break;
    if (result != kCuNotReady)
      return break_if_lost(core_->driver().check(result, "a kernel of this communicator"));
    const int64_t now = now_ns();
    if (now >= end) return {};
    if (now >= next_look) {
      next_look = now + kInterruptEvery;
      if (context.interrupted && context.interrupted(context.interrupted_arg) != 0)
        return error(Code::kInterrupted, -1, "interrupted");
    }
    nap();
  }
  *passed = true;
  return broken();
}

Status Engine::join_mark(const Mark& mark, CuStream stream) noexcept {
  ContextScope scope(core_->driver(), core_->context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  return mark.make_wait(stream);
}

}  // namespace epcomm::device
