"""Array kinds and memory forms that the contract is tested with.

A *kind* is a library or protocol through which an array reaches epcomm; a *form* is how it lies in memory.
"""

import ctypes
import sys

import ml_dtypes
import numpy as np

KINDS = ("numpy", "torch", "dlpack", "buffer")
GPU_KINDS = ("cupy", "torch_cuda")  # for backends with device memory

# Forms that each kind can express. "odd": at an odd byte offset; "reversed": negative strides.
FORMS = {
    "numpy": ("plain", "rows", "columns", "reversed", "readonly", "odd", "fortran", "broadcast"),
    "torch": ("plain", "rows", "columns", "fortran", "broadcast"),
    "dlpack": ("plain", "rows", "columns", "fortran", "broadcast"),
    "buffer": ("plain", "rows", "columns", "reversed", "readonly", "fortran"),
    "cupy": ("plain", "rows", "columns", "reversed", "fortran", "broadcast"),
    "torch_cuda": ("plain", "rows", "columns", "fortran", "broadcast"),
}


def why_not(kind):
    """Why a kind cannot be used here, or None."""
    if kind in ("torch", "torch_cuda"):
        try:
            import torch
        except ImportError as error:
            return f"torch: {error}"
        if kind == "torch_cuda" and not torch.cuda.is_available():
            return "torch sees no GPU"
    if kind == "cupy":
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            return f"cupy: {error}"
    return None


def dtype_of(name):
    """NumPy dtype of a name such as "bfloat16" or "float8_e4m3fn"."""
    return np.dtype(getattr(ml_dtypes, name, name))


def formed(array, form):
    """The same values, lying in memory as `form` says."""
    if form == "plain" or (array.size == 0 and form != "readonly"):
        return array
    shape = array.shape
    if form == "rows":
        wide = np.zeros((2 * shape[0], *shape[1:]), array.dtype)
        wide[::2] = array
        return wide[::2]
    if form == "columns":
        wide = np.zeros((*shape[:-1], 3 * shape[-1]), array.dtype)
        wide[..., 1::3] = array
        return wide[..., 1::3]
    if form == "reversed":
        every = tuple(slice(None, None, -1) for _ in shape)
        return np.ascontiguousarray(array[every])[every]
    if form == "readonly":
        array = array.copy()
        array.flags.writeable = False
        return array
    if form == "odd":
        raw = np.zeros(array.nbytes + 1, np.uint8)
        odd = np.ndarray(shape, array.dtype, raw[1:].data)
        odd[...] = array
        return odd
    if form == "fortran":
        return np.asfortranarray(array)
    if form == "broadcast":  # only right for equal rows: used where the generator makes them so
        return np.broadcast_to(array[:1], shape) if (bits(array) == bits(array[:1])).all() else array
    raise ValueError(form)


def bits(array):
    """The bits as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def to_kind(array, kind):
    """A NumPy array as an object of `kind` over the same memory (None stays None)."""
    if array is None or kind == "numpy":
        return array
    if kind == "torch":
        return _to_torch(array)
    if kind == "dlpack":
        return DLPackExporter(array)
    if kind == "buffer":
        return memoryview(array)
    if kind in GPU_KINDS:
        return _to_gpu(array, kind)
    raise ValueError(kind)


def is_kind(thing, kind):
    """Whether an output is of the kind that its input was; NumPy stands for the two protocols."""
    if kind == "torch":
        import torch

        return isinstance(thing, torch.Tensor) and thing.device.type == "cpu"
    if kind == "torch_cuda":
        import torch

        return isinstance(thing, torch.Tensor) and thing.device.type == "cuda"
    if kind == "cupy":
        import cupy

        return isinstance(thing, cupy.ndarray)
    return isinstance(thing, np.ndarray)


def to_numpy(thing):
    """Any output as a NumPy array over the same memory."""
    if thing is None or isinstance(thing, np.ndarray):
        return thing
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu()
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            if thing.dtype == getattr(torch, name):
                unsigned = torch.uint8 if thing.element_size() == 1 else torch.uint16
                return thing.view(unsigned).numpy().view(dtype_of(name))
        return thing.numpy()
    if type(thing).__module__.startswith("cupy"):
        return thing.get()
    return np.asarray(thing)


def assign(thing, values):
    """Write NumPy values into an output."""
    if isinstance(thing, np.ndarray) or (hasattr(thing, "is_cpu") and thing.is_cpu):
        to_numpy(thing)[...] = values
    elif hasattr(thing, "copy_"):
        thing.copy_(_to_gpu(np.ascontiguousarray(values), "torch_cuda"))
    else:
        thing[...] = _to_gpu(np.ascontiguousarray(values), "cupy")


def _to_gpu(array, kind):
    """The same bytes with the same strides on the GPU."""
    low = sum((count - 1) * step for count, step in zip(array.shape, array.strides, strict=True) if step < 0)
    high = sum((count - 1) * step for count, step in zip(array.shape, array.strides, strict=True) if step > 0)
    if array.size == 0:
        low = high = 0
    span = high - low + array.itemsize if array.size else 0
    raw = np.zeros(max(span, 1), np.uint8)
    if span:
        raw[:] = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(array.ctypes.data + low))
    if kind == "cupy":
        import cupy

        pointer = cupy.asarray(raw).data - low
        return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)
    import torch

    dtype = getattr(torch, array.dtype.name)
    if not span:
        return torch.empty(array.shape, dtype=dtype, device="cuda")
    flat = torch.from_numpy(raw).cuda().view(dtype)
    return flat.as_strided(array.shape, [step // array.itemsize for step in array.strides])


def _to_torch(array):
    import torch

    if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        raw = array.view(f"u{array.dtype.itemsize}")
        return torch.from_numpy(raw).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


# ------------------------------------------------------------------------------------------- DLPack


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

_DL_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_DL_CODES_BY_NAME = {"bfloat16": 4, "float8_e4m3fn": 10}
_CPU, _CUDA = 1, 2
_alive = {}  # address of a managed tensor -> what it keeps


@_Deleter
def _delete(managed):
    _alive.pop(ctypes.addressof(managed.contents), None)


class DLPackExporter:
    """An array known only by DLPack: no buffer protocol, no ``__array__``, no other attribute.

    Parameters
    ----------
    array : numpy.ndarray
    device_type : int
        What it claims to be; 2 (CUDA) gives an array that must never be touched.
    """

    def __init__(self, array, device_type=_CPU):
        self._array = array
        self._device = (device_type, 0)

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        array = self._array
        ndim = array.ndim
        shape = (ctypes.c_int64 * ndim)(*array.shape)
        strides = (ctypes.c_int64 * ndim)(*(stride // array.itemsize for stride in array.strides))
        name = array.dtype.name
        code = _DL_CODES_BY_NAME[name] if name in _DL_CODES_BY_NAME else _DL_CODES[array.dtype.kind]
        tensor = _DLTensor(
            array.ctypes.data,
            _DLDevice(*self._device),
            ndim,
            _DLDataType(code, 8 * array.itemsize, 1),
            shape,
            strides,
            0,
        )
        managed = _DLManagedTensor(tensor, None, _delete)
        address = ctypes.addressof(managed)
        _alive[address] = (managed, shape, strides, array)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(address, b"dltensor", None)


def dlpack_alive():
    """Number of exported tensors whose consumer has not freed them."""
    return len(_alive)


class FakeCuda:
    """An array that says it lies on a GPU, by ``__cuda_array_interface__``; its pointer must never be read."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (0x10, False),
            "version": 3,
            "strides": None,
        }
