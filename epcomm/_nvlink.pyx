# cython: language_level=3
"""Backend ``nvlink``: GPU memory of one host, shared by its ranks and driven by their kernels."""

import logging

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from epcomm cimport _cpp
from epcomm._backend cimport Backend as BackendBase
from epcomm._cpp cimport check

from epcomm import config
from epcomm.errors import InvalidArgumentError

log = logging.getLogger("epcomm")


cdef extern from "epcomm/device/nvlink.h" namespace "epcomm::device" nogil:
    struct NvlinkCtx:
        uint64_t heap


cdef extern from "nvlink/factory.hpp" namespace "epcomm::nvlink" nogil:
    enum class Share(int):
        kAuto
        kFd
        kFabric
        kIpc

    struct Options:
        int device
        Share share
        cbool use_pidfd

    cppclass NvlinkBackend(_cpp.Backend):
        int device()
        Share share()
        uint64_t heap()
        uint64_t peer_heap(int peer)
        vector[int] same_gpu() except +
        cbool mps()

    _cpp.Status c_probe "epcomm::nvlink::probe"()
    unique_ptr[NvlinkBackend] create(const Options& options)
    vector[pair[int, int]] c_missing_pairs "epcomm::nvlink::missing_pairs"(
        const vector[string]& uuids, const vector[vector[string]]& blocked) except +


_SHARES = ("auto", "fd", "fabric", "ipc")  # numbers of Share


def probe() -> None:
    """Do nothing if this backend can run here. Initialises the driver, but makes no context.

    Raises
    ------
    BackendUnavailableError
        It cannot; the text is the reason.
    """
    with nogil:
        check(c_probe())


def missing_pairs(uuids: list[bytes], blocked: list[list[bytes]]) -> list[tuple[int, int]]:
    """Pairs of ranks whose GPUs cannot access each other.

    Parameters
    ----------
    uuids : list of bytes
        Each rank's GPU, 32 hexadecimal digits.
    blocked : list of list of bytes
        Of each rank, the GPUs that its own sees and cannot access: the first 16 digits of their UUIDs.
    """
    cdef vector[string] c_uuids = uuids
    cdef vector[vector[string]] c_blocked = blocked
    return c_missing_pairs(c_uuids, c_blocked)


cdef class Backend(BackendBase):
    """One rank's end of the backend: ``alloc_heap``, ``export_info``, ``connect``, use, ``close``.

    Parameters
    ----------
    options : dict
        ``device`` (index of the GPU as this process counts; default 0), ``nvlink_share`` (``auto``, ``fd``,
        ``fabric`` or ``ipc``; default ``EPCOMM_NVLINK_SHARE``) and ``use_pidfd`` (``False``: watch peers as on a
        kernel without pidfds). Other keys are left to others.
    """

    cdef NvlinkBackend* nvlink  # impl, as what it is

    def __init__(self, options: dict | None = None) -> None:
        cdef Options c_options
        cdef unique_ptr[NvlinkBackend] nvlink
        self.fresh()
        options = options or {}
        device = options.get("device", 0)
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < 65536:
            raise InvalidArgumentError(f"device={device!r}: expected the index of a GPU from 0")
        share = options.get("nvlink_share") or config.get("EPCOMM_NVLINK_SHARE")
        if share not in _SHARES:
            raise InvalidArgumentError(f"nvlink_share={share!r}: expected one of {', '.join(_SHARES)}")
        c_options.device = device
        c_options.share = <Share><int>_SHARES.index(share)
        c_options.use_pidfd = bool(options.get("use_pidfd", True))
        with nogil:
            nvlink = move(create(c_options))
        self.nvlink = nvlink.get()
        self.impl.reset(nvlink.release())
        self.made()

    @property
    def device(self) -> int:
        """Index of the GPU as this process counts."""
        return self.nvlink.device()

    @property
    def share(self) -> str:
        """How the heap is handed to peers: ``fd``, ``fabric`` or ``ipc``; ``auto`` before ``alloc_heap``."""
        return _SHARES[<int>self.nvlink.share()]

    @property
    def same_gpu(self) -> list[int]:
        """Other ranks on the same GPU, known once connected."""
        return self.nvlink.same_gpu()

    @property
    def mps(self) -> bool:
        """Whether this rank and those on the same GPU run side by side, through CUDA MPS; known once connected."""
        return self.nvlink.mps()

    @property
    def heap_ptr(self) -> int:
        """Device address of the own heap, 0 before ``alloc_heap``."""
        return self.nvlink.heap()

    def connect(self, rank: int, infos: list[bytes], state_word: int, timeout_s: float) -> None:
        """As every backend's; says so once if ranks share a GPU."""
        BackendBase.connect(self, rank, infos, state_word, timeout_s)
        others = self.same_gpu
        if others and rank < min(others):
            ranks = ", ".join(map(str, [rank, *others]))
            if self.mps:
                how = "they run side by side through CUDA MPS, and divide its multiprocessors and memory rate"
            else:
                how = "they take turns on it, which is slow; under CUDA MPS (nvidia-cuda-mps-control -d) they would not"
            log.warning("ranks %s share one GPU: %s", ranks, how)

    def device_ctx(self) -> bytes:
        """Bytes of the ``epcomm::device::NvlinkCtx`` that kernels take by value; valid until ``close``."""
        cdef NvlinkCtx ctx
        with nogil:
            check(self.impl.get().device_ctx(&ctx, sizeof(ctx)))
        return (<char*>&ctx)[:sizeof(ctx)]

    def peer_ptr(self, peer: int, offset: int = 0) -> int:
        """Device address of a byte of a peer's heap in this process, 0 if there is none."""
        cdef uint64_t heap = self.nvlink.peer_heap(peer)
        return heap + offset if heap else 0

    def announce(self, state: int) -> None:
        """Write this rank's state word at every peer: 1 left, 2 gave up."""
        cdef _cpp.PeerState c_state = <_cpp.PeerState><uint64_t>state
        with nogil:
            check(self.impl.get().announce(c_state))

    def peer_state(self, peer: int) -> int:
        """0 alive, 1 left, 2 gave up, 3 its process ended."""
        cdef int c_peer = peer
        cdef _cpp.PeerState state
        with nogil:
            state = self.impl.get().peer_state(c_peer)
        return <int>state

    def abort(self, text: str = "aborted") -> None:
        """End every wait of this rank's kernels, now and later. Any thread."""
        cdef _cpp.Status why
        why.code = _cpp.Code.kPeerLost
        why.text = text.encode()
        with nogil:
            self.impl.get().abort(why)

    def check(self) -> None:
        """Raise the first error that the host has seen: ``abort``, or a peer whose process ended."""
        with nogil:
            check(self.impl.get().async_error())
