// One conclusion from all ranks' entry records, in one text for every engine: each rank reads the
// same records, so all raise the same error or none does.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "epcomm/entry.h"
#include "epcomm/status.hpp"

namespace epcomm {

inline const char* op_name(int64_t op) {
  switch (Op(op)) {
    case Op::kDispatch:
      return "dispatch";
    case Op::kCombine:
      return "combine";
    case Op::kBarrier:
      return "barrier";
    case Op::kNone:
      break;
  }
  return "unknown";
}

// With the name of the argument that decides it.
inline const char* term_name(int term, Op op) {
  if (term == kTermWeights && op == Op::kCombine) return "apply_weights";
  static const char* const names[kNumTerms] = {
      "the call",
      "handle",
      "layout",
      "expert_alignment",
      "capacity",
      "quantize",
      "dtype of x",
      "row of x in bytes",
      "row of scales in bytes",
      "dtype of scales",
      "topk_weights",
      "topk_weights carried back",
      "exact_order",
  };
  return names[term];
}

// A term's value as the user said it. `dtype_names` is what kTermDtype indexes.
inline std::string term_text(int term, Op op, int64_t value,
                             const std::vector<std::string>& dtype_names) {
  const auto dtype = [&] {
    return size_t(value) < dtype_names.size() ? dtype_names[size_t(value)] : "unknown";
  };
  switch (term) {
    case kTermOp:
      return op_name(value);
    case kTermLayout:
      return RowLayout(value) == RowLayout::kRank ? "'rank'" : "'expert'";
    case kTermCapacity:
      return value < 0 ? "None" : std::to_string(value);
    case kTermDtype:
      return dtype();
    case kTermScaleDtype:
      return value < 0 ? "none" : dtype();
    case kTermQuantize:
      return value == 0 ? "None" : value == 1 ? "'fp8'" : "'fp8' with round_scale";
    case kTermWeights:
      if (op == Op::kCombine) return value ? "True" : "False";
      [[fallthrough]];
    case kTermCarried:
      return value ? "given" : "not given";
    case kTermExactOrder:
      return value ? "True" : "False";
    case kTermHandle:
      return value == 0 ? "none" : "of call " + std::to_string(value);
    default:
      return std::to_string(value);
  }
}

// `record(rank)` is that rank's entry record, header and text, in memory of the host. Not ok: the
// protocol itself is broken.
template <class RecordOf>
Status check_epochs(const char* operation, uint64_t epoch, int num_ranks, RecordOf record) {
  for (int peer = 0; peer < num_ranks; ++peer) {
    const EntryHeader& header = record(peer);
    if (header.epoch != epoch) {
      return error(Code::kInternal, peer, "%s: rank %d's entry word is of call %llu, not %llu",
                   operation, peer, (unsigned long long)header.epoch, (unsigned long long)epoch);
    }
  }
  return {};
}

// What all ranks raise, or ok. A refusal breaks nothing, whatever its code.
template <class RecordOf>
Status agree(int num_ranks, const std::vector<std::string>& dtype_names, RecordOf record) {
  for (int peer = 0; peer < num_ranks; ++peer) {
    const EntryHeader& header = record(peer);
    if (header.status == int32_t(Code::kOk)) continue;
    const char* text = reinterpret_cast<const char*>(&header) + kEntryHeaderBytes;
    const uint64_t bytes = std::min<uint64_t>(header.text_bytes, kEntryTextBytes);
    Status status = error(Code(header.status), peer, "rank %d: ", peer);
    status.text.append(text, size_t(bytes));
    return status;
  }
  for (int term = 0; term < kNumTerms; ++term) {
    bool equal = true;
    for (int peer = 0; peer < num_ranks; ++peer)
      equal = equal && record(peer).terms[term] == record(0).terms[term];
    if (equal) continue;
    const Op op = Op(record(0).terms[kTermOp]);  // of all: the first term
    const std::string call = term == kTermOp ? "" : std::string(op_name(int64_t(op))) + ": ";
    Status status = error(Code::kInvalidArgument, -1, "%s%s differs between ranks:", call.c_str(),
                          term_name(term, op));
    constexpr int kListed = 16;
    for (int peer = 0; peer < num_ranks && peer < kListed; ++peer) {
      status.text += (peer ? ", rank " : " rank ") + std::to_string(peer) + " " +
                     term_text(term, op, record(peer).terms[term], dtype_names);
    }
    if (num_ranks > kListed) status.text += ", ...";
    return status;
  }
  return {};
}

// More rows than fit at rank `d`: known to all from the counts.
inline Status too_many_rows(int d, int64_t rows, int64_t max_recv_tokens) {
  return error(
      Code::kInvalidArgument, d,
      "dispatch: rank %d would receive %lld rows, but max_recv_tokens=%lld; raise it, or pass "
      "capacity= in rank layout",
      d, (long long)rows, (long long)max_recv_tokens);
}

// copy=False with every slot leased.
inline Status no_lease_left(int held, int num_slots) {
  return error(Code::kUnsupported, -1,
               "dispatch: copy=False, but %d leases are held and num_slots=%d; drop results, raise "
               "num_slots or let it copy",
               held, num_slots);
}

}  // namespace epcomm
