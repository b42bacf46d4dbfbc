"""Our own rendezvous: rank 0 listens while a communicator is made, everyone else connects.

Each creation has a number, counted alike on every rank. A client that is ahead of rank 0 is told to come back, one
that is behind is refused. The connections stay as the group's star; the listener closes before the group is used.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time

from epcomm._bootstrap.address import Place, check_key, dial, listen, resolve
from epcomm._bootstrap.deadline import TICK_S, Deadline, rank_list, timed_out
from epcomm._bootstrap.frames import (
    Connection,
    Kind,
    ProtocolError,
    close_politely,
    decode_json,
    encode,
    encode_json,
    pump,
    send_all,
)
from epcomm._bootstrap.group import lost
from epcomm._bootstrap.handshake import (
    HELLO_LIMITS,
    HOST_LIMITS,
    Ended,
    Join,
    Refused,
    ask,
    error_fields,
    error_from,
    next_frame,
    refuse,
    serve,
)
from epcomm.errors import EpcommError, InvalidArgumentError, PeerLostError

_log = logging.getLogger("epcomm.bootstrap")

HANDSHAKE_S = 10.0  # a client that stalls longer is dropped and may come back
FAREWELL_S = 0.5  # for last words to be read
GRACE_S = 0.25  # for rank 0, which knows more, to tell why a shared deadline passed
TELL_LATE_S = 0.5  # how long rank 0 still tells ranks that come late that a peer was lost
_MAX_STRANGERS = 64  # handshakes at once, beyond one per rank


def abort_error(payload: bytes, label: str) -> EpcommError:
    """The error in an ABORT frame."""
    try:
        return error_from(decode_json(payload))
    except ProtocolError as error:
        return lost(f"{label} gave up: {error}", None)


def as_told(error: BaseException, rank: int, what: str) -> EpcommError:
    """How peers hear of an exception here: as it is if typed, else that this rank gave up."""
    if isinstance(error, EpcommError):
        return error
    return lost(f"{what}: rank {rank} gave up: {type(error).__name__}: {error}", rank)


# ------------------------------------------------------------------------------------------------- rank 0's end


def host(
    num_ranks: int, place: Place, key: bytes | None, number: int, deadline: Deadline, limits: dict[int, int]
) -> dict[int, Connection]:
    """Meet all other ranks; returns their connections by rank.

    Parameters
    ----------
    limits : dict
        Frames that the connections take once all ranks are there: a fast rank uses the group at once.

    Raises
    ------
    CommTimeoutError
        Not all came in time; told to those that did.
    PeerLostError
        One that had come died or gave up; told to the others.
    InvalidArgumentError, SystemCallError
        Rank 0 cannot or must not listen.
    """
    listener, address = listen(place, key, deadline)
    meeting = _Meeting(listener, num_ranks, key, number, deadline)
    try:
        if address.loopback and str(address.sockaddr[0]) != place.host:
            meeting.where = f"{address}, which only this host reaches"
        else:
            meeting.where = str(address)
        return meeting.run(limits)
    finally:
        meeting.end()


class _Meeting:
    """Rank 0 while a communicator is made."""

    def __init__(
        self, listener: socket.socket, num_ranks: int, key: bytes | None, number: int, deadline: Deadline
    ) -> None:
        self._listener = listener
        self._num_ranks = num_ranks
        self._key = key
        self._number = number
        self._deadline = deadline
        self._what = f"creating communicator {number}"
        self.where = ""
        self._members: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._leaving: dict[Connection, Deadline] = {}
        self._refused: list[str] = []
        self._failure: EpcommError | None = None
        self._told_late: set[int] = set()
        # Handshakes run in threads; they hand over (connection, request or why not) and wake the main loop.
        self._stop = threading.Event()
        self._threads: dict[Connection, threading.Thread] = {}
        self._done: queue.SimpleQueue[tuple[Connection, Join | str]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    def run(self, limits: dict[int, int]) -> dict[int, Connection]:
        try:
            while self._missing():
                if self._deadline.passed():
                    raise self._timed_out()
                self._step()
            # Before anyone is let go: a rank that goes on may look for another server at this port, such as torch's.
            self._listener.close()
            for connection in self._members.values():
                connection.limits = limits
                connection.queue(encode(Kind.START))
            send_all(self._members.values(), FAREWELL_S)
        except BaseException as error:
            told = as_told(error, 0, self._what)
            for connection in self._members.values():
                connection.queue(encode_json(Kind.ABORT, error_fields(told)))
            send_all(self._members.values(), FAREWELL_S)
            if isinstance(error, PeerLostError):
                self._tell_late(told)
            close_politely(self._members.values(), FAREWELL_S)
            raise
        return self._members

    def end(self) -> None:
        """Close all but the members' connections; no thread is left."""
        self._listener.close()
        self._stop.set()
        for thread in self._threads.values():
            thread.join()
        while not self._done.empty():
            self._done.get()[0].close()
        close_politely(self._leaving, FAREWELL_S if self._leaving else 0.0)
        self._wake_in.close()
        self._wake_out.close()

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._num_ranks) if rank not in self._members]

    def _timed_out(self) -> EpcommError:
        why = f"rank 0 listens on {self.where}"
        if self._refused:
            why += f"; refused: {'; '.join(self._refused[:8])}"
            why += f" and {len(self._refused) - 8} more" if len(self._refused) > 8 else ""
        return timed_out(self._what, self._deadline, self._missing(), self._num_ranks, why)

    def _tell_late(self, error: EpcommError) -> None:
        """A rank that arrives just after the failure would wait in vain until its own deadline."""
        self._failure = error
        late = self._deadline.sub(TELL_LATE_S)
        while not late.passed() and set(self._missing()) - self._told_late:
            self._step()

    def _step(self) -> None:
        """Wait for anything to happen, at most a tick, and handle it."""
        members = list(self._members.values()) if self._failure is None else []
        extra: list[socket.socket] = [self._wake_in]
        if len(self._threads) < self._num_ranks + _MAX_STRANGERS:
            extra.append(self._listener)
        pause_s = self._deadline.tick() if self._failure is None else TICK_S
        readable = pump(members, pause_s, [*extra, *self._leaving])
        for rank, connection in self._members.items() if self._failure is None else ():
            self._check_member(rank, connection)
        if self._listener.fileno() in readable:
            self._accept()
        if self._wake_in.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        while not self._done.empty():
            connection, request = self._done.get()
            self._threads.pop(connection).join()
            if isinstance(request, Join):
                self._admit(connection, request)
            else:
                self._note_refusal(connection, request)
        for connection, until in list(self._leaving.items()):
            if connection.discard() or until.passed():
                del self._leaving[connection]
                connection.close()

    def _check_member(self, rank: int, connection: Connection) -> None:
        if connection.inbox:
            frame = connection.inbox.popleft()
            if frame.kind == Kind.ABORT:
                raise abort_error(frame.payload, f"rank {rank}")
            raise lost(f"{self._what}: rank {rank} left", rank)
        if connection.lost is not None:
            raise lost(f"{self._what}: rank {rank} was lost: {connection.lost}", rank)

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it went away again, or no descriptor is free
            time.sleep(0.001)
            return
        connection = Connection(sock, f"{peer[0]}:{peer[1]}", dict(HELLO_LIMITS))
        thread = threading.Thread(target=self._handshake, args=(connection,), name="epcomm-handshake", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads; it may come back
            connection.close()
            return
        self._threads[connection] = thread

    def _handshake(self, connection: Connection) -> None:
        outcome: Join | str
        try:
            outcome = serve(connection, self._key, Deadline(HANDSHAKE_S), self._stop)
        except (Refused, Ended) as error:
            outcome = str(error)
        except Exception as error:  # a bug must not take the meeting down
            _log.exception("handshake with %s", connection.label)
            outcome = f"{type(error).__name__}: {error}"
        self._done.put((connection, outcome))
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def _note_refusal(self, connection: Connection, why: str) -> None:
        self._refused.append(f"{connection.label}: {why}")
        _log.warning("%s: refused %s: %s", self._what, connection.label, why)
        self._dismiss(connection)

    def _dismiss(self, connection: Connection) -> None:
        """Let the last words reach it, then close."""
        connection.flush()
        connection.end_sending()
        self._leaving[connection] = Deadline(FAREWELL_S)

    def _admit(self, connection: Connection, join: Join) -> None:
        connection.limits = dict(HOST_LIMITS)
        error = self._objection(join)
        if error is not None:
            refuse(connection, error)
            if self._failure is None:
                self._note_refusal(connection, str(error))
            else:
                self._told_late.add(join.rank)
                self._dismiss(connection)
        elif join.number > self._number:
            text = f"rank 0 is still {self._what}, this rank asks for communicator {join.number}"
            connection.queue(encode_json(Kind.ANSWER, {"answer": "later", "text": text}))
            self._dismiss(connection)
        else:
            self._members[join.rank] = connection
            self._pids[join.rank] = join.pid
            self._deadline.shorten(join.remaining_s, f"{join.limit} of rank {join.rank}")
            connection.queue(encode_json(Kind.ANSWER, {"answer": "welcome"}))
            connection.flush()

    def _objection(self, join: Join) -> EpcommError | None:
        if join.num_ranks != self._num_ranks:
            return InvalidArgumentError(
                f"WORLD_SIZE={join.num_ranks}: rank {join.rank} was started for {join.num_ranks} ranks, rank 0 for "
                f"{self._num_ranks}"
            )
        if not 1 <= join.rank < self._num_ranks:
            return InvalidArgumentError(f"RANK={join.rank}: rank 0 expects ranks 1 to {self._num_ranks - 1}")
        if join.number < self._number:
            return lost(
                f"creating communicator {join.number}: rank 0 gave it up and is {self._what}; rank {join.rank} is "
                f"late, its next attempt is number {join.number + 1}",
                0,
            )
        if join.number > self._number:
            return None
        if self._failure is not None:
            return self._failure
        if join.rank in self._members:
            first = self._members[join.rank].label
            return InvalidArgumentError(
                f"RANK={join.rank}: two processes claim rank {join.rank}: process {self._pids[join.rank]} at {first} "
                f"came first, process {join.pid} second"
            )
        return None


# ------------------------------------------------------------------------------------------------ client's end


def meet(rank: int, num_ranks: int, place: Place, key: bytes | None, number: int, deadline: Deadline) -> Connection:
    """Find rank 0 and wait until all ranks are there; returns the connection to rank 0.

    Raises
    ------
    CommTimeoutError
        Rank 0 does not answer, or not all ranks came in time.
    PeerLostError
        Rank 0 or, as rank 0 tells, another rank was lost or gave up.
    InvalidArgumentError, UnsupportedError
        Rank 0 refuses this rank, or they hold different keys or versions.
    """
    what = f"creating communicator {number}"
    connection = _find(rank, num_ranks, place, key, number, deadline)
    try:
        return _wait_start(connection, rank, num_ranks, what, deadline)
    except BaseException as error:
        connection.queue(encode_json(Kind.ABORT, error_fields(as_told(error, rank, what))))
        close_politely([connection], FAREWELL_S)
        raise


def _find(rank: int, num_ranks: int, place: Place, key: bytes | None, number: int, deadline: Deadline) -> Connection:
    """Ask again and again until rank 0 welcomes this rank."""
    last, tried = "nothing was tried", False
    pause_s = 0.01
    while not deadline.passed():
        try:
            addresses = resolve(place, deadline)
        except OSError as error:
            addresses, last = [], f"{place.host}: {error.strerror or error}"
        if addresses:
            check_key(place, addresses, key)
        for address in addresses:
            try:
                sock = dial(address, deadline)
            except OSError as error:
                last = f"{address}: {error.strerror or error}"
                continue
            connection = Connection(sock, str(address), {})
            join = Join(number, rank, num_ranks, os.getpid(), deadline.remaining(), deadline.limit)
            welcome = False
            try:
                answer = ask(connection, key, join, str(address), deadline.sub(HANDSHAKE_S))
                if answer["answer"] == "refused":
                    raise error_from(answer)
                welcome = answer["answer"] == "welcome"
                if welcome:
                    return connection
                last = str(answer.get("text"))
            except (Ended, ProtocolError) as error:
                # An attempt that the deadline cut short says less than the one before it.
                if not (tried and deadline.passed() and connection.lost is None):
                    last = f"{address}: {error}"
            finally:
                tried = True
                if not welcome:
                    connection.close()
        time.sleep(min(pause_s, deadline.tick()))
        pause_s = min(1.5 * pause_s, TICK_S)
    raise timed_out(
        f"creating communicator {number}",
        deadline,
        [0],
        num_ranks,
        f"rank {rank} looked for rank 0 at {place} (MASTER_ADDR, EPCOMM_PORT or MASTER_PORT): {last}",
    )


def _wait_start(connection: Connection, rank: int, num_ranks: int, what: str, deadline: Deadline) -> Connection:
    # Rank 0 knows this deadline and who is missing; it gets a moment to say so.
    patience = Deadline(deadline.remaining() + GRACE_S)
    try:
        frame = next_frame(connection, patience)
    except Ended as error:
        if connection.lost is not None:
            raise lost(f"{what}: rank 0 was lost: {error}", 0) from None
        raise timed_out(what, deadline, [], num_ranks, f"{rank_list([0])} does not say who is missing") from None
    if frame.kind == Kind.ABORT:
        raise abort_error(frame.payload, "rank 0")
    if frame.kind == Kind.BYE:
        raise lost(f"{what}: rank 0 left", 0)
    return connection
