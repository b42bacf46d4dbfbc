#include "nvlink/memory.hpp"

#include <fcntl.h>

#include <cinttypes>
#include <cstring>

#include "common/errors.hpp"

namespace epcomm::nvlink {
namespace {

using common::ContextScope;
using common::CuAllocation;
using common::CuMemory;
using common::CuPointer;
using common::CuResult;
using common::Driver;
using common::Key;
using common::UniqueFd;

constexpr uint64_t kIpcBlock = 2 << 20;  // smaller allocations share their block with strangers'

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

template <class Handle>
std::string handle_to_hex(const Handle& handle) {
  static_assert(sizeof handle == 4 * sizeof(Key));
  std::string text;
  Key part;
  for (size_t at = 0; at < sizeof handle; at += part.size()) {
    std::memcpy(part.data(), handle.bytes + at, part.size());
    text += common::to_hex(part);
  }
  return text;
}

template <class Handle>
Status handle_from_hex(int peer, const std::string& text, Handle* out) {
  Key part;
  const size_t digits = 2 * part.size();
  bool good = text.size() == 4 * digits;
  for (size_t i = 0; good && i < 4; ++i) {
    good = common::from_hex(text.substr(i * digits, digits), &part);
    std::memcpy(out->bytes + i * part.size(), part.data(), part.size());
  }
  if (good) return {};
  return error(Code::kUnavailable, peer, "rank %d's information: `handle` is no handle", peer);
}

CuAllocation allocation_on(const Gpu& gpu, Share share) {
  CuAllocation allocation{};
  allocation.type = common::kCuPinned;
  allocation.handle_types =
      share == Share::kFabric ? common::kCuHandleTypeFabric : common::kCuHandleTypeFd;
  allocation.location = {common::kCuLocationDevice, gpu.device()};
  return allocation;
}

Status out_of_memory(const Gpu& gpu, uint64_t bytes) {
  size_t free = 0, total = 0;
  gpu.driver().cuMemGetInfo(&free, &total);
  return error(Code::kOutOfMemory, -1,
               "no room for a heap of %" PRIu64
               " bytes on GPU %d (%s): %zu of %zu bytes are free; ask for a smaller heap, "
               "or free what else is there (an array library's cache, other processes)",
               bytes, gpu.index(), gpu.name().c_str(), free, total);
}

// A refusal of one way to share; the caller may try the next.
Status refused(Status status, const char* way) {
  if (status.code == Code::kOutOfMemory || status.ok()) return status;
  status.code = Code::kUnavailable;
  status.text = std::string(way) + ": " + status.text;
  return status;
}

}  // namespace

void Memory::swap(Memory& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(kind_, other.kind_);
  std::swap(base_, other.base_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(ticket_, other.ticket_);
  std::swap(fd_, other.fd_);
}

Status Memory::create(const Gpu& gpu, uint64_t heap_bytes, Share share, Memory* out) {
  if (heap_bytes == 0 || heap_bytes > uint64_t(1) << 47) {
    return error(Code::kInvalidArgument, -1,
                 "size_bytes=%" PRIu64 ": expected 1 to 2^47 bytes of heap", heap_bytes);
  }
  const ContextScope scope(gpu.driver(), gpu.context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  std::string reasons;
  // A descriptor needs nothing but the kernel, a fabric handle a service, IPC old machinery.
  for (Share way : {Share::kFd, Share::kFabric, Share::kIpc}) {
    if (share != Share::kAuto && share != way) continue;
    Memory memory;
    memory.gpu_ = &gpu;
    memory.ticket_.heap_bytes = heap_bytes;
    Status status = memory.make(way);
    if (status.ok()) {
      EPCOMM_RETURN_IF_ERROR(memory.seal());
      *out = std::move(memory);
      return {};
    }
    if (status.code != Code::kUnavailable) return status;
    reasons += (reasons.empty() ? "" : "; ") + status.text;
  }
  return error(Code::kUnavailable, -1, "GPU %d (%s) shares no memory with other processes: %s",
               gpu.index(), gpu.name().c_str(), reasons.c_str());
}

Status Memory::make(Share share) {
  ticket_.share = share;
  if (share == Share::kIpc) return refused(make_ipc(), "CUDA IPC");
  const bool fabric = share == Share::kFabric;
  const char* way = fabric ? "fabric handles" : "file descriptors";
  if (!gpu_->has(common::kCuVirtualMemory) ||
      !gpu_->has(fabric ? common::kCuHandleFabric : common::kCuHandleFd)) {
    return error(Code::kUnavailable, -1, "%s: not offered by the driver", way);
  }
  return refused(make_mapped(share), way);
}

Status Memory::make_mapped(Share share) {
  const Driver& driver = gpu_->driver();
  const CuAllocation allocation = allocation_on(*gpu_, share);
  size_t unit = 0;
  EPCOMM_RETURN_IF_ERROR(driver.check(
      driver.cuMemGetAllocationGranularity(&unit, &allocation, common::kCuGranularityRecommended),
      "cuMemGetAllocationGranularity"));
  mapped_bytes_ = round_up(round_up(ticket_.heap_bytes, 64) + kTailBytes, unit);

  CuMemory memory = 0;
  const CuResult made = driver.cuMemCreate(&memory, mapped_bytes_, &allocation, 0);
  if (made == common::kCuOutOfMemory) return out_of_memory(*gpu_, mapped_bytes_);
  EPCOMM_RETURN_IF_ERROR(driver.check(made, "cuMemCreate"));
  const char* call = "cuMemExportToShareableHandle";
  Status status;
  if (share == Share::kFabric) {
    common::CuFabricHandle handle{};
    status = driver.check(
        driver.cuMemExportToShareableHandle(&handle, memory, common::kCuHandleTypeFabric, 0), call);
    ticket_.handle = handle_to_hex(handle);
  } else {
    int fd = -1;
    status = driver.check(
        driver.cuMemExportToShareableHandle(&fd, memory, common::kCuHandleTypeFd, 0), call);
    fd_.reset(fd);
    if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  if (status.ok()) status = map(memory);
  driver.cuMemRelease(memory);  // the mapping keeps it
  return status;
}

// Leaves nothing behind if it fails.
Status Memory::map(CuMemory memory) {
  const Driver& driver = gpu_->driver();
  CuPointer at = 0;
  EPCOMM_RETURN_IF_ERROR(
      driver.check(driver.cuMemAddressReserve(&at, mapped_bytes_, 0, 0, 0), "cuMemAddressReserve"));
  Status status = driver.check(driver.cuMemMap(at, mapped_bytes_, 0, memory, 0), "cuMemMap");
  if (status.ok()) {
    const common::CuAccess access{{common::kCuLocationDevice, gpu_->device()},
                                  common::kCuReadWrite};
    status = driver.check(driver.cuMemSetAccess(at, mapped_bytes_, &access, 1), "cuMemSetAccess");
    if (!status.ok()) driver.cuMemUnmap(at, mapped_bytes_);
  }
  if (!status.ok()) {
    driver.cuMemAddressFree(at, mapped_bytes_);
    return status;
  }
  base_ = at;
  kind_ = Kind::kMapped;
  return {};
}

Status Memory::make_ipc() {
  const Driver& driver = gpu_->driver();
  mapped_bytes_ = round_up(round_up(ticket_.heap_bytes, 64) + kTailBytes, kIpcBlock);
  CuPointer at = 0;
  const CuResult made = driver.cuMemAlloc(&at, mapped_bytes_);
  if (made == common::kCuOutOfMemory) return out_of_memory(*gpu_, mapped_bytes_);
  EPCOMM_RETURN_IF_ERROR(driver.check(made, "cuMemAlloc"));
  base_ = at;
  kind_ = Kind::kAllocated;
  common::CuIpcHandle handle{};
  EPCOMM_RETURN_IF_ERROR(
      driver.check(driver.cuIpcGetMemHandle(&handle, base_), "cuIpcGetMemHandle"));
  ticket_.handle = handle_to_hex(handle);
  return {};
}

// Zeroes the heap and leaves the proof behind it.
Status Memory::seal() {
  ticket_.mapped_bytes = mapped_bytes_;
  ticket_.address = base_;
  EPCOMM_RETURN_IF_ERROR(common::random_key(&ticket_.nonce));
  EPCOMM_RETURN_IF_ERROR(gpu_->zero(base_, mapped_bytes_));
  return gpu_->write(base_ + mapped_bytes_ - kTailBytes, ticket_.nonce.data(),
                     ticket_.nonce.size());
}

Status Memory::attach(const Gpu& gpu, int peer, const Ticket& ticket, const UniqueFd& fd,
                      bool local, Memory* out) {
  const ContextScope scope(gpu.driver(), gpu.context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  Memory memory;
  memory.gpu_ = &gpu;
  memory.ticket_ = ticket;
  memory.mapped_bytes_ = ticket.mapped_bytes;
  Status status = memory.import(fd, local);
  Key nonce{};
  if (status.ok()) {
    status = gpu.read(nonce.data(), memory.base_ + memory.mapped_bytes_ - kTailBytes, nonce.size());
  }
  if (!status.ok()) {
    return error(Code::kUnavailable, peer, "rank %d's heap cannot be mapped on GPU %d (%s): %s",
                 peer, gpu.index(), gpu.name().c_str(), status.text.c_str());
  }
  if (!common::same_key(nonce, ticket.nonce)) {
    return error(Code::kUnavailable, peer, "what was mapped for rank %d is not its heap", peer);
  }
  *out = std::move(memory);
  return {};
}

Status Memory::import(const UniqueFd& fd, bool local) {
  const Driver& driver = gpu_->driver();
  const char* call = "cuMemImportFromShareableHandle";
  CuMemory memory = 0;
  switch (ticket_.share) {
    case Share::kIpc: {
      if (local) {  // the driver opens no handle of its own process
        base_ = ticket_.address;
        kind_ = Kind::kBorrowed;
        return {};
      }
      common::CuIpcHandle handle;
      EPCOMM_RETURN_IF_ERROR(handle_from_hex(-1, ticket_.handle, &handle));
      CuPointer at = 0;
      EPCOMM_RETURN_IF_ERROR(
          driver.check(driver.cuIpcOpenMemHandle(&at, handle, common::kCuIpcLazyPeerAccess),
                       "cuIpcOpenMemHandle"));
      base_ = at;
      kind_ = Kind::kOpened;
      return {};
    }
    case Share::kFabric: {
      common::CuFabricHandle handle;
      EPCOMM_RETURN_IF_ERROR(handle_from_hex(-1, ticket_.handle, &handle));
      EPCOMM_RETURN_IF_ERROR(driver.check(
          driver.cuMemImportFromShareableHandle(&memory, &handle, common::kCuHandleTypeFabric),
          call));
      break;
    }
    default:
      EPCOMM_RETURN_IF_ERROR(driver.check(
          driver.cuMemImportFromShareableHandle(
              &memory, reinterpret_cast<void*>(intptr_t(fd.get())), common::kCuHandleTypeFd),
          call));
  }
  const Status status = map(memory);
  driver.cuMemRelease(memory);
  return status;
}

void Memory::release() noexcept {
  fd_.reset();
  if (!base_) return;
  const Driver& driver = gpu_->driver();
  const ContextScope scope(driver, gpu_->context());
  if (scope.ok()) {  // else the context is gone, and its mappings with it
    switch (kind_) {
      case Kind::kMapped:
        driver.cuMemUnmap(base_, mapped_bytes_);
        driver.cuMemAddressFree(base_, mapped_bytes_);
        break;
      case Kind::kAllocated:
        driver.cuMemFree(base_);
        break;
      case Kind::kOpened:
        driver.cuIpcCloseMemHandle(base_);
        break;
      case Kind::kBorrowed:
      case Kind::kNone:
        break;
    }
  }
  base_ = 0;
  kind_ = Kind::kNone;
}

}  // namespace epcomm::nvlink
