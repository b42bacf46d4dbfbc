"""Any array: address, shape, strides, dtype, device, owner; and new arrays of the caller's framework.

NumPy and ml_dtypes are the only imports. torch and CuPy are found through ``sys.modules``: an array of theirs can
only exist once its module has been imported by somebody else.
"""

import operator
import sys

import numpy as np

from epcomm._dtypes import DLPACK_NAMES, DTYPES, NAMES, canonical_dtype, itemsize_of, name_of, numpy_dtype, of_buffer
from epcomm.errors import InternalError, InvalidArgumentError, OutOfMemoryError, UnsupportedError

from cpython.buffer cimport (PyBUF_FORMAT, PyBUF_ND, PyBUF_RECORDS_RO, PyBUF_STRIDES, PyBUF_WRITABLE,
                             PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer)
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport INT64_MAX, int64_t, uintptr_t

from epcomm._dlpack cimport Consumed, DLTensor, device_of, export


cdef extern from *:
    """
    // numpy/ndarraytypes.h, PyArrayInterface: the struct behind __array_struct__, fixed since 2005.
    typedef struct {
        int two, ndim;
        char typekind;
        int itemsize, flags;
        Py_intptr_t *shape, *strides;
        void *data;
        PyObject *descr;
    } EpcommArrayInterface;
    """
    ctypedef struct ArrayInterface "EpcommArrayInterface":
        int two
        int ndim
        int itemsize
        int flags
        Py_ssize_t* shape
        Py_ssize_t* strides
        void* data


cdef enum:
    WRITEABLE = 0x400  # NPY_ARRAY_WRITEABLE

cdef const char* BYTES = "B"
cdef dict _DTYPES = DTYPES
cdef dict _NAMES = NAMES
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
        if self.readonly and flags & PyBUF_WRITABLE:
            raise BufferError("this memory is read-only")
        buffer.buf = <void*>self.ptr if self.nbytes else <void*>self._pad
        buffer.len = self.nbytes
        buffer.itemsize = 1
        buffer.readonly = self.readonly
        buffer.ndim = 1
        buffer.format = NULL
        buffer.shape = NULL
        buffer.strides = NULL
        buffer.suboffsets = NULL
        buffer.internal = NULL
        if flags & PyBUF_FORMAT:
            buffer.format = <char*>BYTES
        if flags & PyBUF_ND:
            buffer.shape = &buffer.len
        if flags & PyBUF_STRIDES == PyBUF_STRIDES:
            buffer.strides = &buffer.itemsize
        buffer.obj = self


cdef class _Buffer:
    """A buffer taken from an exporter, given back when the last array over it dies."""

    cdef Py_buffer raw
    cdef bint taken

    def __dealloc__(self):
        if self.taken:
            PyBuffer_Release(&self.raw)


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

    cpdef bint aligned(self):
        """Every element lies at a multiple of its size, as GPUs want it."""
        cdef int64_t bits = <int64_t>self.ptr
        cdef int i
        for i in range(self.ndim):
            bits |= <int64_t>self.strides[i]
        return bits & ((self.itemsize & -self.itemsize) - 1) == 0

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
    """Shape and byte strides as an exporter tells them; a ValueError if they are no array's."""
    if len(strides) != len(shape):
        raise ValueError(f"shape {shape} but strides {strides}")
    size = 1
    reach = 0
    for dim, step in zip(shape, strides):
        if dim < 0:
            raise ValueError(f"shape {shape} has a negative dimension")
        size *= dim
        reach += dim * abs(step)
    if max(size * array.itemsize, reach) > INT64_MAX:
        raise ValueError(f"shape {shape} and strides {strides} reach farther than any memory")
    array.shape = shape
    array.strides = strides
    array.ndim = <int>len(shape)
    array.size = size
    return 0


cdef int _set_ptr(Array array, uintptr_t ptr, uintptr_t offset=0) except -1:
    """The address; only an array without elements may have none."""
    if ptr == 0 and array.size != 0:
        raise ValueError(f"shape {array.shape} with a null data pointer")
    array.ptr = ptr + offset if ptr != 0 else 0
    return 0


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
    dtype = _NAMES.get(obj.dtype)
    if dtype is None:
        try:
            dtype = name_of(obj.dtype)
        except TypeError as error:
            raise _refuse(name, obj, str(error)) from None
    array.dtype = dtype
    array.kind = "numpy"
    array.device = "cpu"
    array.ptr = <uintptr_t>raw.data
    array.itemsize = raw.itemsize
    array.ndim = raw.ndim
    array.readonly = not raw.flags & WRITEABLE
    array.shape = tuple([raw.shape[i] for i in range(raw.ndim)])
    array.strides = tuple([raw.strides[i] for i in range(raw.ndim)])
    array.size = 1
    for i in range(raw.ndim):
        array.size *= raw.shape[i]
    return 0


cdef dict _torch_names = {}  # torch dtype -> canonical name
cdef list _cuda_names = [f"cuda:{index}" for index in range(16)]


cdef int _from_torch(Array array, object tensor, str name, object torch) except -1:
    # In every call of torch users: each attribute of a tensor costs about a tenth of a microsecond.
    cdef int64_t step
    cdef int index
    cdef bint lazy = False
    try:
        dtype = tensor.dtype
        known = _torch_names.get(dtype)
        if known is None:
            known = str(dtype)[6:]
            if known not in _DTYPES:
                raise _refuse(name, tensor, f"dtype {dtype}: no NumPy or ml_dtypes type has this layout")
            _torch_names[dtype] = known
        array.dtype = known
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
            index = device.index
            array.device = _cuda_names[index] if index < 16 else f"cuda:{index}"
        array.requires_grad = tensor.requires_grad and torch.is_grad_enabled()
        if tensor.is_conj() or tensor.is_neg():
            # The memory holds other numbers than the tensor. What is written to the copy would be lost.
            lazy = True
            tensor = tensor.detach().resolve_conj().resolve_neg()
            array._hold = tensor
        array.itemsize = step = <int>_DTYPES[array.dtype].itemsize
        _set_shape(array, tuple(tensor.shape), tuple([step * <int64_t>stride for stride in tensor.stride()]))
        _set_ptr(array, tensor.data_ptr())
    except InvalidArgumentError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:  # fake, functional and wrapped tensors
        raise _refuse(name, tensor, f"no memory behind this tensor: {error}") from error
    array.kind = "torch"
    array.readonly = lazy
    return 0


cdef int _from_cupy(Array array, object obj) except -1:
    cdef object dt = obj.dtype
    array.dtype = name_of(dt)
    array.kind = "cupy"
    array.device = f"cuda:{_index(obj.device.id)}"
    array.itemsize = <int>dt.itemsize
    _set_shape(array, tuple(obj.shape), tuple(obj.strides))
    _set_ptr(array, obj.data.ptr)
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
    cdef Consumed taken = export(obj, stream)
    cdef DLTensor* tensor = taken.tensor
    array._hold = taken
    array.kind = "dlpack"
    array.device = device_of(tensor.device.device_type, tensor.device.device_id)
    array.readonly = taken.readonly()
    dtype = DLPACK_NAMES.get((tensor.dtype.code, tensor.dtype.bits))
    if dtype not in _DTYPES or tensor.dtype.lanes != 1:
        raise _refuse(name, obj, f"DLPack dtype code {tensor.dtype.code}, {tensor.dtype.bits} bits, "
                      f"{tensor.dtype.lanes} lanes: expected whole-byte numbers of one lane")
    array.dtype = dtype
    array.itemsize = tensor.dtype.bits // 8
    shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
    if tensor.strides == NULL:
        strides = _c_strides(shape, array.itemsize)
    else:
        strides = tuple([array.itemsize * <object>tensor.strides[i] for i in range(tensor.ndim)])
    _set_shape(array, shape, strides)
    _set_ptr(array, <uintptr_t>tensor.data, tensor.byte_offset)
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
        array.dtype = canonical_dtype(inner) if inner is not None else name_of(dt)
        if itemsize_of(array.dtype) != dt.itemsize:
            raise _refuse(name, obj, f"typestr {face['typestr']!r} and dtype {inner} differ in size")
    else:
        array.dtype = name_of(dt)
    array.itemsize = <int>dt.itemsize
    ptr, readonly = face["data"]
    array.readonly = bool(readonly)
    array.stream = face.get("stream")
    shape = tuple([_index(dim) for dim in face["shape"]])
    strides = face.get("strides")
    _set_shape(array, shape, _c_strides(shape, array.itemsize) if strides is None
               else tuple([_index(step) for step in strides]))
    _set_ptr(array, ptr or 0)
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
    dtype = of_buffer(obj, text, array.itemsize)
    if dtype is None:
        raise _refuse(name, obj, f"buffer format {text!r} of {array.itemsize}-byte elements is not plain bytes")
    array.dtype = dtype
    # Strides and shape may be left out by an exporter for C order and for one dimension.
    if hold.raw.shape != NULL:
        shape = tuple([hold.raw.shape[i] for i in range(hold.raw.ndim)])
    else:
        shape = (hold.raw.len // max(1, hold.raw.itemsize),) if hold.raw.ndim else ()
    if hold.raw.strides != NULL and hold.raw.shape != NULL:
        strides = tuple([hold.raw.strides[i] for i in range(hold.raw.ndim)])
    else:
        strides = _c_strides(shape, array.itemsize)
    _set_shape(array, shape, strides)
    _set_ptr(array, <uintptr_t>hold.raw.buf)
    return 0


cpdef Array kind_of(Array array):
    """An empty array of the same kind, dtype and device that keeps nobody's memory alive: something to be `like`."""
    cdef Array made = Array.__new__(Array)
    made.kind = array.kind
    made.dtype = array.dtype
    made.itemsize = array.itemsize
    made.device = array.device
    made.shape = made.strides = (0,)
    made.ndim = 1
    return made


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
    framework = framework_of(like)
    try:
        if framework == "torch":
            torch = sys.modules["torch"]
            make = torch.zeros if zero else torch.empty
            return make(dims, dtype=_torch_dtype(torch, dtype), device=like.device)
        if framework == "cupy":
            cupy = sys.modules["cupy"]
            make = cupy.zeros if zero else cupy.empty
            with cupy.cuda.Device(int(like.device[5:])):
                try:
                    return make(dims, dtype=numpy_dtype(dtype))
                except (TypeError, ValueError):  # its functions do not know fp8, its arrays do
                    bits = make(dims, dtype=f"u{itemsize_of(dtype)}")
                    return cupy.ndarray(dims, dtype=numpy_dtype(dtype), memptr=bits.data)
        return (np.zeros if zero else np.empty)(dims, dtype=numpy_dtype(dtype))
    except UnsupportedError:
        raise
    except (MemoryError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        if not _is_about_memory(error):
            raise UnsupportedError(f"{framework} cannot make an array of {dtype}: {error}") from error
        nbytes = itemsize_of(dtype)
        for dim in dims:
            nbytes *= dim
        raise OutOfMemoryError(f"{framework} has no {nbytes} bytes for shape {dims} of {dtype} on {like.device}: "
                               f"{error}") from error


cpdef int check_dtype(str dtype, Array like) except -1:
    """An UnsupportedError if like's framework cannot make arrays of a dtype."""
    if framework_of(like) == "torch":
        _torch_dtype(sys.modules["torch"], dtype)
    return 0


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
    dt = numpy_dtype(dtype)
    steps = _c_strides(dims, dt.itemsize) if strides is None else tuple([_index(step) for step in strides])
    if len(steps) != len(dims) or (steps and min(steps) < 0):
        raise InvalidArgumentError(f"strides={strides!r}: expected {len(dims)} of them, none negative")
    nbytes = dt.itemsize
    for dim, step in zip(dims, steps):
        nbytes = 0 if dim == 0 or nbytes == 0 else nbytes + (dim - 1) * step
    framework = framework_of(like)
    if framework == "torch":
        return _wrap_torch(ptr, dims, dtype, dt, steps, nbytes, owner, like)
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        memory = cupy.cuda.UnownedMemory(ptr, nbytes, owner, int(like.device[5:]))
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        try:
            return cupy.ndarray(dims, dtype=dt, memptr=pointer, strides=steps)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"cupy cannot make an array of {dtype}: {error}") from error
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
    return _ndarray(array.shape, numpy_dtype(array.dtype), memory, -low, array.strides)


cdef bint _is_about_memory(object error):
    """Whether a framework said that there is not so much memory."""
    text = str(error).lower()
    for word in ("memory", "too big", "too large", "overflow", "exceeded"):
        if word in text:
            return True
    return isinstance(error, MemoryError)


cpdef str framework_of(Array like):
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
            raise UnsupportedError(f"torch has no strides {steps} of {itemsize}-byte elements: expected whole elements")
    if like.device != "cpu":
        # An empty array has no memory to look up, so the device is told.
        face = _CudaFace(ptr if nbytes else 0, dims, itemsize, None if not nbytes else steps, owner)
        try:
            tensor = torch.as_tensor(face, device=like.device)
        except Exception as error:  # an AssertionError, for one, where torch has no CUDA
            raise UnsupportedError(f"torch cannot take memory at {ptr:#x} on {like.device}: {error}") from error
        if nbytes and tensor.data_ptr() != ptr:
            raise InternalError(f"torch copied memory at {ptr:#x} instead of wrapping it: it is not on {like.device}")
        return tensor.view(torch_dtype)
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
