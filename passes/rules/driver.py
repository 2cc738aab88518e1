"""One driver for rewriting: rules are data, applied to a graph until nothing changes.

A `Rule` finds a match, says why it refuses it or not, and rewrites it in a few lines. The driver does what every rewrite needs: it
inserts before the match, hands the match's users to the new node, keeps `Probe`s true, and writes down which rule did what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

from ..failures import PassError
from ..program import Context, Probe, Program, copied, meta_of

__all__ = ["Match", "Rule", "apply_rules", "drop_unread"]


@dataclasses.dataclass(frozen=True)
class Match:
    """Nodes that a rule may replace: ``root`` is the one whose value the new node has, ``nodes`` are all of them, root last."""

    root: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def of(cls, *nodes: fx.Node) -> Match:
        return cls(nodes[-1], nodes)


@dataclasses.dataclass(frozen=True)
class Rule:
    """``find(node, context)`` gives the match whose root the node is, or None; ``refuse`` why it must stay, or None; ``rewrite`` the new
    node, or None if it has changed the match where it stands."""

    name: str
    find: Callable[[fx.Node, Context], Match | None]
    refuse: Callable[[Match, Context], str | None]
    rewrite: Callable[[fx.Graph, Match, Context], fx.Node | None]


def apply_rules(program: Program, context: Context, rules: Sequence[Rule]) -> Program:
    """A new program in which no rule finds anything that it does not refuse. Rules are tried in their order at each node.

    Raises `PassError` for rules that never come to an end.
    """
    program = copied(program)
    log: dict[tuple[str, str, str], None] = dict.fromkeys(program.log)
    left = 100 + 20 * len(program.graph.nodes)
    changed = True
    while changed:
        changed = False
        for node in list(program.graph.nodes):
            if node.graph is not program.graph or node._erased:
                continue
            for rule in rules:
                match = rule.find(node, context)
                if match is None:
                    continue
                reason = rule.refuse(match, context)
                log[rule.name, node.name, reason or ""] = None
                if reason is not None:
                    continue
                left -= 1
                if left < 0:
                    raise PassError(f"the rule {rule.name} finds its own results for ever, at {node.name}")
                _rewrite(program, context, rule, match)
                changed = True
                break
    program.graph.lint()
    program.log = tuple(log)
    return program


def _rewrite(program: Program, context: Context, rule: Rule, match: Match) -> None:
    graph, root = program.graph, match.root
    with graph.inserting_before(root):
        new = rule.rewrite(graph, match, context)
    if new is None:
        return
    twin = meta_of(root).get("twin", root.name)
    for key, value in root.meta.items():
        if key in ("module", "where", "value", "droppable"):
            new.meta.setdefault(key, value)
    meta_of(new)["twin"] = twin
    names = {n.name for n in match.nodes}
    for target, probe in program.probes.items():
        if probe.node in names:
            program.probes[target] = Probe(new.name, twin)
    root.replace_all_uses_with(new, propagate_meta=False)
    for node in reversed(match.nodes):
        if not node.users:
            graph.erase_node(node)


def drop_unread(graph: fx.Graph) -> None:
    """Removes what read, unpacked and viewed weights, where no operator reads that any more."""
    for node in reversed(list(graph.nodes)):
        meta = meta_of(node)
        of_weight = "unpacks" in meta or "stored" in meta or "alias" in meta or "pieces_of" in meta
        if not node.users and of_weight and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
