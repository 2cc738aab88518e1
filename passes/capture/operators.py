"""What is known of torch's functions by their names: whose numbers follow from sizes, and who writes to what it was given."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .proxy import TensorProxy

__all__ = ["BY_VALUES", "COUNTED", "GIVE_BACK", "OPEN_RANKS", "RESHAPES", "SIZE_NUMBERS", "STRIDE_NUMBERS", "follows_from_inputs",
           "is_mutating", "last_argument", "name_of", "sizes_by_values"]

SIZE_NUMBERS = {"size", "numel", "nelement", "__len__", "len", "sym_size", "sym_numel"}            # they follow from sizes
STRIDE_NUMBERS = {"stride", "storage_offset", "is_contiguous", "sym_stride", "sym_storage_offset"}
COUNTED = {"unbind", "split", "chunk", "tensor_split", "tolist", "where", "nonzero", "hsplit", "vsplit", "dsplit", "unsafe_split",
           "unsafe_chunk", "split_with_sizes", "broadcast_tensors", "meshgrid"}         # their number follows from sizes
OPEN_RANKS = {"squeeze", "squeeze_", "squeeze_copy", "atleast_1d", "atleast_2d", "atleast_3d"}      # the rank follows from sizes
BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim", "bincount", "histogramdd", "_unique2"}
GIVE_BACK = {"contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
             "cpu", "cuda", "dropout", "alpha_dropout", "resolve_conj", "resolve_neg"}    # their input, where there is nothing to do
RESHAPES = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "as_strided_", "resize_", "resize_as_", "set_"}


def is_mutating(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Does a call of this target change one of its arguments in place?"""
    name = name_of(target)
    if kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return True
    return (name.endswith("_") and not name.endswith("__")) or target in _IN_PLACE or name == "__setitem__"


_IN_PLACE = {operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
             operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
             operator.ilshift, operator.irshift, operator.imatmul}


def name_of(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def follows_from_inputs(node: fx.Node) -> bool:
    """Is the number computed from the sizes of inputs, and from numbers among them, alone?"""
    pending, seen = [node], {node}
    while pending:
        at = pending.pop()
        if at.op == "placeholder":
            continue
        of_tensor = name_of(at.target) in SIZE_NUMBERS | {"dim"} | STRIDE_NUMBERS
        if at.op not in ("call_method", "call_function") or not at.all_input_nodes \
                or any("value" in i.meta and not (of_tensor and i.op == "placeholder") for i in at.all_input_nodes):
            return False
        pending.extend(i for i in at.all_input_nodes if i not in seen)
        seen.update(at.all_input_nodes)
    return True


def sizes_by_values(node: fx.Node, tensors: list[TensorProxy], name: str) -> bool:
    """Do the sizes of an operator's result depend on the values of its arguments?"""
    if name in BY_VALUES or (name == "where" and len(node.args) == 1):
        return True
    if name == "repeat_interleave":
        return len(tensors) > 1
    return name in ("getitem", "__getitem__") and any(p.example.dtype in (torch.bool, torch.uint8) for p in tensors[1:])


def last_argument(node: fx.Node, keyword: str = "") -> Any:
    """The last argument of a call, or the one of that name."""
    if keyword and keyword in node.kwargs:
        return node.kwargs[keyword]
    last = node.args[-1] if len(node.args) > 1 else None
    return last[-1] if isinstance(last, (tuple, list)) and last else last
