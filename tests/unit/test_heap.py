"""Heap sizes at and beyond 2^31 and 2^33 (field report B39) against unbounded integers.

``tests/native/heap_test.cpp`` looks at every word and area; here is what Python asks of the same header.
"""

import random

import pytest
from helpers.native import check

from epcomm import _host

PAGE, LINE = 4096, 64
SIZES = [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**33, 2**33 + 1, 2**35]


def up(value, alignment):
    return -(-value // alignment) * alignment


def expected(shape):
    """The layout of heap.h, counted again."""
    ranks, topk, channels = shape["num_ranks"], shape["num_topk"], shape["num_channels"]
    slots = shape["num_slots"] + 1
    record = up(256 + 640 + 8 * ranks + 8 * shape["max_local_experts"], LINE)
    control = up(ranks * LINE * (3 + channels + slots) + 2 * ranks * record, PAGE)
    staging = up(control + channels * shape["staging_bytes"], PAGE) - control
    rows = max(shape["max_recv_tokens"], shape["max_tokens_per_rank"] * min(ranks, topk), topk)
    payload = up(rows * (shape["row_bytes"] + shape["scale_bytes"]) + 64, LINE)
    slot = up(payload + 2 * up(rows * topk * 4, LINE) + rows * 4, PAGE)
    return {"control": control, "staging": staging, "slots": slots * slot, "total": control + staging + slots * slot,
            "slot_rows": rows, "state_word": 0}  # fmt: skip


def shape_of(**changes):
    shape = {"num_ranks": 8, "num_topk": 8, "num_slots": 2, "num_channels": 4, "max_local_experts": 32,
             "max_tokens_per_rank": 4096, "max_recv_tokens": 32768, "row_bytes": 14336, "scale_bytes": 224,
             "staging_bytes": 0}  # fmt: skip
    return {**shape, **changes}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("changes", [
    lambda size: {"max_recv_tokens": size // 14336 + 1},
    lambda size: {"max_recv_tokens": size, "row_bytes": 16, "num_topk": 1},
    lambda size: {"max_tokens_per_rank": size // 8, "max_recv_tokens": 1, "row_bytes": 16},
    lambda size: {"row_bytes": up(size, 16), "max_tokens_per_rank": 1, "max_recv_tokens": 3},
    lambda size: {"scale_bytes": up(size, 4), "max_tokens_per_rank": 1, "max_recv_tokens": 3},
    lambda size: {"staging_bytes": up(size, LINE)},
    lambda size: {"max_recv_tokens": size // 256, "num_topk": 64, "row_bytes": 16},
], ids=["rows", "small_rows", "own_tokens", "row_bytes", "scales", "staging", "topk"])  # fmt: skip
def test_sizes_around_the_limits_of_32_bits(changes, size):
    shape = shape_of(**changes(size))
    assert _host.heap_bytes(shape) == expected(shape)


def test_300000_rows_of_7168_bf16():
    shape = shape_of(max_recv_tokens=300_000)
    found = _host.heap_bytes(shape)
    assert found == expected(shape)
    assert found["slots"] > 3 * 300_000 * 14336 > 2**33


def test_random_shapes():
    numbers = random.Random(1)
    for _ in range(500):
        ranks, tokens = numbers.randint(1, 512), numbers.randint(1, 1 << numbers.randint(0, 22))
        shape = shape_of(
            num_ranks=ranks, num_topk=numbers.randint(1, 64), num_slots=numbers.randint(1, 8),
            num_channels=numbers.randint(1, 64), max_local_experts=numbers.randint(0, 512), max_tokens_per_rank=tokens,
            max_recv_tokens=numbers.randint(1, tokens * ranks), row_bytes=16 * numbers.randint(1, 4096),
            scale_bytes=4 * numbers.randint(0, 512), staging_bytes=LINE * numbers.randint(0, 1 << 16),
        )  # fmt: skip
        assert _host.heap_bytes(shape) == expected(shape), shape


@pytest.mark.timeout(300)
def test_every_word_and_area_has_a_place_of_its_own():
    assert "all in place" in check("heap_test", "", "--shapes", "100")
