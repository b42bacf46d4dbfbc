// Which peers are lost, and why: one native thread watches the processes that can be seen from here
// (it never takes the GIL); others report what they learned in other ways.
#pragma once

#include <poll.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/process.hpp"
#include "epcomm/status.hpp"

namespace epcomm::common {

class Liveness {
 public:
  Liveness() noexcept = default;
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;
  ~Liveness() { stop(); }

  // `processes` by rank; an entry without a pid is not watched. `notify(arg)` is called in the
  // watching thread after a death was noted.
  Status start(std::vector<Process> processes, void (*notify)(void*), void* arg);

  // Any thread.
  bool any_dead() const noexcept { return any_dead_.load(std::memory_order_acquire); }
  // When a peer's death or loss was noticed (CLOCK_MONOTONIC, ns); 0 while all is well with it.
  int64_t died_ns(int rank) const noexcept;
  pid_t pid(int rank) const noexcept { return processes_[size_t(rank)].pid; }
  // "its process (pid N) ended", or what note_lost() was told.
  std::string why_lost(int rank) noexcept;
  // A peer cannot be reached any more; `why` ends a sentence. The first reason stays, and that its
  // process ended, if that can be seen, is a better one.
  void note_lost(int rank, const std::string& why) noexcept;
  // Looks at every process now, in the caller's thread: what another rank has seen is seen here.
  void scan() noexcept;

  // Ends the thread, in bounded time. Idempotent.
  void stop() noexcept;
  // Leaves the thread to the process it runs in: for objects inherited through fork.
  void forget() noexcept;

 private:
  static void* run(void* self) noexcept;
  void watch() noexcept;
  void note_death(size_t rank) noexcept;

  std::vector<Process> processes_;
  std::vector<pollfd> entries_;  // of the thread
  std::unique_ptr<std::atomic<int64_t>[]> died_ns_;
  std::mutex mutex_;  // of why_lost_
  std::vector<std::string> why_lost_;
  std::atomic<bool> any_dead_{false};
  void (*notify_)(void*) = nullptr;
  void* notify_arg_ = nullptr;
  UniqueFd stop_event_;
  pthread_t thread_{};
  bool running_ = false;
};

}  // namespace epcomm::common
