"""Which kernel runs a case, and why not the others: one table, the fastest first where it was measured (docs/benchmarks.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .binding import CONVOLUTIONS, LEVELS, OPERATORS, best_level, refuse, unavailable

__all__ = ["KERNELS", "Case", "Choice", "Kernel", "choose", "kernel_for", "kernels"]


@dataclass(frozen=True)
class Case:
    """A call of ``torch.ops.inro_fx.<op>``: codes of so many columns, a scale for each ``group`` of them (0: for all).

    A "conv_dynamic" is an ``inro_fx.conv`` with a scale for each sample.
    """

    op: str
    device: str
    dtype: str              # of the floats, as torch names it
    bits: int
    group: int
    columns: int
    rows: int               # of x, or how many ids
    density: float = 0.0    # of a convolution: products for each number that it reads or writes


@dataclass(frozen=True)
class Kernel:
    """An implementation of operators: ``refuse`` says why it cannot or should not run a case, None where it does."""

    name: str
    device: str             # "any": wherever torch runs
    refuse: Callable[[Case], str | None]


@dataclass(frozen=True)
class Choice:
    """The kernel that runs a case, and why those before it in the table do not."""

    kernel: Kernel
    refused: dict[str, str]


KERNELS: tuple[Kernel, ...] = (
    Kernel("c", "cpu", lambda case: refuse(case.op, case.dtype, case.bits, case.group, case.columns, case.rows, case.density)),
    Kernel("torch", "any", lambda case: None),          # the references in ops/
)


def choose(case: Case) -> Choice:
    """The first kernel of the table that does not refuse.

    >>> choose(Case("linear", "cpu", "float64", 8, 0, 64, 1)).kernel.name
    'torch'
    """
    refused: dict[str, str] = {}
    for kernel in KERNELS:
        why = kernel.refuse(case) if kernel.device in ("any", case.device) else f"runs on {kernel.device} only"
        if why is None:
            return Choice(kernel, refused)
        refused[kernel.name] = why
    raise LookupError(f"no kernel runs {case}: {refused}")


def kernel_for(op: str, bits: int, group: int, columns: int, rows: int, *, dtype: torch.dtype = torch.float32,
               density: float = 0.0) -> str:
    """The name of what runs this case on this CPU, with floats of ``dtype``.

    >>> kernel_for("linear", 8, 0, 64, 1, dtype=torch.float64)
    'torch'
    """
    return choose(Case(op, "cpu", str(dtype).removeprefix("torch."), bits, group, columns, rows, density)).kernel.name


def kernels() -> dict[str, str]:
    """What runs the operators on this machine's CPU, and why: with int8 codes, and linears with groups or fewer bits.

    >>> sorted(name for name in kernels() if "conv" not in name)
    ['dequantize', 'embedding', 'library', 'linear', 'linear_dynamic', 'linear_groups', 'linear_static']
    >>> sorted(name for name in kernels() if "conv" in name)
    ['conv', 'conv_dynamic', 'conv_static']
    """
    level = best_level()
    found = {"library": LEVELS[level] if level >= 0 else f"none: {unavailable}"}
    cases = {op: (op, 8, 0) for op in OPERATORS} | {"linear_groups": ("linear", 4, 32)}
    for name, (op, bits, group) in cases.items():
        few, *more = (kernel_for(op, bits, group, 64, rows) for rows in range(1, 1025))
        most = next((rows for rows, kernel in enumerate(more, 1) if kernel != few), 0)
        found[name] = f"{few}, {more[most - 1]} for more than {most} rows" if most else few
    for op in CONVOLUTIONS:
        few, *more = (kernel_for(op, 8, 0, 64, 1, density=density) for density in range(1025))
        least = next((density for density, kernel in enumerate(more, 1) if kernel != few), 0)
        found[op] = f"{few}, {more[least - 1]} from {least} products for each number that is read or written" if least else few
    return found
