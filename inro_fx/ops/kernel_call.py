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


def _check_sizes(codes: Tensor, scale: Tensor, bias: Tensor | None, columns: int,
                 fixed: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """The kernel reads memory by address: nothing may be smaller, or of another dtype, than it takes it to be."""
    out = codes.shape[0]
    right = codes.dtype == torch.int8 and codes.shape == (out, columns) and scale.dtype == torch.float32 \
        and scale.numel() in (1, out) and scale.shape[0] == scale.numel() and (bias is None or bias.shape == (out,))
    if right and fixed is not None:
        input_scale, input_zero, sums = fixed
        right = (input_scale.dtype, input_zero.dtype, sums.dtype) == (torch.float32, torch.int32, torch.int32) \
            and input_scale.numel() == input_zero.numel() == 1 and sums.numel() == out
    if not right:
        raise RuntimeError(f"codes {codes.dtype} {tuple(codes.shape)} and scale {scale.dtype} {tuple(scale.shape)} do not make a "
                           f"linear of {columns} inputs" + ("" if bias is None else f" with a bias of {tuple(bias.shape)}"))


def run_kernel(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, levels: int,
               fixed: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """x [..., in] -> [..., out] of x's dtype; half precision is widened to float32 for the kernel and rounded once after it."""
    check_dtypes(x, bias)
    _check_sizes(codes, scale, bias, x.shape[-1], fixed)
    flat = x.reshape(-1, x.shape[-1])
    if x.dtype != torch.float32:
        flat, bias = flat.float(), None if bias is None else bias.float()
    y = linear_int8(flat, codes, scale, None if bias is None else bias.contiguous(), levels, fixed=fixed)
    return as_shape(y if x.dtype == torch.float32 else y.to(x.dtype), (*x.shape[:-1], codes.shape[0]))
