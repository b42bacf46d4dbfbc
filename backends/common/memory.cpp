#include "common/memory.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/unique_fd.hpp"

namespace epcomm::common {
namespace {

constexpr uint64_t kUnknown = UINT64_MAX;

// A small file of /proc or /sys, whole; empty if it cannot be read.
std::string read_file(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char buffer[4096];
  ssize_t got;
  while (file && (got = read(file.get(), buffer, sizeof buffer)) > 0)
    text.append(buffer, size_t(got));
  return text;
}

// The number behind `key` at the start of a line; "" is the file's first number.
uint64_t number_after(const std::string& text, const char* key) {
  const size_t length = std::strlen(key);
  for (size_t at = 0; at < text.size();) {
    if (text.compare(at, length, key) == 0) {
      const char* start = text.c_str() + at + length;
      start += std::strspn(start, " \t");
      if (*start < '0' || *start > '9') return kUnknown;  // "max"
      return std::strtoull(start, nullptr, 10);
    }
    const size_t end = text.find('\n', at);
    if (end == std::string::npos) break;
    at = end + 1;
  }
  return kUnknown;
}

uint64_t machine_available() {
  const std::string text = read_file("/proc/meminfo");
  const uint64_t available = number_after(text, "MemAvailable:");
  if (available == kUnknown) return kUnknown;
  const uint64_t swap = number_after(text, "SwapFree:");
  return (available + (swap == kUnknown ? 0 : swap)) * 1024;
}

// What a group leaves: limit - (used - file cache that can be dropped).
uint64_t group_available(const std::string& folder, const char* limit_name, const char* used_name,
                         const char* prefix) {
  const uint64_t limit = number_after(read_file(folder + limit_name), "");
  const uint64_t used = number_after(read_file(folder + used_name), "");
  if (limit == kUnknown || used == kUnknown || limit > (uint64_t(1) << 60)) return kUnknown;
  const std::string facts = read_file(folder + "memory.stat");
  uint64_t held = used;
  for (const char* kind : {"inactive_file ", "active_file "}) {
    const uint64_t cache = number_after(facts, (prefix + std::string(kind)).c_str());
    if (cache != kUnknown) held -= std::min(held, cache);
  }
  return limit - std::min(limit, held);
}

// Groups of this process from its own up to the root. Inside a container the path may be that of
// the host: then only the root of the mount is there, and that is the container's.
uint64_t groups_available() {
  uint64_t least = kUnknown;
  const std::string groups = read_file("/proc/self/cgroup");
  for (size_t at = 0; at < groups.size();) {
    size_t end = groups.find('\n', at);
    if (end == std::string::npos) end = groups.size();
    const std::string line = groups.substr(at, end - at);
    at = end + 1;
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",memory,") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (std::string path = line.substr(second + 1);;) {
      const std::string folder = root + (path == "/" ? "" : path) + "/";
      least = std::min(least, v2 ? group_available(folder, "memory.max", "memory.current", "")
                                 : group_available(folder, "memory.limit_in_bytes",
                                                   "memory.usage_in_bytes", "total_"));
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return least;
}

}  // namespace

uint64_t memory_available() noexcept {
  try {
    return std::min(machine_available(), groups_available());
  } catch (...) {
    return kUnknown;  // no memory for a path; the reservation itself will say so
  }
}

}  // namespace epcomm::common
