"""Random numbers of a model that is run on examples: the same at each run, and taken from generators of our own.

The generators of torch, Python and numpy belong to the whole process: other threads draw from them meanwhile.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OwnDraws", "kept_outside_draws", "numpy_state", "outside_draws", "own_draws", "seed_extremes"]

SEEDED = torch.Tag.nondeterministic_seeded


class OwnDraws(TorchDispatchMode):
    """Operators that draw take their numbers from a generator of this object's own; ``drew`` says if any did.

    Where the model seeds torch's generator, the own one is seeded alike.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.drew = torch.Generator().manual_seed(0), False
        self.seed = torch.initial_seed()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)`` with draws of our own."""
        if not isinstance(func, torch._ops.OpOverload) or SEEDED not in func.tags or func.namespace != "aten":
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if torch.initial_seed() != self.seed:
            self.seed = torch.initial_seed()
            self.generator.manual_seed(self.seed)
        drawing = self._with_generator(func)
        if drawing is not None and not any(getattr(a, "is_cuda", False) for a in args) \
                and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            self.drew = True
            return drawing(*args, **{**kwargs, "generator": self.generator})
        with torch.random.fork_rng(devices=[]):              # no operator of that name takes a generator
            before = self.generator.get_state()
            torch.random.default_generator.set_state(before)
            result = func(*args, **kwargs)
            after = torch.random.default_generator.get_state()
            self.drew = self.drew or not torch.equal(before, after)              # attention without dropout draws nothing
            self.generator.set_state(after)
        return result

    @staticmethod
    def _with_generator(func: Any) -> Any:
        """The overload with the same arguments and a generator."""
        names = [a.name for a in func._schema.arguments]
        if "generator" in names:
            return func
        for overload in func.overloadpacket.overloads():
            other = getattr(func.overloadpacket, overload)
            theirs = [a.name for a in other._schema.arguments]
            if "generator" in theirs and [n for n in theirs if n != "generator"] == names:
                return other
        return None


def own_draws() -> OwnDraws:
    """A context in which a model draws what it draws at each run, and moves nobody's generator."""
    return OwnDraws()


# ---- Python's and numpy's generators: who draws from them is heard, and only then they are put back ----

def outside_draws(function: Any) -> bool:
    """Is this C function, which is about to be called, a draw from Python's or numpy's global generator?"""
    owner = getattr(function, "__self__", None)
    if type(owner) is random.Random:
        return owner is getattr(random.random, "__self__", None) and function.__name__ in ("random", "getrandbits")
    numpy = sys.modules.get("numpy")
    return numpy is not None and owner is not None and owner is getattr(numpy.random, "mtrand", numpy.random)._rand


def numpy_state() -> Any:
    """Of numpy's global generator, comparable."""
    numpy = sys.modules.get("numpy")
    kind, keys, position, *_ = ("", b"", 0) if numpy is None else numpy.random.get_state()
    return kind, bytes(keys), position


@contextlib.contextmanager
def kept_outside_draws(drew: Callable[[], bool], seeded: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Python's and numpy's generators are afterwards as before, if what ran inside ``drew`` from them; torch's, if that ``seeded`` it."""
    torch_state = torch.get_rng_state()
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        if seeded():
            torch.set_rng_state(torch_state)
        if drew():
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def seed_extremes() -> Iterator[None]:
    """Seeds Python and numpy, at each step, so that the first number of 0..1 that they draw is near 0, near 1, or neither."""
    numpy, seeds = sys.modules.get("numpy"), range(300)
    for pick in (min, max, lambda seeds, key: 7):
        random.seed(pick(seeds, key=lambda s: random.Random(s).random()))
        if numpy is not None:
            numpy.random.seed(pick(seeds, key=lambda s: numpy.random.RandomState(s).random_sample()))
        yield
