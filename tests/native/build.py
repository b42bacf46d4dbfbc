"""Builds and runs the native test programs without CMake and without Python bindings.

    python tests/native/build.py                        # every program, plain
    python tests/native/build.py --sanitize thread      # address,undefined the same way
    python tests/native/build.py engine_test -- --over far --seed 7

Objects are kept in build/native/, named by a hash of their source, every header and the flags.
"""

import argparse
import concurrent.futures
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER_FOLDERS = ("include", "backends", "tests/native")
COMMON_FLAGS = ["-std=c++17", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror",
                "-Iinclude", "-Ibackends", "-Itests/native"]
OPTIMISE = {"": ["-O2"], "thread": ["-O1"], "address,undefined": ["-O1", "-fno-sanitize-recover=all"]}

HOST = ["backends/host/*.cpp"]
SHM = ["backends/shm/*.cpp", "backends/common/*.cpp"]
RDMA = ["backends/common/rdma/*.cpp", "backends/common/*.cpp"]
SOFT = ["backends/softhca/*.cpp", "backends/common/rdma/*.cpp", "backends/common/*.cpp"]
IBRC = ["backends/ibrc/*.cpp", *SOFT]
RANKS = ["tests/native/fabric.cpp", "tests/native/scenario.cpp", "tests/native/rank_runner.cpp"]
# Programs that run text of cuda/ (`warp.hpp`).
WARPS = {"quantize_test", "sums_test"}
# Programs that need more than this machine: `tests/rxe` runs them.
ELSEWHERE = {"rdma_link", "put_stress"}
# Program: what it is linked from beside its own source.
PROGRAMS = {
    "heap_test": [],
    "formats_test": [],
    "quantize_test": [],
    "sums_test": [],
    "engine_test": HOST + SHM + RANKS,
    "faults_test": HOST + RANKS,
    "shm_test": SHM,
    "rdma_test": RDMA,
    "rdma_link": RDMA,
    "mlx5_test": [],
    "softhca_test": SOFT,
    "proxy_test": ["backends/ibrc/proxy.cpp", "backends/ibrc/send_queue.cpp"],
    "ibrc_test": IBRC,
    "ibgda_test": ["backends/ibgda/*.cpp", *SOFT],
    "put_stress": IBRC,
}


def compiler():
    return shlex.split(os.environ.get("CXX", "g++"))


def flags(sanitize):
    """Compiler flags; the same for every object of a program."""
    return COMMON_FLAGS + OPTIMISE[sanitize] + ([f"-fsanitize={sanitize}"] if sanitize else [])


def _headers_digest():
    digest = hashlib.sha256()
    for folder in HEADER_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.h*")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def _lay_out_cuda():
    """Folder with the headers of cuda/, those of tests/native/warp instead of their namesakes.

    A quoted name is looked for beside the file that has it before any option counts, so they must lie together.
    """
    texts = {}
    for folder in ("cuda", "tests/native/warp"):
        for path in sorted((ROOT / folder).glob("*.cuh")):
            texts[path.name] = f'#line 1 "{folder}/{path.name}"\n{path.read_text(encoding="utf-8")}'
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:24]
    target = ROOT / "build" / "native" / f"cuda-{digest}"
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if not (target / name).exists():
            with tempfile.TemporaryDirectory(dir=target) as made:
                (Path(made) / name).write_text(text, encoding="utf-8")
                os.replace(Path(made) / name, target / name)
    return target.relative_to(ROOT)


def _sources(program):
    found = [f"tests/native/{program}.cpp"]
    for pattern in PROGRAMS[program]:
        found += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
    return found


def _make(target, command):
    """Run a compiler command whose output is `target`, which appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made"
        done = subprocess.run([*command, "-o", str(made)], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        os.replace(made, target)


def build(program, sanitize=""):
    """Path of the program, built if anything changed."""
    options = flags(sanitize)
    if program in WARPS:
        options = [*options, f"-I{_lay_out_cuda()}", "-Wno-unknown-pragmas"]  # unroll
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    base = hashlib.sha256(_headers_digest() + repr((compiler(), version, options)).encode())
    folder = ROOT / "build" / "native"

    def compile_one(source):
        digest = base.copy()
        digest.update(source.encode() + b"\0" + (ROOT / source).read_bytes())
        target = folder / f"{Path(source).stem}-{digest.hexdigest()[:24]}.o"
        if not target.exists():
            _make(target, [*compiler(), *options, "-c", source])
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, _sources(program)))
    digest = hashlib.sha256("\0".join(path.name for path in objects).encode()).hexdigest()[:24]
    target = folder / f"{program}-{digest}"
    if not target.exists():
        _make(target, [*compiler(), *options, *map(str, objects)])
    return target


def missing_sanitizer(sanitize):
    """Why programs cannot be built or run with a sanitizer here, or None."""
    if not sanitize:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("int main() { return 0; }\n")
        probe = Path(folder) / "probe"
        for command in ([*compiler(), f"-fsanitize={sanitize}", str(source), "-o", str(probe)], [str(probe)]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
                return f"-fsanitize={sanitize}: {lines[-1]}"
    return None


def environment():
    """Environment of a run: a sanitizer's finding ends the program."""
    return {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="program", help=f"of {', '.join(PROGRAMS)}; default all")
    parser.add_argument("--sanitize", default="", choices=list(OPTIMISE))
    parser.add_argument("--build-only", action="store_true")
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:split])
    for program in arguments.programs or [name for name in PROGRAMS if name not in ELSEWHERE]:
        path = build(program, arguments.sanitize)
        print(f"== {program} {arguments.sanitize}: {path.relative_to(ROOT)}", flush=True)
        if not arguments.build_only:
            status = subprocess.run([str(path), *argv[split + 1:]], cwd=ROOT, env=environment()).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
