"""TABLE: which kernel runs an operator on a CPU. The first row that supports the case runs it; the last always does.

The limits were measured (docs/benchmarks.md): a row stands where its kernel was faster than the rows below it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from .int8 import LEVELS, MOST_COLUMNS, best_level, unavailable

__all__ = ["CHOICES", "Choice", "kernel_for", "kernels"]

PORTABLE, AVX2 = range(2)              # indices of LEVELS


@dataclasses.dataclass(frozen=True)
class Choice:
    """``supports(level, bits, group, columns, rows)`` gives None where the kernel may run, or why not."""

    op: str
    kernel: str
    supports: Callable[[int, int, int, int, int], str | None]


def _plain_int8(level: int, bits: int, group: int, columns: int, rows: int) -> str | None:
    if level < PORTABLE:
        return unavailable
    if bits != 8 or group:
        return "codes are not int8 with a scale per output channel"
    return None if 0 < columns <= MOST_COLUMNS else f"{columns} inputs"


def _weight_only(level: int, bits: int, group: int, columns: int, rows: int) -> str | None:
    if (reason := _plain_int8(level, bits, group, columns, rows)) is not None:
        return reason
    if columns < 16 and rows > 8:
        return "fewer than 16 inputs"
    return None if level >= AVX2 or rows <= 2 else "more than 2 rows"


def _dynamic(level: int, bits: int, group: int, columns: int, rows: int) -> str | None:
    if (reason := _plain_int8(level, bits, group, columns, rows)) is not None:
        return reason
    return None if level >= AVX2 or rows <= 4 else "more than 4 rows"


def _always(level: int, bits: int, group: int, columns: int, rows: int) -> str | None:
    return None


CHOICES: tuple[Choice, ...] = (
    Choice("linear", "c", _weight_only),
    Choice("linear", "torch", _always),
    Choice("linear_dynamic", "c", _dynamic),
    Choice("linear_dynamic", "torch", _always),
    Choice("linear_static", "c", _dynamic),
    Choice("linear_static", "torch", _always),
)
_BY_OP = {op: [c for c in CHOICES if c.op == op] for op in dict.fromkeys(c.op for c in CHOICES)}


@functools.lru_cache(maxsize=4096)
def kernel_for(op: str, bits: int, group: int, columns: int, rows: int) -> str:
    """"c" or "torch": what runs this case on this CPU."""
    level = best_level()
    return next(c.kernel for c in _BY_OP[op] if c.supports(level, bits, group, columns, rows) is None)


def kernels() -> dict[str, str]:
    """What runs the integer operators on this machine's CPU, and why.

    >>> sorted(kernels())
    ['library', 'linear', 'linear_dynamic', 'linear_static']
    """
    level = best_level()
    found = {"library": LEVELS[level] if level >= 0 else f"none: {unavailable}"}
    for op, choices in _BY_OP.items():
        one, many = (choices[0].supports(level, 8, 0, 64, rows) for rows in (1, 1 << 20))
        found[op] = "torch" if one is not None else "c" if many is None else f"c, torch for {many}"
    return found
