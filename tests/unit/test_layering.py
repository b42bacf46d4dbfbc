"""Arrows point down: who may include, import, name and read what. Each rule is also shown a violation."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"host", "device"}  # folders of backends/ that are engines; the others lie below them
# What ranks say to each other, where it lies and what is done with it; all other headers know bytes only.
ENGINE_HEADERS = {"heap.h", "entry.h", "agreement.hpp", "engine.h", "layout.h", "permute.h", "cast.h"}
ON_NICS = {"ibrc", "ibgda"}  # they may ask for the software HCA
BACKEND_WORDS = {"shm", "nvlink", "ibrc", "ibgda"}
MOE_WORDS = {"token", "tokens", "expert", "experts", "combine", "combines", "combined", "dispatch", "dispatches",
             "dispatched", "topk", "moe"}  # fmt: skip
CPP = {".h", ".hpp", ".cpp", ".cuh", ".cu"}
README_LINES = 60


def files(root, folder, suffixes):
    """Source files below a folder, without what builds leave there."""
    found = [path for path in (root / folder).rglob("*") if path.suffix in suffixes and path.is_file()]
    return sorted(path for path in found if "build" not in path.relative_to(root).parts)


def where(root, path, line):
    return f"{path.relative_to(root).as_posix()}:{line}"


def lines_of(path):
    return enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


def words_in(text):
    """Words of identifiers: parts of snake_case and CamelCase, in lower case."""
    for name in re.findall(r"[A-Za-z][A-Za-z0-9]*", text.replace("_", " ")):
        yield from (word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name))
        yield name.lower()


def is_below_engines(root, path):
    parts = path.relative_to(root).parts
    if parts[0] == "backends":
        return len(parts) > 2 and parts[1] not in ENGINES
    if parts[:2] == ("include", "epcomm"):
        return path.name not in ENGINE_HEADERS
    return parts[0] == "epcomm" and path.suffix == ".pyx" and path.stem.lstrip("_") in backend_names(root)


def backend_names(root):
    """First arguments of the registry's rows."""
    tree = ast.parse((root / "epcomm" / "_registry.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", "") == "Backend"}


# Each check returns its violations as "file:line: what".


def check_includes(root):
    """include/ sees itself; backends/common sees include; backends/W sees include, common and itself.

    The host engine needs nothing of common; the device engine launches through its driver table.
    """
    problems = []
    for path in files(root, "include", CPP) + files(root, "backends", CPP):
        parts = path.relative_to(root).parts
        own = parts[1] if parts[0] == "backends" else None
        allowed = {"epcomm"} if own is None else {"epcomm", own} | (set() if own == "host" else {"common"})
        allowed |= {"softhca"} if own in ON_NICS else set()
        for number, line in lines_of(path):
            match = re.match(r'\s*#\s*include\s*["<]([^">]+)[">]', line)
            if not match:
                continue
            target = match.group(1)
            if '"' in line and target.split("/")[0] not in allowed:
                problems.append(f"{where(root, path, number)}: includes {target}; allowed: {sorted(allowed)}")
            if target == "Python.h" or target.startswith("numpy/"):
                problems.append(f"{where(root, path, number)}: C++ includes {target}")
            if own and own not in ENGINES and target in {f"epcomm/{name}" for name in ENGINE_HEADERS}:
                problems.append(f"{where(root, path, number)}: what bytes mean is the engines' business: {target}")
    return problems


def check_pyx(root):
    """A .pyx cimports _cpp.pxd and its siblings' .pxd; only backend W's .pyx names headers of backends/W."""
    problems = []
    siblings = {path.stem for path in (root / "epcomm").glob("*.pxd")}
    for path in files(root, "epcomm", {".pyx", ".pxd"}):
        own = path.stem.lstrip("_")
        folders = {"epcomm", own} if own in backend_names(root) else {"epcomm"} | ENGINES
        if own == "pair":  # joins any two backends
            folders = {"epcomm", "common"}
        if own == "rdma":  # what the faces of backends on NICs share
            folders = {"common", "softhca"}
        for number, line in lines_of(path):
            match = re.match(r"\s*(?:from\s+([\w.]+)\s+)?cimport\s+(.+)", line)
            if match:
                module = match.group(1) or match.group(2).split()[0]
                names = [module]
                if module == "epcomm":
                    names = [f"epcomm.{name.split()[0]}" for name in match.group(2).split(",")]
                for name in names:
                    top, _, rest = name.partition(".")
                    if top == "epcomm" and rest not in siblings:
                        problems.append(f"{where(root, path, number)}: cimports {name}, which is no .pxd beside it")
                    if top not in {"epcomm", "cpython", "cython", "libc", "libcpp", "posix", "numpy"}:
                        problems.append(f"{where(root, path, number)}: cimports {name}")
            match = re.search(r'cdef\s+extern\s+from\s+"([^"]+)/[^"]+"', line)
            if match and match.group(1).split("/")[0] not in folders:
                problems.append(f"{where(root, path, number)}: declares {match.group(1)}/; allowed: {sorted(folders)}")
    return problems


def check_compiler(root):
    """Only kernels.py names CuPy's compiler."""
    pattern = re.compile(r"cuda\.nvrtc|cuda\.compiler|\bRaw(Module|Kernel)\b|ElementwiseKernel|rawkernel")
    return [
        f"{where(root, path, number)}: {line.strip()}"
        for path in files(root, "epcomm", {".py", ".pyx", ".pxd"})
        if path.relative_to(root).as_posix() != "epcomm/kernels.py"
        for number, line in lines_of(path)
        if pattern.search(line)
    ]


def check_registry(root):
    """Only _registry.py lists backends, and nobody imports one by its name."""
    known = BACKEND_WORDS | backend_names(root)
    one = "|".join(sorted(known))
    listed = re.compile(rf"""["']({one})["']\s*[:,].*["']({one})["']""")
    imported = re.compile(rf"^\s*(from\s+epcomm\s+import\s+.*\b_({one})\b|(from|import)\s+epcomm\._({one})\b)")
    problems = []
    for path in [*files(root, "epcomm", {".py", ".pyx"}), root / "setup.py"]:
        if path.name == "_registry.py" or not path.is_file():
            continue
        if path.suffix == ".py" and "_" in path.stem.lstrip("_") and path.stem.lstrip("_") in backend_names(root):
            continue  # a pair names its halves
        for number, line in lines_of(path):
            if listed.search(line):
                problems.append(f"{where(root, path, number)}: lists backends: {line.strip()}")
            if imported.search(line):
                problems.append(f"{where(root, path, number)}: imports a backend by name: {line.strip()}")
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                items = getattr(node, "elts", None) or getattr(node, "keys", None) or []
                names = {item.value for item in items if isinstance(item, ast.Constant)} & known
                if len(names) > 1:
                    problems.append(f"{where(root, path, node.lineno)}: lists backends: {sorted(names)}")
    return problems


def check_words(root):
    """No MoE word below the engines: backends know bytes, not what they are for."""
    problems = []
    for path in files(root, "include", CPP) + files(root, "backends", CPP) + files(root, "epcomm", {".pyx"}):
        if not is_below_engines(root, path):
            continue
        for number, line in lines_of(path):
            for word in sorted(set(words_in(line)) & MOE_WORDS):
                problems.append(f"{where(root, path, number)}: '{word}' below the engines")
    return problems


def check_environment(root):
    """The environment is read in config.py and by what makes ranks meet or starts them, and nowhere in C++."""
    allowed = {"epcomm/config.py", "epcomm/_launch.py"}
    problems = []
    for path in files(root, "epcomm", {".py", ".pyx"}) + files(root, "backends", CPP) + files(root, "include", CPP):
        name = path.relative_to(root).as_posix()
        if name in allowed or name.startswith("epcomm/_bootstrap/"):
            continue
        for number, line in lines_of(path):
            if re.search(r"\bos\.environ\b|\bimport\b.*\benviron\b|\bgetenvb?\s*\(", line):
                problems.append(f"{where(root, path, number)}: reads the environment: {line.strip()}")
    return problems


def check_readmes(root):
    """Each folder that holds sources has a README of one screen."""
    problems = []
    folders = set()
    for top in ("epcomm", "backends", "include", "cuda", "tests"):
        for path in files(root, top, CPP | {".py", ".pyx"}):
            folders |= {path.parent, *(p for p in path.parents if p.is_relative_to(root / top))}
    for folder in sorted(folders - {root / "include"}):
        readme = folder / "README.md"
        if not readme.is_file():
            problems.append(f"{folder.relative_to(root).as_posix()}: no README.md")
        elif len(readme.read_text(encoding="utf-8").splitlines()) > README_LINES:
            problems.append(f"{readme.relative_to(root).as_posix()}: longer than {README_LINES} lines")
    return problems


CHECKS = [check_includes, check_pyx, check_compiler, check_registry, check_words, check_environment, check_readmes]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_layers(check):
    assert check(ROOT) == []


# A small tree that keeps the rules, and what breaks each of them.

TREE = {
    "setup.py": "",
    "epcomm/README.md": "x\n",
    "epcomm/_registry.py": 'BACKENDS = (Backend("shm", "a"), Backend("ibrc", "b"))\n',
    "epcomm/_cpp.pxd": 'cdef extern from "epcomm/status.hpp" nogil:\n    pass\n',
    "epcomm/_shm.pyx": 'from epcomm._cpp cimport check\ncdef extern from "shm/factory.hpp" nogil:\n    pass\n',
    "epcomm/_host.pyx": 'from epcomm cimport _cpp\ncdef extern from "host/engine.hpp" nogil:\n    pass\n',
    "epcomm/config.py": "import os\nos.environ.get('EPCOMM_LOG')\n",
    "epcomm/kernels.py": "from cupy.cuda import nvrtc\nRawModule\n",
    "include/epcomm/README.md": "x\n",
    "include/epcomm/heap.h": "int num_tokens;  // and experts\n",
    "include/epcomm/backend.hpp": '#include "epcomm/status.hpp"\n#include <vector>\n',
    "backends/README.md": "x\n",
    "backends/common/README.md": "x\n",
    "backends/common/wait.hpp": '#include "epcomm/backend.hpp"\n',
    "backends/shm/README.md": "x\n",
    "backends/shm/backend.cpp": '#include "common/wait.hpp"\n#include "shm/factory.hpp"\n// recombine, tokenise\n',
    "backends/host/README.md": "x\n",
    "backends/host/engine.cpp": '#include "epcomm/heap.h"\n#include "host/engine.hpp"\nint num_experts;\n',
}


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_small_tree_keeps_the_rules(tree):
    assert [problem for check in CHECKS for problem in check(tree)] == []


@pytest.mark.parametrize(("check", "name", "text"), [
    (check_includes, "include/epcomm/backend.hpp", '#include "common/wait.hpp"\n'),
    (check_includes, "backends/common/wait.hpp", '#include "shm/factory.hpp"\n'),
    (check_includes, "backends/shm/backend.cpp", '#include "host/engine.hpp"\n'),
    (check_includes, "backends/shm/backend.cpp", '#include "epcomm/entry.h"\n'),
    (check_includes, "backends/host/engine.cpp", '#include "common/wait.hpp"\n'),
    (check_includes, "backends/ibrc/backend.cpp", '  #  include "shm/factory.hpp"\n'),
    (check_includes, "backends/shm/backend.cpp", '#include "softhca/provider.hpp"\n'),
    (check_includes, "backends/softhca/port.cpp", '#include "ibrc/factory.hpp"\n'),
    (check_includes, "backends/host/engine.cpp", "#include <Python.h>\n"),
    (check_pyx, "epcomm/_shm.pyx", 'cdef extern from "host/engine.hpp" nogil:\n'),
    (check_pyx, "epcomm/_shm.pyx", 'cdef extern from "common/wait.hpp" namespace "x" nogil:\n'),
    (check_pyx, "epcomm/_host.pyx", 'cdef extern from "shm/factory.hpp" nogil:\n'),
    (check_pyx, "epcomm/_rdma.pxd", 'cdef extern from "ibrc/factory.hpp" nogil:\n'),
    (check_pyx, "epcomm/_host.pyx", "from epcomm._results cimport Combined\n"),
    (check_pyx, "epcomm/_host.pyx", "from epcomm cimport _cpp, _results\n"),
    (check_compiler, "epcomm/_host.pyx", "from cupy.cuda.nvrtc import createProgram\n"),
    (check_compiler, "epcomm/_create.py", "cupy.RawModule(code=text)\n"),
    (check_registry, "epcomm/_create.py", 'ORDER = ["nvlink", "shm"]\n'),
    (check_registry, "epcomm/_create.py", 'TABLE = {\n    "shm": 1,\n    "ibgda": 2,\n}\n'),
    (check_registry, "setup.py", "NAMES = ('shm', 'ibrc')\n"),
    (check_registry, "epcomm/_create.py", "from epcomm import _paths, _shm\n"),
    (check_registry, "epcomm/_host.pyx", "import epcomm._ibrc\n"),
    (check_words, "backends/shm/backend.cpp", "int num_tokens;\n"),
    (check_words, "backends/common/wait.hpp", "struct TopkIdx;\n"),
    (check_words, "backends/common/wait.hpp", "struct ExpertRow;\n"),
    (check_words, "include/epcomm/device/shm.cuh", "// for combine\n"),
    (check_words, "epcomm/_shm.pyx", "def dispatch(): pass\n"),
    (check_environment, "epcomm/_create.py", "import os\nos.environ['EPCOMM_LOG']\n"),
    (check_environment, "epcomm/_host.pyx", "from os import environ\n"),
    (check_environment, "epcomm/_create.py", "import os\nos.getenv('EPCOMM_LOG')\n"),
    (check_environment, "backends/shm/backend.cpp", 'std::getenv("EPCOMM_SHM_DIR");\n'),
    (check_readmes, "backends/ibrc/backend.cpp", "\n"),
    (check_readmes, "backends/shm/README.md", "x\n" * 61),
])  # fmt: skip
def test_a_planted_violation_is_found(tree, check, name, text):
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TREE.get(name, "") + text if check is not check_readmes else text)
    if name.startswith("backends/ibrc") and check is not check_readmes:
        (path.parent / "README.md").write_text("x\n")
    problems = check(tree)
    assert problems and all(problem.startswith((name, str(Path(name).parent))) for problem in problems)
    others = [problem for other in CHECKS if other is not check for problem in other(tree)]
    assert not [problem for problem in others if not problem.endswith("no README.md")]
