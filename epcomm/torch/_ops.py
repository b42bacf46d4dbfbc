"""The calls of a communicator as operators of torch: kernels, shapes for tracing, and gradients.

An operator takes tensors and plain values only, so the communicator is its number and a handle is a *ticket*: an int64
tensor whose storage keeps the handle alive, wherever torch or a compiler carries it. The *anchor* is a scalar that
says nothing; as an input and output of every call it ties them into one chain (see ``README.md``).
"""

import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from epcomm import ops
from epcomm.errors import CommTimeoutError, EpcommError, InvalidArgumentError, PeerLostError, UnsupportedError

_CHUNK_ROWS = 512  # of float32 copies: stays in the caches, and small beside the rows themselves
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_BACKWARD = (
    "; this is a call of backward, which is collective: each rank must run backward through the layer, in the same "
    "order, so on each rank the loss must depend on the layer's output (loss + z[:0].sum() does)"
)
_FORWARD = "; either the ranks call different things, or one of them did not run backward through an earlier layer"

_numbers = itertools.count(1)  # of tickets
_communicators: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_tickets: "weakref.WeakValueDictionary[int, _Ticket]" = weakref.WeakValueDictionary()


class _Ticket(bytearray):
    """The memory of a ticket tensor. It lives as long as the tensor's storage, and the handle with it."""

    handle: Any
    counts: list[int] | None
    num_written: int  # rows from here on were not written (capacity mode)
    topk_idx: Tensor | None  # of the received rows, expert layout
    topk_weights: Tensor | None


def register(comm: Any) -> int:
    """The number that stands for a communicator."""
    _communicators[comm._serial] = comm
    return comm._serial


def communicator(number: int) -> Any:
    try:
        return _communicators[number]
    except KeyError:
        raise InvalidArgumentError(f"communicator {number} is gone; keep it until backward has run") from None


def ticket_of(tensor: Tensor) -> _Ticket:
    try:
        return _tickets[int(tensor)]
    except KeyError:
        raise InvalidArgumentError("the handle of this dispatch is gone; keep its result until combine") from None


def _new_ticket(handle: Any) -> tuple[_Ticket, Tensor]:
    number = next(_numbers)
    ticket = _Ticket(number.to_bytes(8, sys.byteorder))
    ticket.handle = handle
    _tickets[number] = ticket
    return ticket, torch.frombuffer(ticket, dtype=torch.int64)


@contextmanager
def _explained(hint: str) -> Iterator[None]:
    """Tell what a disagreement, or a peer that does not come, is likely to mean here."""
    try:
        yield
    except (CommTimeoutError, PeerLostError, InvalidArgumentError) as error:
        text = str(error)
        differs = isinstance(error, InvalidArgumentError)
        if (hint is _BACKWARD and not differs) or ("differs between ranks" in text and hint not in text):
            error.args = (text + hint,)
        raise


def _base(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that is no view in autograd's eyes, so that it may be written in place."""
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return own.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _num_written(out: Any, layout: str) -> int:
    """Rows that the dispatch wrote; with capacity the rest of ``x`` is whatever was there before."""
    if layout == "rank":
        return int(out.num_tokens)
    delivered = (out.topk_idx >= 0).nonzero()
    return int(delivered[-1]) + 1 if len(delivered) else 0


def _rest_is_zero(x: Tensor, ticket: _Ticket) -> Tensor:
    """Zeros where nothing arrived: an expert's weights would get the gradient 0 * NaN from such a row."""
    if ticket.num_written < len(x):
        x[ticket.num_written :].zero_()
    return x


def _none() -> Tensor:
    return torch.empty(0)


def _end() -> Tensor:
    """A new end of the chain of anchors."""
    return torch.zeros(())


# dispatch -------------------------------------------------------------------------------------------------------------

_DISPATCH = (
    "(Tensor x, Tensor topk_idx, Tensor? topk_weights, Tensor anchor, int comm, str layout, SymInt expert_alignment, "
    "SymInt? capacity, str? quantize, bool? copy) -> (Tensor x, Tensor topk_idx, Tensor topk_weights, "
    "Tensor num_tokens_per_expert, Tensor expert_offsets, Tensor num_tokens, Tensor overflow, Tensor ticket, "
    "Tensor anchor)"
)


@torch.library.custom_op("epcomm::dispatch", mutates_args=(), schema=_DISPATCH)
def dispatch(x, topk_idx, topk_weights, anchor, comm, layout, expert_alignment, capacity, quantize, copy):
    with _explained(_FORWARD):
        out = communicator(comm).dispatch(
            x.detach(), topk_idx, None if topk_weights is None else topk_weights.detach(), quantize=quantize,
            layout=layout, expert_alignment=expert_alignment, capacity=capacity, copy=copy)  # fmt: skip
    if x.dtype not in _FLOATS:  # after the call: all ranks are here with this dtype
        raise InvalidArgumentError(
            f"dispatch: x has dtype {x.dtype}; allowed in epcomm.torch: {', '.join(map(str, _FLOATS))}"
        )
    ticket, tensor = _new_ticket(out.handle)
    ticket.counts = out.counts
    ticket.num_written = len(out.x) if capacity is None else _num_written(out, layout)
    ticket.topk_idx = ticket.topk_weights = None
    if layout == "expert" and out.topk_weights is not None:  # copies: the caller may write to its own
        ticket.topk_idx, ticket.topk_weights = out.topk_idx.clone(), out.topk_weights.clone()
    rows = out.x
    if quantize is not None:
        rows = ops.dequantize(rows, out.scales, dtype=str(x.dtype).removeprefix("torch."))
    return (
        _rest_is_zero(_base(rows), ticket),
        out.topk_idx,
        _none() if out.topk_weights is None else out.topk_weights,
        out.num_tokens_per_expert,
        _none().int() if out.expert_offsets is None else out.expert_offsets,
        out.num_tokens,
        out.overflow,
        tensor,
        _end(),
    )


@dispatch.register_fake
def _(x, topk_idx, topk_weights, anchor, comm, layout, expert_alignment, capacity, quantize, copy):
    rows = capacity
    if rows is None:
        try:
            rows = torch.library.get_ctx().new_dynamic_size()
        except (AssertionError, RuntimeError) as error:  # meta tensors: nobody can say
            raise UnsupportedError(
                "dispatch: the number of received rows depends on the data; on meta tensors pass capacity="
            ) from error
    per_row = (rows, topk_idx.shape[1]) if layout == "rank" else (rows,)
    experts = communicator(comm).num_local_experts
    return (
        x.new_empty(rows, x.shape[1]),
        topk_idx.new_empty(per_row, dtype=torch.int32),
        x.new_empty(per_row if topk_weights is not None else 0, dtype=torch.float32),
        topk_idx.new_empty(experts, dtype=torch.int32),
        topk_idx.new_empty(experts + 1 if layout == "expert" else 0, dtype=torch.int32),
        topk_idx.new_empty((), dtype=torch.int64),
        topk_idx.new_empty((), dtype=torch.int64),
        torch.empty(1, dtype=torch.int64, device="meta" if x.is_meta else "cpu"),
        _end(),
    )


def _dispatch_context(ctx, inputs, output):
    x, topk_idx, topk_weights, _, ctx.comm = inputs[:5]
    ctx.set_materialize_grads(False)
    ctx.num_tokens, ctx.num_topk = topk_idx.shape
    ctx.rows, ctx.columns = output[0].shape
    ctx.dtype, ctx.weights_dtype = x.dtype, None if topk_weights is None else topk_weights.dtype
    ctx.save_for_backward(output[7])


def _dispatch_gradient(ctx, x, topk_idx, topk_weights, counts, offsets, num_tokens, overflow, ticket, anchor):
    (ticket,) = ctx.saved_tensors
    x, topk_weights, anchor = torch.ops.epcomm.dispatch_backward(
        x, topk_weights, ticket, ctx.comm, ctx.rows, ctx.columns, ctx.num_tokens, ctx.num_topk, ctx.dtype,
        ctx.weights_dtype is not None)  # fmt: skip
    topk_weights = None if ctx.weights_dtype is None else topk_weights.to(ctx.weights_dtype)
    return x, None, topk_weights, anchor, None, None, None, None, None, None


dispatch.register_autograd(_dispatch_gradient, setup_context=_dispatch_context)


@torch.library.custom_op(
    "epcomm::dispatch_backward",
    mutates_args=(),
    schema="(Tensor? x, Tensor? topk_weights, Tensor ticket, int comm, SymInt rows, SymInt columns, "
    "SymInt num_tokens, SymInt num_topk, ScalarType dtype, bool with_weights) -> (Tensor, Tensor, Tensor)",
)
def dispatch_backward(x, topk_weights, ticket, comm, rows, columns, num_tokens, num_topk, dtype, with_weights):
    # Ranks whose rows led nowhere take part with zeros.
    handle = ticket_of(ticket).handle
    if x is None:
        x = torch.zeros(rows, columns, dtype=dtype, device=communicator(comm).device)
    if with_weights and topk_weights is None:
        topk_weights = torch.zeros((rows, num_topk) if handle.layout == "rank" else rows, device=x.device)
    with _explained(_BACKWARD):
        back = communicator(comm).combine(
            x.detach(), handle, apply_weights=False, topk_weights=topk_weights.detach() if with_weights else None
        )
    return back.x, back.topk_weights if with_weights else _none(), _end()


@dispatch_backward.register_fake
def _(x, topk_weights, ticket, comm, rows, columns, num_tokens, num_topk, dtype, with_weights):
    like = ticket if x is None else x
    weights = like.new_empty((num_tokens, num_topk) if with_weights else 0, dtype=torch.float32)
    return like.new_empty(num_tokens, columns, dtype=dtype), weights, _end()


# dispatch with the routing of an earlier one --------------------------------------------------------------------------


@torch.library.custom_op(
    "epcomm::redispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor ticket, Tensor anchor, int comm, SymInt rows, str? quantize, bool? copy) "
    "-> (Tensor x, Tensor anchor)",
)
def redispatch(x, ticket, anchor, comm, rows, quantize, copy):
    known = ticket_of(ticket)
    with _explained(_FORWARD):
        out = communicator(comm).dispatch(x.detach(), handle=known.handle, quantize=quantize, copy=copy)
    if x.dtype not in _FLOATS:
        raise InvalidArgumentError(
            f"dispatch: x has dtype {x.dtype}; allowed in epcomm.torch: {', '.join(map(str, _FLOATS))}"
        )
    received = out.x
    if quantize is not None:
        received = ops.dequantize(received, out.scales, dtype=str(x.dtype).removeprefix("torch."))
    return _rest_is_zero(_base(received), known), _end()


@redispatch.register_fake
def _(x, ticket, anchor, comm, rows, quantize, copy):
    return x.new_empty(rows, x.shape[1]), _end()


def _redispatch_context(ctx, inputs, output):
    x, ticket, _, ctx.comm, ctx.rows = inputs[:5]
    ctx.set_materialize_grads(False)
    ctx.num_tokens, ctx.columns = x.shape
    ctx.dtype = x.dtype
    ctx.save_for_backward(ticket)


def _redispatch_gradient(ctx, x, anchor):
    (ticket,) = ctx.saved_tensors
    x, _, anchor = torch.ops.epcomm.dispatch_backward(
        x, None, ticket, ctx.comm, ctx.rows, ctx.columns, ctx.num_tokens, 0, ctx.dtype, False)  # fmt: skip
    return x, None, anchor, None, None, None, None


redispatch.register_autograd(_redispatch_gradient, setup_context=_redispatch_context)


# combine --------------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "epcomm::combine",
    mutates_args=(),
    schema="(Tensor x, Tensor? topk_weights, Tensor? bias, Tensor ticket, Tensor anchor, int comm, SymInt num_tokens, "
    "bool apply_weights, bool exact_order) -> (Tensor x, Tensor anchor)",
)
def combine(x, topk_weights, bias, ticket, anchor, comm, num_tokens, apply_weights, exact_order):
    # topk_weights are those that the dispatch delivered; the handle has them. Here they only carry the gradient.
    with _explained(_FORWARD):
        out = communicator(comm).combine(
            x.detach(), ticket_of(ticket).handle, apply_weights=apply_weights, exact_order=exact_order,
            bias=None if bias is None else bias.detach())  # fmt: skip
    return out.x, _end()


@combine.register_fake
def _(x, topk_weights, bias, ticket, anchor, comm, num_tokens, apply_weights, exact_order):
    return x.new_empty(num_tokens, x.shape[1]), _end()


def _combine_context(ctx, inputs, output):
    x, topk_weights, bias, ticket, _, ctx.comm, ctx.num_tokens, ctx.apply_weights, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.rows, ctx.columns = x.shape
    ctx.dtype = x.dtype
    ctx.with_weights = topk_weights is not None
    ctx.bias_like = None if bias is None else (bias.dtype, bias.ndim)
    # The same on all ranks, whoever needs which gradient: recomputation (checkpointing) then stops at the same place.
    ctx.save_for_backward(*((ticket, x) if ctx.apply_weights else (ticket,)))


def _combine_gradient(ctx, grad, anchor):
    ticket, *y = ctx.saved_tensors
    x, topk_weights, anchor = torch.ops.epcomm.combine_backward(
        grad, *(y or [None]), ticket, ctx.comm, ctx.rows, ctx.columns, ctx.num_tokens, ctx.dtype)  # fmt: skip
    topk_weights = topk_weights if ctx.with_weights and ctx.apply_weights else None
    bias = None
    if ctx.bias_like is not None and grad is not None:
        dtype, ndim = ctx.bias_like
        bias = (grad.float().sum(0) if ndim == 1 else grad).to(dtype)
    return x, topk_weights, bias, None, anchor, None, None, None, None


combine.register_autograd(_combine_gradient, setup_context=_combine_context)


@torch.library.custom_op(
    "epcomm::combine_backward",
    mutates_args=(),
    schema="(Tensor? grad, Tensor? y, Tensor ticket, int comm, SymInt rows, SymInt columns, SymInt num_tokens, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
def combine_backward(grad, y, ticket, comm, rows, columns, num_tokens, dtype):
    if grad is None:
        grad = torch.zeros(num_tokens, columns, dtype=dtype, device=communicator(comm).device)
    known = ticket_of(ticket)
    with _explained(_BACKWARD):
        x = _base(communicator(comm).dispatch(grad.detach(), handle=known.handle).x)
    _rest_is_zero(x, known)
    if y is None:
        return x, _none(), _end()
    # z[t] is the sum of w * y over the picks of t, so each pick has w * grad[t] for y and <grad[t], y> for w.
    topk_weights = torch.empty_like(known.topk_weights)
    for start in range(0, rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        wide = x[part].float()
        topk_weights[part] = torch.linalg.vecdot(wide, y[part].float())
        x[part] = wide.mul_(known.topk_weights[part, None])
    return x, topk_weights.where(known.topk_idx >= 0, 0), _end()  # padding of y may hold anything


@combine_backward.register_fake
def _(grad, y, ticket, comm, rows, columns, num_tokens, dtype):
    like = ticket if grad is None else grad
    weights = like.new_empty(0 if y is None else rows, dtype=torch.float32)
    return like.new_empty(rows, columns, dtype=dtype), weights, _end()


def refuse(comm: Any, call: str, text: str) -> None:
    """Take part in a call only to refuse it: all ranks raise."""

    def raise_it() -> None:
        raise InvalidArgumentError(f"{call}: {text}")

    with comm._call(call):
        comm._accept(call, raise_it)
    raise EpcommError(f"{call}: {text}")  # not reached
