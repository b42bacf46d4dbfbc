# cython: language_level=3
"""What every backend's ``Backend`` can do: the life of one rank's end, and its operations one by one."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint64_t, uintptr_t
from libcpp.string cimport string
from libcpp.vector cimport vector

from epcomm cimport _cpp
from epcomm._cpp cimport check, check_signals

from epcomm.errors import InvalidArgumentError, OutOfMemoryError


cdef class Backend:
    """One rank's end of a backend: ``alloc_heap``, ``export_info``, ``connect``, use, ``close``.

    Made by the subclasses in the backends' modules.
    """

    def __dealloc__(self):
        with nogil:  # unmapping a large heap takes a while
            self.impl.reset()

    cdef int fresh(self) except -1:
        """Raise if the object was made already."""
        if self.impl.get() != NULL:
            raise InvalidArgumentError("a Backend is initialised once")
        return 0

    cdef int made(self) except -1:
        """Raise if there was no memory for the object."""
        if self.impl.get() == NULL:
            raise OutOfMemoryError("no memory for the backend object")
        return 0

    cdef _cpp.HostTransport* transport(self) except NULL:
        self.made()
        cdef _cpp.HostTransport* transport = self.impl.get().host_transport()
        if transport == NULL:
            raise InvalidArgumentError("the backend is not connected, or no host thread drives it")
        return transport

    @property
    def name(self) -> str:
        """The backend's word."""
        self.made()
        return self.impl.get().name().decode()

    @property
    def caps(self) -> int:
        """Capability bits, ``epcomm::Caps``."""
        self.made()
        return self.impl.get().caps()

    def alloc_heap(self, size_bytes: int) -> None:
        """Make this rank's heap: zeroed, its space reserved.

        Raises
        ------
        OutOfMemoryError
            There is no room; the text gives bytes asked, bytes free and the remedy.
        BackendUnavailableError
            The device cannot be used; the text says why.
        """
        self.made()
        cdef uint64_t c_size_bytes = size_bytes
        with nogil:
            check(self.impl.get().alloc_heap(c_size_bytes))

    def export_info(self) -> bytes:
        """Bytes that peers need in order to connect, some KiB at most."""
        self.made()
        cdef string info
        with nogil:
            check(self.impl.get().export_info(&info))
        return info

    def connect(self, rank: int, infos: list[bytes], state_word: int, timeout_s: float) -> None:
        """Reach every peer. Collective: all ranks must call.

        Parameters
        ----------
        rank : int
            Own rank.
        infos : list of bytes
            ``export_info()`` of all ranks, in rank order.
        state_word : int
            Heap offset of the words through which peers say that they left.
        timeout_s : float
            Seconds to wait for the peers; also the deadline of waits that name none.

        Raises
        ------
        BackendUnavailableError
            A peer cannot be reached; the text names it and the reason.
        CommTimeoutError
            Peers did not come; the text names them.
        """
        self.made()
        cdef int c_rank = rank
        cdef vector[string] c_infos = infos
        cdef uint64_t c_state_word = state_word
        cdef double c_timeout_s = timeout_s
        with nogil:
            check(self.impl.get().connect(c_rank, c_infos, c_state_word, c_timeout_s, check_signals, NULL))

    def close(self) -> None:
        """Let go of the peers, in bounded time; idempotent. The own heap lives as long as this object."""
        if self.impl.get() != NULL:
            with nogil:
                check(self.impl.get().close())

    def capsule(self) -> object:
        """Capsule ``epcomm.Backend`` of the ``epcomm::Backend*``; keep this object while you use it."""
        self.made()
        return PyCapsule_New(<void*>self.impl.get(), "epcomm.Backend", NULL)

    def plan(self) -> list[dict]:
        """The queue pairs of this rank, one dict each; empty where peers are reached without any."""
        return []

    # The operations of the HostTransport one by one, for tests and tools; the engine calls them in C++.

    def peer_ptr(self, peer: int, offset: int = 0) -> int:
        """Address of a byte of a peer's heap in this process, 0 if there is none."""
        cdef _cpp.HostTransport* transport = self.transport()
        return <uintptr_t>transport.peer_ptr(peer, offset)

    def put(self, peer: int, dst: int, src: int, size_bytes: int, channel: int = 0) -> None:
        """Copy from the own heap at ``src`` to the peer's heap at ``dst``."""
        cdef _cpp.HostTransport* transport = self.transport()
        cdef int c_peer = peer, c_channel = channel
        cdef uint64_t c_dst = dst, c_src = src, c_size_bytes = size_bytes
        with nogil:
            check(transport.put(c_peer, c_channel, c_dst, c_src, c_size_bytes))

    def signal(self, peer: int, word: int, add: int = 1, channel: int = 0) -> None:
        """Add to a 64-bit word of the peer's heap."""
        cdef _cpp.HostTransport* transport = self.transport()
        cdef int c_peer = peer, c_channel = channel
        cdef uint64_t c_word = word, c_add = add
        with nogil:
            check(transport.signal(c_peer, c_channel, c_word, c_add))

    def quiet(self, peer: int, timeout_s: float, channel: int = 0) -> None:
        """Return once all puts and signals of this channel to the peer have been carried out.

        Raises
        ------
        CommTimeoutError
            They were not after ``timeout_s`` seconds.
        PeerLostError
            The peer is gone.
        """
        cdef _cpp.HostTransport* transport = self.transport()
        cdef int c_peer = peer, c_channel = channel
        cdef _cpp.WaitSpec spec
        spec.operation, spec.phase = b"quiet", b"drain"
        spec.timeout_s = timeout_s
        spec.interrupted, spec.interrupted_arg = check_signals, NULL
        with nogil:
            check(transport.quiet(c_peer, c_channel, spec))

    def wait(self, peer: int, word: int, value: int, timeout_s: float, operation: str = "wait",
             phase: str = "word") -> None:
        """Return once the own heap's word, which ``peer`` adds to, is at least ``value``.

        Raises
        ------
        CommTimeoutError
            It is not after ``timeout_s`` seconds.
        PeerLostError
            A peer's process ended, or this peer left or gave up.
        """
        cdef _cpp.HostTransport* transport = self.transport()
        cdef int c_peer = peer
        cdef uint64_t c_word = word, c_value = value
        cdef _cpp.WaitSpec spec
        c_operation, c_phase = operation.encode(), phase.encode()
        spec.operation, spec.phase = c_operation, c_phase
        spec.timeout_s = timeout_s
        spec.interrupted, spec.interrupted_arg = check_signals, NULL
        with nogil:
            check(transport.wait(c_peer, c_word, c_value, spec))

    def peer_state(self, peer: int) -> int:
        """0 alive, 1 left, 2 gave up, 3 its process ended."""
        cdef _cpp.HostTransport* transport = self.transport()
        cdef int c_peer = peer
        cdef _cpp.PeerState state
        with nogil:
            state = transport.peer_state(c_peer)
        return <int>state

    def abort(self, text: str = "aborted") -> None:
        """End every wait of this rank, now and later, with ``PeerLostError(text)``. Any thread."""
        cdef _cpp.Status why
        why.code = _cpp.Code.kPeerLost
        why.text = text.encode()
        cdef _cpp.HostTransport* transport = self.transport()
        with nogil:
            transport.abort(why)
