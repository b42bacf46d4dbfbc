"""Each way into and out of the shared heap, against the memory-copy floor of the same run.

    python tests/perf/bench_shm.py [--repeat 30] [--json FILE]

2 ranks, 2,048 tokens each, hidden 7168 in bfloat16, top-8 of 256, unless told otherwise. The floor is what memcpy
needs for the bytes that the operation must at least read and write (see `epcomm.bench.cases.FloorCase`), on all ranks
at once. The goals are a dispatch of 0.6 and a combine of 0.5 of it.
"""

import argparse
import json
import os
import statistics
import sys
from typing import Any

import numpy as np

from epcomm import _console, _launch
from epcomm.bench.cases import EpcommCase, FloorCase, check, timed
from epcomm.bench.report import MIN_REPEATS
from epcomm.bench.workload import Shape, Workload

GOALS = {"dispatch, lease": 0.6, "combine, from memory": 0.5, "combine, from combine_buffer": 0.5,
         "combine, from leased x": 0.5}
FLOORS = {"dispatch": "floor of dispatch", "combine": "floor of combine"}


class Rank:
    """One rank: a trial runs every way once and the floors."""

    def __init__(self, place: _launch.Place, shape: dict[str, Any], settings: dict[str, Any]) -> None:
        self._workload = Workload(Shape(**shape), place.rank, place.num_ranks)
        self._case = EpcommCase(self._workload, settings)
        self._comm = self._case.comm
        self._floor = FloorCase(self._comm.barrier, self._workload, settings["threads"])
        self._z = np.empty_like(self._workload.x)
        self._y: Any = None

    def answer(self, request: str) -> dict[str, Any]:
        return self._comm.stats() if request == "stats" else self._trial()

    def _trial(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for copy, name in ((True, "dispatch, copy"), (False, "dispatch, lease")):
            seconds[name], out = self._timed(lambda copy=copy: self._comm.dispatch(
                self._workload.x, self._workload.topk_idx, self._workload.topk_weights,
                layout=self._workload.shape.layout, copy=copy))
        if self._y is None:
            self._y = np.array(out.x)
        seconds["combine, from memory"] = self._combine(self._y, out.handle)
        buffer = self._comm.combine_buffer(out.handle)
        buffer[:] = self._y
        seconds["combine, from combine_buffer"] = self._combine(buffer, out.handle)
        seconds["combine, from leased x"] = self._combine(out.x, out.handle)
        floor = self._floor.trial()
        return seconds | {FLOORS[operation]: floor[operation] for operation in floor}

    def _timed(self, call: Any) -> tuple[float, Any]:
        return timed(self._comm.barrier, call)

    def _combine(self, y: Any, handle: Any) -> float:
        self._z[:] = 0
        seconds, _ = self._timed(lambda: self._comm.combine(y, handle, out=self._z))
        check("combine", self._z, self._workload)
        return seconds

    def close(self) -> None:
        self._floor.close()
        self._case.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", choices=("rank", "expert"), default="rank")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", metavar="FILE")
    told = parser.parse_args()
    shape = Shape("train", told.tokens, told.hidden, told.experts, told.topk, told.dtype, told.layout)
    settings = {"backend": "shm", "sms": None, "threads": told.threads, "timeout_s": 120.0}
    load = os.getloadavg()[0]
    options = {"shape": shape.as_dict(), "settings": settings}
    with _launch.LocalRanks("bench_shm:Rank", options, told.ranks, timeout_s=120) as ranks:
        ranks.ask("trial")
        ranks.ask("trial")
        trials = []
        with _console.progress("trials", told.repeat) as show:
            for done in range(1, told.repeat + 1):
                trials.append(ranks.ask("trial"))
                show(done)
        stats = ranks.ask("stats")
    times = {name: [max(rank[name] for rank in trial) for trial in trials] for name in trials[0][0]}
    medians = {name: statistics.median(values) for name, values in times.items()}
    shares = {name: medians[FLOORS[name.split(",")[0]]] / median for name, median in medians.items() if "," in name}
    rows = []
    for name in sorted(medians, key=lambda name: ("dispatch" not in name, "floor" not in name)):
        goal, share = GOALS.get(name), shares.get(name)
        verdict = "" if goal is None or told.repeat < MIN_REPEATS else "met" if share >= goal else "missed"
        times_ms = (value * 1e3 for value in (medians[name], np.percentile(times[name], 95), min(times[name])))
        rows.append((name, *(f"{value:.2f}" for value in times_ms), "" if share is None else f"{share:.2f}",
                     "" if goal is None else f"{goal:.2f}", verdict))
    _console.print_table(f"{told.ranks} ranks x {told.tokens} x {told.hidden} {told.dtype}, {told.layout} layout, "
                         f"{told.threads} thread(s), {told.repeat} repeats, slowest rank of each",
                         ("what", "median ms", "p95 ms", "least ms", "share of floor", "goal", ""), rows,
                         right=range(1, 6), caption=f"load before the run: {load:.1f}; a busy machine tells little")
    if told.json:
        report = {"shape": shape.as_dict(), "times_s": times, "shares": shares, "stats": stats, "load_before": load}
        with open(told.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
