"""``python -m epcomm bench --device cuda``: starts the ranks, sweeps the multiprocessors, reports against floors.

Ranks may share a GPU, and there may be one rank: everything runs, and the report says that it is no figure of a link.
"""

import importlib.util
import statistics
from typing import Any

import numpy as np

from epcomm import _console, _launch
from epcomm._version import __version__
from epcomm.bench.workload import DTYPES, Shape

SCHEMA = 1
WORKER = "epcomm.bench.gpu_rank:GpuRank"
DEFAULT_SMS = (8, 16, 24, 48)
OPERATIONS = ("layout", "dispatch", "dispatch uncached", "dispatch copy", "dispatch fp8", "dispatch quantize",
              "combine buffer", "combine")
DEFINITIONS = {
    "time": "microseconds of the device by events on the caller's stream, from a start that a barrier and a queued "
            "delay align; a trial's time is its slowest rank's, the median is over trials",
    "dispatch": "cached routing, a view of the heap; `uncached` with the layout pass and counts, `copy` into the "
                "caller's memory, `fp8` codes with scales given, `quantize` codes and scales made on the way",
    "combine": "expert outputs in ordinary memory; `combine buffer` in the heap, where experts can write them",
    "push, pull": "plain copies of one rank's token rows to and from the next rank's memory by as many "
                  "multiprocessors; `store` writes alone; `copy engine` is the driver's copy; all ranks at once",
    "floor": "max(bytes that leave or reach a GPU / copy engine's rate, bytes stored / store rate of as many "
             "multiprocessors), all measured in this run",
    "share": "floor / median",
    "nccl": "torch: rows gathered by destination, all_to_all_single, scattered and added; routing known beforehand, "
            "as many multiprocessors as NCCL takes",
    "host": "median microseconds from a call to its return, with an idle device",
}  # fmt: skip


def measure(shape: Shape, settings: dict[str, Any], num_ranks: int, repeat: int, sms: tuple[int, ...],
            baselines: list[str]) -> dict[str, Any] | None:
    """The report of one run as plain values; None in a process that does not report.

    Raises
    ------
    RanksFailed
        A rank failed; a machine without a GPU or a library is told so.
    """
    for module in ("torch", "cupy"):
        if importlib.util.find_spec(module) is None:
            raise _launch.RanksFailed(f"--device cuda needs {module}, which is not installed")
    import torch

    if not torch.cuda.is_available():
        raise _launch.RanksFailed("--device cuda: torch finds no GPU")
    options = {"shape": shape.as_dict(), "settings": settings}
    report: dict[str, Any] = {"schema": SCHEMA, "version": __version__, "shape": shape.as_dict(), "repeat": repeat,
                              "definitions": DEFINITIONS, "skipped": {}, "sweep": {}, "kernels": {}}
    with _launch.join_or_start(WORKER, options, num_ranks, settings["timeout_s"]) as ranks:
        described = ranks.ask(["describe"])
        report["num_ranks"], report["ranks"] = ranks.num_ranks, described
        report["gpus"] = len({told["uuid"] for told in described})
        report["linked"] = report["gpus"] == ranks.num_ranks > 1
        most = min(told["sms"] for told in described)
        with _console.progress("bench on GPUs", len(sms), silent=not ranks.speaks) as show:
            for done, count in enumerate(n for n in sms if n <= most):
                floors = ranks.ask(["floors_of", count])
                rates = {name: min(told[name] for told in floors) for name in floors[0]}
                times = _slowest(ranks.ask(["trials", count, repeat]))
                report["sweep"][count] = {"rates": rates, "operations": {
                    name: _numbers(taken, floor_us(name, shape, described, report["linked"], rates))
                    for name, taken in times.items()}}
                report["kernels"][count] = ranks.ask(["kernels", count])[0]
                show(done + 1)
        report["host"] = ranks.ask(["host", max(20, repeat)])[0]
        if "nccl" in baselines and report["gpus"] < ranks.num_ranks:
            told = f"{ranks.num_ranks} ranks, {report['gpus']} GPU(s)"
            report["skipped"]["nccl"] = f"NCCL wants a GPU for each rank: {told}"
        elif "nccl" in baselines:
            try:
                times = _slowest(ranks.ask(["nccl_trials", repeat]))
            except _launch.RanksFailed as error:
                report["skipped"]["nccl"] = str(error)
            else:
                report["nccl"] = {name: _numbers(taken, None) for name, taken in times.items()}
        return report if ranks.speaks else None


def _slowest(answers: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [max(trial) for trial in zip(*(told[name] for told in answers), strict=True)] for name in answers[0]}


def row_bytes_of(operation: str, shape: Shape) -> int:
    """Bytes that an operation moves for one row."""
    if operation in ("dispatch fp8", "dispatch quantize"):
        return shape.hidden + 4 * -(-shape.hidden // 128)
    return shape.hidden * DTYPES[shape.dtype].itemsize


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


def _numbers(times: list[float], floor: float | None) -> dict[str, Any]:
    median = statistics.median(times)
    return {"median_us": median, "p95_us": float(np.percentile(times, 95)), "max_us": max(times), "times_us": times,
            "floor_us": floor, "share": None if floor is None else floor / median}


def show(report: dict[str, Any]) -> None:
    """Print the report as tables with its definitions."""
    shape, ranks = report["shape"], report["ranks"]
    title = (f"{report['num_ranks']} rank(s) on {report['gpus']} x {ranks[0]['gpu']}, {shape['tokens']} tokens x "
             f"{shape['hidden']} {shape['dtype']}, top-{shape['topk']} of {shape['experts']}, backend "
             f"{ranks[0]['backend']}, {report['repeat']} repeats")
    rows = [(name, sms, *_cells(told["operations"][name]))
            for name in OPERATIONS for sms, told in report["sweep"].items()]
    rows += [(f"nccl {name}", "", *_cells(numbers)) for name, numbers in report.get("nccl", {}).items()]
    columns = ("operation", "SMs", "median us", "p95 us", "floor us", "share")
    _console.print_table(title, columns, rows, right=range(1, 6))
    names = ("push", "store", "pull", "copy engine")
    rates = [(sms, *(f"{told['rates'][name]:.0f}" for name in names)) for sms, told in report["sweep"].items()]
    _console.print_table("plain copies, GB/s of each rank", ("SMs", *names), rows=rates, right=range(5))
    parts = [(name, sms, kernel, f"{taken:.1f}") for sms, told in report["kernels"].items()
             for name, kernels in told.items() for kernel, taken in sorted(kernels.items(), key=lambda pair: -pair[1])]
    _console.print_table("kernels of rank 0, us of a call (waits for peers included)",
                         ("operation", "SMs", "kernel", "us"), parts, right=(1, 3))
    for name, taken in report["host"].items():
        print(f"host, {name}: {taken:.1f} us")
    if not report["linked"]:
        print("ranks share a GPU, or there is one: nothing crossed a link, and no time here is a figure of one")
    for name, reason in report["skipped"].items():
        print(f"skipped {name}: {reason}")
    for name, meaning in report["definitions"].items():
        print(f"  {name}: {meaning}")


def _cells(numbers: dict[str, Any]) -> tuple[str, ...]:
    floor, share = numbers["floor_us"], numbers["share"]
    return (f"{numbers['median_us']:.1f}", f"{numbers['p95_us']:.1f}", "" if floor is None else f"{floor:.1f}",
            "" if share is None else f"{share:.2f}")
