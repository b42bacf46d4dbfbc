// Registered memory: which bytes a key stands for, and who may do what with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "common/random.hpp"

namespace epcomm::softhca {

using Gid = common::Key;

enum Access : unsigned {  // the numbers of ibv_access_flags
  kLocalWrite = 1,
  kRemoteWrite = 2,
  kRemoteRead = 4,
  kRemoteAtomic = 8,
};

struct Region {
  uint64_t address = 0;  // as work requests say it
  uint64_t bytes = 0;
  std::byte* mapped = nullptr;  // where the same bytes are in this process
  unsigned access = 0;

  // Where [at, at + count) is, or null if that is not inside.
  std::byte* find(uint64_t at, uint64_t count) const noexcept {
    if (at < address || count > bytes || at - address > bytes - count) return nullptr;
    return mapped + (at - address);
  }
};

// What the ports of one provider have registered and been shown, and which of their queue pairs
// answer. An engine holds the lock shared while it moves bytes; taking a region away waits for it.
class Regions {
 public:
  std::shared_lock<std::shared_mutex> reading() { return std::shared_lock(mutex_); }

  // A port of this provider begins or ends.
  void open(const Gid& gid) {
    const std::unique_lock lock(mutex_);
    ports_[gid].own = true;
    ++open_;
  }
  void close(const Gid& gid) {
    const std::unique_lock lock(mutex_);
    ports_.erase(gid);
    if (--open_ == 0) ports_.clear();
  }
  void add(const Gid& gid, uint32_t key, const Region& region) {
    const std::unique_lock lock(mutex_);
    ports_[gid].regions[key] = region;
  }
  void remove(const Gid& gid, uint32_t key) {
    const std::unique_lock lock(mutex_);
    ports_[gid].regions.erase(key);
  }
  void set_answers(const Gid& gid, uint32_t qpn, bool answers) {
    const std::unique_lock lock(mutex_);
    if (answers) {
      ports_[gid].answering.insert(qpn);
    } else {
      ports_[gid].answering.erase(qpn);
    }
  }

  // Under reading().
  const Region* find(const Gid& gid, uint32_t key) const {
    const auto port = ports_.find(gid);
    if (port == ports_.end()) return nullptr;
    const auto region = port->second.regions.find(key);
    return region == port->second.regions.end() ? nullptr : &region->second;
  }
  // Of ports in other processes nothing is known but their memory.
  bool answers(const Gid& gid, uint32_t qpn) const {
    const auto port = ports_.find(gid);
    return port != ports_.end() && (!port->second.own || port->second.answering.count(qpn) > 0);
  }

 private:
  struct PortEntry {
    bool own = false;
    std::unordered_map<uint32_t, Region> regions;
    std::unordered_set<uint32_t> answering;
  };
  std::shared_mutex mutex_;
  std::map<Gid, PortEntry> ports_;
  int open_ = 0;
};

}  // namespace epcomm::softhca
