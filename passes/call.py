"""Which calls a captured graph answers, and how its flat results become the caller's objects again.

A `Call` describes the captured call: each parameter of the user's forward, flattened to leaves that are either tensors
(placeholders of the graph) or constants. `Call.match` turns another call into placeholder values, or into the reason
why the graph does not cover it. A `Template` is the captured output with every tensor replaced by its position.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .trace import ExampleProxy, TraceError, Tracer

__all__ = ["Call", "Slot", "attributes_of", "rebuild", "strip"]


@dataclasses.dataclass(frozen=True)
class TensorLeaf:
    """A placeholder of the graph; ``rank``, ``dtype`` and ``device`` of the captured tensor, None for a number."""

    name: str
    rank: int | None
    dtype: torch.dtype | None
    device: torch.device | None


@dataclasses.dataclass(frozen=True)
class ConstantLeaf:
    name: str
    value: Any


Leaf = TensorLeaf | ConstantLeaf
IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
             enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)


@dataclasses.dataclass
class Call:
    """The captured call: ``names`` of the parameters, their defaults, and the leaves of each with its structure."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    variadic: str | None                       # the *args parameter
    keywords: str | None                       # the **kwargs parameter
    keyword_only: frozenset[str]
    specs: tuple[TreeSpec | None, ...] = ()    # of each parameter; None for one that is itself a leaf
    leaves: tuple[tuple[Leaf, ...], ...] = ()
    facts: frozenset[str] = frozenset()
    passed: tuple[int, frozenset[str]] = (0, frozenset())      # how many values came by position, and which by keyword

    @classmethod
    def describe(cls, forward: Callable) -> Call:
        """What the signature of ``forward`` says; the leaves are those of no call yet."""
        parameters = inspect.signature(forward).parameters.values()
        by_kind = {kind: [p.name for p in parameters if p.kind is kind] for kind in inspect._ParameterKind}
        variadic = next(iter(by_kind[inspect.Parameter.VAR_POSITIONAL]), None)
        keywords = next(iter(by_kind[inspect.Parameter.VAR_KEYWORD]), None)
        named = [p for p in parameters if p.name not in (variadic, keywords)]
        extra = [name for name in (variadic, keywords) if name]
        return cls(tuple([p.name for p in named] + extra), tuple(p.default for p in named), variadic, keywords,
                   frozenset(by_kind[inspect.Parameter.KEYWORD_ONLY]))

    @classmethod
    def of(cls, forward: Callable, args: tuple, kwargs: dict) -> tuple[Call, list[Any]]:
        """The call's description without leaves, and the values of the parameters in order."""
        call = cls.describe(forward)
        call.passed = (len(args), frozenset(kwargs))
        values = call.bind(args, kwargs)
        if isinstance(values, str):
            inspect.signature(forward).bind(*args, **kwargs)           # raises Python's own words
            raise TypeError(values)
        return call, values

    def bind(self, args: tuple, kwargs: dict) -> list[Any] | str:
        """The values of the parameters in order, or what does not fit."""
        values = list(self.defaults)
        positional = len(values) - len(self.keyword_only)
        rest: tuple = ()
        if len(args) > positional:
            if self.variadic is None:
                return f"{len(args)} positional arguments"
            args, rest = args[:positional], args[positional:]
        for i, value in enumerate(args):
            values[i] = value
        extra = {}
        for name, value in kwargs.items():
            index = self.names.index(name) if name in self.names else -1
            if 0 <= index < len(values):
                if index < len(args):
                    return f"two values for {name}"
                values[index] = value
            elif self.keywords is not None:
                extra[name] = value
            else:
                return f"an unknown keyword {name}"
        for name, value in zip(self.names, values):  # noqa: B905 - the variadic names have no default
            if value is inspect.Parameter.empty:
                return f"no value for {name}"
        if self.variadic is not None:
            values.append(rest)
        if self.keywords is not None:
            values.append(extra)
        return values

    def capture(self, values: list[Any], placeholder: Callable[[str, Any], Any]) -> list[Any]:
        """Fills in the leaves from the example's values; returns the values with a placeholder for each tensor."""
        specs: list[TreeSpec | None] = []
        leaves: list[tuple[Leaf, ...]] = []
        traced = []
        taken: set[str] = set()
        for name, value in zip(self.names, values, strict=True):
            flat, spec = tree_flatten(value)
            single = len(flat) == 1 and flat[0] is value
            described, proxies = [], []
            for i, item in enumerate(flat):
                label = name if single else f"{name}_{i}"
                example = item.example if type(item) is ExampleProxy else item
                if isinstance(example, Tensor) and example.layout is torch.strided:
                    while label in taken or not label.isidentifier():
                        label = "input_" + label if not label.isidentifier() else label + "_"
                    taken.add(label)
                    described.append(TensorLeaf(label, example.dim(), example.dtype, example.device))
                    proxies.append(placeholder(label, item))
                elif type(item) is ExampleProxy:
                    if not isinstance(example, (int, float)):
                        raise TraceError(f"{name} is a {type(example).__name__}")
                    described.append(TensorLeaf(label, None, None, None))
                    proxies.append(placeholder(label, item))
                elif not isinstance(item, IMMUTABLE):
                    raise TraceError(f"takes a {type(item).__name__} as {label}, whose state may differ at the next call")
                else:
                    described.append(ConstantLeaf(label, item))
                    proxies.append(item)
            specs.append(None if single else spec)
            leaves.append(tuple(described))
            traced.append(proxies[0] if single else tree_unflatten(proxies, spec))
        self.specs, self.leaves = tuple(specs), tuple(leaves)
        return traced

    def spread(self, values: list[Any]) -> tuple[tuple, dict]:
        """The parameters' values as (args, kwargs), spelled as the captured call spelled them."""
        by_name = dict(zip(self.names, values, strict=True))
        rest = tuple(by_name.pop(self.variadic)) if self.variadic is not None else ()
        extra = dict(by_name.pop(self.keywords)) if self.keywords is not None else {}
        count, keywords = self.passed
        positional = list(by_name)[:min(count, len(self.defaults) - len(self.keyword_only))]
        named = {n: by_name[n] for n in by_name if n not in positional and (n in keywords or n in self._tensor_defaults())}
        return (*[by_name[n] for n in positional], *rest), named | extra

    def _tensor_defaults(self) -> set[str]:
        """Parameters with a tensor as default: another call may pass another one."""
        return {name for name, leaves in zip(self.names, self.leaves, strict=True)
                if any(isinstance(leaf, TensorLeaf) for leaf in leaves)}

    def match(self, args: tuple, kwargs: dict) -> list[Any] | str:
        """The values of the graph's placeholders for this call, or the first thing that the graph does not cover."""
        if len(args) == 1 and not kwargs and not self.facts and self.specs == (None,) and isinstance(args[0], Tensor):
            return [args[0]] if isinstance(self.leaves[0][0], TensorLeaf) else f"another value of {self.names[0]}"
        values = self.bind(args, kwargs)
        if isinstance(values, str):
            return values
        flat: list[Any] = []
        facts = self.facts
        for index, value in enumerate(values):
            spec = self.specs[index]
            if spec is None:
                items: Sequence[Any] = (value,)
            else:
                items, seen = tree_flatten(value)
                if seen != spec:
                    return f"another structure of {self.names[index]}"
            for leaf, item in zip(self.leaves[index], items, strict=True):
                if isinstance(leaf, ConstantLeaf):
                    if item is not leaf.value and not _equal(item, leaf.value):
                        return f"another value of {leaf.name}"
                    continue
                if leaf.rank is None:
                    if not isinstance(item, (int, float)):
                        return f"{leaf.name} is no number"
                elif not isinstance(item, Tensor):
                    return f"{leaf.name} is no tensor"
                elif "rank" in facts and item.dim() != leaf.rank:
                    return f"another rank of {leaf.name}"
                elif "dtype" in facts and item.dtype != leaf.dtype:
                    return f"another dtype of {leaf.name}"
                elif "device" in facts and item.device != leaf.device:
                    return f"another device of {leaf.name}"
                elif "requires_grad" in facts and item.requires_grad:
                    return f"{leaf.name} requires a gradient"
                flat.append(item)
        return flat


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    try:
        return bool(a == b)
    except Exception:
        return False


# ---- outputs ----

@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of the ``index``-th flat result in a template."""

    index: int


def strip(value: Any, take: Callable[[Any], Slot]) -> Any:
    """The structure of ``value`` with ``take(x)`` in the place of every proxy and tensor, to any depth."""
    return _transform(value, lambda x: type(x) is ExampleProxy or isinstance(x, Tensor), take, {})


def rebuild(template: Any, results: Sequence[Any]) -> Any:
    """The inverse of `strip`: fresh containers and objects around the results."""
    if type(template) is Slot:
        return results[template.index]
    if type(template) is tuple:
        return tuple([rebuild(t, results) for t in template])
    return _transform(template, lambda x: type(x) is Slot, lambda slot: results[slot.index], {})


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, whether it keeps them in a dict or in slots."""
    names = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return {**{n: getattr(value, n) for n in names if hasattr(value, n)}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(n for n in ((slots,) if isinstance(slots, str) else slots) if not n.startswith("__"))


def _transform(value: Any, wanted: Callable[[Any], bool], replace: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    if wanted(value):
        return replace(value)
    if id(value) in memo:
        return memo[id(value)]
    again = lambda v: _transform(v, wanted, replace, memo)
    kind = type(value)
    if kind in (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size) or isinstance(value, (type, Tracer)):
        return value
    if isinstance(value, tuple):
        items = [again(v) for v in value]
        return kind._make(items) if hasattr(value, "_fields") else kind(items) if any(
            a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, list):
        new_list: list = [] if kind is list else copy.copy(value)
        memo[id(value)] = new_list
        new_list[:] = [again(v) for v in value]
        return new_list
    if isinstance(value, functools.partial):
        return functools.partial(again(value.func), *again(value.args), **again(value.keywords))
    if dataclasses.is_dataclass(value) and isinstance(value, Mapping):   # such as the outputs of transformers
        items = {k: again(v) for k, v in value.items()}
        fields = {f.name: again(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in items}
        return kind(**{k: v for k, v in fields.items() if v is not None}, **items)
    if isinstance(value, (set, frozenset)):
        return kind(again(v) for v in value)
    if isinstance(value, dict):
        new_dict = kind() if kind is dict else copy.copy(value)
        memo[id(value)] = new_dict
        for k, v in value.items():
            dict.__setitem__(new_dict, k, again(v))
        if kind is not dict and getattr(value, "__dict__", None):
            vars(new_dict).update({k: again(v) for k, v in vars(value).items()})
        return new_dict
    for cell in getattr(value, "__closure__", None) or ():
        if wanted(cell.cell_contents):
            raise TraceError("returns a function that holds a traced value")
    attributes = attributes_of(value)
    if not attributes or callable(value) or isinstance(value, torch.nn.Module):
        return value
    changed = {k: again(v) for k, v in attributes.items()}
    if all(changed[k] is attributes[k] for k in attributes):
        return value
    new = copy.copy(value)
    for k, v in changed.items():
        object.__setattr__(new, k, v)
    memo[id(value)] = new
    return new
