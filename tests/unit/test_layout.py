"""The layout pass of the host engine against naive loops."""

import numpy as np
import pytest
from helpers import arrays

from epcomm import _rows, ops
from epcomm._arrays import view
from epcomm.errors import InvalidArgumentError


def read(topk_idx, num_experts):
    return _rows.read_ids(view(topk_idx, "topk_idx"), num_experts)


def picks(rng, shape, num_experts, dtype):
    """Ids with some -1 and some doubles."""
    return rng.integers(-1, num_experts, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("form", arrays.FORMS["numpy"])
def test_ids_in_every_form(dtype, form):
    rng = np.random.default_rng(1)
    for shape in ((0, 3), (1, 1), (5, 0), (4, 8), (33, 7), (100, 1)):
        wanted = picks(rng, shape, 9, dtype)
        got = read(arrays.formed(wanted, form), 9)
        assert got.dtype == np.int32 and got.shape == shape and (got == wanted).all()


@pytest.mark.parametrize("form", ["plain", "rows", "reversed", "fortran"])
@pytest.mark.parametrize(
    "value", [8, 1008, 2**31 - 1, -2, -(2**31), 2**31, 2**32, 2**32 + 3, 2**40, -(2**40), 2**63 - 1]
)
def test_first_bad_id_is_named(form, value):
    dtypes = (np.int64,) if abs(value) > 2**31 - 1 and value != -(2**31) else (np.int32, np.int64)
    for dtype in dtypes:
        wanted = picks(np.random.default_rng(2), (20, 5), 8, dtype)
        for token, slot in ((0, 0), (7, 3), (19, 4)):
            bad = wanted.copy()
            bad[token, slot] = value
            bad[19, 4] = value  # a later one is not the first
            with pytest.raises(
                InvalidArgumentError, match=rf"topk_idx\[{token}, {slot}\]={value}: expected -1 .*0\.\.7"
            ):
                read(arrays.formed(bad, form), 8)
            ids, first = _rows.read_ids(view(arrays.formed(bad, form), "topk_idx"), 8, bad_as_none=True)
            assert first == (token, slot, value)
            assert (ids == np.where((bad < -1) | (bad >= 8), -1, bad)).all()


def test_no_bad_id():
    ids, first = _rows.read_ids(view(np.array([[7, -1]]), "topk_idx"), 8, bad_as_none=True)
    assert ids.tolist() == [[7, -1]] and first is None


def expected_lists(ids, rank_of, num_ranks):
    lists = [
        [token for token, row in enumerate(ids.tolist()) if any(e >= 0 and rank_of[e] == rank for e in row)]
        for rank in range(num_ranks)
    ]
    per_expert = [int((ids == expert).sum()) for expert in range(len(rank_of))]
    return lists, per_expert


# Up to 8 ranks and more than 8 take different loops.
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 9, 64, 65, 1000])
def test_send_lists(num_ranks):
    rng = np.random.default_rng(num_ranks)
    for num_experts in sorted({1, 5, num_ranks, 2 * num_ranks + 1}):
        for num_tokens, num_topk in ((0, 4), (1, 1), (50, 1), (40, 8), (9, num_experts), (3, 0)):
            if num_topk > 500:
                continue
            ids = np.ascontiguousarray(picks(rng, (num_tokens, num_topk), num_experts, np.int32))
            owners = rng.integers(0, num_ranks, num_experts).tolist()
            rank_of, local_of, _ = ops.expert_owners(num_experts, num_ranks, owners)
            begin, tokens, per_expert = _rows.send_lists(ids, rank_of, local_of, num_ranks)
            want, want_per_expert = expected_lists(ids, rank_of, num_ranks)
            assert [tokens[begin[r] : begin[r + 1]] for r in range(num_ranks)] == want
            assert begin[0] == 0 and begin[-1] == len(tokens) and per_expert == want_per_expert


def test_every_token_everywhere_and_nowhere():
    ids = np.tile(np.arange(16, dtype=np.int32), (100, 1))
    rank_of, local_of, _ = ops.expert_owners(16, 8)
    begin, tokens, per_expert = _rows.send_lists(ids, rank_of, local_of, 8)
    assert begin == list(range(0, 900, 100)) and tokens == list(range(100)) * 8 and per_expert == [100] * 16
    begin, tokens, per_expert = _rows.send_lists(np.full((100, 3), -1, np.int32), rank_of, local_of, 8)
    assert begin == [0] * 9 and tokens == [] and per_expert == [0] * 16
