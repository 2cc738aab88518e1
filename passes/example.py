"""The example inputs: running a model on them, without a trace in random state, and comparing two outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .call import IMMUTABLE, attributes_of
from .failures import InputError

__all__ = ["Example", "compare", "kept_random_state", "random_state", "run", "seed_extremes", "tensors_in"]


@dataclasses.dataclass(frozen=True)
class Example:
    """Example inputs as ``model(*args, **kwargs)`` takes them. They are copied for each run: forward may change them."""

    args: tuple
    kwargs: dict[str, Any]

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

    def fresh(self) -> tuple[tuple, dict]:
        def copied(x: Any) -> Any:
            if type(x) in (Tensor, nn.Parameter):
                return x.detach().clone()
            if isinstance(x, (*IMMUTABLE, Tensor, nn.Module)):
                return x
            try:
                return copy.deepcopy(x)                  # a cache object, say, that forward would fill
            except Exception:
                return x
        return tree_map(copied, (self.args, self.kwargs))

    def one_row_more(self) -> Example | None:
        """The same example with one more row in every tensor that has as many rows as the first; None if there is none."""
        def is_plain(x: Any) -> bool:
            return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested
        rows = next((x.shape[0] for x in tree_leaves((self.args, self.kwargs)) if is_plain(x) and x.dim()), 0)
        if not rows:
            return None

        def grow(x: Any) -> Any:
            return torch.cat([x, x[:1]]) if is_plain(x) and x.dim() and x.shape[0] == rows else x
        return Example(*tree_map(grow, (self.args, self.kwargs)))


def run(model: nn.Module, example: Example) -> Any:
    """``model.forward`` on a copy of the example, without hooks of the root, with a fixed seed and no trace left in RNG."""
    args, kwargs = example.fresh()
    torch.manual_seed(0)
    return model.forward(*args, **kwargs)


def random_state() -> tuple:
    """Of Python and numpy (torch's own random numbers are nodes of a graph)."""
    numpy = sys.modules.get("numpy")
    kind, keys, position, *_ = ("", b"", 0) if numpy is None else numpy.random.get_state()
    return random.getstate(), kind, bytes(keys), position


def seed_extremes() -> Iterator[None]:
    """Seeds Python and numpy, at each step, so that the first number of 0..1 that they draw is near 0, near 1, or neither."""
    numpy, seeds = sys.modules.get("numpy"), range(300)
    for pick in (min, max, lambda seeds, key: 7):
        random.seed(pick(seeds, key=lambda s: random.Random(s).random()))
        if numpy is not None:
            numpy.random.seed(pick(seeds, key=lambda s: numpy.random.RandomState(s).random_sample()))
        yield


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Everything inside may seed and draw; afterwards the random state of torch (every device), Python and numpy is as before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(state)
    if numpy is not None:
        numpy.random.set_state(numpy_state)


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
    return ((x - y).norm() / x.norm().clamp(min=1e-30)).item()


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of an output, also those in the attributes of objects that pytree does not know."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (nn.Module, type)):
            yield from tensors_in(list(attributes_of(leaf).values()), depth - 1)
            if isinstance(leaf, (list, tuple, dict)):                     # of a class that pytree does not know
                yield from tensors_in([*leaf.values()] if isinstance(leaf, dict) else [*leaf], depth - 1)
