// What a kernel over `nvlink` is given, by value. The same text for g++, nvcc and NVRTC.
#pragma once

#include "epcomm/device/host_words.h"

namespace epcomm::device {

// Addresses are the device's; offsets count from a heap's begin.
struct NvlinkCtx {
  uint64_t heap;  // own heap
  uint64_t heap_bytes;
  uint64_t peers;       // uint64_t[num_ranks] in device memory: where each rank's heap begins
  uint64_t host_words;  // HostWords in pinned host memory
  uint64_t state_word;  // offset of [rank] PeerState words, kSignalStride apart
  uint64_t timeout_ns;  // of a wait that names none
  int32_t rank;
  int32_t num_ranks;
  int32_t atomics;  // the links take atomics of every pair; else a signal is a load and a store
  int32_t reserved;
};
static_assert(sizeof(NvlinkCtx) == 64, "kernels and host agree on it");

using NvlinkHostWords = HostWords;
constexpr uint64_t kNvlinkAbort = kHostAbort;

}  // namespace epcomm::device
