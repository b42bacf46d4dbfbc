"""How long a wait may still take, and the one text that every expired wait uses."""

import time
from collections.abc import Iterable, Sequence

from epcomm.errors import CommTimeoutError

TICK_S = 0.05  # longest sleep inside a wait, so that Ctrl-C and close() from another thread are seen


class Deadline:
    """A point in time; its clock starts when it is made.

    Parameters
    ----------
    timeout_s : float
        Seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self._start = time.monotonic()
        self._end = self._start + timeout_s
        self.limit = f"timeout_s={timeout_s:g}"

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end

    def tick(self) -> float:
        """How long the next sleep may be."""
        return min(TICK_S, self.remaining())

    def shorten(self, remaining_s: float, limit: str) -> None:
        """End no later than ``remaining_s`` from now: a peer that waits with us gives up then."""
        end = time.monotonic() + remaining_s
        if end < self._end:
            self._end, self.limit = end, limit

    def sub(self, timeout_s: float) -> "Deadline":
        """A new deadline at most ``timeout_s`` from now and never behind this one."""
        return Deadline(min(timeout_s, self.remaining()))


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1, 2, 5``; a long list is cut."""
    ordered = sorted(ranks)
    text = ", ".join(map(str, ordered[:16])) + (f", ... ({len(ordered)} in all)" if len(ordered) > 16 else "")
    return f"rank{'s' if len(ordered) != 1 else ''} {text}"


def timed_out(what: str, deadline: Deadline, missing: Sequence[int], num_ranks: int, why: str = "") -> CommTimeoutError:
    """The error of a wait that passed its deadline.

    Parameters
    ----------
    what : str
        Operation and phase.
    missing : sequence of int
        Ranks that did not come; empty if this cannot be known.
    why : str
        More, such as refused connections.
    """
    verb = "is" if len(missing) == 1 else "are"
    who = f"{rank_list(missing)} of {num_ranks} {verb} missing" if missing else f"not all of {num_ranks} ranks came"
    error = CommTimeoutError(
        f"{what}: {who} after {deadline.elapsed():.1f} s, the limit is {deadline.limit} "
        f"(argument timeout_s or EPCOMM_TIMEOUT_S){'; ' + why if why else ''}"
    )
    error.peer = min(missing) if missing else None
    return error
