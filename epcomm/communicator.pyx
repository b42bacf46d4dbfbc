"""The user's face: checks arguments, orders calls, makes results. The only orchestrator."""

import itertools
import os
import threading
import warnings
import weakref
from functools import partial
from operator import index

import numpy as np

from epcomm import _arrays, _create, _device, _gpu, _host, ops
from epcomm._results import Combined, Dispatched, Event, Later
from epcomm.errors import (
    EpcommError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedError,
    code_of,
)

_FLOAT_DTYPES = ("float32", "float16", "bfloat16")
_MAX_ROWS = (1 << 31) - 1
_EARLY_BYTES = 8 << 20  # of a result's picks, taken before it is known how many there are
_serial = itertools.count(1)


class Handle:
    """Routing of one dispatch: which row went where. Owned by the caller; ``close()`` or drop it when done.

    It may be used any number of times, in ``combine`` and in ``dispatch(x, handle=...)``, on the communicator
    that made it.

    Attributes
    ----------
    num_tokens : int
        Tokens of this rank, rows of a combine's result.
    num_rows : int
        Rows that ``combine`` expects on this rank: those of ``Dispatched.x``.
    layout : str
        ``"rank"`` or ``"expert"``.
    expert_alignment : int
    capacity : int or None
    generation : int
        Number of the call that made it; equal on all ranks.
    has_weights : bool
        Whether weights travelled.
    closed : bool
    """

    def __init__(self, communicator, routing, layout, expert_alignment, capacity):
        self._communicator_serial = communicator._serial
        self._routing = routing
        self._layout = layout
        self._expert_alignment = expert_alignment
        self._capacity = capacity
        self._generation = routing.generation
        self._num_tokens = routing.num_tokens
        self._num_rows = routing.output_rows
        self._has_weights = routing.has_weights
        self._lease = None  # on a GPU: weak reference to the lease of the dispatch
        self._like = None  # on a GPU: an array of the dispatch's kind

    # Calls check arrays against these and the engine trusts them: nobody may write them.
    @property
    def layout(self):
        return self._layout

    @property
    def expert_alignment(self):
        return self._expert_alignment

    @property
    def capacity(self):
        return self._capacity

    @property
    def generation(self):
        return self._generation

    @property
    def num_tokens(self):
        return self._num_tokens

    @property
    def num_rows(self):
        return self._num_rows

    @property
    def has_weights(self):
        return self._has_weights

    @property
    def closed(self):
        return self._routing is None

    def close(self):
        """Give up the routing. Idempotent; local."""
        self._routing = None

    def __reduce_ex__(self, protocol):
        raise TypeError("a Handle cannot be copied or pickled: it belongs to one communicator of one process")

    def record_stream(self, stream):
        """Keep the lease of the dispatch also until the work queued on ``stream`` by its end is done.

        Nothing to do on host memory, and where ``x`` was copied.
        """
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            lease.record_stream(_gpu.handle_of(stream, "record_stream: stream"), stream)

    def __repr__(self):
        state = "closed" if self.closed else f"{self.num_tokens} tokens, {self.num_rows} rows"
        return f"Handle(call {self.generation}, {self.layout} layout, {state})"


def _is_true_int(value):
    return not isinstance(value, (bool, np.bool_)) and hasattr(type(value), "__index__")


def _integer(call, name, value, low, high=None):
    """``value`` as an int in low..high, or the error that says what is allowed."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if not _is_true_int(value):
        raise InvalidArgumentError(f"{call}: {name} is {value!r}; allowed: {allowed}")
    try:
        number = index(value)
    except TypeError:  # an array of several, for one
        raise InvalidArgumentError(f"{call}: {name} is {value!r}; allowed: {allowed}") from None
    if number < low or (high is not None and number > high):
        raise InvalidArgumentError(f"{call}: {name} is {number}; allowed: {allowed}")
    return number


def _boolean(call, name, value, optional=False):
    if value is None and optional:
        return None
    if not isinstance(value, (bool, np.bool_)):
        allowed = "True, False or None" if optional else "True or False"
        raise InvalidArgumentError(f"{call}: {name} is {value!r}; allowed: {allowed}")
    return bool(value)


def _contiguous(array):
    """The same values, C-contiguous, in host memory of our own."""
    return _arrays.view(np.ascontiguousarray(_arrays.as_numpy(array)), "copy")


class Communicator:
    """Moves tokens between the ranks of a group. Collective: all ranks must create it.

    Parameters
    ----------
    group : None, torch.distributed.ProcessGroup or mpi4py.MPI.Comm
        Who takes part. ``None`` reads the launcher's environment (torchrun, mpirun, RANK/WORLD_SIZE); without
        one this is a single rank. Used only during creation.
    num_experts : int
        Experts in all, ids 0..num_experts-1.
    num_topk : int
        Picks per token, 1..num_experts.
    hidden : int
        Channels of a row of ``dtype``; sizes the rows.
    max_tokens_per_rank : int
        Most tokens one rank passes to a dispatch.
    max_recv_tokens : int, optional
        Most tokens one rank receives in one dispatch, one per (token, destination rank). Default
        ``num_ranks * max_tokens_per_rank``, which always suffices.
    low_latency_max_tokens : int
        Tokens per rank of low-latency calls. Only 0 (none) so far.
    num_slots : int
        Results that may be views of the heap at the same time, combine buffers included. A loop that reuses its names
        holds last round's until they are assigned again: give it one more than a round holds, or ``del`` them.
    dtype : str or dtype
        Sizes rows: any dtype whose row fits ``ceil16(hidden * itemsize)`` bytes may travel.
    backend : str, optional
        Default ``EPCOMM_BACKEND``, else the first that works between all ranks.
    device : str or int, optional
        ``"cpu"``, an index or ``"cuda:N"``. It fixes the memory kind: arrays of calls must be of it. Default: the
        current GPU of torch, else of CuPy, where one of them is imported and has one and the backends wanted include
        one with GPU memory; else ``"cpu"``.
    expert_to_rank : sequence of int [num_experts], optional
        Owner of each expert. Default contiguous; the first ``num_experts % num_ranks`` ranks own one more.
    num_sms : int, optional
        Host threads of a call on host memory (default ``EPCOMM_NUM_THREADS``, else this rank's part of the cores it may
        use, each core shared equally by the ranks of the host that may use it); multiprocessors of one on GPU memory
        (default 24).
    num_channels : int, optional
        Independent slices of the work, each with queue pairs of its own where NICs are used; equal on all ranks.
        Default: as many as host threads, and at the least one for each NIC port; one on GPU memory.
    timeout_s : float, optional
        Deadline of each wait in seconds; default ``EPCOMM_TIMEOUT_S``, else 300.
    options : dict, optional
        ``num_threads``, ``node_id``, ``shm_dir`` and ``nvlink_share`` go before the variables of these names
        (``EPCOMM_NUM_THREADS`` and so on); ``push_only`` (bool: combine never reads peers' heaps), ``spin_us`` and
        ``use_pidfd`` are for measurements and tests.

    Raises
    ------
    InvalidArgumentError
        An argument is out of range, or differs between ranks; raised on every rank with each rank's value.
    UnsupportedError
        ``low_latency_max_tokens`` is not 0.
    BackendUnavailableError
        No backend, or not the one asked for, works between all ranks; with each one's reason.
    OutOfMemoryError
        The heap could not be had; with bytes asked and free.
    CommTimeoutError, PeerLostError
        A rank did not come, or went.

    Notes
    -----
    Calls are serialised by the communicator's own lock and must be made in the same order on all ranks. A bad
    argument on one rank raises the same error on all, and the communicator stays usable.
    """

    def __init__(self, group=None, *, num_experts, num_topk, hidden, max_tokens_per_rank, max_recv_tokens=None,
                 low_latency_max_tokens=0, num_slots=2, dtype="bfloat16", backend=None, device=None,
                 expert_to_rank=None, num_sms=None, num_channels=None, timeout_s=None, options=None):
        self._closed = True  # until creation has succeeded
        self._engine = None
        self._pid = os.getpid()
        made = _create.create(group, dict(
            num_experts=num_experts, num_topk=num_topk, hidden=hidden, max_tokens_per_rank=max_tokens_per_rank,
            max_recv_tokens=max_recv_tokens, low_latency_max_tokens=low_latency_max_tokens, num_slots=num_slots,
            dtype=dtype, backend=backend, device=device, expert_to_rank=expert_to_rank, num_sms=num_sms,
            num_channels=num_channels, timeout_s=timeout_s, options=options))
        self._made = made
        self._engine = made.engine
        self._serial = next(_serial)
        self._gpu = None if made.device == "cpu" else _create.index_of(made.device)
        self._lock = threading.Lock()
        self._owner = None  # thread inside a call
        self._looking = threading.RLock()  # held where the engine is used beside calls; short
        self._aborted = None
        self._in_flight = None
        self._deferred = None
        self._extra = {"combine_buffer_copies": 0}
        self._closed = False

    # ---- what it is

    @property
    def rank(self):
        """This rank, 0..num_ranks-1."""
        return self._made.rank

    @property
    def num_ranks(self):
        return self._made.num_ranks

    @property
    def backend(self):
        """Name of the backend in use."""
        return self._made.backend_name

    @property
    def device(self):
        """``"cpu"`` or ``"cuda:N"``: where arrays of calls must be."""
        return self._made.device

    @property
    def caps(self):
        """frozenset of str: what the backend can do."""
        return self._made.caps

    @property
    def num_experts(self):
        """Experts of all ranks."""
        return self._made.parameters["num_experts"]

    @property
    def num_topk(self):
        """Picks per token."""
        return self._made.parameters["num_topk"]

    @property
    def num_local_experts(self):
        """Experts of this rank."""
        return self._made.local_experts[self._made.rank]

    @property
    def closed(self):
        return self._closed

    def __reduce_ex__(self, protocol):
        # A copy would share the engine, and end it when it dies.
        raise TypeError("a Communicator cannot be copied or pickled: it belongs to this process; create one in each")

    @staticmethod
    def required_bytes(group=None, *, num_ranks, num_experts, num_topk, hidden, max_tokens_per_rank,
                       max_recv_tokens=None, low_latency_max_tokens=0, num_slots=2, dtype="bfloat16", backend=None,
                       device=None, expert_to_rank=None, num_sms=None, num_channels=None, timeout_s=None, options=None):
        """Bytes that one rank's communicator takes, by purpose. Static; touches nothing.

        Parameters
        ----------
        num_ranks : int
            Ranks of the group; the others as for the constructor, `group` unused.

        Returns
        -------
        dict of str to int
            ``control`` (signals, credits, entry records), ``staging``, ``slots`` (``num_slots + 1`` receive
            buffers), ``routing`` (one handle of the largest dispatch) and their sum ``total``.

        Notes
        -----
        What a rank adds to the machine. Where ``num_channels`` is left open and only backends over NICs are named, one
        channel is counted for each port that a rank alone on this machine would use. Peers' heaps are mapped here too,
        so resident set sizes (``VmRSS``, ``ru_maxrss``) count shared pages once per rank that touched them;
        proportional ones (``Pss``) do not. Results in the caller's own memory are not counted.
        """
        num_ranks = _integer("required_bytes", "num_ranks", num_ranks, 1)
        parameters = _create.parameters(dict(
            num_experts=num_experts, num_topk=num_topk, hidden=hidden, max_tokens_per_rank=max_tokens_per_rank,
            max_recv_tokens=max_recv_tokens, low_latency_max_tokens=low_latency_max_tokens, num_slots=num_slots,
            dtype=dtype, backend=backend, device=device, expert_to_rank=expert_to_rank, num_sms=num_sms,
            num_channels=num_channels, timeout_s=timeout_s, options=options))
        return _create.required_bytes(parameters, num_ranks)

    def layout(self, topk_idx):
        """Counts and positions that a dispatch of ``topk_idx`` would have; see :func:`epcomm.layout`. Local."""
        return ops.layout(topk_idx, self._made.parameters["num_experts"], self.num_ranks,
                          self._made.parameters["expert_to_rank"])

    def plan(self):
        """Which path each (peer, channel) takes.

        Returns
        -------
        list of dict
            ``peer``, ``channel``, ``backend`` and ``path``, a sentence. Where a NIC is used also what makes up the
            queue pair: ``kind`` (``data``, or ``control`` for the channel behind those of data, which carries credits),
            ``device``, ``port``, ``gid``, ``qpn``, ``depth``, ``mtu``, ``remote_device``, ``remote_port``,
            ``remote_gid``, ``remote_qpn`` and more.
        """
        near = "loads and stores" if "peer_load_store" in self.caps or self._made.queue_pairs else "puts"
        pairs = {(row["peer"], row["channel"]): row for row in self._made.queue_pairs}
        rows = []
        for peer in range(self.num_ranks):
            for channel in range(self._made.shape["num_channels"] + 1):
                row = pairs.get((peer, channel))
                if row is not None:
                    path = f"{row['device']} port {row['port']} to {row['remote_device']} port {row['remote_port']}"
                    rows.append({**row, "backend": self.backend, "path": path})
                elif channel < self._made.shape["num_channels"]:
                    rows.append(dict(peer=peer, channel=channel, backend=self.backend,
                                     path="own memory" if peer == self.rank else near))
        return rows

    def stats(self):
        """Counters of this rank since creation: dict of str to int.

        ``calls``, ``refused_calls``, ``dispatches``, ``combines``; ``leases_granted``, ``leases_held``, ``copies``
        (dispatches whose x was copied out of the heap, or expanded from it); ``combine_buffer_copies`` (combine
        buffers in ordinary memory); ``zero_copy_combines``; ``rows_sent`` and ``bytes_sent`` to other ranks;
        ``rows_received``.
        """
        self._check_process("stats")
        engine = self._engine
        return {**(self._final_stats if engine is None else engine.stats()), **self._extra}

    # ---- calls

    def dispatch(self, x, topk_idx=None, topk_weights=None, *, handle=None, scales=None, quantize=None, layout="rank",
                 expert_alignment=1, capacity=None, copy=None, num_sms=None, stream=None, async_op=False):
        """Send each token to the ranks that own its experts. Collective: all ranks must call.

        Parameters
        ----------
        x : array [num_tokens, hidden]
            Rows of any 1-, 2- or 4-byte dtype that fit; any strides. Read only, the caller's.
        topk_idx : int32 or int64 array [num_tokens, num_topk]
            Experts of each token, 0..num_experts-1; -1 is no pick. Exactly one of ``topk_idx`` and ``handle``.
        topk_weights : float array [num_tokens, num_topk], optional
            Travels with the rows as float32. On all ranks or on none.
        handle : Handle, optional
            Repeat the routing of an earlier dispatch; layout, alignment and capacity come from it.
        scales : array [num_tokens, S], optional
            Moved as bytes beside the rows. Not with ``quantize``.
        quantize : None or "fp8"
            Send e4m3 codes with one float32 scale per 128 channels.
        layout : "rank" or "expert"
            One row per (token, destination rank), or one per pick, grouped by local expert.
        expert_alignment : int
            Expert layout: each group is padded to a multiple of this with zero rows.
        capacity : int, optional
            ``x`` of the result has exactly this many rows; what does not fit (in rank layout also what goes beyond
            ``max_recv_tokens``) is counted in ``overflow``.
        copy : None, True or False
            None: a view of the heap where a slot is free; True: the caller's memory; False: a view or an error.
        num_sms : int, optional
            Multiprocessors of this call on GPU memory (default 24), host threads on host memory.
        stream : optional
            GPU memory: the CUDA stream that the call comes after, and that comes after the call; a torch or CuPy
            stream, an object with ``__cuda_stream__`` or a handle. Default the current one of the library of ``x``.
            Host memory has no streams.
        async_op : bool
            Return once counts are known, with ``event``; rows may be read after ``event.wait()``.

        Returns
        -------
        Dispatched

        Raises
        ------
        InvalidArgumentError
            On every rank, naming rank, argument, value and what is allowed; nothing moves.
        UnsupportedError
            ``copy=False`` with all slots leased; on GPU memory ``layout="expert"`` and ``capacity`` so far.
        CommTimeoutError, PeerLostError
            A peer did not come, or went; the communicator is then broken for good.
        """
        with self._call("dispatch"):
            request = self._accept("dispatch", self._dispatch_request, x, topk_idx, topk_weights, handle, scales,
                                   quantize, layout, expert_alignment, capacity, copy, num_sms, stream, async_op)
            call = self._engine.dispatch_begin(**request["begin"])
            return self._dispatch_result(call, request)

    def combine(self, x, handle, *, apply_weights=None, topk_weights=None, exact_order=False, bias=None, out=None,
                num_sms=None, stream=None, async_op=False):
        """Bring expert outputs back to their tokens' ranks and sum them. Collective: all ranks must call.

        The sum is one written tree, the same on every backend: a rank's picks of a token, k ascending, from +0.0 in
        float32 and rounded once to the row dtype (expert layout; in rank layout the caller has done this); then
        ranks ascending in float32; then plus bias, rounded once to nearest even. A pick of weight 0 counts like any
        other, so a NaN or an infinity in its row gives NaN; rows of padding are never read, nor weights at -1.

        Parameters
        ----------
        x : float32, float16 or bfloat16 array [handle.num_rows, hidden]
            Expert outputs in the order of ``Dispatched.x``.
        handle : Handle
            Of the dispatch.
        apply_weights : bool, optional
            Multiply by the handle's weights. Default: expert layout if the handle has weights.
        topk_weights : float array, optional
            ``[rows, num_topk]`` (rank layout) or ``[rows]``: scalars only carried back to the tokens' ranks.
        exact_order : bool
            Expert layout: every pick travels and is summed k ascending in float32, rounded once.
        bias : array [hidden] or [handle.num_tokens, hidden], optional
            One row for all or one per token, of the dtype of ``x`` or float32. Added in float32 before the
            rounding, on this rank's tokens.
        out : array [handle.num_tokens, hidden], optional
            Where the result goes; of the dtype of ``x``, apart from it and from ``topk_weights`` in memory. It may be
            the memory of ``bias``.
        num_sms, stream, async_op
            As for :meth:`dispatch`.

        Returns
        -------
        Combined

        Raises
        ------
        InvalidArgumentError, CommTimeoutError, PeerLostError
            As for :meth:`dispatch`.
        """
        with self._call("combine"):
            request = self._accept("combine", self._combine_request, x, handle, apply_weights, topk_weights,
                                   exact_order, bias, out, num_sms, stream, async_op)
            pending = self._engine.combine(**request["engine"])
            event = None
            if pending is not None:
                self._follow(pending)
                event = Event(pending)
            return Combined(x=request["out"], topk_weights=request["carried_out"], event=event)

    def _follow(self, pending):
        """The next call waits for this one; on a GPU its stream does that."""
        if self._gpu is None:
            self._in_flight = pending

    def combine_buffer(self, handle, dtype=None):
        """Memory for expert outputs that makes ``combine`` zero-copy. Local.

        Parameters
        ----------
        handle : Handle
        dtype : optional
            float32, float16 or bfloat16; default the communicator's.

        Returns
        -------
        array [handle.num_rows, hidden]
            Of the kind of the dispatch's ``x``: a lease of the heap; its content is unspecified. Ordinary memory where
            no slot is free or large enough (counted in ``stats()["combine_buffer_copies"]``).
        """
        with self._call("combine_buffer", collective=False):
            self._check_handle("combine_buffer", handle)
            name = self._made.parameters["dtype"] if dtype is None else _arrays.canonical_dtype(dtype)
            if name not in _FLOAT_DTYPES:
                raise InvalidArgumentError(
                    f"combine_buffer: dtype is {name}; allowed: {', '.join(_FLOAT_DTYPES)}")
            hidden = self._made.parameters["hidden"]
            itemsize = _arrays.itemsize_of(name)
            self._check_row("combine_buffer", "dtype", hidden * itemsize, 0)
            shape = (handle.num_rows, hidden)
            like = handle._like or _arrays.view(np.empty(0, np.uint8), "like")
            stream = {}
            if self._gpu is not None:
                stream["stream"], stream["stream_object"] = _gpu.current(like.kind, self._gpu)
            lease = self._engine.take_lease(shape[0] * shape[1] * itemsize, **stream)
            if lease is not None:
                return _arrays.wrap(lease.ptr, shape, name, like, lease)
            self._extra["combine_buffer_copies"] += 1
            return _arrays.empty(shape, name, like)

    def barrier(self):
        """Return once every rank has called it. Collective."""
        with self._call("barrier"):
            self._engine.barrier()

    def low_latency_dispatch(self, x, topk_idx, topk_weights=None, *, layout="expert", quantize="fp8",
                             round_scale=False, ue8m0=False, num_sms=None, stream=None, async_op=False,
                             return_recv_hook=False):
        """Not there yet on any backend: raises :class:`UnsupportedError`. Local."""
        raise UnsupportedError("low_latency_dispatch: not there yet on any backend; use dispatch")

    def low_latency_combine(self, x, handle, *, topk_weights=None, exact_order=False, out=None, num_sms=None,
                            stream=None, async_op=False, return_recv_hook=False):
        """Not there yet on any backend: raises :class:`UnsupportedError`. Local."""
        raise UnsupportedError("low_latency_combine: not there yet on any backend; use combine")

    def check(self):
        """Raise what went wrong since the last call: a bad id in capacity mode, a lost peer. Local."""
        self._check_usable("check")
        with self._looking:
            engine = self._engine
            if engine is None:  # closed by another thread just now
                return
            engine.raise_if_broken()
            engine.look_at_peers()
        self._raise_deferred()

    def abort(self):
        """End this rank's waits with :class:`PeerLostError`, from any thread, and tell peers. Does not wait.

        The communicator is then broken for good; only :meth:`close` is left.
        """
        self._check_process("abort")
        with self._looking:
            engine = self._engine
            if engine is None:
                return
            self._aborted = f"rank {self.rank} called abort()"
            engine.abort(self._aborted)
        # A call that runs tells peers when its wait ends; else it is done here.
        if self._lock.acquire(blocking=False):
            try:
                self._give_up_if_aborted()
            finally:
                self._lock.release()

    def _give_up_if_aborted(self):
        """With the lock held."""
        if self._aborted is None or self._engine is None:
            return
        if self._in_flight is None or self._in_flight.done():
            self._engine.give_up(self._aborted)

    def close(self):
        """Tell peers that this rank left and free everything local. Idempotent; waits for calls in flight only.

        Arrays over the heap stay valid; the memory goes when the last of them dies.
        """
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True
            return  # inherited through fork: the parent's
        self._check_reentry("close")
        self._closed = True
        try:
            self._lock.acquire()
        except BaseException:  # Ctrl-C while another thread's call runs
            self._closed = False
            raise
        try:
            pending = self._in_flight
            if pending is not None:
                try:
                    pending.wait(self._made.parameters["timeout_s"])
                except EpcommError:
                    pass  # raised by its event
        finally:
            try:
                self._free()
            finally:
                self._lock.release()

    def _free(self):
        """Free everything local, in bounded time: waits of a call that still runs are ended."""
        engine, pending = self._engine, self._in_flight
        if pending is not None and not pending.done():
            engine.abort(f"rank {self.rank} closed its communicator while a call ran")
            pending.join()  # it reads and writes arrays that may go now
        self._in_flight = None
        with self._looking:  # who looks at the engine now has time to finish
            self._final_stats = engine.stats()
            # The heap goes with the engine, and the engine with the last lease.
            self._engine = self._made.engine = None
        engine.close()

    def __enter__(self):
        self._check_usable("with")
        return self

    def __exit__(self, kind, value, traceback):
        if kind is not None and not issubclass(kind, Exception) and not self._closed:
            self.abort()  # Ctrl-C or exit: wait for nobody
        self.close()

    def __del__(self):
        if getattr(self, "_closed", True):
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        text = f"{self!r} was not closed; use it in a with statement or call close()"
        self._free()
        warnings.warn(text, ResourceWarning, source=self, stacklevel=2)  # last: a filter may make it an error

    def __repr__(self):
        engine = self._engine
        state = "closed" if engine is None else "broken" if engine.is_broken else "open"
        return f"<epcomm.Communicator rank {self.rank} of {self.num_ranks}, {self.backend}, {state}>"

    # ---- ordering calls

    def _check_process(self, call):
        if self._pid != os.getpid():
            raise InvalidArgumentError(
                f"{call}: this communicator belongs to process {self._pid} and was inherited through fork by process "
                f"{os.getpid()}; create one in the child (start it with the spawn method)")

    def _check_reentry(self, call):
        if self._owner == threading.get_ident():
            raise InvalidArgumentError(f"{call}: called by a signal handler or destructor inside another call of this "
                                       "communicator; allowed there: abort()")

    def _check_usable(self, call):
        self._check_process(call)
        if self._closed:
            raise InvalidArgumentError(f"{call}: the communicator is closed")

    def _call(self, name, collective=True):
        self._check_usable(name)
        return _Serialised(self, name, collective)

    def _settle(self):
        """Wait for the call in flight; what it raised is raised by its event."""
        pending, self._in_flight = self._in_flight, None
        if pending is None:
            return
        try:
            pending.wait()
        except EpcommError:
            pass
        except BaseException:
            self._in_flight = pending  # Ctrl-C: it still runs
            raise

    def _raise_deferred(self):
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            raise deferred

    def _accept(self, call, make, *args):
        """Run an argument check; what it refuses, all ranks raise."""
        try:
            self._raise_deferred()
            return make(*args)
        except Exception as error:
            if isinstance(error, EpcommError):
                code, text = code_of(error), str(error)
            elif isinstance(error, MemoryError):
                code, text = code_of(OutOfMemoryError()), f"{call}: out of memory: {error}"
            else:
                code, text = code_of(InvalidArgumentError()), f"{call}: {type(error).__name__}: {error}"
            try:
                self._engine.refuse(call, code, text)
            except EpcommError as refusal:
                raise refusal from (None if isinstance(error, EpcommError) else error)
            raise

    # ---- checking arguments

    def _array(self, call, name, obj, ndim, dtypes=None, allowed=None):
        array = _arrays.view(obj, f"{call}: {name}")
        if array.device != self.device:
            raise InvalidArgumentError(
                f"{call}: {name} lies on {array.device}, but the communicator was created with device={self.device!r}")
        if self._gpu is not None and not array.aligned():
            raise InvalidArgumentError(f"{call}: {name} has elements at addresses that are no multiples of their "
                                       f"{array.itemsize} bytes; allowed on GPU memory: aligned ones")
        if array.requires_grad:
            raise InvalidArgumentError(
                f"{call}: {name} requires grad, and this call would lose its gradient; use epcomm.torch, pass "
                f"{name}.detach(), or call under torch.no_grad()")
        if ndim is not None and array.ndim != ndim:
            raise InvalidArgumentError(f"{call}: {name} has shape {array.shape}; allowed: {ndim} dimension"
                                       f"{'s' if ndim > 1 else ''}")
        if dtypes is not None and array.dtype not in dtypes:
            raise InvalidArgumentError(
                f"{call}: {name} has dtype {array.dtype}; allowed: {allowed or ', '.join(dtypes)}")
        return array

    def _shaped(self, call, name, array, shape):
        if array.shape != tuple(shape):
            raise InvalidArgumentError(f"{call}: {name} has shape {array.shape}; allowed: {tuple(shape)}")
        return array

    def _float32(self, call, name, obj, shape):
        """A float array of this shape as float32 in memory of its own or the caller's."""
        array = self._array(call, name, obj, len(shape), _FLOAT_DTYPES + ("float64",))
        self._shaped(call, name, array, shape)
        if array.dtype == "float32":
            return array
        if self._gpu is not None:
            return _gpu.as_float32(array, name)
        with np.errstate(over="ignore", invalid="ignore"):
            return _arrays.view(_arrays.as_numpy(array).astype(np.float32), name)

    def _check_row(self, call, name, row_bytes, scale_bytes):
        shape = self._made.shape
        if row_bytes > shape["row_bytes"] or row_bytes + scale_bytes > shape["row_bytes"] + shape["scale_bytes"]:
            room = f"{shape['row_bytes']} bytes (hidden={self._made.parameters['hidden']}, " \
                   f"dtype={self._made.parameters['dtype']})"
            if scale_bytes:
                room = f"{shape['row_bytes'] + shape['scale_bytes']} bytes together"
                row_bytes = f"{row_bytes} and their scales {scale_bytes}"
            raise InvalidArgumentError(f"{call}: rows of {name} take {row_bytes} bytes; allowed: at most {room}")

    def _check_handle(self, call, handle):
        if not isinstance(handle, Handle):
            raise InvalidArgumentError(
                f"{call}: handle is of type {type(handle).__name__}; allowed: the handle of a dispatch")
        if handle._communicator_serial != self._serial:
            raise InvalidArgumentError(f"{call}: handle {handle!r} belongs to another communicator")
        if handle.closed:
            raise InvalidArgumentError(f"{call}: handle is closed")
        return handle._routing

    def _check_common(self, call, num_sms, stream, async_op):
        threads = 0 if num_sms is None else _integer(call, "num_sms", num_sms, 1)
        if stream is not None and self._gpu is None:
            raise InvalidArgumentError(f"{call}: stream is {stream!r}; allowed: None on host memory")
        if _boolean(call, "async_op", async_op):
            self._engine.start_async()
        return min(threads, 1 << 20), bool(async_op)

    def _streams(self, call, arrays, stream):
        """On a GPU: handle of the caller's stream and what keeps it alive, as the engine's arguments."""
        if self._gpu is None:
            return {}
        handle, keep = _gpu.current(arrays[0].kind, self._gpu)
        if stream is not None:
            given = _gpu.handle_of(stream, f"{call}: stream")
            if given != handle:
                self._engine.order_after(handle)  # conversions, and the memory that results are made in
            handle, keep = given, stream
        for array in arrays:
            if array is not None and array.stream is not None and array.stream not in (handle, 1):
                self._engine.order_after(array.stream)
        return {"stream": handle, "stream_object": keep}

    def _on_gpu_only(self, call, name, value, allowed):
        if self._gpu is not None and value != allowed:
            raise UnsupportedError(f"{call}: {name} is {value!r}; allowed on GPU memory so far: {allowed!r}")

    def _dispatch_request(self, x, topk_idx, topk_weights, handle, scales, quantize, layout, expert_alignment,
                          capacity, copy, num_sms, stream, async_op):
        call = "dispatch"
        parameters = self._made.parameters
        threads, async_op = self._check_common(call, num_sms, stream, async_op)
        copy = _boolean(call, "copy", copy, optional=True)
        if quantize is not None and (not isinstance(quantize, str) or quantize != "fp8"):
            raise InvalidArgumentError(f"{call}: quantize is {quantize!r}; allowed: None or 'fp8'")
        if quantize and scales is not None:
            raise InvalidArgumentError(f"{call}: scales are given together with quantize={quantize!r}; allowed: one of "
                                       "them")
        if (topk_idx is None) == (handle is None):
            raise InvalidArgumentError(
                f"{call}: {'both' if handle is not None else 'neither'} of topk_idx and handle given; allowed: exactly "
                "one")
        x = self._array(call, "x", x, 2)
        if x.itemsize not in (1, 2, 4) or x.dtype[:1] in "<>=|":
            wide = f", rows of {x.shape[1] * x.itemsize} bytes" if x.itemsize > 4 else ""
            raise InvalidArgumentError(f"{call}: x has dtype {x.dtype}{wide}; allowed: any native dtype of 1, 2 or 4 "
                                       f"bytes, rows of at most {self._made.shape['row_bytes']} bytes")
        if quantize and x.dtype not in _FLOAT_DTYPES:
            raise InvalidArgumentError(
                f"{call}: x has dtype {x.dtype}; allowed with quantize='fp8': {', '.join(_FLOAT_DTYPES)}")
        tokens, columns = x.shape
        if columns < 1:
            raise InvalidArgumentError(f"{call}: x has shape {x.shape}; allowed: at least one column")
        if quantize:
            self._check_row(call, "x", columns, (columns + 127) // 128 * 4)
        else:
            self._check_row(call, "x", columns * x.itemsize, 0)
        routing, idx, weights = None, None, None
        if handle is not None:
            routing = self._check_handle(call, handle)
            layout, expert_alignment, capacity = handle.layout, handle.expert_alignment, handle.capacity
            if topk_weights is not None:
                raise InvalidArgumentError(f"{call}: topk_weights are given together with handle; allowed: the handle "
                                           "carries its own")
            if tokens != handle.num_tokens:
                raise InvalidArgumentError(f"{call}: x has {tokens} rows; allowed: {handle.num_tokens}, as the handle "
                                           "was made for")
        else:
            if tokens > parameters["max_tokens_per_rank"]:
                raise InvalidArgumentError(f"{call}: x has {tokens} rows; allowed: at most "
                                           f"max_tokens_per_rank={parameters['max_tokens_per_rank']}")
            if not isinstance(layout, str) or layout not in _host.LAYOUTS:
                raise InvalidArgumentError(f"{call}: layout is {layout!r}; allowed: 'rank' or 'expert'")
            expert_alignment = _integer(call, "expert_alignment", expert_alignment, 1, 1 << 20)
            if capacity is not None:
                capacity = _integer(call, "capacity", capacity, 0, (1 << 31) - 1)
            idx = self._array(call, "topk_idx", topk_idx, 2, ("int32", "int64"))
            self._shaped(call, "topk_idx", idx, (tokens, parameters["num_topk"]))
            if topk_weights is not None:
                weights = self._float32(call, "topk_weights", topk_weights, idx.shape)
        if scales is not None:
            scales = self._array(call, "scales", scales, 2)
            if scales.shape[0] != tokens:
                raise InvalidArgumentError(f"{call}: scales have shape {scales.shape}; allowed: ({tokens}, S)")
            if scales.dtype not in _create.DTYPES:
                raise InvalidArgumentError(f"{call}: scales have dtype {scales.dtype}; allowed: any native dtype")
            self._check_row(call, "x", columns * x.itemsize, scales.shape[1] * scales.itemsize)
        self._on_gpu_only(call, "layout", layout, "rank")
        self._on_gpu_only(call, "capacity", capacity, None)
        out_dtype = "float8_e4m3fn" if quantize else x.dtype
        scale_dtype = "float32" if quantize else scales.dtype if scales is not None else None
        if out_dtype not in _create.DTYPES:
            raise InvalidArgumentError(f"{call}: x has dtype {x.dtype}; allowed: any native dtype of 1, 2 or 4 bytes")
        for made in (out_dtype, scale_dtype):
            if made is not None:
                _arrays.check_dtype(made, x)  # once rows move it is too late to tell all ranks
        small, for_gpu = None, {}
        if self._gpu is not None:
            # Memory for as many rows as may come is taken before the call, so that its kernels follow each other
            # without the host; where that would waste much, once the rows are counted.
            most = self._made.shape["max_recv_tokens"] if routing is None else routing.output_rows
            has_weights = weights is not None if routing is None else routing.has_weights
            if routing is not None or most * parameters["num_topk"] * 8 <= _EARLY_BYTES:
                small = for_gpu["small"] = self._small_results(x, most, has_weights)
            for_gpu["async_op"] = async_op
            for_gpu |= self._streams(call, (x, idx, weights, scales), stream)
        return {
            "x": x, "columns": columns, "handle": handle, "layout": layout, "alignment": expert_alignment,
            "small": small, "capacity": capacity, "copy": copy, "threads": threads, "async_op": async_op,
            "out_dtype": out_dtype, "scale_dtype": scale_dtype, "stream_given": stream is not None,
            "begin": dict(
                x=x, topk_idx=idx, weights=weights, scales=scales, routing=routing,
                dtype=_create.DTYPES.index(x.dtype), scale_dtype=-1 if scale_dtype is None else
                _create.DTYPES.index(scale_dtype), quantize=1 if quantize else 0,
                row_type=_host.ROW_TYPES.get(x.dtype, 0), layout=_host.LAYOUTS[layout], alignment=expert_alignment,
                capacity=-1 if capacity is None else capacity, want_lease=1 if copy is None else 0 if copy else 2,
                max_threads=threads, **for_gpu),
        }

    def _dispatch_result(self, call, request):
        """Between the halves: make the arrays, then let the rows come. Peers count on the second half."""
        try:
            result, outputs = self._dispatch_arrays(call, request)
        except BaseException:
            self._engine.dispatch_finish(call, max_threads=request["threads"])
            raise
        deferred = None
        if call.bad_pick:
            error = InvalidArgumentError(
                f"{call.bad_pick}; it counted as -1 in call {call.routing.generation}, which has a capacity")
            self._deferred = error

            def deferred():
                if self._deferred is error:
                    self._deferred = None
                raise error

        if self._gpu is not None:
            current = partial(_gpu.current, request["x"].kind, self._gpu)
            if request["stream_given"] and outputs:
                self._engine.order_after(current()[0])  # a fill of new memory, for one
            outputs["current"] = current
        pending = self._engine.dispatch_finish(
            call, **outputs, keep=result, max_threads=request["threads"], async_op=request["async_op"])
        if pending is not None:
            self._follow(pending)
            result.event = Event(pending, deferred)
        return result

    def _dispatch_arrays(self, call, request):
        like = request["x"]
        routing = call.routing
        layout, capacity = request["layout"], request["capacity"]
        rows = routing.output_rows
        if rows > _MAX_ROWS:  # expert_offsets are int32
            raise InvalidArgumentError(
                f"rank {self.rank}: dispatch: expert_alignment is {request['alignment']} and makes {rows} rows, "
                f"padding counted; allowed: at most {_MAX_ROWS} rows")
        local = self.num_local_experts
        addresses = {}
        later = None  # on a GPU: what makes the small arrays

        def make(name, shape, dtype):
            if later is not None:
                return later
            array = _arrays.empty(shape, dtype, like)
            addresses[name] = (_arrays.view(array, name).ptr or 64) if self._gpu is None else _gpu.address(array)
            return array

        scale_columns = 0
        if request["scale_dtype"] is not None:
            scale_columns = call.scale_bytes // _arrays.itemsize_of(request["scale_dtype"])
        lease = call.lease()
        scales = None
        if lease is not None:
            owner, at, scales_at = lease
            x = _arrays.wrap(at, (rows, request["columns"]), request["out_dtype"], like, owner)
            if request["scale_dtype"] is not None:
                scales = _arrays.wrap(scales_at, (rows, scale_columns), request["scale_dtype"], like, owner)
        elif request["copy"] is False:
            raise UnsupportedError(
                f"rank {self.rank}: dispatch: copy=False, but the {rows} rows received, padding counted, do not fit in "
                f"one slot ({self._engine.leases_held()} leases are held); raise max_recv_tokens or let it copy")
        else:
            x = make("x", (rows, request["columns"]), request["out_dtype"])
            if request["scale_dtype"] is not None:
                scales = make("scales", (rows, scale_columns), request["scale_dtype"])
        meta_shape = (rows, self._made.parameters["num_topk"]) if layout == "rank" else (rows,)
        handle = request["handle"]
        if handle is None:
            handle = Handle(self, routing, layout, request["alignment"], capacity)
        if self._gpu is None:
            counts = None if capacity is not None else routing.picks_per_expert
            delivered = routing.recv_rows if layout == "rank" else routing.num_picks - routing.num_dropped
            num_tokens, overflow = self._scalar(delivered, like), self._scalar(routing.num_dropped, like)
        else:
            small = request["small"]
            if small is None:
                small = addresses["small"] = self._small_results(like, rows, routing.has_weights)
            counts = num_tokens = overflow = later = Later(small)
            if handle._like is None:
                handle._like = _arrays.kind_of(like)
            if lease is not None:
                handle._lease = weakref.ref(lease[0])
        result = Dispatched(
            x=x,
            scales=scales,
            topk_idx=make("ids", meta_shape, "int32"),
            topk_weights=make("weights", meta_shape, "float32") if routing.has_weights else None,
            num_tokens_per_expert=make("counts", (local,), "int32"),
            expert_offsets=make("offsets", (local + 1,), "int32") if layout == "expert" else None,
            counts=counts,
            num_tokens=num_tokens,
            overflow=overflow,
            handle=handle,
        )
        return result, addresses

    def _small_results(self, like, rows, has_weights):
        return _device.SmallResults(like, rows, self._made.parameters["num_topk"], self.num_local_experts, has_weights)

    @staticmethod
    def _scalar(value, like):
        array = _arrays.empty((), "int64", like)
        _arrays.as_numpy(_arrays.view(array, "scalar"))[...] = value
        return array

    def _combine_request(self, x, handle, apply_weights, topk_weights, exact_order, bias, out, num_sms, stream,
                         async_op):
        call = "combine"
        threads, async_op = self._check_common(call, num_sms, stream, async_op)
        routing = self._check_handle(call, handle)
        apply_weights = _boolean(call, "apply_weights", apply_weights, optional=True)
        exact_order = _boolean(call, "exact_order", exact_order)
        if apply_weights and handle.layout == "rank":
            raise InvalidArgumentError(f"{call}: apply_weights is True; allowed in rank layout: None or False, since "
                                       "the caller sums a rank's picks there")
        if apply_weights and not handle.has_weights:
            raise InvalidArgumentError(f"{call}: apply_weights is True, but the handle carries no weights; pass "
                                       "topk_weights to dispatch")
        if exact_order and handle.layout == "rank":
            raise InvalidArgumentError(f"{call}: exact_order is True; allowed in rank layout: False, since picks were "
                                       "summed before they came here")
        if apply_weights is None:
            apply_weights = handle.layout == "expert" and handle.has_weights
        x = self._array(call, "x", x, 2, _FLOAT_DTYPES)
        if x.shape[0] != handle.num_rows or x.shape[1] < 1:
            raise InvalidArgumentError(f"{call}: x has shape {x.shape}; allowed: ({handle.num_rows}, hidden), the rows "
                                       "of the dispatch")
        columns = x.shape[1]
        self._check_row(call, "x", columns * x.itemsize, 0)
        self._on_gpu_only(call, "exact_order", exact_order, False)
        if x.rows_contiguous():
            rows = x
        else:
            rows = _contiguous(x) if self._gpu is None else _gpu.contiguous(x, "x")
        carried, carried_out, carried_at = None, None, 0
        num_topk = self._made.parameters["num_topk"]
        if topk_weights is not None:
            shape = (handle.num_rows, num_topk) if handle.layout == "rank" else (handle.num_rows,)
            carried = self._float32(call, "topk_weights", topk_weights, shape)
            carried_out = _arrays.empty((handle.num_tokens, num_topk), "float32", x)
            carried_at = _arrays.view(carried_out, "carried").ptr or 64
        if bias is not None:
            bias = self._array(call, "bias", bias, None, tuple(dict.fromkeys((x.dtype, "float32"))))
            if bias.shape not in ((columns,), (handle.num_tokens, columns)):
                raise InvalidArgumentError(f"{call}: bias has shape {bias.shape}; allowed: ({columns},) or "
                                           f"({handle.num_tokens}, {columns})")
        if out is None:
            out = _arrays.empty((handle.num_tokens, columns), x.dtype, x)
            target = _arrays.view(out, "out")
        else:
            target = self._array(call, "out", out, 2, (x.dtype,))
            self._shaped(call, "out", target, (handle.num_tokens, columns))
            if target.readonly:
                raise InvalidArgumentError(f"{call}: out is read-only")
            if not target.rows_contiguous() or (target.shape[0] > 1 and abs(target.strides[0]) < columns * x.itemsize):
                raise InvalidArgumentError(f"{call}: out has strides {target.strides}; allowed: rows whose columns are "
                                           "adjacent and that do not overlap")
            for name, given in (("x", x), ("topk_weights", carried)):
                if given is not None and _overlap(target, given):
                    raise InvalidArgumentError(f"{call}: out overlaps {name} in memory")
        if bias is not None:
            # A row of out is written before another token's bias is read.
            in_out = _overlap(target, bias)
            if self._gpu is not None:
                bias = _gpu.as_float32(bias, "bias", copy=in_out)
            elif in_out or bias.dtype != "float32" or not bias.contiguous() or bias.ptr % 4:
                bias = _arrays.view(np.array(_arrays.as_numpy(bias), dtype=np.float32, order="C"), "bias")
        streams = self._streams(call, (x, carried, bias, target), stream)
        if streams:
            streams["current"] = partial(_gpu.current, x.kind, self._gpu)
        return {
            "out": out, "carried_out": carried_out,
            "engine": dict(
                x=rows, routing=routing, dtype=_create.DTYPES.index(x.dtype), row_type=_host.ROW_TYPES[x.dtype],
                apply_weights=apply_weights, exact_order=exact_order, carried=carried,
                bias=0 if bias is None else bias.ptr,
                bias_stride=columns if bias is not None and bias.ndim > 1 else 0, out=target.ptr or 64,
                out_stride=target.strides[0] if target.shape[0] > 1 else columns * x.itemsize,
                carried_out=carried_at, keep=(x, bias, out, carried_out, target, handle), max_threads=threads,
                async_op=async_op, **streams),
        }


def _overlap(a, b):
    """Whether the address ranges of two non-empty arrays meet."""
    def span(array):
        low = high = array.ptr
        for count, stride in zip(array.shape, array.strides):
            if count == 0:
                return 0, 0
            if stride < 0:
                low += (count - 1) * stride
            else:
                high += (count - 1) * stride
        return low, high + array.itemsize

    a_low, a_high = span(a)
    b_low, b_high = span(b)
    return a_low < b_high and b_low < a_high


class _Serialised:
    """Holds the communicator's lock during one call, after the call in flight has ended."""

    def __init__(self, communicator, name, collective):
        self.communicator = communicator
        self.name = name
        self.collective = collective

    def __enter__(self):
        communicator = self.communicator
        communicator._check_reentry(self.name)
        communicator._lock.acquire()
        communicator._owner = threading.get_ident()
        try:
            communicator._check_usable(self.name)
            communicator._settle()
            communicator._give_up_if_aborted()
            if self.collective:
                communicator._engine.raise_if_broken()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, kind, value, traceback):
        self.communicator._give_up_if_aborted()  # abort() came after the call's last wait
        self.leave()

    def leave(self):
        self.communicator._owner = None
        self.communicator._lock.release()
