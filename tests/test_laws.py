"""The laws of docs/writing-a-pass.md, for every tiny model and scheme."""

import copy

import pytest
import torch
from models import MODELS, Plain, example, first, relative
from models import quantize as quantize_model
from torch import nn

import inro_fx
from inro_fx.passes.capture.clone import clone
from inro_fx.passes.capture.example import Example
from inro_fx.passes.capture.ladder import capture
from inro_fx.passes.pipeline import PASSES, run_passes
from inro_fx.passes.program import Context
from inro_fx.passes.rules.quantize import quantize
from inro_fx.passes.run.forward import GraphForward
from inro_fx.passes.scheme import Identity
from inro_fx.passes.solve.plan import Overrides, find_targets, plan
from inro_fx.passes.verify import verify

SCHEMES = [*inro_fx.SCHEMES, inro_fx.uniform(1000), inro_fx.uniform(3, "tensor"), inro_fx.uniform(100, 5)]
FIFTEEN_BITS = 3e-4            # what the C kernel's integer activations may cost beside dequantize-then-multiply
LIMITS = {"int8": 0.02, "int8_tensor": 0.03, "int8_rowwise_full": 0.02, "int8_dynamic": 0.06, "int8_static": 0.1, "int4": 0.5, "uniform(1000)": 0.002,
          "uniform(3, tensor)": 1.5, "uniform(100, 5)": 0.02}


def snapshot(model):
    return ({k: v.clone() for k, v in model.state_dict().items()}, {n: m.training for n, m in model.named_modules()},
            {n: (p.requires_grad, p.grad is None) for n, p in model.named_parameters()},
            {n: (len(m._forward_hooks), type(m)) for n, m in model.named_modules()}, torch.get_rng_state())


def same(a, b):
    return (a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1:4] == b[1:4]
            and torch.equal(a[4], b[4]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", MODELS)
def test_output_is_close_original_unchanged_and_every_weight_accounted_for(name, scheme):
    model, inputs = MODELS[name]()
    args, kwargs = example(inputs)
    model.train()
    before = snapshot(model)
    small = quantize_model(model, inputs, scheme)
    assert same(before, snapshot(model))
    model.eval()
    assert relative(model(*args, **kwargs), small(*args, **kwargs)) < LIMITS[scheme.name]
    assert isinstance(small, type(model))
    report = inro_fx.report(small)
    weights = {id(p): p.numel() * p.element_size() for p in model.parameters() if p.dim() >= 2}
    assert sum(r.float_bytes for r in report.rows) + sum(s.float_bytes for s in report.skipped) == sum(weights.values())
    assert all(r.isolated is not None for r in report.rows)
    stored = {t.data_ptr(): t.numel() * t.element_size() for t in small.state_dict().values()}
    assert report.quantized_bytes == sum(stored.values())


@pytest.mark.parametrize("name", MODELS)
def test_identity_scheme_is_bitwise_equal(name):
    model, inputs = MODELS[name]()
    model.requires_grad_(False)             # torch takes other kernels where parameters want gradients
    args, kwargs = example(inputs)
    small = inro_fx.quantize_graph(model, inputs, Identity())
    captured, _ = captured_float(model, inputs)
    assert torch.equal(first(captured(*args, **kwargs)), first(small(*args, **kwargs)))


def captured_float(model, inputs):
    root = clone(model)
    session, _, _ = capture(root, Example.of(inputs))
    return root, session


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", MODELS)
def test_passes_leave_their_input_alone_and_verify(name, scheme):
    model, inputs = MODELS[name]()
    root, session = captured_float(model, inputs)
    chosen = plan(session, find_targets(session), scheme, Overrides(None, root))
    context, nothing = Context(root, chosen.weights), Context(root, {})
    for program in session.captures.values():
        text = str(program.graph)
        verify(program, context, after="capture")
        done = program
        for step in PASSES:
            before = str(done.graph)
            after = step(done, context)
            assert str(done.graph) == before
            verify(after, context, after=step.__name__)
            assert str(step(after, context).graph) == str(after.graph)         # a second time changes nothing
            assert after.probes.keys() >= done.probes.keys()
            done = after
        assert str(program.graph) == text
        assert str(run_passes(program, nothing).graph) == text               # nothing to do: the same text


def test_nothing_to_quantize_changes_nothing():
    model, x = Plain(), torch.randn(3, 16)
    small = inro_fx.quantize_graph(model, x)
    assert torch.equal(small(x), model(x))
    assert inro_fx.report(small).rows == []


@pytest.mark.parametrize("name", MODELS)
def test_unfused_equals_fused(name, monkeypatch):
    model, inputs = MODELS[name]()
    args, kwargs = example(inputs)
    fused = first(inro_fx.quantize_graph(model, inputs)(*args, **kwargs))
    monkeypatch.setattr("inro_fx.passes.pipeline.PASSES", (quantize,))
    unfused = first(inro_fx.quantize_graph(model, inputs)(*args, **kwargs))
    assert relative(unfused, fused) < FIFTEEN_BITS


@pytest.mark.parametrize("name", MODELS)
def test_python_path_equals_the_graph(name):
    """Calls that the graph does not cover run the user's own forward over the same codes."""
    model, inputs = MODELS[name]()
    args, kwargs = example(inputs)
    small = inro_fx.quantize_graph(model, inputs)
    want = first(small(*args, **kwargs))
    for module in small.modules():
        if isinstance(module, GraphForward):
            module._inro_runners.clear()                                              # no call is covered any more
            module.__dict__["_inro_again"] = None
    assert relative(want, small(*args, **kwargs)) < FIFTEEN_BITS


@pytest.mark.parametrize("name", MODELS)
def test_a_result_is_refused(name):
    model, inputs = MODELS[name]()
    small = inro_fx.quantize_graph(model, inputs)
    with pytest.raises(inro_fx.ModelError, match="already quantized"):
        inro_fx.quantize_graph(small, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_deterministic(name):
    model, inputs = MODELS[name]()
    a, b = (inro_fx.quantize_graph(model, inputs) for _ in range(2))
    assert list(a.state_dict()) == list(b.state_dict())
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert str(inro_fx.report(a)) == str(inro_fx.report(b))


@pytest.mark.parametrize("name", MODELS)
def test_inplace_gives_the_same(name):
    model, inputs = MODELS[name]()
    args, kwargs = example(inputs)
    want = first(inro_fx.quantize_graph(model, inputs)(*args, **kwargs))
    twin = copy.deepcopy(model)
    small = inro_fx.quantize_graph(twin, inputs, inplace=True)
    assert small is twin
    assert torch.equal(first(small(*args, **kwargs)), want)


def test_a_failed_inplace_call_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    wrong = torch.randn(2, 5)
    before = snapshot(model)
    with pytest.raises(inro_fx.InputError):
        inro_fx.quantize_graph(model, wrong, inplace=True)
    assert same(before, snapshot(model))
