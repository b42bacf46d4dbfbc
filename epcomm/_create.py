"""Creation of a communicator: arguments, agreement between ranks, choice of a backend, set-up in step.

Every stage that can fail on one rank ends with an exchange, so that all ranks go on or all raise.
"""

import importlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import index
from typing import Any

from epcomm import _arrays, _gpu, _host, _nics, bootstrap, config, ops
from epcomm._registry import BACKENDS, Backend, capability_names
from epcomm._version import __version__
from epcomm.errors import (
    BackendUnavailableError,
    CommTimeoutError,
    EpcommError,
    InternalError,
    InvalidArgumentError,
    OutOfMemoryError,
    PeerLostError,
    UnsupportedError,
    code_of,
    from_status,
)

log = logging.getLogger("epcomm")

# Row and scale dtypes by the number that entry words carry: append, never reorder.
DTYPES = (
    "float32", "float16", "bfloat16", "float64", "uint8", "int8", "bool", "uint16", "int16", "uint32", "int32",
    "uint64", "int64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e3m4", "float8_e8m0fnu", "int4", "uint4", "int2", "uint2",
    "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn",
)  # fmt: skip

_OPTIONS = ("num_threads", "node_id", "shm_dir", "push_only", "spin_us", "use_pidfd", "nvlink_share")
_OPTION_TYPES = (
    ("node_id", "a str or an integer", (str, int)),
    ("shm_dir", "a str", str),
    ("nvlink_share", "a str", str),
    ("push_only", "True or False", bool),
    ("use_pidfd", "True or False", bool),
)
_MAX_INT = (1 << 31) - 1
_MAX_HEAP_BYTES = 1 << 62  # 64-bit offsets, with room for the arithmetic
_HEAP_GROWS_WITH = (
    "it grows with max_recv_tokens, max_tokens_per_rank, hidden, dtype and num_slots; Communicator.required_bytes tells"
)
# Failures that mostly have their cause on another rank.
_OF_OTHERS = {code_of(error()) for error in (BackendUnavailableError, CommTimeoutError, PeerLostError)}
# What must be equal on all ranks; the rest is each rank's own business.
_SHARED = ("num_experts", "num_topk", "hidden", "max_tokens_per_rank", "max_recv_tokens", "low_latency_max_tokens",
           "num_slots", "dtype", "expert_to_rank", "num_channels", "backend", "device kind")  # fmt: skip


def _integer(name: str, value: Any, low: int, high: int = _MAX_INT) -> int:
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise InvalidArgumentError(f"{name} is {value!r}; allowed: an integer from {low} to {high}")
    try:
        number = index(value)
    except TypeError:  # an array of several, for one
        raise InvalidArgumentError(f"{name} is {value!r}; allowed: an integer from {low} to {high}") from None
    if not low <= number <= high:
        raise InvalidArgumentError(f"{name} is {number}; allowed: {low} to {high}")
    return number


def _device(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value == "cpu" or (value.startswith("cuda:") and value[5:].isdigit()):
            return value
    elif not isinstance(value, bool) and hasattr(type(value), "__index__"):
        try:
            number = index(value)
        except TypeError:  # an array of several, for one
            number = -1
        if 0 <= number <= _MAX_INT:
            return f"cuda:{number}"
    text = str(value)
    is_torch_device = type(value).__module__.startswith("torch")
    if is_torch_device and (text == "cpu" or (text.startswith("cuda:") and text[5:].isdigit())):
        return text
    raise InvalidArgumentError(f"device is {value!r}; allowed: 'cpu', a device index or 'cuda:N'")


def _row(name: str) -> Backend:
    return next(row for row in BACKENDS if row.name == name)


def wanted_backends(request: Any, source: str) -> tuple[str, ...] | None:
    """Backends that a request names, in order; None if it names none.

    The grammar: a name, a list ``a,b`` in order of preference, or ``^a,b`` for all but those.
    """
    if request is None:
        return None
    known = [backend.name for backend in BACKENDS]
    if not isinstance(request, str) or not request.strip():
        raise InvalidArgumentError(f"{source} is {request!r}; allowed: a name, a list a,b or ^a,b of {known}")
    text = request.strip()
    names = [name.strip() for name in text.lstrip("^").split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArgumentError(f"{source} is {request!r}: no backend {unknown[0]!r}; known: {', '.join(known)}")
    return tuple(name for name in known if name not in names) if text.startswith("^") else tuple(names)


def check_memory(request: str | None, on_gpu: bool, advice: str) -> None:
    """Refuse backends whose memory is of the other kind, before any rank is started for them.

    Parameters
    ----------
    request
        Names as a command line gave them; None: those of ``EPCOMM_BACKEND``.
    on_gpu
        Whether the arrays to come are on GPUs.
    advice
        What to do about it, for the message.

    Raises
    ------
    InvalidArgumentError
        No backend that is asked for has that memory, or there is no such backend.
    """
    source = "--backend"
    if request is None:
        request, source = config.get("EPCOMM_BACKEND"), "EPCOMM_BACKEND"
    names = wanted_backends(request, source)
    if not names or any(_row(name).needs_cuda == on_gpu for name in names):
        return
    able = ", ".join(row.name for row in BACKENDS if row.needs_cuda == on_gpu)
    has, takes = ("host", "GPU") if on_gpu else ("GPU", "host")
    raise InvalidArgumentError(f"{source} is {request!r}, which has {has} memory, but these are {takes} arrays: "
                               f"{advice}; backends with {takes} memory: {able}")


def parameters(given: dict[str, Any]) -> dict[str, Any]:
    """Checked constructor arguments; what depends on the number of ranks is left as it was given."""
    made = dict(given)
    experts = made["num_experts"] = _integer("num_experts", given["num_experts"], 1, ops.MAX_EXPERTS)
    made["num_topk"] = _integer("num_topk", given["num_topk"], 1, experts)
    made["hidden"] = _integer("hidden", given["hidden"], 1)
    made["max_tokens_per_rank"] = _integer("max_tokens_per_rank", given["max_tokens_per_rank"], 1)
    if given["max_recv_tokens"] is not None:
        made["max_recv_tokens"] = _integer("max_recv_tokens", given["max_recv_tokens"], 1)
    made["low_latency_max_tokens"] = _integer("low_latency_max_tokens", given["low_latency_max_tokens"], 0)
    if made["low_latency_max_tokens"]:
        raise UnsupportedError(
            f"low_latency_max_tokens is {made['low_latency_max_tokens']}; allowed so far: 0 (no low-latency calls)"
        )
    made["num_slots"] = _integer("num_slots", given["num_slots"], 1, 64)
    made["dtype"] = _arrays.canonical_dtype(given["dtype"])
    if made["dtype"] not in DTYPES or _arrays.itemsize_of(made["dtype"]) not in (1, 2, 4):
        raise InvalidArgumentError(f"dtype is {made['dtype']}; allowed: any native dtype of 1, 2 or 4 bytes")
    made["device"] = _device(given["device"])
    if given["num_sms"] is not None:
        made["num_sms"] = _integer("num_sms", given["num_sms"], 1)
    if given["num_channels"] is not None:
        made["num_channels"] = _integer("num_channels", given["num_channels"], 1, 256)
    if given["timeout_s"] is None:
        made["timeout_s"] = config.get("EPCOMM_TIMEOUT_S")
    else:
        made["timeout_s"] = config.seconds("timeout_s", given["timeout_s"])
    request, source = given["backend"], "backend"
    if request is None:
        request, source = config.get("EPCOMM_BACKEND"), "EPCOMM_BACKEND"
    made["backend"] = wanted_backends(request, source)
    if given["expert_to_rank"] is not None:
        made["expert_to_rank"] = [
            _integer(f"expert_to_rank[{i}]", rank, 0) for i, rank in enumerate(_listed(given["expert_to_rank"]))
        ]
        if len(made["expert_to_rank"]) != experts:
            raise InvalidArgumentError(
                f"expert_to_rank has {len(made['expert_to_rank'])} entries; allowed: num_experts={experts}"
            )
    options = given["options"]
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise InvalidArgumentError(f"options is of type {type(options).__name__}; allowed: dict")
    for key in options:
        if key not in _OPTIONS:
            raise InvalidArgumentError(f"options has {key!r}; allowed: {', '.join(_OPTIONS)}")
    options = made["options"] = {key: value for key, value in options.items() if value is not None}
    threads = options.get("num_threads")
    if threads is not None:
        threads = _integer("options['num_threads']", threads, 1, 256)
    made["num_threads"] = threads or made["num_sms"] or config.get("EPCOMM_NUM_THREADS")
    if made["num_threads"] is not None:
        made["num_threads"] = min(made["num_threads"], 256)
    for key, allowed, types in _OPTION_TYPES:
        value = options.get(key)
        if key in options and (not isinstance(value, types) or (isinstance(value, bool) and types is not bool)):
            raise InvalidArgumentError(f"options[{key!r}] is {value!r}; allowed: {allowed}")
    if "node_id" in options:
        options["node_id"] = str(options["node_id"])
    if "spin_us" in options:
        options["spin_us"] = _integer("options['spin_us']", options["spin_us"], 0, 1_000_000)
    made["isa"] = config.get("EPCOMM_HOST_ISA")
    if _host.isa(made["isa"]) is None:
        raise InvalidArgumentError(
            f"EPCOMM_HOST_ISA={made['isa']!r} does not run on this processor; it runs {_host.isa()!r}"
        )
    return made


def _listed(value: Any) -> list[Any]:
    try:
        if getattr(value, "ndim", 1) != 1:
            raise InvalidArgumentError(f"expert_to_rank has shape {tuple(value.shape)}; allowed: one dimension")
        return list(value)
    except TypeError:
        raise InvalidArgumentError(
            f"expert_to_rank is of type {type(value).__name__}; allowed: a sequence of ranks"
        ) from None


def default_threads(num_ranks: int) -> int:
    """Host threads of a rank as far as can be told alone: as if `num_ranks` ranks shared this process's cores."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def share_threads(told: Sequence[dict[str, Any]]) -> list[int]:
    """Host threads of each rank: its request, else its part of the cores it may use, in equal shares with the ranks
    of its host that may use them too.

    Parameters
    ----------
    told : sequence of dict
        By rank: ``threads`` (int, or None: no request), ``host`` (equal on the ranks of a host alone) and ``cores``
        (list of int).
    """
    sharers = Counter((rank["host"], core) for rank in told for core in rank["cores"])
    # Few different numbers of sharers among many cores.
    counts = [Counter(sharers[rank["host"], core] for core in rank["cores"]) for rank in told]
    shares = [sum(Fraction(cores, among) for among, cores in count.items()) for count in counts]
    return [rank["threads"] or max(1, min(256, int(share))) for rank, share in zip(told, shares, strict=True)]


def heap_shape(made: dict[str, Any], num_ranks: int, num_channels: int, load_store: bool) -> dict[str, int]:
    """The shape of every rank's heap (``HeapShape`` of ``include/epcomm/heap.h``)."""
    hidden = made["hidden"]
    row_bytes = (hidden * _arrays.itemsize_of(made["dtype"]) + 15) // 16 * 16
    scale_bytes = max(64, (4 * ((hidden + 127) // 128) + 15) // 16 * 16)
    _, _, local = ops.expert_owners(made["num_experts"], num_ranks, made["expert_to_rank"])
    max_recv = made["max_recv_tokens"]
    if max_recv is None:
        max_recv = num_ranks * made["max_tokens_per_rank"]
    rows = max(max_recv, made["max_tokens_per_rank"] * min(num_ranks, made["num_topk"]), made["num_topk"])
    row = row_bytes + scale_bytes + 8 * made["num_topk"] + 4
    if rows * row * (made["num_slots"] + 1) > _MAX_HEAP_BYTES:
        raise OutOfMemoryError(
            f"the heap of one rank: {rows * row * (made['num_slots'] + 1)} bytes asked ({rows} rows of {row} bytes, "
            f"num_slots + 1 = {made['num_slots'] + 1} times), {_MAX_HEAP_BYTES} can be addressed; lower "
            "max_recv_tokens, max_tokens_per_rank or hidden"
        )
    # Rows, the ids of one, or an entry record: whatever is put in one piece.
    pieces = (4 * (row_bytes + scale_bytes), 4 * made["num_topk"], 4096 + 8 * (num_ranks + max(local)))
    # Each begins at a multiple of 16, and channels' areas at one of 64.
    staging = 0 if load_store else (max((1 << 20) - 16, *pieces) + 16 + 63) // 64 * 64
    return {
        "num_ranks": num_ranks,
        "num_topk": made["num_topk"],
        "num_slots": made["num_slots"],
        "num_channels": num_channels,
        "max_local_experts": max(local),
        "max_tokens_per_rank": made["max_tokens_per_rank"],
        "max_recv_tokens": max_recv,
        "row_bytes": row_bytes,
        "scale_bytes": scale_bytes,
        "staging_bytes": staging,
    }


def required_bytes(made: dict[str, Any], num_ranks: int) -> dict[str, int]:
    """Bytes by purpose of one rank; see ``Communicator.required_bytes``."""
    channels = made["num_channels"] or made["num_threads"] or default_threads(num_ranks)
    over_nics = made["backend"] is not None and all(_row(name).needs_nics for name in made["backend"])
    if over_nics and made["num_channels"] is None:
        channels = max(channels, _ports_here(made["backend"]))
    shape = heap_shape(made, num_ranks, channels, load_store=not over_nics)
    heap = _host.heap_bytes(shape)
    tokens, recv, topk = shape["max_tokens_per_rank"], shape["max_recv_tokens"], shape["num_topk"]
    per_token = 8 * topk + 12 * min(topk, num_ranks) + 8
    routing = tokens * per_token + recv * (16 * topk + 4)
    parts = {name: heap[name] for name in ("control", "staging", "slots")}
    parts["routing"] = routing
    parts["total"] = sum(parts.values())
    return parts


def _ports_here(backends: Sequence[str]) -> int:
    """Ports of NICs that a rank alone on this machine would use; 0 if it has none."""
    found = 0
    for name in backends:
        try:
            place = _nics.look(mlx5_only=_row(name).needs_mlx5, soft_ports=config.get("EPCOMM_SOFTHCA_PORTS"))
            found = max(found, len(_nics.decide(place, [place.told()], 0).paths))
        except EpcommError:
            continue
    return found


@dataclass
class Made:
    """What creation hands to the communicator."""

    rank: int
    num_ranks: int
    backend_name: str
    caps: frozenset[str]
    device: str
    parameters: dict[str, Any]
    shape: dict[str, int]
    local_experts: list[int]
    engine: Any
    queue_pairs: list[dict[str, Any]]  # of NICs; empty where none are used


def _failure(error: Exception) -> dict[str, Any]:
    if not isinstance(error, EpcommError):
        foreign = OutOfMemoryError if isinstance(error, MemoryError) else InternalError
        error = foreign(f"{type(error).__name__}: {error}")
    return {"code": code_of(error), "text": str(error), "peer": getattr(error, "peer", None)}


def _raise(failures: list[tuple[int, dict[str, Any]]]) -> None:
    """What all ranks raise when some of them failed: the error of the first with one of its own, and who else did."""
    rank, failure = min(failures, key=lambda failed: (failed[1]["code"] in _OF_OTHERS, failed[0]))
    text = f"rank {rank}: {failure['text']}"
    if len(failures) > 1:
        others = ", ".join(str(other) for other, _ in failures[:17] if other != rank)
        text += f" (rank{'s' if len(failures) > 2 else ''} {others} failed too)"
    peer = failure.get("peer")
    raise from_status(failure["code"], text, -1 if peer is None else peer)


def _together(group: bootstrap.Group, work: Callable[[], Any]) -> tuple[Any, list[Any], list[tuple[int, dict]]]:
    """Run ``work`` here; (its result, every rank's JSON-able result, every rank's failure)."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # not kept: its frames hold what was made so far, a heap maybe
        failure = _failure(error)
        log.info("rank %d: %s", group.rank, error)
    shown = result if isinstance(result, (dict, list, str, int, type(None))) else None
    told = [json.loads(data) for data in group.all_gather(json.dumps({"failure": failure, "result": shown}).encode())]
    failures = [(rank, data["failure"]) for rank, data in enumerate(told) if data["failure"]]
    return result, [data["result"] for data in told], failures


def _viable(made: dict[str, Any], device: str) -> dict[str, str | None]:
    """Each candidate with the reason against it on this rank, None if it may be tried."""
    candidates = made["backend"] if made["backend"] is not None else [backend.name for backend in BACKENDS]
    rows = {backend.name: backend for backend in BACKENDS}
    reasons: dict[str, str | None] = {}
    for name in candidates:
        reason = None
        if rows[name].needs_cuda != (device != "cpu"):
            reason = f"has {'device' if rows[name].needs_cuda else 'host'} memory, but device={device!r}"
            if rows[name].needs_cuda and made["device"] is None:
                reason += " (no device= was given, and neither torch nor CuPy is imported and sees a GPU)"
        else:
            try:
                importlib.import_module(f"epcomm._{name}").probe()
            except InvalidArgumentError:  # a malformed variable is a mistake, no reason for another backend
                raise
            except EpcommError as error:
                reason = str(error)
            except ImportError as error:
                reason = f"cannot be imported: {error}"
        reasons[name] = reason
    return reasons


def _resolve_device(made: dict[str, Any]) -> str:
    """The device, where the caller left it open: cpu unless a backend with device memory could use a GPU."""
    rows = [backend for backend in BACKENDS if made["backend"] is None or backend.name in made["backend"]]
    has_device_memory = any(backend.needs_cuda for backend in rows)
    if made["device"] is None:
        return _current_gpu() if has_device_memory else "cpu"
    if made["device"] != "cpu" and not has_device_memory:
        names = ", ".join(backend.name for backend in rows)
        raise InvalidArgumentError(f"device is {made['device']!r}; allowed with backend {names}: 'cpu'")
    return made["device"]


def index_of(device: str) -> int:
    """N of ``cuda:N``."""
    return int(device[5:])


def _current_gpu() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    cupy = sys.modules.get("cupy")
    if cupy is not None and cupy.cuda.is_available():
        return f"cuda:{cupy.cuda.runtime.getDevice()}"
    return "cpu"


def _compare(told: list[dict[str, Any]]) -> None:
    """One error that lists each rank's value of the first thing that differs."""
    for name in ("version", *_SHARED):
        values = [rank[name] for rank in told]
        if any(value != values[0] for value in values):
            shown = []
            for rank, value in enumerate(values[:16]):
                text = "None" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
                shown.append(f"rank {rank}: {text if len(text) <= 60 else text[:57] + '...'}")
            more = ", ..." if len(values) > 16 else ""
            raise InvalidArgumentError(f"{name} differs between ranks: {', '.join(shown)}{more}")


def create(group_like: Any, given: dict[str, Any]) -> Made:
    """Everything of ``Communicator.__init__``. Collective."""
    failure: Exception | None = None
    made: dict[str, Any] = {}
    device = "cpu"
    try:
        _set_log_level()
        config.warn_of_unknown()
        made = parameters(given)
        device = _resolve_device(made)
    except EpcommError as error:
        failure = error
    except Exception as error:  # of an argument's own methods
        failure = InvalidArgumentError(f"an argument is not usable: {type(error).__name__}: {error}")
    # A bad argument still takes part, under the default deadline, so that all ranks hear of it.
    timeout_s = made.get("timeout_s", 300.0)
    with bootstrap.connect(group_like, timeout_s=timeout_s) as group:
        return _create(group, made, device, failure)


def _create(group: bootstrap.Group, made: dict[str, Any], device: str, failure: Exception | None) -> Made:
    rank, num_ranks = group.rank, group.num_ranks

    def introduce() -> dict[str, Any]:
        if failure is not None:
            raise failure
        ops.expert_owners(made["num_experts"], num_ranks, made["expert_to_rank"])  # ranks in range
        node_id = made["options"].get("node_id", config.get("EPCOMM_NODE_ID"))
        told = {name: made.get(name) for name in _SHARED}
        told["backend"] = list(made["backend"]) if made["backend"] is not None else None
        told["device kind"] = "cpu" if device == "cpu" else "cuda"
        told.update(version=__version__, node_id=node_id, viable=_viable(made, device))
        told.update(threads=made["num_threads"], host=_nics.host_id(), cores=sorted(os.sched_getaffinity(0)))
        return told

    mine, told, failures = _together(group, introduce)
    if failures:
        _raise(failures)
    _compare(told)

    threads_of = share_threads(told)
    threads = threads_of[rank]
    # On a GPU one signal per peer ends a phase: blocks of a kernel meet in its memory.
    channels = 1 if device != "cpu" else made["num_channels"] or max(threads_of)
    refused: list[str] = []
    for name in mine["viable"]:
        reasons = [f"rank {r}: {t['viable'][name]}" for r, t in enumerate(told) if t["viable"][name] is not None]
        if not reasons and name == "shm":
            reasons = _other_nodes([told_rank["node_id"] for told_rank in told])
        if reasons:
            log.info("backend %s refused: %s", name, "; ".join(reasons))
            refused.append(f"{name}: {'; '.join(reasons[:8])}")
            continue
        engine_or_none, failures = _start(group, name, made, device, threads, channels)
        if not failures:
            note = _nics.model_note(name)
            log.info("rank %d of %d uses backend %s%s", rank, num_ranks, name, f" {note}" if note else "")
            caps, shape, engine, queue_pairs = engine_or_none
            _, _, local = ops.expert_owners(made["num_experts"], num_ranks, made["expert_to_rank"])
            return Made(rank, num_ranks, name, caps, device, made, shape, local, engine, queue_pairs)
        unavailable = code_of(BackendUnavailableError())
        if any(failed["code"] != unavailable for _, failed in failures):
            _raise([failed for failed in failures if failed[1]["code"] != unavailable])
        reasons = [f"rank {r}: {failed['text']}" for r, failed in failures]
        log.info("backend %s refused: %s", name, "; ".join(reasons))
        refused.append(f"{name}: {'; '.join(reasons[:8])}")
    raise BackendUnavailableError(
        "no backend works between all ranks: " + ("; ".join(refused) or "the request excludes every backend"))


def _choose_nics(
    group: bootstrap.Group, backend: Backend, device: str
) -> tuple[dict[str, Any], list[int], list[tuple[int, dict]]]:
    """The ports of NICs that this rank uses, as a backend's options; how many each rank has; every failure."""
    place: Any = None

    def look() -> dict[str, Any]:
        nonlocal place
        place = _nics.look(
            gpu=None if device == "cpu" else _gpu.pci_address(index_of(device)),
            mlx5_only=backend.needs_mlx5,
            soft_ports=config.get("EPCOMM_SOFTHCA_PORTS"),
        )
        return place.told()

    options: dict[str, Any] = {}
    _, told, failures = _together(group, look)
    if failures:
        return {}, [], failures

    def decide() -> int:
        decision = _nics.decide(place, told, group.rank)
        options["paths"], options["local_rank"] = decision.paths, decision.local_rank
        options["provider"] = place.provider
        return len(options["paths"])

    _, paths, failures = _together(group, decide)
    return options, paths, failures


def _note_failover(backend: Backend, num_ports: int) -> None:
    """Who asks for replay counts on it, so a warning says where there is none."""
    if config.get("EPCOMM_IB_FAILOVER") != "replay":
        return
    ends = "a port that dies ends the communicator with an error"
    if not backend.replays:
        able = ", ".join(row.name for row in BACKENDS if row.replays)
        config.warn_once(f"EPCOMM_IB_FAILOVER=replay does nothing on backend {backend.name}: {ends}; "
                         f"{able} can replay")
    elif num_ports < 2:
        config.warn_once(f"EPCOMM_IB_FAILOVER=replay does nothing on a rank with one port: {ends}; "
                         "`python -m epcomm info` tells why it has no other")


def _other_nodes(node_ids: list[str | None]) -> list[str]:
    """Why these ranks may not share memory; empty if they may."""
    other = next((rank for rank, node_id in enumerate(node_ids) if node_id != node_ids[0]), None)
    if other is None:
        return []
    return [
        f"ranks 0 and {other} are in different nodes: node_id (EPCOMM_NODE_ID) is {node_ids[0]!r} on rank 0 and "
        f"{node_ids[other]!r} on rank {other}"
    ]


def _start(
    group: bootstrap.Group, name: str, made: dict[str, Any], device: str, threads: int, channels: int
) -> tuple[Any, list[tuple[int, dict]]]:
    """Set one backend up in step with the other ranks; ((caps, shape, engine, queue pairs), []) or (None, failures)."""
    rank, num_ranks = group.rank, group.num_ranks
    on_gpu = device != "cpu"
    over_nics: dict[str, Any] = {}
    if _row(name).needs_nics:
        over_nics, paths, failures = _choose_nics(group, _row(name), device)
        if failures:
            return None, failures
        _note_failover(_row(name), len(over_nics["paths"]))
        if made["num_channels"] is None:
            channels = min(256, max(channels, *paths))  # so that every port has one
    functions: dict[str, int] = {}
    backend: Any = None
    shape: dict[str, int] = {}
    caps: frozenset[str] = frozenset()
    queue_pairs: list[dict[str, Any]] = []

    def open_heap() -> str:
        nonlocal backend, shape, caps, functions
        options = {
            **made["options"], **over_nics, "num_ranks": num_ranks, "rank": rank, "num_channels": channels,
            "timeout_s": made["timeout_s"],
        }  # fmt: skip
        if on_gpu:
            from epcomm import kernels

            # Now, since loading can wait for a busy GPU, and only now: nothing compiles after creation.
            for unit in (kernels.DISPATCH, kernels.COMBINE):
                functions |= kernels.load(unit, index_of(device)).functions
            options["device"] = index_of(device)
        backend = importlib.import_module(f"epcomm._{name}").Backend(options)
        caps = frozenset(capability_names(backend.caps))
        shape = heap_shape(made, num_ranks, channels, "peer_load_store" in caps)
        try:
            backend.alloc_heap(_host.heap_bytes(shape)["total"])
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"{error} ({_HEAP_GROWS_WITH})") from None
        return backend.export_info().hex()

    def join(infos: list[str]) -> Any:
        nonlocal queue_pairs
        try:
            state_word = _host.heap_bytes(shape)["state_word"]
            backend.connect(rank, [bytes.fromhex(info) for info in infos], state_word, made["timeout_s"])
            queue_pairs = backend.plan()
            owners, _, _ = ops.expert_owners(made["num_experts"], num_ranks, made["expert_to_rank"])
            if on_gpu:
                from epcomm import _device

                return _device.DeviceEngine(
                    backend,
                    rank,
                    index_of(device),
                    shape,
                    owners,
                    made["num_sms"],
                    made["timeout_s"],
                    DTYPES,
                    functions,
                )
            return _host.HostEngine(
                backend,
                rank,
                shape,
                owners,
                threads,
                made["timeout_s"],
                DTYPES,
                made["isa"],
                made["options"].get("push_only", False),
            )
        except BaseException:
            backend.close()  # at once: peers may be waiting for this end of a connection
            raise

    engine = None
    try:
        _, infos, failures = _together(group, open_heap)
        if not failures:
            engine, _, failures = _together(group, lambda: join(infos))
        if failures:
            engine = None
            return None, failures
        return (caps, shape, engine, queue_pairs), []
    except BaseException:
        engine = None
        raise
    finally:
        if backend is not None and engine is None:
            backend.close()
        backend = None  # its heap goes now, also where the frames of an error live on


def _set_log_level() -> None:
    if config.is_set("EPCOMM_LOG"):
        level = config.get("EPCOMM_LOG")
        log.setLevel(level.upper())
        if not log.handlers and not logging.getLogger().handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
            log.addHandler(handler)
