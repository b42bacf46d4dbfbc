"""The device engine under pressure: a GPU that is full, very many rows, masks on side streams, memory that torch fills,
and peers that stop in the middle of a phase. Ranks take the GPUs in turn."""

import importlib.util
import os
import signal
import time

import numpy as np
import pytest
from helpers import arrays, gpu
from helpers.gpu_calls import SHAPE, outcome, rounds, why_not

# A kernel that holds multiprocessors for a while: by its registers nothing but small blocks fits beside it, and by its
# shared memory no block that wants much of that.
HOLD = r"""
extern "C" __global__ void __launch_bounds__(1024) hold(long long ns, float* out) {
  extern __shared__ char room[];
  float value[24];
  for (int i = 0; i < 24; ++i) value[i] = float(threadIdx.x + i);
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
#pragma unroll
    for (int i = 0; i < 24; ++i) value[i] = value[i] * 1.0001f + value[(i + 1) % 24];
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < ns);
  float sum = 0;
  for (int i = 0; i < 24; ++i) sum += value[i];
  if (sum == 0.123f) out[0] = sum + room[0];
}
"""


@pytest.fixture(scope="module", autouse=True)
def _gpu(need):
    need("nvlink", why_not())


def unless_apart(num_ranks):
    """Skip where ranks that share a GPU run side by side: what one holds of it is held from the other too."""
    from epcomm import _gpu

    if num_ranks > 1 and _gpu.under_mps(0):
        pytest.skip("under CUDA MPS ranks hold each other's multiprocessors, and one that dies takes the others along")


def hold(xp, seconds, blocks=None, shared=100 * 1024):
    """Start it on a stream of its own; that stream."""
    kernel = xp.RawKernel(HOLD, "hold")
    kernel.max_dynamic_shared_size_bytes = shared
    multiprocessors = xp.cuda.Device().attributes["MultiProcessorCount"]
    out = xp.zeros(1, xp.float32)
    kernel((1,), (1024,), (np.int64(0), out), shared_mem=shared)  # loaded
    xp.cuda.Device().synchronize()
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        kernel((multiprocessors - 1 if blocks is None else blocks,), (1024,), (np.int64(seconds * 1e9), out),
               shared_mem=shared)
    time.sleep(0.2)
    return stream


def all_but_one_held(context):
    import cupy as xp

    with context.comm(**SHAPE, timeout_s=20) as comm:
        x, idx = xp.ones((5, 16), xp.float32), xp.arange(10).reshape(5, 2) % 6
        wanted = comm.combine(comm.dispatch(x, idx).x, comm.dispatch(x, idx).handle).x
        xp.cuda.Device().synchronize()
        stream = hold(xp, 8.0, shared=200 * 1024)
        start = time.monotonic()
        mine = xp.cuda.Stream(non_blocking=True)
        with mine:
            for _ in range(3):
                out = comm.dispatch(x, idx, num_sms=1)
                again = comm.dispatch(x, handle=out.handle, num_sms=1, copy=True)
                z = comm.combine(again.x, out.handle, num_sms=1).x
            mine.synchronize()
        took, held = time.monotonic() - start, not stream.done
        xp.cuda.Device().synchronize()
        return took, held, bool((z == wanted).all())


def test_one_multiprocessor_is_enough(pools, gpu_num_ranks):
    unless_apart(gpu_num_ranks)
    for took, held, equal in pools.get(gpu_num_ranks, "nvlink").run(all_but_one_held, timeout_s=60):
        assert held and equal, (took, held, equal)


def very_many_rows(context):
    import cupy as xp

    tokens, hidden = 300_000 // context.num_ranks, 7168
    with context.comm(num_experts=context.num_ranks, num_topk=context.num_ranks, hidden=hidden,
                      max_tokens_per_rank=tokens, max_recv_tokens=300_000, num_slots=1, dtype="bfloat16") as comm:
        idx = xp.broadcast_to(xp.arange(context.num_ranks), (tokens, context.num_ranks))
        row = xp.arange(tokens, dtype=xp.int32)[:, None] * 7 + xp.arange(hidden, dtype=xp.int32)[None] * 3
        x = ((row + context.rank) % 113).astype(xp.float32).view(xp.uint32) >> 16  # small integers are exact in bf16
        x = x.astype(xp.uint16)
        del row
        bf16 = arrays.dtype_of("bfloat16")
        rows = xp.ndarray(x.shape, bf16, memptr=x.data)
        out = comm.dispatch(rows, idx)
        assert out.x.shape == (tokens * context.num_ranks, hidden) and out.x.nbytes > 1 << 32
        got = xp.ndarray(out.x.shape, xp.uint16, memptr=out.x.data)
        mine = got[context.rank * tokens : (context.rank + 1) * tokens]
        assert bool((mine == x).all())
        last = xp.asnumpy(got[-1])
        want = (((tokens - 1) * 7 + np.arange(hidden) * 3 + context.num_ranks - 1) % 113).astype(np.float32)
        assert (last == (want.view(np.uint32) >> 16)).all()
        z = comm.combine(out.x, out.handle).x
        sums = xp.ndarray(z.shape, xp.uint16, memptr=z.data)
        for at in (0, tokens // 2, tokens - 1):
            total = (xp.asnumpy(x[at]).astype(np.uint32) << 16).view(np.float32) * context.num_ranks
            assert (xp.asnumpy(sums[at]) == total.astype(bf16).view(np.uint16)).all(), at
        del out, got, mine, sums, z
    xp.get_default_memory_pool().free_all_blocks()


def test_300000_received_rows(pools, gpu_num_ranks):
    if gpu_num_ranks > 2 * len(gpu.visible()):
        pytest.skip("more than two such heaps on a GPU")
    pools.get(gpu_num_ranks, "nvlink").run(very_many_rows, timeout_s=120)


def masked_on_a_side_stream(context, kind):
    import cupy as xp

    bad = 0
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=64, dtype="float32") as comm:
        spin = xp.RawKernel(HOLD, "hold")
        out0 = xp.zeros(1, xp.float32)
        base = xp.arange(128).reshape(64, 2) % 4
        x, ids = xp.ones((64, 16), xp.float32), xp.empty_like(base)
        if kind == "torch":
            import torch

            side = torch.cuda.Stream()
            x, ids, base = (torch.from_dlpack(array) for array in (x, ids, base))
            torch.cuda.synchronize()
        else:
            side = xp.cuda.Stream(non_blocking=True)
            xp.cuda.Device().synchronize()
        for _ in range(30):
            with torch.cuda.stream(side) if kind == "torch" else side:
                ids[...] = base
                with xp.cuda.ExternalStream(side.cuda_stream) if kind == "torch" else side:
                    spin((1,), (32,), (np.int64(5_000_000), out0))
                ids[::2] = -1
                out = comm.dispatch(x, ids)
                z = comm.combine(out.x, out.handle).x
                total, rows = float(z.sum()), len(out.x)
            bad += rows != 32 * context.num_ranks or total <= 0
    return bad


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_ids_masked_in_place_on_a_side_stream(pools, need, kind):
    need(kind, None if importlib.util.find_spec(kind) else f"no {kind}")
    assert pools.get(1, "nvlink").run(masked_on_a_side_stream, kind=kind, timeout_s=60) == [0]


def filled_memory(context):
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with context.comm(num_experts=6, num_topk=2, hidden=512, max_tokens_per_rank=256, dtype="bfloat16") as comm:
            idx = (torch.arange(512, device="cuda").reshape(256, 2) * 5) % 6
            weights = torch.rand(256, 2, device="cuda")
            x = (torch.arange(256 * 512, device="cuda") % 100).reshape(256, 512).to(torch.bfloat16)
            side, main = torch.cuda.Stream(), torch.cuda.current_stream()
            first = comm.dispatch(x, idx, weights)
            want_z = comm.combine(first.x.clone(), first.handle).x.clone()
            want = [array.clone() for array in (first.x, first.topk_idx, first.topk_weights)]
            counts = first.counts
            handle = first.handle
            del first
            for trial in range(200):
                stream = side if trial % 3 == 1 else None
                out = comm.dispatch(x, idx, weights, copy=bool(trial % 2), stream=stream)
                if trial % 5 == 2:
                    out = comm.dispatch(x, handle=handle, copy=bool(trial % 2), stream=stream)
                z = comm.combine(out.x, out.handle, stream=stream).x
                if stream is not None:
                    main.wait_stream(side)
                for name, got, wanted in zip("xiwz", (out.x, out.topk_idx, out.topk_weights, z), (*want, want_z),
                                             strict=True):
                    assert torch.equal(got, wanted), (trial, name)
                assert out.counts == counts and int(out.num_tokens) == len(out.x) and int(out.overflow) == 0
                assert out.num_tokens_per_expert.tolist() == counts
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_torch_fills_fresh_memory(pools, need, num_ranks):
    need("torch_cuda", arrays.why_not("torch_cuda"))
    pools.get(num_ranks, "nvlink").run(filled_memory, timeout_s=90)


def stuck_peer(context, phase, dies):
    """Rank 1 agrees on a call, but its GPU has no room for the kernel that moves rows."""
    import cupy as xp

    comm = context.comm(**SHAPE, timeout_s=60 if dies else 1.5)
    rounds(comm, xp, 1)
    x, idx = xp.ones((5, 16), xp.float32), xp.arange(10).reshape(5, 2) % 6
    out = comm.dispatch(x, idx)
    rows = out.x.copy()
    xp.cuda.Device().synchronize()
    multiprocessors = xp.cuda.Device().attributes["MultiProcessorCount"]
    if context.rank == 1:
        hold(xp, 5.0, blocks=multiprocessors)
    seen, start = None, time.monotonic()
    try:
        if phase == "data":
            comm.dispatch(x, handle=out.handle, async_op=True)
        else:
            comm.combine(rows, out.handle, async_op=True)
        if context.rank == 1:
            time.sleep(0.3)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3.5)
        while seen is None and time.monotonic() < start + 8:
            seen = outcome(comm.check)
            time.sleep(0.01)
    finally:
        took = time.monotonic() - start
        alive = float((x + 1).sum())
        del out, rows
        comm.close()
    return seen, took, alive


@pytest.mark.parametrize("phase", ["data", "done"])
@pytest.mark.parametrize("dies", [False, True], ids=["late", "dead"])
def test_a_peer_that_stops_inside_a_phase(pools, phase, dies):
    unless_apart(2)
    pool = pools.get(2, "nvlink", env={"EPCOMM_TEST_FAULT": "1"})
    deaths = {"expect_deaths": (1,)} if dies else {}
    (seen, took, alive), _ = pool.run(stuck_peer, phase=phase, dies=dies, timeout_s=60, **deaths)
    assert alive == 160.0
    if dies:
        assert seen[0] == "PeerLostError" and "rank 1" in seen[1] and took < 4, (seen, took)
    else:
        operation = "dispatch" if phase == "data" else "combine"
        assert seen[0] == "CommTimeoutError" and f"{operation} ({phase})" in seen[1], seen
        assert "rank 1" in seen[1] and 1.4 < took < 6, (seen, took)
