"""Solvers: which codes stand for a weight. One file per solver, one line in `SOLVERS` to give it a name."""

from __future__ import annotations

import difflib

from ..errors import SchemeError
from ..passes.solve.moments import Moments, Solver
from .gptq import GPTQ, gptaq, gptq
from .hqq import HQQ, hqq
from .nearest import Nearest, nearest
from .search import Search, search

__all__ = ["GPTQ", "HQQ", "SOLVERS", "Moments", "Nearest", "Search", "Solver", "find_solver"]

SOLVERS: tuple[Solver, ...] = (nearest, search, hqq, gptq, gptaq)


def find_solver(solver: str | Solver, with_data: bool = True) -> Solver:
    """The solver of that name, or the object itself; "auto" is `gptaq` with calibration data, and `search` without.

    Raises `SchemeError` with the nearest name for an unknown one.
    """
    if isinstance(solver, str):
        if solver == "auto":
            return gptaq if with_data else search
        names = [s.name for s in SOLVERS]
        if solver in names:
            return SOLVERS[names.index(solver)]
        near = difflib.get_close_matches(solver, names, n=1)
        raise SchemeError(f"unknown solver {solver!r}: {f'did you mean {near[0]!r}? ' if near else ''}the solvers are {', '.join(names)} "
                          f"and auto")
    missing = [m for m in ("name", "needs", "solve", "refuse") if not hasattr(solver, m)]
    if missing:
        raise SchemeError(f"{type(solver).__name__} is no solver: it lacks {', '.join(missing)} (see docs/solvers.md)")
    return solver
