"""Values while tracing: a node of the graph together with what the example run has there.

A `TensorProxy` is a tensor without memory, so that ``isinstance`` and every parser of arguments take it for one; what is asked of it
goes to the tracer, and what reaches an operator past the tracer raises. A `NumberProxy` stands for a size or for a number that was
passed in: arithmetic makes nodes, what Python must know now (a branch, an index, a string) leaves a guard.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..structure import find, map_plain
from .frames import active, where

if TYPE_CHECKING:
    from .tracer import Tracer

__all__ = ["NumberProxy", "Proxy", "Shape", "TensorProxy", "TraceError", "any_proxy", "example_of", "examples", "is_proxy",
           "proxies_in"]


class TraceError(RuntimeError):
    """The traced code did something that a graph cannot say; the text is the reason that the report shows."""


class Shape(tuple[Any, ...]):
    """What ``x.shape`` is while tracing: a tuple of symbolic sizes that passes for a torch.Size."""

    __class__: Any = torch.Size
    _make = staticmethod(tuple)     # in the arguments of a node it is a plain tuple

    def __getitem__(self, index: Any) -> Any:
        item = tuple.__getitem__(self, index)
        return Shape(item) if isinstance(index, slice) else item

    def __add__(self, other: Any) -> Shape:
        return Shape((*self, *other))

    def __radd__(self, other: Any) -> Shape:
        return Shape((*other, *self))

    def numel(self) -> Any:
        return math.prod(self)


class _Seen(Tensor, fx.Proxy):          # type: ignore[misc]
    """The class that a traced tensor says it is: a tensor, and for code that asks whether it is traced, a proxy of torch.fx."""


class _Over:
    """The tracer of proxies whose trace is over: a cache of the user's code that nobody can look into may still hold some. They are the
    example's values then, as they would be had nobody traced."""

    facts: set[str] = set()

    class listener:                            # noqa: N801 - stands in for one
        calling = ""

    def create(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = examples(args), examples(kwargs)
        return target(*args, **kwargs) if kind == "call_function" else getattr(args[0], target)(*args[1:], **kwargs)

    @property
    def asked(self) -> _Over:
        return self

    def size(self, tensor: Any, dim: Any = None) -> Any:
        return tensor.example.size() if dim is None else tensor.example.size(dim)

    def ask(self, tensor: Any, fact: str) -> None:
        """Nobody needs to know."""

    def guard(self, number: Any, kind: Any, frame: Any = None) -> None:
        """Nothing depends on it any more."""


OVER: Any = _Over()


# ---- tensors ----

FACTS = {"dtype": "dtype", "device": "device", "layout": "", "is_cuda": "device", "is_cpu": "device", "is_meta": "device",
         "is_mps": "device", "is_xpu": "device", "is_sparse": "", "is_sparse_csr": "", "is_quantized": "", "is_nested": "", "is_mkldnn": "",
         "ndim": "rank", "requires_grad": "requires_grad", "is_leaf": "requires_grad", "itemsize": "dtype", "names": "",
         "grad_fn": "requires_grad", "grad": "requires_grad", "_version": "", "output_nr": ""}
FACT_METHODS = {"dim": "rank", "ndimension": "rank", "is_floating_point": "dtype", "is_complex": "dtype", "is_signed": "dtype",
                "element_size": "dtype", "get_device": "device", "is_inference": "inference", "has_names": "", "is_conj": "", "is_neg": "",
                "is_shared": "", "is_pinned": ""}
WITHOUT_GRAD = {"requires_grad": False, "is_leaf": True, "grad_fn": None, "grad": None}         # of what is computed without gradients
REFUSED = {"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "backward", "register_hook",
           "register_post_accumulate_grad_hook", "set_", "resize_", "resize_as_", "share_memory_", "retain_grad", "apply_", "map_",
           "__reduce_ex__", "__cuda_array_interface__", "requires_grad_", "is_set_to", "_base", "_is_view"}


class TensorProxy(Tensor):
    """A traced tensor.

    ``static``: it depends on no input, so that its sizes are plain numbers. ``open_rank``: its rank may be another at a call with inputs
    of the same ranks. ``fixed_last``: its last size is the same at every call. ``by_values``: its sizes depend on values.
    ``wants_grad``: it may require a gradient.
    """

    node: fx.Node
    tracer: Tracer
    example: Tensor
    static: bool
    open_rank: bool
    fixed_last: bool
    by_values: bool
    wants_grad: bool
    same_as = 0                 # the id of the traced value whose tensor this may be: in a set they meet, and are compared
    _is_param = False

    @staticmethod
    def __new__(cls, node: fx.Node, tracer: Tracer, example: Tensor, static: bool = False, open_rank: bool = False,
                fixed_last: bool = False, by_values: bool = False, wants_grad: bool = False) -> TensorProxy:
        new = Tensor._make_wrapper_subclass(cls, tuple(example.shape) if example.layout is torch.strided else (0,),
                                            dtype=example.dtype, device=example.device, requires_grad=False)
        new.__dict__.update(node=node, tracer=tracer, example=example, static=static, open_rank=open_rank,
                            fixed_last=fixed_last or static, by_values=by_values, wants_grad=wants_grad,
                            _is_param=isinstance(example, torch.nn.Parameter))
        tracer.made.append(new)
        return new

    def __init__(self, *args: Any, **kwargs: Any):
        """Everything is in __new__."""

    __class__ = property(lambda self: _Seen)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = active()
        if tracer is None or not hasattr(tracer, "call_function"):
            if all(p.tracer is OVER for p in proxies_in((args, kwargs))):
                return func(*examples(args), **examples(kwargs or {}))
            raise TraceError(f"a traced value reached {getattr(func, '__name__', func)} outside of the trace")
        tracer.asked.forget_parsing(sys._getframe(1), (args, kwargs))
        return tracer.call_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:          # type: ignore[override]
        raise TraceError(f"a traced value reached {func} past torch's functions at {where()}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:                    # type: ignore[override]
        raise TraceError(f"prints a tensor at {where()}")

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        raise TraceError(f"prints a tensor at {where()}")

    def __hash__(self) -> int:
        self.tracer.asked.ask(self, "identity")
        return self.same_as or id(self)

    def __bool__(self) -> bool:
        raise TraceError(f"branches on the values of a tensor at {where()}")

    def _value(self) -> Any:
        raise TraceError(f"needs a tensor's value as a Python number at {where()}")

    __int__ = __float__ = __index__ = __complex__ = _value

    def _fact(self, name: str, question: str) -> Any:
        """What the example answers; a method is called."""
        self.tracer.asked.ask(self, question)
        if question == "requires_grad" and self.tracer is not OVER and self.node.op not in ("placeholder", "get_attr"):
            self.tracer.asked.without_grad()
            return WITHOUT_GRAD[name]
        with torch._C.DisableTorchFunction():
            value = getattr(self.example, name)
            return value() if callable(value) and name not in FACTS else value

    def __len__(self) -> int:
        if not self._fact("dim", "rank"):
            raise TypeError("len() of a 0-d tensor")
        n = self.size(0)
        return n if type(n) is int else n.__index__()

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        raise TraceError(f"asks whether a tensor contains a value at {where()}")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.tracer.create("call_method", "clone", self)

    @property
    def shape(self) -> Any:          # type: ignore[override]
        return self.size()

    @property
    def nbytes(self) -> Any:          # type: ignore[override]
        return self.numel() * self.element_size()

    def size(self, dim: Any = None) -> Any:
        return self.tracer.asked.size(self, dim)

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            self.tracer.asked.ask(self, "device")
            return self._fact("type", "dtype")
        return self.tracer.create("call_method", "type", self, *args, **kwargs)


def _attribute(name: str) -> property:
    def read(self: TensorProxy) -> Any:
        if name in FACTS:
            return self._fact(name, FACTS[name])
        if name in REFUSED:
            raise TraceError(f"asks for .{name} of a tensor at {where()}")
        return self.tracer.create("call_function", getattr, self, name)

    def write(self: TensorProxy, value: Any) -> None:
        raise TraceError(f"sets .{name} of a tensor at {where()}")
    return property(read, write)


def _method(name: str) -> Callable[..., Any]:
    def method(self: TensorProxy, *args: Any, **kwargs: Any) -> Any:
        if name in REFUSED:
            raise TraceError(f"calls .{name}() of a tensor at {where()}")
        if name in FACT_METHODS:
            return self._fact(name, FACT_METHODS[name])
        return self.tracer.create("call_method", name, self, *args, **kwargs)
    method.__name__ = name
    return method


def _operator(name: str, reflected: bool = False) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Any, *other: Any) -> Any:
        return self.tracer.create("call_function", function, *((*other, self) if reflected else (self, *other)))
    return method


UNARY = ("neg", "pos", "invert", "abs")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul", "ilshift", "irshift")


def _setitem(self: TensorProxy, key: Any, value: Any) -> None:
    self.tracer.create("call_function", operator.setitem, self, key, value)


def _fill(kind: type[Any]) -> None:
    """Gives the class of traced tensors every attribute, method and operator of a tensor."""
    own = vars(kind)
    for name in dir(Tensor):
        if name in own or (name.startswith("__") and name.strip("_") not in ("array", "dlpack", "reduce_ex", "cuda_array_interface")):
            continue
        value = getattr(Tensor, name)
        if not name.startswith("_") or name in REFUSED or name in FACTS:
            setattr(kind, name, _method(name) if callable(value) else _attribute(name))
    for name in (*UNARY, *BINARY, *COMPARISONS, "getitem"):
        setattr(kind, f"__{name.rstrip('_')}__", _operator(name))
    for name in BINARY:
        setattr(kind, f"__r{name.rstrip('_')}__", _operator(name, reflected=True))
    for name in IN_PLACE:
        setattr(kind, f"__{name}__", _operator(name))
    kind.__setitem__ = _setitem


_fill(TensorProxy)


# ---- numbers ----

ONE_BY_ONE = {"ones", "zeros", "empty", "rand", "randn", "new_ones", "new_zeros", "new_empty", "expand", "view", "reshape", "repeat",
              "tile", "permute", "broadcast_to", "resize_"}          # functions that take a series of sizes

class NumberProxy:
    """A traced number. ``from_values``: it was read out of a tensor, so that no branch may depend on it."""

    def __init__(self, node: fx.Node, tracer: Tracer, example: Any, from_values: bool = False):
        self.node, self.tracer, self.example, self.from_values = node, tracer, example, from_values
        tracer.made.append(self)

    static = False
    __class__ = property(lambda self: type(self.example))

    @property
    def __torch_function__(self) -> Any:
        """What torch asks of an argument that is no tensor. (Where a function takes sizes one by one, as ``torch.ones(n, 3)`` does, its
        parser would take the first for all of them: there it is told nothing, asks for an index, and the tracer sees the call after.)"""
        return torch._C._disabled_torch_function_impl if self.tracer.listener.calling in ONE_BY_ONE else TensorProxy.__torch_function__

    def _known(self, kind: type[Any]) -> Any:
        """The number as Python is told it now, and a guard on that."""
        self.tracer.asked.guard(self, kind, sys._getframe(2))
        return kind(self.example)

    def __bool__(self) -> bool:
        return bool(self._known(bool))

    def __index__(self) -> int:
        if isinstance(self.example, float):
            raise TypeError("'float' object cannot be interpreted as an integer")
        return int(self._known(int))

    def __int__(self) -> int:
        return int(self._known(type(self.example)))

    def __float__(self) -> float:
        return float(self._known(type(self.example)))

    def __complex__(self) -> complex:
        return complex(self._known(type(self.example)))

    def __format__(self, spec: str) -> str:
        return format(self._known(type(self.example)), spec)

    def __repr__(self) -> str:
        return repr(self._known(type(self.example)))

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(self._known(type(self.example)))

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

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.example, name)                          # is_integer, real, numerator, bit_length ...
        known = self._known(type(self.example))
        return getattr(known, name) if callable(value) else value


def _compared(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def method(self: NumberProxy, other: Any) -> Any:
        if isinstance(example_of(other), Tensor):
            return self.tracer.create("call_function", function, self, other)
        truth = self.tracer.create("call_function", function, self, other)
        return bool(truth) if type(truth) is NumberProxy else truth         # as Python has it, which a branch will ask next
    return method


def _arithmetic(name: str, reflected: bool = False) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def method(self: NumberProxy, other: Any) -> Any:
        if not isinstance(example_of(other), (int, float, complex, Tensor)):
            return NotImplemented if not isinstance(example_of(other), (list, tuple, str)) \
                else function(*((other, int(self)) if reflected else (int(self), other)))
        return self.tracer.create("call_function", function, *((other, self) if reflected else (self, other)))
    return method


for _name in UNARY:
    setattr(NumberProxy, f"__{_name}__", _operator(_name))
for _name in BINARY:
    setattr(NumberProxy, f"__{_name.rstrip('_')}__", _arithmetic(_name))
    setattr(NumberProxy, f"__r{_name.rstrip('_')}__", _arithmetic(_name, reflected=True))
for _name in COMPARISONS:
    setattr(NumberProxy, f"__{_name}__", _compared(_name))


# ---- traced values among others ----

Proxy = TensorProxy | NumberProxy
KINDS = (TensorProxy, NumberProxy)


def is_proxy(value: Any) -> bool:
    return type(value) in KINDS


def example_of(value: Any) -> Any:
    """The example behind a traced value; any other value itself."""
    return value.example if type(value) in KINDS else value


def examples(value: Any) -> Any:
    """The same arguments with every traced value replaced by its example."""
    return map_plain(value, example_of)


def any_proxy(values: Any) -> bool:
    """Is there a traced value among arguments?"""
    for v in values:
        kind = type(v)
        if kind in KINDS:
            return True
        if (kind is tuple or kind is list or kind is Shape) and any_proxy(v):
            return True
        if kind is dict and any_proxy(v.values()):
            return True
        if kind is slice and any_proxy((v.start, v.stop, v.step)):
            return True
    return False


def proxies_in(value: Any) -> list[Any]:
    """The traced values among arguments, in order."""
    found: list[Any] = []

    def see(v: Any) -> Any:
        if type(v) in KINDS:
            found.append(v)
        elif isinstance(v, Mapping) or hasattr(type(v), "__dataclass_fields__"):
            found.extend(find(v, is_proxy))
        return v
    map_plain(value, see)
    return found
