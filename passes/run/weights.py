"""Modules that hold weights as codes: ``module.weight`` is unpacked from its parts whenever Python asks for it, never kept.

What is written to such a weight is packed again: in place (``mul_``, ``nn.init``, ``weight.data = ``), through any view of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..constants import storage_of
from ..failures import ModelError
from ..scheme import Layout, Scheme
from .classes import Part, add_part, compiling, remove_part

__all__ = ["FakeQuantizedWeights", "Packed", "PackedWeights", "RecurrentWeights", "attach_fake",
           "attach_none", "attach_packed", "detach_fakes", "mapped_dtype", "recurrent"]


@dataclasses.dataclass
class Packed:
    """How one weight of a module is held: ``buffers`` are the names of its parts on the module, in the scheme's order.

    ``layout`` turns the scheme's matrix [out, in] back into the weight.
    """

    scheme: Scheme
    buffers: tuple[str, ...]
    layout: Layout
    dtype: torch.dtype

    def parts(self, module: nn.Module) -> dict[str, Tensor]:
        return {part: getattr(module, name) for part, name in zip(self.scheme.parts, self.buffers, strict=True)}

    def unpack(self, module: nn.Module) -> Tensor:
        """The weight as its parts say it is, a tensor of nobody else's."""
        return self.layout.restore(self.scheme.unpack(self.parts(module), self.layout.columns, self.dtype))

    def pack(self, module: nn.Module, weight: Tensor) -> None:
        """Puts a float weight in the place of what the parts held."""
        with torch.no_grad():
            for part, value in self.scheme.pack(self.layout.matrix(weight.detach())).items():
                self.parts(module)[part].copy_(value)


class UnpackedWeight(Tensor):
    """An unpacked weight, or a view of one: what is written to it goes back to the codes."""

    _is_param = True                           # so that it is an nn.Parameter for code that asks
    _inro_of: tuple[nn.Module, Packed, Tensor]

    @classmethod
    def of(cls, module: nn.Module, packed: Packed) -> UnpackedWeight:
        weight = packed.unpack(module).detach()
        new = weight.as_subclass(cls)
        new._inro_of = module, packed, weight
        return new

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__set__" and type(args[0]) is cls:
                if getattr(func, "__self__", None) is not Tensor.data:
                    return func(*args, **kwargs)
                weight, value = args                                    # weight.data = value
                if value.shape != weight.shape:
                    raise ModelError(f"a weight held as codes has shape {tuple(weight.shape)}, so data of {tuple(value.shape)} cannot be "
                                     f"put there: quantize the model again with the new weight")
                Tensor.copy_(weight, value)
                return _write_back(weight)
            if func is Tensor.__deepcopy__:
                return nn.Parameter(args[0].detach().as_subclass(Tensor).clone(), requires_grad=False)
            given = [b for a in (*args, *kwargs.values()) for b in (a if type(a) in (list, tuple) else (a,))]
            versions = [(a, _version(a)) for a in given if type(a) is cls]
            result = func(*args, **kwargs)
            for argument, version in versions:
                if _version(argument) != version or (version < 0 and _writes(getattr(func, "__name__", ""))):
                    _write_back(argument)
            sources = {storage_of(a): a for a, _ in versions}
            return _marked(result, sources, cls)

    def __repr__(self, *, tensor_contents: Any = None) -> str:           # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"{self.as_subclass(Tensor)!r} (unpacked)"


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; -1 in inference mode, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _writes(name: str) -> bool:
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _write_back(weight: UnpackedWeight) -> None:
    module, packed, base = weight._inro_of
    packed.pack(module, base)


def _marked(result: Any, sources: dict[int, UnpackedWeight], kind: type[UnpackedWeight]) -> Any:
    """Views of an unpacked weight among results know whose they are."""
    if isinstance(result, (tuple, list)) and any(isinstance(r, Tensor) for r in result) and type(result) in (tuple, list):
        return type(result)(_marked(r, sources, kind) for r in result)
    if not isinstance(result, Tensor) or (source := sources.get(storage_of(result))) is None:
        return result
    view = result if type(result) is kind else result.as_subclass(kind)
    view._inro_of = source._inro_of
    return view


class PackedWeights(Part):
    """A module some of whose weights are held as codes.

    The parts of a tied weight lie on one module; the others reach them through ``_inro_links``: name -> (module, its name).
    """

    order = 20
    _inro_packed: dict[str, Packed]
    _inro_links: dict[str, tuple[nn.Module, str]]

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        if name in state.get("_inro_packed", ()) and state["_parameters"].get(name) is None:
            packed = state["_inro_packed"][name]
            return packed.unpack(self) if compiling() else UnpackedWeight.of(self, packed)
        if name in state.get("_inro_links", ()):
            holder, there = state["_inro_links"][name]
            return getattr(holder, there)
        return super().__getattr__(name)

    @classmethod
    def compose(cls, user: type[Any], namespace: dict[str, Any]) -> tuple[type, ...]:
        reset = getattr(user, "reset_parameters", None)
        if reset is not None and "parameters" in getattr(getattr(reset, "__code__", None), "co_names", ()):
            namespace["reset_parameters"] = _refuse_reset           # it would reach the float ones alone
        return ()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, UnpackedWeight) and value._inro_of[0] is self and value.shape == value._inro_of[2].shape:
            return                                                  # ``weight += 1``: it was written to in place, and packed again
        self._refuse_change(name)
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad and self.__dict__.get("_inro_packed"):
            name = next(iter(self._inro_packed))
            raise ModelError(f"{type(self).__name__}.{name} is held as codes, which no optimizer can train: leave the layer float, with "
                             f"overrides={{...: None}}, or train it before, with prepare_graph(..., qat=True)")
        return super().requires_grad_(requires_grad)

    def __delattr__(self, name: str) -> None:
        self._refuse_change(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: Any) -> None:
        self._refuse_change(name)
        if isinstance(param, UnpackedWeight):
            raise ModelError(f"{type(self).__name__}.{param._inro_of[1].buffers[0]} holds a weight as codes, which cannot become the "
                             f"parameter {name} (by pruning, weight norm or a parametrization): do that to the float model, and "
                             f"quantize it then")
        super().register_parameter(name, param)

    def _refuse_change(self, name: str) -> None:
        packed = self.__dict__.get("_inro_packed", {}).get(name)
        if packed is not None:
            raise ModelError(f"{type(self).__name__}.{name} is held as codes ({packed.buffers[0]}), so no other weight can be put "
                             f"there: quantize the model again with the new weight")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scales = {name: self._buffers[name] for packed in self._inro_packed.values() for name in packed.buffers
                  if name in self._buffers}
        result = super()._apply(fn, recurse)
        for name, before in scales.items():
            after = self._buffers[name]
            if after is not None and before is not None and after.dtype != before.dtype:          # .half() is not for scales
                self._buffers[name] = before.to(after.device)
        for packed in self._inro_packed.values():
            packed.dtype = mapped_dtype(packed.dtype, fn)
        return result


def _refuse_reset(self: nn.Module) -> None:
    """Stands in for a reset_parameters that goes through ``self.parameters()``."""
    raise ModelError(f"{type(self).__name__} holds weights as codes, and reset_parameters would reach its biases alone: reset the float "
                     f"model, and quantize it then")


class FakeQuantizedWeights(Part):
    """A module in quantization-aware training: ``module.weight`` is its float weight sent through ``_inro_fake["weight"]``."""

    order = 30
    _inro_fake: dict[str, nn.Module]

    def __getattr__(self, name: str) -> Any:
        fake = self.__dict__.get("_inro_fake", {}).get(name)
        return super().__getattr__(name) if fake is None else fake(self._parameters[name])


class RecurrentWeights(Part):
    """For torch's recurrent modules, which keep a second list of their weights: the list is made when it is read."""

    order = 40

    def __getattr__(self, name: str) -> Any:
        if name == "_flat_weights":
            return [_plain(getattr(self, n)) for n in self._flat_weights_names]
        return super().__getattr__(name)

    def _init_flat_weights(self) -> None:
        self.__dict__.pop("_flat_weights", None)
        self.__dict__["_flat_weight_refs"] = []

    def _update_flat_weights(self) -> None:
        """Nothing to update: the list is made at each read."""

    def flatten_parameters(self) -> None:
        """Nothing to flatten: a list of unpacked weights has no memory of its own."""


def _plain(weight: Any) -> Any:
    """Recurrent operators of torch want a list of plain tensors."""
    return weight.as_subclass(Tensor) if type(weight) is UnpackedWeight else weight


def mapped_dtype(dtype: torch.dtype, fn: Callable[[Tensor], Tensor]) -> torch.dtype:
    """What becomes of a dtype under the function that ``Module._apply`` is given."""
    return fn(torch.empty(0, dtype=dtype, device="cpu")).dtype


def attach_none(module: nn.Module) -> None:
    """Makes the root of a quantized model one of ours, where it holds no weight itself and runs its own code."""
    if not issubclass(type(module), Part):
        module.__dict__.update(_inro_packed={}, _inro_links={})
        add_part(module, PackedWeights)


def attach_packed(module: nn.Module, name: str, packed: Packed, holder: nn.Module | None = None,
                  there: tuple[str, ...] = ()) -> None:
    """Makes ``module.name`` an unpacked view of its parts, which the module holds, or ``holder`` under other names."""
    module.__dict__.setdefault("_inro_packed", {})
    module.__dict__.setdefault("_inro_links", {})
    add_part(module, PackedWeights)
    module.__dict__["_inro_packed"][name] = packed
    if holder is not None and holder is not module:
        module.__dict__["_inro_links"].update({mine: (holder, other) for mine, other in zip(packed.buffers, there, strict=True)})


def attach_fake(module: nn.Module, name: str, fake: nn.Module) -> None:
    """Makes ``module.name`` what ``fake`` makes of the float parameter of that name."""
    module.__dict__.setdefault("_inro_fake", {})[name] = fake
    add_part(module, FakeQuantizedWeights)


def detach_fakes(module: nn.Module) -> None:
    """Back to the float weights."""
    remove_part(module, FakeQuantizedWeights)
    module.__dict__.pop("_inro_fake", None)


def recurrent(module: nn.Module) -> None:
    """Makes the flat list of a recurrent module's weights follow the weights."""
    add_part(module, RecurrentWeights)
    module._init_flat_weights()
