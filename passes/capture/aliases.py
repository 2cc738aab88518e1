"""Which weight a node's value is a view of, or an elementwise copy: what operators do to weights before they use them."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from ..constants import Alias, alias_of_view
from ..program import meta_of
from .operators import is_mutating
from .proxy import TensorProxy

if TYPE_CHECKING:
    from .session import Session

__all__ = ["alias_after"]

ELEMENTWISE = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous", "detach", "mul", "div",
               "true_divide", "truediv", "__mul__", "__truediv__", "__rmul__"}
QUOTIENTS = {"div", "true_divide", "truediv", "__truediv__"}        # of a weight, not by one: 1 / w enlarges the error of a code


def alias_after(node: fx.Node, value: Any, tensors: list[TensorProxy], name: str, session: Session) -> tuple[Alias | None, bool]:
    """The alias of a node's ``value`` (or of the tuple that it is pieces of), and whether it is a piece of a tuple."""
    sources = [p for p in tensors if "alias" in p.node.meta] or _pieces(node)
    nodes = {s if isinstance(s, fx.Node) else s.node for s in sources}
    if len(nodes) != 1 or is_mutating(node.target, node.kwargs):
        return None, False
    source = meta_of(next(iter(nodes)))
    piece = "alias" not in source
    alias = source["pieces_of"] if piece else source["alias"]
    if isinstance(value, (tuple, list)):
        return alias, piece
    seen = alias_of_view(session.constants[alias.constant], session.tensor(alias.constant), value)
    if seen is not None:
        return seen, piece
    first = next((p for p in tensors if "alias" in p.node.meta), None)
    if first is not None and isinstance(value, Tensor) and value.shape == first.example.shape and name in ELEMENTWISE:
        divides = name in QUOTIENTS and node.args[0] is not first.node
        if not divides and (all(p is first for p in tensors) or name in ("type_as", "to")):
            return dataclasses.replace(alias, view=False), piece
    return None, piece


def _pieces(node: fx.Node) -> list[Any]:
    """The tuple of views that a getitem takes from."""
    of = node.args[0] if node.target is operator.getitem and node.args else None
    return [of] if isinstance(of, fx.Node) and "pieces_of" in of.meta else []
