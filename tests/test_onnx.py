"""ONNX: the exported file keeps the integers and computes what the quantized model computes, at other batch sizes too."""

import collections

import pytest
import torch
from models import MODELS, example, first, quantize, relative
from torch import nn

import inro_fx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
SCHEMES = {"int8": "DequantizeLinear", "int8_tensor": "DequantizeLinear", "int8_dynamic": None, "int8_static": None, "int4": None}
NOT_IN_ONNX = {"sliced": "only 4D query", "value_branch": "data-dependent"}       # neither are the float models


def run(file, args):
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL      # it may quantize activations
    session = runtime.InferenceSession(file, options)
    return torch.from_numpy(session.run(None, {i.name: a.numpy() for i, a in zip(session.get_inputs(), args, strict=True)})[0])


@pytest.mark.parametrize("name", ["tied", "matmuls", "encoder", "convolutions"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_numbers_in_onnx_runtime(name, scheme, tmp_path):
    model, inputs = MODELS[name]()
    small = quantize(model, inputs, scheme)
    file = inro_fx.export_onnx(small, inputs, tmp_path / "m.onnx")
    args, _ = example(inputs)
    for grown in (args, tuple(torch.cat([a, a]) for a in args)):
        want, got = first(small(*grown)), run(file, grown)
        assert got.shape == want.shape
        assert relative(want, got) < 2e-4                         # int8: 15-bit activations in the C kernel
    graph = onnx.load(file).graph
    codes = sum(t.numel() for n, t in small.state_dict().items() if "_codes" in n)
    constants = [*graph.initializer, *(n.attribute[0].t for n in graph.node if n.op_type == "Constant")]
    whole = sum(onnx.numpy_helper.to_array(i).size for i in constants if i.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8))
    assert whole == codes
    if SCHEMES[scheme]:
        assert collections.Counter(n.op_type for n in graph.node)[SCHEMES[scheme]] >= len({r.layer for r in inro_fx.report(small).rows})


@pytest.mark.parametrize("scheme", [inro_fx.uniform(2), inro_fx.uniform(50, 5), inro_fx.uniform(1000)], ids=lambda s: s.name)
def test_any_width_of_codes(scheme, tmp_path):
    small = inro_fx.quantize_graph(nn.Sequential(nn.Linear(27, 33), nn.Linear(33, 8)), torch.randn(2, 27), scheme)
    x = torch.randn(5, 27)
    assert relative(small(x), run(inro_fx.export_onnx(small, x, tmp_path / "m.onnx"), (x,))) < 2e-4


@pytest.mark.parametrize("name", NOT_IN_ONNX)
def test_what_cannot_be_exported_says_why(name, tmp_path):
    model, inputs = MODELS[name]()
    with pytest.raises(inro_fx.ModelError, match=f"cannot be exported to ONNX: .*{NOT_IN_ONNX[name]}"):
        inro_fx.export_onnx(inro_fx.quantize_graph(model, inputs), inputs, tmp_path / "m.onnx")
    with pytest.raises(inro_fx.ModelError, match="has no quantized weights"):
        inro_fx.export_onnx(model, inputs, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_without_onnxscript_it_says_what_to_install(tmp_path, monkeypatch):
    small = inro_fx.quantize_graph(nn.Linear(16, 16), torch.randn(2, 16))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(inro_fx.MissingTool, match="needs onnx and onnxscript: pip install onnx onnxscript"):
        inro_fx.export_onnx(small, torch.randn(2, 16), tmp_path / "m.onnx")
