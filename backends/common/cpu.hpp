// What a core is told beside loads and stores.
#pragma once

namespace epcomm::common {

// Between two looks of a loop that spins.
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Before a signal: rows may have been written by streaming stores, which nothing else orders.
inline void order_streaming_stores() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace epcomm::common
