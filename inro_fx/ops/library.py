"""Registration of operators, at the lowest overhead that keeps autograd, torch.compile and torch.export working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_shape", "define"]

_library = torch.library.Library("inro_fx", "DEF")


def as_shape(fresh: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A fresh tensor in another shape that is no view of it: autograd lets nobody change an operator's view in place."""
    return fresh if fresh.shape == shape else torch.ops.aten._unsafe_view.default(fresh, shape)


def define(schema: str, reference: Callable, fake: Callable, setup: Callable | None = None,
           backward: Callable | None = None, cpu: Callable | None = None) -> Any:
    """Registers ``inro_fx::<schema>`` and gives back the overload to call.

    ``reference`` runs on any device, ``cpu`` in its place on CPUs, ``fake`` gives shapes and dtypes only;
    ``setup(ctx, inputs, output)`` and ``backward(ctx, grad)`` are the autograd formula, as in ``torch.library.register_autograd``.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    if cpu is not None:
        _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"inro_fx::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"inro_fx::{name}", backward, setup_context=setup, lib=_library)
    return getattr(torch.ops.inro_fx, name).default
