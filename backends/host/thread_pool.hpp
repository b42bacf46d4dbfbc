// A fixed set of native threads for the loops of one engine. They never touch Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace epcomm::host {

class ThreadPool {
 public:
  // The caller is thread 0, so one thread means none are started.
  explicit ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
    try {
      for (int i = 1; i < num_threads_; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {  // no more threads to be had: those that run must not outlive this
      stop();
      throw;
    }
  }
  ~ThreadPool() { stop(); }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Ends the threads; no loop runs afterwards. Idempotent.
  void stop() noexcept {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  // body(i) for i in 0..count-1 on at most `limit` threads (0: all); returns when all are done.
  void parallel_for(int64_t count, int limit, const std::function<void(int64_t)>& body) {
    const int threads = limit > 0 && limit < num_threads_ ? limit : num_threads_;
    if (threads == 1 || count <= 1) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      count_ = count;
      active_ = threads;
      running_ = threads - 1;
      next_.store(0, std::memory_order_relaxed);
      ++round_;
    }
    wake_.notify_all();
    drain(body, count);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    body_ = nullptr;
  }

 private:
  void drain(const std::function<void(int64_t)>& body, int64_t count) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  }

  void work(int index) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      if (index >= active_) continue;
      const std::function<void(int64_t)>* body = body_;
      const int64_t count = count_;
      lock.unlock();
      drain(*body, count);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  const int num_threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool stop_ = false;
  uint64_t round_ = 0;
  int active_ = 0, running_ = 0;
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
};

}  // namespace epcomm::host
