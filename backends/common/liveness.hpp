// One native thread that watches the processes of all peers. It never takes the GIL.
#pragma once

#include <poll.h>
#include <pthread.h>

#include <atomic>
#include <memory>
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
  // When the death of a peer's process was noticed (CLOCK_MONOTONIC, ns); 0 while it runs.
  int64_t died_ns(int rank) const noexcept;
  pid_t pid(int rank) const noexcept { return processes_[size_t(rank)].pid; }
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
  std::atomic<bool> any_dead_{false};
  void (*notify_)(void*) = nullptr;
  void* notify_arg_ = nullptr;
  UniqueFd stop_event_;
  pthread_t thread_{};
  bool running_ = false;
};

}  // namespace epcomm::common
