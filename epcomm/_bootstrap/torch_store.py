"""The group under torchrun: keys in the store that its agent already runs.

Each call has keys of its own. The last rank to arrive, or the first to fail, writes the call's outcome with a
compare-and-set, so all ranks read the same one. Every rank polls that one key; a blocking wait inside the store
would not see signals.
"""

import contextlib
import datetime
import json
import struct
import time
from collections.abc import Sequence
from typing import Any

from epcomm._bootstrap.address import Place
from epcomm._bootstrap.deadline import Deadline, timed_out
from epcomm._bootstrap.frames import ProtocolError, decode_json
from epcomm._bootstrap.group import ENVELOPE_BYTES, MAX_PART_BYTES, Group, lost
from epcomm._bootstrap.handshake import error_fields, error_from
from epcomm.errors import EpcommError, InternalError

_HEAD = struct.Struct("!Q")  # bytes in all; the first value carries the first of them
_FIRST_BYTES = 4096
_CHUNK_BYTES = 1 << 20  # the store refuses values of more than 8 MiB
_BATCH = 256  # first values read at once
_DONE = "ok"
_LONGEST_SLEEP_S = 0.02


def open_store(place: Place, prefix: str, deadline: Deadline) -> Any:
    """The agent's store, as a client, under a prefix.

    Raises
    ------
    PeerLostError
        No store answers there.
    """
    from torch import distributed

    try:
        store = distributed.TCPStore(
            place.host,
            place.port,
            is_master=False,
            timeout=datetime.timedelta(seconds=max(0.001, deadline.remaining())),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise lost(f"bootstrap: torchrun's store at {place} does not answer: {error}", None) from None
    return distributed.PrefixStore(prefix, store)


class StoreGroup(Group):
    """Ranks that share a store.

    Parameters
    ----------
    store : torch.distributed.Store
        Used by this group alone.
    """

    kind = "torch-store"

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._store = store
        super().__init__(rank, num_ranks, timeout_s)

    def _exchange(self, payload: bytes, what: str, deadline: Deadline) -> Sequence[bytes]:
        try:
            self._publish(payload)
            self._wait(what, deadline)
            received = self._collect(what)
            self._forget(self._calls - 1, [self.rank])
            return received
        except EpcommError:
            raise
        except RuntimeError as error:  # all that the store raises
            raise lost(f"{what}: torchrun's store was lost: {_first_line(error)}", None) from None

    def _publish(self, payload: bytes) -> None:
        first, rest = payload[:_FIRST_BYTES], payload[_FIRST_BYTES:]
        for index, start in enumerate(range(0, len(rest), _CHUNK_BYTES)):
            self._store.set(f"{self._calls}/{self.rank}/{index}", rest[start : start + _CHUNK_BYTES])
        self._store.set(f"{self._calls}/{self.rank}", _HEAD.pack(len(payload)) + first)
        if self._store.add(f"{self._calls}/count", 1) == self.num_ranks:
            self._settle(_DONE)

    def _settle(self, outcome: str) -> str:
        """Write the outcome of the current call unless it has one; returns the one it has."""
        return self._store.compare_set(f"{self._calls}/done", "", outcome).decode()

    def _wait(self, what: str, deadline: Deadline) -> None:
        pause_s = 0.0005
        while not self._store.check([f"{self._calls}/done"]):
            self._check_closing(what)
            if deadline.passed():
                missing = [rank for rank in range(self.num_ranks) if not self._store.check([f"{self._calls}/{rank}"])]
                self._settle(json.dumps(error_fields(timed_out(what, deadline, missing, self.num_ranks))))
                break  # unless the last rank came this very moment
            time.sleep(min(pause_s, deadline.tick()))
            pause_s = min(1.5 * pause_s, _LONGEST_SLEEP_S)
        outcome = self._store.get(f"{self._calls}/done").decode()
        if outcome != _DONE:
            try:
                error = error_from(decode_json(outcome.encode()))
            except ProtocolError:
                error = InternalError(f"{what}: the store holds {outcome[:80]!r}")
            raise error

    def _collect(self, what: str) -> list[bytes]:
        received = []
        for start in range(0, self.num_ranks, _BATCH):
            ranks = range(start, min(start + _BATCH, self.num_ranks))
            firsts = self._store.multi_get([f"{self._calls}/{rank}" for rank in ranks])
            for rank, value in zip(ranks, firsts, strict=True):
                (size_bytes,) = _HEAD.unpack_from(value)
                if size_bytes > MAX_PART_BYTES + ENVELOPE_BYTES:
                    raise InternalError(f"{what}: rank {rank} announces {size_bytes} bytes")
                parts = [value[_HEAD.size :]]
                parts += [self._store.get(f"{self._calls}/{rank}/{index}") for index in range(_num_chunks(size_bytes))]
                received.append(b"".join(parts))
        return received

    def _forget(self, call: int, ranks: Sequence[int]) -> None:
        """Delete keys of a call that every rank has read: all have entered the next one, or closed."""
        if call < 1:
            return
        for rank in ranks:
            if not self._store.check([f"{call}/{rank}"]):
                continue
            (size_bytes,) = _HEAD.unpack_from(self._store.get(f"{call}/{rank}"))
            for index in range(_num_chunks(size_bytes)):
                self._store.delete_key(f"{call}/{rank}/{index}")
            self._store.delete_key(f"{call}/{rank}")
        if 0 in ranks:
            self._store.delete_key(f"{call}/count")
            self._store.delete_key(f"{call}/done")

    def _give_up(self, error: EpcommError) -> None:
        with contextlib.suppress(RuntimeError):
            self._settle(json.dumps(error_fields(error)))

    def _leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._broken is None:
                # Whoever calls once more must not wait for this rank.
                self._calls += 1
                self._settle(json.dumps(error_fields(lost(f"bootstrap: rank {self.rank} left the group", self.rank))))
                if self._store.add("closed", 1) == self.num_ranks:
                    self._forget(self._calls - 1, range(self.num_ranks))
                    self._store.delete_key(f"{self._calls}/done")
                    self._store.delete_key("closed")
        self._release()

    def _release(self) -> None:
        self._store = None  # the client's destructor closes its socket


def _num_chunks(size_bytes: int) -> int:
    return -(-max(0, size_bytes - _FIRST_BYTES) // _CHUNK_BYTES)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
