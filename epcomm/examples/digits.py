"""scikit-learn's 1,797 handwritten digits through a Mixture-of-Experts layer spread over ranks.

    python -m epcomm.examples.digits --ranks 4

Each rank holds a part of the images and a part of the 8 experts. A fixed gate, computed from the data, picks two
experts per image; ``dispatch`` brings the images to the ranks of their experts, ``combine`` brings the results back.
Every value is compared bit for bit with one process that runs the whole layer alone. Exit code 1 if a bit differs.

With ``--train`` a classifier with such a layer is trained, by `epcomm.torch`, and each loss compared with one process.

Under ``torchrun`` or ``mpirun`` it joins their ranks; otherwise it starts its own.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from epcomm import _console, _create, _launch, _nics
from epcomm.errors import EpcommError
from epcomm.examples import _moe

WORKER = "epcomm.examples._digits_rank:DigitsRank"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    arguments = _parse(argv)
    try:
        _create.check_memory(arguments.backend, False, "name another, or none")
        if arguments.train:
            from epcomm.examples import _digits_train  # needs torch

            return _digits_train.main(arguments)
        # Ranks that are started here get the images from here: importing scikit-learn takes each of them seconds.
        options = {"images": _moe.load_images().tobytes().hex(), "layout": arguments.layout,
                   "backend": arguments.backend, "timeout_s": arguments.timeout_s}
        with _launch.join_or_start(WORKER, options, arguments.ranks, arguments.timeout_s) as ranks:
            described, trials = _run(ranks, arguments.repeat)
    except ImportError as error:
        missing = "torch" if arguments.train and "torch" in str(error) else "scikit-learn"
        print(f"digits: {error}; `pip install {missing}` brings what is missing", file=sys.stderr)
        return 1
    except (_launch.RanksFailed, EpcommError) as error:
        print(f"digits: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("digits: interrupted", file=sys.stderr)
        return 130
    report = _report(arguments.layout, described, trials)
    if ranks.speaks:
        _show(report)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=2)
    return 0 if report["same_bits"] else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m epcomm.examples.digits", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=_count, default=4, help="processes to start (default 4; a launcher's win)")
    parser.add_argument("--layout", choices=("rank", "expert"), default="expert", help="layout of received rows")
    parser.add_argument("--backend", help="backend by name; default: EPCOMM_BACKEND, else the first that works")
    parser.add_argument("--repeat", type=_count, default=20, help="how often all images travel (default 20)")
    parser.add_argument("--timeout-s", type=_console.seconds, default=60.0, help="deadline of each step (default 60)")
    parser.add_argument("--json", type=_console.output_file, metavar="FILE", help="write the report to a file too")
    parser.add_argument("--train", action="store_true", help="train a classifier instead (needs torch)")
    parser.add_argument("--plot", type=_console.picture_file, metavar="FILE",
                        help="with --train: draw the losses (needs matplotlib)")
    arguments = parser.parse_args(argv)
    if arguments.plot and not arguments.train:
        parser.error("--plot draws the losses of --train")
    return arguments


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not in 1 to 100000")
    return number


def _run(ranks: _launch.Ranks, repeat: int) -> tuple[list[Any], list[list[Any]]]:
    """Descriptions by rank and trials by (repeat, rank)."""
    described = ranks.ask("describe")
    trials = []
    with _console.progress(f"{ranks.num_ranks} ranks", repeat, silent=not ranks.speaks) as show:
        for done in range(1, repeat + 1):
            trials.append(ranks.ask("trial"))
            show(done)
    return described, trials


def _report(layout: str, described: list[Any], trials: list[list[Any]]) -> dict[str, Any]:
    ranks = []
    for rank, told in enumerate(described):
        mine = [trial[rank] for trial in trials]
        dispatch, experts, combine = (statistics.median(trial["seconds"][step] for trial in mine) for step in range(3))
        ranks.append({
            **told,
            "rank": rank,
            "rows_received": mine[-1]["rows"],
            "bytes_received": mine[-1]["bytes"],
            "dispatch_s": dispatch,
            "experts_s": experts,
            "combine_s": combine,
            "values_differ": sum(trial["values_differ"] for trial in mine),
            "counts_differ": sum(trial["counts_differ"] for trial in mine),
        })
    return {
        "layout": layout,
        "model": _nics.model_note(ranks[0]["backend"]),
        "repeat": len(trials),
        "images": sum(rank["images"] for rank in ranks),
        "ranks": ranks,
        "same_bits": not any(rank["values_differ"] or rank["counts_differ"] for rank in ranks),
    }


def _show(report: dict[str, Any]) -> None:
    ranks = report["ranks"]
    owner = {number: rank["rank"] for rank in ranks for number in rank["experts"]}
    experts = sorted(owner)
    _console.print_table(
        "picks: images of each rank (rows) for each expert (columns)",
        ("rank", *(f"expert {number}\non rank {owner[number]}" for number in experts), "all"),
        [(rank["rank"], *(rank["picks"][number] for number in experts), sum(rank["picks"])) for rank in ranks]
        + [("all", *(sum(rank["picks"][number] for rank in ranks) for number in experts),
            sum(sum(rank["picks"]) for rank in ranks))],
        right=range(1, len(experts) + 2),
    )
    _console.print_table(
        f"{report['layout']} layout, backend {ranks[0]['backend']}, median of {report['repeat']} repeats",
        ("rank", "images", "rows received", "bytes received", "dispatch ms", "experts ms", "combine ms", "check"),
        [(rank["rank"], rank["images"], rank["rows_received"], _console.human_bytes(rank["bytes_received"]),
          *(f"{rank[step] * 1e3:.2f}" for step in ("dispatch_s", "experts_s", "combine_s")), _verdict(rank))
         for rank in ranks],
        right=range(1, 7),
    )
    if report["model"]:
        print(f"backend {ranks[0]['backend']} {report['model']}")
    if report["same_bits"]:
        print(f"{report['images']:,} images: the same bits as one process, {report['repeat']} times")
    else:
        print(f"{report['images']:,} images: NOT the same bits as one process")


def _verdict(rank: dict[str, Any]) -> str:
    if rank["values_differ"] or rank["counts_differ"]:
        return f"{rank['values_differ']} values and {rank['counts_differ']} counts differ"
    return "same bits"


if __name__ == "__main__":
    sys.exit(main())
