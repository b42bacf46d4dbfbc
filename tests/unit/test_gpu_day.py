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


CONTROL = """#!/bin/sh
at=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
  [ -d "$at" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 4
  echo began >> "$TOLD"
  exec 3> "$at/control"
  exit ${FAILS:-0}
fi
read word
echo "$word" >> "$TOLD"
"""


@pytest.fixture
def with_mps(stand_in, tmp_path):
    """And a control program of CUDA MPS that writes what it was told."""
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.write_text(CONTROL)
    control.chmod(0o755)
    for name in ("rm", "mktemp"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    python = tmp_path / "bin" / "python"
    text = python.read_text().replace("asked: $*", "asked: $* under ${CUDA_MPS_PIPE_DIRECTORY:-nothing}")
    python.write_text(text)
    return {**stand_in, "TOLD": str(tmp_path / "told"), "TMPDIR": str(tmp_path)}


def test_steps_behind_mps_run_under_it_and_its_daemon_ends_with_the_script(with_mps, tmp_path):
    out, told = tmp_path / "out", tmp_path / "told"
    done = day(out, 2, 20, "ops", "mps", "engine", "bench", **with_mps)
    assert done.returncode == 1 and [line.split()[1] for line in done.stdout.splitlines()[1:]] == ["0", "0", "0", "3"]
    assert told.read_text() == "began\nquit\n"
    assert "under nothing\n" in (out / "ops.log").read_text()
    for step in ("engine", "bench"):
        assert "/pipe\n" in (out / f"{step}.log").read_text()
    assert not list(tmp_path.glob("**/pipe")) and (out / "mps" / "log").is_dir()


def test_a_daemon_that_does_not_start_is_not_run_under(with_mps, tmp_path):
    done = day(tmp_path / "out", 2, 20, "mps", "engine", **with_mps, FAILS="5")
    assert done.returncode == 1 and [line.split()[1] for line in done.stdout.splitlines()[1:]] == ["5", "0"]
    assert "under nothing\n" in (tmp_path / "out" / "engine.log").read_text()
    assert (tmp_path / "told").read_text() == "began\nquit\n"


def test_the_daemon_of_somebody_else_is_left_alone(with_mps, tmp_path):
    pipe = tmp_path / "theirs"
    pipe.mkdir()
    (pipe / "control").touch()
    done = day(tmp_path / "out", 2, 20, "mps", "engine", **with_mps, CUDA_MPS_PIPE_DIRECTORY=str(pipe))
    assert done.returncode == 0 and "skipped: CUDA_MPS_PIPE_DIRECTORY is set already" in done.stdout
    assert f"under {pipe}\n" in (tmp_path / "out" / "engine.log").read_text()
    assert pipe.is_dir() and not (tmp_path / "told").exists()


def test_without_mps_the_step_is_skipped(stand_in, tmp_path):
    (tmp_path / "bin" / "rm").symlink_to(shutil.which("rm"))
    (tmp_path / "bin" / "mktemp").symlink_to(shutil.which("mktemp"))
    done = day(tmp_path / "out", 2, 20, "mps", "engine", **stand_in, TMPDIR=str(tmp_path))
    assert done.returncode == 0 and "skipped: no nvidia-cuda-mps-control on PATH" in done.stdout, done.stderr


def test_a_script_that_is_ended_ends_the_daemon(with_mps, tmp_path):
    day_of = subprocess.Popen(["bash", str(SCRIPT), str(tmp_path / "out"), "2", "20", "mps", "kernels"],
                              env={**os.environ, **with_mps}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              text=True)  # fmt: skip
    try:
        for line in day_of.stdout:
            if line.startswith("mps"):
                break
        day_of.terminate()
        assert day_of.wait(30) != 0
    finally:
        day_of.kill()
        day_of.wait()
        day_of.stdout.close()
    assert (tmp_path / "told").read_text() == "began\nquit\n"


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
