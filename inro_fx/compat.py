"""The functions of inro's uniform quantizer, with its numbers: every parameter of a model, one scale for each, in place.

    scale = quant_max / max|w|  (1 if w is zero)     codes = clamp(round(scale * w), -quant_max, quant_max)     w := codes / scale

`compressed_size` adds what an entropy coder would make of the codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError, SchemeError
from .numerics.metrics import entropy

__all__ = ["CompressedSize", "compressed_size", "uniform_dequantize", "uniform_quantize"]

_DTYPES = ((2**7, torch.int8), (2**15, torch.int16), (2**31, torch.int32), (2**63, torch.int64))
_LARGEST = float(2**63 - 1024)         # the last float64 below 2**63


def uniform_quantize(model: nn.Module, quant_max: int) -> tuple[nn.Module, dict[str, dict[str, Tensor]]]:
    """Rounds every parameter of ``model``, biases and norms included, in place; returns the model and the codes.

    The codes are ``{name: {"quant": codes, "scale": scale}}`` on the CPU, detached: ``quant`` has the parameter's shape and the
    smallest of int8, int16, int32 and int64 that holds +-quant_max, ``scale`` is a float32 scalar. A tied parameter appears once,
    under its first name.

    Raises ValueError (`SchemeError`) for quant_max below 1 or of 2**63 and more, and `ModelError` naming a parameter that is
    complex, an integer, or holds NaN or infinity; the model is then unchanged.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(model.weight, 0.5)
    >>> model, codes = uniform_quantize(model, 7)
    >>> codes["weight"]["quant"], codes["weight"]["scale"]
    (tensor([[7, 7]], dtype=torch.int8), tensor(14.))
    """
    if isinstance(quant_max, bool) or not isinstance(quant_max, int):
        raise SchemeError(f"quant_max must be an integer, got {quant_max!r}")
    if not 1 <= quant_max < 2**63:
        raise SchemeError(f"quant_max must be at least 1 and below 2**63, got {quant_max}")
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(f"{name} is {kind}: only real floating-point parameters are quantized")
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise ModelError(f"{name} holds NaN or infinity: mend it, or leave the model as it is")
    dtype = next(d for limit, d in _DTYPES if quant_max < limit)
    codes = {name: _codes_of(parameter.detach(), quant_max, dtype) for name, parameter in parameters.items()}
    return uniform_dequantize(model, codes), codes


def _codes_of(weight: Tensor, quant_max: int, dtype: torch.dtype) -> dict[str, Tensor]:
    work = weight.to(torch.float64 if quant_max > 2**24 or weight.dtype == torch.float64 else torch.float32)
    largest = work.abs().amax() if work.numel() else work.new_zeros(())
    scale = torch.where(largest > 0, (quant_max / largest).float(), 1.0)
    scale = torch.where(scale.isfinite(), scale, 1.0)             # numbers too small for a float32 scale
    rounded = (work * scale.to(work.dtype)).round().clamp(-min(float(quant_max), _LARGEST), min(float(quant_max), _LARGEST))
    return {"quant": rounded.to(dtype).cpu(), "scale": scale.cpu()}


def uniform_dequantize(model: nn.Module, model_dict: Mapping[str, Mapping[str, Tensor]]) -> nn.Module:
    """Sets every parameter that ``model_dict`` names to ``quant.float() / scale.float()``, in place; returns the model.

    Raises `ModelError` naming what does not fit (a parameter that one of the two lacks, another shape) before it changes anything.

    >>> model, codes = uniform_quantize(torch.nn.Linear(3, 2), 100)
    >>> again = uniform_dequantize(torch.nn.Linear(3, 2), codes)
    >>> torch.equal(again.weight, model.weight)
    True
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = sorted(set(dict(model.named_parameters())) - set(model_dict))
    unknown = sorted(set(model_dict) - set(parameters))
    if missing or unknown:
        raise ModelError(f"the codes do not fit this {type(model).__name__}: " + "; ".join(
            [f"no codes for {n}" for n in missing[:5]] + [f"no parameter {n}" for n in unknown[:5]]))
    for name, entry in model_dict.items():
        if entry["quant"].shape != parameters[name].shape:
            raise ModelError(f"{name} has shape {list(parameters[name].shape)}, and its codes {list(entry['quant'].shape)}")
    with torch.no_grad():
        for name, entry in model_dict.items():
            parameters[name].copy_(entry["quant"].float() / entry["scale"].float())
    return model


@dataclasses.dataclass(frozen=True)
class CompressedSize:
    """What an ideal entropy coder makes of codes: ``tensors`` are the bits per parameter of each tensor (its Shannon bound),
    ``bits_per_parameter`` their mean over all parameters, ``bytes`` the whole with a float32 scale for each tensor."""

    tensors: dict[str, float]
    bits_per_parameter: float
    bytes: float


def compressed_size(model_dict: Mapping[str, Mapping[str, Any]]) -> CompressedSize:
    """The size of the codes of `uniform_quantize` after ideal entropy coding, each tensor with its own distribution.

    H = -sum p(code) * log2 p(code) bits for each parameter (Shannon, 1948).

    >>> size = compressed_size({"w": {"quant": torch.tensor([0, 0, 1, 2], dtype=torch.int8), "scale": torch.tensor(1.0)}})
    >>> size.bits_per_parameter
    1.5
    """
    tensors = {name: entropy(entry["quant"]) for name, entry in model_dict.items()}
    counts = {name: entry["quant"].numel() for name, entry in model_dict.items()}
    bits = sum(tensors[n] * counts[n] for n in tensors)
    return CompressedSize(tensors, bits / max(sum(counts.values()), 1), bits / 8 + 4 * len(tensors))
