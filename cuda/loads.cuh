// Loads of rows that lie on other GPUs. They are read once: they would only push each other out of
// the caches.
#pragma once

namespace epcomm {

__device__ inline uint4 load_once(const char* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

// So many bytes further: a pointer of its own for each piece would take registers.
template <int kOffset>
__device__ inline uint4 load_once_at(const char* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4+%5];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at), "n"(kOffset));
  return v;
}

}  // namespace epcomm
