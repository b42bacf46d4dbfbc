"""``python -m epcomm``: what is here (``info``), how fast it is (``bench``), which path is faster (``ab``)."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m epcomm",
        description="Mixture-of-Experts dispatch and combine.",
        epilog="`python -m epcomm COMMAND --help` tells a command's options.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    info = commands.add_parser("info", help="version, backends, devices, limits and environment variables")
    info.add_argument("--json", action="store_true", help="one JSON object on standard output")
    # Its options live with it: `info` must not pay for what `bench` imports.
    commands.add_parser("bench", help="measure layout, dispatch and combine on this machine", add_help=False)
    commands.add_parser("ab", help="compare two control paths with everything else equal", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "ab":
        from epcomm.ab.cli import main as ab

        return ab(rest)
    if arguments.command == "bench":
        from epcomm.bench.cli import main as bench

        return bench(rest)
    if rest:
        info.error(f"unrecognized arguments: {' '.join(rest)}")
    from epcomm import _info

    print(_info.as_json() if arguments.json else _info.as_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
