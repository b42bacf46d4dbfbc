# cython: language_level=3
"""Timed loops over one backend's transport, for the benchmarks. Nothing of Python runs inside them."""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from epcomm._cpp cimport Backend, HostTransport, Status, WaitSpec, check, check_signals

import numpy as np

from epcomm.errors import InvalidArgumentError


cdef extern from "host/measure.hpp" namespace "epcomm::host" nogil:
    struct Flow:
        int peer
        int channel
        uint64_t src
        uint64_t dst
        uint64_t bytes
        uint64_t word

    Status c_round_trips "epcomm::host::round_trips"(HostTransport* transport, const Flow& flow, cbool first,
                                                     uint64_t base, int64_t count, const WaitSpec& spec,
                                                     double* seconds)
    Status c_completions "epcomm::host::completions"(HostTransport* transport, const Flow& flow, cbool signal,
                                                     int64_t count, const WaitSpec& spec, double* seconds)
    Status c_stream "epcomm::host::stream"(HostTransport* transport, const vector[Flow]& flows, cbool signal,
                                           int64_t count, const WaitSpec& spec, double* seconds)


cdef HostTransport* _transport(object backend) except NULL:
    cdef HostTransport* transport
    transport = (<Backend*>PyCapsule_GetPointer(backend.capsule(), "epcomm.Backend")).host_transport()
    if transport == NULL:
        raise InvalidArgumentError("the backend is not connected, or no host thread drives it")
    return transport


cdef WaitSpec _spec(double timeout_s) noexcept:
    cdef WaitSpec spec
    spec.operation, spec.phase = "measure", "word"
    spec.timeout_s = timeout_s
    spec.interrupted, spec.interrupted_arg = check_signals, NULL
    return spec


cdef Flow _flow(dict given) except *:
    cdef Flow flow
    flow.peer, flow.channel = given["peer"], given.get("channel", 0)
    flow.src, flow.dst = given["src"], given["dst"]
    flow.bytes, flow.word = given["size_bytes"], given["word"]
    return flow


def round_trips(backend: object, flow: dict, first: bool, base: int, count: int, timeout_s: float = 60.0) -> object:
    """Seconds of ``count`` round trips of a put and its signal; both ends call it, one as ``first``.

    Parameters
    ----------
    backend : Backend
        Connected; kept alive by the caller.
    flow : dict
        ``peer``, ``channel``, ``src`` and ``dst`` (heap offsets), ``size_bytes`` (0: the signal alone) and ``word``
        (heap offset of the signal word, the same at both ends).
    first : bool
        Whether this end begins.
    base : int
        What the word holds before.
    count : int
        Round trips.
    timeout_s : float
        Of each wait.

    Returns
    -------
    numpy.ndarray
        ``float64 [count]``.
    """
    cdef HostTransport* transport = _transport(backend)
    cdef Flow c_flow = _flow(flow)
    cdef cbool c_first = first
    cdef uint64_t c_base = base
    cdef int64_t c_count = count
    cdef WaitSpec spec = _spec(timeout_s)
    seconds = np.zeros(count)
    cdef double[::1] view = seconds
    if count > 0:
        with nogil:
            check(c_round_trips(transport, c_flow, c_first, c_base, c_count, spec, &view[0]))
    return seconds


def completions(backend: object, flow: dict, signal: bool, count: int, timeout_s: float = 60.0) -> object:
    """Seconds of ``count`` single puts, with or without a signal, each until it has been carried out.

    Parameters as in :func:`round_trips`; only the sender calls it.
    """
    cdef HostTransport* transport = _transport(backend)
    cdef Flow c_flow = _flow(flow)
    cdef cbool c_signal = signal
    cdef int64_t c_count = count
    cdef WaitSpec spec = _spec(timeout_s)
    seconds = np.zeros(count)
    cdef double[::1] view = seconds
    if count > 0:
        with nogil:
            check(c_completions(transport, c_flow, c_signal, c_count, spec, &view[0]))
    return seconds


def stream(backend: object, flows: list[dict], signal: bool, count: int, timeout_s: float = 60.0) -> float:
    """Seconds until ``count`` messages on each of several flows have been carried out.

    Every flow has a thread and must have a channel of its own. Parameters as in :func:`round_trips`; only the sender
    calls it.
    """
    cdef HostTransport* transport = _transport(backend)
    cdef vector[Flow] c_flows
    cdef cbool c_signal = signal
    cdef int64_t c_count = count
    cdef WaitSpec spec = _spec(timeout_s)
    cdef double seconds = 0
    if len({(flow["peer"], flow.get("channel", 0)) for flow in flows}) != len(flows):
        raise InvalidArgumentError("two flows share a (peer, channel); each needs one of its own")
    for flow in flows:
        c_flows.push_back(_flow(flow))
    with nogil:
        check(c_stream(transport, c_flows, c_signal, c_count, spec, &seconds))
    return seconds
