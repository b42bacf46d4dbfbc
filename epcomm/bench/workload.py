"""The data of a benchmark: the same on every rank and in every case, made from a seed.

All values are small integers and the weights are halves, so that every sum is exact in every row type: a case that
loses, doubles or misplaces a row gives another number, whatever the order of its sum.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np

from epcomm.ops import expert_owners

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Shape:
    """What is measured. ``tokens`` is per rank."""

    mode: str
    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str
    layout: Literal["rank", "expert"]
    seed: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @property
    def row_bytes(self) -> int:
        """Payload bytes of one row."""
        return self.hidden * DTYPES[self.dtype].itemsize


class Workload:
    """One rank's tokens and picks, and how many rows they make."""

    def __init__(self, shape: Shape, rank: int, num_ranks: int) -> None:
        self.shape, self.rank, self.num_ranks = shape, rank, num_ranks

    @cached_property
    def topk_idx(self) -> np.ndarray:
        """``[tokens, topk]`` int64: distinct experts, uniform over all of them."""
        return self.picks_of(self.rank)

    def picks_of(self, rank: int) -> np.ndarray:
        """Any rank's picks; every rank can make them."""
        rng = np.random.default_rng([self.shape.seed, rank])
        scores = rng.random((self.shape.tokens, self.shape.experts), dtype=np.float32)
        return np.argsort(scores, axis=1)[:, : self.shape.topk].astype(np.int64)

    @cached_property
    def topk_weights(self) -> np.ndarray:
        """``[tokens, topk]`` float32: 0.5 and 1."""
        token, k = np.indices((self.shape.tokens, self.shape.topk))
        return np.where((token + k) % 2, np.float32(0.5), np.float32(1))

    @cached_property
    def x(self) -> np.ndarray:
        """``[tokens, hidden]``: integers from -2 to 2."""
        token, column = np.ogrid[: self.shape.tokens, : self.shape.hidden]
        return ((token * 3 + column * 7 + self.rank) % 5 - 2).astype(DTYPES[self.shape.dtype])

    @cached_property
    def owner(self) -> np.ndarray:
        """``[experts]``: the rank of each expert."""
        return np.array(expert_owners(self.shape.experts, self.num_ranks)[0])

    def is_at(self, topk_idx: np.ndarray) -> np.ndarray:
        """``[tokens, num_ranks]``: whether the rank holds one of the token's experts."""
        is_at = np.zeros((len(topk_idx), self.num_ranks), dtype=bool)
        is_at[np.arange(len(topk_idx))[:, None], self.owner[topk_idx]] = True
        return is_at

    def rows(self, topk_idx: np.ndarray) -> np.ndarray:
        """``[num_ranks]``: rows that these picks send to each rank in the shape's layout."""
        if self.shape.layout == "expert":
            return np.bincount(self.owner[topk_idx.ravel()], minlength=self.num_ranks)
        return self.is_at(topk_idx).sum(axis=0)

    @cached_property
    def max_tokens_received(self) -> int:
        """The most (token, destination rank) pairs that reach any rank: a token travels once to each rank."""
        pairs = [self.is_at(self.picks_of(rank)).sum(axis=0) for rank in range(self.num_ranks)]
        return int(np.sum(pairs, axis=0).max())

    @cached_property
    def rows_sent(self) -> int:
        """Rows that this rank's tokens become, those to itself included."""
        return int(self.rows(self.topk_idx).sum())

    def wanted(self) -> np.ndarray:
        """What combine must give if every expert returns its input: exact in every row type.

        In rank layout a row comes back once from each rank; in expert layout once for each pick, times its weight.
        """
        times = self.topk_weights if self.shape.layout == "expert" else self.is_at(self.topk_idx)
        factor = times.sum(axis=1, dtype=np.float32, keepdims=True)
        return (self.x.astype(np.float32) * factor).astype(self.x.dtype)
