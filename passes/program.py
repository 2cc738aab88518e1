"""What was captured of one module, and everything known about it, apart from the module that runs it.

A `Program` holds a graph, the call that it answers, its guards, the weights that it reads as codes, and for every use of a weight a
`Probe`: where in this graph the value stands that the float graph computes there. Passes turn programs into programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor, fx

from .constants import Alias

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .capture.call import Call
    from .solve.plan import Weight

__all__ = ["Context", "Derived", "Guard", "GuardFailed", "Meta", "Pass", "Probe", "Program", "Stored", "Value", "annotate", "copied",
           "derived", "guard", "meta_of", "shape_of"]


@dataclasses.dataclass(frozen=True)
class Value:
    """What the example run saw at a node: a tensor of this dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """The part of a quantized weight that a get_attr node reads; ``single_row``: one row serves every row of the matrix."""

    constant: str
    part: str
    single_row: bool


class Meta(TypedDict, total=False):
    """TABLE: every key of ``node.meta`` that the compiler writes. Read them through `meta_of`."""

    module: str                 # the path of the module whose code made the node
    where: str                  # its source line, ``modeling.py:120``
    value: Value                # what the example saw; absent where that was no tensor
    alias: Alias                # of which weight the value is a view or an elementwise copy
    pieces_of: Alias            # the same, for a tuple of views
    droppable: bool             # nobody misses the node when its value is not used
    twin: str                   # the node of the float graph that has the same value
    stored: Stored              # it reads a part of a quantized weight
    unpacks: str                # it belongs to the unpacking of this weight
    weight_dtype: torch.dtype   # a dtype among its arguments that follows ``.half()`` of the model
    kernel: str                 # the operator that computes a use of a weight, for the report
    unfused: str                # why that is unpacking and the float operator
    format: tuple[str, str]     # its value are codes: the nodes of their scale and zero point


def meta_of(node: fx.Node) -> Meta:
    """The typed view of ``node.meta``."""
    return cast(Meta, node.meta)


def annotate(node: fx.Node, **meta: Unpack[Meta]) -> None:
    """Adds to ``node.meta``."""
    meta_of(node).update(meta)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape that the example saw at a node; None for what is no tensor."""
    seen = meta_of(value).get("value") if isinstance(value, fx.Node) else None
    return None if seen is None else seen.shape


@dataclasses.dataclass(frozen=True)
class Guard:
    """One thing that Python was told while tracing, and that must be so again: ``question`` of ``source``, asked at ``where``."""

    source: str
    question: str
    expected: Any
    where: str

    def __str__(self) -> str:
        return f"{self.question} of {self.source} was {self.expected}" + (f" at {self.where}" if self.where else "")


class GuardFailed(Exception):
    """A captured graph met a size for which its recorded branches do not hold."""


def guard(value: Any, expected: Any, where: str) -> None:
    """The node that a recorded branch leaves in the graph."""
    holds = value if expected is True else not value if expected is False else value == expected
    if holds and type(value) is float and value == 0.0:
        holds = math.copysign(1.0, value) == math.copysign(1.0, expected)          # -0.0 is another number to some
    if not holds:
        raise GuardFailed(f"{where} was traced with {expected}")


@dataclasses.dataclass(frozen=True)
class Probe:
    """A use of a weight in a program: node ``node`` has the value of the float graph's node ``twin``.

    A pass that merges or fuses keeps it true: a linear whose ReLU was fused has the probe (the fused node, "relu").
    """

    node: str
    twin: str


@dataclasses.dataclass
class Program:
    """What was captured of the module at ``path``.

    ``kind`` is "graph" for the whole model, "region" for a module below one that stays Python, "layer" for a module that owns
    weights and is used on its own when its parents run as Python, "unreached" for one that no example reaches. ``template`` is the
    captured output with a `Slot` for each result; ``weights`` are those read as codes, by name; ``probes`` are by
    (float node, weight); ``log`` says which rule did what, and which refused and why: (rule, node, reason or ""). ``effect`` is what the
    graph does that cannot be taken back (a draw, a write), ``settings`` are what its code asked of torch, ``fixed`` what it was told of
    stored tensors: (shape, dtype), None for what it has not asked. ``gradients``: do they flow through it?
    """

    path: str
    kind: str
    graph: fx.Graph
    call: Call
    template: Any
    weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)
    probes: dict[tuple[str, str], Probe] = dataclasses.field(default_factory=dict)
    log: tuple[tuple[str, str, str], ...] = ()
    effect: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, tuple[tuple[int, ...] | None, torch.dtype | None]] = dataclasses.field(default_factory=dict)
    gradients: bool = True

    @property
    def guards(self) -> tuple[Guard, ...]:
        """All of them: on the call's values, and on what the code asked of intermediates."""
        asked = tuple(Guard(_source(n.args[0]), "value", n.args[1], str(n.args[2])) for n in self.graph.nodes if n.target is guard)
        told = tuple(Guard(name, "answer", expected, "") for name, expected in self.settings.items())
        stored = tuple(Guard(name, "form", form, "") for name, form in self.fixed.items())
        return (*self.call.guards(), *told, *stored, *asked)

    def full(self, target: str) -> str:
        """A path from the module of the program as a path from the root of the model."""
        return f"{self.path}.{target}" if self.path else target


def _source(node: Any, depth: int = 4) -> str:
    """A guarded number as the expression that it is: ``x.size(1)``, ``x.size(1) > 4``; what is deeper, by its node's name."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if node.op == "placeholder" or len(node.all_input_nodes) > 4 or not depth:
        return node.name
    if node.op == "call_method":
        return f"{_source(node.args[0], depth - 1)}.{node.target}({', '.join(_source(a, depth - 1) for a in node.args[1:])})"
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name}({', '.join(_source(a, depth - 1) for a in node.args)})" if node.op == "call_function" else node.name


@dataclasses.dataclass(frozen=True)
class Context:
    """What passes know beside the program: the model, and the weights that are quantized, by name."""

    root: torch.nn.Module
    weights: Mapping[str, Weight]


Pass = Callable[[Program, Context], Program]


def copied(program: Program) -> Program:
    """The same program over a new graph; node names, metadata and probes stay true."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            copies[node] = graph.output(fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return dataclasses.replace(program, graph=graph, probes=dict(program.probes))


# ---- derived constants ----

class Derived:
    """A function of stored tensors whose last result is kept while they are the same: a constant made of others.

    It is no state: never saved, and made again when a source was moved, cast, loaded or written to.
    """

    def __init__(self, make: Callable[..., Tensor]):
        self.make = make
        self._seen: tuple[Any, ...] = ()
        self._made: Any = None

    @property
    def __name__(self) -> str:
        return f"derived_{self.make.__name__}"

    def __call__(self, *sources: Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or torch._C._len_torch_dispatch_stack():
            return self.make(*sources)
        if torch.is_grad_enabled() and any(s.requires_grad for s in sources):
            return self.make(*sources)                  # each call has a gradient of its own
        if len(self._seen) == len(sources):
            for source, (before, version) in zip(sources, self._seen, strict=True):
                if source is not before or source._version != version:
                    break
            else:
                return self._made
        self._made, self._seen = self.make(*sources), tuple((s, s._version) for s in sources if not s.is_inference())
        return self._made

    def __deepcopy__(self, memo: dict[int, Any]) -> Derived:
        return Derived(self.make)

    def __reduce__(self) -> tuple[Any, ...]:
        return Derived, (self.make,)


def derived(graph: fx.Graph, sources: Sequence[fx.Node], make: Callable[..., Tensor]) -> fx.Node:
    """A node, at the point of insertion, for a constant that ``make`` computes from other constants, lazily and once.

    ``sources`` are get_attr nodes; ``make`` is a function of a module, so that a pickled program finds it again.

    >>> graph = fx.Graph()
    >>> parts = [graph.get_attr(name) for name in ("q.weight_codes", "k.weight_codes")]
    >>> derived(graph, parts, torch.maximum).name
    'derived_maximum'
    """
    node = graph.call_function(Derived(make), tuple(sources))
    annotate(node, module=meta_of(sources[0]).get("module", ""), droppable=True)
    return node
