// Device policy `nvlink`: peers' heaps are mapped, so a put is loads and stores, and a signal is an
// addition to a word of the peer's memory. See ops.cuh for what each member promises.
//
// Orders are those of the PTX memory model at system scope; NVLink would forgive less, PCIe and
// later links need not.
#pragma once

#include "epcomm/base.h"
#include "epcomm/device/nvlink.h"
#include "epcomm/device/ops.cuh"

namespace epcomm::device {

struct nvlink {
  using Ctx = NvlinkCtx;

  static __device__ __forceinline__ void* peer_ptr(const Ctx& ctx, int peer, uint64_t offset) {
    return reinterpret_cast<void*>(peer_heap(ctx, peer) + offset);
  }

  static __device__ __forceinline__ void put(const Ctx& ctx, int peer, int /*channel*/,
                                             uint64_t dst, uint64_t src, uint64_t bytes) {
    copy(peer_heap(ctx, peer) + dst, ctx.heap + src, bytes, lane());
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
      const uint64_t sum = load(at) + add;
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(sum) : "memory");
    }
  }

  static __device__ __forceinline__ void put_signal(const Ctx& ctx, int peer, int channel,
                                                    uint64_t dst, uint64_t src, uint64_t bytes,
                                                    uint64_t word, uint64_t add) {
    put(ctx, peer, channel, dst, src, bytes);
    if (lane() == 0) signal(ctx, peer, channel, word, add);
    __syncwarp();
  }

  static __device__ __forceinline__ WaitCode wait(const Ctx& ctx, int peer, uint64_t word,
                                                  uint64_t value, uint64_t timeout_ns,
                                                  WaitInfo* info) {
    const uint64_t at = ctx.heap + word;
    for (int i = 0; i < kSpins; ++i) {
      const uint64_t seen = load_acquire(at);
      if (seen >= value) {
        if (info) *info = WaitInfo{seen, 0, -1, 0};
        return kWaitDone;
      }
    }
    return wait_long(ctx, peer, at, value, timeout_ns ? timeout_ns : ctx.timeout_ns, info);
  }

  static __device__ __forceinline__ WaitCode quiet(const Ctx&, int, int, uint64_t) {
    return kWaitDone;  // put() has read its source when it returns
  }

 private:
  static constexpr int kSpins = 64;
  // Host words are read over PCIe, state words from memory: not with every look.
  static constexpr uint64_t kLookEveryNs = 20 * 1000;
  static constexpr uint64_t kLossGraceNs = 250 * 1000 * 1000;
  static constexpr unsigned kLongestNapNs = 256;
  static constexpr uint64_t kStateLeft = 1, kStateBroken = 2;  // PeerState of backend.hpp

  static __device__ __forceinline__ unsigned lane() {
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  static __device__ __forceinline__ uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
  }

  static __device__ __forceinline__ uint64_t load(uint64_t at) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
  }

  static __device__ __forceinline__ uint64_t load_acquire(uint64_t at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
  }

  static __device__ __forceinline__ uint64_t peer_heap(const Ctx& ctx, int peer) {
    return reinterpret_cast<const uint64_t*>(ctx.peers)[peer];
  }

  static __device__ __forceinline__ uint64_t state(const Ctx& ctx, int peer) {
    return load(ctx.heap + ctx.state_word + uint64_t(peer) * kSignalStride);
  }

  struct alignas(16) Chunk {
    uint32_t word[4];
  };

  template <class T>
  static __device__ __forceinline__ void copy_as(uint64_t dst, uint64_t src, uint64_t count,
                                                 unsigned lane) {
    T* const to = reinterpret_cast<T*>(dst);
    const T* const from = reinterpret_cast<const T*>(src);
    uint64_t i = lane;
    // Four loads in flight per lane before their stores.
    for (; i + 96 < count; i += 128) {
      const T a = from[i], b = from[i + 32], c = from[i + 64], d = from[i + 96];
      to[i] = a;
      to[i + 32] = b;
      to[i + 64] = c;
      to[i + 96] = d;
    }
    for (; i < count; i += 32) to[i] = from[i];
  }

  static __device__ __forceinline__ void copy(uint64_t dst, uint64_t src, uint64_t bytes,
                                              unsigned lane) {
    if ((dst ^ src) & 15) {  // never both on a multiple of 16
      if (((dst | src) & 3) == 0) {
        copy_as<uint32_t>(dst, src, bytes / 4, lane);
        const uint64_t done = bytes / 4 * 4;
        copy_as<uint8_t>(dst + done, src + done, bytes - done, lane);
      } else {
        copy_as<uint8_t>(dst, src, bytes, lane);
      }
      return;
    }
    uint64_t head = (16 - (dst & 15)) & 15;
    if (head > bytes) head = bytes;
    const uint64_t chunks = (bytes - head) / 16;
    const uint64_t done = head + chunks * 16;
    copy_as<uint8_t>(dst, src, head, lane);
    copy_as<Chunk>(dst + head, src + head, chunks, lane);
    copy_as<uint8_t>(dst + done, src + done, bytes - done, lane);
  }

  // The rank whose end concerns this wait, or -1: the awaited one, else the first that died without
  // having left.
  static __device__ int lost_rank(const Ctx& ctx, int peer) {
    const uint64_t dead = ctx.host_words + sizeof(NvlinkHostWords);
    int lost = -1;
    for (int rank = 0; rank < ctx.num_ranks; ++rank) {
      if (load(dead + 8 * uint64_t(rank)) == 0 || state(ctx, rank) == kStateLeft) continue;
      if (rank == peer) return rank;
      if (lost < 0) lost = rank;
    }
    return lost;
  }

  // Why the wait cannot end well, or kWaitDone if it still can.
  static __device__ WaitCode look(const Ctx& ctx, int peer, int* culprit) {
    const uint64_t abort = load(ctx.host_words);
    if (abort == kNvlinkAbort) {
      *culprit = -1;
      return kWaitAborted;
    }
    if (abort != 0) {
      const int lost = lost_rank(ctx, peer);
      if (lost >= 0) {
        *culprit = lost;
        return kWaitPeerDead;
      }
    }
    *culprit = peer;
    const uint64_t said = state(ctx, peer);
    if (said == kStateLeft) return kWaitPeerLeft;
    return said >= kStateBroken ? kWaitPeerBroken : kWaitDone;
  }

  static __device__ __noinline__ WaitCode wait_long(const Ctx& ctx, int peer, uint64_t at,
                                                    uint64_t value, uint64_t timeout_ns,
                                                    WaitInfo* info) {
    const uint64_t start = now();
    uint64_t next_look = start, first_loss = 0;
    unsigned nap = 16;
    int culprit = -1;
    WaitCode code = kWaitDone;
    uint64_t seen;
    while ((seen = load_acquire(at)) < value) {
      const uint64_t time = now();
      if (time - start >= timeout_ns) {
        code = kWaitTimeout;
        culprit = peer;
      } else if (time >= next_look) {
        next_look = time + kLookEveryNs;
        code = look(ctx, peer, &culprit);
        if (code == kWaitPeerDead && culprit != peer) {
          // What a living peer is about to send still counts.
          if (first_loss == 0) first_loss = time;
          if (time - first_loss < kLossGraceNs) code = kWaitDone;
        }
      }
      if (code != kWaitDone) {
        seen = load_acquire(at);  // what had arrived before
        if (seen >= value) code = kWaitDone;
        break;
      }
      __nanosleep(nap);
      if (nap < kLongestNapNs) nap *= 2;
    }
    if (code == kWaitDone) culprit = -1;
    if (info) *info = WaitInfo{seen, now() - start, culprit, 0};
    return code;
  }
};

static_assert(PolicyCheck<nvlink>::ok, "");

}  // namespace epcomm::device
