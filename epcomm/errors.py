"""Typed errors. C++ returns a status; :func:`from_status` is the one place that makes it an exception."""


class EpcommError(Exception):
    """Base of every error that epcomm raises."""


class InvalidArgumentError(EpcommError, ValueError):
    """An argument is outside its range; the text names it, its value and what is allowed."""


class UnsupportedError(EpcommError, NotImplementedError):
    """The operation exists, but not in this form, on this backend or right now."""


class BackendUnavailableError(EpcommError):
    """No backend works between all ranks; the text gives each one's reason."""


class CommTimeoutError(EpcommError, TimeoutError):
    """A wait passed its deadline; the text names operation, phase, peer, expected and seen value."""

    peer: int | None = None


class PeerLostError(EpcommError, ConnectionError):
    """A peer's process ended, or it closed or gave up its communicator. ``peer`` is its rank."""

    peer: int | None = None


class OutOfMemoryError(EpcommError, MemoryError):
    """Memory could not be had; the text gives bytes asked, bytes free and the remedy."""


class SystemCallError(EpcommError, OSError):
    """A system call failed; the text names it and its error number."""


class CudaError(EpcommError):
    """A CUDA call failed; the text names it and its code."""


class InternalError(EpcommError):
    """A bug in epcomm; please report it with the text."""


# Numbers of epcomm::Code in include/epcomm/status.hpp.
CODES: dict[int, type[EpcommError]] = {
    1: InvalidArgumentError,
    2: UnsupportedError,
    3: BackendUnavailableError,
    4: CommTimeoutError,
    5: PeerLostError,
    6: OutOfMemoryError,
    7: SystemCallError,
    8: CudaError,
    9: InternalError,
}


def code_of(error: BaseException) -> int:
    """Number that stands for an exception in an entry word; anything foreign is an internal error."""
    for code, cls in CODES.items():
        if isinstance(error, cls):
            return code
    return 9


def from_status(code: int, text: str, peer: int = -1, sys_errno: int = 0) -> EpcommError:
    """The exception for a status of the C++ layer."""
    cls = CODES.get(code, InternalError)
    if cls is SystemCallError and sys_errno:
        return SystemCallError(sys_errno, text)
    error = cls(text)
    if isinstance(error, (CommTimeoutError, PeerLostError)):
        error.peer = peer if peer >= 0 else None
    return error
