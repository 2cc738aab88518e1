"""Convolutions in integers: kernels and operators against their references, and networks of them, with codes from layer to layer."""

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from models import relative
from torch import nn

import inro_fx
from inro_fx.kernels import best_level, convolve
from inro_fx.ops import conv_static as static
from inro_fx.ops.conv import channels_of, convolution_shape, float_conv, weight_of
from inro_fx.ops.max_pool2d import reference as max_pool_reference
from inro_fx.ops.quantize import quantize_reference, side_by_side
from inro_fx.passes.scheme import Layout

OPS = torch.ops.inro_fx
needs_library = pytest.mark.skipif(best_level() < 0, reason="the C library was not built")
FORMATS = (torch.tensor([[0.02]]), torch.tensor([[-9]], dtype=torch.int32))          # a scale and a zero point


@st.composite
def geometries(draw):
    """(input shape, output channels, geometry) of a convolution that has results."""
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    each = lambda low, high: [draw(st.integers(low, high)) for _ in range(dims)]
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = draw(st.sampled_from([1, 2, 5, 16, 33]))
    out = draw(st.sampled_from([1, 2, 7, 16, 35])) * groups
    if draw(st.integers(0, 4)) == 0:
        groups, channels, out = channels, 1, channels                                       # depthwise
    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 2)
    padding = [draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True)]
    extra = [draw(st.integers(0, max(s, d) - 1)) if transposed else 0 for s, d in zip(stride, dilation, strict=True)]
    size = [draw(st.integers(d * (k - 1) + 1, 14 - 3 * dims)) if 14 - 3 * dims > d * (k - 1) else d * (k - 1) + 1
            for k, d in zip(kernel, dilation, strict=True)]
    shape = (draw(st.integers(1, 2)), channels * groups, *size)
    return shape, out, (kernel, stride, padding, extra, dilation, groups, transposed)


def operands(shape, out, geometry, seed):
    g = torch.Generator().manual_seed(seed)
    columns = shape[1] // geometry[5] * torch.Size(geometry[0]).numel()
    return (torch.randn(shape, generator=g) * 2, torch.randint(-127, 128, (out, columns), generator=g, dtype=torch.int8),
            torch.rand(out, 1, generator=g) / 500, torch.randn(out, generator=g))


ONE_CHANNEL = ((1, 1, 9, 8), 1, ([2, 3], [1, 1], [1, 1], [0, 0], [1, 1], 1, False))


@needs_library
@example(ONE_CHANNEL, "codes", "codes", "", 1, 0)
@given(geometries(), st.sampled_from(["codes", "planes", "channels last"]), st.sampled_from(["codes", "planes", "channels last"]),
       st.sampled_from(["", "codes", "floats"]), st.integers(0, len(static.ACTIVATIONS) - 1), st.integers(0, 99))
def test_kernels_of_fixed_formats(case, x_form, y_form, added, activation, seed):
    """The reference's results, and one set of bits at any level of instructions and number of threads."""
    shape, out, geometry = case
    x, codes, scale, bias = operands(shape, out, geometry, seed)
    if x_form != "planes":
        x = side_by_side(quantize_reference(x, *FORMATS) if x_form == "codes" else x)
    y_shape = convolution_shape(x, codes, *geometry[:5], geometry[6])
    residual, formats = None, (None, None)
    if added and y_form != "planes":
        residual = side_by_side(torch.randn(y_shape, generator=torch.Generator().manual_seed(seed)))
        if added == "codes":
            residual, formats = side_by_side(quantize_reference(residual, *FORMATS)), FORMATS
    y_format = FORMATS if y_form == "codes" else (None, None)
    want = static.reference(x, codes, scale, *FORMATS, bias, residual, *formats, *y_format, *geometry, activation, -0.5, 2.0,
                            y_form == "channels last", torch.float32)
    results = [convolve(x, codes, scale, bias, geometry, y_shape[2:], x_format=FORMATS, residual=residual,
                        r_format=FORMATS if added == "codes" else None, y_format=FORMATS if y_form == "codes" else None,
                        channels_last=y_form != "planes", activation=(activation, -0.5, 2.0), level=level, threads=threads)
               for level in range(best_level() + 1) for threads in (1, 3)]
    for got in results:
        assert torch.equal(got, results[0]) or activation > static.ACTIVATIONS.index("clamp")
        torch.testing.assert_close(got.float(), want.float(), rtol=1e-4, atol=1.0 if y_form == "codes" else 2e-5)


@needs_library
@example(ONE_CHANNEL, False, 1, 0)
@given(geometries(), st.booleans(), st.sampled_from([1, 2]), st.integers(0, 99))
def test_kernels_of_scales_per_sample(case, last, levels, seed):
    shape, out, geometry = case
    x, codes, scale, bias = operands(shape, out, geometry, seed)
    x = side_by_side(x) if last else x
    want = float_conv(x.double(), weight_of(codes.double() * scale, shape[1], geometry[0], geometry[5], geometry[6]), bias.double(), *geometry[1:])
    sums = codes.double().abs().sum(1).reshape(-1, *(1,) * (x.dim() - 2)) * scale.double().reshape(-1, *(1,) * (x.dim() - 2))
    step = x.double().abs().amax([*range(1, x.dim())], keepdim=True) / (127 if levels == 1 else 127 * 128)
    results = [convolve(x, codes, scale, bias, geometry, want.shape[2:], levels=levels, channels_last=last, level=level, threads=threads)
               for level in range(best_level() + 1) for threads in (1, 3)]
    for got in results:
        assert got is None or ((got - want).abs() <= step * 0.51 * sums + 1e-5 * want.abs() + 1e-5).all()
        assert got is None or levels == 2 or torch.equal(got, results[0])


@needs_library
@given(st.integers(1, 2), st.sampled_from([1, 3, 16, 70]), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3),
       st.integers(0, 1), st.integers(1, 2), st.booleans())
def test_pooling_of_codes(n, channels, height, width, kernel, stride, padding, dilation, ceil):
    x = side_by_side(torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8))
    window = ([kernel] * 2, [stride] * 2, [min(padding, kernel // 2)] * 2, [dilation] * 2, ceil)
    if min(height, width) + 2 * window[2][0] < dilation * (kernel - 1) + 1 or (padding and dilation > 1):
        return
    got = OPS.max_pool2d(x, *window)
    assert torch.equal(got, max_pool_reference(x, *window))
    assert torch.equal(got.float(), F.max_pool2d(x.float(), *window))


OWN_WARNING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")      # of opcheck in torch 2.14


@OWN_WARNING
@pytest.mark.parametrize("geometry", [([3], [1], [1], [0], [1], 1, False), ([3, 2], [2, 1], [1, 0], [0, 0], [1, 2], 2, False),
                                      ([2, 2], [2, 2], [0, 0], [1, 0], [1, 1], 1, True), ([1, 3, 3], [1, 1, 1], [0, 1, 1], [0] * 3, [1] * 3, 1, False)])
def test_opcheck(geometry):
    x, codes, scale, bias = operands((2, 8, *(6,) * len(geometry[0])), 6, geometry, 0)
    for dynamic in (True, False):
        torch.library.opcheck(OPS.conv.default, (x.requires_grad_(), codes, scale.requires_grad_(), bias.requires_grad_(), *geometry, dynamic, 8, 0))
        torch.library.opcheck(OPS.conv.inference, (x.detach(), codes, scale.detach(), None, *geometry, dynamic, 8, 0))
    rest = (*geometry, 1, 0.0, 6.0, False, torch.float32)
    torch.library.opcheck(OPS.conv_static.default, (x, codes, scale, *FORMATS, bias, *(None,) * 5, *rest))
    coded, scale, bias = side_by_side(quantize_reference(x.detach(), *FORMATS)), scale.detach(), bias.detach()
    y = OPS.conv_static(coded, codes, scale, *FORMATS, bias, None, None, None, *FORMATS, *rest)
    assert y.dtype == torch.uint8
    torch.library.opcheck(OPS.conv_static.inference, (coded, codes, scale, *FORMATS, bias, y, *FORMATS, *FORMATS, *rest))
    torch.library.opcheck(OPS.quantize.default, (x.detach(), *FORMATS))
    torch.library.opcheck(OPS.dequantize_codes.default, (coded, *FORMATS, torch.float16))
    if len(geometry[0]) == 2:
        torch.library.opcheck(OPS.max_pool2d.default, (coded, [2, 2], [2, 2], [0, 0], [1, 1], True))


@pytest.mark.parametrize("activation", [0, 1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_with_fixed_formats(activation, transposed):
    """Those of the float convolution with the weight that the codes stand for, where x lies inside its range."""
    geometry = ([3, 3], [2, 2], [1, 1], [0, 0], [1, 1], 2, transposed)
    x, codes, scale, bias = operands((2, 4, 5, 5), 6, geometry, 1)
    step, zero = FORMATS
    given = [t.requires_grad_() for t in (x, scale, bias)]
    y = OPS.conv_static(x, codes, scale, *FORMATS, bias, *(None,) * 5, *geometry, activation, -0.5, 2.0, False, torch.float32)
    seen = ((x / step).round() + zero).clamp(-127, 127)
    inside = x + ((seen - zero) * step - x).detach() if activation is None else torch.where(
        (x / step + zero).round().abs() <= 127, x + ((seen - zero) * step - x).detach(), ((seen - zero) * step).detach())
    want = static.activate(float_conv(inside, weight_of(codes * scale, 4, geometry[0], 2, transposed), bias, *geometry[1:]), activation, -0.5, 2.0)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    up = torch.randn_like(y)
    for got, grad in zip(torch.autograd.grad(y, given, up), torch.autograd.grad(want, given, up), strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-3, atol=1e-3)


def test_samples_that_do_not_fit_are_computed_in_floats():
    conv, x = nn.Conv2d(16, 32, 3, padding=1), torch.randn(3, 16, 12, 12)
    for scheme in ("int8", "int8_dynamic"):
        small = inro_fx.quantize_graph(conv, x, scheme)
        for value in (float("nan"), float("inf"), 3e38, 1e-42):
            odd = x.clone()
            odd[1, 2, 3, 4] = value
            if value == 1e-42:
                odd = x * 0 + value
            got, want = small(odd), F.conv2d(odd, small.weight, conv.bias, padding=1)
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.isinf(), want.isinf()) or value == 3e38
            torch.testing.assert_close(got[0], want[0], rtol=0.05, atol=0.05)


def test_an_input_that_does_not_fit_says_what_fits():
    x, codes, scale, bias = operands((2, 8, 6, 6), 6, geometry := ([3, 3], [1, 1], [0, 0], [0, 0], [1, 1], 1, False), 0)
    with pytest.raises(RuntimeError, match=r"8 input channels and a kernel \(3, 3\) got an input \(2, 7, 6, 6\)"):
        OPS.conv(x[:, :7], codes, scale, bias, *geometry, True, 8, 0)
    with pytest.raises(RuntimeError, match="8 input channels"):
        channels_of(torch.randn(8), codes, [3, 3], 1)


# ---- networks ----

class Block(nn.Module):
    """ResNet's: two convolutions with batch norms, and what is added."""

    def __init__(self, channels, out, stride=1, activation=nn.ReLU, inplace=True):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if stride != 1 or channels != out else None
        self.act = activation(inplace=True) if inplace else activation()

    def forward(self, x):
        short = x if self.down is None else self.down(x)
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        y += short
        return self.act(y)


class Inverted(nn.Module):
    """MobileNet's: wide inside, depthwise, with a sum where the sizes agree."""

    def __init__(self, channels, out, stride):
        super().__init__()
        wide = channels * 4
        self.add = stride == 1 and channels == out
        self.body = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
                                  nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
                                  nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return x + self.body(x) if self.add else self.body(x)


class Squeeze(nn.Module):
    """EfficientNet's: channels weighed by what they are in the mean."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        x = F.silu(self.conv(x))
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True)))))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.last, self.head = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        one = F.leaky_relu(self.down1(x), 0.1)
        two = F.hardswish(self.down2(F.max_pool2d(one, 2)))
        return self.head(torch.relu(self.last(torch.cat((self.up(two), one), 1))))


class Branches(nn.Module):
    """Inception's: branches of one input, joined, and read twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(32, 8, 3)
        self.d = nn.Conv2d(32, 8, 1, groups=2)

    def forward(self, x):
        joined = torch.cat((F.relu(self.a(x)), F.relu(self.b(x))), dim=1)
        return self.c(joined).mean((2, 3)) + self.d(joined).mean((2, 3)) + joined.amax((1, 2, 3))[:, None]


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(4, 32, 10, 5, bias=False), nn.GELU(), nn.Conv1d(32, 32, 3, 2), nn.GELU(), nn.Conv1d(32, 16, 3), nn.Tanh(),
                                    nn.Conv1d(16, 8, 3, padding="same", padding_mode="reflect"))

    def forward(self, x):
        return self.layers(x)


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv3d(2, 16, 3, padding=1), nn.Conv3d(16, 16, (1, 3, 3), dilation=(1, 2, 2)), nn.ConvTranspose3d(16, 4, 2, stride=2)

    def forward(self, x):
        return self.c(F.hardsigmoid(self.b(F.relu6(self.a(x)))))


def with_statistics(model, *shape):
    """The model in evaluation, its batch norms with statistics of their own."""
    g = torch.Generator().manual_seed(5)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, *shape, generator=g))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5, generator=g)
                module.bias.uniform_(-0.3, 0.3, generator=g)
    return model.eval()


NETWORKS = {
    "resnet": (lambda: nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(3, 2, 1), Block(16, 16),
                                     Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 7)), (3, 40, 40)),
    "not in place": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), Block(16, 16, inplace=False, activation=nn.SiLU), Block(16, 24, 2, inplace=False)), (3, 20, 20)),
    "mobilenet": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(), Inverted(16, 16, 1), Inverted(16, 24, 2),
                                        Inverted(24, 24, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(24, 7)), (3, 32, 32)),
    "squeeze": (lambda: nn.Sequential(Squeeze(16), Squeeze(16)), (16, 16, 16)),
    "unet": (UNet, (3, 24, 24)), "branches": (Branches, (8, 14, 14)), "waves": (Waves, (4, 400)), "volumes": (Volumes, (2, 6, 10, 10)),
}
SMALL_ERRORS = {"int8": 0.02, "int8_dynamic": 0.06, "int8_static": 0.08}


def network(name, batch=2):
    made, shape = NETWORKS[name]
    torch.manual_seed(3)
    return with_statistics(made(), *shape), torch.randn(batch, *shape)


def quantized(model, x, scheme):
    return inro_fx.quantize_graph(model, x, scheme, **(dict(calibration=[x, x.flip(0) * 1.1]) if scheme == "int8_static" else {}))


def calls(small):
    """How often each operator of ours is called in the graph."""
    program = small._inro_runners[0].program
    called = [n.target._schema.name.partition("::")[2] for n in program.graph.nodes if hasattr(n.target, "_schema")]
    return collections.Counter(called)


@pytest.mark.parametrize("scheme", SMALL_ERRORS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name, scheme, tmp_path):
    """Near the float model at other sizes and batches; the same from a file, in a copy, layer by layer, and where gradients are wanted."""
    model, x = network(name)
    small = quantized(model, x, scheme)
    other = torch.cat((x, x * 0.7))
    with torch.no_grad():
        want, got = model(other), small(other)
        assert got.shape == want.shape
        assert got.stride() == want.stride()
        assert relative(want, got) < SMALL_ERRORS[scheme]
        assert torch.equal(copy.deepcopy(small)(other), got)
        inro_fx.save(small, tmp_path / "small.safetensors")
        assert torch.equal(inro_fx.load(tmp_path / "small.safetensors", network(name)[0])(other), got)
    report = inro_fx.report(small)
    assert not report.outside
    assert relative(want, small(other.clone().requires_grad_())) < SMALL_ERRORS[scheme]
    assert all(row.isolated < SMALL_ERRORS[scheme] and row.propagated < SMALL_ERRORS[scheme] for row in report.rows)
    assert report.output_error < SMALL_ERRORS[scheme]


ISLANDS = {"squeeze": ("mean", "mul", "mean_1"), "waves": ("pad",)}


@pytest.mark.parametrize("name", NETWORKS)
def test_values_stay_codes(name):
    """Between convolutions on codes nothing is a float, up to the inputs and the last of them."""
    model, x = network(name)
    small = quantized(model, x, "int8_static")
    counts = calls(small)
    convolutions = sum(isinstance(m, (nn.modules.conv._ConvNd)) for m in model.modules())
    assert counts["conv_static"] == convolutions
    assert counts["quantize"] == 0
    assert set(inro_fx.report(small).islands) == {(node, "no convolution on codes computes it") for node in ISLANDS.get(name, ())}
    expected = {"resnet": 0, "mobilenet": 0, "unet": 0, "waves": 0, "volumes": 0, "not in place": 0}
    if name in expected:
        assert counts["dequantize_codes"] == expected[name]


@pytest.mark.parametrize("how", [dict(fold_batchnorm=True), dict(inplace=True)], ids=["folded", "in place"])
@pytest.mark.parametrize("name", ["resnet", "mobilenet", "waves"])
def test_static_schemes_fold_and_work_in_place(name, how):
    model, x = network(name)
    with torch.no_grad():
        want = model(x)
    given = copy.deepcopy(model)
    small = inro_fx.quantize_graph(given, x, "int8_static", calibration=[x, x.flip(0)], **how)
    assert (small is given) == ("inplace" in how)
    with torch.no_grad():
        assert relative(want, small(x)) < SMALL_ERRORS["int8_static"]
    assert all(row.scheme == "int8_static" for row in inro_fx.report(small).rows)
    if "fold_batchnorm" in how:
        assert not any(isinstance(m, nn.BatchNorm2d) for m in small.modules())


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_integer_model_computes_what_training_saw(name, scheme):
    """Up to rounding: what a static model adds, joins or gives away as codes is rounded once more."""
    model, x = network(name)
    prepared = inro_fx.prepare_graph(model, x, scheme, qat=True).train()
    for factor in (1.0, 1.1, 0.9):
        prepared(x * factor).square().mean().backward()
    assert all(p.grad is not None for p in prepared.parameters())
    prepared.eval()
    small = inro_fx.convert_graph(prepared)
    with torch.no_grad():
        assert relative(prepared(x), small(x)) < (1e-4 if scheme == "int8_dynamic" else 0.02)
    rows = inro_fx.report(small).rows
    assert {row.scheme for row in rows} == {scheme} or (name == "mobilenet" and scheme == "int8_dynamic")


def test_batch_norms_stay_the_users():
    """Training code that reads and writes them finds them, and results follow."""
    model, x = network("resnet")
    small = quantized(model, x, "int8_static")
    assert isinstance(small[1], nn.BatchNorm2d)
    with torch.no_grad():
        for m in (model, small):
            m[1].bias.add_(0.2)
            m[1].running_var.mul_(1.3)
        assert relative(model(x), small(x)) < 0.03
        small[4].bn1.weight.mul_(0.0)
        model[4].bn1.weight.mul_(0.0)
        assert relative(model(x), small(x)) < 0.03


BAD_INPUTS = [
    (lambda m, x: inro_fx.quantize_graph(m, x, "int8_static", calibration=[torch.full_like(x, float("nan"))]), "NaN"),
    (lambda m, x: inro_fx.quantize_graph(m, x, "int8_static", calibration=[x[:, :1]]), "batch 0 of calibration"),
    (lambda m, x: inro_fx.quantize_graph(m, x, "int8_static", calibration=[x.long()]), "batch 0 of calibration"),
    (lambda m, x: inro_fx.quantize_graph(m, x, "int8_static"), "needs calibration data"),
    (lambda m, x: inro_fx.quantize_graph(m, x, "int8_static", calibration=[]), "calibration gives no inputs"),
]


@pytest.mark.parametrize(("call", "says"), BAD_INPUTS, ids=[says for _, says in BAD_INPUTS])
def test_bad_calibration_has_one_clear_error(call, says):
    model, x = network("unet")
    with pytest.raises(inro_fx.InputError, match=says):
        call(model, x)


def test_inputs_without_a_range():
    """Nothing but zeros has been seen: the layer gives its bias, and whatever comes later is clipped, as the report says."""
    model, x = network("unet")
    small = inro_fx.quantize_graph(model, x, "int8_static", calibration=[x * 0])
    with torch.no_grad():
        assert torch.isfinite(small(x)).all()
        assert relative(model(x * 0), small(x * 0)) < 0.05


# ---- values that others change, read or share ----

class Free(nn.Module):
    """Convolutions that a function calls as it likes."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.g, self.e, self.bn, self.t = nn.Conv2d(8, 32, 1), nn.Conv2d(40, 16, 3, padding=1), nn.BatchNorm2d(32), nn.ConvTranspose2d(32, 16, 1, padding=1)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def changed(write):
    def forward(self, x):
        y = F.relu(self.a(x))
        write(y)
        return self.c(y)
    return forward


def scaled(y):
    z = y.float()
    z *= 3


WRITES = {
    "item": lambda y: y.__setitem__((slice(None), slice(3)), 1.5), "mask": lambda y: y.__setitem__(y > 0.5, 0.5), "part": lambda y: y[:, :8].add_(2),
    "view": lambda y: y.flatten(2).mul_(0.1), "reshaped": lambda y: y.reshape(y.shape[0], -1).mul_(3), "detached": lambda y: y.detach().mul_(3),
    "permuted": lambda y: y.permute(0, 2, 3, 1).add_(1), "data": lambda y: y.data.mul_(3.0), "same dtype": scaled, "contiguous": lambda y: y.contiguous().mul_(3),
    "dropout": lambda y: F.dropout(y, 0.5, False).mul_(3), "function": lambda y: F.hardtanh(y, 0.0, 0.5, True), "out": lambda y: torch.add(y, 1, out=y),
}


@pytest.mark.parametrize("scheme", SMALL_ERRORS)
@pytest.mark.parametrize("write", WRITES)
def test_values_that_are_changed_in_place(write, scheme):
    check_free(changed(WRITES[write]), scheme)


def check_free(forward, scheme):
    torch.manual_seed(0)
    model, x = Free(forward).eval(), torch.randn(2, 8, 16, 16)
    small = quantized(model, x, scheme)
    with torch.no_grad():
        for given in (x, torch.randn(3, 8, 12, 20)):
            want, got = model(given.clone()), small(given.clone())
            pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
            for a, b in pairs:
                assert a.dtype == b.dtype
                assert relative(a, b) < SMALL_ERRORS[scheme]
    return small


def input_changed(self, x):
    x = x * 1
    y = self.a(x)
    x.mul_(3.0)
    return self.bn(y)


def input_changed_before_the_sum(self, x):
    u = F.relu(self.a(x))
    r, y = self.g(x), self.b(u)
    u += 1
    return self.c(F.relu(y + r)), u


def both_pooled_and_whole(self, x):
    y = self.a(x)
    return self.c(F.max_pool2d(y, 4)), y


def pooled_and_joined(self, x):
    y = self.a(x)
    z = self.b(F.max_pool2d(y, 4))
    return self.c(F.interpolate(z, scale_factor=4.0) + y)


SHARED = {
    "input changed": input_changed, "input changed before the sum": input_changed_before_the_sum, "pooled and whole": both_pooled_and_whole,
    "pooled and joined": pooled_and_joined, "pooled without activation": lambda self, x: self.c(F.max_pool2d(self.a(x), 4)),
    "joined with the input": lambda self, x: self.e(torch.cat([x, F.relu(self.a(x))], 1)),
    "joined with integers": lambda self, x: self.e(torch.cat([F.relu(self.a(x)), (x > 0).long()], 1)),
    "cropped": lambda self, x: self.t(F.relu(self.a(x))), "wider sum": lambda self, x: self.c((F.relu(self.a(x)) + self.g(x).double()).float()),
    "read small": lambda self, x: (self.c(F.interpolate(y := F.relu(self.a(x)), size=(1, 1))), y),
}


@pytest.mark.parametrize("scheme", SMALL_ERRORS)
@pytest.mark.parametrize("name", SHARED)
def test_values_that_others_read(name, scheme):
    small = check_free(SHARED[name], scheme)
    assert all(row.isolated < 0.1 for row in inro_fx.report(small).rows if row.isolated is not None)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scheme", SMALL_ERRORS)
def test_a_sample_with_nan_leaves_the_others_alone(scheme, threads):
    before = torch.get_num_threads()
    model, x = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 8, 1)).eval(), torch.randn(4, 8, 6, 6)
    small = quantized(model, x, scheme)
    odd = x.clone()
    odd[1, :, 0, 0] = float("nan")
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            want, first = small(x), small[0](odd)
            assert first[1].isnan().any()
            for _ in range(50):
                got = small(odd)
                torch.testing.assert_close(got[[0, 2, 3]], want[[0, 2, 3]], rtol=0, atol=2e-3 if scheme == "int8" else 1e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(6, 1, 3, 3), (6, 4, 1, 1), (6, 4, 3, 2)])
def test_unpacked_weights_lie_as_weights_do(shape):
    """torch lets results lie in channels_last where a weight seems to, were it for lack of channels or taps only."""
    weight = torch.randn(shape)
    layout = Layout.of(shape, (1, 2, 3), taps_first=True)
    restored = layout.restore(layout.matrix(weight).clone())
    assert torch.equal(restored, weight)
    assert restored.stride() == weight.stride()
