"""The manifest of a saved model: data of a fixed schema, checked before anything is built of it.

No field names a class, a function or an attribute that is looked up: module paths and tensor names are compared with those of the
architecture that `load` is given, dtypes and schemes with short tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import FileError
from .passes.capture.clone import attributes
from .passes.run.classes import user_class
from .report import Record, Row, Skipped

__all__ = ["DTYPES", "FORMAT_VERSION", "Entry", "Manifest", "checked", "differences", "fingerprint_of", "record_of", "shown"]

FORMAT_VERSION = 2
DTYPES: Mapping[str, torch.dtype] = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)}
KINDS = ("parameter", "frozen", "buffer", "non_persistent", "attribute")          # frozen: a parameter without gradient
MOST = 1 << 20             # entries of a list, and characters of a string


@dataclasses.dataclass
class Entry:
    """One tensor of a file: ``kind`` says what it is on its module, ``names`` are all its names, the first is the file's."""

    kind: str
    names: list[str]
    dtype: str
    shape: list[int]
    crc32: int


@dataclasses.dataclass
class Manifest:
    """``weights`` has an entry for each name of a weight that is held as codes, ``fingerprint`` what the graphs depended on."""

    format_version: int
    inro_fx: str
    torch: str
    model: str
    weights: list[dict[str, Any]]
    schemes: list[dict[str, Any]]
    tensors: dict[str, dict[str, Any]]
    fingerprint: dict[str, list[Any]]
    strict: bool
    records: dict[str, dict[str, Any]]


# ---- the schema: each check returns what is wrong, or None ----

Check = Callable[[Any], "str | None"]


def shown(value: Any) -> str:
    """A name or value of a file as a message may show it: one short line without escapes."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is(what: str, holds: Callable[[Any], bool]) -> Check:
    return lambda value: None if holds(value) else f"is {shown(value)} ({type(value).__name__}), not {what}"


def _some(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _list(check: Check) -> Check:
    def every(value: Any) -> str | None:
        if type(value) is not list or len(value) > MOST:
            return f"is a {type(value).__name__}, not a list"
        return next((f"[{i}] {wrong}" for i, v in enumerate(value) if (wrong := check(v)) is not None), None)
    return every


def _table(check: Check) -> Check:
    def every(value: Any) -> str | None:
        if type(value) is not dict or len(value) > MOST:
            return f"is a {type(value).__name__}, not a table"
        return next((f"of {shown(k)} {wrong}" for k, v in value.items() if (wrong := (text(k) or check(v))) is not None), None)
    return every


def _record(**fields: Check) -> Check:
    def every(value: Any) -> str | None:
        if type(value) is not dict:
            return f"is a {type(value).__name__}, not a record"
        lacking, unknown = sorted(set(fields) - set(value)), sorted(set(value) - set(fields))
        if lacking or unknown:
            return f"lacks {lacking[0]}" if lacking else f"has an unknown field {shown(unknown[0])}"
        return next((f"has a field {k} that {wrong}" for k, c in fields.items() if (wrong := c(value[k])) is not None), None)
    return every


def _pair(*checks: Check) -> Check:
    return lambda value: (f"is a {type(value).__name__}, not {len(checks)} values" if type(value) is not list or len(value) != len(checks)
                          else next((wrong for v, c in zip(value, checks, strict=True) if (wrong := c(v)) is not None), None))


text = _is("a text", lambda v: type(v) is str and len(v) <= MOST)
flag = _is("true or false", lambda v: type(v) is bool)
size = _is("a size", lambda v: type(v) is int and 0 <= v < 2**62)
checksum = _is("a checksum", lambda v: type(v) is int and 0 <= v < 2**32)
number = _is("a number", lambda v: type(v) is float or (type(v) is int and abs(v) < 2**1023))
maybe = _some(number)
shape = _list(size)
names = _list(text)

ROW = _record(layer=text, op=text, shape=shape, scheme=text, scale_min=maybe, scale_mean=maybe, scale_max=maybe, weight_error=number,
              weight_sqnr=number, weight_max=number, isolated=maybe, propagated=maybe, float_bytes=size, quantized_bytes=size, kernel=text,
              note=text, entropy=maybe, observer=text, clipped=maybe, count=size, weight=text, share=maybe, solver=text)
SCHEMA = _record(
    format_version=size, inro_fx=text, torch=text, model=text, strict=flag,
    weights=_list(_record(module=text, name=text, buffers=names, holder=text, stored=names, scheme=size, shape=shape, view=shape,
                          channels=shape, reduced=shape, dtype=_is("a dtype", lambda v: type(v) is str and v in DTYPES))),
    schemes=_list(_is("a scheme", lambda v: type(v) is dict and type(v.get("name")) is str and all(
        type(k) is str and type(x) in (str, int, float, bool, type(None), list) for k, x in v.items()))),
    tensors=_table(_record(kind=_is("a kind of tensor", lambda v: type(v) is str and v in KINDS), names=names, shape=shape, crc32=checksum,
                           dtype=_is("a dtype", lambda v: type(v) is str and v in DTYPES))),
    fingerprint=_table(_pair(text, _table(text))),
    records=_table(_record(
        rows=_list(ROW), skipped=_list(_record(layer=text, shape=shape, reason=text, float_bytes=size)), steps=_list(_pair(text, text)),
        regions=_list(_pair(text, text)), nodes=size, guards=names, output_error=number, float_bytes=size,
        errors=_list(_pair(text, text, maybe)), unshared=text, equalized=flag)))


def checked(data: Any, file: str, version: str) -> Manifest:
    """The manifest of a file. Raises `FileError` for another version, and naming the first thing that is not of the schema."""
    found = data.get("format_version") if isinstance(data, dict) else None
    if type(found) is int and found == 1:
        raise FileError(f"{file} has format 1, of inro_fx {shown(str(data.get('inro_fx')))}, which held graphs and is not read any more: "
                        f"quantize the model again and save it with inro_fx {version}")
    if type(found) is int and found > FORMAT_VERSION:
        raise FileError(f"{file} has format {shown(found)}, and this inro_fx {version} reads format {FORMAT_VERSION}: install a newer "
                        f"inro_fx")
    wrong = SCHEMA(data)
    if wrong is None and found != FORMAT_VERSION:
        wrong = f"has a format_version {found}"
    if wrong is not None:
        raise FileError(f"{file}: its manifest makes no sense: it {wrong}")
    return Manifest(**data)


def record_of(data: Mapping[str, Any]) -> Record:
    """The record of a report, of checked data."""
    return Record(**{**data, "rows": [Row(**{**row, "shape": tuple(row["shape"])}) for row in data["rows"]],
                     "skipped": [Skipped(**{**skip, "shape": tuple(skip["shape"])}) for skip in data["skipped"]],
                     "steps": [tuple(s) for s in data["steps"]], "regions": [tuple(r) for r in data["regions"]],
                     "errors": {(path, node): error for path, node, error in data["errors"]}})


# ---- what the graphs depended on ----

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def fingerprint_of(model: nn.Module) -> dict[str, list[Any]]:
    """By module path: its class, and its plain attributes as texts."""
    found: dict[str, list[Any]] = {}
    for path, module in model.named_modules():
        user = user_class(module)
        plain = {name: described for name, value in attributes(module).items()
                 if name != "training" and (described := _described(value)) is not None}
        found[path] = [f"{user.__module__}.{user.__qualname__}", plain]
    return found


def _described(value: Any, depth: int = 3) -> str | None:
    """A value that is plain data, as a text; None for any other."""
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if type(value) in PLAIN or isinstance(value, (torch.dtype, torch.Size)):
        return repr(value)
    if type(value) in (list, tuple) and depth and len(value) <= 64:
        items = [_described(v, depth - 1) for v in value]
        return None if None in items else f"{type(value).__name__}({', '.join(map(str, items))})"
    if type(value) is dict and depth and len(value) <= 64:
        pairs = {str(k): _described(v, depth - 1) for k, v in value.items()}
        return f"dict({', '.join(f'{k}={v}' for k, v in pairs.items())})"
    return None


def differences(model: nn.Module, fingerprint: Mapping[str, list[Any]]) -> list[str]:
    """What differs between an architecture and the model that was saved, in words."""
    here = fingerprint_of(model)
    found = []
    for path in here.keys() & fingerprint.keys():
        (kind, plain), (theirs, then) = here[path], fingerprint[path]
        where = shown(path) if path else "the model"
        if kind != theirs:
            found.append(f"{where} is a {kind.rpartition('.')[2]}, and was a {shown(theirs).rpartition('.')[2]}")
        found += [f"{where}.{shown(name)} is {shown(plain.get(name, 'not there'))}, and was {shown(then.get(name, 'not there'))}"
                  for name in sorted({*plain, *then}) if plain.get(name) != then.get(name)]
    return sorted(found)


