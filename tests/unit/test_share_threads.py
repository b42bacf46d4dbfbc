"""Host threads of a rank that asked for none: its part of the cores, whatever hosts and bindings there are."""

import pytest

from epcomm._create import share_threads


def told(host, cores, threads=None):
    return {"host": host, "cores": list(cores), "threads": threads}


@pytest.mark.parametrize(("ranks", "expected"), [
    ([told("a", range(8))] * 2, [4, 4]),
    ([told("a", range(2))] * 5, [1] * 5),  # fewer cores than ranks
    ([told("a", range(7))] * 2, [3, 3]),
    ([told("a", range(8)), told("b", range(8))], [8, 8]),  # the same numbers on another host are other cores
    ([told("a", range(16))] * 2 + [told("b", range(16))] * 4, [8, 8, 4, 4, 4, 4]),
    ([told("a", range(4)), told("a", range(4, 12))], [4, 8]),  # bound by a launcher
    ([told("a", range(8)), told("a", range(4))], [6, 2]),  # 4 alone, 4 shared
    ([told("a", range(8), threads=3), told("a", range(8))], [3, 4]),
    ([told("a", range(600))], [256]),
    ([told("a", [])], [1]),
])  # fmt: skip
def test_parts(ranks, expected):
    assert share_threads(ranks) == expected
