"""inro_fx::quantize(x, scale, zero) and inro_fx::dequantize_codes(codes, scale, zero, dtype): activations between integer operators.

    code = clamp(round(x / scale) + zero, -127, 127) + 128, uint8          number = scale * (code - 128 - zero)

scale float32 and zero int32 are [1, 1], as `int8_static` stores them; x / scale is one multiplication by 1 / scale in float32. Codes of
images [n, c, h, w] lie in channels_last order. NaN becomes the code of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define

__all__ = ["dequantize_codes", "dequantize_reference", "quantize", "quantize_reference"]

HIGHEST = 127


def quantize_reference(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise RuntimeError(f"quantize needs floating-point numbers, got {x.dtype}")
    by = scale.reshape(()).reciprocal()
    codes = ((x.float() * by).round() + zero.reshape(())).clamp(-HIGHEST, HIGHEST).nan_to_num(HIGHEST) + 128
    return _laid_out(codes.to(torch.uint8))


def _laid_out(codes: Tensor) -> Tensor:
    return codes.contiguous(memory_format=torch.channels_last if codes.dim() == 4 else torch.contiguous_format)


def dequantize_reference(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    return ((codes.int() - (zero.reshape(()) + 128)).float() * scale.reshape(())).to(dtype)


def _fake_quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return _laid_out(torch.empty_like(x, dtype=torch.uint8))


def _fake_dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(codes, dtype=dtype)


quantize = define("quantize(Tensor x, Tensor scale, Tensor zero) -> Tensor", quantize_reference, _fake_quantize)
dequantize_codes = define("dequantize_codes(Tensor codes, Tensor scale, Tensor zero, ScalarType dtype) -> Tensor", dequantize_reference,
                          _fake_dequantize)
