"""Inputs and outputs of every kind."""

import functools
import types

import pytest
import torch
from models import relative
from test_capture import net
from torch import nn

import inro_fx


def linear(inner=16, out=16, **kwargs):
    return nn.Linear(inner, out, **kwargs)


def agrees(model, small, *inputs, within=0.03):
    want, got = model(*inputs), small(*inputs)
    return relative(want, got) < within


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
