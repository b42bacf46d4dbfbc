// Bytes as lower-case hexadecimal digits and back.
#pragma once

#include <cstddef>
#include <string>

namespace epcomm::common {

inline std::string bytes_to_hex(const void* bytes, size_t count) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * count);
  for (size_t i = 0; i < count; ++i) {
    const unsigned char byte = static_cast<const unsigned char*>(bytes)[i];
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// False unless the text is `count` bytes, in lower case.
inline bool bytes_from_hex(const std::string& text, void* out, size_t count) {
  if (text.size() != 2 * count) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    int value;
    if (c >= '0' && c <= '9') {
      value = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      value = c - 'a' + 10;
    } else {
      return false;
    }
    unsigned char& byte = static_cast<unsigned char*>(out)[i / 2];
    byte = static_cast<unsigned char>(i % 2 ? byte | value : value << 4);
  }
  return true;
}

}  // namespace epcomm::common
