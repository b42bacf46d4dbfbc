// What policies share: small words of PTX, a copy by a warp, and the wait for a word of the own
// heap.
#pragma once

#include "epcomm/base.h"
#include "epcomm/device/host_words.h"
#include "epcomm/device/wait.h"

namespace epcomm::device {

__device__ __forceinline__ unsigned lane_of_warp() {
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

__device__ __forceinline__ uint64_t load_relaxed(uint64_t at) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_acquire(uint64_t at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

struct alignas(16) Chunk {
  uint32_t word[4];
};

template <class T>
__device__ __forceinline__ void warp_copy_as(uint64_t dst, uint64_t src, uint64_t count,
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

__device__ __forceinline__ void warp_copy(uint64_t dst, uint64_t src, uint64_t bytes,
                                          unsigned lane) {
  if ((dst ^ src) & 15) {  // never both on a multiple of 16
    if (((dst | src) & 3) == 0) {
      warp_copy_as<uint32_t>(dst, src, bytes / 4, lane);
      const uint64_t done = bytes / 4 * 4;
      warp_copy_as<uint8_t>(dst + done, src + done, bytes - done, lane);
    } else {
      warp_copy_as<uint8_t>(dst, src, bytes, lane);
    }
    return;
  }
  uint64_t head = (16 - (dst & 15)) & 15;
  if (head > bytes) head = bytes;
  const uint64_t chunks = (bytes - head) / 16;
  const uint64_t done = head + chunks * 16;
  warp_copy_as<uint8_t>(dst, src, head, lane);
  warp_copy_as<Chunk>(dst + head, src + head, chunks, lane);
  warp_copy_as<uint8_t>(dst + done, src + done, bytes - done, lane);
}

// wait() of a policy, whose context has `heap`, `host_words`, `state_word`, `timeout_ns` and
// `num_ranks`.
template <class Ctx>
struct HeapWait {
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

 private:
  static constexpr int kSpins = 64;
  // Host words are read over PCIe, state words from memory: not with every look.
  static constexpr uint64_t kLookEveryNs = 20 * 1000;
  static constexpr uint64_t kLossGraceNs = 250 * 1000 * 1000;
  static constexpr unsigned kLongestNapNs = 256;
  static constexpr uint64_t kStateLeft = 1, kStateBroken = 2;  // PeerState of backend.hpp

  static __device__ __forceinline__ uint64_t state(const Ctx& ctx, int peer) {
    return load_relaxed(ctx.heap + ctx.state_word + uint64_t(peer) * kSignalStride);
  }

  // The rank whose end concerns this wait, or -1: the awaited one, else the first that died without
  // having left.
  static __device__ int lost_rank(const Ctx& ctx, int peer) {
    const uint64_t dead = ctx.host_words + sizeof(HostWords);
    int lost = -1;
    for (int rank = 0; rank < ctx.num_ranks; ++rank) {
      if (load_relaxed(dead + 8 * uint64_t(rank)) == 0 || state(ctx, rank) == kStateLeft) continue;
      if (rank == peer) return rank;
      if (lost < 0) lost = rank;
    }
    return lost;
  }

  // Why the wait cannot end well, or kWaitDone if it still can.
  static __device__ WaitCode look(const Ctx& ctx, int peer, int* culprit) {
    const uint64_t abort = load_relaxed(ctx.host_words);
    if (abort == kHostAbort) {
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
    const uint64_t start = now_ns();
    uint64_t next_look = start, first_loss = 0;
    unsigned nap = 16;
    int culprit = -1;
    WaitCode code = kWaitDone;
    uint64_t seen;
    while ((seen = load_acquire(at)) < value) {
      const uint64_t time = now_ns();
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
    if (info) *info = WaitInfo{seen, now_ns() - start, culprit, 0};
    return code;
  }
};

}  // namespace epcomm::device
