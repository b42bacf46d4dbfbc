// What the device engine's host side and its kernels tell each other: plain data, one text for g++
// and NVRTC.
//
// DeviceState lives in device memory and belongs to the kernels: epochs, phases, slot epochs and
// credits are counted there and nowhere else. The host names the slot of a call, since it knows
// which slots leases hold, and reads Report and Errors, which lie in pinned host memory.
#pragma once

#include "epcomm/device/wait.h"
#include "epcomm/entry.h"
#include "epcomm/formats.h"

namespace epcomm::device {

// Sizes of arrays that hold one entry per rank or slot.
constexpr int kMaxRanks = 128;
constexpr int kMaxSlots = 65;

// Tokens of a block of the layout pass; Routing counts them per block.
constexpr int kLayoutTokens = 256;
constexpr int kEnterThreads = 256;
constexpr int kSendWarps = 16;
constexpr int kSendStages = 4;  // at most
constexpr int kReduceWarps = 16;
constexpr int kCollectThreads = 1024;
// Without the copy engine: the shared memory that every block may have.
constexpr int kSendBytesPlain = 47 * 1024;
// Dynamic shared memory of a sending block: one row, or a piece of it, per warp.
constexpr int kSendBytesMax = 227 * 1024 - 1024;

// The rank that `me` reaches in its step-th turn, 0 <= step < ranks: itself, then the next, around
// the ring. In any turn every rank is reached by exactly one other, so that no link is crowded.
EPCOMM_HD int32_t rank_in_turn(int32_t me, int32_t step, int32_t ranks) {
  return step < ranks - me ? me + step : me + step - ranks;
}

enum Fault : int32_t {
  kNoFault = 0,
  kDisagree,     // a rank refused, or terms differ: the entry records say how
  kTooManyRows,  // the counts say which rank
  kWaitFailed,   // `code` says how
  kWasBroken,    // an earlier wait failed, or one of this call's: Errors has it
};

enum Phase : int32_t { kPhaseEntry = 0, kPhaseCredit, kPhaseData, kPhaseDone };

struct FaultWord {
  int32_t fault;
  int32_t phase;
  int32_t op;
  int32_t peer;     // awaited
  int32_t code;     // WaitCode
  int32_t culprit;  // of the wait
  uint64_t epoch;
  uint64_t expected, seen;
  uint64_t waited_ns;
};

// Pinned host memory. `set` and `call` are written last.
struct Errors {
  uint64_t set;
  FaultWord first;
};

struct Report {
  uint64_t call;  // EnterArgs::call that the rest is about
  uint64_t epoch;
  FaultWord fault;
  int64_t recv_rows;
  // int64 rows_of[num_ranks * num_ranks], picks[max_local_experts]
};
constexpr uint64_t kReportRowsOffset = 128;
static_assert(sizeof(Report) <= kReportRowsOffset, "report outgrew its place");

struct DeviceState {
  uint64_t epoch;
  uint64_t data_phases, done_phases;
  uint64_t slot_epoch[kMaxSlots];   // last epoch that used the slot
  uint64_t credit_sent[kMaxSlots];  // what peers' credit words show
  uint64_t bad_pick;                // least token * num_topk + slot of a bad id; ~0: none
  uint32_t broken;                  // nothing moves any more
  uint32_t go;                      // the call in progress was agreed on and may move rows
  uint32_t agreed;                  // it was agreed on, whatever became of it
  uint32_t enter_ticket, send_ticket, reduce_ticket;
  int32_t slot;     // of the call in progress
  uint64_t opened;  // EnterArgs::call of the last call that was opened, whatever became of it
  int32_t peer_slot[kMaxRanks];
  uint64_t peer_rows[kMaxRanks];  // combine: heap offset of each rank's rows
};

// Rows of a caller's array; strides in bytes.
struct Strided {
  const char* data;
  int64_t row_stride, col_stride;
  int64_t row_bytes;  // packed
  int32_t itemsize;
  int32_t packed;  // columns are adjacent
};

// A handle's device memory.
struct RoutingView {
  int32_t* place;        // [num_tokens, num_ranks] place in the block's list for the rank; -1: none
  int32_t* block_base;   // [blocks, num_ranks] where the block's list begins in the rank's
  int32_t* ids;          // [num_tokens, num_topk]
  int64_t* base_to;      // [num_ranks] first row of this rank at each rank
  int64_t* recv_begin;   // [num_ranks + 1] rows from each rank here
  int32_t* local_picks;  // [num_local_experts] picks of own experts, from all ranks
  int32_t* recv_ids;     // [recv_rows, num_topk], once counts are known
  float* recv_weights;   // the same, or null
};

// What is the same in all calls of a communicator.
struct Setup {
  HeapShape shape;
  HeapLayout layout;
  int32_t rank, num_ranks, num_topk, num_experts, num_local_experts;
  int32_t num_slots;  // physical
  DeviceState* state;
  Errors* errors;
  Report* report;
  const int32_t* expert_rank;   // [num_experts]
  const int32_t* expert_local;  // [num_experts]
  int32_t* histogram;           // [num_experts], zero between calls
  const char* text;             // pinned: the reason of a refusal by the host
};

struct EnterArgs {
  Setup setup;
  EntryHeader header;  // epoch, slot_epoch: filled in by the kernel
  uint64_t call;       // its number on this rank, from 1 on
  uint64_t leased[2];  // slots that leases hold: no credit for them
  // Layout pass, if ids is not null.
  const char* ids;
  int64_t ids_token_stride, ids_topk_stride;
  int32_t ids_are_64;
  int32_t counts;                  // this call makes a routing
  int64_t num_tokens, num_blocks;  // blocks of kLayoutTokens tokens
  int64_t max_recv_tokens;
  RoutingView routing;
};

struct SendArgs {
  Setup setup;
  uint64_t call;  // EnterArgs::call
  Strided x, scales;
  const char* weights;  // float32, any strides; null: none
  int64_t weights_token_stride, weights_topk_stride;
  int64_t num_tokens;
  uint64_t row_bytes, scale_bytes, scales_offset;  // in a slot's payload
  RoutingView routing;
  int32_t cached;         // ids and weights are at the receiver already
  int32_t path;           // SendPath
  int32_t buffer_bytes;   // of a warp, or of each of its stages
  int32_t stages;         // kSendBulk: rows that a warp's buffer holds; 0: less than one
  int32_t vector_scales;  // kSendBulk: 16 bytes of scales for each lane of a warp, or fewer
  // Quantising: row_bytes and scale_bytes are those of codes and their scales.
  int32_t row_type;        // of x: 0 float32, 1 float16, 2 bfloat16
  int32_t vector;          // x can be read in 16-byte pieces
  int32_t bulk;            // the copy engine may be used
  int32_t piece_channels;  // what a warp's buffer holds: floats, or codes and scales behind them
  int32_t collects;        // cached: the receiver's small arrays too
};
enum SendPath : int32_t { kSendBulk = 0, kSendVector = 1, kSendElements = 2 };

// Rows that the copy engine loads are quantised where they lie: in the end a buffer has the scales
// of a piece's channels, then its codes from a multiple of 16 bytes on.
EPCOMM_HD int32_t scale_room(int32_t channels) {
  return ((channels + kScaleGroup - 1) / kScaleGroup * 4 + 15) / 16 * 16;
}

struct InPlace {
  int32_t piece_channels, buffer_bytes;
};
// The whole row if it fits into `room` bytes, else pieces that are about equal, of whole steps of
// four groups, so that the scales of each begin at 16 bytes at the receiver too.
EPCOMM_HD InPlace quantize_in_place_plan(int64_t width, int32_t itemsize, int32_t room) {
  const int64_t step = 4 * kScaleGroup;
  int64_t channels = width;
  if (width * itemsize > room || scale_room(int32_t(width)) + width > room) {
    const int64_t most = room / (step * itemsize) * step;
    const int64_t pieces = (width + most - 1) / most;
    channels = ((width + pieces - 1) / pieces + step - 1) / step * step;
  }
  const int64_t floats = channels * itemsize, codes = scale_room(int32_t(channels)) + channels;
  const int64_t bytes = floats > codes ? floats : codes;
  return {int32_t(channels), int32_t((bytes + 15) / 16 * 16)};
}

struct CollectArgs {
  Setup setup;
  RoutingView routing;
  int32_t cached, has_weights;
  int32_t aligned;  // ids and weights allow 16-byte accesses
  int32_t* ids;     // null: not wanted
  float* weights;   // null: not wanted
  int32_t* tokens_per_expert;
  int64_t* num_received;
  int64_t* overflow;
};

struct CarryArgs {
  Setup setup;
  RoutingView routing;
  int64_t recv_rows;
  const char* carried;  // float32 [recv_rows, num_topk], any strides
  int64_t row_stride, topk_stride;
  char* to;  // the own slot's weights
};

struct ReduceArgs {
  Setup setup;
  uint64_t call;  // EnterArgs::call
  RoutingView routing;
  Strided own;  // this rank's rows, all of them, as the caller has them
  int64_t num_tokens, num_cols;
  uint64_t row_bytes;
  const float* bias;    // float32 [num_cols], null: none
  int64_t bias_stride;  // floats between tokens
  char* out;
  int64_t out_stride;
  float* carried_out;  // [num_tokens, num_topk] or null
  int32_t row_type;    // 0 float32, 1 float16, 2 bfloat16
  int32_t aligned;     // own rows, out and bias allow 16-byte accesses
};

struct CopyArgs {
  Strided from;
  char* to;
  int64_t to_stride;
  int64_t num_rows;
  int32_t aligned;
};

}  // namespace epcomm::device
