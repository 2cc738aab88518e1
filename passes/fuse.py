"""fuse: unpacking and the operator after it become one call of the scheme's own operator, where it has one.

    before    dequantize = inro_fx.dequantize(codes, scale, ...)
              linear = linear(x, dequantize, bias)

    after     linear = inro_fx.linear(x, codes, scale, bias, ...)

A linear may be spelled linear(x, w), x @ w, x @ w.t(), mm or addmm, and its weight may be rows of a larger one (the packed
projections of attention). What is not fused stays unpack-then-operator, and says why in ``node.meta["unfused"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from .carriers import Use, carrier_of
from .constants import Alias
from .targets import Decision, uses_of

__all__ = ["fuse"]

Operator = tuple[Callable, tuple[Any, ...]]          # of a scheme: the function and its trailing arguments


def fuse(graph: fx.Graph, decisions: Mapping[str, Decision]) -> fx.Graph:
    """The same graph, changed in place: operators on decided weights are fused where the scheme allows."""
    for node in list(graph.nodes):
        for use in uses_of(node):
            decision = decisions.get(use.constant)
            if decision is None:
                continue
            reason = _fuse(graph, node, use, decision)
            if reason is not None:
                node.meta["kernel"] = f"dequantize + {use.op}"
                node.meta["unfused"] = reason
    return drop_unpacking(graph)


def drop_unpacking(graph: fx.Graph) -> fx.Graph:
    """Removes what unpacked and viewed weights that no operator reads any more."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.meta.get("unpacks") or node.meta.get("part_of")
                               or (("alias" in node.meta or "pieces_of" in node.meta) and node.op != "placeholder")):
            graph.erase_node(node)
    return graph


def _fuse(graph: fx.Graph, node: fx.Node, use: Use, decision: Decision) -> str | None:
    """Why a use of a decided weight stays unpacking and operator, or None when it is one call now."""
    operator, rule = RULES.get(use.op, (use.op, None))
    found = decision.scheme.operator(operator)
    if isinstance(found, str):
        return found
    if rule is None:
        return f"no rule fuses {use.op}"
    carrier = carrier_of(node.target)
    assert carrier is not None
    return rule(graph, node, carrier.bind(node.args, node.kwargs), use, decision, found)


def _linear(graph: fx.Graph, node: fx.Node, call: dict[str, Any], use: Use, decision: Decision, found: Operator) -> str | None:
    """linear, matmul and addmm whose weight is a 2-D constant, or rows of one: why it cannot be fused, or None when it was."""
    weight = call[use.operand]
    alias: Alias = weight.meta["alias"]
    x, bias = {"linear": (call.get("input"), call.get("bias")), "matmul": (call.get("input"), None),
               "addmm": (call.get("mat1"), call.get("bias"))}[use.op]
    if use.operand in ("input", "mat1", "batch1"):
        return "the weight is the left factor"
    if len(decision.constant.shape) != 2 or not alias.view:
        return "the weight is not a plain matrix"
    if use.op == "addmm" and (call.get("beta", 1) != 1 or call.get("alpha", 1) != 1 or _rank(bias) != 1):
        return "addmm with a scaled or two-dimensional bias"
    out, inner = (0, 1) if use.op == "linear" else (1, 0)
    row, column = decision.layout.channels, decision.layout.reduced
    if len(alias.axes) != 2 or not _runs(alias, out, row, decision) or not _runs(alias, inner, column, decision):
        return "the weight is used along another axis than it is stored"
    if not _constant_chain(weight):
        return "the part of the weight depends on the input"
    steps = (decision.constant.shape[1], 1)                     # of a contiguous matrix
    if any(alias.shape[axis] != 1 and alias.strides[axis] != steps[base[0]] for axis, base in ((out, row), (inner, column))):
        return "the weight is a part of another one, with steps"
    rows = slice(None)
    if alias.shape[out] != decision.layout.rows:
        if row != (0,) or alias.offset % decision.layout.columns:
            return "the weight is a part of another one, across its rows"
        start = alias.offset // decision.layout.columns
        rows = slice(start, start + alias.shape[out])
    elif alias.offset:
        return "the weight is a part of another one"
    if alias.shape[inner] != decision.layout.columns:
        return "the weight is a part of another one, across its columns"
    function, trailing = found
    with graph.inserting_before(node):
        parts = _parts(graph, weight, decision, rows)
        _replace(graph, node, function, (x, *parts, bias, *trailing, decision.layout.columns))
    return None


def _embedding(graph: fx.Graph, node: fx.Node, call: dict[str, Any], use: Use, decision: Decision, found: Operator) -> str | None:
    """A lookup in a whole table: rows are gathered as codes and dequantized after."""
    weight = call[use.operand]
    alias: Alias = weight.meta["alias"]
    if call.get("max_norm") is not None:
        return "max_norm changes the table"
    if not decision.layout.plain or not alias.view or alias.shape != decision.constant.shape or alias.axes != ((0,), (1,)):
        return "the table is a part of another weight"
    if not _constant_chain(weight):
        return "the part of the table depends on the input"
    ids = call["indices"] if "indices" in call else call["input"]
    function, trailing = found
    with graph.inserting_before(node):
        parts = _parts(graph, weight, decision, slice(None))
        new = _replace(graph, node, function, (ids, *parts, *trailing, decision.layout.columns, decision.constant.dtype))
    new.meta["weight_dtype"] = decision.constant.dtype
    return None


# an operation on a weight: the operator of the scheme that does it, and the rule that decides and replaces
RULES = {"linear": ("linear", _linear), "matmul": ("linear", _linear), "addmm": ("linear", _linear),
         "embedding": ("embedding", _embedding)}


def _rank(value: Any) -> int | None:
    example = value.meta.get("example") if isinstance(value, fx.Node) else None
    return len(example[1]) if example is not None else None


def _runs(alias: Alias, axis: int, wanted: tuple[int, ...], decision: Decision) -> bool:
    """Does this axis of the operand run over exactly these axes of the constant? (An axis of one entry runs over none.)"""
    return alias.axes[axis] == wanted or (alias.shape[axis] == 1 and not alias.axes[axis]
                                          and all(decision.constant.shape[a] == 1 for a in wanted))


def _constant_chain(node: fx.Node) -> bool:
    """Does the operand depend on nothing but the stored parts?"""
    while "unpacks" not in node.meta and "part_of" not in node.meta:
        inputs = node.all_input_nodes
        if len(inputs) != 1:
            return False
        node = inputs[0]
    return True


def _parts(graph: fx.Graph, weight: fx.Node, decision: Decision, rows: slice) -> list[fx.Node]:
    """The stored parts behind an unpacked weight, cut to ``rows`` of the matrix."""
    found: dict[str, fx.Node] = {}
    pending = [weight]
    while pending:
        node = pending.pop()
        if node.meta.get("part_of") == decision.constant.name:
            found[node.meta["part"]] = node
        else:
            pending.extend(node.all_input_nodes)
    for step in ("prev", "next"):              # parts that the unpacking does not read stand beside those that it does
        node = getattr(next(iter(found.values())), step)
        while node.meta.get("part_of") == decision.constant.name:
            found.setdefault(node.meta["part"], node)
            node = getattr(node, step)
    parts = [found[name] for name in decision.scheme.parts]
    if rows == slice(None):
        return parts
    cut = []
    for part in parts:
        if part.meta.get("single_row"):
            cut.append(part)
            continue
        piece = graph.call_method("narrow", (part, 0, rows.start, rows.stop - rows.start))
        piece.meta.update(module=weight.meta["module"], unpacks=decision.constant.name)
        cut.append(piece)
    return cut


def _replace(graph: fx.Graph, node: fx.Node, function: Any, args: tuple) -> fx.Node:
    new = graph.call_function(function, args)
    new.meta = {k: v for k, v in node.meta.items() if k != "alias"}
    new.meta["target"] = node.meta.get("target", node.name)
    schema = getattr(function, "_schema", None)
    new.meta["kernel"] = schema.name.replace("::", ".") if schema is not None else getattr(function, "__name__", "fused")
    example = args[0].meta.get("example") if isinstance(args[0], fx.Node) else None
    new.meta["rows"] = math.prod(example[1][:-1]) if example is not None else 0
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new
