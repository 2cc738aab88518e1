"""What runs in the place of a user's module: the captured graph where it holds, the user's own forward elsewhere.

A module that was captured, or whose weights became codes, gets a class of its own: a subclass of the user's class, so
that ``isinstance``, methods, properties and attributes stay. Its parts:

    GraphForward     forward() matches the call against the captured one and runs the graph; a call that the graph does
                     not cover runs the user's forward and is counted in ``calls``
    PackedWeights    ``module.weight`` is unpacked from its codes whenever Python asks for it
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import keyword
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _format_target
from torch.fx.graph_module import _forward_from_src

from .call import IMMUTABLE, Call, Slot, _equal, rebuild
from .failures import GraphNotTaken, ModelError, StateError
from .plain import GraphData
from .trace import GuardFailed, guard

__all__ = ["Capture", "GraphForward", "Packed", "PackedWeights", "attach_graph", "attach_packed", "detach_graph", "recurrent",
           "refuse_float_state", "user_class"]

_ABSENT = object()
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
        if module._inro_changed is not None:
            return module._inro_changed
        if not torch.compiler.is_compiling():
            for siblings, name, child, hooks in module._inro_inside:
                if siblings.get(name) is not child:
                    return f"{name} was replaced"
                state = child.__dict__
                if state["training"]:
                    return "training mode"
                if len(state["_forward_hooks"]) + len(state["_forward_pre_hooks"]) + len(state["_backward_hooks"]) != hooks:
                    return f"hooks on {name}"
                if "forward" in state:
                    return f"{name}.forward was replaced"
        if module.training:
            return "training mode"
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
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
        matrix = self.scheme.unpack(self.parts(module), self.layout.columns, self.dtype)
        return self.layout.restore(matrix)


class PackedWeights(nn.Module):
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


class RecurrentWeights(nn.Module):
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


class GraphForward(nn.Module):
    """A module whose forward is a captured graph wherever that covers the call."""

    _inro_capture: Capture
    _inro_graph: fx.Graph
    _inro_run: Callable
    _inro_strict: bool
    _inro_calls: Counter
    _inro_float_dtypes: tuple[torch.dtype, torch.dtype]      # of the weights: when captured, and now
    _inro_inside: list[tuple[dict, str, nn.Module, int]]     # modules that the graph stands for: siblings, name, module, hooks
    _inro_changed: str | None                                # an attribute that was set after the capture

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        capture = self._inro_capture
        reason: Any = capture.excludes(self)
        if reason is None:
            reason = capture.call.match(args, kwargs)
        if type(reason) is list:
            try:
                results = self._inro_run(self, *reason)
            except GuardFailed as failed:
                reason = str(failed)
            except ERRORS as error:                            # the user's own forward raises it better, or catches it
                if torch.compiler.is_compiling() or self._inro_strict:
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
        before = self.__dict__.get(name, _ABSENT)
        super().__setattr__(name, value)
        if before is not _ABSENT and before is not value and name in self._inro_attributes and not _equal(before, value):
            self.__dict__["_inro_changed"] = f"self.{name} was changed"

    def _inro_compile(self) -> Any:
        """Makes Python of the graph."""
        code = self._inro_graph.python_code(root_module="self")
        source = code.src
        for node in self._inro_graph.nodes:
            if node.op in ("get_attr", "call_module") and any(map(keyword.iskeyword, str(node.target).split("."))):
                source = source.replace(_format_target("self", str(node.target)), _spelled_out(str(node.target)))
        self.__dict__["_inro_code"] = source
        self.__dict__["_inro_run"] = _forward_from_src(source, code.globals, None)
        return code

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.__dict__["_inro_float_dtypes"] = (self._inro_float_dtypes[0], _mapped_dtype(self._inro_float_dtypes[1], fn))
        if _retarget(self._inro_graph, fn):
            self._inro_compile()
            self._inro_capture.call.leaves = tuple(
                tuple(dataclasses.replace(leaf, device=_mapped_device(leaf.device, fn)) if getattr(leaf, "device", None) else leaf
                      for leaf in leaves) for leaves in self._inro_capture.call.leaves)
        return result

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_inro_run", "_inro_code"):
            state.pop(name, None)
        state["_inro_graph"] = GraphData.of(self._inro_graph)
        state["_inro_capture"] = dataclasses.replace(self._inro_capture, graph=None)
        del state["_inro_inside"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_inro_graph"] = self._inro_capture.graph = state["_inro_graph"].graph()
        self._inro_graph.owning_module = self
        self.__dict__["_inro_inside"] = _inside(self, self._inro_graph)
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

def _spelled_out(target: str) -> str:
    """``self.class.weight``, which Python cannot parse, with getattr."""
    expression = "self"
    for name in target.split("."):
        expression = f"getattr({expression}, {name!r})"
    return expression


def _mapped_dtype(dtype: torch.dtype, fn: Callable[[Tensor], Tensor]) -> torch.dtype:
    return fn(torch.empty(0, dtype=dtype)).dtype


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
        return module.__dict__[self.state]


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
        @functools.wraps(user.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return GraphForward.forward(self, *args, **kwargs)
        namespace["forward"] = forward
        namespace["__call__"] = user.__call__ if "__call__" in vars(user) else nn.Module.__call__
        if issubclass(user, fx.GraphModule):
            namespace.update(graph=_Borrowed("_inro_graph"), code=_Borrowed("_inro_code"), recompile=GraphView.recompile)
        else:
            after = (GraphView,)
    return type(user)(user.__name__, (*parts, user, *after), namespace)


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
        order = (GraphForward, PackedWeights, RecurrentWeights)
        chosen = tuple(p for p in order if p in (*parts, part))
        module.__class__ = _composed(user_class(module), chosen)


def attach_graph(module: nn.Module, capture: Capture, strict: bool = False) -> None:
    """Makes ``module`` run ``capture`` wherever it covers the call."""
    if GraphForward not in getattr(type(module), "_inro_parts", ()):
        _add_part(module, GraphForward)
        dtype = next((t.dtype for t in module.parameters() if t.is_floating_point()), torch.get_default_dtype())
        module.__dict__["_inro_float_dtypes"] = (dtype, dtype)
    module.__dict__.update(_inro_capture=capture, _inro_graph=capture.graph, _inro_strict=strict, _inro_calls=Counter(),
                           _inro_changed=None, _inro_inside=_inside(module, capture.graph),
                           _inro_attributes=frozenset(n for n, v in vars(module).items() if n != "training"
                                                      and isinstance(v, (*IMMUTABLE, list, tuple))))
    capture.graph.owning_module = module
    module._inro_compile()


def _inside(module: nn.Module, graph: fx.Graph) -> list[tuple[dict, str, nn.Module, int]]:
    """The modules below ``module`` whose code the graph stands for: leaves that it calls look after themselves."""
    called = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    found = []
    for path, child in module.named_modules():
        if path and not any(path == c or path.startswith(c + ".") for c in called):
            parent, _, name = path.rpartition(".")
            hooks = len(child._forward_hooks) + len(child._forward_pre_hooks) + len(child._backward_hooks)
            found.append((module.get_submodule(parent)._modules, name, child, hooks))
    return found


def detach_graph(module: nn.Module) -> None:
    """Back to the user's own forward."""
    parts = tuple(p for p in getattr(type(module), "_inro_parts", ()) if p is not GraphForward)
    module.__class__ = _composed(user_class(module), parts) if parts else user_class(module)
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


def recurrent(module: nn.Module) -> None:
    """Makes the flat list of a recurrent module's weights follow the weights."""
    _add_part(module, RecurrentWeights)
    module._init_flat_weights()


def refuse_float_state(root: nn.Module) -> None:
    """Makes ``root.load_state_dict`` refuse the weights of the float model before it copies anything."""
    root.register_load_state_dict_pre_hook(_check_state)


def _check_state(root: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for path, module in root.named_modules(prefix=prefix.removesuffix(".")):
        for name, packed in vars(module).get("_inro_packed", {}).items():
            full = f"{path}.{name}".lstrip(".")
            if full in state and not any(f"{path}.{buffer}".lstrip(".") in state for buffer in packed.buffers):
                raise StateError(f"{full} in this state_dict is a float weight, and the model holds codes ({packed.buffers[0]}): "
                                 f"load it into the float model and quantize that, or give the state_dict of a quantized model")
