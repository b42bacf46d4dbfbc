"""The same bits over repeats, threads, channels and instruction sets."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from helpers import arrays, cases
from helpers.cases import Program, Spec


def fingerprint(context, inputs, ys, layout, exact_order, repeats, **comm):
    """Hash of the bits of every result over `repeats` calls."""
    digests = set()
    with context.comm(num_experts=8, num_topk=4, hidden=200, max_tokens_per_rank=40, dtype="bfloat16", **comm) as comm:
        for _ in range(repeats):
            out = comm.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout=layout)
            result = comm.combine(ys, out.handle, exact_order=exact_order, topk_weights=out.topk_weights)
            digest = hashlib.sha256()
            for array in (
                out.x,
                out.topk_idx,
                out.topk_weights,
                out.num_tokens_per_expert,
                result.x,
                result.topk_weights,
            ):
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
            digests.add(digest.hexdigest())
    return digests


@pytest.fixture(scope="module")
def inputs():
    """Inputs of three ranks and rows for both layouts."""
    spec = Spec(3, 8, 4, hidden=200, tokens=(40, 0, 33), routing="full", specials=False)
    given = spec.inputs()
    ys = {}
    for layout in ("rank", "expert"):
        rng = np.random.default_rng(3)
        routing = cases.oracle.dispatch(given, 8, layout=layout)
        ys[layout] = [cases.values(rng, one.x.shape, "bfloat16", False) for one in routing.received]
    return given, ys


@pytest.mark.parametrize(("layout", "exact_order"), [("rank", False), ("expert", False), ("expert", True)])
def test_same_bits_over_repeats_threads_and_channels(pools, backend, inputs, layout, exact_order):
    given, ys = inputs
    pool = pools.get(3, backend)
    per_rank = [{"inputs": one, "ys": y} for one, y in zip(given, ys[layout], strict=True)]
    seen = [set() for _ in range(3)]
    for number, (threads, channels) in enumerate(((1, 1), (2, 2), (3, 5), (1, 5), (3, 1), (2, None))):
        answers = pool.run(
            fingerprint_with_threads,
            per_rank=per_rank,
            layout=layout,
            exact_order=exact_order,
            repeats=2 if number else 20,
            threads=threads,
            num_channels=channels,
        )
        for rank, answer in enumerate(answers):
            seen[rank] |= answer
    assert [len(digests) for digests in seen] == [1, 1, 1]


def fingerprint_with_threads(context, threads, **kwargs):
    with context.environment({"EPCOMM_NUM_THREADS": str(threads)}):
        return fingerprint(context, **kwargs)


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_every_instruction_set_equals_the_oracle(pools, backend, isa):
    pool = pools.get(2, backend)
    if isa != "plain" and {"avx2": "avx2", "avx512": "avx512f"}[isa] not in pool.run(processor_flags)[0]:
        pytest.skip(f"the processor that ranks run on has no {isa}")
    programs = []
    for dtype in cases.FLOATS:
        for hidden in (1, 7, 64, 136, 264):
            program = Program(Spec(2, 8, 5, hidden=hidden, dtype=dtype, tokens=(11, 6)))
            program.dispatch("e", layout="expert", expert_alignment=4)
            program.combine("e", bias="row")
            program.combine("e", exact_order=True)
            program.dispatch("r")
            program.combine("r", bias="float32")
            program.dispatch("q", quantize="fp8")
            programs.append(program)
    pool.run(
        programs_with_isa,
        isa=isa,
        per_rank=[{"programs": [program.for_rank(rank) for program in programs]} for rank in range(2)],
    )


def processor_flags(context):
    return set(Path("/proc/cpuinfo").read_text().split())


def programs_with_isa(context, isa, programs):
    from helpers import runner

    with context.environment({"EPCOMM_HOST_ISA": isa}):
        runner.run_programs(context, programs)


def test_subnormals_survive_libraries_that_flush_them(two):
    reason = arrays.why_not("torch")
    if reason:
        pytest.skip(reason)
    two.run(flush_then_combine)


def flush_then_combine(context):
    """A caller's thread may run with flush-to-zero on; the result must not show it."""
    import torch

    torch.set_flush_denormal(True)
    try:
        with context.comm(num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=4, dtype="float32") as comm:
            idx = np.array([[0, 1], [2, 3], [0, 3], [1, 2]], np.int64)
            x = np.full((4, 8), 3, np.int32).view(np.float32)
            for layout in ("rank", "expert"):
                out = comm.dispatch(x, idx, np.ones(idx.shape, np.float32), layout=layout)
                z = comm.combine(out.x, out.handle).x.view(np.int32)
                want = [3, 3, 6, 6] if layout == "rank" else [6] * 4  # a row per rank, a row per pick
                assert (z == np.array(want)[:, None]).all(), (layout, z[:, 0].tolist())
    finally:
        torch.set_flush_denormal(False)
