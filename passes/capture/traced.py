"""How module calls reach the tracer: while a model is captured, its modules are of classes that ask who is at work.

Only instances of the copy that is captured change their class, and only for as long: nothing that another thread can see is touched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..constants import ABSENT
from ..run.changes import global_hooks
from ..run.classes import Part, add_part, has_part, needs_rebasing, remove_part
from .frames import active, at_work

__all__ = ["Traced", "listening", "own_call", "quiet"]


class Traced(Part):
    """Calls, reads of tensors and writes of attributes go to the tracer of this thread, where there is one."""

    order = 5

    @classmethod
    def compose(cls, user: type[Any], namespace: dict[str, Any]) -> tuple[type, ...]:
        namespace["__call__"] = cls.__call__                # before that of a part which has one for the class itself
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = active()
        call = functools.partial(call_quietly, self) if tracer is not None and global_hooks() else super().__call__
        return call(*args, **kwargs) if tracer is None else tracer.call_module(self, args, kwargs, call)

    def __getattr__(self, name: str) -> Any:
        tracer = active()
        codes = tracer is not None and name in self.__dict__.get("_inro_packed", ()) and self._parameters.get(name) is None
        value = tracer.unpacked(self, name) if codes else ABSENT          # unpacked once for the trace, and not by it
        value = super().__getattr__(name) if value is ABSENT else value
        return tracer.read(self, name, value) if tracer is not None and isinstance(value, Tensor) else value

    def __setattr__(self, name: str, value: Any) -> None:
        tracer = active()
        if tracer is not None and not _same(self.__dict__.get(name, ABSENT), value):
            tracer.write(self, name, value)
        super().__setattr__(name, value)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def own_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module past the tracer's ear: hooks, and the user's forward."""
    if global_hooks():
        return call_quietly(module, *args, **kwargs)
    return super(Traced, module).__call__(*args, **kwargs) if has_part(module, Traced) else module(*args, **kwargs)  # type: ignore[misc]


def call_quietly(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A module's call with its own hooks, and without those on all modules of the process: they shall not hear of our runs."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        elif (given := hook(module, args)) is not None:
            args = given if isinstance(given, tuple) else (given,)
    result = module.forward(*args, **kwargs)
    for key, hook in list(module._forward_hooks.items()):
        other = hook(module, args, kwargs, result) if key in module._forward_hooks_with_kwargs else hook(module, args, result)
        result = result if other is None else other
    return result


class _Quiet:
    """At work while the compiler runs a model in a process with hooks on all modules."""

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        return call(*args, **kwargs)

    def read(self, module: nn.Module, name: str, value: Tensor) -> Tensor:
        return value

    def unpacked(self, module: nn.Module, name: str) -> Any:
        return ABSENT

    def write(self, module: nn.Module, name: str, value: Any) -> None:
        """Its own affair."""


@contextlib.contextmanager
def quiet(root: nn.Module) -> Iterator[None]:
    """Runs of ``root`` inside do not fire hooks on all modules of the process."""
    if not global_hooks() or active() is not None:
        yield
        return
    with listening(root), at_work(_Quiet()):
        yield


@contextlib.contextmanager
def listening(root: nn.Module) -> Iterator[None]:
    """The modules below ``root`` are of traced classes inside."""
    changed = []
    try:
        for module in root.modules():
            changeable = hasattr(type(module), "_inro_parts") or not needs_rebasing(type(module))
            if changeable and not has_part(module, Traced):
                changed.append(module)
                add_part(module, Traced)
        yield
    finally:
        for module in changed:
            remove_part(module, Traced)
