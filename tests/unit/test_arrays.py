"""Resolving arrays of any library, and giving arrays back in the caller's kind."""

import array as array_module
import weakref

import ml_dtypes
import numpy as np
import pytest

from epcomm import _arrays
from epcomm.errors import InvalidArgumentError

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
pytestmark = pytest.mark.timeout(60)
KINDS = ["numpy", pytest.param("torch", marks=needs_torch)]
DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float16", "bool", "uint8", "int32", "int64"]


class Owner:
    """Something with a lifetime to watch."""


def like(kind):
    return _arrays.view(np.zeros(1) if kind == "numpy" else torch.zeros(1), "x")


def test_numpy_strides_are_bytes():
    x = np.arange(24.0, dtype=np.float32).reshape(4, 6)[::-1, ::2]
    found = _arrays.view(x, "x")
    assert (found.ptr, found.shape, found.strides) == (x.ctypes.data, (4, 3), (-24, 8))
    assert (found.dtype, found.itemsize, found.device, found.kind) == ("float32", 4, "cpu", "numpy")
    assert not found.contiguous() and not found.rows_contiguous()
    assert found.owner is x


@needs_torch
def test_torch_bfloat16_transposed():
    t = torch.arange(24).reshape(4, 6).to(torch.bfloat16).T
    found = _arrays.view(t, "x")
    assert (found.ptr, found.shape, found.strides) == (t.data_ptr(), (6, 4), (2, 12))
    assert found.dtype == "bfloat16"
    y = _arrays.as_numpy(found)
    assert y.dtype == ml_dtypes.bfloat16 and y.strides == (2, 12)
    assert (y.astype(np.float32) == t.float().numpy()).all()


@pytest.mark.parametrize("obj, dtype, readonly", [
    (b"abc", "uint8", True), (bytearray(4), "uint8", False), (array_module.array("d", [1, 2]), "float64", False),
    (memoryview(b"abcd").cast("f"), "float32", True),
])
def test_buffers(obj, dtype, readonly):
    found = _arrays.view(obj, "x")
    assert (found.kind, found.dtype, found.readonly, found.ndim) == ("buffer", dtype, readonly, 1)
    assert found.size * found.itemsize == memoryview(obj).nbytes


@pytest.mark.parametrize("bad", [None, 3, 2.5, [1, 2], (1,), "text", np.float32(1), np.ndarray, object()])
def test_not_an_array(bad):
    with pytest.raises(InvalidArgumentError, match=f"topk_idx: expected an array.*{type(bad).__name__}"):
        _arrays.view(bad, "topk_idx")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (3, 0)])
def test_wrap_keeps_the_owner_until_the_last_view_dies(kind, dtype, shape):
    base = np.zeros(64, np.uint8)
    owner = Owner()
    alive = weakref.ref(owner)
    y = _arrays.wrap(base.ctypes.data, shape, dtype, like(kind), owner)
    del owner
    found = _arrays.view(y, "y")
    assert (found.shape, found.dtype, found.kind, found.readonly) == (shape, dtype, kind, False)
    assert found.contiguous() and (found.size == 0 or found.ptr == base.ctypes.data)
    z = y.reshape(-1)[:1]
    del y, found
    assert alive() is not None
    del z
    assert alive() is None
