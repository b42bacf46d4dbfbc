"""Ranks on this host for the example and the benchmark: start them, ask them together, notice when one fails.

A *worker* is a class that is made as ``worker(place, **options)`` on every rank, answers ``worker.answer(request)``
with a value that JSON can hold, and is closed by ``worker.close()``. The same worker runs

* in processes started here (:class:`LocalRanks`), with the environment variables that ``torchrun`` would set, or
  under an ``mpirun`` started here; or
* in this very process, where ``torchrun`` or ``mpirun`` has started one per rank (:class:`JoinedRanks`).

Requests and answers are JSON over a Unix socket. A rank that dies, raises or passes the deadline ends the whole group
with one :class:`RanksFailed` that says what happened on which rank; nothing is left running.
"""

import abc
import contextlib
import importlib
import json
import multiprocessing.connection
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from epcomm import bootstrap
from epcomm._bootstrap import launcher

# After a rank has failed, its peers get this long to say what they saw; then they are ended.
_GRACE_S = 5.0
# How long a closed group may take to leave.
_LEAVE_S = 10.0
# What makes a process a rank; ranks started here must not take the parent's for their own.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EPCOMM_PORT")


class Place(NamedTuple):
    """Where a worker runs. ``epcomm.Communicator(group=None)`` made there has this rank and size."""

    rank: int
    num_ranks: int


class RanksFailed(RuntimeError):
    """One or more ranks failed; the text has a line for each, the likely cause first."""


class Ranks(abc.ABC):
    """Ranks that answer requests together; a context manager.

    Attributes
    ----------
    num_ranks : int
    speaks : bool
        Whether this process is the one that reports.
    """

    num_ranks: int
    speaks: bool = True

    @abc.abstractmethod
    def ask(self, request: Any) -> list[Any]:
        """Give every rank the request; return their answers in rank order.

        Raises
        ------
        RanksFailed
            A rank raised, died or did not answer before the deadline.
        """

    @abc.abstractmethod
    def close(self, at_once: bool = False) -> None:
        """End the group. Idempotent."""

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        self.close(at_once=kind is not None)


def join_or_start(worker: str, options: Mapping[str, Any], num_ranks: int, timeout_s: float) -> Ranks:
    """The ranks of the launcher that started this process, or else `num_ranks` new ones."""
    if launcher.find() is not None:
        return JoinedRanks(worker, options, timeout_s)
    return LocalRanks(worker, options, num_ranks, timeout_s)


class LocalRanks(Ranks):
    """Processes on this host, one per rank, that answer requests together.

    Parameters
    ----------
    worker
        ``"module:Class"`` of the worker.
    options
        Its keyword arguments; JSON must be able to hold them.
    num_ranks
        How many processes.
    timeout_s
        Deadline of the start and of each request.
    mpirun
        Command line of an ``mpirun`` to start the ranks with; without it they get torchrun's variables.
    """

    def __init__(self, worker: str, options: Mapping[str, Any], num_ranks: int, timeout_s: float,
                 mpirun: Sequence[str] | None = None) -> None:
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._processes: list[subprocess.Popen] = []
        self._pipes: dict[int, multiprocessing.connection.Connection] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="epcomm-")  # mode 0700: only this user reaches the socket
        try:
            address = os.path.join(self._folder.name, "ranks")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(num_ranks)
                self._start(address, mpirun)
                self._accept(listener, time.monotonic() + timeout_s)
            for pipe in self._pipes.values():
                _send(pipe, {"worker": worker, "options": dict(options), "num_ranks": num_ranks})
            self._collect("start")
        except BaseException:
            self.close(at_once=True)
            raise

    def _start(self, address: str, mpirun: Sequence[str] | None) -> None:
        # The children see this process's modules, wherever they were imported from, as multiprocessing's would.
        code = f"import sys; sys.path[:] = {sys.path!r}; from epcomm._launch import serve; serve({address!r})"
        command = [sys.executable, "-c", code]
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        if mpirun is not None:
            self._processes.append(subprocess.Popen([*mpirun, *command], stdin=subprocess.DEVNULL, env=environment))
            return
        environment.setdefault("EPCOMM_AUTHKEY", secrets.token_hex(16))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
                        "WORLD_SIZE": str(self.num_ranks), "LOCAL_WORLD_SIZE": str(self.num_ranks)}
        for rank in range(self.num_ranks):
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL,
                                                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(0.2)
        while len(self._pipes) < self.num_ranks:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                ended = [process.returncode for process in self._processes if process.poll() is not None]
                if ended:
                    raise RanksFailed(f"a rank {_how(ended[0])} while starting") from None
                if time.monotonic() > deadline:
                    raise RanksFailed(f"only {len(self._pipes)} of {self.num_ranks} ranks started within "
                                      f"{self._timeout_s:g} s") from None
                continue
            accepted.settimeout(None)
            pipe = multiprocessing.connection.Connection(accepted.detach())
            self._pipes[_receive(pipe)["rank"]] = pipe

    def ask(self, request: Any) -> list[Any]:
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):  # a rank's end is read below, where it gets a sentence
                _send(pipe, {"request": request})
        return self._collect(str(request))

    def _collect(self, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self._timeout_s
        waiting = dict(self._pipes)
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= {rank: f"no answer within {self._timeout_s:g} s" for rank in waiting if not failures}
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    message = _receive(waiting.pop(rank))
                except (EOFError, OSError):
                    message = {"error": f"the process {self._ending(rank)}"}
                if "error" in message:
                    failures[rank] = message["error"]
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                else:
                    answers[rank] = message["answer"]
        if failures:
            self.close(at_once=True)
            raise RanksFailed(_explain(what, failures))
        return [answers[rank] for rank in range(self.num_ranks)]

    def _ending(self, rank: int) -> str:
        if len(self._processes) != self.num_ranks:
            return "ended"
        try:
            return _how(self._processes[rank].wait(timeout=1))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def close(self, at_once: bool = False) -> None:
        for pipe in self._pipes.values():
            pipe.close()  # a worker that reads its end closes itself
        self._pipes.clear()
        deadline = time.monotonic() + (0.5 if at_once else _LEAVE_S)
        for process in self._processes:
            try:
                process.wait(timeout=max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()  # mpirun passes it on to its ranks
                try:
                    process.wait(timeout=2)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._processes.clear()
        self._folder.cleanup()


class JoinedRanks(Ranks):
    """This process is one rank of a ``torchrun`` or ``mpirun`` job.

    Every rank makes the same requests in the same order; each gets all answers.
    """

    def __init__(self, worker: str, options: Mapping[str, Any], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._bootstrap = bootstrap.connect(timeout_s=timeout_s)
        self.num_ranks = self._bootstrap.num_ranks
        self.speaks = self._bootstrap.rank == 0
        self._worker: Any = None
        place = Place(self._bootstrap.rank, self.num_ranks)
        try:
            self._agree("start", lambda: self._make(worker, options, place))
        except BaseException:
            self.close()
            raise

    def _make(self, worker: str, options: Mapping[str, Any], place: Place) -> None:
        self._worker = _find(worker)(place, **options)

    def ask(self, request: Any) -> list[Any]:
        return self._agree(str(request), lambda: self._worker.answer(request))

    def _agree(self, what: str, call: Any) -> list[Any]:
        message = _guarded(call)
        messages = [json.loads(data) for data in self._bootstrap.all_gather(json.dumps(message).encode())]
        failures = {rank: told["error"] for rank, told in enumerate(messages) if "error" in told}
        if failures:
            raise RanksFailed(_explain(what, failures))
        return [told["answer"] for told in messages]

    def close(self, at_once: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._bootstrap.close()


def serve(address: str) -> None:
    """Body of a process that :class:`LocalRanks` starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    found = launcher.find()
    assert found is not None, "started without the variables of a rank"
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(address)
        pipe = multiprocessing.connection.Connection(connected.detach())
    _send(pipe, {"rank": found.rank})
    start = _receive(pipe)
    place = Place(found.rank, start["num_ranks"])
    made: list[Any] = []
    message = _guarded(lambda: made.append(_find(start["worker"])(place, **start["options"])))
    try:
        _send(pipe, message)
        while made:
            request = _receive(pipe)["request"]
            _send(pipe, _guarded(lambda request=request: made[0].answer(request)))
    except (EOFError, OSError):
        pass  # the group is closed
    for worker in made:
        worker.close()


def _guarded(call: Any) -> dict[str, Any]:
    """The answer, or the error as one line; its traceback goes to standard error where it may help."""
    try:
        return {"answer": call()}
    except Exception as error:
        if os.environ.get("EPCOMM_LOG") == "debug":
            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _find(worker: str) -> Any:
    module, _, name = worker.partition(":")
    return getattr(importlib.import_module(module), name)


def _send(pipe: multiprocessing.connection.Connection, message: Mapping[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def _receive(pipe: multiprocessing.connection.Connection) -> Any:
    return json.loads(pipe.recv_bytes())


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def _explain(what: str, failures: Mapping[int, str]) -> str:
    """The likely cause first: peers that only noticed somebody else's end come last."""
    noticed = ("PeerLostError", "CommTimeoutError")
    ranks = sorted(failures, key=lambda rank: (failures[rank].startswith(noticed), rank))
    lines = [f"rank {rank}: {failures[rank]}" for rank in ranks]
    return f"{what}: {len(failures)} rank(s) failed\n  " + "\n  ".join(lines)


def _free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mpirun_command(num_ranks: int) -> list[str] | None:
    """An ``mpirun`` for ranks of this host, which may be more than its cores, or ``None`` where there is none."""
    path = shutil.which("mpirun")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    command = [path, "-n", str(num_ranks)]
    if "Open MPI" in version.stdout:
        # Ranks that have a core each shall spin, as they would by default; `--oversubscribe` alone makes them yield.
        yields = int(num_ranks > len(os.sched_getaffinity(0)))
        command += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", str(yields)]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")  # containers are root
    return command
