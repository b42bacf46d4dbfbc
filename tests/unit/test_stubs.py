"""Types are told the truth: ``.pyi`` files against what runs, annotations of Python modules, and mypy."""

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import epcomm

PACKAGE = Path(epcomm.__file__).resolve().parent
EXTENSIONS = sorted(path.stem for path in PACKAGE.glob("*.pyx"))
# Public modules, and what their functions return.
MODULES = sorted(
    name
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__main__"
    for name in [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")]
    if "._" not in name or name == "epcomm._results"
)
ANYTHING = object()  # a default that the stub leaves open with `...`


def is_public(name):
    return not name.startswith("_")


# ---- .pyi against the running module


def stub_parameters(node):
    """(name, kind, default) of each parameter of a stub's function; no default is ``inspect.Parameter.empty``."""
    arguments, empty = node.args, inspect.Parameter.empty

    def value(default):
        if default is None:
            return empty
        try:
            return ast.literal_eval(default)
        except ValueError:
            return ANYTHING

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = []
    for argument, default in zip(positional, defaults, strict=True):
        only = argument in arguments.posonlyargs
        kind = inspect.Parameter.POSITIONAL_ONLY if only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        found.append((argument.arg, kind, value(default)))
    if arguments.vararg:
        found.append((arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL, empty))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, inspect.Parameter.KEYWORD_ONLY, value(default)))
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, empty))
    return found


def runtime_parameters(function):
    """The same of a running function; None where nothing tells (slots of extension types)."""
    if isinstance(function, type(object.__init__)):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def compare_function(where, node, function):
    stub, runtime = stub_parameters(node), runtime_parameters(function)
    if runtime is None:
        return []
    kinds = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    if "staticmethod" not in kinds and "classmethod" in kinds:
        stub = stub[1:]
    problems = []
    if [(name, kind) for name, kind, _ in stub] != [(name, kind) for name, kind, _ in runtime]:
        return [f"{where}: the stub has {[s[0] for s in stub]}, the module {[r[0] for r in runtime]}"]
    for (name, _, told), (_, _, real) in zip(stub, runtime, strict=True):
        absent = inspect.Parameter.empty
        if (told is absent) != (real is absent) or (told is not ANYTHING and told is not absent and told != real):
            problems.append(f"{where}: the default of {name} is {told!r} in the stub, {real!r} in the module")
    annotated = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    bare = [a.arg for a in annotated if a.annotation is None and a.arg not in ("self", "cls")]
    problems += [f"{where}: {argument} has no type" for argument in bare]
    if node.returns is None:
        problems.append(f"{where}: the result has no type")
    return problems


def compare_class(where, node, cls):
    problems, told = [], set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            told.add(item.target.id)  # set per object: nothing to look at
        elif isinstance(item, ast.FunctionDef):
            told.add(item.name)
            if not hasattr(cls, item.name):
                problems.append(f"{where}.{item.name}: not in the module")
                continue
            member = inspect.getattr_static(cls, item.name)
            decorators = {getattr(decorator, "id", getattr(decorator, "attr", "")) for decorator in item.decorator_list}
            is_property = isinstance(member, property) or inspect.isgetsetdescriptor(member)
            is_property = is_property or inspect.ismemberdescriptor(member)
            if ("property" in decorators or "setter" in decorators) != is_property:
                problems.append(f"{where}.{item.name}: a property on one side only")
            elif not is_property:
                problems += compare_function(f"{where}.{item.name}", item, getattr(cls, item.name))
    return problems + [f"{where}.{name}: not in the stub" for name in vars(cls) if is_public(name) and name not in told]


def compare_module(name, text, module):
    """What a stub says wrongly about a module, or does not say."""
    problems, told = [], set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            told |= {alias.asname for alias in node.names if alias.asname}
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own, where = node.name, f"{name}.{node.name}"
        elif isinstance(node, ast.AnnAssign):
            own, where = node.target.id, f"{name}.{node.target.id}"
        else:
            continue  # docstring, `if TYPE_CHECKING`, type aliases
        told.add(own)
        if not hasattr(module, own):
            problems.append(f"{where}: not in the module")
        elif isinstance(node, ast.FunctionDef):
            problems += compare_function(where, node, getattr(module, own))
        elif isinstance(node, ast.ClassDef):
            problems += compare_class(where, node, getattr(module, own))
    for own, value in vars(module).items():
        if is_public(own) and own not in told and getattr(value, "__module__", None) == module.__name__:
            problems.append(f"{name}.{own}: not in the stub")
    return problems


@pytest.mark.parametrize("name", EXTENSIONS)
def test_stubs_say_what_extensions_do(name):
    stub = PACKAGE / f"{name}.pyi"
    assert stub.is_file(), f"{name}.pyx has no stub"
    try:
        module = importlib.import_module(f"epcomm.{name}")
    except ImportError as error:
        pytest.skip(f"epcomm.{name}: {error}")
    assert compare_module(name, stub.read_text(encoding="utf-8"), module) == []


def test_every_stub_has_its_extension():
    assert sorted(path.stem for path in PACKAGE.rglob("*.pyi")) == EXTENSIONS


@pytest.mark.parametrize(("change", "words"), [
    (("def two(a: int, *, b: str = 'x') -> None: ...", "def two(a: int, *, c: str = 'x') -> None: ..."), "['a', 'c']"),
    (("b: str = 'x'", "b: str = 'y'"), "default of b is 'y'"),
    (("b: str = 'x'", "b: str"), "default of b"),
    (("a: int, *,", "a: int,"), "the stub has"),
    (("-> None: ...\nclass", ": ...\nclass"), "the result has no type"),
    (("a: int, *", "a, *"), "a has no type"),
    (("def method(self, n: int)", "def method(self)"), "['self', 'n']"),
    (("def method", "def other"), "One.method: not in the stub"),
    (("    @property\n", ""), "a property on one side only"),
    (("LIMIT: int\n", ""), None),
    (("class One", "class Two"), "Two: not in the module"),
])  # fmt: skip
def test_a_wrong_stub_is_found(change, words):
    stub = (
        "LIMIT: int\ndef two(a: int, *, b: str = 'x') -> None: ...\nclass One:\n"
        "    def method(self, n: int) -> int: ...\n    @property\n    def size(self) -> int: ...\n"
    )
    module = type(sys)("probe")
    exec(
        "LIMIT = 3\ndef two(a, *, b='x'): pass\nclass One:\n    def method(self, n): pass\n"
        "    @property\n    def size(self): pass\n",
        vars(module),
    )
    for value in (module.two, module.One):
        value.__module__ = "probe"
    assert compare_module("probe", stub, module) == []
    assert change[0] in stub
    problems = compare_module("probe", stub.replace(*change), module)
    assert any(words in problem for problem in problems) if words else problems == []


# ---- Python modules: annotations


def unannotated(tree):
    """Public functions and methods with a parameter or a result that has no type."""

    def look(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef) and is_public(node.name):
                yield from look(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef) and (is_public(node.name) or node.name == "__init__"):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
                if bare or (node.returns is None and node.name != "__init__"):
                    yield f"{prefix}{node.name}: {', '.join(bare) or 'result'}"

    return list(look(tree.body, ""))


@pytest.mark.parametrize("name", MODULES)
def test_python_modules_are_annotated(name):
    source = PACKAGE.parent / Path(*name.split("."))
    source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    assert unannotated(ast.parse(source.read_text(encoding="utf-8"))) == []


def test_a_missing_annotation_is_found():
    tree = ast.parse("def f(a, b: int) -> int: ...\nclass A:\n    def g(self): ...\n")
    assert unannotated(tree) == ["f: a", "A.g: result"]


def test_public_names_are_what_the_package_says():
    for name in epcomm.__all__:
        assert hasattr(epcomm, name), name
    assert (PACKAGE / "py.typed").is_file()


# ---- mypy

USER = """
import numpy as np
import epcomm

with epcomm.Communicator(num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=16) as comm:
    out = comm.dispatch(np.zeros((3, 8)), np.zeros((3, 2), dtype=np.int64), layout="expert")
    z = comm.combine(out.x, out.handle, exact_order=True)
    rows: int = comm.rank + comm.num_ranks
    reveal_type(out)
    reveal_type(z)
"""


def mypy(*arguments, cwd=PACKAGE.parent):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cwd / ".mypy_cache"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(not (PACKAGE.parent / "setup.cfg").is_file(), reason="not a checkout")
def test_mypy_agrees_with_the_package():
    status, output = mypy("--config-file", "setup.cfg")
    assert status == 0, output


def test_mypy_sees_the_types_a_user_sees(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    wrong = USER.replace('layout="expert"', 'layout="experts"').replace("hidden=8", "width=8")
    (tmp_path / "wrong.py").write_text(wrong)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {PACKAGE.parent}\nfollow_imports = silent\n")
    status, output = mypy("--config-file", "mypy.ini", "user.py", cwd=tmp_path)
    assert status == 0, output
    assert 'Revealed type is "epcomm._results.Dispatched"' in output
    assert 'Revealed type is "epcomm._results.Combined"' in output
    status, output = mypy("--config-file", "mypy.ini", "wrong.py", cwd=tmp_path)
    assert status != 0 and '"layout"' in output and '"width"' in output
