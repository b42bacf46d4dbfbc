# cython: language_level=3
"""Backend ``ibrc``: memory of several hosts, moved by NICs that a proxy thread drives for host threads."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from epcomm cimport _cpp
from epcomm._backend cimport Backend as BackendBase
from epcomm._cpp cimport check
from epcomm._rdma cimport RdmaOptions, fill, plan_rows, provider_name

from epcomm import config


cdef extern from "ibrc/factory.hpp" namespace "epcomm::ibrc" nogil:
    struct Options:
        RdmaOptions rdma
        int num_threads
        vector[int] cpus
        int local_rank
        uint32_t queue_size
        string folder
        int64_t spin_us
        cbool use_pidfd

    struct Stats:
        uint64_t commands
        uint64_t posts
        uint64_t requests
        uint64_t bytes
        uint64_t merged
        uint64_t completions
        uint64_t probes
        uint64_t sleeps
        uint64_t stalls

    cppclass IbrcBackend:
        string plan_json()
        _cpp.Status break_queue(int peer, int channel)
        Stats stats()

    _cpp.Status c_probe "epcomm::ibrc::probe"(const string& provider)
    unique_ptr[IbrcBackend] create(const Options& options)
    unique_ptr[_cpp.Backend] as_backend(unique_ptr[IbrcBackend] backend)


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
        ``local_rank`` among those of its host, which share ``EPCOMM_IBRC_CPUS`` out (default 0).
        ``depth`` (of send queues; default ``EPCOMM_IB_DEPTH``) and ``queue_size`` (commands of a channel's ring).
        ``shm_dir``, ``spin_us`` and ``use_pidfd`` as for ``shm``. Other keys are left to others.
    """

    cdef IbrcBackend* own

    def __init__(self, options: dict | None = None) -> None:
        cdef Options made
        cdef unique_ptr[IbrcBackend] created
        self.fresh()
        options = options or {}
        fill(options, &made.rdma, &made.folder, &made.spin_us, &made.use_pidfd)
        made.num_threads = config.get("EPCOMM_IBRC_THREADS") or 0
        made.cpus = config.get("EPCOMM_IBRC_CPUS") or []
        made.local_rank = options.get("local_rank", 0)
        made.queue_size = options.get("queue_size", made.queue_size)
        with nogil:
            created = move(create(made))
            self.own = created.get()
            self.impl = move(as_backend(move(created)))
        self.made()

    def plan(self) -> list[dict]:
        """The queue pairs of this rank, one dict each."""
        self.made()
        return plan_rows(self.own.plan_json())

    def _break_queue(self, peer: int, channel: int = 0) -> None:
        """Bring a queue pair to the state ERROR, for tests."""
        self.made()
        cdef int c_peer = peer
        cdef int c_channel = channel
        with nogil:
            check(self.own.break_queue(c_peer, c_channel))

    def proxy_stats(self) -> dict:
        """What the proxy threads did so far: ``commands``, ``posts`` (doorbells), ``requests`` and more."""
        self.made()
        cdef Stats stats = self.own.stats()
        return stats
