"""Command line of ``python -m epcomm bench``."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from epcomm import _console, _launch
from epcomm._bootstrap import launcher
from epcomm.errors import EpcommError

DEFAULT_TOKENS = {"train": 2048, "decode": 128}
GPU_TOKENS = 4096
DEFAULT_REPEAT = {"train": 20, "decode": 200}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show and write; returns the exit code."""
    arguments = parse(argv)
    # NumPy and the rest come only once the command line is right.
    from epcomm import _create
    from epcomm.bench import report as reports
    from epcomm.bench import run
    from epcomm.bench.workload import Shape

    shape = Shape(arguments.mode, arguments.tokens, arguments.hidden, arguments.experts, arguments.topk,
                  arguments.dtype, arguments.layout, arguments.seed)
    if arguments.device == "cuda":
        return _on_gpus(arguments, shape)
    settings = {"backend": arguments.backend, "sms": None, "threads": arguments.threads,
                "timeout_s": arguments.timeout_s, "baseline_buffers": arguments.baseline_buffers,
                "transport": not arguments.no_transport}
    try:
        _create.check_memory(arguments.backend, False, "`bench --device cuda` measures GPU arrays")
        measured = run.measure(shape, settings, arguments.ranks[0], arguments.repeat, arguments.baselines)
    except (_launch.RanksFailed, EpcommError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    if not measured.speaks:
        return 0
    report = reports.build(shape, measured, arguments.repeat, arguments.baseline_buffers)
    reports.show(report)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    if arguments.plot:
        from epcomm.bench import plot

        plot.draw(report, arguments.plot)
    return 0


def _on_gpus(arguments: argparse.Namespace, shape: Any) -> int:
    from epcomm import _create
    from epcomm.bench import gpu

    if arguments.read:
        try:
            report = gpu.read(arguments.read)
        except (OSError, ValueError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    else:
        reason = gpu.why_not()
        if reason is not None:
            print(f"bench: {reason}", file=sys.stderr)
            return 1
        try:
            _create.check_memory(arguments.backend, True, "`bench` without --device cuda measures host arrays")
            measured = _runs_on_gpus(arguments, shape)
        except EpcommError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("bench: interrupted", file=sys.stderr)
            return 130
        if measured is None:
            return 0
        report = measured
    gpu.show(report)
    if arguments.read and arguments.json:
        gpu.write(report, arguments.json)
    if arguments.plot and report["runs"]:
        from epcomm.bench import plot_gpu

        plot_gpu.draw(report, arguments.plot)
    return 1 if report["failed"] else 0


def _runs_on_gpus(arguments: argparse.Namespace, shape: Any) -> dict[str, Any] | None:
    """A run for each number of ranks, written as they end; one that fails keeps the others from nothing."""
    from epcomm.bench import gpu

    settings = {"backend": arguments.backend, "timeout_s": arguments.timeout_s}
    report = gpu.begin(shape, arguments.repeat)
    for num_ranks in arguments.ranks:
        try:
            run = gpu.measure(shape, settings, num_ranks, arguments.repeat, arguments.sms or gpu.DEFAULT_SMS,
                              arguments.baselines)
        except (_launch.RanksFailed, EpcommError) as error:
            print(f"bench: {num_ranks} ranks: {error}", file=sys.stderr)
            report["failed"][str(num_ranks)] = str(error)
        else:
            if run is None:
                return None
            report["runs"].append(run)
        if arguments.json:
            gpu.write(report, arguments.json)
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong one ends the process with code 2 and a usage line."""
    parser = argparse.ArgumentParser(
        prog="python -m epcomm bench",
        description="Measure layout, dispatch and combine, the memory-copy floor, and what a user would do without "
                    "epcomm, in turns in one run. Starts local ranks, or joins those of torchrun or mpirun.")
    parser.add_argument("--mode", choices=("train", "decode"), default="train",
                        help="train: thousands of tokens; decode: 1 to 128, with throughput calls until there are "
                             "low-latency ones (default train)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: calls on GPU arrays by CUDA events, swept over --sms; ranks share GPUs where there "
                             "are fewer (default cpu)")
    parser.add_argument("--ranks", type=_sweep, default=(2,), metavar="N[,M]",
                        help="ranks to start (default 2; a launcher's win); with --device cuda several numbers, one "
                             "run each, to see how time grows")
    parser.add_argument("--tokens", type=_integer(0, 1 << 24), help="per rank (default 2048, decode 128)")
    parser.add_argument("--hidden", type=_integer(1, 1 << 20), default=7168, help="row width (default 7168)")
    parser.add_argument("--experts", type=_integer(1, 1 << 16), default=256, help="in all (default 256)")
    parser.add_argument("--topk", type=_integer(1, 128), default=8, help="picks per token (default 8)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--layout", choices=("rank", "expert"), default="rank", help="of received rows (default rank)")
    parser.add_argument("--backend", help="by name; default: EPCOMM_BACKEND, else the first that works")
    parser.add_argument("--threads", type=_integer(1, 256), help="host threads per rank (default cores / ranks)")
    parser.add_argument("--sms", type=_sweep, metavar="A,B",
                        help="multiprocessors of a call on GPUs (default 8,16,24,48)")
    parser.add_argument("--repeat", type=_integer(1, 100_000),
                        help="counted trials (default 20, decode 200); fewer than 5 give no verdict")
    parser.add_argument("--baselines", type=_baselines, metavar="A,B",
                        help="gloo, mpi4py or none (default both, where installed); on GPUs nccl or none")
    parser.add_argument("--baseline-buffers", choices=("fresh", "kept"), default="fresh",
                        help="of gloo and mpi4py: made in each call, as such code is mostly written, or once")
    parser.add_argument("--no-transport", action="store_true",
                        help="leave out puts, signals and streams between ranks 0 and 1")
    parser.add_argument("--seed", type=int, default=1, help="of the routing (default 1)")
    parser.add_argument("--timeout-s", type=_console.seconds, default=120.0, help="deadline of each step (default 120)")
    parser.add_argument("--json", type=_console.output_file, metavar="FILE", help="write the report with all samples")
    parser.add_argument("--plot", type=_console.picture_file, metavar="FILE",
                        help="draw bars against the floor, on GPUs times and shares of the floor over ranks and "
                             "multiprocessors (matplotlib; .png, .svg, .pdf)")
    parser.add_argument("--read", type=_files, metavar="FILE[,FILE]", default=(),
                        help="with --device cuda: show and draw reports that --json wrote, as one; measures nothing")
    arguments = parser.parse_args(argv)
    on_gpus = arguments.device == "cuda"
    if arguments.tokens is None:
        arguments.tokens = GPU_TOKENS if on_gpus and arguments.mode == "train" else DEFAULT_TOKENS[arguments.mode]
    if arguments.baselines is None:
        arguments.baselines = ["nccl"] if on_gpus else ["gloo", "mpi4py"]
    wrong = set(arguments.baselines) - ({"nccl"} if on_gpus else {"gloo", "mpi4py"})
    if wrong:
        parser.error(f"--baselines {', '.join(sorted(wrong))}: not with --device {arguments.device}")
    if on_gpus and arguments.layout != "rank":
        parser.error("--device cuda: measures --layout rank only")
    if len(arguments.ranks) > 1 and not on_gpus:
        parser.error("--ranks: several numbers only with --device cuda")
    if len(arguments.ranks) > 1 and launcher.find() is not None:
        parser.error("--ranks: the ranks are those of the launcher; start it once for each number")
    if arguments.read and not on_gpus:
        parser.error("--read: only with --device cuda")
    arguments.repeat = arguments.repeat or DEFAULT_REPEAT[arguments.mode]
    if arguments.mode == "decode" and not 1 <= arguments.tokens <= 128:
        parser.error(f"--tokens {arguments.tokens}: decode takes 1 to 128")
    if arguments.topk > arguments.experts:
        parser.error(f"--topk {arguments.topk}: at most --experts {arguments.experts}")
    return arguments


def _integer(low: int, high: int):
    def parse_integer(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected an integer from {low} to {high}") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number}: expected an integer from {low} to {high}")
        return number

    return parse_integer


def _baselines(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip() and name.strip() != "none"]
    unknown = set(names) - {"gloo", "mpi4py", "nccl"}
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected gloo, mpi4py, nccl or none")
    return names


def _files(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _sweep(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_integer(1, 1024)(part.strip()) for part in text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
