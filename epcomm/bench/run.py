"""Takes the turns: starts the jobs, asks every case once per trial, collects seconds by case, operation and trial."""

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from epcomm import _launch, config
from epcomm._bootstrap import launcher
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
    seconds: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    speaks: bool = True  # whether this process is the one that reports


def measure(shape: Shape, settings: dict[str, Any], num_ranks: int, repeat: int, baselines: list[str],
            progress: Callable[[str, int], Any]) -> Measured:
    """One run: `repeat` counted trials of every case.

    Parameters
    ----------
    shape, settings
        What is measured and how: ``backend``, ``sms``, ``threads`` (``None``: cores / ranks) and ``timeout_s``.
    num_ranks
        Ranks to start; a launcher's number wins.
    baselines
        Which of :data:`BASELINES` to compare with. One that cannot run here is skipped with its reason.
    progress
        ``epcomm._console.progress`` or the like.
    """
    with contextlib.ExitStack() as stack:
        skipped: dict[str, str] = {}
        jobs: dict[str, Any] = {}
        found = launcher.find()
        if found is not None:
            cases = [*OWN_CASES, *_joined_baselines(found.name, baselines, skipped)]
            options = _options(shape, settings, config.get("LOCAL_WORLD_SIZE") or num_ranks, cases)
            job = stack.enter_context(_launch.JoinedRanks(WORKER, options, settings["timeout_s"]))
            jobs = dict.fromkeys(cases, job)
            speaks = job.rank == 0
        else:
            options = _options(shape, settings, num_ranks, list(OWN_CASES))
            job = stack.enter_context(_launch.LocalRanks(WORKER, options, num_ranks, settings["timeout_s"]))
            jobs = dict.fromkeys(OWN_CASES, job)
            for baseline in baselines:
                try:
                    started = _start(baseline, {**options, "cases": [baseline]}, num_ranks, settings["timeout_s"])
                except (_launch.RanksFailed, ImportError, OSError) as error:
                    skipped[baseline] = str(error)
                else:
                    jobs[baseline] = stack.enter_context(started)
            speaks = True
        measured = Measured(job.num_ranks, options["settings"]["threads"], job.ask(["describe"]), skipped=skipped,
                            speaks=speaks)
        with progress(f"{shape.mode}: {', '.join(jobs)}", WARMUP + repeat) if speaks else _silent() as show:
            for trial in range(WARMUP + repeat):
                # Every other trial backwards, so that no case always follows the same one.
                for case in list(jobs)[:: -1 if trial % 2 else 1]:
                    answers = jobs[case].ask(["trial", case])
                    if trial >= WARMUP:
                        _add(measured.seconds.setdefault(case, {}), answers)
                show(trial + 1)
        return measured


@contextlib.contextmanager
def _silent() -> Any:
    yield lambda done: None


def _options(shape: Shape, settings: dict[str, Any], local_ranks: int, cases: list[str]) -> dict[str, Any]:
    threads = settings["threads"] or max(1, len(os.sched_getaffinity(0)) // max(1, local_ranks))
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
