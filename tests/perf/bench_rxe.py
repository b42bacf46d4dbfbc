"""`ibrc` beside perftest's `ib_write_bw` and `ib_write_lat`, in one virtual machine with Soft-RoCE (see `tests/rxe`).

    PYTHONPATH=. python tests/perf/bench_rxe.py [--json FILE]

Two nodes, in turns: perftest, `python -m epcomm bench`, perftest and so on. The goal is that large puts reach 0.8 of
`ib_write_bw` with the same number of queue pairs (channels), the best turn of each. `ib_write_bw` polls without pause
and so takes a processor from the emulated card, which the proxy's naps do not. All figures are those of an emulated
network card on emulated processors: only ratios mean something, and those only on a machine that does nothing else.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rxe"))

import supplies
from helpers.pool import Ranks
from place import FIRST_ADDRESS, NodesPlace

from epcomm import _console

ROOT = Path(__file__).resolve().parents[2]
GOAL = 0.8
SIZES = (65536, 1 << 20)
CHANNELS = (1, 4)


def perftest(place, tool, *arguments):
    """Lines of figures that a pair of perftest's programs prints on the client's side."""
    common = (tool, "-x", "1", "-F", *map(str, arguments))
    server = place.spawn(0, [*common, "-d", "rxe0"])
    time.sleep(0.5 * place.slowness)
    try:
        _, said = place.run(1, *common, "-d", "rxe1", FIRST_ADDRESS, timeout_s=60)
        server.join(10 * place.slowness)
    finally:
        server.kill()
        server.close()
    return [line.split() for line in said.splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+", line)]


def write_bw(place, size, queues):
    """GB/s of `ib_write_bw`."""
    iterations = max(100, (32 << 20) // size // queues)
    figures = perftest(place, "ib_write_bw", "-s", size, "-n", iterations, "-q", queues, "--report_gbits")
    return float(figures[-1][3]) / 8


def write_lat(place, size):
    """Microseconds of `ib_write_lat`, the typical one."""
    return float(perftest(place, "ib_write_lat", "-s", size, "-n", 1000)[-1][4])


def bench(place, options):
    """The report of `python -m epcomm bench` with a rank on each of two nodes."""
    with place.folder() as folder:
        port, processes = str(place.free_port()), []
        command = [sys.executable, "-m", "epcomm", "bench", "--backend", "ibrc", "--baselines", "none", "--json",
                   f"{folder}/report", *options]  # fmt: skip
        for rank in range(2):
            env = place.environment(rank, Ranks(2, 2), "ibrc") | {"RANK": str(rank), "WORLD_SIZE": "2",
                                                                  "MASTER_PORT": port}  # fmt: skip
            log = f"{folder}/log{rank}"
            processes.append(place.spawn(rank, command, env, log, log, cwd=ROOT))
        for process in processes:
            process.join(400)
            process.kill()
        report = Path(folder) / "report"
        if not report.exists():
            raise SystemExit("\n".join(Path(f"{folder}/log{rank}").read_text() for rank in range(2)))
        return json.loads(report.read_text()), Path(f"{folder}/log0").read_text()


def rows_of(reports, what, size, channels):
    """The row of each report."""
    wanted = (what, size, channels)
    return [row for report in reports for row in report["transport"]
            if (row["what"], row["size_bytes"], row["channels"]) == wanted]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    told = parser.parse_args()
    supplies.install([] if supplies.installed("perftest") else ["perftest"])
    place = NodesPlace(nodes=2, say=print)
    wires = {(size, queues): [] for size in SIZES for queues in CHANNELS}
    latencies, reports = [], []
    shape = ("--tokens", "32", "--hidden", "1024", "--experts", "8", "--topk", "2", "--repeat", "5")
    try:
        for _ in range(told.turns):
            for key in wires:
                wires[key].append(write_bw(place, *key))
            latencies.append(write_lat(place, 8))
            report, said = bench(place, shape)
            reports.append(report)
        failed = place.run(0, "rdma", "resource", "show")[1]
    finally:
        place.close()
    print(said)
    rows = []
    for (size, queues), figures in wires.items():
        own = max(rows_of(reports, "stream", size, queues), key=lambda row: row["gbs"])
        wire = max(figures)
        share = own["gbs"] / wire
        rows.append((str(size), str(queues), f"{wire * 1e3:.1f}", f"{own['gbs'] * 1e3:.1f}", f"{share:.2f}",
                     "met" if share >= GOAL else "missed", f"{own['commands_per_post']:.2f}"))  # fmt: skip
    _console.print_table("large puts beside ib_write_bw, MB/s (10^6)",
                         ("bytes", "queue pairs", "ib_write_bw", "ibrc", "share", f"goal {GOAL}", "commands per post"),
                         rows, right=range(5))  # fmt: skip
    own_us = min(row["seconds_each"] for row in rows_of(reports, "put_signal", 8, 1)) * 1e6
    print(f"8 bytes, the best turn: ib_write_lat {min(latencies):.1f} us, put + signal {own_us:.1f} us")
    print(f"left behind: {failed.strip()}")
    if told.json:
        perftests = [{"size_bytes": size, "queue_pairs": queues, "gbs": figures}
                     for (size, queues), figures in wires.items()]  # fmt: skip
        with open(told.json, "w", encoding="utf-8") as file:
            json.dump({"bench": reports, "ib_write_bw": perftests, "ib_write_lat_us": latencies}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
