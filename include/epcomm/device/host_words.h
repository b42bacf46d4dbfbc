// What the host tells waits in kernels. The same text for g++, nvcc and NVRTC.
#pragma once

#include "epcomm/base.h"

namespace epcomm::device {

// In pinned host memory, written by the host, polled by waits. Followed by uint64_t
// dead[num_ranks], 1 once that rank's process has ended; whether it had left before is said by its
// state word.
struct HostWords {
  uint64_t abort;  // 0: all is well; 1 + rank: look at dead[]; kHostAbort: abort() was called
};
constexpr uint64_t kHostAbort = uint64_t(1) << 63;

}  // namespace epcomm::device
