"""Faults found by trying what users do to models, each as a test of its whole kind."""

import abc
import collections
import contextlib
import copy
import functools
import gc
import itertools
import linecache
import pickle
import random
import threading
import types
import typing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import quantize, relative
from test_capture import net
from torch import nn

import inro_fx


def linear(inner=16, out=16, **kwargs):
    return nn.Linear(inner, out, **kwargs)


def agrees(model, small, *inputs, within=0.03):
    want, got = model(*inputs), small(*inputs)
    return relative(want, got) < within


# ---- the world around ----

@pytest.mark.parametrize("scheme", inro_fx.SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(scheme, default):
    model, x = nn.Linear(64, 48), torch.randn(20, 64)
    small = quantize(model, x, scheme)
    want = small(x)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(small(x), want)
        again = quantize(model, x, scheme)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again(x), want)


def test_the_default_device_changes_nothing():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LSTM(16, 16), net(lambda self, xh: xh[0])), torch.randn(4, 16)
    with torch.device("meta"):
        small = inro_fx.quantize_graph(model, x)
    assert agrees(model, small, x)


def test_random_state_of_every_library_is_kept():
    model = net(lambda self, x: self.fc(x) + np.random.rand() * 0 + random.random() * 0, fc=linear())
    np.random.seed(5)
    x, before = torch.randn(2, 16), (np.random.get_state()[1].copy(), torch.get_rng_state(), random.getstate())
    inro_fx.quantize_graph(model, x)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]


def facts(forward):
    return pytest.param(forward, id=forward.__name__)


def seeds(self, x):
    torch.manual_seed(0)
    return self.fc(x) + torch.randn_like(x)


def default_dtype(self, x):
    return self.fc(x).to(torch.get_default_dtype())


def inference(self, x):
    return self.fc(x) * (2.0 if torch.is_inference_mode_enabled() else 1.0)


def grad_mode(self, x):
    return self.fc(x) * (2.0 if torch.is_grad_enabled() else 1.0)


@pytest.mark.parametrize("forward", [facts(f) for f in (seeds, default_dtype, inference, grad_mode)])
def test_the_state_of_torch_that_code_asks_for_is_no_constant(forward):
    model = net(forward, fc=linear())
    x = torch.randn(3, 16)
    small = inro_fx.quantize_graph(model, x)
    torch.manual_seed(9)
    assert agrees(model, small, x)
    with torch.inference_mode():
        assert agrees(model, small, x)
    with torch.no_grad():
        assert agrees(model, small, x)
    torch.set_default_dtype(torch.float64)
    try:
        assert small(x).dtype == model(x).dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_pythons_random_numbers_are_no_constants():
    model = net(lambda self, x: self.fc(x) * random.choice([1.0, 100.0]), fc=linear())
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    x = torch.randn(3, 16)
    sizes = {round(small(x).norm().item()) for _ in range(40)}
    assert len(sizes) == 2


@pytest.mark.parametrize("draw", [np.random.uniform, random.random])
def test_random_numbers_that_are_not_used_cost_no_graph(draw):
    unused = net(lambda self, x: x if self.training and draw() < 0.1 else self.fc(x) + 0 * int(draw() > 2), fc=linear())
    assert inro_fx.report(inro_fx.quantize_graph(unused, torch.randn(3, 16))).nodes
    rare = net(lambda self, x: x if draw() < 0.02 else self.fc(x), fc=linear())
    assert not inro_fx.report(inro_fx.quantize_graph(rare, torch.randn(3, 16))).nodes


def test_a_set_is_no_state_that_forward_changed():
    model = net(lambda self, x: self.fc(x), fc=linear())
    model.names = {"a", "bb", "ccc", "dddd", "eeeee"}
    assert inro_fx.report(inro_fx.quantize_graph(model, torch.randn(3, 16))).nodes


# ---- state ----

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


# ---- changes after quantizing ----

class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, linear(16, 2, bias=False), linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def small_net():
    return inro_fx.quantize_graph(nn.Sequential(linear(), nn.ReLU(), nn.Sequential(linear()), nn.Dropout(0.5)), torch.randn(3, 16))


CHANGES = {
    "replaced": lambda q: q.__setitem__(0, Lora(q[0])),
    "another activation": lambda q: q.__setitem__(1, nn.Tanh()),
    "hooked": lambda q: q[1].register_forward_hook(lambda m, a, out: out * 2),
    "appended": lambda q: q.append(nn.Softmax(-1)),
    "appended below": lambda q: q[2].append(nn.Softmax(-1)),
    "deleted": lambda q: q.__delitem__(1),
    "patched": lambda q: setattr(q[1], "forward", torch.tanh),
    "attribute below": lambda q: setattr(q[3], "p", 0.25),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_changes_below_are_honoured_also_by_copies_compiled_and_exported(name):
    small, x = small_net(), torch.randn(3, 16)
    CHANGES[name](small)
    want = functools.reduce(lambda y, module: module(y), small, x)
    assert torch.equal(small(x), want)
    assert sum(inro_fx.report(small).outside.values()) == 1
    if name not in ("hooked", "patched"):                          # lambdas and builtins do not pickle, or compile, by name
        assert torch.equal(pickle.loads(pickle.dumps(small))(x), want)
    assert torch.equal(copy.deepcopy(small)(x), want)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(small, backend="eager", fullgraph=True)(x), want)
    torch.testing.assert_close(torch.export.export(small, (x,)).module()(x), want)


def test_a_bias_that_is_given_later_is_honoured():
    x = torch.randn(3, 16)
    for where in ("inside", "itself"):
        small = inro_fx.quantize_graph(nn.Sequential(linear(bias=False), nn.ReLU()) if where == "inside" else linear(bias=False), x)
        layer = small[0] if where == "inside" else small
        before = small(x)
        layer.bias = nn.Parameter(torch.full((16,), 100.0))
        assert not torch.equal(small(x), before)
        assert (layer(x) > 50).all()


class Config:
    def __init__(self):
        self.k, self.more = 2.0, {"z": 1}


def reads(self, x):
    y = self.fc(x) * self.config.k * self.table["k"] * self.items[0] * self.vector
    return y * getattr(self, "extra", 1.0) if self.mask is None else y * self.mask


SETTINGS = {
    "config attribute": lambda m: setattr(m.config, "k", 5.0),
    "config": lambda m: setattr(m, "config", types.SimpleNamespace(k=7.0)),
    "dict entry": lambda m: m.table.update(k=5.0),
    "dict": lambda m: setattr(m, "table", {"k": 3.0}),
    "list entry": lambda m: m.items.__setitem__(0, 5.0),
    "plain tensor": lambda m: setattr(m, "vector", torch.full((16,), 3.0)),
    "plain tensor in place": lambda m: m.vector.fill_(3.0),
    "new attribute": lambda m: setattr(m, "extra", 9.0),
    "buffer that was None": lambda m: setattr(m, "mask", torch.full((16,), 3.0)),
    "deleted": lambda m: delattr(m, "vector"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_honoured(name):
    model = net(reads, fc=linear())
    model.config, model.table, model.items, model.vector = Config(), {"k": 2.0}, [2.0], torch.full((16,), 2.0)
    type(model).vector = None
    type(model).vector = torch.ones(16)                            # what is found after the deletion
    model.register_buffer("mask", None)
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    x = torch.randn(3, 16)
    assert agrees(model, small, x)
    assert not inro_fx.report(small).outside
    SETTINGS[name](model)
    SETTINGS[name](small)
    assert agrees(model, small, x)


def test_a_tensor_as_default_argument_is_an_argument():
    default = torch.full((16,), 2.0)
    model = net(lambda self, x, w=default: self.fc(x) * w, fc=linear())
    small = inro_fx.quantize_graph(model, torch.randn(3, 16), strict=True)
    x = torch.randn(3, 16)
    assert agrees(model, small, x)
    assert agrees(model, small, x, torch.randn(16))


# ---- forwards that look at their own weights ----

@pytest.mark.parametrize("forward", [
    lambda self, x: self.fc(x.to(next(self.parameters()).device, next(self.parameters()).dtype)),
    lambda self, x: self.fc(x) * (2 if isinstance(self.fc.weight, nn.Parameter) else 1),
    lambda self, x: self.fc(x) * self.get_parameter("fc.weight").abs().mean(),
    lambda self, x: self.fc(x) * len(list(self.named_parameters())) if self.fc.bias is not None else self.fc(x),
    lambda self, x: self.fc(x) + self.fc.weight.data.mean() + self.fc.weight.shape[0],
], ids=range(5))
def test_forwards_that_look_at_their_weights(forward):
    model = net(forward, fc=linear(bias=False))
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    for rows in (3, 5):
        assert agrees(model, small, torch.randn(rows, 16))
    small.train()                                                  # its own forward runs
    assert agrees(model, small, torch.randn(3, 16))


# ---- classes ----

class AbstractFirst(abc.ABC, nn.Module):
    def __init__(self):
        nn.Module.__init__(self)
        self.fc = linear()

    def forward(self, x):
        return self.fc(x)


T = typing.TypeVar("T")


class GenericFirst(typing.Generic[T], nn.Module):
    __init__, forward = AbstractFirst.__init__, AbstractFirst.forward


class Mixin:
    __slots__ = ()


class SlotsFirst(Mixin, nn.Module):
    __init__, forward = AbstractFirst.__init__, AbstractFirst.forward


class AbstractLinear(abc.ABC, nn.Linear):
    def __init__(self):
        nn.Linear.__init__(self, 16, 16)


REGISTRY = {}


class Registry(type):
    def __init__(cls, name, bases, namespace):
        super().__init__(name, bases, namespace)
        if name in REGISTRY:
            raise ValueError(f"{name} is there already")
        REGISTRY[name] = cls


class Registered(nn.Module, metaclass=Registry):
    __init__, forward = AbstractFirst.__init__, AbstractFirst.forward


class Demanding(nn.Module):
    def __init_subclass__(cls, *, key, **kwargs):
        super().__init_subclass__(**kwargs)

    __init__, forward = AbstractFirst.__init__, AbstractFirst.forward


class Demanded(Demanding, key=1):
    pass


class Silent(AbstractFirst):
    def train(self, mode=True):
        nn.Module.train(self, mode)                                # and returns nothing


class Locked(AbstractFirst):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Packing(Locked):
    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "lock"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [AbstractFirst, GenericFirst, SlotsFirst, AbstractLinear, Registered, Demanded, Silent, Locked, Packing])
@pytest.mark.parametrize("inside", [False, True])
def test_classes_of_every_kind(kind, inside, tmp_path):
    model = (nn.Sequential(kind(), nn.ReLU()) if inside else kind()).eval() or kind()
    x = torch.randn(3, 16)
    small = inro_fx.quantize_graph(model, x)
    assert agrees(model, small, x)
    assert isinstance(small[0] if inside else small, kind)
    assert inro_fx.report(small).coverage == 1
    again = inro_fx.load(inro_fx.save(small, tmp_path / "m.safetensors"), model)
    assert torch.equal(again(x), small(x))
    if kind is not Locked:
        assert torch.equal(copy.deepcopy(small)(x), small(x))
        assert torch.equal(pickle.loads(pickle.dumps(small))(x), small(x))
    assert REGISTRY["Registered"] is Registered
    if kind in (AbstractFirst, GenericFirst, SlotsFirst, AbstractLinear):
        with pytest.raises(inro_fx.ModelError, match="whose class has a base before"):
            inro_fx.quantize_graph(model, x, inplace=True)


def test_a_model_that_keeps_results():
    model = net(lambda self, x: self.keep(self.fc(x)), fc=linear())
    type(model).keep = lambda self, y: (setattr(self, "last", (y, {"y": [y]})), y)[1]
    x = torch.randn(3, 16)
    model(x)
    small = inro_fx.quantize_graph(model, x)
    assert agrees(model, small, x)


@pytest.mark.parametrize("name", ['say "x"', "new\nline", "back\\slash", "tab\tb", "b\bc", "ключ", "a-b", "class", "{}", "%s", "'"])
def test_names_of_every_kind(name, tmp_path):
    model = net(lambda self, x: F.linear(self.d[name](x), self.p[name]), d=nn.ModuleDict({name: linear()}),
                p=nn.ParameterDict({name: nn.Parameter(torch.randn(16, 16))}))
    x = torch.randn(3, 16)
    small = inro_fx.quantize_graph(model, x)
    assert agrees(model, small, x)
    assert inro_fx.report(small).nodes
    assert torch.equal(inro_fx.load(inro_fx.save(small, tmp_path / "m.safetensors"), model)(x), small(x))


def test_names_that_begin_alike_or_with_digits():
    for names in (["0", "0q", "class", "class_", "classes"], ["q", "qk", "import", "imports"]):
        model = net(lambda self, x: sum(m(x) for m in self.d.values()), d=nn.ModuleDict({n: linear() for n in names}))
        x = torch.randn(3, 16)
        small = inro_fx.quantize_graph(model, x)
        assert agrees(model, small, x)
        assert inro_fx.report(small).nodes


def test_a_weight_cannot_be_replaced_in_silence():
    small = small_net()
    with pytest.raises(inro_fx.ModelError, match=r"weight is held as codes \(weight_codes\).*quantize the model again"):
        small[0].weight = nn.Parameter(torch.randn(16, 16))
    with pytest.raises(inro_fx.ModelError, match="weight is held as codes"):
        del small[0].weight


# ---- inputs and outputs ----

@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(kind):
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
    model = net(forward, rnn=kind(16, 16, batch_first=True, num_layers=2))
    inputs = (torch.randn(2, 6, 16), torch.tensor([3, 6]))
    small = inro_fx.quantize_graph(model, inputs)
    assert agrees(model, small, *inputs)
    assert agrees(model, small, torch.randn(3, 5, 16), torch.tensor([5, 1, 2]))
    assert inro_fx.report(small).coverage == 1


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_sparse_and_nested_inputs():
    model = net(lambda self, x, a: torch.sparse.mm(a, self.fc(x)), fc=linear())
    x, adjacency = torch.randn(3, 16), (torch.rand(3, 3) > 0.4).float()
    for a in (adjacency.to_sparse(), adjacency.to_sparse_csr()):
        assert agrees(model, inro_fx.quantize_graph(model, (x, a)), x, a)
    nested = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(5, 16)])
    model = net(lambda self, x: self.fc(x).to_padded_tensor(0.0), fc=linear())
    assert agrees(model, inro_fx.quantize_graph(model, nested), nested)


class Rows(list):
    pass


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


OUTPUTS = {
    "list subclass": (lambda y: Rows([y]), lambda out: out[0]),
    "slots": (Slotted, lambda out: out.y),
    "slots beside": (lambda y: (y, Slotted(y)), lambda out: out[1].y),
    "partial": (lambda y: (y, functools.partial(torch.add, y)), lambda out: out[1](1)),
    "closure": (lambda y: (y, lambda z: y + z), lambda out: out[1](1)),
    "namespace": (lambda y: types.SimpleNamespace(y=y), lambda out: out.y),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_every_kind(name):
    wrap, tensor = OUTPUTS[name]
    model = net(lambda self, x: wrap(self.fc(x)), fc=linear())
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    for rows in (3, 5):
        x = torch.randn(rows, 16)
        assert type(tensor(small(x))) is torch.Tensor
        assert relative(tensor(model(x)), tensor(small(x))) < 0.03
        assert type(small(x)) is type(model(x))


def test_a_generator_is_refused_by_name():
    def forward(self, x):
        yield self.fc(x)
    with pytest.raises(inro_fx.ModelError, match="returns a generator"):
        inro_fx.quantize_graph(net(forward, fc=linear()), torch.randn(3, 16))


# ---- code of every kind ----

def energy(self, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        e = self.fc(x).square().sum()
        return torch.autograd.grad(e, x)[0]


def test_forces_as_gradients_of_an_energy():
    model = net(energy, fc=linear())
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    for rows in (3, 5):
        assert agrees(model, small, torch.randn(rows, 16))
    with torch.no_grad():
        assert agrees(model, small, torch.randn(3, 16))


def test_torch_cond():
    model = net(lambda self, x: torch.cond(x.sum() > 0, lambda y: self.fc(y), lambda y: -self.fc(y), (x,)), fc=linear())
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    for x in (torch.ones(3, 16), -torch.ones(3, 16)):
        assert agrees(model, small, x)


@contextlib.contextmanager
def global_hook(seen):
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append((type(module).__name__, type(out))))
    try:
        yield
    finally:
        handle.remove()


def test_global_hooks_see_tensors_and_every_module():
    model, x = nn.Sequential(linear(), nn.ReLU()), torch.randn(3, 16)
    seen = []
    with global_hook(seen):
        small = inro_fx.quantize_graph(model, x)
        assert {kind for _, kind in seen} <= {torch.Tensor}
        seen.clear()
        small(x)
        assert [name for name, _ in seen] == ["Linear", "ReLU", "Sequential"]
    assert inro_fx.report(small).outside == {"global module hooks": 1, "0: global module hooks": 1}


@pytest.mark.parametrize("forward", [
    lambda self, x: torch.mv(self.w, x), lambda self, x: torch.addmv(x[:8], self.w, x), lambda self, x: torch.inner(x, self.w),
    lambda self, x: torch.tensordot(x, self.w, ([0], [1])), lambda self, x: torch.linalg.multi_dot([self.w, self.w.t(), self.w]) @ x,
    lambda self, x: self.w.mv(x), lambda self, x: torch.einsum("a,bc,cd,ed->e", x, self.w, self.w.t(), self.w.t().contiguous()[:8, :8]),
], ids=["mv", "addmv", "inner", "tensordot", "multi_dot", "method", "einsum4"])
def test_products_of_every_name(forward):
    model = net(forward)
    model.w = nn.Parameter(torch.randn(8, 32))
    x = torch.randn(32)
    small = inro_fx.quantize_graph(model, x)
    assert agrees(model, small, x)
    assert inro_fx.report(small).coverage == 1, inro_fx.report(small).skipped


def test_a_state_that_forward_changes_is_as_it_was():
    """Python attributes and buffers that forward writes are put back between the runs that quantizing makes."""
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls, self.seen = nn.Linear(32, 32), 0, set()
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            self.seen.add(x.shape[0])
            self.total.add_(1.0)
            return self.fc(x) * self.calls + self.total
    model = Counts()
    small = inro_fx.quantize_graph(model, torch.randn(2, 32))
    for module in (model, small):
        assert (module.calls, module.seen, module.total.item()) == (0, set(), 0.0)
    for rows in (2, 3):
        x = torch.randn(rows, 32)
        want = model(x)
        assert (small(x) - want).norm() < 0.02 * want.norm()
    assert (small.calls, small.seen, small.total.item()) == (2, {2, 3}, 2.0)


def test_a_plain_tensor_that_the_model_moves_itself_does_not_void_the_graph():
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.shift = nn.Linear(32, 32), torch.ones(32)

        def _apply(self, fn, recurse=True):
            super()._apply(fn, recurse)
            self.shift = fn(self.shift)
            return self

        def forward(self, x):
            return self.fc(x) + self.shift
    model = nn.Sequential(Moves(), nn.ReLU())
    small = inro_fx.quantize_graph(model, torch.randn(2, 32)).double()
    x = torch.randn(3, 32).double()
    want = model.double()(x)
    assert (small(x) - want).norm() < 0.02 * want.norm()
    assert not inro_fx.report(small).outside


def test_the_source_of_a_graph_goes_with_it():
    def sources():
        gc.collect()
        return {name for name in linecache.cache if name.startswith("<graph")}
    before = sources()
    small = inro_fx.quantize_graph(nn.Linear(4321, 40), torch.randn(2, 4321))           # as no other test has it
    assert sources() - before
    del small
    assert sources() <= before
