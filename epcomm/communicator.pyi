"""Types of the public interface."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

from epcomm._results import Combined, Dispatched
from epcomm.ops import Layout

class Handle:
    def __init__(
        self, communicator: Communicator, routing: Any, layout: str, expert_alignment: int, capacity: int | None
    ) -> None: ...
    @property
    def layout(self) -> Literal["rank", "expert"]: ...
    @property
    def expert_alignment(self) -> int: ...
    @property
    def capacity(self) -> int | None: ...
    @property
    def generation(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def record_stream(self, stream: Any) -> None: ...

class Communicator:
    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        num_topk: int,
        hidden: int,
        max_tokens_per_rank: int,
        max_recv_tokens: int | None = None,
        low_latency_max_tokens: int = 0,
        num_slots: int = 2,
        dtype: Any = "bfloat16",
        backend: str | None = None,
        device: str | int | None = None,
        expert_to_rank: Sequence[int] | None = None,
        num_sms: int | None = None,
        num_channels: int | None = None,
        timeout_s: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def caps(self) -> frozenset[str]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_topk(self) -> int: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @staticmethod
    def required_bytes(
        group: Any = None,
        *,
        num_ranks: int,
        num_experts: int,
        num_topk: int,
        hidden: int,
        max_tokens_per_rank: int,
        max_recv_tokens: int | None = None,
        low_latency_max_tokens: int = 0,
        num_slots: int = 2,
        dtype: Any = "bfloat16",
        backend: str | None = None,
        device: str | int | None = None,
        expert_to_rank: Sequence[int] | None = None,
        num_sms: int | None = None,
        num_channels: int | None = None,
        timeout_s: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> dict[str, int]: ...
    def layout(self, topk_idx: Any) -> Layout: ...
    def plan(self) -> list[dict[str, Any]]: ...
    def stats(self) -> dict[str, int]: ...
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        handle: Handle | None = None,
        scales: Any = None,
        quantize: Literal["fp8"] | None = None,
        layout: Literal["rank", "expert"] = "rank",
        expert_alignment: int = 1,
        capacity: int | None = None,
        copy: bool | None = None,
        num_sms: int | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Dispatched: ...
    def combine(
        self,
        x: Any,
        handle: Handle,
        *,
        apply_weights: bool | None = None,
        topk_weights: Any = None,
        exact_order: bool = False,
        bias: Any = None,
        out: Any = None,
        num_sms: int | None = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Combined: ...
    def combine_buffer(self, handle: Handle, dtype: Any = None) -> Any: ...
    def barrier(self) -> None: ...
    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: Literal["rank", "expert"] = "expert",
        quantize: Literal["fp8"] | None = "fp8",
        round_scale: bool = False,
        ue8m0: bool = False,
        num_sms: int | None = None,
        stream: Any = None,
        async_op: bool = False,
        return_recv_hook: bool = False,
    ) -> Dispatched: ...
    def low_latency_combine(
        self,
        x: Any,
        handle: Handle,
        *,
        topk_weights: Any = None,
        exact_order: bool = False,
        out: Any = None,
        num_sms: int | None = None,
        stream: Any = None,
        async_op: bool = False,
        return_recv_hook: bool = False,
    ) -> Combined: ...
    def check(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def __del__(self) -> None: ...
