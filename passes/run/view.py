"""What makes a captured module an fx.GraphModule: its graph and code, behind the user's class, whose names come first."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from ..capture.call import ConstantLeaf

__all__ = ["GraphView", "borrowed"]


class borrowed:                                        # noqa: N801 - used as a decorator is
    """An attribute of fx.GraphModule that gives way to one of the same name on the user's model."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        for kind in (module._parameters, module._buffers, module._modules):
            if self.name in kind:
                return kind[self.name]
        runners = module.__dict__["_inro_runners"]
        if not runners:
            return fx.Graph() if self.name == "graph" else ""
        if self.name == "code":
            return runners[0].functions.source
        if torch.compiler.is_exporting() or runners[0].watch.altered(module, lasting=True) is not None:
            return _graph_of_forward(module, runners[0].program.call)
        return runners[0].program.graph


@dataclasses.dataclass(frozen=True)
class OwnForward:
    """The target of the only node of such a graph: the module's forward."""

    module: nn.Module
    __name__ = "own_forward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _graph_of_forward(module: nn.Module, call: Any) -> fx.Graph:
    """A graph that calls the module's own forward: for torch.export, which runs ``module.graph`` in the place of the module and knows
    neither guards nor templates, and where the captured graph has become void."""
    graph = fx.Graph()
    values = []
    for leaves, spec in zip(call.leaves, call.specs, strict=True):
        flat = [leaf.value if isinstance(leaf, ConstantLeaf) else graph.placeholder(leaf.name) for leaf in leaves]
        values.append(flat[0] if spec is None else tree_unflatten(flat, spec))
    args, kwargs = call.spread(values)
    graph.output(graph.call_function(OwnForward(module), args, kwargs))
    return graph


class GraphView(fx.GraphModule):
    """Behind the user's class: ``graph`` and ``code`` of the first program."""

    graph = borrowed("graph")
    code = borrowed("code")

    def recompile(self) -> Any:
        """Compiles ``graph`` again after a change of it."""
        from .codegen import compiled
        runner = self.__dict__["_inro_runners"][0]
        runner.functions = dataclasses.replace(compiled(self, runner.program.graph), edited=True)
        runner.verdicts.clear()
        return runner.functions.code

    __str__ = nn.Module.__repr__
