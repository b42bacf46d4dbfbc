"""epcomm.layout, permute, unpermute, quantize and dequantize against naive loops and the oracle."""

import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from helpers import arrays, oracle
from helpers.oracle import RankInput

import epcomm
from epcomm import InvalidArgumentError, UnsupportedError, ops

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def numpy_of(result):
    """A result's fields as NumPy arrays."""
    fields = {name: getattr(result, name) for name in type(result).__dataclass_fields__}
    return {name: value if isinstance(value, int) else arrays.to_numpy(value) for name, value in fields.items()}


def sample(num_tokens=20, num_topk=3, num_experts=5, width=70, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, width)).astype(dtype)
    topk_idx = rng.integers(-1, num_experts, (num_tokens, num_topk))
    weights = rng.standard_normal((num_tokens, num_topk)).astype(np.float32)
    return x, topk_idx, weights


def given_as(array, kind, form="plain"):
    """An array in a form and as a kind; bfloat16 and fp8 have no buffer protocol."""
    if kind == "buffer" and array.dtype in (BF16, FP8):
        pytest.skip("the buffer protocol has no such dtype")
    return arrays.to_kind(arrays.formed(array, form), kind)


# ------------------------------------------------------------------------------------------------ owners


def test_default_owners():
    assert ops.expert_owners(5, 2) == ([0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [3, 2])
    assert ops.expert_owners(2, 4) == ([0, 1], [0, 0], [1, 1, 0, 0])
    for num_experts in (1, 7, 256):
        for num_ranks in (1, 2, 3, 7, 300):
            rank_of, local_of, counts = ops.expert_owners(num_experts, num_ranks)
            assert rank_of == oracle.default_owners(num_experts, num_ranks)
            assert counts == [rank_of.count(rank) for rank in range(num_ranks)]
            assert local_of == [rank_of[:expert].count(rank_of[expert]) for expert in range(num_experts)]


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda v: np.array(v, np.int32), lambda v: np.array(v * 2)[:4]]
)
def test_owners_as_given(make):
    assert ops.expert_owners(4, 3, make([2, 0, 2, 0])) == ([2, 0, 2, 0], [0, 0, 1, 1], [2, 0, 2])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1), r"num_experts=0: expected an integer 1\.\."),
        ((-3, 1), "num_experts=-3"),
        ((2.5, 1), r"num_experts=2\.5"),
        ((True, 1), "num_experts=True"),
        ((2**31, 1), "num_experts=2147483648"),
        ((4, 0), "num_ranks=0"),
        ((4, "2"), "num_ranks='2'"),
        ((4, 2, [0, 1, 0]), "expert_to_rank: 3 values; expected one for each of the 4 experts"),
        ((4, 2, [0, 1, 0, 2]), r"expert_to_rank\[3\]=2: expected an integer 0\.\.1"),
        ((4, 2, [0, -1, 0, 1]), r"expert_to_rank\[1\]=-1"),
        ((4, 2, [0, 1.0, 0, 1]), r"expert_to_rank\[1\]=1\.0"),
        ((4, 2, [0, None, 0, 1]), r"expert_to_rank\[1\]=None"),
        ((4, 2, np.zeros(4, np.float32)), "expert_to_rank: dtype float32; expected int32 or int64"),
        ((4, 2, np.zeros((2, 2), np.int32)), r"expert_to_rank: shape \[2, 2\]; expected \[num_experts\]"),
        ((4, 2, 7), "expert_to_rank"),
        ((4, 2, "0101"), "expert_to_rank"),
    ],
)
def test_refused_owners(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        ops.expert_owners(*arguments)


# ------------------------------------------------------------------------------------------------ layout


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 11])
def test_layout(kind, dtype, num_ranks):
    for form in arrays.FORMS[kind]:
        topk_idx = sample(30, 4, 7)[1].astype(dtype)
        got = epcomm.layout(given_as(topk_idx, kind, form), 7, num_ranks)
        assert all(arrays.is_kind(getattr(got, name), kind) for name in type(got).__dataclass_fields__)
        got = numpy_of(got)
        owners = oracle.default_owners(7, num_ranks)
        there = np.zeros((30, num_ranks), bool)
        for token, row in enumerate(topk_idx.tolist()):
            for expert in row:
                if expert >= 0:
                    there[token, owners[expert]] = True
        position = np.where(there, np.cumsum(there, axis=0) - 1, -1)
        oracle.assert_bits(got["num_tokens_per_rank"], there.sum(axis=0).astype(np.int32))
        oracle.assert_bits(got["num_tokens_per_expert"], np.bincount(topk_idx[topk_idx >= 0], minlength=7).astype("i4"))
        oracle.assert_bits(got["is_token_in_rank"], there)
        oracle.assert_bits(got["position"], position.astype(np.int32))


def test_layout_with_owners_and_without_tokens():
    got = epcomm.layout(np.array([[0, 3]]), 4, 2, expert_to_rank=[1, 0, 1, 1])
    assert got.num_tokens_per_rank.tolist() == [0, 1] and got.position.tolist() == [[-1, 0]]
    got = epcomm.layout(np.zeros((0, 2), np.int64), 4, 3)
    assert got.num_tokens_per_rank.tolist() == [0, 0, 0] and got.position.shape == (0, 3)


# ------------------------------------------------------------------------------------ permute, unpermute


def expected_permuted(x, topk_idx, weights, num_experts, alignment=1, capacity=None):
    """The oracle's expert layout of a world of one rank."""
    return oracle.dispatch(
        [RankInput(x, topk_idx, weights)], num_experts, layout="expert", alignment=alignment, capacity=capacity
    )


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize(("alignment", "capacity"), [(1, None), (8, None), (1, 0), (4, 17), (4, 300), (1, 200)])
def test_permute(kind, with_weights, alignment, capacity):
    for form in arrays.FORMS[kind]:
        x, topk_idx, weights = sample(dtype=np.dtype(np.float32))
        weights = weights if with_weights else None
        got = epcomm.permute(
            given_as(x, kind, form),
            given_as(topk_idx, kind, form),
            None if weights is None else given_as(weights, kind, form),
            num_experts=5,
            expert_alignment=alignment,
            capacity=capacity,
        )
        assert arrays.is_kind(got.x, kind) and arrays.is_kind(got.source, kind)
        want = expected_permuted(x, topk_idx, weights, 5, alignment, capacity).received[0]
        got = numpy_of(got)
        oracle.assert_bits(got["x"], want.x, "x")
        oracle.assert_bits(got["topk_idx"], want.topk_idx, "topk_idx")
        oracle.assert_bits(got["num_tokens_per_expert"], want.num_tokens_per_expert, "num_tokens_per_expert")
        oracle.assert_bits(got["expert_offsets"], want.expert_offsets, "expert_offsets")
        if with_weights:
            oracle.assert_bits(got["topk_weights"], want.topk_weights, "topk_weights")
        else:
            assert got["topk_weights"] is None
        source = [-1 if row is None else row.token * 3 + row.k for row in want.rows]
        assert got["source"].tolist() == source
        assert (got["overflow"], got["num_tokens"], got["num_topk"]) == (want.overflow, 20, 3)


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "f8", "c8", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("form", arrays.FORMS["numpy"])
def test_permute_moves_any_bytes(dtype, form):
    dtype = arrays.dtype_of(dtype)
    x = np.random.default_rng(1).integers(0, 256, (20, 33 * dtype.itemsize)).astype(np.uint8).view(dtype)
    _, topk_idx, _ = sample()
    got = epcomm.permute(arrays.formed(x, form), topk_idx, num_experts=5)
    assert got.x.dtype == dtype
    assert got.x.tobytes() == x[got.source // 3].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("apply_weights", [None, True, False])
@pytest.mark.parametrize("alignment", [1, 16])
def test_unpermute(kind, dtype, apply_weights, alignment):
    dtype = arrays.dtype_of(dtype)
    x, topk_idx, weights = sample(dtype=dtype, num_tokens=40)
    for form in arrays.FORMS[kind]:
        permuted = epcomm.permute(x, topk_idx, weights, num_experts=5, expert_alignment=alignment)
        y = np.random.default_rng(2).standard_normal((len(permuted.source), 90)).astype(dtype)
        got = epcomm.unpermute(given_as(y, kind, form), permuted, apply_weights=apply_weights)
        assert arrays.is_kind(got, kind)
        routing = expected_permuted(x, topk_idx, weights, 5, alignment)
        ((want, _),) = oracle.combine(routing, [y], tree=oracle.ExactOrder(), apply_weights=apply_weights)
        oracle.assert_bits(arrays.to_numpy(got), want)


def test_unpermute_without_weights_counts_each_pick():
    x = np.array([[1.0], [2.0]], np.float32)
    permuted = epcomm.permute(x, np.array([[0, 0, -1], [-1, -1, -1]]), num_experts=2, expert_alignment=4)
    assert epcomm.unpermute(permuted.x, permuted).tolist() == [[2.0], [0.0]]
    with pytest.raises(InvalidArgumentError, match="apply_weights=True: permuted carries no weights"):
        epcomm.unpermute(permuted.x, permuted, apply_weights=True)


def test_unpermute_never_reads_padding():
    x, topk_idx, weights = sample()
    permuted = epcomm.permute(x, topk_idx, weights, num_experts=5, expert_alignment=8, capacity=90)
    clean = epcomm.unpermute(permuted.x, permuted)
    dirty = permuted.x.copy()
    dirty[permuted.source < 0] = np.nan
    oracle.assert_bits(epcomm.unpermute(dirty, permuted), clean)


@pytest.mark.parametrize("shape", [(0, 3, 70), (20, 0, 70), (20, 3, 0), (0, 0, 0), (1, 1, 1)])
def test_empty(shape):
    num_tokens, num_topk, width = shape
    x = np.ones((num_tokens, width), BF16)
    topk_idx = np.zeros((num_tokens, num_topk), np.int32)
    permuted = epcomm.permute(x, topk_idx, np.ones(topk_idx.shape), num_experts=3)
    assert permuted.x.shape == (topk_idx.size, width)
    assert epcomm.unpermute(permuted.x, permuted).shape == x.shape
    assert epcomm.permute(x, topk_idx - 1, num_experts=0).x.shape == (0, width)


# --------------------------------------------------------------------------------------------------- fp8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("round_scale", [False, True])
def test_quantize_and_back(kind, dtype, round_scale):
    dtype = arrays.dtype_of(dtype)
    for form in arrays.FORMS[kind]:
        for width in (1, 127, 128, 300, 512):
            x = sample(6, 1, 1, width, dtype)[0] * np.array(30, dtype)
            x[2, : min(width, 5)] = np.array([np.nan, np.inf, -np.inf, -0.0, 6e-8], dtype)[:width]
            got = epcomm.quantize(given_as(x, kind, form), round_scale=round_scale)
            assert arrays.is_kind(got.x, kind) and arrays.is_kind(got.scales, kind)
            want_codes, want_scales = oracle.quantize_fp8(x, round_scale)
            fields = numpy_of(got)
            oracle.assert_bits(fields["scales"], want_scales)
            oracle.assert_bits(fields["x"], want_codes)
            with np.errstate(invalid="ignore", over="ignore"):
                wide = want_codes.astype(np.float32) * np.repeat(want_scales, 128, axis=1)[:, :width]
                want = wide.astype(dtype)
            back = epcomm.dequantize(got.x, got.scales, dtype)
            oracle.assert_bits(arrays.to_numpy(back), want)


@pytest.mark.parametrize("form", arrays.FORMS["numpy"])
def test_dequantize_any_strides(form):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, axis=0)
    scales = np.array([[1, 0.5], [2, 2.0**-140], [3.4e38, 0.1]], np.float32)
    with np.errstate(over="ignore"):
        want = (codes.view(FP8).astype(np.float32) * np.repeat(scales, 128, axis=1)).astype(np.float16)
    for x in (codes, codes.view(FP8)):
        got = epcomm.dequantize(arrays.formed(x, form), arrays.formed(scales, form), np.float16)
        oracle.assert_bits(got, want)


def test_groups_of_nothing_stay_zero():
    """B20: zeros, minus zeros and values far below the floor: finite scales, no NaN, neighbours untouched."""
    x = np.full((5, 256), 3.0, np.float32)
    x[0] = 0
    x[1, 128:] = 0
    x[2] = -0.0
    x[3] = 1e-40
    got = epcomm.quantize(x)
    assert (got.scales > 0).all() and np.isfinite(got.scales).all()
    back = epcomm.dequantize(got.x, got.scales, "float32")
    assert (back[[0, 2, 3]] == 0).all() and (back[1, 128:] == 0).all()
    assert (back[1, :128] == back[4, :128]).all() and abs(back[4] - 3).max() < 1e-6
    assert (got.x.view(np.uint8)[[0, 3]] == 0).all()


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", [8, 1008, 2**31 - 1, 2**40, -2])
def test_garbage_ids(kind, value):
    """B12: a typed error that names row, slot and value; 2**40 is not expert 0."""
    topk_idx = np.zeros((4, 2), np.int64)
    topk_idx[2, 1] = value
    for call in (
        lambda: epcomm.layout(given_as(topk_idx, kind), 8),
        lambda: epcomm.permute(given_as(np.zeros((4, 3), np.float32), kind), given_as(topk_idx, kind), num_experts=8),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"topk_idx\[2, 1\]={value}: .*0\.\.7"):
            call()


@pytest.mark.parametrize("dtype", ["uint32", "int16", "uint8", "uint64", "float32", "float64", "bool", ">i8", ">i4"])
def test_index_dtypes(dtype):
    """B18: int32 and int64 mean the same, anything else is refused by name."""
    topk_idx = np.zeros((4, 2), dtype)
    for call in (
        lambda: epcomm.layout(topk_idx, 8),
        lambda: epcomm.permute(np.zeros((4, 3), np.float32), topk_idx, num_experts=8),
    ):
        with pytest.raises(InvalidArgumentError, match=f"topk_idx: dtype {dtype}; expected int32 or int64"):
            call()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float32"])
def test_weight_dtypes(kind, dtype):
    """B19: converted to float32 on the way in, and the sum is taken there."""
    x, topk_idx, weights = sample(dtype=np.dtype(np.float32))
    weights = weights.astype(arrays.dtype_of(dtype))
    got = epcomm.permute(given_as(x, kind), given_as(topk_idx, kind), given_as(weights, kind), num_experts=5)
    want = epcomm.permute(x, topk_idx, weights.astype(np.float32), num_experts=5)
    oracle.assert_bits(arrays.to_numpy(got.topk_weights), want.topk_weights)
    oracle.assert_bits(arrays.to_numpy(epcomm.unpermute(got.x, got)), epcomm.unpermute(want.x, want))


X, IDX, WEIGHTS = sample(dtype=np.dtype(np.float32))
PERMUTED = epcomm.permute(X, IDX, WEIGHTS, num_experts=5)
CODES = epcomm.quantize(X)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: epcomm.layout(IDX[0], 5), r"topk_idx: shape \[3\]; expected \[T, K\]"),
        (lambda: epcomm.layout(IDX.tolist(), 5), "topk_idx"),
        (lambda: epcomm.layout(IDX, 0), "num_experts=0"),
        (lambda: epcomm.layout(IDX, 5, 2, [0, 1]), "expert_to_rank"),
        (lambda: epcomm.layout(IDX, 2**31 - 1), r"num_experts=2147483647: expected an integer 1\.\.1048576"),
        (lambda: epcomm.layout(IDX, 5, 2**31 - 1), r"num_ranks=2147483647: expected an integer 1\.\.65536"),
        (lambda: epcomm.permute(X[0], IDX, num_experts=5), r"x: shape \[70\]; expected \[T, H\]"),
        (lambda: epcomm.permute(None, IDX, num_experts=5), "x: "),
        (lambda: epcomm.permute(X[:3], IDX, num_experts=5), r"topk_idx: shape \[20, 3\].*3 rows of x"),
        (lambda: epcomm.permute(X, IDX, WEIGHTS[:, :2], num_experts=5), r"topk_weights: shape \[20, 2\].*\[20, 3\]"),
        (lambda: epcomm.permute(X, IDX, IDX, num_experts=5), "topk_weights: dtype int64; expected float32"),
        (lambda: epcomm.permute(X, IDX, num_experts=-1), "num_experts=-1"),
        (lambda: epcomm.permute(X, IDX, num_experts=2**31 - 2), r"num_experts=2147483646: .*0\.\.1048576"),
        (lambda: epcomm.permute(X, IDX, num_experts=5, expert_alignment=0), "expert_alignment=0"),
        (lambda: epcomm.permute(X, IDX, num_experts=5, expert_alignment=2**31 - 1), "expert_alignment=2147483647: "),
        (lambda: epcomm.permute(X, IDX, num_experts=5, capacity=-1), "capacity=-1"),
        (lambda: epcomm.permute(X, IDX, num_experts=5, capacity=1.5), r"capacity=1\.5"),
        (lambda: epcomm.unpermute(X[:1], PERMUTED), r"y: shape \[1, 70\]; expected \d+ rows"),
        (lambda: epcomm.unpermute(PERMUTED.x.astype(int), PERMUTED), "y: dtype int64; expected bfloat16, float16 or"),
        (lambda: epcomm.unpermute(X, "permuted"), "permuted: str"),
        (lambda: epcomm.unpermute(PERMUTED.x, PERMUTED, apply_weights=2), "apply_weights=2"),
        (lambda: epcomm.quantize(IDX), "x: dtype int64; expected bfloat16, float16 or float32"),
        (lambda: epcomm.quantize(X[0]), r"x: shape \[70\]"),
        (lambda: epcomm.quantize(X, round_scale=1), "round_scale=1"),
        (lambda: epcomm.dequantize(X, CODES.scales), "x: dtype float32; expected float8_e4m3fn or uint8"),
        (lambda: epcomm.dequantize(CODES.x, CODES.scales[:3]), r"scales: shape \[3, 1\]; expected \[20, 1\]"),
        (lambda: epcomm.dequantize(CODES.x, CODES.scales.astype("f8")), "scales: dtype float64; expected float32"),
        (lambda: epcomm.dequantize(CODES.x, CODES.scales, "int8"), "dtype=int8"),
        (lambda: epcomm.dequantize(CODES.x, CODES.scales, "no such"), "no such"),
    ],
)
def test_refused(call, text):
    with pytest.raises(InvalidArgumentError, match=text):
        call()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"source": np.where(PERMUTED.source == 3, 60, PERMUTED.source)}, r"permuted.source\[\d+\]=60: .*0\.\.59"),
        ({"source": np.where(PERMUTED.source == 3, -2, PERMUTED.source)}, "=-2: "),
        ({"source": np.where(PERMUTED.source == 3, 2**40, PERMUTED.source.astype(np.int64))}, "=1099511627776: "),
        ({"source": np.zeros_like(PERMUTED.source)}, "the same pick as row 0"),
        ({"source": PERMUTED.source[:4]}, "expected 4 rows"),
        ({"source": PERMUTED.source.astype("f4")}, "permuted.source: dtype float32"),
        ({"topk_weights": PERMUTED.topk_weights[:4]}, r"permuted.topk_weights: shape \[4\]"),
        ({"num_topk": -1}, "permuted.num_topk=-1"),
        ({"num_tokens": 5}, "permuted.source"),
        ({"num_tokens": 2**31 - 1}, "at most 2147483647 picks"),
    ],
)
def test_permuted_that_somebody_changed(change, text):
    fields = {name: getattr(PERMUTED, name) for name in type(PERMUTED).__dataclass_fields__}
    with pytest.raises(InvalidArgumentError, match=text):
        epcomm.unpermute(PERMUTED.x, epcomm.Permuted(**{**fields, **change}))


LIMITED = """
import resource
import numpy as np
import epcomm

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
x, idx = np.ones((3, 2), np.float32), np.zeros((3, 1), np.int64)
permuted = epcomm.permute(x, idx, num_experts=1)
many = {name: getattr(permuted, name) for name in type(permuted).__dataclass_fields__} | {"num_tokens": 2**31 - 1}
for call in (
    lambda: epcomm.permute(x, idx, num_experts=1, capacity=2**31 - 1),
    lambda: epcomm.permute(x, idx, num_experts=1, expert_alignment=2**31 - 1),
    lambda: epcomm.unpermute(x, epcomm.Permuted(**many)),
):
    try:
        call()
    except epcomm.OutOfMemoryError as error:
        print(error)
"""


def test_no_memory_for_what_a_call_notes_is_a_typed_error():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3, done.stdout


def test_more_picks_than_int32_counts():
    """2^31 picks by a shape that takes no memory: refused before anything is read."""
    idx = np.broadcast_to(np.zeros((1, 1), np.int64), (2**28, 8))
    with pytest.raises(InvalidArgumentError, match="at most 2147483647 picks"):
        epcomm.layout(idx, 8)
    x = np.broadcast_to(np.zeros((1, 1), np.uint8), (2**28, 8))
    with pytest.raises(InvalidArgumentError, match="at most 2147483647 picks"):
        epcomm.permute(x, idx, num_experts=8)


def test_gradient_is_not_lost_silently():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 3, requires_grad=True)
    with pytest.raises(InvalidArgumentError, match=r"x requires grad.*x\.detach\(\)"):
        epcomm.quantize(x)
    with torch.no_grad():
        assert epcomm.quantize(x).x.shape == (4, 3)


class OnGpu:
    """Says that it lies on a GPU; nothing may read it."""

    def __init__(self, typestr="<i4"):
        self.__cuda_array_interface__ = {
            "shape": (2, 2), "typestr": typestr, "data": (4096, False), "version": 3, "strides": None,
        }  # fmt: skip


class OnGpuList(OnGpu):
    def __init__(self):
        super().__init__()
        self.__cuda_array_interface__["shape"] = (5,)


def test_arguments_of_a_call_are_on_one_device():
    for call, text in (
        (lambda: epcomm.permute(OnGpu("<f4"), IDX[:2, :2], num_experts=5), "topk_idx is on cpu; expected cuda:0"),
        (lambda: epcomm.permute(X[:2], OnGpu(), num_experts=5), "topk_idx is on cuda:0; expected cpu, where x is"),
        (lambda: epcomm.permute(X[:2], IDX[:2, :2], OnGpu("<f4"), num_experts=5), "topk_weights is on cuda:0; exp"),
        (lambda: epcomm.unpermute(OnGpu("<f4"), PERMUTED), "permuted.source is on cpu; expected cuda:0, where y is"),
        (lambda: epcomm.dequantize(OnGpu("|u1"), X), "scales is on cpu; expected cuda:0, where x is"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()


def test_gpu_arrays_without_their_gpu_are_a_typed_error():
    for call in (
        lambda: epcomm.layout(OnGpu(), 4),
        lambda: epcomm.permute(OnGpu("<f4"), OnGpu(), num_experts=4),
        lambda: epcomm.quantize(OnGpu("<f4")),
        lambda: epcomm.layout(IDX, 5, 2, OnGpuList()),
    ):
        with pytest.raises((UnsupportedError, InvalidArgumentError)):
            call()


def test_gpu_arrays_are_checked_before_the_gpu_is_touched():
    with pytest.raises(InvalidArgumentError, match="topk_idx: dtype float32; expected int32 or int64"):
        epcomm.layout(OnGpu("<f4"), 4)
    with pytest.raises(InvalidArgumentError, match="num_experts=0"):
        epcomm.layout(OnGpu(), 0)
    with pytest.raises(InvalidArgumentError, match="x: dtype int32; expected bfloat16"):
        epcomm.quantize(OnGpu())


# ------------------------------------------------------------------------------------------------- manner


def test_results_say_what_they_hold():
    text = repr(PERMUTED)
    assert text.startswith("Permuted(x=float32[") and "num_topk=3" in text and len(text) < 300


def test_results_are_constant():
    with pytest.raises(AttributeError):
        PERMUTED.x = None


@pytest.mark.parametrize("isa", ["avx512", "avx2", "plain"])
def test_instruction_set_of_the_environment(monkeypatch, isa):
    from epcomm import _rows

    monkeypatch.setenv("EPCOMM_HOST_ISA", isa)
    if isa in _rows.isas():
        oracle.assert_bits(epcomm.quantize(X).x, CODES.x)
    else:
        with pytest.raises(UnsupportedError, match=isa):
            epcomm.quantize(X)
    monkeypatch.setenv("EPCOMM_HOST_ISA", "mmx")
    with pytest.raises(InvalidArgumentError, match="EPCOMM_HOST_ISA='mmx'"):
        epcomm.quantize(X)


def test_other_threads_run_during_a_loop(monkeypatch):
    """With the GIL held, the counting thread would stand still from begin to end."""
    monkeypatch.setenv("EPCOMM_HOST_ISA", "plain")
    x = np.ones((4096, 4096), np.float32)
    ticks, stop = [], threading.Event()

    def count():
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        begin = time.monotonic()
        epcomm.quantize(x)
        end = time.monotonic()
    finally:
        stop.set()
        thread.join(10)
    if end - begin < 0.03:
        pytest.skip("this machine is too fast for the case")
    assert any(begin + 0.2 * (end - begin) < tick < end - 0.2 * (end - begin) for tick in ticks)
