"""The low-latency rule as a model: fixed slots, no entry words, send and receive halves apart.

Epoch n uses slot ``n % num_slots`` everywhere. A rank stores into a peer's slot for epoch n only after that peer's
credit word for the slot shows epoch ``n - num_slots``; it then raises the flag of its rows to n. The receive half
waits for all flags, reads, and writes its credits after the last read. Delivery is as in ``protocol_model``.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from helpers.protocol_model import CREDIT, ROWS, Violation, put

FLAG = "flag"


class Rank(NamedTuple):
    """One rank: its place in its program, and its heap, which peers write."""

    at: int  # position in the program
    todo: tuple  # peers still to store to, in a send half
    reading: bool
    consumed: frozenset  # epochs read to the end
    # the heap
    rows: tuple  # [slot][writer] epoch whose rows lie there
    flags: tuple  # [slot][writer]
    credit: tuple  # [peer][slot] last epoch that the peer has consumed


@dataclass(frozen=True)
class LowLatency:
    """``programs[r]`` is rank r's order of halves: ``("S", n)`` sends epoch n, ``("R", n)`` receives it."""

    programs: tuple
    num_slots: int = 2
    variant: str = ""
    eager: bool = False  # flags, credits, sends and first looks at once (protocol_model says why that is sound)

    @property
    def ranks(self):
        return len(self.programs)

    def _peers(self, r):
        return tuple(p for p in range(self.ranks) if p != r)

    def start(self):
        rows = ((0,) * self.ranks,) * self.num_slots
        credit = ((0,) * self.num_slots,) * self.ranks
        ranks = tuple(Rank(0, self._todo(r, 0), False, frozenset(), rows, rows, credit) for r in range(self.ranks))
        return (ranks, ((),) * (2 * self.ranks * self.ranks))

    def _todo(self, r, at):
        sends = at < len(self.programs[r]) and self.programs[r][at][0] == "S"
        return tuple(range(self.ranks)) if sends else ()

    def finished(self, state):
        return not any(state[1]) and all(k.at == len(p) for k, p in zip(state[0], self.programs, strict=True))

    def progress(self, state):
        """A number that every step must raise."""
        at = sum(1_000 * rank.at - 50 * len(rank.todo) + 25 * rank.reading for rank in state[0])
        return at - sum(len(queue) for queue in state[1])

    def describe(self, state):
        return "; ".join(
            f"rank {r}: next {p[k.at] if k.at < len(p) else 'nothing'}"
            for r, (k, p) in enumerate(zip(state[0], self.programs, strict=True))
        )

    def steps(self, state):
        """(label, function that makes the next state) of every step that can be taken now."""
        for label, _, step in self._all_steps(state):
            yield label, (lambda step=step: self._settle(step())) if self.eager else step

    def _settle(self, state):
        while True:
            step = next((step for _, at_once, step in self._all_steps(state) if at_once), None)
            if step is None:
                return state
            state = step()

    def _all_steps(self, state):
        """(label, may be taken at once without losing a violation, function that makes the next state)."""
        ranks, queues = state
        for index, queue in enumerate(queues):
            if queue:
                writer, peer = divmod(index % (self.ranks * self.ranks), self.ranks)
                step = partial(self._deliver, state, index, writer, peer)
                yield f"{writer}>{peer} {queue[0][0]}", queue[0][0] != ROWS, step
        for r, rank in enumerate(ranks):
            if rank.at == len(self.programs[r]):
                continue
            half, epoch = self.programs[r][rank.at]
            if half == "S":
                for p in rank.todo:
                    if self._may_send(rank, r, p, epoch):
                        yield f"{r} sends {epoch} to {p}", True, partial(self._send, state, r, p, epoch)
            elif rank.reading:
                yield f"{r} ends reading {epoch}", False, partial(self._end_reading, state, r, epoch)
            elif all(flag >= epoch for flag in rank.flags[epoch % self.num_slots]):
                yield f"{r} begins reading {epoch}", True, partial(self._begin_reading, state, r, epoch)

    def _may_send(self, rank, r, p, epoch):
        previous = epoch - self.num_slots
        if self.variant == "no_credits":
            return True
        if p == r:
            return previous < 1 or previous in rank.consumed
        return rank.credit[p][epoch % self.num_slots] >= previous

    def _next(self, r, rank):
        return rank._replace(at=rank.at + 1, todo=self._todo(r, rank.at + 1), reading=False)

    def _land(self, rank, r, writer, slot, epoch):
        """Rows of a writer land; those that lay there must have been read."""
        old = rank.rows[slot][writer]
        if old > 0 and old not in rank.consumed:
            raise Violation(f"rank {writer}'s rows of epoch {epoch} land on those of epoch {old}, unread by rank {r}")
        return rank._replace(rows=put(rank.rows, slot, put(rank.rows[slot], writer, epoch)))

    def _send(self, state, r, p, epoch):
        ranks, queues = state
        rank = ranks[r]
        slot = epoch % self.num_slots
        if p == r:
            rank = self._land(rank, r, r, slot, epoch)
            rank = rank._replace(flags=put(rank.flags, slot, put(rank.flags[slot], r, epoch)))
        else:
            index = r * self.ranks + p
            messages = ((ROWS, epoch), (FLAG, epoch))
            if self.variant == "flag_before_rows":
                messages = messages[::-1]
            queues = put(queues, index, queues[index] + messages)
        rank = rank._replace(todo=tuple(peer for peer in rank.todo if peer != p))
        return (put(ranks, r, rank if rank.todo else self._next(r, rank)), queues)

    def _check_rows(self, rank, r, epoch):
        for writer, seen in enumerate(rank.rows[epoch % self.num_slots]):
            if seen != epoch:
                raise Violation(f"rank {r} reads rows of epoch {seen} from rank {writer} in epoch {epoch}")

    def _send_credits(self, state, r, epoch):
        ranks, queues = state
        for p in self._peers(r):
            index = (self.ranks + r) * self.ranks + p
            queues = put(queues, index, (*queues[index], (CREDIT, epoch)))
        return (ranks, queues)

    def _begin_reading(self, state, r, epoch):
        rank = state[0][r]
        self._check_rows(rank, r, epoch)
        if self.variant == "credit_before_last_read":
            state = self._send_credits(state, r, epoch)
        return (put(state[0], r, rank._replace(reading=True)), state[1])

    def _end_reading(self, state, r, epoch):
        rank = state[0][r]
        self._check_rows(rank, r, epoch)
        if self.variant != "credit_before_last_read":
            state = self._send_credits(state, r, epoch)
        rank = self._next(r, rank._replace(consumed=rank.consumed | {epoch}))
        return (put(state[0], r, rank), state[1])

    def _deliver(self, state, index, writer, peer):
        ranks, queues = state
        kind, epoch = queues[index][0]
        slot = epoch % self.num_slots
        rank = ranks[peer]
        if kind == ROWS:
            rank = self._land(rank, peer, writer, slot, epoch)
        elif kind == FLAG:
            rank = rank._replace(flags=put(rank.flags, slot, put(rank.flags[slot], writer, epoch)))
        else:
            rank = rank._replace(credit=put(rank.credit, writer, put(rank.credit[writer], slot, epoch)))
        return (put(ranks, peer, rank), put(queues, index, queues[index][1:]))
