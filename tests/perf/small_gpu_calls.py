"""Every kernel of the device engine once or twice at small sizes: something for compute-sanitizer.

    python tests/perf/small_gpu_calls.py [RANKS] [--host]

Ranks (default 1) are processes that take the GPUs in turn. ``--host`` makes the same calls on host memory: a test of
the script, where there is no GPU.
"""

import argparse
import multiprocessing
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import gpu, pool

SHAPE = {"num_experts": 5, "num_topk": 3, "max_tokens_per_rank": 300, "dtype": "float32"}
CASES = (("float32", 64, 20), ("float16", 1030, 9), ("float32", 7, 270), ("float16", 512, 0))
LIMIT_S = 1500.0  # under compute-sanitizer everything is slow


def calls(xp, device, rank, dtype, hidden, tokens):
    """Rank layout in its ways; every rank has another number of tokens."""
    import epcomm

    tokens //= 1 + rank
    with epcomm.Communicator(hidden=hidden, device=device, **SHAPE) as comm:
        x = (xp.arange(tokens * hidden).reshape(tokens, hidden) % 7).astype(dtype)
        idx = xp.arange(tokens * 3).reshape(tokens, 3) * 7 % 6 - 1
        weights = xp.ones((tokens, 3), xp.float32)
        for copy in (None, True):
            out = comm.dispatch(x, idx, weights, scales=xp.ones((tokens, 2), xp.float32), copy=copy)
            again = comm.dispatch(x, handle=out.handle)
            bias = xp.ones(hidden, xp.float32)
            comm.combine(out.x, out.handle, topk_weights=out.topk_weights, bias=bias)
            buffer = comm.combine_buffer(out.handle)
            buffer[...] = 0
            comm.combine(buffer, out.handle)
            y = xp.array(out.x)
            z = comm.combine(y[:, ::-1] if copy else y, out.handle).x
            del again, buffer
        codes = comm.dispatch(x, idx, quantize="fp8")
        assert len(codes.scales) == len(out.x) and z.shape == x.shape
        comm.layout(idx)
        comm.barrier()


def run(rank, on_host):
    """All cases on one rank."""
    if on_host:
        xp, device = np, "cpu"
    else:
        import cupy as xp

        device = "cuda:0"
    for case in CASES:
        calls(xp, device, rank, *case)


def main():
    """Start the ranks; the exit code is 0 if all did well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ranks", type=int, nargs="?", default=1)
    parser.add_argument("--host", action="store_true")
    arguments = parser.parse_args()
    if arguments.ranks == 1:
        run(0, arguments.host)
    else:
        spawn, port, started = multiprocessing.get_context("spawn"), pool.free_port(), []
        for rank in range(arguments.ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(arguments.ranks), "LOCAL_RANK": str(rank),
                   "LOCAL_WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "EPCOMM_PORT": str(port), **({} if arguments.host else gpu.environment_of(rank))}  # fmt: skip
            process = spawn.Process(target=run, args=(rank, arguments.host), daemon=True)
            with pool.environment(own):
                process.start()
            started.append(process)
        for process in started:
            process.join(LIMIT_S)
        if any(process.exitcode != 0 for process in started):
            sys.exit(f"small calls failed: exit codes {[process.exitcode for process in started]}")
    print(f"small calls done on {arguments.ranks} rank(s)")


if __name__ == "__main__":
    main()
