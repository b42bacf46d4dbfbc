// A heap in GPU memory that other processes can map: the heap, zeroed, and behind it a tail of
// ours with a proof for whoever maps it.
#pragma once

#include <string>

#include "common/driver.hpp"
#include "common/random.hpp"
#include "common/unique_fd.hpp"
#include "nvlink/factory.hpp"
#include "nvlink/gpu.hpp"

namespace epcomm::nvlink {

// How a heap is handed to a peer.
struct Ticket {
  Share share = Share::kFd;
  uint64_t heap_bytes = 0;
  uint64_t mapped_bytes = 0;
  uint64_t address = 0;  // in its own process
  std::string handle;    // hexadecimal: of the fabric or of CUDA IPC; empty: a descriptor travels
  common::Key nonce{};
};

class Memory {
 public:
  // Behind the heap: the nonce, then room for the table of peers' addresses.
  static constexpr uint64_t kTailBytes = 64 << 10;
  static constexpr uint64_t kTableOffset = 64;
  static constexpr int kMaxRanks = int((kTailBytes - kTableOffset) / 8);

  Memory() noexcept = default;
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() { release(); }

  // `gpu` outlives the memory. kAuto: the first way that the driver does not refuse.
  static Status create(const Gpu& gpu, uint64_t heap_bytes, Share share, Memory* out);

  // Maps a peer's heap and proves that it is the one described. `fd` only for Share::kFd.
  // `local`: the peer is of this very process.
  static Status attach(const Gpu& gpu, int peer, const Ticket& ticket, const common::UniqueFd& fd,
                       bool local, Memory* out);

  explicit operator bool() const noexcept { return base_ != 0; }
  common::CuPointer heap() const noexcept { return base_; }
  common::CuPointer table() const noexcept {
    return base_ + mapped_bytes_ - kTailBytes + kTableOffset;
  }
  const Ticket& ticket() const noexcept { return ticket_; }
  int fd() const noexcept { return fd_.get(); }
  void close_fd() noexcept { fd_.reset(); }

  // Idempotent. What the driver has torn down already is no error.
  void release() noexcept;
  // For objects inherited through fork.
  void forget() noexcept { base_ = 0; }

 private:
  enum class Kind { kNone, kMapped, kAllocated, kOpened, kBorrowed };

  void swap(Memory& other) noexcept;
  Status make(Share share);
  Status make_mapped(Share share);
  Status make_ipc();
  Status map(common::CuMemory memory);
  Status seal();
  Status import(const common::UniqueFd& fd, bool local);

  const Gpu* gpu_ = nullptr;
  Kind kind_ = Kind::kNone;
  common::CuPointer base_ = 0;
  uint64_t mapped_bytes_ = 0;
  Ticket ticket_;  // of own memory
  common::UniqueFd fd_;
};

}  // namespace epcomm::nvlink
