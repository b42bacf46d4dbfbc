"""``python -m epcomm``: what is here (``info``), how fast it is (``bench``), which path is faster (``ab``)."""

import argparse
import sys
from collections.abc import Callable, Sequence

from epcomm._version import __version__


def _count(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 to {most}")
        return int(text)

    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m epcomm",
        description="Mixture-of-Experts dispatch and combine.",
        epilog="`python -m epcomm COMMAND --help` tells a command's options. `python -m epcomm.examples.digits` is the "
               "example.",
    )
    parser.add_argument("--version", action="version", version=f"epcomm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    info = commands.add_parser("info", help="version, backends, devices, limits and environment variables")
    info.add_argument("--json", action="store_true", help="one JSON object on standard output")
    info.add_argument("--plan", action="store_true", help="only the queue pairs that a rank here would have")
    info.add_argument("--ranks", type=_count(65536), default=2, metavar="N",
                      help="with --plan: number of ranks (default 2)")
    info.add_argument("--channels", type=_count(256), metavar="C",
                      help="with --plan: channels of data (default as many as a communicator here would have)")
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

    if arguments.plan:
        from epcomm import config
        from epcomm.errors import EpcommError

        config.warn_of_unknown()
        try:
            print(_info.plan(arguments.ranks, arguments.channels, arguments.json), end="")
        except EpcommError as error:
            print(f"epcomm info --plan: {error}", file=sys.stderr)
            return 1
        return 0
    print(_info.as_json() if arguments.json else _info.as_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
