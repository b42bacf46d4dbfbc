"""Which rank a launcher made of this process."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from epcomm import config
from epcomm.errors import InvalidArgumentError


class Launcher(NamedTuple):
    """What the environment says."""

    name: str  # "env", "mpi" or "slurm": where to look for rank 0 if MASTER_ADDR is not set
    rank: int
    num_ranks: int | None  # PMIx leaves it to MPI
    source: str  # the variables and their values, for errors


_PAIRS = (
    ("env", "RANK", "WORLD_SIZE"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpi", "PMI_RANK", "PMI_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)


def find(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """The first launcher that the environment shows, or None: then this is the only rank.

    Raises
    ------
    InvalidArgumentError
        One variable of a pair is missing, no integer, or out of range; names it and its value.
    """
    environ = os.environ if environ is None else environ
    for name, rank_variable, size_variable in _PAIRS:
        rank, num_ranks = config.get(rank_variable, environ), config.get(size_variable, environ)
        if name == "slurm" and (num_ranks is None or rank is None) and not rank:
            continue  # a shell of salloc or sbatch, not a task of srun
        if rank is None and num_ranks is None:
            continue
        if rank is None:
            raise InvalidArgumentError(f"{size_variable}={num_ranks}, but {rank_variable} is not set: set both or none")
        if num_ranks is None:
            raise InvalidArgumentError(f"{rank_variable}={rank}, but {size_variable} is not set: set both or none")
        if rank >= num_ranks:
            raise InvalidArgumentError(
                f"{rank_variable}={rank} with {size_variable}={num_ranks}: expected a rank from 0 to {num_ranks - 1}"
            )
        return Launcher(name, rank, num_ranks, f"{rank_variable}={rank}, {size_variable}={num_ranks}")
    rank = config.get("PMIX_RANK", environ)
    if rank is not None:
        return Launcher("mpi", rank, None, f"PMIX_RANK={rank}")
    return None
