"""What tests of the device engine share: small calls on CuPy arrays, and what came of them."""

import importlib

import numpy as np

SHAPE = {"num_experts": 6, "num_topk": 2, "hidden": 16, "max_tokens_per_rank": 8, "dtype": "float32"}


def why_not():
    try:
        importlib.import_module("epcomm._nvlink").probe()
    except Exception as error:
        return f"nvlink: {error}"
    return None


def outcome(call):
    import epcomm

    try:
        call()
    except epcomm.EpcommError as error:
        return type(error).__name__, str(error)
    return None


def rounds(comm, xp, count=2):
    from epcomm.ops import expert_owners

    owners = expert_owners(6, comm.num_ranks)[0]
    x, idx = xp.ones((5, 16), xp.float32), xp.arange(10).reshape(5, 2) % 6
    for _ in range(count):
        out = comm.dispatch(x, idx)
        z = comm.combine(out.x, out.handle).x
        ranks = [len({owners[expert] for expert in row}) for row in np.arange(10).reshape(5, 2) % 6]
        assert (z.get() == np.array(ranks, np.float32)[:, None]).all(), z
