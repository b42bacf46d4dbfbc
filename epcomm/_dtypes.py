"""Canonical names of element types, whichever library writes them.

A name is NumPy's or ml_dtypes' own: "float32", "bfloat16", "float8_e4m3fn". A type outside this table (big-endian,
structured, a time) has its NumPy text, such as ">i8", so that whoever cannot take it can refuse it by name.
"""

from typing import Any

import ml_dtypes
import numpy as np

from epcomm.errors import InvalidArgumentError

_ML_NAMES = (
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int4",
    "uint4",
    "int2",
    "uint2",
)
_PLAIN = [np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"]
_PLAIN += [np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)]  # some are newer

DTYPES: dict[str, np.dtype[Any]] = {dt.name: dt for dt in reversed(_PLAIN)}  # canonical name -> NumPy dtype
NAMES: dict[np.dtype[Any], str] = {dt: dt.name for dt in _PLAIN}
SCALARS: dict[type, str] = {dt.type: dt.name for dt in _PLAIN}

# (code, bits) of a DLDataType. Types of less than a byte are packed there, which no array library here can hold.
DLPACK_NAMES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}

# Code of the struct module and of PEP 3118 -> kind of number.
_BUFFER_KINDS = {
    **dict.fromkeys(("?",), "b"),
    **dict.fromkeys(("b", "h", "i", "l", "q", "n"), "i"),
    **dict.fromkeys(("c", "B", "H", "I", "L", "Q", "N"), "u"),
    **dict.fromkeys(("e", "f", "d", "g"), "f"),
    **dict.fromkeys(("Zf", "Zd", "Zg", "F", "D", "G"), "c"),
}


def name_of(dt: np.dtype[Any]) -> str:
    """Canonical name of a NumPy dtype, or its NumPy text; TypeError if its elements are not plain bytes."""
    name = NAMES.get(dt)
    if name is not None:
        return name
    if dt.hasobject or dt.kind in ("O", "T"):
        raise TypeError(f"dtype {dt} holds Python objects, not plain bytes")
    return dt.str


def of_buffer(obj: Any, text: str, itemsize: int) -> str | None:
    """Canonical name for the format of a buffer; None when its elements are not plain bytes."""
    order = ""
    if text and text[0] in "@=<>!^":
        order, text = text[0], text[1:]
    kind = _BUFFER_KINDS.get(text)
    try:
        if kind is None:
            return name_of(np.asarray(memoryview(obj)).dtype)
        # The code gives the kind, the exporter's itemsize the width: "l" is 4 or 8 bytes by prefix and platform.
        order = ">" if order in (">", "!") else "<" if order == "<" else "="
        return name_of(np.dtype(f"{order}{kind}{itemsize}"))
    except (TypeError, ValueError, RuntimeError):
        return None


def canonical_dtype(obj: Any) -> str:
    """Canonical name of a dtype given as a name, a NumPy dtype or scalar type, an ml_dtypes type or a torch dtype.

    Raises
    ------
    InvalidArgumentError
        It is none of these, or its elements are not plain bytes; the text names it.
    """
    why = "expected a dtype: a name such as 'bfloat16', a NumPy or ml_dtypes type, or a torch dtype"
    try:
        if isinstance(obj, str):
            return obj if obj in DTYPES else name_of(np.dtype(obj))
        if isinstance(obj, np.dtype):
            return name_of(obj)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidArgumentError(f"dtype={obj!r}: {error}; {why}") from None
    if isinstance(obj, type) and obj in SCALARS:
        return SCALARS[obj]
    if type(obj).__module__ == "torch" and type(obj).__name__ == "dtype":
        name = str(obj).removeprefix("torch.")
        if name in DTYPES:
            return name
        why = "no NumPy or ml_dtypes type has this layout"
    raise InvalidArgumentError(f"dtype={obj!r}: {why}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy dtype of a canonical name."""
    found = DTYPES.get(name)
    return found if found is not None else np.dtype(canonical_dtype(name))


def itemsize_of(dtype: str) -> int:
    """Bytes of one element of a canonical dtype."""
    return numpy_dtype(dtype).itemsize
