"""Where headers and kernels lie: inside the installed package, or beside it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(inside: str, beside: str) -> Path:
    installed = _PACKAGE / inside
    return installed if installed.is_dir() else _PACKAGE.parent / beside


def include_dir() -> Path:
    """Folder to give the compiler with ``-I``; it holds ``epcomm/``."""
    return _folder("_include", "include")


def cuda_dir() -> Path:
    """Folder of the ``.cu`` files."""
    return _folder("_cuda", "cuda")
