// Reserving the pages of a shared file before anybody touches them.
#pragma once

#include <cstdint>
#include <string>

#include "epcomm/status.hpp"

namespace epcomm::common {

// Gives the empty file `fd` its size and its pages. kOutOfMemory gives bytes asked, bytes free and
// the remedy; no SIGXFSZ, no SIGBUS, and the OOM killer is not woken by a size that cannot fit.
// `folder`: where the file lies; empty for a memfd.
Status reserve_space(int fd, uint64_t bytes, const std::string& folder);

}  // namespace epcomm::common
