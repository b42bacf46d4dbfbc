"""Nodes of a virtual machine as a place for ranks: what `helpers.pool` and `helpers.job` start runs in there."""

import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine
import selection
from frames import BEAT, CLOCK, DATA, END, EXIT, SIGNAL, SPAWN, Channel, Pipe
from helpers.pool import Ranks

HERE = Path(__file__).resolve().parent
NODES = 4
SLOWNESS = 5.0  # how much longer things may take on emulated processors
COMMAND_S = 30.0
BEAT_S = 2.0
FIRST_ADDRESS = "10.77.0.1"


class RemoteProcess:
    """A process inside, with what `multiprocessing.Process` and `subprocess.Popen` have in common and apart.

    Attributes
    ----------
    pid : int
        Inside.
    conn : multiprocessing.connection.Connection or None
    sentinel : int
        Readable once it has ended.
    """

    def __init__(self, place, stream, node):
        self._place = place
        self._stream = stream
        self.node = node
        self.pid = self.exitcode = None
        self.sentinel, self._ended = os.pipe()
        self._exited = threading.Event()
        self.answers = queue.SimpleQueue()
        self.conn = self.pipe = None

    def connect(self):
        """Make :attr:`conn`."""
        ours, theirs = socket.socketpair()
        self.conn = multiprocessing.connection.Connection(ours.detach())
        self.pipe = Pipe(theirs, self._place.channel, self._stream)

    def ended(self, code):
        """Told by the place."""
        self.exitcode = code
        if self.pipe:
            self.pipe.put(b"")
        os.close(self._ended)
        self._exited.set()

    @property
    def returncode(self):
        return self.exitcode

    def is_alive(self):
        return not self._exited.is_set()

    def poll(self):
        return self.exitcode

    def join(self, timeout=None):
        self._exited.wait(timeout)

    def wait(self, timeout=None):
        if not self._exited.wait(timeout and timeout * self._place.slowness):
            raise subprocess.TimeoutExpired(f"process {self.pid} inside", timeout)
        return self.exitcode

    def send_signal(self, number):
        """Returns after it was sent; when, on this side's clock."""
        if self.is_alive() and self._place.alive:
            self._place.channel.send(self._stream, SIGNAL, str(int(number)).encode())
            return float(self.answers.get(timeout=COMMAND_S)) - self._place.clock_offset_s
        return time.monotonic()

    def kill(self):
        if self.sentinel is not None:
            self.send_signal(signal.SIGKILL)

    def close(self):
        if self.sentinel is not None:
            os.close(self.sentinel)
            self.sentinel = None


class NodesPlace:
    """A machine with nodes, started at the first use and again if it died.

    Parameters
    ----------
    nodes : int
        Rank r of a pool runs on node r % (the pool's nodes, at most these).
    backends_of_one_node : set of str
        Their ranks all run on node 0.
    """

    sizes = (Ranks(2, 2), Ranks(3, 3), Ranks(4, 4), Ranks(4, 2))
    probes_here = False

    def __init__(self, nodes=NODES, backends_of_one_node=("shm",), say=lambda text: None):
        self.nodes = nodes
        self._one_node = frozenset(backends_of_one_node)
        self._say = say
        self._folder = tempfile.TemporaryDirectory(prefix="epcomm-rxe-out-")
        self._machine = None
        self._streams = itertools.count(1)
        self._still = threading.Event()
        self._beats = threading.Thread()  # of a machine, once there is one
        self._ports = itertools.count(20000)
        self._starting = threading.Lock()
        self._tries = 3
        self.clock_offset_s = 0.0  # inside = outside + offset
        self.slowness = SLOWNESS

    # ------------------------------------------------------------------------------------- the machine

    @property
    def alive(self):
        """Whether a machine runs."""
        return self._machine is not None and self._machine.alive

    def machine(self):
        """The running machine."""
        with self._starting:
            if self.alive:
                return self._machine
            if self._machine is not None:
                self._end_machine()
            if self._tries == 0:
                raise machine.MachineError("machines died; no other one is started")
            self._tries -= 1
            self._log = open(Path(self._folder.name) / "agent", "ab")  # noqa: SIM115
            self._machine = machine.Machine(
                [sys.executable, "-S", str(HERE / "agent.py")], self.nodes, self._folder.name, agent=True,
                put_out=self._write, put_err=self._write, say=self._say,
            )  # fmt: skip
            if self._machine.accelerator == "kvm":
                self.slowness = 1.0
            agent = self._machine.agent.fileno()
            self.channel = Channel(agent, agent)
            self._processes = {}
            self._clock = queue.SimpleQueue()
            threading.Thread(target=self._listen, daemon=True).start()
            self._still.clear()
            self._beats = threading.Thread(target=self._beat, daemon=True)
            self._beats.start()
            best = float("inf")
            for _ in range(5):
                before = time.monotonic()
                self.channel.send(0, CLOCK)
                inside = float(self._clock.get(timeout=machine.START_S))
                after = time.monotonic()
                if after - before < best:
                    best, self.clock_offset_s = after - before, inside - (before + after) / 2
            return self._machine

    def last_words(self):
        """What the machine itself said, for whoever looks into a failure."""
        return self._machine.last_words() if self._machine is not None else ""

    def _write(self, data):
        self._log.write(data)
        self._log.flush()

    def _beat(self):
        """An emulated port may lose the notice that bytes came; those that come next, either way, bring them too."""
        with contextlib.suppress(OSError):
            while not self._still.wait(BEAT_S):
                self.channel.send(0, BEAT)

    def _end_machine(self):
        self._still.set()
        self._beats.join(5)  # before its descriptor may become another file's
        self._machine.close()

    def _listen(self):
        channel, processes = self.channel, self._processes
        while (frame := channel.receive()) is not None:
            stream, kind, data = frame
            process = processes.get(stream)
            if kind == CLOCK:
                self._clock.put(data)
            elif process is None:
                continue
            elif kind in (SPAWN, SIGNAL):
                process.answers.put(data)
            elif kind == EXIT:
                process.ended(int(data))
                del processes[stream]
            elif kind in (DATA, END) and process.pipe:
                process.pipe.put(data)
        for process in list(processes.values()):  # the machine is gone
            process.ended(-signal.SIGKILL)

    def close(self):
        """End the machine."""
        if self._machine is not None:
            self._end_machine()
            self._log.close()
        self._folder.cleanup()

    # ---------------------------------------------------------------------------------------- processes

    def spawn(self, node, argv, env=None, stdout=None, stderr=None, cwd="/", connected=False):
        """Start a process on a node, or beside the nodes if that is None; ``{fd}`` is its end of ``conn``."""
        self.machine()
        process = RemoteProcess(self, next(self._streams), node)
        if connected:
            process.connect()
        self._processes[process._stream] = process
        told = {"node": node, "argv": [str(word) for word in argv], "env": env or {}, "stdout": stdout and str(stdout),
                "stderr": stderr and str(stderr), "cwd": str(cwd), "connected": connected}  # fmt: skip
        self.channel.send(process._stream, SPAWN, told)
        answer = json.loads(process.answers.get(timeout=COMMAND_S * self.slowness))
        if "error" in answer:
            raise OSError(f"{argv[0]} inside: {answer['error']}")
        process.pid = answer["pid"]
        return process

    def run(self, node, *argv, timeout_s=COMMAND_S, check=True, env=None):
        """(exit code, output and errors) of a command on a node."""
        with tempfile.NamedTemporaryFile(dir=self._folder.name) as out:
            process = self.spawn(node, argv, env, out.name, out.name)
            process.join(timeout_s * self.slowness)
            if process.is_alive():
                process.kill()
                raise AssertionError(f"{' '.join(argv)} on node {node} did not end: {Path(out.name).read_text()}")
            process.close()
            said = Path(out.name).read_text(errors="replace")
        if check and process.exitcode:
            raise AssertionError(f"{' '.join(argv)} on node {node}: status {process.exitcode}: {said}")
        return process.exitcode, said

    # ------------------------------------------------------------ what helpers.pool.LocalPlace has too

    def free_port(self):
        """A port that nobody in the machine uses."""
        return next(self._ports)

    def folder(self):
        """A folder that both sides see."""
        return tempfile.TemporaryDirectory(prefix="pool-", dir=self._folder.name)

    def node_of(self, rank, num_ranks, backend):
        """Node of a rank. `num_ranks` may tell the number of nodes."""
        if backend in self._one_node:
            return 0
        return rank % min(getattr(num_ranks, "nodes", num_ranks), self.nodes)

    def takes(self, item, chosen):
        """Whether a test is among those that run here: a quick selection, or all that can."""
        return selection.takes(item, chosen)

    def environment(self, rank, num_ranks, backend):
        """What ranks need to know of where they are."""
        node = self.node_of(rank, num_ranks, backend)
        on_node = [other for other in range(num_ranks) if self.node_of(other, num_ranks, backend) == node]
        wanted = {"MASTER_ADDR": FIRST_ADDRESS, "LOCAL_RANK": str(on_node.index(rank)),
                  "LOCAL_WORLD_SIZE": str(len(on_node)), "EPCOMM_AUTHKEY": "nodes of one test",
                  "EPCOMM_TEST_SLOWNESS": str(self.slowness),
                  "EPCOMM_NUM_THREADS": "1"}  # fmt: skip  # nodes look like hosts, yet share two emulated cores
        if not self.machine().split:  # every node sees all devices
            wanted["EPCOMM_IB_HCA"] = f"=rxe{node}"
        return wanted

    def start_rank(self, rank, num_ranks, backend, changes, stacks):
        """A process of a `helpers.pool.RankPool`, and the connection to it."""
        argv = [HERE / "rank.py", "{fd}", rank, int(num_ranks), backend, stacks]
        env = {"PYTHONPATH": str(HERE.parents[1]), "EPCOMM_TIMEOUT_S": str(30 * self.slowness)}
        return self._start(rank, num_ranks, backend, argv, changes | env, stacks)

    def start_job_rank(self, rank, num_ranks, backend, argv, env, stderr):
        """A process of a `helpers.job.Job`, and the connection whose other end is ``{fd}`` in `argv`."""
        # Its last argument is the parent's id, and the parent inside is another one.
        return self._start(rank, num_ranks, backend, [*argv[:-1], "0"], env, stderr)

    def _start(self, rank, num_ranks, backend, argv, env, stderr):
        node = self.node_of(rank, num_ranks, backend)
        wanted = {name: value for name, value in env.items() if value is not None}
        process = self.spawn(node, [sys.executable, *argv], wanted, stderr=stderr, connected=True)
        return process, process.conn

    def signal(self, process, number):
        """Send a signal; when that was."""
        return process.send_signal(number)
