"""Whole communicators over `shm`: killed jobs (B40), too little memory (B41), what is shared and what is not (B53)."""

import contextlib
import ctypes
import os
import re
import resource
import subprocess
import time
from pathlib import Path

import pytest
from helpers import job_calls
from helpers.job import slack
from helpers.job_calls import WAYS, close, create, loop, once

MIB = 1 << 20
LARGE = {"hidden": 4096, "max_tokens_per_rank": 1024, "max_recv_tokens": 2048}  # some 100 MiB of heap
SHM = Path("/dev/shm")


@pytest.fixture
def host_backend():
    """These tests are about one backend."""
    return "shm"


@pytest.fixture
def mount(tmp_path):
    """Mounts a tmpfs of so many MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mounted = []

    def make(mib):
        folder = tmp_path / f"mount-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def names_of(folder, pids):
    """Names that processes of ours made there; others may be using the folder too."""
    return [name for name in names(folder) if any(f"-{pid}-" in name for pid in pids)]


def free_bytes(folder):
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


# ------------------------------------------------------------------------------------------- B40: killed jobs


def kill_all_inside(ranks, **options):
    """All ranks are killed while they call; new ones take their places."""
    ranks.values(create, **options)
    for rank in range(ranks.num_ranks):
        ranks.start(rank, loop, way="expert")
    for rank in range(ranks.num_ranks):
        ranks.told(rank)
    time.sleep(0.02)
    for rank in range(ranks.num_ranks):
        ranks.signal(rank)
    ranks.replace(*range(ranks.num_ranks))


@pytest.mark.parametrize("where", ["memfd", "shm_dir=/dev/shm", "EPCOMM_SHM_DIR"])
def test_b40_killed_jobs_leave_nothing(job, mount, where):
    """20 jobs killed inside dispatch and combine, in three kinds of memory: no name, no space, no process."""
    folder = mount(24) if where == "EPCOMM_SHM_DIR" else SHM
    ranks = job(2, env={"EPCOMM_SHM_DIR": str(folder)} if where == "EPCOMM_SHM_DIR" else {})
    options = {"options": {"shm_dir": str(SHM)}} if where.startswith("shm_dir") else {}
    free = free_bytes(folder)
    started = [process.pid for process in ranks.processes]
    for _ in range({"memfd": 8, "shm_dir=/dev/shm": 6, "EPCOMM_SHM_DIR": 6}[where]):
        kill_all_inside(ranks, max_tokens_per_rank=2048, **options)  # 2 heaps of 5 MiB: three jobs' would not fit
        assert names_of(folder, started) == []
        started += [process.pid for process in ranks.processes]
    ranks.values(create, max_tokens_per_rank=2048, **options)
    for way in WAYS:
        ranks.values(once, way=way)
    ranks.values(close)
    ranks.leave_all()
    assert names_of(folder, started) == []
    assert where != "EPCOMM_SHM_DIR" or free_bytes(folder) == free
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]


def test_b40_live_segments_of_others_stay(job, tmp_path):
    """Another job in the same folder goes on rightly; names of the living and strangers' names are left alone."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    start = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    living = f"epcomm-{namespace}-{os.getpid()}-{start}-{'0' * 32}"
    ended = f"epcomm-{namespace}-{2**22 + 1}-123-{'0' * 32}"
    for name in (living, ended, "psm_stranger", "epcomm-notes.txt"):
        (tmp_path / name).write_bytes(b"mine")
    other, ranks = job(2, env={"EPCOMM_SHM_DIR": str(tmp_path)}), job(2, env={"EPCOMM_SHM_DIR": str(tmp_path)})
    other.values(create)
    for _ in range(3):
        kill_all_inside(ranks)
        other.values(once, way="expert")
        other.values(once, way="rank, zero copy")
    assert names(tmp_path) == {living, "psm_stranger", "epcomm-notes.txt"}
    assert (tmp_path / living).read_bytes() == b"mine"
    other.values(close)


# ------------------------------------------------------------------------------------- B41: too little memory


def check_out_of_memory(ranks, answers, *texts):
    """All ranks tell the same, with bytes asked, bytes free and the remedy; nothing is left; the next try is right."""
    for answer in answers:
        failure = answer.failure
        assert failure is not None and failure.kind == "OutOfMemoryError" and "MemoryError" in failure.types, answer
        for text in ("bytes asked", "free", *texts):
            assert text in failure.text, (text, failure.text)
        assert answer.end - answer.start < 5 * slack()
    assert len({answer.failure.text.split(" (rank")[0] for answer in answers}) == 1
    for left in ranks.values(job_calls.what_is_left):
        assert (left["mappings"], left["files"], left["threads"]) == (0, 0, 1), left
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)
    asked, free = re.search(r"(\d+) bytes asked, (\d+) bytes free", answers[0].failure.text).groups()
    return int(asked), int(free)


def create_limited(here, limited, limit_bytes, name="RLIMIT_FSIZE"):
    kind = getattr(resource, name)
    before = resource.getrlimit(kind)
    if here.rank in limited:
        resource.setrlimit(kind, (limit_bytes, before[1]))
    try:
        create(here, **LARGE)
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("limited", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_b41_a_limit_of_file_size(job, limited):
    ranks = job(3)
    answers = ranks.run(create_limited, limited=limited, limit_bytes=MIB)
    asked, free = check_out_of_memory(ranks, answers, f"rank {limited[0]}", "ulimit -f")
    assert asked > 64 * MIB and free == MIB


def create_in(here, folders):
    folder = folders[here.rank]
    create(here, **LARGE, options={"shm_dir": str(folder)} if folder else {})


@pytest.mark.parametrize("small", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_b41_a_small_file_system(job, mount, small):
    """As a container's default is. No bus error later, since the space is taken up front."""
    ranks, folder = job(3), mount(1)
    folders = [str(folder) if rank in small else None for rank in range(3)]
    answers = ranks.run(create_in, folders=folders)
    asked, free = check_out_of_memory(ranks, answers, f"rank {small[0]}", str(folder), "EPCOMM_SHM_DIR", "--shm-size")
    assert asked > 64 * MIB and free == MIB
    assert names(folder) == set() and free_bytes(folder) == MIB


def test_b41_a_file_system_that_only_some_ranks_fit_in(job, mount):
    """Each rank alone would fit; the last one does not. What the others had taken is given back."""
    ranks, folder = job(3), mount(250)
    answers = ranks.run(create_in, folders=[str(folder)] * 3)
    check_out_of_memory(ranks, answers, str(folder))
    assert names(folder) == set() and free_bytes(folder) == 250 * MIB


@pytest.mark.parametrize("rows", [2**20, 2**31 - 1], ids=["terabytes", "petabytes"])
@pytest.mark.parametrize("folder", [None, "/dev/shm"], ids=["memfd", "folder"])
def test_b41_an_absurd_size(job, rows, folder):
    """Refused before a page of it is taken."""
    ranks = job(2)
    options = {"shm_dir": folder} if folder else {}
    answers = ranks.run(create, hidden=2**20, max_tokens_per_rank=2**20, max_recv_tokens=rows, options=options)
    asked, free = check_out_of_memory(ranks, answers, "rank 0")
    assert asked > rows * 2**22 * 3 and free < asked


def test_b41_no_address_space(job):
    ranks = job(2)
    with open(f"/proc/{ranks.processes[1].pid}/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    answers = ranks.run(create_limited, limited=(1,), limit_bytes=used + 64 * MIB, name="RLIMIT_AS")
    for answer in answers:
        assert answer.failure.kind == "OutOfMemoryError" and "rank 1" in answer.failure.text, answer
        assert "ulimit -v" in answer.failure.text
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


def create_without_descriptors(here):
    """No descriptor is free once the ranks have met."""
    from epcomm import _shm

    original = _shm.Backend.alloc_heap
    held = []

    class Starved(_shm.Backend):
        def alloc_heap(self, size_bytes):
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            return original(self, size_bytes)

    before, limit = _shm.Backend, resource.getrlimit(resource.RLIMIT_NOFILE)
    if here.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit[1]))
        _shm.Backend = Starved
    try:
        create(here)
    finally:
        _shm.Backend = before
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_no_descriptor_is_free(job):
    ranks = job(3)
    for answer in ranks.run(create_without_descriptors):
        assert answer.failure is not None and answer.failure.kind == "SystemCallError", answer
        assert "rank 1" in answer.failure.text and "errno 24" in answer.failure.text, answer
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


# ---------------------------------------------------------------------------- B53: what is shared and what is not

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
KINDS = {"net": CLONE_NEWNET, "uts": CLONE_NEWUTS, "mnt": CLONE_NEWNS}


@contextlib.contextmanager
def apart(kind):
    """This process in a namespace of its own, once the ranks have met; back again at the end."""
    from epcomm import _shm

    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
    before = _shm.Backend

    class Apart(before):
        def alloc_heap(self, size_bytes):
            if libc.unshare(KINDS[kind]) != 0:
                raise OSError(ctypes.get_errno(), "unshare")
            if kind == "uts":
                libc.sethostname(b"elsewhere", 9)
            if kind == "mnt":
                libc.mount(None, b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE: nobody else sees the next
                assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m") == 0
            super().alloc_heap(size_bytes)

    _shm.Backend = Apart
    try:
        yield
    finally:
        _shm.Backend = before
        libc.setns(home, KINDS[kind])
        os.close(home)


def create_apart(here, kind, **more):
    with apart(kind) if here.rank == 1 else contextlib.nullcontext():
        create(here, **more)
        for way in WAYS:
            once(here, way)


def need_namespaces(flag):
    if os.geteuid() != 0 or subprocess.run(["unshare", flag, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"unshare {flag} is not permitted here")


def check_unavailable(answers, *texts):
    for answer in answers:
        assert answer.failure is not None and answer.failure.kind == "BackendUnavailableError", answer
        for text in ("shm", *texts):
            assert text in answer.failure.text, (text, answer.failure.text)
        assert answer.end - answer.start < 3 * slack()
    assert len({answer.failure.text for answer in answers}) == 1


@pytest.mark.parametrize("chosen", ["shm", None], ids=["named", "any"])
def test_b53_two_network_namespaces(job, chosen):
    """Two containers of one host: its name, its boot and /dev/shm are the same, and yet nothing can be handed over."""
    need_namespaces("-n")
    ranks = job(3, env={})
    answers = ranks.run(create_apart, kind="net", backend=chosen)
    check_unavailable(answers, "ranks 0 and 1 do not share memory", "ranks 1 and 2", "network namespaces")
    ranks.new_port()
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


@pytest.mark.parametrize("kind, options", [("uts", {}), ("mnt", {}), ("mnt", {"shm_dir": "/dev/shm"})])
def test_b53_names_and_folders_prove_nothing(job, kind, options):
    """Other host names, other mounts of /dev/shm: memory is handed over and proved, so all is right."""
    need_namespaces({"uts": "-u", "mnt": "-m"}[kind])
    ranks = job(2, env={})
    ranks.values(create_apart, kind=kind, options=options)
    ranks.values(close)


def test_b53_two_folders(job, tmp_path):
    """Different folders of one host share all the same."""
    ranks = job(2)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    ranks.values(create_of_folder, folders=[str(tmp_path / "0"), str(tmp_path / "1")])
    for way in WAYS:
        ranks.values(once, way=way)
    assert names(tmp_path / "0") == names(tmp_path / "1") == set()
    ranks.values(close)


def create_of_folder(here, folders):
    create(here, options={"shm_dir": folders[here.rank]})


def test_b53_stale_segments_are_not_used(job, tmp_path):
    """Names that a job could have, with content of another: removed or left, but never attached."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    for number in range(20):
        name = f"epcomm-{namespace}-{2**22 + number}-{number + 1}-{number:032x}"
        (tmp_path / name).write_bytes(b"\xff" * (1 << 16))
    ranks = job(2)
    ranks.values(create, options={"shm_dir": str(tmp_path)})
    for way in WAYS:
        ranks.values(once, way=way)
    ranks.values(close)
    assert names(tmp_path) == set()


def become_another_user(here, undo=False):
    if here.rank == 1:
        os.seteuid(0 if undo else 65534)


def test_b53_two_users(job):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    ranks = job(2, env={})
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)
    ranks.values(become_another_user)
    answers = ranks.run(create)
    check_unavailable(answers, "ranks 0 and 1 do not share memory", "different users")
    ranks.values(become_another_user, undo=True)
    ranks.values(create)
    ranks.values(close)


def create_in_node(here, node_ids, how):
    from helpers.pool import environment

    node_id = node_ids[here.rank]
    with environment({"EPCOMM_NODE_ID": node_id if how == "variable" else None}):
        create(here, options={"node_id": node_id} if how == "option" and node_id is not None else {})


@pytest.mark.parametrize("how", ["variable", "option"])
def test_b53_node_ids_split(job, how):
    ranks = job(3)
    answers = ranks.run(create_in_node, node_ids=["a", "a", "b"], how=how)
    check_unavailable(answers, "ranks 0 and 2 are in different nodes", "EPCOMM_NODE_ID", "'a'", "'b'")
    answers = ranks.run(create_in_node, node_ids=[None, "a", None], how=how)
    check_unavailable(answers, "ranks 0 and 1 are in different nodes", "None", "'a'")
    ranks.values(create_in_node, node_ids=["a", "a", "a"], how=how)
    ranks.values(once, way="expert")
    ranks.values(close)
