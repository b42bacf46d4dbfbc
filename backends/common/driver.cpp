#include "common/driver.hpp"

#include <dlfcn.h>

#include <cstring>

namespace epcomm::common {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr int kOldestVersion = 12000;

struct Row {
  const char* symbol;
  void* member;
};

}  // namespace

Status Driver::load(Driver* out) {
  // Never unloaded: the driver has threads of its own.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) return error(Code::kUnavailable, -1, "no NVIDIA driver: %s", dlerror());

  Driver driver;
#define EPCOMM_DRIVER_ROW(member, symbol, arguments) {symbol, &driver.member},
  const Row rows[] = {EPCOMM_DRIVER_FUNCTIONS(EPCOMM_DRIVER_ROW)};
#undef EPCOMM_DRIVER_ROW
  const char* missing = nullptr;
  for (const Row& row : rows) {
    void* const found = dlsym(library, row.symbol);
    std::memcpy(row.member, &found, sizeof found);
    if (!found && !missing) missing = row.symbol;
  }

  int version = 0;
  if (driver.cuDriverGetVersion) driver.cuDriverGetVersion(&version);
  if (version < kOldestVersion) {
    return error(Code::kUnavailable, -1,
                 "the NVIDIA driver is too old: it serves CUDA %d.%d; needed: %d.%d or newer",
                 version / 1000, version % 1000 / 10, kOldestVersion / 1000,
                 kOldestVersion % 1000 / 10);
  }
  if (missing) {
    return error(Code::kUnavailable, -1, "the NVIDIA driver (CUDA %d.%d) has no %s", version / 1000,
                 version % 1000 / 10, missing);
  }
  Status started = driver.check(driver.cuInit(0), "cuInit");
  if (!started.ok()) {
    started.code = Code::kUnavailable;
    return started;
  }
  *out = driver;
  return {};
}

Status Driver::check(CuResult result, const char* call) const {
  if (result == kCuSuccess) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return error(Code::kCuda, -1, "%s: %s (%d): %s", call, name ? name : "unknown error", result,
               text ? text : "no description");
}

}  // namespace epcomm::common
