// The software HCA: verbs and raw rings over it, wraps, sharing, chaos, faults, and that it refuses
// what a NIC would refuse.
//
//   softhca_test [--seed S] [--requests N] [--only NAME]

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "softhca_pair.hpp"

namespace epcomm::testing {
namespace {

using softhca::SoftHcaOptions;

// Verbs ------------------------------------------------------------------------------------------

int post(ibv_qp* qp, ibv_wr_opcode opcode, uint64_t wr_id, uint64_t local, uint32_t lkey,
         uint32_t bytes, uint64_t remote, uint32_t rkey, unsigned flags, uint64_t add = 0,
         uint64_t swap = 0) {
  ibv_sge sge{local, bytes, lkey};
  ibv_send_wr wr{}, *bad = nullptr;
  wr.wr_id = wr_id;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = opcode;
  wr.send_flags = flags;
  if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
    wr.wr.atomic = {remote, add, swap, rkey};
  } else {
    wr.wr.rdma = {remote, rkey};
  }
  return ibv_post_send(qp, &wr, &bad);
}

ibv_wc wait_one(ibv_cq* cq) {
  ibv_wc wc{};
  while (true) {
    const int got = ibv_poll_cq(cq, 1, &wc);
    EXPECT(got >= 0, "ibv_poll_cq: %d", got);
    if (got == 1) return wc;
    std::this_thread::yield();
  }
}

void test_verbs() {
  auto provider = provider_of({});
  std::vector<std::string> names;
  EXPECT_OK(provider->device_names(&names));
  EXPECT(names.size() == 2 && names[1] == "soft1", "%zu names", names.size());
  SoftPort a(provider.get(), "soft0", 1 << 14), b(provider.get(), "soft1", 1 << 14);
  EXPECT(a.key() != b.key(), "keys of two ports are equal");
  ibv_qp *qa = a.make_qp(64), *qb = b.make_qp(64);
  EXPECT(post(qa, IBV_WR_RDMA_WRITE, 1, a.address(), a.key(), 8, b.address(), b.key(), 0) == EINVAL,
         "posting before RTS");
  connect_both(provider.get(), a, qa, b, qb);
  for (uint64_t i = 0; i < 1024; ++i) a.words()[i] = mix(7, i);
  EXPECT(
      post(qa, IBV_WR_RDMA_WRITE, 11, a.address(), a.key(), 8192, b.address(512), b.key(), 0) == 0,
      "write");
  EXPECT(post(qa, IBV_WR_ATOMIC_FETCH_AND_ADD, 12, a.address(2048), a.key(), 8, b.address(4000),
              b.key(), IBV_SEND_SIGNALED, 5) == 0,
         "add");
  ibv_wc wc = wait_one(qa->send_cq);
  EXPECT(wc.status == IBV_WC_SUCCESS && wc.wr_id == 12 && wc.opcode == IBV_WC_FETCH_ADD &&
             wc.qp_num == qa->qp_num,
         "status %d wr_id %d", int(wc.status), int(wc.wr_id));
  EXPECT(std::equal(a.words(), a.words() + 1024, b.words() + 512), "bytes");
  EXPECT(b.words()[4000] == 5 && a.words()[2048] == 0, "add: %d", int(b.words()[4000]));
  EXPECT(post(qa, IBV_WR_ATOMIC_CMP_AND_SWP, 13, a.address(2048), a.key(), 8, b.address(4000),
              b.key(), IBV_SEND_SIGNALED, 5, 77) == 0,
         "swap");
  wc = wait_one(qa->send_cq);
  EXPECT(wc.status == IBV_WC_SUCCESS && b.words()[4000] == 77 && a.words()[2048] == 5, "swap");
  uint64_t inlined[4] = {1, 2, 3, 4};
  EXPECT(post(qa, IBV_WR_RDMA_WRITE, 14, uint64_t(inlined), 0, 28, b.address(4096), b.key(),
              IBV_SEND_SIGNALED | IBV_SEND_INLINE) == 0,
         "inline");
  inlined[0] = inlined[1] = 9;
  wc = wait_one(qa->send_cq);
  EXPECT(b.words()[4096] == 1 && b.words()[4098] == 3 && uint32_t(b.words()[4099]) == 4, "inline");
  EXPECT(post(qa, IBV_WR_RDMA_WRITE, 15, uint64_t(inlined), 0, 32, b.address(), b.key(),
              IBV_SEND_SIGNALED | IBV_SEND_INLINE) == EINVAL,
         "too many inline bytes");
  EXPECT(post(qa, IBV_WR_RDMA_READ, 16, a.address(8192), a.key(), 8192, b.address(512), b.key(),
              IBV_SEND_SIGNALED) == 0,
         "read");
  wc = wait_one(qa->send_cq);
  EXPECT(wc.opcode == IBV_WC_RDMA_READ && std::equal(a.words(), a.words() + 1024, a.words() + 8192),
         "read");
  // More than fits is refused, not overwritten.
  int posted = 0;
  while (post(qa, IBV_WR_RDMA_WRITE, 100, a.address(), a.key(), 8, b.address(), b.key(),
              posted == 63 ? IBV_SEND_SIGNALED : 0) == 0) {
    ++posted;
  }
  EXPECT(posted == 64, "%d posted at depth 64", posted);
  wc = wait_one(qa->send_cq);
  EXPECT(wc.status == IBV_WC_SUCCESS, "status %d", int(wc.status));
}

struct Bad {
  const char* what;
  ibv_wc_status status;
  uint8_t vendor;
  uint64_t local_word, remote_word;
  bool bad_lkey, bad_rkey;
  ibv_wr_opcode opcode;
};

void test_refusals() {
  const Bad bads[] = {
      {"bad lkey", IBV_WC_LOC_PROT_ERR, softhca::kBadKey, 0, 0, true, false, IBV_WR_RDMA_WRITE},
      {"bad rkey", IBV_WC_REM_ACCESS_ERR, softhca::kBadKey, 0, 0, false, true, IBV_WR_RDMA_WRITE},
      {"source outside", IBV_WC_LOC_PROT_ERR, softhca::kBadKey, 1023, 0, false, false,
       IBV_WR_RDMA_WRITE},
      {"target outside", IBV_WC_REM_ACCESS_ERR, softhca::kBadKey, 0, 1023, false, false,
       IBV_WR_RDMA_WRITE},
      {"nobody received", IBV_WC_RNR_RETRY_EXC_ERR, softhca::kNoResponder, 0, 0, false, false,
       IBV_WR_RDMA_WRITE_WITH_IMM},
  };
  for (const Bad& bad : bads) {
    auto provider = provider_of({});
    SoftPort a(provider.get(), "soft0", 1024), b(provider.get(), "soft0", 1024);
    ibv_qp *qa = a.make_qp(16), *qb = b.make_qp(16);
    connect_both(provider.get(), a, qa, b, qb);
    EXPECT(post(qa, IBV_WR_RDMA_WRITE, 1, a.address(), a.key(), 8, b.address(), b.key(), 0) == 0,
           "good");
    EXPECT(post(qa, bad.opcode, 2, a.address(bad.local_word), a.key() ^ (bad.bad_lkey ? 0x5500 : 0),
                16, b.address(bad.remote_word), b.key() ^ (bad.bad_rkey ? 0x5500 : 0), 0) == 0,
           "bad");
    EXPECT(post(qa, IBV_WR_RDMA_WRITE, 3, a.address(), a.key(), 8, b.address(8), b.key(), 0) == 0,
           "behind");
    ibv_wc wc = wait_one(qa->send_cq);
    EXPECT(wc.wr_id == 2 && wc.status == bad.status && wc.vendor_err == bad.vendor,
           "%s: wr_id %d status %d vendor %x", bad.what, int(wc.wr_id), int(wc.status),
           wc.vendor_err);
    wc = wait_one(qa->send_cq);
    EXPECT(wc.wr_id == 3 && wc.status == IBV_WC_WR_FLUSH_ERR, "%s: not flushed", bad.what);
    EXPECT(!provider->explain(qa).empty(), "no explanation");
    ibv_qp_attr attr;
    ibv_qp_init_attr init;
    EXPECT(provider->query_qp(qa, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR,
           "%s: state %d", bad.what, int(attr.qp_state));
    // What is posted now is flushed too; after RESET the pair works again.
    EXPECT(post(qa, IBV_WR_RDMA_WRITE, 4, a.address(), a.key(), 8, b.address(), b.key(), 0) == 0,
           "in ERROR");
    wc = wait_one(qa->send_cq);
    EXPECT(wc.wr_id == 4 && wc.status == IBV_WC_WR_FLUSH_ERR, "%s: not flushed", bad.what);
    attr = {};
    attr.qp_state = IBV_QPS_RESET;
    EXPECT(provider->modify_qp(qa, &attr, IBV_QP_STATE) == 0, "to RESET");
    connect_one(provider.get(), qa, b.gid(), qb->qp_num);
    a.words()[0] = 42;
    EXPECT(post(qa, IBV_WR_RDMA_WRITE, 5, a.address(), a.key(), 8, b.address(), b.key(),
                IBV_SEND_SIGNALED) == 0,
           "again");
    wc = wait_one(qa->send_cq);
    EXPECT(wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS && b.words()[0] == 42,
           "%s: after RESET: %d", bad.what, int(wc.status));
  }
}

// Memory of a peer's process: an address that means nothing here, shown by attach_remote().
void test_remote_memory() {
  auto mine = provider_of({}), theirs = provider_of({});
  SoftPort a(mine.get(), "soft0", 1024), b(theirs.get(), "soft1", 1024);
  ibv_qp *qa = a.make_qp(16), *qb = b.make_qp(16);
  connect_one(mine.get(), qa, b.gid(), qb->qp_num);
  constexpr uint64_t kElsewhere = 0x700000000000;
  common::RemoteMemory memory;
  memory.gid = b.gid();
  memory.rkey = b.key();
  memory.address = kElsewhere;
  memory.bytes = 8192;
  memory.mapped = reinterpret_cast<std::byte*>(b.words());
  EXPECT_OK(mine->attach_remote(a.context(), memory));
  a.words()[3] = 99;
  EXPECT(post(qa, IBV_WR_RDMA_WRITE, 1, a.address(), a.key(), 64, kElsewhere + 8000, b.key(),
              IBV_SEND_SIGNALED) == 0,
         "write");
  EXPECT(wait_one(qa->send_cq).status == IBV_WC_SUCCESS && b.words()[1003] == 99, "write");
  EXPECT(post(qa, IBV_WR_RDMA_WRITE, 1, a.address(), a.key(), 64, kElsewhere + 8136, b.key(),
              IBV_SEND_SIGNALED) == 0,
         "write");
  EXPECT(wait_one(qa->send_cq).status == IBV_WC_REM_ACCESS_ERR, "outside");
}

void test_plans() {
  std::shared_ptr<common::VerbsProvider> provider;
  SoftHcaOptions options;
  const std::pair<const char*, const char*> bad[] = {{"explode", "expected one of early_fetch"},
                                                     {"delay", "us= is missing"},
                                                     {"delay us=-1", "us=-1: expected"},
                                                     {"error port=0", "syndrome= is missing"},
                                                     {"error syndrome=0x13 port=7", "port=7"},
                                                     {"shuffle us=3", "shuffle us=3: expected"},
                                                     {"delay us=1e", "us=1e"},
                                                     {"slow_port gbps=0", "gbps=0"},
                                                     {"poison p=2", "p=2: expected"},
                                                     {"poison p", "poison p: expected"}};
  for (const auto& [text, reason] : bad) {
    options.faults = text;
    const Status status = softhca::make_softhca(options, &provider);
    EXPECT(status.code == Code::kInvalidArgument && status.text.find(reason) != std::string::npos,
           "%s: %s", text, status.text.c_str());
  }
  options.faults = " error wqe=5 syndrome=0x13, port=1;; port_down at_ms=1 for_ms=2 ;";
  EXPECT_OK(softhca::make_softhca(options, &provider));
}

int run(int argc, char** argv) {
  Options options(argc, argv);
  const uint64_t seed = uint64_t(options.number("seed", 1));
  const std::string only = options.text("only", "");
  options.finish();
  (void)seed;
  set_deadline(300);
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"verbs", test_verbs},
      {"refusals", test_refusals},
      {"remote_memory", test_remote_memory},
      {"plans", test_plans},
  };
  for (const auto& [name, test] : tests) {
    if (!only.empty() && only != name) continue;
    test();
    std::printf("%s: ok\n", name);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::run(argc, argv); }
