"""Bad values of every argument, made inside the rank that gives them.

Each row is (argument, value's maker, text that the error must contain). A maker gets the :class:`Bench`.
"""

from types import SimpleNamespace

import numpy as np

from helpers import arrays

SHAPE = {"num_experts": 6, "num_topk": 2, "hidden": 16, "max_tokens_per_rank": 8, "dtype": "float32"}
TOKENS = 5
MISSING = object()


class Bench(SimpleNamespace):
    """A communicator with results of good calls: what a bad call starts from."""

    @classmethod
    def make(cls, context, comm, foreign):
        rng = np.random.default_rng(context.rank)
        x = rng.standard_normal((TOKENS, SHAPE["hidden"]), np.float32)
        idx = np.arange(TOKENS * 2).reshape(TOKENS, 2) % 6
        weights = rng.random((TOKENS, 2), np.float32)
        bench = cls(comm=comm, x=x, idx=idx, weights=weights)
        bench.rank_out = comm.dispatch(x, idx, weights, copy=True)
        bench.expert_out = comm.dispatch(x, idx, weights, layout="expert", copy=True)
        bench.bare_out = comm.dispatch(x, idx, layout="expert", copy=True)
        bench.foreign = foreign.dispatch(x, idx, weights, copy=True).handle
        closed = comm.dispatch(x, idx, weights, copy=True).handle
        closed.close()
        bench.closed = closed
        return bench


def value_of(make, bench):
    """The bad value of a row."""
    return make(bench) if callable(make) else make


def with_id(value, dtype=np.int64):
    """Good ids with one bad one at [2, 1]."""

    def make(bench):
        idx = bench.idx.astype(dtype)
        idx[2, 1] = value
        return idx

    return make


def one_memory(num_rows):
    """Scalars to carry and a result that lie on each other."""
    flat = np.zeros(max(num_rows, TOKENS * 16), np.float32)
    return {"topk_weights": flat[:num_rows], "out": flat[: TOKENS * 16].reshape(TOKENS, 16)}


BAD_X = [
    ("x", None, "x"),
    ("x", "rows", "x"),
    ("x", 3.5, "x"),
    ("x", lambda b: b.x[0], "(16,)"),
    ("x", lambda b: b.x[None], "(1, 5, 16)"),
    ("x", lambda b: b.x.astype(np.float64), "float64"),
    ("x", lambda b: b.x.astype(np.complex64), "complex64"),
    ("x", lambda b: b.x.astype(object), "x"),
    ("x", lambda b: b.x.astype(">f4"), "x"),
    ("x", lambda b: arrays.DLPackExporter(b.x, device_type=2), "device"),
    ("x", lambda b: arrays.FakeCuda(b.x), "device"),
]

BAD_DISPATCH = [
    *BAD_X,
    ("x", lambda b: np.zeros((TOKENS, 17), np.float32), "68 bytes; allowed: at most 64"),
    ("x", lambda b: b.x[:-1], str(TOKENS - 1)),
    ("topk_idx", MISSING, "topk_idx"),
    ("topk_idx", "ids", "topk_idx"),
    *[("topk_idx", (lambda b, t=t: b.idx.astype(t)), np.dtype(t).name) for t in
      ("uint32", "int16", "int8", "uint64", "uint8", "float32", "float64", "bool")],
    ("topk_idx", lambda b: b.idx.astype(">i8"), "topk_idx"),
    ("topk_idx", lambda b: b.idx[:, 0], "topk_idx"),
    ("topk_idx", lambda b: b.idx[:, :1], "topk_idx"),
    ("topk_idx", lambda b: np.concatenate([b.idx, b.idx], axis=1), "topk_idx"),
    ("topk_idx", lambda b: b.idx[:-1], "topk_idx"),
    ("topk_idx", lambda b: arrays.DLPackExporter(b.idx, device_type=2), "device"),
    *[("topk_idx", with_id(value), str(value)) for value in
      (6, 1006, 2**31 - 1, 2**31, 2**40, 2**40 + 3, -2, -(2**63))],
    *[("topk_idx", with_id(value, np.int32), str(value)) for value in (6, -2, 2**31 - 1, -(2**31))],
    ("topk_weights", "weights", "topk_weights"),
    ("topk_weights", lambda b: b.weights[:, 0], "topk_weights"),
    ("topk_weights", lambda b: b.weights[:-1], "topk_weights"),
    ("topk_weights", lambda b: np.concatenate([b.weights, b.weights[:, :1]], axis=1), "topk_weights"),
    ("topk_weights", lambda b: b.weights.astype(np.int32), "int32"),
    ("topk_weights", lambda b: b.weights.astype(np.complex64), "complex64"),
    ("topk_weights", lambda b: arrays.DLPackExporter(b.weights, device_type=2), "device"),
    ("scales", "scales", "scales"),
    ("scales", lambda b: b.x[:, 0], "scales"),
    ("scales", lambda b: b.x[:-1, :1], "scales"),
    ("scales", lambda b: np.zeros((TOKENS, 10**5), np.float32), "scales"),
    ("scales", lambda b: arrays.DLPackExporter(b.x[:, :1], device_type=2), "device"),
    ("layout", "token", "token"),
    ("layout", None, "None"),
    ("layout", 3, "3"),
    ("expert_alignment", 0, "0"),
    ("expert_alignment", -4, "-4"),
    ("expert_alignment", 1.5, "1.5"),
    ("expert_alignment", "4", "4"),
    ("expert_alignment", None, "None"),
    ("expert_alignment", 2**40, str(2**40)),
    ("capacity", -1, "-1"),
    ("capacity", 1.5, "1.5"),
    ("capacity", "8", "8"),
    ("capacity", 2**70, str(2**70)),
    ("copy", "yes", "yes"),
    ("copy", 2, "2"),
    ("quantize", "fp4", "fp4"),
    ("quantize", 8, "8"),
    ("quantize", np.zeros(2), "allowed: None or 'fp8'"),
    ("num_sms", 0, "0"),
    ("num_sms", -1, "-1"),
    ("num_sms", "2", "2"),
    ("num_sms", 1.5, "1.5"),
    ("num_sms", np.arange(3), "num_sms is array([0, 1, 2])"),
    ("stream", "side", "stream"),
    ("stream", lambda b: object(), "stream"),
    ("async_op", "yes", "async_op"),
]  # fmt: skip

# (arguments that change together, text): what no single value shows.
BAD_DISPATCH_PAIRS = [
    (lambda b: {"handle": b.rank_out.handle}, "handle"),  # both
    *[((lambda b, make=make: {"handle": make(b), "topk_idx": None, "topk_weights": None}), text) for make, text in (
        (lambda b: "h", "handle is of type str"),
        (lambda b: 5, "handle is of type int"),
        (lambda b: b.rank_out, "handle is of type Dispatched"),
        (lambda b: b.closed, "handle is closed"),
        (lambda b: b.foreign, "another communicator"),
    )],
    (lambda b: {"handle": b.rank_out.handle, "topk_idx": None, "topk_weights": None, "x": b.x[:-1]}, "4 rows"),
    (lambda b: {"handle": b.rank_out.handle, "topk_idx": None}, "topk_weights"),
    (lambda b: {"quantize": "fp8", "x": b.x.view(np.uint32)}, "quantize"),
    (lambda b: {"quantize": "fp8", "scales": b.x[:, :1]}, "scales"),
    (lambda b: {"x": np.zeros((9, 16), np.float32), "topk_idx": np.zeros((9, 2), np.int64), "topk_weights": None},
     "max_tokens_per_rank=8"),
]  # fmt: skip

BAD_COMBINE = [
    *BAD_X,
    ("x", lambda b: np.zeros((len(b.expert_out.x), 17), np.float32), "68 bytes; allowed: at most 64"),
    ("x", lambda b: np.zeros((b.expert_out.x.shape[0] + 1, 16), np.float32), "x"),
    ("x", lambda b: np.zeros((max(0, b.expert_out.x.shape[0] - 1), 16), np.float32), "x"),
    ("x", lambda b: np.zeros(b.expert_out.x.shape, np.int32), "int32"),
    ("x", lambda b: np.zeros(b.expert_out.x.shape, np.uint8), "uint8"),
    ("x", lambda b: np.zeros(b.expert_out.x.shape, arrays.dtype_of("float8_e4m3fn")), "float8"),
    ("handle", None, "handle"),
    ("handle", 5, "handle"),
    ("handle", lambda b: b.expert_out, "handle"),
    ("handle", lambda b: b.idx, "handle"),
    ("handle", lambda b: b.closed, "closed"),
    ("handle", lambda b: b.foreign, "another communicator"),
    ("apply_weights", "yes", "apply_weights"),
    ("apply_weights", 2, "apply_weights"),
    ("topk_weights", "w", "topk_weights"),
    ("topk_weights", lambda b: np.zeros((b.expert_out.x.shape[0] + 1,), np.float32), "topk_weights"),
    ("topk_weights", lambda b: np.zeros((*b.expert_out.x.shape[:1], 2), np.float32), "topk_weights"),
    ("topk_weights", lambda b: np.zeros(b.expert_out.x.shape[0], np.int32), "int32"),
    ("topk_weights", lambda b: arrays.DLPackExporter(b.expert_out.topk_weights, device_type=2), "device"),
    ("exact_order", "yes", "exact_order"),
    ("bias", "b", "bias"),
    ("bias", lambda b: np.zeros(17, np.float32), "17"),
    ("bias", lambda b: np.zeros((1, 16), np.float32), "bias"),  # neither one row nor one per token
    ("bias", lambda b: np.zeros(16, np.int32), "int32"),
    ("bias", lambda b: np.zeros(16, np.float16), "float16"),  # neither float32 nor the row dtype
    ("bias", lambda b: arrays.DLPackExporter(np.zeros(16, np.float32), device_type=2), "device"),
    ("out", "o", "out"),
    ("out", lambda b: np.zeros((TOKENS + 1, 16), np.float32), "out"),
    ("out", lambda b: np.zeros((TOKENS, 17), np.float32), "out"),
    ("out", lambda b: np.zeros((TOKENS, 16), np.float16), "float16"),
    ("out", lambda b: arrays.formed(np.zeros((TOKENS, 16), np.float32), "readonly"), "out"),
    ("out", lambda b: arrays.formed(np.ones((TOKENS, 16), np.float32), "columns"), "out"),
    ("out", lambda b: np.broadcast_to(np.zeros((1, 16), np.float32), (TOKENS, 16)), "out"),
    ("out", lambda b: b.expert_out.x[:TOKENS], "overlaps"),
    ("out", lambda b: arrays.DLPackExporter(np.zeros((TOKENS, 16), np.float32), device_type=2), "device"),
    ("num_sms", 0, "0"),
    ("num_sms", -1, "-1"),
    ("num_sms", "2", "2"),
    ("stream", "side", "stream"),
    ("async_op", "yes", "async_op"),
]

BAD_COMBINE_PAIRS = [
    # in rank layout the caller has already applied them
    (lambda b: {"x": b.rank_out.x, "handle": b.rank_out.handle, "apply_weights": True}, "apply_weights"),
    # no weights were dispatched
    (lambda b: {"x": b.bare_out.x, "handle": b.bare_out.handle, "apply_weights": True}, "apply_weights"),
    (lambda b: {"x": b.rank_out.x, "handle": b.rank_out.handle, "topk_weights": b.rank_out.topk_weights[:, 0]},
     "topk_weights"),
    (lambda b: one_memory(b.expert_out.x.shape[0]), "out overlaps topk_weights"),
]  # fmt: skip

BAD_CREATION = [
    *[("num_experts", value, str(value)) for value in (0, -1, "8", 1.5, None, 2**31 - 1, 2**40)],
    *[("num_topk", value, str(value)) for value in (0, -1, 7, "2", None, 1.5)],
    *[("hidden", value, str(value)) for value in (0, -1, "16", None, 1.5, 2**40)],
    *[("max_tokens_per_rank", value, str(value)) for value in (-1, "8", None, 1.5, 2**62)],
    *[("max_recv_tokens", value, str(value)) for value in (-1, "8", 1.5)],
    *[("low_latency_max_tokens", value, str(value)) for value in (-1, "8", None, 1.5)],
    *[("num_slots", value, str(value)) for value in (0, -1, "2", None, 1.5)],
    *[("dtype", value, "dtype") for value in ("float64", "complex64", "int7", None, 3, object)],
    ("backend", "nope", "nope"),
    ("backend", 3, "backend"),
    ("device", "tpu", "tpu"),
    *[("device", value, "device is") for value in (1.5, np.True_, np.array(True), np.arange(3), 2**70)],
    ("expert_to_rank", [0] * 5, "expert_to_rank"),
    ("expert_to_rank", [0] * 7, "expert_to_rank"),
    ("expert_to_rank", [0, 1, 0, 1, 0, 99], "99"),
    ("expert_to_rank", [0, 1, 0, 1, 0, -1], "-1"),
    ("expert_to_rank", np.zeros((6, 1), np.int64), "expert_to_rank"),
    ("expert_to_rank", np.zeros(6, np.float32), "expert_to_rank"),
    ("expert_to_rank", "000000", "expert_to_rank"),
    *[("num_sms", value, str(value)) for value in (0, -1, "2", 1.5)],
    *[("num_channels", value, str(value)) for value in (0, -1, "2", 1.5, 10**6)],
    *[("timeout_s", value, str(value)) for value in (0, -1, "abc", 1e12, float("nan"), float("inf"))],
    *[("timeout_s", value, "timeout_s=") for value in (True, np.True_, np.array(True))],
    ("options", {"no_such_option": 1}, "no_such_option"),
    ("options", "node_id=1", "options"),
    ("options", 5, "options"),
    *[("options", {"node_id": value}, "node_id") for value in ([1], True, 1.5, np.zeros(2), object())],
    *[("options", {"shm_dir": value}, "shm_dir") for value in (False, [], 3, b"/tmp")],
    *[("options", {"push_only": value}, "push_only") for value in (0, "no", [])],
    *[("options", {"use_pidfd": value}, "use_pidfd") for value in (0, "no", [])],
    *[("options", {"spin_us": value}, "spin_us") for value in (-1, "5", 1.5, True, np.arange(3), 10**7)],
    ("options", {"nvlink_share": 3}, "nvlink_share"),
    ("num_slots", np.arange(3), "num_slots"),
]

BAD_GROUPS = ["world", 5, [0, 1], object]

BAD_ENVIRONMENT = [
    ("EPCOMM_TIMEOUT_S", "abc", "EPCOMM_TIMEOUT_S"),
    ("EPCOMM_TIMEOUT_S", "0", "EPCOMM_TIMEOUT_S"),
    ("EPCOMM_BACKEND", "nope", "nope"),
    ("EPCOMM_NUM_THREADS", "0", "EPCOMM_NUM_THREADS"),
    ("EPCOMM_NUM_THREADS", "many", "EPCOMM_NUM_THREADS"),
    ("EPCOMM_HOST_ISA", "mmx", "EPCOMM_HOST_ISA"),
]

# (argument, rank 0's value, the others' value): must be equal on all ranks.
CREATION_MISMATCHES = [
    ("num_experts", 6, 7),
    ("num_topk", 2, 3),
    ("hidden", 16, 24),
    ("max_tokens_per_rank", 8, 16),
    ("max_recv_tokens", 40, 48),
    ("num_slots", 2, 3),
    ("dtype", "float32", "bfloat16"),
    ("num_channels", 2, 3),
    ("expert_to_rank", [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]),
]
