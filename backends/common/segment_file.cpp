#include "common/segment_file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>

#include "common/errors.hpp"
#include "common/process.hpp"
#include "common/random.hpp"
#include "common/segment.hpp"

namespace epcomm::common {
namespace {

// Process ids mean something inside their namespace only, and a folder may be seen from several.
uint64_t pid_namespace() {
  struct stat facts;
  return stat("/proc/self/ns/pid", &facts) == 0 ? facts.st_ino : 0;
}

// "epcomm-<PID namespace>-<pid>-<start time>-<random>"
std::string segment_name(const Key& random) {
  char name[128];
  std::snprintf(name, sizeof name, "epcomm-%" PRIu64 "-%d-%" PRIu64 "-", pid_namespace(),
                int(getpid()), process_start_time(getpid()));
  return name + to_hex(random);
}

// Whether the name is one of ours whose owner has ended.
bool is_stale(const char* name, uint64_t own_namespace) {
  uint64_t space, start;
  int pid, end = 0;
  Key random;
  if (std::sscanf(name, "epcomm-%" SCNu64 "-%d-%" SCNu64 "-%n", &space, &pid, &start, &end) != 3) {
    return false;
  }
  if (end == 0 || !from_hex(name + end, &random) || space != own_namespace || space == 0) {
    return false;
  }
  return pid > 0 && start != 0 && process_start_time(pid) != start;
}

}  // namespace

int reap_stale_files(const std::string& folder) noexcept {
  DIR* listing = opendir(folder.c_str());
  if (!listing) return 0;
  int removed = 0;
  const uint64_t own_namespace = pid_namespace();
  const int at = dirfd(listing);
  while (const dirent* entry = readdir(listing)) {
    struct stat facts;
    if (!is_stale(entry->d_name, own_namespace)) continue;
    if (fstatat(at, entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(facts.st_mode) || facts.st_uid != geteuid()) continue;
    if (unlinkat(at, entry->d_name, 0) == 0) ++removed;
  }
  closedir(listing);
  return removed;
}

Status open_segment_file(const std::string& folder, UniqueFd* out) {
  reap_stale_files(folder);
  Key random;
  EPCOMM_RETURN_IF_ERROR(random_key(&random));
  const UniqueFd directory(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const std::string name = segment_name(random);
  UniqueFd file;
  if (directory) {
    file.reset(openat(directory.get(), name.c_str(),
                      O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  }
  if (!file) {
    const int why = errno;
    if (why == EMFILE || why == ENFILE) return system_error(-1, why, "opening a segment file");
    const Code code = why == ENOSPC || why == EDQUOT ? Code::kOutOfMemory : Code::kInvalidArgument;
    Status status = error(code, -1,
                          "shm_dir=%s (EPCOMM_SHM_DIR): no file can be made there: %s; expected a "
                          "folder that this user may write to, such as /dev/shm",
                          folder.c_str(), errno_text(why).c_str());
    status.sys_errno = why;
    return status;
  }
  // Peers get the descriptor, never the name. ENOENT: another start took us for gone.
  if (unlinkat(directory.get(), name.c_str(), 0) != 0 && errno != ENOENT) {
    return system_error(-1, errno, "unlinking a segment file");
  }
  *out = std::move(file);
  return {};
}

}  // namespace epcomm::common
