"""Operators: opcheck, every shape that occurs, gradients, dtypes."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import inro_fx
from inro_fx.numerics import pack_bits
from inro_fx.schemes import find_scheme

SCHEMES = [inro_fx.uniform(127), inro_fx.uniform(7, 32), inro_fx.uniform(1000), inro_fx.uniform(7, "tensor")]
OPS = torch.ops.inro_fx


def linear_arguments(scheme, rows=3, inner=40, out=6, dtype=torch.float32, bias=True):
    parts = scheme.pack(torch.randn(out, inner))
    return (torch.randn(rows, inner, dtype=dtype), parts["codes"], parts["scale"], torch.randn(out, dtype=dtype) if bias else None,
            scheme.bits, scheme.group, inner)


OWN_WARNING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")      # of opcheck in torch 2.14


@OWN_WARNING
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_opcheck(scheme):
    x, codes, scale, bias, bits, group, columns = linear_arguments(scheme)
    x.requires_grad_()
    torch.library.opcheck(OPS.linear.default, (x, codes, scale, bias, bits, group, columns))
    torch.library.opcheck(OPS.linear.default, (x, codes, scale, None, bits, group, columns))
    torch.library.opcheck(OPS.dequantize.default, (codes, scale, bits, group, 40, torch.float32))
    torch.library.opcheck(OPS.embedding.default, (torch.tensor([[0, 5], [1, 1]]), codes, scale, bits, group, 40, torch.float32))
    torch.library.opcheck(OPS.linear.inference, (x.detach(), codes, scale, bias, bits, group, columns))


@OWN_WARNING
def test_opcheck_of_integer_activations():
    x, codes, scale, bias, *_, columns = linear_arguments(find_scheme("int8_dynamic"))
    torch.library.opcheck(OPS.linear_dynamic.default, (x.requires_grad_(), codes, scale, bias, columns))
    torch.library.opcheck(OPS.linear_dynamic.default, (x, codes, scale, None, columns))
    parts = inro_fx.static().calibrated(seen(x)).pack(torch.randn(6, 40))
    for b in (bias, None):
        torch.library.opcheck(OPS.linear_static.default, (x, *parts.values(), b, columns))


def seen(x):
    observer = inro_fx.MinMaxObserver()
    observer(x)
    return observer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16,), (0, 16), (1, 16), (5, 16), (2, 0, 16), (2, 5, 16), (2, 3, 5, 16)])
@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "int4", "int8_tensor"])
def test_every_rank_and_dtype(name, shape, dtype):
    linear = torch.nn.Linear(16, 8).to(dtype)
    small = inro_fx.quantize_graph(linear, torch.randn(3, 16, dtype=dtype), name)
    x = torch.randn(shape, dtype=dtype)
    got, want = small(x), linear(x)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if x.numel():
        assert (got - want).abs().max() < (0.6 if name == "int4" else 0.12)


@pytest.mark.parametrize("inner", [1, 3, 7, 8, 13, 16, 17, 24])
@pytest.mark.parametrize("out", [1, 3, 8, 17])
def test_odd_sizes(inner, out):
    w, x = torch.randn(out, inner), torch.randn(20, inner)
    for name in ("int8", "int8_dynamic"):
        scheme = find_scheme(name)
        operator, trailing = scheme.operator("linear")
        got = operator(x, *scheme.pack(w).values(), None, *trailing, inner)
        assert (got - x @ w.t()).abs().max() <= 0.05 * x.abs().max() * w.abs().max() * inner


def test_a_row_does_not_depend_on_the_others():
    x, codes, scale, bias, *_, columns = linear_arguments(find_scheme("int8_dynamic"), rows=1, inner=32)
    alone = OPS.linear_dynamic(x, codes, scale, bias, columns)
    for others in (torch.randn(1, 32) * 100, torch.randn(16, 32), torch.randn(40, 32), torch.zeros(7, 32)):
        together = OPS.linear_dynamic(torch.cat([x, others]), codes, scale, bias, columns)
        torch.testing.assert_close(together[:1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_zeros_give_the_bias_and_no_nan_anywhere(dtype):
    x, codes, scale, bias, *_, columns = linear_arguments(find_scheme("int8_dynamic"), rows=4, inner=16, out=8, dtype=dtype)
    x[2], x[3] = 0, 1e-30
    x.requires_grad_()
    y = OPS.linear_dynamic(x, codes, scale, bias, columns)
    assert torch.equal(y[2], bias)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("rows", [1, 16, 17, 512])
def test_scales_do_not_overflow_half_precision(rows):
    linear = torch.nn.Linear(256, 8, bias=False).half()
    with torch.no_grad():
        linear.weight.fill_(100)
    small = inro_fx.quantize_graph(linear, torch.full((2, 256), 1e-3).half(), "int8_dynamic")
    y = small(torch.full((rows, 256), 1e-3).half())
    assert torch.isfinite(y).all()
    assert (y - 25.6).abs().max() < 0.1


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_gradients_are_those_of_the_dequantized_linear(scheme):
    x, codes, scale, bias, bits, group, columns = linear_arguments(scheme, dtype=torch.float64)
    weight = OPS.dequantize(codes, scale, bits, group, 40, torch.float64)
    x.requires_grad_(), bias.requires_grad_()
    want = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, bias))
    got = torch.autograd.grad(OPS.linear(x, codes, scale, bias, bits, group, columns).square().sum(), (x, bias))
    torch.testing.assert_close(got, want)


def test_embedding_gathers_before_it_dequantizes():
    scheme = inro_fx.uniform(127)
    table = torch.randn(50, 12)
    parts = scheme.pack(table)
    whole = scheme.unpack(parts, 12, torch.float32)
    for ids in (torch.tensor(3), torch.tensor([], dtype=torch.long), torch.tensor([[1, 2], [49, 0]]), torch.tensor([5], dtype=torch.int32)):
        got = OPS.embedding(ids, parts["codes"], parts["scale"], 8, 0, 12, torch.float32)
        assert torch.equal(got, whole[ids.long()])


@pytest.mark.parametrize("layout", ["transposed", "chunk", "expanded", "sliced"])
@pytest.mark.parametrize("name", ["int8", "int8_dynamic"])
def test_memory_layout_of_the_input(name, layout):
    linear = torch.nn.Linear(8, 4)
    small = inro_fx.quantize_graph(linear, torch.randn(2, 8), name)
    x = {"transposed": torch.randn(2, 8, 6).transpose(1, 2), "chunk": torch.randn(2, 6, 16).chunk(2, -1)[1],
         "expanded": torch.randn(1, 1, 8).expand(3, 5, 8), "sliced": torch.randn(4, 6, 16)[::2, 1:, ::2]}[layout]
    torch.testing.assert_close(small(x), small(x.contiguous()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")          # torch.func.jvp uses it, and warns
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4"])
def test_forward_mode_derivatives_are_right_or_refused(scheme):
    x, v = torch.randn(3, 64), torch.randn(3, 64)
    small = inro_fx.quantize_graph(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)), x, scheme)
    _, tangent = torch.func.jvp(small, (x,), (v,))
    reference = torch.nn.functional.linear(x, small[0].weight, small[0].bias)
    want = torch.nn.functional.linear(torch.nn.functional.linear(v, small[0].weight) * (reference > 0), small[2].weight)
    assert (tangent - want).norm() < 1e-4 * want.norm()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: torch.ops.inro_fx.linear_dynamic(x, torch.ones(8, 64, dtype=torch.int8), torch.ones(8, 1), None, 64), (x,), (v,))


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4"])
def test_compiled_graphs_call_the_kernels_without_python(scheme):
    from torch._dynamo.backends.common import aot_autograd
    small = inro_fx.quantize_graph(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)), torch.randn(2, 64), scheme)
    called = []

    def keep(graph, inputs):
        called.extend(str(n.target) for n in graph.graph.nodes if "inro_fx" in str(n.target))
        return graph
    x = torch.randn(5, 64)
    with torch.no_grad():
        compiled = torch.compile(small, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
        assert torch.equal(compiled(x), small(x))
    name = "linear_dynamic" if scheme == "int8_dynamic" else "linear"
    assert called == [f"inro_fx.{name}.inference"] * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")            # torch.export's about itself
@pytest.mark.parametrize("trace", ["export", "decomposed", "make_fx"])
def test_gradients_survive_tracing(trace):
    from torch.fx.experimental.proxy_tensor import make_fx
    x = torch.randn(3, 64)
    small = inro_fx.quantize_graph(torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)), x).requires_grad_(False)
    want = torch.autograd.grad(small(x.requires_grad_()).sum(), x)[0]
    x = x.detach()
    if trace == "make_fx":
        traced = make_fx(small)(x)
    else:
        program = torch.export.export(small, (x,))
        traced = (program.run_decompositions() if trace == "decomposed" else program).module()
    assert torch.allclose(torch.autograd.grad(traced(x.requires_grad_()).sum(), x)[0], want)


def test_a_graph_edited_to_keywords_still_runs():
    x = torch.randn(3, 64)
    small = inro_fx.quantize_graph(torch.nn.Linear(64, 8), x)
    want = small(x)
    [node] = [n for n in small.graph.nodes if "inro_fx" in str(n.target)]
    node.args, node.kwargs = node.args[:-1], {"columns": node.args[-1]}
    small.recompile()
    assert torch.equal(small(x), want)
    assert not inro_fx.report(small).outside


def test_a_replica_reads_its_own_tensors():
    x = torch.randn(3, 64)
    small = inro_fx.quantize_graph(torch.nn.Linear(64, 8), x)
    replica = small._replicate_for_data_parallel()
    replica._parameters = {"bias": torch.zeros(8)}
    replica._buffers = dict(small._buffers)
    assert torch.allclose(replica(x), small(x) - small.bias, atol=1e-5)


def calls_of_every_operator():
    x, codes, scale, bias = torch.ones(2, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1), torch.ones(4)
    fixed = torch.ones(4, 1, dtype=torch.int32), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    return {"linear": ((x, codes, scale, bias), (8, 0, 8)), "linear_dynamic": ((x, codes, scale, bias), (8,)), "linear_static": ((x, codes, scale, *fixed, bias), (8,)),
            "embedding": ((torch.tensor([1, 2]), codes, scale), (8, 0, 8, torch.float32)), "dequantize": ((codes, scale), (8, 0, 8, torch.float32))}


@pytest.mark.parametrize("overload", ["default", "inference", "reference"])
@pytest.mark.parametrize("name", calls_of_every_operator())
def test_tensors_on_several_devices_are_refused(name, overload):
    tensors, rest = calls_of_every_operator()[name]
    call = getattr(getattr(OPS, name), overload)
    for some in itertools.product((False, True), repeat=len(tensors)):
        moved = [t.to("meta") if meta else t for t, meta in zip(tensors, some, strict=True)]
        if len(set(some)) == 1:
            assert call(*moved, *rest).device.type == moved[0].device.type
            continue
        with pytest.raises(RuntimeError, match=f"inro_fx::{name} got tensors on several devices: cpu, meta"):
            call(*moved, *rest)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 65, 10**9, 2**63 - 1])
def test_references_take_no_memory_for_columns_that_are_not_there(bits, group):
    codes = torch.randint(-8, 8, (12, 64), dtype=torch.int8)
    stored, x, ids = pack_bits(codes, bits) if bits < 8 else codes, torch.randn(3, 64), torch.tensor([3, 0])
    for scale in (torch.rand(12, 1), torch.rand(1, 1)):
        weight = codes * scale
        assert torch.equal(OPS.dequantize.reference(stored, scale, bits, group, 64, torch.float32), weight)
        assert torch.equal(OPS.embedding.reference(ids, stored, scale, bits, group, 64, torch.float32), weight[ids])
        torch.testing.assert_close(OPS.linear.reference(x, stored, scale, None, bits, group, 64), x @ weight.t())
    for wrong in (torch.rand(12, 2), torch.rand(12, 0)):
        with pytest.raises(RuntimeError, match="groups"):
            OPS.dequantize.reference(stored, wrong, bits, group, 64, torch.float32)
    parts = inro_fx.uniform(7, group).pack(torch.randn(12, 64))
    assert parts["scale"].shape == (12, 1)
