"""What `ab` concludes from numbers, and how it reads a command line."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from epcomm.ab import cli, ranks, report, run, stats

EQUAL = np.random.default_rng(3).lognormal(0, 0.2, 40)


def test_equal_sides_do_not_differ():
    # Drift hits both sides of a repeat: alone it would look like a difference, in pairs it does not.
    drift = np.linspace(1, 3, 40)
    noise = np.random.default_rng(5).normal(1, 0.01, (2, 40))
    told = stats.compare(drift * noise[0], drift * noise[1], lower_is_better=True)
    assert told.verdict == "no difference"
    assert told.ratio_interval[0] <= 1 <= told.ratio_interval[1]


@pytest.mark.parametrize(("factor", "lower", "verdict"), [
    (0.8, True, "B faster"), (1.25, True, "A faster"), (0.8, False, "A faster"), (1.25, False, "B faster")])
def test_a_difference_has_a_direction(factor, lower, verdict):
    told = stats.compare(EQUAL, EQUAL * factor, lower_is_better=lower)
    assert told.verdict == verdict
    assert told.ratio == pytest.approx(1 / factor if lower else factor)
    assert told.a == np.median(EQUAL)
    assert told.a_interval[0] < told.a < told.a_interval[1]


def test_false_alarms_are_rare():
    rng = np.random.default_rng(11)
    verdicts = [stats.compare(*rng.lognormal(0, 0.3, (2, 20)), lower_is_better=True, seed=i).verdict
                for i in range(300)]
    # 5 % are expected; 10 % of 300 is more than three deviations away.
    assert verdicts.count("no difference") >= 270


def test_too_few_repeats_give_no_verdict():
    told = stats.compare([1.0] * 19, [5.0] * 19, lower_is_better=True)
    assert told.verdict is None and told.ratio == 0.2
    assert stats.compare([1.0] * 20, [5.0] * 20, lower_is_better=True).verdict == "A faster"


@pytest.mark.parametrize(("a", "b"), [
    ([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [np.nan]), ([[1.0]], [[1.0]])])
def test_numbers_that_mean_nothing_are_refused(a, b):
    with pytest.raises(ValueError, match="a and b"):
        stats.compare(a, b, lower_is_better=True)


def test_every_measurement_has_rows():
    rows = run.wire_rows([8, 64], [1, 4], 1000)
    assert [(row.group, row.label) for row in rows] == [
        ("put", "8 B"), ("put", "64 B"), ("put + signal", "8 B"), ("put + signal", "64 B"),
        ("message rate", "1 channel"), ("message rate", "4 channels"),
        ("bandwidth", "1 channel"), ("bandwidth", "4 channels")]
    # Without a mover no signal arrives: nothing may wait for one.
    assert {row.request[0] for row in run.wire_rows([8, 64], [1, 4], 1000, prefix="x: ")} == {"put", "rate"}


def made(repeat):
    measured = run.Measured([], 2, {"wire": [{"plan": []}, {"plan": []}]}, 0.0)
    measured.rows = [*run.wire_rows([8], [1], 100), run.Row("calls", "dispatch", "s", True, ("calls",)),
                     run.Row("calls", "combine", "s", True, ("calls",))]
    for index, row in enumerate(measured.rows):
        values = (EQUAL[:repeat] * 1e-6, EQUAL[:repeat] * 2e-6) if row.lower_is_better else (EQUAL[:repeat] * 1e6,) * 2
        measured.values[index] = [list(values[0]), list(values[1])]
        measured.cpu[index] = [[{"caller": 1e-6}] * repeat, [{"caller": 2e-6, "epcomm-proxy": 1e-6}] * repeat]
    return measured


SIDES = [{"backend": "ibrc", "environment": {}}, {"backend": "ibgda", "environment": {"EPCOMM_TIMEOUT_S": "5"}}]


@pytest.mark.parametrize("repeat", [20, 3])
@pytest.mark.parametrize("provider", ["soft", "verbs", "memory / soft"])
def test_report(capsys, tmp_path, repeat, provider):
    told = report.build(made(repeat), SIDES, {"shape": {}}, repeat, provider)
    json.dumps(told)
    report.show(told)
    out = capsys.readouterr().out
    assert ("not a network result" in out) == ("soft" in provider)
    assert ("not a network result" in (told["provider_note"] or "")) == ("soft" in provider)
    assert ("Both sides use the same model" in out) == (provider == "soft")
    assert ("A faster" in out) == (repeat >= 20)
    assert ("no verdicts: 3 repeat(s)" in out) == (repeat < 20)
    assert "epcomm-proxy" in out and "EPCOMM_TIMEOUT_S=5" in out
    for name in report.DEFINITIONS:
        assert name in out
    matplotlib = pytest.importorskip("matplotlib")
    from epcomm.ab import plot

    plot.draw(told, str(tmp_path / "ab.png"))
    assert (tmp_path / "ab.png").stat().st_size > 20_000
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        plot.draw(told, str(tmp_path / "ab.svg"))
    assert ("not a network result" in (tmp_path / "ab.svg").read_text()) == ("soft" in provider)


@pytest.mark.parametrize(("line", "word"), [
    ("--a nowhere", "nowhere"), ("--repeat 0", "--repeat 0"), ("--sizes 0", "numbers from 1"),
    ("--sizes a", "whole numbers"),
    ("--channels 33", "--channels 33"), ("--a-env X=1", "NAME=VALUE"), ("--env EPCOMM_LOG", "NAME=VALUE"),
    ("--topk 65", "--topk 65"), ("--ranks 1", "--ranks 1")])
def test_a_wrong_command_line_is_told(capsys, line, word):
    with pytest.raises(SystemExit) as caught:
        cli.parse(line.split())
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_variables_of_one_side_are_its_own():
    told = cli.parse(["--a", "shm", "--b", "shm", "--env", "EPCOMM_LOG=error", "--a-env", "EPCOMM_TIMEOUT_S=5",
                      "--a-env", "EPCOMM_LOG=info"])
    assert cli._side(told, "a")["environment"] == {"EPCOMM_LOG": "info", "EPCOMM_TIMEOUT_S": "5"}
    assert cli._side(told, "b")["environment"] == {"EPCOMM_LOG": "error"}
    assert cli.parse([]).a_env == {}


def test_a_side_counts_its_own_threads():
    stop = threading.Event()
    threads = []

    def work(named):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("epcomm-test-0")
        named.set()
        while not stop.wait(0.001):
            sum(range(20000))

    def make_side():
        before = ranks.Meter.threads()
        add_thread()
        return ranks.Meter(before)

    def add_thread():
        named = threading.Event()
        threads.append(threading.Thread(target=work, args=(named,), daemon=True))
        threads[-1].start()
        assert named.wait(30)

    try:
        neither = ranks.Meter(ranks.Meter.threads())
        a, b = make_side(), make_side()
        for side in (neither, a, b):
            side.start()
        whole = time.process_time()
        time.sleep(0.4)
        alone = neither.spent()
        spent = [side.spent() for side in (a, b)]
        whole = time.process_time() - whole
        assert "epcomm-test-0" not in alone
        # Equal threads: a row that held both would have all of the process's time.
        assert all(0 < one["epcomm-test-0"] < 0.8 * whole for one in spent)
        assert all(one.get("caller", 0) < 0.3 * whole for one in spent)
        # A thread that a side makes only when it works is that side's.
        a.start()
        add_thread()
        time.sleep(0.2)
        assert a.spent()["epcomm-test-0"] > 0
        assert len(a._own) == 2 and len(b._own) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
