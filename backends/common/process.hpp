// Who is at the other end of a socket, and whether that process still runs.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "common/unique_fd.hpp"
#include "epcomm/status.hpp"

namespace epcomm::common {

// A process that cannot be mistaken for a later one with the same number.
struct Process {
  pid_t pid = 0;            // 0: none
  uint64_t start_time = 0;  // clock ticks after boot; used where there is no pidfd
  UniqueFd pidfd;           // readable once the process has ended
};

// Start time of a process, or 0 if it has ended (also as a zombie) or cannot be seen.
uint64_t process_start_time(pid_t pid) noexcept;

// True if the process has ended; looks at the pidfd where there is one.
bool process_ended(const Process& process) noexcept;

// The process at the other end of a connected Unix socket, as the kernel knows it: never from
// bytes that it sent. `use_pidfd` false: as on a kernel without pidfds.
// kUnavailable if that process cannot be watched from here; kPeerLost if it has ended already.
Status peer_process(int socket, int peer, bool use_pidfd, Process* out) noexcept;

}  // namespace epcomm::common
