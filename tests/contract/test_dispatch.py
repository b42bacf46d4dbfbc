"""Dispatch moves bytes: both layouts, alignment, capacity, payload types, scales, shapes and routings."""

import warnings

import numpy as np
import pytest
from helpers import arrays, cases
from helpers.cases import FLOATS, PAYLOADS, ROUTINGS, Program, Spec

EXPERT = {"layout": "expert"}


def shapes(num_ranks):
    """(experts, top-k) around the number of ranks: fewer, equal, uneven, K up to E."""
    some = {(1, 1), (num_ranks, 1), (2 * num_ranks + 1, 3), (8, 8), (5, 2)}
    if num_ranks > 1:
        some.add((num_ranks - 1, 1))
    return sorted((experts, min(topk, experts)) for experts, topk in some)


def test_layouts_and_routings(ranks):
    programs = []
    for routing in ROUTINGS:
        for weights in (True, False):
            program = Program(Spec(ranks.num_ranks, routing=routing, weights=weights, num_topk=3, hidden=40))
            program.dispatch("r")
            program.dispatch("e", **EXPERT)
            program.dispatch("a", expert_alignment=4, **EXPERT)
            programs.append(program)
    cases.run(ranks, programs)


def test_experts_and_topk(ranks):
    programs = []
    for num_experts, num_topk in shapes(ranks.num_ranks):
        for idx_dtype in ("int64", "int32"):
            spec = Spec(ranks.num_ranks, num_experts, num_topk, hidden=24, dtype="float32", idx_dtype=idx_dtype)
            program = Program(spec)
            program.dispatch("r")
            program.dispatch("e", expert_alignment=1, **EXPERT)
            programs.append(program)
    cases.run(ranks, programs)


def test_owners(ranks):
    num_ranks = ranks.num_ranks
    maps = [
        [expert % num_ranks for expert in range(9)],  # round robin
        [num_ranks - 1] * 9,  # all on one rank, the others own none
        sorted([expert % num_ranks for expert in range(9)], reverse=True),
        [0, num_ranks - 1, 0, num_ranks - 1, 0, num_ranks // 2, 0, 0, num_ranks - 1],
    ]
    programs = []
    for owners in maps:
        program = Program(Spec(num_ranks, 9, 4, hidden=16, owners=owners))
        program.dispatch("r")
        program.dispatch("e", expert_alignment=4, **EXPERT)
        programs.append(program)
    cases.run(ranks, programs)


@pytest.mark.parametrize("alignment", [1, 4, 16, 128])
def test_alignment(ranks, alignment):
    programs = []
    # Few rows allowed: padded results do not fit in a slot and are copies; many: they are views.
    for tokens, max_recv_tokens in ((17, None), ((0, 3, 40), None), ((0, 3, 40), 2000), (0, 2000)):
        spec = Spec(ranks.num_ranks, 6, 2, hidden=32, tokens=tokens)
        program = Program(spec, max_recv_tokens=max_recv_tokens)
        for key in "abc":  # different rows: padding must be zero though the memory was used before
            program.dispatch(key, layout="expert", expert_alignment=alignment)
            program.drop(key)
        programs.append(program)
    cases.run(ranks, programs)


def test_uneven_and_empty_tokens(ranks):
    programs = []
    for tokens in (0, 1, (5, 1, 17), (0, 9), (9, 0), (0, 0, 0, 1)):
        for layout in ("rank", "expert"):
            program = Program(Spec(ranks.num_ranks, tokens=tokens, num_topk=4))
            for key in "abc":
                program.dispatch(key, layout=layout)
                program.combine(key)
            programs.append(program)
    cases.run(ranks, programs)


def test_capacity(ranks):
    num_ranks = ranks.num_ranks
    programs = []
    for routing, weights in (("random", True), ("one_rank", True), ("none", False), ("full", False)):
        spec = Spec(num_ranks, num_topk=3, hidden=24, tokens=(11, 3, 7), routing=routing, weights=weights)
        for layout, alignment in (("rank", 1), ("expert", 1), ("expert", 4)):
            probe = Program(spec).dispatch("probe", layout=layout, expert_alignment=alignment)
            need = max(received.x.shape[0] for received in probe.received)
            program = Program(spec)
            for number, capacity in enumerate(sorted({0, 1, need // 2, max(0, need - 1), need, need + 5})):
                key = f"c{number}"
                program.dispatch(key, layout=layout, expert_alignment=alignment, capacity=capacity)
                program.combine(key)
                program.combine(key, carried=True, apply_weights=False)
                program.drop(key)
            programs.append(program)
    cases.run(ranks, programs)


def test_capacity_calls_mix_with_exact_ones(ranks):
    program = Program(Spec(ranks.num_ranks, num_topk=3, hidden=24))
    for number, capacity in enumerate((None, 9, None, 2, 40, None, 0, None)):
        for layout in ("rank", "expert"):
            key = f"{number}{layout}"
            program.dispatch(key, layout=layout, capacity=capacity)
            program.combine(key)
            program.drop(key)
    cases.run(ranks, [program])


@pytest.mark.parametrize("hidden", [1, 7, 8, 64, 96, 136, 200, 264, 2880])
def test_widths(ranks, hidden):
    programs = []
    for dtype in ("bfloat16", "float32", "uint8"):
        program = Program(Spec(ranks.num_ranks, 4, 2, hidden=hidden, dtype=dtype, tokens=(4, 3, 0, 5)))
        program.dispatch("r")
        program.dispatch("e", expert_alignment=4, **EXPERT)
        if dtype in FLOATS:
            program.combine("r", out="plain")
            program.combine("e", out="plain")
        programs.append(program)
    cases.run(ranks, programs)


def test_payload_types(ranks):
    programs = []
    for dtype in FLOATS + PAYLOADS:
        program = Program(Spec(ranks.num_ranks, hidden=33, dtype=dtype))
        program.dispatch("r")
        program.dispatch("e", expert_alignment=4, **EXPERT)
        programs.append(program)
    cases.run(ranks, programs)


def test_one_communicator_takes_every_dtype_whose_row_fits(ranks):
    program = Program(Spec(ranks.num_ranks, hidden=36, dtype="float32"))
    for dtype in (*FLOATS, *PAYLOADS):
        inputs = Spec(ranks.num_ranks, hidden=36, dtype=dtype).inputs(len(dtype))
        program.dispatch(f"r{dtype}", inputs)
        program.combine(f"r{dtype}", dtype="bfloat16")
        program.dispatch(f"e{dtype}", inputs, expert_alignment=4, **EXPERT)
        program.combine(f"e{dtype}", dtype="float16")
        program.drop(f"r{dtype}", f"e{dtype}")
    cases.run(ranks, [program])


@pytest.mark.parametrize(
    "scales", [("float32", 1), ("float32", 5), ("uint8", 3), ("bfloat16", 7), ("float8_e4m3fn", 2)]
)
def test_scales_travel_as_bytes(ranks, scales):
    programs = []
    for dtype, form in (("float8_e4m3fn", "plain"), ("bfloat16", "columns"), ("uint8", "fortran"), ("float32", "rows")):
        program = Program(Spec(ranks.num_ranks, hidden=256, dtype=dtype, scales=scales, num_topk=3))
        program.dispatch("r", form=form)
        program.dispatch("e", form=form, expert_alignment=4, **EXPERT)
        program.dispatch("c", form=form, capacity=7)
        program.again("h", "r", scales=scales)
        program.again("n", "r")
        programs.append(program)
    cases.run(ranks, programs)


def signalling_weights(context):
    make = np.asarray
    if context.on_gpu:
        import cupy

        make = cupy.asarray
    with context.comm(num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=4, dtype="float32") as comm:
        weights = np.full((4, 2), 0x7FF0000000000001).view(np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = comm.dispatch(make(np.ones((4, 8), np.float32)), make(np.arange(8).reshape(4, 2) % 4), make(weights))
        ids, weights = arrays.to_numpy(out.topk_idx), arrays.to_numpy(out.topk_weights)
        assert (np.isnan(weights) == (ids >= 0)).all()


def test_weights_that_are_signalling_nan_are_no_warning(two):
    two.run(signalling_weights)


def too_wide_for_their_scales(context):
    import epcomm

    make = np.asarray
    if context.on_gpu:
        import cupy

        make = cupy.asarray
    with context.comm(num_experts=1, num_topk=1, hidden=1024, max_tokens_per_rank=4, dtype="float32") as comm:
        for columns in (4033, 4096):
            with pytest.raises(epcomm.InvalidArgumentError, match=f"rows of x take {columns} and their scales"):
                comm.dispatch(make(np.ones((4, columns), np.float32)), make(np.zeros((4, 1), np.int64)), quantize="fp8")


def test_quantised_rows_of_other_widths_find_room_for_their_scales(ranks):
    """Codes and scales of the widest row that fits fill a slot; one column more would reach into what lies behind."""
    ranks.run(too_wide_for_their_scales)
    program = Program(Spec(ranks.num_ranks, 4, 2, hidden=4032, dtype="float32", tokens=5, routing="full"),
                      hidden=1024, max_tokens_per_rank=5)  # fmt: skip
    program.dispatch("a", quantize="fp8")
    program.dispatch("b", quantize="fp8", copy=True)
    cases.run(ranks, [program])


@pytest.mark.parametrize("hidden", [7, 128, 200, 264])
def test_quantize_fp8(ranks, hidden):
    programs = []
    for dtype in FLOATS:
        program = Program(Spec(ranks.num_ranks, hidden=hidden, dtype=dtype, num_topk=3))
        program.dispatch("r", quantize="fp8")
        program.dispatch("e", quantize="fp8", expert_alignment=4, **EXPERT)
        program.dispatch("c", quantize="fp8", capacity=6)
        program.again("h", "e", quantize="fp8")
        program.combine("e", dtype=dtype)
        programs.append(program)
    cases.run(ranks, programs)


@pytest.mark.parametrize("form", ["rows", "columns", "reversed", "readonly", "odd", "fortran", "broadcast"])
def test_memory_forms(ranks, form):
    programs = []
    for dtype, hidden in (("bfloat16", 40), ("float32", 33), ("uint8", 17)):
        for routing in ("random", "same"):
            program = Program(Spec(ranks.num_ranks, 9, 3, hidden=hidden, dtype=dtype, routing=routing))
            program.dispatch("r", form=form)
            program.dispatch("e", form=form, expert_alignment=4, **EXPERT)
            if dtype in FLOATS:
                program.combine("r", form=form, carried=True, bias="row")
                program.combine("e", form=form, carried=True, bias="float32")
            programs.append(program)
    cases.run(ranks, programs)


def test_megabytes(pools, backend):
    """Large calls may take another path past the caches: odd row widths, every layout."""
    programs = []
    for hidden, dtype, num_topk in ((4095, "bfloat16", 3), (2880, "float32", 2)):
        program = Program(Spec(2, 6, num_topk, hidden=hidden, dtype=dtype, tokens=(280, 263), routing="full"))
        program.dispatch("r")
        program.combine("r")
        program.combine("r", source="leased", bias="row")
        program.dispatch("e", expert_alignment=4, **EXPERT)
        program.combine("e")
        program.combine("e", exact_order=True)
        program.dispatch("c", copy=True)
        program.dispatch("q", quantize="fp8")
        programs.append(program)
    cases.run(pools.get(2, backend), programs)
