"""The machine and its nodes: what every other test here stands on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.pool import RankError

pytestmark = pytest.mark.rxe
quick = pytest.mark.rxe(quick=True)
VM = Path(__file__).resolve().parent / "vm.py"


@quick
def test_nodes_have_a_device_and_a_network_each(place):
    for node in (0, 1):
        assert place.run(node, "hostname")[1] == f"node{node}\n"
        devices = place.run(node, "ls", "/sys/class/infiniband")[1].split()
        assert f"rxe{node}" in devices
        assert len(devices) == (1 if place.machine().split else place.nodes)
    assert place.run(0, "cat", "/proc/sys/kernel/random/boot_id") != place.run(
        1, "cat", "/proc/sys/kernel/random/boot_id"
    )


def whereabouts(context):
    return os.environ["RXE_NODE"], os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def test_ranks_are_on_their_nodes(pools, backend):
    for size in pools.place.sizes:
        seen = pools.get(size, backend).run(whereabouts)
        nodes = 1 if backend == "shm" else size.nodes
        per_node = [sum(other % nodes == rank % nodes for other in range(size)) for rank in range(size)]
        assert seen == [(str(rank % nodes), str(rank), str(rank // nodes), str(per_node[rank])) for rank in range(size)]


def sleep_or_die(context, victim):
    if context.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_dead_rank_is_reported_and_the_others_are_ended(pools, backend):
    ranks = pools.get(2, backend)
    told = r"rank 0: still running[\s\S]*sleep_or_die[\s\S]*rank 1: died: killed by SIGKILL"
    with pytest.raises(RankError, match=told):
        ranks.run(sleep_or_die, victim=1)
    assert not ranks.alive
    assert pools.get(2, backend).run(whereabouts)


@quick
def test_a_command_of_ones_own(tmp_path):
    """The launcher alone: output apart and in order, status, what stays and what does not."""
    script = """
        echo out; echo err >&2; pwd; echo kept > $RXE_OUT/kept; echo lost > $RXE_OUT/../lost
        node1 sh -c 'echo $RXE_NODE $RXE_DEVICE $RXE_LINK $GIVEN'; exit 7"""
    options = ["--nodes", "2", "--out", str(tmp_path / "out"), "--env", "GIVEN=a b", "--timeout", "60"]
    done = subprocess.run([sys.executable, str(VM), *options, "--", "bash", "-c", script],
                          capture_output=True, text=True, timeout=300, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 7, done
    assert done.stdout.splitlines()[:2] == ["out", str(tmp_path)] and done.stderr == "err\n"
    assert done.stdout.splitlines()[2].split(maxsplit=2)[:2] == ["1", "rxe1"] and done.stdout.endswith(" a b\n")
    assert (tmp_path / "out/kept").read_text() == "kept\n" and not (tmp_path / "lost").exists()


def test_a_command_that_does_not_end():
    done = subprocess.run([sys.executable, str(VM), "--nodes", "1", "--timeout", "1", "--", "sleep", "600"],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 124 and "ended after 1 s" in done.stderr
