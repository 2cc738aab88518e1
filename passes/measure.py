"""measure: the float programs and the quantized programs on the same inputs, one number for each use of a weight.

    isolated     this weight quantized, everything else float
    propagated   everything up to this use quantized

Both are relative errors of the value at the use's `Probe` (Frobenius norms). Outputs of more than 65,536 elements are compared on that
many evenly spaced ones for the propagated error, so that memory stays small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from .capture.example import Example, run
from .capture.listener import deaf
from .capture.session import Session
from .carriers import carrier_of, observed_use
from .constants import ABSENT
from .failures import InroError, SchemeError
from .program import Program, meta_of
from .run.classes import compiling
from .run.forward import GraphForward
from .solve.plan import Target, Weight

__all__ = ["Errors", "evaluate", "observing", "run_float", "run_quantized", "standing_in"]

SAMPLE = 65_536
MOST_CALLS = 16            # of one use, that are compared

Key = tuple[str, str, str]


@dataclasses.dataclass
class Errors:
    """Sums of squares over the calls of one use, and the float samples that wait for the quantized run."""

    noise: float = 0.0
    signal: float = 0.0
    propagated_noise: float = 0.0
    propagated_signal: float = 0.0
    calls: int = 0
    replayed: int = 0
    samples: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def isolated(self) -> float | None:
        return _ratio(self.noise, self.signal) if self.calls and not math.isnan(self.noise) else None

    @property
    def propagated(self) -> float | None:
        return _ratio(self.propagated_noise, self.propagated_signal) if self.replayed else None

    def add(self, other: Errors) -> None:
        """The calls of another batch beside these."""
        self.noise, self.signal, self.calls = self.noise + other.noise, self.signal + other.signal, self.calls + other.calls
        self.samples.extend(other.samples)


def _ratio(noise: float, signal: float) -> float:
    return 0.0 if noise == 0 else math.sqrt(noise / signal) if signal > 0 else math.inf


Observe = Callable[[fx.Node, Mapping[fx.Node, Any], Any], None]
Pack = Callable[[str], Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A graph that runs under an observer; ``needs``: which earlier values it looks at when it sees a node."""

    graph: fx.Graph
    observe: Observe
    needs: Mapping[str, Iterable[fx.Node]] = dataclasses.field(default_factory=dict)


def interpret(module: nn.Module, watched: Watched, flat: list[Any]) -> Any:
    """Runs a graph node by node on ``module``; tensors are dropped after their last use; the observer sees each result."""
    graph, observe = watched.graph, watched.observe
    env: dict[fx.Node, Any] = {}
    # what a view of a weight was made with is looked at again beside the use, and stays
    seen = {source for node in graph.nodes if "alias" in node.meta for source in node.all_input_nodes}
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for source in (node, *node.all_input_nodes, *watched.needs.get(node.name, ())):
            if source not in seen:
                seen.add(source)
                last.setdefault(node, []).append(source)
    inputs = iter(flat)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
        elif node.op == "output":
            return fx.map_arg(node.args[0], env.__getitem__)
        else:
            env[node] = evaluate(module, node, env.__getitem__)
            observe(node, env, env[node])
        for source in last.get(node, ()):
            env.pop(source, None)
    return None


def evaluate(module: nn.Module, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """The value of one node, from the values of its inputs."""
    if node.op == "get_attr":
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value
    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if node.op == "call_function":
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return module.get_submodule(str(node.target))(*args, **kwargs)


@contextlib.contextmanager
def standing_in(root: nn.Module, runs: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While this lasts, ``runs[path](before, module, inputs)`` answers calls of the first program of each of these modules; ``before`` is
    what does otherwise."""
    saved = []
    for path, run_ in runs.items():
        module: Any = root.get_submodule(path)
        assert isinstance(module, GraphForward)
        runner = module._inro_runners[0]

        def answered(self: Any, *flat: Any, run_: Callable[..., Any] = run_, before: Any = runner.functions.run) -> Any:
            return run_(before, self, list(flat))
        saved.append((runner, runner.functions))
        runner.functions = dataclasses.replace(runner.functions, run=answered, quick=answered)
    try:
        yield
    finally:
        for runner, functions in saved:
            runner.functions = functions


def observing(root: nn.Module, observers: Mapping[str, Watched]) -> contextlib.AbstractContextManager[None]:
    """While this lasts, the first programs of the modules at these paths run their graphs node by node under an observer."""
    def interpreting(watched: Watched) -> Callable[..., Any]:
        def interpreted(before: Any, module: nn.Module, flat: list[Any]) -> Any:
            with deaf():
                return interpret(module, watched, flat)
        return interpreted
    return standing_in(root, {path: interpreting(watched) for path, watched in observers.items()})


def _main_tensor(value: Any) -> Tensor | None:
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    plain = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided and not value.is_nested
    return value if plain else None


def _numbers(node: fx.Node, value: Any, nodes: Mapping[str, fx.Node], value_of: Callable[[fx.Node], Any]) -> Any:
    """The value of a node of a quantized program as floats, where it are codes."""
    names = meta_of(node).get("format")
    if names is None or value is None:
        return value
    scale, zero = (value_of(nodes[name]) for name in names)
    return torch.ops.inro_fx.dequantize_codes.inference(value, scale, zero, torch.float32)


def _squares(want: Tensor, got: Tensor) -> tuple[float, float]:
    """(noise, signal): infinities that agree count as nothing."""
    finite = want.isfinite() & got.isfinite()
    if not bool(finite.all()):
        if bool((finite | (want == got) | (want.isnan() & got.isnan())).all()):
            want, got = torch.where(finite, want, 0), torch.where(finite, got, 0)
        else:
            return math.inf, 1.0
    want, got = (t if t.dtype in (torch.float32, torch.float64) else t.float() for t in (want, got))
    noise, signal = (torch.linalg.vector_norm(t, dtype=torch.float64).item() ** 2 for t in (got - want, want))
    return noise, signal


def _sample(value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    return flat[::max(1, -(-flat.numel() // SAMPLE))].clone()


# ---- the float run ----

def run_float(session: Session, example: Example, rewritten: Mapping[str, Program], targets: list[Target],
              weights: Mapping[str, Weight], pack: Pack, progress: Callable[[], None],
              release: Callable[[str], None] | None = None) -> dict[Key, Errors]:
    """Runs the float model, and beside every use of a decided weight its quantized form on the same inputs (the isolated error).

    ``rewritten`` are the quantized programs by path. ``pack(name)`` gives a weight's parts, made when first asked for;
    ``release(name)``, if given, is called once nothing in the run will read the float weight any more. Raises `SchemeError` naming the
    layer where an operator of a scheme fails.
    """
    errors: dict[Key, Errors] = {t.key: Errors() for t in targets}
    observers = {}
    readers = _last_readers(session, weights) if release is not None else {}
    for path, program in session.captures.items():
        here = {t.key: errors[t.key] for t in targets if t.capture == path}
        observe, needs = _isolating(session, rewritten[path], here, weights, pack, progress)
        if not path and readers and release is not None:
            observe = _releasing(observe, readers, release)
        observers[path] = Watched(program.graph, observe, needs)
    with observing(session.root, observers):
        with _PythonUses(session, weights, pack, errors) if session.python_uses else contextlib.nullcontext():
            run(session.root, example)
    return errors


def _last_readers(session: Session, weights: Mapping[str, Weight]) -> dict[fx.Node, list[str]]:
    """Node of the root's graph -> the weights that nothing reads after it. Weights that other code may read are left out."""
    elsewhere = {constant for _, constant, _ in session.python_uses}
    last: dict[str, fx.Node] = {}
    for path, program in session.captures.items():
        for node in program.graph.nodes:
            for source in (node, *node.all_input_nodes):
                if "alias" in source.meta:
                    constant = meta_of(source)["alias"].constant
                    if path:
                        elsewhere.add(constant)
                    last[constant] = node
    found: dict[fx.Node, list[str]] = {}
    for constant, node in last.items():
        if constant in weights and constant not in elsewhere:
            found.setdefault(node, []).append(constant)
    return found


def _releasing(observe: Observe, readers: Mapping[fx.Node, list[str]], release: Callable[[str], None]) -> Observe:
    def both(node: fx.Node, env: Mapping[fx.Node, Any], value: Any) -> None:
        observe(node, env, value)
        for constant in readers.get(node, ()):
            release(constant)
    return both


def _isolating(session: Session, program: Program, errors: Mapping[Key, Errors], weights: Mapping[str, Weight], pack: Pack,
               progress: Callable[[], None]) -> tuple[Observe, dict[str, set[fx.Node]]]:
    """Compares, at the float node that each use's probe names, the float value with the quantized program's on the same inputs."""
    module = session.root.get_submodule(program.path)
    by_name = {n.name: n for n in program.graph.nodes}
    floats = {n.name: n for n in session.captures[program.path].graph.nodes}
    at: dict[str, list[tuple[Errors, fx.Node, str]]] = {}
    needs: dict[str, set[fx.Node]] = {}
    for (node, constant), probe in program.probes.items():
        record = errors.get((program.path, node, constant))
        if record is not None:
            at.setdefault(probe.twin, []).append((record, by_name[probe.node], constant))
            needs.setdefault(probe.twin, set()).update(_float_inputs(by_name[probe.node], floats))

    def floats_of(constant: str) -> Mapping[str, Tensor]:
        """The parts of a weight that stays float: its matrix in the place of codes, and scales of 1."""
        weight = weights[constant]
        matrix = weight.layout.matrix(session.tensor(constant).detach())
        return {part: matrix if i == 0 else matrix.new_ones(1, 1) for i, part in enumerate(weight.scheme.parts)}

    def observe(node: fx.Node, env: Mapping[fx.Node, Any], value: Any) -> None:
        out = _main_tensor(value) if node.name in at else None
        if out is None:
            return
        for record, twin, constant in at[node.name]:
            if len(record.samples) < MOST_CALLS:
                evaluation = _Evaluation(module, constant, env, floats, pack, floats_of if len(at[node.name]) > 1 else None)
                got = _main_tensor(_numbers(twin, evaluation.of(twin), by_name, evaluation.value_of))
                if got is not None and got.shape == out.shape:
                    noise, signal = _squares(out, got)
                    record.noise, record.signal, record.calls = record.noise + noise, record.signal + signal, record.calls + 1
                record.samples.append(_sample(out))
                progress()
    return observe, needs


def _float_inputs(node: fx.Node, floats: Mapping[str, fx.Node]) -> Iterator[fx.Node]:
    """The values of the float run that a node of the quantized program is computed from, where that has no nearer ones."""
    pending, seen = [*node.all_input_nodes], {node}
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        twin = floats.get(meta_of(source).get("twin", source.name))
        if twin is not None:
            yield twin
        if twin is None or source.op == "get_attr" or _of_weight(source):
            pending.extend(source.all_input_nodes)


def _of_weight(node: fx.Node) -> bool:
    """Does the node unpack a weight, or view one?"""
    return "unpacks" in node.meta or (("alias" in node.meta or "pieces_of" in node.meta) and node.op != "placeholder")


class _Evaluation:
    """A node of the quantized program on the float run's values, with the weight ``constant`` as its codes say.

    Where several weights meet in one operator, the others stay float: ``others`` gives their parts. Values that the float run has are
    taken from there; what the quantized program has of its own is computed back to those.
    """

    def __init__(self, module: nn.Module, constant: str, env: Mapping[fx.Node, Any], floats: Mapping[str, fx.Node], pack: Pack,
                 others: Pack | None):
        self.module, self.constant, self.env, self.floats, self.pack, self.others = module, constant, env, floats, pack, others
        self.known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """Raises `SchemeError` naming the weight where the program fails."""
        try:
            return evaluate(self.module, node, self.value_of)
        except InroError:
            raise
        except Exception as error:
            raise SchemeError(f"{self.constant}: its quantized form does not run ({meta_of(node).get('kernel', node.name)}: "
                              f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]})") from error

    def value_of(self, node: fx.Node) -> Any:
        meta = meta_of(node)
        stored, view = meta.get("stored"), meta.get("alias", meta.get("pieces_of"))
        if stored is not None:
            parts = self.pack if self.others is None or stored.constant == self.constant else self.others
            return parts(stored.constant)[stored.part]
        twin = self.floats.get(meta.get("twin", ""))
        value = ABSENT if twin is None else self.env.get(twin, ABSENT)
        of_weight = _of_weight(node)
        if value is not ABSENT and self.others is not None and of_weight and view is not None and view.constant != self.constant:
            return value
        if node.op == "get_attr" or of_weight or value is ABSENT:
            if node not in self.known:
                self.known[node] = evaluate(self.module, node, self.value_of)
            return self.known[node]
        return value


class _PythonUses(torch.overrides.TorchFunctionMode):
    """The isolated error of uses in code that stays Python."""

    def __init__(self, session: Session, weights: Mapping[str, Weight], pack: Pack, errors: Mapping[Key, Errors]):
        super().__init__()
        self.session, self.weights, self.pack, self.errors = session, weights, pack, errors
        self.alias = session.alias_of
        self.keys = {(constant, op): (path, op, constant) for path, op, constant in errors if op.startswith("(")}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        if compiling() or carrier_of(func) is None:
            return value
        with deaf():
            self._see(func, args, kwargs, value)
        return value

    def _see(self, func: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> None:
        """Computes the call once more with quantized weights."""
        for use in observed_use(func, args, kwargs, self.alias):
            key = self.keys.get((use.constant, f"({use.op})"))
            out = _main_tensor(value)
            if key is None or out is None or self.errors[key].calls >= MOST_CALLS:
                continue
            record = self.errors[key]
            base = self.session.tensor(use.constant)
            restored = self.weights[use.constant].restored(self.pack(use.constant))
            if base.is_contiguous():
                restored = restored.contiguous()

                def swap(x: Any, base: Tensor = base, restored: Tensor = restored, constant: str = use.constant) -> Any:
                    if not isinstance(x, Tensor) or (seen := self.alias(x)) is None or seen.constant != constant:
                        return x
                    return restored.as_strided(x.shape, x.stride(), x.storage_offset() - base.storage_offset())
                got = _main_tensor(func(*torch.utils._pytree.tree_map(swap, args), **torch.utils._pytree.tree_map(swap, kwargs)))
                if got is not None and got.shape == out.shape:
                    noise, signal = _squares(out, got)
                    record.noise, record.signal = record.noise + noise, record.signal + signal
                    record.calls += 1


# ---- the quantized run ----

def run_quantized(root: nn.Module, example: Example, programs: Mapping[str, Program], errors: Mapping[Key, Errors],
                  progress: Callable[[], None]) -> Any:
    """Runs the quantized model and completes ``errors`` with the propagated ones; gives back its output."""
    observers = {path: Watched(program.graph, _replaying(program, errors, progress)) for path, program in programs.items()}
    with observing(root, observers):
        return run(root, example)


def _replaying(program: Program, errors: Mapping[Key, Errors], progress: Callable[[], None]) -> Observe:
    at: dict[str, list[Errors]] = {}
    nodes = {n.name: n for n in program.graph.nodes}
    for (node, constant), probe in program.probes.items():
        if (program.path, node, constant) in errors:
            at.setdefault(probe.node, []).append(errors[program.path, node, constant])

    def observe(node: fx.Node, env: Mapping[fx.Node, Any], value: Any) -> None:
        out = _main_tensor(_numbers(node, value, nodes, env.__getitem__)) if node.name in at else None
        for record in at[node.name] if out is not None else ():
            if record.samples and out is not None:
                want, got = record.samples.pop(0), _sample(out)
                if want.shape == got.shape:
                    noise, signal = _squares(want, got)
                    record.propagated_noise += noise
                    record.propagated_signal += signal
                    record.replayed += 1
                progress()
    return observe
