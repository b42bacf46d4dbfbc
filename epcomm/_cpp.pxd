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
    enum class PeerState(uint64_t):
        kAlive
        kLeft
        kBroken
        kDead

    struct WaitSpec:
        const char* operation
        const char* phase
        double timeout_s
        int (*interrupted)(void*) noexcept nogil
        void* interrupted_arg

    cppclass HostTransport:
        char* heap()
        uint64_t heap_bytes()
        char* peer_ptr(int peer, uint64_t offset)
        Status put(int peer, int channel, uint64_t dst, uint64_t src, uint64_t size_bytes)
        Status signal(int peer, int channel, uint64_t word, uint64_t add)
        Status quiet(int peer, int channel, const WaitSpec& spec)
        Status wait(int peer, uint64_t word, uint64_t value, const WaitSpec& spec)
        PeerState peer_state(int peer)
        void abort(const Status& why)

    cppclass Backend:
        const char* name()
        uint32_t caps()
        Status alloc_heap(uint64_t size_bytes)
        Status export_info(string* out)
        Status connect(int rank, const vector[string]& infos, uint64_t state_word, double timeout_s,
                       int (*interrupted)(void*) noexcept nogil, void* interrupted_arg)
        HostTransport* host_transport()
        Status device_ctx(void* out, size_t size_bytes)
        Status announce(PeerState state)
        PeerState peer_state(int peer)
        void abort(const Status& why)
        Status async_error()
        Status close()


cdef extern from "Python.h":
    # Not cpython.exc's: that one raises at once (and is lost in a callback); here the exception stays pending.
    int signals_pending "PyErr_CheckSignals"() noexcept


cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>
    static inline int epcomm_on_main_thread() { return syscall(SYS_gettid) == getpid(); }
    """
    int on_main_thread "epcomm_on_main_thread"() noexcept nogil


cdef inline int check_signals(void* unused) noexcept nogil:
    """``WaitSpec.interrupted`` of a Python thread: non-zero once Ctrl-C has raised; check() lets it rise."""
    # Signals are handled by the main thread only. Another one, left in a call while the interpreter ends, must not ask
    # for the GIL here: Python would end the thread by unwinding it, which our noexcept frames turn into an abort.
    if not on_main_thread():
        return 0
    with gil:
        return signals_pending()


cdef inline int check(const Status& status) except -1 nogil:
    """Free on success; on failure take the GIL and raise the typed exception."""
    if status.code == Code.kOk:
        return 0
    with gil:
        if status.code == Code.kInterrupted:
            return -1  # the exception is pending already
        from epcomm.errors import from_status
        raise from_status(<int>status.code, status.text.decode("utf-8", "replace"), status.peer, status.sys_errno)
