"""Quantizing in one thread is nothing that another thread can see: sixteen of them do what each would do alone."""

import builtins
import copy
import random
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MODELS, example, first
from test_capture import net
from torch import nn
from torch.nn.modules import module as torch_module

import inro_fx
from inro_fx.passes.capture.draws import OwnDraws


def run_together(jobs):
    """Runs every job in a thread of its own, all started at once; their results, or the first error."""
    start, results = threading.Barrier(len(jobs)), [None] * len(jobs)

    def work(number, job):
        try:
            start.wait(60)
            results[number] = job()
        except BaseException as error:
            results[number] = error
    threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def noisy():
    return net(lambda self, x: self.fc(x) + 0.1 * torch.randn_like(x), fc=nn.Linear(16, 16)), torch.randn(4, 16)


def quantizing(make, scheme):
    model, inputs = make()
    model.eval()
    args, kwargs = example(inputs)

    def job():
        outputs = []
        for _ in range(3):
            small = inro_fx.quantize_graph(model, inputs, scheme)
            outputs.append((str(inro_fx.report(small)), small.state_dict(), None if make is noisy else first(small(*args, **kwargs))))
        return outputs
    return job


def same(a, b):
    return all(x[0] == y[0] and all(torch.equal(x[1][n], t) for n, t in y[1].items()) and (x[2] is None or torch.equal(x[2], y[2]))
               for x, y in zip(a, b, strict=True))


def compiling(width):
    def job():
        outputs = []
        for _ in range(3):
            model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)).requires_grad_(False)
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
            x = torch.linspace(-1, 1, 16).view(2, 8)
            compiled = torch.compile(lambda v, m=model: m[2](torch.relu(m[0](v)) if isinstance(v, torch.Tensor) else v), backend="eager")
            outputs += [compiled(x), model(x)]
        return torch.stack(outputs)
    return job


def hooked(seen, depth):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(depth)]).eval()
    x = torch.linspace(-1, 1, 16).view(2, 8)

    def job():
        outputs = []
        for _ in range(40):
            before = seen.get(threading.get_ident(), 0)
            y = model(x)
            outputs.append((seen.get(threading.get_ident(), 0) - before, y.tolist()))
        return outputs
    return job


def drawing():
    """Draws from generators of its own."""
    def job():
        mine, python, numpy = torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)
        return [(torch.rand((), generator=mine).item(), python.random(), numpy.random()) for _ in range(600)]
    return job


def drawing_from_all():
    """Draws from the generators that all threads share."""
    return [draw for _ in range(600) for draw in draws()]


def draws():
    return [("torch", torch.randint(2**62, ()).item()), ("python", random.getrandbits(62)), ("numpy", int(np.random.randint(2**62)))]


@pytest.fixture
def handles():
    """Of hooks on all modules, which are taken off after the test."""
    handles = []
    yield handles
    for handle in handles:
        handle.remove()


def counted(handles):
    """A hook on all modules that counts their calls, thread by thread."""
    seen = {}

    def count(module, args):
        seen[threading.get_ident()] = seen.get(threading.get_ident(), 0) + 1
    handles.append(torch_module.register_module_forward_pre_hook(torch._dynamo.disable(count)))
    return seen


def quantizers():
    return [quantizing(MODELS["mlp"], "int8"), quantizing(MODELS["encoder"], "int8_dynamic"), quantizing(MODELS["value_branch"], "int4"),
            quantizing(noisy, "int8")]


def test_sixteen_threads_see_what_each_would_see_alone(handles):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                        # torch.compile speaks of what it cannot see: once in a process
        compiling(5)()
    seen = counted(handles)
    jobs = quantizers() + [compiling(w) for w in (6, 7, 9, 11)] + [hooked(seen, d) for d in (1, 2, 3, 4)] + [drawing() for _ in range(4)]
    alone = [job() for job in jobs]
    torch._dynamo.reset()
    before = world()
    together = run_together(jobs)
    assert world() == before
    for number, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert same(a, b) if number < 4 else torch.equal(a, b) if number < 8 else a == b


def test_what_eight_threads_draw_while_others_quantize_is_never_drawn_again(handles):
    jobs = quantizers() + [hooked(counted(handles), d) for d in (1, 2, 3, 4)] + [drawing_from_all] * 8     # torch.compile rewinds generators
    drawn = [d for result in run_together(jobs)[8:] for d in result] + draws()
    assert len(set(drawn)) == len(drawn), f"{len(drawn) - len(set(drawn))} of {len(drawn)} were repeated"


# ---- the same, without chance: what another thread sees while forward runs ----

def world():
    """What all threads share, by identity."""
    owners = dict(builtins=builtins, torch=torch, tensor=torch.Tensor, module=nn.Module, functional=nn.functional, linear=nn.Linear,
                  modules=torch_module, fx=torch.fx, proxy=torch.fx.Proxy, graph=torch.fx.Graph, overrides=torch.overrides, random=random)
    found = {f"{owner}.{name}": id(value) for owner, there in owners.items() for name, value in vars(there).items()
             if callable(value) and not name.startswith("_C") and not isinstance(value, type(sys))}
    hooks = {name: len(value) for name, value in vars(torch_module).items() if name.startswith("_global_") and hasattr(value, "__len__")}
    return found | hooks | dict(profile=sys.getprofile(), trace=None, threads=torch.get_num_threads(), dtype=torch.get_default_dtype())


class Watched(nn.Module):
    """Its forward lets another thread look around, and waits for it."""

    def __init__(self, look, noise=False):
        super().__init__()
        self.fc, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.__dict__["look"], self.noise = staticmethod(look), noise

    def __deepcopy__(self, memo):
        new = Watched(self.look.__func__, self.noise)
        new.fc, new.head = copy.deepcopy(self.fc, memo), copy.deepcopy(self.head, memo)
        return new.train(self.training)

    def forward(self, x):
        thread = threading.Thread(target=self.look.__func__)
        thread.start()
        thread.join()
        y = self.fc(x)
        return self.head(y + torch.rand(32) if self.noise else y)


LSTM = nn.LSTM(16, 16, num_layers=2, dropout=0.5)
GENERATOR = torch.Generator().manual_seed(1)
DRAWING = {
    "rand": lambda x: torch.rand(3), "rand_like": torch.rand_like, "dropout": F.dropout, "dropout in place": lambda x: F.dropout(x.clone(), inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True), "dropout1d": lambda x: F.dropout1d(x[None]),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0], "rrelu": lambda x: F.rrelu(x, training=True), "gumbel": F.gumbel_softmax,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5), "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2), "randperm": lambda x: torch.randperm(9), "normal": lambda x: torch.normal(0.0, 1.0, (3,)),
    "poisson": lambda x: torch.poisson(x.sigmoid()), "exponential": lambda x: torch.empty(5).exponential_(),
    "LSTM": lambda x: LSTM.train()(x)[0], "all threads' generator": lambda x: torch.rand(3, generator=torch.default_generator),
    "a generator": lambda x: torch.rand(3, generator=torch.Generator().manual_seed(1)), "a global one": lambda x: torch.rand(3, generator=GENERATOR),
}
QUIET = {
    "dropout of none": lambda x: F.dropout(x, 0.0), "no dropout": lambda x: F.dropout(x, training=False),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), "LSTM": lambda x: LSTM.eval()(x)[0],
    "linear": lambda x: x @ x.T,
}


@pytest.mark.parametrize(("draw", "draws"), [(f, True) for f in DRAWING.values()] + [(f, False) for f in QUIET.values()], ids=[*DRAWING, *QUIET])
def test_draws_of_the_compilers_runs_never_touch_the_generator_of_all_threads(draw, draws, monkeypatch):
    monkeypatch.setattr(torch.random, "fork_rng", None)
    GENERATOR.manual_seed(1)
    x = torch.randn(4, 16)
    for seed, context in enumerate((torch.no_grad, torch.enable_grad)):
        results = []
        for _ in range(2):
            torch.manual_seed(seed)
            with OwnDraws() as own, context():
                results.append(draw(x))
            assert own.drew is draws
        assert torch.equal(*results)
    model, before = net(lambda self, x: (self.fc(x), draw(x)), fc=nn.Linear(16, 16)).eval(), torch.get_rng_state()
    small = inro_fx.quantize_graph(model, x)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(GENERATOR.get_state(), torch.Generator().manual_seed(1).get_state())
    for _ in range(2):
        outputs = []
        for either in (model, small):
            torch.manual_seed(2)
            GENERATOR.manual_seed(1)
            outputs += either(x), either(x)
        assert all(torch.equal(a[1], b[1]) for a, b in zip(outputs[:2], outputs[2:], strict=True))


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_that_all_threads_share_is_changed_while_a_model_is_quantized(inplace):
    changes, before = [], world()
    before.pop("profile")

    def look():
        now = world()
        changes.append([name for name, value in before.items() if now.get(name) != value])
    inro_fx.quantize_graph(Watched(look).eval(), torch.randn(2, 16), inplace=inplace)
    assert len(changes) >= 2
    assert not [c for c in changes if c]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_hooks_on_all_modules_do_not_hear_the_runs_of_the_compiler(name, scheme, handles):
    model, inputs = MODELS[name]()
    seen = counted(handles)
    inro_fx.quantize_graph(model.eval(), inputs, scheme)
    assert seen == {}


@pytest.mark.parametrize("kind", ["pre", "forward", "backward"])
def test_hooks_on_all_modules_fire_in_other_threads_while_one_quantizes(kind, handles):
    counts, runs = {}, []

    def hook(*_):
        counts[threading.get_ident()] = counts.get(threading.get_ident(), 0) + 1
    register = dict(pre=torch_module.register_module_forward_pre_hook, forward=torch_module.register_module_forward_hook,
                    backward=torch_module.register_module_full_backward_hook)[kind]
    handles.append(register(hook))
    other, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4, requires_grad=True)

    def look():
        here = threading.get_ident()
        counts[here] = 0
        with torch.enable_grad():
            y = other(x)
            if kind == "backward":
                y.sum().backward()
        runs.append(counts[here] if kind != "backward" else sum(counts.values()))
        counts.clear()
    look()
    expected = runs[0]
    inro_fx.quantize_graph(Watched(look).eval(), torch.randn(2, 16))
    assert expected and set(runs) == {expected}


@pytest.mark.parametrize("noise", [False, True], ids=["quiet model", "model that draws"])
def test_what_another_thread_draws_during_forward_is_never_drawn_again(noise):
    drawn = []

    def look():
        drawn.extend(draws())
    model = Watched(look, noise).eval()
    for _ in range(3):
        inro_fx.quantize_graph(model, torch.randn(2, 16))
        look()
    assert len(drawn) > 12
    assert len(set(drawn)) == len(drawn)


def test_a_float_model_compiles_in_another_thread_while_one_quantizes():
    results = []

    def look():
        model = nn.Linear(4, 4)
        try:
            compiled = torch.compile(lambda v: model(v) * torch.ones(4) if isinstance(v, torch.Tensor) and len(v) else v, backend="eager")
            results.append(torch.equal(compiled(torch.ones(2, 4)), model(torch.ones(2, 4))))
        except BaseException as error:
            results.append(error)
    inro_fx.quantize_graph(Watched(look).eval(), torch.randn(2, 16))
    assert len(results) >= 2
    assert results == [True] * len(results)


@pytest.mark.parametrize("jobs", [4])
def test_one_model_is_quantized_and_called_by_several_threads(jobs):
    model, x = MODELS["encoder"]()
    model.eval()
    small = inro_fx.quantize_graph(model, x)
    want, wanted = small(x), str(inro_fx.report(small))

    def job():
        return [(str(inro_fx.report(inro_fx.quantize_graph(model, x))), small(x)) for _ in range(2)]
    for result in run_together([job] * jobs):
        assert all(text == wanted and torch.equal(y, want) for text, y in result)
