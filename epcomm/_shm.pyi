"""Types of the backend ``shm``."""

from typing import Any

from epcomm import _backend

def probe() -> None: ...

class Backend(_backend.Backend):
    def __init__(self, options: dict[str, Any] | None = None) -> None: ...
