"""Case generators: inputs of all ranks from a seed, and programs of calls with what each rank must see.

Everything is made in the parent; a rank gets only its own inputs and its own expected results.
"""

from dataclasses import dataclass, field

import numpy as np

from helpers import arrays, oracle

FLOATS = ("float32", "float16", "bfloat16")
PAYLOADS = ("float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16", "uint16", "int32", "uint32")
ROUTINGS = ("random", "full", "one_rank", "none", "duplicates", "same", "last")


def values(rng, shape, dtype, specials=True):
    """Random values that show rounding and order: wide exponents, some zeros, -0.0, subnormals, Inf and NaN."""
    dtype = arrays.dtype_of(dtype)
    if dtype.kind in "iu" or dtype.itemsize == 1:
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    numbers = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-6, 7, shape)).astype(np.float32)
    if specials:
        chosen = rng.random(shape)
        odd = np.array([0.0, -0.0, 1e-40, -6e-8, np.inf, np.nan, 3e38, 65504.0], np.float32)
        numbers = np.where(chosen < 0.02, rng.choice(odd, shape), numbers)
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)


def route(rng, routing, num_tokens, num_topk, owners):
    """``[T, K]`` int64 expert ids."""
    num_experts = len(owners)
    ids = np.full((num_tokens, num_topk), -1, np.int64)
    if routing == "none" or num_tokens == 0:
        return ids
    if routing in ("random", "full"):
        ids = np.array([rng.permutation(num_experts)[:num_topk] for _ in range(num_tokens)], np.int64)
        if routing == "random":
            ids[rng.random(ids.shape) < 0.2] = -1
    elif routing == "one_rank":
        pool = [expert for expert in range(num_experts) if owners[expert] == owners[0]]
        ids = rng.choice(pool, ids.shape)
    elif routing == "duplicates":
        ids = rng.integers(-1, min(num_experts, 3), ids.shape)
    elif routing == "same":
        ids[:] = rng.permutation(num_experts)[:num_topk]
    elif routing == "last":
        ids[:, -1] = num_experts - 1
    else:
        raise ValueError(routing)
    return ids


@dataclass
class Spec:
    """Shape of a case. ``tokens`` is one number or one per rank; ``scales`` is (dtype, S)."""

    num_ranks: int
    num_experts: int = 8
    num_topk: int = 2
    hidden: int = 64
    dtype: str = "bfloat16"
    tokens: tuple | int = 13
    routing: str = "random"
    weights: bool = True
    owners: list | None = None
    idx_dtype: str = "int64"
    scales: tuple | None = None
    specials: bool = True
    seed: int = 0
    comm: dict = field(default_factory=dict)

    def tokens_of(self, rank):
        """Tokens of one rank."""
        return self.tokens if isinstance(self.tokens, int) else self.tokens[rank % len(self.tokens)]

    def owner_list(self):
        """Owner of each expert."""
        return list(self.owners) if self.owners is not None else oracle.default_owners(self.num_experts, self.num_ranks)

    def inputs(self, seed=0):
        """All ranks' inputs. Weights at -1 slots are NaN: nobody may look at them."""
        rng = np.random.default_rng([self.seed, seed])
        made = []
        for rank in range(self.num_ranks):
            num_tokens = self.tokens_of(rank)
            ids = route(rng, self.routing, num_tokens, self.num_topk, self.owner_list())
            weights = scales = None
            if self.weights:
                weights = rng.standard_normal(ids.shape, np.float32)
                weights[ids < 0] = np.nan
            if self.scales is not None:
                scales = values(rng, (num_tokens, self.scales[1]), self.scales[0])
            x = values(rng, (num_tokens, self.hidden), self.dtype, self.specials)
            made.append(oracle.RankInput(x, ids.astype(self.idx_dtype), weights, scales))
        return made


class Program:
    """Calls on one communicator, each with its inputs and expected results for every rank.

    ``dispatch`` and ``again`` name their result by a key that later steps use. Every result is held and looked at
    again at the end, unless ``drop`` lets it go: a lease that is overwritten shows.
    """

    def __init__(self, spec, name="", **comm):
        self.spec = spec
        self.name = f"{name} {spec}".strip()
        self.comm = {**spec.comm, **comm}
        self.rng = np.random.default_rng([spec.seed, 77])
        self.routings = {}
        self._options = {}
        self._steps = [[] for _ in range(spec.num_ranks)]
        self._seeds = 0

    def _add(self, op, per_rank=None, **common):
        for rank, steps in enumerate(self._steps):
            steps.append({"op": op, **common, **(per_rank[rank] if per_rank else {})})

    def dispatch(self, key="a", inputs=None, form="plain", round_scale=None, **options):
        """A dispatch by ids. `options` go to the call; the same words as the oracle's where they matter."""
        if inputs is None:
            self._seeds += 1
            inputs = self.spec.inputs(self._seeds)
        routing = oracle.dispatch(
            inputs,
            self.spec.num_experts,
            owners=self.spec.owner_list(),
            layout=options.get("layout", "rank"),
            alignment=options.get("expert_alignment", 1),
            capacity=options.get("capacity"),
            quantize=options.get("quantize"),
            round_scale=bool(round_scale),
        )
        self.routings[key] = routing
        self._options[key] = options
        if round_scale is not None:
            options = {**options, "round_scale": round_scale}
        self._add(
            "dispatch",
            [
                {"arrays": _arrays_of(one, with_ids=True), "want": _wanted(received)}
                for one, received in zip(inputs, routing.received, strict=True)
            ],
            key=key,
            form=form,
            options=options,
        )
        return routing

    def again(self, key, of, form="plain", dtype=None, hidden=None, scales=None, **options):
        """A dispatch of other rows with the handle of an earlier one; dtype and width may differ."""
        old = self.routings[of]
        new = []
        for one in old.inputs:
            num_tokens = one.topk_idx.shape[0]
            x = values(self.rng, (num_tokens, hidden or self.spec.hidden), dtype or self.spec.dtype)
            extra = None if scales is None else values(self.rng, (num_tokens, scales[1]), scales[0])
            new.append(oracle.RankInput(x, one.topk_idx, one.topk_weights, extra))
        fixed = self._options[of]
        routing = oracle.dispatch(
            new,
            self.spec.num_experts,
            owners=self.spec.owner_list(),
            layout=fixed.get("layout", "rank"),
            alignment=fixed.get("expert_alignment", 1),
            capacity=fixed.get("capacity"),
            quantize=options.get("quantize"),
        )
        self.routings[key] = routing
        self._options[key] = fixed
        self._add(
            "dispatch",
            [
                {"arrays": _arrays_of(one, with_ids=False), "want": _wanted(received)}
                for one, received in zip(new, routing.received, strict=True)
            ],
            key=key,
            of=of,
            form=form,
            options=options,
        )
        return routing

    def combine(
        self,
        of="a",
        *,
        source="fresh",
        form="plain",
        dtype=None,
        hidden=None,
        carried=False,
        bias=None,
        out=None,
        tree=None,
        ys=None,
        **options,
    ):
        """A combine; rows of y that hold no token are NaN.

        Parameters
        ----------
        source : {"fresh", "leased", "buffer"}
            y in its own memory, written over ``out.x``, or in ``combine_buffer``.
        bias : {"row", "float32", "tokens", "float32 tokens"}, optional
            In the dtype of y or in float32; one row for all tokens or one each.
        out : str, optional
            Memory form of ``out=``.
        ys : list of array, optional
            Rows to combine, per rank; else random ones.
        """
        routing = self.routings[of]
        dtype = dtype or (str(routing.received[0].x.dtype) if source == "leased" else self.spec.dtype)
        dtype = dtype if dtype in FLOATS else "float32"
        hidden = hidden or self.spec.hidden
        given, ys, scalars, biases = ys, [], [], []
        for rank, received in enumerate(routing.received):
            y = values(self.rng, (received.x.shape[0], hidden), dtype, self.spec.specials)
            if given is not None:
                y = given[rank].copy()
            weights = self.rng.standard_normal(received.topk_idx.shape, np.float32)
            empty = np.array([row is None for row in received.rows], bool)
            y[empty] = np.nan
            weights[empty] = np.nan
            ys.append(y)
            scalars.append(weights)
            each = (len(routing.inputs[rank].topk_idx),) if "tokens" in (bias or "") else ()
            biases.append(values(self.rng, (*each, hidden), "float32" if "float32" in (bias or "") else dtype))
        results = oracle.combine(
            routing,
            ys,
            tree=tree or (oracle.ExactOrder() if options.get("exact_order") else None),
            apply_weights=options.get("apply_weights"),
            topk_weights=scalars if carried else None,
            bias=biases if bias else None,
        )
        self._add(
            "combine",
            [
                {
                    "arrays": {
                        "y": y,
                        "topk_weights": weights if carried else None,
                        "bias": one_bias if bias else None,
                    },
                    "want": z,
                    "want_carried": back,
                }
                for y, weights, one_bias, (z, back) in zip(ys, scalars, biases, results, strict=True)
            ],
            of=of,
            source=source,
            form=form,
            out=out,
            options=options,
        )

    def barrier(self):
        """All ranks meet."""
        self._add("barrier")

    def drop(self, *keys):
        """Let results go: their leases end."""
        self._add("drop", keys=keys)

    def for_rank(self, rank):
        """What :func:`helpers.runner.run_programs` takes."""
        spec = self.spec
        most = max(1, *(spec.tokens_of(r) for r in range(spec.num_ranks)), 0)
        comm = {
            "num_experts": spec.num_experts,
            "num_topk": spec.num_topk,
            "hidden": spec.hidden,
            "max_tokens_per_rank": most,
            "dtype": spec.dtype,
            **({"expert_to_rank": spec.owners} if spec.owners is not None else {}),
            **self.comm,
        }
        return {"name": self.name, "comm": comm, "steps": self._steps[rank]}


def run(pool, programs, kind="numpy", timeout_s=60.0, **more):
    """Run programs on a pool, all in one case."""
    from helpers import runner

    return pool.run(
        runner.run_programs,
        timeout_s=timeout_s,
        kind=kind,
        per_rank=[{"programs": [program.for_rank(rank) for program in programs]} for rank in range(pool.num_ranks)],
        **more,
    )


def _arrays_of(one, with_ids):
    made = {"x": one.x, "scales": one.scales}
    if with_ids:
        made.update(topk_idx=one.topk_idx, topk_weights=one.topk_weights)
    return made


def _wanted(received):
    return {
        "x": received.x,
        "x_is_defined": received.x_is_defined,
        "has_token": np.array([row is not None for row in received.rows], bool),
        "scales": received.scales,
        "topk_idx": received.topk_idx,
        "topk_weights": received.topk_weights,
        "num_tokens_per_expert": received.num_tokens_per_expert,
        "expert_offsets": received.expert_offsets,
        "counts": received.counts,
        "num_tokens": received.num_tokens,
        "overflow": received.overflow,
    }
