"""The classes of modules that a compiler pass has changed: subclasses of the user's class, with parts before it.

``isinstance``, methods, properties and attributes of the user's class stay. `add_part` and `remove_part` change the class of one
instance; nobody else's class is touched.
"""

from __future__ import annotations

import abc
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.modules import module as torch_module

from ..failures import ModelError

__all__ = ["TORCHS", "Part", "add_part", "compiling", "defines", "has_part", "needs_rebasing", "rebased", "remove_part", "user_class"]

TORCHS = frozenset(vars(nn.Module())) | {"_is_torch_compile"}      # the attributes that every module has, and that torch.compile sets


class Part(nn.Module):
    """What stands before the user's class in the classes made here; ``order``: the lowest comes first, ``own``: a class an instance."""

    order = 0
    own = False

    def __init_subclass__(cls, **_: Any) -> None:
        """A user's own __init_subclass__ does not hear of them."""

    @classmethod
    def compose(cls, user: type, namespace: dict[str, Any]) -> tuple[type, ...]:
        """Adds to the namespace of a class made for ``user``; the classes that stand behind it."""
        return ()

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """The float parameters; where there are none, and code that is not torch's asks, weights unpacked one by one.

        So that ``next(self.parameters()).device`` finds one in a model that has no biases.
        """
        nothing = True
        for item in super().named_parameters(prefix, recurse, remove_duplicate):
            nothing = False
            yield item
        for path, module in self.named_modules(prefix=prefix) if nothing and recurse and not _torch_asks() else ():
            for name in vars(module).get("_inro_packed", {}):
                yield f"{path}.{name}" if path else name, getattr(module, name)

    def __prepare_scriptable__(self) -> Any:
        raise ModelError("torch.jit.script compiles the source of a forward, and this model runs a captured graph: use torch.jit.trace, "
                         "torch.export or torch.compile")


def compiling() -> bool:
    """Is a compiler of torch reading this code? (``torch.compiler.is_compiling`` also says so while another thread compiles.)"""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def _torch_asks() -> bool:
    """Is it torch that consumes the generator which calls this, directly or through ``parameters()``?"""
    if compiling():
        return False
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == torch_module.__file__:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


class Rebased(Part):
    """Stands before a class such as ``Net(ABC, nn.Module)``, whose instances Python does not let change their class."""


def user_class(module: nn.Module) -> type[Any]:
    """The class that the user wrote."""
    return getattr(type(module), "_inro_user_class", type(module))


def has_part(module: nn.Module, part: type[Part]) -> bool:
    return part in getattr(type(module), "_inro_parts", ())


_made: weakref.WeakValueDictionary[tuple[int, tuple[type, ...]], type] = weakref.WeakValueDictionary()


def _composed(user: type[Any], parts: tuple[type[Part], ...]) -> type[Any]:
    """A class of these parts before ``user``; shared while one lives, unless a part wants a class of each instance's own.

    (The key is an id: the class that is found keeps its base alive, and with it the id.)
    """
    key = (id(user), parts)
    made: Any = None if any(part.own for part in parts) else _made.get(key)
    if made is not None:
        return cast(type[Any], made)
    namespace: dict[str, Any] = {"_inro_user_class": user, "_inro_parts": parts, "__module__": user.__module__,
                                 "__qualname__": user.__qualname__, "__doc__": user.__doc__, "__reduce_ex__": _reduce,
                                 "__new__": lambda cls, *args, **kwargs: user(*args, **kwargs)}     # type(q)() is a plain one
    if hasattr(user, "save_pretrained"):
        namespace["save_pretrained"] = _refuse_to_save
    after: tuple[type, ...] = ()
    for part in parts:
        after += part.compose(user, namespace)
    meta = type(user)
    make: Any = meta if meta in (type, abc.ABCMeta) else functools.partial(type.__new__, meta)     # a registry stays as it is
    made = _made[key] = make(user.__name__, (*parts, *(() if parts else (Rebased,)), user, *after), namespace)
    return cast(type[Any], made)


def _refuse_to_save(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Stands in for the ``save_pretrained`` of a library, whose ``from_pretrained`` would fill in random weights without a word."""
    raise ModelError("save_pretrained would write codes that from_pretrained does not know: write the model with inro_fx.save, and read it "
                     "with inro_fx.load")


_fixed: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def needs_rebasing(user: type[Any]) -> bool:
    """Can an instance of this class not become one of a subclass?"""
    if user not in _fixed:
        probe: Any = object.__new__(user)
        try:
            probe.__class__ = _composed(user, (Rebased,))
            _fixed[user] = False
        except TypeError:
            _fixed[user] = True
    return _fixed[user]


def rebased(module: nn.Module) -> nn.Module:
    """An empty instance of a class like the module's, but of which the class can change."""
    shell: nn.Module = object.__new__(_composed(user_class(module), ()))
    return shell


def add_part(module: nn.Module, part: type[Part]) -> None:
    parts = getattr(type(module), "_inro_parts", ())
    if part not in parts:
        module.__class__ = _composed(user_class(module), tuple(sorted((*parts, part), key=lambda p: p.order)))


def remove_part(module: nn.Module, part: type[Part]) -> None:
    if has_part(module, part):
        parts = tuple(p for p in type(module)._inro_parts if p is not part)
        user = user_class(module)
        module.__class__ = _composed(user, parts) if parts or needs_rebasing(user) else user


def defines(user: type[Any], name: str) -> bool:
    """Does the user's class, or one of its own bases, define this method?"""
    return any(name in vars(kind) for kind in user.__mro__ if kind not in (object, nn.Module))


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    user = user_class(self)
    if issubclass(user, fx.GraphModule) and "<locals>" in user.__qualname__:
        raise ModelError("a result made from a torch.fx.GraphModule cannot be pickled, for its class exists in this process only: "
                         "quantize the module that was traced, or keep the state_dict")
    state = self.__getstate__() if hasattr(type(self), "__getstate__") else self.__dict__.copy()
    return _rebuild, (user, type(self)._inro_parts), state


def _rebuild(user: type[Any], parts: tuple[type[Part], ...]) -> nn.Module:
    empty: nn.Module = object.__new__(_composed(user, parts))
    return empty


def copy_of(function: Any, wraps: Any) -> types.FunctionType:
    """A function of its own, with a code object of its own, and the name and signature of another.

    torch.compile counts what it has compiled by code object.
    """
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return functools.wraps(wraps)(own)          # type: ignore[return-value]
