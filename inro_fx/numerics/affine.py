"""Symmetric uniform quantization of a matrix: one scale per row, per group of a row, or for all of it.

    scale = max(|w|) / divisor                     float32, computed in float32 or wider
    codes = clamp(round(w / scale), low, high)     round half to even, as torch.round
    w_hat = codes * scale

Groups run along the columns; the last group of a row may be short. A group of more columns than there are is the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["codes_of", "expand", "grouped", "scale_of", "unscale"]

_TINY = torch.finfo(torch.float32).tiny


def _work_dtype(dtype: torch.dtype, high: float) -> torch.dtype:
    """float32 holds every integer up to 2**24; beyond that, and for float64 weights, float64 is used."""
    return torch.float64 if dtype == torch.float64 or high > 2**24 else torch.float32


def grouped(matrix: Tensor, group: int) -> Tensor:
    """[out, in] -> [out, groups, group], the last group filled up with zeros."""
    rows, columns = matrix.shape
    group = min(group, max(columns, 1))
    groups = -(-columns // group) if columns else 0
    return torch.nn.functional.pad(matrix, (0, groups * group - columns)).reshape(rows, groups, group)


def scale_of(matrix: Tensor, divisor: float, group: int | None, signed: bool = False) -> Tensor:
    """The scale of each row ([out, 1]), of each group ([out, groups]) for ``group`` > 0, or of everything ([1, 1], group None).

    ``group`` 0 is the whole row. A row of zeros, or of numbers too small for a float32 scale, has scale 1. With ``signed`` the number of
    the largest magnitude divided by the scale is -divisor, so that a scale may be negative.

    >>> scale_of(torch.tensor([[1., -127.], [0., 0.]]), 127, 0)
    tensor([[1.],
            [1.]])
    """
    work = matrix.to(_work_dtype(matrix.dtype, divisor))
    rows, columns = work.shape
    if work.numel() == 0:
        shape = (1 if group is None else rows, 1 if not group else -(-columns // group))
        return torch.ones(shape, dtype=torch.float32, device=work.device)
    if group is None:
        high, low = work.amax().reshape(1, 1), work.amin().reshape(1, 1)
    elif group == 0:
        high, low = work.amax(1, keepdim=True), work.amin(1, keepdim=True)
    else:
        blocks = grouped(work, group)
        high, low = blocks.amax(2), blocks.amin(2)
    scale = (torch.maximum(high, -low) / divisor).float()
    if signed:
        scale = torch.where(high > -low, -scale, scale)
    return torch.where(scale.abs() >= _TINY, scale, 1.0)


def codes_of(matrix: Tensor, scale: Tensor, low: int, high: int, group: int | None, dtype: torch.dtype) -> Tensor:
    """[out, in] floats -> [out, in] integers of ``dtype`` in low..high.

    >>> codes_of(torch.tensor([[1., -127.]]), torch.tensor([[1.]]), -127, 127, 0, torch.int8)
    tensor([[   1, -127]], dtype=torch.int8)
    """
    work = _work_dtype(matrix.dtype, high)
    columns = matrix.shape[1]
    codes = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    step = max(1, (1 << 19) // max(columns, 1))              # blocks of rows that stay in cache
    for start in range(0, matrix.shape[0], step):
        rows = slice(start, start + step)
        block = matrix[rows].to(work)
        wide = expand(scale if scale.shape[0] == 1 else scale[rows], columns, group).to(work)
        # float64 cannot hold 2**63 - 1: the clamp of such codes is done after the conversion
        codes[rows] = block.div(wide).round_().clamp_(float(low), float(high)).to(dtype).clamp_(low, high)
    return codes


def expand(scale: Tensor, columns: int, group: int | None) -> Tensor:
    """[rows, groups] -> a tensor that broadcasts against [rows, columns]."""
    if not group or scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(min(group, columns), 1)[:, :columns]


def unscale(codes: Tensor, scale: Tensor, group: int | None, dtype: torch.dtype) -> Tensor:
    """codes * scale, computed in float32 or wider and rounded once to ``dtype``.

    >>> unscale(torch.tensor([[2, -3]], dtype=torch.int8), torch.tensor([[0.5]]), 0, torch.float32)
    tensor([[ 1.0000, -1.5000]])
    """
    wide = torch.float64 if dtype == torch.float64 or codes.dtype in (torch.int32, torch.int64) else torch.float32
    return (codes.to(wide) * expand(scale, codes.shape[1], group).to(wide)).to(dtype)
