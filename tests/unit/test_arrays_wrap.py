"""Giving arrays back in the caller's kind: new memory, and memory that an owner keeps alive."""

import gc
import sys
import threading
import types
import weakref

import numpy as np
import pytest
from helpers import arrays as kinds

from epcomm import _arrays
from epcomm.errors import InternalError, InvalidArgumentError, OutOfMemoryError, UnsupportedError

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
pytestmark = pytest.mark.timeout(60)
KINDS = ["numpy", pytest.param("torch", marks=needs_torch), "dlpack", "buffer"]
DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float16", "bool", "uint8", "int32", "int64",
          "uint16", "complex128"]


class Owner:
    """Something with a lifetime to watch."""


def like(kind):
    return _arrays.view(kinds.to_kind(np.zeros(1), kind), "x")


def owned():
    owner = Owner()
    return owner, weakref.ref(owner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (0, 4), (3, 0)])
def test_wrap_keeps_the_owner_until_the_last_view_dies(kind, dtype, shape):
    base = np.zeros(128, np.uint8)
    owner, alive = owned()
    y = _arrays.wrap(base.ctypes.data, shape, dtype, like(kind), owner)
    del owner
    assert kinds.is_kind(y, kind)
    found = _arrays.view(y, "y")
    assert (found.shape, found.dtype, found.readonly) == (shape, dtype, False)
    assert found.contiguous() and (found.size == 0 or found.ptr == base.ctypes.data)
    z = y.reshape(-1)[:1]
    del y, found
    assert alive() is not None
    again = _arrays.view(z, "z")
    del z
    assert alive() is not None
    del again
    assert alive() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_wrap_is_no_copy_and_writable(kind, dtype):
    base = np.zeros(12, kinds.dtype_of(dtype))
    y = _arrays.wrap(base.ctypes.data, (3, 4), dtype, like(kind), base)
    y[1] = 5
    assert base.tolist() == [0, 0, 0, 0, 5, 5, 5, 5, 0, 0, 0, 0]
    base[0] = 7
    assert float(y[0, 0]) == 7


def test_wrap_readonly():
    base = np.zeros(4)
    y = _arrays.wrap(base.ctypes.data, (4,), "float64", like("numpy"), base, readonly=True)
    assert not y.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE|writeable"):
        y.flags.writeable = True
    assert _arrays.view(y, "y").readonly


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, columns, pitch", [("bfloat16", 7, 16), ("float8_e4m3fn", 3, 16), ("float32", 5, 32)])
def test_wrap_with_padded_rows(kind, dtype, columns, pitch):
    raw = np.zeros(4 * pitch, np.uint8)
    owner, alive = owned()
    itemsize = kinds.dtype_of(dtype).itemsize
    y = _arrays.wrap(raw.ctypes.data, (4, columns), dtype, like(kind), owner, strides=(pitch, itemsize))
    del owner
    y[...] = 1
    expected = np.zeros((4, pitch // itemsize), kinds.dtype_of(dtype))
    expected[:, :columns] = 1
    assert (raw == kinds.bits(expected).view(np.uint8).ravel()).all()
    found = _arrays.view(y, "y")
    assert found.strides == (pitch, itemsize) and found.rows_contiguous() and not found.contiguous()
    del y, found
    assert alive() is None


@pytest.mark.parametrize("kind", KINDS)
def test_wrap_with_a_broadcast_stride_and_no_rows(kind):
    base = np.arange(3.0)
    y = _arrays.wrap(base.ctypes.data, (4, 3), "float64", like(kind), base, strides=(0, 8))
    assert np.asarray(y).tolist() == [[0, 1, 2]] * 4
    y = _arrays.wrap(0, (0, 3), "float64", like(kind), base, strides=(64, 8))
    assert tuple(y.shape) == (0, 3)


def test_wrap_refusals():
    base = np.zeros(4)
    to = like("numpy")
    with pytest.raises(InvalidArgumentError, match="float7"):
        _arrays.wrap(base.ctypes.data, (4,), "float7", to, base)
    for strides in [(8, 8), (-8,)]:
        with pytest.raises(InvalidArgumentError, match="strides"):
            _arrays.wrap(base.ctypes.data, (4,), "float64", to, base, strides=strides)
    for shape in [(-1,), (2.5,), "ab", None]:
        with pytest.raises(InvalidArgumentError, match="shape"):
            _arrays.wrap(base.ctypes.data, shape, "float64", to, base)
    with pytest.raises(InvalidArgumentError, match="ptr=0x0"):
        _arrays.wrap(0, (4,), "float64", to, base)


@needs_torch
def test_wrap_refuses_what_torch_cannot_say():
    base = np.zeros(64, np.uint8)
    with pytest.raises(UnsupportedError, match="strides"):
        _arrays.wrap(base.ctypes.data, (2, 3), "int32", like("torch"), base, strides=(15, 4))
    for dtype in (">i4", "float8_e3m4"):
        with pytest.raises(UnsupportedError, match=dtype):
            _arrays.wrap(base.ctypes.data, (2,), dtype, like("torch"), base)
        with pytest.raises(UnsupportedError, match=dtype):
            _arrays.empty((2,), dtype, like("torch"))


@needs_torch
def test_the_owner_follows_every_way_out_of_torch():
    base = np.arange(6, dtype=np.float32)
    ways = {
        "numpy": lambda t: t.numpy(),
        "storage": lambda t: t.untyped_storage(),
        "view": lambda t: t.view(torch.int32).T[1:],
        "detach": lambda t: t.detach(),
        "dlpack": lambda t: torch.from_dlpack(t),
        "memoryview": lambda t: memoryview(t.numpy()),
        "autograd": lambda t: (t.requires_grad_() * 2).grad_fn,
        "list": lambda t: t.unbind(),
    }
    for name, way in ways.items():
        owner, alive = owned()
        t = _arrays.wrap(base.ctypes.data, (2, 3), "float32", like("torch"), owner)
        del owner
        kept = way(t)
        del t
        assert name == "autograd" or alive() is not None, name
        del kept
        assert alive() is None, name


def test_the_owner_follows_every_way_out_of_numpy():
    base = np.arange(6, dtype=np.float32)
    for way in (lambda x: x.T[1:], memoryview, np.asarray, lambda x: x.view(np.int32), lambda x: x.flat,
                lambda x: x[:0], lambda x: np.lib.stride_tricks.as_strided(x, (3,), (0,)), kinds.DLPackExporter):
        owner, alive = owned()
        kept = way(_arrays.wrap(base.ctypes.data, (2, 3), "float32", like("numpy"), owner))
        del owner
        assert alive() is not None
        del kept
        assert alive() is None


def test_the_owner_is_freed_on_whatever_thread_drops_the_last_view():
    base = np.arange(6, dtype=np.float32)
    for kind in ("numpy", "torch") if torch is not None else ("numpy",):
        owner, alive = owned()
        held = [_arrays.wrap(base.ctypes.data, (2, 3), "float32", like(kind), owner)]
        del owner
        thread = threading.Thread(target=held.clear, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive() and alive() is None


@needs_torch
def test_torch_modes_do_not_change_what_wrap_and_empty_give():
    base = np.arange(6, dtype=np.float32)
    to = like("torch")
    with torch.device("meta"), torch.inference_mode():
        y = _arrays.wrap(base.ctypes.data, (2, 3), "float32", to, base)
        none = _arrays.wrap(0, (0, 3), "bfloat16", to, base)
        new = _arrays.empty((2, 3), "bfloat16", to)
    assert y.device.type == none.device.type == new.device.type == "cpu"
    assert y.data_ptr() == base.ctypes.data and not y.requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), 5, np.int64(2)])
def test_empty(kind, dtype, shape):
    y = _arrays.empty(shape, dtype, like(kind))
    assert kinds.is_kind(y, kind)
    found = _arrays.view(y, "y")
    assert (found.dtype, found.contiguous(), found.readonly) == (dtype, True, False)
    assert found.shape == (shape if isinstance(shape, tuple) else (int(shape),))
    z = _arrays.as_numpy(_arrays.view(_arrays.empty(shape, dtype, like(kind), zero=True), "z"))
    assert not any(z.tobytes())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1 << 60,), (1 << 70,), (1 << 40, 1 << 40), (1 << 46,)])
def test_empty_out_of_memory(kind, shape):
    size = 4 * int(np.prod(shape, dtype=object))
    with pytest.raises(OutOfMemoryError, match=str(size)):
        _arrays.empty(shape, "float32", like(kind))


def test_memory():
    base = np.arange(8, dtype=np.uint8)
    memory = _arrays.Memory(base.ctypes.data, 8, base)
    raw = memoryview(memory)
    assert (raw.format, raw.shape, raw.readonly, raw.tobytes()) == ("B", (8,), False, bytes(range(8)))
    assert bytes(memory) == bytes(range(8)) and bytearray(memory)[7] == 7
    assert memory.owner is base and memory.ptr == base.ctypes.data and memory.nbytes == 8
    assert memoryview(_arrays.Memory(base.ctypes.data, 8, base, True)).readonly
    assert len(memoryview(_arrays.Memory(0, 0))) == 0
    for ptr, nbytes in [(0, 1), (64, -1)]:
        with pytest.raises(InvalidArgumentError, match=f"nbytes={nbytes}"):
            _arrays.Memory(ptr, nbytes)
    found = _arrays.view(memory, "x")
    assert (found.kind, found.ptr, found.size, found.dtype) == ("buffer", base.ctypes.data, 8, "uint8")


def test_a_cycle_through_memory_is_collected():
    owner, alive = owned()
    owner.memory = _arrays.Memory(0, 0, owner)
    del owner
    gc.collect()
    assert alive() is None


# GPU frameworks, by modules that stand for them: what is asked of them is what their documentation takes.


class FakeCupyArray:
    """cupy.ndarray as far as it is used; its memory is the host's."""

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        self.dtype = np.dtype(dtype)
        self.kept = memptr.mem.owner if memptr is not None else np.zeros(shape, dtype)
        address = memptr.ptr if memptr is not None else self.kept.ctypes.data
        self.data = types.SimpleNamespace(ptr=address)
        self.shape = tuple(shape)
        self.strides = tuple(strides) if strides is not None else np.empty(shape, dtype).strides
        self.device = types.SimpleNamespace(id=memptr.mem.device_id if memptr is not None else FakeCupyArray.current)


FakeCupyArray.current = 0


class FakeDevice:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        self.before, FakeCupyArray.current = FakeCupyArray.current, self.index

    def __exit__(self, *error):
        FakeCupyArray.current = self.before


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")
    module.ndarray = FakeCupyArray
    module.empty = lambda shape, dtype: FakeCupyArray(shape, dtype)
    module.zeros = lambda shape, dtype: FakeCupyArray(shape, dtype)
    module.cuda = types.SimpleNamespace(
        Device=FakeDevice,
        UnownedMemory=lambda ptr, size, owner, device_id=-1: types.SimpleNamespace(
            ptr=ptr, size=size, owner=owner, device_id=device_id),
        MemoryPointer=lambda mem, offset: types.SimpleNamespace(ptr=mem.ptr + offset, mem=mem),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int64"])
def test_cupy(cupy, dtype):
    with FakeDevice(3):
        x = cupy.empty((4, 6), kinds.dtype_of(dtype))
    found = _arrays.view(x, "x")
    assert (found.ptr, found.shape, found.strides) == (x.data.ptr, (4, 6), x.strides)
    assert (found.dtype, found.kind, found.device, found.readonly) == (dtype, "cupy", "cuda:3", False)
    new = _arrays.empty((2, 3), dtype, found, zero=True)
    assert isinstance(new, cupy.ndarray) and new.device.id == 3 and new.shape == (2, 3)
    owner, alive = owned()
    lease = _arrays.wrap(0x1000, (2, 3), dtype, found, owner, strides=(16, kinds.dtype_of(dtype).itemsize))
    del owner
    again = _arrays.view(lease, "x")
    assert (again.ptr, again.shape, again.dtype, again.device) == (0x1000, (2, 3), dtype, "cuda:3")
    assert again.strides[0] == 16
    del lease, again
    assert alive() is None


def test_cupy_without_a_dtype(cupy):
    def no_dtype(*args, **keywords):
        raise ValueError("Unsupported dtype bfloat16")

    found = _arrays.view(cupy.empty((4,), np.float32), "x")
    cupy.empty = cupy.ndarray = no_dtype
    for make in (lambda: _arrays.empty((2,), "bfloat16", found),
                 lambda: _arrays.wrap(8, (2,), "bfloat16", found, None)):
        with pytest.raises(UnsupportedError, match="cupy.*bfloat16"):
            make()


def gpu_like(device=(2, 1)):
    exporter = kinds.DLPackExporter(np.zeros(1, np.float32), 2)
    exporter._device = device
    return _arrays.view(exporter, "x")


def test_a_gpu_protocol_gets_cupy_arrays(cupy):
    lease = _arrays.wrap(0x1000, (2, 3), "float32", gpu_like(), None)
    assert isinstance(lease, cupy.ndarray) and lease.device.id == 1
    assert isinstance(_arrays.empty((2,), "float32", gpu_like()), cupy.ndarray)


def test_a_gpu_protocol_without_a_framework(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    for make in (lambda: _arrays.empty((2,), "float32", gpu_like()),
                 lambda: _arrays.wrap(8, (2,), "float32", gpu_like(), None)):
        with pytest.raises(UnsupportedError, match="cuda:1.*CuPy or torch"):
            make()


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_torch_on_a_gpu_gets_an_interface_of_plain_numbers(monkeypatch, dtype, shape):
    """torch takes bfloat16 and fp8 by the interface only as numbers of their width."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    base = np.zeros(16, np.complex128)
    asked = []

    def as_tensor(face, device):
        told = face.__cuda_array_interface__
        asked.append((told, device))
        if 0 in told["shape"]:
            assert told["data"] == (0, False)
            return torch.from_numpy(np.zeros(told["shape"], told["typestr"]))
        raw = _arrays.as_numpy(_arrays.view(_arrays.Memory(told["data"][0], base.nbytes, face), "x"))
        return torch.from_numpy(np.ndarray(told["shape"], told["typestr"], raw, strides=told["strides"]))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    owner, alive = owned()
    y = _arrays.wrap(base.ctypes.data, shape, dtype, gpu_like(), owner)
    assert y.dtype is getattr(torch, dtype) and tuple(y.shape) == shape
    assert [device for _, device in asked] == ["cuda:1"]
    assert np.dtype(asked[0][0]["typestr"]).itemsize == kinds.dtype_of(dtype).itemsize
    asked.clear()
    del owner
    assert 0 in shape or alive() is not None
    del y
    assert alive() is None


@needs_torch
def test_a_silent_copy_by_torch_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch, "as_tensor", lambda face, device: torch.zeros(2, 3))
    with pytest.raises(InternalError, match="copied"):
        _arrays.wrap(0x1000, (2, 3), "float32", gpu_like(), None)


@needs_torch
def test_gpu_memory_that_torch_cannot_take(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this torch has a GPU")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match="0x1000 on cuda:1"):
        _arrays.wrap(0x1000, (2, 3), "float32", gpu_like(), None)
