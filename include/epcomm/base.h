// The few words that every header shared by host and device needs. The same text for g++, nvcc and
// NVRTC, which has no host headers.
#pragma once

#ifdef __CUDACC_RTC__
namespace epcomm {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using int64_t = long long;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
}  // namespace epcomm
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define EPCOMM_HD __host__ __device__ inline
#else
#define EPCOMM_HD inline
#endif

namespace epcomm {

// A signal word has a cache line of its own: its writer is another core, NIC or GPU.
constexpr uint64_t kSignalStride = 64;

}  // namespace epcomm
