"""One virtual machine: started, watched, ended. `vm.py` is its command line, `agent.py` what tests talk to inside."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import supplies

START_S = 120.0  # until the command begins; a machine of a busy host takes 12 s
TRIES = 3
PASSED_ON = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "CI", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip


class MachineError(RuntimeError):
    """The machine could not be started, or died; the text has the end of its console."""


class Machine:
    """Runs one command and ends with it.

    Parameters
    ----------
    command : sequence of str
        Seen inside: this machine's files at the same paths, the same working directory, ``nodeI``.
    nodes : int
    out : path, optional
        The one folder in which files written inside stay; at the same path.
    environment : mapping, optional
        Variables besides those that are always passed on.
    agent : bool
        Whether there is a channel, :attr:`agent`, whose other end is the device named by ``$RXE_AGENT``.
    put_out, put_err : callable
        Called, from a thread each, with what the command writes.

    Attributes
    ----------
    agent : socket
    split : bool
        Whether each node has a network and a device of its own; else all share one network and see all devices.
    """

    def __init__(self, command, nodes=2, out=None, environment=None, agent=False, memory="4G",
                 put_out=None, put_err=None, say=lambda text: None):  # fmt: skip
        self._supplies = supplies.gather(say)
        self.split = self._supplies.split
        self._put = {"out": put_out or (lambda data: None), "err": put_err or (lambda data: None)}
        self._out = out and Path(out).resolve()
        self._job = self._describe(command, nodes, environment or {})
        self._memory = memory
        self._with_agent = agent
        self._folder = Path(tempfile.mkdtemp(prefix="epcomm-rxe-"))
        self._qemu = self.agent = None
        self._threads = []
        try:
            self._start(say)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _describe(self, command, nodes, environment):
        """What the machine is told: files of its initramfs."""
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(environment)
        settings = {
            "nodes": nodes,
            "split": int(self._supplies.split),
            "out": self._out or "",
            "modules": self._supplies.modules,
            "folder": os.getcwd(),
        }
        return {
            "guest.sh": (supplies.HERE / "guest.sh").read_bytes(),
            "settings": "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in settings.items()).encode(),
            "command": _joined(command),
            "environment": _joined(f"{name}={value}" for name, value in kept.items()),
        }

    def _start(self, say):
        initramfs = self._folder / "initramfs"
        told = supplies.archive({"job": None, **{f"job/{name}": data for name, data in self._job.items()}})
        initramfs.write_bytes(self._supplies.initramfs.read_bytes() + told)
        flags = set(re.findall(r"\b(?:vmx|svm)\b", Path("/proc/cpuinfo").read_text()))
        # Without these a KVM device, if there is one, cannot run an ordinary kernel.
        ways = ["kvm"] if flags and os.access("/dev/kvm", os.W_OK) else []
        failures = []
        for accelerator in ways + ["tcg"] * TRIES:
            began = time.monotonic()
            if self._launch(accelerator, initramfs):
                say(f"{accelerator}: Linux {self._supplies.release}, ready after {time.monotonic() - began:.1f} s")
                self.accelerator = accelerator
                return
            failures.append(f"{accelerator}, {time.monotonic() - began:.1f} s: {self._failed or 'not ready'}")
            say(f"did not start ({failures[-1]})")
            self._end()
        raise MachineError(f"the machine did not start: {'; '.join(failures)}\n{self.last_words()}")

    def _launch(self, accelerator, initramfs):
        """Whether it came up."""
        self._failed = self._status = None
        self._ready = threading.Event()
        kept, given, ports = [], [], []
        for number, name in enumerate(("status", "out", "err"), 1):
            read, write = os.pipe()
            kept.append((name, read))
            given.append(write)
            ports += ["-add-fd", f"fd={write},set={number}",
                      "-chardev", f"file,id={name},path=/dev/fdset/{number},append=on"]  # fmt: skip
        names = ["status", "out", "err"]
        if self._with_agent:
            self.agent, theirs = socket.socketpair()
            given.append(theirs.detach())
            ports += ["-chardev", f"socket,id=agent,fd={given[-1]}"]
            names.append("agent")
        for name in names:
            ports += ["-device", f"virtserialport,chardev={name},name={name}"]
        for name, folder, access in (("root", "/", ",readonly=on"), ("out", self._out, "")):
            if folder is not None:
                path = str(folder).replace(",", ",,")
                ports += ["-fsdev", f"local,id={name},path={path},security_model=none,multidevs=remap{access}",
                          "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]  # fmt: skip
        boot = ("console=ttyS0 quiet panic=-1 nokaslr apparmor=0 audit=0 random.trust_cpu=on mitigations=off "
                "init_on_alloc=0 nowatchdog net.ifnames=0")  # fmt: skip
        if accelerator == "tcg":
            boot += " tsc=reliable" + ("" if self._supplies.steady else " maxcpus=1")
        command = [
            "setpriv", "--pdeathsig", "KILL", *self._supplies.qemu,
            "-machine", f"q35,accel={accelerator}", "-cpu", "host" if accelerator == "kvm" else "max",
            "-smp", str(len(os.sched_getaffinity(0))), "-m", self._memory, "-nodefaults", "-no-user-config",
            "-display", "none", "-nic", "none", "-no-reboot",
            "-kernel", str(self._supplies.kernel), "-initrd", str(initramfs), "-append", boot,
            "-serial", f"file:{str(self._folder / 'console').replace(',', ',,')}",
            "-device", "virtio-serial-pci,max_ports=8", *ports,
        ]  # fmt: skip
        with open(self._folder / "qemu", "w") as log:
            self._qemu = subprocess.Popen(command, pass_fds=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                          env={**os.environ, "PATH": supplies.PATH})  # fmt: skip
        for end in given:
            os.close(end)
        self._threads = [threading.Thread(target=self._follow, args=pair, daemon=True) for pair in kept]
        for thread in self._threads:
            thread.start()
        limit = time.monotonic() + (20 if accelerator == "kvm" else START_S)
        while time.monotonic() < limit and not self._ready.wait(0.05) and self._qemu.poll() is None:
            pass
        return self._ready.is_set() and self._failed is None

    def _follow(self, name, pipe):
        with open(pipe, "rb", buffering=0) as file:
            said = b""
            while data := file.read(65536):
                if name != "status":
                    self._put[name](data)
                    continue
                *lines, said = (said + data).split(b"\n")
                for word, _, rest in (line.decode().partition(" ") for line in lines):
                    if word == "status":
                        self._status = int(rest)
                    elif word == "fail":
                        self._failed = rest
                    else:
                        self._ready.set()

    @property
    def alive(self):
        """Whether it runs."""
        return self._qemu is not None and self._qemu.poll() is None

    def wait(self, timeout_s=None):
        """The command's exit status, or None if it did not end in time."""
        try:
            self._qemu.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        for thread in self._threads:
            thread.join(5)
        if self._status is None:
            raise MachineError(f"the machine died: {self._failed or 'no status'}\n{self.last_words()}")
        return self._status

    def last_words(self):
        """The end of what QEMU and the kernel inside said."""
        texts = [f"{name}: {(self._folder / name).read_text(errors='replace')[-1500:].strip()}"
                 for name in ("qemu", "console") if (self._folder / name).exists()]  # fmt: skip
        return "\n".join(texts)

    def _end(self):
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
        for thread in self._threads:
            thread.join(5)
        if self.agent is not None:
            self.agent.close()

    def close(self):
        """End it now. Idempotent."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)


def _joined(words):
    return b"".join(os.fsencode(str(word)) + b"\0" for word in words)


def copier(stream):
    """A `put_out` that writes to a stream of this process at once."""

    def put(data):
        with contextlib.suppress(BrokenPipeError):
            stream.buffer.write(data)
            stream.buffer.flush()

    return put
