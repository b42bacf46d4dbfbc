"""The oracle against results worked out by hand: what is tested by it stands on this."""

import ml_dtypes
import numpy as np
import pytest
from helpers import oracle
from helpers.oracle import RankInput

BF16 = np.dtype(ml_dtypes.bfloat16)


def rows(*values, dtype=np.float32):
    return np.array([[value] for value in values], dtype)


def ids(*lists):
    return np.array(lists, np.int64)


# Two ranks, four experts: 0 and 1 on rank 0, 2 and 3 on rank 1.
INPUTS = [
    RankInput(rows(1, 2, 3), ids([0, 1], [2, -1], [-1, -1]), np.array([[0.5, 0.25], [1, 9], [9, 9]], np.float32)),
    RankInput(rows(4, 5), ids([3, 0], [2, 2]), np.array([[0.125, 2], [4, 8]], np.float32)),
]


def test_default_owners_are_contiguous_and_uneven():
    assert oracle.default_owners(5, 2) == [0, 0, 0, 1, 1]
    assert oracle.default_owners(2, 3) == [0, 1]
    assert [oracle.default_owners(256, 3).count(rank) for rank in range(3)] == [86, 85, 85]


def test_rank_layout():
    first, second = oracle.dispatch(INPUTS, 4).received
    assert first.x.ravel().tolist() == [1, 4]
    assert first.topk_idx.tolist() == [[0, 1], [-1, 0]]
    assert first.topk_weights.tolist() == [[0.5, 0.25], [0, 2]]
    assert first.num_tokens_per_expert.tolist() == [2, 1] and first.counts == [2, 1]
    assert first.num_tokens == 2 and first.overflow == 0 and first.expert_offsets is None
    assert second.x.ravel().tolist() == [2, 4, 5]
    assert second.topk_idx.tolist() == [[0, -1], [1, -1], [0, 0]]
    assert second.topk_weights.tolist() == [[1, 0], [0.125, 0], [4, 8]]
    assert second.counts == [3, 1]


def test_expert_layout_with_padding():
    first, second = oracle.dispatch(INPUTS, 4, layout="expert", alignment=4).received
    assert first.x.ravel().tolist() == [1, 4, 0, 0, 1, 0, 0, 0]
    assert first.topk_idx.tolist() == [0, 0, -1, -1, 1, -1, -1, -1]
    assert first.topk_weights.tolist() == [0.5, 2, 0, 0, 0.25, 0, 0, 0]
    assert first.expert_offsets.tolist() == [0, 4, 8]
    assert first.counts == [2, 1] and first.num_tokens == 3
    assert second.x.ravel().tolist() == [2, 5, 5, 0, 4, 0, 0, 0]
    assert second.topk_weights.tolist() == [1, 4, 8, 0, 0.125, 0, 0, 0]


def test_custom_owners_number_local_experts_in_ascending_order():
    first, second = oracle.dispatch(INPUTS, 4, owners=[1, 0, 1, 0], layout="expert").received
    assert first.x.ravel().tolist() == [1, 4] and first.topk_idx.tolist() == [0, 1]
    assert second.x.ravel().tolist() == [1, 4, 2, 5, 5] and second.topk_idx.tolist() == [0, 0, 1, 1, 1]


def test_capacity_drops_the_last_rows():
    first, second = oracle.dispatch(INPUTS, 4, capacity=2).received
    assert first.overflow == 0 and first.num_tokens == 2 and first.counts is None
    assert second.x.ravel().tolist() == [2, 4] and second.overflow == 1
    assert second.num_tokens_per_expert.tolist() == [1, 1]


def test_capacity_counts_padding_in_expert_layout():
    _, second = oracle.dispatch(INPUTS, 4, layout="expert", alignment=4, capacity=5).received
    assert second.num_tokens == 4 and second.overflow == 0 and second.expert_offsets.tolist() == [0, 4, 5]
    _, second = oracle.dispatch(INPUTS, 4, layout="expert", alignment=4, capacity=2).received
    assert second.num_tokens == 2 and second.overflow == 2
    assert second.num_tokens_per_expert.tolist() == [2, 0]
    _, second = oracle.dispatch(INPUTS, 4, layout="expert", alignment=4, capacity=9).received
    assert second.topk_idx.tolist()[8] == -1 and second.x_is_defined.tolist() == [True] * 8 + [False]


def test_combine_rank_layout_takes_rows_as_they_are():
    routing = oracle.dispatch(INPUTS, 4)
    (z0, _), (z1, _) = oracle.combine(routing, [rows(10, 20), rows(100, 200, 300)])
    assert z0.ravel().tolist() == [10, 100, 0]
    assert z1.ravel().tolist() == [220, 300]


def test_combine_expert_layout_applies_weights_once_per_pick():
    routing = oracle.dispatch(INPUTS, 4, layout="expert")
    ys = [rows(10, 20, 30), rows(100, 200, 300, 400)]
    (z0, _), (z1, _) = oracle.combine(routing, ys)
    assert z0.ravel().tolist() == [0.5 * 10 + 0.25 * 30, 100, 0]
    assert z1.ravel().tolist() == [0.125 * 400 + 2 * 20, 4 * 200 + 8 * 300]
    (z0, _), (z1, _) = oracle.combine(routing, ys, apply_weights=False)
    assert z0.ravel().tolist() == [40, 100, 0] and z1.ravel().tolist() == [420, 500]


def test_combine_carries_weights_back():
    routing = oracle.dispatch(INPUTS, 4, layout="expert")
    carried = [np.array([1, 2, 3], np.float32), np.array([4, 5, 6, 7], np.float32)]
    (_, w0), (_, w1) = oracle.combine(routing, [rows(0, 0, 0), rows(0, 0, 0, 0)], topk_weights=carried)
    assert w0.tolist() == [[1, 3], [4, 0], [0, 0]] and w1.tolist() == [[7, 2], [5, 6]]


def test_dropped_rows_add_nothing():
    routing = oracle.dispatch(INPUTS, 4, capacity=1)
    (z0, _), (z1, _) = oracle.combine(routing, [rows(10), rows(100)])
    assert z0.ravel().tolist() == [10, 100, 0] and z1.ravel().tolist() == [0, 0]


def one_token(values, weights, owners, dtype=np.float32):
    """One token on rank 0 with a pick for each value, and each rank's expert outputs."""
    num_ranks, num_topk = max(owners) + 1, len(values)
    empty = RankInput(np.zeros((0, 1), dtype), np.zeros((0, num_topk), np.int64), np.zeros((0, num_topk), np.float32))
    token = RankInput(rows(1, dtype=dtype), ids(list(range(num_topk))), np.array([weights], np.float32))
    routing = oracle.dispatch([token] + [empty] * (num_ranks - 1), num_topk, owners=owners, layout="expert")
    ys = [rows(*[v for v, owner in zip(values, owners, strict=True) if owner == rank], dtype=dtype).reshape(-1, 1)
          for rank in range(num_ranks)]  # fmt: skip
    return routing, ys


def test_trees_differ_where_they_should():
    # 256 + 1 is not a bf16; two ones on one rank survive as 2 only if they meet first.
    routing, ys = one_token([256, 1, 1], [1, 1, 1], [0, 1, 1], BF16)
    assert oracle.combine(routing, ys)[0][0].item() == 258
    routing, ys = one_token([256, 1, 1], [1, 1, 1], [0, 0, 1], BF16)
    assert oracle.combine(routing, ys)[0][0].item() == 256  # (256 + 1 -> 256) + 1 = 257 -> 256
    assert oracle.combine(routing, ys, tree=oracle.ExactOrder())[0][0].item() == 258
    routing, ys = one_token([256, 1, 1], [1, 1, 1], [0, 1, 2], BF16)
    assert oracle.combine(routing, ys)[0][0].item() == 258
    assert oracle.combine(routing, ys, tree=oracle.TwoHopTree([0, 0, 1]))[0][0].item() == 256
    assert oracle.combine(routing, ys, tree=oracle.TwoHopTree([0, 1, 1]))[0][0].item() == 258


def test_products_are_rounded_before_the_sum():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24; the last term is lost by a rounded product and kept by a fused one.
    value = np.float32(1 + 2**-12)
    routing, ys = one_token([-(1 + 2**-11), value], [1, value], [0, 0])
    assert oracle.combine(routing, ys)[0][0].item() == 0.0


def test_sums_start_at_plus_zero_and_keep_subnormals():
    routing, ys = one_token([-0.0], [1], [0])
    assert not np.signbit(oracle.combine(routing, ys)[0][0].item())
    routing, ys = one_token([1e-40, 1e-41], [1, 1], [0, 0])
    assert oracle.combine(routing, ys)[0][0].item() == np.float32(1e-40) + np.float32(1e-41) != 0


def test_bias_is_added_before_the_one_rounding():
    routing, ys = one_token([256], [1], [0], BF16)
    assert oracle.combine(routing, ys, bias=[np.array([1], np.float32)])[0][0].item() == 256  # 257: tie to even
    assert oracle.combine(routing, ys, bias=[np.array([1.5], np.float32)])[0][0].item() == 258


@pytest.mark.parametrize(
    ("value", "scale", "code"),
    [
        (0.0, 1e-4 / 448, 0x00),
        (-0.0, 1e-4 / 448, 0x80),
        (1.0, 1 / 448, 0x7E),  # the largest is always 448
        (-2.0, 2 / 448, 0xFE),
        (np.nan, 1e-4 / 448, 0x7F),
        (np.inf, 1e-4 / 448, 0x7E),
        (1e-40, 1e-4 / 448, 0x00),
    ],
)
def test_quantize_single(value, scale, code):
    codes, scales = oracle.quantize_fp8(np.array([[value]], np.float32))
    assert scales.item() == np.float32(
        np.float32(max(abs(value) if np.isfinite(value) else 0, np.float32(1e-4))) / np.float32(448)
    ), scale
    assert codes.view(np.uint8).item() == code
    assert abs(scales.item() - scale) < 1e-6 * scale


def test_quantize_groups_are_apart_and_the_last_may_be_short():
    x = np.zeros((2, 130), np.float32)
    x[0, 0], x[0, 128], x[1, 129] = 448, 896, np.inf
    codes, scales = oracle.quantize_fp8(x)
    assert scales.shape == (2, 2) and scales[0].tolist() == [1, 2]
    assert codes[0, 0] == 448 and codes[0, 128] == 448 and codes[1, 129] == 448
    assert oracle.quantize_fp8(x * 0.75, round_scale=True)[1][0].tolist() == [1, 2]
    assert oracle.quantize_fp8(x, round_scale=True)[1][0].tolist() == [1, 2]


def test_compare_helper():
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    oracle.assert_bits(nan[:1], nan[1:])
    with pytest.raises(AssertionError, match=r"first at \(1,\)"):
        oracle.assert_bits(np.array([0.0, 0.0]), np.array([0.0, -0.0]))
    with pytest.raises(AssertionError, match="dtype"):
        oracle.assert_bits(np.zeros(1, np.int32), np.zeros(1, np.int64))
    with pytest.raises(AssertionError, match="shape"):
        oracle.assert_bits(np.zeros(1), np.zeros((1, 1)))
    bf = np.array([1, np.nan], BF16)
    oracle.assert_bits(bf, bf.copy())
