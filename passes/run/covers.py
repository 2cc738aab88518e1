"""Whether a program answers a call: the one place that decides, before anything runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..capture.call import NumberLeaf, TensorLeaf
from ..capture.frames import active
from ..capture.listener import SETTINGS
from ..program import GuardFailed, Program, guard
from .changes import Watch, global_hooks
from .classes import compiling
from .codegen import Compiled, source_of

if TYPE_CHECKING:
    from .forward import GraphForward

__all__ = ["Runner", "covers"]

MOST_VERDICTS = 4096       # calls of different sizes whose verdicts a program remembers


@dataclasses.dataclass(repr=False, eq=False)
class Runner:
    """A program that stands in for a module's forward: its functions, what it watches, and the calls that it has answered.

    ``verdicts`` remembers by sizes whether the guards hold: the reason why not, or "" where they do, or True where those on
    intermediates have held, too.
    """

    program: Program
    functions: Compiled
    watch: Watch
    calls: int = 0
    verdicts: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        call, facts = self.program.call, self.program.call.facts
        guarded = {n for g in self.program.graph.nodes if g.target is guard for n in _inputs_of(g)}
        inside = any(n.target is guard for n in self.program.graph.nodes)
        shapes = inside or "rank" in facts
        asked = [fact for fact in ("dtype", "device", "requires_grad") if fact in facts]
        self._reads: list[tuple[int, tuple[str, ...]]] = []
        for index, leaf in enumerate(call.inputs):
            if isinstance(leaf, TensorLeaf):
                self._reads.append((index, ("shape", *asked) if shapes else tuple(asked)))
            elif leaf.name in guarded:
                self._reads.append((index, ()))
        self._held: tuple[Watch, set[int]] | None = None           # the ids of the model's tensors, as of this watch
        self._strides = "strides" in facts
        self._inference = "inference" in facts
        self._identity = "identity" in facts or any(i != j for i, j in enumerate(call.same))
        reads = any(names or isinstance(call.inputs[i], NumberLeaf) for i, names in self._reads)
        self.asks = reads or self._strides or self._identity or self._inference

    def edited(self) -> bool:
        """Was the graph changed by hand since it was compiled, or compiled again?"""
        return self.functions.edited or self.functions.source != source_of(self.program.graph)

    def signature(self, module: nn.Module, flat: list[Any]) -> Any:
        """What the guards depend on."""
        key: list[Any] = []
        for index, names in self._reads:
            value = flat[index]
            if not isinstance(value, torch.Tensor):
                key.append(value if type(value) is not float else repr(value))          # -0.0 == 0.0
            else:
                key.extend([getattr(value, name) for name in names])
                if self._strides:
                    key.append((value.stride(), value.storage_offset()))
        if self._identity:
            key += [self.program.call.identities(flat), self._own(module, flat)]
        if self._inference:
            key.append(tuple(isinstance(v, torch.Tensor) and v.is_inference() for v in flat))
        return tuple(key)

    def _own(self, module: nn.Module, flat: list[Any]) -> tuple[bool, ...]:
        """Which inputs are tensors of the model itself."""
        if self._held is None or self._held[0] is not self.watch:
            self._held = self.watch, {id(t) for m in module.modules() for kind in (m._parameters, m._buffers) for t in kind.values()}
        held = self._held[1]
        return tuple(isinstance(v, torch.Tensor) and id(v) in held for v in flat)

    def judge(self, module: nn.Module, flat: list[Any]) -> str:
        """Why the facts and guards on inputs do not hold; "" if they do."""
        call = self.program.call
        differs = call.differs(flat)
        if differs is not None:
            return differs
        if self._identity and (call.identities(flat) != call.same or any(self._own(module, flat))):
            return "other inputs are the same tensor"
        if "inference" in call.facts and any(isinstance(v, torch.Tensor) and v.is_inference() for v in flat):
            return "inputs made in inference mode"
        if self.functions.ask is not None:
            try:
                self.functions.ask(*flat)
            except GuardFailed as failed:
                return str(failed)
        return ""


def _inputs_of(node: Any) -> set[str]:
    """The names of the placeholders that a node depends on."""
    found, pending, seen = set(), [node], set()
    while pending:
        n = pending.pop()
        if n not in seen:
            seen.add(n)
            pending.extend(n.all_input_nodes)
            if n.op == "placeholder":
                found.add(str(n.target))
    return found


def covers(runner: Runner, module: GraphForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any] | str:
    """(the inputs of the graph, their signature), or the reason why the program does not answer this call of ``module``."""
    facts = runner.program.call.facts
    if module.training:
        return "training mode"
    if global_hooks() and active() is None:
        return "global module hooks"
    if torch._C._is_any_autocast_enabled():
        return "autocast"
    if facts and (("grad_off" in facts and torch.is_grad_enabled()) or ("grad_on" in facts and not torch.is_grad_enabled())):
        return "gradients are switched on and off inside"
    if "inference" in facts and torch.is_inference_mode_enabled():
        return "inference mode"
    if "dtype" in facts and module._inro_float_dtypes[0] != module._inro_float_dtypes[1]:
        return "another dtype of the weights"
    for name, expected in runner.program.settings.items():
        if SETTINGS[name]() != expected:
            return f"{name}() is not {expected}"
    if (altered := runner.watch.altered(module)) is not None:
        return altered
    if not runner.program.gradients and torch.is_grad_enabled() and _wants_gradients(module, args, kwargs):
        return "gradients are wanted, and codes carry none"
    flat = runner.program.call.flatten(args, kwargs)
    if isinstance(flat, str):
        return flat
    if not runner.asks:
        return flat, None
    if compiling():
        reason = runner.judge(module, flat)
        return reason or (flat, None)
    key = runner.signature(module, flat)
    verdict = runner.verdicts.get(key)
    if verdict is None:
        if len(runner.verdicts) >= MOST_VERDICTS:
            runner.verdicts.clear()
        verdict = runner.verdicts[key] = runner.judge(module, flat)
    return verdict if verdict and verdict is not True else (flat, key)


def _wants_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
    return any(p.requires_grad for p in module.parameters()) or any(t.requires_grad for t in given)
