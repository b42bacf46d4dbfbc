"""The library of ``fake_cuda.cpp``, built once per session, and processes that take it for the driver."""

import atexit
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .shm_worker import ROOT, Worker

DRIVER_HEADER = Path(ROOT) / "backends" / "common" / "driver.hpp"


def compile_library(source, *flags):
    """A folder that holds ``libcuda.so.1`` made from C++ source text; skips where there is no compiler."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None or not DRIVER_HEADER.exists():
        pytest.skip("needs a C++ compiler and a checkout")
    folder = tempfile.mkdtemp(prefix="epcomm-fake-cuda-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [*compiler, "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *flags]
    command += [f"-I{ROOT}/include", f"-I{ROOT}/backends", "-", "-o", f"{folder}/libcuda.so.1"]
    subprocess.run(command, input=source, text=True, check=True, timeout=120)
    return folder


@functools.cache
def folder():
    """Where the fake driver lies."""
    return compile_library((Path(__file__).parent / "fake_cuda.cpp").read_text())


def symbols():
    """Names that ``driver.hpp`` asks the driver for."""
    return re.findall(r'X\(\w+,\s*"(\w+)"', DRIVER_HEADER.read_text())


def settings(library=None, **fake):
    """Environment of a process that takes the library for the driver; ``gpus="0,1"`` is ``FAKE_CUDA_GPUS``."""
    return {"LD_LIBRARY_PATH": library or folder(), **{f"FAKE_CUDA_{k.upper()}": str(v) for k, v in fake.items()}}


def worker(**fake):
    """A worker with backend ``nvlink`` on the fake driver; its names have ``live(what)``."""
    process = Worker(backend="nvlink", environment=settings(**fake))
    process.do("names.update(live=__import__('ctypes').CDLL('libcuda.so.1').fake_cuda_live) or 0")
    return process


def python(code, library=None, **fake):
    """Run code in a fresh process; the finished process."""
    env = {**os.environ, "PYTHONPATH": ROOT, **settings(library, **fake)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, cwd="/")
