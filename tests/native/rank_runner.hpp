// One rank of an engine test: runs a program of calls and compares every result with the oracle.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host/engine.hpp"
#include "scenario.hpp"

namespace epcomm::testing {

// Holds leases for a while in a thread of its own, reads them again and again, then releases them.
class LeaseReader {
 public:
  explicit LeaseReader(host::Engine* engine) : engine_(engine), thread_([this] { run(); }) {}
  ~LeaseReader() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // `want[i]` must lie at data[i] until the lease is released; NaN: anything.
  void hold(int slot, const float* data, std::vector<float> want, int passes, int pause_us);

 private:
  struct Lease {
    int slot;
    const float* data;
    std::vector<float> want;
    int passes, pause_us;
  };
  void run();

  host::Engine* engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Lease> leases_;
  bool stop_ = false;
  std::thread thread_;
};

class RankRunner {
 public:
  RankRunner(const Program& program, int rank, HostTransport* transport, bool staging,
             const char* isa);

  void run();
  host::Engine& engine() { return engine_; }

 private:
  struct Open {  // what this rank keeps of a dispatch
    std::shared_ptr<host::Routing> routing;
    int lease = -1;  // kept for the combine to work in place
    float* rows = nullptr;
  };

  void dispatch(const Step& step);
  void combine(const Step& step);
  void expect_refused(const Status& status, const Step& step, const char* words);
  void check_ids(const World& world, const host::DispatchCall& call,
                 const std::vector<int32_t>& ids, const std::vector<float>& weights,
                 const std::vector<int32_t>& per_expert, const std::vector<int32_t>& offsets);

  const Program& program_;
  const Config& config_;
  const int rank_;
  Random random_;
  host::CallContext context_;
  host::Engine engine_;
  LeaseReader reader_;
  std::vector<Open> open_;  // [world]
  int64_t done_ = 0;
};

}  // namespace epcomm::testing
