"""epilogues: what follows a convolution on codes becomes part of it.

    before    conv = inro_fx.conv_static(x, ...); norm = batch_norm(conv, ...); add = norm + dequantize_codes(r); relu = relu(add)
              quantize = inro_fx.quantize(relu, scale, zero)

    after     conv = inro_fx.conv_static(x, ..., residual=r, y_scale=scale, activation=clamp)         its result are codes

A batch norm is multiplied into the scales and the bias, which are derived from its tensors as they are: nothing is folded for good, and
training code that reads them finds them. `EXACT` changes no result but in the last digits; `CODES` belongs to `integers`, which has put
the quantize and dequantize nodes there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..carriers import name_of_target
from ..program import Context, Program, annotate, derived, meta_of, shape_of
from .driver import Match, Rule, apply_rules
from .writes import changed_between

__all__ = ["CODES", "EXACT", "argument", "epilogue_of", "epilogues", "give", "is_conv", "with_arguments"]


def epilogues(program: Program, context: Context) -> Program:
    """Batch norms and activations become part of the convolution before them."""
    return apply_rules(program, context, EXACT)


# ---- calls of the operators, by the names of their arguments ----

def _names(node: fx.Node) -> list[str]:
    schema: Any = getattr(node.target, "_schema", None)
    return [a.name for a in schema.arguments]


def is_conv(node: Any, name: str = "inro_fx::conv_static") -> bool:
    """Is the node a call of this operator?"""
    schema = getattr(node.target, "_schema", None) if isinstance(node, fx.Node) and node.op == "call_function" else None
    return schema is not None and schema.name == name


def argument(node: fx.Node, name: str) -> Any:
    """What a call of one of our operators is given for an argument."""
    return node.args[_names(node).index(name)]


def with_arguments(graph: fx.Graph, node: fx.Node, **changes: Any) -> fx.Node:
    """The same call with other arguments."""
    new = graph.call_function(_target(node), _arguments(node, changes))
    annotate(new, kernel=meta_of(node).get("kernel", ""), weight_dtype=meta_of(node).get("weight_dtype", torch.float32))
    return new


def _target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _arguments(node: fx.Node, changes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(changes.get(name, given) for name, given in zip(_names(node), node.args, strict=True))


def give(node: fx.Node, **changes: Any) -> None:
    """Gives the call itself other arguments."""
    node.args = _arguments(node, changes)


def _plain(node: Any) -> bool:
    """Is it a convolution whose result are its products as floats, for one reader?"""
    return is_conv(node) and len(node.users) == 1 and not argument(node, "activation") \
        and argument(node, "residual") is None and argument(node, "y_scale") is None


def _moved(match: Match) -> str | None:
    """Why a convolution may not be computed where the last node of the match stands."""
    conv = match.nodes[-2]
    changed = changed_between(conv, match.root, (argument(conv, "x"), _residual(conv)))
    return "what the convolution reads is changed in place before that" if changed else None


def _residual(conv: fx.Node) -> Any:
    return argument(conv, "residual") if is_conv(conv) else None


# ---- batch norms ----

NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _norm_of(node: fx.Node) -> dict[str, Any]:
    return {"weight": None, "bias": None, "training": False, "eps": 1e-5, **dict(zip(NORM, node.args, strict=False)), **node.kwargs}


def _find_norm(node: fx.Node, context: Context) -> Match | None:
    if node.target is not F.batch_norm:
        return None
    conv = _norm_of(node)["input"]
    one = isinstance(conv, fx.Node) and len(conv.users) == 1 and (_plain(conv) or is_conv(conv, "inro_fx::conv"))
    return Match.of(conv, node) if one else None


def _refuse_norm(match: Match, context: Context) -> str | None:
    call = _norm_of(match.root)
    if call["training"] is not False or call["running_mean"] is None or call["running_var"] is None or type(call["eps"]) is not float:
        return "it normalizes by the batch"
    if any(isinstance(call[n], fx.Node) and call[n].op != "get_attr" for n in ("running_mean", "running_var", "weight", "bias")):
        return "its statistics are computed"
    return _moved(match)


@dataclasses.dataclass(frozen=True)
class _Normed:
    """A convolution's scale or bias with a batch norm in it; ``given``: which of the sources there are."""

    eps: float
    given: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return "normed"

    def factor(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        named = dict(zip(self.given, sources, strict=True))
        factor = (named["running_var"].float() + self.eps).rsqrt()
        return factor * named["weight"].float() if "weight" in named else factor, named


class NormedScale(_Normed):
    """scale * weight / sqrt(running_var + eps) [out, 1]"""

    def __call__(self, *sources: Tensor) -> Tensor:
        factor, named = self.factor(sources)
        return named["scale"] * factor.unsqueeze(1)


class NormedBias(_Normed):
    """(conv's bias - running_mean) * weight / sqrt(running_var + eps) + bias [out]"""

    def __call__(self, *sources: Tensor) -> Tensor:
        factor, named = self.factor(sources)
        shifted = -named["running_mean"].float() if "conv_bias" not in named else named["conv_bias"].float() - named["running_mean"].float()
        whole = shifted * factor if "bias" not in named else torch.addcmul(named["bias"].float(), shifted, factor)
        return whole.to(named["running_mean"].dtype)


def _fuse_norm(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    conv, call = match.nodes[0], _norm_of(match.root)

    def made(kind: type[NormedScale | NormedBias], **sources: Any) -> fx.Node:
        here = {name: node for name, node in sources.items() if node is not None}
        return derived(graph, list(here.values()), kind(call["eps"], tuple(here)))
    scale = made(NormedScale, scale=argument(conv, "scale"), running_var=call["running_var"], weight=call["weight"])
    bias = made(NormedBias, running_mean=call["running_mean"], running_var=call["running_var"], weight=call["weight"], bias=call["bias"],
                conv_bias=argument(conv, "bias"))
    return with_arguments(graph, conv, scale=scale, bias=bias)


# ---- activations ----

def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _clamp(low: Any, high: Any) -> tuple[int, float, float] | None:
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return (1, float(low), float(high)) if _number(low) and _number(high) and low <= high else None


def _given(names: tuple[str, ...], node: fx.Node, **defaults: Any) -> dict[str, Any]:
    return {**defaults, **dict(zip(names, node.args[1:], strict=False)), **node.kwargs}


def _clamped(node: fx.Node) -> tuple[int, float, float] | None:
    call = _given(("min", "max"), node, min=None, max=None)
    return _clamp(call["min"], call["max"])


def _hardtanh(node: fx.Node) -> tuple[int, float, float] | None:
    call = _given(("min_val", "max_val"), node, min_val=-1.0, max_val=1.0)
    return _clamp(call["min_val"], call["max_val"])


def _leaky(node: fx.Node) -> tuple[int, float, float] | None:
    slope = _given(("negative_slope",), node, negative_slope=0.01)["negative_slope"]
    return (2, float(slope), 0.0) if _number(slope) else None


def _gelu(node: fx.Node) -> tuple[int, float, float] | None:
    return (8, 0.0, 0.0) if _given(("approximate",), node, approximate="none")["approximate"] == "none" else None


ACTIVATIONS: dict[str, Callable[[fx.Node], tuple[int, float, float] | None]] = {       # (its number in ops/conv_static.py, low, high)
    "relu": lambda node: (1, 0.0, math.inf), "relu_": lambda node: (1, 0.0, math.inf), "relu6": lambda node: (1, 0.0, 6.0),
    "clamp": _clamped, "clip": _clamped, "hardtanh": _hardtanh, "leaky_relu": _leaky, "hardsigmoid": lambda node: (3, 0.0, 0.0),
    "hardswish": lambda node: (4, 0.0, 0.0), "sigmoid": lambda node: (5, 0.0, 0.0), "silu": lambda node: (6, 0.0, 0.0),
    "tanh": lambda node: (7, 0.0, 0.0), "gelu": _gelu}


def epilogue_of(node: fx.Node) -> tuple[int, float, float] | None:
    """An activation that a convolution can have after it: its number in ops/conv_static.py, low and high; None for other nodes."""
    name = name_of_target(node.target).removeprefix("functional.") if node.op in ("call_function", "call_method") else ""
    found = ACTIVATIONS.get(name)
    return found(node) if found is not None else None


def _find_activation(node: fx.Node, context: Context) -> Match | None:
    conv: Any = node.args[0] if node.args else None
    fits = is_conv(conv) and len(conv.users) == 1 and not argument(conv, "activation") and argument(conv, "y_scale") is None
    return Match.of(conv, node) if fits and epilogue_of(node) is not None else None


def _fuse_activation(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    found = epilogue_of(match.root)
    assert found is not None
    return with_arguments(graph, match.nodes[0], activation=found[0], low=found[1], high=found[2])


# ---- sums, and results as codes ----

def _find_sum(node: fx.Node, context: Context) -> Match | None:
    name = name_of_target(node.target) if node.op in ("call_function", "call_method") else ""
    if name not in ("add", "add_", "iadd", "__add__", "__iadd__") or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if _plain(first) and _plain(second):
        conv: Any = max(first, second)                                 # type: ignore[type-var]    # the later one: the other is its residual
    else:
        conv = next((a for a in node.args if _plain(a)), None)
    if conv is None:
        return None
    other: Any = second if first is conv else first
    return Match.of(other, conv, node) if is_conv(other, "inro_fx::dequantize_codes") else Match.of(conv, node)


def _terms(match: Match) -> tuple[fx.Node, Any]:
    """The convolution that takes the sum, and what is added to it."""
    conv = match.nodes[-2]
    first, second = match.root.args
    return conv, second if first is conv else first


def _refuse_sum(match: Match, context: Context) -> str | None:
    conv, other = _terms(match)
    if other is conv or shape_of(other) != shape_of(match.root) or shape_of(conv) != shape_of(match.root):
        return "what is added is of another shape"
    if len({meta_of(node)["value"].dtype for node in (conv, other, match.root)}) > 1:
        return "what is added is of another dtype"
    return _moved(match) if _plain(other) or is_conv(other, "inro_fx::dequantize_codes") else "what is added is not on codes"


def _fuse_sum(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    conv, other = _terms(match)
    if not is_conv(other):
        codes, scale, zero, _ = other.args
        return with_arguments(graph, conv, residual=codes, r_scale=scale, r_zero=zero)
    give(other, channels_last=True)                                    # floats that are read where they are added
    return with_arguments(graph, conv, residual=other)


def _find_codes(node: fx.Node, context: Context) -> Match | None:
    conv: Any = node.args[0] if is_conv(node, "inro_fx::quantize") else None
    fits = is_conv(conv) and len(conv.users) == 1 and argument(conv, "y_scale") is None and not argument(conv, "channels_last")
    return Match.of(conv, node) if fits else None


def _fuse_codes(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    _, scale, zero = match.root.args
    new = with_arguments(graph, match.nodes[0], y_scale=scale, y_zero=zero)
    annotate(new, format=meta_of(match.root)["format"])
    return new


def _refuse_moved(match: Match, context: Context) -> str | None:
    return _moved(match)


EXACT: tuple[Rule, ...] = (
    Rule("fuse batch norm", _find_norm, _refuse_norm, _fuse_norm),
    Rule("fuse activation", _find_activation, _refuse_moved, _fuse_activation),
)
CODES: tuple[Rule, ...] = (
    *EXACT,
    Rule("fuse sum", _find_sum, _refuse_sum, _fuse_sum),
    Rule("results as codes", _find_codes, _refuse_moved, _fuse_codes),
)
