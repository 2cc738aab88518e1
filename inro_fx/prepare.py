"""Models between float and integer: with observers for calibration, or with weights rounded in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .errors import InputError
from .observers import Observer
from .packing import nodes_of, rounds_inputs, takes_inputs
from .passes.capture.clone import clone, make_independent
from .passes.capture.example import Example
from .passes.capture.session import Session
from .passes.constants import owner_of
from .passes.program import Context
from .passes.rules.observe import observe
from .passes.run.classes import user_class
from .passes.run.forward import GraphForward, attach_program, detach_programs, rewatch
from .passes.run.weights import FakeQuantizedWeights, attach_fake, detach_fakes
from .passes.scheme import activation_of_scheme
from .passes.solve.plan import Plan, find_targets, plan
from .passes.verify import verify
from .progress import progress_bar
from .steps import MOST_MEASURED, Options, captured, forget_calls_of, options_of, quantize, try_inputs
from .training import FakeQuantizedInput, FakeQuantizedWeight, InputHook

__all__ = ["Prepared", "calibrated", "converted", "examples_of", "prepare_calibration", "prepare_training"]


@dataclasses.dataclass
class Prepared:
    """What a prepared model carries for `convert_graph`."""

    example: Example
    scheme: Any
    overrides: dict[Any, Any]
    capture: str
    observers: dict[str, str]                # weight -> path of its observer, or of the fake-quantized input that has one
    fakes: dict[str, str] = dataclasses.field(default_factory=dict)         # weight -> path of what rounds it in training


# forwards that multiply by the weight what they are given, and nothing else
PLAIN = {kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)}


def _planned(model: nn.Module, example: Example, options: Options) -> tuple[Session, Plan, Example]:
    """A captured copy of the model, what would be quantized in it, and the example as its runs are to be."""
    session, _, example = captured(clone(model), example, options.capture)
    options.overrides.see(session.root)
    return session, plan(session, find_targets(session), options.default, options.overrides), example


def prepare_calibration(model: nn.Module, example: Example, options: Options, shared: bool = False) -> nn.Module:
    """A copy of the model whose graphs pass the inputs of static layers through observers; ``shared``: with the model's tensors."""
    session, chosen, example = _planned(model, example, options)
    root = session.root
    nodes = nodes_of(session)
    watched = {name: w for name, w in chosen.weights.items() if activation_of_scheme(w.scheme) == "static" and takes_inputs(nodes, w)}
    paths = {}
    for name, weight in watched.items():
        owner, leaf = owner_of(root, name)
        scheme: Any = weight.scheme
        observer = scheme.new_observer()
        observer.path = name.removesuffix(".weight")
        owner.add_module(free := _free_name(owner, f"{leaf}_observer"), observer.to(session.tensor(name).device))
        paths[name] = f"{weight.constant.module}.{free}".lstrip(".")
    session.state.restore()
    for path, program in {**session.layers, **session.captures}.items():
        observed = observe(program, paths)
        verify(observed, Context(root, {}), after="observe")
        detach_programs(root.get_submodule(path))
        attach_program(root.get_submodule(path), observed)
    if not shared:
        make_independent(root)
    rewatch(root)
    session.forget_tensors()
    root.__dict__["_inro_prepared"] = Prepared(example, options.default, dict(options.overrides.entries), options.capture, paths)
    return root


def prepare_training(model: nn.Module, example: Example, options: Options, learn: bool) -> nn.Module:
    """A copy of the model whose weights, and the inputs of its linears and convolutions, are rounded in forward."""
    session, chosen, example = _planned(model, example, options)
    root = session.root
    nodes = nodes_of(session)
    rounded = {name for name, weight in chosen.weights.items() if rounds_inputs(nodes, weight)}
    session.state.restore()
    for path in {**session.layers, **session.captures}:
        detach_programs(root.get_submodule(path))
    make_independent(root)
    record = Prepared(example, options.default, dict(options.overrides.entries), options.capture, {})
    for name, weight in chosen.weights.items():
        owner, leaf = owner_of(root, name)
        if owner._parameters.get(leaf) is None:              # a matrix in a buffer is rounded, but not trained
            continue
        fake = FakeQuantizedWeight(weight.scheme, weight.layout, owner._parameters[leaf], learn)
        owner.add_module(free := _free_name(owner, f"{leaf}_fake_quantize"), fake)
        record.fakes[name] = f"{weight.constant.module}.{free}".lstrip(".")
        for each in weight.constant.names:
            attach_fake(*owner_of(root, each), fake)
        plain = user_class(owner).forward in PLAIN and len(weight.constant.names) == 1
        if plain and name in rounded:
            together = 1 if len(weight.constant.shape) == 2 else len(weight.constant.shape) - 1
            owner.add_module(free := _free_name(owner, "input_fake_quantize"), FakeQuantizedInput(weight.scheme, together))
            owner.register_forward_pre_hook(InputHook(free), with_kwargs=True)
            if activation_of_scheme(weight.scheme) == "static":
                record.observers[name] = f"{weight.constant.module}.{free}.observer".lstrip(".")
    root.__dict__["_inro_prepared"] = record
    return root.train(model.training) or root


def _free_name(module: nn.Module, name: str) -> str:
    return next(n for n in (name, *(f"{name}_{i}" for i in range(1, 1000))) if not hasattr(module, n))


def converted(prepared: nn.Module, record: Prepared, batches: list[Example]) -> nn.Module:
    """The integer model of a prepared one, which stays as it is: it can be calibrated or trained further, and converted again."""
    _try_unseen(prepared, batches)
    observers: dict[str, Observer] = {}
    for name, path in record.observers.items():
        observer: Any = prepared.get_submodule(path)
        observer.path = name.removesuffix(".weight")
        if not record.fakes:
            observer.need_data()
        if int(observer.count):                             # in training, other code than the linear's own may use its weight
            observers[name] = observer
    fakes: dict[str, Any] = {name: prepared.get_submodule(path) for name, path in record.fakes.items()}
    steps = {name: fake.positive_step().detach() for name, fake in fakes.items() if fake.step is not None}
    model = float_model(clone(prepared), record)
    options = options_of(model, record.scheme, record.overrides, record.capture)
    return quantize(model, record.example, batches, options, observers, steps, trained=bool(record.fakes))


def _try_unseen(prepared: nn.Module, batches: list[Example]) -> None:
    """Runs the model on batches of which neither its observers nor its batch norms shall know."""
    modes = [(m, m.training) for m in prepared.modules()]
    observers = [m for m in prepared.modules() if isinstance(m, Observer)]
    try:
        for module, _ in modes:
            module.training = False
        for observer in observers:
            observer.watching = False
        with torch.no_grad():
            for number, batch in enumerate(batches):
                try_inputs(prepared, batch, f"batch {number} of calibration")
    finally:
        for observer in observers:
            observer.watching = True
        for module, mode in modes:
            module.training = mode
        forget_calls_of(prepared)


def float_model(prepared: nn.Module, record: Prepared) -> nn.Module:
    """A prepared model, changed in place, without what was added for calibration or training."""
    for module in list(prepared.modules()):
        if isinstance(module, GraphForward):
            detach_programs(module)
    for path in record.fakes.values():
        owner, leaf = owner_of(prepared, path)
        del owner._modules[leaf]
    for module in list(prepared.modules()):
        if isinstance(module, FakeQuantizedWeights):
            detach_fakes(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, InputHook):
                del module._forward_pre_hooks[key], module._modules[hook.name]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    for path in record.observers.values() if not record.fakes else ():
        owner, leaf = owner_of(prepared, path)
        del owner._modules[leaf]
    prepared.__dict__.pop("_inro_prepared", None)
    return prepared


def calibrated(model: nn.Module, example: Example, options: Options, calibration: Iterable[Any] | None) -> nn.Module:
    """prepare, run all of the calibration data, convert."""
    if calibration is None:
        raise InputError(f"the scheme {options.default.name} needs calibration data: give calibration=, inputs like "
                         f"example_inputs, or use int8_dynamic, which needs none")
    prepared = prepare_calibration(model, example, options, shared=True)
    record: Prepared = prepared.__dict__["_inro_prepared"]
    kept: list[Example] = []
    total = len(calibration) if hasattr(calibration, "__len__") else None
    with progress_bar(total, "calibrating") as tick:
        for number, inputs in enumerate(examples_of(calibration)):
            inputs = dataclasses.replace(inputs, draws=record.example.draws)
            try_inputs(prepared, inputs, f"batch {number} of calibration")
            kept += [inputs] if options.solves or len(kept) < MOST_MEASURED else []
            tick()
    if not kept:
        raise InputError("calibration gives no inputs: give at least one, like example_inputs")
    observers: dict[str, Any] = {name: prepared.get_submodule(path) for name, path in record.observers.items()}
    base = model if options.inplace else float_model(prepared, record)
    del prepared                                             # in place, floats are freed one by one: nothing else may hold them
    return quantize(base, example, kept, options, observers)


def examples_of(calibration: Iterable[Any]) -> Iterator[Example]:
    """Calibration data as examples. Raises `InputError` for what is no series of inputs."""
    if isinstance(calibration, (torch.Tensor, dict, str)) or not hasattr(calibration, "__iter__"):
        raise InputError(f"calibration is one {type(calibration).__name__}: give a series of inputs, each like example_inputs, for example "
                         f"calibration=[batch]")
    return (Example.of(batch) for batch in calibration)
