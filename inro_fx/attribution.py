"""Whose fault is it: how much of the error of the output each weight has caused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .passes.capture.example import Example, tensors_in
from .passes.solve.gradients import Differentiated
from .passes.solve.plan import Plan

__all__ = ["shares_of"]


def shares_of(floats: nn.Module, example: Example, chosen: Plan, want: Any, got: Any) -> Mapping[str, float] | str:
    """The share of each weight in the difference of ``got``, the quantized model's output on ``example``, from ``want``; or why there
    are none.

    ``floats`` is a clone of the float model, whose parameters are replaced.
    """
    constants = {name: weight.constant for name, weight in chosen.weights.items()}
    def midway(name: str, tensor: Tensor) -> Tensor:
        weight = chosen.weights[name]
        assert weight.parts is not None
        return torch.lerp(tensor, weight.restored(weight.parts), 0.5)

    def see(name: str, gradient: Tensor) -> None:
        with torch.no_grad():
            restored = chosen.weights[name].restored(chosen.weights[name].parts or {})
            change = (restored - model.places[name]).mul_(2)
            shares[name] = shares.get(name, 0.0) + float(torch.sum(gradient * change, dtype=torch.float64)) / total
    shares: dict[str, float] = {}
    try:
        ours, theirs = ([t for t in tensors_in(value) if t.is_floating_point() and t.numel()] for value in (want, got))
        if [t.shape for t in theirs] != [t.shape for t in ours]:
            return "the quantized model returns other tensors"
        errors = [_difference(y, z) for y, z in zip(ours, theirs, strict=True)]
        total = sum(float(e.double().square().sum()) for e in errors)
        if total == 0 or total != total:
            return "the output has no error" if total == 0 else "the output has an infinite error"
        model = Differentiated(floats, example, constants, midway)
        model.backward(errors, see)
    except RuntimeError as error:
        return str(error)
    return shares


def _difference(want: Tensor, got: Tensor) -> Tensor:
    """The error of one output, 0 where the float one is infinite."""
    return torch.where(want.isfinite(), got.to(want.dtype) - want, 0).detach()
