// Operations on one rank's device memory: sequences of launches on a caller's stream. Arguments are
// checked by the caller; arrays are allocated by it.
#pragma once

#include <cstdint>

#include "epcomm/cast.h"
#include "epcomm/layout.h"
#include "epcomm/permute.h"
#include "epcomm/status.hpp"

namespace epcomm::device {

// Where work goes. A stream of 0 is the legacy default one.
struct Place {
  int device;
  uint64_t stream;
};

// `stream` waits for what is queued on another stream of the device by now.
Status wait_for(const Place& place, uint64_t other) noexcept;
Status is_capturing(const Place& place, bool* capturing) noexcept;
// kInvalidArgument if the memory is not the device's.
Status check_pointer(const Place& place, uint64_t pointer) noexcept;
// Queued behind the stream's work; the host's memory may be reused on return.
Status copy_to_device(const Place& place, uint64_t to, const void* from, uint64_t bytes) noexcept;
// Waits for the stream.
Status copy_to_host(const Place& place, void* to, uint64_t from, uint64_t bytes) noexcept;

// Fills the results of `args` in all passes. `state` is uninitialised memory of plan.state_bytes.
Status layout(const Place& place, uint64_t kernel, LayoutArgs args,
              const LayoutPlan& plan) noexcept;

struct PermuteKernels {
  uint64_t count, scan, place, rows, rows_any, fill;
};
// Counts, offsets and what the host learns; waits for the latter unless `result` is null.
Status permute_count(const Place& place, const PermuteKernels& kernels, PermuteArgs args,
                     const PermutePlan& plan, PermuteResult* result) noexcept;
// Where each row comes from, and the rows.
Status permute_rows(const Place& place, const PermuteKernels& kernels, PermuteArgs args,
                    const PermutePlan& plan, ScatterArgs scatter, FillArgs fill) noexcept;

// row_of from source; *bad_row is the first row that names no pick, or one that an earlier row
// has, -1 if there is none. `word` is 8 bytes of device memory. With a null bad_row nothing is
// checked and nothing waits.
Status invert(const Place& place, uint64_t invert_kernel, uint64_t check_kernel, InvertArgs args,
              int64_t* bad_row) noexcept;

Status sum(const Place& place, uint64_t kernel, SumArgs args) noexcept;
Status cast(const Place& place, uint64_t kernel, CastArgs args) noexcept;
Status convert(const Place& place, uint64_t kernel, ConvertArgs args) noexcept;

}  // namespace epcomm::device
