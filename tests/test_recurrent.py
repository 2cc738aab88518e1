"""Recurrent layers on codes: every kind, cells, packed sequences, projections; what they refuse; their errors, matrix by matrix."""

import copy
import sys

import pytest
import torch
from models import relative
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import inro_fx
from inro_fx.ops.recurrent import GATES, recurrent

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs)}
FORMS = {
    "plain": {}, "no bias": dict(bias=False), "batch first": dict(batch_first=True), "deep": dict(num_layers=3),
    "both directions": dict(bidirectional=True, num_layers=2, batch_first=True),
}
LENGTHS = torch.tensor([6, 4, 1])
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Layer(nn.Module):
    def __init__(self, kind, input_size=8, hidden_size=16, packed=False, **form):
        super().__init__()
        self.packed, self.rnn = packed, KINDS[kind](input_size, hidden_size, **form)

    def forward(self, x, state=None):
        if not self.packed:
            return self.rnn(x, state)
        y, state = self.rnn(pack_padded_sequence(x, LENGTHS, batch_first=self.rnn.batch_first), state)
        return pad_packed_sequence(y, batch_first=self.rnn.batch_first)[0], state


def parts(outputs):
    y, state = outputs
    return [y, *(state if isinstance(state, tuple) else (state,))]


def with_codes(model, small):
    """The float model with the weights that the codes stand for."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in other.named_parameters():
            owner, _, leaf = name.rpartition(".")
            p.copy_(getattr(small.get_submodule(owner), leaf))
    return other


def check(model, x, scheme, tolerance, state=()):
    small = inro_fx.quantize_graph(model.eval(), (x, *state), scheme)
    report = inro_fx.report(small)
    assert {r.kernel.partition("/")[0] for r in report.rows} == {"inro_fx.recurrent"}
    float_of_codes = with_codes(model, small)
    for given in ((x, *state), (x.flip(-1) * 2, *state)):
        for got, want in zip(parts(small(*given)), parts(float_of_codes(*given)), strict=True):
            assert got.shape == want.shape
            assert relative(want, got) < tolerance
    assert not report.outside
    return small


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4", inro_fx.uniform(3, "tensor")], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(kind, form, scheme):
    model = Layer(kind, **FORMS[form])
    x = torch.randn(6, 3, model.rnn.input_size)
    check(model, x, scheme, 0.05 if scheme == "int8_dynamic" else 2e-3)


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("form", ["plain", "both directions", "batch first"])
def test_packed_sequences(form, scheme):
    model = Layer("lstm", packed=True, **FORMS[form])
    x = torch.randn(6, 3, 8)
    check(model, x.transpose(0, 1) if model.rnn.batch_first else x, scheme, 0.05 if scheme == "int8_dynamic" else 2e-3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["plain", "both directions"])
def test_projections(form, packed):
    x = torch.randn(3, 6, 8) if FORMS[form].get("batch_first") else torch.randn(6, 3, 8)
    check(Layer("lstm", proj_size=5, packed=packed, **FORMS[form]), x, "int8", 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_states_go_in_and_out(kind):
    state = (torch.randn(2, 3, 16), torch.randn(2, 3, 16)) if kind == "lstm" else torch.randn(2, 3, 16)
    model = Layer(kind, num_layers=2)
    small = check(model, torch.randn(6, 3, 8), "int8", 2e-3, (state,))
    whole = small(torch.ones(6, 3, 8), state)
    first, between = small(torch.ones(2, 3, 8), state)
    rest, last = small(torch.ones(4, 3, 8), between)
    torch.testing.assert_close(torch.cat([first, rest]), whole[0], atol=1e-4, rtol=1e-3)
    for a, b in zip(parts((first, last))[1:], parts(whole)[1:], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda *args: nn.RNNCell(*args, nonlinearity="relu"), lambda *args: nn.LSTMCell(*args, bias=False)])
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_cells(make, scheme):
    cell = make(8, 16)
    small = inro_fx.quantize_graph(cell, torch.randn(3, 8), scheme)
    assert {r.kernel.partition("/")[0] for r in inro_fx.report(small).rows} == {"inro_fx.recurrent"}
    x, state = torch.randn(5, 8), None
    for _ in range(3):
        got, want = small(x, state), cell(x, state)
        for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
            assert relative(b, a) < 0.03
        state = want


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("projection", [0, 5])
@pytest.mark.parametrize("cell", GATES)
def test_the_operator_and_its_gradient_are_those_of_torch(cell, projection, bias, reverse, packed):
    if projection and cell != "lstm":
        pytest.skip("LSTM only")
    form = {"proj_size": projection} if projection else {}
    layer = KINDS[cell](8, 16, bias=bias, bidirectional=True, **form).requires_grad_(False)
    names = [n for n in layer._flat_weights_names if n.endswith("_reverse") is reverse]
    weights = {n.removesuffix("_reverse").removesuffix("_l0"): getattr(layer, n) for n in names}
    x, out = torch.randn(6, 3, 8), projection or 16
    h, c = torch.randn(2, 3, out), torch.randn(2, 3, 16) if cell == "lstm" else None
    direction, one = int(reverse), torch.ones(1, 1)
    sequence = pack_padded_sequence(x, LENGTHS) if packed else None
    given = (sequence.data if packed else x).clone().requires_grad_()
    y, last, last_c = recurrent(given, h[direction], None if c is None else c[direction], sequence.batch_sizes if packed else None, weights["weight_ih"], one,
                                weights["weight_hh"], one, weights.get("bias_ih"), weights.get("bias_hh"), weights.get("weight_hr"), one if projection else None,
                                cell, reverse, False, False, 8, 0)
    other = (sequence.data if packed else x).clone().requires_grad_()
    input_ = nn.utils.rnn.PackedSequence(other, sequence.batch_sizes) if packed else other
    want, states = layer(input_, h if c is None else (h, c))
    want = (want.data if packed else want)[..., direction * out:(direction + 1) * out]
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, (states if c is None else states[0])[direction], atol=1e-5, rtol=1e-4)
    if c is not None:
        torch.testing.assert_close(last_c, states[1][direction], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), given)[0], torch.autograd.grad(want.square().sum(), other)[0], atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("cell", GATES)
def test_opcheck(cell):
    scheme = inro_fx.uniform(127)
    ih, hh = scheme.pack(torch.randn(GATES[cell] * 16, 8)), scheme.pack(torch.randn(GATES[cell] * 16, 16))
    c = torch.randn(3, 16) if cell == "lstm" else None
    args = (torch.randn(4, 3, 8, requires_grad=True), torch.randn(3, 16), c, None, ih["codes"], ih["scale"], hh["codes"], hh["scale"], None, None, None, None)
    for dynamic in (False, True):
        torch.library.opcheck(recurrent, (*args, cell, dynamic, dynamic, dynamic, 8, 0))


@pytest.mark.parametrize("wrong", range(8))
def test_sizes_that_do_not_fit_are_refused(wrong):
    scheme = inro_fx.uniform(127)
    ih, hh = scheme.pack(torch.randn(64, 8)), scheme.pack(torch.randn(64, 16))
    args = [torch.randn(4, 3, 8), torch.randn(3, 16), torch.randn(3, 16), None, ih["codes"], ih["scale"], hh["codes"], hh["scale"], torch.randn(64), torch.randn(64), None, None]
    recurrent(*args, "lstm", False, True, True, 8, 0)
    index, value = [(1, torch.randn(2, 16)), (1, torch.randn(3, 15)), (2, torch.randn(2, 16)), (2, None), (9, torch.randn(63)), (6, hh["codes"][:60]),
                    (6, hh["codes"][:, :12]), (1, torch.randn(3, 16).double())][wrong]
    args[index] = value
    with pytest.raises(RuntimeError):
        recurrent(*args, "lstm", False, True, True, 8, 0)


def test_a_layer_below_can_be_trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 16))
    small = inro_fx.quantize_graph(model, torch.randn(5, 2, 8), overrides={"0": None})
    small(torch.randn(5, 2, 8))[0].sum().backward()
    assert small[0].weight.grad.abs().sum() > 0


def test_what_stays_unpacked_says_why():
    model = nn.LSTM(8, 16)
    for overrides, why in (({"weight_hh_l0": None}, "stays float"), ({"weight_hh_l0": "int4"}, "different schemes")):
        small = inro_fx.quantize_graph(model, torch.randn(5, 2, 8), overrides=overrides)
        row = inro_fx.report(small).rows[0]
        assert row.kernel == "dequantize + lstm"
        assert why in row.note
        assert relative(model(torch.ones(5, 2, 8))[0], small(torch.ones(5, 2, 8))[0]) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_the_isolated_error_is_that_of_one_matrix(kind):
    model, x = Layer(kind, num_layers=2, bidirectional=True), torch.randn(6, 3, 8)
    small = inro_fx.quantize_graph(model, x, inro_fx.uniform(3))
    float_of_codes = with_codes(model, small)
    for row in inro_fx.report(small).rows:
        alone = copy.deepcopy(model)
        with torch.no_grad():
            alone.get_parameter(row.weight).copy_(float_of_codes.get_parameter(row.weight))
        assert row.isolated == pytest.approx(relative(model(x)[0], alone(x)[0]), rel=0.02)


def test_a_static_scheme_has_scales_of_each_step_and_says_so():
    x = torch.randn(5, 2, 8)
    small = inro_fx.quantize_graph(nn.LSTM(8, 16), x, "int8_static", calibration=[x])
    assert {(r.scheme, r.observer, r.kernel.partition("/")[0]) for r in inro_fx.report(small).rows} == {("int8_dynamic", "", "inro_fx.recurrent")}


@pytest.mark.parametrize(("batch", "make"), [(1, nn.LSTM), (3, nn.GRU), (7, nn.LSTMCell)])
def test_the_kernel_of_the_report_is_that_of_the_rows_of_a_state(batch, make, monkeypatch):
    rows = []
    monkeypatch.setattr(sys.modules["inro_fx.report"], "kernel_for", lambda op, bits, group, columns, count, **_: rows.append((op, columns, count)) or "c")
    inro_fx.quantize_graph(make(8, 16), torch.randn(batch, 8) if make is nn.LSTMCell else torch.randn(5, batch, 8), "int8_dynamic")
    assert rows == [("linear_dynamic", 8, batch), ("linear_dynamic", 16, batch)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, x = Layer("lstm").to(dtype), torch.randn(6, 3, 8, dtype=dtype)
    small = inro_fx.quantize_graph(model, x)
    assert small(x)[0].dtype == dtype
    assert relative(model(x)[0].float(), small(x)[0].float()) < 0.03


def test_compiled_exported_copied_and_saved(tmp_path):
    model, x = Layer("gru", num_layers=2, batch_first=True), torch.randn(2, 5, 8)
    small = inro_fx.quantize_graph(model, x)
    want = small(x)[0]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.testing.assert_close(torch.compile(small, fullgraph=True, backend="eager")(x)[0], want)
    torch.testing.assert_close(torch.export.export(small, (x,)).module()(x)[0], want)
    assert torch.equal(copy.deepcopy(small)(x)[0], want)
    inro_fx.save(small, tmp_path / "m.safetensors")
    assert torch.equal(inro_fx.load(tmp_path / "m.safetensors", lambda: Layer("gru", num_layers=2, batch_first=True), example_inputs=x)(x)[0], want)


@pytest.mark.parametrize("steps", [0, 1])
def test_sequences_of_no_step_and_of_one(steps):
    model = Layer("lstm")
    small = inro_fx.quantize_graph(model, torch.randn(5, 2, 8))
    x = torch.randn(steps, 2, 8)
    if not steps:
        with pytest.raises(RuntimeError):
            model(x)
        with pytest.raises(RuntimeError):
            small(x)
        return
    assert relative(model(x)[0], small(x)[0]) < 0.02


class OneBias(nn.Module):
    def __init__(self, which):
        super().__init__()
        self.cell, self.which = nn.GRUCell(8, 16), which

    def forward(self, x, h):
        biases = [b + 1 if i == self.which else None for i, b in enumerate((self.cell.bias_ih, self.cell.bias_hh))]
        return torch.gru_cell(x, h, self.cell.weight_ih, self.cell.weight_hh, *biases)


@pytest.mark.parametrize("which", [0, 1])
def test_a_cell_with_one_bias_keeps_it(which):
    model, inputs = OneBias(which), (torch.randn(3, 8), torch.randn(3, 16))
    assert relative(model(*inputs), inro_fx.quantize_graph(model, inputs)(*inputs)) < 0.02


def test_peaks_of_the_input_leave_the_rest_its_digits():
    """What comes from outside keeps 15 bits; states, which lie within -1 and 1, have 8."""
    model, x = Layer("lstm", num_layers=2), torch.randn(6, 3, 8)
    x[..., 0] += 300.0
    with torch.no_grad():
        model.rnn.weight_ih_l0[:, 0] *= 0.001
    small = inro_fx.quantize_graph(model.eval(), x, "int8_dynamic")
    with torch.no_grad():
        assert relative(with_codes(model, small)(x)[0], small(x)[0]) < 0.02
