"""inro_fx::dequantize(codes, scale, bits, group, columns, dtype): codes [out, ...] -> weights [out, columns] of ``dtype``.

``bits`` below 8 says how the codes are packed into bytes, ``group`` how many columns share a scale (0: scale [out, 1] or
[1, 1] serves the whole row). Computed in float32 (float64 for wide codes) and rounded once. No gradient flows to codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.affine import unscale
from ..numerics.bits import unpack_bits
from .library import define

__all__ = ["dequantize"]


def reference(codes: Tensor, scale: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    if bits < 8:
        codes = unpack_bits(codes, bits, columns)
    if codes.shape[1] != columns:
        raise RuntimeError(f"codes of {codes.shape[1]} columns are no weights of {columns}")
    groups = -(-columns // group) if group > 0 and columns else 1
    if scale.shape[1] not in (1, groups):
        raise RuntimeError(f"scales of {scale.shape[1]} groups are none of {columns} columns in groups of {group}")
    return unscale(codes, scale, group, dtype)


def fake(codes: Tensor, scale: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


dequantize = define("dequantize(Tensor codes, Tensor scale, int bits, int group, int columns, ScalarType dtype) -> Tensor",
                    reference, fake)
