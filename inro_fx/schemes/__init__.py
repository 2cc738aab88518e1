"""Number formats. One file per scheme, one line in `SCHEMES` (or `GROUPS`: few bits, for solvers and budgets) to give it a name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SchemeError
from ..passes.scheme import Scheme
from .affine import Affine, int4_affine
from .groups import int2_g32, int3_g32, int4_g32, int5_g32, int6_g32
from .int4 import int4
from .int8 import int8
from .int8_dynamic import Int8Dynamic, int8_dynamic
from .int8_rowwise_full import int8_rowwise_full
from .int8_static import Int8Static, int8_static, static
from .int8_tensor import int8_tensor
from .uniform import Uniform, uniform

__all__ = ["GROUPS", "SCHEMES", "Affine", "Int8Dynamic", "Int8Static", "Scheme", "Uniform", "describe_scheme", "find_scheme",
           "read_scheme", "static", "uniform"]

SCHEMES: tuple[Scheme, ...] = (int8, int8_tensor, int8_dynamic, int8_static, int8_rowwise_full, int4)


GROUPS: tuple[Scheme, ...] = (int2_g32, int3_g32, int4_g32, int5_g32, int6_g32)          # what a budget chooses among
_CLASSES = {c.__name__: c for c in (Uniform, Int8Dynamic, Int8Static, Affine)}


def describe_scheme(scheme: Scheme) -> dict[str, Any]:
    """A scheme as plain data: all of its numbers if it is of this package, its name if it is somebody's own."""
    if isinstance(scheme, Uniform) and type(scheme) in _CLASSES.values():
        return {"kind": type(scheme).__name__, **dataclasses.asdict(scheme)}
    return {"name": scheme.name}


def read_scheme(description: Mapping[str, Any], given: Sequence[Scheme]) -> Scheme:
    """The inverse of `describe_scheme`. Raises `SchemeError` where somebody's own scheme is not among ``given``, and ValueError or
    TypeError for a description that is none."""
    name = description["name"]
    own = next((s for s in given if s.name == name), None)
    if own is not None:
        return own
    if "kind" not in description:
        if name not in [s.name for s in (*SCHEMES, *GROUPS, int4_affine)]:
            raise SchemeError(f"the file needs the scheme {ascii(name)[:80]}, which is somebody's own: "
                              f"give it to load, schemes=[that_scheme]")
        return find_scheme(name)
    kind = _CLASSES.get(description["kind"]) if isinstance(description["kind"], str) else None
    if kind is None:
        raise ValueError("a scheme of an unknown kind")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items() if k != "kind"}
    if set(values) != set(fields):
        raise ValueError("a scheme with other numbers than its kind has")
    for field, value in values.items():
        if type(value) not in _TYPES[field]:
            raise TypeError(f"a scheme whose {field} is a {type(value).__name__}")
    made: Scheme = kind(**values)
    if values["parts"] != fields["parts"].default or not values["name"].isprintable():
        raise ValueError("a scheme with other parts, or a name that cannot be printed")
    return made


_NUMBER = (int, float, type(None))
_TYPES: Mapping[str, tuple[type, ...]] = {
    "name": (str,), "quant_max": (int,), "granularity": (str, int), "low": (int, type(None)), "divisor": _NUMBER, "parts": (tuple,),
    "full_range": (bool,), "scale_dtype": (str,), "observer": (str,), "symmetric": (bool,), "low_input": _NUMBER, "high_input": _NUMBER}


def find_scheme(scheme: str | Scheme, known: Sequence[Scheme] = (*SCHEMES, *GROUPS, int4_affine)) -> Scheme:
    """The scheme of that name, or the object itself.

    Raises `SchemeError` with the nearest name for an unknown one, and for an object that is no scheme.
    """
    if isinstance(scheme, str):
        names = [s.name for s in known]
        if scheme in names:
            return known[names.index(scheme)]
        near = difflib.get_close_matches(scheme, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SchemeError(f"unknown scheme {scheme!r}: {hint}the schemes are {', '.join(names)}, "
                          f"and inro_fx.uniform(quant_max) for any other number of steps")
    missing = [m for m in ("name", "parts", "pack", "unpack", "bound", "operator") if not hasattr(scheme, m)]
    if missing:
        raise SchemeError(f"{type(scheme).__name__} is no scheme: it lacks {', '.join(missing)} (see docs/add-a-scheme.md)")
    if not isinstance(scheme.name, str) or not scheme.name.isprintable():
        raise SchemeError(f"{type(scheme).__name__} is no scheme: its name is {scheme.name!r}")
    parts = scheme.parts
    named = isinstance(parts, tuple) and bool(parts) and all(isinstance(p, str) and p.isidentifier() for p in parts)
    if not named or len(set(parts)) < len(parts):
        raise SchemeError(f"the scheme {scheme.name} has parts {parts!r}: a tuple of different names, such as ('codes', 'scale')")
    for member in ("pack", "unpack", "bound", "operator"):
        if not callable(getattr(scheme, member)):
            raise SchemeError(f"the scheme {scheme.name} has no function {member}")
    return scheme
