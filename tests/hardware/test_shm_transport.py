"""Ranks as threads of one process: what the transport moves, how waits end and whom they blame."""

import ctypes
import threading
import time

import pytest

from epcomm import _shm
from epcomm.errors import CommTimeoutError, InvalidArgumentError, PeerLostError

WORDS = 4096
DATA = 8192
HEAP_BYTES = 1 << 16
LEFT, BROKEN = 1, 2


def in_threads(calls, timeout_s=30.0):
    """Run all calls at once; returns what each returned or raised."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank is stuck"
    return results


def make_ranks(num_ranks, options=None, heap_bytes=HEAP_BYTES):
    backends = [_shm.Backend(options or {}) for _ in range(num_ranks)]
    for backend in backends:
        backend.alloc_heap(heap_bytes)
    infos = [backend.export_info() for backend in backends]
    results = in_threads([lambda rank=rank: backends[rank].connect(rank, infos, 0, 10.0) for rank in range(num_ranks)])
    assert results == [None] * num_ranks
    return backends


@pytest.fixture
def two():
    backends = make_ranks(2)
    yield backends
    for backend in backends:
        backend.close()


@pytest.fixture
def three():
    backends = make_ranks(3)
    yield backends
    for backend in backends:
        backend.close()


def heap_of(backend, rank, offset=0, size_bytes=HEAP_BYTES):
    address = backend.peer_ptr(rank, offset)
    assert address
    return (ctypes.c_ubyte * size_bytes).from_address(address)


def test_name_caps_and_info():
    backend = _shm.Backend({})
    assert backend.name == "shm"
    assert backend.caps == (1 << 0) | (1 << 2) | (1 << 3) | (1 << 5)  # put, load/store, in a node, host memory
    backend.alloc_heap(1)
    info = backend.export_info()
    assert info.startswith(b"shm 1\n") and len(info) <= 1024
    assert "epcomm.Backend" in repr(backend.capsule())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("folder", [None, "/dev/shm"], ids=["memfd", "folder"])
def test_every_rank_sees_every_heap(num_ranks, folder):
    backends = make_ranks(num_ranks, {"shm_dir": folder} if folder else {})
    for rank, backend in enumerate(backends):
        assert not any(heap_of(backend, rank)), "the heap is not zeroed"
    for rank, backend in enumerate(backends):
        for peer in range(num_ranks):
            heap_of(backend, peer, DATA + rank, 1)[0] = 1 + rank
    for rank, backend in enumerate(backends):
        assert list(heap_of(backend, rank, DATA, num_ranks)) == [1 + peer for peer in range(num_ranks)]
    for backend in backends:
        backend.close()


def test_an_odd_heap_size_keeps_its_last_byte():
    a, b = make_ranks(2, heap_bytes=4097)
    heap_of(a, 1, 4096, 1)[0] = 9
    assert heap_of(b, 1, 0, 4097)[4096] == 9
    a.close(), b.close()


def test_put_then_signal(two):
    a, b = two
    for i, byte in enumerate(range(1, 101)):
        heap_of(a, 0, DATA + i, 1)[0] = byte
    a.put(1, DATA + 7, DATA, 100)
    a.signal(1, WORDS, 5)
    b.wait(0, WORDS, 5, 5.0)
    assert bytes(heap_of(b, 1, DATA + 6, 102)) == bytes([0, *range(1, 101), 0])
    a.signal(1, WORDS, 2)
    b.wait(0, WORDS, 7, 5.0)
    a.put(0, DATA + 1, DATA, 100)  # to itself, overlapping
    assert bytes(heap_of(a, 0, DATA + 1, 100)) == bytes(range(1, 101))


def test_signals_to_itself(two):
    two[0].signal(0, WORDS, 1)
    two[0].wait(0, WORDS, 1, 1.0)


def test_data_is_there_when_its_signal_is(two):
    a, b = two
    rounds, size_bytes = 300, 4096

    def send():
        for i in range(1, rounds + 1):
            ctypes.memset(a.peer_ptr(1, DATA), i % 251, size_bytes)
            a.signal(1, WORDS)
            a.wait(1, WORDS, i, 10.0)

    def receive():
        for i in range(1, rounds + 1):
            b.wait(0, WORDS, i, 10.0)
            assert bytes(heap_of(b, 1, DATA, size_bytes)) == bytes([i % 251]) * size_bytes
            b.signal(0, WORDS)

    assert in_threads([send, receive]) == [None, None]


@pytest.mark.parametrize("num_ranks", [3, 7])
def test_more_ranks_than_cores_move(num_ranks):
    backends = make_ranks(num_ranks)
    rounds = 100

    def run(rank):
        for i in range(1, rounds + 1):
            for peer in range(num_ranks):
                backends[rank].signal(peer, WORDS + rank * 64)
            for peer in range(num_ranks):
                backends[rank].wait(peer, WORDS + peer * 64, i, 20.0)

    assert in_threads([lambda rank=rank: run(rank) for rank in range(num_ranks)]) == [None] * num_ranks


@pytest.mark.parametrize("call, named", [
    (lambda b: b.signal(2, WORDS), "peer=2"),
    (lambda b: b.signal(-1, WORDS), "peer=-1"),
    (lambda b: b.signal(1, WORDS + 1), "word=4097"),
    (lambda b: b.signal(1, HEAP_BYTES), "word=65536"),
    (lambda b: b.signal(1, 2**64 - 8), "word=18446744073709551608"),
    (lambda b: b.wait(1, HEAP_BYTES - 4, 1, 1.0), "word=65532"),
    (lambda b: b.put(1, HEAP_BYTES - 7, 0, 8), "put of 8 bytes"),
    (lambda b: b.put(1, 0, HEAP_BYTES - 7, 8), "put of 8 bytes"),
    (lambda b: b.put(1, 2**64 - 4, 0, 8), "put of 8 bytes"),
    (lambda b: b.put(1, 0, 0, 2**64 - 1), "put of 18446744073709551615 bytes"),
])
def test_offsets_outside_are_refused(two, call, named):
    with pytest.raises(InvalidArgumentError, match=named):
        call(two[0])
    assert two[0].peer_ptr(2) == 0 and two[0].peer_ptr(1, HEAP_BYTES + 1) == 0


def test_order_of_life():
    backend = _shm.Backend({})
    with pytest.raises(InvalidArgumentError, match="export_info"):
        backend.export_info()
    with pytest.raises(InvalidArgumentError, match="not connected"):
        backend.signal(0, 0)
    backend.alloc_heap(HEAP_BYTES)
    with pytest.raises(InvalidArgumentError, match="alloc_heap"):
        backend.alloc_heap(HEAP_BYTES)
    info = backend.export_info()
    backend.connect(0, [info], 0, 1.0)
    with pytest.raises(InvalidArgumentError, match="connect"):
        backend.connect(0, [info], 0, 1.0)
    backend.close()
    backend.close()
    with pytest.raises(InvalidArgumentError, match="not connected"):
        backend.signal(0, 0)
    with pytest.raises(InvalidArgumentError, match="initialised once"):
        backend.__init__({})
    with pytest.raises(InvalidArgumentError, match="spin_us=-5"):
        _shm.Backend({"spin_us": -5})


def test_deadline_names_everything(two):
    two[1].signal(0, WORDS, 3)
    start = time.monotonic()
    with pytest.raises(CommTimeoutError) as caught:
        two[0].wait(1, WORDS, 5, 0.3, operation="shuffle", phase="second half")
    assert 0.29 <= time.monotonic() - start < 1.0
    assert caught.value.peer == 1
    text = str(caught.value)
    for part in ("shuffle", "second half", "rank 1", "expected 5", "seen 3", "0.3 s", "timeout_s", "EPCOMM_TIMEOUT_S"):
        assert part in text, (part, text)


def test_a_satisfied_wait_needs_no_time(two):
    two[1].signal(0, WORDS)
    two[0].wait(1, WORDS, 1, 1e-9)
    two[0].wait(1, WORDS, 0, 0.0)


@pytest.mark.parametrize("state, text", [(LEFT, "rank 1 left: it closed its communicator"), (BROKEN, "rank 1 gave up")])
def test_a_peer_that_went_ends_waits_on_it_only(three, state, text):
    a, b, c = three
    b.signal(0, WORDS, 1)  # arrived before: counts
    b.signal(0, 1 * 64, state)
    assert a.peer_state(1) == state and a.peer_state(2) == 0
    a.wait(1, WORDS, 1, 5.0)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=text) as caught:
        a.wait(1, WORDS, 2, 20.0)
    assert caught.value.peer == 1 and time.monotonic() - start < 0.5
    with pytest.raises(CommTimeoutError, match="rank 2"):
        a.wait(2, WORDS + 64, 1, 0.6)
    c.signal(0, WORDS + 64)
    a.wait(2, WORDS + 64, 1, 5.0)


def test_a_peer_that_leaves_ends_a_sleeping_wait(two):
    a, b = two
    result = []

    def leave():
        time.sleep(0.5)
        result.append(time.monotonic())
        b.signal(0, 1 * 64, LEFT)

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(PeerLostError, match="left"):
        a.wait(1, WORDS, 1, 20.0)
    assert time.monotonic() - result[0] < 0.3
    thread.join(5)


def test_abort_ends_waits_now_and_later(two):
    a, b = two
    timer = threading.Timer(0.4, lambda: a.abort("the user said stop"))
    timer.start()
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="the user said stop"):
        a.wait(1, WORDS, 1, 20.0)
    assert time.monotonic() - start < 1.0
    b.signal(0, WORDS)
    a.abort("a second reason")
    with pytest.raises(PeerLostError, match="the user said stop"):
        a.wait(1, WORDS, 1, 20.0)
    a.signal(1, WORDS)
    b.wait(0, WORDS, 1, 1.0)  # the other rank's waits are its own
    timer.join(5)


def test_many_threads_wait_at_once(two):
    a, b = two

    def wait(channel):
        a.wait(1, WORDS + channel * 64, 1, 10.0)

    def signal():
        time.sleep(0.2)
        for channel in reversed(range(16)):
            b.signal(0, WORDS + channel * 64)

    assert in_threads([lambda c=c: wait(c) for c in range(16)] + [signal]) == [None] * 17


def test_the_heap_outlives_close(two):
    view = heap_of(two[0], 0)
    view[DATA] = 5
    two[0].close()
    assert view[DATA] == 5  # arrays over the heap hold the object, not the connection
