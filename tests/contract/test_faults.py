"""B54: a rank is killed. Survivors raise a typed error that names it, in time; nothing is left; all can begin anew."""

import os
import random
import signal
import time

import pytest
from helpers import job_calls
from helpers.job import slack
from helpers.job_calls import WAYS, close, create, inputs, loop, once, round_trip, stall_inside

NOTICED_S = 1.0
AT_ONCE_S = 0.3
VICTIM = 2


def check_lost(answer, peer, at, within_s=NOTICED_S):
    """A rank raised that a peer was lost, in time."""
    failure = answer.failure
    assert failure is not None, f"no error but {answer.value!r}"
    assert failure.kind == "PeerLostError" and failure.peer == peer, failure
    assert {"ConnectionError", "EpcommError"} <= set(failure.types)
    assert f"rank {peer}" in failure.text
    assert answer.end - at < within_s * slack(), f"{answer.end - at:.3f} s: {failure}"


def check_broken_then_clean(job, ranks, peer):
    """Survivors raise at once whatever they call; close() returns at once and leaves nothing."""
    for answer in job.run(job_calls.failures_of_later_calls, ranks=ranks):
        assert answer.failure is None, answer
        for name, found in answer.value.items():
            assert found is not None, f"{name} of a broken communicator raised nothing"
            failure, seconds = found
            assert failure.kind == "PeerLostError" and failure.peer == peer, (name, failure)
            assert seconds < AT_ONCE_S * slack(), (name, seconds)
    for answer in job.run(close, ranks=ranks):
        assert answer.failure is None and answer.end - answer.start < AT_ONCE_S * slack(), answer
    for left in job.values(job_calls.what_is_left, ranks=ranks):
        assert left["mappings"] == 0 and left["files"] == 0 and left["threads"] == 1, left


def kill_while_calling(job, way, delay_s):
    """All ranks call in a loop; the victim is killed some time after all have begun."""
    job.values(create)
    for rank in range(job.num_ranks):
        job.start(rank, loop, way=way)
    for rank in range(job.num_ranks):
        job.told(rank)
    time.sleep(delay_s)
    at = job.signal(VICTIM)
    for rank in range(job.num_ranks):
        if rank != VICTIM:
            check_lost(job.answer(rank), VICTIM, at)


@pytest.mark.parametrize("way", [*WAYS, "barrier"])
def test_b54_killed_at_a_random_moment(job, way):
    """Two kills per way: 16 in all, half of them within the first call."""
    ranks = job(3)
    rng = random.Random(way)
    for most_s in (0.004, 0.08):
        kill_while_calling(ranks, way, rng.random() * most_s)
        check_broken_then_clean(ranks, (0, 1), VICTIM)
        ranks.replace(VICTIM)
    # The survivors are as good as new.
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


@pytest.mark.slow
def test_b54_fifty_kills(job):
    ranks = job(3)
    rng = random.Random(54)
    ways = [*WAYS, "barrier"]
    for number in range(50):
        kill_while_calling(ranks, ways[number % len(ways)], rng.random() * 0.1)
        check_broken_then_clean(ranks, (0, 1), VICTIM)
        ranks.replace(VICTIM)
    ranks.leave_all()


def keep_handle(here):
    here.state["handle"] = round_trip(here, "expert").handle


def test_b54_killed_before_a_call(job):
    """The death lies back; the first call tells, whatever it is, and check() tells without one."""
    ranks = job(3)
    for call in ("dispatch", "combine", "refused"):
        ranks.values(create)
        ranks.values(keep_handle)
        ranks.signal(VICTIM)
        ranks.processes[VICTIM].wait(5)
        time.sleep(0.05)
        check_lost(ranks.run(check, ranks=(0,))[0], VICTIM, time.monotonic())
        at = time.monotonic()
        for answer in ranks.run(one_call, ranks=(0, 1), call=call):
            check_lost(answer, VICTIM, at, 0.6)  # a living peer may have something for us: 0.25 s of grace
        check_broken_then_clean(ranks, (0, 1), VICTIM)
        ranks.replace(VICTIM)


def check(here):
    here.state["comm"].check()


def one_call(here, call):
    comm = here.state["comm"]
    x, idx = inputs(here.rank)
    if call == "combine":
        handle = here.state["handle"]
        comm.combine(x[:1].repeat(handle.num_rows, axis=0), handle)
    elif call == "barrier":
        comm.barrier()
    else:
        comm.dispatch(x, idx, layout="no such layout" if call == "refused" else "rank")


@pytest.mark.parametrize("way", ["rank, zero copy", "expert", "rank, async"])
def test_b54_killed_between_entry_and_rows(job, way):
    ranks = job(3)
    ranks.values(create)
    for rank in (0, 1):
        ranks.start(rank, once, way=way)
    ranks.start(VICTIM, stall_inside, way=way)
    ranks.told(VICTIM)
    time.sleep(0.05 * slack())  # its entry is posted, and arrives
    at = ranks.signal(VICTIM)
    for rank in (0, 1):
        answer = ranks.answer(rank)
        check_lost(answer, VICTIM, at)
        assert "data" in answer.failure.text, answer.failure
    check_broken_then_clean(ranks, (0, 1), VICTIM)


def call_and_die(here, way):
    round_trip(here, way)
    if here.state["comm"].backend != "shm":
        time.sleep(0.1 * slack())  # a proxy or a NIC still sends when the call has returned
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("way", list(WAYS))
def test_b54_killed_after_its_last_call(job, way):
    """What a rank had sent before it died still counts: that call is right, the next one tells."""
    ranks = job(3)
    ranks.values(create)
    for rank in (0, 1):
        ranks.start(rank, once, way=way)
    ranks.start(VICTIM, call_and_die, way=way)
    for rank in (0, 1):
        answer = ranks.answer(rank)
        assert answer.failure is None, answer.failure
    ranks.processes[VICTIM].wait(5)
    at = time.monotonic()
    for answer in ranks.run(once, ranks=(0, 1), way=way):
        check_lost(answer, VICTIM, at)
    check_broken_then_clean(ranks, (0, 1), VICTIM)


def test_b54_two_of_three_die(job):
    ranks = job(3)
    ranks.values(create)
    for rank in range(3):
        ranks.start(rank, loop, way="expert")
    for rank in range(3):
        ranks.told(rank)
    at = ranks.signal(1)
    ranks.signal(2)
    answer = ranks.answer(0)
    check_lost(answer, answer.failure.peer, at)
    assert answer.failure.peer in (1, 2)
    ranks.values(close, ranks=(0,))
    ranks.leave_all(ranks=(0,))


def begin_async(here):
    x, idx = inputs(here.rank)
    here.state["event"] = here.state["comm"].dispatch(x, idx, async_op=True).event


def wait_for_event(here):
    here.state.pop("event").wait()


def test_b54_an_event_tells(job):
    """Rank 0 waits for its event, rank 1 drops it: its next call tells instead."""
    ranks = job(3)
    ranks.values(create)
    for rank in (0, 1):
        ranks.start(rank, begin_async)
    ranks.start(VICTIM, stall_inside, way="rank, copied")
    ranks.told(VICTIM)
    for rank in (0, 1):
        assert ranks.answer(rank).failure is None
    ranks.start(0, wait_for_event)
    time.sleep(0.1)
    at = ranks.signal(VICTIM)
    check_lost(ranks.answer(0), VICTIM, at)
    ranks.values(forget_event, ranks=(1,))
    check_lost(ranks.run(once, ranks=(1,), way="expert")[0], VICTIM, at)
    check_broken_then_clean(ranks, (0, 1), VICTIM)


def forget_event(here):
    del here.state["event"]
