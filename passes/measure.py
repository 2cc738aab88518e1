"""measure: the float graphs and the quantized graphs on the same inputs, one number per target.

    isolated     this target quantized, everything before it float
    propagated   everything up to this target quantized

Both are relative errors of the target's output (Frobenius norms). Outputs of more than 65,536 elements are compared on that
many evenly spaced ones for the propagated error, so that memory stays small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from .carriers import carrier_of, observed_use
from .example import Example, run
from .module import Capture
from .session import Session
from .targets import Decision, Target

__all__ = ["Errors", "restore", "run_float", "run_quantized"]

SAMPLE = 65_536
MOST_CALLS = 16            # of one target, that are compared


@dataclasses.dataclass
class Errors:
    """Sums of squares over the calls of one target, and the float samples that wait for the quantized run."""

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


def _ratio(noise: float, signal: float) -> float:
    return 0.0 if noise == 0 else math.sqrt(noise / signal) if signal > 0 else math.inf


Observer = Callable[[fx.Node, Mapping[fx.Node, Any], Any], None]
Pack = Callable[[str], Mapping[str, Tensor]]


def interpret(module: nn.Module, graph: fx.Graph, flat: list[Any], observe: Observer) -> Any:
    """Runs a graph node by node on ``module``; tensors are dropped after their last use; ``observe`` sees each result."""
    env: dict[fx.Node, Any] = {}
    # what a view of a weight was made with is looked at again beside the target, and stays
    seen = {source for node in graph.nodes if "alias" in node.meta for source in node.all_input_nodes}
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes:
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
            del env[source]
    return None


def evaluate(module: nn.Module, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """The value of one node, from the values of its inputs."""
    if node.op == "get_attr":
        return _attribute(module, str(node.target))
    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if node.op == "call_function":
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return module.get_submodule(str(node.target))(*args, **kwargs)


def _attribute(module: nn.Module, target: str) -> Any:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


@contextlib.contextmanager
def observing(root: nn.Module, observers: Mapping[str, tuple[fx.Graph, Observer]]) -> Iterator[None]:
    """While this lasts, the captured modules at these paths run their graphs node by node under an observer."""
    modules = [(root.get_submodule(path), graph, observe) for path, (graph, observe) in observers.items()]
    saved = [m.__dict__["_inro_run"] for m, _, _ in modules]
    for module, graph, observe in modules:
        module.__dict__["_inro_run"] = lambda self, *flat, g=graph, o=observe: interpret(self, g, list(flat), o)
    try:
        yield
    finally:
        for (module, _, _), before in zip(modules, saved, strict=True):
            module.__dict__["_inro_run"] = before


def _main_tensor(value: Any) -> Tensor | None:
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    plain = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided and not value.is_nested
    return value if plain else None


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


def run_float(session: Session, example: Example, rewritten: Mapping[str, fx.Graph], targets: list[Target],
              decisions: Mapping[str, Decision], pack: Pack, progress: Callable[[], None],
              release: Callable[[str], None] | None = None) -> dict[Any, Errors]:
    """Runs the float model, and beside every decided target its quantized form on the same inputs (the isolated error).

    ``rewritten`` are the quantized graphs by path. ``pack(constant)`` gives a constant's parts, made when first asked for;
    ``release(constant)``, if given, is called once nothing in the run will read the float weight any more.
    """
    errors: dict[Any, Errors] = {t.key: Errors() for t in targets}
    observers = {}
    wanted: dict[str, set[str]] = {}
    for target in targets:
        wanted.setdefault(target.capture, set()).add(target.node or "")
    readers = _last_readers(session, decisions) if release is not None else {}
    for path, capture in session.captures.items():
        observe = _isolating(session, path, rewritten[path], wanted.get(path, set()), decisions, pack, errors, progress)
        if not path and readers:
            observe = _releasing(observe, readers, release)
        observers[path] = (capture.graph, observe)
    with observing(session.root, observers):
        with _PythonUses(session, decisions, pack, errors) if session.python_uses else contextlib.nullcontext():
            run(session.root, example)
    return errors


def _last_readers(session: Session, decisions: Mapping[str, Decision]) -> dict[fx.Node, list[str]]:
    """Node of the root's graph -> the weights that nothing reads after it. Weights that other code may read are left out."""
    elsewhere = {constant for _, constant, _ in session.python_uses}
    last: dict[str, fx.Node] = {}
    for path, capture in session.captures.items():
        for node in capture.graph.nodes:
            for source in (node, *node.all_input_nodes):
                if "alias" in source.meta:
                    if path:
                        elsewhere.add(source.meta["alias"].constant)
                    last[source.meta["alias"].constant] = node
            if node.op == "call_module":
                elsewhere.update(c for c in session.constants if c.startswith(f"{node.target}."))
    found: dict[fx.Node, list[str]] = {}
    for constant, node in last.items():
        if constant in decisions and constant not in elsewhere:
            found.setdefault(node, []).append(constant)
    return found


def _releasing(observe: Observer, readers: Mapping[fx.Node, list[str]], release: Any) -> Observer:
    def both(node: fx.Node, env: Mapping[fx.Node, Any], value: Any) -> None:
        observe(node, env, value)
        for constant in readers.get(node, ()):
            release(constant)
    return both


def _isolating(session: Session, path: str, rewritten: fx.Graph, wanted: set[str], decisions: Mapping[str, Decision],
               pack: Pack, errors: dict[Any, Errors], progress: Callable[[], None]) -> Observer:
    module = session.root.get_submodule(path)
    twins = {n.meta.get("target", n.name): n for n in rewritten.nodes}
    originals = {n.name: n for n in session.captures[path].graph.nodes}

    def observe(node: fx.Node, env: Mapping[fx.Node, Any], value: Any) -> None:
        if node.name not in wanted or (out := _main_tensor(value)) is None:
            return
        record = errors[path, node.name]
        if len(record.samples) >= MOST_CALLS:
            return
        twin = twins[node.name]

        def value_of(n: fx.Node) -> Any:
            if "part_of" in n.meta:
                return pack(n.meta["part_of"])[n.meta["part"]]
            view = n.meta.get("alias", n.meta.get("pieces_of"))
            if n.op == "get_attr" or "unpacks" in n.meta or (view is not None and view.constant in decisions):
                return evaluate(module, n, value_of)
            return env[originals[n.meta.get("target", n.name)]]
        got = _main_tensor(evaluate(module, twin, value_of))
        if got is not None and got.shape == out.shape:
            noise, signal = _squares(out, got)
            record.noise, record.signal, record.calls = record.noise + noise, record.signal + signal, record.calls + 1
        record.samples.append(_sample(out))
        progress()
    return observe


class _PythonUses(torch.overrides.TorchFunctionMode):
    """The isolated error of uses in code that stays Python."""

    def __init__(self, session: Session, decisions: Mapping[str, Decision], pack: Pack, errors: dict[Any, Errors]):
        super().__init__()
        self.session, self.decisions, self.pack, self.errors = session, decisions, pack, errors
        self.alias = session.alias_of
        self.keys = {key[1]: key for key in errors if ":" in key[1]}

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        if torch.compiler.is_compiling() or carrier_of(func) is None:
            return value
        for use in observed_use(func, args, kwargs, self.alias):
            key = self.keys.get(f"{use.constant}:{use.op}")
            out = _main_tensor(value)
            if key is None or out is None or self.errors[key].calls >= MOST_CALLS:
                continue
            record = self.errors[key]
            base = self.session.tensor(use.constant)
            restored = restore(self.decisions[use.constant], self.pack(use.constant))
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
        return value


def restore(decision: Decision, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight as its parts say it is."""
    return decision.layout.restore(decision.scheme.unpack(parts, decision.layout.columns, decision.constant.dtype))


def run_quantized(root: nn.Module, example: Example, captures: Mapping[str, Capture], targets: list[Target],
                  errors: dict[Any, Errors], progress: Callable[[], None]) -> Any:
    """Runs the quantized model and completes ``errors`` with the propagated ones; gives back its output."""
    observers = {}
    for path, capture in captures.items():
        wanted = {t.node for t in targets if t.capture == path}

        def observe(node: fx.Node, env: Mapping[fx.Node, Any], value: Any, path: str = path, wanted: set = wanted) -> None:
            name = node.meta.get("target", node.name)
            if name not in wanted or (out := _main_tensor(value)) is None:
                return
            record = errors[path, name]
            if record.samples:
                want, got = record.samples.pop(0), _sample(out)
                if want.shape == got.shape:
                    noise, signal = _squares(want, got)
                    record.propagated_noise += noise
                    record.propagated_signal += signal
                    record.replayed += 1
                progress()
        observers[path] = (capture.graph, observe)
    with observing(root, observers):
        return run(root, example)
