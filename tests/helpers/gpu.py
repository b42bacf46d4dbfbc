"""Kernels on a real GPU without any array library: the driver's C interface, for processes of tests.

It imports nothing of ours, so that a worker can import it by its bare name.
"""

import ctypes
import functools
import os
import struct
import time

RESULT = struct.Struct("<2iQQ2iQ")  # Result of nvlink_kernels.cu


def capability(index: int) -> tuple[int, int]:
    """Compute capability of a device; makes no context."""
    cuda, device, numbers = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        raise RuntimeError(f"no GPU {index}")
    for attribute, number in zip((75, 76), numbers, strict=True):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return numbers[0].value, numbers[1].value


@functools.cache
def visible() -> tuple[str, ...]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES would name them; none without a driver."""
    count = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count.value)] if named is None else named.split(",")
    return tuple(name.strip() for name in names[: count.value])


def environment_of(rank: int, alone: bool = False) -> dict[str, str]:
    """What makes GPU 0 of a rank's process the rank's own: ranks take the GPUs in turn, sharing where there are fewer.

    The others come behind it, so that the rank can ask the driver about links; with `alone` it sees no other.
    """
    gpus = visible()
    if not gpus:
        return {}
    own = rank % len(gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join((gpus[own],) if alone else gpus[own:] + gpus[:own])}


class Gpu:
    """The primary context of a device, current in the thread that makes this, with the kernels of a cubin."""

    def __init__(self, cubin: bytes, device: int = 0) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._cuda.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        self.call("cuInit", 0)
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(self._device), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)
        self._module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self._module), cubin)

    def call(self, name: str, *arguments: object) -> None:
        """A function of the driver; anything but success raises."""
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else status}")

    def stream(self) -> ctypes.c_void_p:
        """A new stream, not ordered with the default one."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def alloc(self, size_bytes: int) -> int:
        """Zeroed device memory, for the life of the process."""
        at = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size_bytes))
        self.call("cuMemsetD8_v2", at, 0, ctypes.c_size_t(size_bytes))
        return at.value

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def launch(self, name: str, threads: int, stream: ctypes.c_void_p, ctx: bytes, *arguments: object) -> None:
        """One block of a kernel: the context by value, then int (32 bits) and ctypes values."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        values = [ctypes.create_string_buffer(ctx, len(ctx))]
        values += [ctypes.c_int(value) if isinstance(value, int) else value for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def sync(self, stream: ctypes.c_void_p) -> float:
        """Wait for a stream; ``time.monotonic()`` afterwards."""
        self.call("cuStreamSynchronize", stream)
        return time.monotonic()

    def read(self, at: int, size_bytes: int, stream: ctypes.c_void_p) -> bytes:
        """Copy from the device."""
        buffer = ctypes.create_string_buffer(size_bytes)
        self.call("cuMemcpyDtoHAsync_v2", buffer, ctypes.c_uint64(at), ctypes.c_size_t(size_bytes), stream)
        self.sync(stream)
        return buffer.raw


class Rank:
    """One end of a backend with its kernels; those that wait have a stream of their own. Places are heap offsets."""

    def __init__(self, gpu: Gpu, backend) -> None:
        self.gpu, self.backend = gpu, backend
        self.ctx = backend.device_ctx()
        self.stream, self.waiting = gpu.stream(), gpu.stream()
        self._result = gpu.alloc(RESULT.size)

    def fill(self, at: int, size_bytes: int, seed: int) -> None:
        """Write a pattern to the own heap."""
        self.gpu.launch("fill", 256, self.stream, self.ctx, *map(ctypes.c_uint64, (at, size_bytes, seed)))
        self.gpu.sync(self.stream)

    def send(self, peer: int, dst: int, src: int, size_bytes: int, word: int, add: int = 1) -> None:
        """put_signal by one warp."""
        numbers = map(ctypes.c_uint64, (dst, src, size_bytes, word, add))
        self.gpu.launch("send", 32, self.stream, self.ctx, peer, *numbers)
        self.gpu.sync(self.stream)

    def start_receive(self, peer: int, word: int, value: int, timeout_s: float, at: int = 0, size_bytes: int = 0,
                      seed: int = 0) -> None:  # fmt: skip
        """Let a kernel wait for a word and compare what has come with the pattern."""
        self._clear()
        numbers = map(ctypes.c_uint64, (word, value, int(timeout_s * 1e9), at, size_bytes, seed, self._result))
        self.gpu.launch("receive", 256, self.waiting, self.ctx, peer, *numbers)

    def start_stream(self, kernel: str, peer: int, at: int, size_bytes: int, word: int, rounds: int) -> None:
        """``stream_out`` or ``stream_in``."""
        self._clear()
        numbers = map(ctypes.c_uint64, (at, size_bytes, word, rounds, self._result))
        self.gpu.launch(kernel, 256, self.waiting, self.ctx, peer, *numbers)

    def _clear(self) -> None:
        size = ctypes.c_size_t(RESULT.size)
        self.gpu.call("cuMemsetD8Async", ctypes.c_uint64(self._result), 0, size, self.waiting)

    def result(self) -> dict[str, float]:
        """Wait for the kernel; how it ended."""
        at = self.gpu.sync(self.waiting)
        code, _, seen, waited_ns, culprit, _, wrong = RESULT.unpack(
            self.gpu.read(self._result, RESULT.size, self.waiting)
        )
        return {"code": code, "seen": seen, "waited_s": waited_ns / 1e9, "culprit": culprit, "wrong": wrong, "at": at}
