"""A graph as Python: the function that a module runs in the place of its forward, and the question it asks of new sizes first.

Three functions of one graph:

    ask(*inputs)            the guards that follow from the inputs alone: evaluated before anything runs
    run(self, *inputs)      the graph with the guards on intermediates in it
    quick(self, *inputs)    the graph without guards, for sizes that have passed them before
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
import linecache
import re
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.fx.graph import _format_target

from ..capture.operators import follows_from_inputs
from ..program import guard

__all__ = ["Compiled", "compiled", "source_of"]


@dataclasses.dataclass
class Compiled:
    """The functions of one graph over one module; ``traced`` is what torch.compile sees, reading tensors as attributes."""

    source: str
    ask: Callable[..., Any] | None
    run: Callable[..., Any]
    quick: Callable[..., Any]
    traced: Callable[..., Any]
    code: Any                           # of fx: what GraphModule.recompile gives back
    edited: bool = False                # by hand, and compiled again


def compiled(module: nn.Module, graph: fx.Graph) -> Compiled:
    """Makes Python of a graph whose get_attr nodes are paths from ``module``."""
    guards = [n for n in graph.nodes if n.target is guard]
    first = {n for n in guards if follows_from_inputs(n.args[0])}
    code, source = _source(graph)
    traced = _function(source, code.globals)
    targets = {str(n.target) for n in graph.nodes if n.op == "get_attr"}

    def direct(left_out: set[fx.Node]) -> Callable[..., Any]:
        smaller = graph if not left_out else _without(graph, left_out)
        piece, text = (code, source) if not left_out else _source(smaller)
        return _function(*_direct(module, smaller, targets, text, piece.globals))
    quick = direct(set(guards))
    run = direct(first) if len(first) < len(guards) else quick
    ask = _function(*_asking(graph, first)) if first else None
    return Compiled(source, ask, run, quick, traced, code)


def _source(graph: fx.Graph) -> tuple[Any, str]:
    """What fx writes for the graph, with names that Python would misread spelled out."""
    code = graph.python_code(root_module="self")
    source = code.src
    for target in sorted({str(n.target) for n in graph.nodes if n.op == "get_attr"}, key=len, reverse=True):
        if any(map(_misspelled, target.split("."))):
            written = re.escape(_format_target("self", target).replace("\n", "\n    "))        # fx indents every line
            source = re.sub(written + r"(?!\w)", _spelled_out(target).replace("\\", r"\\"), source)
    return code, source


def source_of(graph: fx.Graph) -> str:
    """The Python of a graph."""
    return _source(graph)[1]


def _without(graph: fx.Graph, guards: set[fx.Node]) -> fx.Graph:
    """A copy without these guards, nor what only they looked at."""
    smaller = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = smaller.graph_copy(graph, copies)
    smaller.output(output)
    for node, twin in copies.items():
        twin.meta = node.meta
    for node in guards:
        smaller.erase_node(copies[node])
    for twin in reversed(list(smaller.nodes)):
        if not twin.users and twin.meta.get("droppable") and twin.op not in ("output", "placeholder"):
            smaller.erase_node(twin)
    return smaller


def _asking(graph: fx.Graph, guards: set[fx.Node]) -> tuple[str, dict[str, Any]]:
    """The source of ``ask``: the sizes that guards look at, and the guards."""
    asking = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    wanted = set(guards)
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    for node in graph.nodes:
        if node.op == "placeholder" or node in wanted:
            copies[node] = asking.node_copy(node, copies.__getitem__)
    asking.output(None)
    code = asking.python_code(root_module="self")
    return code.src.replace("def forward(self, ", "def forward(").replace("def forward(self)", "def forward()"), code.globals


def _direct(module: nn.Module, graph: fx.Graph, targets: set[str], source: str, names: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source with ``self.layers.3.fc.weight_codes``, a microsecond for each dot, as an entry of the dict that holds the tensor.

    The dicts of a module's parameters and buffers are its own for life: what moves, casts or loads a module changes their entries.
    Operators with an overload ``inference`` are called past the Python of their gradient's formula.
    """
    names, reads = dict(names), {}
    for number, target in enumerate(sorted({n.target for n in graph.nodes if _has_inference(n.target)}, key=str)):
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
def _past_autograd(operator: Any) -> Callable[..., Any]:
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


def _function(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function that the source of a graph defines; tracebacks show its lines for as long as it lives, unlike those of fx."""
    file = sys.intern(f"<graph {zlib.crc32(source.encode()):08x}>")
    names = dict(names)
    exec(compile(source, file, "exec"), names)
    function: Callable[..., Any] = names.pop("forward")
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
