"""Which values of a graph are changed in place: a rule that reads one earlier or later than the graph did must know.

An operator gives back memory of its own, or may give back that of its inputs, as views do: only those of `FRESH` never do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import fx

from ..capture.operators import SIZE_NUMBERS, STRIDE_NUMBERS, is_mutating, name_of

__all__ = ["changed_after", "changed_between", "writers_of"]

FRESH = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "bmm", "addmm",
    "einsum", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "add", "sub", "mul", "div", "truediv", "pow",
    "neg", "abs", "exp", "sqrt", "rsqrt", "cat", "concat", "stack", "relu", "relu6", "hardtanh", "leaky_relu", "gelu", "silu",
    "sigmoid", "tanh", "hardswish", "hardsigmoid", "elu", "selu", "mish", "softplus", "prelu", "softmax", "clamp", "clip", "where",
    "mean", "sum", "amax", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate", "embedding",
} | SIZE_NUMBERS | STRIDE_NUMBERS
FACTS = {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad"}         # of getattr


def writers_of(graph: fx.Graph) -> list[fx.Node]:
    """The calls that change a tensor in place, in order."""
    return [node for node in graph.nodes if _writes(node)]


def changed_after(node: fx.Node, writers: Iterable[fx.Node]) -> bool:
    """Does one of the ``writers`` that come after ``node`` change its memory?"""
    bases = _bases(node)
    return any(not bases.isdisjoint(_targets(w)) for w in writers if node < w)


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
    if node.op not in ("call_function", "call_method"):
        return False
    place = _place_of_inplace(node.target) if node.op == "call_function" and callable(node.target) else None
    return is_mutating(node.target, node.kwargs) or (place is not None and len(node.args) > place and node.args[place] is True)


@functools.cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    """Where a function of torch.nn.functional takes ``inplace``."""
    if getattr(F, getattr(function, "__name__", ""), None) is not function:
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


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
