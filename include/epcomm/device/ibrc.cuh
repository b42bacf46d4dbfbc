// Device policy `ibrc`: GPU threads write commands (command.h) into the rings of a CPU proxy, which
// posts them. See ops.cuh for what each member promises.
//
// A command costs one system fence, so a put with its signal behind it is one command. quiet()
// waits for all commands of its channel, to whatever peer.
#pragma once

#include "epcomm/base.h"
#include "epcomm/device/ibrc.h"
#include "epcomm/device/ops.cuh"
#include "epcomm/device/warp.cuh"

namespace epcomm::device {

// How GPU threads see a ring (CommandRing in command.h): in host memory, at system scope.
struct GpuRing {
  // One store of 16 bytes, which the PTX memory model keeps whole; two of 8 may come in any order.
  static __device__ __forceinline__ void store_quarter(CommandQuarter* at,
                                                       const CommandQuarter& quarter) {
    asm volatile(
        "{\n\t"
        ".reg .b128 whole;\n\t"
        "mov.b128 whole, {%1, %2};\n\t"
        "st.relaxed.sys.global.b128 [%0], whole;\n\t"
        "}" ::"l"(at),
        "l"(quarter.low), "l"(quarter.high)
        : "memory");
  }
};

struct ibrc {
  using Ctx = IbrcCtx;

  static __device__ __forceinline__ void* peer_ptr(const Ctx& ctx, int peer, uint64_t offset) {
    return peer == ctx.rank ? reinterpret_cast<void*>(ctx.heap + offset) : nullptr;
  }

  static __device__ __forceinline__ void put(const Ctx& ctx, int peer, int channel, uint64_t dst,
                                             uint64_t src, uint64_t bytes) {
    __syncwarp();  // other lanes may have written the source
    if (peer == ctx.rank) {
      warp_copy(ctx.heap + dst, ctx.heap + src, bytes, lane_of_warp());
    } else if (lane_of_warp() == 0 && bytes > 0) {
      move(ctx, peer, channel, dst, src, bytes, kCommandPut, 0, 0);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void signal(const Ctx& ctx, int peer, int channel,
                                                uint64_t word, uint64_t add) {
    if (peer == ctx.rank) {
      add_own(ctx, word, add);
    } else {
      move(ctx, peer, channel, 0, 0, 0, kCommandSignal, word, add);
    }
  }

  static __device__ __forceinline__ void put_signal(const Ctx& ctx, int peer, int channel,
                                                    uint64_t dst, uint64_t src, uint64_t bytes,
                                                    uint64_t word, uint64_t add) {
    __syncwarp();
    if (peer == ctx.rank) {
      warp_copy(ctx.heap + dst, ctx.heap + src, bytes, lane_of_warp());
      __syncwarp();
      if (lane_of_warp() == 0) add_own(ctx, word, add);
    } else if (lane_of_warp() == 0) {
      move(ctx, peer, channel, dst, src, bytes, kCommandPutSignal, word, add);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ WaitCode wait(const Ctx& ctx, int peer, uint64_t word,
                                                  uint64_t value, uint64_t timeout_ns,
                                                  WaitInfo* info) {
    return HeapWait<Ctx>::wait(ctx, peer, word, value, timeout_ns, info);
  }

  static __device__ __forceinline__ WaitCode quiet(const Ctx& ctx, int peer, int channel,
                                                   uint64_t timeout_ns) {
    if (peer == ctx.rank) return kWaitDone;
    const CommandWords* const words = words_of(ctx, channel);
    return until(ctx, &words->done, *issued_of(ctx, channel),
                 timeout_ns ? timeout_ns : ctx.timeout_ns);
  }

 private:
  using Ring = CommandRing<GpuRing>;

  static __device__ __forceinline__ uint64_t* issued_of(const Ctx& ctx, int channel) {
    return reinterpret_cast<uint64_t*>(ctx.issued) + channel;
  }
  static __device__ __forceinline__ const CommandWords* words_of(const Ctx& ctx, int channel) {
    return reinterpret_cast<const CommandWords*>(ctx.words) + channel;
  }

  static __device__ __forceinline__ void add_own(const Ctx& ctx, uint64_t word, uint64_t add) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(ctx.heap + word), "l"(add)
                 : "memory");
  }

  // Until the proxy's word is `value` or more. Read over PCIe: a look costs about a microsecond.
  static __device__ __noinline__ WaitCode until(const Ctx& ctx, const uint64_t* word,
                                                uint64_t value, uint64_t timeout_ns) {
    const uint64_t at = reinterpret_cast<uint64_t>(word), start = now_ns();
    while (load_acquire(at) < value) {
      if (load_relaxed(ctx.host_words) == kHostAbort) return kWaitAborted;
      if (now_ns() - start >= timeout_ns) return kWaitTimeout;
      __nanosleep(64);
    }
    return kWaitDone;
  }

  // One thread. After an abort or a time-out nothing is written: the next wait() says why.
  static __device__ __noinline__ void move(const Ctx& ctx, int peer, int channel, uint64_t dst,
                                           uint64_t src, uint64_t bytes, uint32_t last_op,
                                           uint64_t word, uint64_t add) {
    uint64_t* const issued = issued_of(ctx, channel);
    CommandSlot* const slots =
        reinterpret_cast<CommandSlot*>(ctx.slots) + uint64_t(channel) * ctx.ring_size;
    const CommandWords* const words = words_of(ctx, channel);
    // What this thread and those it synchronised with wrote is there for the NIC before the
    // command.
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    while (true) {
      const uint64_t index = *issued;
      if (index >= ctx.ring_size &&
          until(ctx, &words->taken, index + 1 - ctx.ring_size, ctx.timeout_ns) != kWaitDone) {
        return;
      }
      const bool last = bytes <= ctx.max_bytes;
      const uint32_t part = last ? uint32_t(bytes) : ctx.max_bytes;
      Ring::write(slots, ctx.ring_size, index,
                  Command{last ? last_op : uint32_t(kCommandPut), 0, peer, part, src, dst,
                          last ? word : 0, last ? add : 0});
      *issued = index + 1;
      if (last) return;
      src += part;
      dst += part;
      bytes -= part;
    }
  }
};

static_assert(PolicyCheck<ibrc>::ok, "");

}  // namespace epcomm::device
