"""`ab` runs through at tiny sizes, on the same backend twice. What it concludes is tested on numbers."""

import json

import pytest

from epcomm.ab import cli

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("ranks", [2, 3])
def test_runs_through(tmp_path, capsys, host_backend, ranks):
    file = tmp_path / "report.json"
    # Five repeats: sides are made three times, the second time in the other order.
    line = f"--a {host_backend} --b {host_backend} --b-env EPCOMM_HOST_ISA=plain --ranks {ranks} --repeat 5 " \
        "--sizes 8,3000 --channels 1,2 --messages 20 --tokens 9 --hidden 40 --experts 5 --topk 2"
    assert cli.main([*line.split(), "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    groups = {row["group"] for row in told["rows"]}
    assert {"put", "put + signal", "message rate", "bandwidth", "calls"} <= groups
    for row in told["rows"]:
        assert len(row["a_values"]) == len(row["b_values"]) == 5
        assert min(row["a_values"] + row["b_values"]) > 0
        assert row["verdict"] is None
    rates = [row for row in told["rows"] if row["group"] == "message rate"]
    assert all(row["a_cpu"]["caller"] > 0 and row["b_cpu"]["caller"] > 0 for row in rates)
    assert told["b"]["environment"]["EPCOMM_HOST_ISA"] == "plain"
    assert "no verdicts: 5 repeat(s)" in capsys.readouterr().out


def test_a_side_that_cannot_run_is_told(capsys):
    assert cli.main(["--a", "shm", "--b", "shm", "--b-env", "EPCOMM_HOST_ISA=abacus", "--repeat", "1"]) == 1
    assert "abacus" in capsys.readouterr().err
