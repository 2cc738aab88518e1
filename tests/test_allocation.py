"""Shares of the error, sensitivities, and bits where they matter."""

import itertools
import json
import math

import pytest
import torch
from models import Tied
from torch import nn

import inro_fx
from inro_fx.numerics.knapsack import knapsack

Budget = inro_fx.Budget


def network(width=64, depth=4, seed=0):
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 10)).eval()


def batches(width=64, count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, width, generator=generator) for _ in range(count)]


def relative(small, model, data):
    with torch.no_grad():
        noise = sum((small(x) - model(x)).square().sum() for x in data)
        return math.sqrt(noise / sum(model(x).square().sum() for x in data))


# ---- shares ----

class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))

    def forward(self, x):
        return self.net(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(12, 16, 2, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


class Python(nn.Module):
    """Stays Python; its layers are graphs of their own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x):
        y = self.one(x).tanh()
        return self.two(y) if float(y.sum()) > -1e9 else y


CASES = {"linears": (network, torch.randn(16, 64)), "convolutions": (Convolutions, torch.randn(2, 3, 9, 9)),
         "recurrent": (Recurrent, torch.randn(3, 7, 12)), "tied": (Tied, torch.arange(40).reshape(4, 10)), "Python": (Python, torch.randn(4, 12))}


@pytest.mark.parametrize(("scheme", "off"), [("int8", 0.1), ("int4", 0.3)])
@pytest.mark.parametrize("name", CASES)
def test_shares_add_up_to_the_error(name, scheme, off):
    build, x = CASES[name]
    torch.manual_seed(3)
    report = inro_fx.report(inro_fx.quantize_graph(build().eval(), x, scheme))
    assert report.sum_of_shares == pytest.approx(1, abs=off)
    assert report.sum_of_shares == pytest.approx(sum(r.share for r in report.rows if r.share is not None))
    assert "whose error" in str(report)
    assert json.loads(report.to_json())["rows"][0]["share"] is not None


def test_the_layer_at_fault_comes_first():
    model, x = network(), torch.randn(16, 64)
    with torch.no_grad():
        model[2].weight[:, 0] = 40                                     # one weight that all others are rounded by
        model[2].bias -= 40 * torch.tanh(model[0](x))[:, 0].mean()
    report = inro_fx.report(inro_fx.quantize_graph(model, x))
    assert report.worst(1)[0].layer == "2"


def test_a_share_is_what_a_layer_alone_does():
    """Sensitive at small errors: the share of one layer is that of its own error where it alone has one."""
    model, x = network(), torch.randn(16, 64)
    report = inro_fx.report(inro_fx.quantize_graph(model, x, "int8", overrides={"0": None, "2": None, "4": None, "8": None}))
    assert [r.share for r in report.rows] == [pytest.approx(1, abs=0.02)]


def test_shares_do_not_touch_the_model_or_its_gradients():
    model, x = network(), torch.randn(16, 64)
    model.requires_grad_(False)
    model[0].weight.grad = torch.ones(64, 64)
    small = inro_fx.quantize_graph(model, x)
    assert inro_fx.report(small).sum_of_shares == pytest.approx(1, abs=0.1)
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.equal(model[0].weight.grad, torch.ones(64, 64))
    assert not torch.is_grad_enabled() or model(x).grad_fn is None


class NoGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            return self.fc(x)


def test_where_there_is_no_gradient_the_report_says_so():
    report = inro_fx.report(inro_fx.quantize_graph(NoGradient().eval(), torch.randn(2, 8)))
    assert report.sum_of_shares is None
    assert [r.share for r in report.rows] == [None]
    assert "whose error   not known: its output has no gradient" in str(report)


# ---- the knapsack ----

def test_the_knapsack_is_as_good_as_brute_force():
    generator = torch.Generator().manual_seed(0)
    for number in range(1000):
        groups, items = (int(torch.randint(1, 6, (1,), generator=generator)) for _ in range(2))
        if number % 2:
            costs, losses = (torch.randint(0, 20, (groups, items), generator=generator).double() for _ in range(2))
        else:
            costs, losses = (torch.rand(groups, items, generator=generator).double() for _ in range(2))
        least, most = float(costs.amin(1).sum()), float(costs.amax(1).sum())
        limit = least - 0.1 + float(torch.rand(1, generator=generator)) * (most - least + 0.2)
        rows = range(groups)
        best = min((sum(float(losses[g, i]) for g, i in zip(rows, c, strict=True)) for c in itertools.product(range(items), repeat=groups)
                    if sum(float(costs[g, i]) for g, i in zip(rows, c, strict=True)) <= limit), default=None)
        found = knapsack(costs, losses, limit)
        assert (found is None) == (best is None)
        if found is not None:
            assert sum(float(costs[g, i]) for g, i in zip(rows, found, strict=True)) <= limit
            assert sum(float(losses[g, i]) for g, i in zip(rows, found, strict=True)) == pytest.approx(best, abs=1e-9)


def test_what_is_not_there_is_not_chosen():
    costs = torch.tensor([[1.0, math.inf], [math.inf, 2.0]])
    assert knapsack(costs, torch.tensor([[5.0, 0.0], [0.0, 7.0]]), 3.0) == [0, 1]
    assert knapsack(costs, torch.tensor([[5.0, 0.0], [0.0, 7.0]]), 2.5) is None
    assert knapsack(torch.empty(0, 3), torch.empty(0, 3), 1.0) == []


# ---- plans ----

@pytest.fixture(scope="module")
def planned():
    model, data = network(), batches()
    return model, data, inro_fx.plan_bits(model, data[0], calibration=data, solver="search")


def test_the_plan_predicts_what_is_measured(planned):
    model, data, plan = planned
    for bits in (3.5, 4.5, 6.0):
        allocation = plan.solve(Budget(bits=bits))
        small = inro_fx.quantize_graph(model, data[0], "int8", overrides=allocation.overrides, solver="search")
        measured = relative(small, model, data)
        assert allocation.error / 1.5 < measured < allocation.error * 1.5
        assert allocation.bits <= bits
        assert allocation.bytes == inro_fx.report(small).quantized_bytes


def test_more_bits_never_hurt(planned):
    plan = planned[2]
    errors = [plan.solve(Budget(bits=b)).error for b in (2.6, 3, 4, 5, 6, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
    points = plan.points()
    assert [p[1] for p in points] == sorted((p[1] for p in points), reverse=True)


def test_the_budgets_say_the_same_in_other_units(planned):
    model, _, plan = planned
    one = plan.solve(Budget(bits=4.5))
    assert plan.solve(Budget(bytes=one.bytes)) == one
    assert plan.solve(Budget(ratio=one.bytes / plan.float_bytes)).bytes == one.bytes
    by_error = plan.solve(Budget(error=one.error * 1.0001))
    assert by_error.bytes <= one.bytes
    assert by_error.error <= one.error * 1.0001
    assert plan.float_bytes == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("bits", [3.5, 4.5, 6.5])
@pytest.mark.parametrize("solver", ["search", "gptaq"])
def test_at_equal_bytes_never_worse_than_the_best_format_for_all(planned, bits, solver):
    model, data, _ = planned
    small = inro_fx.quantize_graph(model, data[0], budget=Budget(bits=bits), calibration=data, solver=solver)
    spent = sum(r.quantized_bytes for r in inro_fx.report(small).rows)
    count = sum(math.prod(r.shape) for r in inro_fx.report(small).rows)
    assert spent * 8 <= bits * count
    same = inro_fx.quantize_graph(model, data[0], f"int{int(bits)}_g32", calibration=data, solver=solver)
    assert sum(r.quantized_bytes for r in inro_fx.report(same).rows) * 8 <= bits * count
    assert relative(small, model, data) <= relative(same, model, data) * 1.001


def test_a_sensitive_layer_gets_the_bits():
    """A first layer as of a SIREN: a small error there is a large one at the end."""
    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 3)

        def forward(self, x):
            return self.last(self.second(torch.sin(30 * self.first(x))))
    torch.manual_seed(0)
    model, x = Wave().eval(), torch.randn(64, 8)
    formats = inro_fx.plan_bits(model, x).solve(Budget(bits=6)).formats
    order = ["int2_g32", "int3_g32", "int4_g32", "int5_g32", "int6_g32", "int8", "float"]
    level = {name: order.index("float" if f is None else f.name) for name, f in formats.items()}
    assert level["first.weight"] > level["second.weight"]


def test_query_key_and_value_agree_and_tied_tables_are_one():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
            self.head.weight = self.table.weight
            self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, ids):
            x = self.table(ids)
            return self.head(self.out(torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)))
    plan = inro_fx.plan_bits(Attention().eval(), torch.arange(40).reshape(4, 10))
    names = {c.names for c in plan.choices}
    assert ("q.weight", "k.weight", "v.weight") in names
    assert ("table.weight",) in names
    assert plan.weights == 40 * 32 + 4 * 32 * 32


def test_matrices_of_one_recurrent_layer_agree_and_layers_differ():
    plan = inro_fx.plan_bits(Recurrent().eval(), torch.randn(3, 7, 12))
    names = {c.names for c in plan.choices}
    assert {("lstm.weight_ih_l0", "lstm.weight_hh_l0"), ("lstm.weight_ih_l1", "lstm.weight_hh_l1"), ("fc.weight",)} <= names


def test_a_recurrent_layer_of_two_formats_is_fused_and_right():
    torch.manual_seed(0)
    model, x = nn.LSTM(32, 32, 2, batch_first=True).eval(), torch.randn(3, 7, 32)
    overrides = {f"weight_{k}_l{i}": s for i, s in enumerate(("int4_g32", "int8")) for k in ("ih", "hh")}
    small = inro_fx.quantize_graph(model, x, overrides=overrides)
    report = inro_fx.report(small)
    assert {r.kernel.partition("/")[0] for r in report.rows} == {"inro_fx.recurrent"}
    assert [r.scheme for r in report.rows] == ["int4_g32", "int4_g32", "int8", "int8"]
    assert 0 < (small(x)[0] - model(x)[0]).norm() / model(x)[0].norm() < 0.1
    again = nn.LSTM(32, 32, 2, batch_first=True).eval()
    again.load_state_dict({k: getattr(small, k).detach() for k in model.state_dict()})
    assert torch.allclose(small(x)[0], again(x)[0], atol=1e-5)


def test_overrides_stand_beside_a_budget():
    model, data = network(), batches()
    small = inro_fx.quantize_graph(model, data[0], budget=Budget(bits=4), overrides={"0": "int8", "8": None})
    rows = {r.layer: r.scheme for r in inro_fx.report(small).rows}
    assert rows["0"] == "int8"
    assert "8" not in rows
    assert set(rows) == {"0", "2", "4", "6"}


def test_plans_are_saved_and_loaded(planned, tmp_path):
    plan = planned[2]
    assert inro_fx.BitPlan.load(plan.save(tmp_path / "plan.json")) == plan
    for text in ("{}", "no", '{"inro_fx plan": 1}', "[]", '{"inro_fx plan": 1, "formats": [], "choices": [{}]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(inro_fx.FileError, match=r"bad\.json is no plan"):
            inro_fx.BitPlan.load(tmp_path / "bad.json")


def test_the_table_and_the_curve(planned, tmp_path):
    plan = planned[2]
    table = plan.table(plan.solve(Budget(bits=4.5)))
    assert table.count("*") == len(plan.choices)
    assert "all, measured" in table
    svg = plan.curve(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text() == svg
    assert svg.count("<circle") == 6
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_the_same_plan_again(planned):
    model, data, plan = planned
    assert inro_fx.plan_bits(model, data[0], calibration=data, solver="search") == plan


# ---- what users get wrong ----

@pytest.mark.parametrize(("options", "text"), [
    ({}, "a Budget has one of bits, bytes, ratio and error, got none"), ({"bits": 4, "ratio": 0.2}, "got bits, ratio"),
    ({"bits": 0}, "a positive number"), ({"bits": float("nan")}, "a positive number"), ({"bytes": "4"}, "a positive number"),
    ({"error": float("inf")}, "a positive number"), ({"bits": True}, "a positive number")])
def test_no_budget(options, text):
    with pytest.raises(inro_fx.InputError, match=text):
        Budget(**options)


def test_a_budget_that_cannot_be_met_says_the_nearest_that_can(planned):
    plan = planned[2]
    with pytest.raises(inro_fx.InputError, match=r"cannot be met: the smallest that these formats give is bits=2\.") as raised:
        plan.solve(Budget(bits=1))
    nearest = float(str(raised.value).rpartition("=")[2])
    assert plan.solve(Budget(bits=nearest)).bits <= nearest
    with pytest.raises(inro_fx.InputError, match="cannot be met") as raised:
        plan.solve(Budget(bytes=10))
    plan.solve(Budget(bytes=float(str(raised.value).rpartition("=")[2])))
    fixed = inro_fx.plan_bits(planned[0], planned[1][0], formats=["int4", "int8"])
    with pytest.raises(inro_fx.InputError, match="the least error that can be had is"):
        fixed.solve(Budget(error=1e-9))


class OwnNames(nn.Module):
    """A parameter of its own with the name of an operator."""

    def __init__(self):
        super().__init__()
        self.linear, self.one, self.two = nn.Parameter(torch.randn(64, 64) / 8), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.two(self.one(nn.functional.linear(x, self.linear) * 100))


def test_a_parameter_with_the_name_of_an_operator():
    torch.manual_seed(0)
    model, x = OwnNames().eval(), torch.randn(8, 64)
    plan = inro_fx.plan_bits(model, x)
    allocation = plan.solve(Budget(bits=5))
    report = inro_fx.report(inro_fx.quantize_graph(model, x, overrides=allocation.overrides))
    assert {r.weight: r.scheme for r in report.rows} == {n: f.name for n, f in allocation.formats.items() if f is not None}
    assert report.quantized_bytes == allocation.bytes


def test_the_order_of_formats_does_not_matter_and_those_that_save_nothing_are_float():
    model, x = network(depth=1), torch.randn(8, 64)
    wide = inro_fx.uniform(127, 1)                                     # a scale for each weight: more bytes than floats
    plans = [inro_fx.plan_bits(model, x, formats=f) for f in ((wide, "int4_g32"), ("int4_g32", wide))]
    one, two = (p.solve(Budget(bits=8)) for p in plans)
    assert one.bytes == two.bytes
    assert {f.name for f in one.formats.values()} == {"int4_g32"}


def test_an_empty_batch_is_no_obstacle():
    model, data = network(), batches()
    plan = inro_fx.plan_bits(model, data[0], calibration=[data[0][:0], *data])
    assert plan.solve(Budget(bits=5)).error > 0
    with pytest.raises(inro_fx.InputError, match="no batch of the calibration data gives an output"):
        inro_fx.plan_bits(model, data[0], calibration=[data[0][:0]])
    with pytest.raises(inro_fx.InputError, match="NaN or infinity"):
        inro_fx.plan_bits(model, data[0], calibration=[data[0] * float("nan")])


def test_formats_that_cannot_be_chosen_among():
    model, x = network(), torch.randn(4, 64)
    with pytest.raises(inro_fx.InputError, match="is no Budget"):
        inro_fx.quantize_graph(model, x, budget={"bits": 4})
    with pytest.raises(inro_fx.InputError, match="an override with a static scheme"):
        inro_fx.quantize_graph(model, x, budget=Budget(bits=6), overrides={"0": "int8_static"}, calibration=[x])
    with pytest.raises(inro_fx.InputError, match="needs calibration data"):
        inro_fx.quantize_graph(model, x, budget=Budget(bits=6), solver="gptq")
    with pytest.raises(inro_fx.SchemeError, match="a series of schemes"):
        inro_fx.plan_bits(model, x, formats="int8")
    with pytest.raises(inro_fx.InputError, match="probes=0"):
        inro_fx.plan_bits(model, x, probes=0)
    with pytest.raises(inro_fx.SchemeError, match="int8_dynamic quantizes activations"):
        inro_fx.plan_bits(model, x, formats=["int4", "int8_dynamic"])
    with pytest.raises(inro_fx.SchemeError, match="at least one scheme"):
        inro_fx.plan_bits(model, x, formats=[None])
    with pytest.raises(inro_fx.SchemeError, match="unknown scheme"):
        inro_fx.plan_bits(model, x, formats=["int9"])
    with pytest.raises(inro_fx.InputError, match="give budget="):
        inro_fx.quantize_graph(model, x, formats=["int4"])
    with pytest.raises(inro_fx.ModelError, match="no weight whose format is left"):
        inro_fx.plan_bits(model, x, overrides={nn.Linear: "int8"})
    with pytest.raises(inro_fx.ModelError, match="its output has no gradient"):
        inro_fx.plan_bits(NoGradient().eval(), torch.randn(2, 8))
