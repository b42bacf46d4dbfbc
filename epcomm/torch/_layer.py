"""A Mixture-of-Experts layer whose experts are spread over the ranks of a communicator."""

import contextlib
import copy
from collections.abc import Callable
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epcomm.torch
from epcomm._results import Dispatched
from epcomm.errors import EpcommError, InvalidArgumentError
from epcomm.torch import _ops


def _at_least_1(name: str, value: Any) -> int:
    try:
        number = index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise InvalidArgumentError(f"ExpertParallel: {name} is {value!r}; allowed: an integer of at least 1")
    return number


def _run(comm: Any, part: str, call: str, function: Callable[..., Any], *args: Any) -> Any:
    """What `function` gives. Where it raises, the peers, who go on into `call`, are told why."""
    if torch.compiler.is_compiling():
        return function(*args)
    try:
        return function(*args)
    except Exception as error:
        with contextlib.suppress(EpcommError):
            _ops.refuse(comm, call, f"{part} raised {type(error).__name__}: {error}")
        raise


class Experts(nn.Module):
    """This rank's experts: each two matrices around an activation. Takes what a dispatch gave, in either layout.

    In expert layout it gives one row per pick, in rank layout the weighted sum of a row's picks.
    """

    def __init__(self, num_local_experts: int, hidden: int, inner: int,
                 activation: Callable[[Tensor], Tensor] = F.relu) -> None:  # fmt: skip
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_local_experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(num_local_experts, inner, hidden))
        self.activation = activation
        for matrices in (self.up, self.down):
            nn.init.normal_(matrices, std=matrices.shape[1] ** -0.5 if num_local_experts else 1)

    def one(self, expert: int, x: Tensor) -> Tensor:
        """One expert on its rows."""
        return self.activation(x @ self.up[expert]) @ self.down[expert]

    def forward(self, out: Dispatched) -> Tensor:
        local = range(len(self.up))
        if out.expert_offsets is not None and not torch.compiler.is_compiling():
            bounds = out.expert_offsets.tolist()
            parts = [self.one(expert, out.x[bounds[expert] : bounds[expert + 1]]) for expert in local]
            return torch.cat([*parts, torch.zeros_like(out.x[bounds[-1] :])])  # capacity: where nothing arrived
        y = torch.zeros_like(out.x)
        for expert in local:
            picked = out.topk_idx == expert
            weights = picked[:, None]
            if out.expert_offsets is None:  # rank layout
                weights = out.topk_weights.where(picked, 0).sum(1, keepdim=True)
                picked = picked.any(1)
            if torch.compiler.is_compiling():  # how many rows are picked is not known: each expert sees them all
                y = y + weights * self.one(expert, out.x)
            else:
                y[picked] += weights[picked] * self.one(expert, out.x[picked])
        return y


class ExpertParallel(nn.Module):
    """Gate, dispatch, experts, combine. Collective: all ranks must call it, and run backward through it.

    Parameters
    ----------
    comm : epcomm.Communicator
        Says how many experts there are, which are here and how many a token picks. The caller closes it.
    hidden : int
        Channels of a token.
    inner : int
        Channels inside the default :class:`Experts`.
    experts : nn.Module, optional
        Called with the :class:`~epcomm.Dispatched` of each forward; gives rows for ``combine``.
    layout, capacity, quantize
        As for :func:`epcomm.torch.dispatch`.

    Notes
    -----
    The gate is the same on all ranks and sees this rank's tokens only: start it from the same values and sum its
    gradients over the ranks (``torch.distributed.all_reduce``). Experts need neither: tokens of all ranks came to them.
    Keep experts out of DistributedDataParallel, which would take them for copies of each other.
    """

    def __init__(self, comm: Any, hidden: int, inner: int = 0, *, experts: nn.Module | None = None,
                 layout: str = "expert", capacity: int | None = None, quantize: str | None = None) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(comm, epcomm.Communicator):
            raise InvalidArgumentError(f"ExpertParallel: comm is of type {type(comm).__name__}; allowed: Communicator")
        hidden = _at_least_1("hidden", hidden)
        if experts is None:
            inner = _at_least_1("inner", inner)
        self.comm = comm
        self.num_topk = comm.num_topk
        self.options: dict[str, Any] = {"layout": layout, "capacity": capacity, "quantize": quantize}
        self.gate = nn.Linear(hidden, comm.num_experts, bias=False)
        self.experts = Experts(comm.num_local_experts, hidden, inner) if experts is None else experts

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertParallel":
        memo[id(self.comm)] = self.comm  # copies share it
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token and their weights, which sum to 1: ``[num_tokens, num_topk]`` each."""
        weights, ids = self.gate(x).float().softmax(-1).topk(self.num_topk)
        return ids, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape and dtype."""
        width = self.gate.in_features
        if not isinstance(x, Tensor) or x.ndim < 1 or x.shape[-1] != width:
            given = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"
            _ops.refuse(self.comm, "dispatch", f"x {given}; allowed: a Tensor [..., {width}], as hidden says")
        tokens = x.reshape(-1, width)
        ids, weights = _run(self.comm, "the gate", "dispatch", self.route, tokens)
        out = epcomm.torch.dispatch(self.comm, tokens, ids, weights, **self.options)
        y = _run(self.comm, "an expert", "combine", self.experts, out)
        if isinstance(y, Tensor):
            y = y.to(out.x.dtype)  # on all ranks one dtype, whatever autocast or an idle rank made
        return epcomm.torch.combine(self.comm, y, out).reshape(x.shape)
