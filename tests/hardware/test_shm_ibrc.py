"""`shm_ibrc`: what each half alone does not know. Ranks 0 and 1 are one node, rank 2 another, by EPCOMM_NODE_ID."""

import os

import pytest
from helpers import job_calls
from helpers.job import Jobs, slack

pytest.importorskip("epcomm._ibrc", reason="backend ibrc: not built")
SOFT = {"EPCOMM_IB_PROVIDER": "soft", "EPCOMM_SOFTHCA_PORTS": "1", "EPCOMM_NUM_THREADS": "1"}
NEVER = 1 << 40


@pytest.fixture
def three():
    made = Jobs()
    yield made.fresh(3, "shm_ibrc", env=SOFT)
    made.close()


def create(here):
    os.environ["EPCOMM_NODE_ID"] = "a" if here.rank < 2 else "b"
    job_calls.create(here)


def wait_for(here, peer):
    here.state["comm"]._engine.backend.wait(peer, 0, NEVER, 15.0)


@pytest.mark.parametrize(("victim", "waited_for"), [(1, 2), (2, 1)])
def test_b54_one_half_loses_a_rank_while_the_other_waits(three, victim, waited_for):
    """The rank that is waited for lives, and says nothing: rank 0 itself must see what happened beside that wait."""
    three.values(create)
    three.start(0, wait_for, peer=waited_for)
    three.began(0)
    killed = three.signal(victim)
    answer = three.answer(0)
    assert answer.failure is not None and answer.failure.kind == "PeerLostError", answer
    assert answer.failure.peer == victim, answer
    assert answer.end - killed < 1.5 * slack()
