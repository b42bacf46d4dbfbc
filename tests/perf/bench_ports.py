"""Bandwidth over one and two rate-limited ports of the software HCA: what the plan of queue pairs makes of them.

    python tests/perf/bench_ports.py [--backend ibgda] [--gbps 2] [--repeat 5] [--json FILE]

Two ranks in one process; rank 0 puts to rank 1. The ports are soft: this shows how channels are spread, not a network.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import threading
from typing import Any

from epcomm import _measure

SIZE = 256 * 1024
STATE = 0
DATA = 65536
# Name, ports, channels.
ROWS = (("one queue pair, one port", 1, 1), ("a queue pair per channel, one port", 1, 4), ("two ports", 2, 4))


class Pair:
    """Two connected ranks."""

    def __init__(self, backend: str, ports: int, channels: int) -> None:
        module = importlib.import_module(f"epcomm._{backend}")
        self.channels = channels
        self.ranks = []
        for rank in (0, 1):
            paths = [(f"soft{port}", 1, 0) for port in range(ports)]
            self.ranks.append(module.Backend(
                {"num_ranks": 2, "rank": rank, "num_channels": channels, "provider": "soft", "paths": paths}))
        for rank in self.ranks:
            rank.alloc_heap(DATA + 2 * channels * SIZE)
        infos = [rank.export_info() for rank in self.ranks]
        failures: list[BaseException] = []

        def connect(rank: int) -> None:
            try:
                self.ranks[rank].connect(rank, infos, STATE, 30.0)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def gbps(self, count: int) -> float:
        """Gbit/s of ``count`` puts on each channel at once."""
        flows = [{"peer": 1, "channel": channel, "src": DATA + channel * SIZE, "size_bytes": SIZE,
                  "dst": DATA + (self.channels + channel) * SIZE, "word": 4096 + 64 * channel}
                 for channel in range(self.channels)]  # fmt: skip
        seconds = _measure.stream(self.ranks[0], flows, False, count, 60.0)
        return self.channels * count * SIZE * 8 / seconds / 1e9

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def measure(backend: str, gbps: float, repeat: int, seconds: float = 0.5) -> list[dict[str, Any]]:
    """A row per way, its median of interleaved repeats."""
    os.environ |= {"EPCOMM_IB_PROVIDER": "soft", "EPCOMM_SOFTHCA_GBPS": str(gbps)}
    pairs = [Pair(backend, ports, channels) for _, ports, channels in ROWS]
    try:
        found: list[list[float]] = [[] for _ in ROWS]
        for _ in range(repeat):
            for pair, (_, ports, channels), told in zip(pairs, ROWS, found, strict=True):
                told.append(pair.gbps(max(4, int(seconds * gbps * 1e9 * ports / (8 * SIZE * channels)))))
    finally:
        for pair in pairs:
            pair.close()
    medians = [statistics.median(told) for told in found]
    return [{"backend": backend, "provider": "soft", "way": name, "ports": ports, "channels": channels, "gbps": median,
             "over_one": median / medians[0]} for (name, ports, channels), median in zip(ROWS, medians, strict=True)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("ibrc", "ibgda"), default="ibgda")
    parser.add_argument("--gbps", type=float, default=2.0, help="rate of each port (default 2)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    rows = measure(options.backend, options.gbps, options.repeat)
    print(f"{options.backend} over the software HCA, {options.gbps:g} Gbit/s per port, {SIZE // 1024} KiB puts; "
          "not a network")
    for row in rows:
        print(f"  {row['way']:36} {row['gbps']:7.2f} Gbit/s  {row['over_one']:5.2f} x")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
