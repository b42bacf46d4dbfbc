"""Compiled kernels on disk, in a folder that nobody else can write to.

An entry is two files: ``<sha256 of the image>.cubin``, and ``<key>.json`` that names the image and carries what the
compiler said about it. Each is renamed into place whole and the image comes first, so that ranks that start together,
a rank that dies and a full disk leave complete entries or none. An entry whose image does not match its name is read
as missing, and written again.
"""

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epcomm import config
from epcomm.errors import InvalidArgumentError

_VARIABLE = "EPCOMM_CACHE_DIR"


def key_of(parts: Any) -> str:
    """Name of an entry: the hash of everything that decides about the image."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The cache folder, made if need be; ``None`` if it is the default one and cannot be made.

    Raises
    ------
    InvalidArgumentError
        Others than this user could write there, or a folder that the environment names cannot be made.
    """
    text = config.get(_VARIABLE, environ)
    path = Path(text).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        if text == config.get(_VARIABLE, {}):
            return None
        raise InvalidArgumentError(f"{_VARIABLE}={text!r}: {error}; expected a folder that can be made") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        # Whoever can write here can put code into this process.
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "no folder"
        raise InvalidArgumentError(
            f"{_VARIABLE}={text!r}: {what} of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; expected "
            f"a folder of uid {os.geteuid()} that nobody else may enter: empty it and chmod 700 it, or name another one"
        )
    return path


def read(where: Path, key: str) -> tuple[Path, Any] | None:
    """File of the image and the note that came with it, or ``None`` if there is no whole entry."""
    try:
        entry = json.loads((where / f"{key}.json").read_text(encoding="utf-8"))
        digest, note = entry["image"], entry["note"]
        path = where / f"{digest}.cubin"
        image = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (path, note) if hashlib.sha256(image).hexdigest() == digest else None


def write(where: Path, key: str, image: bytes, note: Any) -> Path:
    """Publish an entry; file of the image. An OSError leaves no entry, or the one that was there."""
    digest = hashlib.sha256(image).hexdigest()
    path = where / f"{digest}.cubin"
    _put(path, image)
    _put(where / f"{key}.json", json.dumps({"image": digest, "note": note}).encode())
    return path


def _put(path: Path, content: bytes) -> None:
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
