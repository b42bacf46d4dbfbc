"""Environment variables: read here and nowhere else, once per communicator.

Each row of :data:`VARIABLES` is one variable with its type, default and help; the README's table is made
from these rows and ``python -m epcomm info`` prints them.
"""

import difflib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from epcomm.errors import InvalidArgumentError

MAX_RANKS = 65536
MAX_CPUS = 1024  # of a cpu_set_t


def seconds(name: str, value: Any) -> float:
    """A positive, finite number of seconds, at most ten days."""
    is_flag = isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"  # NumPy's too
    try:
        number = math.nan if is_flag else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= 864_000:
        raise InvalidArgumentError(f"{name}={value!r}: expected seconds, more than 0 and at most 864000 (ten days)")
    return number


def _integer(low: int, high: int, what: str = "an integer") -> Callable[[str, Any], int]:
    def parse(name: str, value: Any) -> int:
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"{name}={value!r}: expected {what} from {low} to {high}") from None
        if not low <= number <= high:
            raise InvalidArgumentError(f"{name}={value!r}: expected {what} from {low} to {high}")
        return number

    return parse


def _choice(*allowed: str) -> Callable[[str, Any], str]:
    def parse(name: str, value: Any) -> str:
        word = value.lower() if isinstance(value, str) else value  # INFO is as good as info
        if word not in allowed:
            raise InvalidArgumentError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        return word

    return parse


def _number_of(*allowed: int) -> Callable[[str, Any], int]:
    def parse(name: str, value: Any) -> int:
        if str(value) not in {str(number) for number in allowed}:
            raise InvalidArgumentError(f"{name}={value!r}: expected one of {', '.join(map(str, allowed))}")
        return int(value)

    return parse


def _text(name: str, value: Any) -> str:
    return str(value)


def _at_least_0(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= 1e9:
        raise InvalidArgumentError(f"{name}={value!r}: expected a number from 0 to 1e9")
    return number


def _cpus(name: str, value: Any) -> list[int]:
    """CPU numbers from ``0-3,8``."""
    found: list[int] = []
    for part in str(value).split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        good = all(number.isdecimal() and int(number) < MAX_CPUS for number in numbers)
        if not good or int(numbers[-1]) < int(first):
            raise InvalidArgumentError(f"{name}={value!r}: expected CPU numbers such as 0-3,8, each below {MAX_CPUS}")
        found += range(int(first), int(numbers[-1]) + 1)
    return found


class Variable(NamedTuple):
    """One environment variable."""

    name: str
    parse: Callable[[str, Any], Any]
    default: Any
    help: str
    secret: bool = False


VARIABLES = (
    Variable("EPCOMM_BACKEND", _text, None, "backend to use: a name, an ordered list `a,b`, or `^name` to exclude"),
    Variable("EPCOMM_TIMEOUT_S", seconds, 300.0, "deadline of each wait, in seconds"),
    Variable("EPCOMM_PORT", _integer(1, 65535), None, "port of the rendezvous; default `MASTER_PORT`"),
    Variable("EPCOMM_AUTHKEY", _text, None, "secret that joins the ranks of one job (HMAC-SHA256)", secret=True),
    Variable("EPCOMM_NODE_ID", _text, None, "splits the ranks of one host into nodes; never joins hosts"),
    Variable("EPCOMM_NUM_THREADS", _integer(1, 256), None, "host threads per rank; default its part of the cores"),
    Variable("EPCOMM_HOST_ISA", _choice("avx512", "avx2", "plain"), None,
             "instruction set of the host loops: `avx512`, `avx2` or `plain`; default the best of this processor"),
    Variable("EPCOMM_SHM_DIR", _text, None, "folder for shared segments where memfd is not wanted, such as /dev/shm"),
    Variable("EPCOMM_CACHE_DIR", _text, "~/.cache/epcomm", "folder of compiled kernels; nobody else may enter it"),
    Variable("EPCOMM_IB_PROVIDER", _choice("auto", "mlx5", "verbs", "soft"), "auto",
             "RDMA by `verbs`: real devices, `mlx5`: those only, `soft`: the software HCA, which `auto` never takes"),
    Variable("EPCOMM_IB_HCA", _text, None,
             "RDMA devices, as NCCL_IB_HCA: a list `name[:port],...`, prefixes; `=` first: whole names, `^`: all but"),
    Variable("EPCOMM_IB_MAP", _text, None,
             "devices by rank of the host, instead of the nearest: `0=mlx5_0,mlx5_1; 1-3=mlx5_2:1; *=mlx5_3`"),
    Variable("EPCOMM_IB_GID_INDEX", _integer(0, 255), None, "index of the GID; default by type and address"),
    Variable("EPCOMM_IB_ROCE_VERSION", _number_of(1, 2), None, "type of GID wanted on Ethernet; default 2, else 1"),
    Variable("EPCOMM_IB_ADDR_FAMILY", _choice("ipv4", "ipv6"), None,
             "family of GID wanted on Ethernet; default `ipv4`, else `ipv6`"),
    Variable("EPCOMM_IB_MTU", _number_of(256, 512, 1024, 2048, 4096), None,
             "path MTU, a power of two from 256 to 4096; default the smaller one of both ports"),
    Variable("EPCOMM_IB_DEPTH", _number_of(*(1 << power for power in range(4, 16))), 256,
             "work requests that a queue pair holds, a power of two from 16 to 32768; lowered to what the device has"),
    Variable("EPCOMM_IB_TC", _integer(0, 255), 0, "traffic class of RoCE packets (DSCP times 4) and GRHs"),
    Variable("EPCOMM_IB_SL", _integer(0, 15), 0, "service level of InfiniBand packets, priority of RoCE"),
    Variable("EPCOMM_IB_PKEY", _integer(0, 65535, "the index of a partition key (not the key)"), 0,
             "index of the partition key in each port's table"),
    Variable("EPCOMM_IB_FAILOVER", _choice("error", "replay"), "error",
             "a NIC port that dies: `error`, a named one, or `replay` over another (`ibgda`; the same on all ranks)"),
    Variable("EPCOMM_IB_RELAXED_ORDERING", _number_of(0, 1), 1,
             "1 or 0: whether rows may overtake each other on PCIe; signals never do"),
    Variable("EPCOMM_SOFTHCA_PORTS", _integer(1, 16), 2, "devices of the software HCA: `soft0`, `soft1`, ..."),
    Variable("EPCOMM_SOFTHCA_GBPS", _at_least_0, 0.0, "rate of each of its ports in Gbit/s; 0: as fast as it copies"),
    Variable("EPCOMM_SOFTHCA_LATENCY_US", _at_least_0, 0.0, "microseconds from its doorbell to the completion"),
    Variable("EPCOMM_SOFTHCA_SEED", _integer(0, (1 << 63) - 1), 0,
             "not 0: disorder of every kind that hardware may show, by this seed"),
    Variable("EPCOMM_SOFTHCA_MOVER", _choice("copy", "null"), "copy",
             "`null`: messages complete without moving a byte, to time the control path alone"),
    Variable("EPCOMM_SOFTHCA_FAULTS", _text, None, "faults it plays, as `backends/softhca/faults.hpp` tells"),
    Variable("EPCOMM_NVLINK_SHARE", _choice("auto", "fd", "fabric", "ipc"), "auto",
             "how ranks hand each other GPU memory: `fd` (file descriptors), `fabric` handles or legacy CUDA `ipc`"),
    Variable("EPCOMM_IBRC_THREADS", _integer(1, 256), None, "proxy threads of a rank; default one per NIC port"),
    Variable("EPCOMM_IBRC_CPUS", _cpus, None,
             "CPUs on which the proxy threads of a host's ranks run, in turn, such as `0-3,8`"),
    Variable("EPCOMM_LOG", _choice("debug", "info", "warning", "error"), "warning",
             "level of the `epcomm` logger: `debug`, `info`, `warning` or `error`"),
)
# Set by launchers, not by users: they say which rank this is and where rank 0 can be met.
LAUNCHER_VARIABLES = (
    Variable("RANK", _integer(0, MAX_RANKS - 1), None, "this rank (torchrun and its like)"),
    Variable("WORLD_SIZE", _integer(1, MAX_RANKS), None, "number of ranks (torchrun and its like)"),
    Variable("LOCAL_RANK", _integer(0, MAX_RANKS - 1), None, "this rank among those of its host"),
    Variable("LOCAL_WORLD_SIZE", _integer(1, MAX_RANKS), None, "number of ranks of this host"),
    Variable("OMPI_COMM_WORLD_RANK", _integer(0, MAX_RANKS - 1), None, "this rank (Open MPI)"),
    Variable("OMPI_COMM_WORLD_SIZE", _integer(1, MAX_RANKS), None, "number of ranks (Open MPI)"),
    Variable("PMI_RANK", _integer(0, MAX_RANKS - 1), None, "this rank (MPICH, Intel MPI)"),
    Variable("PMI_SIZE", _integer(1, MAX_RANKS), None, "number of ranks (MPICH, Intel MPI)"),
    Variable("PMIX_RANK", _integer(0, MAX_RANKS - 1), None, "this rank (PMIx; the size comes from MPI)"),
    Variable("SLURM_PROCID", _integer(0, MAX_RANKS - 1), None, "this rank (srun)"),
    Variable("SLURM_NTASKS", _integer(1, MAX_RANKS), None, "number of ranks (srun)"),
    Variable("SLURM_STEP_ID", _text, None, "set by srun only, not by salloc or sbatch"),
    Variable("MASTER_ADDR", _text, None, "host of rank 0; default 127.0.0.1"),
    Variable("MASTER_PORT", _integer(1, 65535), None, "port of rank 0"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", _text, None, "`True` under torchrun: its store can be used"),
    Variable("TORCHELASTIC_RUN_ID", _text, "", "id of the torchrun job"),
    Variable("TORCHELASTIC_RESTART_COUNT", _text, "0", "restarts of the torchrun workers so far"),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES + LAUNCHER_VARIABLES}
_PREFIX = "EPCOMM_"
_NO_SETTINGS = ("EPCOMM_BUILD_", "EPCOMM_TEST_")  # of setup.py and of the tests


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Value of a variable of either table; unset or empty means its default.

    Raises
    ------
    InvalidArgumentError
        The value is outside the range; the text names the variable, the value and the range.
    """
    variable = _BY_NAME[name]
    text = (os.environ if environ is None else environ).get(name, "").strip()
    return variable.parse(name, text) if text else variable.default


def is_set(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a variable has a value of its own, good or bad."""
    return bool((os.environ if environ is None else environ).get(_BY_NAME[name].name, "").strip())


def nearest(name: str) -> str | None:
    """The variable whose name is most like `name`, None if none is."""
    given = name.upper().removeprefix(_PREFIX)
    known = [variable.name.removeprefix(_PREFIX) for variable in VARIABLES]
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.65)
    if not close:  # LOG_LEVEL is LOG with more behind it, TC is IB_TC without its family
        parts = [word for word in known if f"_{word}_" in f"_{given}_" or f"_{given}_" in f"_{word}_"]
        close = parts if len(parts) == 1 else []
    return _PREFIX + close[0] if close else None


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Set variables that begin as ours and are none of ours, by name, each with a sentence that says so."""
    environ = os.environ if environ is None else environ
    told = {}
    for name in sorted(environ):
        if not name.upper().startswith(_PREFIX) or name in _BY_NAME or name.startswith(_NO_SETTINGS):
            continue
        near = nearest(name)
        hint = f"did you mean {near}?" if near else "`python -m epcomm info` lists those there are"
        told[name] = f"{name} is set, but there is no such variable, so it does nothing; {hint}"
    return told


def warn_of_unknown() -> None:
    """Log each of :func:`unknown` once in this process: a misspelt name looks like a setting that has no effect."""
    for text in unknown().values():
        warn_once(text)


@lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Log a warning, unless this process has already."""
    logging.getLogger("epcomm").warning("%s", text)


@contextmanager
def changed(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process with other values while the block runs; communicators read them when made."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_effect(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All variables with the values in effect now, in table order; of a secret only that it is set."""
    values = {variable.name: get(variable.name, environ) for variable in VARIABLES}
    return {
        variable.name: "(set)" if variable.secret and values[variable.name] is not None else values[variable.name]
        for variable in VARIABLES
    }
