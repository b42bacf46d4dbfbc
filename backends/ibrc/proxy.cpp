#include "ibrc/proxy.hpp"

#include <sched.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "common/clock.hpp"
#include "common/cpu.hpp"
#include "common/errors.hpp"
#include "common/native_thread.hpp"

namespace epcomm::ibrc {
namespace {

constexpr int kPollBatch = 16;
constexpr int64_t kMicrosecond = 1000;
constexpr int64_t kYield = 50 * kMicrosecond;  // before the thread sleeps
// Nothing wakes the thread when a completion comes.
constexpr int64_t kFirstNap = 10 * kMicrosecond;
constexpr int64_t kLongestNap = 200 * kMicrosecond;
// With nothing under way producers ring; this is for probes, and for rings that got lost.
constexpr int64_t kLongestSleep = 200 * 1000 * kMicrosecond;

}  // namespace

Proxy::Proxy(const Setup& setup)
    : setup_(setup), queue_of_(setup.channels.size() * size_t(setup.num_ranks), -1) {
  completion_queues_.reserve(setup_.queues.size());  // queues keep pointers
  for (const Queue& wanted : setup_.queues) {
    size_t cq = 0;
    while (cq < completion_queues_.size() && completion_queues_[cq].cq != wanted.rdma->cq) ++cq;
    if (cq == completion_queues_.size()) {
      completion_queues_.push_back({wanted.rdma->cq, uint32_t(wanted.rdma->cq->cqe), 0});
    }
    size_t channel = 0;
    while (setup_.channels[channel]->number() != wanted.rdma->channel) ++channel;
    SendQueue::Setup made;
    made.rdma = wanted.rdma;
    made.channel = setup_.channels[channel];
    made.completions = &completion_queues_[cq];
    made.batch = &batch_;
    made.stats = &stats_;
    made.heap = reinterpret_cast<uint64_t>(setup_.heap);
    made.sink = wanted.sink;
    made.sink_lkey = wanted.sink_lkey;
    made.number = uint32_t(queues_.size());
    queue_of_[channel * size_t(setup_.num_ranks) + size_t(wanted.rdma->peer)] = int(queues_.size());
    if (wanted.probed) probed_.push_back(int(queues_.size()));
    queues_.push_back(std::make_unique<SendQueue>(made));
  }
  is_waiting_.resize(queues_.size());
  waiting_.reserve(queues_.size());
}

Status Proxy::start(int number) {
  if (const int why = common::start_native_thread(&thread_, &Proxy::run, this)) {
    return common::system_error(-1, why, "starting a proxy thread");
  }
  running_ = true;
  char name[16];
  std::snprintf(name, sizeof name, "epcomm-ibrc-%u", unsigned(number) % 100);
  pthread_setname_np(thread_, name);
  if (setup_.cpu < 0) return {};
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (setup_.cpu < CPU_SETSIZE) CPU_SET(setup_.cpu, &cpus);
  if (const int why = pthread_setaffinity_np(thread_, sizeof cpus, &cpus)) {
    stop();
    return error(Code::kInvalidArgument, -1,
                 "EPCOMM_IBRC_CPUS names CPU %d, on which this process may not run: %s", setup_.cpu,
                 common::errno_text(why).c_str());
  }
  return {};
}

void Proxy::stop() noexcept {
  if (!running_) return;
  running_ = false;
  stop_.store(true, std::memory_order_seq_cst);
  bell_.ring_always();
  pthread_join(thread_, nullptr);
}

void* Proxy::run(void* self) noexcept {
  static_cast<Proxy*>(self)->work();
  return nullptr;
}

void Proxy::work() noexcept {
  int64_t idle_since = 0, nap = kFirstNap;
  while (!stop_.load(std::memory_order_acquire)) {
    if (pass()) {
      idle_since = 0;
      nap = kFirstNap;
      continue;
    }
    const int64_t now = common::now_ns();
    if (idle_since == 0) idle_since = now;
    if (now - idle_since < setup_.spin_ns) {
      for (int i = 0; i < 20; ++i) common::cpu_relax();
    } else if (now - idle_since < setup_.spin_ns + kYield) {
      sched_yield();
    } else if (under_way()) {
      ProxyStats::add(stats_.sleeps, 1);
      const timespec pause = common::to_timespec(nap);
      nanosleep(&pause, nullptr);
      nap = std::min(nap * 2, kLongestNap);
    } else {
      ProxyStats::add(stats_.sleeps, 1);
      const auto awake = [&] { return stop_.load(std::memory_order_seq_cst) || anything_new(); };
      bell_.sleep_unless(awake, kLongestSleep);
    }
  }
}

// One look at everything. True if anything moved.
bool Proxy::pass() noexcept {
  bool moved = take();
  for (size_t i = 0; i < waiting_.size();) {
    const int number = waiting_[i];
    SendQueue& queue = *queues_[size_t(number)];
    moved |= post(queue);
    if (queue.waiting()) {
      ++i;
      continue;
    }
    is_waiting_[size_t(number)] = 0;
    waiting_[i] = waiting_.back();
    waiting_.pop_back();
  }
  for (CompletionQueue& cq : completion_queues_) {
    while (cq.outstanding > 0 && poll(cq)) moved = true;
  }
  moved |= probe();
  if (moved) setup_.room->ring();
  return moved;
}

bool Proxy::take() noexcept {
  uint32_t taken = 0;
  for (size_t c = 0; c < setup_.channels.size(); ++c) {
    Channel& channel = *setup_.channels[c];
    taken += channel.take(kTake, [&](const Command& command) {
      if (Status bad = check(c, command); !bad.ok()) {
        setup_.events->broken(bad);  // before quiet() takes it for carried out
        channel.refuse(command);
        return true;
      }
      if (!channel.may_hold(command.peer)) return false;  // others behind it wait too: see Channel
      const int number = queue_of_[c * size_t(setup_.num_ranks) + size_t(command.peer)];
      queues_[size_t(number)]->push(channel.hold(command));
      if (!queues_[size_t(number)]->waiting() || is_waiting_[size_t(number)]) return true;
      is_waiting_[size_t(number)] = 1;
      waiting_.push_back(number);
      return true;
    });
  }
  ProxyStats::add(stats_.commands, taken);
  return taken > 0;
}

Status Proxy::check(size_t channel, const Command& command) const noexcept {
  const uint64_t size = setup_.heap_bytes;
  const bool put = (command.op & kCommandPut) != 0, signal = (command.op & kCommandSignal) != 0;
  const char* wrong = nullptr;
  if (command.op == kCommandNone || command.op > kCommandPutSignal || command.flags != 0) {
    wrong = "no such operation";
  } else if (command.peer >= setup_.num_ranks || command.peer == setup_.rank) {
    wrong = "no such peer";
  } else if (put && (command.bytes > size || command.src > size - command.bytes ||
                     command.dst > size - command.bytes)) {
    wrong = "it leaves the heap";
  } else if (signal && (command.word % 8 != 0 || size < 8 || command.word > size - 8)) {
    wrong = "its word is no word of the heap";
  } else if (queue_of_[channel * size_t(setup_.num_ranks) + size_t(command.peer)] < 0) {
    wrong = "no queue pair to the peer";
  }
  if (!wrong) return {};
  return common::guarded([&] {
    return error(Code::kInternal, command.peer,
                 "command refused (%s): op %u, flags %u, peer %d, %u bytes from offset %" PRIu64
                 " to %" PRIu64 ", word %" PRIu64 "; the heap has %" PRIu64 " bytes",
                 wrong, command.op, command.flags, command.peer, command.bytes, command.src,
                 command.dst, command.word, size);
  });
}

bool Proxy::post(SendQueue& queue) noexcept {
  bool moved = false;
  const Status status = queue.post(&moved);
  if (status.ok()) return moved;
  if (status.code == Code::kOutOfMemory) {
    queue.fail(nullptr, "");
    setup_.events->broken(status);
    queue.drop();
    return true;
  }
  // A post to a queue pair in its error state says little; the completion that brought it there
  // says more.
  while (poll(*queue.completions())) {
  }
  if (!queue.failed()) lose(queue, nullptr, status.text.c_str());
  return true;
}

bool Proxy::poll(CompletionQueue& cq) noexcept {
  ibv_wc completions[kPollBatch];
  const int count = ibv_poll_cq(cq.cq, kPollBatch, completions);
  if (count <= 0) {
    if (count == 0) return false;
    char why[40];
    std::snprintf(why, sizeof why, "ibv_poll_cq returned %d", count);
    for (auto& queue : queues_) {
      if (queue->completions() == &cq && !queue->failed()) {
        lose(*queue, nullptr, why);
      }
    }
    cq.outstanding = 0;
    return false;
  }
  ProxyStats::add(stats_.completions, uint64_t(count));
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = completions[i];
    const uint64_t number = completion.wr_id >> 32;
    if (number >= queues_.size()) continue;  // none of ours
    SendQueue& queue = *queues_[number];
    if (completion.status == IBV_WC_SUCCESS) {
      queue.complete(completion.wr_id);
    } else {
      lose(queue, &completion, setup_.provider->wc_status_str(completion.status));
    }
  }
  return true;
}

void Proxy::lose(SendQueue& queue, const ibv_wc* completion, const char* why) noexcept {
  const std::string text = queue.fail(completion, why ? why : "an unknown status");
  if (!text.empty()) setup_.events->peer_lost(queue.rdma().peer, text);
  queue.drop();
}

// A far host that died says nothing: only an unanswered request tells.
bool Proxy::probe() noexcept {
  if (probed_.empty()) return false;
  const int64_t now = common::now_ns();
  if (now < next_probe_ns_) return false;
  next_probe_ns_ = now + setup_.probe_ns / 4;
  bool moved = false;
  for (int number : probed_) {
    SendQueue& queue = *queues_[size_t(number)];
    if (queue.failed() || !setup_.events->waited_for(queue.rdma().peer)) continue;
    const Status status = queue.probe(now - setup_.probe_ns, &moved);
    if (!status.ok()) lose(queue, nullptr, status.text.c_str());
  }
  return moved;
}

bool Proxy::under_way() const noexcept {
  for (const CompletionQueue& cq : completion_queues_) {
    if (cq.outstanding > 0) return true;
  }
  return !waiting_.empty();
}

bool Proxy::anything_new() const noexcept {
  for (const Channel* channel : setup_.channels) {
    if (channel->anything_new()) return true;
  }
  return false;
}

}  // namespace epcomm::ibrc
