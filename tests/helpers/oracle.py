"""The contract in slow, obvious NumPy.

It sees the inputs of *all* ranks at once and says what each rank must get back, bit for bit. It shares no line
with the package. The order of the sums is an argument (a *tree*), because the order is part of the contract and
differs by mode: see :class:`RankTree`, :class:`ExactOrder` and :class:`TwoHopTree`.
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_GROUP = 128
FP8_MAX = np.float32(448.0)


def default_owners(num_experts, num_ranks):
    """Owner of each expert: contiguous, the first ``num_experts % num_ranks`` ranks own one more."""
    owners = []
    for rank in range(num_ranks):
        owners += [rank] * (num_experts // num_ranks + (1 if rank < num_experts % num_ranks else 0))
    return owners


@dataclass
class RankInput:
    """What one rank gives to dispatch."""

    x: np.ndarray  # [T, H]
    topk_idx: np.ndarray  # [T, K]
    topk_weights: np.ndarray | None = None  # [T, K] float32
    scales: np.ndarray | None = None  # [T, S]


@dataclass
class Row:
    """Where a received row comes from. ``k`` is None in rank layout (a row stands for all picks of a rank)."""

    source: int
    token: int
    k: int | None = None


@dataclass
class Received:
    """What dispatch must return on one rank. ``rows[i]`` is None for padding and for the unused tail."""

    x: np.ndarray
    scales: np.ndarray | None
    topk_idx: np.ndarray
    topk_weights: np.ndarray | None
    num_tokens_per_expert: np.ndarray
    expert_offsets: np.ndarray | None
    counts: list | None
    num_tokens: int
    overflow: int
    rows: list
    x_is_defined: np.ndarray  # bool [rows]: False in the tail of capacity mode, where x is unwritten


@dataclass
class Routing:
    """All ranks' results of one dispatch, and what combine needs to know of it."""

    layout: str
    num_topk: int
    owners: list
    inputs: list
    received: list
    place: dict = field(default_factory=dict)  # (source, token, k) -> (rank, row), delivered picks only


# ---------------------------------------------------------------------------------------------- dispatch


def dispatch(
    inputs, num_experts, *, owners=None, layout="rank", alignment=1, capacity=None, quantize=None, round_scale=False
):
    """What each rank receives.

    Parameters
    ----------
    inputs : list of RankInput
        One per rank.
    owners : list of int, optional
        Rank of each expert.
    capacity : int, optional
        Exactly so many rows come out; what does not fit is dropped.

    Returns
    -------
    Routing
    """
    num_ranks = len(inputs)
    owners = default_owners(num_experts, num_ranks) if owners is None else list(owners)
    local_id = {}
    experts_of = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        local_id[expert] = len(experts_of[owners[expert]])
        experts_of[owners[expert]].append(expert)

    if quantize is not None:
        moved = []
        for one in inputs:
            codes, scales = quantize_fp8(one.x, round_scale)
            moved.append(RankInput(codes, one.topk_idx, one.topk_weights, scales))
    else:
        moved = inputs

    routing = Routing(layout, inputs[0].topk_idx.shape[1], owners, inputs, [])
    for rank in range(num_ranks):
        if layout == "rank":
            plan, overflow = _plan_rank(moved, owners, rank, capacity)
            offsets = None
        else:
            plan, offsets, overflow = _plan_expert(moved, owners, rank, experts_of[rank], alignment, capacity)
        routing.received.append(
            _receive(moved, plan, offsets, overflow, capacity, routing, rank, owners, local_id, len(experts_of[rank]))
        )
    return routing


def _plan_rank(inputs, owners, rank, capacity):
    plan = []
    for source, one in enumerate(inputs):
        for token in range(one.topk_idx.shape[0]):
            if any(e >= 0 and owners[e] == rank for e in one.topk_idx[token].tolist()):
                plan.append(Row(source, token))
    if capacity is None:
        return plan, 0
    overflow = max(0, len(plan) - capacity)
    plan = plan[:capacity]
    return plan + ["tail"] * (capacity - len(plan)), overflow


def _plan_expert(inputs, owners, rank, experts, alignment, capacity):
    plan, offsets = [], [0]
    for expert in experts:
        for source, one in enumerate(inputs):
            for token in range(one.topk_idx.shape[0]):
                for k, picked in enumerate(one.topk_idx[token].tolist()):
                    if picked == expert:
                        plan.append(Row(source, token, k))
        while len(plan) % alignment:
            plan.append("padding")
        offsets.append(len(plan))
    if capacity is None:
        return plan, offsets, 0
    overflow = sum(isinstance(row, Row) for row in plan[capacity:])
    plan = plan[:capacity]
    return plan + ["tail"] * (capacity - len(plan)), [min(offset, capacity) for offset in offsets], overflow


def _receive(inputs, plan, offsets, overflow, capacity, routing, rank, owners, local_id, num_local):
    num_rows, num_topk = len(plan), routing.num_topk
    like = inputs[0]
    by_rank = routing.layout == "rank"
    x = np.zeros((num_rows, like.x.shape[1]), like.x.dtype)
    scales = None if like.scales is None else np.zeros((num_rows, like.scales.shape[1]), like.scales.dtype)
    shape = (num_rows, num_topk) if by_rank else (num_rows,)
    idx = np.full(shape, -1, np.int32)
    weights = None if like.topk_weights is None else np.zeros(shape, np.float32)
    per_expert = np.zeros(num_local, np.int32)
    rows, defined, num_tokens = [], np.ones(num_rows, bool), 0
    for i, row in enumerate(plan):
        if not isinstance(row, Row):
            rows.append(None)
            defined[i] = row == "padding"
            continue
        rows.append(row)
        num_tokens += 1
        one = inputs[row.source]
        x[i] = one.x[row.token]
        if scales is not None:
            scales[i] = one.scales[row.token]
        for k in range(num_topk) if by_rank else [row.k]:
            expert = int(one.topk_idx[row.token, k])
            if expert < 0 or owners[expert] != rank:
                continue
            at = (i, k) if by_rank else i
            idx[at] = local_id[expert]
            if weights is not None:
                weights[at] = one.topk_weights[row.token, k]
            per_expert[local_id[expert]] += 1
            routing.place[row.source, row.token, k] = (rank, i)
    return Received(
        x, scales, idx, weights, per_expert,
        None if offsets is None else np.array(offsets, np.int32),
        None if capacity is not None else per_expert.tolist(),
        num_tokens, overflow, rows, defined,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- combine


@dataclass
class Part:
    """One summand of a token. In rank layout ``k`` is None: the row already stands for all picks of the rank."""

    rank: int
    k: int | None
    row: np.ndarray
    weight: np.float32 | None


def _sum(rows, width):
    total = np.zeros(width, np.float32)  # +0.0
    for row in rows:
        total = total + row.astype(np.float32)
    return total


def _sum_picks(parts, width):
    total = np.zeros(width, np.float32)
    for part in sorted(parts, key=lambda part: part.k):
        value = part.row.astype(np.float32)
        if part.weight is not None:
            value = value * np.float32(part.weight)  # rounded to float32 before the addition: no FMA
        total = total + value
    return total


class RankTree:
    """Default: picks of a rank (k ascending), rounded to the row dtype; then ranks ascending."""

    def _partials(self, parts, width, dtype):
        partials = {}
        for rank in sorted({part.rank for part in parts}):
            mine = [part for part in parts if part.rank == rank]
            if mine[0].k is None:
                (only,) = mine
                partials[rank] = only.row
            else:
                partials[rank] = _sum_picks(mine, width).astype(dtype)
        return partials

    def __call__(self, parts, width, dtype):
        partials = self._partials(parts, width, dtype)
        return _sum([partials[rank] for rank in sorted(partials)], width)


class TwoHopTree(RankTree):
    """Ranks of a node ascending, rounded to the row dtype; then nodes ascending. ``node_of[rank]`` is the map."""

    def __init__(self, node_of):
        self.node_of = list(node_of)

    def __call__(self, parts, width, dtype):
        partials = self._partials(parts, width, dtype)
        nodes = {}
        for rank in sorted(partials):
            nodes.setdefault(self.node_of[rank], []).append(partials[rank])
        return _sum([_sum(nodes[node], width).astype(dtype) for node in sorted(nodes)], width)


class ExactOrder:
    """``exact_order=True``: every pick by itself, k ascending over all ranks, never rounded in between."""

    def __call__(self, parts, width, dtype):
        return _sum_picks(parts, width)


def combine(routing, ys, *, tree=None, apply_weights=None, topk_weights=None, bias=None):
    """What each rank gets back.

    Parameters
    ----------
    ys : list of array
        Per rank ``[rows, H]``; rows that hold no token are never looked at.
    tree : callable, optional
        Order of the sums, :class:`RankTree` by default.
    apply_weights : bool, optional
        None: in expert layout if weights were dispatched, never in rank layout.
    topk_weights : list of array, optional
        Per rank the float32 scalars to carry back.
    bias : list of array, optional
        Per rank ``[H]`` or ``[T, H]``, added in float32 after the sum.

    Returns
    -------
    list of (z, carried)
        ``z [T, H]`` in the dtype of `ys`, ``carried [T, K]`` or None.
    """
    tree = RankTree() if tree is None else tree
    by_rank = routing.layout == "rank"
    have_weights = routing.inputs[0].topk_weights is not None
    if apply_weights is None:
        apply_weights = not by_rank and have_weights
    results = []
    with np.errstate(all="ignore"):
        for source, one in enumerate(routing.inputs):
            num_tokens, num_topk = one.topk_idx.shape
            width, dtype = ys[0].shape[1], ys[0].dtype
            z = np.zeros((num_tokens, width), dtype)
            carried = None if topk_weights is None else np.zeros((num_tokens, num_topk), np.float32)
            for token in range(num_tokens):
                parts = []
                for k in range(num_topk):
                    place = routing.place.get((source, token, k))
                    if place is None:
                        continue
                    rank, row = place
                    if carried is not None:
                        carried[token, k] = topk_weights[rank][row, k] if by_rank else topk_weights[rank][row]
                    if by_rank:
                        if all(part.rank != rank for part in parts):
                            parts.append(Part(rank, None, ys[rank][row], None))
                    else:
                        weight = one.topk_weights[token, k] if apply_weights else None
                        parts.append(Part(rank, k, ys[rank][row], weight))
                total = tree(parts, width, dtype)
                if bias is not None and bias[source] is not None:
                    one_bias = bias[source] if bias[source].ndim == 1 else bias[source][token]
                    total = total + one_bias.astype(np.float32)
                z[token] = total.astype(dtype)
            results.append((z, carried))
    return results


# ---------------------------------------------------------------------------------------- number formats


def quantize_fp8(x, round_scale=False):
    """Codes ``[T, H]`` e4m3 and scales ``[T, ceil(H/128)]`` float32 of a float array."""
    num_tokens, width = x.shape
    num_groups = -(-width // FP8_GROUP)
    codes = np.zeros((num_tokens, width), FP8)
    scales = np.zeros((num_tokens, num_groups), np.float32)
    with np.errstate(all="ignore"):
        for token in range(num_tokens):
            for group in range(num_groups):
                part = slice(group * FP8_GROUP, min(width, (group + 1) * FP8_GROUP))
                values = x[token, part].astype(np.float32)
                finite = np.abs(values[np.isfinite(values)])
                amax = np.float32(finite.max()) if finite.size else np.float32(0)
                scale = np.float32(max(amax, np.float32(1e-4)) / FP8_MAX)
                if round_scale:
                    bits = int(scale.view(np.uint32))
                    if bits & 0x7FFFFF:
                        bits = (bits & ~0x7FFFFF) + 0x800000
                    scale = np.uint32(bits).view(np.float32)
                product = values * (np.float32(1) / scale)
                clamped = np.minimum(np.maximum(product, -FP8_MAX), FP8_MAX)  # NaN stays NaN
                code = clamped.astype(FP8).view(np.uint8).copy()
                code[np.isnan(values)] = 0x7F
                codes[token, part] = code.view(FP8)
                scales[token, group] = scale
    return codes, scales


# ---------------------------------------------------------------------------------------------- compare


def bits_of(array):
    """Integers that are equal exactly where the values are the same bits, every NaN being one value."""
    array = np.ascontiguousarray(array)
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    if array.dtype.kind in "fV" or array.dtype.name.startswith(("bfloat", "float")):
        with np.errstate(invalid="ignore"):
            nan = np.isnan(array.astype(np.float32) if array.dtype != np.float64 else array)
        bits = array.view(unsigned).copy()
        bits[nan] = np.iinfo(unsigned).max
        return bits
    return array.view(unsigned) if array.dtype != bool else array.view(np.uint8)


def assert_bits(got, want, what="array"):
    """Same dtype, same shape, same bits; any NaN equals any NaN. Says where the first difference is."""
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype != want.dtype:
        raise AssertionError(f"{what}: dtype {got.dtype}, expected {want.dtype}")
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {got.shape}, expected {want.shape}")
    wrong = bits_of(got) != bits_of(want)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements differ, first at {first}: "
            f"got {got[first]!r}, expected {want[first]!r}"
        )
