"""`async_op`: the call returns an event; results are right after it, whatever the order of waiting."""

import time

import numpy as np
from helpers import cases
from helpers.cases import Program, Spec
from helpers.oracle import assert_bits

import epcomm


def test_async_programs(ranks):
    programs = []
    for layout in ("rank", "expert"):
        program = Program(Spec(ranks.num_ranks, 8, 3, hidden=48, tokens=(9, 0, 5)))
        for capacity in (None, 6):
            key = f"a{capacity}"
            program.dispatch(key, layout=layout, capacity=capacity, async_op=True)
            program.combine(key, async_op=True, carried=True, bias="row")
            program.combine(key, async_op=True, out="plain")
            program.combine(key)
            program.again(f"h{capacity}", key, async_op=True)
        programs.append(program)
    cases.run(ranks, programs)


def wait_in_reverse(context, xs, idx, wants, join):
    """Several calls in flight; results belong to the handle, not to the order of the calls or of the waits."""
    with context.comm(num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=8, dtype="float32") as comm:
        handle = comm.dispatch(xs[0], idx).handle
        flying = [comm.dispatch(x, handle=handle, async_op=True) for x in xs]
        for out in reversed(flying):
            finish(out, join)
        for out, want in zip(flying, wants, strict=True):
            assert_bits(out.x, want)
        flying = [comm.combine(out.x, out.handle, async_op=True) for out in flying]
        for result in reversed(flying):
            finish(result, join)
            assert result.event.done() is True
            result.event.wait()  # waiting again is fine
        return [np.array(result.x) for result in flying]


def finish(result, join):
    if join == "done":
        end = time.monotonic() + 20
        while not result.event.done():
            assert time.monotonic() < end
            time.sleep(0.001)
    else:
        getattr(result.event, join)()


def reverse_cases(num_ranks):
    spec = Spec(num_ranks, 4, 2, hidden=8, dtype="float32", tokens=8, weights=False, specials=False)
    many = [spec.inputs(number) for number in range(4)]
    for inputs in many:
        for one, first in zip(inputs, many[0], strict=True):
            one.topk_idx = first.topk_idx
    routings = [cases.oracle.dispatch(inputs, 4) for inputs in many]
    per_rank = [
        {
            "xs": [inputs[rank].x for inputs in many],
            "idx": many[0][rank].topk_idx,
            "wants": [routing.received[rank].x for routing in routings],
        }
        for rank in range(num_ranks)
    ]
    combined = [cases.oracle.combine(routing, [one.x for one in routing.received]) for routing in routings]
    return per_rank, combined


def test_waiting_in_reverse_order(ranks):
    per_rank, combined = reverse_cases(ranks.num_ranks)
    for join in ("wait", "synchronize", "done"):
        results = ranks.run(wait_in_reverse, per_rank=per_rank, join=join)
        for rank, arrays_back in enumerate(results):
            for number, z in enumerate(arrays_back):
                assert_bits(z, combined[number][rank][0], f"rank {rank}, call {number}")


def returns_early(context):
    """The call itself does not wait for a late peer; the event does."""
    with context.comm(num_experts=4, num_topk=1, hidden=8, max_tokens_per_rank=4, dtype="float32") as comm:
        x, idx = np.full((4, 8), context.rank, np.float32), np.arange(4).reshape(4, 1)
        out = comm.dispatch(x, idx)
        comm.barrier()
        if context.rank == 1:
            time.sleep(1.0)
        start = time.monotonic()
        result = comm.combine(out.x, out.handle, async_op=True)
        returned = time.monotonic() - start
        was_done = result.event.done()
        result.event.wait()
        waited = time.monotonic() - start
        assert_bits(result.x, x)
        return returned, waited, was_done


def test_async_call_returns_before_a_late_peer(two):
    returned, waited, was_done = two.run(returns_early)[0]
    assert returned < 0.5 <= waited and not was_done


def dropped(context):
    """An event that nobody waits for, and inputs that nobody else holds."""
    with context.comm(num_experts=4, num_topk=1, hidden=8, max_tokens_per_rank=4, dtype="float32") as comm:
        for number in range(20):
            x = np.full((4, 8), number, np.float32)
            out = comm.dispatch(x, np.arange(4).reshape(4, 1), async_op=True)
            del x
            if number % 3 == 0:
                del out
        comm.barrier()
        out = comm.dispatch(np.ones((4, 8), np.float32), np.arange(4).reshape(4, 1))
        assert (out.x == 1).all()


def test_events_and_inputs_may_be_dropped(three):
    three.run(dropped)


def fails_later(context):
    """What a call in flight finds is raised by its event, on all ranks; the next call is right."""
    with context.comm(num_experts=4, num_topk=1, hidden=8, max_tokens_per_rank=4, dtype="float32") as comm:
        x, idx = np.ones((4, 8), np.float32), np.arange(4).reshape(4, 1)
        out = comm.dispatch(x, idx, np.full((4, 1), 2, np.float32), layout="expert")
        texts = []
        for repeat in range(3):
            result = comm.combine(out.x, out.handle, apply_weights=context.rank == 0, async_op=True)
            if repeat == 1:
                comm.barrier()  # another call in between does not swallow it
            try:
                result.event.wait()
            except epcomm.InvalidArgumentError as error:
                texts.append(str(error))
            assert result.event.done()
            assert_bits(comm.combine(out.x, out.handle).x, x + x)
        return texts


def test_a_difference_between_ranks_is_raised_by_the_event(three):
    answers = three.run(fails_later)
    assert all(len(texts) == 3 and "apply_weights" in texts[0] for texts in answers), answers
    assert all(texts == answers[0] for texts in answers)
