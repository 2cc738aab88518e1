"""State that forward reads and writes: it starts where the model had it, and the model keeps its own."""

import collections
import itertools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import relative
from test_capture import net
from torch import nn

import inro_fx


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


def linear(inner=16, out=16, **kwargs):
    return nn.Linear(inner, out, **kwargs)


def agrees(model, small, *inputs, within=0.03):
    want, got = model(*inputs), small(*inputs)
    return relative(want, got) < within


class Space(types.SimpleNamespace):
    pass


STATES = {
    "namespace": (lambda: types.SimpleNamespace(step=0), lambda s, y: setattr(s, "step", s.step + 1) or y * s.step),
    "dict of lists": (lambda: {"a": []}, lambda s, y: s["a"].append(y) or y * len(s["a"])),
    "list of lists": (lambda: [[], []], lambda s, y: s[1].append(1) or y * len(s[1])),
    "counter": (collections.Counter, lambda s, y: s.update(a=1) or y * s["a"]),
    "ordered dict": (collections.OrderedDict, lambda s, y: s.update({len(s): 1}) or y * len(s)),
    "defaultdict": (lambda: collections.defaultdict(int), lambda s, y: s.__setitem__("n", s["n"] + 1) or y * s["n"]),
    "count": (lambda: itertools.count(1), lambda s, y: y * next(s)),
    "array": (lambda: np.zeros(1), lambda s, y: s.__iadd__(1) is None or y * float(s[0])),
    "numpy generator": (lambda: np.random.default_rng(3), lambda s, y: y * float(s.random())),
    "torch generator": (lambda: torch.Generator().manual_seed(3), lambda s, y: y * torch.rand(1, generator=s)),
    "deque": (lambda: collections.deque(maxlen=2), lambda s, y: s.append(y) or sum(s)),
    "cache": (lambda: Space(k=None), lambda s, y: setattr(s, "k", y if s.k is None else torch.cat([s.k, y])) or s.k.sum(0)),
    "tensor": (lambda: torch.zeros(()), lambda s, y: y * s.add_(1)),
    "vector": (lambda: torch.zeros(16), lambda s, y: y * s.add_(1)),
    "integers": (lambda: torch.zeros(2, 2, dtype=torch.long), lambda s, y: y * s.add_(1).sum()),
    "tensor in a list": (lambda: [torch.zeros(())], lambda s, y: y * s[0].add_(1)),
    "tensor in a dict": (lambda: {"n": torch.zeros(())}, lambda s, y: y * s["n"].add_(1)),
}


def contents(value):
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    return repr(value) if not isinstance(value, Space) else repr(value.k)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", STATES)
def test_state_of_any_kind_starts_where_the_model_had_it_and_the_model_is_unchanged(name):
    make, step = STATES[name]
    model = net(lambda self, x: step(self.state, self.fc(x)), fc=linear())
    model.state = make()
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    assert contents(model.state) == contents(make())
    if name != "torch generator":                                  # Python cannot copy it: the two share it
        assert contents(small.state) == contents(make())
    for _ in range(3):
        x = torch.randn(3, 16)
        if name == "torch generator":
            model.state.manual_seed(4)
            want = model(x)
            small.state.manual_seed(4)
            assert relative(want, small(x)) < 0.03
        else:
            assert agrees(model, small, x)


def test_a_buffer_that_forward_binds_anew():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = linear()
            self.register_buffer("ema", torch.zeros(16))

        def forward(self, x):
            y = self.fc(x)
            self.ema = 0.9 * self.ema + 0.1 * y.mean(0)
            if "late" not in self._buffers:
                self.register_buffer("late", torch.ones(()))
            return y - self.ema * self.late
    model = Average().eval()
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    assert "late" not in small._buffers
    assert small.ema.norm() == 0
    for _ in range(3):
        assert agrees(model, small, torch.randn(3, 16))
