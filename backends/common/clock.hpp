// CLOCK_MONOTONIC in nanoseconds, and deadlines on it.
#pragma once

#include <time.h>

#include <cstdint>

namespace epcomm::common {

inline int64_t now_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// `timeout_s` as nanoseconds; out-of-range values and NaN become 0 or about 30 years.
inline int64_t seconds_to_ns(double timeout_s) noexcept {
  if (!(timeout_s > 0)) return 0;
  return timeout_s < 1e9 ? int64_t(timeout_s * 1e9) : int64_t(1000000000) * 1000000000;
}

inline timespec to_timespec(int64_t ns) noexcept {
  return {time_t(ns / 1000000000), long(ns % 1000000000)};
}

}  // namespace epcomm::common
