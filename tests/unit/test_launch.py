"""Ranks of this host: they answer together, and one that fails ends the group with its reason."""

import os
import time

import pytest

from epcomm import _launch

WORKER = """
import os, signal, time

class Worker:
    def __init__(self, place, fail_at_start=None):
        self.place = place
        if place.rank == fail_at_start:
            raise ValueError("no luck today")

    def answer(self, request):
        what, rank = request
        if self.place.rank == rank:
            if what == "raise":
                raise KeyError("lost")
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "exit":
                os._exit(7)
            if what == "sleep":
                time.sleep(60)
        return [self.place.rank, self.place.num_ranks, os.getpid(), os.environ.get("WORLD_SIZE")]

    def close(self):
        pass
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "a_worker:Worker"


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def test_answers_come_in_rank_order_and_nothing_is_left(worker):
    with _launch.LocalRanks(worker, {}, 3, timeout_s=30) as ranks:
        for _ in range(3):
            answers = ranks.ask(["nothing", -1])
            assert [answer[:2] for answer in answers] == [[0, 3], [1, 3], [2, 3]]
            assert {answer[3] for answer in answers} == {"3"}
        pids = [answer[2] for answer in answers]
        assert all(map(is_running, pids))
        folder = ranks._folder.name
    assert all_gone(pids)
    assert not os.path.exists(folder)


@pytest.mark.parametrize(("what", "said"), [("raise", "KeyError: 'lost'"), ("die", "was ended by SIGKILL"),
                                            ("exit", "ended with exit code 7")])
def test_one_failing_rank_ends_the_group_with_its_reason(worker, what, said):
    with _launch.LocalRanks(worker, {}, 3, timeout_s=30) as ranks:
        pids = [answer[2] for answer in ranks.ask(["nothing", -1])]
        begin = time.monotonic()
        with pytest.raises(_launch.RanksFailed, match=f"rank 1: .*{said}"):
            ranks.ask([what, 1])
        assert time.monotonic() - begin < 10
        assert all_gone(pids)


def test_a_rank_that_does_not_answer_meets_the_deadline(worker):
    with _launch.LocalRanks(worker, {}, 2, timeout_s=3) as ranks:
        pids = [answer[2] for answer in ranks.ask(["nothing", -1])]
        with pytest.raises(_launch.RanksFailed, match="rank 0: no answer within 3 s"):
            ranks.ask(["sleep", 0])
        assert all_gone(pids)


def test_a_failure_at_the_start_is_told(worker):
    with pytest.raises(_launch.RanksFailed, match="rank 1: ValueError: no luck today"):
        _launch.LocalRanks(worker, {"fail_at_start": 1}, 2, timeout_s=30)


def test_the_cause_is_told_before_those_who_noticed_it():
    text = _launch._explain("combine", {0: "PeerLostError: rank 2 died", 2: "the process was ended by SIGKILL"})
    assert text.index("SIGKILL") < text.index("PeerLostError")


def mpirun():
    pytest.importorskip("mpi4py")
    found = _launch.mpirun_command(2)
    if found is None:
        pytest.skip("no mpirun")
    return found


def test_ranks_under_mpirun(worker):
    with _launch.LocalRanks(worker, {}, 2, timeout_s=60, mpirun=mpirun()) as ranks:
        answers = ranks.ask(["nothing", -1])
        assert [answer[:2] for answer in answers] == [[0, 2], [1, 2]]
        with pytest.raises(_launch.RanksFailed, match="rank 1: KeyError"):
            ranks.ask(["raise", 1])
    assert all_gone([answer[2] for answer in answers])
