// The ibgda backend over the software HCA: several ranks in one process, each with NICs of its own.
//
//   ibgda_test [--seed S] [--puts N]

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>

#include "check.hpp"
#include "ibgda/factory.hpp"
#include "put_stress.hpp"
#include "scarce_memory.hpp"
#include "soft_ranks.hpp"

namespace epcomm::testing {
namespace {

constexpr uint64_t kState = 0;     // [rank]
constexpr uint64_t kWords = 4096;  // [channel]

struct Setup : SoftSetup {
  bool shared = false;
  bool failover = false;
};

ibgda::Options options_of(const Setup& setup, int rank) {
  ibgda::Options options;
  open_soft(setup, rank, &options.rdma);
  options.shared = setup.shared;
  options.failover = setup.failover;
  return options;
}

struct Ranks {
  std::vector<std::unique_ptr<ibgda::IbgdaBackend>> backends;

  explicit Ranks(const Setup& setup) {
    std::vector<std::string> infos(static_cast<size_t>(setup.num_ranks));
    for (int rank = 0; rank < setup.num_ranks; ++rank) {
      backends.push_back(ibgda::create(options_of(setup, rank)));
      EXPECT_OK(backends.back()->alloc_heap(setup.heap_bytes));
      EXPECT_OK(backends.back()->export_info(&infos[size_t(rank)]));
    }
    run_ranks(setup.num_ranks, [&](int rank) {
      Backend& backend = *backends[size_t(rank)];  // which has the default arguments
      EXPECT_OK(backend.connect(rank, infos, kState, setup.timeout_s));
    });
  }
  HostTransport& operator[](int rank) { return *backends[size_t(rank)]->host_transport(); }
  void close() {
    run_ranks(int(backends.size()), [&](int rank) { EXPECT_OK(backends[size_t(rank)]->close()); });
  }
};

WaitSpec spec(double timeout_s = 60) { return {"test", "data", timeout_s, nullptr, nullptr}; }

void stress(const char* what, uint64_t seed, int puts, Setup setup) {
  const auto start = Clock::now();
  const PutStress work(setup.num_channels, puts / 2 / setup.num_channels, seed);
  setup.heap_bytes = work.heap_bytes();
  Ranks ranks(setup);
  run_ranks(2, [&](int rank) { work.run(ranks[rank], rank); });
  const ibgda::Stats stats = ranks.backends[0]->stats();
  std::printf(
      "%s: %llu requests, %llu doorbells, %llu completions, %llu full, %llu replayed "
      "(%.1f s)\n",
      what, (unsigned long long)stats.requests, (unsigned long long)stats.doorbells,
      (unsigned long long)stats.completions, (unsigned long long)stats.full,
      (unsigned long long)stats.replayed, seconds_since(start));
  std::fflush(stdout);
  EXPECT(stats.requests > 0 && stats.doorbells <= stats.requests, "counters");
  ranks.close();
}

// Many threads on one queue pair: every addition arrives, none before its payload.
void many_threads(uint64_t seed, int puts) {
  constexpr int kThreads = 8;
  constexpr uint64_t kBlock = 512, kFrom = 16384;
  Setup setup;
  setup.shared = true;
  setup.depth = 16;
  Ranks ranks(setup);
  const int each = std::max(1, puts / 2 / kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      HostTransport& transport = ranks[0];
      const uint64_t from = kFrom + uint64_t(t) * kBlock,
                     word = kWords + uint64_t(t) * kSignalStride;
      for (int i = 1; i <= each; ++i) {
        const uint64_t value = mix(seed, uint64_t(t), uint64_t(i));
        for (uint64_t w = 0; w < kBlock / 8; ++w) {
          std::memcpy(transport.heap() + from + w * 8, &value, 8);
        }
        EXPECT_OK(transport.put_signal(1, 0, from, from, kBlock, word, 1));
        EXPECT_OK(transport.quiet(1, 0, spec()));
        EXPECT_OK(transport.wait(1, word, uint64_t(i), spec()));
      }
    });
  }
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      HostTransport& transport = ranks[1];
      const uint64_t at = kFrom + uint64_t(t) * kBlock, word = kWords + uint64_t(t) * kSignalStride;
      for (int i = 1; i <= each; ++i) {
        EXPECT_OK(transport.wait(0, word, uint64_t(i), spec()));
        const uint64_t value = mix(seed, uint64_t(t), uint64_t(i));
        for (uint64_t w = 0; w < kBlock / 8; ++w) {
          EXPECT(!std::memcmp(transport.heap() + at + w * 8, &value, 8), "thread %d, %d", t, i);
        }
        EXPECT_OK(transport.signal(0, 0, word, 1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ranks.close();
}

// A rank that leaves is told apart; what had arrived still counts; what goes to it is no error.
void endings() {
  Ranks ranks({});
  EXPECT_OK(ranks[1].signal(0, 0, kWords, 1));
  EXPECT_OK(ranks[0].wait(1, kWords, 1, spec()));
  const Status late = ranks[0].wait(1, kWords, 2, spec(0.2));
  EXPECT(late.code == Code::kTimeout && late.peer == 1, "%s", late.text.c_str());
  // Rank 1 leaves at once after a put that nobody pushed: close() sends all.
  std::memset(ranks[1].heap() + 16384, 7, 64);
  EXPECT_OK(ranks[1].signal(0, 0, kWords, 1));
  EXPECT_OK(ranks[1].put(0, 1, 32768, 16384, 64));
  EXPECT_OK(ranks[1].signal(0, 2, kState + kSignalStride, uint64_t(PeerState::kLeft)));
  EXPECT_OK(ranks.backends[1]->close());
  EXPECT(!ranks.backends[1]->host_transport(), "closed");
  EXPECT_OK(ranks[0].wait(1, kWords, 2, spec()));
  EXPECT(ranks[0].heap()[32768 + 63] == std::byte(7), "close() lost a put");
  const Status left = ranks[0].wait(1, kWords, 3, spec());
  EXPECT(
      left.code == Code::kPeerLost && left.peer == 1 && left.text.find("left") != std::string::npos,
      "%s", left.text.c_str());
  for (int i = 0; i < 300; ++i) EXPECT_OK(ranks[0].put(1, 0, 16384, 16384, 4096));
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
  EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 4096, kWords, 1));
  for (int i = 0; i < 3; ++i) {  // before the completion comes, and after
    const Status lost = ranks[0].quiet(1, 0, spec());
    EXPECT(lost.code == Code::kPeerLost && lost.peer == 1 &&
               lost.text.find("rank 1 gave up") != std::string::npos,
           "code %d: %s", int(lost.code), lost.text.c_str());
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ranks.close();
}

// A work request that the NIC refuses: waits of this rank name peer, queue pairs, syndrome, reason.
void faults(bool shared) {
  const std::pair<const char*, const char*> rows[] = {
      {"error wqe=20 syndrome=0x15 qp=0", "transport retry counter exceeded (syndrome 0x15"},
      {"error wqe=21 syndrome=0x13 qp=0", "remote access error (syndrome 0x13"},
      {"error wqe=22 syndrome=0x05 qp=0; flush_once", "work request flushed (syndrome 0x05"},
  };
  for (const auto& [plan, reason] : rows) {
    Setup setup;
    setup.faults = plan;
    setup.shared = shared;
    Ranks ranks(setup);
    Status lost;
    for (int i = 0; i < 200 && lost.ok(); ++i) {
      EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 64, kWords, 1));
      lost = ranks[0].quiet(1, 0, spec());
    }
    EXPECT(lost.code == Code::kPeerLost && lost.peer == 1, "code %d: %s", int(lost.code),
           lost.text.c_str());
    for (const char* part :
         {"rank 1 is lost", "queue pair", "of channel 0 (soft0 port 1)", "planned", reason}) {
      EXPECT(lost.text.find(part) != std::string::npos, "'%s' lacks '%s'", lost.text.c_str(), part);
    }
    const Status wait = ranks[0].wait(1, kWords, 1, spec());
    EXPECT(wait.code == Code::kPeerLost && wait.peer == 1, "%s", wait.text.c_str());
    const Status first = ranks.backends[0]->async_error();
    EXPECT(first.code == Code::kPeerLost && first.peer == 1, "%s", first.text.c_str());
    const auto start = Clock::now();
    ranks.close();
    EXPECT(seconds_since(start) < 10, "closing took %.1f s", seconds_since(start));
  }
}

// A completion that never comes: the deadline ends the wait, naming the phase and the peer.
void silence() {
  Setup setup;
  setup.faults = "lose_cqe";
  setup.timeout_s = 1;
  Ranks ranks(setup);
  EXPECT_OK(ranks[0].signal(1, 0, kWords, 1));
  EXPECT_OK(ranks[1].wait(0, kWords, 1, spec()));
  const Status late = ranks[0].quiet(1, 0, spec(0.3));
  EXPECT(late.code == Code::kTimeout && late.peer == 1, "%s", late.text.c_str());
  Status full;
  for (int i = 0; i < 100 && full.ok(); ++i) full = ranks[0].signal(1, 0, kWords, 1);
  EXPECT(full.code == Code::kTimeout && full.text.find("send queue") != std::string::npos, "%s",
         full.text.c_str());
  ranks.close();
}

// Port 0 of rank 0 dies for good: without failover the peer is lost, with its name; with it, all
// that was under way goes over port 1.
void port_down(uint64_t seed, bool failover) {
  Setup setup;
  setup.num_channels = 4;
  setup.failover = failover;
  setup.faults = "port_down port=0 at_ms=30 for_ms=1e6";
  setup.timeout_s = 3;  // which sets the retries
  const PutStress work(setup.num_channels, failover ? 3000 : 1, seed);
  setup.heap_bytes = work.heap_bytes();
  Ranks ranks(setup);
  if (failover) {
    run_ranks(2, [&](int rank) { work.run(ranks[rank], rank); });
    const ibgda::Stats stats = ranks.backends[0]->stats();
    std::printf("failover: %llu work requests replayed\n", (unsigned long long)stats.replayed);
    EXPECT(stats.replayed > 0, "nothing was replayed");
    EXPECT_OK(ranks.backends[0]->async_error());
  } else {
    Status lost;
    const auto start = Clock::now();
    while (lost.ok() && seconds_since(start) < 60) {
      EXPECT_OK(ranks[0].put_signal(1, 0, 1 << 16, 1 << 16, 64, kWords, 1));
      lost = ranks[0].quiet(1, 0, spec());
    }
    EXPECT(lost.code == Code::kPeerLost && lost.peer == 1 &&
               lost.text.find("the port is down") != std::string::npos,
           "code %d: %s", int(lost.code), lost.text.c_str());
  }
  ranks.close();
}

// What was carried out before the work request that failed is not written again: the peer may have
// used that memory for something else since.
void nothing_twice() {
  constexpr uint64_t kFrom = 1 << 16, kTo = 1 << 17;
  Setup setup;
  setup.num_channels = 1;
  setup.failover = true;
  setup.faults = "error port=0 qp=0 wqe=4 syndrome=0x15";
  Ranks ranks(setup);
  for (uint64_t i = 0; i < 4; ++i) {  // none asks for a completion, and they cannot be merged
    EXPECT_OK(ranks[0].put(1, 0, kTo + 128 * i, kFrom, 64));
  }
  EXPECT_OK(ranks[0].signal(1, 0, kWords, 1));
  EXPECT_OK(ranks[0].quiet(1, 0, spec()));
  EXPECT_OK(ranks[1].wait(0, kWords, 1, spec()));
  const uint64_t replayed = ranks.backends[0]->stats().replayed;
  EXPECT(replayed == 1, "%llu work requests replayed", (unsigned long long)replayed);
  ranks.close();
}

// Carried out, but the acknowledgements are lost. Whoever saw the signal works in those bytes: they
// stay, no signal goes back, and what nobody was told of comes over the other port. `unheard`: the
// first work request without an acknowledgement; `count` are carried out. A put and its signal are
// two.
void consumed_stay(uint64_t seed, int unheard, int count) {
  constexpr uint64_t kFrom = 1 << 16, kTo = 1 << 17, kStride = 1024;
  constexpr int kCalls = 12, kMore = 4;
  Setup setup;
  setup.num_channels = 1;
  setup.failover = true;
  setup.faults = "no_ack port=0 qp=0 us=200000 wqe=" + std::to_string(unheard) +
                 " count=" + std::to_string(count);
  Ranks ranks(setup);
  std::byte* const here = ranks[0].heap();
  std::byte* const there = ranks[1].heap();
  std::atomic<bool> stop{false};
  std::thread watch([&] {
    const auto* const word = reinterpret_cast<const uint64_t*>(there + kWords);
    for (uint64_t last = 0; !stop;) {
      const uint64_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      EXPECT(now >= last, "the signal went back from %d to %d", int(last), int(now));
      last = now;
    }
  });
  const auto byte_of = [&](int i) { return std::byte(mix(seed, uint64_t(i)) | 1); };
  std::thread receiver([&] {
    for (int i = 0; i < kCalls + kMore; ++i) {
      EXPECT_OK(ranks[1].wait(0, kWords, uint64_t(i + 1), spec()));
      std::byte* const row = there + kTo + uint64_t(i) * kStride;
      for (uint64_t b = 0; b < 512; ++b) EXPECT(row[b] == byte_of(i), "row %d", i);
      std::memset(row, 0, 512);
    }
  });
  for (int i = 0; i < kCalls + kMore; ++i) {
    if (i == kCalls) EXPECT_OK(ranks[0].quiet(1, 0, spec()));  // that ends over the spare
    const uint64_t at = uint64_t(i) * kStride;
    std::memset(here + kFrom + at, int(byte_of(i)), 512);
    EXPECT_OK(ranks[0].put_signal(1, 0, kTo + at, kFrom + at, 512, kWords, 1));
  }
  EXPECT_OK(ranks[0].quiet(1, 0, spec()));
  receiver.join();
  stop = true;
  watch.join();
  for (uint64_t b = 0; b < (kCalls + kMore) * kStride; ++b) {
    EXPECT(there[kTo + b] == std::byte(0), "byte %d of row %d was written again", int(b % kStride),
           int(b / kStride));
  }
  const ibgda::Stats stats = ranks.backends[0]->stats();
  const int signalled = (unheard + count) / 2 * 2;  // of what was carried out
  EXPECT(int(stats.replayed) == std::max(0, 2 * kCalls - signalled), "%d replayed after %d",
         int(stats.replayed), signalled);
  EXPECT(stats.moved == 1, "%d moved", int(stats.moved));
  EXPECT_OK(ranks.backends[0]->async_error());
  ranks.close();
}

// One queue pair gives up: the others between the same ports move before their own time comes.
void others_move() {
  Setup setup;
  setup.num_channels = 6;  // 0, 2, 4 and control on port 0
  setup.failover = true;
  setup.faults = "error port=0 qp=0 wqe=3 syndrome=0x15; no_ack port=0 qp=1 wqe=3 count=3 us=1e9";
  Ranks ranks(setup);
  const auto start = Clock::now();
  const auto round = [&](uint64_t i) {
    for (int channel = 0; channel < setup.num_channels; ++channel) {
      const uint64_t word = kWords + uint64_t(channel) * kSignalStride;
      const uint64_t at = (1 << 16) + uint64_t(channel) * 64;
      EXPECT_OK(ranks[0].put_signal(1, channel, at, at, 64, word, 1));
    }
    for (int channel = 0; channel < setup.num_channels; ++channel) {
      const uint64_t word = kWords + uint64_t(channel) * kSignalStride;
      EXPECT_OK(ranks[0].quiet(1, channel, spec()));
      EXPECT_OK(ranks[1].wait(0, word, i, spec()));
    }
  };
  for (uint64_t i = 1; i <= 4; ++i) round(i);
  EXPECT(seconds_since(start) < 60, "%.1f s", seconds_since(start));
  const uint64_t moved = ranks.backends[0]->stats().moved;
  EXPECT(moved == 4, "%llu moved", (unsigned long long)moved);
  EXPECT_OK(ranks.backends[0]->async_error());
  ranks.close();
}

// Completions that never come, and more threads than room: all of them end by the deadline.
void crowded_silence() {
  constexpr int kThreads = 12;
  Setup setup;
  setup.shared = true;
  setup.depth = 8;
  setup.faults = "lose_cqe";
  setup.timeout_s = 1;
  Ranks ranks(setup);
  const auto start = Clock::now();
  std::atomic<int> posted{0};
  run_ranks(kThreads, [&](int) {
    Status full;
    while (full.ok() && seconds_since(start) < 30) {
      full = ranks[0].signal(1, 0, kWords, 1);
      if (full.ok()) ++posted;
    }
    EXPECT(full.code == Code::kTimeout && full.text.find("send queue") != std::string::npos, "%s",
           full.text.c_str());
  });
  EXPECT(posted == 8, "%d posted", posted.load());
  ranks.close();
}

// Signals that replace others are sums. Where there is no memory for one, the peer is lost, with
// the reason; this process goes on.
void no_memory() {
  Setup setup;
  setup.failover = true;
  Ranks ranks(setup);
  EXPECT_OK(ranks[0].put_signal(1, 0, 16384, 16384, 64, kWords, 1));
  EXPECT_OK(ranks[0].quiet(1, 0, spec()));
  refused_bytes_here = sizeof(std::pair<void*, std::pair<uint64_t, uint64_t>>);  // a node of a map
  const Status posted = ranks[0].signal(1, 0, kWords + kSignalStride, 1);
  refused_bytes_here = 0;
  EXPECT_OK(posted);
  for (const Status& lost : {ranks[0].quiet(1, 0, spec()), ranks[0].wait(1, kWords, 1, spec())}) {
    EXPECT(lost.code == Code::kPeerLost && lost.peer == 1 &&
               lost.text.find("no memory") != std::string::npos,
           "code %d: %s", int(lost.code), lost.text.c_str());
  }
  EXPECT_OK(ranks[1].wait(0, kWords, 1, spec()));
  const auto* const word =
      reinterpret_cast<const uint64_t*>(ranks[1].heap() + kWords + kSignalStride);
  EXPECT(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0, "a signal without its sum was sent");
  ranks.close();
}

// Any one piece of memory that is not to be had while a rank is set up: an error, nothing left
// over.
void setup_without_memory() {
  bool whole = false;
  for (int64_t pieces = 0; !whole; ++pieces) {
    Setup setup;
    setup.failover = pieces % 2 != 0;
    const ibgda::Options options = options_of(setup, 0);
    std::string info;
    pieces_left = pieces;
    const auto backend = ibgda::create(options);
    Status made = backend ? backend->alloc_heap(1 << 16) : Status{};
    if (backend && made.ok()) made = backend->export_info(&info);
    whole = pieces_left > 0;
    pieces_left = -1;
    if (!backend) continue;
    // What is read from /proc is only a hint: it may do without.
    EXPECT(made.ok() || made.code == Code::kOutOfMemory, "after %d: code %d: %s", int(pieces),
           int(made.code), made.text.c_str());
    EXPECT_OK(backend->close());
  }
  whole = false;
  for (int64_t pieces = 0; !whole; pieces += 5) {
    std::unique_ptr<ibgda::IbgdaBackend> backends[2];
    std::vector<std::string> infos(2);
    for (int rank = 0; rank < 2; ++rank) {
      backends[rank] = ibgda::create(options_of({}, rank));
      EXPECT_OK(backends[rank]->alloc_heap(1 << 16));
      EXPECT_OK(backends[rank]->export_info(&infos[size_t(rank)]));
    }
    run_ranks(2, [&](int rank) {
      Backend& backend = *backends[rank];
      if (rank == 0) pieces_left = pieces;
      const Status connected = backend.connect(rank, infos, kState, 5);
      if (rank != 0) return;
      whole = pieces_left > 0;
      pieces_left = -1;
      EXPECT(!whole || connected.ok(), "after %d: %s", int(pieces), connected.text.c_str());
    });
    for (const auto& backend : backends) EXPECT_OK(backend->close());
  }
}

// One of many threads stops in the middle of posting: with a number taken, or while it tells the
// NIC. The others' work is not called done, and nobody waits for it longer than the deadline.
// `abort`: it is called meanwhile, and ends the wait long before.
void stopped_thread([[maybe_unused]] bool abort) {
#ifndef __SANITIZE_THREAD__  // which puts signals off until a thread is in the middle of nothing
  static std::atomic<bool> stopped, go_on;
  struct sigaction action{};
  action.sa_handler = [](int) {
    stopped = true;
    while (!go_on) sched_yield();
  };
  EXPECT(sigaction(SIGUSR1, &action, nullptr) == 0, "sigaction");
  const auto start = Clock::now();
  int lost = 0;
  while (lost < 4 && seconds_since(start) < 60) {  // where it stops is chance
    stopped = go_on = false;
    Setup setup;
    setup.shared = true;
    setup.timeout_s = abort ? 60 : 1;  // of setting up too
    Ranks ranks(setup);
    std::atomic<bool> end{false};
    std::thread other([&] {
      while (!end && ranks[0].signal(1, 0, kWords, 1).ok()) {
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    pthread_kill(other.native_handle(), SIGUSR1);
    while (!stopped) sched_yield();
    (void)ranks[0].quiet(1, 0, spec(0.05));  // completions of what was there before are taken
    std::thread aborts;
    if (abort) {
      aborts = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ranks[0].abort(error(Code::kPeerLost, -1, "enough"));
      });
    }
    const auto began = Clock::now();
    const Status posted = ranks[0].signal(1, 0, kWords + kSignalStride, 1);
    const double took = seconds_since(began);
    EXPECT(!abort || took < 20, "abort() ended it after %.1f s", took);
    if (abort) aborts.join();
    const Status done = ranks[0].quiet(1, 0, spec(5));
    if (abort) {
      // In the middle the other holds up this one, which waits until abort().
      EXPECT(done.code == Code::kPeerLost && done.text == "enough", "code %d: %s", int(done.code),
             done.text.c_str());
      lost += took > 0.4;
    } else if (!posted.ok()) {  // nobody else takes completions while it does
      EXPECT(posted.code == Code::kTimeout, "code %d: %s", int(posted.code), posted.text.c_str());
    } else if (done.ok()) {
      EXPECT_OK(ranks[1].wait(0, kWords + kSignalStride, 1, spec(2)));
    } else {
      ++lost;
      EXPECT(done.code == Code::kPeerLost && done.peer == 1 &&
                 done.text.find("did not post it within 1 s") != std::string::npos,
             "code %d: %s", int(done.code), done.text.c_str());
    }
    end = go_on = true;
    other.join();
    ranks.close();
  }
  EXPECT(lost > 0, "it never stopped in the middle");
#endif
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
  endings();
  broken_takes_nothing();
  faults(false);
  faults(true);
  silence();
  many_threads(seed, puts);
  Setup many;
  many.num_channels = 8;
  stress("alone", seed, puts, many);
  many.seed = seed + 1;  // the NICs do all that correct code must bear
  stress("alone, disorder", seed, puts / 2, many);
  many.shared = true;
  stress("shared, disorder", seed, puts / 2, many);
  many.seed = 0;
  many.shared = false;
  many.ports = 1;
  many.depth = 8;
  stress("small queues", seed, puts / 4, many);
  many.failover = true;  // one port: nothing to fall back on
  stress("failover, one port", seed, puts / 4, many);
  many.ports = 3;
  many.seed = seed + 2;
  stress("failover, unused", seed, puts / 4, many);
  port_down(seed, false);
  port_down(seed, true);
  nothing_twice();
  // Nothing more, a put, or much more gets through; from the first one on, or later.
  for (const auto& [unheard, count] :
       {std::pair(0, 1), {1, 1}, {1, 1000}, {2, 5}, {6, 2}, {23, 1}}) {
    consumed_stay(seed, unheard, count);
  }
  others_move();
  crowded_silence();
  no_memory();
  setup_without_memory();
  stopped_thread(false);
  stopped_thread(true);
  EXPECT(open_files() == files, "descriptors are left");
  std::printf("ibgda_test: ok\n");
  return 0;
}
