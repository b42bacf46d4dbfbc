// Choice of the row loops: the best instruction set that this machine has, or the one asked for.
#include "host/rows.hpp"

#include <cstring>

#include "host/rows_table.hpp"

namespace epcomm::host {

const RowOps* row_ops(const char* isa) noexcept {
  const bool any = isa == nullptr || isa[0] == '\0';
#ifdef EPCOMM_ROWS_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (any || std::strcmp(isa, kAvx512Rows.name) == 0)) return &kAvx512Rows;
  if (has_avx2 && (any || std::strcmp(isa, kAvx2Rows.name) == 0)) return &kAvx2Rows;
#endif
  if (any || std::strcmp(isa, kPlainRows.name) == 0) return &kPlainRows;
  return nullptr;
}

void stream_fence() noexcept {
#ifdef EPCOMM_ROWS_X86
  _mm_sfence();
#endif
}

void copy_strided(void* dst, const void* src, int64_t n, int64_t stride_bytes, int itemsize) {
  auto* to = static_cast<std::byte*>(dst);
  auto* from = static_cast<const std::byte*>(src);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to, from, size_t(itemsize));
    to += itemsize;
    from += stride_bytes;
  }
}

}  // namespace epcomm::host
