"""The copy of a model that is worked on: it shares the tensors of the original until it gets its own."""

from __future__ import annotations

import collections
import contextlib
import copy
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ..constants import adopted_by, storage_of
from ..failures import ModelError
from ..run.classes import TORCHS, needs_rebasing, rebased, user_class
from ..run.weights import recurrent
from ..structure import attributes_of, find, map_values

__all__ = ["attributes", "bound_storages", "clone", "make_independent", "prepare", "reachable"]

NOT_USERS = TORCHS | {"_flat_weights", "_flat_weight_refs"}


def clone(model: nn.Module) -> nn.Module:
    """A copy of the module tree in eval mode that shares its parameters and buffers with the original (until `make_independent`).

    Weights that a module computes from others (weight norm, spectral norm, parametrizations) are computed once and kept
    as plain parameters of the copy. What Python cannot copy (a lock, an open file) is shared.
    """
    memo: dict[int, Any] = {}
    bound = bound_storages(model)
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or storage_of(tensor) not in bound:          # those are copied with their views
                memo.setdefault(id(tensor), _alias(tensor))
    for value in reachable([v for module in model.modules() for v in attributes(module).values()]):
        if isinstance(value, Tensor) and value.grad_fn is not None:          # deepcopy refuses results of a calculation
            memo.setdefault(id(value), value.detach().clone())
    try:
        return prepare(_copied(model, dict(memo)))
    except Exception:
        known = {**memo, **{id(m): m for m in model.modules()}}
        for module in model.modules():
            for value in attributes(module).values():
                try:
                    copy.deepcopy(value, dict(known))
                except Exception:
                    memo[id(value)] = value
    try:
        return prepare(_copied(model, memo))
    except Exception as error:
        raise ModelError(f"the model cannot be copied ({type(error).__name__}: {error}): quantize it with inplace=True") from error


def _alias(tensor: Tensor | None) -> Tensor | None:
    """Another tensor object over the same memory, so that ``tensor.data = `` on the copy is not the original's."""
    if type(tensor) is nn.Parameter:
        plain = tensor.clone() if tensor.is_inference() else tensor           # which could want no gradient
        return nn.Parameter(plain.detach(), tensor.requires_grad)
    return tensor.detach() if type(tensor) is Tensor and tensor.layout is torch.strided else tensor


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """deepcopy, with modules whose class cannot be extended in place as instances of one that can."""
    shells = {module: rebased(module) for module in model.modules()
              if type(module) is user_class(module) and needs_rebasing(type(module))}
    memo.update({id(module): shell for module, shell in shells.items()})
    copied = copy.deepcopy(model, memo)
    for module, shell in shells.items():
        shell.__dict__.update(copy.deepcopy(vars(module), memo))
    return copied


def attributes(module: nn.Module) -> dict[str, Any]:
    """What the user's code keeps on a module beside modules, parameters and buffers."""
    return {name: value for name, value in vars(module).items() if (not name.startswith("_inro") and name not in NOT_USERS)}


def reachable(values: list[Any]) -> Iterator[Any]:
    """Everything in containers and plain objects, to any depth."""
    pending, seen = list(values), set()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type, str, bytes, int, float, types.FunctionType, types.ModuleType)):
            continue
        seen.add(id(value))
        yield value
        with contextlib.suppress(Exception):            # of classes that answer no questions
            if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
                pending.extend([*value])
            elif isinstance(value, dict):
                pending.extend([*value.values()])
        pending.extend(attributes_of(value).values() if not isinstance(value, Tensor) else ())


def bound_storages(root: nn.Module) -> set[int]:
    """The memory of buffers that other buffers or plain attributes of modules see, too: what is written to one, the others show."""
    held = {id(b): storage_of(b) for module in root.modules() for b in module._buffers.values()
            if b is not None and b.layout is torch.strided and b.numel()}
    buffers = set(held.values())
    several = {storage for storage, number in collections.Counter(held.values()).items() if number > 1}
    views = reachable([v for module in root.modules() for v in attributes(module).values()]) if buffers else ()
    return {storage_of(v) for v in views if isinstance(v, Tensor) and v.layout is torch.strided} & buffers | several


def make_independent(root: nn.Module) -> None:
    """Gives every module of a clone tensors of its own: what shares memory with the original is copied, ties stay ties."""
    copies: dict[int, Any] = {}
    bound = bound_storages(root)
    for module in root.modules():
        packed = {buffer for p in module.__dict__.get("_inro_packed", {}).values() for buffer in p.buffers}
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or name in packed:
                    continue
                if name in adopted_by(module) or storage_of(tensor) in bound:
                    continue                   # tensors from outside of the module tree stay these; bound ones are the copy's own
                if id(tensor) not in copies:
                    copied = tensor.detach().clone()
                    copies[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if kind is module._parameters else copied
                kind[name] = copies[id(tensor)]
    memo: dict[int, Any] = {}
    for module in root.modules():
        for name, value in attributes(module).items():
            if type(value) in (list, dict, tuple) or hasattr(value, "__dict__"):
                with contextlib.suppress(Exception):
                    module.__dict__[name] = _with_copies(value, copies, memo)


def _with_copies(value: Any, copies: dict[int, Tensor], memo: dict[int, Any]) -> Any:
    """A value in whose containers and objects the tensors are those of the copy; the same object if there are none of them."""
    if not find(value, lambda x: isinstance(x, Tensor) and id(x) in copies):
        return value
    return map_values(value, lambda x: isinstance(x, Tensor) and id(x) in copies, lambda x: copies[id(x)], memo)


def prepare(model: nn.Module) -> nn.Module:
    """Puts a model, in place, into the form that is captured: eval mode, computed weights as plain parameters."""
    for module in model.modules():
        _fold_computed_weights(module)
        _register_plain_tensors(module)
        if isinstance(module, nn.RNNBase):
            recurrent(module)
    model.eval()                        # somebody's own train() may return nothing
    return model


def _register_plain_tensors(module: nn.Module) -> None:
    """A matrix in a plain attribute becomes a buffer: it is a weight like any other, and moves with the rest."""
    for name, value in list(vars(module).items()):
        if type(value) is Tensor and value.dim() >= 2 and value.is_floating_point() and value.layout is torch.strided:
            del module.__dict__[name]
            module.register_buffer(name, value.detach())


def _fold_computed_weights(module: nn.Module) -> None:
    if "parametrizations" in module._modules:
        # torch's own removal would edit the class, which the copy shares with the original
        parametrized: Any = module._modules["parametrizations"]
        names = [*parametrized]
        with torch.no_grad():
            weights = {name: getattr(module.eval(), name).detach().clone() for name in names}
        module.__class__ = next(c for c in type(module).__mro__ if c is not type(module))
        del module._modules["parametrizations"]
        for name, weight in weights.items():
            module.register_parameter(name, nn.Parameter(weight))
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, prune.BasePruningMethod):
            name = hook._tensor_name
            weight = hook.apply_mask(module).detach().clone()
            del module._forward_pre_hooks[key], module._parameters[f"{name}_orig"], module._buffers[f"{name}_mask"]
            module.__dict__.pop(name, None)
            module.register_parameter(name, nn.Parameter(weight))
        if type(hook).__name__ in ("WeightNorm", "SpectralNorm"):
            with torch.no_grad():
                if type(hook).__name__ == "WeightNorm":
                    weight = hook.compute_weight(module)
                else:
                    weight = hook.compute_weight(module, do_power_iteration=False)
            del module._forward_pre_hooks[key]
            for name in [n for n in module._parameters if n in (f"{hook.name}_g", f"{hook.name}_v", f"{hook.name}_orig")]:
                del module._parameters[name]
            for name in (f"{hook.name}_u", f"{hook.name}_v"):
                module._buffers.pop(name, None)
            module.__dict__.pop(hook.name, None)
            module.register_parameter(hook.name, nn.Parameter(weight.detach().clone()))
