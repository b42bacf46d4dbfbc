"""Python threads: the GIL is free while a call waits, and one lock orders the calls of a communicator."""

import threading
import time

import numpy as np
from helpers.oracle import assert_bits

COMM = {"num_experts": 8, "num_topk": 1, "hidden": 16, "max_tokens_per_rank": 8, "dtype": "float32"}
IDX = np.arange(8).reshape(8, 1)


def counts_while_waiting(context):
    with context.comm(**COMM) as comm:
        x = np.ones((8, 16), np.float32)
        out = comm.dispatch(x, IDX)
        steps = []
        for call in (lambda: comm.dispatch(x, IDX), lambda: comm.combine(out.x, out.handle), comm.barrier):
            comm.barrier()
            if context.rank == 1:
                time.sleep(0.4)
            stop, counted = threading.Event(), []

            def count(stop=stop, counted=counted):
                while not stop.wait(0.01):
                    counted.append(1)

            thread = threading.Thread(target=count)
            thread.start()
            call()
            stop.set()
            thread.join()
            steps.append(len(counted))
        return steps


def test_other_threads_run_while_a_call_waits(two):
    assert min(two.run(counts_while_waiting)[0]) >= 10


def a_thread_each(context, loops):
    """Two communicators, each driven by a thread of its own, in whatever order the threads run."""
    failures = []

    def drive(comm, base):
        try:
            for number in range(loops):
                x = np.full((8, 16), base + number, np.float32)
                out = comm.dispatch(x, IDX, layout=("rank", "expert")[number % 2])
                assert_bits(comm.combine(out.x, out.handle).x, x)
        except BaseException as error:
            failures.append(error)

    with context.comm(**COMM) as first, context.comm(**COMM) as second:
        threads = [threading.Thread(target=drive, args=args) for args in ((first, 0), (second, 1000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def test_two_communicators_on_two_threads(ranks):
    ranks.run(a_thread_each, loops=40)


def many_threads_one_communicator(context):
    """The same call from several threads: each is whole, none sees another's rows."""
    failures = []
    x = np.arange(128, dtype=np.float32).reshape(8, 16) + 1000 * context.rank

    with context.comm(**COMM) as comm:
        want = np.array(comm.dispatch(x, IDX).x)

        def call():
            try:
                for _ in range(20):
                    assert_bits(comm.dispatch(x, IDX).x, want)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def test_calls_of_one_communicator_are_serialised(three):
    three.run(many_threads_one_communicator)


class Slow:
    """An engine at which a thread looks for long."""

    def __init__(self, engine, looking):
        self._engine, self._looking = engine, looking

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def look_at_peers(self):
        self._looking.set()
        time.sleep(0.2)
        return self._engine.look_at_peers()


def looked_at_while_closing(context):
    failures = []

    def look(comm):
        try:
            comm.check()
        except BaseException as error:
            failures.append(error)

    comm = context.comm(**COMM)
    comm.barrier()
    looking = threading.Event()
    comm._engine = Slow(comm._engine, looking)
    thread = threading.Thread(target=look, args=(comm,))
    thread.start()
    assert looking.wait(10)
    comm.close()
    thread.join()
    assert not failures, failures


def test_who_looks_while_another_thread_closes_sees_no_loss(two):
    two.run(looked_at_while_closing)
