# cython: boundscheck=False, wraparound=False, cdivision=True
"""Loops over rows of host memory for :mod:`epcomm.ops`. Arguments are checked there; the GIL is released here."""

import numpy as np

from epcomm import config
from epcomm.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedError

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from epcomm cimport _cpp
from epcomm._arrays cimport Array
from epcomm._cpp cimport check


cdef extern from "host/rows.hpp" namespace "epcomm::host" nogil:
    enum class RowType(int32_t):
        kFloat32
        kFloat16
        kBfloat16

    cppclass RowOps:
        const char* name
        void (*copy)(void* dst, const void* src, size_t size) noexcept
        void (*reduce)(RowType type, void* out, const void* const* rows, const float* weights, int num_rows,
                       const float* bias, size_t n) noexcept
        void (*quantize)(RowType type, uint8_t* codes, float* scales, const void* x, size_t n,
                         cbool round_scale) noexcept
        void (*stream_copy)(void* dst, const void* src, size_t size) noexcept
        void (*stream_reduce)(RowType type, void* out, const void* const* rows, const float* weights, int num_rows,
                              const float* bias, size_t n) noexcept

    const RowOps* row_ops(const char* isa)
    void stream_fence()
    void copy_strided(void* dst, const void* src, int64_t n, int64_t stride_bytes, int itemsize)
    void dequantize_row "epcomm::host::dequantize"(RowType type, void* out, const uint8_t* codes, const float* scales,
                                                   size_t n)


ctypedef const void* Row


cdef extern from "host/layout.hpp" namespace "epcomm::host" nogil:
    cppclass IndexView:
        const void* data
        cbool is64
        int64_t num_tokens
        int32_t num_topk
        int64_t token_stride_bytes
        int64_t topk_stride_bytes

    cppclass BadPick:
        int64_t token
        int32_t slot
        int64_t value

    cppclass Owners:
        int32_t num_ranks
        const int32_t* expert_rank
        const int32_t* expert_local
        int32_t num_experts

    cppclass SendLists:
        vector[int64_t] rank_begin
        vector[int32_t] tokens
        vector[int64_t] picks_per_expert

    cbool c_read_ids "epcomm::host::read_ids"(const IndexView& view, int32_t num_experts, cbool bad_as_none,
                                              int32_t* ids_out, BadPick* bad)
    _cpp.Status make_send_lists(const int32_t* ids, int64_t num_tokens, int32_t num_topk, const Owners& owners,
                                SendLists* out)


cdef extern from "epcomm/formats.h" namespace "epcomm" nogil:
    float bits_float(uint32_t bits)
    uint32_t float_bits(float value)
    float bf16_to_f32(uint16_t code)
    uint16_t f32_to_bf16(float value)
    float f16_to_f32(uint16_t code)
    uint16_t f32_to_f16(float value)
    float e4m3_to_f32(uint8_t code)
    uint8_t f32_to_e4m3(float value)
    float e8m0_to_f32(uint8_t code)
    uint8_t f32_to_e8m0(float value)
    float group_scale(uint32_t amax_bits, cbool round_scale)


cdef const RowOps* _ops(str isa=None) except NULL:
    """Table of an instruction set; by default what EPCOMM_HOST_ISA names, else the best."""
    if isa is None:
        isa = config.get("EPCOMM_HOST_ISA") or ""
    cdef bytes name = isa.encode()
    cdef const RowOps* ops = row_ops(name)
    if ops == NULL:
        raise UnsupportedError(f"instruction set {isa!r}: unknown, or not of this machine")
    return ops


cdef RowType _type(str dtype) except *:
    if dtype == "bfloat16":
        return RowType.kBfloat16
    if dtype == "float16":
        return RowType.kFloat16
    assert dtype == "float32", dtype
    return RowType.kFloat32


cdef inline char* _at(Array array) noexcept:
    return <char*><void*>array.ptr


cdef int64_t _shape(Array array, int dim) except -1:
    return <int64_t>array.shape[dim]


cdef int64_t _stride(Array array, int dim) except? -1:
    return <int64_t>array.strides[dim]


# ids ------------------------------------------------------------------------------------------------------------------

def read_ids(Array topk_idx, int32_t num_experts, bint bad_as_none=False):
    """The ids as a new int32 ``[T, K]``, or the typed error for the first bad one by row, then slot.

    With `bad_as_none` bad ids become -1 and the result is (ids, first bad (token, slot, value) or None).
    """
    cdef IndexView view
    cdef BadPick bad
    cdef cbool good
    view.data = _at(topk_idx)
    view.is64 = topk_idx.dtype == "int64"
    view.num_tokens = _shape(topk_idx, 0)
    view.num_topk = <int32_t>_shape(topk_idx, 1)
    view.token_stride_bytes = _stride(topk_idx, 0)
    view.topk_stride_bytes = _stride(topk_idx, 1)
    cdef cbool as_none = bad_as_none
    cdef int32_t[:, ::1] ids
    try:
        result = np.empty(topk_idx.shape, np.int32)
    except MemoryError as error:
        raise OutOfMemoryError(f"topk_idx: no memory for {topk_idx.size} ids: {error}") from error
    ids = result
    cdef int32_t* out = &ids[0, 0] if topk_idx.size else NULL
    with nogil:
        good = c_read_ids(view, num_experts, as_none, out, &bad)
    if bad_as_none:
        return result, None if good else (bad.token, bad.slot, bad.value)
    if not good:
        raise InvalidArgumentError(f"topk_idx[{bad.token}, {bad.slot}]={bad.value}: expected -1 (no pick) or an expert "
                                   f"0..{num_experts - 1}")
    return result


def send_lists(const int32_t[:, ::1] ids, list rank_of, list local_of, int32_t num_ranks):
    """(rank_begin, tokens, picks_per_expert) as lists; for tests."""
    cdef SendLists lists
    _send_lists(ids, rank_of, local_of, num_ranks, &lists)
    return list(lists.rank_begin), list(lists.tokens), list(lists.picks_per_expert)


cdef int _send_lists(const int32_t[:, ::1] ids, list rank_of, list local_of, int32_t num_ranks,
                     SendLists* out) except -1:
    cdef vector[int32_t] ranks = rank_of
    cdef vector[int32_t] locals_ = local_of
    cdef Owners owners
    owners.num_ranks = num_ranks
    owners.expert_rank = ranks.data()
    owners.expert_local = locals_.data()
    owners.num_experts = <int32_t>ranks.size()
    cdef int64_t num_tokens = ids.shape[0]
    cdef int32_t num_topk = <int32_t>ids.shape[1]
    cdef const int32_t* first = &ids[0, 0] if num_tokens and num_topk else NULL
    cdef _cpp.Status status
    with nogil:
        status = make_send_lists(first, num_tokens, num_topk, owners, out)
    return check(status)


def fill_layout(const int32_t[:, ::1] ids, list rank_of, list local_of, Array per_rank, Array per_expert, Array in_rank,
                Array position):
    """Fill the four fields of a Layout: int32 [R], int32 [E], bool [T, R] zeroed, int32 [T, R]."""
    cdef SendLists lists
    cdef int32_t num_ranks = <int32_t>_shape(per_rank, 0)
    _send_lists(ids, rank_of, local_of, num_ranks, &lists)
    cdef int32_t* ranks = <int32_t*>_at(per_rank)
    cdef int32_t* experts = <int32_t*>_at(per_expert)
    cdef uint8_t* there = <uint8_t*>_at(in_rank)
    cdef int32_t* place = <int32_t*>_at(position)
    cdef int64_t num_tokens = ids.shape[0]
    cdef int64_t num_experts = <int64_t>lists.picks_per_expert.size()
    cdef int64_t i, begin, end, cell
    cdef int32_t rank
    with nogil:
        for i in range(num_experts):
            experts[i] = <int32_t>lists.picks_per_expert[i]
        for i in range(num_tokens * num_ranks):
            place[i] = -1
        for rank in range(num_ranks):
            begin = lists.rank_begin[rank]
            end = lists.rank_begin[rank + 1]
            ranks[rank] = <int32_t>(end - begin)
            for i in range(begin, end):
                cell = <int64_t>lists.tokens[i] * num_ranks + rank
                there[cell] = 1
                place[cell] = <int32_t>(i - begin)


# by expert ------------------------------------------------------------------------------------------------------------

def expert_order(const int32_t[:, ::1] ids, int32_t num_experts, int64_t alignment, int64_t capacity):
    """Where each row of the expert layout comes from.

    Returns
    -------
    counts, offsets, source : int32 arrays [E], [E + 1], [rows]
        `source` is t * K + k, or -1 in padding and in the tail of a capacity.
    overflow : int
        Picks that a `capacity` (-1 is none) leaves out.
    """
    cdef int64_t num_picks = ids.shape[0] * ids.shape[1]
    cdef vector[int64_t] next_row = vector[int64_t](<size_t>num_experts + 1, 0)
    counts = np.zeros(num_experts, np.int32)
    offsets = np.empty(num_experts + 1, np.int32)
    cdef int32_t[::1] c_counts = counts
    cdef int32_t[::1] c_offsets = offsets
    cdef const int32_t* first = &ids[0, 0] if num_picks else NULL
    cdef int64_t i, rows, row, count, overflow = 0
    cdef int32_t expert
    with nogil:
        for i in range(num_picks):
            if first[i] >= 0:
                c_counts[first[i]] += 1
        rows = 0
        for expert in range(num_experts):
            next_row[expert] = rows
            count = c_counts[expert]
            rows += (count + alignment - 1) // alignment * alignment
            if capacity >= 0 and next_row[expert] + count > capacity:
                overflow += next_row[expert] + count - max(capacity, next_row[expert])
                c_counts[expert] = <int32_t>(max(capacity, next_row[expert]) - next_row[expert])
        next_row[num_experts] = rows
    if capacity >= 0:
        rows = capacity
    if rows > INT32_MAX:
        raise InvalidArgumentError(f"expert_alignment={alignment}: {rows} rows with padding; at most {INT32_MAX}")
    for expert in range(num_experts + 1):
        c_offsets[expert] = <int32_t>min(next_row[expert], rows)
    source = np.empty(rows, np.int32)
    cdef int32_t[::1] c_source = source
    with nogil:
        for row in range(rows):
            c_source[row] = -1
        for i in range(num_picks):
            expert = first[i]
            if expert < 0:
                continue
            row = next_row[expert]
            next_row[expert] += 1
            if row < rows:
                c_source[row] = <int32_t>i
    return counts, offsets, source, overflow


def gather_rows(Array x, const int32_t[::1] source, int64_t num_topk, Array out):
    """out[row] = x[source[row] // K], byte for byte; zeros where `source` is -1. `out` is contiguous."""
    cdef const RowOps* ops = _ops()
    cdef int64_t width = _shape(x, 1)
    cdef int64_t row_stride = _stride(x, 0)
    cdef int64_t item_stride = _stride(x, 1)
    cdef int itemsize = x.itemsize
    cdef bint joined = x.rows_contiguous()
    cdef size_t row_bytes = <size_t>(width * itemsize)
    cdef const char* base = _at(x)
    cdef char* to = _at(out)
    cdef int64_t row
    if row_bytes == 0:
        return
    with nogil:
        for row in range(source.shape[0]):
            if source[row] < 0:
                memset(to, 0, row_bytes)
            elif joined:
                ops.copy(to, base + source[row] // num_topk * row_stride, row_bytes)
            else:
                copy_strided(to, base + source[row] // num_topk * row_stride, width, item_stride, itemsize)
            to += row_bytes


def gather_picks(const int32_t[:, ::1] ids, const float[:, ::1] weights, const int32_t[::1] source, Array expert,
                 Array weight):
    """Expert id (-1 in padding) and weight (0 there) of each row; `weights` and `weight` may be None."""
    cdef int32_t* to_id = <int32_t*>_at(expert)
    cdef float* to_weight = <float*>_at(weight) if weight is not None else NULL
    cdef const int32_t* id_of = &ids[0, 0] if ids.size else NULL
    cdef const float* weight_of = &weights[0, 0] if weights is not None and weights.size else NULL
    cdef int64_t row
    with nogil:
        for row in range(source.shape[0]):
            to_id[row] = id_of[source[row]] if source[row] >= 0 else -1
            if to_weight != NULL:
                to_weight[row] = weight_of[source[row]] if source[row] >= 0 else 0


def rows_of_picks(const int32_t[::1] source, int64_t num_picks):
    """The inverse of `source`: row of each pick t * K + k, -1 where a pick has none."""
    cdef int64_t row
    result = np.full(num_picks, -1, np.int32)
    cdef int32_t[::1] row_of = result
    for row in range(source.shape[0]):
        if source[row] < -1 or source[row] >= num_picks:
            raise InvalidArgumentError(f"permuted.source[{row}]={source[row]}: expected -1 or a pick "
                                       f"0..{num_picks - 1}")
        if source[row] >= 0:
            if row_of[source[row]] >= 0:
                raise InvalidArgumentError(f"permuted.source[{row}]={source[row]}: the same pick as row "
                                           f"{row_of[source[row]]}; expected each pick once")
            row_of[source[row]] = <int32_t>row
    return result


def sum_picks(Array y, const int32_t[::1] row_of, const float[::1] weights, int64_t num_topk, Array out):
    """out[t] = the rows of t's picks summed in float32, k ascending from +0.0, rounded once. `weights` may be None."""
    cdef const RowOps* ops = _ops()
    cdef RowType type = _type(y.dtype)
    cdef size_t width = <size_t>_shape(y, 1)
    cdef size_t row_bytes = width * <size_t>y.itemsize
    cdef int64_t row_stride = _stride(y, 0)
    cdef const char* base = _at(y)
    cdef char* to = _at(out)
    cdef int64_t num_tokens = _shape(out, 0)
    cdef vector[Row] rows = vector[Row](<size_t>num_topk + 1)
    cdef vector[float] factors = vector[float](<size_t>num_topk + 1)
    cdef const float* factor = factors.data() if weights is not None else NULL
    cdef int64_t token, pick
    cdef int32_t row
    cdef int count
    with nogil:
        for token in range(num_tokens):
            count = 0
            for pick in range(token * num_topk, (token + 1) * num_topk):
                row = row_of[pick]
                if row < 0:
                    continue
                rows[count] = base + row * row_stride
                if factor != NULL:
                    factors[count] = weights[row]
                count += 1
            ops.reduce(type, to, rows.data(), factor, count, NULL, width)
            to += row_bytes


# fp8 ------------------------------------------------------------------------------------------------------------------

def quantize_rows(Array x, bint round_scale, Array codes, Array scales):
    """e4m3 codes [T, H] and float32 scales [T, ceil(H / 128)] of each row; rows of `x` are contiguous."""
    cdef const RowOps* ops = _ops()
    cdef RowType type = _type(x.dtype)
    cdef int64_t num_tokens = _shape(x, 0)
    cdef int64_t width = _shape(x, 1)
    cdef int64_t groups = _shape(scales, 1)
    cdef int64_t row_stride = _stride(x, 0)
    cdef cbool rounded = round_scale
    cdef const char* base = _at(x)
    cdef uint8_t* to = <uint8_t*>_at(codes)
    cdef float* scale = <float*>_at(scales)
    cdef int64_t token
    if width == 0:
        return
    with nogil:
        for token in range(num_tokens):
            ops.quantize(type, to + token * width, scale + token * groups, base + token * row_stride, <size_t>width,
                         rounded)


def dequantize_rows(Array codes, const float[:, ::1] scales, Array out):
    """The way back; rows of `codes` are contiguous, `out` is contiguous."""
    cdef RowType type = _type(out.dtype)
    cdef int64_t num_tokens = _shape(codes, 0)
    cdef int64_t width = _shape(codes, 1)
    cdef int64_t row_stride = _stride(codes, 0)
    cdef int64_t out_stride = width * out.itemsize
    cdef const char* base = _at(codes)
    cdef char* to = _at(out)
    cdef int64_t token
    if width == 0 or num_tokens == 0:
        return
    with nogil:
        for token in range(num_tokens):
            dequantize_row(type, to + token * out_stride, <const uint8_t*>(base + token * row_stride),
                           &scales[token, 0], <size_t>width)


# for tests: one function of one table, and the formats ----------------------------------------------------------------

def isas():
    """Names of the tables that run here, best first."""
    return [isa for isa in ("avx512", "avx2", "plain") if _runs(isa)]


cdef bint _runs(str isa):
    cdef bytes name = isa.encode()
    return row_ops(name) != NULL


def best_isa():
    """The table that row_ops(NULL) gives."""
    return row_ops(NULL).name.decode()


def copy_row(str isa, Array dst, Array src, bint stream=False):
    """RowOps::copy or stream_copy of all bytes of a contiguous array."""
    cdef const RowOps* ops = _ops(isa)
    cdef size_t size = <size_t>src.nbytes
    if stream:
        ops.stream_copy(_at(dst), _at(src), size)
        stream_fence()
    else:
        ops.copy(_at(dst), _at(src), size)


def copy_items(Array dst, Array src):
    """copy_strided of a one-dimensional array."""
    copy_strided(_at(dst), _at(src), src.size, _stride(src, 0), src.itemsize)


def reduce_rows(str isa, Array out, list rows, const float[::1] weights, const float[::1] bias, bint stream=False):
    """RowOps::reduce or stream_reduce of contiguous rows."""
    cdef const RowOps* ops = _ops(isa)
    cdef vector[Row] at
    cdef Array row
    for row in rows:
        at.push_back(<Row>_at(row))
    cdef const float* weight = NULL
    cdef float none = 0
    if weights is not None:
        weight = &weights[0] if weights.shape[0] else &none
    cdef const float* add = NULL
    if bias is not None:
        add = &bias[0] if bias.shape[0] else &none
    cdef RowType type = _type(out.dtype)
    if stream:
        ops.stream_reduce(type, _at(out), at.data(), weight, <int>at.size(), add, <size_t>out.size)
        stream_fence()
    else:
        ops.reduce(type, _at(out), at.data(), weight, <int>at.size(), add, <size_t>out.size)


def quantize_row(str isa, Array codes, Array scales, Array x, bint round_scale):
    """RowOps::quantize of a contiguous row."""
    cdef const RowOps* ops = _ops(isa)
    ops.quantize(_type(x.dtype), <uint8_t*>_at(codes), <float*>_at(scales), _at(x), <size_t>x.size, round_scale)


def convert(str name, uint32_t[::1] values):
    """Bits of formats.h's function `name` for each bits of its argument, both as uint32."""
    result = np.empty(values.shape[0], np.uint32)
    cdef uint32_t[::1] out = result
    cdef int64_t i
    cdef uint32_t value
    cdef int which = ("bf16_to_f32", "f32_to_bf16", "f16_to_f32", "f32_to_f16", "e4m3_to_f32", "f32_to_e4m3",
                      "e8m0_to_f32", "f32_to_e8m0", "group_scale", "group_scale_rounded").index(name)
    with nogil:
        for i in range(values.shape[0]):
            value = values[i]
            if which == 0:
                out[i] = float_bits(bf16_to_f32(<uint16_t>value))
            elif which == 1:
                out[i] = f32_to_bf16(bits_float(value))
            elif which == 2:
                out[i] = float_bits(f16_to_f32(<uint16_t>value))
            elif which == 3:
                out[i] = f32_to_f16(bits_float(value))
            elif which == 4:
                out[i] = float_bits(e4m3_to_f32(<uint8_t>value))
            elif which == 5:
                out[i] = f32_to_e4m3(bits_float(value))
            elif which == 6:
                out[i] = float_bits(e8m0_to_f32(<uint8_t>value))
            elif which == 7:
                out[i] = f32_to_e8m0(bits_float(value))
            elif which == 8:
                out[i] = float_bits(group_scale(value, False))
            else:
                out[i] = float_bits(group_scale(value, True))
    return result
