// Where everything lies in the symmetric heap. The same text for g++, nvcc and NVRTC: fixed-width
// types, no host headers, 64-bit arithmetic throughout (field: heaps pass 2^31 bytes easily).
//
// The heap of every rank has this layout, so one offset names the same thing at each rank:
//
//   control   state words, signals, credits, entry records   (written by peers, small)
//   staging   per channel, only where stores do not reach every peer
//   slots     num_slots + 1 buffers that calls receive in    (written by peers, large)
//
// "+ 1": up to num_slots leases may be held while one slot always remains for the next call.
#pragma once

#include "epcomm/base.h"

namespace epcomm {

// One entry record: header, error text, then the per-rank and per-expert counts.
constexpr uint64_t kEntryTextBytes = 640;

EPCOMM_HD uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// What fixes the layout. Equal on all ranks (creation compares it).
struct HeapShape {
  int32_t num_ranks;
  int32_t num_topk;
  int32_t num_slots;  // leasable slots, as the user said it
  int32_t num_channels;
  int32_t max_local_experts;  // over all ranks
  int64_t max_tokens_per_rank;
  int64_t max_recv_tokens;
  int64_t row_bytes;      // ceil16(hidden * itemsize)
  int64_t scale_bytes;    // room for scales beside each row
  int64_t staging_bytes;  // per channel; 0 where stores reach every peer
};

struct HeapLayout {
  // control area
  uint64_t state;         // [rank] PeerState word, written by that rank
  uint64_t entry_signal;  // [rank] epochs that rank has entered
  uint64_t data_signal;   // [rank][channel] data phases that rank has finished towards us
  uint64_t done_signal;   // [rank] zero-copy combines whose rows that rank has finished reading
  uint64_t credit;        // [rank][slot] last epoch of that rank's slot that it has consumed
  uint64_t entry;         // [rank][epoch & 1] entry records
  uint64_t entry_stride;
  uint64_t staging;  // [channel] rows on their way to peers that stores do not reach; own use
  // slots
  uint64_t slots;  // [physical slot]
  uint64_t slot_stride;
  int64_t slot_rows;      // rows of row_bytes + scale_bytes + metadata that one slot holds
  uint64_t slot_payload;  // in a slot: rows, then scales behind them
  uint64_t slot_idx;      // in a slot: int32 [slot_rows, num_topk]
  uint64_t slot_weights;  // in a slot: float32 [slot_rows, num_topk]
  uint64_t slot_token;    // in a slot: int32 [slot_rows], the row's token at its source
  uint64_t total_bytes;
};

EPCOMM_HD int32_t num_physical_slots(const HeapShape& shape) { return shape.num_slots + 1; }

// Rows a slot must hold: a dispatch receives max_recv_tokens; a combine receives one row per
// (own token, rank that held it); exact-order combine runs in rounds of at least one token.
EPCOMM_HD int64_t slot_rows_needed(const HeapShape& shape) {
  int64_t ranks_per_token = shape.num_ranks < shape.num_topk ? shape.num_ranks : shape.num_topk;
  int64_t combine_rows = shape.max_tokens_per_rank * ranks_per_token;
  int64_t rows = shape.max_recv_tokens > combine_rows ? shape.max_recv_tokens : combine_rows;
  return rows > shape.num_topk ? rows : shape.num_topk;
}

EPCOMM_HD HeapLayout heap_layout(const HeapShape& shape) {
  const uint64_t ranks = uint64_t(shape.num_ranks);
  const uint64_t page = 4096;
  HeapLayout layout{};
  uint64_t at = 0;
  layout.state = at;
  at += ranks * kSignalStride;
  layout.entry_signal = at;
  at += ranks * kSignalStride;
  layout.data_signal = at;
  at += ranks * uint64_t(shape.num_channels) * kSignalStride;
  layout.done_signal = at;
  at += ranks * kSignalStride;
  layout.credit = at;
  at += ranks * uint64_t(num_physical_slots(shape)) * kSignalStride;
  layout.entry = at;
  layout.entry_stride = align_up(
      256 + kEntryTextBytes + 8 * ranks + 8 * uint64_t(shape.max_local_experts), kSignalStride);
  at += ranks * 2 * layout.entry_stride;
  layout.staging = align_up(at, page);
  at = layout.staging + uint64_t(shape.num_channels) * uint64_t(shape.staging_bytes);

  layout.slots = align_up(at, page);
  layout.slot_rows = slot_rows_needed(shape);
  const uint64_t rows = uint64_t(layout.slot_rows);
  uint64_t in = 0;
  layout.slot_payload = in;
  in = align_up(in + rows * uint64_t(shape.row_bytes + shape.scale_bytes) + 64, kSignalStride);
  layout.slot_idx = in;
  in = align_up(in + rows * uint64_t(shape.num_topk) * 4, kSignalStride);
  layout.slot_weights = in;
  in = align_up(in + rows * uint64_t(shape.num_topk) * 4, kSignalStride);
  layout.slot_token = in;
  in += rows * 4;
  layout.slot_stride = align_up(in, page);
  layout.total_bytes = layout.slots + uint64_t(num_physical_slots(shape)) * layout.slot_stride;
  return layout;
}

// Offsets of single words and records. `peer` is the rank that writes them.
EPCOMM_HD uint64_t state_word(const HeapLayout& l, int peer) {
  return l.state + uint64_t(peer) * kSignalStride;
}
EPCOMM_HD uint64_t entry_word(const HeapLayout& l, int peer) {
  return l.entry_signal + uint64_t(peer) * kSignalStride;
}
EPCOMM_HD uint64_t data_word(const HeapLayout& l, const HeapShape& s, int peer, int channel) {
  return l.data_signal +
         (uint64_t(peer) * uint64_t(s.num_channels) + uint64_t(channel)) * kSignalStride;
}
EPCOMM_HD uint64_t done_word(const HeapLayout& l, int peer) {
  return l.done_signal + uint64_t(peer) * kSignalStride;
}
EPCOMM_HD uint64_t credit_word(const HeapLayout& l, const HeapShape& s, int peer, int slot) {
  return l.credit +
         (uint64_t(peer) * uint64_t(num_physical_slots(s)) + uint64_t(slot)) * kSignalStride;
}
EPCOMM_HD uint64_t entry_record(const HeapLayout& l, int peer, uint64_t epoch) {
  return l.entry + (uint64_t(peer) * 2 + (epoch & 1)) * l.entry_stride;
}
EPCOMM_HD uint64_t staging_offset(const HeapLayout& l, const HeapShape& s, int channel) {
  return l.staging + uint64_t(channel) * uint64_t(s.staging_bytes);
}
EPCOMM_HD uint64_t slot_offset(const HeapLayout& l, int slot) {
  return l.slots + uint64_t(slot) * l.slot_stride;
}

}  // namespace epcomm
