"""ONNX: the exported file keeps the integers and computes what the quantized model computes, at other batch sizes too."""

import collections
import warnings

import pytest
import torch
from models import MODELS, example, first, quantize, relative
from test_convolutions import NETWORKS, network, quantized
from torch import nn

import inro_fx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
SCHEMES = {"int8": "DequantizeLinear", "int8_tensor": "DequantizeLinear", "int8_dynamic": None, "int8_static": None,
           "int4": "DequantizeLinear", "int4_g32": "DequantizeLinear", "int4_affine": None}
INTEGERS = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.INT4)
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
    if scheme == "int4_affine":                                        # packed, as they are stored
        return
    assert 0.95 * codes < sum(len(i.raw_data) for i in graph.initializer if i.data_type in INTEGERS) <= codes + 8     # zero points; rows of ours are whole bytes
    if SCHEMES[scheme]:
        layers = len({r.layer for r in inro_fx.report(small).rows}) - (name == "tied")
        assert collections.Counter(n.op_type for n in graph.node)[SCHEMES[scheme]] >= layers


@pytest.mark.parametrize(("name", "scheme"), [("unet", "int8"), ("volumes", "int8_dynamic"), *((name, "int8_static") for name in NETWORKS)])
def test_networks_of_convolutions(name, scheme, tmp_path):
    """With every weight as codes; between convolutions of a static scheme the values are codes, too, and the runtime multiplies integers."""
    model, x = network(name)
    small = quantized(model, x, scheme)
    file = inro_fx.export_onnx(small, x, tmp_path / "m.onnx")
    with torch.no_grad():
        want, got = small(x), run(file, (x,))
    assert got.shape == want.shape
    assert relative(want, got) < {"int8": 2e-4, "int8_dynamic": 0.06, "int8_static": 0.02}[scheme]       # a code that is rounded otherwise
    graph = onnx.load(file).graph
    codes = sum(t.numel() for n, t in small.state_dict().items() if n.endswith("_codes"))
    assert sum(len(i.raw_data) for i in graph.initializer if i.data_type in INTEGERS) >= codes
    kinds = collections.Counter(n.op_type for n in graph.node)
    if scheme == "int8_static":
        assert kinds["QuantizeLinear"] >= (1 if name == "squeeze" else kinds["Conv"] - 1)
        assert not kinds["Cast"] or name in ("resnet", "mobilenet")          # of the last linear


class Words(nn.Module):
    """A table that is looked up, and one that is multiplied by as well; a layer of odd sizes between."""

    def __init__(self):
        super().__init__()
        self.table, self.looked_up, self.up, self.down = nn.Embedding(40, 27), nn.Embedding(40, 27), nn.Linear(27, 33), nn.Linear(33, 27)
        self.head = nn.Linear(27, 40)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.down(torch.relu(self.up(self.table(ids) + self.looked_up(ids)))))


@pytest.mark.parametrize(("scheme", "kinds"), [
    (inro_fx.uniform(1, 8), {"INT4", "UINT8"}), (inro_fx.uniform(2), {"INT4", "UINT8"}), (inro_fx.uniform(7, "tensor"), {"INT4", "UINT8"}),
    (inro_fx.uniform(7, 40), {"INT4", "UINT8"}), (inro_fx.uniform(50, 5), {"INT8", "UINT8"}), (inro_fx.uniform(15), {"INT8", "UINT8"}),
    (inro_fx.uniform(127, 16), {"INT8"}), (inro_fx.uniform(1000), {"INT16"}), (inro_fx.uniform(1000, 8), {"INT16"}),
    (inro_fx.uniform(2**20), set()), (inro_fx.uniform(2**20, 8), set()),
], ids=lambda value: getattr(value, "name", ""))
def test_any_width_of_codes(scheme, kinds, tmp_path):
    dtype = torch.float64 if scheme.bits > 16 else torch.float32
    small = inro_fx.quantize_graph(Words().to(dtype), torch.randint(0, 40, (2, 5)), scheme)
    file = inro_fx.export_onnx(small, torch.randint(0, 40, (2, 5)), tmp_path / "m.onnx")
    for ids in (torch.randint(0, 40, (2, 5)), torch.randint(0, 40, (1, 3))):
        assert relative(small(ids), run(file, (ids,))) < (2e-4 if kinds else 1e-12)
    onnx.checker.check_model(onnx.load(file), full_check=True)
    found = {onnx.TensorProto.DataType.Name(i.data_type) for i in onnx.load(file).graph.initializer}
    assert found - {"FLOAT", "DOUBLE", "INT64", "INT32"} == kinds


@pytest.mark.parametrize("scheme", ["int4", inro_fx.uniform(7), "int8"], ids=["int4", "rows of four bits", "int8"])
def test_the_file_is_as_small_as_the_weights(scheme, tmp_path):
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256)), torch.randn(2, 512)
    small = inro_fx.quantize_graph(model, x, scheme)
    file = inro_fx.export_onnx(small, x, tmp_path / "m.onnx")
    assert file.stat().st_size < 4096 + sum(t.numel() * t.element_size() for t in small.state_dict().values())
    assert relative(small(x), run(file, (x,))) < 2e-4
    optimized = runtime.InferenceSession(file).run(None, {"input": x.numpy()})[0]            # it quantizes the activations
    assert relative(small(x), torch.from_numpy(optimized)) < 2e-2


def test_blocks_are_laid_out_as_the_runtime_multiplies_them(tmp_path):
    small = inro_fx.quantize_graph(nn.Linear(64, 32), torch.randn(2, 64), "int4")
    graph = onnx.load(inro_fx.export_onnx(small, torch.randn(2, 64), tmp_path / "m.onnx")).graph
    assert [n.op_type for n in graph.node] == ["DequantizeLinear", "MatMul", "Add"]
    assert {a.name: a.i for a in graph.node[0].attribute} == {"axis": 0, "block_size": 32}
    assert {tuple(i.dims) for i in graph.initializer} == {(64, 32), (2, 32), (32,)}


def test_dimensions_have_names_and_nothing_of_this_machine_is_in_the_file(tmp_path):
    model, inputs = MODELS["encoder"]()
    file = inro_fx.export_onnx(quantize(model, inputs, "int8"), inputs, tmp_path / "m.onnx")
    graph = onnx.load(file).graph
    sizes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.input, *graph.output)]
    assert sizes == [["src_dim_0", "src_dim_1", 16]] * 2
    assert not [n.name for n in graph.node if n.metadata_props or n.doc_string]


class Asks(nn.Module):
    """Does something else for one row."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.ask = nn.Linear(8, 8), nn.Linear(8, 8), forward

    def forward(self, x):
        return self.ask(self, x)


@pytest.mark.parametrize("model", [
    Asks(lambda self, x: self.a(x)[:, 0]), Asks(lambda self, x: self.a(x).flatten(1) * x.shape[0]), nn.LSTM(8, 8, batch_first=True),
    nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
], ids=["first", "number of rows", "lstm", "encoder"])
def test_an_example_of_one_row_gives_a_file_for_any_number(model, tmp_path):
    x = torch.randn(1, 5, 8)
    small = inro_fx.quantize_graph(model.eval(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        file = inro_fx.export_onnx(small, x, tmp_path / "m.onnx")
    for grown in (x, torch.randn(3, 5, 8)):
        assert relative(first(small(grown)), run(file, (grown,))) < 2e-4


@pytest.mark.parametrize(("forward", "rows", "why"), [
    (lambda self, x: self.a(x) if x.shape[0] == 1 else self.b(x), 1, "the model computes something else with two rows"),
    (lambda self, x: self.a(x) * (2.5 if x.shape[0] == 1 else 1.5), 1, "the model computes something else with two rows"),
    (lambda self, x: self.a(x).squeeze(), 1, "the model computes something else with two rows"),
    (lambda self, x: self.a(x).reshape(8), 1, r"with two rows the model cannot be exported \("),
    (lambda self, x: self.a(x) + torch.ones(2, 8), 2, "torch.export makes a constant of that number"),
], ids=["branch", "number", "squeeze", "reshape", "two"])
def test_a_file_for_one_number_of_rows_says_so(forward, rows, why, tmp_path):
    x = torch.randn(rows, 8)
    small = inro_fx.quantize_graph(Asks(forward), x)
    with pytest.warns(UserWarning, match=f"the ONNX file takes {rows} rows? only, as many as the example inputs have: {why}"):
        file = inro_fx.export_onnx(small, x, tmp_path / "m.onnx")
    assert relative(small(x), run(file, (x,))) < 2e-4


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
