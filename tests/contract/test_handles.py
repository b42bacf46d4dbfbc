"""A throughput handle owns its routing: any number of times, in either direction, until closed."""

import numpy as np
import pytest
from helpers import cases
from helpers.cases import Program, Spec
from helpers.oracle import assert_bits

LAYOUTS = ("rank", "expert")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_directions_many_times(ranks, layout):
    programs = []
    for weights in (True, False):
        program = Program(Spec(ranks.num_ranks, 8, 3, hidden=64, dtype="float32", weights=weights))
        program.dispatch("a", layout=layout, expert_alignment=4 if layout == "expert" else 1)
        program.combine("a")
        for number, (dtype, hidden) in enumerate((("float32", 64), ("bfloat16", 128), ("uint8", 5), ("float16", 64))):
            key = f"h{number}"
            program.again(key, "a", dtype=dtype, hidden=hidden)
            program.combine("a", dtype="bfloat16", hidden=40, carried=True)
            program.combine(key, dtype="float32")
            program.again(f"{key}h", key, dtype=dtype, hidden=hidden)  # the handle of a cached call is one too
            program.drop(key, f"{key}h")
        programs.append(program)
    cases.run(ranks, programs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_handles_alive_in_any_order(ranks, layout):
    program = Program(Spec(ranks.num_ranks, 8, 3, hidden=24))
    for number in range(6):
        program.dispatch(f"{number}", layout=layout, capacity=None if number % 2 else 7)
    for number in (3, 0, 5, 1, 4, 2, 0, 5):
        program.again(f"again{number}", f"{number}")
        program.combine(f"{number}", carried=True)
    cases.run(ranks, [program])


def not_written(context):
    """The engine trusts what a handle says of its routing."""
    make = np.asarray
    if context.on_gpu:
        import cupy

        make = cupy.asarray
    with context.comm(num_experts=6, num_topk=2, hidden=16, max_tokens_per_rank=16, dtype="float32") as comm:
        handle = comm.dispatch(make(np.ones((3, 16), np.float32)), make(np.zeros((3, 2), np.int64))).handle
        names = ("layout", "expert_alignment", "capacity", "generation", "num_tokens", "num_rows", "has_weights",
                 "closed")  # fmt: skip
        before = {name: getattr(handle, name) for name in names}
        for name in names:
            with pytest.raises(AttributeError):
                setattr(handle, name, 10**6)
        assert {name: getattr(handle, name) for name in names} == before
        rows = handle.num_rows
        assert comm.combine(make(np.ones((rows, 16), np.float32)), handle).x.shape == (3, 16)


def test_what_a_handle_says_cannot_be_written(ranks):
    ranks.run(not_written)


def backward_identities(context, layout, x, idx, weights, gz, want_gx, want_gw):
    """Backward of dispatch is a combine, backward of combine is a dispatch: <gz, combine(dispatch(x))> agrees."""
    with context.comm(num_experts=6, num_topk=2, hidden=16, max_tokens_per_rank=16, dtype="float32") as comm:
        out = comm.dispatch(x, idx, weights, layout=layout)
        comm.combine(out.x * np.float32(2), out.handle)
        # Backward of combine: gradients of y. Weights are in w * y in expert layout only.
        back = comm.dispatch(gz, handle=out.handle)
        gy = back.x
        if layout == "expert":
            assert_bits(back.topk_weights, out.topk_weights, "weights of a cached dispatch")
            gw = (gy * out.x * np.float32(2)).sum(axis=1)
            gy = gy * back.topk_weights[:, None]
        else:
            gw = np.where(out.topk_idx >= 0, (gy * out.x).sum(axis=1, keepdims=True), np.float32(0))
        # Backward of dispatch: gradients of x, and of the weights carried beside.
        result = comm.combine(gy * np.float32(2), out.handle, apply_weights=False, topk_weights=gw)
        assert_bits(result.x, want_gx, "gx")
        assert_bits(result.topk_weights, want_gw, "gw")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_identities(ranks, layout):
    rng = np.random.default_rng(5)
    per_rank = []
    for _ in range(ranks.num_ranks):
        # Small integers and quarters: every step is exact, so that a formula can be compared by bits.
        x = rng.integers(-3, 4, (10, 16)).astype(np.float32)
        gz = rng.integers(-3, 4, (10, 16)).astype(np.float32)
        idx = np.array([rng.permutation(6)[:2] for _ in range(10)], np.int64)
        idx[rng.random(idx.shape) < 0.3] = -1
        weights = rng.integers(1, 5, idx.shape).astype(np.float32) / 4
        valid = idx >= 0
        if layout == "expert":
            # z = sum_k w_k * 2x, so gx = sum_k 2 w_k gz and gw_k = <gz, 2x>.
            want_gx = 2 * gz * np.where(valid, weights, 0).sum(axis=1, keepdims=True)
            want_gw = np.where(valid, 2 * (gz * x).sum(axis=1, keepdims=True), 0)
        else:
            owners = np.array(cases.oracle.default_owners(6, ranks.num_ranks))
            holders = np.array([len({owners[e] for e in row if e >= 0}) for row in idx.tolist()], np.float32)
            want_gx = 2 * gz * holders[:, None]  # each rank that holds the token gave one row
            want_gw = np.where(valid, (gz * x).sum(axis=1, keepdims=True), 0)
        per_rank.append(
            {
                "x": x,
                "idx": idx,
                "weights": weights,
                "gz": gz,
                "want_gx": want_gx.astype(np.float32) + np.float32(0),  # sums start at +0: no -0.0
                "want_gw": want_gw.astype(np.float32),
            }
        )
    ranks.run(backward_identities, layout=layout, per_rank=per_rank)
