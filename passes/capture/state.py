"""The state of a model: what forward writes to is found, kept apart and put back."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..constants import ABSENT, storage_of
from ..failures import InputError
from .clone import attributes, bound_storages
from .draws import OwnDraws
from .example import Example
from .listener import Listener
from .traced import quiet

__all__ = ["ModuleState", "held_tensor", "put_state", "reference_run", "rewind"]


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
        self.saved = [(path, module, {name: (value, _pristine(value, pristine)) for name, value in attributes(module).items()})
                      for path, module in root.named_modules()]
        self.see_buffers()

    def see_buffer(self, name: str, tensor: Tensor | None) -> None:
        """Takes one buffer (None: its absence) as what shall be there."""
        path, _, leaf = name.rpartition(".")
        for owner, _, buffers in self.buffers:
            if owner == path and tensor is None:
                buffers.pop(leaf, None)
            elif owner == path and not isinstance(tensor, nn.Parameter):
                buffers[leaf] = tensor

    def see_buffers(self) -> None:
        """Takes the buffers that there are now as those that shall be there."""
        self.buffers = [(path, module, dict(module._buffers)) for path, module, _ in self.saved]

    def forget(self, name: str) -> None:
        """Lets go of a buffer or parameter that is replaced."""
        self.see_buffer(name, None)
        self._memo = {key: value for key, value in self._memo.items() if isinstance(value, nn.Module)}

    def changed(self) -> Iterator[tuple[str, nn.Module, str]]:
        seen: set[tuple[int, int]] = set()
        for path, module, before in self.saved:
            now = attributes(module)
            for name in {**before, **now}:
                pristine = before[name][1] if name in before else ABSENT
                if pristine is not _UNKNOWN and not _sure_alike(now.get(name, ABSENT), pristine, seen):
                    yield path, module, name
        for path, module, buffers in self.buffers:
            for name in {**buffers, **module._buffers}:
                if module._buffers.get(name, ABSENT) is not buffers.get(name, ABSENT):
                    yield path, module, name

    def restore(self) -> None:
        memo = dict(self._memo)
        saved = {id(module): before for _, module, before in self.saved}
        for _, module, name in list(self.changed()):
            if name in module._modules or name in module._parameters:      # built by the first call, over None: it stays
                saved[id(module)].pop(name, None)
                vars(module).pop(name, None)
            elif name not in saved[id(module)]:
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


def _sure_alike(now: Any, then: Any, seen: set[tuple[int, int]]) -> bool:
    try:
        return _alike(now, then, seen)
    except Exception:                           # of a class that answers no questions
        return True


def _alike(now: Any, then: Any, seen: set[tuple[int, int]]) -> bool:
    """Do two values hold the same? Objects that say nothing about themselves are taken to."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (bool, int, float, complex, str, bytes)):
        return bool(now == then or (now != now and then != then))
    if (id(now), id(then)) in seen:
        return True
    seen.add((id(now), id(then)))
    if isinstance(now, Tensor):
        return _same_tensor(now, then)
    if isinstance(now, dict):
        if list(now) != list(then) or not all(_alike(now[k], then[k], seen) for k in now):
            return False
    elif isinstance(now, (set, frozenset)):
        return bool(now == then)
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
                return bool(now.shape == then.shape and now.dtype == then.dtype and now.tobytes() == then.tobytes())
            return _alike(now.__reduce_ex__(4)[1:3], then.__reduce_ex__(4)[1:3], seen)
    except Exception:
        return True


FRAGILE = ("grouped_mm", "embedding_bag", "lstm", "gru", "rnn_")          # operators that do not check what offsets and states say


class _StateWatch(OwnDraws):
    """Finds the parameters and buffers that a forward writes to, before it writes, so that the original stays as it was."""

    def __init__(self, storages: dict[int, str]):
        super().__init__()
        self.storages, self.compiled, self.fragile = storages, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.compiled = self.compiled or isinstance(func, torch._ops.HigherOrderOperator)
        self.fragile = self.fragile or any(name in str(func) for name in FRAGILE)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[i] if i < len(args) else kwargs.get(argument.name)
                    for tensor in value if isinstance(value, (list, tuple)) else (value,):
                        name = self.storages.get(storage_of(tensor)) if isinstance(tensor, Tensor) else None
                        if name is not None and tensor.numel():
                            raise _StateWritten(name)
        return self.call(func, args, kwargs)


class _StateWritten(Exception):
    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a run of the float model told.

    ``want``       its output
    ``written``    the state that it writes to, as it was before; each such tensor is the copy's own from then on
    ``apart``      further buffers, as they were, whose values the copy has as its own: code that this run did not reach may write to them
    ``replaced``   buffers that forward puts others in the place of
    ``example``    which knows whether the model draws
    ``drew``       from Python's or numpy's generators
    ``fragile``    its operators read past their inputs where sizes do not fit
    ``compiled``   it has functions that torch compiles when they run, which works under no mode
    """

    want: Any
    written: dict[str, Tensor]
    example: Example
    drew: bool = False
    fragile: bool = False
    replaced: tuple[str, ...] = ()
    apart: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    compiled: bool = False


SMALL = 65_536           # elements: smaller buffers are kept apart from the model's through all runs


def reference_run(root: nn.Module, example: Example, own: ModuleState) -> Reference:
    """Runs the model, and leaves its state as it was. Raises `InputError` if it does not run.

    Operators such as batch norm write to buffers without saying so: all buffers are the copy's own meanwhile, and compared after.
    """
    written: dict[str, Tensor] = {}
    buffers = {f"{path}.{name}" if path else name for path, module in root.named_modules() for name, t in module._buffers.items()
               if t is not None and t.numel() and t.layout is torch.strided and t.device.type != "meta"
               and not any(name in p.buffers for p in vars(module).get("_inro_packed", {}).values())}
    bound = bound_storages(root)                    # the copy's own already
    kept = {name: held.detach().clone() if storage_of(held) in bound else put_state(root, name, None)
            for name in sorted(buffers) for held in (held_tensor(root, name),)}
    own.see_buffers()
    copies = {name: held_tensor(root, name) for name in kept}
    apart: dict[str, Tensor] = {}
    while True:
        args, kwargs = example.fresh()
        try:
            heard = Listener()
            watch = _StateWatch(_storages(root, {**written, **kept}))
            with quiet(root), watch:
                want = heard.aside(lambda: root.forward(*args, **kwargs))  # noqa: B023
            replaced = tuple(name for name in kept if _held_or_none(root, name) is not copies[name])
            for name, before in kept.items():
                if name in replaced:
                    put_buffer(root, name, copies[name] if storage_of(copies[name]) in bound else before)
                elif not _same_tensor(copies[name], before):
                    written.setdefault(name, before)
                elif before.numel() <= SMALL:
                    apart[name] = before
                else:
                    put_buffer(root, name, before)
                own.see_buffer(name, held_tensor(root, name))
            if watch.compiled:                             # what torch.cond compiles inside a mode fails outside of it
                torch._dynamo.reset()
            example = dataclasses.replace(example, draws=watch.drew)
            return Reference(want, written, example, heard.drew, watch.fragile, replaced, apart, watch.compiled)
        except _StateWritten as state:
            own.restore()
            rewind(root, kept)
            written[state.name] = put_state(root, state.name, None)
            own.see_buffers()
        except Exception as error:
            own.restore()
            outcome = _run_past_modes(root, example, own)
            if outcome is None:
                raise InputError(f"the model does not run on example_inputs: {type(error).__name__}: {error}") from error
            return outcome


def _run_past_modes(root: nn.Module, example: Example, own: ModuleState) -> Reference | None:
    """For models with compiled functions inside, which refuse to run under a mode: on tensors of its own; None if they fail, too."""
    written: dict[str, Tensor] = {}
    kept = {name: put_state(root, name, None) for name in sorted(set(_storages(root, written).values()))}
    own.see_buffers()
    versions = {name: held_tensor(root, name)._version for name in kept}
    args, kwargs = example.fresh()
    heard = Listener()
    heard.drew = heard.seeded = True                     # compiled code draws unheard
    try:
        torch._dynamo.reset()
        with quiet(root):
            want = heard.aside(lambda: root.forward(*args, **kwargs))
    except Exception:
        want = None
    for name, before in kept.items():
        if held_tensor(root, name)._version == versions[name]:
            put_state(root, name, before)
        else:
            written[name] = before
        own.see_buffer(name, held_tensor(root, name))
    return None if want is None else Reference(want, written, example, compiled=True)


def _held_or_none(root: nn.Module, name: str) -> Tensor | None:
    path, _, leaf = name.rpartition(".")
    return root.get_submodule(path)._buffers.get(leaf)


def put_buffer(root: nn.Module, name: str, value: Tensor) -> None:
    """Puts a buffer back in its place."""
    path, _, leaf = name.rpartition(".")
    root.get_submodule(path)._buffers[leaf] = value


def held_tensor(root: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that path. Raises `KeyError` if there is none, as for a weight that is held as codes."""
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    held = next((kind[leaf] for kind in (module._parameters, module._buffers) if kind.get(leaf) is not None), None)
    if held is None:
        raise KeyError(name)
    return held


def _storages(root: nn.Module, written: dict[str, Tensor]) -> dict[int, str]:
    """The stored tensors that are not the copy's own yet: by memory, their names."""
    names = {}
    for path, module in root.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                full = f"{path}.{name}" if path else name
                if tensor is not None and full not in written and tensor.numel():
                    names[storage_of(tensor)] = full
    return names


def put_state(root: nn.Module, name: str, value: Tensor | None) -> Tensor:
    """Puts ``value`` (None: a copy of what is there) in the place of a parameter or buffer; what was there before."""
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    kind: dict[str, Any] = module._parameters if module._parameters.get(leaf) is not None else module._buffers
    before: Tensor = kind[leaf]
    copied = before.detach().clone() if value is None else value
    kind[leaf] = nn.Parameter(copied, before.requires_grad) if kind is module._parameters and value is None else copied
    return before


def rewind(root: nn.Module, written: dict[str, Tensor]) -> None:
    """Puts the tensors that forward writes to back to what they were before the first run."""
    for name, before in written.items():
        with contextlib.suppress(KeyError):              # it is held as codes by now
            held_tensor(root, name).data.copy_(before)
