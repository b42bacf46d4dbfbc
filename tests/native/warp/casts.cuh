// Stands in for cuda/casts.cuh: what a test on the device shows the instructions to equal.
#pragma once

#include "epcomm/formats.h"

namespace epcomm {

inline float half_to_float(uint16_t code) { return f16_to_f32(code); }
inline uint16_t float_to_half(float value) { return f32_to_f16(value); }
inline uint16_t float_to_bfloat(float value) { return f32_to_bf16(value); }
inline uint32_t two_bfloats(float first, float second) {
  return uint32_t(f32_to_bf16(first)) | uint32_t(f32_to_bf16(second)) << 16;
}
inline uint32_t two_codes(float first, float second) {
  return uint32_t(f32_to_e4m3(first)) | uint32_t(f32_to_e4m3(second)) << 8;
}

// Passes over every NaN; a host's own does not where it signals.
inline float fmaxf(float a, float b) {
  if (a != a) return b;
  return b != b || a > b ? a : b;
}

// As PTX defines max.xorsign.abs: NaN is passed over, of two the result is the canonical one; the
// sign is the exclusive or of both.
inline uint32_t larger_of_one(uint32_t a, uint32_t b, uint32_t infinity) {
  const uint32_t sign = (a ^ b) & 0x8000u;
  a &= 0x7fffu;
  b &= 0x7fffu;
  if (a > infinity && b > infinity) return 0x7fffu;
  if (a > infinity) return b | sign;
  if (b > infinity) return a | sign;
  return (a > b ? a : b) | sign;
}
inline uint32_t larger_of_two(uint32_t a, uint32_t b, uint32_t infinity) {
  return larger_of_one(a & 0xffffu, b & 0xffffu, infinity) |
         larger_of_one(a >> 16, b >> 16, infinity) << 16;
}
inline uint32_t larger_halves(uint32_t a, uint32_t b) { return larger_of_two(a, b, 0x7c00u); }
inline uint32_t larger_bfloats(uint32_t a, uint32_t b) { return larger_of_two(a, b, 0x7f80u); }

}  // namespace epcomm
