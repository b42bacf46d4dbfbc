"""Space: it is there before anybody touches it, or there is a typed error; and nothing stays behind."""

import contextlib
import fcntl
import gc
import mmap
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from helpers.shm_worker import HEAP_BYTES, Worker, connect_all

from epcomm import _shm
from epcomm.errors import InvalidArgumentError, OutOfMemoryError

MIB = 1 << 20
SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW


@pytest.fixture
def worker():
    started = Worker()
    yield started
    started.close()


@pytest.fixture
def small_mount(tmp_path):
    """A tmpfs of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def own_segments():
    """Descriptors of this process that are segments, without those of backends that a caught error still held."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "epcomm" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(int(name))
    return found


@pytest.mark.parametrize("size_bytes", [1 << 44, 1 << 50, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("folder", [None, "/dev/shm"], ids=["memfd", "folder"])
def test_an_absurd_size_is_a_typed_error(size_bytes, folder):
    backend = _shm.Backend({"shm_dir": folder} if folder else {})
    before, start = own_segments(), time.monotonic()
    with pytest.raises(OutOfMemoryError) as caught:
        backend.alloc_heap(size_bytes)
    assert time.monotonic() - start < 1.0, "it tried"
    asked, free = re.search(r"(\d+) bytes asked, (\d+) bytes free", str(caught.value)).groups()
    assert size_bytes <= int(asked) <= size_bytes + 8192 and 0 < int(free) < 1 << 44
    assert "smaller heap" in str(caught.value)
    assert own_segments() == before
    backend.alloc_heap(HEAP_BYTES)  # the object is still good


def test_a_heap_of_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match="size_bytes=0"):
        _shm.Backend({}).alloc_heap(0)


def test_space_is_taken_and_the_heap_is_zero():
    held = own_segments()
    before = int(re.search(r"Shmem: +(\d+)", Path("/proc/meminfo").read_text()).group(1))
    backend = _shm.Backend({})
    backend.alloc_heap(64 * MIB)
    after = int(re.search(r"Shmem: +(\d+)", Path("/proc/meminfo").read_text()).group(1))
    assert after - before > 60 * 1024
    (descriptor,) = set(own_segments()) - set(held)
    facts = os.fstat(descriptor)
    assert facts.st_blocks * 512 >= 64 * MIB
    with mmap.mmap(descriptor, 64 * MIB, prot=mmap.PROT_READ) as view:
        assert view.find(b"\1") == -1 and view[: 64 * MIB].count(0) == 64 * MIB


def test_a_timer_signal_does_not_starve_the_reservation(worker):
    """The kernel undoes a reservation that a signal interrupts."""
    worker.do("signal.signal(signal.SIGALRM, lambda *_: None) and None")
    worker.do("signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)")
    worker.do("make({}, 256 << 20)", timeout_s=20)


def test_a_memfd_is_sealed():
    held = own_segments()
    backend = _shm.Backend({})
    backend.alloc_heap(HEAP_BYTES)
    (descriptor,) = set(own_segments()) - set(held)
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for size_bytes in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size_bytes)


@pytest.mark.parametrize("signal_ignored", [True, False], ids=["SIGXFSZ ignored", "SIGXFSZ deadly"])
def test_a_file_size_limit_is_a_typed_error(worker, signal_ignored):
    worker.do("__import__('resource').setrlimit(1, (2**20, 2**20))")  # RLIMIT_FSIZE
    worker.do("signal.signal(signal.SIGXFSZ, handler)", handler=1 if signal_ignored else 0)
    worker.do("names.setdefault('b', shm.Backend({}))")
    failure = worker.fails("b.alloc_heap(64 << 20)")
    assert failure.kind == "OutOfMemoryError"
    assert "67112960 bytes asked, 1048576 bytes free" in failure.text and "ulimit -f" in failure.text
    worker.do("b.alloc_heap(1 << 19)")
    assert worker.do("signal.sigpending()") == set() and worker.do("signal.pthread_sigmask(0, [])") == set()


def test_a_small_file_system_is_a_typed_error(small_mount, worker):
    options = {"shm_dir": str(small_mount)}
    failure = worker.fails("make(options, 64 << 20)", options=options)
    assert failure.kind == "OutOfMemoryError"
    asked, free = re.search(r"(\d+) bytes asked, (\d+) bytes free", failure.text).groups()
    assert int(asked) >= 64 * MIB and int(free) == MIB
    assert str(small_mount) in failure.text and "EPCOMM_SHM_DIR" in failure.text
    assert list(small_mount.iterdir()) == []
    # What fits, fits, down to the last page; all of it can be touched.
    worker.do("make(options, size)", options=options, size=MIB - 4096)
    worker.do("b.connect(0, [info], 0, 5.0)", info=b"")
    worker.do("__import__('ctypes').memset(b.peer_ptr(0), 1, size)", size=MIB - 4096)
    # Full now: by the file system's own count.
    failure = worker.fails("make(options, 4096)", options=options)
    assert failure.kind == "OutOfMemoryError" and " 0 bytes free" in failure.text
    # And given back with the object.
    worker.do("[names.pop('b').close()]")
    worker.do("make(options, 4096)", options=options)


def test_the_space_goes_with_the_object(small_mount, worker):
    for _ in range(20):  # 20 x 0.5 MiB in 1 MiB
        worker.do("make(options, 1 << 19)", options={"shm_dir": str(small_mount)})
        worker.do("[names.pop('b').close()]")


# A private view of /sys/fs/cgroup, both versions: limit 100 MiB, 50 used, of which 20 are droppable file cache.
GROUP = """
mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && cd /sys/fs/cgroup || exit 1
echo 104857600 | tee memory.max >memory/memory.limit_in_bytes
echo 52428800 | tee memory.current >memory/memory.usage_in_bytes
printf 'anon 1\\ninactive_file 10485760\\nactive_file 10485760\\n' >memory.stat
printf 'cache 1\\ntotal_inactive_file 10485760\\ntotal_active_file 10485760\\n' >memory/memory.stat
exec "$@"
"""


def test_a_memory_control_group_counts():
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root and unshare")
    worker = Worker("unshare", "-m", "sh", "-c", GROUP, "sh")
    try:
        failure = worker.fails("make({}, 80 << 20)")
        assert failure.kind == "OutOfMemoryError"
        assert "73400320 bytes free in memory" in failure.text and "raise the group's limit" in failure.text
        worker.do("make({}, 8 << 20)")
    finally:
        worker.close()


@pytest.mark.parametrize("folder, reason", [
    ("/nonexistent/folder", "No such file"),
    ("/proc/self/status", "Not a directory"),
    ("/proc", "No such file|Permission|not permitted"),
])
def test_a_folder_that_is_none(folder, reason):
    with pytest.raises(InvalidArgumentError, match=re.escape(f"shm_dir={folder}")) as caught:
        _shm.Backend({"shm_dir": folder}).alloc_heap(4096)
    assert "EPCOMM_SHM_DIR" in str(caught.value) and re.search(reason, str(caught.value))


def test_the_variable_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EPCOMM_SHM_DIR", str(tmp_path / "missing"))
    with pytest.raises(InvalidArgumentError, match="missing"):
        _shm.Backend({}).alloc_heap(4096)
    _shm.Backend({"shm_dir": str(tmp_path)}).alloc_heap(4096)  # the option goes first


def stale_name(pid, start_time, namespace=None):
    namespace = os.stat("/proc/self/ns/pid").st_ino if namespace is None else namespace
    return f"epcomm-{namespace}-{pid}-{start_time}-{'0' * 32}"


def start_time_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_stale_files_of_ended_owners_are_removed_and_no_others(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    me = os.getpid()
    stale = [stale_name(ended.pid, 12345), stale_name(me, start_time_of(me) + 1)]
    kept = [
        stale_name(me, start_time_of(me)),  # its owner runs
        stale_name(ended.pid, 12345, namespace=1),  # not to be judged from here
        stale_name(ended.pid, 12345)[:-1],  # not our name
        stale_name(ended.pid, 12345) + ".bak",
        f"epcomm-{ended.pid}",
        "nccl-abcdef",
    ]
    for name in stale + kept:
        (tmp_path / name).write_bytes(b"x")
    link = stale_name(ended.pid, 999)
    (tmp_path / link).symlink_to(tmp_path / "nccl-abcdef")
    others = stale_name(ended.pid, 777)
    if os.geteuid() == 0:
        (tmp_path / others).write_bytes(b"x")
        os.chown(tmp_path / others, 65534, 65534)
        kept.append(others)
    _shm.Backend({"shm_dir": str(tmp_path)}).alloc_heap(4096)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, link])


@pytest.mark.parametrize("folder", [None, "/dev/shm"], ids=["memfd", "folder"])
def test_killed_ranks_leave_nothing(folder):
    """SIGKILL all ranks, 10 times: between start and connect, and while connected."""
    before = set(os.listdir("/dev/shm"))
    memory = []
    for i in range(10):
        ranks = [Worker() for _ in range(2)]
        infos = [rank.make({"shm_dir": folder} if folder else {}, 4 * MIB) for rank in ranks]
        if i % 2:
            connect_all(ranks, infos)
            ranks[0].send("b.wait(1, 4096, 1, 20.0)")
        assert {name for name in set(os.listdir("/dev/shm")) - before if "epcomm" in name} == set()
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.close()
        memory.append(int(re.search(r"Shmem: +(\d+)", Path("/proc/meminfo").read_text()).group(1)))
    assert {name for name in set(os.listdir("/dev/shm")) - before if "epcomm" in name} == set()
    assert memory[-1] - memory[0] < 30 * 1024, memory  # KiB; 9 rounds would have left 72 MiB
