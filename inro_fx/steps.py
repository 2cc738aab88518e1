"""The column of steps that `quantize_graph`, `prepare_graph`, `convert_graph` and `load` share, in the order they run.

    check -> copy -> capture -> plan -> pack, beside the float run -> install -> measure -> record

The model that is worked on is a copy that shares the user's tensors. With ``inplace=True`` the steps up to packing do so, too: the
user's modules take the codes as they are packed, one weight after the other, and the graphs at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import shares_of
from .checks import check_model
from .equalization import EQUALIZATIONS, equalize
from .errors import InputError, InroError, ModelError, SchemeError
from .observers import Observer
from .packing import Packer, keep_codes, settle_inputs, take_codes
from .passes.capture.clone import clone, make_independent, prepare
from .passes.capture.example import Example, compare, run, tensors_in
from .passes.capture.ladder import capture
from .passes.capture.session import Session
from .passes.capture.state import ModuleState, held_tensor, rewind
from .passes.constants import adopt, adopted_by, owner_of
from .passes.measure import run_float, run_quantized
from .passes.pipeline import run_passes
from .passes.program import Context, Pass, Program
from .passes.rules.fold_batchnorm import fold_batchnorm
from .passes.run.again import Again
from .passes.run.finish import finish
from .passes.run.forward import GraphForward, attach_program, detach_programs, rewatch
from .passes.run.weights import Packed, attach_packed
from .passes.scheme import Scheme, activation_of_scheme
from .passes.solve.plan import Overrides, Plan, Weight, find_targets, plan
from .progress import progress_bar
from .report import make_record, stored_bytes
from .schemes import find_scheme
from .solvers import Solver, find_solver, nearest
from .solving import solve

__all__ = ["Options", "apart", "captured", "install_weight", "options_of", "quantize", "try_inputs"]

CAPTURES = ("auto", "export")
MOST_MEASURED = 8               # batches of calibration data on which errors are measured
log = logging.getLogger("inro_fx")


@dataclasses.dataclass(frozen=True)
class Options:
    """What `quantize_graph` was asked for."""

    default: Scheme
    overrides: Overrides
    capture: str = "auto"
    inplace: bool = False
    fold_batchnorm: bool = False
    strict: bool = False
    passes: tuple[Pass, ...] = ()
    solver: Solver = nearest
    bias_correction: bool = False
    group: Any = None
    equalize: str | None = None

    @property
    def solves(self) -> bool:
        """Does any weight get its codes from calibration data, where there is some?"""
        solvers = (self.solver, *self.overrides.solvers.values())
        return self.bias_correction or self._equalizes_data or any(s.needs != "nothing" for s in solvers)

    @property
    def _equalizes_data(self) -> bool:
        return self.equalize is not None and EQUALIZATIONS[self.equalize][1]

    @property
    def asks_for_data(self) -> str | None:
        """What cannot do without calibration data; None if everything can."""
        solver = next((s for s in (self.solver, *self.overrides.solvers.values()) if not s.optional), None)
        return f"the solver {solver.name}" if solver is not None else "bias_correction" if self.bias_correction \
            else f"equalize={self.equalize!r}" if self._equalizes_data else None

    @property
    def calibrates(self) -> bool:
        """Does any scheme need calibration data?"""
        return any(s is not None and activation_of_scheme(s) == "static" for s in (self.default, *(s for _, s in self.overrides.entries)))


def options_of(model: nn.Module, scheme: Any, overrides: Any, capture: str = "auto", inplace: bool = False, fold_batchnorm: bool = False,
               strict: bool = False, passes: Sequence[Pass] = (), solver: Any = "nearest", bias_correction: bool = False,
               group: Any = None, with_data: bool = False, equalize: str | None = None) -> Options:
    """The options of a call, checked: `ModelError`, `InputError` and `SchemeError` say what is wrong."""
    default = find_scheme(scheme)
    check_model(model, inplace=inplace)
    if capture not in CAPTURES:
        raise InputError(f"capture={capture!r}: it is one of {', '.join(map(repr, CAPTURES))}")
    if equalize is not None and not (isinstance(equalize, str) and equalize in EQUALIZATIONS):
        raise InputError(f"equalize={equalize!r}: it is one of {', '.join(map(repr, EQUALIZATIONS))}, or None")
    if not isinstance(overrides or {}, Mapping):
        raise SchemeError(f"overrides must be a dict of pattern: scheme, got {type(overrides).__name__}")
    if not all(callable(p) for p in passes):
        raise InputError("passes are functions (program, context) -> program: see docs/writing-a-pass.md")
    pairs = {k: v if isinstance(v, tuple) and len(v) == 2 else (v, None) for k, v in (overrides or {}).items()}
    overriding = Overrides({k: v if v is None else find_scheme(v) for k, (v, _) in pairs.items()}, model,
                           {k: find_solver(v, with_data) for k, (_, v) in pairs.items() if v is not None})
    return Options(default, overriding, capture, inplace, fold_batchnorm, strict, tuple(passes), find_solver(solver, with_data),
                   bias_correction or (with_data and isinstance(solver, str) and solver == "auto"), group, equalize)


@functools.cache
def _late_imports() -> None:
    """Imports what torch imports at the first operator under one of its modes: there, decorated functions of torch keep the frames
    that the import came from, and with them whatever model is being worked on; in a thread of its own there are none."""
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()


@contextmanager
def apart() -> Iterator[None]:
    """The modes of torch inside are those of plain inference, whatever the caller's are."""
    _late_imports()
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def captured(root: nn.Module, example: Example, mode: str) -> tuple[Session, Any, Example]:
    """The captured session, the model's float output, which must hold a tensor, and the example as its runs are to be."""
    session, want, example = capture(root, example, mode)
    if next(tensors_in(want), None) is None:
        if isinstance(want, Iterator):
            raise ModelError(f"the model returns a {type(want).__name__}: give a module whose forward returns what that yields")
        raise ModelError(f"the model returns no tensor on example_inputs (it returned {type(want).__name__}); "
                         f"give inputs for which forward computes something")
    for rung, outcome in session.steps:
        log.info("capture as %s: %s", rung, outcome)
    return session, want, example


def quantize(model: nn.Module, example: Example, batches: list[Example], options: Options,
             observers: Mapping[str, Observer] | None = None, steps: Mapping[str, Any] | None = None, trained: bool = False) -> nn.Module:
    """The quantized form of ``model``; errors are measured on ``batches``. ``observers`` give the ranges of static layers, and
    ``steps`` learned scales, by the weight's name; ``trained``: the model was trained with what its schemes round."""
    float_bytes = stored_bytes(model)
    root = clone(model)
    given = take_codes(root)
    session, want, ready = captured(root, example, options.capture)
    folded = _fold(session) if options.fold_batchnorm else []
    if folded:
        session, got, ready = captured(root, example, options.capture)
        if (difference := compare(want, got)) is not None:
            raise ModelError(f"folding batch norms changes this model ({difference}): quantize with fold_batchnorm=False")
    logs: dict[str, tuple[tuple[str, str, str], ...]] = {}
    equalized: list[str] = []
    if options.equalize is not None:
        same = [ready if b is example else dataclasses.replace(b, draws=ready.draws) for b in batches]
        equalized = equalize(session, options.equalize, same, options.default)
        logs = {path: program.log for path, program in session.captures.items()}
        rewind(root, session.as_they_were)
        if equalized:                                        # other code than the graph's would see values that are divided
            options = dataclasses.replace(options, strict=True)
        for module in list(session.root.modules()):
            detach_programs(module)
        session, got, ready = captured(root, example, options.capture)
        if (difference := compare(want, got)) is not None:
            raise ModelError(f"equalizing changes this model ({difference}): quantize with equalize=None")
        for path, program in session.captures.items():
            program.log = logs.get(path, ())
    batches = [ready if b is example else dataclasses.replace(b, draws=ready.draws) for b in batches]
    options.overrides.see(root)
    targets = find_targets(session)
    chosen = plan(session, targets, options.default, options.overrides)
    settle_inputs(session, chosen, observers or {}, trained)
    keep_codes(session, chosen, given)
    solved = solve(session, chosen, targets, options, batches, {*given, *(steps or {})})
    measured = batches[:MOST_MEASURED]
    decided = [t for t in targets if t.use.constant in chosen.weights]
    log.info("%d weights are quantized, %d stay float", len(chosen.weights), len(chosen.skips))

    context = Context(root, chosen.weights)
    programs = {path: run_passes(p, context, options.passes) for path, p in {**session.layers, **session.captures}.items()}
    target = _Target(model, session, chosen, folded, equalized) if options.inplace else None
    packer = Packer(session, chosen, steps or {}, {**given, **solved.parts})
    errors: dict[Any, Any] = {}
    with progress_bar(2 * len(decided) * len(measured), "quantizing") as tick:
        for number, batch in enumerate(measured):
            if batch is not ready:
                try_inputs(root, batch, f"batch {number} of calibration")
            release = (lambda name: target.take(name, packer)) if target is not None and number + 1 == len(measured) else None
            for key, found in run_float(session, batch, programs, decided, chosen.weights, packer.pack, tick, release).items():
                errors[key] = found if key not in errors else _added(errors[key], found)
        for name in chosen.weights:
            packer.pack(name)
        session.state.restore()
        floats = None if target is not None else apart_from(clone(root) if folded or equalized else clone(model), session)
        if target is not None:
            root = target.root(packer)
        else:
            for weight in chosen.weights.values():
                install_weight(root, weight)
        _correct(root, solved.corrections)
        _install_programs(root, session, programs, options)
        as_it_was = {name: value for name, value in session.as_they_were.items() if name not in solved.corrections}
        with _state_kept(root, as_it_was):
            got = want
            for batch in measured:
                got = run_quantized(root, batch, {path: programs[path] for path in session.captures}, errors, tick)
            _refuse_failures(root)
            if measured[-1] is not ready:
                got = run(root, ready)
        shares = "the model was quantized in place" if floats is None else shares_of(floats, ready, chosen, want, got)
    if not options.inplace:
        rewind(root, as_it_was)
        make_independent(root)
    record = make_record(session, chosen, targets, programs, errors, packer.facts, want, got, float_bytes, shares,
                         bool(equalized))
    for weight in chosen.weights.values():
        weight.parts = None
    forget_calls_of(root)
    finish(root, record)
    rewatch(root)
    session.forget_tensors()
    return root


@contextmanager
def _state_kept(root: nn.Module, written: Iterable[str]) -> Iterator[None]:
    """What runs of the model write inside to its attributes, and to the tensors ``written``, is put back."""
    state = ModuleState(root)
    held = {}
    for name in written:
        with suppress(KeyError):                         # it is held as codes by now
            held[name] = held_tensor(root, name), held_tensor(root, name).detach().clone()
    try:
        yield
    finally:
        state.restore()
        for tensor, before in held.values():
            tensor.data.copy_(before)


def _added(mine: Any, more: Any) -> Any:
    mine.add(more)
    return mine


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
    folded = [pair for program in session.captures.values() for pair in fold_batchnorm(session.root, program)]
    if folded:
        for module in list(session.root.modules()):
            detach_programs(module)
    return folded


# ---- putting codes and graphs in place ----

def install_weight(root: nn.Module, weight: Weight) -> None:
    """Puts the parts of a weight in the place of its floats, under all of its names."""
    assert weight.parts is not None
    holder, own = owner_of(root, weight.constant.name)
    for buffer, part in zip(weight.buffers, weight.scheme.parts, strict=True):
        holder.register_buffer(buffer, weight.parts[part])
    for name in weight.constant.names:
        owner, leaf = owner_of(root, name)
        buffers = tuple(leaf + b[len(own):] for b in weight.buffers)
        packed = Packed(weight.scheme, buffers, weight.layout, weight.constant.dtype)
        attach_packed(owner, leaf, packed, holder, weight.buffers)
        for kind in (owner._parameters, owner._buffers):
            kind.pop(leaf, None)


def apart_from(copy: nn.Module, session: Session) -> nn.Module:
    """The copy of a model, with tensors of its own where forward writes to them."""
    for name, value in session.as_they_were.items():
        path, _, leaf = name.rpartition(".")
        owner: Any = _find(copy, path)
        for kind in () if owner is None else (owner._parameters, owner._buffers):
            if kind.get(leaf) is not None:
                fresh = value.detach().clone()
                kind[leaf] = nn.Parameter(fresh, requires_grad=False) if kind is owner._parameters else fresh
    return copy


def _correct(root: nn.Module, corrections: Mapping[str, Tensor]) -> None:
    """Adds to stored vectors, which become the model's own."""
    for name, change in corrections.items():
        owner, leaf = owner_of(root, name)
        held = owner._parameters.get(leaf)
        if held is not None:
            owner._parameters[leaf] = nn.Parameter(held.detach() + change, held.requires_grad)
        else:
            owner._buffers[leaf] = owner._buffers[leaf].detach() + change


def _install_programs(root: nn.Module, session: Session, programs: Mapping[str, Program], options: Options) -> None:
    for path in programs:
        detach_programs(root.get_submodule(path))
    for path, program in programs.items():
        attach_program(root.get_submodule(path), program, options.strict, Again(options.passes))


def _refuse_failures(root: nn.Module) -> None:
    """A quantized graph must answer what the float graph did."""
    for path, module in root.named_modules():
        for reason in module._inro_calls if isinstance(module, GraphForward) else ():
            if reason.startswith("an operator raises"):
                raise ModelError(f"{path or 'the model'}: its quantized graph does not run ({reason}): please report it; until then "
                                 f"quantize with overrides={{{path!r}: None}}")


def forget_calls_of(root: nn.Module) -> None:
    """The calls so far were the compiler's own."""
    for module in root.modules():
        if isinstance(module, GraphForward):
            module._inro_calls.clear()
            for runner in module._inro_runners:
                runner.calls = 0


class _Target:
    """The user's model while it is quantized in place: untouched until the first codes are there, and from then on every weight is
    either float or codes, so that it runs whatever happens."""

    def __init__(self, model: nn.Module, session: Session, chosen: Plan, folded: Sequence[tuple[str, str]], equalized: Sequence[str]):
        self.model, self.session, self.chosen, self.folded = model, session, chosen, folded
        self.changed = {*equalized, *(f"{conv}.{name}" for conv, _ in folded for name in ("weight", "bias"))}
        self.ready = False

    def _prepare(self) -> None:
        """What capture changed in the form of the copy is done to the model, too: folded weights, layers built by the first call."""
        if self.ready:
            return
        self.ready = True
        prepare(self.model)
        for path, module in self.session.root.named_modules():
            mine = self.model if not path else _find(self.model, path)
            if mine is None or (type(module) is nn.Identity and any(norm == path for _, norm in self.folded)):
                parent, _, name = path.rpartition(".")
                owner = self.model.get_submodule(parent)
                owner.__dict__.pop(name, None)
                owner._modules[name] = module
                continue
            for kind, theirs in ((mine._parameters, module._parameters), (mine._buffers, module._buffers)):
                for name, tensor in theirs.items():
                    if name not in kind or f"{path}.{name}".lstrip(".") in self.changed:
                        mine.__dict__.pop(name, None)
                        kind[name] = tensor
            mine._non_persistent_buffers_set |= module._non_persistent_buffers_set
            for name in adopted_by(module):
                adopt(mine, name, module._buffers[name])

    def take(self, name: str, packer: Packer) -> None:
        """The model holds a weight as codes from now on, and its floats are free."""
        packer.pack(name)
        self._prepare()
        weight = self.chosen.weights[name]
        install_weight(self.model, weight)
        for each in weight.constant.names:
            owner, leaf = owner_of(self.session.root, each)
            for kind in (owner._parameters, owner._buffers):
                kind.pop(leaf, None)
        self.session.forget(weight.constant.names)

    def root(self, packer: Packer) -> nn.Module:
        """The model with all of its codes."""
        self._prepare()
        for name in self.chosen.weights:
            owner, leaf = owner_of(self.model, name)
            if leaf not in vars(owner).get("_inro_packed", {}):
                self.take(name, packer)
        return self.model


def _find(root: nn.Module, path: str) -> Any:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None
