"""A scheme is tried on two rows before it is let near a layer: what it gives must be what the `Scheme` protocol says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..failures import InroError, SchemeError
from ..scheme import Layout, Scheme

__all__ = ["StoredForm", "checked_parts", "examined"]

StoredForm = tuple[int, frozenset[str]]          # bytes of the parts, and which of them have one row for all


def examined(scheme: Scheme, layout: Layout, dtype: torch.dtype) -> StoredForm:
    """The form in which the scheme stores a matrix of this layout. Raises `SchemeError` with the first thing that is wrong with it."""
    try:
        return _examined(scheme, layout, dtype)
    except InroError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:160]
        raise SchemeError(f"the scheme {scheme.name} fails on a matrix of {layout.columns} columns "
                          f"({type(error).__name__}: {text})") from error


def _examined(scheme: Scheme, layout: Layout, dtype: torch.dtype) -> StoredForm:
    matrix = torch.linspace(-1, 1, 2 * layout.columns, dtype=torch.float32, device="cpu").reshape(2, layout.columns).to(dtype)
    parts = checked_parts(scheme, scheme.pack(matrix), 2)
    if any(part.device.type != "cpu" for part in parts.values()):
        raise SchemeError(f"the scheme {scheme.name} packs a matrix on the CPU to parts elsewhere")
    restored = scheme.unpack(parts, layout.columns, dtype)
    if not isinstance(restored, Tensor) or restored.shape != matrix.shape or restored.dtype != dtype:
        raise SchemeError(f"the scheme {scheme.name} unpacks {dtype} {tuple(matrix.shape)} to {_form(restored)}")
    bound = scheme.bound(matrix)
    if not isinstance(bound, Tensor) or not _fits(bound, matrix):
        raise SchemeError(f"the scheme {scheme.name} bounds the errors of {tuple(matrix.shape)} by {_form(bound)}")
    for name in ("linear", "embedding"):
        _try_operator(scheme, name, parts, layout, dtype)
    single = frozenset(name for name, part in parts.items() if part.shape[0] == 1)
    rows = {name: 1 if name in single else layout.rows for name in parts}
    return sum(p[0].numel() * p.element_size() * rows[name] for name, p in parts.items()), single


def _try_operator(scheme: Scheme, name: str, parts: Mapping[str, Tensor], layout: Layout, dtype: torch.dtype) -> None:
    found: Any = scheme.operator(name)
    if isinstance(found, str):
        return
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and isinstance(found[1], tuple)):
        raise SchemeError(f"the scheme {scheme.name} gives {type(found).__name__} as its operator for {name}: a function and a tuple of "
                          f"arguments, or the reason why there is none")
    function, trailing = found
    held = [parts[part] for part in scheme.parts]
    if name == "linear":
        result = function(torch.zeros(3, layout.columns, dtype=dtype, device="cpu"), *held, None, *trailing, layout.columns)
        wanted: tuple[int, ...] = (3, 2)
    else:
        result = function(torch.zeros(3, dtype=torch.long, device="cpu"), *held, *trailing, layout.columns, dtype)
        wanted = (3, layout.columns)
    if not isinstance(result, Tensor) or tuple(result.shape) != wanted:
        raise SchemeError(f"the operator of the scheme {scheme.name} for {name} gives {_form(result)} where {wanted} is due")


def checked_parts(scheme: Scheme, parts: Any, rows: int) -> dict[str, Tensor]:
    """The parts that a scheme made, if they are what its ``parts`` say: tensors with ``rows`` rows, or one."""
    if not isinstance(parts, Mapping) or set(parts) != set(scheme.parts):
        made = sorted(map(str, parts)) if isinstance(parts, Mapping) else type(parts).__name__
        raise SchemeError(f"the scheme {scheme.name} says that its parts are {', '.join(scheme.parts)}, and pack gives {made}")
    for name in scheme.parts:
        part = parts[name]
        if not isinstance(part, Tensor) or part.dim() < 1 or part.shape[0] not in (1, rows):
            raise SchemeError(f"the scheme {scheme.name} packs {rows} rows to {name} {_form(part)}: a part has that many rows, or one")
    return {name: parts[name] for name in scheme.parts}


def _fits(bound: Tensor, matrix: Tensor) -> bool:
    try:
        return bool(torch.broadcast_shapes(bound.shape, matrix.shape) == matrix.shape)
    except RuntimeError:
        return False


def _form(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
