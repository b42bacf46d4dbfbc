"""Mixture-of-Experts dispatch and combine with a choice of control paths."""

from epcomm._results import Combined, Dispatched, Event
from epcomm._version import __version__
from epcomm.communicator import Communicator, Handle
from epcomm.errors import (
    BackendUnavailableError,
    CommTimeoutError,
    CudaError,
    EpcommError,
    InternalError,
    InvalidArgumentError,
    OutOfMemoryError,
    PeerLostError,
    SystemCallError,
    UnsupportedError,
)
from epcomm.ops import Layout, Permuted, Quantized, dequantize, layout, permute, quantize, unpermute

__all__ = [
    "BackendUnavailableError",
    "Combined",
    "CommTimeoutError",
    "Communicator",
    "CudaError",
    "Dispatched",
    "EpcommError",
    "Event",
    "Handle",
    "InternalError",
    "InvalidArgumentError",
    "Layout",
    "OutOfMemoryError",
    "PeerLostError",
    "Permuted",
    "Quantized",
    "SystemCallError",
    "UnsupportedError",
    "__version__",
    "dequantize",
    "layout",
    "permute",
    "quantize",
    "unpermute",
]
