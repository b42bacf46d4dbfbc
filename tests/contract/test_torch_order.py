"""Backward is collective: ranks that have nothing to do in it take part all the same, or all ranks raise."""

import numpy as np
import pytest
from helpers import oracle
from helpers.with_torch import needs_torch, torch_ranks

import epcomm

pytestmark = needs_torch
LAYOUTS = ("rank", "expert")
NUM_EXPERTS, HIDDEN = 4, 6


@pytest.fixture
def three(pools, backend):
    """Three ranks that have torch."""
    return torch_ranks(pools, backend, 3)


def shape_of(**more):
    return {"num_experts": NUM_EXPERTS, "num_topk": 2, "hidden": HIDDEN, "max_tokens_per_rank": 8, "dtype": "float32",
            "timeout_s": 20, **more}  # fmt: skip


def inputs_of(rank, num=5):
    import torch

    rng = np.random.default_rng(rank)
    x = torch.from_numpy(rng.integers(-2, 3, (num, HIDDEN))).float()
    ids = torch.from_numpy(rng.integers(0, NUM_EXPERTS, (num, 2)))
    return x, ids, torch.full((num, 2), 0.5)


def scales_of(context):
    """One learned factor per local expert; global expert e starts at e + 1."""
    import torch

    owners = oracle.default_owners(NUM_EXPERTS, context.num_ranks)
    return torch.tensor([e + 1.0 for e in range(NUM_EXPERTS) if owners[e] == context.rank], requires_grad=True)


def layer(comm, x, ids, weights, factors, layout, idle=False):
    """Expert e multiplies by factor e. An idle rank answers with zeros that lead nowhere."""
    import torch

    import epcomm.torch

    out = epcomm.torch.dispatch(comm, x, ids, weights, layout=layout)
    if idle:
        y = torch.zeros(out.x.shape)
    else:
        factor = torch.cat([factors, torch.zeros(1)])[out.topk_idx]
        y = out.x * ((factor * out.topk_weights).sum(1) if layout == "rank" else factor)[:, None]
    return epcomm.torch.combine(comm, y, out)


def one_is_different(context, layout, different):
    """Rank 0 differs from the others in what needs a gradient; the others' gradients are right, and nobody waits."""
    import torch

    x, ids, weights = inputs_of(context.rank, 0 if different == "no tokens" and context.rank == 0 else 5)
    special = context.rank == 0
    factors = scales_of(context)
    if special and different == "frozen experts":
        factors.requires_grad_(False)
    x.requires_grad_(not (special and different in ("frozen inputs", "frozen x")))
    weights.requires_grad_(not (special and different in ("frozen inputs", "frozen weights")))
    idle = different == "experts lead nowhere"
    with context.comm(**shape_of()) as comm:
        for _ in range(2):
            x.grad = weights.grad = None
            z = layer(comm, x, ids, weights, factors, layout, idle and special)
            loss = z.sum()
            if special and different == "a loss of its own":
                loss = torch.ones((), requires_grad=True) * 3 + z[:0].sum()
            loss.backward()
        comm.barrier()
    owners = torch.tensor(oracle.default_owners(NUM_EXPERTS, context.num_ranks))
    works = (owners[ids] != 0) if idle else torch.ones_like(ids)
    own_loss = 0 if special and different == "a loss of its own" else 1
    factor = (ids + 1) * works * own_loss
    if x.requires_grad:
        assert torch.equal(x.grad, (0.5 * factor).sum(1, keepdim=True).expand(x.shape))
    if weights.requires_grad:
        assert torch.equal(weights.grad, factor * x.detach().sum(1, keepdim=True))
    assert (x.grad is not None) == x.requires_grad and (weights.grad is not None) == weights.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "different",
    ["nothing", "no tokens", "frozen experts", "frozen x", "frozen weights", "frozen inputs", "experts lead nowhere",
     "a loss of its own"],
)  # fmt: skip
def test_a_rank_that_needs_no_gradient_takes_part(three, layout, different):
    three.run(one_is_different, layout=layout, different=different)


def frozen_everywhere(context, layout):
    """No leaf at all requires grad, also not on any rank: backward runs and gives nothing."""
    x, ids, weights = inputs_of(context.rank)
    factors = scales_of(context).detach()
    with context.comm(**shape_of()) as comm:
        layer(comm, x, ids, weights, factors, layout).sum().backward()
        assert x.grad is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_to_learn(three, layout):
    three.run(frozen_everywhere, layout=layout)


def stacked(context):
    """Layers behind each other; on one rank one leads nowhere: backward runs last layer first, everywhere."""
    x, ids, weights = inputs_of(context.rank)
    factors = scales_of(context)
    x.requires_grad_()
    with context.comm(**shape_of()) as comm:
        for lonely in range(3):
            z = x
            for number in range(3):
                z = layer(comm, z, ids, weights, factors, LAYOUTS[number % 2], idle=lonely == number == context.rank)
            z.sum().backward()
    return x.grad.numpy()


def test_stacked_layers(three):
    assert all(np.isfinite(gradient).all() for gradient in three.run(stacked))


def reused(context):
    """Two dispatches and two combines of one routing, of which the loss knows only the last, or only the first."""
    import torch

    import epcomm.torch

    x, ids, weights = inputs_of(context.rank)
    with context.comm(**shape_of()) as comm:
        for used in (0, 1):
            x = x.detach().requires_grad_()
            out = epcomm.torch.dispatch(comm, x, ids, layout="expert")
            both = [epcomm.torch.combine(comm, out.x * (k + 1), out.handle) for k in range(2)]
            second = epcomm.torch.dispatch(comm, 3 * x, handle=out.handle)
            assert torch.equal(second.x, 3 * out.x)
            both[used].sum().backward()
            assert torch.equal(x.grad, torch.full(x.shape, 2.0 * (used + 1)))
            with torch.no_grad():
                epcomm.torch.combine(comm, out.x, out)


def test_a_routing_that_is_used_more_than_once(three):
    three.run(reused)


# -------------------------------------------------------------------------------- a rank that does not come


def skips_backward(context, layout, grad_mode):
    """Rank 0 goes on to the next step without backward: one typed error on all ranks, and then all is well."""
    import torch

    x, ids, weights = inputs_of(context.rank)
    factors = scales_of(context)
    x.requires_grad_()
    with context.comm(**shape_of()) as comm:
        with torch.set_grad_enabled(grad_mode or context.rank != 0):
            z = layer(comm, x, ids, weights, factors, layout)
        with pytest.raises(epcomm.InvalidArgumentError) as caught:
            if context.rank != 0:
                z.sum().backward()
            layer(comm, x, ids, weights, factors, layout)
        for _ in range(2):
            layer(comm, x, ids, weights, factors, layout).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_rank_without_backward_is_a_typed_error(three, layout, grad_mode):
    texts = three.run(skips_backward, layout=layout, grad_mode=grad_mode)
    for text in texts:
        assert "differs between ranks" in text and "backward" in text, text
    assert "z[:0].sum()" in texts[1]


def leaves(context):
    """Rank 0 closes instead of running backward."""
    x, ids, weights = inputs_of(context.rank)
    comm = context.comm(**shape_of())
    z = layer(comm, x, ids, weights, scales_of(context), "expert")
    if context.rank == 0:
        comm.close()
        return ""
    with pytest.raises(epcomm.PeerLostError) as caught:
        z.sum().backward()
    assert caught.value.peer == 0
    return str(caught.value)


def test_a_rank_that_left(three):
    for text in three.run(leaves)[1:]:
        assert "left" in text and "backward is" in text or "is collective" in text, text


def never_comes(context):
    x, ids, weights = inputs_of(context.rank)
    with context.comm(**shape_of(timeout_s=1)) as comm:
        z = layer(comm, x, ids, weights, scales_of(context), "rank")
        if context.rank != 0:
            with pytest.raises((epcomm.CommTimeoutError, epcomm.PeerLostError), match="is collective"):
                z.sum().backward()
        else:
            import time

            time.sleep(2)


def test_a_rank_that_never_comes(three):
    three.run(never_comes)


def order_of_branches(context):
    """Two branches of which rank 0 uses one: its backward is another call, which all hear of at the next difference."""
    x, ids, weights = inputs_of(context.rank)
    factors = scales_of(context)
    x.requires_grad_()
    with context.comm(**shape_of()) as comm:
        first, second = (layer(comm, x, ids, weights, factors, "rank") for _ in range(2))
        loss = second.sum() if context.rank == 0 else first.sum()
        with pytest.raises(epcomm.InvalidArgumentError, match="handle differs between ranks"):
            loss.backward()
        comm.barrier()


def test_branches_in_another_order(three):
    three.run(order_of_branches)


def gone(context):
    import gc

    x, ids, weights = inputs_of(context.rank)
    comm = context.comm(**shape_of())
    z = layer(comm, x, ids, weights, scales_of(context), "rank")
    comm.close()
    with pytest.raises(epcomm.InvalidArgumentError, match="closed"):
        z.sum().backward(retain_graph=True)
    context._open.clear()
    del comm
    gc.collect()
    with pytest.raises(epcomm.InvalidArgumentError, match="is gone"):
        z.sum().backward()


def test_communicator_is_gone_before_backward(three):
    three.run(gone)
