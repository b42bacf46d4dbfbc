"""Which NIC ports a rank uses: what is there, what of it is wanted and works, what is near, who else is as near.

:func:`look` reads this machine, :meth:`Place.told` is what the ranks exchange, :func:`decide` gives a rank its ports.
All three are plain functions of a folder (``/sys`` or a copy), of variables and of what the other ranks told.
"""

import ipaddress
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from epcomm import _sysfs, config
from epcomm._registry import BACKENDS
from epcomm._sysfs import Device, Gid, Port
from epcomm.errors import BackendUnavailableError, InvalidArgumentError

log = logging.getLogger("epcomm")

# How far a NIC is from a GPU or from the CPUs of a rank, the nearest first.
DISTANCES = ("same PCIe switch", "same root complex", "same NUMA node", "another NUMA node", "unknown")
_MLX5 = "mlx5_core"
_USABLE_STATES = ("ACTIVE", "ACTIVE_DEFER")
_SLOW = 0.5  # of the fastest port's rate: slower ones would hold up the channels that take them in turn


class NicPath(NamedTuple):
    """One port to use; what backends take."""

    device: str
    port: int
    gid_index: int


@dataclass
class Found:
    """One port and what was decided about it."""

    device: Device
    port: Port
    gid: Gid | None = None
    refused: str = ""  # why it cannot be or is not to be used

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.device.name} port {self.port.number}" if self.port.number else self.device.name

    @property
    def path(self) -> NicPath:
        """For backends."""
        return NicPath(self.device.name, self.port.number, self.gid.index if self.gid else -1)


@dataclass
class Place:
    """What one rank sees of its machine."""

    host: str
    provider: str  # "verbs" or "soft"
    found: list[Found]
    near: list[str]  # devices equally near, nearer than all others
    distance: dict[str, str]  # by device, for people
    user_map: list[tuple[int, int, list["Item"]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wanted: str = ""  # the filter

    @property
    def usable(self) -> list[Found]:
        """Ports that may be used."""
        return [found for found in self.found if not found.refused]

    def told(self) -> dict[str, Any]:
        """What the other ranks need to know; JSON can hold it."""
        return {"host": self.host, "near": self.near, "shared": self.provider != "soft"}

    def problem(self) -> str | None:
        """Why this rank has no port to use, with the reason against each; None if it has."""
        if self.usable:
            return None
        if not self.found:
            return ("no RDMA device: /sys/class/infiniband is empty (no NIC, no driver, or a container without it)"
                    + (f"; EPCOMM_IB_HCA={self.wanted!r}" if self.wanted else "")
                    + "; EPCOMM_IB_PROVIDER=soft shows what a software model would have")
        return "no usable RDMA port: " + "; ".join(f"{found.name}: {found.refused}" for found in self.found)


@dataclass
class Decision:
    """The ports of one rank, and why."""

    paths: list[NicPath]
    reasons: list[str]
    local_rank: int  # among the ranks of its host


# ---- the filter


class Item(NamedTuple):
    """``name[:port]``; port 0 is any."""

    name: str
    port: int

    def __str__(self) -> str:
        return self.name + (f":{self.port}" if self.port else "")

    def takes(self, device: str, port: int, exact: bool) -> bool:
        """Whether a port is meant."""
        same = device == self.name if exact else device.startswith(self.name)
        return same and self.port in (0, port)


class Filter(NamedTuple):
    """A parsed device list."""

    text: str
    exclude: bool
    exact: bool
    items: tuple[Item, ...]

    def matches(self, device: str, port: int) -> list[Item]:
        return [item for item in self.items if item.takes(device, port, self.exact)]

    def takes(self, device: str, port: int) -> bool:
        """Whether a port is wanted."""
        return not self.items or bool(self.matches(device, port)) != self.exclude


_ITEM = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)(?:\s*:\s*([0-9]+))?")


def _item(source: str, text: str, part: str) -> Item:
    match = _ITEM.fullmatch(part)
    if not match or (match[2] and not 1 <= int(match[2]) <= 255):
        raise InvalidArgumentError(f"{source}={text!r}: {part!r} is no device or device:port (ports count from 1)")
    return Item(match[1], int(match[2] or 0))


def parse_filter(text: str | None, source: str = "EPCOMM_IB_HCA") -> Filter:
    """Parse a device list as NCCL users write it.

    ``mlx5_1`` takes every device whose name begins so, ``=mlx5_1`` that one, ``mlx5_1:2`` only its second port.
    Lists are separated by commas; blanks do not count. ``^`` in front of the list turns it into those not to take,
    ``=`` makes all its names whole ones, ``^=`` both. The same marks may be repeated in front of each name; others
    than the first name's are an error, since nobody agrees on what they mean.
    """
    text = text or ""
    items: list[Item] = []
    marks: str | None = None
    for part in filter(None, map(str.strip, text.split(","))):
        name = part.lstrip("^=")
        mark = part[: len(part) - len(name)]
        name = name.lstrip()
        if mark not in ("", "^", "=", "^="):
            raise InvalidArgumentError(f"{source}={text!r}: {mark!r} before {name!r}; allowed: ^, = or ^=")
        if marks is None:
            marks = mark
        elif mark not in ("", marks):
            raise InvalidArgumentError(
                f"{source}={text!r}: {mark!r} before {name!r}, but the list began with {marks or 'no mark'!r}; "
                "the marks in front of the first name hold for the whole list"
            )
        items.append(_item(source, text, name))
    marks = marks or ""
    return Filter(text.strip(), "^" in marks, "=" in marks, tuple(items))


def parse_map(text: str | None, source: str = "EPCOMM_IB_MAP") -> list[tuple[int, int, list[Item]]]:
    """Parse ``0=mlx5_0,mlx5_1; 1-3=mlx5_2:1; *=mlx5_3``.

    Returns (first rank of the host, last, whole names), the narrowest rows first: the first that fits a rank is its.
    """
    text = text or ""
    rows = []
    for row in filter(None, map(str.strip, text.split(";"))):
        match = re.fullmatch(r"(\*|[0-9]+)(?:\s*-\s*([0-9]+))?\s*=([^=]+)", row)
        if not match or (match[1] == "*" and match[2]) or (match[2] and int(match[2]) < int(match[1])):
            raise InvalidArgumentError(
                f"{source}={text!r}: {row!r}; allowed: rank=device[:port],..., where rank is a number, first-last or "
                "* among the ranks of a host; rows are separated by semicolons"
            )
        first, last = (0, config.MAX_RANKS) if match[1] == "*" else (int(match[1]), int(match[2] or match[1]))
        rows.append((first, last, [_item(source, text, part.strip()) for part in match[3].split(",")]))
    return sorted(rows, key=lambda row: row[1] - row[0])


# ---- GIDs


def choose_gid(port: Port, index: int | None, version: int | None, family: str | None) -> Gid | None:
    """The entry of a port's GID table to use.

    An index is taken as it is. Otherwise, on Ethernet: RoCE v2 before v1; addresses that can be routed before
    link-local ones; IPv4 before IPv6; then the lowest index. InfiniBand needs none.

    Raises
    ------
    LookupError
        There is none; the text says what there is.
    """
    there = ", ".join(map(str, port.gids)) or "none"
    if index is not None:
        for gid in port.gids:
            if gid.index == index:
                return gid
        raise LookupError(f"no GID of index {index} (EPCOMM_IB_GID_INDEX); it has: {there}")
    if port.link_layer != "Ethernet":
        return None
    fitting = [gid for gid in port.gids
               if gid.roce_version in ((version,) if version else (1, 2)) and family in (None, gid.family)]
    if not fitting:
        wish = f"RoCE v{version} (EPCOMM_IB_ROCE_VERSION)" if version else "RoCE"
        wish += f" over {family} (EPCOMM_IB_ADDR_FAMILY)" if family else ""
        raise LookupError(f"no GID for {wish}; it has: {there}")
    return min(fitting, key=lambda gid: (-gid.roce_version, gid.is_link_local, gid.family != "ipv4", gid.index))


# ---- distance


def distance(a: Sequence[str], b: Sequence[str], same_numa: bool | None) -> tuple[int, int]:
    """(index into DISTANCES, bridges from ``a`` up to the first shared one); lower is nearer."""
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    if common >= 2:
        return 0, len(a) - common
    if common == 1:
        return 1, 0  # how deep a NIC sits says nothing any more
    return (4 if same_numa is None else 2 if same_numa else 3), 0


def _numa_nodes(root: Path, cpus: Iterable[int]) -> set[int]:
    """NUMA nodes of CPUs; empty if the kernel does not tell or they are on all nodes."""
    wanted, nodes, number = set(cpus), set(), 0
    for path in sorted((root / "devices" / "system" / "node").glob("node[0-9]*")):
        number += 1
        for part in _sysfs.read(path / "cpulist").split(","):
            first, _, last = part.partition("-")
            if first.isdecimal() and wanted & set(range(int(first), int(last or first) + 1)):
                nodes.add(int(path.name[4:]))
    return nodes if len(nodes) < number else set()


def _distances(root: Path, devices: list[Device], gpu: str | None, cpus: Iterable[int]) -> dict[str, tuple[int, int]]:
    place: tuple[str, ...] = ()
    if gpu is not None:
        hardware = root / "bus" / "pci" / "devices" / gpu.lower()
        place, numa = _sysfs.place_of(root, hardware), _sysfs.read(hardware / "numa_node")
        nodes = {int(numa)} if numa.isdecimal() else set()
    else:
        nodes = _numa_nodes(root, cpus)
    return {
        device.name: distance(place, device.place,
                              device.numa_node in nodes if nodes and device.numa_node >= 0 else None)
        for device in devices
    }


# ---- looking


def host_id() -> str:
    """What ranks of one host, in whatever containers, and of it alone, have in common: this boot of its kernel."""
    return _sysfs.read(Path("/proc/sys/kernel/random/boot_id")) or os.uname().nodename


def look(
    root: str | Path = "/sys",
    *,
    gpu: str | None = None,
    cpus: Iterable[int] | None = None,
    mlx5_only: bool = False,
    soft_ports: int = 2,
    environ: Mapping[str, str] | None = None,
) -> Place:
    """What this rank may use.

    Parameters
    ----------
    root : path
        ``/sys``, or a folder that looks like it.
    gpu : str, optional
        PCI address of the GPU whose memory travels, such as ``0000:17:00.0``. Without one the CPUs count.
    cpus : ints, optional
        CPUs of this rank; default those it may run on.
    mlx5_only : bool
        Whether only devices of that driver serve, as for work requests that a GPU writes; the software HCA does too.
    soft_ports : int
        Number of the software HCA's devices, where that was asked for.
    environ : mapping, optional
        Variables; default the process's own.

    Raises
    ------
    InvalidArgumentError
        A variable is malformed, or names no device that is there.
    """
    root = Path(root)
    provider = config.get("EPCOMM_IB_PROVIDER", environ)
    wanted = parse_filter(config.get("EPCOMM_IB_HCA", environ))
    rows = parse_map(config.get("EPCOMM_IB_MAP", environ))
    index = config.get("EPCOMM_IB_GID_INDEX", environ)
    version = config.get("EPCOMM_IB_ROCE_VERSION", environ)
    family = config.get("EPCOMM_IB_ADDR_FAMILY", environ)
    if provider == "soft":
        port = Port(1, "ACTIVE", "LinkUp", "soft", 0.0, (Gid(0, ipaddress.IPv6Address(0), 0),))
        devices = [Device(f"soft{i}", "soft", "CA", (), -1, (port,)) for i in range(soft_ports)]
        index = 0
    else:
        devices = _sysfs.devices(root)
    found = [Found(device, port) for device in devices for port in device.ports]
    place = Place(host_id(), "soft" if provider == "soft" else "verbs", found, [], {}, rows, wanted=wanted.text)
    _check_names(found, wanted, rows, place)
    for one in found:
        one.refused = _refusal(one, wanted, provider == "mlx5" or (mlx5_only and provider != "soft"))
        try:
            one.gid = None if one.refused else choose_gid(one.port, index, version, family)
        except LookupError as error:
            one.refused = str(error)
    if not rows and (wanted.exclude or not wanted.items):
        _refuse_odd_ones(place.usable)
    usable = list({one.device.name: one.device for one in place.usable}.values())
    far = _distances(root, usable, gpu, os.sched_getaffinity(0) if cpus is None else cpus)
    nearest = min(far.values(), default=None)
    place.near = [device.name for device in usable if far[device.name] == nearest]
    whom = f"GPU {gpu}" if gpu else "the CPUs of this rank"
    for name, (kind, _) in far.items():
        place.distance[name] = "" if kind == 4 else f"{DISTANCES[kind]} {'as' if kind < 3 else 'than'} {whom}"
    return place


def _check_names(found: list[Found], wanted: Filter, rows: list[tuple[int, int, list[Item]]], place: Place) -> None:
    """A name that is nowhere is a mistake: an error if it leaves nothing or the map wants it, else a note."""
    ports = [(one.device.name, one.port.number) for one in found]
    there = ", ".join(f"{device}:{port}" for device, port in ports)
    if not ports:
        return
    if not any(wanted.takes(device, port) for device, port in ports):
        raise InvalidArgumentError(f"EPCOMM_IB_HCA={wanted.text!r} takes none of the devices here: {there}")
    for item in wanted.items:
        if not any(item.takes(device, port, wanted.exact) for device, port in ports):
            place.notes.append(f"EPCOMM_IB_HCA: {str(item)!r} matches none of the devices here: {there}")
    for item in (item for row in rows for item in row[2]):
        if not any(item.takes(device, port, True) for device, port in ports):
            raise InvalidArgumentError(f"EPCOMM_IB_MAP names {str(item)!r}; the devices here: {there}")


def _refusal(one: Found, wanted: Filter, mlx5_only: bool) -> str:
    device, port = one.device, one.port
    if not port.number:
        return "the device has no port"
    if not wanted.takes(device.name, port.number):
        return f"filtered: EPCOMM_IB_HCA={wanted.text!r}"
    if device.node_type == "RNIC":
        return "iWARP, whose queue pairs need a connection manager"
    if device.node_type != "CA":
        return f"a node of type {device.node_type}, no channel adapter"
    if mlx5_only and device.driver.partition(".")[0] != _MLX5:
        return f"driver {device.driver}, needed: {_MLX5}"
    if port.state not in _USABLE_STATES:
        return f"port is {port.state} (link: {port.physical}), not ACTIVE"
    if port.link_layer not in ("Ethernet", "InfiniBand", "soft"):
        return f"link layer {port.link_layer}"
    return ""


def _refuse_odd_ones(usable: list[Found]) -> None:
    """Ports that nobody asked for by name, of another network or much slower than the others."""
    if not usable:
        return
    fastest = max(usable, key=lambda one: (one.port.rate_gbps, one.port.link_layer == "InfiniBand"))
    best = fastest.port
    for one in usable:
        port = one.port
        if port.link_layer != best.link_layer:
            one.refused = f"{port.link_layer} beside {fastest.name} ({best.link_layer}); EPCOMM_IB_HCA can name it"
        elif port.rate_gbps < _SLOW * best.rate_gbps:
            one.refused = (f"{port.rate_gbps:g} Gb/s beside {fastest.name} ({best.rate_gbps:g} Gb/s); "
                           "EPCOMM_IB_HCA can name it")


# ---- deciding


def decide(place: Place, told: Sequence[Mapping[str, Any]], rank: int) -> Decision:
    """The ports of this rank, given what all ranks told, in rank order. Every rank comes to the same picture.

    A user map goes first. Otherwise the devices that are nearest are divided among the ranks of the host to which
    they are equally near: each gets its share, at least one, the least used first. All their active ports are used.

    Raises
    ------
    BackendUnavailableError
        There is none; the text has the reason against each port.
    InvalidArgumentError
        The map has no row for this rank.
    """
    problem = place.problem()
    if problem is not None:
        raise BackendUnavailableError(problem)
    local = [other for other in range(len(told)) if told[other]["host"] == told[rank]["host"]]
    local_rank = local.index(rank)
    reasons = list(place.notes)
    if place.user_map:
        chosen = _mapped(place, local_rank)
        reasons.append(f"EPCOMM_IB_MAP decides for rank {local_rank} of this host")
    else:
        names = _shares(told, local)[rank]
        chosen = [one for one in place.usable if one.device.name in names]
        if len(place.near) > len(names):
            reasons.append(f"rank {local_rank} of {len(local)} on this host: of {', '.join(place.near)}, which are "
                           f"equally near, its share is {', '.join(names)}")
    for one in place.found:
        reasons.append(f"{one.name}: {_verdict(place, one, one in chosen)}")
    for reason in reasons:
        log.info("rank %d: %s", rank, reason)
    return Decision([one.path for one in chosen], reasons, local_rank)


def _verdict(place: Place, one: Found, used: bool) -> str:
    where = place.distance.get(one.device.name, "")
    if used:
        facts = ", ".join(filter(None, ["" if one.gid is None or place.provider == "soft" else str(one.gid), where]))
        return "used" + (f" ({facts})" if facts else "")
    if one.refused:
        return f"not used: {one.refused}"
    if place.user_map:
        return "not used: EPCOMM_IB_MAP gives it to others"
    if one.device.name in place.near:
        return "not used: another rank's share"
    return "not used: others are nearer" + (f" ({where})" if where else "")


def _mapped(place: Place, local_rank: int) -> list[Found]:
    row = next((row for row in place.user_map if row[0] <= local_rank <= row[1]), None)
    if row is None:
        raise InvalidArgumentError(f"EPCOMM_IB_MAP has no row for rank {local_rank} of this host; *=... is for all")
    chosen: list[Found] = []
    for item in row[2]:
        named = [one for one in place.found if item.takes(one.device.name, one.port.number, True)]
        if all(one.refused for one in named):
            raise BackendUnavailableError(
                f"EPCOMM_IB_MAP gives {str(item)!r} to rank {local_rank} of this host, but it cannot be used: "
                + "; ".join(f"{one.name}: {one.refused}" for one in named))
        chosen += [one for one in named if not one.refused and one not in chosen]
    return chosen


def _shares(told: Sequence[Mapping[str, Any]], local: Sequence[int]) -> dict[int, list[str]]:
    """Devices of each rank of a host."""
    used: dict[str, int] = {}
    shares = {}
    for rank in local:
        near = list(told[rank]["near"])
        if not told[rank]["shared"]:  # every process has its own software HCA
            shares[rank] = near
            continue
        alike = [other for other in local if told[other]["near"] == told[rank]["near"]]
        position, number = alike.index(rank), len(near)
        share = max(1, (position + 1) * number // len(alike) - position * number // len(alike))
        taken = sorted(near, key=lambda name: used.get(name, 0))[:share]  # stable: in the order of names
        shares[rank] = [name for name in near if name in taken]
        for name in taken:
            used[name] = used.get(name, 0) + 1
    return shares


# ---- the plan


def plan(
    paths: Sequence[NicPath], num_ranks: int, num_channels: int, rank: int = 0, remote_paths: int | None = None
) -> list[dict[str, Any]]:
    """Queue pairs that a rank would have, as ``include/epcomm/plan.h`` lays them out.

    ``remote_paths``: number of ports of each peer, default as many as here.
    """
    return [
        {
            "peer": peer,
            "channel": channel,
            "kind": "control" if channel == num_channels else "data",
            **paths[channel % len(paths)]._asdict(),
            "remote_path": channel % (remote_paths or len(paths)),
        }
        for peer in range(num_ranks)
        for channel in range(num_channels + 1)
        if peer != rank
    ]


def model_note(backend: str) -> str | None:
    """What every output about a backend must say if its NICs are the software HCA; ``None`` else."""
    needs_nics = any(row.name == backend and row.needs_nics for row in BACKENDS)
    if not needs_nics or config.get("EPCOMM_IB_PROVIDER") != "soft":
        return None
    return "over the software HCA (EPCOMM_IB_PROVIDER=soft), which is not a network"
