"""observe: an observer in front of every operator that will quantize its input.

    before    linear = linear(x, fc_weight, fc_bias)

    after     fc_weight_observer = self.fc.weight_observer(x)
              linear = linear(fc_weight_observer, fc_weight, fc_bias)

The observer is a child of the module that owns the weight, one for each weight: the graph of the whole model and the graph of the
layer alone pass their inputs through the same one.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from .carriers import Use, carrier_of
from .targets import uses_of

__all__ = ["activation_of", "observe"]

_ACTIVATION = {("linear", "weight"): "input", ("matmul", "other"): "input", ("addmm", "mat2"): "mat1"}


def activation_of(node: fx.Node, use: Use) -> fx.Node | None:
    """The input of a linear, matmul or addmm with a weight on its right; None for other uses."""
    carrier = carrier_of(node.target)
    name = _ACTIVATION.get((use.op, use.operand))
    value = carrier.bind(node.args, node.kwargs).get(name) if carrier is not None and name is not None else None
    return value if isinstance(value, fx.Node) and "alias" not in value.meta else None


def observe(graph: fx.Graph, observers: Mapping[str, str], prefix: str) -> fx.Graph:
    """A new graph. ``observers`` gives an observer's path by the weight's name; ``prefix`` is the path of the graph's module."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph, copies))
    for node, twin in copies.items():
        twin.meta = dict(node.meta)
    inside = prefix + "." if prefix else ""
    for node in list(new.nodes):
        for use in uses_of(node):
            path = observers.get(use.constant, "")
            x = activation_of(node, use)
            if x is None or not path.startswith(inside) or not path:
                continue
            with new.inserting_before(node):
                seen = new.call_module(path[len(inside):], (x,))
            seen.meta = {**x.meta, "module": node.meta.get("module", prefix)}
            node.replace_input_with(x, seen)
    return new
