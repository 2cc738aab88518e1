"""The copy of a model that is worked on, and its state: what forward writes to is found, kept apart and put back."""

from __future__ import annotations

import collections
import copy
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from .constants import ABSENT, storage_of
from .example import Example, run
from .failures import InputError, ModelError
from .module import needs_rebasing, rebased, recurrent, user_class

__all__ = ["ModuleState", "clone", "make_independent", "prepare", "put_state", "reference_run", "rewind"]


def clone(model: nn.Module) -> nn.Module:
    """A copy of the module tree in eval mode that shares its parameters and buffers with the original (until `make_independent`).

    Weights that a module computes from others (weight norm, spectral norm, parametrizations) are computed once and kept
    as plain parameters of the copy. What Python cannot copy (a lock, an open file) is shared.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            memo[id(tensor)] = tensor
    for value in _reachable([v for module in model.modules() for v in _attributes(module).values()]):
        if isinstance(value, Tensor) and value.grad_fn is not None:          # deepcopy refuses results of a calculation
            memo.setdefault(id(value), value.detach().clone())
    try:
        return prepare(_copied(model, dict(memo)))
    except Exception:
        known = {**memo, **{id(m): m for m in model.modules()}}
        for module in model.modules():
            for value in _attributes(module).values():
                try:
                    copy.deepcopy(value, dict(known))
                except Exception:
                    memo[id(value)] = value
    try:
        return prepare(_copied(model, memo))
    except Exception as error:
        raise ModelError(f"the model cannot be copied ({type(error).__name__}: {error}): quantize it with inplace=True") from error


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """deepcopy, with modules whose class cannot be extended in place as instances of one that can."""
    shells = {module: rebased(module) for module in model.modules() if needs_rebasing(user_class(module))}
    memo.update({id(module): shell for module, shell in shells.items()})
    copied = copy.deepcopy(model, memo)
    for module, shell in shells.items():
        shell.__dict__.update(copy.deepcopy(vars(module), memo))
    return copied


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _is_users(name)}


def _reachable(values: list[Any]) -> Iterator[Any]:
    """Everything in containers and plain objects, to any depth."""
    pending, seen = list(values), set()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type, str, bytes, int, float, types.FunctionType, types.ModuleType)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        pending.extend(getattr(value, "__dict__", {}).values() if not isinstance(value, Tensor) else ())


def make_independent(root: nn.Module) -> None:
    """Gives every module of a clone tensors of its own: what shares memory with the original is copied, ties stay ties."""
    copies: dict[int, Tensor] = {}
    for module in root.modules():
        packed = {buffer for p in module.__dict__.get("_inro_packed", {}).values() for buffer in p.buffers}
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or name in packed:
                    continue
                if name.startswith("_constant_"):          # a tensor from outside of the module tree stays that tensor
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
    """What forward may change on a model beside the contents of its parameters and buffers, as it was.

    Plain attributes to any depth (containers, objects, arrays, generators, tensors), and which tensors the buffers are.
    `changed` finds who differs, `restore` puts it back.
    """

    def __init__(self, root: nn.Module):
        self._memo: dict[int, Any] = {id(m): m for m in root.modules()}
        for module in root.modules():
            self._memo.update({id(t): t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None})
        pristine: dict[int, Any] = dict(self._memo)
        self.saved = [(path, module, {name: (value, _pristine(value, pristine)) for name, value in _attributes(module).items()})
                      for path, module in root.named_modules()]
        self.see_buffers()

    def see_buffers(self) -> None:
        """Takes the buffers that there are now as those that shall be there."""
        self.buffers = [(path, module, dict(module._buffers)) for path, module, _ in self.saved]

    def changed(self) -> Iterator[tuple[str, nn.Module, str]]:
        seen: set[tuple[int, int]] = set()
        for path, module, before in self.saved:
            now = _attributes(module)
            for name in {**before, **now}:
                pristine = before[name][1] if name in before else ABSENT
                if pristine is not _UNKNOWN and not _alike(now.get(name, ABSENT), pristine, seen):
                    yield path, module, name
        for path, module, buffers in self.buffers:
            for name in {**buffers, **module._buffers}:
                if module._buffers.get(name, ABSENT) is not buffers.get(name, ABSENT):
                    yield path, module, name

    def restore(self) -> None:
        memo = dict(self._memo)
        saved = {id(module): before for _, module, before in self.saved}
        for _, module, name in list(self.changed()):
            if name not in saved[id(module)]:
                vars(module).pop(name, None)
            else:
                value, pristine = saved[id(module)][name]
                vars(module)[name] = _put_back(value, pristine, memo)
        for _, module, buffers in self.buffers:
            if any(module._buffers.get(n, ABSENT) is not buffers.get(n, ABSENT) for n in {**buffers, **module._buffers}):
                module._buffers.clear()
                module._buffers.update(buffers)


_UNKNOWN = object()        # the pristine form of what cannot be copied


def _pristine(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return _UNKNOWN


def _put_back(value: Any, pristine: Any, memo: dict[int, Any]) -> Any:
    """``value`` with the contents of ``pristine`` where it can be changed in place, else a copy of that."""
    fresh = copy.deepcopy(pristine, memo)
    if isinstance(value, Tensor) and isinstance(fresh, Tensor) and value.shape == fresh.shape and value.dtype == fresh.dtype:
        with torch.no_grad():
            value.copy_(fresh)
        return value
    if type(value) is list:
        value[:] = fresh
    elif type(value) in (dict, set):
        value.clear()
        value.update(fresh)
    elif type(getattr(value, "__dict__", None)) is dict and not callable(value) and not isinstance(value, Tensor):
        vars(value).clear()
        vars(value).update(vars(fresh))
        return fresh if isinstance(value, (list, dict, set)) else value
    else:
        return fresh
    return value


def _alike(now: Any, then: Any, seen: set[tuple[int, int]]) -> bool:
    """Do two values hold the same? Objects that say nothing about themselves are taken to."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (bool, int, float, complex, str, bytes)):
        return now == then or (now != now and then != then)
    if (id(now), id(then)) in seen:
        return True
    seen.add((id(now), id(then)))
    if isinstance(now, Tensor):
        return _same_tensor(now, then)
    if isinstance(now, dict):
        if list(now) != list(then) or not all(_alike(now[k], then[k], seen) for k in now):
            return False
    elif isinstance(now, (set, frozenset)):
        return now == then
    elif isinstance(now, (list, tuple, collections.deque)):
        if len(now) != len(then) or not all(_alike(a, b, seen) for a, b in zip(now, then, strict=True)):
            return False
    attributes = getattr(now, "__dict__", None)
    if type(attributes) is dict and not callable(now):
        return _alike(attributes, vars(then), seen)
    if isinstance(now, (dict, list, tuple, collections.deque, nn.Module)) or callable(now):
        return True
    return _same_form(now, then, seen)


def _same_tensor(now: Tensor, then: Tensor) -> bool:
    if now.shape != then.shape or now.dtype != then.dtype or now.layout != then.layout or now.layout is not torch.strided:
        return now.shape == then.shape and now.layout == then.layout
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (now, then))
    return a.device != b.device or torch.equal(a, b)


def _same_form(now: Any, then: Any, seen: set[tuple[int, int]]) -> bool:
    """Of objects of other libraries, such as arrays, random generators and counters: by what pickle would say of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if type(now).__module__ == "numpy":
                return now.shape == then.shape and now.dtype == then.dtype and now.tobytes() == then.tobytes()
            return _alike(now.__reduce_ex__(4)[1:3], then.__reduce_ex__(4)[1:3], seen)
    except Exception:
        return True


_TORCHS = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


def _is_users(name: str) -> bool:
    return not name.startswith("_inro") and name not in _TORCHS


class _StateWatch(TorchDispatchMode):
    """Finds the parameters and buffers that a forward writes to, before it writes, so that the original stays as it was."""

    supports_higher_order_operators = True

    def __init__(self, storages: dict[int, str]):
        super().__init__()
        self.storages, self.compiled = storages, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.compiled = self.compiled or isinstance(func, torch._ops.HigherOrderOperator)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
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


def reference_run(root: nn.Module, example: Example, own: ModuleState) -> tuple[dict[str, Tensor], Any]:
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
            with _StateWatch(names) as watch:
                want = run(root, example)
            if watch.compiled:                             # what torch.cond compiles inside a mode fails outside of it
                torch._dynamo.reset()
            return written, want
        except _StateWritten as state:
            own.restore()
            written[state.name] = put_state(root, state.name, None)
            own.see_buffers()
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
