// The words in pinned host memory through which this rank's host ends waits of its kernels.
#pragma once

#include <atomic>

#include "common/driver.hpp"
#include "nvlink/gpu.hpp"

namespace epcomm::nvlink {

class HostWords {
 public:
  HostWords() noexcept = default;
  HostWords(const HostWords&) = delete;
  HostWords& operator=(const HostWords&) = delete;
  ~HostWords() { release(); }

  // `gpu` outlives the words.
  Status create(const Gpu& gpu, int num_ranks);
  void release() noexcept;
  void forget() noexcept { words_ = nullptr; }

  common::CuPointer device_address() const noexcept { return device_address_; }

  // Any thread, but not while create() or release() run.
  void note_death(int rank) noexcept;
  void abort() noexcept;  // before create(): nothing

 private:
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

  const Gpu* gpu_ = nullptr;
  Word* words_ = nullptr;
  common::CuPointer device_address_ = 0;
};

}  // namespace epcomm::nvlink
