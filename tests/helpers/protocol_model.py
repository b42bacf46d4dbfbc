"""An exhaustive model of slots, entry words and credits: every interleaving of a few calls on 2 or 3 ranks.

The model is the protocol and nothing else: no bytes, only *which epoch's rows lie where*. A store or a signal to a
peer is a message in a first-in-first-out queue per (writer, peer, channel); it takes effect when it is delivered,
at any later time. Entry words, data and credits travel on different channels, so nothing orders one against
another, as on RDMA queue pairs.

What is checked, in every reachable state:

- a row lands only in a slot that its owner has named for that very epoch, and that nobody is still reading;
- a reader finds the rows of its own epoch, at the beginning and at the end of its reading;
- an entry record is never overwritten before its reader's call has ended, and a record that is read is this epoch's;
- somebody can take a step until all ranks have made all their calls (no deadlock), and every step makes
  ``progress()`` larger, so every run ends.

``variant`` plants one known mistake; the tests show that each of them is found.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Message kinds.
RECORD, ROWS, ADD, CREDIT = "record", "rows", "add", "credit"
# `eager` makes large cases small. What it names happens at the moment that is worst for the rules, so that no
# violation is lost: words that peers only add to arrive at once (whoever waits for one may still step late); a
# record lands at once, on top of one that may be unread; sends and the first look at the rows are made as soon as
# they may be; a lease ends only just before its rank's next entry. Late rows, ahead of which their signal must not
# run, are left out only by EVERYTHING.
WORDS = frozenset({ADD, CREDIT})
RECORDS = WORDS | {RECORD}
EVERYTHING = RECORDS | {ROWS}

# Phases of a call.
IDLE, ENTERED, SENDING, RECEIVING, READING, AWAIT_DONE = range(6)


class Violation(Exception):
    """A rule above is broken; the text says which."""


class Result(NamedTuple):
    """What an exploration found: ``problem`` is None, or a sentence with ``trace``, the shortest way to it."""

    states: int
    problem: str | None
    trace: tuple[str, ...]


def explore(model, limit=400_000):
    """Breadth-first search over all states of a model."""
    start = model.start()
    seen = {start: None}
    frontier = [start]

    def found(problem, state, last=()):
        steps = list(last)
        while seen[state] is not None:
            state, label = seen[state]
            steps.append(label)
        return Result(len(seen), problem, tuple(reversed(steps)))

    while frontier:
        following = []
        for state in frontier:
            stuck = True
            progress = model.progress(state)
            for label, step in model.steps(state):
                stuck = False
                try:
                    after = step()
                except Violation as violation:
                    return found(str(violation), state, (label,))
                if after not in seen:
                    seen[after] = (state, label)
                    following.append(after)
                if model.progress(after) <= progress:
                    raise AssertionError(f"the step '{label}' is no progress: a run might never end")
            if stuck and not model.finished(state):
                return found(f"deadlock: {model.describe(state)}", state)
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states: make the case smaller")
        frontier = following
    return Result(len(seen), None, ())


def put(values, index, value):
    """A tuple with one element replaced."""
    return values[:index] + (value,) + values[index + 1 :]


class Rank(NamedTuple):
    """One rank: what its thread knows, and its heap, which peers write."""

    call: int  # position in the program
    phase: int
    epoch: int
    slot: int  # named for this call, -1 outside a call
    round: int  # windows of an exact-order combine that were read
    source: int  # slot this call's rows lie in (zero-copy), -1 if they are pushed
    todo: tuple  # peers still to send to
    records: tuple  # what was read: one record per rank
    leases: tuple  # (tag, slot) the application still reads or writes
    last: tuple  # [slot] last epoch that used it
    credited: tuple  # [slot] last epoch told to the peers
    due: tuple  # [lane] data signals expected so far
    done_due: int  # done signals expected so far, per peer
    # the heap
    rows: tuple  # [slot][lane] whose rows lie there: 2 * epoch + round; negative: the application's own rows
    ring: tuple  # [peer][record]
    entry: tuple  # [peer] signal words
    data: tuple  # [lane]
    done: tuple  # [peer]
    credit: tuple  # [peer][slot]


class Record(NamedTuple):
    """An entry record."""

    epoch: int
    call: int
    slot: int
    last: int
    source: int
    good: bool


NO_RECORD = Record(0, -1, -1, 0, -1, True)


@dataclass(frozen=True)
class Throughput:
    """Throughput mode, as the host engine does it.

    ``program`` is what every rank does, in order: ``("D", t)`` a dispatch whose result t is a lease if one can be
    had, ``("C", t)`` a combine, ``("B", t)`` take a combine buffer, ``("Z", t)`` a combine from that buffer,
    ``("X", t)`` an exact-order combine in two windows of one slot, ``("A", t)`` a barrier, which moves no rows.
    """

    ranks: int
    program: tuple
    num_slots: int = 2
    ring: int = 2
    channels: int = 1
    release: str = "tied"  # leases end "tied": before their combine; "any": at any time or never; "held": never
    max_refusals: int = 0
    eager: frozenset = frozenset()
    variant: str = ""

    # state = (ranks, queues, refusals); queues[(kind * ranks + writer) * ranks + peer]

    @property
    def physical(self):
        return self.num_slots + (0 if self.variant.startswith("no_extra_slot") else 1)

    def start(self):
        lanes = self.ranks * self.channels
        slots = (0,) * self.physical
        rank = Rank(
            call=0, phase=IDLE, epoch=0, slot=-1, round=0, source=-1, todo=(), records=(), leases=(), last=slots,
            credited=slots, due=(0,) * lanes, done_due=0, rows=((0,) * lanes,) * self.physical,
            ring=((NO_RECORD,) * self.ring,) * self.ranks, entry=(0,) * self.ranks, data=(0,) * lanes,
            done=(0,) * self.ranks, credit=(slots,) * self.ranks,
        )  # fmt: skip
        queues = ((),) * ((2 + self.channels) * self.ranks * self.ranks)
        return ((rank,) * self.ranks, queues, 0)

    def finished(self, state):
        return all(rank.call == len(self.program) for rank in state[0]) and not any(state[1])

    def progress(self, state):
        """A number that every step must raise: calls and phases begun, then messages and leases disposed of."""
        ranks, queues, _ = state
        rounds = sum(max(0, rank.round - (rank.phase == AWAIT_DONE)) for rank in ranks)  # rounds begun
        at = 6_000 * rounds + sum(20_000 * rank.call + 1_000 * rank.phase for rank in ranks)
        at -= sum(10 * len(rank.todo) + len(rank.leases) for rank in ranks)
        return at - sum(len(queue) for queue in queues)

    def describe(self, state):
        return "; ".join(f"rank {r}: call {k.call}, phase {k.phase}, leases {k.leases}" for r, k in enumerate(state[0]))

    # Queues. Entry words, credits (with done words) and each data channel have their own.
    def _entry_queue(self, writer, peer):
        return writer * self.ranks + peer

    def _credit_queue(self, writer, peer):
        return (self.ranks + writer) * self.ranks + peer

    def _data_queue(self, writer, peer, channel):
        return ((2 + channel) * self.ranks + writer) * self.ranks + peer

    def _peers(self, r):
        return [p for p in range(self.ranks) if p != r]

    def _lanes(self, writer):
        return range(writer * self.channels, (writer + 1) * self.channels)

    # Steps.
    def steps(self, state):
        """(label, function that makes the next state) of every step that can be taken now."""
        ranks, queues, refusals = state
        for index, queue in enumerate(queues):
            if queue:
                kind, rest = divmod(index, self.ranks * self.ranks)
                writer, peer = divmod(rest, self.ranks)
                yield f"{writer}>{peer} {queue[0][0]}", self._bind(self._deliver, state, index, writer, peer, kind)
        for r, rank in enumerate(ranks):
            if self._may_release(rank):
                for tag, _ in rank.leases:
                    yield f"{r} releases lease {tag}", self._bind(self._release, state, r, tag)
            if rank.phase == IDLE and rank.call < len(self.program):
                op, tag = self.program[rank.call]
                if op == "B":
                    yield f"{r} takes buffer {tag}", self._bind(self._take_buffer, state, r, tag)
                elif self._may_enter(rank, op, tag):
                    yield f"{r} enters {op}{tag}", self._bind(self._enter, state, r, True)
                if op != "B" and refusals < self.max_refusals and self._free(rank):
                    yield f"{r} refuses {op}{tag}", self._bind(self._enter, state, r, False)
            elif rank.phase == ENTERED and all(rank.entry[p] >= rank.epoch for p in self._peers(r)):
                yield f"{r} reads records", self._bind(self._read_records, state, r)
            elif rank.phase == SENDING:
                for p in rank.todo:
                    if self._may_send(rank, p):
                        yield f"{r} sends to {p}", self._bind(self._send, state, r, p)
            elif self._may_begin_reading(rank):
                yield f"{r} begins reading", self._bind(self._begin_reading, state, r)
            elif rank.phase == READING:
                yield f"{r} ends reading", self._bind(self._end_reading, state, r)
            elif rank.phase == AWAIT_DONE and all(rank.done[p] >= rank.done_due for p in self._peers(r)):
                yield f"{r} goes on: all are done", self._bind(self._after_done, state, r)

    def _bind(self, function, *arguments):
        return lambda: self._settle(function(*arguments))

    def _settle(self, state):
        """Deliver what is delivered at once, and make the sends that nothing holds back."""
        if not self.eager:
            return state
        busy = True
        while busy:
            busy = False
            for index, queue in enumerate(state[1]):
                if queue and queue[0][0] in self.eager:
                    kind, rest = divmod(index, self.ranks * self.ranks)
                    writer, peer = divmod(rest, self.ranks)
                    state = self._deliver(state, index, writer, peer, kind)
                    busy = True
            for r, rank in enumerate(state[0]):
                for p in rank.todo:
                    if rank.phase == SENDING and self._may_send(rank, p):
                        state = self._send(state, r, p)
                        busy = True
                        break
                if self._may_begin_reading(state[0][r]):
                    state = self._begin_reading(state, r)
                    busy = True
        return state

    # Leases.
    def _may_release(self, rank):
        if self.eager and (rank.phase != IDLE or rank.call == len(self.program)):
            return False
        return self.release != "held"

    def _release(self, state, r, tag):
        rank = state[0][r]
        return self._with(state, r, rank._replace(leases=tuple(lease for lease in rank.leases if lease[0] != tag)))

    def _free(self, rank):
        taken = {slot for _, slot in rank.leases}
        if self.variant == "credit_before_last_read":
            taken = set()
        return [slot for slot in range(self.physical) if slot not in taken]

    def _take_buffer(self, state, r, tag):
        rank = state[0][r]
        if len(rank.leases) < self.num_slots:
            slot = self._free(rank)[0]
            rank = rank._replace(
                leases=(*rank.leases, (tag, slot)), rows=put(rank.rows, slot, (-1 - tag,) * len(rank.rows[slot]))
            )
        return self._with(state, r, rank._replace(call=rank.call + 1))

    # Entry.
    def _may_enter(self, rank, op, tag):
        if op == "C" and self.release == "tied" and any(lease[0] == tag for lease in rank.leases):
            return False
        return bool(self._free(rank)) or self.variant in ("no_extra_slot_reuse", "parity")

    def _enter(self, state, r, good):
        ranks, queues, refusals = state
        rank = ranks[r]
        op, tag = self.program[rank.call]
        if not good and self.variant == "refusal_skips_entry":
            return self._with(state, r, rank._replace(call=rank.call + 1), refusals=refusals + 1)
        epoch = rank.epoch + 1
        free = self._free(rank)
        messages = [
            (CREDIT, slot, rank.last[slot]) for slot in free if rank.last[slot] > rank.credited[slot]
        ]  # released since the last entry
        for peer in self._peers(r):
            index = self._credit_queue(r, peer)
            queues = put(queues, index, queues[index] + tuple(messages))
        slot = free[0] if free else 0
        if self.variant == "parity":
            slot = epoch % 2
        source = next((s for t, s in rank.leases if op == "Z" and t == tag), -1)
        record = Record(epoch, rank.call, slot, rank.last[slot], source, good)
        for peer in self._peers(r):
            index = self._entry_queue(r, peer)
            queues = put(queues, index, (*queues[index], (RECORD, record), (ADD, "entry")))
        credited = tuple(rank.last[s] if s in free else rank.credited[s] for s in range(self.physical))
        rank = rank._replace(
            phase=ENTERED, epoch=epoch, slot=slot, source=source, credited=credited,
            ring=put(rank.ring, r, put(rank.ring[r], epoch % self.ring, record)),
        )  # fmt: skip
        return (put(ranks, r, rank), queues, refusals + (not good))

    def _read_records(self, state, r):
        rank = state[0][r]
        records = tuple(rank.ring[p][rank.epoch % self.ring] for p in range(self.ranks))
        for p, record in enumerate(records):
            if record.epoch != rank.epoch:
                raise Violation(f"rank {r} reads rank {p}'s record of epoch {record.epoch} in epoch {rank.epoch}")
        barrier = self.program[rank.call][0] == "A"
        if barrier or not all(record.good for record in records) or len({record.call for record in records}) != 1:
            # A barrier, refused somewhere, or different calls: nobody moves rows, the epoch is over.
            return self._with(state, r, rank._replace(phase=IDLE, call=rank.call + 1, slot=-1, source=-1, todo=()))
        return self._begin_round(state, r, rank._replace(records=records))

    def _begin_round(self, state, r, rank):
        """Everybody sends: rows, or from a zero-copy source the signal alone."""
        rows = rank.rows
        if rank.source < 0:  # the own rows, by the own thread
            state = self._with(state, r, rank)
            self._check_landing(state, r, rank.slot, 2 * rank.epoch + rank.round, r)
            for lane in self._lanes(r):
                rows = put(rows, rank.slot, put(rows[rank.slot], lane, 2 * rank.epoch + rank.round))
        due = tuple(count + (lane // self.channels != r) for lane, count in enumerate(rank.due))
        return self._with(state, r, rank._replace(phase=SENDING, todo=tuple(self._peers(r)), due=due, rows=rows))

    # Rows.
    def _may_send(self, rank, p):
        record = rank.records[p]
        return self.variant in ("parity", "no_credit_wait") or rank.credit[p][record.slot] >= record.last

    def _send(self, state, r, p):
        ranks, queues, refusals = state
        rank = ranks[r]
        for channel in range(self.channels):
            message = ((ROWS, 2 * rank.epoch + rank.round, rank.records[p].slot), (ADD, "data"))
            if rank.source >= 0:
                message = message[1:]
            if self.variant == "signal_before_data":
                message = message[::-1]
            index = self._data_queue(r, p, channel)
            queues = put(queues, index, queues[index] + message)
        todo = tuple(peer for peer in rank.todo if peer != p)
        rank = rank._replace(todo=todo, phase=SENDING if todo else RECEIVING)
        return (put(ranks, r, rank), queues, refusals)

    def _check_landing(self, state, r, slot, value, writer):
        """A row may land in this slot of rank r now."""
        epoch, window = divmod(value, 2)
        rank = state[0][r]
        lease = next((tag for tag, leased in rank.leases if leased == slot), None)
        if lease is not None:
            raise Violation(f"rank {writer}'s rows of epoch {epoch} land in slot {slot} of rank {r}, leased as {lease}")
        if (rank.slot, rank.epoch) != (slot, epoch):
            raise Violation(
                f"rank {writer}'s rows of epoch {epoch} land in slot {slot} of rank {r}, "
                f"which has slot {rank.slot} named for epoch {rank.epoch}"
            )
        if rank.round != window:
            raise Violation(f"rank {writer}'s window {window} lands at rank {r}, which still reads window {rank.round}")

    def _check_rows(self, state, r):
        """Every row that rank r reads in this call is this call's."""
        rank = state[0][r]
        tag = self.program[rank.call][1]
        for p in range(self.ranks):
            source = rank.records[p].source
            if source >= 0:
                if state[0][p].rows[source][p * self.channels] != -1 - tag:
                    raise Violation(f"rank {r} reads rank {p}'s buffer in epoch {rank.epoch} after it changed")
                continue
            for lane in self._lanes(p):
                seen = rank.rows[rank.slot][lane]
                if seen != 2 * rank.epoch + rank.round:
                    raise Violation(f"rank {r} reads rows of epoch {seen // 2} from rank {p} in epoch {rank.epoch}")

    def _may_begin_reading(self, rank):
        return rank.phase == RECEIVING and all(have >= due for have, due in zip(rank.data, rank.due, strict=True))

    def _begin_reading(self, state, r):
        self._check_rows(state, r)
        return self._with(state, r, state[0][r]._replace(phase=READING))

    def _end_reading(self, state, r):
        self._check_rows(state, r)
        ranks, queues, refusals = state
        rank = ranks[r]
        op, tag = self.program[rank.call]
        more = op == "X" and rank.round == 0
        for p in self._peers(r):
            if more or rank.records[p].source >= 0:
                index = self._credit_queue(r, p)
                queues = put(queues, index, (*queues[index], (ADD, "done")))
        if more:
            rank = rank._replace(round=1)
        else:
            leases = rank.leases
            if op == "D" and len(leases) < self.num_slots:
                leases = (*leases, (tag, rank.slot))  # else the result is a copy, made while READING
            rank = rank._replace(leases=leases, last=put(rank.last, rank.slot, rank.epoch), slot=-1, round=0)
        if more or rank.source >= 0:
            rank = rank._replace(phase=AWAIT_DONE, done_due=rank.done_due + 1)
        state = (put(ranks, r, rank), queues, refusals)
        if rank.phase == AWAIT_DONE and self.variant != "no_done_wait":
            return state
        return self._after_done(state, r)

    def _after_done(self, state, r):
        rank = state[0][r]
        if rank.round:
            return self._begin_round(state, r, rank)
        rows = rank.rows
        if rank.source >= 0:  # the buffer is the application's again, and it writes there
            rows = put(rows, rank.source, (-1000,) * len(rows[rank.source]))
        rank = rank._replace(phase=IDLE, call=rank.call + 1, source=-1, records=(), rows=rows)
        return self._with(state, r, rank)

    # Delivery.
    def _deliver(self, state, index, writer, peer, kind):
        ranks, queues, refusals = state
        rank = ranks[peer]
        message = queues[index][0]
        queues = put(queues, index, queues[index][1:])
        if message[0] == RECORD:
            record = message[1]
            position = record.epoch % self.ring
            old = rank.ring[writer][position]
            read = rank.epoch if rank.phase == IDLE else rank.epoch - 1
            if old.epoch > read:
                raise Violation(
                    f"rank {writer}'s record of epoch {record.epoch} overwrites that of epoch {old.epoch}, "
                    f"which rank {peer} still reads"
                )
            rank = rank._replace(ring=put(rank.ring, writer, put(rank.ring[writer], position, record)))
        elif message[0] == ROWS:
            _, value, slot = message
            self._check_landing(state, peer, slot, value, writer)
            lane = writer * self.channels + kind - 2
            rank = rank._replace(rows=put(rank.rows, slot, put(rank.rows[slot], lane, value)))
        elif message[0] == CREDIT:
            _, slot, value = message
            if value <= rank.credit[writer][slot]:
                raise Violation(f"credit of slot {slot} of rank {writer} goes back to {value}")
            rank = rank._replace(credit=put(rank.credit, writer, put(rank.credit[writer], slot, value)))
        elif message[1] == "data":
            lane = writer * self.channels + kind - 2
            rank = rank._replace(data=put(rank.data, lane, rank.data[lane] + 1))
        elif message[1] == "entry":
            rank = rank._replace(entry=put(rank.entry, writer, rank.entry[writer] + 1))
        else:
            rank = rank._replace(done=put(rank.done, writer, rank.done[writer] + 1))
        return (put(ranks, peer, rank), queues, refusals)

    @staticmethod
    def _with(state, r, rank, refusals=None):
        return (put(state[0], r, rank), state[1], state[2] if refusals is None else refusals)
