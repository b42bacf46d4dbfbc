// Floors of `python -m epcomm bench`: plain copies by as many multiprocessors as a call has, with
// nothing looked up and nothing waited for. And a delay, so that a timed call is queued when it may
// start.
#include "bulk.cuh"

using namespace epcomm;
using namespace epcomm::device;

namespace {

constexpr int kWarps = 16;

__device__ uint4 load_once(const char* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

// A warp moves a piece through registers; both addresses and the size are multiples of 16.
__device__ void move(char* to, const char* from, int bytes, int lane) {
  constexpr int kUnroll = 7;
  for (int at = lane * 16; at < bytes; at += 512 * kUnroll) {
    uint4 part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * 512 < bytes) part[u] = load_once(from + at + u * 512);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * 512 < bytes) *reinterpret_cast<uint4*>(to + at + u * 512) = part[u];
    }
  }
}

}  // namespace

// Own memory to a peer's as dispatch moves rows: one load and one store of the copy engine a piece.
// With load == 0 the stores alone, from shared memory as it is.
extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
    epcomm_floor_push(char* to, const char* from, long long pieces, int piece_bytes, int load) {
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  const long long stride = (long long)gridDim.x * kWarps;
#ifdef EPCOMM_BULK
  extern __shared__ __align__(128) char dynamic[];
  __shared__ uint64_t barriers[kWarps];
  uint64_t* barrier = &barriers[warp];
  char* buffer = dynamic + (long long)warp * piece_bytes;
  uint32_t parity = 0;
  if (lane == 0) {
    barrier_init(barrier, 1);
    barrier_fence();
    for (long long i = blockIdx.x + (long long)warp * gridDim.x; i < pieces; i += stride) {
      if (load) {
        bulk_wait_read();
        barrier_expect(barrier, uint32_t(piece_bytes));
        bulk_load(buffer, from + i * piece_bytes, uint32_t(piece_bytes), barrier);
        barrier_wait(barrier, parity);
        parity ^= 1;
      }
      bulk_store(to + i * piece_bytes, buffer, uint32_t(piece_bytes));
    }
    bulk_wait_all();
  }
#else
  for (long long i = blockIdx.x + (long long)warp * gridDim.x; i < pieces; i += stride)
    move(to + i * piece_bytes, from + (load ? i : 0) * piece_bytes, piece_bytes, lane);
#endif
}

// A peer's memory to own memory as combine reads rows: through registers.
extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
    epcomm_floor_pull(char* to, const char* from, long long pieces, int piece_bytes) {
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  const long long stride = (long long)gridDim.x * kWarps;
  for (long long i = blockIdx.x + (long long)warp * gridDim.x; i < pieces; i += stride)
    move(to + i * piece_bytes, from + i * piece_bytes, piece_bytes, lane);
}

extern "C" __global__ void epcomm_floor_delay(long long ns) {
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - begin < ns);
}
