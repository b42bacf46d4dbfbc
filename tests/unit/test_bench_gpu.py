"""The benchmark on GPUs, without one: ranks that answer with made-up figures stand in, all else is the real thing."""

import importlib.util
import json

import numpy as np
import pytest
from helpers import with_torch

from epcomm import _launch
from epcomm.bench import cli, gpu, gpu_rank, workload

SMS = (8, 16, 24, 32)
PLAIN = ("--device", "cuda", "--tokens", "64", "--hidden", "256", "--experts", "16", "--topk", "4", "--repeat", "5")

pytestmark = pytest.mark.usefixtures("no_launcher")


def shape(**changed):
    values = {"mode": "train", "tokens": 64, "hidden": 256, "experts": 16, "topk": 4, "dtype": "bfloat16",
              "layout": "rank"}
    return workload.Shape(**{**values, **changed})


class MadeUp:
    """Ranks on `gpus` GPUs, whose calls take what their rows take over links of 400 GB/s, and a little more."""

    gpus = 8
    mps: tuple[int, ...] = ()  # ranks under CUDA MPS
    speaks = True
    fails: tuple[int, ...] = ()

    def __init__(self, worker, options, num_ranks, timeout_s):
        assert worker == gpu.WORKER
        if num_ranks in self.fails:
            raise _launch.RanksFailed(f"rank 1 of {num_ranks}: out of luck")
        self.num_ranks = num_ranks
        self.shape = workload.Shape(**options["shape"])

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        pass

    def ask(self, request):
        what, *arguments = json.loads(json.dumps(request))
        return [getattr(self, what)(rank, *arguments) for rank in range(self.num_ranks)]

    def describe(self, rank):
        load = workload.Workload(self.shape, rank, self.num_ranks)
        return {"backend": "nvlink", "gpu": "NVIDIA H200", "uuid": f"GPU-{rank % self.gpus}", "sms": 132, "torch": "2",
                "mps": rank in self.mps, "rows_sent": load.rows_sent, "rows_to": load.rows(load.topk_idx).tolist()}

    def floors_of(self, rank, sms):
        return {"push": min(48.0 * sms, 350), "store": 48.0 * sms, "pull": 330.0, "copy engine": 390.0}

    def _us(self, operation, sms):
        described = [self.describe(rank) for rank in range(self.num_ranks)]
        floor = gpu.floor_us(operation, self.shape, described, self.num_ranks > 1, self.floors_of(0, sms))
        return 5.0 if floor is None else 4.0 + floor * (1.05 + 1.6 / sms + 0.15 * (operation == "combine"))

    def trials(self, rank, sms, repeat):
        return {name: [self._us(name, sms) + 0.1 * rank + trial % 3 for trial in range(repeat)]
                for name in gpu.OPERATIONS}

    def kernels(self, rank, sms):
        return {"dispatch": {"epcomm_send": 12.5}}

    def host(self, rank, repeat):
        return {"dispatch": 20.0}

    def nccl_trials(self, rank, repeat):
        return {name: [3 * self._us(name, 32)] * repeat for name in ("dispatch", "dispatch fp8", "combine")}


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    ranks = type("Ranks", (MadeUp,), {})
    monkeypatch.setattr(gpu._launch, "join_or_start", ranks)
    return ranks


def bench(*arguments):
    return cli.main([*PLAIN, "--sms", ",".join(map(str, SMS)), *map(str, arguments)])


def is_png(path):
    data = path.read_bytes()
    return data.startswith(b"\x89PNG") and len(data) > 30_000


def test_several_numbers_of_ranks_make_one_report(made_up, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert bench("--mode", "train", "--ranks", "2,4,8", "--json", file) == 0
    told = json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert told["schema"] == gpu.SCHEMA and told["shape"] == shape().as_dict() and told["failed"] == {}
    assert [run["num_ranks"] for run in told["runs"]] == [2, 4, 8]
    for run in told["runs"]:
        assert run["linked"] and run["gpus"] == run["num_ranks"] == len(run["ranks"])
        assert list(run["sweep"]) == [str(sms) for sms in SMS] and run["skipped"] == {}
        for sms in run["sweep"].values():
            assert set(sms["operations"]) == set(gpu.OPERATIONS)
            for name, numbers in sms["operations"].items():
                assert len(numbers["times_us"]) == 5
                # The slowest rank's of each trial.
                assert numbers["median_us"] - numbers["least_us"] == pytest.approx(0.1 * (run["num_ranks"] - 1)), name
                assert (numbers["share"] is None) == (name == "layout") == (numbers["gbs"] is None)
                if numbers["share"] is not None:
                    assert numbers["share"] == pytest.approx(numbers["floor_us"] / numbers["median_us"])
        rows = sum(sum(rank["rows_to"]) for rank in run["ranks"]) / run["num_ranks"]
        numbers = run["sweep"]["16"]["operations"]["dispatch"]
        assert numbers["gbs"] == pytest.approx(rows * 512 / numbers["median_us"] / 1e3)
        assert set(run["nccl"]) == {"dispatch", "dispatch fp8", "combine"}
        assert all(numbers["floor_us"] > 0 for numbers in run["nccl"].values())
    shown = capsys.readouterr().out
    for word in ("growth over ranks, 16 SMs", "2 ranks", "8 ranks", "nccl dispatch fp8", *gpu.DEFINITIONS):
        assert word in shown
    assert "figure of" not in shown


def test_what_json_holds_is_what_was_shown(made_up, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, first, second = tmp_path / "report.json", tmp_path / "first.png", tmp_path / "second.png"
    assert bench("--ranks", "2,4,8", "--json", file, "--plot", first) == 0
    shown = capsys.readouterr().out
    assert cli.main(["--device", "cuda", "--read", str(file), "--plot", str(second)]) == 0
    assert capsys.readouterr().out == shown
    assert is_png(first) and first.read_bytes() == second.read_bytes()


def test_reports_of_several_machines_become_one(made_up, tmp_path, capsys):
    files = [tmp_path / f"{ranks}.json" for ranks in (8, 2, 4)]
    for file in files:
        assert bench("--ranks", file.stem, "--json", file) == 0
    whole = tmp_path / "whole.json"
    assert cli.main(["--device", "cuda", "--read", ",".join(map(str, files)), "--json", str(whole)]) == 0
    assert [run["num_ranks"] for run in json.loads(whole.read_text())["runs"]] == [2, 4, 8]
    assert bench("--hidden", "512", "--json", tmp_path / "other.json") == 0
    capsys.readouterr()
    for wrong in (tmp_path / "other.json", tmp_path / "none.json", __file__):
        assert cli.main(["--device", "cuda", "--read", f"{files[0]},{wrong}"]) == 1
        assert capsys.readouterr().err.startswith("bench: ")


@pytest.mark.parametrize(("ranks", "sms"), [("2", "16"), ("2", "8,16"), ("2,8", "24"), ("1,2,8,16", "8,24")])
def test_pictures_of_little(made_up, tmp_path, ranks, sms):
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    assert bench("--ranks", ranks, "--sms", sms, "--plot", file, "--baselines", "none") == 0
    assert is_png(file)


def test_more_ranks_than_gpus_run_and_are_told(made_up, tmp_path, capsys):
    made_up.gpus = 2
    file = tmp_path / "report.json"
    assert bench("--ranks", "1,2,4", "--json", file) == 0
    one, two, four = json.loads(file.read_text())["runs"]
    assert (one["linked"], two["linked"], four["linked"]) == (False, True, False)
    assert "nccl" in two and four["skipped"]["nccl"] == "NCCL wants a GPU for each rank: 4 ranks, 2 GPU(s)"
    shown = capsys.readouterr().out
    assert "4 ranks share 2 GPUs and take turns on them, which is slow: no time here is a figure of a link" in shown
    assert "one rank: nothing crossed a link" in shown and "4 ranks*" in shown and "2 ranks*" not in shown
    made_up.gpus = 1
    assert bench("--ranks", "3") == 0
    assert "ranks share a GPU and take turns on it: nothing crossed a link" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_under_mps_run_side_by_side_and_are_told_so(made_up, tmp_path, capsys, gpus):
    file = tmp_path / "report.json"
    made_up.gpus, made_up.mps = gpus, (0, 1, 2)
    it, them = ("a GPU", "it") if gpus == 1 else ("2 GPUs", "them")
    side_by_side = f"{it} and run side by side on {them} through CUDA MPS"
    assert bench("--ranks", "3", "--json", file) == 0
    assert side_by_side in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["runs"][0]["mps"] is True and "side by side" in report["definitions"]["shared"]
    del report["runs"][0]["mps"]
    assert "take turns" in gpu.note(report["runs"][0])
    made_up.mps = (0, 1)
    assert bench("--ranks", "3", "--json", file) == 0
    assert json.loads(file.read_text())["runs"][0]["mps"] is False
    assert "take turns on" in capsys.readouterr().out


def test_a_number_of_ranks_that_fails_keeps_the_others_from_nothing(made_up, tmp_path, capsys):
    made_up.fails = (4,)
    file = tmp_path / "report.json"
    assert bench("--ranks", "2,4,8", "--json", file) == 1
    told = json.loads(file.read_text())
    assert [run["num_ranks"] for run in told["runs"]] == [2, 8]
    assert told["failed"] == {"4": "rank 1 of 4: out of luck"}
    seen = capsys.readouterr()
    assert "failed with 4 ranks: rank 1 of 4: out of luck" in seen.out and "bench: 4 ranks: rank 1" in seen.err
    made_up.fails = (2,)
    assert bench("--plot", tmp_path / "no.png") == 1 and not (tmp_path / "no.png").exists()


def test_more_multiprocessors_than_there_are_is_told(made_up, capsys):
    assert bench("--sms", "8,200") == 0
    assert "skipped 200 SMs: the GPU has 132" in capsys.readouterr().out


def test_joined_ranks_that_do_not_report_say_nothing(made_up, tmp_path, capsys):
    made_up.speaks = False
    assert bench("--json", tmp_path / "no.json") == 0
    assert capsys.readouterr().out == "" and not (tmp_path / "no.json").exists()


def test_a_launcher_has_one_number_of_ranks(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        bench("--ranks", "2,4")
    assert "launcher" in capsys.readouterr().err


def test_on_gpus_without_one_is_told(capsys):
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is one")
    assert bench() == 1
    assert "--device cuda" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--layout", "expert"], ["--baselines", "gloo"], ["--ranks", "2,0"]])
def test_what_the_gpu_part_does_not_do_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--device", "cuda", *wrong])
    assert caught.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_floors_on_gpus():
    """By hand: two ranks, 10 GB/s of links, 40 GB/s of stores."""
    told = [{"rows_to": [3, 5]}, {"rows_to": [4, 2]}]
    rates = {"copy engine": 10.0, "store": 40.0}
    made = shape(tokens=6, hidden=1000)
    assert gpu.floor_us("layout", made, told, True, rates) is None
    assert gpu.floor_us("dispatch", made, told, True, rates) == pytest.approx(5 * 2000 / 10e3)
    assert gpu.floor_us("dispatch", made, told, False, rates) == pytest.approx(8 * 2000 / 40e3)
    assert gpu.floor_us("dispatch fp8", made, told, True, rates) == pytest.approx(5 * 1032 / 10e3)
    assert gpu.floor_us("combine", made, told, False, rates) == pytest.approx(6 * 2000 / 40e3)
    assert gpu.floor_us("combine buffer", made, told, True, {"copy engine": 1e9, "store": 40.0}) == pytest.approx(0.3)


def test_numbers_are_those_of_the_definitions():
    run = {"ranks": [{"rows_to": [3, 5]}, {"rows_to": [4, 2]}], "linked": True, "gpus": 2}
    numbers = gpu.numbers_of("dispatch", [3.0, 1.0, 2.0], shape(), run, {"copy engine": 10.0, "store": 40.0})
    assert (numbers["median_us"], numbers["max_us"], numbers["floor_us"]) == (2.0, 3.0, pytest.approx(5 * 512 / 10e3))
    assert numbers["share"] == pytest.approx(numbers["floor_us"] / 2) and numbers["gbs"] == pytest.approx(3.584 / 2)
    assert gpu.numbers_of("dispatch", [1.0], shape(), run, {})["share"] is None
    run["linked"] = False
    assert gpu.numbers_of("dispatch", [1.0], shape(), run, {"copy engine": 10.0, "store": 40.0})["share"] is None


class OnHost:
    """What the baseline asks of a rank, in host memory."""

    def __init__(self, context):
        import torch

        self._place = _launch.Place(context.rank, context.num_ranks)
        self._workload = load = workload.Workload(shape(tokens=19, hidden=200), context.rank, context.num_ranks)
        self._xs = [torch.from_numpy(load.x.view(np.uint8)).view(torch.bfloat16)] * 3
        self._codes = [self._xs[0].to(torch.float8_e4m3fn)] * 3
        self._scales = torch.ones(19, 2)

    def timed(self, call):
        call()
        return 1.5

    def _check(self, case, z):
        import torch

        assert np.array_equal(z.view(torch.uint8).numpy(), self._workload.wanted().view(np.uint8)), case


def exchange(context, spoil):
    rank = OnHost(context)
    if spoil and context.rank == 1:
        rank._codes[0][3, 4] = 7.0
    nccl = gpu_rank._Nccl(rank, "gloo")
    try:
        return nccl.trials(2)
    except gpu_rank.WrongResult as error:
        return str(error)
    finally:
        nccl.close()


@with_torch.needs_torch
@pytest.mark.parametrize("spoil", [False, True])
def test_torchs_way_is_right_or_an_error(pools, spoil):
    """Rows, codes and sums of three ranks, over gloo instead of NCCL."""
    told = with_torch.torch_ranks(pools, "shm", 3).run(exchange, spoil=spoil, timeout_s=90)
    want = {name: [1.5, 1.5] for name in ("dispatch", "dispatch fp8", "combine")}
    assert all(one == want for one in told) or (spoil and any("codes differ" in one for one in told)), told
    assert spoil != all(one == want for one in told)
