"""TABLE: which operators carry a weight, which of their arguments that is, and which of its axes they sum over.

One row of `CARRIERS` is one operator under all the names it has in torch: a function, a tensor method, an ATen
overload. To add an operator, add a row and a sample call in ``tests/test_carriers.py``.

A second table, `ARITHMETIC`, says what may happen to a weight on its way there: a convolution whose weight is standardized
carries it as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .constants import Alias
from .failures import InputError
from .program import meta_of, shape_of

__all__ = ["ARITHMETIC", "CARRIERS", "LOOKUPS", "Carrier", "Use", "arithmetic_before", "carrier_of", "computed_uses",
           "observed_use", "picked_use"]

Axes = tuple[int, ...]


def _last(ndim: int, call: Mapping[str, Any]) -> Axes:
    return (ndim - 1,)


def _before_last(ndim: int, call: Mapping[str, Any]) -> Axes:
    return (ndim - 2,) if ndim > 1 else (0,)


def _all_but_first(ndim: int, call: Mapping[str, Any]) -> Axes:
    return tuple(range(1, ndim))


def _all_but_second(ndim: int, call: Mapping[str, Any]) -> Axes:
    return (0, *range(2, ndim))


def _indexed(ndim: int, call: Mapping[str, Any]) -> Axes | None:
    """A lookup where a tensor or a list picks; numbers, slices and None make a view, which is no use."""
    index = call.get("index")
    items = index if isinstance(index, tuple) else (index,)
    picks = any(shape_of(i) is not None if isinstance(i, fx.Node) else isinstance(i, (Tensor, list)) for i in items)
    return _last(ndim, call) if picks else None


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
    """One operator: its ``names``, its parameters in order, and for each that may be the weight, the axes summed over (None where
    a call is no use of it).

    ``activation`` is the parameter that a scheme may quantize beside the weight; ``fused`` names the operator of a scheme that
    computes the whole call; ``listed``: the weight's parameter holds a list of weights (recurrent layers).
    """

    op: str
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    weights: Mapping[str, Callable[[int, Mapping[str, Any]], Axes | None]]
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
    Carrier("conv1d", ("conv1d",), _CONV, {"weight": _all_but_first}, "input", "conv"),
    Carrier("conv2d", ("conv2d",), _CONV, {"weight": _all_but_first}, "input", "conv"),
    Carrier("conv3d", ("conv3d",), _CONV, {"weight": _all_but_first}, "input", "conv"),
    Carrier("conv_transpose1d", ("conv_transpose1d",), _CONV_TRANSPOSE, {"weight": _all_but_second}, "input", "conv"),
    Carrier("conv_transpose2d", ("conv_transpose2d",), _CONV_TRANSPOSE, {"weight": _all_but_second}, "input", "conv"),
    Carrier("conv_transpose3d", ("conv_transpose3d",), _CONV_TRANSPOSE, {"weight": _all_but_second}, "input", "conv"),
    Carrier("embedding", ("functional.embedding",), ("input", "weight", "padding_idx", "max_norm"), {"weight": _last},
            fused="embedding"),
    Carrier("embedding", ("embedding",), ("weight", "indices"), {"weight": _last}, fused="embedding"),
    Carrier("embedding_bag", ("functional.embedding_bag",), ("input", "weight", "offsets", "max_norm"), {"weight": _last}),
    Carrier("embedding_bag", ("embedding_bag",), ("weight", "indices", "offsets"), {"weight": _last}),
    Carrier("index", ("getitem", "__getitem__", "index"), ("input", "index"), {"input": _indexed}, fused="embedding"),
    Carrier("index_select", ("index_select",), ("input", "dim", "index"), {"input": _last}, fused="embedding"),
    Carrier("lstm", ("lstm",), ("input", "hx", "params"), {"params": _last}, "input", "recurrent", listed=True),
    Carrier("gru", ("gru",), ("input", "hx", "params"), {"params": _last}, "input", "recurrent", listed=True),
    Carrier("rnn", ("rnn_tanh", "rnn_relu"), ("input", "hx", "params"), {"params": _last}, "input", "recurrent", listed=True),
    Carrier("lstm_cell", ("lstm_cell",), _CELL, {"w_ih": _last, "w_hh": _last}, "input", "recurrent"),
    Carrier("gru_cell", ("gru_cell",), _CELL, {"w_ih": _last, "w_hh": _last}, "input", "recurrent"),
    Carrier("rnn_cell", ("rnn_tanh_cell", "rnn_relu_cell"), _CELL, {"w_ih": _last, "w_hh": _last}, "input", "recurrent"),
)
LOOKUPS = frozenset({"embedding", "embedding_bag", "index", "index_select"})          # they pick rows and multiply nothing
_BY_NAME = {name: carrier for carrier in CARRIERS for name in carrier.names}
_BUILT_IN = frozenset(_BY_NAME)


def register_operator(operator: str | Callable[..., Any], parameters: Sequence[str],
                      weights: Mapping[str, Callable[[int, Mapping[str, Any]], Axes | None]]) -> None:
    """From now on, weights that go into ``operator`` are quantized: a row more in the table of operators that carry one.

    Args:
        operator: the function of torch, or its name.
        parameters: the names of its parameters, in order.
        weights: for each parameter that may be the weight, a function ``(number of axes of the weight, the call's arguments by name)``
            which gives the axes that the operator sums over: every other axis has scales of its own. None: this call is no use of it.

    Raises `InputError` for an operator that inro_fx knows itself, and for a weight that is no parameter. Registering one again
    replaces its row.

    >>> import torch
    >>> register_operator(torch.linalg.vecdot, ("x", "y", "dim"), {"y": lambda axes, call: (axes - 1,)})
    """
    name = operator if isinstance(operator, str) else str(getattr(operator, "__name__", ""))
    if not name:
        raise InputError(f"register_operator needs a function with a name, or its name, not {type(operator).__name__}")
    if name in _BUILT_IN:
        raise InputError(f"{name} is an operator that inro_fx knows itself")
    if not weights or not set(weights) <= set(parameters):
        raise InputError(f"register_operator({name}): the weights {', '.join(weights)} are not all among its parameters")
    if not all(callable(axes) for axes in weights.values()):
        raise InputError(f"register_operator({name}): for each weight, give a function of (axes, call) that gives the axes summed over")
    _BY_NAME[name] = Carrier(name.removeprefix("linalg_"), (name,), tuple(parameters), dict(weights))


@dataclasses.dataclass(frozen=True)
class Use:
    """One weight of one call: the operator, its argument, the constant behind it, the constant's axes summed over, and where in the
    constant's memory the argument begins; ``computed``: arithmetic stands between the constant and the argument."""

    op: str
    operand: str
    constant: str
    reduced: Axes
    groups: int = 1
    offset: int = 0
    computed: bool = False


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


def observed_use(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 alias_of: Callable[[Any], Alias | None]) -> Iterator[Use]:
    """The constants that a call multiplies by or looks up in; ``alias_of`` tells for an argument which constant it views."""
    return _uses(target, args, kwargs, lambda value: tuple(a for a in (alias_of(value),) if a is not None))


def picked_use(node: fx.Node, use: Use) -> Use:
    """The use of a call of a graph: weights picked from a stack (experts) are laid out for the operator that multiplies by them."""
    carrier = carrier_of(node.target)
    call = carrier.bind(node.args, node.kwargs) if carrier is not None and use.op in LOOKUPS else {}
    alias, shape = _alias(call.get(use.operand)), shape_of(node)
    if alias is None or shape is None or len(alias.axes) < 3 or isinstance(call.get("index"), tuple) or call.get("dim", 0) != 0:
        return use
    picked = dataclasses.replace(alias, axes=((0,),) * (len(shape) - len(alias.axes) + 1) + alias.axes[1:])
    after = (u for user in node.users for u in _uses(user.target, user.args, user.kwargs, lambda a: (picked,) if a is node else ()))
    return dataclasses.replace(use, reduced=next(after, use).reduced)


def computed_uses(node: fx.Node) -> Iterator[Use]:
    """The constants that a call of a graph multiplies by or looks up in after some arithmetic between stored tensors alone."""
    for use in _uses(node.target, node.args, node.kwargs, lambda value: () if _alias(value) else _flow(value, [MOST_STEPS]) or ()):
        yield dataclasses.replace(use, computed=True)


def _uses(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
          aliases_of: Callable[[Any], tuple[Alias, ...]]) -> Iterator[Use]:
    carrier = carrier_of(target)
    if carrier is None:
        return
    call = carrier.bind(args, kwargs)
    for operand, axes in carrier.weights.items():
        values = call.get(operand)
        for index, value in enumerate(values if carrier.listed and isinstance(values, (list, tuple)) else (values,)):
            for alias in aliases_of(value) if value is not None else ():
                summed = axes(len(alias.axes), call) if len(alias.axes) > 1 else None
                if summed is None:
                    continue
                reduced = {a for axis in summed for a in alias.axes[axis]}
                groups = call.get("groups", 1) if carrier.op.startswith("conv_transpose") else 1
                yield Use(carrier.op, f"{operand}.{index}" if carrier.listed else operand, alias.constant,
                          tuple(sorted(reduced)), groups if isinstance(groups, int) else 1, alias.offset)


# ---- weights that arithmetic changes on their way to an operator ----

Flow = tuple[Alias, ...]            # the weights whose axes a value has; () for what depends on stored tensors, and has none's
Found = Mapping[fx.Node, Flow]      # of the inputs of a node
MOST_STEPS = 64                     # of arithmetic between a weight and its operator


def _statistic(node: fx.Node, found: Found) -> Flow | None:
    return ()


def _of_statistics(node: fx.Node, found: Found) -> Flow | None:
    """What enlarges small errors is harmless in a mean or a norm only."""
    return None if any(found.values()) else ()


def _kept(node: fx.Node, found: Found) -> Flow | None:
    return tuple(alias for flow in found.values() for alias in flow if alias.shape == shape_of(node))


def _divided(node: fx.Node, found: Found) -> Flow | None:
    return None if any(found.get(a) for a in node.args[1:] if isinstance(a, fx.Node)) else _kept(node, found)


def _power(node: fx.Node, found: Found) -> Flow | None:
    exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("exponent")
    return (_kept if isinstance(exponent, (int, float)) and exponent >= 1 else _of_statistics)(node, found)


def _piece(node: fx.Node, found: Found) -> Flow | None:
    source = node.args[0]
    return () if isinstance(source, fx.Node) and found.get(source) == () else None


def _reshaped(node: fx.Node, found: Found) -> Flow | None:
    shape = shape_of(node)
    return None if shape is None else _moved(found, lambda t: t.view(shape))


def _turned(node: fx.Node, found: Found) -> Flow | None:
    name, args = name_of_target(node.target), node.args[1:]
    if name == "getattr":
        return _moved(found, lambda t: getattr(t, str(args[0]))) if args[0] in ("T", "mT") else None
    return _moved(found, lambda t: getattr(t, name)(*args, **node.kwargs))


def _moved(found: Found, view: Callable[[Tensor], Tensor]) -> Flow | None:
    """The flow of a view: where its axes run is asked of a tensor without memory that is laid out like the alias."""
    moved = []
    for alias in next(iter(found.values())):
        laid_out = torch.empty_strided(alias.shape, alias.strides, device="meta")
        try:
            seen = view(laid_out)
        except (RuntimeError, TypeError, IndexError):
            continue
        axes = tuple(tuple(sorted({a for old, n, step in zip(alias.axes, alias.shape, alias.strides, strict=True)
                                   if n > 1 and step <= s * (size - 1) and s < n * step for a in old}))
                     for size, s in zip(seen.shape, seen.stride(), strict=True))
        moved.append(dataclasses.replace(alias, axes=axes, shape=tuple(seen.shape), strides=tuple(seen.stride()), view=False))
    return tuple(moved)


_EFFECTS: Mapping[Callable[[fx.Node, Found], Flow | None], str] = {
    _kept: "add sub rsub mul multiply neg abs square tanh sigmoid relu softmax clamp clamp_min normalize batch_norm layer_norm "
           "group_norm instance_norm rms_norm _weight_norm to float double half bfloat16 type type_as clone contiguous detach",
    _divided: "div divide truediv true_divide",
    _power: "pow",
    _statistic: "mean sum var std var_mean std_mean norm vector_norm linalg_norm linalg_vector_norm amax amin max min",
    _of_statistics: "sqrt rsqrt reciprocal exp log maximum minimum expand expand_as",
    _piece: "getitem",
    _reshaped: "view reshape view_as reshape_as flatten unflatten unsqueeze squeeze",
    _turned: "t transpose permute swapaxes getattr",
}
ARITHMETIC = {name: effect for effect, names in _EFFECTS.items() for name in names.split()}
_LIKE = frozenset({"to", "type_as", "view_as", "reshape_as", "expand_as"})             # what else they take says the form only


def _alias(value: Any) -> Alias | None:
    return meta_of(value).get("alias") if isinstance(value, fx.Node) else None


def _flow(node: Any, left: list[int]) -> Flow | None:
    """The weights that a value is computed from, in at most ``left[0]`` steps of `ARITHMETIC`; None if anything else is in it."""
    if not isinstance(node, fx.Node):
        return None
    alias = _alias(node)
    if alias is not None or node.op == "get_attr":
        return () if alias is None else (alias,)
    name = name_of_target(node.target)
    effect = ARITHMETIC.get(name, _statistic if name in _BY_NAME else None)
    left[0] -= 1
    if node.op not in ("call_function", "call_method") or effect is None or left[0] < 0:
        return None
    found: dict[fx.Node, Flow] = {}
    for source in node.all_input_nodes[:1 if name in _LIKE else None]:
        flow = _flow(source, left)
        if flow is None:
            return None
        found[source] = flow
    return effect(node, found) if found else None


def arithmetic_before(node: fx.Node, use: Use) -> list[fx.Node]:
    """The nodes between a constant and the call ``node`` that is a computed use of it."""
    carrier = carrier_of(node.target)
    between: dict[fx.Node, None] = {}
    operand, _, index = use.operand.partition(".")
    assert carrier is not None
    value = carrier.bind(node.args, node.kwargs)[operand]
    pending: list[fx.Node] = [value[int(index)] if index else value]
    while pending:
        step = pending.pop()
        if step not in between and step.op != "get_attr" and _alias(step) is None:
            between[step] = None
            pending.extend(step.all_input_nodes)
    return list(between)
