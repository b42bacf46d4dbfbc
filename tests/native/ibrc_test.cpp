// The ibrc backend over the software HCA: several ranks in one process, each with proxies and NICs
// of its own.
//
//   ibrc_test [--seed S] [--puts N]

#include <dirent.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "check.hpp"
#include "ibrc/factory.hpp"
#include "put_stress.hpp"
#include "soft_ranks.hpp"

namespace epcomm::testing {
namespace {

constexpr uint64_t kState = 0;     // [rank]
constexpr uint64_t kWords = 4096;  // [channel]
constexpr uint64_t kBack = 8192;   // [channel]

// Threads of ours: a sanitizer has one of its own.
int our_threads() {
  int count = 0;
  DIR* folder = opendir("/proc/self/task");
  EXPECT(folder, "/proc/self/task");
  while (const dirent* entry = readdir(folder)) {
    char name[16] = "";
    if (FILE* file =
            std::fopen((std::string("/proc/self/task/") + entry->d_name + "/comm").c_str(), "re")) {
      if (std::fgets(name, sizeof name, file) && !std::strncmp(name, "epcomm", 6)) ++count;
      std::fclose(file);
    }
  }
  closedir(folder);
  return count;
}

struct Setup : SoftSetup {
  int threads = 0;
  uint32_t queue_size = 64;
  int (*interrupted)(void*) = nullptr;
  void* interrupted_arg = nullptr;
  std::function<void(int rank, HostTransport&)> then;  // in the thread that has connected
};

struct Ranks {
  std::vector<std::unique_ptr<ibrc::IbrcBackend>> backends;

  explicit Ranks(const Setup& setup) {
    std::vector<std::string> infos(static_cast<size_t>(setup.num_ranks));
    for (int rank = 0; rank < setup.num_ranks; ++rank) {
      ibrc::Options options;
      open_soft(setup, rank, &options.rdma);
      options.num_threads = setup.threads;
      options.queue_size = setup.queue_size;
      backends.push_back(ibrc::create(options));
      EXPECT_OK(backends.back()->alloc_heap(setup.heap_bytes));
      EXPECT_OK(backends.back()->export_info(&infos[size_t(rank)]));
    }
    run_ranks(setup.num_ranks, [&](int rank) {
      Backend& backend = *backends[size_t(rank)];  // which has the default arguments
      EXPECT_OK(backend.connect(rank, infos, kState, setup.timeout_s, setup.interrupted,
                                setup.interrupted_arg));
      if (setup.then) setup.then(rank, *backend.host_transport());
    });
  }
  HostTransport& operator[](int rank) { return *backends[size_t(rank)]->host_transport(); }
  void close() {
    run_ranks(int(backends.size()), [&](int rank) { EXPECT_OK(backends[size_t(rank)]->close()); });
  }
};

WaitSpec spec(double timeout_s = 60) { return {"test", "data", timeout_s, nullptr, nullptr}; }

void stress(uint64_t seed, int puts, Setup setup) {
  const PutStress work(setup.num_channels, puts / 2 / setup.num_channels, seed);
  setup.heap_bytes = work.heap_bytes();
  Ranks ranks(setup);
  run_ranks(2, [&](int rank) { work.run(ranks[rank], rank); });
  const ibrc::Stats stats = ranks.backends[0]->stats();
  std::printf("stress: %llu commands, %llu posts, %llu requests, %llu completions\n",
              (unsigned long long)stats.commands, (unsigned long long)stats.posts,
              (unsigned long long)stats.requests, (unsigned long long)stats.completions);
  ranks.close();
}

// A rank that leaves, breaks or gives up is told apart; what had arrived still counts.
void endings() {
  Ranks ranks({});
  EXPECT_OK(ranks[1].signal(0, 0, kWords, 1));
  EXPECT_OK(ranks[1].quiet(0, 0, spec()));
  EXPECT_OK(ranks[0].wait(1, kWords, 1, spec()));
  Status late = ranks[0].wait(1, kWords, 2, spec(0.2));
  EXPECT(late.code == Code::kTimeout && late.peer == 1, "%s", late.text.c_str());
  // Rank 1 leaves at once after its last signal: close() sends both.
  EXPECT_OK(ranks[1].signal(0, 0, kWords, 1));
  EXPECT_OK(ranks[1].quiet(0, 0, spec()));
  EXPECT_OK(ranks[1].signal(0, 2, kState + kSignalStride, uint64_t(PeerState::kLeft)));
  EXPECT_OK(ranks.backends[1]->close());
  EXPECT(!ranks.backends[1]->host_transport(), "closed");
  EXPECT_OK(ranks[0].wait(1, kWords, 2, spec()));
  const Status left = ranks[0].wait(1, kWords, 3, spec());
  EXPECT(
      left.code == Code::kPeerLost && left.peer == 1 && left.text.find("left") != std::string::npos,
      "%s", left.text.c_str());
  // What goes to a rank that left is nobody's error.
  EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 4096, kWords, 1));
  EXPECT_OK(ranks[0].quiet(1, 0, spec()));
  const auto start = Clock::now();
  EXPECT_OK(ranks.backends[0]->close());
  EXPECT_OK(ranks.backends[0]->close());
  EXPECT(seconds_since(start) < 5, "closing took %.1f s", seconds_since(start));
}

// A peer that gave up and went takes nothing any more: what it was sent then is not called done.
void broken_takes_nothing() {
  Ranks ranks({});
  EXPECT_OK(ranks[1].signal(0, 2, kState + kSignalStride, state_value(PeerState::kBroken)));
  EXPECT_OK(ranks[1].quiet(0, 2, spec()));
  const auto state = [&] { return ranks[0].peer_state(1); };
  for (const auto start = Clock::now(); state() == PeerState::kAlive;) {
    EXPECT(seconds_since(start) < 30, "it never said that it gave up");
  }
  EXPECT(state() == PeerState::kBroken, "state %d", int(state()));
  EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 4096, kWords, 1));
  EXPECT_OK(ranks[1].wait(0, kWords, 1, spec()));
  // This model of a NIC does not see that the other end is gone.
  EXPECT_OK(ranks.backends[0]->break_queue(1, 0));
  EXPECT_OK(ranks.backends[1]->close());
  const auto completions = [&] { return ranks.backends[0]->stats().completions; };
  const uint64_t before = completions();
  EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 4096, kWords, 1));
  for (const auto start = Clock::now(); completions() == before;) {  // the proxy drops it then
    EXPECT(seconds_since(start) < 60, "no completion");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const Status lost = ranks[0].quiet(1, 0, spec());
  EXPECT(lost.code == Code::kPeerLost && lost.peer == 1 &&
             lost.text.find("rank 1 gave up") != std::string::npos,
         "code %d: %s", int(lost.code), lost.text.c_str());
  ranks.close();
}

// Whoever lost its own port says so, whomever it misses.
void own_port() {
  Setup setup;
  setup.ports = 1;
  setup.timeout_s = 5;
  setup.faults = "port_down at_ms=0 for_ms=1e6";
  Ranks ranks(setup);
  EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 4096, kWords, 1));
  const Status lost = ranks[0].wait(1, kWords, 1, spec());
  EXPECT(lost.code == Code::kPeerLost && lost.peer == 1 &&
             lost.text.find("at this end soft0 port 1 is down") != std::string::npos,
         "%s", lost.text.c_str());
  ranks.close();
}

// A rank that gave up because it lost another says whom: the others name that one too.
void hearsay() {
  Setup setup;
  setup.num_ranks = 3;
  Ranks ranks(setup);
  EXPECT_OK(ranks[1].signal(0, 2, kState + kSignalStride, state_value(PeerState::kBroken, 2)));
  const Status status = ranks[0].wait(1, kWords, 1, spec());
  EXPECT(status.code == Code::kPeerLost && status.peer == 2 &&
             status.text.find("rank 1 gave up because of rank 2") != std::string::npos,
         "peer %d: %s", status.peer, status.text.c_str());
  EXPECT(ranks[0].peer_state(1) == PeerState::kBroken, "state");
  // It lost this very rank, or nobody in particular: then it is the one to name.
  EXPECT_OK(ranks[0].signal(2, 2, kState, state_value(PeerState::kBroken, 2)));
  EXPECT(ranks[2].wait(0, kWords, 1, spec()).peer == 0, "own rank");
  ranks.close();
}

// A work request that the NIC refuses: the waits of this rank name peer, queue pair and status.
void faults() {
  Setup setup;
  setup.faults = "error wqe=20 syndrome=0x15 qp=0";
  Ranks ranks(setup);
  Status lost;
  for (int i = 0; i < 200 && lost.ok(); ++i) {
    EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 64, kWords, 1));
    lost = ranks[0].quiet(1, 0, spec());
  }
  EXPECT(lost.code == Code::kPeerLost && lost.peer == 1, "code %d: %s", int(lost.code),
         lost.text.c_str());
  for (const char* part : {"rank 1 is lost", "queue pair", "retry", "status 12", "of channel 0"}) {
    EXPECT(lost.text.find(part) != std::string::npos, "'%s' lacks '%s'", lost.text.c_str(), part);
  }
  const Status wait = ranks[0].wait(1, kWords, 1, spec());
  EXPECT(wait.code == Code::kPeerLost && wait.peer == 1, "%s", wait.text.c_str());
  const Status first = ranks.backends[0]->async_error();
  EXPECT(first.code == Code::kPeerLost && first.peer == 1, "%s", first.text.c_str());
  EXPECT(ranks[0].peer_state(1) == PeerState::kDead, "state");
  const auto start = Clock::now();
  ranks.close();
  EXPECT(seconds_since(start) < 10, "closing took %.1f s", seconds_since(start));
}

// Nothing of what goes to rank 1 is ever completed: who waits for that ends by its deadline or by
// Ctrl-C and names rank 1; rank 2 gets all it is sent.
void stalled_peer() {
  Setup setup;
  setup.num_ranks = 3;
  setup.ports = 1;
  setup.queue_size = 16;
  setup.timeout_s = 1;
  setup.faults = "lose_cqe qp=0";
  std::atomic<bool> pressed{false};
  setup.interrupted = [](void* flag) { return int(static_cast<std::atomic<bool>*>(flag)->load()); };
  setup.interrupted_arg = &pressed;
  setup.then = [&](int rank, HostTransport& transport) {
    if (rank != 0) return;
    for (int i = 0; i < 16; ++i) EXPECT_OK(transport.signal(1, 0, kWords, 1));
    for (int i = 0; i < 400; ++i) EXPECT_OK(transport.put_signal(2, 0, 16384, 16384, 8, kWords, 1));
    EXPECT_OK(transport.quiet(2, 0, spec(20)));
    const Status quiet = transport.quiet(1, 0, spec(0.2));
    EXPECT(quiet.code == Code::kTimeout && quiet.peer == 1, "%s", quiet.text.c_str());
    auto start = Clock::now();
    const Status full = transport.signal(1, 0, kWords, 1);
    EXPECT(full.code == Code::kTimeout && full.peer == 1 &&
               full.text.find("command queue") != std::string::npos,
           "%s", full.text.c_str());
    EXPECT(seconds_since(start) > 0.9, "after %.3f s", seconds_since(start));
    pressed = true;
    start = Clock::now();
    const Status stopped = transport.signal(1, 0, kWords, 1);
    EXPECT(stopped.code == Code::kInterrupted, "%s", stopped.text.c_str());
    EXPECT(seconds_since(start) < 0.9, "after %.3f s", seconds_since(start));
    // Another thread hears nothing: what it was given ends it.
    Status other;
    std::thread([&] { other = transport.signal(1, 0, kWords, 1); }).join();
    EXPECT(other.code == Code::kTimeout && other.peer == 1, "%s", other.text.c_str());
    EXPECT_OK(transport.put_signal(2, 0, 16384, 16384, 8, kWords, 1));
    EXPECT_OK(transport.quiet(2, 0, spec(20)));
  };
  Ranks ranks(setup);
  EXPECT_OK(ranks[2].wait(0, kWords, 401, spec()));
  ranks.close();
}

// Bad arguments are refused here; the own rank is a peer too; nothing is left behind.
void arguments() {
  Ranks ranks({});
  HostTransport& transport = ranks[0];
  const uint64_t size = transport.heap_bytes();
  const auto refused = [](const Status& status, const char* part) {
    EXPECT(status.code == Code::kInvalidArgument && status.text.find(part) != std::string::npos,
           "code %d: %s", int(status.code), status.text.c_str());
  };
  refused(transport.put(2, 0, 0, 0, 8), "peer=2");
  refused(transport.put(-1, 0, 0, 0, 8), "peer=-1");
  refused(transport.put(1, 3, 0, 0, 8), "channel=3");
  refused(transport.put(1, 0, size, 0, 8), "leaves the heap");
  refused(transport.put(1, 0, 0, ~uint64_t(0), 8), "leaves the heap");
  refused(transport.signal(1, 0, 4, 1), "word=4");
  refused(transport.signal(1, 0, size, 1), "inside the heap");
  EXPECT(!transport.peer_ptr(1, 0) && transport.peer_ptr(0, 0) == transport.heap(), "peer_ptr");
  std::memset(transport.heap() + 16384, 7, 64);
  EXPECT_OK(transport.put_signal(0, 0, 32768, 16384, 64, kWords, 5));
  EXPECT_OK(transport.wait(0, kWords, 5, spec()));
  EXPECT(transport.heap()[32768 + 63] == std::byte(7), "own rank");
  transport.abort(error(Code::kPeerLost, -1, "enough"));
  EXPECT(transport.wait(1, kWords, 9, spec()).text == "enough", "abort");
  EXPECT_OK(transport.signal(1, 2, kWords, 1));  // a rank that gave up can still say so
  EXPECT_OK(ranks[1].wait(0, kWords, 1, spec()));
  ranks.close();
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) {
  using namespace epcomm::testing;
  Options options(argc, argv);
  const uint64_t seed = uint64_t(options.number("seed", 1));
  const int puts = int(options.number("puts", 4000));
  options.finish();
  set_deadline(300);
  const int files = open_files();
  arguments();
  endings();
  broken_takes_nothing();
  hearsay();
  own_port();
  faults();
  stalled_peer();
  {
    Ranks ranks({});
    EXPECT(our_threads() > 0, "the count counts nothing");
    ranks.close();
  }
  Setup many;
  many.num_channels = 8;
  stress(seed, puts, many);
  many.seed = seed + 1;  // the NICs do all that correct code must bear
  stress(seed, puts / 2, many);
  many.seed = 0;
  many.ports = 1;
  many.threads = 3;  // they share out the channels of one port
  many.queue_size = 2;
  many.depth = 16;
  stress(seed, puts / 4, many);
  EXPECT(open_files() == files, "descriptors are left");
  EXPECT(our_threads() == 0, "threads are left");
  std::printf("ibrc_test: ok\n");
  return 0;
}
