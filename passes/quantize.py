"""quantize: a weight becomes its stored parts and the call that unpacks them.

    before    fc_weight = self.fc.weight
              linear = linear(x, fc_weight, fc_bias)

    after     fc_weight_codes = self.fc.weight_codes; fc_weight_scale = self.fc.weight_scale
              dequantize = inro_fx.dequantize(fc_weight_codes, fc_weight_scale, 8, 0, 384, float32)
              linear = linear(x, dequantize, fc_bias)

Views of the weight (transposes, slices, casts) stay as they are, behind the unpacking; so does every operator. This is
why every operator works with every scheme: speed is `fuse`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from .targets import Decision

__all__ = ["quantize"]


def quantize(graph: fx.Graph, decisions: Mapping[str, Decision], prefix: str) -> fx.Graph:
    """A new graph with the decided weights unpacked from their parts. ``prefix`` is the path of the graph's module."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph, copies))
    for node, twin in copies.items():
        twin.meta = {**node.meta, "target": node.name}
    output = next(iter(reversed(new.nodes)))
    output.meta = dict(next(iter(reversed(graph.nodes))).meta)
    for node in list(new.nodes):
        if node.op == "get_attr":
            full = f"{prefix}.{node.target}" if prefix else str(node.target)
            alias = node.meta.get("alias")
            decision = decisions.get(alias.constant) if alias is not None else None
            if decision is not None and full in decision.constant.names:
                _unpack(new, node, decision, prefix)
    return new


def _unpack(graph: fx.Graph, weight: fx.Node, decision: Decision, prefix: str) -> None:
    home, _, leaf = str(weight.target).rpartition(".")
    own = decision.constant.name.rpartition(".")[2]
    if not prefix or decision.constant.name.startswith(prefix + "."):    # a tied weight is read where it is stored
        home, leaf = decision.constant.module[len(prefix) + 1 if prefix else 0:], own
    tracer = fx.proxy.GraphAppendingTracer(graph)
    with graph.inserting_before(weight):
        parts = {}
        for part, buffer in zip(decision.scheme.parts, decision.buffers, strict=True):
            name = leaf + buffer[len(own):]
            node = graph.create_node("get_attr", f"{home}.{name}" if home else name)
            node.meta.update(module=weight.meta["module"], part_of=decision.constant.name, part=part,
                             single_row=part in decision.single_row)
            parts[part] = fx.Proxy(node, tracer)
        last = weight.prev
        matrix = decision.scheme.unpack(parts, decision.layout.columns, decision.constant.dtype)
        restored = decision.layout.restore(matrix).node
    node = last.next
    while node is not weight:
        node.meta.update(module=weight.meta["module"], weight_dtype=decision.constant.dtype, unpacks=decision.constant.name)
        node = node.next
    restored.meta["alias"] = weight.meta["alias"]
    restored.meta["example"] = (decision.constant.dtype, decision.constant.shape)
    weight.replace_all_uses_with(restored)
    graph.erase_node(weight)
