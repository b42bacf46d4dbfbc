"""Fake sysfs trees with RDMA devices, GPUs and NUMA nodes."""

import ipaddress
from pathlib import Path

LINK_LOCAL, IPV4, GLOBAL = "fe80::1", "::ffff:10.0.0.1", "2001:db8::1"
IPV4_LINK_LOCAL = "::ffff:169.254.7.7"
# What a RoCE port of two addresses shows, as mlx5 lists it.
ROCE_GIDS = [(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")]


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


class Sysfs:
    """A folder that looks like ``/sys``."""

    def __init__(self, root):
        self.root = Path(root)
        (self.root / "class" / "infiniband").mkdir(parents=True)

    def _hardware(self, place, numa, driver=None):
        """A PCI device at ``pci0000:16/0000:16:01.0/0000:17:00.0``; its folder."""
        folder = self.root / "devices" / place
        _write(folder / "numa_node", numa)
        link = self.root / "bus" / "pci" / "devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(folder)
        if driver:
            target = self.root / "bus" / "pci" / "drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(target)
        return folder

    def gpu(self, place, numa=0):
        """PCI address of a new GPU."""
        return self._hardware(place, numa, "nvidia").name

    def node(self, number, cpus):
        """A NUMA node with CPUs such as ``0-3,8``."""
        _write(self.root / "devices" / "system" / "node" / f"node{number}" / "cpulist", cpus)

    def nic(self, name, place=None, *, ports=1, driver="mlx5_core", numa=0, state="4: ACTIVE", physical="5: LinkUp",
            link_layer="Ethernet", rate="200 Gb/sec (4X HDR)", gids=None, node_type="1: CA"):
        """A new device; ``state`` may be a list, one for each port. Without a place it is a virtual one."""
        if place is None:
            folder = self.root / "devices" / "virtual" / "infiniband" / name
            _write(folder / "parent", "eth0")
        else:
            hardware = self._hardware(place, numa, driver)
            folder = hardware / "infiniband" / name
            folder.mkdir(parents=True)
            (folder / "device").symlink_to(hardware)
        (self.root / "class" / "infiniband" / name).symlink_to(folder)
        _write(folder / "node_type", node_type)
        for number in range(1, ports + 1):
            port = folder / "ports" / str(number)
            _write(port / "state", state if isinstance(state, str) else state[number - 1])
            _write(port / "phys_state", physical)
            _write(port / "link_layer", link_layer)
            _write(port / "rate", rate)
            (port / "gids").mkdir()
            table = gids if gids is not None else ROCE_GIDS if link_layer == "Ethernet" else [("fe80::7", "IB/RoCE v1")]
            for index, (address, kind) in enumerate(table):
                self.gid(name, number, index, address, kind)
            _write(port / "gids" / str(len(table)), ":".join(["0000"] * 8))
        return self

    def gid(self, name, port, index, address, kind):
        """Set one entry of a GID table."""
        folder = self.root / "class" / "infiniband" / name / "ports" / str(port)
        _write(folder / "gids" / str(index), ipaddress.IPv6Address(address).exploded)
        _write(folder / "gid_attrs" / "types" / str(index), kind)
