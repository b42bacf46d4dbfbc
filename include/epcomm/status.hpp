// The one way an error leaves C++: a value with a sentence, never an exception.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace epcomm {

// Numbers travel in entry words and are read by Python: append, never renumber.
enum class Code : int32_t {
  kOk = 0,
  kInvalidArgument = 1,
  kUnsupported = 2,
  kUnavailable = 3,
  kTimeout = 4,
  kPeerLost = 5,
  kOutOfMemory = 6,
  kSystem = 7,
  kCuda = 8,
  kInternal = 9,
  // The caller's Python thread has a pending exception (Ctrl-C); it is raised as it is.
  kInterrupted = 10,
};

// Whoever first sees an error writes `text`: call, peer, value, limit, remedy.
struct Status {
  Code code = Code::kOk;
  int32_t peer = -1;      // the rank the error is about, -1 if none
  int32_t sys_errno = 0;  // of a failed system call, 0 if none
  std::string text;

  bool ok() const noexcept { return code == Code::kOk; }
};

// Status with a printf-style sentence. Long sentences are cut at 1023 bytes.
__attribute__((format(printf, 3, 4))) inline Status error(Code code, int peer, const char* format,
                                                          ...) {
  char buffer[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  Status status;
  status.code = code;
  status.peer = peer;
  status.text = buffer;
  return status;
}

}  // namespace epcomm

#define EPCOMM_RETURN_IF_ERROR(expr)                 \
  do {                                               \
    ::epcomm::Status epcomm_status_ = (expr);        \
    if (!epcomm_status_.ok()) return epcomm_status_; \
  } while (0)
