"""Code that stays Python, while it runs on the example: its calls of modules are captured, and what it does with weights is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..carriers import observed_use
from ..constants import ABSENT
from ..run.classes import compiling
from .frames import active

if TYPE_CHECKING:
    from .session import Session

__all__ = ["PythonRun", "UseRecorder"]


class PythonRun:
    """What is at work while Python code runs that is not traced: its calls of modules are captured, everything else is its own."""

    def __init__(self, session: Session):
        self.session = session

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        return self.session.call_from_python(module, args, kwargs)

    def read(self, module: nn.Module, name: str, value: Tensor) -> Tensor:
        return value

    def unpacked(self, module: nn.Module, name: str) -> Any:
        """The same tensor at each read, so that its uses are seen."""
        path = self.session.path_of(module)
        full = f"{path}.{name}" if path else name
        return self.session.tensor(full) if path is not None and full in self.session.packed else ABSENT

    def write(self, module: nn.Module, name: str, value: Any) -> None:
        """Its own affair."""


class UseRecorder(TorchFunctionMode):
    """Sees which operators the Python code of a module feeds its weights to."""

    def __init__(self, session: Session, path: str):
        super().__init__()
        self.session, self.path = session, path

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if compiling():
            return result
        for tensor in (result,) if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ():
            if isinstance(tensor, Tensor):
                self.session.made[id(tensor)] = tensor
        if isinstance(active(), PythonRun):
            for use in observed_use(func, args, kwargs, self.session.alias_of):
                self.session.python_uses.setdefault((self.path, use.constant, use.op), use)
        return result
