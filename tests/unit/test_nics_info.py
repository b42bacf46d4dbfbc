"""What ``info`` and ``info --plan`` tell about NICs, and that the plan is the one that the C++ side lays out."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.sysfs import Sysfs

from epcomm import BackendUnavailableError, _info_rdma, _nics, _paths, config

LAUNCHERS = [variable.name for variable in config.LAUNCHER_VARIABLES]
PLAN_PROGRAM = """
#include "epcomm/plan.h"
#include <cstdio>
#include <cstdlib>
int main(int, char** argv) {
  const epcomm::PlanShape shape{atoi(argv[1]), atoi(argv[2]), atoi(argv[3])};
  for (int peer = 0; peer < shape.num_ranks; ++peer) {
    for (int channel = 0; channel <= shape.num_channels; ++channel) {
      const epcomm::PlanRow row = epcomm::plan_row(shape, peer, channel, atoi(argv[4]));
      std::printf("%d %d %d %d %d\\n", row.peer, row.channel, row.control, row.path, row.remote_path);
    }
  }
}
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [*LAUNCHERS, *(variable.name for variable in config.VARIABLES if "_IB_" in variable.name)]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sysfs(tmp_path):
    made = Sysfs(tmp_path / "sys")
    for i in range(3):
        place = f"pci0000:{i}0/0000:{i}0:00.0/0000:{i}1:00.0"
        made.nic(f"mlx5_{i}", place, ports=2, state=["4: ACTIVE", "1: DOWN" if i == 1 else "4: ACTIVE"])
    return made


def test_ports_and_decision_with_reasons(sysfs):
    told = _info_rdma.collect(sysfs.root)
    assert json.loads(json.dumps(told)) == told
    assert told["problem"] is None and told["provider"] == "verbs"
    assert told["paths"] == [["mlx5_0", 1, 3], ["mlx5_0", 2, 3], ["mlx5_1", 1, 3], ["mlx5_2", 1, 3], ["mlx5_2", 2, 3]]
    rows = {(row["device"], row["port"]): row for row in told["ports"]}
    assert len(rows) == 6
    down = rows["mlx5_1", 2]
    assert not down["used"] and "DOWN" in down["refused"] and down["state"] == "DOWN"
    up = rows["mlx5_0", 1]
    assert up["used"] and up["driver"] == "mlx5_core" and up["gid"] == "GID 3 RoCE v2 10.0.0.1"
    assert up["rate_gbps"] == 200 and up["link_layer"] == "Ethernet" and up["numa_node"] == 0
    assert "mlx5_1 port 2: not used: port is DOWN (link: LinkUp), not ACTIVE" in told["reasons"]


def test_the_launcher_says_whose_share_is_told(sysfs, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert _info_rdma.collect(sysfs.root)["paths"] == [["mlx5_2", 1, 3], ["mlx5_2", 2, 3]]


@pytest.mark.parametrize(("variable", "value", "part"), [
    ("EPCOMM_IB_HCA", "nope", "takes none of the devices here: mlx5_0:1"),
    ("EPCOMM_IB_GID_INDEX", "9", "no GID of index 9"),
    ("EPCOMM_IB_MTU", "1500", None),  # of no concern here: the table of variables tells it
    ("EPCOMM_IB_MAP", "7=mlx5_0", "no row for rank 0"),
])  # fmt: skip
def test_a_problem_is_told_and_stops_nothing(sysfs, monkeypatch, variable, value, part):
    monkeypatch.setenv(variable, value)
    told = _info_rdma.collect(sysfs.root)
    assert part is None and told["problem"] is None or part in told["problem"]


def test_what_each_gpu_is_near_to(sysfs, monkeypatch, tmp_path):
    gpu = sysfs.gpu("pci0000:20/0000:20:00.0/0000:22:00.0")
    (tmp_path / "gpus" / gpu).mkdir(parents=True)
    monkeypatch.setattr(_info_rdma, "_GPUS", tmp_path / "gpus")
    assert _info_rdma.collect(sysfs.root)["gpus"] == {gpu: ["mlx5_2"]}


def run(*arguments, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.run([sys.executable, "-m", "epcomm", *arguments], env={**kept, **variables}, capture_output=True,
                          text=True, timeout=60)


def test_info_has_the_section():
    told = json.loads(run("info", "--json").stdout)["rdma"]
    assert told["paths"] or told["problem"]
    text = run("info", EPCOMM_IB_PROVIDER="soft", EPCOMM_SOFTHCA_PORTS="3").stdout
    assert "RDMA ports" in text and "soft2:1" in text and "soft2 port 1: used" in text


def test_plan_of_this_machine():
    done = run("info", "--plan", "--json", "--ranks", "3", "--channels", "5", EPCOMM_IB_PROVIDER="soft")
    told = json.loads(done.stdout)
    assert (told["num_ranks"], told["num_channels"], len(told["rows"])) == (3, 5, 2 * 6)
    assert [row["device"] for row in told["rows"][:6]] == ["soft0", "soft1"] * 3
    text = run("info", "--plan", "--ranks", "3", "--channels", "5", EPCOMM_IB_PROVIDER="soft").stdout
    assert text.count("control") == 2 + 1  # a row for each peer, and the caption
    assert "queue pairs of rank 0 of 3, 5 channels of data" in text


def test_plan_without_a_port_says_why():
    done = run("info", "--plan", EPCOMM_IB_PROVIDER="soft", EPCOMM_IB_HCA="mlx5_0")
    assert done.returncode == 1 and done.stdout == ""
    assert "EPCOMM_IB_HCA='mlx5_0' takes none of the devices here: soft0:1, soft1:1" in done.stderr


@pytest.mark.parametrize("arguments", [("--ranks", "0"), ("--channels", "257"), ("--channels", "0"), ("--ranks", "x")])
def test_plan_of_nothing_is_refused(arguments):
    done = run("info", "--plan", *arguments)
    assert done.returncode == 2 and "allowed: 1 to" in done.stderr


def test_a_port_per_channel_is_the_default(sysfs, monkeypatch):
    monkeypatch.setenv("EPCOMM_NUM_THREADS", "1")
    assert _info_rdma.plan(2, None, sysfs.root)["num_channels"] == 5
    monkeypatch.setenv("EPCOMM_NUM_THREADS", "8")
    assert _info_rdma.plan(2, None, sysfs.root)["num_channels"] == 8
    monkeypatch.setenv("EPCOMM_IB_GID_INDEX", "9")
    with pytest.raises(BackendUnavailableError, match="no GID of index 9"):
        _info_rdma.plan(2, None, sysfs.root)


def test_the_plan_is_that_of_the_header():
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "plan.cpp", Path(folder) / "plan"
        source.write_text(PLAN_PROGRAM)
        command = [*compiler, "-std=c++17", f"-I{_paths.include_dir()}", str(source), "-o", str(program)]
        subprocess.run(command, check=True)
        for ranks, channels, paths, remote in [(2, 1, 1, 1), (3, 4, 2, 3), (4, 5, 3, 2), (2, 8, 4, 8)]:
            shape = [str(number) for number in (ranks, channels, paths, remote)]
            told = subprocess.run([str(program), *shape], capture_output=True, text=True, check=True).stdout
            wanted = [tuple(map(int, line.split())) for line in told.splitlines()]
            ports = [_nics.NicPath(f"d{i}", 1, 3) for i in range(paths)]
            made = [
                (row["peer"], row["channel"], int(row["kind"] == "control"), int(row["device"][1:]), row["remote_path"])
                for row in _nics.plan(ports, ranks, channels, rank=0, remote_paths=remote)
            ]
            assert made == [row for row in wanted if row[0] != 0]
