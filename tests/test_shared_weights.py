"""One weight with several users."""

import copy
import gc
import io
import weakref

import pytest
import torch
from models import SCHEMES, Sliced, Tied, close, quantized
from safetensors.torch import save_model
from test_capture import net
from torch import nn

import inro_fx


def unique_bytes(model):
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values()}.values())


@pytest.mark.parametrize("excluded", ["head", "table"])
def test_excluding_one_of_two_tied_layers_keeps_both_float_and_says_that_nothing_is_saved(excluded):
    model, ids = Tied(), torch.randint(0, 40, (2, 5))
    both = inro_fx.report(quantized(model, ids))
    assert sum(r.float_bytes > 0 for r in both.rows if "codes of" not in r.note) == len({r.layer for r in both.rows if r.float_bytes})
    left = quantized(model, ids, overrides={excluded: None})
    assert torch.equal(left.head.weight, model.head.weight)
    assert torch.equal(left.table.weight, model.table.weight)
    assert "nothing is saved" in next(s.reason for s in inro_fx.report(left).skipped)


@pytest.mark.parametrize("way", ["torch.save", "assign", "safetensors", "deepcopy", "save"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_saving_loading_and_copying_keep_one_table_of_two(way, scheme, tmp_path):
    model, ids = Tied(), torch.randint(0, 40, (2, 5))
    small = quantized(model, ids, scheme)
    other = quantized(Tied(), ids, scheme)
    if way in ("torch.save", "assign"):
        file = io.BytesIO()
        torch.save(small.state_dict(), file)
        other.load_state_dict(torch.load(io.BytesIO(file.getvalue())), assign=way == "assign")
    elif way == "safetensors":
        save_model(small, str(tmp_path / "m.safetensors"))
        from safetensors.torch import load_model
        load_model(other, str(tmp_path / "m.safetensors"))
    else:
        other = copy.deepcopy(small) if way == "deepcopy" else inro_fx.load(inro_fx.save(small, tmp_path / "m.safetensors"), model)
    assert torch.equal(other(ids), small(ids))
    assert unique_bytes(other) == unique_bytes(small)
    other.table.weight_codes.zero_()
    assert torch.equal(other.head.weight, other.table.weight)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("children", "forward", "shape"), [
    (dict(f=lambda: nn.Linear(8, 8)), lambda self, x: self.f(torch.relu(self.f(x))), (2, 8)),
    (dict(f=lambda: nn.Conv2d(3, 3, 1), n=lambda: nn.BatchNorm2d(3)), lambda self, x: self.n(self.f(torch.relu(self.f(x)))), (1, 3, 5, 5)),
    (dict(f=lambda: nn.Embedding(9, 8)), lambda self, x: self.f(x.long().abs() % 9) + self.f(x.long().abs() % 5), (2, 3)),
    (dict(f=lambda: nn.LSTM(8, 8)), lambda self, x: self.f(self.f(x)[0])[0], (3, 2, 8)),
], ids=["linear", "conv", "embedding", "lstm"])
def test_a_layer_called_twice_is_quantized_once_and_right_at_both_places(children, forward, shape, scheme):
    model = net(forward, **{k: v() for k, v in children.items()})
    x = torch.randn(shape)
    small = quantized(model, x, scheme)
    assert close(model, small, x, scheme=scheme)
    report = inro_fx.report(small)
    assert sum(r.float_bytes for r in report.rows) <= sum(p.numel() * 4 for p in model.parameters())
    assert not [n for n, t in small.state_dict().items() if n.startswith("f.") and t.dim() > 1 and t.is_floating_point() and "scale" not in n]


def test_weights_that_only_share_memory_get_scales_of_their_own():
    base = torch.cat([torch.randn(32), 100 * torch.randn(32)])
    for views in ((base.view(8, 8), base[:32].view(4, 8)), (base[:32].view(4, 8), base[32:].view(4, 8)), (base[8:40].view(4, 8), base[:32].view(4, 8))):
        model = net(lambda self, x: torch.cat([self.a(x), self.b(x)], -1), a=nn.Linear(8, len(views[0])), b=nn.Linear(8, 4))
        model.a.weight, model.b.weight = (nn.Parameter(v) for v in views)
        small = quantized(model, torch.randn(2, 8))
        assert close(model, small, torch.randn(3, 8))
        assert torch.allclose(small.a.weight_scale[:, 0], views[0].abs().amax(1) / 127)
        assert torch.allclose(small.b.weight_scale[:, 0], views[1].abs().amax(1) / 127)
    reference = weakref.ref(base.untyped_storage())
    del model, views, base
    gc.collect()
    assert reference() is None


def test_slices_of_one_parameter_do_not_multiply_memory():
    model = Sliced()
    weight = weakref.ref(model.w)
    x = torch.randn(2, 3, 8)
    small = quantized(model, x)
    assert close(model, small, x)
    assert unique_bytes(small) < 0.45 * 24 * 8 * 4                  # rows of eight: the scales are half as large as the codes
    del model
    gc.collect()
    assert weight() is None
