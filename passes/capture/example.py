"""The example inputs: running a model on them, and comparing two outputs."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..constants import storage_of
from ..failures import InputError
from ..structure import attributes_of
from .call import IMMUTABLE
from .draws import own_draws
from .listener import Listener
from .traced import quiet

__all__ = ["Example", "compare", "copied_input", "run", "tensors_in"]


@dataclasses.dataclass(frozen=True)
class Example:
    """Example inputs as ``model(*args, **kwargs)`` takes them. They are copied for each run: forward may change them.

    ``draws``: the model draws random numbers from torch's generators.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draws: bool = False

    @classmethod
    def of(cls, inputs: Any) -> Example:
        """A tensor is one positional argument, a tuple the positional arguments, a dict the keyword arguments."""
        if isinstance(inputs, dict) or (hasattr(inputs, "keys") and hasattr(inputs, "__getitem__")):
            if not all(isinstance(k, str) for k in inputs):
                raise InputError("example_inputs is a dict whose keys are not all strings; a dict gives keyword arguments by "
                                 "name. To pass one dict as a positional argument, write example_inputs=(the_dict,)")
            return cls((), {k: inputs[k] for k in inputs})
        if isinstance(inputs, (tuple, list)):
            return cls(tuple(inputs), {})
        return cls((inputs,), {})

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of one run; what cannot be copied is shared. Inputs that are one tensor, or see one memory, do so in the copies."""
        copies: dict[int, Any] = {}
        plain = {id(x): storage_of(x) for x in tree_leaves((self.args, self.kwargs)) if type(x) is Tensor and _is_plain(x) and x.numel()}
        shared = {storage for storage, number in collections.Counter(plain.values()).items() if number > 1}
        memories: dict[int, torch.UntypedStorage] = {}

        def copied(x: Any) -> Any:
            if id(x) not in copies:
                try:
                    if plain.get(id(x)) in shared:
                        memory = memories.setdefault(plain[id(x)], x.untyped_storage().clone())
                        copies[id(x)] = torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())
                    else:
                        copies[id(x)] = copied_input(x)
                except Exception:
                    copies[id(x)] = x
            return copies[id(x)]
        return tree_map(copied, self.args), tree_map(copied, self.kwargs)

    def other_sizes(self, fragile: bool = False) -> Iterator[list[tuple[str, Example]]]:
        """The same example at other sizes: of each list the first, or else (where the model does not take that) all of the others.
        Of a ``fragile`` model, which may crash where sizes do not fit, one row more alone.

        One row more, and one more entry along each size of its tensors, everywhere that size stands; one row alone. Sizes of 1 are grown
        only as the batch: elsewhere they are as a rule there to be broadcast.
        """
        tensors = [x for x in tree_leaves((self.args, self.kwargs)) if _is_plain(x)]
        rows = next((x.shape[0] for x in tensors if x.dim()), 0)
        offsets = {x.shape[0] for x in tensors if x.dim() == 1 and not x.is_floating_point()}          # positions into something else
        sizes = [n for n in dict.fromkeys(n for x in tensors for n in x.shape if n > 1) if n not in offsets][:MOST_SIZES]
        texts = [*(["one row more"] if rows else []), *(f"{n + 1} in the place of {n}" for n in sizes)]
        alone = [*([self._resized((), rows, _longer)] if rows else []), *(self._resized((n,), None, _longer) for n in sizes)]
        each = [(f"with {text}", other) for text, other in zip(texts, alone, strict=True)]
        if fragile:
            yield from [each[:1]] if rows else []
            return
        if len(each) > 1:
            yield [("with " + ", ".join(texts), self._resized(tuple(sizes), rows or None, _longer)), *each]
        elif each:
            yield each
        if rows > 1:
            yield [("with one row", self._resized((), rows, lambda x, d: x.narrow(d, 0, 1).clone()))]

    def _resized(self, sizes: tuple[int, ...], rows: int | None, change: Callable[[Tensor, int], Tensor]) -> Example:
        """With every dimension of one of these sizes, and every first one of ``rows``, changed."""
        def resized(x: Any) -> Any:
            for dim, size in enumerate(x.shape if _is_plain(x) else ()):
                if size in sizes or (size == rows and dim == 0):
                    x = change(x, dim)
            return x
        return dataclasses.replace(self, args=tree_map(resized, self.args), kwargs=tree_map(resized, self.kwargs))


def _longer(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x.narrow(dim, 0, 1)], dim)


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


MOST_SIZES = 6             # other sizes of one example that are tried


def copied_input(x: Any) -> Any:
    """A copy of one input that forward may change. Raises what ``copy.deepcopy`` does for an object that has none."""
    if type(x) in (Tensor, nn.Parameter):
        return x.detach().clone()
    if isinstance(x, (*IMMUTABLE, Tensor, nn.Module)):
        return x
    results = {id(t): t.detach().clone() for t in tensors_in(x) if t.grad_fn is not None}          # which deepcopy does not take
    return copy.deepcopy(x, results)                 # a cache object, say, that forward would fill


def run(model: nn.Module, example: Example) -> Any:
    """``model.forward`` on a copy of the example, without hooks of the root. It draws the same at each run, and leaves nothing behind
    outside of the model."""
    args, kwargs = example.fresh()
    with quiet(model), own_draws() if example.draws else contextlib.nullcontext():
        return Listener().aside(lambda: model.forward(*args, **kwargs))


def compare(want: Any, got: Any) -> str | None:
    """What differs between two outputs beyond float round-off; None if nothing does."""
    flat, spec = tree_flatten(want)
    flat_got, spec_got = tree_flatten(got)
    if type(want) is not type(got) or spec != spec_got:
        return f"it returns {type(got).__name__} with {len(flat_got)} leaves, not {type(want).__name__} with {len(flat)}"
    for a, b in zip(flat, flat_got, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return f"it returns {type(b).__name__} in the place of {type(a).__name__}"
        if not isinstance(a, Tensor):
            if type(a) is type(b) and not callable(a) and (parts := attributes_of(a)):
                inner = compare({k: v for k, v in parts.items() if not callable(v)},
                                {k: v for k, v in attributes_of(b).items() if not callable(v)})
                if inner is not None:
                    return inner
            if isinstance(a, (list, dict)) and type(a) is type(b):
                inner = compare(dict(a) if isinstance(a, dict) else list(a), dict(b) if isinstance(b, dict) else list(b))
                if inner is not None:
                    return inner
            elif isinstance(a, (bool, int, float, str)) and a != b and a == a:
                return f"it returns {b!r} in the place of {a!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"it returns {b.dtype} {tuple(b.shape)} in the place of {a.dtype} {tuple(a.shape)}"
        if a.layout is not torch.strided or not a.numel():
            continue
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return "its integer outputs differ"
            continue
        error = _distance(a, b)
        if not error <= TOLERANCE.get(a.dtype, 2e-2):
            return f"its output is off by {error:.1e}"
    return None


TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.complex64: 1e-4}


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative error; infinite where NaN, infinities or mask values (beyond 1e8, as in attention masks) are not the same."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    usual = a.abs() < 1e8
    same = (a == b) | (a.isnan() & b.isnan()) | (torch.isclose(a, b, rtol=1e-3, atol=0) & a.isfinite())
    if not bool((usual | same).all()):
        return float("inf")
    x, y = (torch.where(usual, t, 0).double() for t in (a, b))
    return float(((x - y).norm() / x.norm().clamp(min=1e-30)).item())


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of an output, also those in the attributes of objects that pytree does not know."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (nn.Module, type)):
            yield from tensors_in(list(attributes_of(leaf).values()), depth - 1)
            if isinstance(leaf, (list, tuple, dict)):                     # of a class that pytree does not know
                yield from tensors_in([*leaf.values()] if isinstance(leaf, dict) else [*leaf], depth - 1)
