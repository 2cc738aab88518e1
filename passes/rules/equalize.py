"""equalize: the channels of a value become alike, and the float model stays as it is, bit for bit.

    before    v = layer_norm(x, gamma, beta);          q = linear(v, w_q); k = linear(v, w_k)
    after     v = layer_norm(x, gamma / s, beta / s);  q = linear(v, w_q * s); k = linear(v, w_k * s)        s for each channel of v

A `Site` is a value whose channels can be divided where it is made (the weight and bias of a norm, a vector that it is multiplied by, the
rows of a linear or convolution) and whose readers are all linears and convolutions that can take the factors into their weights, along
use-def edges: dropout, ReLU and products with other values stand between as they like. Factors are powers of two, which change no
digit of any float. What cannot be divided is refused with a reason.

What the factors are is chosen by a `Rating` (inro_fx/equalization.py): smooth, awq or cle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx, nn

from ..carriers import carrier_of, name_of_target
from ..constants import Constant, owner_of
from ..program import Program, meta_of, shape_of

__all__ = ["Reader", "Site", "apply_factors", "find_sites"]

KEPT = frozenset("dropout dropout1d dropout2d identity contiguous relu leaky_relu clone detach to float".split())       # none in place
PRODUCTS = frozenset({"mul", "multiply", "__mul__"})


@dataclasses.dataclass(frozen=True)
class Place:
    """A stored tensor, and the axis of it that runs over the channels."""

    name: str
    axis: int


@dataclasses.dataclass(frozen=True)
class Reader:
    """A linear or convolution: its weight, whose ``axis`` runs over the channels of ``value``, the node that it multiplies by it."""

    weight: Place
    value: fx.Node
    channel: int                       # the axis of the value


@dataclasses.dataclass(frozen=True)
class Site:
    """The value of ``node``: what is divided, and what is multiplied in return."""

    node: fx.Node
    channels: int
    divided: tuple[Place, ...]
    readers: tuple[Reader, ...]


class _Refused(Exception):
    pass


def find_sites(program: Program, root: nn.Module, constants: Mapping[str, Constant]) -> tuple[list[Site], list[tuple[str, str]]]:
    """The sites of a program, and (node, why not) of values that look like one."""
    look = _Look(program, root, constants)
    sites, refused = [], []
    for node in program.graph.nodes:
        made = look.made(node)
        if made is None:
            continue
        try:
            divided, channels, channel = made if not isinstance(made, str) else look.refuse(made)
            readers = look.readers(node, channel)
            if readers:
                sites.append(Site(node, channels, divided, tuple(readers)))
        except _Refused as refusal:
            refused.append((node.name, str(refusal)))
    return sites, refused


class _Look:
    def __init__(self, program: Program, root: nn.Module, constants: Mapping[str, Constant]):
        self.program, self.constants = program, constants
        self.reads: dict[str, int] = {}
        for node in program.graph.nodes:
            if node.op == "get_attr":
                self.reads[str(node.target)] = self.reads.get(str(node.target), 0) + len(node.users)
        held: dict[int, int] = {}
        for module in root.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    held[id(tensor)] = held.get(id(tensor), 0) + 1
        self.root, self.held = root, held

    def refuse(self, reason: str) -> tuple[tuple[Place, ...], int, int]:
        raise _Refused(reason)

    def _own(self, node: object) -> str | None:
        """The name of a stored parameter that nothing else reads."""
        if not isinstance(node, fx.Node) or node.op != "get_attr" or self.reads[str(node.target)] != 1:
            return None
        name = self.program.full(str(node.target))
        try:
            owner, leaf = owner_of(self.root, name)
        except AttributeError:
            return None
        tensor = owner._parameters.get(leaf)
        return name if tensor is not None and self.held[id(tensor)] == 1 else None

    def made(self, node: fx.Node) -> tuple[tuple[Place, ...], int, int] | str | None:
        """What a value is made with, its channels and their axis; why it cannot be divided; None for what is no candidate."""
        name = name_of_target(node.target).removeprefix("functional.") if node.op in ("call_function", "call_method") else ""
        shape = shape_of(node)
        if shape is None or len(shape) < 2:
            return None
        if name in ("layer_norm", "rms_norm"):
            given = dict(zip(("input", "normalized_shape", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
            weight, bias = given.get("weight"), given.get("bias")
            if weight is None or len(shape_of(weight) or ()) != 1:
                return None
            return self._places([(weight, 0), (bias, 0)], shape[-1], -1)
        if name == "batch_norm":
            given = dict(zip(("input", "running_mean", "running_var", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
            return None if given.get("weight") is None else self._places([(given["weight"], 0), (given.get("bias"), 0)], shape[1], 1)
        if name in PRODUCTS and len(node.args) == 2:
            vector = next((a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr" and shape_of(a) == shape[-1:]), None)
            return None if vector is None else self._places([(vector, 0)], shape[-1], -1)
        carrier = carrier_of(node.target) if name else None
        if carrier is None or carrier.op not in ("linear", "conv1d", "conv2d", "conv3d"):
            return None
        call = carrier.bind(node.args, node.kwargs)
        channel = -1 if carrier.op == "linear" else 1
        if carrier.op != "linear" and len(shape) != int(carrier.op[-2]) + 2:
            return None
        return self._places([(call["weight"], 0), (call.get("bias"), 0)], shape[channel], channel)

    def _places(self, tensors: list[tuple[object, int]], channels: int, channel: int) -> tuple[tuple[Place, ...], int, int] | str:
        places = []
        for node, axis in tensors:
            if node is None:
                continue
            name = self._own(node)
            if name is None:
                return "what it is made with is read elsewhere, or no parameter"
            places.append(Place(name, axis))
        return tuple(places), channels, channel

    def readers(self, node: fx.Node, channel: int) -> list[Reader]:
        """What reads the value in the end; none where nothing does that could take a factor. Raises `_Refused` where some cannot."""
        found: list[Reader] = []
        others: list[str] = []
        pending = [(node, user) for user in node.users]
        inside = {node}
        while pending:
            value, user = pending.pop()
            name = name_of_target(user.target).removeprefix("functional.") if user.op in ("call_function", "call_method") else user.op
            reader = self._reader(value, user, channel)
            if isinstance(reader, Reader):
                found.append(reader)
            elif name in KEPT and not user.kwargs.get("inplace") and user.args and user.args[0] is value:
                inside.add(user)
                pending += [(user, after) for after in user.users]
            elif name in PRODUCTS and len(user.args) == 2 and all(isinstance(a, fx.Node) for a in user.args) \
                    and sum(a in inside for a in user.args) == 1 and shape_of(user) == shape_of(value):
                inside.add(user)
                pending += [(user, after) for after in user.users]
            else:
                others.append(reader or f"also read by {name}")
        if found and others:
            raise _Refused(others[0])
        return found

    def _reader(self, value: fx.Node, user: fx.Node, channel: int) -> Reader | str | None:
        carrier = carrier_of(user.target) if user.op in ("call_function", "call_method") else None
        if carrier is None or carrier.op not in ("linear", "conv1d", "conv2d", "conv3d"):
            return None
        call = carrier.bind(user.args, user.kwargs)
        weight = call.get("weight")
        if call.get("input") is not value or (channel == -1) != (carrier.op == "linear"):
            return f"also read by {carrier.op} along another axis"
        name = self._own(weight)
        if name is None or not isinstance(weight, fx.Node) or "alias" not in meta_of(weight):
            return "a reader's weight is read elsewhere, or a part of another one"
        groups, inputs = call.get("groups", 1), (shape_of(value) or (0,))[channel]
        if groups not in (1, inputs) or (groups != 1 and self.constants[name].shape[0] != groups):
            return "read by a convolution in groups"
        return Reader(Place(name, 1 if groups == 1 else 0), value, channel)


def apply_factors(root: nn.Module, site: Site, factors: Tensor) -> list[str]:
    """Divides where the value is made and multiplies its readers' weights, by powers of two [channels]; the names of what was changed."""
    changed = []

    def scale(place: Place, by: Callable[[Tensor, Tensor], Tensor]) -> None:
        owner, leaf = owner_of(root, place.name)
        held = owner._parameters[leaf]
        assert held is not None
        shape = [1] * held.dim()
        shape[place.axis] = -1
        owner._parameters[leaf] = nn.Parameter(by(held.detach(), factors.to(held.dtype).reshape(shape)), held.requires_grad)
        changed.append(place.name)
    for place in site.divided:
        scale(place, torch.div)
    for reader in site.readers:
        scale(reader.weight, torch.mul)
    return changed
