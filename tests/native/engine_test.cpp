// Ranks as threads: random programs of calls over every kind of transport, checked by the oracle.
//
//   engine_test [--over direct|far|mixed|shm] [--ranks N] [--seed S] [--programs N] [--steps N]
//               [--isa NAME] [--delay-us N] [--seconds N] [--plant unordered|overtake|no-quiet]

#include <memory>
#include <string>
#include <thread>

#include "fabric.hpp"
#include "rank_runner.hpp"
#include "shm/factory.hpp"

namespace epcomm::testing {
namespace {

struct Arguments {
  std::string over;
  std::string isa;
  int delay_us;
  Plant plant;
};

Plant plant_of(const std::string& name) {
  if (name == "unordered") return Plant::kUnordered;
  if (name == "overtake") return Plant::kOvertake;
  if (name == "no-quiet") return Plant::kNoQuiet;
  EXPECT(name.empty(), "--plant %s", name.c_str());
  return Plant::kNone;
}

void over_fabric(const Program& program, Reach reach, const Arguments& arguments) {
  const Config& config = program.config;
  const bool staging = reach != Reach::kDirect;
  const HeapLayout layout = heap_layout(config.shape(staging));
  FabricOptions options;
  options.num_ranks = config.num_ranks;
  options.num_channels = config.num_channels;
  options.heap_bytes = layout.total_bytes;
  options.state_word = layout.state;
  options.reach = reach;
  options.seed = config.seed;
  options.max_delay_us = arguments.delay_us;
  options.plant = arguments.plant;
  Fabric fabric(options);
  run_ranks(config.num_ranks, [&](int rank) {
    RankRunner runner(program, rank, fabric.transport(rank), staging,
                      arguments.isa.empty() ? nullptr : arguments.isa.c_str());
    runner.run();
  });
}

void over_shm(const Program& program, const Arguments& arguments) {
  const Config& config = program.config;
  const HeapLayout layout = heap_layout(config.shape(false));
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::string> infos(size_t(config.num_ranks));
  for (int rank = 0; rank < config.num_ranks; ++rank) {
    backends.push_back(shm::create({}));
    EXPECT_OK(backends.back()->alloc_heap(layout.total_bytes));
    EXPECT_OK(backends.back()->export_info(&infos[size_t(rank)]));
  }
  run_ranks(config.num_ranks, [&](int rank) {
    Backend& backend = *backends[size_t(rank)];
    EXPECT_OK(backend.connect(rank, infos, layout.state, 30));
    {
      RankRunner runner(program, rank, backend.host_transport(), false,
                        arguments.isa.empty() ? nullptr : arguments.isa.c_str());
      runner.run();
      // Nobody closes while a peer still waits for its last signal.
      EXPECT_OK(runner.engine().barrier({}));
      runner.engine().leave(PeerState::kLeft);
    }
    EXPECT_OK(backend.close());
  });
}

int main(int argc, char** argv) {
  Options options(argc, argv);
  const std::string over = options.text("over", "");
  const std::string isa = options.text("isa", "");
  const int delay_us = int(options.number("delay-us", 50));
  const Plant plant = plant_of(options.text("plant", ""));
  const int64_t programs = options.number("programs", 16), steps = options.number("steps", 40);
  const int64_t fixed_ranks = options.number("ranks", 0), first_seed = options.number("seed", 1);
  set_deadline(unsigned(options.number("seconds", 300)));
  options.finish();

  const std::vector<std::string> all = {"direct", "far", "mixed", "shm"};
  int64_t calls = 0;
  for (int64_t number = 0; number < programs; ++number) {
    const uint64_t seed = uint64_t(first_seed + number);
    const int ranks = fixed_ranks ? int(fixed_ranks) : 1 + int(mix(seed, 5) % 4);
    const Arguments arguments{over.empty() ? all[size_t(number) % all.size()] : over, isa, delay_us,
                              plant};
    const Program program = Program::random(seed, ranks, int(steps));
    std::printf("%s: %s\n", arguments.over.c_str(), program.config.text().c_str());
    std::fflush(stdout);
    if (arguments.over == "shm") {
      over_shm(program, arguments);
    } else {
      EXPECT(arguments.over == "direct" || arguments.over == "far" || arguments.over == "mixed",
             "--over %s", arguments.over.c_str());
      over_fabric(program,
                  arguments.over == "direct" ? Reach::kDirect
                  : arguments.over == "far"  ? Reach::kFar
                                             : Reach::kMixed,
                  arguments);
    }
    calls += int64_t(program.steps.size());
  }
  std::printf("%lld programs, %lld calls, all as the oracle says\n", (long long)programs,
              (long long)calls);
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::main(argc, argv); }
