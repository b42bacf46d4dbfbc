// The memory of a program's `new`, of which a test may keep some back. For one source of a program.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace epcomm::testing {

// Pieces of exactly so many bytes are not to be had: by any thread, by this one. 0: all are.
inline std::atomic<size_t> refused_bytes{0};
inline thread_local size_t refused_bytes_here = 0;
// This thread can have so many more pieces, but not the next one. Less than 0: any number.
inline thread_local int64_t pieces_left = -1;

inline void* scarce(size_t bytes) noexcept {
  if (bytes == 0) bytes = 1;
  if (bytes == refused_bytes || bytes == refused_bytes_here) return nullptr;
  if (pieces_left >= 0 && pieces_left-- == 0) return nullptr;
  return std::malloc(bytes);
}

}  // namespace epcomm::testing

[[gnu::noinline]] void* operator new(size_t bytes) {
  if (void* const memory = epcomm::testing::scarce(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return epcomm::testing::scarce(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
