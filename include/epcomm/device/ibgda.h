// What a kernel over `ibgda` is given, by value. The same text for g++, nvcc and NVRTC.
#pragma once

#include "epcomm/device/host_words.h"
#include "epcomm/mlx5_queue.h"

namespace epcomm::device {

// One queue pair, in device memory. Addresses are the device's; keys as in RdmaQueue. Signals are
// fetch-adds, always: whoever fills this must refuse, with UnsupportedError, a queue pair whose
// RdmaQueue::max_rd_atomic is 0.
struct IbgdaQueue {
  mlx5::Rings rings;
  uint64_t remote_heap;  // as the peer's NIC knows it
  uint64_t heap;         // as this rank's NIC knows it
  uint64_t sink;         // what atomics return goes there
  uint32_t lkey;
  uint32_t sink_lkey;
  uint32_t data_rkey;
  uint32_t signal_rkey;
  uint32_t max_message;
  uint32_t reserved;
  mlx5::Numbers numbers;
  uint64_t pushed;     // numbers below are told to the NIC
  uint64_t signalled;  // numbers below complete visibly
};

// Offsets count from a heap's begin.
struct IbgdaCtx {
  uint64_t heap;  // own heap
  uint64_t heap_bytes;
  uint64_t queues;      // IbgdaQueue[num_ranks][num_channels], the control channel among them
  uint64_t host_words;  // HostWords in pinned host memory
  uint64_t state_word;  // offset of [rank] PeerState words, kSignalStride apart
  uint64_t timeout_ns;  // of a wait that names none
  int32_t rank;
  int32_t num_ranks;
  int32_t num_channels;
  int32_t reserved;
};
static_assert(sizeof(IbgdaCtx) == 64, "kernels and host agree on it");

}  // namespace epcomm::device
