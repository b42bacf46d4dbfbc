# cython: language_level=3
"""Backend ``ibgda``: memory of several hosts, moved by NICs whose queues the computing threads write themselves."""

from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move

from epcomm cimport _cpp
from epcomm._backend cimport Backend as BackendBase
from epcomm._cpp cimport check
from epcomm._rdma cimport RdmaOptions, fill, plan_rows, provider_name

from epcomm import config


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
    cdef string provider = provider_name(None)
    with nogil:
        check(c_probe(provider))


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
        self.fresh()
        options = options or {}
        fill(options, &made.rdma, &made.folder, &made.spin_us, &made.use_pidfd)
        made.failover = options.get("failover", config.get("EPCOMM_IB_FAILOVER") == "replay")
        made.shared = bool(options.get("shared", False))
        with nogil:
            created = move(create(made))
            self.own = created.get()
            self.impl = move(as_backend(move(created)))
        self.made()

    def plan(self) -> list[dict]:
        """The queue pairs of this rank, one dict each."""
        self.made()
        return plan_rows(self.own.plan_json())

    def stats(self) -> dict:
        """What the threads of this rank did so far: ``requests``, ``doorbells``, ``full`` (waits for room) and more."""
        self.made()
        cdef Stats stats = self.own.stats()
        return stats
