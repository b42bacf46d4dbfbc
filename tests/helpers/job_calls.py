"""Functions that the ranks of a `job` run: make a communicator, call it in every way, check what comes, close it."""

import os
import re
import time

import numpy as np

SHAPE = {"num_experts": 6, "num_topk": 2, "hidden": 64, "max_tokens_per_rank": 64, "dtype": "float32"}
TOKENS = 24


def create(here, **kwargs):
    """A communicator, kept as ``here.state["comm"]``."""
    here.comm(**{**SHAPE, **kwargs})


def close(here):
    """Close and forget it."""
    here.state.pop("comm").close()


def inputs(rank, tokens=TOKENS):
    """Rows that tell rank and token apart, and ids that reach every rank of up to six."""
    x = np.arange(tokens, dtype=np.float32)[:, None] + np.float32(100 * (rank + 1))
    x = np.repeat(x, SHAPE["hidden"], axis=1)
    idx = (np.arange(2 * tokens).reshape(tokens, 2) + rank) % SHAPE["num_experts"]
    return x, idx


def owners(num_ranks):
    """Owner of each expert, as the default has it."""
    few, more = divmod(SHAPE["num_experts"], num_ranks)
    return np.array([rank for rank in range(num_ranks) for _ in range(few + (rank < more))])


# name -> (layout, options of dispatch, options of combine, where the rows to combine lie)
WAYS = {
    "rank, zero copy": ("rank", {}, {}, "leased"),
    "rank, copied": ("rank", {"copy": True}, {}, "own"),
    "expert": ("expert", {}, {}, "own"),
    "expert, combine_buffer": ("expert", {"copy": True}, {}, "buffer"),
    "expert, exact order": ("expert", {}, {"exact_order": True}, "own"),
    "rank, async": ("rank", {"async_op": True}, {"async_op": True}, "leased"),
    "expert, async": ("expert", {"async_op": True}, {"async_op": True}, "own"),
}


def round_trip(here, way, comm=None):
    """One dispatch and one combine, checked; raises AssertionError where the rows are wrong."""
    comm = comm or here.state["comm"]
    layout, dispatch_options, combine_options, source = WAYS[way]
    x, idx = inputs(here.rank)
    out = comm.dispatch(x, idx, layout=layout, **dispatch_options)
    if out.event is not None:
        out.event.wait()
    y = out.x
    if source == "own":
        y = np.array(out.x)
    elif source == "buffer":
        y = comm.combine_buffer(out.handle)
        y[...] = out.x
    z = comm.combine(y, out.handle, **combine_options)
    if z.event is not None:
        z.event.wait()
    times = 2
    if layout == "rank":
        of = owners(here.num_ranks)[idx]
        times = 1 + (of[:, :1] != of[:, 1:])
    np.testing.assert_array_equal(z.x, x * times)
    return out


def loop(here, way, tell=True):
    """Calls until one raises."""
    if tell:
        here.tell()
    while True:
        if way == "barrier":
            here.state["comm"].barrier()
        else:
            round_trip(here, way)


def once(here, way):
    """One round trip."""
    round_trip(here, way)


class _Stalled:
    """An engine whose method tells the test and then waits for its word."""

    def __init__(self, here, engine, method):
        self._here = here
        self._engine = engine
        self._method = method

    def __getattr__(self, name):
        if name == self._method:
            self._method = None
            self._here.tell()
            self._here.wait()
        return getattr(self._engine, name)


def stall_inside(here, method="dispatch_finish", way="expert"):
    """Stop between the halves of a call: the entry is out, the rows are not. ``job.go(rank)`` lets it go on."""
    comm = here.state["comm"]
    comm._engine = _Stalled(here, comm._engine, method)
    round_trip(here, way)


def failures_of_later_calls(here):
    """What each call of a broken communicator raises, with its seconds."""
    from helpers.job import failure_of

    comm = here.state["comm"]
    x, idx = inputs(here.rank)
    found = {}
    calls = {
        "dispatch": lambda: comm.dispatch(x, idx),
        "async dispatch": lambda: comm.dispatch(x, idx, async_op=True),
        "refused dispatch": lambda: comm.dispatch(x, idx, layout="no such layout"),
        "combine": lambda: comm.combine(x, here.state["handle"]),
        "barrier": comm.barrier,
        "check": comm.check,
    }
    for name, call in calls.items():
        if name == "combine" and "handle" not in here.state:
            continue
        start = time.monotonic()
        try:
            call()
            found[name] = None
        except Exception as error:
            found[name] = (failure_of(error), time.monotonic() - start)
    return found


def what_is_left(here=None):
    """Mappings of segments, descriptors of shared memory and sockets, threads of ours: all zero after a close."""
    with open("/proc/self/maps") as file:
        mappings = sum(re.search(r"memfd:epcomm|/epcomm-\d+-", line) is not None for line in file)
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    files = sum(re.search(r"memfd:epcomm|/epcomm-\d+-|pidfd|eventfd", target) is not None for target in targets)
    # A thread that was joined stays listed for a moment: the kernel wakes whoever joins before it takes the task away.
    until = time.monotonic() + 0.5
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(0.005)
    return {"mappings": mappings, "files": files, "all_files": len(targets), "threads": threads}
