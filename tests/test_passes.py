"""Golden text: what each pass makes of a small graph; why each weight is left alone; what verify refuses."""


import pytest
import torch
import torch.nn.functional as F
from models import quantize as quantize_model
from torch import fx, nn

import inro_fx
from inro_fx.passes.capture.clone import clone
from inro_fx.passes.capture.example import Example
from inro_fx.passes.capture.ladder import capture
from inro_fx.passes.failures import PassError
from inro_fx.passes.program import Context
from inro_fx.passes.rules.fold_batchnorm import fold_batchnorm
from inro_fx.passes.rules.fuse import fuse
from inro_fx.passes.rules.quantize import quantize
from inro_fx.passes.solve.plan import Overrides, find_targets, plan
from inro_fx.passes.verify import verify


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8)
        self.w = nn.Parameter(torch.randn(8, 12))

    def forward(self, x):
        return torch.relu(self.fc(x)) @ self.w


def prepared(model, *inputs, scheme="int8", overrides=None):
    root = clone(model)
    session, _, _ = capture(root, Example.of(inputs))
    scheme = next(s for s in inro_fx.SCHEMES if s.name == scheme)
    return root, session, plan(session, find_targets(session), scheme, Overrides(overrides, root))


def names(graph):
    return [f"{n.op}:{n.target if isinstance(n.target, str) else getattr(n.target, '__name__', n.target)}" for n in graph.nodes]


def test_what_the_passes_make_of_it():
    root, session, chosen = prepared(Two(), torch.randn(3, 16))
    program, context = session.captures[""], Context(root, chosen.weights)
    assert names(program.graph) == ["placeholder:x", "get_attr:fc.weight", "get_attr:fc.bias", "call_function:linear", "call_function:relu",
                                    "get_attr:w", "call_function:matmul", "output:output"]
    quantized = quantize(program, context)
    assert names(quantized.graph) == [
        "placeholder:x", "get_attr:fc.weight_codes", "get_attr:fc.weight_scale", "call_function:dequantize.default", "get_attr:fc.bias",
        "call_function:linear", "call_function:relu", "get_attr:w_codes", "get_attr:w_scale", "call_function:dequantize.default",
        "call_method:permute", "call_method:contiguous", "call_function:matmul", "output:output"]
    fused = fuse(quantized, context)
    assert names(fused.graph) == [
        "placeholder:x", "get_attr:fc.weight_codes", "get_attr:fc.weight_scale", "get_attr:fc.bias", "call_function:linear.default",
        "call_function:relu", "get_attr:w_codes", "get_attr:w_scale", "call_function:linear.default", "output:output"]
    verify(fused, context, after="fuse")
    assert {k: (p.node, p.twin) for k, p in fused.probes.items()} == {
        ("linear", "fc.weight"): ("linear_default", "linear"), ("matmul", "w"): ("linear_default_1", "matmul")}
    assert [(rule, node) for rule, node, reason in fused.log if not reason] == [
        ("unpack", "fc_weight"), ("unpack", "w"), ("fuse linear", "linear"), ("fuse linear", "matmul")]


UNFUSED = [
    (lambda m, x: m.w.t() @ x.t(), (16, 8), "the weight is the left factor"),
    (lambda m, x: torch.addmm(x.new_ones(3, 8), x, m.w, alpha=2), (16, 8), "addmm with a scaled or two-dimensional bias"),
    (lambda m, x: F.linear(x, m.w.half().float()), (8, 16), "the weight is not a plain matrix"),
    (lambda m, x: x[:, :4] @ m.w[:, :4].t(), (8, 16), "the weight is a part of another one, across its columns"),
    (lambda m, x: x[:, :4] @ m.w[:, 4:8], (4, 8), "the weight is a part of another one, across its rows"),
    (lambda m, x: F.linear(x[:, :4], m.w[::2, ::4]), (8, 16), "the weight is a part of another one, with steps"),
    (lambda m, x: torch.baddbmm(x[None], x[None, :, :8], m.w[None])[0], (8, 16), "no rule fuses baddbmm"),
    (lambda m, x: F.conv1d(x.unsqueeze(1), m.w.view(8, 1, 16)), (8, 16), "the weight is a part or a view of another one"),
    (lambda m, x: F.linear(x, m.w[x.shape[0]:x.shape[0] + 4]), (8, 16), "the part of the weight depends on the input"),
    (lambda m, x: F.embedding(x.long().abs() % 8, m.w[1:]), (9, 16), "the table is a part of another weight"),
]


@pytest.mark.parametrize(("forward", "shape", "reason"), UNFUSED, ids=[r for _, _, r in UNFUSED])
def test_what_is_not_fused_says_why(forward, shape, reason):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(shape))

        def forward(self, x):
            return forward(self, x)
    model, x = One(), torch.randn(3, 16)
    small = inro_fx.quantize_graph(model, x)
    row = inro_fx.report(small).rows[0]
    assert row.note == reason
    assert row.kernel == f"dequantize + {row.op}"
    assert ((small(x) - model(x)).norm() / model(x).norm()) < 0.03


def test_a_weight_used_along_three_axes_is_not_fused():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 4))

        def forward(self, x, y):
            return F.linear(x, self.w), y @ self.w.t()[:, :, None]
    model, inputs = Three(), (torch.randn(3, 4), torch.randn(4, 3, 8))
    small = inro_fx.quantize_graph(model, inputs)
    for got, want in zip(small(*inputs), model(*inputs), strict=True):
        assert ((got - want).norm() / want.norm()) < 0.03


def test_explain_says_what_was_done_and_what_was_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.conv, self.branch = nn.Linear(16, 16), nn.Conv1d(16, 16, 1), nn.Linear(16, 16)

        def forward(self, x):
            x = self.fc(x) if x.sum() > 0 else self.branch(x)
            return self.conv(x.t()[None])
    whole = inro_fx.explain(inro_fx.quantize_graph(nn.Sequential(nn.Linear(16, 16), nn.Conv1d(16, 16, 1)), torch.randn(2, 16, 16)))
    assert whole.startswith("the model (graph)")
    assert "fuse linear  linear" in whole
    assert whole.endswith("fuse conv    conv1d: refused, it reads and writes about as much as it computes: floats are as fast")
    parts = inro_fx.explain(inro_fx.quantize_graph(Two(), torch.ones(2, 16)))
    assert [line for line in parts.splitlines() if not line.startswith(" ") and line] == ["fc (region)", "conv (region)", "branch (unreached)"]
    refused = inro_fx.explain(inro_fx.quantize_graph(nn.LSTM(8, 8), torch.randn(3, 2, 8), overrides={"weight_hh_l0": None}))
    assert "refused, one of its matrices stays float" in refused
    with pytest.raises(inro_fx.ModelError, match="nothing to explain"):
        inro_fx.explain(nn.Linear(2, 2))


def test_a_weight_used_along_both_of_its_axes_is_fused_along_one():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 16))

        def forward(self, x):
            return F.linear(x, self.w) @ self.w
    model, x = Both(), torch.randn(3, 16)
    small = inro_fx.quantize_graph(model, x)
    assert [r.note for r in inro_fx.report(small).rows] == ["", "shares the codes of w"]
    assert small.code.count("inro_fx.dequantize") == 1
    assert (small(x) - model(x)).norm() / model(x).norm() < 0.03


def skipped(build, *inputs, **options):
    small = inro_fx.quantize_graph(build(), inputs, **options)
    return {s.layer: s.reason for s in inro_fx.report(small).skipped}


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.phase = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.steps = nn.Parameter(torch.ones(8, 8, dtype=torch.long), requires_grad=False)
        self.added = nn.Parameter(torch.randn(8, 8))
        self.idle = nn.Parameter(torch.randn(8, 8))
        self.thin = nn.Linear(1, 64, bias=False)

    def forward(self, x):
        return self.fc(x) + (x.to(torch.complex64) @ self.phase).real + (x.long() @ self.steps) + self.added.sum(0) + self.thin(x[:, :1]).sum()


def test_every_reason_for_leaving_a_weight_alone():
    reasons = skipped(Odd, torch.randn(3, 8))
    assert reasons == {
        "phase": "complex64 weight: only real floating-point weights are quantized",
        "steps": "int64 weight: only floating-point weights are quantized",
        "added": "used by sum only: no operator that multiplies by it",
        "idle": "the example does not reach it",
        "thin.weight": "int8 would take 320 bytes in the place of 256",
    }


def test_nan_and_infinity_are_skipped_loudly():
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[1, 1] = float("nan"), float("inf")
    with pytest.warns(UserWarning, match=r"0\.weight holds NaN or infinity and was left float"):
        small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    assert inro_fx.report(small).skipped[0].reason == "it holds NaN or infinity"
    assert torch.equal(small(torch.ones(2, 8)).isnan(), model(torch.ones(2, 8)).isnan())


def test_a_table_that_forward_renormalises_is_left_alone():
    table = nn.Embedding(20, 8, max_norm=1.0)
    before = table.weight.clone()
    small = inro_fx.quantize_graph(table, torch.randint(0, 20, (2, 3)))
    assert torch.equal(table.weight, before)
    assert inro_fx.report(small).skipped[0].reason == "its own forward writes to it (such as an embedding with max_norm)"


def test_max_norm_holds_for_rows_that_the_example_did_not_reach():
    table = nn.Embedding(20, 8, max_norm=1.0)
    table.weight.data = torch.nn.functional.normalize(table.weight.data) * torch.where(torch.arange(20) < 10, 0.5, 4.0)[:, None]
    small = inro_fx.quantize_graph(table, torch.arange(10))
    assert small(torch.arange(20)).norm(dim=1).max() < 1.02


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.gate_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(11)])

    def forward(self, x):
        for block in (self.gate, self.gate_proj, *self.blocks):
            x = block(x)
        return x


@pytest.mark.parametrize(("overrides", "left"), [
    ({"gate": None}, {"gate.weight"}),
    ({"blocks.1": None}, {"blocks.1.0.weight"}),
    ({"blocks.1*": None}, {"blocks.1.0.weight", "blocks.10.0.weight"}),
    ({"blocks": None}, {f"blocks.{i}.0.weight" for i in range(11)}),
    ({"gate.weight": None}, {"gate.weight"}),
    ({nn.Sequential: None}, set()),
    ({"gate": "int8", nn.Linear: None}, {"gate_proj.weight"} | {f"blocks.{i}.0.weight" for i in range(11)}),
    ({"linear": None}, {"gate.weight", "gate_proj.weight"} | {f"blocks.{i}.0.weight" for i in range(11)}),
])
def test_overrides(overrides, left, recwarn):
    assert set(skipped(Blocks, torch.randn(2, 8), overrides=overrides)) == left
    assert bool(recwarn) == (nn.Sequential in overrides)


def test_an_override_that_matches_nothing_warns_by_name():
    with pytest.warns(UserWarning, match="'gates' matches no layer"):
        inro_fx.quantize_graph(Blocks(), torch.randn(2, 8), overrides={"gates": None, "gate": None})


@pytest.mark.parametrize(("break_it", "message"), [
    (lambda g: g.create_node("get_attr", "nowhere").meta.update(module=""), "which the module does not have"),
    (lambda g: next(n for n in g.nodes if n.op == "call_function").meta.pop("module"), "does not say which module it came from"),
    (lambda g: g.output(()), "2 outputs"),
    (lambda g: next(n for n in g.nodes if n.op == "get_attr").prev.append(next(n for n in g.nodes if n.op == "call_function")), "before it is computed"),
])
def test_verify_refuses(break_it, message):
    root, session, _ = prepared(Two(), torch.randn(3, 16))
    program = session.captures[""]
    break_it(program.graph)
    with pytest.raises(PassError, match=message):
        verify(program, Context(root, {}), after="capture")


def test_verify_sees_a_float_weight_that_should_be_gone():
    root, session, chosen = prepared(Two(), torch.randn(3, 16))
    with pytest.raises(PassError, match=r"after quantize: fc_weight reads fc\.weight as a float weight"):
        verify(session.captures[""], Context(root, chosen.weights), after="quantize")


def test_rows_of_a_packed_projection_are_taken_as_codes():
    attention = nn.MultiheadAttention(16, 4, bias=False)
    q, k = torch.randn(3, 2, 16), torch.randn(5, 2, 16)
    for scheme in inro_fx.SCHEMES:
        small = quantize_model(attention, (q, k, k), scheme)
        assert "narrow" in small.code
        assert "dequantize" not in small.code
        error = (small(q, k, k)[0] - attention(q, k, k)[0]).norm() / attention(q, k, k)[0].norm()
        assert error < (0.4 if scheme.name == "int4" else 0.05)


def test_batch_norm_folding_is_exact_and_leaves_the_original():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, affine=False),
                        nn.Conv2d(8, 4, 1)).eval()
    for norm in (net[1], net[4]):
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.randn(2, 3, 9, 9)
    root, session, _ = prepared(net, x)
    with torch.no_grad():
        assert fold_batchnorm(root, session.captures[""]) == [("0", "1"), ("3", "4")]
    small = inro_fx.quantize_graph(net, x, inro_fx.uniform(2**20), fold_batchnorm=True)
    torch.testing.assert_close(small(x), net(x), rtol=1e-4, atol=1e-4)
    assert isinstance(small[1], nn.Identity)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


class PaddedConv(nn.Conv2d):
    """Does more before the convolution: can be folded all the same."""

    def forward(self, x):
        return super().forward(torch.nn.functional.pad(x, (1, 0, 1, 0)))


class ScaledConv(nn.Conv2d):
    """Changes its weight at each call: cannot be folded."""

    def forward(self, x):
        return torch.nn.functional.conv2d(x, self.weight - self.weight.mean(), self.bias)


class ActiveNorm(nn.BatchNorm2d):
    """Does more after the norm: cannot be folded."""

    def forward(self, x):
        return torch.relu(super().forward(x))


@pytest.mark.parametrize(("conv", "norm", "folded"), [(PaddedConv, nn.BatchNorm2d, True), (ScaledConv, nn.BatchNorm2d, False),
                                                      (nn.Conv2d, ActiveNorm, False)])
def test_folding_looks_at_what_the_modules_do(conv, norm, folded):
    net = nn.Sequential(conv(3, 8, 3), norm(8), nn.Conv2d(8, 4, 1)).eval()
    net[1].running_mean.normal_(), net[1].running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 9, 9)
    small = inro_fx.quantize_graph(net, x, inro_fx.uniform(2**20), fold_batchnorm=True)
    assert isinstance(small[1], nn.Identity) == folded
    assert inro_fx.report(small).nodes > 0
    assert inro_fx.report(small).outside == {}
    torch.testing.assert_close(small(x), net(x), rtol=1e-4, atol=1e-4)


def test_a_batch_norm_used_twice_is_not_folded():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(self.conv(self.conv(x)))
    model, x = Shared().eval(), torch.randn(1, 3, 5, 5)
    small = inro_fx.quantize_graph(model, x, fold_batchnorm=True)
    assert isinstance(small.norm, nn.BatchNorm2d)
    assert len({r.layer for r in inro_fx.report(small).rows}) == 1
    assert fx.GraphModule in type(small).__mro__


def test_a_lookup_that_renormalizes_its_table_is_not_fused():
    """It writes to the table. The example does not, so that the table is codes when a program for such calls is captured."""
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 16), requires_grad=False)

        def forward(self, ids, longest=None):
            return F.embedding(ids, self.table, max_norm=longest)

    small = inro_fx.quantize_graph(Table(), torch.arange(6))
    assert [row.kernel.partition("/")[0] for row in inro_fx.report(small).rows] == ["inro_fx.embedding"]
    for row in range(8, 14):
        assert small(torch.tensor([row]), 0.5).norm() < 0.52
