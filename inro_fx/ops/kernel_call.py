"""From an operator's arguments to a C kernel: any rank, float32, bfloat16 and float16 activations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import linear_int8
from .library import as_shape

__all__ = ["KERNEL_DTYPES", "check_dtypes", "run_kernel"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dtypes(x: Tensor, bias: Tensor | None) -> None:
    """Raises what a float linear raises: RuntimeError for inputs that are no floats, or not of the bias's dtype."""
    if not x.is_floating_point():
        raise RuntimeError(f"a quantized linear needs floating-point inputs, got {x.dtype}")
    if bias is not None and bias.dtype != x.dtype:
        raise RuntimeError(f"a linear with {x.dtype} inputs has a {bias.dtype} bias")


def run_kernel(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, levels: int,
               fixed: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """x [..., in] -> [..., out] of x's dtype; half precision is widened to float32 for the kernel and rounded once after it."""
    check_dtypes(x, bias)
    flat = x.reshape(-1, x.shape[-1])
    if x.dtype != torch.float32:
        flat, bias = flat.float(), None if bias is None else bias.float()
    y = linear_int8(flat, codes, scale, None if bias is None else bias.contiguous(), levels, fixed=fixed)
    return as_shape(y if x.dtype == torch.float32 else y.to(x.dtype), (*x.shape[:-1], codes.shape[0]))
