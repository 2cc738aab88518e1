"""Numbers: scales, codes, packing and exact products, over random shapes and at the extremes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inro_fx
from inro_fx.numerics import int8_matmul, output_error, pack_bits, quantize_rows, storage_bits, unpack_bits, weight_error

GRANULARITIES = st.one_of(st.sampled_from(["channel", "tensor"]), st.integers(1, 40))
QUANT_MAX = st.one_of(st.integers(1, 200), st.sampled_from([2**15 - 1, 2**15, 2**20, 2**31 - 1, 2**40, 2**62, 2**63 - 1]))


@st.composite
def matrices(draw, low=0):
    rows, columns = draw(st.integers(max(low, 1), 9)), draw(st.integers(max(low, 1), 70))
    torch.manual_seed(draw(st.integers(0, 999)))
    w = torch.randn(rows, columns) * 10.0 ** draw(st.integers(-30, 30))
    if draw(st.booleans()):
        w[0] = 0
    return w


@given(matrices(), QUANT_MAX, GRANULARITIES)
def test_round_trip_is_within_the_bound_and_repeats_exactly(w, quant_max, granularity):
    scheme = inro_fx.uniform(quant_max, granularity)
    parts = scheme.pack(w)
    codes = scheme.integers(parts, w.shape[1])
    assert codes.abs().max() <= quant_max
    assert torch.isfinite(parts["scale"]).all()
    assert (parts["scale"] > 0).all()
    restored = scheme.unpack(parts, w.shape[1], w.dtype)
    assert restored.shape == w.shape
    assert restored.dtype == w.dtype
    assert ((restored - w).abs() <= scheme.bound(w)).all()
    again = scheme.pack(restored)
    if quant_max < 2**22:
        assert torch.equal(again["codes"], parts["codes"])
    assert torch.equal(scheme.unpack(again, w.shape[1], w.dtype), restored)


@given(matrices(), st.sampled_from([torch.float16, torch.bfloat16, torch.float64]), st.sampled_from(inro_fx.SCHEMES))
def test_other_dtypes(w, dtype, scheme):
    w = (w / w.abs().max().clamp(min=1e-30)).to(dtype)
    parts = scheme.pack(w)
    assert parts["scale"].dtype == torch.float32
    restored = scheme.unpack(parts, w.shape[1], dtype)
    assert restored.dtype == dtype
    assert ((restored - w).abs() <= scheme.bound(w)).all()


@pytest.mark.parametrize("scheme", [*inro_fx.SCHEMES, inro_fx.uniform(1)], ids=lambda s: s.name)
def test_zero_and_denormal_rows_stay_finite(scheme):
    w = torch.stack([torch.zeros(8), torch.full((8,), 1e-40), torch.eye(8)[3], torch.randn(8)])
    parts = scheme.pack(w)
    restored = scheme.unpack(parts, 8, torch.float32)
    assert torch.isfinite(restored).all()
    assert (parts["scale"] > 0).all()
    assert restored[0].abs().max() == 0


@given(st.integers(2, 7), st.integers(1, 6), st.integers(1, 40), st.integers(0, 99))
def test_packing_is_a_bijection(bits, rows, columns, seed):
    torch.manual_seed(seed)
    codes = torch.randint(-2 ** (bits - 1), 2 ** (bits - 1), (rows, columns), dtype=torch.int8)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape[1] <= math.ceil(columns * bits / 8) + 2
    assert torch.equal(unpack_bits(packed, bits, columns), codes)
    assert torch.equal(packed[1:], pack_bits(codes[1:], bits))               # rows are independent


@pytest.mark.parametrize(("low", "high", "bits"), [(-1, 1, 2), (-3, 3, 3), (-7, 7, 4), (-8, 7, 4), (-8, 8, 5), (-127, 127, 8), (-128, 127, 8),
                                                  (-128, 128, 16), (-2**31, 2**31 - 1, 32), (-2**63 + 1, 2**63 - 1, 64)])
def test_storage_bits(low, high, bits):
    assert storage_bits(low, high) == bits


@pytest.mark.parametrize("bad", [0, -3, 2**63, 1.5, True])
def test_impossible_quant_max(bad):
    with pytest.raises(inro_fx.SchemeError, match="quant_max"):
        inro_fx.uniform(bad)


@pytest.mark.parametrize("bad", ["row", 0, -1, 2.0, True])
def test_impossible_granularity(bad):
    with pytest.raises(inro_fx.SchemeError, match="granularity"):
        inro_fx.uniform(7, bad)


@given(st.integers(0, 40), st.integers(1, 3000), st.integers(1, 20), st.integers(0, 99))
def test_integer_products_are_exact(rows, inner, out, seed):
    torch.manual_seed(seed)
    a = torch.randint(-128, 128, (rows, inner), dtype=torch.int8)
    b = torch.randint(-128, 128, (out, inner), dtype=torch.int8)
    assert torch.equal(int8_matmul(a, b).long(), a.long() @ b.long().t())


@pytest.mark.parametrize("inner", [1, 64, 1024, 1025, 4096, 100_000])
def test_no_saturation_at_the_extremes(inner):
    for x in (-128, 127):
        a, b = torch.full((2, inner), x, dtype=torch.int8), torch.full((3, inner), -128, dtype=torch.int8)
        assert (int8_matmul(a, b) == -128 * x * inner).all()


def test_rows_of_zeros_and_of_nothing_finite():
    codes, scale = quantize_rows(torch.tensor([[0.0, 0.0], [1e-30, 0.0], [math.inf, 1.0], [math.nan, 1.0]]))
    assert scale[0] == 1
    assert codes[0].abs().max() == 0
    assert scale[2:].isnan().all()
    assert quantize_rows(torch.zeros(0, 5))[0].shape == (0, 5)


def test_errors():
    w = torch.tensor([[3.0, 4.0]])
    error = weight_error(w, lambda rows: torch.tensor([[3.0, 4.5]])[rows])
    assert (error.relative, error.largest) == (0.1, 0.5)
    assert error.sqnr == pytest.approx(20)
    assert weight_error(w, lambda rows: w[rows]).sqnr == math.inf
    assert weight_error(torch.zeros(2, 2), lambda rows: torch.zeros(2, 2)[rows]).relative == 0
    assert output_error(torch.tensor([1.0, -math.inf]), torch.tensor([1.0, -math.inf])) == 0
    assert output_error(torch.tensor([1.0, -math.inf]), torch.tensor([1.0, 0.0])) == math.inf
