// The entry word: what a rank tells every peer when it enters a call. One record per (peer, epoch
// parity); two suffice, because a rank enters epoch n+2 only after every peer entered n+1, which
// each does only after it has read the records of epoch n (proof: README.md beside this file).
//
// A record is: EntryHeader, kEntryTextBytes of error text, int64 rows_to[num_ranks] (rows this rank
// sends to each rank), int64 picks_of[max_local_experts] (its picks of the reader's experts).
#pragma once

#include "epcomm/heap.h"

namespace epcomm {

enum class Op : int32_t { kNone = 0, kDispatch = 1, kCombine = 2, kBarrier = 3 };
enum class RowLayout : int32_t { kRank = 0, kExpert = 1 };

// What must be equal on all ranks in one call. A difference is one error that lists each rank's
// value; nothing moves.
enum Term : int32_t {
  kTermOp = 0,
  kTermHandle,  // generation of the handle, 0: none; before what follows from it
  kTermLayout,
  kTermAlignment,
  kTermCapacity,  // -1: none
  kTermQuantize,  // 0 none, 1 fp8, 2 fp8 with scales rounded up; before what follows from it
  kTermDtype,     // index into the engine's dtype names
  kTermRowBytes,
  kTermScaleBytes,
  kTermScaleDtype,  // -1: none
  kTermWeights,     // dispatch: given; combine: multiplied
  kTermCarried,     // combine: topk_weights carried back
  kTermExactOrder,
  kNumTerms,
};

struct EntryHeader {
  uint64_t epoch;
  int32_t status;       // Code; not kOk: this rank refuses, and the text says why
  int32_t slot;         // where this rank receives in this call
  uint64_t slot_epoch;  // the slot's last epoch: senders wait for its credit word to show it
  int64_t num_tokens;
  uint64_t zero_copy;  // combine: heap offset of this rank's rows for its peers to read; 0: pushed
  uint32_t text_bytes;
  int32_t reserved;
  int64_t terms[kNumTerms];
};

constexpr uint64_t kEntryHeaderBytes = 256;
static_assert(sizeof(EntryHeader) <= kEntryHeaderBytes, "entry header outgrew its place");

constexpr uint64_t kEntryRowsOffset = kEntryHeaderBytes + kEntryTextBytes;

EPCOMM_HD uint64_t entry_picks_offset(int32_t num_ranks) {
  return kEntryRowsOffset + 8 * uint64_t(num_ranks);
}
EPCOMM_HD uint64_t entry_record_bytes(int32_t num_ranks, int32_t max_local_experts) {
  return entry_picks_offset(num_ranks) + 8 * uint64_t(max_local_experts);
}

}  // namespace epcomm
