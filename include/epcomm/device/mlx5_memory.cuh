// The memory policy of GPU threads for mlx5_queue.h: local words in device memory at GPU scope,
// what the NIC reads and writes at system scope, wherever the rings lie.
#pragma once

#include "epcomm/mlx5_queue.h"

namespace epcomm::device {

struct GpuMemory {
  static __device__ __forceinline__ uint64_t load(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  static __device__ __forceinline__ uint64_t acquire(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  static __device__ __forceinline__ void store(uint64_t* word, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  static __device__ __forceinline__ uint64_t add(uint64_t* word, uint64_t value) {
    uint64_t old;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(word), "l"(value)
                 : "memory");
    return old;
  }
  static __device__ __forceinline__ bool claim(uint64_t* word, uint64_t* next) {
    const uint64_t expected = *next;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(*next)
                 : "l"(word), "l"(expected), "l"(expected + 1)
                 : "memory");
    return *next == expected;
  }
  static __device__ __forceinline__ bool exchange(uint32_t* word, uint32_t old, uint32_t value) {
    uint32_t seen;
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(seen)
                 : "l"(word), "r"(old), "r"(value)
                 : "memory");
    return seen == old;
  }
  static __device__ __forceinline__ void set_segment(mlx5::Segment* to,
                                                     const mlx5::Segment& segment) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(segment.word[0]),
                 "r"(segment.word[1]), "r"(segment.word[2]), "r"(segment.word[3])
                 : "memory");
  }
  static __device__ __forceinline__ void fence() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  }
  static __device__ __forceinline__ void set_record(uint32_t* record, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(record), "r"(value) : "memory");
  }
  // A second fence between record and doorbell would cost as much as all the rest, so nothing here
  // orders the three stores: the NIC works by the number in the doorbell, not by the record. It
  // rereads the record where it lost a doorbell; should it see an old one, the second ring tells it
  // again, and if that came too early as well, the next tell() does, behind its fence. until_done()
  // of ibgda.cuh makes sure that there is a next one for whoever waits.
  static __device__ __forceinline__ void tell(uint32_t* record, uint32_t count, uint64_t* doorbell,
                                              uint64_t value) {
    ring(doorbell, value);
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(record), "r"(count) : "memory");
    ring(doorbell, value);
  }
  static __device__ __forceinline__ uint64_t take(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  static __device__ __forceinline__ uint32_t peek(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }
  static __device__ __forceinline__ void pause() { __nanosleep(20); }

 private:
  static __device__ __forceinline__ void ring(uint64_t* doorbell, uint64_t value) {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 2)
    asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(doorbell), "l"(value) : "memory");
#else
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(doorbell), "l"(value) : "memory");
#endif
  }
};

}  // namespace epcomm::device
