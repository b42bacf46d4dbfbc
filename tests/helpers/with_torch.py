"""Pools whose ranks have torch: its import takes seconds, which must not count against a case's deadline."""

import pytest

from epcomm._registry import BACKENDS
from helpers import arrays

LOAD_TIMEOUT_S = 240
needs_torch = pytest.mark.skipif(arrays.why_not("torch") is not None, reason=arrays.why_not("torch") or "torch is here")


def load(context):
    """Import what the cases use, once per rank."""
    import torch

    import epcomm.torch  # noqa: F401

    torch.set_num_threads(1)  # ranks share the cores


def torch_ranks(pools, backend, num_ranks):
    """A pool of ranks that have imported torch."""
    if next(row for row in BACKENDS if row.name == backend).needs_cuda:
        pytest.skip(f"backend {backend} has device memory; these cases have CPU tensors")
    pool = pools.get(num_ranks, backend)
    pool.run(load, timeout_s=LOAD_TIMEOUT_S)
    return pool
