"""The tracer: a torch.fx tracer that carries the example.

Every proxy holds the value that the example run has at that node. What Python asks about it is therefore answered with a fact (rank,
dtype, device, lengths of tuples, None or not), and sizes are symbolic numbers with a hint:

    x.view(*x.shape[:-1], -1, 64)      ->  size = x.size(0); size_1 = x.size(1); view = x.view(size, size_1, -1, 64)
    if x.shape[1] > 512: ...           ->  a guard on size_1 > 512, with the source line; the branch taken is recorded

Every answer is guarded. One that follows from the inputs is asked of them before the graph runs; any other is asked in the graph, as
long as nothing has happened there that cannot be taken back: after a draw or a write, a question makes the asking module stay Python.
So does a branch on values, state written in forward, a hook that somebody put there, and whatever else a graph cannot say.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from ..constants import ABSENT, Alias, adopted_by, storage_of
from ..program import Meta, Value, annotate, guard, meta_of
from .aliases import alias_after
from .clone import reachable
from .decompose import DECOMPOSITIONS
from .frames import INTERNAL, at_work, by_torch, where
from .listener import CHEAP, Listener
from .proxy import (
    FACT_METHODS,
    OVER,
    NumberProxy,
    Shape,
    TensorProxy,
    TraceError,
    any_proxy,
    example_of,
    examples,
    is_proxy,
    proxies_in,
)

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Tracer", "Untraceable", "is_mutating"]


class Untraceable(TraceError):
    """The code of the module at ``path`` cannot be traced, nor then that of those that call it."""

    def __init__(self, path: str, reason: str):
        super().__init__(reason)
        self.path = path


SIZE_NUMBERS = {"size", "numel", "nelement", "__len__", "len", "sym_size", "sym_numel"}            # they follow from sizes
STRIDE_NUMBERS = {"stride", "storage_offset", "is_contiguous", "sym_stride", "sym_storage_offset"}
COUNTED = {"unbind", "split", "chunk", "tensor_split", "tolist", "where", "nonzero", "hsplit", "vsplit", "dsplit", "unsafe_split",
           "unsafe_chunk", "split_with_sizes", "broadcast_tensors", "meshgrid"}         # their number follows from sizes
OPEN_RANKS = {"squeeze", "squeeze_", "squeeze_copy", "atleast_1d", "atleast_2d", "atleast_3d"}      # the rank follows from sizes
RESHAPES = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "as_strided_", "resize_", "resize_as_", "set_"}
PLAIN = (type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type, torch.finfo, torch.iinfo)


def is_mutating(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Does a call of this target change one of its arguments in place?"""
    name = name_of(target)
    if kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return True
    return (name.endswith("_") and not name.endswith("__")) or target in _IN_PLACE or name == "__setitem__"


_IN_PLACE = {operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
             operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
             operator.ilshift, operator.irshift, operator.imatmul}


def name_of(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _own(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the tracer in which functions of torch are its own, and not the traced code's."""
    @functools.wraps(method)
    def called(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        calling, before = self.listener.calling, sys.getprofile() if CHEAP else None
        if before is not None:
            sys.setprofile(None)
        with torch._C.DisableTorchFunction():
            try:
                return method(self, *args, **kwargs)
            finally:
                self.listener.calling = calling
                if before is not None:
                    sys.setprofile(before)
    return called


class _Interceptor(TorchFunctionMode):
    """Sees every torch function of the traced code, also those that have no traced value among their arguments."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = self.tracer
        if tracer.resting:
            return func(*args, **kwargs)
        tracer.forget_parsing(sys._getframe(1), (args, kwargs))
        if func is torch._C._set_grad_enabled:
            return tracer.set_grad(args[0])
        if func in DECOMPOSITIONS:
            with self:
                return DECOMPOSITIONS[func](*args, **kwargs)
        return tracer.call_function(func, args, kwargs)


class Tracer:
    """Traces one module into ``self.graph``. ``session`` knows the whole model: paths, constants, refusals.

    ``facts`` are what the traced code asked of values that depend on inputs ("rank", "dtype" ...): only these must be equal for the graph
    to hold at another call. ``effect`` says what the graph does so far that cannot be taken back, None if nothing.
    """

    def __init__(self, session: Session, path: str):
        self.session, self.path, self.module = session, path, path
        self.graph = fx.Graph(tracer_cls=None)
        self.listener = Listener()
        self.facts: set[str] = set()
        self.settings: dict[str, Any] = {}
        self.effect: str | None = None
        self.raised = False                     # did an operator raise, and the traced code go on?
        self.resting = False                    # functions of torch are not recorded: the tracer itself calls them
        self._kept: set[int] = set()            # storages that outlive the call: of inputs, weights and other state
        self.guards: set[fx.Node] = set()       # the nodes of guards
        # what the code was told of stored tensors, by their path from here: (shape, dtype), None for what it has not asked
        self.fixed: dict[str, tuple[tuple[int, ...] | None, torch.dtype | None]] = {}
        self._looked_at: set[tuple[fx.Node, tuple[str, bool]]] = set()      # by `_fix`
        self._guarded: set[tuple[fx.Node, bool]] = set()
        self._fresh: list[tuple[types.FrameType, int, fx.Node, NumberProxy]] = []
        self._read: dict[str, TensorProxy] = {}
        self._adopted: dict[int, tuple[Tensor, TensorProxy]] = {}      # tensors from elsewhere, kept so that their ids stay theirs
        self.made: list[TensorProxy | NumberProxy] = []

    # -- running the traced code --

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``forward`` with placeholders among its arguments; gives back its result, full of proxies."""
        with torch.enable_grad(), at_work(self), self.session.drawing(), self.listener, _Interceptor(self):
            result = forward(*args, **kwargs)
        self.listener.settle(reachable([result]))
        self._heed()
        self.facts |= self.listener.facts
        self.settings = self.listener.settings
        if self.raised:
            raise TraceError("catches an exception that an operator raised")
        if self.effect is not None and self.listener.catches:
            raise TraceError(f"may catch what an operator raises after {self.effect}")
        return result

    def _heed(self) -> None:
        """Raises what the listener heard that no graph can say."""
        refusal = self.listener.take_refusal()
        if refusal is not None:
            raise TraceError(refusal)

    def forget(self) -> None:
        """Lets go of the example's values: what the proxies and the tracer hold of each other would keep them."""
        for proxy in self.made:
            proxy.__dict__.update(tracer=OVER, node=None)
        self.made.clear()
        self._read.clear()
        self._adopted.clear()

    def abandon(self, all_of_it: bool = True) -> None:
        """Takes back what this trace has added to the module, or what of it the graph does not read in the end."""
        module = self.session.root.get_submodule(self.path)
        for _, proxy in self._adopted.values():
            if all_of_it or (proxy.node._erased and str(proxy.node.target) not in self.fixed):
                name = str(proxy.node.target)
                module._buffers.pop(name, None)
                module._non_persistent_buffers_set.discard(name)
                adopted_by(module).discard(name)
                self.session.state.see_buffer(f"{self.path}.{name}".lstrip("."), None)

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """What torch does inside is not the traced code's."""
        before, self.resting = self.resting, True
        try:
            with at_work(None):
                yield
        finally:
            self.resting = before

    @_own
    def placeholder(self, name: str, value: Any) -> TensorProxy | NumberProxy:
        node = self.graph.create_node("placeholder", name, (), {})
        meta_of(node)["module"] = self.path
        example = example_of(value)
        if not isinstance(example, Tensor):
            return NumberProxy(node, self, example)
        meta_of(node)["value"] = Value(example.dtype, tuple(example.shape))
        self._kept.add(storage_of(example))
        return TensorProxy(node, self, example, wants_grad=example.is_floating_point() or example.is_complex())

    def relative(self, path: str) -> str:
        """A path from the root of the model as a path from the module that is being traced."""
        return path if not self.path else path[len(self.path) + 1:]

    def inside(self, path: str) -> bool:
        return not self.path or path == self.path or path.startswith(self.path + ".")

    # -- modules --

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """Traces through a module that the traced code calls; ``call`` is its own ``__call__``."""
        self._heed()
        path = self.session.path_of(module)
        if path is None or not self.inside(path):
            raise TraceError(f"calls a module held outside the module tree, {type(module).__name__}")
        reason = self.session.leaf_reason(module, path)
        if reason is not None:
            raise Untraceable(path, reason)
        outer, facts, heard = self.module, self.facts, self.listener.facts
        self.module, self.facts, self.listener.facts = path, set(), set()
        last = self.last()
        try:
            result = call(*args, **kwargs)
            self._heed()
            self.facts |= self.listener.facts
            with torch._C.DisableTorchFunction():
                self.session.saw_call(self, path, args, kwargs, result, last)
            return result
        except Untraceable:
            raise
        except Exception as error:
            if path == self.path:
                raise
            raise Untraceable(path, self.session.reason_of(error)) from error
        finally:
            self.module = outer
            self.facts, self.listener.facts = facts | self.facts, heard | self.listener.facts

    def last(self) -> fx.Node:
        return self.graph._root.prev

    @_own
    def read(self, module: nn.Module, name: str, value: Tensor) -> Any:
        """A parameter or buffer: a get_attr node, one for each name."""
        path = self.session.path_of(module)
        full = f"{path}.{name}" if path else name
        if self.resting or path is None or not self.inside(full) or not self.session.has(full):
            return value
        return self._get_attr(full, value)

    @_own
    def unpacked(self, module: nn.Module, name: str) -> Any:
        """A weight that the module holds as codes, unpacked once for this capture."""
        path = self.session.path_of(module)
        full = f"{path}.{name}" if path else name
        return self.session.tensor(full) if path is not None and full in self.session.packed else ABSENT

    def write(self, module: nn.Module, name: str, value: Any) -> None:
        """Refuses what the traced code writes to a module."""
        raise TraceError(f"writes self.{name} in forward")

    def _get_attr(self, full: str, value: Tensor) -> TensorProxy:
        if full not in self._read:
            node = self.graph.create_node("get_attr", self.relative(full), (), {})
            annotate(node, module=self.module, where=where(), droppable=True, value=Value(value.dtype, tuple(value.shape)))
            constant = self.session.constants.get(full)
            if constant is not None:
                meta_of(node)["alias"] = Alias.whole(constant, value)
            self._kept.add(storage_of(value))
            self._read[full] = TensorProxy(node, self, value, static=True, wants_grad=value.requires_grad)
        return self._read[full]

    # -- functions --

    def call_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if is_tensor_method_or_property(func):
            if name == "__get__":                                     # a property, e.g. torch.Tensor.shape.__get__
                return self._attribute(args[0], str(func.__self__.__name__))
            if name == "__set__":
                raise TraceError(f"sets an attribute of a tensor at {where()}")
            if not is_proxy(args[0]):
                args = (self._lifted(args[0]), *args[1:])
            if not is_proxy(args[0]):
                with self.rest():
                    return func(*args, **kwargs)
            return getattr(args[0], name)(*args[1:], **kwargs)
        if args and type(args[0]) is TensorProxy and (name in FACT_METHODS or name in ("numel", "is_tensor")) and not kwargs:
            return True if name == "is_tensor" else getattr(args[0], name)(*args[1:])
        if name == "is_grad_enabled" and not by_torch():
            self.without_grad()
            return False
        if name in ("is_tensor", "typename", "is_storage", "get_default_device", "is_grad_enabled", "is_autocast_enabled"):
            with self.rest():
                return func(*examples(args), **examples(kwargs))
        return self.create("call_function", func, *args, **kwargs)

    def _attribute(self, tensor: Any, name: str) -> Any:
        tensor = self._lifted(tensor)
        if is_proxy(tensor):
            return getattr(tensor, name)
        with self.rest():
            return getattr(tensor, name)

    @_own
    def _lifted(self, value: Any) -> Any:
        """The traced value for a plain tensor that the traced code has come by; other values as they are."""
        if isinstance(value, Tensor) and not is_proxy(value) and value.layout is torch.strided:
            return self.adopted(value)
        return value

    @_own
    def create(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Records one node, runs it on the example, and hands out a proxy, a tuple of them, or a plain fact."""
        if self.raised:
            raise TraceError(f"catches an exception that an operator raised, before {where()}")
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise TraceError(f"calls torch.{target.name()}, whose branches are code of their own")
        self._heed()
        node_args, node_kwargs = self.create_arg(args), self.create_arg(kwargs)
        example_args, example_kwargs = examples(args), examples(kwargs)
        proxies = [p for p in proxies_in((args, kwargs)) if p.tracer is self]
        changed = example_args[0] if is_mutating(target, kwargs) and example_args else None
        try:
            value = self._evaluate(kind, target, example_args, example_kwargs)
        except Exception:
            self.raised = True
            raise
        node = self.graph.create_node(kind, target, node_args, node_kwargs)
        annotate(node, module=self.module, where=where())
        if isinstance(changed, Tensor):
            self._changes(changed, target)
        out = kwargs.get("out")
        for tensor in (out if isinstance(out, (tuple, list)) else (out,)):
            if out is not None:
                self._changes(example_of(tensor), target)
        return self._wrap(node, value, proxies)

    def _changes(self, tensor: Tensor, target: Any) -> None:
        """Notes that the graph writes to a tensor which outlives the call."""
        if storage_of(tensor) not in self._kept:
            return
        if name_of(target) in RESHAPES:
            raise TraceError(f"changes the shape of a tensor that it was given at {where()}")
        self.effect = self.effect or f"writing to a tensor that it was given at {where()}"

    def _evaluate(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draws = self.session.draws
        before, draws.drew = draws.drew, False
        try:
            with self.rest():
                return target(*args, **kwargs) if kind == "call_function" else getattr(args[0], target)(*args[1:], **kwargs)
        finally:
            if draws.drew:
                self.effect = self.effect or f"drawing random numbers at {where()}"
            draws.drew = draws.drew or before

    def _wrap(self, node: fx.Node, value: Any, proxies: list[Any]) -> Any:
        """The value of a node as the traced code gets it."""
        static = all(p.static for p in proxies)
        name = name_of(node.target)
        meta = meta_of(node)
        meta["droppable"] = not is_mutating(node.target, node.kwargs) and not isinstance(value, Tensor)
        if isinstance(value, Tensor):
            return self._wrap_tensor(node, meta, value, proxies, static, name)
        if value is None or value is NotImplemented or isinstance(value, PLAIN):
            if isinstance(value, (torch.dtype, torch.device, str)):     # such as torch.result_type, or x.type()
                self.facts |= {"dtype", "device"}
            return value
        if isinstance(value, (bool, int, float)):
            of_tensor = any(type(p) is TensorProxy for p in proxies)
            if name in STRIDE_NUMBERS:
                self.facts.add("strides")
            from_values = any(p.by_values if type(p) is TensorProxy else p.from_values for p in proxies) or (
                of_tensor and name not in SIZE_NUMBERS | STRIDE_NUMBERS)
            if static and not from_values:
                for p in proxies:
                    self.ask(p, "rank")
                return value
            number = NumberProxy(node, self, value, from_values)
            return bool(number) if isinstance(value, bool) and not from_values and not of_tensor else number
        if isinstance(value, torch.Size) or (name == "stride" and isinstance(value, tuple)):
            self.facts |= {"strides"} if name == "stride" else set()
            return Shape(self._item(node, value, i, proxies) for i in range(len(value)))
        if type(value).__module__ == "numpy":
            raise TraceError(f"leaves torch for numpy at {where()}")
        if isinstance(value, (tuple, list)):
            return self._wrap_pieces(node, value, proxies, static, name)
        if isinstance(value, complex):
            return value
        raise TraceError(f"gets a {type(value).__name__} from {name} at {where()}")

    def _wrap_tensor(self, node: fx.Node, meta: Meta, value: Tensor, proxies: list[Any], static: bool, name: str) -> TensorProxy:
        meta["value"] = Value(value.dtype, tuple(value.shape))
        tensors = [p for p in proxies if type(p) is TensorProxy]
        alias, pieces = alias_after(node, value, tensors, name, self.session)
        if alias is not None:
            meta["alias"] = alias
            meta["droppable"] = node.target is operator.getitem and pieces
        numbers = any(type(p) is NumberProxy and isinstance(p.example, int) and self._of_input(p) for p in proxies)
        open_rank = any(p.open_rank for p in tensors) or (not static and (name in OPEN_RANKS or numbers))
        last = value.shape[-1] if value.dim() else None
        fixed = bool(tensors) and ((name == "linear" and len(tensors) > 1 and tensors[1].static) or (
            name in ("view", "reshape", "unflatten") and type(_last_argument(node)) is int and _last_argument(node) == last))
        wants_grad = any(p.wants_grad for p in tensors) and (value.is_floating_point() or value.is_complex())
        if wants_grad and not torch.is_grad_enabled():
            self.facts.add("grad_off")
        by_values = any(p.by_values if type(p) is TensorProxy else p.from_values for p in proxies) or _sizes_by_values(node, tensors, name)
        return TensorProxy(node, self, value, static and not by_values, open_rank, fixed, by_values,
                           wants_grad and name not in ("detach", "data"))

    @staticmethod
    def _of_input(number: NumberProxy) -> bool:
        """Is it a number that the caller passed, or made of one?"""
        pending = [number.node]
        while pending:
            node = pending.pop()
            if node.op == "placeholder":
                if "value" not in node.meta:
                    return True
            elif name_of(node.target) not in SIZE_NUMBERS:
                pending.extend(node.all_input_nodes)
        return False

    def _wrap_pieces(self, node: fx.Node, value: Any, proxies: list[Any], static: bool, name: str) -> Any:
        """A tuple or list of results: its length is a fact where that follows from no size."""
        tensors = [p for p in proxies if type(p) is TensorProxy]
        for p in tensors if static else ():
            self.ask(p, "rank")
        alias, _ = alias_after(node, value, tensors, name, self.session)
        if alias is not None:
            meta_of(node)["pieces_of"] = alias
        fixed = bool(tensors) and tensors[0].fixed_last and _last_argument(node, "dim") in (-1, tensors[0].example.dim() - 1)
        if name in COUNTED and not static and not fixed:
            count = self.graph.create_node("call_function", len, (node,), {})
            annotate(count, module=self.module, where=where(), droppable=True)
            self.guard(NumberProxy(count, self, len(value), any(p.by_values for p in tensors) or name in BY_VALUES), int)
        items = [self._item(node, value, i, proxies) for i in range(len(value))]
        if type(value) in (tuple, list):
            return type(value)(items)
        return type(value)._make(items) if hasattr(type(value), "_make") else type(value)(items)      # named tuples of torch

    def _item(self, node: fx.Node, value: Any, index: int, proxies: list[Any]) -> Any:
        item = self.graph.create_node("call_function", operator.getitem, (node, index), {})
        annotate(item, module=self.module, where=where())
        if "pieces_of" in node.meta:
            meta_of(item)["pieces_of"] = meta_of(node)["pieces_of"]
        wrapped = self._wrap(item, value[index], proxies)
        if isinstance(value[index], Tensor):
            meta_of(item)["droppable"] = True
        if type(wrapped) is NumberProxy and name_of(node.target) == "tolist":
            wrapped.from_values = True
        return wrapped

    # -- facts and guards --

    @_own
    def size(self, tensor: TensorProxy, dim: Any = None) -> Any:
        """``tensor.size(dim)``, or all of them as a `Shape`; plain numbers where they follow from no input."""
        if tensor.static:
            self.ask(tensor, "rank")
            return tensor.example.size() if dim is None else tensor.example.size(dim)
        if dim is None:
            self.ask(tensor, "rank")
            return Shape(self.create("call_method", "size", tensor, i) for i in range(tensor.example.dim()))
        if isinstance(dim, int) and dim < 0:
            self.ask(tensor, "rank")
            dim = dim + tensor.example.dim()
        return self.create("call_method", "size", tensor, dim)

    @_own
    def ask(self, tensor: TensorProxy, fact: str) -> None:
        """The traced code was told a fact about a tensor."""
        if not fact:
            return
        if fact == "dtype" and tensor.node.op not in ("placeholder", "get_attr"):       # torch.tensor(1.0), say
            self.listener.settings.setdefault("torch.get_default_dtype", torch.get_default_dtype())
        if fact in ("rank", "dtype"):
            self._fix(tensor, fact)
        if tensor.static and fact == "rank":
            return
        self.facts.add(fact)
        if fact == "rank" and tensor.open_rank:
            self._require(NumberProxy(self._quiet("call_method", "dim", tensor.node), self, tensor.example.dim()), truth=False)

    def _fix(self, tensor: TensorProxy, fact: str) -> None:
        """The stored tensors that a shape ("rank") or dtype follows from shall keep theirs. Where it depends on inputs, too, only buffers
        are looked at: nobody gives a layer parameters of another rank, and there are many of them."""
        kind, pending = (fact, tensor.static), [tensor.node]
        while pending:
            node = pending.pop()
            if (node, kind) in self._looked_at:
                continue
            self._looked_at.add((node, kind))
            pending.extend(node.all_input_nodes)
            if node.op == "get_attr" and (tensor.static or not self._read_parameter(node)):
                value = meta_of(node)["value"]
                shape, dtype = self.fixed.get(str(node.target), (None, None))
                self.fixed[str(node.target)] = (value.shape, dtype) if fact == "rank" else (shape, value.dtype)

    def _read_parameter(self, node: fx.Node) -> bool:
        owner, _, name = str(node.target).rpartition(".")
        return name in self.session.root.get_submodule(self.path).get_submodule(owner)._parameters

    def _quiet(self, kind: str, target: Any, *args: Any) -> fx.Node:
        """A node that only guards look at."""
        node = self.graph.create_node(kind, target, args, {})
        annotate(node, module=self.module, where=where(), droppable=True)
        return node

    def without_grad(self) -> None:
        """The code asks whether gradients are recorded: the graph is for calls where they are not, as on the example."""
        self.listener.settings["torch.is_grad_enabled"] = False

    @_own
    def guard(self, number: NumberProxy, kind: type[Any], frame: types.FrameType | None = None) -> None:
        """Records that the code went on with this number (or, ``kind`` bool, with its truth) as Python sees it now."""
        if number.from_values:
            raise TraceError(f"branches on the values of a tensor at {where()}")
        node = self._require(number, kind is bool and not isinstance(number.example, bool))
        if kind is int and frame is not None and node is not None:
            self._fresh.append((frame, frame.f_lasti, node, number))

    def _require(self, number: NumberProxy, truth: bool) -> fx.Node | None:
        """The guard on a number (or on its truth); None where there is one already."""
        if (number.node, truth) in self._guarded or (number.node, False) in self._guarded:
            return None
        if self.effect is not None and not follows_from_inputs(number.node):
            raise TraceError(f"asks for a size after {self.effect}, at {where()}")
        self._guarded.add((number.node, truth))
        checked: fx.Node = number.node
        value = number.example
        if truth:
            checked, value = self._quiet("call_function", operator.truth, number.node), bool(value)
        return self._quiet_guard(checked, value)

    def _quiet_guard(self, checked: fx.Node, value: Any) -> fx.Node:
        node = self.graph.create_node("call_function", guard, (checked, value, where()), {})
        annotate(node, module=self.module, where=where())
        self.guards.add(node)
        return node

    def forget_parsing(self, frame: types.FrameType, arguments: Any) -> None:
        """Takes back guards on sizes that only the C argument parser of this very call had looked at."""
        fresh, self._fresh = self._fresh, []
        nodes = {p.node for p in proxies_in(arguments)} if fresh else ()
        for caller, instruction, node, number in fresh:
            if caller is frame and instruction == frame.f_lasti and number.node in nodes and not node.users:
                self.graph.erase_node(node)
                self.guards.discard(node)
                self._guarded.discard((number.node, False))

    @_own
    def set_grad(self, enabled: bool) -> None:
        """``torch.no_grad()`` and its like in the traced code: operators that gradients flow through tell whether it mattered."""
        frame: Any = sys._getframe(1)
        leaving = False
        while frame is not None and frame.f_code.co_filename.startswith(INTERNAL):
            leaving = leaving or frame.f_code.co_name == "__exit__"
            frame = frame.f_back
        if enabled and not leaving:
            self.facts.add("grad_on")
        with self.rest(), torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(enabled)

    # -- arguments --

    def create_arg(self, a: Any) -> Any:
        """An argument as the graph holds it; `TraceError` for what it cannot."""
        kind = type(a)
        if kind is TensorProxy or kind is NumberProxy:
            if a.tracer is OVER:
                return self.create_arg(a.example)
            if a.tracer is not self:
                raise TraceError("mixes values of two traces")
            return a.node
        if kind in (int, float, bool, str, type(None), complex, bytes) or a is ...:
            return a
        if kind is tuple or kind is Shape or kind is torch.Size:
            return tuple([self.create_arg(x) for x in a])
        if kind is list:
            return [self.create_arg(x) for x in a]
        if kind is dict:
            if not all(isinstance(key, str) for key in a):
                raise TraceError("passes a dict whose keys are not strings to an operator")
            return {k: self.create_arg(v) for k, v in a.items()}
        if kind is slice:
            return slice(self.create_arg(a.start), self.create_arg(a.stop), self.create_arg(a.step))
        if isinstance(a, Tensor):
            return self.adopted(a).node
        if kind.__module__ == "numpy" and getattr(a, "shape", None) == ():
            return a.item()
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            return kind(*[self.create_arg(x) for x in a])
        if isinstance(a, (torch.dtype, torch.device, torch.layout, torch.memory_format, type, range)) or callable(a):
            if any_proxy(cell.cell_contents for cell in getattr(a, "__closure__", None) or ()):
                raise TraceError("passes a function that holds a traced value to an operator")
            return a
        if isinstance(a, (int, float, str)):                     # such as an IntEnum
            return a
        if isinstance(a, torch.Generator):
            raise TraceError(f"draws from a generator of its own at {where()}")
        raise TraceError(f"passes a {kind.__name__} to an operator that cannot be traced")

    @_own
    def adopted(self, tensor: Tensor) -> TensorProxy:
        """A tensor that no proxy stands for: one of the module tree read past its attribute, a view of one, or one from elsewhere."""
        full = self.session.name_of(tensor)
        if full is not None and self.inside(full):
            return self._get_attr(full, tensor)
        viewed = self.session.viewed_by(tensor)
        if viewed is not None and self.inside(viewed):
            base = self._get_attr(viewed, self.session.tensor(viewed))
            return self.create("call_function", torch.as_strided, base, tuple(tensor.shape), tuple(tensor.stride()),
                               tensor.storage_offset())
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TraceError(f"makes a {type(tensor).__name__}, which is a tensor of a class of its own, at {where()}")
        if id(tensor) not in self._adopted:
            node = self.graph.create_node("get_attr", self.session.adopt(self.path, tensor), (), {})
            annotate(node, module=self.module, where=where(), droppable=True, value=Value(tensor.dtype, tuple(tensor.shape)))
            self._kept.add(storage_of(tensor))
            self._adopted[id(tensor)] = tensor, TensorProxy(node, self, tensor, static=True, wants_grad=tensor.requires_grad)
        return self._adopted[id(tensor)][1]


def follows_from_inputs(node: fx.Node) -> bool:
    """Is the number computed from the sizes of inputs, and from numbers among them, alone?"""
    if node.op == "placeholder":
        return True
    if node.op != "call_method" and node.op != "call_function":
        return False
    of_tensor = name_of(node.target) in SIZE_NUMBERS | {"dim"} | STRIDE_NUMBERS
    return all((i.op == "placeholder") if of_tensor and "value" in i.meta else "value" not in i.meta and follows_from_inputs(i)
               for i in node.all_input_nodes) and bool(node.all_input_nodes)


def _sizes_by_values(node: fx.Node, tensors: list[TensorProxy], name: str) -> bool:
    """Do the sizes of an operator's result depend on the values of its arguments?"""
    if name in BY_VALUES or (name == "where" and len(node.args) == 1):
        return True
    if name == "repeat_interleave":
        return len(tensors) > 1
    return name in ("getitem", "__getitem__") and any(p.example.dtype in (torch.bool, torch.uint8) for p in tensors[1:])


BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim", "bincount", "histogramdd", "_unique2"}


def _last_argument(node: fx.Node, keyword: str = "") -> Any:
    """The last argument of a call, or the one of that name."""
    if keyword and keyword in node.kwargs:
        return node.kwargs[keyword]
    last = node.args[-1] if len(node.args) > 1 else None
    return last[-1] if isinstance(last, (tuple, list)) and last else last
