"""Solvers: which codes, from which inputs, in which order; and that none is worse than rounding by its own measure."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Tied
from torch import nn

import inro_fx
from inro_fx.passes.solve.inputs import INPUTS
from inro_fx.solvers import GPTQ, SOLVERS, Moments, find_solver

SCHEMES = [inro_fx.uniform(7, 32), inro_fx.uniform(3, 8, full_range=True), inro_fx.uniform(1), inro_fx.uniform(7, "tensor"),
           inro_fx.uniform(7, 16, scale_dtype="float16"), inro_fx.uniform(127), inro_fx.uniform(31, 5, full_range=True, scale_dtype="float16"),
           inro_fx.uniform(3, 16, affine=True), inro_fx.uniform(7, affine=True)]
KINDS = ["plain", "correlated", "few", "one", "zero", "constant", "dead", "outliers"]


def inputs_of_kind(kind, columns, generator):
    x = torch.randn(64, columns, generator=generator)
    if kind == "correlated":
        x = x @ (torch.randn(columns, columns, generator=generator) * torch.linspace(2, 0.02, columns))
    if kind in ("few", "one"):
        x = x[:max(1, columns // 3) if kind == "few" else 1]
    if kind in ("zero", "constant"):
        x = torch.full_like(x, 0.0 if kind == "zero" else 3.0)
    if kind == "dead":
        x[:, ::3] = 0
    if kind == "outliers":
        x[:, 0] *= 1e4
    return x


def moments_of(x, rows, floats=None):
    x = x.double()
    cross = None if floats is None else ((floats.double() - x).T @ x)[None]
    return Moments(slice(0, rows), x.square().sum(0)[None], (x.T @ x)[None], cross, len(x))


def restored(scheme, parts, columns):
    return scheme.unpack(parts, columns, torch.float32).double()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), scheme=st.sampled_from(SCHEMES), kind=st.sampled_from(KINDS), columns=st.integers(1, 70), rows=st.integers(1, 9))
def test_no_solver_is_worse_than_rounding_by_its_own_measure(seed, scheme, kind, columns, rows):
    generator = torch.Generator().manual_seed(seed)
    w, x = torch.randn(rows, columns, generator=generator), inputs_of_kind(kind, columns, generator)
    found = {s.name: restored(scheme, s.solve(w, scheme, [moments_of(x, rows)]), columns) for s in SOLVERS if s.refuse(scheme) is None}
    lost = {name: ((x.double() @ (w - w_hat).T) ** 2).sum().item() for name, w_hat in found.items()}
    size = (x.double() @ w.double().T).square().sum().item() + 1e-30
    assert lost["gptq"] <= lost["nearest"] * (1 + 1e-6) + 1e-10 * size
    by_input = x.double().square().mean(0)
    weighed = {name: ((w - w_hat) ** 2 * by_input).sum().item() for name, w_hat in found.items()}
    exact = 0 if scheme.scale_dtype == "float32" else 1e-3            # a fitted scale is rounded once more
    assert weighed["search"] <= weighed["nearest"] * (1 + 1e-5 + exact) + 1e-10 * (by_input * w.double() ** 2).sum().item()
    for w_hat in found.values():
        assert w_hat.isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_with_correlated_inputs_gptq_is_clearly_better(scheme):
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(24, 64, generator=generator), inputs_of_kind("correlated", 64, generator)
    lost = {s.name: (x.double() @ (w - restored(scheme, s.solve(w, scheme, [moments_of(x, 24)]), 64)).T).norm().item()
            for s in SOLVERS if s.refuse(scheme) is None}
    assert lost["gptq"] < (0.8 if scheme.granularity == "tensor" else 0.75) * lost["nearest"]


def test_no_row_is_worse_than_rounded_however_far_the_damping_leads_away():
    generator = torch.Generator().manual_seed(6)
    w, x = torch.randn(200, 64, generator=generator), inputs_of_kind("correlated", 64, generator).double()
    scheme = inro_fx.uniform(7, 32)
    lost = [(x @ (w - restored(scheme, s.solve(w, scheme, [moments_of(x, 200)]), 64)).T).square().sum(0)
            for s in (find_solver("nearest"), GPTQ(damping=1e3))]
    assert (lost[1] <= lost[0] * (1 + 1e-6)).all()


def test_gptaq_makes_up_for_what_came_before():
    generator = torch.Generator().manual_seed(2)
    scheme, w = inro_fx.uniform(7, 32), torch.randn(24, 64, generator=generator)
    floats = torch.randn(4000, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    x = floats + 0.3 * floats.roll(1, 1)                               # an error of the layer before that is a function of its result
    want = floats.double() @ w.double().T
    lost = {name: (want - x.double() @ restored(scheme, find_solver(name).solve(w, scheme, [moments_of(x, 24, floats)]), 64).T).norm()
            for name in ("nearest", "gptq", "gptaq")}
    assert lost["gptaq"] < 0.5 * lost["gptq"]


@pytest.mark.parametrize("name", [s.name for s in SOLVERS])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_same_input_gives_the_same_codes(name, scheme):
    generator = torch.Generator().manual_seed(3)
    if find_solver(name).refuse(scheme) is not None:
        pytest.skip("it does not serve this scheme")
    w, x = torch.randn(12, 40, generator=generator), torch.randn(50, 40, generator=generator)
    one, two = (find_solver(name).solve(w, scheme, [moments_of(x, 12)]) for _ in range(2))
    assert all(torch.equal(one[part], two[part]) for part in one)


def test_hqq_keeps_the_error_sparse_and_needs_zero_points():
    generator = torch.Generator().manual_seed(4)
    w = torch.randn(24, 64, generator=generator) + 0.4
    scheme = inro_fx.uniform(3, 32, affine=True)
    error = {name: (w - restored(scheme, find_solver(name).solve(w, scheme, []), 64)).abs().pow(0.7).sum() for name in ("nearest", "hqq")}
    assert error["hqq"] < 0.97 * error["nearest"]
    assert "has no zero points" in find_solver("hqq").refuse(inro_fx.uniform(7, 32))


# ---- zero points ----

AFFINE = ["int4_affine", inro_fx.uniform(3, 8, affine=True), inro_fx.uniform(127, affine=True), inro_fx.uniform(15, affine=True)]


@pytest.mark.parametrize("scheme", AFFINE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_with_zero_points_are_what_their_operators_multiply_by(scheme, dtype):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 6, bias=False)).to(dtype).eval()
    ids = torch.randint(0, 50, (3, 5))
    small = inro_fx.quantize_graph(model, ids, scheme)
    assert {r.kernel for r in inro_fx.report(small).rows} == {"inro_fx.embedding_affine", "inro_fx.linear_affine"}
    again = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 6, bias=False)).to(dtype).eval()
    again.load_state_dict({k: small.get_submodule(k[0]).__getattr__(k[2:]).detach() for k in model.state_dict()})
    want, got = again(ids).double(), small(ids).double()
    assert (want - got).norm() < {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 2e-2}[dtype] * want.norm()


@pytest.mark.parametrize("scheme", AFFINE, ids=str)
def test_a_matrix_on_one_side_of_zero_keeps_all_its_codes(scheme):
    scheme = inro_fx.schemes.find_scheme(scheme)
    w = torch.rand(8, 40) + 0.5
    parts = scheme.pack(w)
    assert ((restored(scheme, parts, 40) - w).abs() <= scheme.bound(w)).all()
    symmetric = inro_fx.uniform(scheme.quant_max, scheme.granularity)
    assert (restored(scheme, parts, 40) - w).norm() < 0.7 * (restored(symmetric, symmetric.pack(w), 40) - w).norm()


def test_operators_with_zero_points_pass_torchs_checks():
    scheme = inro_fx.schemes.find_scheme("int4_affine")
    parts = scheme.pack(torch.randn(8, 40))
    held = [parts[p] for p in scheme.parts]
    torch.library.opcheck(torch.ops.inro_fx.linear_affine.default, (torch.randn(3, 40, requires_grad=True), *held, torch.randn(8), 4, 32, 40))
    torch.library.opcheck(torch.ops.inro_fx.embedding_affine.default, (torch.tensor([1, 3]), *held, 4, 32, 40, torch.float32))
    torch.library.opcheck(torch.ops.inro_fx.dequantize_affine.default, (*held, 4, 32, 40, torch.bfloat16))


@pytest.mark.parametrize("options", [{"quant_max": 200}, {"quant_max": 7, "granularity": "tensor"}, {"quant_max": 7, "full_range": True}])
def test_no_affine_scheme(options):
    with pytest.raises(inro_fx.SchemeError, match="an affine scheme has codes of 2 to 8 bits"):
        inro_fx.uniform(**options, affine=True)


# ---- what a weight is multiplied by ----

class Witness:
    """A solver that keeps what it is told, and rounds."""

    name, needs, optional = "witness", "cross", True

    def __init__(self):
        self.seen = {}

    def refuse(self, scheme):
        return None

    def solve(self, matrix, scheme, moments):
        self.seen[tuple(matrix.shape)] = matrix.clone(), list(moments)
        return scheme.pack(matrix)


class Call(nn.Module):
    def __init__(self, weight, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(weight), function

    def forward(self, *x):
        return self.function(self.weight, *x)


def listed(output):
    return output if isinstance(output, tuple) else (output,)


def conv(kind, shape, x, **options):
    return torch.randn(shape), lambda w, a: getattr(F, kind)(a, w, **options), (torch.randn(x),)


CALLS = {
    "linear": (torch.randn(6, 40), lambda w, x: F.linear(x, w), (torch.randn(3, 5, 40),)),
    "linear of a part": (torch.randn(12, 40), lambda w, x, y: (F.linear(x, w[:8]), F.linear(y, w[8:])), (torch.randn(5, 40), torch.randn(7, 40))),
    "linear twice": (torch.randn(40, 40), lambda w, x: F.linear(x, w) + F.linear(x.flip(0), w), (torch.randn(5, 40),)),
    "matmul": (torch.randn(40, 6), lambda w, x: x @ w, (torch.randn(3, 5, 40),)),
    "matmul from the left": (torch.randn(6, 40), lambda w, x: w @ x, (torch.randn(40, 5),)),
    "matmul, stacked": (torch.randn(3, 40, 6), lambda w, x: x @ w, (torch.randn(3, 5, 40),)),
    "bmm from the left": (torch.randn(3, 6, 40), lambda w, x: torch.bmm(w, x), (torch.randn(3, 40, 5),)),
    "addmm": (torch.randn(40, 6), lambda w, x: torch.addmm(torch.zeros(6), x, w), (torch.randn(5, 40),)),
    "baddbmm": (torch.randn(2, 40, 6), lambda w, x: torch.baddbmm(torch.zeros(1), x, w), (torch.randn(2, 5, 40),)),
    "mv": (torch.randn(6, 40), lambda w, x: torch.mv(w, x), (torch.randn(40),)),
    "inner": (torch.randn(6, 40), lambda w, x: torch.inner(x, w), (torch.randn(5, 40),)),
    "bilinear": (torch.randn(6, 5, 8), lambda w, x, y: F.bilinear(x, y, w), (torch.randn(3, 5), torch.randn(3, 8))),
    "einsum": (torch.randn(4, 10, 40), lambda w, x: torch.einsum("bsd,hed->bhse", x, w), (torch.randn(2, 3, 40),)),
    "einsum of heads": (torch.randn(4, 10, 40), lambda w, x: torch.einsum("bhsd,hed->bhse", x, w), (torch.randn(2, 4, 3, 40),)),
    "einsum, two summed": (torch.randn(4, 10, 40), lambda w, x: torch.einsum("...hd,hed->...e", x, w), (torch.randn(2, 4, 40),)),
    "conv1d": conv("conv1d", (6, 4, 3), (2, 4, 11), stride=2, padding=1),
    "conv2d": conv("conv2d", (6, 4, 3, 2), (2, 4, 9, 8), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    "conv2d, grouped": conv("conv2d", (8, 4, 3, 3), (2, 8, 7, 7), padding=1, groups=2),
    "conv2d, depthwise": conv("conv2d", (8, 1, 3, 3), (2, 8, 7, 7), padding="same", groups=8),
    "conv2d, one sample": conv("conv2d", (6, 4, 3, 3), (4, 9, 8)),
    "conv3d": conv("conv3d", (5, 3, 2, 2, 2), (1, 3, 4, 5, 4)),
    "conv_transpose1d": conv("conv_transpose1d", (4, 6, 3), (2, 4, 7), stride=2, padding=1, output_padding=1),
    "conv_transpose2d": conv("conv_transpose2d", (4, 6, 3, 2), (2, 4, 5, 6), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    "conv_transpose2d, grouped": conv("conv_transpose2d", (8, 3, 2, 2), (2, 8, 5, 5), stride=2, groups=2),
    "conv_transpose2d, cropped": conv("conv_transpose2d", (4, 6, 2, 2), (2, 4, 5, 5), padding=2),
}


@pytest.mark.parametrize("scheme", ["int8", inro_fx.uniform(7, 16)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_moments_are_those_of_what_the_weight_is_multiplied_by(name, scheme):
    """The operators are linear in the weight: a change of it changes the result by what the moments say."""
    weight, function, x = CALLS[name]
    witness, model = Witness(), Call(weight, function).eval()
    small = inro_fx.quantize_graph(model, x, scheme, solver=witness, calibration=[x])
    (matrix, moments), = witness.seen.values()
    layout = vars(small)["_inro_packed"]["weight"].layout
    assert torch.equal(layout.restore(matrix), weight)
    change = torch.randn_like(matrix)
    with torch.no_grad():
        wanted = sum((a - b).double().square().sum() for a, b in zip(
            listed(function(weight + layout.restore(change), *x)), listed(function(weight, *x)), strict=True))
    total, covered = 0.0, torch.zeros(len(matrix), dtype=torch.int)
    for one in moments:
        blocks = change[one.rows].double().reshape(len(one.second), -1, matrix.shape[1])
        total += ((blocks @ one.second) * blocks).sum()
        covered[one.rows] += 1
        assert torch.allclose(one.second.diagonal(dim1=1, dim2=2), one.squares)
    assert (covered == 1).all()
    if name not in ("linear twice",):                                  # whose two results are added before they are compared
        assert total == pytest.approx(float(wanted), rel=1e-4)


def test_every_operator_with_known_inputs_is_among_the_calls():
    covered = {"linear", "matmul", "addmm", "baddbmm", "mv", "inner", "bilinear", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
               "conv_transpose2d"}
    others = {"lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell"}       # below
    assert set(INPUTS) - covered - others == {"grouped_mm", "addmv", "conv_transpose3d"}          # as baddbmm, mv and conv_transpose2d


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_told_the_states(kind, bidirectional):
    model = kind(10, 7, 2, batch_first=True, bidirectional=bidirectional).eval()
    witness, x = Witness(), torch.randn(3, 5, 10)
    inro_fx.quantize_graph(model, x, inro_fx.uniform(127), solver=witness, calibration=[x])
    width = 14 if bidirectional else 7
    seen = {shape[1]: moments for shape, (_, moments) in witness.seen.items()}
    assert set(seen) == {10, 7, width}
    with torch.no_grad():
        one = kind(10, 7, 1, batch_first=True, bidirectional=bidirectional).eval()
        one.load_state_dict({k: v for k, v in model.state_dict().items() if "_l0" in k})
        below = one(x)[0]
        top = kind(width, 7, 1, batch_first=True).eval()
        name = "_l1"
        top.load_state_dict({k.replace("_l1", "_l0"): v for k, v in model.state_dict().items() if k.endswith(name)})
        states = top(below)[0]
    assert torch.allclose(seen[10][0].squares[0].float(), x.square().sum((0, 1)), rtol=1e-4)
    if not bidirectional:                     # the last matrix of each width is that of the upper layer, whose inputs are quantized by then
        assert torch.allclose(seen[7][0].squares[0].float(), states[:, :-1].square().sum((0, 1)), rtol=0.1)
        assert seen[7][0].count == 15


def test_cells_are_told_their_state():
    model, witness = nn.LSTMCell(10, 7).eval(), Witness()
    x = torch.randn(3, 10), (torch.randn(3, 7), torch.randn(3, 7))
    inro_fx.quantize_graph(model, x, inro_fx.uniform(127), solver=witness, calibration=[x])
    assert torch.allclose(witness.seen[28, 7][1][0].second[0].float(), x[1][0].T @ x[1][0], rtol=1e-4, atol=1e-4)


# ---- the order ----

def deep(width=24, depth=6):
    torch.manual_seed(4)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]).eval()


def test_a_layer_sees_what_the_quantized_layers_before_it_give():
    model, witness = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)).eval(), Witness()
    x = torch.randn(64, 10)
    small = inro_fx.quantize_graph(model, x, inro_fx.uniform(1), solver=witness, calibration=[x[:32], x[32:]])
    with torch.no_grad():
        got, want = small[:2](x).double(), model[:2](x).double()
    seen = witness.seen[5, 20][1][0]
    assert seen.count == 64
    assert torch.allclose(seen.second[0], got.T @ got, rtol=1e-4, atol=1e-3)
    assert torch.allclose(seen.cross[0], (want - got).T @ got, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("solver", ["search", "gptq", "gptaq", "auto"])
def test_better_than_rounding_on_other_data(solver):
    model, generator = deep(), torch.Generator().manual_seed(5)
    mix = torch.randn(24, 24, generator=generator) * torch.linspace(1.5, 0.1, 24)
    data = [torch.randn(64, 24, generator=generator) @ mix for _ in range(6)]
    scheme, x = inro_fx.uniform(3, 8), data[-1]

    def lost(**options):
        small = inro_fx.quantize_graph(model, data[0], scheme, calibration=data[:5], **options)
        return (small(x) - model(x)).norm().item()
    assert lost(solver=solver) < 0.95 * lost()
    if solver in ("gptaq", "auto"):
        assert lost(solver=solver) < lost(solver="gptq")


class Branching(nn.Module):
    """Stays Python: its layers are programs of their own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = deep(), deep()

    def forward(self, x):
        y = self.one(x)
        return self.two(y) if float(y.sum()) > -1e9 else y


def test_graphs_below_python_code_are_solved_as_well():
    model, x = Branching().eval(), torch.randn(64, 24)
    scheme = inro_fx.uniform(3, 8)
    rounded, small = (inro_fx.quantize_graph(model, x, scheme, calibration=[x], solver=s) for s in ("nearest", "gptaq"))
    assert inro_fx.report(small).regions
    assert (small(x) - model(x)).norm() < 0.8 * (rounded(x) - model(x)).norm()


def test_a_tied_table_is_solved_from_what_its_head_is_given():
    model, witness = Tied().eval(), Witness()
    ids = torch.arange(40).reshape(4, 10)
    inro_fx.quantize_graph(model, ids, "int4", solver=witness, calibration=[ids])
    _, (seen,) = witness.seen[40, 16]
    with torch.no_grad():
        x = model.middle(model.table(ids)).relu().reshape(-1, 16).double()
    assert torch.allclose(seen.second[0], x.T @ x, rtol=1e-5)


def test_a_table_that_is_looked_up_needs_no_data():
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 8)).eval()
    ids = torch.arange(40).reshape(4, 10)
    report = inro_fx.report(inro_fx.quantize_graph(model, ids, "int4", solver="gptq", calibration=[ids]))
    assert {r.layer: r.solver for r in report.rows} == {"0": "search", "1": "gptq"}
    assert "gptq" in str(report)


# ---- biases ----

@pytest.mark.parametrize("solver", ["nearest", "search", "gptq"])
def test_biases_take_up_the_mean_of_what_was_lost(solver):
    torch.manual_seed(6)
    model, x = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6)).eval(), torch.rand(200, 12) + 1
    plain, corrected = (inro_fx.quantize_graph(model, x, inro_fx.uniform(1), calibration=[x], solver=solver, bias_correction=c)
                        for c in (False, True))
    with torch.no_grad():
        lost = [(m(x) - model(x)).mean(0).norm().item() for m in (plain, corrected)]
    assert lost[1] < 1e-3 < lost[0]
    assert not torch.equal(corrected[0].bias, model[0].bias)
    assert torch.equal(plain[0].bias, model[0].bias)


def test_batch_norms_take_up_what_convolutions_without_biases_lose():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.rand(4, 3, 9, 9)
    before = model[1].running_mean.clone()
    plain, corrected = (inro_fx.quantize_graph(model, x, inro_fx.uniform(1), calibration=[x], bias_correction=c) for c in (False, True))
    with torch.no_grad():
        lost = [(m(x) - model(x)).mean((0, 2, 3)).norm().item() for m in (plain, corrected)]
    assert lost[1] < 1e-3 < lost[0]
    assert torch.equal(model[1].running_mean, before)
    assert not torch.equal(corrected[1].running_mean, before)


# ---- what users get wrong, and what goes wrong ----

def test_a_solver_for_each_layer():
    model, x = deep(depth=3), torch.randn(32, 24)
    small = inro_fx.quantize_graph(model, x, "int4", solver="search", calibration=[x],
                                   overrides={"0": ("int4", "gptq"), "2": (inro_fx.uniform(3, 8), "nearest"), "4": "int8"})
    report = inro_fx.report(small)
    assert [(r.scheme, r.solver) for r in report.rows] == [("int4", "gptq"), ("uniform(3, 8)", "nearest"), ("int8", "search")]


def test_no_data_for_a_solver_that_needs_some():
    with pytest.raises(inro_fx.InputError, match="gptq needs calibration data"):
        inro_fx.quantize_graph(deep(), torch.randn(2, 24), "int4", solver="gptq")
    with pytest.raises(inro_fx.InputError, match="bias_correction needs calibration data"):
        inro_fx.quantize_graph(deep(), torch.randn(2, 24), "int4", bias_correction=True)
    inro_fx.quantize_graph(deep(), torch.randn(2, 24), "int4", solver="search")
    inro_fx.quantize_graph(deep(), torch.randn(2, 24), "int4", solver="auto")


def test_an_unknown_solver_and_what_is_none():
    with pytest.raises(inro_fx.SchemeError, match=r"unknown solver 'gptg': did you mean 'gptq'\?"):
        inro_fx.quantize_graph(deep(), torch.randn(2, 24), "int4", solver="gptg")
    with pytest.raises(inro_fx.SchemeError, match="int is no solver: it lacks name"):
        inro_fx.quantize_graph(deep(), torch.randn(2, 24), "int4", solver=3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_data_that_is_no_number_names_the_layer(value):
    x = torch.randn(4, 24)
    x[0, 0] = value
    with pytest.raises(inro_fx.InputError, match=r"0\.weight: the calibration data holds NaN or infinity"):
        inro_fx.quantize_graph(deep(), torch.randn(4, 24), "int4", solver="gptq", calibration=[x])


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.rarely = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        y = self.always(x)
        return self.rarely(y) if x.shape[0] == 3 else y


def test_a_layer_that_no_data_reaches_is_named():
    model, x = Sometimes().eval(), torch.randn(4, 24)
    with pytest.raises(inro_fx.InputError, match=r"rarely\.weight: no calibration data reached this layer"):
        inro_fx.quantize_graph(model, torch.randn(3, 24), "int4", solver="gptq", calibration=[x])
    small = inro_fx.quantize_graph(model, torch.randn(3, 24), "int4", solver="gptq", calibration=[x], overrides={"rarely": ("int4", "search")})
    assert {r.layer: r.solver for r in inro_fx.report(small).rows} == {"always": "gptq", "rarely": "search"}


class Own:
    """A scheme of one's own, without a grid."""

    name, parts = "own", ("codes",)

    def pack(self, matrix):
        return {"codes": matrix.half()}

    def unpack(self, parts, columns, dtype):
        return parts["codes"].to(dtype)

    def bound(self, matrix):
        return matrix.abs() * 1e-3 + 1e-7

    def operator(self, op):
        return "none"


@pytest.mark.parametrize("scheme", [Own(), inro_fx.uniform(1000)], ids=["own", "wide"])
def test_a_solver_that_does_not_fit_a_scheme(scheme):
    x = torch.randn(4, 24)
    with pytest.raises(inro_fx.SchemeError, match=r"0\.weight: gptq cannot serve this weight"):
        inro_fx.quantize_graph(deep(), x, scheme, solver="gptq", calibration=[x])


class ByRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        y = self.one(x)
        return self.two(torch.relu(y) if x.shape[0] > 4 else y)


def test_a_batch_that_the_graph_does_not_cover_does_not_take_the_place_of_those_that_it_does():
    model, witness = ByRows().eval(), Witness()
    data = [torch.rand(16, 24) for _ in range(5)]
    small = inro_fx.quantize_graph(model, data[0], "int8", solver=witness, calibration=[*data, -torch.rand(1, 24)], bias_correction=True)
    assert {m.count for _, moments in witness.seen.values() for m in moments} == {80}
    with torch.no_grad():
        assert torch.cat([small(x) - model(x) for x in data]).mean(0).norm() < 1e-5


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(24, 24, bias=False), nn.Linear(24, 12, bias=False)

    def forward(self, x):
        x.add_(1.0)
        return self.two(x) + self.two(self.one(self.one(x)))


def test_data_that_forward_changes_is_the_same_for_every_pass():
    witness = Witness()
    inro_fx.quantize_graph(ChangesItsInput().eval(), torch.zeros(4, 24), "int8", solver=witness, calibration=[torch.zeros(4, 24)])
    first = witness.seen[24, 24][1][0].squares[0]
    model = ChangesItsInput()
    want = torch.ones(4, 24).square().sum(0) + model.one(torch.ones(4, 24)).square().sum(0)
    assert first.shape == want.shape
    assert (witness.seen[12, 24][1][0].squares[0] >= 4 - 1e-3).all()
    assert (first >= 4 - 1e-3).all()
    assert first.min() < 16                                           # four rows of ones, not of twos


def test_data_without_a_sample():
    with pytest.raises(inro_fx.InputError, match=r"0\.weight: (the calibration data holds no sample|no calibration data reached)"):
        inro_fx.quantize_graph(deep(), torch.randn(4, 24), "int4", solver="gptq", calibration=[torch.randn(0, 24)])


def test_an_interrupted_run_leaves_the_model_as_it_was():
    class Stops(Witness):
        def solve(self, matrix, scheme, moments):
            if len(self.seen):
                raise KeyboardInterrupt
            return super().solve(matrix, scheme, moments)
    model, x = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8)).eval(), torch.randn(4, 24)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for inplace in (False, True):
        with pytest.raises(KeyboardInterrupt):
            inro_fx.quantize_graph(model, x, "int4", solver=Stops(), calibration=[x], inplace=inplace)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert [type(m) for m in model] == [nn.Linear, nn.Linear]


def test_solved_models_are_saved_loaded_trained_beside_and_solved_in_place(tmp_path):
    model, x = deep(depth=3), torch.randn(32, 24)
    small = inro_fx.quantize_graph(model, x, "int4", solver="gptaq", calibration=[x], bias_correction=True)
    inro_fx.save(small, tmp_path / "m.safetensors")
    again = inro_fx.load(tmp_path / "m.safetensors", deep(depth=3))
    assert torch.equal(again(x), small(x))
    assert [r.solver for r in inro_fx.report(again).rows] == ["gptaq"] * 3
    mine = deep(depth=3)
    inro_fx.quantize_graph(mine, x, "int4", solver="gptaq", calibration=[x], bias_correction=True, inplace=True)
    assert torch.equal(mine(x), small(x))


@pytest.mark.parametrize("scheme", ["int8_static", "int8_dynamic"])
def test_solvers_choose_the_codes_of_schemes_with_integer_activations(scheme):
    model, x = deep(depth=3), torch.randn(32, 24)
    small = inro_fx.quantize_graph(model, x, scheme, solver="gptq", calibration=[x])
    assert (small(x) - model(x)).norm() < 0.05 * model(x).norm()
    assert {r.solver for r in inro_fx.report(small).rows} == {"gptq"}


WORKER = """
import sys, torch, inro_fx
from torch import nn
import torch.distributed as dist
rank, size, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)).eval()
data = list(torch.randn(8, 16, 24))
small = inro_fx.quantize_graph(model, data[0], "int4", solver="gptaq", calibration=data[rank::size], bias_correction=True,
                               group=dist.group.WORLD)
torch.save(dict(small.state_dict()), f"{out}/{size}-{rank}.pt")
dist.destroy_process_group()
"""


def test_processes_that_share_the_data_find_the_codes_of_one(tmp_path):
    import socket
    import subprocess
    import sys

    def states(size):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        running = [subprocess.Popen([sys.executable, "-c", WORKER, str(rank), str(size), str(port), str(tmp_path)]) for rank in range(size)]
        assert [p.wait(120) for p in running] == [0] * size
        return [torch.load(tmp_path / f"{size}-{rank}.pt") for rank in range(size)]
    (alone,), shared = states(1), states(2)
    for state in shared:
        for name, value in alone.items():
            assert torch.equal(state[name], value) if not value.is_floating_point() else torch.allclose(state[name], value, rtol=1e-5, atol=1e-6)


def test_no_warning_of_torch_reaches_the_user():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.randn(4, 24)
        inro_fx.quantize_graph(deep(), x, "int4", solver="auto", calibration=[x])
