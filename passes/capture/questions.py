"""What the traced code asks of values, and what must therefore be so again: facts about inputs, forms of stored tensors, guards."""

from __future__ import annotations

import operator
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..program import annotate, guard, meta_of
from .frames import INTERNAL, where
from .listener import Listener, unheard
from .operators import follows_from_inputs
from .proxy import NumberProxy, Shape, TensorProxy, TraceError, proxies_in

if TYPE_CHECKING:
    from .tracer import Tracer

__all__ = ["Questions"]


class Questions:
    """The questions of one trace.

    ``facts`` are what its code asked of values that depend on inputs ("rank", "dtype" ...): only these must be equal for the graph to
    hold at another call. ``fixed`` is what it was told of stored tensors, by their path from the traced module: (shape, dtype), None for
    what it has not asked. ``guards`` are the nodes of guards.
    """

    def __init__(self, tracer: Tracer, listener: Listener):
        self._tracer, self._graph, self.listener = tracer, tracer.graph, listener
        self.facts: set[str] = set()
        self.fixed: dict[str, tuple[tuple[int, ...] | None, torch.dtype | None]] = {}
        self.guards: set[fx.Node] = set()
        self._looked_at: set[tuple[fx.Node, tuple[str, bool]]] = set()      # by `_fix`
        self._guarded: set[tuple[fx.Node, bool]] = set()
        self._fresh: list[tuple[types.FrameType, int, fx.Node, NumberProxy]] = []

    @unheard
    def size(self, tensor: TensorProxy, dim: Any = None) -> Any:
        """``tensor.size(dim)``, or all of them as a `Shape`; plain numbers where they follow from no input."""
        if tensor.static:
            self.ask(tensor, "rank")
            return tensor.example.size() if dim is None else tensor.example.size(dim)
        if dim is None:
            self.ask(tensor, "rank")
            return Shape(self._tracer.create("call_method", "size", tensor, i) for i in range(tensor.example.dim()))
        if isinstance(dim, int) and dim < 0:
            self.ask(tensor, "rank")
            dim = dim + tensor.example.dim()
        return self._tracer.create("call_method", "size", tensor, dim)

    @unheard
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
            self._require(NumberProxy(self._quiet("call_method", "dim", tensor.node), self._tracer, tensor.example.dim()), truth=False)

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
        return name in self._tracer.session.root.get_submodule(self._tracer.path).get_submodule(owner)._parameters

    def _quiet(self, kind: str, target: Any, *args: Any) -> fx.Node:
        """A node that only guards look at."""
        node = self._graph.create_node(kind, target, args, {})
        annotate(node, module=self._tracer.module, where=where(), droppable=True)
        return node

    def without_grad(self) -> None:
        """The code asks whether gradients are recorded: the graph is for calls where they are not, as on the example."""
        self.listener.settings["torch.is_grad_enabled"] = False

    @unheard
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
        if self._tracer.effect is not None and not follows_from_inputs(number.node):
            raise TraceError(f"asks for a size after {self._tracer.effect}, at {where()}")
        self._guarded.add((number.node, truth))
        checked: fx.Node = number.node
        value = number.example
        if truth:
            checked, value = self._quiet("call_function", operator.truth, number.node), bool(value)
        return self._quiet_guard(checked, value)

    def _quiet_guard(self, checked: fx.Node, value: Any) -> fx.Node:
        node = self._graph.create_node("call_function", guard, (checked, value, where()), {})
        annotate(node, module=self._tracer.module, where=where())
        self.guards.add(node)
        return node

    def forget_parsing(self, frame: types.FrameType, arguments: Any) -> None:
        """Takes back guards on sizes that only the C argument parser of this very call had looked at."""
        fresh, self._fresh = self._fresh, []
        nodes = {p.node for p in proxies_in(arguments)} if fresh else ()
        for caller, instruction, node, number in fresh:
            if caller is frame and instruction == frame.f_lasti and number.node in nodes and not node.users:
                self._graph.erase_node(node)
                self.guards.discard(node)
                self._guarded.discard((number.node, False))

    def forget(self) -> None:
        """Lets go of frames, traced values and the tracer, which holds this."""
        self._fresh.clear()
        del self._tracer

    @unheard
    def set_grad(self, enabled: bool) -> None:
        """``torch.no_grad()`` and its like in the traced code: operators that gradients flow through tell whether it mattered."""
        frame: Any = sys._getframe(1)
        leaving = False
        while frame is not None and frame.f_code.co_filename.startswith(INTERNAL):
            leaving = leaving or frame.f_code.co_name == "__exit__"
            frame = frame.f_back
        if enabled and not leaving:
            self.facts.add("grad_on")
        with self._tracer.rest(), torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(enabled)
