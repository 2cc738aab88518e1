"""Static quantization: observers, prepare_graph, convert_graph, calibration data of every kind."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, Sliced, Tied, relative
from test_capture import net
from torch import nn

import inro_fx
from inro_fx.kernels import best_level, linear_int8
from inro_fx.observers import OBSERVERS

CHANNELS = (inro_fx.MinMaxObserver, inro_fx.MovingAverageObserver)


def batches(count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 16, generator=generator) * 2.0 ** (i % 4 - 2) + i % 3 for i in range(count)]


def state(observer):
    return {k: v.clone() for k, v in observer.state_dict().items()}


# ---- observers ----

@pytest.mark.parametrize("kind", OBSERVERS)
@pytest.mark.parametrize("cut", range(7))
def test_two_halves_merge_to_the_whole(kind, cut):
    whole, first, second = (OBSERVERS[kind]() for _ in range(3))
    for i, x in enumerate(batches()):
        whole(x)
        (first if i < cut else second)(x)
    first.merge(second)
    for name, value in state(whole).items():
        torch.testing.assert_close(state(first)[name], value, rtol=1e-5, atol=1e-6)
    if kind in ("histogram", "percentile"):
        assert torch.equal(first.counts, whole.counts)             # exactly
    torch.testing.assert_close(torch.stack(first.range()), torch.stack(whole.range()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["minmax", "histogram", "percentile"])
def test_the_order_of_the_data_does_not_matter(kind):
    a, b = OBSERVERS[kind](), OBSERVERS[kind]()
    for x in batches():
        a(x)
    for x in reversed(batches()):
        b(x)
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30), min_size=1, max_size=5))
def test_histograms_count_everything_once_whatever_the_range(data):
    observer = inro_fx.HistogramObserver()
    for values in data:
        observer(torch.tensor(values))
    assert int(observer.counts.sum()) == sum(map(len, data))
    low, high = (float(v) for v in observer.range())
    assert min(map(min, data)) - 1e-3 <= low <= 0.02 * max(0, min(map(min, data))) + abs(low)
    assert float(observer.low) == pytest.approx(min(map(min, data)), rel=1e-6)
    assert low <= high
    everything = torch.tensor([v for values in data for v in values]).double()
    direct = torch.bincount((torch.floor(everything * observer._per_unit()) + 2048).long(), minlength=4096)
    assert torch.equal(observer.counts, direct)


@pytest.mark.parametrize("kind", CHANNELS)
def test_channels_are_kept_apart(kind):
    observer = kind(axis=-1)
    for x in batches():
        assert observer(x) is x
    assert observer.low.shape == (16,)
    if kind is inro_fx.MinMaxObserver:
        assert torch.equal(observer.high, torch.cat(batches()).amax(0))


@pytest.mark.parametrize("make", [*OBSERVERS.values(), lambda: inro_fx.MovingAverageObserver(axis=1)])
def test_ranges_stay_exact_in_a_model_of_another_dtype(make):
    observer = make()
    observer(batches()[0])
    before = state(observer)
    observer.to(torch.bfloat16)
    assert all(torch.equal(t, state(observer)[n]) and t.dtype == state(observer)[n].dtype for n, t in before.items())
    observer(batches()[1].bfloat16())
    assert torch.isfinite(torch.stack(observer.range())).all()


def test_channels_that_are_loaded_into_an_observer_of_none_are_refused():
    channels, whole = inro_fx.MinMaxObserver(axis=1), inro_fx.MinMaxObserver()
    channels(batches()[0])
    with pytest.raises(RuntimeError, match="size mismatch for low"):
        whole.load_state_dict(channels.state_dict())


def test_a_few_outliers_are_clipped_and_counted():
    x = torch.randn(100_000)
    x[:5] = 1000.0
    by_kind = {}
    for kind in OBSERVERS:
        observer = OBSERVERS[kind]()
        observer(x)
        by_kind[kind] = float(observer.range()[1]), observer.clipped(*map(float, observer.range()))
    assert by_kind["minmax"] == (1000.0, 0.0)
    assert by_kind["percentile"][0] < 10
    assert 0 < by_kind["percentile"][1] < 0.001
    tight = torch.cat([torch.randn(100_000), torch.tensor([30.0])])
    observer = inro_fx.HistogramObserver()
    observer(tight)
    assert 3 < float(observer.range()[1]) < 30


@pytest.mark.parametrize("kind", OBSERVERS)
def test_what_an_observer_refuses(kind):
    observer = OBSERVERS[kind]()
    with pytest.raises(inro_fx.InputError, match="no calibration data reached this layer"):
        observer.range()
    assert observer(torch.zeros(0, 4)).shape == (0, 4)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(inro_fx.InputError, match="the calibration data holds NaN or infinity"):
            observer(torch.tensor([1.0, bad]))
    with pytest.raises(inro_fx.InputError, match="cannot merge"):
        observer.merge(next(o for n, o in OBSERVERS.items() if n != kind)())
    observer(torch.zeros(3))
    assert [float(v) for v in observer.range()] == pytest.approx([0, 0], abs=1e-30)
    again = pickle.loads(pickle.dumps(copy.deepcopy(observer)))
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in observer.state_dict().items())


# ---- the operator ----

@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(0, 40), inner=st.integers(1, 90), out=st.integers(1, 40), zero=st.integers(-127, 127), bias=st.booleans(), seed=st.integers(0, 99))
def test_the_kernel_equals_the_reference_at_every_level_and_thread_count(rows, inner, out, zero, bias, seed):
    from inro_fx.ops.linear_static import reference
    g = torch.Generator().manual_seed(seed)
    x, codes = torch.randn(rows, inner, generator=g) * 3, torch.randint(-127, 128, (out, inner), generator=g).to(torch.int8)
    scale, b = torch.rand(out, 1, generator=g), torch.randn(out, generator=g) if bias else None
    fixed = (torch.tensor([[0.04]]), torch.tensor([[zero]], dtype=torch.int32), codes.sum(1, keepdim=True, dtype=torch.int32))
    want = reference(x, codes, scale, fixed[2], fixed[0], fixed[1], b, inner)
    if best_level() < 0:
        return
    results = [linear_int8(x, codes, scale, b, 1, level=level, threads=threads, fixed=fixed) for level in range(best_level() + 1) for threads in (1, 2, 3)]
    assert all(torch.equal(r, results[0]) for r in results)
    torch.testing.assert_close(results[0], want, rtol=1e-5, atol=1e-4)


def test_gradients_stop_at_the_clip():
    x = torch.linspace(-4, 4, 16).reshape(1, 16).requires_grad_()
    model = nn.Linear(16, 8)
    small = inro_fx.quantize_graph(model, torch.ones(1, 16), inro_fx.static("minmax", symmetric=True), calibration=[torch.linspace(-2, 2, 16)[None]])
    small(x).sum().backward()
    inside = x.detach().abs() <= 2.01
    torch.testing.assert_close(x.grad, small.weight.sum(0, keepdim=True) * inside)


# ---- prepare, calibrate, convert ----

@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("name", ["mlp", "sliced", "matmuls", "conv1d", "encoder", "attention", "repeated", "value_branch", "tied", "convolutions", "recurrent"])
def test_the_three_steps_and_the_one_give_the_same(name, observer):
    model, inputs = MODELS[name]()
    call = inputs if isinstance(inputs, tuple) else (inputs,)
    before = copy.deepcopy(model.state_dict())
    scheme = inro_fx.static(observer)
    once = inro_fx.quantize_graph(model, inputs, scheme, calibration=[call, call])
    prepared = inro_fx.prepare_graph(model, inputs, scheme)
    assert isinstance(prepared, type(model))
    for _ in range(2):
        want, got = model.eval()(*call), prepared(*call)
        assert relative(want, got) < 1e-4
    prepared = pickle.loads(pickle.dumps(copy.deepcopy(prepared)))
    small = inro_fx.convert_graph(prepared)
    assert all(torch.equal(a, b) for a, b in zip(once.state_dict().values(), small.state_dict().values(), strict=True))
    assert relative(model(*call), small(*call)) < 0.1
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    again = inro_fx.convert_graph(prepared)                          # still the prepared one
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), small.state_dict().values(), strict=True))
    assert relative(model(*call), prepared(*call)) < 1e-5


def test_observers_are_in_the_graph_and_calls_outside_of_it_are_seen_too():
    model = net(lambda self, x: self.b(torch.relu(self.a(x))) if x.shape[0] > 2 else self.a(x), a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    prepared = inro_fx.prepare_graph(model, torch.randn(4, 16), inro_fx.static("minmax"))
    assert "a_weight_observer" in prepared.code.replace(".", "_")
    prepared(torch.full((2, 16), 9.0))
    assert float(prepared.a.weight_observer.high) == 9.0
    with pytest.raises(inro_fx.InputError, match="b: no calibration data reached this layer"):
        inro_fx.convert_graph(prepared)
    prepared(torch.randn(4, 16))
    small = inro_fx.convert_graph(prepared)
    assert [r.kernel.partition("/")[0] for r in inro_fx.report(small).rows] == ["inro_fx.linear_static"] * 2
    assert relative(model(torch.full((2, 16), 9.0)), small(torch.full((2, 16), 9.0))) < 0.05


def test_rows_of_a_packed_projection_share_one_range():
    small = inro_fx.quantize_graph(Sliced(), torch.randn(2, 3, 8), "int8_static", calibration=[torch.randn(2, 3, 8) for _ in range(3)])
    assert small.w_input_scale.shape == (1, 1)
    assert small.w_sums.shape == (24, 1)
    assert str(small.code).count("linear_static.default(") == 3


def test_weights_that_are_not_used_by_linears_alone_keep_float_inputs():
    model, ids = Tied(), torch.randint(0, 40, (2, 5))
    report = inro_fx.report(inro_fx.quantize_graph(model, ids, "int8_static", calibration=[ids]))
    assert {r.layer: r.scheme for r in report.rows} == {"table": "int8", "middle": "int8_static", "head": "int8"}
    assert {r.observer for r in report.rows} == {"", "histogram"}
    text = str(report)
    assert "clipped" in text and "histogram" in text


def test_calibration_data_of_every_kind():
    model, x = MODELS["mlp"]()
    for data in ([torch.randn(n, 16) for n in (1, 7, 3)], iter([torch.randn(2, 16)]), ((torch.randn(2, 16),) for _ in range(3)),
                 torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(9, 16)), batch_size=4), [{"input": x}]):
        assert relative(model(x), inro_fx.quantize_graph(model, x, "int8_static", calibration=data)(x)) < 0.3
    for data, message in (([], "calibration gives no inputs"), (None, "needs calibration data"), ([torch.randn(2, 15)], "the model does not run on batch 0 of calibration"),
                          ([x, torch.full((2, 16), float("nan"))], "0: the calibration data holds NaN or infinity")):
        with pytest.raises(inro_fx.InputError, match=message):
            inro_fx.quantize_graph(model, x, "int8_static", calibration=data)


def test_wrong_models():
    model, x = MODELS["mlp"]()
    with pytest.raises(inro_fx.ModelError, match=r"was not made by inro_fx.prepare_graph"):
        inro_fx.convert_graph(model)
    with pytest.raises(inro_fx.SchemeError, match="unknown observer 'best': the observers are minmax"):
        inro_fx.static("best")
    small = inro_fx.quantize_graph(model, x, "int8_static", calibration=[x])
    with pytest.raises(inro_fx.ModelError, match="already quantized"):
        inro_fx.prepare_graph(small, x)


def test_a_static_model_is_saved_with_its_ranges(tmp_path):
    model, x = MODELS["encoder"]()
    small = inro_fx.quantize_graph(model, x, inro_fx.static("percentile"), calibration=[x])
    again = inro_fx.load(inro_fx.save(small, tmp_path / "m.safetensors"), model)
    assert torch.equal(again(x), small(x))
    assert str(inro_fx.report(again)) == str(inro_fx.report(small))
    assert torch.equal(small.half().float().eval()(x).half(), small(x).half())


def test_a_row_does_not_depend_on_the_others_and_half_precision_is_taken():
    model, x = MODELS["mlp"]()
    small = inro_fx.quantize_graph(model, x, "int8_static", calibration=[x, 10 * x])
    assert torch.equal(small(torch.cat([x, 100 * x]))[:5], small(x))
    low = copy.deepcopy(small).bfloat16()
    assert relative(small(x), low(x.bfloat16())) < 0.02


# ---- several processes ----

def observe_half(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in OBSERVERS:
        model = nn.Sequential(OBSERVERS[kind]())
        for x in batches()[rank * 3:rank * 3 + 3]:
            model(x)
        inro_fx.all_reduce_observers(model)
        torch.save(model.state_dict(), f"{folder}/{kind}{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_two_processes_with_half_of_the_data_each(tmp_path):
    torch.multiprocessing.spawn(observe_half, (str(tmp_path),), nprocs=2)
    for kind in OBSERVERS:
        whole = nn.Sequential(OBSERVERS[kind]())
        for x in batches():
            whole(x)
        for rank in range(2):
            for name, value in torch.load(tmp_path / f"{kind}{rank}.pt").items():
                torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-5, atol=1e-6)


# ---- torch.ao as an oracle ----

@pytest.mark.filterwarnings("ignore")
def test_ranges_and_errors_beside_those_of_torch_ao():
    ao = pytest.importorskip("torch.ao.quantization")
    if not hasattr(ao, "HistogramObserver"):
        pytest.skip("this torch has no torch.ao observers any more")
    data = [F.gelu(torch.randn(64, 256, generator=torch.Generator().manual_seed(i))) for i in range(8)]
    theirs, ours = ao.MinMaxObserver(), inro_fx.MinMaxObserver()
    average, our_average = ao.MovingAverageMinMaxObserver(averaging_constant=0.01), inro_fx.MovingAverageObserver(0.01)
    histogram, our_histogram = ao.HistogramObserver(), inro_fx.HistogramObserver()
    for x in data:
        for observer in (theirs, ours, average, our_average, histogram, our_histogram):
            observer(x)
    assert (ours.low, ours.high) == (theirs.min_val, theirs.max_val)
    torch.testing.assert_close(our_average.low, average.min_val)
    torch.testing.assert_close(our_average.high, average.max_val)
    everything = torch.cat(data)

    def loss(low, high):
        step = (high - low) / 254
        return ((everything.clamp(low, high) - low).div(step).round().mul(step).add(low) - everything).square().mean().item()
    low, high = (float(v) for v in our_histogram.range())
    scale, zero = histogram.calculate_qparams()
    assert loss(min(low, 0), max(high, 0)) <= 1.02 * loss(float(-zero * scale), float((255 - zero) * scale))


@pytest.mark.filterwarnings("ignore")
def test_the_static_error_is_not_larger_than_that_of_torch_ao():
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    from torch.ao.quantization import get_default_qconfig_mapping
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)).eval()
    data = [torch.randn(64, 64) for _ in range(8)]
    prepared = quantize_fx.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), data[0])
    for x in data:
        prepared(x)
    theirs = quantize_fx.convert_fx(prepared)
    ours = inro_fx.quantize_graph(model, data[0], "int8_static", calibration=data)
    x = torch.randn(256, 64)
    assert relative(model(x), ours(x)) <= relative(model(x), theirs(x))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.0, 5.0), (-2.0, 0.0), (-1e-3, 1e3)])
def test_the_ends_of_a_range_are_the_extreme_codes(low, high):
    scheme = dataclasses.replace(inro_fx.schemes.find_scheme("int8_static"), low_input=low, high_input=high)
    scale, zero = scheme.input_parts()
    assert abs(low / scale + zero + 127) <= 0.5
    assert abs(high / scale + zero - 127) <= 0.51
