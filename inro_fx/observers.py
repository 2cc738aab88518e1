"""Observers: what range the inputs of a layer have, from calibration data.

An observer is a module that passes its input on and remembers what it needs of it; ``range()`` gives the (low, high) that the
quantized layer will use. Two observers of the same kind merge: the first half of the data seen by one and the second half by
the other give what one gives that saw all of it (a moving average but for rounding).

    minmax           everything that was seen
    moving_average   an exponential average of the extremes of each batch
    histogram        the range whose quantization loses least, in squared error
    percentile       what lies between two percentiles

The two last keep counts in bins of a power of two wide, so that widening the range adds whole bins up: memory is bounded, and the
counts do not depend on the order of the data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError

__all__ = ["OBSERVERS", "HistogramObserver", "MinMaxObserver", "MovingAverageObserver", "Observer", "PercentileObserver",
           "all_reduce_observers"]

BINS = 4096
STEPS = 254                # of codes -127..127


class Observer(nn.Module):
    """Passes its input on; remembers the extremes. ``axis`` keeps them apart for each channel along that axis.

    Buffers: ``low`` and ``high`` float32, scalars or [channels]; ``count`` int64, the batches seen.
    """

    kind = ""
    low: Tensor
    high: Tensor
    count: Tensor

    def __init__(self, axis: int | None = None):
        super().__init__()
        self.axis, self.path = axis, ""                 # ``path``: of the layer, for messages
        self.watching = True
        for name, value in (("low", math.inf), ("high", -math.inf)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape, unchanged. Raises `InputError` for NaN and infinity."""
        if self.watching and x.numel():
            self.see(x.detach().float())
        return x

    @torch.no_grad()
    def see(self, x: Tensor) -> None:
        """Takes one batch into account."""
        low, high = self._extremes(x)
        if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
            raise InputError(f"{self.path or 'the observer'}: the calibration data holds NaN or infinity at this layer's input")
        self._take(low, high)
        self.count += 1

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.axis is None:
            return torch.aminmax(x)
        flat = x.movedim(self.axis, 0).flatten(1)
        return flat.amin(1), flat.amax(1)

    def _take(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def need_data(self) -> None:
        """Raises `InputError` where no data was seen."""
        if not int(self.count):
            raise InputError(f"{self.path or 'the observer'}: no calibration data reached this layer")

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high) that quantization shall cover. Raises `InputError` where no data was seen."""
        self.need_data()
        return self._range()

    def _range(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def clipped(self, low: float, high: float) -> float | None:
        """The share of what was seen that lies outside of low .. high; None where it was not counted."""
        return 0.0

    def merge(self, other: Observer) -> Observer:
        """Takes in what ``other`` saw, as if it had come after; returns self."""
        if type(other) is not type(self) or other.axis != self.axis:
            raise InputError(f"a {type(self).__name__} cannot merge a {type(other).__name__}: their kinds or axes differ")
        if int(other.count):
            self._merge(other)
            self.count += other.count
        return self

    def _merge(self, other: Any) -> None:
        self._take(other.low, other.high)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """What is kept for each channel has the state's number of channels: before the first batch it is a scalar."""
        for name, buffer in self._buffers.items() if self.axis is not None else ():
            value = state_dict.get(prefix + name)
            if buffer is not None and isinstance(value, Tensor) and value.dim() <= 1 and name != "count":
                self._buffers[name] = buffer.new_empty(value.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Observer:
        """The ranges stay float32, also in a model of another dtype: they follow to another device only."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and (before := exact[name]) is not None and buffer.dtype != before.dtype:
                self._buffers[name] = before.to(buffer.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.kind}, {int(self.count)} batches"


class MinMaxObserver(Observer):
    """The smallest and the largest value seen."""

    kind = "minmax"


class MovingAverageObserver(Observer):
    """An exponential average of the extremes of each batch: low += averaging * (low of the batch - low)."""

    kind = "moving_average"

    def __init__(self, averaging: float = 0.01, axis: int | None = None):
        super().__init__(axis)
        self.averaging = averaging
        for name in ("first_low", "first_high"):
            self.register_buffer(name, torch.zeros(()))

    def _take(self, low: Tensor, high: Tensor) -> None:
        if not int(self.count):
            self.low, self.high, self.first_low, self.first_high = low, high, low.clone(), high.clone()   # each may be written
        else:
            self.low, self.high = torch.lerp(self.low, low, self.averaging), torch.lerp(self.high, high, self.averaging)

    def clipped(self, low: float, high: float) -> float | None:
        return None

    def _merge(self, other: MovingAverageObserver) -> None:
        if not int(self.count):
            for name in ("low", "high", "first_low", "first_high"):
                setattr(self, name, getattr(other, name).clone())
            return
        # other.low = kept * first + (what the later batches added); after self, the first one counts `averaging` as the others do
        kept = (1 - self.averaging) ** int(other.count)
        self.low = kept * self.low + other.low - kept * other.first_low
        self.high = kept * self.high + other.high - kept * other.first_high


class _Counting(Observer):
    """Counts values in `BINS` bins over -2**exponent .. 2**exponent."""

    counts: Tensor
    exponent: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(BINS, dtype=torch.int64))
        self.register_buffer("exponent", torch.tensor(-126))

    def see(self, x: Tensor) -> None:
        super().see(x)
        with torch.no_grad():
            largest = max(abs(float(x.min())), abs(float(x.max())))
            self._widen(math.frexp(largest)[1] if largest else -126)
            bins = torch.floor(x.double() * self._per_unit()).to(torch.int64).add_(BINS // 2)
            self.counts += torch.bincount(bins.flatten(), minlength=BINS).to(self.counts.device)

    def _per_unit(self) -> float:
        return math.ldexp(BINS / 2, -int(self.exponent))

    def _widen(self, exponent: int) -> None:
        """Twice the range is half the bins: the inner halves add up in pairs, exactly."""
        while int(self.exponent) < exponent:
            if not int(self.counts.sum()):
                self.exponent.fill_(exponent)
                return
            halves = self.counts.view(BINS // 2, 2).sum(1)
            self.counts = torch.zeros_like(self.counts)
            self.counts[BINS // 4:BINS // 4 + BINS // 2] = halves
            self.exponent += 1

    def _merge(self, other: _Counting) -> None:
        super()._merge(other)
        theirs = copy.deepcopy(other).to(self.counts.device)
        common = max(int(self.exponent), int(theirs.exponent))
        self._widen(common)
        theirs._widen(common)
        self.counts = self.counts + theirs.counts

    def _centres(self) -> Tensor:
        return (torch.arange(BINS, dtype=torch.float64) - BINS / 2 + 0.5) / self._per_unit()

    def clipped(self, low: float, high: float) -> float | None:
        if not int(self.count):
            return None
        centres = self._centres()
        outside = self.counts.cpu()[(centres < low) | (centres > high)].sum()
        return float(outside) / float(self.counts.sum())


class HistogramObserver(_Counting):
    """The range with the least expected squared error of ``STEPS`` even steps: rounding inside of it, clipping outside."""

    kind = "histogram"

    def _range(self) -> tuple[Tensor, Tensor]:
        centres, counts = self._centres(), self.counts.cpu().double()
        low, high = float(self.low), float(self.high)
        shares = torch.linspace(0.02, 1.0, 99, dtype=torch.float64)
        for _ in range(2):                                 # one end after the other, twice
            if high > 0:
                high = _least(lambda end: (low, end), high * shares, centres, counts)  # noqa: B023
            if low < 0:
                low = _least(lambda end: (end, high), low * shares, centres, counts)  # noqa: B023
        return torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32)


def _least(ends: Any, candidates: Tensor, centres: Tensor, counts: Tensor) -> float:
    """The candidate whose range (``ends`` of it) loses least."""
    losses = []
    for candidate in candidates.tolist():
        low, high = ends(candidate)
        low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / STEPS
        beyond = (centres - centres.clamp(low, high)).square()
        losses.append(float((counts * torch.where(beyond > 0, beyond, step * step / 12)).sum()))
    return float(candidates[min(range(len(losses)), key=losses.__getitem__)])


class PercentileObserver(_Counting):
    """What lies between the percentiles 100 - ``percentile`` and ``percentile``, to a bin."""

    kind = "percentile"

    def __init__(self, percentile: float = 99.99):
        super().__init__()
        self.percentile = percentile

    def _range(self) -> tuple[Tensor, Tensor]:
        share = self.counts.cpu().cumsum(0).double() / float(self.counts.sum())
        edge = (100 - self.percentile) / 100
        low, high = (int(torch.searchsorted(share, torch.tensor(s, dtype=torch.float64))) for s in (edge, 1 - edge))
        width = 1 / self._per_unit()
        ends = ((low - BINS // 2) * width, (min(high, BINS - 1) + 1 - BINS // 2) * width)
        return (torch.maximum(torch.tensor(ends[0], dtype=torch.float32), self.low.cpu()),
                torch.minimum(torch.tensor(ends[1], dtype=torch.float32), self.high.cpu()))


OBSERVERS: Mapping[str, type[Observer]] = {
    o.kind: o for o in (MinMaxObserver, MovingAverageObserver, HistogramObserver, PercentileObserver)}


def all_reduce_observers(model: nn.Module, group: Any = None) -> None:
    """Merges the observers of a prepared model over all processes of ``torch.distributed``, in the order of their ranks.

    Afterwards every process has what one would have that had seen all the data.
    """
    world = torch.distributed.get_world_size(group)
    for observer in (m for m in model.modules() if isinstance(m, Observer)):
        states: list[Any] = [None] * world
        torch.distributed.all_gather_object(states, {k: v.cpu() for k, v in observer.state_dict().items()}, group)
        device = observer.low.device
        merged = _from_state(observer, states[0])
        for state in states[1:]:
            merged.merge(_from_state(observer, state))
        for name, value in merged.state_dict().items():
            setattr(observer, name, value.to(device))


def _from_state(like: Observer, state: Mapping[str, Tensor]) -> Observer:
    observer = copy.deepcopy(like).cpu()
    for name, value in state.items():
        setattr(observer, name, value.clone())
    return observer
