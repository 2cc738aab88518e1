"""What the rules that fuse have in common: the uses of decided weights, their stored parts, and the fused call."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..carriers import Use, carrier_of
from ..constants import Alias
from ..program import Context, annotate, meta_of, shape_of
from ..solve.plan import Weight, uses_of
from .driver import Match

__all__ = ["call_of", "constant_chain", "cut", "finds", "fused", "operator_of", "parts_of", "rank_of", "used", "whole"]


def finds(operator: str) -> Any:
    def find(node: fx.Node, context: Context) -> Match | None:
        carrier = carrier_of(node.target) if _use(node, context) is not None else None
        return Match.of(node) if carrier is not None and carrier.fused == operator else None
    return find


def _use(node: fx.Node, context: Context) -> tuple[Use, Weight] | None:
    """The use of a decided weight that a node is; the first, where it has several."""
    for use in uses_of(node):
        weight = context.weights.get(use.constant)
        if weight is not None:
            return use, weight
    return None


def call_of(node: fx.Node) -> dict[str, Any]:
    carrier = carrier_of(node.target)
    assert carrier is not None
    return carrier.bind(node.args, node.kwargs)


def used(node: fx.Node, context: Context) -> tuple[Use, Weight]:
    found = _use(node, context)
    assert found is not None
    return found


def operator_of(weight: Weight, name: str) -> tuple[Any, tuple[Any, ...]]:
    operator = weight.scheme.operator(name)
    assert not isinstance(operator, str)
    return operator


def whole(operand: fx.Node) -> Alias | None:
    """The alias of an operand that is a view of a weight; None for an elementwise copy."""
    alias = meta_of(operand).get("alias")
    return alias if alias is not None and alias.view else None


def rank_of(value: Any) -> int | None:
    shape = shape_of(value)
    return None if shape is None else len(shape)


def constant_chain(node: fx.Node) -> bool:
    """Does the operand depend on nothing but the stored parts?"""
    while "unpacks" not in node.meta and "stored" not in node.meta:
        inputs = node.all_input_nodes
        if len(inputs) != 1:
            return False
        node = inputs[0]
    return True


def parts_of(graph: fx.Graph, operand: fx.Node, weight: Weight, rows: slice) -> list[fx.Node]:
    """The stored parts behind an unpacked weight, cut to ``rows`` of the matrix."""
    found: dict[str, fx.Node] = {}
    pending = [operand]
    while pending:
        node = pending.pop()
        stored = meta_of(node).get("stored")
        if stored is not None and stored.constant == weight.constant.name:
            found[stored.part] = node
        else:
            pending.extend(node.all_input_nodes)
    for step in ("prev", "next"):              # parts that the unpacking does not read stand beside those that it does
        node = getattr(next(iter(found.values())), step)
        while (stored := meta_of(node).get("stored")) is not None and stored.constant == weight.constant.name:
            found.setdefault(stored.part, node)
            node = getattr(node, step)
    parts = [found[name] for name in weight.scheme.parts]
    return parts if rows == slice(None) else [cut(graph, part, rows, weight) for part in parts]


def cut(graph: fx.Graph, part: fx.Node, rows: slice, weight: Weight) -> fx.Node:
    if meta_of(part)["stored"].single_row:
        return part
    piece = graph.call_method("narrow", (part, 0, rows.start, rows.stop - rows.start))
    annotate(piece, module=meta_of(part)["module"], unpacks=weight.constant.name)
    return piece


def fused(graph: fx.Graph, function: Any, args: tuple[Any, ...]) -> fx.Node:
    new = graph.call_function(function, args)
    schema = getattr(function, "_schema", None)
    meta_of(new)["kernel"] = schema.name.replace("::", ".") if schema is not None else getattr(function, "__name__", "fused")
    return new
