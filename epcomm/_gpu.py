"""What a call needs of the framework that its GPU arrays come from: current streams, small conversions."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from epcomm import _arrays
from epcomm.errors import InvalidArgumentError

_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED, of drivers for CUDA 12.0 and newer


def _of_device(device: int, ask: Callable[[ctypes.CDLL, ctypes.c_int], int]) -> bool:
    """Whether the driver answers a question about a device; makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        handle = ctypes.c_int()
        return not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device) or ask(driver, handle))
    except (OSError, AttributeError):  # no library, or one without that function
        return False


def pci_address(device: int) -> str | None:
    """Where a GPU sits, such as ``0000:17:00.0``; None if the driver does not say."""
    text = ctypes.create_string_buffer(32)
    if not _of_device(device, lambda driver, handle: driver.cuDeviceGetPCIBusId(text, len(text), handle)):
        return None
    return text.value.decode().lower()


def under_mps(device: int) -> bool | None:
    """Whether contexts on a GPU are shared through CUDA MPS; None if the driver does not say, as an old one."""
    mps = ctypes.c_int()
    found = ctypes.byref(mps)
    if not _of_device(device, lambda driver, handle: driver.cuDeviceGetAttribute(found, _MPS_ENABLED, handle)):
        return None
    return mps.value != 0


def handle_of(stream: Any, name: str) -> int:
    """The ``cudaStream_t`` of a torch or CuPy stream, of anything with ``__cuda_stream__``, or of an int."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    try:
        if protocol is not None:
            return int((protocol() if callable(protocol) else protocol)[1])
        for attribute in ("cuda_stream", "ptr"):
            if not isinstance(stream, type) and hasattr(stream, attribute):
                return int(getattr(stream, attribute))
    except (TypeError, ValueError, IndexError) as error:
        raise InvalidArgumentError(f"{name} is {stream!r}: its handle cannot be read: {error}") from error
    raise InvalidArgumentError(
        f"{name} is {stream!r}; allowed: None, a torch or CuPy stream, an object with __cuda_stream__, or a handle "
        "as an int"
    )


def framework_of(kind: str) -> str | None:
    """Whose current stream counts for arrays of a kind: those of a protocol go with the library that is there."""
    if kind in ("torch", "cupy"):
        return kind
    return next((name for name in ("cupy", "torch") if sys.modules.get(name) is not None), None)


def current(kind: str, device: int) -> tuple[int, Any]:
    """(handle, stream object to keep) of the framework's current stream; the legacy stream without a framework."""
    framework = framework_of(kind)
    if framework == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:  # a tenth of the time; torch's streams live as long as the process
            return raw(device), None
        stream = torch.cuda.current_stream(device)
        return stream.cuda_stream, stream
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            stream = cupy.cuda.get_current_stream()
        return stream.ptr, stream
    return 0, None


def address(array: Any) -> int:
    """Where a new, contiguous array of a framework lies; an address that is never used for an empty one."""
    pointer = array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr
    return pointer or 64


def _own(array: Any) -> Any:
    """A resolved GPU array as an array of the framework that results come from."""
    if array.kind in ("torch", "cupy"):
        return array.owner
    return _arrays.wrap(array.ptr, array.shape, array.dtype, array, array, strides=array.strides)


def as_float32(array: Any, name: str, copy: bool = False) -> Any:
    """The values as float32, C-contiguous, resolved; without `copy` the same array where it is that already."""
    if not copy and array.dtype == "float32" and array.contiguous() and array.ptr % 4 == 0:
        return array
    own = _own(array)
    if _arrays.view(own, name).kind == "torch":
        torch = sys.modules["torch"]
        return _arrays.view(own.detach().to(torch.float32, copy=copy).contiguous(), name)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(int(array.device[5:])):
        return _arrays.view(cupy.ascontiguousarray(own.astype("float32")), name)


def contiguous(array: Any, name: str) -> Any:
    """The same values, C-contiguous, in memory of the framework."""
    own = _own(array)
    if _arrays.view(own, name).kind == "torch":
        return _arrays.view(own.detach().contiguous(), name)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(int(array.device[5:])):
        return _arrays.view(cupy.ascontiguousarray(own), name)
