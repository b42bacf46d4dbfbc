"""The first words on a rendezvous connection: version, proof of the key, then who is asking for what.

    client                                rank 0
    HELLO  has key?, nonce       ->
                                 <-       HELLO  has key?, nonce
    PROOF  HMAC("client", nonces)  ->                              (both only with a key)
                                 <-       PROOF  HMAC("rank 0", nonces)
    JOIN   number, rank, ranks   ->
                                 <-       ANSWER welcome | later | refused

Both ends prove the key before either says anything about the job. Each proof covers both nonces and the role of
its maker, so it can be neither replayed nor reflected.
"""

import hmac
import math
import multiprocessing
import secrets
import struct
import threading
from typing import Any, NamedTuple, NoReturn

from epcomm import config
from epcomm._bootstrap.deadline import Deadline
from epcomm._bootstrap.frames import (
    SMALL_BYTES,
    TEXT_BYTES,
    VERSION,
    Connection,
    Frame,
    Kind,
    ProtocolError,
    decode_json,
    encode,
    encode_json,
    pump,
)
from epcomm.errors import EpcommError, InvalidArgumentError, UnsupportedError, code_of, from_status

_HELLO = struct.Struct("!B32s")  # 1 = has a key, nonce
_PROOF_BYTES = 32
HELLO_LIMITS: dict[int, int] = {Kind.HELLO: _HELLO.size}
_CLIENT, _HOST = b"client", b"rank 0"
HOST_LIMITS: dict[int, int] = {Kind.ABORT: TEXT_BYTES, Kind.BYE: 0}  # from a member to rank 0, at any time
MEMBER_LIMITS: dict[int, int] = {Kind.START: 0, **HOST_LIMITS}  # from rank 0 to a member, at any time
KEY_REMEDY = "export the same EPCOMM_AUTHKEY on every rank"


class Ended(Exception):
    """The other end, or the time for this handshake, ended before the handshake did."""


class Refused(Exception):
    """Rank 0 refuses this client; the text says why."""


class Join(NamedTuple):
    """What a client asks for."""

    number: int
    rank: int
    num_ranks: int
    pid: int
    remaining_s: float
    limit: str


def job_key() -> bytes | None:
    """Secret of this job: ``EPCOMM_AUTHKEY``, else what multiprocessing gave to its children, else none."""
    text = config.get("EPCOMM_AUTHKEY")
    if text is not None:
        return text.encode()
    if multiprocessing.parent_process() is not None:
        return bytes(multiprocessing.current_process().authkey)
    return None


def _proof(key: bytes, role: bytes, client_nonce: bytes, host_nonce: bytes) -> bytes:
    return hmac.digest(key, b"epcomm rendezvous %d %s\0" % (VERSION, role) + client_nonce + host_nonce, "sha256")


def next_frame(connection: Connection, deadline: Deadline, stop: threading.Event | None = None) -> Frame:
    """Wait for one frame; :class:`Ended` if none comes."""
    while not connection.inbox:
        if connection.lost is not None:
            raise Ended(connection.lost)
        if deadline.passed() or (stop is not None and stop.is_set()):
            raise Ended(f"silent for {deadline.elapsed():.1f} s")
        pump([connection], deadline.tick())
    return connection.inbox.popleft()


def error_fields(error: EpcommError) -> dict[str, Any]:
    """An error as JSON fields, for :func:`error_from`."""
    return {"code": code_of(error), "text": str(error)[:4000], "peer": getattr(error, "peer", None)}


def error_from(fields: dict[str, Any]) -> EpcommError:
    """The error that another rank described."""
    code, text, peer = fields.get("code"), fields.get("text"), fields.get("peer")
    if not isinstance(code, int) or not isinstance(text, str):
        raise ProtocolError("an error without code or text")
    return from_status(code, text, peer if isinstance(peer, int) else -1)


def refuse(connection: Connection, error: EpcommError) -> None:
    """Queue rank 0's refusal."""
    connection.queue(encode_json(Kind.ANSWER, {"answer": "refused", **error_fields(error)}))


# ------------------------------------------------------------------------------------------------- rank 0's end


def serve(connection: Connection, key: bytes | None, deadline: Deadline, stop: threading.Event) -> Join:
    """Rank 0's half, up to the client's JOIN.

    Raises
    ------
    Refused
        The client failed; it has been told, as far as it understands.
    Ended
        It went away, kept silent or sent something else.
    """
    try:
        hello = next_frame(connection, deadline, stop)
    except Ended:
        if connection.foreign_version is not None:
            text = f"rank 0 speaks version {VERSION} of the rendezvous, not {connection.foreign_version}"
            _refuse(connection, UnsupportedError(f"{text}: install the same epcomm on all ranks"), text)
        raise
    has_key, client_nonce = _unpack_hello(hello.payload)
    host_nonce = secrets.token_bytes(32)
    connection.limits = {Kind.PROOF: _PROOF_BYTES} if key else {Kind.JOIN: SMALL_BYTES}
    connection.queue(encode(Kind.HELLO, _HELLO.pack(key is not None, host_nonce)))
    connection.flush()
    if has_key != (key is not None):
        # Each end sees it by itself from the other's HELLO.
        raise Refused("it has a key and rank 0 has none" if has_key else "it has no key and rank 0 has one")
    if key:
        proof = next_frame(connection, deadline, stop).payload
        if not hmac.compare_digest(proof, _proof(key, _CLIENT, client_nonce, host_nonce)):
            _refuse(
                connection,
                InvalidArgumentError(f"EPCOMM_AUTHKEY: rank 0 has another key; {KEY_REMEDY}"),
                "it has another key (EPCOMM_AUTHKEY)",
            )
        connection.limits = {Kind.JOIN: SMALL_BYTES}
        connection.queue(encode(Kind.PROOF, _proof(key, _HOST, client_nonce, host_nonce)))
        connection.flush()
    return _unpack_join(next_frame(connection, deadline, stop).payload)


def _refuse(connection: Connection, error: EpcommError, why: str) -> NoReturn:
    refuse(connection, error)
    connection.flush()
    raise Refused(why)


def _unpack_hello(payload: bytes) -> tuple[bool, bytes]:
    if len(payload) != _HELLO.size:
        raise Ended("its greeting has the wrong length")
    has_key, nonce = _HELLO.unpack(payload)
    return bool(has_key), nonce


def _unpack_join(payload: bytes) -> Join:
    try:
        fields = decode_json(payload)
        join = Join(*(fields[name] for name in Join._fields))
    except (ProtocolError, KeyError):
        raise Ended("its request is not understood") from None
    numbers_ok = all(type(value) is int and 0 <= value < 1 << 63 for value in join[:4])
    if not numbers_ok or type(join.remaining_s) not in (int, float) or type(join.limit) is not str:
        raise Ended("its request is not understood")
    if not (math.isfinite(join.remaining_s) and join.remaining_s >= 0):
        raise Ended("its request is not understood")
    return join


# ------------------------------------------------------------------------------------------------ client's end


def ask(connection: Connection, key: bytes | None, join: Join, where: str, deadline: Deadline) -> dict[str, Any]:
    """A client's half, up to rank 0's answer.

    Returns
    -------
    dict
        ``answer`` is "welcome", "later" or "refused"; the latter two have a ``text``.

    Raises
    ------
    InvalidArgumentError
        The two ends hold different keys, or one has none.
    UnsupportedError
        The two ends speak different versions.
    Ended
        Whoever listens there did not finish; try again.
    """
    try:
        return _ask(connection, key, join, where, deadline)
    except Ended:
        if connection.foreign_version is not None:
            raise UnsupportedError(
                f"rendezvous: rank 0 at {where} speaks version {connection.foreign_version}, this rank version "
                f"{VERSION}: install the same epcomm on all ranks"
            ) from None
        raise


def _ask(connection: Connection, key: bytes | None, join: Join, where: str, deadline: Deadline) -> dict[str, Any]:
    client_nonce = secrets.token_bytes(32)
    connection.queue(encode(Kind.HELLO, _HELLO.pack(key is not None, client_nonce)))
    connection.flush()
    connection.limits = {Kind.HELLO: _HELLO.size, Kind.ANSWER: TEXT_BYTES}
    frame = next_frame(connection, deadline)
    if frame.kind == Kind.ANSWER:
        return _answer(frame, ("refused",))
    has_key, host_nonce = _unpack_hello(frame.payload)
    if has_key != (key is not None):
        host_has, client_has = ("a key", "none") if has_key else ("none", "a key")
        who = f"rank 0 at {where} has {host_has}, this rank has {client_has}"
        raise InvalidArgumentError(f"EPCOMM_AUTHKEY: {who}; {KEY_REMEDY}")
    connection.limits = {Kind.PROOF: _PROOF_BYTES, Kind.ANSWER: TEXT_BYTES}
    if key:
        connection.queue(encode(Kind.PROOF, _proof(key, _CLIENT, client_nonce, host_nonce)))
        connection.flush()
        frame = next_frame(connection, deadline)
        if frame.kind == Kind.ANSWER:
            return _answer(frame, ("refused",))
        if not hmac.compare_digest(frame.payload, _proof(key, _HOST, client_nonce, host_nonce)):
            raise InvalidArgumentError(f"EPCOMM_AUTHKEY: rank 0 at {where} has another key; {KEY_REMEDY}")
    connection.limits = {Kind.ANSWER: TEXT_BYTES, **MEMBER_LIMITS}  # more can follow at once
    connection.queue(encode_json(Kind.JOIN, join._asdict()))
    connection.flush()
    return _answer(next_frame(connection, deadline), ("welcome", "later", "refused"))


def _answer(frame: Frame, allowed: tuple[str, ...]) -> dict[str, Any]:
    """An answer; one that comes before the other end proved the key can only refuse."""
    try:
        if frame.kind != Kind.ANSWER:
            raise ProtocolError(f"it sent a frame of kind {frame.kind} before its answer")
        fields = decode_json(frame.payload)
    except ProtocolError as error:
        raise Ended(str(error)) from None
    if fields.get("answer") not in allowed:
        raise Ended("its answer is not understood")
    return fields
