"""The cases that need only epcomm: its own calls, and the memory-copy floor.

A case is made once per rank; ``trial()`` returns seconds by operation. Every timed section begins after a barrier, so
that the slowest rank's time is the time of the collective.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import epcomm
from epcomm.bench.workload import DTYPES, Workload

# Tokens that one step of the floor copies: their rows stay in the core's cache while they are copied again.
_BLOCK_BYTES = 256 * 1024


class WrongResult(RuntimeError):
    """A case gave wrong numbers: its time means nothing."""


def check(case: str, got: np.ndarray, workload: Workload) -> None:
    """Raise unless a case's combine gave the exact result."""
    wanted, given = (np.ascontiguousarray(array).view(np.uint8).ravel() for array in (workload.wanted(), got))
    wrong = int((given != wanted).sum()) if given.shape == wanted.shape else max(len(given), len(wanted))
    if wrong:
        raise WrongResult(f"{case}: combine of rank {workload.rank} differs from the exact result in {wrong} bytes")


def timed(barrier: Callable[[], Any], call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and value of a call that all ranks begin together."""
    barrier()
    begin = time.perf_counter()
    value = call()
    return time.perf_counter() - begin, value


class EpcommCase:
    """``layout``, ``dispatch``, ``combine`` and ``combine_buffer`` of one communicator.

    ``dispatch`` gives a lease (no copy). ``combine`` takes the expert outputs from ordinary memory,
    ``combine_buffer`` from the heap, where the experts would have written them.
    """

    def __init__(self, workload: Workload, settings: dict[str, Any]) -> None:
        shape = workload.shape
        self._workload = workload
        self.comm = epcomm.Communicator(
            num_experts=shape.experts,
            num_topk=shape.topk,
            hidden=shape.hidden,
            max_tokens_per_rank=max(1, shape.tokens),
            max_recv_tokens=max(1, workload.max_tokens_received),
            dtype=shape.dtype,
            backend=settings["backend"],
            device="cpu",
            num_sms=settings["sms"],
            timeout_s=settings["timeout_s"],
            options={"num_threads": settings["threads"]},
        )
        self._weighted = shape.layout == "expert"
        self._y = np.empty((0, shape.hidden), DTYPES[shape.dtype])
        self._z = np.empty((shape.tokens, shape.hidden), DTYPES[shape.dtype])
        self._checked = False

    def trial(self) -> dict[str, float]:
        comm, workload = self.comm, self._workload
        seconds = {}
        seconds["layout"], _ = timed(comm.barrier, lambda: comm.layout(workload.topk_idx))
        seconds["dispatch"], out = timed(comm.barrier, lambda: comm.dispatch(
            workload.x, workload.topk_idx, workload.topk_weights, layout=workload.shape.layout))
        if len(self._y) != len(out.x):
            self._y = np.array(out.x)  # every expert returns its input; the routing is the same in all trials
        seconds["combine"], _ = timed(comm.barrier, lambda: comm.combine(self._y, out.handle, out=self._z))
        if not self._checked:
            check("epcomm", self._z, workload)
        buffer = comm.combine_buffer(out.handle)
        buffer[:] = self._y
        seconds["combine_buffer"], _ = timed(comm.barrier, lambda: comm.combine(buffer, out.handle, out=self._z))
        if not self._checked:
            check("epcomm combine_buffer", self._z, workload)
            self._checked = True
        return seconds

    def describe(self) -> dict[str, Any]:
        return {"backend": self.comm.backend, "caps": sorted(self.comm.caps), "rows_sent": self._workload.rows_sent}

    def close(self) -> None:
        self.comm.close()


class FloorCase:
    """Plain memory copies of the bytes that dispatch and combine cannot do without.

    ``dispatch`` reads each of the rank's token rows from memory once and writes one row for each row that they become.
    ``combine`` reads those rows and writes one row per token. Both are ``np.copyto`` (memcpy) over blocks of tokens
    small enough to stay in cache, on all ranks at once, with as many threads as the communicator has.
    """

    def __init__(self, barrier: Callable[[], Any], workload: Workload, threads: int) -> None:
        shape = workload.shape
        self._barrier = barrier
        self._pool = ThreadPoolExecutor(threads)
        few, more = divmod(workload.rows_sent, max(1, shape.tokens))
        tokens = np.ones((shape.tokens, shape.row_bytes), np.uint8)
        rows = np.ones((workload.rows_sent, shape.row_bytes), np.uint8)
        # `more` tokens become one row more than the others.
        cut = more * (few + 1)
        groups = [(tokens[:more], rows[:cut].reshape(few + 1, more, shape.row_bytes)),
                  (tokens[more:], rows[cut:].reshape(few, shape.tokens - more, shape.row_bytes))]
        block = max(1, _BLOCK_BYTES // shape.row_bytes)
        blocks = [(t[i : i + block], r[:, i : i + block]) for t, r in groups for i in range(0, len(t), block)]
        self._shares = [share for share in (blocks[thread::threads] for thread in range(threads)) if share]

    def trial(self) -> dict[str, float]:
        return {"dispatch": timed(self._barrier, lambda: self._all(_spread))[0],
                "combine": timed(self._barrier, lambda: self._all(_gather))[0]}

    def _all(self, work: Callable[[Any], None]) -> None:
        if len(self._shares) == 1:
            work(self._shares[0])
        else:
            list(self._pool.map(work, self._shares))

    def close(self) -> None:
        self._pool.shutdown()


def _spread(share: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for tokens, rows in share:
        for copy in rows:
            np.copyto(copy, tokens)


def _gather(share: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for tokens, rows in share:
        for copy in rows:
            np.copyto(tokens, copy)
