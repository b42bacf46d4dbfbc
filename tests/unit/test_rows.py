"""The row loops of every instruction set: the same bits as slow NumPy, at every length, address and value."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from helpers import oracle

from epcomm import _rows
from epcomm._arrays import view
from epcomm.errors import UnsupportedError

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": BF16}
LENGTHS = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 300, 1000)
CANARY = 0xA5


@pytest.fixture(params=["avx512", "avx2", "plain"])
def isa(request):
    if request.param not in _rows.isas():
        pytest.skip(f"{request.param} does not run on this machine")
    return request.param


@pytest.fixture(params=[False, True], ids=["cached", "streaming"])
def stream(request):
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


def values(rng, n, dtype, what):
    """Test rows: any bits (NaN, infinities, subnormals and all), only subnormals, or ordinary numbers."""
    unsigned = f"u{dtype.itemsize}"
    if what == "bits":
        return rng.integers(0, 2 ** (8 * dtype.itemsize), n, dtype=np.uint64).astype(unsigned).view(dtype)
    if what == "subnormal":
        mantissa = {"float32": 23, "float16": 10, "bfloat16": 7}[dtype.name]
        sign = rng.integers(0, 2, n, dtype=np.uint64) << np.uint64(8 * dtype.itemsize - 1)
        return (rng.integers(0, 2**mantissa, n, dtype=np.uint64) | sign).astype(unsigned).view(dtype)
    return rng.standard_normal(n).astype(dtype)


def at_offset(array, offset):
    """The same values at `offset` bytes from a 64-byte line."""
    raw = np.zeros(array.nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    moved = np.ndarray(array.shape, array.dtype, raw[start:].data)
    moved[...] = array
    return moved


class Guarded:
    """Room for n items at an offset, with bytes around it that must not change."""

    def __init__(self, n, dtype, offset):
        self.raw = np.full(n * dtype.itemsize + 320, CANARY, np.uint8)
        self.start = -self.raw.ctypes.data % 64 + 64 + offset
        self.stop = self.start + n * dtype.itemsize
        self.array = np.ndarray((n,), dtype, self.raw[self.start :].data)

    def check(self):
        assert (self.raw[: self.start] == CANARY).all(), "bytes in front of the row have changed"
        assert (self.raw[self.stop :] == CANARY).all(), "bytes behind the row have changed"


def expected_sum(rows, weights, bias, n, dtype):
    """The written order, one rounding each."""
    total = np.zeros(n, np.float32)
    with np.errstate(all="ignore"):
        for i, row in enumerate(rows):
            value = row.astype(np.float32)
            if weights is not None:
                value = weights[i] * value
            total = total + value
        if bias is not None:
            total = total + bias
        return total.astype(dtype)


def reduced(isa, rows, weights, bias, n, dtype, stream, offset=0):
    out = Guarded(n, dtype, offset)
    _rows.reduce_rows(isa, view(out.array, "out"), [view(row, "row") for row in rows], weights, bias, stream)
    out.check()
    return out.array


# ------------------------------------------------------------------------------------------------ reduce


@pytest.mark.parametrize("what", ["bits", "subnormal", "normal"])
def test_reduce(isa, dtype, stream, what):
    rng = np.random.default_rng(len(isa) + dtype.num + stream)
    for n in LENGTHS:
        for num_rows in range(11):
            # Odd addresses, too: an element need not be aligned.
            rows = [at_offset(values(rng, n, dtype, what), int(rng.integers(64))) for _ in range(num_rows)]
            weights = rng.standard_normal(num_rows).astype(np.float32) if num_rows % 2 else None
            if weights is not None and what == "bits":
                weights = values(rng, num_rows, DTYPES["float32"], "bits")
            bias = values(rng, n, DTYPES["float32"], "normal") if num_rows % 3 == 1 else None
            got = reduced(isa, rows, weights, bias, n, dtype, stream, int(rng.integers(64)))
            oracle.assert_bits(got, expected_sum(rows, weights, bias, n, dtype), f"{n} columns of {num_rows} rows")


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_reduce_long_rows(isa, dtype, stream, num_rows):
    rng = np.random.default_rng(num_rows)
    rows = [values(rng, 7168, dtype, "normal") for _ in range(num_rows)]
    weights = rng.random(num_rows).astype(np.float32)
    got = reduced(isa, rows, weights, None, 7168, dtype, stream)
    oracle.assert_bits(got, expected_sum(rows, weights, None, 7168, dtype))


def test_product_and_sum_are_rounded_apart(isa, dtype, stream):
    """With a fused multiply-add the rest of the product survives; without it the sum is +0.0."""
    x = np.array(1.0078125, dtype)  # 1 + 2^-7: 8 bits of mantissa in each of the types
    weight = np.float32(16384.002)  # large, so that the rest is not below float16's least value
    product = np.float32(weight * np.float32(x))
    assert np.array(float(weight) * float(x) - float(product)).astype(dtype) != 0, "the case must not be exact"
    rows = [np.full(300, 1, dtype), np.full(300, x, dtype)]
    got = reduced(isa, rows, np.array([-product, weight]), None, 300, dtype, stream)
    oracle.assert_bits(got, np.zeros(300, dtype))


def test_sum_starts_at_plus_zero(isa, dtype, stream):
    rows = [np.full(100, -0.0, dtype)] * 3
    oracle.assert_bits(reduced(isa, rows, None, None, 100, dtype, stream), np.zeros(100, dtype))
    oracle.assert_bits(reduced(isa, [], None, None, 100, dtype, stream), np.zeros(100, dtype))


def test_order_of_the_sum(isa, stream):
    """Ascending: (1e8 + -1e8) + 1 is 1, any other order is 0."""
    float32 = DTYPES["float32"]
    rows = [np.full(100, value, float32) for value in (1e8, -1e8, 1)]
    oracle.assert_bits(reduced(isa, rows, None, None, 100, float32, stream), np.ones(100, float32))


def test_total_is_rounded_once_to_nearest_even(isa, stream):
    """1 + 2^-8 is a tie of bfloat16, and 2^-20 more is not."""
    one, tie = np.full(100, 1, BF16), np.full(100, 2.0**-8, BF16)
    little, next_up = np.full(100, 2.0**-20, BF16), np.full(100, 1 + 2.0**-7, BF16)
    oracle.assert_bits(reduced(isa, [one, tie], None, None, 100, BF16, stream), one)
    oracle.assert_bits(reduced(isa, [one, tie, little], None, None, 100, BF16, stream), next_up)
    bias = np.full(100, 2.0**-20, np.float32)  # the bias comes before the rounding
    oracle.assert_bits(reduced(isa, [one, tie], None, bias, 100, BF16, stream), next_up)


def test_thread_that_flushes_subnormals_gets_the_same_bits(isa, dtype, stream):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    rows = [values(rng, 300, dtype, "subnormal") for _ in range(3)]
    expected = expected_sum(rows, None, None, 300, dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        got = reduced(isa, rows, None, None, 300, dtype, stream)
    finally:
        torch.set_flush_denormal(False)
    oracle.assert_bits(got, expected)


def test_thread_that_rounds_up_gets_the_same_bits(isa, dtype, stream):
    libm = ctypes.CDLL("libm.so.6")
    upward, nearest = 0x800, 0
    rng = np.random.default_rng(4)
    rows = [values(rng, 300, dtype, "normal") for _ in range(5)]
    weights = rng.random(5).astype(np.float32)
    expected = expected_sum(rows, weights, None, 300, dtype)
    arrays = [view(row, "row") for row in rows]
    out = np.empty(300, dtype)
    out_view = view(out, "out")
    assert libm.fesetround(upward) == 0
    try:
        _rows.reduce_rows(isa, out_view, arrays, weights, None, stream)
        kept = libm.fegetround()
    finally:
        libm.fesetround(nearest)
    oracle.assert_bits(out, expected)
    assert kept == upward, "the caller's mode must be given back"


# ---------------------------------------------------------------------------------------------- quantize


@pytest.mark.parametrize("what", ["bits", "subnormal", "normal"])
@pytest.mark.parametrize("round_scale", [False, True])
def test_quantize(isa, dtype, what, round_scale):
    rng = np.random.default_rng(5)
    for n in LENGTHS:
        x = at_offset(values(rng, n, dtype, what), int(rng.integers(64)))
        codes = Guarded(n, np.dtype(np.uint8), int(rng.integers(64)))
        scales = Guarded(-(-n // 128), DTYPES["float32"], 0)
        _rows.quantize_row(isa, view(codes.array, "codes"), view(scales.array, "scales"), view(x, "x"), round_scale)
        codes.check()
        scales.check()
        want_codes, want_scales = oracle.quantize_fp8(x[None], round_scale)
        oracle.assert_bits(scales.array, want_scales[0], f"scales of {n} columns")
        oracle.assert_bits(codes.array, want_codes[0].view(np.uint8), f"codes of {n} columns")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_quantize_every_16_bit_value(isa, name):
    """Each value once among large and once among small neighbours."""
    every = np.arange(2**16, dtype=np.uint16).view(DTYPES[name])
    for x in (every, np.repeat(every, 128)[::97].copy(), np.random.default_rng(6).permutation(every)):
        codes, scales = np.empty(x.size, np.uint8), np.empty(-(-x.size // 128), np.float32)
        _rows.quantize_row(isa, view(codes, "codes"), view(scales, "scales"), view(x, "x"), False)
        want_codes, want_scales = oracle.quantize_fp8(x[None])
        oracle.assert_bits(scales, want_scales[0], "scales")
        oracle.assert_bits(codes, want_codes[0].view(np.uint8), "codes")


# -------------------------------------------------------------------------------------------------- copy


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 255, 1023, 2047, 2048, 2049, 2303, 4096, 5000, 14336])
def test_copy(isa, stream, n):
    rng = np.random.default_rng(n)
    for _ in range(8):
        src = at_offset(rng.integers(0, 256, n).astype(np.uint8), int(rng.integers(64)))
        dst = Guarded(n, src.dtype, int(rng.integers(64)))
        _rows.copy_row(isa, view(dst.array, "dst"), view(src, "src"), stream)
        dst.check()
        assert (dst.array == src).all()


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "c16", "V3"])
@pytest.mark.parametrize("stride", ["joined", "every third", "reversed", "zero", "odd"])
def test_copy_strided(dtype, stride):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(7)
    for n in (0, 1, 2, 7, 100):
        raw = rng.integers(0, 256, n * (dtype.itemsize * 3 + 5) + 64).astype(np.uint8)
        step = {
            "joined": dtype.itemsize, "every third": 3 * dtype.itemsize, "reversed": -dtype.itemsize, "zero": 0,
            "odd": dtype.itemsize + 3,
        }[stride]  # fmt: skip
        start = 1 + (dtype.itemsize * max(n - 1, 0) if step < 0 else 0)
        src = np.ndarray((n,), dtype, raw.data, start, (step,))
        dst = Guarded(n, dtype, 1)
        _rows.copy_items(view(dst.array, "dst"), view(src, "src"))
        dst.check()
        assert dst.array.tobytes() == src.tobytes()


# ------------------------------------------------------------------------------------------------ choice


def test_choice_of_the_table():
    names = _rows.isas()
    assert names[-1] == "plain" and _rows.best_isa() == names[0]
    row = np.zeros(4, np.float32)
    for isa in ("sse9", "AVX2", "plain2"):
        with pytest.raises(UnsupportedError, match=isa):
            _rows.copy_row(isa, view(row, "row"), view(row, "row"))
