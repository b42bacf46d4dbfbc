// Making Status values from what the kernel and the standard library report.
#pragma once

#include <cstring>
#include <exception>
#include <new>

#include "epcomm/status.hpp"

namespace epcomm::common {

// kSystem: "<what>: <text of the error number>".
inline Status system_error(int peer, int sys_errno, const char* what) {
  char buffer[128];
  Status status = error(Code::kSystem, peer, "%s: %s (errno %d)", what,
                        strerror_r(sys_errno, buffer, sizeof buffer), sys_errno);
  status.sys_errno = sys_errno;
  return status;
}

// Text of an error number, to put into a sentence.
inline std::string errno_text(int sys_errno) {
  char buffer[128];
  return strerror_r(sys_errno, buffer, sizeof buffer);
}

// Runs `body`, which returns Status and may throw what the standard library throws.
template <class Body>
Status guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    Status status;
    status.code = Code::kOutOfMemory;
    status.text = "no host memory";  // short enough to need none
    return status;
  } catch (const std::exception& caught) {
    return error(Code::kInternal, -1, "unexpected exception: %s", caught.what());
  }
}

}  // namespace epcomm::common
