// Stands in for cuda/loads.cuh: counts how often each piece of 16 bytes is read.
#pragma once

#include <vector>

#include "warp.hpp"

namespace epcomm {

namespace testing {

class Loads {
 public:
  // Memory that may be read: 16-byte aligned.
  void allow(const char* at, size_t bytes) {
    areas_.push_back({at, bytes, std::vector<int>(bytes / 16)});
  }
  void note(const char* at) {
    EXPECT(uintptr_t(at) % 16 == 0, "%p is not aligned", (const void*)at);
    ++count(at);
  }
  // How often the piece at `at` was read.
  int& count(const char* at) {
    for (Area& area : areas_) {
      if (at >= area.at && at + 16 <= area.at + area.bytes) {
        return area.counts[size_t(at - area.at) / 16];
      }
    }
    EXPECT(false, "%p is nowhere", (const void*)at);
  }
  // How often pieces were read that are not counted as 0.
  int64_t total() const {
    int64_t sum = 0;
    for (const Area& area : areas_) {
      for (const int count : area.counts) sum += count;
    }
    return sum;
  }

  static Loads*& current() {
    static Loads* loads;
    return loads;
  }

 private:
  struct Area {
    const char* at;
    size_t bytes;
    std::vector<int> counts;
  };
  std::vector<Area> areas_;
};

}  // namespace testing

inline uint4 load_once(const char* at) {
  testing::Loads::current()->note(at);
  return *reinterpret_cast<const uint4*>(at);
}

template <int kOffset>
inline uint4 load_once_at(const char* at) {
  return load_once(at + kOffset);
}

}  // namespace epcomm
