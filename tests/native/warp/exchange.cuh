// Stands in for cuda/exchange.cuh: peers whose heaps lie one behind the other.
#pragma once

#include "check.hpp"
#include "epcomm/device/engine.h"
#include "warp.hpp"

namespace epcomm::device {

constexpr unsigned kFullWarp = 0xffffffffu;

struct Link {
  char* heaps;
  uint64_t heap_bytes;
  int num_ranks;
  char* peer_ptr(int peer, uint64_t offset) const {
    EXPECT(peer >= 0 && peer < num_ranks && offset < heap_bytes, "%llu of the heap of %d",
           (unsigned long long)offset, peer);
    return heaps + uint64_t(peer) * heap_bytes + offset;
  }
};

}  // namespace epcomm::device
