"""DLPack as a consumer: the structs byte by byte, each flag and version, and one call of the deleter, always."""

import ctypes
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import _arrays
from epcomm.errors import InvalidArgumentError

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
pytestmark = pytest.mark.timeout(60)


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    _fields_ = (("dl_tensor", Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager_ctx", ctypes.c_void_p),
        ("deleter", DELETER), ("flags", ctypes.c_uint64), ("dl_tensor", Tensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype, capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
CODES_BY_NAME = {
    "bfloat16": 4, "float8_e3m4": 7, "float8_e4m3": 8, "float8_e4m3b11fnuz": 9, "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13, "float8_e8m0fnu": 14,
}


class Exporter:
    """An array known by DLPack only. Any field may be told otherwise; ``deleted`` counts the deleter's calls."""

    def __init__(self, array, versioned=True, deleter=True, **fields):
        self.array, self.versioned, self.with_deleter, self.fields = array, versioned, deleter, fields
        self.deleted, self.capsules, self.calls, self.kept = 0, [], [], []

    def __dlpack_device__(self):
        return self.fields.get("device", (1, 0))

    def __dlpack__(self, **keywords):
        self.calls.append(keywords)
        x, told = self.array, self.fields
        ndim = told.get("ndim", x.ndim)
        shape = (ctypes.c_int64 * x.ndim)(*told.get("shape", x.shape))
        steps = told.get("strides", [step // x.itemsize for step in x.strides])
        strides = None if steps is None else (ctypes.c_int64 * x.ndim)(*steps)
        dtype = told.get("dtype", (CODES_BY_NAME.get(x.dtype.name, CODES.get(x.dtype.kind)), 8 * x.itemsize, 1))
        offset = told.get("byte_offset", 0)
        data = told.get("data", x.ctypes.data - offset)
        tensor = Tensor(data, Device(*told.get("capsule_device", self.__dlpack_device__())), ndim, DataType(*dtype),
                        None if told.get("no_shape") else shape, strides, offset)

        def delete(address):
            assert address == ctypes.addressof(managed)
            self.deleted += 1

        deleter = DELETER(delete) if self.with_deleter else DELETER()
        if self.versioned:
            major, minor = told.get("version", (1, 0))
            managed = Versioned(major, minor, None, deleter, told.get("flags", 0), tensor)
        else:
            managed = Legacy(tensor, None, deleter)
        self.kept.append((managed, shape, strides, deleter))
        name = told.get("name", b"dltensor_versioned" if self.versioned else b"dltensor")
        self.capsules.append(new_capsule(ctypes.addressof(managed), name, None))
        return self.capsules[-1]


BOTH = pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "legacy"])


@BOTH
@pytest.mark.parametrize("dtype", [
    *"?bBhHiIlLefdFD", *(name for name in CODES_BY_NAME if hasattr(ml_dtypes, name)),
])
def test_dtypes_and_one_deletion(versioned, dtype):
    x = np.ones((3, 4), getattr(ml_dtypes, dtype, dtype))
    exporter = Exporter(x, versioned)
    found = _arrays.view(exporter, "x")
    assert (found.dtype, found.itemsize) == (x.dtype.name, x.itemsize)
    assert (found.ptr, found.shape, found.strides) == (x.ctypes.data, x.shape, x.strides)
    assert (found.kind, found.device, found.readonly, found.owner) == ("dlpack", "cpu", False, exporter)
    assert capsule_name(exporter.capsules[0]) == (b"used_dltensor_versioned" if versioned else b"used_dltensor")
    y = _arrays.as_numpy(found)
    z = y[1:]
    assert y.dtype == x.dtype and np.shares_memory(x, y)
    del found, y
    assert exporter.deleted == 0
    del z
    assert exporter.deleted == 1


@BOTH
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_no_strides_means_c_order(versioned, shape):
    x = np.zeros(shape, np.float32)
    found = _arrays.view(Exporter(x, versioned, strides=None), "x")
    assert (found.shape, found.contiguous()) == (shape, True)
    assert found.strides == x.strides or x.size == 0  # NumPy's choice for these differs by version


@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_strides_and_byte_offset(data, versioned):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    x = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    x = x[(..., *(slice(None, None, data.draw(st.sampled_from([1, 2, -1, -2]))) for _ in shape))]
    x = x.transpose(data.draw(st.permutations(range(x.ndim))))
    exporter = Exporter(x, versioned, byte_offset=data.draw(st.integers(0, 9)))
    found = _arrays.view(exporter, "x")
    assert (found.ptr, found.strides) == (x.ctypes.data, x.strides)
    assert (_arrays.as_numpy(found) == x).all()
    assert found.contiguous() == x.flags.c_contiguous


@pytest.mark.parametrize("flags, readonly", [(0, False), (1, True), (2, True), (3, True), (4, False), (1 << 40, False)])
def test_flags(flags, readonly):
    found = _arrays.view(Exporter(np.zeros(3), flags=flags), "x")
    assert found.readonly == readonly
    assert _arrays.as_numpy(found).flags.writeable == (not readonly)


def test_no_deleter():
    for versioned in (True, False):
        exporter = Exporter(np.zeros(3), versioned, deleter=False)
        assert _arrays.as_numpy(_arrays.view(exporter, "x")).tolist() == [0, 0, 0]
        assert exporter.deleted == 0


@BOTH
@pytest.mark.parametrize("fields, word", [
    ({"dtype": (2, 32, 4)}, "4 lanes"), ({"dtype": (17, 4, 1)}, "code 17"), ({"dtype": (3, 64, 1)}, "code 3"),
    ({"dtype": (0, 4, 1)}, "4 bits"), ({"dtype": (2, 128, 1)}, "128 bits"), ({"dtype": (200, 8, 1)}, "code 200"),
    ({"capsule_device": (7, 0)}, "device type 7"), ({"ndim": -1}, "-1 dimensions"), ({"no_shape": True}, "shape"),
    ({"shape": (-1, 2)}, "negative"), ({"data": None}, "null data"), ({"shape": (1 << 40, 1 << 40)}, "farther"),
    ({"strides": (1 << 60, 1)}, "farther"),
])
def test_refusals_delete_once(versioned, fields, word):
    exporter = Exporter(np.zeros((2, 3)), versioned, **fields)
    with pytest.raises(InvalidArgumentError, match=rf"x: .*Exporter: .*{word}"):
        _arrays.view(exporter, "x")
    assert exporter.deleted == 1


@pytest.mark.parametrize("version", [(2, 0), (0, 8)])
def test_another_abi_is_refused_and_deleted(version):
    exporter = Exporter(np.zeros(3), version=version)
    with pytest.raises(InvalidArgumentError, match=f"version {version[0]}.{version[1]}"):
        _arrays.view(exporter, "x")
    assert exporter.deleted == 1


def test_a_newer_minor_version_is_taken():
    assert _arrays.view(Exporter(np.zeros(3), version=(1, 9)), "x").size == 3


@pytest.mark.parametrize("name", [b"used_dltensor", b"used_dltensor_versioned", b"other"])
def test_used_or_foreign_capsules_are_left_alone(name):
    exporter = Exporter(np.zeros(3), name=name)
    with pytest.raises(InvalidArgumentError, match="capsule"):
        _arrays.view(exporter, "x")
    assert exporter.deleted == 0


def test_the_same_capsule_twice_is_refused():
    class Once(Exporter):
        def __dlpack__(self, **keywords):
            return self.capsules[0] if self.capsules else super().__dlpack__(**keywords)

    exporter = Once(np.zeros(3))
    found = _arrays.view(exporter, "x")
    with pytest.raises(InvalidArgumentError, match="capsule"):
        _arrays.view(exporter, "x")
    assert exporter.deleted == 0
    del found
    assert exporter.deleted == 1


def test_exporters_from_before_versions_get_no_keyword():
    class Old:
        exporter = Exporter(np.zeros(3), versioned=False)
        __dlpack_device__ = exporter.__dlpack_device__

        def __dlpack__(self, stream=None):
            return self.exporter.__dlpack__()

    assert _arrays.view(Old(), "x").size == 3


@pytest.mark.parametrize("device_type, stream, told", [
    (1, None, None), (1, 5, None), (3, 5, None), (2, None, None), (2, 0, 1), (2, 5, 5), (13, 7, 7), (10, 7, 7),
])
def test_devices_and_streams(device_type, stream, told):
    exporter = Exporter(np.zeros(3), device=(device_type, 4))
    found = _arrays.view(exporter, "x", stream)
    assert found.device == ("cpu" if device_type in (1, 3, 11) else "cuda:4")
    assert exporter.calls == [{"max_version": (1, 1)} if told is None else {"max_version": (1, 1), "stream": told}]
    if found.device != "cpu":
        with pytest.raises(InvalidArgumentError, match="cuda:4"):
            _arrays.as_numpy(found)


def test_a_device_that_cannot_be_used_is_refused_before_the_export():
    exporter = Exporter(np.zeros(3), device=(8, 0))
    with pytest.raises(InvalidArgumentError, match="device type 8"):
        _arrays.view(exporter, "x")
    assert exporter.calls == []


@pytest.mark.parametrize("error", [BufferError("no"), RuntimeError("no"), TypeError("no"), ZeroDivisionError("no")])
def test_an_exporter_that_raises(error):
    class Broken:
        def __dlpack__(self, **keywords):
            raise error

    with pytest.raises(InvalidArgumentError, match=f"x: .*Broken: .*{type(error).__name__}: no") as caught:
        _arrays.view(Broken(), "x")
    assert caught.value.__cause__ is error


def test_another_protocol_is_taken_where_dlpack_refuses():
    class Both(bytearray):
        def __dlpack__(self, **keywords):
            raise BufferError("read-only")

    found = _arrays.view(Both(b"abc"), "x")
    assert (found.kind, found.size) == ("buffer", 3)


def test_interrupts_pass_through():
    class Interrupted:
        def __dlpack__(self, **keywords):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _arrays.view(Interrupted(), "x")


class Only:
    """Another library's array with nothing but its DLPack methods."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_numpy_as_an_exporter():
    for x in (np.arange(12).reshape(3, 4)[::2, ::-1], np.zeros((0, 3)), np.full((), 3.0)):
        found = _arrays.view(Only(x), "x")
        assert (_arrays.as_numpy(found) == x).all() and found.strides == x.strides
    x = np.arange(3)
    x.flags.writeable = False
    assert _arrays.view(Only(x), "x").readonly


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64", "bool", "float8_e4m3fn"])
def test_torch_as_an_exporter(dtype):
    t = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)).T
    found = _arrays.view(Only(t), "x")
    assert (found.dtype, found.ptr, found.shape, found.kind) == (dtype, t.data_ptr(), (4, 3), "dlpack")


def test_many_exports_in_many_threads():
    exporters = [Exporter(np.arange(4), versioned=i % 2 == 0) for i in range(64)]
    failures = []

    def work(part):
        for exporter in part:
            if _arrays.as_numpy(_arrays.view(exporter, "x")).tolist() != [0, 1, 2, 3]:
                failures.append(exporter)

    threads = [threading.Thread(target=work, args=(exporters[i::4],), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not failures and [exporter.deleted for exporter in exporters] == [1] * 64
