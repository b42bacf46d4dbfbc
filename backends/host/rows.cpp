// Choice of the row loops: the best instruction set that this machine has, or the one asked for.
#include "host/rows.hpp"

#include <cstring>

#include "epcomm/formats.h"
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

namespace {

// The size is a constant in each case, so that an item is one load and one store.
template <int kItem>
void gather(std::byte* to, const std::byte* from, int64_t n, int64_t stride_bytes) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * kItem, from + i * stride_bytes, kItem);
}

}  // namespace

void copy_strided(void* dst, const void* src, int64_t n, int64_t stride_bytes, int itemsize) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  if (n <= 0) return;
  if (stride_bytes == itemsize) {
    std::memcpy(to, from, size_t(n) * size_t(itemsize));
    return;
  }
  switch (itemsize) {
    case 1:
      return gather<1>(to, from, n, stride_bytes);
    case 2:
      return gather<2>(to, from, n, stride_bytes);
    case 4:
      return gather<4>(to, from, n, stride_bytes);
    case 8:
      return gather<8>(to, from, n, stride_bytes);
    default:
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(to + i * itemsize, from + i * stride_bytes, size_t(itemsize));
      }
  }
}

void dequantize(RowType type, void* out, const uint8_t* codes, const float* scales, size_t n) {
  const FloatState state;
  auto* to = static_cast<std::byte*>(out);
  for (size_t i = 0; i < n; ++i) {
    const float value = dequantize_e4m3(codes[i], scales[i / kScaleGroup]);
    if (type == RowType::kFloat32) {
      std::memcpy(to + 4 * i, &value, 4);
    } else {
      const uint16_t code = type == RowType::kFloat16 ? f32_to_f16(value) : f32_to_bf16(value);
      std::memcpy(to + 2 * i, &code, 2);
    }
  }
}

}  // namespace epcomm::host
