"""Classes, names and code of every kind."""

import abc
import contextlib
import copy
import gc
import linecache
import pickle
import threading
import typing

import pytest
import torch
import torch.nn.functional as F
from models import relative
from test_capture import net
from torch import nn

import inro_fx


def linear(inner=16, out=16, **kwargs):
    return nn.Linear(inner, out, **kwargs)


def agrees(model, small, *inputs, within=0.03):
    want, got = model(*inputs), small(*inputs)
    return relative(want, got) < within


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


def small_net():
    return inro_fx.quantize_graph(nn.Sequential(linear(), nn.ReLU(), nn.Sequential(linear()), nn.Dropout(0.5)), torch.randn(3, 16))


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
