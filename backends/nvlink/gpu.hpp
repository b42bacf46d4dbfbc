// One GPU: its facts, its primary context, and a stream of our own for small copies.
#pragma once

#include <string>

#include "common/driver.hpp"

namespace epcomm::nvlink {

class Gpu {
 public:
  Gpu() noexcept = default;
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu() { release(); }

  // Looks at the device; no context. kUnavailable says why it cannot be used.
  Status open(int index);
  // Takes part in the device's primary context, the one that torch and CuPy use.
  Status retain();
  // Idempotent. What the driver has torn down already is no error.
  void release() noexcept;
  // Leaves everything to the process it belongs to: for objects inherited through fork.
  void forget() noexcept { context_ = nullptr; }

  const common::Driver& driver() const noexcept { return driver_; }
  common::CuDevice device() const noexcept { return device_; }
  common::CuContext context() const noexcept { return context_; }
  int index() const noexcept { return index_; }
  const std::string& name() const noexcept { return name_; }
  const std::string& uuid() const noexcept { return uuid_; }  // 32 hexadecimal digits
  bool has(common::CuAttribute attribute) const noexcept;

  // Ended when they return; ordered with nothing else on the device. Any thread.
  Status zero(common::CuPointer at, size_t bytes) const;
  Status write(common::CuPointer to, const void* from, size_t bytes) const;
  Status read(void* to, common::CuPointer from, size_t bytes) const;

 private:
  template <class Call>
  Status on_stream(const char* name, Call&& call) const;

  common::Driver driver_;
  int index_ = -1;
  common::CuDevice device_ = -1;
  common::CuContext context_ = nullptr;  // not null: retained
  common::CuStream stream_ = nullptr;
  std::string name_;
  std::string uuid_;
};

// 32 hexadecimal digits.
Status device_uuid(const common::Driver& driver, common::CuDevice device, std::string* out);

// Ok if this process sees a GPU that `nvlink` can use. Makes no context.
Status any_gpu();

}  // namespace epcomm::nvlink
