"""Types of the timed loops over a transport."""

from typing import Any

import numpy as np

def round_trips(
    backend: object, flow: dict[str, Any], first: bool, base: int, count: int, timeout_s: float = 60.0
) -> np.ndarray: ...
def completions(
    backend: object, flow: dict[str, Any], signal: bool, count: int, timeout_s: float = 60.0
) -> np.ndarray: ...
def stream(
    backend: object, flows: list[dict[str, Any]], signal: bool, count: int, timeout_s: float = 60.0
) -> float: ...
