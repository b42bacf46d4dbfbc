// The proxy of `ibrc` over a scripted NIC: the command ring, credits, batches, merges, signals,
// errors, and an end that comes whatever is under way.
//
//   proxy_test [--seed S] [--ops N]

#include "ibrc/proxy.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "check.hpp"
#include "scripted_nic.hpp"
#include "scripted_verbs.hpp"

// While set, the nodes in which a queue keeps sums of words find no memory: nothing else here is of
// their size.
static std::atomic<bool> fail_nodes{false};

[[gnu::noinline]] void* operator new(size_t bytes) {
  if (bytes == sizeof(std::pair<void*, std::pair<uint64_t, uint64_t>>) && fail_nodes) {
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace epcomm::testing {
namespace {

using ibrc::Channel;
using ibrc::HostRing;
using ibrc::Proxy;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Command random_command(Random& random) {
  Command command;
  command.op = uint32_t(random.between(1, 3));
  command.flags = 0;
  command.peer = int32_t(random.below(65536));
  command.bytes = uint32_t(random.next());
  command.src = random.next();
  command.dst = random.next();
  command.word = random.next();
  command.add = random.next();
  return command;
}

bool equal(const Command& a, const Command& b) {
  return a.op == b.op && a.flags == b.flags && a.peer == b.peer && a.bytes == b.bytes &&
         a.src == b.src && a.dst == b.dst && a.word == b.word && a.add == b.add;
}

// Every field survives; a slot is whole only when all quarters carry the tag of this lap.
void codec(uint64_t seed) {
  Random random(seed);
  for (int i = 0; i < 20000; ++i) {
    const Command command = random_command(random);
    const uint32_t tag = uint32_t(random.next());
    const CommandSlot slot = encode_command(command, tag);
    Command back{};
    EXPECT(decode_command(slot, tag, &back) && equal(command, back), "round trip %d", i);
    EXPECT(!decode_command(slot, tag + 1, &back), "another lap's tag");
    // Quarters of the lap before and of this one: whole only if all are new.
    const CommandSlot old = encode_command(random_command(random), tag - 1);
    for (int mask = 0; mask < 15; ++mask) {
      CommandSlot mixed = old;
      for (int q = 0; q < 4; ++q) {
        if (mask >> q & 1) mixed.quarter[q] = slot.quarter[q];
      }
      EXPECT(!decode_command(mixed, tag, &back), "torn slot with quarters %x", unsigned(mask));
    }
  }
  // Zeroed memory is no command of the first laps.
  const CommandSlot zero{};
  Command none{};
  for (uint64_t k = 0; k < 64; ++k) {
    EXPECT(!decode_command(zero, command_tag(k, 8), &none), "slot %d of zeros", int(k));
  }
}

// A writer that stores the quarters of a slot in any order, with pauses, beside a reader.
void torn_ring(uint64_t seed, int ops) {
  constexpr uint32_t kSize = 8;
  ibrc::RingMemory ring(kSize);
  std::atomic<uint64_t> taken{0};
  std::thread writer([&] {
    Random random(seed);
    for (uint64_t k = 0; k < uint64_t(ops); ++k) {
      while (!HostRing::has_room(k, taken.load(std::memory_order_acquire), kSize)) {
        std::this_thread::yield();
      }
      Random contents(mix(seed, k));
      const CommandSlot slot = encode_command(random_command(contents), command_tag(k, kSize));
      int order[4] = {0, 1, 2, 3};
      for (int i = 3; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
      for (int q : order) {
        ibrc::HostMemory::store_quarter(&ring.slots[k % kSize].quarter[q], slot.quarter[q]);
        if (random.one_in(16)) std::this_thread::yield();
      }
    }
  });
  for (uint64_t k = 0; k < uint64_t(ops); ++k) {
    Command got;
    while (!HostRing::read(ring.slots, kSize, k, &got)) std::this_thread::yield();
    Random contents(mix(seed, k));
    EXPECT(equal(got, random_command(contents)), "command %d is torn", int(k));
    Command again;
    EXPECT(!HostRing::read(ring.slots, kSize, k + kSize, &again), "a command read a lap early");
    taken.store(k + 1, std::memory_order_release);
  }
  writer.join();
}

struct Shape {
  int peers = 1;
  int channels = 1;
  uint32_t depth = 16;
  int cq_depth = 0;  // 0: of all its queues together
  uint32_t max_atomics = 16;
  int max_delay = 0;
  uint32_t ring = 64;
  uint64_t heap_bytes = 1 << 16;
  bool cq_per_queue = false;
  int64_t probe_ns = 1000 * 1000 * 1000;
};

// Rank 0 and its proxy; peers are heaps that the NIC writes.
struct Rig : ibrc::ProxyEvents {
  Rig(const Shape& shape_, uint64_t seed) : shape(shape_), nic(seed, shape_.max_delay) {
    heap.resize(shape.heap_bytes);
    remote.assign(size_t(shape.peers) + 1, std::vector<std::byte>(shape.heap_bytes));
    for (int c = 0; c < shape.channels; ++c) {
      // Producers' tables hold a peer more, so that tests can write commands for one that is not.
      channels.push_back(std::make_unique<Channel>(c, shape.peers + 2, shape.ring));
    }
    const int num_queues = shape.peers * shape.channels;
    rdma.resize(size_t(num_queues));
    const int depth = shape.cq_depth ? shape.cq_depth : num_queues * int(shape.depth);
    ScriptedNic::Cq* cq = nic.add_cq(depth);
    for (int c = 0; c < shape.channels; ++c) {
      setup.channels.push_back(channels[size_t(c)].get());
      for (int peer = 1; peer <= shape.peers; ++peer) {
        if (shape.cq_per_queue && !qps.empty()) cq = nic.add_cq(int(shape.depth));
        qps.push_back(nic.add_qp(cq, shape.depth, shape.max_atomics));
        common::RdmaQueue& queue = rdma[qps.size() - 1];
        queue.qp = qps.back();
        queue.cq = cq;
        queue.peer = peer;
        queue.channel = c;
        queue.path = 0;
        queue.device = "mlx5_7";
        queue.port = 2;
        queue.depth = shape.depth;
        queue.max_inline = 28;
        queue.max_message = 1u << 30;
        queue.max_rd_atomic = shape.max_atomics;
        queue.lkey = kLkey;
        queue.remote_heap = reinterpret_cast<uint64_t>(remote[size_t(peer)].data());
        queue.data_rkey = kDataRkey;
        queue.signal_rkey = kSignalRkey;
        queue.remote_qpn = 900 + uint32_t(qps.size());
        setup.queues.push_back({&queue, reinterpret_cast<uint64_t>(&sink), kSinkLkey, c == 0});
      }
    }
    setup.rank = 0;
    setup.num_ranks = shape.peers + 1;
    setup.heap = heap.data();
    setup.heap_bytes = heap.size();
    setup.provider = &provider;
    setup.events = this;
    setup.room = &room;
    setup.probe_ns = shape.probe_ns;
    proxy = std::make_unique<Proxy>(setup);
  }

  void start() { EXPECT_OK(proxy->start(0)); }

  void send(int channel, const Command& command) {
    Channel& ring = *channels[size_t(channel)];
    const auto start = Clock::now();
    while (!ring.has_room(command.peer)) {
      EXPECT(seconds_since(start) < 20, "no room for peer %d", command.peer);
      std::this_thread::yield();
    }
    ring.write(command);
    proxy->wake();
  }
  void put(int channel, int peer, uint64_t dst, uint64_t src, uint32_t bytes) {
    send(channel, {kCommandPut, 0, peer, bytes, src, dst, 0, 0});
  }
  void signal(int channel, int peer, uint64_t word, uint64_t add = 1) {
    send(channel, {kCommandSignal, 0, peer, 0, 0, 0, word, add});
  }
  void put_signal(int channel, int peer, uint64_t dst, uint64_t src, uint32_t bytes, uint64_t word,
                  uint64_t add = 1) {
    send(channel, {kCommandPutSignal, 0, peer, bytes, src, dst, word, add});
  }
  void quiet(int channel, int peer, double limit_s = 60) {
    Channel& ring = *channels[size_t(channel)];
    const auto start = Clock::now();
    while (ring.completed(peer) < ring.issued_to(peer)) {
      EXPECT(seconds_since(start) < limit_s, "channel %d, peer %d: %d of %d", channel, peer,
             int(ring.completed(peer)), int(ring.issued_to(peer)));
      std::this_thread::yield();
    }
  }
  uint64_t word(int peer, uint64_t offset) {
    return __atomic_load_n(reinterpret_cast<uint64_t*>(remote[size_t(peer)].data() + offset),
                           __ATOMIC_ACQUIRE);
  }
  ScriptedNic::Qp& qp(int channel, int peer) {
    return *qps[size_t(channel * shape.peers + peer - 1)];
  }
  uint64_t count(std::atomic<uint64_t> ibrc::ProxyStats::* counter) const {
    return (proxy->stats().*counter).load();
  }

  // ProxyEvents
  void peer_lost(int peer, const std::string& why) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    lost.push_back({peer, why});
    counted_at_error.push_back(channels[0]->completed(peer));
  }
  void broken(const Status& why) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    bad.push_back(why);
    counted_at_error.push_back(channels[0]->completed(1));
  }
  bool waited_for(int peer) noexcept override { return waited == peer; }

  const Shape shape;
  ScriptedNic nic;
  ScriptedVerbs provider{{}};
  std::vector<std::byte> heap;
  std::vector<std::vector<std::byte>> remote;
  std::vector<std::unique_ptr<Channel>> channels;
  std::vector<common::RdmaQueue> rdma;
  std::vector<ScriptedNic::Qp*> qps;
  uint64_t sink = 0;
  common::Bell room{};
  Proxy::Setup setup;
  std::mutex mutex;
  std::vector<std::pair<int, std::string>> lost;
  std::vector<Status> bad;
  std::vector<uint64_t> counted_at_error;  // what waits saw as carried out when an error was told
  std::atomic<int> waited{-1};
  std::unique_ptr<Proxy> proxy;  // goes first
};

// B49: depth 16, one CQ of 16 for three queue pairs, completions late; 1,000 writes. The NIC ends
// the program if more is under way than fits.
void back_pressure(uint64_t seed) {
  for (int cq_depth : {16, 0}) {
    Shape shape;
    shape.peers = 3;
    shape.cq_depth = cq_depth;
    shape.max_delay = 40;
    Rig rig(shape, seed);
    rig.start();
    Random random(seed);
    std::vector<uint64_t> sent(4);
    for (int i = 0; i < 1000; ++i) {
      const int peer = 1 + int(random.below(3));
      // Every second byte place, so that nothing merges.
      rig.put(0, peer, uint64_t(i) * 16, uint64_t(i) * 24, 8);
      ++sent[size_t(peer)];
    }
    for (int peer = 1; peer <= 3; ++peer) rig.quiet(0, peer);
    rig.proxy->stop();
    for (int peer = 1; peer <= 3; ++peer) {
      const ScriptedNic::Qp& qp = rig.qp(0, peer);
      EXPECT(qp.executed == sent[size_t(peer)] && qp.posted == qp.executed && qp.flight.empty(),
             "peer %d: %d of %d carried out", peer, int(qp.executed), int(sent[size_t(peer)]));
      EXPECT(qp.most <= 16, "%u under way", qp.most);
    }
    EXPECT(rig.channels[0]->done() == 1000 && rig.channels[0]->idle(), "each done once");
    EXPECT(rig.lost.empty() && rig.count(&ibrc::ProxyStats::stalls) > 0, "it never had to wait");
  }
}

// What waits when the thread looks is one list; neighbours are one write.
void batches(uint64_t seed) {
  Shape shape;
  shape.depth = 128;
  shape.ring = 128;
  Rig rig(shape, seed);
  for (size_t i = 0; i < rig.heap.size(); ++i) rig.heap[i] = std::byte(mix(seed, i));
  // 16 rows that are neighbours, then 8 that are not, then 8 neighbours with a signal each.
  for (uint64_t i = 0; i < 16; ++i) rig.put(0, 1, 4096 + i * 64, 8192 + i * 64, 64);
  for (uint64_t i = 0; i < 8; ++i) rig.put(0, 1, 16384 + i * 128, 16384 + i * 64, 64);
  rig.start();
  rig.quiet(0, 1);
  rig.proxy->stop();
  ScriptedNic::Qp& qp = rig.qp(0, 1);
  EXPECT(rig.count(&ibrc::ProxyStats::commands) == 24, "commands");
  EXPECT(rig.count(&ibrc::ProxyStats::posts) == 1 && qp.lists == 1, "%u posts", qp.lists);
  EXPECT(rig.count(&ibrc::ProxyStats::merged) == 15, "merged");
  EXPECT(rig.count(&ibrc::ProxyStats::bytes) == 24 * 64, "bytes");
  EXPECT(qp.sizes.size() == 9 && qp.sizes[0] == 16 * 64, "%d writes", int(qp.sizes.size()));
  EXPECT(rig.count(&ibrc::ProxyStats::completions) == 1, "one completion for all");
  EXPECT(!std::memcmp(rig.remote[1].data() + 4096, rig.heap.data() + 8192, 16 * 64), "bytes");
  for (uint64_t i = 0; i < 8; ++i) {
    EXPECT(
        !std::memcmp(rig.remote[1].data() + 16384 + i * 128, rig.heap.data() + 16384 + i * 64, 64),
        "row %d", int(i));
  }

  // A signal between neighbours keeps them apart; empty puts are done, and move nothing.
  Rig second(shape, seed);
  second.put(0, 1, 0, 0, 0);
  for (uint64_t i = 0; i < 4; ++i) second.put_signal(0, 1, 4096 + i * 64, 4096 + i * 64, 64, 1024);
  second.put(0, 1, 0, 0, 0);
  second.start();
  second.quiet(0, 1);
  second.proxy->stop();
  EXPECT(second.qp(0, 1).sizes.size() == 8, "%d requests", int(second.qp(0, 1).sizes.size()));
  EXPECT(second.word(1, 1024) == 4 && second.channels[0]->done() == 6, "signals");

  Rig third(shape, seed);
  third.put(0, 1, 0, 0, 0);
  third.start();
  third.quiet(0, 1);
  EXPECT(third.count(&ibrc::ProxyStats::posts) == 0, "nothing to post");
}

// Atomics under way never exceed what the device has; without any, sums are written in order.
void signals(uint64_t seed) {
  for (uint32_t max_atomics : {0u, 1u, 2u, 16u}) {
    Shape shape;
    shape.peers = 2;
    shape.max_atomics = max_atomics;
    shape.max_delay = 5;
    Rig rig(shape, seed);
    rig.start();
    Random random(seed);
    uint64_t sum[3][4] = {};
    for (int i = 0; i < 600; ++i) {
      const int peer = 1 + int(random.below(2)), which = int(random.below(4));
      const uint64_t add = random.one_in(8) ? random.next() : 1;
      rig.put_signal(0, peer, uint64_t(4096 + i * 8), uint64_t(4096 + i * 16), 8,
                     uint64_t(which * 64), add);
      sum[peer][which] += add;
    }
    for (int peer = 1; peer <= 2; ++peer) {
      rig.quiet(0, peer);
      for (int which = 0; which < 4; ++which) {
        EXPECT(rig.word(peer, uint64_t(which * 64)) == sum[peer][which], "max_rd_atomic %u",
               max_atomics);
      }
    }
    rig.proxy->stop();
    EXPECT(rig.qp(0, 1).most_atomics <= max_atomics, "atomics");
  }
}

// The first bad completion is told once, with all that names it; what waits is dropped, other peers
// go on.
void errors(uint64_t seed) {
  Shape shape;
  shape.peers = 2;
  shape.max_delay = 10;
  Rig rig(shape, seed);
  rig.nic.fault = [&](const ScriptedNic::Qp& qp, const ibv_send_wr&) {
    return &qp == rig.qps[0] && qp.executed == 40 ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS;
  };
  rig.start();
  for (int i = 0; i < 300; ++i) {
    rig.put(0, 1 + i % 2, uint64_t(i) * 64, uint64_t(i) * 96, 32);
  }
  rig.quiet(0, 1);
  rig.quiet(0, 2);
  rig.put(0, 1, 0, 0, 8);  // to a lost peer: done, unseen
  rig.quiet(0, 1);
  rig.proxy->stop();
  EXPECT(rig.lost.size() == 1 && rig.lost[0].first == 1, "%d losses", int(rig.lost.size()));
  const std::string& why = rig.lost[0].second;
  const std::string status = rig.provider.wc_status_str(IBV_WC_RETRY_EXC_ERR);
  for (const std::string& part :
       {std::string("queue pair 101 of channel 0 (mlx5_7 port 2) to queue pair 901"), status,
        std::string("status 12, vendor code 0x81"), std::string("a put of 32 bytes to offset ")}) {
    EXPECT(has(why, part), "'%s' lacks '%s'", why.c_str(), part.c_str());
  }
  EXPECT(rig.qp(0, 1).executed == 40 && rig.qp(0, 2).executed == 150, "others go on");
  // Or a quiet() in between would take what is dropped for carried out.
  EXPECT(rig.counted_at_error[0] == 40, "%d of 40 counted when the loss is told",
         int(rig.counted_at_error[0]));

  // A post that is refused: the completion that tells why comes first if there is one.
  Rig second(shape, seed);
  second.nic.refuse = [](const ScriptedNic::Qp& qp, const ibv_send_wr&) {
    return qp.posted == 7 ? EINVAL : 0;
  };
  second.start();
  for (int i = 0; i < 20; ++i) second.put(0, 1, uint64_t(i) * 64, uint64_t(i) * 96, 32);
  second.quiet(0, 1);
  second.proxy->stop();
  EXPECT(second.lost.size() == 1 && has(second.lost[0].second, "ibv_post_send took") &&
             has(second.lost[0].second, "Invalid argument (errno 22)") &&
             has(second.lost[0].second, "channel 0 (mlx5_7 port 2)"),
         "'%s'", second.lost.empty() ? "nothing" : second.lost[0].second.c_str());
  EXPECT(second.counted_at_error[0] <= second.qp(0, 1).executed, "counted before it is told");
}

// A device without room (ENOMEM) is asked again; only one that never has any loses its peer.
void no_room(uint64_t seed) {
  for (uint32_t max_atomics : {0u, 16u}) {
    Shape shape;
    shape.peers = 2;
    shape.max_delay = 10;
    shape.max_atomics = max_atomics;
    Rig rig(shape, seed);
    Random chance(seed);
    uint64_t refused = 0;
    rig.nic.refuse = [&](const ScriptedNic::Qp&, const ibv_send_wr&) {
      refused += chance.one_in(4);
      return chance.one_in(4) ? ENOMEM : 0;
    };
    rig.start();
    for (int i = 0; i < 600; ++i) {
      const uint64_t at = 8192 + uint64_t(i) * 16, value = mix(seed, uint64_t(i));
      std::memcpy(rig.heap.data() + at, &value, 8);
      rig.put_signal(0, 1 + i % 2, at, at, 8, uint64_t(i % 3) * 64, uint64_t(i));
      if (i % 5 == 0) rig.put(0, 1 + i % 2, 0, 0, 0);
    }
    uint64_t sums[3][3] = {};
    for (int i = 0; i < 600; ++i) sums[1 + i % 2][i % 3] += uint64_t(i);
    for (int peer = 1; peer <= 2; ++peer) {
      rig.quiet(0, peer);
      for (int which = 0; which < 3; ++which) {
        EXPECT(rig.word(peer, uint64_t(which) * 64) == sums[peer][which], "peer %d, word %d", peer,
               which);
      }
    }
    rig.proxy->stop();
    for (int i = 0; i < 600; ++i) {
      const uint64_t at = 8192 + uint64_t(i) * 16;
      EXPECT(rig.word(1 + i % 2, at) == mix(seed, uint64_t(i)), "put %d", i);
    }
    EXPECT(refused > 20 && rig.lost.empty(), "%d refused, %d lost", int(refused),
           int(rig.lost.size()));
  }

  Rig never({}, seed);
  never.nic.refuse = [](const ScriptedNic::Qp& qp, const ibv_send_wr&) {
    return qp.posted == 7 ? ENOMEM : 0;
  };
  const auto start = Clock::now();
  never.start();
  for (int i = 0; i < 20; ++i) never.put(0, 1, uint64_t(i) * 64, uint64_t(i) * 96, 32);
  never.quiet(0, 1);
  never.proxy->stop();
  EXPECT(seconds_since(start) > 0.9, "given up after %.1f s", seconds_since(start));
  EXPECT(never.lost.size() == 1 && has(never.lost[0].second, "Cannot allocate memory"), "'%s'",
         never.lost.empty() ? "nothing" : never.lost[0].second.c_str());
  EXPECT(never.qp(0, 1).executed == 7, "%d carried out", int(never.qp(0, 1).executed));
}

// A peer whose link is stalled holds up nobody else, however much goes to the others.
void stalled_peer(uint64_t seed) {
  Shape shape;
  shape.peers = 3;
  shape.ring = 16;
  shape.depth = 8;
  shape.max_delay = 3;
  Rig rig(shape, seed);
  Channel& ring = *rig.channels[0];
  rig.nic.stalled_qp = &rig.qp(0, 1);
  rig.start();
  uint64_t sent[4] = {};
  const auto put_to = [&](int peer) {
    const uint64_t at = sent[peer]++ % 1024 * 48;
    rig.put_signal(0, peer, at + 1024, at, 32, uint64_t(peer) * 64);
  };
  for (uint32_t i = 0; i < 10 * shape.ring; ++i) {
    if (i < shape.ring) put_to(1);
    put_to(2 + int(i % 2));
  }
  rig.quiet(0, 2);
  rig.quiet(0, 3);
  EXPECT(ring.completed(1) == 0 && ring.done() == 0, "the stalled one moves");
  EXPECT(!ring.has_room(1) && ring.has_room(2), "its share is full, the ring is not");
  EXPECT(rig.word(2, 128) == sent[2] && rig.word(3, 192) == sent[3], "signals");

  // A producer that does not count by peer: its ring stops at the first command too many.
  const auto write_uncounted = [&](int peer) {
    ring.write({kCommandSignal, 0, peer, 0, 0, 0, uint64_t(peer) * 64, 1});
    ++sent[peer];
    rig.proxy->wake();
  };
  write_uncounted(2);
  rig.quiet(0, 2);
  write_uncounted(1);
  write_uncounted(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT(ring.completed(2) + 1 == ring.issued_to(2), "order of the ring");
  rig.nic.stalled_qp = nullptr;
  for (int peer = 1; peer <= 3; ++peer) {
    rig.quiet(0, peer);
    EXPECT(rig.word(peer, uint64_t(peer) * 64) == sent[peer], "peer %d", peer);
  }
  EXPECT(ring.done() == sent[1] + sent[2] + sent[3] && ring.idle(), "in order, everything is done");
  rig.proxy->stop();
  EXPECT(rig.lost.empty() && rig.bad.empty(), "errors");
}

// No memory for the sum of a word: an error, and everything ends.
void no_memory(uint64_t seed) {
  Shape shape;
  shape.max_atomics = 0;
  Rig rig(shape, seed);
  rig.start();
  rig.signal(0, 1, 64);
  rig.quiet(0, 1);
  fail_nodes = true;
  rig.signal(0, 1, 64);  // a word that has its sum
  rig.signal(0, 1, 128);
  rig.quiet(0, 1);
  fail_nodes = false;
  rig.proxy->stop();
  EXPECT(rig.word(1, 64) == 2 && rig.word(1, 128) == 0, "signals");
  EXPECT(rig.lost.empty() && rig.bad.size() == 1 && rig.bad[0].code == Code::kOutOfMemory &&
             has(rig.bad[0].text, "word 128 of rank 1"),
         "'%s'", rig.bad.empty() ? "nothing" : rig.bad[0].text.c_str());
  EXPECT(rig.counted_at_error[0] <= 2, "counted before it is told");
}

// Commands that no producer of ours writes.
void bad_commands() {
  const std::pair<Command, const char*> cases[] = {
      {{0, 0, 1, 8, 0, 0, 0, 0}, "no such operation"},
      {{4, 0, 1, 8, 0, 0, 0, 0}, "no such operation"},
      {{kCommandPut, 1, 1, 8, 0, 0, 0, 0}, "no such operation"},
      {{kCommandPut, 0, 0, 8, 0, 0, 0, 0}, "no such peer"},
      {{kCommandPut, 0, 2, 8, 0, 0, 0, 0}, "no such peer"},
      {{kCommandPut, 0, 1, 8, 65529, 0, 0, 0}, "it leaves the heap"},
      {{kCommandPut, 0, 1, 8, 0, ~uint64_t(0) - 3, 0, 0}, "it leaves the heap"},
      {{kCommandPut, 0, 1, 65537, 0, 0, 0, 0}, "it leaves the heap"},
      {{kCommandSignal, 0, 1, 0, 0, 0, 4, 1}, "its word is no word of the heap"},
      {{kCommandPutSignal, 0, 1, 8, 0, 0, 65536, 1}, "its word is no word of the heap"},
  };
  for (const auto& [command, why] : cases) {
    Rig rig({}, 1);
    rig.channels[0]->write(command);
    rig.start();
    const auto start = Clock::now();
    while (rig.channels[0]->done() == 0) {
      EXPECT(seconds_since(start) < 30, "%s: hangs", why);
      std::this_thread::yield();
    }
    rig.proxy->stop();
    EXPECT(rig.bad.size() == 1 && rig.bad[0].code == Code::kInternal && has(rig.bad[0].text, why),
           "%s: '%s'", why, rig.bad.empty() ? "nothing" : rig.bad[0].text.c_str());
    EXPECT(rig.qp(0, 1).posted == 0, "it was posted");
    EXPECT(rig.counted_at_error[0] == 0, "%s: counted before it is told", why);
  }
}

// While somebody waits for a peer to which nothing is under way, it is asked; silence is a loss.
void probes(uint64_t seed) {
  Shape shape;
  shape.peers = 2;
  shape.probe_ns = 20 * 1000 * 1000;
  Rig rig(shape, seed);
  std::atomic<bool> dead{false};
  rig.nic.fault = [&](const ScriptedNic::Qp& qp, const ibv_send_wr&) {
    return dead && &qp == rig.qps[1] ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS;
  };
  rig.start();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT(rig.count(&ibrc::ProxyStats::probes) == 0, "nobody waits, nobody is asked");
  rig.waited = 2;
  const auto start = Clock::now();
  while (rig.count(&ibrc::ProxyStats::probes) < 3) {
    EXPECT(seconds_since(start) < 30, "no probes");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT(rig.lost.empty() && rig.qp(0, 1).posted == 0, "only the peer that is waited for");
  dead = true;
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(rig.mutex);
      if (!rig.lost.empty()) break;
    }
    EXPECT(seconds_since(start) < 30, "silence is not noticed");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  rig.proxy->stop();
  EXPECT(rig.lost[0].first == 2 && has(rig.lost[0].second, "an empty write that asks"), "'%s'",
         rig.lost[0].second.c_str());
}

// It stops at once, whatever is under way and whatever waits.
void stop_while_busy(uint64_t seed) {
  Shape shape;
  shape.peers = 3;
  shape.channels = 2;
  Rig rig(shape, seed);
  rig.nic.stalled = true;  // completions never come
  rig.start();
  for (int i = 0; i < 60; ++i) {
    for (int c = 0; c < 2; ++c) rig.put(c, 1 + i % 3, uint64_t(i) * 64, uint64_t(i) * 96, 32);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  auto start = Clock::now();
  rig.proxy->stop();
  EXPECT(seconds_since(start) < 5, "stopping took %.1f s", seconds_since(start));

  Rig asleep(shape, seed);
  asleep.start();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  start = Clock::now();
  asleep.proxy->stop();
  EXPECT(seconds_since(start) < 5, "stopping a sleeper took %.1f s", seconds_since(start));
}

// Many threads, one channel each: log-uniform sizes, each payload checked when its signal is seen.
void stress(uint64_t seed, int ops) {
  constexpr int kChannels = 8;
  constexpr uint64_t kWords = 512, kMost = 8192, kFrom = 4096;
  Shape shape;
  shape.channels = kChannels;
  shape.depth = 32;
  shape.max_delay = 3;
  shape.heap_bytes = kFrom + kChannels * kMost * 2;
  for (bool cq_per_queue : {false, true}) {
    shape.cq_per_queue = cq_per_queue;
    Rig rig(shape, seed);
    rig.start();
    run_ranks(kChannels, [&](int c) {
      Random random(mix(seed, uint64_t(c)));
      const uint64_t at = kFrom + uint64_t(c) * kMost * 2;
      for (int i = 1; i <= ops / kChannels / 2; ++i) {
        const uint64_t bytes = uint64_t(8) << random.below(11);
        const uint64_t half = at + uint64_t(i & 1) * kMost;  // the other may be under way
        for (uint64_t b = 0; b < bytes; b += 8) {
          const uint64_t value = mix(seed, uint64_t(c), uint64_t(i), b);
          std::memcpy(rig.heap.data() + half + b, &value, 8);
        }
        rig.put_signal(c, 1, half, half, uint32_t(bytes), uint64_t(c) * 64);
        const auto start = Clock::now();
        while (rig.word(1, uint64_t(c) * 64) < uint64_t(i)) {
          EXPECT(seconds_since(start) < 60, "channel %d: signal %d does not come", c, i);
          std::this_thread::yield();
        }
        EXPECT(!std::memcmp(rig.remote[1].data() + half, rig.heap.data() + half, bytes),
               "channel %d: payload %d is wrong", c, i);
      }
      rig.quiet(c, 1);
    });
    rig.proxy->stop();
    EXPECT(rig.lost.empty() && rig.bad.empty(), "errors");
  }
  static_assert(kChannels * 64 <= kWords);
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) {
  using namespace epcomm::testing;
  Options options(argc, argv);
  const uint64_t seed = uint64_t(options.number("seed", 1));
  const int ops = int(options.number("ops", 20000));
  options.finish();
  set_deadline(300);
  codec(seed);
  torn_ring(seed, ops);
  back_pressure(seed);
  batches(seed);
  signals(seed);
  errors(seed);
  no_room(seed);
  stalled_peer(seed);
  no_memory(seed);
  bad_commands();
  probes(seed);
  stop_while_busy(seed);
  stress(seed, ops);
  std::printf("proxy_test: ok\n");
  return 0;
}
