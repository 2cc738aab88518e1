"""inro's functions and the int8 tensor subclass: what their users rely on."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Tied, relative
from torch import nn

import inro_fx
from inro_fx import Int8SymmetricTensor, compressed_size, uniform_dequantize, uniform_quantize


def net():
    return nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7), nn.Conv1d(1, 3, 2))


@pytest.mark.parametrize(("quant_max", "dtype"), [(1, torch.int8), (7, torch.int8), (127, torch.int8), (128, torch.int16), (2**15 - 1, torch.int16), (2**15, torch.int32),
                                                  (2**24, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64), (2**63 - 1, torch.int64)])
def test_round_trip_and_dtypes(quant_max, dtype):
    model = net()
    before = copy.deepcopy(model.state_dict())
    same, codes = uniform_quantize(model, quant_max)
    assert same is model
    assert set(codes) == {n for n, _ in model.named_parameters()}
    for name, entry in codes.items():
        assert set(entry) == {"quant", "scale"}
        assert entry["quant"].dtype == dtype
        assert (entry["quant"].device.type, entry["quant"].requires_grad, entry["scale"].shape) == ("cpu", False, ())
        assert entry["quant"].shape == before[name].shape
        limit = min(quant_max, 2**63 - 1024)
        assert -limit <= int(entry["quant"].min()) and int(entry["quant"].max()) <= limit
        largest = before[name].abs().max()
        assert (model.state_dict()[name] - before[name]).abs().max() <= largest / quant_max * 0.51 + largest * 2**-22
    fresh = uniform_dequantize(net(), codes)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in fresh.state_dict().items())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 2**24), st.integers(0, 1000))
def test_codes_are_the_rounded_quotient_everywhere(quant_max, seed):
    torch.manual_seed(seed)
    model = nn.Linear(5, 4)
    weight = model.weight.detach().clone()
    _, codes = uniform_quantize(model, quant_max)
    scale = quant_max / weight.abs().max()
    assert torch.equal(codes["weight"]["quant"].float(), (weight * scale).round().clamp(-quant_max, quant_max))
    assert int(codes["weight"]["quant"].abs().max()) == quant_max


def test_zeros_ties_and_half_precision():
    model = Tied()
    model.middle.bias.data.zero_()
    _, codes = uniform_quantize(model, 100)
    assert list(codes) == ["table.weight", "middle.weight", "middle.bias"]
    assert codes["middle.bias"]["scale"] == 1
    assert model.head.weight is model.table.weight
    again = uniform_dequantize(Tied(), codes)
    assert torch.equal(again.head.weight, model.head.weight)
    half, codes = uniform_quantize(nn.Linear(4, 4).half(), 127)
    assert half.weight.dtype == torch.float16
    assert torch.equal(uniform_dequantize(nn.Linear(4, 4).half(), codes).weight, half.weight)


@pytest.mark.parametrize("quant_max", [0, -1, 2**63, 2**70, True, 1.5])
def test_impossible_quant_max(quant_max):
    with pytest.raises(ValueError, match="quant_max must be"):
        uniform_quantize(nn.Linear(2, 2), quant_max)


def test_what_is_refused_leaves_the_model_alone():
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    before = model.weight.detach().clone()
    with pytest.raises(inro_fx.ModelError, match="extra is complex64"):
        uniform_quantize(model, 7)
    model.extra = nn.Parameter(torch.tensor([1.0, float("nan")]))
    with pytest.raises(inro_fx.ModelError, match="extra holds NaN"):
        uniform_quantize(model, 7)
    assert torch.equal(model.weight, before)
    _, codes = uniform_quantize(nn.Linear(2, 2), 7)
    for change, message in ((lambda c: c.pop("bias"), "no codes for bias"), (lambda c: c.update(other=c["bias"]), "no parameter other"),
                            (lambda c: c.update(weight=c["bias"]), r"weight has shape \[2, 2\], and its codes \[2\]")):
        wrong, fresh = dict(codes), nn.Linear(2, 2)
        change(wrong)
        kept = fresh.weight.detach().clone()
        with pytest.raises(inro_fx.ModelError, match=message):
            uniform_dequantize(fresh, wrong)
        assert torch.equal(fresh.weight, kept)


def test_compressed_size_is_shannons():
    _, codes = uniform_quantize(nn.Linear(300, 300, bias=False), 7)
    size = compressed_size(codes)
    p = torch.bincount(codes["weight"]["quant"].flatten().long() + 7).double() / 90_000
    assert size.bits_per_parameter == pytest.approx(-(p * p.log2()).nan_to_num().sum().item())
    assert size.tensors == {"weight": pytest.approx(size.bits_per_parameter)}
    assert 3 < size.bits_per_parameter < 3.91                      # fifteen codes, nearly even
    assert size.bytes == pytest.approx(90_000 * size.bits_per_parameter / 8 + 4)
    report = inro_fx.report(inro_fx.quantize_graph(nn.Linear(300, 300), torch.randn(2, 300), inro_fx.uniform(7, "tensor")))
    assert report.rows[0].entropy == pytest.approx(size.bits_per_parameter, abs=0.05)
    assert "bits" in str(report).splitlines()[0]


# ---- the tensor subclass ----

def pair():
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))
    swapped = copy.deepcopy(model)
    for layer in (swapped[0], swapped[2]):
        layer.weight = nn.Parameter(Int8SymmetricTensor.from_float(layer.weight), requires_grad=False)
    return model, swapped, torch.randn(2, 5, 32)


def test_numbers():
    weight = torch.randn(6, 10)
    tensor = Int8SymmetricTensor.from_float(weight)
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    assert torch.equal(tensor.scale, scale)
    assert torch.equal(tensor.codes, (weight / scale).round().clamp(-128, 127).to(torch.int8))
    assert torch.equal(tensor.dequantize(), tensor.codes * scale)
    for bad in (torch.randn(3), torch.ones(2, 2, dtype=torch.int8)):
        with pytest.raises(inro_fx.ModelError, match="holds a float matrix"):
            Int8SymmetricTensor.from_float(bad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_model_whose_weights_were_swapped_compiled_and_not(backend):
    model, swapped, x = pair()
    want = swapped(x)
    assert relative(model(x), want) < 0.02
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(swapped, fullgraph=True, backend=backend)(x), want)


def test_operators_keep_the_codes_where_they_can():
    weight = torch.randn(16, 32)
    w, x = Int8SymmetricTensor.from_float(weight), torch.randn(3, 32)
    plain = w.dequantize()
    for kept in (w.t(), w.transpose(0, 1), w.detach(), w.clone(), w.view(16, 32), w.to(torch.float64), w.t().t(), w.half(), copy.deepcopy(w)):
        assert type(kept) is Int8SymmetricTensor
        assert torch.equal(kept.codes, w.codes)
    assert w.half().dtype == torch.float16
    for got, want in ((x @ w.t(), x @ plain.t()), (torch.mm(x, w.t()), x @ plain.t()), (torch.addmm(torch.ones(16), x, w.t()), x @ plain.t() + 1),
                      (nn.functional.linear(x, w, torch.ones(16)), x @ plain.t() + 1), (w @ x.t(), plain @ x.t()), (torch.addmm(torch.ones(3, 16), x, w.t(), beta=2), x @ plain.t() + 2),
                      (w.sum(), plain.sum()), (w + 1, plain + 1), (w.view(-1), plain.view(-1)), (w[2], plain[2]), (w @ w.t(), plain @ plain.t())):
        assert relative(want, got) < 1e-3
        assert not isinstance(got, Int8SymmetricTensor)
    x.requires_grad_()
    (x @ w.t()).sum().backward()
    assert relative(plain.sum(0).expand(3, 32), x.grad) < 1e-3


def test_copying_into_a_transposed_one():
    a, b = Int8SymmetricTensor.from_float(torch.randn(8, 8)), Int8SymmetricTensor.from_float(torch.randn(8, 8))
    b.t().copy_(a)
    assert relative(a.dequantize(), b.t().dequantize()) < 0.02
    b.copy_(a)
    assert torch.equal(a.dequantize(), b.dequantize())


@pytest.mark.parametrize("write", [
    lambda w: w[0].zero_(), lambda w: w.view(-1)[3:40].fill_(2), lambda w: w.t()[2].fill_(7), lambda w: w.t().mul_(2), lambda w: w[1][2:5][1].fill_(4),
    lambda w: [row.normal_() for row in w], lambda w: [column.normal_() for column in w.unbind(1)], lambda w: w.diagonal().fill_(9), lambda w: w.detach().zero_(),
    lambda w: w.data.mul_(2), lambda w: nn.init.eye_(w), lambda w: torch._foreach_mul_([w], 2),
    lambda w: torch.mul(torch.ones(8, 16), 3, out=w), lambda w: w.__setitem__(w > 0, 0.5)], ids=range(14))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_to_a_tensor_or_to_a_view_of_it_is_kept(write, mode):
    plain = torch.randn(8, 16)
    with mode():
        tensor = Int8SymmetricTensor.from_float(plain)
        plain, views = tensor.dequantize(), [tensor[0], tensor.view(-1), tensor.t()]
        for each in (plain, tensor):
            torch.manual_seed(0)
            write(each)
        for want, got in ((plain, tensor.dequantize()), (plain[0], views[0]), (plain.view(-1), views[1]), (plain.t(), views[2].dequantize())):
            assert relative(want + 1, got + 1) < 0.02


def test_what_a_write_leaves_as_it_was_keeps_its_codes():
    tensor = Int8SymmetricTensor.from_float(torch.randn(8, 16, dtype=torch.bfloat16))
    codes, scale = tensor.codes.clone(), tensor.scale.clone()
    tensor[0] = 1
    assert torch.equal(tensor.codes[1:], codes[1:])
    assert torch.equal(tensor.scale[1:], scale[1:])
    tensor.data = torch.ones(3, 4)
    assert tensor.shape == (3, 4)
    assert relative(torch.ones(3, 4), tensor.dequantize()) < 0.02


@pytest.mark.parametrize("write", [lambda w: w.fill_(float("nan")), lambda w: w[1].fill_(float("inf")), lambda w: w.resize_(4, 4), lambda w: w.t_(),
                                   lambda w: setattr(w, "data", torch.ones(3))])
def test_what_cannot_be_written_is_refused(write):
    tensor = Int8SymmetricTensor.from_float(torch.randn(8, 16))
    before = tensor.dequantize()
    with pytest.raises(inro_fx.ModelError, match="Int8SymmetricTensor"):
        write(tensor)
    assert torch.equal(tensor.dequantize(), before)


def test_a_backward_through_a_trained_one_that_was_converted_is_an_error():
    layer, x = nn.Linear(16, 4), torch.randn(2, 16)
    layer.weight = nn.Parameter(Int8SymmetricTensor.from_float(layer.weight))
    y = layer(x)
    layer.double()
    with pytest.raises(RuntimeError, match="swap_tensors"):
        y.sum().backward()
    assert layer(x.double()).dtype == torch.float64


def test_state_dicts_and_copies():
    _, swapped, x = pair()
    file = io.BytesIO()
    torch.save(swapped.state_dict(), file)
    other = pair()[1]
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert torch.equal(other(x), swapped(x))
    assert torch.equal(copy.deepcopy(swapped)(x), swapped(x))
    assert swapped.to(torch.float64)(x.double()).dtype == torch.float64


def test_a_graph_takes_such_weights_as_they_are():
    model, swapped, x = pair()
    codes = [swapped[i].weight.codes.clone() for i in (0, 2)]
    small = inro_fx.quantize_graph(swapped, x, "int4")
    assert [r.scheme for r in inro_fx.report(small).rows] == ["int8_rowwise_full"] * 2
    assert [r.weight_error for r in inro_fx.report(small).rows] == [0.0, 0.0]
    assert all(torch.equal(small[i].weight_codes, c) for i, c in zip((0, 2), codes, strict=True))
    assert relative(swapped(x), small(x)) < 1e-3
    assert isinstance(swapped[0].weight, Int8SymmetricTensor)
    assert relative(model(x), small(x)) < 0.02
