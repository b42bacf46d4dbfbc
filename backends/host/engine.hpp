// Dispatch and combine for host memory, written once over HostTransport.
//
// One Engine per communicator. Its owner serialises calls; release_slot() and abort() come from any
// thread. Every call is one epoch: all ranks exchange entry words (engine.cpp), and only if all
// agree do rows move (dispatch.cpp, combine.cpp). Epochs, slots and credits are counted here only.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "epcomm/backend.hpp"
#include "epcomm/entry.h"
#include "host/routing.hpp"
#include "host/rows.hpp"
#include "host/thread_pool.hpp"

namespace epcomm::host {

struct EngineOptions {
  int rank = 0;
  HeapShape shape{};
  std::vector<int32_t> expert_rank;  // [num_experts] owner
  int num_threads = 1;
  double timeout_s = 300;
  const RowOps* ops = nullptr;
  std::vector<std::string> dtype_names;  // what kTermDtype indexes
  bool push_only = false;  // combine never reads peers' heaps (for measuring and tests)
};

// How a call waits and on how many threads it runs.
struct CallContext {
  int (*interrupted)(void*) = nullptr;
  void* interrupted_arg = nullptr;
  int max_threads = 0;  // 0: all
};

// Rows of a caller's array. Columns are `itemsize` bytes wide and may have any stride.
struct Rows {
  const std::byte* data = nullptr;
  int64_t num_rows = 0, num_cols = 0;
  int64_t row_stride = 0, col_stride = 0;  // bytes
  int32_t itemsize = 1;
  int64_t row_bytes() const { return num_cols * itemsize; }
  bool packed() const { return col_stride == itemsize || num_cols <= 1; }
  const std::byte* row(int64_t i) const { return data + i * row_stride; }
};

struct DispatchArgs {
  Rows x;
  Rows scales;  // data null: none
  int32_t dtype = 0, scale_dtype = -1;
  int quantize = 0;  // kTermQuantize; x must then be of `row_type`
  RowType row_type = RowType::kFloat32;
  RowLayout layout = RowLayout::kRank;
  int64_t alignment = 1, capacity = -1;
  IndexView ids{};                   // without a routing
  Rows weights;                      // float32 [num_tokens, num_topk]; data null: none
  std::shared_ptr<Routing> routing;  // a cached one
  int want_lease = 0;                // 0 copy, 1 lease if there is one, 2 lease or refuse
};

struct DispatchCall {
  DispatchArgs args;
  std::shared_ptr<Routing> routing;
  bool cached = false;
  uint64_t epoch = 0;
  int slot = -1;        // where rows arrive
  int lease_slot = -1;  // the slot that x is a view of; -1: copied
  uint64_t wire_row_bytes = 0, wire_scale_bytes = 0;
  std::vector<int> peer_slot;  // [rank]
  std::string bad_pick;        // capacity mode: what it says of the first id that was taken as -1
};

// Where the caller wants the results; null: not wanted.
struct DispatchOutputs {
  std::byte* x = nullptr;       // [output_rows, row_bytes]; null with a lease
  std::byte* scales = nullptr;  // [output_rows, scale_bytes]; null with a lease
  int32_t* ids = nullptr;       // rank layout [output_rows, num_topk], expert layout [output_rows]
  float* weights = nullptr;     // the same shape
  int32_t* tokens_per_expert = nullptr;  // [num_local_experts]
  int32_t* expert_offsets = nullptr;     // [num_local_experts + 1], expert layout
};

struct CombineArgs {
  Rows x;  // float rows; columns packed
  int32_t dtype = 0;
  RowType row_type = RowType::kFloat32;
  std::shared_ptr<Routing> routing;
  bool apply_weights = false;
  bool exact_order = false;
  Rows carried;                  // float32 [rows, num_topk] or [rows, 1]; data null: none
  const float* bias = nullptr;   // [hidden] or [num_tokens, hidden]; null: none
  int64_t bias_stride = 0;       // floats between the rows of a bias per token; 0: one for all
  std::byte* out = nullptr;      // [num_tokens, row_bytes]
  int64_t out_stride = 0;        // bytes between rows
  float* carried_out = nullptr;  // [num_tokens, num_topk]

  const float* bias_of(int64_t token) const noexcept {
    return bias == nullptr ? nullptr : bias + token * bias_stride;
  }
};

struct EngineStats {
  int64_t calls = 0, refused_calls = 0, dispatches = 0, combines = 0;
  int64_t leases_granted = 0, copies = 0, zero_copy_combines = 0;
  int64_t rows_sent = 0, bytes_sent = 0;  // to other ranks
  int64_t rows_received = 0;              // own rank's rows counted too
};

class Writer;

class Engine {
 public:
  Engine(HostTransport* transport, EngineOptions options);

  // Each is collective and one epoch. What a rank refuses leaves the engine usable, whatever the
  // code; a time-out, a lost peer and an interruption break it for good.

  // Take part in a call only to refuse it. Never returns ok.
  Status refuse(Op op, const Status& why, const CallContext& context) noexcept;
  Status barrier(const CallContext& context) noexcept;
  // First half: every rank learns every count. The caller then makes its arrays and must call
  // dispatch_finish(), also if it could not (with no outputs), since peers count on it.
  Status dispatch_begin(DispatchArgs args, DispatchCall* call, const CallContext& context) noexcept;
  Status dispatch_finish(DispatchCall* call, const DispatchOutputs& out,
                         const CallContext& context) noexcept;
  Status combine(const CombineArgs& args, const CallContext& context) noexcept;

  // A slot for the caller to build rows in; -1 if num_slots leases are held.
  int lease_slot() noexcept;
  // A lease ended. Any thread; takes effect when the next call begins.
  void release_slot(int slot) noexcept;
  int leases_held() noexcept;

  std::byte* slot_payload(int slot) noexcept;
  uint64_t payload_bytes() const noexcept;  // of one slot
  // Scales of `rows` rows of a slot lie behind its rows.
  uint64_t scales_offset(uint64_t wire_row_bytes) const noexcept;

  // Tell peers that nothing more comes from this rank. Idempotent.
  void leave(PeerState state, int lost = -1) noexcept;
  // Ends this rank's waits, now and later. Any thread; a call that waits then breaks the engine.
  void abort(const Status& why) noexcept;
  // Break it for good outside any call, and tell peers.
  void give_up(const Status& why) noexcept { (void)break_if_lost(why); }
  // Ends the threads. What leases need stays. Nothing but leases may be used afterwards.
  void stop() noexcept { pool_.stop(); }

  // Why it is broken; ok while it is not. Any thread.
  const Status& broken() const noexcept {
    return is_broken_.load(std::memory_order_acquire) ? broken_ : not_broken_;
  }
  // kPeerLost if a peer's process ended or a peer gave up. Breaks nothing. Any thread.
  Status look_at_peers() const noexcept;
  const EngineStats& stats() const noexcept { return stats_; }
  const EngineOptions& options() const noexcept { return options_; }
  const HeapLayout& heap_layout() const noexcept { return layout_; }
  int num_local_experts(int rank) const noexcept { return num_local_[size_t(rank)]; }
  uint64_t epoch() const noexcept { return epoch_; }

 private:
  // Behind the channels of data: words that must not queue behind rows.
  int control_channel() const noexcept { return options_.shape.num_channels; }
  friend class Writer;
  struct Entry {  // what a call says in its entry word
    Status status;
    int slot = -1;
    int64_t num_tokens = 0;
    uint64_t zero_copy = 0;
    int64_t terms[kNumTerms];
    const Routing* counts = nullptr;  // dispatch: whose rows_to and picks_of travel
    Entry(Op op);
  };

  // engine.cpp: one epoch's agreement
  void begin_epoch() noexcept;
  // Announce and agree. What it returns has broken the engine already where it must.
  Status exchange(const char* operation, const Entry& entry, const CallContext& context) noexcept;
  Status announce(const char* operation, const Entry& entry, const CallContext& context) noexcept;
  Status wait(int peer, uint64_t word, uint64_t value, const char* operation, const char* phase,
              const CallContext& context) noexcept;
  void name_whom_it_waits_for(Status* status) noexcept;
  Status break_if_lost(Status status) noexcept;
  const EntryHeader& record(int peer) noexcept;
  int64_t record_rows(int peer, int destination) noexcept;
  int64_t record_picks(int peer, int expert) noexcept;

  int take_free_slot(int except) noexcept;
  void finish_slot(int slot) noexcept;  // consumed by the call itself

  // data words: both sides count phases alike
  Status signal_data(int peer, int channel) noexcept;
  void expect_data() noexcept { ++data_phases_; }
  Status wait_data(const char* operation, const CallContext& context) noexcept;
  Status wait_credit(const char* operation, int peer, const CallContext& context) noexcept;
  // Whether a call that writes so many bytes should write them past the caches: they would only
  // push each other out before anyone reads them.
  static bool bulk(uint64_t bytes) noexcept { return bytes >= kBulkBytes; }
  static constexpr uint64_t kBulkBytes = uint64_t(2) << 20;
  // What any channel put has left this rank's memory.
  Status quiet(const char* operation, const CallContext& context, double timeout_s) noexcept;
  // First failed status of a loop over channels.
  Status for_channels(const CallContext& context, const std::function<Status(int)>& body) noexcept;
  void for_ranges(int64_t count, const CallContext& context,
                  const std::function<void(int64_t, int64_t)>& body) noexcept;

  // dispatch.cpp
  Status dispatch_send(DispatchCall& call, int channel) noexcept;
  void dispatch_collect(DispatchCall& call, const DispatchOutputs& out,
                        const CallContext& context) noexcept;
  void expand(DispatchCall& call, const DispatchOutputs& out, const CallContext& context) noexcept;

  // combine.cpp
  struct Sources;  // where each rank's returning rows lie
  bool in_own_heap(const Rows& rows) noexcept;
  Status combine_push(const CombineArgs& args, int channel, bool zero_copy) noexcept;
  Status combine_reduce(const CombineArgs& args, bool zero_copy,
                        const CallContext& context) noexcept;
  Status combine_exact(const CombineArgs& args, const CallContext& context) noexcept;
  Status push_picks(const CombineArgs& args, int channel, int64_t begin, int64_t end) noexcept;
  void reduce_picks(const CombineArgs& args, int slot, int64_t begin, int64_t end,
                    const CallContext& context) noexcept;
  void push_carried(const CombineArgs& args, Writer& writer, int channel) noexcept;
  void collect_carried(const CombineArgs& args, int slot) noexcept;
  Status signal_done(int peer) noexcept;
  Status wait_done(const CallContext& context) noexcept;

  HostTransport* transport_;
  EngineOptions options_;
  HeapLayout layout_;
  ThreadPool pool_;
  std::vector<int32_t> expert_local_;  // [num_experts] id at its owner
  std::vector<int32_t> num_local_;     // [rank]
  Owners owners_{};
  bool load_store_ = true;  // peer_ptr reaches every peer

  uint64_t epoch_ = 0;
  uint64_t data_phases_ = 0;  // every rank signals every peer in each, so one count serves all
  uint64_t done_phases_ = 0;
  std::vector<uint64_t> slot_epoch_;   // last epoch that used the slot
  std::vector<uint64_t> credit_sent_;  // [slot] what peers' credit words show
  enum class SlotUse : uint8_t { kFree, kCall, kLease };
  std::vector<SlotUse> slot_use_;
  std::mutex release_mutex_;  // guards released_ only
  std::vector<int> released_;
  Status broken_;  // written once, before is_broken_ is set
  const Status not_broken_;
  std::atomic<bool> is_broken_{false};
  bool left_ = false;
  EngineStats stats_;
};

}  // namespace epcomm::host
