"""From programs to a plan: which weights are quantized, with which scheme and layout, and why the others are not.

Nothing is rewritten here. `plan` gives every weight of two or more dimensions exactly one fate: a `Weight` (with the `Target`s
that use it) or a `Skip` with the reason that the report shows.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture.session import Session
from ..carriers import CARRIERS, LOOKUPS, Use, computed_uses, name_of_target, observed_use, picked_use
from ..constants import Constant
from ..failures import SchemeError
from ..program import meta_of
from ..run.changes import mentioned, mentioned_by
from ..run.classes import user_class
from ..scheme import Identity, Layout, Scheme
from .examine import examined

__all__ = ["Overrides", "Plan", "Skip", "Target", "Weight", "find_targets", "held_weights", "plan", "uses_of",
           "with_scheme"]

OPS = frozenset(c.op for c in CARRIERS)
LEAST_SAVING = 0.9         # a weight whose stored form would take more than this share of its float bytes stays float


@dataclasses.dataclass(frozen=True)
class Target:
    """One use of a weight: node ``node`` of the capture at ``capture``, or (node None) code of ``module`` that stays Python."""

    capture: str
    node: str | None
    module: str
    use: Use

    @property
    def key(self) -> tuple[str, str, str]:
        """(path of the program, node or operator, weight): what its errors are kept under."""
        return self.capture, self.node if self.node is not None else f"({self.use.op})", self.use.constant


@dataclasses.dataclass
class Weight:
    """A weight that is quantized: with ``scheme``, seen as a matrix by ``layout``, its parts stored as ``buffers``.

    ``parts`` are there once it is packed; those in ``single_row`` serve every row of the matrix (one scale for the whole weight).
    """

    constant: Constant
    scheme: Scheme
    layout: Layout
    targets: list[Target]
    buffers: tuple[str, ...]
    single_row: frozenset[str]
    parts: dict[str, Tensor] | None = None
    solver: Any = None                       # what chooses its codes, where an override says so
    observer: str = ""                       # which observer found the range of its inputs
    clipped: float | None = None             # the share of the calibration data outside of it

    def restored(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight as parts say it is."""
        return self.layout.restore(self.scheme.unpack(parts, self.layout.columns, self.constant.dtype))


@dataclasses.dataclass(frozen=True)
class Skip:
    """A weight that stays float, and why."""

    constant: Constant
    reason: str


@dataclasses.dataclass
class Plan:
    weights: dict[str, Weight]           # by the constant's name
    skips: list[Skip]
    solvers: dict[str, str] = dataclasses.field(default_factory=dict)          # what chose the codes of a weight, where not `nearest`


def find_targets(session: Session) -> list[Target]:
    """Every use of a constant by a carrier, in graphs and in code that stays Python, in the order of execution."""
    found = []
    for path, capture in session.captures.items():
        for node in capture.graph.nodes:
            for use in uses_of(node):
                if use.computed and not session.constants[use.constant].parameter:
                    continue                                       # masks, and other tables that a weight is computed with
                found.append(Target(path, node.name, meta_of(node).get("module", path), use))
    seen = {t.use.constant for t in found}
    for (path, constant, _), use in session.python_uses.items():
        if constant not in seen:
            found.append(Target(path, None, path, use))
    return found


def uses_of(node: fx.Node) -> list[Use]:
    """The constants that a node multiplies by or looks up in."""
    if node.op not in ("call_function", "call_method"):
        return []
    seen = observed_use(node.target, node.args, node.kwargs, lambda a: meta_of(a).get("alias") if isinstance(a, fx.Node) else None)
    return [*(picked_use(node, use) for use in seen), *computed_uses(node)]


class Overrides:
    """``{pattern: scheme or None}``: a pattern is a glob of module paths, a module class, or the name of an operator.

    A path pattern matches the module and everything below it. The first match wins; `unused` lists those that match nothing.
    ``solvers`` are those that patterns come with.
    """

    def __init__(self, overrides: Mapping[Any, Any] | None, root: nn.Module, solvers: Mapping[Any, Any] | None = None):
        self.entries = list((overrides or {}).items())
        self.solvers = dict(solvers or {})
        self.used: set[int] = set()
        self.classes: dict[str, type] = {}
        self.own: set[str] = set()               # parameters and buffers of the model itself, whose names come before operators'
        self.see(root)
        for key, _ in self.entries:
            if not isinstance(key, (str, type)):
                raise SchemeError(f"overrides: {key!r} is neither a module path, a module class nor an operator name")

    def see(self, root: nn.Module) -> None:
        """Takes the module paths and classes of a model."""
        self.classes = {path: user_class(module) for path, module in root.named_modules(remove_duplicate=False)}
        self.own = {*root._parameters, *root._buffers}

    def match(self, target: Target, names: tuple[str, ...]) -> tuple[bool, Any, Any]:
        """(matched, pattern, scheme) for one use of a weight known as ``names``."""
        owners = [name.rpartition(".")[0] for name in names]
        paths = [target.module] if target.module in owners and target.node is not None else [target.module, *owners]
        found = [i for i, (key, _) in enumerate(self.entries) if self._matches(key, target, paths, names)]
        self.used.update(found)
        return (True, *self.entries[found[0]]) if found else (False, None, None)

    def _matches(self, key: Any, target: Target, paths: list[str], names: tuple[str, ...]) -> bool:
        if isinstance(key, type):
            return any(issubclass(self.classes[p], key) for p in paths)
        if key in OPS and key not in self.classes and key not in self.own:
            return bool(target.use.op == key)
        candidates = {*paths, *(n for n in names if n.rpartition(".")[0] in paths)}
        return any(part == key or fnmatch.fnmatchcase(part, key) for c in candidates for part in _prefixes(c))

    @property
    def unused(self) -> list[Any]:
        return [key for index, (key, _) in enumerate(self.entries) if index not in self.used]


def _prefixes(path: str) -> list[str]:
    pieces = path.split(".")
    return [".".join(pieces[:i]) for i in range(1, len(pieces) + 1)] or [""]


def plan(session: Session, targets: list[Target], default: Scheme, overrides: Overrides) -> Plan:
    """Decides for every weight: ``default`` where no override says otherwise."""
    by_constant: dict[str, list[Target]] = {}
    for target in targets:
        by_constant.setdefault(target.use.constant, []).append(target)
    users = _users(session)
    weights: dict[str, Weight] = {}
    skips = []
    for constant in dict.fromkeys(session.constants.values()):
        uses = by_constant.get(constant.name, [])
        if not constant.parameter and not any(t.use.op not in LOOKUPS for t in uses):
            continue                                     # tables in buffers are not weights
        outcome = _decide(session, constant, uses, default, overrides) if uses else _why_unused(session, constant, users)
        if isinstance(outcome, Weight):
            weights[constant.name] = outcome
        elif constant.parameter or uses:
            skips.append(Skip(constant, outcome))
    for key in overrides.unused:
        warnings.warn(f"overrides: {key!r} matches no layer", stacklevel=4)
    return Plan(weights, skips)


def _decide(session: Session, constant: Constant, uses: list[Target], default: Scheme, overrides: Overrides) -> Weight | str:
    asked: dict[str, Scheme] = {}
    solver = None
    answers = [(target, *overrides.match(target, constant.names)) for target in uses]
    for target, matched, key, chosen in answers:
        if matched and chosen is not None:
            asked[chosen.name] = chosen
            solver = overrides.solvers.get(key, solver)
        elif matched:
            who = f"overrides[{key if isinstance(key, str) else key.__name__!r}] leaves it float"
            others = len({t.module for t in uses}) > 1
            return who + (f" (at {target.module}; one table serves {len(uses)} uses, so nothing is saved)" if others else "")
    if len(asked) > 1:
        raise SchemeError(f"overrides ask for {' and '.join(asked)} for {' = '.join(constant.names)}, which is one weight with "
                          f"{len(uses)} uses; give it one scheme")
    scheme = next(iter(asked.values()), default)
    if constant.dtype.is_complex:
        return f"{str(constant.dtype).removeprefix('torch.')} weight: only real floating-point weights are quantized"
    if constant.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return f"{str(constant.dtype).removeprefix('torch.')} weight: only floating-point weights are quantized"
    if session.written.keys() & set(constant.names):
        return "its own forward writes to it (such as an embedding with max_norm)"
    if any(_reaches_around(session, name) for name in constant.names):
        return "code looks it up in a dict of all parameters"
    if constant.name in session.held_elsewhere:
        return "code holds it in an attribute as well, past the module that owns it"
    first = min(uses, key=lambda t: t.use.op in LOOKUPS)
    convolved = first.use.op.startswith("conv") and not isinstance(scheme.operator("conv"), str)
    layout = Layout.of(constant.shape, first.use.reduced, first.use.groups, taps_first=convolved)
    tensor = session.tensor(constant.name)
    if 0 in constant.shape:
        return "it is empty"
    if not bool(torch.isfinite(tensor.detach().sum())) and not bool(torch.isfinite(tensor.detach()).all()):
        warnings.warn(f"{constant.name} holds NaN or infinity and was left float", stacklevel=5)
        return "it holds NaN or infinity"
    if constant.dtype == torch.float64 and tensor.detach().abs().max() > torch.finfo(torch.float32).max:
        return "it holds numbers too large for a float32 scale"
    try:
        size, single_row = examined(scheme, layout, constant.dtype)
    except SchemeError as error:
        raise SchemeError(f"{constant.name}: {error}") from error
    if size > LEAST_SAVING * constant.bytes and not isinstance(scheme, Identity):
        return f"{scheme.name} would take {size} bytes in the place of {constant.bytes}"
    return Weight(constant, scheme, layout, uses, _buffer_names(session, constant, scheme), single_row, solver=solver)


def _reaches_around(session: Session, name: str) -> bool:
    """Does the code of the module that owns a weight, or of one above it, look into dicts of parameters?"""
    path = name.rpartition(".")[0]
    above = [path[:i] for i in range(len(path)) if path[i] == "."] + ["", path]
    classes = {user_class(session.root.get_submodule(p)) for p in above}
    return any(("_parameters" in mentioned(c) and not issubclass(c, fx.GraphModule))
               or mentioned_by(c.forward) & {"named_parameters", "state_dict"} for c in classes)


def with_scheme(session: Session, weight: Weight, scheme: Scheme) -> Weight:
    """The same weight with another scheme."""
    return dataclasses.replace(weight, scheme=scheme, buffers=_buffer_names(session, weight.constant, scheme),
                               single_row=examined(scheme, weight.layout, weight.constant.dtype)[1])


def held_weights(session: Session) -> dict[str, Weight]:
    """The weights that the model of a session holds as codes already, by name."""
    found = {}
    for constant in dict.fromkeys(session.constants[name] for name in session.packed):
        packed = session.packed[constant.name]
        parts = packed.parts(session.root.get_submodule(constant.module))
        single = frozenset(name for name, part in parts.items() if part.shape[0] == 1 and packed.layout.rows != 1)
        found[constant.name] = Weight(constant, packed.scheme, packed.layout, [], packed.buffers, single, parts)
    return found


def _buffer_names(session: Session, constant: Constant, scheme: Scheme) -> tuple[str, ...]:
    """``weight_codes``, ``weight_scale``, or the next free names where the model has such attributes of its own."""
    leaves = {name.rpartition(".")[2] for name in constant.names}
    owners = [session.root.get_submodule(name.rpartition(".")[0]) for name in constant.names]
    for suffix in ("", *(f"_{i}" for i in range(1, 1000))):
        endings = [f"_{part}{suffix}" for part in scheme.parts]
        if not any(hasattr(o, leaf + e) for o in owners for leaf in leaves for e in endings):
            break
    return tuple(constant.name.rpartition(".")[2] + e for e in endings)


def _users(session: Session) -> dict[str, set[str]]:
    """By constant: the names of the operators that read it or a view of it."""
    users: dict[str, set[str]] = {}
    for capture in session.captures.values():
        for node in capture.graph.nodes:
            alias = meta_of(node).get("alias", meta_of(node).get("pieces_of"))
            if alias is not None:
                users.setdefault(alias.constant, set()).update(
                    name_of_target(u.target)
                    for u in node.users if "alias" not in u.meta and "pieces_of" not in u.meta and u.op != "output")
    return users


def _why_unused(session: Session, constant: Constant, users: Mapping[str, set[str]]) -> str:
    if users.get(constant.name):
        return f"used by {', '.join(sorted(users[constant.name]))} only: no operator that multiplies by it"
    for path, reason in session.refusals.items():
        if not path or constant.module == path or constant.module.startswith(path + "."):
            return f"not seen in an operator ({path or 'the model'} stays Python: {reason})"
    return "the example does not reach it"
