"""What calibration data says about the inputs of a weight, and what chooses codes from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Moments", "Solver"]


@dataclasses.dataclass
class Moments:
    """Sums over the inputs x [columns] that the rows ``rows`` of a matrix are multiplied by.

    Rows of a block share their inputs; there are as many blocks of equally many rows as the first axis of the sums says (one but for
    grouped convolutions and batched products). ``squares`` is the sum of x^2, float64 [blocks, columns], over ``count`` inputs.
    ``second``, where it was asked for, is the sum of x^T x, float64 [blocks, columns, columns], and ``cross`` that of (x_float - x)^T x:
    x is the input in the model whose earlier layers are quantized, x_float in the float model.
    """

    rows: slice
    squares: Tensor
    second: Tensor | None = None
    cross: Tensor | None = None
    count: int = 0


@runtime_checkable
class Solver(Protocol):
    """Chooses the codes of a weight. Any object with these members is one; nothing needs to be registered.

    ``needs`` says which sums: "nothing", "squares", "second" or "cross" (each with those before it). ``optional``: it can do without.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> str: ...

    @property
    def optional(self) -> bool: ...

    def refuse(self, scheme: Any) -> str | None:
        """Why the solver cannot serve a scheme, None if it can."""

    def solve(self, matrix: Tensor, scheme: Any, moments: Sequence[Moments]) -> Mapping[str, Tensor]:
        """[out, in] floats -> the scheme's parts. ``moments`` are of some or all rows, and none where nothing is known."""
