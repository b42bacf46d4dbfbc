// Calls that run beside their caller: one native thread, in order. It never touches Python.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "host/engine.hpp"

namespace epcomm::host {

// One call on its way.
class Ticket {
 public:
  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  // True once done; false after `seconds`.
  bool wait_for(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [this] { return done_; });
  }
  // Only after done.
  const Status& status() const { return status_; }

  void finish(Status status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      status_ = std::move(status);
      done_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Status status_;
};

class AsyncRunner {
 public:
  // Starts its thread at once: there is no way back once peers count on a call.
  AsyncRunner() : thread_([this] { run(); }) {}
  ~AsyncRunner() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  AsyncRunner(const AsyncRunner&) = delete;
  AsyncRunner& operator=(const AsyncRunner&) = delete;

  std::shared_ptr<Ticket> submit(std::function<Status()> work) {
    auto ticket = std::make_shared<Ticket>();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back([ticket, work = std::move(work)] { ticket->finish(work()); });
    }
    changed_.notify_all();
    return ticket;
  }

  // The caller keeps engine, call and every buffer alive until the ticket is done.
  std::shared_ptr<Ticket> dispatch_finish(Engine* engine, DispatchCall* call,
                                          const DispatchOutputs& out, const CallContext& context) {
    return submit([=] { return engine->dispatch_finish(call, out, context); });
  }
  std::shared_ptr<Ticket> combine(Engine* engine, const CombineArgs& args,
                                  const CallContext& context) {
    return submit([=] { return engine->combine(args, context); });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;  // what was submitted runs, also when stopping
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace epcomm::host
