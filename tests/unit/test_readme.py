"""What the README says is true: its commands, tables and snippets are taken from it, not copied."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import epcomm
from epcomm import _info, _registry, config, errors

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8") if README.exists() else ""
pytestmark = pytest.mark.skipif(not TEXT, reason="not a checkout")


def below(marker):
    """The lines that follow ``<!-- marker -->``: a code block without its fence, or up to an empty line."""
    _, _, rest = TEXT.partition(f"<!-- {marker} -->\n")
    assert rest, f"README has no <!-- {marker} -->"
    if rest.startswith("```"):
        return rest.partition("\n")[2].partition("\n```")[0]
    return rest.partition("\n\n")[0].strip()


def table(marker):
    """Cells of the rows of a table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in below(marker).splitlines()[2:]]


def environment(**variables):
    """This process's variables without any launcher's, with the tests' interpreter first on the path."""
    launchers = {variable.name for variable in config.LAUNCHER_VARIABLES}
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    kept["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", "")])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | as_root | {"OMPI_MCA_rmaps_base_oversubscribe": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- setting up


@pytest.mark.parametrize("name", ["run", "test"])
def test_setup_is_one_line_that_a_shell_takes(name):
    lines = below(f"command: {name}").splitlines()
    assert len(lines) == 1
    for word in ("apt-get install -y", "python3 -m venv .venv", ".venv/bin/pip install"):
        assert word in lines[0]
    checked = subprocess.run(["bash", "-n", "-c", lines[0]], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


def test_there_are_exactly_two_setup_commands():
    assert re.findall(r"<!-- command: (\w+) -->", TEXT) == ["run", "test"]


# ---- snippets

SNIPPETS = {name: list(map(int, ranks.split())) for name, ranks in
            re.findall(r"<!-- snippet: (\w+), ranks ([\d ]+) -->\n```python\n", TEXT)}
COMING = re.findall(r"<!-- snippet: (\w+), coming -->\n```python\n", TEXT)
SHELL = re.findall(r"<!-- shell(?:: (\w+))? -->\n```sh\n", TEXT)


def snippet(name):
    (marker,) = re.findall(rf"<!-- (snippet: {name}, [\w ]+) -->", TEXT)
    return below(marker)


def test_no_block_of_code_goes_unchecked():
    assert TEXT.count("```python\n") == len(SNIPPETS) + len(COMING)
    assert TEXT.count("```sh\n") == 2 + len(SHELL)
    assert len(re.findall(r"^```", TEXT, re.M)) == 2 * (TEXT.count("```python\n") + TEXT.count("```sh\n"))


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, sizes in SNIPPETS.items() for ranks in sizes])
def test_snippet_runs(tmp_path, name, ranks):
    for module in re.findall(r"^import (torch|cupy)$", snippet(name), re.M):
        pytest.importorskip(module)
    port = str(free_port())
    code = re.sub(r'MASTER_PORT="\d+"', f'MASTER_PORT="{port}"', snippet(name))
    assert len(code.splitlines()) <= 25
    (tmp_path / "example.py").write_text(code)
    started = []
    for rank in range(ranks):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(subprocess.Popen([sys.executable, "example.py"], cwd=tmp_path, text=True,
                                        env=environment(**(variables if ranks > 1 else {})),
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        for rank, process in enumerate(started):
            out, _ = process.communicate(timeout=100)
            assert process.returncode == 0, out
            assert f"rank {rank}" in out
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", COMING)
def test_what_is_coming_is_said_to_be_and_is_python(name):
    heading = TEXT[: TEXT.index(f"<!-- snippet: {name}, coming -->")].rpartition("\n## ")[2]
    assert "coming" in heading.partition("\n")[0]
    compile(snippet(name), name, "exec")


def shell_lines():
    for marker in re.findall(r"<!-- (shell(?:: \w+)?) -->\n", TEXT):
        yield from ((marker, line) for line in below(marker).splitlines())


@pytest.mark.parametrize(("marker", "line"), list(shell_lines()))
def test_shell_line_runs(tmp_path, marker, line):
    tool = line.split()[0]
    if tool in ("torchrun", "mpirun"):
        pytest.importorskip({"torchrun": "torch", "mpirun": "mpi4py"}[tool])
        if shutil.which(tool, path=environment()["PATH"]) is None:
            pytest.skip(f"no {tool}")
    if "--plot" in line:
        pytest.importorskip("matplotlib")
    if "examples.digits" in line:
        pytest.importorskip("sklearn")
    if "EPCOMM_IB_PROVIDER" in line and importlib.util.find_spec("epcomm._ibrc") is None:
        pytest.skip("built without <infiniband/verbs.h>")
    if "--train" in line:
        pytest.importorskip("torch")
    _, _, example = marker.partition(": ")
    if example in SNIPPETS:
        (tmp_path / "example.py").write_text(snippet(example))
    line = re.sub(r"MASTER_PORT=\d+", f"MASTER_PORT={free_port()}", line)
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    if example in SNIPPETS:
        ranks = int(re.search(r"(?:-n|--nproc-per-node|WORLD_SIZE=) ?(\d+)", line).group(1))
        assert len(re.findall(rf"rank \d of {ranks}: ", done.stdout)) == ranks, done.stdout


# ---- tables


def test_environment_table_is_made_from_the_rows_of_config():
    wanted = _info.environment_markdown()
    assert below("environment") == wanted, f"put this table into the README:\n\n{wanted}"


def test_backend_table_has_every_backend_and_marks_the_others_as_coming():
    known = {row.name for row in _registry.BACKENDS}
    told = {row[0].strip("`"): row for row in table("backends")}
    assert known <= set(told)
    for name, (*_, state, where) in told.items():
        assert (state == "here") == (name in known), name
        assert bool(where) == (name in known), name


def test_error_table_has_every_error_with_its_builtin_base():
    rows = {row[0].strip("`"): row for row in table("errors")}
    wanted = {name: value for name, value in vars(errors).items()
              if isinstance(value, type) and issubclass(value, errors.EpcommError) and value is not errors.EpcommError}
    assert set(rows) == set(wanted)
    for name, error in wanted.items():
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__ if base is not errors.EpcommError)
        assert rows[name][1] == bases, name
        assert hasattr(epcomm, name)


def test_the_version_has_its_changes():
    assert f"### {epcomm.__version__}" in TEXT.partition("\n## Changes\n")[2]
