"""Pictures of a quantized model: text, DOT, SVG, PNG, PDF, and a networkx graph with the same attributes.

A model of more than `MOST_NODES` operators is drawn by module: every box is a module at the depth that still fits, with the
number of its operators and the worst error inside. Runs of siblings of the same shape (the layers of an encoder) are
folded into one box that says how often it repeats.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import graphviz
import networkx as nx
from torch import fx, nn

from .atomic import write_bytes
from .errors import InroError, MissingTool, ModelError
from .passes.carriers import name_of_target
from .passes.program import shape_of
from .passes.run.forward import GraphForward
from .report import Record, _percent

__all__ = ["draw", "to_networkx"]

MOST_NODES = 80
FORMATS = (".txt", ".dot", ".svg", ".png", ".pdf")
# error of a target's output -> fill colour: green to red, colour-blind safe by lightness as well
SCALE = ((0.001, "#d9f0d3"), (0.01, "#f7fcb9"), (0.05, "#fee391"), (0.2, "#fe9929"), (math.inf, "#d7301f"))
GREY, WHITE = "#e8e8e8", "#ffffff"


def to_networkx(model: nn.Module) -> nx.DiGraph:
    """The graph of a quantized model as a `networkx.DiGraph`, one node per operator.

    Node attributes: ``op`` (operator or module name), ``module`` (path), ``kind`` ("input", "output", "target", "operator",
    "module", or "skipped" with the ``reason`` why its weight stayed float), ``error`` (propagated relative error of a
    target, or None), ``kernel``, ``shape``. Weights and sizes are left out. Where the root stays Python, the nodes are the
    captured regions without arrows: who feeds whom is the Python's business.

    Raises `ModelError` for a model that `quantize_graph` did not make.
    """
    record = _record(model)
    picture: nx.DiGraph = nx.DiGraph()
    runners = model._inro_runners if isinstance(model, GraphForward) else []
    graph = runners[0].program.graph if runners else None
    if graph is None:
        return _python_root(model, record, picture)
    skips = {s.layer: s.reason for s in record.skipped}
    kept = {n for n in graph.nodes if n.op in ("placeholder", "output") or _is_operator(n)}
    for node in graph.nodes:
        if node not in kept:
            continue
        error = record.errors.get(("", node.name))
        target = ("", node.name) in record.errors
        plain = "target" if target else "operator"
        kind = {"placeholder": "input", "output": "output", "call_module": "module"}.get(node.op, plain)
        shape = shape_of(node)
        picture.add_node(node.name, op=_label(node), module=node.meta.get("module", ""), kind=kind, error=error,
                         kernel=node.meta.get("kernel", ""), shape=shape or ())
        reason = next((skips[i.meta["alias"].constant] for i in node.all_input_nodes
                       if "alias" in i.meta and i.meta["alias"].constant in skips), None)
        if reason is not None:
            picture.nodes[node.name].update(kind="skipped", reason=reason)
        for source in _sources(node, kept):
            picture.add_edge(source.name, node.name)
    return picture


def _python_root(model: nn.Module, record: Record, picture: nx.DiGraph) -> nx.DiGraph:
    errors: dict[str, list[float]] = {}
    for (path, _), error in record.errors.items():
        errors.setdefault(path, []).append(error if error is not None else 0.0)
    for path, found in errors.items():
        name = path or "(the model)"
        picture.add_node(name, op=type(model.get_submodule(path)).__name__, module=path, kind="module", error=max(found),
                         kernel="", shape=())
    return picture


def _record(model: nn.Module) -> Record:
    record = getattr(model, "__dict__", {}).get("_inro")
    if record is None:
        raise ModelError(f"this {type(model).__name__} was not made by inro_fx.quantize_graph, so there is nothing to draw")
    return record


def _is_operator(node: fx.Node) -> bool:
    """Does the node compute a tensor from activations? (Sizes, weights and guards are not drawn.)"""
    return node.op == "call_module" or (node.op in ("call_function", "call_method") and "value" in node.meta
                                        and "unpacks" not in node.meta and "alias" not in node.meta)


def _sources(node: fx.Node, kept: set[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        source = pending.pop(0)
        if source in kept:
            found[source] = None
        elif source not in seen:
            seen.add(source)
            pending.extend(source.all_input_nodes if "value" not in source.meta or source.op != "get_attr" else [])
    return list(found)


def _label(node: fx.Node) -> str:
    if node.op in ("placeholder", "output", "call_module"):
        return str(node.target)
    return name_of_target(node.target).rpartition("::")[2].removeprefix("functional.") or str(node.target)


# ---- folding large graphs into modules ----

@dataclasses.dataclass
class Box:
    """A node of the picture: one operator, or a module with ``count`` of them, repeated ``times``."""

    label: str
    kind: str
    error: float | None
    kernel: str = ""
    count: int = 1
    times: int = 1
    module: str = ""


def _boxes(picture: nx.DiGraph) -> tuple[dict[str, Box], set[tuple[str, str]]]:
    """The boxes and arrows to draw: every operator of a small graph, modules of a large one."""
    if picture.number_of_nodes() <= MOST_NODES:
        boxes = {name: Box(a["op"], a["kind"], a["error"], a["kernel"], module=a["module"]) for name, a in picture.nodes.items()}
        return boxes, set(picture.edges)
    depth = 1
    while depth < 12 and len({_key(a, depth + 1) for a in picture.nodes.values()}) <= MOST_NODES:
        depth += 1
    groups: dict[str, list[str]] = {}
    for name, attributes in picture.nodes.items():
        groups.setdefault(_key(attributes, depth), []).append(name)
    folded = _repeats(groups, picture)
    boxes, owner = {}, {}
    for key, (members, times, label) in folded.items():
        errors = [picture.nodes[m]["error"] for m in members if picture.nodes[m]["error"] is not None]
        kinds = {picture.nodes[m]["kind"] for m in members}
        kind = next(k for k in ("target", "skipped", "module", "operator", "input", "output") if k in kinds)
        boxes[key] = Box(label, kind, max(errors, default=None), count=len(members) // times, times=times, module=key)
        owner.update(dict.fromkeys(members, key))
    edges = {(owner[a], owner[b]) for a, b in picture.edges if owner[a] != owner[b]}
    return boxes, edges


def _key(attributes: dict[str, Any], depth: int) -> str:
    if attributes["kind"] in ("input", "output"):
        return f"{attributes['kind']} {attributes['op']}"
    return ".".join(attributes["module"].split(".")[:depth]) or "(the model)"


def _repeats(groups: dict[str, list[str]], picture: nx.DiGraph) -> dict[str, tuple[list[str], int, str]]:
    """Runs of sibling modules with the same operators become one: ``layer.0 … layer.11``."""
    shape = {key: tuple(picture.nodes[m]["op"] for m in members) for key, members in groups.items()}
    prefix = {key: _numbered(key) for key in groups}
    runs: dict[str, tuple[list[str], int, str]] = {}
    first_of: dict[tuple, str] = {}
    for key, members in groups.items():
        signature = (prefix[key], shape[key])
        if prefix[key] is not None and signature in first_of:
            leader = first_of[signature]
            old, times, label = runs[leader]
            runs[leader] = (old + members, times + 1, f"{label.split(' … ')[0]} … {key}")
        else:
            first_of.setdefault(signature, key)
            runs[key] = (list(members), 1, key)
    return runs


def _numbered(path: str) -> str | None:
    """``encoder.layer.#.output`` for ``encoder.layer.3.output``; None for a path without a number."""
    pieces = path.split(".")
    return ".".join("#" if p.isdigit() else p for p in pieces) if any(p.isdigit() for p in pieces) else None


# ---- writing ----

def draw(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Draws a quantized model into a file whose ending says how: .txt, .dot, .svg, .png or .pdf; returns the path.

    Boxes are coloured by the propagated error of their target; grey ones carry no weight, dashed ones hold a weight that
    stayed float. .svg, .png and .pdf need the program ``dot`` of Graphviz; .txt and .dot need nothing.

    Raises `ModelError` for a model that `quantize_graph` did not make, `MissingTool` where ``dot`` is not installed, and
    `InroError` for another ending.
    """
    file = Path(path)
    if file.suffix not in FORMATS:
        raise InroError(f"{file.name}: a drawing ends in one of {', '.join(FORMATS)}")
    boxes, edges = _boxes(to_networkx(model))
    if file.suffix == ".txt":
        text = _text(boxes, edges)
    else:
        source = _dot(boxes, edges, type(model).__name__)
        if file.suffix == ".dot":
            text = source.source
        elif shutil.which("dot") is None:
            raise MissingTool(f"drawing {file.suffix} needs the program dot: install Graphviz (apt-get install graphviz, "
                              f"brew install graphviz), or draw to .txt or .dot")
        else:
            return write_bytes(file, source.pipe(file.suffix[1:]))
    return write_bytes(file, text.encode())


def _colour(box: Box) -> str:
    if box.error is None:
        return WHITE if box.kind in ("input", "output") else GREY
    return next(colour for bound, colour in SCALE if not box.error > bound)


def _caption(box: Box) -> str:
    lines = [box.label + (f"  ×{box.times}" if box.times > 1 else "")]
    if box.kind == "target" and box.module and box.module not in box.label:
        lines.append(box.module)
    if box.count > 1:
        lines.append(f"{box.count} operators")
    if box.error is not None:
        lines.append(f"error {_percent(box.error)}" + (f", {box.kernel.removeprefix('inro_fx.')}" if box.kernel else ""))
    return "\n".join(lines)


def _dot(boxes: dict[str, Box], edges: set[tuple[str, str]], title: str) -> graphviz.Digraph:
    names = {key: f"n{i}" for i, key in enumerate(boxes)}
    graph = graphviz.Digraph(title, graph_attr=dict(rankdir="TB", nodesep="0.25", ranksep="0.3", fontname="Helvetica",
                                                    label=title, labelloc="t"),
                             node_attr=dict(shape="box", style="filled,rounded", fontname="Helvetica", fontsize="10",
                                            color="#555555", margin="0.12,0.05"),
                             edge_attr=dict(color="#777777", arrowsize="0.6"))
    for key, box in boxes.items():
        dark = _colour(box) == SCALE[-1][1]
        graph.node(names[key], graphviz.escape(_caption(box)).replace("\n", "\\n"), fillcolor=_colour(box),
                   fontcolor="white" if dark else "black",
                   shape="ellipse" if box.kind in ("input", "output") else "box",
                   style="filled,dashed" if box.kind == "skipped" else "filled,rounded")
    for a, b in sorted(edges, key=lambda e: (list(boxes).index(e[0]), list(boxes).index(e[1]))):
        graph.edge(names[a], names[b])
    with graph.subgraph(name="cluster_legend") as legend:
        legend.attr(label="relative error of the output", fontsize="10", color="#bbbbbb")
        for i, (bound, colour) in enumerate(SCALE):
            label = f"≤ {_percent(bound)}" if math.isfinite(bound) else f"> {_percent(SCALE[i - 1][0])}"
            legend.node(f"legend{i}", label, fillcolor=colour, fontcolor="white" if math.isinf(bound) else "black", fontsize="9")
        legend.node("legend_grey", "no weight", fillcolor=GREY, fontsize="9")
        legend.node("legend_skipped", "weight left float", fillcolor=GREY, style="filled,dashed", fontsize="9")
    return graph


def _text(boxes: dict[str, Box], edges: set[tuple[str, str]]) -> str:
    """One line a box, in the order of execution, with the numbers of the boxes that feed it."""
    number = {key: i for i, key in enumerate(boxes)}
    sources: dict[str, list[int]] = {}
    for a, b in edges:
        sources.setdefault(b, []).append(number[a])
    lines = []
    for key, box in boxes.items():
        inputs = ",".join(map(str, sorted(sources.get(key, []))))
        where = box.module if box.module not in box.label else ""
        error = f"error {_percent(box.error)}" if box.error is not None else "left float" if box.kind == "skipped" else ""
        label = box.label + (f" ×{box.times}" if box.times > 1 else "") + (f" ({box.count} operators)" if box.count > 1 else "")
        lines.append(f"{number[key]:4}  {label:<40} {error:<13} {where:<30} <- {inputs}".rstrip().removesuffix("<-").rstrip())
    return "\n".join(lines) + "\n"
