"""The group that :func:`epcomm.bootstrap.connect` returns, whatever carries its bytes."""

import os
import struct
import threading
import warnings
from collections.abc import Sequence

from epcomm._bootstrap.deadline import TICK_S, Deadline, timed_out
from epcomm.errors import (
    EpcommError,
    InternalError,
    InvalidArgumentError,
    PeerLostError,
    UnsupportedError,
    code_of,
    from_status,
)

MAX_PART_BYTES = 1 << 28  # of one rank in one call; a bootstrap moves descriptions, not tensors

# In front of what each rank sends: the operation it called, and 0 or the code of its refusal (text follows).
_ENVELOPE = struct.Struct("!BB")
ENVELOPE_BYTES = _ENVELOPE.size
_ALL_GATHER, _BARRIER = 1, 2
_NAMES = {_ALL_GATHER: "all_gather", _BARRIER: "barrier"}


class Group:
    """Ranks that can exchange bytes. Made by :func:`epcomm.bootstrap.connect`; a context manager.

    All methods but :meth:`close` are collective: all ranks must call them, in the same order. After a
    `CommTimeoutError` or `PeerLostError` the group is broken for good: later calls raise at once, :meth:`close` works.

    Attributes
    ----------
    rank : int
        This rank.
    num_ranks : int
        Number of ranks.
    kind : str
        What carries the bytes: ``single``, ``torch-store``, ``torch-group``, ``mpi`` or ``rendezvous``.
    """

    kind = "single"

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._calls = 0
        self._closing = False
        self._closed = False
        self._broken: EpcommError | None = None

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._broken else "open"
        return f"<epcomm group: rank {self.rank} of {self.num_ranks}, {self.kind}, {state}>"

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self.num_ranks > 1 and self._pid == os.getpid():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self)
            self._release()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of every rank. Collective: all ranks must call it.

        Waits for every rank, at most ``timeout_s`` of :func:`~epcomm.bootstrap.connect`.

        Parameters
        ----------
        data : bytes
            This rank's bytes, 0 to 2**28 of them; lengths may differ between ranks.

        Returns
        -------
        list of bytes
            In rank order.

        Raises
        ------
        InvalidArgumentError
            A rank's data is no bytes or too long, or ranks called different operations; on all ranks.
        CommTimeoutError
            A rank did not come in time; names those that are missing where that can be known.
        PeerLostError
            A rank's process ended, or it closed its group.
        """
        return self._collective(_ALL_GATHER, data)

    def barrier(self) -> None:
        """Wait until every rank has called it. Collective; waits and raises as :meth:`all_gather`."""
        self._collective(_BARRIER, b"")

    def close(self) -> None:
        """Leave the group. Idempotent; waits for nobody. A peer that calls later gets a `PeerLostError`."""
        if self._closed:
            return
        if self._pid != os.getpid():  # inherited by fork: the connections are the parent's
            self._closed = True
            self._release()
            return
        self._closing = True  # seen by a call of another thread within a tick
        with self._lock:
            if not self._closed:
                self._closed = True
                self._leave()

    # ------------------------------------------------------------------------------ for the kinds of groups

    def _exchange(self, payload: bytes, what: str, deadline: Deadline) -> Sequence[bytes]:
        """Payloads of all ranks, in rank order; any length up to the limit. A failure breaks the group."""
        return [payload]

    def _give_up(self, error: EpcommError) -> None:
        """Tell peers, as far as possible and without waiting for them, that this rank left a call."""

    def _leave(self) -> None:
        """Say goodbye and free what is local."""

    def _release(self) -> None:
        """Free what is local, silently: also called in a forked child and from the destructor."""

    def _check_closing(self, what: str) -> None:
        if self._closing:
            raise UnsupportedError(f"{what}: the group was closed by another thread")

    # ------------------------------------------------------------------------------------------- collectives

    def _collective(self, op: int, data: bytes) -> list[bytes]:
        deadline = Deadline(self._timeout_s)
        what = f"bootstrap {_NAMES[op]}"
        while not self._lock.acquire(timeout=TICK_S):
            if deadline.passed():
                raise timed_out(what, deadline, [], self.num_ranks, "another thread is in a call of this group")
        try:
            self._check_usable(what)
            self._calls += 1
            what = f"{what} (call {self._calls})"
            try:
                received = self._exchange(_wrap(op, data), what, deadline)
            except BaseException as error:
                self._break(error, what)
                raise
        finally:
            self._lock.release()
        return _unwrap(op, received)

    def _check_usable(self, what: str) -> None:
        if self._closed or self._closing:
            raise UnsupportedError(f"{what}: this group is closed")
        if self._pid != os.getpid():
            raise UnsupportedError(f"{what}: this group belongs to process {self._pid}, which forked this one")
        if self._broken is not None:
            raise _like(self._broken)

    def _break(self, error: BaseException, what: str) -> None:
        """Half a call leaves the ranks out of step; nothing after it could be trusted."""
        if not isinstance(error, EpcommError):
            error = lost(f"{what}: rank {self.rank} gave up: {type(error).__name__}: {error}", self.rank)
        self._broken = _like(error)  # without the frames, which hold this group and all that its callers made
        self._give_up(error)


def _like(error: EpcommError) -> EpcommError:
    """The same error, raised nowhere yet."""
    peer = getattr(error, "peer", None)
    return from_status(code_of(error), str(error), -1 if peer is None else peer)


def lost(text: str, peer: int | None) -> PeerLostError:
    """A `PeerLostError` that knows its peer."""
    error = PeerLostError(text)
    error.peer = peer
    return error


def _wrap(op: int, data: bytes) -> bytes:
    """Payload of this rank. A refused argument travels too, so that all ranks raise and stay in step."""
    try:
        view = memoryview(data)
        size_bytes = view.nbytes
    except TypeError:
        text = f"data: {type(data).__name__} is not bytes-like"
        return _ENVELOPE.pack(op, code_of(InvalidArgumentError())) + text.encode()
    if size_bytes > MAX_PART_BYTES:
        text = f"data: {size_bytes} bytes, at most {MAX_PART_BYTES} are allowed"
        return _ENVELOPE.pack(op, code_of(InvalidArgumentError())) + text.encode()
    return _ENVELOPE.pack(op, 0) + view.tobytes()


def _unwrap(op: int, received: Sequence[bytes]) -> list[bytes]:
    called, codes = [], []
    for rank, payload in enumerate(received):
        if len(payload) < ENVELOPE_BYTES or payload[0] not in _NAMES:
            raise InternalError(f"bootstrap: rank {rank} sent {payload[:8]!r}, which is no operation")
        called.append(payload[0])
        codes.append(payload[1])
    if len(set(called)) > 1:
        listing = ", ".join(f"rank {rank} {_NAMES[other]}" for rank, other in enumerate(called))
        raise InvalidArgumentError(f"bootstrap: ranks called different operations: {listing}")
    for rank, code in enumerate(codes):
        if code:
            raise from_status(code, f"rank {rank}: {received[rank][ENVELOPE_BYTES:].decode(errors='replace')}", rank)
    return [bytes(payload[ENVELOPE_BYTES:]) for payload in received]
