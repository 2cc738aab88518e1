"""A graph as plain data, for pickle and deepcopy: nodes as tuples, functions as names.

fx.Graph itself pickles only through its generated code, which loses node metadata and needs the module beside it.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

__all__ = ["GraphData"]


@dataclasses.dataclass(frozen=True)
class _Ref:
    """A node, by name."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function, by the dotted name under which it can be imported."""

    name: str


@dataclasses.dataclass
class GraphData:
    """The nodes of a graph in order: (op, name, target, args, kwargs, meta)."""

    nodes: list[tuple[Any, ...]]

    @classmethod
    def of(cls, graph: fx.Graph) -> GraphData:
        def reference(node: fx.Node) -> Any:
            return _Ref(node.name)

        def refer(value: Any) -> Any:
            return fx.map_arg(value, reference)
        return cls([(n.op, n.name, n.target if isinstance(n.target, str) else _encode(n.target), refer(n.args), refer(n.kwargs),
                     dict(n.meta)) for n in graph.nodes])

    def graph(self) -> fx.Graph:
        """The graph again, node names and metadata included."""
        graph = fx.Graph()
        made: dict[str, fx.Node] = {}

        def resolve(value: Any) -> Any:
            return fx.node.map_aggregate(value, lambda a: made[a.name] if isinstance(a, _Ref) else a)
        for op, name, target, args, kwargs, meta in self.nodes:
            node = graph.create_node(op, _decode(target), resolve(args), resolve(kwargs), name)
            node.meta = dict(meta)
            made[name] = node
        return graph


def _encode(function: Any) -> Any:
    """The function's name if that leads back to it; otherwise the function, for pickle to refer to in its own way."""
    if isinstance(function, torch._ops.OpOverload):
        return _Function(f"torch.ops.{function}")
    try:
        name = _Function(_get_qualified_name(function))
        return name if _decode(name) is function else function
    except (ImportError, AttributeError, RuntimeError):
        return function


def _decode(target: Any) -> Any:
    if type(target) is not _Function:
        return target
    module, _, name = target.name.rpartition(".")
    if target.name.startswith("torch.ops."):
        value: Any = torch.ops
        for piece in target.name.split(".")[2:]:
            value = getattr(value, piece)
        return value
    return getattr(importlib.import_module(module or "builtins"), name)
