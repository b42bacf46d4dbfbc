"""Frames over a TCP connection: a fixed header, then at most as many bytes as the phase allows.

Nothing is allocated on the word of a header: memory grows with the bytes that really came. Sockets do not block;
whoever waits polls with a short tick, so that signals and deadlines are seen.
"""

import contextlib
import enum
import json
import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from epcomm._bootstrap.deadline import TICK_S

VERSION = 1  # of the protocol; the header's layout is the same in every version
HEADER = struct.Struct("!2sBBQ")  # magic, version, kind, payload bytes
MAGIC = b"eP"

_READ_BYTES = 1 << 18
_READS_PER_CALL = 16  # then others get their turn
_MAX_INBOX = 4  # frames held for a consumer that is behind
SMALL_BYTES = 4096  # all that an unproven peer may send in one frame
TEXT_BYTES = 1 << 16


class Kind(enum.IntEnum):
    """Kinds of frames, in the order of a connection's life."""

    HELLO = 1
    PROOF = 2
    JOIN = 3
    ANSWER = 4
    START = 5
    DATA = 6
    RESULT = 7
    ABORT = 8
    BYE = 9


class Frame(NamedTuple):
    """One frame that came."""

    kind: int
    payload: bytes


class ProtocolError(Exception):
    """What came is not what the protocol allows here."""


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def encode(kind: int, payload: bytes | bytearray = b"", version: int = VERSION) -> bytes:
    """A whole frame."""
    return HEADER.pack(MAGIC, version, kind, len(payload)) + payload


def encode_json(kind: int, fields: dict[str, Any]) -> bytes:
    """A whole frame whose payload is JSON."""
    return encode(kind, json.dumps(fields).encode())


def decode_json(payload: bytes) -> dict[str, Any]:
    """The JSON object of a payload; anything else is a :class:`ProtocolError`."""
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError("a frame is not JSON") from None
    if not isinstance(fields, dict):
        raise ProtocolError("a frame is not a JSON object")
    return fields


class Connection:
    """A socket that sends and receives frames without blocking.

    Parameters
    ----------
    sock : socket.socket
        Connected; owned from here on.
    label : str
        The other end in words, for errors.
    limits : dict
        Longest payload of each kind of frame that may come now; change it as the phase changes.

    Attributes
    ----------
    inbox : collections.deque
        Frames that came and were not consumed.
    lost : str or None
        Why nothing more can come.
    foreign_version : int or None
        Set when the other end speaks another version.
    send_failed : bool
        Whether something queued can no longer be sent.
    """

    def __init__(self, sock: socket.socket, label: str, limits: dict[int, int]) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # not TCP: a socket pair
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanishes sends no end of stream; probes notice it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._sock = sock
        self.label = label
        self.limits = limits
        self.inbox: deque[Frame] = deque()
        self.lost: str | None = None
        self.foreign_version: int | None = None
        self.send_failed = False
        self._in = bytearray()
        self._need = HEADER.size
        self._kind: int | None = None  # of the frame whose payload is coming
        self._out: deque[memoryview] = deque()

    def fileno(self) -> int:
        """File descriptor, for polling."""
        return self._sock.fileno()

    def _recv(self, size_bytes: int) -> bytes:
        return self._sock.recv(size_bytes)

    def _send(self, data: memoryview) -> int:
        return self._sock.send(data, socket.MSG_NOSIGNAL)

    def receive(self) -> None:
        """Read what has come, up to some frames; sets :attr:`lost` at the end of the stream."""
        for _ in range(_READS_PER_CALL):
            if self.lost is not None or len(self.inbox) >= _MAX_INBOX:
                return
            try:
                data = self._recv(min(_READ_BYTES, self._need - len(self._in)))
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.lost = f"the connection ended: {os.strerror(error.errno or 0)}"
                return
            if not data:
                self.lost = "the connection ended"
                return
            self._in += data
            if len(self._in) == self._need:
                self._take()

    def _take(self) -> None:
        """A header or a payload is complete."""
        if self._kind is None:
            magic, version, kind, size_bytes = HEADER.unpack(self._in)
            self._in.clear()
            if magic != MAGIC:
                self.lost = "it does not speak epcomm's rendezvous"
            elif version != VERSION:
                self.foreign_version = version
                self.lost = f"it speaks version {version} of the rendezvous, not {VERSION}"
            elif kind not in self.limits:
                self.lost = f"it sent a frame of kind {kind}, which is not allowed here"
            elif size_bytes > self.limits[kind]:
                self.lost = f"it sent a frame of {size_bytes} bytes, {self.limits[kind]} are allowed"
            elif size_bytes:
                self._kind, self._need = kind, size_bytes
            else:
                self.inbox.append(Frame(kind, b""))
            return
        self.inbox.append(Frame(self._kind, bytes(self._in)))
        self._in = bytearray()
        self._kind, self._need = None, HEADER.size

    def queue(self, data: bytes) -> None:
        """Append a whole frame to what is to be sent; :meth:`flush` sends it."""
        self._out.append(memoryview(data))

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._out:
            try:
                sent = self._send(self._out[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # The reading side will tell why, after what the other end said last.
                self.send_failed = True
                self._out.clear()
                return
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    @property
    def unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    def events(self) -> int:
        """What to poll for."""
        if self.lost is not None:
            return 0
        reading = select.POLLIN if len(self.inbox) < _MAX_INBOX else 0
        return reading | (select.POLLOUT if self._out else 0)

    def end_sending(self) -> None:
        """Tell the other end that nothing more comes; what it sends is thrown away from now on."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def discard(self) -> bool:
        """Throw away what has come; whether the stream has ended."""
        for _ in range(_READS_PER_CALL):
            try:
                if not self._sock.recv(_READ_BYTES):
                    return True
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                return True
        return False

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._out.clear()
        self.lost = self.lost or "closed here"
        self._sock.close()


def pump(connections: Iterable[Connection], timeout_s: float, extra: Iterable[_HasFileno] = ()) -> list[int]:
    """Send and receive on all connections once, waiting at most ``timeout_s`` for something to do.

    Returns
    -------
    list of int
        File descriptors of ``extra`` that are readable.
    """
    poller = select.poll()
    by_fd: dict[int, Connection] = {}
    for connection in connections:
        events = connection.events()
        if events:
            by_fd[connection.fileno()] = connection
            poller.register(connection.fileno(), events)
    for item in extra:
        poller.register(item.fileno(), select.POLLIN)
    readable = []
    for fd, events in poller.poll(math.ceil(max(0.0, timeout_s) * 1000)):
        if fd not in by_fd:
            readable.append(fd)
            continue
        if events & select.POLLOUT:
            by_fd[fd].flush()
        if events & ~select.POLLOUT:
            by_fd[fd].receive()
    return readable


def send_all(connections: Iterable[Connection], timeout_s: float) -> None:
    """Best effort to send what is queued, for at most ``timeout_s``; reads nothing."""
    end = time.monotonic() + timeout_s
    pending = list(connections)
    while True:
        for connection in pending:
            connection.flush()
        pending = [connection for connection in pending if connection.unsent]
        left = end - time.monotonic()
        if not pending or left <= 0:
            return
        _poll(pending, select.POLLOUT, min(left, TICK_S))


def close_politely(connections: Iterable[Connection], timeout_s: float) -> None:
    """Send what is queued, wait a little until the other ends have read it, then close.

    Closing a socket with unread input resets the connection, and the reset can overtake the last words sent.
    """
    end = time.monotonic() + timeout_s
    every = list(connections)
    try:
        send_all(every, timeout_s)
        for connection in every:
            connection.end_sending()
        open_ends = every
        while open_ends and (left := end - time.monotonic()) > 0:
            _poll(open_ends, select.POLLIN, min(left, TICK_S))
            open_ends = [connection for connection in open_ends if not connection.discard()]
    finally:
        for connection in every:
            connection.close()


def _poll(connections: Iterable[Connection], events: int, timeout_s: float) -> None:
    poller = select.poll()
    for connection in connections:
        poller.register(connection.fileno(), events)
    poller.poll(math.ceil(timeout_s * 1000))
