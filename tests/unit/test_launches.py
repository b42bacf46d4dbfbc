"""The arithmetic of kernel launches, and the parts of kernels that are plain functions: no GPU needed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import _device_ops, ops

MAX_INT32 = 2**31 - 1
SHARED = 48 * 1024  # what a launch may ask for without being allowed more
TOKENS = (0, 1, 31, 32, 33, 4096, 4097, 70_000, 2**28, MAX_INT32)


def divided(a, b):
    return -(-a // b)


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 31, 32, 33, 64, 1023, 1024, 1025, 65536, MAX_INT32])
@pytest.mark.parametrize("num_experts", [1, 256, 4096, 4097, MAX_INT32])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_layout_plan(num_tokens, num_experts, num_ranks):
    plan = _device_ops.layout_plan(num_tokens, num_experts, num_ranks)
    tile, ranks = plan["tile_tokens"], min(num_ranks, 1024)
    assert tile % 32 == 0 and tile >= 32
    assert plan["num_tiles"] == max(1, divided(num_tokens, tile)) <= MAX_INT32
    assert 0 < plan["shared_bytes"] <= SHARED
    assert plan["num_passes"] == divided(num_ranks, 1024)
    assert plan["words_offset"] % 8 == 0 and plan["words_offset"] >= 24 + 4 * num_experts
    assert plan["state_bytes"] == plan["words_offset"] + 8 * plan["num_tiles"] * ranks
    # The usual call fills the device with small tiles.
    if num_tokens <= 32 * 512:
        assert tile == 32


@pytest.mark.parametrize("num_experts", [0, 1, 32, 256, 2048, 2049, 8192, 8193, 2**20, 2**24, MAX_INT32 - 1])
@pytest.mark.parametrize("num_picks", [0, 1, 255, 256, 32_768, 2_400_000, 2**30, MAX_INT32])
def test_permute_plan(num_picks, num_experts):
    plan = _device_ops.permute_plan(num_picks, num_experts)
    picks, tiles, experts = plan["tile_picks"], plan["num_tiles"], max(1, num_experts)
    assert picks % 32 == 0 and 256 <= picks <= MAX_INT32
    assert tiles == max(1, divided(num_picks, picks)) <= 2048
    assert plan["blocks"] == divided(tiles, plan["warps"]) and 32 * plan["warps"] <= 128
    assert 0 < plan["shared_bytes"] <= SHARED
    assert plan["shared_bytes"] == 4 * plan["warps"] * min(experts, 8192)
    assert plan["num_passes"] == divided(experts, 8192) and plan["scan_blocks"] == divided(experts, 32)
    assert plan["starts_offset"] % 8 == 0
    assert plan["starts_offset"] >= plan["tile_counts_offset"] + 4 * tiles * experts
    assert plan["scratch_bytes"] == plan["starts_offset"] + 8 * experts
    assert tiles <= 2 or 4 * tiles * experts <= 64 << 20
    # Row numbers are counted on from at most 2^31 in 32 bits.
    assert 2**31 + picks <= 2**32


@pytest.mark.parametrize("pieces", [1, 32, 33, 64, 128, 200, 896, 2**20, 2**40])
@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 4096, MAX_INT32])
def test_row_grid(num_rows, pieces):
    grid = _device_ops.row_grid(num_rows, pieces)
    assert grid["lanes"] * grid["rows"] == 256 and grid["lanes"] % 32 == 0  # whole warps for each row
    assert grid["blocks"] == divided(num_rows, grid["rows"]) <= MAX_INT32
    assert grid["lanes"] == 256 or grid["lanes"] >= pieces


@pytest.mark.parametrize(
    ("num_experts", "alignment", "tail", "wanted"),
    [(256, 1, False, 0), (256, 1, True, 256), (0, 128, True, 256), (256, 2, False, 256), (256, 128, False, 1024),
     (32, MAX_INT32, True, 384), (MAX_INT32 - 1, 128, True, 4 * (MAX_INT32 - 1) + 256)],
)  # fmt: skip
def test_fill_blocks(num_experts, alignment, tail, wanted):
    assert _device_ops.fill_blocks(num_experts, alignment, tail) == wanted


@pytest.mark.parametrize(
    ("num_tokens", "groups", "wanted"),
    [(0, 56, 0), (1, 1, 1), (16, 1, 1), (17, 1, 2), (512, 56, 1792), (300_000, 56, 2048), (MAX_INT32, 2**24, 2048)],
)  # fmt: skip
def test_cast_blocks(num_tokens, groups, wanted):
    assert _device_ops.cast_blocks(num_tokens, groups) == wanted


@pytest.mark.parametrize("ored", [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 2**63, 2**64 - 16, 14336 | 7])
def test_unit_that_everything_is_a_multiple_of(ored):
    unit = _device_ops.unit_of(ored)
    assert ored % unit == 0 and (unit == 16 or ored % (2 * unit) != 0)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_owners_by_arithmetic_are_those_of_the_table(num_experts, num_ranks):
    owners = ops.expert_owners(num_experts, num_ranks)[0]
    for expert in {0, num_experts // 2, num_experts - 1, *range(0, num_experts, 97)}:
        assert _device_ops.contiguous_owner(expert, num_experts, num_ranks) == owners[expert]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 2**30, MAX_INT32])
def test_owners_of_as_many_experts_as_there_can_be(num_ranks):
    share, more = divmod(MAX_INT32, num_ranks)
    for expert in (0, 1, MAX_INT32 // 2, MAX_INT32 - 1):
        larger = (share + 1) * more
        want = expert // (share + 1) if expert < larger else more + (expert - larger) // share
        assert _device_ops.contiguous_owner(expert, MAX_INT32, num_ranks) == want


@pytest.mark.parametrize("tag", [1, 2, 2**31, 2**32 - 1])
@pytest.mark.parametrize("count", [0, 1, 32, MAX_INT32])
@pytest.mark.parametrize("prefix", [False, True])
def test_word_of_a_tile(tag, count, prefix):
    assert _device_ops.word_parts(tag, count, prefix) == (tag, count, prefix)


def test_the_first_bad_id_is_named_whatever_its_size():
    error = _device_ops.bad_id(2**64 - 1, 2**40, 8, 256)
    assert str(error) == "topk_idx[0, 0]=1099511627776: expected -1 (no pick) or an expert 0..255"
    error = _device_ops.bad_id(2**64 - 1 - (MAX_INT32 - 1), -2, 3, 7)
    assert str(error).startswith("topk_idx[715827882, 0]=-2: ")
