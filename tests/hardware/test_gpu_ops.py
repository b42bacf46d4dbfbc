"""epcomm.layout, permute, unpermute, quantize and dequantize on a GPU: the bits of the host's operations."""

import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from helpers import arrays, oracle
from helpers import gpu_arrays as gpu

import epcomm
from epcomm import InvalidArgumentError, UnsupportedError, _rows
from epcomm._arrays import view

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
pytestmark = pytest.mark.gpu(1)


@pytest.fixture(params=gpu.FRAMEWORKS)
def framework(request, need):
    """Each library that has a GPU here."""
    need("gpu", gpu.why_not(request.param))
    return request.param


@pytest.fixture
def cupy(need):
    need("gpu", gpu.why_not("cupy"))
    import cupy

    return cupy


@pytest.fixture
def torch(need):
    need("gpu", gpu.why_not("torch"))
    import torch

    return torch


def fields_of(result):
    """A result's public fields as NumPy arrays."""
    names = [name for name in type(result).__dataclass_fields__ if not name.startswith("_")]
    return {name: gpu.get(getattr(result, name)) for name in names}


def assert_same(got, want, framework=None):
    """Two results have the same fields, bit for bit; those of `got` are arrays of the framework."""
    if framework is not None:
        for name in type(got).__dataclass_fields__:
            value = getattr(got, name)
            assert name.startswith("_") or value is None or isinstance(value, int) or gpu.is_kind(value, framework), (
                name
            )
    got, want = fields_of(got), fields_of(want)
    assert got.keys() == want.keys()
    for name in want:
        if want[name] is None or isinstance(want[name], int):
            assert got[name] == want[name], name
        else:
            here = got[name]
            if here.dtype == np.uint8 and want[name].dtype == FP8:
                here = here.view(FP8)
            oracle.assert_bits(here, want[name], name)


def ids(num_tokens, num_topk, num_experts, dtype=np.int64, seed=0):
    rng = np.random.default_rng(seed)
    topk_idx = rng.integers(0, num_experts, (num_tokens, num_topk)).astype(dtype)
    topk_idx[rng.random(topk_idx.shape) < 0.1] = -1
    return topk_idx


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


# ------------------------------------------------------------------------------------------------ layout


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 31, 32, 33, 64, 72, 1500])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_experts"),
    [(0, 3, 5), (1, 1, 1), (31, 2, 7), (32, 8, 256), (33, 9, 64), (700, 33, 5000), (4096, 8, 256), (5, 0, 4)],
)
def test_layout(framework, num_tokens, num_topk, num_experts, num_ranks):
    topk_idx = ids(num_tokens, num_topk, num_experts)
    want = epcomm.layout(topk_idx, num_experts, num_ranks)
    assert_same(epcomm.layout(gpu.put(topk_idx, framework), num_experts, num_ranks), want, framework)
    narrow = gpu.put(topk_idx.astype(np.int32), framework)
    assert_same(epcomm.layout(narrow, num_experts, num_ranks), want, framework)


def test_layout_of_any_form(framework):
    topk_idx = ids(300, 6, 40)
    want = epcomm.layout(topk_idx, 40, 5)
    for form in gpu.FORMS[framework]:
        for dtype in (np.int32, np.int64):
            assert_same(epcomm.layout(gpu.put(topk_idx.astype(dtype), framework, form), 40, 5), want, framework)


def test_layout_with_owners(framework):
    topk_idx, owners = ids(500, 4, 24), np.random.default_rng(1).integers(0, 7, 24)
    want = epcomm.layout(topk_idx, 24, 7, owners)
    for given in (owners, owners.tolist(), gpu.put(owners, framework), gpu.put(owners.astype(np.int32), framework)):
        assert_same(epcomm.layout(gpu.put(topk_idx, framework), 24, 7, given), want, framework)


@pytest.mark.parametrize("seed", range(8))
def test_layout_of_random_shapes(framework, seed):
    rng = np.random.default_rng(100 + seed)
    for _ in range(6):
        num_tokens, num_topk = int(rng.integers(0, 9000)), int(rng.integers(1, 17))
        num_experts, num_ranks = int(rng.integers(1, 400)), int(rng.integers(1, 100))
        topk_idx = ids(num_tokens, num_topk, num_experts, np.int32, seed)
        want = epcomm.layout(topk_idx, num_experts, num_ranks)
        assert_same(epcomm.layout(gpu.put(topk_idx, framework), num_experts, num_ranks), want, framework)


def test_layout_of_many_tokens(framework):
    """Tiles of more than 32 tokens, and more tiles than are read at once."""
    topk_idx = ids(300_000, 2, 16, np.int32)
    want = epcomm.layout(topk_idx, 16, 4)
    assert_same(epcomm.layout(gpu.put(topk_idx, framework), 16, 4), want, framework)


def test_layout_is_the_same_every_time(framework):
    topk_idx = gpu.put(ids(20_000, 8, 256), framework)
    first = fields_of(epcomm.layout(topk_idx, 256, 8))
    for _ in range(50):
        again = fields_of(epcomm.layout(topk_idx, 256, 8))
        assert all((again[name] == first[name]).all() for name in first)


# ----------------------------------------------------------------------------------- permute, unpermute


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize(("alignment", "capacity"), [(1, None), (8, None), (1, 0), (4, 170), (4, 3000), (1, 2000)])
def test_permute(framework, with_weights, alignment, capacity):
    x, topk_idx = normal((200, 72), BF16), ids(200, 3, 5)
    weights = normal((200, 3), np.float32) if with_weights else None
    options = {"num_experts": 5, "expert_alignment": alignment, "capacity": capacity}
    want = epcomm.permute(x, topk_idx, weights, **options)
    for form in gpu.FORMS[framework]:
        given = [gpu.put(array, framework, form) for array in (x, topk_idx, weights)]
        assert_same(epcomm.permute(*given, **options), want, framework)


@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_experts"),
    [(0, 3, 5), (1, 1, 1), (4096, 8, 256), (300, 33, 64), (300, 40, 3), (2000, 8, 9000), (50, 2, 20_000), (9, 0, 4)],
)
def test_permute_shapes(framework, num_tokens, num_topk, num_experts):
    x, topk_idx = normal((num_tokens, 24), np.float32), ids(num_tokens, num_topk, num_experts)
    weights = normal(topk_idx.shape, np.float32)
    for alignment in (1, 16):
        options = {"num_experts": num_experts, "expert_alignment": alignment}
        want = epcomm.permute(x, topk_idx, weights, **options)
        got = epcomm.permute(*(gpu.put(a, framework) for a in (x, topk_idx, weights)), **options)
        assert_same(got, want, framework)
        back = epcomm.unpermute(got.x, got)
        oracle.assert_bits(gpu.get(back), epcomm.unpermute(want.x, want))


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "f8", "c8", "bfloat16"])
@pytest.mark.parametrize("width", [1, 7, 8, 33, 136, 2880])
def test_permute_moves_any_bytes(framework, dtype, width):
    """B04: rows that are no multiple of 16 bytes, in every column."""
    dtype = arrays.dtype_of(dtype)
    raw = np.random.default_rng(1).integers(0, 256, (60, width * dtype.itemsize)).astype(np.uint8)
    x, topk_idx = raw.view(dtype), ids(60, 3, 5)
    want = epcomm.permute(x, topk_idx, num_experts=5, expert_alignment=4)
    for form in gpu.FORMS[framework]:
        got = epcomm.permute(
            gpu.put(x, framework, form), gpu.put(topk_idx, framework), num_experts=5, expert_alignment=4
        )
        assert gpu.get(got.x).tobytes() == want.x.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("apply_weights", [None, False])
@pytest.mark.parametrize("width", [1, 7, 96, 264, 2880])
def test_unpermute(framework, dtype, apply_weights, width):
    dtype = arrays.dtype_of(dtype)
    topk_idx, weights = ids(150, 6, 9), normal((150, 6), np.float32)
    here = epcomm.permute(normal((150, 4), dtype), topk_idx, weights, num_experts=9, expert_alignment=8)
    there = epcomm.permute(
        *(gpu.put(a, framework) for a in (normal((150, 4), dtype), topk_idx, weights)),
        num_experts=9,
        expert_alignment=8,
    )
    y = normal((len(here.source), width), dtype, 3) * np.array(100, dtype)
    y[here.source < 0] = np.nan  # padding is never read
    y[5, : min(width, 4)] = np.array([np.inf, -0.0, 1e-7, -np.inf], dtype)[:width]
    want = epcomm.unpermute(y, here, apply_weights=apply_weights)
    for form in gpu.FORMS[framework]:
        got = epcomm.unpermute(gpu.put(y, framework, form), there, apply_weights=apply_weights)
        assert gpu.is_kind(got, framework)
        oracle.assert_bits(gpu.get(got), want)
    # Without what permute kept for it.
    fields = {name: getattr(there, name) for name in type(there).__dataclass_fields__}
    for source in (gpu.put(here.source, framework), gpu.put(here.source.astype(np.int64), framework)):
        other = epcomm.Permuted(**{**fields, "source": source})
        oracle.assert_bits(gpu.get(epcomm.unpermute(gpu.put(y, framework), other, apply_weights=apply_weights)), want)


def test_sums_are_not_contracted(framework):
    """A fused multiply-add keeps the 2^-24 that the rounded product loses; a flushed subnormal loses all."""
    one = np.float32(1 + 2.0**-12)
    y = np.array([[-1.0 - 2.0**-11, 2.0**-140], [one, 2.0**-141]], np.float32)
    weights = np.array([[1.0, one]], np.float32)
    topk_idx = np.array([[0, 0]])
    here = epcomm.permute(np.zeros((1, 2), np.float32), topk_idx, weights, num_experts=1)
    want = epcomm.unpermute(y, here)
    assert want[0, 0] == 0 and 0 < want[0, 1] < 2.0**-139
    there = epcomm.permute(*(gpu.put(a, framework) for a in (np.zeros((1, 2), np.float32), topk_idx, weights)),
                           num_experts=1)  # fmt: skip
    oracle.assert_bits(gpu.get(epcomm.unpermute(gpu.put(y, framework), there)), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float32"])
def test_weight_dtypes(framework, dtype):
    """B19: converted to float32 on the way in."""
    x, topk_idx = normal((50, 16), np.float32), ids(50, 3, 5)
    weights = np.random.default_rng(1).standard_normal((50, 3)).astype(arrays.dtype_of(dtype))
    want = epcomm.permute(x, topk_idx, weights, num_experts=5)
    for form in gpu.FORMS[framework]:
        given = [gpu.put(a, framework, form) for a in (x, topk_idx, weights)]
        assert_same(epcomm.permute(*given, num_experts=5), want, framework)


def test_more_than_two_to_the_31_elements(torch):
    """B39: 300,000 received rows of 7,168 bf16, two picks each; row offsets pass 2^31 elements and 2^33 bytes."""
    tokens, width = 300_000, 7168
    x = torch.empty((tokens, width), dtype=torch.bfloat16, device="cuda")
    x[:] = (torch.arange(tokens, device="cuda") % 251)[:, None] + 0.0
    x[:, 1] = (torch.arange(tokens, device="cuda") // 251).to(torch.bfloat16)
    topk_idx = ids(tokens, 2, 8)
    topk_idx[-1] = (7, 3)
    given = torch.from_numpy(topk_idx).cuda()
    got = epcomm.permute(x, given, num_experts=8, expert_alignment=128)
    source = got.source.cpu().numpy()
    order = np.argsort(np.where(topk_idx < 0, 99, topk_idx).reshape(-1), kind="stable")[: (topk_idx >= 0).sum()]
    assert (source[source >= 0] == order).all()
    rows = np.random.default_rng(0).choice(len(source), 1000, replace=False)
    rows = np.concatenate([[0, len(source) - 1, np.flatnonzero(source >= 0)[-1]], rows])
    picked = torch.from_numpy(rows).cuda()
    token = torch.from_numpy(np.maximum(source[rows], 0) // 2).cuda()
    want = torch.where((torch.from_numpy(source[rows]).cuda() >= 0)[:, None], x[token], torch.zeros_like(x[token]))
    assert torch.equal(got.x[picked], want)
    back = epcomm.unpermute(got.x, got)
    picks = (given >= 0).sum(dim=1)
    for begin in range(0, tokens, 50_000):
        part = slice(begin, begin + 50_000)
        assert torch.equal(back[part], (x[part].float() * picks[part, None]).to(torch.bfloat16))
    codes = epcomm.quantize(x[200_000:])
    assert torch.equal(epcomm.quantize(x[-3:]).x.view(torch.uint8), codes.x[-3:].view(torch.uint8))


def test_more_tokens_than_a_launch_dimension_has(framework):
    """B39: 70,000 tokens of 8 items."""
    x, topk_idx = normal((70_000, 8), np.float32), ids(70_000, 2, 6)
    want = epcomm.permute(x, topk_idx, num_experts=6)
    got = epcomm.permute(gpu.put(x, framework), gpu.put(topk_idx, framework), num_experts=6)
    assert_same(got, want, framework)
    oracle.assert_bits(gpu.get(epcomm.unpermute(got.x, got)), epcomm.unpermute(want.x, want))
    assert_same(epcomm.quantize(gpu.put(x, framework)), epcomm.quantize(x), framework)


# --------------------------------------------------------------------------------------------------- fp8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("round_scale", [False, True])
def test_quantize_and_back(framework, dtype, round_scale):
    dtype = arrays.dtype_of(dtype)
    for width in (1, 8, 127, 128, 136, 200, 300, 512, 2880):
        x = normal((37, width), dtype) * np.array(30, dtype)
        x[2, : min(width, 5)] = np.array([np.nan, np.inf, -np.inf, -0.0, 6e-8], dtype)[:width]
        x[3], x[4], x[5] = 0, -0.0, 1e-40
        want = epcomm.quantize(x, round_scale=round_scale)
        for form in gpu.FORMS[framework]:
            got = epcomm.quantize(gpu.put(x, framework, form), round_scale=round_scale)
            assert_same(got, want, framework)
            for to in ("bfloat16", "float16", "float32"):
                back = epcomm.dequantize(got.x, got.scales, to)
                assert gpu.is_kind(back, framework)
                oracle.assert_bits(gpu.get(back), epcomm.dequantize(want.x, want.scales, to))


def test_dequantize_of_any_form(framework):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, axis=0)
    scales = np.array([[1, 0.5], [2, 2.0**-140], [3.4e38, 0.1]], np.float32)
    want = epcomm.dequantize(codes, scales, np.float16)
    for form in gpu.FORMS[framework]:
        given = gpu.put(codes, framework, form), gpu.put(scales, framework, form)
        oracle.assert_bits(gpu.get(epcomm.dequantize(*given, np.float16)), want)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("f32_to_bf16", 16), ("f32_to_f16", 16), ("f32_to_e4m3", 8), ("f16_to_f32", 0), ("e4m3_to_f32", 0)],
)
def test_instructions_equal_the_text_for_every_input(cupy, name, kind):
    """All 2^32 floats, or all codes; of NaNs only that they are NaNs."""
    from epcomm import _device_ops

    inputs = 1 << 32 if kind else (1 << 16 if name[0] == "f" else 1 << 8)
    step = min(inputs, 1 << 28)
    text, fast = cupy.empty(step, np.uint32), cupy.empty(step, np.uint32)
    quiet = {"f32_to_bf16": 0x7F80, "f32_to_f16": 0x7C00, "f16_to_f32": 0x7F800000, "e4m3_to_f32": 0x7F800000}.get(name)
    sign = {16: 0x8000, 8: 0x80, 0: 0x80000000}[kind]
    for first in range(0, inputs, step):
        _device_ops.convert(name, False, first, view(text, "text"))
        _device_ops.convert(name, True, first, view(fast, "fast"))
        same = text == fast
        if quiet is not None:
            same |= ((text & ~np.uint32(sign)) > quiet) & ((fast & ~np.uint32(sign)) > quiet)
        assert bool(same.all()), (name, hex(first + int(cupy.argmin(same))))


@pytest.mark.parametrize(
    "name",
    ["bf16_to_f32", "f32_to_bf16", "f16_to_f32", "f32_to_f16", "e4m3_to_f32", "f32_to_e4m3", "group_scale",
     "group_scale_rounded"],
)  # fmt: skip
def test_the_text_is_the_same_in_both_compilers(cupy, name):
    """formats.h under g++ and NVRTC: each 16-bit pattern, and 2^22 of the 2^32."""
    from epcomm import _device_ops

    for first, count in ((0, 1 << 16), *((base << 32 >> 6, 1 << 16) for base in range(64))):
        if name.startswith("group_scale") and first >= 0x7F800000:
            continue  # magnitudes of finite values only
        if name.startswith(("bf16", "f16", "e4m3")) and first:
            continue
        count = 256 if name == "e4m3_to_f32" else count
        out = cupy.empty(count, np.uint32)
        _device_ops.convert(name, False, first, view(out, "out"))
        want = _rows.convert(name, np.arange(first, first + count, dtype=np.uint64).astype(np.uint32))
        got = out.get()
        if name.endswith("to_f32") or name.startswith("group_scale"):
            oracle.assert_bits(got.view(np.float32), want.view(np.float32), f"{name} {first:#x}")
        else:
            assert (got == want).all(), (name, hex(first))


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("value", [40, 1040, 2**31 - 1, 2**40, -2])
def test_garbage_ids(framework, dtype, value):
    """B12: the error of the host, and the GPU goes on."""
    if value > np.iinfo(dtype).max:
        return
    topk_idx = ids(5000, 4, 40, dtype)
    x = gpu.put(np.zeros((5000, 8), np.float32), framework)
    for token, slot in ((4999, 3), (2500, 0), (701, 2)):
        topk_idx[token, slot] = value
        with pytest.raises(InvalidArgumentError) as wanted:
            epcomm.layout(topk_idx, 40, 4)
        given = gpu.put(topk_idx, framework)
        for call in (
            lambda given=given: epcomm.layout(given, 40, 4),
            lambda given=given: epcomm.permute(x, given, num_experts=40),
            lambda given=given: epcomm.permute(x, given, num_experts=40, capacity=100),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                call()
            assert str(caught.value) == str(wanted.value)
    good = ids(50, 4, 40, dtype)
    assert_same(epcomm.layout(gpu.put(good, framework), 40), epcomm.layout(good, 40))


def test_sources_that_somebody_changed(framework):
    x, topk_idx = normal((20, 8), np.float32), ids(20, 3, 5)
    here = epcomm.permute(x, topk_idx, num_experts=5, expert_alignment=4)
    there = epcomm.permute(gpu.put(x, framework), gpu.put(topk_idx, framework), num_experts=5, expert_alignment=4)
    for change in (
        {"source": np.where(here.source == 3, 60, here.source)},
        {"source": np.where(here.source == 3, -2, here.source)},
        {"source": np.zeros_like(here.source)},
        {"source": np.where(here.source == 3, 2**40, here.source.astype(np.int64))},
        {"num_tokens": 5},
        {"source": here.source[:4]},
        {"source": here.source.astype(np.float32)},
    ):
        texts = []
        for permuted, x_here in ((here, here.x), (there, there.x)):
            fields = {name: getattr(permuted, name) for name in type(permuted).__dataclass_fields__}
            on = {name: gpu.put(value, framework) if permuted is there and isinstance(value, np.ndarray) else value
                  for name, value in change.items()}  # fmt: skip
            with pytest.raises(InvalidArgumentError) as caught:
                epcomm.unpermute(x_here, epcomm.Permuted(**{**fields, **on}))
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["int16", "uint8", "float32", "bool"])
def test_index_dtypes(framework, dtype):
    """B18."""
    with pytest.raises(InvalidArgumentError, match=f"topk_idx: dtype {dtype}; expected int32 or int64"):
        epcomm.layout(gpu.put(np.zeros((4, 2), dtype), framework), 8)


def test_padding_that_does_not_fit(framework):
    given = gpu.put(np.zeros((4, 2), np.float32), framework), gpu.put(np.zeros((4, 2), np.int64) + [0, 1], framework)
    with pytest.raises(InvalidArgumentError, match="expert_alignment=2147483647: 4294967294 rows with padding"):
        epcomm.permute(*given, num_experts=5, expert_alignment=2**31 - 1)


# ------------------------------------------------------------------------------------- streams and arrays


def test_side_streams_are_followed(framework):
    """B31: ids masked on a side stream behind a long kernel; what is read is what the stream has written."""
    topk_idx = ids(4096, 8, 256)
    x = normal((4096, 64), BF16)
    masked = topk_idx.copy()
    masked[::2] = -1
    want = epcomm.permute(x, masked, num_experts=256)
    counts = epcomm.layout(masked, 256, 4)
    module = sys.modules[framework]
    for _ in range(20):
        given, rows = gpu.put(topk_idx, framework), gpu.put(x, framework)
        if framework == "torch":
            module.cuda.synchronize()
            side = module.cuda.Stream()
            with module.cuda.stream(side):
                module.cuda._sleep(20_000_000)
                given[::2] = -1
                got, layout = epcomm.permute(rows, given, num_experts=256), epcomm.layout(given, 256, 4)
            side.synchronize()
        else:
            module.cuda.Device().synchronize()
            spin = module.ones((4096, 4096), np.float32)
            with module.cuda.Stream(non_blocking=True) as side:
                for _ in range(10):
                    spin = spin @ spin * 0
                given[::2] = -1
                got, layout = epcomm.permute(rows, given, num_experts=256), epcomm.layout(given, 256, 4)
                side.synchronize()
        assert_same(got, want)
        assert_same(layout, counts)


def test_captured_calls_replay_with_new_values(torch):
    x = torch.from_numpy(normal((256, 128), np.float32)).cuda().to(torch.bfloat16)
    topk_idx, weights = ids(256, 4, 16), normal((256, 4), np.float32)
    given, scale = torch.from_numpy(topk_idx).cuda(), torch.from_numpy(weights).cuda()

    def step():
        layout = epcomm.layout(given, 16, 4)
        permuted = epcomm.permute(x, given, scale, num_experts=16, expert_alignment=8, capacity=1024)
        return layout, permuted, epcomm.unpermute(permuted.x, permuted), epcomm.quantize(x)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layout, permuted, z, quantized = step()
        with pytest.raises(UnsupportedError, match="permute without capacity= under stream capture"):
            epcomm.permute(x, given, num_experts=16)
    for seed in range(3):
        new = ids(256, 4, 16, seed=seed)
        if seed == 2:
            new[7, 1] = 99  # counts as none: nobody can be told here
        given.copy_(torch.from_numpy(new))
        graph.replay()
        torch.cuda.synchronize()
        new[new > 16] = -1
        x_here = arrays.to_numpy(x.cpu())
        want = epcomm.permute(x_here, new, weights, num_experts=16, expert_alignment=8, capacity=1024)
        assert_same(layout, epcomm.layout(new, 16, 4))
        assert int(permuted.overflow) == want.overflow
        for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_expert", "expert_offsets", "source"):
            oracle.assert_bits(gpu.get(getattr(permuted, name)), getattr(want, name), name)
        oracle.assert_bits(gpu.get(z), epcomm.unpermute(want.x, want))
        assert_same(quantized, epcomm.quantize(x_here))


def test_fresh_memory_that_torch_fills(torch):
    """B32: results are written behind the fill of deterministic mode."""
    x, topk_idx = normal((512, 256), BF16), ids(512, 4, 8)
    want = epcomm.permute(x, topk_idx, num_experts=8)
    back = epcomm.unpermute(want.x, want)
    given = gpu.put(x, "torch"), gpu.put(topk_idx, "torch")
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(50):
            got = epcomm.permute(*given, num_experts=8)
            oracle.assert_bits(gpu.get(epcomm.unpermute(got.x, got)), back)
    finally:
        torch.use_deterministic_algorithms(False)


class OnlyInterface:
    """An array known by ``__cuda_array_interface__`` alone."""

    def __init__(self, array, stream=None, **changes):
        self._kept = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream, **changes}


class OnlyDLPack:
    """An array known by DLPack alone."""

    def __init__(self, array):
        self._kept = array
        self.asked = []

    def __dlpack_device__(self):
        return self._kept.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        self.asked.append(stream)
        return self._kept.__dlpack__(stream=stream)


def test_foreign_arrays(cupy):
    topk_idx = ids(100, 4, 8)
    want = epcomm.layout(topk_idx, 8, 2)
    given = cupy.asarray(topk_idx)
    assert_same(epcomm.layout(OnlyInterface(given), 8, 2), want, "cupy")
    assert_same(epcomm.layout(OnlyInterface(given, stream=1), 8, 2), want, "cupy")
    foreign = OnlyDLPack(given)
    with cupy.cuda.Stream(non_blocking=True) as side:
        assert_same(epcomm.layout(foreign, 8, 2), want, "cupy")
        assert foreign.asked == [side.ptr]


def test_a_stream_that_an_interface_names_is_waited_for(cupy):
    topk_idx = ids(4096, 8, 256)
    masked = topk_idx.copy()
    masked[::2] = -1
    want = epcomm.layout(masked, 256, 4)
    spin = cupy.ones((4096, 4096), np.float32)
    for _ in range(10):
        given = cupy.asarray(topk_idx)
        cupy.cuda.Device().synchronize()
        writer, reader = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with writer:
            for _ in range(10):
                spin = spin @ spin * 0
            given[::2] = -1
        with reader:
            got = epcomm.layout(OnlyInterface(given, stream=writer.ptr), 256, 4)
        reader.synchronize()
        assert_same(got, want)


def test_memory_that_is_not_the_gpus_is_refused_before_it_is_read(cupy):
    given = cupy.zeros((4, 2), np.int32)
    host = np.zeros((4, 2), np.int32)
    for address in (4096, host.ctypes.data):
        with pytest.raises(InvalidArgumentError, match=r"topk_idx: address 0x[0-9a-f]+ is not memory of cuda:0"):
            epcomm.layout(OnlyInterface(given, data=(address, False)), 8)
    assert int(epcomm.layout(given, 8).num_tokens_per_rank[0]) == 4  # the context lives


def test_items_at_odd_addresses(cupy):
    topk_idx, x = ids(50, 3, 5), normal((50, 12), np.float32)
    want = epcomm.permute(x, topk_idx, num_experts=5)

    def odd(array):
        raw = cupy.zeros(array.nbytes + 16, np.uint8)
        raw[1 : 1 + array.nbytes] = cupy.asarray(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        return OnlyInterface(raw, shape=array.shape, typestr=array.dtype.str, strides=None,
                             data=(raw.data.ptr + 1, False))  # fmt: skip

    got = epcomm.permute(odd(x), odd(topk_idx), num_experts=5)
    assert_same(got, want)
    oracle.assert_bits(gpu.get(epcomm.unpermute(odd(want.x), got)), epcomm.unpermute(want.x, want))
    assert_same(epcomm.quantize(odd(x)), epcomm.quantize(x))


def test_a_thread_without_a_context(framework):
    topk_idx = ids(100, 4, 8)
    given = gpu.put(topk_idx, framework)
    results = []
    thread = threading.Thread(target=lambda: results.append(epcomm.layout(given, 8, 2)))
    thread.start()
    thread.join(60)
    assert_same(results[0], epcomm.layout(topk_idx, 8, 2))


def test_gradients_are_not_lost_silently(torch):
    x = torch.zeros(4, 3, requires_grad=True, device="cuda")
    with pytest.raises(InvalidArgumentError, match=r"x requires grad.*x\.detach\(\)"):
        epcomm.quantize(x)


def test_loaded_kernels_spill_nothing_and_use_a_stack_only_where_they_may(need):
    need("gpu", gpu.why_not("cupy"))
    from epcomm import kernels

    for unit in kernels.UNITS:
        module = kernels.load(unit, 0)
        assert set(module.functions) == set(unit.kernels) and all(module.functions.values())
        for name, taken in module.resources.items():
            assert taken.spill_bytes == 0, (name, taken)
            assert taken.stack_bytes == 0 or name in unit.may_use_stack, (name, taken)
        assert kernels.load(unit, 0) is module
