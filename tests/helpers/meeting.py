"""Ranks as threads or small processes, for the tests of the bootstrap."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from epcomm import bootstrap
from epcomm._bootstrap.address import Place
from helpers.pool import free_port

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MASTER_", "TORCHELASTIC_", "EPCOMM_")


def loopback():
    """A fresh meeting point on the loopback."""
    return Place("127.0.0.1", free_port())


class Task:
    """A function in a thread; :meth:`result` gives its value or exception within a deadline."""

    def __init__(self, function, *args):
        self._outcome = None
        self.elapsed = None
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function, args):
        start = time.monotonic()
        try:
            self._outcome = function(*args)
        except BaseException as error:
            self._outcome = error
        self.elapsed = time.monotonic() - start

    @property
    def running(self):
        return self._thread.is_alive()

    def result(self, timeout_s=20.0):
        """The value, or the exception as a value."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"a rank still waits after {timeout_s} s"
        return self._outcome


def join(rank, num_ranks, place, key=None, timeout_s=10.0):
    """One rank's creation, as `connect` does it once the environment is read."""
    return bootstrap._rendezvous(rank, num_ranks, place, key, timeout_s)


def ranks(num_ranks, body, *, place=None, keys=None, timeout_s=10.0, only=None):
    """Run ``body(group)`` on ranks that are threads; what each returned or raised.

    ``keys`` is one key or a dict by rank; ranks outside ``only`` never come and are told as None.
    """
    place = place or loopback()

    def one(rank):
        key = keys.get(rank) if isinstance(keys, dict) else keys
        with join(rank, num_ranks, place, key, timeout_s) as group:
            return body(group)

    tasks = {rank: Task(one, rank) for rank in range(num_ranks) if only is None or rank in only}
    return [tasks[rank].result() if rank in tasks else None for rank in range(num_ranks)]


def clean_environment(**changes):
    """This environment without any launcher's and epcomm's variables, plus changes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    kept["PYTHONPATH"] = str(ROOT)
    return {**kept, **{name: str(value) for name, value in changes.items()}}


@contextlib.contextmanager
def process(code, *args, **environ):
    """A Python process that runs ``code``; killed at the end of the block."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env=clean_environment(**environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=10)


def child_of_multiprocessing(pipe):
    """Body of a spawned child: joins by its environment and tells what came of it."""
    from epcomm._bootstrap.handshake import job_key

    with bootstrap.connect(timeout_s=20) as group:
        pipe.send((group.kind, group.all_gather(b"%d" % group.rank), job_key() is not None))
