"""Runs the C++ programs of tests/native for tests."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

SKIPPED = 77  # exit status of a program that cannot run here

_spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parents[1] / "native" / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


def run(program, sanitize, *options, timeout_s=280):
    """Exit status and output of a program that is built if need be."""
    path = build.build(program, sanitize)
    done = subprocess.run(
        [str(path), *options], cwd=build.ROOT, env=build.environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
    )  # fmt: skip
    return done.returncode, done.stdout


def check(program, sanitize, *options):
    """Output of a program that must succeed."""
    status, output = run(program, sanitize, *options)
    if status == SKIPPED:
        pytest.skip(output.strip().splitlines()[-1])
    assert status == 0, f"{program} {' '.join(options)}: status {status}\n{output[-6000:]}"
    return output
