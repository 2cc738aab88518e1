"""search: the scale of each group whose rounding loses least.

    scale = argmin over s of  sum_c  h_c |w_c - round(w_c / s) s|^p          s in factors of the grid that `pack` would take

h_c is the mean square of input c where calibration data gave it (Chee et al.'s and llama.cpp's "importance matrix"), else 1. The chosen
scale is then fitted to its codes by least squares, and both in turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..numerics import Grid
from ..passes.solve.moments import Moments

__all__ = ["Search", "fitted", "search", "storable", "unfit"]


def unfit(scheme: Any) -> str | None:
    """Why no solver but nearest can serve a scheme: it chooses among codes of 2 to 8 bits."""
    if not hasattr(scheme, "grid") or not hasattr(scheme, "parts_of"):
        return f"the scheme {scheme.name} has no grid to choose codes on"
    return f"the scheme {scheme.name} has codes of {scheme.bits} bits, and solvers choose among 2 to 8" if scheme.bits > 8 else None


def storable(scheme: Any, grid: Grid) -> Grid:
    """The grid with its scales as near as the scheme stores them."""
    return dataclasses.replace(grid, scale=scheme.stored_scale(grid.scale)) if hasattr(scheme, "stored_scale") else grid


@dataclasses.dataclass(frozen=True)
class Search:
    """``least`` is the smallest factor of the scale that is tried, in ``steps`` steps up to 1."""

    name: str = "search"
    least: float = 0.5
    steps: int = 20
    power: float = 2.4
    needs: ClassVar[str] = "squares"
    optional: ClassVar[bool] = True

    def refuse(self, scheme: Any) -> str | None:
        return unfit(scheme)

    def solve(self, matrix: Tensor, scheme: Any, moments: Sequence[Moments]) -> dict[str, Tensor]:
        """The parts of [out, in] floats."""
        importance = torch.ones(matrix.shape, dtype=torch.float32, device=matrix.device) if moments else None
        for one in moments:
            rows = matrix[one.rows].shape[0] // len(one.squares)
            importance[one.rows] = (one.squares / max(one.count, 1)).float().repeat_interleave(rows, 0)
        work = matrix.float()
        grid = storable(scheme, fitted(work, scheme.grid(matrix), importance, self.least, self.steps, 2.0 if moments else self.power))
        return scheme.parts_of(grid.codes(work), grid)


def fitted(matrix: Tensor, grid: Grid, importance: Tensor | None, least: float = 0.5, steps: int = 20, power: float = 2.0) -> Grid:
    """The best grid found for float32 [rows, columns]; ``importance`` of the same shape weighs the errors. Never worse than ``grid``."""
    if grid.scale.shape[0] == 1 and matrix.shape[0] != 1:
        return _fitted(matrix, grid, importance, least, steps, power)
    size = max(1, (1 << 19) // max(matrix.shape[1], 1))              # blocks of rows that stay in cache
    blocks = [_fitted(matrix[rows], grid.rows(rows), None if importance is None else importance[rows], least, steps, power)
              for rows in (slice(start, start + size) for start in range(0, matrix.shape[0], size))]
    return dataclasses.replace(grid, scale=torch.cat([b.scale for b in blocks]) if blocks else grid.scale)


def _fitted(matrix: Tensor, grid: Grid, importance: Tensor | None, least: float, steps: int, power: float) -> Grid:
    best, lowest = grid, _loss(matrix, grid, importance, power)
    for factor in torch.linspace(1.0, least, steps + 1)[1:].tolist():
        trial = dataclasses.replace(grid, scale=grid.scale * factor)
        loss = _loss(matrix, trial, importance, power)
        better = loss < lowest
        best, lowest = trial.where(better, best), torch.where(better, loss, lowest)
    for _ in range(3):
        codes = best.codes(matrix)
        offset = codes if best.zero is None else codes - best.wide(matrix.shape[1])[1]
        weighed = offset if importance is None else offset * importance
        scale = best.sums(weighed * matrix) / best.sums(weighed * offset)
        trial = dataclasses.replace(best, scale=torch.where(scale.isfinite() & (scale * best.scale > 0), scale, best.scale))
        loss = _loss(matrix, trial, importance, power)
        better = loss < lowest
        best, lowest = trial.where(better, best), torch.where(better, loss, lowest)
    return best


def _loss(matrix: Tensor, grid: Grid, importance: Tensor | None, power: float) -> Tensor:
    error = grid.values(grid.codes(matrix)).sub_(matrix).abs_()
    error = error.square_() if power == 2.0 else error.pow_(power)
    return grid.sums(error if importance is None else error.mul_(importance))


search = Search()
