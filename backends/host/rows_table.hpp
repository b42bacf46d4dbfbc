// The tables behind row_ops, one per instruction set, and what they share.
#pragma once

#include "host/rows.hpp"

#if defined(__x86_64__)
#define EPCOMM_ROWS_X86 1
#include <immintrin.h>
#endif

namespace epcomm::host {

// memcpy: the C library chooses its loop at run time, too.
void plain_copy(void* dst, const void* src, size_t bytes);

// Columns [begin, end) of RowOps::reduce in portable C++: the reference, and the vector loops'
// tail.
void plain_reduce(RowType type, void* out, const void* const* rows, const float* weights,
                  int num_rows, const float* bias, size_t begin, size_t end);

// Groups [begin / 128, ...) of RowOps::quantize, `begin` a multiple of 128.
void plain_quantize(RowType type, uint8_t* codes, float* scales, const void* x, size_t begin,
                    size_t n, bool round_scale);

// Arithmetic must not depend on what the calling thread was told about subnormals, rounding or
// traps (torch.set_flush_denormal, fesetround): the loops run under the power-on state.
class FloatState {
 public:
#ifdef EPCOMM_ROWS_X86
  FloatState() noexcept : saved_(_mm_getcsr()) {
    if ((saved_ & ~kStickyFlags) != kPowerOn) _mm_setcsr(kPowerOn);
  }
  ~FloatState() {
    if ((saved_ & ~kStickyFlags) != kPowerOn) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kPowerOn = 0x1f80;
  static constexpr unsigned kStickyFlags = 0x3f;
  unsigned saved_;
#else
  FloatState() noexcept {}
  ~FloatState() {}
#endif
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;
};

extern const RowOps kPlainRows;
#ifdef EPCOMM_ROWS_X86
extern const RowOps kAvx2Rows;
extern const RowOps kAvx512Rows;
#endif

}  // namespace epcomm::host
