// The hardware's casts between float and the 16-bit row types, and to fp8 codes; maxima of the
// former.
#pragma once

#include "epcomm/formats.h"

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

// Two codes, the first one in the low half.
__device__ inline uint32_t two_bfloats(float first, float second) {
  uint32_t codes;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(second), "f"(first));
  return codes;
}

// The larger magnitudes of two words of two codes, with any sign. NaN is passed over; of two the
// result is one.
__device__ inline uint32_t larger_halves(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
__device__ inline uint32_t larger_bfloats(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

#if __CUDA_ARCH__ >= 890
#define EPCOMM_FP8_INSTRUCTIONS 1
#endif

// Two codes, the first one in the low byte; equal to f32_to_e4m3 for all inputs (tested).
__device__ inline uint32_t two_codes(float first, float second) {
#ifdef EPCOMM_FP8_INSTRUCTIONS
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return uint32_t(f32_to_e4m3(first)) | uint32_t(f32_to_e4m3(second)) << 8;
#endif
}

}  // namespace epcomm
