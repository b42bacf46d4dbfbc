"""Backend ``shm_ibrc``: ranks of a node share memory, ranks of other nodes are reached by RDMA from a proxy thread."""

from typing import Any

from epcomm import _ibrc, _pair, _shm


def probe() -> None:
    """Do nothing if both halves can run here.

    Raises
    ------
    BackendUnavailableError
        One cannot; the text is the reason.
    """
    _shm.probe()
    _ibrc.probe()


class Backend(_pair.Backend):
    """One rank's end of the pair; options as for ``shm`` and ``ibrc``."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__("shm_ibrc", _shm.Backend(options), _ibrc.Backend(options), options)
