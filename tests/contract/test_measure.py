"""The timed loops of the benchmarks move real bytes, and their times are those of real messages."""

import pytest


def _open(ctx, **kwargs):
    """(communicator, its backend, heap offset of scratch memory); no calls are made that would use it."""
    from epcomm import _host

    shape = {"num_experts": 2, "num_topk": 1, "hidden": 1 << 16, "max_tokens_per_rank": 16, "dtype": "uint8"}
    comm = ctx.comm(**shape, **kwargs)
    bytes_of = _host.heap_bytes(comm._made.shape)
    return comm, comm._engine.backend, bytes_of["control"] + bytes_of["staging"]


def _heap(backend, rank, offset, size):
    import ctypes

    import numpy as np

    address = backend.peer_ptr(rank, offset)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _ping_pong(ctx, size):
    import numpy as np

    from epcomm import _measure

    comm, backend, scratch = _open(ctx)
    peer, words = 1 - ctx.rank, scratch
    source, target = scratch + 4096, scratch + (1 << 19)
    mine = _heap(backend, ctx.rank, source, 1 << 16)
    mine[:] = np.arange(1 << 16) % 251 + ctx.rank
    flow = {"peer": peer, "src": source, "dst": target, "size_bytes": size, "word": words}
    comm.barrier()
    for base in (0, 20):
        seconds = _measure.round_trips(backend, flow, ctx.rank == 0, base, 20)
        assert seconds.shape == (20,) and (seconds > 0).all()
    got = _heap(backend, ctx.rank, target, 1 << 16)
    assert (got[:size] == (np.arange(size) % 251 + peer).astype(np.uint8)).all()
    assert not got[size:].any()
    assert int(_heap(backend, ctx.rank, words, 8).view(np.uint64)[0]) == 40
    comm.barrier()


@pytest.mark.parametrize("size", [0, 8, 1000, 65536])
def test_round_trips(pools, host_backend, size):
    pools.get(2, host_backend).run(_ping_pong, size=size)


def _one_way(ctx, channels):
    import numpy as np

    from epcomm import _measure
    from epcomm.errors import InvalidArgumentError

    comm, backend, scratch = _open(ctx, num_channels=channels)
    flows = [{"peer": 1 - ctx.rank, "channel": c, "src": scratch + 8192 + 512 * c, "dst": scratch + 65536 + 512 * c,
                  "size_bytes": 500, "word": scratch + 64 * c} for c in range(channels)]
    _heap(backend, ctx.rank, scratch + 8192, 512 * channels)[:] = np.arange(512 * channels) % 13 + 1
    comm.barrier()
    if ctx.rank == 0:
        assert (_measure.completions(backend, flows[0], True, 5) > 0).all()
        assert (_measure.completions(backend, flows[0], False, 5) > 0).all()
        assert _measure.stream(backend, flows, True, 200) > 0
        assert _measure.stream(backend, [flows[-1]], False, 10) > 0
        assert _measure.stream(backend, [], False, 10) == 0
        with pytest.raises(InvalidArgumentError, match="share a"):
            _measure.stream(backend, [flows[0], flows[0]], True, 1)
    comm.barrier()
    if ctx.rank == 1:
        words = _heap(backend, ctx.rank, scratch, 64 * channels).view(np.uint64)[::8]
        assert words.tolist() == [205] + [200] * (channels - 1)
        got = _heap(backend, ctx.rank, scratch + 65536, 512 * channels).reshape(channels, 512)
        assert (got[:, :500] == (np.arange(512 * channels) % 13 + 1).reshape(channels, 512)[:, :500]).all()
        assert not got[:, 500:].any()
    comm.barrier()


@pytest.mark.parametrize("channels", [1, 3])
def test_one_way(pools, host_backend, channels):
    pools.get(2, host_backend).run(_one_way, channels=channels)
