"""Takes the turns: every repeat asks each measurement of both sides, in an order that changes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from epcomm import _console, _launch
from epcomm.ab.stats import BLOCK

WORKER = "epcomm.ab.ranks:AbRank"
WARMUP = 1  # repeats of a block that are not counted


class Row(NamedTuple):
    """One thing that is measured on both sides. ``unit`` is that of the values kept: seconds, messages or bytes."""

    group: str
    label: str
    unit: str
    lower_is_better: bool
    request: tuple[Any, ...]


@dataclass
class Measured:
    """``values[row][side]`` is a list over repeats; ``cpu[row][side]`` the same of CPU seconds by thread name."""

    rows: list[Row]
    num_ranks: int
    described: dict[str, list[Any]]  # by phase: of rank 0's sides
    load: float
    values: dict[int, list[list[float]]] = field(default_factory=dict)
    cpu: dict[int, list[list[dict[str, float]]]] = field(default_factory=dict)
    speaks: bool = True


def wire_rows(sizes: Sequence[int], channels: Sequence[int], rate_count: int, prefix: str = "") -> list[Row]:
    """Rows of the transport alone."""
    rows = []
    for what, group in (("put", "put"), ("put_signal", "put + signal")):
        for size in sizes:
            if prefix and (what != "put" or size != min(sizes)):
                continue  # nothing arrives without a mover, so nobody can answer
            count = 60 if size <= 4096 else 20 if size <= 65536 else 6
            rows.append(Row(prefix + group, _console.human_bytes(size), "s", True, (what, size, 1, count)))
    for number in channels:
        label = f"{number} channel{'s' if number > 1 else ''}"
        rows.append(Row(prefix + "message rate", label, "1/s", False,
                        ("rate", min(sizes), number, max(1, rate_count // number))))
    if not prefix:
        for number in channels:
            label = f"{number} channel{'s' if number > 1 else ''}"
            rows.append(Row("bandwidth", label, "B/s", False, ("bandwidth", max(sizes), number, max(1, 12 // number))))
    return rows


def measure(sides: list[dict[str, Any]], null_sides: list[dict[str, Any]] | None, settings: dict[str, Any],
            num_ranks: int, repeat: int) -> Measured:
    """One run. Every measurement is taken of A and of B in each of `repeat` counted repeats.

    Parameters
    ----------
    sides
        A and B: ``backend`` and ``environment`` (variables while its communicators are made).
    null_sides
        A and B once more where messages complete without being moved; ``None`` where that cannot be had.
    settings
        ``sizes``, ``channels``, ``rate_count``, ``shape``, ``call_channels``, ``timeout_s``.
    num_ranks, repeat
        Ranks to start; counted repeats.
    """
    measured = Measured([], num_ranks, {}, os.getloadavg()[0])
    rows = wire_rows(settings["sizes"], settings["channels"], settings["rate_count"])
    settings = {**settings, "max_channels": max(settings["channels"])}
    _phase(measured, "wire", sides, rows, settings, repeat)
    if null_sides is not None:
        rows = wire_rows(settings["sizes"], settings["channels"], settings["rate_count"], prefix="no mover: ")
        _phase(measured, "null", null_sides, rows, settings, repeat)
    rows = [Row("calls", name, "s", True, ("calls",)) for name in ("dispatch", "combine")]
    _phase(measured, "calls", sides, rows, settings, repeat)
    return measured


def _phase(measured: Measured, phase: str, sides: list[dict[str, Any]], rows: list[Row], settings: dict[str, Any],
           repeat: int) -> None:
    first = len(measured.rows)
    measured.rows += rows
    for index in range(first, len(measured.rows)):
        measured.values[index], measured.cpu[index] = [[], []], [[], []]
    title = {"wire": "messages", "null": "control path alone", "calls": "dispatch and combine"}[phase]
    done = 0
    with _console.progress(title, repeat, silent=not measured.speaks) as show:
        while done < repeat:
            swapped = bool(done // BLOCK % 2)
            options = {"phase": "calls" if phase == "calls" else "wire", "settings": settings,
                       "sides": sides[::-1] if swapped else sides}
            with _launch.join_or_start(WORKER, options, measured.num_ranks, settings["timeout_s"]) as ranks:
                measured.num_ranks, measured.speaks = ranks.num_ranks, ranks.speaks
                measured.described[phase] = ranks.ask(["describe"])[0][:: -1 if swapped else 1]
                for turn in range(WARMUP + min(BLOCK, repeat - done)):
                    keep = turn >= WARMUP
                    order = (1, 0) if (done + turn) % 2 else (0, 1)
                    asked = [(side, side ^ swapped) for side in order]
                    if phase == "calls":
                        _ask_calls(measured, ranks, first, asked, keep)
                    else:
                        _ask_wire(measured, ranks, range(first, len(measured.rows)), asked, keep)
                    if measured.speaks:
                        show(done + max(0, turn + 1 - WARMUP))
            done += min(BLOCK, repeat - done)


def _ask_wire(measured: Measured, ranks: _launch.Ranks, indices: Sequence[int], asked: list[tuple[int, int]],
              keep: bool) -> None:
    """``asked``: the sides in turn, and where each is among the worker's."""
    for index in indices:
        for side, place in asked:
            answer = ranks.ask(["measure", place, list(measured.rows[index].request)])[0]
            if keep:
                measured.values[index][side].append(answer["value"])
                measured.cpu[index][side].append(answer.get("cpu", {}))


def _ask_calls(measured: Measured, ranks: _launch.Ranks, first: int, asked: list[tuple[int, int]], keep: bool) -> None:
    for side, place in asked:
        answers = ranks.ask(["measure", place, ["calls"]])
        if not keep:
            continue
        for index in (first, first + 1):
            name = measured.rows[index].label
            measured.values[index][side].append(max(answer[name] for answer in answers))  # its slowest rank
        measured.cpu[first][side].append(answers[0]["cpu"])
