"""The part of ``python -m epcomm info`` about NICs: what is there, what a rank would take, and why."""

import os
from pathlib import Path
from typing import Any

from epcomm import _console, _create, _nics, config
from epcomm.errors import EpcommError

_GPUS = Path("/proc/driver/nvidia/gpus")
_PLAN = ("peer", "channel", "kind", "device", "port", "gid_index", "remote_path")


def collect(root: str | Path = "/sys") -> dict[str, Any]:
    """Ports, the decision for this rank (among as many as the launcher says) and for each GPU, or the problem."""
    told: dict[str, Any] = {"provider": None, "ports": [], "paths": [], "reasons": [], "problem": None, "gpus": {}}
    try:
        place = _look(root)
        told["provider"] = place.provider
        told["ports"] = [_port(place, found) for found in place.found]
        decision = _decide(place)
        told["paths"], told["reasons"] = [list(path) for path in decision.paths], decision.reasons
        for row in told["ports"]:
            row["used"] = any(path[:2] == [row["device"], row["port"]] for path in told["paths"])
        for gpu in _gpus() if place.provider != "soft" else ():
            told["gpus"][gpu] = _look(root, gpu).near
    except EpcommError as error:
        told["problem"] = str(error)
    return told


def _gpus() -> list[str]:
    try:
        return sorted(os.listdir(_GPUS))
    except OSError:
        return []


def _look(root: str | Path, gpu: str | None = None) -> _nics.Place:
    return _nics.look(root, gpu=gpu, soft_ports=config.get("EPCOMM_SOFTHCA_PORTS"))


def _local() -> tuple[int, int]:
    """This rank among those of its host, as far as a launcher has said."""
    try:
        number, rank = config.get("LOCAL_WORLD_SIZE") or 1, config.get("LOCAL_RANK") or 0
    except EpcommError:
        return 0, 1
    return min(rank, number - 1), number


def _decide(place: _nics.Place) -> _nics.Decision:
    rank, number = _local()
    return _nics.decide(place, [place.told()] * number, rank)


def _port(place: _nics.Place, found: _nics.Found) -> dict[str, Any]:
    device, port = found.device, found.port
    return {
        "device": device.name,
        "port": port.number,
        "driver": device.driver,
        "numa_node": None if device.numa_node < 0 else device.numa_node,
        "state": port.state,
        "link_layer": port.link_layer,
        "rate_gbps": port.rate_gbps,
        "gid_index": found.gid.index if found.gid else None,
        "gid": str(found.gid) if found.gid and place.provider != "soft" else None,
        "distance": place.distance.get(device.name) or None,
        "used": False,
        "refused": found.refused or None,
    }


def print_tables(told: dict[str, Any], file: Any) -> None:
    """The same for people."""
    if told["ports"]:
        rows = [
            (f"{row['device']}:{row['port']}", row["driver"], row["state"], row["link_layer"],
             f"{row['rate_gbps']:g} Gb/s" if row["rate_gbps"] else "",
             "" if row["numa_node"] is None else row["numa_node"], row["gid"] or "",
             "used" if row["used"] else "not used")
            for row in told["ports"]
        ]  # fmt: skip
        columns = ("port", "driver", "state", "link", "rate", "NUMA", "GID", "decision")
        _console.print_table("RDMA ports", columns, rows, file=file)
    reasons = told["reasons"] or [told["problem"] or ""]
    reasons += [f"GPU {gpu}: nearest: {', '.join(near) or 'none'}" for gpu, near in told["gpus"].items()]
    _console.print_table("RDMA: what this rank would use, and why", ("decision",), [(text,) for text in reasons],
                         file=file)


def plan(num_ranks: int, num_channels: int | None, root: str | Path = "/sys") -> dict[str, Any]:
    """Queue pairs of rank 0 among ranks on hosts like this one; ``num_channels``: default one per port and thread.

    Raises
    ------
    EpcommError
        There is no port to use, or a variable is malformed.
    """
    paths = _decide(_look(root)).paths
    if num_channels is None:
        threads = config.get("EPCOMM_NUM_THREADS") or _create.default_threads(_local()[1])
        num_channels = min(256, max(threads, len(paths)))
    return {
        "num_ranks": num_ranks,
        "num_channels": num_channels,
        "paths": [path._asdict() for path in paths],
        "rows": _nics.plan(paths, num_ranks, num_channels),
    }


def print_plan(made: dict[str, Any], file: Any) -> None:
    """The plan for people."""
    title = f"queue pairs of rank 0 of {made['num_ranks']}, {made['num_channels']} channels of data"
    caption = ("peers are taken to be like this machine; remote_path counts the peer's ports; the control channel "
               "carries credits")
    _console.print_table(title, _PLAN, [[row[name] for name in _PLAN] for row in made["rows"]], caption=caption,
                         right=(0, 1, 4, 5, 6), file=file)
