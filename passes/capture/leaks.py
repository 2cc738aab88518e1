"""Traced values that forward has put where they outlive the trace: they are found, and the example's values put in their places."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..structure import find
from .proxy import example_of, is_proxy

__all__ = ["take_back"]

DEPTH = 5


def take_back(places: Iterable[tuple[str, Any]]) -> str | None:
    """The first of the (name, value) places in which a traced value was found; there are none left in any of them."""
    first = None
    seen: set[int] = set()
    for name, value in places:
        if _cleared(value, seen, DEPTH):
            first = first or name
    return first


def _cleared(value: Any, seen: set[int], depth: int) -> bool:
    """Had the value traced values inside?"""
    if id(value) in seen or not depth or isinstance(value, (Tensor, str, bytes, int, float, types.ModuleType, type(None))):
        return False
    seen.add(id(value))
    found = False
    try:
        for key, item, put in list(_items(value)):
            if is_proxy(item):
                put(key, example_of(item))
                found = True
            elif isinstance(item, tuple) and find(item, is_proxy):
                put(key, None)
                found = True
            elif not isinstance(item, nn.Module):
                found = _cleared(item, seen, depth - 1) or found
    except Exception:                               # of a class that answers no questions
        return found
    return found


def _items(value: Any) -> Iterable[tuple[Any, Any, Any]]:
    """(key, item, how to put another there) of what a value holds."""
    if isinstance(value, (list, collections.deque)):
        yield from ((i, item, value.__setitem__) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((k, item, value.__setitem__) for k, item in value.items())
    elif isinstance(value, type):
        if value.__module__.partition(".")[0] not in ("torch", "builtins", "inro_fx"):
            yield from ((k, item, lambda k, v: setattr(value, k, v)) for k, item in vars(value).items() if not k.startswith("__"))
    elif type(getattr(value, "__dict__", None)) is dict and not callable(value):
        yield from ((k, item, vars(value).__setitem__) for k, item in vars(value).items())
