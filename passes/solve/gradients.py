"""What errors of the weights do to the output of a model, to first order: from gradients, without a run for each weight.

A layer's results are linear in its weight, so that <gradient of its results, error of its results> is <G, E>: G is the gradient of the
weight, E its error. Two things follow.

    share(l)            <G_l, E_l> / |e|^2      with G_l of <y, e>, e the error of the output y: how much of e weight l has caused
    sensitivity(l, f)   mean over probes v of <G_lv, E_lf>^2, with G_lv of <y, v>: the square of the error that format f of weight l
                        alone would cause, for v of random signs (Hutchinson)

The gradients of shares are taken half the way from the float weights to the quantized ones, where the terms of second order cancel
(the midpoint rule for the integral of the gradient along that way): what the shares lack of 1 is of third order. Gradients are used as
they arrive: none is kept.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..capture.example import Example, run, tensors_in
from ..capture.session import brief
from ..constants import Constant, owner_of

__all__ = ["Differentiated", "difference", "probe_signs", "relative_error"]

See = Callable[[str, Tensor], None]


def _replace(root: nn.Module, constant: Constant, place: nn.Parameter) -> None:
    for each in constant.names:
        owner, leaf = owner_of(root, each)
        owner._parameters.pop(leaf, None)
        owner._buffers.pop(leaf, None)
        owner._parameters[leaf] = place


def _held(root: nn.Module, constant: Constant) -> Tensor:
    held: Tensor | None = None
    with contextlib.suppress(AttributeError):
        owner, leaf = owner_of(root, constant.name)
        held = owner._parameters.get(leaf)
        held = owner._buffers.get(leaf) if held is None else held
    if held is None or tuple(held.shape) != constant.shape:
        raise RuntimeError(f"{constant.name} is made by the first call")
    return held


class Differentiated:
    """One run of a model (a clone, whose parameters are replaced) from which gradients of its weights are taken.

    ``outputs`` are its floating-point tensors; ``moved(name, weight)`` gives what stands in the place of a weight. Raises RuntimeError with
    the reason where nothing can be differentiated.
    """

    def __init__(self, root: nn.Module, example: Example, constants: Mapping[str, Constant],
                 moved: Callable[[str, Tensor], Tensor] = lambda name, weight: weight):
        self.see: See | None = None
        self.places: dict[str, nn.Parameter] = {}
        for name, constant in constants.items():
            held = _held(root, constant)
            with torch.no_grad():
                plain = moved(name, held.clone() if held.is_inference() else held.detach())
                place = nn.Parameter(plain, requires_grad=True)
            place.register_post_accumulate_grad_hook(self._arrived(name))
            self.places[name] = place
            _replace(root, constant, place)
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")              # of torch, that values which want gradients are asked for as numbers
                result = run(root, example)
        except Exception as error:
            raise RuntimeError(f"the model does not run with gradients ({brief(error)})") from error
        self.outputs = [t for t in tensors_in(result) if t.is_floating_point() and t.numel()]
        if self.outputs and not any(t.requires_grad for t in self.outputs):
            raise RuntimeError("its output has no gradient")

    def _arrived(self, name: str) -> Callable[[Tensor], None]:
        weak = weakref.ref(self)                    # a hook is held by its tensor where the garbage collector does not look

        def arrived(place: Tensor) -> None:
            here = weak()
            if here is not None and here.see is not None and place.grad is not None:
                here.see(name, place.grad)
            place.grad = None
        return arrived

    def backward(self, directions: Sequence[Tensor], see: See, again: bool = False) -> None:
        """``see(name, gradient)`` is called for each weight that has one, of the sum of <output, direction>; ``again``: not the last."""
        self.see = see
        pairs = [(y, v.to(y.dtype)) for y, v in zip(self.outputs, directions, strict=True) if y.requires_grad]
        try:
            with torch.enable_grad():
                torch.autograd.backward([y for y, _ in pairs], [v for _, v in pairs], retain_graph=again)
        except Exception as error:
            raise RuntimeError(f"it has no gradient ({brief(error)})") from error
        finally:
            self.see = None


def probe_signs(outputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Directions of random signs, 0 where an output is infinite."""
    signs = [torch.randint(0, 2, y.shape, generator=generator).to(y.device, torch.float32) * 2 - 1 for y in outputs]
    return [torch.where(y.detach().isfinite(), s, 0.0) for y, s in zip(outputs, signs, strict=True)]


def relative_error(floats: Callable[[], nn.Module], batches: Sequence[Example], constants: Mapping[str, Constant],
                   changed: Callable[[str], Tensor | None]) -> float:
    """The relative error of the output, over all batches, with ``changed(name)`` in the place of each weight (None: as it is); ``floats``
    makes clones of the model."""
    own, others = floats(), floats()
    for name, constant in constants.items():
        value = changed(name)
        if value is not None:
            _replace(others, constant, nn.Parameter(value, requires_grad=False))
    return difference(own, others, batches)


def difference(floats: nn.Module, others: nn.Module, batches: Sequence[Example]) -> float:
    """The relative error of the output of ``others``, over all batches."""
    noise = signal = 0.0
    for batch in batches:
        pairs = zip(tensors_in(run(floats, batch)), tensors_in(run(others, batch)), strict=True)
        for y, z in ((y, z) for y, z in pairs if y.is_floating_point()):
            y, z = torch.where(y.isfinite(), y, 0).double(), torch.where(y.isfinite(), z, 0).double()
            noise, signal = noise + float((z - y).square().sum()), signal + float(y.square().sum())
    return (noise / signal) ** 0.5 if signal else 0.0
