"""Communicators under the launchers that people use: torchrun, mpirun, plain multiprocessing; groups and sub-groups.

What carries the bytes is tested in `../unit/test_bootstrap_launch.py`. Here whole programs run, move tokens, and end
with exit code 0.
"""

import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import launched
from helpers.pool import free_port

from epcomm._launch import mpirun_command
from epcomm._registry import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(launched.__file__)
TIMEOUT_S = 240
SEARCHED = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
TORCHRUN = shutil.which("torchrun", path=SEARCHED)
LAUNCHER_PREFIXES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "TORCHELASTIC_", "EPCOMM_PORT")
needs_torchrun = pytest.mark.skipif(TORCHRUN is None or importlib.util.find_spec("torch") is None,
                                    reason="torchrun is not installed")  # fmt: skip
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
                               reason="mpirun or mpi4py is not installed")  # fmt: skip


@pytest.fixture
def host_backend(backend):
    """A backend that moves NumPy arrays."""
    if next(row for row in BACKENDS if row.name == backend).needs_cuda:
        pytest.skip(f"backend {backend} has device memory; the program moves host arrays")
    return backend


@pytest.fixture
def environ(host_backend):
    """The environment without a launcher, and with this repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "EPCOMM_BACKEND": host_backend, "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "error::ResourceWarning:epcomm"}  # fmt: skip


def run(command, folder, environ, num_ranks):
    """What each rank saw."""
    done = subprocess.run(command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=TIMEOUT_S)  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@needs_torchrun
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_torchrun(tmp_path, environ, num_ranks):
    parts = ["environment", "torch_world", "torch_destroyed"]
    command = [TORCHRUN, "--nproc-per-node", str(num_ranks), "--master-port", str(free_port()), str(PROGRAM), *parts]
    for rank, seen in enumerate(run([*command, "--out", str(tmp_path)], tmp_path, environ, num_ranks)):
        me, half = [rank, num_ranks], [rank // 2, num_ranks // 2]
        assert seen["environment"] == seen["torch_destroyed"] == me
        assert seen["torch_world"]["world"] == [me, me]
        assert seen["torch_world"]["half"] == half and seen["torch_world"]["both"] == [me, half]
        assert "not a member" in seen["torch_world"]["not mine"]
        assert seen["torch_world"].get("turned", [num_ranks - 1 - rank, num_ranks]) == [num_ranks - 1 - rank, num_ranks]


@needs_mpi
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_mpirun(tmp_path, environ, num_ranks):
    command = [*mpirun_command(num_ranks), sys.executable, str(PROGRAM), "mpi", "environment", "--out", str(tmp_path)]
    for rank, seen in enumerate(run(command, tmp_path, environ, num_ranks)):
        me, half = [rank, num_ranks], [rank // 2, num_ranks // 2]
        assert seen["environment"] == seen["mpi"]["world"] == seen["mpi"]["none"] == seen["mpi"]["freed"] == me
        assert seen["mpi"]["half"] == half and seen["mpi"]["both"] == [me, half]
        assert seen["mpi"]["turned"] == [num_ranks - 1 - rank, num_ranks]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_plain_multiprocessing(tmp_path, host_backend, num_ranks, monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EPCOMM_BACKEND", host_backend)
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    of_rank = {rank: (rank, num_ranks, port, tmp_path) for rank in range(num_ranks)}
    children = [spawn.Process(target=launched.child, args=args) for args in of_rank.values()]
    for process in children:
        process.start()
    try:
        for process in children:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
    finally:
        for process in children:
            process.kill()
            process.join()
    for rank in range(num_ranks):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == {"environment": [rank, num_ranks], "both": [[rank, num_ranks]] * 2}
