"""What Python learns about a value holds for the next call too, or the graph does not answer it: never silently another answer."""

import contextlib
import copy
import enum
import functools
import json
import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import relative
from test_capture import net
from torch import nn
from torch.utils._pytree import tree_flatten

import inro_fx
from inro_fx.passes.scheme import Identity


def layers(*names, size=8):
    return {name: nn.Linear(size, size).requires_grad_(False) for name in names}


def alike(a, b):
    """The same structure of the same bits, and the same about gradients."""
    (xs, spec), (ys, other) = tree_flatten(a), tree_flatten(b)
    return spec == other and all(
        type(x) is type(y) and (x.dtype, x.shape, x.requires_grad, x.is_inference()) == (y.dtype, y.shape, y.requires_grad, y.is_inference())
        and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) if isinstance(x, torch.Tensor) else x == y for x, y in zip(xs, ys, strict=True))


def answer(model, call, seed=1):
    """What the caller sees of a call: the result or the kind of error, the arguments afterwards, the random state."""
    args = copy.deepcopy(call)
    torch.manual_seed(seed)
    try:
        result = model(*args)
    except Exception as error:
        result = type(error)
    return result, args, torch.get_rng_state()


def right(model, example, *calls, covered=True, strict=False):
    """The quantized model does what the float model does, and a strict one does it or refuses before anything has happened."""
    model.eval()
    small = inro_fx.quantize_graph(model, copy.deepcopy(example), Identity())
    reference = copy.deepcopy(model)
    for i, call in enumerate((example, *calls, example)):
        assert alike(answer(reference, call), answer(small, call)), f"call {i}"
    assert not covered or inro_fx.report(small).coverage == 1
    if not strict:
        return
    small, reference = inro_fx.quantize_graph(model, copy.deepcopy(example), Identity(), strict=True), copy.deepcopy(model)
    for i, call in enumerate((example, *calls)):
        got = answer(small, call)
        if i and got[0] is inro_fx.GraphNotTaken:
            assert alike(got[1:], answer(lambda *_: None, call)[1:]), "it refuses after something had happened"
        else:
            assert alike(answer(reference, call), got), f"strict call {i}"


# ---- facts about values that are neither arguments nor constants ----

def squeezed(self, x):
    y = x.squeeze()
    return self.a(y) if y.dim() == 2 else self.b(y)[None]


def unpacked_shape(self, x):
    try:
        _, n, _ = x.squeeze(1).shape
    except ValueError:
        n = 5
    return self.a(x) * n


def broadcast(self, x, y):
    z = x + y
    return self.a(z) if z.ndim == 1 else self.b(z).sum(0)


def promoted(self, x, y):
    z = x * y
    return self.a(z) if z.dtype == torch.float32 else self.b(z.float())


def transposed(self, x):
    return self.a(x) if x.t().is_contiguous() else self.b(x)


def strides(self, x):
    return self.a(x) if x.stride(0) == 8 else self.b(x)


def same_object(self, x):
    y = x.contiguous()
    return self.a(y) if y is x else self.b(y)


def converted(self, x):
    return self.a(x.float()) if x.float() is x else self.b(x.float())


def selected(self, x):
    rows = x[x[:, 0] > 0]
    return self.a(rows) if len(rows) > 1 else self.b(x)


def found(self, x):
    return sum(self.a(x[i]) for i, _ in (x > 1).nonzero().tolist()) + self.b(x).sum(0)


def distinct(self, x):
    return self.a(x) * torch.unique(x[:, 0].round()).numel()


def two_lengths(self, x, y):
    z = torch.cat([x, y])
    return self.a(z) if z.shape[0] == 2 * x.shape[0] else self.b(z)


def rows(*counts):
    return [(torch.randn(n, 8),) for n in counts]


def steps(*counts):
    return [(torch.randn(2, n, 8),) for n in counts]


@pytest.mark.parametrize(("forward", "example", "calls"), [
    (squeezed, rows(4)[0], rows(1, 3, 2)),
    (unpacked_shape, (torch.randn(4, 3, 8),), [(torch.randn(4, 1, 8),), (torch.randn(2, 5, 8),)]),
    (broadcast, (torch.randn(8), torch.randn(8)), [(torch.randn(8), torch.randn(3, 8)), (torch.randn(1, 8), torch.randn(8))]),
    (promoted, (torch.ones(2, 8).int(), torch.randn(2, 8)), [(torch.ones(2, 8).int(), torch.randn(2, 8).double()), (torch.ones(2, 8).int(), torch.ones(2, 8).int())]),
    (transposed, rows(4)[0], [*rows(1, 3), (torch.randn(8, 8).t(),)]),
    (strides, rows(4)[0], [(torch.randn(4, 16)[:, ::2],), (torch.randn(8, 4).t(),)]),
    (same_object, rows(4)[0], [(torch.randn(8, 4).t(),), *rows(4)]),
    (converted, rows(4)[0], [(torch.randn(4, 8).double(),), *rows(2)]),
    (selected, (torch.ones(4, 8),), [(-torch.ones(4, 8),), *rows(6, 1)]),
    (found, (torch.ones(4, 8).mul_(torch.eye(4, 8)).mul(2),), [(torch.zeros(4, 8),), (torch.full((2, 8), 3.0),)]),
    (distinct, (torch.ones(4, 8),), [(torch.arange(4.0).repeat(8, 1).t(),), (torch.zeros(2, 8),)]),
    (two_lengths, (torch.randn(2, 8), torch.randn(2, 8)), [(torch.randn(2, 8), torch.randn(3, 8)), (torch.randn(4, 8), torch.randn(4, 8))]),
], ids=lambda v: getattr(v, "__name__", ""))
def test_facts_about_intermediate_values(forward, example, calls):
    right(net(forward, **layers("a", "b")), example, *calls, strict=True)


# ---- what a child that stays Python returns ----

class Answer:
    def __init__(self, kind):
        self.kind = kind


GATES = {
    "none": (lambda self, x: None if x.sum() > 0 else x * 2, lambda self, x, g: self.a(x) if g is None else self.b(x) * g),
    "string": (lambda self, x: "a" if x.sum() > 0 else "b", lambda self, x, g: getattr(self, g)(x)),
    "keys": (lambda self, x: {"a": x} if x.sum() > 0 else {"b": x}, lambda self, x, g: self.a(x) if "a" in g else self.b(g["b"])),
    "length": (lambda self, x: [x] if x.sum() > 0 else [x, -x], lambda self, x, g: sum(self.a(y) for y in g) + self.b(x)),
    "rank": (lambda self, x: x if x.sum() > 0 else x[None], lambda self, x, g: self.a(g) if g.dim() == 2 else self.b(g)[0]),
    "type": (lambda self, x: x if x.sum() > 0 else (x, x), lambda self, x, g: self.a(g) if isinstance(g, torch.Tensor) else self.b(g[1])),
    "dtype": (lambda self, x: x if x.sum() > 0 else x.double(), lambda self, x, g: self.a(g) if g.dtype == torch.float32 else self.b(x)),
    "size": (lambda self, x: x if x.sum() > 0 else x[:1], lambda self, x, g: self.a(g) if g.shape[0] == x.shape[0] else self.b(g)),
    "number": (lambda self, x: 2 if x.sum() > 0 else 3, lambda self, x, g: sum(self.a(x) for _ in range(g)) + self.b(x)),
    "truth": (lambda self, x: bool(x.sum() > 0), lambda self, x, g: self.a(x) if g else self.b(x)),
    "object": (lambda self, x: Answer("a" if x.sum() > 0 else "b"), lambda self, x, g: getattr(self, g.kind)(x)),
    "function": (lambda self, x: torch.sin if x.sum() > 0 else torch.exp, lambda self, x, g: self.b(g(self.a(x)))),
    "its argument": (lambda self, x: x if x.sum() > 0 else x.clone(), lambda self, x, g: self.a(x) if g is x else self.b(g)),
}


@pytest.mark.parametrize("kind", GATES)
def test_what_a_child_that_stays_python_returns(kind):
    gate, use = GATES[kind]
    child = net(gate)
    if kind in ("none", "keys", "rank"):
        child = net(lambda self, x: self.inner(x), inner=child)
    x = torch.rand(2, 8)
    right(net(lambda self, x: use(self, x, self.gate(x)), gate=child, **layers("a", "b")), (x,), (-x,), *rows(3, 4), (x[:1],), strict=True)


# ---- guards of scopes that were given up ----

def loops(self, x, n):
    for _ in range(n):
        x = x + 1
    return x if x.sum() > 0 else -x


def compares(self, x, n):
    y = x + 1 if n > 2 else x - 1
    return y if y.sum() > 0 else -y


def asks_rank(self, x, mask):
    y = x + 1 if mask.dim() == 1 else x - 1
    return y if y.sum() > 0 else -y


def asks_none(self, x, mask):
    y = x + 1 if mask is None else x - 1
    return y if y.sum() > 0 else -y


SCOPES = {
    "size": (loops, lambda self, x, n: sum(self.fc(x) + 2 for _ in range(n)), (torch.ones(2, 2, 8),), [(torch.ones(2, 3, 8),), *steps(3, 1)]),
    "comparison": (compares, lambda self, x, n: self.fc(x) if n > 2 else -self.fc(x), (torch.ones(2, 2, 8),), [(torch.ones(2, 3, 8),), *steps(3, 1)]),
    "rank": (asks_rank, lambda self, x, m: self.fc(x) if m.dim() == 1 else self.fc(-x), (torch.ones(2, 8), torch.ones(8)), [(torch.ones(2, 8), torch.ones(2, 8))]),
    "none": (asks_none, lambda self, x, m: self.fc(x) if m is None else self.fc(-x), (torch.ones(2, 8), None), [(torch.ones(2, 8), torch.ones(8))]),
}


@pytest.mark.parametrize("order", ["before", "after", "sibling"])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_guard_of_a_scope_that_was_given_up_still_guards(scope, order):
    inner, outer, example, calls = SCOPES[scope]

    def forward(self, x, *rest):
        asked = rest[0] if rest else x.shape[1]
        if order == "before":
            return outer(self, self.inner(x, asked), asked)
        return self.inner(outer(self, x, asked) if order == "after" else self.other(x, asked), asked) + self.inner(x, asked)
    right(net(forward, inner=net(inner), other=net(outer, **layers("fc")), **layers("fc")), example, *calls, covered=False, strict=True)


# ---- numbers handed down ----

PARENTS = {
    "loops": lambda self, x, n: sum(self.child(self.a(x), n) for _ in range(n)),
    "loops and says the name": lambda self, x, n: sum(self.child(self.a(x), n=n) for _ in range(n)),
    "branches on values": lambda self, x, n: self.child(self.a(x), n) if x.sum() > 0 else self.child(x, n),
}
CHILDREN = {
    "loop": lambda self, x, n: sum(F.linear(x, self.w) * (i + 1) for i in range(n)),
    "branch": lambda self, x, n: F.linear(x, self.w) if n > 2 else -F.linear(x, self.w),
    "loop around a value": lambda self, x, n: sum(self.inner(F.linear(x, self.w)) for _ in range(n)),
    "arithmetic": lambda self, x, n: F.linear(x, self.w) * n + n / 2,
}


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("parent", PARENTS)
def test_a_number_that_is_handed_to_a_child(parent, child):
    below = net(CHILDREN[child], inner=net(lambda self, x: x if x.sum() > 0 else -x))
    below.w = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    right(net(lambda self, x: PARENTS[parent](self, x, x.shape[1]), child=below, **layers("a")), (torch.ones(2, 2, 8),), (-torch.ones(2, 2, 8),), *steps(3, 1))


@pytest.mark.parametrize("pack", [lambda n: [n, n], lambda n: {"n": n}, lambda n: Answer(n), lambda n: functools.partial(int, n)], ids=["list", "dict", "object", "partial"])
def test_a_number_that_is_handed_to_a_child_inside_of_something(pack):
    def child(self, x, packed):
        n = packed[0] if isinstance(packed, list) else packed["n"] if isinstance(packed, dict) else packed.kind if isinstance(packed, Answer) else packed()
        return sum(F.linear(x, self.w) for _ in range(n))
    below = net(child)
    below.w = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    right(net(lambda self, x: sum(self.child(self.a(x), pack(n)) for n in [x.shape[1]] for _ in range(n)), child=below, **layers("a")), *steps(2, 3, 1))


# ---- a size turned into something else ----

CHOICES = {                                                    # the example goes to the last, h3
    "str": lambda self, n: getattr(self, "h" + str(n), self.h3),
    "fstring": lambda self, n: self.by_name[f"h{n}"] if f"h{n}" in self.by_name else self.h3,
    "percent": lambda self, n: getattr(self, "h%s" % n, self.h3),  # noqa: UP031
    "format": lambda self, n: getattr(self, "h{}".format(n), self.h3),  # noqa: UP032
    "repr": lambda self, n: getattr(self, f"h{n!r}", self.h3),
    "type": lambda self, n: self.h3 if type(n) is int else self.h2,
    "hash": lambda self, n: self.h2 if hash(n) == 2 else self.h3,
    "key": lambda self, n: {1: self.h1, 2: self.h2}.get(n, self.h3),
    "key of a tuple": lambda self, n: {(1, 8): self.h1, (2, 8): self.h2}.get((n, 8), self.h3),
    "set": lambda self, n: self.h2 if n in {2, 4} else self.h3,
    "index": lambda self, n: self.h2 if operator.index(n) == 2 else self.h3,
    "bits": lambda self, n: self.h3 if n & 1 else self.h2,
    "json": lambda self, n: getattr(self, "h" + json.dumps(n), self.h3),
    "numpy": lambda self, n: self.h2 if np.int64(n) == 2 else self.h3,
    "match": lambda self, n: getattr(self, matched(n)),
    "log": lambda self, n: self.h2 if math.log2(n) == 1 else self.h3,
}


def matched(n):
    match n:
        case 1:
            return "h1"
        case 2:
            return "h2"
    return "h3"


@pytest.mark.parametrize("choose", CHOICES)
def test_a_layer_chosen_by_a_size(choose):
    ask = {"hash": lambda x: len(x[0]), "type": lambda x: x.size(1)}.get(choose, lambda x: x.shape[1])
    model = net(lambda self, x: CHOICES[choose](self, ask(x))(x), **layers("h1", "h2", "h3"))
    model.by_name = nn.ModuleDict({n: getattr(model, n) for n in ("h1", "h2", "h3")})
    right(model, *steps(5, 2, 1))


@pytest.mark.parametrize("choose", [
    lambda self, x: self.b if str(x.shape) == "torch.Size([2, 2, 8])" else self.a,
    lambda self, x: self.b if x.shape == (2, 2, 8) else self.a,
    lambda self, x: {torch.Size([2, 2, 8]): self.b}.get(x.shape, self.a),
    lambda self, x: self.b if x.shape.numel() == 32 else self.a,
    lambda self, x: self.b if type(x.shape) is torch.Size and x.shape[:2] == torch.Size([2, 2]) else self.a,
    lambda self, x: self.b if hash(x.shape) == hash(torch.Size([2, 2, 8])) else self.a,
    lambda self, x: self.b if x.shape == torch.zeros(2, 2, 8).shape else self.a,
], ids=["str", "tuple", "dict key", "numel", "slice", "hash", "another shape"])
def test_a_layer_chosen_by_a_shape(choose):
    right(net(lambda self, x: choose(self, x)(x), **layers("a", "b")), *steps(5, 2, 1))


# ---- one object or two, one memory or two ----

def is_same(self, x, y):
    return self.a(x) if x is y else self.b(x) + y


def is_same_by_id(self, x, y):
    return self.a(x) if id(x) == id(y) else self.b(x) + y


def is_among(self, x, y):
    return self.a(x) if any(x is t for t in [y]) else self.b(x) + y


def same_address(self, x, y):
    return self.a(x) if x.data_ptr() == y.data_ptr() else self.b(x) + y


def writes_one(self, x, y):
    y.add_(1)
    return self.a(x) + self.b(y)


def writes_a_slice(self, x, y):
    y[:1] = 0
    return self.a(x) + self.b(y)


def writes_between(self, x, y):
    before = self.a(x)
    y.mul_(2)
    return before + self.b(x)


def pairs():
    x, y, wide = torch.randn(2, 8), torch.randn(2, 8), torch.randn(4, 8)
    return {"one": (x, x), "two": (x, y), "overlapping": (wide[:2], wide[1:3]), "equal": (x, x.clone()), "views": (wide[:2], wide[:2])}


@pytest.mark.parametrize("example", ["one", "two"])
@pytest.mark.parametrize("forward", [is_same, is_same_by_id, is_among, same_address, writes_one, writes_a_slice, writes_between])
def test_arguments_that_are_one_object_or_share_memory(forward, example):
    calls = pairs()
    right(net(forward, **layers("a", "b")), calls[example], *[c for n, c in calls.items() if n != example])


@pytest.mark.parametrize("name", ["table", "plain"])
@pytest.mark.parametrize("forward", [lambda self, x: self.a(x) if x is self.table or x is self.plain else self.b(x), lambda self, x: self.a(x.add_(1)) + self.table + self.plain], ids=["is", "written"])
def test_an_argument_that_is_the_models_own_tensor(forward, name):
    model = net(forward, **layers("a", "b")).eval()
    model.register_buffer("table", torch.randn(2, 8))
    model.plain = torch.randn(2, 8)
    reference = copy.deepcopy(model)
    small = inro_fx.quantize_graph(model, torch.randn(2, 8), Identity())
    x = torch.randn(2, 8)
    for _ in range(2):
        assert torch.equal(small(getattr(small, name)), reference(getattr(reference, name)))
        assert torch.equal(small(x.clone()), reference(x.clone()))
        assert torch.equal(getattr(small, name), getattr(reference, name))


def test_an_argument_that_is_returned_is_the_callers():
    model = net(lambda self, x, y: (x, self.a(x), [y]), **layers("a"))
    small = inro_fx.quantize_graph(model, (torch.randn(2, 8), torch.randn(2, 8)), Identity())
    x, y = torch.randn(3, 8), torch.randn(1, 8)
    for args in ((x, y), (x, x)):
        got = small(*args)
        assert got[0] is args[0]
        assert got[2][0] is args[1]


# ---- tensors of the model replaced by others ----

def counts(self, x):
    return sum((self.fc(x) * (i + 1) for i in range(self.table.shape[0])), x.new_zeros(()))


def iterates(self, x):
    return sum(self.fc(x) * t for t in self.table)


def asks_the_rank(self, x):
    return self.fc(x) if self.table.dim() == 1 else -self.fc(x)


def asks_the_dtype(self, x):
    return self.fc(x) if self.table.dtype == torch.float32 else -self.fc(x)


def asks_for_none(self, x):
    return self.fc(x) if self.table is not None else -self.fc(x)


def sizes_new_ones(self, x):
    return self.fc(x) + torch.arange(len(self.table)).sum() * torch.ones(len(self.table)).sum()


REPLACED = {
    "set": lambda m, t: setattr(m, "table", t),
    "registered": lambda m, t: m.register_buffer("table", t),
    "dict": lambda m, t: (m._buffers if "table" in m._buffers else m.__dict__).update(table=t),
    "data": lambda m, t: setattr(m.table, "data", t),
    "resized": lambda m, t: m.table.resize_(t.shape).copy_(t),
    "pointed elsewhere": lambda m, t: m.table.set_(t),
}
REPLACEMENTS = {"counts": (counts, torch.arange(8.0)), "iterates": (iterates, torch.arange(8.0)), "rank": (asks_the_rank, torch.ones(2, 2)), "dtype": (asks_the_dtype, torch.ones(4).double()),
                "none": (asks_for_none, None), "sizes": (sizes_new_ones, torch.arange(7.0))}
ASKED_OF = {                    # what is computed from the tensor, alone and with an input, and what is asked of that
    "numel": (lambda t, x: t.numel(), torch.arange(6.0)), "size of a product": (lambda t, x: (t * 2).size(0), torch.arange(6.0)),
    "pieces": (lambda t, x: len(t.unbind()), torch.arange(6.0)), "pieces of a sum": (lambda t, x: len((t + 1).split(2)), torch.arange(6.0)),
    "rank": (lambda t, x: (t * 2).dim(), torch.ones(2, 3)), "rank of a sum": (lambda t, x: (t[..., :1] + x).dim(), torch.ones(2, 1, 3)),
    "dtype": (lambda t, x: (t * 2).dtype.itemsize, torch.ones(4).double()), "dtype of a sum": (lambda t, x: (t[..., :1] + x).dtype.itemsize, torch.ones(4).double()),
    "type": (lambda t, x: 2 if (t[..., :1] + x).is_floating_point() else 3, torch.ones(4, dtype=torch.complex64)),
    "shape in a view": (lambda t, x: x.sum() + t.view(-1).new_zeros(t.shape).numel(), torch.arange(6.0)),
}


def asking(ask):
    return lambda self, x: self.fc(x) * ask(self.table, x)


REPLACEMENTS.update({name: (asking(ask), other) for name, (ask, other) in ASKED_OF.items()})


@pytest.mark.parametrize(("name", "way", "kind"),
                         [("counts", w, k) for w in REPLACED for k in ("buffer", "plain") if (w, k) != ("registered", "plain")] + [(n, "set", k) for n in REPLACEMENTS for k in ("buffer", "plain") if n != "counts"])
def test_a_tensor_of_the_model_replaced_by_one_of_another_kind(name, way, kind):
    forward, other = REPLACEMENTS[name]
    child = net(forward, **layers("fc"))
    if kind == "buffer":
        child.register_buffer("table", torch.arange(4.0))
    else:
        child.table = torch.arange(4.0)
    for model in (child, net(lambda self, x: self.child(self.a(x)), child=child, **layers("a")))[name != "counts":]:
        small, reference = inro_fx.quantize_graph(model, torch.randn(2, 8), Identity()), copy.deepcopy(model)
        x = torch.randn(3, 8)
        for value in (torch.arange(4.0) + 1, other):
            for m in (small, reference):
                REPLACED[way](getattr(m, "child", m), copy.deepcopy(value))
            assert torch.equal(small(x), reference(x)), value


@pytest.mark.parametrize("asked", [True, False])
def test_a_bias_that_is_taken_away(asked):
    """Where nobody asks whether it is there, the graph goes on without it."""
    forward = (lambda self, x: self.b(x) if self.a.bias is None else self.a(x)) if asked else lambda self, x: self.a(x)
    model = net(forward, **layers("a", "b"))
    small, x = inro_fx.quantize_graph(model, torch.randn(2, 8), Identity()), torch.randn(3, 8)
    for m in (model, small):
        m.a.bias = None
    assert torch.equal(small(x), model(x))
    assert bool(inro_fx.report(small).outside) is asked


@pytest.mark.parametrize("asks", [lambda self, x: self.a.bias.requires_grad, lambda self, x: self.a(x).requires_grad, lambda self, x: (self.a.bias * 2).requires_grad],
                         ids=["parameter", "result", "product"])
@pytest.mark.parametrize("name", ["a.bias", "b.bias"])
def test_a_parameter_that_is_frozen_or_thawed_after_quantizing(asks, name):
    model = net(lambda self, x: self.a(x) * (2 if asks(self, x) else 1) + self.b(x), **layers("a", "b")).requires_grad_(False)
    small, x = inro_fx.quantize_graph(model, torch.randn(2, 8), Identity()), torch.randn(3, 8)
    for wanted in (True, False):
        for m in (model, small):
            m.get_parameter(name).requires_grad_(wanted)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert torch.equal(small(x), model(x))


def counting_hook():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: counting_hook.calls.append(1))
    counting_hook.calls = []
    return contextlib.closing(type("Handle", (), {"close": staticmethod(handle.remove)}))


AROUND = {                     # what surrounds a call, and a forward that can tell
    "hooks on all modules": (counting_hook, lambda self, x: self.a(x)),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda self, x: self.a(x)),
    "inference mode": (torch.inference_mode, lambda self, x: self.a(x) if (x * 2).is_inference() else self.b(x)),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_surrounds_a_call(around):
    context, forward = AROUND[around]
    model = net(forward, **layers("a", "b"))
    small, x = inro_fx.quantize_graph(model, torch.randn(2, 8), Identity()), torch.randn(3, 8)
    for _ in range(2):
        seen = []
        for m in (model, small):
            with context():
                seen.append((m(x), len(getattr(counting_hook, "calls", ()))))
        assert alike(seen[0], seen[1])
        assert alike(small(x), model(x))


LAYOUTS = {                    # a question about how an input lies in memory, and how it was made
    "stride": lambda x: x.stride(0) == 8, "contiguous": lambda x: x.is_contiguous(), "strides of a product": lambda x: (x * 2).stride()[0] == 8,
    "contiguous product": lambda x: (x * 2).is_contiguous(), "offset": lambda x: x.storage_offset() == 0, "made in inference mode": lambda x: not x.is_inference(),
    "a part made in inference mode": lambda x: not x[:1].is_inference(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_an_input_lies_in_memory(layout):
    model = net(lambda self, x: self.a(x) if LAYOUTS[layout](x) else self.b(x), **layers("a", "b"))
    small = inro_fx.quantize_graph(model, torch.randn(8, 8), Identity())
    with torch.inference_mode():
        made = torch.randn(8, 8)
    for x in (torch.randn(8, 8), torch.randn(8, 8).t(), torch.randn(9, 8)[1:], torch.randn(8, 16)[:, ::2], made, made.t(), torch.randn(8, 8)):
        assert alike(small(x), model(x))


def test_a_dtype_that_follows_from_the_weights():
    def forward(self, x):
        y = self.table(x)
        return y if y.dtype == torch.float32 else -y
    model, x = net(forward, table=nn.Embedding(8, 8)), torch.arange(6)
    small = inro_fx.quantize_graph(model, x[:3])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        got, want = small.to(dtype)(x), model.to(dtype)(x)
        assert got.dtype == want.dtype == dtype
        assert relative(want.float(), got.float()) < 0.05


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4"])
def test_under_autocast_the_dtype_is_that_of_the_float_model(scheme):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    small, x = inro_fx.quantize_graph(model, torch.randn(2, 8), scheme), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert small(x).dtype == model(x).dtype == torch.bfloat16


@pytest.mark.parametrize("asks", [lambda f: math.copysign(1.0, f) > 0, lambda f: str(f) == "0.0", lambda f: f"{f * 1}" == "0.0", lambda f: str(f) in ("1.0", "0.0")],
                         ids=["copysign", "str", "format", "of another"])
@pytest.mark.parametrize("numbers", [(0.0, -0.0, 0.0, float("inf"), -0.0), (1.0, 1, True, 0.0, -0.0, False, 0)])
def test_numbers_that_are_equal_and_not_the_same(asks, numbers):
    model = net(lambda self, x, f: self.a(x) if asks(f) else self.b(x), **layers("a", "b"))
    for first in numbers:
        small, x = inro_fx.quantize_graph(model, (torch.randn(2, 8), first), Identity()), torch.randn(2, 8)
        for f in numbers:
            assert torch.equal(small(x, f), model(x, f)), (first, f)


CAUGHT = {
    "except": lambda self, x: excepted(self, x), "bare": lambda self, x: bare(self, x), "suppress": lambda self, x: suppressed(self, x),
}


def excepted(self, x):
    try:
        y = torch.cat([x, torch.ones(1, 3)])
    except (RuntimeError, ValueError):
        y = x
    return self.a(y[..., :1].expand(*y.shape[:-1], 8))


def bare(self, x):
    try:
        y = torch.cat([x, torch.ones(1, 3)])
    except:  # noqa: E722
        y = x
    return self.a(y[..., :1].expand(*y.shape[:-1], 8))


def suppressed(self, x):
    y = x
    with contextlib.suppress(RuntimeError):
        y = torch.cat([x, torch.ones(1, 3)])
    return self.a(y[..., :1].expand(*y.shape[:-1], 8))


@pytest.mark.parametrize("effect", ["draw", "write", "none"])
@pytest.mark.parametrize("caught", CAUGHT)
def test_an_operator_that_raises_only_at_other_sizes_and_is_caught(caught, effect):
    """What has been drawn or written cannot be taken back: the user's own forward must have begun."""
    def forward(self, x, buffer):
        noise = torch.rand(1) if effect == "draw" else 0
        if effect == "write":
            buffer.add_(1)
        return CAUGHT[caught](self, x) + noise
    model = net(forward, **layers("a"))
    small = inro_fx.quantize_graph(model, (torch.randn(2, 3), torch.zeros(2)), Identity())
    for x in (torch.randn(2, 3), torch.randn(2, 4), torch.randn(4, 3)):
        outcomes = []
        for m in (model, small):
            torch.manual_seed(0)
            buffer = torch.zeros(2)
            outcomes.append((m(x, buffer), buffer, torch.get_rng_state()))
        assert alike(*outcomes)


GIVES_BACK = {
    "dropout": lambda x: F.dropout(x, 0.5, False), "contiguous": lambda x: x.contiguous(), "to": lambda x: x.to(torch.float32), "float": lambda x: x.float(),
    "in place": lambda x: x.add_(0), "out": lambda x: torch.add(x, 0, out=x), "other": lambda x: x + 0, "view": lambda x: x[:], "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("gives", GIVES_BACK)
@pytest.mark.parametrize("asks", [lambda x, y: x is y, lambda x, y: id(x) == id(y), lambda x, y: y in {x}], ids=["is", "id", "set"])
def test_operators_that_may_give_back_their_input(gives, asks):
    for late in (False, True):                            # where the answer matters at other sizes only, the example does not show it
        model = net(lambda self, x, late=late: self.a(x.float()) if asks(x, GIVES_BACK[gives](x)) and (not late or x.shape[0] == 5) else self.b(x.float()),
                    **layers("a", "b"))
        for example in (torch.randn(8, 8), torch.randn(8, 8).t(), torch.randn(8, 8).double()):
            small = inro_fx.quantize_graph(model, example, Identity())
            for x in (torch.randn(8, 8), torch.randn(5, 8), torch.randn(8, 5).t(), torch.randn(5, 16)[:, ::2], torch.randn(5, 8).double()):
                assert torch.equal(small(x.clone()), model(x.clone()))
                assert torch.equal(small(x), model(x))


class Held:
    last = None


class Names(enum.Enum):
    ONE = 1


def test_comparisons_with_what_a_class_holds():
    """A member of an enumeration is no tensor, whatever may be given back; a tensor that a class holds may be."""
    named = net(lambda self, x, name: self.a(x.float()) if name is Names.ONE else self.b(x.float()), **layers("a", "b"))
    small = inro_fx.quantize_graph(named, (torch.randn(3, 8), Names.ONE), Identity(), strict=True)
    assert torch.equal(small(x := torch.randn(3, 8), Names.ONE), named(x, Names.ONE))
    held = net(lambda self, x: self.a(x) if x.float() is Held.last else self.b(x), **layers("a", "b"))
    Held.last = torch.randn(3, 8)
    small = inro_fx.quantize_graph(held, torch.randn(3, 8), Identity())
    for x in (torch.randn(3, 8), Held.last):
        assert torch.equal(small(x), held(x))


@pytest.mark.parametrize("part", ["", "child"])
def test_the_mode_of_one_module_alone(part):
    child = net(lambda self, x: -self.a(x) if self.training else self.a(x), **layers("a"))
    model = net(lambda self, x: self.child(x) * (2 if self.training else 1), child=child).eval()
    small, x = inro_fx.quantize_graph(model, torch.randn(2, 8), Identity()), torch.randn(3, 8)
    for training in (True, False):
        for m in (model, small):
            m.get_submodule(part).training = training
        assert torch.equal(small(x), model(x))


# ---- gradients inside ----

MODES = {
    "enable_grad": torch.enable_grad, "no_grad": torch.no_grad, "set_grad_enabled on": lambda: torch.set_grad_enabled(True),
    "set_grad_enabled off": lambda: torch.set_grad_enabled(False), "inference_mode": torch.inference_mode,
}
INSIDE = {
    "block": lambda mode: lambda self, x: in_block(self, x, mode),
    "decorator": lambda mode: lambda self, x: mode()(lambda y: self.a(y))(x) * 2,
    "half": lambda mode: lambda self, x: self.b(x) + in_block(self, x, mode),
}


def in_block(self, x, mode):
    with mode():
        return torch.relu(self.a(x))


@pytest.mark.parametrize(("inside", "mode"), [("block", m) for m in MODES] + [(i, m) for i in ("decorator", "half") for m in ("enable_grad", "no_grad")])
def test_gradient_modes_inside(inside, mode):
    model = net(INSIDE[inside](MODES[mode]), **layers("a", "b"))
    in_every_mode(model)


def in_every_mode(model):
    model.eval()
    x = torch.randn(2, 8)
    small, reference = inro_fx.quantize_graph(model, x.clone(), Identity()), copy.deepcopy(model)
    for outside in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for wants in (False, True):
            with outside():
                call = (x.clone().requires_grad_(wants),)
                want, got = reference(*call), small(*call)
                assert alike(want, got), (outside, wants)
            if want.requires_grad and call[0].requires_grad:
                assert torch.equal(*(torch.autograd.grad(y.sum(), call[0])[0] for y in (want, got)))


@pytest.mark.parametrize("forward", [
    lambda self, x: self.a(x) if torch.is_grad_enabled() else self.b(x),
    lambda self, x: self.a(x) if torch.is_inference_mode_enabled() else self.b(x),
    lambda self, x: self.a(x) if x.requires_grad else self.b(x),
    lambda self, x: self.a(x) if self.a(x).requires_grad else self.b(x),
    lambda self, x: self.a(x) if self.a(x).grad_fn is None else self.b(x),
    lambda self, x: self.a(x) if (x * 2).is_leaf else self.b(x),
    lambda self, x: self.a(x) if x.is_inference() else self.b(x),
    lambda self, x: self.a(x.detach()) + self.b(x),
    lambda self, x: self.a(torch.ones(2, 8, requires_grad=True)) + self.b(x),
], ids=["is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "of an intermediate", "grad_fn", "is_leaf", "is_inference", "detach", "own leaf"])
def test_forwards_that_ask_about_gradients(forward):
    in_every_mode(net(forward, **layers("a", "b")))


# ---- branches for exporters and compilers ----

QUESTIONS = {
    "is_in_onnx_export": torch.onnx.is_in_onnx_export, "is_exporting": torch.compiler.is_exporting, "is_compiling": torch.compiler.is_compiling,
    "is_dynamo_compiling": torch.compiler.is_dynamo_compiling, "is_tracing": torch.jit.is_tracing, "is_scripting": torch.jit.is_scripting,
}


def asking(question, deep):
    child = net(lambda self, x: self.a(x) if QUESTIONS[question]() else self.b(x), **layers("a", "b")).eval()
    return net(lambda self, x: self.child(x) + 1, child=child).eval() if deep else child


def exported(model, x):
    return torch.export.export(model, (x,)).module()


def traced(model, x):
    return torch.jit.trace(model, (x,))


def compiled(model, x):
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("question", "deep"), [*((q, False) for q in QUESTIONS), ("is_exporting", True), ("is_tracing", True), ("is_compiling", True)])
def test_branches_for_exporters_and_compilers(question, deep):
    model, x = asking(question, deep), torch.randn(2, 8)
    small = inro_fx.quantize_graph(model, x, Identity())
    for take in (exported, traced, compiled):
        assert torch.equal(small(x), model(x))
        with torch.no_grad():
            torch._dynamo.reset()
            want, got = take(copy.deepcopy(model), x), take(small, x)
        assert torch.equal(got(x), want(x)), take.__name__
        assert torch.equal(small(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_a_branch_for_onnx_is_taken_in_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x = asking("is_in_onnx_export", deep=True), torch.randn(2, 8)
    torch.onnx.export(model, (x,), tmp_path / "float.onnx", dynamo=True, verbose=False)
    inro_fx.export_onnx(inro_fx.quantize_graph(model, x, inro_fx.uniform(30_000)), x, tmp_path / "small.onnx")
    sessions = (runtime.InferenceSession(tmp_path / name) for name in ("float.onnx", "small.onnx"))
    want, got = (torch.from_numpy(s.run(None, {s.get_inputs()[0].name: x.numpy()})[0]) for s in sessions)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_a_forward_that_exports_only_by_its_branch():
    def forward(self, x):
        if torch.compiler.is_exporting():
            return F.relu(self.a(x))
        y = self.a(x)
        y.numpy().clip(0, None, out=y.numpy())
        return y
    model, x = net(forward, **layers("a")).eval(), torch.randn(2, 8)
    small = inro_fx.quantize_graph(model, x, Identity())
    assert torch.equal(small(x), model(x))
    assert torch.equal(exported(small, x)(x), exported(model, x)(x))


def test_a_size_computed_in_many_steps_is_named_shortly():
    """The same number goes into a sum twice, again and again: written out, its guard would be a text of 2**60 terms."""
    def forward(self, x):
        n = x.shape[0]
        for _ in range(60):
            n = n + n
        return self.a(x) if n > 5 else self.b(x)
    small = inro_fx.quantize_graph(net(forward, **layers("a", "b")), torch.randn(2, 2, 8))
    assert len(str(inro_fx.report(small))) < 5000
