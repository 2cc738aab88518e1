"""inro_fx::quantize(x, scale, zero) and inro_fx::dequantize_codes(codes, scale, zero, dtype): activations between integer operators.

    code = clamp(round(x / scale) + zero, -127, 127) + 128, uint8          number = scale * (code - 128 - zero)

scale float32 and zero int32 are [1, 1], as `int8_static` stores them; x / scale is one multiplication by 1 / scale in float32. Codes of
images [n, c, *size] have their channels side by side. NaN becomes the code of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define

__all__ = ["dequantize_codes", "dequantize_reference", "quantize", "quantize_reference", "side_by_side"]

HIGHEST = 127


def quantize_reference(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise RuntimeError(f"quantize needs floating-point numbers, got {x.dtype}")
    by = scale.reshape(()).reciprocal()
    codes = ((x.float() * by).round() + zero.reshape(())).clamp(-HIGHEST, HIGHEST).nan_to_num(HIGHEST) + 128
    return side_by_side(codes.to(torch.uint8))


def side_by_side(images: Tensor) -> Tensor:
    """[n, c, *size] with the channels of a pixel next to each other in memory; what is no image, as it is."""
    return images.movedim(1, -1).contiguous().movedim(-1, 1) if 3 <= images.dim() <= 5 else images.contiguous()


def dequantize_reference(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = (codes.to(torch.float32, memory_format=torch.contiguous_format) - (zero.reshape(()) + 128)) * scale.reshape(())
    return numbers.to(dtype)


def _fake_quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return side_by_side(torch.empty_like(x, dtype=torch.uint8))


def _fake_dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


quantize = define("quantize(Tensor x, Tensor scale, Tensor zero) -> Tensor", quantize_reference, _fake_quantize)
dequantize_codes = define("dequantize_codes(Tensor codes, Tensor scale, Tensor zero, ScalarType dtype) -> Tensor", dequantize_reference,
                          _fake_dequantize)
