// How much memory may still be taken without waking the OOM killer.
#pragma once

#include <cstdint>

namespace epcomm::common {

// Bytes that this process can still allocate: what the machine has available (with free swap),
// lowered by every memory control group above the process. UINT64_MAX if nothing can be read.
uint64_t memory_available() noexcept;

}  // namespace epcomm::common
