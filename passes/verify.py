"""verify: the written definition of a legal graph. Run after every pass, in tests and in production alike."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from .failures import PassError
from .targets import Decision

__all__ = ["verify"]


def verify(graph: fx.Graph, module: nn.Module, decisions: Mapping[str, Decision], after: str) -> None:
    """Raises `PassError` naming the pass ``after`` unless the graph is legal:

    1. it is well formed: nodes in order of use, one output, names unique;
    2. every attribute it reads exists on ``module``, or is a part of a decided weight;
    3. no decided weight is read as a float any more once `quantize` has run;
    4. every node says which module it came from.
    """
    def fail(text: str) -> None:
        raise PassError(f"after {after}: {text}")

    seen: set[fx.Node] = set()
    names: set[str] = set()
    outputs = 0
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                fail(f"{node.name} reads {source.name} before it is computed")
        if node.name in names:
            fail(f"two nodes are called {node.name}")
        seen.add(node)
        names.add(node.name)
        outputs += node.op == "output"
        if node.op in ("get_attr", "call_module") and "part_of" not in node.meta and not _has(module, str(node.target)):
            fail(f"{node.name} reads {node.target}, which the module does not have")
        alias = node.meta.get("alias")
        reads_weight = node.op == "get_attr" and "part_of" not in node.meta and alias is not None
        if after != "capture" and reads_weight and alias.constant in decisions:
            fail(f"{node.name} reads {node.target} as a float weight")
        if node.op not in ("output", "placeholder") and "module" not in node.meta:
            fail(f"{node.name} does not say which module it came from")
    if outputs != 1:
        fail(f"{outputs} outputs")


def _has(module: nn.Module, target: str) -> bool:
    value = module
    for name in target.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            return False
    return True
