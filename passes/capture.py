"""From a module to graphs: the capture ladder.

1. graph     the whole model through the tracer
2. regions   where a module's own code cannot be traced it stays Python, and its children are captured one by one
3. layers    every module that owns weights also gets a small graph of its own, used whenever Python calls it

A capture is accepted only if the captured model gives the original's outputs on the example and, where the model takes
it, on one row more. If it does not, the next rung is tried, and the reason is kept in `Session.refusals`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .call import IMMUTABLE, Call, Slot, rebuild, strip
from .carriers import observed_use
from .constants import Alias, Constant, alias_of_view, find_constants, storage_of
from .failures import InputError, ModelError
from .module import Capture, attach_graph, detach_graph, recurrent, user_class
from .trace import ExampleProxy, Retrace, TraceError, Tracer, _frame, _patches, active, module_call

__all__ = ["Example", "Session", "capture", "clone", "compare", "prepare", "run", "tensors_in"]

MAX_RETRACES = 25


# ---- the example ----

@dataclasses.dataclass(frozen=True)
class Example:
    """Example inputs as ``model(*args, **kwargs)`` takes them. They are copied for each run: forward may change them."""

    args: tuple
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Example:
        """A tensor is one positional argument, a tuple the positional arguments, a dict the keyword arguments."""
        if isinstance(inputs, dict) or (hasattr(inputs, "keys") and hasattr(inputs, "__getitem__")):
            if not all(isinstance(k, str) for k in inputs):
                raise InputError("example_inputs is a dict whose keys are not all strings; a dict gives keyword arguments by "
                                 "name. To pass one dict as a positional argument, write example_inputs=(the_dict,)")
            return cls((), {k: inputs[k] for k in inputs})
        if isinstance(inputs, (tuple, list)):
            return cls(tuple(inputs), {})
        return cls((inputs,), {})

    def fresh(self) -> tuple[tuple, dict]:
        def copied(x: Any) -> Any:
            if type(x) in (Tensor, nn.Parameter):
                return x.detach().clone()
            if isinstance(x, (*IMMUTABLE, Tensor, nn.Module)):
                return x
            try:
                return copy.deepcopy(x)                  # a cache object, say, that forward would fill
            except Exception:
                return x
        return tree_map(copied, (self.args, self.kwargs))

    def one_row_more(self) -> Example | None:
        """The same example with one more row in every tensor that has as many rows as the first; None if there is none."""
        rows = next((x.shape[0] for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor) and x.dim()), 0)
        if not rows:
            return None

        def grow(x: Any) -> Any:
            return torch.cat([x, x[:1]]) if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x
        return Example(*tree_map(grow, (self.args, self.kwargs)))


def run(model: nn.Module, example: Example) -> Any:
    """``model.forward`` on a copy of the example, without hooks of the root, with a fixed seed and no trace left in RNG."""
    args, kwargs = example.fresh()
    torch.manual_seed(0)
    return model.forward(*args, **kwargs)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Everything inside may seed and draw; afterwards the random state of torch (every device) and Python is as before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    state = random.getstate()
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(state)


def compare(want: Any, got: Any) -> str | None:
    """What differs between two outputs beyond float round-off; None if nothing does."""
    flat, spec = tree_flatten(want)
    flat_got, spec_got = tree_flatten(got)
    if type(want) is not type(got) or spec != spec_got:
        return f"it returns {type(got).__name__} with {len(flat_got)} leaves, not {type(want).__name__} with {len(flat)}"
    for a, b in zip(flat, flat_got, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return f"it returns {type(b).__name__} in the place of {type(a).__name__}"
        if not isinstance(a, Tensor):
            if hasattr(a, "__dict__") and type(a) is type(b):
                inner = compare(_attributes(a), _attributes(b))
                if inner is not None:
                    return inner
            elif isinstance(a, (bool, int, float, str)) and a != b and a == a:
                return f"it returns {b!r} in the place of {a!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"it returns {b.dtype} {tuple(b.shape)} in the place of {a.dtype} {tuple(a.shape)}"
        if a.layout is not torch.strided or not a.numel():
            continue
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return "its integer outputs differ"
            continue
        error = _distance(a, b)
        if not error <= TOLERANCE.get(a.dtype, 2e-2):
            return f"its output is off by {error:.1e}"
    return None


TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.complex64: 1e-4}


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative error; infinite where NaN, infinities or mask values (beyond 1e8, as in attention masks) are not the same."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    usual = a.abs() < 1e8
    same = (a == b) | (a.isnan() & b.isnan()) | (torch.isclose(a, b, rtol=1e-3, atol=0) & a.isfinite())
    if not bool((usual | same).all()):
        return float("inf")
    x, y = (torch.where(usual, t, 0).double() for t in (a, b))
    return ((x - y).norm() / x.norm().clamp(min=1e-30)).item()


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of an output, also those in the attributes of objects that pytree does not know."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (nn.Module, type)):
            slots = [f.name for f in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
            inner = vars(leaf).values() if hasattr(leaf, "__dict__") else (getattr(leaf, name) for name in slots)
            yield from tensors_in(list(inner), depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(value).items() if not callable(v)}


# ---- the copy that is worked on ----

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


# ---- the session ----

class Session:
    """Everything that capturing one model collects."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.state = ModuleState(root)
        self.captures: dict[str, Capture] = {}          # path -> graph of a region (or of the root)
        self.layers: dict[str, Capture] = {}            # path -> graph of a module that owns weights
        self.refusals: dict[str, str] = {}              # path -> why its own code stays Python
        self.steps: list[tuple[str, str]] = []          # the rungs tried: (rung, outcome)
        self.python_uses: dict[tuple, Any] = {}         # uses of constants by code that stays Python
        self.kept: Any = None                           # keeps the exported module's identity alive while it is traced
        self.written: dict[str, Tensor] = {}            # parameters and buffers that forward writes to, as they were
        self.leaves: set[str] = set()                   # modules that must not be traced into
        self.hooked = {path for path, m in root.named_modules() if _has_foreign_hooks(m)}
        self.made: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()    # by code that is no node
        self.index()

    def index(self) -> None:
        """(Re)builds the tables of modules and constants."""
        self._paths: dict[int, str] = {}
        for path, module in self.root.named_modules():
            self._paths[id(module)] = path
        self.constants: dict[str, Constant] = find_constants(self.root)
        self._tensors = {name: self._lookup(name) for name in self.constants}
        self._by_id: dict[int, str] = {}
        self._names: set[str] = set()
        for path, module in self.root.named_modules(remove_duplicate=False):
            for kind in (module._parameters, module._buffers):
                for name, tensor in kind.items():
                    if tensor is not None:
                        self._by_id.setdefault(id(tensor), f"{path}.{name}" if path else name)
                        self._names.add(f"{path}.{name}" if path else name)
        self._by_storage: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            if name == self.constants[name].name:
                self._by_storage.setdefault(storage_of(tensor), []).append(name)
        self._owners = {name.rpartition(".")[0] for name in self.constants}
        self._ancestors = {""} | {o[:i] for o in self._owners for i in range(len(o) + 1) if i == len(o) or o[i] == "."}

    def _lookup(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        module = self.root.get_submodule(path)
        tensor = module._parameters.get(leaf)
        return module._buffers[leaf] if tensor is None else tensor  # type: ignore[return-value]

    def tensor(self, name: str) -> Tensor:
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

    def forget_tensors(self) -> None:
        """Lets go of the float weights."""
        self._tensors.clear()
        self._by_storage.clear()
        self._by_id.clear()

    def path_of(self, module: nn.Module) -> str | None:
        return self._paths.get(id(module))

    def has(self, name: str) -> bool:
        """Does the model have a tensor of this name? (An exported program has constants of its own.)"""
        return name in self._names

    def name_of(self, tensor: Tensor) -> str | None:
        return self._by_id.get(id(tensor))

    def adopt(self, path: str, tensor: Tensor) -> str:
        """Makes a tensor from outside the module tree a buffer of the module at ``path`` that is not saved."""
        if self.made.get(id(tensor)) is tensor:
            raise TraceError("gets a tensor from a module that stays Python, past its result")
        module = self.root.get_submodule(path)
        number = 0
        while hasattr(module, f"_constant_{number}"):
            number += 1
        name = f"_constant_{number}"
        module.register_buffer(name, tensor.detach(), persistent=False)
        return name

    def weights_below(self, path: str) -> bool:
        return path in self._ancestors

    # -- called by tracers --

    def leaf_reason(self, module: nn.Module, path: str | None) -> str | None:
        """Why a module must stay a call; None if it may be traced through."""
        if path is not None and path in self.leaves:
            return self.refusals.get(path, "its code cannot be traced")
        if isinstance(module, torch.jit.ScriptModule):
            return "it is a ScriptModule"
        if path is not None and "forward" in vars(module):
            return "its forward was patched"
        if path in self.hooked:
            return "it has hooks"
        return None

    def refuse(self, path: str, error: Exception | str) -> None:
        text = error if isinstance(error, str) else str(error) if isinstance(error, TraceError) else _brief(error)
        self.leaves.add(path)
        self.refusals.setdefault(path, text)

    def saw_call(self, tracer: Tracer, module: nn.Module, path: str, args: tuple, kwargs: dict, result: Any,
                 last: fx.Node) -> None:
        """A module was traced through: if it owns weights, its part of the graph becomes its own graph too."""
        if path in self.layers or path not in self._owners:
            return
        layer = _cut_out(tracer, module, path, args, kwargs, result, last)
        if layer is not None:
            self.layers[path] = layer

    def run_leaf(self, path: str, args: tuple, kwargs: dict) -> Any:
        """Runs a module that stays Python on the example; its children are captured on the way."""
        with torch.no_grad(), _patches, _frame(self), _UseRecorder(self, path):
            return module_call(self.root.get_submodule(path), *args, **kwargs)

    def run_root(self, args: tuple, kwargs: dict) -> Any:
        """The same for the root, without its hooks."""
        with torch.no_grad(), _patches, _frame(self), _UseRecorder(self, ""):
            return self.root.forward(*args, **kwargs)

    def call_module(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """A module called by Python code (this session is the active frame)."""
        path = self.path_of(module)
        if path is None or path in self.captures or path in self.leaves or not self.weights_below(path) \
                or self.leaf_reason(module, path) is not None:
            return module_call(module, *args, **kwargs)
        result, captured = self.trace(path, "region", args, kwargs)
        return result if captured else self.run_leaf(path, args, kwargs)

    # -- one region --

    def trace(self, path: str, kind: str, args: tuple, kwargs: dict, forward: Callable | None = None) -> tuple[Any, bool]:
        """Captures the module at ``path`` on this call: (its result on the example, True), or (None, False).

        ``forward`` is traced in the place of the module's own.
        """
        module = self.root.get_submodule(path)
        for _ in range(MAX_RETRACES):
            tracer = Tracer(self, path)
            try:
                call, values = Call.of(user_class(module).forward.__get__(module), args, kwargs)
                with torch.no_grad():
                    values = tree_map(lambda x: x.detach().clone() if type(x) is Tensor else x, values)

                def inputs(tracer: Tracer, call: Call = call, values: list = values) -> tuple[tuple, dict]:
                    traced = call.capture(values, tracer.placeholder)
                    inputs.kept = [(traced, tree_flatten(traced))]
                    return call.spread(traced)

                result = tracer.run(forward or module.forward, inputs)
                traced, (leaves, spec) = inputs.kept[0]
                leaves_after, spec_after = tree_flatten(traced)
                if spec != spec_after or any(a is not b for a, b in zip(leaves, leaves_after, strict=True)):
                    raise TraceError("changes a container among its inputs")
                if tracer._raised:
                    raise TraceError("catches an exception that an operator raised")
                self._refuse_leaks(module)
                example = _example_of(result)
                self.captures[path] = _finish(tracer, call, kind, result)
                return example, True
            except Retrace as again:
                tracer.abandon()
                self.leaves.add(again.path)
                if again.path == path:
                    break
            except Exception as error:
                tracer.abandon()
                self.refuse(path, error)
                break
        else:
            self.refuse(path, f"{MAX_RETRACES} of its modules change tensors in place and cannot be traced")
        self.leaves.add(path)
        return None, False

    def _refuse_leaks(self, module: nn.Module) -> None:
        """A list or dict of a module that forward fills would now hold traced values: they are taken out again."""
        for path, child in module.named_modules():
            for name, value in vars(child).items():
                if type(value) is list and any(type(v) is ExampleProxy for v in value):
                    value[:] = [v for v in value if type(v) is not ExampleProxy]
                elif type(value) is dict and any(type(v) is ExampleProxy for v in value.values()):
                    for key in [k for k, v in value.items() if type(v) is ExampleProxy]:
                        del value[key]
                else:
                    continue
                raise TraceError(f"keeps a value in self.{name} ({path or 'the module itself'})")


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Hooks that somebody put on the module; those that its own library has set are part of its forward, and are traced."""
    library = user_class(module).__module__.partition(".")[0]
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(library in ("__main__", "torch") or getattr(h, "__module__", "").partition(".")[0] != library for h in hooks)


def _rnn_example(m: Any) -> tuple:
    return (torch.zeros(1, 1, m.input_size, dtype=next(m.parameters()).dtype),)


def _conv_example(m: Any) -> tuple:
    sizes = [d * (k - 1) + 1 for d, k in zip(m.dilation, m.kernel_size, strict=True)]
    return (torch.zeros(1, m.in_channels, *sizes, dtype=m.weight.dtype),)


LAYERS: dict[type, Callable[[Any], tuple]] = {     # the smallest call of torch's own layers, for those no example reaches
    nn.Linear: lambda m: (torch.zeros(1, m.in_features, dtype=m.weight.dtype),),
    nn.Embedding: lambda m: (torch.zeros(1, dtype=torch.long),),
    nn.modules.conv._ConvNd: _conv_example,
    nn.LSTM: _rnn_example,
    nn.GRU: _rnn_example,
    nn.RNN: _rnn_example,
}


def capture_unreached(session: Session) -> None:
    """Torch's own layers that the example did not reach get a graph too, so that their weights are not left out."""
    reached = {n.meta["alias"].constant for c in session.captures.values() for n in c.graph.nodes if "alias" in n.meta}
    reached |= {constant for _, constant, _ in session.python_uses}
    for name, constant in session.constants.items():
        module = session.root.get_submodule(constant.module)
        make = next((call for kind, call in LAYERS.items() if isinstance(module, kind)), None)
        if constant.name in reached or name != constant.name or make is None or constant.module in session.captures \
                or constant.module in session.layers or not type(module).forward.__module__.startswith("torch.nn.") \
                or session.leaf_reason(module, constant.module) is not None:
            continue
        device = session.tensor(name).device
        if session.trace(constant.module, "unreached", tuple(t.to(device) for t in make(module)), {})[1]:
            attach_graph(module, session.captures[constant.module])


class _UseRecorder(torch.overrides.TorchFunctionMode):
    """Sees which operators the Python code of a leaf feeds its weights to."""

    def __init__(self, session: Session, path: str):
        super().__init__()
        self.session, self.path = session, path

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ():
            if isinstance(tensor, Tensor):
                self.session.made[id(tensor)] = tensor
        if active() is self.session:
            for use in observed_use(func, args, kwargs, self.session.alias_of):
                self.session.python_uses.setdefault((self.path, use.constant, use.op), use)
        return result


def _example_of(value: Any) -> Any:
    """A traced result with the example's values in the place of its proxies."""
    found: list[Any] = []

    def take(x: Any) -> Any:
        found.append(x.example if type(x) is ExampleProxy else x)
        return Slot(len(found) - 1)
    template = strip(value, take)
    return rebuild(template, found)


def _finish(tracer: Tracer, call: Call, kind: str, result: Any) -> Capture:
    results: list[Any] = []

    def take(x: Any) -> Slot:
        for i, other in enumerate(results):
            if other is x:
                return Slot(i)
        results.append(x)
        return Slot(len(results) - 1)
    template = strip(result, take)
    with _frame(tracer):
        nodes = [tracer.create_arg(r) for r in results]
    tracer.graph.output(nodes[0] if isinstance(template, Slot) else tuple(nodes))
    drop_unused(tracer.graph)
    call.facts = frozenset(tracer.facts)
    return Capture(tracer.path, kind, tracer.graph, call, template)


def drop_unused(graph: fx.Graph) -> None:
    """Removes nodes that nobody uses and that hold no tensor: sizes that were only looked at, attributes, lengths."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.meta.get("droppable"):
            graph.erase_node(node)


def _cut_out(tracer: Tracer, module: nn.Module, path: str, args: tuple, kwargs: dict, result: Any,
             last: fx.Node) -> Capture | None:
    """The nodes after ``last`` as a graph of the module at ``path`` alone; None if they reach outside of it."""
    prefix = tracer.relative(path)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    try:
        call, values = Call.of(user_class(module).forward.__get__(module), args, kwargs)

        def placeholder(name: str, item: Any) -> Any:
            if type(item) is not ExampleProxy:
                raise TraceError("takes a tensor that is no node")
            node = graph.create_node("placeholder", name, (), {})
            node.meta = {**item.node.meta, "module": path, "droppable": False}
            if copies.setdefault(item.node, node) is not node:
                raise TraceError("takes one tensor twice: another call may take two")
            return item
        call.capture(values, placeholder)
        node = last.next
        while node.op != "root":
            if node.op in ("get_attr", "call_module"):
                if prefix and not node.target.startswith(prefix + "."):
                    return None
                new = graph.create_node(node.op, node.target[len(prefix) + 1:] if prefix else node.target,
                                        fx.map_arg(node.args, copies.__getitem__), fx.map_arg(node.kwargs, copies.__getitem__))
                new.meta = dict(node.meta)
            else:
                new = graph.node_copy(node, lambda n: _read_again(n, copies, graph, prefix))
            copies[node] = new
            node = node.next
        results: list[fx.Node] = []

        def take(x: Any) -> Slot:
            if type(x) is not ExampleProxy:
                raise TraceError("returns a tensor that is no node")
            results.append(copies[x.node])
            return Slot(len(results) - 1)
        template = strip(result, take)
    except (KeyError, TraceError, TypeError):
        return None
    graph.output(results[0] if isinstance(template, Slot) else tuple(results))
    drop_unused(graph)
    call.facts = frozenset(tracer.facts)                    # what was asked since the layer's code began
    return Capture(path, "layer", graph, call, template)


def _read_again(node: fx.Node, copies: dict[fx.Node, fx.Node], graph: fx.Graph, prefix: str) -> fx.Node:
    """The copy of a node; a weight that the trace had read before this layer's nodes is read once more."""
    if node not in copies and node.op == "get_attr" and (not prefix or node.target.startswith(prefix + ".")):
        copies[node] = graph.create_node("get_attr", node.target[len(prefix) + 1:] if prefix else node.target)
        copies[node].meta = dict(node.meta)
    return copies[node]


# ---- the ladder ----

def capture(root: nn.Module, example: Example, mode: str = "auto") -> tuple[Session, Any]:
    """Captures ``root`` (a clone, changed in place: its modules run graphs afterwards); the session and the reference output."""
    session = Session(root)
    written, want = _reference_run(root, example)
    for path, _, name in list(session.state.changed()):
        session.refuse(path, f"changes self.{name} in forward")
    session.state.restore()
    session.index()
    session.written = written
    for name in written:
        session.refusals.setdefault(name.rpartition(".")[0], f"writes to its state {name}")
        session.leaves.add(name.rpartition(".")[0])
    bigger = example.one_row_more()
    want_bigger = None
    if bigger is not None:
        try:
            want_bigger = run(root, bigger)
            if compare(want_bigger, run(root, bigger)) is not None:       # it reads memory that nobody wrote, say
                bigger = None
        except Exception:
            bigger = None
        session.state.restore()

    rungs = ("graph", "regions", "layers") if mode == "auto" else ("export",)
    for rung in rungs:
        failure = session.refusals.get("") if "" in session.leaves and rung == "graph" else None
        if failure is None:
            failure = _try_rung(session, rung, example, want, bigger, want_bigger)
        if failure is None:
            kind = f"one graph of {len(session.captures[''].graph.nodes)} nodes" if "" in session.captures else \
                f"{sum(c.kind == 'region' for c in session.captures.values())} regions"
            session.steps.append((rung, "taken: " + kind))
            capture_unreached(session)
            return session, want
        session.steps.append((rung, failure))
        for path in list(session.captures) + list(session.layers):
            detach_graph(root.get_submodule(path))
        session.captures.clear()
        session.layers.clear()
        session.python_uses.clear()
        session.leaves.add("")
    if mode == "export":
        raise ModelError(f"torch.export does not capture this model ({session.steps[-1][1]}); use capture=\"auto\"")
    session.steps.append(("python", "taken: every module runs its own code over the quantized weights"))
    capture_unreached(session)
    return session, want


def _try_rung(session: Session, rung: str, example: Example, want: Any, bigger: Example | None, want_bigger: Any) -> str | None:
    """Why the rung does not hold; None if the captured model reproduces the reference."""
    args, kwargs = example.fresh()
    if rung == "export":
        try:
            forward = _exported(session, args, kwargs)
        except Exception as error:
            return _brief(error)
        if not session.trace("", "graph", args, kwargs, forward)[1]:
            return session.refusals.get("", "its code cannot be traced")
    elif rung == "graph":
        torch.manual_seed(0)
        if not session.trace("", "graph", args, kwargs)[1]:
            return session.refusals.get("", "its code cannot be traced")
    else:
        if rung == "layers":
            session.leaves.update(path for path, module in session.root.named_modules() if any(True for _ in module.children()))
        torch.manual_seed(0)
        session.run_root(args, kwargs)
    for path, captured in {**session.layers, **session.captures}.items():
        attach_graph(session.root.get_submodule(path), captured)
    for inputs, expected, label in ((example, want, "on the example"), (bigger, want_bigger, "with one row more")):
        if inputs is None:
            continue
        try:
            session.state.restore()
            _rewind(session)
            difference = compare(expected, run(session.root, inputs))
        except Exception as error:
            difference = f"it fails with {_brief(error)}"
        if difference is not None:
            return f"{difference} {label}"
        if inputs is example and "" in session.captures and session.root._inro_calls:
            return f"its graph does not cover the example itself ({next(iter(session.root._inro_calls))})"
    for path in {**session.layers, **session.captures}:
        session.root.get_submodule(path)._inro_calls.clear()
    return None


def _rewind(session: Session) -> None:
    """Puts the tensors that forward writes to back to what they were before the first run."""
    for name, before in session.written.items():
        path, _, leaf = name.rpartition(".")
        getattr(session.root.get_submodule(path), leaf).data.copy_(before)


def put_state(root: nn.Module, name: str, value: Tensor | None) -> Tensor:
    """Puts ``value`` (None: a copy of what is there) in the place of a parameter or buffer; what was there before."""
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    kind: dict[str, Any] = module._parameters if module._parameters.get(leaf) is not None else module._buffers
    before = kind[leaf]
    copied = before.detach().clone() if value is None else value
    kind[leaf] = nn.Parameter(copied, before.requires_grad) if kind is module._parameters and value is None else copied
    return before


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _exported(session: Session, args: tuple, kwargs: dict) -> Callable:
    """The forward of the model as torch.export sees it, every dimension dynamic that can be; its weights are the model's."""
    def dynamic(x: Any) -> Any:
        return dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) if isinstance(x, Tensor) else None

    signature = inspect.signature(session.root.forward).bind(*args, **kwargs)
    program = torch.export.export(session.root, args, kwargs, dynamic_shapes=tree_map(dynamic, dict(signature.arguments)))
    module = program.module()
    known = set(session._paths.values())
    for path, child in module.named_modules():
        if path in known:
            session._paths[id(child)] = path
    session.kept = module
    return module.forward


def _reference_run(root: nn.Module, example: Example) -> tuple[dict[str, Tensor], Any]:
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

