"""inro_fx::conv_static(x, codes, scale, x_scale, x_zero, bias, residual, r_scale, r_zero, y_scale, y_zero, kernel, ..., activation, low,
high, channels_last, dtype).

A convolution on integers of fixed scales, and what follows it. Codes of images are uint8 in channels_last order, with the scale and the
zero point of a `quantize`; x may be codes or floats, which are quantized first. codes and geometry are those of `conv`:

    v = conv(x_codes - x_zero, codes) * x_scale * scale + bias + (residual - r_zero) * r_scale
    y = activation(v), or where y_scale is given, quantize(activation(v), y_scale, y_zero)

Sums are exact in int32, everything after is float32. ``activation`` is the number of one of `ACTIVATIONS`; a residual may be floats, too.
y as floats has the dtype of x, or ``dtype`` where x are codes, and with ``channels_last`` its channels side by side. Samples that hold NaN
or infinity are computed in floats. The gradient is that of the float convolution with dequantized weights, where x lies inside its range;
there is none through codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv import Sizes, channels_of, convolution_shape, float_conv, gradients, in_channels_last, weight_of
from .dequantize import reference as dequantize
from .library import define
from .quantize import dequantize_reference, quantize_reference, side_by_side

__all__ = ["ACTIVATIONS", "activate", "conv_static"]

ACTIVATIONS = ("", "clamp", "leaky_relu", "hardsigmoid", "hardswish", "sigmoid", "silu", "tanh", "gelu")         # in the order of kernels.h
_FUNCTIONS = {"hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "sigmoid": torch.sigmoid, "silu": F.silu, "tanh": torch.tanh,
              "gelu": F.gelu}


def activate(v: Tensor, activation: int, low: float, high: float) -> Tensor:
    """The activation of that number in `ACTIVATIONS`; ``low`` and ``high`` bound a clamp, ``low`` is the slope of a leaky ReLU."""
    name = ACTIVATIONS[activation]
    if name == "clamp":
        return v.clamp(low, high)
    if name == "leaky_relu":
        return F.leaky_relu(v, low)
    return _FUNCTIONS[name](v) if name else v


def reference(x: Tensor, codes: Tensor, scale: Tensor, x_scale: Tensor, x_zero: Tensor, bias: Tensor | None, residual: Tensor | None,
              r_scale: Tensor | None, r_zero: Tensor | None, y_scale: Tensor | None, y_zero: Tensor | None, kernel: Sizes, stride: Sizes,
              padding: Sizes, output_padding: Sizes, dilation: Sizes, groups: int, transposed: bool, activation: int, low: float,
              high: float, channels_last: bool, dtype: torch.dtype) -> Tensor:
    channels = channels_of(x, codes, kernel, groups)
    geometry = (stride, padding, output_padding, dilation, groups, transposed)
    each = (-1, *(1,) * len(kernel))
    plus = None if bias is None else bias.float().reshape(each)
    q = quantize_reference(x, x_scale, x_zero) if x.is_floating_point() else x
    shifted = (q.int() - (x_zero + 128)).double()
    v = float_conv(shifted, weight_of(codes.double(), channels, kernel, groups, transposed), None, *geometry).float()
    v = v * (x_scale.flatten() * scale.flatten()).reshape(each)
    if x.is_floating_point() and x.numel() and not bool(x.isfinite().all()):
        fits = x.isfinite().all(tuple(range(x.dim() - len(kernel) - 1, x.dim())), keepdim=True)
        matrix = weight_of(dequantize(codes, scale, 8, 0, codes.shape[1], torch.float32), channels, kernel, groups, transposed)
        v = v.where(fits, float_conv(x.float(), matrix, None, *geometry))
    v = v if plus is None else v + plus
    if residual is not None:
        floats = residual.is_floating_point() or r_scale is None or r_zero is None
        v = v + (residual if floats else dequantize_reference(residual, r_scale, r_zero, torch.float32))
    v = activate(v, activation, low, high)
    if y_scale is not None and y_zero is not None:
        return quantize_reference(v, y_scale, y_zero)
    return _laid_out(v.to(x.dtype if x.is_floating_point() else dtype), x, channels_last)


def _laid_out(y: Tensor, x: Tensor, channels_last: bool) -> Tensor:
    """Codes of images have their channels side by side, and so have floats whose input had, or where that is asked for."""
    last = y.dtype == torch.uint8 or channels_last or (x.dtype != torch.uint8 and in_channels_last(x))
    return side_by_side(y) if last else y.contiguous()


def fake(x: Tensor, codes: Tensor, scale: Tensor, x_scale: Tensor, x_zero: Tensor, bias: Tensor | None, residual: Tensor | None,
         r_scale: Tensor | None, r_zero: Tensor | None, y_scale: Tensor | None, y_zero: Tensor | None, kernel: Sizes, stride: Sizes,
         padding: Sizes, output_padding: Sizes, dilation: Sizes, groups: int, transposed: bool, activation: int,
         low: float, high: float, channels_last: bool, dtype: torch.dtype) -> Tensor:
    channels_of(x, codes, kernel, groups)
    shape = convolution_shape(x, codes, kernel, stride, padding, output_padding, dilation, transposed)
    dtype = torch.uint8 if y_scale is not None else x.dtype if x.is_floating_point() else dtype
    return _laid_out(x.new_empty(shape, dtype=dtype), x, channels_last)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.given = dict(zip(ARGUMENTS, inputs, strict=True))
    ctx.save_for_backward(*(ctx.given.pop(name) for name in ("x", "codes", "scale", "x_scale", "x_zero", "bias")))


def backward(ctx, grad: Tensor) -> tuple:  # type: ignore[no-untyped-def]
    x, codes, scale, x_scale, x_zero, bias = ctx.saved_tensors
    given = ctx.given
    if given["residual"] is not None or given["y_scale"] is not None or not x.is_floating_point():
        raise NotImplementedError("inro_fx::conv_static has no gradient through codes")
    if given["activation"]:
        with torch.no_grad():
            before = conv_static(x, codes, scale, x_scale, x_zero, bias, **{**given, "activation": 0})
        with torch.enable_grad():
            after = activate(before.requires_grad_(), given["activation"], given["low"], given["high"])
        grad, = torch.autograd.grad(after, before, grad)
    whole = (x * x_scale.reciprocal()).round() + x_zero
    seen = ((whole.clamp(-127, 127) - x_zero) * x_scale).to(x.dtype)
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], bias is not None and ctx.needs_input_grad[5]]
    geometry = tuple(given[name] for name in ARGUMENTS[11:18])
    grad_x, grad_scale, grad_bias = gradients(grad, seen, codes, scale, 8, 0, geometry, wanted)
    return (None if grad_x is None else grad_x * (whole.abs() <= 127), None, grad_scale, None, None, grad_bias, *(None,) * 17)


SCHEMA = ("conv_static(Tensor x, Tensor codes, Tensor scale, Tensor x_scale, Tensor x_zero, Tensor? bias, Tensor? residual, "
          "Tensor? r_scale, Tensor? r_zero, Tensor? y_scale, Tensor? y_zero, int[] kernel, int[] stride, int[] padding, "
          "int[] output_padding, int[] dilation, int groups, bool transposed, int activation, float low, float high, bool channels_last, "
          "ScalarType dtype) -> Tensor")
ARGUMENTS = [part.strip().split()[-1] for part in SCHEMA.partition("(")[2].partition(")")[0].split(",")]
conv_static = define(SCHEMA, reference, fake, setup, backward)
