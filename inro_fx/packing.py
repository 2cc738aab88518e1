"""From decided weights to stored parts: each is packed once, and measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from .errors import InroError, SchemeError
from .int8_tensor import Int8SymmetricTensor
from .numerics import entropy, weight_error
from .observers import Observer
from .passes.capture.session import Session
from .passes.carriers import carrier_of
from .passes.rules.fuse_conv import LEAST, density_of
from .passes.rules.observe import activation_of
from .passes.scheme import activation_of_scheme
from .passes.solve.examine import checked_parts
from .passes.solve.plan import Plan, Weight, with_scheme
from .schemes.int8_rowwise_full import int8_rowwise_full

__all__ = ["Packer", "keep_codes", "nodes_of", "rounds_inputs", "settle_inputs", "take_codes", "takes_inputs"]


class Packer:
    """Packs each weight once, when it is first needed, and measures what that cost."""

    def __init__(self, session: Session, chosen: Plan, steps: Mapping[str, Tensor], given: Mapping[str, dict[str, Tensor]]):
        self.session, self.chosen, self.steps, self.given = session, chosen, steps, given
        self.facts: dict[str, dict[str, Any]] = {}

    def pack(self, name: str) -> dict[str, Tensor]:
        """The parts of a weight. Raises `SchemeError` naming it where its scheme fails, or breaks its own bound."""
        weight = self.chosen.weights[name]
        if weight.parts is not None:
            return weight.parts
        matrix = weight.layout.matrix(self.session.tensor(name).detach())
        try:
            parts = self._packed(name, weight, matrix)
            self.facts[name] = _facts(weight, matrix, parts)
            self._check(name, weight, matrix, parts)
        except InroError as error:
            raise type(error)(f"{name}: {error}") from error
        except Exception as error:
            raise SchemeError(f"{name}: the scheme {weight.scheme.name} fails on this weight {tuple(weight.constant.shape)} "
                              f"({type(error).__name__}: {error})") from error
        weight.parts = parts
        return parts

    def _packed(self, name: str, weight: Weight, matrix: Tensor) -> dict[str, Tensor]:
        if name in self.given:
            return self.given[name]
        made = weight.scheme.pack(matrix, self.steps[name]) if name in self.steps else weight.scheme.pack(matrix)  # type: ignore[call-arg]
        return checked_parts(weight.scheme, made, weight.layout.rows)

    def _check(self, name: str, weight: Weight, matrix: Tensor, parts: dict[str, Tensor]) -> None:
        """Somebody's own scheme keeps its word: the error of each element is within its bound. (A few rows tell; ours have tests.)"""
        ours = type(weight.scheme).__module__.startswith("inro_fx.")
        if ours or name in self.given or name in self.steps or not matrix.numel():
            return
        rows = slice(0, 4)
        piece = {part: value if part in weight.single_row else value[rows] for part, value in parts.items()}
        restored = weight.scheme.unpack(piece, weight.layout.columns, weight.constant.dtype)
        if not isinstance(restored, Tensor) or restored.shape != matrix[rows].shape or restored.dtype != weight.constant.dtype:
            raise SchemeError(f"the scheme {weight.scheme.name} unpacks {tuple(matrix[rows].shape)} to "
                              f"{tuple(restored.shape) if isinstance(restored, Tensor) else type(restored).__name__}")
        bound = weight.scheme.bound(matrix)
        limit = (bound[rows] if bound.dim() and bound.shape[0] == matrix.shape[0] else bound).double()
        if not bool(((restored.double() - matrix[rows].double()).abs() <= limit * (1 + 1e-3) + 1e-30).all()):
            raise SchemeError(f"the scheme {weight.scheme.name} is further off than its own bound says")


def _facts(weight: Weight, matrix: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    def restore(rows: slice) -> Tensor:
        piece = {part: value if part in weight.single_row else value[rows] for part, value in parts.items()}
        restored: Tensor = weight.scheme.unpack(piece, weight.layout.columns, weight.constant.dtype)
        return restored
    scale = None if "scale" not in parts else parts["scale"].abs()          # its sign says which side of 0 has one code more
    integers = getattr(weight.scheme, "integers", None)
    return dict(
        error=weight_error(matrix, restore),
        entropy=entropy(integers(parts, weight.layout.columns)) if integers is not None else None,
        bytes=sum(p.numel() * p.element_size() for p in parts.values()),
        scale=None if scale is None or not scale.numel() else (scale.min().item(), scale.mean().item(), scale.max().item()))


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
        if name in chosen.weights:
            chosen.weights[name] = with_scheme(session, chosen.weights[name], int8_rowwise_full)


def nodes_of(session: Session) -> dict[tuple[str, str], fx.Node]:
    """The nodes of all captured graphs, by path and name."""
    return {(path, n.name): n for path, p in session.captures.items() for n in p.graph.nodes}


def takes_inputs(nodes: Mapping[tuple[str, str], fx.Node], weight: Weight) -> bool:
    """Can the scheme's own operator quantize the inputs of every use of a weight?"""
    used = [(t, nodes.get((t.capture, t.node or ""))) for t in weight.targets]
    return all(n is not None and activation_of(n, t.use) is not None and _has_operator(weight, n) for t, n in used)


def rounds_inputs(nodes: Mapping[tuple[str, str], fx.Node], weight: Weight) -> bool:
    """Will the quantized model round the inputs of every use of a weight?"""
    used = [nodes.get((t.capture, t.node or "")) for t in weight.targets]
    dense = all(n is not None and (len(weight.constant.shape) == 2 or density_of(n, weight) >= LEAST) for n in used)
    activation = activation_of_scheme(weight.scheme)
    return takes_inputs(nodes, weight) and (activation == "static" or (activation == "dynamic" and dense))


def _has_operator(weight: Weight, node: fx.Node) -> bool:
    carrier = carrier_of(node.target)
    operator = carrier.fused if carrier is not None else None
    matrix = len(weight.constant.shape) == 2
    return operator is not None and not isinstance(weight.scheme.operator(operator), str) and matrix == (operator == "linear")


def _is_recurrent(node: fx.Node | None) -> bool:
    carrier = carrier_of(node.target) if node is not None else None
    return carrier is not None and carrier.fused == "recurrent"


def settle_inputs(session: Session, chosen: Plan, observers: Mapping[str, Observer], trained: bool) -> None:
    """Gives every static scheme the range that its observer found, or takes its activations to stay float. Recurrent layers have a scale
    for each step, but not those that were ``trained``, for training rounds nothing inside of them.

    Raises `InputError` for a layer that the example reached and the calibration data did not.
    """
    nodes = nodes_of(session)
    for name, weight in chosen.weights.items():
        scheme: Any = weight.scheme
        recurrent = any(_is_recurrent(nodes.get((t.capture, t.node or ""))) for t in weight.targets)
        if trained and recurrent and activation_of_scheme(scheme) == "dynamic":
            chosen.weights[name] = with_scheme(session, weight, scheme.without_inputs())
        if activation_of_scheme(scheme) != "static":
            continue
        unreached = {session.kind_of(t.capture) for t in weight.targets} <= {"unreached"}
        if name in observers and takes_inputs(nodes, weight) and not unreached:
            again = with_scheme(session, weight, scheme.calibrated(observers[name]))
            clipped = observers[name].clipped(*again.scheme.input_range())
            chosen.weights[name] = dataclasses.replace(again, observer=scheme.observer, clipped=clipped)
        else:
            other = scheme.per_step() if recurrent and not trained else scheme.without_inputs()
            chosen.weights[name] = with_scheme(session, weight, other)
