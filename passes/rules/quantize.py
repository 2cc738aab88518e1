"""quantize: a weight becomes its stored parts and the call that unpacks them.

    before    fc_weight = self.fc.weight
              linear = linear(x, fc_weight, fc_bias)

    after     fc_weight_codes = self.fc.weight_codes; fc_weight_scale = self.fc.weight_scale
              dequantize = inro_fx.dequantize(fc_weight_codes, fc_weight_scale, 8, 0, 384, float32)
              linear = linear(x, dequantize, fc_bias)

Views of the weight (transposes, slices, casts) stay as they are, behind the unpacking; so does every operator. This is why every
operator works with every scheme: speed is `fuse`'s business.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from ..program import Context, Probe, Program, Stored, Value, annotate, meta_of
from ..solve.plan import Weight, uses_of
from .driver import Match, Rule, apply_rules

__all__ = ["quantize"]


def quantize(program: Program, context: Context) -> Program:
    """The decided weights unpacked from their parts, and a `Probe` for each of their uses."""
    probes = {(node.name, use.constant): Probe(node.name, node.name) for node in program.graph.nodes for use in uses_of(node)
              if use.constant in context.weights}
    unpack = Rule("unpack", find=lambda node, context: _find(node, context, program), refuse=lambda match, context: None,
                  rewrite=lambda graph, match, context: _unpack(graph, match.root, context, program))
    read = {meta_of(n)["alias"].constant for n in program.graph.nodes if "alias" in n.meta}
    weights = {name: weight for name, weight in context.weights.items() if name in read}
    started = dataclasses.replace(program, probes=probes, weights=weights)
    for node in started.graph.nodes:
        meta_of(node).setdefault("twin", node.name)
    return apply_rules(started, context, (unpack,))


def _find(node: fx.Node, context: Context, program: Program) -> Match | None:
    alias = meta_of(node).get("alias")
    weight = context.weights.get(alias.constant) if node.op == "get_attr" and alias is not None else None
    return Match.of(node) if weight is not None and program.full(str(node.target)) in weight.constant.names else None


def _unpack(graph: fx.Graph, read: fx.Node, context: Context, program: Program) -> fx.Node:
    weight = context.weights[meta_of(read)["alias"].constant]
    home, leaf = _home(str(read.target), weight, program.path)
    own = weight.constant.name.rpartition(".")[2]
    tracer = fx.proxy.GraphAppendingTracer(graph)
    parts = {}
    module = meta_of(read)["module"]
    for part, buffer in zip(weight.scheme.parts, weight.buffers, strict=True):
        name = leaf + buffer[len(own):]
        node = graph.create_node("get_attr", f"{home}.{name}" if home else name)
        annotate(node, module=module, stored=Stored(weight.constant.name, part, part in weight.single_row))
        parts[part] = fx.Proxy(node, tracer)
    last = read.prev
    matrix = weight.scheme.unpack(parts, weight.layout.columns, weight.constant.dtype)
    restored: fx.Node = weight.layout.restore(matrix).node
    node = last.next
    while node is not read:
        annotate(node, module=module, weight_dtype=weight.constant.dtype, unpacks=weight.constant.name)
        node = node.next
    annotate(restored, alias=meta_of(read)["alias"], value=Value(weight.constant.dtype, weight.constant.shape))
    return restored


def _home(target: str, weight: Weight, prefix: str) -> tuple[str, str]:
    """(module, name there) of the weight whose parts are read: a tied weight is read where it is stored, if that can be reached."""
    home, _, leaf = target.rpartition(".")
    if not prefix or weight.constant.name.startswith(prefix + "."):
        return weight.constant.module[len(prefix) + 1 if prefix else 0:], weight.constant.name.rpartition(".")[2]
    return home, leaf

