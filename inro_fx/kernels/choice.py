"""Which kernel runs an operator on a CPU, and why: the limits stand in operators.c, where they are used, and were measured.

A C kernel runs where it was faster than the reference in torch (docs/benchmarks.md).
"""

from __future__ import annotations

from .binding import LEVELS, OPERATORS, best_level, choice, unavailable

__all__ = ["kernel_for", "kernels"]

REASONS = ("", unavailable, "more rows", "codes of another width", "no inputs, or too many")     # as in operators.c
MANY_ROWS = REASONS.index("more rows")


def kernel_for(op: str, bits: int, group: int, columns: int, rows: int) -> str:
    """"c" or "torch": what runs this case on this CPU."""
    return "torch" if choice(op, bits, group, columns, rows, best_level()) else "c"


def kernels() -> dict[str, str]:
    """What runs the integer operators on this machine's CPU, and why: int8 codes, and those of groups or fewer bits.

    >>> sorted(kernels())
    ['dequantize', 'embedding', 'library', 'linear', 'linear_dynamic', 'linear_static', 'linear_groups']
    """
    level = best_level()
    found = {"library": LEVELS[level] if level >= 0 else f"none: {unavailable}"}
    cases = {op: (op, 8, 0) for op in OPERATORS} | {"linear_groups": ("linear", 4, 32)}
    for name, (op, bits, group) in cases.items():
        most = next((rows - 1 for rows in range(1, 1025) if choice(op, bits, group, 64, rows, level)), 1024)
        found[name] = "torch" if most == 0 else "c" if most == 1024 else f"c, torch for more than {most} rows"
    return found
