"""B25: creation and destruction, in any number and order; what is dropped instead of closed; what outlives a close."""

import gc
import time
import warnings
import weakref

import numpy as np
import pytest
from helpers import job_calls
from helpers.job import slack
from helpers.job_calls import SHAPE, WAYS, close, create, inputs, once, owners, round_trip

AT_ONCE_S = 0.3
CLEAN = {"mappings": 0, "files": 0, "threads": 1}


def assert_clean(left):
    assert {name: left[name] for name in CLEAN} == CLEAN, left


def make(here, **kwargs):
    """A communicator of its own, beside the one that is kept."""
    import epcomm

    return epcomm.Communicator(**{**SHAPE, "backend": here.backend, **kwargs})


# ------------------------------------------------------------------------------------------------- many cycles


def cycles(here, times, how):
    """Create, use and end, again and again; what this process holds before and after."""
    seen = []
    for number in range(times + 3):
        if number == 3:
            seen.append(footprint())
        comm = make(here, num_slots=1 + number % 3)
        out = round_trip(here, list(WAYS)[number % len(WAYS)], comm)
        if how == "held results":
            kept = (out, comm.combine_buffer(out.handle))
            comm.close()
            del kept
        elif how == "events":
            x, idx = inputs(here.rank)
            comm.dispatch(x, idx, async_op=True)
            comm.close()
        elif how == "dropped":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                del comm
        elif how == "refused":
            with np.testing.assert_raises(Exception):
                comm.dispatch(None, None)
            comm.close()
        else:
            comm.close()
        del out
    seen.append(footprint())
    return seen


def footprint():
    """Mappings, descriptors, threads and private memory of this process."""
    gc.collect()
    left = job_calls.what_is_left()
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return {**left, "private_pages": resident - shared}


@pytest.mark.parametrize("how, times", [("closed", 100), ("held results", 30), ("events", 30), ("dropped", 30),
                                        ("refused", 30)])  # fmt: skip
def test_b25_cycles_return_to_the_baseline(job, how, times):
    ranks = job(2)
    for before, after in ranks.values(cycles, times=times, how=how, within_s=60):
        grown = after.pop("private_pages") - before.pop("private_pages")
        assert before == after, (before, after)
        assert_clean(after)
        assert grown < 512, f"{grown} pages more after {times} cycles"


def failing_creations(here, times):
    """Creations that all ranks refuse, early and late."""
    import epcomm

    wrong = [{"hidden": SHAPE["hidden"] + here.rank}, {"num_topk": 99}]
    if here.backend == "shm":  # others reach ranks of other nodes
        wrong.append({"options": {"node_id": here.rank}})
    seen = []
    for number in range(times + 2):
        if number == 2:
            seen.append(footprint())
        for changed in wrong:
            try:
                make(here, **changed)
            except epcomm.EpcommError:
                continue
            raise AssertionError(f"{changed} was taken")
    seen.append(footprint())
    return seen


def test_b25_refused_creations_leave_nothing(job):
    ranks = job(2)
    for before, after in ranks.values(failing_creations, times=20):
        assert after.pop("private_pages") - before.pop("private_pages") < 512
        assert before == after
        assert_clean(after)


# -------------------------------------------------------------------------------------------- use after the end


def calls_after_close(here):
    """What each method says once it is closed."""
    from helpers.job import failure_of

    comm = here.state["comm"]
    x, idx = inputs(here.rank)
    out = round_trip(here, "rank, copied")
    here.state["stats"] = comm.stats()
    comm.close()
    comm.close()
    calls = {
        "dispatch": lambda: comm.dispatch(x, idx),
        "dispatch, bad": lambda: comm.dispatch(None),
        "dispatch, async": lambda: comm.dispatch(x, idx, async_op=True),
        "dispatch, handle": lambda: comm.dispatch(x, handle=out.handle),
        "combine": lambda: comm.combine(out.x, out.handle),
        "combine_buffer": lambda: comm.combine_buffer(out.handle),
        "barrier": comm.barrier,
        "check": comm.check,
        "low_latency_dispatch": lambda: comm.low_latency_dispatch(x, idx),
        "low_latency_combine": lambda: comm.low_latency_combine(out.x, out.handle),
    }
    found = {}
    for name, call in calls.items():
        start = time.monotonic()
        try:
            call()
            found[name] = None
        except Exception as error:
            found[name] = (failure_of(error), time.monotonic() - start)
    comm.abort()
    comm.close()
    assert comm.closed and comm.stats() == here.state["stats"] and "closed" in repr(comm)
    assert (comm.rank, comm.num_ranks, comm.backend) == (here.rank, here.num_ranks, here.backend)
    try:
        with comm:
            raise AssertionError("a closed communicator was entered")
    except AssertionError:
        raise
    except Exception as error:
        found["with"] = (failure_of(error), 0.0)
    return found


def test_b25_every_method_after_close(job):
    ranks = job(2)
    ranks.values(create)
    for found in ranks.values(calls_after_close):
        for name, outcome in found.items():
            assert outcome is not None, f"{name} after close raised nothing"
            failure, seconds = outcome
            assert failure.kind in ("InvalidArgumentError", "UnsupportedError"), (name, failure)
            assert failure.kind == "UnsupportedError" or "closed" in failure.text, (name, failure)
            assert seconds < AT_ONCE_S * slack()


def handles_of_others(here):
    """Handles of a closed communicator, of an open other one, closed ones: errors on all ranks; then all is right."""
    import epcomm

    x, idx = inputs(here.rank)
    old = make(here)
    stale = old.dispatch(x, idx, copy=True)
    old.close()
    texts = []
    with make(here) as comm, make(here) as other:
        foreign = other.dispatch(x, idx, copy=True)
        closed = comm.dispatch(x, idx, copy=True)
        closed.handle.close()
        closed.handle.close()
        for out in (stale, foreign, closed):
            for call in (
                lambda out=out: comm.combine(out.x, out.handle),
                lambda out=out: comm.dispatch(x, handle=out.handle),
                lambda out=out: comm.combine_buffer(out.handle),
            ):
                try:
                    call()
                except epcomm.InvalidArgumentError as error:
                    texts.append(str(error))
            round_trip(here, "expert", comm)
        round_trip(here, "expert", other)
    return texts


def test_b25_stale_foreign_and_closed_handles(job):
    for texts in job(2).values(handles_of_others):
        assert len(texts) == 9, texts
        assert all("handle" in text for text in texts)
        assert all("another communicator" in text for text in texts[:6]), texts
        assert all("closed" in text for text in texts[6:]), texts


# --------------------------------------------------------------------------------- what outlives a close


def hold_after_close(here, way):
    """Keep a view of the heap, and what it must show, beyond the communicator."""
    comm = here.state["comm"]
    out = round_trip(here, way)
    here.state["held"] = (out.x[1:], np.array(out.x[1:]))
    assert comm.stats()["leases_held"] == 1
    del out
    start = time.monotonic()
    close(here)
    return time.monotonic() - start


def look_at_held(here, write):
    view, want = here.state["held"]
    np.testing.assert_array_equal(view, want)
    if write:
        view[...] = 7
        here.state["held"] = (view, np.full_like(want, 7))


def drop_held(here):
    del here.state["held"]


@pytest.mark.parametrize("way", ["rank, zero copy", "expert"])
def test_b25_a_view_outlives_everybody(job, way):
    """It stays readable and writable after close(), when all peers closed and died; its memory goes with it."""
    ranks = job(2)
    ranks.values(create)
    for seconds in ranks.values(hold_after_close, way=way):
        assert seconds < AT_ONCE_S * slack()
    for left in ranks.values(job_calls.what_is_left):
        # Nothing but the own heap: no thread, no descriptor, no memory of a peer.
        assert (left["mappings"], left["files"], left["threads"]) == (1, 0, 1), left
    ranks.values(look_at_held, write=False)
    ranks.values(look_at_held, ranks=(0,), write=True)
    ranks.values(look_at_held, ranks=(1,), write=False)
    ranks.signal(0)
    ranks.processes[0].wait(5)
    ranks.values(look_at_held, ranks=(1,), write=True)
    ranks.values(look_at_held, ranks=(1,), write=False)
    ranks.values(drop_held, ranks=(1,))
    assert_clean(ranks.values(job_calls.what_is_left, ranks=(1,))[0])


def buffer_after_close(here):
    comm = here.state["comm"]
    buffer = comm.combine_buffer(round_trip(here, "rank, copied").handle)
    assert comm.stats()["combine_buffer_copies"] == 0
    buffer[...] = here.rank
    close(here)
    assert (buffer == here.rank).all()
    del buffer
    return job_calls.what_is_left()


def test_b25_a_combine_buffer_outlives_close(job):
    ranks = job(2)
    ranks.values(create)
    for left in ranks.values(buffer_after_close):
        assert_clean(left)


# ------------------------------------------------------------------------------------------ several at a time


def several(here, rounds):
    """Communicators of different shapes, called by turns, closed in another order on each rank."""
    shapes = [
        {},
        {"num_slots": 1, "hidden": 33, "dtype": "bfloat16"},
        {"num_experts": 8, "num_topk": 4, "max_tokens_per_rank": 40},
        {"timeout_s": 5, "max_recv_tokens": 200},
    ]
    comms = [make(here, **shape) for shape in shapes]
    rng = np.random.default_rng(5)  # the same calls on all ranks
    x, idx = inputs(here.rank)
    held = []
    for number in range(rounds):
        which = int(rng.integers(len(comms)))
        comm = comms[which]
        if which == 0 or which == 3:
            held.append((round_trip(here, list(WAYS)[number % len(WAYS)], comm), comm))
        elif which == 1:
            narrow = x[:, :33].astype(np.dtype("float16"))
            out = comm.dispatch(narrow, idx)
            z = comm.combine(out.x, out.handle).x
            assert z.shape == narrow.shape
            del out
        else:
            wide = np.concatenate([idx, np.full_like(idx, -1)], axis=1)
            out = comm.dispatch(x, wide)
            of = owners8(here.num_ranks)[idx]
            times = 1 + (of[:, :1] != of[:, 1:])
            np.testing.assert_array_equal(comm.combine(out.x, out.handle).x, x * times)
            del out
        if len(held) > 3:
            held.pop(0)
    order = np.random.default_rng(here.rank).permutation(len(comms))
    for comm in comms:
        comm.barrier()  # nobody needs a peer any more
    for which in order:
        comms[which].close()
    del held, comm
    return job_calls.what_is_left()


def owners8(num_ranks):
    few, more = divmod(8, num_ranks)
    return np.array([rank for rank in range(num_ranks) for _ in range(few + (rank < more))])


def test_b25_several_alive_and_interleaved(job):
    for left in job(3).values(several, rounds=60):
        assert_clean(left)


def broken_beside_good(here):
    """One that was aborted does not touch the other."""
    import epcomm

    with make(here) as good:
        bad = make(here)
        round_trip(here, "expert", bad)
        good.barrier()
        bad.abort()
        for _ in range(3):
            round_trip(here, "expert", good)
            try:
                bad.barrier()
            except epcomm.PeerLostError:
                continue
            raise AssertionError("a barrier of an aborted communicator returned")
        bad.close()
        round_trip(here, "rank, async", good)


def test_b25_a_broken_one_beside_a_good_one(job):
    job(3).values(broken_beside_good)


# -------------------------------------------------------------------------------------------- what is dropped


def drop(here, how):
    """Drop a communicator without close(): one ResourceWarning, nothing left at once (or after a collection)."""
    comm = make(here)
    round_trip(here, "expert", comm)
    comm.barrier()
    if how == "cycle":
        comm.myself = comm
    elif how == "cycle through a result":
        x, idx = inputs(here.rank)
        out = comm.dispatch(x, idx, async_op=True)
        out.event.wait()
        out.comm, comm.out = comm, out
        del out
    elif how == "call in flight":
        x, idx = inputs(here.rank)
        comm.dispatch(x, idx, async_op=True)
    elif how == "call in flight, in a cycle":
        x, idx = inputs(here.rank)
        out = comm.dispatch(x, idx, async_op=True)
        out.comm, comm.out = comm, out
        del out
    elif how == "combine in flight, in a cycle":
        out = round_trip(here, "expert", comm)
        out.z = comm.combine(np.array(out.x), out.handle, async_op=True)
        out.comm, comm.out = comm, out
        del out
    gone = weakref.ref(comm)
    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.monotonic()
            del comm
            if "cycle" in how:
                gc.collect()
            seconds = time.monotonic() - start
    finally:
        gc.enable()
    said = [(one.category.__name__, str(one.message)) for one in caught]
    del caught  # a recorded warning holds its source
    gc.collect()
    assert gone() is None
    return said, seconds, job_calls.what_is_left()


@pytest.mark.parametrize("how", ["plain", "cycle", "cycle through a result", "call in flight",
                                 "call in flight, in a cycle", "combine in flight, in a cycle"])  # fmt: skip
def test_b25_dropped_without_close(job, how):
    ranks = job(2)
    for caught, seconds, left in ranks.values(drop, how=how):
        assert [name for name, _ in caught] == ["ResourceWarning"], caught
        assert "was not closed" in caught[0][1]
        assert seconds < AT_ONCE_S * slack()
        assert_clean(left)
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


def drop_while_a_peer_stands_still(here, cycle):
    """The call cannot end: its peer is between the halves. Dropping must neither wait for it nor let it write on."""
    comm = here.state.pop("comm")
    x, idx = inputs(here.rank)
    out = comm.dispatch(x, idx, async_op=True, copy=True)
    assert not out.event.done()
    if cycle:
        out.comm, comm.out = comm, out
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del comm, out
        gc.collect()
    seconds = time.monotonic() - start
    # Whatever memory the rows would have gone to is used by somebody else now.
    others = [np.zeros(1 << 12) for _ in range(200)]
    return seconds, job_calls.what_is_left(), others and here.tell(seconds)


@pytest.mark.parametrize("cycle", [False, True])
def test_b25_dropped_with_a_call_that_cannot_end(job, cycle):
    ranks = job(2)
    ranks.values(create)
    ranks.start(1, job_calls.stall_inside, way="rank, copied")
    ranks.start(0, drop_while_a_peer_stands_still, cycle=cycle)
    ranks.told(1)
    assert ranks.told(0) < AT_ONCE_S * slack()
    ranks.go(1)
    answer = ranks.answer(0)
    assert answer.failure is None, answer
    assert_clean(answer.value[1])
    answer = ranks.answer(1)
    assert answer.failure.kind == "PeerLostError" and answer.failure.peer == 0, answer
    ranks.values(close, ranks=(1,))


def drop_async_calls(here, times):
    """Results of async calls dropped before they end: their memory lives until then; later calls are right."""
    comm = here.state["comm"]
    x, idx = inputs(here.rank)
    for number in range(times):
        out = comm.dispatch(x.copy(), idx.copy(), async_op=True, layout=("rank", "expert")[number % 2])
        event = weakref.ref(out.event)
        if number % 3 == 0:
            handle = out.handle
            del out
            comm.combine(np.ones((handle.num_rows, SHAPE["hidden"]), np.float32), handle, async_op=True)
        elif number % 3 == 1:
            out.itself = out
            del out
        else:
            out.event.wait()
            del out
        gc.collect()
    round_trip(here, "expert")
    gc.collect()
    assert event() is None
    return comm.stats()["leases_held"]


def test_b25_async_results_never_waited_for(job):
    ranks = job(3)
    ranks.values(create)
    assert ranks.values(drop_async_calls, times=24) == [0, 0, 0]
    ranks.values(close)
    for left in ranks.values(job_calls.what_is_left):
        assert_clean(left)


def outlive(here):
    """An event, a handle and results that outlive a closed communicator."""
    comm = here.state.pop("comm")
    x, idx = inputs(here.rank)
    out = comm.dispatch(x, idx, async_op=True)
    event, handle = out.event, out.handle
    comm.close()  # waits for the call
    assert event.done()
    event.wait()
    event.synchronize()
    assert handle.num_rows == len(out.x) and repr(handle) and repr(out) and repr(event)
    del comm
    gc.collect()
    assert (out.x[:, 0] > 0).all()


def test_b25_events_and_handles_outlive_close(job):
    ranks = job(2)
    ranks.values(create)
    ranks.values(outlive)
    for left in ranks.values(job_calls.what_is_left):
        assert_clean(left)


def test_owners_are_those_of_the_default():
    """What these tests know of the default owners is what the library says."""
    assert owners(4).tolist() == [0, 0, 1, 1, 2, 3] and owners8(3).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
