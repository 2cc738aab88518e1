"""The copy of a model that is worked on, and its state: what forward writes to is found, kept apart and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from .constants import storage_of
from .example import Example, run
from .failures import InputError
from .module import recurrent

__all__ = ["ModuleState", "clone", "make_independent", "prepare", "put_state", "reference_run", "rewind"]


def clone(model: nn.Module) -> nn.Module:
    """A copy of the module tree in eval mode that shares every tensor with the original (until `make_independent`).

    Weights that a module computes from others (weight norm, spectral norm, parametrizations) are computed once and kept
    as plain parameters of the copy.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            for tensor in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)):
                if isinstance(tensor, Tensor):
                    memo[id(tensor)] = tensor
    return prepare(copy.deepcopy(model, memo))


def make_independent(root: nn.Module) -> None:
    """Gives every module of a clone tensors of its own: what shares memory with the original is copied, ties stay ties."""
    copies: dict[int, Tensor] = {}
    for module in root.modules():
        packed = {buffer for p in module.__dict__.get("_inro_packed", {}).values() for buffer in p.buffers}
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or name in packed:
                    continue
                if id(tensor) not in copies:
                    copied = tensor.detach().clone()
                    copies[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if kind is module._parameters else copied
                kind[name] = copies[id(tensor)]


def prepare(model: nn.Module) -> nn.Module:
    """Puts a model, in place, into the form that is captured: eval mode, computed weights as plain parameters."""
    for module in model.modules():
        _fold_computed_weights(module)
        _register_plain_tensors(module)
        if isinstance(module, nn.RNNBase):
            recurrent(module)
    return model.eval()


def _register_plain_tensors(module: nn.Module) -> None:
    """A matrix in a plain attribute becomes a buffer: it is a weight like any other, and moves with the rest."""
    for name, value in list(vars(module).items()):
        if type(value) is Tensor and value.dim() >= 2 and value.is_floating_point() and value.layout is torch.strided:
            del module.__dict__[name]
            module.register_buffer(name, value.detach())


def _fold_computed_weights(module: nn.Module) -> None:
    if "parametrizations" in module._modules:
        # torch's own removal would edit the class, which the copy shares with the original
        names = list(module.parametrizations)
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


class ModuleState:
    """What the modules of a model hold in plain attributes, as it was: `changed` finds who differs, `restore` puts it back."""

    def __init__(self, root: nn.Module):
        self.saved = [(path, module, {name: (value, _contents(value)) for name, value in vars(module).items() if _is_users(name)})
                      for path, module in root.named_modules()]

    def changed(self) -> Iterator[tuple[str, nn.Module, str]]:
        for path, module, before in self.saved:
            now = vars(module)
            for name in {*before, *(n for n in now if _is_users(n))}:
                value, contents = before.get(name, (_ABSENT, None))
                if (now.get(name, _ABSENT) is not value and not _plainly_equal(now.get(name, _ABSENT), value)) \
                        or not _same_contents(_contents(value), contents):
                    yield path, module, name

    def restore(self) -> None:
        for _, module, name in list(self.changed()):
            before = next(b for _, m, b in self.saved if m is module)
            if name not in before:
                vars(module).pop(name, None)
                continue
            value, contents = before[name]
            vars(module)[name] = value
            if isinstance(value, list):
                value[:] = contents
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(contents)


_ABSENT = object()


def _is_users(name: str) -> bool:
    return not name.startswith("_inro") and name not in (
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "_forward_hooks", "_forward_pre_hooks",
        "_flat_weights", "_flat_weight_refs")


def _contents(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else None


def _same_contents(a: Any, b: Any) -> bool:
    if a is None or b is None or len(a) != len(b):
        return a is b
    pairs = zip(a.values(), b.values()) if type(a) is dict and a.keys() == b.keys() else zip(a, b)  # noqa: B905
    return all(x is y or _plainly_equal(x, y) for x, y in pairs)


def _plainly_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b


class _StateWatch(TorchDispatchMode):
    """Finds the parameters and buffers that a forward writes to, before it writes, so that the original stays as it was."""

    def __init__(self, storages: dict[int, str]):
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[i] if i < len(args) else kwargs.get(argument.name)
                    for tensor in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(tensor, Tensor):
                            name = self.storages.get(storage_of(tensor))
                            if name is not None and tensor.numel():
                                raise _StateWritten(name)
        return func(*args, **kwargs)


class _StateWritten(Exception):
    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


def reference_run(root: nn.Module, example: Example) -> tuple[dict[str, Tensor], Any]:
    """The output of the model, and the state that it writes to: each such tensor is the copy's own from then on."""
    written: dict[str, Tensor] = {}
    while True:
        names = {}
        for path, module in root.named_modules():
            for kind in (module._parameters, module._buffers):
                for name, tensor in kind.items():
                    full = f"{path}.{name}" if path else name
                    if tensor is not None and full not in written and tensor.numel():
                        names[storage_of(tensor)] = full
        try:
            with _StateWatch(names):
                want = run(root, example)
            return written, want
        except _StateWritten as state:
            written[state.name] = put_state(root, state.name, None)
        except Exception as error:
            raise InputError(f"the model does not run on example_inputs: {type(error).__name__}: {error}") from error


def put_state(root: nn.Module, name: str, value: Tensor | None) -> Tensor:
    """Puts ``value`` (None: a copy of what is there) in the place of a parameter or buffer; what was there before."""
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    kind: dict[str, Any] = module._parameters if module._parameters.get(leaf) is not None else module._buffers
    before = kind[leaf]
    copied = before.detach().clone() if value is None else value
    kind[leaf] = nn.Parameter(copied, before.requires_grad) if kind is module._parameters and value is None else copied
    return before


def rewind(root: nn.Module, written: dict[str, Tensor]) -> None:
    """Puts the tensors that forward writes to back to what they were before the first run."""
    for name, before in written.items():
        path, _, leaf = name.rpartition(".")
        getattr(root.get_submodule(path), leaf).data.copy_(before)
