"""The report of GPUs as a picture: times and shares of the floor, over ranks and over multiprocessors."""

from collections.abc import Callable
from typing import Any, NamedTuple

from epcomm.bench.gpu import note, usual_sms

_INK, _PALE = "#222222", "#8c8c8c"
TARGET = 0.85  # share of the floor that is aimed at


class _Line(NamedTuple):
    """What is drawn of an operation: its name, colour and marker, and the operation of NCCL beside it."""

    operation: str
    label: str
    colour: str
    marker: str
    nccl: str | None


def _lines(dtype: str) -> dict[str, tuple[_Line, ...]]:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)
    return {
        "dispatch": (
            _Line("dispatch", short, "#1f6f8b", "o", "dispatch"),
            _Line("dispatch fp8", "fp8 with scales", "#d1495b", "s", "dispatch fp8"),
        ),
        "combine": (
            _Line("combine buffer", f"{short}, rows in the heap", "#1f6f8b", "o", "combine"),
            _Line("combine", f"{short}, rows in ordinary memory", "#66a182", "^", None),
        ),
    }


def draw(report: dict[str, Any], path: str) -> None:
    """Write a picture of a report of :mod:`epcomm.bench.gpu`.

    Dispatch above, combine below. On the left over ranks at one number of multiprocessors, with torch and NCCL and the
    floor beside it; on the right over multiprocessors, a shade for each number of ranks. Hollow marks are runs in which
    ranks shared GPUs, or of one rank. A report that has one number of ranks, or of multiprocessors, lacks that side.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, whatever display there is
    import matplotlib.pyplot as plt

    runs = sorted(report["runs"], key=lambda run: run["num_ranks"])
    report = {**report, "runs": runs}
    sms = usual_sms(report)
    sides: list[tuple[str, Callable[..., None]]] = []
    if sms is not None and (len(runs) > 1 or all(len(run["sweep"]) < 2 for run in runs)):
        sides.append((f"ranks ({sms} multiprocessors)", lambda *panel: _over_ranks(runs, sms, *panel)))
    if any(len(run["sweep"]) > 1 for run in runs) or not sides:
        sides.append(("multiprocessors of a call", lambda *panel: _over_sms(runs, *panel)))
    lines = _lines(report["shape"]["dtype"])
    style = {"font.size": 12, "axes.titlesize": 13, "axes.spines.top": False, "axes.spines.right": False,
             "axes.edgecolor": _PALE, "lines.linewidth": 2.2, "lines.markersize": 7}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(5.2 * 2 * len(sides), 9.6), layout="constrained")
        for part, (name, drawn) in zip(figure.subfigures(len(lines), 1), lines.items(), strict=True):
            row = part.subplots(1, 2 * len(sides))
            for side, (xlabel, over) in enumerate(sides):
                for axis, share in zip(row[2 * side : 2 * side + 2], (False, True), strict=True):
                    over(axis, drawn, share)
                    _finish(axis, f"{name}: {'share of the floor' if share else 'microseconds'}", xlabel, share)
            handles, labels = row[0].get_legend_handles_labels()
            part.legend(handles, labels, frameon=False, fontsize=11, loc="outside lower center", ncols=3 * len(sides))
        figure.suptitle(_title(report), fontsize=14, color=_INK)
        said = [f"{run['num_ranks']}: {told}" for run in runs for told in [note(run)] if told is not None]
        if said:
            figure.supxlabel("hollow marks: " + "; ".join(said), fontsize=9, color=_INK)
        figure.savefig(path, dpi=140)
        plt.close(figure)


def _title(report: dict[str, Any]) -> str:
    shape, run = report["shape"], report["runs"][-1]
    return (f"{run['ranks'][0]['gpu']}, {shape['tokens']} tokens per rank x {shape['hidden']}, top-{shape['topk']} of "
            f"{shape['experts']}, {run['ranks'][0]['backend']}; median of {report['repeat']}, slowest rank")


def _finish(axis: Any, title: str, xlabel: str, share: bool) -> None:
    axis.set_title(title, loc="left", color=_INK)
    axis.set_xlabel(xlabel)
    axis.grid(axis="y", color="#e6e6e6", linewidth=1)
    axis.set_axisbelow(True)
    # A share above one is a floor that the call undercuts: it must show.
    axis.set_ylim(0, max(1.05, axis.get_ylim()[1]) if share else 1.12 * max(axis.dataLim.y1, 1.0))
    if share:
        axis.axhline(1, color=_PALE, linewidth=1.2)
        axis.axhline(TARGET, color=_PALE, linewidth=1.2, linestyle=(0, (2, 3)))
        axis.annotate(f"{TARGET:g}", (1, TARGET), xycoords=axis.get_yaxis_transform(), xytext=(3, 0),
                      textcoords="offset points", va="center", fontsize=9, color=_PALE)


def _over_ranks(runs: list[dict[str, Any]], sms: str, axis: Any, lines: tuple[_Line, ...], share: bool) -> None:
    what = "share" if share else "median_us"
    last = runs[-1]["sweep"][sms]["operations"]
    slowest = max(lines, key=lambda line: last[line.operation]["median_us"] if line.operation in last else 0.0)
    for line in lines:
        told = [run["sweep"][sms]["operations"].get(line.operation) for run in runs]
        _plot(axis, runs, told, what, line, f"epcomm {line.label}", up=line is slowest)
        if line.nccl is None:
            continue
        short = line.label.partition(",")[0]
        if not share:
            _plot(axis, runs, told, "floor_us", line._replace(marker=""), f"floor of {short}", linestyle=":",
                  linewidth=1.4)
        told = [run.get("nccl", {}).get(line.nccl) for run in runs]
        _plot(axis, runs, told, what, line, f"torch + NCCL {short}", linestyle="--", alpha=0.55)
    axis.set_xscale("log", base=2)
    counts = [run["num_ranks"] for run in runs]
    axis.set_xticks(counts, list(map(str, counts)))
    axis.minorticks_off()
    axis.margins(x=0.12)


def _plot(axis: Any, runs: list[dict[str, Any]], told: list[dict[str, Any] | None], what: str, line: _Line, label: str,
          up: bool = True, **looks: Any) -> None:
    points = [(run["num_ranks"], numbers[what], run["linked"]) for run, numbers in zip(runs, told, strict=True)
              if numbers is not None and numbers[what] is not None]
    if not points:
        return
    axis.plot([at for at, _, _ in points], [value for _, value, _ in points], color=line.colour, label=label, **looks)
    for at, value, linked in points:
        axis.plot([at], [value], line.marker or "None", color=line.colour, alpha=looks.get("alpha"),
                  markerfacecolor=line.colour if linked else "white", markeredgecolor=line.colour)
        if what == "median_us":
            axis.annotate(f"{value:.0f}", (at, value), xytext=(0, 7 if up else -15), textcoords="offset points",
                          ha="center", fontsize=9, color=line.colour, alpha=looks.get("alpha"))


def _over_sms(runs: list[dict[str, Any]], axis: Any, lines: tuple[_Line, ...], share: bool) -> None:
    what = "share" if share else "median_us"
    ticks: set[int] = set()
    for place, run in enumerate(runs):
        shade = 1.0 - 0.65 * (len(runs) - 1 - place) / max(1, len(runs) - 1)
        for number, line in enumerate(lines):
            points = [(int(count), told["operations"][line.operation][what]) for count, told in run["sweep"].items()
                      if told["operations"].get(line.operation, {}).get(what) is not None]
            if not points:
                continue
            points.sort()
            ticks.update(at for at, _ in points)
            axis.plot(*zip(*points, strict=True), line.marker, linestyle="-", color=line.colour, alpha=shade,
                      markerfacecolor=line.colour if run["linked"] else "white",
                      label=f"epcomm {line.label}" if run is runs[-1] else None)
            if number == 0 and len(runs) > 1 and not share:
                at, value = points[-1]
                axis.annotate(f"{run['num_ranks']} ranks", (at, value), xytext=(8, 0), textcoords="offset points",
                              va="center", fontsize=9, color=line.colour, alpha=shade)
    last = runs[-1].get("nccl", {})
    for line in lines:
        numbers = last.get(line.nccl) if line.nccl is not None else None
        if numbers is not None and numbers[what] is not None:
            axis.axhline(numbers[what], color=line.colour, linestyle="--", linewidth=1.6, alpha=0.55,
                         label=f"torch + NCCL {line.label.partition(',')[0]}, {runs[-1]['num_ranks']} ranks")
    axis.set_xticks(sorted(ticks), list(map(str, sorted(ticks))))
    axis.margins(x=0.16)
