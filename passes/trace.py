"""The tracer: a torch.fx tracer that carries the example.

Every proxy holds the value that the example run has at that node. What Python asks about it is therefore answered
with a fact (rank, dtype, device, keys, lengths of tuples, None or not), and sizes are symbolic numbers with a hint:

    x.view(*x.shape[:-1], -1, 64)      ->  size = x.size(0); size_1 = x.size(1); view = x.view(size, size_1, -1, 64)
    if x.shape[1] > 512: ...           ->  a guard on size_1 > 512, with the source line; the branch taken is recorded

A branch on a tensor's values cannot be recorded soundly: the module whose code does that becomes a leaf, a call that
really runs. The same happens to a module that writes to its own state, has hooks, or confuses the tracer in any way.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import operator
import os
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Scope, TracerBase
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._pytree import tree_map

from .constants import ABSENT, Alias, Constant, alias_of_view, storage_of
from .decompose import DECOMPOSITIONS

__all__ = ["Applied", "ExampleProxy", "GuardFailed", "Retrace", "TraceError", "Tracer", "active", "frame", "guard", "is_mutating",
           "module_call", "patches"]


class TraceError(RuntimeError):
    """The traced code did something that a graph cannot say; the text is the reason that the report shows."""


class GuardFailed(Exception):
    """A captured graph met a size for which its recorded branches do not hold."""


class Retrace(Exception):
    """A module was given up after its code had changed tensors in place: trace again with it as a leaf."""

    def __init__(self, path: str):
        super().__init__(path)
        self.path = path


def guard(value: Any, expected: Any, where: str) -> None:
    """The node that a recorded branch leaves in the graph."""
    holds = value if expected is True else not value if expected is False else value == expected
    if not holds:
        raise GuardFailed(f"{where} was traced with {expected}")


# ---- which tracer is at work in this thread ----

class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack: list[Any] = []


_frames = _Frames()


def active() -> Any:
    """The tracer or leaf run that module calls of this thread go to; None for ordinary execution."""
    return _frames.stack[-1] if _frames.stack else None


@contextlib.contextmanager
def frame(frame: Any) -> Iterator[None]:
    _frames.stack.append(frame)
    try:
        yield
    finally:
        _frames.stack.pop()


class _Patches:
    """The methods of nn.Module that tracing listens to, patched while any thread traces; other threads pass through."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.saved: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self.lock:
            self.users += 1
            if self.users > 1:
                return
            for owner, name, patch in _PATCHES:
                original = vars(owner).get(name, getattr(owner, name))
                self.saved.append((owner, name, original))
                setattr(owner, name, patch(original))

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            while not self.users and self.saved:
                setattr(*self.saved.pop())


patches = _Patches()


module_call = nn.Module.__call__            # the real one, whatever is patched later


def _patch_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        frame = None if torch.compiler.is_compiling() else active()         # inside torch.cond, say
        return original(self, *args, **kwargs) if frame is None else frame.call_module(self, args, kwargs)
    return __call__


def _patch_getattr(original: Callable) -> Callable:
    @functools.wraps(original)
    def __getattr__(self: nn.Module, name: str) -> Any:
        value = original(self, name)
        frame = None if torch.compiler.is_compiling() else active()
        return frame.read(self, name, value) if isinstance(frame, Tracer) and isinstance(value, Tensor) else value
    return __getattr__


def _patch_setattr(original: Callable) -> Callable:
    @functools.wraps(original)
    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        frame = active()
        if isinstance(frame, Tracer) and not _same(self.__dict__.get(name, ABSENT), value):
            raise TraceError(f"writes self.{name} in forward")
        original(self, name, value)
    return __setattr__


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _patch_factory(original: Callable) -> Callable:
    """torch.ones(n, 3) with a symbolic n: the C parser wants the sizes in a tuple."""
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(active(), Tracer) and _any_proxy(args):
            args = args if isinstance(args[0], (tuple, list)) else (args,)
        return original(*args, **kwargs)
    return factory


def _patch_isinstance(original: Callable) -> Callable:
    """A traced value is an instance of what its example is, and of fx.Proxy for code that asks whether it is traced.

    A ``__class__`` property would do, but torch's C++ code asks the same question and would take the proxy for a tensor.
    """
    def isinstance(value: Any, kind: Any) -> bool:
        if type(value) is ExampleProxy:
            if original(value.example, Tensor) and getattr(kind, "__module__", "") == "torch" and kind is not Tensor:
                value.tracer.ask(value, "dtype")                   # torch.FloatTensor and the like
            return original(value, kind) or original(value.example, kind) or kind is fx.Proxy
        return original(value, kind) or (type(value) is Shape and original(_NO_SIZE, kind))
    return isinstance


def _patch_check(original: Callable) -> Callable:
    @functools.wraps(original)
    def check(*args: Any, **kwargs: Any) -> Any:
        frame = active()
        condition = next((a for a in args[:2] if type(a) is ExampleProxy), None)
        if condition is not None and isinstance(frame, Tracer) and condition.example is not False:
            return frame.check(condition)
        return original(*args, **kwargs)
    return check


def _patch_setting(original: Callable) -> Callable:
    """What code learns about, or does to, the state of torch around it is no fact of the model; nor is code that torch compiles."""
    @functools.wraps(original)
    def setting(*args: Any, **kwargs: Any) -> Any:
        if isinstance(active(), Tracer) and not sys._getframe(1).f_code.co_filename.startswith(INTERNAL):
            raise TraceError(f"calls torch.{original.__name__} at {where()}")
        return original(*args, **kwargs)
    return setting


@dataclasses.dataclass(frozen=True)
class Applied:
    """The target of a node that calls ``function.apply``."""

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return f"apply_{self.function.__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def _patch_apply(original: Any) -> Any:
    """A torch.autograd.Function is one node: its own forward and backward stay in charge."""
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        frame = active()
        if isinstance(frame, Tracer) and (_any_proxy(args) or _any_proxy(kwargs.values())):
            return frame.create("call_function", Applied(cls), *args, **kwargs)
        return original.__get__(None, cls)(*args, **kwargs)
    return classmethod(apply)


_NO_SIZE = torch.Size(())
_PATCHES: list[tuple[Any, str, Callable]]
_PATCHES = [(builtins, "isinstance", _patch_isinstance), (nn.Module, "__call__", _patch_call),
            (nn.Module, "__getattr__", _patch_getattr), (nn.Module, "__setattr__", _patch_setattr)]
_PATCHES += [(torch, name, _patch_factory) for name in ("ones", "zeros", "empty", "rand", "randn")]
_PATCHES += [(torch, name, _patch_check) for name in ("_assert", "_check", "_check_with", "_check_tensor_all",
                                                         "_check_tensor_all_with")]
_PATCHES += [(torch, name, _patch_setting) for name in ("manual_seed", "is_inference_mode_enabled", "get_default_dtype",
                                                         "get_rng_state", "set_rng_state", "seed", "initial_seed", "cond")]
_PATCHES += [(torch.autograd.Function, "apply", _patch_apply)]


# ---- what the tracer intercepts ----

FACTORIES = {getattr(torch, name) for name in (
    "arange", "as_tensor", "bartlett_window", "blackman_window", "empty", "eye", "full", "hamming_window", "hann_window",
    "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros")}
TENSOR_FACTS = {"dtype": "dtype", "device": "device", "layout": "", "is_cuda": "device", "is_cpu": "device",
                "is_meta": "device", "is_mps": "device", "is_xpu": "device", "is_sparse": "", "is_quantized": "",
                "is_nested": "", "is_mkldnn": "", "ndim": "rank", "requires_grad": "requires_grad", "is_leaf": "requires_grad",
                "itemsize": "dtype", "names": "", "grad_fn": "requires_grad", "grad": "requires_grad"}
TENSOR_FACT_METHODS = {"dim": "rank", "ndimension": "rank", "is_floating_point": "dtype", "is_complex": "dtype",
                       "is_signed": "dtype", "element_size": "dtype", "get_device": "device", "is_inference": "",
                       "has_names": "", "is_conj": "", "is_neg": ""}
NUMBERS_OF_SIZE = {"size", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "__len__"}
ELEMENTWISE = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous", "detach", "mul", "div",
               "true_divide", "truediv", "__mul__", "__truediv__", "__rmul__"}
PIECES = {"unbind", "split", "chunk", "tensor_split", "tolist", "where", "nonzero"}       # their number depends on sizes or values
PLAIN = (type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type, torch.finfo, torch.iinfo)
INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


def is_mutating(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Does a call of this target change one of its arguments in place?"""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    return target in _IN_PLACE or name == "__setitem__"


_IN_PLACE = {operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
             operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
             operator.ilshift, operator.irshift, operator.imatmul}


class Shape(tuple):
    """What ``x.shape`` is while tracing: a tuple of symbolic sizes that passes for a torch.Size."""

    def __getitem__(self, index: Any) -> Any:
        item = tuple.__getitem__(self, index)
        return Shape(item) if isinstance(index, slice) else item

    def __add__(self, other: Any) -> Shape:
        return Shape((*self, *other))

    def __radd__(self, other: Any) -> Shape:
        return Shape((*other, *self))

    def numel(self) -> Any:
        return functools.reduce(operator.mul, self, 1)


class ExampleProxy:
    """A node together with the value that the example has there.

    ``static`` marks values that depend on no input (their sizes are plain numbers), ``from_values`` numbers that were
    read out of a tensor: they may flow on through the graph, but no branch may depend on them.
    """

    def __init__(self, node: fx.Node, tracer: Tracer, example: Any, static: bool, from_values: bool):
        self.node, self.tracer = node, tracer
        self.example, self.static, self.from_values = example, static, from_values

    # -- attributes and methods --

    def __getattr__(self, name: str) -> Any:
        tracer, example = self.tracer, self.example
        if isinstance(example, Tensor):
            if name == "shape":
                return self.size()
            if name in TENSOR_FACTS:
                tracer.ask(self, TENSOR_FACTS[name])
                return getattr(example, name)
        elif isinstance(example, Mapping) and name in ("keys", "items", "values", "get"):
            return getattr(_MappingView(self), name)
        with tracer.ordinary():
            value = getattr(example, name)
        if callable(value) and not isinstance(value, Tensor):
            return functools.partial(tracer.create, "call_method", name, self)
        return tracer.create("call_function", getattr, self, name)

    def size(self, dim: Any = None) -> Any:
        if not isinstance(self.example, Tensor):
            return self.__getattr__("size")(*() if dim is None else (dim,))
        if self.static:
            return self.example.size() if dim is None else self.example.size(dim)
        if dim is None:
            self.tracer.ask(self, "rank")
            return Shape(self.tracer.create("call_method", "size", self, i) for i in range(self.example.dim()))
        if isinstance(dim, int) and dim < 0:
            self.tracer.ask(self, "rank")
            dim = dim + self.example.dim()
        return self.tracer.create("call_method", "size", self, dim)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))] if not isinstance(self.example, Mapping) else list(self.example))

    def _count(self) -> int:
        """The length of a tuple or list; of pieces of a tensor it depends on sizes, and is guarded."""
        node = self.node
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in PIECES and not self.static:
            self.tracer.guard(self.tracer.create("call_function", len, self), int)
        return len(self.example)

    def __len__(self) -> int:
        example = self.example
        if isinstance(example, Tensor):
            if not example.dim():
                raise TypeError("len() of a 0-d tensor")
            n = self.size(0)
            return n if type(n) is int else n.__index__()
        return self._count() if isinstance(example, (tuple, list)) else len(example)

    def keys(self) -> Any:
        return list(self.example) if isinstance(self.example, Mapping) else self.__getattr__("keys")()

    def __contains__(self, item: Any) -> bool:
        if isinstance(self.example, Tensor):
            raise TraceError(f"asks whether a tensor contains a value at {where()}")
        if isinstance(self.example, Mapping):
            return item in self.example
        return any(bool(x == item) for x in self)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create("call_function", operator.setitem, self, key, value)

    # -- numbers: a fact that Python needs now becomes a guard --

    def _number(self, kind: type) -> Any:
        if isinstance(self.example, (bool, int, float)):
            value = kind(self.example)
            if not self.static:
                self.tracer.guard(self, kind, sys._getframe(2))
            return value
        if isinstance(self.example, Tensor) or not kind(self.example):
            raise TraceError(f"needs a tensor's value as a Python {kind.__name__} at {where()}")
        return kind(self.example)

    def __bool__(self) -> bool:
        if isinstance(self.example, (tuple, list, Mapping)):
            return len(self) > 0
        if isinstance(self.example, Tensor):
            raise TraceError(f"branches on the values of a tensor at {where()}")
        return self._number(bool) if isinstance(self.example, (bool, int, float)) else bool(self.example)

    def __index__(self) -> int:
        if isinstance(self.example, float):
            raise TypeError("'float' object cannot be interpreted as an integer")
        return self._number(int)

    def __int__(self) -> int:
        return self._number(int)

    def __float__(self) -> float:
        return self._number(float)

    def __complex__(self) -> complex:
        return complex(self._number(float))

    def __format__(self, spec: str) -> str:
        if isinstance(self.example, (bool, int, float)) and not isinstance(self.example, Tensor):
            return format(self._number(type(self.example)), spec)
        return format(repr(self), spec)

    def __round__(self, digits: Any = None) -> Any:
        return self.tracer.create("call_function", round, self, *([] if digits is None else [digits]))

    def __ceil__(self) -> Any:
        return self.tracer.create("call_function", math.ceil, self)

    def __floor__(self) -> Any:
        return self.tracer.create("call_function", math.floor, self)

    def __trunc__(self) -> Any:
        return self.tracer.create("call_function", math.trunc, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __hash__(self) -> int:
        return hash(self._number(type(self.example))) if isinstance(self.example, (bool, int, float)) else id(self)

    def __deepcopy__(self, memo: dict) -> Any:
        if isinstance(self.example, Tensor):
            return self.tracer.create("call_method", "clone", self)
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = active()
        if not isinstance(frame, Tracer):
            raise TraceError(f"a traced value reached {getattr(func, '__name__', func)} outside of the trace")
        frame.forget_parsing(sys._getframe(1), (args, kwargs))
        return frame.call_function(func, args, kwargs or {})


def _operator(name: str, reflected: bool = False) -> Callable:
    function = getattr(operator, name)

    def method(self: ExampleProxy, other: Any = inspect.Parameter.empty) -> Any:
        if other is inspect.Parameter.empty:
            return self.tracer.create("call_function", function, self)
        a, b = (other, self) if reflected else (self, other)
        return self.tracer.create("call_function", function, a, b)
    return method


def _in_place_operator(name: str) -> Callable:
    function, plain = getattr(operator, name), getattr(operator, name[1:].rstrip("_") + ("_" if name in ("iand", "ior") else ""))

    def method(self: ExampleProxy, other: Any) -> Any:
        return self.tracer.create("call_function", function if isinstance(self.example, Tensor) else plain, self, other)
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
              "eq", "ne", "lt", "le", "gt", "ge", "getitem", "neg", "pos", "invert", "abs"):
    setattr(ExampleProxy, f"__{_name.rstrip('_')}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(ExampleProxy, f"__r{_name.rstrip('_')}__", _operator(_name, reflected=True))
for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(ExampleProxy, f"__{_name}__", _in_place_operator(_name))


class _MappingView:
    """keys, values and items of a mapping that a leaf returned: the keys are facts, the values are nodes."""

    def __init__(self, proxy: ExampleProxy):
        self.proxy = proxy

    def keys(self) -> list:
        return list(self.proxy.example)

    def values(self) -> list:
        return [self.proxy[k] for k in self.keys()]

    def items(self) -> list:
        return [(k, self.proxy[k]) for k in self.keys()]

    def get(self, key: Any, default: Any = None) -> Any:
        return self.proxy[key] if key in self.proxy.example else default


def where() -> str:
    """The source line of the user's code that is running: ``modeling_bert.py:120``."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "torch"


class _Interceptor(TorchFunctionMode):
    """Sees every torch function of the traced code, also those that have no proxy among their arguments."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active() is not self.tracer:
            return func(*args, **kwargs)
        if func in FACTORIES or _any_proxy(args) or _any_proxy(tuple(kwargs.values())):
            self.tracer.forget_parsing(sys._getframe(1), (args, kwargs))
            with self:
                return self.tracer.call_function(func, args, kwargs)
        return func(*args, **kwargs)


def _any_proxy(values: Any) -> bool:
    for v in values:
        kind = type(v)
        if kind is ExampleProxy:
            return True
        if (kind is tuple or kind is list or kind is Shape) and _any_proxy(v):
            return True
        if kind is dict and _any_proxy(v.values()):
            return True
        if kind is slice and _any_proxy((v.start, v.stop, v.step)):
            return True
    return False


class Tracer(TracerBase):
    """Traces one module into ``self.graph``. ``session`` knows the whole model: paths, constants, refusals.

    ``facts`` collects what the traced code asked of values that depend on inputs ("rank", "dtype", "device", "grad"):
    only these must be equal for the graph to hold at another call.
    """

    def __init__(self, session: Any, path: str):
        self.session, self.path, self.module = session, path, path
        self.graph = fx.Graph(tracer_cls=None)
        self.scope, self.module_stack, self.node_name_to_scope = Scope("", None), OrderedDict(), {}
        self.facts: set[str] = set()
        self._raised = False                    # did an operator raise, and the traced code go on?
        self._inputs: set[int] = set()          # storages of the inputs
        self._input_changed = False
        self._guarded: dict[fx.Node, set] = {}
        self._fresh: list[tuple[types.FrameType, int, fx.Node, fx.Node]] = []
        self._read: dict[str, ExampleProxy] = {}
        self._adopted: dict[int, tuple[Tensor, str]] = {}      # tensors from elsewhere, kept so that their ids stay theirs

    # -- running the traced code --

    def run(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls ``forward`` with placeholders among its arguments; gives back its result, full of proxies."""
        with patches, frame(self), _Interceptor(self), torch.enable_grad():
            return forward(*args, **kwargs)

    def abandon(self) -> None:
        """Takes back what this trace has added to the module."""
        for _, name in self._adopted.values():
            self.session.root.get_submodule(self.path)._buffers.pop(name, None)
        self.session.state.see_buffers()

    @contextlib.contextmanager
    def ordinary(self) -> Iterator[None]:
        with frame(None):
            yield

    def placeholder(self, name: str, example: Any) -> ExampleProxy:
        node = self.graph.create_node("placeholder", name, (), {})
        node.meta["module"] = self.path
        if isinstance(example, Tensor):
            node.meta["example"] = (example.dtype, tuple(example.shape))
            self._inputs.add(storage_of(example))
        return ExampleProxy(node, self, example, static=False, from_values=False)

    def relative(self, path: str) -> str:
        """A path from the root of the model as a path from the module that is being traced."""
        return path if not self.path else path[len(self.path) + 1:]

    def inside(self, path: str) -> bool:
        return not self.path or path == self.path or path.startswith(self.path + ".")

    # -- what the traced code does --

    def call_module(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        path = self.session.path_of(module)
        known = path is not None and self.inside(path)
        reason = self.session.leaf_reason(module, path)
        if reason is None:
            outer, last, facts = self.module, self._last(), self.facts
            self.module, self.facts = path if path is not None else outer, set()
            try:
                result = module_call(module, *args, **kwargs)
                if known:
                    self.session.saw_call(self, module, path, args, kwargs, result, last)
                facts = facts | self.facts
                return result
            except Retrace:
                raise
            except Exception as error:
                if not known or path == self.path:
                    raise
                self._roll_back(last, path, error)
            finally:
                self.module, self.facts = outer, facts
        elif not known:
            raise TraceError(f"calls a module held outside the module tree, {type(module).__name__}: {reason}")
        return self.create("call_module", self.relative(path), *args, **kwargs)

    def _roll_back(self, last: fx.Node, path: str, error: Exception) -> None:
        self.session.refuse(path, error)
        nodes = []
        while self._last() is not last:
            nodes.append(self._last())
            self.graph.erase_node(nodes[-1])
        erased = set(nodes)
        self._read = {k: v for k, v in self._read.items() if v.node not in erased}
        self._guarded = {k: v for k, v in self._guarded.items() if k not in erased}
        self._fresh.clear()
        self._raised = False
        if any(is_mutating(n.target, n.kwargs) for n in nodes if n.op in ("call_function", "call_method")):
            raise Retrace(path)

    def _last(self) -> fx.Node:
        return self.graph._root.prev

    def read(self, module: nn.Module, name: str, value: Tensor) -> Any:
        """A parameter or buffer: a get_attr node, one for each name."""
        path = self.session.path_of(module)
        if path is None:
            return value
        full = f"{path}.{name}" if path else name
        return self._get_attr(full, value) if self.inside(full) and self.session.has(full) else value

    def _get_attr(self, full: str, value: Tensor) -> ExampleProxy:
        if full not in self._read:
            node = self.graph.create_node("get_attr", self.relative(full), (), {})
            node.meta.update(module=self.module, droppable=True)
            constant: Constant | None = self.session.constants.get(full)
            if constant is not None:
                node.meta["alias"] = Alias.whole(constant, value)
            node.meta["example"] = (value.dtype, tuple(value.shape))
            self._read[full] = ExampleProxy(node, self, value.detach(), static=True, from_values=False)
        return self._read[full]

    def call_function(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func in DECOMPOSITIONS:
            return DECOMPOSITIONS[func](*args, **kwargs)
        if is_tensor_method_or_property(func):
            name = func.__name__
            if name == "__get__":                                     # a property, e.g. torch.Tensor.shape.__get__
                return getattr(args[0], func.__self__.__name__)
            if name == "size":
                return args[0].size(*args[1:], **kwargs)
            return self.create("call_method", name, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], ExampleProxy) and (name in TENSOR_FACT_METHODS or name == "numel"):
            return self.create("call_method", name, *args, **kwargs)
        return self.create("call_function", func, *args, **kwargs)

    def create(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Records one node, runs it on the example, and hands out a proxy, a tuple of them, or a plain fact."""
        if self._raised:
            raise TraceError(f"catches an exception that an operator raised, before {where()}")
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise TraceError(f"calls torch.{target.name()}, whose branches are code of their own")
        proxies = _proxies((args, kwargs))
        first = args[0] if args and type(args[0]) is ExampleProxy else None
        if kind == "call_method" and first is not None and isinstance(first.example, Tensor):
            if target in TENSOR_FACT_METHODS:
                self.ask(first, TENSOR_FACT_METHODS[target])
                return getattr(first.example, target)()
            if target == "type" and len(args) == 1 and not kwargs:
                self.ask(first, "dtype")
                return first.example.type()
        if not torch.is_grad_enabled():
            self.facts.add("grad")
        node_args, node_kwargs = self.create_arg(args), self.create_arg(kwargs)
        example_args, example_kwargs = _examples(args), _examples(kwargs)
        try:
            value = self._evaluate(kind, target, example_args, example_kwargs)
        except Exception:
            self._raised = True
            raise
        if is_mutating(target, kwargs) and first is not None and isinstance(first.example, Tensor):
            self._input_changed = self._input_changed or storage_of(first.example) in self._inputs
        node = self.graph.create_node(kind, target, node_args, node_kwargs)
        node.meta["module"] = self.module
        return self._wrap(node, value, proxies, first)

    def _evaluate(self, kind: str, target: Any, args: tuple, kwargs: dict) -> Any:
        if kind == "call_module":
            full = f"{self.path}.{target}" if self.path else target
            return self.session.run_leaf(full, args, kwargs)
        with self.ordinary():
            if kind == "call_function":
                return target(*args, **kwargs)
            return getattr(args[0], target)(*args[1:], **kwargs)

    def _wrap(self, node: fx.Node, value: Any, proxies: list[ExampleProxy], first: ExampleProxy | None) -> Any:
        static = all(p.static for p in proxies) and node.op != "call_module"
        from_values = any(p.from_values for p in proxies)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if isinstance(value, Tensor):
            node.meta["example"] = (value.dtype, tuple(value.shape))
            node.meta["droppable"] = (node.target is operator.getitem and first is not None
                                      and not isinstance(first.example, Tensor))
            self._set_alias(node, value, proxies, name)
            return ExampleProxy(node, self, value, static, False)
        node.meta["droppable"] = node.op != "call_module" and not is_mutating(node.target, node.kwargs)
        if isinstance(value, PLAIN):
            if isinstance(value, (torch.dtype, torch.device)):     # such as torch.result_type
                self.facts.update(("dtype", "device"))
            return value
        if isinstance(value, (bool, int, float)):
            if any(isinstance(p.example, Tensor) for p in proxies) and name not in NUMBERS_OF_SIZE:
                from_values = True
            if static and not from_values:
                return value
            return ExampleProxy(node, self, value, static=False, from_values=from_values)
        if isinstance(value, torch.Size) or (name == "stride" and isinstance(value, tuple)):
            return Shape(self.create("call_function", operator.getitem, ExampleProxy(node, self, value, static, from_values), i)
                         for i in range(len(value)))
        if type(value).__module__ == "numpy":
            raise TraceError(f"leaves torch for numpy at {where()}")
        if isinstance(value, list) and name == "tolist":
            from_values = True
        if isinstance(value, (tuple, list)):
            self._set_alias(node, value, proxies, name)
        return ExampleProxy(node, self, value, static, from_values)

    def _set_alias(self, node: fx.Node, value: Any, proxies: list[ExampleProxy], name: str) -> None:
        """Notes on the node which weight its value is a view or an elementwise copy of (or, for a tuple, pieces of)."""
        sources = [p for p in proxies if "alias" in p.node.meta or "pieces_of" in p.node.meta]
        if len(sources) != 1 or is_mutating(node.target, node.kwargs):
            return
        source = sources[0]
        alias: Alias = source.node.meta.get("alias") or source.node.meta["pieces_of"]
        if isinstance(value, (tuple, list)):
            node.meta["pieces_of"] = alias
            return
        seen = alias_of_view(self.session.constants[alias.constant], self.session.tensor(alias.constant), value)
        if seen is not None:
            node.meta["alias"] = seen
        elif isinstance(source.example, Tensor) and value.shape == source.example.shape and name in ELEMENTWISE:
            alone = all(not isinstance(p.example, Tensor) or p is source for p in proxies)
            if alone or name in ("type_as", "to"):
                node.meta["alias"] = dataclasses.replace(alias, view=False)

    # -- facts and guards --

    def ask(self, proxy: ExampleProxy, fact: str) -> None:
        if fact and (fact != "rank" or not proxy.static):       # weights may be cast and moved, but not reshaped
            self.facts.add(fact)

    def guard(self, proxy: ExampleProxy, kind: type, frame: types.FrameType | None = None) -> None:
        """Records that the code went on with this number (or, ``kind`` bool, with its truth) as Python sees it now."""
        if proxy.from_values:
            raise TraceError(f"branches on the values of a tensor at {where()}")
        node = self._require(proxy, kind is bool and not isinstance(proxy.example, bool))
        if kind is int and frame is not None and node is not None:
            self._fresh.append((frame, frame.f_lasti, node, proxy.node))

    def _require(self, proxy: ExampleProxy, truth: bool) -> fx.Node | None:
        """The guard on a number (or on its truth); None where there is one already."""
        seen = self._guarded.setdefault(proxy.node, set())
        if truth in seen or False in seen:
            return None
        if self._input_changed:
            raise TraceError(f"branches on sizes after changing its input in place at {where()}")
        seen.add(truth)
        checked, value = proxy.node, proxy.example
        if truth:
            checked, value = self.graph.create_node("call_function", operator.truth, (proxy.node,), {}), bool(value)
            checked.meta.update(module=self.module, droppable=True)
        node = self.graph.create_node("call_function", guard, (checked, value, where()), {})
        node.meta["module"] = self.module
        return node

    def forget_parsing(self, frame: types.FrameType, arguments: Any) -> None:
        """Takes back guards on sizes that only the C argument parser of this very call had looked at."""
        fresh, self._fresh = self._fresh, []
        nodes = {p.node for p in _proxies(arguments)} if fresh else ()
        for caller, instruction, node, number in fresh:
            if caller is frame and instruction == frame.f_lasti and number in nodes:
                self.graph.erase_node(node)
                self._guarded[number].discard(False)

    def check(self, condition: ExampleProxy) -> None:
        """torch._check and its like: a condition on which the code does not branch but insists, also on tensors' values."""
        if isinstance(condition.example, Tensor):
            condition = self.create("call_method", "item", self.create("call_method", "all", condition))
        if type(condition) is ExampleProxy:
            self._require(condition, not isinstance(condition.example, bool))

    # -- arguments --

    def create_arg(self, a: Any) -> Any:
        kind = type(a)
        if kind is ExampleProxy:
            if a.tracer is not self:
                raise TraceError("mixes values of two traces")
            return a.node
        if kind in (int, float, bool, str, type(None)):
            return a
        if kind is tuple or kind is Shape:
            return tuple([self.create_arg(x) for x in a])
        if kind is list:
            return [self.create_arg(x) for x in a]
        if kind is dict:
            for key in a:
                if not isinstance(key, str):
                    raise TraceError("passes a dict whose keys are not strings to an operator")
            return {k: self.create_arg(v) for k, v in a.items()}
        if kind is slice:
            return slice(self.create_arg(a.start), self.create_arg(a.stop), self.create_arg(a.step))
        if isinstance(a, Tensor):
            return self._tensor_argument(a)
        if isinstance(a, torch.Size):
            return tuple(a)
        if kind.__module__ == "numpy" and getattr(a, "shape", None) == ():
            return a.item()
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            return kind(*[self.create_arg(x) for x in a])
        try:
            return super().create_arg(a)
        except NotImplementedError:
            raise TraceError(f"passes a {kind.__name__} to an operator or a module that cannot be traced") from None

    def _tensor_argument(self, tensor: Tensor) -> fx.Node:
        """A tensor that no proxy stands for: one of the module tree read past its attribute, or one from elsewhere."""
        full = self.session.name_of(tensor)
        if full is not None and self.inside(full):
            return self._get_attr(full, tensor).node
        if id(tensor) not in self._adopted:
            self._adopted[id(tensor)] = tensor, self.session.adopt(self.path, tensor)
        node = self.graph.create_node("get_attr", self._adopted[id(tensor)][1], (), {})
        node.meta.update(module=self.module, droppable=True)
        return node


def _proxies(value: Any) -> list[ExampleProxy]:
    found: list[ExampleProxy] = []

    def visit(v: Any) -> None:
        kind = type(v)
        if kind is ExampleProxy:
            found.append(v)
        elif isinstance(v, (tuple, list)):
            for x in v:
                visit(x)
        elif kind is slice:
            visit((v.start, v.stop, v.step))
        elif isinstance(v, dict):
            for x in v.values():
                visit(x)
        elif dataclasses.is_dataclass(v) and not isinstance(v, type):
            for f in dataclasses.fields(v):
                visit(getattr(v, f.name, None))
    visit(value)
    return found


def _examples(value: Any) -> Any:
    """The same arguments with every proxy replaced by its example value."""
    kind = type(value)
    if kind is ExampleProxy:
        return value.example
    if kind is tuple or kind is Shape:
        return tuple([_examples(v) for v in value])
    if kind is list:
        return [_examples(v) for v in value]
    if kind is dict:
        return {k: _examples(v) for k, v in value.items()}
    if kind is slice:
        return slice(_examples(value.start), _examples(value.stop), _examples(value.step))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[_examples(v) for v in value])
    if isinstance(value, (tuple, list, dict)):
        return tree_map(_examples, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _proxies(value):
        clone = copy.copy(value)
        for f in dataclasses.fields(value):
            object.__setattr__(clone, f.name, _examples(getattr(value, f.name)))
        return clone
    return value
