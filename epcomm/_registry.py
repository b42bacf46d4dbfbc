"""The one list of backends. Order is preference; setup.py, tests and ``info`` read these rows.

This file imports nothing from the package, so that ``setup.py`` can read it before anything is built.
"""

from typing import NamedTuple


class Backend(NamedTuple):
    """One backend: its word names its folder, module, namespace, variables and test id."""

    name: str
    summary: str
    headers: tuple[str, ...] = ()  # looked for by setup.py; a missing one skips the backend
    libraries: tuple[str, ...] = ()
    needs_cuda: bool = False


BACKENDS = (
    Backend("shm", "shared memory of one host, driven by host threads"),
)
