// One GPU as the engine uses it: context, a high-priority stream of our own, memory in the order of
// that stream. Engine, handles and leases share it; the last of them lets it go.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "common/driver.hpp"
#include "common/fork_guard.hpp"

namespace epcomm::device {

class Core {
 public:
  static Status create(int device, std::shared_ptr<Core>* out);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const common::Driver& driver() const noexcept { return driver_; }
  common::CuContext context() const noexcept { return context_; }
  common::CuStream stream() const noexcept { return stream_; }
  int num_sms() const noexcept { return num_sms_; }
  int compute() const noexcept { return compute_; }            // 90 for sm_90
  int shared_bytes() const noexcept { return shared_bytes_; }  // most of a block
  bool inherited() const noexcept { return guard_.inherited(); }

  // Memory that work of our stream may use from now on. Context current.
  Status allocate(uint64_t bytes, common::CuPointer* out);
  // Freed when the work that our stream has by now is done. Any thread, any context.
  void free(common::CuPointer at) noexcept;

  // Our stream's next work comes after what `stream` has by now, and the other way round.
  // Context current.
  Status after(common::CuStream stream);
  Status before(common::CuStream stream);

  // Events without timing, used again: making one costs as much as a launch. Context current; any
  // thread.
  Status take_event(common::CuEvent* out);
  void give_event(common::CuEvent event) noexcept;

 private:
  Core() = default;
  Status open(int device);

  common::Driver driver_;
  common::ForkGuard guard_;
  int device_ = -1;
  int num_sms_ = 0, compute_ = 0, shared_bytes_ = 0;
  common::CuContext context_ = nullptr;
  common::CuStream stream_ = nullptr;
  common::CuPool pool_ = nullptr;
  common::CuEvent in_ = nullptr, out_ = nullptr;
  std::mutex spare_mutex_;
  std::vector<common::CuEvent> spare_;
};

// A point in a stream, for whoever wants to know or wait.
class Mark {
 public:
  Mark() = default;
  Mark(Mark&& other) noexcept : core_(std::move(other.core_)), event_(other.event_) {
    other.event_ = nullptr;
  }
  Mark& operator=(Mark&& other) noexcept {
    std::swap(core_, other.core_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~Mark();

  // Context current.
  static Status record(const std::shared_ptr<Core>& core, common::CuStream stream, Mark* out);
  // kCuSuccess: passed; kCuNotReady; else the device's error.
  common::CuResult query() const noexcept;
  // Context current.
  Status make_wait(common::CuStream stream) const;

 private:
  std::shared_ptr<Core> core_;
  common::CuEvent event_ = nullptr;
};

}  // namespace epcomm::device
