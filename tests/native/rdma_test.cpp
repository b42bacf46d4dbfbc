// The queue pairs of a rank over scripted verbs: what they are told, what is lowered, what every
// single failure leaves behind (nothing) and says (call, errno, device, remedy).
#include "common/rdma/rdma.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "check.hpp"
#include "common/rdma/state.hpp"
#include "scripted_verbs.hpp"

namespace epcomm::testing {
namespace {

using common::Info;
using common::Rdma;
using common::RdmaOptions;
using common::RdmaPath;
using common::RdmaQueue;

constexpr uint64_t kHeapBytes = 1 << 20;

ibv_gid gid_of(int rank, int path) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  gid.raw[12] = 10;
  gid.raw[13] = 77;
  gid.raw[14] = uint8_t(rank);
  gid.raw[15] = uint8_t(path + 1);
  return gid;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A rank with devices mlx5_0, mlx5_1...: `ports` of them each, one GID of index 3 per port.
struct Rank {
  Rank(int rank_, int num_ranks, int num_devices, int num_ports, int num_channels) : rank(rank_) {
    std::vector<ScriptedDevice> devices;
    for (int d = 0; d < num_devices; ++d) {
      ScriptedDevice device;
      device.name = "mlx5_" + std::to_string(d);
      for (int p = 1; p <= num_ports; ++p) {
        ScriptedPort port;
        port.gids[3] = gid_of(rank, int(options.paths.size()));
        device.ports.push_back(port);
        options.paths.push_back({device.name, p, 3});
      }
      devices.push_back(device);
    }
    verbs = std::make_shared<ScriptedVerbs>(std::move(devices));
    options.provider = verbs;
    options.num_ranks = num_ranks;
    options.rank = rank;
    options.num_channels = num_channels;
    heap.resize(kHeapBytes);
  }

  Status start() {
    rdma = std::make_unique<Rdma>();
    EPCOMM_RETURN_IF_ERROR(rdma->open(options));
    EPCOMM_RETURN_IF_ERROR(rdma->register_heap(heap.data(), heap.size()));
    return rdma->describe(&info);
  }

  int rank;
  RdmaOptions options;
  std::shared_ptr<ScriptedVerbs> verbs;
  std::vector<std::byte> heap;
  std::unique_ptr<Rdma> rdma;
  Info info;
};

using Ranks = std::vector<std::unique_ptr<Rank>>;

Status connect(Rank& rank, const Ranks& ranks, double timeout_s = 30, int unwanted = -1) {
  std::vector<Info> infos;
  std::vector<bool> wanted(ranks.size(), true);
  std::vector<std::byte*> mapped;
  for (const auto& other : ranks) infos.push_back(other->info);
  if (unwanted >= 0) wanted[size_t(unwanted)] = false;
  if (rank.verbs->mapping) {
    for (const auto& other : ranks) mapped.push_back(other->heap.data());
  }
  return rank.rdma->connect(rank.rank, infos, wanted, mapped, timeout_s);
}

Ranks make(const std::vector<std::pair<int, int>>& shapes, int num_channels) {
  Ranks ranks;
  for (size_t i = 0; i < shapes.size(); ++i) {
    ranks.push_back(std::make_unique<Rank>(int(i), int(shapes.size()), shapes[i].first,
                                           shapes[i].second, num_channels));
  }
  return ranks;
}

void start_all(const Ranks& ranks) {
  for (const auto& rank : ranks) EXPECT_OK(rank->start());
  for (const auto& rank : ranks) EXPECT_OK(connect(*rank, ranks));
}

// Ends of a queue pair name each other, on the paths that the plan says, whatever each rank has.
void test_both_ends_agree() {
  const Ranks ranks = make({{1, 1}, {2, 1}, {2, 2}}, 5);
  // Numbers of different devices overlap on real machines; here all ranks start at the same one.
  start_all(ranks);
  for (const auto& a : ranks) {
    for (const auto& b : ranks) {
      std::set<uint32_t> labels;
      for (int channel = 0; channel <= 5; ++channel) {
        const RdmaQueue& queue = a->rdma->queue(b->rank, channel);
        if (a == b) {
          EXPECT(!queue.qp, "a queue pair to itself");
          continue;
        }
        const RdmaQueue& other = b->rdma->queue(a->rank, channel);
        EXPECT(queue.peer == b->rank && queue.channel == channel, "peer %d", queue.peer);
        EXPECT(queue.path == channel % a->rdma->num_paths(), "channel %d path %d", channel,
               queue.path);
        EXPECT(queue.remote_qpn == other.qp->qp_num, "%u", queue.remote_qpn);
        EXPECT(a->rdma->queue_of(queue.path, queue.qp->qp_num) ==
                   plan_index({3, 5, a->rdma->num_paths()}, b->rank, channel),
               "queue_of");
        const ScriptedQp& qp = *a->verbs->of(queue.qp);
        const RdmaPath& path = a->options.paths[size_t(queue.path)];
        EXPECT(qp.attr.qp_state == IBV_QPS_RTS, "state %d", int(qp.attr.qp_state));
        EXPECT(qp.device == path.device && qp.attr.port_num == path.port, "wrong port");
        const ibv_gid wanted = gid_of(b->rank, other.path);
        EXPECT(std::memcmp(&qp.attr.ah_attr.grh.dgid, &wanted, sizeof wanted) == 0, "wrong GID");
        EXPECT(qp.attr.ah_attr.is_global && qp.attr.ah_attr.grh.sgid_index == 3, "wrong own GID");
        EXPECT(qp.attr.dest_qp_num == other.qp->qp_num, "wrong number");
        EXPECT(qp.attr.rq_psn == b->verbs->of(other.qp)->attr.sq_psn, "packet numbers");
        EXPECT(queue.remote_heap == reinterpret_cast<uintptr_t>(b->heap.data()), "heap");
        EXPECT(queue.max_rd_atomic == 16 && qp.attr.max_rd_atomic == 16, "atomics");
        EXPECT(qp.attr.qp_access_flags == (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC),
               "access %x", qp.attr.qp_access_flags);
        labels.insert(qp.attr.ah_attr.grh.flow_label);
      }
      if (a != b) EXPECT(labels.size() == 6 && !labels.count(0), "source ports repeat");
    }
  }
  // Keys of the path where the other end is; relaxed and strict apart.
  const Rank& two = *ranks[1];
  std::map<uint32_t, const ScriptedMr*> by_key;
  for (const ScriptedMr* mr : two.verbs->mrs) by_key[mr->mr.rkey] = mr;
  for (int channel = 0; channel <= 5; ++channel) {
    const RdmaQueue& queue = ranks[0]->rdma->queue(1, channel);
    const ScriptedMr* const data = by_key.at(queue.data_rkey);
    const ScriptedMr* const signal = by_key.at(queue.signal_rkey);
    const int write = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    EXPECT(data->access == (write | int(IBV_ACCESS_RELAXED_ORDERING)), "%x", data->access);
    EXPECT(signal->access == (write | IBV_ACCESS_REMOTE_ATOMIC), "%x", signal->access);
    EXPECT(data->mr.context == two.rdma->queue(0, channel).qp->context, "key of another device");
  }
  const std::string plan = ranks[2]->rdma->plan_json();
  for (const char* part : {"\"kind\": \"control\"", "\"remote_device\": \"mlx5_1\"",
                           "\"gid\": \"::ffff:10.77.2.4\"", "\"mtu\": 4096"}) {
    EXPECT(has(plan, part), "%s is not in %s", part, plan.c_str());
  }
}

void test_mtu() {
  const auto mtu_of = [](ibv_mtu a, ibv_mtu b, int wish) {
    const Ranks ranks = make({{1, 1}, {1, 1}}, 2);
    ranks[0]->verbs->devices[0].ports[0].mtu = a;
    ranks[1]->verbs->devices[0].ports[0].mtu = b;
    ranks[0]->options.mtu = wish;
    start_all(ranks);
    std::set<int> found;
    for (const auto& rank : ranks) {
      for (const ScriptedQp* qp : rank->verbs->qps) found.insert(128 << qp->attr.path_mtu);
    }
    EXPECT(found.size() == 1, "ends or channels differ");
    return *found.begin();
  };
  EXPECT(mtu_of(IBV_MTU_4096, IBV_MTU_1024, 0) == 1024, "4096 and 1024");
  EXPECT(mtu_of(IBV_MTU_1024, IBV_MTU_1024, 0) == 1024, "1024 and 1024");
  EXPECT(mtu_of(IBV_MTU_4096, IBV_MTU_4096, 0) == 4096, "4096 and 4096");
  EXPECT(mtu_of(IBV_MTU_4096, IBV_MTU_4096, 2048) == 2048, "one side asks for less");
  EXPECT(mtu_of(IBV_MTU_4096, IBV_MTU_256, 2048) == 256, "the other has less");
  for (const auto& [wish, part] : std::map<int, std::string>{
           {8192, "EPCOMM_IB_MTU is 8192; allowed: 256"},
           {1500, "EPCOMM_IB_MTU is 1500; allowed: 256"},
           {2048, "EPCOMM_IB_MTU is 2048; mlx5_0 port 1 allows at most 1024"}}) {
    Rank rank(0, 2, 1, 1, 2);
    rank.verbs->devices[0].ports[0].mtu = IBV_MTU_1024;
    rank.options.mtu = wish;
    const Status status = rank.start();
    EXPECT(status.code == Code::kInvalidArgument && has(status.text, part), "%s",
           status.text.c_str());
    EXPECT(rank.verbs->alive() == 0, "%s", rank.verbs->living().c_str());
  }
}

// Completions of all that can be in flight fit, on every path, whatever the device has.
void test_completion_queues() {
  for (const int max_cqe : {1 << 20, 512, 200, 40}) {
    for (const int depth : {16, 256, 1024}) {
      Rank rank(0, 4, 2, 1, 4);
      rank.options.depth = uint32_t(depth);
      for (ScriptedDevice& device : rank.verbs->devices) device.max_cqe = max_cqe;
      const Status status = rank.start();
      if (max_cqe == 40) {  // 9 queue pairs of 4 fit on path 0, 9 of 8 do not
        EXPECT(status.ok() && rank.rdma->queue(1, 0).depth == 4, "%s", status.text.c_str());
      }
      EXPECT_OK(status);
      std::map<const ibv_cq*, uint64_t> in_flight;
      for (const ScriptedQp* qp : rank.verbs->qps) {
        EXPECT(qp->qp.send_cq == qp->qp.recv_cq, "two queues");
        in_flight[qp->qp.send_cq] += qp->init.cap.max_send_wr;
      }
      EXPECT(in_flight.size() == 2, "one per path");
      for (const auto& [cq, most] : in_flight) {
        EXPECT(uint64_t(rank.verbs->of(cq)->depth) >= most, "%d < %d", rank.verbs->of(cq)->depth,
               int(most));
      }
      for (int peer = 1; peer < 4; ++peer) {
        for (int channel = 0; channel <= 4; ++channel) {
          const RdmaQueue& queue = rank.rdma->queue(peer, channel);
          EXPECT(queue.cq == rank.rdma->cq(queue.path), "cq");
          EXPECT(queue.depth == rank.verbs->of(queue.qp)->init.cap.max_send_wr, "depth");
        }
      }
      if (max_cqe == 512 && depth == 256) {
        EXPECT(has(rank.rdma->plan_json(), "depth 256 lowered to 32: max_cqe=512"), "%s",
               rank.rdma->plan_json().c_str());
      }
    }
  }
  Rank alone(0, 3, 1, 1, 2);
  alone.options.cq_per_qp = true;
  EXPECT_OK(alone.start());
  EXPECT(alone.verbs->cqs.size() == 6 && !alone.rdma->cq(0), "one per queue pair");
}

void test_limits_of_the_device() {
  Rank rank(0, 2, 1, 1, 2);
  rank.options.max_sge = 4;
  ScriptedDevice& device = rank.verbs->devices[0];
  device.max_qp_wr = 100;
  device.max_sge = 2;
  device.most_for_inline = 16 * 28;
  device.ports[0].max_message = 8 << 20;
  EXPECT_OK(rank.start());
  const RdmaQueue& queue = rank.rdma->queue(1, 0);
  EXPECT(queue.depth == 64 && queue.max_sge == 2 && queue.max_inline == 0, "%u %u %u", queue.depth,
         queue.max_sge, queue.max_inline);
  EXPECT(queue.max_message == 8 << 20, "%u", queue.max_message);
  const std::string plan = rank.rdma->plan_json();
  for (const char* part :
       {"depth 256 lowered to 64: max_qp_wr", "pieces 4 lowered to 2", "inline 28 lowered to 0"}) {
    EXPECT(has(plan, part), "%s is not in %s", part, plan.c_str());
  }

  // Less inline data than asked is still enough for a signal, which without atomics needs it: the
  // depth goes first then.
  for (const auto& [most, for_all, depth] :
       {std::tuple{16u, 1u << 30, 256u}, std::tuple{200u, 64u * 8, 64u}}) {
    Rank small(0, 2, 1, 1, 2);
    small.verbs->devices[0].atomics = IBV_ATOMIC_NONE;
    small.verbs->devices[0].max_inline = most;
    small.verbs->devices[0].most_for_inline = for_all;
    EXPECT_OK(small.start());
    for (int channel = 0; channel <= 2; ++channel) {
      const RdmaQueue& made = small.rdma->queue(1, channel);
      EXPECT(made.max_inline == 8 && made.depth == depth, "inline %u, depth %u", made.max_inline,
             made.depth);
    }
    EXPECT(has(small.rdma->plan_json(), "inline 28 lowered to 8"), "%s",
           small.rdma->plan_json().c_str());
  }

  // max_qp_wr is more than the device has room for, which it says by ENOMEM, as mlx5 does.
  Rank deep(0, 2, 1, 1, 2);
  deep.options.depth = 16384;
  deep.verbs->devices[0].max_qp_wr = 32768;
  int refused = 0;
  deep.verbs->refuse = [&](const std::string& call) {
    return call == "ibv_create_qp" && refused++ < 2 ? ENOMEM : 0;
  };
  EXPECT_OK(deep.start());
  EXPECT(deep.rdma->queue(1, 0).depth == 4096, "%u", deep.rdma->queue(1, 0).depth);
  EXPECT(has(deep.rdma->plan_json(), "depth 16384 lowered to 4096: the device refuses"), "%s",
         deep.rdma->plan_json().c_str());

  Rank crowded(0, 3, 1, 1, 2);
  crowded.verbs->devices[0].max_qp = 4;
  const Status status = crowded.start();
  EXPECT(status.code == Code::kOutOfMemory && has(status.text, "at most 4 queue pairs"), "%s",
         status.text.c_str());

  const Ranks plain = make({{1, 1}, {1, 1}}, 1);
  plain[1]->verbs->devices[0].atomics = IBV_ATOMIC_NONE;
  plain[1]->verbs->devices[0].relaxed = false;
  start_all(plain);
  for (const auto& end : plain) {
    EXPECT(end->rdma->queue(1 - end->rank, 0).max_rd_atomic == 0, "atomics with one end's alone");
  }
  for (const ScriptedMr* mr : plain[1]->verbs->mrs) {
    EXPECT(!(mr->access & (IBV_ACCESS_REMOTE_ATOMIC | int(IBV_ACCESS_RELAXED_ORDERING))), "%x",
           mr->access);
  }
}

// Reads only where they are asked for, and then of strict memory alone.
void test_remote_reads() {
  const Ranks ends = make({{1, 1}, {1, 1}}, 1);
  for (const auto& end : ends) end->options.remote_reads = true;
  start_all(ends);
  for (const auto& end : ends) {
    const RdmaQueue& queue = end->rdma->queue(1 - end->rank, 0);
    EXPECT(queue.max_reads == 16, "%u reads", queue.max_reads);
    EXPECT(end->verbs->of(queue.qp)->attr.qp_access_flags & IBV_ACCESS_REMOTE_READ, "queue pair");
    for (const ScriptedMr* mr : end->verbs->mrs) {
      const uint32_t strict = ends[size_t(1 - end->rank)]->rdma->queue(end->rank, 0).signal_rkey;
      EXPECT(bool(mr->access & IBV_ACCESS_REMOTE_READ) == (mr->mr.rkey == strict), "%x",
             mr->access);
    }
  }
  const Ranks none = make({{1, 1}, {1, 1}}, 1);
  for (const auto& end : none) end->options.remote_reads = true;
  none[1]->verbs->devices[0].max_rd_atomic = 0;
  start_all(none);
  EXPECT(none[0]->rdma->queue(1, 0).max_reads == 0, "a device that answers none");
}

// Registration finds the locked-memory limit: the limit, the need, the remedy; earlier ones undone.
void test_locked_memory() {
  rlimit before{};
  getrlimit(RLIMIT_MEMLOCK, &before);
  rlimit small = before;
  small.rlim_cur = 65536;
  EXPECT(setrlimit(RLIMIT_MEMLOCK, &small) == 0, "setrlimit: %d", errno);
  const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
  for (int which = 0; which < 6; ++which) {  // data, signals and sink of two devices
    Rank rank(0, 2, 2, 1, 2);
    int seen = 0;
    rank.verbs->refuse = [&](const std::string& call) {
      return call == "ibv_reg_mr" && seen++ == which ? ENOMEM : 0;
    };
    rank.rdma = std::make_unique<Rdma>();
    EXPECT_OK(rank.rdma->open(rank.options));
    const Status status = rank.rdma->register_heap(rank.heap.data(), rank.heap.size());
    EXPECT(status.code == Code::kOutOfMemory && status.sys_errno == ENOMEM, "%d: %s",
           int(status.code), status.text.c_str());
    for (const std::string& part :
         {std::string("ibv_reg_mr"), "mlx5_" + std::to_string(which / 3), std::string("errno 12"),
          std::string("65536 bytes"), std::to_string(2 * (2 * kHeapBytes + page)) + " bytes in all",
          std::string("ulimit -l unlimited"), std::string("--ulimit memlock=-1")}) {
      EXPECT(has(status.text, part), "%s is not in: %s", part.c_str(), status.text.c_str());
    }
    EXPECT(rank.verbs->mrs.empty(), "%s", rank.verbs->living().c_str());
    // Once the limit is raised the same object registers.
    rank.verbs->refuse = nullptr;
    EXPECT_OK(rank.rdma->register_heap(rank.heap.data(), rank.heap.size()));
  }
  Rank rank(0, 2, 1, 1, 2);
  rank.verbs->refuse = [](const std::string& call) { return call == "ibv_create_cq" ? ENOMEM : 0; };
  const Status status = rank.start();
  EXPECT(status.code == Code::kOutOfMemory && has(status.text, "ibv_create_cq on mlx5_0 port 1") &&
             has(status.text, "65536 bytes") &&
             has(status.text, "768 entries, about 49152 bytes") &&
             has(status.text, "ulimit -l unlimited"),
         "%s", status.text.c_str());
  setrlimit(RLIMIT_MEMLOCK, &before);
}

// Each call of a rank's whole life fails once: a typed error that names it, and nothing is left.
void test_every_call_fails_in_turn(bool mapping, bool cq_per_qp) {
  const Ranks ranks = make({{2, 1}, {1, 2}}, 2);
  for (const auto& rank : ranks) {
    rank->verbs->mapping = mapping;
    rank->options.cq_per_qp = cq_per_qp;
  }
  start_all(ranks);
  const std::vector<std::string> calls = ranks[0]->verbs->calls;
  EXPECT(calls.size() > 20, "%zu calls", calls.size());
  std::set<std::string> tried;
  for (size_t number = 0; number < calls.size(); ++number) {
    for (const int why : {EIO, ENOMEM, EINVAL, EACCES}) {
      Rank rank(0, 2, 2, 1, 2);
      rank.verbs->mapping = mapping;
      rank.options.cq_per_qp = cq_per_qp;
      rank.verbs->fail_at = int(number);
      rank.verbs->fail_with = why;
      Status status = rank.start();
      if (status.ok()) {
        std::vector<std::byte*> mapped{nullptr, ranks[1]->heap.data()};
        status = rank.rdma->connect(0, {rank.info, ranks[1]->info}, {true, true}, mapped, 30);
      }
      const std::string& call = calls[number];
      tried.insert(call);
      // What a device may refuse is asked for again with less.
      const bool second_chance =
          (call == "ibv_create_qp" && why == EINVAL) || (call == "ibv_reg_mr" && why != ENOMEM);
      if (status.ok()) {
        EXPECT(second_chance, "%s failed with %d and nobody noticed", call.c_str(), why);
      } else {
        EXPECT(has(status.text, call), "%s is not named: %s", call.c_str(), status.text.c_str());
        EXPECT(call == "attach_remote" || has(status.text, "mlx5_"), "%s", status.text.c_str());
        if (call != "attach_remote" && call != "ibv_query_gid") {
          EXPECT(has(status.text, "errno " + std::to_string(why)), "%s", status.text.c_str());
          EXPECT(status.sys_errno == why, "%d", status.sys_errno);
        }
        EXPECT(status.code ==
                   (why == ENOMEM && call != "attach_remote" && call != "ibv_query_gid"
                        ? Code::kOutOfMemory
                    : call == "ibv_query_gid" || (call == "ibv_open_device" && why == EACCES)
                        ? Code::kUnavailable
                        : Code::kSystem),
               "%d: %s", int(status.code), status.text.c_str());
        if (call != "ibv_reg_mr") {  // open and connect undo themselves, registration itself
          EXPECT(rank.verbs->alive() == 0, "%s after %s", rank.verbs->living().c_str(),
                 status.text.c_str());
        }
        EXPECT(rank.verbs->mrs.empty(), "registrations are left");
      }
      rank.rdma->close();
      rank.rdma->close();
      EXPECT(rank.verbs->alive() == 0, "%s", rank.verbs->living().c_str());
    }
  }
  const std::set<std::string> all = {"ibv_open_device", "ibv_query_device", "ibv_query_port",
                                     "ibv_query_gid",   "ibv_alloc_pd",     "ibv_reg_mr",
                                     "ibv_create_cq",   "ibv_create_qp",    "ibv_modify_qp"};
  EXPECT(std::includes(tried.begin(), tried.end(), all.begin(), all.end()),
         "some call was not tried");
}

void expect_unavailable(Rank& rank, const std::vector<std::string>& parts) {
  const Status status = rank.start();
  EXPECT(status.code == Code::kUnavailable, "%d: %s", int(status.code), status.text.c_str());
  for (const std::string& part : parts) {
    EXPECT(has(status.text, part), "%s is not in: %s", part.c_str(), status.text.c_str());
  }
  EXPECT(rank.verbs->alive() == 0, "%s", rank.verbs->living().c_str());
}

void test_paths_that_are_not_there() {
  {
    Rank rank(0, 2, 1, 1, 1);
    rank.verbs->devices[0].ports[0].state = IBV_PORT_DOWN;
    expect_unavailable(rank, {"mlx5_0 port 1", "down", "EPCOMM_IB_HCA"});
  }
  {
    Rank rank(0, 2, 1, 1, 1);
    rank.verbs->devices[0].ports[0].gids[1] = gid_of(0, 7);
    rank.options.paths[0].gid_index = 5;
    expect_unavailable(rank, {"no GID of index 5", "1 ::ffff:10.77.0.8", "3 ::ffff:10.77.0.1",
                              "EPCOMM_IB_GID_INDEX"});
  }
  {
    Rank rank(0, 2, 1, 1, 1);
    rank.options.paths[0].port = 2;
    expect_unavailable(rank, {"mlx5_0 has no port 2"});
  }
  {
    Rank rank(0, 2, 1, 1, 1);
    rank.options.paths.push_back({"mlx5_9", 1, 3});
    expect_unavailable(rank, {"mlx5_9", "errno 19", "python -m epcomm info"});
  }
  // A container sees every device in /sys, and may open those alone that it was given.
  for (const int why : {EACCES, EPERM, ENOENT, ENXIO}) {
    Rank rank(0, 2, 1, 1, 1);
    rank.verbs->refuse = [&](const std::string& call) {
      return call == "ibv_open_device" ? why : 0;
    };
    expect_unavailable(rank, {"ibv_open_device on mlx5_0", "errno " + std::to_string(why),
                              "--device=/dev/infiniband"});
  }
  {
    Rank rank(0, 2, 1, 1, 1);
    rank.options.paths.clear();
    expect_unavailable(rank, {"no NIC port"});
  }
  Rank rank(0, 2, 1, 1, 1);
  rank.options.paths[0].gid_index = -1;
  const Status status = rank.start();
  EXPECT(status.code == Code::kInvalidArgument && has(status.text, "GID index"), "%s",
         status.text.c_str());
}

void test_partition_keys() {
  Rank rank(0, 2, 1, 1, 1);
  rank.options.pkey_index = 5;
  EXPECT_OK(rank.start());
  for (const ScriptedQp* qp : rank.verbs->qps) {
    EXPECT(qp->attr.pkey_index == 5, "%d", qp->attr.pkey_index);
  }
  Rank none(0, 2, 1, 1, 1);
  none.options.pkey_index = 8;
  const Status status = none.start();
  EXPECT(status.code == Code::kInvalidArgument &&
             has(status.text, "EPCOMM_IB_PKEY is 8; mlx5_0 port 1 has partition keys 0 to 7"),
         "%s", status.text.c_str());
  EXPECT(none.verbs->alive() == 0, "%s", none.verbs->living().c_str());
}

void test_peers_that_do_not_fit() {
  const auto refused = [](const std::function<void(Rank&)>& change, const std::string& part) {
    const Ranks ranks = make({{1, 1}, {1, 1}}, 2);
    change(*ranks[1]);
    for (const auto& rank : ranks) EXPECT_OK(rank->start());
    const Status status = connect(*ranks[0], ranks);
    EXPECT(status.code == Code::kUnavailable && status.peer == 1, "%d: %s", int(status.code),
           status.text.c_str());
    EXPECT(has(status.text, part), "%s is not in: %s", part.c_str(), status.text.c_str());
    EXPECT(ranks[0]->verbs->alive() == 0, "%s", ranks[0]->verbs->living().c_str());
  };
  refused(
      [](Rank& rank) {
        ScriptedPort& port = rank.verbs->devices[0].ports[0];
        port.link_layer = IBV_LINK_LAYER_INFINIBAND;
        port.lid = 7;
      },
      "mlx5_0 port 1 is Ethernet, but mlx5_0 port 1 of rank 1 is InfiniBand");
  // A link-local GID beside a peer's IPv4 one: some kernels connect them, and nothing arrives.
  refused(
      [](Rank& rank) {
        rank.verbs->devices[0].ports[0].gids[3] = {};
        rank.verbs->devices[0].ports[0].gids[3].raw[0] = 0xfe;
        rank.verbs->devices[0].ports[0].gids[3].raw[1] = 0x80;
      },
      "mlx5_0 port 1 has GID ::ffff:10.77.0.1 (IPv4), but mlx5_0 port 1 of rank 1 has GID fe80:: "
      "(IPv6)");
  refused([](Rank& rank) { rank.options.num_channels = 3; }, "2 ranks and 3 channels");
  refused([](Rank& rank) { rank.verbs->mapping = true; }, "EPCOMM_IB_PROVIDER");
  refused([](Rank& rank) { rank.heap.resize(2 * kHeapBytes); }, "`rdma.heap` is damaged");

  // Any byte of a peer's text may be wrong: an error, or a value that a device could have.
  const Ranks ranks = make({{1, 1}, {1, 1}}, 2);
  for (const auto& rank : ranks) EXPECT_OK(rank->start());
  std::string text;
  EXPECT_OK(ranks[1]->info.encode("x", 1, &text));
  Random random(7);
  int errors = 0;
  for (int round = 0; round < 300; ++round) {
    std::string damaged = text;
    damaged[size_t(random.below(int64_t(text.size())))] = char(random.between(32, 126));
    Info info;
    if (!Info::decode(damaged, 1, "x", 1, &info).ok()) continue;
    Rank rank(0, 2, 1, 1, 2);
    EXPECT_OK(rank.start());
    const Status status = rank.rdma->connect(0, {rank.info, info}, {true, true}, {}, 30);
    if (!status.ok()) {
      ++errors;
      EXPECT(status.code == Code::kUnavailable && status.peer == 1, "%d: %s", int(status.code),
             status.text.c_str());
    }
  }
  EXPECT(errors > 50, "%d errors", errors);
}

void test_infiniband() {
  const auto shape = [](Rank& rank, bool with_gid) {
    ScriptedPort& port = rank.verbs->devices[0].ports[0];
    port.link_layer = IBV_LINK_LAYER_INFINIBAND;
    port.lid = uint16_t(10 + rank.rank);
    port.gids[0] = gid_of(rank.rank, 0);
    rank.options.paths[0].gid_index = with_gid ? 0 : -1;
    rank.options.service_level = 3;
    rank.options.traffic_class = 106;
  };
  for (const bool with_gid : {false, true}) {
    const Ranks ranks = make({{1, 1}, {1, 1}}, 1);
    for (const auto& rank : ranks) shape(*rank, with_gid);
    start_all(ranks);
    const ibv_ah_attr& ah = (*ranks[0]->verbs->qps.begin())->attr.ah_attr;
    EXPECT(ah.dlid == 11 && ah.sl == 3 && ah.is_global == with_gid, "lid %d sl %d", ah.dlid, ah.sl);
    EXPECT(!with_gid || ah.grh.traffic_class == 106, "%d", ah.grh.traffic_class);
  }
  // Another subnet is reached through a router.
  const Ranks ranks = make({{1, 1}, {1, 1}}, 1);
  for (const auto& rank : ranks) shape(*rank, false);
  ranks[1]->verbs->devices[0].ports[0].gids[0].raw[0] = 0xfe;
  start_all(ranks);
  EXPECT((*ranks[0]->verbs->qps.begin())->attr.ah_attr.is_global == 1, "no global header");
}

void test_near_peers_get_none() {
  const Ranks ranks = make({{1, 1}, {1, 1}, {1, 1}}, 3);
  for (const auto& rank : ranks) EXPECT_OK(rank->start());
  EXPECT(ranks[0]->verbs->qps.size() == 8, "%zu", ranks[0]->verbs->qps.size());
  EXPECT_OK(connect(*ranks[0], ranks, 30, 1));
  EXPECT(ranks[0]->verbs->qps.size() == 4, "%zu", ranks[0]->verbs->qps.size());
  EXPECT(!ranks[0]->rdma->queue(1, 0).qp && ranks[0]->rdma->queue(2, 0).qp, "the wrong ones");
}

void test_timers() {
  for (const double deadline : {0.1, 1.0, 2.0, 5.0, 9.0, 30.0, 120.0, 300.0, 3600.0, 864000.0}) {
    const Ranks ranks = make({{1, 1}, {1, 1}}, 1);
    for (const auto& rank : ranks) EXPECT_OK(rank->start());
    EXPECT_OK(connect(*ranks[0], ranks, deadline));
    const ibv_qp_attr& attr = (*ranks[0]->verbs->qps.begin())->attr;
    const double all = (attr.retry_cnt + 1) * 4.096e-6 * std::ldexp(1.0, attr.timeout);
    EXPECT(attr.timeout >= 18 && attr.timeout <= 20, "timer %d", attr.timeout);
    EXPECT(attr.retry_cnt >= 1 && attr.retry_cnt <= 6 && attr.rnr_retry < 7, "%d", attr.retry_cnt);
    EXPECT(all <= deadline || attr.retry_cnt == 1, "%g s of %g s", all, deadline);
    EXPECT(deadline < 9 || attr.retry_cnt == 6, "%d attempts in %g s", attr.retry_cnt, deadline);
    EXPECT(std::abs(all - ranks[0]->rdma->retry_seconds()) < 1e-6, "told otherwise");
  }
}

void test_memory_is_shown_to_providers_without_a_wire() {
  const Ranks ranks = make({{2, 1}, {1, 2}}, 1);
  for (const auto& rank : ranks) rank->verbs->mapping = true;
  start_all(ranks);
  // For each own device, each port of the peer, each of its two keys.
  EXPECT(ranks[0]->verbs->attached.size() == 2 * 2 * 2, "%zu", ranks[0]->verbs->attached.size());
  for (const common::RemoteMemory& memory : ranks[0]->verbs->attached) {
    EXPECT(memory.mapped == ranks[1]->heap.data() && memory.bytes == kHeapBytes, "wrong memory");
  }
  const Ranks unmapped = make({{1, 1}, {1, 1}}, 1);
  for (const auto& rank : unmapped) {
    rank->verbs->mapping = true;
    EXPECT_OK(rank->start());
  }
  const Status status =
      unmapped[0]->rdma->connect(0, {unmapped[0]->info, unmapped[1]->info}, {true, true}, {}, 30);
  EXPECT(status.code == Code::kUnavailable && has(status.text, "not mapped"), "%s",
         status.text.c_str());
}

// Two devices count their queue pairs from the same number.
void test_numbers_of_two_devices() {
  Rank rank(0, 2, 2, 1, 3);
  rank.verbs->refuse = [&](const std::string& call) {
    if (call == "ibv_create_cq") rank.verbs->next_qpn = 500;
    return 0;
  };
  EXPECT_OK(rank.start());
  EXPECT(rank.rdma->queue_of(0, 500) == plan_index({2, 3, 2}, 1, 0), "path 0");
  EXPECT(rank.rdma->queue_of(1, 500) == plan_index({2, 3, 2}, 1, 1), "path 1");
  EXPECT(rank.rdma->queue_of(0, 9999) == -1, "none");
  uint64_t a = 0, b = 0;
  uint32_t lkey_a = 0, lkey_b = 0;
  rank.rdma->sink(0, &a, &lkey_a);
  rank.rdma->sink(1, &b, &lkey_b);
  EXPECT(a != b && a % 8 == 0 && lkey_a != lkey_b, "sinks are shared");
}

void test_what_a_fork_inherits_is_left_alone() {
  const Ranks ranks = make({{1, 1}, {1, 1}}, 1);
  start_all(ranks);
  const pid_t child = fork();
  if (child == 0) {
    ScriptedVerbs& verbs = *ranks[0]->verbs;
    const size_t calls = verbs.calls.size(), alive = verbs.alive();
    ranks[0]->rdma->forget();
    ranks[0]->rdma->close();
    ranks[0]->rdma.reset();
    EXPECT(verbs.calls.size() == calls && verbs.alive() == alive, "the child touched the device");
    _exit(0);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0, "the child's status is %x", status);
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) {
  using namespace epcomm::testing;
  Options options(argc, argv);
  options.finish();
  set_deadline(120);
  test_both_ends_agree();
  test_mtu();
  test_completion_queues();
  test_limits_of_the_device();
  test_remote_reads();
  test_locked_memory();
  test_every_call_fails_in_turn(false, false);
  test_every_call_fails_in_turn(true, true);
  test_paths_that_are_not_there();
  test_partition_keys();
  test_peers_that_do_not_fit();
  test_infiniband();
  test_near_peers_get_none();
  test_timers();
  test_memory_is_shown_to_providers_without_a_wire();
  test_numbers_of_two_devices();
  test_what_a_fork_inherits_is_left_alone();
  std::printf("rdma: all as it should be\n");
  return 0;
}
