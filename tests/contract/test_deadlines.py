"""B56: a rank that stops, sleeps or comes late. Errors say who, what, how long and which setting."""

import signal
import time

import pytest
from helpers import job_calls, pool
from helpers.job import slack
from helpers.job_calls import SHAPE, close, create, inputs, loop, once, round_trip, stall_inside

AT_ONCE_S = 0.3


def limit(seconds):
    """A deadline that set-up and calls of ranks keep that are well, also where they run on a slow machine."""
    return seconds * pool.slowness()


def check_timeout(answer, peer, operation, phase, limit_s, after_s=None):
    """A rank waited for its whole deadline and says everything about it."""
    failure = answer.failure
    assert failure is not None and failure.kind == "CommTimeoutError", answer
    assert {"TimeoutError", "EpcommError"} <= set(failure.types)
    assert failure.peer == peer, failure
    said = (operation, phase, f"rank {peer}", f"{limit_s:g} s", "timeout_s", "EPCOMM_TIMEOUT_S", "expected", "seen")
    for text in said:
        assert text in failure.text, (text, failure.text)
    start = answer.start if after_s is None else after_s
    assert limit_s - 0.05 <= answer.end - start < limit_s + slack(), (answer.end - start, failure.text)


def sleep_then_call(here, seconds):
    time.sleep(seconds)
    woke = time.monotonic()
    try:
        round_trip(here, "expert")
    finally:
        here.state["took"] = time.monotonic() - woke


def took(here):
    return here.state["took"]


def test_b56_a_sleeping_peer_is_named(job):
    """Rank 1 sleeps past the deadline of rank 0; when it wakes it is told at once who gave up."""
    ranks = job(2)
    limit_s = limit(1.0)
    ranks.values(create, timeout_s=limit_s)
    ranks.start(1, sleep_then_call, seconds=2 * limit_s)
    check_timeout(ranks.run(once, ranks=(0,), way="expert")[0], 1, "dispatch", "entry", limit_s)
    later = ranks.run(job_calls.failures_of_later_calls, ranks=(0,))[0].value
    for name, (failure, seconds) in later.items():
        assert failure.kind == "CommTimeoutError" and failure.peer == 1, (name, failure)
        assert seconds < AT_ONCE_S * slack(), (name, seconds)
    woken = ranks.answer(1)
    assert woken.failure is not None and woken.failure.kind == "PeerLostError", woken
    assert woken.failure.peer == 0 and "rank 0 gave up because of this one, rank 1" in woken.failure.text, woken
    assert ranks.values(took, ranks=(1,))[0] < AT_ONCE_S * slack()
    for answer in ranks.run(close):
        assert answer.failure is None and answer.end - answer.start < AT_ONCE_S * slack()
    ranks.leave_all()  # by itself, within two seconds


def test_b56_a_process_that_gave_up_ends_by_itself(job):
    """Without close(), with an event never waited for, while the peer still sleeps."""
    ranks = job(2)
    limit_s = limit(0.5)
    ranks.values(create, timeout_s=limit_s)
    ranks.start(1, sleep_then_call, seconds=60)
    check_timeout(ranks.run(once, ranks=(0,), way="rank, async")[0], 1, "dispatch", "entry", limit_s)
    assert ranks.leave(0) == 0
    assert "Exception ignored" not in ranks.stderr(0)
    ranks.signal(1)


def test_b56_a_peer_that_gave_up_and_ended_is_lost_for_that_reason(job):
    """The end of its process does not hide what it had told before."""
    ranks = job(2)
    limit_s = limit(0.5)
    ranks.values(create, timeout_s=limit_s)
    check_timeout(ranks.run(once, ranks=(0,), way="expert")[0], 1, "dispatch", "entry", limit_s)
    assert ranks.leave(0) == 0
    (answer,) = ranks.run(once, ranks=(1,), way="expert")
    failure = answer.failure
    assert failure.kind == "PeerLostError" and failure.peer == 0, failure
    assert "rank 0 is lost" in failure.text and "gave up because of this one, rank 1" in failure.text, failure


@pytest.mark.parametrize("way", ["expert", "rank, async"])
def test_b56_a_slow_peer_within_the_limit_is_fine(job, way):
    ranks = job(2)
    ranks.values(create, timeout_s=10)
    ranks.start(0, once, way=way)
    ranks.start(1, sleep_then, seconds=1.2, way=way)
    for rank in (0, 1):
        answer = ranks.answer(rank)
        assert answer.failure is None, answer.failure
    assert answer.end - answer.start >= 1.2
    ranks.values(close)


def sleep_then(here, seconds, way):
    time.sleep(seconds)
    round_trip(here, way)


@pytest.mark.parametrize("way", ["expert", "rank, zero copy", "rank, async", "barrier"])
def test_a_stopped_peer_is_alive(job, way):
    """SIGSTOP is no death: nobody raises before the deadline, then all name the rank that stopped.

    Where the stop fell between two of its messages, one rank waits for it, and the other for that one: the first to
    reach its deadline is a time-out, and the other may hear of it before its own.
    """
    ranks = job(3)
    limit_s = limit(1.0)
    ranks.values(create, timeout_s=limit_s)
    for rank in range(3):
        ranks.start(rank, loop, way=way)
    for rank in range(3):
        ranks.told(rank)
    time.sleep(0.05)
    at = ranks.signal(2, signal.SIGSTOP)
    answers = [ranks.answer(rank) for rank in (0, 1)]
    assert "CommTimeoutError" in {answer.failure.kind for answer in answers}, answers
    for answer in answers:
        assert answer.failure.kind in ("CommTimeoutError", "PeerLostError"), answer.failure
        assert answer.failure.peer == 2, answer.failure
        assert limit_s - 0.05 <= answer.end - at < limit_s + slack(), answer.end - at
    at = ranks.signal(2, signal.SIGCONT)
    answer = ranks.answer(2)
    assert answer.failure.kind == "PeerLostError" and answer.failure.peer in (0, 1), answer.failure
    assert answer.end - at < AT_ONCE_S * slack()
    ranks.values(close)


def test_a_stopped_peer_that_goes_on_in_time(job):
    ranks = job(3)
    ranks.values(create, timeout_s=10)
    for rank in range(3):
        ranks.start(rank, many, way="expert", times=200)
    for rank in range(3):
        ranks.told(rank)
    for _ in range(3):
        ranks.signal(2, signal.SIGSTOP)
        time.sleep(0.2)
        ranks.signal(2, signal.SIGCONT)
        time.sleep(0.01)
    for rank in range(3):
        assert ranks.answer(rank).failure is None
    ranks.values(close)


def many(here, way, times):
    here.tell()
    for _ in range(times):
        round_trip(here, way)


@pytest.mark.parametrize("way, operation", [("expert", "dispatch"), ("rank, async", "dispatch")])
def test_the_phase_of_a_deadline(job, way, operation):
    """A rank that stops between the halves of a call: the others have its counts and wait for its rows."""
    ranks = job(3)
    limit_s = limit(0.8)
    ranks.values(create, timeout_s=limit_s)
    for rank in (0, 1):
        ranks.start(rank, once, way=way)
    ranks.start(2, stall_inside, way=way)
    ranks.told(2)
    now = time.monotonic()
    for rank in (0, 1):
        answer = ranks.answer(rank)
        check_timeout(answer, 2, operation, "data", limit_s, after_s=max(now, answer.start))
    ranks.signal(2)
    ranks.values(close, ranks=(0, 1))


def test_the_deadline_is_of_each_wait(job):
    """Many calls together may take longer than the limit."""
    ranks = job(2)
    ranks.values(create, timeout_s=limit(0.8))
    ranks.start(0, calls_with_pauses, pause_s=0.0)
    ranks.start(1, calls_with_pauses, pause_s=limit(0.4))
    for rank in (0, 1):
        assert ranks.answer(rank).failure is None
    ranks.values(close)


def calls_with_pauses(here, pause_s):
    for _ in range(4):
        time.sleep(pause_s)
        round_trip(here, "expert")


# ------------------------------------------------------------------------------------------------- bad limits


BAD_SECONDS = [0, -1, -0.5, "abc", "", 1e12, float("nan"), float("inf"), True, False, [], [1], {}, object, 10**400, 1j]


def outcome_of_creations(here, cases, culprit, environment=False):
    """What each creation raises; only the culprit gives the bad value."""
    from helpers.job import failure_of
    from helpers.pool import environment as changed

    import epcomm

    found = []
    for value in cases:
        bad = here.rank == culprit
        kwargs = {"timeout_s": value} if bad and not environment else {}
        start = time.monotonic()
        try:
            with changed({"EPCOMM_TIMEOUT_S": value} if bad and environment else {}):
                epcomm.Communicator(**SHAPE, backend=here.backend, **kwargs).close()
            found.append((None, 0.0))
        except Exception as error:
            found.append((failure_of(error), time.monotonic() - start))
    create(here)
    round_trip(here, "expert")
    close(here)
    return found


@pytest.mark.parametrize("culprit", [0, 1])
def test_b56_bad_limits_by_argument(job, culprit):
    ranks = job(2)
    check_bad_limits(ranks, BAD_SECONDS, culprit, "timeout_s", False)


@pytest.mark.parametrize("culprit", [0, 1])
def test_b56_bad_limits_by_environment(job, culprit):
    ranks = job(2)
    check_bad_limits(ranks, ["0", "-1", "abc", "1e12", "nan", "inf", "1 s", "True"], culprit, "EPCOMM_TIMEOUT_S", True)


def check_bad_limits(ranks, cases, culprit, name, environment):
    answers = ranks.values(outcome_of_creations, cases=cases, culprit=culprit, environment=environment)
    for rank, found in enumerate(answers):
        for value, (failure, seconds) in zip(cases, found, strict=True):
            assert failure is not None, f"{name}={value!r}: no error on rank {rank}"
            assert failure.kind == "InvalidArgumentError" and "ValueError" in failure.types, (value, failure)
            assert name in failure.text and "864000" in failure.text, (value, failure)
            assert rank == culprit or f"rank {culprit}" in failure.text, (value, rank, failure)
            assert seconds < 2.0 * slack()


def test_b56_an_empty_variable_means_the_default(job):
    """As for every variable."""
    ranks = job(2)
    for found in ranks.values(outcome_of_creations, cases=["", " "], culprit=0, environment=True):
        assert [failure for failure, _ in found] == [None, None]


def test_the_variable_sets_the_limit(job):
    ranks = job(2, env={"EPCOMM_TIMEOUT_S": "0.6"})
    ranks.values(create)
    check_timeout(ranks.run(one_dispatch, ranks=(0,))[0], 1, "dispatch", "entry", 0.6)


def one_dispatch(here):
    x, idx = inputs(here.rank)
    here.state["comm"].dispatch(x, idx)


# --------------------------------------------------------------------------------------------------- creation


def test_a_rank_that_never_comes_to_creation(job):
    ranks = job(3)
    limit_s = limit(1.0)
    start = time.monotonic()
    for answer in ranks.run(create, ranks=(0, 1), timeout_s=limit_s):
        assert answer.failure is not None and answer.failure.kind == "CommTimeoutError", answer
        assert answer.failure.peer == 2 and "rank 2" in answer.failure.text and "timeout_s" in answer.failure.text
        assert limit_s - 0.1 < answer.end - start < limit_s + 1.0 + slack()
    start = time.monotonic()
    late = ranks.run(create, ranks=(2,), timeout_s=limit_s)[0]
    assert late.failure is not None and late.failure.kind in ("CommTimeoutError", "PeerLostError"), late
    assert late.end - start < limit_s + 1.0 + slack()
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


def create_with_key(here, key):
    from helpers.pool import environment

    with environment({"EPCOMM_AUTHKEY": key}):
        create(here, timeout_s=2)


def test_a_rank_with_another_key(job):
    """Told at once where it can be, in time anywhere; never let in."""
    ranks = job(3)
    answers = ranks.run(create_with_key, per_rank=[{"key": key} for key in ("right", "right", "wrong")])
    wrong = answers[2]
    assert wrong.failure is not None and wrong.failure.kind == "InvalidArgumentError", wrong
    assert "key" in wrong.failure.text.lower() and wrong.end - wrong.start < 2.0 * slack()
    for answer in answers[:2]:
        assert answer.failure is not None and answer.failure.kind in ("CommTimeoutError", "PeerLostError"), answer
        assert "2" in answer.failure.text and answer.end - answer.start < 3.0 + slack()
    for rank in range(3):
        ranks.start(rank, create_with_key, key="right")
    for rank in range(3):
        assert ranks.answer(rank).failure is None
    ranks.values(close)
