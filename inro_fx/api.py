"""quantize_graph: from a model to the same model with integer weights. The steps stand in the order they run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .errors import InputError, ModelError
from .numerics import weight_error
from .passes.capture import Example, Session, capture, clone, run
from .passes.constants import owner_of
from .passes.fold_batchnorm import fold_batchnorm as fold_batchnorm_pass
from .passes.fuse import fuse
from .passes.measure import run_float, run_quantized
from .passes.module import Packed, PackedWeights, attach_graph, attach_packed, detach_graph
from .passes.quantize import quantize
from .passes.scheme import Scheme
from .passes.targets import Overrides, Plan, find_targets, plan
from .passes.verify import verify
from .report import make_record, stored_tensors
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
    check_model(model)
    if capture not in CAPTURES:
        raise InputError(f"capture={capture!r}: it is one of {', '.join(map(repr, CAPTURES))}")
    example = Example.of(example_inputs)
    overriding = Overrides({k: v if v is None else find_scheme(v) for k, v in (overrides or {}).items()}, model)
    batches = [example] if calibration is None else [Example.of(b) for b in itertools.islice(calibration, MOST_CALIBRATION)]
    if not batches:
        raise InputError("calibration gives no inputs")

    with torch.inference_mode(False), torch.no_grad(), _unchanged_if_it_fails(model, inplace):
        float_tensors = stored_tensors(model)
        root = model.eval() if inplace else clone(model)
        return _quantize(root, example, batches, default, overriding, capture, inplace, fold_batchnorm, strict, float_tensors)


def _quantize(root: nn.Module, example: Example, batches: list[Example], default: Scheme, overrides: Overrides, mode: str,
              inplace: bool, fold: bool, strict: bool, float_tensors: int) -> nn.Module:
    session, want = capture_model(root, example, mode, strict)
    if fold and "" in session.captures and fold_batchnorm_pass(root, session.captures[""].graph):
        for path in [*session.captures, *session.layers]:
            detach_graph(root.get_submodule(path))
        session, _ = capture_model(root, example, mode, strict)
    overrides.root = root
    targets = find_targets(session)
    chosen = plan(session, targets, default, overrides, find_scheme, session.written)
    decided = [t for t in targets if t.use.constant in chosen.decisions]

    graphs = {path: quantize(c.graph, chosen.decisions, path) for path, c in session.captures.items()}
    for path, graph in graphs.items():
        verify(graph, root.get_submodule(path), chosen.decisions, after="quantize")
        verify(fuse(graph, chosen.decisions), root.get_submodule(path), chosen.decisions, after="fuse")

    packer = _Packer(session, chosen)
    with progress_bar(2 * len(decided) * len(batches), "quantizing") as tick:
        errors: dict[Any, Any] = {}
        for batch in batches:
            _merge(errors, run_float(session, batch, graphs, decided, chosen.decisions, packer.pack, tick))
        for name in chosen.decisions:
            packer.pack(name)
        install(session, chosen, graphs)
        got = want
        for batch in batches:
            got = run_quantized(root, batch, session.captures, decided, errors, tick)
        if len(batches) > 1 or batches[0] is not example:
            got = run(root, example)
    root.__dict__["_inro"] = make_record(session, chosen, targets, graphs, errors, packer.facts, want, got, float_tensors)
    return root


def capture_model(root: nn.Module, example: Example, mode: str, strict: bool) -> tuple[Session, Any]:
    session, want = capture(root, example, mode, strict)
    if not any(isinstance(leaf, Tensor) for leaf in _tensors_of(want)):
        raise ModelError(f"the model returns no tensor on example_inputs (it returned {type(want).__name__}); "
                         f"give inputs for which forward computes something")
    return session, want


def _tensors_of(value: Any, depth: int = 3) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            yield from _tensors_of(list(vars(leaf).values()), depth - 1)


def check_model(model: nn.Module) -> None:
    """Refuses, by name and with the way out, what cannot be quantized."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for kind, advice in ((nn.DataParallel, "pass model.module"), (nn.parallel.DistributedDataParallel, "pass model.module"),
                         (torch.jit.ScriptModule, "pass the module that it was scripted from"),
                         (torch._dynamo.OptimizedModule if "torch._dynamo" in sys.modules else (),
                          "pass the module that was compiled, and compile the result")):
        if isinstance(model, kind):
            raise ModelError(f"a {type(model).__name__} cannot be quantized: {advice}")
    if "_inro" in model.__dict__ or any(isinstance(m, PackedWeights) for m in model.modules()):
        raise ModelError("the model is already quantized by inro_fx: quantize the float model instead")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise ModelError(f"{name} is not initialized yet: run the model once before quantizing it")
        if tensor.device.type == "meta":
            raise ModelError(f"{name} is on the meta device and has no data: load the weights before quantizing")


class _Packer:
    """Packs each weight once, when it is first needed, and measures what that cost."""

    def __init__(self, session: Session, chosen: Plan):
        self.session, self.chosen = session, chosen
        self.facts: dict[str, dict[str, Any]] = {}

    def pack(self, name: str) -> None:
        if name in self.facts:
            return
        decision = self.chosen.decisions[name]
        matrix = decision.layout.matrix(self.session.tensor(name).detach())
        parts = decision.scheme.pack(matrix)
        owner, _ = owner_of(self.session.root, name)
        for buffer, part in zip(decision.buffers, decision.scheme.parts, strict=True):
            owner.register_buffer(buffer, parts[part])
        restored = decision.scheme.unpack(parts, decision.layout.columns, decision.constant.dtype)
        scale = parts.get("scale")
        self.facts[name] = dict(
            error=weight_error(matrix, restored),
            bytes=sum(p.numel() * p.element_size() for p in parts.values()),
            scale=None if scale is None or not scale.numel() else (scale.min().item(), scale.mean().item(), scale.max().item()))


def install(session: Session, chosen: Plan, graphs: Mapping[str, Any]) -> None:
    """Drops the float weights and puts the quantized graphs in their places."""
    root = session.root
    for decision in chosen.decisions.values():
        holder, own = owner_of(root, decision.constant.name)
        for name in decision.constant.names:
            owner, leaf = owner_of(root, name)
            for kind in (owner._parameters, owner._buffers):
                kind.pop(leaf, None)
            buffers = tuple(leaf + b[len(own):] for b in decision.buffers)
            attach_packed(owner, leaf, Packed(decision.scheme, buffers, decision.layout, decision.constant.dtype),
                          holder, decision.buffers)
    for path, captured in {**session.layers, **session.captures}.items():
        module = root.get_submodule(path)
        strict = module.strict
        if path in session.captures:
            captured.graph = graphs[path]
        else:
            captured.graph = fuse(quantize(captured.graph, chosen.decisions, path), chosen.decisions)
            verify(captured.graph, module, chosen.decisions, after="fuse")
        attach_graph(module, captured, strict)
    session.forget_tensors()


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


@contextmanager
def progress_bar(total: int, label: str) -> Iterator[Any]:
    """A tqdm bar where tqdm is installed and somebody looks at a terminal; silence elsewhere."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc=label, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield bar.update


