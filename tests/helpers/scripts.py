"""Ranks that are whole programs: what counts is how their interpreters end.

A script starts with :data:`PRELUDE`: ``rank``, ``num_ranks``, ``create(**more)`` and ``round_trip(comm, way)``.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from helpers import pool

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import gc, os, signal, sys, threading, time
import numpy as np
import epcomm
from types import SimpleNamespace
from helpers import job_calls

rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here = SimpleNamespace(rank=rank, num_ranks=num_ranks, state={})


def create(**more):
    return epcomm.Communicator(**{**job_calls.SHAPE, "backend": os.environ["TEST_BACKEND"], **more})


def round_trip(comm, way="expert"):
    return job_calls.round_trip(here, way, comm)


"""


class Ended(NamedTuple):
    """How a rank's program ended."""

    code: int
    out: str
    err: str
    seconds: float


def run(backend, num_ranks, code, python=("-W", "always::ResourceWarning"), timeout_s=30.0, env=None):
    """Run a program as every rank; how each ended. Fails if one does not end in time.

    ``code`` is text, or one text per rank.
    """
    codes = [code] * num_ranks if isinstance(code, str) else code
    port = pool.free_port()
    kept = pool.SoftPlace.SETTINGS
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EPCOMM_") or name in kept}
    inherited[pool.SESSION_VARIABLE] = os.environ.get(pool.SESSION_VARIABLE, "")
    inherited |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "PYTHONFAULTHANDLER": "1"}
    processes, start = [], time.monotonic()
    try:
        for rank, text in enumerate(codes):
            processes.append(
                subprocess.Popen(
                    [sys.executable, *python, "-c", PRELUDE + text],
                    env={**inherited, **pool._rank_environment(rank, num_ranks, port), "EPCOMM_TIMEOUT_S": "20",
                         "TEST_BACKEND": backend, **(env or {})},
                    cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    start_new_session=True,
                )
            )  # fmt: skip
        ended = []
        for rank, process in enumerate(processes):
            try:
                out, err = process.communicate(timeout=max(0.1, start + timeout_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGABRT)  # its stacks, and those of what it forked
                _, err = process.communicate(timeout=10)
                raise AssertionError(f"rank {rank} does not end within {timeout_s} s:\n{err}") from None
            ended.append(Ended(process.returncode, out, err, time.monotonic() - start))
        return ended
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it forked, too
            if process.poll() is None:
                process.communicate(timeout=10)


def check_clean(ended, codes=None, warnings=1):
    """Every rank ended with its exit code; destructors said nothing but at most so many ResourceWarnings."""
    for rank, one in enumerate(ended):
        wanted = codes[rank] if codes else 0
        assert one.code == wanted, f"rank {rank}: {pool.exit_text(one.code)}\n{one.out}\n{one.err}"
        assert "Exception ignored" not in one.err and (wanted or "Traceback" not in one.err), one.err
        assert one.err.count("was not closed") <= warnings, one.err
