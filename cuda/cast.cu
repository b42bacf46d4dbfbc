// fp8 codes with a scale for each group of channels, and the way back. Bits are those of
// epcomm/formats.h; the instructions used for its conversions are tested to equal it for all
// inputs.
#include "epcomm/cast.h"
#include "quantize.cuh"

namespace epcomm {
namespace {

__device__ void two_floats(uint32_t codes, float* first, float* second) {
#ifdef EPCOMM_FP8_INSTRUCTIONS
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n"
      " cvt.f32.f16 %1, high;}"
      : "=f"(*first), "=f"(*second)
      : "r"(halves));
#else
  *first = e4m3_to_f32(uint8_t(codes));
  *second = e4m3_to_f32(uint8_t(codes >> 8));
#endif
}

// The group that kCastLanes threads work at.
struct Group {
  int64_t token;
  int64_t group;
};

__device__ Group group_of(const CastArgs& args, int64_t number) {
  Group at{};
  if (number <= int64_t(~0u) && args.groups <= int64_t(~0u)) {  // many times cheaper than 64 bits
    at.token = uint32_t(number) / uint32_t(args.groups);
  } else {
    at.token = number / args.groups;
  }
  at.group = number - at.token * args.groups;
  return at;
}

template <typename Format>
__device__ void load_codes(const uint8_t* from, uint32_t* codes) {
  if constexpr (Format::kPerPiece == 8) {
    const uint2 word = *reinterpret_cast<const uint2*>(from);
    codes[0] = word.x;
    codes[1] = word.y;
  } else {
    codes[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

template <typename Format>
__device__ Raw<Format> load_group(const CastArgs& args, const Group& at, int lane) {
  const bool aligned = args.x.unit >= int32_t(sizeof(typename Format::Code));
  return load_raw<Format>(offset_by(args.x.data, at.token * args.x.row_stride), args.x.item_stride,
                          args.width, args.vector != 0, aligned, at.group, lane);
}

template <typename Format>
__device__ void quantize(const CastArgs& args) {
  constexpr int kPer = Format::kPerPiece;
  const int lane = int(threadIdx.x) % kCastLanes;
  const int64_t step = int64_t(gridDim.x) * (kCastThreads / kCastLanes);
  const int64_t num_groups = args.num_tokens * args.groups;
  // The threads of a warp take the same steps, for the shuffles.
  int64_t base = int64_t(blockIdx.x) * (kCastThreads / kCastLanes);
  const int64_t ahead = int(threadIdx.x) / kCastLanes;
  Group next = group_of(args, base + ahead < num_groups ? base + ahead : 0);
  Raw<Format> next_raw = load_group<Format>(args, next, lane);
  for (; base < num_groups; base += step) {
    const int64_t number = base + ahead;
    const Group at = next;
    const Raw<Format> raw = next_raw;
    if (base + step < num_groups) {  // on its way while this group is computed
      next = group_of(args, number + step < num_groups ? number + step : 0);
      next_raw = load_group<Format>(args, next, lane);
    }
    uint32_t codes[kCastItems / 4];
    const float scale = quantize_group<Format>(raw, args.round_scale != 0, codes);
    if (number >= num_groups) continue;
    if (lane == 0) args.scales[number] = scale;
    uint8_t* const row = static_cast<uint8_t*>(args.y) + at.token * args.width;
#pragma unroll
    for (int i = 0; i < Pieces<Format>::kCount; ++i) {
      const int64_t item = Pieces<Format>::item(at.group, i, lane);
      if (args.vector) {
        if (item < args.width) store_codes<Format>(row + item, codes + i * (kPer / 4));
        continue;
      }
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const uint32_t word = codes[(i * kPer + j) / 4];
        if (item + j < args.width) row[item + j] = uint8_t(word >> (j % 4 * 8));
      }
    }
  }
}

template <typename Format>
__device__ void dequantize(const CastArgs& args) {
  using Code = typename Format::Code;
  constexpr int kPer = Format::kPerPiece;
  const int lane = int(threadIdx.x) % kCastLanes;
  const int64_t step = int64_t(gridDim.x) * (kCastThreads / kCastLanes);
  const int64_t first = int64_t(blockIdx.x) * (kCastThreads / kCastLanes);
  const int64_t num_groups = args.num_tokens * args.groups;
  for (int64_t base = first; base < num_groups; base += step) {
    const int64_t number = base + int(threadIdx.x) / kCastLanes;
    if (number >= num_groups) return;
    const Group at = group_of(args, number);
    const uint8_t* const row = offset_by(args.x.data, at.token * args.x.row_stride);
    Code* const to = static_cast<Code*>(args.y) + at.token * args.width;
    const float scale = load_float(args.given, at.token, at.group);
#pragma unroll
    for (int i = 0; i < Pieces<Format>::kCount; ++i) {
      const int64_t item = Pieces<Format>::item(at.group, i, lane);
      if (item >= args.width) break;
      uint32_t codes[kPer / 4] = {};
      if (args.vector) {
        load_codes<Format>(row + item, codes);
      } else {
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          if (item + j < args.width) {
            codes[j / 4] |= uint32_t(row[(item + j) * args.x.item_stride]) << (j % 4 * 8);
          }
        }
      }
      float value[kPer];
#pragma unroll
      for (int j = 0; j < kPer; j += 2) {
        two_floats(codes[j / 4] >> (j % 4 * 8), value + j, value + j + 1);
      }
#pragma unroll
      for (int j = 0; j < kPer; ++j) value[j] = __fmul_rn(value[j], scale);
      if (args.vector) {
        Piece16 piece;
#pragma unroll
        for (int j = 0; j < kPer; ++j) Format::set(&piece, j, value[j]);
        store16(to + item, piece);
        continue;
      }
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if (item + j < args.width) to[item + j] = Format::write(value[j]);
      }
    }
  }
}

}  // namespace

#define EPCOMM_CAST(name, Format)                                       \
  extern "C" __global__ void __launch_bounds__(kCastThreads)            \
      epcomm_quantize_##name(const __grid_constant__ CastArgs args) {   \
    quantize<Format>(args);                                             \
  }                                                                     \
  extern "C" __global__ void __launch_bounds__(kCastThreads)            \
      epcomm_dequantize_##name(const __grid_constant__ CastArgs args) { \
    dequantize<Format>(args);                                           \
  }
EPCOMM_CAST(float32, Float32)
EPCOMM_CAST(float16, Float16)
EPCOMM_CAST(bfloat16, Bfloat16)

extern "C" __global__ void __launch_bounds__(kCastThreads)
    epcomm_convert(const __grid_constant__ ConvertArgs args) {
  const uint64_t step = uint64_t(gridDim.x) * kCastThreads;
  for (uint64_t i = uint64_t(blockIdx.x) * kCastThreads + threadIdx.x; i < args.count; i += step) {
    const uint32_t bits = uint32_t(args.first + i);
    const float value = bits_float(bits);
    float low = 0.0f;
    float high = 0.0f;
    uint32_t result = 0;
    switch (args.which) {
      case kBf16ToFloat:
        result = float_bits(bf16_to_f32(uint16_t(bits)));
        break;
      case kFloatToBf16:
        result = args.instruction ? float_to_bfloat(value) : f32_to_bf16(value);
        break;
      case kF16ToFloat:
        low = args.instruction ? half_to_float(uint16_t(bits)) : f16_to_f32(uint16_t(bits));
        result = float_bits(low);
        break;
      case kFloatToF16:
        result = args.instruction ? float_to_half(value) : f32_to_f16(value);
        break;
      case kE4m3ToFloat:
        two_floats(bits, &low, &high);
        result = float_bits(args.instruction ? low : e4m3_to_f32(uint8_t(bits)));
        break;
      case kFloatToE4m3:
        result = args.instruction ? two_codes(value, 0.0f) : f32_to_e4m3(value);
        break;
      case kGroupScale:
        result = float_bits(group_scale(bits, false));
        break;
      case kGroupScaleRounded:
        result = float_bits(group_scale(bits, true));
        break;
      default:
        result = float_bits(inverse_scale(value));
    }
    args.out[i] = result;
  }
}

}  // namespace epcomm
