"""Every kernel of the device engine once or twice at small sizes, on one rank: something for compute-sanitizer."""

import cupy as xp
import numpy as np

import epcomm

SHAPE = {"num_experts": 5, "num_topk": 3, "max_tokens_per_rank": 300, "dtype": "float32", "device": "cuda:0"}


def calls(dtype, hidden, tokens):
    with epcomm.Communicator(hidden=hidden, **SHAPE) as comm:
        x = (xp.arange(tokens * hidden).reshape(tokens, hidden) % 7).astype(dtype)
        idx = xp.arange(tokens * 3).reshape(tokens, 3) * 7 % 6 - 1
        weights = xp.ones((tokens, 3), xp.float32)
        for copy in (None, True):
            out = comm.dispatch(x, idx, weights, scales=xp.ones((tokens, 2), xp.float32), copy=copy)
            again = comm.dispatch(x, handle=out.handle)
            bias = xp.ones(hidden, xp.float32)
            comm.combine(out.x, out.handle, topk_weights=out.topk_weights, bias=bias)
            buffer = comm.combine_buffer(out.handle)
            z = comm.combine(x[:, ::-1] if copy else x, out.handle).x
            del again, buffer
        codes = comm.dispatch(x, idx, quantize="fp8")
        assert len(codes.scales) == len(out.x)
        held = np.unique(xp.asnumpy((idx >= 0).any(axis=1)))
        assert (held.size or not tokens) and z.shape == x.shape
        comm.layout(idx)
        comm.barrier()


if __name__ == "__main__":
    for dtype, hidden, tokens in (("float32", 64, 20), ("float16", 1030, 9), ("float32", 7, 270), ("float16", 512, 0)):
        calls(dtype, hidden, tokens)
    print("small calls done")
