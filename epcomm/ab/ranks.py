"""What one rank of an A/B run does: opens both sides and runs the measurement that it is asked for."""

import time
from pathlib import Path
from typing import Any

import numpy as np

import epcomm
from epcomm import _host, _measure, config
from epcomm._launch import Place
from epcomm.bench.cases import check, timed
from epcomm.bench.workload import DTYPES, Shape, Workload

_WORDS = 4096  # bytes of scratch memory that hold signal words
_WARMUP = 3  # messages of a measurement that are not counted


def _thread_ids() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


class Meter:
    """CPU seconds by name of the native threads that one side has made; all the rest is the ``caller``'s.

    Both sides live in this process, and threads of the other one take time even when it is idle: they are in no row.

    Parameters
    ----------
    before : set of int
        ``Meter.threads()`` before the side was made. The meter is made right after it.
    """

    threads = staticmethod(_thread_ids)

    def __init__(self, before: set[int]) -> None:
        self._own = _thread_ids() - before
        self._others: set[int] = set()
        self._begin: dict[str, float] = {}

    def start(self) -> None:
        self._others = _thread_ids() - self._own
        self._begin = self._seconds()

    def spent(self, share: int = 1) -> dict[str, float]:
        """Since `start`, divided by `share`; without names that took none."""
        self._own |= _thread_ids() - self._others  # made meanwhile: only this side was at work
        spent = {name: (seconds - self._begin.get(name, 0.0)) / share for name, seconds in self._seconds().items()}
        return {name: seconds for name, seconds in spent.items() if seconds > 0}

    def _seconds(self) -> dict[str, float]:
        own = Path("/proc/self/comm").read_text().strip()
        seconds = {"caller": time.process_time()}  # threads that have ended count there too
        for thread in _thread_ids():
            try:
                name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
                # Linux: the CPU clock of a thread by its id, exact where /proc counts ticks.
                used = time.clock_gettime(~thread << 3 | 6)
            except OSError:  # it ended meanwhile
                continue
            if name == own:
                continue
            seconds["caller"] -= used
            if thread in self._own:
                seconds[name] = seconds.get(name, 0.0) + used
        return seconds


class Wire:
    """One side's transport between ranks 0 and 1, measured without any call of the communicator."""

    def __init__(self, place: Place, side: dict[str, Any], settings: dict[str, Any]) -> None:
        self._place, self._settings = place, settings
        self._moves = side["environment"].get("EPCOMM_SOFTHCA_MOVER") != "null"
        largest = max(settings["sizes"])
        before = Meter.threads()
        # One slot of the heap must hold a message of the largest size in and out on every channel.
        rows = 2 * settings["max_channels"]
        with config.changed(side["environment"]):
            self.comm = epcomm.Communicator(
                num_experts=place.num_ranks, num_topk=1, hidden=largest, max_tokens_per_rank=rows, max_recv_tokens=rows,
                dtype="uint8", num_slots=1, num_channels=settings["max_channels"], backend=side["backend"],
                timeout_s=settings["timeout_s"])
        self._meter = Meter(before)
        inside: Any = self.comm  # beneath its calls: the transport, and where in the heap nothing else lies
        sizes = _host.heap_bytes(inside._made.shape)
        self._scratch = sizes["control"] + sizes["staging"]
        self._backend = inside._engine.backend
        self._round_trips = 0

    def flow(self, channel: int, size: int) -> dict[str, int]:
        largest = max(self._settings["sizes"])
        begin = self._scratch + _WORDS
        return {"peer": 1 - self._place.rank, "channel": channel, "src": begin + channel * largest,
                "dst": begin + (self._settings["max_channels"] + channel) * largest, "size_bytes": size,
                "word": self._scratch + 64 * (1 + channel)}

    def measure(self, what: str, size: int, channels: int, count: int) -> dict[str, Any] | None:
        if self._moves:  # else nothing arrives, so nobody can answer
            self.comm.barrier()
        if self._place.rank > 1:
            return None
        timeout_s = self._settings["timeout_s"]
        sender = self._place.rank == 0
        if what == "put_signal":
            flow = {**self.flow(0, size), "word": self._scratch}
            seconds = _measure.round_trips(self._backend, flow, sender, self._round_trips, count + _WARMUP, timeout_s)
            self._round_trips += count + _WARMUP
            return {"value": float(np.median(seconds[_WARMUP:])) / 2} if sender else None
        if not sender:
            return None
        if what == "put":
            seconds = _measure.completions(self._backend, self.flow(0, size), False, count + _WARMUP, timeout_s)
            return {"value": float(np.median(seconds[_WARMUP:]))}
        flows = [self.flow(channel, size) for channel in range(channels)]
        self._meter.start()
        whole = _measure.stream(self._backend, flows, what == "rate", count, timeout_s)
        messages = count * channels
        return {"value": messages / whole if what == "rate" else messages * size / whole,
                "cpu": self._meter.spent(messages)}

    def close(self) -> None:
        self._backend = None
        self.comm.close()


class Calls:
    """One side's dispatch and combine, checked against the exact result once."""

    def __init__(self, workload: Workload, side: dict[str, Any], settings: dict[str, Any]) -> None:
        shape = workload.shape
        before = Meter.threads()
        with config.changed(side["environment"]):
            self.comm = epcomm.Communicator(
                num_experts=shape.experts, num_topk=shape.topk, hidden=shape.hidden,
                max_tokens_per_rank=max(1, shape.tokens), max_recv_tokens=max(1, workload.max_tokens_received),
                dtype=shape.dtype, num_channels=settings["call_channels"], backend=side["backend"],
                timeout_s=settings["timeout_s"])
        self._meter = Meter(before)
        self._workload, self._side = workload, side
        self._z = np.empty((shape.tokens, shape.hidden), DTYPES[shape.dtype])
        self._checked = False

    def measure(self, what: str) -> dict[str, Any]:
        comm, work = self.comm, self._workload
        self._meter.start()
        dispatch, out = timed(comm.barrier, lambda: comm.dispatch(
            work.x, work.topk_idx, work.topk_weights, layout=work.shape.layout))
        y = np.array(out.x)
        combine, _ = timed(comm.barrier, lambda: comm.combine(y, out.handle, out=self._z))
        comm.barrier()
        used = self._meter.spent()
        if not self._checked:
            check(self._side["backend"], self._z, work)
            self._checked = True
        return {"dispatch": dispatch, "combine": combine, "cpu": used}

    def close(self) -> None:
        self.comm.close()


class AbRank:
    """A worker of :mod:`epcomm._launch`. Requests: ``["describe"]`` and ``["measure", side, [arguments]]``."""

    def __init__(self, place: Place, phase: str, sides: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        self._sides: list[Any] = []
        try:
            for side in sides:
                if phase == "wire":
                    self._sides.append(Wire(place, side, settings))
                else:
                    workload = Workload(Shape(**settings["shape"]), place.rank, place.num_ranks)
                    self._sides.append(Calls(workload, side, settings))
        except BaseException:
            self.close()
            raise

    def answer(self, request: list[Any]) -> Any:
        if request[0] == "describe":
            return [{"backend": side.comm.backend, "caps": sorted(side.comm.caps), "plan": side.comm.plan()}
                    for side in self._sides]
        return self._sides[request[1]].measure(*request[2])

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._sides = []
