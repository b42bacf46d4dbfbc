"""Backend ``shm_ibgda``: ranks of a node share memory; the computing threads post RDMA to those of other nodes."""

from typing import Any

from epcomm import _ibgda, _pair, _shm


def probe() -> None:
    """Do nothing if both halves can run here.

    Raises
    ------
    BackendUnavailableError
        One cannot; the text is the reason.
    """
    _shm.probe()
    _ibgda.probe()


class Backend(_pair.Backend):
    """One rank's end of the pair; options as for ``shm`` and ``ibgda``."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__("shm_ibgda", _shm.Backend(options), _ibgda.Backend(options), options)
