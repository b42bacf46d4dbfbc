// Kernels that play ranks over the policy `nvlink`, for tests.
#include "epcomm/device/nvlink.cuh"

using namespace epcomm;
using device::NvlinkCtx;
using device::WaitCode;
using device::WaitInfo;
using policy = device::nvlink;

struct Result {
  int32_t code;
  int32_t reserved;
  WaitInfo info;
  uint64_t wrong;  // bytes that are not as they should be
};

static __device__ uint8_t pattern(uint64_t seed, uint64_t i) {
  return uint8_t((seed * 0x9e3779b97f4a7c15ull + i * 0xff51afd7ed558ccdull) >> 56);
}

static __device__ uint8_t* own(const NvlinkCtx& ctx, uint64_t offset) {
  return static_cast<uint8_t*>(policy::peer_ptr(ctx, ctx.rank, offset));
}

static __device__ void fill_bytes(const NvlinkCtx& ctx, uint64_t at, uint64_t bytes,
                                  uint64_t seed) {
  for (uint64_t i = threadIdx.x; i < bytes; i += blockDim.x) own(ctx, at)[i] = pattern(seed, i);
}

static __device__ uint64_t wrong_bytes(const NvlinkCtx& ctx, uint64_t at, uint64_t bytes,
                                       uint64_t seed) {
  uint64_t wrong = 0;
  for (uint64_t i = threadIdx.x; i < bytes; i += blockDim.x) {
    wrong += own(ctx, at)[i] != pattern(seed, i);
  }
  return wrong;
}

extern "C" __global__ void fill(NvlinkCtx ctx, uint64_t at, uint64_t bytes, uint64_t seed) {
  fill_bytes(ctx, at, bytes, seed);
}

// One warp.
extern "C" __global__ void send(NvlinkCtx ctx, int peer, uint64_t dst, uint64_t src, uint64_t bytes,
                                uint64_t word, uint64_t add) {
  policy::put_signal(ctx, peer, 0, dst, src, bytes, word, add);
}

// One block: thread 0 waits, all look at what has come.
extern "C" __global__ void receive(NvlinkCtx ctx, int peer, uint64_t word, uint64_t value,
                                   uint64_t timeout_ns, uint64_t at, uint64_t bytes, uint64_t seed,
                                   Result* result) {
  __shared__ WaitCode code;
  if (threadIdx.x == 0) {
    code = policy::wait(ctx, peer, word, value, timeout_ns, &result->info);
    result->code = code;
  }
  __syncthreads();
  if (code != device::kWaitDone) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&result->wrong),
            wrong_bytes(ctx, at, bytes, seed));
}

// Rounds of: fill, put by all warps of a block, one signal; the other side waits, looks and gives
// credit. Data goes to `at`, from `at + bytes`; words: data at `word`, credit behind it.
extern "C" __global__ void stream_out(NvlinkCtx ctx, int peer, uint64_t at, uint64_t bytes,
                                      uint64_t word, uint64_t rounds, Result* result) {
  __shared__ WaitCode code;
  const uint64_t credit = word + kSignalStride;
  const uint64_t warp = threadIdx.x / 32, share = bytes / (blockDim.x / 32);
  for (uint64_t round = 1; round <= rounds; ++round) {
    fill_bytes(ctx, at + bytes, bytes, round);
    if (threadIdx.x == 0) code = policy::wait(ctx, peer, credit, round - 1, 0, &result->info);
    __syncthreads();
    if (code != device::kWaitDone) break;
    policy::put(ctx, peer, 0, at + warp * share, at + bytes + warp * share, share);
    __syncthreads();
    if (threadIdx.x == 0) policy::signal(ctx, peer, 0, word, 1);
    if (threadIdx.x == 0) policy::quiet(ctx, peer, 0, 0);
    __syncthreads();
  }
  if (threadIdx.x == 0) result->code = code;
}

extern "C" __global__ void stream_in(NvlinkCtx ctx, int peer, uint64_t at, uint64_t bytes,
                                     uint64_t word, uint64_t rounds, Result* result) {
  __shared__ WaitCode code;
  uint64_t wrong = 0;
  for (uint64_t round = 1; round <= rounds; ++round) {
    if (threadIdx.x == 0) code = policy::wait(ctx, peer, word, round, 0, &result->info);
    __syncthreads();
    if (code != device::kWaitDone) break;
    wrong += wrong_bytes(ctx, at, bytes, round);
    __syncthreads();
    if (threadIdx.x == 0) policy::signal(ctx, peer, 0, word + kSignalStride, 1);
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(&result->wrong), wrong);
  if (threadIdx.x == 0) result->code = code;
}
