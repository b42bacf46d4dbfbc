"""The pool of ranks itself: values, failures, deadlines, deaths and no leftovers."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from helpers import fake_cuda, gpu, pool


def return_rank(context, offset, own=0):
    return context.rank + offset + own


def fail_on_one(context):
    if context.rank == 1:
        raise ValueError("on purpose")
    time.sleep(30)


def sleep_on_all(context):
    time.sleep(30)


def die_on_one(context, how):
    if context.rank == 1:
        os.kill(os.getpid(), how)
        time.sleep(5)
    return context.rank


def return_a_lambda(context):
    return lambda: None


def threads_and_environment(context):
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], os.environ.get("EXTRA")


@pytest.fixture
def cache():
    cache = pool.PoolCache(max_processes=4)
    yield cache
    cache.close()


def test_values_come_in_rank_order_and_pools_are_reused(cache):
    ranks = cache.get(2)
    assert ranks.run(return_rank, offset=10) == [10, 11]
    assert ranks.run(return_rank, offset=0, per_rank=[{"own": 5}, {"own": 7}]) == [5, 8]
    assert cache.get(2) is ranks
    other = cache.get(2, env={"EXTRA": "yes"})
    assert other is not ranks
    assert other.run(threads_and_environment) == [("0", "2", "1", "yes"), ("1", "2", "1", "yes")]


def test_the_least_recently_used_pool_goes_first(cache):
    first, second = cache.get(2), cache.get(1)
    cache.get(2)
    cache.get(2, env={"EXTRA": "1"})
    assert not second.processes and first.alive
    assert cache.num_processes == 4


def test_a_failure_shows_all_ranks_and_gives_the_pool_up(cache):
    ranks = cache.get(2)
    start = time.monotonic()
    with pytest.raises(pool.RankError, match="on purpose") as caught:
        ranks.run(fail_on_one)
    assert time.monotonic() - start < 10
    assert "still running" in caught.value.reports[0] and "fail_on_one" in caught.value.reports[0]
    assert not ranks.alive
    assert cache.get(2) is not ranks


def test_the_deadline_ends_a_case(cache):
    ranks = cache.get(2)
    ranks.run(return_rank, offset=0)  # the module is loaded
    with pytest.raises(pool.RankError, match=r"within 1 s") as caught:
        ranks.run(sleep_on_all, timeout_s=1)
    assert all("sleep_on_all" in report for report in caught.value.reports)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_named(cache, how):
    with pytest.raises(pool.RankError, match=how.name):
        cache.get(2).run(die_on_one, how=how)


def test_an_expected_death_is_a_value(cache):
    ranks = cache.get(2)
    values = ranks.run(die_on_one, how=signal.SIGKILL, expect_deaths=[1])
    assert values[0] == 0 and values[1].exitcode == -signal.SIGKILL
    assert not ranks.alive


def test_a_value_that_does_not_pickle_is_a_failure(cache):
    with pytest.raises(pool.RankError, match="lambda"):
        cache.get(1).run(return_a_lambda)


def test_closing_leaves_no_process():
    before = {pid for pid, _ in pool.processes_of_session()}
    ranks = pool.RankPool(2)
    pids = {process.pid for process in ranks.processes}
    assert pids <= {pid for pid, _ in pool.processes_of_session()}
    ranks.close()
    assert {pid for pid, _ in pool.processes_of_session()} <= before


def visible_gpus(context):
    return os.environ.get("CUDA_VISIBLE_DEVICES")


class TestGpus:
    """Which GPU is whose."""

    @pytest.mark.parametrize(("gpus", "named", "want"), [
        (3, None, ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]),
        (2, "5,3", ["5,3", "3,5", "5,3", "3,5"]),
        (2, "GPU-a, GPU-b,-1,7", ["GPU-a,GPU-b", "GPU-b,GPU-a", "GPU-a,GPU-b", "GPU-b,GPU-a"]),
        (1, None, ["0"] * 4),
    ])  # fmt: skip
    def test_ranks_take_them_in_turn(self, monkeypatch, gpus, named, want):
        if named is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        code = "import json; from helpers import gpu; print(json.dumps([gpu.environment_of(rank, alone) for alone in "
        code += "(False, True) for rank in range(4)]))"
        code = f"import sys; sys.path.insert(0, {str(Path(gpu.__file__).parents[1])!r}); {code}"
        done = fake_cuda.python(code, gpus=",".join(map(str, range(gpus))))
        assert done.returncode == 0, done.stderr
        told = [each["CUDA_VISIBLE_DEVICES"] for each in json.loads(done.stdout)]
        assert told == want + [each.split(",")[0] for each in want]

    def test_pools_of_gpus_get_them_and_others_do_not(self, monkeypatch):
        monkeypatch.setattr(gpu, "visible", lambda: ("4", "6"))
        place = pool.LocalPlace()
        assert [place.environment(rank, 3, "nvlink") for rank in range(3)] == [
            {"CUDA_VISIBLE_DEVICES": "4,6"}, {"CUDA_VISIBLE_DEVICES": "6,4"}, {"CUDA_VISIBLE_DEVICES": "4,6"}]
        assert place.environment(1, 3, "shm") == {}
        monkeypatch.setattr(gpu, "visible", lambda: ())
        assert place.environment(1, 3, "nvlink") == {}

    def test_a_variable_may_differ_between_ranks(self, cache, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert cache.get(2, env={"CUDA_VISIBLE_DEVICES": str}).run(visible_gpus) == ["0", "1"]
        assert cache.get(2).run(visible_gpus) == [None, None]
