"""export_onnx: a quantized model as an ONNX file in which the weights stay integers.

Weights of at most 16 bits become DequantizeLinear (the QDQ pattern that ONNX Runtime and others fuse), with a scale per tensor,
per channel or per block; codes of up to four bits are INT4 there, those of five to seven INT8. Linears with quantized activations
become MatMulInteger, convolutions with a static scheme stand between QuantizeLinear and DequantizeLinear. A table that is only looked
up keeps codes below eight bits packed, and unpacks the rows that are asked for.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .atomic import write_bytes
from .errors import MissingTool, ModelError
from .numerics.bits import unpack_bits
from .onnx_operators import INT8, INT16, INT32, UINT8, overloads, translations
from .ops.conv import conv, weight_of
from .ops.conv_static import conv_static
from .ops.dequantize import dequantize
from .ops.embedding import embedding
from .ops.linear import linear
from .passes.capture.example import Example
from .passes.run.weights import PackedWeights

__all__ = ["export_onnx"]

OPSET = 21                 # the first with DequantizeLinear of 4-bit and 16-bit integers, and of blocks
MOST_BYTES = 2**31 - 1     # of one protobuf message
SIZE = object()            # in the steps of a program: a number that depends on the sizes of its inputs


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
                                             custom_translation_table=translations())
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

def _unpack(program: torch.export.ExportedProgram) -> None:
    """Makes int8 of packed codes that are used as a whole, for `_narrow` to shrink; those that are only looked up stay packed. Codes of
    convolutions take the order of their weights."""
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    whole = {*overloads(dequantize), *overloads(linear)}
    ours = {*whole, *overloads(embedding)}
    convolutions = {*overloads(conv), *overloads(conv_static)}
    for node in program.graph.nodes:
        if node.name not in names or not node.users:
            continue
        called = {user.target for user in node.users}
        calls = [_arguments(user) for user in node.users] if called <= ours or called <= convolutions else []
        if not calls or any(call["codes"] is not node for call in calls):
            continue
        tensors = program.state_dict if names[node.name] in program.state_dict else program.constants
        codes, call = tensors[names[node.name]], calls[0]
        if called <= convolutions:
            groups, transposed = call["groups"], call["transposed"]
            channels = codes.shape[1] // torch.Size(call["kernel"]).numel() * groups
            codes = weight_of(codes, channels, call["kernel"], groups, transposed).reshape(codes.shape)
        elif any(call["bits"] < 8 for call in calls) and called & whole:
            codes = unpack_bits(codes, call["bits"], call["columns"])
        tensors[names[node.name]] = codes
        node.meta["val"] = node.meta["val"].new_empty(codes.shape, dtype=codes.dtype)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    schema: Any = node.target
    return {**dict(zip((a.name for a in schema._schema.arguments), node.args, strict=False)), **node.kwargs}


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
    codes = (v for v in node.inputs if v is not None and v.is_initializer() and v.dtype in (UINT8, INT8, INT16, INT32)
             and v.const_value.size > 1)
    return False if node.op_type == "Expand" or (node.op_type != "Reshape" and any(codes)) else None


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
