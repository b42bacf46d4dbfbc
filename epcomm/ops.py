"""Layout, permutation and number formats of one rank's arrays: no communicator, no peers.

Everything takes NumPy, torch and CuPy arrays, and anything with DLPack, the buffer protocol or
``__cuda_array_interface__``, with any strides. Results are new arrays of the kind of the first argument and on its
device (NumPy for DLPack and buffers of the host; CuPy, else torch, for foreign GPU arrays), with the same bits
wherever they are made; CuPy has no fp8, so codes are uint8 there.

On a GPU work goes to the current stream of the array's framework. Calls that check ids or learn how many rows there
are wait for it. Under stream capture nothing is checked: a bad id counts as -1. The first call on a device loads its
kernels; make it before capturing.
"""

import dataclasses
import operator
import sys
from typing import Any

import numpy as np

from epcomm import _rows, config
from epcomm._arrays import Array, as_numpy, canonical_dtype, empty, view
from epcomm.errors import InvalidArgumentError, OutOfMemoryError

GROUP = 128  # channels that share an fp8 scale
MAX_EXPERTS = 1 << 20  # owners are listed per expert, and the entry records of a communicator grow with them
_MAX_INT32 = 2**31 - 1
_IDS = ("int32", "int64")
_SUMMED = ("bfloat16", "float16", "float32")
_WEIGHTS = ("float32", "bfloat16", "float16", "float64")
_CODES = ("float8_e4m3fn", "uint8")


class _Result:
    """A repr that tells dtypes and shapes, not values."""

    def __repr__(self) -> str:
        texts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not field.repr:
                continue
            value = getattr(self, field.name)
            shape = getattr(value, "shape", None)
            if shape is not None:
                dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
                value = f"{dtype}[{', '.join(str(int(n)) for n in shape)}]"
            texts.append(f"{field.name}={value}")
        return f"{type(self).__name__}({', '.join(texts)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout(_Result):
    """Where the tokens of ``topk_idx [T, K]`` go.

    Attributes
    ----------
    num_tokens_per_rank : int32 [R]
        Tokens with at least one pick at the rank.
    num_tokens_per_expert : int32 [E]
        Picks of the expert; the same expert twice in a row counts twice.
    is_token_in_rank : bool [T, R]
    position : int32 [T, R]
        Index of the token among the tokens of that rank, -1 where it does not go there.
    """

    num_tokens_per_rank: Any
    num_tokens_per_expert: Any
    is_token_in_rank: Any
    position: Any


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Permuted(_Result):
    """Rows in expert layout: one per pick, grouped by expert, inside an expert by (token, k).

    Attributes
    ----------
    x : [rows, H]
        Zeros in padding.
    topk_idx : int32 [rows]
        Expert of the row, -1 in padding.
    topk_weights : float32 [rows] or None
        0 in padding.
    num_tokens_per_expert : int32 [E]
        Rows of each expert without padding.
    expert_offsets : int32 [E + 1]
        First row of each expert, padding included.
    source : int32 [rows]
        The pick ``t * K + k`` of each row, -1 in padding.
    num_tokens, num_topk : int
        T and K of the input.
    overflow : int
        Picks that did not fit into ``capacity``; under stream capture an int64 scalar of the device.
    """

    x: Any
    topk_idx: Any
    topk_weights: Any
    num_tokens_per_expert: Any
    expert_offsets: Any
    source: Any
    num_tokens: int
    num_topk: int
    overflow: Any = 0
    _inverse: Any = dataclasses.field(default=None, repr=False)  # on a GPU: the row of each pick


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Quantized(_Result):
    """fp8 codes and their scales.

    Attributes
    ----------
    x : float8_e4m3fn [T, H]
        uint8 on CuPy, which has no such dtype.
    scales : float32 [T, ceil(H / 128)]
    """

    x: Any
    scales: Any


# checks ---------------------------------------------------------------------------------------------------------------


def _integer(name: str, value: Any, low: int, high: int = _MAX_INT32) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name}={value!r}: expected an integer {low}..{high}") from None
    if not low <= number <= high:
        raise InvalidArgumentError(f"{name}={number}: expected an integer {low}..{high}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{name}={value!r}: expected True or False")
    return bool(value)


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _given(
    obj: Any,
    name: str,
    function: str,
    ndim: int,
    dims: str,
    dtypes: tuple[str, ...] | None = None,
    beside: tuple[str, Array] | None = None,
) -> Array:
    """An array of `ndim` dimensions and one of `dtypes`, on the device of `beside`, or the error that says what is
    wrong with it."""
    array = view(obj, name, _consumer_stream(obj))
    if beside is not None and array.device != beside[1].device:
        raise InvalidArgumentError(f"{name} is on {array.device}; expected {beside[1].device}, where {beside[0]} is")
    if array.requires_grad:
        raise InvalidArgumentError(
            f"{name} requires grad, and epcomm.{function} has no gradient: pass {name}.detach(), or call it under "
            f"torch.no_grad()"
        )
    if array.ndim != ndim:
        raise InvalidArgumentError(f"{name}: shape {_shape_text(array.shape)}; expected {dims}")
    if dtypes is not None and array.dtype not in dtypes:
        raise InvalidArgumentError(f"{name}: dtype {array.dtype}; expected {', '.join(dtypes[:-1])} or {dtypes[-1]}")
    return array


def _consumer_stream(obj: Any) -> int | None:
    """The stream that a DLPack exporter of GPU memory has to order its work before."""
    if type(obj).__module__.partition(".")[0] in ("numpy", "torch", "cupy") or not hasattr(obj, "__dlpack_device__"):
        return None
    framework = next((name for name in ("cupy", "torch") if sys.modules.get(name) is not None), None)
    try:
        device_type, device = obj.__dlpack_device__()
        if framework is None or device_type not in (2, 13):
            return None
        return int(_device().current_stream(framework, int(device)))
    except Exception:  # view() says what is wrong with it
        return None


def _device() -> Any:
    """The operations on GPU memory; imported by the first array of a GPU."""
    from epcomm import _device_ops

    return _device_ops


def _ids(topk_idx: Any, function: str, beside: tuple[str, Array] | None = None) -> Array:
    array = _given(topk_idx, "topk_idx", function, 2, "[T, K]", _IDS, beside)
    if array.shape[0] * array.shape[1] > _MAX_INT32:
        raise InvalidArgumentError(f"topk_idx: shape {_shape_text(array.shape)}: expected at most {_MAX_INT32} picks")
    return array


def _floats(array: Array) -> np.ndarray[Any, Any]:
    """Values as C-contiguous float32; float64 is rounded to nearest even."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.require(as_numpy(array), np.float32, ["C", "A"])
    except MemoryError as error:
        raise OutOfMemoryError(f"no memory for {array.size} float32 values: {error}") from error


def _joined_rows(array: Array, name: str) -> Array:
    """The array itself if the items of a row follow each other, else a copy of which that is true."""
    if array.rows_contiguous():
        return array
    try:
        return view(np.ascontiguousarray(as_numpy(array)), name)
    except MemoryError as error:
        raise OutOfMemoryError(f"{name}: no memory for a copy of {array.nbytes} bytes: {error}") from error


def _new(shape: tuple[int, ...], dtype: str, like: Array, zero: bool = False) -> tuple[Any, Array]:
    """A new array and the view of it."""
    made = empty(shape, dtype, like, zero=zero)
    return made, view(made, "result")


def _copied(values: np.ndarray[Any, Any], like: Array) -> Any:
    """Small results that were made in NumPy, as like's kind."""
    made, array = _new(values.shape, values.dtype.name, like)
    as_numpy(array)[...] = values
    return made


# owners and layout ----------------------------------------------------------------------------------------------------


def expert_owners(
    num_experts: int, num_ranks: int, expert_to_rank: Any = None
) -> tuple[list[int], list[int], list[int]]:
    """Which rank owns each expert, and the id that it has there.

    Parameters
    ----------
    num_experts, num_ranks : int
    expert_to_rank : sequence or array of int, optional
        Owner of each expert. Default: contiguous, the first ``num_experts % num_ranks`` ranks own one more.

    Returns
    -------
    rank_of : list of int
        Owner of each expert.
    local_of : list of int
        Local id of each expert: its place among its owner's experts in ascending order.
    counts : list of int
        Experts of each rank; 0 is normal.

    Raises
    ------
    InvalidArgumentError
        A number is out of range, or `expert_to_rank` has the wrong length, type or an unknown rank.
    """
    num_experts = _integer("num_experts", num_experts, 1, MAX_EXPERTS)
    num_ranks = _integer("num_ranks", num_ranks, 1, config.MAX_RANKS)
    if expert_to_rank is None:
        share, more = divmod(num_experts, num_ranks)
        rank_of = [rank for rank in range(min(num_ranks, num_experts)) for _ in range(share + (rank < more))]
    else:
        rank_of = _owner_list(expert_to_rank, num_experts, num_ranks)
    counts = [0] * num_ranks
    local_of = []
    for rank in rank_of:
        local_of.append(counts[rank])
        counts[rank] += 1
    return rank_of, local_of, counts


def _owner_list(expert_to_rank: Any, num_experts: int, num_ranks: int) -> list[int]:
    if isinstance(expert_to_rank, (list, tuple, range)):
        values = list(expert_to_rank)
    else:
        array = _given(expert_to_rank, "expert_to_rank", "expert_owners", 1, "[num_experts]", _IDS)
        values = (as_numpy(array) if array.device == "cpu" else _device().to_numpy(array)).tolist()
    if len(values) != num_experts:
        raise InvalidArgumentError(
            f"expert_to_rank: {len(values)} values; expected one for each of the {num_experts} experts"
        )
    return [_integer(f"expert_to_rank[{expert}]", rank, 0, num_ranks - 1) for expert, rank in enumerate(values)]


def layout(topk_idx: Any, num_experts: int, num_ranks: int = 1, expert_to_rank: Any = None) -> Layout:
    """Count what goes where.

    Parameters
    ----------
    topk_idx : int32 or int64 [T, K]
        Experts of each token; -1 is no pick.
    num_experts : int
    num_ranks : int
    expert_to_rank : sequence or array of int [num_experts], optional
        Owner of each expert; see :func:`expert_owners`.

    Returns
    -------
    Layout
        Arrays of the kind of `topk_idx`.

    Raises
    ------
    InvalidArgumentError
        Another dtype or shape, or an id outside -1..num_experts-1; the text names the first by row, then slot.

    Examples
    --------
    >>> import numpy as np, epcomm
    >>> epcomm.layout(np.array([[0, 3], [2, -1]]), num_experts=4, num_ranks=2).num_tokens_per_rank
    array([1, 2], dtype=int32)
    """
    num_experts = _integer("num_experts", num_experts, 1, MAX_EXPERTS)
    num_ranks = _integer("num_ranks", num_ranks, 1, config.MAX_RANKS)
    array = _ids(topk_idx, "layout")
    if array.device != "cpu":
        owners = None if expert_to_rank is None else _owner_list(expert_to_rank, num_experts, num_ranks)
        return Layout(*_device().layout(array, num_experts, num_ranks, owners))
    rank_of, local_of, counts = expert_owners(num_experts, num_ranks, expert_to_rank)
    ids = _rows.read_ids(array, num_experts)
    num_tokens = array.shape[0]
    per_rank, c_per_rank = _new((len(counts),), "int32", array)
    per_expert, c_per_expert = _new((len(rank_of),), "int32", array)
    in_rank, c_in_rank = _new((num_tokens, len(counts)), "bool", array, zero=True)
    position, c_position = _new((num_tokens, len(counts)), "int32", array)
    _rows.fill_layout(ids, rank_of, local_of, c_per_rank, c_per_expert, c_in_rank, c_position)
    return Layout(per_rank, per_expert, in_rank, position)


# rank layout to expert layout and back --------------------------------------------------------------------------------


def permute(
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    num_experts: int,
    expert_alignment: int = 1,
    capacity: int | None = None,
) -> Permuted:
    """Group rows by expert: rank layout in, expert layout out.

    Parameters
    ----------
    x : [T, H]
        Any dtype; rows move as bytes.
    topk_idx : int32 or int64 [T, K]
        Experts of each row, -1 elsewhere; what a dispatch in rank layout returns.
    topk_weights : float [T, K], optional
        float32; float16, bfloat16 and float64 are converted.
    num_experts : int
        Experts of this rank.
    expert_alignment : int
        Each expert's rows are padded to a multiple with zero rows.
    capacity : int, optional
        Exactly so many rows come out. Picks that do not fit are left out from the end and counted in ``overflow``;
        rows that are left over are like padding.

    Returns
    -------
    Permuted
        Arrays of the kind of `x`.

    Raises
    ------
    InvalidArgumentError
        Shapes that do not fit each other, another dtype, or an id outside -1..num_experts-1.
    """
    num_experts = _integer("num_experts", num_experts, 0, MAX_EXPERTS)
    expert_alignment = _integer("expert_alignment", expert_alignment, 1)
    capacity = -1 if capacity is None else _integer("capacity", capacity, 0)
    rows = _given(x, "x", "permute", 2, "[T, H]")
    idx = _ids(topk_idx, "permute", ("x", rows))
    if idx.shape[0] != rows.shape[0]:
        raise InvalidArgumentError(f"topk_idx: shape {_shape_text(idx.shape)}; expected one row for each of the "
                                   f"{rows.shape[0]} rows of x")  # fmt: skip
    given = _weights(topk_weights, idx.shape, rows) if topk_weights is not None else None
    if rows.device != "cpu":
        y, expert, weight, counts, offsets, source, overflow, inverse = _device().permute(
            rows, idx, given, num_experts, expert_alignment, capacity
        )
        return Permuted(
            y, expert, weight, counts, offsets, source, rows.shape[0], idx.shape[1], overflow, inverse
        )  # fmt: skip
    ids = _rows.read_ids(idx, num_experts)
    weights = _floats(given) if given is not None else None
    try:
        counts, offsets, source, overflow = _rows.expert_order(ids, num_experts, expert_alignment, capacity)
    except MemoryError as error:
        raise OutOfMemoryError(f"no memory to say where each row comes from: {error}") from error
    y, c_y = _new((len(source), rows.shape[1]), rows.dtype, rows)
    _rows.gather_rows(rows, source, idx.shape[1], c_y)
    expert, c_expert = _new(source.shape, "int32", rows)
    weight, c_weight = _new(source.shape, "float32", rows) if weights is not None else (None, None)
    _rows.gather_picks(ids, weights, source, c_expert, c_weight)
    return Permuted(
        y, expert, weight, _copied(counts, rows), _copied(offsets, rows), _copied(source, rows),
        rows.shape[0], idx.shape[1], overflow,
    )  # fmt: skip


def _weights(topk_weights: Any, shape: tuple[int, ...], x: Array) -> Array:
    array = _given(topk_weights, "topk_weights", "permute", 2, "[T, K]", _WEIGHTS, ("x", x))
    if array.shape != shape:
        raise InvalidArgumentError(f"topk_weights: shape {_shape_text(array.shape)}; expected that of topk_idx, "
                                   f"{_shape_text(shape)}")  # fmt: skip
    return array


def unpermute(y: Any, permuted: Permuted, *, apply_weights: bool | None = None) -> Any:
    """Sum the rows of each token's picks: expert layout in, rank layout out.

    Parameters
    ----------
    y : bfloat16, float16 or float32 [rows, H]
        A row for each row of ``permuted.x``; any H. Padding is never read.
    permuted : Permuted
        What :func:`permute` returned.
    apply_weights : bool, optional
        Multiply each row by its weight. Default: if `permuted` carries weights.

    Returns
    -------
    array [T, H]
        Of kind and dtype of `y`. Per token, k ascending from +0.0 in float32, product and sum each rounded, the total
        rounded once to nearest even; +0.0 for a token without picks.

    Raises
    ------
    InvalidArgumentError
        Shapes that do not fit each other, another dtype, or weights asked for that are not there.
    """
    if not isinstance(permuted, Permuted):
        raise InvalidArgumentError(f"permuted: {type(permuted).__name__}; expected what epcomm.permute returned")
    array = _given(y, "y", "unpermute", 2, "[rows, H]", _SUMMED)
    source = _given(permuted.source, "permuted.source", "unpermute", 1, "[rows]", _IDS, ("y", array))
    num_rows = source.shape[0]
    if array.shape[0] != num_rows:
        raise InvalidArgumentError(f"y: shape {_shape_text(array.shape)}; expected {num_rows} rows, as permuted has")
    num_tokens = _integer("permuted.num_tokens", permuted.num_tokens, 0)
    num_topk = _integer("permuted.num_topk", permuted.num_topk, 0)
    if num_tokens * num_topk > _MAX_INT32:
        raise InvalidArgumentError(f"permuted.num_tokens={num_tokens}, permuted.num_topk={num_topk}: expected at most "
                                   f"{_MAX_INT32} picks")  # fmt: skip
    if apply_weights is None:
        apply_weights = permuted.topk_weights is not None
    given = None
    if _flag("apply_weights", apply_weights):
        if permuted.topk_weights is None:
            raise InvalidArgumentError("apply_weights=True: permuted carries no weights; expected False or None")
        given = _given(permuted.topk_weights, "permuted.topk_weights", "unpermute", 1, "[rows]", _WEIGHTS, ("y", array))
        if given.shape != (num_rows,):
            raise InvalidArgumentError(f"permuted.topk_weights: shape {_shape_text(given.shape)}; expected one weight "
                                       f"for each of the {num_rows} rows")  # fmt: skip
    if array.device != "cpu":
        inverse = permuted._inverse
        made_here = inverse is not None and inverse.source is permuted.source
        if not made_here or tuple(inverse.row_of.shape) != (num_tokens, num_topk):
            inverse = None
        return _device().unpermute(array, source, inverse, given, num_tokens, num_topk)
    weights = _floats(given) if given is not None else None
    try:
        row_of = _rows_of_picks(as_numpy(source), num_tokens * num_topk)
    except MemoryError as error:
        raise OutOfMemoryError(f"no memory for the rows of {num_tokens * num_topk} picks: {error}") from error
    z, c_z = _new((num_tokens, array.shape[1]), array.dtype, array)
    _rows.sum_picks(_joined_rows(array, "y"), row_of, weights, num_topk, c_z)
    return z


def _rows_of_picks(source: np.ndarray[Any, Any], num_picks: int) -> np.ndarray[Any, Any]:
    """The inverse of ``source``. Picks are compared before they are narrowed: 2**40 is never pick 0."""
    outside = np.flatnonzero((source < -1) | (source >= num_picks))
    if outside.size:
        row = int(outside[0])
        _rows.rows_of_picks(np.ascontiguousarray(source[:row], np.int32), num_picks)  # what is wrong before that
        raise InvalidArgumentError(f"permuted.source[{row}]={source[row]}: expected -1 or a pick 0..{num_picks - 1}")
    return _rows.rows_of_picks(np.ascontiguousarray(source, np.int32), num_picks)


# fp8 ------------------------------------------------------------------------------------------------------------------


def quantize(x: Any, *, round_scale: bool = False) -> Quantized:
    """fp8 e4m3 codes with one float32 scale per 128 channels (the last group of a row may be short).

    The scale is ``max(amax, 1e-4) / 448``; the code is ``e4m3(clamp(x * (1 / scale), -448, 448))`` to nearest even.
    amax is the largest finite magnitude of the group; NaN becomes code 0x7f, an infinity +-448.

    Parameters
    ----------
    x : bfloat16, float16 or float32 [T, H]
    round_scale : bool
        Round each scale up to a power of two.

    Returns
    -------
    Quantized
        Arrays of the kind of `x`.

    Raises
    ------
    InvalidArgumentError
        Another dtype or shape.
    """
    round_scale = _flag("round_scale", round_scale)
    array = _given(x, "x", "quantize", 2, "[T, H]", _SUMMED)
    if array.device != "cpu":
        return Quantized(*_device().quantize(array, round_scale))
    num_tokens, width = array.shape
    codes, c_codes = _new((num_tokens, width), "float8_e4m3fn", array)
    scales, c_scales = _new((num_tokens, -(-width // GROUP)), "float32", array)
    _rows.quantize_rows(_joined_rows(array, "x"), round_scale, c_codes, c_scales)
    return Quantized(codes, scales)


def dequantize(x: Any, scales: Any, dtype: Any = "bfloat16") -> Any:
    """The values of fp8 codes: each code times its group's scale in float32, then rounded to `dtype`.

    Parameters
    ----------
    x : float8_e4m3fn [T, H]
        uint8 is taken as the codes' bytes, since not every protocol knows fp8.
    scales : float32 [T, ceil(H / 128)]
    dtype : bfloat16, float16 or float32

    Returns
    -------
    array [T, H]
        Of the kind of `x`.

    Raises
    ------
    InvalidArgumentError
        Shapes that do not fit each other, or another dtype.
    """
    name = canonical_dtype(dtype)
    if name not in _SUMMED:
        raise InvalidArgumentError(f"dtype={name}: expected bfloat16, float16 or float32")
    codes = _given(x, "x", "dequantize", 2, "[T, H]", _CODES)
    given = _given(scales, "scales", "dequantize", 2, "[T, ceil(H / 128)]", None, ("x", codes))
    if given.dtype != "float32":
        raise InvalidArgumentError(f"scales: dtype {given.dtype}; expected float32")
    expected = (codes.shape[0], -(-codes.shape[1] // GROUP))
    if given.shape != expected:
        raise InvalidArgumentError(f"scales: shape {_shape_text(given.shape)}; expected {_shape_text(expected)} for x "
                                   f"of shape {_shape_text(codes.shape)}")  # fmt: skip
    if codes.device != "cpu":
        return _device().dequantize(codes, given, name)
    y, c_y = _new(codes.shape, name, codes)
    _rows.dequantize_rows(_joined_rows(codes, "x"), _floats(given), c_y)
    return y
