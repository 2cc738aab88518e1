"""Error against bytes as a picture: an SVG of plain shapes, with nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

__all__ = ["curve_svg"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 70, 110, 44, 50
INK, LINE, DOT = "#333333", "#1f6f8b", "#c8553d"


def curve_svg(points: Sequence[tuple[int, float]], named: Sequence[tuple[int, float, str]]) -> str:
    """``points`` (bytes, error) as a line, ``named`` ones as dots with their names; the axis of errors is logarithmic.

    >>> curve_svg([(10, 0.5), (20, 0.1)], [(15, 0.3, "int4")]).count("<circle")
    1
    """
    sizes = [s for s, _ in points] + [s for s, *_ in named] or [0]
    errors = [e for _, e in points] + [e for _, e, _ in named] or [1.0]
    unit, label = next((u, t) for u, t in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes")) if max(sizes) >= u or u == 1)
    first, last = min(sizes), max(max(sizes), min(sizes) + 1)
    low, high = math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors)))
    high = max(high, low + 1)

    def x(size: float) -> float:
        return LEFT + (size - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(error: float) -> float:
        return TOP + (high - math.log10(error)) / (high - low) * (HEIGHT - TOP - BOTTOM)
    shapes = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" '
              f'fill="{INK}">',
              f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
              f'<text x="{LEFT}" y="22" font-size="14">error of the output against bytes of the model</text>']
    for power in range(low, high + 1):
        height = y(10.0**power)
        shapes.append(f'<line x1="{LEFT}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}" stroke="#dddddd"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{10.0**power * 100:g}%</text>')
    for step in range(5):
        size = first + (last - first) * step / 4
        shapes.append(f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{size / unit:.3g}</text>')
    shapes.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    if points:
        line = " ".join(f"{x(s):.1f},{y(e):.1f}" for s, e in points)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
        shapes.append(f'<text x="{x(points[0][0]) + 10:.1f}" y="{TOP + 10}" fill="{LINE}">allocated, predicted</text>')
    for size, error, name in named:
        shapes.append(f'<circle cx="{x(size):.1f}" cy="{y(error):.1f}" r="4" fill="{DOT}"/>')
        shapes.append(f'<text x="{x(size) + 7:.1f}" y="{y(error) + 4:.1f}" fill="{DOT}">{escape(name)}</text>')
    return "\n".join([*shapes, "</svg>\n"])
