from collections.abc import Callable, Sequence
from typing import Any

from epcomm._arrays import Array

OPS: dict[str, int]
KERNELS: tuple[str, ...]
DEFAULT_SMS: int

class Routing:
    @property
    def generation(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def output_rows(self) -> int: ...
    @property
    def recv_rows(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...
    @property
    def num_picks(self) -> int: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def picks_per_expert(self) -> list[int]: ...

class SmallResults:
    def __init__(self, like: Array, rows: int, num_topk: int, num_local_experts: int, has_weights: bool) -> None: ...
    def field(self, name: str) -> Any: ...

class Lease:
    @property
    def ptr(self) -> int: ...
    def record_stream(self, stream: int, keep: Any = None) -> None: ...

class Call:
    @property
    def routing(self) -> Routing: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    @property
    def bad_pick(self) -> str: ...
    def lease(self) -> tuple[Lease, int, int] | None: ...

class Pending:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def join_stream(self) -> None: ...

class DeviceEngine:
    def __init__(
        self,
        backend: Any,
        rank: int,
        device: int,
        shape: dict[str, int],
        expert_rank: Sequence[int],
        num_sms: int | None,
        timeout_s: float,
        dtype_names: Sequence[str],
        functions: dict[str, int],
    ) -> None: ...
    def order_after(self, stream: int) -> None: ...
    def refuse(self, op: str, code: int, text: str, stream: int = 0) -> None: ...
    def barrier(self, stream: int = 0) -> None: ...
    def dispatch_begin(
        self,
        x: Any,
        topk_idx: Any,
        weights: Any,
        scales: Any,
        routing: Routing | None,
        dtype: int,
        scale_dtype: int,
        quantize: int,
        row_type: int,
        layout: int,
        alignment: int,
        capacity: int,
        want_lease: int,
        max_threads: int,
        stream: int,
        stream_object: Any = None,
        small: SmallResults | None = None,
        async_op: bool = False,
    ) -> Call: ...
    def dispatch_finish(
        self,
        call: Call,
        x: int = 0,
        scales: int = 0,
        small: SmallResults | None = None,
        keep: Any = None,
        max_threads: int = 0,
        async_op: bool = False,
        current: Callable[[], tuple[int, Any]] | None = None,
    ) -> Pending | None: ...
    def combine(
        self,
        x: Any,
        routing: Routing,
        dtype: int,
        row_type: int,
        apply_weights: bool,
        exact_order: bool,
        carried: Any,
        bias: int,
        bias_stride: int,
        out: int,
        out_stride: int,
        carried_out: int,
        keep: Any = None,
        max_threads: int = 0,
        async_op: bool = False,
        stream: int = 0,
        stream_object: Any = None,
        current: Callable[[], tuple[int, Any]] | None = None,
    ) -> Pending | None: ...
    def take_lease(self, size_bytes: int, stream: int = 0, stream_object: Any = None) -> Lease | None: ...
    def leases_held(self) -> int: ...
    def start_async(self) -> None: ...
    def give_up(self, text: str) -> None: ...
    def close(self) -> None: ...
    def look_at_peers(self) -> None: ...
    def abort(self, text: str) -> None: ...
    def raise_if_broken(self) -> None: ...
    @property
    def is_broken(self) -> bool: ...
    def stats(self) -> dict[str, int]: ...
