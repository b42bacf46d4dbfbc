# cython: boundscheck=False, wraparound=False, cdivision=True
"""Operations of :mod:`epcomm.ops` on GPU memory. Arguments are checked there; kernels are in ``cuda/``.

Work goes to the current stream of the array's framework, and so does the memory that is taken here: what is freed
when a function returns is used again only behind the work that was queued before. The GIL is released while launching
and waiting.
"""

import sys

import numpy as np

from epcomm import kernels
from epcomm.errors import InvalidArgumentError, UnsupportedError

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool

from epcomm cimport _cpp
from epcomm._arrays cimport Array, empty, framework_of, view
from epcomm._cpp cimport check


cdef extern from "epcomm/layout.h" namespace "epcomm" nogil:
    struct IdView:
        const void* data
        int64_t token_stride
        int64_t topk_stride
        int64_t num_tokens
        int32_t num_topk
        int32_t num_experts
        int32_t is64
        int32_t aligned

    struct IdError:
        uint64_t inverse
        int64_t value

    struct LayoutState:
        pass

    struct LayoutPlan:
        int32_t tile_tokens
        int32_t num_tiles
        int32_t num_passes
        int32_t shared_bytes
        uint64_t words_offset
        uint64_t state_bytes

    struct LayoutArgs:
        IdView ids
        const int32_t* expert_rank
        int32_t num_ranks
        LayoutState* state
        int32_t* per_rank
        int32_t* per_expert
        int32_t* position
        uint8_t* in_rank
        IdError* error

    LayoutPlan c_layout_plan "epcomm::layout_plan"(int64_t num_tokens, int32_t num_experts, int32_t num_ranks)
    int32_t c_contiguous_owner "epcomm::contiguous_owner"(int32_t expert, int32_t num_experts, int32_t num_ranks)
    uint64_t tile_word(uint32_t tag, uint32_t count, cbool prefix)
    uint32_t tile_tag(uint64_t word)
    uint32_t tile_count(uint64_t word)
    cbool tile_is_prefix(uint64_t word)


cdef extern from "epcomm/permute.h" namespace "epcomm" nogil:
    enum FloatType:
        kNoFloats
        kFloat32
        kFloat16
        kBfloat16
        kFloat64

    struct FloatView:
        const void* data
        int64_t row_stride
        int64_t item_stride
        int32_t type
        int32_t aligned

    struct RowView:
        const void* data
        int64_t row_stride
        int64_t item_stride
        int64_t items
        int64_t units
        int32_t unit

    struct PermutePlan:
        int32_t tile_picks
        int32_t num_tiles
        int32_t warps
        int32_t blocks
        int32_t shared_bytes
        int32_t num_passes
        int32_t scan_blocks
        uint64_t tile_counts_offset
        uint64_t starts_offset
        uint64_t scratch_bytes

    struct PermuteState:
        pass

    struct PermuteResult:
        IdError error
        int64_t rows
        int64_t overflow

    struct PermuteArgs:
        IdView ids
        FloatView weights
        int32_t alignment
        int64_t capacity
        int32_t tile_picks
        int32_t num_tiles
        PermuteState* state
        uint32_t* tile_counts
        int64_t* starts
        PermuteResult* result
        int32_t* counts
        int32_t* offsets
        int64_t num_rows
        int32_t* source
        int32_t* expert
        float* weight
        int32_t* row_of

    struct RowGrid:
        int32_t lanes
        int32_t rows
        int64_t blocks

    struct ScatterArgs:
        RowView x
        void* y
        const int32_t* row_of
        int64_t num_tokens
        int32_t num_topk

    struct FillArgs:
        const int32_t* counts
        const int32_t* offsets
        int32_t num_experts
        int32_t alignment
        int64_t num_rows
        void* y
        int64_t row_bytes
        int32_t unit
        int32_t* source
        int32_t* expert
        float* weight

    struct InvertArgs:
        const void* source
        int64_t source_stride
        int32_t source_is64
        int32_t source_aligned
        int64_t num_rows
        int64_t num_picks
        int32_t* row_of
        uint64_t* bad_row

    struct SumArgs:
        RowView y
        FloatView weights
        const int32_t* row_of
        int64_t num_tokens
        int32_t num_topk
        void* z
        int64_t width
        int32_t vector

    int32_t common_unit(uint64_t ored)
    PermutePlan c_permute_plan "epcomm::permute_plan"(int64_t num_picks, int32_t num_experts)
    RowGrid c_row_grid "epcomm::row_grid"(int64_t num_rows, int64_t pieces)
    int64_t c_fill_blocks "epcomm::fill_blocks"(int32_t num_experts, int32_t alignment, cbool tail)


cdef extern from "epcomm/cast.h" namespace "epcomm" nogil:
    struct CastArgs:
        RowView x
        int64_t num_tokens
        int64_t width
        int64_t groups
        void* y
        float* scales
        FloatView given
        int32_t vector
        int32_t round_scale

    struct ConvertArgs:
        int32_t which
        int32_t instruction
        uint64_t first
        uint64_t count
        uint32_t* out

    int64_t c_cast_blocks "epcomm::cast_blocks"(int64_t num_tokens, int64_t groups)


cdef extern from "device/ops.hpp" namespace "epcomm::device" nogil:
    struct Place:
        int device
        uint64_t stream

    struct PermuteKernels:
        uint64_t count
        uint64_t scan
        uint64_t place
        uint64_t rows
        uint64_t rows_any
        uint64_t fill

    _cpp.Status c_wait_for "epcomm::device::wait_for"(const Place& place, uint64_t other)
    _cpp.Status c_is_capturing "epcomm::device::is_capturing"(const Place& place, cbool* capturing)
    _cpp.Status c_check_pointer "epcomm::device::check_pointer"(const Place& place, uint64_t pointer)
    _cpp.Status c_copy_to_device "epcomm::device::copy_to_device"(const Place& place, uint64_t to, const void* source,
                                                                  uint64_t nbytes)
    _cpp.Status c_copy_to_host "epcomm::device::copy_to_host"(const Place& place, void* to, uint64_t source,
                                                              uint64_t nbytes)
    _cpp.Status c_layout "epcomm::device::layout"(const Place& place, uint64_t kernel, LayoutArgs args,
                                                  const LayoutPlan& plan)
    _cpp.Status c_permute_count "epcomm::device::permute_count"(
        const Place& place, const PermuteKernels& kernels, PermuteArgs args, const PermutePlan& plan,
        PermuteResult* result)
    _cpp.Status c_permute_rows "epcomm::device::permute_rows"(
        const Place& place, const PermuteKernels& kernels, PermuteArgs args, const PermutePlan& plan,
        ScatterArgs scatter, FillArgs fill)
    _cpp.Status c_invert "epcomm::device::invert"(const Place& place, uint64_t invert_kernel, uint64_t check_kernel,
                                                  InvertArgs args, int64_t* bad_row)
    _cpp.Status c_sum "epcomm::device::sum"(const Place& place, uint64_t kernel, SumArgs args)
    _cpp.Status c_cast "epcomm::device::cast"(const Place& place, uint64_t kernel, CastArgs args)
    _cpp.Status c_convert "epcomm::device::convert"(const Place& place, uint64_t kernel, ConvertArgs args)


# where work goes ------------------------------------------------------------------------------------------------------

def current_stream(str framework, int device):
    """Handle of the current stream of "torch" or "cupy" on a device; 0 is the legacy default one."""
    if framework == "torch":
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.cuda.get_current_stream().ptr


cdef class _Here:
    """One call's device and stream; arrays that come in are ordered before it."""

    cdef Place place
    cdef Array like

    def __cinit__(self, Array like):
        self.like = like
        self.place.device = int(like.device[5:])
        framework = framework_of(like)
        try:
            self.place.stream = current_stream(framework, self.place.device)
        except Exception as error:  # each library has its own for a missing driver, or one of another CUDA
            raise UnsupportedError(f"an array on {like.device}, but {framework} has no such device: {error}") from error

    cdef bint capturing(self) except -1:
        """Whether the work goes into a graph: then nothing can be learned from it here."""
        cdef cbool found = False
        with nogil:
            check(c_is_capturing(self.place, &found))
        return found

    cdef int take(self, Array array, str name) except -1:
        """Make sure that an array of the caller is memory of this device, and ordered before our work."""
        cdef uint64_t stream
        cdef uint64_t ptr = array.ptr
        if array.kind in ("torch", "cupy"):
            return 0
        if array.size:
            try:
                with nogil:
                    check(c_check_pointer(self.place, ptr))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{name}: {error}") from None
        if array.stream is not None:
            stream = array.stream
            if stream != self.place.stream and not (stream == 1 and self.place.stream == 0):
                with nogil:
                    check(c_wait_for(self.place, stream))
        return 0

    cdef Array scratch(self, uint64_t nbytes):
        """Memory of the framework, behind the stream's work."""
        return view(empty((nbytes,), "uint8", self.like), "scratch")


cdef int64_t _kernel(object unit, int device, str name) except? 0:
    return kernels.load(unit, device).functions[name]


cdef int32_t _dim(Array array, int dim) except -1:
    return <int32_t>array.shape[dim]


cdef int64_t _stride(Array array, int dim) except? -1:
    """Byte stride, 0 where there is nothing to step over: such a stride may be any number."""
    return <int64_t>array.strides[dim] if <int64_t>array.shape[dim] > 1 else 0


cdef cbool _aligned(Array array) except? True:
    cdef uint64_t bits = array.ptr
    for dim in range(array.ndim):
        bits |= <uint64_t>_stride(array, dim)
    return bits % <uint64_t>array.itemsize == 0


cdef void* _at(Array array) noexcept:
    return <void*>array.ptr if array is not None else NULL


cdef int _fill_ids(IdView* ids, Array array, int32_t num_experts) except -1:
    ids.data = _at(array)
    ids.token_stride = _stride(array, 0)
    ids.topk_stride = _stride(array, 1)
    ids.num_tokens = array.shape[0]
    ids.num_topk = _dim(array, 1)
    ids.num_experts = num_experts
    ids.is64 = array.dtype == "int64"
    ids.aligned = _aligned(array)
    return 0


cdef int _fill_floats(FloatView* floats, Array array) except -1:
    if array is None:
        floats.type = FloatType.kNoFloats
        return 0
    floats.data = _at(array)
    floats.row_stride = _stride(array, 0)
    floats.item_stride = _stride(array, 1) if array.ndim == 2 else 0
    floats.type = _float_type(array.dtype)
    floats.aligned = _aligned(array)
    return 0


cdef int32_t _float_type(str dtype) except -1:
    if dtype == "float32":
        return <int32_t>FloatType.kFloat32
    if dtype == "float16":
        return <int32_t>FloatType.kFloat16
    if dtype == "bfloat16":
        return <int32_t>FloatType.kBfloat16
    assert dtype == "float64", dtype
    return <int32_t>FloatType.kFloat64


cdef int _fill_rows(RowView* rows, Array array, uint64_t other) except -1:
    """Rows of an array of two dimensions; `other` are bits of the other side's address and widths."""
    cdef uint64_t bits = other | array.ptr | <uint64_t>_stride(array, 0)
    cdef uint64_t nbytes
    rows.data = _at(array)
    rows.row_stride = _stride(array, 0)
    if array.rows_contiguous():
        nbytes = <uint64_t>array.shape[1] * <uint64_t>array.itemsize
        rows.unit = common_unit(bits | nbytes)
        rows.items = 1
        rows.units = <int64_t>(nbytes // <uint64_t>rows.unit)
        rows.item_stride = array.itemsize
    else:
        nbytes = <uint64_t>array.itemsize
        rows.unit = common_unit(bits | nbytes | <uint64_t>_stride(array, 1))
        rows.items = array.shape[1]
        rows.units = <int64_t>(nbytes // <uint64_t>rows.unit)
        rows.item_stride = _stride(array, 1)
    return 0


def bad_id(uint64_t inverse, int64_t value, int64_t num_topk, int64_t num_experts):
    """The error for the first bad id as kernels record it."""
    cdef int64_t pick = <int64_t>~inverse
    cdef int64_t token = pick // num_topk
    cdef int64_t slot = pick % num_topk
    return InvalidArgumentError(f"topk_idx[{token}, {slot}]={value}: expected -1 (no pick) or an expert "
                                f"0..{num_experts - 1}")


# layout ---------------------------------------------------------------------------------------------------------------

def layout(Array topk_idx, int32_t num_experts, int32_t num_ranks, object owners):
    """The four fields of a Layout; `owners` is a list of ranks, or None for contiguous ones."""
    cdef _Here here = _Here(topk_idx)
    cdef int64_t num_tokens = topk_idx.shape[0]
    cdef LayoutPlan plan = c_layout_plan(num_tokens, num_experts, num_ranks)
    cdef uint64_t kernel = _kernel(kernels.LAYOUT, here.place.device, "epcomm_layout")
    cdef LayoutArgs args
    cdef IdError error
    here.take(topk_idx, "topk_idx")
    per_rank = empty((num_ranks,), "int32", topk_idx)
    per_expert = empty((num_experts,), "int32", topk_idx)
    in_rank = empty((num_tokens, num_ranks), "bool", topk_idx)
    position = empty((num_tokens, num_ranks), "int32", topk_idx)
    cdef Array scratch = here.scratch(plan.state_bytes + sizeof(IdError))
    cdef Array table = _upload(here, owners) if owners is not None else None
    _fill_ids(&args.ids, topk_idx, num_experts)
    args.expert_rank = <const int32_t*>_at(table)
    args.num_ranks = num_ranks
    args.state = <LayoutState*>_at(scratch)
    args.error = <IdError*>(<char*>_at(scratch) + plan.state_bytes)
    args.per_rank = <int32_t*>_at(view(per_rank, "result"))
    args.per_expert = <int32_t*>_at(view(per_expert, "result"))
    args.in_rank = <uint8_t*>_at(view(in_rank, "result"))
    args.position = <int32_t*>_at(view(position, "result"))
    with nogil:
        check(c_layout(here.place, kernel, args, plan))
    if not here.capturing():
        with nogil:
            check(c_copy_to_host(here.place, &error, <uint64_t>args.error, sizeof(IdError)))
        if error.inverse:
            raise bad_id(error.inverse, error.value, args.ids.num_topk, num_experts)
    return per_rank, per_expert, in_rank, position


cdef Array _upload(_Here here, list owners):
    if here.capturing():
        raise UnsupportedError("expert_to_rank under stream capture: its copy would read freed memory when replayed")
    values = np.array(owners, np.int32)
    cdef int32_t[::1] host = values
    cdef Array table = view(empty(values.shape, "int32", here.like), "expert_to_rank")
    cdef uint64_t to = table.ptr
    with nogil:
        check(c_copy_to_device(here.place, to, &host[0], 4 * <uint64_t>host.shape[0]))
    return table


def to_numpy(Array array):
    """A small one-dimensional integer array of the device as NumPy."""
    cdef _Here here = _Here(array)
    here.take(array, "array")
    if not array.contiguous():
        raise UnsupportedError(f"{array.dtype} array of strides {array.strides} on {array.device}: expected a "
                               "contiguous one")
    host = np.empty(array.shape, array.dtype)
    cdef uint8_t[::1] raw = host.view(np.uint8)
    cdef uint64_t source = array.ptr
    if array.size:
        with nogil:
            check(c_copy_to_host(here.place, &raw[0], source, <uint64_t>raw.shape[0]))
    return host


# permute and back -----------------------------------------------------------------------------------------------------

class Inverse:
    """The row of each pick, kept with the ``source`` it belongs to so that no one has to invert it again."""

    __slots__ = ("row_of", "source")

    def __init__(self, row_of, source):
        self.row_of = row_of
        self.source = source


cdef int _permute_kernels(PermuteKernels* found, int device) except -1:
    functions = kernels.load(kernels.PERMUTE, device).functions
    found.count = functions["epcomm_permute_count"]
    found.scan = functions["epcomm_permute_scan"]
    found.place = functions["epcomm_permute_place"]
    found.rows = functions["epcomm_permute_rows"]
    found.rows_any = functions["epcomm_permute_rows_any"]
    found.fill = functions["epcomm_permute_fill"]
    return 0


def permute(Array x, Array topk_idx, Array weights, int32_t num_experts, int32_t alignment, int64_t capacity):
    """Fields of a Permuted, up to ``source``, then overflow and the Inverse."""
    cdef _Here here = _Here(x)
    cdef PermuteKernels functions
    cdef PermuteArgs args
    cdef ScatterArgs scatter
    cdef FillArgs fill
    cdef PermuteResult result
    cdef uint64_t ored
    cdef bint capturing = here.capturing()
    if capturing and capacity < 0:
        raise UnsupportedError("permute without capacity= under stream capture: the host cannot learn how many rows "
                               "there are")
    _permute_kernels(&functions, here.place.device)
    here.take(x, "x")
    here.take(topk_idx, "topk_idx")
    if weights is not None:
        here.take(weights, "topk_weights")
    _fill_ids(&args.ids, topk_idx, num_experts)
    _fill_floats(&args.weights, weights)
    cdef int64_t num_picks = args.ids.num_tokens * args.ids.num_topk
    cdef PermutePlan plan = c_permute_plan(num_picks, num_experts)
    # The results of the host's count come first: they are written before anything else is.
    cdef uint64_t counted = (sizeof(PermuteResult) + 63) // 64 * 64
    cdef Array scratch = here.scratch(counted + plan.scratch_bytes)
    cdef char* base = <char*>_at(scratch)
    counts = empty((num_experts,), "int32", x)
    offsets = empty((num_experts + 1,), "int32", x)
    args.alignment = alignment
    args.capacity = capacity
    args.tile_picks = plan.tile_picks
    args.num_tiles = plan.num_tiles
    args.result = <PermuteResult*>base
    args.state = <PermuteState*>(base + counted)
    args.tile_counts = <uint32_t*>(base + counted + plan.tile_counts_offset)
    args.starts = <int64_t*>(base + counted + plan.starts_offset)
    args.counts = <int32_t*>_at(view(counts, "result"))
    args.offsets = <int32_t*>_at(view(offsets, "result"))
    cdef PermuteResult* wanted = &result
    if capturing:
        wanted = NULL
    with nogil:
        check(c_permute_count(here.place, functions, args, plan, wanted))
    cdef int64_t num_rows = capacity
    overflow = 0
    if capturing:
        overflow = _scalar_of(here, scratch)
    else:
        if result.error.inverse:
            raise bad_id(result.error.inverse, result.error.value, args.ids.num_topk, num_experts)
        overflow = result.overflow
        if capacity < 0:
            num_rows = result.rows
            if num_rows > INT32_MAX:
                raise InvalidArgumentError(f"expert_alignment={alignment}: {num_rows} rows with padding; at most "
                                           f"{INT32_MAX}")
    y = empty((num_rows, x.shape[1]), x.dtype, x)
    source = empty((num_rows,), "int32", x)
    expert = empty((num_rows,), "int32", x)
    weight = empty((num_rows,), "float32", x) if weights is not None else None
    row_of = empty((args.ids.num_tokens, args.ids.num_topk), "int32", x)
    cdef Array c_y = view(y, "result")
    args.num_rows = num_rows
    args.source = <int32_t*>_at(view(source, "result"))
    args.expert = <int32_t*>_at(view(expert, "result"))
    args.weight = <float*>_at(view(weight, "result")) if weight is not None else NULL
    args.row_of = <int32_t*>_at(view(row_of, "result"))
    ored = c_y.ptr
    _fill_rows(&scatter.x, x, ored)
    scatter.y = _at(c_y)
    scatter.row_of = args.row_of
    scatter.num_tokens = args.ids.num_tokens
    scatter.num_topk = args.ids.num_topk
    fill.counts = args.counts
    fill.offsets = args.offsets
    fill.num_experts = num_experts
    fill.alignment = alignment
    fill.num_rows = num_rows
    fill.y = scatter.y
    fill.row_bytes = <int64_t>x.shape[1] * x.itemsize
    fill.unit = common_unit(ored | <uint64_t>fill.row_bytes)
    fill.source = args.source
    fill.expert = args.expert
    fill.weight = args.weight
    with nogil:
        check(c_permute_rows(here.place, functions, args, plan, scatter, fill))
    return y, expert, weight, counts, offsets, source, overflow, Inverse(row_of, source)


cdef object _scalar_of(_Here here, Array scratch):
    """The overflow of a captured call, as int64 [] of the device; it lives in the call's scratch memory."""
    return scratch.owner[24:32].view(_int64_like(here)).reshape(())


cdef object _int64_like(_Here here):
    return sys.modules["torch"].int64 if framework_of(here.like) == "torch" else np.int64


def unpermute(Array y, Array source, object inverse, Array weights, int64_t num_tokens, int64_t num_topk):
    """The sums; `inverse` is what permute gave, or None if `source` has to be inverted and checked."""
    cdef _Here here = _Here(y)
    cdef InvertArgs args
    cdef SumArgs sums
    cdef Array row_of, word
    cdef uint64_t inverter, checker, summer
    cdef uint64_t ored
    cdef int64_t bad_row = -1
    cdef int64_t* wanted = &bad_row
    functions = kernels.load(kernels.UNPERMUTE, here.place.device).functions
    here.take(y, "y")
    if weights is not None:
        here.take(weights, "permuted.topk_weights")
    if inverse is not None:
        row_of = view(inverse.row_of, "row_of")
    else:
        here.take(source, "permuted.source")
        row_of = view(empty((num_tokens * num_topk,), "int32", y), "row_of")
        word = here.scratch(8)
        args.source = _at(source)
        args.source_stride = _stride(source, 0)
        args.source_is64 = source.dtype == "int64"
        args.source_aligned = _aligned(source)
        args.num_rows = source.shape[0]
        args.num_picks = num_tokens * num_topk
        args.row_of = <int32_t*>_at(row_of)
        args.bad_row = <uint64_t*>_at(word)
        inverter = functions["epcomm_unpermute_invert"]
        checker = functions["epcomm_unpermute_check"]
        if here.capturing():
            wanted = NULL
        with nogil:
            check(c_invert(here.place, inverter, checker, args, wanted))
        if bad_row >= 0:
            raise _bad_source(here, source, row_of, bad_row, args.num_picks)
    z = empty((num_tokens, y.shape[1]), y.dtype, y)
    cdef Array c_z = view(z, "result")
    ored = c_z.ptr
    _fill_rows(&sums.y, y, ored)
    _fill_floats(&sums.weights, weights)
    sums.row_of = <int32_t*>_at(row_of)
    sums.num_tokens = num_tokens
    sums.num_topk = <int32_t>num_topk
    sums.z = _at(c_z)
    sums.width = y.shape[1]
    sums.vector = sums.y.items == 1 and sums.y.unit == 16
    summer = functions[f"epcomm_unpermute_{y.dtype}"]
    with nogil:
        check(c_sum(here.place, summer, sums))
    return z


cdef object _bad_source(_Here here, Array source, Array row_of, int64_t row, int64_t num_picks):
    """What is wrong with a row of a source that somebody changed."""
    cdef int64_t pick = 0
    cdef int32_t narrow = 0
    cdef int32_t first = 0
    cdef uint64_t at = <uint64_t>source.ptr + <uint64_t>(row * <int64_t>_stride(source, 0))
    if source.dtype == "int64":
        with nogil:
            check(c_copy_to_host(here.place, &pick, at, 8))
    else:
        with nogil:
            check(c_copy_to_host(here.place, &narrow, at, 4))
        pick = narrow
    if not 0 <= pick < num_picks:
        return InvalidArgumentError(f"permuted.source[{row}]={pick}: expected -1 or a pick 0..{num_picks - 1}")
    at = <uint64_t>row_of.ptr + 4 * <uint64_t>pick
    with nogil:
        check(c_copy_to_host(here.place, &first, at, 4))
    return InvalidArgumentError(f"permuted.source[{row}]={pick}: the same pick as row {first}; expected each pick once")


# fp8 ------------------------------------------------------------------------------------------------------------------

def quantize(Array x, bint round_scale):
    """Codes and scales; CuPy has no fp8 and gets the codes as uint8."""
    cdef _Here here = _Here(x)
    cdef CastArgs args
    cdef uint64_t kernel = _kernel(kernels.CAST, here.place.device, f"epcomm_quantize_{x.dtype}")
    here.take(x, "x")
    args.num_tokens = x.shape[0]
    args.width = x.shape[1]
    args.groups = (args.width + 127) // 128
    codes = empty(x.shape, "float8_e4m3fn" if framework_of(x) == "torch" else "uint8", x)
    scales = empty((args.num_tokens, args.groups), "float32", x)
    cdef Array c_codes = view(codes, "result")
    _fill_rows(&args.x, x, 0)
    _fill_floats(&args.given, None)
    args.y = _at(c_codes)
    args.scales = <float*>_at(view(scales, "result"))
    args.vector = args.x.items == 1 and args.x.unit == 16 and args.width % 8 == 0 and c_codes.ptr % 8 == 0
    args.round_scale = round_scale
    with nogil:
        check(c_cast(here.place, kernel, args))
    return codes, scales


def dequantize(Array codes, Array scales, str dtype):
    """Values of the codes."""
    cdef _Here here = _Here(codes)
    cdef CastArgs args
    cdef uint64_t kernel = _kernel(kernels.CAST, here.place.device, f"epcomm_dequantize_{dtype}")
    here.take(codes, "x")
    here.take(scales, "scales")
    args.num_tokens = codes.shape[0]
    args.width = codes.shape[1]
    args.groups = scales.shape[1]
    values = empty(codes.shape, dtype, codes)
    cdef Array c_values = view(values, "result")
    _fill_rows(&args.x, codes, 0)
    _fill_floats(&args.given, scales)
    args.y = _at(c_values)
    args.scales = NULL
    args.vector = args.x.items == 1 and args.x.unit >= 8 and args.width % 8 == 0 and c_values.ptr % 16 == 0
    args.round_scale = False
    with nogil:
        check(c_cast(here.place, kernel, args))
    return values


# for tests: the arithmetic of launches, which needs no GPU ------------------------------------------------------------

def layout_plan(int64_t num_tokens, int32_t num_experts, int32_t num_ranks):
    """Fields of the plan."""
    return c_layout_plan(num_tokens, num_experts, num_ranks)


def permute_plan(int64_t num_picks, int32_t num_experts):
    """Fields of the plan."""
    return c_permute_plan(num_picks, num_experts)


def row_grid(int64_t num_rows, int64_t pieces):
    """Fields of the grid."""
    return c_row_grid(num_rows, pieces)


def fill_blocks(int32_t num_experts, int32_t alignment, bint tail):
    """Blocks that fill padding."""
    return c_fill_blocks(num_experts, alignment, tail)


def cast_blocks(int64_t num_tokens, int64_t groups):
    """Blocks that cast."""
    return c_cast_blocks(num_tokens, groups)


def contiguous_owner(int32_t expert, int32_t num_experts, int32_t num_ranks):
    """The rank that a kernel takes for the owner of an expert where no table says it."""
    return c_contiguous_owner(expert, num_experts, num_ranks)


def unit_of(uint64_t ored):
    """Bytes that are moved at a time between addresses and strides with these bits."""
    return common_unit(ored)


def word_parts(uint32_t tag, uint32_t count, bint prefix):
    """A tile's word taken apart again."""
    cdef uint64_t word = tile_word(tag, count, prefix)
    return tile_tag(word), tile_count(word), bool(tile_is_prefix(word))


def convert(str name, bint instruction, uint64_t first, Array out):
    """To uint32 `out`, bits of formats.h's function `name`, or its instruction, for the bits from `first` on."""
    cdef _Here here = _Here(out)
    cdef uint64_t kernel = _kernel(kernels.CAST, here.place.device, "epcomm_convert")
    cdef ConvertArgs args
    args.which = ("bf16_to_f32", "f32_to_bf16", "f16_to_f32", "f32_to_f16", "e4m3_to_f32", "f32_to_e4m3",
                  "group_scale", "group_scale_rounded", "inverse_scale").index(name)
    args.instruction = instruction
    args.first = first
    args.count = out.size
    args.out = <uint32_t*>_at(out)
    with nogil:
        check(c_convert(here.place, kernel, args))
