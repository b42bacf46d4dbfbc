#!/usr/bin/env python3
"""Run a command in a throw-away virtual machine whose nodes have RDMA verbs in software (Soft-RoCE).

    python tests/rxe/vm.py --nodes 2 -- bash -c '
        node0 ibv_rc_pingpong -d rxe0 -g 1 >/dev/null & sleep 1; node1 ibv_rc_pingpong -d rxe1 -g 1 10.77.0.1'

The command sees this machine's files at the same paths; what it writes elsewhere than in --out is gone afterwards.
Exit status: the command's; 124 after --timeout; 125 when the machine failed.
"""

import argparse
import os
import sys

import machine
import supplies


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="each with one rxe device; 2 unless told otherwise")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="for the command, booting not counted")
    parser.add_argument("--out", metavar="FOLDER", help="its files stay, at the same path; $RXE_OUT inside")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="pass a variable on")
    parser.add_argument("--memory", default="4G", help="of the machine")
    parser.add_argument("--prepare", action="store_true", help="install and fetch what is needed, then stop")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    told = parser.parse_args()
    command = told.command[1:] if told.command[:1] == ["--"] else told.command
    if not told.prepare and not command:
        parser.error("no command")
    if not 1 <= told.nodes <= 64:
        parser.error("--nodes: from 1 to 64")

    def say(text):
        if told.verbose:
            print(f"vm: {text}", file=sys.stderr, flush=True)

    environment = {}
    for item in told.env:
        name, given, value = item.partition("=")
        if given or name in os.environ:
            environment[name] = value if given else os.environ[name]
    if told.out:
        os.makedirs(told.out, exist_ok=True)
    try:
        if told.prepare:
            say(f"Linux {supplies.gather(say).release}")
            return 0
        put_out, put_err = machine.copier(sys.stdout), machine.copier(sys.stderr)
        with machine.Machine(command, told.nodes, told.out, environment, memory=told.memory, say=say,
                             put_out=put_out, put_err=put_err) as made:  # fmt: skip
            status = made.wait(told.timeout)
    except (machine.MachineError, supplies.SuppliesError) as error:
        print(f"vm: {error}", file=sys.stderr)
        return 125
    if status is None:
        print(f"vm: ended after {told.timeout:g} s", file=sys.stderr)
        return 124
    return status


if __name__ == "__main__":
    sys.exit(main())
