#include "device/ops.hpp"

#include <cinttypes>
#include <limits>

#include "common/driver.hpp"

namespace epcomm::device {
namespace {

using common::CuStream;
using common::Driver;

// A call of the driver from inside a function that returns Status.
#define EPCOMM_DRIVER_CALL(driver, call) \
  EPCOMM_RETURN_IF_ERROR((driver).check((driver).call, #call))

struct Loaded {
  Loaded() : status(Driver::load(&driver)) {}
  Driver driver;
  Status status;
};

// A device's primary context, which the array libraries use too, current in this thread.
class Scope {
 public:
  Scope() noexcept = default;
  ~Scope() {
    common::CuContext popped;
    if (pushed_) driver_->cuCtxPopCurrent(&popped);
    if (retained_) driver_->cuDevicePrimaryCtxRelease(device_);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  Status enter(int device) noexcept {
    static const Loaded loaded;
    EPCOMM_RETURN_IF_ERROR(loaded.status);
    driver_ = &loaded.driver;
    common::CuContext context = nullptr;
    EPCOMM_DRIVER_CALL(*driver_, cuDeviceGet(&device_, device));
    EPCOMM_DRIVER_CALL(*driver_, cuDevicePrimaryCtxRetain(&context, device_));
    retained_ = true;
    EPCOMM_DRIVER_CALL(*driver_, cuCtxPushCurrent(context));
    pushed_ = true;
    return {};
  }
  const Driver& driver() const noexcept { return *driver_; }

 private:
  const Driver* driver_ = nullptr;
  common::CuDevice device_ = -1;
  bool retained_ = false;
  bool pushed_ = false;
};

CuStream stream_of(const Place& place) { return reinterpret_cast<CuStream>(place.stream); }

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

struct Grid {
  int64_t blocks;
  int32_t threads_x;
  int32_t threads_y;
  int32_t shared_bytes;
};

// A kernel that takes one struct. Inside a scope.
Status launch_here(const Driver& driver, const Place& place, uint64_t function, const Grid& grid,
                   void* args) {
  if (grid.blocks <= 0) return {};
  if (grid.blocks > std::numeric_limits<int32_t>::max()) {
    return error(Code::kUnsupported, -1, "%" PRId64 " blocks of %d threads: at most 2147483647",
                 grid.blocks, grid.threads_x * grid.threads_y);
  }
  void* arguments[] = {args};
  return driver.check(
      driver.cuLaunchKernel(reinterpret_cast<common::CuFunction>(function), unsigned(grid.blocks),
                            1, 1, unsigned(grid.threads_x), unsigned(grid.threads_y), 1,
                            unsigned(grid.shared_bytes), stream_of(place), arguments, nullptr),
      "cuLaunchKernel");
}

Status read_back(const Driver& driver, const Place& place, void* to, uint64_t from,
                 uint64_t bytes) {
  EPCOMM_DRIVER_CALL(driver, cuMemcpyDtoHAsync(to, from, bytes, stream_of(place)));
  EPCOMM_DRIVER_CALL(driver, cuStreamSynchronize(stream_of(place)));
  return {};
}

}  // namespace

Status wait_for(const Place& place, uint64_t other) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  const Driver& driver = scope.driver();
  common::CuEvent event = nullptr;
  EPCOMM_DRIVER_CALL(driver, cuEventCreate(&event, common::kCuEventDisableTiming));
  common::CuResult result = driver.cuEventRecord(event, reinterpret_cast<CuStream>(other));
  if (result == 0) result = driver.cuStreamWaitEvent(stream_of(place), event, 0);
  driver.cuEventDestroy(event);  // lives on until it has happened
  return driver.check(result, "ordering two streams");
}

Status is_capturing(const Place& place, bool* capturing) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  int status = 0;
  EPCOMM_DRIVER_CALL(scope.driver(), cuStreamIsCapturing(stream_of(place), &status));
  *capturing = status != 0;
  return {};
}

Status check_pointer(const Place& place, uint64_t pointer) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  int ordinal = -1;
  const common::CuResult result =
      scope.driver().cuPointerGetAttribute(&ordinal, common::kCuPointerDeviceOrdinal, pointer);
  if (result != 0 && result != common::kCuInvalidValue) {
    return scope.driver().check(result, "cuPointerGetAttribute");
  }
  if (result != 0 || ordinal != place.device) {
    return error(Code::kInvalidArgument, -1, "address %#" PRIx64 " is not memory of cuda:%d",
                 pointer, place.device);
  }
  return {};
}

Status copy_to_device(const Place& place, uint64_t to, const void* from, uint64_t bytes) noexcept {
  if (bytes == 0) return {};
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  EPCOMM_DRIVER_CALL(scope.driver(), cuMemcpyHtoDAsync(to, from, bytes, stream_of(place)));
  return {};
}

Status copy_to_host(const Place& place, void* to, uint64_t from, uint64_t bytes) noexcept {
  if (bytes == 0) return {};
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  return read_back(scope.driver(), place, to, from, bytes);
}

Status layout(const Place& place, uint64_t kernel, LayoutArgs args,
              const LayoutPlan& plan) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  const Driver& driver = scope.driver();
  EPCOMM_DRIVER_CALL(driver,
                     cuMemsetD8Async(address(args.state), 0, plan.state_bytes, stream_of(place)));
  args.tile_tokens = plan.tile_tokens;
  args.num_tiles = plan.num_tiles;
  args.words_offset = plan.words_offset;
  const Grid grid{plan.num_tiles, kLayoutThreads, 1, plan.shared_bytes};
  for (int32_t pass = 0; pass < plan.num_passes; ++pass) {
    args.rank_begin = pass * kLayoutRanks;
    EPCOMM_RETURN_IF_ERROR(launch_here(driver, place, kernel, grid, &args));
  }
  return {};
}

Status permute_count(const Place& place, const PermuteKernels& kernels, PermuteArgs args,
                     const PermutePlan& plan, PermuteResult* result) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  const Driver& driver = scope.driver();
  EPCOMM_DRIVER_CALL(
      driver, cuMemsetD8Async(address(args.state), 0, sizeof(PermuteState), stream_of(place)));
  const Grid grid{plan.blocks, 32 * plan.warps, 1, plan.shared_bytes};
  for (int32_t pass = 0; pass < plan.num_passes; ++pass) {
    args.expert_begin = pass * kPermuteExperts;
    EPCOMM_RETURN_IF_ERROR(launch_here(driver, place, kernels.count, grid, &args));
  }
  const Grid scan{plan.scan_blocks, kScanThreads, 1, 0};
  EPCOMM_RETURN_IF_ERROR(launch_here(driver, place, kernels.scan, scan, &args));
  if (result == nullptr) return {};
  return read_back(driver, place, result, address(args.result), sizeof *result);
}

Status permute_rows(const Place& place, const PermuteKernels& kernels, PermuteArgs args,
                    const PermutePlan& plan, ScatterArgs scatter, FillArgs fill) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  const Driver& driver = scope.driver();
  const Grid grid{plan.blocks, 32 * plan.warps, 1, plan.shared_bytes};
  for (int32_t pass = 0; pass < plan.num_passes; ++pass) {
    args.expert_begin = pass * kPermuteExperts;
    EPCOMM_RETURN_IF_ERROR(launch_here(driver, place, kernels.place, grid, &args));
  }
  const int64_t pieces = scatter.x.items * scatter.x.units;
  if (args.num_rows > 0 && pieces > 0 && scatter.num_topk > 0) {
    const bool whole = scatter.x.items == 1 && scatter.x.unit == 16;
    const RowGrid rows = row_grid(scatter.num_tokens, pieces);
    EPCOMM_RETURN_IF_ERROR(launch_here(driver, place, whole ? kernels.rows : kernels.rows_any,
                                       Grid{rows.blocks, rows.lanes, rows.rows, 0}, &scatter));
  }
  if (args.num_rows == 0) return {};
  const Grid padding{fill_blocks(fill.num_experts, fill.alignment, args.capacity >= 0), kRowThreads,
                     1, 0};
  return launch_here(driver, place, kernels.fill, padding, &fill);
}

Status invert(const Place& place, uint64_t invert_kernel, uint64_t check_kernel, InvertArgs args,
              int64_t* bad_row) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  const Driver& driver = scope.driver();
  if (args.num_picks > 0) {
    EPCOMM_DRIVER_CALL(driver, cuMemsetD8Async(address(args.row_of), 0xff,
                                               4 * uint64_t(args.num_picks), stream_of(place)));
  }
  const Grid grid{(args.num_rows + kRowThreads - 1) / kRowThreads, kRowThreads, 1, 0};
  EPCOMM_RETURN_IF_ERROR(launch_here(driver, place, invert_kernel, grid, &args));
  if (bad_row == nullptr) return {};
  EPCOMM_DRIVER_CALL(driver,
                     cuMemsetD8Async(address(args.bad_row), 0, sizeof(uint64_t), stream_of(place)));
  EPCOMM_RETURN_IF_ERROR(launch_here(driver, place, check_kernel, grid, &args));
  uint64_t inverse = 0;
  EPCOMM_RETURN_IF_ERROR(read_back(driver, place, &inverse, address(args.bad_row), sizeof inverse));
  *bad_row = inverse == 0 ? -1 : int64_t(~inverse);
  return {};
}

Status sum(const Place& place, uint64_t kernel, SumArgs args) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  const int64_t pieces = args.vector ? args.y.units : args.width;
  if (pieces == 0) return {};
  const RowGrid rows = row_grid(args.num_tokens, pieces);
  return launch_here(scope.driver(), place, kernel, Grid{rows.blocks, rows.lanes, rows.rows, 0},
                     &args);
}

Status cast(const Place& place, uint64_t kernel, CastArgs args) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  const Grid grid{cast_blocks(args.num_tokens, args.groups), kCastThreads, 1, 0};
  return launch_here(scope.driver(), place, kernel, grid, &args);
}

Status convert(const Place& place, uint64_t kernel, ConvertArgs args) noexcept {
  Scope scope;
  EPCOMM_RETURN_IF_ERROR(scope.enter(place.device));
  return launch_here(scope.driver(), place, kernel, Grid{4096, kCastThreads, 1, 0}, &args);
}

}  // namespace epcomm::device
