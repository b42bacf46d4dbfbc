// Quantising rows in device memory, and the way back: what kernels are given, and the sizes of
// their launches. The same text for g++, which launches them, and NVRTC.
#pragma once

#include "epcomm/formats.h"
#include "epcomm/permute.h"

namespace epcomm {

constexpr int32_t kCastThreads = 256;
constexpr int32_t kCastItems = 8;                         // of a thread
constexpr int32_t kCastLanes = kScaleGroup / kCastItems;  // threads of a group
// Beyond so many blocks, about twice what runs at once, each takes several steps.
constexpr int64_t kCastBlocks = 2048;

struct CastArgs {
  RowView x;  // quantize: floats; dequantize: codes
  int64_t num_tokens;
  int64_t width;    // items of a row
  int64_t groups;   // of a row
  void* y;          // quantize: codes; dequantize: floats; no gaps
  float* scales;    // quantize: [num_tokens, groups]
  FloatView given;  // dequantize: scales
  int32_t vector;   // rows of x and y can be moved kCastItems at a time
  int32_t round_scale;
};

// For tests: `out[i]` becomes the bits of a function of formats.h for the bits `first + i`, or of
// the instruction that stands for it in kernels.
enum Conversion : int32_t {
  kBf16ToFloat,
  kFloatToBf16,
  kF16ToFloat,
  kFloatToF16,
  kE4m3ToFloat,
  kFloatToE4m3,
  kGroupScale,
  kGroupScaleRounded,
  kInverseScale,
};
struct ConvertArgs {
  int32_t which;
  int32_t instruction;
  uint64_t first;
  uint64_t count;
  uint32_t* out;
};

// Launches have a block for each kCastThreads / kCastLanes groups.
EPCOMM_HD int64_t cast_blocks(int64_t num_tokens, int64_t groups) {
  const int64_t per_block = kCastThreads / kCastLanes;
  const int64_t blocks = (num_tokens * groups + per_block - 1) / per_block;
  return blocks < kCastBlocks ? blocks : kCastBlocks;
}

}  // namespace epcomm
