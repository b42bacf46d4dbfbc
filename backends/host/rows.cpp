// Choice of the row loops: the best instruction set that this machine has, or the one asked for.
#include "host/rows.hpp"

#include <cstring>
#include <initializer_list>

#include "host/rows_table.hpp"

namespace epcomm::host {

const RowOps* row_ops(const char* isa) noexcept {
  const bool any = isa == nullptr || isa[0] == '\0';
  for (const RowOps* table : {&kPlainRows}) {
    if (any || std::strcmp(isa, table->name) == 0) return table;
  }
  return nullptr;
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
