#include "nvlink/host_words.hpp"

#include <new>

#include "epcomm/device/nvlink.h"

namespace epcomm::nvlink {

using common::ContextScope;
using common::Driver;

Status HostWords::create(const Gpu& gpu, int num_ranks) {
  const Driver& driver = gpu.driver();
  const ContextScope scope(driver, gpu.context());
  EPCOMM_RETURN_IF_ERROR(scope.status());
  const size_t count = 1 + size_t(num_ranks);
  void* memory = nullptr;
  EPCOMM_RETURN_IF_ERROR(
      driver.check(driver.cuMemHostAlloc(&memory, count * sizeof(Word),
                                         common::kCuHostPortable | common::kCuHostMapped),
                   "cuMemHostAlloc"));
  gpu_ = &gpu;
  words_ = static_cast<Word*>(memory);
  for (size_t i = 0; i < count; ++i) new (&words_[i]) Word(0);
  return driver.check(driver.cuMemHostGetDevicePointer(&device_address_, memory, 0),
                      "cuMemHostGetDevicePointer");
}

void HostWords::release() noexcept {
  if (!words_) return;
  const ContextScope scope(gpu_->driver(), gpu_->context());
  if (scope.ok()) gpu_->driver().cuMemFreeHost(words_);
  words_ = nullptr;
}

void HostWords::note_death(int rank) noexcept {
  words_[1 + rank].store(1, std::memory_order_release);
  uint64_t well = 0;
  words_[0].compare_exchange_strong(well, 1 + uint64_t(rank), std::memory_order_seq_cst);
}

void HostWords::abort() noexcept {
  if (words_) words_[0].store(device::kNvlinkAbort, std::memory_order_seq_cst);
}

}  // namespace epcomm::nvlink
