"""Codes, scales and zero points at their limits, and shapes at those of the kernels."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from models import SCHEMES, close, quantized, relative
from test_capture import net
from torch import nn

import inro_fx


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
