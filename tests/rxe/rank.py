"""A rank of a `helpers.pool.RankPool` inside the machine.

Its arguments: descriptor of its connection, rank, number of ranks, backend, file for its stacks.
"""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import pool

if __name__ == "__main__":
    told = sys.argv[1:]
    pool._rank_main(os.getppid(), int(told[1]), int(told[2]), told[3], Connection(int(told[0])), told[4])
