"""What the compiler did to the graphs of a model, rule by rule."""

from __future__ import annotations

from torch import nn

from .errors import ModelError
from .passes.run.forward import GraphForward

__all__ = ["explain"]


def explain(model: nn.Module) -> str:
    """Which rule changed which node, in order, and which refused one and why: a part for each program of the model.

    Programs of single layers, which run only where the code around them stays Python, are left out where a larger one holds the layer.
    Raises `ModelError` for a model that `inro_fx.quantize_graph` did not make.

    >>> import torch, inro_fx
    >>> small = inro_fx.quantize_graph(torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 8)), torch.randn(3, 16))
    >>> print(inro_fx.explain(small))
    the model (graph)
      unpack       _0_weight
      unpack       _1_weight
      fuse linear  linear
      fuse linear  linear_1
    """
    if "_inro" not in getattr(model, "__dict__", {}):
        raise ModelError(f"this {type(model).__name__} was not made by inro_fx.quantize_graph, so there is nothing to explain")
    parts: list[str] = []
    above: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, GraphForward) or not module._inro_runners:
            continue
        programs = [r.program for r in module._inro_runners]
        if all(p.kind == "layer" for p in programs) and any(not a or path.startswith(a + ".") for a in above):
            continue
        above += [path] if any(p.kind != "layer" for p in programs) else []
        for program in programs:
            width = max((len(rule) for rule, _, _ in program.log), default=0)
            lines = [f"  {rule:<{width}}  {node}{': refused, ' + reason if reason else ''}" for rule, node, reason in program.log]
            parts.append("\n".join([f"{path or 'the model'} ({program.kind})", *(lines or ["  no rule found anything"])]))
    return "\n\n".join(parts) or "no graphs: every module runs its own code over the codes"
