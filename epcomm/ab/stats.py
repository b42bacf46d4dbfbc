"""What two series of measurements allow to say."""

from typing import Any, NamedTuple

import numpy as np

MIN_REPEATS = 20  # fewer give numbers but no verdict
CONFIDENCE = 0.95
BLOCK = 2  # repeats that share what is made anew between blocks: processes, memory, places of threads
_RESAMPLES = 4000


class Comparison(NamedTuple):
    """Two series side by side. Intervals are ``(low, high)`` at :data:`CONFIDENCE`."""

    a: float
    a_interval: tuple[float, float]
    b: float
    b_interval: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float]
    verdict: str | None


def compare(a: Any, b: Any, *, lower_is_better: bool, seed: int = 0) -> Comparison:
    """Medians, their percentile-bootstrap intervals, and a verdict.

    Repeat ``i`` measured A and B one right after the other, so repeats are resampled as pairs: what slowed both down
    does not count as a difference. Repeats of one block (:data:`BLOCK`) had the same luck, so whole blocks are
    resampled: luck must repeat itself before it counts as one.

    Parameters
    ----------
    a, b : array_like of float, shape [repeats]
        Values of the same repeats; finite and more than 0.
    lower_is_better : bool
        Times, not rates.
    seed : int
        Of the resampling.

    Returns
    -------
    Comparison
        ``ratio`` is how many times as good B is as A: A's median over B's for times, the inverse for rates.
        ``verdict`` is ``"A faster"``, ``"B faster"`` or ``"no difference"`` (the ratio's interval has 1 in it), and
        ``None`` with fewer than :data:`MIN_REPEATS` repeats.
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        raise ValueError(f"a and b have shapes {first.shape} and {second.shape}; expected one equal, not empty length")
    if not (np.isfinite(first).all() and np.isfinite(second).all() and (first > 0).all() and (second > 0).all()):
        raise ValueError("a and b must be finite and more than 0")
    starts = np.arange(0, len(first), BLOCK)
    chosen = np.random.default_rng(seed).choice(starts, (_RESAMPLES, len(starts)))
    # The last block may be short; its missing places repeat its last repeat.
    picks = np.minimum(chosen[:, :, None] + np.arange(BLOCK), len(first) - 1).reshape(_RESAMPLES, -1)
    of_a, of_b = np.median(first[picks], axis=1), np.median(second[picks], axis=1)
    median_a, median_b = float(np.median(first)), float(np.median(second))
    ratios, ratio = (of_a / of_b, median_a / median_b) if lower_is_better else (of_b / of_a, median_b / median_a)
    low, high = _interval(ratios)
    verdict = None
    if len(first) >= MIN_REPEATS:
        verdict = "A faster" if high < 1 else "B faster" if low > 1 else "no difference"
    return Comparison(median_a, _interval(of_a), median_b, _interval(of_b), ratio, (low, high), verdict)


def _interval(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
