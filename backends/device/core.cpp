#include "device/core.hpp"

#include <utility>

namespace epcomm::device {

using namespace common;

namespace {
constexpr CuAttribute kCuMultiprocessors = CuAttribute(16);
constexpr CuAttribute kCuSharedPerBlock = CuAttribute(97);
}  // namespace

Status Core::create(int device, std::shared_ptr<Core>* out) {
  std::shared_ptr<Core> core(new Core());
  EPCOMM_RETURN_IF_ERROR(core->open(device));
  *out = std::move(core);
  return {};
}

Status Core::open(int device) {
  EPCOMM_RETURN_IF_ERROR(Driver::load(&driver_));
  EPCOMM_RETURN_IF_ERROR(driver_.check(driver_.cuDeviceGet(&device_, device), "cuDeviceGet"));
  int major = 0, minor = 0;
  driver_.cuDeviceGetAttribute(&major, kCuComputeMajor, device_);
  driver_.cuDeviceGetAttribute(&minor, kCuComputeMinor, device_);
  driver_.cuDeviceGetAttribute(&num_sms_, kCuMultiprocessors, device_);
  driver_.cuDeviceGetAttribute(&shared_bytes_, kCuSharedPerBlock, device_);
  compute_ = major * 10 + minor;
  EPCOMM_RETURN_IF_ERROR(driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, device_),
                                       "cuDevicePrimaryCtxRetain"));
  ContextScope scope(driver_, context_);
  EPCOMM_RETURN_IF_ERROR(scope.status());
  int least = 0, greatest = 0;
  driver_.cuCtxGetStreamPriorityRange(&least, &greatest);
  EPCOMM_RETURN_IF_ERROR(
      driver_.check(driver_.cuStreamCreateWithPriority(&stream_, kCuStreamNonBlocking, greatest),
                    "cuStreamCreateWithPriority"));
  EPCOMM_RETURN_IF_ERROR(
      driver_.check(driver_.cuEventCreate(&in_, kCuEventDisableTiming), "cuEventCreate"));
  EPCOMM_RETURN_IF_ERROR(
      driver_.check(driver_.cuEventCreate(&out_, kCuEventDisableTiming), "cuEventCreate"));
  CuPoolProperties properties{};
  properties.type = kCuPinned;
  properties.location = {kCuLocationDevice, device_};
  EPCOMM_RETURN_IF_ERROR(
      driver_.check(driver_.cuMemPoolCreate(&pool_, &properties), "cuMemPoolCreate"));
  // Handles come and go with every layer: what one frees, the next takes.
  unsigned long long keep = 64ull << 20;
  return driver_.check(driver_.cuMemPoolSetAttribute(pool_, kCuPoolReleaseThreshold, &keep),
                       "cuMemPoolSetAttribute");
}

Core::~Core() {
  if (!context_ || guard_.inherited()) return;
  {
    ContextScope scope(driver_, context_);
    if (scope.ok()) {
      if (in_) driver_.cuEventDestroy(in_);
      if (out_) driver_.cuEventDestroy(out_);
      for (CuEvent event : spare_) driver_.cuEventDestroy(event);
      if (pool_) driver_.cuMemPoolDestroy(pool_);
      if (stream_) driver_.cuStreamDestroy(stream_);
    }
  }
  driver_.cuDevicePrimaryCtxRelease(device_);
}

Status Core::allocate(uint64_t bytes, CuPointer* out) {
  const CuResult result =
      driver_.cuMemAllocFromPoolAsync(out, size_t(bytes ? bytes : 1), pool_, stream_);
  if (result == kCuOutOfMemory) {
    return error(Code::kOutOfMemory, -1, "the GPU has no %llu bytes for routing tables",
                 (unsigned long long)bytes);
  }
  return driver_.check(result, "cuMemAllocFromPoolAsync");
}

void Core::free(CuPointer at) noexcept {
  if (!at || guard_.inherited()) return;
  ContextScope scope(driver_, context_);
  if (scope.ok()) driver_.cuMemFreeAsync(at, stream_);
}

Status Core::after(CuStream stream) {
  EPCOMM_RETURN_IF_ERROR(driver_.check(driver_.cuEventRecord(in_, stream), "cuEventRecord"));
  return driver_.check(driver_.cuStreamWaitEvent(stream_, in_, 0), "cuStreamWaitEvent");
}

Status Core::before(CuStream stream) {
  EPCOMM_RETURN_IF_ERROR(driver_.check(driver_.cuEventRecord(out_, stream_), "cuEventRecord"));
  return driver_.check(driver_.cuStreamWaitEvent(stream, out_, 0), "cuStreamWaitEvent");
}

Status Core::take_event(CuEvent* out) {
  {
    std::lock_guard<std::mutex> lock(spare_mutex_);
    if (!spare_.empty()) {
      *out = spare_.back();
      spare_.pop_back();
      return {};
    }
  }
  return driver_.check(driver_.cuEventCreate(out, kCuEventDisableTiming), "cuEventCreate");
}

void Core::give_event(CuEvent event) noexcept {
  try {
    std::lock_guard<std::mutex> lock(spare_mutex_);
    spare_.push_back(event);
  } catch (const std::bad_alloc&) {
    ContextScope scope(driver_, context_);
    if (scope.ok()) driver_.cuEventDestroy(event);
  }
}

// Whoever still waits for the event waits for what it stood for when the wait was queued.
Mark::~Mark() {
  if (event_ && !core_->inherited()) core_->give_event(event_);
}

Status Mark::record(const std::shared_ptr<Core>& core, CuStream stream, Mark* out) {
  Mark made;
  made.core_ = core;
  EPCOMM_RETURN_IF_ERROR(core->take_event(&made.event_));
  EPCOMM_RETURN_IF_ERROR(
      core->driver().check(core->driver().cuEventRecord(made.event_, stream), "cuEventRecord"));
  *out = std::move(made);
  return {};
}

CuResult Mark::query() const noexcept {
  if (!event_) return kCuSuccess;
  ContextScope scope(core_->driver(), core_->context());
  return scope.ok() ? core_->driver().cuEventQuery(event_) : kCuDeinitialized;
}

Status Mark::make_wait(CuStream stream) const {
  if (!event_) return {};
  return core_->driver().check(core_->driver().cuStreamWaitEvent(stream, event_, 0),
                               "cuStreamWaitEvent");
}

}  // namespace epcomm::device
