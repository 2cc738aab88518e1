"""fuse, for convolutions: unpacking and the convolution after it become one call of the scheme's operator on its codes.

    before    dequantize = inro_fx.dequantize(codes, scale, ...); weight = dequantize.reshape(...).permute(...)
              conv2d = conv2d(x, weight, bias, 2, 1)

    after     conv2d = inro_fx.conv(x, codes, scale, bias, (3, 3), (2, 2), (1, 1), (0, 0), (1, 1), 1, False, ...)

A convolution that reads and writes about as much as it computes (depthwise ones above all) stays a float one, which is no slower.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import fx

from ..program import Context, meta_of, shape_of
from ..scheme import Layout, activation_of_scheme
from ..solve.plan import Weight
from .driver import Match, Rule
from .uses import call_of, constant_chain, finds, fused, operator_of, parts_of, used, whole

__all__ = ["CONVOLUTIONS", "LEAST", "Geometry", "density_of", "geometry_of"]

LEAST = 32                # products for each number that is read or written, from which integers were faster (docs/benchmarks.md)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution, one for each dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def arguments(self) -> tuple[Any, ...]:
        return dataclasses.astuple(self)


def _each(value: Any, dims: int) -> tuple[int, ...] | None:
    """A number or a sequence of them as one for each dimension; None for what is neither."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    given = given * dims if len(given) == 1 else given
    return given if len(given) == dims and all(type(v) is int for v in given) else None


def geometry_of(node: fx.Node, weight: Weight) -> Geometry | str:
    """The geometry of a call of a convolution, or why it has none that is fixed."""
    call = call_of(node)
    transposed = "transpose" in getattr(node.target, "__name__", str(node.target))
    shape, dims = weight.constant.shape, len(weight.constant.shape) - 2
    kernel, groups = shape[2:], call.get("groups", 1)
    stride, dilation = _each(call.get("stride", 1), dims), _each(call.get("dilation", 1), dims)
    output_padding, padding = _each(call.get("output_padding", 0), dims), call.get("padding", 0)
    if padding == "valid":
        padding = 0
    elif padding == "same" and dilation is not None:
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(t % 2 for t in total):
            return "padding of another size on each side"
        padding = [t // 2 for t in total]
    each = _each(padding, dims)
    if stride is None or dilation is None or output_padding is None or each is None or type(groups) is not int or min(stride) < 1:
        return "its stride, padding, dilation or groups are computed"
    return Geometry(kernel, stride, each, output_padding, dilation, groups, transposed)


def density_of(node: fx.Node, weight: Weight) -> float:
    """Products for each number that a convolution reads or writes, at the sizes of the example; 0 where those are unknown."""
    transposed = weight.layout.channels[0] != 0 or len(weight.layout.channels) > 1
    x, y = shape_of(node.all_input_nodes[0]), shape_of(node)
    if not x or not y:
        return 0.0
    products = math.prod((x if transposed else y)[2:]) * weight.layout.rows * weight.layout.columns
    return products / max(1, math.prod(x[1:]) + math.prod(y[1:]))


def _refuse(match: Match, context: Context) -> str | None:
    node = match.root
    use, weight = used(node, context)
    operator = weight.scheme.operator("conv")
    if isinstance(operator, str):
        return operator
    call = call_of(node)
    x, shape = shape_of(call.get("input")), weight.constant.shape
    alias = whole(call[use.operand])
    if alias is None or alias.shape != shape or alias.axes != tuple((a,) for a in range(len(shape))):
        return "the weight is a part or a view of another one"
    if not constant_chain(call[use.operand]):
        return "the weight depends on the input"
    if weight.layout != Layout.of(shape, use.reduced, use.groups, taps_first=True):
        return "the weight is stored for another operator"
    geometry = geometry_of(node, weight)
    if isinstance(geometry, str):
        return geometry
    if x is None or len(x) != len(shape):
        return "one sample without a dimension for the batch"
    if activation_of_scheme(weight.scheme) != "static" and density_of(node, weight) < LEAST:
        return "it reads and writes about as much as it computes: floats are as fast"
    return None


def _fuse(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    use, weight = used(match.root, context)
    call, geometry = call_of(match.root), geometry_of(match.root, weight)
    assert isinstance(geometry, Geometry)
    function, trailing = operator_of(weight, "conv")
    parts = parts_of(graph, call[use.operand], weight, slice(None))
    if activation_of_scheme(weight.scheme) == "static":
        codes, scale, _, input_scale, input_zero = parts
        rest = (input_scale, input_zero, call.get("bias"), *(None,) * 5, *geometry.arguments, 0, 0.0, 0.0, False, weight.constant.dtype)
        new = fused(graph, function, (call["input"], codes, scale, *rest))
        meta_of(new)["weight_dtype"] = weight.constant.dtype
        return new
    return fused(graph, function, (call["input"], *parts, call.get("bias"), *geometry.arguments, *trailing))


CONVOLUTIONS: tuple[Rule, ...] = (Rule("fuse conv", finds("conv"), _refuse, _fuse),)
