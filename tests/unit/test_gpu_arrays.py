"""Streams and addresses of GPU arrays, over stand-ins: no GPU needed."""

from types import SimpleNamespace

import numpy as np
import pytest

from epcomm import _arrays, _gpu
from epcomm.errors import InvalidArgumentError


@pytest.mark.parametrize(
    "stream, handle",
    [
        (0, 0),
        (1 << 40, 1 << 40),
        (SimpleNamespace(cuda_stream=7), 7),
        (SimpleNamespace(ptr=8), 8),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 9), ptr=8), 9),
        (SimpleNamespace(__cuda_stream__=(0, 10)), 10),
    ],
)
def test_handles_of_streams(stream, handle):
    assert _gpu.handle_of(stream, "dispatch: stream") == handle


@pytest.mark.parametrize("stream", [-1, True, "0", 1.5, object(), SimpleNamespace(ptr="x"), [1]])
def test_what_is_no_stream_is_refused_by_name(stream):
    with pytest.raises(InvalidArgumentError, match="combine: stream is "):
        _gpu.handle_of(stream, "combine: stream")


def test_addresses_of_new_arrays():
    assert _gpu.address(SimpleNamespace(data_ptr=lambda: 4096)) == 4096
    assert _gpu.address(SimpleNamespace(data=SimpleNamespace(ptr=512))) == 512
    assert _gpu.address(SimpleNamespace(data_ptr=lambda: 0)) != 0


@pytest.mark.parametrize(
    "offset, strides, good", [(0, (32, 4), True), (2, (32, 4), False), (0, (34, 4), False), (96, (-32, -4), True)]
)
def test_alignment_of_elements(offset, strides, good):
    memory = np.zeros(192, np.uint8)
    array = np.lib.stride_tricks.as_strided(memory[offset : offset + 4].view(np.float32), (3, 2), strides)
    assert memory.ctypes.data % 16 == 0 and _arrays.view(array, "x").aligned() == good
