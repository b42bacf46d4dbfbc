"""Ranks that a test may kill, stop, interrupt or let exit by themselves: processes whose end is looked at too.

`pool` runs many cases on ranks that must stay well; a :class:`Job` is for those that must not. Each rank is a spawned
process; its main thread runs one function at a time (so that Ctrl-C reaches it) and answers with a value or with what
was raised, and when. A killed rank can be replaced, and all meet again at a new port.

No test framework is imported here: every rank starts with this module.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import pool

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 2.0
START_TIMEOUT_S = 60.0


def slack():
    """How much longer than on an idle machine things may take now: at least 1, else runnable processes per core."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))) * pool.slowness()


class Failure(NamedTuple):
    """What a rank's function raised. ``types`` are the names of its classes, the most derived first."""

    kind: str
    text: str
    peer: int | None
    types: tuple[str, ...]


class Answer(NamedTuple):
    """Value or failure of a function, and its start and end on the clock that all processes share."""

    value: Any
    failure: Failure | None
    start: float
    end: float


def failure_of(error):
    """A :class:`Failure` of an exception."""
    types = tuple(cls.__name__ for cls in type(error).__mro__)
    return Failure(types[0], str(error), getattr(error, "peer", None), types)


class Job:
    """`num_ranks` processes.

    Parameters
    ----------
    num_ranks : int
    backend : str
    env : mapping, optional
        More environment variables of every rank; None removes one.
    python : sequence of str
        Options of the interpreter, such as ``-X dev``.
    place : optional
        Where the ranks run, :class:`helpers.pool.LocalPlace` unless given.
    """

    def __init__(self, num_ranks, backend="shm", env=None, python=(), place=None):
        self.num_ranks = num_ranks
        self.backend = backend
        self._env = dict(env or {})
        self._python = tuple(python)
        self.place = place or pool.LocalPlace()
        self._port = self.place.free_port()
        self._folder = self.place.folder()
        self.processes = [None] * num_ranks
        self.conns = [None] * num_ranks
        self._unanswered = [0] * num_ranks
        self._stderr = [Path(self._folder.name) / f"stderr-{rank}" for rank in range(num_ranks)]
        try:
            for rank in range(num_ranks):
                self._spawn(rank)
            self._await_start(range(num_ranks))
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _spawn(self, rank):
        inherited = {}
        if isinstance(self.place, pool.LocalPlace):
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("EPCOMM_")}
        inherited[pool.SESSION_VARIABLE] = os.environ.get(pool.SESSION_VARIABLE, "")
        wanted = {
            **pool._rank_environment(rank, self.num_ranks, self._port),
            "EPCOMM_TIMEOUT_S": str(20 * self.place.slowness),
            **self.place.environment(rank, self.num_ranks, self.backend),
            **self._env,
        }
        env = {**inherited, **{name: value for name, value in wanted.items() if value is not None}}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        for name in [name for name, value in wanted.items() if value is None]:
            env.pop(name, None)
        argv = [*self._python, os.path.abspath(__file__), "{fd}", str(rank), str(self.num_ranks), self.backend,
                str(os.getpid())]  # fmt: skip
        self.processes[rank], self.conns[rank] = self.place.start_job_rank(
            rank, self.num_ranks, self.backend, argv, env, self._stderr[rank])  # fmt: skip
        self._unanswered[rank] = 1

    def _await_start(self, ranks):
        for rank in ranks:
            self.answer(rank, START_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------- running

    def start(self, rank, function, **kwargs):
        """Let a rank run ``function(here, **kwargs)``; its answers come in order."""
        message = (function.__module__, function.__code__.co_filename, function.__qualname__, kwargs)
        self.conns[rank].send((self._port, message))
        self._unanswered[rank] += 1

    def answer(self, rank, timeout_s=ANSWER_TIMEOUT_S):
        """The next :class:`Answer` of a rank; fails the test if there is none in time."""
        while True:
            kind, value = self._receive(rank, timeout_s)
            if kind == "answer":
                self._unanswered[rank] -= 1
                return value

    def told(self, rank, timeout_s=ANSWER_TIMEOUT_S):
        """What a rank's function sends by ``here.tell(...)``."""
        kind, value = "began", None
        while kind == "began":
            kind, value = self._receive(rank, timeout_s)
        assert kind == "told", f"rank {rank} ended where it had something to tell: {value}"
        return value

    def began(self, rank, timeout_s=ANSWER_TIMEOUT_S):
        """Wait until a rank runs what it was told to start."""
        kind, value = self._receive(rank, timeout_s)
        assert kind == "began", (kind, value)

    def go(self, rank):
        """Let a rank's function go on from ``here.wait()``."""
        self.conns[rank].send("go")

    def _receive(self, rank, timeout_s):
        conn = self.conns[rank]
        timeout_s *= self.place.slowness
        if not conn.poll(timeout_s):
            raise AssertionError(f"rank {rank} did not answer within {timeout_s} s; its stacks:\n{self.stacks(rank)}")
        try:
            kind, value = conn.recv()
            if kind == "answer":  # clocks of other machines differ
                offset = self.place.clock_offset_s
                value = value._replace(start=value.start - offset, end=value.end - offset)
            return kind, value
        except (EOFError, ConnectionResetError):
            code = self.processes[rank].wait(5)
            raise AssertionError(f"rank {rank} died: {pool.exit_text(code)}\n{self.stderr(rank)}") from None

    def run(self, function, ranks=None, within_s=ANSWER_TIMEOUT_S, per_rank=None, **kwargs):
        """Answers of all ranks (or of some) that run a function together, in rank order."""
        ranks = range(self.num_ranks) if ranks is None else ranks
        for rank in ranks:
            self.start(rank, function, **kwargs, **(per_rank[rank] if per_rank else {}))
        return [self.answer(rank, within_s) for rank in ranks]

    def values(self, function, **kwargs):
        """As :meth:`run`, for a function that must not fail."""
        answers = self.run(function, **kwargs)
        for number, answer in enumerate(answers):
            assert answer.failure is None, f"answer {number}: {answer.failure}"
        return [answer.value for answer in answers]

    # ------------------------------------------------------------------------------------------- its end

    def signal(self, rank, number=signal.SIGKILL):
        """Send a signal; returns when."""
        return self.place.signal(self.processes[rank], number)

    def replace(self, *ranks):
        """New processes for ranks that ended, and a new port for all: none of them is in creation now."""
        for rank in ranks:
            self.processes[rank].kill()
            self.processes[rank].wait(5)
            self.conns[rank].close()
        self.new_port()
        for rank in ranks:
            self._spawn(rank)
        self._await_start(ranks)

    def new_port(self):
        """Ranks that created unequal numbers of communicators can meet again."""
        self._port = self.place.free_port()

    def heal(self):
        """Make it as good as new for the next test; False if it cannot be."""
        self.replace(*[rank for rank, process in enumerate(self.processes) if process.poll() is not None])
        if any(self._unanswered):
            return False
        try:
            return all(answer.failure is None for answer in self.run(forget, within_s=5))
        except AssertionError:
            return False

    def leave(self, rank, timeout_s=EXIT_TIMEOUT_S):
        """Let a rank's interpreter end by itself; its exit code. Fails if that takes longer."""
        with contextlib.suppress(OSError):
            self.conns[rank].send(None)
        try:
            return self.processes[rank].wait(timeout_s * slack())
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} does not exit; its stacks:\n{self.stacks(rank)}") from None

    def leave_all(self, ranks=None):
        """All ranks (or some) must end well: exit code 0 in time, nothing said by a destructor."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            code, said = self.leave(rank), self.stderr(rank)
            assert code == 0, f"rank {rank}: {pool.exit_text(code)}\n{said}"
            assert "Traceback" not in said and "Exception ignored" not in said, f"rank {rank} said:\n{said}"

    def stderr(self, rank):
        """What a rank wrote to standard error, those before a replaced one left out."""
        return self._stderr[rank].read_text(errors="replace")

    def stacks(self, rank):
        """Ask a living rank for the stacks of its threads."""
        if self.processes[rank].poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.processes[rank].send_signal(signal.SIGCONT)
                self.processes[rank].send_signal(signal.SIGUSR1)
            time.sleep(0.3 * self.place.slowness)
        return self.stderr(rank)

    def close(self):
        """End all processes now, whatever they do. Idempotent."""
        for process in self.processes:
            if process is not None and process.poll() is None:
                process.kill()
        for process, conn in zip(self.processes, self.conns, strict=True):
            if process is not None:
                process.wait(10)
                conn.close()
        self._folder.cleanup()


class Jobs:
    """Jobs by (backend, ranks), each made as good as new before it is given out again."""

    def __init__(self, place=None):
        self._place = place or pool.LocalPlace()
        self._kept = {}
        self._fresh = []

    def get(self, num_ranks, backend="shm"):
        """A kept one, or a new one where its ranks cannot be used any more."""
        key = (num_ranks, getattr(num_ranks, "nodes", None), backend)
        if key in self._kept and not self._kept[key].heal():
            self._kept.pop(key).close()
        if key not in self._kept:
            self._kept[key] = Job(num_ranks, backend, place=self._place)
        return self._kept[key]

    def fresh(self, num_ranks, backend="shm", **kwargs):
        """One of its own, ended by :meth:`end_fresh`."""
        self._fresh.append(Job(num_ranks, backend, place=self._place, **kwargs))
        return self._fresh[-1]

    def end_fresh(self):
        """End those of a test."""
        while self._fresh:
            self._fresh.pop().close()

    def close(self):
        """End all."""
        self.end_fresh()
        while self._kept:
            self._kept.popitem()[1].close()


# ------------------------------------------------------------------------------------------------ inside a rank


def forget(here):
    """Drop what the last test kept."""
    comm = here.state.get("comm")
    if comm is not None:
        comm.abort()
        comm.close()
    here.state.clear()


class Here(SimpleNamespace):
    """What a function gets first: ``rank``, ``num_ranks``, ``backend``, ``state`` (kept between functions)."""

    def comm(self, **kwargs):
        """A communicator of the job's ranks, kept in ``state`` so that it outlives the function."""
        import epcomm

        kwargs.setdefault("backend", self.backend)
        self.state["comm"] = epcomm.Communicator(**kwargs)
        return self.state["comm"]

    def tell(self, value=None):
        """Send a word to the test while the function runs."""
        self.conn.send(("told", value))

    def wait(self):
        """Until the test says :meth:`Job.go`."""
        assert self.conn.recv() == "go"


def main(conn, rank, num_ranks, backend, parent):
    """Run what comes until the parent closes."""
    import faulthandler

    pool._die_with_parent(parent or os.getppid())
    importlib.import_module("helpers.job_calls")  # and all that it needs, so that a first function is not slow
    importlib.import_module("epcomm")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    here = Here(rank=rank, num_ranks=num_ranks, backend=backend, state={}, conn=conn)
    now = time.monotonic()
    conn.send(("answer", Answer(None, None, now, now)))
    while True:
        try:
            message = conn.recv()
        except EOFError:
            return
        except KeyboardInterrupt:  # came after the function had ended
            continue
        if message is None:
            return
        port, (module, path, qualname, kwargs) = message
        os.environ["MASTER_PORT"] = os.environ["EPCOMM_PORT"] = str(port)
        function, value, failure = pool._load(module, path, qualname), None, None
        conn.send(("began", None))
        start = time.monotonic()
        try:
            value = function(here, **kwargs)
        except BaseException as error:
            failure = failure_of(error)
        end = time.monotonic()
        conn.send(("answer", Answer(value, failure, start, end)))


if __name__ == "__main__":
    from helpers import job  # this file again, under the name that the parent knows its classes by

    job.main(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
