// Loops over rows: copy, reduce, quantise. One table of functions per instruction set, chosen once.
// Every table gives the same bits; the sums follow the written tree of the README.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epcomm::host {

// Row types that arithmetic is defined for. Anything else only moves.
enum class RowType : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

struct RowOps {
  const char* name;  // "avx512", "avx2" or "plain"

  // Copy one row.
  void (*copy)(void* dst, const void* src, size_t bytes);

  // out[i] = round(((0.0f + w[0]*rows[0][i]) + w[1]*rows[1][i]) + ... + bias[i]) for i < n: each
  // product and each sum rounded to float32 (no FMA, subnormals kept), the total rounded once to
  // the row type, to nearest even. weights == null: no products. bias == null: none. num_rows may
  // be 0. `out` does not overlap any row.
  void (*reduce)(RowType type, void* out, const void* const* rows, const float* weights,
                 int num_rows, const float* bias, size_t n);

  // fp8 e4m3 codes and one float32 scale per 128 channels, as include/epcomm/formats.h defines
  // them.
  void (*quantize)(RowType type, uint8_t* codes, float* scales, const void* x, size_t n,
                   bool round_scale);

  // copy and reduce with stores that go past the caches: for megabytes that no core reads soon.
  // Such stores may become visible late and in any order: call stream_fence() in this thread
  // before telling another thread or process about them.
  void (*stream_copy)(void* dst, const void* src, size_t bytes);
  void (*stream_reduce)(RowType type, void* out, const void* const* rows, const float* weights,
                        int num_rows, const float* bias, size_t n);
};

// Orders all earlier stream_copy and stream_reduce of this thread before its later stores.
void stream_fence() noexcept;

// The best table of this machine, or the one `isa` names ("avx512", "avx2", "plain"); null if that
// one is unknown or does not run here. isa == null or empty: the best.
const RowOps* row_ops(const char* isa) noexcept;

// Gather n items that lie stride_bytes apart (any sign, zero, odd) to adjacent places.
void copy_strided(void* dst, const void* src, int64_t n, int64_t stride_bytes, int itemsize);

// The way back from quantize: each code times its group's scale in float32, then rounded to `type`.
void dequantize(RowType type, void* out, const uint8_t* codes, const float* scales, size_t n);

}  // namespace epcomm::host
