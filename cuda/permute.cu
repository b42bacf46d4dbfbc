// Rank layout to expert layout.
//
// Rows are grouped by a stable counting sort: warps count the picks of their tiles by expert, a
// scan turns the counts into first rows, warps walk their tiles again in order and know each
// pick's row. Nothing depends on which warp comes first.
#include "epcomm/permute.h"
#include "memory.cuh"
#include "rows.cuh"

namespace epcomm {
namespace {

// What a warp does with its tile: picks of this pass's experts, 32 at a time.
struct Tile {
  int64_t begin;
  int64_t end;
  int32_t number;
};

__device__ Tile tile_of_warp(const PermuteArgs& args) {
  Tile tile{};
  tile.number = int32_t(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const int64_t num_picks = args.ids.num_tokens * args.ids.num_topk;
  tile.begin = min(int64_t(tile.number) * args.tile_picks, num_picks);
  tile.end = min(tile.begin + args.tile_picks, num_picks);
  return tile;
}

__device__ int32_t expert_of_pick(const PermuteArgs& args, int64_t pick) {
  const uint32_t token = uint32_t(pick) / uint32_t(args.ids.num_topk);
  const uint32_t slot = uint32_t(pick) - token * uint32_t(args.ids.num_topk);
  return read_id(args.ids, token, int32_t(slot), &args.state->bad_inverse);
}

// Experts of a lane's next picks, all on their way at once; -1 behind the tile.
constexpr int kRounds = 8;
__device__ void read_rounds(const PermuteArgs& args, const Tile& tile, int64_t pick,
                            int32_t* expert) {
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    expert[i] = pick + 32 * i < tile.end ? expert_of_pick(args, pick + 32 * i) : -1;
  }
}

__device__ int32_t experts_of_pass(const PermuteArgs& args) {
  return min(args.ids.num_experts - args.expert_begin, kPermuteExperts);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    epcomm_permute_count(const __grid_constant__ PermuteArgs args) {
  extern __shared__ uint32_t counters[];
  const int lane = int(threadIdx.x % 32);
  const int32_t experts = experts_of_pass(args);
  const Tile tile = tile_of_warp(args);
  if (tile.number >= args.num_tiles) return;
  uint32_t* const counts = counters + int32_t(threadIdx.x / 32) * experts;
  for (int32_t e = lane; e < experts; e += 32) counts[e] = 0;
  __syncwarp();
  for (int64_t first = tile.begin; first < tile.end; first += 32 * kRounds) {
    int32_t expert[kRounds];
    read_rounds(args, tile, first + lane, expert);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int32_t local = expert[i] - args.expert_begin;
      if (local >= 0 && local < experts) atomicAdd(counts + local, 1u);
    }
  }
  __syncwarp();
  uint32_t* const to = args.tile_counts + int64_t(tile.number) * args.ids.num_experts;
  for (int32_t e = lane; e < experts; e += 32) to[args.expert_begin + e] = counts[e];
}

namespace {

// Sum of the values of this thread and those before it in a block of kScanThreads; the total too.
__device__ int64_t block_prefix(int64_t value, int64_t* shared, int64_t* total) {
  static_assert(kScanThreads == 32 * 32, "a warp adds up what the warps have");
  const int lane = int(threadIdx.x) % 32;
  const int warp = int(threadIdx.x) / 32;
  int64_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  int64_t warps = shared[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t before = __shfl_up_sync(~0u, warps, step);
    if (lane >= step) warps += before;
  }
  *total = __shfl_sync(~0u, warps, 31);
  const int64_t before = __shfl_sync(~0u, warps, warp > 0 ? warp - 1 : 0);
  __syncthreads();  // before anyone writes to `shared` again
  return sum + (warp > 0 ? before : 0);
}

}  // namespace

// Each block: some experts, over all tiles. The last block: first rows of all experts.
extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    epcomm_permute_scan(const __grid_constant__ PermuteArgs args) {
  constexpr int kParts = kScanThreads / kScanExperts;
  __shared__ uint32_t sums[kParts][kScanExperts];
  __shared__ int64_t scanned[32];
  const int column = int(threadIdx.x) % kScanExperts;
  const int part = int(threadIdx.x) / kScanExperts;
  const int32_t num_experts = args.ids.num_experts;
  const int32_t expert = int32_t(blockIdx.x) * kScanExperts + column;
  const int32_t share = (args.num_tiles + kParts - 1) / kParts;
  const int32_t begin = min(part * share, args.num_tiles);
  const int32_t end = min(begin + share, args.num_tiles);
  uint32_t sum = 0;
  if (expert < num_experts) {
#pragma unroll 8
    for (int32_t tile = begin; tile < end; ++tile) {
      sum += args.tile_counts[int64_t(tile) * num_experts + expert];
    }
  }
  sums[part][column] = sum;
  __syncthreads();
  uint32_t before = 0;
  uint32_t total = 0;
#pragma unroll
  for (int other = 0; other < kParts; ++other) {
    before += other < part ? sums[other][column] : 0;
    total += sums[other][column];
  }
  if (expert < num_experts) {
    for (int32_t tile = begin; tile < end; ++tile) {
      uint32_t* const at = args.tile_counts + int64_t(tile) * num_experts + expert;
      const uint32_t count = *at;
      *at = before;
      before += count;
    }
    if (part == 0) args.counts[expert] = int32_t(total);
  }
  if (!last_block(&args.state->done, gridDim.x)) return;

  const int thread = int(threadIdx.x);
  const int64_t limit = args.capacity >= 0 ? args.capacity : int64_t(0x7fffffff);
  int64_t rows = 0;
  int64_t overflow = 0;
  for (int32_t first = 0; first < num_experts; first += kScanThreads) {
    const int32_t e = first + thread;
    const int64_t count = e < num_experts ? int64_t(__ldcg(args.counts + e)) : 0;
    const int64_t padded = (count + args.alignment - 1) / args.alignment * args.alignment;
    int64_t total;
    const int64_t start = rows + block_prefix(padded, scanned, &total) - padded;
    rows += total;
    if (e < num_experts) {
      const int64_t kept = args.capacity < 0 ? count : max(min(count, args.capacity - start), 0ll);
      args.starts[e] = start;
      args.counts[e] = int32_t(kept);
      args.offsets[e] = int32_t(min(start, limit));
      overflow += count - kept;
    }
  }
  int64_t left_out;
  block_prefix(overflow, scanned, &left_out);
  if (thread == 0) {
    args.offsets[num_experts] = int32_t(min(rows, limit));
    args.result->error = id_error(args.ids, __ldcg(&args.state->bad_inverse));
    args.result->rows = rows;
    args.result->overflow = left_out;
  }
}

extern "C" __global__ void __launch_bounds__(128)
    epcomm_permute_place(const __grid_constant__ PermuteArgs args) {
  extern __shared__ uint32_t counters[];
  const int lane = int(threadIdx.x % 32);
  const int32_t experts = experts_of_pass(args);
  const Tile tile = tile_of_warp(args);
  if (tile.number >= args.num_tiles) return;
  uint32_t* const next = counters + int32_t(threadIdx.x / 32) * experts;
  const uint32_t* const before = args.tile_counts + int64_t(tile.number) * args.ids.num_experts;
#pragma unroll 4
  for (int32_t e = lane; e < experts; e += 32) {
    // Rows behind 2^31 are behind every capacity: any number from there on says so.
    const int64_t row = args.starts[args.expert_begin + e] + before[args.expert_begin + e];
    next[e] = uint32_t(min(row, int64_t(1) << 31));
  }
  __syncwarp();
  for (int64_t first = tile.begin; first < tile.end; first += 32 * kRounds) {
    int32_t experts_of_lane[kRounds];
    float weights[kRounds];
    read_rounds(args, tile, first + lane, experts_of_lane);
    if (args.weight != nullptr) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const uint32_t pick = uint32_t(first + 32 * i + lane);
        const uint32_t token = pick / uint32_t(args.ids.num_topk);
        const uint32_t slot = pick - token * uint32_t(args.ids.num_topk);
        weights[i] = experts_of_lane[i] >= 0 ? load_float(args.weights, token, slot) : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int64_t pick = first + 32 * i + lane;
      const int32_t expert = experts_of_lane[i];
      const int32_t local = expert - args.expert_begin;
      const bool here = expert >= 0 && local >= 0 && local < experts;
      const uint32_t same = __match_any_sync(~0u, here ? local : -1);
      const int64_t row = here ? int64_t(next[local]) + __popc(same & ((1u << lane) - 1)) : 0;
      __syncwarp();
      if (here && __ffs(int(same)) - 1 == lane) next[local] += uint32_t(__popc(same));
      __syncwarp();
      if (here && row < args.num_rows) {
        args.row_of[pick] = int32_t(row);
        args.source[row] = int32_t(pick);
        args.expert[row] = expert;
        if (args.weight != nullptr) args.weight[row] = weights[i];
      } else if (pick < tile.end && (here || (expert < 0 && args.expert_begin == 0))) {
        args.row_of[pick] = -1;
      }
    }
  }
}

namespace {

// One token's row to all its places, in pieces of one width; the row may have gaps.
template <typename Piece>
__device__ void scatter_row(const ScatterArgs& args, int64_t token, int lane, int first_piece,
                            int step) {
  const uint8_t* const from = offset_by(args.x.data, token * args.x.row_stride);
  const int64_t pieces = args.x.items * args.x.units;
  const int64_t rounds = (pieces + step - 1) / step;
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t piece = round * step + first_piece;
    const bool inside = piece < pieces;
    Piece value{};
    if (inside) {
      const int64_t item = args.x.items == 1 ? 0 : piece / args.x.units;
      value = *reinterpret_cast<const Piece*>(from + item * args.x.item_stride +
                                              (piece - item * args.x.units) * sizeof(Piece));
    }
    for (int32_t slots = 0; slots < args.num_topk; slots += 32) {
      int32_t row;
      uint32_t left = rows_of_token(args.row_of, token, args.num_topk, slots, lane, &row);
      for (; left != 0; left &= left - 1) {
        const int64_t to = __shfl_sync(~0u, row, __ffs(int(left)) - 1);
        if (inside) static_cast<Piece*>(args.y)[to * pieces + piece] = value;
      }
    }
  }
}

}  // namespace

// blockDim.x threads for each of blockDim.y tokens.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    epcomm_permute_rows(const __grid_constant__ ScatterArgs args) {
  constexpr int kUnroll = 4;
  const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= args.num_tokens) return;  // whole warps
  const int lane = int(threadIdx.x % 32);
  const uint8_t* const from = offset_by(args.x.data, token * args.x.row_stride);
  uint8_t* const to = static_cast<uint8_t*>(args.y);
  const int64_t pieces = args.x.units;
  const int64_t row_bytes = pieces * 16;
  int32_t row;
  uint32_t rows = rows_of_token(args.row_of, token, args.num_topk, 0, lane, &row);
  if (rows == 0 && args.num_topk <= 32) return;
  // Every thread of a warp takes each step, since rows pass between lanes.
  for (int64_t first = 0; first < pieces; first += int64_t(blockDim.x) * kUnroll) {
    Piece16 value[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t piece = first + i * int64_t(blockDim.x) + threadIdx.x;
      if (piece < pieces) value[i] = load16(from + piece * 16);
    }
    for (int32_t slots = 0; slots < args.num_topk; slots += 32) {
      if (args.num_topk > 32) {
        rows = rows_of_token(args.row_of, token, args.num_topk, slots, lane, &row);
      }
      for (uint32_t left = rows; left != 0; left &= left - 1) {
        const int64_t there = __shfl_sync(~0u, row, __ffs(int(left)) - 1);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int64_t piece = first + i * int64_t(blockDim.x) + threadIdx.x;
          if (piece < pieces) store16(to + there * row_bytes + piece * 16, value[i]);
        }
      }
    }
  }
}

// Rows of any width and any gaps.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    epcomm_permute_rows_any(const __grid_constant__ ScatterArgs args) {
  const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= args.num_tokens) return;
  const int lane = int(threadIdx.x % 32);
  const int first = int(threadIdx.x);
  const int step = int(blockDim.x);
  switch (args.x.unit) {
    case 16:
      return scatter_row<uint4>(args, token, lane, first, step);
    case 8:
      return scatter_row<uint64_t>(args, token, lane, first, step);
    case 4:
      return scatter_row<uint32_t>(args, token, lane, first, step);
    case 2:
      return scatter_row<uint16_t>(args, token, lane, first, step);
    default:
      return scatter_row<uint8_t>(args, token, lane, first, step);
  }
}

namespace {

template <typename Piece>
__device__ void zero_row(const FillArgs& args, int64_t row) {
  const int64_t pieces = args.row_bytes / int64_t(sizeof(Piece));
  Piece* const to = static_cast<Piece*>(args.y) + row * pieces;
  for (int64_t i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = Piece{};
}

}  // namespace

// Padding: zero rows, no pick, no expert, weight 0.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    epcomm_permute_fill(const __grid_constant__ FillArgs args) {
  const int32_t splits = fill_splits(args.alignment);
  const int64_t experts_blocks = int64_t(args.num_experts) * splits;
  int64_t begin, end, step;
  if (int64_t(blockIdx.x) < experts_blocks) {
    const int32_t expert = int32_t(blockIdx.x) / splits;
    step = splits;
    begin = int64_t(args.offsets[expert]) + args.counts[expert] + int32_t(blockIdx.x) % splits;
    end = args.offsets[expert + 1];
  } else {
    step = kTailBlocks;
    begin = args.offsets[args.num_experts] + (int64_t(blockIdx.x) - experts_blocks);
    end = args.num_rows;
  }
  for (int64_t row = begin; row < end; row += step) {
    if (threadIdx.x == 0) {
      args.source[row] = -1;
      args.expert[row] = -1;
      if (args.weight != nullptr) args.weight[row] = 0.0f;
    }
    switch (args.unit) {
      case 16:
        zero_row<uint4>(args, row);
        break;
      case 8:
        zero_row<uint64_t>(args, row);
        break;
      case 4:
        zero_row<uint32_t>(args, row);
        break;
      case 2:
        zero_row<uint16_t>(args, row);
        break;
      default:
        zero_row<uint8_t>(args, row);
    }
  }
}

}  // namespace epcomm
