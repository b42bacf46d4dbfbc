// Combine: a token's owner pulls its rows from the heaps of the ranks that hold them and sums them
// (sums.cuh).
#include "sums.cuh"

using namespace epcomm;
using namespace epcomm::device;

// Before the call opens: scalars of the received side to the own slot, where owners read them.
extern "C" __global__ void __launch_bounds__(256)
    epcomm_carry(const __grid_constant__ CarryArgs a) {
  const int topk = a.setup.num_topk;
  const int64_t threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.recv_rows * topk;
       i += threads) {
    const int64_t row = i / topk, k = i % topk;
    reinterpret_cast<float*>(a.to)[i] =
        a.routing.recv_ids[i] >= 0
            ? *reinterpret_cast<const float*>(a.carried + row * a.row_stride + k * a.topk_stride)
            : 0.0f;
  }
}

// num_sms blocks of kReduceWarps warps, one warp per token.
namespace {

template <int kMost>
__device__ void reduce(const Wire::Ctx& ctx, const ReduceArgs& a) {
  const Setup& s = a.setup;
  const Link link{ctx, a.setup.rank};
  if (!opened(s, a.call)) {  // no rank moves anything, or this one is broken
    wait_for_last();
    return;
  }
  if (a.row_type == 0) {
    reduce_tokens<0, kMost>(a, link);
  } else if (a.row_type == 1) {
    reduce_tokens<1, kMost>(a, link);
  } else {
    reduce_tokens<2, kMost>(a, link);
  }
  // Rows may be written again when every reader is done.
  if (!last_block(&s.state->reduce_ticket)) return;
  wait_for_last();
  meet(s, link, &s.state->done_phases, kPhaseDone, Op::kCombine, done_word(s.layout, s.rank),
       [&](int peer) { return done_word(s.layout, peer); });
}

}  // namespace

// At most two ranks, so at most two rows of a token.
extern "C" __global__ void __launch_bounds__(kReduceWarps * 32, 1)
    epcomm_reduce_two(const __grid_constant__ Wire::Ctx ctx, const __grid_constant__ ReduceArgs a) {
  reduce<2>(ctx, a);
}

extern "C" __global__ void __launch_bounds__(kReduceWarps * 32, 1)
    epcomm_reduce_four(const __grid_constant__ Wire::Ctx ctx,
                       const __grid_constant__ ReduceArgs a) {
  reduce<4>(ctx, a);
}

extern "C" __global__ void __launch_bounds__(kReduceWarps * 32, 1)
    epcomm_reduce_many(const __grid_constant__ Wire::Ctx ctx,
                       const __grid_constant__ ReduceArgs a) {
  reduce<kAny>(ctx, a);
}
