"""Our operators in ONNX's (opset 21), by the overloads that torch.export leaves in a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .numerics.bits import fields_of
from .ops.affine import dequantize_affine, embedding_affine, linear_affine
from .ops.conv import conv
from .ops.conv_static import ACTIVATIONS, conv_static
from .ops.dequantize import dequantize
from .ops.embedding import embedding
from .ops.linear import linear
from .ops.linear_dynamic import linear_dynamic
from .ops.linear_static import linear_static
from .ops.max_pool2d import max_pool2d
from .ops.quantize import dequantize_codes, quantize
from .ops.recurrent import recurrent

__all__ = ["INT8", "INT16", "INT32", "UINT8", "overloads", "translations"]

ONNX_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "tanh": (0,), "relu": (0,)}          # torch's gates in the order of ONNX
FLOAT, UINT8, INT8, INT16, INT32, DOUBLE = 1, 2, 3, 5, 6, 11        # ONNX's numbers of dtypes


def overloads(operator: Any) -> tuple[Any, Any]:
    """Those of an operator that torch.export may leave in a program."""
    return operator, operator.overloadpacket.inference


def translations() -> dict[Any, Callable]:
    """ONNX functions by our operators. Codes of convolutions have the order of their weights by then; see onnx_export.py."""
    from onnxscript import opset21
    op: Any = opset21

    def ints(*values: int) -> Any:
        return op.Constant(value_ints=list(values))

    def scalar(value: int) -> Any:
        return op.Cast(op.Constant(value_int=value), to=INT32)

    def unpacked(codes: Any, bits: int, columns: int) -> Any:
        """The inverse of `pack_bits`: uint8 [rows, bytes] -> int8 [rows, columns]."""
        whole, start = None, 0
        for width, shift in fields_of(bits):
            per_byte = 8 // width
            count = -(-columns // per_byte)
            byte = op.Cast(op.Slice(codes, ints(start), ints(start + count), ints(1)), to=INT32)
            pieces = [op.Unsqueeze(op.Mod(op.Div(byte, scalar(1 << width * i)), scalar(1 << width)), ints(2))
                      for i in range(per_byte)]
            field = op.Reshape(op.Concat(*pieces, axis=2), ints(-1, count * per_byte))
            field = op.Mul(op.Slice(field, ints(0), ints(columns), ints(1)), scalar(1 << shift))
            whole, start = field if whole is None else op.Add(whole, field), start + count
        return op.Cast(op.Sub(whole, scalar(1 << bits - 1)), to=INT8)

    def floats(codes: Any, scale: Any, bits: int, group: int, columns: int, shared: bool) -> Any:
        """[rows, columns] float32, or float64 of codes that have more than 16 bits. ``shared``: one scale serves all rows."""
        blocks = 0 < group < columns
        scale = op.Cast(scale, to=FLOAT)                        # of float16 ones, what DequantizeLinear gives would be float16
        if bits <= 16:
            if blocks:
                return op.DequantizeLinear(codes, scale, axis=1, block_size=group)
            return op.DequantizeLinear(codes, op.Squeeze(scale) if shared else op.Reshape(scale, ints(-1)), axis=0)
        if blocks:                                              # [rows, groups] -> [rows, columns]
            scale = op.Reshape(op.Expand(op.Unsqueeze(scale, ints(2)), ints(1, 1, group)), ints(-1, -(-columns // group) * group))
            scale = op.Slice(scale, ints(0), ints(columns), ints(1))
        return op.Mul(op.Cast(codes, to=DOUBLE), op.Cast(scale, to=DOUBLE))

    def onnx_dequantize(codes: Any, scale: Any, bits: int, group: int, columns: int, dtype: int) -> Any:
        shared = scale.shape[0] == 1 and codes.shape[0] != 1
        weight = floats(unpacked(codes, bits, columns) if codes.dtype == UINT8 else codes, scale, bits, group, columns, shared)
        return weight if dtype == FLOAT and bits <= 16 else op.Cast(weight, to=dtype)

    def onnx_linear(x: Any, codes: Any, scale: Any, bias: Any, bits: int, group: int, columns: int) -> Any:
        y = op.MatMul(x, op.Transpose(onnx_dequantize(codes, scale, bits, group, columns, x.dtype), perm=[1, 0]))
        return y if bias is None else op.Add(y, bias)

    def onnx_embedding(ids: Any, codes: Any, scale: Any, bits: int, group: int, columns: int, dtype: int) -> Any:
        if codes.dtype == INT8 and bits < 8:                    # used as a whole, too; and Gather takes no INT4
            return op.Gather(onnx_dequantize(codes, scale, bits, group, columns, dtype), ids)
        flat = op.Reshape(ids, ints(-1))
        shared = scale.shape[0] == 1 and codes.shape[0] != 1
        rows = op.Gather(codes, flat)
        rows = unpacked(rows, bits, columns) if codes.dtype == UINT8 else rows
        table = floats(rows, scale if shared else op.Gather(scale, flat), bits, group, columns, shared)
        return op.Cast(op.Reshape(table, op.Concat(op.Shape(ids), ints(columns), axis=0)), to=dtype)

    def with_zeros(codes: Any, scale: Any, zero: Any, bits: int, group: int, columns: int) -> Any:
        """[rows, columns] float32 of codes with zero points."""
        codes, zero = (unpacked(c, bits, n) if c.dtype == UINT8 else c for c, n in ((codes, columns), (zero, scale.shape[1])))
        offset = op.Mul(op.Cast(scale, to=FLOAT), op.Cast(zero, to=FLOAT))
        if 0 < group < columns:                                 # [rows, groups] -> [rows, columns]
            offset = op.Reshape(op.Expand(op.Unsqueeze(offset, ints(2)), ints(1, 1, group)), ints(-1, -(-columns // group) * group))
            offset = op.Slice(offset, ints(0), ints(columns), ints(1))
        return op.Sub(floats(codes, scale, bits, group, columns, False), offset)

    def onnx_dequantize_affine(codes: Any, scale: Any, zero: Any, bits: int, group: int, columns: int, dtype: int) -> Any:
        return op.Cast(with_zeros(codes, scale, zero, bits, group, columns), to=dtype)

    def onnx_linear_affine(x: Any, codes: Any, scale: Any, zero: Any, bias: Any, bits: int, group: int, columns: int) -> Any:
        y = op.MatMul(x, op.Transpose(onnx_dequantize_affine(codes, scale, zero, bits, group, columns, x.dtype), perm=[1, 0]))
        return y if bias is None else op.Add(y, bias)

    def onnx_embedding_affine(ids: Any, codes: Any, scale: Any, zero: Any, bits: int, group: int, columns: int, dtype: int) -> Any:
        return op.Gather(onnx_dequantize_affine(codes, scale, zero, bits, group, columns, dtype), ids)

    def onnx_linear_dynamic(x: Any, codes: Any, scale: Any, bias: Any, columns: int) -> Any:
        wide = op.Cast(x, to=FLOAT)
        largest = op.ReduceMax(op.Abs(wide), op.Constant(value_ints=[-1]), keepdims=1)
        step = op.Div(largest, op.Constant(value_float=127.0))
        step = op.Where(op.Less(step, op.Constant(value_float=torch.finfo(torch.float32).tiny)), op.Constant(value_float=1.0), step)
        rounded = op.Clip(op.Round(op.Div(wide, step)), op.Constant(value_float=-127.0), op.Constant(value_float=127.0))
        sums = op.MatMulInteger(op.Cast(rounded, to=INT8), op.Transpose(codes, perm=[1, 0]))
        y = op.Mul(op.Mul(op.Cast(sums, to=FLOAT), step), op.Transpose(scale, perm=[1, 0]))
        y = y if bias is None else op.Add(y, op.Cast(bias, to=FLOAT))
        return op.CastLike(y, x)

    def onnx_linear_static(x: Any, codes: Any, scale: Any, sums: Any, input_scale: Any, input_zero: Any, bias: Any,
                           columns: int) -> Any:
        zero = op.Cast(input_zero, to=FLOAT)
        rounded = op.Add(op.Round(op.Div(op.Cast(x, to=FLOAT), input_scale)), zero)
        rounded = op.Clip(rounded, op.Constant(value_float=-127.0), op.Constant(value_float=127.0))
        product = op.MatMulInteger(op.Cast(rounded, to=INT8), op.Transpose(codes, perm=[1, 0]))
        exact = op.Sub(product, op.Mul(input_zero, op.Transpose(sums, perm=[1, 0])))
        y = op.Mul(op.Mul(op.Cast(exact, to=FLOAT), input_scale), op.Transpose(scale, perm=[1, 0]))
        return op.CastLike(y if bias is None else op.Add(y, op.Cast(bias, to=FLOAT)), x)

    def onnx_recurrent(x: Any, h: Any, c: Any, batch_sizes: Any, codes_ih: Any, scale_ih: Any, codes_hh: Any, scale_hh: Any, bias_ih: Any,
                       bias_hh: Any, codes_hr: Any, scale_hr: Any, cell: str, reverse: bool, dynamic_input: bool, dynamic: bool,
                       bits: int, group: int) -> Any:
        """As ONNX's own layer on dequantized weights, whose gates stand in another order. Its activations are floats."""
        if batch_sizes is not None or codes_hr is not None:
            raise ValueError("ONNX has no recurrent layers of packed sequences, and none with projections")
        hidden = h.shape[-1]

        def reordered(gates: Any) -> Any:
            parts = [op.Slice(gates, ints(i * hidden), ints((i + 1) * hidden), ints(0)) for i in ONNX_GATES[cell]]
            return op.Concat(*parts, axis=0)

        def weight(codes: Any, scale: Any, columns: int) -> Any:
            return op.Unsqueeze(reordered(onnx_dequantize(codes, scale, bits, group, columns, x.dtype)), ints(0))
        biases = None if bias_ih is None else op.Unsqueeze(op.Concat(reordered(bias_ih), reordered(bias_hh), axis=0), ints(0))
        given = [x, weight(codes_ih, scale_ih, x.shape[-1]), weight(codes_hh, scale_hh, hidden), biases, None, op.Unsqueeze(h, ints(0))]
        how = {"hidden_size": hidden, "direction": "reverse" if reverse else "forward"}
        if cell == "lstm":
            y, last, last_c = op.LSTM(*given, op.Unsqueeze(c, ints(0)), **how)
            return op.Squeeze(y, ints(1)), op.Squeeze(last, ints(0)), op.Squeeze(last_c, ints(0))
        y, last = op.GRU(*given, linear_before_reset=1, **how) if cell == "gru" else op.RNN(*given, activations=[cell.capitalize()], **how)
        return op.Squeeze(y, ints(1)), op.Squeeze(last, ints(0)), op.Identity(h)             # nothing reads the third

    def cast(x: Any, dtype: int) -> Any:
        return x if x.dtype == dtype else op.Cast(x, to=dtype)

    def as_dtype(floats: Any, dtype: int) -> Any:
        """float32 as another dtype."""
        return floats if dtype == FLOAT else op.Cast(floats, to=dtype)

    def format_of(scale: Any, zero: Any) -> tuple[Any, Any]:
        """Scale and zero point of uint8 codes, from those that are stored: [1, 1] float32, and int32 as of int8."""
        return op.Squeeze(scale), op.Cast(op.Add(op.Squeeze(zero), scalar(128)), to=UINT8)

    def onnx_quantize(x: Any, scale: Any, zero: Any) -> Any:
        return op.QuantizeLinear(cast(x, FLOAT), *format_of(scale, zero))

    def onnx_dequantize_codes(codes: Any, scale: Any, zero: Any, dtype: int) -> Any:
        return as_dtype(op.DequantizeLinear(codes, *format_of(scale, zero)), dtype)

    def geometry_of(kernel: Any, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: int,
                    transposed: bool) -> dict[str, Any]:
        how = {"kernel_shape": [*kernel], "strides": [*stride], "pads": [*padding, *padding], "dilations": [*dilation], "group": groups}
        return {**how, "output_padding": [*output_padding]} if transposed else how

    def weight_floats(matrix: Any, scale: Any, kernel: Any, groups: int, transposed: bool) -> Any:
        """int8 in the order of a convolution's weight -> floats. Scales of groups of a transposed one lie along two axes: no
        DequantizeLinear has such."""
        out, channels = matrix.shape[0], matrix.shape[1] // math.prod(kernel)
        shape = (channels * groups, out // groups, *kernel) if transposed else (out, channels, *kernel)
        codes = op.Reshape(matrix, ints(*shape))
        if scale.shape[0] == 1:
            return op.DequantizeLinear(codes, op.Reshape(scale, op.Constant(value_ints=[])))
        if not transposed or groups == 1:
            return op.DequantizeLinear(codes, op.Reshape(scale, ints(-1)), axis=int(transposed))
        split = op.Reshape(op.Cast(codes, to=FLOAT), ints(groups, -1, *shape[1:]))
        by = op.Reshape(scale, ints(groups, 1, shape[1], *(1,) * len(kernel)))
        return op.Reshape(op.Mul(split, by), ints(*shape))

    def onnx_conv(x: Any, codes: Any, scale: Any, bias: Any, *rest: Any) -> Any:
        """With the activations as floats, also of a scheme that quantizes them by what they are."""
        groups, transposed = rest[5:7]
        weight = as_dtype(weight_floats(codes, scale, rest[0], groups, transposed), x.dtype)
        return (op.ConvTranspose if transposed else op.Conv)(x, weight, bias, **geometry_of(*rest[:7]))

    def activated(v: Any, activation: int, low: float, high: float) -> Any:
        name = ACTIVATIONS[activation]
        if name == "clamp":
            bounds = [None if math.isinf(bound) else op.Constant(value_float=bound) for bound in (low, high)]
            return op.Relu(v) if (low, high) == (0.0, math.inf) else op.Clip(v, *bounds)
        made = {"": lambda: v, "leaky_relu": lambda: op.LeakyRelu(v, alpha=low),
                "hardsigmoid": lambda: op.HardSigmoid(v, alpha=1 / 6, beta=0.5), "hardswish": lambda: op.HardSwish(v),
                "sigmoid": lambda: op.Sigmoid(v), "silu": lambda: op.Mul(v, op.Sigmoid(v)), "tanh": lambda: op.Tanh(v),
                "gelu": lambda: op.Gelu(v)}
        return made[name]()

    def onnx_conv_static(x: Any, codes: Any, scale: Any, x_scale: Any, x_zero: Any, bias: Any, residual: Any, r_scale: Any, r_zero: Any,
                         y_scale: Any, y_zero: Any, *rest: Any) -> Any:
        """Between DequantizeLinear and QuantizeLinear, with a bias of int32 codes: what runtimes compute in integers."""
        groups, transposed, activation, low, high, _, dtype = rest[5:]
        dtype, given = (dtype, x) if x.dtype == UINT8 else (x.dtype, onnx_quantize(x, x_scale, x_zero))
        inputs = [op.DequantizeLinear(given, *format_of(x_scale, x_zero)), weight_floats(codes, scale, rest[0], groups, transposed)]
        if bias is not None:
            step = op.Mul(op.Reshape(scale, ints(-1)), op.Reshape(x_scale, ints(-1)))
            whole = op.Cast(op.Round(op.Div(cast(bias, FLOAT), step)), to=INT32)
            shared = scale.shape[0] == 1
            inputs.append(op.DequantizeLinear(whole, op.Squeeze(step)) if shared else op.DequantizeLinear(whole, step, axis=0))
        y = (op.ConvTranspose if transposed else op.Conv)(*inputs, **geometry_of(*rest[:7]))
        if residual is not None:
            y = op.Add(y, residual if r_scale is None else op.DequantizeLinear(residual, *format_of(r_scale, r_zero)))
        y = activated(y, activation, low, high)
        return as_dtype(y, dtype) if y_scale is None else op.QuantizeLinear(y, *format_of(y_scale, y_zero))

    def onnx_max_pool2d(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
        y, _ = op.MaxPool(x, kernel_shape=[*kernel], strides=[*stride], pads=[*padding, *padding], dilations=[*dilation],
                          ceil_mode=int(ceil_mode))
        return y

    table: dict[Any, Callable] = {
        dequantize: onnx_dequantize, linear: onnx_linear, embedding: onnx_embedding, dequantize_affine: onnx_dequantize_affine,
        linear_affine: onnx_linear_affine, embedding_affine: onnx_embedding_affine, linear_dynamic: onnx_linear_dynamic,
        linear_static: onnx_linear_static, recurrent: onnx_recurrent, conv: onnx_conv, conv_static: onnx_conv_static,
        quantize: onnx_quantize, dequantize_codes: onnx_dequantize_codes, max_pool2d: onnx_max_pool2d}
    return {overload: translation for operator, translation in table.items() for overload in overloads(operator)}
