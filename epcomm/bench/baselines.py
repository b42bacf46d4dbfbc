"""What a user would do without epcomm: gather rows by destination, all-to-all them, scatter and add them back.

Both cases send what epcomm's layout sends (rank layout: one row per token and destination rank, with its picks and
weights; expert layout: one row per pick, sorted by expert on arrival), and sum in float32 with one rounding at the end,
as epcomm does. Their buffers are fresh in each call, as such code is mostly written, or kept from the first call on,
which saves the page faults; `--baseline-buffers` chooses.

``mpi4py`` is NumPy around ``Alltoallv``; ``gloo`` is torch around ``all_to_all_single``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from epcomm.bench.cases import check, timed
from epcomm.bench.workload import DTYPES, Workload


class _Buffers:
    """Arrays for one call each, or made at the first call and kept. ``make(shape, dtype)`` makes one."""

    def __init__(self, settings: dict[str, Any], make: Callable[[tuple[int, ...], Any], Any]) -> None:
        self._keep = settings["baseline_buffers"] == "kept"
        self._make = make
        self._kept: dict[str, Any] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        if not self._keep:
            return self._make(shape, dtype)
        kept = self._kept.get(name)
        if kept is None or kept.shape != shape or kept.dtype != dtype:
            kept = self._kept[name] = self._make(shape, dtype)
        return kept


def sending_order(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Picks (rank layout: tokens) in the order in which their rows are sent, and the rows for each rank."""
    if workload.shape.layout == "rank":
        destination, token = np.nonzero(workload.is_at(workload.topk_idx).T)
        return token, np.bincount(destination, minlength=workload.num_ranks)
    expert = workload.topk_idx.ravel()
    order = np.argsort(expert, kind="stable")
    return order, np.bincount(workload.owner[expert], minlength=workload.num_ranks)


class MpiCase:
    """NumPy and mpi4py."""

    def __init__(self, workload: Workload, settings: dict[str, Any]) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._workload = MPI, MPI.COMM_WORLD, workload
        self._buffers = _Buffers(settings, np.empty)
        self._checked = False
        shape = workload.shape
        self._dtype = DTYPES[shape.dtype]
        if shape.layout == "rank":  # what the receiver must know of a row: its picks and weights, or its expert
            self._told = np.concatenate([workload.topk_idx.astype(np.int32), workload.topk_weights.view(np.int32)], 1)
        else:
            self._told = workload.topk_idx.astype(np.int32).reshape(-1, 1)

    def trial(self) -> dict[str, float]:
        barrier, seconds = self._comm.Barrier, {}
        seconds["layout"], (order, counts) = timed(barrier, lambda: sending_order(self._workload))
        seconds["dispatch"], (rows, back) = timed(barrier, lambda: self._dispatch(order, counts))
        seconds["combine"], z = timed(barrier, lambda: self._combine(rows, order, counts, *back))
        if not self._checked:
            check("mpi4py", z, self._workload)
            self._checked = True
        return seconds

    def _exchange(self, name: str, rows: np.ndarray, counts: np.ndarray, received: np.ndarray) -> np.ndarray:
        out = self._buffers.get(name, (int(received.sum()), rows.shape[1]), rows.dtype)
        row = self._mpi.BYTE.Create_contiguous(rows.shape[1] * rows.itemsize).Commit()  # counts rows: no 2^31 limit
        self._comm.Alltoallv([rows, (counts, _starts(counts)), row], [out, (received, _starts(received)), row])
        row.Free()
        return out

    def _dispatch(self, order: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, tuple]:
        received = np.empty_like(counts)
        self._comm.Alltoall(counts, received)
        per_token = self._workload.shape.layout == "rank"
        x = self._workload.x
        token = order if per_token else order // self._workload.shape.topk
        send = np.take(x, token, axis=0, out=self._buffers.get("send", (len(order), x.shape[1]), x.dtype), mode="clip")
        rows = self._exchange("rows", send, counts, received)
        told = self._exchange("told", self._told[order], counts, received)
        if per_token:
            return rows, (received, None)
        arrival = np.argsort(told[:, 0], kind="stable")
        grouped = self._buffers.get("grouped", rows.shape, rows.dtype)
        return np.take(rows, arrival, axis=0, out=grouped, mode="clip"), (received, arrival)

    def _combine(self, y: np.ndarray, order: np.ndarray, counts: np.ndarray, received: np.ndarray,
                 arrival: np.ndarray | None) -> np.ndarray:
        if arrival is not None:
            ungrouped = self._buffers.get("ungrouped", y.shape, y.dtype)
            ungrouped[arrival] = y
            y = ungrouped
        rows = self._exchange("back", y, received, counts)
        shape = self._workload.x.shape
        total = self._buffers.get("total", shape, np.float32)
        total[:] = 0
        if arrival is None:
            for first, last in zip(_starts(counts), np.cumsum(counts), strict=True):  # a token once per rank
                total[order[first:last]] += rows[first:last].astype(np.float32)
        else:
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            for k, picked in enumerate(place.reshape(len(total), -1).T):
                total += self._workload.topk_weights[:, k, None] * rows[picked].astype(np.float32)
        out = self._buffers.get("out", shape, self._dtype)
        out[:] = total
        return out

    def close(self) -> None:
        pass  # mpi4py finalises at exit


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)[:-1]])


class GlooCase:
    """torch and its gloo process group."""

    def __init__(self, workload: Workload, settings: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._workload = torch, dist, workload
        torch.set_num_threads(settings["threads"])
        dist.init_process_group("gloo", rank=workload.rank, world_size=workload.num_ranks)
        self._buffers = _Buffers(settings, lambda shape, dtype: torch.empty(shape, dtype=dtype))
        self._checked = False
        dtype = getattr(torch, workload.shape.dtype)
        self._x = torch.from_numpy(workload.x.view(np.uint8)).view(dtype)
        self._weights = torch.from_numpy(workload.topk_weights)
        told = torch.from_numpy(workload.topk_idx.astype(np.int32))
        if workload.shape.layout == "rank":
            self._told = torch.cat([told, self._weights.view(torch.int32)], 1)
        else:
            self._told = told.reshape(-1, 1)

    def trial(self) -> dict[str, float]:
        barrier, seconds = self._dist.barrier, {}
        seconds["layout"], (order, counts) = timed(barrier, self._layout)
        seconds["dispatch"], (rows, back) = timed(barrier, lambda: self._dispatch(order, counts))
        seconds["combine"], z = timed(barrier, lambda: self._combine(rows, order, counts, *back))
        if not self._checked:
            check("gloo", z.view(self._torch.uint8).numpy(), self._workload)
            self._checked = True
        return seconds

    def _layout(self) -> tuple[Any, list[int]]:
        order, counts = sending_order(self._workload)
        return self._torch.from_numpy(order), counts.tolist()

    def _exchange(self, name: str, rows: Any, counts: list[int], received: list[int]) -> Any:
        out = self._buffers.get(name, (sum(received), rows.shape[1]), rows.dtype)
        # Bytes: gloo does not know every dtype.
        self._dist.all_to_all_single(out.view(self._torch.uint8), rows.view(self._torch.uint8), received, counts)
        return out

    def _dispatch(self, order: Any, counts: list[int]) -> tuple[Any, tuple]:
        torch, per_token = self._torch, self._workload.shape.layout == "rank"
        received = torch.empty(len(counts), dtype=torch.int64)
        self._dist.all_to_all_single(received, torch.tensor(counts))
        received = received.tolist()
        token = order if per_token else order // self._workload.shape.topk
        send = self._buffers.get("send", (len(order), self._x.shape[1]), self._x.dtype)
        rows = self._exchange("rows", torch.index_select(self._x, 0, token, out=send), counts, received)
        told = self._exchange("told", self._told[order], counts, received)
        if per_token:
            return rows, (received, None)
        arrival = torch.argsort(told[:, 0], stable=True)
        grouped = self._buffers.get("grouped", rows.shape, rows.dtype)
        return torch.index_select(rows, 0, arrival, out=grouped), (received, arrival)

    def _combine(self, y: Any, order: Any, counts: list[int], received: list[int], arrival: Any) -> Any:
        torch = self._torch
        if arrival is not None:
            y = self._buffers.get("ungrouped", y.shape, y.dtype).index_copy_(0, arrival, y)
        rows = self._exchange("back", y, received, counts)
        wide = self._buffers.get("wide", rows.shape, torch.float32).copy_(rows)
        token = order
        if arrival is not None:
            wide *= self._weights.reshape(-1, 1)[order]
            token = order // self._workload.shape.topk
        total = self._buffers.get("total", self._x.shape, torch.float32).zero_().index_add_(0, token, wide)
        return self._buffers.get("out", self._x.shape, self._x.dtype).copy_(total)

    def close(self) -> None:
        self._dist.destroy_process_group()
