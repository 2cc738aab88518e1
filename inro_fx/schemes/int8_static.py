"""int8_static: int8 weights, and activations quantized to int8 with a range that calibration data gave; linears and convolutions
multiply integers, and between convolutions values stay codes.

    input_scale = (high - low) / 254, input_zero = round(-127 - low / input_scale)          low <= 0 <= high from an observer

With ``symmetric`` the zero point is 0 and high = -low. Recurrent layers quantize their state as in int8_dynamic; weights that are looked
up or otherwise used keep float activations, as in int8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import SchemeError
from ..numerics import Grid
from ..observers import OBSERVERS, Observer
from .int8_dynamic import int8_dynamic
from .uniform import Uniform

__all__ = ["Int8Static", "int8_static", "static"]


@dataclasses.dataclass(frozen=True)
class Int8Static(Uniform):
    """`Uniform` weights whose linears and convolutions quantize their input with a range ``low_input`` .. ``high_input``, None before
    calibration."""

    activation: ClassVar[Literal["float", "dynamic", "static"]] = "static"

    observer: str = "histogram"
    symmetric: bool = False
    low_input: float | None = None
    high_input: float | None = None
    parts: tuple[str, ...] = dataclasses.field(default=("codes", "scale", "sums", "input_scale", "input_zero"), repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observer not in OBSERVERS:
            raise SchemeError(f"unknown observer {self.observer!r}: the observers are {', '.join(OBSERVERS)}")

    def new_observer(self) -> Observer:
        """What watches the input of a layer of this scheme while calibration data runs."""
        return OBSERVERS[self.observer]()

    def calibrated(self, observer: Observer) -> Int8Static:
        """The scheme with the range that ``observer`` found. Raises `InputError` where it saw nothing."""
        low, high = (float(end) for end in observer.range())
        return dataclasses.replace(self, low_input=min(low, 0.0), high_input=max(high, 0.0))

    def without_inputs(self) -> Uniform:
        """The scheme for weights whose activations stay float."""
        return Uniform("int8", 127)

    def per_step(self) -> Uniform:
        """The scheme for recurrent layers, whose state is quantized by what it is at each step."""
        return int8_dynamic

    def input_range(self) -> tuple[float, float]:
        """(low, high) of the inputs that the codes reach."""
        low, high = self.low_input or 0.0, self.high_input or 0.0
        return (-max(-low, high), max(-low, high)) if self.symmetric else (low, high)

    def input_parts(self) -> tuple[float, int]:
        """(input_scale, input_zero) of the calibrated range."""
        low, high = self.input_range()
        scale = float(torch.tensor((high - low) / 254, dtype=torch.float32))
        if scale < torch.finfo(torch.float32).tiny:
            return 1.0, 0
        return scale, 0 if self.symmetric else max(-127, min(127, round(-127 - low / scale)))

    def pack(self, matrix: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        return self._with_inputs(super().pack(matrix, scale))

    def parts_of(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        return self._with_inputs(super().parts_of(codes, grid))

    def _with_inputs(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        input_scale, zero = self.input_parts()
        device = parts["codes"].device
        return {**parts, "sums": parts["codes"].sum(1, keepdim=True, dtype=torch.int32),
                "input_scale": torch.full((1, 1), input_scale, dtype=torch.float32, device=device),
                "input_zero": torch.full((1, 1), zero, dtype=torch.int32, device=device)}

    def operator(self, op: str) -> tuple[Callable[..., Any], tuple[Any, ...]] | str:
        if op == "conv":
            return torch.ops.inro_fx.conv_static.default, ()
        return (torch.ops.inro_fx.linear_static.default, ()) if op == "linear" else f"no integer operator for {op}"


int8_static = Int8Static("int8_static", 127)


def static(observer: str = "histogram", symmetric: bool = False) -> Int8Static:
    """The scheme int8_static with another observer, or with a symmetric range.

    >>> static("percentile").observer
    'percentile'
    """
    return dataclasses.replace(int8_static, observer=observer, symmetric=symmetric)
