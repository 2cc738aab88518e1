"""Operators on codes with zero points: dequantize_affine, linear_affine, embedding_affine.

    w_hat = scale * (code - zero)        y = x @ (scale * code).T - sums(x) @ (scale * zero).T

``zero`` is stored as codes are: below eight bits packed, one for each scale. The first product is that of the operators without zero
points, on their kernels; the second is one of as many columns as there are groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..numerics.affine import expand, grouped
from ..numerics.bits import unpack_bits
from .library import as_rows, as_shape, define
from .linear import fake as fake_linear

__all__ = ["dequantize_affine", "embedding_affine", "linear_affine"]


def _offsets(scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """scale * zero, float32 of the shape of the scales."""
    whole = unpack_bits(zero, bits, scale.shape[1]) if bits < 8 else zero
    return scale.float() * whole.float()


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    wide = torch.ops.inro_fx.dequantize.inference(codes, scale, bits, group, columns, torch.float32)
    return (wide - expand(_offsets(scale, zero, bits), columns, group)).to(dtype)


def fake_dequantize(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


def linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, bits: int, group: int, columns: int) -> Tensor:
    y = torch.ops.inro_fx.linear.inference(x, codes, scale, bias, bits, group, columns)
    rows = as_rows(x).float()
    sums = grouped(rows, group).sum(2) if group and scale.shape[1] > 1 else rows.sum(1, keepdim=True)
    return as_shape((as_rows(y).float() - sums @ _offsets(scale, zero, bits).t()).to(y.dtype), y.shape)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, codes, scale, zero, _, ctx.bits, ctx.group, ctx.columns = inputs
    ctx.save_for_backward(codes, scale, zero)


def backward(ctx, grad: Tensor) -> tuple:  # type: ignore[no-untyped-def]
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        codes, scale, zero = ctx.saved_tensors
        grad_x = grad @ dequantize(codes, scale, zero, ctx.bits, ctx.group, ctx.columns, grad.dtype)
    if ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, None, None, None, grad_bias, None, None, None


def embedding(ids: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    flat = ids.reshape(-1)
    rows = dequantize(codes.index_select(0, flat), scale.index_select(0, flat), zero.index_select(0, flat), bits, group, columns, dtype)
    return as_shape(rows, (*ids.shape, columns))


def fake_embedding(ids: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int, columns: int, dtype: Any) -> Tensor:
    return codes.new_empty((*ids.shape, columns), dtype=dtype)


dequantize_affine = define("dequantize_affine(Tensor codes, Tensor scale, Tensor zero, int bits, int group, int columns, ScalarType dtype) "
                           "-> Tensor", dequantize, fake_dequantize)
linear_affine = define("linear_affine(Tensor x, Tensor codes, Tensor scale, Tensor zero, Tensor? bias, int bits, int group, int columns) "
                       "-> Tensor", linear, fake_linear, setup, backward)
embedding_affine = define("embedding_affine(Tensor ids, Tensor codes, Tensor scale, Tensor zero, int bits, int group, int columns, "
                          "ScalarType dtype) -> Tensor", embedding, fake_embedding)
