// Queue pairs of real verbs, one process per rank: each writes to each peer on each channel and
// adds to a word behind it; payloads are checked when the word has come. Ranks meet in a folder.
//
//   rdma_link --paths rxe0:1:1[,rxe1:1:1] --ranks 2 --rank 0 --folder /tmp/meet
//
// Exit status 77: no library or no device here. tests/rxe runs it in the virtual machine.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "check.hpp"
#include "common/clock.hpp"
#include "common/rdma/rdma.hpp"
#include "meet.hpp"

namespace epcomm::testing {
namespace {

using common::Info;
using common::Rdma;
using common::RdmaQueue;

constexpr uint64_t kBlock = 96 * 1024;  // more than one packet
constexpr uint64_t kWords = 1 << 20;    // where the words begin
constexpr uint64_t kHeapBytes = 2 << 20;

uint8_t pattern(int from, int to, int channel, int round, uint64_t at) {
  return uint8_t(from * 31 + to * 17 + channel * 7 + round * 5 + at * 3 + (at >> 8));
}

void put_and_add(Rdma& rdma, const RdmaQueue& queue, std::byte* source, uint64_t dst,
                 uint64_t bytes, uint64_t word, uint64_t id) {
  ibv_sge piece{reinterpret_cast<uintptr_t>(source), uint32_t(bytes), queue.lkey};
  ibv_sge old{0, 8, 0};
  rdma.sink(queue.path, &old.addr, &old.lkey);
  ibv_send_wr write{}, add{};
  write.opcode = IBV_WR_RDMA_WRITE;
  write.sg_list = &piece;
  write.num_sge = 1;
  write.wr.rdma = {queue.remote_heap + dst, queue.data_rkey};
  write.next = &add;
  add.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  add.sg_list = &old;
  add.num_sge = 1;
  add.send_flags = IBV_SEND_SIGNALED;
  add.wr_id = id;
  add.wr.atomic.remote_addr = queue.remote_heap + word;
  add.wr.atomic.compare_add = 1;
  add.wr.atomic.rkey = queue.signal_rkey;
  ibv_send_wr* bad = nullptr;
  const int failed = ibv_post_send(queue.qp, &write, &bad);
  EXPECT(failed == 0, "ibv_post_send: %d", failed);
}

// Keys allow writing alone. The refusal breaks both ends of the queue pair.
void expect_no_reads(const Rdma& rdma, const RdmaQueue& queue, std::byte* heap) {
  ibv_sge piece{reinterpret_cast<uintptr_t>(heap), 64, queue.lkey};
  ibv_send_wr read{}, *bad = nullptr;
  read.opcode = IBV_WR_RDMA_READ;
  read.sg_list = &piece;
  read.num_sge = 1;
  read.send_flags = IBV_SEND_SIGNALED;
  read.wr.rdma = {queue.remote_heap, queue.data_rkey};
  EXPECT(ibv_post_send(queue.qp, &read, &bad) == 0, "ibv_post_send");
  ibv_wc done;
  while (ibv_poll_cq(queue.cq, 1, &done) != 1) sched_yield();
  EXPECT(done.status == IBV_WC_REM_ACCESS_ERR || done.status == IBV_WC_REM_INV_REQ_ERR,
         "a READ ended with %s", rdma.provider()->wc_status_str(done.status));
}

int run(Options& options) {
  const int rank = int(options.number("rank", 0)), num_ranks = int(options.number("ranks", 2));
  const int num_channels = int(options.number("channels", 2));
  const int rounds = int(options.number("rounds", 20));
  const std::string folder = options.text("folder", "/tmp"), paths = options.text("paths", "");
  const bool tell = options.number("plan", 0) != 0;
  options.finish();
  set_deadline(200);

  common::RdmaOptions wish;
  const Status found = common::open_libibverbs(&wish.provider);
  std::vector<std::string> names;
  if (found.ok()) EXPECT_OK(wish.provider->device_names(&names));
  if (names.empty()) {
    std::printf("no device: %s\n", found.text.c_str());
    return 77;
  }
  std::istringstream in(paths);
  for (std::string one; std::getline(in, one, ',');) {
    common::RdmaPath path;
    const size_t a = one.find(':'), b = one.find(':', a + 1);
    EXPECT(a != std::string::npos && b != std::string::npos, "--paths device:port:gid,...");
    path.device = one.substr(0, a);
    path.port = std::stoi(one.substr(a + 1, b - a - 1));
    path.gid_index = std::stoi(one.substr(b + 1));
    wish.paths.push_back(path);
  }
  wish.num_ranks = num_ranks;
  wish.rank = rank;
  wish.num_channels = num_channels;

  // What is not there is said, and leaves the device as it was.
  for (const auto& [change, part] : std::vector<std::pair<int, std::string>>{
           {0, "no GID of index 900"}, {1, "has no port 9"}, {2, "no such device"}}) {
    common::RdmaOptions wrong = wish;
    if (change == 0) wrong.paths[0].gid_index = 900;
    if (change == 1) wrong.paths[0].port = 9;
    if (change == 2) wrong.paths[0].device = "rxe77";
    Rdma rdma;
    const Status status = rdma.open(wrong);
    EXPECT(status.code == Code::kUnavailable && status.text.find(part) != std::string::npos,
           "%d: %s", int(status.code), status.text.c_str());
  }

  void* const memory =
      mmap(nullptr, kHeapBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(memory != MAP_FAILED, "mmap: %d", errno);
  std::byte* const heap = static_cast<std::byte*>(memory);
  const uint64_t half = kWords / 2;  // sources below, what peers write above
  const uint64_t slot = half / uint64_t(num_ranks * (num_channels + 1)) / 64 * 64;
  const uint64_t bytes = std::min(kBlock, slot);

  Rdma rdma;
  EXPECT_OK(rdma.open(wish));
  EXPECT_OK(rdma.register_heap(heap, kHeapBytes));
  Info info;
  EXPECT_OK(rdma.describe(&info));
  std::string mine;
  EXPECT_OK(info.encode("link", 1, &mine));
  std::vector<Info> infos(size_t(num_ranks), Info{});
  const std::vector<std::string> told = all_gather(folder, "info", rank, num_ranks, mine);
  for (int peer = 0; peer < num_ranks; ++peer) {
    EXPECT_OK(Info::decode(told[size_t(peer)], peer, "link", 1, &infos[size_t(peer)]));
  }
  EXPECT_OK(rdma.connect(rank, infos, std::vector<bool>(size_t(num_ranks), true), {}, 60));
  all_gather(folder, "connected", rank, num_ranks, "");
  if (tell) std::printf("%s\n", rdma.plan_json().c_str());

  const PlanShape shape{num_ranks, num_channels, rdma.num_paths()};
  const auto index = [&](int peer, int channel) {
    return uint64_t(plan_index(shape, peer, channel));
  };
  for (int round = 0; round < rounds; ++round) {
    for (int peer = 0; peer < num_ranks; ++peer) {
      for (int channel = 0; channel <= num_channels; ++channel) {
        if (peer == rank) continue;
        std::byte* const source = heap + index(peer, channel) * slot;
        for (uint64_t i = 0; i < bytes; ++i) {
          source[i] = std::byte(pattern(rank, peer, channel, round, i));
        }
        put_and_add(rdma, rdma.queue(peer, channel), source, half + index(rank, channel) * slot,
                    bytes, kWords + 64 * index(rank, channel), index(peer, channel));
      }
    }
    for (int peer = 0; peer < num_ranks; ++peer) {
      for (int channel = 0; channel <= num_channels; ++channel) {
        if (peer == rank) continue;
        auto* const word =
            reinterpret_cast<std::atomic<uint64_t>*>(heap + kWords + 64 * index(peer, channel));
        while (word->load(std::memory_order_acquire) <= uint64_t(round)) sched_yield();
        const std::byte* const arrived = heap + half + index(peer, channel) * slot;
        for (uint64_t i = 0; i < bytes; ++i) {
          EXPECT(arrived[i] == std::byte(pattern(peer, rank, channel, round, i)),
                 "round %d, from %d on channel %d, byte %d", round, peer, channel, int(i));
        }
      }
    }
    std::set<uint64_t> open;
    for (int peer = 0; peer < num_ranks; ++peer) {
      for (int channel = 0; peer != rank && channel <= num_channels; ++channel) {
        open.insert(index(peer, channel));
      }
    }
    while (!open.empty()) {
      for (int path = 0; path < rdma.num_paths(); ++path) {
        ibv_wc done;
        if (ibv_poll_cq(rdma.cq(path), 1, &done) != 1) continue;
        const int number = rdma.queue_of(path, done.qp_num);
        EXPECT(done.status == IBV_WC_SUCCESS, "queue pair %d: %s", number,
               rdma.provider()->wc_status_str(done.status));
        EXPECT(number == int(done.wr_id) && open.erase(done.wr_id) == 1, "completion %d", number);
      }
    }
    all_gather(folder, "round" + std::to_string(round), rank, num_ranks, "");
  }

  if (rank == 0) expect_no_reads(rdma, rdma.queue(num_ranks - 1, 0), heap);
  all_gather(folder, "refused", rank, num_ranks, "");
  rdma.close();
  rdma.close();
  std::printf("rank %d: %d rounds of %d bytes to %d peers on %d channels and the control channel\n",
              rank, rounds, int(bytes), num_ranks - 1, num_channels);
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) {
  epcomm::testing::Options options(argc, argv);
  return epcomm::testing::run(options);
}
