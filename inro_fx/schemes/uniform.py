"""uniform(quant_max): symmetric codes -quant_max..quant_max, for any quant_max and granularity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops  # noqa: F401 - registers torch.ops.inro_fx
from ..errors import SchemeError
from ..numerics import Grid, codes_of, pack_bits, scale_of, storage_bits, unpack_bits
from ..numerics.affine import expand, grouped

__all__ = ["Uniform", "uniform"]

_TINY_HALF = 2.0**-14              # the smallest normal float16: scales below keep too few digits
_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclasses.dataclass(frozen=True)
class Uniform:
    """codes = clamp(round(w / scale), low, quant_max), scale = max(|w|) / divisor, w_hat = codes * scale.

    ``granularity`` is "channel" (a scale for each output channel), "tensor" (one scale), or the group size: a scale for
    each so many inputs of a channel, the last group of a row may be short. Codes are stored in the smallest of 2 to 8,
    16, 32 and 64 bits that holds them. The error of an element is at most scale / 2, plus the rounding of the result.
    """

    activation: ClassVar[Literal["float", "dynamic", "static"]] = "float"

    name: str
    quant_max: int
    granularity: str | int = "channel"
    low: int | None = None                 # -quant_max unless a scheme uses the lowest code too
    divisor: float | None = None           # quant_max unless a scheme says otherwise
    scale_dtype: str = "float32"           # or "float16", of groups
    full_range: bool = False               # codes from -quant_max - 1 on; scales have a sign, so that the largest |w| has the lowest code
    parts: tuple[str, ...] = dataclasses.field(default=("codes", "scale"), repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.quant_max, bool) or not isinstance(self.quant_max, int):
            raise SchemeError(f"quant_max must be an integer, got {self.quant_max!r}")
        if not 1 <= self.quant_max < 2**63:
            raise SchemeError(f"quant_max must be at least 1 and below 2**63, got {self.quant_max}")
        grouped = isinstance(self.granularity, int) and not isinstance(self.granularity, bool)
        if not (self.granularity in ("channel", "tensor") or (grouped and int(self.granularity) >= 1)):
            raise SchemeError(f'granularity must be "channel", "tensor" or a group size of at least 1, got {self.granularity!r}')
        if self.scale_dtype not in ("float32", "float16") or (self.scale_dtype == "float16" and not grouped):
            raise SchemeError(f'scale_dtype is "float32", or "float16" where groups have scales, got {self.scale_dtype!r}')

    @property
    def bits(self) -> int:
        """Bits that one code takes in memory."""
        return storage_bits(self.lowest, self.quant_max)

    @property
    def lowest(self) -> int:
        return self.low if self.low is not None else -self.quant_max - self.full_range

    @property
    def group(self) -> int:
        """The group size; 0 where a scale serves a whole row or more."""
        return self.granularity if isinstance(self.granularity, int) else 0

    def _scale(self, matrix: Tensor) -> Tensor:
        divisor = float(self.quant_max + self.full_range) if self.divisor is None else self.divisor
        scale = scale_of(matrix, divisor, None if self.granularity == "tensor" else self.group, self.full_range)
        if self.divisor is None:            # the scale that quantizing the result again would find, so that it changes nothing
            for _ in range(2):
                scale = (scale * divisor / divisor).where(scale != 1, scale)
        return self.stored_scale(scale)

    def stored_scale(self, scale: Tensor) -> Tensor:
        """float32 scales as near as they can be stored, as float32."""
        if self.scale_dtype == "float32":
            return scale
        near = scale.sign() * scale.abs().clamp(_TINY_HALF, torch.finfo(torch.float16).max)
        return near.half().float()

    def mean_of(self, matrix: Tensor) -> Tensor:
        """Mean |w| of what shares a scale, in the shape of the scales."""
        if self.granularity == "tensor":
            return matrix.abs().mean().reshape(1, 1)
        if not self.group:
            return matrix.abs().mean(1, keepdim=True)
        ones = grouped(torch.ones_like(matrix), self.group).sum(2)
        return grouped(matrix.abs(), self.group).sum(2) / ones

    def pack(self, matrix: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        """[out, in] floats -> codes and scale; ``scale``, if given, is taken in the place of max|w| / divisor."""
        scale = self._scale(matrix) if scale is None else self.stored_scale(scale)
        dtype = _DTYPES[max(self.bits, 8)]
        codes = codes_of(matrix, scale, self.lowest, self.quant_max, self.group, dtype)
        return self._stored(codes, scale)

    def grid(self, matrix: Tensor) -> Grid:
        """The numbers that `pack` rounds [out, in] floats to."""
        return Grid(self._scale(matrix), None, self.lowest, self.quant_max, self.group)

    def parts_of(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """[out, in] whole numbers that a solver chose on a grid -> the parts that are stored."""
        return self._stored(codes.to(torch.int8), grid.scale)

    def _stored(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        scale = scale if self.scale_dtype == "float32" else self.stored_scale(scale).half()
        return {"codes": pack_bits(codes, self.bits) if self.bits < 8 else codes, "scale": scale}

    def unpack(self, parts: Mapping[str, Any], columns: int, dtype: torch.dtype) -> Any:
        return torch.ops.inro_fx.dequantize.default(parts["codes"], parts["scale"], self.bits, self.group, columns, dtype)

    def integers(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """The codes as [out, columns] integers, whatever their storage."""
        return unpack_bits(parts["codes"], self.bits, columns) if self.bits < 8 else parts["codes"]

    def bound(self, matrix: Tensor) -> Tensor:
        step = expand(self._scale(matrix), matrix.shape[1], self.group).abs()
        half = step * (1 if self.full_range else 0.5)            # the largest on the side without the lowest code are a step off
        rounding = torch.finfo(matrix.dtype if matrix.is_floating_point() else torch.float32).eps
        return half * (1 + 1e-6) + matrix.abs().float() * (rounding + 2**-22)

    def operator(self, op: str) -> tuple[Callable[..., Any], tuple[Any, ...]] | str:
        if op in ("linear", "embedding"):
            return getattr(torch.ops.inro_fx, op).default, (self.bits, self.group)
        if op == "recurrent":
            return torch.ops.inro_fx.recurrent.default, (self.activation == "dynamic", self.bits, self.group)
        if op == "conv" and self.bits == 8 and not self.group:
            return torch.ops.inro_fx.conv.default, (self.activation == "dynamic", self.bits, self.group)
        return f"no integer operator for {op}" + (" of fewer bits, or with groups" if op == "conv" else "")


def uniform(quant_max: int, granularity: str | int = "channel", *, full_range: bool = False, scale_dtype: str = "float32",
            affine: bool = False) -> Uniform:
    """A scheme with codes -quant_max..quant_max; with ``full_range`` -quant_max - 1 as well, and scales that have a sign; with ``affine``
    the same codes, and a zero point for each scale.

    ``scale_dtype`` "float16" halves what the scales of groups take: four bits in groups of 32 are 4.5 bits a weight, and 5 with float32.

    Raises `SchemeError` for quant_max below 1 or of 2**63 and more, and for an impossible granularity.

    >>> uniform(7, granularity=32)
    Uniform(name='uniform(7, 32)', quant_max=7, granularity=32, low=None, divisor=None, scale_dtype='float32', full_range=False)
    """
    settings = [str(quant_max), *([] if granularity == "channel" else [str(granularity)]), *(["full_range"] if full_range else []),
                *([] if scale_dtype == "float32" else [scale_dtype])]
    if affine:
        from .affine import Affine
        name = f"uniform({', '.join([*settings, 'affine'])})"
        return Affine(name, quant_max, granularity, scale_dtype=scale_dtype, full_range=full_range)
    return Uniform(f"uniform({', '.join(settings)})", quant_max, granularity, scale_dtype=scale_dtype, full_range=full_range)
