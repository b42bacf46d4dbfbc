"""Resolving arrays of NumPy, torch, the buffer protocol and ``__cuda_array_interface__``; dtype names."""

import array as array_module
import contextlib
import ctypes
import gc
import mmap
import subprocess
import sys
import types
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest
from helpers import arrays as kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import _arrays, _dtypes
from epcomm.errors import InvalidArgumentError

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
pytestmark = pytest.mark.timeout(60)


def refused(obj, *words):
    """The text of the typed error for an array; it names the argument and the type."""
    with pytest.raises(InvalidArgumentError) as caught:
        _arrays.view(obj, "topk_idx")
    text = str(caught.value)
    assert text.startswith("topk_idx: ") and type(obj).__name__ in text
    for word in words:
        assert word in text, text
    return text


# NumPy


def naive_rows_contiguous(x):
    return x.ndim == 0 or x.size == 0 or x.shape[-1] == 1 or x.strides[-1] == x.itemsize


def same(x, found, kind="numpy"):
    """`found` is what NumPy says of x."""
    assert found.ptr == x.__array_interface__["data"][0] or x.size == 0
    assert (found.shape, found.strides) == (x.shape, x.strides)
    assert (found.dtype, found.itemsize) == (x.dtype.name, x.itemsize)
    assert (found.size, found.ndim, found.nbytes) == (x.size, x.ndim, x.nbytes)
    assert (found.device, found.kind, found.stream, found.requires_grad) == ("cpu", kind, None, False)
    assert found.contiguous() == x.flags.c_contiguous
    assert found.rows_contiguous() == naive_rows_contiguous(x)


@pytest.mark.parametrize("form", kinds.FORMS["numpy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int64", "bool"])
def test_numpy_forms(form, dtype):
    x = kinds.formed(np.ones((4, 6), kinds.dtype_of(dtype)), form)
    found = _arrays.view(x, "x")
    same(x, found)
    assert found.readonly == (not x.flags.writeable)
    assert found.owner is x
    y = _arrays.as_numpy(found)
    assert (y.strides, y.dtype, y.flags.writeable) == (x.strides, x.dtype, x.flags.writeable)
    assert np.shares_memory(x, y) and (kinds.bits(x) == kinds.bits(y)).all()


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (1, 1), (1, 0, 3), (7,)])
def test_numpy_shapes(shape):
    x = np.zeros(shape, np.float16)
    same(x, _arrays.view(x, "x"))


def test_numpy_subclasses(tmp_path):
    matrix = np.arange(4).reshape(2, 2).view(np.matrix)
    same(matrix, _arrays.view(matrix, "x"))
    mapped = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(3, 4))
    same(mapped, _arrays.view(mapped, "x"))
    assert type(_arrays.as_numpy(_arrays.view(mapped, "x"))) is np.ndarray


def test_numpy_warn_on_write_counts_as_readonly():
    x, _ = np.broadcast_arrays(np.zeros((1, 3)), np.zeros((4, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _arrays.view(x, "x")
    assert found.readonly and found.strides == (0, 8)


@pytest.mark.parametrize("dtype, text", [
    (">i8", ">i8"), (">f4", ">f4"), ([("a", "i4"), ("b", "f8")], "|V12"), ("M8[ns]", "<M8[ns]"), ("S5", "|S5"),
])
def test_numpy_other_dtypes_keep_their_text(dtype, text):
    x = np.zeros(3, dtype)
    found = _arrays.view(x, "x")
    assert (found.dtype, found.itemsize) == (text, x.itemsize)
    assert _arrays.itemsize_of(text) == x.itemsize
    assert _arrays.canonical_dtype(x.dtype) == _arrays.canonical_dtype(text) == text


def test_numpy_refusals():
    refused(np.array([None, 1]), "object")
    refused(np.zeros(2, [("a", "O")]), "Python objects")
    refused(np.ma.zeros(3), "masked")
    if hasattr(getattr(np, "dtypes", None), "StringDType"):
        refused(np.array(["a"], np.dtypes.StringDType()), "StringDType")


@pytest.mark.parametrize(
    "bad", [None, 3, 2.5, [1, 2], (1,), {}, "text", np.float32(1), ml_dtypes.bfloat16(1), np.ndarray, object(), np]
)
def test_not_an_array(bad):
    refused(bad, "expected an array")


@needs_torch
def test_a_class_is_not_an_array():
    refused(torch.Tensor, "expected an array")


@st.composite
def strided(draw):
    """A NumPy array of any strides: sliced, reversed, transposed, broadcast, at an odd offset."""
    dtype = kinds.dtype_of(draw(st.sampled_from(["bfloat16", "float8_e5m2", "float32", "int64", "uint8"])))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    raw = np.arange(int(np.prod(shape)) * dtype.itemsize + 1, dtype=np.uint8)
    offset = draw(st.integers(0, 1))
    x = np.ndarray(shape, dtype, raw, offset)
    x = x[(..., *(slice(None, None, draw(st.sampled_from([1, -1, 2, -3]))) for _ in shape))]
    x = x.transpose(draw(st.permutations(range(x.ndim))))
    if draw(st.booleans()):
        x = np.broadcast_to(x, (draw(st.integers(0, 3)), *x.shape))
    return x


@settings(max_examples=200, deadline=None)
@given(strided(), st.sampled_from(["numpy", "dlpack", "buffer"]))
def test_any_strides(x, kind):
    if kind == "buffer" and x.dtype.name in ("bfloat16", "float8_e5m2"):
        x = x.view(f"u{x.itemsize}")  # ml_dtypes has no buffer format
    if kind == "dlpack" and x.dtype.name == "float8_e5m2":
        x = x.view(np.uint8)
    if kind == "buffer":
        x = np.asarray(memoryview(x))  # NumPy exports plain strides where they do not matter
    found = _arrays.view(kinds.to_kind(x, kind), "x")
    same(x, found, kind)
    y = _arrays.as_numpy(found)
    assert (y.shape, y.strides, y.dtype) == (x.shape, x.strides, x.dtype)
    assert (kinds.bits(x) == kinds.bits(y)).all()


# torch


@needs_torch
@pytest.mark.parametrize("dtype", [
    "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu",
    "uint8", "int8", "bool", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64",
])
def test_torch_dtypes(dtype):
    t = torch.zeros(3, 4, dtype=getattr(torch, dtype))
    found = _arrays.view(t, "x")
    assert (found.dtype, found.itemsize, found.kind, found.device) == (dtype, t.element_size(), "torch", "cpu")
    assert (found.ptr, found.shape, found.size) == (t.data_ptr(), (3, 4), 12)
    assert type(found.shape) is tuple and not found.readonly
    assert _arrays.canonical_dtype(t.dtype) == dtype
    assert _arrays.as_numpy(found).dtype == kinds.dtype_of(dtype)


def torch_forms():
    x = torch.arange(120, dtype=torch.int16).reshape(4, 5, 6)
    return [
        x, x.transpose(0, 2), x[1:, ::2, 3], x[:, :1].expand(4, 7, 6), x[2:2], x[0, 0, 0], x.flatten()[7:],
        x.to(memory_format=torch.contiguous_format), torch.nn.Parameter(x, requires_grad=False),
        x.reshape(1, 4, 5, 6).to(memory_format=torch.channels_last), torch.zeros(0), torch.zeros(3, 0),
    ]


@needs_torch
@pytest.mark.parametrize("i", range(12))
def test_torch_forms(i):
    t = torch_forms()[i]
    found = _arrays.view(t, "x")
    assert (found.ptr, found.shape, found.size) == (t.data_ptr(), tuple(t.shape), t.numel())
    assert found.strides == tuple(step * t.element_size() for step in t.stride())
    assert found.contiguous() == t.is_contiguous()
    assert (_arrays.as_numpy(found) == t.numpy()).all()


@needs_torch
@pytest.mark.parametrize("make", [
    lambda z: z.conj(), lambda z: z.conj().imag, lambda z: torch._neg_view(z.real), lambda z: z.conj()[1:, ::2],
])
def test_torch_lazy_bits_are_resolved_into_a_readonly_copy(make):
    z = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    t = make(z)
    assert t.is_conj() or t.is_neg()
    found = _arrays.view(t, "x")
    assert found.readonly and found.owner is t and found.requires_grad
    assert (_arrays.as_numpy(found) == t.detach().resolve_conj().resolve_neg().numpy()).all()


@needs_torch
def test_torch_requires_grad_is_told_and_left_alone():
    t = torch.zeros(3, requires_grad=True)
    y = t * 2
    version, graph = y._version, y.grad_fn
    assert _arrays.view(t, "x").requires_grad and _arrays.view(y, "x").requires_grad
    with torch.no_grad():
        assert not _arrays.view(t, "x").requires_grad
    with torch.inference_mode():
        assert not _arrays.view(t, "x").requires_grad
    assert not _arrays.view(t.detach(), "x").requires_grad
    assert _arrays.as_numpy(_arrays.view(y, "x")).tolist() == [0, 0, 0]
    assert (y._version, y.grad_fn) == (version, graph)


@needs_torch
def test_torch_subclass():
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types_, args=(), kwargs=None):
            return super().__torch_function__(func, types_, args, kwargs or {})

    t = torch.arange(6.0).reshape(2, 3).as_subclass(Tagged)
    found = _arrays.view(t, "x")
    assert (found.ptr, found.shape, found.strides, found.kind) == (t.data_ptr(), (2, 3), (12, 4), "torch")


@needs_torch
@pytest.mark.filterwarnings("ignore")
def test_torch_refusals():
    dense = torch.eye(3)
    refused(dense.to_sparse(), "sparse_coo", "to_dense")
    refused(dense.to_sparse_csr(), "sparse_csr")
    refused(torch.zeros(3, device="meta"), "device meta")
    refused(torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8), "quint8")
    refused(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested")
    refused(torch.zeros(2, dtype=torch.complex32), "complex32")
    if torch.backends.mkldnn.is_available():
        refused(dense.to_mkldnn(), "mkldnn")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    refused(fake, "no memory behind")
    refused(torch.masked.masked_tensor(dense, dense > 0), "no memory behind")
    texts = []

    def inside(row):
        texts.append(refused(row))
        return row

    torch.vmap(inside)(dense)
    assert texts
    grads = torch.func.grad(lambda x: (texts.append(_arrays.view(x, "x") is not None), x.sum())[1])
    with contextlib.suppress(InvalidArgumentError):  # it has memory to point to, or is refused with the typed error
        grads(dense)


# buffer protocol


@pytest.mark.parametrize("obj, dtype, readonly", [
    (b"abc", "uint8", True), (bytearray(4), "uint8", False), (array_module.array("d", [1, 2]), "float64", False),
    (array_module.array("l", [1, 2]), "int64", False), (array_module.array("I", [1, 2]), "uint32", False),
    (memoryview(b"abcd").cast("f"), "float32", True), (memoryview(b"abcd").cast("?"), "bool", True),
    (memoryview(b"abcd").cast("b"), "int8", True), (memoryview(b"abcd").cast("c"), "uint8", True),
    (memoryview(np.zeros(3, np.float16)), "float16", False), (memoryview(np.zeros(3, ">i4")), ">i4", False),
    (memoryview(np.zeros(3, ">u1")), "uint8", False), (memoryview(np.zeros(3, "F")), "complex64", False),
    (memoryview(np.zeros(3, "q")), "int64", False), ((ctypes.c_int32 * 3)(), "int32", False),
    ((ctypes.c_long.__ctype_be__ * 3)(), ">i8", False), ((ctypes.c_bool * 3)(), "bool", False),
    (memoryview(np.zeros(3, [("a", "i4"), ("b", "i2")])), "|V6", False), (mmap.mmap(-1, 16), "uint8", False),
    (b"", "uint8", True),
])
def test_buffers(obj, dtype, readonly):
    found = _arrays.view(obj, "x")
    raw = memoryview(obj)
    assert (found.kind, found.device, found.dtype, found.readonly) == ("buffer", "cpu", dtype, readonly)
    assert (found.shape, found.strides, found.itemsize) == (raw.shape, raw.strides, raw.itemsize)
    assert _arrays.as_numpy(found).tobytes() == raw.tobytes()


def test_buffer_refusals():
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.py_object),)

    refused((Pair * 2)(), "plain bytes")
    released = memoryview(b"abc")
    released.release()
    refused(released, "ValueError")
    testbuffer = pytest.importorskip("_testbuffer")
    rows_behind_pointers = testbuffer.ndarray([1, 2, 3, 4], shape=[2, 2], format="i", flags=testbuffer.ND_PIL)
    refused(rows_behind_pointers, "BufferError")


def test_buffer_is_held_as_long_as_an_array_over_it():
    store = bytearray(b"abcd")
    y = _arrays.as_numpy(_arrays.view(store, "x"))
    y[0] = ord("z")
    with pytest.raises(BufferError):
        store.extend(b"more")
    del y
    store.extend(b"more")
    assert store == b"zbcdmore"


# __cuda_array_interface__ (over host memory: only the description is read)


ABSENT = object()


def fake_gpu(array, **changes):
    face = {
        "shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False), "version": 3,
        "strides": array.strides,
    }
    face.update(changes)
    return types.SimpleNamespace(__cuda_array_interface__={k: v for k, v in face.items() if v is not ABSENT})


@pytest.mark.parametrize("form", ["plain", "rows", "reversed", "fortran"])
def test_cuda_array_interface(form):
    x = kinds.formed(np.zeros((4, 6), np.float32), form)
    found = _arrays.view(fake_gpu(x, stream=7), "x")
    assert (found.ptr, found.shape, found.strides, found.dtype) == (x.ctypes.data, x.shape, x.strides, "float32")
    assert (found.kind, found.device, found.stream) == ("cuda_array_interface", "cuda:0", 7)
    with pytest.raises(InvalidArgumentError, match="cuda:0"):
        _arrays.as_numpy(found)


@pytest.mark.parametrize("changes, expected", [
    ({"strides": None}, {"strides": (24, 4)}), ({"strides": ABSENT, "version": 2}, {"strides": (24, 4)}),
    ({"data": (64, True)}, {"ptr": 64, "readonly": True}), ({"typestr": ">i4"}, {"dtype": ">i4"}),
    ({"typestr": "|b1", "strides": None}, {"dtype": "bool", "itemsize": 1}),
    ({"shape": (0, 6), "data": (0, False)}, {"size": 0, "ptr": 0}), ({"shape": [4, 6]}, {"shape": (4, 6)}),
    ({"stream": None}, {"stream": None}), ({"mask": None}, {"size": 24}),
    ({"data": (None, False), "shape": (0,), "strides": None}, {"ptr": 0}),
])
def test_cuda_array_interface_fields(changes, expected):
    found = _arrays.view(fake_gpu(np.zeros((4, 6), np.float32), **changes), "x")
    for name, value in expected.items():
        assert getattr(found, name) == value, name


def test_cuda_array_interface_device():
    for place, device in [(3, "cuda:3"), (types.SimpleNamespace(id=2), "cuda:2"),
                          (types.SimpleNamespace(index=1, type="cuda"), "cuda:1"), ("gpu", "cuda:0")]:
        gpu = fake_gpu(np.zeros(2))
        gpu.device = place
        assert _arrays.view(gpu, "x").device == device
    gpu = fake_gpu(np.zeros(2))
    gpu.__dlpack_device__ = lambda: (2, 5)
    assert _arrays.view(gpu, "x").device == "cuda:5"


def test_cuda_array_interface_bfloat16_is_named_by_the_object():
    gpu = fake_gpu(np.zeros(4, ml_dtypes.bfloat16))
    assert _arrays.view(gpu, "x").dtype == "|V2"
    gpu.dtype = np.dtype(ml_dtypes.bfloat16)
    assert _arrays.view(gpu, "x").dtype == "bfloat16"
    gpu.dtype = np.dtype(np.float32)
    refused(gpu, "differ in size")


@pytest.mark.parametrize("changes", [
    {"mask": np.zeros(3)}, {"data": (0, False)}, {"data": ABSENT}, {"data": 5}, {"shape": ABSENT},
    {"shape": (-1, 6)}, {"shape": (2.5,)}, {"strides": (4,)}, {"typestr": "nonsense"}, {"typestr": "|O8"},
    {"shape": (2**40, 2**40)}, {"strides": (2**63, 4)}, {"typestr": ABSENT},
])
def test_cuda_array_interface_refusals(changes):
    refused(fake_gpu(np.zeros((4, 6), np.float32), **changes))


# lifetime, import, dtype names


@pytest.mark.parametrize("kind", [k for k in kinds.KINDS if k != "torch" or torch is not None])
def test_a_view_keeps_the_exporter_alive(kind):
    x = np.arange(6.0)
    alive = weakref.ref(x)
    found = _arrays.view(kinds.to_kind(x, kind), "x")
    ptr = x.ctypes.data
    del x
    gc.collect()
    assert alive() is not None
    y = _arrays.as_numpy(found)
    del found
    gc.collect()
    assert alive() is not None and y.ctypes.data == ptr and y.tolist() == [0, 1, 2, 3, 4, 5]
    del y
    gc.collect()
    assert alive() is None


def test_a_cycle_through_a_view_is_collected():
    class Holder(np.ndarray):
        pass

    x = np.zeros(3).view(Holder)
    x.found = _arrays.view(x, "x")
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_an_array_is_made_by_view_only():
    with pytest.raises(TypeError, match="view"):
        _arrays.Array()
    with pytest.raises(AttributeError):
        _arrays.view(b"abc", "x").ptr = 0
    assert "uint8" in repr(_arrays.view(b"abc", "x"))


def test_import_needs_numpy_and_ml_dtypes_only():
    code = (
        "import sys, numpy, ml_dtypes; before = set(sys.modules); import epcomm._arrays as a; "
        "a.view(numpy.zeros(3), 'x'); a.view(b'abc', 'x'); a.canonical_dtype('bfloat16'); "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    ours = {name for name in done.stdout.split() if "cython" not in name and not name.startswith("__")}
    assert ours <= {"epcomm", "numpy"}


@pytest.mark.parametrize("given_, name", [
    ("bfloat16", "bfloat16"), ("f4", "float32"), ("half", "float16"), (np.float32, "float32"), (np.bool_, "bool"),
    (np.dtype("i8"), "int64"), (np.longlong, "int64"), (np.dtype("q"), "int64"), (np.intp, "int64"),
    (ml_dtypes.bfloat16, "bfloat16"), (np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    (ml_dtypes.float8_e5m2, "float8_e5m2"), (">u4", ">u4"), (np.dtype(">f8"), ">f8"),
])
def test_canonical_dtype(given_, name):
    assert _arrays.canonical_dtype(given_) == name
    assert np.dtype(_dtypes.numpy_dtype(name)).itemsize == _arrays.itemsize_of(name)


@pytest.mark.parametrize("bad", [
    None, 3, "bf16", "", "float7", "object", float, int, object, np.floating, np.str_, np.dtype("O"), [], np.zeros(2),
])
def test_canonical_dtype_refusals(bad):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidArgumentError, match="^dtype="):
            _arrays.canonical_dtype(bad)


@needs_torch
def test_canonical_dtype_of_torch():
    assert _arrays.canonical_dtype(torch.half) == "float16"
    assert _arrays.canonical_dtype(torch.float8_e4m3fn) == "float8_e4m3fn"
    for bad in (torch.complex32, torch.quint8):
        with pytest.raises(InvalidArgumentError, match=str(bad)):
            _arrays.canonical_dtype(bad)
