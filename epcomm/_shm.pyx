# cython: language_level=3
"""Backend ``shm``: memory of one host, shared by its ranks and driven by host threads."""

from libc.stdint cimport int64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move

from epcomm cimport _cpp
from epcomm._backend cimport Backend as BackendBase
from epcomm._cpp cimport check

from epcomm import config
from epcomm.errors import InvalidArgumentError


cdef extern from "shm/factory.hpp" namespace "epcomm::shm" nogil:
    struct Options:
        string folder
        int64_t spin_us
        cbool use_pidfd

    _cpp.Status c_probe "epcomm::shm::probe"()
    unique_ptr[_cpp.Backend] create(const Options& options)


def probe() -> None:
    """Do nothing if this backend can run here.

    Raises
    ------
    BackendUnavailableError
        It cannot; the text is the reason.
    """
    with nogil:
        check(c_probe())


cdef class Backend(BackendBase):
    """One rank's end of the backend: ``alloc_heap``, ``export_info``, ``connect``, use, ``close``.

    Parameters
    ----------
    options : dict
        ``shm_dir`` (folder for the segment instead of a memfd; default ``EPCOMM_SHM_DIR``), ``spin_us``
        (microseconds that a waiter spins before it yields; default from cores and ranks) and ``use_pidfd``
        (``False``: watch peers as on a kernel without pidfds). Other keys are left to others.
    """

    def __init__(self, options: dict | None = None) -> None:
        cdef Options c_options
        self.fresh()
        options = options or {}
        folder = options.get("shm_dir") or config.get("EPCOMM_SHM_DIR") or ""
        spin_us = options.get("spin_us")
        if spin_us is not None and not 0 <= spin_us <= 1_000_000:
            raise InvalidArgumentError(f"spin_us={spin_us!r}: expected microseconds from 0 to 1000000")
        c_options.folder = str(folder).encode()
        c_options.spin_us = -1 if spin_us is None else spin_us
        c_options.use_pidfd = bool(options.get("use_pidfd", True))
        with nogil:
            self.impl = move(create(c_options))
        self.made()
