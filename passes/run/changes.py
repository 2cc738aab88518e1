"""What was changed in a captured model since its graph was made, so that the graph does not stand for it any more."""

from __future__ import annotations

import dataclasses
import inspect
import types
import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..constants import ABSENT
from ..program import Program
from .classes import TORCHS, user_class

__all__ = ["Watch", "global_hooks", "mentioned", "mentioned_by", "watch"]

_GLOBAL = tuple(getattr(torch_module, name) for name in (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def global_hooks() -> bool:
    """Are there hooks on all modules of the process?"""
    return any(_GLOBAL)


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The hooks that calls of a module run, in order."""
    found: tuple[Any, ...] = ()
    for name in HOOKS:
        hooks = module.__dict__[name]
        if hooks:
            found += tuple(hooks.items())
    return found


class _Any:
    """Equal to everything: in the place of our own attributes of the root, among which the note of its state is."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__: Any = None


ANY = _Any()


@dataclasses.dataclass(slots=True)
class Inside:
    """A module whose code a graph stands for, as it was when the graph was made.

    ``siblings`` is the dict of modules of its parent (None for the captured module itself, and then ``module`` is None, too, for what a
    module holds should not hold the module), ``state`` its attributes, ``counts`` how
    many modules, parameters and buffers it had, ``nothing`` its tensors that were None, each with the dict that it is in.
    """

    siblings: dict[str, Any] | None
    name: str
    module: nn.Module | None
    state: dict[str, Any]
    hooks: tuple[Any, ...]
    counts: tuple[int, int, int]
    nothing: tuple[tuple[dict[str, Any], str], ...]


@dataclasses.dataclass
class Watch:
    """What a graph depends on beside its inputs: modules, the contents of containers that their code may have read, and what its code
    was told of stored tensors, ``fixed``: the dict that holds it, its name, and what it was told of shape, dtype and requires_grad.
    ``read`` are those that the graph reads and user's code names, each with the dict that it is in: they are no None."""

    inside: list[Inside]
    containers: list[tuple[Any, Any]]
    fixed: list[tuple[Any, str, Any, Any, Any]]
    read: list[tuple[Any, str]]

    def __post_init__(self) -> None:
        """The same as rows, for a look at everything that costs little where nothing was changed. The root is in none of them."""
        self._rows = [(i.siblings, i.name, i.module, now, i.state, now["_modules"], now["_parameters"], now["_buffers"], i.counts,
                       *(now[name] for name in HOOKS)) for i in self.inside if i.siblings is not None for now in (vars(i.module),)]
        self._plain = not any(i.hooks for i in self.inside)
        self._nothing = [pair for i in self.inside for pair in i.nothing]
        self._root = next((i for i in self.inside if i.siblings is None), None)

    def altered(self, root: nn.Module, lasting: bool = False) -> str | None:
        """What is no more as it was below ``root``; ``lasting``: apart from the mode, which every copy can tell."""
        return self._altered(root, lasting) if self._may_be_altered(root) else None

    def _may_be_altered(self, root: nn.Module) -> bool:
        """A quick look: False where nothing was."""
        if not self._plain or self._root is None or self._differs(self._root, root):
            return True
        try:
            for siblings, name, module, now, state, modules, parameters, buffers, counts, a, b, c, d in self._rows:
                if siblings[name] is not module or a or b or c or d or (len(modules), len(parameters), len(buffers)) != counts \
                        or now != state or vars(module) is not now:
                    return True
            if any(kind[name] is not None for kind, name in self._nothing) or any(kind[name] is None for kind, name in self.read):
                return True
            if any(container != before for container, before in self.containers):
                return True
        except Exception:                       # something is not there, or cannot be compared
            return True
        return self._other_form() is not None

    @staticmethod
    def _differs(inside: Inside, root: nn.Module) -> bool:
        now = root.__dict__
        return (len(now["_modules"]), len(now["_parameters"]), len(now["_buffers"])) != inside.counts or not is_same(now, inside.state)

    def _altered(self, root: nn.Module, lasting: bool) -> str | None:
        for inside in self.inside:
            module, siblings = inside.module or root, inside.siblings
            if siblings is not None and siblings.get(inside.name) is not module:
                return f"{inside.name} was replaced"
            now = module.__dict__
            if (len(now["_modules"]), len(now["_parameters"]), len(now["_buffers"])) != inside.counts:
                return f"modules or tensors of {inside.name} were added or removed"
            if siblings is not None and (inside.hooks or now["_forward_hooks"] or now["_forward_pre_hooks"] or now["_backward_hooks"]
                                         or now["_backward_pre_hooks"]) and hooks_of(module) != inside.hooks:
                return f"hooks on {inside.name}"
            for kind, name in inside.nothing:
                if kind.get(name) is not None:
                    return f"{inside.name}.{name} was set"
            if not is_same(now, inside.state) and (reason := _difference(inside, module, lasting)) is not None:
                return reason
        for container, before in self.containers:
            if not is_same(container, before):
                return "a dict, list or config object that its code may have read was changed"
        other = self._other_form()
        return None if other is None else f"{other} is another tensor, or has another form"

    def _other_form(self) -> str | None:
        """The first stored tensor that is not any more what the code was told."""
        for kind, name in self.read:
            if kind.get(name) is None:
                return name
        for kind, name, shape, dtype, wants_grad in self.fixed:
            held = kind.get(name)
            if held is None or (shape is not None and held.shape != shape) or (dtype is not None and held.dtype != dtype) \
                    or (wants_grad is not None and held.requires_grad is not wants_grad):
                return name
        return None


def watch(root: nn.Module, program: Program) -> Watch:
    """Notes how a module and those below it are now; those that the program's graph calls look after themselves."""
    called = tuple(str(n.target) + "." for n in program.graph.nodes if n.op == "call_module")
    inside, containers = [], {}
    for path, child in root.named_modules():
        if called and f"{path}.".startswith(called):
            continue
        parent, _, name = path.rpartition(".")
        siblings = root.get_submodule(parent)._modules if path else None
        own = child._modules, child._parameters, child._buffers
        inside.append(Inside(siblings, name or "the model", child if path else None, _state(child, of_root=not path),
                             hooks_of(child) if path else (),
                             (len(own[0]), len(own[1]), len(own[2])),
                             tuple((kind, n) for kind in own[1:] for n, t in kind.items() if t is None)))
        for name, value in vars(child).items():
            if name not in TORCHS and not name.startswith("_inro") and (container := _container(value)) is not None:
                containers[id(container)] = container, container.copy()
    held: list[tuple[Any, str, Any, Any, Any]] = [
        (*place, *form, None) for name, form in program.fixed.items() for place in _places(root, name)]
    users = {user_class(child) for child in root.modules()}
    asked = frozenset().union(*(mentioned(user) for user in users if not user.__module__.startswith("torch.")))
    names = dict.fromkeys(str(n.target) for n in program.graph.nodes if n.op == "get_attr")
    read = [place for name in names if name.rpartition(".")[2] in asked for place in _places(root, name)]
    if "requires_grad" in program.call.facts:
        held += [(m._parameters, name, None, None, p.requires_grad) for m in root.modules()
                 for name, p in m._parameters.items() if p is not None]
    return Watch(inside, list(containers.values()), held, read)


def _places(root: nn.Module, name: str) -> list[tuple[Any, str]]:
    """The dict of parameters or buffers that holds a tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = root.get_submodule(path)
    except AttributeError:
        return []
    return [(kind, leaf) for kind in (owner._parameters, owner._buffers) if kind.get(leaf) is not None]


def _state(module: nn.Module, of_root: bool) -> dict[str, Any]:
    return {name: ANY if of_root and name.startswith("_inro") else False if name == "training" else value
            for name, value in vars(module).items()}


def _container(value: Any) -> Any:
    """What can be changed inside an attribute without setting it: a dict, a list, the attributes of a config object."""
    if type(value) in (dict, list):
        return value
    try:
        attributes = getattr(value, "__dict__", None)
        plain = type(attributes) is dict and not callable(value) and not isinstance(value, (nn.Module, Tensor))
        return attributes if plain and not type(value).__module__.startswith("torch") else None
    except Exception:                           # of an object that answers no questions
        return None


def is_same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:                          # tensors or arrays, and not the same ones
        return False


def _difference(inside: Inside, module: nn.Module, lasting: bool) -> str | None:
    """Which attribute of a module is another one; None for what no graph can tell apart."""
    now = module.__dict__
    if now["training"] and not lasting and inside.siblings is not None:
        return "training mode"
    for name in {**inside.state, **now}:
        a, b = now.get(name, ABSENT), inside.state.get(name, ABSENT)
        if a is b or name.startswith("_inro") or name in TORCHS or is_same(a, b):
            continue
        user = user_class(module)
        if b is not ABSENT or hasattr(user, name) or name in mentioned(user):
            return f"{inside.name}.{name} was changed" if inside.siblings is not None else f"self.{name} was changed"
    return None


_mentioned: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def mentioned(user: type[Any]) -> frozenset[str]:
    """Every name and string in the code of a class: what it may read with getattr or hasattr."""
    if user not in _mentioned:
        found: set[str] = set()
        for kind in user.__mro__[:user.__mro__.index(nn.Module)]:
            for value in vars(kind).values():
                found |= mentioned_by(getattr(value, "__func__", getattr(value, "fget", value)))
        _mentioned[user] = frozenset(found)
    return _mentioned[user]


def mentioned_by(function: Any) -> set[str]:
    """The same of one function."""
    found: set[str] = set()
    function = inspect.unwrap(function)
    if isinstance(function, types.FunctionType):
        _names(function.__code__, found)
    return found


def _names(code: types.CodeType, found: set[str]) -> None:
    found.update(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, types.CodeType):
            _names(constant, found)


Watch.altered._dynamo_marked_constant = True  # torch.compiler.assume_constant_result
