"""A process of its own that evaluates expressions for a test: ``Worker`` in the parent, the script in the child."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STATE_WORD = 0  # offset of the state words in the tests' heaps
WORDS = 4096  # offset of signal words, 64 bytes apart
DATA = 8192
HEAP_BYTES = 1 << 16


class Failure(NamedTuple):
    """What an expression raised."""

    kind: str
    text: str
    peer: int | None


class Answer(NamedTuple):
    """Value or failure of an expression, and when it ended (``time.monotonic()``)."""

    value: Any
    failure: Failure | None
    at: float


class Worker:
    """One spawned process. Its namespace has the backend's module, ``b`` (set by :meth:`make`) and the helpers."""

    def __init__(self, *prefix: str, backend: str = "shm", environment: dict[str, str] | None = None) -> None:
        mine, theirs = Pipe()
        self.connection = mine
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
        env.update(environment or {})
        self.process = subprocess.Popen(
            [*prefix, sys.executable, os.path.abspath(__file__), str(theirs.fileno()), backend],
            pass_fds=[theirs.fileno()],
            env=env,
            cwd="/",
        )
        theirs.close()

    def send(self, expression: str, **values: Any) -> None:
        """Start evaluating; ``values`` are names in the expression."""
        self.connection.send((expression, values))

    def answer(self, timeout_s: float = 20.0) -> Answer:
        """What became of the oldest expression not answered yet."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"worker {self.process.pid} did not answer within {timeout_s} s")
        value, failure, at = self.connection.recv()
        return Answer(value, failure and Failure(*failure), at)

    def value(self, timeout_s: float = 20.0) -> Any:
        """As :meth:`answer`, for expressions that must not fail."""
        answer = self.answer(timeout_s)
        assert answer.failure is None, answer.failure
        return answer.value

    def do(self, expression: str, timeout_s: float = 20.0, **values: Any) -> Any:
        """Evaluate and return the value."""
        self.send(expression, **values)
        return self.value(timeout_s)

    def fails(self, expression: str, timeout_s: float = 20.0, **values: Any) -> Failure:
        """Evaluate and return what it raised."""
        self.send(expression, **values)
        answer = self.answer(timeout_s)
        assert answer.failure is not None, f"no exception but {answer.value!r}"
        return answer.failure

    def make(self, options: dict | None = None, heap_bytes: int = HEAP_BYTES) -> bytes:
        """A new backend ``b`` with a heap; returns its info."""
        return self.do("make(options, heap_bytes)", options=options or {}, heap_bytes=heap_bytes)

    def kill(self) -> float:
        """SIGKILL; returns when."""
        at = time.monotonic()
        os.kill(self.process.pid, signal.SIGKILL)
        return at

    def close(self) -> None:
        """End the process, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.connection.close()


def connect_all(workers: list[Worker], infos: list[bytes], timeout_s: float = 10.0) -> None:
    """Connect the backends ``b`` of all workers, which are the ranks in this order."""
    for rank, worker in enumerate(workers):
        worker.send("b.connect(rank, infos, 0, timeout_s)", rank=rank, infos=infos, timeout_s=timeout_s)
    for worker in workers:
        worker.value(timeout_s + 10)


def open_files() -> list[str]:
    """Targets of this process's descriptors."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(target for target in found if not target.startswith("/proc/"))


def mappings() -> int:
    """How many mappings of segments this process has."""
    with open("/proc/self/maps") as file:
        return sum("epcomm (deleted)" in line or "/epcomm-" in line for line in file)


def catch(call: Any, *args: Any) -> Exception | None:
    """What a call raises."""
    try:
        call(*args)
    except Exception as error:
        return error
    return None


def num_threads() -> int:
    """Threads of this process, native ones too."""
    return len(os.listdir("/proc/self/task"))


def main(connection: Connection, backend: str) -> None:
    """Evaluate what comes until the parent closes."""
    module = importlib.import_module(f"epcomm._{backend}")

    def make(options: dict, heap_bytes: int) -> bytes:
        names["b"] = module.Backend(options)
        names["b"].alloc_heap(heap_bytes)
        return names["b"].export_info()

    names = {**globals(), backend: module, "make": make}
    names["names"] = names
    while True:
        try:
            expression, values = connection.recv()
        except EOFError:
            return
        value, failure = None, None
        try:
            value = eval(expression, {**names, **values})
        except BaseException as error:
            failure = (type(error).__name__, str(error), getattr(error, "peer", None))
        at = time.monotonic()
        try:
            connection.send((value, failure, at))
        except Exception:  # a value that cannot travel
            connection.send((None, failure, at))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), sys.argv[2])
