"""The group that our own rendezvous makes: every rank talks to rank 0, which knows who is missing and tells all."""

import struct
from collections.abc import Iterable, Sequence

from epcomm._bootstrap.deadline import Deadline, timed_out
from epcomm._bootstrap.frames import Connection, Kind, close_politely, encode, encode_json, pump, send_all
from epcomm._bootstrap.group import ENVELOPE_BYTES, MAX_PART_BYTES, Group, lost
from epcomm._bootstrap.handshake import HOST_LIMITS, MEMBER_LIMITS, error_fields
from epcomm._bootstrap.rendezvous import FAREWELL_S, GRACE_S, abort_error
from epcomm.errors import EpcommError, InternalError

_DATA = struct.Struct("!Qd")  # number of the call, seconds its sender still waits
_RESULT = struct.Struct("!QI")  # number of the call, ranks; then one length per rank, then the bytes
_MAX_SENT = MAX_PART_BYTES + ENVELOPE_BYTES
CALL_LIMITS: dict[int, int] = {Kind.DATA: _MAX_SENT + _DATA.size, **HOST_LIMITS}


class _Star(Group):
    """What both ends of the star share."""

    kind = "rendezvous"

    def _connections(self) -> Iterable[Connection]:
        raise NotImplementedError

    def _give_up(self, error: EpcommError) -> None:
        connections = [connection for connection in self._connections() if connection.lost is None]
        for connection in connections:
            connection.queue(encode_json(Kind.ABORT, error_fields(error)))
        send_all(connections, FAREWELL_S)

    def _leave(self) -> None:
        connections = list(self._connections())
        for connection in connections:
            if self._broken is None:
                connection.queue(encode(Kind.BYE))
        if self._broken is None:
            send_all(connections, FAREWELL_S)
            for connection in connections:
                connection.discard()  # unread input would turn the farewell into a reset
                connection.close()
        else:
            close_politely(connections, FAREWELL_S)

    def _release(self) -> None:
        for connection in self._connections():
            connection.close()


class HostGroup(_Star):
    """Rank 0's end.

    Parameters
    ----------
    members : dict
        Connections of all other ranks, with :data:`CALL_LIMITS`.
    """

    def __init__(self, members: dict[int, Connection], num_ranks: int, timeout_s: float) -> None:
        self._members = dict(sorted(members.items()))
        super().__init__(0, num_ranks, timeout_s)

    def _connections(self) -> Iterable[Connection]:
        return self._members.values()

    def _exchange(self, payload: bytes, what: str, deadline: Deadline) -> Sequence[bytes]:
        parts: dict[int, bytes] = {0: payload}
        while len(parts) < self.num_ranks:
            for rank, connection in self._members.items():
                if rank not in parts and connection.inbox:
                    parts[rank] = self._take(rank, connection, what, deadline)
                self._check(rank, connection, what)
            missing = [rank for rank in self._members if rank not in parts]
            if not missing:
                break
            self._check_closing(what)
            if deadline.passed():
                raise timed_out(what, deadline, missing, self.num_ranks)
            pump(self._members.values(), deadline.tick())
        ordered = [parts[rank] for rank in range(self.num_ranks)]
        self._send(ordered, what, deadline)
        return ordered

    def _take(self, rank: int, connection: Connection, what: str, deadline: Deadline) -> bytes:
        frame = connection.inbox.popleft()
        if frame.kind == Kind.ABORT:
            raise abort_error(frame.payload, f"rank {rank}")
        if frame.kind == Kind.BYE:
            raise lost(f"{what}: rank {rank} left the group", rank)
        if len(frame.payload) < _DATA.size:
            raise InternalError(f"{what}: rank {rank} sent {len(frame.payload)} bytes, too few for a call")
        call, remaining_s = _DATA.unpack_from(frame.payload)
        if call != self._calls:
            raise InternalError(f"{what}: rank {rank} is in call {call}, rank 0 in call {self._calls}")
        if remaining_s < deadline.remaining():  # false for NaN
            deadline.shorten(remaining_s, f"the timeout_s of rank {rank}")
        return frame.payload[_DATA.size :]

    def _check(self, rank: int, connection: Connection, what: str) -> None:
        """A rank that gave its part can still give up or die before the call is over."""
        if connection.inbox and connection.inbox[0].kind == Kind.ABORT:
            raise abort_error(connection.inbox[0].payload, f"rank {rank}")
        if connection.inbox and connection.inbox[0].kind == Kind.BYE:
            raise lost(f"{what}: rank {rank} left the group", rank)
        if connection.lost is not None and not connection.inbox:
            raise lost(f"{what}: rank {rank} was lost: {connection.lost}", rank)

    def _send(self, ordered: Sequence[bytes], what: str, deadline: Deadline) -> None:
        lengths = struct.pack(f"!{self.num_ranks}Q", *map(len, ordered))
        head = _RESULT.pack(self._calls, self.num_ranks) + lengths
        result = encode(Kind.RESULT, b"".join([head, *ordered]))
        behind = dict(self._members)
        for connection in behind.values():
            connection.queue(result)
            connection.flush()
        # Whoever has its whole result may leave at once; only the others can still spoil this call.
        while behind := {rank: member for rank, member in behind.items() if member.unsent or member.send_failed}:
            for rank, connection in behind.items():
                self._check(rank, connection, what)
            self._check_closing(what)
            if deadline.passed():
                raise timed_out(what, deadline, list(behind), self.num_ranks, "they do not take the result")
            pump(self._members.values(), deadline.tick())


class MemberGroup(_Star):
    """Any other rank's end.

    Parameters
    ----------
    connection : Connection
        To rank 0.
    """

    def __init__(self, connection: Connection, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._host = connection
        head = _RESULT.size + 8 * num_ranks
        connection.limits = {Kind.RESULT: head + num_ranks * _MAX_SENT, **MEMBER_LIMITS}
        super().__init__(rank, num_ranks, timeout_s)

    def _connections(self) -> Iterable[Connection]:
        return [self._host]

    def _exchange(self, payload: bytes, what: str, deadline: Deadline) -> Sequence[bytes]:
        host = self._host
        host.queue(encode(Kind.DATA, _DATA.pack(self._calls, deadline.remaining()) + payload))
        host.flush()
        # Rank 0 knows this deadline and who is missing; it gets a moment to say so.
        patience = Deadline(deadline.remaining() + GRACE_S)
        while not host.inbox:
            if host.lost is not None:
                raise lost(f"{what}: rank 0 was lost: {host.lost}", 0)
            self._check_closing(what)
            if patience.passed():
                raise timed_out(what, deadline, [0], self.num_ranks, "rank 0 has not come, maybe others too")
            pump([host], patience.tick())
        frame = host.inbox.popleft()
        if frame.kind == Kind.ABORT:
            raise abort_error(frame.payload, "rank 0")
        if frame.kind == Kind.BYE:
            raise lost(f"{what}: rank 0 left the group", 0)
        return self._unpack(frame.payload, what)

    def _unpack(self, payload: bytes, what: str) -> list[bytes]:
        try:
            call, num_ranks = _RESULT.unpack_from(payload)
            lengths = struct.unpack_from(f"!{self.num_ranks}Q", payload, _RESULT.size)
        except struct.error:
            call, num_ranks, lengths = -1, -1, ()
        start = _RESULT.size + 8 * self.num_ranks
        if call != self._calls or num_ranks != self.num_ranks or start + sum(lengths) != len(payload):
            raise InternalError(f"{what}: rank 0 answered call {call} of {num_ranks} ranks with {len(payload)} bytes")
        parts = []
        for length in lengths:
            parts.append(payload[start : start + length])
            start += length
        return parts
