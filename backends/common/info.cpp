#include "common/info.hpp"

#include <cerrno>
#include <cstdlib>

namespace epcomm::common {

Status Info::encode(const char* name, int version, std::string* out) const {
  std::string text = std::string(name) + " " + std::to_string(version) + "\n";
  for (const auto& [key, value] : values_) text += key + " " + value + "\n";
  if (text.size() > kMaxBytes) {
    return error(Code::kInternal, -1, "info of %zu bytes is longer than %zu", text.size(),
                 kMaxBytes);
  }
  *out = std::move(text);
  return {};
}

Status Info::decode(const std::string& bytes, int peer, const char* name, int version, Info* out) {
  const std::string expected = std::string(name) + " " + std::to_string(version);
  size_t end = bytes.find('\n');
  if (end == std::string::npos || end > 64 || bytes.size() > kMaxBytes) {
    return error(Code::kUnavailable, peer, "rank %d sent no `%s` information (%zu bytes)", peer,
                 name, bytes.size());
  }
  if (bytes.compare(0, end, expected) != 0) {
    return error(Code::kUnavailable, peer, "rank %d speaks `%s`, this rank `%s`", peer,
                 bytes.substr(0, end).c_str(), expected.c_str());
  }
  out->values_.clear();
  for (size_t at = end + 1; at < bytes.size(); at = end + 1) {
    end = bytes.find('\n', at);
    const size_t space = bytes.find(' ', at);
    if (end == std::string::npos || space == std::string::npos || space > end) {
      return error(Code::kUnavailable, peer, "rank %d's `%s` information is damaged at byte %zu",
                   peer, name, at);
    }
    out->values_[bytes.substr(at, space - at)] = bytes.substr(space + 1, end - space - 1);
  }
  return {};
}

Status Info::get(int peer, const char* key, std::string* out) const {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    return error(Code::kUnavailable, peer, "rank %d's information has no `%s`", peer, key);
  }
  *out = found->second;
  return {};
}

Status Info::get(int peer, const char* key, uint64_t* out) const {
  std::string text;
  EPCOMM_RETURN_IF_ERROR(get(peer, key, &text));
  char* end = nullptr;
  errno = 0;
  const bool digit = !text.empty() && text[0] >= '0' && text[0] <= '9';
  *out = std::strtoull(text.c_str(), &end, 10);
  if (!digit || errno != 0 || *end != 0) {
    return error(Code::kUnavailable, peer, "rank %d's information: `%s` is no number", peer, key);
  }
  return {};
}

Status Info::get(int peer, const char* key, Key* out) const {
  std::string text;
  EPCOMM_RETURN_IF_ERROR(get(peer, key, &text));
  if (!from_hex(text, out)) {
    return error(Code::kUnavailable, peer, "rank %d's information: `%s` is no key", peer, key);
  }
  return {};
}

}  // namespace epcomm::common
