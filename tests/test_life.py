"""The life of a result: copies, casts, saving, compiling, exporting, training beside it."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch._dynamo.testing
from models import MODELS, Tied, example, first, relative
from torch import nn

import inro_fx


def unique_bytes(model):
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values()}.values())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "carriers"])
def test_copies_equal_and_share_nothing(name, way):
    model, inputs = MODELS[name]()
    args, kwargs = example(inputs)
    small = inro_fx.quantize_graph(model, inputs)
    twin = way(small)
    assert torch.equal(first(twin(*args, **kwargs)), first(small(*args, **kwargs)))
    assert str(inro_fx.report(twin)).split("\n\n")[0] == str(inro_fx.report(small)).split("\n\n")[0]
    assert unique_bytes(twin) == unique_bytes(small)
    assert not {t.data_ptr() for t in twin.state_dict().values()} & {t.data_ptr() for t in small.state_dict().values() if t.numel()}
    assert torch.equal(first(twin.train().eval()(*args, **kwargs)), first(small(*args, **kwargs)))


def test_tied_weights_are_stored_once_and_stay_tied():
    model = Tied()
    ids = torch.randint(0, 40, (2, 5))
    small = inro_fx.quantize_graph(model, ids)
    assert sorted(small.state_dict()) == ["middle.bias", "middle.weight_codes", "middle.weight_scale", "table.weight_codes", "table.weight_scale"]
    for q in (small, copy.deepcopy(small), copy.deepcopy(small).to(torch.float64).float()):
        q.table.weight_codes.zero_()
        assert q.head.weight.abs().max() == 0
    left = inro_fx.quantize_graph(model, ids, overrides={"head": None})
    assert torch.equal(left.head.weight, model.head.weight)
    reason = next(s.reason for s in inro_fx.report(left).skipped)
    assert "overrides['head'] leaves it float" in reason
    assert "nothing is saved" in reason


def test_safe_torch_save_and_load():
    model, x = MODELS["mlp"]()
    small = inro_fx.quantize_graph(model, x)
    other = inro_fx.quantize_graph(MODELS["mlp"]()[0], x)
    assert not torch.equal(other(x), small(x))
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), small(x))
    incomplete = dict(list(small.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(incomplete)
    before = {n: t.clone() for n, t in other.state_dict().items()}
    for strict in (True, False):
        for holder, of in ((other, model), (nn.ModuleDict({"a": other}), nn.ModuleDict({"a": model}))):
            with pytest.raises(inro_fx.StateError, match=r"0.weight in this state_dict is a float weight, and the model holds codes"):
                holder.load_state_dict(of.state_dict(), strict=strict)
    assert all(torch.equal(before[n], t) for n, t in other.state_dict().items())


def test_a_new_process_that_has_only_imported_the_package(tmp_path):
    small = inro_fx.quantize_graph(*MODELS["encoder"]())
    x = torch.randn(3, 4, 16)
    torch.save((small, x, small(x)), tmp_path / "all.pt")
    code = f"import torch, inro_fx; m, x, y = torch.load({str(tmp_path / 'all.pt')!r}, weights_only=False); assert torch.equal(m(x), y)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["mlp", "tied", "convolutions", "sliced", "value_branch"])
def test_casts(name, dtype):
    model, inputs = MODELS[name]()
    model.eval()
    small = inro_fx.quantize_graph(model, inputs)
    before = {n: t.dtype for n, t in small.state_dict().items()}
    cast = copy.deepcopy(small).to(dtype)
    for n, t in cast.state_dict().items():
        kept = not before[n].is_floating_point or n.endswith("_scale")
        assert t.dtype == (before[n] if kept else dtype)
    args, _ = example(inputs)
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    got = first(cast(*args))
    assert got.dtype == dtype
    assert relative(first(model(*example(inputs)[0])), got) < 0.05
    back = cast.float()
    assert first(back(*example(inputs)[0])).dtype == torch.float32


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4"])
def test_compile_without_breaks_and_few_compilations(scheme):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8, 64), scheme)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(small, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 1, 5, 17):
        x = torch.randn(batch, 8, 64)
        torch.testing.assert_close(compiled(x), small(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["mlp", "tied", "encoder", "conv1d", "convolutions"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_of_the_result(name):
    model, inputs = MODELS[name]()
    small = inro_fx.quantize_graph(model, inputs)
    args, kwargs = example(inputs)
    program = torch.export.export(small, args, kwargs, dynamic_shapes=tuple({0: torch.export.Dim.AUTO} for _ in args))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(first(loaded(*args)), first(small(*args)))
    grown = tuple(torch.cat([a, a]) for a in args)
    torch.testing.assert_close(first(loaded(*grown)), first(small(*grown)))
    assert any(t.dtype == torch.int8 for t in program.state_dict.values())


@pytest.mark.parametrize("quantize_inside", [False, True])
@pytest.mark.parametrize("run_inside", [False, True])
def test_inference_mode(quantize_inside, run_inside):
    model, x = MODELS["encoder"]()
    model.eval()
    with torch.inference_mode(quantize_inside):
        small = inro_fx.quantize_graph(model, x)
    with torch.inference_mode(run_inside):
        y = small(x)
    assert relative(model(x), y) < 0.02
    copy.deepcopy(small).to(torch.float64).load_state_dict(small.state_dict())


def test_training_beside_and_below():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    below, a, b = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    x = torch.randn(4, 8)
    h = below(x)
    (small(h) + b(a(h))).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in (*below.parameters(), *a.parameters(), *b.parameters()))
    small.requires_grad_(True)
    torch.optim.SGD(small.parameters(), 0.1).step()


def test_checkpointing():
    small = inro_fx.quantize_graph(*MODELS["mlp"]())
    x = torch.randn(3, 16, requires_grad=True)
    torch.utils.checkpoint.checkpoint(small, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_float_weights_are_released():
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
    weights = [weakref.ref(layer.weight) for layer in model]
    small = inro_fx.quantize_graph(model, torch.randn(2, 128))
    del model
    gc.collect()
    assert [w() for w in weights] == [None] * 6
    assert inro_fx.report(small).quantized_bytes < 0.3 * 6 * 128 * 129 * 4


def test_nothing_grows_over_many_rounds():
    model, x = MODELS["mlp"]()

    def round_():
        inro_fx.quantize_graph(model, x)(x)
    for _ in range(3):
        round_()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        round_()
    gc.collect()
    assert len(gc.get_objects()) - before < 400


def test_calibration_batches_are_what_errors_are_measured_on():
    model, x = MODELS["mlp"]()
    few = inro_fx.report(inro_fx.quantize_graph(model, x))
    many = inro_fx.report(inro_fx.quantize_graph(model, x, calibration=[torch.randn(7, 16) for _ in range(4)]))
    assert few.rows[0].weight_error == many.rows[0].weight_error
    assert few.rows[0].isolated != many.rows[0].isolated
    with pytest.raises(inro_fx.InputError, match="calibration gives no inputs"):
        inro_fx.quantize_graph(model, x, calibration=[])
