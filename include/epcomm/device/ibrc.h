// What a kernel over `ibrc` is given, by value. The same text for g++, nvcc and NVRTC.
#pragma once

#include "epcomm/command.h"
#include "epcomm/device/host_words.h"

namespace epcomm::device {

// Addresses are the device's; offsets count from a heap's begin.
struct IbrcCtx {
  uint64_t heap;  // own heap
  uint64_t heap_bytes;
  uint64_t slots;       // CommandSlot[num_channels][ring_size] in pinned host memory
  uint64_t words;       // CommandWords[num_channels] in pinned host memory, the proxy's
  uint64_t issued;      // uint64_t[num_channels] in device memory: commands written so far
  uint64_t host_words;  // HostWords in pinned host memory
  uint64_t state_word;  // offset of [rank] PeerState words, kSignalStride apart
  uint64_t timeout_ns;  // of a wait that names none
  int32_t rank;
  int32_t num_ranks;
  int32_t num_channels;  // the control channel among them
  uint32_t ring_size;    // a power of two
  uint32_t max_bytes;    // of one command
  uint32_t reserved;
};
static_assert(sizeof(IbrcCtx) == 88, "kernels and host agree on it");

}  // namespace epcomm::device
