"""integers: values between convolutions on codes stay codes.

    before    relu = relu(conv_static(x, ...)); pool = max_pool2d(relu, 2); y = conv_static(pool, ..., x_scale, x_zero)

    after     conv = conv_static(x, ..., y_scale=x_scale, y_zero=x_zero, activation=clamp)
              pool = inro_fx.max_pool2d(conv, ...); y = conv_static(pool, ..., x_scale, x_zero)

Values that go into each other without arithmetic (pooling, concatenation) have one format, that of the reader with the widest range
which has seen all of them: it is chosen before anything is rounded. First every such value is quantized where it is computed, and
dequantized for readers that want floats: that graph is the definition of the result. Then `epilogues.CODES` fuses it.

Codes carry no gradient: a program with some is for calls that want none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..carriers import name_of_target
from ..program import Context, Program, Value, annotate, copied, meta_of, shape_of
from .driver import apply_rules
from .epilogues import CODES, argument, epilogue_of, give, is_conv
from .writes import changed_after, last_writers

__all__ = ["integers"]


def integers(program: Program, context: Context) -> Program:
    """Values between convolutions on codes as codes, and what follows a convolution in it."""
    if program.kind == "layer":
        return program
    placed = copied(program)
    if not _place(placed, context):
        return program
    placed.graph.lint()
    return dataclasses.replace(apply_rules(placed, context, CODES), gradients=False)


# ---- values that have one format ----

@dataclasses.dataclass(frozen=True)
class _Pool:
    """max_pool2d of codes, with the arguments of torch's."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil: bool


def _pair(value: Any) -> tuple[int, int] | None:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    pair = pair * 2 if len(pair) == 1 else pair
    return (pair[0], pair[1]) if len(pair) == 2 and all(type(v) is int for v in pair) else None


def _pool(node: fx.Node) -> _Pool | None:
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    call = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False,
            **dict(zip(names, node.args, strict=False)), **node.kwargs}
    pairs = [_pair(call[n]) for n in ("kernel_size", "padding", "dilation")]
    stride = pairs[0] if call["stride"] in (None, []) else _pair(call["stride"])
    if call["return_indices"] is not False or type(call["ceil_mode"]) is not bool or stride is None or None in pairs:
        return None
    if pairs[1] != (0, 0) and pairs[2] != (1, 1):
        return None                                                    # a window may hold nothing but padding: minus infinity is no code
    return _Pool(pairs[0], stride, pairs[1], pairs[2], call["ceil_mode"])            # type: ignore[arg-type]


def _moved_from(node: fx.Node) -> list[fx.Node] | None:
    """The values that go into a node without arithmetic, so that their codes make its codes; None for other nodes."""
    if len(shape_of(node) or ()) != 4 or node.op not in ("call_function", "call_method"):
        return None
    name = name_of_target(node.target).removeprefix("functional.")
    first = node.args[0] if node.args else None
    if node.target in (F.max_pool2d, torch.max_pool2d):
        return [first] if isinstance(first, fx.Node) and len(shape_of(first) or ()) == 4 and _pool(node) is not None else None
    if name == "dropout" and isinstance(first, fx.Node):
        training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
        return [first] if training is False else None
    if name == "interpolate" and isinstance(first, fx.Node):
        return [first] if node.kwargs.get("mode", "nearest") in ("nearest", "nearest-exact") and len(node.args) == 1 else None
    if name in ("cat", "concat") and isinstance(first, (tuple, list)):
        axis = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        plain = all(isinstance(v, fx.Node) and len(shape_of(v) or ()) == 4 for v in first)
        return list(first) if plain and axis in (1, -3) else None
    return None


@dataclasses.dataclass(frozen=True)
class _Wish:
    """The format that a convolution was calibrated with for its input, and the range that those codes reach."""

    conv: fx.Node
    low: float
    high: float


def _wish_of(node: fx.Node, context: Context) -> _Wish | None:
    if not is_conv(node) or shape_of(argument(node, "x")) is None or "format" in meta_of(argument(node, "x")):
        return None                                                    # not fixed to codes, or it reads some already
    stored = meta_of(argument(node, "x_scale")).get("stored")
    weight = context.weights.get(stored.constant) if stored is not None else None
    if weight is None:
        return None
    scale, zero = weight.scheme.input_parts()
    return _Wish(node, (-127 - zero) * scale, (127 - zero) * scale)


@dataclasses.dataclass
class _Group:
    """Values that have one format: ``members`` in the order of the graph, the ``sources`` among them are computed, the others moved;
    ``wishes``, each with the sources whose range it has seen."""

    members: list[fx.Node]
    sources: list[fx.Node]
    wishes: list[tuple[_Wish, set[fx.Node]]]

    def format(self) -> _Wish | None:
        """The widest of the wishes that have seen all of the sources."""
        return max((w for w, seen in self.wishes if seen >= set(self.sources)), key=lambda w: w.high - w.low, default=None)


def _groups(graph: fx.Graph, context: Context, moves: Mapping[fx.Node, list[fx.Node]]) -> list[_Group]:
    """The groups of values that go into convolutions on codes, in the order of these."""
    behind: dict[fx.Node, set[fx.Node]] = {}            # of each value: what it is moved from
    known: dict[fx.Node, set[fx.Node]] = {}             # and the sources whose range is that of the value
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        sources = moves.get(node, [])
        behind[node] = {node}.union(*(behind[s] for s in sources))
        known[node] = set().union(*(known[s] for s in sources if _keeps_range(node, s))) if node in moves else {node}
    found: list[_Group] = []
    for node in graph.nodes:
        wish = _wish_of(node, context)
        if wish is None:
            continue
        values = behind[argument(node, "x")]
        joined = [g for g in found if not values.isdisjoint(g.members)]
        group = _Group([], [], [(wish, known[argument(node, "x")])])
        for other in joined:
            found.remove(other)
            group.wishes = other.wishes + group.wishes
        group.members = sorted(values.union(*(g.members for g in joined)), key=order.__getitem__)
        group.sources = [n for n in group.members if n not in moves]
        found.append(group)
    return found


def _keeps_range(moved: fx.Node, source: fx.Node) -> bool:
    """Has who saw the moved value seen the range of its source, as far as anybody reads that?"""
    small, large = shape_of(moved) or (), shape_of(source) or ()
    if _name(moved) == "interpolate":
        return all(a >= b for a, b in zip(small[2:], large[2:], strict=True))          # each pixel is there
    if moved.target in (F.max_pool2d, torch.max_pool2d):
        pool = _pool(moved)
        assert pool is not None
        whole = pool.stride[0] <= pool.kernel[0] and pool.stride[1] <= pool.kernel[1]
        return whole and _is_positive(source) and set(source.users) == {moved}         # the largest are seen, and the smallest is 0
    return True


def _is_positive(node: fx.Node) -> bool:
    """Does it end in an activation that gives no negative numbers?"""
    found = (argument(node, "activation"), argument(node, "low")) if is_conv(node) else epilogue_of(node)
    return found is not None and (found[0] in (3, 5) or (found[0] == 1 and found[1] >= 0))


def _makes_codes(node: fx.Node, codes: Mapping[fx.Node, fx.Node]) -> bool:
    """Does a convolution on codes compute the value, up to a sum with codes or with another one, and an activation?"""
    if epilogue_of(node) is not None and len(node.all_input_nodes[0].users) == 1:
        node = node.all_input_nodes[0]
    if _name(node) in ("add", "iadd", "add_"):
        terms = node.all_input_nodes
        return len(terms) == 2 and any(is_conv(a) and len(a.users) == 1 and (b in codes or (is_conv(b) and len(b.users) == 1))
                                       for a, b in (terms, terms[::-1]))
    return is_conv(node)


# ---- placing quantize and dequantize ----

def _place(program: Program, context: Context) -> bool:
    """Puts quantize and dequantize around the values that are to be codes; has that changed anything?"""
    graph, writers = program.graph, last_writers(program.graph)
    moves = {node: sources for node in graph.nodes if (sources := _moved_from(node)) is not None}
    codes: dict[fx.Node, fx.Node] = {}
    for group in _groups(graph, context, moves):
        wish = group.format()
        reason = "no convolution on codes computes it" if not any(_makes_codes(node, codes) for node in group.sources) \
            else "it is changed in place" if any(changed_after(node, writers) for node in group.members) \
            else "it is no float, or of several dtypes" if not _are_floats(group.members) \
            else "no reader has seen the range of all of them" if wish is None else ""
        program.log += tuple(("as codes", node.name, reason) for node in group.sources)
        if reason or wish is None:
            continue
        scale, zero = _format(graph, wish.conv)
        for node in group.members:
            codes[node] = _codes_of(graph, node, moves.get(node), codes, scale, zero)
        for reader, _ in group.wishes:
            give(reader.conv, x=codes[argument(reader.conv, "x")], x_scale=scale, x_zero=zero)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in sorted(codes, key=lambda n: -order[n]):
        _give_floats(graph, node, codes[node], {*codes.values()})
        if node in moves and not node.users:
            graph.erase_node(node)
    return bool(codes)


def _are_floats(nodes: list[fx.Node]) -> bool:
    dtypes = {value.dtype if (value := meta_of(node).get("value")) is not None else None for node in nodes}
    return len(dtypes) == 1 and all(dtype is not None and dtype.is_floating_point for dtype in dtypes)


def _name(node: fx.Node) -> str:
    return name_of_target(node.target).removeprefix("functional.") if node.op in ("call_function", "call_method") else ""


def _format(graph: fx.Graph, conv: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The scale and the zero point of a convolution's input, to be read from the start of the graph on."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    made = []
    with graph.inserting_before(first):
        for name in ("x_scale", "x_zero"):
            given = argument(conv, name)
            node = graph.get_attr(given.target)
            node.meta = dict(given.meta)
            made.append(node)
    return made[0], made[1]


def _codes_of(graph: fx.Graph, node: fx.Node, sources: list[fx.Node] | None, codes: dict[fx.Node, fx.Node], scale: fx.Node, zero: fx.Node
              ) -> fx.Node:
    """The value of a node as codes: quantized where it is computed, or made of the codes that it is made of."""
    call = graph.call_function
    with graph.inserting_before(_after(node)):
        if sources is None:
            new = call(torch.ops.inro_fx.quantize.default, (node, scale, zero))
        elif node.target in (F.max_pool2d, torch.max_pool2d):
            pool = _pool(node)
            assert pool is not None
            new = call(torch.ops.inro_fx.max_pool2d.default, (codes[sources[0]], *dataclasses.astuple(pool)))
        elif _name(node) == "dropout":
            new = codes[sources[0]]
            return new
        elif _name(node) == "interpolate":
            new = call(node.target, (codes[sources[0]],), node.kwargs)             # type: ignore[arg-type]
        else:
            new = call(torch.cat, ([codes[s] for s in sources], 1))
    annotate(new, module=meta_of(node)["module"], twin=meta_of(node).get("twin", node.name), format=(scale.name, zero.name),
             value=Value(torch.uint8, shape_of(node) or ()))
    return new


def _after(node: fx.Node) -> fx.Node:
    """Where a node that reads this one may stand."""
    after = node.next
    while after.op in ("placeholder", "get_attr"):                     # the formats of inputs are read there
        after = after.next
    return after


def _give_floats(graph: fx.Graph, node: fx.Node, codes: fx.Node, made: set[fx.Node]) -> None:
    """Readers that want floats get them from the codes: there is one value, whoever reads it."""
    readers = [user for user in node.users if user not in made]
    if not readers:
        return
    names = meta_of(codes)["format"]
    scale, zero = (next(n for n in graph.nodes if n.name == name) for name in names)
    dtype = meta_of(node)["value"].dtype
    with graph.inserting_before(_after(codes)):
        floats = graph.call_function(torch.ops.inro_fx.dequantize_codes.default, (codes, scale, zero, dtype))
    meta = meta_of(node)
    annotate(floats, module=meta["module"], twin=meta.get("twin", node.name), value=meta["value"], weight_dtype=dtype)
    for reader in readers:
        reader.replace_input_with(node, floats)
