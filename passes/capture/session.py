"""Capturing one model: what its tracers share, and how a traced module becomes a `Program`."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..carriers import Use, observed_use
from ..constants import ABSENT, Alias, Constant, adopt, alias_of_view, find_constants, packed_constants, storage_of
from ..program import Program, meta_of
from ..run.classes import compiling, user_class
from ..structure import Slot, find, map_values, strip
from .call import IMMUTABLE, Call, Unusual
from .clone import attributes
from .draws import OwnDraws
from .frames import active, at_work
from .leaks import take_back
from .proxy import TensorProxy, TraceError, example_of, is_proxy
from .state import ModuleState
from .traced import own_call
from .tracer import Tracer, Untraceable

__all__ = ["Session", "brief", "drop_unused", "has_foreign_hooks"]


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
        self.state = self.kept = None

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
        adopt(module, name, tensor.detach() if tensor.requires_grad else tensor)
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
        layer = _cut_out(tracer, module, path, args, kwargs, result, last)
        if layer is not None:
            self.layers[path] = layer

    # -- code that stays Python --

    def run_python(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module that stays Python on the example (the root without its hooks); its children are captured on the way."""
        module = self.root.get_submodule(path)
        with torch.no_grad(), at_work(_PythonRun(self)), _UseRecorder(self, path):
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
            example = _example_of(result)
            if (tracer.listener.drew or self.model_draws_outside) and not self.ignores_draws:
                raise TraceError("depends on random numbers from outside of torch")
            self.captures[path] = _finish(tracer, call, kind, result)
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
        places = [(f"self.{n} of {path or 'the module itself'}", {n: v}) for path, child in module.named_modules()
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


class _PythonRun:
    """What is at work while Python code runs that is not traced: its calls of modules are captured, everything else is its own."""

    def __init__(self, session: Session):
        self.session = session

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        return self.session.call_from_python(module, args, kwargs)

    def read(self, module: nn.Module, name: str, value: Tensor) -> Tensor:
        return value

    def unpacked(self, module: nn.Module, name: str) -> Any:
        """The same tensor at each read, so that its uses are seen."""
        path = self.session.path_of(module)
        full = f"{path}.{name}" if path else name
        return self.session.tensor(full) if path is not None and full in self.session.packed else ABSENT

    def write(self, module: nn.Module, name: str, value: Any) -> None:
        """Its own affair."""


def has_foreign_hooks(module: nn.Module) -> bool:
    """Hooks that somebody put on the module; those that its own library has set are part of its forward, and are traced."""
    library = user_class(module).__module__.partition(".")[0]
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(library in ("__main__", "torch") or getattr(h, "__module__", "").partition(".")[0] != library for h in hooks)


class _UseRecorder(torch.overrides.TorchFunctionMode):
    """Sees which operators the Python code of a module feeds its weights to."""

    def __init__(self, session: Session, path: str):
        super().__init__()
        self.session, self.path = session, path

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if compiling():
            return result
        for tensor in (result,) if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ():
            if isinstance(tensor, Tensor):
                self.session.made[id(tensor)] = tensor
        if isinstance(active(), _PythonRun):
            for use in observed_use(func, args, kwargs, self.session.alias_of):
                self.session.python_uses.setdefault((self.path, use.constant, use.op), use)
        return result


def _wanted(value: Any) -> bool:
    """Is this a result: a traced value or a tensor? A function that holds one cannot be given back."""
    cells = getattr(value, "__closure__", None) if isinstance(value, types.FunctionType) else None
    for cell in cells or ():
        if is_proxy(cell.cell_contents):
            raise TraceError("returns a function that holds a traced value")
    return is_proxy(value) or isinstance(value, Tensor)


def _example_of(value: Any) -> Any:
    """A traced result with the example's values in the place of its proxies."""
    return map_values(value, _wanted, example_of)


def _template(result: Any, place: Callable[[Any], int]) -> Any:
    return strip(result, _wanted, lambda x: Slot(place(x)))


def _finish(tracer: Tracer, call: Call, kind: str, result: Any) -> Program:
    results: list[Any] = []

    def place(x: Any) -> int:
        for i, other in enumerate(results):
            if other is x:
                return i
        results.append(x)
        return len(results) - 1
    template = _template(result, place)
    with at_work(tracer):
        nodes = [tracer.create_arg(r) for r in results]
    tracer.graph.output(nodes[0] if isinstance(template, Slot) else tuple(nodes))
    looked_at = {str(n.target) for n in tracer.graph.nodes if n.op == "get_attr"}
    drop_unused(tracer.graph)
    read = {str(n.target) for n in tracer.graph.nodes if n.op == "get_attr"}
    for name in looked_at - read:                           # its code only asked whether it is there
        tracer.fixed.setdefault(name, (None, None))
    tracer.abandon(all_of_it=False)
    call.facts = frozenset(tracer.facts)
    return Program(tracer.path, kind, tracer.graph, call, template, effect=tracer.effect, settings=tracer.settings,
                   fixed=dict(tracer.fixed))


def drop_unused(graph: fx.Graph) -> None:
    """Removes nodes that nobody uses and that hold no tensor: sizes that were only looked at, attributes, lengths."""
    for node in reversed(list(graph.nodes)):
        if not node.users and meta_of(node).get("droppable") and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def _cut_out(tracer: Tracer, module: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
             last: fx.Node) -> Program | None:
    """The nodes after ``last`` as a graph of the module at ``path`` alone; None if they reach outside of it."""
    prefix = tracer.relative(path)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    try:
        call, values = Call.of(user_class(module).forward.__get__(module), args, kwargs)

        def placeholder(name: str, item: Any) -> Any:
            if not is_proxy(item):
                raise TraceError("takes a tensor that is no node")
            node = graph.create_node("placeholder", name, (), {})
            node.meta = {k: v for k, v in item.node.meta.items() if k == "value"} | {"module": path}
            if type(item) is TensorProxy and (item.static or item.open_rank):
                raise TraceError("takes a tensor that depends on no input, or whose rank does on sizes")
            if copies.setdefault(item.node, node) is not node:
                raise TraceError("takes one tensor twice: another call may take two")
            return item
        call.capture(values, placeholder, example_of)
        for node in _between(last):
            if node.op == "get_attr":
                if prefix and not str(node.target).startswith(prefix + "."):
                    return None
                new = graph.create_node(node.op, str(node.target)[len(prefix) + 1:] if prefix else node.target)
                new.meta = dict(node.meta)
            else:
                new = graph.node_copy(node, lambda n: _read_again(n, copies, graph, prefix))
            copies[node] = new
        numbers = {n for n in copies if "value" not in n.meta and copies[n].op == "placeholder"}
        if numbers and any(_looks_at(g, numbers) for g in tracer.guards if g not in copies):
            return None                             # the caller had asked a number that it passed down
        results: list[fx.Node] = []

        def place(x: Any) -> int:
            if not is_proxy(x):
                raise TraceError("returns a tensor that is no node")
            results.append(copies[x.node])
            return len(results) - 1
        template = _template(result, place)
    except (KeyError, TraceError, TypeError, Unusual):
        return None
    graph.output(results[0] if isinstance(template, Slot) else tuple(results))
    drop_unused(graph)
    if tracer.effect is not None and tracer.listener.catches:
        return None
    call.facts = frozenset(tracer.facts)                    # what was asked since the layer's code began
    settings = dict(tracer.listener.settings)               # as far as known: more than its own may be among them
    fixed = {n[len(prefix) + 1 if prefix else 0:]: s for n, s in tracer.fixed.items() if not prefix or n.startswith(prefix + ".")}
    return Program(path, "layer", graph, call, template, effect=tracer.effect, settings=settings, fixed=fixed)


def _looks_at(guard: fx.Node, numbers: set[fx.Node]) -> bool:
    pending = [guard]
    while pending:
        node = pending.pop()
        if node in numbers:
            return True
        pending.extend(i for i in node.all_input_nodes if "value" not in i.meta)
    return False


def _between(last: fx.Node) -> Iterator[fx.Node]:
    node = last.next
    while node.op != "root":
        yield node
        node = node.next


def _read_again(node: fx.Node, copies: dict[fx.Node, fx.Node], graph: fx.Graph, prefix: str) -> fx.Node:
    """The copy of a node; a weight that the trace had read before this layer's nodes is read once more."""
    if node not in copies and node.op == "get_attr" and (not prefix or str(node.target).startswith(prefix + ".")):
        copies[node] = graph.create_node("get_attr", str(node.target)[len(prefix) + 1:] if prefix else str(node.target))
        copies[node].meta = dict(node.meta)
    return copies[node]


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
