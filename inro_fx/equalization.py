"""How much each channel is scaled before quantization: smooth, awq and cle.

    cle       sqrt(max |w_row| / max |w_column|): rows that make a channel and columns that read it become alike. No data.
              (Nagel et al., Data-Free Quantization, arXiv 1906.04721)
    smooth    max |x|^a / max |w|^(1 - a) with a = 1/2: peaks of activations move into weights; for schemes that quantize activations.
              (Xiao et al., SmoothQuant, arXiv 2211.10438)
    awq       mean |x|^a, with the a in 0 .. 1 that loses least when the readers' weights are rounded: channels of large inputs get finer
              steps. (Lin et al., AWQ, arXiv 2306.00978)

Factors are rounded to powers of two, so that the float model is the same, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .errors import InputError
from .passes.capture.example import Example, run
from .passes.capture.session import Session
from .passes.capture.state import rewind
from .passes.constants import owner_of
from .passes.measure import Watched, observing
from .passes.rules.equalize import Site, apply_factors, find_sites

__all__ = ["EQUALIZATIONS", "equalize"]

STEPS = 20                 # exponents that awq tries


@dataclasses.dataclass
class Channels:
    """Of the value that a reader takes: largest and mean magnitude, and mean square, of each channel."""

    largest: Tensor
    total: Tensor
    squares: Tensor
    count: int = 0

    def see(self, x: Tensor) -> None:
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.total += x.abs().sum(0)
        self.squares += x.square().sum(0)
        self.count += len(x)


def equalize(session: Session, kind: str, batches: Sequence[Example], scheme: Any) -> list[str]:
    """Equalizes every site of the captured graphs, in the modules of the session's root: the names of the tensors that were changed. What
    was refused, and why, goes into the programs' logs."""
    rate, needs_data = EQUALIZATIONS[kind]
    sites: dict[str, list[Site]] = {}
    for path, program in session.captures.items():
        sites[path], refused = find_sites(program, session.root, session.constants)
        if list(session.captures) != [""] or session.python_uses:
            refused += [(site.node.name, "parts of the model stay Python, which may read the value as well") for site in sites[path]]
            sites[path] = []
        program.log = (*program.log, *((kind, s.node.name, "") for s in sites[path]), *((kind, node, why) for node, why in refused))
    seen = _observed(session, sites, batches) if needs_data else {}
    changed: list[str] = []
    for path in sites:
        for site in sites[path]:
            weights = [_columns(session.root, r.weight.name, r.weight.axis) for r in site.readers]
            rows = [_columns(session.root, p.name, p.axis) for p in site.divided]
            channels = [seen[path, r.value] for r in site.readers if (path, r.value) in seen]
            if needs_data and not channels:
                continue
            factors = rate(weights, rows, channels, scheme)
            factors = torch.where(factors.isfinite() & (factors > 0), factors, 1.0)
            powers = factors.log2().round().clamp(-12, 12)
            changed += apply_factors(session.root, site, torch.exp2(powers))
    return changed


def _columns(root: nn.Module, name: str, axis: int) -> Tensor:
    """A stored tensor as [channels, everything else]."""
    owner, leaf = owner_of(root, name)
    tensor = owner._parameters[leaf]
    assert tensor is not None
    return tensor.detach().float().movedim(axis, 0).flatten(1) if tensor.dim() > 1 else tensor.detach().float()[:, None]


def _observed(session: Session, sites: Mapping[str, Sequence[Site]], batches: Sequence[Example]) -> dict[tuple[str, fx.Node], Channels]:
    found: dict[tuple[str, fx.Node], Channels] = {}
    watched = {}
    for path, program in session.captures.items():
        wanted = {r.value: r.channel for s in sites[path] for r in s.readers}

        def observe(node: fx.Node, env: Any, value: Any, path: str = path, wanted: Mapping[fx.Node, int] = wanted) -> None:
            if node in wanted and isinstance(value, Tensor) and value.numel():
                x = value.detach().float().movedim(wanted[node], -1).flatten(0, -2)
                if not bool(x.isfinite().all()):
                    raise InputError(f"the calibration data holds NaN or infinity at {node.name}")
                if (path, node) not in found:
                    zeros = x.new_zeros(x.shape[1])
                    found[path, node] = Channels(zeros, zeros.clone(), zeros.clone())
                found[path, node].see(x)
        watched[path] = Watched(program.graph, observe)
    with observing(session.root, watched):
        for batch in batches:
            rewind(session.root, session.as_they_were)
            run(session.root, batch)
    session.state.restore()
    return found


Rate = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Channels], Any], Tensor]


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.abs().amax(1) for t in tensors]).amax(0)


def _cle(weights: Sequence[Tensor], rows: Sequence[Tensor], channels: Sequence[Channels], scheme: Any) -> Tensor:
    return (_largest(rows[:1]) / _largest(weights)).sqrt()


def _smooth(weights: Sequence[Tensor], rows: Sequence[Tensor], channels: Sequence[Channels], scheme: Any) -> Tensor:
    peaks = torch.stack([c.largest for c in channels]).amax(0)
    factors = (peaks / _largest(weights)).sqrt()
    return factors / factors[factors > 0].log().mean().exp() if bool((factors > 0).any()) else factors


def _awq(weights: Sequence[Tensor], rows: Sequence[Tensor], channels: Sequence[Channels], scheme: Any) -> Tensor:
    mean = sum(c.total for c in channels) / max(sum(c.count for c in channels), 1)
    squares = sum(c.squares for c in channels) / max(sum(c.count for c in channels), 1)
    assert isinstance(mean, Tensor)
    assert isinstance(squares, Tensor)
    best, least = torch.ones_like(mean), float("inf")
    for step in range(STEPS + 1):
        factors = mean.clamp(min=1e-8) ** (step / STEPS)
        factors = torch.exp2((factors / (factors.amax() * factors.amin()).sqrt()).log2().round())
        lost = 0.0
        for weight in weights:
            matrix = (weight * factors[:, None]).t().contiguous()
            restored = scheme.unpack(scheme.pack(matrix), matrix.shape[1], torch.float32).t() / factors[:, None]
            lost += float(((restored - weight).square().sum(1) * squares).sum())
        if lost < least:
            best, least = factors, lost
    return best


EQUALIZATIONS: Mapping[str, tuple[Rate, bool]] = {"smooth": (_smooth, True), "awq": (_awq, True), "cle": (_cle, False)}
