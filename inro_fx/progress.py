"""Progress of long work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(total: int | None, label: str) -> Iterator[Any]:
    """A tqdm bar where tqdm is installed and somebody looks at a terminal; silence elsewhere."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc=label, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield bar.update
