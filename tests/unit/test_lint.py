"""The linters agree, with the settings and versions of the dot files. A tool that is not installed is a skip."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP_SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}
CYTHON_SUFFIXES = {".pyx", ".pxd", ".pxi"}


def sources(suffixes):
    """Checked-in files (or all, where there is no git) with one of the suffixes."""
    found = []
    for folder in ("epcomm", "include", "backends", "cuda", "tests"):
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def run_tool(*command):
    """Run a tool of this interpreter's environment, or of PATH; its output is the failure text."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if shutil.which(command[0], path=path) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        [shutil.which(command[0], path=path), *command[1:]],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{command[0]} complains:\n{done.stdout[-8000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_ruff():
    run_tool("ruff", "check", "--quiet", ".")


def test_cython_lint():
    files = sources(CYTHON_SUFFIXES)
    assert files
    run_tool("cython-lint", *files)


def test_clang_format():
    files = sources(CPP_SUFFIXES)
    assert files
    wanted = re.search(r"clang-format==(\d+)", (ROOT / ".pre-commit-config.yaml").read_text()).group(1)
    version = run_tool("clang-format", "--version")
    if f"version {wanted}." not in version:
        pytest.skip(f"clang-format {wanted} decides the style; this one is {version.strip()}")
    run_tool("clang-format", "--dry-run", "-Werror", *files)


def test_codespell():
    run_tool("codespell", "README.md", "epcomm", "include", "backends", "cuda", "tests",
             "--skip", "*.so,*.pyc,__pycache__,*.json,*.png")


@pytest.mark.parametrize("folder", ["epcomm", "include", "backends", "cuda", "tests"])
def test_lines_are_not_longer_than_the_style_says(folder):
    """100 columns for C++, 120 for Python and Cython; this holds without any tool."""
    too_long = []
    for path in (ROOT / folder).rglob("*"):
        limit = 100 if path.suffix in CPP_SUFFIXES else 120
        if path.suffix in CPP_SUFFIXES | CYTHON_SUFFIXES | {".py", ".pyi"}:
            lines = path.read_text(encoding="utf-8").splitlines()
            too_long += [f"{path.relative_to(ROOT)}:{i}" for i, line in enumerate(lines, 1) if len(line) > limit]
    assert not too_long, too_long
