"""What a forward does besides returning: draws, counters, writes, hooks happen once, as in the float model; constants are the model's own."""

import copy
import functools
import gc
import random
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import relative
from test_capture import net
from test_guards import alike, layers
from torch import nn

import inro_fx
from inro_fx.passes.scheme import Identity

EVENTS, REGISTRY = [], []


@pytest.fixture(autouse=True)
def _nothing_yet():
    EVENTS.clear()
    REGISTRY.clear()


def state(model, like):
    """The buffers and plain attributes that ``like`` has, as ``model`` has them."""
    return {f"{path}.{name}": copy.deepcopy(getattr(model.get_submodule(path), name)) for path, module in like.named_modules()
            for name, value in {**module._buffers, **vars(module)}.items() if isinstance(value, (torch.Tensor, int, list, dict)) and not name.startswith("_")}


def happens(call, model, like):
    """All that a call does: its result or error, the arguments, the model's state, what was told on the way, the random states."""
    EVENTS.clear()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    args = copy.deepcopy(call)
    try:
        result = model(*args)
    except Exception as error:
        result = type(error)
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return result, (args, state(model, like), list(EVENTS), random_states)


def the_same_happens(model, example, *calls):
    """Call by call in the quantized and in the float model; a strict one that refuses has done nothing."""
    model.eval()
    small, reference = inro_fx.quantize_graph(model, copy.deepcopy(example), Identity()), copy.deepcopy(model)
    for i, call in enumerate((example, *calls, example)):
        assert alike(happens(call, reference, model), happens(call, small, model)), f"call {i}"
    strict, reference = inro_fx.quantize_graph(model, copy.deepcopy(example), Identity(), strict=True), copy.deepcopy(model)
    for i, call in enumerate((example, *calls)):
        before = state(strict, model)
        result, rest = happens(call, strict, model)
        if i and result is inro_fx.GraphNotTaken:
            nothing = happens(call, nn.Module(), nn.Module())[1]
            assert alike((nothing[0], before, *nothing[2:]), rest), f"strict call {i} is refused after something had happened"
        else:
            assert alike(happens(call, reference, model), (result, rest)), f"strict call {i}"


# ---- once, also where the graph is left ----

def counted(self, x):
    self.n += 1
    return x


def listed(self, x):
    self.log.append(x.shape[0])
    return x


def summed(self, x):
    self.total.add_(1)
    return x


def told(self, x):
    EVENTS.append(bool(x.sum() > 0))
    return x


def drawn(self, x):
    return x + torch.rand_like(x)


def dropped(self, x):
    return F.dropout(x, 0.5, training=True)


def drawn_by_python(self, x):
    return x * random.random()


def drawn_by_numpy(self, x):
    return x * float(np.random.rand())


def written(self, x):
    return x.add_(1)


def looked(self, x):
    self.n += int(x.sum() > 0)
    return x


EFFECTS = (counted, listed, summed, told, drawn, dropped, drawn_by_python, drawn_by_numpy, written, looked)
LEAVES_THE_GRAPH = {
    "size": (lambda self, x: sum(self.a(x) for _ in range(x.shape[1])), (torch.ones(2, 2, 8),), [(torch.ones(2, 3, 8),), (torch.ones(3, 1, 8),)]),
    "rank": (lambda self, x: self.a(x) if x.squeeze(1).dim() == 3 else self.b(x), (torch.ones(2, 2, 8),), [(torch.ones(2, 1, 8),)]),
    "an operator raises": (lambda self, x: self.a(x) @ torch.ones(8, 2), (torch.ones(2, 2, 8),), [(torch.ones(2, 2, 7),)]),
}


def with_state(model):
    model.n, model.log = 0, []
    model.register_buffer("total", torch.zeros(()))
    return model


@pytest.mark.parametrize(("effect", "end"), [*((e, "size") for e in EFFECTS), *((e, end) for e in (counted, drawn, written) for end in ("rank", "an operator raises"))])
def test_what_happened_before_the_graph_is_left_does_not_happen_again(effect, end):
    use, example, calls = LEAVES_THE_GRAPH[end]
    the_same_happens(net(lambda self, x: use(self, self.effect(x)), effect=with_state(net(effect)), **layers("a", "b")), example, *calls)


@pytest.mark.parametrize("effect", [counted, summed, told, drawn, written])
def test_in_the_forward_itself_too(effect):
    use, example, calls = LEAVES_THE_GRAPH["size"]
    the_same_happens(with_state(net(lambda self, x: use(self, effect(self, x)), **layers("a", "b"))), example, *calls)


@pytest.mark.parametrize("gate", [lambda self, x: None if x.sum() > 0 else x, lambda self, x: "a" if x.sum() > 0 else "b"], ids=["none", "string"])
@pytest.mark.parametrize("effect", [counted, drawn, written])
def test_an_effect_before_a_child_answers_otherwise(effect, gate):
    def forward(self, x):
        y = self.effect(x)
        g = self.gate(y)
        return getattr(self, g)(y) if isinstance(g, str) else self.a(y) if g is None else self.b(y)
    the_same_happens(net(forward, effect=with_state(net(effect)), gate=net(gate), **layers("a", "b")), (torch.ones(2, 8),), (-3 * torch.ones(2, 8),), (torch.ones(3, 8),))


def test_an_effect_before_a_hook_that_looks():
    model = net(lambda self, x: self.second(self.a(self.first(x))), first=net(lambda self, x: x + 1), second=net(lambda self, x: sum(x for _ in range(x.shape[1]))), **layers("a"))
    model.first.register_forward_hook(lambda m, args, out: EVENTS.append("first"))
    model.second.register_forward_pre_hook(lambda m, args: EVENTS.append("second"))
    the_same_happens(model, (torch.ones(2, 2, 8),), (torch.ones(2, 3, 8),))


# ---- draws for tensors that are no node ----

SIGMA = torch.rand(8) + 0.5
DRAWS = {
    "randn_like": lambda self: torch.randn_like(self.sigma),
    "randn_like of a global": lambda self: torch.randn_like(SIGMA),
    "bernoulli": lambda self: torch.bernoulli(self.sigma / 2),
    "normal": lambda self: torch.normal(self.sigma, self.sigma),
    "multinomial": lambda self: self.many[0][torch.multinomial(self.sigma, 8, replacement=True)],
    "dropout": lambda self: F.dropout(self.sigma, 0.5, training=True),
    "in place": lambda self: torch.empty(8).uniform_(),
    "in place of its own": lambda self: self.many[1].normal_().clone(),
    "distribution": lambda self: torch.distributions.Normal(self.sigma, self.sigma).sample(),
    "randperm": lambda self: self.sigma[torch.randperm(8)],
    "method": lambda self: self.sigma.clone().exponential_(),
    "shuffled by python": lambda self: self.sigma[random.sample(range(8), 8)],
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_functions_of_tensors_of_the_model(draw):
    model = net(lambda self, x: self.a(x) + DRAWS[draw](self), **layers("a")).eval()
    model.sigma, model.many = torch.rand(8) / 2 + 0.5, [torch.arange(8.0), torch.zeros(8)]
    x = (torch.randn(2, 8),)
    small, reference = inro_fx.quantize_graph(model, x, Identity()), copy.deepcopy(model)
    for _ in range(2):
        assert alike(*(happens(x, m, model) for m in (reference, small)))
    assert not torch.equal(small(*x), small(*x))


# ---- constants that are reached around the modules ----

def kept(model, value):
    model.kept = value
    return model


def registry(model, value):
    REGISTRY.append(value)
    return model


OWN = {
    "parameters": (lambda m: m, lambda self: self._parameters["w"]),
    "vars": (lambda m: m, lambda self: vars(self)["_parameters"]["w"].t()),
    "get_parameter": (lambda m: m, lambda self: self.get_parameter("w")),
    "named_parameters": (lambda m: m, lambda self: dict(self.named_parameters())["w"].t()),
    "state_dict": (lambda m: m, lambda self: self.state_dict()["w"]),
    "bound method": (lambda m: kept(m, m.get_parameter), lambda self: self.kept("w")),
    "partial": (lambda m: kept(m, functools.partial(m.get_parameter, "w")), lambda self: self.kept()),
    "list of modules": (lambda m: kept(m, [m]), lambda self: self.kept[0].w.t()),
    "dict of tensors": (lambda m: kept(m, {"w": m.w}), lambda self: self.kept["w"]),
    "object": (lambda m: kept(m, Holder(m.w)), lambda self: self.kept.w),
}
OTHERS = {                                                      # which Python's own copies do not keep together
    "view": (lambda m: kept(m, m.w.detach().t()), lambda self: self.kept),
    "views": (lambda m: kept(m, [m.w.detach()[:4], m.w.detach()[4:]]), lambda self: torch.cat(self.kept)),
    "lambda": (lambda m: kept(m, lambda: m.w), lambda self: self.kept()),
    "closure over a view": (lambda m: kept(m, (lambda w: lambda: w)(m.w.detach().t())), lambda self: self.kept()),
    "weak reference": (lambda m: kept(m, weakref.ref(m)), lambda self: self.kept().w),
    "registry": (lambda m: registry(m, m.w), lambda self: REGISTRY[0].t()),
    "registry of modules": (lambda m: registry(m, m), lambda self: REGISTRY[0].w),
}


class Holder:
    def __init__(self, w):
        self.w = w


def around(kind):
    store, read = {**OWN, **OTHERS}[kind]
    model = net(lambda self, x: F.linear(x, read(self)) + self.a(x), **layers("a")).eval()
    model.w = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    return store(model)


@pytest.mark.parametrize("kind", [*OWN, *OTHERS])
def test_what_is_called_codes_is_the_results_own_however_it_is_reached(kind):
    model, x = around(kind), torch.randn(2, 8)
    want = model(x)
    try:
        small = inro_fx.quantize_graph(model, x)
        assert torch.equal(inro_fx.quantize_graph(model, x, Identity())(x), want)
    except inro_fx.ModelError:
        assert kind in OTHERS
        return
    got = small(x)
    assert relative(want, got) < 0.03
    if kind in OWN:                                            # what it stores is what it reads
        other = copy.deepcopy(small)
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.zero_()
        assert not other(x).any()
        assert torch.equal(small(x), got)
    if "w" not in {r.layer for r in inro_fx.report(small).rows}:
        assert "w" in {s.layer for s in inro_fx.report(small).skipped}
        return
    model.w.data.zero_()
    assert torch.equal(small(x), got)
    weight = weakref.ref(model.w)
    del model
    gc.collect()
    assert weight() is None or kind in OTHERS
    assert torch.equal(small(x), got)


# ---- hooks ----

def event(name, *values):
    EVENTS.append((name, *[[t.detach().clone() for t in v if isinstance(t, torch.Tensor)] if isinstance(v, tuple) else v.detach().clone() for v in values]))


HOOKS = {
    "forward": lambda m, n: m.register_forward_hook(lambda _, args, out: event(n, args, out)),
    "forward pre": lambda m, n: m.register_forward_pre_hook(lambda _, args: event(n, args)),
    "forward with kwargs": lambda m, n: m.register_forward_hook(lambda _, args, kwargs, out: event(n, args, out), with_kwargs=True),
    "forward changes": lambda m, n: m.register_forward_hook(lambda _, args, out: out * 2),
    "forward pre changes": lambda m, n: m.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "backward": lambda m, n: m.register_full_backward_hook(lambda _, gi, go: event(n, gi, go)),
    "backward pre": lambda m, n: m.register_full_backward_pre_hook(lambda _, go: event(n, go)),
    "backward pre changes": lambda m, n: m.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,)),
    "backward changes": lambda m, n: m.register_full_backward_hook(lambda _, gi, go: (gi[0] * 5,)),
}


def hooked(path, *kinds):
    torch.manual_seed(0)
    block = net(lambda self, x: torch.relu(self.a(x)), **layers("a"))
    model = net(lambda self, x: self.block(self.act(x)) * 2, block=block, act=nn.Tanh()).eval()
    for kind in kinds:
        HOOKS[kind](model.get_submodule(path), kind)
    return model


def with_gradient(model, x):
    EVENTS.clear()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, list(EVENTS)


@pytest.mark.parametrize("path", ["", "block.a", "act"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_every_kind_before_and_after(kind, path):
    x = torch.randn(2, 8)
    before = inro_fx.quantize_graph(hooked(path, kind), x, Identity())
    after = inro_fx.quantize_graph(hooked(path), x, Identity())
    HOOKS[kind](after.get_submodule(path), kind)
    for small in (before, after):
        assert alike(with_gradient(hooked(path, kind), x), with_gradient(small, x))


TABLES = {"_forward_hooks": lambda m, args, out: out * 7, "_forward_pre_hooks": lambda m, args: (args[0] * 7,), "_backward_pre_hooks": lambda m, go: (go[0] * 7,)}


@pytest.mark.parametrize("path", ["", "block.a"])
@pytest.mark.parametrize("kind", ["forward", "forward pre", "forward changes", "backward pre"])
def test_a_hook_that_is_exchanged_taken_off_and_put_on(kind, path):
    x = torch.randn(2, 8)
    pair = [inro_fx.quantize_graph(hooked(path, kind), x, Identity()), hooked(path, kind)]
    for m in pair:
        for table, other in TABLES.items():
            hooks = getattr(m.get_submodule(path), table)
            hooks.update(dict.fromkeys(hooks, other))
    assert alike(*(with_gradient(m, x) for m in pair))
    for m in pair:
        for table in TABLES:
            getattr(m.get_submodule(path), table).clear()
    assert alike(*(with_gradient(m, x) for m in pair))
    for m in pair:
        HOOKS["forward changes"](m.get_submodule(path), "late")
    assert alike(*(with_gradient(m, x) for m in pair))


def library():
    """A class with hooks that its own module of Python has set: these are traced."""
    namespace = {"__name__": "some_library", "nn": nn}
    exec("class Scaled(nn.Linear):\n"
         "    def __init__(self, *a):\n"
         "        super().__init__(*a)\n"
         "        self.handle = self.register_forward_hook(twice)\n"
         "def twice(m, args, out): return out * 2\n"
         "def thrice(m, args, out): return out * 3\n", namespace)
    return namespace


def test_a_hook_of_a_library_that_is_exchanged_for_another():
    names = library()
    model, x = nn.Sequential(names["Scaled"](8, 8).requires_grad_(False), nn.ReLU()).eval(), torch.randn(2, 8)
    pair = [inro_fx.quantize_graph(model, x, Identity()), copy.deepcopy(model)]
    assert torch.equal(*(m(x) for m in pair))
    for m in pair:
        hooks = m[0]._forward_hooks
        hooks.update(dict.fromkeys(hooks, names["thrice"]))
    assert torch.equal(*(m(x) for m in pair))
    for m in pair:
        m[0]._forward_hooks.clear()
    assert torch.equal(*(m(x) for m in pair))


# ---- export of what forward writes ----

def steps(self, x):
    self.n += 1
    return self.a(x) * self.n


def appends(self, x):
    self.log.append(1)
    return self.a(x) * len(self.log)


def adds(self, x):
    self.total.add_(1)
    return self.a(x) * self.total


def replaces(self, x):
    self.plain = self.plain + 1
    return self.a(x) * self.plain


def by_name(self, x):
    self.counts["calls"] = self.counts.get("calls", 0) + 1
    return self.a(x) * self.counts["calls"]


@pytest.mark.filterwarnings("ignore")                            # of torch.export
@pytest.mark.parametrize(("forward", "deep", "capture"), [*((f, True, "export") for f in (steps, appends, adds, replaces, by_name)), (steps, False, "export"), (steps, True, "auto"), (replaces, False, "auto")])
def test_what_forward_writes_is_no_constant(forward, deep, capture):
    child = with_state(net(forward, **layers("a")))
    child.plain, child.counts = torch.zeros(()), {}
    model = (net(lambda self, x: self.child(x), child=child) if deep else child).eval()
    x = torch.randn(2, 8)
    try:
        small = inro_fx.quantize_graph(model, x, Identity(), capture=capture)
    except inro_fx.ModelError:
        assert capture == "export"
        return
    reference = copy.deepcopy(model)
    for _ in range(3):
        assert torch.equal(small(x), reference(x))
    assert alike(state(reference, model), state(small, model))


CACHE, STREAM, NUMPYS, NAN = {"s": {"n": 0}, "list": [[1]]}, random.Random(1), np.random.default_rng(0), float("nan")
OUTSIDE = {
    "nested dict": (lambda x: x + CACHE["s"].update(n=CACHE["s"]["n"] + 1) if False else (CACHE["s"].update(n=CACHE["s"]["n"] + 1), x)[1], lambda: CACHE["s"]["n"]),
    "nested list": (lambda x: (CACHE["list"][0].append(1), x)[1], lambda: len(CACHE["list"][0])),
    "a stream of its own": (lambda x: x + STREAM.random() * 0, lambda: STREAM.getstate()),
    "numpy's": (lambda x: x + NUMPYS.random() * 0, lambda: repr(NUMPYS.bit_generator.state)),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_is_changed_deep_outside_of_the_model_is_put_back_and_goes_on(kind):
    change, state = OUTSIDE[kind]
    model, x = net(lambda self, x: self.fc(change(x)), fc=nn.Linear(8, 8)), torch.randn(2, 8)
    before = state()
    small = inro_fx.quantize_graph(model, x)
    assert state() == before
    small(x)
    assert state() != before


def test_a_global_that_is_no_number_is_no_change():
    small = inro_fx.quantize_graph(net(lambda self, x: self.fc(x.masked_fill(x > 9, NAN)), fc=nn.Linear(8, 8)), torch.randn(2, 8))
    assert inro_fx.report(small).regions == []


@pytest.mark.parametrize("draw", [lambda x: torch.native_dropout(x, 0.0, True)[0], lambda x: x * torch.rand(3, 4, device="meta").shape[0] + torch.rand_like(x) * 0])
def test_draws_of_nothing_leave_the_generator(draw):
    model, x = net(lambda self, x: draw(self.fc(x)), fc=nn.Linear(8, 8)), torch.randn(2, 8)
    before = torch.get_rng_state()
    small = inro_fx.quantize_graph(model, x)
    assert torch.equal(before, torch.get_rng_state())
    assert inro_fx.report(small).regions == []


def test_draws_only_where_gradients_are_on_leave_the_generator():
    model = net(lambda self, x: self.a(x + torch.randn(8)) if torch.is_grad_enabled() else self.a(x), **layers("a"))
    before = torch.get_rng_state()
    small = inro_fx.quantize_graph(model, torch.ones(2, 8), Identity())
    assert torch.equal(torch.get_rng_state(), before)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            outcomes = []
            for m in (model, small):
                torch.manual_seed(1)
                outcomes.append((m(torch.ones(2, 8)), torch.get_rng_state()))
        assert all(map(torch.equal, *outcomes))
