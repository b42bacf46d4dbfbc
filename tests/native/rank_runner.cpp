#include "rank_runner.hpp"

#include <chrono>
#include <cmath>
#include <cstring>

namespace epcomm::testing {

using host::CombineArgs;
using host::DispatchArgs;
using host::DispatchCall;
using host::DispatchOutputs;
using host::Rows;

namespace {

constexpr float kAnything = NAN;

host::EngineOptions engine_options(const Config& config, int rank, bool staging, const char* isa) {
  host::EngineOptions options;
  options.rank = rank;
  options.shape = config.shape(staging);
  options.expert_rank = config.expert_rank;
  options.num_threads = config.num_threads;
  options.timeout_s = 60;
  options.ops = host::row_ops(isa);
  options.dtype_names = {"float32", "int32"};
  options.push_only = config.push_only;
  return options;
}

// A caller's array that need not be packed: rows or columns may lie apart or backwards.
struct Array {
  std::vector<float> memory;
  Rows rows;

  Array(int64_t num_rows, int64_t num_cols, Random& random) {
    const int64_t gap = random.one_in(4) ? 2 : 1;                 // between columns
    const int64_t pitch = num_cols * gap + random.between(0, 3);  // between rows
    const bool reversed = random.one_in(4);
    memory.resize(size_t(num_rows * pitch + 1));
    rows.data = reinterpret_cast<const std::byte*>(memory.data()) +
                (reversed && num_rows > 0 ? (num_rows - 1) * pitch * 4 : 0);
    rows.num_rows = num_rows;
    rows.num_cols = num_cols;
    rows.row_stride = (reversed ? -pitch : pitch) * 4;
    rows.col_stride = gap * 4;
    rows.itemsize = 4;
  }
  void set(int64_t row, int64_t column, const void* value) {
    std::memcpy(const_cast<std::byte*>(rows.row(row)) + column * rows.col_stride, value, 4);
  }
};

Rows packed_rows(const float* data, int64_t num_rows, int64_t num_cols) {
  static const float nothing = 0;  // an empty array is still given
  Rows rows;
  rows.data = reinterpret_cast<const std::byte*>(data ? data : &nothing);
  rows.num_rows = num_rows;
  rows.num_cols = num_cols;
  rows.row_stride = num_cols * 4;
  rows.col_stride = 4;
  rows.itemsize = 4;
  return rows;
}

void expect_rows(const float* seen, const std::vector<float>& want, int64_t columns,
                 const char* what, int rank) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i])) continue;
    EXPECT(seen[i] == want[i], "%s at rank %d: row %lld, column %lld is %g, not %g", what, rank,
           (long long)(int64_t(i) / columns), (long long)(int64_t(i) % columns), double(seen[i]),
           double(want[i]));
  }
}

}  // namespace

void LeaseReader::hold(int slot, const float* data, std::vector<float> want, int passes,
                       int pause_us) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    leases_.push_back({slot, data, std::move(want), passes, pause_us});
  }
  changed_.notify_all();
}

void LeaseReader::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !leases_.empty(); });
    if (leases_.empty()) return;
    const Lease lease = std::move(leases_.front());
    leases_.pop_front();
    lock.unlock();
    for (int pass = 0; pass < lease.passes; ++pass) {
      expect_rows(lease.data, lease.want, 1, "a lease", -1);
      std::this_thread::sleep_for(std::chrono::microseconds(lease.pause_us));
    }
    engine_->release_slot(lease.slot);
    lock.lock();
  }
}

RankRunner::RankRunner(const Program& program, int rank, HostTransport* transport, bool staging,
                       const char* isa)
    : program_(program),
      config_(program.config),
      rank_(rank),
      random_(mix(program.config.seed, 77, uint64_t(rank))),
      engine_(transport, engine_options(program.config, rank, staging, isa)),
      reader_(&engine_),
      open_(program.worlds.size()) {}

void RankRunner::run() {
  int64_t refused = 0;
  for (const Step& step : program_.steps) {
    context_.max_threads = int(random_.below(config_.num_threads + 1));
    const int64_t before = engine_.stats().refused_calls;
    switch (step.kind) {
      case Kind::kDispatch:
      case Kind::kAgain:
        dispatch(step);
        break;
      case Kind::kCombine:
        combine(step);
        break;
      case Kind::kBarrier:
        EXPECT_OK(engine_.barrier(context_));
        break;
      case Kind::kRefuse:
        if (rank_ == step.culprit) {
          const Status why = error(Code::kUnsupported, -1, "cannot do this");
          expect_refused(engine_.refuse(Op::kDispatch, why, context_), step, "cannot do this");
        } else {
          DispatchArgs args;
          Array none(0, config_.hidden, random_);
          args.x = none.rows;
          args.ids = {nullptr, false, 0, config_.num_topk, 0, 0};
          DispatchCall call;
          expect_refused(engine_.dispatch_begin(args, &call, context_), step, "cannot do this");
        }
        break;
      case Kind::kBadId: {
        std::vector<int64_t> ids(size_t(config_.num_topk), 0);
        if (rank_ == step.culprit) ids.back() = int64_t(1) << 40;
        DispatchArgs args;
        Array one(1, config_.hidden, random_);
        args.x = one.rows;
        args.ids = {ids.data(), true, 1, config_.num_topk, 8 * config_.num_topk, 8};
        DispatchCall call;
        expect_refused(engine_.dispatch_begin(args, &call, context_), step, "1099511627776");
        break;
      }
      case Kind::kMismatch:
        if (rank_ == step.culprit) {
          expect_refused(engine_.barrier(context_), step, "differs between ranks");
        } else {
          DispatchArgs args;
          Array none(0, config_.hidden, random_);
          args.x = none.rows;
          args.ids = {nullptr, false, 0, config_.num_topk, 0, 0};
          DispatchCall call;
          expect_refused(engine_.dispatch_begin(args, &call, context_), step,
                         "differs between ranks");
        }
        break;
    }
    refused +=
        step.kind == Kind::kRefuse || step.kind == Kind::kBadId || step.kind == Kind::kMismatch;
    EXPECT(engine_.stats().refused_calls - before <= 1, "one call, one refusal");
    ++done_;
    EXPECT(int64_t(engine_.epoch()) == done_, "epoch %llu after %lld calls",
           (unsigned long long)engine_.epoch(), (long long)done_);
  }
  EXPECT(engine_.stats().refused_calls == refused, "%lld refused calls, not %lld",
         (long long)engine_.stats().refused_calls, (long long)refused);
  for (Open& open : open_) {
    if (open.lease >= 0) engine_.release_slot(open.lease);
  }
}

void RankRunner::expect_refused(const Status& status, const Step& step, const char* words) {
  EXPECT(!status.ok() && status.text.find(words) != std::string::npos,
         "step %lld, rank %d: code %d: %s", (long long)done_, rank_, int(status.code),
         status.text.c_str());
  if (step.kind != Kind::kMismatch && rank_ != step.culprit) {
    const std::string name = "rank " + std::to_string(step.culprit);
    EXPECT(status.text.find(name) != std::string::npos, "no '%s' in: %s", name.c_str(),
           status.text.c_str());
  }
  EXPECT(engine_.broken().ok(), "a refused call must not break the engine: %s",
         engine_.broken().text.c_str());
}

void RankRunner::dispatch(const Step& step) {
  const World& world = program_.worlds[size_t(step.world)];
  const Inputs& in = world.inputs[size_t(rank_)];
  const std::vector<Row>& rows = world.rows[size_t(rank_)];
  Open& open = open_[size_t(step.world)];
  const int hidden = config_.hidden, topk = config_.num_topk,
            num_scales = step.scales ? config_.num_scales : 0;

  Array x(in.num_tokens, hidden, random_), scales(in.num_tokens, num_scales, random_);
  for (int64_t token = 0; token < in.num_tokens; ++token) {
    for (int column = 0; column < hidden; ++column) {
      const float value = x_value(step.x_seed, rank_, token, column);
      x.set(token, column, &value);
    }
    for (int column = 0; column < num_scales; ++column) {
      const int32_t value = scale_value(step.x_seed, rank_, token, column);
      scales.set(token, column, &value);
    }
  }
  DispatchArgs args;
  args.x = x.rows;
  if (step.scales) {
    args.scales = scales.rows;
    args.scale_dtype = 1;
  }
  args.layout = world.layout;
  args.alignment = world.alignment;
  args.capacity = world.capacity;
  args.want_lease = random_.one_in(3) ? 0 : 1;
  if (step.kind == Kind::kAgain) {
    args.routing = open.routing;
  } else {
    args.ids = {in.ids.data(), false, in.num_tokens, topk, 4 * topk, 4};
    if (world.has_weights) args.weights = packed_rows(in.weights.data(), in.num_tokens, topk);
  }

  DispatchCall call;
  const Status status = engine_.dispatch_begin(args, &call, context_);
  if (!world.error.empty()) {
    EXPECT(
        status.code == Code::kInvalidArgument && status.text.find(world.error) != std::string::npos,
        "wanted '%s', got code %d: %s", world.error.c_str(), int(status.code), status.text.c_str());
    EXPECT(engine_.broken().ok(), "too many rows must not break the engine");
    return;
  }
  EXPECT(status.ok(), "step %lld, rank %d: %s", (long long)done_, rank_, status.text.c_str());
  open.routing = call.routing;
  EXPECT(call.routing->output_rows() == int64_t(rows.size()), "rank %d: %lld rows, not %zu", rank_,
         (long long)call.routing->output_rows(), rows.size());

  // What must lie in x and scales; nothing is promised about a capacity's tail.
  std::vector<float> want_x;
  std::vector<int32_t> want_scales;
  const bool expert = world.layout == RowLayout::kExpert;
  const int64_t used = expert ? world.expert_offsets[size_t(rank_)].back() : int64_t(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const bool padding = rows[r].source < 0 && expert && int64_t(r) < used;
    for (int column = 0; column < hidden; ++column) {
      want_x.push_back(rows[r].source >= 0
                           ? x_value(step.x_seed, rows[r].source, rows[r].token, column)
                       : padding ? 0.0f
                                 : kAnything);
    }
    for (int column = 0; column < num_scales && rows[r].source >= 0; ++column) {
      want_scales.push_back(scale_value(step.x_seed, rows[r].source, rows[r].token, column));
    }
  }

  const int64_t num_rows = int64_t(rows.size()), per_row = expert ? 1 : topk;
  std::vector<float> out_x(size_t(num_rows * hidden), -7.0f),
      weights(size_t(num_rows * per_row), -7.0f);
  std::vector<int32_t> out_scales(size_t(num_rows * num_scales), -7),
      ids(size_t(num_rows * per_row), -7);
  std::vector<int32_t> per_expert(size_t(engine_.num_local_experts(rank_)), -7);
  std::vector<int32_t> offsets(per_expert.size() + 1, -7);
  DispatchOutputs out;
  const bool want_nothing = random_.one_in(12);  // a caller that could not make its arrays
  if (!want_nothing) {
    if (call.lease_slot < 0) {
      out.x = reinterpret_cast<std::byte*>(out_x.data());
      out.scales = reinterpret_cast<std::byte*>(out_scales.data());
    }
    out.ids = ids.data();
    out.weights = world.has_weights ? weights.data() : nullptr;
    out.tokens_per_expert = per_expert.data();
    if (expert) out.expert_offsets = offsets.data();
  }
  EXPECT_OK(engine_.dispatch_finish(&call, out, context_));
  std::fill(x.memory.begin(), x.memory.end(), -9.0f);  // the caller's again
  if (want_nothing) {
    if (call.lease_slot >= 0) engine_.release_slot(call.lease_slot);
    return;
  }
  check_ids(world, call, ids, weights, per_expert, offsets);

  const float* got = out_x.data();
  const int32_t* got_scales = out_scales.data();
  if (call.lease_slot >= 0) {
    float* leased = reinterpret_cast<float*>(engine_.slot_payload(call.lease_slot));
    got = leased;
    const uint64_t bytes = uint64_t(hidden) * 4;
    const uint64_t at = call.lease_slot == call.slot
                            ? engine_.scales_offset(bytes)
                            : align_up(uint64_t(num_rows) * bytes, kSignalStride);
    got_scales = reinterpret_cast<const int32_t*>(engine_.slot_payload(call.lease_slot) + at);
  }
  expect_rows(got, want_x, hidden, "dispatch", rank_);
  size_t next = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int column = 0; column < num_scales && rows[r].source >= 0; ++column, ++next) {
      const int32_t seen = got_scales[int64_t(r) * num_scales + column];
      EXPECT(seen == want_scales[next], "rank %d: scale of row %zu is %d, not %d", rank_, r, seen,
             want_scales[next]);
    }
  }

  if (call.lease_slot < 0) return;
  if (open.lease < 0 && step.kind == Kind::kDispatch && random_.one_in(3)) {
    open.lease = call.lease_slot;  // until its combine
    open.rows = reinterpret_cast<float*>(engine_.slot_payload(call.lease_slot));
  } else if (random_.one_in(2)) {
    reader_.hold(call.lease_slot, got, std::move(want_x), int(random_.between(1, 6)),
                 int(random_.below(2000)));
  } else {
    engine_.release_slot(call.lease_slot);
  }
}

void RankRunner::check_ids(const World& world, const DispatchCall& call,
                           const std::vector<int32_t>& ids, const std::vector<float>& weights,
                           const std::vector<int32_t>& per_expert,
                           const std::vector<int32_t>& offsets) {
  const std::vector<Row>& rows = world.rows[size_t(rank_)];
  const int topk = config_.num_topk;
  std::vector<int32_t> count(per_expert.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const Row& row = rows[r];
    for (int k = 0; k < (world.layout == RowLayout::kRank ? topk : 1); ++k) {
      const size_t at = world.layout == RowLayout::kRank ? r * size_t(topk) + size_t(k) : r;
      int32_t want = -1;
      float want_weight = 0;
      if (row.source >= 0) {
        const Inputs& in = world.inputs[size_t(row.source)];
        const size_t pick = size_t(row.token * topk + (row.k >= 0 ? row.k : k));
        const int32_t id = in.ids[pick];
        if (id >= 0 && config_.expert_rank[size_t(id)] == rank_) {
          want = config_.expert_local[size_t(id)];
          want_weight = in.weights[pick];
        }
      }
      if (want >= 0) ++count[size_t(want)];
      EXPECT(ids[at] == want, "rank %d: topk_idx of row %zu, %d is %d, not %d", rank_, r, k,
             ids[at], want);
      EXPECT(!world.has_weights || weights[at] == want_weight,
             "rank %d: weight of row %zu, %d is %g, not %g", rank_, r, k, double(weights[at]),
             double(want_weight));
    }
  }
  EXPECT(per_expert == count, "rank %d: num_tokens_per_expert", rank_);
  if (world.layout != RowLayout::kExpert) return;
  for (size_t e = 0; e < offsets.size(); ++e) {
    EXPECT(offsets[e] == world.expert_offsets[size_t(rank_)][e],
           "rank %d: expert_offsets[%zu] is %d", rank_, e, offsets[e]);
  }
  (void)call;
}

void RankRunner::combine(const Step& step) {
  const World& world = program_.worlds[size_t(step.world)];
  const std::vector<Row>& rows = world.rows[size_t(rank_)];
  Open& open = open_[size_t(step.world)];
  const int hidden = config_.hidden, topk = config_.num_topk;
  const int64_t num_rows = int64_t(rows.size()),
                num_tokens = world.inputs[size_t(rank_)].num_tokens;

  // Rows in ordinary memory, in the lease of the dispatch, or in a combine buffer.
  std::vector<float> own(size_t(num_rows * hidden));
  float* y = own.data();
  int slot = -1;
  if (open.lease >= 0) {
    slot = std::exchange(open.lease, -1);
    y = open.rows;
  } else if (random_.one_in(2)) {
    slot = engine_.lease_slot();
    if (slot >= 0 && uint64_t(num_rows) * uint64_t(hidden) * 4 <= engine_.payload_bytes()) {
      y = reinterpret_cast<float*>(engine_.slot_payload(slot));
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int column = 0; column < hidden; ++column) {
      y[r * hidden + column] = y_value(world, rank_, config_, rows[size_t(r)], step.x_seed, column);
    }
  }
  const int per_row = world.layout == RowLayout::kRank ? topk : 1;
  std::vector<float> carried(size_t(num_rows * per_row), 1e30f);
  for (int64_t r = 0; r < num_rows; ++r) {
    const Row& row = rows[size_t(r)];
    for (int k = 0; k < per_row && row.source >= 0; ++k) {
      carried[size_t(r * per_row + k)] =
          carried_value(row.source, row.token, row.k >= 0 ? row.k : k);
    }
  }
  std::vector<float> bias(static_cast<size_t>(hidden));
  for (int column = 0; column < hidden; ++column) bias[size_t(column)] = bias_value(column);

  const int64_t pitch = hidden + random_.between(0, 2);
  std::vector<float> out(size_t(num_tokens * pitch), -7.0f),
      carried_out(size_t(num_tokens * topk), -7.0f);
  CombineArgs args;
  args.x = packed_rows(y, num_rows, hidden);
  args.routing = open.routing;
  args.apply_weights = step.apply_weights;
  args.exact_order = step.exact_order;
  if (step.carried) {
    args.carried = packed_rows(carried.data(), num_rows, per_row);
    args.carried_out = carried_out.data();
  }
  args.bias = step.bias ? bias.data() : nullptr;
  args.out = reinterpret_cast<std::byte*>(out.data());
  args.out_stride = pitch * 4;
  EXPECT_OK(engine_.combine(args, context_));

  // The rows are the caller's again: nobody may still read them.
  std::fill(y, y + num_rows * hidden, -9.0f);
  if (slot >= 0) engine_.release_slot(slot);
  std::vector<float> packed;
  for (int64_t token = 0; token < num_tokens; ++token) {
    packed.insert(packed.end(), out.begin() + token * pitch, out.begin() + token * pitch + hidden);
    for (int64_t gap = hidden; gap < pitch; ++gap)
      EXPECT(out[size_t(token * pitch + gap)] == -7.0f, "a gap was written");
  }
  expect_rows(packed.data(), combined(program_, step, rank_), hidden, "combine", rank_);
  if (step.carried)
    expect_rows(carried_out.data(), carried_back(program_, step, rank_), topk, "carried weights",
                rank_);
}

}  // namespace epcomm::testing
