"""The report as a picture: latency by size, rate by channels, every ratio with its interval, CPU time."""

from typing import Any

A, B, GREY = "#1f6f8b", "#d1603d", "#8c8c8c"
_HUES = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#bab0ac")


def draw(report: dict[str, Any], path: str) -> None:
    """Write the picture (matplotlib; .png, .svg, .pdf)."""
    import matplotlib

    matplotlib.use("Agg")  # a file, whatever display there is
    import matplotlib.pyplot as plt

    names = [report[side]["backend"] for side in "ab"]
    if names[0] == names[1]:
        names = [f"{side.upper()} ({names[0]})" for side in "ab"]
    rows = report["rows"]
    figure = plt.figure(figsize=(13, 9), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=[1, 1, 1.25])
    _lines(figure.add_subplot(grid[0, 0]), rows, "put + signal", names, "put + signal, one way", 1e6, "us")
    _lines(figure.add_subplot(grid[0, 1]), rows, "put", names, "put until completion", 1e6, "us")
    _bars(figure.add_subplot(grid[1, 0]), rows, names)
    _cpu(figure.add_subplot(grid[1, 1]), rows, names)
    _ratios(figure.add_subplot(grid[:, 2]), rows, names)
    note = ""
    if report["provider_note"]:
        both = "control path only, " if report["provider"] == "soft" else ""
        note = f"  (software HCA: {both}not a network result)"
    figure.suptitle(f"{names[0]} against {names[1]}, everything else equal: {report['num_ranks']} ranks, "
                    f"{report['repeat']} interleaved repeats, provider {report['provider']}{note}", fontsize=12)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _lines(axis: Any, rows: list[dict], group: str, names: list[str], title: str, scale: float, unit: str) -> None:
    chosen = [row for row in rows if row["group"] == group]
    places = range(len(chosen))
    for side, name, colour in (("a", names[0], A), ("b", names[1], B)):
        axis.plot(places, [row[side] * scale for row in chosen], "o-", color=colour, label=name, markersize=4)
        axis.fill_between(places, *([row[side + "_interval"][end] * scale for row in chosen] for end in (0, 1)),
                          color=colour, alpha=0.2, linewidth=0)
    axis.set_xticks(places, [row["label"] for row in chosen], rotation=40, ha="right", fontsize=8)
    axis.set_yscale("log")
    _finish(axis, title, f"{unit} (band: 95 % interval)")
    axis.legend(frameon=False, fontsize=9)


def _bars(axis: Any, rows: list[dict], names: list[str]) -> None:
    chosen = [row for row in rows if row["group"].endswith("message rate")]
    for offset, side, name, colour in ((-0.2, "a", names[0], A), (0.2, "b", names[1], B)):
        heights = [row[side] / 1e3 for row in chosen]
        spread = [[max(0.0, abs(row[side] - row[side + "_interval"][end])) / 1e3 for row in chosen] for end in (0, 1)]
        axis.bar([place + offset for place in range(len(chosen))], heights, 0.38, yerr=spread, color=colour, label=name,
                 ecolor="#404040", capsize=2)
    labels = [("no mover\n" if row["group"] != "message rate" else "") + row["label"] for row in chosen]
    axis.set_xticks(range(len(chosen)), labels, fontsize=8, rotation=40, ha="right")
    _finish(axis, "message rate", "thousand put + signal per second")


def _cpu(axis: Any, rows: list[dict], names: list[str]) -> None:
    chosen = [row for row in rows if row["group"] == "message rate" and (row["a_cpu"] or row["b_cpu"])]
    threads = sorted({thread for row in chosen for side in "ab" for thread in row[side + "_cpu"]})
    labels, bottom = [], []
    for row in chosen:
        labels += [f"{name}, {row['label']}" for name in names]
        bottom += [0.0, 0.0]
    for hue, thread in zip(_HUES, threads, strict=False):
        heights = [row[side + "_cpu"].get(thread, 0.0) * 1e6 for row in chosen for side in "ab"]
        axis.bar(range(len(heights)), heights, 0.75, bottom=bottom, color=hue, label=thread)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.set_xticks(range(len(labels)), labels, fontsize=8, rotation=40, ha="right")
    _finish(axis, "who spends CPU time", "us per message, rank that sends")
    if threads:
        axis.legend(frameon=False, fontsize=8)


def _ratios(axis: Any, rows: list[dict], names: list[str]) -> None:
    for place, row in enumerate(rows):
        low, high = row["ratio_interval"]
        colour = {"A faster": A, "B faster": B}.get(row["verdict"] or "", GREY)
        axis.plot([low, high], [place, place], color=colour, linewidth=2)
        axis.plot(row["ratio"], place, "o", color=colour, markersize=5)
    axis.axvline(1, color="#404040", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(rows)), [f"{row['group']}, {row['label']}" for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
    _finish(axis, f"times as fast: {names[1]} against {names[0]}", None)
    axis.set_xlabel(f"<1: {names[0]} faster     grey: no difference     >1: {names[1]} faster", fontsize=9)


def _finish(axis: Any, title: str, ylabel: str | None) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    if ylabel:
        axis.set_ylabel(ylabel, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
