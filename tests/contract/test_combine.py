"""Combine sums by the written tree, bit for bit."""

import numpy as np
import pytest
from helpers import arrays, cases
from helpers.cases import FLOATS, Program, Spec
from helpers.oracle import RankInput, assert_bits

LAYOUTS = ("rank", "expert")


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums(ranks, dtype):
    programs = []
    for layout in LAYOUTS:
        for routing, weights in (
            ("full", True),
            ("random", True),
            ("duplicates", True),
            ("full", False),
            ("none", True),
        ):
            spec = Spec(ranks.num_ranks, 8, 6, hidden=72, dtype=dtype, routing=routing, weights=weights)
            program = Program(spec)
            program.dispatch("a", layout=layout)
            program.combine("a")
            program.combine("a", carried=True)
            program.combine("a", bias="row")
            program.combine("a", bias="float32", carried=True, out="plain")
            program.combine("a", bias="tokens", form="rows")
            program.combine("a", bias="float32 tokens")
            program.combine("a", apply_weights=False, carried=True)
            if layout == "expert" and weights:
                program.combine("a", apply_weights=True)
            programs.append(program)
    cases.run(ranks, programs)


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_order(ranks, dtype):
    programs = []
    for num_topk, weights in ((2, True), (8, True), (8, False)):
        spec = Spec(ranks.num_ranks, 8, num_topk, hidden=72, dtype=dtype, weights=weights, tokens=(19, 0, 5))
        program = Program(spec)
        program.dispatch("a", layout="expert", expert_alignment=4)
        program.combine("a", exact_order=True)
        program.combine("a")
        program.combine("a", exact_order=True, bias="row", carried=True)
        program.combine("a", exact_order=True, bias="tokens")
        program.combine("a", exact_order=True, apply_weights=False, out="plain")
        program.dispatch("c", layout="expert", capacity=9)
        program.combine("c", exact_order=True)
        programs.append(program)
    cases.run(ranks, programs)


def test_all_picks_on_one_rank_and_duplicates(ranks):
    programs = []
    for routing in ("one_rank", "same", "last"):
        for layout in LAYOUTS:
            program = Program(Spec(ranks.num_ranks, 8, 5, hidden=40, dtype="float16", routing=routing))
            program.dispatch("a", layout=layout)
            program.combine("a", carried=True)
            if layout == "expert":
                program.combine("a", exact_order=True)
            programs.append(program)
    cases.run(ranks, programs)


@pytest.mark.parametrize("source", ["leased", "buffer"])
def test_y_in_the_heap(ranks, source):
    programs = []
    for layout in LAYOUTS:
        for capacity in (None, 8):
            program = Program(Spec(ranks.num_ranks, 8, 3, hidden=56))
            for key in ("a", "b", "c", "d"):
                program.dispatch(key, layout=layout, capacity=capacity, expert_alignment=4 if layout == "expert" else 1)
                program.combine(key, source=source)
                program.combine(key, source=source, carried=True, bias="row")
                if layout == "expert":
                    program.combine(key, source=source, exact_order=True)
                program.combine(key)
                program.drop(key)
            programs.append(program)
    cases.run(ranks, programs)


@pytest.mark.parametrize("dtype", FLOATS)
def test_combine_buffer_of_another_dtype(ranks, dtype):
    program = Program(Spec(ranks.num_ranks, 8, 3, hidden=56, dtype="float32"))
    for layout in LAYOUTS:
        program.dispatch(layout, layout=layout)
        program.combine(layout, source="buffer", dtype=dtype)
    cases.run(ranks, [program])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_y_may_have_another_width_than_x(ranks, layout):
    program = Program(Spec(ranks.num_ranks, 8, 3, hidden=64, dtype="float32"))
    program.dispatch("a", layout=layout)
    for hidden, dtype in ((64, "float32"), (128, "bfloat16"), (24, "bfloat16"), (1, "float32"), (63, "float16")):
        program.combine("a", hidden=hidden, dtype=dtype)
        program.combine("a", hidden=hidden, dtype=dtype, bias="float32", carried=True)
    cases.run(ranks, [program])


@pytest.mark.parametrize("out", ["plain", "rows"])
def test_out(ranks, out):
    programs = []
    for dtype in FLOATS:
        program = Program(Spec(ranks.num_ranks, 8, 3, hidden=23, dtype=dtype, tokens=(6, 0, 3)))
        for layout in LAYOUTS:
            program.dispatch(layout, layout=layout)
            program.combine(layout, out=out)
            program.combine(layout, out=out, carried=True, bias="row")
        programs.append(program)
    cases.run(ranks, programs)


def bias_in_out(context, at):
    make = np.asarray
    if context.on_gpu:
        import cupy

        make = cupy.asarray
    rng = np.random.default_rng(context.rank)
    tokens, hidden = 70, 24
    with context.comm(num_experts=4, num_topk=2, hidden=hidden, max_tokens_per_rank=tokens, dtype="float32") as comm:
        x = rng.standard_normal((tokens, hidden), np.float32)
        out = comm.dispatch(make(x), make(rng.integers(0, 4, (tokens, 2))))
        flat = rng.standard_normal((tokens + 1) * hidden, np.float32)
        where = {"same": slice(0, -hidden), "next row": slice(hidden, None), "one row": slice(hidden, 2 * hidden)}[at]
        shape = (hidden,) if at == "one row" else (tokens, hidden)
        want = comm.combine(out.x, out.handle, bias=make(flat[where].reshape(shape).copy())).x
        memory = make(flat.copy())
        got = comm.combine(out.x, out.handle, bias=memory[where].reshape(shape),
                           out=memory[:-hidden].reshape(tokens, hidden)).x  # fmt: skip
        assert_bits(arrays.to_numpy(got), arrays.to_numpy(want), at)


@pytest.mark.parametrize("at", ["same", "next row", "one row"])
def test_out_may_be_the_memory_of_the_bias(ranks, at):
    """A row of the result is written before the bias of another token is read."""
    ranks.run(bias_in_out, at=at)


def crafted(values, weights, dtype, num_ranks):
    """The same token on every rank: pick k has y = values[k] everywhere, expert k on rank k % num_ranks."""
    num_topk = len(values)
    owners = [expert % num_ranks for expert in range(num_topk)]
    spec = Spec(num_ranks, num_topk, num_topk, hidden=33, dtype=dtype, tokens=1, owners=owners, routing="full")
    one = RankInput(
        np.ones((1, 33), np.float32).astype(spec.inputs()[0].x.dtype),
        np.arange(num_topk, dtype=np.int64)[None],
        np.array([weights], np.float32),
    )
    return spec, [one] * num_ranks


# (y of each pick, weights): a fused multiply-add, a flushed subnormal or another order gives other bits.
TRAPS = {
    "contraction": ([-(1 + 2.0**-11), 1 + 2.0**-12], [1, 1 + 2.0**-12], "float32"),
    "subnormals": ([1e-40, 3e-41, -1e-44], [1, 0.5, 1], "float32"),
    "order": ([1e8, 1, -1e8, 1, 3e7, -3e7, 0.25, 1], [1] * 8, "float32"),
    "minus zero": ([-0.0, -0.0], [1, 1], "float32"),
    "halfway": ([256, 1, 1, 0.5, 0.25, 256, 2, 1], [1] * 8, "bfloat16"),
    "small halves": ([6e-8, 6e-8, -6e-8, 1.2e-7], [1, 0.5, 0.25, 1], "float16"),
    "overflow": ([60000, 60000, -60000, 1], [1] * 4, "float16"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_arithmetic_traps(ranks, trap):
    values, weights, dtype = TRAPS[trap]
    spec, inputs = crafted(values, weights, dtype, ranks.num_ranks)
    program = Program(spec, trap)
    routing = program.dispatch("e", inputs, layout="expert")
    ys = []
    for received in routing.received:
        y = np.zeros(received.x.shape, received.x.dtype)
        for row, origin in enumerate(received.rows):
            y[row] = values[origin.k]
        ys.append(y)
    for options in ({}, {"exact_order": True}, {"apply_weights": False}):
        program.combine("e", ys=ys, **options)
    cases.run(ranks, [program])
