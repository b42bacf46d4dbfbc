"""Dispatch and combine that torch can differentiate, compile and trace, and a Mixture-of-Experts layer over them.

    out = epcomm.torch.dispatch(comm, x, topk_idx, topk_weights, layout="expert")
    y = my_experts(out.x, out.expert_offsets)
    z = epcomm.torch.combine(comm, y, out)

Gradients reach ``x``, ``topk_weights`` and ``y`` as in one process. Experts stay where they are: each rank gets the
gradients of its own experts from the tokens of all ranks.

Backward is collective
----------------------
The backward of a dispatch is a combine and the other way round, so each rank must run backward through the layer,
and through several layers in the same order. Within a layer this holds by itself: under grad mode results always
require grad, and the calls of one dispatch hang together, so a rank without tokens, without experts, or with inputs
that need no gradient takes part too. What a rank has to see to is that its loss depends on the layer's output;
``loss + z[:0].sum()`` makes it so and adds nothing. (``torch.autograd.grad`` and ``backward(inputs=...)`` run what
these inputs need: name inputs of the same layers on all ranks.) Where ranks differ all the same, all raise a typed
error at their next call.

Results that are saved for backward hold their slots of the communicator. When none is free, further results are
copies; nothing waits. ``copy=True`` never holds one.

``torch.compile`` sees shapes where ``capacity=`` is given; without it a graph breaks at the dispatch.

Gradients are first derivatives only: torch refuses to run backward through a backward.
"""

from typing import Any

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError(f"epcomm.torch needs torch 2.4 or newer, as by `pip install epcomm[torch]`: {error}") from error

from epcomm._results import Dispatched
from epcomm.errors import InvalidArgumentError
from epcomm.torch import _ops

__all__ = ["ExpertParallel", "Experts", "Handle", "combine", "dispatch"]

# The start of a chain of anchors inside a compiled graph, which can not make a tensor that requires grad.
_anchor = torch.zeros((), requires_grad=True)


def _start() -> Tensor:
    """The start of a chain of anchors. It requires grad, and so does all that a call gives."""
    return _anchor if torch.compiler.is_compiling() else torch.zeros((), requires_grad=True)


class Handle:
    """Routing of one dispatch, for ``combine`` and for ``dispatch(comm, x, handle=...)``.

    Attributes
    ----------
    num_tokens : int
        Tokens of this rank, rows of a combine's result.
    num_rows : int
        Rows that ``combine`` expects on this rank.
    layout : str
    topk_weights : float32 tensor or None
        As delivered; the way back for the gradient of the gate.
    """

    def __init__(self, num_tokens: int, num_rows: int, layout: str, arrived: dict[str, Any], ticket: Tensor,
                 anchor: Tensor) -> None:  # fmt: skip
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        self.layout = layout
        self.topk_weights = arrived["topk_weights"]
        self._arrived = arrived  # what a dispatch with this handle has in common with the first
        self._ticket = ticket
        self._anchor = anchor

    @property
    def plain(self) -> Any:
        """The communicator's own handle, for its own calls."""
        return _ops.ticket_of(self._ticket).handle

    def _next(self, anchor: Tensor) -> None:
        # A call under no_grad has no backward and leaves the chain as it is.
        if anchor.requires_grad:
            self._anchor = anchor

    def __repr__(self) -> str:
        return f"Handle({self.layout} layout, {self.num_tokens} tokens, {self.num_rows} rows)"


@torch.compiler.assume_constant_result
def _number(comm: Any) -> int:
    return _ops.register(comm)


@torch.compiler.disable
def _counts(ticket: Tensor) -> list[int] | None:
    return _ops.ticket_of(ticket).counts


_OPTIONAL = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "x": (Tensor,),
    "topk_idx": (Tensor,),
    "topk_weights": (Tensor, _OPTIONAL),
    "handle": (Handle,),
    "quantize": (str, _OPTIONAL),
    "layout": (str,),
    "expert_alignment": (int, torch.SymInt),
    "capacity": (int, torch.SymInt, _OPTIONAL),
    "copy": (bool, _OPTIONAL),
    "apply_weights": (bool, _OPTIONAL),
    "exact_order": (bool,),
    "bias": (Tensor, _OPTIONAL),
}


def _flaw(named: dict[str, Any]) -> str | None:
    """What is wrong with the kinds of arguments; the rest is checked by the communicator, for all ranks."""
    for name, value in named.items():
        types = _TYPES[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            allowed = " or ".join("None" if cls is _OPTIONAL else cls.__name__ for cls in types)
            return f"{name} is of type {type(value).__name__}; allowed: {allowed}"
    # One meta tensor among others would make torch ask for shapes only, here and not at the peers.
    meta = {name: (value._ticket if isinstance(value, Handle) else value).is_meta
            for name, value in named.items() if isinstance(value, (Tensor, Handle))}  # fmt: skip
    if any(meta.values()) and not all(meta.values()):
        some = " and ".join(name for name, is_meta in meta.items() if is_meta)
        return f"{some} on device meta, the rest not; allowed: all or none"
    return None


def dispatch(comm: Any, x: Tensor, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None, *,
             handle: Handle | None = None, quantize: str | None = None, layout: str = "rank", expert_alignment: int = 1,
             capacity: int | None = None, copy: bool | None = None) -> Dispatched:  # fmt: skip
    """Send each token to the ranks that own its experts. Collective, and so is its backward.

    Parameters
    ----------
    comm : epcomm.Communicator
    x : float32, float16 or bfloat16 tensor [num_tokens, hidden]
    topk_idx : int32 or int64 tensor [num_tokens, num_topk]
        Exactly one of ``topk_idx`` and ``handle``.
    topk_weights : float tensor [num_tokens, num_topk], optional
        Arrive as float32. On all ranks or on none.
    handle : Handle, optional
        Repeat the routing of an earlier dispatch of this module.
    quantize : None or "fp8"
        Let rows travel as e4m3 codes with scales. They arrive in the dtype of ``x``; the gradient passes straight
        through, in that dtype.
    layout, expert_alignment, capacity, copy
        As for :meth:`epcomm.Communicator.dispatch`. With ``capacity``, rows in which nothing arrived are zero.

    Returns
    -------
    Dispatched
        As the communicator's; ``x`` and ``topk_weights`` have gradients, ``handle`` is a :class:`Handle`.

    Raises
    ------
    InvalidArgumentError, UnsupportedError, CommTimeoutError, PeerLostError
        As :meth:`epcomm.Communicator.dispatch`, in backward too.
    """
    if (topk_idx is None) == (handle is None):
        state = "neither" if handle is None else "both"
        _ops.refuse(comm, "dispatch", f"{state} of topk_idx and handle given; allowed: exactly one")
    named: dict[str, Any] = {"x": x, "quantize": quantize, "copy": copy}
    if handle is not None:
        flaw = _flaw({**named, "handle": handle})
        if flaw is None and topk_weights is not None:
            flaw = "topk_weights are given together with handle; allowed: the handle carries its own"
        if flaw is not None:
            _ops.refuse(comm, "dispatch", flaw)
        return _again(comm, x, handle, quantize, copy)
    named |= {"topk_idx": topk_idx, "topk_weights": topk_weights, "layout": layout,
              "expert_alignment": expert_alignment, "capacity": capacity}  # fmt: skip
    flaw = _flaw(named)
    if flaw is not None:
        _ops.refuse(comm, "dispatch", flaw)
    number = _number(comm)
    rows, ids, weights, counts, offsets, num_tokens, overflow, ticket, anchor = torch.ops.epcomm.dispatch(
        x, topk_idx, topk_weights, _start(), number, layout, expert_alignment, capacity, quantize, copy
    )
    arrived = {
        "topk_idx": ids,
        "topk_weights": weights if topk_weights is not None else None,
        "num_tokens_per_expert": counts,
        "expert_offsets": offsets if layout == "expert" else None,
        "counts": _counts(ticket) if capacity is None else None,
        "num_tokens": num_tokens,
        "overflow": overflow,
    }
    return Dispatched(
        x=rows, **arrived, handle=Handle(x.shape[0], rows.shape[0], layout, arrived, ticket, anchor)
    )


def _again(comm: Any, x: Tensor, handle: Handle, quantize: str | None, copy: bool | None) -> Dispatched:
    number = _number(comm)
    rows, anchor = torch.ops.epcomm.redispatch(
        x, handle._ticket, handle._anchor, number, handle.num_rows, quantize, copy
    )
    handle._next(anchor)
    return Dispatched(x=rows, **handle._arrived, handle=handle)


def combine(comm: Any, x: Tensor, handle: Handle | Dispatched, *, apply_weights: bool | None = None,
            exact_order: bool = False, bias: Tensor | None = None) -> Tensor:  # fmt: skip
    """Bring expert outputs back to their tokens' ranks and sum them. Collective, and so is its backward.

    Parameters
    ----------
    comm : epcomm.Communicator
    x : float32, float16 or bfloat16 tensor [num_rows, hidden]
        Expert outputs in the order of the dispatch's ``x``.
    handle : Handle or Dispatched
        Of :func:`dispatch`.
    apply_weights : bool, optional
        Multiply by the weights that were dispatched. Default: in expert layout, if there are any. Their gradient is
        the product of the output's gradient and ``x``, row by row.
    exact_order : bool
        As for :meth:`epcomm.Communicator.combine`.
    bias : tensor [hidden] or [num_tokens, hidden], optional
        Added to this rank's tokens; its gradient is of these tokens only.

    Returns
    -------
    tensor [num_tokens, hidden]

    Raises
    ------
    InvalidArgumentError, CommTimeoutError, PeerLostError
        As :meth:`epcomm.Communicator.combine`, in backward too.
    """
    route: Any = handle.handle if isinstance(handle, Dispatched) else handle
    flaw = _flaw({"x": x, "handle": route, "apply_weights": apply_weights, "exact_order": exact_order, "bias": bias})
    if flaw is not None:
        _ops.refuse(comm, "combine", f"{flaw}{', of epcomm.torch.dispatch' if flaw.startswith('handle') else ''}")
    if apply_weights is None:
        apply_weights = route.layout == "expert" and route.topk_weights is not None
    z, anchor = torch.ops.epcomm.combine(
        x, route.topk_weights, bias, route._ticket, route._anchor, _number(comm), route.num_tokens, apply_weights,
        exact_order)  # fmt: skip
    route._next(anchor)
    return z


from epcomm.torch._layer import ExpertParallel, Experts  # noqa: E402  (it uses the functions above)
