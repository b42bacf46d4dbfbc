"""Which tests run with ``--rxe``: those of this folder, and those of the contract that need nothing but ranks."""

import pytest

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
LIMIT_S = 1200  # of a test; its own deadlines are far shorter


def takes(item, chosen):
    """Whether a test runs; gives it more time than the others have."""
    mark = item.get_closest_marker("rxe")
    if mark is not None:
        taken = chosen == "all" or bool(mark.kwargs.get("quick"))
    elif item.path.parent.name != "contract" or item.path.name not in WHOLE or "torch" in item.nodeid:
        taken = False
    elif chosen == "quick":
        name, _, parameters = item.name.partition("[")
        wanted = QUICK.get(name)
        taken = wanted is not None and (not wanted or any(one in parameters for one in wanted))
    else:
        taken = True
    if taken:
        item.add_marker(pytest.mark.timeout(LIMIT_S))
    return taken
