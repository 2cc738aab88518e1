"""From a module to graphs: the capture ladder.

1. graph     the whole model through the tracer
2. regions   where a module's own code cannot be traced it stays Python, and its children are captured one by one
3. layers    every module that owns weights also gets a small graph of its own, used whenever Python calls it

A capture is accepted only if the captured model gives the original's outputs on the example and, where the model takes
it, on one row more. If it does not, the next rung is tried, and the reason is kept in `Session.steps`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .example import Example, compare, random_state, run, seed_extremes
from .failures import ModelError
from .module import attach_graph, detach_graph
from .session import Session, brief
from .state import reference_run, rewind

__all__ = ["capture"]


def capture(root: nn.Module, example: Example, mode: str = "auto") -> tuple[Session, Any]:
    """Captures ``root`` (a clone, changed in place: its modules run graphs afterwards); the session and the reference output."""
    session, drawn = Session(root), random_state()
    written, want = reference_run(root, example, session.state)
    drew = random_state() != drawn
    for path, _, name in list(session.state.changed()):
        session.refuse(path, f"changes self.{name} in forward")
    session.state.restore()
    session.index()
    session.written = written
    for name in written:
        session.refusals.setdefault(name.rpartition(".")[0], f"writes to its state {name}")
        session.leaves.add(name.rpartition(".")[0])
    for _ in seed_extremes() if drew else ():              # most code that draws does so for training alone
        rewind(root, written)
        session.ignores_draws = session.ignores_draws and compare(want, run(root, example)) is None
        session.state.restore()
    bigger = example.one_row_more()
    want_bigger = None
    if bigger is not None:
        try:
            want_bigger = run(root, bigger)
            if compare(want_bigger, run(root, bigger)) is not None:       # it reads memory that nobody wrote, say
                bigger = None
        except Exception:
            bigger = None
        session.state.restore()

    rungs = ("graph", "regions", "layers") if mode == "auto" else ("export",)
    for rung in rungs:
        failure = session.refusals.get("") if "" in session.leaves and rung == "graph" else None
        if failure is None:
            failure = _try_rung(session, rung, example, want, bigger, want_bigger)
        if failure is None:
            session.steps.append((rung, f"taken: {_outcome(session)}"))
            capture_unreached(session)
            return session, want
        session.steps.append((rung, failure))
        for path in list(session.captures) + list(session.layers):
            detach_graph(root.get_submodule(path))
        session.captures.clear()
        session.layers.clear()
        session.python_uses.clear()
        session.leaves.add("")
    if mode == "export":
        raise ModelError(f"torch.export does not capture this model ({session.steps[-1][1]}); use capture=\"auto\"")
    session.steps.append(("python", "taken: every module runs its own code over the quantized weights"))
    capture_unreached(session)
    return session, want


def _outcome(session: Session) -> str:
    if "" in session.captures:
        return f"one graph of {len(session.captures[''].graph.nodes)} nodes"
    count = sum(c.kind == "region" for c in session.captures.values())
    return f"{count} region{'' if count == 1 else 's'}"


def _try_rung(session: Session, rung: str, example: Example, want: Any, bigger: Example | None, want_bigger: Any) -> str | None:
    """Why the rung does not hold; None if the captured model reproduces the reference."""
    args, kwargs = example.fresh()
    if rung == "export":
        try:
            forward = _exported(session, args, kwargs)
        except Exception as error:
            return brief(error)
        if not session.trace("", "graph", args, kwargs, forward)[1]:
            return session.refusals.get("", "its code cannot be traced")
    elif rung == "graph":
        torch.manual_seed(0)
        if not session.trace("", "graph", args, kwargs)[1]:
            return session.refusals.get("", "its code cannot be traced")
    else:
        if rung == "layers":
            session.leaves.update(path for path, module in session.root.named_modules() if any(True for _ in module.children()))
        torch.manual_seed(0)
        session.run_root(args, kwargs)
    for path, captured in {**session.layers, **session.captures}.items():
        attach_graph(session.root.get_submodule(path), captured)
    for inputs, expected, label in ((example, want, "on the example"), (bigger, want_bigger, "with one row more")):
        if inputs is None:
            continue
        try:
            session.state.restore()
            rewind(session.root, session.written)
            difference = compare(expected, run(session.root, inputs))
        except Exception as error:
            difference = f"it fails with {brief(error)}"
        if difference is not None:
            return f"{difference} {label}"
        if inputs is example and "" in session.captures and session.root._inro_calls:
            return f"its graph does not cover the example itself ({next(iter(session.root._inro_calls))})"
    for path in {**session.layers, **session.captures}:
        session.root.get_submodule(path)._inro_calls.clear()
    return None


def _rnn_example(m: Any) -> tuple:
    return (torch.zeros(1, 1, m.input_size, dtype=next(m.parameters()).dtype, device="cpu"),)


def _conv_example(m: Any) -> tuple:
    sizes = [d * (k - 1) + 1 for d, k in zip(m.dilation, m.kernel_size, strict=True)]
    return (torch.zeros(1, m.in_channels, *sizes, dtype=m.weight.dtype, device="cpu"),)


LAYERS: dict[type, Callable[[Any], tuple]] = {     # the smallest call of torch's own layers, for those no example reaches
    nn.Linear: lambda m: (torch.zeros(1, m.in_features, dtype=m.weight.dtype, device="cpu"),),
    nn.Embedding: lambda m: (torch.zeros(1, dtype=torch.long, device="cpu"),),
    nn.modules.conv._ConvNd: _conv_example,
    nn.LSTM: _rnn_example,
    nn.GRU: _rnn_example,
    nn.RNN: _rnn_example,
}


def capture_unreached(session: Session) -> None:
    """Torch's own layers that the example did not reach get a graph too, so that their weights are not left out."""
    reached = {n.meta["alias"].constant for c in session.captures.values() for n in c.graph.nodes if "alias" in n.meta}
    reached |= {constant for _, constant, _ in session.python_uses}
    for name, constant in session.constants.items():
        module = session.root.get_submodule(constant.module)
        make = next((call for kind, call in LAYERS.items() if isinstance(module, kind)), None)
        if constant.name in reached or name != constant.name or make is None or constant.module in session.captures \
                or constant.module in session.layers or not type(module).forward.__module__.startswith("torch.nn.") \
                or session.leaf_reason(module, constant.module) is not None:
            continue
        device = session.tensor(name).device
        if session.trace(constant.module, "unreached", tuple(t.to(device) for t in make(module)), {})[1]:
            attach_graph(module, session.captures[constant.module])


def _exported(session: Session, args: tuple, kwargs: dict) -> Callable:
    """The forward of the model as torch.export sees it, every dimension dynamic that can be; its weights are the model's."""
    def dynamic(x: Any) -> Any:
        return dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) if isinstance(x, Tensor) else None

    signature = inspect.signature(session.root.forward).bind(*args, **kwargs)
    program = torch.export.export(session.root, args, kwargs, dynamic_shapes=tree_map(dynamic, dict(signature.arguments)))
    module = program.module()
    known = set(session._paths.values())
    for path, child in module.named_modules():
        if path in known:
            session._paths[id(child)] = path
    session.kept = module
    return module.forward
