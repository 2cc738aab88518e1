"""fuse: unpacking and the operator after it become one call of the scheme's own operator, where it has one.

    before    dequantize = inro_fx.dequantize(codes, scale, ...)
              linear = linear(x, dequantize, bias)

    after     linear = inro_fx.linear(x, codes, scale, bias, ...)

A linear may be spelled linear(x, w), x @ w, x @ w.t(), mm or addmm, and its weight may be rows of a larger one (the packed
projections of attention); a lookup may be spelled embedding(ids, w), w[ids] or index_select; convolutions are in fuse_conv.py,
recurrent layers in fuse_recurrent.py. What is not fused stays unpack-then-operator, and says why in ``meta["unfused"]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..carriers import Use, arithmetic_before
from ..constants import Alias
from ..program import Context, Program, annotate, meta_of
from ..solve.plan import Weight, uses_of
from .driver import Match, Rule, apply_rules, drop_unread
from .fuse_conv import CONVOLUTIONS
from .fuse_recurrent import RECURRENT
from .uses import call_of, constant_chain, finds, fused, operator_of, parts_of, rank_of, used, whole

__all__ = ["FUSIONS", "fuse"]


def fuse(program: Program, context: Context) -> Program:
    """Operators on decided weights are fused where the scheme allows."""
    program = apply_rules(program, context, FUSIONS)
    drop_unread(program.graph)
    reasons = {node: reason for rule, node, reason in program.log if rule.startswith("fuse") and reason}
    for node in program.graph.nodes:
        for use in uses_of(node):
            if use.constant in context.weights:
                annotate(node, kernel=f"dequantize + {use.op}", unfused=reasons.get(node.name) or f"no rule fuses {use.op}")
                for step in arithmetic_before(node, use) if use.computed else ():
                    meta_of(step)["unpacks"] = use.constant
    return program


# ---- linear, matmul and addmm whose weight is a matrix, or rows of one ----

def _linear_operands(node: fx.Node, use: Use) -> tuple[Any, Any, Any]:
    """(input, weight, bias) of a linear in any of its spellings."""
    call = call_of(node)
    return call.get("mat1" if use.op == "addmm" else "input"), call[use.operand], None if use.op == "matmul" else call.get("bias")


def _refuse_linear(match: Match, context: Context) -> str | None:
    node = match.root
    use, weight = used(node, context)
    operator = weight.scheme.operator("linear")
    if isinstance(operator, str):
        return operator
    call, layout = call_of(node), weight.layout
    if use.operand in ("input", "mat1", "batch1"):
        return "the weight is the left factor"
    alias = whole(call[use.operand])
    if len(weight.constant.shape) != 2 or alias is None:
        return "the weight is not a plain matrix"
    if use.op == "addmm" and (call.get("beta", 1) != 1 or call.get("alpha", 1) != 1 or rank_of(call.get("bias")) != 1):
        return "addmm with a scaled or two-dimensional bias"
    out, inner = (0, 1) if use.op == "linear" else (1, 0)
    if len(alias.axes) != 2 or not _runs(alias, out, layout.channels, weight) or not _runs(alias, inner, layout.reduced, weight):
        return "the weight is used along another axis than it is stored"
    if not constant_chain(call[use.operand]):
        return "the part of the weight depends on the input"
    steps = (weight.constant.shape[1], 1)                     # of a contiguous matrix
    if any(alias.shape[axis] != 1 and alias.strides[axis] != steps[base[0]]
           for axis, base in ((out, layout.channels), (inner, layout.reduced))):
        return "the weight is a part of another one, with steps"
    if alias.shape[inner] != layout.columns:
        return "the weight is a part of another one, across its columns"
    if alias.shape[out] != layout.rows and (layout.channels != (0,) or alias.offset % layout.columns):
        return "the weight is a part of another one, across its rows"
    return None


def _fuse_linear(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    use, weight = used(match.root, context)
    x, operand, bias = _linear_operands(match.root, use)
    alias = meta_of(operand)["alias"]
    out = 0 if use.op == "linear" else 1
    rows = slice(None)
    if alias.shape[out] != weight.layout.rows:
        start = alias.offset // weight.layout.columns
        rows = slice(start, start + alias.shape[out])
    function, trailing = operator_of(weight, "linear")
    return fused(graph, function, (x, *parts_of(graph, operand, weight, rows), bias, *trailing, weight.layout.columns))


def _runs(alias: Alias, axis: int, wanted: tuple[int, ...], weight: Weight) -> bool:
    """Does this axis of the operand run over exactly these axes of the constant? (An axis of one entry runs over none.)"""
    return alias.axes[axis] == wanted or (alias.shape[axis] == 1 and not alias.axes[axis]
                                          and all(weight.constant.shape[a] == 1 for a in wanted))


# ---- lookups in a whole table: rows are gathered as codes and dequantized after ----

def _refuse_embedding(match: Match, context: Context) -> str | None:
    use, weight = used(match.root, context)
    operator = weight.scheme.operator("embedding")
    if isinstance(operator, str):
        return operator
    call = call_of(match.root)
    alias = whole(call[use.operand])
    if alias is None:
        return "the table is computed from the weight"
    if len(weight.constant.shape) != 2:
        return "the weight is no table of two axes"
    if not weight.layout.plain or alias.shape != weight.constant.shape or alias.axes != ((0,), (1,)):
        return "the table is a part of another weight"
    if call.get("dim", 0) not in (0, -2):
        return "the lookup is along another axis than the first"
    ids = _ids(call)
    seen = meta_of(ids).get("value") if isinstance(ids, fx.Node) else None
    if use.op in ("index", "index_select") and (seen is None or seen.dtype not in (torch.int64, torch.int32)):
        return "the index is no tensor of whole numbers in the first axis"
    if use.op == "index_select" and seen is not None and len(seen.shape) != 1:
        return "index_select with one number as a tensor"
    return None if constant_chain(call[use.operand]) else "the part of the table depends on the input"


def _ids(call: dict[str, Any]) -> Any:
    """What a lookup looks up: ``ids`` of embedding(ids, w), index_select(w, 0, ids), w[ids], w[ids, :] and w[ids, ...]."""
    ids = next((call[name] for name in ("indices", "index") if name in call), call.get("input"))
    whole = isinstance(ids, (tuple, list)) and all(i is ... or i is None or i == slice(None) for i in ids[1:])
    return ids[0] if whole and ids and (type(ids) is not list and None not in ids[1:]) else ids


def from_start(ids: Tensor, codes: Tensor, rows: int) -> Tensor:
    """The row that each index means: indexing takes negative ones, counted from the end, and ones on another device."""
    ids = ids.to(codes.device)
    return torch.where(ids < 0, ids + rows, ids)


def _fuse_embedding(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    use, weight = used(match.root, context)
    call = call_of(match.root)
    ids = _ids(call)
    function, trailing = operator_of(weight, "embedding")
    parts = parts_of(graph, call[use.operand], weight, slice(None))
    if use.op == "index":
        given, ids = ids, graph.call_function(from_start, (ids, parts[0], weight.constant.shape[0]))
        annotate(ids, module=meta_of(match.root)["module"], value=meta_of(given)["value"])
    new = fused(graph, function, (ids, *parts, *trailing, weight.layout.columns, weight.constant.dtype))
    meta_of(new)["weight_dtype"] = weight.constant.dtype
    return new


FUSIONS: tuple[Rule, ...] = (
    Rule("fuse linear", finds("linear"), _refuse_linear, _fuse_linear),
    Rule("fuse embedding", finds("embedding"), _refuse_embedding, _fuse_embedding),
    *CONVOLUTIONS,
    *RECURRENT,
)
