"""Random small models as source text, and the property that holds for every one: under `Identity` the result is the model.

    program(seed)                          a Program: source of nn.Modules, an example and further calls of other kinds
    program(seed, kinds=("draw_like",))    with no other kind of statement than these and plain operators
    difference(program)                    what the quantized model does otherwise than a copy of the float one; None
    shrunk(program)                        a program of fewer statements with the same difference

    python tests/programs.py --minutes 60 --first 0       failing seeds, one line each
    python tests/programs.py --seed 17 [--kinds a,b] [--shrink]

A kind is a function from the module being written to lines of its forward; KINDS is the table. `h` is the running value, whose
last dimension is always 4; `x` is the input of the module. A kind must leave the float model deterministic.
"""

import argparse
import ast
import contextlib
import copy
import dataclasses
import linecache
import random
import re
import sys
import time
import types
import warnings
import weakref

import torch
from torch import Tensor, nn

import inro_fx
from inro_fx.passes.scheme import Identity

PRELUDE = '''import collections, contextlib, dataclasses, functools, itertools, math, types, weakref
import torch
import torch.nn.functional as F
from torch import nn

EVENTS = []          # calls of hooks


def t(*shape, seed=0, shift=0.0, dtype=torch.float32, grad=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + shift
    return (values * (1 if dtype.is_floating_point else 3)).to(dtype).requires_grad_(grad)


def linear(seed):
    layer = nn.Linear(4, 4)
    layer.weight.data, layer.bias.data = t(4, 4, seed=seed) * 0.5, t(4, seed=seed + 1)
    return layer.requires_grad_(False)
'''

HELPERS = {                                              # put into the source where a kind asks for them
    "scale_output": "def scale_output(module, args, output):\n    EVENTS.append('forward')\n    return output * 1.5 if isinstance(output, torch.Tensor) else None",
    "add_output": "def add_output(module, args, output):\n    EVENTS.append('add')\n    return output + 1.0 if isinstance(output, torch.Tensor) else None",
    "watch_output": "def watch_output(module, args, output):\n    EVENTS.append(('watch', tuple(output.shape) if isinstance(output, torch.Tensor) else None))",
    "keyword_output": "def keyword_output(module, args, kwargs, output):\n    EVENTS.append(('keywords', len(args), list(kwargs)))",
    "scale_input": "def scale_input(module, args):\n    EVENTS.append('pre')\n    return (args[0] * 0.5, *args[1:]) if args and isinstance(args[0], torch.Tensor) else None",
    "watch_input": "def watch_input(module, args):\n    EVENTS.append(('watch', len(args)))",
    "scale_gradient": "def scale_gradient(module, grad_input, grad_output):\n    EVENTS.append('backward')\n    return tuple(None if g is None else g * 2 for g in grad_input)",
    "scale_gradient_before": "def scale_gradient_before(module, grad_output):\n    EVENTS.append('before backward')\n    return tuple(None if g is None else g * 3 for g in grad_output)",
    "scale_tensor_gradient": "def scale_tensor_gradient(grad):\n    EVENTS.append('gradient')\n    return grad * 2",
    "global_hook": "@contextlib.contextmanager\ndef global_hook():\n    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: EVENTS.append('global'))\n    try:\n        yield\n    finally:\n        handle.remove()",
    "global_pre_hook": "@contextlib.contextmanager\ndef global_pre_hook():\n    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: EVENTS.append('global'))\n    try:\n        yield\n    finally:\n        handle.remove()",
    "other_default": "@contextlib.contextmanager\ndef other_default():\n    torch.set_default_dtype(torch.float64)\n    try:\n        yield\n    finally:\n        torch.set_default_dtype(torch.float32)",
    "Refused": "class Refused(Exception):\n    pass",
    "Output": "Output = collections.namedtuple('Output', ['value', 'rest'])",
    "Record": "@dataclasses.dataclass\nclass Record:\n    value: torch.Tensor\n    count: int = 0",
    "REGISTRY": "REGISTRY = {'w': t(4, 4, seed=77), 'p': t(4, seed=78)}",
    "SCALES": "SCALES = {1: 0.5, 2: 1.5, 3: -1.0, 6: 2.0}",
    "doubled": "def doubled(h):\n    return h * 2.0 if h.shape[0] > 2 else h * -2.0",
}

DEFAULTS = {"y": "None", "n": "2", "f": "0.5", "mode": "'a'", "items": "()", "table": "None"}
EXAMPLES = {"n": "2", "f": "0.5", "mode": "'a'"}


def indent(lines):
    return ["    " + line for line in lines]


class Book:
    """A program being written."""

    def __init__(self, seed, kinds):
        self.rng, self.kinds, self.budget = random.Random(seed), kinds, 12 if len(kinds) > 9 else 4
        self.classes, self.top, self.setup, self.edits, self.around, self.count = [], [], [], [], [], 0
        self.gradients = self.rng.random() < 0.3

    def need(self, name):
        if HELPERS[name] not in self.top:
            self.top.append(HELPERS[name])
        return name


class Module:
    """A class being written: lines of its __init__ and forward. ``path`` is where its only instance lies, ``m.c1`` say."""

    def __init__(self, book, name, path, level=0):
        self.book, self.rng, self.name, self.path, self.level = book, book.rng, name, path, level
        self.init, self.used, self.depth, self.loops, self.made = [], set(), 0, 0, {}

    # -- words --

    def pick(self, *choices):
        return self.rng.choice(choices)

    def chance(self, p):
        return self.rng.random() < p

    def new(self, prefix):
        self.book.count += 1
        return f"{prefix}{self.book.count}"

    def use(self, name):
        self.used.add(name)
        return name

    def need(self, name):
        return self.book.need(name)

    def seed(self):
        return self.rng.randrange(1000)

    def attribute(self, prefix, value):
        """Sets an attribute in __init__: its name."""
        name = self.new(prefix)
        self.init.append(f"self.{name} = {value}")
        return name

    def buffer(self, prefix, value):
        name = self.new(prefix)
        self.init.append(f"self.register_buffer({name!r}, {value}{self.pick('', ', persistent=False')})")
        return name

    def parameter(self, *shape):
        return self.attribute("w", f"nn.Parameter(t({', '.join(map(str, shape))}, seed={self.seed()}) * 0.5)")

    def layer(self):
        """A linear layer, shared with earlier statements at times."""
        if "fc" in self.made and self.chance(0.4):
            return self.pick(*self.made["fc"])
        name = self.attribute("fc", f"linear({self.seed()})")
        self.made.setdefault("fc", []).append(name)
        return name

    def edit(self, *lines):
        """Something that a user may do to this module between two calls."""
        self.book.edits.append([line.replace("self.", self.path + ".") for line in lines])

    def size(self):
        return self.pick("h.shape[0]", "x.shape[0]", "len(h)", "h.shape[0] + 1", "h.numel() // 4", "h.shape[:-1].numel()",
                         "x.shape[-2]", "x.shape[-2]", "h.shape[-2]", "h.size(-2)", "x.size(-2)", "x.shape[-2] + 1", "h.numel() // h.shape[0]")

    def source(self):
        """Something to look at: the module's input or its running value."""
        return self.pick("x", "h")

    # -- statements --

    def op(self):
        """A plain operator."""
        c, s = self.pick("2.0", "-1.5", "0.5", "3.0"), self.pick
        kind = self.rng.randrange(12)
        if kind < 3:
            return [f"h = self.{self.layer()}(h)"]
        if kind == 3:
            name = self.parameter(4, 4)
            return [s(f"h = h @ self.{name}", f"h = F.linear(h, self.{name})", f"h = torch.matmul(h, self.{name}.t())")]
        if kind == 4:
            name = self.attribute("norm", "nn.LayerNorm(4)")
            return [f"h = self.{name}(h)"]
        if kind == 5:
            name = self.attribute("emb", "nn.Embedding(4, 4)")
            self.init.append(f"self.{name}.weight.data = t(4, 4, seed={self.seed()})")
            return [f"h = h + self.{name}(h.argmax(-1))"]
        if kind == 6:
            name = self.attribute("conv", "nn.Conv1d(4, 4, 3, padding=1)")
            self.init.append(f"self.{name}.weight.data, self.{name}.bias.data = t(4, 4, 3, seed={self.seed()}) * 0.3, t(4, seed={self.seed()})")
            return [f"h = self.{name}(h.reshape(-1, 4).t()).t().reshape(h.shape)"]
        if kind == 7:
            return [f"h = h + self.{self.parameter(4)}"]
        if kind == 8:
            return [f"h = h - self.{self.buffer('b', f't(4, seed={self.seed()})')}"]
        return [s(f"h = h * {c}", f"h = h + {c}", "h = torch.tanh(h)", "h = F.relu(h) - 0.5", "h = F.gelu(h)", "h = torch.softmax(h, -1)",
                  "h = h.flip(-1)", "h = h - h.mean(-1, keepdim=True)", "h = torch.sin(h)", "h = h.roll(1, -1)")]

    def statement(self):
        """Lines of one kind, if the program may still grow."""
        if self.depth >= 3 or self.book.budget <= 0:
            return self.op()
        self.book.budget -= 1
        kind = self.rng.choice(self.book.kinds)
        if self.level == 0 and kind in PYTHON and self.chance(0.7):
            return [f"h = {self.child(begins=kind)()}"]
        return kind(self)

    def block(self, most=2):
        self.depth += 1
        lines = self.op() if self.chance(0.8) else []
        for _ in range(self.rng.randrange(most)):
            lines += self.statement()
        self.depth -= 1
        return lines or self.op()

    def decide(self, question):
        """The question, and something that depends on its answer."""
        how = self.rng.randrange(10)
        if how == 0:
            return [f"h = h * (2.0 if {question} else -0.5)"]
        if how == 1:
            return [f"h = (self.{self.layer()}, torch.tanh)[bool({question})](h)"]
        if how == 2:
            return [f"if {question}:", *indent(self.block())]
        if how == 3:
            return [f"if not ({question}):", *indent(self.block()), "else:", *indent(self.block())]
        if how == 4:
            name = self.new("known")
            return [f"{name} = {question}", *self.op(), f"if {name}:", *indent(self.block()), "else:", *indent(self.op())]
        return [f"if {question}:", *indent(self.block()), "else:", *indent(self.block())]

    def child(self, python=False, begins=None):
        """Writes a child with statements of its own: how to call it. ``begins`` is the kind of its first."""
        name = self.new("c")
        child = Module(self.book, name.upper(), f"{self.path}.{name}", self.level + 1)
        child.depth = self.depth + 1
        lines = ["h = x", *(begins(child) if begins else child.op())]
        if python:
            lines += [f"if {child.pick(*ON_VALUES).format('x')}:", *indent(child.op())]
        for _ in range(self.rng.randrange(1, 3)):
            lines += child.statement()
        child.finish([*lines, "return h"])
        self.init.append(f"self.{name} = {child.name}()")
        return lambda value="h", **given: f"self.{name}({', '.join([value, *self.passed(child, given)])})"

    def passed(self, child, given):
        for name in [d for d in DEFAULTS if d in child.used or d in given]:
            value = given.get(name) or (self.pick(name, name, name, *PASSED.get(name, ())))
            if value in DEFAULTS:
                self.use(value)
            yield f"{name}={value}"

    def gate(self, *lines, init=()):
        """Writes a child of a few lines, in which {} is its name in the source: its attribute here."""
        name = self.new("g")
        self.book.classes.append("\n".join([
            f"class {name.upper()}(nn.Module):", "    def __init__(self):", "        super().__init__()", *indent(indent(init)), "",
            "    def forward(self, x):", *indent(indent(lines)), ""]))
        self.init.append(f"self.{name} = {name.upper()}()")
        return f"self.{name}"

    def finish(self, lines):
        signature = ["self", "x", *(f"{name}={default}" for name, default in DEFAULTS.items() if name in self.used)]
        init = ["super().__init__()", *self.init]
        self.book.classes.append("\n".join([
            f"class {self.name}(nn.Module):", "    def __init__(self):", *indent(indent(init)), "",
            f"    def forward({', '.join(signature)}):", *indent(indent(lines)), ""]))


PASSED = {"y": ("h", "x", "None"), "n": ("h.shape[0]", "x.shape[0]", "3"), "f": ("1.5", "h.shape[0] / 2"), "mode": ("'b'",)}
ON_VALUES = ("{}.mean() > 0", "{}.sum() < 0", "float({}.sum()) > 0.1", "({} > 0).any()", "{}.flatten()[0] > 0", "int(({} > 0).sum()) % 2 == 0")


# ---- rank ----

def rank_of_input(m):
    return m.decide(m.pick("x.dim() == 3", "x.ndim > 2", "len(x.shape) == 3", "x.dim() in (1, 3)", "x.dim() % 2", "len(x.size()) < 3"))


def rank_of_intermediate(m):
    z = m.new("z")
    make = m.pick("h.squeeze()", "h.squeeze()", "h.squeeze(0)", "h[0]", "h.unbind(0)[0]", "h.select(0, 0)", "h.sum(0)", "h.squeeze(-2)", "torch.atleast_2d(h)",
                  "h.squeeze((0, 1))", "h[0].squeeze()", "h.squeeze(-2)", "h.reshape(2, -1, 4).squeeze(1) if x.dim() == 3 and len(x) == 2 else h", "h.unbind(0)[-1].squeeze()", "torch.movedim(h, 0, -2).squeeze()", "h.mean(0).squeeze()", "torch.squeeze(h, 0)")
    question = m.pick("{}.dim() == 2", "{}.ndim > 1", "len({}.shape) == 1", "{}.dim() == h.dim()", "{}.dim() < x.dim()").format(z)
    return [f"{z} = {make}", *m.decide(question), *([f"h = h + {z}.mean()"] if m.chance(0.5) or "squeeze()" not in make else [f"h = {z}"])]


def rank_match(m):
    cases = [("case (b, s, d):", f"h = h * (b + s * {m.pick('0.5', 'd')})"), ("case (s, d):", "h = h - s / d"), ("case (1, _, _) | (1, _):", "h = h + 1"),
             ("case (b, *rest):", "h = h * len(rest)")]
    chosen = m.rng.sample(cases[:3], 2) + cases[3:]
    return [f"match {m.source()}.shape:", *indent([line for case, body in chosen for line in (case, "    " + body, *indent(m.op()))])]


# ---- sizes ----

def size_of_input(m):
    k = m.rng.randrange(1, 5)
    return m.decide(m.pick(f"x.shape[0] == {k}", f"x.shape[0] > {k}", f"x.size(-2) < {k}", f"x.shape[-2] % 2 == {k % 2}", f"x.numel() > {8 * k}",
                           f"{k} <= len(x) <= 3", f"x.shape[0] != {k}", f"x.shape[0] in ({k}, 3)", f"x.numel() // 4 % {k + 1}"))


def size_of_intermediate(m):
    z, k = m.new("z"), m.rng.randrange(1, 5)
    make = m.pick("h.reshape(-1, 4)", "torch.cat([h, h[:1]])", "h[1:]", "h[::2]", "h.flatten()", "h.reshape(-1, 4).t()", "h.unfold(-1, 2, 2)", "h[:2]", "h.unbind(0)",
                  "h.chunk(2)", "h.split(2)", "h.repeat_interleave(2, 0)")
    question = m.pick(f"len({z}) > {k}", f"len({z}) == {k}", f"len({z}) % 2 == 0") if m.chance(0.5) or "unbind" in make or "chunk" in make or "split" in make else \
        m.pick(f"{z}.shape[0] > {k}", f"{z}.numel() % 3 == 1", f"{z}.size(0) == {k}")
    return [f"{z} = {make}", *m.decide(question)]


def size_from_values(m):
    z = m.new("z")
    return [f"{z} = h[{m.source()} > 0]" if m.chance(0.5) else f"{z} = (h > 0).nonzero()", *m.decide(f"{z}.shape[0] > {m.rng.randrange(3, 12)}")]


def size_equality(m):
    return m.decide(m.pick("h.shape == x.shape", "h.shape[0] == h.shape[-1]", "x.shape[0] == x.shape[-2]", "h.shape[:-1] == (2, 3)", "x.shape[:-1] in {(2, 3), (3, 4)}",
                           "max(h.shape) > 4", "min(x.shape) == 1", "1 in x.shape", "h.shape[:-1].count(1)", "all(s > 1 for s in h.shape)", "x.size() == torch.Size([2, 3, 4])"))


def loop_over_size(m):
    if m.chance(0.4):
        return m.pick([f"for i in range({m.size()}):", "    h = h + i * 0.5"], ["for i, s in enumerate(h.shape):", "    h = h + i * s"],
                      ["h = h + sum(i * 0.5 for i in range(x.shape[0]))"], ["for i in reversed(range(len(x))):", "    h = h * 0.5 + i"],
                      ["h = h + torch.stack([h.mean() * i for i in range(1, x.shape[0] + 1)]).sum()"])
    m.depth += 1
    lines = [f"for i in range({m.pick('h.shape[0]', 'x.shape[0]', 'x.shape[-2] - 1', 'min(len(h), 3)')}):", *indent(m.block()), "    h = h * 0.5 + i"]
    m.depth -= 1
    return lines


def loop_over_rows(m):
    rows = m.pick("h", "x", "h.unbind(0)", "h.split(1)", "x.chunk(3)", "h.unbind(-2)", "torch.unbind(x)", "list(h)", "zip(h, x)")
    acc, first = m.new("acc"), "row[0]" if rows.startswith("zip") else "row"
    if m.chance(0.4):
        return [f"{acc} = []", f"for row in {rows}:", f"    {acc}.append({first}.mean() * (len({acc}) + 1))", f"h = h + sum({acc})"]
    return [f"{acc} = 0.0", f"for i, row in enumerate({rows}):", f"    {acc} = {acc} * 0.5 + {first}.sum() * i", f"h = h + {acc}"]


def while_over_size(m):
    k = m.new("k")
    return [f"{k} = {m.size()}", f"while {k} > 1:", f"    {k} = {m.pick(f'{k} // 2', f'{k} - 1')}", *indent(m.op())]


def size_in_string(m):
    k, text = m.new("k"), m.new("text")
    make = m.pick(f"str({k})", f'f"{{{k}}}"', f'"%s" % {k}', f'"%d" % {k}', f'"{{}}".format({k})', f"repr({k})", f'f"{{{k}:d}}"', f'"n" * {k}', '",".join(map(str, h.shape))', "str(tuple(x.shape))",
                  f"str({k})[0]", f"bytes([{k} % 256]).hex()", f"format({k})", "f'{h.shape}'", f"chr(48 + {k})")
    return [f"{k} = {m.size()}", f"{text} = {make}", *m.pick(lambda: m.decide(m.pick(f'{text} == "2"', f"len({text}) > 1", f'"3" in {text}', f'{text} in ("1", "3", "nn")')),
                                                              lambda: [f'h = h * {{"1": 2.0, "2": 3.0, "3": -1.0}}.get({text}, 0.5)'])()]


def size_type(m):
    k = m.new("k")
    return [f"{k} = {m.size()}", *m.decide(m.pick(f"type({k}) is int", f"isinstance({k}, int)", f"isinstance({k}, (int, float))", f"type({k}) in (int, float)", f"{k}.__class__ is int",
                                                   f"not isinstance({k}, torch.Tensor)", f"callable({k})", f"hasattr({k}, 'bit_length')", f"type({k}) == type(2)", "isinstance(x.shape, torch.Size)",
                                                   "type(x.shape) is torch.Size", "isinstance(h.shape, tuple)", f"isinstance({k}, torch.SymInt)"))]


def size_hash(m):
    k = m.new("k")
    return [f"{k} = {m.size()}", *m.pick(
        lambda: [f"h = h * {m.need('SCALES')}.get({k}, 3.0)"], lambda: m.decide(f"{k} in {{1, 2, 5}}"), lambda: m.decide(f"hash({k}) % 2"), lambda: m.decide(f"{k} in {m.need('SCALES')}"),
        lambda: [f"h = h + len({{{k}, h.shape[-1], 3}})"], lambda: [f"h = h * {{{k}: 2.0, 2: 0.5}}[2 if {k} == 2 else {k}]"], lambda: m.decide("tuple(x.shape) in {(2, 3, 4): 1}"),
        lambda: ["try:", f"    h = h * {m.need('SCALES')}[{k}]", "except KeyError:", *indent(m.op())])()]


def getattr_by_size(m):
    a, b = m.attribute("h_0_", f"linear({m.seed()})"), m.layer()
    head = m.new("head")
    m.init += [f"self.{head}_0, self.{head}_1, self.{head}_2 = self.{a}, self.{b}, {m.pick('nn.Tanh()', f'linear({m.seed()})')}"]
    return m.pick([f'h = getattr(self, "{head}_" + str(({m.size()}) % 3))(h)'], [f"h = getattr(self, f'{head}_{{({m.size()}) % 3}}', self.{b})(h)"],
                  [f'h = self.get_submodule("{head}_%d" % (({m.size()}) % 3))(h)'], [f'h = self._modules["{head}_" + str(({m.size()}) % 3)](h)'],
                  [f"if hasattr(self, '{head}_' + str({m.size()})):", f"    h = getattr(self, '{head}_' + str(1))(h)"])


def module_by_size(m):
    k = m.pick("h.shape[0]", "x.shape[0]", "x.shape[-2]", "h.shape[-2]")
    if m.chance(0.5):
        name = m.attribute("layers", f"nn.ModuleList([linear({m.seed()}), linear({m.seed()}), nn.ReLU()])")
        return m.pick([f"h = self.{name}[{k} % 3](h)"], [f"for layer in self.{name}[:{k}]:", "    h = layer(h)"], [f"for layer, _ in zip(self.{name}, range({k})):", "    h = layer(h)"])
    name = m.attribute("heads", f"nn.ModuleDict({{'1': linear({m.seed()}), '2': linear({m.seed()}), 'other': nn.Tanh()}})")
    return [f"h = self.{name}[str({k}) if str({k}) in self.{name} else 'other'](h)"]


def size_arithmetic(m):
    k = m.new("k")
    return [f"{k} = {m.size()}", m.pick(f"h = h * min({k}, 3)", f"h = h + max({k}, 2) / 2", f"h = h + divmod({k}, 2)[1]", f"h = h * bool({k} - 1)", f"h = h + round({k} / 2)", f"h = h / math.sqrt({k} + 1)",
                                         "h = h + sum(x.shape)", f"h = h * float({k})", f"h = h + int({k} * 0.6)", f"h = h + {k}.bit_length()", f"h = h * ({k} or 5)", f"h = h + (-{k} // 2) % 3",
                                         f"h = h + [0.5, 1.5, 2.5][{k} % 3]", f"h = h + ({k} > 2)", f"h = h * math.log2({k} + 1)", f"h = h + abs(3 - {k})", f"h = h + ({k} ^ 3)", f"h = h + int(str({k}))",
                                         "h = h + functools.reduce(lambda a, b: a * b, h.shape)", f"h = h * torch.full((1,), {k} * 0.5)", f"h = h + torch.arange({k}).sum()", f"h = h + torch.tensor({k})",
                                         f"h = h * torch.ones({k}, 2).sum()", f"h = h + sorted([{k}, 3, 1])[1]", f"h = h + ({k} < 3 < 5) * 2.0", f"h = h ** (1 if {k} > 2 else 2)")]


def slice_by_size(m):
    z = m.new("z")
    return [f"{z} = {m.pick('h[: h.shape[0] // 2 + 1]', 'x[h.shape[0] - 1 :]', 'h.narrow(0, 0, (h.shape[0] + 1) // 2)', 'h[-2:]', 'h[:3]', 'torch.cat([h, x], 0)' if m.chance(0.2) else 'h[min(1, len(h) - 1)]')}",
            *m.pick(lambda: [f"h = h + {z}.mean()"], lambda: m.decide(f"{z}.shape[0] > {m.rng.randrange(1, 4)}"))()]


def size_passed_down(m):
    def begins(child):
        return [*argument_number(child), f"h = h @ self.{child.parameter(4, 4)}"]
    call = m.child(begins=begins, python=m.chance(0.3))
    return [f"h = {call(n=m.pick('h.shape[0]', 'x.shape[0]', 'len(h)', 'x.shape[-2]'))}"]


# ---- arguments ----

def none_of_argument(m):
    m.use("y")
    return [*m.decide(m.pick("y is None", "y is not None", "y is not None and x is not None", "not isinstance(y, torch.Tensor)", "torch.is_tensor(y)", "type(y) is torch.Tensor")),
            *(["h = h + (0.0 if y is None else y.sum())"] if m.chance(0.5) else [])]


def argument_number(m):
    m.use("n")
    return m.pick(lambda: m.decide(m.pick("n > 2", "n == 2", "n in (1, 3)", "n % 2 == 0", "n", "n is None", "not n", "n < x.shape[0]")), lambda: ["for i in range(n):", *indent(m.op()), "    h = h * 0.5 + i"],
                  lambda: ["h = h + [1.0, 2.0, 3.0][n]"], lambda: [f"h = h * {m.need('SCALES')}.get(n, 4.0)"], lambda: ["h = h.roll(n, -1)"])()


def number_in_arithmetic(m):
    name = m.use(m.pick("n", "f"))
    return [m.pick(f"h = h * {name}", f"h = h + {name} * 0.5", f"h = ({name} - 1) * h", f"h = torch.add(h, x.mean(), alpha={name})", f"h = h / ({name} + 4)", f"h = torch.clamp(h, max={name})", f"h = h + torch.tensor({name})")]


def argument_number_type(m):
    name = m.use(m.pick("n", "f"))
    return m.decide(m.pick(f"isinstance({name}, int)", f"type({name}) is bool", f"isinstance({name}, float)", f"type({name}) is int", f"{name} == 1", f"{name} is True", f"str({name}) == '2'",
                           f"math.copysign(1.0, {name}) > 0", f"{name} != {name}"))


def argument_string(m):
    m.use("mode")
    return m.pick(lambda: m.decide(m.pick("mode == 'a'", "mode in ('b', 'c')", "mode.startswith('a')", "len(mode) > 1", "mode.upper() == 'A'", "not mode")), lambda: ["h = h * {'a': 2.0, 'b': 3.0}[mode]"],
                  lambda: ["h = h * {'a': 2.0, 'b': 3.0}.get(mode, 0.5)"], lambda: [f"h = {{'a': torch.sin, 'b': self.{m.layer()}}}.get(mode, F.relu)(h)"])()


def list_length(m):
    m.use("items")
    return m.decide(m.pick("len(items) == 2", "len(items) > 1", "items", "not items", "isinstance(items, tuple)", "items == []", "len(items) % 2", "type(items) is list"))


def list_contents(m):
    m.use("items")
    return m.pick(["for item in items:", "    h = h * 0.5 + item.mean()"], ["h = h + sum(item.sum() for item in items)"], ["for i, item in enumerate(items):", "    h = h + item.mean() * i"],
                  ["if items:", "    h = h * 0.5 + torch.stack([item.mean() for item in items]).max()"], ["first, *rest = [h, *items]", "h = first * (len(rest) + 1)"], ["h = h + items[-1].mean()"])


def dict_order(m):
    m.use("table")
    return m.pick(["for value in (table or {}).values():", "    h = h * 0.5 + value.mean()"], ["for key, value in (table or {}).items():", "    h = h * (2.0 if key == 'a' else 0.5) + value.mean()"],
                  ["if table:", "    h = h * next(iter(table.values())).mean()"]) + (m.decide("list(table or ()) == ['a', 'b']") if m.chance(0.5) else [])


def dict_keys(m):
    m.use("table")
    return m.pick(lambda: m.decide(m.pick("table and 'b' in table", "table is None", "len(table or ()) == 2", "'a' in (table or {})", "isinstance(table, collections.OrderedDict)")), lambda: ["h = h + table['a'].mean()"],
                  lambda: ["extra = (table or {}).get('b')", *m.decide("extra is None")])()


def identity_of_arguments(m):
    m.use("y")
    first, second = "x", m.pick("y", "y", "y", "items[0]" if "items" in m.used else "y")
    return m.decide(m.pick(f"{first} is {second}", f"{second} is not {first}", f"id({first}) == id({second})", f"{second} in (None,) or {first} is {second}", "len({id(x), id(y)}) == 1",
                           "any(x is v for v in (y, None))"))


def identity_of_list_items(m):
    m.use("items")
    return m.decide(m.pick("len(items) > 1 and items[0] is items[1]", "any(v is x for v in items)", "len({id(v) for v in items}) == len(items)"))


def identity_of_intermediate(m):
    z = m.new("z")
    make = m.pick("h.contiguous()", "h.to(torch.float32)", "h.float()", "h.cpu()", "h.reshape(h.shape)", "h.expand(h.shape)", "x.contiguous()", "h.detach()", "F.dropout(h, 0.5, False)", "h.view(h.shape)", "h[...]")
    return [f"{z} = {make}", *m.decide(m.pick(f"{z} is h", f"{z} is x", f"{z}.data_ptr() == x.data_ptr()", f"{z} is h or {z} is x"))]


def memory_of_arguments(m):
    m.use("y")
    return m.decide(m.pick("y is not None and x.data_ptr() == y.data_ptr()", "torch.is_tensor(y) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()", "torch.is_tensor(y) and y._base is not None",
                           "x.storage_offset() > 0", "torch.is_tensor(y) and torch._C._is_alias_of(x, y)"))


def views_written(m):
    """Two arguments that may share memory; one is written, the other read."""
    m.use("y")
    return ["if torch.is_tensor(y):", *indent(m.pick(["y.add_(1)", "h = h + x.mean()"], ["x.mul_(2)", "h = h + y.sum()"], ["before = x.sum()", "y.zero_()", "h = h + x.sum() - before"], ["x[..., 0] = 3.0", "h = h * y.mean()"],
                                                     ["x.copy_(x.flip(0))", "h = h + y.mean()"]))]


# ---- what a child returns that branches on values ----

def child_none(m):
    source, fc = m.source(), f"self.fc = linear({m.seed()})"
    gate = m.gate(f"if {m.pick(*ON_VALUES).format('x')}:", f"    return {m.pick('self.fc(x)', 'x * 2', 'x')}", m.pick("return None", "return"), init=[fc])
    g = m.new("r")
    return [f"{g} = {gate}({source})", *m.pick(lambda: m.decide(m.pick(f"{g} is None", f"{g} is not None", f"torch.is_tensor({g})")), lambda: [f"h = h * 2 if {g} is None else h + {g}.mean()"],
                                                lambda: [f"h = {m.child(begins=none_of_argument)(y=g)}"])()]


def child_tuple(m):
    gate = m.gate(f"if {m.pick(*ON_VALUES).format('x')}:", f"    return {m.pick('(x * 2, x + 1)', '(x, x)', '[x, x.mean(), x]')}", f"return {m.pick('(x,)', '()', '[x]', '(x, None)')}")
    r = m.new("r")
    return [f"{r} = {gate}({m.source()})", *m.pick(lambda: m.decide(m.pick(f"len({r}) == 2", f"{r}", f"isinstance({r}, tuple)", f"len({r}) > 1 and {r}[1] is not None", f"len({r}) > 1 and {r}[0] is {r}[1]")),
                                                    lambda: [f"for v in {r}:", "    h = h * 0.5 + (1.0 if v is None else v.mean())"], lambda: [f"h = h * (len({r}) + 1)"])()]


def child_dict(m):
    other = m.pick("{'a': x}", "{'b': x, 'a': x * 2}", "{}", "{'a': x, 'c': None}")
    gate = m.gate(f"if {m.pick(*ON_VALUES).format('x')}:", "    return {'a': x * 2, 'b': x}", f"return {other}")
    r = m.new("r")
    return [f"{r} = {gate}({m.source()})", *m.pick(lambda: m.decide(m.pick(f"'b' in {r}", f"list({r}) == ['a', 'b']", f"len({r}) == 2", f"{r}.get('b') is None")),
                                                    lambda: [f"for k, v in {r}.items():", "    h = h * (2.0 if k == 'a' else 0.5) + (0.0 if v is None else v.mean())"])()]


def child_string(m):
    hot = m.pick("'hot'", "str(int(x.sum()) % 3)")
    gate = m.gate(f"return {hot} if {m.pick(*ON_VALUES).format('x')} else 'cold'")
    r = m.new("r")
    name = m.attribute("heads", f"nn.ModuleDict({{'hot': linear({m.seed()}), 'cold': nn.Tanh()}})")
    return [f"{r} = {gate}({m.source()})", *m.pick(lambda: m.decide(m.pick(f"{r} == 'hot'", f"{r} in ('hot', '1')", f"len({r}) > 3")), lambda: [f"h = self.{name}[{r}](h) if {r} in self.{name} else h"],
                                                    lambda: [f"h = h * {{'cold': 0.5}}.get({r}, 2.0)"])()]


def child_number(m):
    gate = m.gate(f"return {m.pick('int((x > 0).sum())', 'bool(x.mean() > 0)', 'float(x.sum())', 'int(x.argmax()) % 4', 'x.sum().item()', 'len(x[x > 0])')}")
    r = m.new("r")
    return [f"{r} = {gate}({m.source()})", *m.pick(lambda: m.decide(m.pick(f"{r} > 2", f"{r}", f"{r} < x.shape[0]", f"int({r}) % 2")), lambda: [f"h = h * {r}"], lambda: [f"for _ in range(abs(int({r})) % 3):", *indent(m.op())],
                                                    lambda: [f"h = h + [0.5, 1.5, 2.5][int({r}) % 3]"])()]


def child_rank(m):
    gate = m.gate(f"return {m.pick('x', 'x * 2')} if {m.pick(*ON_VALUES).format('x')} else {m.pick('x[None]', 'x.flatten()', 'x.sum()', 'x[:1]', 'x[0]')}")
    r = m.new("r")
    return [f"{r} = {gate}({m.source()})", *m.decide(m.pick(f"{r}.dim() == x.dim()", f"{r}.ndim > 2", f"{r}.numel() == x.numel()", f"{r}.shape == x.shape", f"{r}.shape[:1] == (2,)")), f"h = h + {r}.mean()"]


def child_dtype(m):
    gate = m.gate(f"return {m.pick('x * 2', 'x')} if {m.pick(*ON_VALUES).format('x')} else {m.pick('x.double()', 'x > 0', 'x.long()', 'x.half()')}")
    r = m.new("r")
    return [f"{r} = {gate}({m.source()})", *m.decide(m.pick(f"{r}.dtype == torch.float32", f"{r}.is_floating_point()", f"{r}.dtype is x.dtype", f"{r}.element_size() > 4"))]


def child_identity(m):
    gate = m.gate(f"return {m.pick('x', 'x.view_as(x)')} if {m.pick(*ON_VALUES).format('x')} else x.clone()")
    r, source = m.new("r"), m.source()
    return [f"{r} = {gate}({source})", *m.pick(lambda: m.decide(f"{r} is {source}"), lambda: m.decide(f"{r}.data_ptr() == {source}.data_ptr()"), lambda: [f"{r}.add_(1)", f"h = h + {source}.mean()"])()]


# ---- children ----

def traced_child(m):
    return [f"h = {m.child()()}"]


def loop_in_two_places(m):
    """A number passed to a child that turns out to be Python after it has looped; the same loop in its parent."""
    name, size = m.new("g"), m.pick("h.shape[0]", "x.shape[0]", "x.shape[-2]")
    m.book.classes.append("\n".join([f"class {name.upper()}(nn.Module):", "    def forward(self, x, n):", "        for i in range(n):", "            x = x * 0.5 + i", f"        if {m.pick(*ON_VALUES).format('x')}:",
                                     "            x = x + 1", "        return x", ""]))
    m.init.append(f"self.{name} = {name.upper()}()")
    k = m.new("k")
    lines, size = [f"{k} = {size}", f"h = self.{name}(h, {k})", *m.op()], k
    return lines + m.pick(lambda: [f"for i in range({size}):", "    h = h * 0.5 + i"], lambda: m.decide(f"{size} > {m.rng.randrange(1, 4)}"))()


def effect_before_question(m):
    """Something that must not happen twice, then a question to which another call has another answer."""
    effect = m.pick(counter, growing_list, draw_like, draw_in_place, dropout, write_to_input, forward_hook, running_mean, buffer_counter, dict_cache)
    question = m.pick(size_of_input, size_of_intermediate, rank_of_intermediate, loop_over_size, loop_over_rows, none_of_argument, list_length, argument_number, operator_fails, raises, try_except, child_none, early_return)
    lines = [f"h = {m.child(begins=effect, python=m.chance(0.3))()}"] if m.chance(0.6) else effect(m)
    return [*lines, *question(m)]


def python_child(m):
    return [f"h = {m.child(python=True)()}"]


def child_called_twice(m):
    call = m.child(python=m.chance(0.3))
    return [f"h = {call()}", *m.op(), f"h = h + {call(m.pick('h', 'x', 'h[:1]', 'h.detach()'))}.mean()"]


def shared_child(m):
    name = m.layer()
    other = m.attribute("same", f"self.{name}")
    return [f"h = self.{name}(torch.tanh(self.{other}(h)))", *(m.decide(f"self.{name} is self.{other}") if m.chance(0.5) else [])]


def containers(m):
    name = m.attribute("layers", m.pick(f"nn.Sequential(linear({m.seed()}), nn.ReLU(), linear({m.seed()}))", f"nn.ModuleList([linear({m.seed()}), nn.GELU()])", f"nn.Sequential(collections.OrderedDict(a=linear({m.seed()}), b=nn.Tanh()))"))
    return m.pick([f"for layer in self.{name}:", "    h = layer(h)"], [f"h = functools.reduce(lambda value, layer: layer(value), self.{name}, h)"], [f"h = self.{name}[0](h)", *m.decide(f"len(self.{name}) > 2")],
                  [f"h = h + len(self.{name})", f"h = [layer(h) for layer in self.{name}][-1]"])


def value_branch(m):
    return m.decide(m.pick(*ON_VALUES).format(m.source()))


def number_from_values(m):
    k, source = m.new("k"), m.source()
    return [f"{k} = {m.pick(f'float({source}.mean())', f'{source}.sum().item()', f'int({source}.argmax())', f'{source}.mean().tolist()', f'{source}.flatten().tolist()[0]')}",
            *m.pick(lambda: [f"h = h * {k}"], lambda: m.decide(f"{k} > 0"), lambda: [f"h = h + round({k}, 1)"], lambda: [f"h = h * max({k}, 0.5)"])()]


def function_of_module(m):
    return [f"h = {m.need('doubled')}(h)"]


# ---- state ----

def counter(m):
    name = m.attribute("calls", m.pick("0", "0", "1.0"))
    return [f"self.{name} += 1", *m.pick(lambda: [f"h = h * self.{name}"], lambda: m.decide(f"self.{name} % 2"), lambda: m.decide(f"self.{name} > 3"), lambda: [])()]


def last_value(m):
    name = m.attribute("last", "None")
    return [*(m.decide(f"self.{name} is None") if m.chance(0.4) else []), f"self.{name} = {m.pick('float(h.sum())', 'h.shape[0]', 'h.shape', 'h.dim()', 'str(h.dtype)', 'h.requires_grad', 'len(x)', 'float(x.mean()) > 0')}"]


def growing_list(m):
    name = m.attribute("log", "[]")
    return [f"self.{name}.append({m.pick('h.shape[0]', 'h.mean().detach()', 'x.dim()', 'float(h.mean())', 'tuple(h.shape)')})", *m.pick(lambda: [f"h = h + len(self.{name})"], lambda: m.decide(f"len(self.{name}) > 2"), lambda: [])()]


def dict_cache(m):
    name, key = m.attribute("cache", "{}"), m.pick("h.shape[0]", "tuple(x.shape)", "str(len(h))", "x.dim()")
    value = m.pick("torch.arange(4.0) * h.shape[0]", "h.mean().detach()", "h.shape[0] * 0.5", "torch.ones(4)")
    return [f"if {key} not in self.{name}:", f"    self.{name}[{key}] = {value}", f"h = h + self.{name}[{key}]"]


def kept_tensor(m):
    name = m.attribute("previous", m.pick("None", f"t(4, seed={m.seed()})"))
    return [f"if self.{name} is not None:", f"    h = h + self.{name}.mean()", f"self.{name} = {m.pick('h.detach()', 'x.detach().clone()', 'h.mean(-1).detach()', 'h.detach()[:1]')}"]


def lazy_attribute(m):
    name, k = m.new("lazy"), m.seed()
    return m.pick([f"if not hasattr(self, '{name}'):", f"    self.{name} = t(4, seed={k})", f"h = h + self.{name}"], [f"self.{name} = getattr(self, '{name}', 0) + 1", f"h = h + self.{name}"],
                  [f"if '{name}' not in self._buffers:", f"    self.register_buffer('{name}', h.mean().detach())", f"h = h + self.{name}"])


def running_mean(m):
    name = m.buffer("mean", m.pick("torch.zeros(())", "torch.zeros(4)"))
    new = m.pick("h.detach().mean()", "h.detach().reshape(-1, 4).mean(0).mean()")
    return m.pick([f"self.{name}.mul_(0.9).add_({new} * 0.1)"], [f"self.{name} += {new}"], [f"self.{name}.copy_(self.{name} * 0.5 + {new})"], ["with torch.no_grad():", f"    self.{name}.lerp_({new}.expand(self.{name}.shape), 0.5)"],
                  [f"self.{name}.data = self.{name}.data + {new}"]) + m.pick([f"h = h - self.{name}"], [])


def buffer_replaced_inside(m):
    name = m.buffer("state", "torch.zeros(())")
    return [f"self.{name} = {m.pick('h.detach().mean()', f'self.{name} + 1', 'h.detach()', f'torch.stack([self.{name}.mean(), h.detach().sum()])')}", f"h = h + self.{name}.mean()"]


def buffer_counter(m):
    name = m.buffer("step", "torch.zeros((), dtype=torch.long)")
    return [m.pick(f"self.{name} += 1", f"self.{name}.add_(1)", f"self.{name} = self.{name} + 1"), *m.pick(lambda: [f"h = h * self.{name}"], lambda: m.decide(f"self.{name} > 3"), lambda: [])()]


def buffer_written_at_index(m):
    name = m.buffer("slots", "torch.zeros(4)")
    where = m.pick("h.shape[0] % 4", "0", "x.dim() % 4", "len(h) - 1")
    return [f"self.{name}[{where}] = h.detach().mean()", f"h = h + self.{name}"]


def batch_norm(m):
    mean, var = m.buffer("mean", "torch.zeros(4)"), m.buffer("var", "torch.ones(4)")
    return [f"h = F.batch_norm(torch.cat([h.reshape(-1, 4), torch.ones(1, 4)]), self.{mean}, self.{var}, training={m.pick('True', 'True', 'h.shape[0] > 2', 'self.training')})[:-1].reshape(h.shape)"]


# ---- draws ----

def draw_like(m):
    return [m.pick("h = h + torch.rand_like(h)", "h = h * torch.randn_like(x).mean()", "h = h + torch.randn(h.shape)", "h = h * torch.bernoulli(torch.sigmoid(h))", "h = h + torch.randint_like(h, 3)")]


def draw_sized(m):
    return [m.pick("h = h + torch.randn(4)", "h = h * torch.rand(())", "h = h + torch.randint(0, 5, ())", "h = h + torch.rand(h.shape[0]).sum()", "h = h[torch.randperm(h.shape[0])]", "h = h + torch.normal(0.0, 1.0, (4,))",
                   "h = h + torch.multinomial(torch.ones(4), 2).sum()", "h = h + torch.rand(x.size(0), 4).mean()")]


def draw_like_plain(m):
    name = m.attribute("sigma", m.pick("torch.ones(4)", "torch.ones(1)", "[torch.ones(4)][0]"))
    return [m.pick(f"h = h + torch.randn_like(self.{name})", f"h = h * torch.rand_like(self.{name}).mean()", f"h = h + torch.normal(self.{name} * 0, self.{name})", f"h = h + torch.bernoulli(self.{name} * 0.5)")]


def draw_in_place(m):
    return [m.pick("h = h + torch.empty(4).normal_()", "h = h + torch.zeros_like(h).uniform_()", "h = h + h.new_empty(4).exponential_()", "h = h.clone().bernoulli_(0.5) + h", "h = h + nn.init.normal_(torch.empty(4))")]


def dropout(m):
    if m.chance(0.3):
        name = m.attribute("drop", "nn.Dropout(0.5)")
        m.edit(f"self.{name}.train()")
        m.edit(f"self.{name}.train()", f"self.{name}.p = 0.25")
        return [f"h = self.{name}(h)"]
    return [f"h = F.dropout(h, {m.pick('0.5', '0.25')}, training={m.pick('True', 'True', 'h.shape[0] > 2')})"]


def draw_decides(m):
    return m.decide(m.pick("torch.rand(()) > 0.5", "float(torch.rand(1)) > 0.5", "torch.randint(0, 2, ()).item()"))


# ---- writes ----

def write_to_input(m):
    name = m.pick("x", "x", m.use("y")) if m.chance(0.4) else "x"
    lines = m.pick([f"{name}.add_(1)"], [f"{name}.mul_(2.0)"], [f"{name}[0] = 1.0"], [f"{name}[..., -1] += h.mean()"], [f"{name} += 1"], [f"{name}.copy_(torch.tanh({name}))"], [f"torch.relu_({name})"], [f"{name}.t_().t_()" if name != "x" else "x.clamp_(max=1.0)"],
                   [f"torch.add({name}, 1.0, out={name})"], [f"{name}.data.mul_(0.5)"])
    return lines if name == "x" else ["if torch.is_tensor(y):", *indent(lines)]


def write_to_intermediate(m):
    z = m.new("z")
    return [*(["h = h.clone()"] if m.chance(0.5) else []), *m.pick([f"{z} = h[..., :2]", f"{z}.mul_(2)"], ["h[..., 0] = 1.0"], ["h += 1"], [f"{z} = h.reshape(-1)", f"{z}[0] = 5.0"], [f"{z} = h", "h.add_(1)", f"h = h + {z}"],
                                                                  ["h[h > 1] = 0.0"], ["h.masked_fill_(x.mean() > 0, 2.0)"], [f"{z} = h.detach()", f"{z}.zero_()"], [f"{z} = h.flatten()", f"{z}.add_(1)"], ["h.transpose(-1, 0)[0] = 2.0"])]


def write_to_plain_tensor(m):
    name = m.attribute("memory", "torch.zeros(4)")
    return [f"self.{name}.add_({m.pick('1', 'h.detach().mean()')})", f"h = h + self.{name}"]


def view_of_buffer_written(m):
    name = m.buffer("state", f"t(4, seed={m.seed()})")
    view = m.attribute("view", m.pick(f"self.{name}[:2]", f"self.{name}.view(2, 2)", f"self.{name}"))
    return [m.pick(f"self.{view}.add_(1)", f"self.{view}.mul_(0.5)", f"self.{name}.add_(1)"), f"h = h + self.{m.pick(f'{name}.sum()', f'{view}.mean()')}"]


# ---- hooks ----

def forward_hook(m):
    name, hook = m.layer(), m.pick("scale_output", "add_output", "watch_output")
    m.book.setup.append(f"{m.path}.{name}.register_forward_hook({m.need(hook)})")
    return [f"h = self.{name}(h)"]


def hook_with_keywords(m):
    name = m.layer()
    m.book.setup.append(f"{m.path}.{name}.register_forward_hook({m.need('keyword_output')}, with_kwargs=True{m.pick('', ', always_call=True')})")
    return [f"h = self.{name}({m.pick('', 'input=')}h)"]


def forward_pre_hook(m):
    name, hook = m.layer(), m.pick("scale_input", "watch_input")
    m.book.setup.append(f"{m.path}.{name}.register_forward_pre_hook({m.need(hook)})")
    return [f"h = self.{name}(h)"]


def hook_on_itself(m):
    kind, hook = m.pick(("forward", "watch_output"), ("forward", "scale_output"), ("forward_pre", "watch_input"), ("forward_pre", "scale_input"))
    m.book.setup.append(f"{m.path}.register_{kind}_hook({m.need(hook)})")
    return m.op()


def backward_hook(m):
    name = m.layer()
    m.book.gradients = True
    m.book.around.append("'backward'")
    hook = m.pick(("full_backward", "scale_gradient"), ("full_backward", "scale_gradient"), ("full_backward_pre", "scale_gradient_before"))
    m.book.setup.append(f"{m.path}.{name}.register_{hook[0]}_hook({m.need(hook[1])})")
    return [f"h = self.{name}(h)"]


def tensor_hook(m):
    m.book.gradients = True
    m.book.around.append("'backward'")
    return ["if h.requires_grad:", f"    h.register_hook({m.need('scale_tensor_gradient')})"]


def hooks_exchanged(m):
    name, first, second = m.layer(), *m.rng.sample(["scale_output", "add_output", "watch_output"], 2)
    m.need(first), m.need(second)
    if m.chance(0.7):
        m.book.setup.append(f"{m.path}.{name}.register_forward_hook({first})")
    m.edit(f"self.{name}._forward_hooks.clear()", f"self.{name}.register_forward_hook({second})")
    m.edit(f"self.{name}._forward_hooks.clear()")
    m.edit(f"self.{name}.register_forward_pre_hook({m.need('scale_input')})")
    m.edit(f"self.{name}.register_full_backward_hook({m.need('scale_gradient')})")
    return [f"h = self.{name}(h)"]


def hook_put_on_a_child(m):
    call = m.child()
    name = call().partition("(")[0].removeprefix("self.")
    m.edit(f"self.{name}.register_forward_hook({m.need(m.pick('scale_output', 'watch_output'))})")
    m.edit(f"self.{name}.register_forward_pre_hook({m.need('scale_input')})")
    return [f"h = {call()}"]


def global_hooks(m):
    m.book.around.append(m.need(m.pick("global_hook", "global_pre_hook")) + "()")
    return m.op()


# ---- weights reached around the modules ----

def through_parameters(m):
    w = m.parameter(4, 4)
    return [m.pick(f"h = h @ self._parameters['{w}'].t()", f"h = F.linear(h, dict(self.named_parameters())['{w}'])", f"h = h @ vars(self)['_parameters']['{w}']", f"h = F.linear(h, self.get_parameter('{w}'))",
                   f"h = h @ getattr(self, '{w}').data", f"h = h @ self.{w}.detach().T", f"h = h @ self.state_dict(keep_vars=True)['{w}']" if m.chance(0.2) else f"h = h @ self.{w}[:, [1, 0, 2, 3]]")]


def weight_of_a_layer(m):
    name = m.layer()
    return [m.pick(f"h = F.linear(h, self.{name}.weight, self.{name}.bias)", f"h = h @ self.{name}.weight", f"h = h @ self.{name}._parameters['weight'].t()", f"h = h + self.{name}.weight.sum()", f"h = h + self.{name}.weight[0]",
                   f"h = F.linear(h, self._modules['{name}'].weight)", f"h = h.to(self.{name}.weight.dtype)", f"h = h * self.{name}.weight.shape[0]", f"h = F.linear(h, self.{name}.weight * 0.5)")]


def stored_view(m):
    w = m.parameter(4, 4)
    view = m.attribute("view", m.pick(f"self.{w}.data.t()", f"self.{w}.detach()[:2]", f"self.{w}.data", f"[self.{w}.data.t()]"))
    read = f"(self.{view}[0] if isinstance(self.{view}, list) else self.{view})"
    return [m.pick(f"h = h + {read}.sum() * 0.1", f"h = h + {read}[0, :1]", f"h = h + (h @ {read}.t()).mean() if {read}.shape[-1] == 4 else h"), f"h = h @ self.{w}"]


def parent_weakref(m):
    w = m.parameter(4, 4)
    name = m.new("g")
    m.book.classes.append("\n".join([f"class {name.upper()}(nn.Module):", "    def __init__(self, up):", "        super().__init__()", "        self.up = weakref.ref(up)", "", "    def forward(self, x):",
                                     f"        return {m.pick(f'x @ self.up().{w}', f'F.linear(x, self.up().{w})', f'x + self.up().{w}[0]')}", ""]))
    m.init.append(f"self.{name} = {name.upper()}(self)")
    m.book.top.append("REACHES = True")
    return [f"h = self.{name}(h)"]


def lambda_over_self(m):
    w = m.parameter(4, 4)
    name = m.attribute("reach", m.pick(f"lambda h: h @ self.{w}", f"lambda h: F.linear(h, self.{w})", f"lambda h: h + self.{w}.t()[0]"))
    m.book.top.append("REACHES = True")
    return [f"h = self.{name}(h)"]


def global_registry(m):
    m.need("REGISTRY")
    return [m.pick("h = h @ REGISTRY['w']", "h = F.linear(h, REGISTRY['w'], REGISTRY['p'])", "h = h + REGISTRY['p']", "h = h + REGISTRY['w'].t()[0]")]


def modules_in_a_list(m):
    name = m.attribute("hidden", m.pick(f"[linear({m.seed()})]", f"(linear({m.seed()}),)", f"{{0: linear({m.seed()})}}"))
    return [f"h = self.{name}[0](h)"]


def tied_weights(m):
    name, other = m.layer(), m.attribute("tied", "nn.Linear(4, 4, bias=False)")
    m.init.append(f"self.{other}.weight = self.{name}.weight")
    return [f"h = self.{other}(torch.tanh(self.{name}(h)))"]


# ---- gradients, dtypes, layout, settings ----

def no_grad_block(m):
    m.book.gradients = True
    return [f"with {m.pick('torch.no_grad()', 'torch.no_grad()', 'torch.set_grad_enabled(False)', 'torch.set_grad_enabled(h.shape[0] > 2)')}:", *indent(m.block())]


def enable_grad_block(m):
    m.book.gradients = True
    return ["with torch.enable_grad():", *indent(m.block())]


def grad_mode(m):
    return m.decide("torch.is_grad_enabled()")


def gradient_inside(m):
    z = m.new("z")
    return ["with torch.enable_grad():", f"    {z} = h.detach().requires_grad_()", f"    h = h + torch.autograd.grad(({z} ** 2).sum(), {z})[0]"]


def requires_grad(m):
    m.book.gradients = True
    return m.decide(m.pick("x.requires_grad", "h.requires_grad", "h.grad_fn is None", "x.is_leaf", "h.is_leaf", "h.requires_grad and x.is_leaf"))


def dtype_question(m):
    name = m.pick("x", "h", m.use("y")) if m.chance(0.6) else m.use("y")
    question = m.pick(f"{name}.dtype == torch.float64", f"{name}.is_floating_point()", f"{name}.dtype in (torch.float32, torch.bool)", f"{name}.element_size() == 4", f"torch.is_floating_point({name})", f"str({name}.dtype) == 'torch.float32'",
                      f"torch.finfo({name}.dtype).bits == 32" if name != "y" else "y.dtype.is_floating_point", f"isinstance({name}, torch.FloatTensor)")
    return m.decide(question if name != "y" else f"torch.is_tensor(y) and {question}")


def dtype_promotion(m):
    m.use("y")
    z = m.new("z")
    return ["if torch.is_tensor(y):", f"    {z} = y.sum().reshape(1) * {m.pick('h.mean().detach()', 'torch.ones(1)', '2')}", *indent(m.decide(f"{z}.dtype == torch.float32")), f"    h = h + {z}.to(h.dtype)"]


def contiguity(m):
    return m.decide(m.pick("x.is_contiguous()", "h.is_contiguous()", "x.stride(0) == 12", "x.stride()[-1] == 1", "h.transpose(0, -1).is_contiguous()", "x.stride(0) > x.stride(-2)", "0 in x.stride()", "h.expand(2, *h.shape).is_contiguous()",
                           "h[..., :2].is_contiguous()"))


def training_question(m):
    m.edit(f"{m.path}.train()")
    m.edit(f"{m.path}.training = True")
    return m.decide("self.training")


def settings(m):
    m.book.around.append(m.pick("torch.autocast('cpu', torch.bfloat16)", "torch.inference_mode()", m.need("other_default") + "()", "torch.no_grad()"))
    return m.decide(m.pick("torch.get_default_dtype() == torch.float32", "torch.is_autocast_enabled('cpu')", "torch.is_inference_mode_enabled()", "torch.compiler.is_compiling()", "torch.jit.is_tracing()", "torch.onnx.is_in_onnx_export()",
                           "torch.tensor(1.0).dtype == torch.float32", "torch.compiler.is_exporting()", "h.is_inference()"))


# ---- what users do between calls ----

def attribute_changed(m):
    name = m.attribute("scale", m.pick("2.0", "2", "1.5"))
    for value in ("3.0", "2", "True", "-0.5", "torch.tensor(2.5)"):
        m.edit(f"self.{name} = {value}")
    return m.pick(lambda: [f"h = h * self.{name}"], lambda: m.decide(f"self.{name} > 2"), lambda: [f"h = h * float(self.{name})"])()


def configuration_changed(m):
    name = m.attribute("config", m.pick("{'scale': 2.0, 'deep': {'on': True}}", "types.SimpleNamespace(scale=2.0, deep={'on': True})"))
    if "Simple" in m.init[-1]:
        m.edit(f"self.{name}.scale = 3.0"), m.edit(f"self.{name} = types.SimpleNamespace(scale=4.0, deep={{'on': False}})")
        return m.pick(lambda: [f"h = h * self.{name}.scale"], lambda: m.decide(f"self.{name}.deep['on']"))()
    m.edit(f"self.{name}['scale'] = 3.0"), m.edit(f"self.{name} = {{'scale': 4.0, 'deep': {{'on': False}}}}")
    return m.pick(lambda: [f"h = h * self.{name}['scale']"], lambda: m.decide(f"self.{name}['deep']['on']"), lambda: m.decide(f"self.{name}['scale'] > 2"))()


def layer_attribute_changed(m):
    name, value, edits = m.pick(("nn.LayerNorm(4)", "norm", ("eps = 0.5",)), ("nn.Softmax(-1)", "softmax", ("dim = 0",)), ("nn.LeakyReLU(0.1)", "leaky", ("negative_slope = 0.9",)), ("nn.Hardtanh()", "hard", ("max_val = 0.2",)),
                                ("nn.GELU()", "gelu", ("approximate = 'tanh'",)), ("nn.Dropout(0.5)", "drop", ("training = True", "p = 0.0")))
    name, value = m.attribute(value, name), value
    for edit in edits:
        m.edit(f"self.{name}.{edit}")
    return [f"h = self.{name}(h)"]


def buffer_reshaped(m):
    name = m.pick(m.buffer, m.attribute)("table", "torch.arange(4.0)")
    for value in ("torch.arange(6.0)", "torch.ones(1)", "torch.arange(4.0) * 2", "torch.zeros(2, 2)", "None" if m.chance(0.2) else "torch.arange(4)"):
        m.edit(f"self.{name} = {value}")
    return m.pick(lambda: [f"for v in self.{name}:", "    h = h + v.mean() * 0.5" if m.chance(0.2) else "    h = h + v.sum()"], lambda: [f"h = h * self.{name}.numel()"], lambda: m.decide(f"self.{name}.shape[0] > 4"), lambda: m.decide(f"self.{name}.dim() == 1"),
                  lambda: [f"h = h + self.{name}.sum()"], lambda: m.decide(f"len(self.{name}) == h.shape[-1]"), lambda: m.decide(f"self.{name} is None"), lambda: m.decide(f"self.{name}.dtype == torch.float32"))()


def child_replaced(m):
    name = m.layer()
    act = m.attribute("act", "nn.ReLU()")
    m.edit(f"self.{name} = linear({m.seed()})"), m.edit(f"self.{act} = nn.Tanh()"), m.edit(f"self.{name}.bias = None"), m.edit(f"self.{name} = nn.Sequential(linear({m.seed()}), nn.Tanh())"), m.edit(f"self.{act} = nn.Identity()")
    m.edit(f"self._modules['{act}'] = nn.GELU()"), m.edit(f"self.add_module('{name}', linear({m.seed()}))")
    return [f"h = self.{act}(self.{name}(h))", *(m.decide(f"self.{name}.bias is None") if m.chance(0.1) else [])]


def forward_replaced(m):
    name = m.layer()
    if m.chance(0.3):
        m.book.setup.append(f"{m.path}.{name}.forward = {m.need('doubled')}")
    m.edit(f"self.{name}.forward = {m.need('doubled')}")
    return [f"h = self.{name}(h)"]


def list_of_settings(m):
    name = m.attribute("steps", "[2, 3]")
    m.edit(f"self.{name}.append(4)"), m.edit(f"self.{name}[0] = 5"), m.edit(f"self.{name} = (1,)")
    return [f"for step in self.{name}:", "    h = h * 0.5 + step"]


def bias_written(m):
    name = m.layer()
    m.edit(f"self.{name}.bias.data.add_(1)"), m.edit(f"self.{name}.bias = nn.Parameter(t(4, seed={m.seed()}), requires_grad=False)"), m.edit(f"self.{name}.bias.requires_grad_(True)")
    return [f"h = self.{name}(h)"]


# ---- control ----

def early_return(m):
    question = m.pick("x.shape[0] > 3", "h.shape[0] == 1", "x.dim() == 2", "h.numel() > 40", "h.squeeze().dim() == 1", "len(h) % 2 == 0")
    if m.chance(0.2):
        m.use("n")
        question = "n == 3"
    return [f"if {question}:", *indent(m.block()), "    return h"]


def try_except(m):
    body, error = m.pick(("h = h.view(2, -1, 4)", "RuntimeError"), ("h = h + h.reshape(-1)[:6].view(2, 3).sum()", "RuntimeError"), ("h = h.transpose(0, 1)", "IndexError"), ("h = h * x.transpose(0, 2).sum()", "IndexError"),
                         ("h = h + torch.ones(3, 4)", "RuntimeError"), ("h = h + h[2].mean()", "IndexError"), ("h = h + h.reshape(4, -1).sum()", "Exception"), ("h = h.view(-1, 4)", "RuntimeError"), ("b, s, d = h.shape\nh = h * s", "ValueError"),
                         ("h = h * torch.ones(2, 3, 1)", "RuntimeError"), ("h = h @ torch.ones(h.shape[0], 2).t().t() if False else torch.cat([h, torch.ones(1, 3, 4)])", "(RuntimeError, ValueError)"))
    return ["try:", *(indent(m.op()) if m.chance(0.5) else []), *indent(body.split("\n")), f"except {error}:", *indent(m.block()),
            *(["else:", *indent(m.op())] if m.chance(0.3) else []), *(["finally:", "    h = h + 1"] if m.chance(0.3) else [])]


def try_argument(m):
    body, error, name = m.pick(("h = h + y.mean()", "AttributeError", "y"), ("h = h + items[1].mean()", "IndexError", "items"), ("h = h + table['b'].mean()", "(KeyError, TypeError)", "table"), ("h = h + int(mode)", "ValueError", "mode"),
                               ("h = h + torch.stack(list(items)).sum()", "(RuntimeError, TypeError)", "items"), ("h = h + y", "(RuntimeError, TypeError)", "y"), ("h = h * [1.0, 2.0][n]", "(IndexError, TypeError)", "n"))
    m.use(name)
    return ["try:", f"    {body}", f"except {error}:", *indent(m.block())]


def try_finally(m):
    name = m.attribute("done", "0")
    return ["try:", *indent(m.block()), "finally:", f"    self.{name} += 1"]


def raises(m):
    error = m.pick("ValueError('too long')", m.need("Refused") + "()", "RuntimeError(f'{h.shape}')", "NotImplementedError")
    return [f"if {m.pick('x.shape[0] > 4', 'x.dim() == 1', 'h.shape[0] == 1', 'h.numel() > 60', 'h.dim() == 4', 'x.shape[-2] == 5')}:", f"    raise {error}"]


def assertion(m):
    return [m.pick("assert x.shape[0] < 5", "assert h.dim() > 1, h.shape", "torch._assert(x.shape[0] < 5, 'long')", "torch._check(h.shape[0] < 5)", "assert x.numel() % 4 == 0", "assert isinstance(x, torch.Tensor)", "b, *_ = h.shape; assert b != 1")]


def operator_fails(m):
    """An operator that fails for other inputs than the example."""
    return [m.pick("h = h + h.reshape(-1, 12).sum()", "h = h + torch.ones(2, 1, 1) if x.dim() != 1 else h + torch.ones(3)", "h = h.transpose(0, 1).transpose(0, 1)", "h = h + h[1].mean()", "h = h + x.select(0, 1).sum()", "h = h + h.view(2, -1).sum()")]


def closures(m):
    k = m.new("k")
    return m.pick([f"{k} = lambda v, s=h.shape[0]: v * s", f"h = {k}(h)"], [f"{k} = [v.mean() for v in h if v.dim() > 1]", f"h = h + sum({k}, 0.5)"], [f"{k} = (h * i for i in range(1, 3))", f"h = sum({k})"],
                  [f"def {k}(v):", "    return v + h.shape[0] if h.dim() > 2 else v", f"h = {k}(h)"], [f"{k} = functools.partial(torch.add, alpha={m.size()})", f"h = {k}(h, h.mean())"],
                  [f"if ({k} := {m.size()}) > 2:", f"    h = h * {k}"])


KINDS = (
    rank_of_input, rank_of_intermediate, rank_match, size_of_input, size_of_intermediate, size_from_values, size_equality, loop_over_size, loop_over_rows, while_over_size,
    size_in_string, size_type, size_hash, getattr_by_size, module_by_size, size_arithmetic, slice_by_size, size_passed_down,
    none_of_argument, argument_number, number_in_arithmetic, argument_number_type, argument_string, list_length, list_contents, dict_order, dict_keys,
    identity_of_arguments, identity_of_list_items, identity_of_intermediate, memory_of_arguments, views_written,
    child_none, child_tuple, child_dict, child_string, child_number, child_rank, child_dtype, child_identity,
    traced_child, python_child, loop_in_two_places, effect_before_question, child_called_twice, shared_child, containers, value_branch, number_from_values, function_of_module,
    counter, last_value, growing_list, dict_cache, kept_tensor, lazy_attribute, running_mean, buffer_replaced_inside, buffer_counter, buffer_written_at_index, batch_norm,
    draw_like, draw_sized, draw_like_plain, draw_in_place, dropout, draw_decides,
    write_to_input, write_to_intermediate, write_to_plain_tensor, view_of_buffer_written,
    forward_hook, hook_with_keywords, forward_pre_hook, hook_on_itself, backward_hook, tensor_hook, hooks_exchanged, hook_put_on_a_child, global_hooks,
    through_parameters, weight_of_a_layer, stored_view, parent_weakref, lambda_over_self, global_registry, modules_in_a_list, tied_weights,
    no_grad_block, enable_grad_block, grad_mode, gradient_inside, requires_grad, dtype_question, dtype_promotion, contiguity, training_question, settings,
    attribute_changed, configuration_changed, layer_attribute_changed, buffer_reshaped, child_replaced, forward_replaced, list_of_settings, bias_written,
    early_return, try_except, try_argument, try_finally, raises, assertion, operator_fails, closures,
)
BY_NAME = {kind.__name__: kind for kind in KINDS}
PYTHON = {value_branch, number_from_values, size_from_values, draw_decides, grad_mode, gradient_inside, settings,           # these make a module Python, so that
          counter, last_value, growing_list, dict_cache, kept_tensor, lazy_attribute, running_mean, buffer_replaced_inside,    # they stand in children mostly
          buffer_counter, buffer_written_at_index, write_to_plain_tensor, view_of_buffer_written, try_finally}

RETURNS = ("return h",) * 8 + ("return h, x", "return {'h': h, 'size': h.shape[0]}", "return [h, None, 'text', h.dim()]", "return Output(h, x.shape)", "return Record(h, len(h))", "return h, (h * 2, h[..., 0])",
                               "return h if h.dim() > 2 else (h, x)", "return h.squeeze()", "return {str(len(h)): h}", "return list(h.unbind(0)) + [h]")


# ---- inputs ----

class Inputs:
    """The arguments of one call, and how they vary."""

    def __init__(self, rng, used, gradients):
        self.rng, self.used, self.gradients = rng, used, gradients
        self.text = {"x": f"t(2, 3, 4, seed={rng.randrange(99)})"}
        if "y" in used:
            self.text["y"] = rng.choice([f"t(2, 3, 4, seed={rng.randrange(99)})"] * 4 + ["None", "x", "t(4, seed=5)", "x.view_as(x)"])
        if "items" in used:
            self.text["items"] = rng.choice(["[t(4, seed=1), t(4, seed=2)]", "[x, t(4, seed=2)]", "(t(4, seed=1),)", "[]"])
        if "table" in used:
            self.text["table"] = rng.choice(["{'a': t(4, seed=1), 'b': t(4, seed=2)}", "{'a': t(4, seed=1)}", "{'b': x, 'a': t(4, seed=1)}"])
        self.text.update({name: value for name, value in EXAMPLES.items() if name in used})

    def varied(self, changes):
        new = copy.copy(self)
        new.text = dict(self.text)
        names = list(new.text)
        for _ in range(changes):
            name = new.rng.choice(["x", *names])
            new.text[name] = getattr(new, f"other_{name}")()
        return new

    def other_x(self):
        shape = self.rng.choice([(1, 3, 4), (2, 1, 4), (1, 1, 4), (2, 5, 4), (2, 2, 4), (2, 1, 4), (2, 6, 4), (3, 3, 4), (5, 2, 4), (4, 4, 4), (3, 4), (1, 4), (2, 4), (4,), (2, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4), (2, 3, 4), (3, 1, 4)])
        seed, shift = self.rng.randrange(99), self.rng.choice(["", "", ", shift=1.0", ", shift=-1.0"])
        grad = ", grad=True" if self.gradients and self.rng.random() < 0.5 else ""
        how = self.rng.random()
        if how < 0.08 and len(shape) > 2:
            return f"t({', '.join(map(str, (shape[1], shape[0], *shape[2:])))}, seed={seed}{shift}).transpose(0, 1)"
        if how < 0.12:
            return f"t(1, 3, 4, seed={seed}{shift}{grad}).expand(3, 3, 4)"
        if how < 0.16:
            return f"t(2, 3, 8, seed={seed}{shift}{grad})[..., ::2]"
        if how < 0.18:
            return f"t(2, 3, 4, seed={seed}, dtype=torch.float64)"
        if how < 0.2:
            return "t(0, 3, 4)"
        if how < 0.23:
            return f"t(3, 3, 4, seed={seed}{shift}{grad})[1:]"
        return f"t({', '.join(map(str, shape))}{',' if len(shape) == 0 else ''}, seed={seed}{shift}{grad})"

    def other_y(self):
        seed = self.rng.randrange(99)
        grad = ", grad=True" if self.gradients and self.rng.random() < 0.4 else ""
        return self.rng.choice(["None", "None", "x", "x", "x.clone()", "x.view_as(x)", "x[:1]", "x[..., :2]", "x.detach()", f"t(2, 3, 4, seed={seed}{grad})", f"t(2, 3, 4, seed={seed}{grad})", f"t(4, seed={seed}{grad})", f"t(1, seed={seed})", f"t(3, 1, seed={seed})",
                                f"t(2, 3, 4, seed={seed}, dtype=torch.float64)", f"t(4, seed={seed}, dtype=torch.long)", f"t(4, seed={seed}, dtype=torch.bool)", "torch.tensor(1.5)", "0.5", "x.transpose(0, -1)", "nn.Parameter(t(4, seed=3))"])

    def other_n(self):
        return self.rng.choice(["0", "1", "3", "4", "True", "False", "2.0", "None", "-1", "2", "torch.tensor(2)", "7"])

    def other_f(self):
        return self.rng.choice(["1.5", "-0.0", "0.0", "2", "float('nan')", "float('inf')", "1.0", "True", "-2.5", "1", "torch.tensor(0.5)"])

    def other_mode(self):
        return self.rng.choice(["'b'", "'b'", "'c'", "''", "'A'", "'3'", "'ab'"])

    def other_items(self):
        return self.rng.choice(["[]", "[t(4, seed=1)]", "[t(4, seed=1), t(4, seed=2), t(4, seed=3)]", "(t(4, seed=1), t(4, seed=2))", "[x, x]", "[t(4, seed=7)] * 2", "[x[:1], x]", "[t(4, seed=1), t(2, 4, seed=2)]", "[t(4, seed=2), x]", "(x,)", "[t(4, seed=8), t(4, seed=9)]",
                                "[t(4, seed=1), 0.5]" if self.rng.random() < 0.3 else "[t(4, seed=5), t(1, seed=6)]"])

    def other_table(self):
        return self.rng.choice(["{'b': t(4, seed=2), 'a': t(4, seed=1)}", "{'a': t(4, seed=1)}", "{'a': t(4, seed=1), 'b': t(4, seed=2), 'c': t(4, seed=3)}", "None", "{}", "collections.OrderedDict(b=t(4, seed=2), a=t(4, seed=1))", "{'b': t(4, seed=2)}",
                                "{'a': x, 'b': x}", "{'a': t(1, seed=1), 'b': t(2, 4, seed=2)}", "{'a': t(4, seed=1), 'b': t(4, seed=5)}"])

    def lines(self, keywords):
        """Lines that make args and kwargs. ``keywords`` is how many of the last arguments go by name."""
        names = [name for name in ("x", *DEFAULTS) if name in self.text]
        lines = [f"{name} = {self.text[name]}" for name in names]
        by_name = names[len(names) - min(keywords, len(names)):]
        args = [name for name in names if name not in by_name]
        return lines, f"({', '.join(args)}{',' if len(args) == 1 else ''})", f"dict({', '.join(f'{n}={n}' for n in by_name)})"


def written(seed, kinds):
    """The source text of a program."""
    book = Book(seed, kinds)
    root, rng = Module(book, "Root", "m"), book.rng
    lines = ["h = x", *(root.op() if rng.random() < 0.7 else [])]
    for _ in range(rng.randrange(2, 5) if len(kinds) > 9 else 2):
        lines += root.statement()
        if rng.random() < 0.5:
            lines += root.op()
    if "linear" not in " ".join(root.init):
        lines += [f"h = self.{root.layer()}(h)"]
    result = rng.choice(RETURNS)
    for name in ("Output", "Record"):
        if name in result:
            book.need(name)
    root.finish([*lines, result])

    example = Inputs(rng, root.used, book.gradients)
    keywords = rng.choice([0, 0, 9])                            # example_inputs is a tuple or a dict
    text, args, kwargs = example.lines(keywords)
    functions = ["\n".join(["def example():", *indent(text), f"    return {args}, {kwargs}, []"])]
    for number in range(8):
        inputs = example if number == 0 else example.varied(rng.choice([1, 1, 1, 2, 3]))
        text, args, kwargs = inputs.lines(keywords if rng.random() < 0.7 else rng.randrange(3))
        edits = rng.choice(book.edits) if number and book.edits and rng.random() < 0.4 else []
        around = [rng.choice(book.around)] if book.around and rng.random() < 0.5 else []
        around += ["torch.no_grad()"] if rng.random() < 0.2 else ["'backward'"] if book.gradients and rng.random() < 0.2 else []
        functions.append("\n".join([f"def call_{number}(m):", *indent(edits), *indent(text), f"    return {args}, {kwargs}, [{', '.join(dict.fromkeys(around))}]"]))
    wants_grad = "p.dim() == 1" if book.gradients and rng.random() < 0.4 else "False"
    make = ["def make():", "    m = Root().eval()", "    for p in m.parameters():", f"        p.requires_grad_({wants_grad})", *indent(book.setup), "    return m"]
    return "\n\n\n".join([PRELUDE.rstrip(), *dict.fromkeys(book.top), *(c.rstrip() for c in book.classes), "\n".join(make), *functions, "CALLS = [" + ", ".join(f"call_{i}" for i in range(8)) + "]"]) + "\n"


@dataclasses.dataclass
class Program:
    """Source text, executed as a module that inspect finds."""

    seed: int
    kinds: tuple
    source: str
    name: str = "random_program"

    @contextlib.contextmanager
    def loaded(self):
        name, filename = f"{self.name}_{self.seed}", f"<{self.name} {self.seed}>"
        module = types.ModuleType(name)
        module.__file__ = filename
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        sys.modules[name] = module
        try:
            exec(compile(self.source, filename, "exec"), vars(module))
            yield module
        finally:
            del sys.modules[name]
            linecache.cache.pop(filename, None)


def program(seed, kinds=None):
    """The program of this seed: the first of its attempts whose float model takes its own example."""
    names = tuple(BY_NAME) if kinds is None else tuple(kinds)
    table = [BY_NAME[name] for name in names]
    for attempt in range(50):
        made = Program(seed, names if kinds else (), written(f"{seed} {attempt} {' '.join(kinds or ())}", table))
        if runs(made):
            return made
    raise AssertionError(f"seed {seed} {names} makes no program that takes its own example")


def runs(made):
    with quiet(), made.loaded() as module:
        try:
            args, kwargs, _ = module.example()
            torch.default_generator.manual_seed(0)
            module.make()(*args, **kwargs)
        except Exception:
            return False
    return True


# ---- comparing ----

@contextlib.contextmanager
def quiet():
    """What warns does so in both models."""
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_rng_state(state)
            torch.set_default_dtype(dtype)


def differs(a, b, where):
    """What is not the same in two values, to any depth; None if nothing is. Modules and functions are not looked into."""
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        return None
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} in the float model, {type(b).__name__} in the other"
    if isinstance(a, Tensor):
        for what in ("dtype", "shape", "requires_grad", "stride"):
            was, now = (getattr(v, what)() if what == "stride" else getattr(v, what) for v in (a, b))
            if was != now:
                return f"{where}.{what}: {was} in the float model, {now} in the other"
        if bits(a) != bits(b):
            return f"{where}: other values, {brief(a)} in the float model, {brief(b)} in the other"
        return differs(a.grad, b.grad, f"{where}.grad") if a.is_leaf and b.is_leaf else None
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{where}: keys {list(a)} in the float model, {list(b)} in the other"
        return first(differs(a[k], b[k], f"{where}[{k!r}]") for k in a)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {len(a)} entries in the float model, {len(b)} in the other"
        return first(differs(v, w, f"{where}[{i}]") for i, (v, w) in enumerate(zip(a, b, strict=True)))
    if dataclasses.is_dataclass(a) or isinstance(a, types.SimpleNamespace):
        return differs(vars(a), vars(b), where)
    if a is b or callable(a) or isinstance(a, weakref.ref):
        return None
    return None if repr(a) == repr(b) else f"{where}: {a!r} in the float model, {b!r} in the other"


def first(found):
    return next((f for f in found if f is not None), None)


def bits(tensor):
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).detach().numpy().tobytes()


def brief(tensor):
    return f"{[round(v, 4) if isinstance(v, float) else v for v in tensor.detach().flatten()[:4].tolist()]}"


MISSING = object()
TORCHS = {*vars(nn.Module()), "_flat_weights"}


def state_differs(a, b):
    """Parameters, buffers, mode and plain attributes of every module. ``b`` may have tensors of its own beside those of ``a``."""
    others = dict(b.named_modules(remove_duplicate=False))
    for path, module in a.named_modules(remove_duplicate=False):
        where = path or "the model"
        if path not in others:
            return f"{where}: no such module"
        other = others[path]
        if module.training is not other.training:
            return f"{where}.training: {module.training} in the float model, {other.training} in the other"
        own, others_own = ([n for n in vars(m) if n not in TORCHS and not n.startswith(("_inro", "_graph"))] for m in (module, other))
        for name in [*module._parameters, *module._buffers, *own]:
            mine, theirs = (v.data if isinstance(v, nn.Parameter) and not v.requires_grad else v for v in (getattr(module, name), getattr(other, name, MISSING)))
            theirs = theirs.as_subclass(torch.Tensor) if type(theirs).__name__ == "UnpackedWeight" else theirs
            if theirs is MISSING:
                return f"{where}.{name}: missing"
            found = differs(mine, theirs, f"{where}.{name}")
            if found is not None:
                return found
        extra = set(others_own) - set(own) - set(module._buffers) - set(module._parameters)
        if extra:
            return f"{where}.{min(extra)}: an attribute that the float model does not have"
    return None


def tensors_in(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for v in value.values() for t in tensors_in(v))
    elif isinstance(value, (list, tuple)):
        yield from (t for v in value for t in tensors_in(v))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(vars(value))


def sharing(tensors):
    """Which of these tensors are the same object, and which lie in the same memory."""
    objects, memory = [id(t) for t in tensors], [t.untyped_storage().data_ptr() if t.numel() else -i for i, t in enumerate(tensors)]
    return [(objects.index(o), memory.index(s)) for o, s in zip(objects, memory, strict=True)]


@dataclasses.dataclass
class Outcome:
    """What one call did."""

    error: str | None = None
    text: str = ""
    output: object = None
    inputs: object = None
    generator: Tensor = None
    events: list = dataclasses.field(default_factory=list)
    shared: list = dataclasses.field(default_factory=list)


def outcome(module, model, call, number):
    module.EVENTS.clear()
    result = Outcome()
    try:
        args, kwargs, around = call(model)
        result.inputs = (args, kwargs)
        torch.default_generator.manual_seed(1000 + number)
        with contextlib.ExitStack() as stack:
            for context in around:
                if context != "backward":
                    stack.enter_context(context)
            result.output = model(*args, **kwargs)
            if "backward" in around:
                losses = [t.sum() for t in tensors_in(result.output) if t.requires_grad]
                if losses:
                    sum(losses).backward()
    except Exception as error:
        result.error, result.text = type(error).__name__, str(error).split("\n")[0]
    result.generator, result.events = torch.get_rng_state(), list(module.EVENTS)
    result.shared = sharing([*tensors_in(result.inputs), *tensors_in(result.output)])
    return result


def call_differs(want, got):
    if want.error != got.error:
        return f"raises: {want.error} ({want.text}) in the float model, {got.error} ({got.text}) in the other"
    found = first(differs(getattr(want, part), getattr(got, part), name) for part, name in (("output", "output"), ("inputs", "inputs after the call")))
    if found is not None:
        return found
    if not torch.equal(want.generator, got.generator):
        return "generator: another state after the call"
    if want.events != got.events:
        return f"hooks: {want.events} in the float model, {got.events} in the other"
    if want.shared != got.shared:
        return f"memory: the inputs and outputs share it as {want.shared} in the float model, {got.shared} in the other"
    return None


class Apart(Identity):
    """Identity with memory of its own, so that what still reads the user's weights shows."""

    def pack(self, matrix):
        return {"codes": matrix.clone()}


def quantized(model, args, kwargs):
    return inro_fx.quantize_graph(model, kwargs if kwargs else args, Apart())


def copied(model, args, kwargs):
    """In the place of `quantized`: what says whether the program itself is sound."""
    return copy.deepcopy(model)


def difference(made, quantize=quantized, statistics=None):
    """What the quantized model does otherwise than the float one: "call 3: output[0]: ..."; None if nothing."""
    with quiet(), made.loaded() as module:
        model = module.make()
        args, kwargs, _ = module.example()
        a, given, hooks = copy.deepcopy(model), copy.deepcopy((args, kwargs)), [len(m._forward_hooks) for m in model.modules()]
        drawn = torch.get_rng_state()
        try:
            b = quantize(model, args, kwargs)
        except Exception as error:
            return f"quantizing raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if statistics is not None:
            statistics["model"] = b
        found = state_differs(a, model) or differs(given, (args, kwargs), "example")
        if found is not None:
            return f"quantizing changes the user's: {found}"
        if not torch.equal(drawn, torch.get_rng_state()) or hooks != [len(m._forward_hooks) for m in model.modules()]:
            return "quantizing changes the user's generator or hooks"
        found = state_differs(a, b)
        if found is not None:
            return f"after quantizing: {found}"
        if not hasattr(module, "REACHES"):
            with torch.no_grad():                              # what is reached from the copy must not be the user's
                for tensor in [*model.parameters(), *model.buffers()]:
                    tensor.zero_() if tensor.numel() else None
        for number, call in enumerate(module.CALLS):
            want = outcome(module, a, call, number)
            got = outcome(module, b, call, number)
            if statistics is not None:
                statistics["calls"] = statistics.get("calls", 0) + 1
                statistics["raising"] = statistics.get("raising", 0) + (want.error is not None)
            found = call_differs(want, got) or state_differs(a, b)
            if found is not None:
                return f"call {number}: {found}"
    return None


def captured(model):
    """"one graph", "graph and Python" or "Python", of a quantized model."""
    report = inro_fx.report(model)
    return "Python" if not report.nodes else "graph and Python" if report.regions else "one graph"


# ---- fewer statements ----

def sort_of(found):
    """What kind of difference: without the call's number, the values and the names."""
    return None if found is None else re.sub(r"call \d+: |\[[^\]]*\]|\d", "", found)[:24]


def blocks_of(tree):
    """The lists of a syntax tree from which something may go: (node, field)."""
    parts = [s for s in tree.body if isinstance(s, (ast.ClassDef, ast.Assign)) or getattr(s, "name", "").startswith("call_")]
    return [(tree, "body")] + [(node, field) for part in parts for node in ast.walk(part) for field in ("body", "orelse", "finalbody", "elts") if isinstance(getattr(node, field, None), list)
            and (field != "elts" or (isinstance(node, ast.List) and node.elts and getattr(node.elts[0], "id", "").startswith("call_")))]


def edits_of(tree):
    """(number of a block, of an entry in it, None to drop it or the field whose statements take its place)"""
    for number, (node, field) in enumerate(blocks_of(tree)):
        for i, entry in enumerate(getattr(node, field)):
            if not isinstance(entry, (ast.FunctionDef, ast.ClassDef)) and not isinstance(node, ast.Module):
                yield from ((number, i, part) for part in (None, "body", "orelse") if part is None or isinstance(getattr(entry, part, None), list))
            elif isinstance(node, ast.Module) and getattr(entry, "name", "t") not in ("make", "example", "t", "linear"):
                yield number, i, None


def edited(tree, number, i, part):
    new = copy.deepcopy(tree)
    node, field = blocks_of(new)[number]
    block = getattr(node, field)
    block[i : i + 1] = [] if part is None else getattr(block[i], part)
    if not block and field == "body":
        block.append(ast.Pass())
    return new


def shrunk(made, quantize=quantized):
    """A program of fewer statements in which the quantized model differs in the same way."""
    want = sort_of(difference(made, quantize))

    def holds(source):
        candidate = dataclasses.replace(made, source=source)
        try:
            return runs(candidate) and sort_of(difference(candidate, quantize)) == want and difference(candidate, copied) is None
        except Exception:
            return False
    tree, before = ast.parse(made.source), None
    while before != ast.dump(tree):
        before, i = ast.dump(tree), 0
        while i < len(edits := list(edits_of(tree))):
            new = edited(tree, *edits[i])
            source = ast.unparse(ast.fix_missing_locations(new))
            if source != ast.unparse(tree) and holds(source):
                tree = new
            else:
                i += 1
    return dataclasses.replace(made, source=ast.unparse(tree))


def main():
    parser = argparse.ArgumentParser(description="Compares random models with what quantize_graph makes of them under Identity.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--seed", type=int, help="this one only: its source and the difference")
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), help="only these kinds of statements, and plain operators")
    parser.add_argument("--shrink", action="store_true", help="with --seed: the same difference from fewer statements")
    parser.add_argument("--float", action="store_true", help="compare with a copy of the float model: is the program itself sound?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quantize = copied if options.float else quantized
    if options.seed is not None:
        made = program(options.seed, options.kinds)
        found = difference(made, quantize)
        if options.shrink and found:
            made = shrunk(made, quantize)
            found = difference(made, quantize)
        print(made.source, f"# seed {made.seed}: {found or 'no difference'}", sep="\n")
        return int(found is not None)
    end, seed, failed = time.monotonic() + 60 * options.minutes, options.first, 0
    while time.monotonic() < end:
        try:
            found = difference(program(seed, options.kinds), quantize)
        except Exception as error:
            found = f"the check itself raises {type(error).__name__}: {error}"
        if found is not None:
            failed += 1
            print(f"{seed}: {found}", flush=True)
        seed += 1
    print(f"{seed - options.first} programs, {failed} differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
