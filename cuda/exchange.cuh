// What opens every call of the device engine: this rank's entry word to every peer, everybody's
// entry words read and compared, credits, and a report to the host. One block does it.
//
// The unit puts a policy in front and names it EPCOMM_WIRE (include/epcomm/device/ops.cuh).
#pragma once

#include "epcomm/device/engine.h"
#include "epcomm/device/ops.cuh"

namespace epcomm::device {

using Wire = EPCOMM_WIRE;

constexpr unsigned kFullWarp = 0xffffffffu;

// The policy with its context in hand. All signals go on one channel; threads that signal one peer
// at the same time do it to different words. A policy with queues needs a channel for each of them.
struct Link {
  const Wire::Ctx& ctx;
  int rank;
  __device__ char* peer_ptr(int peer, uint64_t offset) const {
    return static_cast<char*>(Wire::peer_ptr(ctx, peer, offset));
  }
  __device__ char* heap() const { return peer_ptr(rank, 0); }
  __device__ void signal(int peer, uint64_t word, uint64_t add) const {
    Wire::signal(ctx, peer, 0, word, add);
  }
};

// The kernel behind this one in the stream, where it was launched so, may begin once every block
// has come here or ended; this one's end is then no longer its beginning.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The kernel before this one in the stream has ended.
__device__ inline void wait_for_last() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void publish(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// ---- faults

// The first fault of this rank goes to the host, and nothing moves from here on.
__device__ inline void raise_fault(const Setup& setup, const FaultWord& fault) {
  if (atomicExch(&setup.state->broken, 1u) != 0) return;
  setup.errors->first = fault;
  __threadfence_system();
  publish(&setup.errors->set, uint64_t(1));
}

// One thread waits for a word of its own heap that `peer` writes.
__device__ inline bool wait_word(const Link& link, int peer, uint64_t word, uint64_t value,
                                 Phase phase, FaultWord* fault) {
  WaitInfo info;
  const WaitCode code = Wire::wait(link.ctx, peer, word, value, 0, &info);
  if (code == kWaitDone) return true;
  fault->fault = kWaitFailed;
  fault->phase = phase;
  fault->peer = peer;
  fault->code = code;
  fault->culprit = info.culprit;
  fault->expected = value;
  fault->seen = info.seen;
  fault->waited_ns = info.waited_ns;
  return false;
}

// The whole block: thread p waits for peer p's word. The first peer's fault is kept in *fault
// (shared memory); false for all threads if any wait failed.
template <typename WordOf>
__device__ inline bool wait_all(const Setup& setup, const Link& link, uint64_t value, Phase phase,
                                FaultWord* fault, WordOf word_of) {
  FaultWord mine{};
  bool good = true;
  __shared__ int first;
  if (threadIdx.x == 0) first = kMaxRanks;
  __syncthreads();
  const int peer = int(threadIdx.x);
  if (peer < setup.num_ranks && peer != setup.rank) {
    good = wait_word(link, peer, word_of(peer), value, phase, &mine);
    if (!good) atomicMin(&first, peer);
  }
  const int failed = __syncthreads_or(!good);
  if (failed && !good && first == peer) *fault = mine;
  __syncthreads();
  return !failed;
}

// ---- text of a refusal that only the kernel knows

struct Text {
  char* at;
  int used;
  __device__ void put(const char* text) {
    while (*text && used < int(kEntryTextBytes)) at[used++] = *text++;
  }
  __device__ void put(long long value) {
    char digits[24];
    int count = 0;
    unsigned long long rest =
        value < 0 ? 0ull - (unsigned long long)value : (unsigned long long)value;
    do {
      digits[count++] = char('0' + int(rest % 10));
      rest /= 10;
    } while (rest);
    if (value < 0) digits[count++] = '-';
    while (count && used < int(kEntryTextBytes)) at[used++] = digits[--count];
  }
};

// ---- the layout pass

__device__ inline long long id_at(const EnterArgs& a, int64_t token, int k) {
  const char* at = a.ids + token * a.ids_token_stride + int64_t(k) * a.ids_topk_stride;
  return a.ids_are_64 ? *reinterpret_cast<const long long*>(at)
                      : (long long)*reinterpret_cast<const int*>(at);
}

// Picks of each expert so far, in shared memory where they fit: most blocks meet every expert.
constexpr int kSharedExperts = 1024;
struct Histogram {
  int count[kSharedExperts];
};

// Each token's place in the list of every rank that it goes to, counted inside the block.
__device__ inline void layout_block(const EnterArgs& a, int64_t block, Histogram& histogram) {
  const Setup& s = a.setup;
  __shared__ int warp_count[kEnterThreads / 32][kMaxRanks];
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  const int64_t token = block * kLayoutTokens + threadIdx.x;
  int32_t* const counts = s.num_experts <= kSharedExperts ? histogram.count : s.histogram;
  uint64_t low = 0, high = 0;  // ranks of this token
  if (token < a.num_tokens) {
    constexpr int kAtOnce = 8;  // ids on their way together
    for (int first = 0; first < s.num_topk; first += kAtOnce) {
      long long ids[kAtOnce];
      int owner[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        ids[i] = first + i < s.num_topk ? id_at(a, token, first + i) : -1;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        owner[i] = ids[i] >= 0 && ids[i] < s.num_experts ? __ldg(s.expert_rank + ids[i]) : -1;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= s.num_topk) break;
        const int64_t pick = token * s.num_topk + first + i;
        if (owner[i] >= 0) {
          if (owner[i] < 64)
            low |= uint64_t(1) << owner[i];
          else
            high |= uint64_t(1) << (owner[i] - 64);
          atomicAdd(counts + ids[i], 1);
        } else if (ids[i] != -1) {
          atomicMin(reinterpret_cast<unsigned long long*>(&s.state->bad_pick),
                    (unsigned long long)pick);
        }
        a.routing.ids[pick] = owner[i] >= 0 ? int32_t(ids[i]) : -1;
      }
    }
  }
  const auto goes = [&](int rank) {
    return ((rank < 64 ? low >> rank : high >> (rank - 64)) & 1) != 0;
  };
  for (int rank = 0; rank < s.num_ranks; ++rank) {
    const unsigned votes = __ballot_sync(kFullWarp, goes(rank));
    if (lane == 0) warp_count[warp][rank] = __popc(votes);
  }
  __syncthreads();
  for (int rank = int(threadIdx.x); rank < s.num_ranks; rank += kEnterThreads) {
    int total = 0;
    for (int w = 0; w < kEnterThreads / 32; ++w) {
      const int count = warp_count[w][rank];
      warp_count[w][rank] = total;
      total += count;
    }
    a.routing.block_base[block * s.num_ranks + rank] = total;
  }
  __syncthreads();
  for (int rank = 0; rank < s.num_ranks; ++rank) {
    const bool mine = goes(rank);
    const unsigned votes = __ballot_sync(kFullWarp, mine);
    const int before = __popc(votes & ((1u << lane) - 1u));
    if (token < a.num_tokens)
      a.routing.place[token * s.num_ranks + rank] = mine ? warp_count[warp][rank] + before : -1;
  }
  __syncthreads();  // before the next block counts
}

// The last block: counts per block become begins; totals[rank] (shared memory).
__device__ inline void scan_blocks(const EnterArgs& a, int64_t num_blocks, int64_t* totals) {
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  for (int rank = warp; rank < a.setup.num_ranks; rank += kEnterThreads / 32) {
    int before = 0;
    for (int64_t first = 0; first < num_blocks; first += 32) {
      const int64_t block = first + lane;
      int32_t* at = a.routing.block_base + block * a.setup.num_ranks + rank;
      const int count = block < num_blocks ? __ldcg(at) : 0;
      int sum = count;
      for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += left;
      }
      if (block < num_blocks) *at = before + sum - count;
      before += __shfl_sync(kFullWarp, sum, 31);
    }
    if (lane == 0) totals[rank] = before;
  }
}

// ---- one epoch's agreement

__device__ inline const EntryHeader* record_of(const Setup& s, const Link& link, int peer,
                                               uint64_t epoch) {
  return reinterpret_cast<const EntryHeader*>(link.heap() + entry_record(s.layout, peer, epoch));
}
__device__ inline const int64_t* record_rows(const EntryHeader* header) {
  return reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(header) + kEntryRowsOffset);
}
__device__ inline const int64_t* record_picks(const EntryHeader* header, int num_ranks) {
  return reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(header) +
                                          entry_picks_offset(num_ranks));
}

struct EnterShared {
  EntryHeader header;
  char text[kEntryTextBytes];
  FaultWord fault;
  int64_t totals[kMaxRanks];
  int first_bad;
};

// Whether rows may move: state->go; why not: sh.fault. A whole block.
__device__ inline void agree(const EnterArgs& a, const Link& link, EnterShared& sh) {
  const Setup& s = a.setup;
  DeviceState* state = s.state;
  const int me = s.rank, ranks = s.num_ranks, tid = int(threadIdx.x), threads = int(blockDim.x);
  const uint64_t epoch = state->epoch + 1;
  const int slot = a.header.slot;
  const bool was_broken = state->broken != 0;
  const uint64_t bad_pick = state->bad_pick;
  const uint64_t slot_epoch = slot >= 0 ? state->slot_epoch[slot] : 0;
  // Credit for slot i / ranks that peer i % ranks is to be shown. Everything that this block must
  // know is on its way at once.
  const int num_credits = s.num_slots * ranks;
  const auto leased = [&](int which) { return ((a.leased[which >> 6] >> (which & 63)) & 1) != 0; };
  const auto owed = [&](int i) -> uint64_t {
    if (i >= num_credits || i % ranks == me || leased(i / ranks)) return 0;
    return state->slot_epoch[i / ranks] - state->credit_sent[i / ranks];
  };
  const uint64_t first_owed = owed(tid);
  __syncthreads();
  if (tid == 0) {
    state->epoch = epoch;
    state->go = 0;
    state->agreed = 0;
    state->slot = slot;
    state->bad_pick = ~uint64_t(0);
    sh.fault = FaultWord{};
    sh.fault.epoch = epoch;
    sh.fault.peer = -1;
    sh.fault.op = int32_t(a.header.terms[kTermOp]);
    sh.first_bad = kMaxRanks;
    if (was_broken) sh.fault.fault = kWasBroken;
    EntryHeader& h = sh.header;
    h = a.header;
    h.epoch = epoch;
    h.slot_epoch = slot_epoch;
    if (a.counts && bad_pick != ~uint64_t(0) && h.status == 0) {
      const int64_t token = int64_t(bad_pick) / s.num_topk;
      const int k = int(int64_t(bad_pick) % s.num_topk);
      Text text{sh.text, 0};
      text.put("dispatch: topk_idx[");
      text.put((long long)token);
      text.put(", ");
      text.put((long long)k);
      text.put("] is ");
      text.put(id_at(a, token, k));
      text.put("; allowed: -1 or 0 to ");
      text.put((long long)(s.num_experts - 1));
      h.status = 1;  // Code::kInvalidArgument
      h.text_bytes = uint32_t(text.used);
    }
  }
  if (a.header.status != 0) {
    for (int i = tid; i < int(a.header.text_bytes); i += threads) sh.text[i] = s.text[i];
  }
  __syncthreads();
  if (was_broken) return;

  // The record, to everybody and to the own heap.
  for (int i = 0; i < ranks; ++i) {
    const int peer = rank_in_turn(me, i, ranks);
    char* to = link.peer_ptr(peer, entry_record(s.layout, me, epoch));
    int64_t* words = reinterpret_cast<int64_t*>(to);
    const int64_t* header = reinterpret_cast<const int64_t*>(&sh.header);
    for (int w = tid; w < int(sizeof(EntryHeader) / 8); w += threads) words[w] = header[w];
    for (int b = tid; b < int(sh.header.text_bytes); b += threads)
      to[kEntryHeaderBytes + uint64_t(b)] = sh.text[b];
    int64_t* rows = reinterpret_cast<int64_t*>(to + kEntryRowsOffset);
    for (int d = tid; d < ranks; d += threads) rows[d] = a.counts ? sh.totals[d] : 0;
    if (a.counts) {
      int64_t* picks = reinterpret_cast<int64_t*>(to + entry_picks_offset(ranks));
      for (int e = tid; e < s.num_experts; e += threads) {
        if (s.expert_rank[e] == peer) picks[s.expert_local[e]] = __ldcg(&s.histogram[e]);
      }
    }
  }
  __syncthreads();  // a signal's fence takes along what threads before the barrier stored
  if (a.counts) {
    for (int e = tid; e < s.num_experts; e += threads) s.histogram[e] = 0;
  }
  // Credits: a slot that is named here has its last epoch shown to every peer, which waits for that
  // word by itself. Other threads send the entry words, so that the signals' fences overlap.
  for (int i = tid; i < num_credits; i += threads) {
    const uint64_t add = i == tid ? first_owed : owed(i);
    if (add) link.signal(i % ranks, credit_word(s.layout, s.shape, me, i / ranks), add);
  }
  const int entered = threads - 1 - tid;
  if (entered < ranks && entered != me) link.signal(entered, entry_word(s.layout, me), 1);

  if (!wait_all(s, link, epoch, kPhaseEntry, &sh.fault,
                [&](int peer) { return entry_word(s.layout, peer); })) {
    if (tid == 0) {
      sh.fault.epoch = epoch;
      sh.fault.op = int32_t(a.header.terms[kTermOp]);
      raise_fault(s, sh.fault);
    }
    return;
  }

  for (int i = tid; i < s.num_slots; i += threads) {  // after the barriers of wait_all
    if (!leased(i)) state->credit_sent[i] = state->slot_epoch[i];
  }

  // Every rank has the same records, so every rank comes to the same conclusion.
  const EntryHeader* theirs = nullptr;
  bool equal = true;
  for (int i = tid; i < ranks * kNumTerms; i += threads) {
    const int peer = i / kNumTerms, term = i % kNumTerms;
    equal &=
        record_of(s, link, peer, epoch)->terms[term] == record_of(s, link, 0, epoch)->terms[term];
  }
  if (tid < ranks) {
    theirs = record_of(s, link, tid, epoch);
    equal &= theirs->epoch == epoch && theirs->status == 0;
    state->peer_slot[tid] = theirs->slot;
    state->peer_rows[tid] = theirs->zero_copy;
  }
  if (__syncthreads_or(!equal)) {
    if (tid == 0) sh.fault.fault = kDisagree;
    return;
  }

  if (a.counts) {
    int64_t* told =
        reinterpret_cast<int64_t*>(reinterpret_cast<char*>(s.report) + kReportRowsOffset);
    for (int i = tid; i < ranks * ranks; i += threads) {
      const int source = i / ranks, d = i % ranks;
      told[i] = record_rows(record_of(s, link, source, epoch))[d];
    }
    for (int e = tid; e < s.num_local_experts; e += threads) {
      int64_t picks = 0;
      for (int source = 0; source < ranks; ++source)
        picks += record_picks(record_of(s, link, source, epoch), ranks)[e];
      told[ranks * ranks + e] = picks;
      a.routing.local_picks[e] = int32_t(picks);
    }
    bool fits = true;
    if (tid < ranks) {
      int64_t total = 0;
      for (int source = 0; source < ranks; ++source) {
        if (source == me) a.routing.base_to[tid] = total;
        total += record_rows(record_of(s, link, source, epoch))[tid];
      }
      fits = total <= a.max_recv_tokens;
      if (!fits) atomicMin(&sh.first_bad, tid);
      if (tid == 0) {
        int64_t begin = 0;
        for (int source = 0; source < ranks; ++source) {
          a.routing.recv_begin[source] = begin;
          begin += record_rows(record_of(s, link, source, epoch))[me];
        }
        a.routing.recv_begin[ranks] = begin;
        s.report->recv_rows = begin;
      }
    }
    if (__syncthreads_or(!fits)) {
      if (tid == 0) {
        sh.fault.fault = kTooManyRows;
        sh.fault.peer = sh.first_bad;
        if (slot >= 0) state->slot_epoch[slot] = epoch;
      }
      return;
    }
  }

  // The right to write.
  bool good = true;
  FaultWord late{};
  if (tid < ranks && tid != me && theirs->slot >= 0) {
    good = wait_word(link, tid, credit_word(s.layout, s.shape, tid, theirs->slot),
                     theirs->slot_epoch, kPhaseCredit, &late);
    if (!good) {
      late.epoch = epoch;
      late.op = int32_t(a.header.terms[kTermOp]);
      raise_fault(s, late);
    }
  }
  if (__syncthreads_or(!good)) {
    if (tid == 0) sh.fault.fault = kWasBroken;  // Errors has it
    return;
  }
  if (tid == 0) {
    if (slot >= 0) state->slot_epoch[slot] = epoch;
    state->go = 1;
    state->agreed = 1;
  }
}

// The kernels behind this one, and then the host, hear how it went. One whole block; `totals` and
// the histogram are made if a.counts.
__device__ inline void enter_call(const EnterArgs& a, const Link& link, EnterShared& sh) {
  agree(a, link, sh);
  __syncthreads();  // what every thread wrote, counts for the host among it
  const Setup& s = a.setup;
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&s.state->opened), "l"(a.call)
                 : "memory");
  }
  __syncthreads();
  let_next_begin();
  if (threadIdx.x != 0) return;
  s.report->fault = sh.fault;
  s.report->epoch = s.state->epoch;
  publish(&s.report->call, a.call);
}

// The first thing a kernel does that stands behind enter_call's and may have begun before its end:
// a whole block. True where rows may move. What that kernel wrote, a new routing too, is read by
// plain loads only.
__device__ inline bool opened(const Setup& s, uint64_t call) {
  __shared__ bool seen;
  if (threadIdx.x == 0) {
    const auto look = [&] {
      uint64_t last;
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                   : "=l"(last)
                   : "l"(&s.state->opened)
                   : "memory");
      return last == call;
    };
    seen = look();
    for (int i = 0; i < 4096 && !seen; ++i) seen = look();
    if (!seen) {  // that kernel's own deadlines end this
      wait_for_last();
      seen = look();
    }
  }
  __syncthreads();
  return seen && s.state->go != 0;
}

// ---- the end of a phase: the last block tells all peers and waits for them

// Every thread of every block calls it, having finished its own work; true in all threads of the
// block that came last.
__device__ inline bool last_block(uint32_t* ticket) {
  __shared__ uint32_t came;
  __syncthreads();
  if (threadIdx.x == 0) {
    // One fence for the block: a system fence of every warp would cost microseconds.
    __threadfence_system();
    came = atomicAdd(ticket, 1u);
    __threadfence_system();
    if (came == gridDim.x - 1) *ticket = 0;
  }
  __syncthreads();
  return came == gridDim.x - 1;
}

// The whole last block: signal `word` at each peer, and wait until each has signalled.
template <typename WordOf>
__device__ inline bool meet(const Setup& s, const Link& link, uint64_t* phases, Phase phase, Op op,
                            uint64_t own_word, WordOf word_of) {
  __shared__ FaultWord fault;
  const uint64_t value = *phases + 1;
  __syncthreads();
  const int tid = int(threadIdx.x);
  if (tid < s.num_ranks && tid != s.rank) link.signal(tid, own_word, 1);
  if (tid == 0) *phases = value;
  if (wait_all(s, link, value, phase, &fault, word_of)) return true;
  if (tid == 0) {
    fault.epoch = s.state->epoch;
    fault.op = int32_t(op);
    s.state->go = 0;
    raise_fault(s, fault);
  }
  return false;
}

}  // namespace epcomm::device
