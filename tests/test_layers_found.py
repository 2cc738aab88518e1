"""Which layers are found, and what may touch them."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Conv1D, close, first, quantized, relative
from test_capture import net
from torch import nn
from torch.nn.utils import parametrizations

import inro_fx


def test_scales_follow_the_output_channel_however_the_weight_is_stored():
    columns = 10.0 ** torch.arange(-3, 5).float()
    for model, name, shape in ((Conv1D(), "weight", (2, 8)), (net(lambda self, x: x @ self.w), "w", (2, 8)), (net(lambda self, x: self.w @ x), "w", (8, 2))):
        weight = torch.randn(8, 24) * columns.repeat(3)
        setattr(model, name, nn.Parameter(weight if name == "weight" or shape == (2, 8) else weight.t().contiguous()))
        small = quantized(model, torch.randn(shape))
        assert small.state_dict()[f"{name}_scale"].shape == (24, 1)
        error = (getattr(small, name) - getattr(model, name)).abs()
        assert (error / getattr(model, name).abs().amax(0 if shape == (2, 8) else 1, keepdim=True)).max() < 0.005


def test_a_bias_or_weight_read_beside_the_call():
    model = net(lambda self, x: (torch.relu(self.lin(x)) + self.lin.bias, (self.lin.weight ** 2).mean()), lin=nn.Linear(16, 16))
    small = quantized(model, torch.randn(2, 16))
    x = torch.randn(3, 16)
    for want, got in zip(model(x), small(x), strict=True):
        assert relative(want, got) < 0.02


@pytest.mark.parametrize("call", [
    lambda x, w: F.linear(x, w, None), lambda x, w: F.linear(bias=None, weight=w, input=x), lambda x, w: torch.matmul(x, w.t()), lambda x, w: torch.matmul(other=w.t(), input=x),
    lambda x, w: F.conv1d(x[..., None], w[..., None], None, 1, 0, 1, 1)[..., 0], lambda x, w: F.conv1d(groups=1, weight=w[..., None], stride=1, input=x[..., None])[..., 0],
    lambda x, w: F.conv2d(dilation=1, input=x[..., None, None], weight=w[..., None, None], padding="valid")[..., 0, 0],
    lambda x, w: F.embedding(x.long().abs() % 9, w, None, None, 2.0, False, False), lambda x, w: F.embedding(weight=w, sparse=False, input=x.long().abs() % 9),
], ids=range(9))
def test_every_spelling_of_a_call_is_found(call):
    model = net(lambda self, x: call(x, self.w))
    model.w = nn.Parameter(torch.randn(9, 16))
    x = torch.randn(3, 16)
    small = quantized(model, x)
    assert len(inro_fx.report(small).rows) == 1
    assert close(model, small, x)


@pytest.mark.parametrize("options", [dict(batch_first=True), dict(batch_first=False), dict(kdim=12, vdim=20), dict(bias=False), dict(add_zero_attn=True), dict(add_bias_kv=True)])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_attention_is_quantized_and_takes_the_same_path_with_gradients_on(options, need_weights, grad):
    model = nn.MultiheadAttention(16, 4, **options).eval()
    q, k, v = torch.randn(2, 5, 16), torch.randn(2, 6, model.kdim), torch.randn(2, 6, model.vdim)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    if not model.batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    call = dict(query=q, key=k, value=v, key_padding_mask=mask, need_weights=need_weights)
    small = quantized(model, call)
    with torch.set_grad_enabled(grad):
        want, got = model(**call), small(**call)
    assert relative(want[0], got[0]) < 0.03
    assert (want[1] is None) == (got[1] is None)
    assert want[1] is None or relative(want[1], got[1]) < 0.03
    report = inro_fx.report(small)
    assert report.coverage == 1 or {s.layer for s in report.skipped} <= {"bias_k", "bias_v"}
    assert not {"in_proj_weight", "q_proj_weight", "out_proj.weight"} & set(small.state_dict())


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_encoder_layer_has_no_fast_path_around_its_codes(norm_first):
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first).eval()
    x = torch.randn(2, 5, 16)
    small = quantized(model, x)
    with torch.no_grad():
        without = small(x)
    assert torch.equal(without, small(x))
    assert close(model, small, x)
    assert inro_fx.report(small).coverage == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [dict(num_layers=2, bidirectional=True, batch_first=True), dict(bias=False), dict(num_layers=3)])
def test_recurrent_layers_are_right_and_still_flatten(kind, options):
    model = net(lambda self, x: self.rnn(x)[0], rnn=kind(8, 12, **options))
    x = torch.randn(2, 5, 8)
    small = quantized(model, x)
    assert close(model, small, x)
    assert inro_fx.report(small).coverage == 1
    small.rnn.flatten_parameters()
    assert relative(model(x), small.to(torch.float64)(x.double())) < 0.02


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_cells_in_a_loop(cell):
    def forward(self, x):
        h = None
        for i in range(3):
            h = self.cell(x[i], h)
        return first(h)
    model = net(forward, cell=cell(8, 12))
    small = quantized(model, torch.randn(3, 2, 8))
    assert close(model, small, torch.randn(3, 4, 8))
    assert inro_fx.report(small).coverage == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_options_of_embeddings(dtype):
    padded = nn.Embedding(20, 16, padding_idx=0)
    small = quantized(padded, torch.tensor([1, 2], dtype=dtype))
    assert torch.equal(small(torch.tensor([0], dtype=dtype)), torch.zeros(1, 16))
    for ids in (torch.tensor(3), torch.tensor([], dtype=torch.long), torch.tensor([[1, 2, 3], [4, 5, 6]])):
        assert close(padded, small, ids.to(dtype))
    renormed = nn.Embedding(20, 16, max_norm=1.0)
    same = quantized(copy.deepcopy(renormed), torch.tensor([1, 2]))
    assert torch.equal(same(torch.tensor([3, 4])), renormed(torch.tensor([3, 4])))
    assert inro_fx.report(same).skipped
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(20, 16, mode=mode)
        call = (torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3]), *((torch.rand(4),) if mode == "sum" else ()))
        assert close(bag, quantized(bag, call), *call)


@pytest.mark.parametrize(("make", "shape"), [
    (lambda: nn.Conv2d(8, 12, 3, groups=4), (2, 8, 9, 9)), (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 9, 9)), (lambda: nn.Conv1d(8, 12, 3, dilation=2), (2, 8, 9)),
    (lambda: nn.Conv3d(4, 12, 3), (2, 4, 5, 5, 5)), (lambda: nn.Conv2d(8, 12, 3, padding=(2, 0)), (2, 8, 9, 9)), (lambda: nn.Conv2d(8, 12, 1), (2, 8, 9, 9)),
    (lambda: nn.Conv2d(8, 12, 3), (8, 9, 9)), (lambda: nn.ConvTranspose2d(8, 12, 3, groups=4, stride=2), (2, 8, 5, 5)), (lambda: nn.ConvTranspose1d(8, 8, 3, groups=8), (2, 8, 5)),
], ids=range(9))
def test_every_output_channel_of_a_convolution_keeps_its_accuracy(make, shape):
    model = make()
    axis = 1 if isinstance(model, nn.modules.conv._ConvTransposeNd) else 0
    size = 10.0 ** torch.linspace(-3, 3, model.weight.shape[axis])
    with torch.no_grad():
        model.weight.mul_(size.reshape([-1 if i == axis else 1 for i in range(model.weight.dim())]))
        model.bias.zero_()
    x = torch.randn(shape)
    small = quantized(model, x)
    channel = -(len(shape) if len(shape) == 3 and model.weight.dim() == 4 else len(shape) - 1)
    want, got = model(x).movedim(channel, 0).flatten(1), small(x).movedim(channel, 0).flatten(1)
    assert ((want - got).norm(dim=1) / want.norm(dim=1)).max() < 0.02


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("kernel", [3, 2])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_padding_modes_at_the_border(mode, padding, kernel):
    model = nn.Conv2d(2, 16, kernel, padding=padding, padding_mode=mode)
    x = torch.randn(1, 2, 6, 6)
    small = quantized(model, x, inro_fx.uniform(2000))
    torch.testing.assert_close(small(x), model(x), rtol=1e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, parametrizations.weight_norm, parametrizations.orthogonal, nn.utils.spectral_norm, parametrizations.spectral_norm,
                                  lambda m: nn.utils.parametrize.register_parametrization(m, "weight", nn.Softsign()) or m])
def test_weights_that_are_computed_from_others(wrap, ran):
    model = nn.Sequential(wrap(nn.Linear(16, 12)), nn.ReLU())
    x = torch.randn(3, 16)
    if ran:
        model(x)
    model.eval()
    small = quantized(model, x)
    assert close(model, small, x)
    assert inro_fx.report(small).coverage == 1
    model.train()(x).sum().backward()
    assert any(p.grad is not None for p in model.parameters())


def test_hooks_on_children_fire_and_see_no_proxies():
    seen, whole = [], []
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(2, 16)
    model[1].register_forward_hook(lambda m, a, out: seen.append(out))
    model.register_forward_hook(lambda m, a, out: whole.append(out))
    small = quantized(model, x)
    assert all(type(t) is torch.Tensor for t in (*seen, *whole))
    seen.clear()
    whole.clear()
    small(x)
    assert len(seen) == len(whole) == 1


def test_an_excluded_name_is_not_a_prefix():
    names = ("gate", "gate_proj", "blocks", "a+b")
    model = nn.ModuleDict({n: nn.Linear(16, 16) for n in names})
    model["blocks"] = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(11))
    whole = net(lambda self, x: sum(m(x) for m in [self.d["gate"], self.d["gate_proj"], self.d["a+b"], *self.d["blocks"]]), d=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small = quantized(whole, torch.randn(2, 16), overrides={"d.gate": None, "d.blocks.1": None, "d.a+b": None, "d.nothing": None})
    assert {s.layer for s in inro_fx.report(small).skipped} == {"d.gate.weight", "d.blocks.1.0.weight", "d.a+b.weight"}
    assert ["'d.nothing' matches no layer" in str(w.message) for w in caught] == [True]


def test_layers_behind_fusions_and_subclasses_are_found():
    class Same(nn.Linear):
        pass

    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(), Same(16, 16), Scaled(16, 16))
    small = quantized(model, torch.randn(2, 16))
    assert inro_fx.report(small).coverage == 1
    assert close(model, small, torch.randn(3, 16))
    conv = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    for fold in (False, True):
        assert close(conv.eval(), quantized(conv, torch.randn(1, 4, 6, 6), fold_batchnorm=fold), torch.randn(2, 4, 6, 6))
