"""The script of a day with GPUs, as far as it goes anywhere: it goes on after a failure, and its table says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "hardware" / "gpu_day.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None,
                                reason="needs bash and timeout")  # fmt: skip


def day(*arguments, **environment):
    return subprocess.run(["bash", str(SCRIPT), *map(str, arguments)], env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=100, stdin=subprocess.DEVNULL)


@pytest.fixture
def stand_in(tmp_path):
    """An interpreter that says what it was asked; a folder of programs with little in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "timeout", "sed", "grep", "tail", "cut", "tee", "mkdir", "dirname", "cat", "sleep"):
        (folder / name).symlink_to(shutil.which(name))
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "asked: $*"\ncase "$*" in *bench\\ *) echo "no luck"; exit 3;;\n'
                      '*kernels*) sleep 30;; esac\n')  # fmt: skip
    python.chmod(0o755)
    return {"PYTHON": str(python), "PATH": str(folder)}


def test_each_step_has_a_log_and_a_line(stand_in, tmp_path):
    out = tmp_path / "out"
    done = day(out, 8, 2, **stand_in)
    assert done.returncode == 1, done.stderr
    lines = {line.split()[0]: line.split(maxsplit=3)[1:] for line in (out / "summary.txt").read_text().splitlines()}
    assert done.stdout == (out / "summary.txt").read_text() and len(lines) == 14
    codes = {step: told[0] for step, told in lines.items()}
    assert codes.pop("kernels") == "124" and "more than 2 s" in lines["kernels"][2]
    assert codes.pop("bench") == "3" and lines["bench"][2] == "FAILED: no luck"
    for step in ("machine", "memcheck", "memcheck_ranks", "racecheck"):
        assert codes.pop(step) == "77" and "skipped: no " in lines[step][2]
    assert codes.pop("step") == "exit" and set(codes.values()) == {"0"}
    assert "--sizes 2,4,8" in (out / "engine.log").read_text() and "--sizes 8" in (out / "contract.log").read_text()
    assert "--sizes 16,9" in (out / "shared.log").read_text()
    assert "--mode train --ranks 2,4,8 --sms 8,16,24,32" in (out / "bench.log").read_text()


@pytest.mark.parametrize(("ranks", "growth"), [(1, "1"), (2, "2"), (3, "2,3"), (6, "2,4,6")])
def test_some_steps_and_any_number_of_ranks(stand_in, tmp_path, ranks, growth):
    done = day(tmp_path / "out", ranks, 20, "engine", "build", **stand_in)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["step", "engine", "build"]
    assert f"--sizes {growth}\n" in (tmp_path / "out" / "engine.log").read_text()


@pytest.mark.parametrize("wrong", [(), ("out",), ("out", "two", "5"), ("out", "2", "0"), ("out", "2", "5", "dance")])
def test_a_wrong_command_line_starts_nothing(tmp_path, wrong):
    done = day(*(tmp_path / word if word == "out" else word for word in wrong))
    assert done.returncode == 2 and "gpu_day.sh OUT RANKS LIMIT_S" in done.stdout
    assert not (tmp_path / "out" / "summary.txt").exists()


def test_small_calls_of_several_ranks_are_right_on_the_host():
    """The calls that compute-sanitizer sees."""
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "perf" / "small_gpu_calls.py"), "3", "--host"],
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "small calls done on 3 rank(s)" in done.stdout
