"""What the root of a quantized model needs beside its graphs and weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..failures import StateError
from .weights import attach_none

__all__ = ["finish"]


def finish(root: nn.Module, record: Any) -> None:
    """Gives the root the record of what was done, and makes it refuse the float model's weights before anything is copied."""
    attach_none(root)
    root.__dict__["_inro"] = record
    root.register_load_state_dict_pre_hook(_check_state)


def _check_state(root: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for path, module in root.named_modules(prefix=prefix.removesuffix(".")):
        for name, packed in vars(module).get("_inro_packed", {}).items():
            full = f"{path}.{name}".lstrip(".")
            if full in state and not any(f"{path}.{buffer}".lstrip(".") in state for buffer in packed.buffers):
                raise StateError(f"{full} in this state_dict is a float weight, and the model holds codes ({packed.buffers[0]}): "
                                 f"load it into the float model and quantize that, or give the state_dict of a quantized model")
