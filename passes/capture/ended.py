"""The end of a trace: its graph as a program, and the part that a layer's code has left of it as a program of that layer."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx

from ..program import Program, meta_of
from ..run.classes import user_class
from ..structure import Slot, map_values, strip
from .call import Call, Unusual
from .frames import at_work
from .proxy import TensorProxy, TraceError, example_of, is_proxy
from .tracer import Tracer

__all__ = ["drop_unused", "examples_of", "layer_of", "program_of"]


def _wanted(value: Any) -> bool:
    """Is this a result: a traced value or a tensor? A function that holds one cannot be given back."""
    cells = getattr(value, "__closure__", None) if isinstance(value, types.FunctionType) else None
    for cell in cells or ():
        if is_proxy(cell.cell_contents):
            raise TraceError("returns a function that holds a traced value")
    return is_proxy(value) or isinstance(value, Tensor)


def examples_of(value: Any) -> Any:
    """A traced result with the example's values in the place of its proxies."""
    return map_values(value, _wanted, example_of)


def _template(result: Any, place: Callable[[Any], int]) -> Any:
    return strip(result, _wanted, lambda x: Slot(place(x)))


def program_of(tracer: Tracer, call: Call, kind: str, result: Any) -> Program:
    """What was traced, ended by its result."""
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
        tracer.asked.fixed.setdefault(name, (None, None))
    tracer.abandon(all_of_it=False)
    call.facts = frozenset(tracer.asked.facts)
    return Program(tracer.path, kind, tracer.graph, call, template, effect=tracer.effect, settings=tracer.settings,
                   fixed=dict(tracer.asked.fixed))


def drop_unused(graph: fx.Graph) -> None:
    """Removes nodes that nobody uses and that hold no tensor: sizes that were only looked at, attributes, lengths."""
    for node in reversed(list(graph.nodes)):
        if not node.users and meta_of(node).get("droppable") and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def layer_of(tracer: Tracer, module: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
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
        if numbers and any(_looks_at(g, numbers) for g in tracer.asked.guards if g not in copies):
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
    if (tracer.effect is not None and tracer.caught) or (tracer.gave_back and "identity" in tracer.listener.facts):
        return None
    call.facts = frozenset(tracer.asked.facts)                    # what was asked since the layer's code began
    settings = dict(tracer.listener.settings)               # as far as known: more than its own may be among them
    fixed = {n[len(prefix) + 1 if prefix else 0:]: s for n, s in tracer.asked.fixed.items() if not prefix or n.startswith(prefix + ".")}
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
