"""Int8SymmetricTensor: an int8 weight as a tensor, for code that wants it outside of a graph.

    scale = max(|row|) / 127.5        codes = clamp(round(row / scale), -128, 127)        x @ w.T = (x @ codes.T) * scale

The numbers are those of the scheme int8_rowwise_full; `quantize_graph` takes such weights as they are, codes and all. What is
written to such a tensor is quantized, row by row where it changes; so is what is written to a view of it (``w[0]``), which is shown
as plain numbers. (Inside of ``torch.compile`` a view is a copy: write to the tensor itself there.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .errors import ModelError
from .ops.dequantize import dequantize
from .ops.linear import linear
from .schemes.int8_rowwise_full import int8_rowwise_full

__all__ = ["Int8SymmetricTensor"]

aten = torch.ops.aten


class Int8SymmetricTensor(torch.Tensor):
    """A matrix [out, in] held as int8 ``codes`` and a float32 ``scale`` [out, 1]; ``transposed``: it is seen as [in, out].

    linear, mm and addmm multiply with the codes; t, detach, clone and to keep them; any other operator dequantizes, and one that
    writes quantizes again the rows that it changed. Gradients flow to the other operand. Works under ``torch.compile``.

    >>> weight = Int8SymmetricTensor.from_float(torch.randn(64, 32))
    >>> weight.codes.dtype, weight.scale.shape, (torch.randn(2, 5, 32) @ weight.t()).shape
    (torch.int8, torch.Size([64, 1]), torch.Size([2, 5, 64]))
    """

    codes: Tensor
    scale: Tensor
    transposed: bool
    writes: list[int]                           # one number, how often the codes were written, for all that share them

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, transposed: bool = False) -> Any:
        shape = tuple(codes.shape)[::-1] if transposed else tuple(codes.shape)
        new = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device, requires_grad=False)
        new.codes, new.scale, new.transposed, new.writes = codes, scale, transposed, [0]
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

    def _write(self, values: Tensor) -> None:
        """Takes ``values`` on: rows whose largest number stays keep their scale, and numbers that stay in them their codes."""
        if values.shape != self.shape:
            raise ModelError(f"an Int8SymmetricTensor of {tuple(self.shape)} cannot become {tuple(values.shape)} in place")
        values, before = (t.t() if self.transposed else t for t in (values, self.dequantize()))
        if type(values) is Tensor and not values.isfinite().all():
            raise ModelError("NaN or infinity was to be written to an Int8SymmetricTensor, and no code stands for those")
        if not values.numel():
            return
        kept = values.abs().amax(1, keepdim=True) == before.abs().amax(1, keepdim=True)
        scale = torch.where(kept, self.scale, int8_rowwise_full.pack(values)["scale"])
        self._put(torch.where(kept & (values == before), self.codes, int8_rowwise_full.pack(values, scale)["codes"]), scale)

    def _put(self, codes: Tensor, scale: Tensor) -> None:
        self.codes.copy_(codes)
        self.scale.copy_(scale)
        self.writes[0] += 1

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.detach().dequantize()
        values[index] = value
        self.copy_(values)

    @property
    def data(self) -> Tensor:
        """The same codes, apart from autograd; what is assigned is quantized."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        new = values if isinstance(values, Int8SymmetricTensor) else Int8SymmetricTensor.from_float(values)
        torch.Tensor.data.__set__(self, new)
        self.codes, self.scale, self.transposed, self.writes = new.codes, new.scale, new.transposed, new.writes

    def _use_count(self) -> int:
        """How torch.utils.swap_tensors, by which Module.to converts a parameter, asks whether anything else refers to it.

        What an output saved for its backward keeps the old numbers, as it should: swapping takes them along. With gradients a count
        of 2 makes torch stop such a backward with an error; without them 1 is right (torch 2.13).
        """
        return min(super()._use_count(), 1 + self.requires_grad)        # type: ignore[misc]

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
        if (result := func.decompose(*args, **kwargs)) is not NotImplemented:   # in inference mode nothing else did before
            return result
        shown = {id(x): (x, x.dequantize().contiguous()) for x in tree_leaves((args, kwargs)) if isinstance(x, cls)}
        plain = tree_map(lambda x: shown[id(x)][1] if id(x) in shown else x, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if func._schema.is_mutable:
            for whole, values in (shown[id(x)] for x in _written(func, args, kwargs) if id(x) in shown):
                whole._write(values)
            whole_of = {id(values): whole for whole, values in shown.values()}
            return tree_map(lambda x: whole_of.get(id(x), x), result)
        for whole, values in shown.values() if func.is_view else ():
            result = tree_map(_Source(whole, values, whole.writes[0]).shown, result)
        return result

    def _like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Int8SymmetricTensor:
        return Int8SymmetricTensor(change(self.codes), change(self.scale), dtype or self.dtype, self.transposed)

    def _alias(self, transposed: bool | None = None) -> Int8SymmetricTensor:
        """The same codes again."""
        new = Int8SymmetricTensor(self.codes, self.scale, self.dtype, self.transposed if transposed is None else transposed)
        new.writes = self.writes
        return new


@dataclasses.dataclass
class _Source:
    """The numbers of a tensor for as long as views of them live; ``seen`` are its writes that they know."""

    whole: Int8SymmetricTensor
    values: Tensor
    seen: int

    def refresh(self) -> None:
        """Computes the numbers again if the tensor was written."""
        if self.seen != self.whole.writes[0]:
            self.values.copy_(self.whole.dequantize())
            self.seen = self.whole.writes[0]

    def keep(self) -> None:
        """Writes the numbers to the tensor. They themselves stay as they are, so that many writes round only once."""
        self.whole._write(self.values)
        self.seen = self.whole.writes[0]

    def shown(self, view: Any) -> Any:
        """A view of ``values``, so that writes to it are seen; anything else as it is."""
        if type(view) is not Tensor or view.layout is not torch.strided \
                or view.untyped_storage().data_ptr() != self.values.untyped_storage().data_ptr():
            return view
        new = view.as_subclass(_View)
        new.source = self
        return new


class _View(torch.Tensor):
    """What a view operator, such as select, shows of an `Int8SymmetricTensor`: plain numbers; what is written to them is kept."""

    source: _Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = {id(x): x for x in tree_leaves((args, kwargs or {})) if isinstance(x, cls)}
        with torch._C.DisableTorchFunctionSubclass():
            for x in views.values():
                x.source.refresh()
            plain = {i: x.as_subclass(Tensor) for i, x in views.items()}
            args, kwargs = tree_map(lambda x: plain.get(id(x), x), (args, kwargs or {}))
            before = [_version(x) for x in views.values()]
            result = func(*args, **kwargs)
            for x, version in zip(views.values(), before, strict=True):
                if version is None or version != _version(x):
                    x.source.keep()
            same = {id(plain[i]): x for i, x in views.items()}
            for x in views.values():
                result = tree_map(lambda r, x=x: same.get(id(r), x.source.shown(r)), result)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes."""
    schema = func._schema.arguments
    given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    return tree_leaves([given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write])


def _version(tensor: Tensor) -> int | None:
    """Changes with every write; None for a tensor of inference mode, which does not count them."""
    return None if tensor.is_inference() else tensor._version


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
        return w._alias()
    return w._alias(not w.transposed)


def _to_copy(w: Int8SymmetricTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    return w._like(lambda t: t.to(device, copy=True), dtype)


def _view(w: Int8SymmetricTensor, shape: Any) -> Any:
    same = [s if s != -1 else n for s, n in zip(shape, w.shape, strict=False)] == list(w.shape) and len(shape) == 2
    return w._alias() if same else NotImplemented


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not _is(target) or not _is(source) or target.shape != source.shape or target.transposed != source.transposed:
        return NotImplemented
    target._put(source.codes, source.scale)
    return target


def _empty_like(w: Int8SymmetricTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    return w._like(lambda t: torch.empty_like(t, device=device), dtype)


_RULES: dict[Any, Callable] = {
    aten.mm.default: _mm, aten.addmm.default: _addmm, aten.t.default: _transpose, aten.transpose.int: _transpose,
    aten.detach.default: Int8SymmetricTensor._alias, aten.alias.default: Int8SymmetricTensor._alias,
    aten.clone.default: lambda w, **_: w._like(lambda t: t.clone()), aten._to_copy.default: _to_copy, aten.view.default: _view,
    aten._unsafe_view.default: _view, aten.copy_.default: _copy,
    aten.empty_like.default: _empty_like,
}
torch.serialization.add_safe_globals([Int8SymmetricTensor])        # torch.load's safe default takes them
