"""inro_fx::linear_dynamic(x, codes, scale, bias, columns): x [..., columns] quantized per token, an exact int8 product.

codes are int8 [out, in], scale float32 [out, 1] or [1, 1]. The two scales are applied in float32 to the int32 sums, so that
half-precision models neither overflow nor lose small activations; rows of extreme sizes have a third factor, a power of two.
The gradient is that of the linear with dequantized weights (straight through the rounding of x).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.products import int8_matmul, quantize_lifted
from .dequantize import reference as dequantize
from .library import as_rows, as_shape, check_dtypes, define
from .linear import fake

__all__ = ["linear_dynamic"]


def reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    check_dtypes(x, bias)
    x_codes, x_scale, undo = quantize_lifted(as_rows(x))
    y = int8_matmul(x_codes, codes).float().mul_(x_scale).mul_(scale.t())
    y = y.mul_(undo) if bias is None else torch.addcmul(bias.float(), y, undo)
    return as_shape(y.to(x.dtype), (*x.shape[:-1], codes.shape[0]))


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, codes, scale, _, ctx.columns = inputs
    ctx.save_for_backward(codes, scale)


def backward(ctx, grad: Tensor) -> tuple:  # type: ignore[no-untyped-def]
    codes, scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dequantize(codes, scale, 8, 0, ctx.columns, grad.dtype)
    if ctx.needs_input_grad[3]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, None, None, grad_bias, None


linear_dynamic = define("linear_dynamic(Tensor x, Tensor codes, Tensor scale, Tensor? bias, int columns) -> Tensor",
                        reference, fake, setup, backward)
