// Segments that are files of a folder: for places without memfds, and for those who want them
// counted by a file system. The name is gone before the space is reserved; only a process killed
// within those microseconds leaves one, and the next start removes it.
#pragma once

#include <string>

#include "common/unique_fd.hpp"
#include "epcomm/status.hpp"

namespace epcomm::common {

// A new, empty file (0600) that has no name any more. Removes what ended owners left first.
Status open_segment_file(const std::string& folder, UniqueFd* out);

}  // namespace epcomm::common
