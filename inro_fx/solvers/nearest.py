"""nearest: each weight to the nearest code, on the grid that the largest weights give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..passes.solve.moments import Moments

__all__ = ["Nearest", "nearest"]


@dataclasses.dataclass(frozen=True)
class Nearest:
    """What `Scheme.pack` does; for any scheme."""

    name: str = "nearest"
    needs: ClassVar[str] = "nothing"
    optional: ClassVar[bool] = True

    def refuse(self, scheme: Any) -> str | None:
        return None

    def solve(self, matrix: Tensor, scheme: Any, moments: Sequence[Moments]) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = scheme.pack(matrix)
        return parts


nearest = Nearest()
