"""Capture: what becomes a graph, what stays Python and says why, and that neither is ever silently wrong."""

import collections
import copy
import dataclasses
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from models import relative
from torch import nn

import inro_fx
from inro_fx.passes.scheme import Identity


def net(forward, **children):
    """A module with these children and this forward(self, ...)."""
    module = type("Net", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def quantized(forward, *inputs, strict=False, scheme="int8", **children):
    model = net(forward, **(children or {"fc": nn.Linear(8, 8)})).eval()
    return model, inro_fx.quantize_graph(model, inputs, scheme, strict=strict)


def one_graph(small):
    report = inro_fx.report(small)
    return report.nodes > 0 and not report.regions


# ---- sizes ----

@pytest.mark.parametrize("forward", [
    lambda self, x: self.fc(x).view(*x.shape[:-1], 2, -1),
    lambda self, x: self.fc(x).reshape(x.size(0), -1),
    lambda self, x: self.fc(x) + torch.arange(x.shape[1], device=x.device).unsqueeze(-1),
    lambda self, x: self.fc(x) + torch.zeros(x.shape[0], x.shape[1], 8),
    lambda self, x: self.fc(x) * torch.ones(x.shape[:2], dtype=x.dtype).unsqueeze(-1),
    lambda self, x: self.fc(x)[:, : x.shape[1] // 2],
    lambda self, x: torch.cat([self.fc(x), x.new_zeros(x.size(0), 1, 8)], 1),
    lambda self, x: F.interpolate(self.fc(x).transpose(1, 2), size=x.shape[1] * 2).sum(-1),
    lambda self, x: self.fc(x).expand(2, *x.shape),
    lambda self, x: self.fc(x) / x.shape[1] ** 0.5,
    lambda self, x: self.fc(x).split(x.shape[1] // 2 + 1, 1)[0],
    lambda self, x: F.pad(self.fc(x), (0, 0, 0, x.shape[1] % 4)),
    lambda self, x: self.fc(x).masked_fill(torch.ones(x.shape[1], x.shape[1]).tril()[-1:].T == 0, 0.0),
    lambda self, x: self.fc(x).unflatten(-1, (2, 4)).flatten(1),
], ids=lambda f: str(f.__code__.co_firstlineno))
def test_sizes_stay_symbolic(forward):
    model, small = quantized(forward, torch.randn(2, 6, 8), strict=True)
    assert one_graph(small)
    for shape in ((2, 6, 8), (5, 6, 8), (1, 10, 8), (3, 4, 8)):
        x = torch.randn(shape)
        assert relative(model(x), small(x)) < 0.03


@pytest.mark.parametrize(("forward", "reason"), [
    (lambda self, x: self.fc(x) if x.shape[0] > 4 else -self.fc(x), "True"),
    (lambda self, x: sum(self.fc(x) for _ in range(x.shape[0])), "was traced with"),
    (lambda self, x: torch.stack([self.fc(row) for row in x.unbind(0)]), "was traced with"),
    (lambda self, x: self.fc(x) * len(x), "was traced with"),
    (lambda self, x: self.fc(x) * int(x.shape[0]), "was traced with"),
    (lambda self, x: self.fc(x) * min(x.shape[0], 4), "was traced with"),
    (lambda self, x: self.fc(x) * {2: 1.0, 7: 5.0}.get(int(x.size(0)), 3.0), "was traced with"),
], ids=range(7))
def test_a_branch_on_a_size_is_right_on_both_sides(forward, reason):
    model, small = quantized(forward, torch.randn(2, 8))
    for rows in (2, 3, 7, 1):
        x = torch.randn(rows, 8)
        assert relative(model(x), small(x)) < 0.03
    assert inro_fx.report(small).outside
    strict = inro_fx.quantize_graph(model, torch.randn(2, 8), strict=True)
    if inro_fx.report(strict).nodes:
        with pytest.raises(inro_fx.GraphNotTaken):
            strict(torch.randn(7, 8))


def test_an_assertion_on_shapes_holds_or_is_left_to_the_model():
    def forward(self, x):
        assert x.shape[-1] == 8, "wrong width"
        assert x.shape[0] < 5
        return self.fc(x)
    _, small = quantized(forward, torch.randn(2, 8))
    assert one_graph(small)
    with pytest.raises(AssertionError):
        small(torch.randn(6, 8))


# ---- values ----

@pytest.mark.parametrize("forward", [
    lambda self, x: self.fc(x) if x.sum() > 0 else -self.fc(x),
    lambda self, x: self.fc(x) * float(x.max()),
    lambda self, x: self.fc(x) if x.max().item() > 1 else self.fc(x) + 1,
    lambda self, x: self.fc(x)[: int(x[0, 0].abs()) + 1],
    lambda self, x: self.fc(x) if bool((x > 0).any()) else x,
    lambda self, x: self.fc(torch.from_numpy(x.numpy())),
], ids=range(6))
def test_code_that_depends_on_values_really_runs(forward):
    model, small = quantized(forward, torch.ones(3, 8))
    assert not one_graph(small)
    assert "" in dict(inro_fx.report(small).regions)
    for x in (torch.ones(3, 8), -torch.ones(3, 8), torch.randn(4, 8)):
        assert relative(model(x), small(x)) < 0.03
    assert [r.layer for r in inro_fx.report(small).rows] == ["fc"]


def test_a_number_read_from_a_tensor_may_flow_through_the_graph():
    model, small = quantized(lambda self, x: self.fc(x) * x.max().item(), torch.ones(3, 8), strict=True)
    assert one_graph(small)
    x = torch.randn(5, 8)
    assert relative(model(x), small(x)) < 0.03


def test_the_module_at_fault_stays_python_and_those_that_call_it():
    inner = net(lambda self, x: self.fc(x) if x.sum() > 0 else -self.fc(x), fc=nn.Linear(8, 8))
    model, small = quantized(lambda self, x: self.post(self.inner(self.pre(x))), torch.randn(2, 8), pre=nn.Linear(8, 8), inner=inner,
                             post=nn.Linear(8, 8))
    report = inro_fx.report(small)
    assert [path for path, _ in report.regions] == ["", "inner"]
    assert {p.layer for p in report.programs} == {"pre", "inner.fc", "post"}
    assert len(report.rows) == 3
    assert all(r.propagated is not None for r in report.rows)
    for x in (torch.randn(2, 8), torch.randn(5, 8) - 1):
        assert relative(model(x), small(x)) < 0.05


# ---- arguments and results ----

class Signature(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, scale=2.0, *, mask=None, flag=True):
        y = self.fc(x) * scale
        y = y if mask is None else y * mask
        return y if flag else -y


@pytest.mark.parametrize("call", [dict(), dict(scale=3.0), dict(mask=torch.ones(8)), dict(flag=False), dict(scale=2.0, mask=None, flag=True)])
@pytest.mark.parametrize("example", [torch.randn(2, 8), (torch.randn(2, 8),), {"x": torch.randn(2, 8)}, {"x": torch.randn(2, 8), "flag": False}])
def test_any_spelling_of_a_call(example, call):
    model = Signature()
    small = inro_fx.quantize_graph(model, example)
    x = torch.randn(3, 8)
    assert relative(model(x, **call), small(x, **call)) < 0.02
    assert relative(model(x=x, **call), small(x=x, **call)) < 0.02
    with pytest.raises(TypeError):
        small(x, nonsense=1)
    with pytest.raises(TypeError):
        small()


@pytest.mark.parametrize(("forward", "inputs"), [
    (lambda self, *xs: self.fc(sum(xs)), (torch.randn(2, 8), torch.randn(2, 8))),
    (lambda self, d: self.fc(d["a"]) + d["b"], ({"a": torch.randn(2, 8), "b": torch.randn(2, 8)},)),
    (lambda self, pair: self.fc(pair[0]) * pair[1][0], ((torch.randn(2, 8), [torch.randn(2, 8)]),)),
])
def test_structured_arguments(forward, inputs):
    model, small = quantized(forward, *inputs, strict=True)
    assert one_graph(small)
    assert relative(model(*inputs), small(*inputs)) < 0.02


def test_keyword_arguments_of_any_name():
    model = net(lambda self, **kw: self.fc(kw["a"]) + kw["b"], fc=nn.Linear(8, 8))
    inputs = {"a": torch.randn(2, 8), "b": torch.randn(2, 8)}
    small = inro_fx.quantize_graph(model, inputs, strict=True)
    assert relative(model(**inputs), small(**inputs)) < 0.02


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    extra: object = None


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize("wrap", [
    lambda y: (y, [y + 1], {"k": y * 2}), lambda y: Result(y, {"deep": [y + 1]}), lambda y: Pair(y, None), lambda y: collections.OrderedDict(a=y, b=3),
    lambda y: [y, y], lambda y: {"y": y, "n": y.shape[0], "s": "text"}, lambda y: y.max(-1), lambda y: y, lambda y: (y,),
], ids=range(9))
def test_results_are_rebuilt(wrap):
    model, small = quantized(lambda self, x: wrap(self.fc(x)), torch.randn(2, 8))
    assert one_graph(small)
    x = torch.randn(3, 8)
    want, got = model(x), small(x)
    assert type(want) is type(got)
    flat, spec = torch.utils._pytree.tree_flatten(want)
    flat_got, spec_got = torch.utils._pytree.tree_flatten(got)
    assert spec == spec_got
    for a, b in zip(flat, flat_got, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.shape == b.shape
        elif isinstance(a, Result):
            assert relative(a.value, b.value) < 0.02
            assert relative(a.extra["deep"][0], b.extra["deep"][0]) < 0.02
        else:
            assert a == b
    again = small(x)
    if isinstance(got, (list, dict)):
        assert again is not got                                    # fresh containers at each call


def test_a_cache_object_goes_to_the_models_own_code():
    class Cache:
        def __init__(self):
            self.seen = []

    def forward(self, x, cache=None):
        y = self.fc(x)
        if cache is not None:
            cache.seen.append(y)
            y = torch.cat(cache.seen)
        return y
    _, small = quantized(forward, torch.randn(2, 8))
    cache = Cache()
    assert small(torch.randn(1, 8), cache).shape == (1, 8)
    assert small(torch.randn(1, 8), cache).shape == (2, 8)
    assert sum(inro_fx.report(small).outside.values()) == 2


# ---- mutation and state ----

@pytest.mark.parametrize("forward", [
    lambda self, x: (lambda y: y + F.relu_(y))(self.fc(x)),
    lambda self, x: self.fc(x).add_(1).mul_(2),
])
def test_in_place_operators(forward):
    model, small = quantized(forward, torch.randn(2, 8))
    x = torch.randn(3, 8)
    assert relative(model(x.clone()), small(x.clone())) < 0.02


def test_in_place_on_slices_and_aliases():
    def forward(self, x):
        y = self.fc(x)
        alias = y
        y[:, 0] = 0
        y += 1
        out = torch.empty_like(y)
        out.copy_(alias)
        return self.fc(out)
    model, small = quantized(forward, torch.randn(2, 8))
    assert one_graph(small)
    x = torch.randn(4, 8)
    assert relative(model(x), small(x)) < 0.03


def test_the_callers_tensors_change_only_as_the_float_model_changes_them():
    def forward(self, x):
        x.add_(1)
        return self.fc(x)
    example = torch.zeros(2, 8)
    model, small = quantized(forward, example)
    assert example.abs().max() == 0
    a, b = torch.zeros(3, 8), torch.zeros(3, 8)
    assert relative(model(a), small(b)) < 0.02
    assert torch.equal(a, b)


def test_a_dict_argument_that_forward_fills():
    def forward(self, d):
        d["h"] = self.first(d["x"])
        return self.second(d["h"])
    model = net(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    inputs = {"x": torch.randn(2, 8)}
    small = inro_fx.quantize_graph(model, (inputs,))
    assert list(inputs) == ["x"]
    assert len(inro_fx.report(small).rows) == 2
    given = {"x": torch.randn(3, 8)}
    y = small(given)
    assert "h" in given
    assert relative(model({"x": given["x"]}), y) < 0.03


def test_state_written_in_forward():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))
            self.last = None

        def forward(self, x):
            self.count += 1
            self.last = self.fc(x)
            return self.last * self.count
    model = Counter()
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    assert model.count == 0
    assert model.last is None
    start = small.count.item()
    small(torch.randn(2, 8))
    small(torch.randn(2, 8))
    assert small.count == start + 2
    assert isinstance(small.last, torch.Tensor)


def test_mode_and_dropout():
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 8)).train()
    statistics = model[2].running_mean.clone()
    small = inro_fx.quantize_graph(model, torch.randn(4, 8))
    assert model.training
    assert all(m.training for m in model.modules())
    assert torch.equal(model[2].running_mean, statistics)
    x = torch.randn(4, 8)
    assert torch.equal(small(x), small(x))
    small.train()
    assert not torch.equal(small(x), small(x))                     # its own forward, with dropout
    assert torch.equal(small.eval()(x), small(x))
    assert relative(copy.deepcopy(model).eval()(x), copy.deepcopy(small).eval()(x)) < 2


def test_no_grad_blocks_keep_their_meaning():
    def forward(self, x):
        with torch.no_grad():
            y = self.first(x)
        return self.second(y) + x
    model = net(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    x = torch.randn(2, 8, requires_grad=True)
    small(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 8))
    assert one_graph(small)


@pytest.mark.parametrize("name", ["int8", "int8_dynamic"])
def test_autocast(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8), name)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert small(x).dtype == model(x).dtype == torch.bfloat16
    assert small(x).dtype == torch.float32


# ---- hooks, wrappers, shared and odd modules ----

def test_hooks_fire_in_the_result_and_never_with_proxies():
    seen = []
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda m, args, out: seen.append(type(out)))
    model.register_forward_hook(lambda m, args, out: seen.append("root"))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    assert set(seen) <= {torch.Tensor}
    seen.clear()
    small(torch.randn(2, 8))
    assert seen == [torch.Tensor, "root"]


@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.spectral_norm,
                                  torch.nn.utils.parametrizations.spectral_norm, torch.nn.utils.parametrizations.orthogonal])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_computed_weights_are_folded(wrap, before):
    model = nn.Sequential(wrap(nn.Linear(16, 8)), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(3, 16)
    if before:
        model(x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    small = inro_fx.quantize_graph(model, x)
    assert relative(model(x), small(x)) < 0.02
    assert [r.layer for r in inro_fx.report(small).rows] == ["0", "2"]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    model(x).sum().backward()                                      # the original still trains
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("key", ["class", "weight", "0", "a-b", "é", "lambda", "_graph", "code", "graph", "calls"])
def test_awkward_names(key):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({key: nn.Linear(8, 8)}) if key not in dir(nn.ModuleDict) else nn.ModuleDict()
            self.add_module(key, nn.Linear(8, 8)) if key.isidentifier() else None

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return self.get_submodule(key)(x) if key in self._modules else x
    model = Named()
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    x = torch.randn(3, 8)
    assert relative(model(x), small(x)) < 0.05
    assert any(key in r.layer for r in inro_fx.report(small).rows)


def test_names_of_the_user_are_not_overwritten():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 8)
            self.fc.register_buffer("weight_codes", torch.arange(3))
            self.fc.weight_scale = "mine"

        def forward(self, x):
            return self.fc(x) * self.fc.weight_codes.sum()
    model = Taken()
    small = inro_fx.quantize_graph(model, torch.randn(2, 16))
    assert torch.equal(small.fc.weight_codes, torch.arange(3))
    assert small.fc.weight_scale == "mine"
    x = torch.randn(3, 16)
    assert relative(model(x), small(x)) < 0.02


def test_weights_read_beside_the_call():
    def forward(self, x):
        return self.fc(x).relu() + self.fc.bias, (self.fc.weight ** 2).mean()
    model, small = quantized(forward, torch.randn(2, 8))
    x = torch.randn(3, 8)
    want, got = model(x), small(x)
    assert relative(want, got) < 0.02
    assert abs(want[1] - got[1]) < 0.01 * want[1]


def test_subclasses_of_linear():
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight * 2, self.bias) + 1
    for kind in (Same, Other):
        model = nn.Sequential(kind(8, 8), nn.ReLU())
        small = inro_fx.quantize_graph(model, torch.randn(2, 8))
        x = torch.randn(3, 8)
        assert relative(model(x), small(x)) < 0.02
        assert len(inro_fx.report(small).rows) == 1


def test_attributes_methods_and_class_survive():
    class Rich(nn.Module):
        kind = "rich"

        def __init__(self):
            super().__init__()
            self.fc, self.labels, self.config = nn.Linear(8, 8), ["a", "b"], Result(torch.zeros(1))

        @property
        def device(self):
            return self.fc.bias.device

        def __len__(self):
            return 3

        def generate(self, x):
            for _ in range(3):
                x = self(x)
            return x

        def encode(self, x):
            return self.fc(x).relu()

        def forward(self, x):
            return self.fc(x)
    model = Rich()
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    for q in (small, copy.deepcopy(small)):
        assert (q.labels, q.kind, len(q), q.device) == (["a", "b"], "rich", 3, torch.device("cpu"))
        assert isinstance(q, Rich)
        assert isinstance(q, torch.fx.GraphModule)
        x = torch.randn(2, 8)
        assert relative(model.generate(x), q.generate(x)) < 0.05
        assert relative(model.encode(x), q.encode(x)) < 0.02
        assert torch.equal(q(q(q(x))), q.generate(x))
    with pytest.raises(AttributeError, match="nonsense"):
        small.nonsense  # noqa: B018


def test_attention_in_all_its_forms():
    for options, call in [(dict(), {}), (dict(batch_first=True), {}), (dict(kdim=12, vdim=20), {}), (dict(bias=False), {}),
                          (dict(add_zero_attn=True, add_bias_kv=True), {}), (dict(), dict(need_weights=False)),
                          (dict(), dict(average_attn_weights=False))]:
        attention = nn.MultiheadAttention(16, 4, **options).eval()
        q, k, v = torch.randn(3, 3, 16), torch.randn(3, 3, options.get("kdim", 16)), torch.randn(3, 3, options.get("vdim", 16))
        masks = dict(key_padding_mask=torch.tensor([[False, False, True]] * 3), attn_mask=torch.ones(3, 3).triu(1) == 1)
        small = inro_fx.quantize_graph(attention, dict(query=q, key=k, value=v, **masks, **call))
        want, got = attention(q, k, v, **masks, **call), small(query=q, key=k, value=v, **masks, **call)
        assert relative(want, got) < 0.04
        assert (want[1] is None) == (got[1] is None)
        if want[1] is not None:
            assert relative(want[1], got[1]) < 0.04
        report = inro_fx.report(small)
        assert report.nodes > 0
        assert report.coverage > 0.9
        assert not any("weight" in n and t.is_floating_point() and "scale" not in n for n, t in small.state_dict().items())


def test_two_captures_at_once():
    """Patches of nn.Module are per thread: one thread's trace does not touch another's model."""
    failures = []

    def work(seed):
        try:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            for _ in range(5):
                small = inro_fx.quantize_graph(model, torch.randn(2, 8))
                x = torch.randn(3, 8)
                assert relative(model(x), small(x)) < 0.03
        except Exception as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert failures == []
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_callbacks_of_the_garbage_collector_are_no_traced_code():
    """They run at any moment, in the middle of forward, and may do what no graph can say."""
    heard = []

    def callback(phase, info):
        global _collections
        _collections = heard.append((phase, id(info), type(info) is dict, torch.compiler.is_compiling()))

    class Collects(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            a = [x.shape[0]]
            a.append(a)
            del a
            return self.fc(x)

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1, 1, 1)
    try:
        small = inro_fx.quantize_graph(Collects(), torch.randn(2, 16))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    assert heard
    assert inro_fx.report(small).regions == []


def wrapped(cls):
    """As libraries wrap the forward of their layers: keyword arguments in a closure, and a question for the outermost wrapper."""
    forward = cls.forward

    def outer(self, *args, **kwargs):
        outermost = type(self).forward is outer
        changed = dict(kwargs)

        def inner():
            changed["scale"] = changed.get("scale", 1.0) * (0.5 if outermost is None else 1.0)
            changed.setdefault("seen", args[0])
            return forward(self, *args, scale=changed["scale"])
        return inner()
    cls.forward = outer
    return cls


def test_layers_that_libraries_wrap_become_one_graph():
    @wrapped
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x, scale=1.0):
            q, k, v = self.qkv(x).chunk(3, -1)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0) * scale          # draws nothing
            return y[:, : y.shape[1]] if y.shape[1] > 1 else y

    model = nn.Sequential(Attention(), Attention()).eval()
    small = inro_fx.quantize_graph(model, torch.randn(2, 5, 16), strict=True)
    assert inro_fx.report(small).regions == []
    assert relative(model(torch.ones(1, 7, 16)), small(torch.ones(1, 7, 16))) < 0.05


def test_types_of_devices_and_results_in_closures_cost_no_graph():
    class Output(collections.OrderedDict):
        def names(self):
            return [key for key in self if self[key] is not None]           # self is in a closure on Python before 3.12

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            y = self.fc(x) if x.device.type in ("cpu", "mps") else self.fc(x.int())
            out = Output(y=y, none=None)
            out["names"] = len([key for key in out if (lambda: out[key])() is not None])
            return out

    small = inro_fx.quantize_graph(Experts().eval(), torch.randn(2, 16), strict=True)
    assert inro_fx.report(small).regions == []


def test_the_name_of_a_tensors_type_is_a_fact():
    right = net(lambda self, x: self.a(x.float()) if x.type() == "torch.FloatTensor" else self.b(x.float()), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    small = inro_fx.quantize_graph(right, torch.randn(2, 8))
    for x in (torch.randn(2, 8), torch.randn(2, 8, dtype=torch.float64), torch.ones(2, 8, dtype=torch.int64)):
        assert relative(right(x), small(x)) < 0.02


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_a_module_that_only_a_list_holds(frozen):
    hidden = [nn.Linear(8, 8).requires_grad_(not frozen)]
    model = net(lambda self, x: F.linear(self.fc(x), hidden[0].weight, hidden[0].bias), fc=nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8), Identity())
    assert one_graph(small)
    for _ in range(2):
        x = torch.randn(3, 8)
        assert torch.equal(small(x), model(x))
        with torch.no_grad():
            hidden[0].weight.mul_(2)
