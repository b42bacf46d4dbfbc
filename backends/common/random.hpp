// Random bytes of the kernel: names, secrets and nonces that nobody can guess.
#pragma once

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <string>

#include "common/errors.hpp"
#include "common/hex.hpp"

namespace epcomm::common {

// 128 bits.
using Key = std::array<unsigned char, 16>;

inline Status random_key(Key* out) {
  // Up to 256 bytes come whole or not at all.
  ssize_t got;
  do {
    got = getrandom(out->data(), out->size(), 0);
  } while (got < 0 && errno == EINTR);
  if (got != ssize_t(out->size())) return system_error(-1, got < 0 ? errno : EIO, "getrandom");
  return {};
}

inline std::string to_hex(const Key& key) { return bytes_to_hex(key.data(), key.size()); }

inline bool from_hex(const std::string& text, Key* out) {
  return bytes_from_hex(text, out->data(), out->size());
}

// Takes the same time wherever the keys differ.
inline bool same_key(const Key& a, const Key& b) {
  unsigned different = 0;
  for (size_t i = 0; i < a.size(); ++i) different |= a[i] ^ b[i];
  return different == 0;
}

}  // namespace epcomm::common
