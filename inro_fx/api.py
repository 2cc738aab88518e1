"""quantize_graph: from a model to the same model with integer weights. The steps stand in the order they run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .checks import check_model
from .errors import InputError, ModelError, SchemeError
from .packing import Packer, install
from .passes.capture import capture as capture_graphs
from .passes.example import Example, compare, kept_random_state, run, tensors_in
from .passes.fold_batchnorm import fold_batchnorm as fold_batchnorm_pass
from .passes.fuse import fuse
from .passes.measure import run_float, run_quantized
from .passes.module import PackedWeights, detach_graph, without_global_hooks
from .passes.quantize import quantize
from .passes.scheme import Scheme
from .passes.session import Session
from .passes.state import clone, make_independent, prepare, put_state
from .passes.targets import Overrides, find_targets, plan
from .passes.verify import verify
from .progress import progress_bar
from .report import make_record, stored_bytes
from .schemes import find_scheme

__all__ = ["quantize_graph"]

CAPTURES = ("auto", "export")
MOST_CALIBRATION = 8            # batches of calibration data on which errors are measured


def quantize_graph(model: nn.Module, example_inputs: Any, scheme: str | Scheme = "int8", *,
                   overrides: Mapping[Any, Any] | None = None, calibration: Iterable[Any] | None = None,
                   capture: str = "auto", inplace: bool = False, fold_batchnorm: bool = False,
                   strict: bool = False) -> nn.Module:
    """A model that does the same job as ``model`` with integer weights.

    Parameters
    ----------
    model
        Any `torch.nn.Module`. It is not changed: not its weights, mode, hooks, gradients or the random state.
    example_inputs
        What one call of the model takes: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        Other batch and sequence sizes work afterwards.
    scheme
        A name (see ``inro_fx.SCHEMES``) or a `Scheme` object, for every weight that ``overrides`` does not name.
    overrides
        ``{pattern: scheme}`` where a pattern is a glob of module paths (``"layers.0.*"``; the modules below are meant too),
        a module class or the name of an operator (``"conv2d"``), and None leaves the weight float. The first match wins; a
        pattern that matches nothing warns.
    calibration
        Inputs like ``example_inputs`` on which the errors of the report are measured (the first eight), in its place.
    capture
        "auto" climbs the ladder of docs/capture.md; "export" uses ``torch.export`` for the one graph.
    inplace
        Quantize ``model`` itself: each float weight is freed as soon as it is packed.
    fold_batchnorm
        Multiply batch norms into the convolutions before them. The result can then not be trained further.
    strict
        A call that the graph does not cover raises `GraphNotTaken` instead of running the module's own forward.

    Returns
    -------
    An instance of the model's own class in eval mode. `inro_fx.report` shows what happened to each layer.

    Raises
    ------
    ModelError, InputError, SchemeError
        Naming the layer and what to do; the model is then as it was.

    >>> import torch, inro_fx
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> small = inro_fx.quantize_graph(model, torch.randn(8, 64))
    >>> small(torch.randn(3, 64)).shape, small[0].weight_codes.dtype
    (torch.Size([3, 10]), torch.int8)
    """
    default = find_scheme(scheme)
    check_model(model, inplace=inplace)
    if capture not in CAPTURES:
        raise InputError(f"capture={capture!r}: it is one of {', '.join(map(repr, CAPTURES))}")
    example = Example.of(example_inputs)
    if not isinstance(overrides or {}, Mapping):
        raise SchemeError(f"overrides must be a dict of pattern: scheme, got {type(overrides).__name__}")
    overriding = Overrides({k: v if v is None else find_scheme(v) for k, v in (overrides or {}).items()}, model)
    batches = [example] if calibration is None else [Example.of(b) for b in itertools.islice(calibration, MOST_CALIBRATION)]
    if not batches:
        raise InputError("calibration gives no inputs")

    options = Options(default, overriding, capture, inplace, fold_batchnorm, strict)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), \
            torch.autocast("cuda", enabled=False), kept_random_state(), without_global_hooks(), \
            _unchanged_if_it_fails(model, inplace):
        return _quantize(model, example, batches, options)


@dataclasses.dataclass(frozen=True)
class Options:
    """What `quantize_graph` was asked for."""

    default: Scheme
    overrides: Overrides
    capture: str
    inplace: bool
    fold_batchnorm: bool
    strict: bool


def _quantize(model: nn.Module, example: Example, batches: list[Example], options: Options) -> nn.Module:
    float_bytes = stored_bytes(model)
    if options.inplace:
        _try(model.eval(), example, "example_inputs")          # before anything of the user's model is touched
    root = prepare(model) if options.inplace else clone(model)

    session, want = capture_model(root, example, options.capture)
    if options.fold_batchnorm and _fold(session):
        session, folded = capture_model(root, example, options.capture)
        if (difference := compare(want, folded)) is not None:
            raise ModelError(f"folding batch norms changes this model ({difference}): quantize with fold_batchnorm=False")
    options.overrides.see(root)
    targets = find_targets(session)
    chosen = plan(session, targets, options.default, options.overrides)
    decided = [t for t in targets if t.use.constant in chosen.decisions]

    graphs = {path: quantize(c.graph, chosen.decisions, path) for path, c in session.captures.items()}
    for path, graph in graphs.items():
        verify(graph, root.get_submodule(path), chosen.decisions, after="quantize")
        verify(fuse(graph, chosen.decisions), root.get_submodule(path), chosen.decisions, after="fuse")

    packer = Packer(session, chosen)
    errors: dict[Any, Any] = {}
    with progress_bar(2 * len(decided) * len(batches), "quantizing") as tick:
        for number, batch in enumerate(batches):
            if batch is not example:
                _try(root, batch, f"batch {number} of calibration")
            release = packer.release if options.inplace and number + 1 == len(batches) else None
            _merge(errors, run_float(session, batch, graphs, decided, chosen.decisions, packer.pack, tick, release))
        for name in chosen.decisions:
            packer.pack(name)
        install(session, chosen, graphs, packer.parts, options.strict)
        got = want
        for batch in batches:
            got = run_quantized(root, batch, session.captures, decided, errors, tick)
        if batches[-1] is not example:
            got = run(root, example)
    session.state.restore()
    for name, before in session.written.items():
        put_state(root, name, before)
    for path in {**session.layers, **session.captures}:
        root.get_submodule(path)._inro_calls.clear()
    if not options.inplace:
        make_independent(root)
    root.__dict__["_inro"] = make_record(session, chosen, targets, graphs, errors, packer.facts, want, got, float_bytes)
    return root


def _try(model: nn.Module, inputs: Example, name: str) -> None:
    try:
        run(model, inputs)
    except Exception as error:
        raise InputError(f"the model does not run on {name}: {type(error).__name__}: {error}") from error


def _fold(session: Session) -> list[tuple[str, str]]:
    """Folds batch norms in every captured graph, and takes the graphs off again: they are of the model as it was."""
    folded = [pair for c in session.captures.values() for pair in fold_batchnorm_pass(session.root, c.graph)]
    for path in [*session.captures, *session.layers] if folded else ():
        if path not in {norm for _, norm in folded}:
            detach_graph(session.root.get_submodule(path))
    return folded


def capture_model(root: nn.Module, example: Example, mode: str) -> tuple[Session, Any]:
    """The captured session and the model's float output, which must hold a tensor."""
    session, want = capture_graphs(root, example, mode)
    if next(tensors_in(want), None) is None:
        if isinstance(want, Iterator):
            raise ModelError(f"the model returns a {type(want).__name__}: give a module whose forward returns what that yields")
        raise ModelError(f"the model returns no tensor on example_inputs (it returned {type(want).__name__}); "
                         f"give inputs for which forward computes something")
    return session, want


def _merge(total: dict, new: dict) -> None:
    for key, errors in new.items():
        if key not in total:
            total[key] = errors
            continue
        mine = total[key]
        mine.noise, mine.signal, mine.calls = mine.noise + errors.noise, mine.signal + errors.signal, mine.calls + errors.calls
        mine.samples.extend(errors.samples)


@contextmanager
def _unchanged_if_it_fails(model: nn.Module, inplace: bool) -> Iterator[None]:
    training = {m: m.training for m in model.modules()} if inplace else {}
    try:
        yield
    except BaseException:
        if inplace and not any(isinstance(m, PackedWeights) for m in model.modules()):
            for module, mode in training.items():
                detach_graph(module)
                module.training = mode
        raise
