"""How ranks meet before any backend exists: exchange of bytes and a barrier, over whatever the job already has.

`connect` picks the carrier, `Group` is what it returns. See ``epcomm/_bootstrap/README.md`` for the parts.
"""

import importlib.util
import logging
import os
import threading

from epcomm import config
from epcomm._bootstrap import launcher, mpi, torch_group
from epcomm._bootstrap.address import Place
from epcomm._bootstrap.deadline import Deadline
from epcomm._bootstrap.frames import VERSION
from epcomm._bootstrap.group import Group
from epcomm._bootstrap.handshake import job_key
from epcomm._bootstrap.launcher import Launcher
from epcomm._bootstrap.rendezvous import host, meet
from epcomm._bootstrap.star import CALL_LIMITS, HostGroup, MemberGroup
from epcomm.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Group", "connect"]

_log = logging.getLogger("epcomm.bootstrap")

# How many communicators this process has asked for, by meeting point. All ranks make them in the same order, also
# those that fail, so the numbers agree without a word. A forked child starts anew.
_numbers: dict[tuple[object, ...], int] = {}
_numbers_lock = threading.Lock()


def connect(group: object = None, *, timeout_s: float) -> Group:
    """Join the ranks of a job. Collective: all ranks must call it, in the same order.

    Waits until every rank has come, at most ``timeout_s``.

    Parameters
    ----------
    group : None, torch.distributed.ProcessGroup or mpi4py.MPI.Comm
        None: what the launcher's environment says; without one this is the only rank. Ranks are those of the group.
    timeout_s : float
        Seconds that this call and each later call of the group may take.

    Returns
    -------
    Group
        Use it as a context manager or call its ``close``.

    Raises
    ------
    InvalidArgumentError
        The group is of another kind, this process is not in it, the environment contradicts itself, two processes
        claim one rank, or the ranks hold different keys.
    CommTimeoutError
        Not all ranks came in time; names the missing ones where that can be known.
    PeerLostError
        A rank that had come was lost or gave up.
    UnsupportedError
        The ranks run different versions, or the launcher gives no way to meet; the text has the remedy.
    """
    timeout_s = config.seconds("timeout_s", timeout_s)
    if group is None:
        return _from_environment(timeout_s)
    if torch_group.recognises(group):
        return _greeted(torch_group.TorchGroup(group, timeout_s))
    if mpi.recognises(group):
        return _greeted(mpi.MpiGroup(group, timeout_s))
    raise InvalidArgumentError(
        f"group is of type {type(group).__qualname__}; allowed: None (ranks from the launcher's variables), a "
        "torch.distributed.ProcessGroup, an mpi4py.MPI.Comm"
    )


def _greeted(group: Group) -> Group:
    """The group once all ranks have come and are known to speak the same version."""
    try:
        versions = [int.from_bytes(part, "big") for part in group.all_gather(VERSION.to_bytes(2, "big"))]
        if len(set(versions)) > 1:
            listing = ", ".join(f"rank {rank} {version}" for rank, version in enumerate(versions))
            raise UnsupportedError(f"bootstrap: ranks speak different versions: {listing}; install the same epcomm")
    except BaseException:
        group.close()
        raise
    return group


def _from_environment(timeout_s: float) -> Group:
    found = launcher.find()
    if found is None:
        if torch_group.distributed() is not None and torch_group.distributed().is_initialized():
            _log.warning(
                "torch.distributed is initialised, but RANK and WORLD_SIZE are not set: this communicator has one "
                "rank; pass group=torch.distributed.group.WORLD to use all"
            )
        return Group(0, 1, timeout_s)
    if found.num_ranks == 1:
        return Group(0, 1, timeout_s)
    agent_store = config.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if found.num_ranks is not None and found.name == "env":
        if agent_store and importlib.util.find_spec("torch") is not None:
            return _torchrun(found.rank, found.num_ranks, timeout_s)
        world = torch_group.default_group(found.rank, found.num_ranks)
        if world is not None:
            return _greeted(torch_group.TorchGroup(world, timeout_s))
    if found.name != "env" and config.get("MASTER_ADDR") is None:
        group = _mpi_world(found, timeout_s)
        if group is not None:
            return group
    if found.num_ranks is None:
        raise UnsupportedError(
            f"bootstrap: {found.source}, but the number of ranks is known to MPI only: install mpi4py, or export RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank"
        )
    return _rendezvous(found.rank, found.num_ranks, _place(found, agent_store), job_key(), timeout_s)


def _next_number(*key: object) -> int:
    with _numbers_lock:
        full = (os.getpid(), *key)
        _numbers[full] = _numbers.get(full, 0) + 1
        return _numbers[full]


def _torchrun(rank: int, num_ranks: int, timeout_s: float) -> Group:
    """Through the store of torchrun's agent, which holds MASTER_PORT."""
    from epcomm._bootstrap.torch_store import StoreGroup, open_store

    place = Place(config.get("MASTER_ADDR") or "127.0.0.1", _required_port("MASTER_PORT"))
    job = f"{config.get('TORCHELASTIC_RUN_ID')}/{config.get('TORCHELASTIC_RESTART_COUNT')}"
    number = _next_number("store", place, job, rank)
    store = open_store(place, f"epcomm/{job}/{num_ranks}/{number}", Deadline(timeout_s))
    return _greeted(StoreGroup(store, rank, num_ranks, timeout_s))


def _required_port(name: str) -> int:
    port = config.get(name)
    if port is None:
        raise InvalidArgumentError(f"{name}: not set; expected the port of rank 0, 1 to 65535")
    return port


def _mpi_world(found: Launcher, timeout_s: float) -> Group | None:
    """`COMM_WORLD` if it is what the launcher speaks of; None leaves it to the rendezvous."""
    # Under srun MPI is used only if the program has started it: there, starting it can abort the process.
    comm = mpi.world(start=found.name == "mpi")
    port_given = config.get("EPCOMM_PORT") is not None or config.get("MASTER_PORT") is not None
    if comm is None:
        if port_given or found.name == "slurm":
            return None
        raise UnsupportedError(
            f"bootstrap: {found.source}, but mpi4py cannot be imported and MASTER_ADDR is not set: install mpi4py, or "
            "export MASTER_ADDR (host of rank 0) and MASTER_PORT on every rank"
        )
    size, rank = comm.Get_size(), comm.Get_rank()
    if rank == found.rank and found.num_ranks in (size, None):
        return _greeted(mpi.MpiGroup(comm, timeout_s))
    if port_given or found.name == "slurm":
        return None
    raise UnsupportedError(
        f"bootstrap: {found.source}, but mpi4py says rank {rank} of {size}: it was built for another MPI than the "
        "launcher's; rebuild it, or export MASTER_ADDR (host of rank 0) and MASTER_PORT on every rank"
    )


def _place(found: Launcher, agent_store: bool) -> Place:
    """Where rank 0 is met."""
    port, address = config.get("EPCOMM_PORT"), config.get("MASTER_ADDR")
    if port is None and agent_store:
        raise InvalidArgumentError("EPCOMM_PORT: not set, MASTER_PORT is held by torchrun and torch is not importable")
    if port is None:
        port = config.get("MASTER_PORT")
    if found.name == "slurm" and address is None and port is None:
        raise InvalidArgumentError(
            f"MASTER_ADDR and MASTER_PORT: not set with {found.source}; run `export MASTER_ADDR=$(scontrol show "
            "hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500` before srun"
        )
    if port is None:
        raise InvalidArgumentError(
            f"EPCOMM_PORT: not set with {found.source}, nor is MASTER_PORT; expected the port at which rank 0 is met, "
            "1 to 65535"
        )
    return Place(address or "127.0.0.1", port)


def _rendezvous(rank: int, num_ranks: int, place: Place, key: bytes | None, timeout_s: float) -> Group:
    """Over our own connections."""
    number = _next_number("rendezvous", place, rank)
    deadline = Deadline(timeout_s)
    if rank == 0:
        members = host(num_ranks, place, key, number, deadline, CALL_LIMITS)
        return HostGroup(members, num_ranks, timeout_s)
    return MemberGroup(meet(rank, num_ranks, place, key, number, deadline), rank, num_ranks, timeout_s)
