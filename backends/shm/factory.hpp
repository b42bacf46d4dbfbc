// The `shm` backend: the heap is host memory that all ranks of one host map; host threads copy.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/pair.hpp"
#include "epcomm/backend.hpp"

namespace epcomm::shm {

struct Options {
  std::string folder;     // EPCOMM_SHM_DIR; empty: memfd
  int64_t spin_us = -1;   // before a waiter yields; < 0: from cores and ranks
  bool use_pidfd = true;  // false: watch peers as on a kernel without pidfds
};

// Ok, or why this backend cannot run here. No side effects.
Status probe() noexcept;

// Null if there is no memory for it.
std::unique_ptr<common::PairMember> create(const Options& options) noexcept;

}  // namespace epcomm::shm
