"""inro_fx::conv(x, codes, scale, bias, kernel, stride, padding, output_padding, dilation, groups, transposed, dynamic, bits, group).

x is [n, in, *size] of one to three dimensions (or one sample [in, *size]), codes are int8 [out, *kernel * (in / groups)]: the taps of an
output channel, and of each tap the input channels. ``transposed`` is torch's conv_transpose, whose output channels count group by group.

``dynamic`` quantizes each sample with one scale, and products are exact in int32:

    x_scale = max(|x|) / 127        x_codes = round(x / x_scale)        y = conv(x_codes, codes) * x_scale * scale + bias

else x keeps 15 bits (see `linear`). Where integers are slower than floats on this CPU, x stays float in both, and so does a sample that
does not fit them (NaN, infinity). The gradient is that of the convolution with dequantized weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .dequantize import reference as dequantize
from .library import define

__all__ = ["channels_of", "conv", "convolution_shape", "float_conv", "gradients", "in_channels_last", "weight_of"]

Sizes = Sequence[int]


def weight_of(codes: Tensor, in_channels: int, kernel: Sizes, groups: int, transposed: bool) -> Tensor:
    """A matrix [out, *kernel * (in / groups)] as the weight of torch's convolutions: [out, in / groups, *kernel], transposed
    [in, out / groups, *kernel]."""
    taps = codes.reshape(codes.shape[0], *kernel, in_channels // groups).movedim(-1, 1)
    if not transposed:
        return taps
    split = taps.reshape(groups, codes.shape[0] // groups, in_channels // groups, *kernel).transpose(1, 2)
    return split.reshape(in_channels, codes.shape[0] // groups, *kernel)


def float_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, output_padding: Sizes, dilation: Sizes,
               groups: int, transposed: bool) -> Tensor:
    """torch's convolution, for a batch or one sample; the results lie as x does, however the weight lies."""
    single = x.dim() == weight.dim() - 1
    weight = weight if x.dim() == 4 and in_channels_last(x) else weight.contiguous()
    y: Tensor = torch.convolution(x[None] if single else x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return y[0] if single else y


def channels_of(x: Tensor, codes: Tensor, kernel: Sizes, groups: int) -> int:
    """The number of input channels. Raises RuntimeError for an input that does not fit the weight."""
    axis = x.dim() - len(kernel) - 1
    channels = codes.shape[1] // max(1, torch.Size(kernel).numel()) * groups
    if axis not in (0, 1) or x.shape[axis] != channels:
        raise RuntimeError(f"a convolution of {channels} input channels and a kernel {tuple(kernel)} got an input {tuple(x.shape)}")
    return channels


def reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, kernel: Sizes, stride: Sizes, padding: Sizes,
              output_padding: Sizes, dilation: Sizes, groups: int, transposed: bool, dynamic: bool, bits: int, group: int) -> Tensor:
    channels = channels_of(x, codes, kernel, groups)
    geometry = (stride, padding, output_padding, dilation, groups, transposed)
    if not dynamic:
        matrix = dequantize(codes, scale, bits, group, codes.shape[1], x.dtype)
        return float_conv(x, weight_of(matrix, channels, kernel, groups, transposed), bias, *geometry)
    axes = tuple(range(x.dim() - len(kernel) - 1, x.dim()))
    largest = x.float().abs().amax(axes, keepdim=True) if x.numel() else x.new_ones(()).float()
    x_scale = (largest / 127).where(largest > 0, 1)
    fits = x_scale.isfinite() & (x_scale >= torch.finfo(torch.float32).tiny) & (largest <= 2.0**96)
    x_codes = (x.float() * x_scale.reciprocal()).round().where(fits, 0)
    y = float_conv(x_codes.double(), weight_of(codes.double(), channels, kernel, groups, transposed), None, *geometry).float()
    by = scale.flatten().reshape(-1, *(1,) * len(kernel)) * x_scale
    y = (y * by if bias is None else y * by + bias.float().reshape(-1, *(1,) * len(kernel))).to(x.dtype)
    if bool(fits.all()):
        return y
    return y.where(fits, reference(x, codes, scale, bias, kernel, *geometry, False, bits, group))      # of a sample that does not fit


def convolution_shape(x: Tensor, codes: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, output_padding: Sizes, dilation: Sizes,
                      transposed: bool) -> list[Any]:
    """[n, out, *result] of an input [n, in, *size]; without n where x has none. Raises RuntimeError where the kernel is larger than x."""
    sizes: list[Any] = []
    for i, size in enumerate(x.shape[-len(kernel):]):
        reach = dilation[i] * (kernel[i] - 1)
        sizes.append((size - 1) * stride[i] - 2 * padding[i] + reach + output_padding[i] + 1 if transposed
                     else (size + 2 * padding[i] - reach - 1) // stride[i] + 1)
        torch._check(sizes[-1] > 0, lambda: f"a kernel {tuple(kernel)} is larger than the padded input {tuple(x.shape)}")
    return [*x.shape[:-len(kernel) - 1], codes.shape[0], *sizes]


def fake(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, kernel: Sizes, stride: Sizes, padding: Sizes, output_padding: Sizes,
         dilation: Sizes, groups: int, transposed: bool, *rest: Any) -> Tensor:
    channels_of(x, codes, kernel, groups)
    y = x.new_empty(convolution_shape(x, codes, kernel, stride, padding, output_padding, dilation, transposed))
    return y.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and in_channels_last(x) else y


def in_channels_last(x: Tensor) -> bool:
    """Do the channels of images lie side by side (and not only because there is one channel or pixel)?"""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, codes, scale, bias, *ctx.rest = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, codes, scale)


def gradients(grad: Tensor, x: Tensor, codes: Tensor, scale: Tensor, bits: int, group: int, geometry: tuple[Any, ...],
              wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of x, scale and bias, as far as they are ``wanted``; ``geometry`` as in the schema, from the kernel on."""
    kernel, stride, padding, output_padding, dilation, groups, transposed = geometry
    channels = channels_of(x, codes, kernel, groups)
    matrix = dequantize(codes, scale, bits, group, codes.shape[1], grad.dtype)
    grad_scale = None
    if wanted[1]:                                       # scales that come from a batch norm which is being trained
        by_codes = float_conv(x, weight_of(codes.to(x.dtype), channels, kernel, groups, transposed), None, *geometry[1:])
        each = [a for a in range(grad.dim()) if a != grad.dim() - len(kernel) - 1]
        grad_scale = (grad * by_codes).float().sum(each).unsqueeze(1)
        grad_scale = grad_scale if scale.shape[0] != 1 else grad_scale.sum(0, keepdim=True)
    single = x.dim() == len(kernel) + 1
    grad_x, _, grad_bias = torch.ops.aten.convolution_backward(
        grad[None] if single else grad, x[None] if single else x, weight_of(matrix, channels, kernel, groups, transposed), [codes.shape[0]],
        stride, padding, dilation, transposed, output_padding, groups, [wanted[0], False, wanted[2]])
    return grad_x[0] if single and grad_x is not None else grad_x, grad_scale, grad_bias


def backward(ctx, grad: Tensor) -> tuple:  # type: ignore[no-untyped-def]
    x, codes, scale = ctx.saved_tensors
    *geometry, _, bits, group = ctx.rest
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.biased and ctx.needs_input_grad[3]]
    grad_x, grad_scale, grad_bias = gradients(grad, x, codes, scale, bits, group, tuple(geometry), wanted)
    return (grad_x, None, grad_scale, grad_bias, *(None,) * 10)


conv = define("conv(Tensor x, Tensor codes, Tensor scale, Tensor? bias, int[] kernel, int[] stride, int[] padding, int[] output_padding, "
              "int[] dilation, int groups, bool transposed, bool dynamic, int bits, int group) -> Tensor", reference, fake, setup, backward)
