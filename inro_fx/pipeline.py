"""The steps from a model to its quantized form, in the order they run. `api` checks what the user gives, and calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .checks import check_model
from .errors import InputError, InroError, ModelError, SchemeError
from .observers import Observer
from .packing import Packer, install, keep_codes, rewritten, settle_inputs, take_codes
from .passes.capture import capture as capture_graphs
from .passes.example import Example, compare, kept_random_state, run, tensors_in
from .passes.fold_batchnorm import fold_batchnorm as fold_batchnorm_pass
from .passes.measure import run_float, run_quantized
from .passes.module import PackedWeights, detach_graph, without_global_hooks
from .passes.scheme import Scheme
from .passes.session import Session
from .passes.state import clone, make_independent, prepare, put_state
from .passes.targets import Overrides, find_targets, plan
from .progress import progress_bar
from .report import make_record, stored_bytes
from .schemes import Int8Static, find_scheme

__all__ = ["Options", "apart", "capture_model", "options_of", "quantize_model", "try_inputs"]

CAPTURES = ("auto", "export")


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


def options_of(model: nn.Module, scheme: Any, overrides: Any, capture: str, inplace: bool = False, fold_batchnorm: bool = False,
               strict: bool = False) -> Options:
    """The options of a call, checked: `ModelError`, `InputError` and `SchemeError` say what is wrong."""
    default = find_scheme(scheme)
    check_model(model, inplace=inplace)
    if capture not in CAPTURES:
        raise InputError(f"capture={capture!r}: it is one of {', '.join(map(repr, CAPTURES))}")
    if not isinstance(overrides or {}, Mapping):
        raise SchemeError(f"overrides must be a dict of pattern: scheme, got {type(overrides).__name__}")
    overriding = Overrides({k: v if v is None else find_scheme(v) for k, v in (overrides or {}).items()}, model)
    return Options(default, overriding, capture, inplace, fold_batchnorm, strict)


@contextmanager
def apart(model: nn.Module, inplace: bool = False) -> Iterator[None]:
    """What happens inside leaves no trace in the modes and random state of torch, nor in the model if it fails."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), \
            torch.autocast("cuda", enabled=False), kept_random_state(), without_global_hooks(), \
            _unchanged_if_it_fails(model, inplace):
        yield


def quantize_model(model: nn.Module, example: Example, batches: list[Example], options: Options,
                   observers: Mapping[str, Observer] | None = None, steps: Mapping[str, Any] | None = None) -> nn.Module:
    """The quantized form of ``model``; errors are measured on ``batches``. ``observers`` give the ranges of static layers, and
    ``steps`` learned scales, by the weight's name."""
    float_bytes = stored_bytes(model)
    if options.inplace:
        model.eval()
        try_inputs(model, example, "example_inputs")                 # before anything of the user's model is touched
    root = prepare(model) if options.inplace else clone(model)
    given = take_codes(root)

    session, want = capture_model(root, example, options.capture)
    if options.fold_batchnorm and _fold(session):
        session, folded = capture_model(root, example, options.capture)
        if (difference := compare(want, folded)) is not None:
            raise ModelError(f"folding batch norms changes this model ({difference}): quantize with fold_batchnorm=False")
    options.overrides.see(root)
    targets = find_targets(session)
    chosen = plan(session, targets, options.default, options.overrides)
    settle_inputs(session, chosen, observers or {})
    keep_codes(session, chosen, given)
    decided = [t for t in targets if t.use.constant in chosen.decisions]

    graphs = {path: rewritten(session, captured, path, chosen) for path, captured in session.captures.items()}
    packer = Packer(session, chosen, steps or {}, given)
    errors: dict[Any, Any] = {}
    with progress_bar(2 * len(decided) * len(batches), "quantizing") as tick:
        for number, batch in enumerate(batches):
            if batch is not example:
                try_inputs(root, batch, f"batch {number} of calibration")
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


def try_inputs(model: nn.Module, inputs: Example, name: str) -> None:
    """Runs the model; `InputError` names the inputs that it does not run on."""
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
