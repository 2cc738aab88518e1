"""What the traced code gets for the value of a node: a proxy, a tuple of them, or a plain fact."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..program import Meta, Value, annotate, meta_of
from .aliases import alias_after
from .frames import where
from .operators import (
    BY_VALUES,
    COUNTED,
    OPEN_RANKS,
    SIZE_NUMBERS,
    STRIDE_NUMBERS,
    is_mutating,
    last_argument,
    name_of,
    sizes_by_values,
)
from .proxy import NumberProxy, Shape, TensorProxy, TraceError

if TYPE_CHECKING:
    from .tracer import Tracer

__all__ = ["wrapped"]

PLAIN = (type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type, torch.finfo, torch.iinfo)


def wrapped(tracer: Tracer, node: fx.Node, value: Any, proxies: list[Any]) -> Any:
    """The value of a node as the traced code gets it."""
    static = all(p.static for p in proxies)
    name = name_of(node.target)
    meta = meta_of(node)
    meta["droppable"] = not is_mutating(node.target, node.kwargs) and not isinstance(value, Tensor)
    if isinstance(value, Tensor):
        return _tensor(tracer, node, meta, value, proxies, static, name)
    if value is None or value is NotImplemented or isinstance(value, PLAIN):
        if isinstance(value, (torch.dtype, torch.device, str)):     # such as torch.result_type, or x.type()
            tracer.asked.facts |= {"dtype", "device"}
        return value
    if isinstance(value, (bool, int, float)):
        of_tensor = any(type(p) is TensorProxy for p in proxies)
        if name in STRIDE_NUMBERS:
            tracer.asked.facts.add("strides")
        from_values = any(p.by_values if type(p) is TensorProxy else p.from_values for p in proxies) or (
            of_tensor and name not in SIZE_NUMBERS | STRIDE_NUMBERS)
        if static and not from_values:
            for p in proxies:
                tracer.asked.ask(p, "rank")
            return value
        number = NumberProxy(node, tracer, value, from_values)
        return bool(number) if isinstance(value, bool) and not from_values and not of_tensor else number
    if isinstance(value, torch.Size) or (name == "stride" and isinstance(value, tuple)):
        tracer.asked.facts |= {"strides"} if name == "stride" else set()
        return Shape(_item(tracer, node, value, i, proxies) for i in range(len(value)))
    if type(value).__module__ == "numpy":
        raise TraceError(f"leaves torch for numpy at {where()}")
    if isinstance(value, (tuple, list)):
        return _pieces(tracer, node, value, proxies, static, name)
    if isinstance(value, complex):
        return value
    raise TraceError(f"gets a {type(value).__name__} from {name} at {where()}")


def _tensor(tracer: Tracer, node: fx.Node, meta: Meta, value: Tensor, proxies: list[Any], static: bool, name: str) -> TensorProxy:
    meta["value"] = Value(value.dtype, tuple(value.shape))
    tensors = [p for p in proxies if type(p) is TensorProxy]
    alias, pieces = alias_after(node, value, tensors, name, tracer.session)
    if alias is not None:
        meta["alias"] = alias
        meta["droppable"] = node.target is operator.getitem and pieces
    numbers = any(type(p) is NumberProxy and isinstance(p.example, int) and _of_input(p) for p in proxies)
    open_rank = any(p.open_rank for p in tensors) or (not static and (name in OPEN_RANKS or numbers))
    last = value.shape[-1] if value.dim() else None
    fixed = bool(tensors) and ((name == "linear" and len(tensors) > 1 and tensors[1].static) or (
        name in ("view", "reshape", "unflatten") and type(last_argument(node)) is int and last_argument(node) == last))
    wants_grad = any(p.wants_grad for p in tensors) and (value.is_floating_point() or value.is_complex())
    if wants_grad and not torch.is_grad_enabled():
        tracer.asked.facts.add("grad_off")
    by_values = any(p.by_values if type(p) is TensorProxy else p.from_values for p in proxies) or sizes_by_values(node, tensors, name)
    return TensorProxy(node, tracer, value, static and not by_values, open_rank, fixed, by_values,
                       wants_grad and name not in ("detach", "data"))


def _of_input(number: NumberProxy) -> bool:
    """Is it a number that the caller passed, or made of one?"""
    pending = [number.node]
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            if "value" not in node.meta:
                return True
        elif name_of(node.target) not in SIZE_NUMBERS:
            pending.extend(node.all_input_nodes)
    return False


def _pieces(tracer: Tracer, node: fx.Node, value: Any, proxies: list[Any], static: bool, name: str) -> Any:
    """A tuple or list of results: its length is a fact where that follows from no size."""
    tensors = [p for p in proxies if type(p) is TensorProxy]
    for p in tensors if static else ():
        tracer.asked.ask(p, "rank")
    alias, _ = alias_after(node, value, tensors, name, tracer.session)
    if alias is not None:
        meta_of(node)["pieces_of"] = alias
    fixed = bool(tensors) and tensors[0].fixed_last and last_argument(node, "dim") in (-1, tensors[0].example.dim() - 1)
    if name in COUNTED and not static and not fixed:
        count = tracer.graph.create_node("call_function", len, (node,), {})
        annotate(count, module=tracer.module, where=where(), droppable=True)
        tracer.asked.guard(NumberProxy(count, tracer, len(value), any(p.by_values for p in tensors) or name in BY_VALUES), int)
    items = [_item(tracer, node, value, i, proxies) for i in range(len(value))]
    if type(value) in (tuple, list):
        return type(value)(items)
    return type(value)._make(items) if hasattr(type(value), "_make") else type(value)(items)      # named tuples of torch


def _item(tracer: Tracer, node: fx.Node, value: Any, index: int, proxies: list[Any]) -> Any:
    item = tracer.graph.create_node("call_function", operator.getitem, (node, index), {})
    annotate(item, module=tracer.module, where=where())
    if "pieces_of" in node.meta:
        meta_of(item)["pieces_of"] = meta_of(node)["pieces_of"]
    piece = wrapped(tracer, item, value[index], proxies)
    if isinstance(value[index], Tensor):
        meta_of(item)["droppable"] = True
    if type(piece) is NumberProxy and name_of(node.target) == "tolist":
        piece.from_values = True
    return piece
