// The memory policy of CPU threads for mlx5_queue.h.
#pragma once

#include <sched.h>

#include <cstdint>

#include "epcomm/mlx5_queue.h"

namespace epcomm::mlx5 {

// Words for a syndrome, as verbs have them.
inline const char* syndrome_text(uint8_t syndrome) {
  switch (syndrome) {
    case kLocalLength:
      return "local length error";
    case kLocalQp:
      return "local QP operation error";
    case kLocalProtection:
      return "local protection error";
    case kFlushed:
      return "work request flushed";
    case kBadResponse:
      return "bad response";
    case kLocalAccess:
      return "local access error";
    case kRemoteInvalid:
      return "remote invalid request";
    case kRemoteAccess:
      return "remote access error";
    case kRemoteOperation:
      return "remote operation error";
    case kRetryExceeded:
      return "transport retry counter exceeded";
    case kRnrRetryExceeded:
      return "RNR retry counter exceeded";
    case kRemoteAborted:
      return "remote aborted";
    default:
      return "general error";
  }
}

struct HostMemory {
  static uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
  static uint64_t acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void store(uint64_t* word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }
  static uint64_t add(uint64_t* word, uint64_t value) {
    return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
  }
  static bool claim(uint64_t* word, uint64_t* next) {
    return __atomic_compare_exchange_n(word, next, *next + 1, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }
  static bool exchange(uint32_t* word, uint32_t old, uint32_t value) {
    return __atomic_compare_exchange_n(word, &old, value, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
  }
  static void set_segment(Segment* to, const Segment& segment) { *to = segment; }
  // Rows may have been written by streaming stores, which only a fence orders.
  static void fence() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#elif defined(__aarch64__)
    asm volatile("dmb oshst" ::: "memory");
#else
    __sync_synchronize();
#endif
  }
  static void set_record(uint32_t* record, uint32_t value) {
    __atomic_store_n(record, value, __ATOMIC_RELEASE);
  }
  static void tell(uint32_t* record, uint32_t count, uint64_t* doorbell, uint64_t value) {
    __atomic_store_n(record, count, __ATOMIC_RELEASE);
    // A register is another domain than the record's memory; stores to one that is mapped
    // write-combining may pass those to memory, on x86 too.
    fence();
    __atomic_store_n(doorbell, value, __ATOMIC_RELEASE);
    fence();  // and leaves now
  }
  static uint64_t take(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static uint32_t peek(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
  // Whoever is waited for may need this core.
  static void pause() { sched_yield(); }
};

}  // namespace epcomm::mlx5
