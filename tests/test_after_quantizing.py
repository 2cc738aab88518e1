"""What is done to a quantized model afterwards: changed, copied, compiled, moved, pickled."""

import copy
import functools
import io
import itertools
import multiprocessing
import pickle
import types

import pytest
import torch
from models import SCHEMES, WITHIN, quantized, relative
from test_capture import net
from torch import nn

import inro_fx


def test_the_result_and_the_original_share_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    small = inro_fx.quantize_graph(model, x, overrides={"2": None})
    want = copy.deepcopy(model).eval()(x)
    small.half().requires_grad_(False)
    with torch.no_grad():
        [t.zero_() for t in (*small.parameters(), *small.buffers()) if t.is_floating_point()]
    assert torch.equal(model.eval()(x), want)
    assert all(p.requires_grad for p in model.parameters())


def test_a_child_that_is_replaced_changed_or_hooked_is_honoured():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(3, 8)

    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    small = inro_fx.quantize_graph(model, x)
    small[0] = Lora(small[0])
    assert relative(model[2](torch.relu(small[0](x))), small(x)) < 0.03
    small(x).sum().backward()
    assert small[0].a.weight.grad is not None

    small = inro_fx.quantize_graph(model, x)
    small[1] = nn.Identity()
    assert relative(model[2](model[0](x)), small(x)) < 0.03

    small = inro_fx.quantize_graph(model, x)
    seen = []
    small[1].register_forward_hook(lambda *a: seen.append(1))
    small(x)
    assert seen == [1]

    small = inro_fx.quantize_graph(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), x)
    small[1].train()
    assert (small(x) == 0).any()


def test_an_attribute_that_is_changed_is_honoured():
    model = net(lambda self, x: self.fc(x) * self.gain, fc=nn.Linear(8, 8))
    model.gain = 2.0
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    small.gain = 5.0
    x = torch.randn(2, 8)
    assert relative(model.fc(x) * 5, small(x)) < 0.02
    assert inro_fx.report(small).outside == {"self.gain was changed": 1}


def test_our_own_state_does_not_clash_with_the_models():
    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.strict, self.calls, self.graph, self.recompile, self.code, self.changed = True, [3], "mine", 3, nn.Linear(8, 8), "yes"

        def forward(self, x):
            return self.code(self.fc(x)) * self.recompile * len(self.calls) * self.strict
    model = Busy()
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    for q in (small, copy.deepcopy(small)):
        assert (q.strict, q.calls, q.graph, q.recompile, q.changed) == (True, [3], "mine", 3, "yes")
        assert isinstance(q.code, nn.Linear)
        x = torch.randn(3, 8)
        assert relative(model(x), q(x)) < 0.02


def test_the_class_of_the_result_makes_float_models():
    class Made(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.fc = nn.Linear(width, width)

        @classmethod
        def make(cls, width):
            return cls(width)

        def forward(self, x):
            return self.fc(x)
    small = inro_fx.quantize_graph(Made(), torch.randn(2, 8))
    fresh = small.make(4)
    assert type(fresh) is Made
    assert isinstance(small, Made)
    assert fresh(torch.randn(1, 4)).shape == (1, 4)


def linear(inner=16, out=16, **kwargs):
    return nn.Linear(inner, out, **kwargs)


def agrees(model, small, *inputs, within=0.03):
    want, got = model(*inputs), small(*inputs)
    return relative(want, got) < within


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, linear(16, 2, bias=False), linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def small_net():
    return inro_fx.quantize_graph(nn.Sequential(linear(), nn.ReLU(), nn.Sequential(linear()), nn.Dropout(0.5)), torch.randn(3, 16))


CHANGES = {
    "replaced": lambda q: q.__setitem__(0, Lora(q[0])),
    "another activation": lambda q: q.__setitem__(1, nn.Tanh()),
    "hooked": lambda q: q[1].register_forward_hook(lambda m, a, out: out * 2),
    "appended": lambda q: q.append(nn.Softmax(-1)),
    "appended below": lambda q: q[2].append(nn.Softmax(-1)),
    "deleted": lambda q: q.__delitem__(1),
    "patched": lambda q: setattr(q[1], "forward", torch.tanh),
    "attribute below": lambda q: setattr(q[3], "p", 0.25),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_changes_below_are_honoured_also_by_copies_compiled_and_exported(name):
    small, x = small_net(), torch.randn(3, 16)
    CHANGES[name](small)
    want = functools.reduce(lambda y, module: module(y), small, x)
    assert torch.equal(small(x), want)
    assert sum(inro_fx.report(small).outside.values()) == 1
    if name not in ("hooked", "patched"):                          # lambdas and builtins do not pickle, or compile, by name
        assert torch.equal(pickle.loads(pickle.dumps(small))(x), want)
    assert torch.equal(copy.deepcopy(small)(x), want)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(small, backend="eager", fullgraph=True)(x), want)
    torch.testing.assert_close(torch.export.export(small, (x,)).module()(x), want)


def test_a_bias_that_is_given_later_is_honoured():
    x = torch.randn(3, 16)
    for where in ("inside", "itself"):
        small = inro_fx.quantize_graph(nn.Sequential(linear(bias=False), nn.ReLU()) if where == "inside" else linear(bias=False), x)
        layer = small[0] if where == "inside" else small
        before = small(x)
        layer.bias = nn.Parameter(torch.full((16,), 100.0))
        assert not torch.equal(small(x), before)
        assert (layer(x) > 50).all()


class Config:
    def __init__(self):
        self.k, self.more = 2.0, {"z": 1}


def reads(self, x):
    y = self.fc(x) * self.config.k * self.table["k"] * self.items[0] * self.vector
    return y * getattr(self, "extra", 1.0) if self.mask is None else y * self.mask


SETTINGS = {
    "config attribute": lambda m: setattr(m.config, "k", 5.0),
    "config": lambda m: setattr(m, "config", types.SimpleNamespace(k=7.0)),
    "dict entry": lambda m: m.table.update(k=5.0),
    "dict": lambda m: setattr(m, "table", {"k": 3.0}),
    "list entry": lambda m: m.items.__setitem__(0, 5.0),
    "plain tensor": lambda m: setattr(m, "vector", torch.full((16,), 3.0)),
    "plain tensor in place": lambda m: m.vector.fill_(3.0),
    "new attribute": lambda m: setattr(m, "extra", 9.0),
    "buffer that was None": lambda m: setattr(m, "mask", torch.full((16,), 3.0)),
    "deleted": lambda m: delattr(m, "vector"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_honoured(name):
    model = net(reads, fc=linear())
    model.config, model.table, model.items, model.vector = Config(), {"k": 2.0}, [2.0], torch.full((16,), 2.0)
    type(model).vector = None
    type(model).vector = torch.ones(16)                            # what is found after the deletion
    model.register_buffer("mask", None)
    small = inro_fx.quantize_graph(model, torch.randn(3, 16))
    x = torch.randn(3, 16)
    assert agrees(model, small, x)
    assert not inro_fx.report(small).outside
    SETTINGS[name](model)
    SETTINGS[name](small)
    assert agrees(model, small, x)


def test_a_tensor_as_default_argument_is_an_argument():
    default = torch.full((16,), 2.0)
    model = net(lambda self, x, w=default: self.fc(x) * w, fc=linear())
    small = inro_fx.quantize_graph(model, torch.randn(3, 16), strict=True)
    x = torch.randn(3, 16)
    assert agrees(model, small, x)
    assert agrees(model, small, x, torch.randn(16))


def test_attributes_methods_and_class_are_still_there():
    class Speaker(nn.Module):
        kind = "speaker"

        def __init__(self):
            super().__init__()
            self.fc, self.config, self.labels = nn.Linear(16, 16), {"a": 1}, ["x"]

        @property
        def device(self):
            return self.fc.bias.device

        def forward(self, x):
            return self.fc(x)

        def generate(self, x):
            for _ in range(3):
                x = self(x)
            return x

        def encode(self, x):
            return torch.relu(self.fc(x))

        def __len__(self):
            return 7
    model, x = Speaker(), torch.randn(2, 16)
    small = quantized(model, x)
    for q in (small, copy.deepcopy(small)):
        assert (q.kind, q.config, q.labels, q.device.type, len(q)) == ("speaker", {"a": 1}, ["x"], "cpu", 7)
        assert isinstance(q, Speaker)
        assert torch.equal(q.generate(x), q(q(q(x))))
        assert relative(model.encode(x), q.encode(x)) < 0.02


def in_another_process(queue, path):
    small, x, y = torch.load(path, weights_only=False)
    queue.put(bool(torch.equal(small(x), y)))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_spawned(method, tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(2, 16)
    small = quantized(model, x)
    torch.save((small, x, small(x)), tmp_path / "m.pt")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=in_another_process, args=(queue, str(tmp_path / "m.pt")))
    worker.start()
    assert queue.get(timeout=120)
    worker.join()


def test_the_state_dict_holds_plain_tensors_and_everything():
    a, b = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2))
    x = torch.randn(2, 16)
    first_, second = quantized(a, x), quantized(b, x)
    file = io.BytesIO()
    torch.save(first_.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert all(type(t) is torch.Tensor for t in state.values())
    second.load_state_dict(state)
    assert torch.equal(first_(x), second(x))
    for missing in ("0.weight_scale", "0.bias"):
        with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
            second.load_state_dict({k: v for k, v in state.items() if k != missing})
        second.load_state_dict({k: v for k, v in state.items() if k != missing}, strict=False)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"foreign"'):
        second.load_state_dict({**state, "foreign": x})


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to(torch.float16), lambda m: m.cpu(), lambda m: m.half().float()])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_casting_the_result(move, scheme):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model[0].weight.data.mul_(1e-6)                                # the scales would be zero in half precision
    x = torch.randn(4, 32)
    small = move(quantized(model, x, scheme))
    dtype = small[0].bias.dtype
    y = small(x.to(dtype))
    assert y.dtype == dtype
    assert relative(model(x), y) < WITHIN[scheme] + 0.02
    assert {t.dtype for n, t in small.state_dict().items() if "scale" in n} == {torch.float32}
    assert not any(t.is_floating_point() for n, t in small.state_dict().items() if "codes" in n)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_optimizers_of_graphs_do_not_undo_the_quantization():
    model, x = nn.Sequential(nn.Linear(256, 256)), torch.randn(4, 256)
    small = quantized(model, x)
    program = torch.export.export(small, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    assert len(file.getvalue()) < 0.45 * 256 * 256 * 4
    core = program.run_decompositions()
    assert any(t.dtype == torch.int8 for t in core.state_dict.values())
    torch.testing.assert_close(core.module()(x), small(x))
    torch._dynamo.reset()
    import torch._inductor.config as inductor
    with inductor.patch(freezing=True), torch.no_grad():
        torch.testing.assert_close(torch.compile(small)(x), small(x))
    assert small[0].weight_codes.dtype == torch.int8


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_changing_batch_compiles_at_most_twice():
    import torch._dynamo.testing
    small = quantized(nn.Linear(128, 256), torch.randn(2, 64, 128))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(small, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 1, 2, 5, 17):
        x = torch.randn(batch, 64, 128)
        torch.testing.assert_close(compiled(x), small(x))
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("capture", ["auto", "export"])
def test_a_result_can_be_exported(capture):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(3, 16)
    small = quantized(model, x, capture=capture)
    program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.testing.assert_close(program.module()(torch.randn(0, 16).new_ones(7, 16)), small(torch.ones(7, 16)))
    torch.testing.assert_close(program.run_decompositions().module()(x), small(x))


@pytest.mark.parametrize("inside", list(itertools.product((torch.inference_mode, torch.no_grad, torch.enable_grad), repeat=2)), ids=lambda i: "-".join(c.__name__ for c in i))
def test_inference_mode_around_quantizing_and_running(inside):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(3, 16)
    want = quantized(model, x)(x)
    with inside[0]():
        small = quantized(model, x)
    with inside[1]():
        assert torch.equal(small(x), want)
    other = copy.deepcopy(small).to(torch.float64)
    other.load_state_dict(small.state_dict())
    assert relative(want, other(x.double())) < 1e-3


def test_low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))
    x = torch.randn(4, 16)
    whole = quantized(Adapted(nn.Linear(16, 16)), x, overrides={"a": None, "b": None})
    assert {r.layer for r in inro_fx.report(whole).rows} == {"base"}
    around = Adapted(quantized(nn.Linear(16, 16), x))
    before = around(x).detach()
    optimizer = torch.optim.SGD([p for p in around.parameters() if p.requires_grad], 0.1)
    around(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(around(x), before)
    with pytest.raises(inro_fx.ModelError, match="quantize the model again with the new weight"):
        around.base.weight = nn.Parameter(around.base.weight + around.b.weight @ around.a.weight)


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_and_optimizers(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        body = quantized(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16))
        model = nn.Sequential(nn.Linear(16, 16), body, nn.Linear(16, 2))
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(parallel.parameters())
        before = [p.detach().clone() for p in parallel.parameters()]
        parallel(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, parallel.parameters(), strict=True))
    finally:
        torch.distributed.destroy_process_group()
    body.requires_grad_(True)
    assert all(b.requires_grad is False for n, b in body.named_buffers())


@pytest.mark.parametrize(("make", "shape"), [(lambda: nn.Linear(32, 8), (2, 32)), (lambda: nn.Conv2d(4, 8, 3), (2, 4, 6, 6)), (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (2, 5, 16))])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_gives_the_dtype_of_the_float_model(make, shape, scheme):
    model, x = make().eval(), torch.randn(shape)
    small = quantized(model, x, scheme)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert small(x).dtype == model(x).dtype
        assert relative(model(x), small(x)) < WITHIN[scheme] + 0.03
    low = quantized(copy.deepcopy(model).bfloat16(), x.bfloat16(), scheme)
    for call in (model.bfloat16(), low):
        with pytest.raises(RuntimeError):
            call(x)


def test_a_default_device_or_dtype_while_quantizing():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16)
    want = quantized(model, x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            small = quantized(model, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(want.state_dict().values(), small.state_dict().values(), strict=True))


def test_weights_without_data_are_refused_before_any_work():
    for model, message in ((nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, device="meta")), r"1\.weight is on the meta device"),
                           (nn.Linear(16, 16, device="meta"), "weight is on the meta device"), (nn.Sequential(nn.LazyLinear(4)), r"0\.weight is not initialized")):
        with pytest.raises(inro_fx.ModelError, match=message):
            inro_fx.quantize_graph(model, torch.randn(2, 16))


def test_the_original_stays_as_it_was_and_a_second_time_gives_the_same():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)).train()
    model[0].weight.requires_grad_(False)
    model[2].weight.grad = torch.ones(16, 16)
    handle = model[0].register_forward_hook(lambda *a: None)
    def snapshot():
        return (model.training, [p.requires_grad for p in model.parameters()], list(model[0]._forward_hooks), model[2].weight.grad.sum().item(), torch.get_rng_state().tolist(),
                [id(p) for p in model.parameters()], [t.tolist() for t in model.state_dict().values()])
    before = snapshot()
    small, again = (inro_fx.quantize_graph(model, torch.ones(4, 16)) for _ in range(2))
    assert snapshot() == before
    assert all(torch.equal(a, b) for a, b in zip(small.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(inro_fx.ModelError, match="already quantized"):
        inro_fx.quantize_graph(small, torch.ones(4, 16))
    handle.remove()


def test_versions_of_torch_out_of_range_are_refused(monkeypatch):
    import importlib
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer; this is torch 2\.10\.1"):
        importlib.reload(inro_fx)
