"""Pools of spawned ranks that run many cases.

The parent sends a function and its arguments; every rank runs it with a :class:`RankContext` and sends back a value
or a traceback. Each case has an inner deadline; when it passes, or any rank fails or dies, all ranks are killed and
the error shows every rank's traceback and the stacks of those that still ran. A fresh pool takes the place.

No test framework and no array library is imported here: every rank starts with this module.
"""

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from helpers import gpu

_SPAWN = multiprocessing.get_context("spawn")
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
SLOWNESS_VARIABLE = "EPCOMM_TEST_SLOWNESS"
SESSION_VARIABLE = "EPCOMM_TEST_SESSION"  # inherited by all that a session starts; the leak check looks for it
MAX_PROCESSES = 12
START_TIMEOUT_S = 60.0
CASE_TIMEOUT_S = 60.0
GRACE_S = 2.0  # for the other ranks, after the first one failed


class RankError(AssertionError):
    """A case failed; the text has all ranks' reports. ``reports[rank]`` is a text, or None where all was well."""

    def __init__(self, headline, reports):
        self.reports = reports
        lines = [headline]
        for rank, report in enumerate(reports):
            first = reports.index(report)
            text = "fine" if report is None else report if first == rank else f"the same as rank {first}"
            lines.append(f"--- rank {rank}: {text}")
        super().__init__("\n".join(lines))


class RankDied:
    """Stands for the value of a rank whose death was expected."""

    def __init__(self, exitcode):
        self.exitcode = exitcode

    def __repr__(self):
        return f"RankDied({exit_text(self.exitcode)})"


def exit_text(exitcode):
    """Exit code of a process in words: a negative one is a signal."""
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


_given_ports = set()


def free_port():
    """A TCP port of the loopback that was free a moment ago, and that this process never gave out before.

    Ranks count the communicators they made at each address, and one that was replaced counts anew: at a port that
    comes again, old and new ranks would not agree on the number of the next.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def slowness():
    """How much longer than on an ordinary machine everything may take where the ranks run."""
    return float(os.environ.get(SLOWNESS_VARIABLE, "1"))


def has_gpu_memory(backend):
    """Whether a backend's heap is device memory."""
    from epcomm._registry import BACKENDS

    return any(row.name == backend and row.needs_cuda for row in BACKENDS)


class Ranks(int):
    """A number of ranks that are spread over fewer nodes, where the place has nodes."""

    def __new__(cls, ranks, nodes):
        self = super().__new__(cls, ranks)
        self.nodes = nodes
        return self

    def __reduce__(self):  # ranks get a plain number
        return int, (int(self),)


def size_id(ranks):
    """Test id of a group's size."""
    return f"{int(ranks)}ranks" + (f"{ranks.nodes}nodes" if hasattr(ranks, "nodes") else "")


class LocalPlace:
    """Ranks are processes of this machine. `rxe.place.NodesPlace` is the other place."""

    clock_offset_s = 0.0
    slowness = 1.0
    sizes = (1, 2, 3, 4, 7)  # of groups in contract tests
    probes_here = True  # a backend that does not load here does not load where ranks run

    free_port = staticmethod(free_port)

    def folder(self):
        """A folder that all ranks see."""
        return tempfile.TemporaryDirectory(prefix="epcomm-test-")

    def environment(self, rank, num_ranks, backend):
        """What ranks need to know of where they are."""
        return gpu.environment_of(rank) if has_gpu_memory(backend) else {}

    def takes(self, item, selection):
        """Whether a test can run here."""
        return item.get_closest_marker("rxe") is None

    def last_words(self):
        """What the place itself has to say about a failure."""
        return ""

    def close(self):
        """Nothing is kept."""

    def start_rank(self, rank, num_ranks, backend, changes, stacks):
        """A process of a :class:`RankPool`, and the connection to it."""
        here, there = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_rank_main, args=(os.getpid(), rank, num_ranks, backend, there, stacks),
                                 name=f"epcomm-test-rank-{rank}", daemon=True)  # fmt: skip
        with environment(changes):
            process.start()
        there.close()
        return process, here

    def start_job_rank(self, rank, num_ranks, backend, argv, env, stderr):
        """A process of a :class:`helpers.job.Job`, and the connection whose other end is ``{fd}`` in `argv`."""
        here, there = multiprocessing.connection.Pipe()
        argv = [word.replace("{fd}", str(there.fileno())) for word in argv]
        with open(stderr, "w") as errors:
            process = subprocess.Popen([sys.executable, *argv], pass_fds=[there.fileno()], env=env, cwd="/",
                                       stdin=subprocess.DEVNULL, stderr=errors)  # fmt: skip
        there.close()
        return process, here

    def signal(self, process, number):
        """Send a signal; when that was."""
        at = time.monotonic()
        os.kill(process.pid, number)
        return at


class SoftPlace(LocalPlace):
    """Ranks are processes of this machine, and their NICs are software."""

    SETTINGS = {"EPCOMM_IB_PROVIDER": "soft"}

    def environment(self, rank, num_ranks, backend):
        from epcomm._registry import BACKENDS

        settings = dict(self.SETTINGS)
        if any(row.pair and row.name == backend for row in BACKENDS):
            settings["EPCOMM_NODE_ID"] = f"node{rank % 2}"  # near and far peers in turn
        return settings


def _rank_environment(rank, num_ranks, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "EPCOMM_PORT": str(port),
        "EPCOMM_TIMEOUT_S": "30",
        **_ONE_THREAD,
    }


@contextlib.contextmanager
def environment(changes):
    """``os.environ`` with changes (None removes) while the block runs."""
    before = {name: os.environ.get(name) for name in changes}

    def put(values):
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(changes)
    try:
        yield
    finally:
        put(before)


# ------------------------------------------------------------------------------------------ inside a rank


class RankContext:
    """What a case function gets first.

    Attributes
    ----------
    rank, num_ranks : int
    backend : str
    state : dict
        Kept between cases of one pool.
    """

    def __init__(self, rank, num_ranks, backend):
        self.rank = rank
        self.num_ranks = num_ranks
        self.backend = backend
        self.state = {}
        self._open = []

    def comm(self, **kwargs):
        """A `Communicator` of the pool's ranks, closed after the case if the case does not do it."""
        import epcomm

        kwargs.setdefault("backend", self.backend)
        if self.on_gpu:
            kwargs.setdefault("device", 0)  # the rank's own, see LocalPlace.environment
        communicator = epcomm.Communicator(**kwargs)
        self._open.append(communicator)
        return communicator

    @property
    def on_gpu(self):
        """Whether the pool's backend has device memory."""
        return has_gpu_memory(self.backend)

    environment = staticmethod(environment)

    def close_all(self):
        """Close what the case left open, in order of creation (the same on all ranks)."""
        while self._open:
            self._open.pop(0).close()


def _load(module, path, qualname):
    """A function by name; its module is read from its file, so that tests need not be importable."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[module])
        except BaseException:
            del sys.modules[module]
            raise
    target = sys.modules[module]
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def _die_with_parent(parent):
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _rank_main(parent, rank, num_ranks, backend, conn, stacks):
    _die_with_parent(parent)
    with open(stacks, "w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        context = RankContext(rank, num_ranks, backend)
        conn.send(("ready", None))
        while True:
            try:
                message = conn.recv()
            except EOFError:
                return
            if message is None:
                return
            answer = _run_case(context, *message)
            try:
                conn.send(answer)
            except Exception:
                conn.send(("error", traceback.format_exc()))  # a value that does not pickle


def _run_case(context, module, path, qualname, kwargs):
    try:
        value = _load(module, path, qualname)(context, **kwargs)
        context.close_all()
        return "ok", value
    except BaseException:
        return "error", traceback.format_exc()


# -------------------------------------------------------------------------------------------- in the parent


class Case:
    """A case that all ranks run now; :meth:`wait` gathers it."""

    def __init__(self, pool, name, timeout_s, expect_deaths):
        self.pool = pool
        self.name = name
        self._timeout_s = timeout_s * pool.place.slowness
        self._deadline = time.monotonic() + self._timeout_s
        self._expect_deaths = frozenset(expect_deaths)

    def wait(self):
        """Values in rank order; :class:`RankDied` where a death was expected and happened.

        Raises
        ------
        RankError
            A rank failed, died unexpectedly, or the deadline passed. The pool is dead then.
        """
        pool = self.pool
        values, failures, missing = {}, {}, set(range(pool.num_ranks))
        while missing and time.monotonic() < self._deadline:
            waiting = {pool.conns[rank]: rank for rank in missing}
            waiting.update({pool.processes[rank].sentinel: rank for rank in missing})
            left = max(0.0, self._deadline - time.monotonic())
            ready = {waiting[thing] for thing in multiprocessing.connection.wait(list(waiting), left)}
            for rank in ready:
                kind, value = pool.receive(rank)
                missing.discard(rank)
                if kind == "ok":
                    values[rank] = value
                elif kind == "died" and rank in self._expect_deaths:
                    values[rank] = RankDied(value)
                else:
                    failures[rank] = f"died: {exit_text(value)}\n{pool.stack(rank)}" if kind == "died" else value
                    self._deadline = min(self._deadline, time.monotonic() + GRACE_S * pool.place.slowness)
        if not missing and not failures:
            if self._expect_deaths:
                pool.kill()
            return [values[rank] for rank in range(pool.num_ranks)]
        reports = [None] * pool.num_ranks
        for rank in missing:
            reports[rank] = "still running; its stacks:\n" + pool.stack(rank, ask=True)
        for rank, text in failures.items():
            reports[rank] = text
        pool.kill()
        late = f" within {self._timeout_s:g} s" if missing and not failures else ""
        raise RankError(f"{self.name} on {pool.num_ranks} ranks ({pool.backend}) did not end well{late}", reports)


class RankPool:
    """`num_ranks` spawned processes of one backend.

    Parameters
    ----------
    num_ranks : int
    backend : str
    env : mapping, optional
        More environment variables for the ranks (None removes one; a function is asked for each rank's).
    place : optional
        Where the ranks run, :class:`LocalPlace` unless given.
    """

    def __init__(self, num_ranks, backend="shm", env=None, place=None):
        self.num_ranks = num_ranks
        self.backend = backend
        self.place = place or LocalPlace()
        self.port = self.place.free_port()
        self.processes, self.conns = [], []
        self._folder = self.place.folder()
        try:
            for rank in range(num_ranks):
                own = {name: value(rank) if callable(value) else value for name, value in (env or {}).items()}
                changes = {**_rank_environment(rank, num_ranks, self.port),
                           **self.place.environment(rank, num_ranks, backend), **own}  # fmt: skip
                stacks = str(self._stack_file(rank))
                process, conn = self.place.start_rank(rank, num_ranks, backend, changes, stacks)
                self.processes.append(process)
                self.conns.append(conn)
            Case(self, "start", START_TIMEOUT_S, ()).wait()
        except BaseException:
            self.kill()
            raise

    def _stack_file(self, rank):
        return Path(self._folder.name) / f"stacks-{rank}"

    @property
    def alive(self):
        """Whether it can take another case."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def start(self, function, *, timeout_s=CASE_TIMEOUT_S, per_rank=None, expect_deaths=(), **kwargs):
        """Let every rank run ``function(context, **kwargs, **per_rank[rank])`` and return at once.

        Parameters
        ----------
        function : function of a module's top level
        timeout_s : float
            Deadline of the whole case.
        per_rank : list of dict, optional
            More keyword arguments by rank.
        expect_deaths : iterable of int
            Ranks that may die; the pool is given up afterwards.
        """
        for rank, conn in enumerate(self.conns):
            own = {**kwargs, **(per_rank[rank] if per_rank else {})}
            with contextlib.suppress(BrokenPipeError):  # seen as a death by wait()
                conn.send((function.__module__, function.__code__.co_filename, function.__qualname__, own))
        return Case(self, function.__qualname__, timeout_s, expect_deaths)

    def run(self, function, **kwargs):
        """:meth:`start` and wait: the values in rank order."""
        return self.start(function, **kwargs).wait()

    def signal(self, rank, number=signal.SIGKILL):
        """Send a signal to one rank."""
        return self.place.signal(self.processes[rank], number)

    def receive(self, rank):
        """One message of a rank whose pipe or sentinel is ready."""
        try:
            if self.conns[rank].poll(0):
                kind, value = self.conns[rank].recv()
                return "ok" if kind == "ready" else kind, value
        except (EOFError, ConnectionResetError):
            pass
        self.processes[rank].join(5)
        return "died", self.processes[rank].exitcode

    def stack(self, rank, ask=False):
        """What the rank's fault handler wrote; `ask` a living one to write it now."""
        path = self._stack_file(rank)
        if ask and self.processes[rank].is_alive():
            self.signal(rank, signal.SIGUSR1)
            end = time.monotonic() + 2.0 * self.place.slowness
            while time.monotonic() < end and not (path.exists() and path.stat().st_size):
                time.sleep(0.02)
            time.sleep(0.05)
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self):
        """End all ranks now. Idempotent."""
        for process in self.processes:
            process.kill()
        self._reap()

    def close(self):
        """Let the ranks leave by themselves, and end those that don't."""
        for conn in self.conns:
            with contextlib.suppress(OSError):
                conn.send(None)
        end = time.monotonic() + 5.0 * self.place.slowness
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def _reap(self):
        for process in self.processes:
            process.join(5)
            process.close()
        for conn in self.conns:
            conn.close()
        self.processes, self.conns = [], []
        self._folder.cleanup()


class PoolCache:
    """Pools by (backend, ranks), the least recently used closed when there would be too many processes."""

    def __init__(self, max_processes=MAX_PROCESSES, place=None):
        self.place = place or LocalPlace()
        self._max_processes = max_processes
        self._pools = {}

    def get(self, num_ranks, backend="shm", env=None):
        """A living pool; a dead one is replaced."""
        key = (backend, num_ranks, getattr(num_ranks, "nodes", None), tuple(sorted((env or {}).items())))
        pool = self._pools.pop(key, None)
        if pool is not None and not pool.alive:
            pool.kill()
            pool = None
        if pool is None:
            while self._pools and self.num_processes + num_ranks > self._max_processes:
                self._pools.pop(next(iter(self._pools))).close()
            pool = RankPool(num_ranks, backend, env, self.place)
        self._pools[key] = pool
        return pool

    @property
    def num_processes(self):
        """Processes of all pools kept."""
        return sum(pool.num_ranks for pool in self._pools.values())

    def close(self):
        """Close all pools."""
        while self._pools:
            self._pools.popitem()[1].close()


def processes_of_session():
    """(pid, command line) of other living processes that this session started, helpers of Python's own left out."""
    token = f"{SESSION_VARIABLE}={os.environ.get(SESSION_VARIABLE, '')}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if token not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if command and "resource_tracker" not in command:
            found.append((int(folder.name), command))
    return found
