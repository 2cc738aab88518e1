"""Exact products of integer matrices, on any device, from what plain torch offers."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["int8_matmul", "lift_scale", "quantize_lifted", "quantize_rows"]

_EXACT_COLUMNS = 1024      # 1024 * 128 * 128 = 2**24: float32 adds up that many products of int8 codes without rounding
# As in kernels.h: numbers beyond these are multiplied by a power of two, which is taken off the results
_LIFT, _LOW, _HIGH = 2.0**64, 2.0**-96, 2.0**96


def quantize_lifted(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric int8 codes of each row: [rows, in] floats -> [rows, in] int8 in -127..127, and two [rows, 1] float32 factors.

    x is about codes * scale * undo. ``undo`` is a power of two: 1, but for rows so small that their scale would be no normal
    number, or so large that the scale times a sum of products would overflow. NaN and infinity in a row make its scale NaN, so that
    they show in the result.

    >>> quantize_lifted(torch.tensor([[0., 127.], [2.0**100, 0.]]))[1:]
    (tensor([[1.0000e+00],
            [5.4110e+08]]), tensor([[1.0000e+00],
            [1.8447e+19]]))
    """
    x = x.float()
    largest = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    lift = torch.where(largest < _LOW, _LIFT, torch.where(largest > _HIGH, 1 / _LIFT, torch.ones_like(largest)))
    scale = largest * lift / 127
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale).add_(largest - largest)     # NaN of what is not finite
    codes = (x * lift).div_(scale).nan_to_num_(0.0).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scale, 1 / lift


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same with the two factors as one, which may be denormal: [rows, in] int8 and [rows, 1] float32. Zeros have scale 1.

    >>> quantize_rows(torch.tensor([[0., 127., -254.]]))
    (tensor([[   0,   64, -127]], dtype=torch.int8), tensor([[2.]]))
    """
    codes, scale, undo = quantize_lifted(x)
    return codes, torch.where(codes.any(1, keepdim=True) | scale.isnan(), scale * undo, 1.0)


def lift_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of int8 activations as one that overflows times no sum of products, and a power of two, as in `quantize_lifted`.

    >>> lift_scale(torch.tensor([[0.5]])), lift_scale(torch.tensor([[2.0**100]]))
    ((tensor([[0.5000]]), tensor([[1.]])), (tensor([[6.8719e+10]]), tensor([[1.8447e+19]])))
    """
    lift = torch.where(scale > _HIGH / 127, 1 / _LIFT, torch.ones_like(scale))
    return scale * lift, 1 / lift


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """[rows, in] int8 times the transpose of [out, in] int8 -> [rows, out] int32, exact.

    On CUDA ``torch._int_mm`` runs it where its rules hold (more than 16 rows, in and out divisible by 8). Everywhere
    else float32 products over blocks of 1024 columns are exact, for at most 2**24 is summed, and as fast as float32 is.

    >>> int8_matmul(torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3, 4], [5, 6]], dtype=torch.int8))
    tensor([[11, 17]], dtype=torch.int32)
    """
    if torch.is_autocast_enabled(a.device.type):                   # float32 here is for exactness, not for speed
        with torch.autocast(a.device.type, enabled=False):
            return int8_matmul(a, b)
    rows, columns = a.shape
    if a.is_cuda and rows > 16 and columns % 8 == 0 and b.shape[0] % 8 == 0 and columns and b.shape[0]:
        return torch._int_mm(a, b.t())
    if columns <= _EXACT_COLUMNS:
        return (a.float() @ b.float().t()).to(torch.int32)
    total = torch.zeros(rows, b.shape[0], dtype=torch.int32, device=a.device)
    for start in range(0, columns, _EXACT_COLUMNS):
        block = slice(start, start + _EXACT_COLUMNS)
        total += (a[:, block].float() @ b[:, block].float().t()).to(torch.int32)
    return total
