"""What quantization did to each layer, as numbers measured on the stored codes.

`make_record` collects the facts once, while the float model is still there; `report` turns them into a `Report`, whose
``str()`` is the table of docs/report.md and which converts to JSON, CSV and Markdown.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tabulate import tabulate
from torch import nn

from .errors import ModelError
from .kernels import kernel_for
from .numerics import output_error
from .passes.capture.example import tensors_in
from .passes.capture.session import Session
from .passes.program import Program, meta_of, shape_of
from .passes.rules.fuse_conv import density_of
from .passes.run.forward import GraphForward
from .passes.scheme import activation_of_scheme
from .passes.solve.plan import Plan, Target, Weight

__all__ = ["ProgramCalls", "Report", "Row", "Skipped", "report"]

WIDTH = 132                # columns of the printed table


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantized use of a weight.

    ``layer`` is the module path (or the parameter's, where a module has several); ``shape`` is the weight's. Errors are
    relative (Frobenius norms), None where they were not measured; bytes are counted at a weight's first use.
    """

    layer: str
    op: str
    shape: tuple[int, ...]
    scheme: str
    scale_min: float | None
    scale_mean: float | None
    scale_max: float | None
    weight_error: float
    weight_sqnr: float
    weight_max: float
    isolated: float | None
    propagated: float | None
    float_bytes: int
    quantized_bytes: int
    kernel: str
    note: str = ""
    entropy: float | None = None           # bits that an ideal entropy coder needs for a code (Shannon's bound)
    observer: str = ""                     # what found the range of a static layer's inputs
    clipped: float | None = None           # the share of the calibration data outside of that range
    weight: str = ""                       # the path of the weight, under the first of its names
    solver: str = "nearest"                # what chose the codes
    share: float | None = None             # of the error of the output: what this weight's error does to it, to first order
    count: int = 1                         # how often the example's code does this: steps of a loop share a row, with the largest errors

    @property
    def ratio(self) -> float | None:
        return self.quantized_bytes / self.float_bytes if self.float_bytes else None


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A weight that stayed float, and why."""

    layer: str
    shape: tuple[int, ...]
    reason: str
    float_bytes: int


@dataclasses.dataclass
class Record:
    """The facts that the quantized model carries for `report`: plain data, copied and pickled with the model."""

    rows: list[Row]
    skipped: list[Skipped]
    steps: list[tuple[str, str]]
    regions: list[tuple[str, str]]              # (module path, why its own code stays Python)
    nodes: int                                  # of the root's graph; 0 where the root stays Python
    guards: list[str]
    output_error: float
    float_bytes: int                            # of every tensor that the float model stores
    errors: dict[tuple[str, str], float | None]  # (path of the program, its node) -> propagated or isolated error, for drawing
    unshared: str = ""                          # why rows have no share of the output's error
    equalized: bool = False                     # do its weights hold values that are divided elsewhere?


def stored_bytes(model: nn.Module) -> int:
    """Bytes of everything in the model's state_dict, shared tensors counted once."""
    seen: dict[Any, int] = {}
    for module in model.modules():
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            try:
                key: Any = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape)) \
                    if tensor.numel() and tensor.device.type != "meta" else id(tensor)
            except (RuntimeError, NotImplementedError):
                key = id(tensor)
            seen[key] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def make_record(session: Session, chosen: Plan, targets: list[Target], programs: Mapping[str, Program], errors: Mapping[Any, Any],
                facts: Mapping[str, Any], want: Any, got: Any, float_bytes: int, shares: Mapping[str, float] | str,
                equalized: bool = False) -> Record:
    rows: list[Row] = []
    counted: set[str] = set()
    folded: dict[Any, int] = {}
    for target in targets:
        weight = chosen.weights.get(target.use.constant)
        if weight is None:
            continue
        constant, fact, error = weight.constant, facts[target.use.constant], errors[target.key]
        first = constant.name not in counted
        counted.add(constant.name)
        kernel, note = _kernel_of(programs, target, weight)
        same = target.capture, target.module, target.use, kernel
        if same in folded:                                   # a step more of an unrolled loop
            before = rows[folded[same]]
            rows[folded[same]] = dataclasses.replace(before, count=before.count + 1, isolated=_larger(before.isolated, error.isolated),
                                                     propagated=_larger(before.propagated, error.propagated))
            continue
        folded[same] = len(rows)
        scale = fact["scale"] or (None, None, None)
        rows.append(Row(
            layer=_layer_name(target, constant), op=target.use.op, shape=constant.shape, scheme=weight.scheme.name,
            scale_min=scale[0], scale_mean=scale[1], scale_max=scale[2], weight_error=fact["error"].relative,
            weight_sqnr=fact["error"].sqnr, weight_max=fact["error"].largest, isolated=error.isolated,
            propagated=error.propagated, float_bytes=constant.bytes if first else 0,
            quantized_bytes=fact["bytes"] if first else 0, kernel=kernel,
            note=f"shares the codes of {constant.name}" if not first else
            "the example does not reach it" if session.kind_of(target.capture) == "unreached" else note,
            entropy=fact["entropy"], observer=weight.observer, clipped=weight.clipped, weight=constant.name,
            solver=chosen.solvers.get(constant.name, "nearest"),
            share=shares.get(constant.name) if first and not isinstance(shares, str) else None))
    skipped = [Skipped(s.constant.name, s.constant.shape, s.reason, s.constant.bytes) for s in chosen.skips]
    by_node: dict[tuple[str, str], float | None] = {}
    for target in targets:
        if target.key in errors and target.capture in programs:
            probe = programs[target.capture].probes.get((target.node or "", target.use.constant))
            record = errors[target.key]
            if probe is not None:
                by_node[target.capture, probe.node] = record.propagated if record.propagated is not None else record.isolated
    root = session.captures.get("")
    return Record(rows, skipped, list(session.steps), sorted(session.refusals.items()),
                  len(root.graph.nodes) if root is not None else 0,
                  [str(g) for p in session.captures.values() for g in p.guards if g.where], _worst(want, got), float_bytes, by_node,
                  shares if isinstance(shares, str) else "", equalized)


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def _kernel_of(programs: Mapping[str, Program], target: Target, weight: Weight) -> tuple[str, str]:
    """(what computes a use, why that is not the scheme's own operator): for as many rows as the example has."""
    program = programs.get(target.capture)
    probe = program.probes.get((target.node or "", target.use.constant)) if program is not None else None
    if program is None or probe is None:
        return "dequantize (Python)", ""
    node = next(n for n in program.graph.nodes if n.name == probe.node)
    meta = meta_of(node)
    name = meta.get("kernel", f"dequantize + {target.use.op}")
    operator, scheme = name.removeprefix("inro_fx."), weight.scheme
    shape = shape_of(node.args[0]) if node.args else None
    if operator == "recurrent":                                # its products are those of a linear of a state's rows
        operator = "linear_dynamic" if activation_of_scheme(scheme) == "dynamic" else "linear"
        shape = shape_of(_recurrent(node).args[1])
    if operator in ("linear", "linear_dynamic", "linear_static", "embedding"):
        result = meta.get("value")                           # of x's dtype, or of a table's
        floats = {} if result is None else {"dtype": result.dtype}
        rows, columns = math.prod(shape[:-1]) if shape is not None else 0, weight.layout.columns
        name = f"{name}/{kernel_for(operator, scheme.bits, scheme.group, columns, rows, **floats)}"
    if operator in ("conv", "conv_static"):
        kind = "conv_dynamic" if operator == "conv" and activation_of_scheme(scheme) == "dynamic" else operator
        case = (kind, scheme.bits, scheme.group, weight.layout.columns, 1)
        name = f"{name}/{kernel_for(*case, dtype=weight.constant.dtype, density=density_of(node, weight))}"
    return name, meta.get("unfused", "")


def _recurrent(node: Any) -> Any:
    """The call behind what a fused recurrent layer gives back."""
    while not str(node.target).startswith("inro_fx.recurrent"):
        node = node.all_input_nodes[0]
    return node


def _layer_name(target: Target, constant: Any) -> str:
    """The module path where the module's weight is called weight, else the weight's own path."""
    here = [n for n in constant.names if n.rpartition(".")[0] == target.module]
    name = here[0] if here else constant.name
    path, _, leaf = name.rpartition(".")
    return path if leaf == "weight" and path else name


def _worst(want: Any, got: Any) -> float:
    """The largest relative error over the floating-point leaves of an output."""
    pairs = zip(tensors_in(want), tensors_in(got), strict=False)
    errors = [output_error(a, b) for a, b in pairs if a.is_floating_point() and a.shape == b.shape]
    return max(errors, default=0.0, key=lambda e: math.inf if math.isnan(e) else e)


# ---- the report ----

@dataclasses.dataclass(frozen=True)
class ProgramCalls:
    """A program of a module (``layer``, "" the model itself), and the ``calls`` since quantization that it answered.

    ``kind`` is "graph", "region", "layer" or "unreached"; "further" for one that was captured at a later call.
    """

    layer: str
    kind: str
    calls: int


@dataclasses.dataclass(frozen=True)
class Report:
    """One `Row` per quantized use of a weight, one `Skipped` per weight that stayed float, and the totals.

    ``float_bytes`` and ``quantized_bytes`` are measured storage of the whole model, shared tensors counted once.
    ``programs`` count the calls since quantization that graphs answered, ``outside`` those that none covered, by reason.
    ``codes`` are the values that go from one integer operator to the next as codes, ``islands`` those that are floats in between, and why.
    """

    rows: list[Row]
    skipped: list[Skipped]
    float_bytes: int
    quantized_bytes: int
    output_error: float
    steps: list[tuple[str, str]]
    regions: list[tuple[str, str]]
    nodes: int
    guards: list[str]
    outside: dict[str, int]
    programs: list[ProgramCalls]
    codes: list[str] = dataclasses.field(default_factory=list)
    islands: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unshared: str = ""

    @property
    def sum_of_shares(self) -> float | None:
        """The shares of all rows added up: 1, but for rounded activations and terms of second order; None where there are none."""
        shares = [r.share for r in self.rows if r.share is not None]
        return sum(shares) if shares else None

    @property
    def coverage(self) -> float:
        """The share of all weight bytes that became codes."""
        quantized = sum(r.float_bytes for r in self.rows)
        total = quantized + sum(s.float_bytes for s in self.skipped)
        return quantized / total if total else 0.0

    def worst(self, count: int = 5) -> list[Row]:
        """The rows with the largest share of the output's error first, those without one by their isolated error after them."""
        return sorted(self.rows, key=lambda r: (r.share is None, -abs(r.share or 0.0),
                                                -(r.isolated if r.isolated is not None else r.weight_error)))[:count]

    # -- forms --

    def __str__(self) -> str:
        return _printable("\n\n".join(self._sections("simple")))

    def to_markdown(self) -> str:
        """The same tables as GitHub Markdown."""
        return _printable("\n\n".join(self._sections("github")))

    def to_json(self) -> str:
        """Everything, unrounded; infinities and NaN as strings."""
        data = {**dataclasses.asdict(self), "coverage": self.coverage}
        return json.dumps(_plain(data), indent=1, allow_nan=False)

    def to_csv(self) -> str:
        """One line per row and per skipped weight, unrounded; the column ``reason`` is empty for rows."""
        names = [f.name for f in dataclasses.fields(Row)] + ["reason"]
        out = io.StringIO()
        writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
        writer.writeheader()
        for entry in (*self.rows, *self.skipped):
            writer.writerow({**dataclasses.asdict(entry), "shape": "x".join(map(str, entry.shape))})
        return out.getvalue()

    def _sections(self, style: str) -> list[str]:
        sections = []
        if self.rows:
            columns = [(head, align, [text(row) for row in self.rows]) for head, align, text in COLUMNS]
            if not any(r.observer for r in self.rows):
                columns = [c for c in columns if c[0] not in ("inputs", "clipped")]
            if not any(r.solver != "nearest" for r in self.rows):
                columns = [c for c in columns if c[0] != "solver"]
            if len({r.scheme for r in self.rows}) == 1:
                columns = [c for c in columns if c[0] != "scheme"]           # the totals name it
            # tabulate puts two spaces between columns, and gives a header two of its own
            used = sum(2 + max(*(len(h) + 2 for h in head.split("\n")), *map(len, cells)) for head, _, cells in columns)
            columns.insert(0, ("layer", "left", _shortened([r.layer for r in self.rows], max(12, WIDTH - used))))
            sections.append(tabulate(list(zip(*[c[2] for c in columns], strict=True)), [c[0] for c in columns], tablefmt=style,
                                     disable_numparse=True, colalign=[c[1] for c in columns]))
        if self.skipped:
            body = [[textwrap.fill(s.layer, 40), _shape(s.shape), _kib(s.float_bytes), textwrap.fill(s.reason, 56)]
                    for s in self.skipped]
            sections.append(tabulate(body, ["left float", "shape", "KiB", "why"], tablefmt=style, disable_numparse=True,
                                     colalign=("left", "left", "right", "left")))
        sections.append("\n".join(self._totals()))
        return sections

    def _totals(self) -> list[str]:
        saved = 1 - self.quantized_bytes / self.float_bytes if self.float_bytes else 0.0
        lines = [f"whole model   {_kib(self.float_bytes)} KiB -> {_kib(self.quantized_bytes)} KiB ({saved:.1%} saved); "
                 f"{self.coverage:.1%} of the weight bytes are codes",
                 f"schemes       {', '.join(dict.fromkeys(r.scheme for r in self.rows)) or 'none'}",
                 f"final output  relative error {_percent(self.output_error)} on the example"]
        total = self.sum_of_shares
        if total is not None:
            first = [f"{r.layer} ({r.share:.0%})" for r in self.worst(3) if r.share is not None]
            lines.append(f"whose error   most of it: {', '.join(first)}; the shares add up to {total:.2f}")
        elif self.unshared:
            lines.append(f"whose error   not known: {self.unshared}")
        if self.codes or self.islands:
            reasons = dict.fromkeys(why for _, why in self.islands)
            floats = "; ".join(f"{', '.join(name for name, why in self.islands if why == reason)} ({reason})" for reason in reasons)
            lines.append(f"in between    {len(self.codes)} values stay codes from one operator to the next"
                         + (f"; floats: {floats}" if floats else ""))
        if self.nodes:
            lines.append(f"captured      one graph of {self.nodes} nodes, {len(self.guards)} guards on sizes")
        else:
            lines.append("captured      " + "; ".join(f"{rung}: {outcome}" for rung, outcome in self.steps))
        for path, reason in self.regions[:8]:
            lines.append(f"  runs as Python: {path or 'the model itself'} ({reason})")
        if len(self.regions) > 8:
            lines.append(f"  ... and {len(self.regions) - 8} more")
        for reason, count in sorted(self.outside.items(), key=lambda kv: -kv[1])[:4]:
            lines.append(f"  {count} call{'s' if count > 1 else ''} outside the graph: {reason}")
        return [textwrap.fill(line, WIDTH, subsequent_indent=" " * 14) for line in lines]


def report(model: nn.Module) -> Report:
    """The report of a model that `inro_fx.quantize_graph` made.

    Raises `ModelError` for any other model.
    """
    record: Record | None = getattr(model, "__dict__", {}).get("_inro")
    if record is None:
        raise ModelError(f"this {type(model).__name__} was not made by inro_fx.quantize_graph, so there is nothing to report")
    held = {f"{path}.{name}".lstrip(".") for path, m in model.named_modules(remove_duplicate=False)
            for name in vars(m).get("_inro_packed", {}) if m._parameters.get(name) is None}
    rows = [row for row in record.rows if row.weight in held]              # what was edited since is no row any more
    known = {s.layer for s in record.skipped} | {n for row in rows for n in (row.weight, row.layer)}
    put = [Skipped(name, tuple(p.shape), "it was put there after quantizing", p.numel() * p.element_size())
           for name, p in model.named_parameters() if p.dim() >= 2 and name not in known]
    outside: Counter[str] = Counter()
    programs = []
    values: dict[tuple[str, str], str] = {}
    for path, module in model.named_modules():
        if isinstance(module, GraphForward):
            for reason, count in module._inro_calls.items():
                outside[f"{path}: {reason}" if path else reason] += count
            programs += [ProgramCalls(path, "further" if i else r.program.kind, r.calls) for i, r in enumerate(module._inro_runners)]
            for program in [r.program for r in module._inro_runners[:1]]:
                given = {n.name for n in program.graph.nodes if n.op == "placeholder"}
                values |= {(path, node): why for rule, node, why in program.log if rule == "as codes" and node not in given}
    codes = [f"{path}: {node}" if path else node for (path, node), why in values.items() if not why]
    islands = [(f"{path}: {node}" if path else node, why) for (path, node), why in values.items() if why]
    return Report(rows, [*record.skipped, *put], record.float_bytes, stored_bytes(model), record.output_error, record.steps,
                  record.regions, record.nodes, record.guards, dict(outside), programs, codes, islands, record.unshared)


# ---- numbers as text ----

def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _printable(text: str) -> str:
    """Names come from models and files: no terminal shall obey them."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "" if value is None else str(value)
    return f"{value * 100:.2g}%" if 0 < value < 0.1 else f"{value:.1%}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _decibel(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f}"


def _kib(count: int) -> str:
    return f"{count / 1024:,.1f}" if count < 1024 * 1024 else f"{count / 1024:,.0f}"


def _kernel(row: Row) -> str:
    return row.kernel.removeprefix("inro_fx.").removesuffix(f" + {row.op}")


COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (       # of the printed table, after the layer's name
    ("op", "left", lambda r: r.op if r.count == 1 else f"{r.op} x{r.count}"),
    ("shape", "left", lambda r: _shape(r.shape)),
    ("scheme", "left", lambda r: r.scheme),
    ("solver", "left", lambda r: r.solver),
    ("scale\nmean", "right", lambda r: "" if r.scale_mean is None else f"{r.scale_mean:.2g}"),
    ("SQNR\ndB", "right", lambda r: _decibel(r.weight_sqnr)),
    ("bits", "right", lambda r: "" if r.entropy is None else f"{r.entropy:.1f}"),
    ("isolated\nerror", "right", lambda r: _percent(r.isolated)),
    ("propag.\nerror", "right", lambda r: _percent(r.propagated)),
    ("share", "right", lambda r: "" if r.share is None else f"{r.share:.1%}"),
    ("KiB", "right", lambda r: _kib(r.quantized_bytes) if r.float_bytes else "shared"),
    ("ratio", "right", lambda r: "" if r.ratio is None else f"{r.ratio:.2f}"),
    ("inputs", "left", lambda r: r.observer),
    ("clipped", "right", lambda r: _percent(r.clipped)),
    ("kernel", "left", _kernel),
)


def _shortened(names: list[str], width: int) -> list[str]:
    """Long paths lose their common beginning, then their middle; they stay different from each other."""
    if max(map(len, names), default=0) <= width:
        return names
    pieces = [n.split(".") for n in names]
    common = 0
    while all(len(p) > common + 1 and p[common] == pieces[0][common] for p in pieces):
        common += 1
    short = [("…." if common else "") + ".".join(p[common:]) for p in pieces]
    return [s if len(s) <= width else s[:width // 3] + "…" + s[-(width - width // 3 - 1):] for s in short]
