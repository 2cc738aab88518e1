"""Tracing does not change what a model means."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models import close, quantize, quantized, relative
from test_capture import net
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


def length(self, x):
    return self.fc(x) * len(x)


def asserts(self, x):
    assert x.shape[1] == 16
    return self.fc(x)


@pytest.mark.parametrize("forward", [
    lambda self, x: self.fc(x) if x.shape[0] > 4 else -self.fc(x), lambda self, x: self.fc(x) if x.sum() > 0 else -self.fc(x),
    lambda self, x: torch.stack([self.fc(row) for row in x.unbind(0)]), length, asserts, lambda self, x: self.fc(x)[: int(x[0, 0] > 0) + 1],
    lambda self, x: sum(self.fc(row) for row in x), lambda self, x: [self.fc(x), -self.fc(x)][int(x.max() > 2)], lambda self, x: self.fc(x) if x.any() else x,
], ids=range(9))
def test_branches_are_right_on_both_sides(forward):
    model = net(forward, fc=nn.Linear(16, 16))
    for rows in (2, 6):
        small = quantized(model, torch.randn(rows, 16))
        for x in (torch.randn(6, 16), -torch.rand(2, 16), torch.rand(5, 16) * 3, torch.zeros(1, 16)):
            assert close(model, small, x)


def test_a_dict_that_forward_fills_and_reads():
    def forward(self, d):
        d["h"] = torch.relu(self.a(d["x"]))
        d.update(y=self.b(d.pop("h")))
        return d["y"]
    model = net(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    mine = {"x": torch.randn(2, 16)}
    small = quantized(model, (mine,))
    assert list(mine) == ["x"]
    d, e = ({"x": torch.randn(3, 16)} for _ in range(2))
    e["x"] = d["x"]
    assert relative(model(d), small(e)) < 0.03
    assert list(d) == list(e)
    assert inro_fx.report(small).coverage == 1


def test_signatures_defaults_and_flags():
    model = net(lambda self, x, scale=2.0, *, mask=None, flag=True: self.fc(x) * scale * (1 if flag else -1) + (0 if mask is None else mask), fc=nn.Linear(16, 16))
    x = torch.randn(2, 16)
    for example in (x, (x,), (x, 3.0), {"x": x}, {"x": x, "mask": torch.randn(2, 16)}, {"x": x, "flag": False}):
        small = quantized(model, example)
        for args, kwargs in (((x,), {}), ((x, 5.0), {}), ((x,), {"mask": x}), ((x,), {"flag": False}), ((), {"scale": 1, "x": x})):
            assert relative(model(*args, **kwargs), small(*args, **kwargs)) < 0.02
        with pytest.raises(TypeError):
            small(x, nonsense=1)
    stars = net(lambda self, *xs: sum(self.fc(x) for x in xs), fc=nn.Linear(16, 16))
    assert close(stars, quantized(stars, (x, x)), x, x, x)
    named = net(lambda self, **kw: self.fc(kw["a"]) - kw.get("b", 0), fc=nn.Linear(16, 16))
    assert relative(named(a=x, b=x), quantized(named, {"a": x})(a=x, b=x)) < 0.02


def test_a_model_left_in_training_mode():
    model = net(lambda self, x: F.dropout(self.drop(self.norm(self.fc(x))), 0.5, training=self.training), fc=nn.Linear(16, 16), norm=nn.BatchNorm1d(16), drop=nn.Dropout(0.5))
    model.train()
    before = copy.deepcopy(model.state_dict())
    small = inro_fx.quantize_graph(model, torch.randn(4, 16))
    assert model.training and not small.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    x = torch.randn(4, 16)
    assert torch.equal(small(x), small(x))
    assert relative(model.eval()(x), small(x)) < 0.02
    assert (small.train()(x) == 0).any()
    assert torch.equal(small.eval()(x), nn.Sequential(small).train(False)(x))


def test_context_managers_inside_forward():
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.a(x.float())
        with torch.no_grad():
            z = self.b(x)
        return y, z
    model = net(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    small = quantized(model, torch.randn(2, 16))
    x = torch.randn(2, 16, requires_grad=True)
    for context in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            for want, got in zip(model(x), small(x), strict=True):
                assert (want.dtype, want.requires_grad) == (got.dtype, got.requires_grad)
                assert relative(want, got) < 0.02


@pytest.mark.parametrize("forward", [
    lambda self, x: (lambda y: y + y.add_(1))(torch.relu_(self.fc(x))), lambda self, x: (lambda h: (h.__setitem__((slice(None), 0), 0), self.fc(h))[1])(self.fc(x)),
    lambda self, x: torch.empty(x.shape[0], 16).copy_(self.fc(x)), lambda self, x: self.fc(x).mul_(2).clamp_(min=0), lambda self, x: self.fc(x.add_(1)),
    lambda self, x: torch.add(self.fc(x), 1, out=torch.empty(x.shape[0], 16)), lambda self, x: F.relu(self.fc(x), inplace=True).t_(),
], ids=range(7))
def test_in_place_operations(forward):
    model = net(forward, fc=nn.Linear(16, 16))
    x = torch.randn(2, 16)
    with torch.no_grad():
        small = quantized(model, x)
        a = torch.randn(3, 16)
        b = a.clone()
        assert relative(model(a), small(b)) < 0.02
    assert torch.equal(a, b)


def test_helpers_move_with_the_model():
    model = net(lambda self, x: self.fc(x) + torch.arange(x.size(1), device=x.device) + self.plain + torch.ones(16, device=x.device), fc=nn.Linear(16, 16))
    model.plain = torch.randn(16, 16)
    small = quantized(model, torch.randn(16, 16))
    moved = copy.deepcopy(small).to("meta")                        # a second device that every machine has
    assert moved(torch.empty(16, 16, device="meta")).device.type == "meta"
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}


def test_names_that_the_passes_would_give_are_the_users():
    model = net(lambda self, x: F.linear(self.lin(x), self.lin_weight) + self.lin_weight_codes + self.lin_scale + self._constant_0 + torch.ones(16) * self.table[0],
                lin=nn.Linear(16, 16))
    model.lin_weight = nn.Parameter(torch.randn(16, 16))
    for name in ("lin_weight_codes", "lin_weight_scale", "lin_scale", "_constant_0", "_tensor_constant0"):
        model.register_buffer(name, torch.randn(16))
    model.lin.register_buffer("weight_codes", torch.randn(3))
    model.table = [torch.randn(16)]
    before = {n: b.clone() for n, b in model.named_buffers()}
    small = quantized(model, torch.randn(2, 16))
    assert close(model, small, torch.randn(3, 16))
    assert all(torch.equal(small.get_buffer(n), b) for n, b in before.items())
    assert list(quantized(model, torch.randn(2, 16)).state_dict()) == list(small.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*jit")
def test_wrapped_models():
    plain, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(2, 16)
    for wrapped, advice in ((nn.DataParallel(plain), "pass model.module"), (torch.jit.script(plain), "the module that it was scripted from"),
                            (torch.compile(plain), "the module that was compiled")):
        with pytest.raises(inro_fx.ModelError, match=advice):
            inro_fx.quantize_graph(wrapped, x)
    traced = torch.fx.symbolic_trace(plain)
    small = quantized(traced, x)
    assert close(traced, small, x)
    assert torch.equal(nn.DataParallel(small)(x), small(x))
    clone, = torch.nn.parallel.replicate(small, ["cpu"], detach=True) if torch.cuda.is_available() else (small,)
    assert torch.equal(clone(x), small(x))
