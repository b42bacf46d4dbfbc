// Memory that several processes of one host map: a heap of zeros and, behind it, a page of ours.
//
// An anonymous memfd by default; a file in a folder where the caller asks for one or memfds are
// not to be had. Space is reserved before anybody touches it: too little is kOutOfMemory here and
// never a bus error later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/bell.hpp"
#include "common/random.hpp"
#include "common/unique_fd.hpp"
#include "epcomm/status.hpp"

namespace epcomm::common {

class Segment {
 public:
  // The page behind the heap.
  struct Tail {
    Key nonce;  // proves that what a peer mapped is this segment
    uint64_t heap_bytes;
    Bell bell;
  };

  Segment() noexcept = default;
  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Segment() { unmap(); }

  // `folder` empty: memfd, or /dev/shm where memfds are not to be had.
  static Status create(uint64_t heap_bytes, const std::string& folder, Segment* out);

  // Maps a peer's segment and proves that it is the one described.
  static Status attach(int peer, UniqueFd fd, uint64_t heap_bytes, const Key& nonce, bool sealed,
                       Segment* out);

  std::byte* heap() const noexcept { return base_; }
  uint64_t heap_bytes() const noexcept { return heap_bytes_; }
  Tail* tail() const noexcept {
    return reinterpret_cast<Tail*>(base_ + mapped_bytes_ - kTailBytes);
  }
  // Nobody can shrink it: its pages stay.
  bool sealed() const noexcept { return sealed_; }

  int fd() const noexcept { return fd_.get(); }
  void close_fd() noexcept { fd_.reset(); }
  void unmap() noexcept;
  // Leaves the mapping to the process: for objects inherited through fork.
  void forget() noexcept { base_ = nullptr; }

 private:
  static constexpr uint64_t kTailBytes = 4096;

  void swap(Segment& other) noexcept;
  Status map(int peer);

  UniqueFd fd_;
  std::byte* base_ = nullptr;
  uint64_t heap_bytes_ = 0;
  uint64_t mapped_bytes_ = 0;
  bool sealed_ = false;
};

// Files that owners who no longer run left in `folder`: those of this user and this PID namespace
// only. Returns how many it removed.
int reap_stale_files(const std::string& folder) noexcept;

}  // namespace epcomm::common
