"""Capturing one model: what its tracers share, and how a traced module becomes a `Capture`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .call import Call, Slot, rebuild, strip
from .carriers import observed_use
from .constants import Alias, Constant, alias_of_view, find_constants, storage_of
from .example import random_state
from .module import Capture, user_class
from .state import ModuleState
from .trace import ExampleProxy, Retrace, TraceError, Tracer, active, frame, module_call, patches

__all__ = ["Session", "brief", "drop_unused"]

MAX_RETRACES = 25


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
        self.ignores_draws = True                       # does the output stay the same whatever Python and numpy draw?
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
        self.state.see_buffers()
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
        text = error if isinstance(error, str) else str(error) if isinstance(error, TraceError) else brief(error)
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
        with torch.no_grad(), patches, frame(self), _UseRecorder(self, path):
            return module_call(self.root.get_submodule(path), *args, **kwargs)

    def run_root(self, args: tuple, kwargs: dict) -> Any:
        """The same for the root, without its hooks."""
        with torch.no_grad(), patches, frame(self), _UseRecorder(self, ""):
            return self.root.forward(*args, **kwargs)

    def call_module(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """A module called by Python code (this session is the active frame)."""
        path = self.path_of(module)
        if path is None or path in self.captures or path in self.leaves or not self.weights_below(path) \
                or self.leaf_reason(module, path) is not None:
            return module_call(module, *args, **kwargs)
        result, captured = self.trace(path, "region", args, kwargs)
        wants_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
        if captured and wants_grad:
            return module_call(module, *args, **kwargs)                     # the caller goes on to ask for gradients
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

                traced = call.capture(values, tracer.placeholder)
                leaves, spec = tree_flatten(traced)
                given_args, given_kwargs = call.spread(traced)
                drawn = random_state()
                result = tracer.run(forward or module.forward, given_args, given_kwargs)
                drew = random_state() != drawn
                leaves_after, spec_after = tree_flatten(traced)
                if spec != spec_after or any(a is not b for a, b in zip(leaves, leaves_after, strict=True)):
                    raise TraceError("changes a container among its inputs")
                if tracer._raised:
                    raise TraceError("catches an exception that an operator raised")
                self._refuse_leaks(module)
                example = _example_of(result)
                if drew and not self.ignores_draws:
                    raise TraceError("depends on random numbers from outside of torch")
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


class _UseRecorder(torch.overrides.TorchFunctionMode):
    """Sees which operators the Python code of a leaf feeds its weights to."""

    def __init__(self, session: Session, path: str):
        super().__init__()
        self.session, self.path = session, path

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
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
    with frame(tracer):
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


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
