"""TABLE: which operators carry a weight, which of their arguments that is, and which of its axes they sum over.

One row of `CARRIERS` is one operator under all the names it has in torch: a function, a tensor method, an ATen
overload. To add an operator, add a row and a sample call in ``tests/test_carriers.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .constants import Alias

__all__ = ["CARRIERS", "Carrier", "Use", "carrier_of", "observed_use"]

Axes = tuple[int, ...]


def _last(ndim: int, call: Mapping[str, Any]) -> Axes:
    return (ndim - 1,)


def _before_last(ndim: int, call: Mapping[str, Any]) -> Axes:
    return (ndim - 2,) if ndim > 1 else (0,)


def _all_but_first(ndim: int, call: Mapping[str, Any]) -> Axes:
    return tuple(range(1, ndim))


def _all_but_second(ndim: int, call: Mapping[str, Any]) -> Axes:
    return (0, *range(2, ndim))


def _einsum(position: int) -> Callable[[int, Mapping[str, Any]], Axes]:
    def reduced(ndim: int, call: Mapping[str, Any]) -> Axes:
        inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
        labels = inputs.split(",")[position]
        if "..." in labels:
            before, _, after = labels.partition("...")
            labels = before + "." * (ndim - len(before) - len(after)) + after
        if not arrow:
            output = "".join(c for c in inputs if c.isalpha() and inputs.count(c) == 1) + "."
        output = output.replace("...", ".")
        return tuple(i for i, c in enumerate(labels) if c not in output)
    return reduced


def _tensordot(position: int) -> Callable[[int, Mapping[str, Any]], Axes]:
    def reduced(ndim: int, call: Mapping[str, Any]) -> Axes:
        dims = call.get("dims", 2)
        if isinstance(dims, int):
            return tuple(range(ndim - dims, ndim)) if position == 0 else tuple(range(dims))
        chosen = dims[position]
        return tuple(d % ndim for d in ((chosen,) if isinstance(chosen, int) else chosen))
    return reduced


@dataclasses.dataclass(frozen=True)
class Carrier:
    """One operator: its ``names``, its parameters in order, and for each that may be the weight, the axes summed over.

    ``activation`` is the parameter that a scheme may quantize beside the weight; ``fused`` names the operator of a scheme that computes
    the whole call; ``listed``: the weight's parameter holds a list of weights (recurrent layers).
    """

    op: str
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    weights: Mapping[str, Callable[[int, Mapping[str, Any]], Axes]]
    activation: str | None = None
    fused: str | None = None
    listed: bool = False

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by parameter, however they were spelled."""
        if self.op == "einsum":
            operands = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[1:]
            return {"equation": args[0] if args else kwargs.get("equation"),
                    **dict(zip(self.parameters[1:], operands, strict=False))}
        if self.listed and len(args) > 3 and isinstance(args[3], (list, tuple)):      # a packed sequence: data and its batch sizes
            args = (args[0], *args[2:])
        return {**dict(zip(self.parameters, args, strict=False)), **{ALIASES.get(k, k) if self.op == "matmul" else k: v
                                                                      for k, v in kwargs.items()}}


ALIASES = {"mat2": "other", "tensor2": "other"}          # what mm, bmm and linalg.matmul call the second factor
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")

CARRIERS: tuple[Carrier, ...] = (
    Carrier("linear", ("linear",), ("input", "weight", "bias"), {"weight": _last}, "input", "linear"),
    Carrier("bilinear", ("bilinear",), ("input1", "input2", "weight", "bias"), {"weight": _all_but_first}),
    Carrier("matmul", ("matmul", "__matmul__", "mm", "bmm", "linalg_matmul"), ("input", "other"),
            {"input": _last, "other": _before_last}, "input", "linear"),
    Carrier("addmm", ("addmm",), ("bias", "mat1", "mat2"), {"mat1": _last, "mat2": _before_last}, "mat1", "linear"),
    Carrier("baddbmm", ("baddbmm", "addbmm"), ("bias", "batch1", "batch2"), {"batch1": _last, "batch2": _before_last}),
    Carrier("grouped_mm", ("_grouped_mm", "grouped_mm"), ("input", "mat2", "offs"), {"mat2": _before_last}),
    Carrier("mv", ("mv",), ("input", "vec"), {"input": _last}),
    Carrier("addmv", ("addmv",), ("bias", "mat", "vec"), {"mat": _last}),
    Carrier("inner", ("inner",), ("input", "other"), {"input": _last, "other": _last}),
    Carrier("tensordot", ("tensordot",), ("a", "b", "dims"), {"a": _tensordot(0), "b": _tensordot(1)}),
    Carrier("multi_dot", ("linalg_multi_dot",), ("tensors",), {"tensors": _last}, listed=True),
    Carrier("einsum", ("einsum",), ("equation", "first", "second", "third", "fourth", "fifth"),
            dict(zip(("first", "second", "third", "fourth", "fifth"), map(_einsum, range(5)), strict=True))),
    Carrier("conv1d", ("conv1d",), _CONV, {"weight": _all_but_first}, "input"),
    Carrier("conv2d", ("conv2d",), _CONV, {"weight": _all_but_first}, "input"),
    Carrier("conv3d", ("conv3d",), _CONV, {"weight": _all_but_first}, "input"),
    Carrier("conv_transpose1d", ("conv_transpose1d",), _CONV_TRANSPOSE, {"weight": _all_but_second}, "input"),
    Carrier("conv_transpose2d", ("conv_transpose2d",), _CONV_TRANSPOSE, {"weight": _all_but_second}, "input"),
    Carrier("conv_transpose3d", ("conv_transpose3d",), _CONV_TRANSPOSE, {"weight": _all_but_second}, "input"),
    Carrier("embedding", ("functional.embedding",), ("input", "weight", "padding_idx", "max_norm"), {"weight": _last},
            fused="embedding"),
    Carrier("embedding", ("embedding",), ("weight", "indices"), {"weight": _last}, fused="embedding"),
    Carrier("embedding_bag", ("functional.embedding_bag",), ("input", "weight", "offsets", "max_norm"), {"weight": _last}),
    Carrier("embedding_bag", ("embedding_bag",), ("weight", "indices", "offsets"), {"weight": _last}),
    Carrier("lstm", ("lstm",), ("input", "hx", "params"), {"params": _last}, "input", listed=True),
    Carrier("gru", ("gru",), ("input", "hx", "params"), {"params": _last}, "input", listed=True),
    Carrier("rnn", ("rnn_tanh", "rnn_relu"), ("input", "hx", "params"), {"params": _last}, "input", listed=True),
    Carrier("lstm_cell", ("lstm_cell",), _CELL, {"w_ih": _last, "w_hh": _last}, "input"),
    Carrier("gru_cell", ("gru_cell",), _CELL, {"w_ih": _last, "w_hh": _last}, "input"),
    Carrier("rnn_cell", ("rnn_tanh_cell", "rnn_relu_cell"), _CELL, {"w_ih": _last, "w_hh": _last}, "input"),
)
_BY_NAME = {name: carrier for carrier in CARRIERS for name in carrier.names}


@dataclasses.dataclass(frozen=True)
class Use:
    """One weight of one call: the operator, its argument, the constant behind it, the constant's axes summed over, and where in the
    constant's memory the argument begins."""

    op: str
    operand: str
    constant: str
    reduced: Axes
    groups: int = 1
    offset: int = 0


def name_of_target(target: Any) -> str:
    """``linear`` for F.linear, ``matmul`` for the @ operator and Tensor.matmul, ``conv2d`` for aten.conv2d.default."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        return name if space == "aten" else target._schema.name
    name = getattr(target, "__name__", "")
    home = getattr(target, "__module__", None) or "torch"
    if home == "torch.nn.functional":
        return f"functional.{name}" if f"functional.{name}" in _BY_NAME else name
    return name if home.startswith("torch") or home in ("_operator", "builtins") else ""


def carrier_of(target: Any) -> Carrier | None:
    """The row of the table for the target of a node, or for a function."""
    return _BY_NAME.get(name_of_target(target))


def observed_use(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alias_of: Callable[[Any], Alias | None]) -> Iterator[Use]:
    """The constants that a call multiplies by or looks up in; ``alias_of`` tells for an argument which constant it views."""
    carrier = carrier_of(target)
    if carrier is None:
        return
    call = carrier.bind(args, kwargs)
    for operand, axes in carrier.weights.items():
        values = call.get(operand)
        for index, value in enumerate(values if carrier.listed and isinstance(values, (list, tuple)) else (values,)):
            alias = alias_of(value) if value is not None else None
            if alias is None or len(alias.axes) < 2:
                continue
            reduced = {a for axis in axes(len(alias.axes), call) for a in alias.axes[axis]}
            groups = call.get("groups", 1) if carrier.op.startswith("conv_transpose") else 1
            yield Use(carrier.op, f"{operand}.{index}" if carrier.listed else operand, alias.constant,
                      tuple(sorted(reduced)), groups if isinstance(groups, int) else 1, alias.offset)
