"""Where do the bits go: what each format of each weight would do to the output, and the formats that lose least for a budget.

    sensitivity   the square of the relative error of the output that one weight in one format causes alone, from random probes
                  (`inro_fx.passes.solve.gradients`); the errors of several weights add up as if they were independent
    allocation    one format for each group of weights, by a multiple-choice knapsack

Tied weights are one weight; matrices of one layer and direction of a recurrent layer, and weights that multiply the same value (query, key
and value), have one format.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn

from .atomic import write_bytes
from .curve import curve_svg
from .errors import FileError, InputError, ModelError, SchemeError
from .numerics.knapsack import knapsack
from .passes.capture.clone import clone
from .passes.capture.example import Example
from .passes.capture.session import Session
from .passes.carriers import carrier_of
from .passes.constants import Constant
from .passes.program import meta_of
from .passes.rules.fuse_recurrent import groups_of, layer_of
from .passes.scheme import Identity, Scheme, activation_of_scheme
from .passes.solve.examine import examined
from .passes.solve.gradients import Differentiated, difference, probe_signs, relative_error
from .passes.solve.plan import LEAST_SAVING, Overrides, Weight, find_targets, plan, with_scheme
from .progress import progress_bar
from .schemes import GROUPS, describe_scheme, find_scheme, int8, read_scheme
from .solvers import Solver, find_solver
from .steps import Options, apart_from, captured, quantize

__all__ = ["Allocation", "BitPlan", "Budget", "plan_for"]

MOST_RUN = 4               # batches on which errors of whole models are measured
PROBES = 12                # random directions of the output; predictions were within a factor of 1.3 of what was measured (docs/bits.md)
FORMATS: tuple[Scheme | None, ...] = (*GROUPS, int8, None)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How small, or how good: exactly one of

    ``bits``: the mean bits that a weight takes, scales and floats counted; ``bytes``: of the whole stored model; ``ratio``: these bytes as
    a share of the float model's; ``error``: the relative error of the output that may be predicted.

    >>> Budget(bits=4.5)
    Budget(bits=4.5, bytes=None, ratio=None, error=None)
    """

    bits: float | None = None
    bytes: float | None = None
    ratio: float | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        if len(given) != 1:
            raise InputError(f"a Budget has one of bits, bytes, ratio and error, got {', '.join(given) or 'none'}")
        name, value = next(iter(given.items()))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or math.isinf(value):
            raise InputError(f"Budget({name}={value!r}): a positive number is needed")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Weights that have one format: ``names``, and by format ``costs`` in bytes and ``losses``. What would save nothing costs what floats
    cost, and loses nothing."""

    names: tuple[str, ...]
    numbers: int
    costs: tuple[float, ...]
    losses: tuple[float, ...]          # squares of relative errors of the output


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A solution: the format of each weight (None: float), by the weight's name, and what is expected of it.

    ``bytes`` are those of the whole stored model, ``bits`` the mean over its weights, ``error`` the predicted relative error of the output.
    """

    formats: Mapping[str, Scheme | None]
    bytes: int
    bits: float
    error: float

    @property
    def overrides(self) -> dict[str, Scheme | None]:
        """What `quantize_graph` takes."""
        return dict(self.formats)


@dataclasses.dataclass(frozen=True)
class BitPlan:
    """What each format of each weight costs and loses: solved for any budget without another run of the model.

    ``uniform`` are the measured errors of the output with every weight in one format, ``other_bytes`` what is stored beside the weights.
    """

    formats: tuple[Scheme | None, ...]
    choices: tuple[Choice, ...]
    other_bytes: int
    float_bytes: int
    uniform: tuple[float | None, ...]

    @property
    def weights(self) -> int:
        """How many numbers the weights are."""
        return sum(c.numbers for c in self.choices)

    def solve(self, budget: Budget) -> Allocation:
        """The formats that lose least for the budget, or (``error``) take least.

        Raises `InputError` where it cannot be met, naming the nearest that can.
        """
        costs, losses = self._tables()
        if budget.error is not None:
            chosen = knapsack(losses, costs, budget.error**2)
            if chosen is None:
                least = math.sqrt(float(losses.amin(1).sum()))
                raise InputError(f"Budget(error={budget.error:g}): the least error that can be had is {least:.2g}; allow more, or add "
                                 f"float (None) to the formats")
            return self._allocation(chosen)
        limit = self._limit(budget)
        chosen = knapsack(costs, losses, limit)
        if chosen is None:
            least = float(costs.amin(1).sum())
            whole = least + self.other_bytes
            name, nearest = ("bits", least * 8 / max(self.weights, 1)) if budget.bits is not None else \
                ("bytes", whole) if budget.bytes is not None else ("ratio", whole / self.float_bytes)
            text = f"{math.ceil(nearest if name == 'bytes' else nearest * 1000) / (1 if name == 'bytes' else 1000):.10g}"
            raise InputError(f"{budget} cannot be met: the smallest that these formats give is {name}={text}")
        return self._allocation(chosen)

    def best_uniform(self, budget: Budget) -> Allocation | None:
        """Of the solutions with one format for all weights, the one with the least measured error within the budget; None: none is."""
        if budget.error is not None:
            return None
        costs, _ = self._tables()
        limit = self._limit(budget)
        found = [(error, i) for i, error in enumerate(self.uniform) if error is not None and float(costs[:, i].sum()) <= limit]
        return self._allocation([min(found)[1]] * len(self.choices)) if found else None

    def _limit(self, budget: Budget) -> float:
        """The bytes that the weights may take."""
        if budget.bits is not None:
            return budget.bits * self.weights / 8
        return (budget.bytes if budget.bytes is not None else (budget.ratio or 0.0) * self.float_bytes) - self.other_bytes

    def _tables(self) -> tuple[Tensor, Tensor]:
        return (torch.tensor([c.costs for c in self.choices], dtype=torch.float64).reshape(len(self.choices), -1),
                torch.tensor([c.losses for c in self.choices], dtype=torch.float64).reshape(len(self.choices), -1))

    def _allocation(self, chosen: Sequence[int]) -> Allocation:
        cost = sum(c.costs[i] for c, i in zip(self.choices, chosen, strict=True))
        loss = sum(c.losses[i] for c, i in zip(self.choices, chosen, strict=True))
        formats = {name: self.formats[i] for c, i in zip(self.choices, chosen, strict=True) for name in c.names}
        return Allocation(formats, round(cost + self.other_bytes), cost * 8 / max(self.weights, 1), math.sqrt(loss))

    # -- forms --

    def table(self, allocation: Allocation | None = None) -> str:
        """What each format of each weight would lose alone, as a relative error of the output; ``allocation`` marks its choices."""
        names = [_name(f) for f in self.formats]
        rows = []
        for choice in self.choices:
            mine = names.index(_name(allocation.formats[choice.names[0]])) if allocation is not None else -1
            cells = [f"{math.sqrt(loss):.2%}" + ("*" if i == mine else "") for i, loss in enumerate(choice.losses)]
            rows.append([", ".join(choice.names), f"{choice.numbers:,}", *cells])
        rows.append(["all, measured", f"{self.weights:,}", *("" if e is None else f"{e:.2%}" for e in self.uniform)])
        return str(tabulate(rows, ["weight", "numbers", *names], tablefmt="simple", disable_numparse=True,
                            colalign=("left", *("right",) * (len(names) + 1))))

    def points(self, count: int = 24) -> list[tuple[int, float]]:
        """(bytes of the model, predicted error) of the best allocations, from the smallest to the best."""
        costs, losses = self._tables()
        low, high = float(costs.amin(1).sum()), float(costs.gather(1, losses.argmin(1, keepdim=True)).sum())
        found = {}
        for step in range(count):
            limit = low + (high - low) * step / max(count - 1, 1)
            chosen = knapsack(costs, losses, limit + 1e-6)
            if chosen is not None:
                one = self._allocation(chosen)
                found[one.bytes] = one.error
        return sorted(found.items())

    def curve(self, file: str | Path | None = None) -> str:
        """Error against bytes as a picture: SVG, written to ``file`` if one is given."""
        costs, _ = self._tables()
        measured = [(round(float(costs[:, i].sum()) + self.other_bytes), e, _name(self.formats[i])) for i, e in enumerate(self.uniform)
                    if e is not None and e > 0]
        text = curve_svg([p for p in self.points() if p[1] > 0], measured)
        if file is not None:
            write_bytes(Path(file), text.encode())
        return text

    def save(self, file: str | Path) -> Path:
        """Writes the plan as JSON."""
        data = {"inro_fx plan": 1, "formats": [None if f is None else describe_scheme(f) for f in self.formats],
                "choices": [dataclasses.asdict(c) for c in self.choices], "other_bytes": self.other_bytes,
                "float_bytes": self.float_bytes, "uniform": self.uniform}
        return write_bytes(Path(file), json.dumps(data, indent=1).encode())

    @classmethod
    def load(cls, file: str | Path, schemes: Sequence[Scheme] = ()) -> BitPlan:
        """The plan that `save` wrote. Raises `FileError` for a file that is none; ``schemes`` are formats of one's own."""
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
            if data.get("inro_fx plan") != 1:
                raise ValueError("it is no plan of this version")
            choices = tuple(Choice(tuple(map(str, c["names"])), int(c["numbers"]), tuple(map(float, c["costs"])),
                                   tuple(map(float, c["losses"]))) for c in data["choices"])
            formats = tuple(None if f is None else read_scheme(f, schemes) for f in data["formats"])
            made = cls(formats, choices, int(data["other_bytes"]), int(data["float_bytes"]),
                       tuple(None if e is None else float(e) for e in data["uniform"]))
            if any(len(c.costs) != len(formats) or len(c.losses) != len(formats) for c in choices) or len(made.uniform) != len(formats):
                raise ValueError("its tables are of other sizes than its formats")
            return made
        except SchemeError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise FileError(f"{Path(file).name} is no plan that BitPlan.save wrote ({type(error).__name__}: {error})") from error

    def __str__(self) -> str:
        return self.table()


def _name(scheme: Scheme | None) -> str:
    return "float" if scheme is None else scheme.name


def within(model: nn.Module, example: Example, batches: list[Example], options: Options, budget: Budget,
           formats: Sequence[Any]) -> nn.Module:
    """The model quantized for a budget: as the plan says, or with one format for all weights where that measures better."""
    bits, measure = _planned(model, example, batches, options, formats, PROBES)
    allocation, same = bits.solve(budget), bits.best_uniform(budget)

    def quantized(chosen: Allocation, inplace: bool = options.inplace) -> nn.Module:
        pairs = {**dict(options.overrides.entries), **chosen.overrides}
        overrides = Overrides(pairs, model, options.overrides.solvers)
        return quantize(model, example, batches, dataclasses.replace(options, overrides=overrides, inplace=inplace))
    if same is None or same == allocation:
        return quantized(allocation)
    if options.solver.optional:                            # what was measured has the codes that the model will have
        index = bits.formats.index(next(iter(same.formats.values())))
        return quantized(same if measure(allocation) > (bits.uniform[index] or 0.0) else allocation)
    both = [quantized(chosen, False) for chosen in (allocation, same)]
    floats = clone(model)
    errors = [difference(floats, small, batches[:MOST_RUN]) for small in both]
    better = errors[1] < errors[0]
    return quantized((allocation, same)[better]) if options.inplace else both[better]


# ---- making a plan ----

def plan_for(model: nn.Module, example: Example, batches: Sequence[Example], options: Options,
             formats: Sequence[Any], probes: int = PROBES) -> BitPlan:
    """The plan of a model: K probes for the sensitivity of its weights, and one run for each format. Weights that ``options`` name in
    overrides keep what is said there and are not part of it."""
    return _planned(model, example, batches, options, formats, probes)[0]


def _planned(model: nn.Module, example: Example, batches: Sequence[Example], options: Options, formats: Sequence[Any],
             probes: int) -> tuple[BitPlan, Callable[[Allocation], float]]:
    """The plan, and what measures the error of the output under an allocation."""
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        raise SchemeError(f"formats={formats!r}: give a series of schemes, such as ['int4_g32', 'int8', None]")
    chosen_formats = tuple(None if f is None else find_scheme(f) for f in formats)
    _check(chosen_formats, options.solver)
    session, _, ready = captured(clone(model), example, options.capture)
    batches = [ready if b is example else dataclasses.replace(b, draws=ready.draws) for b in batches]
    options.overrides.see(session.root)
    targets = find_targets(session)
    decided = plan(session, targets, Identity(), options.overrides)
    fixed = {t.use.constant for t in targets if options.overrides.match(t, session.constants[t.use.constant].names)[0]}
    weights = {name: w for name, w in decided.weights.items() if name not in fixed}
    if not weights:
        raise ModelError("there is no weight whose format is left to choose")
    candidates = {name: [_candidate(session, w, f) for f in chosen_formats] for name, w in weights.items()}
    solver = options.solver if options.solver.optional else find_solver("search")
    parts = _Parts(session, candidates, solver)
    session.state.restore()
    constants = {name: w.constant for name, w in weights.items()}

    def floats() -> nn.Module:
        return apart_from(clone(model), session)

    def measure(allocation: Allocation) -> float:
        index = {name: chosen_formats.index(allocation.formats[name]) for name in weights}
        return relative_error(floats, batches[:MOST_RUN], constants, lambda name: parts.restored(name, index[name]))
    losses = _sensitivities(floats, batches[:probes], constants, parts, len(chosen_formats), probes)

    def alike(index: int) -> float:
        return relative_error(floats, batches[:MOST_RUN], constants, lambda name: parts.restored(name, index))
    uniform = tuple(0.0 if scheme is None else alike(index) for index, scheme in enumerate(chosen_formats))
    if not all(map(math.isfinite, [*uniform, *(x for row in losses.values() for x in row)])):
        raise InputError("the calibration data, or what the model makes of it, holds NaN or infinity")
    choices = tuple(_choice(group, weights, candidates, losses) for group in _groups(session, weights))
    stored = sum(t.numel() * t.element_size() for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    other = stored - sum(w.constant.bytes for w in weights.values())
    return BitPlan(chosen_formats, choices, other, stored, uniform), measure


def _check(formats: Sequence[Scheme | None], solver: Solver) -> None:
    if not any(f is not None for f in formats):
        raise SchemeError("give at least one scheme among the formats")
    for scheme in formats:
        if scheme is not None and activation_of_scheme(scheme) != "float":
            raise SchemeError(f"the format {scheme.name} quantizes activations: a budget chooses among formats of weights")
        if scheme is not None and (reason := solver.refuse(scheme)) is not None:
            raise SchemeError(f"{solver.name} cannot serve the format {scheme.name}: {reason}")


@dataclasses.dataclass(frozen=True)
class Candidate:
    weight: Weight | None              # None: float, because that was asked for, or because nothing would be saved
    bytes: float


def _candidate(session: Session, weight: Weight, scheme: Scheme | None) -> Candidate:
    size = examined(scheme, weight.layout, weight.constant.dtype)[0] if scheme is not None else weight.constant.bytes
    if scheme is None or size > LEAST_SAVING * weight.constant.bytes:
        return Candidate(None, weight.constant.bytes)
    return Candidate(with_scheme(session, weight, scheme), size)


class _Parts:
    """The parts of each weight in each format, made once."""

    def __init__(self, session: Session, candidates: Mapping[str, Sequence[Candidate]], solver: Solver):
        self.session, self.candidates, self.solver = session, candidates, solver
        self.made: dict[tuple[str, int], dict[str, Tensor]] = {}

    def restored(self, name: str, index: int) -> Tensor | None:
        """The weight in a format; None where that is float."""
        weight = self.candidates[name][index].weight
        if weight is None:
            return None
        if (name, index) not in self.made:
            matrix = weight.layout.matrix(self.session.tensor(name).detach())
            self.made[name, index] = dict(self.solver.solve(matrix, weight.scheme, []))
        return weight.restored(self.made[name, index])


def _sensitivities(floats: Callable[[], nn.Module], batches: Sequence[Example], constants: Mapping[str, Constant], parts: _Parts,
                   formats: int, probes: int) -> dict[str, list[float]]:
    """For each weight and format, the mean square of the relative error of the output."""
    squares = {name: [0.0] * formats for name in constants}
    generator = torch.Generator().manual_seed(0)
    done = 0
    with progress_bar(probes, "measuring sensitivities") as tick:
        for number, batch in enumerate(batches):
            count = probes // len(batches) + (number < probes % len(batches))
            try:
                model = Differentiated(floats(), batch, constants)
                if not model.outputs:                        # an empty batch
                    continue
                signal = sum(float(torch.where(y.isfinite(), y, 0).detach().double().square().sum()) for y in model.outputs) or 1.0

                def see(name: str, gradient: Tensor, model: Differentiated = model, signal: float = signal) -> None:
                    with torch.no_grad():
                        for index in range(formats):
                            restored = parts.restored(name, index)
                            if restored is not None:
                                effect = torch.sum(gradient * (restored - model.places[name]), dtype=torch.float64)
                                squares[name][index] += float(effect) ** 2 / signal
                for probe in range(count):
                    model.backward(probe_signs(model.outputs, generator), see, again=probe + 1 < count)
                    done += 1
                    tick()
            except RuntimeError as error:
                raise ModelError(f"what each layer does to the output cannot be found: {error}; choose schemes by hand, with "
                                 f"overrides=") from error
    if not done:
        raise InputError("no batch of the calibration data gives an output")
    return {name: [s / done for s in row] for name, row in squares.items()}


def _choice(group: Sequence[str], weights: Mapping[str, Weight], candidates: Mapping[str, Sequence[Candidate]],
            losses: Mapping[str, Sequence[float]]) -> Choice:
    costs = tuple(sum(candidates[name][i].bytes for name in group) for i in range(len(losses[group[0]])))
    lost = tuple(sum(losses[name][i] for name in group) for i in range(len(costs)))
    return Choice(tuple(group), sum(math.prod(weights[n].constant.shape) for n in group), costs, lost)


def _groups(session: Session, weights: Mapping[str, Weight]) -> list[list[str]]:
    """The weights that must have one format, in the order of the weights."""
    leader = {name: name for name in weights}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    def join(names: Iterable[str]) -> None:
        first, *rest = [n for n in dict.fromkeys(names) if n in leader] or [""]
        for other in rest:
            leader[find(other)] = find(first)
    for program in session.captures.values():
        readers: dict[Any, list[str]] = {}
        for node in program.graph.nodes:
            carrier = carrier_of(node.target) if node.op in ("call_function", "call_method") else None
            if carrier is None:
                continue
            layer = layer_of(node) if carrier.fused == "recurrent" else None
            if layer is not None:
                for group in groups_of(layer):
                    join(meta_of(p)["alias"].constant for p in group if "alias" in meta_of(p))
            elif carrier.fused == "linear" and carrier.activation is not None:
                call = carrier.bind(node.args, node.kwargs)
                operand = next((call[o] for o in carrier.weights if o != carrier.activation), None)
                if isinstance(operand, fx.Node) and "alias" in operand.meta:
                    readers.setdefault(call[carrier.activation], []).append(operand.meta["alias"].constant)
        for names in readers.values():
            join(names)
    found: dict[str, list[str]] = {}
    for name in weights:
        found.setdefault(find(name), []).append(name)
    return list(found.values())
