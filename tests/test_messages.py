"""The wording of errors that users cause: what is wrong, which layer, what to do."""

import pytest
import torch
from torch import nn

import inro_fx

X = torch.randn(2, 4)


def returns(value):
    return type("Returns", (nn.Module,), {"forward": lambda self, x: value})()


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


CASES = [
    (lambda: inro_fx.quantize_graph(nn.Linear(4, 4), X, "int9"), inro_fx.SchemeError, "unknown scheme 'int9': did you mean 'int8'?"),
    (lambda: inro_fx.quantize_graph("bert", X), inro_fx.ModelError, "model must be a torch.nn.Module, got str"),
    (lambda: inro_fx.quantize_graph(nn.Linear(5, 4), X), inro_fx.InputError,
     "the model does not run on example_inputs: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    (lambda: inro_fx.quantize_graph(nn.Linear(4, 4), {1: X}), inro_fx.InputError, "write example_inputs=(the_dict,)"),
    (lambda: inro_fx.quantize_graph(returns(None), X), inro_fx.ModelError, "the model returns no tensor on example_inputs (it returned NoneType)"),
    (lambda: inro_fx.quantize_graph(returns("text"), X), inro_fx.ModelError, "it returned str"),
    (lambda: inro_fx.quantize_graph(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), X), inro_fx.ModelError,
     "1.weight is on the meta device and has no data: load the weights before quantizing"),
    (lambda: inro_fx.quantize_graph(lazy(), X), inro_fx.ModelError, "0.weight is not initialized yet: run the model once"),
    (lambda: inro_fx.quantize_graph(inro_fx.quantize_graph(nn.Linear(4, 4), X), X), inro_fx.ModelError, "already quantized by inro_fx"),
    (lambda: inro_fx.quantize_graph(nn.DataParallel(nn.Linear(4, 4)), X), inro_fx.ModelError, "a DataParallel cannot be quantized: pass model.module"),
    (lambda: inro_fx.quantize_graph(nn.Linear(4, 4), X, capture="fast"), inro_fx.InputError, "capture='fast': it is one of 'auto', 'export'"),
    (lambda: inro_fx.quantize_graph(nn.Linear(4, 4), X, overrides={3: None}), inro_fx.SchemeError, "neither a module path, a module class nor"),
    (lambda: inro_fx.quantize_graph(nn.Linear(4, 4), X, overrides={"x": "int9"}), inro_fx.SchemeError, "did you mean 'int8'?"),
]


@pytest.mark.parametrize(("call", "kind", "message"), CASES, ids=[m for _, _, m in CASES])
def test_message(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
    assert isinstance(caught.value, (inro_fx.InroError, ValueError))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_is_refused_with_the_way_out():
    with pytest.raises(inro_fx.ModelError, match="pass the module that was compiled, and compile the result"):
        inro_fx.quantize_graph(torch.compile(nn.Linear(4, 4)), X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_model_is_refused_with_the_way_out():
    with pytest.raises(inro_fx.ModelError, match="pass the module that it was scripted from"):
        inro_fx.quantize_graph(torch.jit.script(nn.Linear(4, 4)), X)


def test_a_traced_graph_module_is_a_model_like_any_other():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    x = torch.randn(2, 16)
    small = inro_fx.quantize_graph(model, x)
    assert ((small(x) - model(x)).norm() / model(x).norm()) < 0.02
    assert len(inro_fx.report(small).rows) == 1


def test_strict_names_the_guard():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x) if x.shape[0] > 3 else -self.fc(x)
    small = inro_fx.quantize_graph(Branch(), torch.randn(2, 8), strict=True)
    with pytest.raises(inro_fx.GraphNotTaken, match=r"does not cover this call \(test_messages\.py:\d+ was traced with False\)"):
        small(torch.randn(5, 8))
