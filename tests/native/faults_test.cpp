// Engines whose peers die, leave, come late or are told to stop: every wait ends, with a typed
// error that names the peer, and later calls fail at once.
//
//   faults_test [--seed S] [--rounds N]

#include <atomic>
#include <chrono>
#include <memory>

#include "fabric.hpp"
#include "host/engine.hpp"
#include "scenario.hpp"

namespace epcomm::testing {
namespace {

using host::CombineArgs;
using host::DispatchArgs;
using host::DispatchCall;
using host::DispatchOutputs;
using host::Engine;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Ranks with one expert each; every rank sends each of its tokens to every rank.
struct Ranks {
  Config config;
  HeapShape shape{};
  std::unique_ptr<Fabric> fabric;
  std::vector<std::unique_ptr<Engine>> engines;

  Ranks(int num_ranks, Reach reach, double timeout_s, uint64_t seed) {
    config.seed = seed;
    config.num_ranks = config.num_experts = config.num_topk = num_ranks;
    config.hidden = 16;
    config.max_tokens = 8;
    config.max_recv = 8 * num_ranks;
    config.num_slots = 2;
    config.num_channels = 2;
    config.num_threads = 2;
    config.max_local_experts = 1;
    for (int rank = 0; rank < num_ranks; ++rank) config.expert_rank.push_back(rank);
    shape = config.shape(reach != Reach::kDirect);
    const HeapLayout layout = heap_layout(shape);
    FabricOptions options;
    options.num_ranks = num_ranks;
    options.num_channels = config.num_channels;
    options.heap_bytes = layout.total_bytes;
    options.state_word = layout.state;
    options.reach = reach;
    options.seed = seed;
    options.max_delay_us = 30;
    fabric = std::make_unique<Fabric>(options);
    for (int rank = 0; rank < num_ranks; ++rank) {
      host::EngineOptions engine;
      engine.rank = rank;
      engine.shape = shape;
      engine.expert_rank = config.expert_rank;
      engine.num_threads = config.num_threads;
      engine.timeout_s = timeout_s;
      engine.ops = host::row_ops(nullptr);
      engine.dtype_names = {"float32"};
      engines.push_back(std::make_unique<Engine>(fabric->transport(rank), engine));
    }
  }
  // Engines' leases and threads end before the heaps do.
  ~Ranks() { engines.clear(); }

  // Dispatch and combine once; the first error, or ok with everything checked.
  Status call(int rank, const host::CallContext& context = {}) {
    const int ranks = config.num_ranks;
    Engine& engine = *engines[size_t(rank)];
    const int64_t tokens = 4;
    std::vector<float> x(size_t(tokens * config.hidden), float(rank + 1));
    std::vector<int32_t> ids;
    for (int64_t pick = 0; pick < tokens * ranks; ++pick) ids.push_back(int32_t(pick % ranks));
    DispatchArgs args;
    args.x = {reinterpret_cast<const std::byte*>(x.data()),
              tokens,
              config.hidden,
              config.hidden * 4,
              4,
              4};
    args.ids = {ids.data(), false, tokens, ranks, 4 * ranks, 4};
    DispatchCall call;
    EPCOMM_RETURN_IF_ERROR(engine.dispatch_begin(args, &call, context));
    std::vector<float> rows(size_t(call.routing->output_rows() * config.hidden));
    DispatchOutputs out;
    out.x = reinterpret_cast<std::byte*>(rows.data());
    EPCOMM_RETURN_IF_ERROR(engine.dispatch_finish(&call, out, context));
    std::vector<float> z(x.size());
    CombineArgs combine;
    combine.x = {out.x, int64_t(rows.size()) / config.hidden, config.hidden, config.hidden * 4, 4,
                 4};
    combine.routing = call.routing;
    combine.out = reinterpret_cast<std::byte*>(z.data());
    combine.out_stride = config.hidden * 4;
    EPCOMM_RETURN_IF_ERROR(engine.combine(combine, context));
    for (const float value : z) {
      EXPECT(value == float(rank + 1) * float(ranks), "rank %d combined %g", rank, double(value));
    }
    return {};
  }

  // It is over for this rank: at once, the same way, and close() works.
  void expect_broken(int rank) {
    const Clock::time_point start = Clock::now();
    EXPECT(!call(rank).ok() && !engines[size_t(rank)]->barrier({}).ok(), "rank %d still works",
           rank);
    EXPECT(seconds_since(start) < 0.5, "a broken engine waited %g s", seconds_since(start));
    engines[size_t(rank)]->leave(PeerState::kLeft);
  }
};

void expect_lost(const Status& status, const char* what) {
  EXPECT(status.code == Code::kPeerLost && !status.text.empty(), "%s: code %d: %s", what,
         int(status.code), status.text.c_str());
}

// One rank ends at a random moment.
void kill_one(int num_ranks, Reach reach, uint64_t seed) {
  Random random(seed);
  Ranks ranks(num_ranks, reach, 30, seed);
  const int victim = int(random.below(num_ranks));
  const int64_t after_us = random.below(3000);
  std::atomic<bool> killed{false};
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::microseconds(after_us));
    killed.store(true);
    ranks.fabric->kill(victim);
    ranks.engines[size_t(victim)]->abort(error(Code::kPeerLost, victim, "killed"));
  });
  run_ranks(num_ranks, [&](int rank) {
    Status status;
    Clock::time_point start = Clock::now();
    while (status.ok() && !(rank == victim && killed.load())) {
      start = Clock::now();
      status = ranks.call(rank);
    }
    if (rank == victim) return;
    expect_lost(status, "a peer was killed");
    EXPECT(seconds_since(start) < 5, "noticed after %g s", seconds_since(start));
    ranks.expect_broken(rank);
  });
  killer.join();
}

// One rank stops calling and says so, as close() does.
void leave_one(int num_ranks, Reach reach, uint64_t seed) {
  Ranks ranks(num_ranks, reach, 30, seed);
  const int leaver = int(mix(seed, 3) % uint64_t(num_ranks));
  run_ranks(num_ranks, [&](int rank) {
    for (int i = 0; i < 3; ++i) EXPECT_OK(ranks.call(rank));  // what was begun together ends well
    if (rank == leaver) {
      ranks.engines[size_t(rank)]->leave(PeerState::kLeft);
      return;
    }
    expect_lost(ranks.call(rank), "a peer left");
    ranks.expect_broken(rank);
  });
}

// One rank comes too late: a time-out that names it, or a peer that gave up first.
void time_out(int num_ranks, Reach reach, uint64_t seed) {
  Ranks ranks(num_ranks, reach, 0.2, seed);
  const int late = int(mix(seed, 4) % uint64_t(num_ranks));
  std::atomic<int> timed_out{0}, gone{0};
  // Others look meanwhile; what they read first is the last word.
  std::vector<std::thread> onlookers;
  for (int rank = 0; rank < num_ranks; ++rank) {
    onlookers.emplace_back([&, rank] {
      const Engine& engine = *ranks.engines[size_t(rank)];
      std::string first;
      while (gone.load() < num_ranks) {
        const Status seen = engine.broken();
        if (first.empty()) first = seen.text;
        EXPECT(seen.text == first, "'%s' became '%s'", first.c_str(), seen.text.c_str());
        std::this_thread::sleep_for(std::chrono::microseconds(200));  // ranks need the cores
      }
    });
  }
  run_ranks(num_ranks, [&](int rank) {
    EXPECT_OK(ranks.call(rank));
    if (rank == late) {
      while (gone.load() < num_ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      expect_lost(ranks.call(rank), "all peers gave up");
      ranks.expect_broken(rank);
      ++gone;
      return;
    }
    const Status status = ranks.call(rank);
    if (status.code == Code::kTimeout) {
      EXPECT(status.peer == late, "blamed rank %d, not %d: %s", status.peer, late,
             status.text.c_str());
      ++timed_out;
    } else {
      expect_lost(status, "a peer is late");
    }
    ++gone;
    ranks.expect_broken(rank);
  });
  for (std::thread& onlooker : onlookers) onlooker.join();
  EXPECT(timed_out.load() >= 1, "nobody timed out");
}

// abort() and Ctrl-C end a wait in which nothing will ever arrive.
void stop_waiting(Reach reach, uint64_t seed, bool interrupt) {
  Ranks ranks(2, reach, 30, seed);
  std::atomic<bool> pressed{false};
  host::CallContext context;
  context.interrupted = [](void* flag) {
    return int(static_cast<std::atomic<bool>*>(flag)->load());
  };
  context.interrupted_arg = &pressed;
  const Clock::time_point start = Clock::now();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (interrupt) {
      pressed.store(true);
    } else {
      ranks.engines[0]->abort(error(Code::kPeerLost, 0, "abort() was called"));
    }
  });
  const Status status = ranks.call(0, context);
  other.join();
  EXPECT(status.code == (interrupt ? Code::kInterrupted : Code::kPeerLost), "code %d: %s",
         int(status.code), status.text.c_str());
  EXPECT(seconds_since(start) < 2, "after %g s", seconds_since(start));
  ranks.expect_broken(0);
}

int main(int argc, char** argv) {
  Options options(argc, argv);
  const uint64_t seed = uint64_t(options.number("seed", 1));
  const int64_t rounds = options.number("rounds", 6);
  options.finish();
  set_deadline(240);
  for (int64_t round = 0; round < rounds; ++round) {
    for (const Reach reach : {Reach::kDirect, Reach::kFar, Reach::kMixed}) {
      const uint64_t mixed = mix(seed, uint64_t(round), uint64_t(reach));
      const int num_ranks = 2 + int(mixed % 3);
      kill_one(num_ranks, reach, mixed);
      leave_one(num_ranks, reach, mixed);
      time_out(num_ranks, reach, mixed);
      stop_waiting(reach, mixed, false);
      stop_waiting(reach, mixed, true);
    }
  }
  std::printf("%lld rounds of killed, leaving, late and stopped ranks: every wait ended\n",
              (long long)rounds);
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::main(argc, argv); }
