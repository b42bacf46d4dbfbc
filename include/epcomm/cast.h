// Quantising rows in device memory, and the way back: what kernels are given, and the sizes of
// their launches. The same text for g++, which launches them, and NVRTC.
#pragma once

#include "epcomm/formats.h"
#include "epcomm/permute.h"

namespace epcomm {

constexpr int32_t kCastThreads = 256;
constexpr int32_t kCastItems = 8;                         // of a thread
constexpr int32_t kCastLanes = kScaleGroup / kCastItems;  // threads of a group
// Beyond so many blocks each takes several steps.
constexpr int64_t kCastBlocks = int64_t(1) << 20;

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

// Launches have a block for each kCastThreads / kCastLanes groups.
EPCOMM_HD int64_t cast_blocks(int64_t num_tokens, int64_t groups) {
  const int64_t per_block = kCastThreads / kCastLanes;
  const int64_t blocks = (num_tokens * groups + per_block - 1) / per_block;
  return blocks < kCastBlocks ? blocks : kCastBlocks;
}

}  // namespace epcomm
