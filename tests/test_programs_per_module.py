"""Calls of several kinds: each gets a program of its own when it recurs, numbers that flow into arithmetic are inputs, and a hook that is gone is gone."""

import copy
import random

import pytest
import torch
from models import first, relative
from test_capture import net
from torch import nn

import inro_fx


def made(forward, *inputs, **children):
    """A model with a quantized layer ``fc`` and this forward, its result, and a float twin of the result."""
    model = net(forward, fc=nn.Linear(16, 16), **children).eval()
    small = inro_fx.quantize_graph(model, inputs if not isinstance(inputs[0], dict) else inputs[0])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.fc.weight.copy_(small.fc.weight)
    return small, twin


def inside(small):
    return sum(p.calls for p in inro_fx.report(small).programs)


def outside(small):
    return sum(inro_fx.report(small).outside.values())


def share(small, twin, calls, warm=4):
    """Every call of ``calls`` is right; the share of those after the first ``warm`` that a program answered."""
    for number, (args, kwargs) in enumerate(calls):
        if number == warm:
            before = inside(small), outside(small)
        want, got = first(twin(*args, **kwargs)), first(small(*args, **kwargs))
        assert want.shape == got.shape and relative(want, got) < 0.02, f"call {number}"
    more, none = inside(small) - before[0], outside(small) - before[1]
    assert more + none >= (len(calls) - warm) * 0.9, "calls that nobody counted"
    return more / (more + none)


def x():
    return torch.randn(3, 16)


def optional(self, x, mask=None):
    y = self.fc(x)
    return y if mask is None else y * mask + mask.sum()


def flagged(self, x, double=False, *, act="relu"):
    y = self.fc(x)
    y = y.relu() if act == "relu" else y.tanh()
    return (y * 2, y) if double else (y,)


def parts(self, x, extra=None):
    return self.fc(x) if extra is None else self.fc(x) + sum(extra.values())


KINDS = {
    "absent, then present": (optional, (x(),), [((x(), torch.ones(3, 16)), {})] * 24),
    "present, then absent": (optional, (x(), torch.ones(3, 16)), [((x(),), {})] * 24),
    "in turns": (optional, (x(),), [((x(),), {}) if i % 2 else ((x(),), dict(mask=torch.rand(16))) for i in range(24)]),
    "a flag": (flagged, (x(),), [((x(),), dict(double=True))] * 24),
    "a flag and a string": (flagged, (x(),), [((x(), bool(i & 1)), dict(act="tanh" if i & 2 else "relu")) for i in range(40)]),
    "a dict": (parts, (x(),), [((x(), {"a": x(), "b": x()}), {})] * 24),
    "another rank": (lambda self, x: self.fc(x) if x.dim() == 2 else self.fc(x).sum(1), (x(),), [((torch.randn(2, 4, 16),), {})] * 24),
    "another dtype": (lambda self, x, i: self.fc(x)[:, :2] + i, (x(), torch.zeros(2)), [((x(), torch.ones(2, dtype=torch.int64)), {})] * 24),
    "a list of other length": (lambda self, xs: sum(self.fc(x) for x in xs), ([x()],), [(([x(), x(), x()],), {})] * 24),
}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_another_kind_run_in_a_program_when_they_recur(kind):
    forward, inputs, calls = KINDS[kind]
    small, twin = made(forward, *inputs)
    assert share(small, twin, calls, warm=16 if kind == "a flag and a string" else 6) >= 0.9
    programs = inro_fx.report(small).programs
    assert len(programs) >= 2
    assert all(isinstance(p.calls, int) and p.kind for p in programs)
    assert {p.layer for p in programs} <= {n for n, _ in small.named_modules()}
    assert share(small, twin, [(inputs, {})] * 8, warm=1) >= 0.9            # and the first kind still has its own


def deep(self, x, t):
    return self.fc(x) + torch.sin(t * self.frequencies) if hasattr(self, "frequencies") else self.fc(x) * (t / 10 + 1) - t ** 2


@pytest.mark.parametrize(("forward", "values"), [
    (lambda self, x, t: self.fc(x) * t + t, [*range(2, 30), 0, 1, -1]),
    (lambda self, x, t: self.fc(x + t * 0.01), [0.1 * i - 1 for i in range(30)]),
    (lambda self, x, t: self.fc(x) + torch.sin(torch.arange(16.0) * t), list(range(5, 35))),
    (deep, list(range(1, 31))),
    (lambda self, x, t: self.fc(x) + torch.full((16,), t) + torch.tensor(t), [0.5 * i for i in range(30)]),
    (lambda self, x, t=3: self.fc(x).clamp(-t, t) / max(abs(t), 1e-3) + (-t), [i + 0.5 for i in range(30)]),
], ids=["scale and shift", "float inside", "timestep", "chain", "filled", "clamped"])
def test_a_number_that_only_flows_into_arithmetic_is_an_input_of_the_one_program(forward, values):
    small, twin = made(forward, x(), values[0])
    assert share(small, twin, [((x(), v), {}) for v in values], warm=3) >= 0.9
    assert [p.kind for p in inro_fx.report(small).programs if not p.layer] == ["graph"]
    assert share(small, twin, [((x(),), dict(t=v)) for v in values[:8]], warm=1) >= 0.9


@pytest.mark.parametrize("forward", [
    lambda self, x, n: [x := self.fc(x) for _ in range(n)][-1], lambda self, x, n: self.fc(x) if n > 3 else -self.fc(x),
    lambda self, x, n: self.fc(x)[:, :n].sum(), lambda self, x, n: self.fc(x) * len(str(n)), lambda self, x, n: self.fc(x) * {1: 2.0, 2: 3.0}.get(n, 1.0)],
    ids=["loop", "branch", "slice", "text", "key"])
def test_a_number_that_decides_something_is_right_at_every_call(forward):
    small, twin = made(forward, x(), 2)
    for n in (2, 1, 4, 11, 3, 2, 5, 1, 4, 12, 2):
        a = x()
        assert relative(twin(a, n), small(a, n)) < 0.03


@pytest.mark.parametrize("values", [[True, False], [0, False, 0.0, -0.0], [1, True, 1.0]], ids=str)
def test_equal_numbers_of_other_types_are_not_taken_for_one_another(values):
    small, twin = made(lambda self, x, n: (self.fc(x) * n, n, 1 / n if n else type(n).__name__), x(), values[0])
    for n in values * 6:
        a = x()
        want, got = twin(a, n), small(a, n)
        assert relative(want[0] + 1, got[0] + 1) < 0.02
        assert [(type(v), str(v)) for v in want[1:]] == [(type(v), str(v)) for v in got[1:]]


def test_the_number_of_programs_is_bounded_and_what_has_none_is_right():
    small, twin = made(lambda self, x, name="n0": self.fc(x) * len(name), x())
    for i in [i for i in range(40) for _ in range(5)]:
        a, name = x(), "n" * (i + 1)
        assert relative(twin(a, name), small(a, name)) < 0.02
    assert len(inro_fx.report(small).programs) <= 20


# ---- hooks for one call ----

def doubled(module, args, output):
    return output * 2


HOOKS = {
    "forward": lambda m: m.fc.register_forward_hook(doubled),
    "pre": lambda m: m.fc.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "nested": lambda m: m.body[1][0].register_forward_hook(doubled),
    "keywords": lambda m: m.body.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True),
    "root": lambda m: m.register_forward_hook(doubled),
    "all": lambda m: [child.register_forward_hook(lambda module, args, output: output * 1.1) for child in m.modules()],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_is_there_for_one_call_runs_and_leaves_the_graph_as_it_was(hook):
    small, twin = made(lambda self, x: self.body(self.fc(x)), x(), body=nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh(), nn.ReLU())))
    small(x())
    for _ in range(3):
        a, plain = x(), x()
        handles = [HOOKS[hook](m) for m in (small, twin)]
        assert relative(twin(a), small(a)) < 0.02
        for handle in handles:
            for each in handle if isinstance(handle, list) else [handle]:
                each.remove()
        assert relative(twin(plain), small(plain)) < 0.02
        assert share(small, twin, [((x(),), {})] * 11, warm=1) >= 0.9


def test_a_hook_that_collects_sees_the_same_at_every_call():
    small, twin = made(lambda self, x: self.body(self.fc(x)), x(), body=nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))
    with torch.no_grad():
        twin.body[1].weight.copy_(small.body[1].weight)
    for _ in range(4):
        seen, handles = [[], []], []
        for model, here in zip((small, twin), seen, strict=True):
            handles += [child.register_forward_hook(lambda module, args, output, here=here, n=n: here.append((n, output)))
                        for n, child in model.named_modules()]
        a = x()
        small(a), twin(a)
        for handle in handles:
            handle.remove()
        assert [n for n, _ in seen[0]] == [n for n, _ in seen[1]]
        assert all(relative(w, g) < 0.02 for (_, g), (_, w) in zip(*seen, strict=True))
    assert share(small, twin, [((x(),), {})] * 12, warm=1) >= 0.9


@pytest.mark.parametrize("place", ["fc", "body"])
def test_a_forward_that_is_patched_for_one_call_runs_and_leaves_the_graph_as_it_was(place):
    small, twin = made(lambda self, x: self.body(self.fc(x)), x(), body=nn.ReLU())
    for m in (small, twin):
        m.get_submodule(place).forward = lambda x: x * 0 + 3
    assert relative(twin(x()), small(x())) < 0.02
    for m in (small, twin):
        del m.get_submodule(place).forward
    assert share(small, twin, [((x(),), {})] * 12, warm=2) >= 0.9


# ---- effects ----

def counting(self, x, mask=None, t=1):
    self.count += 1
    return self.fc(x) * t if mask is None else self.fc(x) * mask


@pytest.mark.parametrize("forward", [counting, lambda self, x, mask=None, t=1: counting(self, x, mask, t) + torch.rand(16),
                                     lambda self, x, mask=None, t=1: counting(self, x, mask, t) + random.random()], ids=["counter", "torch", "random"])
def test_making_a_program_of_a_new_kind_counts_and_draws_nothing(forward):
    model = net(forward, fc=nn.Linear(16, 16)).eval()
    model.count = 0
    a = x()
    small = inro_fx.quantize_graph(model, a)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.fc.weight.copy_(small.fc.weight)
    calls = [dict(), dict(mask=torch.ones(16)), dict(t=2)] * 8
    results = []
    for m in (twin, small):
        torch.manual_seed(0)
        random.seed(0)
        m.count = 0
        results.append(([m(a, **call) for call in calls], m.count, torch.rand(2).tolist(), random.random()))
    assert results[0][1:] == results[1][1:]
    assert all(relative(w, g) < 0.02 for w, g in zip(results[0][0], results[1][0], strict=True))


# ---- libraries ----

def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                      max_position_embeddings=128)
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 40, (2, 5))


def test_asking_once_for_the_hidden_states_leaves_the_graph_as_it_was():
    model, ids = llama()
    small = inro_fx.quantize_graph(model, dict(input_ids=ids, use_cache=False))
    for _ in range(2):
        asked = small(input_ids=ids, use_cache=False, output_hidden_states=True)
        assert len(asked.hidden_states) == 3
        plain = [small(input_ids=ids, use_cache=False) for _ in range(4)]
        before = inside(small), outside(small)
        plain += [small(input_ids=ids, use_cache=False) for _ in range(10)]
        assert outside(small) == before[1] and inside(small) > before[0]
        assert all(relative(asked.logits, p.logits) < 1e-3 and p.hidden_states is None for p in plain)


@pytest.mark.parametrize("cache", [False, True])
def test_generate_runs_in_programs(cache):
    model, ids = llama()
    small = inro_fx.quantize_graph(model, dict(input_ids=ids, use_cache=False))
    options = dict(do_sample=False, use_cache=cache, pad_token_id=0, eos_token_id=None, attention_mask=torch.ones_like(ids))
    small.generate(ids, max_new_tokens=16, **options)
    before = inside(small), outside(small)
    out = small.generate(ids, max_new_tokens=24, **options)
    assert out.shape == (2, 29)
    more, none = inside(small) - before[0], outside(small) - before[1]
    assert more / (more + none) >= 0.9, inro_fx.report(small).outside
    with torch.no_grad():
        steps = small(input_ids=out[:, :-1], use_cache=False).logits[:, 4:].topk(2).values
    clear = (steps[..., 0] - steps[..., 1]) > 1e-2                      # not a tie of two words
    greedy = small(input_ids=out[:, :-1], use_cache=False).logits[:, 4:].argmax(-1)
    assert torch.equal(greedy[clear], out[:, 5:][clear])
