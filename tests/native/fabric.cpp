#include "fabric.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace epcomm::testing {

namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kPage = 4096;

std::memory_order signal_order(Plant plant) {
  return plant == Plant::kUnordered ? std::memory_order_relaxed : std::memory_order_release;
}

std::atomic<uint64_t>* word_at(std::byte* heap, uint64_t offset) {
  return reinterpret_cast<std::atomic<uint64_t>*>(heap + offset);
}

}  // namespace

class Fabric::Endpoint final : public HostTransport {
 public:
  Endpoint(Fabric* fabric, int rank)
      : fabric_(fabric),
        rank_(rank),
        memory_(fabric->options_.heap_bytes + kPage),
        heap_(memory_.data() + kPage - reinterpret_cast<uintptr_t>(memory_.data()) % kPage) {}

  std::byte* heap() noexcept override { return heap_; }
  uint64_t heap_bytes() const noexcept override { return fabric_->options_.heap_bytes; }
  std::byte* peer_ptr(int peer, uint64_t offset) noexcept override {
    return fabric_->near(rank_, peer) ? fabric_->endpoints_[size_t(peer)]->heap_ + offset : nullptr;
  }
  Status put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t bytes) noexcept override;
  Status signal(int peer, int channel, uint64_t word, uint64_t add) noexcept override;
  Status quiet(int peer, int channel, const WaitSpec& spec) noexcept override;
  Status wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec) noexcept override;
  PeerState peer_state(int peer) noexcept override {
    if (fabric_->endpoints_[size_t(peer)]->dead_.load()) return PeerState::kDead;
    const uint64_t word = fabric_->options_.state_word + uint64_t(peer) * 64;
    return state_of(word_at(heap_, word)->load(std::memory_order_acquire));
  }
  void abort(const Status& why) noexcept override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!aborted_.load()) why_ = why;
    aborted_.store(true);
  }

  void die() { dead_.store(true); }
  bool dead() const { return dead_.load(); }

 private:
  void check_range(uint64_t offset, uint64_t bytes) const {
    EXPECT(bytes <= heap_bytes() && offset <= heap_bytes() - bytes,
           "%llu bytes at %llu leave the heap of %llu bytes", (unsigned long long)bytes,
           (unsigned long long)offset, (unsigned long long)heap_bytes());
  }

  Fabric* fabric_;
  const int rank_;
  std::vector<std::byte> memory_;
  std::byte* heap_;
  std::atomic<bool> dead_{false}, aborted_{false};
  std::mutex mutex_;  // of why_
  Status why_;
};

// What travels from one rank to another on one channel, in order.
class Fabric::Link {
 public:
  struct Message {
    uint64_t dst = 0, src = 0, bytes = 0;  // a put
    uint64_t word = 0, add = 0;            // or, with bytes 0, a signal
  };

  Link(Endpoint* from, Endpoint* to, uint64_t seed, const FabricOptions& options)
      : from_(from),
        to_(to),
        random_(seed),
        max_delay_us_(options.max_delay_us),
        plant_(options.plant),
        thread_([this] { run(); }) {}
  ~Link() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void send(const Message& message) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (plant_ == Plant::kOvertake && message.bytes == 0) {
        queue_.push_front(message);
      } else {
        queue_.push_back(message);
      }
      ++pending_;
    }
    changed_.notify_all();
  }

  bool drained(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                             [this] { return pending_ == 0 || from_->dead(); });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      const Message message = queue_.front();
      queue_.pop_front();
      lock.unlock();
      delay();
      if (!from_->dead() && !to_->dead()) deliver(message);
      lock.lock();
      if (--pending_ == 0) changed_.notify_all();
    }
  }

  void delay() {
    if (max_delay_us_ == 0) return;
    int64_t us = random_.below(max_delay_us_ + 1);
    if (random_.one_in(16)) us *= 10;
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  void deliver(const Message& message) {
    if (message.bytes == 0) {
      word_at(to_->heap(), message.word)->fetch_add(message.add, signal_order(plant_));
      return;
    }
    // A put lands in no particular order: the later half first, now and then.
    const uint64_t half = random_.one_in(2) ? message.bytes / 2 : message.bytes;
    std::memcpy(to_->heap() + message.dst + half, from_->heap() + message.src + half,
                message.bytes - half);
    std::memcpy(to_->heap() + message.dst, from_->heap() + message.src, half);
  }

  Endpoint* from_;
  Endpoint* to_;
  Random random_;
  const int max_delay_us_;
  const Plant plant_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> queue_;
  int64_t pending_ = 0;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the members above
};

Status Fabric::Endpoint::put(int peer, int channel, uint64_t dst, uint64_t src,
                             uint64_t bytes) noexcept {
  check_range(dst, bytes);
  check_range(src, bytes);
  if (fabric_->near(rank_, peer)) {
    std::memmove(peer_ptr(peer, dst), heap_ + src, bytes);
  } else if (bytes > 0) {
    fabric_->link(rank_, peer, channel).send({dst, src, bytes, 0, 0});
  }
  return {};
}

Status Fabric::Endpoint::signal(int peer, int channel, uint64_t word, uint64_t add) noexcept {
  check_range(word, 8);
  EXPECT(word % 8 == 0, "word %llu", (unsigned long long)word);
  if (fabric_->near(rank_, peer)) {
    // The order that streaming stores need, as every backend must give it.
    if (__builtin_cpu_supports("sse")) __builtin_ia32_sfence();
    word_at(peer_ptr(peer, 0), word)->fetch_add(add, signal_order(fabric_->options_.plant));
  } else {
    fabric_->link(rank_, peer, channel).send({0, 0, 0, word, add});
  }
  return {};
}

Status Fabric::Endpoint::quiet(int peer, int channel, const WaitSpec& spec) noexcept {
  if (fabric_->near(rank_, peer) || fabric_->options_.plant == Plant::kNoQuiet) return {};
  if (fabric_->link(rank_, peer, channel).drained(spec.timeout_s)) return {};
  return error(Code::kTimeout, peer, "%s: quiet", spec.operation);
}

Status Fabric::Endpoint::wait(int peer, uint64_t word, uint64_t value,
                              const WaitSpec& spec) noexcept {
  check_range(word, 8);
  const auto deadline = Clock::now() + std::chrono::duration<double>(spec.timeout_s);
  for (int turn = 0;; ++turn) {
    const auto reached = [&] {
      return word_at(heap_, word)->load(std::memory_order_acquire) >= value;
    };
    if (reached()) return {};
    if (aborted_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      return error(Code::kPeerLost, why_.peer, "%s: %s", spec.operation, why_.text.c_str());
    }
    if (peer_state(peer) != PeerState::kAlive) {
      if (reached()) return {};
      return error(Code::kPeerLost, peer, "%s: rank %d is gone (%s)", spec.operation, peer,
                   spec.phase);
    }
    if (Clock::now() > deadline) {
      return error(Code::kTimeout, peer, "%s: no %s of rank %d", spec.operation, spec.phase, peer);
    }
    if (turn % 64 == 63 && spec.interrupted && spec.interrupted(spec.interrupted_arg)) {
      return error(Code::kInterrupted, -1, "%s: interrupted", spec.operation);
    }
    if (turn < 16) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(turn < 64 ? 20 : 200));
    }
  }
}

Fabric::Fabric(const FabricOptions& options) : options_(options) {
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    endpoints_.push_back(std::make_unique<Endpoint>(this, rank));
  }
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    for (int peer = 0; peer < options.num_ranks; ++peer) {
      for (int channel = 0; channel <= options.num_channels; ++channel) {
        links_.push_back(near(rank, peer)
                             ? nullptr
                             : std::make_unique<Link>(endpoints_[size_t(rank)].get(),
                                                      endpoints_[size_t(peer)].get(),
                                                      mix(options.seed, links_.size()), options));
      }
    }
  }
}

// Links first: their threads write into heaps.
Fabric::~Fabric() { links_.clear(); }

HostTransport* Fabric::transport(int rank) { return endpoints_[size_t(rank)].get(); }

void Fabric::kill(int rank) { endpoints_[size_t(rank)]->die(); }

Fabric::Link& Fabric::link(int rank, int peer, int channel) {
  return *links_[size_t((rank * options_.num_ranks + peer) * (options_.num_channels + 1) +
                        channel)];
}

}  // namespace epcomm::testing
