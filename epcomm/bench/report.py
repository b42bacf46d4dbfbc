"""From seconds to a report: statistics, bytes, shares, verdicts; as JSON and as tables.

The definitions below are part of every report, so that a number never travels without its meaning.
"""

import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from epcomm import _console, _nics
from epcomm._version import __version__
from epcomm.bench import transport
from epcomm.bench.run import Measured
from epcomm.bench.workload import Shape

SCHEMA = 1
MIN_REPEATS = 5  # fewer give numbers but no verdict
OPERATIONS = ("layout", "dispatch", "combine", "combine_buffer")
FLOOR_OF = {"dispatch": "dispatch", "combine": "combine", "combine_buffer": "combine"}
DEFINITIONS = {
    "time": "all ranks begin after a barrier; a trial's time is its slowest rank's; median, p95 and max over trials",
    "logical bytes": "payload bytes of the rows that a rank's tokens become, its own ones included; mean over ranks "
                     "(rank layout: one row per token and destination rank; expert layout: one row per pick)",
    "physical bytes": "bytes that memory must at least read and write per rank: dispatch reads each token's row once "
                      "and writes the rows it becomes, combine reads those rows and writes one per token",
    "GB/s": "10^9 bytes per second of the median time",
    "floor": "memcpy of the physical bytes in cache-sized blocks, all ranks at once, same threads, same run",
    "share of floor": "floor's median time / this median time",
    "combine": "expert outputs in ordinary memory; every byte they take into the heap is inside the time",
    "combine_buffer": "expert outputs already in the heap, where `combine_buffer()` let the experts write them",
    "baselines": "same rows and weights, sums in float32, checked against the exact result like epcomm; buffers fresh "
                 "in each call or kept from the first on, as `baseline_buffers` says",
}


def build(shape: Shape, measured: Measured, repeat: int, baseline_buffers: str = "fresh") -> dict[str, Any]:
    """The report as plain values."""
    rows = statistics.mean(told["rows_sent"] for told in measured.described)
    logical = rows * shape.row_bytes
    physical = (rows + shape.tokens) * shape.row_bytes
    operations: dict[str, Any] = {}
    for operation in OPERATIONS:
        floor = measured.seconds["floor"].get(FLOOR_OF.get(operation, ""))
        floor_s = statistics.median(map(max, floor)) if floor else None
        moves = operation in FLOOR_OF
        cases = {
            case: _numbers([max(trial) for trial in seconds[operation]], floor_s, logical if moves else None,
                           physical if moves else None)
            for case, seconds in measured.seconds.items() if operation in seconds
        }
        operations[operation] = {
            "logical_bytes": logical if moves else None,
            "physical_bytes": physical if moves else None,
            "cases": cases,
        }
    return {
        "schema": SCHEMA,
        "version": __version__,
        "shape": shape.as_dict(),
        "num_ranks": measured.num_ranks,
        "threads": measured.threads,
        "backend": measured.described[0]["backend"],
        "model": _nics.model_note(measured.described[0]["backend"]),
        "calls": "throughput",  # decode too, until there are low-latency calls
        "repeat": repeat,
        "baseline_buffers": baseline_buffers,
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "load_before": measured.load},
        "operations": operations,
        "transport": measured.transport,
        "skipped": measured.skipped,
        "verdict": verdict(operations, repeat),
        "definitions": DEFINITIONS,
    }


def _numbers(times: list[float], floor_s: float | None, logical: float | None, physical: float | None) -> dict:
    median = statistics.median(times)
    return {
        "median_s": median,
        "p95_s": float(np.percentile(times, 95)),
        "max_s": max(times),
        "times_s": times,
        "logical_gbs": logical / median / 1e9 if logical is not None else None,
        "physical_gbs": physical / median / 1e9 if physical is not None else None,
        "share_of_floor": floor_s / median if floor_s is not None else None,
    }


def verdict(operations: dict[str, Any], repeat: int) -> list[str] | None:
    """Sentences that compare, or ``None`` where there are too few repeats to say anything."""
    if repeat < MIN_REPEATS:
        return None
    sentences = []
    for operation in ("dispatch", "combine"):
        cases = operations[operation]["cases"]
        own = cases["epcomm"]
        parts = [f"{own['share_of_floor']:.2f} of the memory-copy floor"]
        parts += [f"{cases[case]['median_s'] / own['median_s']:.1f} times as fast as {case}"
                  for case in cases if case not in ("epcomm", "floor")]
        sentences.append(f"{operation}: {', '.join(parts)}")
    return sentences


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def show(report: dict[str, Any]) -> None:
    """Print the report as a table with its definitions."""
    shape = report["shape"]
    title = (f"{shape['mode']}: {report['num_ranks']} ranks x {shape['tokens']} tokens x {shape['hidden']} "
             f"{shape['dtype']}, top-{shape['topk']} of {shape['experts']}, {shape['layout']} layout, backend "
             f"{report['backend']}, {report['threads']} thread(s) per rank, {report['repeat']} repeats, "
             f"baselines with {report['baseline_buffers']} buffers")
    rows = []
    for operation, told in report["operations"].items():
        for case, numbers in told["cases"].items():
            rows.append((
                operation, case, *(_time(numbers[name]) for name in ("median_s", "p95_s", "max_s")),
                *(_ratio(numbers[name]) for name in ("logical_gbs", "physical_gbs", "share_of_floor")),
            ))
    moved = report["operations"]["dispatch"]
    caption = (f"per rank and call: {_console.human_bytes(moved['logical_bytes'])} logical, "
               f"{_console.human_bytes(moved['physical_bytes'])} physical")
    _console.print_table(title, ("operation", "case", "median ms", "p95 ms", "max ms", "logical GB/s", "physical GB/s",
                                 "share of floor"), rows, right=range(2, 8), caption=caption)
    if report["model"]:
        print(f"backend {report['backend']} {report['model']}: these are no network figures")
    if report["transport"] is not None:
        transport.show(report["transport"])
    for case, reason in report["skipped"].items():
        print(f"skipped {case}: {reason}")
    machine = report["machine"]
    if machine["load_before"] > machine["cores"] / 2:
        print(f"the machine was busy before the run (load {machine['load_before']:.1f} on {machine['cores']} cores): "
              "trust the ratios little and the times less")
    if report["verdict"] is None:
        print(f"no verdict: {report['repeat']} repeat(s), at least {MIN_REPEATS} are needed")
    else:
        print("\n".join(report["verdict"]))
    if shape["mode"] == "decode":
        print("decode is measured with throughput calls: low-latency calls are still to come")
    own = transport.DEFINITIONS if report["transport"] is not None else {}
    for name, meaning in (report["definitions"] | own).items():
        print(f"  {name}: {meaning}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
