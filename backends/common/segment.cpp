#include "common/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>

#include "common/errors.hpp"
#include "common/reserve.hpp"
#include "common/segment_file.hpp"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace epcomm::common {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

uint64_t total_bytes(uint64_t heap_bytes, uint64_t tail_bytes) {
  return (heap_bytes + kPageBytes - 1) / kPageBytes * kPageBytes + tail_bytes;
}

UniqueFd open_memfd() {
  // The flag is asked for by kernels set to refuse executable memfds, and unknown to old ones.
  int fd = memfd_create("epcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("epcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  return UniqueFd(fd);
}

}  // namespace

void Segment::swap(Segment& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(base_, other.base_);
  std::swap(heap_bytes_, other.heap_bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(sealed_, other.sealed_);
}

void Segment::unmap() noexcept {
  if (base_) munmap(base_, mapped_bytes_);
  base_ = nullptr;
}

Status Segment::map(int peer) {
  void* base = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED) {
    const int why = errno;
    Status status = error(Code::kOutOfMemory, peer,
                          "mapping a shared segment of %" PRIu64
                          " bytes: %s; look at `ulimit -v` and vm.max_map_count",
                          mapped_bytes_, errno_text(why).c_str());
    status.sys_errno = why;
    return status;
  }
  base_ = static_cast<std::byte*>(base);
  return {};
}

Status Segment::create(uint64_t heap_bytes, const std::string& folder, Segment* out) {
  if (heap_bytes == 0) {
    return error(Code::kInvalidArgument, -1, "size_bytes=0: expected at least 1 byte of heap");
  }
  Segment segment;
  std::string home = folder;
  if (home.empty()) {
    segment.fd_ = open_memfd();
    if (!segment.fd_ && (errno == EMFILE || errno == ENFILE)) {
      return system_error(-1, errno, "memfd_create");
    }
    if (!segment.fd_) home = "/dev/shm";  // forbidden or unknown here
  }
  if (!segment.fd_) EPCOMM_RETURN_IF_ERROR(open_segment_file(home, &segment.fd_));

  segment.heap_bytes_ = heap_bytes;
  if (heap_bytes > (uint64_t(1) << 62)) {
    segment.mapped_bytes_ = heap_bytes;  // refused by reserve(), which knows what is free
  } else {
    segment.mapped_bytes_ = total_bytes(heap_bytes, kTailBytes);
  }
  EPCOMM_RETURN_IF_ERROR(reserve_space(segment.fd_.get(), segment.mapped_bytes_, home));
  // Files have no seals. A memfd's keep a peer from shrinking it under our feet.
  segment.sealed_ = fcntl(segment.fd_.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) == 0;
  EPCOMM_RETURN_IF_ERROR(segment.map(-1));
  // Faults now rather than in the first calls; a kernel before 5.14 (EINVAL) faults later.
  if (madvise(segment.base_, segment.mapped_bytes_, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    const int why = errno;
    Status status = error(Code::kOutOfMemory, -1, "touching the heap's %" PRIu64 " bytes: %s",
                          heap_bytes, errno_text(why).c_str());
    status.sys_errno = why;
    return status;
  }

  Tail* tail = segment.tail();
  EPCOMM_RETURN_IF_ERROR(random_key(&tail->nonce));
  tail->heap_bytes = heap_bytes;
  *out = std::move(segment);
  return {};
}

Status Segment::attach(int peer, UniqueFd fd, uint64_t heap_bytes, const Key& nonce, bool sealed,
                       Segment* out) {
  Segment segment;
  segment.fd_ = std::move(fd);
  segment.heap_bytes_ = heap_bytes;
  segment.mapped_bytes_ = total_bytes(heap_bytes, kTailBytes);
  segment.sealed_ = sealed;
  struct stat facts;
  if (fstat(segment.fd_.get(), &facts) != 0) return system_error(peer, errno, "fstat");
  if (uint64_t(facts.st_size) != segment.mapped_bytes_ || !S_ISREG(facts.st_mode)) {
    return error(Code::kUnavailable, peer,
                 "rank %d's segment has %" PRId64 " bytes, not the %" PRIu64 " it announced", peer,
                 int64_t(facts.st_size), segment.mapped_bytes_);
  }
  if (sealed) {
    const int seals = fcntl(segment.fd_.get(), F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals) {
      return error(Code::kUnavailable, peer, "rank %d's segment is not sealed as announced", peer);
    }
  }
  EPCOMM_RETURN_IF_ERROR(segment.map(peer));
  const Tail* tail = segment.tail();
  if (!same_key(tail->nonce, nonce) || tail->heap_bytes != heap_bytes) {
    return error(Code::kUnavailable, peer,
                 "rank %d's segment does not hold the proof that rank %d announced: it is another "
                 "job's or a stale one",
                 peer, peer);
  }
  segment.close_fd();
  *out = std::move(segment);
  return {};
}

}  // namespace epcomm::common
