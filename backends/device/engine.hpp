// Dispatch and combine for GPU memory: what the kernels of cuda/ need around them. The same calls,
// protocol and bits as the host engine (backends/host/engine.hpp).
//
// One Engine per communicator. Its owner serialises calls; release_slot(), abort() and broken()
// come from any thread. Epochs, phases, slot epochs and credits are counted by the kernels
// (DeviceState); this side knows which slots leases hold, launches, and reads what the kernels
// report.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/core.hpp"
#include "epcomm/backend.hpp"
#include "epcomm/device/engine.h"

namespace epcomm::device {

struct Kernels {
  common::CuFunction enter = nullptr, send = nullptr, send_quantized = nullptr, collect = nullptr;
  common::CuFunction copy = nullptr, carry = nullptr;
  common::CuFunction reduce_two = nullptr, reduce_four = nullptr, reduce_many = nullptr;
};

struct EngineOptions {
  int rank = 0;
  int device = 0;
  HeapShape shape{};
  std::vector<int32_t> expert_rank;  // [num_experts] owner
  int num_sms = 0;                   // of a call that names none
  double timeout_s = 300;
  std::vector<std::string> dtype_names;  // what kTermDtype indexes
  Kernels kernels;
  std::vector<char> ctx;  // the policy's, passed to kernels as it is
  uint64_t heap = 0;      // device address of the own heap
};

struct CallContext {
  int (*interrupted)(void*) = nullptr;
  void* interrupted_arg = nullptr;
  int max_sms = 0;                    // 0: the engine's number
  common::CuStream stream = nullptr;  // the caller's
  bool join = true;                   // the caller's stream comes after the call
};

// Rows of a caller's array; strides in bytes.
struct Rows {
  uint64_t data = 0;
  int64_t num_rows = 0, num_cols = 0;
  int64_t row_stride = 0, col_stride = 0;
  int32_t itemsize = 1;
  int64_t row_bytes() const { return num_cols * itemsize; }
  bool packed() const { return col_stride == itemsize || num_cols <= 1; }
};

// What a handle owns: device memory for the kernels, counts for the host.
class Routing {
 public:
  ~Routing();
  uint64_t generation = 0;
  int64_t num_tokens = 0, recv_rows = 0;
  int rank = 0, num_ranks = 1, num_local_experts = 0;
  bool has_weights = false;
  std::vector<int64_t> rows_of;  // [num_ranks * num_ranks]
  std::vector<int64_t> picks;    // [num_local_experts]
  RoutingView view{};

  int64_t rows(int source, int destination) const {
    return rows_of[size_t(source) * size_t(num_ranks) + size_t(destination)];
  }
  int64_t recv_begin(int source) const {  // rows here of the ranks before it
    int64_t at = 0;
    for (int s = 0; s < source; ++s) at += rows(s, rank);
    return at;
  }

 private:
  friend class Engine;
  std::shared_ptr<Core> core_;
  common::CuPointer sent_ = 0, received_ = 0;
};

// Device addresses of the results; 0: not wanted.
struct DispatchOutputs {
  uint64_t x = 0, scales = 0, ids = 0, weights = 0, tokens_per_expert = 0;
  uint64_t num_tokens = 0, overflow = 0;
};

struct DispatchArgs {
  Rows x;
  Rows scales;  // data 0: none
  int32_t dtype = 0, scale_dtype = -1;
  int quantize = 0;  // kTermQuantize: x are floats, of row_type, that travel as codes and scales
  int32_t row_type = 0;
  uint64_t ids = 0;  // without a routing
  bool ids_are_64 = true;
  int64_t ids_token_stride = 0, ids_topk_stride = 0;
  Rows weights;                      // float32 [num_tokens, num_topk]; data 0: none
  std::shared_ptr<Routing> routing;  // a cached one
  int want_lease = 0;                // 0 copy, 1 lease if there is one, 2 lease or refuse
  // The small results, where their memory is there before the call, with room for all rows that
  // may come: then nothing that the GPU does waits for the host.
  bool early = false;
  DispatchOutputs outputs;
};

struct DispatchCall {
  DispatchArgs args;
  std::shared_ptr<Routing> routing;
  bool cached = false;
  int slot = -1;
  int lease_slot = -1;  // `slot`, or -1: copied
  uint64_t wire_row_bytes = 0, wire_scale_bytes = 0;
  bool collected = false;  // the small results are queued
  bool joined = false;     // the caller's stream comes after the call already
};

struct CombineArgs {
  Rows x;
  int32_t dtype = 0;
  int32_t row_type = 0;
  std::shared_ptr<Routing> routing;
  Rows carried;             // float32 [rows, num_topk]; data 0: none
  uint64_t bias = 0;        // float32 [num_cols], or one such row per token
  int64_t bias_stride = 0;  // floats between tokens
  uint64_t out = 0;
  int64_t out_stride = 0;
  uint64_t carried_out = 0;
};

struct EngineStats {
  int64_t calls = 0, refused_calls = 0, dispatches = 0, combines = 0;
  int64_t leases_granted = 0, copies = 0, zero_copy_combines = 0;
  int64_t rows_sent = 0, bytes_sent = 0;
  int64_t rows_received = 0;
};

class Engine {
 public:
  explicit Engine(Backend* backend) : backend_(backend) {}
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  Status open(EngineOptions options) noexcept;

  // Each is collective and one epoch. kInvalidArgument and others leave the engine usable;
  // kTimeout, kPeerLost, kCuda and kInterrupted break it for good. All return once the ranks have
  // agreed on the call; rows move behind that, in stream order.
  Status refuse(Op op, const Status& why, const CallContext& context) noexcept;
  Status barrier(const CallContext& context) noexcept;
  Status dispatch_begin(DispatchArgs args, DispatchCall* call, const CallContext& context) noexcept;
  Status dispatch_finish(DispatchCall* call, const DispatchOutputs& out,
                         const CallContext& context) noexcept;
  Status combine(const CombineArgs& args, const CallContext& context) noexcept;

  // The point that our stream has reached, for results of an asynchronous call.
  Status mark(Mark* out) noexcept;
  // Blocks until it is passed; raises what the kernels or the device report.
  Status wait_mark(const Mark& mark, double timeout_s, const CallContext& context,
                   bool* passed) noexcept;
  // Work queued on `stream` from now on comes after it.
  Status join_mark(const Mark& mark, common::CuStream stream) noexcept;

  // A slot for the caller to build rows in, from what `stream` does next; -1 if num_slots leases
  // are held.
  int lease_slot(common::CuStream stream) noexcept;
  // Takes effect for work that comes after what `streams` have by now. Any thread.
  void release_slot(int slot, const std::vector<uint64_t>& streams) noexcept;
  int leases_held() noexcept;

  uint64_t slot_payload(int slot) const noexcept {
    return options_.heap + slot_offset(layout_, slot) + layout_.slot_payload;
  }
  uint64_t payload_bytes() const noexcept { return layout_.slot_idx - layout_.slot_payload; }
  uint64_t scales_offset(uint64_t wire_row_bytes) const noexcept {
    return align_up(uint64_t(layout_.slot_rows) * wire_row_bytes, kSignalStride);
  }

  // Own kernels are done, or the deadline has passed; then peers hear of it. Idempotent.
  void leave(PeerState state) noexcept;
  void abort(const Status& why) noexcept { backend_->abort(why); }
  // Break it for good and tell peers. Not while a call runs.
  void give_up(const Status& why) noexcept { (void)break_if_lost(why); }
  // kPeerLost if a peer's process ended or it gave up.
  Status look_at_peers() noexcept;

  // Our next work comes after what `stream` has by now.
  Status after(common::CuStream stream) noexcept;

  // Looks at what the kernels and the watcher have reported meanwhile.
  Status broken() noexcept;
  const EngineStats& stats() const noexcept { return stats_; }

 private:
  // Begins every call; `ordered`: after what the caller's stream has by now.
  Status prepare(const CallContext& context, bool ordered) noexcept;
  EnterArgs entry(Op op, int64_t num_tokens) noexcept;
  Status launch(common::CuFunction function, int64_t blocks, int threads, int shared_bytes,
                void** arguments, const char* name) noexcept;
  Status launch_behind(common::CuFunction function, int64_t blocks, int threads, int shared_bytes,
                       void** arguments, const char* name) noexcept;
  Status enter(const EnterArgs& args, int64_t blocks) noexcept;
  Status await_report(const char* operation, const CallContext& context) noexcept;
  Status fault_status(const char* operation, const FaultWord& fault) noexcept;
  Status disagreement(const char* operation, uint64_t epoch) noexcept;
  Status drain(double timeout_s) noexcept;
  Status break_if_lost(Status status) noexcept;
  void break_for_good(const Status& why) noexcept;
  bool is_broken() const noexcept { return is_broken_.load(std::memory_order_acquire); }
  Status refused(Status status) noexcept;
  int sms(const CallContext& context) const noexcept;
  int take_free_slot() noexcept;
  void collect_released() noexcept;
  bool in_own_heap(const Rows& rows) const noexcept;
  Status move_rows(const Rows& from, int64_t first, int64_t last, uint64_t to,
                   const CallContext& context) noexcept;
  Status make_routing(Routing* routing, int64_t recv_rows) noexcept;
  Status make_received(Routing* routing, int64_t recv_rows) noexcept;
  Status send(DispatchCall* call, const DispatchArgs& args, uint64_t number,
              const CallContext& context) noexcept;
  Status collect(DispatchCall* call, const DispatchOutputs& out,
                 const CallContext& context) noexcept;
  CollectArgs collecting(const DispatchCall& call, const DispatchOutputs& out) const noexcept;
  Status copy_out(const DispatchCall& call, const DispatchOutputs& out) noexcept;
  static Strided strided(const Rows& rows) noexcept;

  Backend* const backend_;
  std::shared_ptr<Core> core_;
  EngineOptions options_;
  HeapLayout layout_{};
  Setup setup_{};
  int num_local_ = 0;
  common::CuPointer memory_ = 0;  // state and tables
  char* pinned_ = nullptr;        // Report, Errors, text, entry records
  Report* report_ = nullptr;
  Errors* errors_ = nullptr;
  char* text_ = nullptr;
  char* records_ = nullptr;
  int send_buffer_max_ = 0;
  uint64_t entries_ = 0;  // EnterArgs that were made

  enum class SlotUse : uint8_t { kFree, kLease };
  std::vector<SlotUse> slot_use_;
  struct Released {
    int slot;
    std::vector<Mark> marks;
  };
  std::mutex release_mutex_;  // guards released_ only
  std::vector<Released> released_;
  std::mutex break_mutex_;  // one thread breaks it
  Status broken_;           // once written, if is_broken_
  std::atomic<bool> is_broken_{false};
  bool refusal_ = false;  // what the call returns is what all ranks agreed to raise
  std::atomic<bool> left_{false};
  EngineStats stats_;
};

}  // namespace epcomm::device
