// What a rank tells its peers before they connect: "<name> <version>\n" and lines "<key> <value>".
// Text, so that a log or a debugger shows it. Unknown keys are skipped: a later minor change may
// add some.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "common/random.hpp"
#include "epcomm/status.hpp"

namespace epcomm::common {

class Info {
 public:
  static constexpr size_t kMaxBytes = 1u << 20;

  void set(const char* key, const std::string& value) { values_[key] = value; }
  void set(const char* key, uint64_t value) { values_[key] = std::to_string(value); }
  void set(const char* key, const Key& value) { values_[key] = to_hex(value); }

  Status encode(const char* name, int version, std::string* out) const;

  // kUnavailable if the bytes are another backend's, another version's or damaged.
  static Status decode(const std::string& bytes, int peer, const char* name, int version,
                       Info* out);

  // kUnavailable naming the key if it is missing or no such value.
  Status get(int peer, const char* key, std::string* out) const;
  Status get(int peer, const char* key, uint64_t* out) const;
  Status get(int peer, const char* key, Key* out) const;

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace epcomm::common
