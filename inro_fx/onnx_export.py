"""export_onnx: a quantized model as an ONNX file in which the weights stay integers.

Weights of at most 16 bits become DequantizeLinear (the QDQ pattern that ONNX Runtime and others fuse), with a scale per tensor,
per channel or per block; codes of up to four bits are INT4 there, those of five to seven INT8. Linears with quantized activations
become MatMulInteger. A table that is only looked up keeps codes below eight bits packed, and unpacks the rows that are asked for.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .atomic import write_bytes
from .errors import MissingTool, ModelError
from .numerics.bits import fields_of, unpack_bits
from .ops.dequantize import dequantize
from .ops.embedding import embedding
from .ops.linear import linear
from .ops.linear_dynamic import linear_dynamic
from .ops.linear_static import linear_static
from .ops.recurrent import recurrent
from .passes.capture.example import Example
from .passes.run.weights import PackedWeights

__all__ = ["export_onnx"]

OPSET = 21                 # the first with DequantizeLinear of 4-bit and 16-bit integers, and of blocks
MOST_BYTES = 2**31 - 1     # of one protobuf message
ONNX_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "tanh": (0,), "relu": (0,)}          # torch's gates in the order of ONNX
SIZE = object()            # in the steps of a program: a number that depends on the sizes of its inputs
FLOAT, UINT8, INT8, INT16, INT32, DOUBLE = 1, 2, 3, 5, 6, 11        # ONNX's numbers of dtypes


def export_onnx(model: nn.Module, example_inputs: Any, path: str | os.PathLike[str]) -> Path:
    """Writes a quantized model to an ONNX file (opset 21); returns its path.

    ``example_inputs`` as for `quantize_graph`; every dimension stays dynamic that ``torch.export`` can keep so, under the name
    ``<input>_dim_<number>``. Where that is not so of the first one, a UserWarning says it. A branch on
    ``torch.onnx.is_in_onnx_export()`` is taken. Needs the packages onnx and onnxscript (``pip install onnx onnxscript``).

    Raises `MissingTool` without onnxscript, and `ModelError` for a model that was not quantized, that ``torch.export`` or
    the ONNX exporter does not take (the message says why), or that is larger than one ONNX file can be (2 GiB).
    """
    file = Path(path)
    if not isinstance(model, nn.Module) or not any(isinstance(m, PackedWeights) for m in model.modules()):
        raise ModelError(f"this {type(model).__name__} has no quantized weights: export float models with torch.onnx.export")
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingTool(f"export_onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")                     # of torch about its own future
            program, fixed = _for_any_rows(model, Example.of(example_inputs))
            _unpack(program)
            onnx_program = torch.onnx.export(program, opset_version=OPSET, verbose=False, optimize=False,
                                             custom_translation_table=_translations())
            assert onnx_program is not None
            _finish(onnx_program.model)
    except Exception as error:
        raise ModelError(f"the model cannot be exported to ONNX: {_innermost(error)}") from error
    finally:
        logger.setLevel(level)
    data = onnx_program.model_proto
    if (size := data.ByteSize()) > MOST_BYTES:
        raise ModelError(f"the model takes {size} bytes, and one ONNX file holds at most {MOST_BYTES}")
    if fixed:
        warnings.warn(fixed, UserWarning, stacklevel=2)
    return write_bytes(file, data.SerializeToString())


def _innermost(error: BaseException) -> str:
    """The first cause of a chain of errors, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ---- torch.export ----

def _for_any_rows(model: nn.Module, example: Example) -> tuple[torch.export.ExportedProgram, str]:
    """The model as a program, and what to say where it takes no other number of rows than the example has.

    torch.export makes a constant of a size of 1. Two rows are shown to it then, and the program for them is taken where it computes
    the same: a forward may ask whether there is one row only.
    """
    program = _exported(model, *example.fresh())
    rows = next((x.shape[0] for x in tree_leaves((example.args, example.kwargs)) if isinstance(x, Tensor) and x.dim() > 1), 0)
    why = "torch.export makes a constant of that number"
    if rows == 1:
        try:
            doubled = _exported(model, *tree_map(_two_rows, example.fresh()))
            if not _alike(_steps(program), _steps(doubled)):
                why = "the model computes something else with two rows"
            elif not _fixes_rows(doubled):
                program = doubled
        except Exception as error:
            why = f"with two rows the model cannot be exported ({_innermost(error)})"
    if not rows or not _fixes_rows(program):
        return program, ""
    return program, f"the ONNX file takes {rows} {'row' if rows == 1 else 'rows'} only, as many as the example inputs have: {why}"


def _two_rows(x: Any) -> Any:
    return torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() and x.shape[0] == 1 else x


def _steps(program: torch.export.ExportedProgram) -> list[list[Any]]:
    """Each operator on tensors, the ranks of its results, and its arguments: tensors by their number, sizes that vary as `SIZE`."""
    names: dict[torch.fx.Node, Any] = {}
    steps: list[list[Any]] = []
    for node in program.graph.nodes:
        ranks = [value.dim() for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        if node.op in ("placeholder", "get_attr"):
            names[node] = node.name
        elif node.target is torch.ops.aten.slice.Tensor and node.args[2:] == (0, sys.maxsize):      # x[:], left out of a size of 1
            names[node] = names[node.args[0]]
        elif node.op == "output" or ranks:
            names[node] = f"%{len(steps)}"
            leaves = tree_leaves((node.args, node.kwargs))
            steps.append([node.target, *ranks, *(names.get(x, SIZE) if isinstance(x, torch.fx.Node) else x for x in leaves)])
    return steps


def _alike(steps: list[list[Any]], doubled: list[list[Any]]) -> bool:
    """Are the steps the same, but for numbers that became sizes?"""
    def same(step: list[Any], other: list[Any]) -> bool:
        return len(step) == len(other) and all(b is SIZE or a == b for a, b in zip(step, other, strict=True))
    return len(steps) == len(doubled) and all(map(same, steps, doubled))


def _fixes_rows(program: torch.export.ExportedProgram) -> bool:
    from torch.fx.experimental.symbolic_shapes import is_concrete_int
    inputs = [node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    return is_concrete_int(next(x.shape[0] for x in inputs if isinstance(x, Tensor) and x.dim() > 1))


def _exported(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    from torch.onnx._internal.exporter._flags import set_onnx_exporting_flag  # what is_in_onnx_export() asks

    def dynamic(x: Any) -> Any:
        return dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) if isinstance(x, Tensor) else None
    shapes = (tree_map(dynamic, args), tree_map(dynamic, kwargs))
    return set_onnx_exporting_flag(torch.export.export)(
        model, args, kwargs, strict=False, dynamic_shapes={**_by_name(model, shapes[0]), **shapes[1]} if kwargs else shapes[0])


def _by_name(model: nn.Module, shapes: tuple) -> dict[str, Any]:
    return dict(zip(inspect.signature(model.forward).parameters, shapes, strict=False))


# ---- our operators ----

def _overloads(operator: Any) -> tuple[Any, Any]:
    """Those of an operator that torch.export may leave in a program."""
    return operator, operator.overloadpacket.inference


def _unpack(program: torch.export.ExportedProgram) -> None:
    """Makes int8 of packed codes that are used as a whole, for `_narrow` to shrink; those that are only looked up stay packed."""
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    whole = {*_overloads(dequantize), *_overloads(linear)}
    ours = {*whole, *_overloads(embedding)}
    for node in program.graph.nodes:
        if node.name not in names or not node.users or any(user.target not in ours for user in node.users):
            continue
        calls = [_arguments(user) for user in node.users]
        if any(call["codes"] is not node or call["bits"] >= 8 for call in calls) or not any(u.target in whole for u in node.users):
            continue
        tensors = program.state_dict if names[node.name] in program.state_dict else program.constants
        codes = unpack_bits(tensors[names[node.name]], calls[0]["bits"], calls[0]["columns"])
        tensors[names[node.name]] = codes
        node.meta["val"] = node.meta["val"].new_empty(codes.shape, dtype=codes.dtype)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    schema: Any = node.target
    return {**dict(zip((a.name for a in schema._schema.arguments), node.args, strict=False)), **node.kwargs}


def _translations() -> dict[Any, Callable]:
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
                       bias_hh: Any, codes_hr: Any, scale_hr: Any, cell: str, reverse: bool, dynamic: bool, bits: int, group: int) -> Any:
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

    table: dict[Any, Callable] = {dequantize: onnx_dequantize, linear: onnx_linear, embedding: onnx_embedding,
                                  linear_dynamic: onnx_linear_dynamic, linear_static: onnx_linear_static,
                                  recurrent: onnx_recurrent}
    return {overload: translation for operator, translation in table.items() for overload in _overloads(operator)}


# ---- the ONNX graph ----

def _finish(model: Any) -> None:
    """Folds constants other than ours, and gives codes and dimensions their last form.

    Not by onnxscript's ``optimize_ir``: its rewriting takes minutes where folding takes a second, and runtimes do the like.
    """
    from onnx_ir.passes import Sequential, common
    from onnxscript.optimizer import fold_constants_ir
    common.InlinePass()(model)
    fold_constants_ir(model, should_fold=_should_fold)
    _put_blocks_first(model)
    _narrow(model)
    _name_dimensions(model)
    Sequential(common.RemoveUnusedNodesPass(), common.RemoveUnusedFunctionsPass(), common.RemoveUnusedOpsetsPass(),
               common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), common.DeduplicateInitializersPass(),
               common.CommonSubexpressionEliminationPass(), common.ClearMetadataAndDocStringPass(), common.NameFixPass())(model)


def _should_fold(node: Any) -> bool | None:
    """False for what would make floats of codes, or a large constant of a small one; None leaves it to onnxscript."""
    codes = (v for v in node.inputs if v is not None and v.is_initializer() and v.dtype in (UINT8, INT8, INT16, INT32))
    return False if node.op_type == "Expand" or any(codes) else None


def _put_blocks_first(model: Any) -> None:
    """Transposes constants in the place of transposing what DequantizeLinear makes of them, where they have blocks.

    ONNX Runtime multiplies by four-bit integers (MatMulNBits) only where the blocks run along the first dimension of [in, out].
    """
    import onnx_ir
    for node in list(model.graph):
        source = node.inputs[0].producer() if node.op_type == "Transpose" else None
        if source is None or source.op_type != "DequantizeLinear" or not source.attributes.get_int("block_size", 0):
            continue
        if any(not v.is_initializer() or len(v.uses()) > 1 for v in source.inputs) or len(source.outputs[0].uses()) > 1:
            continue
        for value in source.inputs:
            _set_constant(value, value.const_value.numpy().T.copy(), value.dtype)
        source.attributes.add(onnx_ir.AttrInt64("axis", 0))
        node.outputs[0].replace_all_uses_with(source.outputs[0])
        source.outputs[0].shape = node.outputs[0].shape


def _narrow(model: Any) -> None:
    """int8 initializers that are only dequantized become INT4 where four bits hold all of their codes."""
    from onnx_ir import DataType
    for value in model.graph.initializers.values():
        if value.dtype != INT8 or any(use.node.op_type != "DequantizeLinear" for use in value.uses()):
            continue
        codes = value.const_value.numpy()
        if codes.size and codes.min() >= -8 and codes.max() <= 7:
            _set_constant(value, codes, DataType.INT4)


def _set_constant(value: Any, array: Any, dtype: Any) -> None:
    import onnx_ir
    value.const_value = onnx_ir.tensor(array, dtype=dtype, name=value.name)
    value.shape, value.dtype = value.const_value.shape, dtype


def _name_dimensions(model: Any) -> None:
    """Calls torch's symbols s0, s1, ... by the first input and dimension that they stand at, in all shapes of the graph."""
    from onnx_ir.traversal import RecursiveGraphIterator
    values = [*model.graph.inputs, *(output for node in RecursiveGraphIterator(model.graph) for output in node.outputs)]
    sizes = [(value, index, size.value) for value in values for index, size in enumerate(value.shape or ())
             if not isinstance(size, int) and size.value is not None]
    names: dict[str, str] = {}
    for value, index, size in sizes:
        if value.is_graph_input() and size.isidentifier():
            names.setdefault(size, f"{value.name}_dim_{index}")
        value.shape[index] = int(size) if size.isdigit() else re.sub(r"\w+", lambda m: names.get(m[0], m[0]), size)
