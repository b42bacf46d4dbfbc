"""Ctrl-C, signal handlers, abort() and threads: a call that waits is never in anybody's way."""

import signal
import threading
import time

import pytest
from helpers import job_calls
from helpers.job import slack
from helpers.job_calls import WAYS, close, create, inputs, loop, once, round_trip, stall_inside

CTRL_C_S = 0.2
AT_ONCE_S = 0.3


def check_interrupted(ranks, rank, at, within_s=CTRL_C_S):
    answer = ranks.answer(rank)
    assert answer.failure is not None and answer.failure.kind == "KeyboardInterrupt", answer
    assert answer.end - at < within_s * slack(), answer.end - at


def interrupt(ranks, rank, wait_s=0.2, within_s=CTRL_C_S):
    """Ctrl-C for a rank a while after it began its function."""
    ranks.began(rank)
    time.sleep(wait_s)
    check_interrupted(ranks, rank, ranks.signal(rank, signal.SIGINT), within_s)


def check_gave_up(answer, peer, at):
    """A peer heard of a rank that gave up, by name and at once."""
    failure = answer.failure
    assert failure is not None and failure.kind == "PeerLostError" and failure.peer == peer, answer
    assert f"rank {peer}" in failure.text
    assert answer.end - at < AT_ONCE_S * slack(), (answer.end - at, failure)


def one_barrier(here):
    here.state["comm"].barrier()


def dispatch_first(here):
    x, idx = inputs(here.rank)
    here.state["out"] = here.state["comm"].dispatch(x, idx)


def only_combine(here):
    out = here.state["out"]
    here.state["comm"].combine(out.x, out.handle)


@pytest.mark.parametrize("call", ["dispatch", "async dispatch", "combine", "barrier"])
def test_ctrl_c_while_a_peer_has_not_come(job, call):
    ranks = job(2)
    ranks.values(create)
    if call == "combine":
        ranks.values(dispatch_first)
    function, options = {
        "dispatch": (once, {"way": "expert"}),
        "async dispatch": (once, {"way": "expert, async"}),
        "combine": (only_combine, {}),
        "barrier": (one_barrier, {}),
    }[call]
    ranks.start(0, function, **options)
    interrupt(ranks, 0)
    later = ranks.run(job_calls.failures_of_later_calls, ranks=(0,))[0].value
    for name, (failure, seconds) in later.items():
        assert failure.kind == "PeerLostError" and "interrupted" in failure.text, (name, failure)
        assert seconds < AT_ONCE_S * slack()
    if call == "barrier":  # rank 0 had come, which is all that this barrier asks
        ranks.values(function, ranks=(1,))
    at = time.monotonic()
    check_gave_up(ranks.run(function, ranks=(1,), **options)[0], 0, at)
    ranks.values(close)
    ranks.leave_all()


def test_ctrl_c_while_rows_are_awaited(job):
    """The peer has entered and stands still. What the interrupted rank had sent counts; the call after it tells."""
    ranks = job(2)
    ranks.values(create)
    ranks.start(1, stall_inside)
    ranks.start(0, once, way="expert")
    ranks.told(1)
    interrupt(ranks, 0)
    ranks.go(1)
    check_gave_up(ranks.answer(1), 0, time.monotonic())
    ranks.values(close)


def test_ctrl_c_in_a_wait_for_an_event(job):
    """The call goes on: waiting again is right, and so are later calls."""
    ranks = job(2)
    ranks.values(create)
    ranks.start(1, stall_inside, way="rank, copied")
    ranks.start(0, async_dispatch)
    assert ranks.answer(0).failure is None
    ranks.told(1)
    ranks.start(0, wait_for_event)
    interrupt(ranks, 0)
    ranks.start(0, wait_again_and_combine)
    ranks.go(1)
    for rank in (0, 1):
        answer = ranks.answer(rank)
        assert answer.failure is None, answer
    ranks.values(close)


def async_dispatch(here):
    x, idx = inputs(here.rank)
    here.state["out"] = here.state["comm"].dispatch(x, idx, async_op=True)


def wait_for_event(here):
    here.state["out"].event.wait()


def wait_again_and_combine(here):
    out = here.state["out"]
    out.event.wait()
    here.state["comm"].combine(out.x, out.handle)


@pytest.mark.parametrize("how", ["close", "with"])
def test_ctrl_c_in_close_while_a_call_is_in_flight(job, how):
    """close() waits for the call; Ctrl-C ends the wait, frees everything and tells the peer."""
    ranks = job(2)
    ranks.values(create)
    ranks.start(1, stall_inside, way="rank, copied")
    ranks.values(async_dispatch, ranks=(0,))
    ranks.told(1)
    ranks.start(0, close_while_waiting, how=how)
    interrupt(ranks, 0)
    left = ranks.values(job_calls.what_is_left, ranks=(0,))[0]
    assert left["threads"] == 1 and left["mappings"] == 1, left  # the own heap, under the result that is still held
    ranks.go(1)
    check_gave_up(ranks.answer(1), 0, time.monotonic())
    ranks.values(close, ranks=(1,))
    ranks.leave_all()


def close_while_waiting(here, how):
    comm = here.state.pop("comm")
    if how == "close":
        comm.close()
    else:
        with comm:
            here.state["out"].event.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_in_creation(job, rank):
    """The third rank has not come. Who waits with the interrupted one hears of it."""
    ranks = job(3)
    other = 1 - rank
    for one in (0, 1):
        ranks.start(one, create)
    ranks.began(other)
    interrupt(ranks, rank, 0.5, CTRL_C_S + 0.5)  # last words may take half a second to be read
    at = time.monotonic()
    answer = ranks.answer(other)
    assert answer.failure is not None and answer.failure.kind == "PeerLostError", answer
    assert answer.failure.peer == rank and answer.end - at < 1.0 * slack(), answer
    ranks.new_port()
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


def test_ctrl_c_while_another_thread_calls(job):
    """The main thread waits for its turn; the other thread's call is not disturbed."""
    ranks = job(2)
    ranks.values(create)
    ranks.start(0, call_behind_a_thread)
    ranks.told(0)
    time.sleep(0.3)
    at = ranks.signal(0, signal.SIGINT)
    assert ranks.told(0) - at < CTRL_C_S * slack()
    ranks.values(once, ranks=(1,), way="expert")
    answer = ranks.answer(0)
    assert answer.failure is None, answer
    ranks.values(close)


def call_behind_a_thread(here):
    raised = []

    def run():
        try:
            round_trip(here, "expert")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    here.tell()
    try:
        here.state["comm"].barrier()
    except KeyboardInterrupt:
        here.tell(time.monotonic())
    thread.join()
    assert not raised, raised


# --------------------------------------------------------------------------------------------- signal handlers


def calls_under_a_timer(here, times):
    """A handler of the program that does not raise, every few milliseconds."""
    ticks = []
    before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        for number in range(times):
            if here.rank == number % here.num_ranks:
                time.sleep(0.06)  # the others wait, longer than a wait goes without looking at signals
            for way in WAYS:
                round_trip(here, way)
        here.state.pop("comm").close()
        create(here)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return len(ticks)


def test_a_handler_that_does_not_raise_does_not_disturb(job):
    ranks = job(3)
    ranks.values(create)
    assert all(ticks > 5 for ticks in ranks.values(calls_under_a_timer, times=6))
    ranks.values(once, way="expert")
    ranks.values(close)


class Alarm(Exception):
    """Raised by a handler of the program."""


def call_with_handler(here, what):
    comm = here.state["comm"]

    def handler(*_):
        if what == "raise":
            raise Alarm("enough")
        if what == "abort":
            comm.abort()
        elif what == "close":
            comm.close()
        else:
            comm.barrier()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        round_trip(here, "expert")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "what, kind, text",
    [
        ("raise", "Alarm", "enough"),
        ("abort", "PeerLostError", "abort"),
        ("close", "InvalidArgumentError", "signal handler"),
        ("barrier", "InvalidArgumentError", "signal handler"),
    ],
)
def test_what_a_handler_may_do_inside_a_call(job, what, kind, text):
    ranks = job(2)
    ranks.values(create)
    answer = ranks.run(call_with_handler, ranks=(0,), what=what)[0]
    assert answer.failure is not None and answer.failure.kind == kind and text in answer.failure.text, answer
    assert answer.end - answer.start < 0.2 + AT_ONCE_S * slack()
    check_gave_up(ranks.run(once, ranks=(1,), way="expert")[0], 0, time.monotonic())
    ranks.values(close)


# -------------------------------------------------------------------------------------------------------- abort


def abort(here):
    here.state["comm"].abort()


def abort_from_a_thread(here, after_s, way):
    timer = threading.Timer(after_s, here.state["comm"].abort)
    timer.start()
    try:
        round_trip(here, way)
    finally:
        timer.join()


@pytest.mark.parametrize("way", ["expert", "rank, async"])
def test_abort_ends_a_wait_at_once(job, way):
    ranks = job(2)
    ranks.values(create)
    answer = ranks.run(abort_from_a_thread, ranks=(0,), after_s=0.3, way=way)[0]
    assert answer.failure.kind == "PeerLostError" and "rank 0 called abort()" in answer.failure.text, answer
    assert answer.end - answer.start < 0.3 + AT_ONCE_S * slack()
    for name, (failure, seconds) in ranks.run(job_calls.failures_of_later_calls, ranks=(0,))[0].value.items():
        assert failure.kind == "PeerLostError" and "abort" in failure.text, (name, failure)
        assert seconds < AT_ONCE_S * slack()
    check_gave_up(ranks.run(once, ranks=(1,), way=way)[0], 0, time.monotonic())
    ranks.values(close)


def test_abort_outside_a_call_tells_waiting_peers(job):
    """The rank that aborts makes no further call; who waits for it hears at once all the same."""
    ranks = job(3)
    ranks.values(create)
    ranks.start(1, once, way="expert")
    time.sleep(0.3)
    at = time.monotonic()
    ranks.values(abort, ranks=(0,))
    ranks.values(abort, ranks=(0,))
    ranks.start(2, once, way="rank, async")
    for rank in (1, 2):
        check_gave_up(ranks.answer(rank), 0, at + 0.1)
    ranks.values(close)


def test_abort_while_calls_run(job):
    ranks = job(3)
    for _ in range(3):
        ranks.values(create)
        for rank in (1, 2):
            ranks.start(rank, loop, way="expert", tell=False)
        answer = ranks.run(abort_from_a_loop, ranks=(0,))[0]
        assert answer.failure.kind == "PeerLostError" and "abort" in answer.failure.text, answer
        for rank in (1, 2):
            failure = ranks.answer(rank).failure
            assert failure.kind == "PeerLostError" and failure.peer in (0, 1, 2), failure
        ranks.values(close)


def abort_from_a_loop(here):
    threading.Timer(0.05, here.state["comm"].abort).start()
    loop(here, "expert", tell=False)


# ------------------------------------------------------------------------------------------------------ threads


def progress_while(here, what):
    """How often another Python thread ran while this one waited."""
    counts, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counts[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    start = counts[0]
    try:
        if what == "creation":
            create(here)
        elif what == "event":
            here.state["out"].event.wait()
        elif what == "close":
            close(here)
        else:
            round_trip(here, "expert")
        return counts[0] - start
    finally:
        stop.set()
        thread.join()


def after_a_while(here, what):
    time.sleep(0.6)
    if what == "creation":
        create(here)
    else:
        once(here, "expert")


@pytest.mark.parametrize("what", ["call", "creation"])
def test_other_threads_run_while_a_call_waits(job, what):
    ranks = job(2)
    if what != "creation":
        ranks.values(create)
    ranks.start(0, progress_while, what=what)
    ranks.start(1, after_a_while, what=what)
    answers = [ranks.answer(rank) for rank in (0, 1)]
    assert all(answer.failure is None for answer in answers), answers
    assert answers[0].value > 100 / slack(), answers[0].value
    ranks.values(close)


@pytest.mark.parametrize("what", ["event", "close"])
def test_other_threads_run_while_an_event_or_close_waits(job, what):
    ranks = job(2)
    ranks.values(create)
    ranks.start(1, stall_inside, way="rank, copied")
    ranks.values(async_dispatch, ranks=(0,))
    ranks.told(1)
    ranks.start(0, progress_while, what=what)
    time.sleep(0.6)
    ranks.go(1)
    answer = ranks.answer(0)
    assert answer.failure is None and answer.value > 100 / slack(), answer
    ranks.run(forget_comm, ranks=(0,))
    assert ranks.answer(1).failure.kind == "PeerLostError"
    ranks.values(close, ranks=(1,))


def forget_comm(here):
    comm = here.state.pop("comm", None)
    if comm is not None:
        comm.close()


def barriers_of_many_threads(here, num_threads, times):
    """Calls of one kind from several threads need no order of their own."""
    comm = here.state["comm"]
    raised = []

    def run():
        try:
            for _ in range(times):
                comm.barrier()
                assert comm.stats()["refused_calls"] == 0
                comm.check()
                repr(comm)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised, raised
    return comm.stats()["calls"]


def test_calls_of_many_threads_are_serialised(job):
    ranks = job(3)
    ranks.values(create)
    assert ranks.values(barriers_of_many_threads, num_threads=4, times=60) == [240, 240, 240]
    ranks.values(once, way="expert")
    ranks.values(close)


def calls_of_threads_in_turn(here, times):
    """Two threads call by turns; their results die in a third one while calls run."""
    import queue

    comm, turn, raised = here.state["comm"], threading.Barrier(2, timeout=20), []
    dying = queue.Queue()

    def run(number):
        try:
            for at in range(times):
                turn.wait()
                if at % 2 == number:
                    dying.put(round_trip(here, list(WAYS)[at % len(WAYS)]))
        except BaseException as error:
            raised.append(error)
            turn.abort()

    def bury():
        while (out := dying.get()) is not None:
            time.sleep(0.001)
            del out

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    threads.append(threading.Thread(target=bury))
    for thread in threads:
        thread.start()
    for thread in threads[:2]:
        thread.join()
    dying.put(None)
    threads[2].join()
    assert not raised, raised
    return comm.stats()["leases_held"], comm.stats()["leases_granted"]


def test_threads_call_by_turns_and_leases_end_anywhere(job):
    ranks = job(3)
    ranks.values(create)
    for held, granted in ranks.values(calls_of_threads_in_turn, times=84):
        assert held == 0 and granted > 5, (held, granted)
    ranks.values(once, way="expert")
    ranks.values(close)


def test_close_waits_for_a_call_of_another_thread(job):
    """The call ends well: close() came between its halves and had to wait."""
    ranks = job(2)
    ranks.values(create)
    ranks.start(0, dispatch_under_close)
    time.sleep(0.6)
    ranks.values(once_then_lost, ranks=(1,))
    answer = ranks.answer(0)
    assert answer.failure is None, answer
    ranks.values(close, ranks=(1,))


def dispatch_under_close(here):
    comm = here.state.pop("comm")
    x, idx = inputs(here.rank)
    closer = threading.Timer(0.2, comm.close)
    closer.start()
    comm.dispatch(x, idx)
    closer.join()
    assert comm.closed


def once_then_lost(here):
    """The dispatch is right; the combine finds that the peer left."""
    import epcomm

    x, idx = inputs(here.rank)
    out = here.state["comm"].dispatch(x, idx)
    try:
        here.state["comm"].combine(out.x, out.handle)
    except epcomm.PeerLostError as error:
        assert error.peer == 0 and "left" in str(error), error
    else:
        raise AssertionError("rank 0 closed and yet took part")
