"""The device policy of ``nvlink``: it compiles everywhere; on a GPU, kernels of several ranks use it.

One GPU is enough: the ranks share it, as processes or as objects of one process. Processes take the GPUs in turn.
"""

import importlib.util
import re
import struct
import time
from pathlib import Path

import pytest
from helpers import gpu as gpu_helper
from helpers.shm_worker import Worker, connect_all

from epcomm import UnsupportedError, _nvlink, _paths, kernels
from epcomm._nvrtc import CompileFailed, resources
from epcomm.errors import BackendUnavailableError

SOURCE = Path(gpu_helper.__file__).with_name("nvlink_kernels.cu")
DONE, TIMEOUT, ABORTED, DEAD, LEFT, BROKEN = range(6)
HEAP_BYTES = 1 << 20
WORD, AT, FROM = 4096, 65536, 262144  # offsets: a signal, where data goes, where it comes from


def headers():
    """Every header that device code may include, by the name it is included by."""
    root = _paths.include_dir()
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.suffix in (".h", ".cuh")}


def compile_text(nvrtc, arch, text):
    return nvrtc.compile("test.cu", text, headers(), (f"-arch={arch}", *kernels.OPTIONS))


def find_nvrtc(major):
    """An NVRTC of that CUDA major (None: any), or None."""
    try:
        found = kernels.compiler()
        if major in (None, found.version[0]):
            return found
    except UnsupportedError:
        pass
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations) if spec is not None else []
    files = [path for folder in folders for path in Path(folder).glob(f"*/lib/libnvrtc.so.{major or '1?'}")]
    return kernels.compiler(files[0]) if files else None


# ---- without a GPU


@pytest.fixture(scope="module", params=(13, 12), ids="nvrtc{}".format)
def nvrtc(request, need):
    found = find_nvrtc(request.param)
    need(f"nvrtc{request.param}", None if found else f"no NVRTC {request.param}")
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_the_policy_compiles(nvrtc, arch):
    """Also beside everything that a kernel of ours includes; nothing spills."""
    text = '#include "epcomm/heap.h"\n#include "epcomm/entry.h"\n' + SOURCE.read_text()
    image, log = compile_text(nvrtc, arch, text)
    assert image[:4] == b"\x7fELF"
    found = resources(log)
    assert set(found) == {"fill", "send", "receive", "stream_out", "stream_in"}
    for name, used in found.items():
        assert used.spill_bytes == 0, (name, used)


GOOD = """
#include "epcomm/device/nvlink.cuh"
struct good : epcomm::device::nvlink {};
static_assert(epcomm::device::PolicyCheck<good>::ok, "");
"""


@pytest.mark.parametrize("wrong, sentence", [
    ("static __device__ void signal(const Ctx&, int, int, unsigned, unsigned long long) {}",
     "policy: void signal(const Ctx&, int peer, int channel, uint64_t word, uint64_t add)"),
    ("static __device__ int wait(const Ctx&, int, epcomm::uint64_t, epcomm::uint64_t, epcomm::uint64_t,"
     " epcomm::device::WaitInfo*) { return 0; }", "policy: WaitCode wait("),
    ("static __device__ void put(const Ctx&, int, int, epcomm::uint64_t, void*, epcomm::uint64_t) {}",
     "policy: void put(const Ctx&"),
    ("static __device__ const void* peer_ptr(const Ctx&, int, epcomm::uint64_t) { return 0; }",
     "policy: void* peer_ptr("),
])
def test_a_wrong_signature_is_one_sentence(nvrtc, wrong, sentence):
    compile_text(nvrtc, "sm_80", GOOD)
    bad = GOOD.replace("nvlink {}", "nvlink { using Ctx = epcomm::device::NvlinkCtx; " + wrong + " }")
    with pytest.raises(CompileFailed) as caught:
        compile_text(nvrtc, "sm_80", bad)
    assert sentence in str(caught.value)
    assert len(re.findall(r"\berror: ", str(caught.value))) == 1, str(caught.value)


def test_sizes_are_those_of_the_host(nvrtc):
    text = '#include "epcomm/device/nvlink.cuh"\nusing namespace epcomm::device;\n'
    text += 'static_assert(sizeof(NvlinkCtx) == 64 && sizeof(WaitInfo) == 24 && sizeof(NvlinkHostWords) == 8, "");\n'
    compile_text(nvrtc, "sm_80", text)


# ---- on a GPU


@pytest.fixture(scope="module")
def cubin(need):
    """Kernels for GPU 0."""
    reason = None
    try:
        _nvlink.probe()
    except BackendUnavailableError as error:
        reason = str(error)
    compiler = None if reason else find_nvrtc(None)
    need("nvlink", reason or (None if compiler else "no NVRTC"))
    image, _ = compile_text(compiler, kernels.arch_of(gpu_helper.capability(0), compiler), SOURCE.read_text())
    return image


@pytest.fixture
def start(cubin):
    """``start(n, options)``: n connected processes, each with ``r``, its :class:`gpu.Rank`."""
    started = []

    def make(count, options=None, **environment):
        # Lazy loading waits for running kernels, and some of ours wait for the next one.
        environment["CUDA_MODULE_LOADING"] = "EAGER"
        new = [Worker(backend="nvlink", environment=environment | gpu_helper.environment_of(rank))
               for rank in range(count)]
        started.extend(new)
        for worker in new:
            worker.do("names.update(gpu=__import__('gpu'))")
            worker.do("names.update(g=gpu.Gpu(cubin))", 60, cubin=cubin)
        connect_all(new, [worker.make(options, HEAP_BYTES) for worker in new], 30.0)
        for worker in new:
            worker.do("names.update(r=gpu.Rank(g, b))")
        return new

    yield make
    for worker in started:
        worker.close()


def start_receive(worker, peer, value=1, timeout_s=20.0, at=0, size_bytes=0, seed=0):
    arguments = (peer, WORD, value, timeout_s, at, size_bytes, seed)
    worker.do("r.start_receive(*arguments)", arguments=arguments)


def receive(worker, *arguments, **more):
    start_receive(worker, *arguments, **more)
    return worker.do("r.result()", 60)


def send(worker, peer, dst=AT, src=FROM, size_bytes=0, add=1):
    worker.do("r.send(*arguments)", 60, arguments=(peer, dst, src, size_bytes, WORD, add))


def patch(worker, offset, data):
    """Change a field of the context that the worker's kernels get."""
    worker.do("setattr(r, 'ctx', r.ctx[:at] + data + r.ctx[at + len(data):])", at=offset, data=data)


def works(worker):
    """The rank reaches its own heap: the context is well."""
    worker.do("r.fill(at, 1000, 99)", at=FROM)
    worker.do("r.send(rank, at, src, 1000, 5 * 4096)", rank=0, at=AT + 1, src=FROM)
    worker.do("r.start_receive(0, 5 * 4096, 1, 5.0, at, 1000, 99)", at=AT + 1)
    result = worker.do("r.result()")
    assert (result["code"], result["wrong"]) == (DONE, 0)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("way", ["fd", "ipc"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_kernels_write_into_each_others_heaps(start, num_ranks, way):
    """All wait first; then each sends to the next. Heaps begin as zeros, though the memory was used before."""
    ranks = start(num_ranks, {"nvlink_share": way})
    for worker in ranks:
        assert not any(worker.do("g.read(b.heap_ptr, size, r.stream)", size=HEAP_BYTES))
    assert [worker.do("b.share") for worker in ranks] == [way] * num_ranks
    for rank, worker in enumerate(ranks):
        before = (rank - 1) % num_ranks
        start_receive(worker, before, 1, 20.0, AT, 100_000, 1 + before)
    for rank, worker in enumerate(ranks):
        worker.do("r.fill(at, 100_000, seed)", at=FROM, seed=1 + rank)
        send(worker, (rank + 1) % num_ranks, size_bytes=100_000)
    for worker in ranks:
        result = worker.do("r.result()", 60)
        assert (result["code"], result["seen"], result["wrong"], result["culprit"]) == (DONE, 1, 0, -1)


@pytest.mark.gpu(1)
def test_any_alignment_and_size_and_nothing_beside_it(start):
    a, b = start(2)
    value = 0
    for dst, src in [(0, 0), (1, 1), (15, 15), (4, 8), (3, 7), (0, 1), (16, 24), (5, 4)]:
        for size in (0, 1, 3, 15, 16, 17, 31, 511, 512, 4096, 10_007):
            value += 1
            a.do("r.fill(at, size, seed)", at=FROM + src, size=size, seed=value)
            b.do("r.fill(at, 12_000, 7)", at=AT)
            send(a, 1, AT + dst, FROM + src, size)
            result = receive(b, 0, value, 5.0, AT + dst, size, value)
            assert (result["code"], result["wrong"]) == (DONE, 0), (dst, src, size)
            whole = receive(b, 0, value, 5.0, AT, 12_000, 7)["wrong"]
            assert whole <= size, (dst, src, size)  # outside of it nothing has changed


@pytest.mark.gpu(1)
@pytest.mark.parametrize("atomics", [1, 0])
def test_many_rounds_between_processes(start, atomics):
    a, b = start(2)
    for worker in (a, b):
        patch(worker, 56, struct.pack("<i", atomics))
    a.do("r.start_stream('stream_out', 1, at, 8192, word, 100)", at=AT, word=WORD)
    b.do("r.start_stream('stream_in', 0, at, 8192, word, 100)", at=AT, word=WORD)
    for worker in (a, b):
        result = worker.do("r.result()", 60)
        assert (result["code"], result["wrong"]) == (DONE, 0)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("way", ["fd", "ipc"])
@pytest.mark.parametrize("atomics", [1, 0])
def test_two_objects_in_one_process(start, way, atomics):
    (worker,) = start(1)
    infos = [
        worker.do("names.update({name: nvlink.Backend(options)}) or names[name].alloc_heap(size) or "
                  "names[name].export_info()", name=name, options={"nvlink_share": way}, size=HEAP_BYTES)
        for name in ("x", "y")
    ]
    worker.do("names.update(t=__import__('threading').Thread(target=x.connect, args=(0, infos, 0, 30.0)))", infos=infos)
    worker.do("t.start() or y.connect(1, infos, 0, 30.0) or t.join(30)", infos=infos)
    worker.do("names.update(rx=gpu.Rank(g, x), ry=gpu.Rank(g, y))")
    for name in ("rx", "ry"):
        worker.do("setattr(names[name], 'ctx', names[name].ctx[:56] + atomics + names[name].ctx[60:])", name=name,
                  atomics=struct.pack("<i", atomics))
    worker.do("ry.start_stream('stream_in', 0, at, 8192, word, 2000)", at=AT, word=WORD)
    worker.do("rx.start_stream('stream_out', 1, at, 8192, word, 2000)", at=AT, word=WORD)
    for name in ("rx", "ry"):
        result = worker.do(f"{name}.result()", 60)
        assert (result["code"], result["wrong"]) == (DONE, 0)
    worker.do("x.close() or y.close() or names.pop('x') and names.pop('y') and 0")


@pytest.mark.gpu(1)
def test_a_deadline_ends_a_wait_without_a_trap(start):
    a, b = start(2)
    send(b, 0, add=3)
    result = receive(a, 1, 4, timeout_s=0.2)
    assert (result["code"], result["seen"], result["culprit"]) == (TIMEOUT, 3, 1)
    assert 0.2 <= result["waited_s"] < 1.0
    patch(a, 40, struct.pack("<Q", 100_000_000))
    result = receive(a, 1, 4, timeout_s=0)  # the context's
    assert result["code"] == TIMEOUT and 0.1 <= result["waited_s"] < 1.0
    works(a)
    send(b, 0)
    assert receive(a, 1, 4)["code"] == DONE


@pytest.mark.gpu(1)
@pytest.mark.parametrize("way", ["fd", "ipc"])
def test_a_killed_peer_ends_the_kernel_that_waits_for_it(start, way):
    a, b = start(2, {"nvlink_share": way})
    start_receive(a, 1, timeout_s=60.0)
    time.sleep(0.3)
    killed = b.kill()
    result = a.do("r.result()", 60)
    assert (result["code"], result["culprit"]) == (DEAD, 1)
    assert result["at"] - killed < 1.0
    assert a.fails("b.check()").peer == 1
    send(a, 1, size_bytes=1000)  # its heap is still there to be written
    works(a)
    a.do("b.close()")


@pytest.mark.gpu(1)
def test_a_third_rank_that_dies_ends_a_wait_a_little_later(start):
    a, b, c = start(3)
    start_receive(a, 1, timeout_s=60.0)
    time.sleep(0.2)
    killed = c.kill()
    result = a.do("r.result()", 60)
    assert (result["code"], result["culprit"]) == (DEAD, 2)
    assert 0.2 < result["at"] - killed < 1.5
    # What a living peer sends at once still counts.
    start_receive(b, 0, timeout_s=60.0)
    send(a, 1)
    assert b.do("r.result()", 60)["code"] == DONE


@pytest.mark.gpu(1)
def test_a_rank_that_left_and_ended_is_no_loss(start):
    a, b, c = start(3)
    c.do("b.announce(1)")
    c.kill()
    start_receive(a, 1, timeout_s=60.0)
    time.sleep(0.8)
    send(b, 0)
    assert a.do("r.result()", 60)["code"] == DONE
    a.do("b.check()")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("state, code", [(1, LEFT), (2, BROKEN)])
def test_a_peer_that_left_or_gave_up_ends_the_wait(start, state, code):
    a, b = start(2)
    start_receive(a, 1, 2, timeout_s=60.0)
    send(b, 0)
    b.do("b.announce(state)", state=state)
    result = a.do("r.result()", 60)
    assert (result["code"], result["seen"], result["culprit"]) == (code, 1, 1)
    assert receive(a, 1, 1)["code"] == DONE  # what had arrived
    assert a.do("b.peer_state(1)") == state


@pytest.mark.gpu(1)
def test_abort_ends_waits(start):
    a, _ = start(2)
    start_receive(a, 1, timeout_s=60.0)
    time.sleep(0.2)
    began = time.monotonic()
    a.do("b.abort('enough')")
    result = a.do("r.result()", 60)
    assert (result["code"], result["culprit"]) == (ABORTED, -1)
    assert result["at"] - began < 0.5
    assert receive(a, 1, timeout_s=60.0)["code"] == ABORTED
    assert a.fails("b.check()").text == "enough"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("way", ["fd", "ipc"])
def test_fifty_cycles_leak_no_device_memory(start, way):
    ranks = start(2)
    free = []
    for _ in range(52):
        connect_all(ranks, [worker.make({"nvlink_share": way}, 64 << 20) for worker in ranks], 30.0)
        for worker in ranks:
            worker.do("b.close()")
            worker.do("names.pop('b') and 0")
        free.append(ranks[0].do("g.free_bytes()"))
    assert min(free[2:]) >= free[1], free


@pytest.mark.gpu(1)
def test_expandable_segments_of_torch_do_not_matter(start):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    a, b = start(2, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="expandable_segments:True")
    for worker in (a, b):
        worker.do("names.update(torch=__import__('torch'))", 60)
        worker.do("names.update(x=torch.ones(1 << 24, device='cuda'))", 60)
    connect_all([a, b], [worker.make({}, HEAP_BYTES) for worker in (a, b)], 30.0)
    for worker in (a, b):
        worker.do("names.update(r=gpu.Rank(g, b))")
    a.do("r.fill(at, 5000, 3)", at=FROM)
    send(a, 1, size_bytes=5000)
    assert receive(b, 0, 1, 20.0, AT, 5000, 3)["wrong"] == 0
    for worker in (a, b):
        assert worker.do("int(x.sum())") == 1 << 24


@pytest.mark.gpu(1)
def test_no_context_becomes_current(cubin):
    worker = Worker(backend="nvlink")
    try:
        worker.do("names.update(ctypes=__import__('ctypes'))")
        info = worker.make()
        worker.do("b.connect(0, [info], 0, 5.0) or b.announce(1) or b.peer_state(0) or b.close()", info=info)
        current = "(lambda c: ctypes.CDLL('libcuda.so.1').cuCtxGetCurrent(ctypes.byref(c)) or c.value)"
        assert worker.do(current + "(ctypes.c_void_p())") is None
    finally:
        worker.close()


@pytest.mark.gpu(1)
def test_a_heap_that_cannot_fit_says_how_much_is_free(start):
    (worker,) = start(1)
    failure = worker.fails("nvlink.Backend().alloc_heap(1 << 42)")
    assert failure.kind == "OutOfMemoryError", failure
    assert str(1 << 42)[:5] in failure.text and "are free" in failure.text
    works(worker)


@pytest.mark.gpu(1)
def test_a_broken_context_does_not_hang_the_end(start):
    a, b = start(2)
    assert "ILLEGAL_ADDRESS" in a.fails("r.fill(1 << 45, 1 << 20, 1)", 60).text
    assert a.fails("b.announce(1)").kind == "CudaError"
    a.do("b.close()")
    a.do("names.pop('r') and names.pop('b') and 0")
    works_after = receive(b, 0, timeout_s=0.1)
    assert works_after["code"] in (TIMEOUT, DEAD)
