"""Report, drawing and command line."""

import csv
import io
import json
import math
import shutil
import sys

import networkx as nx
import pytest
import torch
from models import MODELS
from torch import nn

import inro_fx
from inro_fx.cli import main

DOT = shutil.which("dot")


class Deep(nn.Module):
    """Twelve layers with long names."""

    def __init__(self, layers=12):
        super().__init__()
        self.transformer_encoder_stack = nn.ModuleList([nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(layers)])
        self.position = nn.Parameter(torch.randn(1, 5, 16))

    def forward(self, x):
        x = x + self.position
        for layer in self.transformer_encoder_stack:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def deep():
    torch.manual_seed(0)
    return inro_fx.quantize_graph(Deep().eval(), torch.randn(2, 5, 16))


@pytest.mark.parametrize("name", MODELS)
def test_the_table_fits_and_tells_what_the_rows_hold(name):
    report = inro_fx.report(inro_fx.quantize_graph(*MODELS[name]()))
    assert max(map(len, str(report).splitlines())) <= 132
    assert str(report).count("\n") >= len(report.rows) + 4
    data = json.loads(report.to_json())
    assert [r["layer"] for r in data["rows"]] == [r.layer for r in report.rows]
    table = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert len(table) == len(report.rows) + len(report.skipped)
    assert report.to_markdown().startswith("|")


def test_long_names_stay_apart(deep):
    report = inro_fx.report(deep)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 132
    shown = [line.split()[0] for line in lines[3:3 + len(report.rows)]]
    assert len(set(shown)) == len(report.rows)


def test_infinities_survive_json():
    model = nn.Sequential(nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    report = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(2, 16)))
    assert report.rows[0].weight_sqnr > 100 or report.rows[0].weight_sqnr == math.inf
    json.loads(report.to_json())


def test_worst_comes_first(deep):
    worst = inro_fx.report(deep).worst(3)
    assert abs(worst[0].share) >= abs(worst[1].share) >= abs(worst[2].share) > 0
    assert abs(worst[0].share) == max(abs(r.share) for r in inro_fx.report(deep).rows)


def test_the_error_of_a_bad_layer_is_seen_where_it_arises():
    """Outlier features make per-token activations coarse: the report says so, layer by layer."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(16, 64)
    x[:, 0] = 500
    with torch.no_grad():
        model[0].weight[:, 0] = 1e-4 * torch.randn(64)
    report = inro_fx.report(inro_fx.quantize_graph(model, x, "int8_dynamic"))
    assert report.worst(1)[0].layer == "0"
    assert report.rows[0].isolated > 0.2
    cured = inro_fx.report(inro_fx.quantize_graph(model, x, "int8_dynamic", overrides={"0": "int8"}))
    assert cured.rows[0].isolated < 0.5 * report.rows[0].isolated


def test_a_float_model_has_no_report():
    with pytest.raises(inro_fx.ModelError, match=r"was not made by inro_fx\.quantize_graph"):
        inro_fx.report(nn.Linear(2, 2))
    with pytest.raises(inro_fx.ModelError, match="nothing to draw"):
        inro_fx.draw(nn.Linear(2, 2), "x.txt")


@pytest.mark.parametrize("name", MODELS)
def test_networkx_has_a_node_for_every_row(name):
    small = inro_fx.quantize_graph(*MODELS[name]())
    graph = inro_fx.to_networkx(small)
    report = inro_fx.report(small)
    if report.nodes:
        assert nx.is_directed_acyclic_graph(graph)
        targets = [a for _, a in graph.nodes(data=True) if a["kind"] == "target"]
        assert all(a["error"] is not None for a in targets)
        assert 0 < len(targets) <= sum(r.count for r in report.rows)


@pytest.mark.parametrize("ending", ["txt", "dot", *(["svg", "png", "pdf"] if DOT else [])])
def test_drawings_of_a_deep_model_are_folded(deep, ending, tmp_path):
    file = inro_fx.draw(deep, tmp_path / f"g.{ending}")
    data = file.read_bytes()
    assert data
    if ending in ("txt", "dot", "svg"):
        assert "×12" in data.decode()
        assert data.decode().count("error") < 12
    assert list(tmp_path.iterdir()) == [file]


def test_a_thousand_nodes_stay_a_small_picture(tmp_path):
    small = inro_fx.quantize_graph(Deep(40).eval(), torch.randn(1, 5, 16))
    assert inro_fx.report(small).nodes > 1000
    text = inro_fx.draw(small, tmp_path / "g.txt").read_text()
    assert len(text.splitlines()) < 40
    assert "×40" in text


def test_left_float_is_marked(tmp_path):
    small = inro_fx.quantize_graph(Deep(1).eval(), torch.randn(2, 5, 16))
    assert "left float" in inro_fx.draw(small, tmp_path / "g.txt").read_text()
    assert "dashed" in inro_fx.draw(small, tmp_path / "g.dot").read_text()


def test_without_dot_text_works_and_the_rest_says_what_to_install(deep, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    inro_fx.draw(deep, tmp_path / "g.txt")
    inro_fx.draw(deep, tmp_path / "g.dot")
    with pytest.raises(inro_fx.MissingTool, match="apt-get install graphviz"):
        inro_fx.draw(deep, tmp_path / "g.svg")
    with pytest.raises(inro_fx.InroError, match=r"ends in one of \.txt"):
        inro_fx.draw(deep, tmp_path / "g.bmp")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.dot", "g.txt"]


# ---- command line ----

@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A folder with a module that holds models, as a user has one."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))\n"
        "def build():\n    return net\n"
        "def with_inputs():\n    return net, torch.randn(3, 8)\n"
        "def example():\n    return {'input': torch.randn(2, 8)}\n"
        "def data():\n    return [torch.randn(4, 8) for _ in range(3)]\n"
        "number = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


def test_demo(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    assert "accuracy      96.38% -> 96.38% on 719 test images" in out
    assert {"report.txt", "report.json", "report.csv", "report.md", "graph.txt"} <= {p.name for p in (tmp_path / "demo").iterdir()}


@pytest.mark.parametrize("arguments", [["mine:net", "--inputs", "2x8"], ["mine:build", "--inputs", "mine:example"], ["mine:with_inputs"]])
def test_report_command(zoo, capsys, arguments):
    assert main(["report", *arguments]) == 0
    assert "whole model" in capsys.readouterr().out
    for ending in ("txt", "json", "csv", "md"):
        assert main(["report", *arguments, "--out", f"r.{ending}"]) == 0
        assert (zoo / f"r.{ending}").stat().st_size > 100


def test_quantize_and_draw_commands(zoo, capsys):
    assert main(["quantize", "mine:net", "--inputs", "2x8", "--scheme", "100", "--override", "2=none", "--out", "small"]) == 0
    state = inro_fx.load(zoo / "small" / "model.safetensors", nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))).state_dict()
    assert state["0.weight_codes"].dtype == torch.int8
    assert state["2.weight"].dtype == torch.float32
    assert "overrides['2'] leaves it float" in (zoo / "small" / "report.txt").read_text()
    assert main(["draw", "mine:net", "--inputs", "2x8", "--out", "g.txt"]) == 0


def test_calibration_on_the_command_line(zoo, capsys):
    call = ["report", "mine:net", "--inputs", "2x8", "--scheme", "int8_static"]
    assert main(call) == 2
    assert "the scheme int8_static needs calibration data" in capsys.readouterr().err
    assert main([*call, "--calibration", "mine:data"]) == 0
    assert "histogram" in capsys.readouterr().out


def test_bench_command(zoo, capsys):
    assert main(["bench", "mine:net", "--inputs", "2x8", "--out", "b.txt"]) == 0
    out = capsys.readouterr().out
    assert "whole model" in out
    assert "threads, kernels:" in out
    assert (zoo / "b.txt").read_text() == out


@pytest.mark.parametrize(("arguments", "message"), [
    (["report", "mine"], "write MODULE:NAME"),
    (["report", "nothing_here:x"], "cannot be imported: No module named 'nothing_here'"),
    (["report", "mine:number"], "gives int, not a torch.nn.Module"),
    (["report", "mine:net"], "add --inputs, for example --inputs 1x3x224x224"),
    (["report", "mine:net", "--inputs", "2xx"], "write a shape such as"),
    (["report", "mine:net", "--inputs", "2x8", "--scheme", "int9"], "did you mean 'int8'"),
    (["report", "mine:net", "--inputs", "2x9"], "does not run on example_inputs"),
    (["report", "mine:net", "--inputs", "2x8", "--override", "x"], "write PATTERN=SCHEME"),
    (["report", "mine:net", "--inputs", "2x8", "--out", "r.doc"], "a report ends in one of"),
])
def test_one_clear_line_for_each_mistake(zoo, capsys, arguments, message):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_is_enough(capsys):
    for arguments in (["--help"], ["quantize", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
    out = capsys.readouterr().out
    assert "--inputs" in out
    assert "inro-fx report mypackage.models:resnet --inputs 1x3x224x224" in out
