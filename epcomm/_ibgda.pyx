# cython: language_level=3
"""Backend ``ibgda``: memory of several hosts, moved by NICs whose queues the computing threads write themselves."""

import json

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from epcomm cimport _cpp
from epcomm._backend cimport Backend as BackendBase
from epcomm._cpp cimport check

from epcomm import config
from epcomm.errors import InvalidArgumentError


cdef extern from "ibgda/factory.hpp" namespace "epcomm::common" nogil:
    cppclass VerbsProvider:
        pass

    struct RdmaPath:
        string device
        int port
        int gid_index

    struct RdmaOptions:
        shared_ptr[VerbsProvider] provider
        vector[RdmaPath] paths
        int num_ranks
        int rank
        int num_channels
        uint32_t depth
        cbool relaxed_ordering
        int mtu
        int traffic_class
        int service_level


cdef extern from "ibgda/factory.hpp" namespace "epcomm::softhca" nogil:
    struct SoftHcaOptions:
        int num_ports
        double gbps
        double latency_us
        uint64_t seed
        string faults
        int64_t spin_us
        cbool null_mover

    _cpp.Status open_provider(const string& name, const SoftHcaOptions& soft, shared_ptr[VerbsProvider]* out)


cdef extern from "ibgda/factory.hpp" namespace "epcomm::ibgda" nogil:
    struct Options:
        RdmaOptions rdma
        cbool failover
        cbool shared
        string folder
        int64_t spin_us
        cbool use_pidfd

    struct Stats:
        uint64_t requests
        uint64_t doorbells
        uint64_t bytes
        uint64_t merged
        uint64_t completions
        uint64_t probes
        uint64_t replayed
        uint64_t moved
        uint64_t full

    cppclass IbgdaBackend:
        string plan_json()
        Stats stats()

    _cpp.Status c_probe "epcomm::ibgda::probe"(const string& provider)
    unique_ptr[IbgdaBackend] create(const Options& options)
    unique_ptr[_cpp.Backend] as_backend(unique_ptr[IbgdaBackend] backend)


def probe() -> None:
    """Do nothing if this backend can run here over the provider that ``EPCOMM_IB_PROVIDER`` names.

    Raises
    ------
    BackendUnavailableError
        It cannot; the text is the reason.
    """
    cdef string provider = _provider(None)
    with nogil:
        check(c_probe(provider))


def _provider(name: str | None) -> bytes:
    """``verbs`` or ``soft``; the software HCA is never chosen silently."""
    if name is None:
        name = "soft" if config.get("EPCOMM_IB_PROVIDER") == "soft" else "verbs"
    return name.encode()


cdef class Backend(BackendBase):
    """One rank's end of the backend: ``alloc_heap``, ``export_info``, ``connect``, use, ``close``.

    Parameters
    ----------
    options : dict
        ``num_ranks``, ``rank``, ``num_channels`` (of data), ``provider`` (``verbs`` or ``soft``; default from
        ``EPCOMM_IB_PROVIDER``) and ``paths``, a list of (device, port, GID index): what queue pairs are made for.
        ``depth`` (of send queues; default ``EPCOMM_IB_DEPTH``) and ``shared`` (every queue pair by the path for many
        threads; else those of control words only), ``failover`` (a spare queue pair on another port for each, and
        replay; default ``EPCOMM_IB_FAILOVER``).
        ``shm_dir``, ``spin_us`` and ``use_pidfd`` as for ``shm``. Other keys are left to others.
    """

    cdef IbgdaBackend* own

    def __init__(self, options: dict | None = None) -> None:
        cdef Options made
        cdef unique_ptr[IbgdaBackend] created
        cdef RdmaPath path
        cdef SoftHcaOptions soft
        cdef string provider
        self.fresh()
        options = options or {}
        spin_us = options.get("spin_us")
        if spin_us is not None and not 0 <= spin_us <= 1_000_000:
            raise InvalidArgumentError(f"spin_us={spin_us!r}: expected microseconds from 0 to 1000000")
        made.rdma.num_ranks = options.get("num_ranks", 1)
        made.rdma.rank = options.get("rank", -1)
        made.rdma.num_channels = options.get("num_channels", 1)
        made.rdma.depth = options.get("depth", config.get("EPCOMM_IB_DEPTH"))
        made.rdma.mtu = config.get("EPCOMM_IB_MTU") or 0
        made.rdma.traffic_class = config.get("EPCOMM_IB_TC")
        made.rdma.service_level = config.get("EPCOMM_IB_SL")
        made.rdma.relaxed_ordering = config.get("EPCOMM_IB_RELAXED_ORDERING") != 0
        for device, port, gid_index in options.get("paths", ()):
            path.device, path.port, path.gid_index = str(device).encode(), port, gid_index
            made.rdma.paths.push_back(path)
        made.failover = options.get("failover", config.get("EPCOMM_IB_FAILOVER") == "replay")
        made.shared = bool(options.get("shared", False))
        made.folder = str(options.get("shm_dir") or config.get("EPCOMM_SHM_DIR") or "").encode()
        made.spin_us = -1 if spin_us is None else spin_us
        made.use_pidfd = bool(options.get("use_pidfd", True))
        if made.rdma.paths.size():
            provider = _provider(options.get("provider"))
            soft.num_ports = config.get("EPCOMM_SOFTHCA_PORTS")
            soft.gbps = config.get("EPCOMM_SOFTHCA_GBPS")
            soft.latency_us = config.get("EPCOMM_SOFTHCA_LATENCY_US")
            soft.seed = config.get("EPCOMM_SOFTHCA_SEED")
            soft.faults = (config.get("EPCOMM_SOFTHCA_FAULTS") or "").encode()
            soft.spin_us = made.spin_us
            soft.null_mover = config.get("EPCOMM_SOFTHCA_MOVER") == "null"
            with nogil:
                check(open_provider(provider, soft, &made.rdma.provider))
        with nogil:
            created = move(create(made))
            self.own = created.get()
            self.impl = move(as_backend(move(created)))
        self.made()

    def plan(self) -> list[dict]:
        """The queue pairs of this rank, one dict each."""
        self.made()
        text = self.own.plan_json().decode()
        return json.loads(text)["rows"] if text else []

    def stats(self) -> dict:
        """What the threads of this rank did so far: ``requests``, ``doorbells``, ``full`` (waits for room) and more."""
        self.made()
        cdef Stats stats = self.own.stats()
        return stats
