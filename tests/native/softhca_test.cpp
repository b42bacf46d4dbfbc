// The software HCA: verbs and raw rings over it, wraps, sharing, chaos, faults, and that it refuses
// what a NIC would refuse.
//
//   softhca_test [--seed S] [--requests N] [--only NAME]

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "scarce_memory.hpp"
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
  ibv_send_wr nothing{}, *bad = nullptr;
  nothing.wr_id = 17;
  nothing.opcode = IBV_WR_RDMA_WRITE;
  nothing.send_flags = IBV_SEND_SIGNALED;
  EXPECT(ibv_post_send(qa, &nothing, &bad) == 0, "a write of nothing");
  wc = wait_one(qa->send_cq);
  EXPECT(wc.wr_id == 17 && wc.status == IBV_WC_SUCCESS, "a write of nothing: %d", int(wc.status));
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

// What is refused uses no wire: on a slow one too it fails at once, as long as it may claim to be.
void test_refused_at_once() {
  SoftHcaOptions soft;
  soft.gbps = 0.001;
  auto provider = provider_of(soft);
  SoftPort a(provider.get(), "soft0", 1024), b(provider.get(), "soft0", 1024);
  ibv_qp *qa = a.make_qp(16), *qb = b.make_qp(16);
  connect_both(provider.get(), a, qa, b, qb);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT(post(qa, IBV_WR_RDMA_WRITE, 1, a.address(), a.key(), 0x7fffffff, b.address(), b.key(),
              0) == 0,
         "too long");
  ibv_wc wc{};
  while (ibv_poll_cq(qa->send_cq, 1, &wc) == 0) {
    EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10),
           "still not refused");
    std::this_thread::yield();
  }
  EXPECT(wc.status == IBV_WC_LOC_LEN_ERR && wc.vendor_err == softhca::kTooLong, "%d", wc.status);
}

// Records that were seen early, all of it done; then one doorbell for all, and the last one again,
// which is older than the queue is deep. Nothing is wrong with the one who posts.
void test_old_doorbell() {
  SoftHcaOptions soft;
  soft.faults = "early_fetch; duplicate_doorbell";
  auto provider = provider_of(soft);
  SoftPort a(provider.get(), "soft0", 1024), b(provider.get(), "soft0", 1024);
  ibv_qp *qa = a.make_qp(4), *qb = b.make_qp(4);
  connect_both(provider.get(), a, qa, b, qb);
  const mlx5::Rings rings = rings_of(provider.get(), qa);
  using Memory = mlx5::HostMemory;
  auto* const record = reinterpret_cast<uint32_t*>(rings.sq_record);
  auto* const doorbell = reinterpret_cast<uint64_t*>(rings.doorbell);
  mlx5::Numbers numbers{};
  for (uint64_t next = 4; next <= 32; next += 4) {
    for (uint64_t n = next - 4; n < next; ++n) {
      mlx5::Queue<Memory>::set(rings, n, mlx5::nop(uint16_t(n), rings.qpn, mlx5::kSignalled));
    }
    Memory::fence();
    if (next % 16 == 4) {
      Memory::tell(record, mlx5::record_value(next), doorbell,
                   mlx5::doorbell_value(next, rings.qpn));
    } else {
      Memory::set_record(record, mlx5::record_value(next));
    }
    while (numbers.done < next && !numbers.failed) {
      mlx5::Queue<Memory>::poll(rings, &numbers, 16);
      std::this_thread::yield();
    }
    EXPECT(!numbers.failed, "after %d: %s", int(next), provider->explain(qa).c_str());
  }
}

// A model without memory is a dead port that says why, not the end of the process.
void test_no_memory() {
  SoftHcaOptions soft;
  soft.faults = "early_read";
  auto provider = provider_of(soft);
  SoftPort a(provider.get(), "soft0", 1 << 14), b(provider.get(), "soft1", 1 << 14);
  ibv_qp *qa = a.make_qp(16), *qb = b.make_qp(16);
  connect_both(provider.get(), a, qa, b, qb);
  constexpr uint32_t kBytes = 77777;
  refused_bytes = kBytes;
  EXPECT(post(qa, IBV_WR_RDMA_WRITE, 1, a.address(), a.key(), kBytes, b.address(), b.key(),
              IBV_SEND_SIGNALED) == 0,
         "write");
  while (provider->explain(qa).empty()) std::this_thread::yield();
  refused_bytes = 0;
  EXPECT(provider->explain(qa).find("memory") != std::string::npos, "%s",
         provider->explain(qa).c_str());
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT(provider->query_qp(qa, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR,
         "state %d", int(attr.qp_state));
  ibv_wc wc{};
  EXPECT(ibv_poll_cq(qa->send_cq, 1, &wc) == 0, "a completion");
}

// Any one piece of memory that is not to be had while ports are set up: a refusal, nothing left
// over.
void test_setup_without_memory() {
  std::vector<uint64_t> heap(64);
  for (int64_t pieces = 0;; ++pieces) {
    auto provider = provider_of({});
    pieces_left = pieces;
    ibv_context* const context = provider->open_device("soft0");
    ibv_pd* const pd = context ? provider->alloc_pd(context) : nullptr;
    ibv_mr* const mr = pd ? provider->reg_mr(pd, heap.data(), 512, kAllAccess) : nullptr;
    ibv_cq* const cq = mr ? provider->create_cq(context, 8) : nullptr;
    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = init.recv_cq = cq;
    init.cap.max_send_wr = 8;
    init.cap.max_send_sge = 1;
    ibv_qp* const qp = cq ? provider->create_qp(pd, &init) : nullptr;
    ibv_qp_attr attr{};
    attr.port_num = 1;
    attr.ah_attr.is_global = 1;
    attr.qp_state = IBV_QPS_INIT;
    int why = qp ? provider->modify_qp(qp, &attr, -1) : 0;
    attr.qp_state = IBV_QPS_RTR;
    if (qp && !why) why = provider->modify_qp(qp, &attr, -1);
    const bool whole = pieces_left > 0;
    pieces_left = -1;
    EXPECT(why == 0 || why == ENOMEM, "modify_qp: %d", why);
    if (qp) EXPECT(provider->destroy_qp(qp) == 0, "destroy_qp after %d pieces", int(pieces));
    if (cq) EXPECT(provider->destroy_cq(cq) == 0, "destroy_cq after %d pieces", int(pieces));
    if (mr) EXPECT(provider->dereg_mr(mr) == 0, "dereg_mr");
    if (pd) EXPECT(provider->dealloc_pd(pd) == 0, "dealloc_pd");
    if (context) EXPECT(provider->close_device(context) == 0, "close_device");
    if (whole) break;
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

void test_fault_plans() {
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

// Streams over raw rings -------------------------------------------------------------------------

// A known mistake, planted to see that the model or the checks find it.
enum class Plant {
  kNone,
  kNoFence,      // stores of a work request become visible only later
  kLateBuild,    // the doorbell rings before the work request is built
  kNoRoom,       // slots are reused without looking for completions
  kRecordBack,   // now and then the doorbell record goes back
  kReuse,        // a source is rewritten before its completion
  kEarlySignal,  // the signal is posted before its data
  kWrongQueue,   // the doorbell names another queue pair
};

// CPU threads on a machine that keeps stores back: what a GPU or a weak CPU may do. A fence pushes
// them out.
struct WeakMemory : mlx5::HostMemory {
  struct Held {
    mlx5::Segment* to;
    mlx5::Segment segment;
  };
  static inline thread_local std::vector<Held> held;
  static inline std::atomic<bool> no_fences{false};

  static void set_segment(mlx5::Segment* to, const mlx5::Segment& segment) {
    held.push_back({to, segment});
    if (held.size() > 12) {
      *held.front().to = held.front().segment;
      held.erase(held.begin());
    }
  }
  static void flush() {
    for (const Held& one : held) *one.to = one.segment;
    held.clear();
  }
  static void fence() {
    if (!no_fences) flush();
    HostMemory::fence();
  }
};

struct Stream {
  SoftHcaOptions soft;
  int producers = 1;
  bool shared = false;
  int64_t messages = 1000;  // of each producer; two work requests per message
  uint32_t depth = 64;
  uint32_t words = 16;
  int window = 16;  // messages of a producer that are not yet read
  int sources = 2;  // of a producer; one is used again after its completion
  Plant plant = Plant::kNone;
  double deadline_s = 60;
};

struct Outcome {
  int64_t read = 0;   // messages
  int64_t wrong = 0;  // words
  uint64_t failed = 0;
  bool stuck = false;
  std::string why;
};

template <class M>
class StreamRun {
  using Q = mlx5::Queue<M>;

 public:
  explicit StreamRun(const Stream& stream)
      : stream_(stream),
        provider_(provider_of(stream.soft)),
        a_(provider_.get(), "soft0", a_words()),
        b_(provider_.get(), "soft1", b_words()),
        consumed_(size_t(stream.producers)) {
    qa_ = a_.make_qp(stream.depth);
    ibv_qp* const qb = b_.make_qp(stream.depth);
    connect_both(provider_.get(), a_, qa_, b_, qb, 10, 1);
    rings_ = rings_of(provider_.get(), qa_);
    numbers_ = std::make_unique<mlx5::Numbers>();
  }

  Outcome run() {
    until_ = std::chrono::steady_clock::now() +
             std::chrono::milliseconds(int64_t(stream_.deadline_s * 1e3));
    std::vector<std::thread> threads;
    for (int p = 0; p < stream_.producers; ++p) {
      threads.emplace_back([this, p] { produce(p); });
    }
    consume();
    for (std::thread& thread : threads) thread.join();
    outcome_.failed = M::acquire(&numbers_->failed);
    if (outcome_.failed) outcome_.why = provider_->explain(qa_);
    return outcome_;
  }

 private:
  uint64_t a_words() const { return uint64_t(stream_.producers) * source_words() + 8; }
  uint64_t b_words() const { return uint64_t(stream_.producers) * target_words(); }
  uint64_t source_words() const { return uint64_t(stream_.sources) * stream_.words; }
  uint64_t target_words() const { return 8 + uint64_t(stream_.window) * stream_.words; }
  uint64_t word(int p, int64_t message, uint64_t i) const {
    return mix(uint64_t(p), uint64_t(message), i);
  }

  // False: give up.
  template <class Ready>
  bool wait(Ready&& ready) {
    while (!ready()) {
      stream_.shared ? Q::poll_shared(rings_, numbers_.get(), 16) : poll_alone();
      if (over_ || M::acquire(&numbers_->failed)) return false;
      if (std::chrono::steady_clock::now() > until_) {
        over_ = true;
        return false;
      }
      std::this_thread::yield();
    }
    return true;
  }
  int poll_alone() { return Q::poll(rings_, numbers_.get(), 16); }

  void produce(int p) {
    uint64_t* const sources = a_.words() + uint64_t(p) * source_words();
    std::vector<uint64_t> behind(size_t(stream_.sources), 0);  // number that frees the source
    for (int64_t k = 0; k < stream_.messages; ++k) {
      const size_t source = size_t(k % stream_.sources);
      if (!wait([&] { return consumed_[size_t(p)].load() > k - stream_.window; })) return;
      if (stream_.plant != Plant::kReuse && stream_.plant != Plant::kNoRoom &&
          !wait([&] { return M::acquire(&numbers_->done) >= behind[source]; })) {
        return;
      }
      uint64_t* const from = sources + source * stream_.words;
      for (uint32_t i = 0; i < stream_.words; ++i) from[i] = word(p, k, i);
      const mlx5::Local local{uint64_t(from), a_.key()};
      const uint64_t at = uint64_t(p) * target_words();
      const mlx5::Remote data{b_.address(at + 8 + uint64_t(k % stream_.window) * stream_.words),
                              b_.key()};
      const mlx5::Remote signal{b_.address(at), b_.key()};
      const mlx5::Local sink{a_.address(a_words() - 1), a_.key()};
      const uint64_t base = stream_.shared ? Q::reserve(numbers_.get(), 2) : next_;
      if (stream_.plant != Plant::kNoRoom &&
          !wait([&] { return Q::has_room(rings_, numbers_.get(), base + 1); })) {
        return;
      }
      const auto build = [&] {
        const uint64_t first = stream_.plant == Plant::kEarlySignal ? base + 1 : base;
        const uint64_t second = first ^ 1;
        Q::set(rings_, first,
               mlx5::write(uint16_t(first), rings_.qpn, mlx5::kSignalled, data, local,
                           stream_.words * 8));
        // Every third without a completion, so that some cover several.
        const uint8_t flags = k % 3 == 2 && k + 1 < stream_.messages ? 0 : mlx5::kSignalled;
        Q::set(rings_, second,
               mlx5::fetch_add(uint16_t(second), rings_.qpn, flags, signal, sink, 1));
      };
      if (stream_.plant != Plant::kLateBuild) build();
      if (stream_.shared) {
        if (!wait([&] { return Q::is_next(numbers_.get(), base); })) return;
        Q::commit(numbers_.get(), base, 2);
        if (!wait([&] { return Q::ring_ready(rings_, numbers_.get()); })) return;
      } else {
        next_ += 2;
        mlx5::Rings rings = rings_;
        if (stream_.plant == Plant::kWrongQueue && k >= 100) rings.qpn ^= 1;
        Q::publish(rings, numbers_.get(), next_);
        if (stream_.plant == Plant::kRecordBack && k % 64 == 63) {
          M::set_record(reinterpret_cast<uint32_t*>(rings_.sq_record),
                        mlx5::record_value(next_ - 5));
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
      if (stream_.plant == Plant::kLateBuild) {
        if (k % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        build();
      }
      behind[source] = base + 1;
    }
    WeakMemory::flush();
    wait([&] { return consumed_[size_t(p)].load() == stream_.messages; });
    if (!stream_.shared) wait([&] { return M::acquire(&numbers_->done) == next_; });
  }

  void consume() {
    int64_t left = int64_t(stream_.producers) * stream_.messages;
    std::vector<int64_t> next(size_t(stream_.producers), 0);
    while (left > 0) {
      bool any = false;
      for (int p = 0; p < stream_.producers; ++p) {
        const uint64_t at = uint64_t(p) * target_words();
        const int64_t arrived = int64_t(M::acquire(b_.words() + at));
        for (; next[size_t(p)] < arrived; ++next[size_t(p)], --left) {
          const int64_t k = next[size_t(p)];
          const uint64_t* const slot =
              b_.words() + at + 8 + uint64_t(k % stream_.window) * stream_.words;
          for (uint32_t i = 0; i < stream_.words; ++i) outcome_.wrong += slot[i] != word(p, k, i);
          ++outcome_.read;
          consumed_[size_t(p)].store(k + 1);
          any = true;
        }
      }
      if (any) continue;
      if (over_ || M::acquire(&numbers_->failed)) return;
      if (std::chrono::steady_clock::now() > until_) {
        over_ = outcome_.stuck = true;
        return;
      }
      std::this_thread::yield();
    }
  }

  const Stream stream_;
  std::shared_ptr<common::VerbsProvider> provider_;
  SoftPort a_, b_;
  ibv_qp* qa_ = nullptr;
  mlx5::Rings rings_{};
  std::unique_ptr<mlx5::Numbers> numbers_;
  uint64_t next_ = 0;
  std::vector<std::atomic<int64_t>> consumed_;
  std::atomic<bool> over_{false};
  std::chrono::steady_clock::time_point until_;
  Outcome outcome_;
};

Outcome stream(const Stream& stream) { return StreamRun<mlx5::HostMemory>(stream).run(); }

void expect_clean(const Stream& what, const Outcome& outcome, const char* name) {
  EXPECT(
      outcome.wrong == 0 && outcome.failed == 0 && !outcome.stuck &&
          outcome.read == what.producers * what.messages,
      "%s (seed %d, faults '%s'): %lld of %lld messages read, %lld words wrong, failed %llx (%s)%s",
      name, int(what.soft.seed), what.soft.faults.c_str(), (long long)outcome.read,
      (long long)(what.producers * what.messages), (long long)outcome.wrong,
      (unsigned long long)outcome.failed, outcome.why.c_str(), outcome.stuck ? ", stuck" : "");
}

int64_t g_requests = 200000;
uint64_t g_seed = 1;

// The 16-bit index wraps three times at depth 64.
void test_wraps() {
  Stream what;
  what.messages = g_requests / 2 + 1;
  what.window = 64;  // more than fits: the ring pushes back
  what.sources = 50;
  what.deadline_s = 200;
  expect_clean(what, stream(what), "wraps");
}

void test_shared() {
  Stream what;
  what.producers = 32;
  what.shared = true;
  what.messages = g_requests / 2 / 32 + 1;
  what.window = 4;
  what.words = 8;
  what.deadline_s = 200;
  expect_clean(what, stream(what), "32 producers");
}

void test_chaos() {
  for (uint64_t seed = g_seed; seed < g_seed + 10; ++seed) {
    Stream what;
    what.soft.seed = seed;
    what.messages = std::max<int64_t>(g_requests / 40, 100);
    expect_clean(what, stream(what), "chaos, alone");
    what.sources = 50;
    what.window = 64;
    expect_clean(what, stream(what), "chaos, full ring");
    what.producers = 6;
    what.shared = true;
    what.words = 200;
    what.messages /= 6;
    expect_clean(what, stream(what), "chaos, shared");
  }
}

void test_harmless_faults() {
  const char* const plans[] = {
      "early_fetch",
      "late_fetch us=100 p=0.2",
      "early_read",
      "delay us=200 p=0.2",
      "shuffle",
      "interleave",
      "poison",
      "cqe_delay us=200 p=0.2",
      "coalesce us=300",
      "duplicate_doorbell",
      "lose_doorbell us=500 p=0.2",
      "port_down at_ms=1 for_ms=2",  // shorter than the retries
      "slow_port gbps=1",
      "early_fetch; poison; shuffle; interleave; late_fetch us=50 p=0.3",
  };
  for (const char* plan : plans) {
    for (const bool shared : {false, true}) {
      Stream what;
      what.soft.faults = plan;
      what.shared = shared;
      what.producers = shared ? 4 : 1;
      what.messages = 400 / what.producers;
      what.words = 64;
      what.sources = shared ? 2 : 40;
      what.window = shared ? 16 : 64;
      expect_clean(what, stream(what), "harmless");
    }
  }
}

// Faults that end the queue pair: the first error says what it was, everything behind is flushed.
void test_fatal_faults() {
  struct Row {
    const char* plan;
    uint8_t syndrome;
    uint8_t vendor;
    int index;  // of the work request, -1: any
  };
  const Row rows[] = {
      {"error wqe=300 syndrome=0x13", mlx5::kRemoteAccess, softhca::kPlanned, 300},
      {"error wqe=301 syndrome=0x15", mlx5::kRetryExceeded, softhca::kPlanned, 301},
      {"error wqe=0 syndrome=0x16 qp=0", mlx5::kRnrRetryExceeded, softhca::kPlanned, 0},
      {"error wqe=77 syndrome=0x04; flush_once", mlx5::kLocalProtection, softhca::kPlanned, 77},
      {"port_down at_ms=2 for_ms=5000", mlx5::kRetryExceeded, softhca::kPortIsDown, -1},
  };
  for (const Row& row : rows) {
    for (const bool shared : {false, true}) {
      Stream what;
      what.soft.faults = row.plan;
      what.shared = shared;
      what.producers = shared ? 4 : 1;
      what.messages = 1000000;
      what.deadline_s = 30;
      const Outcome outcome = stream(what);
      const mlx5::Failure failure = mlx5::failure(outcome.failed);
      EXPECT(outcome.failed && failure.syndrome == row.syndrome && failure.vendor == row.vendor &&
                 (row.index < 0 || failure.index == row.index) && outcome.wrong == 0 &&
                 !outcome.why.empty(),
             "%s: failed %llx, wrong %lld, %s", row.plan, (unsigned long long)outcome.failed,
             (long long)outcome.wrong, outcome.why.c_str());
    }
  }
  // A completion that never comes: nothing but the deadline ends the wait.
  Stream what;
  what.soft.faults = "lose_cqe wqe=201; lose_cqe wqe=200";
  what.messages = 101;
  what.deadline_s = 0.5;
  const Outcome outcome = stream(what);
  EXPECT(outcome.failed == 0 && outcome.wrong == 0, "lose_cqe: %llx",
         (unsigned long long)outcome.failed);
}

// Each mistake must show: refused by the model with the right reason, or as wrong words.
void test_plants() {
#ifndef __SANITIZE_THREAD__  // they are data races
  struct Row {
    const char* name;
    Plant plant;
    const char* faults;
    uint8_t vendor;  // 0: wrong words
  };
  const Row rows[] = {
      {"no fence", Plant::kNoFence, "", softhca::kStaleSlot},
      {"late build", Plant::kLateBuild, "", softhca::kStaleSlot},
      {"no room", Plant::kNoRoom, "delay us=2000 p=0.1", softhca::kOverrun},
      {"record goes back", Plant::kRecordBack, "early_fetch", softhca::kBackwards},
      {"source reused", Plant::kReuse, "delay us=2000 p=0.1", 0},
      {"signal first", Plant::kEarlySignal, "delay us=2000 p=0.1", 0},
      {"wrong queue", Plant::kWrongQueue, "", softhca::kWrongQueue},
  };
  for (const Row& row : rows) {
    Stream what;
    what.soft.faults = row.faults;
    what.plant = row.plant;
    what.messages = 20000;
    what.window = row.plant == Plant::kNoRoom ? 64 : 16;
    what.deadline_s = 20;
    WeakMemory::no_fences = row.plant == Plant::kNoFence;
    const Outcome outcome = StreamRun<WeakMemory>(what).run();
    WeakMemory::no_fences = false;
    WeakMemory::held.clear();
    const mlx5::Failure failure = mlx5::failure(outcome.failed);
    if (row.vendor == 0) {
      EXPECT(outcome.wrong > 0, "%s: not found", row.name);
    } else {
      // In the first lap the slot is empty and names no queue pair; and what is posted without
      // looking may be ahead by more than the queue is deep, or overwrite what was not yet fetched.
      const bool found =
          failure.vendor == row.vendor ||
          (row.vendor == softhca::kStaleSlot && failure.vendor == softhca::kWrongQueue) ||
          (row.vendor == softhca::kOverrun &&
           (failure.vendor == softhca::kTooFar || failure.vendor == softhca::kStaleSlot));
      EXPECT(outcome.failed && failure.syndrome == mlx5::kLocalQp && found, "%s: %llx %s", row.name,
             (unsigned long long)outcome.failed, outcome.why.c_str());
    }
  }
  // And with its fences the weak memory is as good as any.
  Stream what;
  what.messages = 2000;
  expect_clean(what, StreamRun<WeakMemory>(what).run(), "weak memory");
#endif
}

// A signal on one port says nothing about data on the other; on the same one it does.
void test_two_ports() {
  for (const bool same : {true, false}) {
    SoftHcaOptions soft;
    soft.faults = "delay us=3000 port=0";
    auto provider = provider_of(soft);
    SoftPort a0(provider.get(), "soft0", 4096), b0(provider.get(), "soft0", 4096);
    SoftPort a1(provider.get(), "soft1", a0.heap()), b1(provider.get(), "soft1", b0.heap());
    ibv_qp *qa0 = a0.make_qp(64), *qb0 = b0.make_qp(64), *qa1 = a1.make_qp(64),
           *qb1 = b1.make_qp(64);
    connect_both(provider.get(), a0, qa0, b0, qb0);
    connect_both(provider.get(), a1, qa1, b1, qb1);
    int64_t early = 0;
    for (uint64_t k = 1; k <= 50; ++k) {
      a0.words()[0] = a0.words()[1000] = k;
      EXPECT(post(qa0, IBV_WR_RDMA_WRITE, k, a0.address(), a0.key(), 8008, b0.address(), b0.key(),
                  IBV_SEND_SIGNALED) == 0,
             "write");
      ibv_qp* const other = same ? qa0 : qa1;
      SoftPort &from = same ? a0 : a1, &to = same ? b0 : b1;
      EXPECT(post(other, IBV_WR_ATOMIC_FETCH_AND_ADD, k, from.address(4000), from.key(), 8,
                  to.address(4001), to.key(), IBV_SEND_SIGNALED, 1) == 0,
             "signal");
      while (mlx5::HostMemory::acquire(b0.words() + 4001) < k) std::this_thread::yield();
#ifdef __SANITIZE_THREAD__
      if (same) early += b0.words()[1000] != k;  // the other way it is a race, as it should be
#else
      early += b0.words()[1000] != k;
#endif
      wait_one(qa0->send_cq);
      wait_one(other->send_cq);
    }
#ifdef __SANITIZE_THREAD__
    if (!same) early = 1;
#endif
    EXPECT(same ? early == 0 : early > 0, "same port %d: %lld of 50 signals came early", int(same),
           (long long)early);
  }
}

// Seconds that `count` writes of `bytes` take over these queue pairs, round robin.
double seconds_of(std::vector<std::pair<SoftPort*, SoftPort*>> ports, std::vector<ibv_qp*> qps,
                  int count, uint32_t bytes) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    const size_t n = size_t(i) % qps.size();
    SoftPort &a = *ports[n].first, &b = *ports[n].second;
    EXPECT(post(qps[n], IBV_WR_RDMA_WRITE, 1, a.address(), a.key(), bytes, b.address(), b.key(),
                IBV_SEND_SIGNALED) == 0,
           "write");
  }
  for (int i = 0; i < count; ++i) {
    EXPECT(wait_one(qps[size_t(i) % qps.size()]->send_cq).status == IBV_WC_SUCCESS, "write");
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Rate limits hold, and two ports carry twice as much as one.
void test_rates() {
  SoftHcaOptions soft;
  soft.gbps = 2;
  auto provider = provider_of(soft);
  SoftPort a0(provider.get(), "soft0", 1 << 14), b0(provider.get(), "soft0", 1 << 14);
  SoftPort a1(provider.get(), "soft1", 1 << 14), b1(provider.get(), "soft1", 1 << 14);
  std::vector<ibv_qp*> qps;
  std::vector<std::pair<SoftPort*, SoftPort*>> ports;
  for (int i = 0; i < 3; ++i) {
    SoftPort &a = i == 2 ? a1 : a0, &b = i == 2 ? b1 : b0;
    qps.push_back(a.make_qp(64));
    ibv_qp* const other = b.make_qp(64);
    connect_both(provider.get(), a, qps.back(), b, other);
    ports.push_back({&a, &b});
  }
  const int count = 60;
  const uint32_t bytes = 1 << 17;
  const double ideal = double(count) * bytes * 8 / 2e9;
  const double one = seconds_of({ports[0]}, {qps[0]}, count, bytes);
  const double two = seconds_of({ports[0], ports[1]}, {qps[0], qps[1]}, count, bytes);
  const double both = seconds_of({ports[0], ports[2]}, {qps[0], qps[2]}, count, bytes);
  EXPECT(one >= ideal * 0.99 && two >= ideal * 0.99, "faster than the wire: %g %g, ideal %g", one,
         two, ideal);
  EXPECT(both >= ideal * 0.49, "faster than two wires: %g", both);
  std::printf("one queue pair %.2f, two on the port %.2f, two ports %.2f Gbit/s\n", 2 * ideal / one,
              2 * ideal / two, 2 * ideal / both);
}

int run(int argc, char** argv) {
  Options options(argc, argv);
  g_seed = uint64_t(options.number("seed", 1));
  g_requests = options.number("requests", 200000);
  const std::string only = options.text("only", "");
  options.finish();
  set_deadline(600);
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"verbs", test_verbs},
      {"refusals", test_refusals},
      {"refused_at_once", test_refused_at_once},
      {"old_doorbell", test_old_doorbell},
      {"no_memory", test_no_memory},
      {"setup_without_memory", test_setup_without_memory},
      {"remote_memory", test_remote_memory},
      {"fault_plans", test_fault_plans},
      {"wraps", test_wraps},
      {"shared", test_shared},
      {"chaos", test_chaos},
      {"harmless_faults", test_harmless_faults},
      {"fatal_faults", test_fatal_faults},
      {"plants", test_plants},
      {"two_ports", test_two_ports},
      {"rates", test_rates},
  };
  for (const auto& [name, test] : tests) {
    if (!only.empty() && only != name) continue;
    const auto begin = std::chrono::steady_clock::now();
    test();
    std::printf("%s: ok (%.1f s)\n", name,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::run(argc, argv); }
