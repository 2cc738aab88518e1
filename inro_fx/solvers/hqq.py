"""hqq: zero points that make a sparse error, without data; for schemes with zero points.

The error is split into a part that is kept sparse by a p-norm and the rest, and both are solved for in turns (half-quadratic splitting):

    e = shrink(w - w_hat)        |e|^p / beta, solved by generalized soft thresholding
    z = mean of code - (w - e) / scale, over a group          beta grows from turn to turn

(Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models, 2023.) There zero points are floats; here they are codes,
and so the scale is fitted to w - e as well. Of all turns the one whose p-norm is least counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..numerics import Grid
from ..passes.solve.moments import Moments
from .search import storable, unfit

__all__ = ["HQQ", "hqq"]


@dataclasses.dataclass(frozen=True)
class HQQ:
    """``power`` p, ``beta`` and its growth, and the number of turns."""

    name: str = "hqq"
    power: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    turns: int = 20
    needs: ClassVar[str] = "nothing"
    optional: ClassVar[bool] = True

    def refuse(self, scheme: Any) -> str | None:
        reason = unfit(scheme)
        return reason or (None if "zero" in scheme.parts else f"the scheme {scheme.name} has no zero points: int4_affine has, or "
                                                              f"inro_fx.uniform(..., affine=True)")

    def solve(self, matrix: Tensor, scheme: Any, moments: Sequence[Moments]) -> dict[str, Tensor]:
        work, start = matrix.float(), scheme.grid(matrix)
        size = max(1, (1 << 19) // max(work.shape[1], 1))
        grids = [self._solved(work[rows], start.rows(rows)) for rows in (slice(i, i + size) for i in range(0, len(work), size))]
        zero = torch.cat([g.zero for g in grids if g.zero is not None])
        grid = dataclasses.replace(start, scale=torch.cat([g.scale for g in grids]), zero=zero)
        grid = storable(scheme, grid)
        return dict(scheme.parts_of(grid.codes(work), grid))

    def _solved(self, matrix: Tensor, grid: Grid) -> Grid:
        beta, count = self.beta / matrix.abs().mean().clamp(min=1e-30), grid.sums(torch.ones_like(matrix))
        best, least = grid, self._loss(matrix, grid)
        free = grid
        for _ in range(self.turns):
            codes = free.codes(matrix)
            rest = matrix - free.values(codes)
            sparse = rest.sign() * (rest.abs() - rest.abs().clamp(min=1e-30).pow(self.power - 1) / beta).clamp(min=0)
            target, scale = matrix - sparse, free.wide(matrix.shape[1])[0]
            zero = (free.sums(codes - target / scale) / count).round().clamp(grid.low, grid.high)
            offset = codes - dataclasses.replace(free, zero=zero).wide(matrix.shape[1])[1]
            fit = free.sums(offset * target) / free.sums(offset.square())
            free = dataclasses.replace(grid, zero=zero, scale=torch.where(fit.isfinite() & (fit > 0), fit, free.scale))
            loss = self._loss(matrix, free)
            better = loss < least
            best, least = free.where(better, best), torch.where(better, loss, least)
            beta = beta * self.growth
        return best

    def _loss(self, matrix: Tensor, grid: Grid) -> Tensor:
        return grid.sums((matrix - grid.values(grid.codes(matrix))).abs().pow(self.power))


hqq = HQQ()
