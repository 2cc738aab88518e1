"""Random numbers of a model that is run on examples: the same at each run, and taken from generators of our own.

The generators of torch, Python and numpy belong to the whole process: other threads draw from them meanwhile.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Generators", "OwnDraws", "outside_draws", "own_draws", "seed_extremes", "state_of"]

SEEDED = torch.Tag.nondeterministic_seeded


class OwnDraws(TorchDispatchMode):
    """Operators that draw take their numbers from generators of this object's own, one a device; ``drew`` says if any did.

    Where the model seeds torch's generator, its own are seeded alike.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.drew = False
        self._generators: dict[torch.device, torch.Generator] = {}
        self._copies: dict[bytes, torch.Generator] = {}           # of those that the model passes, by their states
        self._told, self._seed = torch.initial_seed(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)`` with draws of our own."""
        if not isinstance(func, torch._ops.OpOverload) or SEEDED not in func.tags or func.namespace != "aten" \
                or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if torch.initial_seed() != self._told:
            self._told = self._seed = torch.initial_seed()
            self._generators.clear()
        device = torch.device(kwargs.get("device") or next((a.device for a in args if isinstance(a, Tensor)), "cpu"))
        if device.type == "meta":
            return func(*args, **kwargs)                     # no numbers
        drawing, given = _with_generator(func), kwargs.get("generator")
        if drawing is not None:
            self.drew = True
            return drawing(*args, **{**kwargs, "generator": self._generator(device) if given is None else self._apart(given)})
        if func._can_decompose() and torch._C.DispatchKey.CompositeImplicitAutograd not in func.py_kernels:      # into some that take one
            with self:
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            self.drew = True
            return _dropout(self._generator(device), *args)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):       # attention on a GPU, LSTM in inference mode
            self.drew = True
            torch.manual_seed(int(torch.randint(2**62, (), generator=self._generator(torch.device("cpu")))))
            return func(*args, **kwargs)

    def _apart(self, given: torch.Generator) -> torch.Generator:
        """A copy that goes on in the place of a generator that the model passes. (Operators see another object at each call, but we
        leave its state as it is, so that this tells which one it is.)"""
        state = given.get_state()
        if given.device.type == "cpu" and torch.equal(state, torch.get_rng_state()):
            return self._generator(given.device)
        return self._copies.setdefault(state.numpy().tobytes(), given.clone_state())

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _with_generator(func: Any) -> Any:
    """The overload with the same arguments and a generator; None if there is none."""
    names = [a.name for a in func._schema.arguments]
    if "generator" in names:
        return func
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        theirs = [a.name for a in other._schema.arguments]
        if "generator" in theirs and [n for n in theirs if n != "generator"] == names:
            return other
    return None


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is it an operator with dropout that drops nothing here?"""
    given = {a.name: kwargs.get(a.name, a.default_value) for a in func._schema.arguments}
    given.update(zip(given, args, strict=False))
    chances = [given[name] for name in ("dropout_p", "dropout", "p") if name in given and {"train", "dropout_p"} & {*given}]
    return func is torch.ops.aten._fused_sdp_choice.default or given.get("train") is False or (
        func is not torch.ops.aten.native_dropout.default and bool(chances) and not any(chances))


def _dropout(generator: torch.Generator, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """``aten.native_dropout`` (which takes no generator): what is kept, scaled, and the mask."""
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return (x * kept / (1 - p) if p < 1 else torch.zeros_like(x)), kept


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


class Generators:
    """The states of the generators that all code of a process draws from: Python's, numpy's and torch's."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), _numpy_state(), torch.get_rng_state()

    def numpy_moved(self) -> bool:
        now = _numpy_state()
        return now is not None and (self._numpy is None or now[2] != self._numpy[2] or bytes(now[1]) != bytes(self._numpy[1]))

    def put_back(self, outside: bool, torchs: bool) -> None:
        """Python's and numpy's (``outside`` of torch), and torch's, are as they were."""
        if torchs:
            torch.set_rng_state(self._torch)
        if outside:
            random.setstate(self._python)
            if self._numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def state_of(generator: Any) -> tuple[Any, Callable[[], None]] | None:
    """(its state to compare, what puts that back) of an object that draws random numbers; None for others."""
    numpy = sys.modules.get("numpy")
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
        return state, lambda: generator.setstate(state)
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        bits, state = generator.bit_generator, generator.bit_generator.state
        return repr(state), lambda: setattr(bits, "state", state)
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        state = generator.get_state()
        return (state[1].tobytes(), state[2:]), lambda: generator.set_state(state)
    return None


def seed_extremes() -> Iterator[None]:
    """Seeds Python and numpy, at each step, so that the first number of 0..1 that they draw is near 0, near 1, or neither."""
    numpy, seeds, before = sys.modules.get("numpy"), range(300), Generators()
    try:
        for pick in (min, max, lambda seeds, key: 7):
            random.seed(pick(seeds, key=lambda s: random.Random(s).random()))
            if numpy is not None:
                numpy.random.seed(pick(seeds, key=lambda s: numpy.random.RandomState(s).random_sample()))
            yield
    finally:
        before.put_back(outside=True, torchs=False)
