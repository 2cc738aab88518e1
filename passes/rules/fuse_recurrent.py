"""fuse, for recurrent layers: each layer and direction becomes one call of the scheme's operator on its codes.

    before    w_ih = inro_fx.dequantize(...); w_hh = inro_fx.dequantize(...)
              lstm = lstm(x, (h0, c0), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, False, False, True)

    after     transpose = x.transpose(0, 1)
              recurrent = inro_fx.recurrent(transpose, h0[0], c0[0], None, w_ih_codes, w_ih_scale, w_hh_codes, w_hh_scale, b_ih, b_hh, ...)
              together = (recurrent[0].transpose(0, 1), stack([recurrent[1]]), stack([recurrent[2]]))

Packed sequences, projections, both directions and single cells alike.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from ..carriers import carrier_of
from ..program import Context, annotate, meta_of
from ..solve.plan import Weight
from .driver import Match, Rule
from .uses import constant_chain, finds, operator_of, parts_of, used, whole

__all__ = ["RECURRENT", "RecurrentCall", "groups_of", "layer_of", "together"]

CELLS = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "tanh", "rnn_relu": "relu"}


def together(*values: Any) -> tuple[Any, ...]:
    """What a recurrent layer gives back: its output and its last states."""
    return values


@dataclasses.dataclass(frozen=True)
class RecurrentCall:
    """A call of a recurrent layer or cell: its arguments, whatever its spelling."""

    cell: str
    x: fx.Node
    batch_sizes: fx.Node | None
    state: Any                               # of an LSTM a pair of nodes, or one node that is a pair
    params: tuple[Any, ...]
    biases: bool
    layers: int = 1
    dropout: float = 0.0
    bidirectional: bool = False
    batch_first: bool = False
    single: bool = False                     # a cell: one step, without the dimension of steps

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def each(self) -> int:
        """How many parameters a layer has in one direction."""
        return len(self.params) // (self.layers * self.directions)


def layer_of(node: fx.Node) -> RecurrentCall | None:
    """The call; None where it is spelled in a way that torch's own layers do not use."""
    name = getattr(node.target, "__name__", str(node.target))
    carrier = carrier_of(node.target)
    if carrier is None or node.kwargs:
        return None
    given: Any = node.args
    if name.endswith("_cell"):
        x, state, *params = given
        given_biases = [p is not None for p in (*params[2:], None, None)[:2]]
        biases = all(given_biases)
        if any(given_biases) and not biases:
            return None
        return RecurrentCall(CELLS[name.removesuffix("_cell")], x, None, state, tuple(params[:4 if biases else 2]), biases, single=True)
    packed = len(given) > 3 and isinstance(given[3], (list, tuple))
    x, *rest = given
    batch_sizes, rest = (rest[0], rest[1:]) if packed else (None, rest)
    if len(rest) != (7 if packed else 8) or not isinstance(rest[1], (list, tuple)):
        return None
    state, params, biases, layers, dropout, train, bidirectional, *first = rest
    return RecurrentCall(CELLS[name], x, batch_sizes, state, tuple(params), biases, layers, dropout if train else 0.0, bidirectional,
                         any(first))


def _weight_of(operand: Any, context: Context) -> Weight | None:
    alias = whole(operand) if isinstance(operand, fx.Node) else None
    weight = context.weights.get(alias.constant) if alias is not None else None
    if alias is None or weight is None or not weight.layout.plain or alias.shape != weight.constant.shape or alias.axes != ((0,), (1,)):
        return None
    return weight


def _refuse(match: Match, context: Context) -> str | None:
    layer = layer_of(match.root)
    operator = used(match.root, context)[1].scheme.operator("recurrent")
    if isinstance(operator, str):
        return operator
    if layer is None:
        return "the layer is called in another way than torch.nn does"
    if layer.dropout:
        return "dropout between the layers"
    for group in groups_of(layer):
        operators = set()
        for operand in _matrices(layer, group):
            weight = _weight_of(operand, context)
            if weight is None:
                return "one of its matrices stays float, or is a part of another one"
            if isinstance(found := weight.scheme.operator("recurrent"), str):
                return found
            operators.add(found)
            if not constant_chain(operand):
                return "one of its matrices depends on the input"
        if len(operators) > 1:
            return "the matrices of one layer and direction have different schemes"
    return None


def groups_of(layer: RecurrentCall) -> list[tuple[Any, ...]]:
    """The parameters of each layer and direction."""
    return [layer.params[i:i + layer.each] for i in range(0, len(layer.params), layer.each)]


def _matrices(layer: RecurrentCall, group: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*group[:2], *group[4 if layer.biases else 2:])


def _fuse(graph: fx.Graph, match: Match, context: Context) -> fx.Node:
    layer = layer_of(match.root)
    assert layer is not None
    call, item = graph.call_function, operator.getitem
    is_lstm = layer.cell == "lstm"
    if not is_lstm:
        states: list[Any] = [layer.state, None]
    else:
        states = list(layer.state) if isinstance(layer.state, (tuple, list)) else [call(item, (layer.state, i)) for i in range(2)]
    x = layer.x
    if layer.single:
        x = graph.call_method("unsqueeze", (x, 0))
    elif layer.batch_first:
        x = graph.call_method("transpose", (x, 0, 1))
    last: list[list[fx.Node]] = [[], []] if is_lstm else [[]]
    groups = groups_of(layer)
    for depth in range(layer.layers):
        outputs = []
        for direction in range(layer.directions):
            number = depth * layer.directions + direction
            group = groups[number]
            first = _weight_of(group[0], context)
            assert first is not None
            function, (dynamic, *trailing) = operator_of(first, "recurrent")
            h, c = (s if s is None or layer.single else call(item, (s, number)) for s in states)
            if (seen := meta_of(states[0]).get("value")) is not None and not layer.single:
                annotate(h, value=dataclasses.replace(seen, shape=seen.shape[1:]))
            codes: list[Any] = [part for operand in _matrices(layer, group) for part in _codes(graph, operand, context)]
            biases = list(group[2:4]) if layer.biases else [None, None]
            projection = codes[4:] or [None, None]
            # states lie within -1 and 1; what comes from outside may have peaks that leave 8 bits nothing for the rest
            rest = (layer.cell, direction == 1, dynamic and depth > 0, dynamic, *trailing)
            result = call(function, (x, h, c, layer.batch_sizes, *codes[:4], *biases, *projection, *rest))
            for index, kept in enumerate(last, 1):
                kept.append(call(item, (result, index)))
            if not layer.single:
                outputs.append(call(item, (result, 0)))
        if outputs:
            x = outputs[0] if len(outputs) == 1 else call(torch.cat, (outputs, -1))
    if layer.single:
        new = call(together, tuple(kept[0] for kept in last)) if is_lstm else last[0][0]
    else:
        y = graph.call_method("transpose", (x, 0, 1)) if layer.batch_first else x
        new = call(together, (y, *(call(torch.stack, (kept,)) for kept in last)))
    node = match.root.prev
    while "module" not in node.meta and node.op != "root":
        annotate(node, module=meta_of(match.root)["module"])
        node = node.prev
    schema = function._schema
    meta_of(new)["kernel"] = schema.name.replace("::", ".")
    return new


def _codes(graph: fx.Graph, operand: fx.Node, context: Context) -> list[fx.Node]:
    """Codes and scale of a matrix: the first parts of every scheme that has the operator."""
    weight = _weight_of(operand, context)
    assert weight is not None
    return parts_of(graph, operand, weight, slice(None))[:2]


RECURRENT: tuple[Rule, ...] = (Rule("fuse recurrent", finds("recurrent"), _refuse, _fuse),)
