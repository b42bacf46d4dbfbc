"""Runs inside the machine: starts processes on nodes for the test session outside. See `frames.py`."""

import json
import os
import socket
import subprocess
import threading
import time

from frames import BEAT, CLOCK, DATA, EXIT, SIGNAL, SPAWN, Channel, Pipe


class Child:
    """A process; ``{fd}`` in its arguments is the number of its end of the connection."""

    def __init__(self, channel, stream, told):
        self._pipe = None
        pass_fds = ()
        if told["connected"]:
            here, there = socket.socketpair()
            pass_fds = (there.fileno(),)
            told["argv"] = [word.replace("{fd}", str(there.fileno())) for word in told["argv"]]
        node = [] if told["node"] is None else [f"node{told['node']}"]
        with open(told["stdout"] or os.devnull, "ab") as out, open(told["stderr"] or os.devnull, "ab") as err:
            self._process = subprocess.Popen([*node, *told["argv"]], env={**os.environ, **told["env"]}, cwd=told["cwd"],
                                             stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=pass_fds,
                                             start_new_session=True)  # fmt: skip
        if told["connected"]:
            there.close()
            self._pipe = Pipe(here, channel, stream)
        threading.Thread(target=self._reap, args=(channel, stream), daemon=True).start()
        self.pid = self._process.pid

    def _reap(self, channel, stream):
        code = self._process.wait()
        if self._pipe:  # its last words first; but what it forked may hold the connection on
            self._pipe.drained.wait(1.0)
        channel.send(stream, EXIT, code)

    def take(self, kind, data):
        """A frame for it."""
        if kind == SIGNAL:
            self._process.send_signal(int(data))
        elif self._pipe:
            self._pipe.put(data if kind == DATA else b"")


def main():
    port = os.open(os.environ["RXE_AGENT"], os.O_RDWR)
    channel, children = Channel(port, port), {}
    while (frame := channel.receive()) is not None:
        stream, kind, data = frame
        if kind == SPAWN:
            try:
                children[stream] = Child(channel, stream, json.loads(data))
                channel.send(stream, SPAWN, {"pid": children[stream].pid})
            except OSError as error:
                channel.send(stream, SPAWN, {"error": str(error)})
        elif kind == CLOCK:
            channel.send(stream, CLOCK, time.monotonic())
        elif kind == BEAT:
            channel.send(stream, BEAT)
        elif stream in children:
            children[stream].take(kind, data)
            if kind == SIGNAL:
                channel.send(stream, SIGNAL, time.monotonic())


if __name__ == "__main__":
    main()
