"""Faults that were found, each as a test of its whole kind."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from models import quantize, relative
from test_capture import net, one_graph
from torch import nn

import inro_fx


@pytest.mark.parametrize("view", [
    lambda w: w[::2], lambda w: w[1::2], lambda w: w.view(4, 2, 8)[:, 0], lambda w: w.flip(0), lambda w: w[2:5], lambda w: w.chunk(2)[1],
    lambda w: w.split([3, 5])[1], lambda w: w.view(2, 4, 8).unbind(0)[1], lambda w: w.narrow(0, 1, 4), lambda w: w[[3, 1]], lambda w: w[:, ::2].repeat(1, 2),
], ids=range(11))
@pytest.mark.parametrize("base", ["contiguous", "transposed"])
def test_any_rows_of_a_weight(view, base):
    model = net(lambda self, x: F.linear(x, view(self.w)))
    model.w = nn.Parameter(torch.randn(8, 8) if base == "contiguous" else torch.randn(8, 8).t())
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    x = torch.randn(3, 8)
    assert relative(model(x), small(x)) < 0.03


def test_one_tensor_in_two_roles_is_not_confused_with_two():
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, a, b):
            return self.fc(a) + 2 * b
    model = net(lambda self, x, y=None: self.add(x, x if y is None else y) * (1 if y is None else 3), add=Add())
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    assert relative(model(x, y), small(x, y)) < 0.02
    assert relative(model.add(x, y), small.add(x, y)) < 0.02


def test_a_layer_that_asked_for_the_rank_is_not_used_at_another():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x) if x.dim() == 3 else -self.fc(x)
    model = net(lambda self, x: self.inner(x), inner=Picky())
    small = inro_fx.quantize_graph(model, torch.randn(2, 3, 8))
    for shape in ((2, 3, 8), (3, 8), (8,)):
        x = torch.randn(shape)
        assert relative(model(x), small(x)) < 0.02
        assert relative(model.inner(x), small.inner(x)) < 0.02


@pytest.mark.parametrize("forward", [
    lambda self, x: (lambda k: torch.narrow(self.fc(x), 0, 0, k))(int(x.shape[0])),
    lambda self, x: self.fc(x) * torch.full((int(x.shape[0]), 1), 2.0),
    lambda self, x: self.fc(x) * (3 if x.shape[0] in {2, 5} else 1),
    lambda self, x: self.fc(x) * {2: 3.0, 5: 2.0}.get(x.shape[0], 1.0),
    lambda self, x: self.fc(x) * (2.0 if x.requires_grad else 1.0),
    lambda self, x: self.fc(x).to(torch.result_type(x, 1.0)),
], ids=range(6))
def test_facts_that_python_used_are_guarded(forward):
    model = net(forward, fc=nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    for x in (torch.randn(2, 8), torch.randn(3, 8), torch.randn(5, 8), torch.randn(2, 8, requires_grad=True)):
        assert relative(model(x), small(x)) < 0.02


def test_an_exception_that_the_code_catches():
    def forward(self, x):
        try:
            extra = x[4]
        except IndexError:
            extra = x[0] * 0
        return self.fc(x) + extra
    model = net(forward, fc=nn.Linear(8, 8))
    for rows in (3, 6):
        small = inro_fx.quantize_graph(model, torch.randn(rows, 8))
        for n in (3, 6):
            x = torch.randn(n, 8)
            assert relative(model(x), small(x)) < 0.02


def test_an_input_changed_in_place_before_a_branch_is_changed_once():
    def forward(self, x):
        x.mul_(2)
        return self.fc(x) if x.shape[0] > 2 else -self.fc(x)
    model = net(forward, fc=nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    for rows in (2, 4):
        a = torch.randn(rows, 8)
        b = a.clone()
        assert relative(model(a), small(b)) < 0.02
        assert torch.equal(a, b)


@pytest.mark.parametrize("scheme", inro_fx.SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 3, 8)])
def test_results_may_be_changed_in_place_under_grad(shape, scheme):
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(inplace=True), nn.Linear(64, 8))
    small = quantize(model, torch.randn(shape), scheme, strict=True)
    small(torch.randn(shape, requires_grad=True)).add_(1).sum().backward()


# ---- after quantizing ----

def test_the_result_and_the_original_share_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    small = inro_fx.quantize_graph(model, x, overrides={"2": None})
    want = copy.deepcopy(model).eval()(x)
    small.half().requires_grad_(False)
    with torch.no_grad():
        [t.zero_() for t in (*small.parameters(), *small.buffers()) if t.is_floating_point()]
    assert torch.equal(model.eval()(x), want)
    assert all(p.requires_grad for p in model.parameters())


def test_a_child_that_is_replaced_changed_or_hooked_is_honoured():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(3, 8)

    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    small = inro_fx.quantize_graph(model, x)
    small[0] = Lora(small[0])
    assert relative(model[2](torch.relu(small[0](x))), small(x)) < 0.03
    small(x).sum().backward()
    assert small[0].a.weight.grad is not None

    small = inro_fx.quantize_graph(model, x)
    small[1] = nn.Identity()
    assert relative(model[2](model[0](x)), small(x)) < 0.03

    small = inro_fx.quantize_graph(model, x)
    seen = []
    small[1].register_forward_hook(lambda *a: seen.append(1))
    small(x)
    assert seen == [1]

    small = inro_fx.quantize_graph(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), x)
    small[1].train()
    assert (small(x) == 0).any()


def test_an_attribute_that_is_changed_is_honoured():
    model = net(lambda self, x: self.fc(x) * self.gain, fc=nn.Linear(8, 8))
    model.gain = 2.0
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    small.gain = 5.0
    x = torch.randn(2, 8)
    assert relative(model.fc(x) * 5, small(x)) < 0.02
    assert inro_fx.report(small).outside == {"self.gain was changed": 1}


def test_our_own_state_does_not_clash_with_the_models():
    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.strict, self.calls, self.graph, self.recompile, self.code, self.changed = True, [3], "mine", 3, nn.Linear(8, 8), "yes"

        def forward(self, x):
            return self.code(self.fc(x)) * self.recompile * len(self.calls) * self.strict
    model = Busy()
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    for q in (small, copy.deepcopy(small)):
        assert (q.strict, q.calls, q.graph, q.recompile, q.changed) == (True, [3], "mine", 3, "yes")
        assert isinstance(q.code, nn.Linear)
        x = torch.randn(3, 8)
        assert relative(model(x), q(x)) < 0.02


def test_the_class_of_the_result_makes_float_models():
    class Made(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.fc = nn.Linear(width, width)

        @classmethod
        def make(cls, width):
            return cls(width)

        def forward(self, x):
            return self.fc(x)
    small = inro_fx.quantize_graph(Made(), torch.randn(2, 8))
    fresh = small.make(4)
    assert type(fresh) is Made
    assert isinstance(small, Made)
    assert fresh(torch.randn(1, 4)).shape == (1, 4)


# ---- state ----

def test_state_starts_where_the_model_had_it():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.n, self.log, self.seen = nn.Linear(8, 8), 0, [], {}
            self.register_buffer("step", torch.zeros(()))

        def forward(self, x):
            self.n += 1
            self.step += 1
            y = self.fc(x)
            self.log.append(y)
            self.seen["last"] = y
            return y * self.n * self.step
    model = Stateful()
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    for m in (model, small):
        assert (m.n, m.step.item(), m.log, m.seen) == (0, 0, [], {})
    x = torch.randn(2, 8)
    for _ in range(3):
        assert relative(model(x), small(x)) < 0.02
    assert small.n == 3
    assert all(isinstance(t, torch.Tensor) for t in small.log)


def test_a_value_cached_at_the_first_call_is_not_the_examples():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.cache = nn.Linear(8, 8), nn.Linear(8, 8), None

        def forward(self, x):
            if self.cache is None:
                self.cache = self.a(x)
            return self.b(self.cache)
    model = Cached()
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    x = torch.randn(2, 8)
    assert relative(model(x), small(x)) < 0.03
    assert small.cache is not None


def test_weights_in_plain_attributes_are_weights():
    model = net(lambda self, x: F.linear(x, self.w))
    model.w = torch.randn(16, 8)
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    x = torch.randn(3, 8)
    assert relative(model(x), small(x)) < 0.02
    assert [r.layer for r in inro_fx.report(small).rows] == ["w"]
    assert "w_codes" in small.state_dict()
    assert isinstance(vars(model)["w"], torch.Tensor)


def test_random_state_is_kept():
    import random
    model = net(lambda self, x: F.dropout(self.fc(x), 0.5, self.training), fc=nn.Linear(8, 8))
    before = torch.get_rng_state(), random.getstate()
    for capture in ("auto", "export"):
        inro_fx.quantize_graph(model, torch.ones(2, 8), capture=capture)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_autocast_around_the_call_is_not_baked_in():
    model = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True))
    with torch.autocast("cpu", torch.bfloat16):
        small = inro_fx.quantize_graph(model, torch.randn(2, 3, 8))
    assert small(torch.randn(2, 3, 8))[0].dtype == torch.float32


@pytest.mark.parametrize("options", [dict(), dict(add_zero_attn=True), dict(batch_first=True)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_attention(options, need_weights):
    attention = nn.MultiheadAttention(16, 4, **options).eval()
    x = torch.randn(5, 5, 16)
    call = dict(attn_mask=torch.ones(5, 5).triu(1) == 1, is_causal=True, need_weights=need_weights)
    small = inro_fx.quantize_graph(attention, dict(query=x, key=x, value=x, **call))
    assert relative(attention(x, x, x, **call), small(query=x, key=x, value=x, **call)) < 0.03
    assert inro_fx.report(small).coverage == 1.0


# ---- reports ----

@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e20, 1e30])
def test_errors_at_extreme_sizes_are_real(size):
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.mul_(size)
    row = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(4, 64), "int4")).rows[0]
    assert 0.02 < row.weight_error < 0.2
    assert 0.02 < row.isolated < 0.2


def test_numbers_too_large_for_a_scale_are_left_float():
    model = nn.Linear(16, 16).double()
    with torch.no_grad():
        model.weight.mul_(1e300)
    report = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(2, 16).double()))
    assert report.skipped[0].reason == "it holds numbers too large for a float32 scale"


def test_masked_rows_that_are_nan_in_float_too_are_no_error():
    model = net(lambda self, x: torch.softmax(self.fc(x).masked_fill(x[:1] * 0 == 0, -math.inf), -1) + self.fc(x), fc=nn.Linear(16, 16))
    report = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(2, 16)))
    assert report.output_error < 0.05 or math.isnan(report.output_error)


def test_two_schemes_for_one_weight_are_refused():
    from models import Tied
    with pytest.raises(inro_fx.SchemeError, match=r"overrides ask for int8 and int4 for table\.weight = head\.weight"):
        inro_fx.quantize_graph(Tied(), torch.randint(0, 40, (2, 3)), overrides={"table": "int8", "head": "int4"})
    small = inro_fx.quantize_graph(Tied(), torch.randint(0, 40, (2, 3)), overrides={"head": "int4"})
    assert {r.scheme for r in inro_fx.report(small).rows if r.layer in ("table", "head")} == {"int4"}


def test_calls_that_layers_did_not_cover_are_counted_too():
    model = net(lambda self, x: self.fc(x) if x.sum() > 0 else self.fc(x[None])[0], fc=nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.ones(2, 8))
    assert not one_graph(small)
    with torch.autocast("cpu", torch.bfloat16):
        small(torch.ones(2, 8))
    assert inro_fx.report(small).outside == {"fc: autocast": 1}


def test_inplace_frees_each_weight_when_it_is_packed():
    """Peak memory of the float run stays near one layer above the float model."""
    from inro_fx import packing, steps
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    alive = []

    class Watching(packing.Packer):
        def pack(self, name):
            parts = super().pack(name)
            alive.append(sum(layer.weight.numel() > 0 for layer in model if "weight" in layer._parameters))
            return parts
    original = steps.Packer
    steps.Packer = Watching
    try:
        inro_fx.quantize_graph(model, torch.randn(2, 64), inplace=True)
    finally:
        steps.Packer = original
    assert min(alive) <= 1
    assert alive[0] == 8


def test_gates_names_with_glob_characters_can_be_named_exactly():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("we[ir]d*", nn.Linear(8, 8))
            self.weird = nn.Linear(8, 8)

        def forward(self, x):
            return self.weird(self.get_submodule("we[ir]d*")(x))
    small = inro_fx.quantize_graph(Odd(), torch.randn(2, 8), overrides={"we[ir]d*": None})
    assert "we[ir]d*.weight" in [s.layer for s in inro_fx.report(small).skipped]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripted_children_are_refused_by_path():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(inro_fx.ModelError, match="1 is a RecursiveScriptModule, which cannot be quantized"):
        inro_fx.quantize_graph(model, torch.randn(2, 8))
