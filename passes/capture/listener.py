"""What traced code asks of Python itself, where no proxy is asked: heard through ``sys.setprofile``, which is this thread's alone.

    type(n) is int              the code is read: a traced value's type is no answer, so the module stays Python
    x is y, id(x)               a fact about the call: which inputs are the same object
    torch.compiler.is_compiling()           a setting: the graph holds while it gives the same answer
    torch.manual_seed(0), MyFunction.apply(x), random.random()         a reason why the module stays Python

The calls that torch's own code makes are its own affair.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .bytecode import questions_of, tries_of
from .clone import reachable
from .draws import Generators, outside_draws, state_of
from .frames import INTERNAL, OWN

__all__ = ["SETTINGS", "Listener", "deaf", "unheard"]

SETTINGS: Mapping[str, Callable[[], Any]] = {          # a graph holds while these answer as they did
    "torch.compiler.is_compiling": torch.compiler.is_compiling,
    "torch.compiler.is_exporting": torch.compiler.is_exporting,
    "torch.onnx.is_in_onnx_export": torch.onnx.is_in_onnx_export,
    "torch.jit.is_tracing": torch.jit.is_tracing,
    "torch.get_default_dtype": torch.get_default_dtype,
    "torch.is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "torch.is_grad_enabled": torch.is_grad_enabled,
}
SPELLINGS: Mapping[Any, str] = {
    torch.compiler.is_dynamo_compiling: "torch.compiler.is_compiling",
    torch._C._is_tracing: "torch.jit.is_tracing"}
REFUSED: Mapping[Any, str] = {
    torch.manual_seed: "calls torch.manual_seed", torch.get_rng_state: "calls torch.get_rng_state",
    torch._C._is_alias_of: "asks whether tensors share memory", torch.set_rng_state: "calls torch.set_rng_state",
    torch.seed: "calls torch.seed", torch.initial_seed: "calls torch.initial_seed",
    torch.cond: "calls torch.cond, whose branches are code of their own",
    torch.set_default_dtype: "calls torch.set_default_dtype",
    torch.inference_mode.__enter__: "uses torch.inference_mode",
    torch.autograd.Function.apply.__func__: "calls a torch.autograd.Function"}


def _by_code(table: Mapping[Any, str]) -> dict[Any, str]:
    """The table by code object, which is what a call of a Python function shows; functions of C stay as they are."""
    return {getattr(inspect.unwrap(f), "__code__", f): text for f, text in table.items()}


CHEAP = sys.version_info < (3, 12)         # is it to switch the profile function off and on? Later ones instrument all code again
_SETTING_OF = {**_by_code({f: name for name, f in SETTINGS.items() if f is not torch.is_grad_enabled}), **_by_code(SPELLINGS)}
_REFUSAL_OF = _by_code(REFUSED)


class Listener:
    """While it hears, calls of this thread are seen: ``settings`` that were asked for, ``facts`` about inputs, a ``refusal``."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.facts: set[str] = set()
        self.refusal: str | None = None
        self.drew = False                       # from Python's or numpy's generators
        self.may_draw = False                   # from numpy's generator, whose methods make no event: the code can reach it
        self.seeded = False                     # torch's generator
        self.suppressing = 0                    # how many blocks of contextlib.suppress it is in
        self.catching = False                   # does any of the code catch exceptions?
        self.calling = ""                       # the function of C that was called last
        self.reached: list[tuple[str, Any]] = []             # globals and closures that the code names: (name, value's holder)
        self._closures: dict[int, tuple[str, Any]] = {}      # closures by id; those of calls that are over die with these
        self._notes: list[tuple[str, Any, Any]] = []         # (name, container or the names that it is among, what was in it)
        self._drawn_from: list[tuple[str, Any, Any, Callable[[], None]]] = []       # (name, generator, its state, what puts it back)
        self._known: dict[types.CodeType, bool] = {}        # code -> is it torch's or ours?
        self._generators = Generators()
        self._collecting: set[Any] = set()      # the code of callbacks of Python's garbage collector, which runs at any moment
        self._aside: types.FrameType | None = None             # such a callback, while it runs

    def hear(self, work: Callable[[], Any]) -> Any:
        """The result of ``work``, during which this listens. (No context manager: an interrupt at the call of its exit would leave the
        profile function of the thread for ever.)"""
        self._collecting = {getattr(getattr(f, "__func__", f), "__code__", None) for f in gc.callbacks}
        before = sys.getprofile()
        try:
            sys.setprofile(self._hear)
            return work()
        finally:
            sys.setprofile(before)
            self.drew = self.drew or (self.may_draw and self._generators.numpy_moved())

    def aside(self, work: Callable[[], Any]) -> Any:
        """The same for a run of our own, which leaves nothing behind outside of the model."""
        try:
            result = self.hear(work)
            self.settle(reachable([result]))
            return result
        finally:
            self.put_back()

    def take_refusal(self) -> str | None:
        """The first thing heard that no graph can say, once."""
        refusal, self.refusal = self.refusal, None
        return refusal

    def _hear(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if self._aside is not None:
            if event == "return" and frame is self._aside:
                self._aside = None
        elif event == "call":
            code = frame.f_code
            if code in self._collecting:
                self._aside = frame
                return
            internal = self._known.get(code)
            if internal is None:
                internal = self._known[code] = code.co_filename.startswith(INTERNAL)
                if not internal and not _is_standard(code):
                    self._read(code, frame.f_globals)
                    self._reach(frame)
            if internal and (code in _SETTING_OF or code in _REFUSAL_OF):
                self._heard(code, frame.f_back)
            if code in SUPPRESS:
                self.suppressing += SUPPRESS[code]
        elif event == "c_call":
            if not frame.f_code.co_filename.startswith(OWN):
                self.calling = getattr(argument, "__name__", "")
            if argument in _C_FUNCTIONS:
                self._heard(argument, frame)
            elif outside_draws(argument):
                self.drew = True

    def _reach(self, frame: types.FrameType) -> None:
        """Notes what code can reach beside its arguments."""
        code, names = frame.f_code, frame.f_globals
        self.reached += [(name, names[name]) for name in code.co_names if name in names]
        for name in code.co_names:
            if name in names:
                self._note(name, names[name], names)
        numpy = sys.modules.get("numpy")
        if numpy is not None and not self.may_draw:
            reachable = [names[n] for n in code.co_names if n in names] + [frame.f_locals.get(n) for n in code.co_freevars]
            self.may_draw = any(v is numpy.random or (v is numpy and "random" in code.co_names)
                                or getattr(v, "__self__", None) is numpy.random.mtrand._rand for v in reachable)
        for name in code.co_freevars:
            self._note(name, frame.f_locals.get(name), None)
        for name in code.co_freevars:
            if name in frame.f_locals:
                self._closures.setdefault(id(frame.f_locals[name]), (name, frame.f_locals[name]))

    def settle(self, result: Iterable[Any] = ()) -> None:
        """After the code has run: forgets what only its own calls could reach, such as the arguments of a decorator's wrapper, and
        what is among the values that it gave back."""
        given = {id(value) for value in result}
        noted = {id(held) for _, held, _ in self._notes}
        for key in list(self._closures):
            name, value = self._closures.pop(key)
            if key not in given and sys.getrefcount(value) > 2 + (key in noted):          # this variable, and the argument
                self.reached.append((name, value))
            else:
                self._notes = [note for note in self._notes if note[1] is not value]

    def _note(self, name: str, value: Any, names: dict[str, Any] | None, depth: int = 3) -> None:
        """Remembers what is in a list, dict or set that code can reach, the number that a global is, the state of a random generator."""
        if any(held is value for _, held, _ in self._notes):
            return
        if type(value) in (list, dict, set) and len(value) < 10_000:
            self._notes.append((name, value, value.copy()))
            for inner in (value.values() if type(value) is dict else value) if depth and len(value) <= 100 else ():
                if type(inner) in (list, dict, set):
                    self._note(name, inner, None, depth - 1)
        elif names is not None and type(value) in (int, float, bool, str):
            self._notes.append((name, names, value))
        elif (state := state_of(value)) is not None:
            self._drawn_from.append((name, value, *state))

    def changed(self) -> str | None:
        """The first thing outside of the model that the code has changed."""
        changed = (name for name, held, before in self._notes if _differs(name, held, before))
        drawn = (name for name, generator, before, _ in self._drawn_from if not _same_state(generator, before))
        return next(itertools.chain(changed, drawn), None)

    def put_back(self) -> None:
        """Undoes such changes, and draws: runs of our own are nobody's."""
        self._generators.put_back(outside=self.drew, torchs=self.seeded)
        for _, generator, before, put in self._drawn_from:
            if not _same_state(generator, before):
                put()
        for name, held, before in self._notes:
            if not _differs(name, held, before):
                continue
            if isinstance(held, dict) and not isinstance(before, dict):
                held[name] = before
            elif isinstance(held, list):
                held[:] = before
            else:
                held.clear()
                held.update(before)

    def _heard(self, function: Any, caller: types.FrameType | None) -> None:
        while caller is not None and caller.f_code.co_filename.startswith(WRAPPERS):
            caller = caller.f_back                                     # of decorated functions
        if caller is None or caller.f_code.co_filename.startswith(INTERNAL) or _is_standard(caller.f_code):
            return
        if function is id:
            self.facts.add("identity")
        elif function in _SETTING_OF:
            name = _SETTING_OF[function]
            self.settings.setdefault(name, SETTINGS[name]())
        else:
            self.seeded = self.seeded or "seed" in _REFUSAL_OF[function] or "rng" in _REFUSAL_OF[function]
            self.refusal = self.refusal or f"{_REFUSAL_OF[function]} at {place(caller)}"

    def _read(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """What the code of a function that runs may ask of a value without calling anything; ``names``: its globals."""
        asked = questions_of(code)
        self.facts |= asked & {"identity", "dtype", "device"}
        if any(_may_be_tensor(question.partition(" of ")[2], names) for question in asked if " of " in question):
            self.facts.add("identity")
        self.catching = self.catching or bool(tries_of(code))
        if "type" in asked:
            self.refusal = self.refusal or f"compares the type of a value in {code.co_name}"


    def caught(self) -> bool:
        """Would the code catch what is raised now?"""
        if self.suppressing:
            return True
        frame: Any = sys._getframe(1) if self.catching else None
        while frame is not None and frame.f_code is not Listener.hear.__code__:
            if self._known.get(frame.f_code) is False and any(start <= frame.f_lasti < end for start, end in tries_of(frame.f_code)):
                return True
            frame = frame.f_back
        return False


def unheard(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, of an object with a ``listener``, in which functions of torch are its own, and not the traced code's."""
    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        calling, before = self.listener.calling, sys.getprofile() if CHEAP else None
        if before is not None:
            sys.setprofile(None)
        with torch._C.DisableTorchFunction():
            try:
                return method(self, *args, **kwargs)
            finally:
                self.listener.calling = calling
                if before is not None:
                    sys.setprofile(before)
    return called


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Nobody listens to what runs inside: schemes and observers are no code of the model."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_standard(code: types.CodeType) -> bool:
    """Is it of Python's own library, or a method that a dataclass was given? Such code asks for types of its own accord."""
    file = code.co_filename
    return (file.startswith(STANDARD) and "site-packages" not in file) or (file == "<string>" and code.co_name.startswith("__"))


SUPPRESS = {contextlib.suppress.__enter__.__code__: 1, contextlib.suppress.__exit__.__code__: -1}
WRAPPERS = (torch.utils._contextlib.__file__, torch._compile.__file__, os.path.join(os.path.dirname(torch.__file__), "_dynamo"))
STANDARD = sysconfig.get_path("stdlib")
_C_FUNCTIONS = {id, *(f for f in (*_SETTING_OF, *_REFUSAL_OF) if not isinstance(f, types.CodeType))}


def _same_state(generator: Any, before: Any) -> bool:
    now = state_of(generator)
    return now is not None and now[0] == before


def _may_be_tensor(path: str, names: dict[str, Any]) -> bool:
    """Not what a class or a module has under that name, such as a member of an enumeration."""
    first, _, rest = path.partition(".")
    held = names.get(first)
    for name in rest.split("."):
        if not isinstance(held, (type, types.ModuleType)):
            return True
        held = inspect.getattr_static(held, name, None)
    return held is None or isinstance(held, torch.Tensor)             # None may be one later


def _differs(name: str, held: Any, before: Any) -> bool:
    try:
        if isinstance(held, dict) and not isinstance(before, dict):
            return held.get(name) is not before and bool(held.get(name) != before)
        if isinstance(held, set):
            return bool(held != before)
        if isinstance(held, dict) and list(held) != list(before):
            return True
        items, were = (held.values(), before.values()) if isinstance(held, dict) else (held, before)
        return len(held) != len(before) or any(a is not b for a, b in zip(items, were, strict=True))
    except Exception:
        return True


def place(frame: types.FrameType) -> str:
    """``modeling.py:120``."""
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
