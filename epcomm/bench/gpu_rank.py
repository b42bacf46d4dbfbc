"""One rank of a benchmark on GPUs: its calls, the floors, and what torch and NCCL do, timed by CUDA events.

Every timed call starts after a barrier and a delay that is queued in front of it: all ranks have queued their calls by
then, so what is measured is the call's work on the device, waiting for peers included, not the host's way to it.
"""

import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import epcomm
from epcomm import _gpu, bootstrap, config, kernels
from epcomm._launch import Place
from epcomm.bench.cases import WrongResult
from epcomm.bench.workload import Shape, Workload

_DELAY_NS = 300_000
_WARMUP = 3
_COPIES = 3  # of the input, in turns: one would stay in the second-level cache
_FP8_GROUP = 128


def gpu_of(rank: int, count: int) -> int:
    """Index of a rank's GPU: the launcher's local rank, over the GPUs that this process sees."""
    return (config.get("LOCAL_RANK") if config.is_set("LOCAL_RANK") else rank) % count


def check_codes(case: str, codes: Any, scales: Any, rows: Any) -> None:
    """Raise unless torch's codes times scales are the rows: small integers, exact but for a scale's rounding."""
    import torch

    factors = scales.repeat_interleave(_FP8_GROUP, 1)[:, : rows.shape[1]]
    if not torch.allclose(codes.view(torch.float8_e4m3fn).float() * factors, rows.float(), rtol=1e-6, atol=0):
        raise WrongResult(f"{case}: codes differ from the exact result")


class GpuRank:
    """A worker of :mod:`epcomm._launch`.

    Requests: ``["describe"]``; ``["trials", sms, repeat]`` and ``["nccl_trials", repeat]``, answered with lists of
    microseconds by operation; ``["kernels", sms]``, with mean microseconds by kernel; ``["floors_of", sms]``, with
    GB/s; ``["host", repeat]``, with the microseconds that the host spends in a call.
    """

    def __init__(self, place: Place, shape: dict[str, Any], settings: dict[str, Any]) -> None:
        import torch

        self._torch = torch
        self._place = place
        self._workload = workload = Workload(Shape(**shape), place.rank, place.num_ranks)
        self._index = gpu_of(place.rank, torch.cuda.device_count())
        torch.cuda.set_device(self._index)
        made = workload.shape
        self.comm = epcomm.Communicator(
            num_experts=made.experts, num_topk=made.topk, hidden=made.hidden, max_tokens_per_rank=max(1, made.tokens),
            max_recv_tokens=max(1, workload.max_tokens_received), dtype=made.dtype, backend=settings["backend"],
            device=f"cuda:{self._index}", timeout_s=settings["timeout_s"])  # fmt: skip
        dtype = getattr(torch, made.dtype)
        x = torch.from_numpy(workload.x.view(np.uint8)).view(dtype).cuda()
        self._xs = [x.clone() for _ in range(_COPIES)]
        self._codes = [x.to(torch.float8_e4m3fn) for _ in range(_COPIES)]
        self._scales = torch.ones((made.tokens, -(-made.hidden // _FP8_GROUP)), device="cuda")
        self._idx = torch.from_numpy(workload.topk_idx).cuda()
        self._weights = torch.from_numpy(workload.topk_weights).cuda()
        self._z = torch.empty_like(x)
        out = self.comm.dispatch(x, self._idx, self._weights)
        self._handle = out.handle
        self._y = out.x.clone()  # every expert returns its input
        self._check("combine", self.comm.combine(self._y, self._handle, out=self._z).x)
        del out
        self._buffer = self.comm.combine_buffer(self._handle)
        self._buffer.copy_(self._y)
        self._delay = kernels.load(kernels.FLOOR, self._index).raw["epcomm_floor_delay"]
        self._floors = _Floors(self, settings["timeout_s"])
        self._nccl: Any = None

    # ---- requests

    def answer(self, request: list[Any]) -> Any:
        return getattr(self, "_" + request[0])(*request[1:])

    def _describe(self) -> dict[str, Any]:
        torch = self._torch
        told = torch.cuda.get_device_properties(self._index)
        return {"backend": self.comm.backend, "gpu": told.name, "uuid": str(told.uuid),
                "mps": _gpu.under_mps(self._index) or False, "sms": told.multi_processor_count,
                "torch": torch.__version__, "rows_sent": self._workload.rows_sent,
                "rows_to": self._workload.rows(self._workload.topk_idx).tolist()}

    def _operations(self, sms: int) -> dict[str, Callable[[int], Any]]:
        comm, handle, xs, codes = self.comm, self._handle, self._xs, self._codes
        made: dict[str, Callable[[int], Any]] = {
            "layout": lambda i: comm.layout(self._idx),
            "dispatch": lambda i: comm.dispatch(xs[i % _COPIES], handle=handle, num_sms=sms),
            "dispatch uncached": lambda i: comm.dispatch(xs[i % _COPIES], self._idx, self._weights, num_sms=sms),
            "dispatch copy": lambda i: comm.dispatch(xs[i % _COPIES], handle=handle, copy=True, num_sms=sms),
            "dispatch fp8": lambda i: comm.dispatch(codes[i % _COPIES], handle=handle, scales=self._scales,
                                                    num_sms=sms),
            "dispatch quantize": lambda i: comm.dispatch(xs[i % _COPIES], handle=handle, quantize="fp8", num_sms=sms),
            "combine buffer": lambda i: comm.combine(self._buffer, handle, out=self._z, num_sms=sms),
            "combine": lambda i: comm.combine(self._y, handle, out=self._z, num_sms=sms),
        }
        return made

    def _trials(self, sms: int, repeat: int) -> dict[str, list[float]]:
        operations = self._operations(sms)
        times: dict[str, list[float]] = {name: [] for name in operations}
        for trial in range(_WARMUP + repeat):
            for name in list(operations)[:: -1 if trial % 2 else 1]:
                taken = self.timed(partial(operations[name], trial))
                if trial >= _WARMUP:
                    times[name].append(taken)
        self._check("combine buffer", self.comm.combine(self._buffer, self._handle, out=self._z, num_sms=sms).x)
        for name in ("dispatch fp8", "dispatch quantize"):
            out = operations[name](0)
            check_codes(f"{name} of rank {self._place.rank}", out.x, out.scales, self._y)
        return times

    def timed(self, call: Callable[[], Any]) -> float:
        """Microseconds of the device, from the caller's stream's point of view."""
        torch = self._torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.comm.barrier()
        stream = torch.cuda.current_stream()
        with _cupy_stream(stream):
            self._delay((1,), (1,), (np.int64(_DELAY_NS),))
        begin.record()
        value = call()
        end.record()
        end.synchronize()
        del value
        return begin.elapsed_time(end) * 1e3

    def _host(self, repeat: int) -> dict[str, float]:
        """Median microseconds from a call to its return, with the device idle before it."""
        operations = self._operations(24)
        told = {}
        for name in ("dispatch", "dispatch uncached", "combine buffer"):
            times = []
            for trial in range(_WARMUP + repeat):
                self._torch.cuda.synchronize()
                self.comm.barrier()
                begin = time.perf_counter()
                value = operations[name](trial)
                times.append((time.perf_counter() - begin) * 1e6)
                del value
            told[name] = statistics.median(times[_WARMUP:])
        return told

    def _kernels(self, sms: int) -> dict[str, dict[str, float]]:
        """Mean microseconds of each kernel and copy of a call, by operation."""
        from torch.profiler import ProfilerActivity, profile

        told: dict[str, dict[str, float]] = {}
        repeat = 8
        for name, call in self._operations(sms).items():
            self.comm.barrier()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for trial in range(repeat):
                    call(trial)
                self._torch.cuda.synchronize()
            told[name] = {}
            for event in seen.key_averages():
                if event.device_time_total > 0:
                    told[name][event.key.split("(")[0].strip()] = event.device_time_total / repeat
        return told

    def _floors_of(self, sms: int) -> dict[str, float]:
        return self._floors.rates(sms)

    def _nccl_trials(self, repeat: int) -> dict[str, list[float]]:
        if self._nccl is None:
            self._nccl = _Nccl(self)
        return self._nccl.trials(repeat)

    def _check(self, case: str, z: Any) -> None:
        wanted = self._workload.wanted()
        got = z.cpu().view(self._torch.uint8).numpy()
        if not np.array_equal(got, wanted.view(np.uint8)):
            raise WrongResult(f"{case} of rank {self._place.rank} differs from the exact result")

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.close()
        self._floors.close()
        del self._buffer
        self.comm.close()


def _cupy_stream(stream: Any) -> Any:
    import cupy

    return cupy.cuda.ExternalStream(stream.cuda_stream)


class _Floors:
    """Plain copies to and from the next rank: by multiprocessors and by the copy engine, all ranks at once.

    The next rank's memory is mapped as the engine's is. With one GPU it is the same GPU's: no figure of a link.
    """

    def __init__(self, rank: GpuRank, timeout_s: float) -> None:
        import torch

        self._rank, self._torch = rank, torch
        shape = rank._workload.shape
        self._bytes = max(1, shape.tokens) * (-(-shape.row_bytes // 16) * 16)
        self._piece = min(-(-shape.row_bytes // 16) * 16, 14 * 1024)
        self._pieces = self._bytes // self._piece
        place = rank._place
        self._backend = importlib.import_module(f"epcomm._{rank.comm.backend}").Backend({"device": rank._index})
        begin = 1 << 16
        self._backend.alloc_heap(begin + self._bytes)
        with bootstrap.connect(None, timeout_s=timeout_s) as group:
            infos = group.all_gather(self._backend.export_info())
            self._backend.connect(place.rank, infos, 0, timeout_s)
        self._peer = self._backend.peer_ptr((place.rank + 1) % place.num_ranks, begin)
        self._here = self._backend.peer_ptr(place.rank, begin)
        self._own = torch.ones(self._bytes, dtype=torch.uint8, device="cuda")
        self._raw = kernels.load(kernels.FLOOR, rank._index).raw
        if self._torch.cuda.get_device_capability(rank._index)[0] >= 9:
            self._shared = 16 * self._piece
            self._raw["epcomm_floor_push"].max_dynamic_shared_size_bytes = self._shared
        else:
            self._shared = 0

    def rates(self, sms: int) -> dict[str, float]:
        """GB/s of each rank, median of several; one direction's bytes."""
        import cupy

        own, peer, pieces = self._own.data_ptr(), self._peer, np.int64(self._pieces)
        piece, total = np.int32(self._piece), self._pieces * self._piece
        stream = self._torch.cuda.current_stream()

        def launch(name: str, *arguments: Any, shared: int = 0) -> Callable[[], None]:
            def run() -> None:
                with _cupy_stream(stream):
                    self._raw[name]((sms,), (16 * 32,), arguments, shared_mem=shared)

            return run

        def engine() -> None:
            cupy.cuda.runtime.memcpyAsync(peer, own, total, 4, stream.cuda_stream)

        ways: dict[str, Callable[[], None]] = {
            "push": launch("epcomm_floor_push", peer, own, pieces, piece, np.int32(1), shared=self._shared),
            # What leaves as many multiprocessors: to a peer it would be the link's rate once that is less.
            "store": launch("epcomm_floor_push", self._here, own, pieces, piece, np.int32(0), shared=self._shared),
            "pull": launch("epcomm_floor_pull", own, peer, pieces, piece),
            "copy engine": engine,
        }
        told: dict[str, list[float]] = {name: [] for name in ways}
        for trial in range(9):
            for name, run in ways.items():
                taken = self._rank.timed(run)
                if trial >= 2:
                    told[name].append(total / taken / 1e3)
        return {name: statistics.median(values) for name, values in told.items()}

    def close(self) -> None:
        self._backend.close()


class _Nccl:
    """Rows gathered by destination, torch's all_to_all over NCCL, scattered and added: routing known beforehand.

    The rows lie where those of `rank` do; ``group`` is torch's name of another way to exchange them, for tests.
    """

    def __init__(self, rank: GpuRank, group: str = "nccl") -> None:
        import torch
        import torch.distributed as dist

        self._rank, self._torch, self._dist = rank, torch, dist
        workload, place = rank._workload, rank._place
        dist.init_process_group(group, rank=place.rank, world_size=place.num_ranks)
        destination, token = np.nonzero(workload.is_at(workload.topk_idx).T)
        self._token = torch.from_numpy(token).to(rank._xs[0].device)
        self._sent = np.bincount(destination, minlength=place.num_ranks).tolist()
        self._received = [int(workload.is_at(workload.picks_of(source)).sum(axis=0)[place.rank])
                          for source in range(place.num_ranks)]

    def _dispatch(self, x: Any) -> Any:
        rows = self._torch.empty((sum(self._received), x.shape[1]), dtype=x.dtype, device=x.device)
        self._dist.all_to_all_single(rows, x[self._token], self._received, self._sent)
        return rows

    def _dispatch_codes(self, codes: Any, scales: Any) -> tuple[Any, Any]:
        return self._dispatch(codes.view(self._torch.uint8)), self._dispatch(scales)

    def _combine(self, y: Any, like: Any) -> Any:
        torch = self._torch
        rows = torch.empty((len(self._token), y.shape[1]), dtype=y.dtype, device=y.device)
        self._dist.all_to_all_single(rows, y, self._sent, self._received)
        total = torch.zeros(like.shape, dtype=torch.float32, device=y.device)
        return total.index_add_(0, self._token, rows.float()).to(y.dtype)

    def trials(self, repeat: int) -> dict[str, list[float]]:
        rank = self._rank
        times: dict[str, list[float]] = {"dispatch": [], "dispatch fp8": [], "combine": []}
        for trial in range(_WARMUP + repeat):
            x, codes = rank._xs[trial % _COPIES], rank._codes[trial % _COPIES]
            y = self._dispatch(x)
            taken = {"dispatch": rank.timed(partial(self._dispatch, x)),
                     "dispatch fp8": rank.timed(partial(self._dispatch_codes, codes, rank._scales)),
                     "combine": rank.timed(partial(self._combine, y, x))}
            if trial == 0:
                rank._check("torch and NCCL", self._combine(y, x))
                check_codes(f"torch and NCCL, rank {rank._place.rank}", *self._dispatch_codes(codes, rank._scales), y)
            if trial >= _WARMUP:
                for name, us in taken.items():
                    times[name].append(us)
        return times

    def close(self) -> None:
        self._dist.destroy_process_group()
