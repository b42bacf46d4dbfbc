"""Whole communicators over `ibrc`: ranks with other ports, MTUs and depths than their peers; one whose ports are not
there (B57 for what NICs add: all raise what it has to say, or all fall back). On the software HCA.
"""

import concurrent.futures
import contextlib
import ctypes
import os
import time
from pathlib import Path

import pytest
from helpers import job_calls
from helpers.job import Jobs
from helpers.job_calls import close, create, once

pytest.importorskip("epcomm._ibrc", reason="backend ibrc: not built")
SOFT = {"EPCOMM_IB_PROVIDER": "soft", "EPCOMM_SOFTHCA_PORTS": "3", "EPCOMM_NUM_THREADS": "1"}
ODD = 1  # the rank that is not like the others
NAMES = ("EPCOMM_IB_HCA", "EPCOMM_IB_MAP", "EPCOMM_IB_MTU", "EPCOMM_IB_DEPTH", "EPCOMM_IB_GID_INDEX",
         "EPCOMM_IB_PKEY", "EPCOMM_NODE_ID", "EPCOMM_IB_PROVIDER", "EPCOMM_BACKEND", "EPCOMM_IBRC_CPUS",
         "EPCOMM_IBRC_THREADS")


@pytest.fixture(scope="module")
def jobs():
    made = Jobs()
    yield made
    made.close()


@pytest.fixture
def three(jobs):
    yield jobs.fresh(3, "ibrc", env=SOFT)
    jobs.end_fresh()


def settings(here, variables, everywhere=False):
    """Variables of one rank, or of all; whatever it had before goes."""
    if everywhere or here.rank == ODD:
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ.update({"EPCOMM_IB_PROVIDER": "soft", **variables})


def plan(here):
    return here.state["comm"].plan()


def name_of(here):
    return here.state["comm"].backend


def works(ranks):
    """One call each way; the plan of each rank."""
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(once, way="rank, zero copy")
    plans = ranks.values(plan)
    ranks.values(close)
    for left in ranks.values(job_calls.what_is_left):
        assert left["mappings"] == 0 and left["threads"] == 1, left
    return plans


def pairs(rows, peer):
    return {row["channel"]: row for row in rows if row["peer"] == peer}


def agree(plans):
    """Both ends of each queue pair tell the same of it."""
    for rank, rows in enumerate(plans):
        for peer in range(len(plans)):
            if peer == rank:
                continue
            mine, theirs = pairs(rows, peer), pairs(plans[peer], rank)
            assert set(mine) == set(theirs)
            for channel, row in mine.items():
                other = theirs[channel]
                assert (row["remote_device"], row["remote_qpn"]) == (other["device"], other["qpn"])
                assert (row["remote_gid"], row["mtu"]) == (other["gid"], other["mtu"])


def test_every_port_carries_data(three):
    plans = works(three)
    agree(plans)
    for rank, rows in enumerate(plans):
        for peer in range(3):
            if peer != rank:
                data = [row["device"] for row in pairs(rows, peer).values() if row["kind"] == "data"]
                assert data == ["soft0", "soft1", "soft2"]
                assert [row["kind"] for row in pairs(rows, peer).values()] == ["data"] * 3 + ["control"]


@pytest.mark.parametrize("variables", [{"EPCOMM_IB_HCA": "=soft1"}, {"EPCOMM_IB_MAP": "*=soft2,soft0"}])
def test_ranks_with_other_ports(three, variables):
    three.values(settings, variables=variables)
    plans = works(three)
    agree(plans)
    wanted = {"EPCOMM_IB_HCA": ["soft1"] * 3, "EPCOMM_IB_MAP": ["soft2", "soft0", "soft2"]}[next(iter(variables))]
    assert [row["device"] for row in pairs(plans[ODD], 0).values() if row["kind"] == "data"] == wanted
    assert [row["remote_device"] for row in pairs(plans[0], ODD).values() if row["kind"] == "data"] == wanted


def test_ranks_with_another_mtu_and_depth(three):
    three.values(settings, variables={"EPCOMM_IB_MTU": "1024", "EPCOMM_IB_DEPTH": "16"})
    plans = works(three)
    agree(plans)
    assert {row["mtu"] for row in pairs(plans[0], ODD).values()} == {1024}
    assert {row["depth"] for row in pairs(plans[ODD], 0).values()} == {16}
    assert {row["depth"] for row in pairs(plans[0], ODD).values()} == {256}
    assert {row["mtu"] for row in pairs(plans[0], 2).values()} == {row["mtu"] for row in pairs(plans[2], 0).values()}


@pytest.mark.parametrize(("variables", "kind", "part"), [
    ({"EPCOMM_IB_HCA": "nope"}, "InvalidArgumentError", "takes none of the devices here: soft0:1, soft1:1, soft2:1"),
    ({"EPCOMM_IB_HCA": "soft0:"}, "InvalidArgumentError", "EPCOMM_IB_HCA='soft0:'"),
    ({"EPCOMM_IB_MAP": "7=soft1"}, "InvalidArgumentError", "no row for rank 1 of this host"),
    ({"EPCOMM_IB_MTU": "1500"}, "InvalidArgumentError", "EPCOMM_IB_MTU='1500'"),
    ({"EPCOMM_IB_PKEY": "1"}, "InvalidArgumentError", "soft0 port 1 has partition keys 0 to 0"),
    ({"EPCOMM_IB_DEPTH": "17"}, "InvalidArgumentError", "EPCOMM_IB_DEPTH='17'"),
    ({"EPCOMM_IB_PROVIDER": "sofd"}, "InvalidArgumentError", "EPCOMM_IB_PROVIDER='sofd'"),
])  # fmt: skip
def test_b57_one_rank_is_set_wrongly(three, variables, kind, part):
    three.values(settings, variables=variables)
    for answer in three.run(create, timeout_s=10):
        assert answer.failure is not None and answer.failure.kind == kind, answer
        assert f"rank {ODD}" in answer.failure.text and part in answer.failure.text, answer
        assert answer.end - answer.start < 8
    three.values(settings, variables={})
    works(three)


def test_b57_one_rank_without_rdma(three):
    """Named: all raise its reason. In a list, all take the next; the machine's own devices are not there on rank 1."""
    from epcomm import _sysfs

    if _sysfs.devices():
        pytest.skip("this machine has RDMA devices")
    three.values(settings, variables={"EPCOMM_IB_PROVIDER": "verbs"})
    for answer in three.run(create, timeout_s=10):
        assert answer.failure is not None and answer.failure.kind == "BackendUnavailableError", answer
        assert f"rank {ODD}" in answer.failure.text and "RDMA" in answer.failure.text
    three.values(create, timeout_s=10, backend="ibrc,shm")
    assert three.values(name_of) == ["shm"] * 3
    three.values(once, way="expert")
    three.values(close)


def cpus_of_proxies(here):
    """CPUs of each proxy thread of this rank."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("epcomm-ibrc-"):
            (line,) = [line for line in (task / "status").read_text().splitlines() if "Cpus_allowed_list" in line]
            found.append(line.split()[1])
    return sorted(found)


@pytest.mark.parametrize(("threads", "wanted"), [(1, [["0"], ["1"], ["0"]]), (2, [["0", "1"]] * 3)])
def test_ranks_of_a_host_share_out_the_cpus(three, threads, wanted):
    """They read the same variable: were each to begin at its first CPU, all proxies would share that one."""
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs CPUs 0 and 1")
    variables = {"EPCOMM_IBRC_CPUS": "0,1", "EPCOMM_IBRC_THREADS": str(threads)}
    three.values(settings, variables=variables, everywhere=True)
    three.values(create)
    assert three.values(cpus_of_proxies) == wanted
    three.values(close)


def break_and_check(here):
    """What check() has to say after a queue pair to rank 1 failed between calls."""
    comm = here.state["comm"]
    backend = comm._engine.backend
    getattr(backend, "far", backend)._break_queue(1)
    backend.signal(1, 0, add=0)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        comm.check()
        time.sleep(0.01)


@pytest.mark.parametrize("backend", ["ibrc", "shm_ibrc"])
def test_check_says_how_a_peer_was_lost(three, backend):
    """Its process did not end: the queue pair did, with a status."""
    three.values(settings, variables={"EPCOMM_NODE_ID": "apart"})
    three.values(create, backend=backend)
    (answer,) = three.run(break_and_check, ranks=[0], within_s=30)
    assert answer.failure is not None and answer.failure.kind == "PeerLostError", answer
    for part in ("rank 1 is lost", "of channel 0 (soft0 port 1)", "status 5"):
        assert part in answer.failure.text, answer.failure
    assert "process" not in answer.failure.text
    three.values(close)


@contextlib.contextmanager
def two_ends(module, **options):
    """Two connected backends of this process over the software HCA."""
    backend = pytest.importorskip(f"epcomm.{module}").Backend
    ends = [backend({"num_ranks": 2, "rank": rank, "provider": "soft", "paths": [("soft0", 1, 0)], **options})
            for rank in range(2)]
    try:
        infos = []
        for end in ends:
            end.alloc_heap(1 << 16)
            infos.append(end.export_info())
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for met in [threads.submit(end.connect, rank, infos, 0, 20.0) for rank, end in enumerate(ends)]:
                met.result(30)
        yield ends
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("module", ["_ibrc", "_ibgda"])
@pytest.mark.parametrize("mover", ["copy", "null"])
def test_the_null_mover_completes_and_moves_nothing(monkeypatch, module, mover):
    """What `ab` calls the control path alone is that: completions come, bytes do not."""
    monkeypatch.setenv("EPCOMM_SOFTHCA_MOVER", mover)
    with two_ends(module) as ends:
        ctypes.memset(ends[0].peer_ptr(0) + 4096, 7, 64)
        ends[0].put(1, 8192, 4096, 64)
        ends[0].quiet(1, 20.0)
        there = ctypes.string_at(ends[1].peer_ptr(1) + 8192, 64)
        assert there == (bytes([7]) if mover == "copy" else bytes(1)) * 64


@pytest.mark.parametrize("module", ["_ibrc", "_ibgda"])
def test_a_wait_makes_progress_while_it_spins(module):
    """Where nobody else takes completions, a spinning wait does: else each would last as long as its spin."""
    with two_ends(module, spin_us=400_000) as ends:
        start = time.monotonic()
        for _ in range(10):
            ends[0].put(1, 8192, 4096, 64)
            ends[0].quiet(1, 20.0)
        assert time.monotonic() - start < 2
