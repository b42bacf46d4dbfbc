"""Command line of ``python -m epcomm ab``."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from epcomm import _console, _launch, config
from epcomm._registry import BACKENDS, CONTROL_PATHS
from epcomm.errors import EpcommError

SIZES = (8, 64, 512, 4096, 32768, 262144, 1048576)
_HOST_BACKENDS = tuple(row.name for row in BACKENDS if not row.needs_cuda)
_RDMA = {row.name for row in BACKENDS if row.needs_nics}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show and write; returns the exit code."""
    arguments = parse(argv)
    # NumPy and the rest come only once the command line is right.
    from epcomm.ab import report as reports
    from epcomm.ab import run
    from epcomm.bench.workload import Shape

    shape = Shape("train", arguments.tokens, arguments.hidden, arguments.experts, arguments.topk, "bfloat16", "rank")
    settings = {"sizes": arguments.sizes, "channels": arguments.channels, "rate_count": arguments.messages,
                "shape": shape.as_dict(), "call_channels": max(arguments.channels), "timeout_s": arguments.timeout_s}
    sides = [_side(arguments, "a"), _side(arguments, "b")]
    provider = _provider(sides)
    null_sides = None
    if provider == "soft":
        null_sides = [{**side, "environment": {**side["environment"], "EPCOMM_SOFTHCA_MOVER": "null"}}
                      for side in sides]
    try:
        measured = run.measure(sides, null_sides, settings, arguments.ranks, arguments.repeat)
    except (_launch.RanksFailed, EpcommError) as error:
        print(f"ab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ab: interrupted", file=sys.stderr)
        return 130
    if not measured.speaks:
        return 0
    report = reports.build(measured, sides, settings, arguments.repeat, provider)
    reports.show(report)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    if arguments.plot:
        from epcomm.ab import plot

        plot.draw(report, arguments.plot)
    return 0


def _side(arguments: argparse.Namespace, which: str) -> dict[str, Any]:
    environment = {**arguments.env, **getattr(arguments, f"{which}_env")}
    if getattr(arguments, which) in _RDMA:
        environment.setdefault("EPCOMM_IB_PROVIDER", arguments.provider)
    return {"backend": getattr(arguments, which), "environment": environment}


def _provider(sides: list[dict[str, Any]]) -> str:
    """What carries the messages, in one word; both sides must have the same."""
    words = []
    for side in sides:
        words.append(side["environment"]["EPCOMM_IB_PROVIDER"] if side["backend"] in _RDMA else "memory")
    return words[0] if words[0] == words[1] else " / ".join(words)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong one ends the process with code 2 and a usage line."""
    parser = argparse.ArgumentParser(
        prog="python -m epcomm ab",
        description="Compare two control paths with everything else equal: latency, message rate, bandwidth, dispatch "
                    "and combine, CPU time; interleaved repeats, intervals and a verdict per row.")
    parser.add_argument("--a", choices=_HOST_BACKENDS, default=CONTROL_PATHS[0], help="side A (default %(default)s)")
    parser.add_argument("--b", choices=_HOST_BACKENDS, default=CONTROL_PATHS[1], help="side B (default %(default)s)")
    parser.add_argument("--provider", choices=("soft", "verbs", "mlx5"), default="soft",
                        help="who carries RDMA: the software HCA, libibverbs, or mlx5 hardware (default soft)")
    parser.add_argument("--env", type=_variable, action=_Collect, default={}, metavar="NAME=VALUE",
                        help="an EPCOMM_ variable of both sides; may be repeated")
    parser.add_argument("--a-env", type=_variable, action=_Collect, default={}, metavar="NAME=VALUE",
                        help="of side A alone")
    parser.add_argument("--b-env", type=_variable, action=_Collect, default={}, metavar="NAME=VALUE",
                        help="of side B alone")
    parser.add_argument("--ranks", type=int, default=2,
                        help="ranks to start (default 2); ranks 0 and 1 exchange messages")
    parser.add_argument("--repeat", type=int, default=20, help="counted repeats (default 20; fewer give no verdict)")
    parser.add_argument("--sizes", type=_integers, default=list(SIZES), metavar="N,N",
                        help=f"bytes of a message (default {','.join(map(str, SIZES))})")
    parser.add_argument("--channels", type=_integers, default=[1, 2, 4], metavar="N,N",
                        help="for rate and bandwidth (default 1,2,4)")
    parser.add_argument("--messages", type=int, default=2000, help="of one rate measurement (default 2000)")
    parser.add_argument("--tokens", type=int, default=256, help="per rank, of dispatch and combine (default 256)")
    parser.add_argument("--hidden", type=int, default=2048, help="row width in bfloat16 (default 2048)")
    parser.add_argument("--experts", type=int, default=64, help="in all (default 64)")
    parser.add_argument("--topk", type=int, default=8, help="picks per token (default 8)")
    parser.add_argument("--timeout-s", type=_console.seconds, default=120.0, help="deadline of each step (default 120)")
    parser.add_argument("--json", type=_console.output_file, metavar="FILE", help="write the report with all samples")
    parser.add_argument("--plot", type=_console.picture_file, metavar="FILE",
                        help="draw it (matplotlib; .png, .svg, .pdf)")
    arguments = parser.parse_args(argv)
    for name, low, high in (("ranks", 2, 1024), ("repeat", 1, 10_000), ("messages", 1, 10_000_000),
                            ("tokens", 0, 1 << 20), ("hidden", 1, 1 << 20), ("experts", 1, 1 << 16),
                            ("topk", 1, arguments.experts)):
        if not low <= getattr(arguments, name) <= high:
            parser.error(f"--{name} {getattr(arguments, name)}: expected {low} to {high}")
    if max(arguments.channels) > 32:
        parser.error(f"--channels {max(arguments.channels)}: expected 1 to 32")
    if max(arguments.sizes) > 1 << 26:
        parser.error(f"--sizes {max(arguments.sizes)}: expected 1 to {1 << 26}")
    return arguments


class _Collect(argparse.Action):
    """Gathers NAME=VALUE pairs in a dict of the destination's own."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), values[0]: values[1]})


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    known = {variable.name for variable in config.VARIABLES}
    if not separator or name not in known:
        near = config.nearest(name) if name not in known else None
        hint = f"; did you mean {near}?" if near else ""
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME=VALUE with one of the variables of `python -m epcomm info`{hint}"
        )
    return name, value


def _integers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers, N,N,...") from None
    if not numbers or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 1")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
