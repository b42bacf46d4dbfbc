"""Faults of the network between nodes: the right bits, or an error that names peer, queue pair and status; no hang.

After every test each node has as many queue pairs and memory regions as before it.
"""

import contextlib
import re
import time

import pytest
from helpers import job_calls
from helpers.job_calls import WAYS, close, create
from helpers.pool import Ranks

pytestmark = pytest.mark.rxe
quick = pytest.mark.rxe(quick=True)
CALLS = ("rank, zero copy", "expert", "expert, exact order", "rank, async")


@pytest.fixture(autouse=True)
def nothing_is_left(place, request):
    """`rdma resource show` of each node, before and after."""
    before = [resources(place, node) for node in range(place.nodes)]
    yield
    end = time.monotonic() + 10 * place.slowness
    while (after := [resources(place, node) for node in range(place.nodes)]) != before and time.monotonic() < end:
        time.sleep(0.5)
    assert after == before


def resources(place, node):
    """Queue pairs, memory regions and so on of the device of a node."""
    said = place.run(node, "rdma", "resource", "show")[1]
    line = next(line for line in said.splitlines() if f"rxe{node}:" in line)
    return {name: int(number) for name, number in re.findall(r"(qp|mr|cq|pd) (\d+)", line)}


@contextlib.contextmanager
def network(place, node, *what):
    """A queueing discipline on a node's link."""
    link = "eth0" if place.machine().split else f"eth{node}"
    place.run(node, "tc", "qdisc", "add", "dev", link, "root", "netem", *what)
    try:
        yield
    finally:
        place.run(node, "tc", "qdisc", "del", "dev", link, "root")


@contextlib.contextmanager
def unplugged(place, node):
    """The cable of a node is out."""
    place.run(None, "ip", "link", "set", f"up{node}", "down")
    try:
        yield
    finally:
        place.run(None, "ip", "link", "set", f"up{node}", "up")


def calls(here, times, ways=CALLS):
    """Round trips, each checked."""
    for number in range(times):
        job_calls.round_trip(here, ways[number % len(ways)])


@pytest.mark.parametrize(("node", "what"), [
    pytest.param(1, ("delay", "3ms"), id="delay", marks=quick),
    pytest.param(1, ("loss", "0.1%"), id="loss0.1"),
    pytest.param(1, ("loss", "0.5%"), id="loss0.5"),
    pytest.param(1, ("loss", "2%"), id="loss2", marks=quick),
    pytest.param(1, ("delay", "1ms", "3ms", "reorder", "25%"), id="reorder"),
    pytest.param(1, ("duplicate", "5%"), id="duplicate"),
    pytest.param(1, ("corrupt", "1%"), id="corrupt"),
])
def test_a_bad_network_changes_no_bit(place, job, node, what):
    ranks = job(2)
    ranks.values(create, timeout_s=200)
    with network(place, node, *what):
        ranks.values(calls, times=20 if "delay" in what else 100, within_s=200)
    ranks.values(calls, times=4)
    ranks.values(close)


def begin_calls(job, way):
    for rank in range(job.num_ranks):
        job.start(rank, job_calls.loop, way=way)
    for rank in range(job.num_ranks):
        job.told(rank)


def names_queue(failure):
    return re.search(r"(queue pair|QP) (0x)?[0-9a-f]+", failure.text) is not None


def check_lost(failure, peer, by_queue=True):
    """A rank was told that a peer is lost, by name: before its deadline, not by it. ``by_queue``: it saw so itself, and
    names queue pair and status; else somebody else may have, who told."""
    assert failure is not None
    assert failure.kind == "PeerLostError", failure
    assert failure.peer == peer and f"rank {peer}" in failure.text, failure
    assert names_queue(failure) or not by_queue, failure


@quick
def test_a_link_that_is_down_for_two_seconds(place, job):
    """Calls go on where packets get lost. A send that the device itself refuses, its link being down, ends its queue
    pair; then both ranks are told, long before the deadline."""
    timeout_s = 200
    ranks = job(2)
    ranks.values(create, timeout_s=timeout_s)
    for rank in range(2):
        ranks.start(rank, calls, times=80)
    time.sleep(0.5)
    with unplugged(place, 1):
        time.sleep(2)
    answers = [ranks.answer(rank, timeout_s / place.slowness + 10) for rank in range(2)]
    if any(answer.failure for answer in answers):
        for rank, answer in enumerate(answers):
            check_lost(answer.failure, 1 - rank, by_queue=False)  # a link that is up again carries the news
            assert answer.end - answer.start < timeout_s / 2, answer
        assert any(names_queue(answer.failure) for answer in answers), answers
        for rank in range(2):
            check_closes(ranks, rank)
        ranks.values(create)
        ranks.values(calls, times=4)
    ranks.values(close)


@quick
def test_a_link_that_stays_down(place, job):
    ranks = job(2)
    timeout_s = 12
    ranks.values(create, timeout_s=timeout_s)
    begin_calls(ranks, "expert")
    time.sleep(1)
    with unplugged(place, 1):
        began = time.monotonic()
        answers = [ranks.answer(rank, 60) for rank in range(2)]
        for rank, answer in enumerate(answers):
            check_lost(answer.failure, 1 - rank)
            assert answer.end - began < timeout_s + 10 * place.slowness, answer
        for rank in range(2):
            check_closes(ranks, rank)
    ranks.values(create)
    ranks.values(calls, times=4)
    ranks.values(close)


def check_closes(ranks, rank):
    """A rank whose communicator broke says so again at once, and closes in time."""
    (answer,) = ranks.run(job_calls.once, ranks=(rank,), way="expert")
    assert answer.failure is not None and answer.end - answer.start < ranks.place.slowness, answer
    (answer,) = ranks.run(close, ranks=(rank,), within_s=30)
    assert answer.failure is None, answer


@quick
def test_a_killed_rank(place, job):
    """The others are on other nodes: only the queue pairs' silence tells."""
    ranks = job(3)
    ranks.values(create, timeout_s=12)
    begin_calls(ranks, "rank, copied")
    at = ranks.signal(1)
    answers = [ranks.answer(rank, 60) for rank in (0, 2)]
    for answer in answers:
        check_lost(answer.failure, 1, by_queue=False)  # the first to see it tells the other
        assert answer.end - at < 12 + 5 * place.slowness, answer
    assert any(names_queue(answer.failure) for answer in answers), answers
    for rank in (0, 2):
        check_closes(ranks, rank)
    ranks.replace(1)
    ranks.values(create)
    ranks.values(calls, times=4)
    ranks.values(close)


@pytest.mark.rxe(quick=True, pairs=True)
def test_a_killed_rank_of_near_and_far_peers(place, job):
    """Its neighbour sees the process end and gives up; the others are told so, or see the queue pairs' silence."""
    ranks = job(Ranks(4, 2))
    ranks.values(create, timeout_s=12)
    ranks.values(calls, times=4)
    begin_calls(ranks, "expert")
    at = ranks.signal(1)
    for rank in (3, 0, 2):
        answer = ranks.answer(rank, 60)
        check_lost(answer.failure, 1, by_queue=False)
        assert answer.end - at < (2 if rank == 3 else 12 + 5) * place.slowness, answer
    for rank in (0, 2, 3):
        check_closes(ranks, rank)
    ranks.replace(1)
    ranks.values(create)
    ranks.values(calls, times=4)
    ranks.values(close)


def break_queue(here, peer, channel):
    here.state["comm"]._engine.backend._break_queue(peer, channel)


def break_and_call(here, peer, channel):
    """One more round trip may have been on its way; the next ones raise."""
    here.tell()
    break_queue(here, peer, channel)
    for _ in range(1000):
        job_calls.round_trip(here, "expert")


@pytest.mark.parametrize("control", [pytest.param(False, id="data", marks=quick), pytest.param(True, id="control")])
def test_a_queue_pair_that_fails(job, control):
    """The breaking side sees its own requests flushed, the other one a peer that answers no more."""
    ranks = job(2)
    ranks.values(create, timeout_s=12, num_channels=2)
    ranks.start(0, break_and_call, peer=1, channel=2 if control else 0)
    ranks.told(0)
    ranks.start(1, job_calls.loop, way="expert", tell=False)
    failures = [ranks.answer(rank, 90).failure for rank in range(2)]
    check_lost(failures[0], 1)
    check_lost(failures[1], 0, by_queue=False)  # it may have been told so by rank 0
    assert "FLUSH" in failures[0].text.upper(), failures[0]
    for rank in range(2):
        check_closes(ranks, rank)
    ranks.values(create)
    ranks.values(calls, times=len(WAYS))
    ranks.values(close)
