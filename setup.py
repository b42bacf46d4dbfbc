"""Builds one extension module per backend, the host engine and the Python faces.

EPCOMM_BUILD_BACKENDS=a,b   build exactly these backends; one that cannot be built is an error
EPCOMM_BUILD_FLAGS="..."    extra compiler and linker flags (sanitizers, warnings as errors)
EPCOMM_BUILD_STRICT=1       Cython warnings are errors
"""

import glob
import os
import runpy
import shlex
import subprocess
import sys
import tempfile

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

HERE = os.path.dirname(os.path.abspath(__file__))
os.chdir(HERE)
REGISTRY = runpy.run_path(os.path.join("epcomm", "_registry.py"))["BACKENDS"]

EXTRA_FLAGS = shlex.split(os.environ.get("EPCOMM_BUILD_FLAGS", ""))
COMPILE_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
HEADERS = sorted(glob.glob("include/epcomm/**/*.h*", recursive=True) + glob.glob("backends/**/*.hpp", recursive=True))
# Files of libraries that several extensions are linked from.
SHARED = {"epcomm_rdma": ["common/rdma/*.cpp", "softhca/*.cpp"], "epcomm_common": ["common/*.cpp"]}


class Sdist(sdist):
    """A source distribution also carries what no wheel needs: READMEs, tests, settings of the linters."""

    def make_release_tree(self, base_dir, files):
        built = os.path.join("build", "")  # cythonize puts the made .cpp there
        more = {".ci/run", ".clang-format", ".cython-lint.toml", ".pre-commit-config.yaml", "ruff.toml"}
        for folder in ("backends", "cuda", "epcomm", "include", "tests"):
            more.update(glob.glob(f"{folder}/**/README.md", recursive=True))
        for suffix in ("py", "cpp", "hpp", "cu", "cuh"):
            more.update(glob.glob(f"tests/**/*.{suffix}", recursive=True))
            more.update(glob.glob(f"backends/**/*.{suffix}", recursive=True))  # also of backends not built here
        more.update(path for path in files if not path.startswith(built))
        super().make_release_tree(base_dir, sorted(path for path in more if os.path.isfile(path)))


class BuildExt(build_ext):
    """Extensions side by side, and before them the parts that they share, once."""

    def initialize_options(self):
        super().initialize_options()
        self.parallel = len(os.sched_getaffinity(0))

    def run(self):
        self.run_command("build_clib")
        super().run()


def missing_header(headers):
    """First header the C++ compiler does not find, or None."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    for header in headers:
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "probe.cpp")
            with open(source, "w") as file:
                file.write(f"#include <{header}>\n")
            command = [*compiler, "-fsyntax-only", source]
            if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                return header
    return None


def backend_files(patterns):
    """Files of `backends/` that match a pattern."""
    return sorted(path for pattern in patterns for path in glob.glob(f"backends/{pattern}"))


def extension(module, patterns, libraries=()):
    """The extension of `epcomm/<module>.pyx` with the files of `backends/` that match a pattern."""
    sources = [f"epcomm/{module}.pyx"]
    for pattern in patterns:
        sources += sorted(glob.glob(f"backends/{pattern}"))
    return Extension(
        f"epcomm.{module}",
        sources,
        language="c++",
        include_dirs=["include", "backends"],
        libraries=list(libraries),
        depends=HEADERS + [path for patterns in SHARED.values() for path in backend_files(patterns)],
        extra_compile_args=COMPILE_FLAGS + EXTRA_FLAGS,
        extra_link_args=["-pthread"] + EXTRA_FLAGS,
    )


def backend_extensions():
    """One extension per backend that can be built here; says what it skips and why."""
    wanted = os.environ.get("EPCOMM_BUILD_BACKENDS")
    names = [name.strip() for name in wanted.split(",") if name.strip()] if wanted else None
    unknown = set(names or ()) - {backend.name for backend in REGISTRY}
    if unknown:
        sys.exit(
            f"EPCOMM_BUILD_BACKENDS names unknown backends {sorted(unknown)}; "
            f"known: {[backend.name for backend in REGISTRY]}"
        )
    built = []
    for backend in REGISTRY:
        if backend.pair:
            continue
        if names is not None and backend.name not in names:
            print(f"epcomm: backend {backend.name}: skipped: not in EPCOMM_BUILD_BACKENDS")
            continue
        header = missing_header(backend.headers)
        if header is not None:
            reason = f"epcomm: backend {backend.name}: header <{header}> not found"
            if names is not None:
                sys.exit(reason)
            print(f"{reason}: skipped")
            continue
        print(f"epcomm: backend {backend.name}: built")
        built.append(extension(f"_{backend.name}", [f"{backend.name}/*.cpp"], backend.libraries))
    return built


def faces():
    """Extensions that are not backends: the user's face and the engines."""
    patterns = {
        "_host": ["host/*.cpp"],
        "_rows": ["host/rows*.cpp", "host/layout.cpp"],
        "_measure": ["host/measure.cpp"],
        "_device": ["device/c*.cpp", "device/engine.cpp"],
        "_device_ops": ["device/ops.cpp"],
    }
    backends = {f"_{backend.name}" for backend in REGISTRY}
    modules = sorted(os.path.basename(path)[:-4] for path in glob.glob("epcomm/*.pyx"))
    return [extension(module, patterns.get(module, [])) for module in modules if module not in backends]


def shared_parts():
    """What several extensions are linked from: each takes the objects that it needs."""
    # What is linked later comes first: RDMA parts use common ones.
    names = dict(SHARED)
    headers = {header for backend in REGISTRY if backend.needs_nics for header in backend.headers}
    if missing_header(sorted(headers)) is not None:
        del names["epcomm_rdma"]
    return [
        (
            name,
            {
                "sources": backend_files(patterns),
                "include_dirs": ["include", "backends"],
                "cflags": COMPILE_FLAGS + EXTRA_FLAGS,
                "obj_deps": {"": HEADERS},
            },
        )
        for name, patterns in names.items()
    ]


strict = os.environ.get("EPCOMM_BUILD_STRICT") == "1"
Options.warning_errors = strict
setup(
    cmdclass={"sdist": Sdist, "build_ext": BuildExt},
    libraries=shared_parts(),
    ext_modules=cythonize(
        backend_extensions() + faces(),
        build_dir="build/cython",
        language_level=3,
        nthreads=0,
        compiler_directives={
            "embedsignature": True,
            "binding": True,
            "freethreading_compatible": False,
            "warn.unused": strict,
            "warn.maybe_uninitialized": strict,
        },
    )
)
