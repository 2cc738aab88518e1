"""One ordered run of the captured graphs on calibration data, in which each weight is solved just before its operator computes.

All batches go through a graph side by side, node by node: once with the weights that are solved already as their codes say, and where a
solver asks for it once more with floats. What a solver sees are thus the inputs that its layer will have. In memory are the values
that later nodes read, of all batches, and the sums of one weight (of several, where they read one value).

A weight that several operators read is solved from what the float model gives them, which takes one run more. Graphs below code that
stays Python begin with the inputs that the float model gives them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..capture.example import Example, run
from ..capture.listener import deaf
from ..capture.session import Session
from ..carriers import LOOKUPS
from ..failures import InputError
from ..measure import evaluate, standing_in
from ..program import Program, meta_of
from ..rules.uses import call_of
from ..run.forward import attach_program, detach_programs
from .inputs import inputs_of
from .moments import Moments
from .plan import Target, Weight, uses_of

__all__ = ["Request", "Solved", "solve_in_order"]

Together = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for a weight: ``needs`` as a `Solver` has it, and ``solve(matrix, moments)``, which gives its parts."""

    needs: str
    optional: bool
    solve: Callable[[Tensor, Sequence[Moments]], Mapping[str, Tensor]]


@dataclasses.dataclass
class Solved:
    """The parts of weights by name, why some were solved without data, and what is added to stored vectors (biases)."""

    parts: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)
    without: dict[str, str] = dataclasses.field(default_factory=dict)
    corrections: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def solve_in_order(session: Session, weights: Mapping[str, Weight], targets: Sequence[Target], requests: Mapping[str, Request],
                   batches: Sequence[Example], progress: Callable[[], None], correct: bool = False,
                   together: Together = lambda sums: sums) -> Solved:
    """Solves the weights that ``requests`` name. ``correct``: biases take up the mean error of their layers. ``together`` adds sums up over
    the processes that hold a share of the batches each.

    Raises `InputError` naming a layer that no data reaches where its solver needs some, or that data with NaN or infinity reaches.
    """
    solved = Solved()
    uses: dict[str, list[Target]] = {}
    for target in targets:
        if target.use.constant in requests:
            uses.setdefault(target.use.constant, []).append(target)
    asked = {name for name, request in requests.items() if request.needs != "nothing"}
    read = {name: [t for t in uses.get(name, ()) if t.use.op not in LOOKUPS] for name in requests}
    shared = {name for name in asked if len(read[name]) > 1 or (len(read[name]) == 1 and len(uses[name]) > 1)}
    run_ = _Run(session, weights, requests, progress, correct, together, solved)
    if batches and (asked or correct):
        calls = _calls(session, batches, early="" in session.captures and len(session.captures) == 1)
        programs = {path: program for path, program in {**session.captures, **session.layers}.items() if calls[path]}
        here = {path: [t for t in _targets_in(path, p, session, targets) if t.use.constant in requests] for path, p in programs.items()}
        reached = {t.use.constant for path in here if path in session.captures for t in here[path]}
        for path in [p for p in here if p not in session.captures]:       # layers alone count where nothing else reaches a weight
            here[path] = [t for t in here[path] if t.use.constant not in reached]
        floats = {name: _Sums(requests[name].needs) for name in shared}
        for path, program in programs.items():
            run_.through(program, calls[path], [t for t in here[path] if t.use.constant in shared], floats)
        for name in shared:
            run_.finish(name, floats[name])
        for path, program in programs.items():
            run_.through(program, calls[path], here[path])
    for name in requests:
        if name not in solved.parts:
            if read[name] and name in asked and not requests[name].optional and name not in solved.without:
                raise InputError(f"{name}: no calibration data reached this layer, and its solver needs some: give data that does, or "
                                 f"another solver for it, overrides={{{weights[name].constant.module!r}: (scheme, 'search')}}")
            run_.finish(name, _Sums("nothing"))
    return solved


def _targets_in(path: str, program: Program, session: Session, targets: Sequence[Target]) -> list[Target]:
    """The uses in a graph; those in the graph of a layer alone, which stands in for a part of a larger one, are found in it."""
    if path in session.captures:
        return [t for t in targets if t.capture == path]
    return [Target(path, node.name, path, use) for node in program.graph.nodes for use in uses_of(node)]


def _intercepted(session: Session, paths: Iterable[str], take: Callable[[str, list[Any]], None]) -> contextlib.AbstractContextManager[None]:
    """While this lasts, ``take(path, inputs)`` is told of each call of a graph at one of these paths."""
    def telling(path: str) -> Callable[..., Any]:
        def told(before: Any, module: Any, flat: list[Any]) -> Any:
            with deaf():
                take(path, flat)
            return before(module, *flat)
        return told
    return standing_in(session.root, {path: telling(path) for path in paths})


class _Reached(Exception):
    """The call of the model's graph was seen: the run need go no further."""


def _calls(session: Session, batches: Sequence[Example], early: bool) -> dict[str, list[list[Any]]]:
    """What each captured graph is called with; ``early``: the model itself is one, and nobody wants its output. On batches that the
    model's graph does not cover, its code runs as Python, and what counts are the graphs of single layers."""
    calls: dict[str, list[list[Any]]] = {path: [] for path in {**session.captures, **session.layers}}
    seen: list[str] = []

    def take(path: str, flat: list[Any]) -> None:
        calls[path].append([x.clone() if isinstance(x, Tensor) else x for x in flat])
        seen.append(path)
        if early:
            raise _Reached
    missed = []
    with _intercepted(session, session.captures, take):
        for batch in batches:
            seen.clear()
            with contextlib.suppress(_Reached):
                run(session.root, batch)
            if not seen:
                missed.append(batch)
    layers = {path: p for path, p in session.layers.items() if path not in session.captures}
    if missed and layers:
        early = False
        for path, program in layers.items():
            attach_program(session.root.get_submodule(path), program)
        try:
            with _intercepted(session, layers, take):
                for batch in missed:
                    run(session.root, batch)
        finally:
            for path in layers:
                detach_programs(session.root.get_submodule(path))
    return calls


class _Sums:
    """Sums over the inputs of a weight, by rows of its matrix."""

    def __init__(self, needs: str):
        self.needs = needs
        self.found: dict[tuple[int, int, int], Moments] = {}
        self.unknown = ""

    def add(self, found: Any, floats: Any) -> None:
        """What `inputs_of` gave for one call, in the quantized and (or None) in the float model."""
        if isinstance(found, str):
            self.unknown = found
            return
        for index, (rows, x) in enumerate(found):
            key = (rows.start, rows.stop, len(x))
            if key not in self.found:
                self.found[key] = Moments(rows, x.new_zeros(len(x), x.shape[2], dtype=torch.float64))
            one = self.found[key]
            one.count += x.shape[1]
            one.squares += x.square().sum(1, dtype=torch.float64)
            if self.needs in ("second", "cross"):
                one.second = _plus(one.second, x.transpose(1, 2) @ x)
            if self.needs == "cross" and floats is not None:
                one.cross = _plus(one.cross, (floats[index][1] - x).transpose(1, 2) @ x)

    def together(self, add: Together) -> list[Moments]:
        for one in self.found.values():
            one.squares = add(one.squares)
            one.second = None if one.second is None else add(one.second)
            one.cross = None if one.cross is None else add(one.cross)
            one.count = int(add(torch.tensor(float(one.count), dtype=torch.float64)))
        return [self.found[key] for key in sorted(self.found)]


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more.double() if total is None else total.add_(more)


class _Run:
    """The run over all graphs: what is solved so far, and how the rest is."""

    def __init__(self, session: Session, weights: Mapping[str, Weight], requests: Mapping[str, Request], progress: Callable[[], None],
                 correct: bool, together: Together, solved: Solved):
        self.session, self.weights, self.requests, self.progress = session, weights, requests, progress
        self.correct, self.add_up, self.solved = correct, together, solved

    def finish(self, name: str, sums: _Sums) -> None:
        """Solves a weight from what is known."""
        weight, moments = self.weights[name], sums.together(self.add_up)
        if sums.unknown and not moments:
            self.solved.without[name] = sums.unknown
        request = self.requests[name]
        if moments and request.needs != "nothing" and not request.optional and not sum(m.count for m in moments):
            raise InputError(f"{name}: the calibration data holds no sample for this layer, and its solver needs some")
        for one in moments:
            if not bool(one.squares.isfinite().all()):
                raise InputError(f"{name}: the calibration data holds NaN or infinity at this layer's input")
        matrix = weight.layout.matrix(self.session.tensor(name).detach())
        self.solved.parts[name] = dict(self.requests[name].solve(matrix, [m for m in moments if m.count]))
        self.progress()

    def through(self, program: Program, calls: Sequence[list[Any]], targets: Sequence[Target],
                floats: Mapping[str, _Sums] | None = None) -> None:
        """One graph on all of its calls, weight by weight; with ``floats``, the float model alone, whose sums are added to them."""
        if not calls or not targets:
            return
        at: dict[str, list[Target]] = {}
        for target in targets:
            at.setdefault(target.node or "", []).append(target)
        both = floats is None and (self.correct or any(self.requests[t.use.constant].needs == "cross" for t in targets))
        side = _Side(self, program, calls, quantized=floats is None, both=both)
        for node in side.nodes():
            for target in at.get(node.name, ()):
                name = target.use.constant
                if floats is not None:
                    side.sum(floats[name], node, target)
                elif name not in self.solved.parts:
                    sums = _Sums(self.requests[name].needs)
                    side.sum(sums, node, target)
                    self.finish(name, sums)
                    side.solved()
            side.compute(node)
            if self.correct and floats is None and node.name in at:
                side.correct(node, at[node.name][0])


class _Side:
    """The values of one graph on all calls: those of the quantized model, and (``both``) those of the float model beside them."""

    def __init__(self, run_: _Run, program: Program, calls: Sequence[list[Any]], quantized: bool, both: bool):
        self.run, self.program, self.calls, self.quantized, self.both = run_, program, calls, quantized, both
        self.module = run_.session.root.get_submodule(program.path)
        self.constant = _constant_nodes(program.graph)
        self.values: list[dict[fx.Node, Any]] = [{} for _ in calls]
        self.floats: list[dict[fx.Node, Any]] = [{} for _ in calls] if both else self.values
        self.stored: dict[fx.Node, Any] = {}                     # of constants in the quantized model
        self.stored_floats: dict[fx.Node, Any] = {}
        self.writes = any(_changes(node) for node in program.graph.nodes)
        self.apart = both and self.writes
        self.last: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(program.graph.nodes):
            for source in self._sources(node):
                if source not in seen:
                    seen.add(source)
                    self.last.setdefault(node, []).append(source)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in (node, *node.all_input_nodes) if n not in self.constant]

    def nodes(self) -> Iterator[fx.Node]:
        """The nodes to compute, in order; the values of their inputs are there."""
        inputs = 0
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                for values, floats, flat in zip(self.values, self.floats, self.calls, strict=True):
                    values[node] = self._given(flat[inputs])
                    floats[node] = self._given(flat[inputs]) if self.apart else values[node]
                inputs += 1
            elif node.op != "output" and node not in self.constant:
                yield node
            for source in self.last.get(node, ()):
                for values, floats in zip(self.values, self.floats, strict=True):
                    values.pop(source, None)
                    floats.pop(source, None)

    def _given(self, value: Any) -> Any:
        """An input: a graph that changes values in place gets its own, for the inputs are used again."""
        return value.clone() if self.writes and isinstance(value, Tensor) else value

    def value(self, call: int, quantized: bool) -> Callable[[fx.Node], Any]:
        here = (self.values if quantized else self.floats)[call]

        def value(node: fx.Node) -> Any:
            return self._stored(node, quantized and self.quantized) if node in self.constant else here[node]
        return value

    def _stored(self, node: fx.Node, quantized: bool) -> Any:
        kept = self.stored if quantized else self.stored_floats
        if node not in kept:
            kept[node] = self._read(node, quantized) if node.op == "get_attr" else evaluate(
                self.module, node, lambda source: self._stored(source, quantized))
        return kept[node]

    def _read(self, node: fx.Node, quantized: bool) -> Any:
        """A stored tensor: a weight that is solved as its codes say, a corrected bias."""
        name, solved = self.program.full(str(node.target)), self.run.solved
        alias = meta_of(node).get("alias")
        if quantized and alias is not None and alias.constant in solved.parts:
            return self.run.weights[alias.constant].restored(solved.parts[alias.constant])
        value = evaluate(self.module, node, lambda source: None)
        return value + solved.corrections[name] if quantized and name in solved.corrections else value

    def solved(self) -> None:
        """Constants of the quantized model are others from now on."""
        self.stored.clear()

    def sum(self, sums: _Sums, node: fx.Node, target: Target) -> None:
        """Adds what all calls multiply the weight by."""
        weight = self.run.weights[target.use.constant]
        for call in range(len(self.calls)):
            found = self._inputs(node, target, weight, call, True)
            cross = self.both and sums.needs == "cross" and not isinstance(found, str)
            sums.add(found, self._inputs(node, target, weight, call, False) if cross else None)

    def _inputs(self, node: fx.Node, target: Target, weight: Weight, call: int, quantized: bool) -> Any:
        value = self.value(call, quantized)
        return inputs_of(node, target.use, weight, lambda x: fx.map_arg(x, value))

    def compute(self, node: fx.Node) -> None:
        """The values of a node; where its inputs are the same in both models, it is computed once."""
        for call, (values, floats) in enumerate(zip(self.values, self.floats, strict=True)):
            values[node] = evaluate(self.module, node, self.value(call, True))
            if self.both:
                same = not self.apart and all(
                    values[s] is floats[s] if s not in self.constant else self._same(s) for s in node.all_input_nodes)
                floats[node] = values[node] if same else evaluate(self.module, node, self.value(call, False))

    def _same(self, node: fx.Node) -> bool:
        """Is a constant the same in both models?"""
        if node.op != "get_attr":
            return all(self._same(source) for source in node.all_input_nodes)
        alias = meta_of(node).get("alias")
        solved = self.run.solved
        return not (alias is not None and alias.constant in solved.parts) and self.program.full(str(node.target)) not in solved.corrections

    def correct(self, node: fx.Node, target: Target) -> None:
        """The bias of a layer (or the running mean of the batch norm after it) takes up the mean of what its results lost."""
        home = _home_of_mean(self.program, node, target)
        if home is None:
            return
        name, sign, axis, changes = home
        total, count = None, 0
        for values, floats in zip(self.values, self.floats, strict=True):
            lost = (floats[node] - values[node]).movedim(axis, 0).flatten(1) if floats[node] is not values[node] else None
            if lost is not None:
                total, count = _plus(total, lost.sum(1, dtype=torch.float64)), count + lost.shape[1]
        if total is None:
            return
        mean = self.run.add_up(total) / self.run.add_up(torch.tensor(float(count), dtype=torch.float64))
        if not bool(mean.isfinite().all()):
            return
        self.run.solved.corrections[name] = (sign * mean).to(self.values[0][node].dtype)
        self.solved()
        if changes:
            shape = [1] * self.values[0][node].dim()
            shape[axis] = -1
            for values in self.values:
                values[node] = values[node] + mean.to(values[node].dtype).reshape(shape)


def _home_of_mean(program: Program, node: fx.Node, target: Target) -> tuple[str, float, int, bool] | None:
    """(stored vector, sign, axis of the channels, is it added in the node itself?) that can shift the results of a layer."""
    if target.use.op not in ("linear", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        return None
    value = meta_of(node).get("value")
    axis = -1 if not target.use.op.startswith("conv") else 1 if value is not None and len(value.shape) == int(target.use.op[-2]) + 2 else 0
    bias = call_of(node).get("bias")
    if isinstance(bias, fx.Node):
        alone = bias.op == "get_attr" and len(bias.users) == 1 and _read_once(program, bias)
        return (program.full(str(bias.target)), 1.0, axis, True) if alone else None
    user = next(iter(node.users), None)
    if bias is not None or len(node.users) != 1 or user is None or getattr(user.target, "__name__", "") != "batch_norm" or axis != 1:
        return None
    mean = user.args[1] if len(user.args) > 1 else user.kwargs.get("running_mean")
    if not isinstance(mean, fx.Node) or mean.op != "get_attr" or not _read_once(program, mean) or user.args[0] is not node:
        return None
    return program.full(str(mean.target)), -1.0, axis, False


def _read_once(program: Program, node: fx.Node) -> bool:
    return len(node.users) == 1 and sum(n.op == "get_attr" and n.target == node.target for n in program.graph.nodes) == 1


def _constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What is read from the model, and what is computed from that alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op in ("call_function", "call_method") and node.all_input_nodes
                                     and all(source in found for source in node.all_input_nodes) and not _changes(node)):
            found.add(node)
    return found


def _changes(node: fx.Node) -> bool:
    """Does a call change one of its inputs in place?"""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and ((name.endswith("_") and not name.endswith("__")) or name in
                                                            ("setitem", "__setitem__") or "out" in node.kwargs)
