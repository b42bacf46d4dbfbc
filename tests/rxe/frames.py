"""What the test session and the agent in the machine say to each other: frames of many streams on one channel.

A stream is a process inside. Kinds: SPAWN (JSON) starts it; DATA and END carry its connection, both ways; SIGNAL (a
number) is answered when it was sent; EXIT (a number) is the end. CLOCK is answered with the machine's monotonic clock,
BEAT with itself.
Standard library only: the agent starts on an emulated processor.
"""

import contextlib
import json
import os
import queue
import struct
import threading

SPAWN, DATA, END, SIGNAL, EXIT, CLOCK, BEAT = range(7)
_HEADER = struct.Struct("<IBI")


class Channel:
    """Frames over two files or one socket's descriptors."""

    def __init__(self, read_fd, write_fd):
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._writing = threading.Lock()

    def send(self, stream, kind, data=b""):
        """Send a frame; any thread. What is no bytes goes as JSON."""
        if not isinstance(data, bytes):
            data = json.dumps(data).encode()
        view = memoryview(_HEADER.pack(stream, kind, len(data)) + data)
        with self._writing:
            while view:
                view = view[os.write(self._write_fd, view) :]

    def receive(self):
        """(stream, kind, bytes), or None at the end."""
        head = self._exactly(_HEADER.size)
        if head is None:
            return None
        stream, kind, size = _HEADER.unpack(head)
        data = self._exactly(size)
        return None if data is None else (stream, kind, data)

    def _exactly(self, size):
        parts = bytearray()
        while len(parts) < size:
            try:
                part = os.read(self._read_fd, min(size - len(parts), 1 << 18))
            except OSError:
                part = b""
            if not part:
                return None
            parts += part
        return bytes(parts)


class Pipe:
    """Moves what comes from a socket into frames, and frames into the socket; a slow reader blocks nobody else."""

    def __init__(self, socket, channel, stream):
        self._socket = socket
        self._channel = channel
        self._stream = stream
        self._queue = queue.SimpleQueue()
        self.drained = threading.Event()
        for body in (self._out, self._in):
            threading.Thread(target=body, daemon=True).start()

    def put(self, data):
        """Bytes for the socket; none ends it."""
        self._queue.put(data)

    def _out(self):
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 18):
                self._channel.send(self._stream, DATA, data)
        self.drained.set()
        with contextlib.suppress(OSError):
            self._channel.send(self._stream, END)

    def _in(self):
        with contextlib.suppress(OSError):
            while data := self._queue.get():
                self._socket.sendall(data)
            self._socket.shutdown(1)

    def close(self):
        """End both directions."""
        self.put(b"")
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)
        self._socket.close()
