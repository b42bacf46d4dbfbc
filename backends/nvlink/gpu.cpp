#include "nvlink/gpu.hpp"

#include <cstring>

#include "common/random.hpp"

namespace epcomm::nvlink {
namespace {

using common::ContextScope;
using common::CuDevice;
using common::CuPointer;
using common::Driver;

constexpr int kOldestMajor = 8;

struct Facts {
  CuDevice device;
  std::string name;
  int major;
  int minor;
};

Status facts_of(const Driver& driver, int index, Facts* out) {
  EPCOMM_RETURN_IF_ERROR(driver.check(driver.cuDeviceGet(&out->device, index), "cuDeviceGet"));
  char name[256] = "";
  driver.cuDeviceGetName(name, sizeof name, out->device);
  out->name = name;
  const char* call = "cuDeviceGetAttribute";
  EPCOMM_RETURN_IF_ERROR(driver.check(
      driver.cuDeviceGetAttribute(&out->major, common::kCuComputeMajor, out->device), call));
  return driver.check(
      driver.cuDeviceGetAttribute(&out->minor, common::kCuComputeMinor, out->device), call);
}

Status too_old(int index, const Facts& facts) {
  return error(Code::kUnavailable, -1,
               "GPU %d (%s) has compute capability %d.%d; needed: %d.0 or newer", index,
               facts.name.c_str(), facts.major, facts.minor, kOldestMajor);
}

Status load(Driver* driver, int* count) {
  EPCOMM_RETURN_IF_ERROR(Driver::load(driver));
  EPCOMM_RETURN_IF_ERROR(driver->check(driver->cuDeviceGetCount(count), "cuDeviceGetCount"));
  if (*count > 0) return {};
  return error(Code::kUnavailable, -1,
               "the NVIDIA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES)");
}

}  // namespace

Status device_uuid(const Driver& driver, CuDevice device, std::string* out) {
  common::CuUuid uuid{};
  EPCOMM_RETURN_IF_ERROR(driver.check(driver.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid"));
  common::Key key;
  std::memcpy(key.data(), uuid.bytes, key.size());
  *out = common::to_hex(key);
  return {};
}

Status any_gpu() {
  Driver driver;
  int count = 0;
  EPCOMM_RETURN_IF_ERROR(load(&driver, &count));
  Status status;
  for (int index = 0; index < count; ++index) {
    Facts facts;
    status = facts_of(driver, index, &facts);
    if (status.ok() && facts.major < kOldestMajor) status = too_old(index, facts);
    if (status.ok()) return {};
  }
  status.code = Code::kUnavailable;
  return status;
}

Status Gpu::open(int index) {
  int count = 0;
  EPCOMM_RETURN_IF_ERROR(load(&driver_, &count));
  if (index < 0 || index >= count) {
    return error(Code::kUnavailable, -1, "device=%d: this process sees %d GPU%s, numbered from 0",
                 index, count, count == 1 ? "" : "s");
  }
  Facts facts;
  EPCOMM_RETURN_IF_ERROR(facts_of(driver_, index, &facts));
  if (facts.major < kOldestMajor) return too_old(index, facts);
  index_ = index;
  device_ = facts.device;
  name_ = facts.name;
  return device_uuid(driver_, device_, &uuid_);
}

Status Gpu::retain() {
  common::CuContext context = nullptr;
  EPCOMM_RETURN_IF_ERROR(driver_.check(driver_.cuDevicePrimaryCtxRetain(&context, device_),
                                       "cuDevicePrimaryCtxRetain"));
  context_ = context;
  const ContextScope scope(driver_, context_);
  EPCOMM_RETURN_IF_ERROR(scope.status());
  // Not ordered with the default stream: a wait in somebody's kernel must not hold us up.
  return driver_.check(driver_.cuStreamCreate(&stream_, common::kCuStreamNonBlocking),
                       "cuStreamCreate");
}

void Gpu::release() noexcept {
  if (!context_) return;
  {
    const ContextScope scope(driver_, context_);
    if (scope.ok() && stream_) driver_.cuStreamDestroy(stream_);
  }
  driver_.cuDevicePrimaryCtxRelease(device_);
  stream_ = nullptr;
  context_ = nullptr;
}

bool Gpu::has(common::CuAttribute attribute) const noexcept {
  int value = 0;
  return driver_.cuDeviceGetAttribute(&value, attribute, device_) == common::kCuSuccess &&
         value != 0;
}

template <class Call>
Status Gpu::on_stream(const char* name, Call&& call) const {
  const ContextScope scope(driver_, context_);
  EPCOMM_RETURN_IF_ERROR(scope.status());
  EPCOMM_RETURN_IF_ERROR(driver_.check(call(), name));
  return driver_.check(driver_.cuStreamSynchronize(stream_), name);
}

Status Gpu::zero(CuPointer at, size_t bytes) const {
  return on_stream("cuMemsetD8Async",
                   [&] { return driver_.cuMemsetD8Async(at, 0, bytes, stream_); });
}

Status Gpu::write(CuPointer to, const void* from, size_t bytes) const {
  return on_stream("cuMemcpyHtoDAsync",
                   [&] { return driver_.cuMemcpyHtoDAsync(to, from, bytes, stream_); });
}

Status Gpu::read(void* to, CuPointer from, size_t bytes) const {
  return on_stream("cuMemcpyDtoHAsync",
                   [&] { return driver_.cuMemcpyDtoHAsync(to, from, bytes, stream_); });
}

}  // namespace epcomm::nvlink
