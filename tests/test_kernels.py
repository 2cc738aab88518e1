"""The C kernels: exact sums at every level of instruction set, any shape, stride, number of threads; the table of choices."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inro_fx
from inro_fx.kernels import CHOICES, LEVELS, best_level, kernel_for, linear_int8, unavailable
from inro_fx.numerics import int8_matmul, quantize_rows

needs_library = pytest.mark.skipif(best_level() < 0, reason=unavailable or "built")
SIZES = st.one_of(st.integers(1, 80), st.sampled_from([128, 129, 255, 300]))


def dynamic_reference(x, codes, scale, bias):
    x_codes, x_scale = quantize_rows(x)
    y = int8_matmul(x_codes, codes).float() * x_scale * scale.t()
    return y if bias is None else y + bias


def operands(rows, inner, out, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, inner, generator=g), torch.randint(-128, 128, (out, inner), generator=g, dtype=torch.int8),
            torch.rand(out, 1, generator=g) + 0.5, torch.randn(out, generator=g))


@needs_library
@given(SIZES, SIZES, SIZES, st.integers(0, best_level()) if best_level() >= 0 else st.just(0), st.integers(1, 4), st.integers(0, 999))
def test_dynamic_sums_are_exact(rows, inner, out, level, threads, seed):
    x, codes, scale, bias = operands(rows, inner, out, seed)
    got = linear_int8(x, codes, scale, bias, 1, level, threads)
    torch.testing.assert_close(got, dynamic_reference(x, codes, scale, bias), rtol=1e-6, atol=1e-5 * got.abs().max().item())


@needs_library
@given(SIZES, SIZES, SIZES, st.integers(0, best_level()) if best_level() >= 0 else st.just(0), st.integers(0, 999))
def test_fifteen_bits_of_the_activations(rows, inner, out, level, seed):
    x, codes, scale, bias = operands(rows, inner, out, seed)
    want = x.double() @ (codes.double() * scale.double()).t() + bias.double()
    got = linear_int8(x, codes, scale, bias, 2, level)
    # each activation is off by at most half a step of max|x| / 16256
    limit = x.abs().amax(1, keepdim=True).double() / 16256 * 0.51 * (codes.double().abs().sum(1) * scale.double().flatten()) + 1e-5 * want.abs() + 1e-5
    assert ((got - want).abs() <= limit).all()


@needs_library
@pytest.mark.parametrize("levels", [1, 2])
def test_every_level_and_number_of_threads_gives_the_same_bits(levels):
    for rows, inner, out in ((1, 4096, 64), (3, 77, 33), (12, 64, 32), (200, 129, 70), (1500, 40, 40)):
        x, codes, scale, bias = operands(rows, inner, out)
        first = linear_int8(x, codes, scale, bias, levels, 0, 1)
        for level in range(best_level() + 1):
            for threads in (1, 2, 3, 4):
                got = linear_int8(x, codes, scale, bias, levels, level, threads)
                if levels == 1:
                    assert torch.equal(got, first)
                else:                                  # the levels add up their exact sums in another order
                    torch.testing.assert_close(got, first, rtol=1e-5, atol=1e-4)
                    assert torch.equal(got, linear_int8(x, codes, scale, bias, levels, level, 1))


@needs_library
@pytest.mark.parametrize("level", range(max(best_level(), 0) + 1))
@pytest.mark.parametrize("code", [127, -127, -128])
@pytest.mark.parametrize("inner", [64, 4096, 65_536])
def test_extremes_do_not_saturate(code, inner, level):
    x, codes = torch.ones(13, inner), torch.full((5, inner), code, dtype=torch.int8)
    y = linear_int8(x, codes, torch.ones(5, 1), None, 1, level)
    assert torch.equal(y, torch.full((13, 5), float(code) * inner).float() * 127 * (torch.ones(()) / 127))


@needs_library
def test_strides_scalars_and_odd_rows():
    x, codes, scale, bias = operands(20, 40, 12)
    wide = torch.randn(20, 100)
    wide[:, 30:70] = x
    assert torch.equal(linear_int8(wide[:, 30:70], codes, scale, bias, 1), linear_int8(x, codes, scale, bias, 1))
    assert torch.equal(linear_int8(x.t().contiguous().t(), codes, scale, bias, 1), linear_int8(x, codes, scale, bias, 1))
    one = torch.tensor([[0.25]])
    assert torch.equal(linear_int8(x, codes, one, None, 1), linear_int8(x, codes, one.expand(12, 1).contiguous(), None, 1))
    assert linear_int8(x[:0], codes, scale, bias, 1).shape == (0, 12)
    special = x.clone()
    special[0], special[1, 3], special[2, 3], special[3] = 0, float("nan"), float("inf"), 1e-42
    for levels in (1, 2):
        y = linear_int8(special, codes, scale, bias, levels)
        assert torch.equal(y[0], bias)
        assert torch.equal(y[3], bias)
        assert y[1:3].isnan().all()
        assert torch.equal(y[4:], linear_int8(x, codes, scale, bias, levels)[4:])


@needs_library
def test_several_threads_at_once():
    x, codes, scale, bias = operands(64, 256, 128)
    want = linear_int8(x, codes, scale, bias, 1)
    wrong = []

    def work():
        wrong.extend(i for i in range(30) if not torch.equal(linear_int8(x, codes, scale, bias, 1), want))
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert wrong == []


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork():
    code = """if True:
        import os, torch, inro_fx
        small = inro_fx.quantize_graph(torch.nn.Linear(512, 512), torch.randn(64, 512))
        x = torch.randn(64, 512)
        want = small(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(small(x), want) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int8_tensor", "int8_rowwise_full"])
def test_kernel_and_reference_agree_through_the_operators(scheme, dtype, monkeypatch):
    linear = torch.nn.Linear(96, 40).to(dtype)
    small = inro_fx.quantize_graph(linear, torch.randn(2, 96, dtype=dtype), scheme)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((96,), (1, 96), (7, 96), (2, 33, 96))]
    fast = [small(x) for x in inputs]
    for module in ("linear", "linear_dynamic"):
        monkeypatch.setattr(f"inro_fx.ops.{module}.kernel_for", lambda *a: "torch")
    for x, y in zip(inputs, fast, strict=True):
        tolerance = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        assert ((small(x) - y).double().norm() / y.double().norm()) < tolerance


def test_without_the_library_everything_works_and_says_so():
    code = """if True:
        import torch, inro_fx
        assert inro_fx.kernels()["library"] == "none: INRO_FX_KERNELS=off"
        assert inro_fx.kernels()["linear"] == "torch"
        model = torch.nn.Linear(64, 64)
        for scheme in ("int8", "int8_dynamic"):
            small = inro_fx.quantize_graph(model, torch.randn(2, 64), scheme)
            assert "/torch" in str(inro_fx.report(small).rows[0].kernel)
            x = torch.randn(5, 64)
            assert (small(x) - model(x)).norm() < 0.03 * model(x).norm()
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={**os.environ, "INRO_FX_KERNELS": "off"})


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("ratio", [10, 300, 400, 1e4, 1e6])
def test_one_huge_activation_does_not_cost_the_others(rows, ratio):
    """Fifteen bits hold no row in which one number is thousands of times the rest: such rows run in floats."""
    layer = torch.nn.Linear(512, 64)
    layer.weight.data[:, 0] /= ratio
    x = torch.randn(rows, 512)
    x[::2, 0] = ratio
    small = inro_fx.quantize_graph(layer, torch.randn(2, 512))
    want = torch.nn.functional.linear(x, small.weight, layer.bias)
    assert ((small(x) - want).norm(dim=1) / want.norm(dim=1)).max() < 0.01


def test_huge_outliers_and_sparse_rows():
    """The largest of outliers does not hide the others, and rows with few nonzeros are not taken for outliers."""
    codes = torch.ones(2, 64, dtype=torch.int8)
    codes[:, 0] = 0
    for size in (1e6, 1e8, 1e12, 1e30):
        x = torch.ones(1, 64)
        x[0, 0] = size
        if best_level() >= 0:
            assert torch.equal(linear_int8(x, codes, torch.ones(2, 1), None, 2), torch.full((1, 2), 63.0))
    sparse = torch.zeros(1, 4096)
    sparse[0, ::400] = 3.0
    small, calls = inro_fx.quantize_graph(torch.nn.Linear(4096, 8), torch.randn(2, 4096)), []
    from inro_fx.kernels import int8
    original = int8._mend_wide_rows
    int8._mend_wide_rows = lambda *a: calls.append(a)
    try:
        small(sparse)
        assert calls == []
    finally:
        int8._mend_wide_rows = original


def test_outliers_under_autocast():
    x = torch.ones(2, 64)
    x[0, 0] = 1e9
    small = inro_fx.quantize_graph(torch.nn.Linear(64, 8), torch.randn(2, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.ops.inro_fx.linear(x, small.weight_codes, small.weight_scale, small.bias, 8, 0, 64)


@pytest.mark.parametrize("wrong", [dict(codes=torch.ones(4, 3, dtype=torch.int8)), dict(codes=torch.ones(4, 8)), dict(scale=torch.ones(3, 1)), dict(scale=torch.ones(4, 1).double()),
                                   dict(bias=torch.ones(2))], ids=range(5))
def test_the_kernels_read_nothing_that_is_not_there(wrong):
    right = dict(codes=torch.ones(4, 8, dtype=torch.int8), scale=torch.ones(4, 1), bias=torch.ones(4)) | wrong
    if best_level() >= 0:
        for op, rest in ((torch.ops.inro_fx.linear, (8, 0, 8)), (torch.ops.inro_fx.linear_dynamic, (8,))):
            with pytest.raises(RuntimeError):
                op(torch.ones(2, 8), right["codes"], right["scale"], right["bias"], *rest)


def test_the_table_of_choices_is_total():
    assert len(LEVELS) == 3
    for op in {c.op for c in CHOICES}:
        for bits in (4, 8, 16):
            for group in (0, 32):
                for columns in (0, 1, 64, 10**6):
                    for rows in (0, 1, 10**6):
                        assert kernel_for(op, bits, group, columns, rows) in ("c", "torch")
    assert kernel_for("linear", 4, 32, 64, 1) == "torch"
    assert set(inro_fx.kernels()) == {"library", "linear", "linear_dynamic", "linear_static"}
