// One port of the model: its queue pairs, completion queues and the thread that plays the hardware.
//
// Those who post write blocks, doorbell records and doorbells; they see nothing else of the engine,
// as with a NIC. Control calls and the engine exclude each other by a lock.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/fork_guard.hpp"
#include "epcomm/mlx5.h"
#include "epcomm/status.hpp"
#include "softhca/faults.hpp"
#include "softhca/memory.hpp"

namespace epcomm::softhca {

// Memory of rings, aligned to a page.
class RingMemory {
 public:
  static bool make(size_t bytes, RingMemory* out) noexcept;
  std::byte* data() const noexcept { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept { ::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

enum class QpState { kReset, kInit, kReceiving, kSending, kError };

// Why strict mode refuses a work request: the vendor code of its completion.
enum Violation : uint8_t {
  kNone = 0,
  kStaleSlot = 0x81,    // the index in the slot is another one: built late, or no fence
  kWrongQueue = 0x82,   // the queue pair's number
  kBadShape = 0x83,     // opcode, length, flags, reserved bits
  kTooFar = 0x84,       // a doorbell or record that is neither new nor old
  kBackwards = 0x85,    // a doorbell record went back
  kOverrun = 0x86,      // slots were reused before their completion was written
  kMisaligned = 0x87,   // an atomic
  kTooLong = 0x88,      // a message
  kBadKey = 0x89,       // no such key, or bytes outside
  kNoRights = 0x8a,     // the key does not allow it
  kNoResponder = 0x8b,  // nobody at the other end
  kPlanned = 0x8c,      // by the fault plan
  kPortIsDown = 0x8d,
  kNoMemory = 0x8e,  // of the model; no completion says it
};

const char* violation_text(uint8_t code) noexcept;

struct Cq {
  uint32_t depth = 0;
  RingMemory memory;
  mlx5::Cqe* ring = nullptr;
  uint32_t* record = nullptr;
  uint64_t produced = 0;
  bool overrun = false;
  int users = 0;
  struct Pending {
    mlx5::Cqe cqe;
    int64_t due_ns;
    struct Qp* qp;
    uint64_t number;
  };
  std::deque<Pending> pending;
};

// A work request as it was fetched.
struct Work {
  mlx5::Block block;
  uint64_t number = 0;
  int64_t due_ns = 0;
  bool on_wire = false;
  uint8_t syndrome = 0;  // found bad when it was fetched
  uint8_t vendor = 0;
  bool read_early = false;
  std::vector<std::byte> payload;  // if read_early
};

struct Qp {
  int number_on_port = 0;
  uint32_t qpn = 0;
  uint32_t depth = 0;
  bool all_signalled = false;
  Cq* cq = nullptr;
  RingMemory memory;
  mlx5::Block* sq = nullptr;
  uint32_t* record = nullptr;    // [2]: receive, send
  uint64_t* doorbell = nullptr;  // a word of its own: stores of two queue pairs must not meet

  QpState state = QpState::kReset;
  Gid remote_gid{};
  uint32_t remote_qpn = 0;
  int64_t retry_ns = 0;  // how long a silent peer is borne; 0: for ever

  // Of the engine. Running numbers: covered <= done <= fetched <= posted.
  uint64_t last_doorbell = 0;
  uint16_t last_record = 0;
  uint64_t posted = 0;
  uint64_t fetched = 0;
  uint64_t done = 0;
  uint64_t covered = 0;       // numbers below have a completion that was written
  int64_t fetch_at_ns = 0;    // a late fetch
  int64_t deaf_until_ns = 0;  // after a lost doorbell
  int64_t last_due_ns = 0;
  int64_t stalled_ns = 0;       // since when nothing gets through
  int64_t silent_until_ns = 0;  // until then `unheard` waits for an acknowledgement; then it fails
  int64_t silent_left = 0;      // so many more are carried out meanwhile
  Work unheard;
  bool refused = false;  // nothing is fetched after a bad work request
  uint8_t first_violation = kNone;
  std::deque<Work> flight;
};

struct PortOptions {
  int number = 0;
  double gbps = 0;
  int64_t latency_ns = 0;
  int64_t spin_ns = 0;
  bool null_mover = false;
  std::vector<Fault> faults;
  uint64_t seed = 0;
};

class Port {
 public:
  Port(const PortOptions& options, const Gid& gid, std::shared_ptr<Regions> regions);
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  ~Port();

  const Gid& gid() const noexcept { return gid_; }
  const std::shared_ptr<Regions>& regions() const noexcept { return regions_; }
  bool is_down() noexcept;

  // Null without memory.
  Cq* create_cq(uint32_t depth);
  bool destroy_cq(Cq* cq);  // false: in use
  Qp* create_qp(Cq* cq, uint32_t depth, bool all_signalled);
  void destroy_qp(Qp* qp);
  // `change` under the lock.
  template <class Change>
  void modify(Change&& change) {
    const Locked lock(this);
    change();
  }
  void reset(Qp* qp);                     // under modify()
  void fail(Qp* qp);                      // to ERROR, under modify()
  void set_state(Qp* qp, QpState state);  // any but RESET and ERROR, under modify()
  uint32_t new_key() noexcept;
  // What strict mode first said of the queue pair, or kNone.
  uint8_t violation(Qp* qp);
  void stop() noexcept;

 private:
  struct Locked {
    explicit Locked(Port* port);
    ~Locked();
    Port* port;
  };
  struct Verdict {
    uint8_t syndrome = 0;
    uint8_t vendor = 0;
  };

  bool start();
  static void* run(void* self) noexcept;
  void loop() noexcept;
  void break_down() noexcept;
  bool pass(int64_t now);
  int64_t next_due() const;

  void forget_pending(Qp* qp);
  bool look(Qp* qp, int64_t now);
  void notice(Qp* qp, uint16_t index, bool is_record);
  bool fetch(Qp* qp, int64_t now);
  Verdict check(const Qp& qp, const mlx5::Segment* segment, uint64_t number) const;
  bool send(Qp* qp, int64_t now);
  bool carry_out(Qp* qp, int64_t now);
  Verdict execute(Qp* qp, Work* work);
  Verdict move(Qp* qp, Work* work, const mlx5::Control& control);
  Verdict local(const mlx5::Segment& data, uint64_t bytes, bool write, std::byte** at);
  Verdict remote(const Qp& qp, const mlx5::Segment& segment, uint64_t bytes, unsigned right,
                 std::byte** at);
  void copy(std::byte* to, const std::byte* from, uint64_t bytes, bool shuffled);
  void complete(Qp* qp, const Work& work, Verdict verdict, int64_t now);
  void flush(Qp* qp, int64_t now);
  void add_cqe(Qp* qp, uint64_t number, uint8_t opcode, Verdict verdict, int64_t now);
  bool write_cqes(Cq* cq, int64_t now);
  void violate(Qp* qp, uint8_t code);
  double rate(int64_t now) const noexcept;
  bool down_at(int64_t now) const noexcept;

  const PortOptions options_;
  const Gid gid_;
  const std::shared_ptr<Regions> regions_;
  common::ForkGuard guard_;
  FaultPlan plan_;

  std::mutex mutex_;
  std::atomic<int> waiting_{0};
  std::vector<std::unique_ptr<Cq>> cqs_;
  std::vector<std::unique_ptr<Qp>> qps_;
  std::vector<Qp*> order_;
  int qps_made_ = 0;
  uint32_t next_qpn_;
  uint32_t next_key_;
  int64_t first_connection_ns_ = 0;
  int64_t wire_free_ns_ = 0;
  size_t turn_ = 0;

  std::atomic<bool> stopping_{false};
  bool running_ = false;
  bool broken_ = false;
  pthread_t thread_{};
};

}  // namespace epcomm::softhca
