"""From decisions to stored parts: packing each weight once, and putting the parts in the place of the floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from .int8_tensor import Int8SymmetricTensor
from .numerics import entropy, weight_error
from .observers import Observer
from .passes.constants import owner_of
from .passes.fuse import fuse
from .passes.module import Capture, Packed, attach_graph, attach_packed, finish
from .passes.observe import activation_of
from .passes.quantize import quantize
from .passes.session import Session
from .passes.targets import Decision, Plan, decide_again
from .passes.verify import verify
from .schemes import Int8Static
from .schemes.int8_rowwise_full import int8_rowwise_full

__all__ = ["Packer", "install", "keep_codes", "nodes_of", "rewritten", "settle_inputs", "take_codes", "takes_inputs"]


class Packer:
    """Packs each weight once, when it is first needed, and measures what that cost."""

    def __init__(self, session: Session, chosen: Plan, steps: Mapping[str, Tensor], given: Mapping[str, dict[str, Tensor]]):
        self.session, self.chosen, self.steps, self.given = session, chosen, steps, given
        self.parts: dict[str, dict[str, Tensor]] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def pack(self, name: str) -> dict[str, Tensor]:
        """The parts of a weight."""
        if name in self.parts:
            return self.parts[name]
        decision = self.chosen.decisions[name]
        matrix = decision.layout.matrix(self.session.tensor(name).detach())
        if name in self.given:
            parts = self.given[name]
        elif name in self.steps:
            parts = decision.scheme.pack(matrix, self.steps[name])  # type: ignore[call-arg]
        else:
            parts = decision.scheme.pack(matrix)
        self.parts[name] = parts

        def restore(rows: slice) -> Tensor:
            piece = {part: value if part in decision.single_row else value[rows] for part, value in parts.items()}
            return decision.scheme.unpack(piece, decision.layout.columns, decision.constant.dtype)
        scale, integers = parts.get("scale"), getattr(decision.scheme, "integers", None)
        self.facts[name] = dict(
            error=weight_error(matrix, restore),
            entropy=entropy(integers(parts, decision.layout.columns)) if integers is not None else None,
            bytes=sum(p.numel() * p.element_size() for p in parts.values()),
            scale=None if scale is None or not scale.numel() else (scale.min().item(), scale.mean().item(), scale.max().item()))
        return parts

    def release(self, name: str) -> None:
        """Frees a float weight whose parts are made."""
        self.pack(name)
        tensor = self.session.tensor(name)
        tensor.data = tensor.data.new_empty(0)


def take_codes(root: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Makes plain float parameters of those that are `Int8SymmetricTensor`; their parts, by name."""
    given: dict[str, dict[str, Tensor]] = {}
    made: dict[int, nn.Parameter] = {}
    for path, module in root.named_modules():
        for name, tensor in module._parameters.items():
            if isinstance(tensor, Int8SymmetricTensor) and not tensor.transposed:
                if id(tensor) not in made:
                    made[id(tensor)] = nn.Parameter(tensor.dequantize(), requires_grad=False)
                    given[f"{path}.{name}".lstrip(".")] = {"codes": tensor.codes.clone(), "scale": tensor.scale.clone()}
                module._parameters[name] = made[id(tensor)]
    return given


def keep_codes(session: Session, chosen: Plan, given: Mapping[str, object]) -> None:
    """Weights that came as codes keep them, with the scheme that they are of."""
    for name in given:
        if name in chosen.decisions:
            chosen.decisions[name] = decide_again(session, chosen.decisions[name], int8_rowwise_full)


def nodes_of(session: Session) -> dict[tuple[str, str], fx.Node]:
    """The nodes of all captured graphs, by path and name."""
    return {(path, n.name): n for path, c in session.captures.items() for n in c.graph.nodes}


def takes_inputs(nodes: Mapping[tuple[str, str], fx.Node], decision: Decision) -> bool:
    """Is the weight used by linears only, each on the right of an input that a graph knows?"""
    used = [(t, nodes.get((t.capture, t.node or ""))) for t in decision.targets]
    return len(decision.constant.shape) == 2 and all(n is not None and activation_of(n, t.use) is not None for t, n in used)


def settle_inputs(session: Session, chosen: Plan, observers: Mapping[str, Observer]) -> None:
    """Gives every static scheme the range that its observer found, or takes its activations to stay float.

    Raises `InputError` for a layer that the example reached and the calibration data did not.
    """
    nodes = nodes_of(session)
    for name, decision in chosen.decisions.items():
        scheme = decision.scheme
        if not isinstance(scheme, Int8Static):
            continue
        unreached = {session.kind_of(t.capture) for t in decision.targets} <= {"unreached"}
        if name in observers and takes_inputs(nodes, decision) and not unreached:
            again = decide_again(session, decision, scheme.calibrated(observers[name]))
            clipped = observers[name].clipped(*again.scheme.input_range())
            chosen.decisions[name] = dataclasses.replace(again, observer=scheme.observer, clipped=clipped)
        else:
            chosen.decisions[name] = decide_again(session, decision, scheme.without_inputs())


def rewritten(session: Session, captured: Capture, path: str, chosen: Plan) -> fx.Graph:
    """The graph of the module at ``path`` with its weights as codes, verified after each pass."""
    module = session.root.get_submodule(path)
    graph = quantize(captured.graph, chosen.decisions, path)
    verify(graph, module, chosen.decisions, after="quantize")
    graph = fuse(graph, chosen.decisions)
    verify(graph, module, chosen.decisions, after="fuse")
    return graph


def install(session: Session, chosen: Plan, graphs: Mapping[str, fx.Graph], parts: Mapping[str, Mapping[str, Tensor]],
            strict: bool) -> None:
    """Puts parts in the place of the float weights, and the quantized graphs in the place of the float ones."""
    root = session.root
    session.state.restore()
    for decision in chosen.decisions.values():
        holder, own = owner_of(root, decision.constant.name)
        for buffer, part in zip(decision.buffers, decision.scheme.parts, strict=True):
            holder.register_buffer(buffer, parts[decision.constant.name][part])
        for name in decision.constant.names:
            owner, leaf = owner_of(root, name)
            for kind in (owner._parameters, owner._buffers):
                kind.pop(leaf, None)
            buffers = tuple(leaf + b[len(own):] for b in decision.buffers)
            attach_packed(owner, leaf, Packed(decision.scheme, buffers, decision.layout, decision.constant.dtype),
                          holder, decision.buffers)
    for path, captured in {**session.layers, **session.captures}.items():
        captured.graph = graphs[path] if path in session.captures else rewritten(session, captured, path, chosen)
        attach_graph(root.get_submodule(path), captured, strict)
    session.state.see_buffers()
    finish(root)
    session.forget_tensors()
