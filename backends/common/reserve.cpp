#include "common/reserve.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>

#include "common/errors.hpp"
#include "common/memory.hpp"

namespace epcomm::common {
namespace {

// Reserved in steps: between them the free memory is looked at again, since other ranks reserve at
// the same time. A step that a signal interrupts is undone whole, so with a profiler's timer
// running only small ones come through.
constexpr uint64_t kStepBytes = uint64_t(64) << 20;
constexpr uint64_t kSmallestStepBytes = uint64_t(1) << 18;
constexpr long kTmpfsMagic = 0x01021994;

// A file beyond `ulimit -f` raises SIGXFSZ, which ends a process that does not expect it.
class FileSizeSignalBlocked {
 public:
  FileSizeSignalBlocked() noexcept {
    sigemptyset(&set_);
    sigaddset(&set_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &set_, &old_);
  }
  ~FileSizeSignalBlocked() {
    // Ours is directed at this thread: take it back before it can be delivered.
    const timespec no_wait{0, 0};
    if (!was_pending_) sigtimedwait(&set_, nullptr, &no_wait);
    pthread_sigmask(SIG_SETMASK, &old_, nullptr);
  }

 private:
  sigset_t set_, old_;
  bool was_pending_;
};

struct Space {
  uint64_t free_bytes;
  std::string where;
  const char* remedy;
};

Space memory_space() {
  return {memory_available(), "in memory (machine and memory control group)",
          "free memory, raise the group's limit, or ask for a smaller heap"};
}

Space folder_space(int fd, const std::string& folder) {
  struct statvfs facts{};
  const bool bounded = fstatvfs(fd, &facts) == 0 && facts.f_blocks != 0;  // tmpfs may have no size
  return {
      bounded ? uint64_t(facts.f_bavail) * facts.f_frsize : UINT64_MAX, "in " + folder,
      "enlarge that file system (a container: --shm-size), name another folder (EPCOMM_SHM_DIR, "
      "shm_dir), or ask for a smaller heap"};
}

Space limit_space() {
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  return {uint64_t(limit.rlim_cur), "under the file-size limit (ulimit -f)",
          "raise the limit, or ask for a smaller heap"};
}

Status too_little(uint64_t bytes, const Space& space, int sys_errno) {
  char free_text[32] = "an unknown number of";
  if (space.free_bytes != UINT64_MAX) {
    std::snprintf(free_text, sizeof free_text, "%" PRIu64, space.free_bytes);
  }
  Status status = error(Code::kOutOfMemory, -1,
                        "shared memory for the heap: %" PRIu64 " bytes asked, %s bytes free %s; %s",
                        bytes, free_text, space.where.c_str(), space.remedy);
  status.sys_errno = sys_errno;
  return status;
}

// Whether the file's pages are main memory (and not disk).
bool in_memory(int fd) {
  struct statfs facts;
  return fstatfs(fd, &facts) == 0 && facts.f_type == kTmpfsMagic;
}

}  // namespace

Status reserve_space(int fd, uint64_t bytes, const std::string& folder) {
  const FileSizeSignalBlocked blocked;
  const bool memory = in_memory(fd);
  const auto refused = [&](int why) {
    if (why == EFBIG) {
      const Space limit = limit_space();
      if (limit.free_bytes < bytes) return too_little(bytes, limit, why);
    }
    if (why == ENOSPC || why == EDQUOT || why == EFBIG || why == ENOMEM || why == EINVAL) {
      return too_little(bytes, folder.empty() ? memory_space() : folder_space(fd, folder), why);
    }
    return system_error(-1, why, "reserving shared memory (fallocate)");
  };

  // Compared here, not left to the kernel: it would take all memory before it says no.
  if (const Space limit = limit_space(); limit.free_bytes < bytes) {
    return too_little(bytes, limit, EFBIG);
  }
  if (!folder.empty()) {
    const Space space = folder_space(fd, folder);
    if (space.free_bytes < bytes) return too_little(bytes, space, ENOSPC);
  }
  if (bytes > uint64_t(INT64_MAX)) return refused(EFBIG);
  if (memory) {
    const Space space = memory_space();
    if (space.free_bytes < bytes) return too_little(bytes, space, ENOMEM);
  }
  if (ftruncate(fd, off_t(bytes)) != 0) return refused(errno);
  uint64_t most = kStepBytes;
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t step = std::min(bytes - at, most);
    if (memory && at != 0) {
      const Space space = memory_space();
      if (space.free_bytes < bytes - at) return too_little(bytes, space, ENOMEM);
    }
    const int why = posix_fallocate(fd, off_t(at), off_t(step));
    if (why == EINTR) {
      most = std::max(most / 2, kSmallestStepBytes);
      continue;
    }
    if (why != 0) return refused(why);
    at += step;
    most = std::min(most * 2, kStepBytes);
  }
  return {};
}

}  // namespace epcomm::common
