#include "common/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/errors.hpp"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace epcomm::common {

uint64_t process_start_time(pid_t pid) noexcept {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", int(pid));
  UniqueFd file(open(path, O_RDONLY | O_CLOEXEC));
  if (!file) return 0;
  char text[1024];
  const ssize_t got = read(file.get(), text, sizeof text - 1);
  if (got <= 0) return 0;
  text[got] = 0;
  // The name (field 2) may hold anything, also brackets: fields count from the last one.
  const char* at = std::strrchr(text, ')');
  if (!at || !at[1]) return 0;
  const char state = at[2];  // field 3
  if (state == 'Z' || state == 'X') return 0;
  for (int field = 2; field < 22; ++field) {
    at = std::strchr(at + 1, ' ');
    if (!at) return 0;
  }
  return std::strtoull(at + 1, nullptr, 10);
}

bool process_ended(const Process& process) noexcept {
  if (process.pid == 0) return false;
  if (process.pidfd) {
    pollfd entry{process.pidfd.get(), POLLIN, 0};
    return poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
  }
  return process_start_time(process.pid) != process.start_time;
}

Status peer_process(int socket, int peer, bool use_pidfd, Process* out) noexcept {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return system_error(peer, errno, "getsockopt(SO_PEERCRED)");
  }
  out->pid = credentials.pid;
  if (use_pidfd) {
    int pidfd = -1;
    bytes = sizeof pidfd;
    // Names the very process that called listen(), however often its number was used since.
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) != 0) {
      pidfd = -1;
      if (out->pid > 0) pidfd = int(syscall(SYS_pidfd_open, out->pid, 0));
      if (pidfd < 0 && (errno == EMFILE || errno == ENFILE)) {
        return system_error(peer, errno, "pidfd_open");
      }
    }
    out->pidfd.reset(pidfd);
    if (out->pidfd) {
      if (out->pid <= 0) out->pid = -1;  // seen, but it has no number in our namespace
      return {};
    }
  }
  if (out->pid <= 0) {
    return error(Code::kUnavailable, peer,
                 "rank %d's process cannot be watched: it is in another PID namespace and this "
                 "kernel has no SO_PEERPIDFD (Linux 6.5)",
                 peer);
  }
  out->start_time = process_start_time(out->pid);
  if (out->start_time == 0) {
    return error(Code::kPeerLost, peer, "rank %d's process (pid %d) ended while connecting", peer,
                 int(out->pid));
  }
  return {};
}

}  // namespace epcomm::common
