"""From a module to programs: the capture ladder.

1. graph     the whole model through the tracer
2. regions   where a module's own code cannot be traced it stays Python, and its children are captured one by one
3. layers    every module that owns weights also gets a small graph of its own, used whenever Python calls it

A capture is accepted only if the captured model gives the original's outputs on the example and, where the model takes them, at other
sizes: one more along each dimension, and one row alone. If it does not, the next rung is tried, and the reason is kept in
`Session.steps`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..failures import ModelError
from ..program import meta_of
from ..run.forward import GraphForward, attach_program, detach_programs
from .draws import seed_extremes
from .example import Example, compare, run
from .listener import Listener
from .session import Session, brief
from .state import reference_run, rewind
from .traced import listening

__all__ = ["capture"]


def capture(root: nn.Module, example: Example, mode: str = "auto", rungs: tuple[str, ...] = ("graph", "regions", "layers"),
            unreached: bool = True) -> tuple[Session, Any, Example]:
    """Captures ``root`` (a clone, changed in place: its modules run graphs afterwards): the session, the reference output, and the
    example as its runs are to be (it knows by then whether the model draws).

    Raises `InputError` if the model does not run on the example.
    """
    session = Session(root)
    told = reference_run(root, example, session.state)
    want, example = told.want, told.example
    session.model_draws_outside, session.modeless, session.apart = told.drew, told.compiled, told.apart
    _note_state(session, told.written, told.replaced)
    for _ in seed_extremes() if told.drew else ():              # most code that draws does so for training alone
        rewind(root, {**told.written, **told.apart})
        session.ignores_draws = session.ignores_draws and compare(want, run(root, example)) is None
        session.state.restore()
    others = list(_other_sizes(session, example, told.compiled, told.fragile))
    _climb(session, example, want, others, ("export",) if mode == "export" else rungs)
    if mode != "export" and unreached:
        with listening(root):
            _capture_unreached(session)
    return session, want, _drawing(session, example)


def _drawing(session: Session, example: Example) -> Example:
    """The example, whose runs leave the generators of all threads alone where traced code draws."""
    return dataclasses.replace(example, draws=True) if session.drew and not session.modeless else example


def _note_state(session: Session, written: dict[str, Tensor], replaced: tuple[str, ...]) -> None:
    """Modules whose forward writes to state stay Python."""
    for path, _, name in list(session.state.changed()):
        session.refuse(path, f"changes self.{name} in forward")
    for name in replaced:
        session.refuse(name.rpartition(".")[0], f"changes self.{name.rpartition('.')[2]} in forward")
    session.state.restore()
    for module in session.root.modules():                # those that the first call has built
        module.training = False
    session.index()
    session.written = written
    for name in written:
        session.refuse(name.rpartition(".")[0], f"writes to its state {name}")


def _other_sizes(session: Session, example: Example, compiled: bool, fragile: bool) -> Iterator[tuple[str, Example, Any]]:
    """What the model itself gives at other sizes than the example's, where it takes them."""
    for first, *others in example.other_sizes(fragile):
        for number, (label, other) in enumerate((first, *others)):
            if not compiled:
                other = dataclasses.replace(other, draws=True)      # another branch may, and the generator is the user's
            try:
                wanted = _run_float(session, other)
            except Exception:
                continue
            yield label, other, wanted
            if number == 0:
                break


def _run_float(session: Session, example: Example) -> Any:
    """The output of the model itself, whose state is as it was afterwards."""
    try:
        rewind(session.root, session.as_they_were)
        return run(session.root, example)
    finally:
        session.state.restore()


def _climb(session: Session, example: Example, want: Any, others: list[tuple[str, Example, Any]], rungs: tuple[str, ...]) -> None:
    root = session.root
    for rung in rungs:
        failure = session.refusals.get("") if "" in session.leaves and rung in ("graph", "export") else None
        if rung == "export" and failure is None and session.refusals:
            path, reason = next(iter(session.refusals.items()))
            failure = f"{path or 'the model'} {reason}, which torch.export would freeze"
        if failure is None:
            failure = _try_rung(session, rung, example, want, others)
        if failure is None:
            session.steps.append((rung, f"taken: {_outcome(session)}"))
            return
        session.steps.append((rung, failure))
        for path in {**session.captures, **session.layers}:
            detach_programs(root.get_submodule(path))
        session.captures.clear()
        session.layers.clear()
        session.python_uses.clear()
        session.leaves.add("")
        if rung == "export":
            raise ModelError(f"torch.export does not capture this model ({failure}); use capture=\"auto\"")
    session.steps.append(("python", "taken: every module runs its own code over the quantized weights"))


def _outcome(session: Session) -> str:
    if "" in session.captures:
        return f"one graph of {len(session.captures[''].graph.nodes)} nodes"
    count = sum(c.kind == "region" for c in session.captures.values())
    return f"{count} region{'' if count == 1 else 's'}"


def _try_rung(session: Session, rung: str, example: Example, want: Any, others: list[tuple[str, Example, Any]]) -> str | None:
    """Why the rung does not hold; None if the captured model reproduces the reference."""
    args, kwargs = example.fresh()
    rewind(session.root, session.as_they_were)
    with listening(session.root):
        if rung == "export":
            try:
                forward = _exported(session, args, kwargs)
            except Exception as error:
                return brief(error)
            if not session.trace("", "graph", args, kwargs, forward)[1]:
                return session.refusals.get("", "its code cannot be traced")
        elif rung == "graph":
            if not session.trace("", "graph", args, kwargs)[1]:
                return session.refusals.get("", "its code cannot be traced")
        else:
            if rung == "layers":
                session.leaves.update(path for path, module in session.root.named_modules() if any(True for _ in module.children()))
            with session.drawing():
                Listener().aside(lambda: session.run_python("", args, kwargs))
    session.state.restore()
    for path, program in {**session.layers, **session.captures}.items():
        attach_program(session.root.get_submodule(path), program)
    for label, inputs, expected in (("on the example", _drawing(session, example), want), *others):
        try:
            session.state.restore()
            rewind(session.root, session.as_they_were)
            difference = compare(expected, run(session.root, inputs))
        except Exception as error:
            difference = f"it fails with {brief(error)}"
        session.state.restore()
        if difference is not None and (inputs is example or _steady(session, inputs, expected)):
            return f"{difference} {label}"
        root: Any = session.root
        if inputs is example and "" in session.captures and root._inro_calls:
            return f"its graph does not cover the example itself ({next(iter(root._inro_calls))})"
    forget_calls(session)
    return None


def _steady(session: Session, inputs: Example, expected: Any) -> bool:
    """Does the model itself give the same twice? It does not if it reads memory that nobody wrote, say."""
    programs = [(session.root.get_submodule(path), program) for path, program in {**session.layers, **session.captures}.items()]
    for module, _ in programs:
        detach_programs(module)
    try:
        return compare(expected, _run_float(session, inputs)) is None
    except Exception:
        return False
    finally:
        for module, program in programs:
            attach_program(module, program)


def forget_calls(session: Session) -> None:
    """The calls so far were the compiler's own."""
    for path in {**session.layers, **session.captures}:
        module: Any = session.root.get_submodule(path)
        if isinstance(module, GraphForward):
            module._inro_calls.clear()
            for runner in module._inro_runners:
                runner.calls = 0


def _rnn_example(m: Any) -> tuple[Tensor, ...]:
    return (torch.zeros(1, 1, m.input_size, dtype=next(m.parameters()).dtype, device="cpu"),)


def _conv_example(m: Any) -> tuple[Tensor, ...]:
    sizes = [d * (k - 1) + 1 for d, k in zip(m.dilation, m.kernel_size, strict=True)]
    return (torch.zeros(1, m.in_channels, *sizes, dtype=m.weight.dtype, device="cpu"),)


LAYERS: dict[type, Callable[[Any], tuple[Tensor, ...]]] = {     # the smallest call of torch's own layers, for those no example reaches
    nn.Linear: lambda m: (torch.zeros(1, m.in_features, dtype=m.weight.dtype, device="cpu"),),
    nn.Embedding: lambda m: (torch.zeros(1, dtype=torch.long, device="cpu"),),
    nn.modules.conv._ConvNd: _conv_example,
    nn.LSTM: _rnn_example,
    nn.GRU: _rnn_example,
    nn.RNN: _rnn_example,
}


def _capture_unreached(session: Session) -> None:
    """Torch's own layers that the example did not reach get a graph too, so that their weights are not left out."""
    reached = {meta_of(n)["alias"].constant for c in session.captures.values() for n in c.graph.nodes if "alias" in n.meta}
    reached |= {constant for _, constant, _ in session.python_uses}
    for name, constant in session.constants.items():
        module: Any = session.root.get_submodule(constant.module)
        make = next((call for kind, call in LAYERS.items() if isinstance(module, kind)), None)
        if constant.name in reached or name != constant.name or make is None or constant.module in session.captures \
                or constant.module in session.layers or not type(module).forward.__module__.startswith("torch.nn.") \
                or session.leaf_reason(module, constant.module) is not None:
            continue
        device = session.tensor(name).device
        if session.trace(constant.module, "unreached", tuple(t.to(device) for t in make(module)), {})[1]:
            attach_program(module, session.captures[constant.module])


def _exported(session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
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
