"""What people saw break when they quantized PyTorch models elsewhere, kind by kind; the names say what the user sees."""

import copy
import gc
import io
import itertools
import multiprocessing
import threading
import tracemalloc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from models import Conv1D, Sliced, Tied, first, quantize, relative
from safetensors.torch import save_model
from test_capture import net
from torch import nn
from torch.nn.utils import parametrizations

import inro_fx

SCHEMES = ("int8", "int8_dynamic", "int4")
WITHIN = {"int8": 0.02, "int8_dynamic": 0.04, "int4": 0.4, "int8_tensor": 0.1, "int8_rowwise_full": 0.02}


def quantized(model, inputs, scheme="int8", **options):
    return quantize(model.eval(), inputs, scheme, **options)


def close(model, small, *inputs, scheme="int8"):
    want, got = first(model(*inputs)), first(small(*inputs))
    return want.dtype == got.dtype and want.shape == got.shape and (not want.numel() or relative(want, got) < WITHIN[scheme])


def unique_bytes(model):
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values()}.values())


# ---- one weight, several users ----

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


# ---- arithmetic of codes and scales ----

@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4", inro_fx.uniform(1), inro_fx.uniform(7, 3)], ids=str)
def test_channels_of_zeros_and_denormals_give_the_bias_and_no_nan(scheme):
    layer = nn.Linear(32, 4)
    with torch.no_grad():
        layer.weight[0] = 0
        layer.weight[1] = 1e-40
        layer.weight[2] = 0
        layer.weight[2, 3] = 2.5
    x = torch.randn(5, 32)
    small = quantized(layer, x, scheme)
    y = small(x)
    assert torch.equal(y[:, 0], layer.bias[0].expand(5))
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(t.float()).all() for t in small.state_dict().values())
    row = inro_fx.report(small).rows[0]
    assert all(v is None or (v == v and abs(v) != float("inf")) for v in (row.weight_error, row.isolated, row.propagated, row.scale_max))
    empty = quantized(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)).apply(lambda m: getattr(m, "weight", torch.zeros(1)).data.zero_()), x, scheme)
    assert all(r.weight_error == 0 for r in inro_fx.report(empty).rows)


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_inputs_in_half_precision_do_not_overflow(scheme, dtype):
    layer = nn.Linear(256, 8)
    layer.weight.data.normal_().mul_(100)
    layer.to(dtype)
    x = (torch.randn(512, 256) * 1e-3).to(dtype)
    small = quantized(layer, x[:2], scheme)
    whole = small(x)
    assert torch.isfinite(whole).all()
    for rows in (1, 16, 17, 512):
        torch.testing.assert_close(small(x[:rows]), whole[:rows], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("quant_max", [1, 5, 7, 100, 127, 1000])
def test_codes_stay_in_their_range_and_quantizing_again_changes_nothing(quant_max):
    scheme = inro_fx.uniform(quant_max)
    grid = torch.randint(-quant_max, quant_max + 1, (6, 64)) * 0.1
    grid[:, 0] = quant_max * 0.1
    parts = scheme.pack(grid)
    again = scheme.pack(scheme.unpack(parts, 64, torch.float32))
    assert all(torch.equal(parts[k], again[k]) for k in parts)
    assert scheme.integers(scheme.pack(torch.randn(50, 64) * 10), 64).abs().max() <= quant_max


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize("inner", [8, 64, 2048])
@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (-1, -1)])
def test_sums_of_extreme_codes_are_exact_on_every_cpu(rows, inner, signs):
    layer = nn.Linear(inner, 8, bias=False)
    layer.weight.data.fill_(127.0 * signs[0])
    x = torch.full((rows, inner), 127.0 * signs[1])
    assert torch.equal(quantized(layer, x, "int8_dynamic")(x), torch.full((rows, 8), 127.0 * 127.0 * inner * signs[0] * signs[1]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 3), lambda: nn.Conv1d(16, 3, 1), lambda: nn.Embedding(9, 16)])
def test_nan_in_a_weight_is_no_code_and_is_said_by_name(value, make):
    model = nn.Sequential(make())
    model[0].weight.data[1, 0] = value
    x = torch.randn(2, 16, 4) if isinstance(model[0], nn.Conv1d) else torch.zeros(2, dtype=torch.long) if isinstance(model[0], nn.Embedding) else torch.randn(2, 16)
    with pytest.warns(UserWarning, match=r"0\.weight holds NaN or infinity and was left float"):
        small = quantized(model, x)
    assert [s.reason for s in inro_fx.report(small).skipped] == ["it holds NaN or infinity"]


def test_complex_integer_and_double_weights():
    def forward(self, x):
        z = torch.view_as_real(x.to(torch.complex64) @ self.z).flatten(1)
        return self.fc(z) + (self.n.float() @ torch.ones(8, 8))[:2] * 0 + self.d(x.double()).float()
    model = net(forward, fc=nn.Linear(8, 8), d=nn.Linear(8, 8).double())
    model.z, model.n = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64)), nn.Parameter(torch.ones(8, 8, dtype=torch.long), requires_grad=False)
    model.b = nn.Parameter(torch.ones(8, 8, dtype=torch.bool), requires_grad=False)
    small = quantized(model, torch.randn(2, 8))
    assert close(model, small, torch.randn(2, 8))
    report = inro_fx.report(small)
    assert {r.layer for r in report.rows} == {"fc", "d"}
    assert {s.layer: s.reason.partition(" weight")[0] for s in report.skipped if s.layer != "b"} == {"z": "complex64", "n": "int64"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("forward", [
    lambda self, x: F.linear(x, self.w, self.bias * 100), lambda self, x: F.linear(x, self.w),
    lambda self, x: torch.addmm(self.full, x, self.w.t(), beta=0.5, alpha=2), lambda self, x: torch.addmm(self.nan, x, self.w.t(), beta=0),
    lambda self, x: torch.addmm(self.bias, x, self.w.t(), alpha=-1.5), lambda self, x: torch.addmm(input=self.bias, mat1=x, mat2=self.w.t(), beta=3),
], ids=range(6))
def test_biases_of_every_form_are_added(forward, scheme):
    model = net(forward)
    model.w, model.bias = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(8))
    model.full, model.nan = nn.Parameter(torch.randn(3, 8) * 10), nn.Parameter(torch.full((8,), float("nan")))
    x = torch.randn(3, 32)
    small = quantized(model, x, scheme)
    assert torch.isfinite(small(x)).all()
    assert close(model, small, x, scheme=scheme)


# ---- dynamic quantization ----

@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sample_does_not_depend_on_its_batch(scheme):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    row = torch.randn(1, 32)
    small = quantized(model, row, scheme)
    alone = small(row)
    for others in (torch.randn(1, 32), torch.randn(16, 32), torch.randn(40, 32) * 100, torch.zeros(7, 32)):
        torch.testing.assert_close(small(torch.cat([others, row]))[-1:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 5, 16), (2, 3, 5, 16), (1, 1, 1, 1, 16)])
def test_every_token_has_its_own_scale_at_every_rank(shape, scheme):
    layer = nn.Linear(16, 8, bias=False)
    x = torch.randn(shape) * 10.0 ** torch.randint(-4, 5, (*shape[:-1], 1))
    small = quantized(layer, torch.randn(2, 16), scheme)
    flat = small(x.reshape(-1, 16))
    torch.testing.assert_close(small(x).reshape(-1, 8), flat, rtol=1e-5, atol=0)
    want = layer(x).reshape(-1, 8)
    assert ((flat - want).norm(dim=1) / want.norm(dim=1)).max() < (0.06 if scheme != "int4" else 0.5)


def test_outlier_features_show_in_the_report_and_the_layer_can_be_left_weight_only():
    layer = nn.Sequential(nn.Linear(128, 32))
    layer[0].weight.data[:, 0] *= 1e-3
    x = torch.randn(64, 128)
    x[:, 0] = 500
    dynamic = inro_fx.report(quantized(layer, x, "int8_dynamic")).rows[0]
    assert dynamic.isolated > 0.1
    weight_only = quantized(layer, x, "int8_dynamic", overrides={"0": "int8"})
    assert inro_fx.report(weight_only).rows[0].isolated < 0.1 * dynamic.isolated


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_padding_rows_of_zeros_make_no_nan_forwards_or_backwards(scheme, dtype):
    layer = nn.Linear(16, 8).to(dtype)
    small = quantized(layer, torch.randn(4, 16, dtype=dtype), scheme)
    x = torch.randn(4, 16, dtype=dtype)
    x[2], x[3] = 0, x[3].sign() * 1e-30
    x.requires_grad_()
    y = small(x)
    assert torch.equal(y[2], layer.bias)
    y.float().sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transposed_chunked_expanded_and_channels_last_inputs(scheme):
    layer, conv = quantized(nn.Linear(8, 4), torch.randn(2, 8), scheme), quantized(nn.Conv2d(4, 4, 3), torch.randn(1, 4, 6, 6), scheme)
    for x in (torch.randn(2, 8, 6).transpose(1, 2), torch.randn(2, 3, 16).chunk(2, -1)[1], torch.randn(1, 1, 8).expand(3, 5, 8), torch.randn(6, 8)[::2],
              torch.randn(16, 3).t()[:, ::2], torch.randn(9)[1:]):
        torch.testing.assert_close(layer(x), layer(x.contiguous()))
    x = torch.randn(2, 4, 7, 7).to(memory_format=torch.channels_last)
    torch.testing.assert_close(conv(x), conv(x.contiguous()))


# ---- shapes against the limits of kernels ----

@pytest.mark.parametrize("scheme", [s.name for s in inro_fx.SCHEMES])
@pytest.mark.parametrize(("make", "shape"), [(lambda: nn.Linear(8, 4), (0, 8)), (lambda: nn.Linear(8, 4), (3, 0, 8)), (lambda: nn.Conv2d(4, 4, 3), (0, 4, 6, 6)),
                                             (lambda: nn.Embedding(9, 16), (0,)), (lambda: nn.Conv1d(4, 8, 3), (0, 4, 9))])
def test_empty_batches(make, shape, scheme):
    model = make()
    kind = torch.long if isinstance(model, nn.Embedding) else torch.float32
    filled = torch.ones((2, *shape[1:]) if 0 not in shape[1:] else (2, 2, *shape[2:]), dtype=kind)
    for example in (filled, torch.ones(shape, dtype=kind)) if scheme != "int8_static" else (filled,):       # which needs data
        small = quantized(model, example, scheme)
        want, got = model(torch.ones(shape, dtype=kind)), small(torch.ones(shape, dtype=kind))
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 20])
def test_every_pair_of_odd_feature_sizes(scheme, rows):
    for inner, out in itertools.product((1, 3, 7, 8, 13, 16, 17, 24), repeat=2):
        layer, x = nn.Linear(inner, out), torch.randn(rows, inner)
        small = quantized(layer, x, scheme)
        largest = (x.norm(dim=1, keepdim=True) * layer.weight.norm(dim=1)).abs() + 1e-6
        assert ((layer(x) - small(x)).abs() / largest).max() < (0.2 if scheme == "int4" else 0.02), (inner, out)
        report = inro_fx.report(small)
        assert len(report.rows) + len(report.skipped) == 1


@pytest.mark.parametrize("stored", ["rows", "columns"])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33])
def test_integer_products_are_exact_however_the_weight_is_stored(stored, rows):
    codes = torch.randint(-127, 128, (16, 16))
    codes[:, 0] = 127
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(codes.float() if stored == "rows" else codes.float().t().contiguous().t())
    x = torch.randint(-127, 128, (rows, 16))
    x[:, 0] = 127
    assert torch.equal(quantized(layer, x.float(), "int8_dynamic")(x.float()).long(), x @ codes.t())


@pytest.mark.parametrize("columns", [1, 31, 32, 40, 65])
@pytest.mark.parametrize("group", [1, 7, 32, 100])
def test_groups_that_do_not_divide_the_row_lose_no_column(columns, group):
    scheme = inro_fx.uniform(7, group)
    weight = torch.randn(6, columns) * torch.logspace(-2, 2, columns)
    restored = scheme.unpack(scheme.pack(weight), columns, torch.float32)
    assert ((restored - weight).abs() <= scheme.bound(weight)).all()
    layer = nn.Linear(columns, 6)
    x = torch.randn(3, columns)
    small = quantized(layer, x, scheme)
    report = inro_fx.report(small)
    assert report.rows or "would take" in report.skipped[0].reason
    assert relative(layer(x), small(x)) < 0.5


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize("columns", [7, 8, 9, 31])
def test_packed_codes_are_the_same_after_every_trip(bits, columns, tmp_path):
    top = 2 ** (bits - 1) - 1
    scheme = inro_fx.uniform(top)
    layer = nn.Linear(columns, 40)
    codes = (torch.arange(40 * columns).reshape(40, columns) % (2 * top + 1)) - top
    codes[:, 0] = top
    layer.weight.data = codes.float()
    small = quantized(layer, torch.randn(2, columns), scheme)
    for trip in (lambda q: q, copy.deepcopy, lambda q: inro_fx.load(inro_fx.save(q, tmp_path / "m.safetensors"), layer), lambda q: q.half().float()):
        again = trip(small)
        assert torch.equal(scheme.integers({"codes": again.weight_codes}, columns).long(), codes)
        assert torch.equal(again.weight, codes.float())


# ---- which layers are found, and what touches them ----

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


# ---- tracing changes the meaning ----

def length(self, x):
    return self.fc(x) * len(x)


def asserts(self, x):
    assert x.shape[1] == 16
    return self.fc(x)


@pytest.mark.parametrize("forward", [
    lambda self, x: self.fc(x) if x.shape[0] > 4 else -self.fc(x), lambda self, x: self.fc(x) if x.sum() > 0 else -self.fc(x),
    lambda self, x: torch.stack([self.fc(row) for row in x.unbind(0)]), length, asserts, lambda self, x: self.fc(x)[: int(x[0, 0] > 0) + 1],
    lambda self, x: sum(self.fc(row) for row in x), lambda self, x: [self.fc(x), -self.fc(x)][int(x.max() > 2)], lambda self, x: self.fc(x) if x.any() else x,
], ids=range(9))
def test_branches_are_right_on_both_sides(forward):
    model = net(forward, fc=nn.Linear(16, 16))
    for rows in (2, 6):
        small = quantized(model, torch.randn(rows, 16))
        for x in (torch.randn(6, 16), -torch.rand(2, 16), torch.rand(5, 16) * 3, torch.zeros(1, 16)):
            assert close(model, small, x)


def test_a_dict_that_forward_fills_and_reads():
    def forward(self, d):
        d["h"] = torch.relu(self.a(d["x"]))
        d.update(y=self.b(d.pop("h")))
        return d["y"]
    model = net(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    mine = {"x": torch.randn(2, 16)}
    small = quantized(model, (mine,))
    assert list(mine) == ["x"]
    d, e = ({"x": torch.randn(3, 16)} for _ in range(2))
    e["x"] = d["x"]
    assert relative(model(d), small(e)) < 0.03
    assert list(d) == list(e)
    assert inro_fx.report(small).coverage == 1


def test_signatures_defaults_and_flags():
    model = net(lambda self, x, scale=2.0, *, mask=None, flag=True: self.fc(x) * scale * (1 if flag else -1) + (0 if mask is None else mask), fc=nn.Linear(16, 16))
    x = torch.randn(2, 16)
    for example in (x, (x,), (x, 3.0), {"x": x}, {"x": x, "mask": torch.randn(2, 16)}, {"x": x, "flag": False}):
        small = quantized(model, example)
        for args, kwargs in (((x,), {}), ((x, 5.0), {}), ((x,), {"mask": x}), ((x,), {"flag": False}), ((), {"scale": 1, "x": x})):
            assert relative(model(*args, **kwargs), small(*args, **kwargs)) < 0.02
        with pytest.raises(TypeError):
            small(x, nonsense=1)
    stars = net(lambda self, *xs: sum(self.fc(x) for x in xs), fc=nn.Linear(16, 16))
    assert close(stars, quantized(stars, (x, x)), x, x, x)
    named = net(lambda self, **kw: self.fc(kw["a"]) - kw.get("b", 0), fc=nn.Linear(16, 16))
    assert relative(named(a=x, b=x), quantized(named, {"a": x})(a=x, b=x)) < 0.02


def test_a_model_left_in_training_mode():
    model = net(lambda self, x: F.dropout(self.drop(self.norm(self.fc(x))), 0.5, training=self.training), fc=nn.Linear(16, 16), norm=nn.BatchNorm1d(16), drop=nn.Dropout(0.5))
    model.train()
    before = copy.deepcopy(model.state_dict())
    small = inro_fx.quantize_graph(model, torch.randn(4, 16))
    assert model.training and not small.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    x = torch.randn(4, 16)
    assert torch.equal(small(x), small(x))
    assert relative(model.eval()(x), small(x)) < 0.02
    assert (small.train()(x) == 0).any()
    assert torch.equal(small.eval()(x), nn.Sequential(small).train(False)(x))


def test_context_managers_inside_forward():
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.a(x.float())
        with torch.no_grad():
            z = self.b(x)
        return y, z
    model = net(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    small = quantized(model, torch.randn(2, 16))
    x = torch.randn(2, 16, requires_grad=True)
    for context in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            for want, got in zip(model(x), small(x), strict=True):
                assert (want.dtype, want.requires_grad) == (got.dtype, got.requires_grad)
                assert relative(want, got) < 0.02


@pytest.mark.parametrize("forward", [
    lambda self, x: (lambda y: y + y.add_(1))(torch.relu_(self.fc(x))), lambda self, x: (lambda h: (h.__setitem__((slice(None), 0), 0), self.fc(h))[1])(self.fc(x)),
    lambda self, x: torch.empty(x.shape[0], 16).copy_(self.fc(x)), lambda self, x: self.fc(x).mul_(2).clamp_(min=0), lambda self, x: self.fc(x.add_(1)),
    lambda self, x: torch.add(self.fc(x), 1, out=torch.empty(x.shape[0], 16)), lambda self, x: F.relu(self.fc(x), inplace=True).t_(),
], ids=range(7))
def test_in_place_operations(forward):
    model = net(forward, fc=nn.Linear(16, 16))
    x = torch.randn(2, 16)
    with torch.no_grad():
        small = quantized(model, x)
        a = torch.randn(3, 16)
        b = a.clone()
        assert relative(model(a), small(b)) < 0.02
    assert torch.equal(a, b)


def test_helpers_move_with_the_model():
    model = net(lambda self, x: self.fc(x) + torch.arange(x.size(1), device=x.device) + self.plain + torch.ones(16, device=x.device), fc=nn.Linear(16, 16))
    model.plain = torch.randn(16, 16)
    small = quantized(model, torch.randn(16, 16))
    moved = copy.deepcopy(small).to("meta")                        # a second device that every machine has
    assert moved(torch.empty(16, 16, device="meta")).device.type == "meta"
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}


def test_names_that_the_passes_would_give_are_the_users():
    model = net(lambda self, x: F.linear(self.lin(x), self.lin_weight) + self.lin_weight_codes + self.lin_scale + self._constant_0 + torch.ones(16) * self.table[0],
                lin=nn.Linear(16, 16))
    model.lin_weight = nn.Parameter(torch.randn(16, 16))
    for name in ("lin_weight_codes", "lin_weight_scale", "lin_scale", "_constant_0", "_tensor_constant0"):
        model.register_buffer(name, torch.randn(16))
    model.lin.register_buffer("weight_codes", torch.randn(3))
    model.table = [torch.randn(16)]
    before = {n: b.clone() for n, b in model.named_buffers()}
    small = quantized(model, torch.randn(2, 16))
    assert close(model, small, torch.randn(3, 16))
    assert all(torch.equal(small.get_buffer(n), b) for n, b in before.items())
    assert list(quantized(model, torch.randn(2, 16)).state_dict()) == list(small.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*jit")
def test_wrapped_models():
    plain, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(2, 16)
    for wrapped, advice in ((nn.DataParallel(plain), "pass model.module"), (torch.jit.script(plain), "the module that it was scripted from"),
                            (torch.compile(plain), "the module that was compiled")):
        with pytest.raises(inro_fx.ModelError, match=advice):
            inro_fx.quantize_graph(wrapped, x)
    traced = torch.fx.symbolic_trace(plain)
    small = quantized(traced, x)
    assert close(traced, small, x)
    assert torch.equal(nn.DataParallel(small)(x), small(x))
    clone, = torch.nn.parallel.replicate(small, ["cpu"], detach=True) if torch.cuda.is_available() else (small,)
    assert torch.equal(clone(x), small(x))


# ---- the life of the result ----

def test_attributes_methods_and_class_are_still_there():
    class Speaker(nn.Module):
        kind = "speaker"

        def __init__(self):
            super().__init__()
            self.fc, self.config, self.labels = nn.Linear(16, 16), {"a": 1}, ["x"]

        @property
        def device(self):
            return self.fc.bias.device

        def forward(self, x):
            return self.fc(x)

        def generate(self, x):
            for _ in range(3):
                x = self(x)
            return x

        def encode(self, x):
            return torch.relu(self.fc(x))

        def __len__(self):
            return 7
    model, x = Speaker(), torch.randn(2, 16)
    small = quantized(model, x)
    for q in (small, copy.deepcopy(small)):
        assert (q.kind, q.config, q.labels, q.device.type, len(q)) == ("speaker", {"a": 1}, ["x"], "cpu", 7)
        assert isinstance(q, Speaker)
        assert torch.equal(q.generate(x), q(q(q(x))))
        assert relative(model.encode(x), q.encode(x)) < 0.02


def in_another_process(queue, path):
    small, x, y = torch.load(path, weights_only=False)
    queue.put(bool(torch.equal(small(x), y)))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_spawned(method, tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(2, 16)
    small = quantized(model, x)
    torch.save((small, x, small(x)), tmp_path / "m.pt")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=in_another_process, args=(queue, str(tmp_path / "m.pt")))
    worker.start()
    assert queue.get(timeout=120)
    worker.join()


def test_the_state_dict_holds_plain_tensors_and_everything():
    a, b = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2))
    x = torch.randn(2, 16)
    first_, second = quantized(a, x), quantized(b, x)
    file = io.BytesIO()
    torch.save(first_.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert all(type(t) is torch.Tensor for t in state.values())
    second.load_state_dict(state)
    assert torch.equal(first_(x), second(x))
    for missing in ("0.weight_scale", "0.bias"):
        with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
            second.load_state_dict({k: v for k, v in state.items() if k != missing})
        second.load_state_dict({k: v for k, v in state.items() if k != missing}, strict=False)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"foreign"'):
        second.load_state_dict({**state, "foreign": x})


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to(torch.float16), lambda m: m.cpu(), lambda m: m.half().float()])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_casting_the_result(move, scheme):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model[0].weight.data.mul_(1e-6)                                # the scales would be zero in half precision
    x = torch.randn(4, 32)
    small = move(quantized(model, x, scheme))
    dtype = small[0].bias.dtype
    y = small(x.to(dtype))
    assert y.dtype == dtype
    assert relative(model(x), y) < WITHIN[scheme] + 0.02
    assert {t.dtype for n, t in small.state_dict().items() if "scale" in n} == {torch.float32}
    assert not any(t.is_floating_point() for n, t in small.state_dict().items() if "codes" in n)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_optimizers_of_graphs_do_not_undo_the_quantization():
    model, x = nn.Sequential(nn.Linear(256, 256)), torch.randn(4, 256)
    small = quantized(model, x)
    program = torch.export.export(small, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    assert len(file.getvalue()) < 0.45 * 256 * 256 * 4
    core = program.run_decompositions()
    assert any(t.dtype == torch.int8 for t in core.state_dict.values())
    torch.testing.assert_close(core.module()(x), small(x))
    torch._dynamo.reset()
    import torch._inductor.config as inductor
    with inductor.patch(freezing=True), torch.no_grad():
        torch.testing.assert_close(torch.compile(small)(x), small(x))
    assert small[0].weight_codes.dtype == torch.int8


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_changing_batch_compiles_at_most_twice():
    import torch._dynamo.testing
    small = quantized(nn.Linear(128, 256), torch.randn(2, 64, 128))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(small, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 1, 2, 5, 17):
        x = torch.randn(batch, 64, 128)
        torch.testing.assert_close(compiled(x), small(x))
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("capture", ["auto", "export"])
def test_a_result_can_be_exported(capture):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(3, 16)
    small = quantized(model, x, capture=capture)
    program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.testing.assert_close(program.module()(torch.randn(0, 16).new_ones(7, 16)), small(torch.ones(7, 16)))
    torch.testing.assert_close(program.run_decompositions().module()(x), small(x))


@pytest.mark.parametrize("inside", list(itertools.product((torch.inference_mode, torch.no_grad, torch.enable_grad), repeat=2)), ids=lambda i: "-".join(c.__name__ for c in i))
def test_inference_mode_around_quantizing_and_running(inside):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(3, 16)
    want = quantized(model, x)(x)
    with inside[0]():
        small = quantized(model, x)
    with inside[1]():
        assert torch.equal(small(x), want)
    other = copy.deepcopy(small).to(torch.float64)
    other.load_state_dict(small.state_dict())
    assert relative(want, other(x.double())) < 1e-3


def test_low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))
    x = torch.randn(4, 16)
    whole = quantized(Adapted(nn.Linear(16, 16)), x, overrides={"a": None, "b": None})
    assert {r.layer for r in inro_fx.report(whole).rows} == {"base"}
    around = Adapted(quantized(nn.Linear(16, 16), x))
    before = around(x).detach()
    optimizer = torch.optim.SGD([p for p in around.parameters() if p.requires_grad], 0.1)
    around(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(around(x), before)
    with pytest.raises(inro_fx.ModelError, match="quantize the model again with the new weight"):
        around.base.weight = nn.Parameter(around.base.weight + around.b.weight @ around.a.weight)


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_and_optimizers(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        body = quantized(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16))
        model = nn.Sequential(nn.Linear(16, 16), body, nn.Linear(16, 2))
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(parallel.parameters())
        before = [p.detach().clone() for p in parallel.parameters()]
        parallel(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, parallel.parameters(), strict=True))
    finally:
        torch.distributed.destroy_process_group()
    body.requires_grad_(True)
    assert all(b.requires_grad is False for n, b in body.named_buffers())


@pytest.mark.parametrize(("make", "shape"), [(lambda: nn.Linear(32, 8), (2, 32)), (lambda: nn.Conv2d(4, 8, 3), (2, 4, 6, 6)), (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (2, 5, 16))])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_gives_the_dtype_of_the_float_model(make, shape, scheme):
    model, x = make().eval(), torch.randn(shape)
    small = quantized(model, x, scheme)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert small(x).dtype == model(x).dtype
        assert relative(model(x), small(x)) < WITHIN[scheme] + 0.03
    low = quantized(copy.deepcopy(model).bfloat16(), x.bfloat16(), scheme)
    for call in (model.bfloat16(), low):
        with pytest.raises(RuntimeError):
            call(x)


def test_a_default_device_or_dtype_while_quantizing():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16)
    want = quantized(model, x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            small = quantized(model, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(want.state_dict().values(), small.state_dict().values(), strict=True))


def test_weights_without_data_are_refused_before_any_work():
    for model, message in ((nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, device="meta")), r"1\.weight is on the meta device"),
                           (nn.Linear(16, 16, device="meta"), "weight is on the meta device"), (nn.Sequential(nn.LazyLinear(4)), r"0\.weight is not initialized")):
        with pytest.raises(inro_fx.ModelError, match=message):
            inro_fx.quantize_graph(model, torch.randn(2, 16))


def test_the_original_stays_as_it_was_and_a_second_time_gives_the_same():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)).train()
    model[0].weight.requires_grad_(False)
    model[2].weight.grad = torch.ones(16, 16)
    handle = model[0].register_forward_hook(lambda *a: None)
    def snapshot():
        return (model.training, [p.requires_grad for p in model.parameters()], list(model[0]._forward_hooks), model[2].weight.grad.sum().item(), torch.get_rng_state().tolist(),
                [id(p) for p in model.parameters()], [t.tolist() for t in model.state_dict().values()])
    before = snapshot()
    small, again = (inro_fx.quantize_graph(model, torch.ones(4, 16)) for _ in range(2))
    assert snapshot() == before
    assert all(torch.equal(a, b) for a, b in zip(small.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(inro_fx.ModelError, match="already quantized"):
        inro_fx.quantize_graph(small, torch.ones(4, 16))
    handle.remove()


def test_versions_of_torch_out_of_range_are_refused(monkeypatch):
    import importlib
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer; this is torch 2\.10\.1"):
        importlib.reload(inro_fx)


# ---- memory, speed, honest reports ----

@pytest.mark.filterwarnings("ignore::FutureWarning")               # of what gc finds
def test_memory_is_a_quarter_and_does_not_grow():
    def live():
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu"]
        return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())
    start = live()
    sizes = []
    for _ in range(5):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
        whole = live() - start
        small = quantized(model, torch.randn(2, 512))
        del model
        sizes.append(live() - start)
        del small
    assert max(sizes) < 0.3 * whole
    assert max(sizes) - min(sizes) < 0.01 * whole
    assert live() - start < 0.01 * whole


def test_many_rounds_of_quantizing_running_and_dropping_do_not_grow():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16)
    def rounds(count):
        for _ in range(count):
            quantized(model, x)(x)
        gc.collect()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(4):
            rounds(40)
            sizes.append(tracemalloc.get_traced_memory()[0])
        assert min(b - a for a, b in itertools.pairwise(sizes)) < 8 * 1024     # tables of the process grow now and then, by steps
    finally:
        tracemalloc.stop()


def test_quantizing_and_running_in_several_threads_at_once():
    models = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)]
    x, shared = torch.randn(3, 16), quantized(nn.Sequential(nn.Linear(16, 16), nn.LSTM(16, 16)), torch.randn(3, 16))
    want = [quantized(m, x)(x) for m in models]
    expected, failures = first(shared(x)), []

    def work(i):
        try:
            for _ in range(5):
                assert torch.equal(quantized(models[i], x)(x), want[i])
                assert torch.equal(first(shared(x)), expected)
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_report_says_which_layers_run_integers_and_which_dequantize():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 64))
    report = inro_fx.report(quantized(model, torch.randn(1, 4, 6, 6), "int8_dynamic"))
    kernels = {r.layer: r.kernel for r in report.rows}
    assert kernels["0"] == "dequantize + conv2d"
    assert kernels["2"] in ("inro_fx.linear_dynamic/c", "inro_fx.linear_dynamic/torch")
    assert "dequantize" in str(report)
