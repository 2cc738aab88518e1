"""The C kernels: exact sums at every level of instruction set, any shape, stride, number of threads; the table of choices."""

import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inro_fx
from inro_fx.kernels import KERNELS, LEVELS, Case, best_level, choose, kernel_for, linear_int8, recurrent_steps, unavailable
from inro_fx.kernels.binding import CONVOLUTIONS
from inro_fx.kernels.choice import Choice
from inro_fx.numerics import int8_matmul, pack_bits, quantize_lifted, unscale
from inro_fx.ops.recurrent import CELLS, GATES

needs_library = pytest.mark.skipif(best_level() < 0, reason=unavailable or "built")
SIZES = st.one_of(st.integers(1, 80), st.sampled_from([128, 129, 255, 300]))


def dynamic_reference(x, codes, scale, bias):
    x_codes, x_scale, undo = quantize_lifted(x)
    y = int8_matmul(x_codes, codes).float() * x_scale * scale.t() * undo
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
@pytest.mark.parametrize("cell", GATES)
def test_steps_of_recurrent_layers(cell, levels):
    """As the operators of torch compute them, and the same bits at any level and number of threads."""
    for steps, batch, hidden, reverse in ((5, 1, 40, False), (3, 7, 33, True), (4, 2, 256, True)):
        g = torch.Generator().manual_seed(hidden)
        rows = GATES[cell] * hidden
        codes, scale = torch.randint(-127, 128, (rows, hidden), generator=g, dtype=torch.int8), torch.rand(rows, 1, generator=g) / 1000
        gates, bias = torch.randn(steps, batch, rows, generator=g) * 3, torch.randn(rows, generator=g)
        h, c = torch.randn(batch, hidden, generator=g).tanh(), torch.randn(batch, hidden, generator=g) if cell == "lstm" else None
        results = []
        for level in range(best_level() + 1):
            for threads in (1, 2, 3):
                state, cell_state = h.clone(), None if c is None else c.clone()
                y = recurrent_steps(gates, state, cell_state, codes, scale, bias, cell, reverse, levels, level, threads)
                if y is not None:
                    results.append((y, state, cell_state))
        state, cell_state, want = h, c if c is not None else h.new_empty(0), torch.empty_like(results[0][0])
        for t in reversed(range(steps)) if reverse else range(steps):
            hidden_gates = linear_int8(state, codes, scale, bias, levels)
            state, cell_state = CELLS[cell](gates[t].clone(), hidden_gates, state, cell_state)
            want[t] = state
        for y, last, last_c in results:
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)
            assert torch.equal(y, results[0][0]) or levels == 2
            if c is not None:
                torch.testing.assert_close(last_c, cell_state, rtol=1e-4, atol=1e-5)


@needs_library
def test_gates_of_any_size():
    """Infinities and NaN come out where torch has them; small numbers keep their digits."""
    for value in (0.0, 1e-30, -1e-6, 1e-3, 0.09, -0.11, 5.0, -30.0, 90.0, -1e4, float("inf"), float("-inf"), float("nan")):
        gates, codes = torch.full((1, 1, 64), value), torch.zeros(64, 64, dtype=torch.int8)
        y = recurrent_steps(gates, torch.zeros(1, 64), None, codes, torch.ones(64, 1), None, "tanh", False, 1)
        torch.testing.assert_close(y, gates.tanh(), rtol=1e-5, atol=1e-30, equal_nan=True)
        codes, c = torch.zeros(64, 16, dtype=torch.int8), torch.zeros(1, 16)
        y = recurrent_steps(gates, torch.zeros(1, 16), c, codes, torch.ones(64, 1), None, "lstm", False, 1)
        i, _, g, o = gates[0].chunk(4, -1)
        want = o.sigmoid() * (i.sigmoid() * g.tanh()).tanh()
        torch.testing.assert_close(y[0], want, rtol=1e-5, atol=1e-30, equal_nan=True)


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
        assert y[1].isnan().all()
        assert not y[2].isfinite().any()
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


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def close(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert (got - want).double().norm() <= TOLERANCE[want.dtype] * want.double().norm()


@needs_library
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int8_tensor", "int8_rowwise_full", "int4", inro_fx.uniform(3, 16), inro_fx.uniform(50)], ids=str)
def test_kernel_and_reference_agree_through_the_operators(scheme, dtype):
    linear = torch.nn.Linear(96, 40).to(dtype)
    small = inro_fx.quantize_graph(linear, torch.randn(2, 96, dtype=dtype), scheme)
    [call] = [n for n in small.graph.nodes if str(n.target).startswith("inro_fx.linear")]
    for shape in ((96,), (1, 96), (7, 96), (2, 33, 96), (0, 96)):
        x = torch.randn(shape, dtype=dtype)
        parts = [small.weight_codes, small.weight_scale, small.bias]
        rest = [a for a in call.args[3:] if not hasattr(a, "op")]
        close(small(x), call.target.overloadpacket.reference(x, *parts, *rest))


@needs_library
@given(SIZES, SIZES, SIZES, st.integers(2, 8), st.sampled_from([0, 1, 7, 16, 32, 64]), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 999))
def test_groups_and_narrow_codes(rows, inner, out, bits, group, dtype, with_bias, seed):
    g = torch.Generator().manual_seed(seed)
    high = (1 << bits - 1) - 1
    codes = torch.randint(-high - 1, high + 1, (out, inner), generator=g, dtype=torch.int8)
    stored = pack_bits(codes, bits) if bits < 8 else codes
    scale = torch.rand(out, -(-inner // group) if group else 1, generator=g) + 0.5
    x, bias = torch.randn(rows, inner, generator=g).to(dtype), torch.randn(out, generator=g).to(dtype) if with_bias else None
    weight = unscale(codes, scale, group, torch.float64)
    got = torch.ops.inro_fx.linear(x, stored, scale, bias, bits, group, inner)
    close(got, torch.nn.functional.linear(x.double(), weight, None if bias is None else bias.double()).to(dtype))
    assert torch.equal(torch.ops.inro_fx.dequantize(stored, scale, bits, group, inner, dtype), weight.to(dtype) if dtype == torch.float64
                       else unscale(codes, scale, group, dtype))
    ids = torch.randint(0, out, (3, 2), generator=g)
    assert torch.equal(torch.ops.inro_fx.embedding(ids, stored, scale, bits, group, inner, dtype), unscale(codes, scale, group, dtype)[ids])


@needs_library
@pytest.mark.parametrize("setting", ["portable", "avx2"])
def test_lower_levels_of_instructions_run_the_same_operators(setting):
    code = """if True:
        import torch, inro_fx
        x = torch.randn(3, 5, 96)
        for scheme in ("int8", "int8_dynamic", "int4", inro_fx.uniform(3, 16)):
            model = torch.nn.Linear(96, 40)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                small = inro_fx.quantize_graph(model.to(dtype), torch.randn(2, 96, dtype=dtype), scheme)
                want = torch.nn.functional.linear(x.to(dtype), small.weight, small.bias)
                for rows in (1, 2, 5):
                    got = small(x.to(dtype)[0, :rows])
                    assert (got - want[0, :rows]).norm() < 0.03 * want[0, :rows].norm()
        print(inro_fx.kernels()["library"])
    """
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={**os.environ, "INRO_FX_KERNELS": setting}, capture_output=True, text=True)
    assert ran.stdout.strip() == LEVELS[min(["portable", "avx2"].index(setting), best_level())]


@needs_library
@pytest.mark.parametrize("name", ["linear", "linear_dynamic"])
@pytest.mark.parametrize("make", [lambda x: x.t().contiguous().t(), lambda x: x[:, None, :].expand(-1, 3, -1), lambda x: x[::2], lambda x: x.unflatten(0, (2, -1)).transpose(0, 1),
                                  lambda x: torch.cat([x, x], 1)[:, :32]], ids=range(5))
def test_operators_take_any_strides(name, make):
    x, codes, scale, bias = operands(12, 32, 8)
    rest = (8, 0, 32) if name == "linear" else (32,)
    op = getattr(torch.ops.inro_fx, name)
    assert torch.equal(op(make(x), codes, scale, bias, *rest), op(make(x).contiguous(), codes, scale, bias, *rest))
    close(op(x, codes.t().contiguous().t(), scale, bias, *rest), op(x, codes, scale, bias, *rest))


@needs_library
def test_an_id_outside_of_the_table_is_refused():
    small = inro_fx.quantize_graph(torch.nn.Embedding(10, 32), torch.tensor([1, 2]))
    for wrong in (10, -1):
        with pytest.raises(IndexError):                        # as torch's own
            small(torch.tensor([0, wrong]))
        with pytest.raises(RuntimeError, match="out of range"):
            torch.ops.inro_fx.embedding(torch.tensor([wrong]), small.weight_codes, small.weight_scale, 8, 0, 32, torch.float32)


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


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_only_the_rows_with_outliers_run_in_floats(dtype, threads):
    x, codes, scale, bias = operands(40, 512, 24)
    x[::3, 7] = 5e4
    x, bias = x.to(dtype), bias.to(dtype)
    codes[:, 7] = 0
    got = linear_int8(x, codes, scale, bias, 2, threads=threads)
    close(got, torch.nn.functional.linear(x.double(), codes.double() * scale, bias.double()).to(dtype))
    assert torch.equal(got[1::3], linear_int8(x[1::3], codes, scale, bias, 2))


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


CASES = [Case(*case) for case in itertools.product(
    ("linear", "linear_dynamic", "linear_static", "embedding", "dequantize", *CONVOLUTIONS), ("cpu", "cuda"),
    ("float32", "bfloat16", "float64"), (1, 4, 8, 16), (-1, 0, 7, 32, 10**9), (0, 1, 64, 10**6), (0, 1, 3, 9, 10**6))]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_refuses_with_a_sentence(kernel):
    assert len({other.name for other in KERNELS}) == len(KERNELS)
    for case in CASES:
        why = kernel.refuse(case)
        assert why is None or len(why.split()) > 2 or why == unavailable, case


def test_every_case_has_a_kernel_and_reasons_against_those_before_it():
    for case in CASES:
        choice = choose(case)
        before = KERNELS[:KERNELS.index(choice.kernel)]
        assert list(choice.refused) == [kernel.name for kernel in before]
        assert all(choice.refused.values())
    assert choose(Case("linear", "cuda", "float32", 8, 0, 64, 1)) == Choice(KERNELS[-1], {"c": "runs on cpu only"})


@needs_library
def test_the_limits_of_the_kernels_in_c_are_told():
    def why(op="linear", dtype="float32", bits=8, group=0, columns=64, rows=1):
        return choose(Case(op, "cpu", dtype, bits, group, columns, rows)).refused
    assert why() == why("embedding", rows=10**6) == {}
    assert why(dtype="float64") == {"c": "numbers that are not float32, bfloat16 or float16"}
    assert why(bits=16) == {"c": "codes that are not of 2 to 8 bits"}
    assert why(columns=65537) == {"c": "not 1 to 65536 columns: 255 * 127 * 65536 < 2^31"}
    assert why(group=7, rows=3) == {"c": "more than 2 rows, and no integer kernel for such groups: torch was faster"}
    assert why(columns=8, rows=9) == {"c": "more than 8 rows of less than 16 columns: torch was faster"}


def what_runs(op, *args):
    """The kernels in C ask torch for a result's memory only, the references for other operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        getattr(torch.ops.inro_fx, op).inference(*args)
    names = {event.name for event in profile.events()}
    assert f"inro_fx::{op}" in names
    return "c" if names <= {f"inro_fx::{op}", "aten::empty_strided"} else "torch"


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [8, 64])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_what_the_table_says_is_what_runs(dtype, columns, rows):
    x, codes, scale, _ = operands(rows, columns, 8)
    x, whole, name = x.to(dtype), scale[:, :1], str(dtype).removeprefix("torch.")
    fixed = (codes.sum(1, keepdim=True, dtype=torch.int32), torch.tensor([[0.1]]), torch.tensor([[3]], dtype=torch.int32))
    calls = [("linear_dynamic", 8, 0, (x, codes, whole, None, columns)), ("linear_static", 8, 0, (x, codes, whole, *fixed, None, columns))]
    for bits, group in ((8, 0), (8, 7), (4, 4), (4, 0)):
        stored, scales = pack_bits(codes >> 8 - bits, bits) if bits < 8 else codes, torch.rand(8, -(-columns // group) if group else 1)
        calls += [("linear", bits, group, (x, stored, scales, None, bits, group, columns)),
                  ("embedding", bits, group, (torch.zeros(rows, dtype=torch.int64), stored, scales, bits, group, columns, dtype)),
                  ("dequantize", bits, group, (stored, scales, bits, group, columns, dtype))]
    for op, bits, group, args in calls:
        kernel = choose(Case(op, "cpu", name, bits, group, columns, rows)).kernel.name
        assert what_runs(op, *args) == kernel, (op, bits, group)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [4, 64, 512])
def test_what_the_table_says_is_what_runs_for_convolutions(dtype, channels):
    x, codes = torch.randn(1, channels, 8, 8, dtype=dtype), torch.randint(-127, 128, (channels, channels * 9), dtype=torch.int8)
    geometry = ([3, 3], [1, 1], [1, 1], [0, 0], [1, 1], 1, False)
    scale, formats = torch.rand(channels, 1) / 100, (torch.tensor([[0.02]]), torch.tensor([[3]], dtype=torch.int32))
    calls = {"conv": ("conv", (x, codes, scale, None, *geometry, False, 8, 0)), "conv_dynamic": ("conv", (x, codes, scale, None, *geometry, True, 8, 0)),
             "conv_static": ("conv_static", (x, codes, scale, *formats, *(None,) * 6, *geometry, 0, 0.0, 0.0, False, torch.float32))}
    for op, (called, args) in calls.items():
        case = Case(op, "cpu", str(dtype)[6:], 8, 0, channels * 9, 1, channels * 9 / 2)
        assert what_runs(called, *args) == choose(case).kernel.name, op


@pytest.mark.parametrize("wrong", [dict(codes=torch.ones(4, 35, dtype=torch.int8)), dict(scale=torch.ones(3, 1)), dict(bias=torch.ones(2)),
                                   dict(residual=torch.ones(1, 4, 7, 8)), dict(x=torch.ones(1, 5, 8, 8))], ids=range(5))
def test_convolutions_read_nothing_that_is_not_there(wrong):
    right = dict(x=torch.ones(1, 4, 8, 8), codes=torch.ones(4, 36, dtype=torch.int8), scale=torch.ones(4, 1), bias=torch.ones(4), residual=None) | wrong
    geometry = ([3, 3], [1, 1], [1, 1], [0, 0], [1, 1], 1, False)
    fixed = (torch.tensor([[0.02]]), torch.tensor([[3]], dtype=torch.int32))
    if right["residual"] is None:
        with pytest.raises(RuntimeError):
            torch.ops.inro_fx.conv(right["x"], right["codes"], right["scale"], right["bias"], *geometry, True, 8, 0)
    with pytest.raises(RuntimeError):
        torch.ops.inro_fx.conv_static(right["x"], right["codes"], right["scale"], *fixed, right["bias"], right["residual"], *(None,) * 4, *geometry, 0,
                                      0.0, 0.0, False, torch.float32)


def test_the_table_of_this_machine():
    assert len(LEVELS) == 4
    assert set(inro_fx.kernels()) == {"library", "linear", "linear_dynamic", "linear_static", "linear_groups", "embedding", "dequantize", *CONVOLUTIONS}


@needs_library
def test_a_torch_without_the_interface_runs_the_references(monkeypatch):
    from inro_fx.kernels import binding
    monkeypatch.setattr(binding, "TORCH_FUNCTIONS", (*binding.TORCH_FUNCTIONS, "torch_of_another_time|none"))
    library, reason = binding._load()
    assert library is None
    assert reason == f"torch {torch.__version__} has no torch_of_another_time"


@needs_library
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("rows", [97, 101, 200, 1999])
def test_chunks_of_any_size_give_the_same_bits(rows, levels):
    x, codes, scale, bias = operands(rows, 1100, 48)
    for level in range(best_level() + 1):
        want = linear_int8(x, codes, scale, bias, levels, level, 1)
        for threads in (2, 3, 5, 8):
            assert torch.equal(linear_int8(x, codes, scale, bias, levels, level, threads), want)


@pytest.mark.parametrize("rows", [1, 3, 30])
@pytest.mark.parametrize("scheme", ["int8", "int4", inro_fx.uniform(3, 16)], ids=str)
def test_infinity_goes_through_as_in_floats(scheme, rows):
    small = inro_fx.quantize_graph(torch.nn.Linear(64, 24), torch.randn(2, 64), scheme)
    x = torch.randn(rows, 64)
    x[0, 5] = float("inf")
    want = torch.nn.functional.linear(x, small.weight, small.bias)
    torch.testing.assert_close(small(x), want, rtol=1e-3, atol=1e-2, equal_nan=True)


@needs_library
@pytest.mark.parametrize("rows", [1, 5, 50])
def test_a_zero_point_leaves_zeros_exact(rows):
    codes = torch.randint(60, 128, (33, 4096), dtype=torch.int8)
    fixed = (torch.tensor([[0.037]]), torch.tensor([[-101]], dtype=torch.int32), codes.sum(1, keepdim=True, dtype=torch.int32))
    bias = torch.randn(33)
    for level in range(best_level() + 1):
        assert torch.equal(linear_int8(torch.zeros(rows, 4096), codes, torch.rand(33, 1), bias, 1, level, fixed=fixed), bias.expand(rows, 33))


@needs_library
def test_one_row_with_groups_keeps_small_codes_beside_large_inputs():
    codes = torch.randint(-1, 2, (8, 4096), dtype=torch.int8)
    x, scale = torch.rand(1, 4096) + 5, torch.ones(8, 128)
    want = torch.nn.functional.linear(x.double(), codes.double())
    assert (torch.ops.inro_fx.linear(x, codes, scale, None, 8, 32, 4096) - want).abs().max() < 0.05


@needs_library
def test_the_errors_of_references_are_told():
    codes, scale = torch.zeros(5, 8, dtype=torch.int8), torch.ones(5, 1)
    for group, empty in ((2**63 - 1, torch.zeros(1, 0)), (8, torch.zeros(5, 0))):
        with pytest.raises(RuntimeError):
            torch.ops.inro_fx.dequantize(codes, empty, 8, group, 8, torch.float32)
        with pytest.raises(RuntimeError):
            torch.ops.inro_fx.linear(torch.ones(1, 8), codes, empty, None, 8, group, 8)
    with pytest.raises(RuntimeError, match="8 columns are no weights of 9"):
        torch.ops.inro_fx.dequantize.reference(codes, scale, 8, 0, 9, torch.float32)
    if torch.__version__ >= "2.13":
        with pytest.raises(RuntimeError, match="out of range"):
            torch.ops.inro_fx.embedding(torch.tensor([7], dtype=torch.int32), codes, scale, 8, 0, 8, torch.float32)
        with pytest.raises(RuntimeError, match="8 columns are no weights of 9"):
            torch.ops.inro_fx.dequantize(codes, scale, 8, 0, 9, torch.float32)


def test_no_inputs_at_all():
    codes = torch.zeros(5, 0, dtype=torch.int8)
    bias = torch.randn(5)
    for op, rest in ((torch.ops.inro_fx.linear, (8, 0, 0)), (torch.ops.inro_fx.linear_dynamic, (0,))):
        assert torch.equal(op(torch.zeros(3, 0), codes, torch.ones(5, 1), bias, *rest), bias.expand(3, 5))


@needs_library
@pytest.mark.parametrize("rows", [1, 2, 3, 20])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("inner", [64, 100, 512])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16])
def test_groups_at_every_number_of_rows(rows, bits, group, inner, scale_dtype):
    g = torch.Generator().manual_seed(rows)
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (37, inner), generator=g, dtype=torch.int8)
    scale, x = torch.rand(37, -(-inner // group) if group else 1, generator=g) + 0.5, torch.rand(rows, inner, generator=g)
    scale = (scale * (torch.rand(scale.shape, generator=g) - 0.5).sign()).to(scale_dtype)          # of either sign
    stored = pack_bits(codes, bits) if bits < 8 else codes
    want = unscale(codes, scale, group, torch.float64)
    close(torch.ops.inro_fx.linear(x, stored, scale, None, bits, group, inner), torch.nn.functional.linear(x.double(), want).float())
    assert torch.equal(torch.ops.inro_fx.dequantize(stored, scale, bits, group, inner, torch.float32), want.float())
    ids = torch.tensor([[3, 36], [0, 3]])
    assert torch.equal(torch.ops.inro_fx.embedding(ids, stored, scale, bits, group, inner, torch.float32), want.float()[ids])


@needs_library
@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_halves_are_rounded_to_even(dtype, step):
    scale = (1 + step * torch.arange(128.0))[:, None]              # every other one lies half way between two numbers
    codes = torch.tensor([[1, -1, 2, -64] * 5], dtype=torch.int8).expand(128, 20).contiguous()
    assert torch.equal(torch.ops.inro_fx.dequantize(codes, scale, 8, 0, 20, dtype), (codes * scale).to(dtype))


# ---- rows of extreme sizes ----

EXTREME = [1e-44, 1e-38, 1e-36, 1e-34, 1e-30, 1e-28, 1e20, 1e28, 1e30, 1e36, 1e38]


def of_size(x, size):
    """Rows whose largest number is ``size``."""
    return (x.double() / x.abs().amax(1, keepdim=True) * size).to(x.dtype)


@needs_library
@pytest.mark.parametrize("rows", [1, 3, 14, 100])
@pytest.mark.parametrize("inner", [48, 77, 512])
def test_extreme_rows_have_the_same_bits_at_every_level(rows, inner):
    x, codes, scale, bias = operands(rows, inner, 37)
    scale, bias = scale / 1e4, bias * 0
    for size in EXTREME:
        mixed = x.clone()
        mixed[::2] = of_size(x[::2], size)
        want = dynamic_reference(mixed, codes, scale, bias)
        exact = mixed.double() @ (codes.double() * scale.double()).t()
        assert (want - exact).norm() < 0.03 * exact.norm() + 1e-44 * want.numel()
        assert torch.equal(torch.ops.inro_fx.linear_dynamic.reference(mixed, codes, scale, bias, inner), want)
        for level, threads in itertools.product(range(best_level() + 1), (1, 3)):
            assert torch.equal(linear_int8(mixed, codes, scale, bias, 1, level, threads), want)
        for level in range(best_level() + 1):
            got = linear_int8(mixed, codes, scale, bias, 2, level)
            assert torch.equal(got, linear_int8(mixed, codes, scale, bias, 2, level, 3))
            for rows_of in (slice(None, None, 2), slice(1, None, 2)):
                assert (got[rows_of] - exact[rows_of]).norm() <= 2e-4 * exact[rows_of].norm() + 1e-44 * want.numel()


@needs_library
def test_ordinary_rows_know_nothing_of_extreme_ones_beside_them():
    x, codes, scale, bias = operands(30, 64, 24)
    for levels, level, size in itertools.product((1, 2), range(best_level() + 1), EXTREME):
        mixed = x.clone()
        mixed[::3] = of_size(x[::3], size)
        mixed[1], mixed[4], mixed[7, 5] = 0, float("nan"), float("inf")
        got = linear_int8(mixed, codes, scale, bias, levels, level)
        assert torch.equal(got[1], bias)
        assert got[4].isnan().all()
        assert not got[7].isfinite().any()
        assert torch.equal(got[10::3], linear_int8(x, codes, scale, bias, levels, level)[10::3])


@needs_library
@pytest.mark.parametrize("size", [1e-36, 0.1, 1e30, 1e35])
@pytest.mark.parametrize("rows", [1, 5, 50])
def test_fixed_scales_of_extreme_sizes(rows, size):
    x, codes, scale, bias = operands(rows, 64, 24)
    fixed = (torch.tensor([[size / 30]]), torch.tensor([[5]], dtype=torch.int32), codes.sum(1, keepdim=True, dtype=torch.int32))
    scale, bias, x = scale / 1e3, bias * 0, of_size(x, size)
    want = torch.ops.inro_fx.linear_static.reference(x, codes, scale, fixed[2], *fixed[:2], bias, 64)
    exact = x.double() @ (codes.double() * scale.double()).t()
    assert (want - exact).norm() < 0.05 * exact.norm()
    for level in range(best_level() + 1):
        assert torch.equal(linear_int8(x, codes, scale, bias, 1, level, fixed=fixed), want)


RANGES = """if True:
    import torch, inro_fx
    torch.manual_seed(0)
    for dtype, allowed in ((torch.float32, 2e-4), (torch.bfloat16, 1e-2)):
        for scheme in ("int8", "int4", inro_fx.uniform(127, 32), inro_fx.uniform(3, 16), inro_fx.uniform(7, 7), inro_fx.uniform(50)):
            small = inro_fx.quantize_graph(torch.nn.Linear(512, 24, bias=False).to(dtype), torch.randn(2, 512, dtype=dtype), scheme)
            weight = small.weight.double()
            for size in (1e-36, 1e-34, 1e-30, 1e25, 1e30, 1e36, 5e37):
                for rows in (1, 2, 3, 130):
                    x = torch.randn(rows, 512).clamp(-3, 3)
                    x = torch.where(torch.arange(rows)[:, None] % 3 == 1, x, x * size).to(dtype)
                    want = x.double() @ weight.t()
                    error, floats = (((y.double() - want).norm(dim=1) / want.norm(dim=1)).max() for y in (small(x), x @ small.weight.t()))
                    assert error < max(allowed, 1.01 * floats), (dtype, scheme, size, rows, error)       # torch's bfloat16 has no denormals
"""


@pytest.mark.parametrize("setting", ["", "avx2", "portable", "off"])
def test_every_way_has_the_range_of_floats(setting):
    subprocess.run([sys.executable, "-W", "ignore", "-c", RANGES], check=True, env={**os.environ, "INRO_FX_KERNELS": setting}, timeout=300)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_group_of_more_columns_than_there_are_is_the_whole_row(rows, dtype):
    x, codes, scale, bias = operands(rows, 64, 16)
    x, bias = x.to(dtype), bias.to(dtype)
    for bits, group in itertools.product((3, 4, 8), (64, 65, 10**9, 2**63 - 1)):
        stored = pack_bits(codes >> 8 - bits, bits) if bits < 8 else codes
        assert torch.equal(torch.ops.inro_fx.linear(x, stored, scale, bias, bits, group, 64), torch.ops.inro_fx.linear(x, stored, scale, bias, bits, 0, 64))
        for op in ("dequantize", "embedding"):
            ids = (torch.tensor([3, 0]),) if op == "embedding" else ()
            call = getattr(torch.ops.inro_fx, op)
            assert torch.equal(call(*ids, stored, scale, bits, group, 64, dtype), call(*ids, stored, scale, bits, 0, 64, dtype))
        assert what_runs("linear", x, stored, scale, bias, bits, group, 64) == choose(Case("linear", "cpu", str(dtype)[6:], bits, group, 64, rows)).kernel.name


@needs_library
def test_the_dtype_decides_what_runs():
    assert [kernel_for("linear", 8, 0, 64, 1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)] == ["c", "c", "torch"]
    for dtype, name in ((torch.float32, "c"), (torch.float64, "torch"), (torch.bfloat16, "c")):
        model = torch.nn.Sequential(torch.nn.Embedding(10, 64), torch.nn.Linear(64, 8)).to(dtype)
        rows = inro_fx.report(inro_fx.quantize_graph(model, torch.tensor([[1, 2]]))).rows
        assert [row.kernel for row in rows] == [f"inro_fx.embedding/{name}", f"inro_fx.linear/{name}"]
