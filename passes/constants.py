"""The weights of a model: which tensors they are, under which names, and how a graph node views one.

A `Constant` is one stored tensor. Tied weights (two names, one tensor) are one constant with two names; two
parameters that merely overlap in memory are two constants. A node of a graph that is a view of a constant, or an
elementwise copy of it, carries an `Alias` in ``node.meta["alias"]``: which constant, and which of its axes each axis of
the node runs over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ABSENT", "Alias", "Constant", "adopt", "adopted_by", "alias_of_view", "find_constants", "owner_of", "packed_constants",
           "storage_of"]


ABSENT = object()          # what a lookup gives for what is not there, where None may be


@dataclass(frozen=True)
class Constant:
    """One stored weight: ``name`` is the first of ``names``, all of them paths such as ``layers.0.fc.weight``."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    parameter: bool

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Alias:
    """A node's value seen as axes of a constant: axis ``i`` of the node runs over ``axes[i]`` of the constant.

    ``shape`` and ``strides`` are the node's, ``offset`` is its first element in the constant's memory; ``view`` is False
    for elementwise copies (casts, multiples) of the constant.
    """

    constant: str
    axes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    view: bool = True

    @classmethod
    def whole(cls, constant: Constant, tensor: Tensor) -> Alias:
        return cls(constant.name, tuple((i,) for i in range(tensor.dim())), tuple(tensor.shape), tuple(tensor.stride()))


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = path + "." if path else ""
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield prefix + name, tensor, True
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, tensor, False


def find_constants(root: nn.Module) -> dict[str, Constant]:
    """Every parameter and persistent buffer of two or more dimensions, by each of its names."""
    groups: dict[object, list[tuple[str, Tensor, bool]]] = {}
    for name, tensor, parameter in _named_tensors(root):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin) or tensor.dim() < 2:
            continue
        groups.setdefault(_identity(tensor), []).append((name, tensor, parameter))
    constants = {}
    for members in groups.values():
        name, tensor, _ = members[0]
        constant = Constant(name, tuple(m[0] for m in members), tuple(tensor.shape), tensor.dtype,
                            tensor.numel() * tensor.element_size(), any(m[2] for m in members))
        constants.update(dict.fromkeys(constant.names, constant))
    return constants


def packed_constants(root: nn.Module) -> dict[str, Constant]:
    """The weights that a quantized model holds as codes, by each of their names."""
    groups: dict[object, list[tuple[str, Any]]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, packed in vars(module).get("_inro_packed", {}).items():
            if module._parameters.get(name) is None:
                first = next(iter(packed.parts(module).values()))
                groups.setdefault(id(first), []).append((f"{path}.{name}" if path else name, packed))
    constants = {}
    for members in groups.values():
        name, packed = members[0]
        shape, dtype = tuple(packed.layout.shape), packed.dtype
        constant = Constant(name, tuple(m[0] for m in members), shape, dtype, math.prod(shape) * dtype.itemsize, True)
        constants.update(dict.fromkeys(constant.names, constant))
    return constants


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same numbers in memory; never equal by accident of an empty or meta storage."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def adopted_by(module: nn.Module) -> set[str]:
    """The names of the buffers that a capture gave a module: tensors that its code reads from outside of the module tree."""
    names: set[str] = vars(module).get("_inro_adopted", set())
    return names


def adopt(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Registers such a buffer. It is not saved: the next capture finds the tensor again."""
    module.register_buffer(name, tensor, persistent=False)
    module.__dict__.setdefault("_inro_adopted", set()).add(name)


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; for one that has none (meta, sparse, inside vmap) a number of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def alias_of_view(constant: Constant, base: Tensor, view: Tensor) -> Alias | None:
    """The alias of ``view`` if it lies in the memory of ``base``, by strides alone; None if it does not.

    An axis of the view with ``n`` entries ``s`` apart touches an axis of the base with ``N`` entries ``S`` apart if
    it steps at least once over S and does not step over whole turns of N * S.
    """
    if base.layout is not torch.strided or view.layout is not torch.strided or view.numel() == 0:
        return None
    if storage_of(base) != storage_of(view):
        return None
    axes = []
    for n, s in zip(view.shape, view.stride(), strict=True):
        touched = tuple(axis for axis, (size, stride) in enumerate(zip(base.shape, base.stride(), strict=True))
                        if size > 1 and stride <= s * (n - 1) and s < size * stride)
        axes.append(touched)
    return Alias(constant.name, tuple(axes), tuple(view.shape), tuple(view.stride()), int(view.storage_offset() - base.storage_offset()))


def owner_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns the tensor ``name`` (a dotted path from ``root``), and the tensor's name on it."""
    path, _, leaf = name.rpartition(".")
    return root.get_submodule(path), leaf
