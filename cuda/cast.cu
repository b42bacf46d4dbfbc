// fp8 codes with a scale for each group of channels, and the way back. Bits are those of
// epcomm/formats.h; the instructions used for its conversions are tested to equal it for all
// inputs.
#include "epcomm/cast.h"
#include "rows.cuh"

namespace epcomm {
namespace {

#if __CUDA_ARCH__ >= 890
#define EPCOMM_FP8_INSTRUCTIONS 1
#endif

// Two codes, the first one in the low byte.
__device__ uint32_t two_codes(float first, float second) {
#ifdef EPCOMM_FP8_INSTRUCTIONS
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return uint32_t(f32_to_e4m3(first)) | uint32_t(f32_to_e4m3(second)) << 8;
#endif
}

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

// The group a few threads work at: kCastLanes of them, kCastItems items each.
struct Group {
  int64_t token;
  int64_t group;
  int64_t item;  // of this thread, the first
};

__device__ Group group_of(const CastArgs& args, int64_t number, int lane) {
  Group at{};
  at.token = number / args.groups;
  at.group = number - at.token * args.groups;
  at.item = at.group * kScaleGroup + lane * kCastItems;
  return at;
}

template <typename Format>
__device__ void load_items(const CastArgs& args, const Group& at, float* value) {
  using Code = typename Format::Code;
  const uint8_t* const row = offset_by(args.x.data, at.token * args.x.row_stride);
  if (args.vector) {
    constexpr int kPieces = kCastItems / Format::kPerPiece;
    if (at.item < args.width) {
      Piece16 piece[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        piece[i] = load16(row + at.item * int64_t(sizeof(Code)) + i * 16);
      }
#pragma unroll
      for (int i = 0; i < kCastItems; ++i) {
        value[i] = Format::at(piece[i / Format::kPerPiece], i % Format::kPerPiece);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCastItems; ++i) value[i] = 0.0f;
    return;
  }
  const bool aligned = args.x.unit >= int32_t(sizeof(Code));
#pragma unroll
  for (int i = 0; i < kCastItems; ++i) {
    const int64_t item = at.item + i;
    value[i] = item < args.width
                   ? Format::read(load_item<Code>(row + item * args.x.item_stride, aligned))
                   : 0.0f;
  }
}

template <typename Format>
__device__ void quantize(const CastArgs& args) {
  const int lane = int(threadIdx.x) % kCastLanes;
  const int64_t step = int64_t(gridDim.x) * (kCastThreads / kCastLanes);
  const int64_t first = int64_t(blockIdx.x) * (kCastThreads / kCastLanes);
  const int64_t num_groups = args.num_tokens * args.groups;
  for (int64_t base = first; base < num_groups; base += step) {
    const int64_t number = base + int(threadIdx.x) / kCastLanes;
    const bool inside = number < num_groups;  // the warp stays together for the shuffles
    const Group at = group_of(args, inside ? number : 0, lane);
    float value[kCastItems];
    load_items<Format>(args, at, value);
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kCastItems; ++i) amax = max(amax, finite_magnitude(value[i]));
#pragma unroll
    for (int far = kCastLanes / 2; far > 0; far /= 2) {
      amax = max(amax, __shfl_xor_sync(~0u, amax, far));
    }
    const float scale = group_scale(amax, args.round_scale);
    const float inverse = inverse_scale(scale);
    if (!inside) continue;
    if (lane == 0) args.scales[number] = scale;
    uint32_t codes[kCastItems / 4];
#pragma unroll
    for (int i = 0; i < kCastItems / 4; ++i) {
      codes[i] =
          two_codes(__fmul_rn(value[4 * i], inverse), __fmul_rn(value[4 * i + 1], inverse)) |
          two_codes(__fmul_rn(value[4 * i + 2], inverse), __fmul_rn(value[4 * i + 3], inverse))
              << 16;
    }
    uint8_t* const to = static_cast<uint8_t*>(args.y) + at.token * args.width + at.item;
    if (args.vector) {
      if (at.item < args.width) *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kCastItems; ++i) {
      if (at.item + i < args.width) to[i] = uint8_t(codes[i / 4] >> (i % 4 * 8));
    }
  }
}

template <typename Format>
__device__ void dequantize(const CastArgs& args) {
  using Code = typename Format::Code;
  const int lane = int(threadIdx.x) % kCastLanes;
  const int64_t step = int64_t(gridDim.x) * (kCastThreads / kCastLanes);
  const int64_t first = int64_t(blockIdx.x) * (kCastThreads / kCastLanes);
  const int64_t num_groups = args.num_tokens * args.groups;
  for (int64_t base = first; base < num_groups; base += step) {
    const int64_t number = base + int(threadIdx.x) / kCastLanes;
    if (number >= num_groups) return;
    const Group at = group_of(args, number, lane);
    if (at.item >= args.width) continue;
    const uint8_t* const row = offset_by(args.x.data, at.token * args.x.row_stride);
    uint32_t codes[kCastItems / 4] = {};
    if (args.vector) {
      const uint2 word = *reinterpret_cast<const uint2*>(row + at.item);
      codes[0] = word.x;
      codes[1] = word.y;
    } else {
#pragma unroll
      for (int i = 0; i < kCastItems; ++i) {
        if (at.item + i < args.width) {
          codes[i / 4] |= uint32_t(row[(at.item + i) * args.x.item_stride]) << (i % 4 * 8);
        }
      }
    }
    const float scale = load_float(args.given, at.token, at.group);
    float value[kCastItems];
#pragma unroll
    for (int i = 0; i < kCastItems; i += 2) {
      two_floats(codes[i / 4] >> (i % 4 * 8), value + i, value + i + 1);
    }
#pragma unroll
    for (int i = 0; i < kCastItems; ++i) value[i] = __fmul_rn(value[i], scale);
    Code* const to = static_cast<Code*>(args.y) + at.token * args.width + at.item;
    if (args.vector) {
#pragma unroll
      for (int i = 0; i < kCastItems / Format::kPerPiece; ++i) {
        Piece16 piece;
#pragma unroll
        for (int j = 0; j < Format::kPerPiece; ++j) {
          Format::set(&piece, j, value[i * Format::kPerPiece + j]);
        }
        store16(to + i * Format::kPerPiece, piece);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kCastItems; ++i) {
      if (at.item + i < args.width) to[i] = Format::write(value[i]);
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

// For tests: bits of formats.h's function `which` for each bits of its argument, from `first` on;
// with `hardware` of the instruction that stands for it here.
extern "C" __global__ void __launch_bounds__(kCastThreads)
    epcomm_convert(uint32_t which, uint32_t hardware, uint64_t first, uint64_t count,
                   uint32_t* out) {
  const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint32_t bits = uint32_t(first + i);
    float low, high;
    switch (which) {
      case 0:
        out[i] = float_bits(bf16_to_f32(uint16_t(bits)));
        break;
      case 1:
        out[i] = hardware ? float_to_bfloat(bits_float(bits)) : f32_to_bf16(bits_float(bits));
        break;
      case 2:
        out[i] = float_bits(hardware ? half_to_float(uint16_t(bits)) : f16_to_f32(uint16_t(bits)));
        break;
      case 3:
        out[i] = hardware ? float_to_half(bits_float(bits)) : f32_to_f16(bits_float(bits));
        break;
      case 4:
        two_floats(bits, &low, &high);
        out[i] = float_bits(hardware ? low : e4m3_to_f32(uint8_t(bits)));
        break;
      case 5:
        out[i] = hardware ? two_codes(bits_float(bits), 0.0f) : f32_to_e4m3(bits_float(bits));
        break;
      case 8:
        out[i] = float_bits(group_scale(bits, false));
        break;
      case 9:
        out[i] = float_bits(group_scale(bits, true));
        break;
      default:
        out[i] = float_bits(inverse_scale(bits_float(bits)));
    }
  }
}

}  // namespace epcomm
