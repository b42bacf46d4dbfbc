"""Leases: views of the heap while a slot is free, copies when not, never silently overwritten."""

import gc

import numpy as np
import pytest
from helpers.oracle import assert_bits

import epcomm

COMM = {"num_experts": 8, "num_topk": 1, "hidden": 16, "max_tokens_per_rank": 8, "dtype": "float32"}
IDX = np.arange(8).reshape(8, 1)  # every rank of up to eight gets rows


def rows_for(context, number):
    """Rows that tell call, rank and token."""
    base = 1000 * number + 100 * context.rank + np.arange(8, dtype=np.float32)[:, None]
    return np.repeat(base, COMM["hidden"], axis=1)


def lease_or_copy(stats):
    return {name: stats[name] for name in ("leases", "copies")}


def held_results_stay(context, num_slots, copy):
    with context.comm(**COMM, num_slots=num_slots) as comm:
        outs, wants = [], []
        for number in range(num_slots + 10):
            out = comm.dispatch(rows_for(context, number), IDX, copy=copy)
            outs.append(out)
            wants.append(np.array(out.x))
            for z in [comm.combine(out.x, out.handle).x]:
                assert_bits(z, rows_for(context, number), "z")
            for earlier, want in zip(outs, wants, strict=True):
                assert_bits(earlier.x, want, "a held result")
        return comm.stats()


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_held_results_are_never_overwritten(ranks, num_slots):
    for copy in (None, True):
        for stats in ranks.run(held_results_stay, num_slots=num_slots, copy=copy):
            copies = num_slots + 10 if copy else 10
            assert stats["copies"] == copies, stats


def refuses_when_full(context, num_slots):
    with context.comm(**COMM, num_slots=num_slots) as comm:
        held = [comm.dispatch(rows_for(context, n), IDX, copy=False) for n in range(num_slots)]
        try:
            comm.dispatch(rows_for(context, 9), IDX, copy=False)
        except epcomm.UnsupportedError as error:
            assert str(num_slots) in str(error), error
        else:
            raise AssertionError("a lease too many was given")
        for number, out in enumerate(held):
            assert_bits(comm.combine(out.x, out.handle).x, rows_for(context, number))
        # One goes: its slot is free at once, for all ranks.
        del out, held[0]
        gc.collect()
        out = comm.dispatch(rows_for(context, 9), IDX, copy=False)
        assert_bits(comm.combine(out.x, out.handle).x, rows_for(context, 9))


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_copy_false_says_how_many_are_held(ranks, num_slots):
    ranks.run(refuses_when_full, num_slots=num_slots)


def one_rank_holds(context):
    """A rank that holds leases never blocks a sender, and the others still get views."""
    with context.comm(**COMM, num_slots=2) as comm:
        held = []
        for number in range(12):
            out = comm.dispatch(rows_for(context, number), IDX, copy=None)
            want = np.array(out.x)
            if context.rank == 0:
                held.append((out, want))
            assert_bits(comm.combine(out.x, out.handle).x, rows_for(context, number))
            del out
        for out, want in held:
            assert_bits(out.x, want)
        return comm.stats()["copies"]


def test_a_held_lease_blocks_nobody(ranks):
    copies = ranks.run(one_rank_holds)
    assert copies == [10] + [0] * (ranks.num_ranks - 1)


def copy_false_on_one_rank_only(context):
    """`copy` is each rank's own business; a rank that refuses makes all of them raise the same error."""
    with context.comm(**COMM, num_slots=1) as comm:
        held = comm.dispatch(rows_for(context, 0), IDX)
        text = None
        try:
            comm.dispatch(rows_for(context, 1), IDX, copy=False if context.rank == 1 else None)
        except epcomm.UnsupportedError as error:
            text = str(error)
        assert_bits(comm.combine(held.x, held.handle).x, rows_for(context, 0))
        out = comm.dispatch(rows_for(context, 2), IDX, copy=None)
        assert_bits(comm.combine(out.x, out.handle).x, rows_for(context, 2))
        return text


def test_a_refused_lease_is_refused_on_all_ranks(three):
    texts = three.run(copy_false_on_one_rank_only)
    assert all(text and "rank 1" in text for text in texts), texts


def views_keep_the_lease(context):
    """The lease ends when the *last* array over it dies, however it was derived."""
    with context.comm(**COMM, num_slots=1) as comm:
        out = comm.dispatch(rows_for(context, 0), IDX)
        view = out.x[1:, ::2][:, 1:].T
        want = np.array(view)
        del out
        gc.collect()
        for number in range(1, 4):
            comm.dispatch(rows_for(context, number), IDX)
            assert_bits(view, want, "a view of a dropped result")
        assert comm.stats()["copies"] == 3
        del view
        gc.collect()
        comm.dispatch(rows_for(context, 4), IDX)
        return comm.stats()["copies"]


def test_a_derived_view_keeps_the_lease(two):
    assert two.run(views_keep_the_lease) == [3, 3]


def copy_true_is_own_memory(context):
    comm = context.comm(**COMM)
    out = comm.dispatch(rows_for(context, 3), IDX, copy=True)
    want = np.array(out.x)
    comm.close()
    assert_bits(out.x, want, "a copy after close")
    out.x[...] = 0  # writable


def test_a_copy_outlives_the_communicator(two):
    two.run(copy_true_is_own_memory)


def lease_after_close(context):
    """A view after close is still memory: no fault, and its bytes are what they were."""
    comm = context.comm(**COMM)
    out = comm.dispatch(rows_for(context, 3), IDX)
    want = np.array(out.x)
    comm.close()
    assert_bits(out.x, want, "a lease after close")


def test_a_lease_after_close_does_not_fault(two):
    two.run(lease_after_close)


def many_buffers(context):
    """`combine_buffer` is memory of the heap that nothing overwrites while it is alive."""
    with context.comm(**COMM) as comm:
        out = comm.dispatch(rows_for(context, 0), IDX)
        received = np.array(out.x)
        buffer = comm.combine_buffer(out.handle)
        assert buffer.shape == received.shape and buffer.dtype == received.dtype
        buffer[...] = received
        for number in range(1, 5):
            other = comm.dispatch(rows_for(context, number), IDX)
            assert_bits(comm.combine(other.x, other.handle).x, rows_for(context, number))
            del other
        assert_bits(buffer, received, "the buffer")
        assert_bits(comm.combine(buffer, out.handle).x, rows_for(context, 0))


def test_combine_buffer_is_not_overwritten(two):
    two.run(many_buffers)


def expert_layout_leases(context):
    """Expert layout too gives views while slots are free and large enough, and says so when not."""
    idx = np.tile(np.arange(8), (8, 1))  # every token to every expert: more rows than a slot holds
    shape = {**COMM, "num_topk": 8}
    with context.comm(**shape, max_recv_tokens=600) as comm:
        for number in range(4):
            out = comm.dispatch(rows_for(context, number), idx, layout="expert", copy=False)
            assert comm.stats()["copies"] == 0
            z = comm.combine(out.x, out.handle).x
            assert_bits(z, rows_for(context, number) * np.float32(8), "z")
            del out
    with context.comm(**shape) as comm:
        text = None
        try:
            comm.dispatch(rows_for(context, 0), idx, layout="expert", copy=False)
        except epcomm.UnsupportedError as error:
            text = str(error)
        out = comm.dispatch(rows_for(context, 1), idx, layout="expert")
        assert_bits(comm.combine(out.x, out.handle).x, rows_for(context, 1) * np.float32(8), "z")
        return text


def more_capacity_than_a_slot(context):
    with context.comm(**COMM) as comm:
        for layout in ("rank", "expert"):
            text = None
            try:
                comm.dispatch(rows_for(context, 0), IDX, layout=layout, capacity=100_000,
                              copy=False if context.rank == 0 else None)  # fmt: skip
            except epcomm.UnsupportedError as error:
                text = str(error)
            assert text and text.startswith("rank 0: ") and "capacity=100000" in text, text
            out = comm.dispatch(rows_for(context, 1), IDX, layout=layout, capacity=100_000)
            assert_bits(comm.combine(out.x, out.handle).x, comm.combine(out.x, out.handle).x, "z")


def test_copy_false_with_more_capacity_than_a_slot_is_refused_by_all(ranks):
    ranks.run(more_capacity_than_a_slot)


def test_leases_of_expert_layout(ranks):
    texts = ranks.run(expert_layout_leases)
    assert all(text is None or "copy=False" in text for text in texts), texts
    if ranks.num_ranks <= 2:  # four experts or more per rank: more rows than a slot holds
        assert all(texts), texts
