"""A user's program for launchers: `python launched.py PART... --out FOLDER`; each rank writes what it saw.

It imports what its parts need and nothing more. Expert e multiplies by e + 1, all numbers are small integers, so every
round trip is exact.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

import epcomm

NUM_EXPERTS, HIDDEN = 5, 8


def communicator(group, **more):
    """A communicator of the group, or of the launcher's environment."""
    shape = {"num_experts": NUM_EXPERTS, "num_topk": 2, "hidden": HIDDEN, "max_tokens_per_rank": 8, "dtype": "float32"}
    return epcomm.Communicator(group, **{**shape, "timeout_s": 60, **more})


def inputs_of(comm, seed=0):
    rng = np.random.default_rng([seed, comm.rank])
    x = rng.integers(-3, 4, (4 + comm.rank % 2, HIDDEN)).astype(np.float32)
    return x, rng.integers(-1, NUM_EXPERTS, (len(x), 2))


def begin(comm, layout, seed=0):
    """Dispatch; checks where rows came from: the sum over all ranks' rows is known to each."""
    x, ids = inputs_of(comm, seed)
    return x, ids, comm.dispatch(x, ids, np.ones(ids.shape, np.float32), layout=layout)


def end(comm, x, ids, out, layout):
    """Experts and combine; checks every number."""
    first = sum(1 for e in range(NUM_EXPERTS) if owner(comm, e) < comm.rank)
    factor = np.where(out.topk_idx >= 0, out.topk_idx + first + 1, 0)
    y = out.x * (factor.sum(1) if layout == "rank" else factor)[:, None].astype(np.float32)
    z = comm.combine(y, out.handle).x
    np.testing.assert_array_equal(z, x * np.where(ids >= 0, ids + 1, 0).sum(1)[:, None])


def owner(comm, expert):
    """Contiguous; the first ranks own one more."""
    base, more = divmod(NUM_EXPERTS, comm.num_ranks)
    return expert // (base + 1) if expert < more * (base + 1) else more + (expert - more * (base + 1)) // max(base, 1)


def round_trips(comm):
    """Both layouts; returns what this rank is."""
    for layout in ("rank", "expert"):
        end(comm, *begin(comm, layout), layout)
    return [comm.rank, comm.num_ranks]


def environment():
    """Whatever the launcher says."""
    with communicator(None) as comm:
        return round_trips(comm)


def interleaved(groups):
    """Two communicators at once, with calls in turns and results of one held over calls of the other."""
    with communicator(groups[0]) as first, communicator(groups[1], num_slots=1) as second:
        for seed in range(3):
            mine = {comm: begin(comm, "rank", seed) for comm in (first, second)}
            other = {comm: begin(comm, "expert", seed + 10) for comm in (second, first)}
            for comm in (second, first):
                end(comm, *mine[comm], "rank")
            for comm in (second, first):
                end(comm, *other[comm], "expert")
        return [[first.rank, first.num_ranks], [second.rank, second.num_ranks]]


# ----------------------------------------------------------------------------------------------- torch


def torch_world():
    """A group, its sub-groups and a reordered one; each member of a sub-group makes its communicator."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(part, size, 2))) for part in range(2)]
    turned = dist.new_group(list(range(size))[::-1], sort_ranks=False) if _has_sort_ranks(dist) else None
    seen = {"world": interleaved([dist.group.WORLD, None])}
    with communicator(halves[rank % 2]) as comm:
        seen["half"] = round_trips(comm)
    try:
        communicator(halves[1 - rank % 2])
    except epcomm.InvalidArgumentError as error:
        seen["not mine"] = str(error)
    if turned is not None:
        with communicator(turned) as comm:
            seen["turned"] = round_trips(comm)
    seen["both"] = interleaved([dist.group.WORLD, halves[rank % 2]])
    return seen


def _has_sort_ranks(dist):
    import inspect

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def torch_destroyed():
    """B24b: the group goes first, the communicator is used after it, closed last or never."""
    import torch
    import torch.distributed as dist

    import epcomm.torch

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    comm, kept = communicator(dist.group.WORLD), communicator(dist.group.WORLD)
    x, ids = (torch.from_numpy(array) for array in inputs_of(comm))
    x.requires_grad_()
    held = kept.dispatch(x.detach(), ids)
    out = epcomm.torch.dispatch(comm, x, ids, layout="expert")
    dist.destroy_process_group()
    seen = round_trips(comm)
    epcomm.torch.combine(comm, out.x, out).sum().backward()
    assert torch.equal(x.grad, (ids >= 0).sum(1, keepdim=True).expand(x.shape).float())
    round_trips(kept)
    comm.close()
    sys.modules["kept_until_the_interpreter_ends"] = (kept, held)
    return seen


# ------------------------------------------------------------------------------------------------- MPI


def mpi():
    """`COMM_WORLD`, by name and by the launcher; a split in two and one in reverse order."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, world.rank)
    turned = world.Split(0, -world.rank)
    seen = {"both": interleaved([world, half])}
    for name, comm_of in (("world", world), ("half", half), ("turned", turned), ("none", None)):
        with communicator(comm_of) as comm:
            seen[name] = round_trips(comm)
    with communicator(world) as comm:
        half.Free()
        turned.Free()
        seen["freed"] = round_trips(comm)
    return seen


PARTS = {"environment": environment, "torch_world": torch_world, "torch_destroyed": torch_destroyed, "mpi": mpi}


def child(rank, num_ranks, port, folder):
    """Main function of a process of plain `multiprocessing`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_PORT=str(port))
    seen = {"environment": environment(), "both": interleaved([None, None])}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    seen = {name: PARTS[name]() for name in arguments.parts}
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    Path(arguments.out, f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
