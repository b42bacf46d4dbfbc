"""Set-up, sharing, death and clean-up of ``nvlink``, over the fake driver: no GPU is needed.

``b.heap_ptr`` is an address of host memory here, so that a test can play the kernel.
"""

import ctypes
import os
import re
import struct
import time

import pytest
from helpers import fake_cuda
from helpers.shm_worker import connect_all

from epcomm import _nvlink

HEAP_BYTES = 1 << 16
CTX = struct.Struct("<6Q4i")  # NvlinkCtx
ABORT = 1 << 63
UUIDS = [f"{number:032x}".encode()[::-1] for number in range(1, 5)]
RESOURCES = ("contexts", "streams", "memories", "reserved", "mapped", "allocated", "opened", "pinned", "current")


@pytest.fixture
def start():
    started = []

    def make(*settings, options=None, heap_bytes=HEAP_BYTES):
        """Workers (one per settings) and their infos."""
        new = [fake_cuda.worker(**each) for each in settings]
        started.extend(new)
        return new, [worker.make(options, heap_bytes) for worker in new]

    yield make
    for worker in started:
        worker.close()


@pytest.fixture
def connected(start):
    def make(*settings, options=None):
        workers, infos = start(*settings, options=options)
        connect_all(workers, infos)
        return workers

    return make


def context(worker):
    names = ("heap", "heap_bytes", "peers", "host_words", "state_word", "timeout_ns", "rank", "num_ranks", "atomics",
             "reserved")
    return dict(zip(names, CTX.unpack(worker.do("b.device_ctx()")), strict=True))


def words(worker, address, count=1):
    data = worker.do("__import__('ctypes').string_at(address, size)", address=address, size=8 * count)
    return struct.unpack(f"<{count}Q", data)


def live(worker):
    values = worker.do("[live(what) for what in names]", names=[name.encode() for name in RESOURCES])
    return {name: value for name, value in zip(RESOURCES, values, strict=True) if value}


def with_field(info, key, value):
    return re.sub(rf"^{key} .*$", f"{key} {value}", info.decode(), flags=re.MULTILINE).encode()


def refuse(workers, infos):
    """What connect() raised at each worker."""
    for rank, worker in enumerate(workers):
        worker.send("b.connect(rank, infos, 0, 10.0)", rank=rank, infos=infos)
    failures = [worker.answer().failure for worker in workers]
    assert None not in failures
    return failures


# ---- sharing


@pytest.mark.parametrize("way", ["fd", "fabric", "ipc"])
@pytest.mark.parametrize("gpus", [("0", "0"), ("0", "1"), ("0,1,2", "2,0,1", "1")], ids=lambda gpus: "/".join(gpus))
def test_heaps_are_exchanged(connected, way, gpus):
    """Also where each process numbers the GPUs in its own way, or sees only one."""
    workers = connected(*[{"gpus": each, "offer": "fd,fabric"} for each in gpus], options={"nvlink_share": way})
    for worker in workers:
        assert worker.do("b.share") == way
        assert words(worker, worker.do("b.heap_ptr"), HEAP_BYTES // 8) == (0,) * (HEAP_BYTES // 8)
    for rank, worker in enumerate(workers):
        for peer, other in enumerate(workers):
            at = 8192 + 64 * rank
            worker.do("__import__('ctypes').memset(b.peer_ptr(peer, at), value, 8)", peer=peer, at=at, value=rank + 1)
            (seen,) = words(other, other.do("b.heap_ptr + at", at=at))
            assert seen == int.from_bytes(bytes([rank + 1]) * 8, "little")


def test_what_kernels_are_given(connected):
    workers = connected({"gpus": "0"}, {"gpus": "0,1"}, {"gpus": "1"})
    for rank, worker in enumerate(workers):
        ctx = context(worker)
        assert ctx["heap"] == worker.do("b.heap_ptr") != 0
        assert ctx["heap_bytes"] == HEAP_BYTES
        assert ctx["timeout_ns"] == 10_000_000_000
        assert (ctx["rank"], ctx["num_ranks"], ctx["state_word"]) == (rank, 3, 0)
        assert list(words(worker, ctx["peers"], 3)) == worker.do("[b.peer_ptr(peer) for peer in range(3)]")
        assert words(worker, ctx["host_words"], 4) == (0, 0, 0, 0)
        assert worker.do("(b.peer_ptr(-1), b.peer_ptr(3))") == (0, 0)


@pytest.mark.parametrize("fake, atomics", [
    ({"gpus": "0,1"}, 1),
    ({"gpus": "0,1", "slow": "0-1"}, 0),
    ({"gpus": "0"}, 0),  # what it cannot see it does not trust
])
def test_atomics_only_where_the_link_has_them(connected, fake, atomics):
    first, _ = connected(fake, {"gpus": "1"})
    assert context(first)["atomics"] == atomics


def test_one_rank_alone(connected):
    (worker,) = connected({})
    assert context(worker)["num_ranks"] == 1 and worker.do("b.same_gpu") == []
    worker.do("b.close()")


@pytest.mark.parametrize("way", ["fd", "ipc"])
def test_two_objects_in_one_process(start, way):
    (worker,), (info,) = start({}, options={"nvlink_share": way})
    other = worker.do("names.update(a=b) or make({'nvlink_share': way}, size)", way=way, size=HEAP_BYTES)
    worker.do("names.update(thread=__import__('threading').Thread(target=a.connect, args=(0, infos, 0, 10.0)))",
              infos=[info, other])
    worker.do("thread.start() or b.connect(1, infos, 0, 10.0) or thread.join(10)", infos=[info, other])
    worker.do("__import__('ctypes').memset(a.peer_ptr(1, 9000), 7, 1)")
    assert worker.do("__import__('ctypes').string_at(b.heap_ptr + 9000, 1)") == b"\x07"
    assert worker.do("(a.same_gpu, b.same_gpu)") == ([1], [0])


TURNS = "ranks 0, 1, 2 share one GPU: they take turns on it, which is slow; under CUDA MPS"


@pytest.mark.parametrize(("mps", "said"), [
    ((), TURNS), ((0, 0, 0), TURNS), ((1, 1, 1), "ranks 0, 1, 2 share one GPU: they run side by side through CUDA MPS"),
    ((1, 1, 0), TURNS), ((0, 1, 1), TURNS)])  # one that is no client of MPS takes turns with those that are
def test_sharing_one_gpu_is_told_once(start, mps, said):
    settings = [{"mps": each} for each in mps] or [{}, {}, {}]
    workers, infos = start({**settings[0], "gpus": "0,1"}, *settings[1:])
    for worker in workers:
        worker.do("names.update(told=[], logging=__import__('logging'))")
        worker.do("setattr(logging.getLogger('epcomm'), 'warning', lambda *words: told.append(words[0] % words[1:]))")
    connect_all(workers, infos)
    told = [worker.do("told") for worker in workers]
    assert told[1:] == [[], []]
    assert len(told[0]) == 1 and told[0][0].startswith(said)
    assert {worker.do("b.mps") for worker in workers} == {said != TURNS}


@pytest.mark.parametrize(("fake", "want"), [({}, None), ({"mps": 0}, False), ({"mps": 1}, True)])
def test_mps_is_asked_of_the_driver_without_a_context(fake, want):
    code = ("import ctypes\nfrom epcomm import _gpu, _info\n"
            "print(_gpu.under_mps(0), _info.collect()['devices']['cuda_mps'],"
            "ctypes.CDLL('libcuda.so.1').fake_cuda_live(b'contexts'))")
    assert fake_cuda.python(code, **fake).stdout == f"{want} {want or False} 0\n"


@pytest.mark.parametrize("fake, way", [
    ({}, "fd"),
    ({"refuse": "fd"}, "ipc"),
    ({"offer": "fd,fabric", "refuse": "fd"}, "fabric"),
    ({"offer": "fabric", "refuse": "fabric"}, "ipc"),
    ({"offer": ""}, "ipc"),
])
def test_the_first_way_that_is_not_refused_is_taken(connected, fake, way):
    workers = connected(fake, fake)
    assert [worker.do("b.share") for worker in workers] == [way, way]


def test_all_ways_refused_lists_each_reason():
    worker = fake_cuda.worker(refuse="fd,ipc")
    try:
        failure = worker.fails("make({}, 4096)")
        assert failure.kind == "BackendUnavailableError"
        for reason in ("file descriptors: cuMemExport", "fabric handles: not offered", "CUDA IPC: cuIpc"):
            assert reason in failure.text
        assert "GPU 0 (Fake 0)" in failure.text
        worker.do("names.pop('b')")
        assert live(worker) == {}
    finally:
        worker.close()


def test_a_forced_way_does_not_fall_back():
    worker = fake_cuda.worker(refuse="fd")
    try:
        failure = worker.fails("make({'nvlink_share': 'fd'}, 4096)")
        assert failure.kind == "BackendUnavailableError" and "IPC" not in failure.text
    finally:
        worker.close()


@pytest.mark.parametrize("way", ["fd", "ipc"])
def test_out_of_memory_tells_asked_and_free(way):
    worker = fake_cuda.worker(free=1 << 22)
    try:
        failure = worker.fails("make({'nvlink_share': way}, 1 << 24)", way=way)
        assert failure.kind == "OutOfMemoryError"
        for word in (str((1 << 24) + (2 << 20)), str(1 << 22), str(1 << 30), "ask for a smaller heap"):
            assert word in failure.text
        worker.do("b.alloc_heap(1 << 16)")  # and a smaller one can be had
    finally:
        worker.close()


# ---- refused before anything is mapped


def test_missing_pairs_are_listed():
    none = [[], [], [], []]
    assert _nvlink.missing_pairs(UUIDS, none) == []
    one_sided = [[UUIDS[2][:16]], [], [], [UUIDS[1][:16]]]
    assert _nvlink.missing_pairs(UUIDS, one_sided) == [(0, 2), (1, 3)]
    same = [UUIDS[0]] * 2 + [UUIDS[1]]
    assert _nvlink.missing_pairs(same, [[UUIDS[0][:16], UUIDS[1][:16]], [], []]) == [(0, 2)]
    assert _nvlink.missing_pairs([], []) == []


def test_no_peer_access_is_one_error_on_all_ranks_and_maps_nothing(start):
    fake = {"blocked": "0-1,1-2"}
    workers, infos = start({"gpus": "0,1,2", **fake}, {"gpus": "1,0,2", **fake}, {"gpus": "2"})
    mapped = [live(worker)["mapped"] for worker in workers]
    failures = refuse(workers, infos)
    assert len({failure.text for failure in failures}) == 1
    assert {failure.kind for failure in failures} == {"BackendUnavailableError"}
    assert "2 pairs of ranks: 0-1, 1-2 (GPU-a0a0a0a0 and GPU-a1a1a1a1 of ranks 0 and 1" in failures[0].text
    assert [live(worker)["mapped"] for worker in workers] == mapped == [1, 1, 1]


def test_another_host_is_named(start):
    workers, infos = start({}, {})
    foreign = [infos[0], with_field(infos[1], "host", "elsewhere")]
    for failure in refuse(workers, foreign):
        assert failure.kind == "BackendUnavailableError" and failure.text.endswith("they run on different hosts")


def test_ranks_that_share_in_different_ways_are_told(start):
    workers, infos = start({"refuse": "fd"}, {})
    for failure in refuse(workers, infos):
        assert failure.kind == "BackendUnavailableError"
        assert "rank 0 shares memory by `ipc`, rank 1 by `fd`" in failure.text and "EPCOMM_NVLINK_SHARE" in failure.text


def test_unequal_heaps_are_told(start):
    (a, b), (info_a, _) = start({}, {})
    info_b = b.make({}, 2 * HEAP_BYTES)
    for failure in refuse([a, b], [info_a, info_b]):
        assert failure.kind == "InvalidArgumentError" and "65536" in failure.text and "131072" in failure.text


@pytest.mark.parametrize("key, value, text", [
    ("nonce", "0" * 32, "is not its heap"),
    ("nonce", "zz", "`nonce` is no key"),
    ("share", "9", "`share` is 9"),
    ("mapped", "4096", "65536 bytes in 4096 mapped bytes"),
    ("secret", "0" * 32, "secret"),
])
def test_damaged_information_is_refused(start, key, value, text):
    (a, b), (info_a, info_b) = start({}, {})
    a.send("b.connect(0, infos, 0, 5.0)", infos=[info_a, with_field(info_b, key, value)])
    b.send("b.connect(1, infos, 0, 5.0)", infos=[info_a, info_b])
    failure = a.answer().failure
    assert failure.kind == "BackendUnavailableError" and text in failure.text
    b.answer()


@pytest.mark.parametrize("arguments, text", [
    ("2, infos, 0", "rank=2"), ("0, infos, 4", "state_word=4"), ("0, infos, 65536", "state_word="),
])
def test_arguments_of_connect(start, arguments, text):
    (worker,), infos = start({})
    failure = worker.fails(f"b.connect({arguments}, 5.0)", infos=infos)
    assert failure.kind == "InvalidArgumentError" and text in failure.text


def test_order_of_life(start):
    (worker,), infos = start({})
    for call in ("b.alloc_heap(1)", "b.export_info()", "b.device_ctx()", "b.announce(1)"):
        assert worker.fails(call).kind == "InvalidArgumentError"
    worker.do("b.check()")
    worker.do("b.connect(0, infos, 0, 5.0)", infos=infos)
    assert worker.fails("b.connect(0, infos, 0, 5.0)", infos=infos).kind == "InvalidArgumentError"


# ---- death, abort, leaving


@pytest.mark.parametrize("use_pidfd", [True, False], ids=["pidfd", "polling"])
def test_a_killed_peer_sets_the_abort_word(connected, use_pidfd):
    a, b, c = connected({}, {}, {}, options={"use_pidfd": use_pidfd})
    address = context(a)["host_words"]
    killed = c.kill()
    while words(a, address)[0] == 0:
        assert time.monotonic() - killed < 1.0
        time.sleep(0.005)
    assert words(a, address, 4) == (1 + 2, 0, 0, 1)
    failure = a.fails("b.check()")
    assert (failure.kind, failure.peer) == ("PeerLostError", 2) and f"pid {c.process.pid}" in failure.text
    assert a.do("[b.peer_state(peer) for peer in range(3)]") == [0, 0, 3]
    assert b.fails("b.check()").peer == 2


def test_a_rank_that_left_and_ended_is_no_loss(connected):
    a, b = connected({}, {})
    b.do("b.announce(1)")
    assert a.do("b.peer_state(1)") == 1
    address = context(a)["host_words"]
    b.kill()
    end = time.monotonic() + 2
    while words(a, address, 3)[2] == 0 and time.monotonic() < end:
        time.sleep(0.005)
    assert words(a, address, 3) == (2, 0, 1)  # kernels look at the state word too
    assert a.do("b.peer_state(1)") == 1
    a.do("b.check()")


@pytest.mark.parametrize("unreachable", [0, 2])
def test_a_peer_that_cannot_be_told_keeps_no_news_from_the_others(connected, unreachable):
    workers = connected({}, {}, {}, {})
    a = workers[1]
    a.do("__import__('os').environ.update(FAKE_CUDA_UNWRITABLE=str(b.peer_ptr(peer)))", peer=unreachable)
    assert a.fails("b.announce(2)").kind == "CudaError"
    told = [worker.do("b.peer_state(1)") for worker in workers]
    assert told == [0 if rank == unreachable else 2 for rank in range(4)]


def test_abort_ends_waits_and_keeps_the_first_reason(connected):
    a, _ = connected({}, {})
    address = context(a)["host_words"]
    a.do("b.abort('enough')")
    a.do("b.abort('more')")
    assert words(a, address)[0] == ABORT
    failure = a.fails("b.check()")
    assert failure.kind == "PeerLostError" and failure.text == "enough"


def test_a_peer_that_does_not_come_is_named(start):
    (a, _), infos = start({}, {})
    failure = a.fails("b.connect(0, infos, 0, 0.3)", infos=infos)
    assert failure.kind == "CommTimeoutError" and failure.peer == 1


# ---- clean-up


@pytest.mark.parametrize("way", ["fd", "fabric", "ipc"])
def test_fifty_cycles_leave_nothing(start, way):
    options = {"nvlink_share": way}
    workers, _ = start({"offer": "fd,fabric"}, {"offer": "fd,fabric"}, options=options)
    for worker in workers:
        worker.do("names.pop('b')")
    files = [len(worker.do("open_files()")) for worker in workers]
    threads = [worker.do("num_threads()") for worker in workers]
    for _ in range(50):
        connect_all(workers, [worker.make(options, HEAP_BYTES) for worker in workers])
        for worker in workers:
            worker.do("b.close() or b.close()")
            assert live(worker).keys() >= {"contexts", "pinned"}  # the own heap is still there
            worker.do("names.pop('b')")
    for worker, count, before in zip(workers, files, threads, strict=True):
        assert live(worker) == {}
        assert worker.do("num_threads()") == before
        if way == "fd":  # the fake keeps a descriptor for each handle that is a name
            assert len(worker.do("open_files()")) == count


def test_the_heap_outlives_close(connected):
    a, b = connected({}, {})
    address = a.do("b.heap_ptr")
    a.do("b.close()")
    assert words(a, address) == (0,)
    assert a.do("b.peer_ptr(1)") == 0
    assert b.do("b.peer_ptr(0)") != 0  # the peer still maps it
    for call in ("b.device_ctx()", "b.announce(1)"):
        assert a.fails(call).kind == "InvalidArgumentError"
    assert a.fails("b.check()").text == "this rank closed its communicator"


def test_a_driver_that_is_gone_does_not_hang_the_end(connected):
    a, _ = connected({}, {})
    a.do("__import__('os').environ.__setitem__('FAKE_CUDA_GONE', '1')")
    a.do("b.close()")
    a.do("names.pop('b') and 0")


def test_failed_connects_leave_nothing(start):
    (a, b), (info_a, info_b) = start({}, {})
    refuse([a, b], [info_a, with_field(info_b, "host", "elsewhere")])
    for worker in (a, b):
        worker.do("names.pop('b')")
        assert live(worker) == {}


FORKED = """
import os, time
from epcomm import _nvlink
b = _nvlink.Backend(); b.alloc_heap(1 << 16); b.connect(0, [b.export_info()], 0, 5.0)
child = os.fork()
if child == 0:
    try:
        b.device_ctx()
    except Exception as error:
        print(type(error).__name__, flush=True)
    b.close()
    del b
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
b.device_ctx()
b.close()
print("fine")
"""


def test_a_forked_child_is_inert():
    done = fake_cuda.python(FORKED)
    assert done.stdout.split() == ["UnsupportedError", "fine"], done.stdout + done.stderr


def test_another_user_is_refused(start):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    (a, b), infos = start({}, {})
    b.do("__import__('os').setegid(65534) or __import__('os').seteuid(65534)")
    assert any("different users" in failure.text for failure in refuse([a, b], infos))


def test_the_layouts_agree():
    assert CTX.size == 64 and ctypes.sizeof(ctypes.c_void_p) == 8
