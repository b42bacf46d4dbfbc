"""The host engine's face: structs in, one checked call without the GIL, results out."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector
from posix.unistd cimport getpid, pid_t

from epcomm._cpp cimport Backend, Code, HostTransport, Status, check, check_signals


cdef extern from "epcomm/backend.hpp" namespace "epcomm" nogil:
    enum class PeerState(uint64_t):
        kLeft

cdef extern from "epcomm/heap.h" namespace "epcomm" nogil:
    cppclass HeapShape:
        int32_t num_ranks, num_topk, num_slots, num_channels, max_local_experts
        int64_t max_tokens_per_rank, max_recv_tokens, row_bytes, scale_bytes, staging_bytes

    cppclass HeapLayout:
        uint64_t state, staging, slots, slot_stride, total_bytes
        int64_t slot_rows

    HeapLayout heap_layout(const HeapShape& shape)
    int32_t num_physical_slots(const HeapShape& shape)

cdef extern from "epcomm/entry.h" namespace "epcomm" nogil:
    enum class Op(int32_t):
        pass

    enum class RowLayout(int32_t):
        pass

cdef extern from "host/rows.hpp" namespace "epcomm::host" nogil:
    enum class RowType(int32_t):
        pass

    cppclass RowOps:
        const char* name

    const RowOps* row_ops(const char* isa)

cdef extern from "host/layout.hpp" namespace "epcomm::host" nogil:
    cppclass IndexView:
        const void* data
        cbool is64
        int64_t num_tokens
        int32_t num_topk
        int64_t token_stride_bytes, topk_stride_bytes

cdef extern from "host/routing.hpp" namespace "epcomm::host" nogil:
    cppclass CRouting "epcomm::host::Routing":
        uint64_t generation
        int64_t num_tokens, recv_rows, num_picks, num_dropped, capacity, alignment
        int32_t num_local_experts, num_ranks
        cbool has_weights
        vector[int64_t] picks_of, recv_begin, expert_begin
        int64_t output_rows()

cdef extern from "host/engine.hpp" namespace "epcomm::host" nogil:
    cppclass EngineOptions:
        int rank
        HeapShape shape
        vector[int32_t] expert_rank
        int num_threads
        double timeout_s
        const RowOps* ops
        vector[string] dtype_names
        cbool push_only

    cppclass CallContext:
        int (*interrupted)(void*) noexcept
        void* interrupted_arg
        int max_threads

    cppclass Rows:
        const char* data
        int64_t num_rows, num_cols, row_stride, col_stride
        int32_t itemsize

    cppclass DispatchArgs:
        Rows x, scales, weights
        int32_t dtype, scale_dtype
        int quantize
        RowType row_type
        RowLayout layout
        int64_t alignment, capacity
        IndexView ids
        shared_ptr[CRouting] routing
        int want_lease

    cppclass CDispatchCall "epcomm::host::DispatchCall":
        shared_ptr[CRouting] routing
        int slot, lease_slot
        uint64_t wire_row_bytes, wire_scale_bytes
        string bad_pick

    cppclass DispatchOutputs:
        char* x
        char* scales
        int32_t* ids
        float* weights
        int32_t* tokens_per_expert
        int32_t* expert_offsets

    cppclass CombineArgs:
        Rows x, carried
        int32_t dtype
        RowType row_type
        shared_ptr[CRouting] routing
        cbool apply_weights, exact_order
        const float* bias
        char* out
        int64_t out_stride
        float* carried_out

    cppclass EngineStats:
        int64_t calls, refused_calls, dispatches, combines
        int64_t leases_granted, copies, zero_copy_combines
        int64_t rows_sent, bytes_sent, rows_received

    cppclass Engine:
        Engine(HostTransport* transport, EngineOptions options) except +
        Status refuse(Op op, const Status& why, const CallContext& context)
        Status barrier(const CallContext& context)
        Status dispatch_begin(DispatchArgs args, CDispatchCall* call, const CallContext& context)
        Status dispatch_finish(CDispatchCall* call, const DispatchOutputs& out, const CallContext& context)
        Status combine(const CombineArgs& args, const CallContext& context)
        int lease_slot()
        void release_slot(int slot)
        int leases_held()
        char* slot_payload(int slot)
        uint64_t payload_bytes()
        uint64_t scales_offset(uint64_t wire_row_bytes)
        void leave(PeerState state)
        void abort(const Status& why)
        void give_up(const Status& why)
        void stop()
        const Status& broken()
        Status look_at_peers()
        const EngineStats& stats()
        uint64_t epoch()

cdef extern from "host/async.hpp" namespace "epcomm::host" nogil:
    cppclass Ticket:
        cbool done()
        cbool wait_for(double seconds)
        const Status& status()

    cppclass AsyncRunner:
        AsyncRunner() except +
        shared_ptr[Ticket] dispatch_finish(Engine* engine, CDispatchCall* call, const DispatchOutputs& out,
                                           const CallContext& context) except +
        shared_ptr[Ticket] combine(Engine* engine, const CombineArgs& args, const CallContext& context) except +

cdef extern from * nogil:
    """
    static inline char* epcomm_address(uintptr_t at) { return reinterpret_cast<char*>(at); }
    static inline epcomm::host::Rows epcomm_rows(uintptr_t at, int64_t rows, int64_t cols, int64_t row_stride,
                                                 int64_t col_stride, int32_t itemsize) {
      epcomm::host::Rows made;
      made.data = reinterpret_cast<const std::byte*>(at);
      made.num_rows = rows; made.num_cols = cols;
      made.row_stride = row_stride; made.col_stride = col_stride;
      made.itemsize = itemsize;
      return made;
    }
    static inline epcomm::host::IndexView epcomm_ids(uintptr_t at, bool is64, int64_t tokens, int32_t topk,
                                                     int64_t token_stride, int64_t topk_stride) {
      return {reinterpret_cast<const void*>(at), is64, tokens, topk, token_stride, topk_stride};
    }
    static inline void epcomm_outputs(epcomm::host::DispatchOutputs* out, uintptr_t x, uintptr_t scales,
                                      uintptr_t ids, uintptr_t weights, uintptr_t counts, uintptr_t offsets) {
      out->x = reinterpret_cast<std::byte*>(x);
      out->scales = reinterpret_cast<std::byte*>(scales);
      out->ids = reinterpret_cast<int32_t*>(ids);
      out->weights = reinterpret_cast<float*>(weights);
      out->tokens_per_expert = reinterpret_cast<int32_t*>(counts);
      out->expert_offsets = reinterpret_cast<int32_t*>(offsets);
    }
    static inline void epcomm_combine_out(epcomm::host::CombineArgs* args, uintptr_t bias, int64_t bias_stride,
                                          uintptr_t out, int64_t stride, uintptr_t carried) {
      args->bias = reinterpret_cast<const float*>(bias);
      args->bias_stride = bias_stride;
      args->out = reinterpret_cast<std::byte*>(out);
      args->out_stride = stride;
      args->carried_out = reinterpret_cast<float*>(carried);
    }
    static inline uintptr_t epcomm_slot_payload(epcomm::host::Engine* engine, int slot) {
      return reinterpret_cast<uintptr_t>(engine->slot_payload(slot));
    }
    static inline epcomm::Status epcomm_status(int code, const std::string& text, int peer) {
      epcomm::Status status;
      status.code = epcomm::Code(code);
      status.text = text;
      status.peer = peer;
      return status;
    }
    """
    Rows epcomm_rows(uintptr_t at, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
                     int32_t itemsize)
    IndexView epcomm_ids(uintptr_t at, cbool is64, int64_t tokens, int32_t topk, int64_t token_stride,
                         int64_t topk_stride)
    void epcomm_outputs(DispatchOutputs* out, uintptr_t x, uintptr_t scales, uintptr_t ids, uintptr_t weights,
                        uintptr_t counts, uintptr_t offsets)
    void epcomm_combine_out(CombineArgs* args, uintptr_t bias, int64_t bias_stride, uintptr_t out, int64_t stride,
                            uintptr_t carried)
    uintptr_t epcomm_slot_payload(Engine* engine, int slot)
    Status epcomm_status(int code, const string& text, int peer)


# Numbers of epcomm::Op, RowLayout and RowType.
OPS = {"dispatch": 1, "combine": 2, "barrier": 3}
LAYOUTS = {"rank": 0, "expert": 1}
ROW_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


cdef CallContext _context(int max_threads):
    cdef CallContext context
    context.interrupted = check_signals
    context.interrupted_arg = NULL
    context.max_threads = max_threads
    return context


cdef HeapShape _shape(dict shape) except *:
    cdef HeapShape made
    made.num_ranks = shape["num_ranks"]
    made.num_topk = shape["num_topk"]
    made.num_slots = shape["num_slots"]
    made.num_channels = shape["num_channels"]
    made.max_local_experts = shape["max_local_experts"]
    made.max_tokens_per_rank = shape["max_tokens_per_rank"]
    made.max_recv_tokens = shape["max_recv_tokens"]
    made.row_bytes = shape["row_bytes"]
    made.scale_bytes = shape["scale_bytes"]
    made.staging_bytes = shape["staging_bytes"]
    return made


def heap_bytes(dict shape) -> dict:
    """Bytes of one rank's heap by purpose, and the heap offset of the state words."""
    cdef HeapShape c_shape = _shape(shape)
    cdef HeapLayout layout = heap_layout(c_shape)
    return {
        "control": layout.staging,
        "staging": layout.slots - layout.staging,
        "slots": layout.total_bytes - layout.slots,
        "total": layout.total_bytes,
        "slot_rows": layout.slot_rows,
        "state_word": layout.state,
    }


def isa(name=None) -> str | None:
    """The instruction set the host loops use; None if ``name`` does not run here."""
    cdef bytes wanted = (name or "").encode()
    cdef const RowOps* ops = row_ops(wanted)
    return None if ops == NULL else ops.name.decode()


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
        return self.ptr.get().output_rows()

    @property
    def recv_rows(self):
        return self.ptr.get().recv_rows

    @property
    def num_dropped(self):
        return self.ptr.get().num_dropped

    @property
    def num_picks(self):
        return self.ptr.get().num_picks

    @property
    def has_weights(self):
        return self.ptr.get().has_weights

    @property
    def picks_per_expert(self):
        """Picks of each local expert, before any capacity."""
        cdef CRouting* routing = self.ptr.get()
        cdef int e, s, local = routing.num_local_experts
        counts = [0] * local
        for s in range(routing.num_ranks):
            for e in range(local):
                counts[e] += routing.picks_of[s * local + e]
        return counts


cdef class Lease:
    """A slot of the heap in a caller's hands. It ends when the last array over it dies."""

    cdef HostEngine engine
    cdef int slot
    cdef readonly uintptr_t ptr

    def __dealloc__(self):
        # After a fork the slot is the parent's, and its mutex may be held for ever.
        if self.engine is not None and self.engine.engine != NULL and self.engine.pid == getpid():
            self.engine.engine.release_slot(self.slot)


cdef class Call:
    """A dispatch between its two halves, with everything that it reads and writes kept alive."""

    cdef CDispatchCall call
    cdef HostEngine engine
    cdef object keep
    cdef cbool finished

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
        """Capacity mode: what is to be said of the first id that was taken as -1; empty if there was none."""
        return self.call.bad_pick.decode()

    def lease(self):
        """(lease, address of x, address of scales) where the result is a view of the heap, else None."""
        if self.call.lease_slot < 0:
            return None
        cdef Lease lease = Lease.__new__(Lease)
        lease.engine = self.engine
        lease.slot = self.call.lease_slot
        cdef uintptr_t x = epcomm_slot_payload(self.engine.engine, self.call.lease_slot)
        cdef uint64_t scales
        lease.ptr = x
        if self.call.lease_slot == self.call.slot:
            scales = self.engine.engine.scales_offset(self.call.wire_row_bytes)
        else:
            scales = <uint64_t>self.call.routing.get().output_rows() * self.call.wire_row_bytes
            scales = (scales + 63) // 64 * 64
        return lease, x, x + scales


cdef class Pending:
    """A call that runs beside its caller."""

    cdef shared_ptr[Ticket] ticket
    cdef object keep
    cdef pid_t pid

    def __cinit__(self):
        self.pid = getpid()

    cdef int check_process(self) except -1:
        if self.pid != getpid():
            from epcomm.errors import InvalidArgumentError
            raise InvalidArgumentError(
                f"event: this call belongs to process {self.pid} and was inherited through fork by process {getpid()}")
        return 0

    def done(self) -> bool:
        self.check_process()
        return self.ticket.get().done()

    def join(self) -> None:
        """Block until the call has ended, whatever comes. Only after ``HostEngine.abort``, which ends its waits."""
        cdef cbool done = False
        with nogil:
            while not done:
                done = self.ticket.get().wait_for(1.0)

    def wait(self, timeout_s=None) -> bool:
        """Block without the GIL, Ctrl-C checked every 50 ms; raise what the call raised. False: not done yet."""
        import time

        self.check_process()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        cdef cbool done = False
        cdef double step
        while not done:
            step = 0.05
            if deadline is not None:
                step = min(step, deadline - time.monotonic())
                if step <= 0:
                    return False
            with nogil:
                done = self.ticket.get().wait_for(step)
            PyErr_CheckSignals()
        self.keep = None
        cdef Status status = self.ticket.get().status()
        check(status)
        return True


cdef class HostEngine:
    """One engine over one connected backend, which it keeps alive."""

    cdef Engine* engine
    cdef AsyncRunner* runner
    cdef readonly object backend
    cdef pid_t pid
    cdef readonly str isa

    def __cinit__(self):
        self.engine = NULL
        self.runner = NULL
        self.pid = getpid()

    def __init__(self, backend, int rank, dict shape, expert_rank, int num_threads, double timeout_s, dtype_names,
                 isa=None, bint push_only=False):
        cdef Backend* c_backend = <Backend*>PyCapsule_GetPointer(backend.capsule(), "epcomm.Backend")
        cdef EngineOptions options
        cdef bytes wanted = (isa or "").encode()
        options.rank = rank
        options.shape = _shape(shape)
        options.expert_rank = expert_rank
        options.num_threads = num_threads
        options.timeout_s = timeout_s
        options.ops = row_ops(wanted)
        if options.ops == NULL:
            from epcomm.errors import InvalidArgumentError
            raise InvalidArgumentError(f"EPCOMM_HOST_ISA={isa!r} does not run on this processor")
        options.dtype_names = [name.encode() for name in dtype_names]
        options.push_only = push_only
        cdef HostTransport* transport = c_backend.host_transport()
        if transport == NULL:
            from epcomm.errors import UnsupportedError
            raise UnsupportedError(f"backend {backend.name} has no host-driven operations")
        self.isa = options.ops.name.decode()
        try:
            self.engine = new Engine(transport, options)
        except RuntimeError as error:  # std::system_error: no more threads
            from epcomm.errors import SystemCallError
            raise SystemCallError(f"starting {num_threads} host threads: {error}; look at `ulimit -u` and "
                                  "`ulimit -v`, or lower options['num_threads']") from None
        self.backend = backend

    def __dealloc__(self):
        cdef Status gone
        if self.pid != getpid():
            return  # inherited through fork: the threads are the parent's
        if self.runner != NULL:
            gone = epcomm_status(<int>Code.kPeerLost, b"the communicator was dropped", -1)
            self.engine.abort(gone)
            with nogil:
                del self.runner
            self.runner = NULL
        if self.engine != NULL:
            with nogil:
                self.engine.leave(PeerState.kLeft)  # where creation ended in between: peers would wait
                del self.engine
            self.engine = NULL

    def refuse(self, str op, int code, str text):
        """Take part in a call only to refuse it; raises what all ranks raise."""
        cdef Status why = epcomm_status(code, text.encode("utf-8", "replace"), -1)
        cdef CallContext context = _context(0)
        cdef Op c_op = <Op><int>OPS[op]
        with nogil:
            check(self.engine.refuse(c_op, why, context))

    def barrier(self):
        cdef CallContext context = _context(0)
        with nogil:
            check(self.engine.barrier(context))

    def dispatch_begin(self, x, topk_idx, weights, scales, Routing routing, int dtype, int scale_dtype, int quantize,
                       int row_type, int layout, int64_t alignment, int64_t capacity, int want_lease,
                       int max_threads) -> Call:
        """First half of a dispatch. Arrays are ``_arrays.Array`` of checked shape and dtype, or None."""
        cdef DispatchArgs args
        cdef CallContext context = _context(max_threads)
        cdef Call call = Call.__new__(Call)
        call.engine = self
        call.keep = [x, topk_idx, weights, scales, routing]
        args.x = _rows(x)
        if scales is not None:
            args.scales = _rows(scales)
        if weights is not None:
            args.weights = _rows(weights)
        if topk_idx is not None:
            args.ids = epcomm_ids(topk_idx.ptr, topk_idx.itemsize == 8, topk_idx.shape[0], topk_idx.shape[1],
                                  topk_idx.strides[0], topk_idx.strides[1])
        if routing is not None:
            args.routing = routing.ptr
        args.dtype = dtype
        args.scale_dtype = scale_dtype
        args.quantize = quantize
        args.row_type = <RowType>row_type
        args.layout = <RowLayout>layout
        args.alignment = alignment
        args.capacity = capacity
        args.want_lease = want_lease
        with nogil:
            check(self.engine.dispatch_begin(args, &call.call, context))
        return call

    def dispatch_finish(self, Call call, uintptr_t x=0, uintptr_t scales=0, uintptr_t ids=0, uintptr_t weights=0,
                        uintptr_t counts=0, uintptr_t offsets=0, keep=None, int max_threads=0,
                        bint async_op=False):
        """Second half; addresses of the outputs, 0 where none is wanted. Pending with ``async_op``."""
        cdef DispatchOutputs out
        cdef CallContext context = _context(max_threads)
        epcomm_outputs(&out, x, scales, ids, weights, counts, offsets)
        cdef Pending pending
        if async_op:
            context.interrupted = NULL
            pending = Pending.__new__(Pending)
            pending.keep = (call, keep)
            pending.ticket = self.runner.dispatch_finish(self.engine, &call.call, out, context)
            return pending
        with nogil:
            check(self.engine.dispatch_finish(&call.call, out, context))
        call.keep = None
        return None

    def combine(self, x, Routing routing, int dtype, int row_type, bint apply_weights, bint exact_order, carried,
                uintptr_t bias, int64_t bias_stride, uintptr_t out, int64_t out_stride, uintptr_t carried_out,
                keep=None, int max_threads=0, bint async_op=False):
        cdef CombineArgs args
        cdef CallContext context = _context(max_threads)
        args.x = _rows(x)
        args.dtype = dtype
        args.row_type = <RowType>row_type
        args.routing = routing.ptr
        args.apply_weights = apply_weights
        args.exact_order = exact_order
        if carried is not None:
            args.carried = _rows(carried)
        epcomm_combine_out(&args, bias, bias_stride, out, out_stride, carried_out)
        cdef Pending pending
        if async_op:
            context.interrupted = NULL
            pending = Pending.__new__(Pending)
            pending.keep = (x, routing, carried, keep)
            pending.ticket = self.runner.combine(self.engine, args, context)
            return pending
        with nogil:
            check(self.engine.combine(args, context))
        return None

    def start_async(self) -> None:
        """Make ``async_op`` possible; before the call, since peers count on it once it has begun."""
        if self.runner != NULL:
            return
        try:
            self.runner = new AsyncRunner()
        except RuntimeError as error:
            from epcomm.errors import SystemCallError
            raise SystemCallError(f"async_op: starting a thread: {error}; look at `ulimit -u` and `ulimit -v`") \
                from None

    def take_lease(self, uint64_t size_bytes):
        """A Lease over at least ``size_bytes`` of the heap, or None where none is free or large enough."""
        if size_bytes > self.engine.payload_bytes():
            return None
        cdef int slot = self.engine.lease_slot()
        if slot < 0:
            return None
        cdef Lease lease = Lease.__new__(Lease)
        lease.engine = self
        lease.slot = slot
        lease.ptr = epcomm_slot_payload(self.engine, slot)
        return lease

    def leases_held(self) -> int:
        return self.engine.leases_held()

    def abort(self, str text):
        cdef Status why = epcomm_status(<int>Code.kPeerLost, text.encode("utf-8", "replace"), -1)
        with nogil:
            self.engine.abort(why)

    def give_up(self, str text):
        """Break it for good and tell peers; not while a call runs."""
        cdef Status why = epcomm_status(<int>Code.kPeerLost, text.encode("utf-8", "replace"), -1)
        with nogil:
            self.engine.give_up(why)

    def close(self):
        """Tell peers that this rank left, end all threads and let go of peers' memory. Idempotent.

        No call may run. The own heap stays until the last lease over it dies.
        """
        with nogil:
            self.engine.leave(PeerState.kLeft)
            del self.runner
        self.runner = NULL
        with nogil:
            self.engine.stop()
        self.backend.close()

    def look_at_peers(self):
        """Raise PeerLostError if a peer's process ended, a peer gave up or the backend lost one."""
        cdef Backend* c_backend = <Backend*>PyCapsule_GetPointer(self.backend.capsule(), "epcomm.Backend")
        cdef Status status
        with nogil:
            status = c_backend.async_error()  # knows how
            if status.code == Code.kOk:
                status = self.engine.look_at_peers()
        check(status)

    def raise_if_broken(self):
        cdef Status status = self.engine.broken()
        check(status)

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
    cdef object shape = array.shape, strides = array.strides
    if len(shape) == 1:
        return epcomm_rows(array.ptr or 64, shape[0], 1, strides[0], array.itemsize, array.itemsize)
    # An empty array may have no address; a null pointer would say "not given".
    return epcomm_rows(array.ptr or 64, shape[0], shape[1], strides[0], strides[1], array.itemsize)
