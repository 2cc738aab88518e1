"""Quantization-aware training: weights (and activations, where the scheme quantizes them) rounded in forward, straight through in
backward.

    w_hat = unpack(pack(w)),  dL/dw = dL/dw_hat                                      any scheme
    w_hat = step * round(clamp(w / step)),  step learned                             LSQ (Esser et al., 2020), uniform schemes

The modules stay the user's: ``fc.weight`` is the rounded weight whenever code reads it, the float one is in ``parameters()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .errors import SchemeError
from .numerics.affine import expand
from .observers import MovingAverageObserver
from .passes.scheme import Layout, Scheme, activation_of_scheme

__all__ = ["FakeQuantizedInput", "FakeQuantizedWeight", "InputHook", "round_input"]


class _Straight(torch.autograd.Function):
    """Any value forwards, the identity backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class FakeQuantizedWeight(nn.Module):
    """A float weight of any shape -> the weight that its codes stand for, differentiable.

    With ``learn`` the scale is a parameter ``step`` (one for each channel or group), as LSQ has it: its gradient is scaled by
    1 / sqrt(weights per step * quant_max), and it starts at 2 * mean|w| / sqrt(quant_max).

    Raises `SchemeError` if ``learn`` is asked of a scheme that is not uniform.
    """

    def __init__(self, scheme: Scheme, layout: Layout, weight: Tensor, learn: bool = False):
        super().__init__()
        self.scheme, self.layout = scheme, layout
        self.step: nn.Parameter | None = None
        if not learn:
            return
        uniform: Any = scheme
        if not hasattr(scheme, "mean_of") or uniform.divisor is not None:
            raise SchemeError(f"learn_scales needs a uniform scheme, not {scheme.name}: train with learn_scales=False, or give the "
                              f"layer another scheme")
        average = uniform.mean_of(layout.matrix(weight.detach()).float())
        self.step = nn.Parameter(torch.where(average > 0, 2 * average / uniform.quant_max**0.5, 1.0))

    def forward(self, weight: Tensor) -> Tensor:
        matrix = self.layout.matrix(weight)
        if self.step is None:
            with torch.no_grad():
                rounded = self.scheme.unpack(self.scheme.pack(matrix.detach()), self.layout.columns, matrix.dtype)
            return self.layout.restore(_Straight.apply(matrix, rounded))
        return self.layout.restore(self._learned(matrix))

    def _learned(self, matrix: Tensor) -> Tensor:
        scheme: Any = self.scheme
        step = self.positive_step()
        slope = (step.numel() / (matrix.numel() * scheme.quant_max)) ** 0.5
        step = step * slope + (step - step * slope).detach()
        wide = expand(step, matrix.shape[1], scheme.group).to(matrix.dtype)
        inside = (matrix / wide).clamp(float(scheme.lowest), float(scheme.quant_max))
        return _Straight.apply(inside, inside.detach().round()) * wide

    def positive_step(self) -> Tensor:
        """The learned scale as it is used: at least the smallest that float32 codes can have."""
        assert self.step is not None
        return self.step.abs().clamp(min=1e-30)


class FakeQuantizedInput(nn.Module):
    """The input of a layer -> what its integers stand for, differentiable: with a range that training data gave, or with a scale for
    what lies in the last ``together`` dimensions, such as a linear's token or a convolution's sample.

    Outside of the range of a static scheme the gradient is zero.
    """

    def __init__(self, scheme: Any, together: int = 1):
        super().__init__()
        self.scheme, self.together = scheme, together
        self.observer = scheme.new_observer() if activation_of_scheme(scheme) == "static" else None
        if isinstance(self.observer, MovingAverageObserver):
            self.observer.averaging = 0.05
        self._searched: Any = None              # what the observer had seen when its range was last searched for
        self._parts = 1.0, 0                    # input_scale and input_zero of that range

    def forward(self, x: Tensor) -> Tensor:
        if self.observer is None:
            return round_input(x, self.together)
        if self.training:
            self.observer(x)
        if not int(self.observer.count):
            return x
        seen = int(self.observer.count), float(self.observer.low), float(self.observer.high)
        if seen != self._searched and (not self.training or seen[0] < 8 or seen[0] % 16 == 0 or self._searched is None):
            self._searched, self._parts = seen, self.scheme.calibrated(self.observer).input_parts()     # not at every step
        scale, zero = self._parts
        codes = (x / scale).round() + zero
        inside = codes.abs() <= 127
        return _Straight.apply(x * inside, ((codes.clamp(-127, 127) - zero) * scale).detach().to(x.dtype))


def round_input(x: Tensor, together: int = 1) -> Tensor:
    """x rounded to 255 steps of what lies in its last ``together`` dimensions, straight through backwards."""
    with torch.no_grad():
        largest = x.abs().amax(tuple(range(-together, 0)), keepdim=True).float()
        scale = torch.where(largest > 0, largest / 127, 1.0)
        rounded = ((x / scale).round().clamp(-127, 127) * scale).to(x.dtype)
    return _Straight.apply(x, rounded)


class InputHook:
    """The forward pre-hook that sends the input of a layer through its `FakeQuantizedInput`."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        round_ = getattr(module, self.name)
        return ((round_(args[0]), *args[1:]), kwargs) if args else ((), {**kwargs, "input": round_(kwargs["input"])})

