"""Inputs that broke other libraries doing this job, one class per row of the list of field reports.

Expert e multiplies its rows by (e + 1), so combined row t is ``x[t] * sum_k w[t, k] * (ids[t, k] + 1)``. With small
integers and quarters every step is exact in bf16, and results are compared bit for bit without an oracle.
"""

import contextlib
import gc
import os
import time

import numpy as np
import pytest
from helpers import arrays, oracle
from helpers.oracle import assert_bits

import epcomm
import epcomm.ops

BF16 = arrays.dtype_of("bfloat16")
SENTINEL = 77.0


def make(rank, num_tokens, hidden, num_experts, num_topk, seed=0, dtype=BF16):
    """Integer rows, distinct experts and weights in quarters that sum to at most 1."""
    rng = np.random.default_rng([seed, rank])
    x = rng.integers(-3, 4, (num_tokens, hidden)).astype(dtype)
    ids = np.array([rng.permutation(num_experts)[:num_topk] for _ in range(num_tokens)], np.int64)
    ids = ids.reshape(num_tokens, num_topk)
    weights = np.full((num_tokens, num_topk), 0.25, np.float32)
    if num_topk > 4:
        weights[:, 4:] = 0
    return x, ids, weights


def expected(x, ids, weights):
    """Combined rows in the dtype of x."""
    picked = ids >= 0
    factor = (np.where(picked, weights, 0).astype(np.float64) * (np.where(picked, ids, 0) + 1)).sum(axis=1)
    return (x.astype(np.float64) * factor[:, None] + 0.0).astype(np.float32).astype(x.dtype)


def experts_of(context, num_experts, owners=None):
    """Global ids of this rank's experts, ascending."""
    owners = oracle.default_owners(num_experts, context.num_ranks) if owners is None else owners
    return np.array([expert for expert in range(num_experts) if owners[expert] == context.rank], np.int64)


def run_experts(out, mine, layout):
    """Expert outputs: rank layout sums a row's picks with their weights, expert layout gives one row per pick."""
    x = arrays.to_numpy(out.x).astype(np.float32)
    ids = arrays.to_numpy(out.topk_idx)
    factor = np.where(ids >= 0, (mine[np.maximum(ids, 0)] if mine.size else np.zeros(ids.shape)) + 1, 0)
    if layout == "rank":
        factor = (factor * arrays.to_numpy(out.topk_weights)).sum(axis=1)
        y = x * factor[:, None]
    else:
        y = x * factor[:, None]
        y[ids < 0] = np.nan  # padding: nobody may read it
    return y.astype(np.float32).astype(arrays.to_numpy(out.x).dtype)


def round_trip(context, comm, x, ids, weights, num_experts, layout="rank", owners=None, **options):
    """Dispatch, experts, combine into a buffer full of a sentinel; compared bit for bit."""
    out = comm.dispatch(x, ids, weights, layout=layout, **options)
    y = run_experts(out, experts_of(context, num_experts, owners), layout)
    z = np.full(x.shape, SENTINEL, x.dtype)
    result = comm.combine(y, out.handle, out=z)
    assert_bits(z, expected(x, ids, weights), f"combined rows, {layout} layout")
    assert_bits(np.asarray(result.x), z, "result and out=")
    return out


LAYOUTS = ("rank", "expert")


# ------------------------------------------------------------------------------------ B01: idle ranks


def idle_ranks(context, tokens, layout):
    shape = {"num_experts": 4, "num_topk": 2, "hidden": 256, "max_tokens_per_rank": 4}
    with context.comm(**shape) as comm:
        for step in range(4):
            count = tokens[(context.rank + step) % len(tokens)]
            for dtype in (BF16, np.dtype(np.float16)):
                x, ids, weights = make(context.rank, count, 256, 4, 2, step, dtype)
                out = round_trip(context, comm, x, ids, weights, 4, layout)
                z = comm.combine(np.array(out.x), out.handle).x
                assert z.shape == (count, 256) and z.dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [(4, 0), (0, 4), (0, 0)])
def test_b01_idle_ranks(ranks, tokens, layout):
    ranks.run(idle_ranks, tokens=tokens, layout=layout)


# --------------------------------------------------------------- B03: another T on every rank, no padding


def uneven_tokens(context, layout):
    with context.comm(num_experts=6, num_topk=2, hidden=64, max_tokens_per_rank=32) as comm:
        sent = []
        for count in ((5, 1, 17), (32, 0, 1), (0, 0, 2)):
            before = comm.stats()["bytes_sent"]
            x, ids, weights = make(context.rank, count[context.rank], 64, 6, 2)
            comm.dispatch(x, ids, weights, layout=layout)
            away = sum(
                len({expert // 2 for expert in row} - {context.rank})  # two experts per rank
                for row in ids.tolist()
            )
            sent.append((comm.stats()["bytes_sent"] - before, away * 128))
            round_trip(context, comm, x, ids, weights, 6, layout)
        return sent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b03_uneven_tokens_move_only_real_rows(three, layout):
    for answers in three.run(uneven_tokens, layout=layout):
        for moved, real in answers:
            # Ids and weights may travel beside a row of 128 bytes, pad rows may not.
            assert real <= moved <= 1.5 * real, answers


# ------------------------------------------------------------------------------------------ B04: widths


def widths(context, layout):
    for hidden in (1, 7, 8, 64, 96, 127, 129, 136, 200, 264, 2880):
        for dtype in (BF16, np.dtype(np.float32), np.dtype(np.float16)):
            shape = {"num_experts": 4, "num_topk": 2, "hidden": hidden, "max_tokens_per_rank": 6}
            with context.comm(**shape, dtype=dtype.name) as comm:
                x, ids, weights = make(context.rank, 6, hidden, 4, 2, hidden, dtype)
                round_trip(context, comm, x, ids, weights, 4, layout)
                out = comm.dispatch(x, ids, layout=layout, quantize="fp8")
                assert out.scales.shape == (out.x.shape[0], -(-hidden // 128))
                real = out.topk_idx >= 0 if layout == "expert" else np.ones(out.x.shape[0], bool)
                wide = np.repeat(out.scales, 128, axis=1)[:, :hidden]
                decoded = out.x.astype(np.float32) * wide
                exact = comm.dispatch(x, handle=out.handle).x.astype(np.float32)
                error = np.abs(decoded - exact)[real]
                assert (error <= np.abs(exact)[real] * (1 / 16 + 1 / 128)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b04_any_width_is_whole(two, layout):
    two.run(widths, layout=layout, timeout_s=120)


# ----------------------------------------------------------------------------------------- B06: top-k


def large_topk(context):
    for num_topk in (1, 9, 10, 16, 32, 33, 64):
        shape = {"num_experts": 64, "num_topk": num_topk, "hidden": 16, "max_tokens_per_rank": 5, "dtype": "float32"}
        with context.comm(**shape) as comm:
            x, ids, weights = make(context.rank, 5, 16, 64, num_topk, dtype=np.dtype(np.float32))
            for layout in LAYOUTS:
                round_trip(context, comm, x, ids, weights, 64, layout)
    return [refusal(context, num_experts=64, num_topk=num_topk) for num_topk in (0, 65)]


def refusal(context, **changes):
    shape = {"num_experts": 4, "num_topk": 2, "hidden": 16, "max_tokens_per_rank": 4, **changes}
    try:
        context.comm(**shape)
    except epcomm.InvalidArgumentError as error:
        return str(error)
    return None


def test_b06_any_topk_up_to_the_experts(ranks):
    for texts in ranks.run(large_topk):
        assert "num_topk" in texts[0] and "0" in texts[0]
        assert "num_topk" in texts[1] and "65" in texts[1] and "64" in texts[1]


# ------------------------------------------------------------------------------- B07: any number of ranks


def any_ranks(context):
    num_experts = 2 * context.num_ranks
    shape = {"num_experts": num_experts, "num_topk": 2, "hidden": 32, "max_tokens_per_rank": 8, "dtype": "float32"}
    with context.comm(**shape) as comm:
        x, ids, weights = make(context.rank, 8, 32, num_experts, 2, dtype=np.dtype(np.float32))
        for layout in LAYOUTS:
            round_trip(context, comm, x, ids, weights, num_experts, layout)


@pytest.mark.parametrize("num", [1, 2, 3, 5, 7, 9])
def test_b07_any_number_of_ranks(pools, backend, num):
    pools.get(num, backend).run(any_ranks)


# --------------------------------------------------------------- B08: ranks that disagree (see test_errors)


def disagree(context, argument, values):
    return refusal(context, **{argument: values[context.rank]})


@pytest.mark.parametrize(
    ("argument", "values"), [("max_tokens_per_rank", (8, 16)), ("num_experts", (4, 8)), ("hidden", (256, 512))]
)
def test_b08_disagreement_lists_each_ranks_value(two, argument, values):
    for text in two.run(disagree, argument=argument, values=values):
        assert text and argument in text and all(str(value) in text for value in values), text


def quantize_on_one(context):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=4) as comm:
        x, ids, weights = make(context.rank, 4, 16, 4, 2)
        try:
            comm.dispatch(x, ids, weights, quantize="fp8" if context.rank else None)
        except epcomm.InvalidArgumentError as error:
            round_trip(context, comm, x, ids, weights, 4)
            return str(error)
    return None


def test_b08_fp8_on_one_rank_only(two):
    for text in two.run(quantize_on_one):
        assert text and "quantize" in text and "fp8" in text and "rank 0" in text and "rank 1" in text, text


# ---------------------------------------------------------------------- B10: ranks that receive nothing


def one_rank_gets_all(context, loops):
    with context.comm(num_experts=6, num_topk=2, hidden=16, max_tokens_per_rank=8) as comm:
        for number in range(loops):
            x, ids, weights = make(context.rank, 8, 16, 2, 2, number)  # experts 0 and 1: rank 0
            layout = LAYOUTS[number % 2]
            out = round_trip(context, comm, x, ids, weights, 6, layout)
            if context.rank:
                assert out.x.shape[0] == 0 and not out.num_tokens_per_expert.any() and out.num_tokens == 0
            else:
                assert int(out.num_tokens_per_expert.sum()) == 48


def test_b10_ranks_that_receive_nothing_take_part(three):
    three.run(one_rank_gets_all, loops=200)


# ------------------------------------------------------------------------------------------ B11: -1


def no_picks(context, layout):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8) as comm:
        x = make(context.rank, 3, 16, 4, 2)[0]
        for ids in ([[2, -1], [-1, -1], [-1, 2]], [[-1, -1]] * 3, [[-1, 3], [0, -1], [-1, -1]]):
            ids = np.array(ids, np.int64)
            weights = np.where(ids < 0, np.float32(np.nan), np.float32(0.5))
            before = comm.stats()["rows_sent"]
            out = round_trip(context, comm, x, ids, weights, 4, layout)
            z = comm.combine(run_experts(out, experts_of(context, 4), layout), out.handle).x
            assert (z[(ids < 0).all(axis=1)].view(np.uint16) == 0).all(), "a dropped row is exact +0"
            if (ids < 0).all():
                assert comm.stats()["rows_sent"] == before
                assert out.num_tokens == 0 and not out.num_tokens_per_expert.any()
            carried = np.ones(out.topk_idx.shape, np.float32)
            back = comm.combine(np.array(out.x), out.handle, apply_weights=False, topk_weights=carried).topk_weights
            assert_bits(back, (ids >= 0).astype(np.float32), "carried weights")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b11_minus_one_is_nothing(ranks, layout):
    ranks.run(no_picks, layout=layout)


# ------------------------------------------------------------------- B12: garbage ids name row, slot, value


def garbage(context, value, where, dtype):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8) as comm:
        x, ids, weights = make(context.rank, 5, 16, 4, 2)
        bad = ids.astype(dtype)
        if context.rank == 1:
            bad[where] = value
            bad[4, 1] = 99  # a later one: the first is named
        try:
            comm.dispatch(x, bad, weights)
        except epcomm.InvalidArgumentError as error:
            round_trip(context, comm, x, ids, weights, 4)
            return str(error)
    return None


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(4, "int64"), (1004, "int64"), (2**31 - 1, "int64"), (2**40, "int64"), (-2, "int64"), (-(2**40) - 1, "int64")]
    + [(4, "int32"), (2**31 - 1, "int32"), (-2, "int32")],
)
def test_b12_garbage_ids(two, value, dtype):
    for text in two.run(garbage, value=value, where=(3, 0), dtype=dtype):
        assert text and "rank 1" in text and "topk_idx[3, 0]" in text and str(value) in text and "3" in text, text


# --------------------------------------------------------------------------------- B15: E not divisible by R


def owners_of(context, num_experts):
    shape = {"num_experts": num_experts, "num_topk": 1, "hidden": 8, "max_tokens_per_rank": num_experts}
    with context.comm(**shape, dtype="float32") as comm:
        x = np.ones((num_experts, 8), np.float32)
        ids = np.arange(num_experts).reshape(-1, 1)
        out = round_trip(context, comm, x, ids, np.ones(ids.shape, np.float32), num_experts)
        return out.num_tokens_per_expert.tolist()


@pytest.mark.parametrize(
    ("num_experts", "num", "want"), [(5, 2, [3, 2]), (256, 3, [86, 85, 85]), (2, 3, [1, 1, 0]), (1, 2, [1, 0])]
)
def test_b15_uneven_experts(pools, backend, num_experts, num, want):
    answers = pools.get(num, backend).run(owners_of, num_experts=num_experts)
    assert [len(counts) for counts in answers] == want
    assert all(set(counts) <= {num} for counts in answers)
    rank_of, local_of, counts = epcomm.ops.expert_owners(num_experts, num)  # the rule can be asked for
    assert rank_of == oracle.default_owners(num_experts, num) and counts == want
    assert local_of == [expert for count in want for expert in range(count)]


# ------------------------------------------------------------------------------------------ B17: skew


def skew(context, ids, want_counts, loops):
    """Nearly all rows on the same experts: counts right in every loop, the owner takes R*T rows."""
    num_tokens, num_topk = ids.shape
    shape = {"num_experts": 8, "num_topk": num_topk, "hidden": 4, "max_tokens_per_rank": num_tokens}
    with context.comm(**shape, dtype="float32") as comm:
        rng = np.random.default_rng(context.rank)
        x = rng.integers(-3, 4, (num_tokens, 4)).astype(np.float32)
        weights = np.full(ids.shape, 0.25, np.float32)
        mine = experts_of(context, 8)
        for number in range(loops):
            layout = LAYOUTS[number % 2]
            out = round_trip(context, comm, x, ids, weights, 8, layout)
            assert out.num_tokens_per_expert.tolist() == want_counts[mine].tolist() == out.counts
            assert out.overflow == 0


@pytest.mark.parametrize("collapsed", [False, True])
def test_b17_collapse_to_few_experts(two, collapsed):
    num_tokens = 2304
    per_rank = []
    for rank in range(2):
        rng = np.random.default_rng(rank)
        if collapsed:
            ids = np.zeros((num_tokens, 1), np.int64)
        else:
            ids = np.tile(np.array([1, 6, 0]), (num_tokens, 1))
            ids[:10] = [rng.permutation(8)[:3] for _ in range(10)]
        per_rank.append({"ids": ids})
    counts = np.bincount(np.concatenate([one["ids"].ravel() for one in per_rank]), minlength=8)
    two.run(skew, per_rank=per_rank, want_counts=counts, loops=50)


# ------------------------------------------------------------------------------------ B18: index dtypes


def index_types(context, kind):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8, dtype="float32") as comm:
        x, ids, weights = make(context.rank, 6, 16, 4, 2, dtype=np.dtype(np.float32))
        ids[2, 1] = -1
        results = []
        for dtype in (np.int32, np.int64):
            out = comm.dispatch(*(arrays.to_kind(array, kind) for array in (x, ids.astype(dtype), weights)))
            results.append([np.array(arrays.to_numpy(thing)) for thing in (out.x, out.topk_idx, out.topk_weights)])
        for narrow, wide in zip(*results, strict=True):
            assert_bits(narrow, wide, "int32 against int64 ids")
        texts = {}
        for name in ("uint32", "int16", "float32", "bool", "uint8", "float64", ">i8"):
            if kind != "numpy" and (name == ">i8" or (kind == "torch" and name == "uint32")):
                continue
            bad = arrays.to_kind(ids.astype(name), kind)
            try:
                comm.dispatch(arrays.to_kind(x, kind), bad)
            except epcomm.InvalidArgumentError as error:
                texts[name] = str(error)
            else:
                texts[name] = "no error"
        round_trip(context, comm, x, ids, weights, 4)
        return texts


def test_b18_index_types(two, kind):
    for texts in two.run(index_types, kind=kind):
        for name, text in texts.items():
            shown = {">i8": "topk_idx"}.get(name, name)
            assert "topk_idx" in text and shown in text and "int32" in text and "int64" in text, (name, text)


# ----------------------------------------------------------------------------------- B19: weight dtypes


def weight_types(context, kind):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8, dtype="float32") as comm:
        x, ids, weights = make(context.rank, 6, 16, 4, 2, dtype=np.dtype(np.float32))
        mine = experts_of(context, 4)
        outcomes = {}
        for name in ("bfloat16", "float16", "float64"):
            if kind == "buffer" and name == "bfloat16":
                continue
            given = arrays.to_kind(weights.astype(arrays.dtype_of(name)), kind)  # quarters: exact in each
            try:
                out = comm.dispatch(arrays.to_kind(x, kind), arrays.to_kind(ids, kind), given, layout="expert")
            except epcomm.InvalidArgumentError as error:
                assert "topk_weights" in str(error) and name in str(error) and "float32" in str(error), error
                outcomes[name] = "refused"
                continue
            assert arrays.to_numpy(out.topk_weights).dtype == np.float32
            y = run_experts(out, mine, "expert")
            assert_bits(arrays.to_numpy(comm.combine(y, out.handle).x), expected(x, ids, weights), name)
            outcomes[name] = "converted"
        # Without weights every pick counts once.
        out = comm.dispatch(x, ids, layout="expert")
        assert out.topk_weights is None
        z = comm.combine(run_experts(out, mine, "expert"), out.handle).x
        assert_bits(z, expected(x, ids, np.ones(ids.shape, np.float32)), "without weights")
        return outcomes


def test_b19_weight_types(two, kind):
    answers = two.run(weight_types, kind=kind)
    assert answers[0] == answers[1], answers


# ------------------------------------------------------------------------------------- B20: zero groups


def zero_groups(context, name):
    dtype = arrays.dtype_of(name)
    with context.comm(num_experts=2, num_topk=1, hidden=300, max_tokens_per_rank=8, dtype=name) as comm:
        rng = np.random.default_rng(context.rank)
        x = rng.standard_normal((6, 300), np.float32).astype(dtype)
        plain = x.copy()
        x[0] = 0
        x[1, 128:256] = 0
        x[2] = np.array(-0.0, np.float32).astype(dtype)
        x[3] = np.array(1e-40, np.float32).astype(dtype)
        x[4, 256:] = np.array(-1e-40, np.float32).astype(dtype)
        ids = np.zeros((6, 1), np.int64)
        out = comm.dispatch(x, ids, quantize="fp8")
        clean = comm.dispatch(plain, ids, quantize="fp8")
        if context.rank:
            return
        scales = np.repeat(out.scales, 128, axis=1)[:, :300]
        codes = out.x.astype(np.float32)
        assert np.isfinite(out.scales).all() and (out.scales > 0).all()
        assert np.isfinite(codes).all()
        first = slice(0, 6)  # rank 0's own rows come first
        decoded, wanted = (codes * scales)[first], x.astype(np.float32)
        assert (decoded[0] == 0).all() and (out.x[0].view(np.uint8) == 0).all()
        assert (decoded[1, 128:256] == 0).all() and (decoded[2] == 0).all() and (decoded[3] == 0).all()
        assert (decoded[4, 256:] == 0).all()
        assert_bits(out.x[1, :128], clean.x[1, :128], "the group before")
        assert_bits(out.x[1, 256:], clean.x[1, 256:], "the group behind")
        assert_bits(out.x[5], clean.x[5], "an ordinary row")
        assert (np.abs(decoded[5] - wanted[5]) <= np.abs(wanted[5]) * (1 / 16 + 1 / 128) + 1e-6).all()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_b20_zero_groups(two, name):
    two.run(zero_groups, name=name)


# ----------------------------------------------------------------------------- B22: rows never filled


def padding_is_never_read(context):
    """NaN in every padding row of y, in the tail of capacity mode, in leases and in the combine buffer."""
    with context.comm(num_experts=6, num_topk=2, hidden=16, max_tokens_per_rank=8) as comm:
        mine = experts_of(context, 6)
        for number, options in enumerate(({"expert_alignment": 16}, {"capacity": 90}, {"capacity": 90})):
            x, ids, weights = make(context.rank, 7, 16, 4, 2, number)  # experts 4 and 5 get no rows
            want = expected(x, ids, weights)
            for copy in (None, True):
                out = comm.dispatch(x, ids, weights, layout="expert", copy=copy, **options)
                y = run_experts(out, mine, "expert")
                assert np.isnan(y.astype(np.float32)).any() or not (out.topk_idx < 0).any()
                for exact_order in (False, True):
                    assert_bits(comm.combine(y, out.handle, exact_order=exact_order).x, want)
                with contextlib.suppress(epcomm.UnsupportedError):
                    buffer = comm.combine_buffer(out.handle)
                    buffer[...] = y
                    assert_bits(comm.combine(buffer, out.handle).x, want)
                    del buffer
                out.x[...] = y
                assert_bits(comm.combine(out.x, out.handle).x, want)
                out = comm.dispatch(x, ids, weights, capacity=50, copy=copy)
                y = run_experts(out, mine, "rank")
                y[int(out.num_tokens) :] = np.nan
                assert_bits(comm.combine(y, out.handle).x, want)
        # A real pick with w = 0 and a NaN row is a NaN: 0 * NaN, as the text says.
        out = comm.dispatch(x, ids, np.zeros(ids.shape, np.float32), layout="expert")
        y = np.full(out.x.shape, np.nan, out.x.dtype)
        assert np.isnan(comm.combine(y, out.handle).x.astype(np.float32)).all()


def test_b22_rows_without_a_token_are_never_read(three):
    three.run(padding_is_never_read)


# ------------------------------------------------------------------------- B25: many communicators, no leak


def create_and_destroy(context, times):
    def baseline():
        gc.collect()
        time.sleep(0.1)  # threads that were joined stay listed for a moment
        names = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
        threads = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")), [name for name in names if "epcomm" in name], threads, mapped()

    def mapped():
        with open("/proc/self/maps") as file:
            return sum("memfd:" in line or "/dev/shm/" in line for line in file)

    def once(number):
        with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8) as comm:
            x, ids, weights = make(context.rank, 5, 16, 4, 2, number)
            round_trip(context, comm, x, ids, weights, 4)

    once(0)
    before = baseline()
    for number in range(times):
        once(number)
    return before, baseline()


def test_b25_creating_a_hundred_times_leaks_nothing(two):
    for before, after in two.run(create_and_destroy, times=100, timeout_s=120):
        assert before == after


def misuse(context):
    comm = context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8)
    other = context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8)
    x, ids, weights = make(context.rank, 5, 16, 4, 2)
    out = comm.dispatch(x, ids, weights, copy=True)
    texts = []
    for call in (lambda: other.combine(out.x, out.handle), lambda: other.dispatch(x, handle=out.handle)):
        try:
            call()
        except epcomm.InvalidArgumentError as error:
            texts.append(str(error))
    round_trip(context, other, x, ids, weights, 4)
    round_trip(context, comm, x, ids, weights, 4)
    comm.barrier()
    comm.close()
    comm.close()
    try:
        comm.dispatch(x, ids, weights)
    except epcomm.EpcommError as error:
        texts.append(str(error))
    round_trip(context, other, x, ids, weights, 4)
    return texts


def test_b25_foreign_handles_and_use_after_close(two):
    for texts in two.run(misuse):
        assert len(texts) == 3 and "handle" in texts[0] and "handle" in texts[1] and "close" in texts[2], texts


# --------------------------------------------------------------------- B27: what combine takes as a handle


def not_a_handle(context):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8, dtype="float32") as comm:
        x, ids, weights = make(context.rank, 5, 16, 4, 2, dtype=np.dtype(np.float32))
        out = comm.dispatch(x, ids, weights, copy=True)
        texts = []
        for wrong in (out.topk_idx, ids, out, None):
            try:
                comm.combine(out.x, wrong)
            except epcomm.InvalidArgumentError as error:
                texts.append(str(error))
        # A handle may be used again; the handle of another dispatch that fits no rows is refused.
        first, second = comm.combine(out.x, out.handle).x, comm.combine(out.x, out.handle).x
        assert_bits(first, second, "second use of a handle")
        other = comm.dispatch(x[:1], np.full((1, 2), -1, np.int64), copy=True)
        try:
            comm.combine(out.x, other.handle)
        except epcomm.InvalidArgumentError as error:
            texts.append(str(error))
        round_trip(context, comm, x, ids, weights, 4)
        return texts


def test_b27_only_the_right_handle(ranks):
    for texts in ranks.run(not_a_handle):
        assert len(texts) == 5, texts
        assert all("handle" in text for text in texts[:4]) and "x" in texts[4], texts


# ------------------------------------------------------------------------- B34: several calls in flight


def overlapped(context, waits):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8) as comm:
        flying = []
        for number in range(3):
            x, ids, weights = make(context.rank, 5, 16, 4, 2, number)
            flying.append((comm.dispatch(x, ids, weights, async_op=True), expected(x, ids, weights)))
        combined = []
        for number in waits:
            out, want = flying[number]
            out.event.wait()
            y = run_experts(out, experts_of(context, 4), "rank")
            combined.append((comm.combine(y, out.handle, async_op=True), want))
        for result, want in reversed(combined):
            result.event.wait()
            assert_bits(result.x, want, "a combine awaited in reverse order")


@pytest.mark.parametrize("waits", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_b34_results_belong_to_the_handle(three, waits):
    three.run(overlapped, waits=waits)


# ----------------------------------------------------------------------------------- B37: more than agreed


def too_large_a_batch(context):
    with context.comm(num_experts=4, num_topk=2, hidden=16, max_tokens_per_rank=8) as comm:
        x, ids, weights = make(context.rank, 9 if context.rank == 0 else 8, 16, 4, 2)
        try:
            comm.dispatch(x, ids, weights)
        except epcomm.InvalidArgumentError as error:
            text = str(error)
        round_trip(context, comm, x[:8], ids[:8], weights[:8], 4)
        return text


def test_b37_a_batch_above_the_limit(two):
    for text in two.run(too_large_a_batch):
        assert "9" in text and "8" in text and "max_tokens_per_rank" in text and "rank 0" in text, text


# ------------------------------------------------------------------------------------ B39: many rows


def many_rows(context):
    num_tokens = 70_000
    shape = {"num_experts": 4, "num_topk": 2, "hidden": 8, "max_tokens_per_rank": num_tokens}
    with context.comm(**shape) as comm:
        x, _, weights = make(context.rank, num_tokens, 8, 4, 0)
        rng = np.random.default_rng(context.rank)
        first = rng.integers(0, 4, num_tokens)
        ids = np.stack([first, (first + rng.integers(1, 4, num_tokens)) % 4], axis=1)
        weights = np.full(ids.shape, 0.25, np.float32)
        for layout in LAYOUTS:
            round_trip(context, comm, x, ids, weights, 4, layout)
        round_trip(context, comm, x, np.zeros_like(ids), weights, 4)  # all to one rank: 140,000 rows


def test_b39_seventy_thousand_rows(two):
    two.run(many_rows, timeout_s=120)
