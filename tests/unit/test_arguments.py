"""What the command lines have in common is refused before anything is measured."""

import argparse
import contextlib
import os

import pytest

from epcomm import _console
from epcomm.ab import cli as ab
from epcomm.bench import cli as bench
from epcomm.examples import digits

PARSERS = [pytest.param(ab.parse, id="ab"), pytest.param(bench.parse, id="bench"),
           pytest.param(digits._parse, id="digits")]

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(("line", "word"), [
    ("--timeout-s 0", "expected seconds"), ("--timeout-s -1", "expected seconds"),
    ("--timeout-s nan", "expected seconds"), ("--timeout-s inf", "expected seconds"),
    ("--timeout-s soon", "expected seconds"), ("--json {}/no/report.json", "there is no folder"),
    ("--json {}", "cannot be written"), ("--plot {}/no/a.png", "there is no folder"),
    ("--plot {}/a.xyz", ".png, .svg, .pdf"), ("--plot {}/a", ".png, .svg, .pdf")])
def test_a_wrong_argument_costs_no_run(parse, tmp_path, capsys, line, word):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as caught:
        parse(line.format(tmp_path).split())
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_right_arguments_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _console.seconds("0.5") == 0.5
    assert _console.output_file("report.json") == "report.json"
    (tmp_path / "there.json").write_text("{}")
    assert _console.output_file(str(tmp_path / "there.json")) == str(tmp_path / "there.json")
    assert not (tmp_path / "report.json").exists()
    pytest.importorskip("matplotlib")
    assert _console.picture_file("a.PNG") == "a.PNG"


@pytest.mark.parametrize(("rank", "refused"), [(0, True), (1, False)])
def test_only_the_rank_that_writes_needs_the_folder(monkeypatch, rank, refused):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(argparse.ArgumentTypeError) if refused else contextlib.nullcontext():
        _console.output_file("/no/such/folder/report.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_of_others_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(Exception, match="cannot be written"):
        _console.output_file(str(tmp_path / "report.json"))
