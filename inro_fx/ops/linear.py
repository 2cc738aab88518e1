"""inro_fx::linear(x, codes, scale, bias, bits, group, columns): x [..., columns] -> [..., out], with dequantized weights.

Integer weights, float activations: x may be float32, float64, bfloat16 or float16, the result has its dtype.
Gradients flow to x and bias.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import kernel_for
from .dequantize import reference as dequantize
from .kernel_call import KERNEL_DTYPES, run_kernel
from .library import as_shape, define

__all__ = ["linear"]


def reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int) -> Tensor:
    weight = dequantize(codes, scale, bits, group, columns, x.dtype)
    return as_shape(F.linear(x.reshape(-1, x.shape[-1]), weight, bias), (*x.shape[:-1], codes.shape[0]))


def cpu(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int) -> Tensor:
    if x.dtype in KERNEL_DTYPES and x.shape[-1] == columns and kernel_for(
            "linear", bits, group, columns, x.numel() // max(columns, 1)) == "c":
        return run_kernel(x, codes, scale, bias, levels=2)
    return reference(x, codes, scale, bias, bits, group, columns)


def fake(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int) -> Tensor:
    torch._check(x.shape[-1] == columns, lambda: f"a linear of {columns} inputs got {x.shape[-1]}")
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
