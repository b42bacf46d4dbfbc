"""`python -m epcomm.examples.digits --train`: learns, agrees with one process, and says so when it does not."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers.with_torch import needs_torch

pytestmark = needs_torch


@pytest.fixture
def train():
    """The example's module."""
    pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    from epcomm.examples import _digits_train

    return _digits_train


def run(*arguments, timeout_s=240):
    """The command, with no launcher's variables."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    command = [sys.executable, "-m", "epcomm.examples.digits", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ)


def test_it_learns_and_each_loss_is_that_of_one_process(train, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture, told = tmp_path / "loss.png", tmp_path / "told.json"
    done = run("--train", "--ranks", "3", "--layout", "rank", "--plot", str(picture), "--json", str(told))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(told.read_text())
    assert len(report["losses"]) == len(report["losses_of_one_process"]) == report["steps"] == train.NUM_STEPS
    assert report["accuracy"] >= 0.95 and report["losses"][-1] < report["losses"][0] / 10
    assert max(abs(a - b) for a, b in zip(report["losses"], report["losses_of_one_process"], strict=True)) <= 1e-5
    assert [rank["experts"] for rank in report["ranks"]] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert all(rank["rows_sent"] > 1000 for rank in report["ranks"])
    assert "as in one process" in done.stdout and "NOT" not in done.stdout
    assert re.search(r"\d+/180|180/180", done.stderr), "a progress bar"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


class FakeRanks:
    """One process in place of the ranks, with a fault."""

    num_ranks, speaks = 1, False

    def __init__(self, train, run, fault):
        self._train, self._run, self._fault = train, run, fault

    def ask(self, request):
        if request == "correct":
            return [self._run.correct(slice(None))]
        if request == "describe":
            return [{"backend": "none", "experts": []}]
        experts = self._run.model.moe
        picked = []
        hook = experts.gate.register_forward_hook(lambda module, given, scores: picked.append(scores.topk(2)[1]))
        loss = self._run.step(self._run.batch(request))
        hook.remove()
        picks = picked[0]
        if request == 5:
            if self._fault == "gradient":
                next(self._run.model.parameters()).data += 1e-3
            loss += {"loss": 1e-3}.get(self._fault, 0)
            if self._fault == "picks":
                picks[0, 1] = (set(range(8)) - set(picks[0].tolist())).pop()
        return [{"loss": loss, "picks": picks.tolist()}]


@pytest.mark.parametrize("fault", [None, "loss", "gradient", "picks"])
def test_what_differs_is_found(train, monkeypatch, fault):
    images, labels = train._moe.load_images(), train._load_labels()
    monkeypatch.setattr(train, "NUM_STEPS", 10)
    ranks = FakeRanks(train, train.Run(images, labels, train.whole_model()[0]), fault)
    whole, experts = train.whole_model()
    report = train._train(ranks, train.Run(images, labels, whole), experts)
    assert report["same_losses"] == (fault is None)
    if fault is None:
        assert report["largest_difference"] == 0
    if fault == "picks":
        assert "step 5" in report["problem"]


def test_main_says_no_with_its_exit_code(train, monkeypatch, capsys):
    from epcomm.examples import digits

    images, labels = train._moe.load_images(), train._load_labels()

    class Joined(FakeRanks):
        def __enter__(self):
            return self

        def __exit__(self, *unused):
            pass

    def start(*unused):
        return Joined(train, train.Run(images, labels, train.whole_model()[0]), "loss")

    monkeypatch.setattr(train, "NUM_STEPS", 8)
    monkeypatch.setattr(train._launch, "join_or_start", start)
    assert digits.main(["--train", "--ranks", "2"]) == 1
    with pytest.raises(SystemExit):
        digits.main(["--plot", "somewhere.png"])
    assert "--train" in capsys.readouterr().err
