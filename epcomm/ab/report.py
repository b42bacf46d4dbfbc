"""From series to a report: medians, intervals, verdicts, CPU time; as JSON and as tables."""

import os
import statistics
from typing import Any

from epcomm import _console
from epcomm._version import __version__
from epcomm.ab import stats
from epcomm.ab.run import Measured

SCHEMA = 1
DEFINITIONS = {
    "put": "one put, from the call until it has been carried out (its completion came back)",
    "put + signal": "half a round trip: a put and its signal to the peer, whose answer is the same",
    "message rate": "the smallest puts, each with its signal, one thread per channel, until all have been carried out",
    "bandwidth": "the largest puts, one thread per channel, until all have been carried out; one way",
    "calls": "a whole dispatch or combine (expert outputs in ordinary memory), time of the slowest rank",
    "no mover": "the control path alone: the same with a mover that completes messages without moving a byte",
    "ratio": "how many times as fast B is as A, from the medians",
    "interval": f"{stats.CONFIDENCE:.0%} percentile bootstrap of the repeats, resampled as pairs",
    "repeats": f"every {stats.BLOCK} repeats both sides are made anew, the other one first: where memory or a thread "
               "happens to lie favours neither; those repeats are resampled together",
    "verdict": f"from {stats.MIN_REPEATS} repeats on: no difference if the ratio's interval has 1 in it",
    "CPU": "seconds that threads of rank 0 (the sender) ran, per message; `caller` is whoever calls epcomm",
}
MODEL = (
    "provider: the software HCA. This is not a network result. The model executes the work requests, doorbells and "
    "completions that hardware would get, with threads of this host that copy memory. Not modelled: PCIe latency of "
    "doorbells and fetches, a NIC's own message rate, wires, switches, congestion, GPUs. "
)
BOTH_MODELS = ("Both sides use the same model, so their difference is the control path: who builds work requests, who "
               "rings, who polls.")
ONE_MODEL = "One side uses it and the other does not, so their difference is not that of two control paths alone."


def model_note(provider: str) -> str | None:
    """What every output must say if a side's NICs are the software HCA; ``None`` else."""
    if "soft" not in provider.split(" / "):
        return None
    return MODEL + (BOTH_MODELS if provider == "soft" else ONE_MODEL)


def build(measured: Measured, sides: list[dict[str, Any]], settings: dict[str, Any], repeat: int,
          provider: str) -> dict[str, Any]:
    """The report as plain values."""
    rows = []
    for index, row in enumerate(measured.rows):
        a, b = measured.values[index]
        told = stats.compare(a, b, lower_is_better=row.lower_is_better, seed=index)
        rows.append({"group": row.group, "label": row.label, "unit": row.unit, "lower_is_better": row.lower_is_better,
                     **told._asdict(), "a_values": a, "b_values": b,
                     "a_cpu": _median_cpu(measured.cpu[index][0]), "b_cpu": _median_cpu(measured.cpu[index][1])})
    return {
        "schema": SCHEMA,
        "version": __version__,
        "a": sides[0],
        "b": sides[1],
        "provider": provider,
        "provider_note": model_note(provider),
        "num_ranks": measured.num_ranks,
        "repeat": repeat,
        "shape": settings["shape"],
        "machine": {"cores": len(os.sched_getaffinity(0)), "load_before": measured.load},
        "plan": [side["plan"] for side in measured.described["wire"]],
        "rows": rows,
        "definitions": DEFINITIONS,
    }


def _median_cpu(trials: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for trial in trials for name in trial})
    return {name: statistics.median(trial.get(name, 0.0) for trial in trials) for name in names}


# By unit of the values: (from this value on, what it is divided by, its name); the first that fits.
_SCALES = {
    "s": ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "us")),
    "1/s": ((1e6, 1e6, "M/s"), (0.0, 1e3, "k/s")),
    "B/s": ((0.0, 1e9, "GB/s"),),
}


def _with_interval(value: float, interval: tuple[float, float], unit: str) -> str:
    """A value and its interval in one readable unit."""
    divisor, name = next((divisor, name) for least, divisor, name in _SCALES[unit] if value >= least)
    low, high = interval
    return f"{value / divisor:.3g} {name} [{low / divisor:.3g} {high / divisor:.3g}]"


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    a, b = (_name(report[side]) for side in "ab")
    title = f"A: {a}   B: {b}   provider: {report['provider']}, {report['num_ranks']} ranks, {report['repeat']} repeats"
    table: list[tuple[Any, ...]]
    table = [(row["group"], row["label"], _with_interval(row["a"], row["a_interval"], row["unit"]),
              _with_interval(row["b"], row["b_interval"], row["unit"]),
              f"{row['ratio']:.2f} [{row['ratio_interval'][0]:.2f} {row['ratio_interval'][1]:.2f}]",
              row["verdict"] or "") for row in report["rows"]]
    _console.print_table(title, ("measured", "", "A", "B", "B is x times as fast", "verdict"), table, right=(2, 3, 4))
    names = sorted({name for row in report["rows"] for side in ("a_cpu", "b_cpu") for name in row[side]})
    table = [("dispatch and combine" if row["group"] == "calls" else f"{row['group']}, {row['label']}", side.upper(),
              *(f"{row[side + '_cpu'].get(name, 0.0) * 1e6:.3g}" for name in names))
             for row in report["rows"] for side in "ab" if row[side + "_cpu"]]
    _console.print_table("CPU time of rank 0, us per message, or per dispatch and combine",
                         ("measured", "side", *names), table, right=range(2, 2 + len(names)))
    if report["provider_note"]:
        print(report["provider_note"])
    machine = report["machine"]
    if machine["load_before"] > machine["cores"] / 2:
        print(f"the machine was busy before the run (load {machine['load_before']:.1f} on {machine['cores']} cores)")
    if report["repeat"] < stats.MIN_REPEATS:
        print(f"no verdicts: {report['repeat']} repeat(s), at least {stats.MIN_REPEATS} are needed")
    for name, meaning in report["definitions"].items():
        print(f"  {name}: {meaning}")


def _name(side: dict[str, Any]) -> str:
    return " ".join([side["backend"], *(f"{name}={value}" for name, value in side["environment"].items())])
