"""The numbers that integer codes stand for: scale * (code - zero)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .affine import expand, grouped

__all__ = ["Grid"]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Codes ``low`` .. ``high`` of a matrix [rows, columns] with a scale for each ``group`` of its columns (0: for a row or more).

    ``scale`` is float32 [rows, groups], [rows, 1] or [1, 1], and may be negative; ``zero``, of the same shape, holds the whole numbers
    that stand for 0, None where that is the code 0 itself.
    """

    scale: Tensor
    zero: Tensor | None
    low: int
    high: int
    group: int

    def codes(self, matrix: Tensor) -> Tensor:
        """The nearest codes of [rows, columns] floats, as whole float32 numbers.

        >>> Grid(torch.tensor([[0.5]]), None, -7, 7, 0).codes(torch.tensor([[1.2, -9.0]]))
        tensor([[ 2., -7.]])
        """
        scale, zero = self.wide(matrix.shape[1])
        codes = matrix / scale
        return (codes if zero is None else codes + zero).round_().clamp_(self.low, self.high)

    def values(self, codes: Tensor) -> Tensor:
        """The numbers that codes stand for, float32 [rows, columns]."""
        scale, zero = self.wide(codes.shape[1])
        return (codes if zero is None else codes - zero) * scale

    def wide(self, columns: int) -> tuple[Tensor, Tensor | None]:
        """Scale and zero of each column, as tensors that broadcast against [rows, columns]."""
        zero = None if self.zero is None else expand(self.zero, columns, self.group)
        return expand(self.scale, columns, self.group), zero

    def sums(self, matrix: Tensor) -> Tensor:
        """What shares a scale added up: [rows, columns] -> the shape of the scales."""
        if self.scale.shape[0] == 1 and matrix.shape[0] != 1:
            return matrix.sum().reshape(1, 1)
        if self.scale.shape[1] == 1:
            return matrix.sum(1, keepdim=True)
        return grouped(matrix, self.group).sum(2)

    def where(self, mask: Tensor, other: Grid) -> Grid:
        """This grid where ``mask`` (of the shape of the scales, or [rows, 1]) says so, else ``other``."""
        zero = None if self.zero is None or other.zero is None else torch.where(mask, self.zero, other.zero)
        return dataclasses.replace(self, scale=torch.where(mask, self.scale, other.scale), zero=zero)

    def rows(self, chosen: slice) -> Grid:
        """Of some rows of the matrix."""
        if self.scale.shape[0] == 1:
            return self
        return dataclasses.replace(self, scale=self.scale[chosen], zero=None if self.zero is None else self.zero[chosen])
