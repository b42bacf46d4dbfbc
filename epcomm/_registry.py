"""The one list of backends. Order is preference; setup.py, tests and ``info`` read these rows.

This file imports nothing from the package, so that ``setup.py`` can read it before anything is built.
"""

from typing import NamedTuple


class Backend(NamedTuple):
    """One backend: its word names its folder, module, namespace, variables and test id."""

    name: str
    summary: str
    headers: tuple[str, ...] = ()  # looked for by setup.py; a missing one skips the backend
    libraries: tuple[str, ...] = ()
    needs_cuda: bool = False
    needs_mlx5: bool = False  # of NICs only those; the software HCA is one
    needs_nics: bool = False  # goes through NICs, or the software HCA: _nics.py chooses ports, build links RDMA parts
    replays: bool = False  # can carry on over another port (EPCOMM_IB_FAILOVER)
    pair: bool = False  # two others, near_far, joined by _pair.pyx: nothing of its own to build


BACKENDS = (
    Backend("nvlink", "memory of GPUs of one host, driven by their kernels over NVLink or PCIe", needs_cuda=True),
    Backend("shm", "shared memory of one host, driven by host threads"),
    Backend("shm_ibrc", "shared memory inside a node, RDMA posted by a proxy thread between nodes", needs_nics=True,
            pair=True),
    Backend("ibrc", "RDMA between hosts, posted by a proxy thread on behalf of host threads",
            headers=("infiniband/verbs.h",), needs_nics=True),
    Backend("shm_ibgda", "shared memory inside a node, work requests of the computing threads between nodes",
            needs_mlx5=True, needs_nics=True, replays=True, pair=True),
    Backend("ibgda", "RDMA between hosts, work requests built by the threads that compute",
            headers=("infiniband/verbs.h",), needs_mlx5=True, needs_nics=True, replays=True),
)

# What `ab` compares unless it is told otherwise.
CONTROL_PATHS = ("ibrc", "ibgda")

# Words for the bits of epcomm::Caps in include/epcomm/backend.hpp, the lowest first.
CAPABILITIES = (
    "host_put", "device_put", "peer_load_store", "intra_node", "inter_node", "host_memory", "device_memory",
    "needs_progress", "graph_capture",
)  # fmt: skip


def capability_names(caps: int) -> list[str]:
    """Words for the bits of ``Backend.caps``."""
    return [word for bit, word in enumerate(CAPABILITIES) if caps >> bit & 1]
