// What goes wrong, or comes in an odd order, on the ports of the model, and when.
//
// A plan is text: "kind key=value ...; kind ...". Keys that choose: port, qp (by order of creation
// on its port), wqe (running number on its queue pair), p (chance, default 1). Kinds and their
// keys:
//
//   early_fetch              a work request is read as soon as its doorbell record shows it
//   late_fetch us            ... up to so much after its doorbell
//   early_read               its payload is read when it is fetched, not when it is carried out
//   delay us                 it is carried out up to so much later
//   shuffle                  its payload lands in pieces of any order
//   interleave               queue pairs take turns at random, a few work requests each
//   poison                   slots are overwritten once fetched
//   cqe_delay us             its completion is written up to so much later
//   coalesce us              completions are written together, every so often
//   duplicate_doorbell       a doorbell arrives twice
//   lose_doorbell us         a doorbell is lost; the record is looked at that much later
//   lose_cqe                 a completion is never written
//   flush_once               of all flushed work requests only the last gets a completion
//   error syndrome           it fails; the queue pair goes to ERROR and flushes
//   no_ack count us          it and `count` - 1 behind it are carried out, nothing after them; none
//                            is acknowledged, and so much later it fails with 0x15
//   port_down at_ms for_ms   the port's link is down, from the first connection on
//   slow_port gbps           another rate
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "epcomm/status.hpp"

namespace epcomm::softhca {

enum class FaultKind {
  kEarlyFetch,
  kLateFetch,
  kEarlyRead,
  kDelay,
  kShuffle,
  kInterleave,
  kPoison,
  kCqeDelay,
  kCoalesce,
  kDuplicateDoorbell,
  kLoseDoorbell,
  kLoseCqe,
  kFlushOnce,
  kError,
  kNoAck,
  kPortDown,
  kSlowPort,
  kCount,
};

struct Fault {
  FaultKind kind = FaultKind::kCount;
  int port = -1;     // -1: every one
  int qp = -1;       // -1: every one
  int64_t wqe = -1;  // -1: every one
  double p = 1;
  int64_t ns = 0;     // us or for_ms
  int64_t at_ns = 0;  // at_ms
  double gbps = 0;
  int64_t count = 0;
  uint8_t syndrome = 0;
};

// splitmix64.
class Chance {
 public:
  explicit Chance(uint64_t seed) : state_(seed) {}
  uint64_t next() noexcept {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) noexcept { return n > 0 ? int64_t(next() % uint64_t(n)) : 0; }
  bool happens(double p) noexcept { return p >= 1 || double(next() >> 11) * 0x1p-53 < p; }

 private:
  uint64_t state_;
};

// kInvalidArgument naming the word and what may stand there.
Status parse_faults(const std::string& text, std::vector<Fault>* out);

// Everything that hardware may do to correct code, now and then.
std::vector<Fault> harmless_disorder();

// The faults of one port by kind, with its own chance.
class FaultPlan {
 public:
  FaultPlan(const std::vector<Fault>& faults, int port, uint64_t seed);

  // The fault of this kind that strikes now, or null. Draws chance.
  const Fault* strikes(FaultKind kind, int qp = -1, int64_t wqe = -1) noexcept;
  const std::vector<Fault>& of(FaultKind kind) const noexcept { return by_kind_[size_t(kind)]; }
  bool any(FaultKind kind) const noexcept { return !of(kind).empty(); }
  // 0 .. ns, by chance.
  int64_t up_to(int64_t ns) noexcept { return chance_.below(ns + 1); }
  Chance& chance() noexcept { return chance_; }

 private:
  std::vector<Fault> by_kind_[size_t(FaultKind::kCount)];
  Chance chance_;
};

}  // namespace epcomm::softhca
