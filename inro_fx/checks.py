"""What `quantize_graph` refuses before it does any work: by name, and with the way out."""

from __future__ import annotations

import itertools
import sys

import torch
from torch import nn

from .errors import ModelError
from .passes.run.classes import needs_rebasing
from .passes.run.weights import PackedWeights

__all__ = ["check_model"]


def check_model(model: nn.Module, skeleton: bool = False, inplace: bool = False) -> None:
    """Refuses, by name and with the way out, what cannot be quantized; a ``skeleton`` may be on the meta device."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    kinds: tuple = ((nn.DataParallel, "pass model.module"), (nn.parallel.DistributedDataParallel, "pass model.module"),
             (torch.jit.ScriptModule, "pass the module that it was scripted from"),
             (torch._dynamo.OptimizedModule if "torch._dynamo" in sys.modules else (),
              "pass the module that was compiled, and compile the result"))
    for path, module in model.named_modules():
        for kind, advice in kinds:
            if isinstance(module, kind):
                where = f"{path} is a {type(module).__name__}, which" if path else f"a {type(module).__name__}"
                raise ModelError(f"{where} cannot be quantized: {advice}")
    if "_inro_prepared" in model.__dict__:
        raise ModelError("the model is prepared already: run data through it, or train it, and give it to convert_graph")
    if "_inro" in model.__dict__ or any(isinstance(m, PackedWeights) for m in model.modules()):
        raise ModelError("the model is already quantized by inro_fx: quantize the float model instead")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise ModelError(f"{name} is not initialized yet: run the model once before quantizing it")
        if tensor.device.type == "meta" and not skeleton:
            raise ModelError(f"{name} is on the meta device and has no data: load the weights before quantizing")
    fixed = next((p for p, m in model.named_modules() if inplace and needs_rebasing(type(m))), None)
    if fixed is not None:
        raise ModelError(f"{fixed or 'the model'} is a {type(model.get_submodule(fixed)).__name__}, whose class has a base before "
                         f"nn.Module and so cannot be changed in place: quantize with inplace=False")
