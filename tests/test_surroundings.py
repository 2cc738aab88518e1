"""The process around a model: default dtype and device, generators, settings of torch."""

import random

import numpy as np
import pytest
import torch
from models import quantize, relative
from test_capture import net
from torch import nn

import inro_fx


def linear(inner=16, out=16, **kwargs):
    return nn.Linear(inner, out, **kwargs)


def agrees(model, small, *inputs, within=0.03):
    want, got = model(*inputs), small(*inputs)
    return relative(want, got) < within


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
