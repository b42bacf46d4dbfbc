// Device policy `nvlink`: peers' heaps are mapped, so a put is loads and stores, and a signal is an
// addition to a word of the peer's memory. See ops.cuh for what each member promises.
//
// Orders are those of the PTX memory model at system scope; NVLink would forgive less, PCIe and
// later links need not.
#pragma once

#include "epcomm/base.h"
#include "epcomm/device/nvlink.h"
#include "epcomm/device/ops.cuh"
#include "epcomm/device/warp.cuh"

namespace epcomm::device {

struct nvlink {
  using Ctx = NvlinkCtx;

  static __device__ __forceinline__ void* peer_ptr(const Ctx& ctx, int peer, uint64_t offset) {
    return reinterpret_cast<void*>(peer_heap(ctx, peer) + offset);
  }

  static __device__ __forceinline__ void put(const Ctx& ctx, int peer, int /*channel*/,
                                             uint64_t dst, uint64_t src, uint64_t bytes) {
    warp_copy(peer_heap(ctx, peer) + dst, ctx.heap + src, bytes, lane_of_warp());
    __syncwarp();
  }

  static __device__ __forceinline__ void signal(const Ctx& ctx, int peer, int /*channel*/,
                                                uint64_t word, uint64_t add) {
    const uint64_t at = peer_heap(ctx, peer) + word;
    // With the barrier before it, this makes all of the threads' stores visible before the word.
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    if (ctx.atomics) {
      asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(add) : "memory");
    } else {
      // Links without atomics: one thread at a time writes the word, so a sum is as good.
      const uint64_t sum = load_relaxed(at) + add;
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(sum) : "memory");
    }
  }

  static __device__ __forceinline__ void put_signal(const Ctx& ctx, int peer, int channel,
                                                    uint64_t dst, uint64_t src, uint64_t bytes,
                                                    uint64_t word, uint64_t add) {
    put(ctx, peer, channel, dst, src, bytes);
    if (lane_of_warp() == 0) signal(ctx, peer, channel, word, add);
    __syncwarp();
  }

  static __device__ __forceinline__ WaitCode wait(const Ctx& ctx, int peer, uint64_t word,
                                                  uint64_t value, uint64_t timeout_ns,
                                                  WaitInfo* info) {
    return HeapWait<Ctx>::wait(ctx, peer, word, value, timeout_ns, info);
  }

  static __device__ __forceinline__ WaitCode quiet(const Ctx&, int, int, uint64_t) {
    return kWaitDone;  // put() has read its source when it returns
  }

 private:
  static __device__ __forceinline__ uint64_t peer_heap(const Ctx& ctx, int peer) {
    return reinterpret_cast<const uint64_t*>(ctx.peers)[peer];
  }
};

static_assert(PolicyCheck<nvlink>::ok, "");

}  // namespace epcomm::device
