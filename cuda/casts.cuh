// The hardware's casts between float and the 16-bit row types.
#pragma once

#include "epcomm/base.h"

namespace epcomm {

// Instructions that equal f16_to_f32, f32_to_f16 and f32_to_bf16 for all inputs (tested), but for
// which NaN they give.
__device__ inline float half_to_float(uint16_t code) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(code));
  return value;
}
__device__ inline uint16_t float_to_half(float value) {
  uint16_t code;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(value));
  return code;
}
__device__ inline uint16_t float_to_bfloat(float value) {
  uint16_t code;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(code) : "f"(value));
  return code;
}

}  // namespace epcomm
