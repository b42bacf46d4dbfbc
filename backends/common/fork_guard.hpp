// Tells a process from its forked children without a system call: a page that the kernel wipes at
// fork. What a child inherits must be inert: it shares event counters and memory with its parent.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "epcomm/status.hpp"

namespace epcomm::common {

class ForkGuard {
 public:
  ForkGuard() noexcept : owner_(getpid()) {
    void* page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (madvise(page, kBytes, MADV_WIPEONFORK) != 0) {
      munmap(page, kBytes);
      return;
    }
    here_ = static_cast<volatile char*>(page);
    *here_ = 1;
  }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
  ~ForkGuard() {
    if (here_) munmap(const_cast<char*>(here_), kBytes);
  }

  // True in a process that came from the creating one by fork.
  bool inherited() const noexcept { return here_ ? *here_ == 0 : getpid() != owner_; }

  Status check() const noexcept {
    if (!inherited()) return {};
    return error(Code::kUnsupported, -1,
                 "this object belongs to process %d and was inherited through fork; create one in "
                 "this process (start workers by spawn)",
                 int(owner_));
  }

 private:
  static constexpr size_t kBytes = 4096;
  volatile char* here_ = nullptr;  // null on kernels that cannot wipe: compare process ids then
  pid_t owner_;
};

}  // namespace epcomm::common
