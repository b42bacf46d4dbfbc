// Device policy `ibgda`: GPU threads build mlx5 work requests and ring doorbells themselves. See
// ops.cuh for what each member promises, mlx5_queue.h for how a queue pair is driven.
//
// A (peer, channel) has a queue pair of its own, and one warp at a time: the path for one poster.
// Puts gather and are told to the NIC with the signal behind them, with one system fence.
#pragma once

#include "epcomm/base.h"
#include "epcomm/device/ibgda.h"
#include "epcomm/device/mlx5_memory.cuh"
#include "epcomm/device/ops.cuh"
#include "epcomm/device/warp.cuh"

namespace epcomm::device {

struct ibgda {
  using Ctx = IbgdaCtx;

  static __device__ __forceinline__ void* peer_ptr(const Ctx& ctx, int peer, uint64_t offset) {
    return peer == ctx.rank ? reinterpret_cast<void*>(ctx.heap + offset) : nullptr;
  }

  static __device__ __forceinline__ void put(const Ctx& ctx, int peer, int channel, uint64_t dst,
                                             uint64_t src, uint64_t bytes) {
    __syncwarp();  // other lanes may have written the source
    if (peer == ctx.rank) {
      warp_copy(ctx.heap + dst, ctx.heap + src, bytes, lane_of_warp());
    } else if (lane_of_warp() == 0) {
      post_put(ctx, queue(ctx, peer, channel), dst, src, bytes);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void signal(const Ctx& ctx, int peer, int channel,
                                                uint64_t word, uint64_t add) {
    if (peer == ctx.rank) {
      GpuMemory::fence();
      asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(ctx.heap + word), "l"(add)
                   : "memory");
      return;
    }
    IbgdaQueue* const to = queue(ctx, peer, channel);
    const uint64_t number = to->numbers.reserved;
    if (!room(ctx, to, number)) return;
    Q::set(
        to->rings, number,
        mlx5::fetch_add(uint16_t(number), to->rings.qpn, mlx5::kSignalled,
                        {to->remote_heap + word, to->signal_rkey}, {to->sink, to->sink_lkey}, add));
    to->numbers.reserved = to->signalled = number + 1;
    publish(to);
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

  static __device__ __forceinline__ WaitCode quiet(const Ctx& ctx, int peer, int channel,
                                                   uint64_t timeout_ns) {
    if (peer == ctx.rank) return kWaitDone;
    IbgdaQueue* const of = queue(ctx, peer, channel);
    if (of->signalled != of->numbers.reserved && room(ctx, of, of->numbers.reserved)) {
      // An empty write completes after all before it.
      const uint64_t number = of->numbers.reserved;
      Q::set(of->rings, number,
             mlx5::write(uint16_t(number), of->rings.qpn, mlx5::kSignalled,
                         {of->remote_heap, of->data_rkey}, {}, 0));
      of->numbers.reserved = of->signalled = number + 1;
    }
    publish(of);
    return until_done(ctx, of, of->numbers.reserved, timeout_ns ? timeout_ns : ctx.timeout_ns);
  }

 private:
  using Q = mlx5::Queue<GpuMemory>;
  static constexpr uint64_t kBatch = 16;  // puts that gather before the NIC is told
  // A NIC that lost a doorbell and reread an old record is told again after so long.
  static constexpr uint64_t kRingAgainNs = 1000 * 1000;

  static __device__ __forceinline__ IbgdaQueue* queue(const Ctx& ctx, int peer, int channel) {
    return reinterpret_cast<IbgdaQueue*>(ctx.queues) + peer * ctx.num_channels + channel;
  }

  static __device__ __forceinline__ void publish(IbgdaQueue* queue) {
    if (queue->pushed == queue->numbers.reserved) return;
    Q::publish(queue->rings, &queue->numbers, queue->numbers.reserved);
    queue->pushed = queue->numbers.reserved;
  }

  // False: the queue pair is of no use any more.
  static __device__ __forceinline__ bool room(const Ctx& ctx, IbgdaQueue* queue, uint64_t number) {
    if (GpuMemory::load(&queue->numbers.failed)) return false;
    if (Q::has_room(queue->rings, &queue->numbers, number)) return true;
    publish(queue);
    return until_done(ctx, queue, number + 1 - queue->rings.room, ctx.timeout_ns) == kWaitDone;
  }

  // Numbers below `target` are complete. A time-out in the middle of a queue is the end of it.
  static __device__ __noinline__ WaitCode until_done(const Ctx& ctx, IbgdaQueue* queue,
                                                     uint64_t target, uint64_t timeout_ns) {
    const uint64_t start = now_ns();
    uint64_t ring_at = start + kRingAgainNs;
    while (true) {
      Q::poll_shared(queue->rings, &queue->numbers, 16);
      if (GpuMemory::load(&queue->numbers.failed)) return kWaitPeerDead;
      if (GpuMemory::acquire(&queue->numbers.done) >= target) return kWaitDone;
      if (load_relaxed(ctx.host_words) == kHostAbort) return kWaitAborted;
      if (now_ns() - start >= timeout_ns) {
        GpuMemory::store(&queue->numbers.failed, mlx5::failed_value({mlx5::kNoSense, 0, 0}));
        return kWaitTimeout;
      }
      if (now_ns() >= ring_at) {
        Q::publish(queue->rings, &queue->numbers, queue->pushed);
        ring_at = now_ns() + kRingAgainNs;
      }
      GpuMemory::pause();
    }
  }

  static __device__ __forceinline__ void post_put(const Ctx& ctx, IbgdaQueue* to, uint64_t dst,
                                                  uint64_t src, uint64_t bytes) {
    while (bytes > 0) {
      const uint64_t number = to->numbers.reserved;
      if (!room(ctx, to, number)) return;
      const uint32_t part = bytes < to->max_message ? uint32_t(bytes) : to->max_message;
      // Room comes from completions: some in every quarter of the queue.
      const bool signalled = number + 1 - to->signalled >= to->rings.room / 4;
      Q::set(to->rings, number,
             mlx5::write(uint16_t(number), to->rings.qpn, signalled ? mlx5::kSignalled : uint8_t(0),
                         {to->remote_heap + dst, to->data_rkey}, {to->heap + src, to->lkey}, part));
      to->numbers.reserved = number + 1;
      if (signalled) to->signalled = number + 1;
      if (number + 1 - to->pushed >= kBatch) publish(to);
      dst += part;
      src += part;
      bytes -= part;
    }
  }
};

static_assert(PolicyCheck<ibgda>::ok, "");

}  // namespace epcomm::device
