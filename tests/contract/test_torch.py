"""Gradients of `epcomm.torch` against a dense model in one process.

Every rank knows all ranks' inputs, runs the dense model over all of them, and compares its own part: the gradients of
its tokens and weights, and those of its experts, which come from the tokens of all ranks.
"""

import subprocess
import sys

import numpy as np
import pytest
from helpers import oracle
from helpers.with_torch import needs_torch, torch_ranks

pytestmark = needs_torch
LAYOUTS = ("rank", "expert")
HIDDEN, NUM_EXPERTS, NUM_TOPK = 12, 5, 3


@pytest.fixture
def three(pools, backend):
    """Three ranks that have torch."""
    return torch_ranks(pools, backend, 3)


def inputs_of(rank, tokens, dtype="float32", seed=0):
    """x, ids and weights of one rank: some -1, some duplicates."""
    import torch

    rng = np.random.default_rng([seed, rank])
    num = tokens[rank % len(tokens)]
    x = torch.tensor(rng.standard_normal((num, HIDDEN)), dtype=getattr(torch, dtype))
    ids = torch.from_numpy(rng.integers(-1, NUM_EXPERTS, (num, NUM_TOPK)))
    if num > 2:
        ids[0], ids[1] = -1, ids[1, 0]
    weights = torch.tensor(rng.random((num, NUM_TOPK)), dtype=torch.float32)
    return x, ids, weights


def matrices(dtype="float32"):
    """One matrix per expert, the same on all ranks."""
    import torch

    rng = np.random.default_rng(99)
    made = rng.standard_normal((NUM_EXPERTS, HIDDEN, HIDDEN)) * HIDDEN**-0.5
    return torch.tensor(made, dtype=getattr(torch, dtype))


def slopes_of(rank, shape):
    """d loss / d z of one rank."""
    import torch

    return torch.tensor(np.random.default_rng([7, rank]).standard_normal(shape), dtype=torch.float32)


def kept(all_ids, owners, layout, capacity):
    """Which picks are delivered: those of the first `capacity` rows of each rank, in received order."""
    keep = [np.asarray(ids) >= 0 for ids in all_ids]
    if capacity is None:
        return keep
    for dest in range(max(owners) + 1):
        rows = {}
        for source, ids in enumerate(all_ids):
            for token, k in np.argwhere(np.asarray(ids) >= 0):
                expert = int(ids[token, k])
                if owners[expert] == dest:
                    key = (source, token) if layout == "rank" else (expert, source, token, k)
                    rows.setdefault(key, []).append((source, token, k))
        for key in sorted(rows)[capacity:]:
            for source, token, k in rows[key]:
                keep[source][token, k] = False
    return keep


def dense(all_inputs, w_experts, keep):
    """z of each rank by one process; every input is a leaf in float32."""
    import torch

    made = []
    for (x, ids, weights), mask in zip(all_inputs, keep, strict=True):
        z = torch.zeros(x.shape)
        for k in range(NUM_TOPK):
            per_expert = torch.stack([torch.tanh(x @ w) for w in w_experts])  # [E, T, H]
            chosen = per_expert[ids[:, k].clamp(min=0), torch.arange(len(x))]
            z = z + torch.where(torch.from_numpy(mask)[:, k, None], weights[:, k, None] * chosen, 0)
        made.append(z)
    return made


def local_experts(out, w_mine, layout):
    """This rank's experts over the received rows: plain torch, out of place."""
    import torch

    y = torch.zeros_like(out.x)
    for expert, w in enumerate(w_mine):
        answer = torch.tanh(out.x @ w)
        if layout == "rank":
            weight = out.topk_weights.where(out.topk_idx == expert, 0).sum(1, keepdim=True)
            y = y + weight.to(y.dtype) * answer
        else:
            y = torch.where((out.topk_idx == expert)[:, None], answer, y)
    return y


def shape_of(dtype="float32", **more):
    return {"num_experts": NUM_EXPERTS, "num_topk": NUM_TOPK, "hidden": HIDDEN, "max_tokens_per_rank": 16,
            "dtype": dtype, **more}  # fmt: skip


def against_dense(context, tokens, layout, dtype="float32", capacity=None, comm_options=None, tolerance=2e-6,
                  weights_dtype="float32", combine_options=None, **options):  # fmt: skip
    import torch

    import epcomm.torch

    owners = oracle.default_owners(NUM_EXPERTS, context.num_ranks)
    everyone = [inputs_of(rank, tokens, dtype) for rank in range(context.num_ranks)]
    leaves = [[x.clone().float().requires_grad_(), ids, w.clone().requires_grad_()] for x, ids, w in everyone]
    w_all = matrices(dtype).float().requires_grad_()
    keep = kept([ids for _, ids, _ in everyone], owners, layout, capacity)
    wanted = dense(leaves, w_all, keep)
    sum((z * slopes_of(rank, z.shape)).sum() for rank, z in enumerate(wanted)).backward()

    mine = [expert for expert, owner in enumerate(owners) if owner == context.rank]
    w_mine = matrices(dtype)[mine].requires_grad_()
    x, ids, weights = everyone[context.rank]
    x, weights = x.clone().requires_grad_(), weights.to(getattr(torch, weights_dtype)).requires_grad_()
    with context.comm(**shape_of(dtype, **(comm_options or {}))) as comm:
        for _ in range(2):
            out = epcomm.torch.dispatch(comm, x, ids, weights, layout=layout, capacity=capacity, **options)
            assert capacity is None or len(out.x) == capacity
            y = local_experts(out, w_mine, layout)
            z = epcomm.torch.combine(comm, y, out, **(combine_options or {}))
            assert z.shape == x.shape and z.dtype == x.dtype
            (z * slopes_of(context.rank, z.shape)).sum().backward()
    pairs = {
        "z": (z, wanted[context.rank]),
        "x": (x.grad / 2, leaves[context.rank][0].grad),
        "weights": (weights.grad / 2, leaves[context.rank][2].grad),
        "experts": (w_mine.grad / 2, w_all.grad[mine]),
    }
    assert x.grad.dtype == x.dtype and weights.grad.dtype == weights.dtype
    for name, (got, want) in pairs.items():
        if want.numel():
            error = (got.detach().float() - want).abs().max() / want.abs().max().clamp(min=1e-3)
            assert error <= tolerance, f"{name}: relative error {error:.1e}"
    assert not (weights.grad * torch.from_numpy(~keep[context.rank])).any(), "a pick that went nowhere has gradient 0"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [(9,), (6, 0, 11), (0,)], ids=str)
def test_gradients_equal_one_process(pools, backend, tokens, layout):
    for num in (1, 3):
        torch_ranks(pools, backend, num).run(against_dense, tokens=tokens, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16(three, layout):
    three.run(against_dense, tokens=(9, 0, 5), layout=layout, dtype="bfloat16", tolerance=3e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [4, 80])
def test_capacity(three, layout, capacity):
    three.run(against_dense, tokens=(9, 0, 5), layout=layout, capacity=capacity, comm_options={"num_slots": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"expert_alignment": 8},
        {"copy": True},
        {"combine_options": {"exact_order": True}},
        {"weights_dtype": "bfloat16", "tolerance": 2e-2},
        {"weights_dtype": "float64"},
        {"quantize": "fp8", "tolerance": 0.15},
    ],
    ids=str,
)
def test_options(three, options):
    three.run(against_dense, tokens=(9, 0, 5), layout="expert", **options)


# --------------------------------------------------------------------- B30: the gate learns, in exact numbers


def gate_learns(context, layout, capacity):
    """Expert e multiplies by e + 1, loss = sum of combined: all numbers are small integers and quarters."""
    import torch

    import epcomm.torch

    num_experts = 4
    owners = oracle.default_owners(num_experts, context.num_ranks)
    mine = torch.tensor([expert + 1 for expert in range(num_experts) if owners[expert] == context.rank] + [0])
    rng = np.random.default_rng(context.rank)
    num = (5, 0, 3)[context.rank % 3]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.from_numpy(rng.integers(-2, 3, (num, 8))).to(dtype).requires_grad_()
        ids = torch.from_numpy(rng.integers(-1, num_experts, (num, 2)))
        weights = torch.from_numpy(rng.integers(0, 5, (num, 2)) / 4).float().requires_grad_()
        shape = {"num_experts": num_experts, "num_topk": 2, "hidden": 8, "max_tokens_per_rank": 8}
        with context.comm(**shape, dtype="float32") as comm:
            out = epcomm.torch.dispatch(comm, x, ids, weights, layout=layout, capacity=capacity)
            if layout == "rank":
                factor = (mine[out.topk_idx] * out.topk_weights).sum(1, keepdim=True)
            else:
                factor = mine[out.topk_idx][:, None]
            z = epcomm.torch.combine(comm, (out.x * factor).to(dtype), out)
            z.sum().backward()
        picked = ids >= 0
        factor = (ids + 1) * picked
        assert torch.equal(weights.grad, factor * x.detach().float().sum(1, keepdim=True))
        assert torch.equal(x.grad.float(), (weights.detach() * factor).sum(1, keepdim=True).expand(num, 8))
        assert not weights.grad[~picked].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [None, 64])
def test_b30_gradient_of_the_routing_weights(pools, backend, layout, capacity):
    for num in (1, 3):
        torch_ranks(pools, backend, num).run(gate_learns, layout=layout, capacity=capacity)


# ---------------------------------------------------------------------------- what else a user does with it


def many_ways(context, layout):
    import torch

    import epcomm.torch

    x, ids, weights = inputs_of(context.rank, (6,))
    w = matrices()[: [2, 2, 1][context.rank]] if context.num_ranks == 3 else matrices()
    with context.comm(**shape_of()) as comm:

        def layer(x, weights, again=False):
            out = epcomm.torch.dispatch(comm, x, ids, weights, layout=layout)
            if again:  # the same routing for other rows, of another width
                second = epcomm.torch.dispatch(comm, x[:, :5], handle=out.handle)
                assert torch.equal(second.x, out.x[:, :5]) and second.topk_idx is out.topk_idx
                out.x = torch.cat([out.x[:, :7], second.x], 1)
            return epcomm.torch.combine(comm, local_experts(out, w, layout), out.handle)

        def gradients(call, *leaves):
            for leaf in leaves:
                leaf.grad = None
            z = call(*leaves)
            (z * slopes_of(context.rank, z.shape)).sum().backward()
            return [leaf.grad for leaf in leaves]

        x.requires_grad_(), weights.requires_grad_()
        plain = gradients(layer, x, weights)
        for reentrant in (False, True):

            def recomputed(x, weights, reentrant=reentrant):
                return torch.utils.checkpoint.checkpoint(layer, x, weights, use_reentrant=reentrant)

            again = gradients(recomputed, x, weights)
            assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
        strided = torch.empty(12, 2 * HIDDEN)[::2, ::2].copy_(x.detach()).requires_grad_()
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(layer, strided, weights), strict=True))
        twice = gradients(lambda x, w: layer(x, w, again=True), x, weights)
        assert [a.shape for a in twice] == [a.shape for a in plain]

        for shape, slope in (((HIDDEN,), 6.0), ((6, HIDDEN), 1.0)):
            bias = torch.ones(shape, requires_grad=True)
            out = epcomm.torch.dispatch(comm, x, ids, layout=layout)
            z = epcomm.torch.combine(comm, out.x * 2, out, bias=bias)
            z.sum().backward()
            assert torch.equal(bias.grad, torch.full(shape, slope))

        # Results may be written in place, as any tensor that autograd gave.
        out = epcomm.torch.dispatch(comm, x, ids, weights, layout=layout)
        out.x.mul_(2)
        epcomm.torch.combine(comm, local_experts(out, w, layout), out).sum().backward()

        with torch.no_grad():
            assert not layer(x, weights).requires_grad
        z = layer(x, weights)
        (gradient,) = torch.autograd.grad((z * z).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="autograd formula"):
            gradient.sum().backward()
        comm.barrier()
        assert isinstance(out.handle.plain, epcomm.Handle)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_ways(three, layout):
    three.run(many_ways, layout=layout)


def deep(context, num_slots):
    """More layers than slots, all saved for backward."""
    import torch

    import epcomm.torch

    torch.manual_seed(0)
    with context.comm(**shape_of(num_slots=num_slots)) as comm:
        layers = torch.nn.Sequential(*(epcomm.torch.ExpertParallel(comm, HIDDEN, 8) for _ in range(5)))
        x, _, _ = inputs_of(context.rank, (6, 0, 9))
        for _ in range(3):
            x.grad = None
            layers(x.requires_grad_()).square().sum().backward()
        told = comm.stats()
        return x.grad, told["leases_held"], told["copies"]


def test_layers_deeper_than_slots_do_not_wait(three):
    few, many = three.run(deep, num_slots=1), three.run(deep, num_slots=16)
    for (a, held, copies), (b, _, _) in zip(few, many, strict=True):
        assert (a == b).all() and held == 0 and copies >= 12


def layers_that_fail_on_one(context):
    """What rank 1 does wrong, or what its gate or expert raises, all hear at once; then the layer works again."""
    import torch

    import epcomm.torch

    class Failing(torch.nn.Module):
        raises = None

        def forward(self, out):
            if self.raises is not None:
                raise self.raises("no such thing")
            return out.x

    texts = []
    with context.comm(**shape_of()) as comm:
        failing = Failing()
        layer = epcomm.torch.ExpertParallel(comm, HIDDEN, experts=failing)
        x, _, _ = inputs_of(context.rank, (6, 6, 6))
        culprit = context.rank == 1
        for bad in (x[:, 1:], x[0, 0], x.tolist(), x.double(), KeyError, epcomm.UnsupportedError):
            in_expert = isinstance(bad, type)
            failing.raises = bad if culprit and in_expert else None
            try:
                layer(x if in_expert or not culprit else bad)
            except (epcomm.EpcommError, RuntimeError, KeyError) as error:
                texts.append((type(error).__name__, str(error)))
            failing.raises = None
            layer(x).sum().backward()
        for arguments in ({"hidden": 0}, {"hidden": 2.5}, {"hidden": 4, "inner": 0}, {"hidden": 4}, {"comm": None}):
            with pytest.raises(epcomm.InvalidArgumentError, match=f"{list(arguments)[-1]}|inner"):
                epcomm.torch.ExpertParallel(**{"comm": comm, "hidden": 4, **arguments})
    return texts


def test_a_layer_that_fails_on_one_rank_is_told_to_all(three):
    first, second, third = three.run(layers_that_fail_on_one)
    assert third == first
    assert [kind for kind, _ in first] == ["InvalidArgumentError"] * 6, first
    assert second[:3] == first[:3]
    assert [kind for kind, _ in second[3:]] == ["RuntimeError", "KeyError", "UnsupportedError"], second
    words = ("shape", "shape", "list", "the gate raised RuntimeError", "an expert raised KeyError",
             "an expert raised UnsupportedError")
    for (_, text), word in zip(first, words, strict=True):
        assert "rank 1" in text and word in text, text


def module_like_dense(context, layout, autocast, owners):
    import contextlib
    import copy

    import torch

    import epcomm.torch

    torch.manual_seed(0)
    with context.comm(**shape_of(expert_to_rank=owners)) as comm:
        layer = epcomm.torch.ExpertParallel(comm, HIDDEN, 7, layout=layout)
        mine = [expert for expert in range(NUM_EXPERTS) if owners[expert] == context.rank]
        rng = np.random.default_rng(1)
        gate = torch.tensor(rng.standard_normal((NUM_EXPERTS, HIDDEN)), dtype=torch.float32)
        up = torch.tensor(rng.standard_normal((NUM_EXPERTS, HIDDEN, 7)), dtype=torch.float32)
        down = torch.tensor(rng.standard_normal((NUM_EXPERTS, 7, HIDDEN)), dtype=torch.float32)
        with torch.no_grad():
            layer.gate.weight.copy_(gate)
            layer.experts.up.copy_(up[mine])
            layer.experts.down.copy_(down[mine])
        x = inputs_of(context.rank, (6, 0, 9))[0].reshape(1, -1, HIDDEN).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            z = layer(x)
        z.float().square().sum().backward()
        twin = copy.deepcopy(layer)
        assert twin.comm is comm and twin.gate.weight is not layer.gate.weight
        assert not mine or layer.experts.up.grad.shape == (len(mine), HIDDEN, 7)
        got = (z.detach(), x.grad, layer.gate.weight.grad)

        leaves = [x.detach().clone().requires_grad_(), gate.requires_grad_()]
        weights, ids = (leaves[0] @ gate.T).softmax(-1).topk(NUM_TOPK)
        weights = weights / weights.sum(-1, keepdim=True)
        want = torch.zeros(x.shape)
        for k in range(NUM_TOPK):
            inner = torch.relu(torch.einsum("bth,bthi->bti", leaves[0], up[ids[..., k]]))
            want = want + weights[..., k, None] * torch.einsum("bti,btih->bth", inner, down[ids[..., k]])
        want.square().sum().backward()
        for a, b in zip(got, (want.detach(), leaves[0].grad, gate.grad), strict=True):
            if b.numel():
                error = float((a.float() - b).abs().max() / b.abs().max().clamp(min=1e-6))
                assert error <= (0.2 if autocast else 1e-5), error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("autocast", [False, True])
def test_module(pools, backend, layout, autocast):
    for num, owners in ((1, [0] * 5), (3, [2, 0, 0, 2, 2])):  # rank 1 has no expert
        torch_ranks(pools, backend, num).run(module_like_dense, layout=layout, autocast=autocast, owners=owners)


# ------------------------------------------------------------------------------- bad arguments, on one rank


def ids_and_weights(context):
    """B18 and B19: dtypes of ids and weights."""
    import torch

    import epcomm.torch

    x, ids, weights = inputs_of(context.rank, (6,))
    texts = []
    with context.comm(**shape_of()) as comm:
        first = epcomm.torch.dispatch(comm, x, ids, weights)
        second = epcomm.torch.dispatch(comm, x, ids.int(), weights)
        assert torch.equal(first.x, second.x) and torch.equal(first.topk_idx, second.topk_idx)
        for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool, torch.uint32):
            with pytest.raises(epcomm.InvalidArgumentError, match="topk_idx") as caught:
                epcomm.torch.dispatch(comm, x, ids.clamp(min=0).to(dtype), weights)
            texts.append(str(caught.value))
        with pytest.raises(epcomm.InvalidArgumentError, match="topk_weights"):
            epcomm.torch.dispatch(comm, x, ids, torch.ones(6, NUM_TOPK + 1))
    return texts


def test_b18_b19_ids_and_weights(three):
    for texts in three.run(ids_and_weights):
        for text, word in zip(texts, ("int16", "uint8", "float32", "bool", "uint32"), strict=True):
            assert word in text and "int64" in text


def wrong_on_one(context):
    """A wrong argument of rank 1 is one typed error on all, and the next call is right."""
    import torch

    import epcomm.torch

    x, ids, weights = inputs_of(context.rank, (6,))
    texts = {}
    with context.comm(**shape_of()) as comm, context.comm(**shape_of()) as other:
        right = {"x": x, "topk_idx": ids, "topk_weights": weights}
        bad = {
            "x is a list": {"x": x.tolist()},
            "x is an array": {"x": x.numpy()},
            "x is flat": {"x": x[0]},
            "no ids": {"topk_idx": None},
            "ids are None and weights too": {"topk_idx": None, "topk_weights": None},
            "ids out of range": {"topk_idx": ids + 100},
            "layout": {"layout": 3},
            "alignment": {"expert_alignment": 1.5},
            "capacity": {"capacity": "7"},
            "copy": {"copy": 1},
            "quantize": {"quantize": 8},
            "handle": {"handle": "yes", "topk_idx": None, "topk_weights": None},
            "x on meta": {"x": x.to("meta")},
            "weights on meta": {"topk_weights": weights.to("meta")},
        }
        for name, changes in bad.items():
            try:
                epcomm.torch.dispatch(comm, **{**right, **(changes if context.rank == 1 else {})})
            except epcomm.InvalidArgumentError as error:
                texts[name] = str(error)
        out = epcomm.torch.dispatch(comm, **right)
        far = epcomm.torch.dispatch(other, **right)
        bad = {
            "rows": {"x": out.x[:1]},
            "rows are an array": {"x": out.x.detach().numpy()},
            "rows on meta": {"x": out.x.to("meta")},
            "no handle": {"handle": None},
            "foreign handle": {"handle": far.handle},
            "apply": {"apply_weights": True},
            "order": {"exact_order": "yes"},
            "bias": {"bias": torch.ones(3)},
        }
        for name, changes in bad.items():
            try:
                call = {"x": out.x, "handle": out, **(changes if context.rank == 1 else {})}
                epcomm.torch.combine(comm, **call)
            except epcomm.InvalidArgumentError as error:
                texts[name] = str(error)
        for integers in (x.to(torch.int32), x.to(torch.int8)):  # on all ranks: nothing to differentiate
            with pytest.raises(epcomm.InvalidArgumentError, match=r"epcomm\.torch"):
                epcomm.torch.dispatch(comm, integers, ids, weights)
        z = epcomm.torch.combine(comm, out.x, out)
        z.sum().backward()
    return texts


def test_a_wrong_argument_is_the_same_error_on_all_ranks(three):
    answers = three.run(wrong_on_one)
    assert len(answers[0]) == 22
    for name, text in answers[0].items():
        assert "rank 1" in text and ("allowed" in text or "another communicator" in text), f"{name}: {text}"
        assert [answer[name] for answer in answers] == [text] * 3


def test_import_of_epcomm_does_not_import_torch():
    code = "import sys, epcomm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
