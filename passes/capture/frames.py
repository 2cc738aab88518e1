"""Which tracer is at work in this thread, and which line of the user's code it has come to."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["INTERNAL", "OWN", "active", "at_work", "by_torch", "where"]

_PACKAGE = sys.modules[__name__.partition(".")[0]].__file__ or __file__
OWN = tuple(os.path.dirname(file) + os.sep for file in (_PACKAGE, os.path.dirname(os.path.realpath(__file__))))
INTERNAL = (os.path.dirname(torch.__file__) + os.sep, *OWN, "<frozen ", "<graph ")       # the last are ours, too: see run/codegen


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack: list[Any] = []


_frames = _Frames()


def active() -> Any:
    """What module calls of this thread go to; None for ordinary execution, and for what torch compiles meanwhile (inside torch.cond)."""
    if torch.compiler.is_dynamo_compiling():
        return None
    return _frames.stack[-1] if _frames.stack else None


@contextlib.contextmanager
def at_work(tracer: Any) -> Iterator[None]:
    """Module calls inside go to ``tracer``; None: they are ordinary calls."""
    _frames.stack.append(tracer)
    try:
        yield
    finally:
        _frames.stack.pop()


def where() -> str:
    """The source line of the user's code that is running: ``modeling_bert.py:120``."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "torch"


def by_torch() -> bool:
    """Is it torch's own code, and not the user's, that asks what is being answered?"""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(INTERNAL)
