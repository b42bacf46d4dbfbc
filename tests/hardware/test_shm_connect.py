"""Who is let in, what is refused and why."""

import array
import ctypes
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time

import pytest
from helpers.shm_worker import HEAP_BYTES, Worker, connect_all

from epcomm import _shm
from epcomm.errors import BackendUnavailableError, CommTimeoutError, EpcommError, InvalidArgumentError

MAGIC = b"epcomm/1"
NOBODY = 65534


def new_backend(heap_bytes=HEAP_BYTES):
    backend = _shm.Backend({})
    backend.alloc_heap(heap_bytes)
    return backend, backend.export_info()


def field(info, key):
    return re.search(rf"^{key} (.*)$", info.decode(), re.MULTILINE).group(1)


def with_field(info, key, value):
    return re.sub(rf"^{key} .*$", f"{key} {value}", info.decode(), flags=re.MULTILINE).encode()


def connect_in_threads(backends, infos, timeout_s=10.0):
    """What each connect() raised, by rank."""
    results = [None] * len(backends)

    def run(rank):
        try:
            backends[rank].connect(rank, infos[rank] if isinstance(infos, dict) else infos, 0, timeout_s)
        except EpcommError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(backends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 10)
        assert not thread.is_alive(), "connect() is stuck"
    return results


@pytest.fixture
def workers():
    started = []

    def start(count, *prefix):
        new = [Worker(*prefix) for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for worker in started:
        worker.close()


def need_root(*tools):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")


def need_unshare(*flags):
    need_root("unshare")
    if subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"unshare {' '.join(flags)} is not permitted here")


# ---- what ranks say of themselves


@pytest.mark.parametrize("damage, text", [
    (lambda info: b"", "no `shm` information"),
    (lambda info: b"x" * 5000, "no `shm` information"),
    (lambda info: info.replace(b"shm 1\n", b"shm 2\n"), "rank 1 speaks `shm 2`, this rank `shm 1`"),
    (lambda info: info.replace(b"shm 1\n", b"ibrc 1\n"), "rank 1 speaks `ibrc 1`"),
    (lambda info: info[:-3], "damaged"),
    (lambda info: re.sub(rb"secret .*\n", b"", info), "no `secret`"),
    (lambda info: with_field(info, "nonce", "zz"), "`nonce` is no key"),
    (lambda info: with_field(info, "heap", "-5"), "`heap` is no number"),
])
def test_damaged_information_is_refused(damage, text):
    a, info_a = new_backend()
    b, info_b = new_backend()
    with pytest.raises(BackendUnavailableError, match=re.escape(text)):
        a.connect(0, [info_a, damage(info_b)], 0, 5.0)


def test_unequal_heaps_are_one_error_on_both():
    (a, info_a), (b, info_b) = new_backend(1 << 16), new_backend(1 << 17)
    for error in connect_in_threads([a, b], [info_a, info_b]):
        assert isinstance(error, InvalidArgumentError)
        assert "65536" in str(error) and "131072" in str(error)


@pytest.mark.parametrize("rank, state_word, text", [
    (2, 0, "rank=2"),
    (-1, 0, "rank=-1"),
    (0, 4, "state_word=4"),
    (0, HEAP_BYTES - 64, "state_word="),
    (0, 2**64 - 64, "state_word="),
])
def test_arguments_of_connect(rank, state_word, text):
    a, info_a = new_backend()
    b, info_b = new_backend()
    with pytest.raises(InvalidArgumentError, match=text):
        a.connect(rank, [info_a, info_b], state_word, 5.0)


# ---- sharing is proved


def test_a_wrong_secret_gets_nothing():
    (a, info_a), (b, info_b) = new_backend(), new_backend()
    forged = with_field(info_b, "secret", "0" * 32)
    errors = connect_in_threads([a, b], {0: [info_a, forged], 1: [info_a, info_b]}, 5.0)
    assert isinstance(errors[0], BackendUnavailableError)
    assert "ranks 0 and 1 do not share memory" in str(errors[0]) and "secret" in str(errors[0])
    assert isinstance(errors[1], BackendUnavailableError) and "rank 0 gave up" in str(errors[1])


def test_a_wrong_nonce_is_another_segment():
    (a, info_a), (b, info_b) = new_backend(), new_backend()
    forged = with_field(info_b, "nonce", "0" * 32)
    errors = connect_in_threads([a, b], {0: [info_a, forged], 1: [info_a, info_b]}, 5.0)
    assert isinstance(errors[0], BackendUnavailableError) and "proof" in str(errors[0])


def test_information_of_an_ended_process(workers):
    (worker,) = workers(1)
    stale = worker.make()
    worker.close()
    a, info_a = new_backend()
    start = time.monotonic()
    with pytest.raises(BackendUnavailableError, match="ranks 0 and 1 do not share memory: nothing listens for rank 1"):
        a.connect(0, [info_a, stale], 0, 20.0)
    assert time.monotonic() - start < 2.0


def test_another_host_is_named():
    a, info_a = new_backend()
    b, info_b = new_backend()
    b.close()
    with pytest.raises(BackendUnavailableError, match="different hosts"):
        a.connect(0, [info_a, with_field(info_b, "host", "another")], 0, 5.0)


def test_the_late_and_the_missing():
    (a, info_a), (b, info_b), (c, info_c) = new_backend(), new_backend(), new_backend()
    infos = [info_a, info_b, info_c]
    start = time.monotonic()
    errors = connect_in_threads([a, b], infos, 1.0)  # rank 2 never calls
    assert 0.9 < time.monotonic() - start < 3.0
    for error in errors:
        assert isinstance(error, CommTimeoutError)
        assert error.peer == 2 and "did not come in time: 2;" in str(error) and "EPCOMM_TIMEOUT_S" in str(error)
    with pytest.raises(EpcommError):  # and when it comes at last, nobody is there: at once
        c.connect(2, infos, 0, 20.0)
    assert time.monotonic() - start < 5.0


def test_one_rank_that_fails_ends_all(workers):
    """Rank 1 fails before anybody is connected: the others hear of it without a deadline."""
    (a, info_a), (b, info_b), (c, info_c) = new_backend(), new_backend(), new_backend()
    bad = with_field(info_c, "nonce", "zz")
    start = time.monotonic()
    errors = connect_in_threads([a, b, c], {0: [info_a, info_b, info_c], 1: [info_a, info_b, bad],
                                            2: [info_a, info_b, info_c]}, 20.0)
    assert all(isinstance(error, BackendUnavailableError) for error in errors), errors
    assert time.monotonic() - start < 3.0


def test_a_process_that_dies_while_others_connect(workers):
    ranks = workers(3)
    infos = [worker.make() for worker in ranks]
    for rank in (0, 1):
        ranks[rank].send("b.connect(rank, infos, 0, 20.0)", rank=rank, infos=infos)
    time.sleep(0.3)
    killed = ranks[2].kill()
    for rank in (0, 1):
        answer = ranks[rank].answer()
        assert answer.failure is not None and answer.failure.peer == 2, answer
        assert answer.failure.kind in ("PeerLostError", "BackendUnavailableError")
        assert answer.at - killed < 1.0


def test_many_ranks_connect_on_few_cores(workers):
    ranks = workers(7)
    infos = [worker.make() for worker in ranks]
    connect_all(ranks, infos)
    assert [worker.do("b.peer_state(0)") for worker in ranks] == [0] * 7


def test_connect_is_interrupted_by_ctrl_c(workers):
    ranks = workers(2)
    infos = [worker.make() for worker in ranks]
    ranks[0].send("b.connect(0, infos, 0, 60.0)", infos=infos)
    time.sleep(0.5)
    start = time.monotonic()
    ranks[0].process.send_signal(2)
    answer = ranks[0].answer(5)
    assert answer.failure.kind == "KeyboardInterrupt" and answer.at - start < 0.5


# ---- strangers


def address(info):
    return b"\0epcomm-" + field(info, "socket").encode()


def stranger(info, message=None):
    """A connection to a rank's socket, and what it got: (bytes, number of descriptors)."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    connection.connect(address(info))
    if message is not None:
        connection.send(message)
    return connection


def got(connection):
    try:
        data, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(64 * 4))
    except ConnectionResetError:
        return b"", 0
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
    for descriptor in descriptors:
        os.close(descriptor)
    return data, len(descriptors)


def hello(rank, secret, magic=MAGIC):
    return struct.pack("=8si16s", magic, rank, secret)


def test_a_hostile_connector_gets_no_descriptor_and_does_no_harm():
    (a, info_a), (b, info_b) = new_backend(), new_backend()
    secret = bytes.fromhex(field(info_a, "secret"))
    almost = bytes([secret[0] ^ 1]) + secret[1:]
    messages = [
        None,  # says nothing
        b"x",
        b"x" * 4000,
        hello(1, b"\0" * 16),
        hello(1, almost),
        hello(1, secret, b"epcomm/9"),
        hello(7, secret),
        hello(-1, secret),
        hello(0, secret),
    ]
    strangers = [stranger(info_a, message) for message in messages]
    assert connect_in_threads([a, b], [info_a, info_b]) == [None, None]
    for message, connection in zip(messages, strangers, strict=True):
        _, descriptors = got(connection)
        assert descriptors == 0, message
        connection.close()
    a.signal(1, 4096)
    b.wait(0, 4096, 1, 5.0)
    with pytest.raises(ConnectionRefusedError):  # the door is shut once all are in
        stranger(info_a)


def test_the_right_secret_gets_exactly_one_descriptor():
    """The counterpart of the test above: its stranger would be let in, were the secret right."""
    (a, info_a), (_, info_b) = new_backend(), new_backend()
    secret = bytes.fromhex(field(info_a, "secret"))
    connection = stranger(info_a, hello(1, secret))
    thread = threading.Thread(target=connect_in_threads, args=([a], [info_a, info_b], 1.0))
    thread.start()
    assert got(connection)[1] == 1
    connection.close()
    thread.join(10)


def test_another_user_is_refused(workers):
    need_root()
    (other,) = workers(1)
    other.do("os.setuid(user)", user=NOBODY)
    info_other = other.make()
    # It knows the secret, comes first and is still given nothing; the ranks connect all the same.
    (a, info_a), (b, info_b) = new_backend(), new_backend()
    other.do("names.setdefault('c', __import__('socket').socket(1, 5)).connect(address)", address=address(info_a))
    other.do("c.send(hello)", hello=hello(1, bytes.fromhex(field(info_a, "secret"))))
    assert connect_in_threads([a, b], [info_a, info_b]) == [None, None]
    other.send("(c.settimeout(5), c.recvmsg(100, 100)[:2])[1]")
    answer = other.answer()
    assert answer.value == (b"", []) or answer.failure.kind == "ConnectionResetError", answer
    # And it cannot be a rank.
    a, info_a = new_backend()
    other.send("b.connect(1, infos, 0, 5.0)", infos=[info_a, info_other])
    with pytest.raises(BackendUnavailableError, match="different users"):
        a.connect(0, [info_a, info_other], 0, 5.0)
    assert other.answer().failure.kind == "BackendUnavailableError"


# ---- containers


def test_another_network_namespace_is_named(workers):
    need_unshare("-n")
    (other,) = workers(1, "unshare", "-n")
    a, info_a = new_backend()
    infos = [info_a, other.make()]
    other.send("b.connect(1, infos, 0, 20.0)", infos=infos)
    start = time.monotonic()
    with pytest.raises(BackendUnavailableError) as caught:
        a.connect(0, infos, 0, 20.0)
    failure = other.answer().failure
    assert time.monotonic() - start < 2.0
    assert failure.kind == "BackendUnavailableError"
    for text in (str(caught.value), failure.text):
        assert "ranks 0 and 1 do not share memory" in text and "network namespaces" in text


def test_another_pid_namespace_shares_and_is_watched(workers):
    need_unshare("--pid", "--fork", "--kill-child")
    (other,) = workers(1, "unshare", "--pid", "--fork", "--kill-child")
    a, info_a = new_backend()
    infos = [info_a, other.make()]
    other.send("b.connect(1, infos, 0, 10.0)", infos=infos)
    a.connect(0, infos, 0, 10.0)
    other.value()
    other.do("b.signal(0, 4096)")
    a.wait(1, 4096, 1, 5.0)
    killed = other.kill()
    with pytest.raises(EpcommError, match="rank 1 is lost"):
        a.wait(1, 4096, 2, 20.0)
    assert time.monotonic() - killed < 1.0


def test_different_folders_share_through_the_descriptor(tmp_path):
    """A folder says nothing about sharing: what counts is the descriptor and the proof."""
    backends, infos = [], []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        backend = _shm.Backend({"shm_dir": str(tmp_path / name)})
        backend.alloc_heap(HEAP_BYTES)
        backends.append(backend)
        infos.append(backend.export_info())
    assert connect_in_threads(backends, infos) == [None, None]
    ctypes.memset(backends[0].peer_ptr(1, 9000), 3, 1)
    assert ctypes.string_at(backends[1].peer_ptr(1, 9000), 1) == b"\3"
    assert [list((tmp_path / name).iterdir()) for name in ("a", "b")] == [[], []]
