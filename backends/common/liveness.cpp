#include "common/liveness.hpp"

#include <sys/eventfd.h>

#include <cerrno>

#include "common/clock.hpp"
#include "common/errors.hpp"
#include "common/native_thread.hpp"

namespace epcomm::common {
namespace {

constexpr int kPollMs = 100;  // for processes without a pidfd

}  // namespace

Status Liveness::start(std::vector<Process> processes, void (*notify)(void*), void* arg) {
  processes_ = std::move(processes);
  died_ns_ = std::make_unique<std::atomic<int64_t>[]>(processes_.size());
  for (size_t rank = 0; rank < processes_.size(); ++rank) died_ns_[rank] = 0;
  why_lost_.resize(processes_.size());
  notify_ = notify;
  notify_arg_ = arg;
  bool watched = false;
  for (const Process& process : processes_) watched |= process.pid != 0;
  if (!watched) return {};  // alone: no thread
  entries_.reserve(processes_.size() + 1);

  stop_event_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_event_) return system_error(-1, errno, "eventfd");
  const int why = start_native_thread(&thread_, &Liveness::run, this);
  if (why != 0) return system_error(-1, why, "starting the thread that watches peers");
  running_ = true;
  return {};
}

int64_t Liveness::died_ns(int rank) const noexcept {
  return died_ns_[size_t(rank)].load(std::memory_order_acquire);
}

void Liveness::note_death(size_t rank) noexcept {
  int64_t alive = 0;
  if (!died_ns_[rank].compare_exchange_strong(alive, now_ns(), std::memory_order_acq_rel)) return;
  any_dead_.store(true, std::memory_order_release);
}

std::string Liveness::why_lost(int rank) noexcept {
  std::string why;
  guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    why = why_lost_[size_t(rank)];
    if (why.empty()) why = "its process (pid " + std::to_string(pid(rank)) + ") ended";
    return Status{};
  });
  return why;
}

void Liveness::note_lost(int rank, const std::string& why) noexcept {
  if (rank < 0 || size_t(rank) >= processes_.size() || died_ns(rank) != 0) return;
  const Process& process = processes_[size_t(rank)];
  if (process.pid == 0 || !process_ended(process)) {
    guarded([&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (died_ns(rank) == 0 && why_lost_[size_t(rank)].empty()) why_lost_[size_t(rank)] = why;
      return Status{};
    });
  }
  note_death(size_t(rank));
  if (notify_) notify_(notify_arg_);
}

void Liveness::scan() noexcept {
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    if (died_ns(int(rank)) == 0 && process_ended(processes_[rank])) note_death(rank);
  }
}

void* Liveness::run(void* self) noexcept {
  pthread_setname_np(pthread_self(), "epcomm-liveness");
  static_cast<Liveness*>(self)->watch();
  return nullptr;
}

void Liveness::watch() noexcept {
  while (true) {
    entries_.assign(1, {stop_event_.get(), POLLIN, 0});
    bool polled = false;
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      const Process& process = processes_[rank];
      if (process.pid == 0 || died_ns(int(rank)) != 0) continue;
      if (process.pidfd) {
        entries_.push_back({process.pidfd.get(), POLLIN, 0});
      } else {
        polled = true;
      }
    }
    int ready = poll(entries_.data(), nfds_t(entries_.size()), polled ? kPollMs : -1);
    if (ready < 0 && errno != EINTR) {  // more entries than a lowered `ulimit -n` allows
      ready = poll(entries_.data(), 1, kPollMs);
    }
    if (ready > 0 && entries_[0].revents != 0) return;
    scan();
    if (any_dead() && notify_) notify_(notify_arg_);
  }
}

void Liveness::stop() noexcept {
  if (!running_) return;
  running_ = false;
  eventfd_write(stop_event_.get(), 1);
  pthread_join(thread_, nullptr);
  for (Process& process : processes_) process.pidfd.reset();
  stop_event_.reset();
}

// The event is shared with the parent's thread: writing to it would end that one.
void Liveness::forget() noexcept { running_ = false; }

}  // namespace epcomm::common
