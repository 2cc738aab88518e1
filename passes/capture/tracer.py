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
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from ..constants import ABSENT, Alias, adopted_by, storage_of
from ..program import Value, annotate, meta_of
from .clone import reachable
from .decompose import DECOMPOSITIONS
from .frames import at_work, by_torch, where
from .listener import Listener, unheard
from .operators import GIVE_BACK, RESHAPES, is_mutating, name_of
from .proxy import FACT_METHODS, OVER, NumberProxy, Shape, TensorProxy, TraceError, any_proxy, example_of, examples, is_proxy, proxies_in
from .questions import Questions
from .values import wrapped

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Tracer", "Untraceable"]


class Untraceable(TraceError):
    """The code of the module at ``path`` cannot be traced, nor then that of those that call it."""

    def __init__(self, path: str, reason: str):
        super().__init__(reason)
        self.path = path


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
        tracer.asked.forget_parsing(sys._getframe(1), (args, kwargs))
        if func is torch._C._set_grad_enabled:
            return tracer.asked.set_grad(args[0])
        if func in DECOMPOSITIONS:
            with self:
                return DECOMPOSITIONS[func](*args, **kwargs)
        return tracer.call_function(func, args, kwargs)


class Tracer:
    """Traces one module into ``self.graph``. ``session`` knows the whole model: paths, constants, refusals.

    ``asked`` is what the traced code was told. ``effect`` says what the graph does so far that cannot be taken back, None if nothing.
    """

    def __init__(self, session: Session, path: str):
        self.session, self.path, self.module = session, path, path
        self.graph = fx.Graph(tracer_cls=None)
        self.listener = Listener()
        self.asked = Questions(self, self.listener)
        self.settings: dict[str, Any] = {}
        self.effect: str | None = None
        self.gave_back = False                  # may an operator have given back one of its inputs, and no tensor of its own?
        self.caught = False                     # would the traced code catch what an operator raises?
        self.raised = False                     # did an operator raise, and the traced code go on?
        self.resting = False                    # functions of torch are not recorded: the tracer itself calls them
        self._kept: set[int] = set()            # storages that outlive the call: of inputs, weights and other state
        self._read: dict[str, TensorProxy] = {}
        self._adopted: dict[int, tuple[Tensor, TensorProxy]] = {}      # tensors from elsewhere, kept so that their ids stay theirs
        self.made: list[TensorProxy | NumberProxy] = []

    # -- running the traced code --

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``forward`` with placeholders among its arguments; gives back its result, full of proxies."""
        with torch.enable_grad(), at_work(self), self.session.drawing(), _Interceptor(self):
            result = self.listener.hear(lambda: forward(*args, **kwargs))
        self.listener.settle(reachable([result]))
        self._heed()
        self.asked.facts |= self.listener.facts
        self.settings = self.listener.settings
        if self.raised:
            raise TraceError("catches an exception that an operator raised")
        if self.gave_back and "identity" in self.listener.facts:
            raise TraceError("asks whether two values are the same, of which an operator may have given back one as the other")
        if self.effect is not None and self.caught:
            raise TraceError(f"may catch what an operator raises, beside {self.effect}")
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
        self.asked.forget()
        self._read.clear()
        self._adopted.clear()

    def abandon(self, all_of_it: bool = True) -> None:
        """Takes back what this trace has added to the module, or what of it the graph does not read in the end."""
        module = self.session.root.get_submodule(self.path)
        for _, proxy in self._adopted.values():
            if all_of_it or (proxy.node._erased and str(proxy.node.target) not in self.asked.fixed):
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

    @unheard
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
        outer, facts, heard = self.module, self.asked.facts, self.listener.facts
        self.module, self.asked.facts, self.listener.facts = path, set(), set()
        last = self.last()
        try:
            result = call(*args, **kwargs)
            self._heed()
            self.asked.facts |= self.listener.facts
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
            self.asked.facts, self.listener.facts = facts | self.asked.facts, heard | self.listener.facts

    def last(self) -> fx.Node:
        return self.graph._root.prev

    @unheard
    def read(self, module: nn.Module, name: str, value: Tensor) -> Any:
        """A parameter or buffer: a get_attr node, one for each name."""
        path = self.session.path_of(module)
        full = f"{path}.{name}" if path else name
        if self.resting or path is None or not self.inside(full) or not self.session.has(full):
            return value
        return self._get_attr(full, value)

    @unheard
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
            self.asked.without_grad()
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

    @unheard
    def _lifted(self, value: Any) -> Any:
        """The traced value for a plain tensor that the traced code has come by; other values as they are."""
        if isinstance(value, Tensor) and not is_proxy(value) and value.layout is torch.strided:
            return self.adopted(value)
        return value

    @unheard
    def create(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Records one node, runs it on the example, and hands out a proxy, a tuple of them, or a plain fact."""
        if self.raised:
            raise TraceError(f"catches an exception that an operator raised, before {where()}")
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise TraceError(f"calls torch.{target.name()}, whose branches are code of their own")
        self._heed()
        self.caught = self.caught or self.listener.caught()
        node_args, node_kwargs = self.create_arg(args), self.create_arg(kwargs)
        example_args, example_kwargs = examples(args), examples(kwargs)
        proxies = [p for p in proxies_in((args, kwargs)) if p.tracer is self]
        changed = example_args[0] if is_mutating(target, kwargs) and example_args else None
        try:
            value = self._evaluate(kind, target, example_args, example_kwargs)
        except Exception:
            self.raised = True
            raise
        may = name_of(target) in GIVE_BACK
        tensors = (p for p in proxies if type(p) is TensorProxy and (may or p.example is value))
        same = next(tensors, None) if isinstance(value, Tensor) else None
        self.gave_back = self.gave_back or same is not None
        node = self.graph.create_node(kind, target, node_args, node_kwargs)
        annotate(node, module=self.module, where=where())
        if isinstance(changed, Tensor):
            self._changes(changed, target)
        out = kwargs.get("out")
        for tensor in (out if isinstance(out, (tuple, list)) else (out,)):
            if out is not None:
                self._changes(example_of(tensor), target)
        result = wrapped(self, node, value, proxies)
        if same is not None:
            result.same_as = same.same_as or id(same)
        return result

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
                self.session.drew = True
                self.effect = self.effect or f"drawing random numbers at {where()}"
            draws.drew = draws.drew or before

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

    @unheard
    def adopted(self, tensor: Tensor) -> TensorProxy:
        """A tensor that no proxy stands for: one of the module tree read past its attribute, a view of one, or one from elsewhere."""
        full = self.session.name_of(tensor)
        if full is not None and self.inside(full):
            return self._get_attr(full, tensor)
        viewed = self.session.viewed_by(tensor)
        if viewed is not None and self.inside(viewed):
            base = self._get_attr(viewed, self.session.tensor(viewed))
            view: TensorProxy = self.create("call_function", torch.as_strided, base, tuple(tensor.shape), tuple(tensor.stride()),
                                            tensor.storage_offset())
            return view
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TraceError(f"makes a {type(tensor).__name__}, which is a tensor of a class of its own, at {where()}")
        if id(tensor) not in self._adopted:
            node = self.graph.create_node("get_attr", self.session.adopt(self.path, tensor), (), {})
            annotate(node, module=self.module, where=where(), droppable=True, value=Value(tensor.dtype, tuple(tensor.shape)))
            self._kept.add(storage_of(tensor))
            self._adopted[id(tensor)] = tensor, TensorProxy(node, self, tensor, static=True, wants_grad=tensor.requires_grad)
        return self._adopted[id(tensor)][1]
