"""Types of the host engine's face."""

from typing import Any

from epcomm._arrays import Array

OPS: dict[str, int]
LAYOUTS: dict[str, int]
ROW_TYPES: dict[str, int]

def heap_bytes(shape: dict[str, int]) -> dict[str, int]: ...
def isa(name: str | None = None) -> str | None: ...

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

class Lease:
    @property
    def ptr(self) -> int: ...

class Call:
    @property
    def routing(self) -> Routing: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    @property
    def bad_pick(self) -> bool: ...
    def lease(self) -> tuple[Lease, int, int] | None: ...

class Pending:
    def done(self) -> bool: ...
    def join(self) -> None: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...

class HostEngine:
    backend: Any
    def __init__(
        self,
        backend: Any,
        rank: int,
        shape: dict[str, int],
        expert_rank: list[int],
        num_threads: int,
        timeout_s: float,
        dtype_names: tuple[str, ...],
        isa: str | None = None,
        push_only: bool = False,
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def is_broken(self) -> bool: ...
    def refuse(self, op: str, code: int, text: str) -> None: ...
    def barrier(self) -> None: ...
    def dispatch_begin(
        self,
        x: Array,
        topk_idx: Array | None,
        weights: Array | None,
        scales: Array | None,
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
    ) -> Call: ...
    def dispatch_finish(
        self,
        call: Call,
        x: int = 0,
        scales: int = 0,
        ids: int = 0,
        weights: int = 0,
        counts: int = 0,
        offsets: int = 0,
        keep: Any = None,
        max_threads: int = 0,
        async_op: bool = False,
    ) -> Pending | None: ...
    def combine(
        self,
        x: Array,
        routing: Routing,
        dtype: int,
        row_type: int,
        apply_weights: bool,
        exact_order: bool,
        carried: Array | None,
        bias: int,
        bias_stride: int,
        out: int,
        out_stride: int,
        carried_out: int,
        keep: Any = None,
        max_threads: int = 0,
        async_op: bool = False,
    ) -> Pending | None: ...
    def take_lease(self, size_bytes: int) -> Lease | None: ...
    def leases_held(self) -> int: ...
    def abort(self, text: str) -> None: ...
    def start_async(self) -> None: ...
    def give_up(self, text: str) -> None: ...
    def close(self) -> None: ...
    def look_at_peers(self) -> None: ...
    def raise_if_broken(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
