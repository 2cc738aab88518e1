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
from .errors import InputError, InroError, ModelError, SchemeError
from .observers import Observer
from .packing import Packer, install, settle_inputs, takes_inputs
from .passes.capture import capture as capture_graphs
from .passes.constants import owner_of
from .passes.example import Example, compare, kept_random_state, run, tensors_in
from .passes.fold_batchnorm import fold_batchnorm as fold_batchnorm_pass
from .passes.fuse import fuse
from .passes.measure import run_float, run_quantized
from .passes.module import GraphForward, PackedWeights, attach_graph, detach_graph, without_global_hooks
from .passes.observe import observe
from .passes.quantize import quantize
from .passes.scheme import Scheme
from .passes.session import Session
from .passes.state import clone, make_independent, prepare, put_state
from .passes.targets import Overrides, find_targets, plan
from .passes.verify import verify
from .progress import progress_bar
from .report import make_record, stored_bytes
from .schemes import Int8Static, find_scheme

__all__ = ["convert_graph", "prepare_graph", "quantize_graph"]

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
        Inputs like ``example_inputs``, an iterable that is run through once. A static scheme finds the range of each layer's
        inputs on all of them; the errors of the report are measured on the first eight, in the place of the example.
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
    options = _options(model, scheme, overrides, capture, inplace, fold_batchnorm, strict)
    example = Example.of(example_inputs)
    if options.calibrates:
        return _calibrated(model, example, options, calibration)
    batches = [example] if calibration is None else [Example.of(b) for b in itertools.islice(calibration, MOST_CALIBRATION)]
    if not batches:
        raise InputError("calibration gives no inputs")
    with _apart(model, inplace):
        return _quantize(model, example, batches, options)


def _options(model: nn.Module, scheme: Any, overrides: Any, capture: str, inplace: bool = False, fold_batchnorm: bool = False,
             strict: bool = False) -> Options:
    default = find_scheme(scheme)
    check_model(model, inplace=inplace)
    if capture not in CAPTURES:
        raise InputError(f"capture={capture!r}: it is one of {', '.join(map(repr, CAPTURES))}")
    if not isinstance(overrides or {}, Mapping):
        raise SchemeError(f"overrides must be a dict of pattern: scheme, got {type(overrides).__name__}")
    overriding = Overrides({k: v if v is None else find_scheme(v) for k, v in (overrides or {}).items()}, model)
    return Options(default, overriding, capture, inplace, fold_batchnorm, strict)


@contextmanager
def _apart(model: nn.Module, inplace: bool = False) -> Iterator[None]:
    """What happens inside leaves no trace in the modes and random state of torch, nor in the model if it fails."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), \
            torch.autocast("cuda", enabled=False), kept_random_state(), without_global_hooks(), \
            _unchanged_if_it_fails(model, inplace):
        yield


@dataclasses.dataclass(frozen=True)
class Options:
    """What `quantize_graph` was asked for."""

    default: Scheme
    overrides: Overrides
    capture: str
    inplace: bool
    fold_batchnorm: bool
    strict: bool

    @property
    def calibrates(self) -> bool:
        """Does any scheme need calibration data?"""
        return any(isinstance(s, Int8Static) for s in (self.default, *(scheme for _, scheme in self.overrides.entries)))


def _quantize(model: nn.Module, example: Example, batches: list[Example], options: Options,
              observers: Mapping[str, Observer] | None = None) -> nn.Module:
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
    settle_inputs(session, chosen, observers or {})
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


# ---- calibration ----

@dataclasses.dataclass
class Prepared:
    """What a prepared model carries for `convert_graph`."""

    example: Example
    scheme: Any
    overrides: dict[Any, Any]
    capture: str
    observers: dict[str, str]                # weight -> path of its observer


def prepare_graph(model: nn.Module, example_inputs: Any, scheme: str | Scheme = "int8_static", *,
                  overrides: Mapping[Any, Any] | None = None, capture: str = "auto") -> nn.Module:
    """A copy of ``model`` in eval mode with an observer in front of every linear whose input ``scheme`` quantizes statically.

    Run it on calibration data (any calls that the model takes), then give it to `convert_graph`. The observers are modules
    (``fc.weight_observer``), so that they are in ``state_dict`` and copies. The parameters are those of `quantize_graph`, as
    are the errors.

    >>> import torch, inro_fx
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> prepared = inro_fx.prepare_graph(model, torch.randn(8, 64))
    >>> for _ in range(4):
    ...     _ = prepared(torch.randn(8, 64))
    >>> inro_fx.convert_graph(prepared)[0].weight_input_scale.shape
    torch.Size([1, 1])
    """
    options = _options(model, scheme, overrides, capture)
    example = Example.of(example_inputs)
    with _apart(model):
        root, _ = _prepare(model, example, options)
    return root


def _prepare(model: nn.Module, example: Example, options: Options) -> tuple[nn.Module, Session]:
    root = clone(model)
    session, _ = capture_model(root, example, options.capture)
    options.overrides.see(root)
    chosen = plan(session, find_targets(session), options.default, options.overrides)
    watched = {name: d for name, d in chosen.decisions.items() if isinstance(d.scheme, Int8Static) and takes_inputs(session, d)}
    paths = {}
    for name, decision in watched.items():
        owner, leaf = owner_of(root, name)
        observer = decision.scheme.new_observer()
        observer.path = name.removesuffix(".weight")
        owner.add_module(free := _free_name(owner, f"{leaf}_observer"), observer.to(session.tensor(name).device))
        paths[name] = f"{decision.constant.module}.{free}".lstrip(".")
    session.state.restore()
    for path, captured in {**session.layers, **session.captures}.items():
        captured.graph = observe(captured.graph, paths, path)
        verify(captured.graph, root.get_submodule(path), {}, after="observe")
        attach_graph(root.get_submodule(path), captured)
    make_independent(root)
    root.__dict__["_inro_prepared"] = Prepared(example, options.default, dict(options.overrides.entries), options.capture, paths)
    return root, session


def _free_name(module: nn.Module, name: str) -> str:
    return next(n for n in (name, *(f"{name}_{i}" for i in range(1, 1000))) if not hasattr(module, n))


def convert_graph(prepared: nn.Module, calibration: Iterable[Any] | None = None) -> nn.Module:
    """The integer model of a prepared and calibrated one; ``prepared`` becomes the float model again.

    ``calibration``, if given, are inputs on which the errors of the report are measured, in the place of the example.

    Raises `ModelError` for a model that `prepare_graph` did not make, and `InputError` naming the first layer that no
    calibration data reached.
    """
    record: Prepared | None = getattr(prepared, "__dict__", {}).get("_inro_prepared")
    if record is None:
        raise ModelError(f"this {type(prepared).__name__} was not made by inro_fx.prepare_graph")
    observers: dict[str, Observer] = {}
    for name, path in record.observers.items():
        observers[name] = prepared.get_submodule(path)
        observers[name].range()                             # raises for one that saw nothing, before anything is changed
    _restore_float(prepared, record)
    options = _options(prepared, record.scheme, record.overrides, record.capture)
    batches = [record.example] if calibration is None else [Example.of(b) for b in itertools.islice(calibration, MOST_CALIBRATION)]
    with _apart(prepared):
        return _quantize(prepared, record.example, batches, options, observers)


def _restore_float(prepared: nn.Module, record: Prepared) -> None:
    for module in list(prepared.modules()):
        if isinstance(module, GraphForward):
            detach_graph(module)
    for path in record.observers.values():
        owner, leaf = owner_of(prepared, path)
        del owner._modules[leaf]
    prepared.__dict__.pop("_inro_prepared", None)


def _calibrated(model: nn.Module, example: Example, options: Options, calibration: Iterable[Any] | None) -> nn.Module:
    """prepare, run all of the calibration data, convert."""
    if calibration is None:
        raise InputError(f"the scheme {options.default.name} needs calibration data: give calibration=, inputs like "
                         f"example_inputs, or use int8_dynamic, which needs none")
    with _apart(model):
        if options.fold_batchnorm or options.inplace:
            raise InputError("a static scheme goes with neither fold_batchnorm nor inplace")
        prepared, _ = _prepare(model, example, options)
        kept: list[Example] = []
        total = len(calibration) if hasattr(calibration, "__len__") else None
        with progress_bar(total, "calibrating") as tick:
            for number, batch in enumerate(calibration):
                inputs = Example.of(batch)
                _try(prepared, inputs, f"batch {number} of calibration")
                kept += [inputs] if len(kept) < MOST_CALIBRATION else []
                tick()
        if not kept:
            raise InputError("calibration gives no inputs")
        record = prepared.__dict__["_inro_prepared"]
        observers: dict[str, Any] = {name: prepared.get_submodule(path) for name, path in record.observers.items()}
        _restore_float(prepared, record)
        return _quantize(prepared, example, kept, options, observers)


def _try(model: nn.Module, inputs: Example, name: str) -> None:
    try:
        run(model, inputs)
    except InroError:
        raise
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
