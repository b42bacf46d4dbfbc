"""What one rank of a benchmark does: makes its cases and runs the trial that it is asked for."""

from typing import Any

from epcomm._launch import Place
from epcomm.bench.workload import Shape, Workload


class BenchRank:
    """A worker of :mod:`epcomm._launch` with one or more cases.

    Requests are ``["trial", case]``, answered with seconds by operation, ``["describe"]``, and ``["transport", …]``
    with the arguments of :meth:`epcomm.bench.transport.TransportCase.measure`.
    """

    def __init__(self, place: Place, shape: dict[str, Any], settings: dict[str, Any], cases: list[str]) -> None:
        self._workload = Workload(Shape(**shape), place.rank, place.num_ranks)
        self._place, self._settings = place, settings
        self._cases: dict[str, Any] = {}
        for case in cases:
            self._cases[case] = self._make(case, settings)

    def _make(self, case: str, settings: dict[str, Any]) -> Any:
        # Imported here: a rank pays only for the libraries of its own cases.
        if case in ("epcomm", "floor"):
            from epcomm.bench import cases

            if case == "epcomm":
                return cases.EpcommCase(self._workload, settings)
            return cases.FloorCase(self._cases["epcomm"].comm.barrier, self._workload, settings["threads"])
        from epcomm.bench import baselines

        return {"mpi4py": baselines.MpiCase, "gloo": baselines.GlooCase}[case](self._workload, settings)

    def answer(self, request: list[str]) -> Any:
        if request[0] == "describe":
            return self._cases["epcomm"].describe()
        if request[0] == "transport":
            if "transport" not in self._cases:
                from epcomm.bench import transport

                self._cases["transport"] = transport.TransportCase(self._place, self._settings)
            return self._cases["transport"].measure(*request[1:])
        return self._cases[request[1]].trial()

    def close(self) -> None:
        for case in reversed(self._cases.values()):
            case.close()
