"""A source distribution is complete, and a wheel made from it works away from the source."""

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backends", "cuda", "epcomm", "include", "tests")
SUFFIXES = {".py", ".pyx", ".pxd", ".pyi", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".md", ".typed"}
TOP = {"LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py", "ruff.toml", ".clang-format",
       ".cython-lint.toml", ".pre-commit-config.yaml", ".ci/run"}  # fmt: skip
missing = [name for name in ("Cython", "setuptools", "pip") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing), reason=f"builds without isolation, which needs {', '.join(missing)}"),
    pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="not a checkout"),
]


def run(*command, cwd, timeout_s=1200, **variables):
    """Run a command away from this checkout's modules; its output is the failure text."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "EPCOMM_BUILD_BACKENDS")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept | variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}:\n{done.stdout[-6000:]}"
    return done.stdout


def sources():
    """Every file of the checkout that belongs to the sources."""
    found = {name for name in TOP if (ROOT / name).is_file()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Folder of an unpacked source distribution, made from a copy of the sources."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in sources():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(made)!r}))"
    run(sys.executable, "-c", code, cwd=copy)
    (archive,) = made.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(made)
    (folder,) = (path for path in made.iterdir() if path.is_dir())
    return folder


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """A wheel made from nothing but the source distribution; unoptimised, since only its form matters here."""
    made = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", made, sdist,
        cwd=made, EPCOMM_BUILD_FLAGS="-O0", PIP_DISABLE_PIP_VERSION_CHECK="1")  # fmt: skip
    (path,) = made.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder,
        PIP_DISABLE_PIP_VERSION_CHECK="1")  # fmt: skip
    return folder


def test_the_source_distribution_holds_every_source_and_nothing_built(sdist):
    inside = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert sources() - inside == set()
    extra = {name for name in inside - sources() if not name.startswith("epcomm.egg-info/")}
    assert extra == {"PKG-INFO"}


def test_the_wheel_holds_what_is_used_and_no_sources_of_extensions(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    modules = {path.stem for path in (ROOT / "epcomm").glob("*.pyx")}
    built = {Path(name).name.split(".")[0] for name in inside if name.endswith(".so")}
    assert built == modules
    for kind, place in (("include", "epcomm/_include"), ("cuda", "epcomm/_cuda")):
        for path in (ROOT / kind).rglob("*"):
            if path.suffix in {".h", ".hpp", ".cuh", ".cu"}:
                assert f"{place}/{path.relative_to(ROOT / kind).as_posix()}" in inside
    for path in (ROOT / "epcomm").rglob("*"):
        if path.suffix in {".py", ".pyi", ".typed", ".pxd"}:
            assert path.relative_to(ROOT).as_posix() in inside
    assert not [name for name in inside if name.endswith((".cpp", ".o")) or name.startswith(("tests/", "build/"))]


def test_the_wheel_works_away_from_the_source(installed, tmp_path):
    code = """
import pathlib, subprocess, sys
import numpy as np, epcomm
from epcomm import _paths
assert pathlib.Path(epcomm.__file__).is_relative_to(sys.argv[1]), epcomm.__file__
assert (_paths.include_dir() / "epcomm" / "heap.h").is_file() and _paths.cuda_dir().is_dir()
assert _paths.include_dir().is_relative_to(sys.argv[1])
with epcomm.Communicator(num_experts=2, num_topk=1, hidden=4, max_tokens_per_rank=3, dtype="float32") as comm:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    out = comm.dispatch(x, np.array([[0], [1], [-1]]))
    print(comm.combine(out.x.copy(), out.handle).x.tolist())
"""
    output = run(sys.executable, "-c", code, installed, cwd=tmp_path, PYTHONPATH=str(installed))
    assert "[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [0.0, 0.0, 0.0, 0.0]]" in output
    run(sys.executable, "-m", "epcomm", "info", cwd=tmp_path, PYTHONPATH=str(installed))
    source = tmp_path / "probe.cpp"
    source.write_text('#include "epcomm/backend.hpp"\n#include "epcomm/entry.h"\n#include "epcomm/formats.h"\n')
    compiler = os.environ.get("CXX", "g++")
    include = installed / "epcomm" / "_include"
    run(*compiler.split(), "-std=c++17", "-fsyntax-only", f"-I{include}", source, cwd=tmp_path)


def test_an_editable_install_sees_the_checkout(sdist, tmp_path):
    """In a folder of its own; the wheel's objects are used again, as in a checkout that was built before."""
    folder = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", folder,
        "-e", sdist, cwd=tmp_path, EPCOMM_BUILD_FLAGS="-O0", PIP_DISABLE_PIP_VERSION_CHECK="1")  # fmt: skip
    # Without this environment's own .pth files, among which another editable install may be.
    code = "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2]); "
    code += "import epcomm; print(epcomm.__file__, epcomm.Communicator)"
    others = Path(np.__file__).parents[1]
    output = run(sys.executable, "-I", "-S", "-c", code, folder, others, cwd=tmp_path)
    assert output.startswith(str(sdist / "epcomm" / "__init__.py"))


@pytest.mark.parametrize(("names", "words"), [
    ("nope", "unknown backends ['nope']"),
    ("shm,nope", "unknown backends ['nope']"),
])  # fmt: skip
def test_a_backend_that_cannot_be_built_is_an_error_when_named(sdist, names, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=sdist, env={**os.environ, "EPCOMM_BUILD_BACKENDS": names},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and words in done.stdout + done.stderr
