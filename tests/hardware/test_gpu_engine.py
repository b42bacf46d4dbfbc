"""The device engine on GPUs: bits, streams, leases, refusals, deadlines and death. Ranks take
the GPUs in turn."""

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from helpers import arrays, cases, gpu
from helpers.cases import Program, Spec
from helpers.gpu_calls import SHAPE, outcome, rounds, why_not


@pytest.fixture(scope="module", autouse=True)
def _gpu(need):
    need("nvlink", why_not())


@pytest.fixture(params=arrays.GPU_KINDS)
def gpu_kind(request, need):
    need(request.param, arrays.why_not(request.param))
    return request.param


@pytest.fixture
def gpu_ranks(gpu_num_ranks, pools):
    return pools.get(gpu_num_ranks, "nvlink")


@pytest.fixture
def gpu_two(pools):
    return pools.get(2, "nvlink")


def programs(num_ranks):
    """Rank layout in all its ways, on each its own communicator."""
    made = []
    for number, (dtype, hidden, routing, weights, idx) in enumerate((
        ("bfloat16", 64, "random", True, "int64"),
        ("bfloat16", 7168, "full", True, "int32"),
        ("float16", 33, "duplicates", True, "int64"),
        ("float32", 7, "one_rank", False, "int32"),
        ("float32", 264, "none", True, "int64"),
        ("uint8", 17, "same", True, "int64"),
        ("float8_e4m3fn", 256, "last", False, "int64"),
    )):  # fmt: skip
        scales = ("float32", 2) if number % 2 else ("uint8", 3)
        spec = Spec(num_ranks, 9, 3, hidden=hidden, dtype=dtype, routing=routing, weights=weights, idx_dtype=idx,
                    scales=scales, tokens=(300, 0, 17) if number == 0 else (13, 5, 0))  # fmt: skip
        program = Program(spec)
        if dtype not in cases.FLOATS:  # y has a width of its own
            program.combine = partial(program.combine, dtype="float16", hidden=hidden // 2)
        program.dispatch("a")
        program.dispatch("copied", copy=True)
        program.combine("a")
        if dtype in cases.FLOATS:
            program.combine("a", source="buffer", carried=True)
        program.combine("a", bias="row", out="rows")
        program.combine("copied", bias="float32", carried=True, num_sms=1)
        program.again("h", "a", scales=scales)
        program.combine("h", carried=True)
        program.barrier()
        program.drop("a")
        program.dispatch("b", num_sms=1)
        if dtype in cases.FLOATS:
            program.combine("b", source="leased")
        program.dispatch("async", async_op=True)
        program.combine("async", async_op=True)
        made.append(program)
    return made


def test_bits(gpu_ranks, gpu_kind):
    cases.run(gpu_ranks, programs(gpu_ranks.num_ranks), kind=gpu_kind, timeout_s=120)


def test_rows_quantised_on_their_way(gpu_ranks, gpu_kind):
    """Widths with and without whole groups, of many pieces, and rows that the copy engine cannot take."""
    made = []
    for dtype, hidden in (("bfloat16", 7168), ("float16", 520), ("float32", 129), ("bfloat16", 33), ("float32", 16000)):
        program = Program(Spec(gpu_ranks.num_ranks, 9, 3, hidden=hidden, dtype=dtype, tokens=(130, 0, 17)))
        program.dispatch("codes", quantize="fp8")
        program.dispatch("copied", quantize="fp8", copy=True, num_sms=1)
        program.again("cached", "codes", quantize="fp8")
        program.again("rows", "codes")
        program.combine("rows")
        made.append(program)
    cases.run(gpu_ranks, made, kind=gpu_kind, timeout_s=120)


def own_gpu_only(rank):
    return gpu.environment_of(rank, alone=True)["CUDA_VISIBLE_DEVICES"]


def test_bits_where_ranks_see_no_gpu_but_their_own(gpu_num_ranks, pools):
    """Nobody can ask the driver about the links then: signals are loads and stores."""
    ranks = pools.get(gpu_num_ranks, "nvlink", env={"CUDA_VISIBLE_DEVICES": own_gpu_only})
    cases.run(ranks, programs(gpu_num_ranks)[:2], kind="cupy", timeout_s=120)


def test_uneven_experts_and_ranks_without_any(gpu_ranks):
    """Owners at random, all at one rank, and fewer experts than ranks."""
    ranks, made = gpu_ranks.num_ranks, []
    rng = np.random.default_rng(3)
    for owners in (rng.integers(0, ranks, 17).tolist(), [ranks - 1] * 5, None):
        experts = len(owners) if owners else max(1, ranks - 1)
        spec = Spec(ranks, experts, min(8, experts), hidden=520, owners=owners, tokens=(700, 0, 1, 259), weights=True)
        program = Program(spec)
        program.dispatch("a")
        program.combine("a", carried=True)
        program.again("b", "a")
        program.combine("b", source="buffer")
        made.append(program)
    cases.run(gpu_ranks, made, kind="cupy", timeout_s=120)


@pytest.mark.parametrize("form", ["rows", "columns", "reversed", "fortran", "broadcast"])
def test_memory_forms(gpu_two, gpu_kind, form):
    if form not in arrays.FORMS[gpu_kind]:
        pytest.skip(f"{gpu_kind} has no {form}")
    made = []
    for dtype, hidden in (("bfloat16", 40), ("float32", 33), ("uint8", 17)):
        routing = "same" if form == "broadcast" else "random"
        program = Program(Spec(2, 9, 3, hidden=hidden, dtype=dtype, routing=routing))
        program.dispatch("r", form=form)
        if dtype in cases.FLOATS:
            program.combine("r", form=form, carried=True, bias="row")
        made.append(program)
    cases.run(gpu_two, made, kind=gpu_kind, timeout_s=120)


def test_many_tokens(gpu_two):
    spec = Spec(2, 64, 8, hidden=2048, tokens=(3000, 1777), routing="random")
    program = Program(spec)
    for key in "abc":
        program.dispatch(key, copy=key == "b")
        program.combine(key, carried=True)
        program.drop(key)
    cases.run(gpu_two, [program], kind="cupy", timeout_s=120)


def refusals(context):
    import cupy as xp

    seen = []
    with context.comm(**SHAPE) as comm, context.comm(**SHAPE) as foreign:
        x, idx = xp.ones((5, 16), xp.float32), xp.arange(10).reshape(5, 2) % 6
        bad = context.rank == 1
        other = foreign.dispatch(x, idx)
        for value in (6, -2, 1 << 40):
            wrong = idx.copy()
            wrong[3, 1] = value
            wrong[4, 0] = value
            seen.append(outcome(lambda wrong=wrong: comm.dispatch(x, wrong if bad else idx)))
            rounds(comm, xp, 1)
        out = comm.dispatch(x, idx)
        seen.append(outcome(lambda: comm.dispatch(x[:, :0] if bad else x, idx)))
        seen.append(outcome(lambda: comm.dispatch(np.ones((5, 16), np.float32) if bad else x, idx)))
        seen.append(outcome(lambda: comm.combine(out.x, other.handle if bad else out.handle)))
        seen.append(outcome(lambda: comm.barrier() if bad else comm.dispatch(x, idx)))
        seen.append(outcome(lambda: comm.combine(out.x.astype(xp.float16) if bad else out.x, out.handle)))
        seen.append(outcome(lambda: comm.dispatch(x, handle=out.handle) if bad else comm.combine(out.x, out.handle)))
        seen.append(outcome(lambda: comm.dispatch(x, idx, layout="expert")))
        seen.append(outcome(lambda: comm.dispatch(x, idx, capacity=4)))
        rounds(comm, xp)
    with context.comm(**SHAPE, max_recv_tokens=7) as comm:
        seen.append(outcome(lambda: comm.dispatch(x, xp.zeros((5, 2), xp.int64))))
        rounds(comm, xp, 0)
    return seen


def test_refusals_are_one_error_on_all_ranks(gpu_two):
    first, second = gpu_two.run(refusals, timeout_s=120)
    texts = [("topk_idx[3, 1] is 6; allowed: -1 or 0 to 5",), ("topk_idx[3, 1] is -2",), (f"is {1 << 40}",),
             ("x has shape (5, 0)",), ("device",), ("another communicator",), ("barrier", "dispatch"),
             ("float32", "float16"), ("dispatch", "combine"), ("layout",), ("capacity",),
             ("max_recv_tokens=7", "10")]  # fmt: skip
    assert len(first) == len(second) == len(texts)
    for ours, theirs, needed in zip(first, second, texts, strict=True):
        assert ours is not None and theirs is not None, (ours, theirs, needed)
        assert ours[0] == theirs[0] in ("InvalidArgumentError", "UnsupportedError"), (ours, theirs)
        for text in needed:
            assert text in ours[1] and text in theirs[1], (ours, theirs, text)


def leases(context):
    import cupy as xp

    with context.comm(**SHAPE, num_slots=2) as comm:
        x, idx = xp.ones((5, 16), xp.float32), xp.arange(10).reshape(5, 2) % 6
        held = [comm.dispatch(x * k, idx) for k in range(4)]
        stats = comm.stats()
        assert stats["leases_granted"] == 2 and stats["copies"] == 2, stats
        refused = outcome(lambda: comm.dispatch(x, idx, copy=False))
        for k, out in enumerate(held):
            assert (out.x.get() == k).all(), k
        del held, out
        assert comm.stats()["leases_held"] == 0
        for k in range(20):  # released leases are taken again, in stream order, without a wait
            out = comm.dispatch(x * k, idx)
            z = comm.combine(out.x, out.handle).x
        assert comm.stats()["copies"] == 2 and (out.x.get() == 19).all()
        side = xp.cuda.Stream(non_blocking=True)
        out.handle.record_stream(side)
        # Work on the stream given, and the caller's stream behind it.
        side.use()
        late = comm.dispatch(x * 3, idx, stream=side)
        assert (late.x.get() == 3).all()
        xp.cuda.Stream.null.use()
        buffers = comm.combine_buffer(out.handle)
        assert isinstance(buffers, xp.ndarray)
        del z
    return refused


def test_leases(gpu_two):
    for refused in gpu_two.run(leases, timeout_s=120):
        assert refused is not None and refused[0] == "UnsupportedError" and "2 leases" in refused[1], refused


def late_rank(context):
    import cupy as xp

    with context.comm(**SHAPE, timeout_s=1.5) as comm:
        rounds(comm, xp, 1)
        x, idx = xp.ones((5, 16), xp.float32), xp.arange(10).reshape(5, 2) % 6
        out = comm.dispatch(x, idx)
        if context.rank == 1:
            time.sleep(4)
            return None, 0.0, outcome(comm.check), None
        start = time.monotonic()
        seen = outcome(lambda: comm.combine(out.x, out.handle))
        took = time.monotonic() - start
        after = outcome(lambda: comm.dispatch(x, idx))
        alive = float((x + 1).sum())  # the context is usable
        return seen, took, after, alive


def test_deadline(gpu_two):
    first, second = gpu_two.run(late_rank, timeout_s=60)
    seen, took, after, alive = first
    assert seen[0] == "CommTimeoutError" and "rank 1" in seen[1] and "combine (entry)" in seen[1], seen
    assert 1.4 < took < 3.5, took
    assert after[0] == "CommTimeoutError" and alive == 160.0
    assert second[2][0] == "PeerLostError", second


def test_deadline_of_many_ranks(pools):
    """Those that wait give up at about the same time: each blames the late rank or one that gave up before it."""
    told = pools.get(4, "nvlink").run(late_rank, timeout_s=60)
    assert any(seen[0] == "CommTimeoutError" and "rank 1" in seen[1] for seen, *_ in told if seen), told
    for rank, (seen, took, after, alive) in enumerate(told):
        if rank == 1:
            assert after[0] == "PeerLostError", told
            continue
        assert seen[0] in ("CommTimeoutError", "PeerLostError") and 1.4 < took < 3.5, (rank, seen, took)
        assert after[0] == seen[0] and alive == 160.0, (rank, after, alive)


def dying_rank(context, phase):
    import cupy as xp

    comm = context.comm(**SHAPE, timeout_s=60)
    rounds(comm, xp, 1)
    x, idx = xp.ones((5, 16), xp.float32), xp.arange(10).reshape(5, 2) % 6
    xp.cuda.Device().synchronize()
    if context.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    seen = outcome(lambda: comm.dispatch(x, idx))
    took = time.monotonic() - start
    again = outcome(comm.check)
    comm.close()
    return seen, took, again, float(x.sum())


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_dead_peer_ends_the_wait(pools, more):
    pool = pools.get(2 + more, "nvlink", env={"EPCOMM_TEST_FAULT": "1"})
    for rank, told in enumerate(pool.run(dying_rank, phase="entry", expect_deaths=(1,), timeout_s=60)):
        if rank == 1:
            continue
        seen, took, again, alive = told
        assert seen[0] == "PeerLostError" and "rank 1" in seen[1], (rank, told)
        assert took < 3 and again[0] == "PeerLostError" and alive == 80.0, (rank, told)


def aborting(context):
    import threading

    import cupy as xp

    comm = context.comm(**SHAPE, timeout_s=60)
    rounds(comm, xp, 1)
    if context.rank == 1:
        time.sleep(1.5)
        seen = outcome(comm.check)
        comm.close()
        return seen, 0.0
    threading.Timer(0.5, comm.abort).start()
    start = time.monotonic()
    seen = outcome(comm.barrier)
    took = time.monotonic() - start
    comm.close()
    return seen, took


def test_abort(gpu_two):
    first, second = gpu_two.run(aborting, timeout_s=60)
    assert first[0][0] == "PeerLostError" and "abort" in first[0][1] and first[1] < 1.5, first
    assert second[0][0] == "PeerLostError", second


def launch_blocking(context):
    import cupy as xp

    with context.comm(**SHAPE) as comm:
        rounds(comm, xp, 3)


def test_launch_blocking(pools):
    pools.get(2, "nvlink", env={"CUDA_LAUNCH_BLOCKING": "1"}).run(launch_blocking, timeout_s=60)


def casts(context):
    """Hardware's casts in combine against the integer text's, through sums of one row."""
    import cupy as xp

    bad = []
    with context.comm(num_experts=1, num_topk=1, hidden=4096, max_tokens_per_rank=64, dtype="float32") as comm:
        rng = np.random.default_rng(5)
        bits = rng.integers(0, 1 << 32, (16, 4096), np.uint32)
        bits[0, :2048] = (np.arange(2048, dtype=np.uint32) << 12) + 0x38000000  # halves and ties of float16
        bits[1] = np.arange(4096, dtype=np.uint32) << 15  # ties of bfloat16, subnormals
        bias = bits.view(np.float32)
        for name in ("float16", "bfloat16"):
            dtype = arrays.dtype_of(name)
            for row in range(16):
                zeros = arrays.to_kind(np.zeros((1, 4096), dtype), "cupy")
                out = comm.dispatch(zeros, xp.zeros((1, 1), xp.int64))
                z = arrays.to_numpy(comm.combine(out.x, out.handle, bias=xp.asarray(bias[row])).x)[0]
                with np.errstate(all="ignore"):
                    want = (np.float32(0) + bias[row]).astype(dtype)
                same = (arrays.bits(z) == arrays.bits(want)) | (np.isnan(z) & np.isnan(want))
                if not same.all():
                    at = int(np.argmin(same))
                    bad.append((name, hex(bits[row, at]), hex(arrays.bits(z)[at]), hex(arrays.bits(want)[at])))
        # Every code of both types comes through unchanged.
        for name in ("float16", "bfloat16"):
            codes = np.arange(1 << 16, dtype=np.uint16).view(arrays.dtype_of(name)).reshape(16, 4096)
            out = comm.dispatch(arrays.to_kind(codes, "cupy"), xp.zeros((16, 1), xp.int64))
            z = arrays.to_numpy(comm.combine(out.x, out.handle).x)
            wide = codes.astype(np.float32) + np.float32(0)
            want = wide.astype(codes.dtype)
            same = (arrays.bits(z) == arrays.bits(want)) | (np.isnan(z) & np.isnan(want))
            if not same.all():
                bad.append((name, "codes", int((~same).sum())))
    return bad


def test_casts(pools):
    assert pools.get(1, "nvlink").run(casts, timeout_s=120) == [[]]
