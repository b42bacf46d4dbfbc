"""What the README says is true: its commands, tables and snippets are taken from it, not copied."""

import re
import subprocess
from pathlib import Path

import pytest

from epcomm import _info, _registry

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="not a checkout")


def below(marker):
    """The block of lines that follows ``<!-- marker -->``, up to an empty line."""
    _, _, rest = README.read_text(encoding="utf-8").partition(f"<!-- {marker} -->\n")
    assert rest, f"README has no <!-- {marker} -->"
    return rest.partition("\n\n")[0].strip()


@pytest.mark.parametrize("name", ["run", "test"])
def test_setup_is_one_line_that_a_shell_takes(name):
    fence, *lines, end = below(f"command: {name}").splitlines()
    assert (fence, end) == ("```sh", "```")
    assert len(lines) == 1
    for word in ("apt-get install -y", "python3 -m venv .venv", ".venv/bin/pip install"):
        assert word in lines[0]
    checked = subprocess.run(["bash", "-n", "-c", lines[0]], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


def test_there_are_exactly_two_setup_commands():
    assert re.findall(r"<!-- command: (\w+) -->", README.read_text(encoding="utf-8")) == ["run", "test"]


def test_environment_table_is_made_from_the_rows_of_config():
    wanted = _info.environment_markdown()
    assert below("environment") == wanted, f"put this table into the README:\n\n{wanted}"


def test_backend_table_has_every_backend_and_marks_the_others_as_coming():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in below("backends").splitlines()[2:]]
    known = {row.name for row in _registry.BACKENDS}
    assert known <= {row[0].strip("`") for row in rows}
    for name, *_, state, where in rows:
        if name.strip("`") not in known:
            assert state == "coming" and not where, name
