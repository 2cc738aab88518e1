"""export_onnx: a quantized model as an ONNX file in which the weights stay integers.

Weights of 8 or 16 bits with a scale per channel or per tensor become DequantizeLinear (the QDQ pattern that ONNX Runtime and
others fuse), linears with quantized activations MatMulInteger. Codes below eight bits stay packed and are unpacked in the graph.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .atomic import write_bytes
from .errors import MissingTool, ModelError
from .numerics.bits import fields_of
from .ops.dequantize import dequantize
from .ops.embedding import embedding
from .ops.linear import linear
from .ops.linear_dynamic import linear_dynamic
from .ops.linear_static import linear_static
from .passes.capture.example import Example
from .passes.run.weights import PackedWeights

__all__ = ["export_onnx"]

OPSET = 21                 # the first with DequantizeLinear of 16-bit integers
MOST_BYTES = 2**31 - 1     # of one protobuf message
FLOAT, UINT8, INT8, INT16, INT32, DOUBLE = 1, 2, 3, 5, 6, 11        # ONNX's numbers of dtypes


def export_onnx(model: nn.Module, example_inputs: Any, path: str | os.PathLike[str]) -> Path:
    """Writes a quantized model to an ONNX file (opset 21); returns its path.

    ``example_inputs`` as for `quantize_graph`; every dimension stays dynamic that ``torch.export`` can keep so. Needs the
    packages onnx and onnxscript (``pip install onnx onnxscript``).

    Raises `MissingTool` without onnxscript, and `ModelError` for a model that was not quantized, that ``torch.export`` or
    the ONNX exporter does not take (the message says why), or that is larger than one ONNX file can be (2 GiB).
    """
    file = Path(path)
    if not isinstance(model, nn.Module) or not any(isinstance(m, PackedWeights) for m in model.modules()):
        raise ModelError(f"this {type(model).__name__} has no quantized weights: export float models with torch.onnx.export")
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingTool(f"export_onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    args, kwargs = Example.of(example_inputs).fresh()
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")                     # of torch about its own future
            program = _exported(model, args, kwargs).run_decompositions(_decompositions())
            onnx_program = torch.onnx.export(program, args, kwargs=kwargs, opset_version=OPSET, verbose=False, optimize=False,
                                             custom_translation_table=_translations())
            assert onnx_program is not None
            from onnxscript.optimizer import optimize_ir
            optimize_ir(onnx_program.model, should_fold=lambda node: False if any(map(_is_codes, node.inputs)) else None)
    except Exception as error:
        raise ModelError(f"the model cannot be exported to ONNX: {_innermost(error)}") from error
    finally:
        logger.setLevel(level)
    data = onnx_program.model_proto
    if (size := data.ByteSize()) > MOST_BYTES:
        raise ModelError(f"the model takes {size} bytes, and one ONNX file holds at most {MOST_BYTES}")
    return write_bytes(file, data.SerializeToString())


def _is_codes(value: Any) -> bool:
    """Integers of the model, which constant folding would turn into floats."""
    return value is not None and value.is_initializer() and value.dtype in (UINT8, INT8, INT16, INT32)


def _innermost(error: BaseException) -> str:
    """The first cause of a chain of errors, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _exported(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    def dynamic(x: Any) -> Any:
        return dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) if isinstance(x, Tensor) else None
    shapes = (tree_map(dynamic, args), tree_map(dynamic, kwargs))
    return torch.export.export(model, args, kwargs, strict=False,
                               dynamic_shapes={**_by_name(model, shapes[0]), **shapes[1]} if kwargs else shapes[0])


def _by_name(model: nn.Module, shapes: tuple) -> dict[str, Any]:
    return dict(zip(inspect.signature(model.forward).parameters, shapes, strict=False))


# ---- our operators: some become torch's before the translation, the rest have one of their own ----

def _overloads(table: dict[Any, Any]) -> dict[Any, Any]:
    """The same for the overloads that torch.export may leave of an operator."""
    return {overload: f for operator, f in table.items() for overload in (operator, operator.overloadpacket.inference)}


def _linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int) -> Tensor:
    return torch.nn.functional.linear(x, dequantize(codes, scale, bits, group, columns, x.dtype), bias)


def _embedding(ids: Tensor, codes: Tensor, scale: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    flat = ids.reshape(-1)
    rows = scale if scale.shape[0] == 1 and codes.shape[0] != 1 else scale.index_select(0, flat)
    return dequantize(codes.index_select(0, flat), rows, bits, group, columns, dtype).reshape(*ids.shape, columns)


def _decompositions() -> dict[Any, Callable]:
    return _overloads({linear: _linear, embedding: _embedding})


def _translations() -> dict[Any, Callable]:
    from onnxscript import opset21
    op: Any = opset21

    def ints(*values: int) -> Any:
        return op.Constant(value_ints=list(values))

    def unpacked(codes: Any, bits: int, columns: int) -> Any:
        """The inverse of `pack_bits`: uint8 [rows, bytes] -> int32 [rows, columns]."""
        whole, start = None, 0
        for width, shift in fields_of(bits):
            per_byte = 8 // width
            count = -(-columns // per_byte)
            byte = op.Cast(op.Slice(codes, ints(start), ints(start + count), ints(1)), to=INT32)
            pieces = [op.Unsqueeze(op.Mod(op.Div(byte, scalar(1 << width * i)), scalar(1 << width)), ints(2))
                      for i in range(per_byte)]
            field = op.Reshape(op.Concat(*pieces, axis=2), ints(0, count * per_byte)) if per_byte > 1 else byte
            field = op.Mul(op.Slice(field, ints(0), ints(columns), ints(1)), scalar(1 << shift))
            whole, start = field if whole is None else op.Add(whole, field), start + count
        return op.Sub(whole, scalar(1 << bits - 1))

    def scalar(value: int) -> Any:
        return op.Cast(op.Constant(value_int=value), to=INT32)

    def onnx_dequantize(codes: Any, scale: Any, bits: int, group: int, columns: int, dtype: int) -> Any:
        if bits in (8, 16) and not group:
            one = scale.shape[0] == 1 and codes.shape[0] != 1
            flat = op.Reshape(scale, op.Constant(value_ints=[] if one else [-1]))
            weight = op.DequantizeLinear(codes, flat, axis=0)
            return weight if dtype == FLOAT else op.Cast(weight, to=dtype)
        wide = DOUBLE if bits > 16 else FLOAT
        if group:                                               # [rows, groups] -> [rows, columns]
            groups = -(-columns // group)
            scale = op.Expand(op.Unsqueeze(scale, ints(2)), ints(1, 1, group))
            scale = op.Slice(op.Reshape(scale, ints(0, groups * group)), ints(0), ints(columns), ints(1))
        integers = unpacked(codes, bits, columns) if bits < 8 else codes
        return op.Cast(op.Mul(op.Cast(integers, to=wide), op.Cast(scale, to=wide)), to=dtype)

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
    return _overloads({dequantize: onnx_dequantize, linear_dynamic: onnx_linear_dynamic, linear_static: onnx_linear_static})
