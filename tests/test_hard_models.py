"""Models that nothing is wrong with, though they are built in unusual ways, and the tools that people run on the result."""

import collections
import copy
import dataclasses
import re
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MODELS, example, relative
from test_capture import net
from test_guards import alike, answer, layers, right
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_pytree_node, tree_structure

import inro_fx
from inro_fx.cli import main
from inro_fx.passes.scheme import Identity

WITHIN = {"int8": 0.02, "int8_dynamic": 0.04, "int4": 0.4}


# ---- forwards with compilers, kernels and modes of their own inside ----

def twice(x):
    return torch.relu(x) * 2


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


COMPILED = torch.compile(twice, backend="eager", fullgraph=True)


def heads(x):
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def under_a_mode(self, x):
    with Passing():
        return self.b(self.a(x))


def gradient_of_a_function(self, x):
    return self.b(torch.func.grad(lambda y: y.square().sum())(self.a(x)))


MODERN = {
    "compiled function": lambda self, x: self.b(COMPILED(self.a(x))),
    "compiled here": lambda self, x: torch.compile(lambda y: torch.relu(y) * 3, backend="eager")(self.b(self.a(x))),
    "flex attention": lambda self, x: self.b(flex_attention(*[heads(self.a(x))] * 3, score_mod=lambda s, b, h, i, j: s + (i - j)).transpose(1, 2).flatten(2)),
    "causal lower right": lambda self, x: self.b(F.scaled_dot_product_attention(*[self.a(x)] * 3, attn_mask=causal_lower_right(x.shape[1], x.shape[1]))),
    "causal upper left": lambda self, x: self.b(F.scaled_dot_product_attention(self.a(x), x, x, attn_mask=causal_upper_left(x.shape[1], x.shape[1]))),
    "dispatch mode": under_a_mode,
    "checkpoint": lambda self, x: self.b(torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False)),
    "functional call": lambda self, x: self.b(torch.func.functional_call(self.a, dict(self.a.named_parameters()), (x,))),
    "vmap": lambda self, x: self.b(torch.vmap(lambda row: torch.relu(row).cumsum(-1))(self.a(x))),
    "gradient of a function": gradient_of_a_function,
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without")
@pytest.mark.parametrize("kind", MODERN)
def test_forwards_that_bring_a_compiler_or_a_mode(kind):
    looked_up = kind == "functional call"                    # in a dict of all parameters: such weights stay float
    right(net(MODERN[kind], **layers("a", "b")), (torch.randn(2, 4, 8),), (torch.randn(3, 5, 8),), covered=not looked_up)


@pytest.mark.parametrize("how", ["module", "method"])
def test_children_that_are_compiled(how):
    child = net(lambda self, x: twice(self.a(x)), **layers("a"))
    if how == "module":
        child.compile(backend="eager", fullgraph=True)
    else:
        child.forward = torch.compile(child.forward, backend="eager", fullgraph=True)
    model = net(lambda self, x: self.b(self.child(x)), child=child, **layers("b")).eval()
    x = torch.randn(2, 8)
    small, want = inro_fx.quantize_graph(model, x, Identity()), model(x)
    assert torch.equal(small(x), want)
    assert inro_fx.report(small).coverage == 1
    x = torch.randn(3, 8)
    assert torch.equal(small(x), model(x))


# ---- attributes of unusual classes ----

class Odd:
    scale = 2.0


class NoLength(Odd, tuple):
    def __len__(self):
        raise NotImplementedError


class NoEquality(Odd):
    __hash__ = None

    def __eq__(self, other):
        raise TypeError("cannot be compared")


class NoTruth(Odd):
    def __bool__(self):
        raise ValueError("neither true nor false")


class NoText(Odd):
    def __repr__(self):
        raise RuntimeError("no text")
    __str__ = __format__ = __repr__


class NoAttributes(Odd):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise KeyError(name)


class EveryAttribute(Odd):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Endless(Odd):
    def __iter__(self):
        return self

    def __next__(self):
        return self

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        return self


class Frozen(Odd):
    __slots__ = ()

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class Posing(Odd):
    @property
    def __class__(self):
        return dict


class BrokenProperty(Odd):
    @property
    def size(self):
        raise NotImplementedError


class OddDict(Odd, dict):
    def keys(self):
        raise NotImplementedError
    values = __iter__ = keys


ODD = [lambda: NoLength((1, (2, 3))), NoEquality, NoTruth, NoText, NoAttributes, EveryAttribute, Endless, Frozen, Posing, BrokenProperty, lambda: OddDict(),
       lambda: np.ma.masked_array([1.0, 2.0], mask=[0, 1])]


@pytest.mark.parametrize("make", ODD, ids=["NoLength", *[k.__name__ for k in ODD[1:-2]], "OddDict", "array"])
def test_attributes_of_unusual_classes(make):
    model = net(lambda self, x: self.block(x) * getattr(self.odd, "scale", 1) + self.many[0].shape[0], block=net(lambda self, x: self.a(x) * (2 if self.odd is not None else 1), **layers("a")))
    model.odd, model.block.odd, model.many = make(), make(), [np.zeros(3), make()]
    right(model, (torch.randn(2, 8),), (torch.randn(3, 8),))


# ---- layers that the first call builds ----

def fixed(inner, out=8):
    with torch.random.fork_rng():
        torch.manual_seed(inner)
        return nn.Linear(inner, out).requires_grad_(False)


def over_none(self, x):
    if self.proj is None:
        self.proj = fixed(x.shape[-1])
    return self.proj(self.a(x))


def over_nothing(self, x):
    if not hasattr(self, "late"):
        self.late = fixed(x.shape[-1])
    return self.late(self.a(x))


def over_false(self, x):
    if not self.ready:
        self.late, self.ready = fixed(x.shape[-1]), True
    return self.late(self.a(x))


def in_a_list(self, x):
    if not self.found:
        self.found.append(fixed(x.shape[-1]))
    return self.found[0](self.a(x))


def added(self, x):
    if "late" not in self._modules:
        self.add_module("late", fixed(x.shape[-1]))
    return self._modules["late"](self.a(x))


def a_parameter(self, x):
    if self.proj is None:
        self.proj = nn.Parameter(fixed(x.shape[-1]).weight, requires_grad=False)
    return F.linear(self.a(x), self.proj)


def registered(self, x):
    if self.reg is None:
        self.register_parameter("reg", nn.Parameter(fixed(x.shape[-1]).weight, requires_grad=False))
    return F.linear(self.a(x), self.reg)


@pytest.mark.parametrize(("forward", "deep", "called"), [(over_none, False, False), (over_none, False, True), *((f, True, False) for f in (over_none, over_nothing, over_false, in_a_list, added, a_parameter, registered))])
def test_a_layer_that_the_first_call_builds(forward, deep, called):
    child = net(forward, **layers("a"))
    child.proj, child.found, child.ready = None, [], False
    child.register_parameter("reg", None)
    model = (net(lambda self, x: self.child(x), child=child) if deep else child).eval()
    if called:
        model(torch.randn(2, 8))
    names = set(model.state_dict())
    x = torch.randn(2, 8)
    small, reference = inro_fx.quantize_graph(model, x, Identity()), copy.deepcopy(model)
    assert set(model.state_dict()) == names
    for x in (torch.randn(2, 8), torch.randn(3, 8)):
        assert torch.equal(small(x), reference(x))
    if forward is over_none:
        assert relative(reference(x), inro_fx.quantize_graph(model, x)(x)) < 0.03


# ---- TorchScript ----

@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("name", "scheme"), [*(("mlp", s) for s in WITHIN), ("tied", "int8"), ("conv1d", "int4"), ("matmuls", "int8")])
def test_jit_trace_checks_what_it_traced(name, scheme):
    model, inputs = MODELS[name]()
    args, _ = example(inputs)
    model.eval()
    torch.jit.trace(model, args)
    small = inro_fx.quantize_graph(model, inputs, scheme)
    traced = torch.jit.trace(small, args)
    assert torch.equal(traced(*args), small(*args))
    grown = [torch.cat([a, a]) for a in args]
    torch.testing.assert_close(traced(*grown), small(*grown))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", ["mlp", "value_branch"])
def test_jit_script_says_what_it_cannot_do(name):
    model, inputs = MODELS[name]()
    small = inro_fx.quantize_graph(model, inputs)
    with pytest.raises(inro_fx.InroError, match=r"torch\.jit\.script"):
        torch.jit.script(small)
    with pytest.raises(inro_fx.InroError, match=r"torch\.jit\.script"):
        torch.jit.script(nn.Sequential(nn.ReLU(), small))


# ---- ONNX from one row ----

@pytest.mark.parametrize(("make", "shape"), [
    (lambda: net(lambda self, x: self.a(x).softmax(-1).view(x.shape[0], -1), **layers("a")), (1, 5, 8)), (lambda: nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4)), (1, 7)),
], ids=["view", "embedding"])
def test_onnx_from_an_example_of_one_row(make, shape, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = make().eval()
    ids = isinstance(model, nn.Sequential) and isinstance(model[0], nn.Embedding)
    one, three = (torch.randint(0, 20, (n, *shape[1:])) if ids else torch.randn(n, *shape[1:]) for n in (1, 3))
    small = inro_fx.quantize_graph(model, one)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        file = inro_fx.export_onnx(small, one, tmp_path / "m.onnx")
    session = runtime.InferenceSession(file)
    run = lambda x: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert relative(small(one), run(one)) < 0.01
    if any(re.search(r"\b(one|1)\b", str(w.message)) and issubclass(w.category, UserWarning) for w in said):
        return
    assert relative(small(three), run(three)) < 0.01


# ---- very small and very large activations ----

@pytest.mark.parametrize("size", [1e-36, 1e-34, 1e-30, 1e30, 1e36])
@pytest.mark.parametrize("scheme", WITHIN)
def test_activations_of_extreme_sizes(scheme, size):
    layer = nn.Linear(64, 16, bias=size > 1)
    small = inro_fx.quantize_graph(layer, torch.randn(2, 64), scheme)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 64) * size
        want, got = layer(x), small(x)
        assert torch.isfinite(want).all()
        assert torch.isfinite(got).all()
        assert relative(want.double() / size, got.double() / size) < WITHIN[scheme]


@pytest.mark.parametrize("scheme", WITHIN)
def test_rows_of_all_sizes_in_one_batch(scheme):
    layer = nn.Linear(64, 16, bias=False)
    small = inro_fx.quantize_graph(layer, torch.randn(2, 64), scheme)
    size = 10.0 ** torch.tensor([-36.0, -34.0, -20.0, 0.0, 20.0, 36.0]).unsqueeze(1)
    x = torch.randn(6, 64) * size
    for want, got, by in zip(layer(x).double(), small(x).double(), size.double(), strict=True):
        assert relative(want / by, got / by) < WITHIN[scheme]


@pytest.mark.parametrize("scheme", WITHIN)
def test_bfloat16_has_the_same_range(scheme):
    layer = nn.Linear(64, 16, bias=False).bfloat16()
    small = inro_fx.quantize_graph(layer, torch.randn(2, 64).bfloat16(), scheme)
    for size in (1e-34, 1e36):
        x = (torch.randn(3, 64) * size).bfloat16()
        assert relative(layer(x).double() / size, small(x).double() / size) < WITHIN[scheme] + 0.02


# ---- loops that are unrolled ----

def three_weights(self, x):
    for _ in range(self.steps):
        x = torch.tanh(self.b(torch.relu(self.a(x))) @ self.w)
    return x


def cells(self, x):
    h = x
    for _ in range(self.steps):
        h = self.cell(x, h)
    return h


def tied(self, x):
    for _ in range(self.steps):
        x = F.linear(torch.tanh(x @ self.w), self.w)
    return x


def weight():
    return nn.Parameter(torch.randn(8, 8) / 3)


UNROLLED = {                                                   # the layers with the count of each row
    "three weights": (three_weights, 400, lambda: dict(w=weight(), **layers("a", "b")), {"a": [400], "b": [400], "w": [400]}),
    "cell": (cells, 30, lambda: dict(cell=nn.GRUCell(8, 8)), {"cell.weight_ih": [30], "cell.weight_hh": [30]}),
    "two kinds of use": (tied, 30, lambda: dict(w=weight()), {"w": [30, 30]}),
    "once": (three_weights, 1, lambda: dict(w=weight(), **layers("a", "b")), {"a": [1], "b": [1], "w": [1]}),
}


@pytest.mark.parametrize("kind", UNROLLED)
def test_a_loop_is_one_row_for_each_use_of_a_weight(kind):
    forward, steps, children, want = UNROLLED[kind]
    model = net(forward, **children()).eval()
    model.steps = steps
    report = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(2, 8)))
    rows = collections.defaultdict(list)
    for row in report.rows:
        rows[row.layer].append(row.count)
    assert rows == want
    assert report.coverage == 1
    assert len(str(report).splitlines()) < 30


# ---- weights that are indexed ----

def looked_up(self, ids):
    return self.a(self.table[ids])


def looked_up_by_index_select(self, ids):
    return self.a(self.table.index_select(0, ids.flatten()))


def experts(self, ids):
    x = self.a(ids[:, :1].float().expand(-1, 8) / 10)
    return torch.einsum("bi,bio->bo", x, self.table[ids[:, 0] % 4])


def one_expert(self, ids):
    return self.a(ids[:, :1].float().expand(-1, 8) / 10) @ self.table[ids[0, 0] % 4]


def relative_positions(self, ids):
    bias = self.table[self.places.view(-1)].view(4, 4, -1).permute(2, 0, 1)
    x = self.a(ids[:, :1, None].float().expand(-1, 4, 8) / 10)
    scores = x @ x.transpose(1, 2)
    return (scores.unsqueeze(1) + bias).softmax(-1)


def standardized(self, ids):
    w = self.table
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    return F.conv2d(self.a(ids[:, :1, None, None].float().expand(-1, 4, 5, 8) / 10), w)


INDEXED = {"lookup": (looked_up, (30, 8)), "index_select": (looked_up_by_index_select, (30, 8)), "experts": (experts, (4, 8, 8)), "one expert": (one_expert, (4, 8, 8)),
           "relative positions": (relative_positions, (49, 8)), "standardized": (standardized, (8, 4, 3, 3))}


@pytest.mark.parametrize(("kind", "scheme"), [*((k, "int8") for k in INDEXED), ("lookup", "int8_dynamic"), ("standardized", "int8_dynamic")])
def test_weights_that_are_indexed_are_codes(kind, scheme):
    forward, shape = INDEXED[kind]
    model = net(forward, **layers("a")).eval()
    model.table = nn.Parameter(torch.randn(shape))
    model.register_buffer("places", torch.randint(0, 49, (4, 4)))
    ids = torch.randint(0, 30, (2, 5))
    small = inro_fx.quantize_graph(model, ids, scheme)
    report = inro_fx.report(small)
    assert [s.reason for s in report.skipped] == []
    assert report.coverage == 1
    assert small.state_dict()["table_codes"].dtype == torch.int8
    assert "table" not in small.state_dict()
    for call in (ids, torch.randint(0, 30, (3, 5)), torch.randint(0, 30, (1, 2))):
        assert relative(model(call), small(call)) < WITHIN[scheme]
    assert alike(answer(model, (torch.full((1, 5), 999),)), answer(small, (torch.full((1, 5), 999),))) or kind not in ("lookup", "index_select")


# ---- arguments that are nearly right ----

def taken(call, *args, **options):
    """The result, or None and the words of the refusal."""
    try:
        return call(*args, **options), ""
    except inro_fx.InputError as error:
        return None, str(error)


@pytest.mark.parametrize("scheme", ["int8", "int8_static"])
@pytest.mark.parametrize("given", [lambda x: x, lambda x: {"input": x}, lambda x: x.numpy()], ids=["tensor", "dict", "array"])
def test_calibration_that_is_no_list_of_batches(scheme, given):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(6, 16)
    small, said = taken(inro_fx.quantize_graph, model, x, scheme, calibration=given(x))
    if small is None:
        assert re.fullmatch(r".*calibration.*", said)
        return
    want = inro_fx.quantize_graph(model, x, scheme, calibration=[torch.as_tensor(given(x)) if not isinstance(given(x), dict) else x])
    assert torch.equal(small(x), want(x))
    assert inro_fx.report(small).output_error == inro_fx.report(want).output_error


def test_calibration_of_a_prepared_model_that_is_one_tensor():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(6, 16)
    prepared = [inro_fx.prepare_graph(model, x) for _ in range(2)]
    for p in prepared:
        p(x)
    small, said = taken(inro_fx.convert_graph, prepared[0], x)
    if small is None:
        assert re.fullmatch(r".*calibration.*", said)
        return
    assert inro_fx.report(small).output_error == inro_fx.report(inro_fx.convert_graph(prepared[1], [x])).output_error


FACTORIES = """
import torch
def sized(size): return torch.nn.Linear(size, 4)
def raising(): raise OSError("no such checkpoint\\nsecond line")
def nothing(): return None
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc = torch.nn.Linear(size, 4)
"""


@pytest.mark.parametrize(("name", "command"), [("sized", "report"), ("Model", "quantize"), ("raising", "report"), ("nothing", "bench")])
def test_a_factory_on_the_command_line_that_does_not_work(name, command, tmp_path, monkeypatch, capsys):
    (tmp_path / "unusual_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main([command, f"unusual_factories:{name}", "--inputs", "2x16", "--out", "out"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("inro-fx: ")
    assert err.count("\n") == 1
    assert name in err


@pytest.mark.parametrize(("wrap", "change"), [(lambda m: m, lambda m: m.to(torch.float64)), (lambda m: nn.Sequential(m, nn.ReLU()), lambda m: m.double()), (lambda m: m, lambda m: m.bfloat16())], ids=["to", "inside", "bfloat16"])
def test_a_tensor_subclass_is_converted_while_an_output_lives(wrap, change):
    layer = nn.Linear(16, 4)
    layer.weight = nn.Parameter(inro_fx.Int8SymmetricTensor.from_float(layer.weight), requires_grad=False)
    model, x = wrap(layer), torch.randn(2, 16, requires_grad=True)
    y = model(x)
    before = y.detach().clone()
    change(model)
    assert layer.weight.dtype == layer.bias.dtype != torch.float32
    assert relative(before, model(x.detach().to(layer.bias.dtype))) < 0.02
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.equal(y.detach(), before)


# ---- many models in one process ----

def perceptron(self, x):
    return torch.relu(self.b(self.a(x)))


def of_its_own_code(forward, number):
    return types.FunctionType(forward.__code__.replace(co_firstlineno=number), forward.__globals__)


@pytest.mark.parametrize("kind", ["many classes", "one class"])
def test_twelve_models_are_compiled_in_one_process(kind):
    x = torch.randn(2, 8)
    for i in range(1, 13):
        model = net(of_its_own_code(perceptron, i), **layers("a", "b")) if kind == "many classes" else nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        small = inro_fx.quantize_graph(model.eval(), x)
        torch.testing.assert_close(torch.compile(small, backend="eager", fullgraph=True)(x), small(x))
        assert relative(model(x), small(x)) < 0.03


def test_fourteen_regions_of_one_model_are_all_compiled():
    def forward(self, x):
        for block in self.blocks:
            x = block(x) if x.sum() > -1e9 else -x
        return x
    blocks = [net(of_its_own_code(perceptron, i + 1), **layers("a", "b")) for i in range(14)]
    x = torch.randn(2, 8)
    small = inro_fx.quantize_graph(net(forward, blocks=nn.ModuleList(blocks)).eval(), x)
    want = small(x)
    for module in small.blocks:
        module.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(small(x), want)


# ---- export of structured outputs ----

@dataclasses.dataclass
class Plain:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclasses.dataclass
class Ordered(collections.OrderedDict):
    logits: torch.Tensor | None = None
    hidden: tuple | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


Pair = collections.namedtuple("Pair", "logits hidden")
torch.export.register_dataclass(Plain, serialized_type_name="test_hard_models.Plain")
register_pytree_node(Ordered, lambda o: (list(o.values()), list(o)), lambda values, keys: Ordered(**dict(zip(keys, values, strict=True))), serialized_type_name="test_hard_models.Ordered")
OUTPUTS = {
    "dataclass": lambda h, y: Plain(y, h), "dataclass with none": lambda h, y: Plain(y), "ordered": lambda h, y: Ordered(logits=y, hidden=(h, h)), "ordered with none": lambda h, y: Ordered(logits=y),
    "named tuple": lambda h, y: Pair(y, [h]), "nested": lambda h, y: {"out": Plain(y, h), "rest": (h,)},
}


@pytest.mark.parametrize(("kind", "graph"), [*((k, True) for k in OUTPUTS), ("dataclass", False), ("ordered", False)])
def test_export_returns_what_the_float_export_returns(kind, graph):
    def forward(self, x):
        if not graph and not torch.compiler.is_exporting() and x.sum() > 1e9:
            return None
        h = torch.relu(self.a(x))
        return OUTPUTS[kind](h, self.b(h))
    exports_alike(net(forward, **layers("a", "b")).eval(), (torch.randn(2, 8),), {})


def exports_alike(model, args, kwargs):
    small = inro_fx.quantize_graph(model, kwargs or args, Identity())
    want, got = (torch.export.export(m, args, kwargs) for m in (model, small))
    assert got.call_spec.out_spec == want.call_spec.out_spec
    want, got = want.module()(*args, **kwargs), got.module()(*args, **kwargs)
    assert type(got) is type(want)
    assert tree_structure(got) == tree_structure(want)
    assert alike(want, got)


@pytest.mark.filterwarnings("ignore")
def test_export_of_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=16)
    exports_alike(transformers.BertModel(config).eval().requires_grad_(False), (), {"input_ids": torch.randint(0, 40, (2, 5)), "attention_mask": torch.ones(2, 5, dtype=torch.long)})
