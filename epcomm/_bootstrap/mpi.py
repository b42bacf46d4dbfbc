"""The group over an `mpi4py.MPI.Comm`: its own all-gather, on buffers."""

import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from epcomm._bootstrap.deadline import Deadline, timed_out
from epcomm._bootstrap.group import Group, lost
from epcomm.errors import InvalidArgumentError

_ROUND_BYTES = 1 << 26  # received in one step, all ranks together; far below the 2^31 of MPI's counts
_LONGEST_SLEEP_S = 0.01
_ABANDONED: list[Any] = []  # buffers of requests that never ended: MPI may still write to them


def recognises(group: object) -> bool:
    """Whether an object is an MPI communicator; imports nothing."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(group, mpi.Comm)


def world(start: bool) -> Any:
    """`COMM_WORLD`, or None where mpi4py is missing or MPI has ended.

    Parameters
    ----------
    start : bool
        Import mpi4py, and so start MPI, if that has not happened yet.
    """
    if "mpi4py.MPI" not in sys.modules:
        if not start or importlib.util.find_spec("mpi4py") is None:
            return None
        try:
            importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError):
            return None
    mpi = sys.modules["mpi4py.MPI"]
    return mpi.COMM_WORLD if mpi.Is_initialized() and not mpi.Is_finalized() else None


class MpiGroup(Group):
    """Ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        An intra-communicator; the caller keeps it alive and does not free it earlier.
    """

    kind = "mpi"

    def __init__(self, comm: Any, timeout_s: float) -> None:
        self._mpi: Any = sys.modules["mpi4py.MPI"]
        if comm == self._mpi.COMM_NULL:
            raise InvalidArgumentError("group: MPI.COMM_NULL: this process is not a member; call on members only")
        if comm.Is_inter():
            raise InvalidArgumentError("group: an MPI inter-communicator; expected an intra-communicator")
        self._comm = comm
        super().__init__(comm.Get_rank(), comm.Get_size(), timeout_s)

    def _exchange(self, payload: bytes, what: str, deadline: Deadline) -> Sequence[bytes]:
        lengths = np.zeros(self.num_ranks, np.int64)
        mine = np.array([len(payload)], np.int64)
        self._finish([mine, lengths], functools.partial(self._comm.Iallgather, mine, lengths), what, deadline)
        received = [bytearray() for _ in range(self.num_ranks)]
        width = max(1, _ROUND_BYTES // self.num_ranks)
        # All ranks know the longest, so all make the same number of steps.
        for start in range(0, int(lengths.max()), width):
            counts = np.clip(lengths - start, 0, width)
            ends = np.cumsum(counts)
            part = np.frombuffer(payload[start : start + width], np.uint8)
            gathered = np.empty(int(ends[-1]), np.uint8)
            spec = [gathered, counts.tolist(), (ends - counts).tolist(), self._mpi.BYTE]
            sent = [part, len(part), self._mpi.BYTE]
            begin = functools.partial(self._comm.Iallgatherv, sent, spec)
            self._finish([part, gathered], begin, what, deadline)
            for rank, end in enumerate(ends.tolist()):
                received[rank] += gathered[end - int(counts[rank]) : end].tobytes()
        return [bytes(part) for part in received]

    def _finish(self, buffers: list[Any], begin: Any, what: str, deadline: Deadline) -> None:
        """Start a non-blocking collective and test it until it is done: a blocking one would not see signals."""
        request = None
        try:
            request = begin()
            pause_s = 0.0
            while not request.Test():
                self._check_closing(what)
                if deadline.passed():
                    raise timed_out(what, deadline, [], self.num_ranks, "MPI does not tell who is missing")
                time.sleep(min(pause_s, deadline.tick()))
                pause_s = min(1.5 * pause_s + 1e-5, _LONGEST_SLEEP_S)
        except self._mpi.Exception as error:
            _ABANDONED.append((request, buffers))
            raise lost(f"{what}: MPI failed: {error}", None) from error
        except BaseException:
            _ABANDONED.append((request, buffers))
            raise

    def _release(self) -> None:
        self._comm = None

    def _leave(self) -> None:
        self._release()
