"""``python -m epcomm bench --device cuda``: starts the ranks, sweeps the multiprocessors, reports against floors.

A report has a run for each number of ranks. Ranks may share a GPU, and there may be one rank: everything runs, and the
report says that it is no figure of a link.
"""

import importlib.util
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from epcomm import _console, _launch
from epcomm._version import __version__
from epcomm.bench.workload import DTYPES, Shape

SCHEMA = 2
WORKER = "epcomm.bench.gpu_rank:GpuRank"
DEFAULT_SMS = (8, 16, 24, 48)
OPERATIONS = ("layout", "dispatch", "dispatch uncached", "dispatch copy", "dispatch fp8", "dispatch quantize",
              "combine buffer", "combine")
DEFINITIONS = {
    "time": "microseconds of the device by events on the caller's stream, from a start that a barrier and a queued "
            "delay align; a trial's time is its slowest rank's, the median is over trials",
    "least": "the same of each trial's quickest rank: it started last and waited for nobody's start, so that what lies "
             "between it and the median is how far apart the ranks began",
    "dispatch": "cached routing, a view of the heap; `uncached` with the layout pass and counts, `copy` into the "
                "caller's memory, `fp8` codes with scales given, `quantize` codes and scales made on the way",
    "combine": "expert outputs in ordinary memory; `combine buffer` in the heap, where experts can write them",
    "push, pull": "plain copies of one rank's token rows to and from the next rank's memory by as many "
                  "multiprocessors; `store` writes alone, to own memory, where no link holds them up; `copy engine` "
                  "is the driver's copy to the next rank; all ranks at once",
    "shared": "ranks that share a GPU take turns on it, and times are those of the turns; under CUDA MPS they run side "
              "by side, each on as many multiprocessors as the call takes, and divide the memory's rate, as the rates "
              "measured here do; neither crosses a link",
    "floor": "max(bytes that leave or reach a GPU / copy engine's rate, bytes stored / store rate of as many "
             "multiprocessors), all measured in this run",
    "share": "floor / median",
    "GB/s": "bytes of the rows that a rank receives in dispatch, own ones included, mean over ranks, / median",
    "nccl": "torch: rows gathered by destination, all_to_all_single, scattered and added; routing known beforehand, "
            "as many multiprocessors as NCCL takes; codes and scales go one after the other; its floor is that of "
            "the most multiprocessors measured",
    "host": "median microseconds from a call to its return, with an idle device",
}  # fmt: skip


def why_not() -> str | None:
    """Why nothing can be measured here, or None."""
    for module in ("torch", "cupy"):
        if importlib.util.find_spec(module) is None:
            return f"--device cuda needs {module}, which is not installed"
    import torch

    return None if torch.cuda.is_available() else "--device cuda: torch finds no GPU"


def begin(shape: Shape, repeat: int) -> dict[str, Any]:
    """A report without runs."""
    return {"schema": SCHEMA, "version": __version__, "shape": shape.as_dict(), "repeat": repeat,
            "definitions": DEFINITIONS, "runs": [], "failed": {}}


def write(report: dict[str, Any], path: str) -> None:
    """Write a report, so that no moment shows half of one."""
    part = f"{path}.{os.getpid()}.part"
    Path(part).write_text(json.dumps(report, indent=2), encoding="utf-8")
    os.replace(part, path)


def read(paths: Iterable[str]) -> dict[str, Any]:
    """Reports that were written before, as one.

    Raises
    ------
    ValueError
        A file is no such report, or they are of different shapes.
    """
    whole: dict[str, Any] = {}
    for path in paths:
        one = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(one, dict) or one.get("schema") != SCHEMA or "runs" not in one:
            raise ValueError(f"{path}: no report of `bench --device cuda` with schema {SCHEMA}")
        if not whole:
            whole = one
        elif one["shape"] != whole["shape"]:
            raise ValueError(f"{path}: measured {one['shape']}, another one {whole['shape']}")
        else:
            whole["runs"] += one["runs"]
            whole["failed"] |= one["failed"]
    whole["runs"].sort(key=lambda run: run["num_ranks"])
    return whole


def measure(shape: Shape, settings: dict[str, Any], num_ranks: int, repeat: int, sms: Sequence[int],
            baselines: list[str]) -> dict[str, Any] | None:
    """One run of a report as plain values, of which JSON changes none; None in a process that does not report.

    Raises
    ------
    RanksFailed
        A rank failed.
    """
    options = {"shape": shape.as_dict(), "settings": settings}
    run: dict[str, Any] = {"skipped": {}, "sweep": {}, "kernels": {}}
    with _launch.join_or_start(WORKER, options, num_ranks, settings["timeout_s"]) as ranks:
        described = ranks.ask(["describe"])
        run["num_ranks"], run["ranks"] = ranks.num_ranks, described
        run["gpus"] = len({told["uuid"] for told in described})
        run["linked"] = run["gpus"] == ranks.num_ranks > 1
        run["mps"] = all(told["mps"] for told in described)
        most = min(told["sms"] for told in described)
        wanted = [count for count in sms if count <= most]
        for count in set(sms).difference(wanted):
            run["skipped"][f"{count} SMs"] = f"the GPU has {most}"
        with _console.progress(f"bench on GPUs, {ranks.num_ranks} ranks", len(wanted), silent=not ranks.speaks) as show:
            for done, count in enumerate(wanted):
                floors = ranks.ask(["floors_of", count])
                rates = {name: min(told[name] for told in floors) for name in floors[0]}
                run["sweep"][str(count)] = {"rates": rates, "operations": _operations(
                    ranks.ask(["trials", count, repeat]), shape, run, rates)}
                run["kernels"][str(count)] = ranks.ask(["kernels", count])[0]
                show(done + 1)
        run["host"] = ranks.ask(["host", max(20, repeat)])[0]
        if "nccl" in baselines and run["gpus"] < ranks.num_ranks:
            told = f"{ranks.num_ranks} ranks, {run['gpus']} GPU(s)"
            run["skipped"]["nccl"] = f"NCCL wants a GPU for each rank: {told}"
        elif "nccl" in baselines:
            try:
                answers = ranks.ask(["nccl_trials", repeat])
            except _launch.RanksFailed as error:
                run["skipped"]["nccl"] = str(error)
            else:
                rates = run["sweep"][str(max(wanted))]["rates"] if wanted else {}
                run["nccl"] = _operations(answers, shape, run, rates)
        return run if ranks.speaks else None


def _operations(answers: list[dict[str, list[float]]], shape: Shape, run: dict[str, Any],
                rates: dict[str, float]) -> dict[str, Any]:
    """Each operation's numbers, from the lists over trials that each rank answered with."""
    told = {}
    for name in answers[0]:
        trials = list(zip(*(answer[name] for answer in answers), strict=True))
        numbers = numbers_of(name, [max(trial) for trial in trials], shape, run, rates)
        told[name] = {**numbers, "least_us": statistics.median(min(trial) for trial in trials)}
    return told


def row_bytes_of(operation: str, shape: Shape) -> int:
    """Bytes that an operation moves for one row."""
    if operation in ("dispatch fp8", "dispatch quantize"):
        return shape.hidden + 4 * -(-shape.hidden // 128)
    return shape.hidden * DTYPES[shape.dtype].itemsize


def received_bytes(operation: str, shape: Shape, described: list[dict[str, Any]]) -> float | None:
    """Bytes that an operation moves for the rows that a rank receives in dispatch, own ones included; mean."""
    if operation == "layout":
        return None
    return statistics.mean(sum(told["rows_to"]) for told in described) * row_bytes_of(operation, shape)


def floor_us(operation: str, shape: Shape, described: list[dict[str, Any]], linked: bool,
             rates: dict[str, float]) -> float | None:
    """The least microseconds that an operation could take, by the rates of the same run; None for the layout."""
    if operation == "layout":
        return None
    row = row_bytes_of(operation, shape)
    to = np.array([told["rows_to"] for told in described])  # [source, destination]
    stored = shape.tokens if operation.startswith("combine") else int(to.sum(axis=1).max())
    far = to - np.diag(np.diag(to))
    crossing = max(int(far.sum(axis=0).max()), int(far.sum(axis=1).max())) if linked else 0
    return max(crossing * row / rates["copy engine"], stored * row / rates["store"]) / 1e3


def numbers_of(operation: str, times: list[float], shape: Shape, run: dict[str, Any],
               rates: dict[str, float]) -> dict[str, Any]:
    """What a report says of an operation; `rates` are those its floor is made of."""
    median = statistics.median(times)
    floor = None
    if rates and (run["linked"] or run["gpus"] == 1):  # of ranks that share several GPUs no floor is known
        floor = floor_us(operation, shape, run["ranks"], run["linked"], rates)
    moved = received_bytes(operation, shape, run["ranks"])
    return {"median_us": median, "p95_us": float(np.percentile(times, 95)), "max_us": max(times), "times_us": times,
            "floor_us": floor, "share": None if floor is None else floor / median,
            "gbs": None if moved is None else moved / median / 1e3}


def usual_sms(report: dict[str, Any]) -> str | None:
    """The number of multiprocessors at which runs are compared: 16 where all have it, else the least all have."""
    common = [set(run["sweep"]) for run in report["runs"]]
    counts = sorted(set.intersection(*common), key=int) if common else []
    return "16" if "16" in counts else next(iter(counts), None)


def note(run: dict[str, Any]) -> str | None:
    """What must be said of a run's times, or None."""
    if run["linked"]:
        return None
    if run["num_ranks"] == 1:
        return "one rank: nothing crossed a link, and no time here is a figure of one"
    mps = run.get("mps", False)  # of reports that did not tell: no
    if run["gpus"] == 1:
        how = "run side by side on it through CUDA MPS, at its memory's rate" if mps else "take turns on it"
        return f"ranks share a GPU and {how}: nothing crossed a link, and no time here is a figure of one"
    how = ("run side by side on them through CUDA MPS, at their memories' rates" if mps else
           "take turns on them, which is slow")
    return (f"{run['num_ranks']} ranks share {run['gpus']} GPUs and {how}: no time here is a figure of a link")


def show(report: dict[str, Any]) -> None:
    """Print the report as tables with its definitions."""
    for run in report["runs"]:
        _show_run(report, run)
    if len(report["runs"]) > 1:
        _show_growth(report)
    for num_ranks, reason in report["failed"].items():
        print(f"failed with {num_ranks} ranks: {reason}")
    for name, meaning in report["definitions"].items():
        print(f"  {name}: {meaning}")


def _show_run(report: dict[str, Any], run: dict[str, Any]) -> None:
    shape, ranks = report["shape"], run["ranks"]
    title = (f"{run['num_ranks']} rank(s) on {run['gpus']} x {ranks[0]['gpu']}, {shape['tokens']} tokens x "
             f"{shape['hidden']} {shape['dtype']}, top-{shape['topk']} of {shape['experts']}, backend "
             f"{ranks[0]['backend']}, {report['repeat']} repeats")
    rows = [(name, sms, *_cells(told["operations"][name]))
            for name in OPERATIONS for sms, told in run["sweep"].items()]
    rows += [(f"nccl {name}", "", *_cells(numbers)) for name, numbers in run.get("nccl", {}).items()]
    columns = ("operation", "SMs", "median us", "p95 us", "floor us", "share", "GB/s")
    _console.print_table(title, columns, rows, right=range(1, 7))
    names = ("push", "store", "pull", "copy engine")
    rates = [(sms, *(f"{told['rates'][name]:.0f}" for name in names)) for sms, told in run["sweep"].items()]
    _console.print_table("plain copies, GB/s of each rank", ("SMs", *names), rows=rates, right=range(5))
    parts = [(name, sms, kernel, f"{taken:.1f}") for sms, told in run["kernels"].items()
             for name, kernels in told.items() for kernel, taken in sorted(kernels.items(), key=lambda pair: -pair[1])]
    _console.print_table("kernels of rank 0, us of a call (waits for peers included)",
                         ("operation", "SMs", "kernel", "us"), parts, right=(1, 3))
    for name, taken in run["host"].items():
        print(f"host, {name}: {taken:.1f} us")
    said = note(run)
    if said is not None:
        print(said)
    for name, reason in run["skipped"].items():
        print(f"skipped {name}: {reason}")


def _show_growth(report: dict[str, Any]) -> None:
    sms = usual_sms(report)
    if sms is None:
        return

    def cell(numbers: dict[str, Any] | None) -> str:
        if numbers is None:
            return ""
        return f"{numbers['median_us']:.1f}" + ("" if numbers["share"] is None else f" ({numbers['share']:.2f})")

    runs = report["runs"]
    columns = [f"{run['num_ranks']} ranks" + ("" if run["linked"] else "*") for run in runs]
    rows = [(name, *(cell(run["sweep"][sms]["operations"].get(name)) for run in runs)) for name in OPERATIONS]
    named = dict.fromkeys(name for run in runs for name in run.get("nccl", {}))
    rows += [(f"nccl {name}", *(cell(run.get("nccl", {}).get(name)) for run in runs)) for name in named]
    caption = "" if all(run["linked"] for run in runs) else "*: not a GPU for each rank, or one rank"
    _console.print_table(f"growth over ranks, {sms} SMs: median us (share of the floor)", ("operation", *columns), rows,
                         right=range(1, len(columns) + 1), caption=caption)


def _cells(numbers: dict[str, Any]) -> tuple[str, ...]:
    floor, share, rate = numbers["floor_us"], numbers["share"], numbers["gbs"]
    return (f"{numbers['median_us']:.1f}", f"{numbers['p95_us']:.1f}", "" if floor is None else f"{floor:.1f}",
            "" if share is None else f"{share:.2f}", "" if rate is None else f"{rate:.0f}")
