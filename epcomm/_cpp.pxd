# Declarations of include/epcomm that every .pyx shares, and the one bridge from Status to exceptions.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "epcomm/status.hpp" namespace "epcomm" nogil:
    enum class Code(int32_t):
        kOk
        kInvalidArgument
        kUnsupported
        kUnavailable
        kTimeout
        kPeerLost
        kOutOfMemory
        kSystem
        kCuda
        kInternal
        kInterrupted

    cppclass Status:
        Code code
        int32_t peer
        int32_t sys_errno
        string text
        bint ok()


cdef extern from "epcomm/backend.hpp" namespace "epcomm" nogil:
    cppclass HostTransport:
        pass

    cppclass Backend:
        const char* name()
        uint32_t caps()
        Status alloc_heap(uint64_t size_bytes)
        Status export_info(string* out)
        Status connect(int rank, const vector[string]& infos, uint64_t state_word, double timeout_s)
        HostTransport* host_transport()
        Status async_error()
        Status close()


cdef inline int check(const Status& status) except -1 nogil:
    """Free on success; on failure take the GIL and raise the typed exception."""
    if status.code == Code.kOk:
        return 0
    with gil:
        if status.code == Code.kInterrupted:
            return -1  # the exception is pending already
        from epcomm.errors import from_status
        raise from_status(<int>status.code, status.text.decode("utf-8", "replace"), status.peer, status.sys_errno)
