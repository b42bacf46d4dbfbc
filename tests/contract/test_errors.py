"""Bad input: the same typed error on all ranks, naming rank, argument and value; the next call is right."""

import numpy as np
import pytest
from helpers import arrays, bad_values
from helpers.bad_values import MISSING, SHAPE, Bench, value_of
from helpers.oracle import assert_bits

import epcomm

CULPRIT = 1


def outcome(call):
    """(class name, text) of the error, or None."""
    try:
        call()
    except epcomm.EpcommError as error:
        assert type(error).__module__.startswith("epcomm")
        return type(error).__name__, str(error)
    except Exception as error:
        return f"untyped {type(error).__name__}", str(error)
    return None


def good_round(bench):
    """A right call of each kind; every expert's row twice its token."""
    out = bench.comm.dispatch(bench.x, bench.idx, bench.weights, layout="expert")
    z = bench.comm.combine(out.x, out.handle, apply_weights=False).x
    assert_bits(z, bench.x + bench.x, "a good call after a refused one")


def dispatch_call(bench, changes):
    arguments = {"x": bench.x, "topk_idx": bench.idx, "topk_weights": bench.weights, **changes}
    arguments = {name: value for name, value in arguments.items() if value is not MISSING}
    return lambda: bench.comm.dispatch(arguments.pop("x"), **arguments)


def combine_call(bench, changes):
    arguments = {"x": bench.expert_out.x, "handle": bench.expert_out.handle, **changes}
    return lambda: bench.comm.combine(arguments.pop("x"), arguments.pop("handle"), **arguments)


def refused(context, call, table, pairs):
    """Outcome of each bad row; only `CULPRIT` gives the bad value, the others' calls are right."""
    outcomes = []
    with context.comm(**SHAPE) as comm, context.comm(**SHAPE) as foreign:
        bench = Bench.make(context, comm, foreign)
        make = {"dispatch": dispatch_call, "combine": combine_call}[call]
        bad = context.rank == CULPRIT
        changes = [{row[0]: value_of(row[1], bench)} for row in getattr(bad_values, table)]
        changes += [make_pair(bench) for make_pair, _ in getattr(bad_values, pairs)]
        for number, change in enumerate(changes):
            outcomes.append(outcome(make(bench, change if bad else {})))
            if number % 8 == 0:
                good_round(bench)
        good_round(bench)
    return outcomes


def texts_of(table, pairs):
    rows = [(row[0], row[2], f"{row[0]} row {number}") for number, row in enumerate(getattr(bad_values, table))]
    return rows + [(text, text, f"pair {number}") for number, (_, text) in enumerate(getattr(bad_values, pairs))]


@pytest.mark.parametrize("call", ["dispatch", "combine"])
@pytest.mark.parametrize("num", [2, 3])
def test_bad_arguments_of_calls(pools, backend, call, num):
    table, pairs = f"BAD_{call.upper()}", f"BAD_{call.upper()}_PAIRS"
    answers = pools.get(num, backend).run(refused, call=call, table=table, pairs=pairs)
    wrong = []
    for number, (argument, text, what) in enumerate(texts_of(table, pairs)):
        seen = [answer[number] for answer in answers]
        wrong += complaints(what, seen, argument, text)
    assert not wrong, "\n".join(wrong)


def complaints(what, seen, argument, text):
    """What is wrong with the ranks' outcomes of one bad call."""
    if any(one is None for one in seen):
        return [f"{what}: no error on ranks {[rank for rank, one in enumerate(seen) if one is None]}; {seen}"]
    if {name for name, _ in seen} - {"InvalidArgumentError", "UnsupportedError"}:
        return [f"{what}: {seen}"]
    if len({name for name, _ in seen}) != 1:
        return [f"{what}: not the same error: {seen}"]
    found = []
    for rank, (_, message) in enumerate(seen):
        if argument not in message or text not in message:
            found.append(f"{what}: rank {rank}'s text lacks {argument!r} or {text!r}: {message}")
        elif rank != CULPRIT and f"rank {CULPRIT}" not in message:
            found.append(f"{what}: rank {rank}'s text lacks 'rank {CULPRIT}': {message}")
    return found


def refused_creations(context):
    """Outcome of each bad creation; only `CULPRIT` gives the bad value. A good one comes after every few."""
    outcomes = []
    for number, (argument, value, _) in enumerate(bad_values.BAD_CREATION):
        changed = {**SHAPE, **({argument: value} if context.rank == CULPRIT else {})}
        outcomes.append(outcome(lambda changed=changed: context.comm(**changed)))
        if number % 10 == 0:
            good_creation(context)
    for name, value, _ in bad_values.BAD_ENVIRONMENT:
        with context.environment({name: value} if context.rank == CULPRIT else {}):
            backend = {"backend": None} if name == "EPCOMM_BACKEND" else {}
            outcomes.append(outcome(lambda backend=backend: context.comm(**SHAPE, **backend)))
    good_creation(context)
    return outcomes


def good_creation(context):
    with context.comm(**SHAPE) as comm:
        idx = np.arange(10).reshape(5, 2) % 6
        out = comm.dispatch(np.ones((5, 16), np.float32), idx, layout="expert")
        assert (comm.combine(out.x, out.handle).x == 2).all()


@pytest.mark.parametrize("num", [2, 3])
def test_bad_arguments_of_creation(pools, backend, num):
    answers = pools.get(num, backend).run(refused_creations, timeout_s=120)
    wrong = []
    rows = bad_values.BAD_CREATION + bad_values.BAD_ENVIRONMENT
    for number, (argument, value, text) in enumerate(rows):
        seen = [answer[number] for answer in answers]
        if argument in ("backend", "device", "EPCOMM_BACKEND"):  # an unknown backend is also "not available"
            seen = [
                None if one is None else (one[0].replace("BackendUnavailableError", "InvalidArgumentError"), one[1])
                for one in seen
            ]
        wrong += complaints(f"{argument}={value!r}", seen, argument, text)
    assert not wrong, "\n".join(wrong)


def bad_groups(context):
    seen = [outcome(lambda group=group: context.comm(group=group, **SHAPE)) for group in bad_values.BAD_GROUPS]
    good_creation(context)
    return seen


def test_bad_groups(two):
    """Without a group there is no way to tell the others: each rank hears of its own."""
    for answer in two.run(bad_groups):
        assert all(seen is not None and seen[0] == "InvalidArgumentError" and "group" in seen[1] for seen in answer), (
            answer
        )


def mismatched_creations(context):
    outcomes = []
    for argument, first, other in bad_values.CREATION_MISMATCHES:
        changed = {**SHAPE, argument: first if context.rank == 0 else other}
        outcomes.append(outcome(lambda changed=changed: context.comm(**changed)))
    good_creation(context)
    return outcomes


@pytest.mark.parametrize("num", [2, 3])
def test_creation_mismatches_list_each_ranks_value(pools, backend, num):
    answers = pools.get(num, backend).run(mismatched_creations)
    wrong = []
    for number, (argument, first, other) in enumerate(bad_values.CREATION_MISMATCHES):
        for rank, answer in enumerate(answers):
            seen = answer[number]
            if seen is None or seen[0] != "InvalidArgumentError":
                wrong.append(f"{argument}: rank {rank}: {seen}")
                continue
            needed = [argument, *(f"rank {r}" for r in range(num))]
            if argument != "expert_to_rank":
                needed += [str(first), str(other)]
            missing = [text for text in needed if text not in seen[1]]
            if missing:
                wrong.append(f"{argument}: rank {rank}: lacks {missing}: {seen[1]}")
    assert not wrong, "\n".join(wrong)


# Calls that differ between ranks: (name, rank 0's call, the others' call, what the text must contain).
def _d(**changes):
    return lambda b: dispatch_call(b, {name: value_of(v, b) for name, v in changes.items()})()


def _c(**changes):
    return lambda b: combine_call(b, {name: value_of(v, b) for name, v in changes.items()})()


CALL_MISMATCHES = [
    ("op", _d(), _c(), ["dispatch", "combine"]),
    ("barrier", _d(), lambda b: b.comm.barrier(), ["dispatch", "barrier"]),
    ("layout", _d(), _d(layout="expert"), ["layout", "rank", "expert"]),
    ("alignment", _d(layout="expert", expert_alignment=4), _d(layout="expert", expert_alignment=8),
     ["alignment", "4", "8"]),
    ("capacity", _d(capacity=7), _d(capacity=9), ["capacity", "7", "9"]),
    ("capacity or none", _d(capacity=7), _d(), ["capacity", "7", "None"]),
    ("row bytes", _d(), _d(x=lambda b: b.x[:, :8]), ["of x", "64", "32"]),
    ("dtype", _d(x=lambda b: b.x.view(np.int32)), _d(), ["of x", "int32", "float32"]),
    ("quantize", _d(quantize="fp8"), _d(), ["quantize", "fp8", "None"]),
    ("weights", _d(topk_weights=None), _d(), ["topk_weights", "not given"]),
    ("scales", _d(scales=lambda b: b.x[:, :1]), _d(), ["scales"]),
    ("scales width", _d(scales=lambda b: b.x[:, :1]), _d(scales=lambda b: b.x[:, :2]), ["scales", "4", "8"]),
    ("handle or ids", _d(topk_idx=None, topk_weights=None, handle=lambda b: b.rank_out.handle),
     _d(topk_weights=None), ["handle"]),
    ("another handle", _d(topk_idx=None, topk_weights=None, handle=lambda b: b.expert_out.handle),
     _d(topk_idx=None, topk_weights=None, handle=lambda b: b.bare_out.handle), ["handle", "call"]),
    ("combine handle", _c(), _c(x=lambda b: b.bare_out.x, handle=lambda b: b.bare_out.handle, apply_weights=False),
     ["handle"]),
    ("combine dtype", _c(), _c(x=lambda b: b.expert_out.x.astype(np.float16)), ["of x", "float32", "float16"]),
    ("combine width", _c(), _c(x=lambda b: b.expert_out.x[:, :8]), ["of x", "64", "32"]),
    ("apply_weights", _c(), _c(apply_weights=False), ["apply_weights", "True", "False"]),
    ("carried", _c(), _c(topk_weights=lambda b: b.expert_out.topk_weights), ["topk_weights"]),
    ("exact_order", _c(), _c(exact_order=True), ["exact_order", "True", "False"]),
]  # fmt: skip


def mismatched_calls(context):
    outcomes = []
    with context.comm(**SHAPE) as comm, context.comm(**SHAPE) as foreign:
        bench = Bench.make(context, comm, foreign)
        for _, first, other, _ in CALL_MISMATCHES:
            outcomes.append(outcome(lambda call=first if context.rank == 0 else other: call(bench)))
            good_round(bench)
    return outcomes


@pytest.mark.parametrize("num", [2, 3])
def test_call_mismatches_are_one_error_that_lists_values(pools, backend, num):
    answers = pools.get(num, backend).run(mismatched_calls)
    wrong = []
    for number, (what, _, _, needed) in enumerate(CALL_MISMATCHES):
        seen = [answer[number] for answer in answers]
        if any(one is None or one[0] != "InvalidArgumentError" for one in seen) or len(set(seen)) != 1:
            wrong.append(f"{what}: {seen}")
            continue
        missing = [text for text in [*needed, *(f"rank {r}" for r in range(num))] if text not in seen[0][1]]
        if missing:
            wrong.append(f"{what}: lacks {missing}: {seen[0][1]}")
    assert not wrong, "\n".join(wrong)


def absurd_sizes(context):
    """Sizes that no machine has, and whose products pass 2^63, are typed errors before anything is reserved."""
    most = 2**31 - 1
    seen = []
    for changed in (
        {"hidden": most, "max_tokens_per_rank": most},
        {"max_tokens_per_rank": most, "max_recv_tokens": most},
        {"hidden": most, "max_tokens_per_rank": most, "max_recv_tokens": most, "num_slots": 64},
        {"num_experts": 2**20, "num_topk": 2**20, "max_tokens_per_rank": most},
        {"hidden": most, "max_tokens_per_rank": 2**20},
    ):
        seen.append(outcome(lambda changed=changed: context.comm(**{**SHAPE, **changed})))
    good_creation(context)
    return seen


def test_absurd_sizes_are_typed_errors(two):
    for seen in two.run(absurd_sizes):
        names = {one and one[0] for one in seen}
        assert names <= {"InvalidArgumentError", "OutOfMemoryError"}, seen


def too_much_padding(context):
    """Padding that takes the rows past what an int32 of `expert_offsets` can say."""
    if context.on_gpu:
        return None
    experts = 2048 * context.num_ranks
    with context.comm(num_experts=experts, num_topk=1, hidden=1, max_tokens_per_rank=experts, dtype="uint8") as comm:
        x, idx = np.zeros((experts, 1), np.uint8), np.arange(experts)[:, None]
        seen = outcome(lambda: comm.dispatch(x, idx, layout="expert", expert_alignment=2**20))
        assert comm.dispatch(x, idx, layout="expert").x.shape == (experts, 1)
    return seen


def test_more_rows_than_offsets_can_say(two):
    for seen in two.run(too_much_padding):
        assert seen is None or (seen[0] == "InvalidArgumentError" and "expert_alignment is 1048576" in seen[1]), seen


def result_of_no_dtype(context):
    """One rank's framework has no dtype for a result."""
    if context.on_gpu:
        return None
    import torch

    with context.comm(**SHAPE) as comm:
        make = torch.from_numpy if context.rank == CULPRIT else np.asarray
        x, idx = make(np.ones((5, 16), np.float32)), make(np.arange(10).reshape(5, 2) % 6)
        scales = np.zeros((5, 2), arrays.dtype_of("float8_e4m3"))
        seen = outcome(lambda: comm.dispatch(x, idx, scales=scales))
        assert comm.dispatch(x, idx).handle.num_tokens == 5
    return seen


def test_a_dtype_that_one_framework_lacks_is_told_to_all(two):
    reason = arrays.why_not("torch")
    if reason:
        pytest.skip(reason)
    for seen in two.run(result_of_no_dtype):
        assert seen is None or (seen[0] == "UnsupportedError" and "float8_e4m3" in seen[1]), seen


def too_many_rows(context):
    """More rows than `max_recv_tokens`: one error on all ranks with both numbers."""
    with context.comm(**SHAPE, max_recv_tokens=7) as comm:
        x, idx = np.ones((5, 16), np.float32), np.zeros((5, 2), np.int64)
        first = outcome(lambda: comm.dispatch(x, idx))
        fits = comm.dispatch(x[:2], idx[:2])
        assert (comm.combine(fits.x, fits.handle).x == 1).all()
        some = comm.dispatch(x, idx, capacity=7)
        dropped = int(some.overflow)
        comm.combine(some.x, some.handle)
        # A capacity beyond max_recv_tokens drops what has no room; it is no error.
        more = comm.dispatch(x, idx, capacity=100)
        assert len(more.x) == 100 and int(more.overflow) == dropped and (more.topk_idx[7:] == -1).all()
        assert int(more.num_tokens) == (7 if dropped else 0)
        z = comm.combine(more.x, more.handle).x
        assert (z[: max(0, 7 - 5 * context.rank)] == 1).all() and (z[max(0, 7 - 5 * context.rank) :] == 0).all()
        return first, dropped


def test_too_many_rows_is_one_error_with_both_numbers(three):
    answers = three.run(too_many_rows)
    firsts = {first for first, _ in answers}
    assert len(firsts) == 1, firsts
    name, text = firsts.pop()
    assert name == "InvalidArgumentError" and "15" in text and "7" in text and "max_recv_tokens" in text, text
    assert [dropped for _, dropped in answers] == [8, 0, 0]


def bad_id_in_capacity_mode(context, value, join):
    """A bad id counts as -1 and is raised by the next call, `check()` or `event.synchronize()`."""
    with context.comm(**SHAPE) as comm:
        x, idx = np.ones((5, 16), np.float32), np.arange(10).reshape(5, 2) % 6
        good = comm.dispatch(x, idx, capacity=30)
        if context.rank == CULPRIT:
            idx[3, 1] = value
        out = comm.dispatch(x, idx, capacity=30, async_op=join == "synchronize")
        raised = None
        if join == "synchronize":
            raised = outcome(out.event.synchronize)
        elif join == "check":
            raised = outcome(comm.check)
        elif join == "next call":
            raised = outcome(lambda: comm.combine(good.x, good.handle))
        total = int(out.num_tokens_per_expert.sum())
        comm.check()  # told once
        again = comm.dispatch(x, np.abs(idx) % 6, layout="expert")
        assert (comm.combine(again.x, again.handle).x == 2).all()
        return raised, total


@pytest.mark.parametrize("join", ["check", "next call", "synchronize"])
@pytest.mark.parametrize("value", [6, -2, 2**40])
def test_bad_id_in_capacity_mode_is_told_late(three, value, join):
    answers = three.run(bad_id_in_capacity_mode, value=value, join=join)
    raised = answers[CULPRIT][0]
    assert raised is not None and raised[0] == "InvalidArgumentError", answers
    for text in ("topk_idx[3, 1]", str(value)):
        assert text in raised[1], raised
    if join == "next call":  # a refused call is a call: all ranks raise
        assert all(one[0] == raised for one in answers) or all(one[0] and "rank 1" in one[0][1] for one in answers)
    else:
        assert all(one[0] is None for rank, one in enumerate(answers) if rank != CULPRIT), answers
    assert sum(total for _, total in answers) == 29


def closed_communicator(context):
    comm = context.comm(**SHAPE)
    x, idx = np.ones((5, 16), np.float32), np.zeros((5, 2), np.int64)
    out = comm.dispatch(x, idx, copy=True)
    comm.barrier()
    comm.close()
    comm.close()
    seen = [
        outcome(lambda: comm.dispatch(x, idx)),
        outcome(lambda: comm.combine(out.x, out.handle)),
        outcome(lambda: comm.combine_buffer(out.handle)),
        outcome(comm.barrier),
        outcome(comm.check),
    ]
    with context.comm(**SHAPE) as other:
        seen.append(outcome(lambda: other.combine(out.x, out.handle)))
    return seen


def test_calls_after_close_are_typed_errors(two):
    for seen in two.run(closed_communicator):
        assert all(one is not None and "untyped" not in one[0] for one in seen), seen


def wrong_combine_buffer(context):
    with context.comm(**SHAPE) as comm, context.comm(**SHAPE) as foreign:
        bench = Bench.make(context, comm, foreign)
        seen = [
            outcome(lambda value=value: comm.combine_buffer(value))
            for value in (None, 5, bench.closed, bench.foreign, bench.expert_out)
        ]
        seen += [
            outcome(lambda value=value: comm.combine_buffer(bench.rank_out.handle, dtype=value))
            for value in ("float64", "int7", 3, "uint8")
        ]
        good_round(bench)
        return seen


def test_combine_buffer_refuses_what_combine_would(two):
    for seen in two.run(wrong_combine_buffer):
        assert all(one is not None and "untyped" not in one[0] for one in seen), seen
