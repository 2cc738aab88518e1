"""Which kernel runs an operator on a CPU: one in C where it was faster than the reference in torch (docs/benchmarks.md)."""

from __future__ import annotations

from .binding import LEVELS, OPERATORS, best_level, covers, unavailable

__all__ = ["kernel_for", "kernels"]


def kernel_for(op: str, bits: int, group: int, columns: int, rows: int) -> str:
    """"c" or "torch": what runs this case on this CPU."""
    return "c" if covers(op, bits, group, columns, rows) else "torch"


def kernels() -> dict[str, str]:
    """What runs the operators on this machine's CPU, and why: with int8 codes, and linears with groups or fewer bits.

    >>> sorted(kernels())
    ['dequantize', 'embedding', 'library', 'linear', 'linear_dynamic', 'linear_groups', 'linear_static']
    """
    level = best_level()
    found = {"library": LEVELS[level] if level >= 0 else f"none: {unavailable}"}
    cases = {op: (op, 8, 0) for op in OPERATORS} | {"linear_groups": ("linear", 4, 32)}
    for name, (op, bits, group) in cases.items():
        most = next((rows - 1 for rows in range(1, 1025) if not covers(op, bits, group, 64, rows)), 1024)
        found[name] = "torch" if most == 0 else "c" if most == 1024 else f"c, torch for more than {most} rows"
    return found
