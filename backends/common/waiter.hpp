// Waiting for a word of the own memory that a peer adds to, until its value, a deadline, the loss
// of a peer, Ctrl-C or abort().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "common/bell.hpp"
#include "common/liveness.hpp"
#include "epcomm/backend.hpp"

namespace epcomm::common {

// How eagerly to wait before sleeping. Spinning pays only if every rank can have a core; even then
// a short spin is enough, since yielding an idle core costs well under a microsecond.
struct WaitPolicy {
  int64_t spin_ns = 0;
  int64_t yield_ns = 0;
};

// `spin_us` < 0: chosen from the cores this process may use and the ranks of this host.
WaitPolicy wait_policy(int num_ranks, int64_t spin_us) noexcept;

class Waiter {
 public:
  struct Setup {
    int rank = 0;
    int num_ranks = 0;
    const std::byte* state_words = nullptr;  // own memory; [rank], kSignalStride apart
    Liveness* liveness = nullptr;
    Bell* bell = nullptr;  // rung by whoever adds to a word; null: sleeps back off instead
    WaitPolicy policy;
    // Called by waiting threads between their looks at the word, where nobody else makes progress.
    void (*look)(void*) = nullptr;
    void* look_arg = nullptr;
  };

  void setup(const Setup& setup) noexcept { setup_ = setup; }

  // All of these: any thread.
  Status wait(int peer, const std::byte* word, uint64_t value, const WaitSpec& spec) noexcept;
  // A peer that said it left stays kLeft: the end of its process is no loss any more.
  PeerState peer_state(int peer) const noexcept;
  // What a wait for a peer that gave up would say.
  Status gave_up(int peer, const WaitSpec& spec) noexcept;
  // Set by abort() and never taken back.
  const std::atomic<bool>& aborted_flag() const noexcept { return aborted_; }
  void abort(const Status& why) noexcept;
  // "rank N is lost: ...", with what it had told before it was.
  void write_lost(int peer, char* text, size_t size) const noexcept;

 private:
  struct Pending;  // one wait
  struct Blame {
    int culprit;
    char reason[512];
  };

  uint64_t state_word(int peer) const noexcept;
  PeerState word_state(int peer) const noexcept;
  int lost_peer() const noexcept;
  int told_by(int peer) const noexcept;
  void write_gave_up(int peer, char* text, size_t size) const noexcept;
  void blame(int peer, PeerState state, int lost, Blame* out) const noexcept;
  Status loss(const Pending& pending) noexcept;
  Status aborted() noexcept;

  Setup setup_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // of abort_why_
  Status abort_why_;
};

}  // namespace epcomm::common
