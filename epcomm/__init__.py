"""Mixture-of-Experts dispatch and combine with a choice of control paths."""

from epcomm._version import __version__
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

__all__ = [
    "BackendUnavailableError",
    "CommTimeoutError",
    "CudaError",
    "EpcommError",
    "InternalError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "PeerLostError",
    "SystemCallError",
    "UnsupportedError",
    "__version__",
]
