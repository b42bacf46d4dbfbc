"""RDMA devices as the kernel's text files tell them. Nothing is opened, and any folder can stand in for ``/sys``."""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

_GID_BYTES = 16
_LAST_GID = 255  # what an address handle can name; software devices list a thousand


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    address: ipaddress.IPv6Address
    roce_version: int  # 0: InfiniBand

    @property
    def family(self) -> str:
        """``ipv4`` for a mapped address, else ``ipv6``."""
        return "ipv6" if self.address.ipv4_mapped is None else "ipv4"

    @property
    def is_link_local(self) -> bool:
        """Known on its own link only: ``fe80::/10``, ``169.254.0.0/16``."""
        return (self.address.ipv4_mapped or self.address).is_link_local

    def __str__(self) -> str:
        kind = f" RoCE v{self.roce_version}" if self.roce_version else ""
        return f"GID {self.index}{kind} {self.address.ipv4_mapped or self.address}"


@dataclass(frozen=True)
class Port:
    """One port of a device."""

    number: int
    state: str  # "ACTIVE", "DOWN", ...
    physical: str  # "LinkUp", "Disabled", ...
    link_layer: str  # "Ethernet" or "InfiniBand"
    rate_gbps: float
    gids: tuple[Gid, ...]


NO_PORT = Port(0, "absent", "absent", "unspecified", 0.0, ())


@dataclass(frozen=True)
class Device:
    """One RDMA device."""

    name: str
    driver: str
    node_type: str  # "CA", "RNIC", ...
    place: tuple[str, ...]  # folders of the device below /sys/devices, empty for virtual ones
    numa_node: int  # -1: unknown
    ports: tuple[Port, ...]  # NO_PORT alone where it has none


def read(path: Path) -> str:
    """Text of a file without blanks around it; empty if it cannot be read, as empty GIDs' types cannot."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _numbered(folder: Path) -> list[int]:
    return sorted(int(name) for name in _names(folder) if name.isdecimal())


def natural(name: str) -> list[str | int]:
    """Key that puts ``mlx5_10`` behind ``mlx5_9``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def devices(root: str | Path = "/sys") -> list[Device]:
    """All RDMA devices, by name; an empty list where the kernel has none."""
    folder = Path(root) / "class" / "infiniband"
    return [_device(Path(root), folder / name) for name in sorted(_names(folder), key=natural)]


def _device(root: Path, folder: Path) -> Device:
    hardware, ports = folder / "device", folder / "ports"
    numa = read(hardware / "numa_node")
    return Device(
        name=folder.name,
        driver=_driver(folder),
        node_type=read(folder / "node_type").partition(":")[2].strip() or "CA",
        place=place_of(root, hardware),
        numa_node=int(numa) if numa.isdecimal() else -1,
        ports=tuple(_port(ports / str(number), number) for number in _numbered(ports)) or (NO_PORT,),
    )


def _driver(folder: Path) -> str:
    driver = folder / "device" / "driver"
    if driver.is_symlink() or driver.exists():
        return driver.resolve().name
    # Software devices have no hardware behind them; rxe tells its network interface.
    return "rdma_rxe" if read(folder / "parent") else "unknown"


def place_of(root: Path, hardware: Path) -> tuple[str, ...]:
    """Where a piece of hardware sits: its folders below ``/sys/devices``, the root complex first."""
    if not hardware.exists():
        return ()
    parts = hardware.resolve().parts
    base = (root / "devices").resolve().parts
    return parts[len(base) :] if parts[: len(base)] == base and parts[len(base) :][:1] != ("virtual",) else ()


def _port(folder: Path, number: int) -> Port:
    rate = read(folder / "rate").split()
    return Port(
        number=number,
        state=_word(read(folder / "state")),
        physical=_word(read(folder / "phys_state")),
        link_layer=read(folder / "link_layer") or "unspecified",
        rate_gbps=_float(rate[0]) if rate else 0.0,
        gids=tuple(_gids(folder)),
    )


def _word(text: str) -> str:
    """``ACTIVE`` of ``4: ACTIVE``."""
    return (text.partition(":")[2] or text).strip() or "unknown"


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _gids(folder: Path) -> list[Gid]:
    found = []
    for index in _numbered(folder / "gids"):
        if index > _LAST_GID:
            break
        digits = read(folder / "gids" / str(index)).replace(":", "")
        if len(digits) != 2 * _GID_BYTES or not digits.strip("0"):
            continue
        try:
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
        except ValueError:
            continue
        kind = read(folder / "gid_attrs" / "types" / str(index))
        version = 2 if kind == "RoCE v2" else 1 if "RoCE" in kind else 0
        found.append(Gid(index, address, version))
    return found
