"""What runs in the place of a user's module: the captured graph where it holds, the user's own forward elsewhere.

A module that was captured, or whose weights became codes, gets a class of its own: a subclass of the user's class, so
that ``isinstance``, methods, properties and attributes stay. Its parts:

    GraphForward     forward() matches the call against the captured one and runs the graph; a call that the graph does
                     not cover runs the user's forward and is counted in ``calls``
    PackedWeights    ``module.weight`` is unpacked from its codes whenever Python asks for it
    RecurrentWeights, FakeQuantizedWeights     the same for torch's recurrent modules, and in quantization-aware training

Behind the user's class stands GraphView, which makes the module an fx.GraphModule. Rebased stands before classes that Python
does not let be extended in place.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import inspect
import keyword
import linecache
import re
import sys
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.fx.graph import _format_target
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_unflatten

from .call import Call, Slot, TensorLeaf, _equal, rebuild
from .constants import ABSENT
from .failures import GraphNotTaken, InroError, ModelError, StateError
from .plain import GraphData
from .trace import GuardFailed, guard

__all__ = ["Capture", "FakeQuantizedWeights", "GraphForward", "Packed", "PackedWeights", "attach_fake", "attach_graph",
           "attach_packed", "detach_fakes", "detach_graph", "finish", "needs_rebasing", "rebased", "recurrent", "user_class",
           "without_global_hooks"]

_GLOBAL_HOOKS, _GLOBAL_PRE_HOOKS = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
ERRORS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)     # of operators


@dataclasses.dataclass
class Capture:
    """A graph that answers some calls of one module.

    ``kind`` is "graph" for the whole model, "region" for a module below one that stays Python, "layer" for a module
    that owns weights and is used on its own when its parents run as Python, "unreached" for one that no example reaches.
    """

    path: str
    kind: str
    graph: fx.Graph
    call: Call
    template: Any

    @property
    def guards(self) -> list[str]:
        """Where the guards of the graph come from, as source lines."""
        return [str(n.args[2]) for n in self.graph.nodes if n.target is guard]

    def excludes(self, module: GraphForward) -> str | None:
        """Why the graph cannot stand in for the module's forward in its present state; None if it can."""
        if "dtype" in self.call.facts and module._inro_float_dtypes[0] != module._inro_float_dtypes[1]:
            return "another dtype of the weights"
        if (altered := _altered(module)) is not None:
            return altered
        if module.training:
            return "training mode"
        if _GLOBAL_HOOKS or _GLOBAL_PRE_HOOKS:
            return "global module hooks"
        if torch._C._is_any_autocast_enabled():
            return "autocast"
        if "grad" in self.call.facts and torch.is_grad_enabled():
            return "gradients through a no_grad block"
        return None


@dataclasses.dataclass
class Packed:
    """How one weight of a module is held: ``buffers`` are the names of its parts on the module, in the scheme's order.

    ``layout`` turns the scheme's matrix [out, in] back into the weight.
    """

    scheme: Any
    buffers: tuple[str, ...]
    layout: Any
    dtype: torch.dtype

    def parts(self, module: nn.Module) -> dict[str, Tensor]:
        return {part: getattr(module, name) for part, name in zip(self.scheme.parts, self.buffers, strict=True)}

    def unpack(self, module: nn.Module) -> Tensor:
        weight = self.layout.restore(self.scheme.unpack(self.parts(module), self.layout.columns, self.dtype))
        return weight if torch.compiler.is_compiling() else nn.Parameter(weight, requires_grad=False)    # as code may ask for


class Part(nn.Module):
    """What stands before the user's class in the classes made here."""

    def __init_subclass__(cls, **_: Any) -> None:
        """A user's own __init_subclass__ does not hear of them."""

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """The float parameters; where there are none, and code that is not torch's asks, weights unpacked one by one.

        So that ``next(self.parameters()).device`` finds one in a model that has no biases.
        """
        nothing = True
        for item in super().named_parameters(prefix, recurse, remove_duplicate):
            nothing = False
            yield item
        for path, module in self.named_modules(prefix=prefix) if nothing and recurse and not _torch_asks() else ():
            for name in vars(module).get("_inro_packed", {}):
                yield f"{path}.{name}" if path else name, getattr(module, name)


def _torch_asks() -> bool:
    """Is it torch that consumes the generator which calls this, directly or through ``parameters()``?"""
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == torch_module.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


class PackedWeights(Part):
    """A module some of whose weights are held as codes. They are unpacked at each access, never kept.

    The parts of a tied weight lie on one module; the others reach them through ``_inro_links``: name -> (module, its name).
    """

    _inro_packed: dict[str, Packed]
    _inro_links: dict[str, tuple[nn.Module, str]]

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        if name in state.get("_inro_packed", ()):
            return state["_inro_packed"][name].unpack(self)
        if name in state.get("_inro_links", ()):
            holder, there = state["_inro_links"][name]
            return getattr(holder, there)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_change(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_change(name)
        super().__delattr__(name)

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
            if after.dtype != before.dtype:                    # .half() is for activations, not for scales
                self._buffers[name] = before.to(after.device)
        for packed in self._inro_packed.values():
            packed.dtype = _mapped_dtype(packed.dtype, fn)
        return result


class FakeQuantizedWeights(Part):
    """A module in quantization-aware training: ``module.weight`` is its float weight sent through ``_inro_fake["weight"]``."""

    _inro_fake: dict[str, nn.Module]

    def __getattr__(self, name: str) -> Any:
        fake = self.__dict__.get("_inro_fake", {}).get(name)
        return super().__getattr__(name) if fake is None else fake(self._parameters[name])


class RecurrentWeights(Part):
    """For torch's recurrent modules, which keep a second list of their weights: the list is made when it is read."""

    def __getattr__(self, name: str) -> Any:
        if name == "_flat_weights":
            return [getattr(self, n) for n in self._flat_weights_names]
        return super().__getattr__(name)

    def _init_flat_weights(self) -> None:
        self.__dict__.pop("_flat_weights", None)
        self.__dict__["_flat_weight_refs"] = []

    def _update_flat_weights(self) -> None:
        """Nothing to update: the list is made at each read."""

    def flatten_parameters(self) -> None:
        """Nothing to flatten: a list of unpacked weights has no memory of its own."""


class GraphForward(Part):
    """A module whose forward is a captured graph wherever that covers the call."""

    _inro_capture: Capture
    _inro_graph: fx.Graph
    _inro_run: Callable                                      # the graph as Python, reading tensors where they lie
    _inro_traced: Callable                                   # the same for torch.compile, reading them as attributes
    _inro_strict: bool
    _inro_calls: Counter
    _inro_float_dtypes: tuple[torch.dtype, torch.dtype]      # of the weights: when captured, and now
    _inro_inside: list[Inside]                               # the modules below that the graph stands for
    _inro_watched: list[tuple[Any, Any]]                     # dicts and lists that code may have read, and their contents
    _inro_changed: str | None                                # what was changed since the capture, so that the graph is void

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        capture = self._inro_capture
        reason: Any = capture.excludes(self)
        if reason is None:
            reason = capture.call.match(args, kwargs)
        if isinstance(reason, list):
            try:
                run = self._inro_traced if torch.compiler.is_compiling() else self._inro_run
                results = run(self, *reason)
            except GuardFailed as failed:
                reason = str(failed)
            except ERRORS as error:                            # the user's own forward raises it better, or catches it
                if torch.compiler.is_compiling() or self._inro_strict or isinstance(error, InroError):
                    raise
                reason = f"an operator raises {type(error).__name__}"
            else:
                return results if type(capture.template) is Slot else rebuild(capture.template, results)
        if self._inro_strict:
            raise GraphNotTaken(f"{capture.path or 'the model'}: the captured graph does not cover this call ({reason}); "
                                f"quantize with other example_inputs, or with strict=False to run the module's own forward")
        if not torch.compiler.is_compiling():
            self._inro_calls[reason] += 1
        return super().forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__
        before = state.get(name, self._buffers.get(name, self._parameters.get(name, ABSENT)))
        super().__setattr__(name, value)
        if name in _TORCHS or name in self._modules or before is value:
            return
        if name in self._buffers or name in self._parameters:     # the graph reads what is there, but None was a fact
            changed = before is None or value is None
        else:
            changed = name in _mentioned(user_class(self)) if before is ABSENT else not _equal(before, value)
        if changed:
            state["_inro_changed"] = f"self.{name} was changed"

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__["_inro_changed"] = f"self.{name} was deleted"

    def _inro_compile(self) -> Any:
        """Makes Python of the graph."""
        code = self._inro_graph.python_code(root_module="self")
        source = code.src
        targets = {str(n.target) for n in self._inro_graph.nodes if n.op in ("get_attr", "call_module")}
        for target in sorted(targets, key=len, reverse=True):
            if any(map(_misspelled, target.split("."))):
                written = re.escape(_format_target("self", target).replace("\n", "\n    "))        # fx indents every line
                source = re.sub(written + r"(?!\w)", _spelled_out(target).replace("\\", r"\\"), source)
        self.__dict__["_inro_code"] = source
        self.__dict__["_inro_traced"] = _compiled(source, code.globals)
        self.__dict__["_inro_run"] = _compiled(*_direct(self, targets, source, code.globals))
        return code

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        altered = _altered(self)
        result = super()._apply(fn, recurse)
        if altered is None:
            _watch(self)
        self.__dict__["_inro_float_dtypes"] = (self._inro_float_dtypes[0], _mapped_dtype(self._inro_float_dtypes[1], fn))
        if _retarget(self._inro_graph, fn):
            self._inro_compile()
            self._inro_capture.call.leaves = tuple(
                tuple(dataclasses.replace(leaf, device=_mapped_device(leaf.device, fn)) if getattr(leaf, "device", None) else leaf
                      for leaf in leaves) for leaves in self._inro_capture.call.leaves)
        return result

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["_inro_run"] = self._inro_traced          # which reads the tensors of the module that it is given
        return replica

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__()) if _defines(user_class(self), "__getstate__") else dict(self.__dict__)
        for name in ("_inro_run", "_inro_traced", "_inro_code", "_inro_inside", "_inro_watched"):
            state.pop(name, None)
        state["_inro_graph"] = GraphData.of(self._inro_graph)
        state["_inro_capture"] = dataclasses.replace(self._inro_capture, graph=None)
        state["_inro_changed"] = _altered(self, lasting=True)      # what is there now would look as if it had always been
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_inro_graph"] = self._inro_capture.graph = state["_inro_graph"].graph()
        self._inro_graph.owning_module = self
        _watch(self)
        self._inro_compile()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __copy__(self) -> Any:
        new = object.__new__(type(self))
        new.__setstate__(self.__getstate__())
        return new


def _direct(module: nn.Module, targets: set[str], source: str, names: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source with ``self.layers.3.fc.weight_codes``, a microsecond for each dot, as an entry of the dict that holds the tensor.

    The dicts of a module's parameters and buffers are its own for life: what moves, casts or loads a module changes their entries.
    Operators with an overload ``inference`` are called past the Python of their gradient's formula.
    """
    names, reads = dict(names), {}
    for number, target in enumerate(sorted({n.target for n in module._inro_graph.nodes if _has_inference(n.target)}, key=str)):
        names[f"_operator_{number}"] = _past_autograd(target)
        source = source.replace(f"torch.ops.{target}(", f"_operator_{number}(")
    for number, target in enumerate(sorted(targets)):
        path, _, leaf = target.rpartition(".")
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue
        for kind in (owner._parameters, owner._buffers):
            if kind.get(leaf) is not None:
                names[f"_held_{number}"] = kind
                written = _spelled_out(target) if any(map(_misspelled, target.split("."))) else _format_target("self", target)
                reads[written] = f"_held_{number}[{leaf!r}]"
    lines = source.split("\n")
    for index, line in enumerate(lines):
        name, equals, value = line.partition(" = ")
        read = reads.get(value.partition(";")[0].strip())
        if equals and read is not None:
            lines[index] = name + equals + read
    return "\n".join(lines), names


def _has_inference(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._overloadname == "default" \
        and hasattr(target.overloadpacket, "inference")


@functools.cache
def _past_autograd(operator: Any) -> Callable:
    """The operator in eager mode: where no argument wants a gradient, its overload without the formula of one."""
    run, grad_enabled = operator.overloadpacket.inference._op, torch.is_grad_enabled        # _op: a Python call less
    modes = torch._C._len_torch_dispatch_stack

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or modes() or forward_ad._current_level >= 0:            # a mode may be writing a graph of this
            return operator(*args, **kwargs)
        if grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return operator(*args)
        return run(*args)
    return call


_sources: Counter[str] = Counter()          # files of compiled graphs -> how many functions of that source live


def _compiled(source: str, names: dict[str, Any]) -> Callable:
    """The function that the source of a graph defines; tracebacks show its lines for as long as it lives, unlike those of fx."""
    file = sys.intern(f"<graph {zlib.crc32(source.encode()):08x}>")
    names = dict(names)
    exec(compile(source, file, "exec"), names)
    function = names.pop("forward")
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    _sources[file] += 1
    weakref.finalize(function, _forget_source, file)
    return function


def _forget_source(file: str) -> None:
    _sources[file] -= 1
    if not _sources[file]:
        del _sources[file]
        linecache.cache.pop(file, None)


def _spelled_out(target: str) -> str:
    """``self.class.weight``, which Python cannot parse, with getattr."""
    expression = "self"
    for name in target.split("."):
        expression = f"getattr({expression}, {name!r})"
    return expression


def _misspelled(name: str) -> bool:
    """Does fx write this name so that Python reads something else?"""
    return keyword.iskeyword(name) or any(c in name for c in '"\\\n\r')


def _mapped_dtype(dtype: torch.dtype, fn: Callable[[Tensor], Tensor]) -> torch.dtype:
    return fn(torch.empty(0, dtype=dtype, device="cpu")).dtype


def _mapped_device(device: torch.device, fn: Callable[[Tensor], Tensor]) -> torch.device:
    return fn(torch.empty(0, device=device)).device


def _retarget(graph: fx.Graph, fn: Callable[[Tensor], Tensor]) -> bool:
    """After ``.to(device)`` or ``.half()``: devices written in the graph, and dtypes of unpacked weights, follow."""
    changed = False

    def device(a: Any) -> Any:
        return _mapped_device(a, fn) if isinstance(a, torch.device) else a

    for node in graph.nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), device)
        if "weight_dtype" in node.meta:
            before = node.meta["weight_dtype"]
            after = node.meta["weight_dtype"] = _mapped_dtype(before, fn)
            args, kwargs = fx.node.map_aggregate((args, kwargs), functools.partial(_swap, before, after))
        if args != node.args or kwargs != node.kwargs:
            node.args, node.kwargs, changed = args, kwargs, True
    return changed


def _swap(before: Any, after: Any, value: Any) -> Any:
    return after if value is before else value


# ---- classes made for a user's class ----

def user_class(module: nn.Module) -> type:
    """The class that the user wrote."""
    return getattr(type(module), "_inro_user_class", type(module))


class _Borrowed:
    """An attribute of fx.GraphModule that gives way to one of the same name on the user's model."""

    def __init__(self, state: str):
        self.state = state

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        for kind in (module._parameters, module._buffers, module._modules):
            if self.name in kind:
                return kind[self.name]
        if self.name == "graph" and _altered(module, lasting=True) is not None:
            return _graph_of_forward(module)
        return module.__dict__[self.state]


@dataclasses.dataclass(frozen=True)
class OwnForward:
    """The target of the only node of a graph that has become void: the user's own forward."""

    module: nn.Module
    __name__ = "own_forward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _graph_of_forward(module: nn.Module) -> fx.Graph:
    """What an altered module computes, for those who run ``module.graph`` in the place of the module, as torch.export does."""
    call = module._inro_capture.call
    graph = fx.Graph()
    values = []
    for leaves, spec in zip(call.leaves, call.specs, strict=True):
        flat = [graph.placeholder(leaf.name) if isinstance(leaf, TensorLeaf) else leaf.value for leaf in leaves]
        values.append(flat[0] if spec is None else tree_unflatten(flat, spec))
    args, kwargs = call.spread(values)
    graph.output(graph.call_function(OwnForward(module), args, kwargs))
    return graph


class GraphView(fx.GraphModule):
    """What makes the result a GraphModule: its graph and code. It stands behind the user's class, whose names come first."""

    graph = _Borrowed("_inro_graph")
    code = _Borrowed("_inro_code")

    def recompile(self) -> Any:
        """Compiles ``graph`` again after a change of it."""
        return GraphForward._inro_compile(self)

    __str__ = nn.Module.__repr__


@functools.cache
def _composed(user: type, parts: tuple[type, ...]) -> type:
    namespace: dict[str, Any] = {"_inro_user_class": user, "_inro_parts": parts, "__module__": user.__module__,
                                 "__qualname__": user.__qualname__, "__doc__": user.__doc__, "__reduce_ex__": _reduce,
                                 "__new__": lambda cls, *args, **kwargs: user(*args, **kwargs)}     # type(q)() is a plain one
    after: tuple[type, ...] = ()
    if GraphForward in parts:
        own = GraphForward.forward                     # a copy of it, with the name and signature of the user's
        namespace["forward"] = functools.wraps(user.forward)(types.FunctionType(
            own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__))
        namespace["__call__"] = user.__call__ if "__call__" in vars(user) else nn.Module.__call__
        if issubclass(user, fx.GraphModule):
            namespace.update(graph=_Borrowed("_inro_graph"), code=_Borrowed("_inro_code"), recompile=GraphView.recompile)
        else:
            after = (GraphView,)
    meta = type(user)
    make = meta if meta in (type, abc.ABCMeta) else functools.partial(type.__new__, meta)     # a registry stays as it is
    return make(user.__name__, (*parts, *(() if parts else (Rebased,)), user, *after), namespace)


class Rebased(Part):
    """Stands before a class such as ``Net(ABC, nn.Module)``, whose instances Python does not let change their class."""


@functools.cache
def needs_rebasing(user: type) -> bool:
    """Can an instance of this class not become one of a subclass?"""
    probe: Any = object.__new__(user)
    try:
        probe.__class__ = _composed(user, (PackedWeights,))
    except TypeError:
        return True
    return False


def rebased(module: nn.Module) -> nn.Module:
    """An empty instance of a class like the module's, but of which the class can change."""
    return object.__new__(_composed(user_class(module), ()))


def _reduce(self: nn.Module, protocol: int) -> tuple:
    user = user_class(self)
    if issubclass(user, fx.GraphModule) and "<locals>" in user.__qualname__:
        raise ModelError("a result made from a torch.fx.GraphModule cannot be pickled, for its class exists in this process only: "
                         "quantize the module that was traced, or keep the state_dict")
    state = self.__getstate__() if hasattr(type(self), "__getstate__") else self.__dict__.copy()
    return _rebuild, (user, type(self)._inro_parts), state


def _rebuild(user: type, parts: tuple[type, ...]) -> nn.Module:
    return object.__new__(_composed(user, parts))


def _add_part(module: nn.Module, part: type) -> None:
    parts = getattr(type(module), "_inro_parts", ())
    if part not in parts:
        order = (GraphForward, PackedWeights, FakeQuantizedWeights, RecurrentWeights)
        chosen = tuple(p for p in order if p in (*parts, part))
        module.__class__ = _composed(user_class(module), chosen)


def _remove_part(module: nn.Module, part: type) -> None:
    parts = tuple(p for p in getattr(type(module), "_inro_parts", ()) if p is not part)
    user = user_class(module)
    module.__class__ = _composed(user, parts) if parts or needs_rebasing(user) else user


def attach_graph(module: nn.Module, capture: Capture, strict: bool = False) -> None:
    """Makes ``module`` run ``capture`` wherever it covers the call."""
    if GraphForward not in getattr(type(module), "_inro_parts", ()):
        _add_part(module, GraphForward)
        dtype = next((t.dtype for t in module.parameters() if t.is_floating_point()), torch.get_default_dtype())
        module.__dict__["_inro_float_dtypes"] = (dtype, dtype)
    module.__dict__.update(_inro_capture=capture, _inro_graph=capture.graph, _inro_strict=strict, _inro_calls=Counter(),
                           _inro_changed=None)
    _watch(module)
    capture.graph.owning_module = module
    module._inro_compile()


@dataclasses.dataclass(slots=True)
class Inside:
    """A module whose code a graph stands for, as it was when the graph was made.

    ``siblings`` is the dict of modules of its parent, ``state`` its attributes, ``hooks`` and ``children`` are how many it
    had, ``nothing`` its parameters and buffers that were None, each with the dict that it is in.
    """

    siblings: dict[str, Any]
    name: str
    module: nn.Module
    state: dict[str, Any]
    hooks: int
    children: int
    nothing: tuple[tuple[dict[str, Any], str], ...]


def _hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)


def _watch(module: nn.Module) -> None:
    """Notes how the modules below a captured one are now; leaves that its graph calls look after themselves."""
    called = {str(n.target) for n in module._inro_graph.nodes if n.op == "call_module"}
    inside, watched = [], {}
    for path, child in module.named_modules():
        if path and any(part in called for part in _with_parents(path)):
            continue
        if path:
            parent, _, name = path.rpartition(".")
            state = {**vars(child), "training": False}
            nothing = tuple((kind, n) for kind in (child._parameters, child._buffers) for n, t in kind.items() if t is None)
            siblings = module.get_submodule(parent)._modules
            inside.append(Inside(siblings, name, child, state, _hooks(child), len(child._modules), nothing))
        for name, value in vars(child).items():
            if name not in _TORCHS and not name.startswith("_inro") and (container := _container(value)) is not None:
                watched[id(container)] = container, container.copy()
    module.__dict__.update(_inro_inside=inside, _inro_children=len(module._modules), _inro_watched=list(watched.values()))


def _with_parents(path: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    pieces = path.split(".")
    return [".".join(pieces[:i + 1]) for i in range(len(pieces))]


def _container(value: Any) -> Any:
    """What can be changed inside an attribute without setting it: a dict, a list, the attributes of a config object."""
    if type(value) in (dict, list):
        return value
    attributes = getattr(value, "__dict__", None)
    plain = type(attributes) is dict and not callable(value) and not isinstance(value, (nn.Module, Tensor))
    return attributes if plain and not type(value).__module__.startswith("torch") else None


def _altered(module: nn.Module, lasting: bool = False) -> str | None:
    """What is no more as it was when the module was captured; ``lasting``: apart from the mode, which every copy can tell."""
    changed: Any = module._inro_changed
    if changed is not None:
        return changed
    return _altered_below(module, lasting)


def _altered_below(module: nn.Module, lasting: bool) -> str | None:
    if len(module._modules) != module._inro_children:
        return "modules were added or removed"
    for inside in module._inro_inside:
        if inside.siblings.get(inside.name) is not inside.module:
            return f"{inside.name} was replaced"
        now = inside.module.__dict__
        if len(now["_modules"]) != inside.children:
            return f"modules of {inside.name} were added or removed"
        if len(now["_forward_hooks"]) + len(now["_forward_pre_hooks"]) + len(now["_backward_hooks"]) != inside.hooks:
            return f"hooks on {inside.name}"
        for kind, name in inside.nothing:
            if kind.get(name) is not None:
                return f"{inside.name}.{name} was set"
        if not _is_same(now, inside.state) and (reason := _difference(inside, lasting)) is not None:
            return reason
    for container, before in module._inro_watched:
        if not _is_same(container, before):
            return "a dict, list or config object that its code may have read was changed"
    return None


_altered_below._dynamo_marked_constant = True    # torch.compiler.assume_constant_result


def _is_same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:                          # tensors or arrays, and not the same ones
        return False


def _difference(inside: Inside, lasting: bool) -> str | None:
    now = inside.module.__dict__
    if now["training"] and not lasting:
        return "training mode"
    for name in {**inside.state, **now}:
        a, b = now.get(name, ABSENT), inside.state.get(name, ABSENT)
        if a is not b and not name.startswith("_inro") and name not in _TORCHS and not _is_same(a, b):
            return f"{inside.name}.{name} was changed"
    return None


_TORCHS = frozenset(vars(nn.Module()))


@functools.cache
def _mentioned(user: type) -> frozenset[str]:
    """Every name and string in the code of a class: what it may read with getattr or hasattr."""
    found: set[str] = set()

    def read(code: types.CodeType) -> None:
        found.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, str):
                found.add(constant)
            elif isinstance(constant, types.CodeType):
                read(constant)
    for kind in user.__mro__[:user.__mro__.index(nn.Module)]:
        for value in vars(kind).values():
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            if isinstance(function, types.FunctionType):
                read(function.__code__)
    return frozenset(found)


def _defines(user: type, name: str) -> bool:
    """Does the user's class, or one of its own bases, define this method?"""
    return any(name in vars(kind) for kind in user.__mro__ if kind not in (object, nn.Module))


def detach_graph(module: nn.Module) -> None:
    """Back to the user's own forward."""
    _remove_part(module, GraphForward)
    for name in [n for n in vars(module) if n.startswith("_inro_") and n not in ("_inro_packed", "_inro_links")]:
        del module.__dict__[name]


def attach_packed(module: nn.Module, name: str, packed: Packed, holder: nn.Module | None = None,
                  there: tuple[str, ...] = ()) -> None:
    """Makes ``module.name`` an unpacked view of its parts, which the module holds, or ``holder`` under other names."""
    module.__dict__.setdefault("_inro_packed", {})
    module.__dict__.setdefault("_inro_links", {})
    _add_part(module, PackedWeights)
    module._inro_packed[name] = packed
    if holder is not None and holder is not module:
        module._inro_links.update({mine: (holder, other) for mine, other in zip(packed.buffers, there, strict=True)})


def attach_fake(module: nn.Module, name: str, fake: nn.Module) -> None:
    """Makes ``module.name`` what ``fake`` makes of the float parameter of that name."""
    module.__dict__.setdefault("_inro_fake", {})[name] = fake
    _add_part(module, FakeQuantizedWeights)


def detach_fakes(module: nn.Module) -> None:
    """Back to the float weights."""
    _remove_part(module, FakeQuantizedWeights)
    module.__dict__.pop("_inro_fake", None)


def recurrent(module: nn.Module) -> None:
    """Makes the flat list of a recurrent module's weights follow the weights."""
    _add_part(module, RecurrentWeights)
    module._init_flat_weights()


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Hooks on all modules of the process (torch.nn.modules.module) do not see the runs inside."""
    kept = [(hooks, dict(hooks)) for hooks in (_GLOBAL_HOOKS, _GLOBAL_PRE_HOOKS)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def finish(root: nn.Module) -> None:
    """What the root of a quantized model needs beside its graph and weights."""
    if not issubclass(type(root), Part):
        root.__dict__.update(_inro_packed={}, _inro_links={})
        _add_part(root, PackedWeights)
    root.register_load_state_dict_pre_hook(_check_state)       # refuses the float model's weights before anything is copied


def _check_state(root: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for path, module in root.named_modules(prefix=prefix.removesuffix(".")):
        for name, packed in vars(module).get("_inro_packed", {}).items():
            full = f"{path}.{name}".lstrip(".")
            if full in state and not any(f"{path}.{buffer}".lstrip(".") in state for buffer in packed.buffers):
                raise StateError(f"{full} in this state_dict is a float weight, and the model holds codes ({packed.buffers[0]}): "
                                 f"load it into the float model and quantize that, or give the state_dict of a quantized model")
