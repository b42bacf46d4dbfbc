// The `ibrc` backend: the heap is host memory registered with NICs; host threads write commands,
// proxy threads post them as RDMA work requests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/rdma/endpoint.hpp"
#include "epcomm/backend.hpp"
#include "softhca/provider.hpp"

namespace epcomm::ibrc {

struct Options {
  common::RdmaOptions rdma;   // provider, paths, ranks, channels, depth...
  int num_threads = 0;        // EPCOMM_IBRC_THREADS; 0: one per path
  std::vector<int> cpus;      // EPCOMM_IBRC_CPUS: threads take them in turn; empty: anywhere
  int local_rank = 0;         // among those of its host, whose threads take the same CPUs in turn
  uint32_t queue_size = 256;  // commands of a channel's ring, a power of two
  std::string folder;         // EPCOMM_SHM_DIR; empty: memfd
  int64_t spin_us = -1;       // before a waiter yields; < 0: from cores and ranks
  bool use_pidfd = true;      // false: watch peers as on a kernel without pidfds
};

// What the proxies of a rank did so far.
struct Stats {
  uint64_t commands = 0;     // taken from rings
  uint64_t posts = 0;        // calls of ibv_post_send, that is doorbells
  uint64_t requests = 0;     // work requests
  uint64_t bytes = 0;        // of puts
  uint64_t merged = 0;       // puts that went with the one before them
  uint64_t completions = 0;  // entries of completion queues
  uint64_t probes = 0;       // empty writes that ask whether a peer is there
  uint64_t sleeps = 0;       // of the threads
  uint64_t stalls = 0;       // looks at commands for which no credit was left
};

// What this backend has beyond the interface, for the face that shows it.
class IbrcBackend : public common::RdmaEndpoint {
 public:
  using RdmaEndpoint::RdmaEndpoint;
  virtual Stats stats() const noexcept = 0;
};

// Ok, or why this backend cannot run here over that provider. Opens no device.
Status probe(const std::string& provider) noexcept;

// Null if there is no memory for it.
std::unique_ptr<IbrcBackend> create(const Options& options) noexcept;

// The same object: Cython does not know that one pointer becomes the other.
inline std::unique_ptr<Backend> as_backend(std::unique_ptr<IbrcBackend> backend) noexcept {
  return backend;
}

}  // namespace epcomm::ibrc
