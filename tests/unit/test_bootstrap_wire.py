"""The rendezvous on the wire: any split of frames, signals, strangers, keys. Ranks are threads or small processes."""

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import struct
import threading
import time
import tracemalloc

import pytest
from helpers import meeting
from helpers.meeting import Task, join, loopback, ranks

from epcomm import CommTimeoutError, InvalidArgumentError
from epcomm._bootstrap import address, frames, handshake
from epcomm._bootstrap.address import Place
from epcomm._bootstrap.deadline import Deadline
from epcomm._bootstrap.frames import HEADER, MAGIC, VERSION, Connection, Kind, encode, encode_json

pytestmark = pytest.mark.timeout(60)
EXPECTED = [b"", b"x" * 1000, b"xx" * 1000]


def exchange(group):
    return group.all_gather(b"x" * group.rank * 1000)


def dial(place, timeout_s=5.0):
    """A plain blocking socket to a listener that may not be up yet."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection(place, timeout=timeout_s)
            if sock.getsockname() != sock.getpeername():
                return sock
            sock.close()
        except OSError:
            assert time.monotonic() < end
        time.sleep(0.005)


def read_to_end(sock):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(4096):
            data += chunk
    return data


# ------------------------------------------------------------------------------------------------- splits, signals


@pytest.mark.parametrize("key", [None, b"key"])
def test_one_to_three_bytes_per_read_and_write(monkeypatch, key):
    rng = random.Random(7)
    monkeypatch.setattr(Connection, "_recv", lambda self, size: self._sock.recv(min(size, rng.randint(1, 3))))
    monkeypatch.setattr(Connection, "_send", lambda self, data: self._sock.send(data[: rng.randint(1, 3)]))
    assert ranks(3, exchange, keys=key, timeout_s=30) == [EXPECTED] * 3


def test_every_wait_survives_signals():
    """A handler runs every few milliseconds in the thread that waits."""
    runs = []
    before = signal.signal(signal.SIGUSR1, lambda *_: runs.append(1))
    stop = threading.Event()
    main = threading.main_thread().ident

    def pester():
        while not stop.wait(0.003):
            signal.pthread_kill(main, signal.SIGUSR1)

    pestering = Task(pester)
    try:
        for main_rank in (0, 1):
            place = loopback()

            def slow(rank, place=place):
                time.sleep(0.3)
                with join(rank, 3, place) as group:
                    time.sleep(0.3)
                    return exchange(group)

            others = [Task(slow, rank) for rank in range(3) if rank != main_rank]
            with join(main_rank, 3, place) as group:
                assert exchange(group) == EXPECTED
            assert [task.result() for task in others] == [EXPECTED] * 2
    finally:
        stop.set()
        pestering.result()
        signal.signal(signal.SIGUSR1, before)
    assert len(runs) > 50


# ------------------------------------------------------------------------------------------------------- strangers

GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "random": random.Random(3).randbytes(5000),
    "half a header": MAGIC + bytes([VERSION]),
    "over-long hello": HEADER.pack(MAGIC, VERSION, Kind.HELLO, 1 << 40) + bytes(5000),
    "short hello": encode(Kind.HELLO, b"\0"),
    "data first": encode(Kind.DATA, b"early"),
    "half a hello": encode(Kind.HELLO, bytes(33))[:-4],
}


@pytest.mark.parametrize("key", [None, b"key"])
def test_strangers_and_silent_clients_block_nobody(key):
    place = loopback()
    hosting = Task(lambda: _and_close(join(0, 3, place, key), exchange))
    with contextlib.ExitStack() as strangers:
        for data in GARBAGE.values():
            stays, leaves = strangers.enter_context(dial(place)), dial(place)
            stays.sendall(data)
            leaves.sendall(data)
            leaves.close()
        start = time.monotonic()
        others = [Task(lambda rank=rank: _and_close(join(rank, 3, place, key), exchange)) for rank in (1, 2)]
        assert [task.result() for task in (hosting, *others)] == [EXPECTED] * 3
        assert time.monotonic() - start < 3


def _and_close(group, body):
    with group:
        return body(group)


def test_a_flood_of_silent_clients_delays_but_does_not_block(monkeypatch):
    monkeypatch.setattr(handshake_owner(), "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(handshake_owner(), "_MAX_STRANGERS", 8)
    place = loopback()
    hosting = Task(lambda: _and_close(join(0, 2, place), exchange))
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            strangers.enter_context(dial(place))
        other = Task(lambda: _and_close(join(1, 2, place), exchange))
        assert [task.result() for task in (hosting, other)] == [EXPECTED[:2]] * 2


def handshake_owner():
    from epcomm._bootstrap import rendezvous

    return rendezvous


def test_an_over_long_frame_is_refused_before_memory_is_had():
    ours, theirs = socket.socketpair()
    connection = Connection(ours, "peer", {Kind.JOIN: 100})
    tracemalloc.start()
    theirs.sendall(HEADER.pack(MAGIC, VERSION, Kind.JOIN, 1 << 62) + bytes(1000))
    connection.receive()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert connection.lost == f"it sent a frame of {1 << 62} bytes, 100 are allowed"
    assert not connection.inbox and peak < 100_000
    connection.close()
    theirs.close()


def test_a_frame_that_is_allowed_takes_memory_only_as_it_comes():
    ours, theirs = socket.socketpair()
    connection = Connection(ours, "peer", {Kind.RESULT: 1 << 40})
    tracemalloc.start()
    theirs.sendall(HEADER.pack(MAGIC, VERSION, Kind.RESULT, 1 << 39) + bytes(1000))
    connection.receive()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert connection.lost is None and peak < 2_000_000
    connection.close()
    theirs.close()


@pytest.mark.parametrize("size", [0, 1, 100])
def test_frames_at_the_limit_pass(size):
    ours, theirs = socket.socketpair()
    connection = Connection(ours, "peer", {Kind.JOIN: 100})
    theirs.sendall(encode(Kind.JOIN, b"j" * size) * 2)
    connection.receive()
    assert list(connection.inbox) == [(Kind.JOIN, b"j" * size)] * 2
    theirs.close()
    connection.receive()
    assert connection.lost == "the connection ended"
    connection.close()


REQUESTS = {
    "no JSON": b"{",
    "no object": b"[1, 2]",
    "deep": b"[" * 4000,
    "no rank": json.dumps({"number": 1, "num_ranks": 2}).encode(),
    "a bool": json.dumps({"number": 1, "rank": True, "num_ranks": 2, "pid": 1, "remaining_s": 1, "limit": ""}).encode(),
    "a float": json.dumps({"number": 1, "rank": 1.0, "num_ranks": 2, "pid": 1, "remaining_s": 1, "limit": ""}).encode(),
    "negative": json.dumps({"number": 1, "rank": -1, "num_ranks": 2, "pid": 1, "remaining_s": 1, "limit": ""}).encode(),
    "NaN": b'{"number": 1, "rank": 1, "num_ranks": 2, "pid": 1, "remaining_s": NaN, "limit": ""}',
    "huge": b'{"number": 1, "rank": 1, "num_ranks": 2, "pid": 1, "remaining_s": 1e999, "limit": ""}',
    "no UTF-8": b'{"limit": "\xff"}',
}


def test_malformed_requests_are_dropped_and_the_job_goes_on():
    place = loopback()
    hosting = Task(lambda: _and_close(join(0, 2, place), exchange))
    for payload in REQUESTS.values():
        with dial(place) as sock:
            sock.sendall(encode(Kind.HELLO, struct.pack("!B32s", 0, bytes(32))))
            sock.recv(HEADER.size + 33, socket.MSG_WAITALL)
            sock.sendall(encode(Kind.JOIN, payload))
            assert read_to_end(sock) == b""
    other = Task(lambda: _and_close(join(1, 2, place), exchange))
    assert [task.result() for task in (hosting, other)] == [EXPECTED[:2]] * 2


def test_another_service_at_the_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def chatter():
            end = time.monotonic() + 1.2
            while time.monotonic() < end:
                with contextlib.suppress(OSError):
                    sock, _ = server.accept()
                    sock.sendall(b"220 mail ready, nice to meet you\r\n")
                    sock.close()

        talking = Task(chatter)
        error = Task(join, 1, 2, Place(*server.getsockname()), None, 1.0).result()
        assert isinstance(error, CommTimeoutError) and "does not speak epcomm's rendezvous" in str(error)
        talking.result()


def test_what_the_deadline_cuts_short_hides_no_reason():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def chatter():
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"220 mail ready, nice to meet you\r\n")
                read_to_end(sock)
            silent, _ = server.accept()
            with silent:
                read_to_end(silent)

        talking = Task(chatter)
        error = Task(join, 1, 2, Place(*server.getsockname()), None, 1.0).result()
        assert isinstance(error, CommTimeoutError) and "does not speak epcomm's rendezvous" in str(error)
        talking.result()


def test_meeting_itself_is_not_taken_for_rank_0(monkeypatch):
    """A free port of the ephemeral range can become our own end: TCP then connects to itself."""
    place = loopback()
    real = socket.socket

    def bound(*args, **kwargs):
        sock = real(*args, **kwargs)
        sock.bind(place)
        return sock

    monkeypatch.setattr(address.socket, "socket", bound)
    with pytest.raises(ConnectionRefusedError):
        address.dial(address.Address(socket.AF_INET, tuple(place)), Deadline(2))


# ------------------------------------------------------------------------------------------------------------ keys


def test_a_wrong_key_is_an_error_on_both_sides_and_right_ranks_still_meet():
    place = loopback()
    hosting = Task(lambda: _and_close(join(0, 2, place, b"right"), exchange))
    wrong = Task(join, 1, 2, place, b"wrong", 10).result()
    assert isinstance(wrong, InvalidArgumentError)
    assert str(wrong) == ("EPCOMM_AUTHKEY: rank 0 has another key; export the same EPCOMM_AUTHKEY on every rank")
    assert hosting.running
    handshake_owner()  # number 2 of rank 1 would be ahead, so the right one comes from another process
    with meeting.process(
        "import sys\n"
        "from epcomm import bootstrap\n"
        "with bootstrap.connect(timeout_s=10) as group:\n"
        "    print(len(group.all_gather(b'x' * 1000)[1]), group.kind)\n",
        RANK=1, WORLD_SIZE=2, MASTER_PORT=place.port, EPCOMM_AUTHKEY="right",
    ) as child:
        output, _ = child.communicate(timeout=20)
    assert output == "1000 rendezvous\n" and hosting.result() == EXPECTED[:2]


def test_rank_0_tells_of_wrong_keys_when_its_deadline_passes():
    results = ranks(2, exchange, keys={0: b"right", 1: b"wrong"}, timeout_s=0.6)
    assert isinstance(results[1], InvalidArgumentError) and "EPCOMM_AUTHKEY" in str(results[1])
    assert isinstance(results[0], CommTimeoutError)
    assert "rank 1 of 2 is missing" in str(results[0]) and "it has another key (EPCOMM_AUTHKEY)" in str(results[0])


@pytest.mark.parametrize(
    ("keys", "client_says", "host_says"),
    [
        ({0: b"key"}, "has a key, this rank has none", "it has no key and rank 0 has one"),
        ({1: b"key"}, "has none, this rank has a key", "it has a key and rank 0 has none"),
    ],
)
def test_a_key_on_some_ranks_only_is_a_clear_error(keys, client_says, host_says):
    results = ranks(2, exchange, keys=keys, timeout_s=0.6)
    assert isinstance(results[1], InvalidArgumentError)
    assert client_says in str(results[1]) and "export the same EPCOMM_AUTHKEY on every rank" in str(results[1])
    assert isinstance(results[0], CommTimeoutError) and host_says in str(results[0])


class Impostor:
    """Listens in place of rank 0 and answers the first client by a script."""

    def __init__(self, script):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.place = Place(*self._server.getsockname())
        self._task = Task(self._run, script)

    def _run(self, script):
        sock, _ = self._server.accept()
        with sock:
            sock.settimeout(5)
            return script(sock)

    def heard(self):
        """What the script returned."""
        outcome = self._task.result()
        self._server.close()
        return outcome


def _frame(sock):
    head = sock.recv(HEADER.size, socket.MSG_WAITALL)
    return HEADER.unpack(head)[2], sock.recv(HEADER.unpack(head)[3], socket.MSG_WAITALL)


def test_a_reflected_proof_is_refused():
    """The impostor has no key and sends back the client's own nonce and proof."""

    def script(sock):
        kind, hello = _frame(sock)
        sock.sendall(encode(kind, hello))
        kind, proof = _frame(sock)
        sock.sendall(encode(kind, proof))
        return read_to_end(sock)

    impostor = Impostor(script)
    error = Task(join, 1, 2, impostor.place, b"key", 5).result()
    assert isinstance(error, InvalidArgumentError) and "another key" in str(error)
    assert impostor.heard() == b""  # nothing of the job was told


@pytest.mark.parametrize("answer", ["welcome", "later"])
@pytest.mark.parametrize("after_hello", [False, True])
def test_an_answer_without_proof_is_not_believed(answer, after_hello):
    def script(sock):
        _frame(sock)
        if after_hello:
            sock.sendall(encode(Kind.HELLO, struct.pack("!B32s", 1, secrets.token_bytes(32))))
            _frame(sock)
        sock.sendall(encode_json(Kind.ANSWER, {"answer": answer, "text": ""}) + encode(Kind.START))
        return read_to_end(sock)

    impostor = Impostor(script)
    error = Task(join, 1, 2, impostor.place, b"key", 0.6).result()
    assert isinstance(error, CommTimeoutError)
    assert impostor.heard() == b""


def test_a_replayed_proof_is_refused():
    """A recorded conversation does not open a second one: rank 0's nonce is new."""
    place = loopback()
    hosting = Task(lambda: _and_close(join(0, 2, place, b"key"), exchange))
    nonce = bytes(32)
    old = handshake._proof(b"key", b"client", nonce, secrets.token_bytes(32))
    with dial(place) as sock:
        sock.sendall(encode(Kind.HELLO, struct.pack("!B32s", 1, nonce)))
        _frame(sock)
        sock.sendall(encode(Kind.PROOF, old))
        kind, answer = _frame(sock)
        assert kind == Kind.ANSWER and json.loads(answer)["answer"] == "refused"
    other = Task(lambda: _and_close(join(1, 2, place, b"key"), exchange))
    assert [task.result() for task in (hosting, other)] == [EXPECTED[:2]] * 2


def test_no_key_no_listener_beyond_this_host():
    place = Place("192.0.2.7", 29500)
    for rank in (0, 1):
        start = time.monotonic()
        with pytest.raises(InvalidArgumentError) as caught:
            join(rank, 2, place, None, 10)
        assert "MASTER_ADDR=192.0.2.7" in str(caught.value) and "export EPCOMM_AUTHKEY=" in str(caught.value)
        assert "\n" not in str(caught.value) and time.monotonic() - start < 5


def test_with_a_key_all_interfaces_will_do():
    place = Place("0.0.0.0", loopback().port)
    results = ranks(3, exchange, place=place, keys=b"key")
    assert results == [EXPECTED] * 3


def test_an_address_of_another_host_falls_back_to_all_interfaces_with_a_key():
    """Rank 0 behind a NAT or a service name cannot bind the address that others use."""
    port = loopback().port
    listener, where = address.listen(Place("192.0.2.7", port), b"key", Deadline(5))
    with listener:
        assert where.sockaddr[0] == "0.0.0.0" and listener.getsockname()[1] == port


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True),
                                                ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("0.0.0.0", False),
                                                ("::", False), ("fe80::1", False)])
def test_what_counts_as_loopback(host, loopback):
    assert address.Address(0, (host, 1)).loopback is loopback


def test_ipv6_works_where_the_host_has_it():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    assert ranks(2, exchange, place=Place("::1", port)) == [EXPECTED[:2]] * 2


def test_the_job_key(monkeypatch):
    monkeypatch.delenv("EPCOMM_AUTHKEY", raising=False)
    assert handshake.job_key() is None
    monkeypatch.setenv("EPCOMM_AUTHKEY", "hush")
    assert handshake.job_key() == b"hush"


def test_proofs_differ_by_role_key_and_nonces():
    first, second = b"a" * 32, b"b" * 32
    proofs = {
        handshake._proof(key, role, *nonces)
        for key in (b"k", b"l")
        for role in (b"client", b"rank 0")
        for nonces in ((first, second), (second, first))
    }
    assert len(proofs) == 8


def test_errors_keep_type_text_and_peer_across_the_wire():
    error = CommTimeoutError("late")
    error.peer = 3
    back = handshake.error_from(frames.decode_json(json.dumps(handshake.error_fields(error)).encode()))
    assert (type(back), str(back), back.peer) == (CommTimeoutError, "late", 3)
    with pytest.raises(frames.ProtocolError):
        handshake.error_from({"code": "1", "text": "no number"})


def test_nothing_is_unpickled():
    folder = os.path.dirname(frames.__file__)
    for name in os.listdir(folder):
        if name.endswith(".py"):
            with open(os.path.join(folder, name)) as file:
                text = file.read()
            assert "import pickle" not in text and "all_gather_object" not in text and "marshal" not in text
