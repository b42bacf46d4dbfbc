"""The device engine's face: structs in, kernels queued without the GIL, results out.

The same methods as :mod:`epcomm._host`; ``stream`` is the handle of the caller's CUDA stream.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector
from posix.unistd cimport getpid, pid_t

from epcomm._arrays cimport Array, empty, framework_of
from epcomm._cpp cimport Backend, Code, PeerState, Status, check, check_signals

import sys


cdef extern from "epcomm/heap.h" namespace "epcomm" nogil:
    cppclass HeapShape:
        int32_t num_ranks, num_topk, num_slots, num_channels, max_local_experts
        int64_t max_tokens_per_rank, max_recv_tokens, row_bytes, scale_bytes, staging_bytes

cdef extern from "epcomm/entry.h" namespace "epcomm" nogil:
    enum class Op(int32_t):
        pass

cdef extern from "device/core.hpp" namespace "epcomm::device" nogil:
    cppclass Mark:
        Mark()
        int query()

cdef extern from "device/engine.hpp" namespace "epcomm::device" nogil:
    cppclass CallContext:
        int (*interrupted)(void*) noexcept
        void* interrupted_arg
        int max_sms
        cbool join

    cppclass Rows:
        uint64_t data
        int64_t num_rows, num_cols, row_stride, col_stride
        int32_t itemsize

    cppclass CRouting "epcomm::device::Routing":
        uint64_t generation
        int64_t num_tokens, recv_rows
        cbool has_weights
        vector[int64_t] picks

    cppclass DispatchOutputs:
        uint64_t x, scales, ids, weights, tokens_per_expert, num_tokens, overflow

    cppclass DispatchArgs:
        Rows x, scales, weights
        int32_t dtype, scale_dtype, row_type
        int quantize
        uint64_t ids
        cbool ids_are_64
        int64_t ids_token_stride, ids_topk_stride
        shared_ptr[CRouting] routing
        int want_lease
        cbool early
        DispatchOutputs outputs

    cppclass CDispatchCall "epcomm::device::DispatchCall":
        shared_ptr[CRouting] routing
        int slot, lease_slot
        uint64_t wire_row_bytes, wire_scale_bytes

    cppclass CombineArgs:
        Rows x, carried
        int32_t dtype, row_type
        shared_ptr[CRouting] routing
        uint64_t bias, out, carried_out
        int64_t bias_stride, out_stride

    cppclass EngineOptions:
        int rank, device, num_sms
        HeapShape shape
        vector[int32_t] expert_rank
        double timeout_s
        vector[string] dtype_names
        vector[char] ctx
        uint64_t heap

    cppclass EngineStats:
        int64_t calls, refused_calls, dispatches, combines
        int64_t leases_granted, copies, zero_copy_combines
        int64_t rows_sent, bytes_sent, rows_received

    cppclass Engine:
        Engine(Backend* backend) except +
        Status open(EngineOptions options)
        Status refuse(Op op, const Status& why, const CallContext& context)
        Status barrier(const CallContext& context)
        Status dispatch_begin(DispatchArgs args, CDispatchCall* call, const CallContext& context)
        Status dispatch_finish(CDispatchCall* call, const DispatchOutputs& out, const CallContext& context)
        Status combine(const CombineArgs& args, const CallContext& context)
        Status mark(Mark* out)
        Status wait_mark(const Mark& mark, double timeout_s, const CallContext& context, cbool* passed)
        void release_slot(int slot, const vector[uint64_t]& streams)
        int leases_held()
        uint64_t slot_payload(int slot)
        uint64_t payload_bytes()
        uint64_t scales_offset(uint64_t wire_row_bytes)
        void leave(PeerState state)
        void give_up(const Status& why)
        Status look_at_peers()
        void abort(const Status& why)
        Status broken()
        const EngineStats& stats()

cdef extern from * nogil:
    """
    static inline epcomm::common::CuStream epcomm_stream(uintptr_t stream) {
      return reinterpret_cast<epcomm::common::CuStream>(stream);
    }
    static inline epcomm::device::CallContext epcomm_context(int (*interrupted)(void*), int max_sms, uintptr_t stream,
                                                             bool join) {
      epcomm::device::CallContext context;
      context.interrupted = interrupted;
      context.max_sms = max_sms;
      context.stream = epcomm_stream(stream);
      context.join = join;
      return context;
    }
    static inline void epcomm_kernel(epcomm::device::EngineOptions* options, int which, uintptr_t function) {
      epcomm::device::Kernels& k = options->kernels;
      epcomm::common::CuFunction* const all[] = {&k.enter, &k.send,  &k.send_quantized, &k.collect,
                                                   &k.copy,  &k.carry, &k.reduce_two,     &k.reduce_four,
                                                   &k.reduce_many};
      *all[which] = reinterpret_cast<epcomm::common::CuFunction>(function);
    }
    static inline int epcomm_lease_slot(epcomm::device::Engine* engine, uintptr_t stream) {
      return engine->lease_slot(epcomm_stream(stream));
    }
    static inline epcomm::Status epcomm_after(epcomm::device::Engine* engine, uintptr_t stream) {
      return engine->after(epcomm_stream(stream));
    }
    static inline epcomm::Status epcomm_join(epcomm::device::Engine* engine, const epcomm::device::Mark& mark,
                                             uintptr_t stream) {
      return engine->join_mark(mark, epcomm_stream(stream));
    }
    static inline epcomm::Status epcomm_status(int code, const std::string& text) {
      epcomm::Status status;
      status.code = epcomm::Code(code);
      status.text = text;
      return status;
    }
    """
    CallContext epcomm_context(int (*interrupted)(void*) noexcept, int max_sms, uintptr_t stream, cbool join)
    void epcomm_kernel(EngineOptions* options, int which, uintptr_t function)
    int epcomm_lease_slot(Engine* engine, uintptr_t stream)
    Status epcomm_after(Engine* engine, uintptr_t stream)
    Status epcomm_join(Engine* engine, const Mark& mark, uintptr_t stream)
    Status epcomm_status(int code, const string& text)


# Number of epcomm::Op.
OPS = {"dispatch": 1, "combine": 2, "barrier": 3}
KERNELS = ("epcomm_enter", "epcomm_send", "epcomm_send_quantized", "epcomm_collect", "epcomm_copy", "epcomm_carry",
           "epcomm_reduce_two", "epcomm_reduce_four", "epcomm_reduce_many")
DEFAULT_SMS = 24


cdef CallContext _context(int max_sms=0, uintptr_t stream=0, cbool join=True):
    return epcomm_context(check_signals, max_sms, stream, join)


cdef class Routing:
    """What a handle owns: where each row of a dispatch went and came from."""

    cdef shared_ptr[CRouting] ptr

    @property
    def generation(self):
        return self.ptr.get().generation

    @property
    def num_tokens(self):
        return self.ptr.get().num_tokens

    @property
    def output_rows(self):
        return self.ptr.get().recv_rows

    @property
    def recv_rows(self):
        return self.ptr.get().recv_rows

    @property
    def num_dropped(self):
        return 0

    @property
    def num_picks(self):
        return sum(self.picks_per_expert)

    @property
    def has_weights(self):
        return self.ptr.get().has_weights

    @property
    def picks_per_expert(self):
        """Picks of each local expert."""
        return list(self.ptr.get().picks)


cdef class SmallResults:
    """One allocation for the small arrays of a dispatch's result; each is made when somebody reads it.

    An allocation costs the host as much as several launches, and a view a third of that. The arrays share the memory
    but no version counter, and a framework that tracks memory by stream tracks all of it.

    Parameters
    ----------
    like : Array
        Whose framework and device.
    rows : int
        Room for the picks of so many received rows.
    num_topk, num_local_experts : int
    has_weights : bool
    """

    cdef object memory
    cdef cbool is_torch
    cdef cbool has_weights
    cdef int64_t rows, num_topk, num_local_experts
    cdef DispatchOutputs at
    cdef shared_ptr[CRouting] routing

    def __cinit__(self, Array like, int64_t rows, int64_t num_topk, int64_t num_local_experts, bint has_weights):
        self.rows = rows
        self.num_topk = num_topk
        self.num_local_experts = num_local_experts
        self.has_weights = has_weights
        cdef int64_t picks = (rows * num_topk * 4 + 255) // 256 * 256
        cdef int64_t counts = 256 + picks * (2 if has_weights else 1)
        self.is_torch = framework_of(like) == "torch"
        self.memory = empty((counts + 4 * num_local_experts,), "uint8", like)
        cdef uintptr_t base = self.memory.data_ptr() if self.is_torch else self.memory.data.ptr
        self.at.num_tokens = base
        self.at.overflow = base + 8
        self.at.ids = base + 256
        self.at.weights = base + 256 + picks if has_weights else 0
        self.at.tokens_per_expert = base + counts

    def field(self, str name):
        """The array of a field of ``Dispatched``; ``counts`` as a list."""
        if name == "counts":
            return list(self.routing.get().picks)
        cdef int64_t rows = self.routing.get().recv_rows
        if name == "topk_idx":
            return self._array(self.at.ids, (rows, self.num_topk), "int32")
        if name == "topk_weights":
            return self._array(self.at.weights, (rows, self.num_topk), "float32")
        if name == "num_tokens_per_expert":
            return self._array(self.at.tokens_per_expert, (self.num_local_experts,), "int32")
        return self._array(self.at.num_tokens if name == "num_tokens" else self.at.overflow, (), "int64")

    cdef object _array(self, uint64_t ptr, tuple shape, str dtype):
        cdef int64_t at = ptr - self.at.num_tokens  # which lies first
        if not self.is_torch:
            return sys.modules["cupy"].ndarray(shape, dtype=dtype, memptr=self.memory.data + at)
        made = self.memory.new_empty(0, dtype=getattr(sys.modules["torch"], dtype))
        strides = (max(1, shape[1]), 1) if len(shape) == 2 else (1,) * len(shape)
        return made.set_(self.memory.untyped_storage(), at // made.element_size(), shape, strides)


cdef class Lease:
    """A slot of the heap in a caller's hands. It ends when the last array over it dies and its streams are past."""

    cdef DeviceEngine engine
    cdef int slot
    cdef readonly uintptr_t ptr
    cdef vector[uint64_t] streams
    cdef list keep
    cdef object __weakref__

    def record_stream(self, uintptr_t stream, keep=None):
        """Hold the slot also until what `stream` has by the lease's end is done."""
        cdef uint64_t known
        for known in self.streams:
            if known == stream:
                return
        self.streams.push_back(stream)
        self.keep.append(keep)

    def __dealloc__(self):
        if self.engine is not None and self.engine.engine != NULL and self.engine.pid == getpid():
            self.engine.engine.release_slot(self.slot, self.streams)


cdef Lease _lease(DeviceEngine engine, int slot, uintptr_t stream, keep):
    cdef Lease lease = Lease.__new__(Lease)
    lease.keep = []
    lease.slot = slot
    lease.ptr = engine.engine.slot_payload(slot)
    lease.engine = engine
    lease.record_stream(stream, keep)
    return lease


cdef class Call:
    """A dispatch between its two halves, with everything that it reads kept alive."""

    cdef CDispatchCall call
    cdef DeviceEngine engine
    cdef object keep
    cdef uintptr_t stream
    cdef object stream_object

    @property
    def routing(self) -> Routing:
        cdef Routing routing = Routing.__new__(Routing)
        routing.ptr = self.call.routing
        return routing

    @property
    def row_bytes(self):
        return self.call.wire_row_bytes

    @property
    def scale_bytes(self):
        return self.call.wire_scale_bytes

    @property
    def bad_pick(self):
        return ""

    def lease(self):
        """(lease, address of x, address of scales) where the result is a view of the heap, else None."""
        if self.call.lease_slot < 0:
            return None
        cdef Lease lease = _lease(self.engine, self.call.lease_slot, self.stream, self.stream_object)
        return lease, lease.ptr, lease.ptr + self.engine.engine.scales_offset(self.call.wire_row_bytes)


cdef class Pending:
    """A call whose kernels are on their way."""

    cdef Mark mark
    cdef DeviceEngine engine
    cdef object keep
    cdef object current  # () -> (handle, object) of the stream that wait() joins

    def done(self) -> bool:
        return self.mark.query() != 600

    def wait(self, timeout_s=None) -> bool:
        """Block without the GIL, Ctrl-C checked every 50 ms; raise what went wrong. False: not done yet."""
        cdef double c_timeout_s = 1e9 if timeout_s is None else timeout_s
        cdef cbool passed = False
        cdef CallContext context = _context()
        with nogil:
            check(self.engine.engine.wait_mark(self.mark, c_timeout_s, context, &passed))
        if passed:
            self.keep = None
        return passed

    def join_stream(self):
        """Order the caller's current stream behind the call."""
        cdef uintptr_t stream = self.current()[0]
        check(epcomm_join(self.engine.engine, self.mark, stream))


cdef class DeviceEngine:
    """One engine over one connected backend, which it keeps alive.

    Parameters
    ----------
    backend : Backend
        Connected, with device operations.
    rank : int
    device : int
    shape : dict
        Of the heap.
    expert_rank : list of int
    num_sms : int or None
    timeout_s : float
    dtype_names : sequence of str
    functions : dict of str to int
        ``CUfunction`` of each of ``KERNELS``, loaded for as long as the process lives.
    """

    cdef Engine* engine
    cdef object backend
    cdef pid_t pid
    cdef list pending

    def __cinit__(self):
        self.engine = NULL
        self.pid = getpid()
        self.pending = []

    def __init__(self, backend, int rank, int device, dict shape, expert_rank, num_sms, double timeout_s,
                 dtype_names, dict functions):
        cdef Backend* c_backend = <Backend*>PyCapsule_GetPointer(backend.capsule(), "epcomm.Backend")
        cdef EngineOptions options
        cdef bytes ctx = backend.device_ctx()
        cdef const char* data = ctx
        options.rank = rank
        options.device = device
        options.shape.num_ranks = shape["num_ranks"]
        options.shape.num_topk = shape["num_topk"]
        options.shape.num_slots = shape["num_slots"]
        options.shape.num_channels = shape["num_channels"]
        options.shape.max_local_experts = shape["max_local_experts"]
        options.shape.max_tokens_per_rank = shape["max_tokens_per_rank"]
        options.shape.max_recv_tokens = shape["max_recv_tokens"]
        options.shape.row_bytes = shape["row_bytes"]
        options.shape.scale_bytes = shape["scale_bytes"]
        options.shape.staging_bytes = shape["staging_bytes"]
        options.expert_rank = expert_rank
        options.num_sms = DEFAULT_SMS if num_sms is None else num_sms
        options.timeout_s = timeout_s
        options.dtype_names = [name.encode() for name in dtype_names]
        for which, name in enumerate(KERNELS):
            epcomm_kernel(&options, which, functions[name])
        options.ctx.assign(data, data + len(ctx))
        options.heap = backend.heap_ptr
        self.backend = backend
        self.engine = new Engine(c_backend)
        with nogil:
            check(self.engine.open(move(options)))

    def __dealloc__(self):
        if self.engine == NULL or self.pid != getpid():
            return  # inherited through fork: the stream and the memory are the parent's
        with nogil:
            del self.engine
        self.engine = NULL

    cdef int _tidy(self) except -1:
        """Let go of what finished calls kept."""
        if self.pending:
            self.pending = [pending for pending in self.pending if not pending.done()]
        return 0

    cdef Pending _start(self, keep, current):
        cdef Pending pending = Pending.__new__(Pending)
        pending.engine = self
        pending.keep = keep
        pending.current = current
        check(self.engine.mark(&pending.mark))
        # Freed memory could be reused on the caller's stream, which the call's kernels are not ordered with.
        self.pending.append(pending)
        return pending

    def order_after(self, uintptr_t stream):
        """Our next work comes after what `stream` has by now."""
        check(epcomm_after(self.engine, stream))

    def refuse(self, str op, int code, str text, uintptr_t stream=0):
        """Take part in a call only to refuse it; raises what all ranks raise."""
        cdef Status why = epcomm_status(code, text.encode("utf-8", "replace"))
        cdef CallContext context = _context(0, stream)
        cdef Op c_op = <Op><int>OPS[op]
        with nogil:
            check(self.engine.refuse(c_op, why, context))

    def barrier(self, uintptr_t stream=0):
        cdef CallContext context = _context(0, stream)
        with nogil:
            check(self.engine.barrier(context))

    def dispatch_begin(self, x, topk_idx, weights, scales, Routing routing, int dtype, int scale_dtype, int quantize,
                       int row_type, int layout, int64_t alignment, int64_t capacity, int want_lease,
                       int max_threads, uintptr_t stream, stream_object=None, SmallResults small=None,
                       bint async_op=False) -> Call:
        """First half of a dispatch. Arrays are ``_arrays.Array`` of checked shape and dtype, or None.

        ``small``: with room for all rows that may come, where there is such memory; else the second half gets it.
        """
        cdef DispatchArgs args
        cdef CallContext context = _context(max_threads, stream, not async_op)
        cdef Call call = Call.__new__(Call)
        self._tidy()
        call.engine = self
        call.stream = stream
        call.stream_object = stream_object
        call.keep = [x, topk_idx, weights, scales, routing]
        args.x = _rows(x)
        if scales is not None:
            args.scales = _rows(scales)
        if weights is not None:
            args.weights = _rows(weights)
        if topk_idx is not None:
            args.ids = topk_idx.ptr or 64
            args.ids_are_64 = topk_idx.itemsize == 8
            args.ids_token_stride, args.ids_topk_stride = topk_idx.strides
        if routing is not None:
            args.routing = routing.ptr
        args.dtype = dtype
        args.scale_dtype = scale_dtype
        args.quantize = quantize
        args.row_type = row_type
        args.want_lease = want_lease
        if small is not None:
            args.early = True
            args.outputs = small.at
            call.keep.append(small)
        with nogil:
            check(self.engine.dispatch_begin(args, &call.call, context))
        if small is not None:
            small.routing = call.call.routing
        return call

    def dispatch_finish(self, Call call, uintptr_t x=0, uintptr_t scales=0, SmallResults small=None, keep=None,
                        int max_threads=0, bint async_op=False, current=None):
        """Second half; where rows and scales are copied to, 0 for a lease. Pending with ``async_op``.

        ``small``: only if the first half had none.
        """
        cdef DispatchOutputs out
        cdef CallContext context = _context(max_threads, call.stream, not async_op)
        if small is not None:
            out = small.at
            small.routing = call.call.routing
        out.x = x
        out.scales = scales
        with nogil:
            check(self.engine.dispatch_finish(&call.call, out, context))
        kept, call.keep = call.keep, None
        return self._start((kept, keep), current) if async_op else None

    def combine(self, x, Routing routing, int dtype, int row_type, bint apply_weights, bint exact_order, carried,
                uintptr_t bias, int64_t bias_stride, uintptr_t out, int64_t out_stride, uintptr_t carried_out,
                keep=None, int max_threads=0, bint async_op=False, uintptr_t stream=0, stream_object=None,
                current=None):
        cdef CombineArgs args
        cdef CallContext context = _context(max_threads, stream, not async_op)
        self._tidy()
        args.x = _rows(x)
        args.dtype = dtype
        args.row_type = row_type
        args.routing = routing.ptr
        if carried is not None:
            args.carried = _rows(carried)
        args.bias = bias
        args.bias_stride = bias_stride
        args.out = out
        args.out_stride = out_stride
        args.carried_out = carried_out
        with nogil:
            check(self.engine.combine(args, context))
        return self._start((x, routing, carried, keep), current) if async_op else None

    def take_lease(self, uint64_t size_bytes, uintptr_t stream=0, stream_object=None):
        """A Lease over at least ``size_bytes`` of the heap, or None where none is free or large enough."""
        if size_bytes > self.engine.payload_bytes():
            return None
        cdef int slot = epcomm_lease_slot(self.engine, stream)
        return None if slot < 0 else _lease(self, slot, stream, stream_object)

    def leases_held(self) -> int:
        return self.engine.leases_held()

    def start_async(self) -> None:
        """Calls are asynchronous by nature here."""

    def give_up(self, str text):
        """Break it for good and tell peers."""
        cdef Status why = epcomm_status(<int>Code.kPeerLost, text.encode("utf-8", "replace"))
        with nogil:
            self.engine.give_up(why)

    def close(self):
        """Wait for own kernels within the deadline, tell peers that this rank left. Idempotent.

        The own heap stays until the last lease over it dies.
        """
        with nogil:
            self.engine.leave(PeerState.kLeft)
        self.pending = []
        self.backend.close()

    def look_at_peers(self):
        """Raise PeerLostError if a peer's process ended or a peer gave up."""
        with nogil:
            check(self.engine.look_at_peers())

    def abort(self, str text):
        cdef Status why = epcomm_status(<int>Code.kPeerLost, text.encode("utf-8", "replace"))
        with nogil:
            self.engine.abort(why)

    def raise_if_broken(self):
        with nogil:
            check(self.engine.broken())

    @property
    def is_broken(self):
        return self.engine.broken().code != Code.kOk

    def stats(self) -> dict:
        cdef EngineStats stats = self.engine.stats()
        return {
            "calls": stats.calls,
            "refused_calls": stats.refused_calls,
            "dispatches": stats.dispatches,
            "combines": stats.combines,
            "leases_granted": stats.leases_granted,
            "leases_held": self.engine.leases_held(),
            "copies": stats.copies,
            "zero_copy_combines": stats.zero_copy_combines,
            "rows_sent": stats.rows_sent,
            "bytes_sent": stats.bytes_sent,
            "rows_received": stats.rows_received,
        }


cdef Rows _rows(array) except *:
    """A checked one- or two-dimensional ``_arrays.Array``; one dimension is one column."""
    cdef Rows rows
    cdef object shape = array.shape, strides = array.strides
    rows.data = array.ptr or 64  # an empty array may have no address; null would say "not given"
    rows.num_rows = shape[0]
    rows.row_stride = strides[0]
    rows.num_cols = 1 if len(shape) == 1 else shape[1]
    rows.col_stride = array.itemsize if len(shape) == 1 else strides[1]
    rows.itemsize = array.itemsize
    return rows
