"""Which tests run with ``--rxe``: those of this folder, and those of the contract that need nothing but ranks."""

import pytest

from epcomm._registry import BACKENDS

# Left out: programs of their own (launchers, exits, digits, bench), the kernel's counts of memory, torch, and kills
# that the kernel of the same host tells of at once; between nodes only silence tells (`test_faults.py` here).
WHOLE = {
    "test_any_routing.py", "test_async.py", "test_combine.py", "test_deadlines.py", "test_determinism.py",
    "test_dispatch.py", "test_errors.py", "test_field_reports.py", "test_handles.py",
    "test_interrupts.py", "test_kinds.py", "test_leases.py", "test_lifecycle.py", "test_measure.py",
    "test_queries.py", "test_start_failures.py", "test_threads.py",
}  # fmt: skip
# test -> sizes of groups, or parameters, of which the quick selection has those only; () is all of them.
QUICK = {
    "test_layouts_and_routings": ("2ranks2nodes", "4ranks2nodes"),
    "test_experts_and_topk": ("3ranks3nodes",),
    "test_megabytes": (),
    "test_sums": ("float32-2ranks2nodes", "2ranks2nodes-float32", "4ranks4nodes-bfloat16", "bfloat16-4ranks4nodes"),
    "test_backward_identities": ("2ranks2nodes",),
}
# The same for pairs of backends, of which only groups with near and far peers tell more than their far one alone.
QUICK_PAIRS = {"test_layouts_and_routings": ("4ranks2nodes",)}
_PAIRS = {row.name for row in BACKENDS if row.pair}
LIMIT_S = 1200  # of a test; its own deadlines are far shorter
SLOW_LIMIT_S = 7200  # of one that is marked slow


def takes(item, chosen):
    """Whether a test runs; gives it more time than the others have."""
    mark = item.get_closest_marker("rxe")
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    pair = (parameters.get("backend") or parameters.get("host_backend") or ("",))[0] in _PAIRS
    ranks = parameters.get("num_ranks", 0)
    apart = getattr(ranks, "nodes", ranks) == ranks  # all ranks on nodes of their own: nobody is near
    whole = item.path.parent.name == "contract" and item.path.name in WHOLE and "torch" not in item.nodeid
    if mark is not None:
        taken = bool(mark.kwargs.get("pairs")) == pair and (chosen == "all" or bool(mark.kwargs.get("quick")))
    elif not whole or (pair and apart):
        taken = False
    elif chosen == "quick":
        name, _, parameters = item.name.partition("[")
        wanted = (QUICK_PAIRS if pair else QUICK).get(name)
        taken = wanted is not None and (not wanted or any(one in parameters for one in wanted))
    else:
        taken = True
    if taken:
        item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S if item.get_closest_marker("slow") else LIMIT_S))
    return taken
