"""int4_affine: sixteen codes between the smallest and the largest weight of a group, with the zero point stored as a code.

    scale = (max(w, 0) - min(w, 0)) / (2 quant_max + 1)        zero = round(-quant_max - 1 - min(w, 0) / scale)
    codes = clamp(round(w / scale) + zero)                     w_hat = (codes - zero) * scale
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import SchemeError
from ..numerics import Grid, pack_bits
from ..numerics.affine import expand, grouped
from .uniform import Uniform

__all__ = ["Affine", "int4_affine"]

_TINY = torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class Affine(Uniform):
    """Codes -quant_max - 1 .. quant_max of 2 to 8 bits, a scale and a zero point for each group or channel; for weights that lie to one
    side of 0."""

    parts: tuple[str, ...] = dataclasses.field(default=("codes", "scale", "zero"), repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits > 8 or self.granularity == "tensor" or self.full_range or self.low is not None or self.divisor is not None:
            raise SchemeError(f"an affine scheme has codes of 2 to 8 bits, and a zero point for each group or channel: quant_max at most "
                              f"127, got {self.quant_max} and {self.granularity!r}")

    @property
    def lowest(self) -> int:
        return -self.quant_max - 1

    @property
    def mean_of(self) -> Any:
        raise AttributeError("scales of an affine scheme are not learned")

    def grid(self, matrix: Tensor) -> Grid:
        work = matrix.float()
        blocks = grouped(work, self.group) if self.group else work[:, None]
        high, low = blocks.amax(2).clamp(min=0), blocks.amin(2).clamp(max=0)
        scale = (high - low) / (2 * self.quant_max + 1)
        scale = self.stored_scale(torch.where(scale >= _TINY, scale, 1.0))
        zero = (self.lowest - low / scale).round_().clamp_(self.lowest, self.quant_max)
        return Grid(scale, zero, self.lowest, self.quant_max, self.group)

    def pack(self, matrix: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        grid = self.grid(matrix)
        step = max(1, (1 << 19) // max(matrix.shape[1], 1))
        blocks = [slice(start, start + step) for start in range(0, matrix.shape[0], step)]
        codes = torch.cat([grid.rows(rows).codes(matrix[rows].float()).to(torch.int8) for rows in blocks])
        return self.parts_of(codes, grid)

    def parts_of(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        assert grid.zero is not None
        zero = grid.zero.to(torch.int8)
        return {**super().parts_of(codes, grid), "zero": pack_bits(zero, self.bits) if self.bits < 8 else zero}

    def unpack(self, parts: Mapping[str, Any], columns: int, dtype: torch.dtype) -> Any:
        held = (parts[name] for name in self.parts)
        return torch.ops.inro_fx.dequantize_affine.default(*held, self.bits, self.group, columns, dtype)

    def bound(self, matrix: Tensor) -> Tensor:
        step = expand(self.grid(matrix).scale, matrix.shape[1], self.group)
        rounding = torch.finfo(matrix.dtype if matrix.is_floating_point() else torch.float32).eps
        return step * (1 + 1e-3) + matrix.abs().float() * (rounding + 2**-22)          # half of rounding, half of the zero point's

    def operator(self, op: str) -> tuple[Callable[..., Any], tuple[Any, ...]] | str:
        if op in ("linear", "embedding"):
            return getattr(torch.ops.inro_fx, f"{op}_affine").default, (self.bits, self.group)
        return f"no integer operator for {op} with zero points"


int4_affine = Affine("int4_affine", 7, 32, scale_dtype="float16")
