"""A capture as JSON, for files: names and numbers only, nothing that reading it could run.

A file may be damaged or hostile. So a function's name leads to a function only through `functions` (operators on tensors,
arithmetic) or ATen's overloads, none of which calls what it is given; a method must be one of a tensor or a container; attributes
must be there on the module; arguments of nodes are plain values. The classes of outputs are looked up, never imported, among those
that their modules define, and objects are made only of classes from the packages of the model itself.

What JSON cannot say is a dict with one key, its tag: ``{"dtype": "float32"}``, ``{"tuple": [...]}``; see `FORMS`.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import functools
import keyword
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_structure

from .call import Call, ConstantLeaf, Slot, TensorLeaf, attributes_of
from .constants import Alias
from .module import Capture, user_class
from .scheme import Scheme
from .trace import FACTORIES, Applied, guard

__all__ = ["Codec", "NotStored"]


class NotStored(Exception):
    """A capture that a file cannot hold, or that this process cannot take from one; the text is the reason."""


# ---- what names may lead to ----

NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("torch", torch), ("torch.nn.functional", torch.nn.functional), ("torch.functional", torch.functional),
    ("torch.special", torch.special), ("torch.fft", torch.fft), ("torch.linalg", torch.linalg),
    ("torch._C._nn", torch._C._nn), ("torch._C._special", torch._C._special),
    ("torch._C._fft", torch._C._fft), ("torch._C._linalg", torch._C._linalg))
BUILTINS = ("abs", "bool", "complex", "divmod", "float", "getattr", "int", "len", "max", "min", "pow", "round", "slice", "sum")
NOT_ARITHMETIC = ("attrgetter", "call", "itemgetter", "methodcaller")
CONTAINER_METHODS = ("append", "copy", "count", "extend", "get", "index", "insert", "items", "keys", "pop", "update", "values")
OPERATOR_METHODS = tuple(f"__{n}__" for n in (
    "abs add and bool contains eq floordiv ge getitem gt iadd iand ifloordiv imod imul index int invert ior ipow isub itruediv "
    "ixor le len lshift lt matmul mod mul ne neg or pos pow radd rand rfloordiv rmatmul rmod rmul ror rpow rshift rsub rtruediv "
    "rxor setitem sub truediv xor").split())
CALLS_BACK = ("apply_", "backward", "map2_", "map_", "numpy", "register_hook", "register_post_accumulate_grad_hook", "set_",
              "share_memory_", "storage", "triplet_margin_with_distance_loss", "untyped_storage")     # or leave torch
PRIVATE_ATEN = ("_adaptive_avg_pool2d", "_cdist_forward", "_embedding_bag", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_grouped_mm",
                "_log_softmax", "_native_batch_norm_legit_no_training", "_softmax", "_to_copy", "_unsafe_view")
PLAIN_TAGS = frozenset(("node", "tuple", "dict", "dtype", "layout", "memory_format", "device", "slice", "ellipsis", "complex",
                        "size", "enum"))                  # of the arguments of nodes, which become Python source
META = ("example", "kernel", "module", "rows", "target", "unpacks", "weight_dtype")


@functools.cache
def functions() -> dict[str, Callable]:
    """Every function that a stored graph may call, by name: those that take tensors, and arithmetic."""
    overridable = {id(f) for f in torch.overrides.get_testing_overrides()}

    def takes_tensors(name: str, value: Any) -> bool:
        packet = getattr(torch.ops.aten, name, None) if isinstance(value, types.BuiltinFunctionType) else None
        functional = getattr(value, "__module__", "") == "torch.nn.functional" and not name.startswith("_")
        return functional or id(value) in overridable or value in FACTORIES or name.startswith("sym_") or (
            packet is not None and any(_takes_tensor(getattr(packet, overload)) for overload in packet.overloads()))
    found: dict[str, Callable] = {"inro_fx.guard": guard}
    found.update({f"builtins.{name}": getattr(builtins, name) for name in BUILTINS})
    for prefix, namespace in (("operator", operator), ("math", math)):
        found.update({f"{prefix}.{name}": value for name, value in vars(namespace).items()
                      if callable(value) and not name.startswith("_") and name not in NOT_ARITHMETIC})
    for prefix, namespace in NAMESPACES:
        found.update({f"{prefix}.{name}": value for name, value in vars(namespace).items()
                      if callable(value) and not isinstance(value, type) and name not in CALLS_BACK and takes_tensors(name, value)})
    return found


@functools.cache
def _names() -> dict[int, str]:
    return {id(function): name for name, function in reversed(functions().items())}


def _method(name: Any) -> str:
    if isinstance(name, str) and name.isidentifier() and name not in CALLS_BACK and (
            name in CONTAINER_METHODS or name in OPERATOR_METHODS or (hasattr(Tensor, name) and not name.startswith("_"))):
        return name
    raise NotStored(f"it calls the method {name}")


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _takes_tensor(overload: Any) -> bool:
    return any("Tensor" in str(a.type) and not a.is_out for a in overload._schema.arguments)


# ---- values ----

@dataclasses.dataclass(frozen=True)
class Form:
    """How values of one ``kind`` are written under ``tag``: ``encode(codec, value)`` gives JSON, ``decode`` is its inverse."""

    tag: str
    kind: Callable[[Any], bool]
    encode: Callable[[Codec, Any], Any]
    decode: Callable[[Codec, Any], Any]


class Codec:
    """Values, graphs and captures to JSON and back.

    ``modules`` are the model's, whose packages may name classes; ``schemes`` those whose own operators graphs may call.
    """

    def __init__(self, modules: Iterable[nn.Module], schemes: Iterable[Scheme] = ()):
        found = {c.__module__.partition(".")[0] for module in modules for c in user_class(module).__mro__}
        self.packages = found | {"builtins", "collections", "torch"}
        self.own = found - {"builtins", "collections", "torch"}
        self.operators: dict[str, Callable] = {}
        for scheme in schemes:
            for op in ("linear", "embedding"):
                found = scheme.operator(op)
                if not isinstance(found, str):
                    self.operators[f"{scheme.name}:{op}"] = found[0]
        self.nodes: dict[str, fx.Node] = {}
        self._plain = False                     # are the arguments of a node being read?
        self._open: set[int] = set()

    def encode(self, value: Any) -> Any:
        """``value`` as JSON. Raises `NotStored` for what has no form."""
        kind = type(value)
        if kind in (type(None), bool, int, float, str):
            return value
        if id(value) in self._open:
            raise NotStored("it returns an object that contains itself")
        self._open.add(id(value))
        try:
            if kind is list or isinstance(value, fx.immutable_collections.immutable_list):
                return [self.encode(v) for v in value]
            for form in FORMS:
                if form.kind(value):
                    return {form.tag: form.encode(self, value)}
        finally:
            self._open.discard(id(value))
        raise NotStored(f"it holds a {kind.__name__}")

    def decode(self, data: Any) -> Any:
        """The inverse of `encode`."""
        if type(data) is list:
            return [self.decode(d) for d in data]
        if type(data) is not dict:
            return data
        (tag, content), = data.items()
        if self._plain and tag not in PLAIN_TAGS:
            raise NotStored(f"a node has an argument that is a {tag}")
        return _BY_TAG[tag].decode(self, content)

    # -- classes and functions --

    def name_class(self, kind: type) -> str:
        name = _class_name(kind)
        try:
            found = self.find_class(name)
        except NotStored:
            found = None
        if found is not kind:
            raise NotStored(f"the class {kind.__name__} cannot be found by name")
        return name

    def find_class(self, name: str) -> type:
        path, _, qualname = name.partition(":")
        value: Any = sys.modules.get(path) if path.partition(".")[0] in self.packages else None
        for piece in qualname.split("."):
            value = vars(value).get(piece) if hasattr(value, "__dict__") else None
            if not isinstance(value, type):
                break
        if not isinstance(value, type) or value.__module__ != path:
            raise NotStored(f"the class {name} is not among the model's")
        return value

    def name_function(self, function: Callable) -> Any:
        if isinstance(function, torch._ops.OpOverload) and self._may_call(function):
            return str(function)
        if id(function) in _names():
            return _names()[id(function)]
        for name, mine in self.operators.items():
            if mine is function:
                return "scheme:" + name
        if isinstance(function, Applied):
            return "apply:" + self.name_class(function.function)
        raise NotStored(f"it calls {getattr(function, '__name__', function)}, which is no operator of torch")

    def _may_call(self, overload: Any) -> bool:
        space, _, name = overload._schema.name.partition("::")
        known = space in ("aten", "inro_fx") or space in self.own
        return known and (not name.startswith("_") or name in PRIVATE_ATEN) and name not in CALLS_BACK and _takes_tensor(overload)

    def find_function(self, name: str) -> Callable:
        if name in functions():
            return functions()[name]
        kind, _, rest = name.partition(":")
        if kind == "scheme" and rest in self.operators:
            return self.operators[rest]
        if kind == "apply" and rest.partition(".")[0].partition(":")[0] in self.own:
            owner = self.find_class(rest)
            if issubclass(owner, torch.autograd.Function):
                return Applied(owner)
        space, _, rest = name.partition(".")
        base, _, overload = rest.rpartition(".")
        packet = getattr(getattr(torch.ops, space), base, None) if base.isidentifier() and not space.startswith("_") else None
        found = getattr(packet, overload, None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
        if isinstance(found, torch._ops.OpOverload) and self._may_call(found):
            return found
        raise NotStored(f"it calls {name}, which torch {torch.__version__} does not have")

    # -- graphs --

    def encode_graph(self, graph: fx.Graph) -> list[list]:
        """One row for each node: [op, name, target, args, kwargs, notes]."""
        return [[n.op, n.name, n.target if isinstance(n.target, str) else self.name_function(n.target),
                 self.encode(tuple(n.args)), self.encode(dict(n.kwargs)), self._notes(n)] for n in graph.nodes]

    def _notes(self, node: fx.Node) -> dict[str, Any]:
        if node.op == "call_method":
            _method(node.target)
        notes = {key: self.encode(node.meta[key]) for key in META if key in node.meta}
        alias = node.meta.get("alias")
        return notes if alias is None else {**notes, "alias": [self.encode(v) for v in dataclasses.astuple(alias)]}

    def decode_graph(self, rows: list[list], module: nn.Module) -> fx.Graph:
        """The graph, if it only reads what ``module`` has and calls what it may."""
        graph = fx.Graph()
        self.nodes = {}
        for op, name, target, args, kwargs, notes in rows:
            self._plain = True
            try:
                args, kwargs = self.decode(args), self.decode(kwargs)
            finally:
                self._plain = False
            if not isinstance(args, tuple) or not all(k.isidentifier() and not keyword.iskeyword(k) for k in (*kwargs, name)):
                raise ValueError(f"node {name}")
            node = graph.create_node(op, self._target(op, target, args, kwargs, module), args, kwargs, name)
            node.meta = {key: self.decode(value) for key, value in notes.items() if key in META}
            if "alias" in notes:
                node.meta["alias"] = Alias(*[self.decode(v) for v in notes["alias"]])
            self.nodes[name] = node
        return graph

    def _target(self, op: str, target: str, args: tuple, kwargs: dict, module: nn.Module) -> Any:
        if op == "call_function":
            function = self.find_function(target)
            if function is getattr and not (len(args) == 2 and isinstance(args[1], str) and not args[1].startswith("_")):
                raise NotStored("it reads a private attribute")
            if function in (max, min) and kwargs:
                raise NotStored(f"it gives {function.__name__} a function to call")
            return function
        if op == "call_method":
            return _method(target)
        if op in ("get_attr", "call_module"):
            owner = module.get_submodule(target if op == "call_module" else target.rpartition(".")[0])
            if op == "get_attr" and not isinstance(getattr(owner, target.rpartition(".")[2], None), Tensor):
                raise AttributeError(target)
        elif not (op == "output" or (op == "placeholder" and target.isidentifier() and not keyword.iskeyword(target))):
            raise ValueError(f"a node that is {op} {target}")
        return target

    # -- captures --

    def encode_capture(self, capture: Capture) -> dict[str, Any]:
        """Raises `NotStored` with the reason for one that JSON cannot say."""
        call = capture.call
        leaves = []
        for index, group in enumerate(call.leaves):
            default = call.defaults[index] if index < len(call.defaults) else None
            leaves.append([self._leaf(leaf, default) for leaf in group])
        specs = [None if spec is None else self._spec(spec) for spec in call.specs]
        return dict(path=capture.path, kind=capture.kind, graph=self.encode_graph(capture.graph), names=list(call.names),
                    specs=specs, leaves=leaves, facts=sorted(call.facts), count=call.passed[0], keywords=sorted(call.passed[1]),
                    template=self.encode(capture.template))

    def _spec(self, spec: TreeSpec) -> list:
        """A structure of pytree: [] for a leaf, else [class, what its flattening noted, children]."""
        if spec.is_leaf():
            return []
        return [self.name_class(spec.type), self.encode(spec._context), [self._spec(c) for c in spec._children]]

    def _read_spec(self, data: list) -> TreeSpec:
        if not data:
            return tree_structure(0)
        return TreeSpec(self.find_class(data[0]), self.decode(data[1]), [self._read_spec(d) for d in data[2]])

    def _leaf(self, leaf: Any, default: Any) -> list:
        if isinstance(leaf, TensorLeaf):
            return [leaf.name, leaf.rank, self.encode(leaf.dtype), self.encode(leaf.device)]
        if leaf.value is default and default is not None:
            return [leaf.name, "default"]
        try:
            return [leaf.name, "constant", self.encode(leaf.value)]
        except NotStored:
            raise NotStored(f"the example passes a {type(leaf.value).__name__} for {leaf.name}") from None

    def decode_capture(self, data: Mapping[str, Any], module: nn.Module) -> Capture:
        """Raises `NotStored` where this process lacks something, and what Python raises where the data make no sense."""
        call = Call.describe(user_class(module).forward.__get__(module))
        if list(call.names) != data["names"]:
            raise NotStored(f"forward takes ({', '.join(call.names)}) here and ({', '.join(data['names'])}) in the file")
        specs = tuple(None if spec is None else self._read_spec(spec) for spec in data["specs"])
        leaves = tuple(tuple(self._read_leaf(leaf, call.defaults[i] if i < len(call.defaults) else None) for leaf in group)
                       for i, group in enumerate(data["leaves"]))
        if not len(specs) == len(leaves) == len(call.names):
            raise ValueError("another number of parameters")
        call = dataclasses.replace(call, specs=specs, leaves=leaves, facts=frozenset(data["facts"]),
                                   passed=(int(data["count"]), frozenset(data["keywords"])))
        graph = self.decode_graph(data["graph"], module)
        return Capture(str(data["path"]), str(data["kind"]), graph, call, self.decode(data["template"]))

    def _read_leaf(self, leaf: list, default: Any) -> TensorLeaf | ConstantLeaf:
        if leaf[1] == "default":
            return ConstantLeaf(leaf[0], default)
        if leaf[1] == "constant":
            return ConstantLeaf(leaf[0], self.decode(leaf[2]))
        return TensorLeaf(leaf[0], leaf[1], self.decode(leaf[2]), self.decode(leaf[3]))


# ---- TABLE: the forms of values, the first that fits ----

def _is_record(value: Any) -> bool:
    """A dataclass that is a mapping too, as the outputs of transformers."""
    return dataclasses.is_dataclass(value) and isinstance(value, Mapping)


def _make_named(codec: Codec, data: list) -> Any:
    kind = codec.find_class(data[0])
    items = [codec.decode(d) for d in data[1]]
    if not issubclass(kind, tuple):
        raise NotStored(f"{data[0]} is no tuple")
    return kind._make(items) if hasattr(kind, "_fields") else kind(items)


def _record_fields(codec: Codec, value: Any) -> list:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} | dict(value)
    return [codec.name_class(type(value)), {k: codec.encode(v) for k, v in fields.items() if v is not None}]


def _make_record(codec: Codec, data: list) -> Any:
    kind = codec.find_class(data[0])
    if not (dataclasses.is_dataclass(kind) and issubclass(kind, Mapping)):
        raise NotStored(f"{data[0]} is no mapping")
    return kind(**{k: codec.decode(v) for k, v in data[1].items()})


def _make_mapping(codec: Codec, data: list) -> Any:
    kind = codec.find_class(data[0])
    if not issubclass(kind, dict):
        raise NotStored(f"{data[0]} is no dict")
    new = kind.__new__(kind)
    put = collections.OrderedDict.__setitem__ if issubclass(kind, collections.OrderedDict) else dict.__setitem__
    for key, value in data[1]:
        put(new, codec.decode(key), codec.decode(value))
    for key, value in data[2].items():
        object.__setattr__(new, key, codec.decode(value))
    return new


def _is_plain_object(value: Any) -> bool:
    return not callable(value) and not isinstance(value, (nn.Module, Tensor, list, dict, set, str, int, float)) and \
        (hasattr(value, "__dict__") or bool(attributes_of(value))) and type(value).__module__.partition(".")[0] != "torch"


def _object_fields(codec: Codec, value: Any) -> list:
    if type(value).__module__.partition(".")[0] not in codec.own or hasattr(type(value), "__del__"):
        raise NotStored(f"it returns a {type(value).__name__}, which is of another package than the model")
    return [codec.name_class(type(value)), {k: codec.encode(x) for k, x in attributes_of(value).items()}]


def _make_object(codec: Codec, data: list) -> Any:
    kind = codec.find_class(data[0])
    if kind.__module__.partition(".")[0] not in codec.own or issubclass(kind, (nn.Module, enum.Enum)) or hasattr(kind, "__del__"):
        raise NotStored(f"{data[0]} is no output")
    new = object.__new__(kind)
    for key, value in data[1].items():
        object.__setattr__(new, key, codec.decode(value))
    return new


def _member(kind: type, name: str) -> enum.Enum:
    if not issubclass(kind, enum.Enum):
        raise NotStored(f"{kind.__name__} is no enum")
    return kind[name]


def _pairs(codec: Codec, value: Mapping) -> list:
    return [[codec.encode(k), codec.encode(v)] for k, v in value.items()]


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _named(prefix: str) -> tuple[Callable, Callable]:
    """For torch.float32 and its like: the name without ``torch.``, looked up on torch."""
    def decode(codec: Codec, name: str) -> Any:
        value = getattr(torch, name)
        if type(value).__name__ != prefix:
            raise ValueError(f"{name} is no {prefix}")
        return value
    return (lambda codec, value: str(value).removeprefix("torch.")), decode


FORMS: tuple[Form, ...] = (
    Form("node", lambda v: isinstance(v, fx.Node), lambda c, v: v.name, lambda c, d: c.nodes[d]),
    Form("slot", _of(Slot), lambda c, v: v.index, lambda c, d: Slot(int(d))),
    Form("tuple", lambda v: type(v) is tuple, lambda c, v: [c.encode(x) for x in v], lambda c, d: tuple([c.decode(x) for x in d])),
    Form("dict", lambda v: type(v) is dict or isinstance(v, fx.immutable_collections.immutable_dict), _pairs,
         lambda c, d: {c.decode(k): c.decode(v) for k, v in d}),
    Form("dtype", _of(torch.dtype), *_named("dtype")),
    Form("layout", _of(torch.layout), *_named("layout")),
    Form("memory_format", _of(torch.memory_format), *_named("memory_format")),
    Form("device", _of(torch.device), lambda c, v: "cpu", lambda c, d: torch.device(d)),      # a file is about CPUs; .to() follows
    Form("slice", _of(slice), lambda c, v: [c.encode(x) for x in (v.start, v.stop, v.step)],
         lambda c, d: slice(*[c.decode(x) for x in d])),
    Form("ellipsis", lambda v: v is ..., lambda c, v: None, lambda c, d: ...),
    Form("complex", _of(complex), lambda c, v: [v.real, v.imag], lambda c, d: complex(*d)),
    Form("bytes", _of(bytes), lambda c, v: v.hex(), lambda c, d: bytes.fromhex(d)),
    Form("size", _of(torch.Size), lambda c, v: list(v), lambda c, d: torch.Size(d)),
    Form("set", _of(set, frozenset), lambda c, v: [type(v) is frozenset, [c.encode(x) for x in v]],
         lambda c, d: (frozenset if d[0] else set)(c.decode(x) for x in d[1])),
    Form("enum", lambda v: isinstance(v, enum.Enum), lambda c, v: [c.name_class(type(v)), v.name],
         lambda c, d: _member(c.find_class(d[0]), d[1])),
    Form("class", lambda v: isinstance(v, type), lambda c, v: c.name_class(v), lambda c, d: c.find_class(d)),
    Form("named", lambda v: isinstance(v, tuple), lambda c, v: [c.name_class(type(v)), [c.encode(x) for x in v]], _make_named),
    Form("record", _is_record, _record_fields, _make_record),
    Form("mapping", lambda v: isinstance(v, dict) and not isinstance(v, collections.defaultdict),
         lambda c, v: [c.name_class(type(v)), _pairs(c, v), {k: c.encode(x) for k, x in getattr(v, "__dict__", {}).items()}],
         _make_mapping),
    Form("object", _is_plain_object, _object_fields, _make_object),
)
_BY_TAG = {form.tag: form for form in FORMS}
