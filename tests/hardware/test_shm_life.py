"""Processes: killed, interrupted, forked; survivors hear of it and nothing is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.shm_worker import ROOT, WORDS, Worker, connect_all

LEFT, BROKEN, DEAD = 1, 2, 3


@pytest.fixture
def ranks():
    started = []

    def start(count, options=None, first=None):
        """`count` connected ranks; `first`: options of rank 0."""
        new = [Worker() for _ in range(count)]
        started.extend(new)
        connect_all(new, [worker.make((first if worker is new[0] else None) or options) for worker in new])
        return new

    yield start
    for worker in started:
        worker.close()


def lost(worker, culprit, killed_at, within_s=1.0):
    """The worker's running wait ended with the loss of `culprit`, soon after."""
    answer = worker.answer()
    assert answer.failure is not None, "the wait succeeded"
    assert (answer.failure.kind, answer.failure.peer) == ("PeerLostError", culprit), answer.failure
    assert answer.at - killed_at < within_s
    return answer.failure.text


@pytest.mark.parametrize("use_pidfd", [True, False], ids=["pidfd", "polling"])
def test_a_killed_peer_is_noticed(use_pidfd):
    """Twenty times, at different moments of the survivor's wait."""
    survivor = Worker()
    try:
        for i in range(20):
            victim = Worker()
            try:
                pair = [survivor, victim]
                connect_all(pair, [worker.make({"use_pidfd": use_pidfd}) for worker in pair])
                if i % 2:
                    victim.send("b.wait(0, 4096, 1, 60.0)")
                survivor.send("b.wait(1, 4096, 1, 20.0, 'dispatch', 'data')")
                time.sleep(0.002 * i)
                text = lost(survivor, 1, victim.kill())
                for part in ("dispatch", "data", "rank 1 is lost", f"pid {victim.process.pid}", "expected 1", "seen 0"):
                    assert part in text, text
                assert survivor.do("b.peer_state(1)") == DEAD
            finally:
                victim.close()
    finally:
        survivor.close()


def test_death_is_seen_while_nobody_reaps_it(ranks):
    """A zombie has ended."""
    survivor, victim = ranks(2, {"use_pidfd": False})
    survivor.send("b.wait(1, 4096, 1, 20.0)")
    lost(survivor, 1, victim.kill())
    assert victim.process.returncode is None  # not waited for yet


def test_what_arrived_before_the_death_counts(ranks):
    survivor, victim = ranks(2)
    victim.do("b.signal(0, 4096, 3)")
    victim.kill()
    victim.process.wait(10)
    time.sleep(0.3)
    for value in (1, 2, 3):
        survivor.do("b.wait(1, 4096, value, 5.0)", value=value)
    failure = survivor.fails("b.wait(1, 4096, 4, 20.0)")
    assert failure.kind == "PeerLostError" and "seen 3" in failure.text


def test_a_third_rank_that_dies_ends_a_wait_for_a_living_one(ranks):
    a, b, c = ranks(3)
    a.send("b.wait(1, 4096, 1, 20.0)")
    b.send("b.wait(0, 4096, 1, 20.0)")
    time.sleep(0.2)
    killed = c.kill()
    lost(a, 2, killed)
    lost(b, 2, killed)


def test_a_living_peer_may_still_deliver(ranks):
    """Rank 2 is dead, but what rank 1 sends right then is taken."""
    a, b, c = ranks(3)
    c.kill()
    c.process.wait(10)
    time.sleep(0.05)
    a.send("b.wait(1, 4096, 1, 20.0)")
    time.sleep(0.1)
    b.do("b.signal(0, 4096)")
    a.value()


@pytest.mark.parametrize("leave", ["b.signal(0, 64, 2)", "(b.signal(0, 64, 2), os._exit(1))"], ids=["stays", "exits"])
@pytest.mark.parametrize("first", [{}, {"use_pidfd": False}], ids=["pidfd", "polling"])
def test_the_first_cause_is_named(ranks, leave, first):
    """Rank 2 is killed; rank 1 notices and gives up; rank 0, waiting for rank 1, names rank 2.

    Also where rank 0 alone would notice the death later than rank 1.
    """
    a, b, c = ranks(3, first=first)
    a.send("b.wait(1, 4096, 1, 20.0)")
    b.send(f"(catch(b.wait, 2, 4096, 1, 20.0), {leave})")
    time.sleep(0.1)
    killed = c.kill()
    assert "rank 2 is lost" in lost(a, 2, killed)
    assert a.do("b.peer_state(1)") in (BROKEN, DEAD)


def test_a_rank_that_left_and_ended_is_no_loss(ranks):
    a, b, c = ranks(3)
    c.do("[b.signal(peer, 2 * 64, 1) for peer in (0, 1)]")
    c.do("b.close()")
    c.connection.send(("os._exit(0)", {}))
    c.process.wait(10)
    time.sleep(0.5)
    a.send("b.wait(1, 4096, 1, 20.0)")
    time.sleep(0.6)
    b.do("b.signal(0, 4096)")
    a.value()
    assert a.do("b.peer_state(2)") == LEFT
    failure = a.fails("b.wait(2, 8192, 1, 20.0)")
    assert failure.peer == 2 and "rank 2 left: it closed its communicator" in failure.text


def test_a_stopped_process_is_not_a_dead_one(ranks):
    a, b = ranks(2)
    os.kill(b.process.pid, signal.SIGSTOP)
    failure = a.fails("b.wait(1, 4096, 1, 0.5)")
    assert failure.kind == "CommTimeoutError" and failure.peer == 1
    os.kill(b.process.pid, signal.SIGCONT)
    b.do("b.signal(0, 4096)")
    a.do("b.wait(1, 4096, 1, 5.0)")


def test_ctrl_c_ends_a_wait(ranks):
    a, b = ranks(2)
    for _ in range(3):
        a.send("b.wait(1, 4096, 1, 60.0)")
        time.sleep(0.3)
        start = time.monotonic()
        os.kill(a.process.pid, signal.SIGINT)
        answer = a.answer(5)
        assert answer.failure.kind == "KeyboardInterrupt" and answer.at - start < 0.5
    b.do("b.signal(0, 4096)")
    a.do("b.wait(1, 4096, 1, 5.0)")


def test_a_handler_that_does_not_raise_does_not_end_a_wait(ranks):
    a, b = ranks(2)
    a.do("signal.signal(signal.SIGUSR1, lambda *_: names.setdefault('seen', True)) and None")
    a.send("b.wait(1, 4096, 1, 20.0)")
    time.sleep(0.2)
    os.kill(a.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    b.do("b.signal(0, 4096)")
    a.value()
    assert a.do("seen")


def test_cycles_leak_nothing(ranks):
    a, b = ranks(2)

    def cycle(close):
        connect_all([a, b], [a.make(), b.make()])
        a.do("b.signal(1, 4096)")
        b.do("b.wait(0, 4096, 1, 5.0)")
        for worker in (a, b):
            if close:
                worker.do("b.close()")
            worker.do("[names.pop('b') and None]")  # without close(): the destructor frees

    def holdings():
        return [worker.do("(open_files(), mappings(), num_threads())") for worker in (a, b)]

    cycle(True)
    before = holdings()
    for i in range(100):
        cycle(close=i % 2 == 0)
    assert holdings() == before
    assert [held[1] for held in before] == [0, 0]


def test_refused_connections_leak_nothing():
    worker = Worker()
    try:
        def holdings():
            worker.do("[names.pop('b') and None]")
            return worker.do("open_files(), mappings(), num_threads()")

        worker.make()
        before = holdings()
        for _ in range(10):
            info = worker.make()
            failure = worker.fails("b.connect(0, [info, bad], 0, 5.0)", info=info, bad=info[:-20])
            assert failure.kind == "BackendUnavailableError"
            failure = worker.fails("b.connect(0, [info], 0, 5.0)", info=info)
            assert failure.kind == "InvalidArgumentError"
            info = worker.make()
            failure = worker.fails("b.connect(0, [info, info], 0, 0.05)", info=info)
        assert holdings() == before
    finally:
        worker.close()


FORK = """
import os, sys, time
from epcomm import _shm
from epcomm.errors import EpcommError
b = _shm.Backend({}); b.alloc_heap(1 << 16); info = b.export_info()
if sys.argv[1] == "connected":
    import threading
    c = _shm.Backend({}); c.alloc_heap(1 << 16); infos = [info, c.export_info()]
    thread = threading.Thread(target=c.connect, args=(1, infos, 0, 10.0)); thread.start()
    b.connect(0, infos, 0, 10.0); thread.join()
pid = os.fork()
if pid == 0:
    status = 0
    def refused(call, *args):
        try:
            call(*args)
        except EpcommError as error:
            return "inherited through fork" in str(error) or "not connected" in str(error)
        return False
    if sys.argv[1] == "connected":
        ok = all([refused(b.signal, 1, 4096), refused(b.wait, 1, 4096, 1, 5.0), refused(b.put, 1, 0, 0, 8),
                  b.peer_ptr(1) == 0])
    else:
        ok = all([refused(b.connect, 0, [info], 0, 5.0), refused(b.alloc_heap, 4096)])
    b.close(); del b
    if sys.argv[2] == "exit":
        sys.exit(0 if ok else 3)
    os._exit(0 if ok else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child could use it"
if sys.argv[1] == "connected":
    time.sleep(0.2)
    c.signal(0, 4096); b.wait(1, 4096, 1, 5.0)     # the parent's is whole
    b.signal(1, 4096); c.wait(0, 4096, 1, 5.0)
    assert len(os.listdir("/proc/self/task")) >= 3, "a watching thread ended"
    b.close(); c.close()
else:
    b.connect(0, [info], 0, 5.0)
print("good")
"""


@pytest.mark.parametrize("stage", ["connected", "exported"])
@pytest.mark.parametrize("end", ["exit", "_exit"])
def test_what_a_fork_inherits_is_inert(stage, end):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, stage, end], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.stdout.strip() == "good", done.stdout + done.stderr


def test_a_forked_child_does_not_hide_the_death_of_its_parent(ranks):
    """It holds the memory and every descriptor, yet the rank has ended."""
    a, b = ranks(2)
    child = b.do("os.fork() or (time.sleep(30), os._exit(0))")
    try:
        a.send("b.wait(1, 4096, 1, 20.0)")
        time.sleep(0.1)
        lost(a, 1, b.kill())
    finally:
        os.kill(child, signal.SIGKILL)


def test_waiting_ranks_leave_the_cores_alone(ranks):
    """A long wait sleeps: under 10 % of a core."""
    (a, b) = ranks(2)
    a.send("(t := time.process_time(), b.wait(1, 4096, 1, 20.0), time.process_time() - t)[2]")
    time.sleep(1.5)
    b.do("b.signal(0, 4096)")
    assert a.value() < 0.15


def test_close_ends_a_wait_of_another_thread(ranks):
    a, _ = ranks(2)
    a.do("names.setdefault('pool', __import__('concurrent.futures').futures.ThreadPoolExecutor(1)) and None")
    a.do("names.setdefault('future', pool.submit(b.wait, 1, words, 1, 30.0)) and None", words=WORDS)
    time.sleep(0.3)
    start = time.monotonic()
    a.do("b.abort('stop')")
    failure = a.fails("future.result(10)")
    assert failure.kind == "PeerLostError" and time.monotonic() - start < 1.0
    a.do("b.close()")
