"""The benchmark runs through at tiny sizes and means what it says. No threshold here: a figure is not a test."""

import json
import statistics
import subprocess
import sys

import numpy as np
import pytest

from epcomm import _create, _launch
from epcomm.bench import cases, cli, gpu, ranks, report, run, transport, workload

SHAPE = ["--tokens", "33", "--hidden", "72", "--experts", "10", "--topk", "3"]
TINY = [*SHAPE, "--no-transport"]

pytestmark = pytest.mark.usefixtures("no_launcher")


def shape(**changed):
    values = {"mode": "train", "tokens": 33, "hidden": 72, "experts": 10, "topk": 3, "dtype": "bfloat16",
              "layout": "rank"}
    return workload.Shape(**{**values, **changed})


@pytest.mark.parametrize(("mode", "layout", "dtype", "ranks"), [
    ("train", "rank", "bfloat16", 2), ("train", "expert", "float32", 3), ("decode", "expert", "float16", 2)])
def test_runs_through(tmp_path, capsys, backend, mode, layout, dtype, ranks):
    file = tmp_path / "report.json"
    kinds = ["--mode", mode, "--layout", layout, "--dtype", dtype, *(SHAPE if mode == "train" else TINY)]
    assert cli.main(["--ranks", str(ranks), "--repeat", "5", "--backend", backend, "--baselines", "none",
                     "--json", str(file), *kinds]) == 0
    told = json.loads(file.read_text())
    assert told["schema"] == report.SCHEMA
    assert told["num_ranks"] == ranks
    assert told["backend"] == backend
    assert told["shape"] == shape(mode=mode, layout=layout, dtype=dtype).as_dict()
    assert told["definitions"] == report.DEFINITIONS
    assert told["machine"]["load_before"] >= 0
    assert list(told["operations"]) == list(report.OPERATIONS)
    for operation, parts in told["operations"].items():
        assert "epcomm" in parts["cases"]
        for case, numbers in parts["cases"].items():
            assert len(numbers["times_s"]) == 5, (operation, case)
            assert 0 < numbers["median_s"] <= numbers["p95_s"] <= numbers["max_s"]
            assert numbers["median_s"] == statistics.median(numbers["times_s"])
            if operation != "layout":
                floor = told["operations"][report.FLOOR_OF[operation]]["cases"]["floor"]["median_s"]
                assert numbers["share_of_floor"] == pytest.approx(floor / numbers["median_s"])
                assert numbers["logical_gbs"] == pytest.approx(parts["logical_bytes"] / numbers["median_s"] / 1e9)
    assert (told["transport"] is not None) == (mode == "train" and "transport" not in told["skipped"])
    if told["transport"] is not None:
        assert [row["messages"] > 0 and row["seconds_each"] > 0 for row in told["transport"]].count(True) == 14
        for row in told["transport"]:
            assert (row["gbs"] is None) == (not row["what"].startswith("stream")), row
    out = capsys.readouterr().out
    for word in ("share of floor", "dispatch: ", "combine: ", *report.DEFINITIONS):
        assert word in out


def test_fewer_than_five_repeats_give_no_verdict(capsys):
    assert cli.main(["--repeat", "4", "--baselines", "none", *TINY]) == 0
    out = capsys.readouterr().out
    assert "no verdict: 4 repeat(s), at least 5 are needed" in out
    assert "of the memory-copy floor," not in out


@pytest.mark.parametrize(("layout", "buffers"), [("rank", "fresh"), ("expert", "fresh"), ("expert", "kept")])
@pytest.mark.parametrize("baseline", run.BASELINES)
def test_baselines_give_the_exact_result(tmp_path, capsys, baseline, layout, buffers):
    pytest.importorskip({"gloo": "torch", "mpi4py": "mpi4py"}[baseline])
    if baseline == "mpi4py" and _launch.mpirun_command(2) is None:
        pytest.skip("no mpirun")
    file = tmp_path / "report.json"
    kinds = ["--layout", layout, "--baselines", baseline, "--baseline-buffers", buffers]
    assert cli.main(["--repeat", "2", *kinds, "--json", str(file), *TINY]) == 0
    told = json.loads(file.read_text())
    assert told["skipped"] == {} and told["baseline_buffers"] == buffers
    for operation in ("layout", "dispatch", "combine"):
        assert baseline in told["operations"][operation]["cases"]


def test_a_baseline_that_cannot_run_is_told(monkeypatch, capsys):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["--repeat", "1", *TINY]) == 0
    out = capsys.readouterr().out
    assert "skipped gloo: torch is not installed" in out
    assert "skipped mpi4py: mpi4py is not installed" in out


def test_a_wrong_result_is_an_error_not_a_time():
    load = workload.Workload(shape(), 1, 2)
    cases.check("good", load.wanted(), load)
    wrong = load.wanted()
    wrong[4, 5] += 1
    with pytest.raises(cases.WrongResult, match="rank 1"):
        cases.check("bad", wrong, load)
    with pytest.raises(cases.WrongResult):
        cases.check("short", load.wanted()[1:], load)


def test_joins_torchrun(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "report.json"
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                           "epcomm", "bench", "--repeat", "2", "--json", str(file), *TINY],
                          capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    assert told["num_ranks"] == 2
    assert set(told["operations"]["dispatch"]["cases"]) == {"epcomm", "floor", "gloo"}
    assert list(told["skipped"]) == ["mpi4py"]


@pytest.mark.parametrize(("arguments", "kinds"), [
    (["--backend", "nvlink"], ("GPU", "host")), (["--backend", "shm", "--device", "cuda"], ("host", "GPU")),
    (["--backend", "^shm,shm_ibrc,ibrc,shm_ibgda,ibgda"], ("GPU", "host"))])
def test_a_backend_of_other_memory_is_refused_before_ranks_start(monkeypatch, capsys, arguments, kinds):
    monkeypatch.setattr(_launch, "join_or_start", None)
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    assert cli.main([*arguments, *TINY]) == 1
    err = capsys.readouterr().err
    has, takes = kinds
    assert err.startswith(f"bench: --backend is '{arguments[1]}', which has {has} memory, but these are {takes} arrays")
    assert "--device cuda" in err and err.count("\n") == 1


def test_ranks_stay_on_the_host_where_a_launcher_has_imported_a_torch_with_gpus(monkeypatch):
    monkeypatch.setattr(_create, "_current_gpu", lambda: "cuda:0")
    options = {"backend": None, "sms": None, "threads": 1, "timeout_s": 30.0}
    rank = ranks.BenchRank(_launch.Place(0, 1), shape().as_dict(), options, ["epcomm"])
    try:
        assert rank.answer(["trial", "epcomm"])["dispatch"] > 0
        transport.TransportCase(_launch.Place(0, 1), options).close()
    finally:
        rank.close()


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bars.png"
    assert cli.main(["--repeat", "1", "--baselines", "none", "--plot", str(file), *TINY]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize("model", [None, "over the software HCA, which is not a network"])
def test_picture_says_what_is_a_model(tmp_path, model):
    matplotlib = pytest.importorskip("matplotlib")
    from epcomm.bench import plot

    numbers = {"median_s": 1e-3, "p95_s": 2e-3}
    told = {"shape": shape().as_dict(), "num_ranks": 2, "backend": "ibgda", "repeat": 1, "model": model, "operations": {
        name: {"cases": {"floor": numbers, "epcomm": numbers}} for name in ("dispatch", "combine", "combine_buffer")}}
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        plot.draw(told, str(tmp_path / "bars.svg"))
    assert ("not a network" in (tmp_path / "bars.svg").read_text()) == (model is not None)


@pytest.mark.parametrize("arguments", [["--tokens", "-1"], ["--topk", "11", "--experts", "10"], ["--mode", "infer"],
                                       ["--mode", "decode", "--tokens", "129"], ["--baselines", "carrier-pigeon"],
                                       ["--dtype", "float64"], ["--ranks", "two"], ["--ranks", "2,4"],
                                       ["--read", "a.json"]])
def test_bad_command_lines_say_what_is_allowed(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m epcomm bench" in capsys.readouterr().err


class TestWorkload:
    """Numbers that every definition rests on, counted again the slow way."""

    @pytest.mark.parametrize("layout", ["rank", "expert"])
    def test_rows(self, layout):
        loads = [workload.Workload(shape(layout=layout), rank, 3) for rank in range(3)]
        received = np.zeros(3, int)
        for load in loads:
            sent = 0
            for picks in load.topk_idx:
                assert len(set(picks)) == 3
                owners = [next(rank for rank in range(3) if expert < [4, 7, 10][rank]) for expert in picks]
                sent += len(owners if layout == "expert" else set(owners))
                for owner in set(owners):
                    received[owner] += 1
            assert load.rows_sent == sent
        assert {load.max_tokens_received for load in loads} == {received.max()}

    @pytest.mark.parametrize("layout", ["rank", "expert"])
    @pytest.mark.parametrize("dtype", list(workload.DTYPES))
    def test_wanted_is_exact(self, layout, dtype):
        load = workload.Workload(shape(layout=layout, dtype=dtype), 0, 2)
        for token in range(33):
            owners = [load.owner[expert] for expert in load.topk_idx[token]]
            times = sum(load.topk_weights[token]) if layout == "expert" else len(set(owners))
            wide = load.x[token].astype(np.float64) * float(times)
            assert (load.wanted()[token].astype(np.float64) == wide).all()

    def test_every_rank_makes_the_same_picks(self):
        first, second = workload.Workload(shape(), 0, 2), workload.Workload(shape(), 1, 2)
        assert (first.picks_of(1) == second.topk_idx).all()
        assert (first.topk_idx != second.topk_idx).any()


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("threads", [1, 3])
def test_floor_copies_every_row_of_its_definition(layout, threads):
    """The floor touches each token row and each row it becomes, once: no byte less than its definition says."""
    load = workload.Workload(shape(layout=layout, tokens=500), 0, 2)
    floor = cases.FloorCase(lambda: None, load, threads)
    try:
        blocks = [block for share in floor._shares for block in share]
        assert sum(len(tokens) for tokens, _ in blocks) == 500
        assert sum(rows.shape[0] * rows.shape[1] for _, rows in blocks) == load.rows_sent
        for tokens, _ in blocks:
            tokens[:] = 7
        floor.trial()
        assert all((rows == 7).all() for _, rows in blocks)
        for _, rows in blocks:
            rows[:] = 9
        floor._all(cases._gather)
        assert all((tokens == 9).all() for tokens, _ in blocks)
    finally:
        floor.close()
