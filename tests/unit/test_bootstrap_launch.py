"""Which rank this is and what carries the bytes: environments, torchrun, torch groups, MPI."""

import functools
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import meeting
from helpers.meeting import Task, loopback

from epcomm import CommTimeoutError, InvalidArgumentError, PeerLostError, UnsupportedError, bootstrap
from epcomm._bootstrap import launcher, mpi

pytestmark = pytest.mark.timeout(120)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
MPIRUN = shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="mpirun or mpi4py is not installed"
)


# ---------------------------------------------------------------------------------------------------- environments


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"RANK": "", "WORLD_SIZE": " "}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("env", 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, ("mpi", 3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("mpi", 0, 2)),
        ({"PMIX_RANK": "5"}, ("mpi", 5, None)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "3"}, ("slurm", 1, 3)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "PMIX_RANK": "1"}, ("slurm", 1, 3)),
        ({"RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ("env", 0, 2)),
        ({"SLURM_NTASKS": "8"}, None),  # a shell of salloc
        ({"SLURM_PROCID": "0"}, None),  # a script of sbatch
        ({"LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, None),
    ],
)
def test_what_an_environment_means(environ, found):
    result = launcher.find(environ)
    assert (None if result is None else result[:3]) == found


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, ("RANK=5", "WORLD_SIZE=2", "from 0 to 1")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2", "WORLD_SIZE=2")),
        ({"RANK": "1"}, ("RANK=1", "WORLD_SIZE is not set")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "RANK is not set")),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ("RANK='one'", "an integer from 0")),
        ({"RANK": "1.0", "WORLD_SIZE": "2"}, ("RANK='1.0'",)),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK='-1'",)),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ("WORLD_SIZE='0'",)),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not set")),
        ({"PMI_SIZE": "2"}, ("PMI_SIZE=2", "PMI_RANK is not set")),
        ({"SLURM_PROCID": "3"}, ("SLURM_PROCID=3", "SLURM_NTASKS is not set")),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "3"}, ("SLURM_PROCID=3", "SLURM_NTASKS=3")),
    ],
)
def test_a_contradiction_names_variable_and_value(environ, parts):
    with pytest.raises(InvalidArgumentError) as caught:
        launcher.find(environ)
    for part in parts:
        assert part in str(caught.value)


@pytest.fixture
def environ(monkeypatch):
    """Sets variables after all launchers' and epcomm's are gone."""
    for name in set(os.environ) - set(meeting.clean_environment()):
        monkeypatch.delenv(name)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return put


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        ({"RANK": 5, "WORLD_SIZE": 2}, InvalidArgumentError, "RANK=5"),
        ({"RANK": 1, "WORLD_SIZE": 2}, InvalidArgumentError, "EPCOMM_PORT: not set with RANK=1, WORLD_SIZE=2"),
        ({"RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": 70000}, InvalidArgumentError, "MASTER_PORT='70000'"),
        ({"RANK": 1, "WORLD_SIZE": 2, "EPCOMM_PORT": "x"}, InvalidArgumentError, "EPCOMM_PORT='x'"),
        ({"SLURM_PROCID": 1, "SLURM_NTASKS": 2}, InvalidArgumentError, "export MASTER_ADDR=$(scontrol show hostnames"),
        ({"PMIX_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}, UnsupportedError, "install mpi4py"),
    ],
)
def test_what_cannot_work_is_refused_at_once(environ, variables, error, text):
    environ(**variables)
    start = time.monotonic()
    with pytest.raises(error) as caught:
        bootstrap.connect(timeout_s=30)
    assert text in str(caught.value) and time.monotonic() - start < 5


def test_mpirun_without_mpi4py_has_a_remedy(environ, monkeypatch):
    environ(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2)
    monkeypatch.setattr(mpi, "world", lambda start: None)
    with pytest.raises(UnsupportedError, match="OMPI_COMM_WORLD_RANK=0, .* install mpi4py, or export MASTER_ADDR"):
        bootstrap.connect(timeout_s=30)


def test_mpi4py_of_another_mpi_has_a_remedy(environ, monkeypatch):
    class Alone:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 1

    environ(PMI_RANK=0, PMI_SIZE=2)
    monkeypatch.setattr(mpi, "world", lambda start: Alone())
    with pytest.raises(UnsupportedError, match="mpi4py says rank 0 of 1: it was built for another MPI"):
        bootstrap.connect(timeout_s=30)


def test_one_rank_of_a_launcher_needs_no_port(environ):
    environ(RANK=0, WORLD_SIZE=1)
    with bootstrap.connect(timeout_s=5) as group:
        assert (group.rank, group.num_ranks, group.kind) == (0, 1, "single")


_BY_ENVIRONMENT = """
import json
from epcomm import bootstrap
told = []
for word in (b"first", b"second"):
    with bootstrap.connect(timeout_s=20) as group:
        told.append([group.rank, group.kind, [part.decode() for part in group.all_gather(word * group.rank)]])
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    "variables",
    [
        lambda rank, port: {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port},
        lambda rank, port: {"RANK": rank, "WORLD_SIZE": 2, "EPCOMM_PORT": port, "MASTER_PORT": 1},
        lambda rank, port: {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        lambda rank, port: {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": port, "EPCOMM_AUTHKEY": "hush"},
    ],
    ids=["master", "epcomm-port", "slurm", "mpi-with-master"],
)
def test_processes_meet_by_their_environment(variables):
    port = loopback().port
    start = functools.partial(meeting.process, _BY_ENVIRONMENT)
    with start(**variables(0, port)) as zero, start(**variables(1, port)) as one:
        outputs = [child.communicate(timeout=30)[0] for child in (zero, one)]
    for rank, output in enumerate(outputs):
        assert json.loads(output) == [[rank, "rendezvous", ["", "first"]], [rank, "rendezvous", ["", "second"]]]


def test_children_of_multiprocessing_use_its_key(environ):
    port = loopback().port
    spawn = multiprocessing.get_context("spawn")
    children, pipes = [], []
    for rank in range(2):
        environ(RANK=rank, WORLD_SIZE=2, MASTER_PORT=port)
        ours, theirs = spawn.Pipe()
        child = spawn.Process(target=meeting.child_of_multiprocessing, args=(theirs,), daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(30)
            assert pipe.recv() == ("rendezvous", [b"0", b"1"], True)
    finally:
        for child in children:
            child.join(10)
            child.kill()
            child.join(5)
        for pipe in pipes:
            pipe.close()


# ------------------------------------------------------------------------------------------------- torchrun's store


def store_ranks(num_ranks, body, timeout_s=10.0):
    """Ranks that are threads over one store inside this process; what each returned or raised, and the store."""
    from torch.distributed import HashStore, PrefixStore

    from epcomm._bootstrap.torch_store import StoreGroup

    store = HashStore()

    def one(rank):
        with StoreGroup(PrefixStore("epcomm/1", store), rank, num_ranks, timeout_s) as group:
            return body(group)

    tasks = [Task(one, rank) for rank in range(num_ranks)]
    return [task.result() for task in tasks], store


@needs_torch
def test_the_store_keeps_order_and_any_length_and_ends_empty():
    def body(group):
        sizes = (0, 1, 4094, 4095, 5000, 2_500_000)
        told = [group.all_gather(b"x" * sizes[(group.rank + shift) % 6]) for shift in range(6)]
        group.barrier()
        return [[len(part) for part in parts] for parts in told], set(b"".join(map(b"".join, told)))

    results, store = store_ranks(5, body)
    sizes = (0, 1, 4094, 4095, 5000, 2_500_000)
    expected = [[sizes[(rank + shift) % 6] for rank in range(5)] for shift in range(6)]
    assert results == [(expected, {ord("x")})] * 5
    assert store.num_keys() == 0


@needs_torch
def test_with_a_store_every_rank_names_who_is_missing():
    def body(group):
        group.barrier()
        if group.rank in (1, 3):
            time.sleep(0.8)
            return None
        with pytest.raises(CommTimeoutError) as caught:
            group.barrier()
        return caught.value.peer, str(caught.value)

    results, _ = store_ranks(4, body, timeout_s=0.3)
    for rank in (0, 2):
        assert results[rank][0] == 1
        assert "barrier (call 2): ranks 1, 3 of 4 are missing after 0.3 s" in results[rank][1]


@needs_torch
def test_with_a_store_a_rank_that_left_or_gave_up_is_named():
    def left(group):
        group.barrier()
        if group.rank == 2:
            return None
        with pytest.raises(PeerLostError) as caught:
            group.barrier()
        return caught.value.peer, str(caught.value)

    results, _ = store_ranks(3, left)
    assert results[:2] == [(2, "bootstrap: rank 2 left the group")] * 2

    def gave_up(group):
        if group.rank == 1:
            group._wait = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt("Ctrl-C"))
        with pytest.raises((KeyboardInterrupt, PeerLostError)) as caught:
            if group.rank == 2:
                time.sleep(0.2)
            group.all_gather(b"")
        return type(caught.value).__name__, getattr(caught.value, "peer", None)

    results, _ = store_ranks(3, gave_up)
    assert results == [("PeerLostError", 1), ("KeyboardInterrupt", None), ("PeerLostError", 1)]


@needs_torch
def test_with_a_store_refused_arguments_leave_the_ranks_in_step():
    def body(group):
        with pytest.raises(InvalidArgumentError, match="rank 1: data: float is not bytes-like"):
            group.all_gather(0.5 if group.rank == 1 else b"")
        return group.all_gather(b"%d" % group.rank)

    assert store_ranks(3, body)[0] == [[b"0", b"1", b"2"]] * 3


@needs_torch
def test_a_store_that_dies_is_a_lost_peer():
    class Dead:
        def set(self, *_):
            raise RuntimeError("Connection reset by peer\nException raised from ...")

        def compare_set(self, *_):
            raise RuntimeError("Connection reset by peer")

    from epcomm._bootstrap.torch_store import StoreGroup

    lost = pytest.raises(PeerLostError, match="torchrun's store was lost: Connection reset by peer$")
    with StoreGroup(Dead(), 0, 2, 5) as group, lost:
        group.barrier()


_TORCHRUN = """
import os, sys, threading, time
from epcomm import CommTimeoutError, InvalidArgumentError, PeerLostError, bootstrap
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def error_of(function):
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return error, time.monotonic() - start
    raise AssertionError("no error")

def check(group, kind, members):
    mine = members.index(rank)
    assert (group.rank, group.num_ranks, group.kind) == (mine, len(members), kind), group
    assert group.all_gather(b"%d" % rank * mine) == [b"%d" % r * i for i, r in enumerate(members)]
    assert [len(part) for part in group.all_gather(b"" if mine else b"x" * 100_000)][0] == 100_000
    assert group.all_gather(b"") == [b""] * len(members)
    group.barrier()

everyone = list(range(size))
descriptors = None
for _ in range(5):
    with bootstrap.connect(timeout_s=20) as group:
        check(group, "torch-store", everyone)
    descriptors = descriptors or len(os.listdir("/proc/self/fd"))
assert len(os.listdir("/proc/self/fd")) == descriptors
with bootstrap.connect(timeout_s=1.0) as group:
    if rank == size - 1:
        time.sleep(1.3)
    else:
        error, elapsed = error_of(group.barrier)
        assert isinstance(error, CommTimeoutError) and error.peer == size - 1 and elapsed < 5, (error, elapsed)
        assert f"rank {size - 1} of {size} is missing" in str(error), error
"""

_TORCH_GROUPS = """
import torch, torch.distributed as dist
from epcomm._bootstrap import torch_group
dist.init_process_group("gloo")
check(bootstrap.connect(dist.group.WORLD, timeout_s=20), "torch-group", everyone)
for members, kwargs in (([1, 3], {}), ([2, 0, 1], {"sort_ranks": False}), ([3, 2, 1, 0], {"sort_ranks": False})):
    made = dist.new_group(members, **kwargs)
    if rank in members:
        with bootstrap.connect(made, timeout_s=20) as group:
            check(group, "torch-group", members)
    else:
        error, _ = error_of(lambda: bootstrap.connect(made, timeout_s=20))
        assert isinstance(error, InvalidArgumentError) and "not a member" in str(error), error
assert sorted(members) == everyone  # the last group is the whole world, reversed
torch_group._ROUND_BYTES = 4000  # many steps
with bootstrap.connect(made, timeout_s=20) as group:
    check(group, "torch-group", members)
    error, _ = error_of(lambda: group.all_gather("text" if group.rank == 1 else b""))
    assert isinstance(error, InvalidArgumentError) and str(error).startswith("rank 1: data: str"), error
    check(group, "torch-group", members)
# Not under torchrun: the default group is used, since its store holds MASTER_PORT.
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
with bootstrap.connect(timeout_s=20) as group:
    check(group, "torch-group", everyone)
gone = dist.new_group(everyone)
dist.destroy_process_group(gone)
error, _ = error_of(lambda: bootstrap.connect(gone, timeout_s=20))
assert isinstance(error, InvalidArgumentError) and "destroyed" in str(error), error
# A rank that does not call, then one that dies.
group = bootstrap.connect(dist.new_group(everyone), timeout_s=1.0)
if rank == 3:
    time.sleep(1.5)
else:
    error, elapsed = error_of(group.barrier)
    assert isinstance(error, CommTimeoutError) and "timeout_s=1" in str(error) and elapsed < 5, (error, elapsed)
group.close()
group = bootstrap.connect(timeout_s=20)
if rank == 3:
    print("fine", flush=True)
    os._exit(0)
error, elapsed = error_of(lambda: [group.barrier() for _ in range(100)])
assert isinstance(error, PeerLostError) and elapsed < 5, (error, elapsed)
group.close()
print("fine", flush=True)
os._exit(0)  # gloo's own farewell would wait for the rank that died
"""


def torchrun(num_ranks, script, folder):
    path = Path(folder) / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-addr",
         "127.0.0.1", "--master-port", str(loopback().port), str(path)],
        env=meeting.clean_environment(OMP_NUM_THREADS=1),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


@needs_torch
def test_torchrun_with_two_ranks(tmp_path):
    output = torchrun(2, _TORCHRUN + "print('fine', flush=True)\n", tmp_path)
    assert output.count("fine") == 2


@needs_torch
def test_torchrun_and_torch_groups_with_four_ranks(tmp_path):
    assert torchrun(4, _TORCHRUN + _TORCH_GROUPS, tmp_path).count("fine") == 4


# ------------------------------------------------------------------------------------------------------------- MPI

_MPI = """
import sys, time
from epcomm import CommTimeoutError, InvalidArgumentError, bootstrap
group = bootstrap.connect(timeout_s=20)  # starts MPI
from mpi4py import MPI
from epcomm._bootstrap import mpi
world, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

def check(group, mine):
    assert (group.rank, group.num_ranks, group.kind) == (mine, size, "mpi"), group
    sizes = [index * 3001 for index in range(size)]
    assert group.all_gather(bytes([mine]) * sizes[mine]) == [bytes([i]) * n for i, n in enumerate(sizes)]
    assert group.all_gather(b"") == [b""] * size
    group.barrier()

check(group, world)
group.close()
backwards = MPI.COMM_WORLD.Split(0, size - world)
with bootstrap.connect(backwards, timeout_s=20) as group:
    check(group, size - 1 - world)
    mpi._ROUND_BYTES = 1000  # many steps
    check(group, size - 1 - world)
    try:
        group.all_gather(3 if group.rank == 0 else b"")
    except InvalidArgumentError as error:
        assert "rank 0: data: int is not bytes-like" in str(error)
    check(group, size - 1 - world)
half = MPI.COMM_WORLD.Split(0 if world == 0 else MPI.UNDEFINED, 0)
if world == 0:
    with bootstrap.connect(half, timeout_s=5) as group:
        assert group.all_gather(b"me") == [b"me"] and group.num_ranks == 1
else:
    try:
        bootstrap.connect(half, timeout_s=5)
    except InvalidArgumentError as error:
        assert "COMM_NULL" in str(error)
    else:
        raise AssertionError("no error")
with bootstrap.connect(MPI.COMM_WORLD.Dup(), timeout_s=0.5) as group:
    if world == 0:
        time.sleep(0.9)
        try:
            group.barrier()  # late: lets the others' abandoned call end
        except CommTimeoutError:
            pass
    else:
        start = time.monotonic()
        try:
            group.barrier()
        except CommTimeoutError as error:
            assert "timeout_s=0.5" in str(error) and time.monotonic() - start < 1.5
        else:
            raise AssertionError("no error")
print("fine", flush=True)
"""


@needs_mpi
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_mpirun(num_ranks):
    environ = meeting.clean_environment(OMPI_MCA_rmaps_base_oversubscribe=1, OMPI_ALLOW_RUN_AS_ROOT=1,
                                        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
    done = subprocess.run(
        [MPIRUN, "--oversubscribe", "-np", str(num_ranks), sys.executable, "-c", _MPI],
        env=environ,
        cwd=meeting.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.count("fine") == num_ranks, done.stdout[-2000:] + done.stderr[-6000:]


def test_no_framework_is_imported_without_need():
    code = (
        "import sys\n"
        "from epcomm import bootstrap\n"
        "bootstrap.connect(timeout_s=1).close()\n"
        "try:\n    bootstrap.connect(3, timeout_s=1)\n"
        "except ValueError:\n    pass\n"
        "assert not {'torch', 'mpi4py'} & set(sys.modules)\n"
        "import threading; assert threading.active_count() == 1\n"
    )
    with meeting.process(code) as child:
        output, _ = child.communicate(timeout=30)
    assert child.returncode == 0, output
