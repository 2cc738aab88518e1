"""Nothing is lost: whatever stops quantizing, the model, the generators and torch are as they were; nothing float is kept too long or freed too soon."""

import builtins
import copy
import gc
import io
import logging
import math
import operator
import pickle
import random
import sys
import typing
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from models import MODELS, example, first, relative
from test_capture import net
from torch import fx, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import inro_fx
from inro_fx.schemes import find_scheme

OURS = tuple({str(Path(inro_fx.__file__).parent), str((Path(inro_fx.__file__).parent / "passes").resolve())})


class Rich(nn.Module):
    """Parametrized, recurrent, tied, hooked, in training mode, with state of its own."""

    def __init__(self):
        super().__init__()
        self.fc, self.normed, self.rnn = nn.Linear(16, 16), parametrizations.weight_norm(nn.Linear(16, 16)), nn.GRU(16, 16, batch_first=True)
        self.norm, self.head, self.tied = nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.tied.weight, self.table, self.steps = self.head.weight, torch.randn(16, 16), []
        self.norm.register_forward_hook(lambda module, args, output: output * 1.0)

    def forward(self, x):
        y = self.norm(torch.relu(self.normed(self.fc(x)))) @ self.table
        return self.tied(self.head(self.rnn(y[:, None])[0][:, 0]))


def rich():
    return Rich(), torch.randn(4, 16)


def value(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def snapshot(model):
    """Everything that can be told of a model, by identity and by value."""
    found = {}
    for path, module in model.named_modules():
        kinds = {kind: dict(getattr(module, kind)) for kind in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
                                                                "_backward_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks")}
        found[path] = type(module), {k: list(v.items()) for k, v in kinds.items()}, module.training, {
            k: v for k, v in vars(module).items() if k not in kinds and not k.startswith("_inro")}, sorted(vars(module))
    values = {n: value(t) for n, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    return found, values, [(n, p.requires_grad, p.grad) for n, p in model.named_parameters()]


def unchanged(model, before):
    now = snapshot(model)
    for path, (kind, kinds, training, attributes, names) in before[0].items():
        assert path in now[0], f"{path} is gone"
        assert (kind, training, names) == (now[0][path][0], now[0][path][2], now[0][path][4]), path
        for name, items in kinds.items():
            assert [(k, id(v)) for k, v in items] == [(k, id(v)) for k, v in now[0][path][1][name]], f"{path}: {name}"
        assert {k: id(v) for k, v in attributes.items() if k != "training"} == {k: id(v) for k, v in now[0][path][3].items() if k != "training"}, path
    assert now[0].keys() == before[0].keys()
    assert all(torch.equal(now[1][n], t) for n, t in before[1].items())
    assert now[2] == before[2]


def generators():
    kind, keys, position, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, keys.tolist(), position, rest)


def world():
    """The state of the process, by identity."""
    owners = (builtins, torch, torch.Tensor, nn.Module, nn.functional, nn.Linear, nn.GRU, torch_module, fx, fx.proxy, fx.Proxy, fx.Tracer, fx.Graph,
              fx._symbolic_trace, torch.overrides, random, math, operator, copy, torch._C._nn, torch.nn.parameter.Parameter)
    found = {(o.__name__, name): id(v) for o in owners for name, v in vars(o).items()
             if not isinstance(v, (type(sys), int, float, dict, list, set)) and name not in ("__doc__", "_")}
    hooks = {name: len(v) for name, v in vars(torch_module).items() if name.startswith("_global_") and hasattr(v, "__len__")}
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype(),
             torch.get_num_threads(), sys.getprofile(), len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack()),
             torch.are_deterministic_algorithms_enabled(), len(warnings.filters), fx._symbolic_trace.is_fx_tracing(), torch.get_autocast_dtype("cpu"))
    return found, hooks, modes


def same_world(before):
    now = world()
    assert now[1:] == before[1:]
    assert not [name for name, v in before[0].items() if now[0].get(name) != v]


class Calls:
    """Notes the calls of our functions in this thread; at the ``stop``-th comes Ctrl-C."""

    def __init__(self, stop=0):
        self.stop, self.codes = stop, []

    def __call__(self, frame, event, _):
        # where Python ignores errors: callbacks, and generators that it closes
        hidden = frame.f_code.co_name in ("<genexpr>", "named_parameters") or frame.f_back.f_code.co_filename == weakref.__file__
        if event == "call" and frame.f_code.co_filename.startswith(OURS) and not hidden:
            self.codes.append(frame.f_code)
            if len(self.codes) == self.stop:
                raise KeyboardInterrupt

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


def interrupted(work, number, seed=0):
    """Interrupts ``work`` at calls over its whole length (any call, and any of as many functions), and stops after each one."""
    work(), work()                                                     # what is made once in a process is there
    with Calls() as calls:
        work()
    chance, where = random.Random(seed), {}
    for index, code in enumerate(calls.codes, 1):
        where.setdefault(code, []).append(index)
    functions = chance.sample(list(where.values()), min(number, len(where)))
    chosen = {chance.randrange(1, len(calls.codes)) for _ in range(number)} | {chance.choice(f) for f in functions}
    reached = 0
    for moment in sorted(chosen):
        try:
            with Calls(moment) as calls:
                work()
        except KeyboardInterrupt:
            reached += 1
            yield calls.codes[-1].co_qualname
        else:
            assert len(calls.codes) < moment, "an interrupt was swallowed"
    assert reached > len(chosen) / 2


# ---- interrupts ----

@pytest.mark.parametrize(("make", "number"), [(rich, 6), (MODELS["value_branch"], 4), (MODELS["encoder"], 3)], ids=["rich", "value_branch", "encoder"])
def test_an_interrupt_at_any_moment_leaves_everything_as_it_was(make, number):
    model, x = make()
    inro_fx.quantize_graph(model, x)
    want, before, around, drawn = first(copy.deepcopy(model).eval()(x)), snapshot(model), world(), generators()
    for where in interrupted(lambda: inro_fx.quantize_graph(model, x), number):
        unchanged(model, before)
        same_world(around)
        assert generators() == drawn, where
    small = inro_fx.quantize_graph(model, x)
    assert relative(want, small(x)) < 0.05
    assert inro_fx.report(small).programs


@pytest.mark.parametrize(("make", "number"), [(rich, 8), (MODELS["mlp"], 20), (MODELS["tied"], 10)], ids=["rich", "mlp", "tied"])
def test_an_interrupt_in_place_leaves_a_model_that_runs_each_weight_float_or_codes(make, number):
    model, x = make()
    mine = []

    def work():
        mine[:] = [copy.deepcopy(model)]
        inro_fx.quantize_graph(mine[0], x, inplace=True)
    work()
    want, around, drawn = first(copy.deepcopy(model).eval()(x)), world(), generators()
    for where in interrupted(work, number, 1):
        same_world(around)
        assert generators() == drawn, where
        runs_with_floats_or_codes(mine[0], model)
        assert relative(want, mine[0].eval()(x)) < 0.05, where


def runs_with_floats_or_codes(mine, model):
    for path, module in model.named_modules():
        if "parametrizations" in path:
            continue
        here = mine.get_submodule(path)
        assert isinstance(here, type(module)) or "parametrizations" in module._modules
        for name in [*module._parameters, *module.__dict__.get("_modules", {}).get("parametrizations", ())]:
            before, now = getattr(module, name), getattr(here, name)
            if before is None:
                continue
            bound = find_scheme("int8").bound(before.detach().flatten(1)).max() if before.dim() > 1 else 0
            assert now.shape == before.shape and (now - before).abs().max() <= bound * 1.01, f"{path}.{name}"
            codes = f"{name}_codes" in here._buffers or name in getattr(here, "_inro_packed", {})
            assert codes or torch.equal(now, before), f"{path}.{name} is neither what it was nor codes"


def test_an_interrupt_while_a_model_is_prepared_or_converted_leaves_it_as_it_was():
    model, x = MODELS["mlp"]()
    prepared = inro_fx.prepare_graph(model, x)
    prepared(x)
    inro_fx.convert_graph(copy.deepcopy(prepared))
    around, before = world(), snapshot(model)
    for _ in interrupted(lambda: inro_fx.prepare_graph(model, x), 4):
        unchanged(model, before)
        same_world(around)
    want, weights = prepared(x), {n: t.clone() for n, t in prepared.state_dict().items()}
    for where in interrupted(lambda: inro_fx.convert_graph(prepared), 4):
        same_world(around)
        assert all(torch.equal(prepared.state_dict()[n], t) for n, t in weights.items()), where
    assert torch.equal(prepared(x), want)
    assert relative(want, inro_fx.convert_graph(prepared)(x)) < 0.05


def test_an_interrupt_while_a_file_is_saved_or_loaded_leaves_no_half_of_it(tmp_path):
    model, x = MODELS["tied"]()
    small = inro_fx.quantize_graph(model, x)
    file = inro_fx.save(small, tmp_path / "m.safetensors")
    inro_fx.load(file, model)(x)
    whole, around, before = file.read_bytes(), world(), snapshot(model)
    for where in interrupted(lambda: inro_fx.save(small, file), 5):
        assert file.read_bytes() == whole, where
        assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"], where
        same_world(around)
    for _ in interrupted(lambda: inro_fx.load(file, model)(x), 5):
        unchanged(model, before)
        same_world(around)
    assert torch.equal(inro_fx.load(file, model)(x), small(x))


# ---- errors ----

class Broken:
    """The scheme int8, with one member replaced."""

    def __init__(self, **members):
        self.__dict__.update(members)

    def __getattr__(self, name):
        return getattr(find_scheme("int8"), name)


def failing(times):
    count = iter(range(100))

    def pack(matrix):
        if next(count) >= times:
            raise ValueError("no more")
        return find_scheme("int8").pack(matrix)
    return Broken(name="failing", pack=pack, operator=lambda op: "none of its own")


FAILURES = {
    "calibration": lambda m, x: inro_fx.quantize_graph(m, x, calibration=[x, torch.zeros(2, 3)], inplace=True),
    "static calibration": lambda m, x: inro_fx.quantize_graph(m, x, "int8_static", calibration=[x, torch.zeros(2, 3)]),
    "example": lambda m, x: inro_fx.quantize_graph(m, torch.zeros(2, 3), inplace=True),
    "first weight": lambda m, x: inro_fx.quantize_graph(m, x, failing(0), inplace=True),
    "third weight": lambda m, x: inro_fx.quantize_graph(m, x, failing(2), inplace=True),
    "a copy": lambda m, x: inro_fx.quantize_graph(m, x, failing(2)),
}


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_leaves_the_model_as_it_was_or_running(where):
    model, x = rich()
    twin, want, before, around, drawn = copy.deepcopy(model), copy.deepcopy(model).eval()(x), snapshot(model), world(), generators()
    with pytest.raises(inro_fx.InroError):
        FAILURES[where](model, x)
    assert generators() == drawn
    same_world(around)
    if where != "third weight":
        unchanged(model, before)
    runs_with_floats_or_codes(model, twin)
    assert relative(want, model.eval()(x)) < 0.05


@pytest.mark.parametrize("where", ["forward raises", "no tensor", "calibration", "scheme", "fine"])
def test_the_generators_of_python_numpy_and_torch_do_not_move_whatever_happens(where):
    def forward(self, x):
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        if where == "forward raises":
            raise ValueError("no")
        return "no tensor" if where == "no tensor" else self.fc(x) + 0 * noise
    model = net(forward, fc=nn.Linear(16, 16)).eval()
    options = dict(calibration=[torch.zeros(2, 3)]) if where == "calibration" else dict(scheme=failing(0)) if where == "scheme" else {}
    x = torch.randn(2, 16)
    drawn = generators()
    if where == "fine":
        inro_fx.quantize_graph(model, x, **options)
    else:
        with pytest.raises(inro_fx.InroError):
            inro_fx.quantize_graph(model, x, **options)
    assert generators() == drawn


# ---- what escapes, and what is kept alive ----

PLACES = {"a global": [], "a class": type("Holder", (), {}), "a dict": {}}


def leak_global(self, x):
    y = self.fc(x)
    PLACES["a global"].append(y)
    return y + 1


def leak_class(self, x):
    y = self.fc(x)
    PLACES["a class"].last = y
    return y + 1


def leak_dict(self, x):
    y = self.fc(x)
    PLACES["a dict"]["last"] = {"deep": [y]}
    return y + 1


def leak_own_class(self, x):
    type(self).last = self.fc(x)
    return type(self).last + 1


@pytest.mark.parametrize("forward", [leak_global, leak_class, leak_dict, leak_own_class], ids=lambda f: f.__name__)
def test_no_stand_in_of_the_tracer_escapes_into_what_outlives_it(forward):
    PLACES["a global"].clear()
    PLACES["a dict"].clear()
    model = net(forward, fc=nn.Linear(16, 16)).eval()
    x = torch.randn(2, 16)
    want = model(x)
    try:
        small = inro_fx.quantize_graph(model, x)
    except inro_fx.InroError as error:
        assert any(word in str(error) for word in ("PLACES", "last", "Net", "deep", "global", "class"))  # noqa: PT017 - or it works
        small = None
    leaked = [*PLACES["a global"], getattr(PLACES["a class"], "last", None), getattr(type(model), "last", None),
              *PLACES["a dict"].get("last", {}).get("deep", [])]
    assert not [v for v in leaked if v is not None and (isinstance(v, (fx.Proxy, fx.Node)) or not isinstance(v, torch.Tensor))]
    if small is not None:
        other = torch.randn(3, 16)
        assert relative(want, small(x)) < 0.02
        y = small(other)
        kept = [*PLACES["a global"][-1:], getattr(PLACES["a class"], "last", None), getattr(type(model), "last", None),
                *PLACES["a dict"].get("last", {}).get("deep", [])]
        assert all(relative(y - 1, v) < 1e-5 for v in kept if v is not None and v.shape == y.shape)


@pytest.mark.parametrize("use", ["quantized", "called", "saved", "copied", "prepared", "in place", "failed"])
def test_the_class_of_a_model_can_be_forgotten(use, tmp_path):
    def work():
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(16, 16)

            def forward(self, x, scale=1.0):
                return self.fc(x) * scale

        class Net(Layer):
            def __init__(self):
                super().__init__()
                self.below = Layer()

            def forward(self, x, scale=1.0):
                return self.below(self.fc(x)) * scale
        model, x = Net().eval(), torch.randn(2, 16)
        if use == "failed":
            with pytest.raises(inro_fx.InroError):
                inro_fx.quantize_graph(model, x, failing(1))
        elif use == "prepared":
            prepared = inro_fx.prepare_graph(model, x)
            prepared(x)
            inro_fx.convert_graph(prepared)(x)
        else:
            small = inro_fx.quantize_graph(model, x, inplace=use == "in place")
            small(x), small(x, 2.0), str(inro_fx.report(small))
            if use == "saved":
                inro_fx.load(inro_fx.save(small, tmp_path / "m.safetensors"), Net)(x)
            if use == "copied":
                copy.deepcopy(small)(x)
        return weakref.ref(Net), weakref.ref(Layer), weakref.ref(model)
    references = work()
    gc.collect()
    assert [r() for r in references] == [None, None, None]


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(("name", "scheme"), [("mlp", "int8"), ("mlp", "int8_dynamic"), ("mlp", "int4"), ("tied", "int8"), ("convolutions", "int8"),
                                              ("encoder", "int8_dynamic"), ("recurrent", "int8"), ("value_branch", "int4")])
def test_in_place_every_float_weight_is_gone_when_the_call_returns(name, scheme):
    model, x = MODELS[name]()
    floats = {n: weakref.ref(p) for n, p in model.named_parameters() if p.dim() > 1}
    storages = {n: weakref.ref(p.untyped_storage()) for n, p in model.named_parameters() if p.dim() > 1}
    small = inro_fx.quantize_graph(model, x, scheme, inplace=True)
    kept = {s.layer for s in inro_fx.report(small).skipped}
    assert [n for n, w in floats.items() if w() is not None and n not in kept] == []
    assert [n for n, w in storages.items() if w() is not None and n not in kept] == []
    small(*example(x)[0])


@pytest.mark.usefixtures("_no_collector")
def test_the_copy_that_was_worked_on_is_gone_when_the_call_returns():
    model, x = MODELS["encoder"]()
    output = inro_fx.quantize_graph(model, x)
    weights = [weakref.ref(p) for p in output.parameters()]
    del output
    assert len([w for w in weights if w() is not None]) == 0


# ---- observers ----

OBSERVERS = {
    "minmax": inro_fx.MinMaxObserver, "moving_average": inro_fx.MovingAverageObserver, "histogram": inro_fx.HistogramObserver,
    "percentile": inro_fx.PercentileObserver, "channels": lambda: inro_fx.MinMaxObserver(axis=1), "average of channels": lambda: inro_fx.MovingAverageObserver(axis=1)}
WAYS = {
    "fresh": lambda observer, make: loaded(make(), observer), "used": lambda observer, make: loaded(fed(make(), 1, 7), observer),
    "used twice": lambda observer, make: loaded(fed(make(), 2, 7), observer), "deepcopy": lambda observer, make: copy.deepcopy(observer),
    "pickle": lambda observer, make: pickle.loads(pickle.dumps(observer)), "assign": lambda observer, make: loaded(make(), observer, assign=True),
    "file": lambda observer, make: loaded(make(), observer, file=True)}


def fed(observer, batches, seed):
    generator = torch.Generator().manual_seed(seed)
    for n in range(batches):
        observer(torch.randn(6, 5, generator=generator) * (n + 1))
    return observer


def loaded(into, observer, file=False, **options):
    state = {n: t.clone() for n, t in observer.state_dict().items()}
    if file:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        state = torch.load(io.BytesIO(buffer.getvalue()))
    into.load_state_dict(state, **options)
    return into


@pytest.mark.parametrize("batches", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OBSERVERS)
def test_an_observer_goes_on_where_its_saved_state_ends(kind, way, batches):
    observer = fed(OBSERVERS[kind](), batches, 0)
    if not batches and kind.endswith("channels"):
        pytest.skip("it does not know yet how many channels there are")
    again = WAYS[way](observer, OBSERVERS[kind])
    whole = {n: t.clone() for n, t in observer.state_dict().items()}
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in whole.items())
    fed(again, 2, 3)
    assert all(torch.equal(t, whole[n]) for n, t in observer.state_dict().items()), "they share their state"
    fed(observer, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(observer.range(), again.range(), strict=True))
    others = [fed(OBSERVERS[kind](), 2, 9).merge(o) for o in (observer, again)]
    assert all(torch.equal(t, others[1].state_dict()[n]) for n, t in others[0].state_dict().items())


def test_a_prepared_model_goes_on_where_its_saved_state_ends():
    model, x = MODELS["mlp"]()
    scheme = inro_fx.static(observer="moving_average")
    prepared = inro_fx.prepare_graph(model, x, scheme)
    prepared(x)
    other = inro_fx.prepare_graph(model, x, scheme)
    other(3 * x)
    other.load_state_dict(prepared.state_dict())
    for each in (prepared, other):
        each(2 * x), each(-x)
    assert torch.equal(inro_fx.convert_graph(prepared)(x), inro_fx.convert_graph(other)(x))


class Region(nn.Module):
    """Its own code cannot be traced, its block can."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        y = self.block(x)
        return y if y.sum() > 0 else -y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).flatten(2))


@pytest.mark.parametrize("make", [lambda: Region(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), lambda: Region(Block()),
                                  lambda: nn.Sequential(Region(Block()), nn.ReLU()), Block], ids=["sequence", "block", "deeper", "whole"])
def test_batch_norms_are_folded_wherever_the_graph_is(make):
    model = make()
    model.train()(torch.randn(8, 3, 6, 6))
    model.eval()
    x = torch.randn(2, 3, 6, 6)
    small = inro_fx.quantize_graph(model, x, fold_batchnorm=True)
    assert relative(model(x), small(x)) < 0.03
    graphs = [m.code for m in small.modules() if isinstance(m, fx.GraphModule)]
    assert graphs and not [code for code in graphs if "batch_norm" in code or ".bn(" in code]


# ---- schemes ----

def raising(*_):
    raise RuntimeError("not today")


WRONG = {
    "pack raises": Broken(pack=raising), "pack gives a tensor": Broken(pack=lambda w: w.to(torch.int8)), "pack gives None": Broken(pack=lambda w: None),
    "another part": Broken(pack=lambda w: {"codes": w.to(torch.int8), "zero": w[:, :1]}), "a part is missing": Broken(pack=lambda w: {"codes": w.to(torch.int8)}),
    "a part is a list": Broken(pack=lambda w: {"codes": w.tolist(), "scale": w[:, :1].abs() + 1}),
    "too few rows": Broken(pack=lambda w: {n: t[:-1] for n, t in find_scheme("int8").pack(w).items()}),
    "parts on meta": Broken(pack=lambda w: {n: t.to("meta") for n, t in find_scheme("int8").pack(w).items()}),
    "unpack raises": Broken(unpack=raising), "unpack gives None": Broken(unpack=lambda *a: None),
    "unpack gives another shape": Broken(unpack=lambda p, c, d: find_scheme("int8").unpack(p, c, d)[:, :-1]),
    "unpack gives integers": Broken(unpack=lambda p, c, d: p["codes"]), "unpack gives a list": Broken(unpack=lambda p, c, d: p["codes"].tolist()),
    "bound raises": Broken(bound=raising), "bound gives text": Broken(bound=lambda w: "small"), "bound of another shape": Broken(bound=lambda w: torch.ones(3, 5, 7)),
    "beyond its bound": Broken(unpack=lambda p, c, d: find_scheme("int8").unpack(p, c, d) * 1.5),
    "far beyond its bound": Broken(bound=lambda w: torch.zeros(())), "NaN": Broken(unpack=lambda p, c, d: find_scheme("int8").unpack(p, c, d) * float("nan")),
    "operator raises": Broken(operator=raising), "operator gives None": Broken(operator=lambda op: None),
    "operator gives no function": Broken(operator=lambda op: ("linear", ())), "operator gives a function only": Broken(operator=lambda op: raising),
    "its operator raises": Broken(operator=lambda op: (raising, ()) if op == "linear" else "no operator"),
    "its operator gives another shape": Broken(operator=lambda op: (lambda x, codes, scale, bias, columns: x[..., :1], ()) if op == "linear" else "none"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_scheme_that_does_what_no_scheme_may_is_one_error_that_names_the_layer(wrong, inplace):
    scheme = WRONG[wrong]
    scheme.name = "wrong"
    model = net(lambda self, x: torch.relu(self.first(x)), first=nn.Linear(16, 32))
    x, before = torch.randn(4, 16), snapshot(model)
    want = model(x)
    with pytest.raises(inro_fx.InroError) as error:
        inro_fx.quantize_graph(model, x, scheme, inplace=inplace)
    assert "first" in str(error.value)
    assert "wrong" in str(error.value)
    assert "\n" not in str(error.value)
    assert torch.equal(model(x), want)
    if not inplace:
        unchanged(model, before)


@pytest.mark.parametrize("members", [dict(name=3), dict(name=None), dict(parts="codes"), dict(parts=()), dict(parts=("codes", 3)), dict(parts=("co des", "scale")),
                                     dict(parts=("codes", "codes")), dict(pack=None), dict(bound=1.0), dict(name="int8\x1b[31m")], ids=str)
def test_an_object_that_is_no_scheme_is_refused_before_anything_is_done(members):
    model = net(lambda self, x: self.first(x), first=nn.Linear(16, 32))
    before = snapshot(model)
    with pytest.raises(inro_fx.SchemeError):
        inro_fx.quantize_graph(model, torch.randn(4, 16), Broken(**{"name": "wrong", **members}))
    unchanged(model, before)


def test_a_file_of_a_scheme_of_ones_own_says_how_to_give_it(tmp_path):
    mine = Broken(name="mine", operator=lambda op: "no operator")
    model, x = MODELS["mlp"]()
    file = inro_fx.save(inro_fx.quantize_graph(model, x, mine), tmp_path / "m.safetensors")
    with pytest.raises(inro_fx.SchemeError, match=r"mine.*schemes="):
        inro_fx.load(file, model)
    inro_fx.load(file, model, schemes=[mine])


# ---- types and words ----

def test_the_type_of_the_model_is_the_type_of_the_result():
    hints = typing.get_type_hints(inro_fx.quantize_graph)
    assert isinstance(hints["model"], typing.TypeVar)
    assert hints["return"] is hints["model"]
    assert hints["model"].__bound__ is nn.Module


def test_progress_is_logged_for_who_asks_and_nobody_else(caplog, capfd):
    model, x = MODELS["mlp"]()
    inro_fx.quantize_graph(model, x)
    assert not [r for r in caplog.records if r.name.startswith("inro_fx")]
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.INFO, "inro_fx"):
        small = inro_fx.quantize_graph(model, x)
    records = [r for r in caplog.records if r.name.partition(".")[0] == "inro_fx"]
    assert records and all(r.levelno == logging.INFO and "\n" not in r.getMessage() for r in records)
    assert torch.equal(small(x), inro_fx.quantize_graph(model, x)(x))
    assert not [h for h in logging.getLogger("inro_fx").handlers if not isinstance(h, logging.NullHandler)]
    assert logging.getLogger("inro_fx").level == logging.NOTSET
