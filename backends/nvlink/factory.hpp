// The `nvlink` backend: the heap is GPU memory that all ranks of one host map; kernels load and
// store it over NVLink or PCIe.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "epcomm/backend.hpp"

namespace epcomm::nvlink {

// How heaps travel between processes.
enum class Share : int {
  kAuto = 0,
  kFd = 1,      // virtual memory management, a file descriptor
  kFabric = 2,  // the same memory, a handle of the NVLink fabric
  kIpc = 3,     // legacy CUDA IPC
};

struct Options {
  int device = 0;
  Share share = Share::kAuto;  // EPCOMM_NVLINK_SHARE
  bool use_pidfd = true;       // false: watch peers as on a kernel without pidfds
};

// What this backend has beyond the interface, for the face that shows it.
class NvlinkBackend : public Backend {
 public:
  virtual int device() const noexcept = 0;
  virtual Share share() const noexcept = 0;                 // kAuto before alloc_heap()
  virtual uint64_t heap() const noexcept = 0;               // device address, 0 before alloc_heap()
  virtual uint64_t peer_heap(int peer) const noexcept = 0;  // 0: none; own rank: own heap
  virtual std::vector<int> same_gpu() const = 0;            // other ranks on this rank's GPU
  virtual bool mps() const noexcept = 0;  // this rank and those run side by side, through CUDA MPS
};

// Ok, or why this backend cannot run here. Initialises the driver, makes no context.
Status probe() noexcept;

// Null if there is no memory for it.
std::unique_ptr<NvlinkBackend> create(const Options& options) noexcept;

// Pairs of ranks whose GPUs cannot access each other. `uuids`: each rank's GPU; `blocked`: of each
// rank, what its GPU cannot access among the GPUs that it sees, as the first kUuidPrefix digits of
// their UUIDs. A pair that neither side knows about is not in the list: mapping will tell.
constexpr size_t kUuidPrefix = 16;
std::vector<std::pair<int, int>> missing_pairs(
    const std::vector<std::string>& uuids, const std::vector<std::vector<std::string>>& blocked);

}  // namespace epcomm::nvlink
