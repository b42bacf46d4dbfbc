// From rank layout to expert layout and back in device memory: what kernels are given, and the
// sizes of their launches. The same text for g++, which launches them, and NVRTC.
#pragma once

#include "epcomm/layout.h"

namespace epcomm {

// Floats that are read in several formats. Numbers are part of the launch arguments.
enum FloatType : int32_t {
  kNoFloats = 0,
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kFloat64 = 4,
};

// Floats as the caller holds them; a stride is 0 where there is no such dimension.
struct FloatView {
  const void* data;
  int64_t row_stride;
  int64_t item_stride;
  int32_t type;  // FloatType
  int32_t aligned;
};

// A row of items, as bytes. An item is `units` pieces of `unit` bytes, the widest that all
// addresses are multiples of. Where items follow each other the whole row is one item.
struct RowView {
  const void* data;
  int64_t row_stride;
  int64_t item_stride;
  int64_t items;
  int64_t units;
  int32_t unit;  // 1, 2, 4, 8 or 16
};

// The largest of 1, 2, 4, 8, 16 that divides all bits of `ored`, which are addresses and strides.
EPCOMM_HD int32_t common_unit(uint64_t ored) {
  int32_t unit = 16;
  while (unit > 1 && ored % uint64_t(unit) != 0) unit /= 2;
  return unit;
}

constexpr int32_t kPermuteExperts = 8192;  // of one launch; more take several
constexpr int32_t kPermuteTiles = 2048;    // at most, and fewer where there are many experts
constexpr int32_t kScanExperts = 32;       // of one block of the scan
constexpr int32_t kScanThreads = 1024;
constexpr int32_t kRowThreads = 256;

// Counting and placing: a warp takes a tile of picks in order, with a counter for each expert.
struct PermutePlan {
  int32_t tile_picks;
  int32_t num_tiles;
  int32_t warps;  // of a block
  int32_t blocks;
  int32_t shared_bytes;
  int32_t num_passes;   // launches, of kPermuteExperts experts each
  int32_t scan_blocks;  // of kScanThreads threads
  uint64_t tile_counts_offset;
  uint64_t starts_offset;
  uint64_t scratch_bytes;
};

// Memory that the launches of one call share, zeroed before the first. Behind it, at offsets of
// the plan: uint32 [tiles][experts] counts, int64 [experts] first rows.
struct PermuteState {
  uint64_t bad_inverse;
  uint32_t done;
  uint32_t unused;
};

// What the host learns of a call.
struct PermuteResult {
  IdError error;
  int64_t rows;      // with padding; more than capacity if that cuts
  int64_t overflow;  // picks that the capacity leaves out
};

EPCOMM_HD PermutePlan permute_plan(int64_t num_picks, int32_t num_experts) {
  PermutePlan plan{};
  const int64_t experts = num_experts > 0 ? num_experts : 1;
  const int32_t counters = int32_t(experts < kPermuteExperts ? experts : kPermuteExperts);
  // Counts of all tiles in at most 64 MiB, unless two tiles have more: picks of one need 31 bits.
  int64_t tiles = (int64_t(1) << 24) / experts;
  tiles = tiles < 2 ? 2 : tiles > kPermuteTiles ? kPermuteTiles : tiles;
  int64_t picks = (num_picks + tiles - 1) / tiles;
  picks = picks < 256 ? 256 : (picks + 31) / 32 * 32;
  plan.tile_picks = int32_t(picks);
  plan.num_tiles = int32_t((num_picks + picks - 1) / picks);
  if (plan.num_tiles == 0) plan.num_tiles = 1;
  plan.warps = counters <= 2048 ? 4 : 1;
  plan.blocks = (plan.num_tiles + plan.warps - 1) / plan.warps;
  plan.shared_bytes = 4 * counters * plan.warps;
  plan.num_passes = int32_t((experts + kPermuteExperts - 1) / kPermuteExperts);
  plan.scan_blocks = int32_t((experts + kScanExperts - 1) / kScanExperts);
  plan.tile_counts_offset = sizeof(PermuteState);
  plan.starts_offset =
      (plan.tile_counts_offset + 4 * uint64_t(plan.num_tiles) * uint64_t(experts) + 7) / 8 * 8;
  plan.scratch_bytes = plan.starts_offset + 8 * uint64_t(experts);
  return plan;
}

struct PermuteArgs {
  IdView ids;
  FloatView weights;
  int32_t alignment;
  int32_t expert_begin;  // of this pass
  int64_t capacity;      // -1 is none
  int32_t tile_picks;
  int32_t num_tiles;
  PermuteState* state;
  uint32_t* tile_counts;  // [num_tiles, num_experts]; after the scan, counts of tiles before
  int64_t* starts;        // [num_experts]
  PermuteResult* result;
  int32_t* counts;   // [num_experts]
  int32_t* offsets;  // [num_experts + 1]
  int64_t num_rows;  // of the results below
  int32_t* source;   // [num_rows]
  int32_t* expert;   // [num_rows]
  float* weight;     // [num_rows], or null
  int32_t* row_of;   // [num_tokens * num_topk]: a pick's row, -1 where it has none
};

// Rows of a token side by side in a block: as many threads for each as it has pieces to move.
struct RowGrid {
  int32_t lanes;  // threads of a row
  int32_t rows;   // of a block
  int64_t blocks;
};

EPCOMM_HD RowGrid row_grid(int64_t num_rows, int64_t pieces) {
  RowGrid grid{};
  grid.lanes = 32;
  while (grid.lanes < kRowThreads && grid.lanes < pieces) grid.lanes *= 2;
  grid.rows = kRowThreads / grid.lanes;
  grid.blocks = (num_rows + grid.rows - 1) / grid.rows;
  return grid;
}

// Copies each token's row to the rows of its picks.
struct ScatterArgs {
  RowView x;
  void* y;  // rows without gaps
  const int32_t* row_of;
  int64_t num_tokens;
  int32_t num_topk;
};

// Blocks that fill padding: some for each expert's, some for the rows behind the last expert.
constexpr int32_t kTailBlocks = 256;
EPCOMM_HD int32_t fill_splits(int32_t alignment) { return alignment - 1 < 4 ? alignment - 1 : 4; }
EPCOMM_HD int64_t fill_blocks(int32_t num_experts, int32_t alignment, bool tail) {
  return int64_t(num_experts) * fill_splits(alignment) + (tail ? kTailBlocks : 0);
}

struct FillArgs {
  const int32_t* counts;
  const int32_t* offsets;
  int32_t num_experts;
  int32_t alignment;
  int64_t num_rows;
  void* y;
  int64_t row_bytes;
  int32_t unit;  // of row_bytes and the address of y
  int32_t* source;
  int32_t* expert;
  float* weight;  // or null
};

// The way back.
struct InvertArgs {
  const void* source;  // int32 or int64 [num_rows]
  int64_t source_stride;
  int32_t source_is64;
  int32_t source_aligned;
  int64_t num_rows;
  int64_t num_picks;
  int32_t* row_of;    // [num_picks]: -1 before the first launch
  uint64_t* bad_row;  // ~ of the first row that names no pick, or one that an earlier row has; 0
};

struct SumArgs {
  RowView y;
  FloatView weights;  // [rows]; kNoFloats: rows are added as they are
  const int32_t* row_of;
  int64_t num_tokens;
  int32_t num_topk;
  void* z;         // rows without gaps
  int64_t width;   // items
  int32_t vector;  // 16-byte pieces, else items of any address
};

}  // namespace epcomm
