// The shm backend without an engine: several backends in one process, each with threads of its own.
//
//   shm_test [--seed S] [--rounds N]

#include <dirent.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>

#include "check.hpp"
#include "epcomm/heap.h"
#include "shm/factory.hpp"

namespace epcomm::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kState = 0;     // [rank]
constexpr uint64_t kWords = 4096;  // [rank][channel]
constexpr uint64_t kData = 16384;  // [rank][channel]
constexpr uint64_t kBlock = 8192;
constexpr int kChannels = 2;
constexpr uint64_t kHeapBytes = 1 << 18;

uint64_t word_of(int writer, int channel) {
  return kWords + uint64_t(writer * kChannels + channel) * kSignalStride;
}
uint64_t data_of(int writer, int channel) {
  return kData + uint64_t(writer * kChannels + channel) * kBlock;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int open_files() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  EXPECT(folder, "/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

// How long the block is that begins with this value.
uint64_t num_words(uint64_t value) { return 1 + value % (kBlock / 8); }

struct Ranks {
  std::vector<std::unique_ptr<Backend>> backends;

  explicit Ranks(int num_ranks, const shm::Options& options = {}) {
    std::vector<std::string> infos(static_cast<size_t>(num_ranks));
    for (int rank = 0; rank < num_ranks; ++rank) {
      backends.push_back(shm::create(options));
      EXPECT_OK(backends.back()->alloc_heap(kHeapBytes));
      EXPECT_OK(backends.back()->export_info(&infos[size_t(rank)]));
    }
    run_ranks(num_ranks, [&](int rank) {
      EXPECT_OK(backends[size_t(rank)]->connect(rank, infos, kState, 30));
    });
  }
  int size() const { return int(backends.size()); }
  HostTransport& operator[](int rank) { return *backends[size_t(rank)]->host_transport(); }
  void close() {
    run_ranks(size(), [&](int rank) { EXPECT_OK(backends[size_t(rank)]->close()); });
  }
};

WaitSpec spec(double timeout_s = 30) { return {"test", "data", timeout_s, nullptr, nullptr}; }

// Blocks and signals on every channel at once; a block is written again only when it was read.
void exchange(int num_ranks, int rounds, uint64_t seed) {
  Ranks ranks(num_ranks);
  run_ranks(num_ranks * kChannels, [&](int thread) {
    const int me = thread / kChannels, channel = thread % kChannels;
    HostTransport& transport = ranks[me];
    Random random(mix(seed, uint64_t(thread)));
    // The own part of the own heap, from where puts are taken.
    uint64_t* source = reinterpret_cast<uint64_t*>(transport.heap() + data_of(me, channel));
    for (int round = 1; round <= rounds; ++round) {
      const uint64_t value = mix(seed, uint64_t(me), uint64_t(channel), uint64_t(round));
      const uint64_t words = num_words(value);
      for (uint64_t i = 0; i < words; ++i) source[i] = value + i;
      for (int i = 1; i < num_ranks; ++i) {
        const int peer = (me + i) % num_ranks;
        if (random.one_in(2)) {
          EXPECT_OK(
              transport.put(peer, channel, data_of(me, channel), data_of(me, channel), words * 8));
        } else {
          std::memcpy(transport.peer_ptr(peer, data_of(me, channel)), source, words * 8);
        }
        EXPECT_OK(transport.signal(peer, channel, word_of(me, channel), 1));
      }
      for (int i = 1; i < num_ranks; ++i) {
        const int peer = (me + i) % num_ranks;
        EXPECT_OK(transport.wait(peer, word_of(peer, channel), uint64_t(2 * round - 1), spec()));
        const uint64_t want = mix(seed, uint64_t(peer), uint64_t(channel), uint64_t(round));
        const uint64_t* got =
            reinterpret_cast<const uint64_t*>(transport.heap() + data_of(peer, channel));
        for (uint64_t i = 0; i < num_words(want); ++i) {
          EXPECT(got[i] == want + i, "rank %d, round %d: word %llu of rank %d is %llx, not %llx",
                 me, round, (unsigned long long)i, peer, (unsigned long long)got[i],
                 (unsigned long long)(want + i));
        }
        EXPECT_OK(transport.signal(peer, channel, word_of(me, channel), 1));  // read
      }
      for (int i = 1; i < num_ranks; ++i) {
        const int peer = (me + i) % num_ranks;
        EXPECT_OK(transport.wait(peer, word_of(peer, channel), uint64_t(2 * round), spec()));
      }
    }
  });
  ranks.close();
}

// Sleepers are woken: a ping-pong in which somebody always waits, with pauses that put it to sleep.
void ping_pong(int rounds, uint64_t seed) {
  Ranks ranks(2);
  run_ranks(2, [&](int me) {
    Random random(mix(seed, uint64_t(me)));
    for (int round = 1; round <= rounds; ++round) {
      if (me == 0) EXPECT_OK(ranks[0].signal(1, 0, word_of(0, 0), 1));
      EXPECT_OK(ranks[me].wait(1 - me, word_of(1 - me, 0), uint64_t(round), spec()));
      if (random.one_in(8))
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
      if (me == 1) EXPECT_OK(ranks[1].signal(0, 0, word_of(1, 0), 1));
    }
  });
  ranks.close();
}

// Waits end by time-out, abort, a peer that left or broke; what had arrived still counts.
void endings() {
  Ranks ranks(3);
  Clock::time_point start = Clock::now();
  const Status late = ranks[0].wait(1, word_of(1, 0), 1, spec(0.1));
  EXPECT(late.code == Code::kTimeout && late.peer == 1, "code %d: %s", int(late.code),
         late.text.c_str());
  EXPECT(seconds_since(start) >= 0.1 && seconds_since(start) < 3, "after %g s",
         seconds_since(start));

  run_ranks(3, [&](int thread) {  // two threads wait, the third tells them to stop
    if (thread == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ranks[0].abort(error(Code::kPeerLost, 2, "told to stop"));
      return;
    }
    const Status status = ranks[0].wait(1 + thread, word_of(1 + thread, 0), 1, spec());
    EXPECT(status.code == Code::kPeerLost && status.text.find("told to stop") != std::string::npos,
           "code %d: %s", int(status.code), status.text.c_str());
  });

  std::thread waiting([&] {
    const Status status = ranks[1].wait(2, word_of(2, 0), 2, spec());
    EXPECT(status.code == Code::kPeerLost && status.peer == 2, "code %d: %s", int(status.code),
           status.text.c_str());
  });
  EXPECT_OK(ranks[2].signal(1, 0, word_of(2, 0), 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_OK(ranks[2].signal(1, 0, kState + 2 * kSignalStride, uint64_t(PeerState::kLeft)));
  waiting.join();
  EXPECT(ranks[1].peer_state(2) == PeerState::kLeft && ranks[1].peer_state(0) == PeerState::kAlive,
         "states");
  EXPECT_OK(ranks[1].wait(2, word_of(2, 0), 1, spec()));
  EXPECT_OK(ranks.backends[2]->close());
  EXPECT_OK(ranks.backends[2]->close());
  EXPECT(!ranks.backends[2]->host_transport(), "a closed backend has no transport");
  ranks.close();
}

// A wait of another thread is stopped, then the backend closed.
void close_after_abort() {
  Ranks ranks(2);
  HostTransport& transport = ranks[0];
  std::thread waiting([&] {
    const Status status = transport.wait(1, word_of(1, 0), 1, spec());
    EXPECT(!status.ok(), "a closed backend received something");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  transport.abort(error(Code::kPeerLost, 0, "closing"));
  waiting.join();
  ranks.close();
}

int main(int argc, char** argv) {
  Options options(argc, argv);
  const uint64_t seed = uint64_t(options.number("seed", 1));
  const int rounds = int(options.number("rounds", 200));
  options.finish();
  set_deadline(240);
  const Status possible = shm::probe();
  if (!possible.ok()) {
    std::printf("skipped: %s\n", possible.text.c_str());
    return 77;
  }
  {
    Ranks first(2);
  }  // what the library opens once stays open
  const int before = open_files();
  for (int num_ranks : {1, 2, 4}) exchange(num_ranks, rounds, mix(seed, uint64_t(num_ranks)));
  ping_pong(rounds * 2, seed);
  endings();
  close_after_abort();
  shm::Options plain;
  plain.use_pidfd = false;
  plain.spin_us = 0;
  for (int i = 0; i < 10; ++i) Ranks(1 + i % 3, i % 2 ? plain : shm::Options{});
  EXPECT(open_files() == before, "%d files are open, %d were", open_files(), before);
  std::printf("blocks, sleepers, endings and many lives: nothing lost, nothing left open\n");
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::main(argc, argv); }
