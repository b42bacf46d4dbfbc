// The contract of a device policy: how a kernel reaches the heaps of its peers. Kernels are written
// once, over a template parameter, and compiled for each policy.
//
// A policy is `epcomm::device::<word>`, the backend's word, with a POD `Ctx` that kernels take by
// value (the backend's device_ctx() fills it) and these static members. They mean what the members
// of HostTransport in backend.hpp mean; offsets count from a heap's begin.
//
//   peer_ptr    Where a peer's heap byte is, if loads and stores reach it, else null. The own rank
//               too. What was stored through it by threads that synchronised with the caller
//               (__syncwarp, __syncthreads, a fence and a flag) is ordered by the next signal().
//   put         All 32 lanes of a warp, same arguments: copies from the own heap at `src` to the
//               peer's at `dst`. Any alignment; fast where both are multiples of 16. The source may
//               be reused after quiet(). Ends with __syncwarp().
//   signal      One thread: adds to a 64-bit word of the peer's heap. One rank writes a word, and
//               one of its threads at a time. Everything that this thread or threads synchronised
//               with it put or stored to that peer on that channel is visible there before.
//   put_signal  put, then signal by one lane. All 32 lanes.
//   wait        One thread: until the own heap's `word`, which `peer` adds to, is at least `value`
//               (acquire), or `timeout_ns` have passed since the wait began (0: the context's), or
//               the host ended all waits, or the peer is gone. What had arrived before the peer
//               went still counts; the death of a third rank ends the wait 0.25 s later. Never
//               traps. `info` may be null. The caller synchronises with the threads that read what
//               has arrived; they may read it by plain loads, not by ld.global.nc, and by the async
//               proxy (TMA) only after fence.proxy.async.
//   quiet       One thread: until the puts of this channel to the peer have left their source.
//
// A channel is used by one warp, or by threads that take turns, at a time; different channels may
// be used at once. Nothing orders two channels.
#pragma once

#include "epcomm/device/wait.h"

namespace epcomm::device {

template <class A, class B>
struct PolicySame {
  static constexpr bool value = false;
};
template <class A>
struct PolicySame<A, A> {
  static constexpr bool value = true;
};

// Instantiate it beside the policy: PolicyCheck<word>::ok. A wrong signature is one sentence.
template <class P>
struct PolicyCheck {
  using Ctx = typename P::Ctx;

  static_assert(PolicySame<decltype(&P::peer_ptr), void* (*)(const Ctx&, int, uint64_t)>::value,
                "policy: void* peer_ptr(const Ctx&, int peer, uint64_t offset)");
  static_assert(PolicySame<decltype(&P::put),
                           void (*)(const Ctx&, int, int, uint64_t, uint64_t, uint64_t)>::value,
                "policy: void put(const Ctx&, int peer, int channel, uint64_t dst, uint64_t src, "
                "uint64_t bytes)");
  static_assert(
      PolicySame<decltype(&P::signal), void (*)(const Ctx&, int, int, uint64_t, uint64_t)>::value,
      "policy: void signal(const Ctx&, int peer, int channel, uint64_t word, uint64_t add)");
  static_assert(
      PolicySame<decltype(&P::put_signal), void (*)(const Ctx&, int, int, uint64_t, uint64_t,
                                                    uint64_t, uint64_t, uint64_t)>::value,
      "policy: void put_signal(const Ctx&, int peer, int channel, uint64_t dst, "
      "uint64_t src, uint64_t bytes, uint64_t word, uint64_t add)");
  static_assert(PolicySame<decltype(&P::wait), WaitCode (*)(const Ctx&, int, uint64_t, uint64_t,
                                                            uint64_t, WaitInfo*)>::value,
                "policy: WaitCode wait(const Ctx&, int peer, uint64_t word, uint64_t value, "
                "uint64_t timeout_ns, WaitInfo* info)");
  static_assert(
      PolicySame<decltype(&P::quiet), WaitCode (*)(const Ctx&, int, int, uint64_t)>::value,
      "policy: WaitCode quiet(const Ctx&, int peer, int channel, uint64_t timeout_ns)");

  static constexpr bool ok = true;
};

}  // namespace epcomm::device
