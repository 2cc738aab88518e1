"""The vocabulary of quantization that the passes share: what a scheme is, and how a weight is seen as a matrix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Identity", "Layout", "Scheme", "activation_of_scheme"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A weight of ``shape`` as a matrix [out, in]: one row for each output channel.

    The weight is first viewed as ``view`` (equal to ``shape`` but for grouped transposed convolutions); its axes in
    ``channels`` make the rows, those in ``reduced`` the columns, in that order.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    channels: tuple[int, ...]
    reduced: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], reduced: tuple[int, ...], groups: int = 1, taps_first: bool = False) -> Layout:
        """The layout in which the axes ``reduced`` are summed over. ``groups`` splits axis 0 of a transposed convolution; ``taps_first``:
        the input channels of each tap of a convolution lie side by side."""
        view = (groups, shape[0] // groups, *shape[1:]) if groups > 1 else shape
        if groups > 1:
            channels: tuple[int, ...] = (0, 2)
        elif len(reduced) == len(shape):        # summed over altogether, as in the middle of a chain: any rows will do
            channels = (0,)
        else:
            channels = tuple(a for a in range(len(shape)) if a not in reduced)
        rest = [a for a in range(len(view)) if a not in channels]
        if taps_first and view[rest[0]] > 1 and math.prod(view[a] for a in rest[1:]) > 1:       # else it is the same matrix
            rest = rest[1:] + rest[:1]
        return cls(shape, view, channels, tuple(rest))

    @property
    def rows(self) -> int:
        return math.prod(self.view[a] for a in self.channels)

    @property
    def columns(self) -> int:
        return math.prod(self.view[a] for a in self.reduced)

    @property
    def plain(self) -> bool:
        """Is the matrix the weight itself?"""
        return len(self.shape) == 2 and self.view == self.shape and self.channels == (0,)

    def matrix(self, weight: Tensor) -> Tensor:
        """[*shape] -> [out, in], a view where possible."""
        if self.plain:
            return weight
        return weight.reshape(self.view).permute(*self.channels, *self.reduced).reshape(self.rows, self.columns)

    def restore(self, matrix: Tensor) -> Tensor:
        """[out, in] -> [*shape]; the inverse of `matrix`."""
        if self.plain:
            return matrix
        order = (*self.channels, *self.reduced)
        back = tuple(order.index(a) for a in range(len(order)))
        weight = matrix.reshape(tuple(self.view[a] for a in order)) if len(self.channels) != 1 or len(order) != 2 else matrix
        weight = weight if back == tuple(range(len(order))) else weight.permute(back).contiguous()
        return weight if self.view == self.shape else weight.reshape(self.shape)


@runtime_checkable
class Scheme(Protocol):
    """A number format for weights. Any object with these members is one; nothing needs to be registered.

    ``activation``, if it has one, says what its operators do to their inputs: "float" nothing, "dynamic" quantize them by what they
    are, "static" with a range that calibration gave.

    Laws: every part has as many rows as the matrix, or one row that serves all; ``unpack(pack(w))`` has w's shape; its
    error is at most ``bound(w)`` in every element; packing it again gives the same parts.
    """

    name: str
    parts: tuple[str, ...]

    def pack(self, matrix: Tensor) -> dict[str, Tensor]:
        """[out, in] floats -> the named parts that are stored, such as codes and scale."""

    def unpack(self, parts: Mapping[str, Any], columns: int, dtype: torch.dtype) -> Any:
        """The parts -> [out, columns] of ``dtype``. It is traced into the graph: torch operators only."""

    def bound(self, matrix: Tensor) -> Tensor:
        """The largest error of each element, broadcastable to [out, in]."""

    def operator(self, op: str) -> tuple[Callable[..., Any], tuple[Any, ...]] | str:
        """What computes ``op`` ("linear", "embedding", "recurrent") from the parts: (function, trailing arguments), or why nothing does."""


def activation_of_scheme(scheme: Scheme) -> str:
    """"float", "dynamic" or "static"."""
    return getattr(scheme, "activation", "float")


class Identity:
    """The scheme that changes nothing: what it rewrites must be bitwise equal to the float model (a law of every pass)."""

    name = "identity"
    parts = ("codes",)

    def pack(self, matrix: Tensor) -> dict[str, Tensor]:
        return {"codes": matrix}

    def unpack(self, parts: Mapping[str, Any], columns: int, dtype: torch.dtype) -> Any:
        return parts["codes"]

    def bound(self, matrix: Tensor) -> Tensor:
        return matrix.new_zeros(())

    def operator(self, op: str) -> str:
        return "the identity has no operators"
