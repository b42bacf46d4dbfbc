#include "common/waiter.hpp"

#include <sched.h>

#include <algorithm>
#include <cinttypes>

#include "common/clock.hpp"
#include "common/cpu.hpp"
#include "common/errors.hpp"

namespace epcomm::common {
namespace {

constexpr int64_t kMicrosecond = 1000;
constexpr int64_t kMillisecond = 1000 * kMicrosecond;
constexpr int64_t kInterruptEvery = 50 * kMillisecond;
// A third rank's death ends a wait for a living one only after this long: what that one is about
// to send still counts.
constexpr int64_t kLossGrace = 250 * kMillisecond;
constexpr int64_t kFirstSleep = 20 * kMicrosecond;
constexpr int64_t kLongestSleep = 1 * kMillisecond;       // nobody wakes us
constexpr int64_t kLongestRungSleep = 10 * kMillisecond;  // a bell does; see bell.hpp

uint64_t load(const std::byte* word) noexcept {
  // Not just acquire: before a sleep it must not move above the announcement (bell.hpp).
  return reinterpret_cast<const std::atomic<uint64_t>*>(word)->load(std::memory_order_seq_cst);
}

}  // namespace

// One wait: what for, and since when.
struct Waiter::Pending {
  int peer;
  const std::byte* word;
  uint64_t value;
  const WaitSpec& spec;
  int64_t start_ns;

  bool ready() const noexcept { return load(word) >= value; }
  double elapsed_s() const noexcept { return double(now_ns() - start_ns) * 1e-9; }
};

WaitPolicy wait_policy(int num_ranks, int64_t spin_us) noexcept {
  WaitPolicy policy;
  cpu_set_t cores;
  const int num_cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  if (spin_us >= 0) {
    policy.spin_ns = spin_us * kMicrosecond;
  } else if (num_cores > 1 && num_cores >= num_ranks) {
    policy.spin_ns = 1 * kMicrosecond;
  }
  policy.yield_ns = 100 * kMicrosecond;
  return policy;
}

uint64_t Waiter::state_word(int peer) const noexcept {
  return setup_.state_words ? load(setup_.state_words + uint64_t(peer) * kSignalStride) : 0;
}

PeerState Waiter::word_state(int peer) const noexcept { return state_of(state_word(peer)); }

PeerState Waiter::peer_state(int peer) const noexcept {
  const bool dead = setup_.liveness->died_ns(peer) != 0;
  const PeerState said = word_state(peer);
  return dead && said != PeerState::kLeft ? PeerState::kDead : said;
}

// The rank to blame: one whose process ended while it was well, else one that had given up before.
int Waiter::lost_peer() const noexcept {
  int lost = -1;
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    if (peer == setup_.rank || peer_state(peer) != PeerState::kDead) continue;
    if (word_state(peer) == PeerState::kAlive) return peer;
    if (lost < 0) lost = peer;
  }
  return lost;
}

// Whom a peer that gave up blames: a rank other than itself, or -1.
int Waiter::told_by(int peer) const noexcept {
  const int told = lost_of(state_word(peer));
  return told >= 0 && told < setup_.num_ranks && told != peer ? told : -1;
}

// "gave up ...", with the reason as far as that rank told it.
void Waiter::write_gave_up(int peer, char* text, size_t size) const noexcept {
  const int told = told_by(peer);
  if (told < 0) {
    std::snprintf(text, size, "gave up after an error of its own (see its output)");
  } else if (told == setup_.rank) {
    std::snprintf(text, size, "gave up because of this one, rank %d, which was late or not reached",
                  told);
  } else {
    std::snprintf(text, size, "gave up because of rank %d", told);
  }
}

void Waiter::write_lost(int peer, char* text, size_t size) const noexcept {
  const std::string why = setup_.liveness->why_lost(peer);
  char gave_up[128] = "";
  if (word_state(peer) == PeerState::kBroken) write_gave_up(peer, gave_up, sizeof gave_up);
  std::snprintf(text, size, "rank %d is lost: %s%s%s", peer, why.c_str(),
                *gave_up ? "; before that it " : "", gave_up);
}

// Whom to name, and a text, where nothing more comes from a peer. `lost`: lost_peer().
void Waiter::blame(int peer, PeerState state, int lost, Blame* out) const noexcept {
  out->culprit = lost >= 0 && state != PeerState::kLeft ? lost : peer;
  if (lost >= 0 && state != PeerState::kLeft) {
    write_lost(lost, out->reason, sizeof out->reason);
  } else if (state == PeerState::kLeft) {
    std::snprintf(out->reason, sizeof out->reason, "rank %d left: it closed its communicator",
                  peer);
  } else {
    const int told = told_by(peer);
    if (told >= 0 && told != setup_.rank) out->culprit = told;
    char gave_up[128];
    write_gave_up(peer, gave_up, sizeof gave_up);
    std::snprintf(out->reason, sizeof out->reason, "rank %d %s", peer, gave_up);
  }
}

Status Waiter::gave_up(int peer, const WaitSpec& spec) noexcept {
  return guarded([&] {
    setup_.liveness->scan();
    Blame found;
    blame(peer, PeerState::kBroken, lost_peer(), &found);
    return error(Code::kPeerLost, found.culprit, "%s (%s): %s", spec.operation, spec.phase,
                 found.reason);
  });
}

// Why the wait cannot end well, or ok if it still can.
Status Waiter::loss(const Pending& pending) noexcept {
  const int peer = pending.peer;
  const PeerState state = peer_state(peer);
  if (state == PeerState::kAlive && !setup_.liveness->any_dead()) return {};
  // It gave up because of somebody: what made it do so can be seen here too.
  if (state == PeerState::kBroken) setup_.liveness->scan();
  const int lost = lost_peer();
  if (state == PeerState::kAlive) {
    if (lost < 0) return {};
    const int64_t since = std::max(pending.start_ns, setup_.liveness->died_ns(lost));
    if (now_ns() - since < kLossGrace) return {};
  }
  // Looked at after the state: what had arrived before the peer went still counts.
  if (pending.ready()) return {};

  Blame found;
  blame(peer, state, lost, &found);
  return error(Code::kPeerLost, found.culprit,
               "%s (%s): %s; waited %.3f s for rank %d, expected %" PRIu64 ", seen %" PRIu64,
               pending.spec.operation, pending.spec.phase, found.reason, pending.elapsed_s(), peer,
               pending.value, load(pending.word));
}

Status Waiter::aborted() noexcept {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return abort_why_;
  });
}

void Waiter::abort(const Status& why) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_.load(std::memory_order_relaxed)) return;  // the first reason stays
    Status reason = guarded([&] { return why; });
    if (reason.ok()) reason = error(Code::kPeerLost, -1, "aborted");
    abort_why_ = std::move(reason);
    aborted_.store(true, std::memory_order_seq_cst);
  }
  if (setup_.bell) setup_.bell->ring_always();
}

Status Waiter::wait(int peer, const std::byte* word, uint64_t value,
                    const WaitSpec& spec) noexcept {
  if (aborted_.load(std::memory_order_acquire)) return aborted();
  if (load(word) >= value) return {};
  const Pending pending{peer, word, value, spec, now_ns()};

  const int64_t spin_end = pending.start_ns + setup_.policy.spin_ns;
  while (setup_.policy.spin_ns > 0) {
    if (setup_.look) setup_.look(setup_.look_arg);
    for (int i = 0; i < 20; ++i) {
      if (pending.ready()) return {};
      cpu_relax();
    }
    if (now_ns() >= spin_end) break;
  }

  const int64_t deadline = pending.start_ns + seconds_to_ns(spec.timeout_s);
  const int64_t yield_end = spin_end + setup_.policy.yield_ns;
  int64_t next_interrupt = pending.start_ns + kInterruptEvery;
  int64_t sleep = kFirstSleep;
  while (true) {
    if (setup_.look) setup_.look(setup_.look_arg);
    if (pending.ready()) return {};
    if (aborted_.load(std::memory_order_acquire)) return aborted();
    if (Status lost = loss(pending); !lost.ok()) return lost;
    const int64_t now = now_ns();
    if (now >= deadline) {
      if (pending.ready()) return {};
      return error(Code::kTimeout, peer,
                   "%s (%s): nothing more from rank %d: expected %" PRIu64 ", seen %" PRIu64
                   " after %.3f s; the limit is %g s (timeout_s, EPCOMM_TIMEOUT_S)",
                   spec.operation, spec.phase, peer, value, load(word), pending.elapsed_s(),
                   spec.timeout_s);
    }
    if (now >= next_interrupt) {
      if (spec.interrupted && spec.interrupted(spec.interrupted_arg) != 0) {
        return error(Code::kInterrupted, -1, "%s (%s): interrupted", spec.operation, spec.phase);
      }
      next_interrupt = now_ns() + kInterruptEvery;
    }
    if (now < yield_end) {
      sched_yield();
      continue;
    }
    const int64_t limit = std::min(sleep, deadline - now);
    if (setup_.bell) {
      const auto awake = [&] {
        return pending.ready() || aborted_.load(std::memory_order_seq_cst);
      };
      setup_.bell->sleep_unless(awake, limit);
      sleep = std::min(sleep * 2, kLongestRungSleep);
    } else {
      const timespec pause = to_timespec(limit);
      nanosleep(&pause, nullptr);
      sleep = std::min(sleep * 2, kLongestSleep);
    }
  }
}

}  // namespace epcomm::common
