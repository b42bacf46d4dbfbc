// The CUDA driver's interface, found at run time: building needs no CUDA toolkit, and a machine
// without a driver loads everything and is told why.
//
// Only facts of the driver's binary interface stand here: names, numbers, layouts. The names with
// a version (`_v2`) are those that the library exports; the toolkit's header hides them behind
// macros. A function is one row of the table; add yours.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epcomm/status.hpp"

namespace epcomm::common {

using CuResult = int;
using CuDevice = int;
using CuPointer = unsigned long long;
using CuContext = struct CuContextTag*;
using CuStream = struct CuStreamTag*;
using CuFunction = struct CuFunctionTag*;
using CuEvent = struct CuEventTag*;
using CuPool = struct CuPoolTag*;
using CuMemory = unsigned long long;  // a piece of physical memory

enum : CuResult {
  kCuSuccess = 0,
  kCuInvalidValue = 1,
  kCuOutOfMemory = 2,
  kCuDeinitialized = 4,
  kCuNotReady = 600,
};

struct CuUuid {
  unsigned char bytes[16];
};

enum CuAttribute : int {
  kCuComputeMajor = 75,
  kCuComputeMinor = 76,
  kCuVirtualMemory = 102,
  kCuHandleFd = 103,
  kCuHandleFabric = 128,
  kCuMps = 133,  // contexts are shared through MPS; unknown to drivers before 12.0
};

enum CuPeerAttribute : int { kCuPeerNativeAtomics = 3 };

enum CuHandleType : int { kCuHandleTypeFd = 1, kCuHandleTypeFabric = 8 };

struct CuLocation {
  int type;  // kCuLocationDevice
  int id;
};
constexpr int kCuLocationDevice = 1;

struct CuAllocation {
  int type;  // kCuPinned
  int handle_types;
  CuLocation location;
  void* windows;
  unsigned char compression;
  unsigned char rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
constexpr int kCuPinned = 1;
constexpr int kCuGranularityRecommended = 1;
static_assert(sizeof(CuAllocation) == 32, "the driver's CUmemAllocationProp");

struct CuAccess {
  CuLocation location;
  int flags;  // kCuReadWrite
};
constexpr int kCuReadWrite = 3;
static_assert(sizeof(CuAccess) == 12, "the driver's CUmemAccessDesc");

enum CuFunctionAttribute : int { kCuMaxDynamicShared = 8 };
enum CuPoolAttribute : int { kCuPoolReleaseThreshold = 4 };

struct CuPoolProperties {
  int type;  // kCuPinned
  int handle_types;
  CuLocation location;
  void* windows;
  size_t max_bytes;
  unsigned short usage;
  unsigned char reserved[54];
};
static_assert(sizeof(CuPoolProperties) == 88, "the driver's CUmemPoolProps");

struct CuLaunchAttribute {
  int id;  // kCuMayBeginEarly
  int reserved;
  int value;
  unsigned char rest[60];
};
// The kernel may begin when the one before it in the stream lets it (programmatic stream
// serialization); from compute capability 9.0 on.
constexpr int kCuMayBeginEarly = 6;
static_assert(sizeof(CuLaunchAttribute) == 72, "the driver's CUlaunchAttribute");

struct CuLaunchConfig {
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  CuStream stream;
  CuLaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(CuLaunchConfig) == 56, "the driver's CUlaunchConfig");

struct CuFabricHandle {
  unsigned char bytes[64];
};
struct CuIpcHandle {
  unsigned char bytes[64];
};

constexpr unsigned kCuHostPortable = 1;
constexpr unsigned kCuHostMapped = 2;
constexpr unsigned kCuStreamNonBlocking = 1;
constexpr unsigned kCuIpcLazyPeerAccess = 1;
constexpr unsigned kCuEventDisableTiming = 2;
constexpr int kCuPointerDeviceOrdinal = 9;

// X(member, exported name, arguments)
#define EPCOMM_DRIVER_FUNCTIONS(X)                                                                 \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int* version))                                      \
  X(cuInit, "cuInit", (unsigned flags))                                                            \
  X(cuGetErrorName, "cuGetErrorName", (CuResult result, const char** text))                        \
  X(cuGetErrorString, "cuGetErrorString", (CuResult result, const char** text))                    \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                                            \
  X(cuDeviceGet, "cuDeviceGet", (CuDevice * device, int index))                                    \
  X(cuDeviceGetName, "cuDeviceGetName", (char* name, int bytes, CuDevice device))                  \
  X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (CuUuid * uuid, CuDevice device))                       \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute",                                                  \
    (int* value, CuAttribute attribute, CuDevice device))                                          \
  X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int* can, CuDevice device, CuDevice peer))    \
  X(cuDeviceGetP2PAttribute, "cuDeviceGetP2PAttribute",                                            \
    (int* value, CuPeerAttribute attribute, CuDevice device, CuDevice peer))                       \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CuContext * context, CuDevice device))  \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CuDevice device))                  \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CuContext context))                                  \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CuContext * context))                                  \
  X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t* free, size_t* total))                                \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                \
    (size_t* bytes, const CuAllocation* allocation, int option))                                   \
  X(cuMemCreate, "cuMemCreate",                                                                    \
    (CuMemory * memory, size_t bytes, const CuAllocation* allocation, unsigned long long flags))   \
  X(cuMemRelease, "cuMemRelease", (CuMemory memory))                                               \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                  \
    (void* handle, CuMemory memory, CuHandleType type, unsigned long long flags))                  \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                              \
    (CuMemory * memory, void* handle, CuHandleType type))                                          \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                                    \
    (CuPointer * at, size_t bytes, size_t alignment, CuPointer wish, unsigned long long flags))    \
  X(cuMemAddressFree, "cuMemAddressFree", (CuPointer at, size_t bytes))                            \
  X(cuMemMap, "cuMemMap",                                                                          \
    (CuPointer at, size_t bytes, size_t offset, CuMemory memory, unsigned long long flags))        \
  X(cuMemUnmap, "cuMemUnmap", (CuPointer at, size_t bytes))                                        \
  X(cuMemSetAccess, "cuMemSetAccess",                                                              \
    (CuPointer at, size_t bytes, const CuAccess* access, size_t count))                            \
  X(cuMemAlloc, "cuMemAlloc_v2", (CuPointer * at, size_t bytes))                                   \
  X(cuMemFree, "cuMemFree_v2", (CuPointer at))                                                     \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", (CuIpcHandle * handle, CuPointer at))                  \
  X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2",                                                   \
    (CuPointer * at, CuIpcHandle handle, unsigned flags))                                          \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (CuPointer at))                                    \
  X(cuMemHostAlloc, "cuMemHostAlloc", (void** at, size_t bytes, unsigned flags))                   \
  X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",                                     \
    (CuPointer * device, void* host, unsigned flags))                                              \
  X(cuMemFreeHost, "cuMemFreeHost", (void* at))                                                    \
  X(cuMemsetD8Async, "cuMemsetD8Async",                                                            \
    (CuPointer at, unsigned char value, size_t bytes, CuStream stream))                            \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                                     \
    (CuPointer to, const void* from, size_t bytes, CuStream stream))                               \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                                     \
    (void* to, CuPointer from, size_t bytes, CuStream stream))                                     \
  X(cuStreamCreate, "cuStreamCreate", (CuStream * stream, unsigned flags))                         \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CuStream stream))                                 \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CuStream stream, int* status))                    \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (CuStream stream, CuEvent event, unsigned flags))      \
  X(cuStreamCreateWithPriority, "cuStreamCreateWithPriority",                                      \
    (CuStream * stream, unsigned flags, int priority))                                             \
  X(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int* least, int* greatest))       \
  X(cuStreamQuery, "cuStreamQuery", (CuStream stream))                                             \
  X(cuEventQuery, "cuEventQuery", (CuEvent event))                                                 \
  X(cuFuncSetAttribute, "cuFuncSetAttribute",                                                      \
    (CuFunction function, CuFunctionAttribute attribute, int value))                               \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                                     \
    (CuPointer to, CuPointer from, size_t bytes, CuStream stream))                                 \
  X(cuMemPoolCreate, "cuMemPoolCreate", (CuPool * pool, const CuPoolProperties* properties))       \
  X(cuMemPoolDestroy, "cuMemPoolDestroy", (CuPool pool))                                           \
  X(cuMemPoolSetAttribute, "cuMemPoolSetAttribute",                                                \
    (CuPool pool, CuPoolAttribute attribute, void* value))                                         \
  X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync",                                            \
    (CuPointer * at, size_t bytes, CuPool pool, CuStream stream))                                  \
  X(cuMemFreeAsync, "cuMemFreeAsync", (CuPointer at, CuStream stream))                             \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CuStream stream))                                      \
  X(cuEventCreate, "cuEventCreate", (CuEvent * event, unsigned flags))                             \
  X(cuEventRecord, "cuEventRecord", (CuEvent event, CuStream stream))                              \
  X(cuEventDestroy, "cuEventDestroy_v2", (CuEvent event))                                          \
  X(cuPointerGetAttribute, "cuPointerGetAttribute", (void* value, int attribute, CuPointer at))    \
  X(cuLaunchKernel, "cuLaunchKernel",                                                              \
    (CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,     \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream, void** arguments, \
     void** extra))                                                                                \
  X(cuLaunchKernelEx, "cuLaunchKernelEx",                                                          \
    (const CuLaunchConfig* config, CuFunction function, void** arguments, void** extra))

struct Driver {
#define EPCOMM_DRIVER_MEMBER(member, symbol, arguments) CuResult(*member) arguments = nullptr;
  EPCOMM_DRIVER_FUNCTIONS(EPCOMM_DRIVER_MEMBER)
#undef EPCOMM_DRIVER_MEMBER

  // Loads and initialises the driver; makes no context. kUnavailable says what is missing.
  static Status load(Driver* out);

  // kCuda: "<call>: <name> (<number>): <text>", or ok.
  Status check(CuResult result, const char* call) const;
};

// Makes a context current in this thread for a block and puts back what was current before.
class ContextScope {
 public:
  ContextScope(const Driver& driver, CuContext context) noexcept
      : driver_(driver), result_(driver.cuCtxPushCurrent(context)) {}
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope() {
    CuContext popped;
    if (result_ == kCuSuccess) driver_.cuCtxPopCurrent(&popped);
  }

  bool ok() const noexcept { return result_ == kCuSuccess; }
  Status status() const { return driver_.check(result_, "cuCtxPushCurrent"); }

 private:
  const Driver& driver_;
  const CuResult result_;
};

}  // namespace epcomm::common
