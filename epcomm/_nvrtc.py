"""What a run-time compiler is for :mod:`epcomm.kernels`, and one that is given as a library file."""

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class CompileFailed(Exception):
    """NVRTC refused a source; the text is its log."""


class Compiler(Protocol):
    """An NVRTC, however it is reached."""

    @property
    def version(self) -> tuple[int, int]:
        """CUDA version, such as (13, 0)."""

    @property
    def archs(self) -> Sequence[int]:
        """Compute capabilities it compiles for, such as 90."""

    def compile(self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        """Cubin and log, or CompileFailed."""


class Library:
    """The NVRTC of a library file, through its C interface: several versions can serve one process.

    Parameters
    ----------
    path : path
        Such as ``.../libnvrtc.so.12``; its builtins library lies beside it.
    """

    def __init__(self, path: str | Path) -> None:
        # NVRTC looks for its builtins by bare name, where a wheel's folder is not searched.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.version = (major.value, minor.value)
        self.archs = list(archs)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CompileFailed(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def compile(self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        def strings(texts: Sequence[str]) -> Any:
            return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers),
                   strings(list(headers.values())), strings(list(headers)))  # fmt: skip
        try:
            try:
                self._call("nvrtcCompileProgram", program, len(options), strings(options))
            except CompileFailed as error:
                raise CompileFailed(f"{error}\n{_clean(self._text(program, 'ProgramLog'))}") from None
            return self._text(program, "CUBIN"), _clean(self._text(program, "ProgramLog"))
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


def _clean(log: bytes) -> str:
    return log.rstrip(b"\0").decode(errors="replace").strip()


class Resources(NamedTuple):
    """What one kernel takes, as the assembler says it."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC = re.compile(r"(\d+) bytes smem")
_CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")


def resources(log: str) -> dict[str, Resources]:
    """Each kernel of a log that was made with ``--ptxas-options=-v``.

    A function that the kernel calls is told between the kernel's own lines: its spills are the kernel's.
    """
    found: dict[str, Resources] = {}
    name = None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = match.group(1)
            found[name] = Resources(0, 0, 0, 0)
        if name is None:
            continue
        now = found[name]
        if match := _STACK.search(line):
            stack, stores, loads = map(int, match.groups())
            now = now._replace(stack_bytes=max(now.stack_bytes, stack), spill_bytes=now.spill_bytes + stores + loads)
        if match := _USED.search(line):
            now = now._replace(registers=int(match.group(1)))
        if match := _STATIC.search(line):
            now = now._replace(shared_bytes=int(match.group(1)))
        if match := _CUMULATIVE.search(line):
            now = now._replace(stack_bytes=max(now.stack_bytes, int(match.group(1))))
        found[name] = now
    return found
