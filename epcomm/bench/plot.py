"""The report as a picture: one bar per case, against the floor."""

from typing import Any

COLOURS = {"epcomm": "#1f6f8b", "floor": "#b8b8b8", "gloo": "#d98e04", "mpi4py": "#8a3b5c"}


def draw(report: dict[str, Any], path: str) -> None:
    """Write a picture of median times, with a whisker to the 95th percentile."""
    import matplotlib

    matplotlib.use("Agg")  # a file, whatever display there is
    import matplotlib.pyplot as plt

    shape = report["shape"]
    panels = {operation: _bars(report, operation) for operation in ("dispatch", "combine")}
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 1.6 + 0.55 * sum(map(len, panels.values()))),
                                height_ratios=[len(bars) for bars in panels.values()], layout="constrained")
    for axis, (operation, bars) in zip(axes, panels.items(), strict=True):
        floor = report["operations"][operation]["cases"]["floor"]["median_s"]
        for place, (_, case, numbers) in enumerate(bars):
            median, late = numbers["median_s"] * 1e3, numbers["p95_s"] * 1e3
            axis.barh(place, median, color=COLOURS[case], xerr=[[0], [max(0.0, late - median)]], ecolor="#404040",
                      capsize=3)
            ratio = numbers["median_s"] / floor
            times = f", {ratio:.1f} x floor" if ratio < 10 else f", {ratio:,.0f} x floor"
            said = f"  {median:.3g} ms" + ("" if case == "floor" else times)
            axis.text(max(median, late), place, said, va="center", fontsize=9)
        axis.axvline(floor * 1e3, color="#404040", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        axis.invert_yaxis()
        axis.set_xlim(0, max(numbers["p95_s"] for _, _, numbers in bars) * 1e3 * 1.3)
        axis.set_title(operation, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds, median of the slowest rank (whisker: p95); dashed: memory-copy floor")
    figure.suptitle(f"{report['num_ranks']} ranks x {shape['tokens']} tokens x {shape['hidden']} {shape['dtype']}, "
                    f"top-{shape['topk']} of {shape['experts']}, {shape['layout']} layout, {report['backend']}, "
                    f"{report['repeat']} repeats" + (f"\n{report['model']}" if report["model"] else ""), fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(report: dict[str, Any], operation: str) -> list[tuple[str, str, dict[str, Any]]]:
    cases = report["operations"][operation]["cases"]
    bars = [("floor (memcpy)", "floor", cases["floor"])]
    if operation == "combine":
        bars.append(("epcomm, in the heap", "epcomm", report["operations"]["combine_buffer"]["cases"]["epcomm"]))
    bars.append(("epcomm", "epcomm", cases["epcomm"]))
    return bars + [(case, case, cases[case]) for case in cases if case not in ("floor", "epcomm")]
