"""gptq: one column of a weight after the other, each one's rounding error made up for by the columns that are still floats.

What is made small is |x (w - w_hat)|^2 over the calibration data, that is (w - w_hat) H (w - w_hat)^T with H the sum of x^T x (Frantar et
al., GPTQ, arXiv 2210.17323). Columns of large inputs go first; the scales are those of `search`, found before, so that any order of the
columns fits any groups. Then one column after the other takes the best code that there is with all others as they are, and the scales
are fitted to the codes, in ``sweeps`` turns that never make it worse (coordinate descent, as in QuantEase, arXiv 2309.01885).

gptaq also makes up for what the layers before have done: the weight is first moved to the least squares solution of x w'^T = x_float w^T
(Li et al., GPTAQ, arXiv 2504.02692; Zhang et al., Qronos, arXiv 2505.11695).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..numerics import Grid
from ..passes.solve.moments import Moments
from .search import fitted, storable, unfit

__all__ = ["GPTQ", "gptaq", "gptq"]

BLOCK = 128                # columns whose errors wait before the columns after them are told


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """``damping`` is the share of H's mean diagonal that is added to it; ``cross``: gptaq."""

    name: str = "gptq"
    damping: float = 0.05
    sweeps: int = 2
    cross: bool = False
    optional: ClassVar[bool] = False

    @property
    def needs(self) -> str:
        return "cross" if self.cross else "second"

    def refuse(self, scheme: Any) -> str | None:
        return unfit(scheme)

    def solve(self, matrix: Tensor, scheme: Any, moments: Sequence[Moments]) -> dict[str, Tensor]:
        """The parts of [out, in] floats; rows that no moments are of are solved as by `search`."""
        start = scheme.grid(matrix)
        work = matrix.float()
        codes, scale = start.codes(work), start.scale.expand(-1 if start.scale.shape[0] > 1 else matrix.shape[0], -1).clone()
        covered = torch.zeros(len(matrix), dtype=torch.bool)
        shared = start.scale.shape[0] == 1 and matrix.shape[0] != 1
        if shared:                                             # one scale for the weight: found first, for all of its rows
            start = storable(scheme, fitted(work, start, None))
            codes, scale = start.codes(work), start.scale.expand(matrix.shape[0], -1).clone()
        for one in moments:
            rows = work[one.rows]
            covered[one.rows] = True
            found, grid = self._solved(rows.reshape(len(one.squares), -1, rows.shape[1]), start.rows(one.rows), one,
                                       None if shared else scheme)
            codes[one.rows] = found
            if not shared:
                scale[one.rows] = grid.scale
        if not bool(covered.all()) and not shared:
            rest = ~covered
            grid = storable(scheme, fitted(work[rest], dataclasses.replace(start, scale=start.scale[rest]), None))
            codes[rest], scale[rest] = grid.codes(work[rest]), grid.scale
        return scheme.parts_of(codes, start if shared else dataclasses.replace(start, scale=scale))

    def _solved(self, weights: Tensor, start: Grid, moments: Moments, scheme: Any) -> tuple[Tensor, Grid]:
        """Codes [rows, columns] and grid of float32 ``weights`` [blocks, rows of a block, columns]; no ``scheme``: the grid is settled."""
        rows, columns = weights.shape[1:]
        assert moments.second is not None
        second = moments.second.double()
        mean = second.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
        if moments.cross is not None and self.cross:
            weights = _moved(weights, second, moments.cross, self.damping * mean)
        plain, second = second, second + torch.diag_embed((self.damping * mean)[:, None].expand(-1, columns))
        flat = weights.reshape(-1, columns)
        importance = second.diagonal(dim1=1, dim2=2).float().repeat_interleave(rows, 0)
        grid = start if scheme is None else storable(scheme, fitted(flat, start, importance))
        wide = grid.wide(columns)
        scale = wide[0].expand(len(flat), columns).reshape(weights.shape)
        zero = None if wide[1] is None else wide[1].expand(len(flat), columns).reshape(weights.shape)
        nearest = start.codes(flat)
        codes = _columns(weights, second, scale, zero, grid.low, grid.high)
        second = second.float()
        for _ in range(self.sweeps):
            codes = _sweep(weights, second, codes, scale, zero, grid.low, grid.high)
            if scheme is not None:
                grid = storable(scheme, _refitted(weights, second, codes, grid))
                scale = grid.wide(columns)[0].expand(len(flat), columns).reshape(weights.shape)
        codes = codes.reshape(-1, columns)
        worse = _losses(weights, plain, grid.values(codes)) > _losses(weights, plain, start.values(nearest))
        codes = torch.where(worse[:, None], nearest, codes)
        return codes, grid if scheme is None else start.where(worse[:, None], grid)


def _losses(weights: Tensor, second: Tensor, values: Tensor) -> Tensor:
    """(w - w_hat) H (w - w_hat)^T of each row."""
    error = (weights - values.reshape(weights.shape)).double()
    return ((error @ second) * error).sum(2).reshape(-1)


def _moved(weights: Tensor, second: Tensor, cross: Tensor, damping: Tensor) -> Tensor:
    """w (x_float^T x) (x^T x)^-1, written as a small step from w: damped, it stays near."""
    damped = second + torch.diag_embed(damping[:, None].expand(-1, second.shape[1]))
    step = torch.cholesky_solve(cross.double().transpose(1, 2), torch.linalg.cholesky(damped)).transpose(1, 2)
    return (weights.double() + weights.double() @ step).float()


def _columns(weights: Tensor, second: Tensor, scale: Tensor, zero: Tensor | None, low: int, high: int) -> Tensor:
    """The codes that GPTQ chooses, [blocks, rows, columns]."""
    blocks, rows, columns = weights.shape
    order = second.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    along = order[:, :, None].expand(-1, -1, rows)
    left = weights.transpose(1, 2).gather(1, along)                    # [blocks, columns, rows]: a column is contiguous
    scales = scale.transpose(1, 2).gather(1, along)
    zeros = None if zero is None else zero.transpose(1, 2).gather(1, along)
    second = second.gather(1, order[:, :, None].expand_as(second)).gather(2, order[:, None].expand_as(second))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(second)), upper=True).float()
    chosen = torch.empty_like(left)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = left.new_empty(blocks, end - start, rows)
        for i in range(start, end):
            column, step = left[:, i], scales[:, i]
            code = column / step
            if zeros is not None:
                code += zeros[:, i]
            code.round_().clamp_(low, high)
            chosen[:, i] = code
            value = code * step if zeros is None else (code - zeros[:, i]) * step
            error = (column - value) / upper[:, i, i, None]
            errors[:, i - start] = error
            left[:, i + 1:end].sub_(upper[:, i, i + 1:end, None] * error[:, None])
        left[:, end:] -= upper[:, start:end, end:].transpose(1, 2) @ errors
    return torch.empty_like(chosen).scatter_(1, along, chosen).transpose(1, 2)


def _sweep(weights: Tensor, second: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, low: int, high: int) -> Tensor:
    """Each column in turn takes the best codes there are with all others as they are."""
    blocks, rows, columns = weights.shape
    offset = codes if zero is None else codes - zero
    slope = ((weights - offset * scale) @ second).transpose(1, 2).contiguous()            # [blocks, columns, rows]: H times the error
    codes, scales = codes.transpose(1, 2).contiguous(), scale.transpose(1, 2)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        changes = slope.new_empty(blocks, end - start, rows)
        for i in range(start, end):
            step = scales[:, i]
            best = (codes[:, i] + slope[:, i] / (second[:, i, i, None] * step)).round_().clamp_(low, high)
            change = (best - codes[:, i]) * step
            changes[:, i - start], codes[:, i] = change, best
            slope[:, start:end].sub_(second[:, i, start:end, None] * change[:, None])
        slope[:, end:] -= second[:, start:end, end:].transpose(1, 2) @ changes
    return codes.transpose(1, 2)


def _refitted(weights: Tensor, second: Tensor, codes: Tensor, grid: Grid) -> Grid:
    """The best scale of each group for its codes, one group after the other."""
    columns = weights.shape[2]
    flat = codes.reshape(-1, columns)
    offset = (flat if grid.zero is None else flat - grid.wide(columns)[1]).reshape(weights.shape)
    error = weights - grid.values(flat).reshape(weights.shape)
    scale = grid.scale.reshape(*weights.shape[:2], -1).clone()
    size = min(grid.group, columns) if grid.group and scale.shape[2] > 1 else columns
    for group in range(scale.shape[2]):
        some = slice(group * size, (group + 1) * size)
        part = offset[:, :, some]
        slope = (error @ second[:, :, some] * part).sum(2)
        curve = ((part @ second[:, some, some]) * part).sum(2)
        change = torch.where(curve > 0, slope / curve, 0.0)
        change = torch.where((scale[:, :, group] + change) * scale[:, :, group] > 0, change, 0.0)
        scale[:, :, group] += change
        error[:, :, some] -= part * change[:, :, None]
    return dataclasses.replace(grid, scale=scale.reshape(grid.scale.shape))


gptq = GPTQ()
gptaq = GPTQ("gptaq", cross=True)
