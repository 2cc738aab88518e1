"""quantize_graph: from a model to the same model with integer weights; and in two steps, with data or training between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from .allocation import FORMATS, PROBES, BitPlan, Budget, plan_for, within
from .errors import InputError, ModelError
from .passes.capture.example import Example
from .passes.program import Pass
from .passes.scheme import Scheme, activation_of_scheme
from .prepare import Prepared, calibrated, converted, examples_of, prepare_calibration, prepare_training
from .solvers import Solver
from .steps import MOST_MEASURED, apart, options_of, quantize

__all__ = ["convert_graph", "plan_bits", "prepare_graph", "quantize_graph"]

Model = TypeVar("Model", bound=nn.Module)


def quantize_graph(model: Model, example_inputs: Any, scheme: str | Scheme = "int8", *,
                   overrides: Mapping[Any, Any] | None = None, calibration: Iterable[Any] | None = None,
                   capture: str = "auto", inplace: bool = False, fold_batchnorm: bool = False,
                   strict: bool = False, passes: Sequence[Pass] = (), solver: str | Solver = "nearest",
                   bias_correction: bool = False, budget: Budget | None = None, formats: Sequence[Any] = FORMATS,
                   equalize: str | None = None, group: Any = None) -> Model:
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
        ``{pattern: scheme}``, or ``{pattern: (scheme, solver)}``, where a pattern is a glob of module paths (``"layers.0.*"``; the
        modules below are meant too), a module class or the name of an operator (``"conv2d"``), and None leaves the weight float.
        The first match wins; a pattern that matches nothing warns.
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
    passes
        Passes of your own, ``(program, context) -> program``, that run after those of the compiler (docs/writing-a-pass.md).
    solver
        What chooses the codes (see docs/solvers.md): "nearest", "search", or with calibration data "gptq" and
        "gptaq", which make up for the errors as they go; "auto" is the best that the data allow, biases corrected.
    bias_correction
        Biases (and running means of batch norms) take up the mean error that their layer has on the calibration data.
    budget
        A `Budget`: each weight gets the one of ``formats`` with which the output loses least for it (`plan_bits`).
    formats
        Schemes, and None for float, among which a budget chooses; by default 2 to 6 bits in groups of 32, int8, and float.
    equalize
        Before anything else, "smooth", "awq" or "cle" moves scale from channels of values into the weights that read them, by powers of
        two: the float model stays the same, bit for bit. `explain` says where, and where not and why.
    group
        A process group of ``torch.distributed`` whose processes hold a share of the calibration data each; all get the same codes.

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
    options = options_of(model, scheme, overrides, capture, inplace, fold_batchnorm, strict, passes, solver, bias_correction, group,
                         calibration is not None, equalize)
    example = Example.of(example_inputs)
    if formats is not FORMATS and budget is None:
        raise InputError("formats= are what a budget chooses among: give budget=, or one scheme")
    if budget is not None and not isinstance(budget, Budget):
        raise InputError(f"budget={budget!r} is no Budget: write budget=inro_fx.Budget(bits=4.5), or bytes=, ratio= or error=")
    if budget is not None and any(s is not None and activation_of_scheme(s) == "static" for _, s in options.overrides.entries):
        raise InputError("a budget chooses among formats of weights: an override with a static scheme does not go with it")
    if calibration is None and (asks := options.asks_for_data) is not None and not options.calibrates:
        raise InputError(f"{asks} needs calibration data: give calibration=, a series of inputs like example_inputs"
                         + (", or use solver='search', which needs none" if asks.startswith("the solver") else ""))
    with apart():
        if budget is not None:
            batches = _first(calibration, example, None if options.solves else PROBES)
            small = within(model, example, batches, options, budget, formats)
            return small          # type: ignore[return-value]
        if options.calibrates:
            return calibrated(model, example, options, calibration)          # type: ignore[return-value]
        batches = _first(calibration, example, None if options.solves else MOST_MEASURED)
        return quantize(model, example, batches, options)          # type: ignore[return-value]


def _first(calibration: Iterable[Any] | None, example: Example, most: int | None = MOST_MEASURED) -> list[Example]:
    """The inputs on which errors are measured, and from which weights are solved."""
    if calibration is None:
        return [example]
    batches = list(itertools.islice(examples_of(calibration), most))
    if not batches:
        raise InputError("calibration gives no inputs: give at least one, like example_inputs")
    return batches


def plan_bits(model: nn.Module, example_inputs: Any, *, formats: Sequence[Any] = FORMATS, overrides: Mapping[Any, Any] | None = None,
              calibration: Iterable[Any] | None = None, solver: str | Solver = "nearest", probes: int = PROBES,
              capture: str = "auto") -> BitPlan:
    """What each of ``formats`` (schemes, and None for float) would do to the output at each weight: a `BitPlan`.

    It is solved for any `Budget` in no time, saved and loaded, and ``overrides=plan.solve(budget).overrides`` quantizes with it. ``probes``
    gradients are taken, of one batch of ``calibration`` each (by default of the example). Weights that ``overrides`` name are left out.

    >>> import torch, inro_fx
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> plan = inro_fx.plan_bits(model, torch.randn(8, 64))
    >>> plan.solve(inro_fx.Budget(bits=4.5)).bits <= 4.5
    True
    """
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise InputError(f"probes={probes!r}: at least one is needed")
    options = options_of(model, "int8", overrides, capture, solver=solver, with_data=calibration is not None)
    example = Example.of(example_inputs)
    with apart():
        return plan_for(model, example, _first(calibration, example, probes), options, formats, probes)


def prepare_graph(model: Model, example_inputs: Any, scheme: str | Scheme = "int8_static", *,
                  overrides: Mapping[Any, Any] | None = None, capture: str = "auto", qat: bool = False,
                  learn_scales: bool = False) -> Model:
    """A copy of ``model`` in eval mode with an observer in front of every linear whose input ``scheme`` quantizes statically.

    Run it on calibration data (any calls that the model takes), then give it to `convert_graph`. The observers are modules
    (``fc.weight_observer``), so that they are in ``state_dict`` and copies. The parameters are those of `quantize_graph`, as
    are the errors.

    With ``qat`` the copy is for training, in the mode of ``model``: every weight that would be quantized is rounded when it is
    read (``fc.weight_fake_quantize``), and so are the inputs of ``nn.Linear`` where the scheme quantizes activations; gradients
    go straight through to the float weights. ``learn_scales`` makes the scales parameters (LSQ). Train it as any model, then
    convert it.

    >>> import torch, inro_fx
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> prepared = inro_fx.prepare_graph(model, torch.randn(8, 64))
    >>> for _ in range(4):
    ...     _ = prepared(torch.randn(8, 64))
    >>> inro_fx.convert_graph(prepared)[0].weight_input_scale.shape
    torch.Size([1, 1])
    """
    if learn_scales and not qat:
        raise InputError("learn_scales=True is for training: add qat=True")
    options = options_of(model, scheme, overrides, capture)
    example = Example.of(example_inputs)
    with apart():
        prepared = prepare_training(model, example, options, learn_scales) if qat else prepare_calibration(model, example, options)
    return prepared          # type: ignore[return-value]


def convert_graph(prepared: Model, calibration: Iterable[Any] | None = None) -> Model:
    """The integer model of a prepared and calibrated one; ``prepared`` stays as it is, to be trained further and converted again.

    ``calibration``, if given, are inputs on which the errors of the report are measured, in the place of the example.

    Raises `ModelError` for a model that `prepare_graph` did not make, and `InputError` naming the first layer that no
    calibration data reached.
    """
    record: Prepared | None = getattr(prepared, "__dict__", {}).get("_inro_prepared")
    if record is None:
        raise ModelError(f"this {type(prepared).__name__} was not made by inro_fx.prepare_graph")
    with apart():
        return converted(prepared, record, _first(calibration, record.example))          # type: ignore[return-value]
