"""Int8SymmetricTensor: an int8 weight as a tensor, for code that wants it outside of a graph.

    scale = max(|row|) / 127.5        codes = clamp(round(row / scale), -128, 127)        x @ w.T = (x @ codes.T) * scale

The numbers are those of the scheme int8_rowwise_full; `quantize_graph` takes such weights as they are, codes and all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import ModelError
from .ops.dequantize import dequantize
from .ops.linear import linear
from .schemes.int8_rowwise_full import int8_rowwise_full

__all__ = ["Int8SymmetricTensor"]

aten = torch.ops.aten


class Int8SymmetricTensor(torch.Tensor):
    """A matrix [out, in] held as int8 ``codes`` and a float32 ``scale`` [out, 1]; ``transposed``: it is seen as [in, out].

    linear, mm and addmm multiply with the codes; t, detach, clone and to keep them; any other operator dequantizes. Gradients
    flow to the other operand. Works under ``torch.compile``.

    >>> weight = Int8SymmetricTensor.from_float(torch.randn(64, 32))
    >>> weight.codes.dtype, weight.scale.shape, (torch.randn(2, 5, 32) @ weight.t()).shape
    (torch.int8, torch.Size([64, 1]), torch.Size([2, 5, 64]))
    """

    codes: Tensor
    scale: Tensor
    transposed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, transposed: bool = False) -> Any:
        shape = tuple(codes.shape)[::-1] if transposed else tuple(codes.shape)
        new = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device, requires_grad=False)
        new.codes, new.scale, new.transposed = codes, scale, transposed
        return new

    def __init__(self, *args: Any, **kwargs: Any):
        """Everything is in __new__."""

    @classmethod
    def from_float(cls, weight: Tensor) -> Int8SymmetricTensor:
        """The quantized form of a float matrix [out, in]. Raises `ModelError` for another rank or dtype."""
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ModelError(f"Int8SymmetricTensor holds a float matrix [out, in], not {weight.dtype} {tuple(weight.shape)}")
        parts = int8_rowwise_full.pack(weight.detach())
        return cls(parts["codes"], parts["scale"], weight.dtype)

    def dequantize(self) -> Tensor:
        """The plain float tensor, of this one's shape and dtype."""
        weight = dequantize(self.codes, self.scale, 8, 0, self.codes.shape[1], self.dtype)
        return weight.t() if self.transposed else weight

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Int8SymmetricTensor(shape={tuple(self.shape)}, dtype={self.dtype}, codes=int8, scale={tuple(self.scale.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.dtype, self.transposed)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Int8SymmetricTensor:
        return cls(inner["codes"], inner["scale"], *meta)

    def _stable_hash_for_caching(self) -> str:                     # torch's compiler asks for it
        return f"Int8SymmetricTensor {tuple(self.codes.shape)} {self.dtype} {self.transposed}"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and (result := rule(*args, **kwargs)) is not NotImplemented:
            return result
        plain = torch.utils._pytree.tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs))
        return func(*plain[0], **plain[1])

    def _like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Int8SymmetricTensor:
        return Int8SymmetricTensor(change(self.codes), change(self.scale), dtype or self.dtype, self.transposed)


def _is(value: Any) -> bool:
    return isinstance(value, Int8SymmetricTensor)


def _times(x: Tensor, w: Int8SymmetricTensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ w.T + bias, with w stored [out, in]."""
    return linear(x, w.codes, w.scale, bias, 8, 0, w.codes.shape[1])


def _mm(a: Any, b: Any) -> Any:
    if _is(b) and not _is(a):
        return _times(a, b) if b.transposed else NotImplemented
    if _is(a) and not _is(b):                                       # w @ y = (y.T @ w.T).T
        return NotImplemented if a.transposed else _times(b.t(), a).t()
    return NotImplemented


def _addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if _is(b) and b.transposed and not _is(a) and not _is(bias) and beta == 1 and alpha == 1 and bias.dim() == 1:
        return _times(a, b, bias)
    return NotImplemented


def _transpose(w: Int8SymmetricTensor, *dims: int) -> Any:
    if dims and {d % 2 for d in dims} != {0, 1}:
        return w._like(lambda t: t)
    return Int8SymmetricTensor(w.codes, w.scale, w.dtype, not w.transposed)


def _to_copy(w: Int8SymmetricTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    return w._like(lambda t: t.to(device) if device is not None else t.clone(), dtype)


def _view(w: Int8SymmetricTensor, shape: Any) -> Any:
    same = [s if s != -1 else n for s, n in zip(shape, w.shape, strict=False)] == list(w.shape) and len(shape) == 2
    return w._like(lambda t: t) if same else NotImplemented


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not _is(target):
        return NotImplemented
    if not _is(source):
        source = Int8SymmetricTensor.from_float(source.t() if target.transposed else source)
    if source.transposed != target.transposed:
        source = Int8SymmetricTensor.from_float(source.dequantize().t() if target.transposed else source.dequantize())
    if source.codes.shape != target.codes.shape:
        raise ModelError(f"codes of {tuple(source.codes.shape)} do not fit {tuple(target.codes.shape)}")
    target.codes.copy_(source.codes)
    target.scale.copy_(source.scale)
    return target


_RULES: dict[Any, Callable] = {
    aten.mm.default: _mm, aten.addmm.default: _addmm, aten.t.default: _transpose, aten.transpose.int: _transpose,
    aten.detach.default: lambda w: w._like(lambda t: t.detach()), aten.alias.default: lambda w: w._like(lambda t: t),
    aten.clone.default: lambda w, **_: w._like(lambda t: t.clone()), aten._to_copy.default: _to_copy, aten.view.default: _view,
    aten._unsafe_view.default: _view, aten.copy_.default: _copy,
    aten.empty_like.default: lambda w, **_: w._like(torch.empty_like),
    aten.zeros_like.default: lambda w, **_: w._like(torch.zeros_like),
}
torch.serialization.add_safe_globals([Int8SymmetricTensor])        # torch.load's safe default takes them
