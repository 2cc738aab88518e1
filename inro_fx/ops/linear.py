"""inro_fx::linear(x, codes, scale, bias, bits, group, columns): x [..., columns] -> [..., out], with dequantized weights.

Integer weights, float activations: x may be float32, float64, bfloat16 or float16, the result has its dtype.
Gradients flow to x and bias.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dequantize import reference as dequantize
from .library import as_rows, as_shape, check_dtypes, define

__all__ = ["linear"]

BLOCK = 1 << 18           # weights: a megabyte of float32


def reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int) -> Tensor:
    weight = dequantize(codes, scale, bits, group, columns, x.dtype)
    return as_shape(F.linear(as_rows(x), weight, bias), (*x.shape[:-1], codes.shape[0]))


def cpu(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int) -> Tensor:
    """Blocks of the weight are expanded into a cache's worth of floats and multiplied before the next one."""
    check_dtypes(x, bias)
    flat, out = as_rows(x), codes.shape[0]
    step = max(16, BLOCK // max(columns, 1))
    if step >= out:
        return reference(x, codes, scale, bias, bits, group, columns)
    y = x.new_empty(flat.shape[0], out)
    for start in range(0, out, step):
        rows = slice(start, start + step)
        part = scale if scale.shape[0] == 1 else scale[rows]
        weight = torch.ops.inro_fx.dequantize.inference(codes[rows], part, bits, group, columns, x.dtype)
        torch.mm(flat, weight.t(), out=y[:, rows])
    return as_shape(y if bias is None else y.add_(bias), (*x.shape[:-1], out))


def fake(x: Tensor, codes: Tensor, *rest: Any) -> Tensor:
    """Of every linear operator: ``columns`` is the last argument."""
    torch._check(x.shape[-1] == rest[-1], lambda: f"a linear of {rest[-1]} inputs got {x.shape[-1]}")
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, codes, scale, _, ctx.bits, ctx.group, ctx.columns = inputs
    ctx.save_for_backward(codes, scale)


def backward(ctx, grad: Tensor) -> tuple:  # type: ignore[no-untyped-def]
    codes, scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dequantize(codes, scale, ctx.bits, ctx.group, ctx.columns, grad.dtype)
    if ctx.needs_input_grad[3]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, None, None, grad_bias, None, None, None


linear = define("linear(Tensor x, Tensor codes, Tensor scale, Tensor? bias, int bits, int group, int columns) -> Tensor",
                reference, fake, setup, backward, cpu)
