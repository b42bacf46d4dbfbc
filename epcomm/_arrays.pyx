"""Any array: address, shape, strides, dtype, device, owner; and new arrays of the caller's framework.

NumPy and ml_dtypes are the only imports. torch and CuPy are found through ``sys.modules``: an array of theirs can
only exist once its module has been imported by somebody else.
"""

import operator
import sys

import ml_dtypes
import numpy as np

from epcomm.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedError

from cpython.buffer cimport (PyBUF_RECORDS_RO, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
                             PyObject_GetBuffer)
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t


cdef extern from *:
    """
    // numpy/ndarraytypes.h, PyArrayInterface: the struct behind __array_struct__, fixed since 2005.
    typedef struct {
        int two, nd;
        char typekind;
        int itemsize, flags;
        Py_intptr_t *shape, *strides;
        void *data;
        PyObject *descr;
    } EpcommArrayInterface;

    // dlpack.h, ABI 1.x. The unversioned managed tensor is what exporters gave before 1.0 and still may.
    typedef struct { int32_t device_type, device_id; } EpcommDLDevice;
    typedef struct { uint8_t code, bits; uint16_t lanes; } EpcommDLDataType;
    typedef struct {
        void *data;
        EpcommDLDevice device;
        int32_t ndim;
        EpcommDLDataType dtype;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } EpcommDLTensor;
    typedef struct EpcommDLManaged {
        EpcommDLTensor dl_tensor;
        void *manager_ctx;
        void (*deleter)(struct EpcommDLManaged *);
    } EpcommDLManaged;
    typedef struct EpcommDLVersioned {
        uint32_t major, minor;
        void *manager_ctx;
        void (*deleter)(struct EpcommDLVersioned *);
        uint64_t flags;
        EpcommDLTensor dl_tensor;
    } EpcommDLVersioned;
    """
    ctypedef struct ArrayInterface "EpcommArrayInterface":
        int two
        int nd
        int itemsize
        int flags
        Py_ssize_t* shape
        Py_ssize_t* strides
        void* data

    ctypedef struct DLDevice "EpcommDLDevice":
        int32_t device_type
        int32_t device_id

    ctypedef struct DLDataType "EpcommDLDataType":
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct DLTensor "EpcommDLTensor":
        void* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct DLManaged "EpcommDLManaged":
        DLTensor dl_tensor
        void (*deleter)(DLManaged*) noexcept

    ctypedef struct DLVersioned "EpcommDLVersioned":
        uint32_t major
        uint32_t minor
        void (*deleter)(DLVersioned*) noexcept
        uint64_t flags
        DLTensor dl_tensor


cdef enum:
    WRITEABLE = 0x400    # NPY_ARRAY_WRITEABLE
    DL_READ_ONLY = 1     # DLPACK_FLAG_BITMASK_READ_ONLY
    DL_IS_COPIED = 2     # DLPACK_FLAG_BITMASK_IS_COPIED

# These names must outlive the capsules that point to them, so they are C literals.
cdef const char* LEGACY = "dltensor"
cdef const char* LEGACY_USED = "used_dltensor"
cdef const char* VERSIONED = "dltensor_versioned"
cdef const char* VERSIONED_USED = "used_dltensor_versioned"

_ML_NAMES = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int4", "uint4", "int2",
    "uint2",
)
_DTYPES = {}    # canonical name -> numpy dtype
_NAMES = {}     # numpy dtype -> canonical name
_TYPES = {}     # numpy scalar type -> canonical name
for _dt in [np.dtype(_c) for _c in "?bBhHiIlLqQefdgFDG"] + [
    np.dtype(getattr(ml_dtypes, _c)) for _c in _ML_NAMES if hasattr(ml_dtypes, _c)
]:
    _DTYPES.setdefault(_dt.name, _dt)
    _NAMES.setdefault(_dt, _dt.name)
    _TYPES[_dt.type] = _dt.name

_DLPACK_NAMES = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64",
    (4, 16): "bfloat16", (5, 64): "complex64", (5, 128): "complex128", (6, 8): "bool",
    (7, 8): "float8_e3m4", (8, 8): "float8_e4m3", (9, 8): "float8_e4m3b11fnuz", (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz", (12, 8): "float8_e5m2", (13, 8): "float8_e5m2fnuz", (14, 8): "float8_e8m0fnu",
}
# kDLCPU, kDLCUDAHost and kDLROCMHost are host memory; kDLCUDA, kDLROCM and kDLCUDAManaged are GPU memory.
_DLPACK_HOST = (1, 3, 11)
_DLPACK_GPU = (2, 10, 13)

_KIND_OF_CODE = {"?": "b", "e": "f", "f": "f", "d": "f", "g": "f", "c": "u", "b": "i", "B": "u", "h": "i", "H": "u",
                 "i": "i", "I": "u", "l": "i", "L": "u", "q": "i", "Q": "u", "n": "i", "N": "u",
                 "Zf": "c", "Zd": "c", "Zg": "c", "F": "c", "D": "c", "G": "c"}

cdef object _ndarray = np.ndarray
cdef object _index = operator.index


cdef class Memory:
    """Foreign memory under the buffer protocol; ``owner`` lives as long as the last array over it.

    Never freed here. An empty one still has an address, since consumers take a null pointer for "no buffer".
    """

    def __cinit__(self, uintptr_t ptr, Py_ssize_t nbytes, owner=None, bint readonly=False):
        if nbytes < 0 or (nbytes and not ptr):
            raise InvalidArgumentError(f"ptr={ptr:#x}, nbytes={nbytes}: expected nbytes >= 0 and an address")
        self.ptr = ptr
        self.nbytes = nbytes
        self.owner = owner
        self.readonly = readonly

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef void* start = <void*>self.ptr if self.nbytes else <void*>self._pad
        PyBuffer_FillInfo(buffer, self, start, self.nbytes, self.readonly, flags)


cdef class _Buffer:
    """A buffer taken from an exporter, given back when the last array over it dies."""

    cdef Py_buffer raw
    cdef bint taken

    def __dealloc__(self):
        if self.taken:
            PyBuffer_Release(&self.raw)


cdef class _DLPack:
    """A consumed DLPack capsule: its deleter runs once, when the last array over it dies."""

    cdef DLManaged* legacy
    cdef DLVersioned* versioned

    def __dealloc__(self):
        if self.legacy != NULL and self.legacy.deleter != NULL:
            self.legacy.deleter(self.legacy)
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)


cdef class Array:
    """A resolved, borrowed view of a caller's array; it keeps the exporter alive.

    Attributes
    ----------
    ptr : int
        Address of element [0, ..., 0]; may be 0 when ``size`` is 0.
    shape, strides : tuple of int
        Strides are in bytes and may be negative or 0.
    dtype : str
        Canonical name such as "bfloat16"; a big-endian or structured dtype has its NumPy text such as ">i8".
    device : str
        "cpu" or "cuda:N".
    kind : str
        "numpy", "torch", "cupy", "dlpack", "buffer" or "cuda_array_interface".
    readonly : bool
        The exporter forbids writing, or writing would not reach the caller's array.
    requires_grad : bool
        torch only: grad mode is on and the tensor requires grad.
    stream : int or None
        The stream that a ``__cuda_array_interface__`` names; work on the array must be ordered after it.
    owner : object
        What the caller gave.
    """

    def __init__(self):
        raise TypeError("an Array is made by view(obj, name)")

    @property
    def nbytes(self):
        """Bytes of all elements, without gaps."""
        return self.size * self.itemsize

    cpdef bint contiguous(self):
        """C-contiguous: rows follow each other without gaps."""
        cdef int64_t expected = self.itemsize
        cdef int i
        if self.size == 0:
            return True
        for i in range(self.ndim - 1, -1, -1):
            if <int64_t>self.shape[i] != 1:
                if <int64_t>self.strides[i] != expected:
                    return False
                expected *= <int64_t>self.shape[i]
        return True

    cpdef bint rows_contiguous(self):
        """The elements of a row (last dimension) follow each other; rows may lie anywhere."""
        if self.size == 0 or self.ndim == 0 or <int64_t>self.shape[self.ndim - 1] == 1:
            return True
        return <int64_t>self.strides[self.ndim - 1] == self.itemsize

    def __repr__(self):
        return (f"Array({self.kind}, {self.dtype}, shape={self.shape}, strides={self.strides}, device={self.device}, "
                f"ptr={self.ptr:#x}{', readonly' if self.readonly else ''})")


cdef str _type_name(object obj):
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


cdef object _refuse(str name, object obj, str why):
    return InvalidArgumentError(f"{name}: {_type_name(obj)}: {why}")


cdef tuple _c_strides(tuple shape, Py_ssize_t itemsize):
    cdef list strides = [0] * len(shape)
    step = itemsize
    for i in range(len(shape) - 1, -1, -1):
        strides[i] = step
        step *= shape[i] or 1
    return tuple(strides)


cdef tuple _shape(object shape):
    """A shape of the caller: one number or a sequence of numbers, none negative."""
    try:
        dims = (_index(shape),) if not isinstance(shape, (tuple, list)) and hasattr(shape, "__index__") else \
            tuple([_index(dim) for dim in shape])
    except TypeError:
        raise InvalidArgumentError(f"shape={shape!r}: expected integers") from None
    for dim in dims:
        if dim < 0:
            raise InvalidArgumentError(f"shape={shape!r}: expected no negative dimension")
    return dims


cdef int _set_shape(Array array, tuple shape, tuple strides) except -1:
    """Shape and byte strides, and the size they give; one that does not fit 63 bits is an OverflowError."""
    size = 1
    for dim in shape:
        size *= dim
    if size * array.itemsize > INT64_MAX:
        raise OverflowError(f"shape {shape} of {array.itemsize}-byte elements is more than the address space")
    array.shape = shape
    array.strides = strides
    array.ndim = <int>len(shape)
    array.size = size
    return 0


# dtypes ---------------------------------------------------------------------------------------------------------------

cdef str _dtype_name(object dt):
    """Canonical name of a NumPy dtype; a TypeError says why an element is not plain bytes."""
    name = _NAMES.get(dt)
    if name is not None:
        return <str>name
    if dt.hasobject or dt.kind in "OT":
        raise TypeError(f"dtype {dt} holds Python objects, not plain bytes")
    if dt.fields is not None or dt.subdtype is not None:
        return str(dt)
    return dt.str


cpdef str canonical_dtype(object obj):
    """Canonical name of a dtype given as a name, a NumPy dtype or scalar type, an ml_dtypes type or a torch dtype.

    Raises
    ------
    InvalidArgumentError
        It is none of these, or its elements are not plain bytes; the text names it.
    """
    why = "expected a dtype: a name such as 'bfloat16', a NumPy or ml_dtypes type, or a torch dtype"
    try:
        if isinstance(obj, str):
            return <str>obj if obj in _DTYPES else _dtype_name(np.dtype(obj))
        if isinstance(obj, np.dtype):
            return _dtype_name(obj)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidArgumentError(f"dtype={obj!r}: {error}; {why}") from None
    if isinstance(obj, type) and obj in _TYPES:
        return <str>_TYPES[obj]
    if type(obj).__module__ == "torch" and type(obj).__name__ == "dtype":
        name = str(obj)[6:]
        if name in _DTYPES:
            return name
        why = "no NumPy or ml_dtypes type has this layout"
    raise InvalidArgumentError(f"dtype={obj!r}: {why}")


cdef object _numpy_dtype(str dtype):
    found = _DTYPES.get(dtype)
    return found if found is not None else np.dtype(dtype)


cpdef int itemsize_of(str dtype) except -1:
    """Bytes of one element of a canonical dtype."""
    return <int>_numpy_dtype(canonical_dtype(dtype)).itemsize


# from the caller ------------------------------------------------------------------------------------------------------

cpdef Array view(object obj, str name, object stream=None):
    """Resolve any array without copying it.

    Parameters
    ----------
    obj : array
        NumPy, CuPy or torch array, or any object with DLPack, ``__cuda_array_interface__`` or the buffer protocol.
    name : str
        What the caller calls it, for the texts of errors.
    stream : int, optional
        The consumer's CUDA stream, told to a DLPack exporter of GPU memory so that it orders its work before it.
        None is the legacy default stream.

    Raises
    ------
    InvalidArgumentError
        It is no array, or one without plain elements in memory; the text names `name`, its type and the reason.
    """
    cdef Array array = Array.__new__(Array)
    array.owner = obj
    if isinstance(obj, _ndarray):
        _from_numpy(array, obj, name)
        return array
    module = sys.modules.get("torch")
    cls = getattr(module, "Tensor", None) if module is not None else None
    if cls is not None and isinstance(obj, cls):
        _from_torch(array, obj, name, module)
        return array
    module = sys.modules.get("cupy")
    cls = getattr(module, "ndarray", None) if module is not None else None
    try:
        if cls is not None and isinstance(obj, cls):
            _from_cupy(array, obj)
        else:
            _from_protocols(array, obj, name, stream)
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, BufferError, RuntimeError) as error:
        raise _refuse(name, obj, f"its array interface is broken: {type(error).__name__}: {error}") from error
    return array


cdef int _from_numpy(Array array, object obj, str name) except -1:
    cdef ArrayInterface* raw
    cdef int i
    if type(obj) is not _ndarray and "numpy.ma" in sys.modules and isinstance(obj, np.ma.MaskedArray):
        raise _refuse(name, obj, "a masked array has elements without a value; pass .filled(...) or .data")
    # Not __array_interface__: a capsule costs a tenth of that dict.
    capsule = obj.__array_struct__
    raw = <ArrayInterface*>PyCapsule_GetPointer(capsule, NULL)
    try:
        array.dtype = _dtype_name(obj.dtype)
    except TypeError as error:
        raise _refuse(name, obj, str(error)) from None
    array.kind = "numpy"
    array.device = "cpu"
    array.ptr = <uintptr_t>raw.data
    array.itemsize = raw.itemsize
    array.ndim = raw.nd
    array.readonly = not raw.flags & WRITEABLE
    array.shape = tuple([raw.shape[i] for i in range(raw.nd)])
    array.strides = tuple([raw.strides[i] for i in range(raw.nd)])
    array.size = 1
    for i in range(raw.nd):
        array.size *= raw.shape[i]
    return 0


cdef int _from_torch(Array array, object tensor, str name, object torch) except -1:
    cdef int64_t step
    cdef bint lazy = False
    try:
        dtype = tensor.dtype
        array.dtype = str(dtype)[6:]
        if array.dtype not in _DTYPES:
            raise _refuse(name, tensor, f"dtype {dtype}: no NumPy or ml_dtypes type has this layout")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise _refuse(name, tensor, f"layout {tensor.layout}{' (nested)' if tensor.is_nested else ''}: expected a "
                          "dense tensor; pass .to_dense()")
        if tensor.is_quantized:
            raise _refuse(name, tensor, "a quantized tensor: expected plain numbers; pass .dequantize() or .int_repr()")
        if tensor.is_cpu:
            array.device = "cpu"
        else:
            device = tensor.device
            if device.type != "cuda":
                raise _refuse(name, tensor, f"device {device}: expected cpu or cuda")
            array.device = f"cuda:{device.index}"
        array.requires_grad = tensor.requires_grad and torch.is_grad_enabled()
        if tensor.is_conj() or tensor.is_neg():
            # The memory holds other numbers than the tensor. What is written to the copy would be lost.
            lazy = True
            tensor = tensor.detach().resolve_conj().resolve_neg()
            array._hold = tensor
        array.itemsize = <int>_DTYPES[array.dtype].itemsize
        array.ptr = tensor.data_ptr()
        step = array.itemsize
        _set_shape(array, tuple(tensor.shape), tuple([step * <int64_t>stride for stride in tensor.stride()]))
    except InvalidArgumentError:
        raise
    except (RuntimeError, TypeError, OverflowError) as error:  # fake, functional and wrapped tensors
        raise _refuse(name, tensor, f"no memory behind this tensor: {error}") from error
    if array.size and not array.ptr:
        raise _refuse(name, tensor, "no memory behind this tensor: its data pointer is null")
    array.kind = "torch"
    array.readonly = lazy
    return 0


cdef int _from_cupy(Array array, object obj) except -1:
    cdef object dt = obj.dtype
    array.dtype = _dtype_name(dt)
    array.kind = "cupy"
    array.device = f"cuda:{_index(obj.device.id)}"
    array.itemsize = <int>dt.itemsize
    array.ptr = obj.data.ptr
    _set_shape(array, tuple(obj.shape), tuple(obj.strides))
    return 0


cdef int _from_protocols(Array array, object obj, str name, object stream) except -1:
    """DLPack first since it alone names the device, then __cuda_array_interface__, then the buffer protocol."""
    cdef bint is_type = isinstance(obj, type)  # the class has the attributes too, but no memory
    cdef bint has_cai = not is_type and hasattr(obj, "__cuda_array_interface__")
    cdef bint has_buffer = PyObject_CheckBuffer(obj) and not isinstance(obj, np.generic)
    if not is_type and hasattr(obj, "__dlpack__"):
        try:
            _from_dlpack(array, obj, name, stream)
            return 0
        except Exception as error:
            # Some exporters refuse read-only arrays or dtypes here and give them by another protocol.
            if not has_cai and not has_buffer:
                if isinstance(error, InvalidArgumentError):
                    raise
                raise _refuse(name, obj, f"its __dlpack__ failed: {type(error).__name__}: {error}") from error
    if has_cai:
        _from_cuda_interface(array, obj, name)
    elif has_buffer:
        _from_buffer(array, obj, name)
    else:
        raise InvalidArgumentError(
            f"{name}: expected an array (NumPy, CuPy, torch, or an object with DLPack, __cuda_array_interface__ or the "
            f"buffer protocol), not {_type_name(obj)}")
    return 0


cdef int _from_dlpack(Array array, object obj, str name, object stream) except -1:
    cdef _DLPack hold = _DLPack.__new__(_DLPack)
    cdef DLTensor* tensor
    cdef uint64_t flags = 0
    cdef dict arguments = {}
    query = getattr(obj, "__dlpack_device__", None)
    if query is not None:
        device = int(query()[0])
        if device not in _DLPACK_HOST and device not in _DLPACK_GPU:
            raise _refuse(name, obj, f"DLPack device type {device}: expected host (1, 3, 11) or GPU (2, 10, 13) memory")
        if stream is not None and device in _DLPACK_GPU:
            arguments["stream"] = stream or 1  # 0 is ambiguous and forbidden; 1 is the legacy default stream
    try:
        capsule = obj.__dlpack__(max_version=(1, 1), **arguments)
    except TypeError:  # an exporter from before 1.0 does not know the keyword
        capsule = obj.__dlpack__(**arguments)
    # From here on the tensor is ours and `hold` deletes it, whatever happens below.
    if PyCapsule_IsValid(capsule, VERSIONED):
        hold.versioned = <DLVersioned*>PyCapsule_GetPointer(capsule, VERSIONED)
        PyCapsule_SetName(capsule, VERSIONED_USED)
        if hold.versioned.major != 1:
            raise _refuse(name, obj, f"DLPack version {hold.versioned.major}.{hold.versioned.minor}: expected 1.x")
        flags = hold.versioned.flags
        tensor = &hold.versioned.dl_tensor
    elif PyCapsule_IsValid(capsule, LEGACY):
        hold.legacy = <DLManaged*>PyCapsule_GetPointer(capsule, LEGACY)
        PyCapsule_SetName(capsule, LEGACY_USED)
        tensor = &hold.legacy.dl_tensor
    else:
        raise _refuse(name, obj, f"__dlpack__ gave {capsule!r}: expected a fresh capsule named {LEGACY.decode()} or "
                      f"{VERSIONED.decode()}")
    array._hold = hold
    array.kind = "dlpack"
    if tensor.device.device_type in _DLPACK_HOST:
        array.device = "cpu"
    elif tensor.device.device_type in _DLPACK_GPU:
        array.device = f"cuda:{tensor.device.device_id}"
    else:
        raise _refuse(name, obj, f"DLPack device type {tensor.device.device_type}: expected host (1, 3, 11) or GPU "
                      "(2, 10, 13) memory")
    dtype = _DLPACK_NAMES.get((tensor.dtype.code, tensor.dtype.bits))
    if dtype is None or tensor.dtype.lanes != 1 or dtype not in _DTYPES:
        raise _refuse(name, obj, f"DLPack dtype code {tensor.dtype.code}, {tensor.dtype.bits} bits, "
                      f"{tensor.dtype.lanes} lanes: expected whole-byte numbers of one lane")
    array.dtype = dtype
    array.itemsize = tensor.dtype.bits // 8
    array.readonly = (flags & (DL_READ_ONLY | DL_IS_COPIED)) != 0
    shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
    for dim in shape:
        if dim < 0:
            raise _refuse(name, obj, f"DLPack shape {shape} has a negative dimension")
    if tensor.strides == NULL:
        strides = _c_strides(shape, array.itemsize)
    else:
        strides = tuple([array.itemsize * <object>tensor.strides[i] for i in range(tensor.ndim)])
    _set_shape(array, shape, strides)
    if tensor.data == NULL and array.size:
        raise _refuse(name, obj, f"DLPack shape {shape} with a null data pointer")
    array.ptr = <uintptr_t>tensor.data + tensor.byte_offset if tensor.data != NULL else 0
    return 0


cdef int _from_cuda_interface(Array array, object obj, str name) except -1:
    face = obj.__cuda_array_interface__
    if face.get("mask") is not None:
        raise _refuse(name, obj, "its __cuda_array_interface__ has a mask: elements without a value")
    array._hold = face
    array.kind = "cuda_array_interface"
    array.device = f"cuda:{_device_index(obj)}"
    dt = np.dtype(face["typestr"])
    if dt.kind == "V":
        # bfloat16 and fp8 have no code of their own here; the object's own dtype tells.
        inner = getattr(obj, "dtype", None)
        array.dtype = canonical_dtype(inner) if inner is not None else _dtype_name(dt)
        if itemsize_of(array.dtype) != dt.itemsize:
            raise _refuse(name, obj, f"typestr {face['typestr']!r} and dtype {inner} differ in size")
    else:
        array.dtype = _dtype_name(dt)
    array.itemsize = <int>dt.itemsize
    ptr, readonly = face["data"]
    array.ptr = ptr or 0
    array.readonly = bool(readonly)
    shape = _shape(tuple(face["shape"]))
    strides = face.get("strides")
    strides = _c_strides(shape, array.itemsize) if strides is None else tuple([_index(step) for step in strides])
    if len(strides) != len(shape):
        raise _refuse(name, obj, f"__cuda_array_interface__ has shape {shape} but strides {strides}")
    _set_shape(array, shape, strides)
    array.stream = face.get("stream")
    if array.size and not array.ptr:
        raise _refuse(name, obj, f"__cuda_array_interface__ has shape {shape} and a null data pointer")
    return 0


cdef object _device_index(object obj):
    """Index of the GPU an object is on, as far as it tells; the interface itself does not."""
    query = getattr(obj, "__dlpack_device__", None)
    if query is not None:
        return _index(query()[1])
    device = getattr(obj, "device", None)
    for found in (device, getattr(device, "id", None), getattr(device, "index", None)):
        if hasattr(found, "__index__"):
            return _index(found)
    return 0


cdef int _from_buffer(Array array, object obj, str name) except -1:
    cdef _Buffer hold = _Buffer.__new__(_Buffer)
    # No PyBUF_INDIRECT: an exporter whose rows are pointers has to refuse.
    PyObject_GetBuffer(obj, &hold.raw, PyBUF_RECORDS_RO)
    hold.taken = True
    array._hold = hold
    array.kind = "buffer"
    array.device = "cpu"
    array.ptr = <uintptr_t>hold.raw.buf
    array.readonly = hold.raw.readonly
    array.itemsize = <int>hold.raw.itemsize
    text = hold.raw.format.decode("utf-8", "replace") if hold.raw.format != NULL else "B"
    array.dtype = _buffer_dtype(obj, text, array.itemsize)
    if array.dtype is None:
        raise _refuse(name, obj, f"buffer format {text!r} of {array.itemsize}-byte elements is not plain bytes")
    if hold.raw.shape != NULL:
        shape = tuple([hold.raw.shape[i] for i in range(hold.raw.ndim)])
    else:
        shape = (hold.raw.len // hold.raw.itemsize,)
    if hold.raw.strides != NULL and hold.raw.shape != NULL:
        strides = tuple([hold.raw.strides[i] for i in range(hold.raw.ndim)])
    else:
        strides = _c_strides(shape, array.itemsize)
    _set_shape(array, shape, strides)
    return 0


cdef str _buffer_dtype(object obj, str text, int itemsize):
    """Canonical dtype of a buffer's format; None when its elements are not plain bytes."""
    cdef str order = ""
    if text and text[0] in "@=<>!^":
        order = text[0]
        text = text[1:]
    kind = _KIND_OF_CODE.get(text)
    try:
        if kind is None:
            return _dtype_name(np.asarray(memoryview(obj)).dtype)
        # The code gives the kind, the exporter's itemsize the width: 'l' is 4 or 8 bytes by prefix and platform.
        order = ">" if order in (">", "!") else "<" if order == "<" else "="
        return _dtype_name(np.dtype(f"{order}{kind}{itemsize}"))
    except (TypeError, ValueError, RuntimeError):
        return None


# to the caller --------------------------------------------------------------------------------------------------------

cpdef object empty(object shape, str dtype, Array like, bint zero=False):
    """New C-contiguous memory of like's framework on its device; NumPy for DLPack and buffer exporters on the host.

    Raises
    ------
    OutOfMemoryError
        The text gives the bytes asked.
    UnsupportedError
        like's framework has no such dtype, or no framework for its GPU memory is imported.
    """
    dims = _shape(shape)
    dtype = canonical_dtype(dtype)
    framework = _framework(like)
    try:
        if framework == "torch":
            torch = sys.modules["torch"]
            make = torch.zeros if zero else torch.empty
            return make(dims, dtype=_torch_dtype(torch, dtype), device=like.device)
        if framework == "cupy":
            cupy = sys.modules["cupy"]
            make = cupy.zeros if zero else cupy.empty
            with cupy.cuda.Device(int(like.device[5:])):
                return make(dims, dtype=_cupy_dtype(cupy, dtype))
        return (np.zeros if zero else np.empty)(dims, dtype=_numpy_dtype(dtype))
    except (MemoryError, RuntimeError, ValueError) as error:
        if isinstance(error, UnsupportedError) or not _is_about_memory(error):
            raise
        nbytes = itemsize_of(dtype)
        for dim in dims:
            nbytes *= dim
        raise OutOfMemoryError(f"{framework} has no {nbytes} bytes for shape {dims} of {dtype} on {like.device}: "
                               f"{error}") from error


cpdef object wrap(uintptr_t ptr, object shape, str dtype, Array like, object owner, bint readonly=False,
                  object strides=None):
    """An array of like's framework over memory that `owner` keeps alive, without a copy.

    Parameters
    ----------
    ptr : int
        Address of element [0, ..., 0], on like's device; anything when the shape has a 0.
    shape : tuple of int
    dtype : str
        Canonical name.
    like : Array
        An array of the framework wanted.
    owner : object
        Released when the last array, view or tensor over the memory dies.
    readonly : bool
        Kept by NumPy; torch and CuPy have no such flag and ignore it.
    strides : tuple of int, optional
        In bytes, not negative; C order by default.
    """
    dims = _shape(shape)
    dtype = canonical_dtype(dtype)
    dt = _numpy_dtype(dtype)
    steps = _c_strides(dims, dt.itemsize) if strides is None else tuple([_index(step) for step in strides])
    if len(steps) != len(dims) or (steps and min(steps) < 0):
        raise InvalidArgumentError(f"strides={strides!r}: expected {len(dims)} of them, none negative")
    nbytes = dt.itemsize
    for dim, step in zip(dims, steps):
        nbytes = 0 if dim == 0 or nbytes == 0 else nbytes + (dim - 1) * step
    framework = _framework(like)
    if framework == "torch":
        return _wrap_torch(ptr, dims, dtype, dt, steps, nbytes, owner, like)
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        memory = cupy.cuda.UnownedMemory(ptr, nbytes, owner, int(like.device[5:]))
        return cupy.ndarray(dims, dtype=_cupy_dtype(cupy, dtype), memptr=cupy.cuda.MemoryPointer(memory, 0),
                            strides=steps)
    return _ndarray(dims, dt, Memory(ptr, nbytes, owner, readonly), 0, steps)


cpdef object as_numpy(Array array):
    """NumPy array over the same host memory with the same strides; it keeps the exporter alive."""
    if array.device != "cpu":
        raise InvalidArgumentError(f"device={array.device}: expected host memory")
    if array.kind == "numpy":
        return array.owner.view(_ndarray)
    low = 0
    high = array.itemsize
    for dim, step in zip(array.shape, array.strides, strict=True):
        if step < 0:
            low += (dim - 1) * step
        else:
            high += (dim - 1) * step
    if array.size == 0:
        low = high = 0
    memory = Memory(array.ptr + low, high - low, array, array.readonly)
    return _ndarray(array.shape, _numpy_dtype(array.dtype), memory, -low, array.strides)


cdef bint _is_about_memory(object error):
    """Whether NumPy or torch said that there is not so much memory."""
    text = str(error)
    for word in ("memory", "too big", "overflow", "exceeded"):
        if word in text:
            return True
    return isinstance(error, MemoryError)


cdef str _framework(Array like):
    """Whose arrays to make for like: "numpy", "torch" or "cupy"."""
    if like.kind in ("numpy", "torch", "cupy"):
        return like.kind
    if like.device == "cpu":
        return "numpy"
    for name in ("cupy", "torch"):
        if sys.modules.get(name) is not None:
            return name
    raise UnsupportedError(f"an array of kind {like.kind} on {like.device} gets its results as CuPy or torch arrays: "
                           "import one of them first")


cdef object _torch_dtype(object torch, str dtype):
    found = getattr(torch, dtype, None)
    if type(found).__name__ != "dtype":
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {dtype}")
    return found


cdef object _cupy_dtype(object cupy, str dtype):
    dt = _numpy_dtype(dtype)
    if dt.kind == "V":
        try:
            cupy.dtype(dt)
        except Exception as error:
            raise UnsupportedError(f"CuPy {cupy.__version__} has no dtype {dtype}: {error}") from error
    return dt


class _CudaFace:
    """GPU memory as torch takes it: numbers of the same width, since the interface has no bfloat16 and no fp8."""

    __slots__ = ("__cuda_array_interface__", "owner")

    def __init__(self, ptr, shape, itemsize, strides, owner):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 2, "shape": shape, "strides": strides, "data": (ptr, False),
            "typestr": "|u1" if itemsize == 1 else f"<c{itemsize}" if itemsize == 16 else f"<i{itemsize}",
        }


cdef object _wrap_torch(uintptr_t ptr, tuple dims, str dtype, object dt, tuple steps, Py_ssize_t nbytes, object owner,
                        Array like):
    torch = sys.modules["torch"]
    torch_dtype = _torch_dtype(torch, dtype)
    cdef Py_ssize_t itemsize = dt.itemsize
    for step in steps:
        if step % itemsize:
            raise UnsupportedError(f"torch has no strides {steps} of {itemsize}-byte elements: not a whole number of them")
    if like.device != "cpu":
        # An empty array has no memory to look up, so the device is told.
        face = _CudaFace(ptr if nbytes else 0, dims, itemsize, None if not nbytes else steps, owner)
        return torch.as_tensor(face, device=like.device).view(torch_dtype)
    if nbytes == 0:
        # frombuffer refuses zero bytes; one element of padding carries the owner.
        pad = Memory(0, 0, owner)
        pad.ptr = <uintptr_t>pad._pad
        pad.nbytes = itemsize
        return torch.frombuffer(pad, dtype=torch_dtype)[:0].view(dims)
    flat = torch.frombuffer(Memory(ptr, nbytes, owner), dtype=torch_dtype)
    if steps == _c_strides(dims, itemsize):
        return flat.view(dims)
    return flat.as_strided(dims, [step // itemsize for step in steps])
