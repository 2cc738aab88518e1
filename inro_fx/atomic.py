"""Files that are written whole or not at all: beside their place first, then moved there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing", "write_bytes"]


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A new empty file beside ``file`` to write to; it takes the place of ``file`` if nothing goes wrong, else it is removed."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(6)}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(file: Path, data: bytes) -> Path:
    """Writes ``data`` to ``file``, whole or not at all."""
    with replacing(file) as temporary:
        temporary.write_bytes(data)
    return file
