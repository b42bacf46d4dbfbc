// Number formats as integer arithmetic: the one definition of every rounding in epcomm. Hardware
// casts are used elsewhere only where a test shows them equal to this text.
//
//   bf16  1 sign, 8 exponent, 7 mantissa        f16  IEEE binary16
//   e4m3  fp8 "e4m3fn": bias 7, no infinity, NaN is 0x7f / 0xff, largest finite value 448
//   e8m0  a power of two, bias 127; 0xff is NaN
//
// Everything rounds to nearest even and keeps subnormals. A NaN stays a NaN, and every conversion
// but bf16 to float32, which only moves bits, makes it quiet.
#pragma once

#include "epcomm/base.h"

namespace epcomm {

// Channels that share one fp8 scale; the last group of a row may be shorter.
constexpr int kScaleGroup = 128;
constexpr float kE4m3Max = 448.0f;
// Floor under the largest magnitude of a group: a group of zeros has a usable scale.
constexpr float kMinAmax = 1e-4f;

EPCOMM_HD uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

EPCOMM_HD float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// ---------------------------------------------------------------------------------------- bf16

EPCOMM_HD float bf16_to_f32(uint16_t code) { return bits_float(uint32_t(code) << 16); }

EPCOMM_HD uint16_t f32_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);  // no branch: vectorises
}

// ----------------------------------------------------------------------------------------- f16

EPCOMM_HD float f16_to_f32(uint16_t code) {
  const uint32_t sign = uint32_t(code & 0x8000u) << 16;
  const uint32_t exponent = (code >> 10) & 0x1fu;
  const uint32_t mantissa = code & 0x3ffu;
  if (exponent == 0x1fu) {
    return bits_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  }
  if (exponent != 0) return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // A multiple of 2^-24: exact in float32, and normal there.
  return bits_float(sign | float_bits(float(int32_t(mantissa)) * 5.9604644775390625e-08f));
}

EPCOMM_HD uint16_t f32_to_f16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);  // 2^16 and more
  if (magnitude >= 0x38800000u) {                                 // 2^-14: normal; may carry to inf
    magnitude -= 112u << 23;
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return uint16_t(sign | (magnitude >> 13));
  }
  if (magnitude < 0x33000000u) return uint16_t(sign);  // below 2^-25, half the least value
  const uint32_t shift = 126u - (magnitude >> 23);     // 14..24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  uint32_t code = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  if (rest > half || (rest == half && (code & 1u))) ++code;
  return uint16_t(sign | code);
}

// ---------------------------------------------------------------------------------------- e4m3

EPCOMM_HD float e4m3_to_f32(uint8_t code) {
  const uint32_t sign = uint32_t(code & 0x80u) << 24;
  const uint32_t exponent = (code >> 3) & 0xfu;
  const uint32_t mantissa = code & 0x7u;
  if ((code & 0x7fu) == 0x7fu) return bits_float(sign | 0x7fc00000u);
  if (exponent != 0) return bits_float(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  return bits_float(sign | float_bits(float(int32_t(mantissa)) * 0.001953125f));
}

// e4m3(clamp(value, +-448)): infinities clamp too. NaN has one code.
EPCOMM_HD uint8_t f32_to_e4m3(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint8_t(0x7fu);
  if (magnitude >= 0x43e00000u) return uint8_t(sign | 0x7eu);  // 448
  if (magnitude >= 0x3c800000u) {                              // 2^-6: normal
    magnitude -= 120u << 23;
    magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);
    return uint8_t(sign | (magnitude >> 20));
  }
  if (magnitude < 0x3a800000u) return uint8_t(sign);  // below 2^-10, half the least value
  const uint32_t shift = 141u - (magnitude >> 23);    // 21..24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  uint32_t code = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  if (rest > half || (rest == half && (code & 1u))) ++code;
  return uint8_t(sign | code);
}

// ------------------------------------------------------------------------------- scales of groups

// Magnitude bits that count for a group's largest value: NaN and infinity do not. As unsigned
// integers magnitudes order like the floats they are.
EPCOMM_HD uint32_t finite_magnitude(float value) {
  const uint32_t magnitude = float_bits(value) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

// The scale of a group whose largest finite magnitude has these bits.
EPCOMM_HD float group_scale(uint32_t amax_bits, bool round_scale) {
  const uint32_t floor_bits = float_bits(kMinAmax);
  const float amax = bits_float(amax_bits > floor_bits ? amax_bits : floor_bits);
  const float scale = amax / kE4m3Max;
  if (!round_scale) return scale;
  // Always a normal number well below the largest power of two: the carry is the next exponent.
  return bits_float((float_bits(scale) + 0x7fffffu) & 0x7f800000u);
}

EPCOMM_HD float inverse_scale(float scale) { return 1.0f / scale; }

EPCOMM_HD uint8_t quantize_e4m3(float value, float inverse) { return f32_to_e4m3(value * inverse); }

EPCOMM_HD float dequantize_e4m3(uint8_t code, float scale) { return e4m3_to_f32(code) * scale; }

// ---------------------------------------------------------------------------------------- e8m0

// The e8m0 code of a power of two (a scale made with round_scale), and back.
EPCOMM_HD uint8_t f32_to_e8m0(float power_of_two) {
  return uint8_t(float_bits(power_of_two) >> 23);
}

EPCOMM_HD float e8m0_to_f32(uint8_t code) {
  if (code == 0xffu) return bits_float(0x7fc00000u);
  if (code == 0) return bits_float(0x00400000u);  // 2^-127 is subnormal
  return bits_float(uint32_t(code) << 23);
}

}  // namespace epcomm
