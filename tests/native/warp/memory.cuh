// Stands in for cuda/memory.cuh.
#pragma once

#include <cstring>

#include "check.hpp"
#include "epcomm/layout.h"

namespace epcomm {

template <typename Item>
inline Item load_item(const void* at, bool aligned) {
  EXPECT(!aligned || uintptr_t(at) % sizeof(Item) == 0, "%p is not aligned", at);
  Item item;
  std::memcpy(&item, at, sizeof item);
  return item;
}

inline const uint8_t* offset_by(const void* base, int64_t bytes) {
  return static_cast<const uint8_t*>(base) + bytes;
}

}  // namespace epcomm
