"""Types of two backends as one."""

from typing import Any

from epcomm import _backend

class Backend(_backend.Backend):
    far: _backend.Backend
    near: _backend.Backend
    def __init__(
        self, name: str, near: _backend.Backend, far: _backend.Backend, options: dict[str, Any] | None = None
    ) -> None: ...
    def plan(self) -> list[dict[str, Any]]: ...
