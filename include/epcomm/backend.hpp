// The host interface every backend implements, in the order of its life:
//
//   W::probe() -> W::create() -> alloc_heap() -> export_info() -> connect() -> use -> close()
//
// The caller carries export_info() bytes between ranks; a backend never does bootstrap. All
// methods are noexcept and return Status. No method may be called from two threads at once unless
// it says so. Nothing here knows what the bytes mean.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "epcomm/base.h"
#include "epcomm/status.hpp"

namespace epcomm {

// Capability bits are promises: each is backed by a working operation.
enum Caps : uint32_t {
  kCapHostPut = 1u << 0,        // host_transport() is not null
  kCapDevicePut = 1u << 1,      // device_ctx() works
  kCapPeerLoadStore = 1u << 2,  // peer_ptr() is not null for every peer
  kCapIntraNode = 1u << 3,
  kCapInterNode = 1u << 4,
  kCapHostMemory = 1u << 5,
  kCapDeviceMemory = 1u << 6,
  kCapNeedsProgress = 1u << 7,
  kCapGraphCapture = 1u << 8,
};

// What a peer's process is known to be. Values are written into state words: append only.
enum class PeerState : uint64_t {
  kAlive = 0,
  kLeft = 1,    // it closed its communicator
  kBroken = 2,  // it gave up (time-out or lost peer); nothing more comes from it
  kDead = 3,    // its process ended
};

// What a state word holds: the state and, with kBroken, the rank whose loss or silence made the
// writer give up, so that ranks which cannot see that themselves name the same one. -1: none.
constexpr uint64_t state_value(PeerState state, int lost = -1) noexcept {
  return uint64_t(state) | uint64_t(lost + 1) << 8;
}
constexpr PeerState state_of(uint64_t word) noexcept {
  const uint64_t state = word & 0xff;
  return state < uint64_t(PeerState::kDead) ? PeerState(state) : PeerState::kDead;
}
constexpr int lost_of(uint64_t word) noexcept { return int(word >> 8) - 1; }

// How a wait is described and bounded. The clock starts when the wait starts.
struct WaitSpec {
  const char* operation;  // as the user calls it
  const char* phase;      // "entry", "data", ...
  double timeout_s;
  // Called about every 50 ms by a waiting thread that belongs to Python; non-zero ends the wait
  // with kInterrupted. Null where no Python thread waits.
  int (*interrupted)(void*) = nullptr;
  void* interrupted_arg = nullptr;
};

// One-sided operations on the symmetric heap, from host threads. Offsets, never remote pointers.
//
// Order: what one thread put to a peer on a channel is visible there before a later signal of the
// same thread, peer and channel. Nothing else orders anything. Different channels may be used by
// different threads at once; one channel by one thread at a time. Channels are numbered from 0;
// behind those of data comes one for words that must not queue behind data.
class HostTransport {
 public:
  virtual ~HostTransport() = default;

  // This rank's heap, zeroed when connect() returns.
  virtual std::byte* heap() noexcept = 0;
  virtual uint64_t heap_bytes() const noexcept = 0;

  // Address of a peer's heap byte if loads and stores reach it, else null. peer == own rank: own
  // heap. Stores through it are ordered by the next signal() of the same thread to that peer.
  virtual std::byte* peer_ptr(int peer, uint64_t offset) noexcept = 0;

  // Copy `bytes` from the own heap at `src` to the peer's heap at `dst`. The source may be reused
  // after quiet().
  virtual Status put(int peer, int channel, uint64_t dst, uint64_t src,
                     uint64_t bytes) noexcept = 0;

  // Add to a 64-bit word in the peer's heap. One writer per word; and where the device has no
  // atomics, or a lost path is replaced by another, one channel per word: there signals are writes
  // of a sum that is kept by channel.
  virtual Status signal(int peer, int channel, uint64_t word, uint64_t add) noexcept = 0;

  virtual Status put_signal(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes,
                            uint64_t word, uint64_t add) noexcept {
    EPCOMM_RETURN_IF_ERROR(put(peer, channel, dst, src, bytes));
    return signal(peer, channel, word, add);
  }

  // All puts and signals of this channel to the peer have been carried out: their sources may be
  // reused, and nothing sent later, on any channel, arrives before them.
  virtual Status quiet(int peer, int channel, const WaitSpec& spec) noexcept = 0;

  // Until the own heap's word >= value (acquire), or the deadline, or the peer is gone. What had
  // arrived before the peer went still counts. Any thread. `peer` is the word's writer; its errors
  // name it, the operation, the phase, the seconds and both values.
  virtual Status wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept = 0;

  // Any thread.
  virtual PeerState peer_state(int peer) noexcept = 0;

  // Ends every wait of this rank with kPeerLost and `text`. Any thread; sticky.
  virtual void abort(const Status& why) noexcept = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const noexcept = 0;
  virtual uint32_t caps() const noexcept = 0;

  // Make this rank's heap: zeroed, its space reserved. kOutOfMemory says asked, free and remedy.
  virtual Status alloc_heap(uint64_t size_bytes) noexcept = 0;

  // What peers need in order to connect, some KiB at most; begins with the backend's name and a
  // version.
  virtual Status export_info(std::string* out) noexcept = 0;

  // All ranks' infos in rank order. `state_word` is the heap offset of [rank] PeerState words,
  // kSignalStride apart, through which peers say that they left. Reaches every peer or says which
  // one it cannot reach and why. `interrupted`: as in WaitSpec; kept, for waits of this thread in
  // calls that are given no WaitSpec.
  virtual Status connect(int rank, const std::vector<std::string>& infos, uint64_t state_word,
                         double timeout_s, int (*interrupted)(void*) = nullptr,
                         void* interrupted_arg = nullptr) noexcept = 0;

  // Owned by the backend; null before connect() or without kCapHostPut.
  virtual HostTransport* host_transport() noexcept { return nullptr; }

  // What kernels are given by value: the POD of include/epcomm/device/<name>.h, whose size `bytes`
  // must be. Valid from connect() until close(). Backends with kCapDevicePut.
  virtual Status device_ctx(void* /*out*/, size_t /*bytes*/) noexcept {
    return error(Code::kUnsupported, -1, "device_ctx: not on backend %s", name());
  }

  // The next three are what the HostTransport says of peers, for backends that have none.
  // Writes this rank's state word at every peer.
  virtual Status announce(PeerState /*state*/) noexcept {
    return error(Code::kUnsupported, -1, "announce: not on backend %s", name());
  }
  // Any thread.
  virtual PeerState peer_state(int /*peer*/) noexcept { return PeerState::kAlive; }
  // Ends every wait of this rank, also in kernels that run now. Any thread; the first reason stays.
  virtual void abort(const Status& /*why*/) noexcept {}

  // First error seen by a proxy or on the device; sticky. Any thread.
  virtual Status async_error() noexcept { return {}; }

  // Idempotent, local, bounded time; also called by the destructor. No kernel of this rank that
  // reaches peers may run any more.
  virtual Status close() noexcept = 0;
};

}  // namespace epcomm
