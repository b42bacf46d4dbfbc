// The `ibgda` backend on host memory: whoever computes builds mlx5 work requests in the rings of
// the queue pairs and rings their doorbells. No thread of its own, no verbs on the data path.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/rdma/endpoint.hpp"
#include "epcomm/backend.hpp"
#include "softhca/provider.hpp"

namespace epcomm::ibgda {

struct Options {
  common::RdmaOptions rdma;  // provider, paths, ranks, channels, depth...
  bool failover = false;     // a spare queue pair on another port for each, and replay
  bool shared = false;    // every queue pair by the path for many threads; else control ones only
  std::string folder;     // EPCOMM_SHM_DIR; empty: memfd
  int64_t spin_us = -1;   // before a waiter yields; < 0: from cores and ranks
  bool use_pidfd = true;  // false: watch peers as on a kernel without pidfds
};

// What the threads of a rank did so far.
struct Stats {
  uint64_t requests = 0;     // work requests
  uint64_t doorbells = 0;    // rung
  uint64_t bytes = 0;        // of puts
  uint64_t merged = 0;       // puts that went with the one before them
  uint64_t completions = 0;  // entries of completion queues
  uint64_t probes = 0;       // empty writes that ask whether a peer is there
  uint64_t replayed = 0;     // work requests posted again, through a spare queue pair
  uint64_t moved = 0;        // queue pairs given up for their spare
  uint64_t full = 0;         // waits for room in a send queue
};

// What this backend has beyond the interface, for the face that shows it.
class IbgdaBackend : public common::RdmaEndpoint {
 public:
  using RdmaEndpoint::RdmaEndpoint;
  virtual Stats stats() const noexcept = 0;
};

// Ok, or why this backend cannot run here over that provider. Opens no device.
Status probe(const std::string& provider) noexcept;

// Null if there is no memory for it.
std::unique_ptr<IbgdaBackend> create(const Options& options) noexcept;

// The same object: Cython does not know that one pointer becomes the other.
inline std::unique_ptr<Backend> as_backend(std::unique_ptr<IbgdaBackend> backend) noexcept {
  return backend;
}

}  // namespace epcomm::ibgda
