"""Capturing one model: what its tracers share, and how a traced module becomes a `Program`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..carriers import Use
from ..constants import Alias, Constant, adopt, alias_of_view, find_constants, packed_constants, storage_of
from ..program import Program
from ..run.classes import user_class
from ..structure import find
from .call import IMMUTABLE, Call, Unusual
from .clone import attributes
from .draws import OwnDraws
from .ended import examples_of, layer_of, program_of
from .frames import at_work
from .leaks import take_back
from .proxy import TraceError, example_of, is_proxy
from .state import ModuleState
from .traced import own_call
from .tracer import Tracer, Untraceable
from .untraced import PythonRun, UseRecorder

__all__ = ["Session", "brief", "has_foreign_hooks"]


class Session:
    """Everything that capturing one model collects."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.state = ModuleState(root)
        self.captures: dict[str, Program] = {}          # path -> program of a region (or of the root)
        self.layers: dict[str, Program] = {}            # path -> program of a module that owns weights
        self.refusals: dict[str, str] = {}              # path -> why its own code stays Python
        self.steps: list[tuple[str, str]] = []          # the rungs tried: (rung, outcome)
        self.python_uses: dict[tuple[str, str, str], Use] = {}         # uses of constants by code that stays Python
        self.kept: Any = None                           # keeps the exported module's identity alive while it is traced
        self.written: dict[str, Tensor] = {}            # parameters and buffers that forward writes to, as they were
        self.apart: dict[str, Tensor] = {}              # more buffers that the copy has values of its own of
        self.leaves: set[str] = set()                   # modules that must not be traced into
        self.draws = OwnDraws()
        self.modeless = False                           # has it functions that torch compiles when they run, which works under no mode?
        self.drew = False                               # has traced code drawn? It may where the model's own run does not
        self.model_draws_outside = False                # from Python's or numpy's
        self.ignores_draws = True                       # does the output stay the same whatever Python and numpy draw?
        self.hooked = {path for path, m in root.named_modules() if has_foreign_hooks(m)}
        self.made: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()    # by code that is no node
        self.index()

    @property
    def as_they_were(self) -> dict[str, Tensor]:
        """The values before the first run of what the copy has values of its own of."""
        return {**self.written, **self.apart}

    def index(self) -> None:
        """(Re)builds the tables of modules and constants."""
        self._paths: dict[int, str] = {id(module): path for path, module in self.root.named_modules()}
        self.constants: dict[str, Constant] = {**find_constants(self.root), **packed_constants(self.root)}
        self.packed = {f"{path}.{name}".lstrip("."): packed for path, module in self.root.named_modules(remove_duplicate=False)
                       for name, packed in vars(module).get("_inro_packed", {}).items()
                       if module._parameters.get(name) is None}      # held as codes already
        self._tensors: dict[str, Tensor] = {}
        self._by_id: dict[int, str] = {}
        self._names: set[str] = set()
        self._by_storage: dict[int, list[str]] = {}
        self._viewed: dict[int, str] = {}
        for path, module in self.root.named_modules(remove_duplicate=False):
            for kind in (module._parameters, module._buffers):
                for name, tensor in kind.items():
                    if tensor is not None:
                        full = f"{path}.{name}" if path else name
                        self._by_id.setdefault(id(tensor), full)
                        self._names.add(full)
                        if tensor.numel():
                            self._viewed.setdefault(storage_of(tensor), full)
        self._names.update(self.constants)
        for name, constant in self.constants.items():
            if name == constant.name and name not in self.packed:
                self._by_storage.setdefault(storage_of(self.tensor(name)), []).append(name)
        attached = _tensors_in_attributes(self.root)
        self.held_elsewhere = {c.name for c in self.constants.values() if c.name not in self.packed and id(self.tensor(c.name)) in attached}
        self._owners = {name.rpartition(".")[0] for name in self.constants}
        self._ancestors = {""} | {o[:i] for o in self._owners for i in range(len(o) + 1) if i == len(o) or o[i] == "."}

    def tensor(self, name: str) -> Tensor:
        """The float tensor of that name; of a weight that is held as codes, one unpacked for as long as this session lives."""
        if name not in self._tensors:
            path, _, leaf = name.rpartition(".")
            module: Any = self.root.get_submodule(path)
            held = module._parameters.get(leaf)
            held = module._buffers.get(leaf) if held is None else held
            first = self.constants[name].name if name in self.constants else name
            if held is None and first != name:
                held = self.tensor(first)
            if held is None:
                with at_work(None), torch._C.DisableTorchFunction():
                    held = module._inro_packed[leaf].unpack(module).detach()
            self._tensors[name] = held
        return self._tensors[name]

    def kind_of(self, path: str) -> str:
        return self.captures[path].kind if path in self.captures else "python"

    def alias_of(self, tensor: Any) -> Alias | None:
        """Which constant a tensor that Python code holds is a view of."""
        for name in self._by_storage.get(storage_of(tensor), ()) if isinstance(tensor, Tensor) else ():
            alias = alias_of_view(self.constants[name], self.tensor(name), tensor)
            if alias is not None:
                return alias
        return None

    def forget(self, names: tuple[str, ...]) -> None:
        """Lets go of one float weight."""
        for name in names:
            tensor = self._tensors.pop(name, None)
            if tensor is not None:
                self._by_id.pop(id(tensor), None)
                self._by_storage.pop(storage_of(tensor), None)
                self._viewed.pop(storage_of(tensor), None)
            self.state.forget(name)

    def forget_tensors(self) -> None:
        """Lets go of the float weights."""
        for table in (self._tensors, self._by_storage, self._by_id, self._viewed):
            table.clear()
        self.kept = None
        del self.state

    def path_of(self, module: nn.Module) -> str | None:
        return self._paths.get(id(module))

    def has(self, name: str) -> bool:
        """Does the model have a tensor of this name? (An exported program has constants of its own.)"""
        return name in self._names

    def name_of(self, tensor: Tensor) -> str | None:
        return self._by_id.get(id(tensor))

    def viewed_by(self, tensor: Tensor) -> str | None:
        """The name of the stored tensor of the same dtype whose memory a plain tensor shares."""
        full = self._viewed.get(storage_of(tensor)) if tensor.numel() else None
        if full is None or self.tensor(full).dtype != tensor.dtype or tensor.layout is not torch.strided:
            return None
        return full if self.tensor(full).storage_offset() == 0 and self.tensor(full).is_contiguous() else None

    def adopt(self, path: str, tensor: Tensor) -> str:
        """Makes a tensor from outside the module tree a buffer of the module at ``path`` that is not saved."""
        if self.made.get(id(tensor)) is tensor:
            raise TraceError("gets a tensor from a module that stays Python, past its result")
        module = self.root.get_submodule(path)
        number = 0
        while hasattr(module, f"_constant_{number}"):
            number += 1
        name = f"_constant_{number}"
        adopt(module, name, tensor.detach() if tensor.requires_grad or isinstance(tensor, nn.Parameter) else tensor)
        self.state.see_buffer(f"{path}.{name}".lstrip("."), module._buffers[name])
        return name

    def weights_below(self, path: str) -> bool:
        return path in self._ancestors

    def drawing(self) -> Any:
        """A context in which the model draws the same numbers at each run, should it draw."""
        self.draws = OwnDraws()
        return contextlib.nullcontext() if self.modeless else self.draws

    # -- called by tracers --

    def leaf_reason(self, module: nn.Module, path: str | None) -> str | None:
        """Why a module must stay Python; None if it may be traced through."""
        if path is not None and path in self.leaves:
            return self.refusals.get(path, "its code cannot be traced")
        if isinstance(module, torch.jit.ScriptModule):
            return "it is a ScriptModule"
        if path is not None and "forward" in vars(module):
            return "its forward was patched"
        return "it has hooks" if path in self.hooked else None

    def reason_of(self, error: Exception) -> str:
        return str(error) if isinstance(error, (TraceError, Unusual)) else brief(error)

    def refuse(self, path: str, error: Exception | str) -> None:
        """The module at ``path`` stays Python, and with it those that call it."""
        if isinstance(error, Untraceable) and error.path != path:
            self.refuse(error.path, str(error))
            error = f"calls {error.path}, which stays Python"
        self.leaves.add(path)
        self.refusals.setdefault(path, error if isinstance(error, str) else self.reason_of(error))

    def saw_call(self, tracer: Tracer, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, last: fx.Node) -> None:
        """A module was traced through: if it owns weights, its part of the graph becomes its own graph too."""
        module = self.root.get_submodule(path)
        if path in self.layers or path not in self._owners or module._forward_hooks or module._forward_pre_hooks:
            return                                  # what hooks did is in these nodes, and they would run once more
        layer = layer_of(tracer, module, path, args, kwargs, result, last)
        if layer is not None:
            self.layers[path] = layer

    # -- code that stays Python --

    def run_python(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module that stays Python on the example (the root without its hooks); its children are captured on the way."""
        module = self.root.get_submodule(path)
        with torch.no_grad(), at_work(PythonRun(self)), UseRecorder(self, path):
            return own_call(module, args, kwargs) if path else module.forward(*args, **kwargs)

    def call_from_python(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module called by Python code."""
        path = self.path_of(module)
        if path is None or path in self.captures or path in self.leaves or not self.weights_below(path) \
                or self.leaf_reason(module, path) is not None:
            return own_call(module, args, kwargs)
        result, captured = self.trace(path, "region", args, kwargs)
        wants_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
        if captured and wants_grad:
            return own_call(module, args, kwargs)                     # the caller goes on to ask for gradients
        return result if captured else self.run_python(path, args, kwargs)

    # -- one region --

    def trace(self, path: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any],
              forward: Callable[..., Any] | None = None) -> tuple[Any, bool]:
        """Captures the module at ``path`` on this call: (its result on the example, True), or (None, False).

        ``forward`` is traced in the place of the module's own.
        """
        module: Any = self.root.get_submodule(path)
        tracer = Tracer(self, path)
        try:
            call, values = Call.of(user_class(module).forward.__get__(module), args, kwargs)
            given = {id(x): x.detach().clone() for x in tree_leaves(values) if type(x) is Tensor}
            values = tree_map(lambda x: given.get(id(x), x), values)
            traced = call.capture(values, tracer.placeholder, example_of)
            leaves, spec = tree_flatten(traced)
            given_args, given_kwargs = call.spread(traced)
            result = tracer.run(forward or module.forward, given_args, given_kwargs)
            leaves_after, spec_after = tree_flatten(traced)
            if spec != spec_after or any(a is not b for a, b in zip(leaves, leaves_after, strict=True)):
                raise TraceError("changes a container among its inputs")
            if (changed := tracer.listener.changed()) is not None:
                raise TraceError(f"changes {changed}, which is outside of the model")
            if (place := self._leaks(tracer, module)) is not None:
                raise TraceError(f"keeps a traced value in {place}")
            example = examples_of(result)
            if (tracer.listener.drew or self.model_draws_outside) and not self.ignores_draws:
                raise TraceError("depends on random numbers from outside of torch")
            self.captures[path] = program_of(tracer, call, kind, result)
            return example, True
        except Exception as error:
            tracer.abandon()
            tracer.listener.settle()
            self._leaks(tracer, module)
            self.refuse(path, error)
            return None, False
        finally:
            tracer.listener.put_back()
            tracer.forget()

    def _leaks(self, tracer: Tracer, module: nn.Module) -> str | None:
        """Where the traced code has left traced values that would outlive the trace; they are not there any more."""
        places: list[tuple[str, Any]] = [(f"self.{n} of {path or 'the module itself'}", {n: v}) for path, child in module.named_modules()
                  for n, v in vars(child).items() if not n.startswith("_") and n != "training"]
        for path, child in module.named_modules():
            for name in [n for n, v in vars(child).items() if is_proxy(v)]:
                vars(child)[name] = example_of(vars(child)[name])
                places.insert(0, (f"self.{name} of {path or 'the module itself'}", [vars(child)[name]]))
        classes = {kind for child in module.modules() for kind in user_class(child).__mro__}
        return take_back([*places, *((kind.__name__, kind) for kind in classes), *tracer.listener.reached])


def _tensors_in_attributes(root: nn.Module) -> set[int]:
    """The ids of tensors that code can reach through containers and objects among the attributes of modules."""
    seen: set[int] = set()
    found: set[int] = set()
    for module in root.modules():
        for value in attributes(module).values():
            if id(value) not in seen and not isinstance(value, IMMUTABLE):
                seen.add(id(value))
                with contextlib.suppress(Exception):
                    found.update(id(t) for t in find(value, lambda x: isinstance(x, Tensor)))
    return found


def has_foreign_hooks(module: nn.Module) -> bool:
    """Hooks that somebody put on the module; those that its own library has set are part of its forward, and are traced."""
    library = user_class(module).__module__.partition(".")[0]
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(library in ("__main__", "torch") or getattr(h, "__module__", "").partition(".")[0] != library for h in hooks)


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
