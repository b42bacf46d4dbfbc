"""``python -m epcomm info``: complete, harmless, and never in the way."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest

import epcomm
from epcomm import _console, _paths, _registry, config

SECRET = "a-secret-that-nobody-may-see"


def run(*arguments, **variables):
    """One command in a fresh process; variables set to None are removed."""
    environment = {**os.environ, **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run([sys.executable, "-m", "epcomm", *arguments], env=environment, capture_output=True,
                          text=True, timeout=60)


@pytest.fixture(scope="module")
def told():
    launchers = {variable.name: None for variable in config.LAUNCHER_VARIABLES}
    done = run("info", "--json", **{**launchers, "LOCAL_RANK": "0"}, EPCOMM_AUTHKEY=SECRET, EPCOMM_PORT="70000",
               EPCOMM_TIMEOUT_S="7", EPCOMM_IB_PRVIDER="soft")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_backend_of_the_registry_is_told(told):
    assert [row["name"] for row in told["backends"]] == [row.name for row in _registry.BACKENDS]


@pytest.mark.parametrize("backend", [row.name for row in _registry.BACKENDS])
def test_a_backend_tells_its_capabilities_or_why_not(told, backend):
    (row,) = [row for row in told["backends"] if row["name"] == backend]
    try:
        importlib.import_module(f"epcomm._{backend}")
    except ImportError as error:
        assert row["state"] == "not built"
        assert row["reason"] == str(error)
    else:
        assert (row["state"] == "available") == (row["reason"] is None)
        assert bool(row["capabilities"]) == (row["state"] == "available")


def test_environment_is_complete_and_bad_values_are_told(told):
    assert list(told["environment"]) == [variable.name for variable in config.VARIABLES] + ["LOCAL_RANK"]
    assert told["environment"]["EPCOMM_TIMEOUT_S"]["value"] == 7
    assert told["environment"]["EPCOMM_TIMEOUT_S"]["set"] is True
    assert told["environment"]["EPCOMM_AUTHKEY"]["set"] is True
    port = told["environment"]["EPCOMM_PORT"]
    assert port["value"] is None
    for word in ("EPCOMM_PORT", "70000", "65535"):
        assert word in port["error"]


def test_misspelt_variables_are_told(told):
    assert list(told["unknown_variables"]) == ["EPCOMM_IB_PRVIDER"]
    assert "EPCOMM_IB_PROVIDER" in told["unknown_variables"]["EPCOMM_IB_PRVIDER"]
    assert "EPCOMM_IB_PROVIDER?" in run("info", "--plan", EPCOMM_IB_PRVIDER="soft").stderr


def test_devices_are_plain_facts(told):
    devices = told["devices"]
    assert devices["cpu_cores"] == len(os.sched_getaffinity(0))
    assert devices["instruction_sets"][-1] == "plain"
    assert 0 < devices["memory_available_bytes"] < 1 << 50
    assert devices["memfd"] is True or devices["memfd"].startswith("no: ")
    assert devices["pidfd"] is True or devices["pidfd"].startswith("no: ")


def test_text_has_the_same_rows(told):
    done = run("info")
    assert done.returncode == 0, done.stderr
    for word in [row.name for row in _registry.BACKENDS] + [v.name for v in config.VARIABLES] + list(told["packages"]):
        assert word in done.stdout


def test_info_imports_no_array_library_beyond_numpy():
    code = ("import sys; from epcomm import _info; _info.collect(); "
            "print([name for name in ('torch', 'cupy', 'mpi4py', 'sklearn', 'matplotlib') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_plain_text_without_rich():
    code = "import sys; sys.modules['rich'] = None; from epcomm.__main__ import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "EPCOMM_TIMEOUT_S" in done.stdout
    assert "┃" not in done.stdout


def test_version():
    done = subprocess.run([sys.executable, "-m", "epcomm", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"epcomm {epcomm.__version__}\n"), done


@pytest.mark.parametrize("arguments", [[], ["bnech"], ["info", "--jsn"]])
def test_a_wrong_command_line_says_what_there_is(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: python -m epcomm" in done.stderr
    assert done.stdout == ""


def test_plain_table_is_aligned():
    text = _console.plain_table("title", ("a", "number"), [("x", "1"), ("longer", "22")], (1,), "end")
    wanted = ["", "title", "a       number", "------  ------", "x            1", "longer      22", "end"]
    assert text.splitlines() == wanted


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_human_bytes(count, text):
    assert _console.human_bytes(count) == text


def test_capability_words_are_those_of_the_header():
    text = (_paths.include_dir() / "epcomm" / "backend.hpp").read_text()
    bits = {int(bit): re.sub("(?<!^)([A-Z])", r"_\1", name).lower()
            for name, bit in re.findall(r"kCap(\w+) = 1u << (\d+)", text)}
    assert dict(enumerate(_registry.CAPABILITIES)) == bits
    assert _registry.capability_names(0b100001) == ["host_put", "host_memory"]
