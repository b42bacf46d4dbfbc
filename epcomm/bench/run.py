"""Takes the turns: starts the jobs, asks every case once per trial, collects seconds by case, operation and trial."""

import contextlib
import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any

from epcomm import _console, _create, _launch, config
from epcomm._bootstrap import launcher
from epcomm.bench import transport
from epcomm.bench.workload import Shape

WORKER = "epcomm.bench.ranks:BenchRank"
OWN_CASES = ("epcomm", "floor")
BASELINES = ("gloo", "mpi4py")
WARMUP = 2  # trials that are not counted: first touches, lazily made connections


@dataclass
class Measured:
    """``seconds[case][operation]`` is a list over trials of lists over ranks."""

    num_ranks: int
    threads: int
    described: list[dict[str, Any]]
    load: float  # processes that wanted a core in the minute before the run
    seconds: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    transport: list[dict[str, Any]] | None = None  # rows of `epcomm.bench.transport`
    speaks: bool = True  # whether this process is the one that reports


def measure(shape: Shape, settings: dict[str, Any], num_ranks: int, repeat: int, baselines: list[str]) -> Measured:
    """One run: `repeat` counted trials of every case.

    Parameters
    ----------
    shape, settings
        What is measured and how: ``backend``, ``sms``, ``threads`` (``None``: cores / ranks), ``timeout_s``
        and ``transport`` (whether it is measured too).
    num_ranks
        Ranks to start; a launcher's number wins.
    baselines
        Which of :data:`BASELINES` to compare with. One that cannot run here is skipped with its reason.
    """
    load = os.getloadavg()[0]
    found = launcher.find()
    skipped: dict[str, str] = {}
    joined = [] if found is None else _joined_baselines(found.name, baselines, skipped)
    local_ranks = num_ranks if found is None else config.get("LOCAL_WORLD_SIZE") or num_ranks
    options = _options(shape, settings, local_ranks, [*OWN_CASES, *joined])
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(_launch.join_or_start(WORKER, options, num_ranks, settings["timeout_s"]))
        jobs = dict.fromkeys(options["cases"], own)
        for baseline in baselines if found is None else ():
            try:
                started = _start(baseline, {**options, "cases": [baseline]}, num_ranks, settings["timeout_s"])
            except (_launch.RanksFailed, ImportError, OSError) as error:
                skipped[baseline] = str(error)
            else:
                jobs[baseline] = stack.enter_context(started)
        measured = Measured(own.num_ranks, options["settings"]["threads"], own.ask(["describe"]), load,
                            skipped=skipped, speaks=own.speaks)
        with _console.progress(f"{shape.mode}: {', '.join(jobs)}", WARMUP + repeat, silent=not own.speaks) as show:
            for trial in range(WARMUP + repeat):
                # Every other trial backwards, so that no case always follows the same one.
                for case in list(jobs)[:: -1 if trial % 2 else 1]:
                    answers = jobs[case].ask(["trial", case])
                    if trial >= WARMUP:
                        _add(measured.seconds.setdefault(case, {}), answers)
                show(trial + 1)
        if settings["transport"]:
            reason = _no_transport(measured)
            if reason is None:
                measured.transport = transport.measure(own.ask)
            else:
                measured.skipped["transport"] = reason
        return measured


def _no_transport(measured: Measured) -> str | None:
    """Why the transport is not measured, the same on all ranks."""
    if measured.num_ranks < 2:
        return "one rank has no peer"
    if "host_put" not in measured.described[0]["caps"]:
        return f"no host thread drives backend {measured.described[0]['backend']}"
    return None


def _options(shape: Shape, settings: dict[str, Any], local_ranks: int, cases: list[str]) -> dict[str, Any]:
    threads = settings["threads"] or _create.default_threads(max(1, local_ranks))
    return {"shape": shape.as_dict(), "settings": {**settings, "threads": threads}, "cases": cases}


def _joined_baselines(launched_by: str, baselines: list[str], skipped: dict[str, str]) -> list[str]:
    """Under a launcher only its own baseline runs: the ranks exist already."""
    own, module = ("gloo", "torch") if launched_by == "env" else ("mpi4py", "mpi4py")
    for baseline in baselines:
        if baseline != own:
            skipped[baseline] = f"the ranks are not those of {'torchrun' if baseline == 'gloo' else 'mpirun'}"
        elif importlib.util.find_spec(module) is None:
            skipped[baseline] = f"{module} is not installed"
    return [baseline for baseline in baselines if baseline not in skipped]


def _start(baseline: str, options: dict[str, Any], num_ranks: int, timeout_s: float) -> _launch.LocalRanks:
    module = {"gloo": "torch", "mpi4py": "mpi4py"}[baseline]
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{module} is not installed")
    mpirun = None
    if baseline == "mpi4py":
        mpirun = _launch.mpirun_command(num_ranks)
        if mpirun is None:
            raise ImportError("no mpirun on PATH (Debian: openmpi-bin)")
    return _launch.LocalRanks(WORKER, options, num_ranks, timeout_s, mpirun)


def _add(seconds: dict[str, list[list[float]]], answers: list[dict[str, float]]) -> None:
    for operation in answers[0]:
        seconds.setdefault(operation, []).append([answer[operation] for answer in answers])
