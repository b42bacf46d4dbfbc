"""Environment variables: read here and nowhere else, once per communicator.

Each row of :data:`VARIABLES` is one variable with its type, default and help; the README's table is made
from these rows and ``python -m epcomm info`` prints them.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from epcomm.errors import InvalidArgumentError


def seconds(name: str, value: Any) -> float:
    """A positive, finite number of seconds, at most ten days."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= 864_000:
        raise InvalidArgumentError(f"{name}={value!r}: expected seconds, more than 0 and at most 864000 (ten days)")
    return number


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def parse(name: str, value: Any) -> int:
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"{name}={value!r}: expected an integer from {low} to {high}") from None
        if not low <= number <= high:
            raise InvalidArgumentError(f"{name}={value!r}: expected an integer from {low} to {high}")
        return number

    return parse


def _choice(*allowed: str) -> Callable[[str, Any], str]:
    def parse(name: str, value: Any) -> str:
        if value not in allowed:
            raise InvalidArgumentError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        return value

    return parse


def _text(name: str, value: Any) -> str:
    return str(value)


class Variable(NamedTuple):
    """One environment variable."""

    name: str
    parse: Callable[[str, Any], Any]
    default: Any
    help: str


VARIABLES = (
    Variable("EPCOMM_BACKEND", _text, None, "backend to use: a name, an ordered list `a,b`, or `^name` to exclude"),
    Variable("EPCOMM_TIMEOUT_S", seconds, 300.0, "deadline of each wait, in seconds"),
    Variable("EPCOMM_PORT", _integer(1, 65535), None, "port of the rendezvous; default `MASTER_PORT`"),
    Variable("EPCOMM_AUTHKEY", _text, None, "secret that joins the ranks of one job (HMAC-SHA256)"),
    Variable("EPCOMM_NODE_ID", _text, None, "splits the ranks of one host into nodes; never joins hosts"),
    Variable("EPCOMM_NUM_THREADS", _integer(1, 256), None, "host threads per rank; default cores / local ranks"),
    Variable("EPCOMM_HOST_ISA", _choice("avx512", "avx2", "plain"), None, "instruction set of the host loops"),
    Variable("EPCOMM_SHM_DIR", _text, None, "folder for shared segments where memfd is not wanted, such as /dev/shm"),
    Variable("EPCOMM_LOG", _choice("debug", "info", "warning", "error"), "warning", "level of the `epcomm` logger"),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Value of a variable of :data:`VARIABLES`; unset or empty means its default.

    Raises
    ------
    InvalidArgumentError
        The value is outside the range; the text names the variable, the value and the range.
    """
    variable = _BY_NAME[name]
    text = (os.environ if environ is None else environ).get(name, "").strip()
    return variable.parse(name, text) if text else variable.default


def in_effect(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All variables with the values in effect now, in table order."""
    return {variable.name: get(variable.name, environ) for variable in VARIABLES}
