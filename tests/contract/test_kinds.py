"""Every array kind in, the same kind out, whatever the memory looks like."""

import numpy as np
import pytest
from helpers import arrays, cases
from helpers.cases import Program, Spec

import epcomm

DTYPES = {
    "numpy": ("bfloat16", "float32", "float16", "float8_e4m3fn", "int16"),
    "torch": ("bfloat16", "float32", "float16", "float8_e4m3fn", "int16"),
    "dlpack": ("bfloat16", "float32", "float16", "int16"),
    "buffer": ("float32", "float16", "int16", "uint8"),
}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_kinds(pools, backend, num, kind):
    ranks = pools.get(num, backend)
    programs = []
    for dtype in DTYPES[kind]:
        for layout in ("rank", "expert"):
            scales = ("float32", 3) if dtype in ("float32", "int16") else None
            spec = Spec(
                ranks.num_ranks, 6, 3, hidden=24, dtype=dtype, scales=scales, idx_dtype="int32", tokens=(7, 0, 9)
            )
            program = Program(spec)
            program.dispatch("a", layout=layout)
            program.dispatch("c", layout=layout, capacity=5)
            program.again("h", "a")
            if dtype in cases.FLOATS:
                program.combine("a", carried=True, bias="float32", out="plain")
                program.combine("a", source="leased")
            programs.append(program)
    cases.run(ranks, programs, kind)


def test_memory_forms_of_each_kind(three, kind):
    programs = []
    for form in arrays.FORMS[kind]:
        for dtype in ("float32",) if kind == "buffer" else ("float32", "bfloat16"):
            program = Program(Spec(3, 6, 3, hidden=24, dtype=dtype))
            for layout in ("rank", "expert"):
                program.dispatch(layout, layout=layout, form=form)
                program.combine(layout, form=form, carried=True, bias="float32")
            programs.append(program)
    cases.run(three, programs, kind)


def keep_nothing(context):
    """An exporter's memory is let go once the result and the handle are gone."""
    import gc

    with context.comm(num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=8, dtype="float32") as comm:
        idx = np.array([[0, 3]] * 5, np.int64)
        for _ in range(3):
            out = comm.dispatch(arrays.DLPackExporter(np.ones((5, 8), np.float32)), arrays.DLPackExporter(idx))
            comm.combine(arrays.DLPackExporter(np.array(out.x)), out.handle)
        del out
        gc.collect()
        assert arrays.dlpack_alive() == 0, arrays.dlpack_alive()


def test_dlpack_capsules_are_freed(two):
    two.run(keep_nothing)


def write_through(context):
    """A lease is memory of the heap, seen by the caller's library without a copy."""
    import torch

    with context.comm(num_experts=4, num_topk=1, hidden=8, max_tokens_per_rank=8, dtype="float32") as comm:
        idx = torch.arange(4).reshape(4, 1)
        x = torch.arange(32, dtype=torch.float32).reshape(4, 8)
        out = comm.dispatch(x, idx, copy=False)
        assert out.x.dtype == torch.float32 and not out.x.requires_grad
        out.x.mul_(2)
        z = comm.combine(out.x, out.handle).x
        assert torch.equal(z, x * 2)
        # As ordinary tensors they outlive everything else.
        kept = out.x
        del out
        comm.dispatch(x, idx)
        assert kept[0, 1].item() == 2 * (context.rank == 0 or context.num_ranks == 1) or kept.numel()


def test_torch_writes_into_the_lease(two):
    reason = arrays.why_not("torch")
    if reason:
        pytest.skip(reason)
    two.run(write_through)


def gradients_are_not_lost(context):
    import torch

    with context.comm(num_experts=4, num_topk=1, hidden=8, max_tokens_per_rank=8, dtype="float32") as comm:
        idx = torch.arange(4).reshape(4, 1)
        x, weights = torch.ones(4, 8), torch.ones(4, 1)
        out = comm.dispatch(x, idx, weights)
        texts = []
        for call in (
            lambda: comm.dispatch(x.clone().requires_grad_(), idx),
            lambda: comm.dispatch(x, idx, weights.clone().requires_grad_()),
            lambda: comm.combine(out.x.clone().requires_grad_(), out.handle),
        ):
            try:
                call()
            except epcomm.InvalidArgumentError as error:
                texts.append(str(error))
        with torch.no_grad():
            assert torch.equal(comm.combine(comm.dispatch(x, idx).x, out.handle).x, x)
        return texts


def test_arrays_that_require_grad_are_refused(two):
    reason = arrays.why_not("torch")
    if reason:
        pytest.skip(reason)
    for texts in two.run(gradients_are_not_lost):
        assert len(texts) == 3 and all("grad" in text for text in texts), texts
