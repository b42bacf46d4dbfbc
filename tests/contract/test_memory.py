"""What a communicator takes: `required_bytes` against arithmetic and the kernel's counts; lock limits (B50)."""

import os
import resource
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from helpers import job_calls
from helpers.job_calls import WAYS, close, create, once

import epcomm
from epcomm import Communicator, InvalidArgumentError, OutOfMemoryError

BASE = {"num_ranks": 4, "num_experts": 256, "num_topk": 8, "hidden": 7168, "max_tokens_per_rank": 4096}

# ------------------------------------------------------------------------------------------- required_bytes


def up(value, to):
    return -(-value // to) * to


def by_hand(
    *,
    num_ranks,
    num_experts,
    num_topk,
    hidden,
    max_tokens_per_rank,
    max_recv_tokens=None,
    num_slots=2,
    itemsize=2,
    channels=1,
):
    """Control and slot bytes from the words of `include/epcomm/heap.h`, in integers without a size."""
    row = up(hidden * itemsize, 16)
    scale = max(64, up(4 * -(-hidden // 128), 16))
    local = -(-num_experts // num_ranks)
    recv = num_ranks * max_tokens_per_rank if max_recv_tokens is None else max_recv_tokens
    rows = max(recv, max_tokens_per_rank * min(num_ranks, num_topk), num_topk)
    words = 3 + channels + (num_slots + 1)  # state, entry, done, data per channel, credit per slot
    record = up(256 + 640 + 8 * num_ranks + 8 * local, 64)
    control = up(num_ranks * (64 * words + 2 * record), 4096)
    slot = up(rows * (row + scale) + 64, 64)
    slot = up(slot + rows * num_topk * 4, 64)
    slot = up(slot + rows * num_topk * 4, 64)
    return control, (num_slots + 1) * up(slot + rows * 4, 4096)


SIZES = [
    {},
    {"num_ranks": 1},
    {"num_ranks": 7, "num_experts": 13},
    {"num_ranks": 3, "hidden": 1, "num_topk": 1},
    {"hidden": 7169, "num_slots": 5},
    {"max_tokens_per_rank": 1},
    {"max_recv_tokens": 1},
    {"max_recv_tokens": 100_000},
    {"max_tokens_per_rank": 2**20},  # rows alone pass 2^33 bytes
    {"num_ranks": 64, "max_tokens_per_rank": 2**21},
    {"max_recv_tokens": 2**31 - 1, "max_tokens_per_rank": 2**31 - 1, "hidden": 128, "num_topk": 1, "num_experts": 4},
    {"num_ranks": 65536, "num_experts": 65536, "max_tokens_per_rank": 65536, "hidden": 64},
    {"hidden": 2**31 - 1, "max_tokens_per_rank": 8, "num_topk": 2},
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: ",".join(f"{k}={v}" for k, v in size.items()) or "base")
def test_required_bytes_are_exact(size):
    wanted = {**BASE, **size}
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = Communicator.required_bytes(**wanted, num_channels=1)
    assert time.monotonic() - start < 1.0 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 65536
    assert all(type(value) is int for value in parts.values())
    assert (parts["control"], parts["slots"]) == by_hand(**wanted)
    assert parts["total"] == sum(value for name, value in parts.items() if name != "total")
    # One handle: ids and weights of every token and of every received row, and which row is whose.
    tokens, topk, ranks = wanted["max_tokens_per_rank"], wanted["num_topk"], wanted["num_ranks"]
    recv = wanted.get("max_recv_tokens", ranks * tokens)
    assert parts["routing"] >= 8 * topk * tokens + 8 * topk * recv


def test_ids_of_a_row_fit_in_staging():
    """Over NICs the ids of one row are put in one piece."""
    size = {"num_experts": 2**20, "num_topk": 2**20, "hidden": 1, "max_tokens_per_rank": 1}
    parts = Communicator.required_bytes(**size, num_ranks=8, num_channels=1, backend="ibrc")
    assert parts["staging"] >= 4 * 2**20


def test_sizes_above_32_bits_are_there():
    """The table above does pass the borders it is about."""
    totals = [Communicator.required_bytes(**{**BASE, **size})["total"] for size in SIZES]
    assert any(2**31 < total < 2**33 for total in totals) and sum(total > 2**33 for total in totals) >= 4


@pytest.mark.parametrize(
    "name, values",
    [
        ("num_ranks", [1, 2, 3, 4, 8, 64, 1000]),
        ("num_experts", [8, 9, 255, 256, 1000, 100_000]),
        ("num_topk", [1, 2, 8, 32, 256]),
        ("hidden", [1, 7, 8, 64, 7168, 7169, 2**20, 2**31 - 1]),
        ("max_tokens_per_rank", [1, 2, 4096, 2**20, 2**31 - 1]),
        ("max_recv_tokens", [1, 4096, 2**20, 2**31 - 1]),
        ("num_slots", [1, 2, 3, 64]),
        ("num_channels", [1, 2, 16, 256]),
        ("dtype", ["uint8", "bfloat16", "float32"]),
    ],
)
def test_required_bytes_grow_with_every_argument(name, values):
    totals = [Communicator.required_bytes(**{**BASE, "hidden": 64, name: value})["total"] for value in values]
    assert totals == sorted(totals) and totals[0] < totals[-1], dict(zip(values, totals, strict=True))


@pytest.mark.parametrize(
    "size",
    [
        {"hidden": 2**31 - 1, "max_tokens_per_rank": 2**31 - 1},
        {"hidden": 2**31 - 1, "max_tokens_per_rank": 2**31 - 1, "num_ranks": 65536, "num_slots": 64},
        {"hidden": 2**31 - 1, "max_recv_tokens": 2**31 - 1, "num_slots": 64, "dtype": "float32"},
    ],
)
def test_more_than_can_be_addressed(size):
    """64-bit arithmetic would wrap to something small."""
    with pytest.raises(OutOfMemoryError) as caught:
        Communicator.required_bytes(**{**BASE, **size})
    assert "bytes asked" in str(caught.value) and "lower" in str(caught.value)


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5, "2", None, True])
def test_required_bytes_check_their_arguments(num_ranks):
    with pytest.raises(InvalidArgumentError, match="num_ranks"):
        Communicator.required_bytes(**{**BASE, "num_ranks": num_ranks})
    with pytest.raises(InvalidArgumentError, match="hidden"):
        Communicator.required_bytes(**{**BASE, "hidden": num_ranks if num_ranks != "2" else -2})


# ---------------------------------------------------------------------------------------- what is really taken

LARGE = {"num_experts": 64, "num_topk": 8, "hidden": 2048, "max_tokens_per_rank": 3000, "dtype": "bfloat16",
         "num_channels": 1}  # fmt: skip


class Peak:
    """Most anonymous memory of this process while the block runs, looked at every millisecond."""

    def __enter__(self):
        self.start = self.bytes = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *unused):
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def segments():
    """[(inode, mapped bytes, proportional bytes)] of the heaps that this process maps."""
    found = []
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                low, high = (int(end, 16) for end in words[0].split("-"))
                ours = any("epcomm" in word for word in words[5:]) and ".so" not in line
                if ours:
                    found.append([int(words[4]), high - low, 0])
            elif ours and words[0] == "Pss:":
                found[-1][2] = int(words[1]) * 1024
    return found


def measure(here):
    """Memory of this rank at its peak over calls of every kind at the largest size, one handle held."""
    rng = np.random.default_rng(here.rank)
    tokens, hidden = LARGE["max_tokens_per_rank"], LARGE["hidden"]
    # The caller's own arrays are no memory of ours: made and touched before.
    x = rng.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    idx = np.argsort(rng.random((tokens, LARGE["num_experts"])), axis=1)[:, : LARGE["num_topk"]].copy()
    weights = rng.random(idx.shape, np.float32)
    z = np.ones_like(x)
    with Peak() as peak:
        comm = here.comm(**LARGE)
        out = comm.dispatch(x, idx, weights)
        handle = out.handle  # of the largest dispatch there is, held from here on
        comm.combine(out.x, handle, out=z)
        del out
        comm.dispatch(x, handle=handle)
        # Picks that fit in a slot; more of them would go to memory of the caller's own.
        few = tokens // LARGE["num_topk"]
        out = comm.dispatch(x[:few], idx[:few], weights[:few], layout="expert", copy=False)
        for exact_order in (False, True):
            comm.combine(out.x, out.handle, exact_order=exact_order, out=z[:few])
        del out
        comm.barrier()
        told = segments()
    total = epcomm.Communicator.required_bytes(num_ranks=here.num_ranks, backend=here.backend, **LARGE)
    return peak.bytes - peak.start, told, total


def test_peak_memory_is_what_was_said(job):
    """Heap plus private memory at the peak, within 1.2 of `required_bytes` and not below it by as much.

    Every rank maps every heap once. The kernel's proportional set size divides a page by the number of processes
    that have it mapped, so its sum over all ranks and heaps is the memory that the heaps take together; one rank's
    share is its own heap. To it comes what grew privately while the largest calls ran, results in the caller's own
    memory left out (``out=``, views of the heap).
    """
    ranks = job(2)
    answers = ranks.values(measure, within_s=60)
    together = 0
    for private, told, total in answers:
        inodes = {inode for inode, _, _ in told}
        assert len(inodes) == 2 and len({size for _, size, _ in told}) == 1, told
        heap = told[0][1]
        said = total["control"] + total["staging"] + total["slots"]
        assert said <= heap <= said + 2 * 4096, (said, heap)
        assert heap + private <= 1.2 * total["total"], (heap, private, total)
        assert heap + private >= total["total"] / 1.2, (heap, private, total)
        together += sum(proportional for _, _, proportional in told)
    assert 0.95 <= together / (2 * heap) <= 1.05, (together, heap)
    ranks.values(close)


# --------------------------------------------------------------------------------------------------------- B50


def lower_memlock(here):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))


def locked(here):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmLck"))


@pytest.mark.parametrize("user", ["own", "nobody"])
def test_b50_a_small_limit_of_locked_memory(job, user):
    """Nothing of a backend on host memory is locked; root may lock more than its limit, so another user tries too."""
    ranks = job(3, env={})
    ranks.values(lower_memlock)
    if user == "nobody":
        ranks.values(create)  # whatever is imported late is imported now: that user may not read the interpreter
        ranks.values(once, way="expert")
        ranks.values(close)
        ranks.values(become_nobody)
    ranks.values(create, max_tokens_per_rank=4096)  # some 10 MiB of heap
    for way in WAYS:
        ranks.values(once, way=way)
    assert ranks.values(locked) == [0, 0, 0]
    ranks.values(close)
    for left in ranks.values(job_calls.what_is_left):
        assert left["mappings"] == 0


def become_nobody(here):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
