"""Another program for a module: calls of a kind that recurs outside its graphs are captured on the spot, over the codes it holds.

It is also how a loaded model gets its graphs: nothing of a graph is in a file. The capture works on a copy that shares the tensors, so
that the call which gave rise to it sees nothing of it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..constants import adopt, adopted_by
from ..program import Context, Pass, Program

if TYPE_CHECKING:
    from .forward import GraphForward

__all__ = ["Again", "Captured", "attach_all", "capture_again"]

MOST_PROGRAMS = 8          # of one module
RECURRENT = 2              # calls of a kind after which it gets a program
LASTING = ("training mode", "global module hooks", "autocast", "gradients are", "torch.")       # reasons that no program changes
log = logging.getLogger("inro_fx")


class Again:
    """What a module asks for another program; ``eager``: at the first call of a kind, as a model does that was just loaded.

    ``more`` are the user's own passes.
    """

    def __init__(self, more: Sequence[Pass] = (), eager: bool = False):
        self.more, self.eager = tuple(more), eager
        self.seen: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.busy = False

    def fresh(self) -> Again:
        """The same for a copy of the module."""
        return Again(self.more, self.eager)

    def __call__(self, module: GraphForward, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Has the module a new program for this call? ``reason`` is why the others do not cover it."""
        if self.busy or reason in self.refused or reason.startswith(LASTING) or not self._quiet():
            return False
        self.seen[reason] += 1
        if not self.eager and (self.seen[reason] < RECURRENT or len(module._inro_runners) >= MOST_PROGRAMS or _has_guests(module)):
            return False
        from .forward import detach_programs
        from .weights import attach_none
        self.busy = True
        before = len(module._inro_runners)
        try:
            attach_all(module, capture_again(module, args, kwargs, self.more, whole=self.eager), self.more)
        except Exception as error:                      # the call itself will say what is wrong with it, if anything is
            log.info("no further graph: %s", error)
        finally:
            self.busy = False
        first, self.eager = self.eager, False
        if len(module._inro_runners) == before and first:
            detach_programs(module)                     # its own code runs, over the graphs of what it calls
            attach_none(module)
            return True
        if len(module._inro_runners) == before:
            self.refused.add(reason)
        return len(module._inro_runners) > before

    @staticmethod
    def _quiet() -> bool:
        """Is this an ordinary call, with nobody watching how it is computed?"""
        return not (torch.jit.is_tracing() or torch.compiler.is_exporting() or torch._C._len_torch_dispatch_stack()
                    or torch._C._len_torch_function_stack() or torch._C._are_functorch_transforms_active()
                    or torch.onnx.is_in_onnx_export())


def _has_guests(module: nn.Module) -> bool:
    """Is there a hook or a patched forward below, which would hear of our runs?"""
    from ..capture.session import has_foreign_hooks
    return any(has_foreign_hooks(child) or "forward" in vars(child) for child in module.modules() if child is not module)


@dataclasses.dataclass(frozen=True)
class Captured:
    """``programs`` by path, and the copy that they were captured of, which holds the tensors that they found outside of the model."""

    copy: nn.Module
    programs: dict[str, Program]


def capture_again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], more: Sequence[Pass] = (), whole: bool = False
                  ) -> Captured:
    """Programs for a call of a quantized module; ``whole``: also of regions and layers below, where it stays Python itself.

    Raises what capturing raises.
    """
    from ..capture.clone import clone
    from ..capture.example import Example, copied_input
    from ..capture.ladder import capture
    from ..pipeline import run_passes
    from ..solve.plan import held_weights
    from .forward import detach_programs
    with torch.no_grad(), torch.inference_mode(False):
        args, kwargs = tree_map(copied_input, (args, kwargs))          # what has no copy would be changed by our runs
        root = clone(module)
        for child in root.modules():
            detach_programs(child)
        rungs = ("graph", "regions", "layers") if whole else ("graph", "regions")
        session, _, _ = capture(root, Example(args, kwargs), rungs=rungs, unreached=whole)
        for rung, outcome in session.steps:
            log.info("capture as %s: %s", rung, outcome)
        weights = held_weights(session)
        context = Context(root, weights)
        found = {path: run_passes(program, context, more) for path, program in {**session.layers, **session.captures}.items()}
    log.info("captured %d further graph%s", len(found), "" if len(found) == 1 else "s")
    return Captured(root, found)


def attach_all(module: nn.Module, captured: Captured, more: Sequence[Pass] = ()) -> None:
    """Gives modules below ``module`` their programs; those that have some for their calls already keep them."""
    from .forward import GraphForward, attach_program, rewatch
    valid = [r for m in module.modules() if isinstance(m, GraphForward) for r in m._inro_runners if r.watch.altered(m) is None]
    for path, program in captured.programs.items():
        owner: Any = module.get_submodule(path)
        made = captured.copy.get_submodule(path)
        held = {n: b for n, b in made._buffers.items() if n in adopted_by(made) and b is not None}
        if any(n in owner._buffers and owner._buffers[n] is not b for n, b in held.items()):
            continue                                # another program of the module has another tensor of that name
        for name in held.keys() - owner._buffers.keys():
            adopt(owner, name, held[name])
        if not path or not isinstance(owner, GraphForward) or not owner._inro_runners:
            attach_program(owner, program, strict=bool(getattr(module, "_inro_strict", False)) and not path, again=Again(more))
            valid.append(owner._inro_runners[-1])
    rewatch(module, valid)               # the others are of a state that the model is not in
