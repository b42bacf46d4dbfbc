// Loads and stores that every kernel here needs.
#pragma once

#include "epcomm/layout.h"

namespace epcomm {

// Items of any address: those of foreign arrays need not be aligned.
template <typename Item>
__device__ inline Item load_bytes(const void* at) {
  union {
    Item item;
    uint8_t bytes[sizeof(Item)];
  } value;
#pragma unroll
  for (int i = 0; i < int(sizeof(Item)); ++i) value.bytes[i] = static_cast<const uint8_t*>(at)[i];
  return value.item;
}

template <typename Item>
__device__ inline Item load_item(const void* at, bool aligned) {
  return aligned ? *static_cast<const Item*>(at) : load_bytes<Item>(at);
}

__device__ inline const uint8_t* offset_by(const void* base, int64_t bytes) {
  return static_cast<const uint8_t*>(base) + bytes;
}

// The id of a pick as the caller wrote it.
__device__ inline int64_t load_id(const IdView& ids, int64_t token, int32_t slot) {
  const void* at = offset_by(ids.data, token * ids.token_stride + slot * ids.topk_stride);
  return ids.is64 ? load_item<int64_t>(at, ids.aligned)
                  : int64_t(load_item<int32_t>(at, ids.aligned));
}

// The id of a pick, -1 for none. A bad one counts as none; the first of them, by token and slot,
// ends up in *bad_inverse whatever the order in which threads come here. Compared before it is
// narrowed: 2^40 is never expert 0.
__device__ inline int32_t read_id(const IdView& ids, int64_t token, int32_t slot,
                                  uint64_t* bad_inverse) {
  const int64_t id = load_id(ids, token, slot);
  if (id >= -1 && id < int64_t(ids.num_experts)) return int32_t(id);
  atomicMax(reinterpret_cast<unsigned long long*>(bad_inverse),
            ~static_cast<unsigned long long>(token * ids.num_topk + slot));
  return -1;
}

__device__ inline IdError id_error(const IdView& ids, uint64_t bad_inverse) {
  IdError error{bad_inverse, 0};
  if (bad_inverse != 0) {
    const int64_t pick = int64_t(~bad_inverse);
    error.value = load_id(ids, pick / ids.num_topk, int32_t(pick % ids.num_topk));
  }
  return error;
}

// Words that other blocks of the same launch write: never from the first-level cache.
__device__ inline uint64_t load_shared_word(const uint64_t* at) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}
__device__ inline void store_shared_word(uint64_t* at, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(at), "l"(word) : "memory");
}

// True in every thread of exactly one block: the last to come here. What all blocks wrote before
// is then visible. Resets the counter.
__device__ inline bool last_block(uint32_t* done, uint32_t num_blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(done, 1u) == num_blocks - 1;
    if (last) {
      *done = 0;
      __threadfence();
    }
  }
  __syncthreads();
  return last;
}

}  // namespace epcomm
