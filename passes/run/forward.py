"""A module whose forward is a captured graph wherever one covers the call, and the user's own code elsewhere.

What a program does not cover runs the user's forward over the same weights, right and counted. Calls of a kind that recurs get a
program of their own, up to a small bound (`again`). Nothing runs twice: a graph that draws or writes finishes once it has begun.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture.call import TensorLeaf
from ..failures import GraphNotTaken, InroError
from ..program import GuardFailed, Program
from ..structure import Slot, rebuild
from .changes import watch
from .classes import Part, add_part, compiling, copy_of, defines, has_part, remove_part, user_class
from .codegen import compiled
from .covers import Runner, covers
from .plain import GraphData
from .view import GraphView, borrowed
from .weights import mapped_dtype

__all__ = ["GraphForward", "attach_program", "detach_programs", "rewatch"]

ERRORS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)     # of operators


class GraphForward(Part):
    """The part with the programs of a module: ``_inro_runners``, the first of which is the one captured on the example.

    ``_inro_calls`` counts the calls that ran the user's own forward, by reason; ``_inro_again`` is what is asked for another program.
    """

    order = 10
    own = True
    _inro_runners: list[Runner]
    _inro_strict: bool
    _inro_calls: Counter[str]
    _inro_float_dtypes: tuple[torch.dtype, torch.dtype]      # of the weights: when captured, and now
    _inro_again: Any

    @classmethod
    def compose(cls, user: type[Any], namespace: dict[str, Any]) -> tuple[type, ...]:
        namespace["forward"] = copy_of(cls.forward, user.forward)
        namespace.setdefault("__call__", user.__call__ if "__call__" in vars(user) else nn.Module.__call__)
        if issubclass(user, fx.GraphModule):
            namespace.update(graph=borrowed("graph"), code=borrowed("code"), recompile=GraphView.recompile)
            return ()
        return (GraphView,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reason = "no graph yet"
        by_compiler = compiling()
        for runner in self._inro_runners:
            covered = covers(runner, self, args, kwargs)
            if isinstance(covered, str):
                reason = covered if runner is self._inro_runners[0] else reason
                continue
            flat, key = covered
            functions, program = runner.functions, runner.program
            try:
                if by_compiler or torch.jit.is_tracing():
                    results = functions.traced(self, *flat)
                elif key is not None and runner.verdicts.get(key) is not True:
                    results = functions.run(self, *flat)
                    runner.verdicts[key] = True
                else:
                    results = functions.quick(self, *flat) if key is not None else functions.run(self, *flat)
            except GuardFailed as failed:
                reason = str(failed)
                if key is not None:
                    runner.verdicts[key] = reason
                continue
            except ERRORS as error:                            # the user's own forward raises it better, or catches it
                if by_compiler or self._inro_strict or program.effect is not None or isinstance(error, InroError):
                    raise
                reason = f"an operator raises {type(error).__name__}"
                break
            if not by_compiler:
                runner.calls += 1
            template = program.template
            return results if type(template) is Slot else rebuild(template, results)
        again = None if by_compiler else self._inro_again
        if again is not None and (again.eager or not self._inro_strict) and again(self, reason, args, kwargs):
            return self.forward(*args, **kwargs)
        if self._inro_strict:
            path = self._inro_runners[0].program.path if self._inro_runners else ""
            raise GraphNotTaken(f"{path or 'the model'}: the captured graph does not cover this call ({reason}); quantize with other "
                                f"example_inputs, or with strict=False to run the module's own forward")
        if not by_compiler:
            self._inro_calls[reason] += 1
        return super().forward(*args, **kwargs)

    # -- life --

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        altered = [runner.watch.altered(self, lasting=True) for runner in self._inro_runners]
        result = super()._apply(fn, recurse)
        self.__dict__["_inro_float_dtypes"] = (self._inro_float_dtypes[0], mapped_dtype(self._inro_float_dtypes[1], fn))
        for runner, changed in zip(self._inro_runners, altered, strict=True):
            program = runner.program
            if _retarget(program.graph, fn):
                runner.functions = compiled(self, program.graph)
                program.call.leaves = tuple(
                    tuple(dataclasses.replace(leaf, device=_mapped_device(leaf.device, fn)) if isinstance(leaf, TensorLeaf) else leaf
                          for leaf in leaves) for leaves in program.call.leaves)
            runner.verdicts.clear()
            if changed is None:
                runner.watch = watch(self, program)
        return result

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["_inro_runners"] = [dataclasses.replace(r, functions=dataclasses.replace(
            r.functions, run=r.functions.traced, quick=r.functions.traced)) for r in self._inro_runners]
        for runner in replica.__dict__["_inro_runners"]:        # of tensors of the module that it is given
            runner.watch = dataclasses.replace(runner.watch, inside=[], fixed=[], read=[])
        return replica

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__()) if defines(user_class(self), "__getstate__") else dict(self.__dict__)
        state["_inro_runners"] = [(dataclasses.replace(r.program, graph=fx.Graph()), GraphData.of(r.program.graph), r.calls,
                                   r.watch.altered(self, lasting=True)) for r in self._inro_runners]
        state["_inro_again"] = None if self._inro_again is None else self._inro_again.fresh()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_inro_runners"] = []
        for program, graph, calls, altered in state["_inro_runners"]:
            program = dataclasses.replace(program, graph=graph.graph())
            if altered is None:                             # what is void stays so: what is there now would look as if it always had been
                _install(self, program).calls = calls

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __copy__(self) -> Any:
        new = object.__new__(type(self))
        new.__setstate__(self.__getstate__())
        return new


def _install(module: Any, program: Program) -> Runner:
    runner = Runner(program, compiled(module, program.graph), watch(module, program))
    module._inro_runners.append(runner)
    return runner


def attach_program(module: nn.Module, program: Program | None, strict: bool = False, again: Any = None) -> None:
    """Makes ``module`` run ``program``, beside those that it has, wherever that covers the call; None: none yet."""
    if not has_part(module, GraphForward):
        dtype = next((t.dtype for t in module.parameters() if t.is_floating_point()), torch.get_default_dtype())
        module.__dict__.update(_inro_runners=[], _inro_calls=Counter(), _inro_float_dtypes=(dtype, dtype), _inro_strict=strict,
                               _inro_again=again)
        add_part(module, GraphForward)              # at last: whatever interrupts this leaves a module that runs
    if program is not None:
        _install(module, program)


def detach_programs(module: nn.Module) -> None:
    """Back to the user's own forward."""
    remove_part(module, GraphForward)
    for name in ("_inro_runners", "_inro_calls", "_inro_float_dtypes", "_inro_strict", "_inro_again"):
        module.__dict__.pop(name, None)


def rewatch(root: nn.Module, runners: Sequence[Runner] | None = None) -> None:
    """Takes the modules below ``root`` as they are now for what their graphs (or those of ``runners`` alone) depend on: after the
    compiler has changed them."""
    for module in root.modules():
        if isinstance(module, GraphForward):
            for runner in module._inro_runners if runners is None else [r for r in module._inro_runners if r in runners]:
                runner.watch = watch(module, runner.program)


def _mapped_device(device: torch.device, fn: Callable[[Tensor], Tensor]) -> torch.device:
    return fn(torch.empty(0, device=device)).device


def _retarget(graph: fx.Graph, fn: Callable[[Tensor], Tensor]) -> bool:
    """After ``.to(device)`` or ``.half()``: devices written in the graph, and dtypes of unpacked weights, follow."""
    changed = False

    def device(a: Any) -> Any:
        return _mapped_device(a, fn) if isinstance(a, torch.device) else a

    for node in graph.nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), device)
        if "weight_dtype" in node.meta:
            before = node.meta["weight_dtype"]
            after = node.meta["weight_dtype"] = mapped_dtype(before, fn)
            args, kwargs = fx.node.map_aggregate((args, kwargs), functools.partial(_swap, before, after))
        if args != node.args or kwargs != node.kwargs:
            node.args, node.kwargs, changed = args, kwargs, True
    return changed


def _swap(before: Any, after: Any, value: Any) -> Any:
    return after if value is before else value
