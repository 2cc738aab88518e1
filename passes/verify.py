"""verify: the written definition of a legal program. Run after every pass, in tests and in production alike."""

from __future__ import annotations

from typing import Any

from torch import fx

from .failures import PassError
from .program import Context, Program, meta_of

__all__ = ["verify"]


def verify(program: Program, context: Context, after: str) -> None:
    """Raises `PassError` naming the pass ``after`` unless the program is legal:

    1. its graph is well formed: nodes in order of use, one output, names unique, a placeholder for each input of the call;
    2. every attribute that it reads exists on the module, or is a part of a decided weight;
    3. no decided weight is read as a float any more once `quantize` has run;
    4. every node says which module it came from;
    5. every probe names a node that is there.
    """
    def fail(text: str) -> None:
        raise PassError(f"after {after}: {text}")

    module = context.root.get_submodule(program.path)
    seen: set[fx.Node] = set()
    names: set[str] = set()
    outputs = inputs = 0
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                fail(f"{node.name} reads {source.name} before it is computed")
        if node.name in names:
            fail(f"two nodes are called {node.name}")
        seen.add(node)
        names.add(node.name)
        outputs += node.op == "output"
        inputs += node.op == "placeholder"
        meta = meta_of(node)
        if node.op in ("get_attr", "call_module") and "stored" not in meta and not _has(module, str(node.target)):
            fail(f"{node.name} reads {node.target}, which the module does not have")
        alias = meta.get("alias")
        reads_floats = node.op == "get_attr" and "stored" not in meta and alias is not None and alias.constant in context.weights
        if after != "capture" and reads_floats:
            fail(f"{node.name} reads {node.target} as a float weight")
        if node.op not in ("output", "placeholder") and "module" not in meta:
            fail(f"{node.name} does not say which module it came from")
    if outputs != 1:
        fail(f"{outputs} outputs")
    if inputs != len(dict.fromkeys(program.call.inputs)) and inputs != len(set(program.call.same)):
        fail(f"{inputs} placeholders for {len(program.call.inputs)} inputs")
    for (target, constant), probe in program.probes.items():
        if probe.node not in names:
            fail(f"the use of {constant} by {target} is to be seen at {probe.node}, which is not there")


def _has(module: Any, target: str) -> bool:
    value = module
    for name in target.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            return False
    return True
