"""Files that are written whole or not at all: in a folder beside their place first, then moved there.

The folder is named after the file, the machine and the process, so that whoever writes the same file next can tell what a killed
process left behind, and remove it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import platform
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["refuse_unwritable", "replacing", "write_bytes"]


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A new empty file to write to; it takes the place of ``file`` if nothing goes wrong, else it is removed.

    The mode is that of the file that was there, else what the umask says. Where ``file`` is a link, what it points to is replaced.
    Raises `OSError` with the name of ``file``, whatever it was that could not be written.
    """
    with _named(file), _beside(file) as (target, temporary):
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE((target if target.exists() else temporary).stat().st_mode)
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(mode)                       # some writers put a file of their own, with a mode of their own, in its place
        temporary.replace(target)


def write_bytes(file: Path, data: bytes) -> Path:
    """Writes ``data`` to ``file``, whole or not at all."""
    with replacing(file) as temporary:
        temporary.write_bytes(data)
    return file


def refuse_unwritable(file: Path) -> None:
    """Raises the `OSError` that `replacing` would raise now."""
    with _named(file), _beside(file):
        pass


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[tuple[Path, Path]]:
    """(what ``file`` is or points to, a name for a file on the same disk): in a folder that is removed in the end."""
    target = Path(os.path.realpath(file))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "It is no plain file")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    name = f".{target.name[:50]}.{zlib.crc32(platform.node().encode()):08x}"        # a name has at most 255 bytes
    _remove_abandoned(target.parent, name)
    folder = target.with_name(f"{name}-{os.getpid()}-{secrets.token_hex(6)}")
    folder.mkdir(0o700)
    try:
        yield target, folder / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, name: str) -> None:
    """Removes the folders of processes of this machine that are gone."""
    for folder in parent.glob(f"{glob.escape(name)}-*"):
        match = re.fullmatch(r"-(\d{1,9})-[0-9a-f]{12}", folder.name[len(name):])
        if match is not None and not _runs(int(match[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _runs(process: int) -> bool:
    if os.name == "nt":                             # there signal 0 is no question but Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
