"""One walker over nested values: containers, records and objects, to any depth."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Slot", "attributes_of", "find", "map_plain", "map_values", "rebuild", "strip"]

Leaf = Callable[[Any], Any]
ATOMS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def map_plain(value: Any, leaf: Leaf) -> Any:
    """``value`` with ``leaf(x)`` for every x in its tuples, lists, dicts, slices and named tuples; what changes not is kept.

    What the arguments of operators are made of: quick, and blind to other objects.

    >>> map_plain((1, [2, {"a": 3}]), lambda x: x + 1)
    (2, [3, {'a': 4}])
    """
    kind = type(value)
    if kind is tuple or kind is list:
        items = [map_plain(v, leaf) for v in value]
        return items if kind is list else tuple(items)
    if kind is dict:
        return {k: map_plain(v, leaf) for k, v in value.items()}
    if kind is slice:
        return slice(map_plain(value.start, leaf), map_plain(value.stop, leaf), map_plain(value.step, leaf))
    if isinstance(value, tuple) and kind is not torch.Size and not isinstance(value, Tensor):
        items = [map_plain(v, leaf) for v in value]
        return _same_tuple(value, items)
    return leaf(value)


def map_values(value: Any, wanted: Callable[[Any], bool], replace: Leaf, memo: dict[int, Any] | None = None) -> Any:
    """``value`` with ``replace(x)`` in the place of every wanted x, to any depth: also in the attributes of objects, in sets,
    records and partial functions. Lists, dicts and changed objects are fresh; modules, classes and functions are kept."""
    memo = {} if memo is None else memo
    if wanted(value):
        return replace(value)
    if id(value) in memo:
        return memo[id(value)]
    again = lambda v: map_values(v, wanted, replace, memo)
    kind = type(value)
    if kind in ATOMS or isinstance(value, (type, nn.Module)):
        return value
    if isinstance(value, tuple):
        items = [again(v) for v in value]
        return _same_tuple(value, items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, list):
        memo[id(value)] = new_list = [] if kind is list else copy.copy(value)
        new_list[:] = [again(v) for v in value]
        return new_list
    if isinstance(value, functools.partial):
        return functools.partial(again(value.func), *again(value.args), **again(value.keywords))
    if dataclasses.is_dataclass(value) and isinstance(value, Mapping):          # such as the outputs of transformers
        items_by_key = {k: again(v) for k, v in value.items()}
        fields = {f.name: again(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in items_by_key}
        return kind(**{k: v for k, v in fields.items() if v is not None}, **items_by_key)
    if isinstance(value, (set, frozenset)):
        return kind(again(v) for v in value)
    if isinstance(value, dict):
        memo[id(value)] = new_dict = kind() if kind is dict else copy.copy(value)
        for k, v in value.items():
            dict.__setitem__(new_dict, k, again(v))
        if kind is not dict and getattr(value, "__dict__", None):
            vars(new_dict).update({k: again(v) for k, v in vars(value).items()})
        return new_dict
    return _map_object(value, again, memo)


def _map_object(value: Any, again: Leaf, memo: dict[int, Any]) -> Any:
    attributes = {} if callable(value) else attributes_of(value)
    changed = {k: again(v) for k, v in attributes.items()}
    if all(changed[k] is attributes[k] for k in attributes):
        return value
    memo[id(value)] = new = copy.copy(value)
    for k, v in changed.items():
        object.__setattr__(new, k, v)
    return new


def _same_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def find(value: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """Every wanted part of a value, in order, to any depth.

    >>> find({"a": [1, "x"], "b": (2,)}, lambda v: isinstance(v, int))
    [1, 2]
    """
    found: list[Any] = []

    def take(x: Any) -> Any:
        found.append(x)
        return x
    map_values(value, wanted, take)
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, whether it keeps them in a dict or in slots; none for one that answers no questions."""
    try:
        names = [name for kind in type(value).__mro__ for name in _slots(kind)]
        own = getattr(value, "__dict__", {})
        return {**{n: getattr(value, n) for n in names if hasattr(value, n)}, **(own if type(own) is dict else {})}
    except Exception:
        return {}


def _slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    return (n for n in ((slots,) if isinstance(slots, str) else slots) if not n.startswith("__"))


# ---- outputs: a structure, and its flat results ----

@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of the ``index``-th flat result in a template."""

    index: int


def strip(value: Any, wanted: Callable[[Any], bool], take: Callable[[Any], Slot]) -> Any:
    """The template of a value: ``take(x)`` in the place of every wanted x."""
    return map_values(value, wanted, take)


def rebuild(template: Any, results: Any) -> Any:
    """The inverse of `strip`: fresh containers and objects around the results."""
    if type(template) is Slot:
        return results[template.index]
    return map_values(template, lambda x: type(x) is Slot, lambda slot: results[slot.index])
