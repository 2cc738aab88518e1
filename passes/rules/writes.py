"""Which values of a graph are changed in place: a rule that reads one earlier or later than the graph did must know.

An operator gives back memory of its own, or may give back that of its inputs, as views do: only those of `FRESH` never do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from ..capture.operators import SIZE_NUMBERS, STRIDE_NUMBERS, is_mutating, name_of

__all__ = ["changed_after", "changed_between", "last_writers"]

FRESH = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "bmm", "addmm",
    "einsum", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "add", "sub", "mul", "div", "truediv", "pow",
    "neg", "abs", "exp", "sqrt", "rsqrt", "cat", "concat", "stack", "relu", "relu6", "hardtanh", "leaky_relu", "gelu", "silu",
    "sigmoid", "tanh", "hardswish", "hardsigmoid", "elu", "selu", "mish", "softplus", "prelu", "softmax", "clamp", "clip", "where",
    "mean", "sum", "amax", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate", "embedding",
} | SIZE_NUMBERS | STRIDE_NUMBERS
FACTS = {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad"}         # of getattr


def last_writers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Of each value whose memory is changed in place, the last call that does."""
    return {target: node for node in graph.nodes if _writes(node) for target in _targets(node)}


def changed_after(node: fx.Node, writers: Mapping[fx.Node, fx.Node]) -> bool:
    """Does one of the `last_writers` that come after ``node`` change its memory?"""
    return any(base in writers and node < writers[base] for base in _bases(node))


def changed_between(start: fx.Node, end: fx.Node, values: Iterable[Any]) -> bool:
    """Is the memory of one of the values changed by a call between ``start`` and ``end``?"""
    written: set[fx.Node] = set()
    node = start.next
    while node is not end and node.op != "root":
        if _writes(node):
            written |= _targets(node)
        node = node.next
    return bool(written) and any(isinstance(v, fx.Node) and not _bases(v).isdisjoint(written) for v in values)


def _writes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and is_mutating(node.target, node.kwargs)


def _targets(writer: fx.Node) -> set[fx.Node]:
    """Whose memory a call changes."""
    given = [*writer.args[:1], writer.kwargs.get("out"), writer.kwargs.get("input"), writer.kwargs.get("self")]
    found: list[fx.Node] = []
    fx.node.map_arg(given, found.append)
    return set().union(*map(_bases, found))


def _bases(node: fx.Node) -> set[fx.Node]:
    """The values whose memory a value may have."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        here = pending.pop()
        if here in found:
            continue
        found.add(here)
        if _writes(here):
            pending += [a for a in (*here.args[:1], here.kwargs.get("out"), here.kwargs.get("input")) if isinstance(a, fx.Node)]
        elif not _is_fresh(here):
            pending += here.all_input_nodes
    return found


def _is_fresh(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name.startswith("inro_fx::"):
        return True
    if node.target is getattr:
        return node.args[1] in FACTS
    return name_of(node.target) in FRESH
