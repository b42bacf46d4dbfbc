"""Queue pairs between real devices, without any engine above: payloads and order, mixed MTUs (B45), limits (B50)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.native import build

pytestmark = pytest.mark.rxe(quick=True)
VM = Path(__file__).resolve().parent / "vm.py"


@pytest.fixture(scope="module")
def link():
    """The program that is one end of all queue pairs of a rank."""
    return str(build.build("rdma_link"))


def run(script, nodes, link):
    """Output of a script in a machine of its own: it changes what nodes are."""
    options = ["--nodes", str(nodes), "--timeout", "240", "--env", f"LINK={link}"]
    done = subprocess.run([sys.executable, str(VM), *options, "--", "bash", "-c", script],
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def plans(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_all_pairs_of_three_nodes(link):
    """Every payload is whole when its word has come, and nothing is left in the kernel."""
    output = run(
        """
        mkdir /tmp/meet
        for r in 0 1 2; do
            node$r $LINK --paths rxe$r:1:1 --ranks 3 --rank $r --channels 3 --folder /tmp/meet &
            ends="$ends $!"
        done
        for end in $ends; do wait $end || exit 1; done
        for r in 0 1 2; do node$r rdma resource show | grep "rxe$r:"; done
        """, 3, link)
    assert output.count("20 rounds of") == 3, output
    left = [line.split() for line in output.splitlines() if ": rxe" in line]
    assert len(left) >= 3
    for words in left:
        counts = dict(zip(words[2::2], words[3::2], strict=False))
        assert (counts["qp"], counts["mr"], counts["pd"], counts["ctx"]) == ("0", "0", "0", "0"), output


def test_b45_the_smaller_mtu_of_both_ends(link):
    """Ports of 4096 and 1024 bytes: both ends take 1024, and writes of many packets arrive whole."""
    output = run(
        """
        node1 ip link set eth0 mtu 1500
        mkdir /tmp/meet
        node0 $LINK --paths rxe0:1:1 --rank 0 --folder /tmp/meet --plan 1 & end=$!
        node1 $LINK --paths rxe1:1:1 --rank 1 --folder /tmp/meet --plan 1 || exit 1
        wait $end
        """, 2, link)
    made = plans(output)
    assert sorted(plan["paths"][0]["mtu"] for plan in made) == [1024, 4096], output
    assert {row["mtu"] for plan in made for row in plan["rows"]} == {1024}
    assert output.count("20 rounds of") == 2


def test_b50_the_kernel_refuses_to_lock_more(link):
    """Without the right to pass over the limit, registration tells limit, need and remedy, and leaves nothing."""
    output = run(
        """
        node0 setpriv --bounding-set=-ipc_lock prlimit --memlock=262144 \\
            $LINK --paths rxe0:1:1 --rank 0 --folder /tmp && exit 1
        node0 rdma resource show | grep rxe0:
        """, 2, link)
    for part in ("ibv_reg_mr on rxe0", "errno 12", "is 262144 bytes", "4198400 bytes in all", "ulimit -l unlimited"):
        assert part in output, output
    assert "qp 0" in output and "mr 0" in output
