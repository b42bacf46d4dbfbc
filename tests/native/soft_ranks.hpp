// What programs share that put the ranks of one process on NICs of the software HCA.
#pragma once

#include <dirent.h>

#include <chrono>
#include <string>

#include "check.hpp"
#include "common/rdma/rdma.hpp"
#include "softhca/provider.hpp"

namespace epcomm::testing {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline int open_files() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  EXPECT(folder, "/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

struct SoftSetup {
  int num_ranks = 2;
  int num_channels = 2;
  int ports = 2;
  uint32_t depth = 64;
  uint64_t heap_bytes = 1 << 18;
  uint64_t seed = 0;   // of the model's disorder
  std::string faults;  // of rank 0's NICs
  double timeout_s = 60;
};

// One rank's NICs, all of its ports, and its queue pairs.
inline void open_soft(const SoftSetup& setup, int rank, common::RdmaOptions* options) {
  softhca::SoftHcaOptions soft;
  soft.num_ports = setup.ports;
  soft.seed = setup.seed;
  if (rank == 0) soft.faults = setup.faults;
  EXPECT_OK(softhca::open_provider("soft", soft, &options->provider));
  for (int port = 0; port < setup.ports; ++port) {
    options->paths.push_back({"soft" + std::to_string(port), 1, 0});
  }
  options->num_ranks = setup.num_ranks;
  options->rank = rank;
  options->num_channels = setup.num_channels;
  options->depth = setup.depth;
}

}  // namespace epcomm::testing
