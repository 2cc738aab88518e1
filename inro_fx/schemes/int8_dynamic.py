"""int8_dynamic: int8 weights, and activations quantized to int8 per token at run time; linears multiply integers.

    x_scale = max(|x|) / 127 for each row of the flattened input, x_codes = round(x / x_scale)
    y       = (x_codes @ codes.T) * x_scale * scale + bias            the product is exact in int32

Recurrent layers quantize the state of each step, and what the layers above the first are given, in the same way; the first one's input
keeps 15 bits. Convolutions have one scale for each sample. Other operators use the weights as int8 does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch

from .uniform import Uniform

__all__ = ["Int8Dynamic", "int8_dynamic"]


@dataclasses.dataclass(frozen=True)
class Int8Dynamic(Uniform):
    """`Uniform` weights whose linears and recurrent layers quantize their input per token."""

    activation: ClassVar[Literal["float", "dynamic", "static"]] = "dynamic"

    def operator(self, op: str) -> tuple[Callable[..., Any], tuple[Any, ...]] | str:
        if op == "linear":
            return torch.ops.inro_fx.linear_dynamic.default, ()
        return super().operator(op)

    def without_inputs(self) -> Uniform:
        """The scheme for weights whose activations stay float."""
        return Uniform("int8", 127)


int8_dynamic = Int8Dynamic("int8_dynamic", 127)
