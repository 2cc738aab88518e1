"""Solvers put to work: each weight that is not rounded to the nearest code gets its codes from the calibration data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import InroError, SchemeError
from .passes.capture.example import Example
from .passes.capture.session import Session
from .passes.solve.examine import checked_parts
from .passes.solve.moments import Moments, Solver
from .passes.solve.plan import Plan, Target, Weight
from .passes.solve.sequential import Request, Solved, solve_in_order
from .progress import progress_bar

if TYPE_CHECKING:
    from .steps import Options

__all__ = ["solve"]


def solve(session: Session, chosen: Plan, targets: Sequence[Target], options: Options, batches: Sequence[Example],
          settled: Collection[str]) -> Solved:
    """The codes of the weights whose solver is not `nearest`; those in ``settled`` have theirs.

    Raises `SchemeError` naming a weight whose scheme its solver cannot serve.
    """
    requests: dict[str, Request] = {}
    asked: dict[str, Solver] = {}
    for name, weight in chosen.weights.items():
        solver = weight.solver if weight.solver is not None else options.solver
        if name in settled or (solver.name == "nearest" and not options.bias_correction):
            continue
        reason = solver.refuse(weight.scheme)
        if reason is not None:
            raise SchemeError(f"{name}: {solver.name} cannot serve this weight: {reason}")
        asked[name] = solver
        requests[name] = Request(solver.needs, solver.optional, _solving(name, weight, solver))
    if not requests:
        return Solved()
    with progress_bar(len(requests), "solving") as tick:
        solved = solve_in_order(session, chosen.weights, targets, requests, batches, tick, options.bias_correction, _adding(options.group))
    for name, solver in asked.items():
        without = solver.needs not in ("nothing", "squares") and name in solved.without
        chosen.solvers[name] = "search" if without else solver.name
    return solved


def _adding(group: Any) -> Callable[[Tensor], Tensor]:
    """Adds sums up over the processes of a group; the order of additions is that of the ranks, whatever the backend does."""
    def add(sums: Tensor) -> Tensor:
        if group is None:
            return sums
        shares = [torch.empty_like(sums) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(shares, sums.contiguous(), group)
        total = shares[0]
        for more in shares[1:]:
            total = total + more
        return total
    return add


def _solving(name: str, weight: Weight, solver: Solver) -> Callable[[Tensor, Sequence[Moments]], Mapping[str, Tensor]]:
    def solved(matrix: Tensor, moments: Sequence[Moments]) -> Mapping[str, Tensor]:
        try:
            return checked_parts(weight.scheme, solver.solve(matrix, weight.scheme, moments), weight.layout.rows)
        except InroError as error:
            raise type(error)(f"{name}: {error}") from error
        except Exception as error:
            raise SchemeError(f"{name}: the solver {solver.name} fails on this weight {tuple(weight.constant.shape)} "
                              f"({type(error).__name__}: {error})") from error
    return solved
