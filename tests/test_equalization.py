"""Scale moves from channels into weights: never a bit of the float model, and never past what also reads them."""

import pickle

import pytest
import torch
from torch import nn

import inro_fx
from inro_fx.passes.scheme import Identity

KINDS = ["smooth", "awq", "cle"]


class RMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    """A block of a Llama: both norms and the product of the gate can be divided."""

    def __init__(self, width=16):
        super().__init__()
        self.n1, self.n2 = RMS(width), nn.LayerNorm(width)
        self.q, self.k, self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(5))

    def forward(self, x):
        y = self.n1(x)
        x = x + torch.tanh(self.q(y)) * torch.sigmoid(self.k(y))
        y = self.n2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.deep, self.last = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(torch.relu(self.deep(torch.relu(self.norm(self.one(x))))))


def chain():
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, 8))


MODELS = {"gated": (Gated, torch.randn(4, 5, 16)), "convolutions": (Convolutions, torch.randn(2, 3, 9, 9)), "chain": (chain, torch.randn(12, 16))}
SITES = {"gated": {"mul_1", "layer_norm", "linear_3"}, "convolutions": {"batch_norm", "conv2d_1"}, "chain": {"linear"}}


def built(name):
    torch.manual_seed(0)
    build, x = MODELS[name]
    model = build().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.exp2(torch.randn(p.shape[0], generator=torch.Generator().manual_seed(1)) * 3).reshape(-1, *[1] * (p.dim() - 1)))
    return model, x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_the_float_model_is_the_same_bit_for_bit(name, kind):
    model, x = built(name)
    model.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    same, small = (inro_fx.quantize_graph(model, x, Identity(), calibration=[x], equalize=e) for e in (None, kind))
    assert torch.equal(small(x), same(x))
    assert torch.equal(small(2 * x), same(2 * x))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    changed = [k for k, v in small.named_parameters() if k in before and not torch.equal(v, before[k])]
    assert changed or kind == "awq"                                    # which has nothing to gain from a scheme that loses nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_sites_are_found_along_the_edges_of_the_graph(name, kind):
    model, x = built(name)
    log = [line.split() for line in inro_fx.explain(inro_fx.quantize_graph(model, x, calibration=[x], equalize=kind)).splitlines()]
    assert {line[1] for line in log if line[0] == kind and len(line) == 2} == SITES[name]


class Refused(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.fc, self.other, self.how = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16), how
        self.shared = self.other.weight

    def forward(self, x):
        y = self.norm(x)
        if self.how == "residual":
            return y + self.fc(y)
        if self.how == "output":
            return self.fc(y), y
        if self.how == "twice":
            return self.fc(y) + self.norm(2 * x)
        if self.how == "shared weight":
            return self.other(y) @ self.shared
        if self.how == "square":
            return self.fc(y * y)
        return self.fc(torch.sigmoid(y))


@pytest.mark.parametrize(("how", "why"), [
    ("residual", "also read by add"), ("output", "also read by output"), ("twice", "read elsewhere"), ("shared weight", "read elsewhere"),
    ("square", None), ("sigmoid", None)])
def test_what_also_reads_a_value_is_a_refusal(how, why):
    torch.manual_seed(0)
    model, x = Refused(how).eval(), torch.randn(4, 16)
    small = inro_fx.quantize_graph(model, x, "int8", calibration=[x], equalize="smooth")
    assert torch.equal(small.norm.weight, model.norm.weight)
    if why is not None:
        assert why in " ".join(inro_fx.explain(small).split())


def lost(model, x, scheme, **options):
    small = inro_fx.quantize_graph(model, x[0], scheme, calibration=x, **options)
    with torch.no_grad():
        return sum((small(b) - model(b)).square().sum() for b in x).sqrt().item()


def test_smooth_takes_the_peaks_out_of_activations():
    model, x = Gated().eval(), [torch.randn(4, 5, 16) for _ in range(4)]
    with torch.no_grad():
        model.n2.weight[3] *= 100
        for reader in (model.gate, model.up):
            reader.weight[:, 3] /= 100
    assert lost(model, x, "int8_dynamic", equalize="smooth") < 0.5 * lost(model, x, "int8_dynamic")


def test_awq_gives_large_inputs_finer_steps():
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        model[0].weight[:4] *= 30
    x = [torch.randn(32, 64) for _ in range(4)]
    assert lost(model, x, "int4", equalize="awq") < 0.85 * lost(model, x, "int4")


def test_cle_makes_rows_and_columns_alike():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    factors = torch.exp2(torch.randint(-5, 6, (32,)).float())
    with torch.no_grad():
        model[0].weight *= factors[:, None]
        model[0].bias *= factors
        model[2].weight /= factors
    x = [torch.randn(32, 32) for _ in range(2)]
    assert lost(model, x, inro_fx.uniform(7), equalize="cle") < 0.5 * lost(model, x, inro_fx.uniform(7))


@pytest.mark.parametrize("inplace", [False, True])
def test_together_with_solvers_in_place_saved_and_loaded(inplace, tmp_path):
    model, x = built("gated")
    small = inro_fx.quantize_graph(model, x, "int4", solver="gptaq", calibration=[x], equalize="awq", bias_correction=True)
    mine, _ = built("gated")
    again = inro_fx.quantize_graph(mine, x, "int4", solver="gptaq", calibration=[x], equalize="awq", bias_correction=True, inplace=inplace)
    assert torch.equal(again(x), small(x))
    assert (mine is again) == inplace
    assert torch.equal(pickle.loads(pickle.dumps(again))(x), small(x))
    with pytest.raises(inro_fx.ModelError, match="was equalized"):
        inro_fx.save(again, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))
        self.norm.weight.data *= torch.linspace(0.1, 30, 16)

    def forward(self, x, features=False):
        y = self.norm(x)
        return y if features else self.fc(y)


@pytest.mark.parametrize("kind", KINDS)
def test_other_code_than_the_graph_does_not_see_divided_values(kind):
    model, x = Features().eval(), torch.randn(8, 16)
    small = inro_fx.quantize_graph(model, x, "int8", calibration=[x], equalize=kind)
    assert (small(x) - model(x)).norm() < 0.02 * model(x).norm()
    with pytest.raises(inro_fx.GraphNotTaken):
        small(x, features=True)


class Outside(nn.Module):
    """Stays Python: its child is a graph, and it may read what it likes."""

    def __init__(self):
        super().__init__()
        self.inner = Features()

    def forward(self, x):
        return self.inner(x) if float(x.sum()) > -1e9 else self.inner.norm.weight


def test_models_that_stay_python_are_not_equalized():
    model, x = Outside().eval(), torch.randn(8, 16)
    small = inro_fx.quantize_graph(model, x, "int8", calibration=[x], equalize="smooth")
    assert torch.equal(small.inner.norm.weight, model.inner.norm.weight)


class Counting(Features):
    def forward(self, x):
        self.calls.add_(1)
        return self.fc(self.norm(x)) + self.calls


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_forward_writes_is_as_it_was(kind):
    model, x = Counting().eval(), torch.randn(8, 16)
    small = inro_fx.quantize_graph(model, x, "int8", calibration=[x] * 3, equalize=kind)
    assert float(small.calls) == float(model.calls) == 0


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.fc = nn.Parameter(torch.rand(16) * 5 + 0.1), nn.Linear(16, 16)

    def forward(self, x):
        y = x * 1.0
        return self.fc(y.mul_(self.gain)) + y


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_changed_in_place_are_left_alone(kind):
    model, x = InPlace().eval(), torch.randn(8, 16) * torch.logspace(-1, 1, 16)
    small = inro_fx.quantize_graph(model, x, "int8", calibration=[x], equalize=kind)
    assert torch.equal(small.gain, model.gain)


def test_wrong_arguments():
    model, x = built("chain")
    with pytest.raises(inro_fx.InputError, match="equalize='sooth': it is one of 'smooth', 'awq', 'cle', or None"):
        inro_fx.quantize_graph(model, x, equalize="sooth")
    with pytest.raises(inro_fx.InputError, match="equalize='awq' needs calibration data"):
        inro_fx.quantize_graph(model, x, equalize="awq")
    inro_fx.quantize_graph(model, x, equalize="cle")
