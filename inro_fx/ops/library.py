"""Registration of operators, at the lowest overhead that keeps autograd, torch.compile and torch.export working.

Every operator has three overloads of one schema. The plain one carries the gradient's formula, in Python. ``inference`` is the
same without one: what captured graphs call where nothing wants a gradient, and what the plain one comes down to where gradients are
switched off, so that a call reaches its kernel without Python in between. ``reference`` is what runs where no kernel
covers the case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from ..kernels import best_level

__all__ = ["as_rows", "as_shape", "check_dtypes", "define"]

_library = torch.library.Library("inro_fx", "DEF")


def as_rows(x: Tensor) -> Tensor:
    """[..., in] -> [rows, in], also where there are no inputs or no rows."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def as_shape(fresh: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A fresh tensor in another shape that is no view of it: autograd lets nobody change an operator's view in place."""
    return fresh if fresh.shape == shape else torch.ops.aten._unsafe_view.default(fresh, shape)


def check_dtypes(x: Tensor, bias: Tensor | None) -> None:
    """Raises what a float linear raises: RuntimeError for inputs that are no floats, or not of the bias's dtype."""
    if not x.is_floating_point():
        raise RuntimeError(f"a quantized linear needs floating-point inputs, got {x.dtype}")
    if bias is not None and bias.dtype != x.dtype:
        raise RuntimeError(f"a linear with {x.dtype} inputs has a {bias.dtype} bias")


def _on_one_device(name: str, fake: Callable) -> Callable:
    """``fake`` with a refusal of tensors on several devices: one of them on meta brings a call here, whatever the others are."""
    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Tensor:
        devices = {str(a.device) for a in (*args, *kwargs.values()) if isinstance(a, Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"inro_fx::{name} got tensors on several devices: {', '.join(sorted(devices))}")
        return fake(*args, **kwargs)
    return checked


def define(schema: str, reference: Callable, fake: Callable, setup: Callable | None = None,
           backward: Callable | None = None, cpu: Callable | None = None) -> Any:
    """Registers ``inro_fx::<schema>`` and gives back the overload to call.

    ``reference`` runs on any device, ``cpu`` in its place on CPUs where no kernel does, ``fake`` gives shapes and dtypes only;
    ``setup(ctx, inputs, output)`` and ``backward(ctx, grad)`` are the autograd formula, as in ``torch.library.register_autograd``;
    forward-mode differentiation raises NotImplementedError, and a captured model then runs the user's own forward.
    """
    name, _, signature = schema.partition("(")
    fake = _on_one_device(name, fake)
    for overload in (name, f"{name}.inference", f"{name}.reference"):
        _library.define(f"{overload}({signature}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        _library.impl(overload, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"inro_fx::{overload}", fake, lib=_library)
        if cpu is not None and (best_level() < 0 or overload.endswith(".reference")):
            _library.impl(overload, cpu, "CPU")
        if overload != name:
            _library.impl(overload, torch.library.fallthrough_kernel, "Autograd")
    packet = getattr(torch.ops.inro_fx, name)
    if backward is not None:
        _library.impl(name, _with_formula(packet, setup, backward), "Autograd", with_keyset=True)
    return packet.default


def _with_formula(packet: Any, setup: Callable | None, backward: Callable) -> Callable:
    """What torch.library.register_autograd would register; but with gradients switched off, the overload ``inference``."""
    formula = make_autograd_impl(packet.default, Info(backward, setup))

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise NotImplementedError(f"{packet} has no forward-mode derivative")
        if torch.is_grad_enabled() or torch.compiler.is_exporting():       # an exported program may be trained later
            return formula(keyset, *args, **kwargs)
        return packet.inference(*args, **kwargs)
    return call
