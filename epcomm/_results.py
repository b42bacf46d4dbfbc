"""What calls return: objects with attributes; a field that does not apply is ``None``."""

from dataclasses import dataclass
from typing import Any


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return repr(value)
    return f"<{type(value).__name__} {tuple(shape)} {getattr(value, 'dtype', '')}>".replace(" >", ">")


class Later:
    """Stands for a field that `source.field(name)` makes when it is first read: most readers need few of them."""

    __slots__ = ("source",)

    def __init__(self, source: Any) -> None:
        self.source = source


class _Field:
    """A field that may hold a :class:`Later`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, result: Any, owner: type | None = None) -> Any:
        if result is None:
            return None  # the default
        value = result.__dict__[self._name]
        if type(value) is Later:
            value = result.__dict__[self._name] = value.source.field(self._name)
        return value

    def __set__(self, result: Any, value: Any) -> None:
        result.__dict__[self._name] = value


class _Shown:
    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in vars(self))
        fields = ", ".join(f"{name}={_describe(value)}" for name, value in values if value is not None)
        return f"{type(self).__name__}({fields})"


@dataclass(repr=False, eq=False)
class Dispatched(_Shown):
    """Result of a dispatch. Arrays are of the kind of ``x`` and on its device.

    Attributes
    ----------
    x : array [rows, hidden]
        Received rows, sorted by (source rank, source token); in expert layout grouped by local expert and inside
        an expert by (source rank, token, k), each group padded with zero rows. A view of the heap (a *lease*, held
        until the last array over it dies) or memory of the caller's framework.
    scales : array [rows, S] or None
        Scales that came with the rows: float32 with ``quantize``, else the dtype given as ``scales=``.
    topk_idx : int32 array
        Rank layout ``[rows, num_topk]``: local expert of each pick, -1 elsewhere. Expert layout ``[rows]``: the
        row's local expert, -1 in padding.
    topk_weights : float32 array or None
        Weights in the shape of ``topk_idx``, 0 where it is -1; None if none were given.
    num_tokens_per_expert : int32 array [E_local]
        Delivered picks of each local expert, without padding.
    expert_offsets : int32 array [E_local + 1] or None
        Expert layout: where each padded group starts.
    counts : list of int or None
        ``num_tokens_per_expert`` on the host; None in capacity mode.
    num_tokens : int64 scalar array
        Delivered rows, without padding.
    overflow : int64 scalar array
        Rows (expert layout: picks) that capacity mode did not deliver; else 0.
    handle : Handle
        The routing, for ``combine`` and for further dispatches.
    event : Event or None
        With ``async_op``: its completion.
    hook : callable or None
        With ``return_recv_hook``: the receive half.
    """

    x: Any
    scales: Any = None
    topk_idx: Any = _Field()
    topk_weights: Any = _Field()
    num_tokens_per_expert: Any = _Field()
    expert_offsets: Any = None
    counts: Any = _Field()
    num_tokens: Any = _Field()
    overflow: Any = _Field()
    handle: Any = None
    event: Any = None
    hook: Any = None


@dataclass(repr=False, eq=False)
class Combined(_Shown):
    """Result of a combine.

    Attributes
    ----------
    x : array [num_tokens, hidden]
        Sums of the expert outputs, in the caller's token order; memory of the caller's framework.
    topk_weights : float32 array [num_tokens, num_topk] or None
        The carried scalars, 0 where ``topk_idx`` was -1 or the pick was not delivered.
    event : Event or None
        With ``async_op``: its completion.
    hook : callable or None
        With ``return_recv_hook``: the receive half.
    """

    x: Any
    topk_weights: Any = None
    event: Any = None
    hook: Any = None


class Event:
    """Completion of a call made with ``async_op=True``.

    Results may be read after :meth:`wait` or :meth:`synchronize`; the inputs belong to the call until then.
    """

    def __init__(self, pending: Any, deferred: Any = None) -> None:
        self._pending = pending
        self._deferred = deferred

    def done(self) -> bool:
        """Whether the call has ended, well or badly. Does not block."""
        return self._pending.done()

    def wait(self) -> None:
        """Order the caller behind the call: on a GPU its current stream, on host memory like :meth:`synchronize`."""
        join = getattr(self._pending, "join_stream", None)
        if join is None:
            self.synchronize()
        else:
            join()

    def synchronize(self) -> None:
        """Block until the call has ended, at most its deadline per wait, and raise what it raised."""
        self._pending.wait()
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred()

    def __repr__(self) -> str:
        return f"Event(done={self.done()})"
