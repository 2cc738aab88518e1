"""observe: an observer in front of every operator that will quantize its input.

    before    linear = linear(x, fc_weight, fc_bias)

    after     fc_weight_observer = self.fc.weight_observer(x)
              linear = linear(fc_weight_observer, fc_weight, fc_bias)

The observer is a child of the module that owns the weight, one for each weight: the graph of the whole model and the graph of the
layer alone pass their inputs through the same one.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..carriers import Use, carrier_of
from ..program import Program, copied, meta_of
from ..solve.plan import uses_of

__all__ = ["activation_of", "observe"]


def activation_of(node: fx.Node, use: Use) -> fx.Node | None:
    """The input of a call that a scheme's own operator can compute with a quantized input; None for other uses of a weight."""
    carrier = carrier_of(node.target)
    if carrier is None or carrier.activation is None or carrier.fused not in ("linear", "conv"):
        return None
    if use.operand == carrier.activation or use.computed:
        return None
    value = carrier.bind(node.args, node.kwargs).get(carrier.activation)
    return value if isinstance(value, fx.Node) and "alias" not in value.meta else None


def observe(program: Program, observers: Mapping[str, str]) -> Program:
    """A new program. ``observers`` gives an observer's path by the weight's name."""
    new = copied(program)
    inside = program.path + "." if program.path else ""
    for node in list(new.graph.nodes):
        for use in uses_of(node):
            path = observers.get(use.constant, "")
            x = activation_of(node, use)
            if x is None or not path.startswith(inside) or not path:
                continue
            with new.graph.inserting_before(node):
                seen = new.graph.call_module(path[len(inside):], (x,))
            seen.meta = {k: v for k, v in x.meta.items() if k == "value"}
            meta_of(seen)["module"] = meta_of(node).get("module", program.path)
            node.replace_input_with(x, seen)
    return new
