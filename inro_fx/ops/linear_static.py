"""inro_fx::linear_static(x, codes, scale, sums, input_scale, input_zero, bias, columns): a linear on integers of a fixed scale.

    x_codes = clamp(round(x / input_scale) + input_zero, -127, 127)
    y       = (x_codes @ codes.T - input_zero * sums) * input_scale * scale + bias

``sums`` int32 [out, 1] are the codes of each row added up: with them the zero point leaves the product. input_scale float32 and
input_zero int32 are [1, 1]. A row of x that holds NaN or infinity gives NaN. The gradient is that of the linear with dequantized
weights where x lies inside the range, and zero outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.products import int8_matmul, lift_scale
from .dequantize import reference as dequantize
from .library import as_rows, as_shape, check_dtypes, define
from .linear import fake

__all__ = ["linear_static"]

HIGHEST = 127


def reference(x: Tensor, codes: Tensor, scale: Tensor, sums: Tensor, input_scale: Tensor, input_zero: Tensor, bias: Tensor | None,
              columns: int) -> Tensor:
    check_dtypes(x, bias)
    flat = as_rows(x).float()
    rounded = ((flat / input_scale).round() + input_zero).clamp(-HIGHEST, HIGHEST)
    x_codes = rounded.nan_to_num(0.0).to(torch.int8)
    x_scale, undo = lift_scale(input_scale)
    y = (int8_matmul(x_codes, codes) - input_zero * sums.t()).float().mul_(x_scale).mul_(scale.t())
    y = y.mul_(undo) if bias is None else torch.addcmul(bias.float(), y, undo)
    y = torch.where(flat.isfinite().all(1, keepdim=True), y, torch.nan)
    return as_shape(y.to(x.dtype), (*x.shape[:-1], codes.shape[0]))


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, codes, scale, _, input_scale, input_zero, _, ctx.columns = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[0] else None, codes, scale, input_scale, input_zero)


def backward(ctx, grad: Tensor) -> tuple:  # type: ignore[no-untyped-def]
    x, codes, scale, input_scale, input_zero = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        inside = ((x / input_scale).round() + input_zero).abs() <= HIGHEST
        grad_x = grad @ dequantize(codes, scale, 8, 0, ctx.columns, grad.dtype) * inside
    if ctx.needs_input_grad[6]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, None, None, None, None, None, grad_bias, None


SCHEMA = ("linear_static(Tensor x, Tensor codes, Tensor scale, Tensor sums, Tensor input_scale, Tensor input_zero, Tensor? bias, "
          "int columns) -> Tensor")
linear_static = define(SCHEMA, reference, fake, setup, backward)
