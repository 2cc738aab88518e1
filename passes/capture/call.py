"""The call that a graph was captured for: its parameters, flattened to leaves that are inputs of the graph or constants.

Tensors are inputs, and so are numbers that were passed (a branch on one leaves a guard, arithmetic does not); everything else,
defaults included, is a constant that must be the same again. `Call.flatten` turns another call into the graph's inputs.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..program import Guard

__all__ = ["IMMUTABLE", "Call", "ConstantLeaf", "NumberLeaf", "TensorLeaf", "equal"]


@dataclasses.dataclass(frozen=True)
class TensorLeaf:
    """An input of the graph: ``rank``, ``dtype`` and ``device`` of the captured tensor."""

    name: str
    rank: int
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True)
class NumberLeaf:
    """An input of the graph that is a number of this type."""

    name: str
    kind: type


@dataclasses.dataclass(frozen=True)
class ConstantLeaf:
    """A value that must be the same again."""

    name: str
    value: Any


Leaf = TensorLeaf | NumberLeaf | ConstantLeaf
IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
             enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)


class Unusual(Exception):
    """A value among a call's that no graph can take; the text is the reason."""


@dataclasses.dataclass
class Call:
    """The parameters of a forward, and the leaves of each in the captured call.

    ``facts`` are what the traced code asked of inputs, and must hold again: "rank", "dtype", "device", "requires_grad",
    "identity", "strides"; "grad_off" and "grad_on": gradients must be switched off, or on, for the graph to give them rightly.
    ``same`` says for each input which input of the example was the same object.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    variadic: str | None                       # the *args parameter
    keywords: str | None                       # the **kwargs parameter
    keyword_only: frozenset[str]
    specs: tuple[TreeSpec | None, ...] = ()    # of each parameter; None for one that is itself a leaf
    leaves: tuple[tuple[Leaf, ...], ...] = ()
    same: tuple[int, ...] = ()
    facts: frozenset[str] = frozenset()
    passed: tuple[int, frozenset[str]] = (0, frozenset())      # how many values came by position, and which by keyword

    @classmethod
    def describe(cls, forward: Callable[..., Any]) -> Call:
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
    def of(cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, list[Any]]:
        """The call's description without leaves, and the values of the parameters in order."""
        call = cls.describe(forward)
        call.passed = (len(args), frozenset(kwargs))
        values = call.bind(args, kwargs)
        if isinstance(values, str):
            inspect.signature(forward).bind(*args, **kwargs)           # raises Python's own words
            raise TypeError(values)
        return call, values

    def __deepcopy__(self, memo: dict[int, Any]) -> Call:
        return dataclasses.replace(self)                   # its parts are never changed, and torch's specs do not like to be copied

    @property
    def inputs(self) -> tuple[TensorLeaf | NumberLeaf, ...]:
        """The inputs of the graph, in order."""
        return tuple(leaf for leaves in self.leaves for leaf in leaves if not isinstance(leaf, ConstantLeaf))

    def guards(self) -> Iterator[Guard]:
        """What must hold of the call's values, but for the numbers that the graph itself asks about."""
        for leaves in self.leaves:
            for leaf in leaves:
                if isinstance(leaf, ConstantLeaf):
                    yield Guard(leaf.name, "value", leaf.value, "")
                elif isinstance(leaf, NumberLeaf):
                    yield Guard(leaf.name, "type", leaf.kind.__name__, "")
                else:
                    yield from (Guard(leaf.name, fact, getattr(leaf, fact, None), "") for fact in sorted(
                        self.facts & {"rank", "dtype", "device"}))
        yield from (Guard("the inputs", fact, None, "") for fact in sorted(self.facts & {"identity", "strides"}))
        yield from (Guard("torch", "gradients", fact == "grad_on", "") for fact in sorted(self.facts & {"grad_on", "grad_off"}))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | str:
        """The values of the parameters in order, or what does not fit."""
        values = list(self.defaults)
        positional = len(values) - len(self.keyword_only)
        rest: tuple[Any, ...] = ()
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

    def capture(self, values: list[Any], placeholder: Callable[[str, Any], Any], example_of: Callable[[Any], Any]) -> list[Any]:
        """Fills in the leaves from the example's values; returns the values with ``placeholder(name, value)`` for each input.

        ``example_of`` gives the example behind a value that is traced already. Raises `Unusual` for what no graph can take.
        """
        specs: list[TreeSpec | None] = []
        leaves: list[tuple[Leaf, ...]] = []
        traced: list[Any] = []
        taken: set[str] = set()
        seen: list[tuple[Any, Any]] = []                    # (an input's value, its placeholder)
        for index, (name, value) in enumerate(zip(self.names, values, strict=True)):
            flat, spec = tree_flatten(value)
            single = len(flat) == 1 and flat[0] is value
            default = self.defaults[index] if index < len(self.defaults) else inspect.Parameter.empty
            described: list[Leaf] = []
            proxies: list[Any] = []
            for i, item in enumerate(flat):
                label = name if single else f"{name}_{i}"
                leaf = self._leaf(label, example_of(item), item is default)
                if isinstance(leaf, ConstantLeaf):
                    described.append(leaf)
                    proxies.append(item)
                    continue
                while leaf.name in taken or not leaf.name.isidentifier():
                    leaf = dataclasses.replace(leaf, name=leaf.name + "_" if leaf.name.isidentifier() else "input_" + leaf.name)
                taken.add(leaf.name)
                described.append(leaf)
                before = next((k for k, (v, _) in enumerate(seen) if v is item and isinstance(leaf, TensorLeaf)), len(seen))
                proxy = placeholder(leaf.name, item)
                seen.append((item, proxy if before == len(seen) else seen[before][1]))
                self.same += (before,)
                proxies.append(seen[-1][1])
            specs.append(None if single else spec)
            leaves.append(tuple(described))
            traced.append(proxies[0] if single else tree_unflatten(proxies, spec))
        self.specs, self.leaves = tuple(specs), tuple(leaves)
        return traced

    @staticmethod
    def _leaf(label: str, example: Any, default: bool) -> Leaf:
        if isinstance(example, Tensor) and example.layout is torch.strided:
            return TensorLeaf(label, example.dim(), example.dtype, example.device)
        if type(example) in (int, float) and not default:
            return NumberLeaf(label, type(example))
        if not isinstance(example, IMMUTABLE):
            raise Unusual(f"takes a {type(example).__name__} as {label}, whose state may differ at the next call")
        return ConstantLeaf(label, example)

    def spread(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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

    # -- another call --

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | str:
        """The inputs of the graph for this call, or the first thing in its structure or constants that differs."""
        if len(args) == 1 and not kwargs and self.specs == (None,) and isinstance(self.leaves[0][0], TensorLeaf):
            return [args[0]] if isinstance(args[0], Tensor) else f"{self.names[0]} is no tensor"
        values = self.bind(args, kwargs)
        if isinstance(values, str):
            return values
        flat: list[Any] = []
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
                    if item is not leaf.value and not equal(item, leaf.value):
                        return f"another value of {leaf.name}"
                elif isinstance(leaf, NumberLeaf):
                    if type(item) is not leaf.kind:
                        return f"{leaf.name} is no {leaf.kind.__name__}"
                    flat.append(item)
                elif not isinstance(item, Tensor):
                    return f"{leaf.name} is no tensor"
                else:
                    flat.append(item)
        return flat

    def differs(self, flat: list[Any]) -> str | None:
        """Which fact about its inputs does not hold for this call; None if all do."""
        for leaf, item in zip(self.inputs, flat, strict=True):
            if isinstance(leaf, NumberLeaf):
                continue
            for fact, seen in (("rank", item.dim()), ("dtype", item.dtype), ("device", item.device)):
                if fact in self.facts and seen != getattr(leaf, fact):
                    return f"another {fact} of {leaf.name}"
            if "requires_grad" in self.facts and item.requires_grad:
                return f"{leaf.name} requires a gradient"
        return None

    def identities(self, flat: list[Any]) -> tuple[int, ...]:
        """For each input, the first that is the same object."""
        return tuple(next(j for j in range(i + 1) if flat[j] is item and (i == j or isinstance(item, Tensor)))
                     for i, item in enumerate(flat))


def equal(a: Any, b: Any) -> bool:
    """Are two plain values the same? What cannot be compared is not."""
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:
        return False
