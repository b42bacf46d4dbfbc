// Ranks as threads: random programs of calls over every kind of transport, checked by the oracle.
//
//   engine_test [--over direct|far|mixed|shm] [--ranks N] [--seed S] [--programs N] [--steps N]
//               [--isa NAME] [--delay-us N] [--seconds N] [--plant unordered|overtake|no-quiet]

#include <memory>
#include <string>
#include <thread>

#include "fabric.hpp"
#include "host/writer.hpp"
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

// One peer whose heap only put() reaches. What is put is there at once.
class OnlyPut final : public HostTransport {
 public:
  explicit OnlyPut(uint64_t bytes) : own_(bytes / 64), theirs_(bytes / 64) {}
  std::byte* heap() noexcept override { return own_[0].bytes; }
  uint64_t heap_bytes() const noexcept override { return own_.size() * 64; }
  std::byte* peer_ptr(int, uint64_t) noexcept override { return nullptr; }
  Status put(int, int, uint64_t dst, uint64_t src, uint64_t bytes) noexcept override {
    std::memcpy(theirs() + dst, heap() + src, bytes);
    ++puts;
    return {};
  }
  Status signal(int, int, uint64_t, uint64_t) noexcept override { return {}; }
  Status quiet(int, int, const WaitSpec&) noexcept override { return {}; }
  Status wait(int, uint64_t, uint64_t, const WaitSpec&) noexcept override { return {}; }
  PeerState peer_state(int) noexcept override { return PeerState::kAlive; }
  void abort(const Status&) noexcept override {}

  std::byte* theirs() { return theirs_[0].bytes; }
  int puts = 0;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> own_, theirs_;
};

// Rows of any width, and behind them numbers, which lie aligned in staging too. What is adjacent is
// one put.
void staging(int64_t staging_bytes, bool one_piece_each) {
  HeapShape shape{};
  shape.num_ranks = 1;
  shape.num_topk = shape.num_slots = shape.num_channels = shape.max_local_experts = 1;
  shape.max_tokens_per_rank = shape.max_recv_tokens = 64;
  shape.row_bytes = 64;
  shape.staging_bytes = staging_bytes;
  const HeapLayout layout = heap_layout(shape);
  for (uint64_t width = 1; width <= 64; ++width) {
    OnlyPut transport(layout.total_bytes);
    const uint64_t rows = slot_offset(layout, 0) + layout.slot_payload;
    const uint64_t ids = slot_offset(layout, 0) + layout.slot_idx;
    {
      host::Writer writer(&transport, layout, shape, 0, {"test", "data", 1});
      for (int row = 0; row < 40; ++row) {
        std::byte* const at = writer.at(0, rows + uint64_t(row) * width, width);
        EXPECT(at, "%s", writer.status().text.c_str());
        std::memset(at, row + 1, width);
        if (row % 5 != 4) continue;
        for (int id = row - 4; id <= row; ++id) {
          std::byte* const number = writer.at(0, ids + uint64_t(id) * 4, 4);
          EXPECT(reinterpret_cast<uintptr_t>(number) % 4 == 0, "rows of %d bytes, number at %p",
                 int(width), static_cast<void*>(number));
          *reinterpret_cast<int32_t*>(number) = id + 1;
        }
      }
      EXPECT_OK(writer.flush());
    }
    for (int row = 0; row < 40; ++row) {
      int32_t id;
      std::memcpy(&id, transport.theirs() + ids + row * 4, 4);
      EXPECT(id == row + 1, "rows of %d bytes: number %d is %d", int(width), row, id);
      for (uint64_t b = 0; b < width; ++b) {
        EXPECT(transport.theirs()[rows + uint64_t(row) * width + b] == std::byte(row + 1),
               "rows of %d bytes, row %d", int(width), row);
      }
    }
    EXPECT(!one_piece_each || transport.puts == 16, "rows of %d bytes: %d puts", int(width),
           transport.puts);
  }
}

int main(int argc, char** argv) {
  staging(8192, true);
  staging(128, false);  // used again and again
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
