// A libcuda.so.1 for machines without a GPU: "device memory" is shared host memory, copies are
// memcpy, and every object is counted, so that set-up, sharing, death and clean-up can be tested
// anywhere. It implements what backends/common/driver.hpp asks for and nothing else; it launches
// nothing. Behaviour is set by FAKE_CUDA_* variables:
//
//   FAKE_CUDA_GPUS=0,2      physical GPUs that the process sees, in its order (default 0)
//   FAKE_CUDA_BLOCKED=0-1   pairs of physical GPUs without peer access
//   FAKE_CUDA_SLOW=0-1      pairs without native atomics
//   FAKE_CUDA_VERSION, FAKE_CUDA_CAPABILITY (80), FAKE_CUDA_FREE (bytes), FAKE_CUDA_INIT (result)
//   FAKE_CUDA_REFUSE=fd,fabric,ipc   ways to share that are refused when they are used
//   FAKE_CUDA_OFFER=fd,fabric        ways that the attributes offer (default fd)
//   FAKE_CUDA_MPS=1                  whether contexts are shared through MPS; without it, as an old
//                                    driver, it knows no such attribute
//   FAKE_CUDA_UNWRITABLE=address     copies to the 64 KiB that begin there fail
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "common/driver.hpp"

using namespace epcomm::common;

namespace {

constexpr size_t kUnit = 2 << 20;
constexpr CuResult kInvalid = 1, kNoDevice = 100, kNotSupported = 801, kBadContext = 201;

const char* setting(const char* name, const char* fallback) {
  const char* text = std::getenv(name);
  return text ? text : fallback;
}

bool listed(const char* name, const char* fallback, const std::string& word) {
  std::stringstream list(setting(name, fallback));
  for (std::string item; std::getline(list, item, ',');) {
    if (item == word) return true;
  }
  return false;
}

std::vector<int> gpus() {
  std::vector<int> found;
  std::stringstream list(setting("FAKE_CUDA_GPUS", "0"));
  for (std::string item; std::getline(list, item, ',');) found.push_back(std::atoi(item.c_str()));
  return found;
}

bool pair_listed(const char* name, CuDevice a, CuDevice b) {
  const std::string x = std::to_string(gpus()[size_t(a)]), y = std::to_string(gpus()[size_t(b)]);
  return listed(name, "", x + "-" + y) || listed(name, "", y + "-" + x);
}

std::mutex mutex;
std::map<void*, size_t> reserved, mapped, allocated, opened, pinned;
std::map<void*, int> backing;  // descriptor of each allocation
std::atomic<int> memories{0}, streams{0}, contexts{0};
thread_local std::vector<CuContext> stack;

CuContext context_of(CuDevice device) { return reinterpret_cast<CuContext>(intptr_t(device + 1)); }

bool current() { return !stack.empty() && stack.back(); }

void* pointer(CuPointer at) { return reinterpret_cast<void*>(at); }

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) CuResult

extern "C" __attribute__((visibility("default"))) int fake_cuda_live(const char* what) {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string word = what;
  if (word == "contexts") return contexts;
  if (word == "streams") return streams;
  if (word == "current") return int(stack.size());
  if (word == "memories") return memories;
  if (word == "reserved") return int(reserved.size());
  if (word == "mapped") return int(mapped.size());
  if (word == "allocated") return int(allocated.size());
  if (word == "opened") return int(opened.size());
  if (word == "pinned") return int(pinned.size());
  return -1;
}

FAKE cuDriverGetVersion(int* version) {
  *version = std::atoi(setting("FAKE_CUDA_VERSION", "13000"));
  return 0;
}
FAKE cuInit(unsigned) { return std::atoi(setting("FAKE_CUDA_INIT", "0")); }
FAKE cuGetErrorName(CuResult result, const char** text) {
  *text = result == kNoDevice ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_FAKE";
  return 0;
}
FAKE cuGetErrorString(CuResult, const char** text) {
  *text = "as the fake was told";
  return 0;
}
FAKE cuDeviceGetCount(int* count) {
  *count = int(gpus().size());
  return 0;
}
FAKE cuDeviceGet(CuDevice* device, int index) {
  *device = index;
  return 0;
}
FAKE cuDeviceGetName(char* name, int bytes, CuDevice device) {
  std::snprintf(name, size_t(bytes), "Fake %d", gpus()[size_t(device)]);
  return 0;
}
FAKE cuDeviceGetUuid_v2(CuUuid* uuid, CuDevice device) {
  std::memset(uuid->bytes, 0xa0 + gpus()[size_t(device)], sizeof uuid->bytes);
  return 0;
}
FAKE cuDeviceGetAttribute(int* value, CuAttribute attribute, CuDevice) {
  const int capability = std::atoi(setting("FAKE_CUDA_CAPABILITY", "80"));
  switch (attribute) {
    case kCuComputeMajor:
      *value = capability / 10;
      return 0;
    case kCuComputeMinor:
      *value = capability % 10;
      return 0;
    case kCuVirtualMemory:
      *value = 1;
      return 0;
    case kCuHandleFd:
      *value = listed("FAKE_CUDA_OFFER", "fd", "fd");
      return 0;
    case kCuHandleFabric:
      *value = listed("FAKE_CUDA_OFFER", "fd", "fabric");
      return 0;
    case kCuMps:
      *value = std::atoi(setting("FAKE_CUDA_MPS", "-1"));
      return *value < 0 ? kInvalid : 0;
  }
  return kInvalid;
}
FAKE cuDeviceCanAccessPeer(int* can, CuDevice device, CuDevice peer) {
  *can = device != peer && !pair_listed("FAKE_CUDA_BLOCKED", device, peer);
  return 0;
}
FAKE cuDeviceGetP2PAttribute(int* value, CuPeerAttribute, CuDevice device, CuDevice peer) {
  *value = !pair_listed("FAKE_CUDA_SLOW", device, peer);
  return 0;
}
FAKE cuDevicePrimaryCtxRetain(CuContext* context, CuDevice device) {
  *context = context_of(device);
  ++contexts;
  return 0;
}
FAKE cuDevicePrimaryCtxRelease_v2(CuDevice) {
  --contexts;
  return 0;
}
FAKE cuCtxPushCurrent_v2(CuContext context) {
  if (std::atoi(setting("FAKE_CUDA_GONE", "0"))) return kCuDeinitialized;
  stack.push_back(context);
  return 0;
}
FAKE cuCtxPopCurrent_v2(CuContext* context) {
  if (stack.empty()) return kBadContext;
  *context = stack.back();
  stack.pop_back();
  return 0;
}
FAKE cuMemGetInfo_v2(size_t* free, size_t* total) {
  *total = size_t(1) << 30;
  *free = size_t(std::atoll(setting("FAKE_CUDA_FREE", "1073741824")));
  return 0;
}
FAKE cuMemGetAllocationGranularity(size_t* bytes, const CuAllocation*, int) {
  *bytes = kUnit;
  return 0;
}

// A memory is descriptor + 1 of a memfd.
FAKE cuMemCreate(CuMemory* memory, size_t bytes, const CuAllocation* allocation,
                 unsigned long long) {
  if (!current() || bytes % kUnit) return kInvalid;
  const bool fabric = allocation->handle_types == kCuHandleTypeFabric;
  if (fabric && listed("FAKE_CUDA_REFUSE", "", "fabric")) return 800;
  if (bytes > size_t(std::atoll(setting("FAKE_CUDA_FREE", "1073741824")))) return kCuOutOfMemory;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes)) != 0) return kInvalid;
  *memory = CuMemory(fd) + 1;
  ++memories;
  return 0;
}
FAKE cuMemRelease(CuMemory memory) {
  close(int(memory - 1));
  --memories;
  return 0;
}
FAKE cuMemExportToShareableHandle(void* handle, CuMemory memory, CuHandleType type,
                                  unsigned long long) {
  const int fd = int(memory - 1);
  if (type == kCuHandleTypeFd) {
    if (listed("FAKE_CUDA_REFUSE", "", "fd")) return kNotSupported;
    *static_cast<int*>(handle) = dup(fd);
    return 0;
  }
  // Names the memory while its owner maps it: the descriptor is kept.
  std::memset(handle, 0, 64);
  std::snprintf(static_cast<char*>(handle), 64, "/proc/%d/fd/%d", int(getpid()), dup(fd));
  return 0;
}
FAKE cuMemImportFromShareableHandle(CuMemory* memory, void* handle, CuHandleType type) {
  if (!current()) return kBadContext;
  const int fd = type == kCuHandleTypeFd ? dup(int(intptr_t(handle)))
                                         : open(static_cast<char*>(handle), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalid;
  *memory = CuMemory(fd) + 1;
  ++memories;
  return 0;
}
FAKE cuMemAddressReserve(CuPointer* at, size_t bytes, size_t, CuPointer, unsigned long long) {
  void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return kCuOutOfMemory;
  const std::lock_guard<std::mutex> lock(mutex);
  reserved[place] = bytes;
  *at = reinterpret_cast<CuPointer>(place);
  return 0;
}
FAKE cuMemAddressFree(CuPointer at, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (mapped.count(pointer(at)) || !reserved.erase(pointer(at))) return kInvalid;
  munmap(pointer(at), bytes);
  return 0;
}
FAKE cuMemMap(CuPointer at, size_t bytes, size_t, CuMemory memory, unsigned long long) {
  if (!current()) return kBadContext;
  struct stat facts;
  if (fstat(int(memory - 1), &facts) != 0 || size_t(facts.st_size) != bytes) return kInvalid;
  if (mmap(pointer(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, int(memory - 1), 0) ==
      MAP_FAILED) {
    return kInvalid;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  mapped[pointer(at)] = bytes;
  return 0;
}
FAKE cuMemSetAccess(CuPointer at, size_t bytes, const CuAccess* access, size_t count) {
  if (count != 1 || access->flags != kCuReadWrite) return kInvalid;
  return mprotect(pointer(at), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalid;
}
FAKE cuMemUnmap(CuPointer at, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!current() || !mapped.erase(pointer(at))) return kInvalid;
  mmap(pointer(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return 0;
}
FAKE cuMemAlloc_v2(CuPointer* at, size_t bytes) {
  if (!current()) return kBadContext;
  if (bytes > size_t(std::atoll(setting("FAKE_CUDA_FREE", "1073741824")))) return kCuOutOfMemory;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes)) != 0) return kInvalid;
  void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const std::lock_guard<std::mutex> lock(mutex);
  allocated[place] = bytes;
  backing[place] = fd;
  *at = reinterpret_cast<CuPointer>(place);
  return 0;
}
FAKE cuMemFree_v2(CuPointer at) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!current() || !allocated.count(pointer(at))) return kInvalid;
  munmap(pointer(at), allocated[pointer(at)]);
  close(backing[pointer(at)]);
  allocated.erase(pointer(at));
  return 0;
}
FAKE cuIpcGetMemHandle(CuIpcHandle* handle, CuPointer at) {
  if (listed("FAKE_CUDA_REFUSE", "", "ipc")) return kNotSupported;
  const std::lock_guard<std::mutex> lock(mutex);
  std::memset(handle, 0, sizeof *handle);
  std::snprintf(reinterpret_cast<char*>(handle->bytes), 64, "/proc/%d/fd/%d", int(getpid()),
                backing[pointer(at)]);
  return 0;
}
FAKE cuIpcOpenMemHandle_v2(CuPointer* at, CuIpcHandle handle, unsigned) {
  const std::string path = reinterpret_cast<char*>(handle.bytes);
  if (path.rfind("/proc/" + std::to_string(getpid()) + "/", 0) == 0) return kBadContext;
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat facts;
  if (fd < 0 || fstat(fd, &facts) != 0) return kInvalid;
  void* place = mmap(nullptr, size_t(facts.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  const std::lock_guard<std::mutex> lock(mutex);
  opened[place] = size_t(facts.st_size);
  *at = reinterpret_cast<CuPointer>(place);
  return 0;
}
FAKE cuIpcCloseMemHandle(CuPointer at) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!opened.count(pointer(at))) return kInvalid;
  munmap(pointer(at), opened[pointer(at)]);
  opened.erase(pointer(at));
  return 0;
}
FAKE cuMemHostAlloc(void** at, size_t bytes, unsigned flags) {
  if (!current() || flags != (kCuHostPortable | kCuHostMapped)) return kInvalid;
  *at = std::malloc(bytes);
  const std::lock_guard<std::mutex> lock(mutex);
  pinned[*at] = bytes;
  return 0;
}
FAKE cuMemHostGetDevicePointer_v2(CuPointer* device, void* host, unsigned) {
  *device = reinterpret_cast<CuPointer>(host);
  return 0;
}
FAKE cuMemFreeHost(void* at) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!pinned.erase(at)) return kInvalid;
  std::free(at);
  return 0;
}
FAKE cuMemsetD8Async(CuPointer at, unsigned char value, size_t bytes, CuStream) {
  std::memset(pointer(at), value, bytes);
  return 0;
}
FAKE cuMemcpyHtoDAsync_v2(CuPointer to, const void* from, size_t bytes, CuStream) {
  const CuPointer bad = std::strtoull(setting("FAKE_CUDA_UNWRITABLE", "0"), nullptr, 10);
  if (bad && to >= bad && to - bad < (1 << 16)) return kInvalid;
  std::memcpy(pointer(to), from, bytes);
  return 0;
}
FAKE cuMemcpyDtoHAsync_v2(void* to, CuPointer from, size_t bytes, CuStream) {
  std::memcpy(to, pointer(from), bytes);
  return 0;
}
FAKE cuStreamCreate(CuStream* stream, unsigned flags) {
  if (flags != kCuStreamNonBlocking) return kInvalid;
  *stream = reinterpret_cast<CuStream>(intptr_t(++streams));
  return 0;
}
FAKE cuStreamSynchronize(CuStream) { return 0; }
FAKE cuStreamDestroy_v2(CuStream) {
  --streams;
  return 0;
}
FAKE cuStreamIsCapturing(CuStream, int* status) {
  *status = 0;
  return 0;
}
FAKE cuStreamWaitEvent(CuStream, CuEvent, unsigned) { return 0; }
FAKE cuEventCreate(CuEvent* event, unsigned) {
  *event = nullptr;
  return 0;
}
FAKE cuEventRecord(CuEvent, CuStream) { return 0; }
FAKE cuEventDestroy_v2(CuEvent) { return 0; }
FAKE cuPointerGetAttribute(void*, int, CuPointer) { return kInvalid; }
FAKE cuLaunchKernel(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                    unsigned, CuStream, void**, void**) {
  return kInvalid;
}

// What the device engine needs beyond: it is there, and not to be had.
#define ABSENT(name, ...) \
  FAKE name(__VA_ARGS__) { return kInvalid; }
ABSENT(cuStreamCreateWithPriority, CuStream*, unsigned, int)
ABSENT(cuCtxGetStreamPriorityRange, int*, int*)
ABSENT(cuStreamQuery, CuStream)
ABSENT(cuEventQuery, CuEvent)
ABSENT(cuLaunchKernelEx, const void*, CuFunction, void**, void**)
ABSENT(cuFuncSetAttribute, CuFunction, CuFunctionAttribute, int)
ABSENT(cuMemcpyDtoDAsync_v2, CuPointer, CuPointer, size_t, CuStream)
ABSENT(cuMemPoolCreate, CuPool*, const CuPoolProperties*)
ABSENT(cuMemPoolDestroy, CuPool)
ABSENT(cuMemPoolSetAttribute, CuPool, CuPoolAttribute, void*)
ABSENT(cuMemAllocFromPoolAsync, CuPointer*, size_t, CuPool, CuStream)
ABSENT(cuMemFreeAsync, CuPointer, CuStream)
