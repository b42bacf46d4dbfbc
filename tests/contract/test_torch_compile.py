"""`epcomm.torch` under torch.compile and on meta and fake tensors."""

import shutil

import pytest
from helpers.with_torch import needs_torch, torch_ranks

pytestmark = needs_torch
LAYOUTS = ("rank", "expert")
SHAPE = {"num_experts": 4, "num_topk": 2, "hidden": 16, "max_tokens_per_rank": 16, "dtype": "float32"}


@pytest.fixture
def three(pools, backend):
    """Three ranks that have torch."""
    return torch_ranks(pools, backend, 3)


def close(a, b):
    return bool((a - b).abs().max() <= 1e-6 * (1 + b.abs().max())) if b.numel() else a.shape == b.shape


def results(call, layer, x):
    """z and all gradients."""
    for leaf in (x, *layer.parameters()):
        leaf.grad = None
    z = call(x)
    z.square().sum().backward()
    return [z.detach(), x.grad, *(p.grad for p in layer.parameters())]


def compiled_as_eager(context, layout, capacity, shapes=(6,), fullgraph=True):
    import torch

    import epcomm.torch

    torch.manual_seed(context.rank)
    torch.set_num_threads(1)
    with context.comm(**SHAPE) as comm:
        layer = epcomm.torch.ExpertParallel(comm, 16, 8, layout=layout, capacity=capacity)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=fullgraph)
        for num in shapes:
            x = torch.randn(num, 16, requires_grad=True)
            for got, want in zip(results(compiled, layer, x), results(layer, layer, x), strict=True):
                assert close(got, want)
        with torch.no_grad():
            assert close(compiled(x), layer(x))
        comm.barrier()


def test_whole_graph_with_capacity(three):
    three.run(compiled_as_eager, layout="expert", capacity=64, timeout_s=120)


def test_whole_graph_in_rank_layout(pools, backend):
    torch_ranks(pools, backend, 1).run(compiled_as_eager, layout="rank", capacity=64, shapes=(6, 9, 0), timeout_s=120)


def test_broken_graph_without_capacity(pools, backend):
    torch_ranks(pools, backend, 1).run(compiled_as_eager, layout="expert", capacity=None, fullgraph=False,
                              timeout_s=120)  # fmt: skip


def one_is_idle(context):
    """In the compiled backward too, a rank that needs no gradient takes part."""
    import torch

    import epcomm.torch

    with context.comm(**SHAPE) as comm:

        def layer(x, ids, weights, lead):
            out = epcomm.torch.dispatch(comm, x, ids, weights, layout="expert", capacity=64)
            return epcomm.torch.combine(comm, out.x * 2 if lead else torch.zeros_like(out.x), out)

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for call in (layer, compiled):
            ids = torch.tensor([[0, 3], [2, 1]])
            x = torch.ones(2, 16, requires_grad=context.rank != 0)
            call(x, ids, torch.full((2, 2), 0.5), context.rank != 0).sum().backward()
            if context.rank != 0:
                assert torch.equal(x.grad[:1], torch.full((1, 16), 1.0))
        comm.barrier()


def test_compiled_backward_is_collective_too(three):
    three.run(one_is_idle, timeout_s=120)


def traced(context):
    """Shapes on meta and fake tensors, no call of a peer: this is done by one rank alone."""
    import torch

    import epcomm.torch

    with context.comm(**SHAPE) as comm:
        if context.rank != 0:
            return
        before = comm.stats()["calls"]
        x = torch.empty(5, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        ids, weights = torch.empty(5, 2, device="meta", dtype=torch.int64), torch.empty(5, 2, device="meta")
        for layout, per_row in (("rank", (7, 2)), ("expert", (7,))):
            out = epcomm.torch.dispatch(comm, x, ids, weights, layout=layout, capacity=7)
            assert out.x.shape == (7, 16) and out.x.dtype == torch.bfloat16
            assert out.topk_idx.shape == out.topk_weights.shape == per_row and out.topk_idx.dtype == torch.int32
            assert out.num_tokens_per_expert.shape == (comm.num_local_experts,) and out.counts is None
            assert (out.expert_offsets is not None) == (layout == "expert")
            again = epcomm.torch.dispatch(comm, x[:, :3], handle=out.handle)
            z = epcomm.torch.combine(comm, out.x, out)
            assert again.x.shape == (7, 3) and z.shape == (5, 16) and z.device.type == "meta"
            z.sum().backward()
            assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
        with pytest.raises(epcomm.UnsupportedError, match="capacity="):
            epcomm.torch.dispatch(comm, x, ids, weights)
        with torch._subclasses.fake_tensor.FakeTensorMode():
            out = epcomm.torch.dispatch(comm, torch.empty(5, 16), torch.zeros(5, 2).long(), capacity=3)
            assert out.x.shape == (3, 16) and out.topk_weights is None
        assert comm.stats()["calls"] == before


def test_meta_and_fake_tensors(three):
    three.run(traced)


def operators(context):
    """torch's own examination of an operator: schema, fakes, registration of gradients."""
    import torch

    import epcomm.torch
    from epcomm.torch import _ops

    def examine(operator, call):
        names = ("test_schema", "test_autograd_registration", "test_faketensor")  # tracing: the tests above
        torch.library.opcheck(operator, call, test_utils=names)

    with epcomm.Communicator(**SHAPE) as comm:
        x = torch.randn(5, 16, requires_grad=True)
        ids = torch.tensor([[0, 1], [2, -1], [-1, -1], [3, 3], [1, 0]])
        weights = torch.rand(5, 2, requires_grad=True)
        anchor, number = torch.zeros((), requires_grad=True), _ops.register(comm)
        for layout in LAYOUTS:
            call = (x, ids, weights, anchor, number, layout, 1, 12, None, None)
            examine(torch.ops.epcomm.dispatch.default, call)
            ticket = epcomm.torch.dispatch(comm, x, ids, weights, layout=layout, capacity=12)
            y = torch.randn(12, 16, requires_grad=True)
            call = (y, ticket.topk_weights, None, ticket.handle._ticket, anchor, number, 5, layout == "expert", False)
            examine(torch.ops.epcomm.combine.default, call)
            call = (x, ticket.handle._ticket, anchor, number, 12, None, None)
            examine(torch.ops.epcomm.redispatch.default, call)


def test_operators_are_as_torch_wants_them(pools, backend):
    torch_ranks(pools, backend, 1).run(operators, timeout_s=120)


def inductor(context):
    """Generated code may reuse the memory of what a call gave; the heap's too."""
    import torch
    import torch._inductor.config

    import epcomm.torch

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # no pool of workers for two kernels
    with context.comm(**SHAPE) as comm:

        def layer(x, ids, weights):
            out = epcomm.torch.dispatch(comm, x, ids, weights, layout="expert", capacity=16)
            return epcomm.torch.combine(comm, torch.tanh(out.x) * 2, out) + x

        compiled = torch.compile(layer, fullgraph=True)
        ids = torch.tensor([[0, 1], [2, -1], [3, 3], [-1, -1]])
        answers = []
        for call in (layer, compiled, compiled, compiled):
            torch.manual_seed(0)
            x, weights = torch.randn(4, 16, requires_grad=True), torch.rand(4, 2, requires_grad=True)
            z = call(x, ids, weights)
            z.square().sum().backward()
            answers.append((z.detach(), x.grad, weights.grad))
        assert all(close(a, b) for answer in answers for a, b in zip(answer, answers[0], strict=True))


@pytest.mark.slow
def test_inductor(pools, backend):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    torch_ranks(pools, backend, 1).run(inductor, timeout_s=240)
