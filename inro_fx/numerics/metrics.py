"""How far a quantized thing is from the float one.

    relative error = |x - x_hat| / |x|                (Frobenius norms)
    SQNR           = -20 log10(relative error) dB     infinite where nothing was lost
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["WeightError", "entropy", "output_error", "sqnr", "weight_error"]


@dataclasses.dataclass(frozen=True)
class WeightError:
    """``relative`` and ``sqnr`` (dB) of a weight, and its largest absolute error ``largest``."""

    relative: float
    sqnr: float
    largest: float


def sqnr(relative: float) -> float:
    """Signal to quantization noise in dB of a relative error.

    >>> sqnr(0.01)
    40.0
    """
    return math.inf if relative == 0 else -20 * math.log10(relative) if relative == relative else math.nan


def _relative(noise: float, signal: float) -> float:
    return 0.0 if noise == 0 else math.sqrt(noise / signal) if signal > 0 else math.inf


def entropy(codes: Tensor) -> float:
    """Shannon's bound on the bits that each of the integers takes: -sum p log2 p.

    >>> entropy(torch.tensor([0, 0, 1, 1], dtype=torch.int8))
    1.0
    """
    if not codes.numel():
        return 0.0
    if codes.dtype in (torch.int8, torch.uint8):
        counts = torch.bincount(codes.flatten().to(torch.int16) + 128)
    else:
        counts = codes.unique(return_counts=True)[1]
    p = counts[counts > 0].double() / codes.numel()
    return max(0.0, -float((p * p.log2()).sum()))


def weight_error(matrix: Tensor, restore: Callable[[slice], Tensor]) -> WeightError:
    """The error of a copy of ``matrix`` [out, in] whose rows ``restore`` gives, summed in float64 a block of rows at a time."""
    noise = signal = largest = 0.0
    step = max(1, (1 << 19) // max(matrix.shape[1], 1))
    for start in range(0, matrix.shape[0] if matrix.numel() else 0, step):
        rows = slice(start, start + step)
        x = matrix[rows]
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        difference = x - restore(rows).to(x.dtype)
        noise += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
        signal += torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2
        largest = max(largest, difference.abs().max().item())
    relative = _relative(noise, signal)
    return WeightError(relative, sqnr(relative), largest)


def output_error(want: Tensor, got: Tensor) -> float:
    """Relative error of an output; places where the float output is infinite (masks) count only if they differ."""
    if want.numel() == 0:
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    finite = want.isfinite()
    same = finite if bool(finite.all()) else finite | (got == want) | (got.isnan() & want.isnan())
    if not bool(same.all()):
        return math.inf
    x, y = torch.where(finite, want, 0).to(wide), torch.where(finite, got.to(want.dtype), 0).to(wide)
    noise = (x - y).abs().square().sum().item()
    return _relative(noise, x.abs().square().sum().item()) if noise == noise else math.nan
