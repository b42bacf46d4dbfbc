"""The main job: real digits through experts on several ranks, the same bits as one process."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn")

from epcomm import _create, _launch, config
from epcomm._registry import BACKENDS
from epcomm.examples import _digits_rank, _moe, digits

TAMPERED = """
import os, signal
from epcomm.examples._digits_rank import DigitsRank

class OneBit(DigitsRank):
    def __init__(self, place, **options):
        super().__init__(place, **options)
        if place.rank == 1:
            self._wanted.view("uint32")[3, 5] ^= 1

class Dies(DigitsRank):
    def __init__(self, place, **options):
        super().__init__(place, **options)
        self._rank = place.rank

    def _by_expert(self, out):
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._by_expert(out)
"""

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def tampered(tmp_path, monkeypatch):
    (tmp_path / "tampered_digits.py").write_text(TAMPERED)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*command, timeout=120):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(("ranks", "layout"), [(1, "rank"), (2, "expert"), (3, "rank"), (4, "expert"), (9, "rank")])
def test_same_bits_as_one_process(tmp_path, capsys, backend, ranks, layout):
    file = tmp_path / "report.json"
    code = digits.main(["--ranks", str(ranks), "--layout", layout, "--backend", backend, "--repeat", "2",
                        "--timeout-s", "60", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0
    assert "1,797 images: the same bits as one process, 2 times" in out
    report = json.loads(file.read_text())
    assert report["same_bits"] is True
    assert report["images"] == 1797
    assert [rank["rank"] for rank in report["ranks"]] == list(range(ranks))
    assert sorted(number for rank in report["ranks"] for number in rank["experts"]) == list(range(8))
    assert sum(sum(rank["picks"]) for rank in report["ranks"]) == 2 * 1797
    assert {rank["backend"] for rank in report["ranks"]} == {backend}
    is_model = config.get("EPCOMM_IB_PROVIDER") == "soft" and any(
        row.name == backend and row.needs_nics for row in BACKENDS)
    for told in (out, report["model"] or ""):
        assert ("is not a network" in told) == is_model
    if layout == "expert":
        assert sum(rank["rows_received"] for rank in report["ranks"]) == 2 * 1797


def test_one_wrong_bit_is_seen(tampered, monkeypatch, capsys):
    monkeypatch.setattr(digits, "WORKER", "tampered_digits:OneBit")
    assert digits.main(["--ranks", "2", "--repeat", "3"]) == 1
    out = capsys.readouterr().out
    assert "NOT the same bits" in out
    assert "3 values and 0 counts differ" in out


def test_a_killed_rank_is_a_message_not_a_hang(tampered, monkeypatch, capsys):
    monkeypatch.setattr(digits, "WORKER", "tampered_digits:Dies")
    assert digits.main(["--ranks", "3", "--timeout-s", "60"]) == 1
    err = capsys.readouterr().err
    assert "rank 1: the process was ended by SIGKILL" in err
    assert "PeerLostError" in err


def test_bad_command_lines_say_what_is_allowed(capsys):
    for arguments in (["--ranks", "0"], ["--layout", "diagonal"], ["--repeat", "many"]):
        with pytest.raises(SystemExit) as ended:
            digits.main(arguments)
        assert ended.value.code == 2
        assert arguments[0] in capsys.readouterr().err


def test_an_unknown_backend_is_one_message(capsys):
    assert digits.main(["--ranks", "2", "--backend", "pigeon"]) == 1
    assert "pigeon" in capsys.readouterr().err


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("variable", [False, True])
def test_a_backend_of_gpu_memory_is_refused_before_ranks_start(monkeypatch, capsys, variable, train):
    monkeypatch.setattr(_launch, "join_or_start", None)
    arguments = ["--train"] if train else []
    if variable:
        monkeypatch.setenv("EPCOMM_BACKEND", "nvlink")
    else:
        arguments += ["--backend", "nvlink"]
    assert digits.main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"digits: {'EPCOMM_BACKEND' if variable else '--backend'} is 'nvlink', which has GPU memory")
    assert "host memory: shm, " in err and err.count("\n") == 1


def test_a_rank_stays_on_the_host_where_a_launcher_has_imported_a_torch_with_gpus(monkeypatch):
    monkeypatch.setattr(_create, "_current_gpu", lambda: "cuda:0")
    rank = _digits_rank.DigitsRank(_launch.Place(0, 1), _moe.load_images().tobytes().hex(), "expert", None, 30.0)
    try:
        assert rank.answer("trial")["values_differ"] == 0
    finally:
        rank.close()


def test_the_model_gives_the_same_bits_for_any_batch():
    """What the comparison rests on: the bits of a row do not depend on the rows beside it."""
    images = _moe.load_images()
    topk_idx, topk_weights = _moe.gate(images)
    x = images.astype(np.float32)
    whole = _moe.one_process(x, topk_idx, topk_weights)
    for part in (slice(0, 1), slice(5, 8), slice(100, 517), slice(1, 1797)):
        alone = _moe.one_process(x[part], topk_idx[part], topk_weights[part])
        assert (alone.view(np.uint32) == whole[part].view(np.uint32)).all()


def test_the_gate_is_what_its_text_says():
    images = _moe.load_images()
    assert images.shape == (1797, 64)
    topk_idx, topk_weights = _moe.gate(images)
    assert topk_idx.shape == topk_weights.shape == (1797, 2)
    assert (topk_idx[:, 0] != topk_idx[:, 1]).all()
    assert set(topk_idx.ravel()) == set(range(8))
    assert (topk_weights[:, 0] >= topk_weights[:, 1]).all()
    np.testing.assert_allclose(topk_weights.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_torchrun(tmp_path, ranks):
    pytest.importorskip("torch")
    file = tmp_path / "report.json"
    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m",
               "epcomm.examples.digits", "--repeat", "2", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits as one process") == 1
    assert len(json.loads(file.read_text())["ranks"]) == ranks


def test_under_mpirun():
    pytest.importorskip("mpi4py")
    command = _launch.mpirun_command(2)
    if command is None or shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    done = run(*command, sys.executable, "-m", "epcomm.examples.digits", "--repeat", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits as one process") == 1


def test_as_a_module_of_a_fresh_process():
    done = run(sys.executable, "-m", "epcomm.examples.digits", "--ranks", "2", "--repeat", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits" in done.stdout
    assert not [name for name in os.listdir("/dev/shm") if "epcomm" in name]


def test_an_interrupt_ends_every_rank():
    """Ctrl-C reaches the whole foreground group; the parent ends the ranks and says so."""
    started = subprocess.Popen([sys.executable, "-m", "epcomm.examples.digits", "--ranks", "3", "--repeat", "100000"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        assert "0/100000" in started.stderr.readline()  # all ranks are at work
        os.killpg(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=60)
        assert started.returncode == 130, err
        assert "digits: interrupted" in err
        with pytest.raises(ProcessLookupError):  # the group is empty
            os.killpg(started.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
